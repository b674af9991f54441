"""NumpyBackend, as users meet it: which arrays are overwritten, which come back new, and which are refused."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from axes import require
from commands import python
from exactness import assert_same
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from optimizers import Tree
from tiers import later

from gradscale import DynamicScale, InvalidValueError, ScaleState, SkipSpikes, StepGuard
from gradscale_numpy import NumpyBackend

pytestmark = pytest.mark.numpy

Array = NDArray[Any]
NAMES = ["float16", "float32", "float64", "longdouble", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
DTYPES = [np.dtype(getattr(ml_dtypes, name, name)) for name in NAMES]


def state_of(scale: float = 8.0) -> ScaleState:
    """Return a state."""
    return DynamicScale(init_scale=scale).init(np.zeros(()))


def overwrite(backend: NumpyBackend, grads: list[Any]):
    """Unscale in place."""
    return backend.unscale(grads, state_of(), out=grads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_otherwise_new_plain_arrays_come_back(backend: NumpyBackend, dtype: np.dtype[Any]):
    grads = [np.array([8.0, -16.0], dtype), np.array(24.0, dtype), np.array([], dtype), dtype.type(8.0)]
    for grad in grads[:3]:
        grad.flags.writeable = False
    for wanted in (None, np.float32, np.dtype(np.float64), np.dtype(ml_dtypes.bfloat16)):
        got, count = backend.unscale(grads, state_of(), dtype=wanted)
        for after, before, expected in zip(got, grads, ([1.0, -2.0], 3.0, [], 1.0), strict=True):
            assert (type(after), after.flags.writeable, np.shares_memory(after, before)) == (np.ndarray, True, False)
            assert_same(after, np.asarray(expected, dtype if wanted is None else wanted))
        assert int(count) == 0
    assert grads[0].tolist() == [8.0, -16.0]
    # A scalar has nothing to be overwritten.
    (scalar, _), count = overwrite(backend, [grads[3], np.full(1, np.nan, dtype)])
    assert (type(scalar), scalar.shape, scalar.dtype, float(scalar), int(count)) == (np.ndarray, (), dtype, 1.0, 1)


class Mine(np.ndarray[Any, Any]):
    """A subclass whose arithmetic is not to be used."""

    def __array_finalize__(self, obj):
        self.note = getattr(obj, "note", "none")

    def __array_ufunc__(self, *args, **kwargs):
        raise AssertionError


def test_subclasses_are_overwritten_and_come_back_as_they_are(backend: NumpyBackend):
    mine = np.full(3, 8.0, np.float32).view(Mine)
    mine.note = "kept"
    masked = np.ma.masked_array([8.0, 16.0], mask=[False, True])
    grads = [mine, np.full((2, 2), 8.0, np.float16).view(np.matrix), masked]
    got, count = overwrite(backend, grads)
    assert [x is y for x, y in zip(got, grads, strict=True)] == [True] * 3
    assert (mine.note, int(count)) == ("kept", 0)
    assert [np.asarray(x.data).tolist() for x in got] == [[1.0] * 3, [[1.0, 1.0]] * 2, [1.0, 2.0]]
    assert type(backend.unscale([mine], state_of())[0][0]) is np.ndarray


# What cannot be overwritten, and what shares memory.


SHARED = r"gradients? \d and (\d|the array that it is written to).* share memory"


def require_refused(backend: NumpyBackend, grads: list[Array], out: list[Array], message: str = SHARED):
    before = [grad.copy() for grad in (*grads, *out)]
    with pytest.raises(InvalidValueError, match=message):
        backend.unscale(grads, state_of(), out=out)
    for grad, old in zip((*grads, *out), before, strict=True):
        np.testing.assert_array_equal(grad, old)


OVERLAPPING = as_strided(np.ones(3, np.float32), (4, 3), (0, 4))
COPY = r"gradient 1, shape \(2, 3\), float32, is read-only .* assign a copy \(grad\.copy\(\)\)"
REFUSED: dict[str, tuple[Array, str]] = {
    "empty": (np.broadcast_to(np.float32(1), (0, 3)), "read-only"),
    "read-only": (np.broadcast_to(np.ones((2, 3), np.float32), (2, 3)), COPY),
    "no stride": (OVERLAPPING, r"gradient 1, shape \(4, 3\), strides \(0, 4\), overlaps itself"),
    "half an item": (as_strided(np.ones(6, np.float32), (8,), (2,)), "gradient 1, .* overlaps itself"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_overwritten_is_refused_and_nothing_is_modified(backend: NumpyBackend, name: str):
    wrong, message = REFUSED[name]
    grads = [np.full(2, 8.0, np.float32), wrong, np.full(2, 8.0, np.float32)]
    require_refused(backend, grads, grads, message)
    # So is one that is only written to.
    sources = [grads[0], np.full(wrong.shape, 8.0, np.float32)]
    require_refused(backend, sources, [np.zeros(2, np.float32), wrong], message)
    # Into new arrays it goes.
    got, count = backend.unscale(grads, state_of())
    np.testing.assert_array_equal(got[1], wrong / 8)
    assert int(count) == 0
    # What is empty overlaps nothing.
    empty = as_strided(np.ones(3, np.float32), (4, 0), (0, 0))
    assert overwrite(backend, [empty])[0][0] is empty


SIZE = 12
VIEWS = st.builds(slice, st.integers(0, SIZE), st.integers(0, SIZE), st.sampled_from([1, 1, 2, 3, -1, -2]))


@given(st.lists(st.tuples(VIEWS, st.none() | st.none() | st.integers(0, SIZE)), max_size=4))
def test_views_of_one_buffer_are_refused_where_they_share_an_element(
    backend: NumpyBackend, pairs: list[tuple[slice, int | None]]
):
    """Each is unscaled in place, or into a master that begins somewhere."""
    room = np.full(2 * SIZE, 8.0, np.float32)
    read = [range(SIZE)[view] for view, _ in pairs]
    grads = [room[:SIZE][view] for view, _ in pairs]
    starts = [start for _, start in pairs]
    written = [a if start is None else range(start, start + len(a)) for a, start in zip(read, starts, strict=True)]
    out = [x if start is None else room[start : start + len(x)] for x, start in zip(grads, starts, strict=True)]
    places = [k for one in written for k in one]
    elsewhere = [k for one, start in zip(read, starts, strict=True) if start is not None for k in one]
    if len(set(places)) < len(places) or set(places) & set(elsewhere):
        require_refused(backend, grads, out)
    else:
        backend.unscale(grads, state_of(), out=out)
        assert room.tolist() == [1.0 if k in places else 8.0 for k in range(2 * SIZE)]


@pytest.mark.parametrize("shape", [(6000,), (300, 300)], ids=str)
def test_large_views_are_refused_and_their_parts_are_not(backend: NumpyBackend, shape: tuple[int, ...]):
    whole = np.full(shape, 8.0, np.float32)
    for grads in ([whole, whole.T], [whole, np.ones(3, np.float32), whole[shape[0] // 2 :]], [whole, whole]):
        require_refused(backend, grads, grads)
        new, _ = backend.unscale(grads, state_of())
        assert (new[0] == 1.0).all()
    for grads in (list(np.split(whole, 10)), list(whole.reshape(-1, 3).T)):
        grads[0][...] = 8.0
        backend.unscale(grads, state_of(), out=grads)
        assert (grads[0] == 1.0).all()


# Its other methods, and which kernel it takes.


BROKEN = "import types; sys.modules['numba'] = types.ModuleType('numba'); sys.modules['numba'].__spec__ = sys.__spec__"


@pytest.mark.parametrize(
    ("before", "fast", "kernel"),
    [
        ("sys.modules['numba'] = None", (None,), "kernels"),
        # As it fails beside a NumPy that is too new for it.
        (BROKEN, (None,), "kernels"),
        ("os.environ['NUMBA_DISABLE_JIT'] = '1'", (None, True), "kernels"),
        ("os.environ['GRADSCALE_NUMPY_FAST'] = '0'", (None, False), "kernels"),
        ("os.environ['GRADSCALE_NUMPY_FAST'] = '1'", (None, True), "fast"),
    ],
    ids=["without numba", "with a broken one", "where it compiles nothing", "forbidden", "allowed"],
)
def test_the_kernel_is_chosen_also_by_what_was_pickled(before: str, fast: tuple[bool | None, ...], kernel: str):
    if True in fast:
        require("fast")
    code = f"""
import os, pickle, sys
{before}
import numpy as np, gradscale
from gradscale_numpy import NumpyBackend
state = gradscale.DynamicScale(init_scale=8.0).init(np.zeros(()))
for fast in {fast}:
    backend = NumpyBackend(fast=fast)
    for _ in range(2):
        [got], count = backend.unscale([np.float32([8.0])], state)
        backend.summarize([got])
        print(got.tolist(), int(count), backend._unscale_all.__module__)
        backend = pickle.loads(pickle.dumps(backend))
        os.environ["GRADSCALE_NUMPY_FAST"] = os.environ.get("GRADSCALE_NUMPY_FAST", "1") if fast is None else "0"
"""
    completed = python("-c", code)
    assert completed.stdout.split() == ["[1.0]", "0", f"gradscale_numpy.{kernel}"] * len(fast) * 2, completed.stderr


def test_arrays_of_any_strides_are_multiplied_in_place(backend: NumpyBackend):
    whole = np.full((40, 2), 8.0, np.float32)
    arrays = [*whole[:, 0].reshape(40, 1), whole[::2, 1], np.full((2, 3), 8.0, np.float32).T]
    assert backend.multiply_in_place(arrays, np.float32(0.5)) is arrays
    assert whole.tolist() == [[4.0, 4.0], [4.0, 8.0]] * 20
    assert (arrays[-1] == 4.0).all()


@pytest.mark.parametrize("state", ["full", *later("ranks", "emptied")])
def test_machine_code_that_cannot_be_kept_or_read_is_compiled_anew(state: str, tmp_path):
    require("fast")
    code = """
import resource, sys
import numpy as np, gradscale, gradscale_numpy
if sys.argv[1] == "full":
    # No file may grow, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
backend, state = gradscale_numpy.NumpyBackend(fast=True), gradscale.DynamicScale(init_scale=8.0).init(np.zeros(()))
[got], count = backend.unscale(given := [np.float32([8.0])], state, out=given)
print(got.tolist(), int(count))
"""
    runs = ["full"] if state == "full" else ["fine", "emptied"]
    for run in runs:
        if run == "emptied":
            kept = [path for path in tmp_path.rglob("*") if path.suffix in (".nbi", ".nbc")]
            assert kept
            for path in kept:
                path.write_bytes(b"")
        completed = python("-c", code, run, NUMBA_CACHE_DIR=str(tmp_path))
        assert completed.stdout.split() == ["[1.0]", "0"], completed.stderr


def clipped(dtype: str, value: float, max_norm: float) -> Any:
    """Return the verdict, the norm and the gradients of a guard's step."""
    with np.errstate(under="ignore"):
        guard, optimizer = StepGuard(), Tree([np.full(4, value, dtype)])
    norm = guard.unscale_(optimizer, max_norm=max_norm)
    guard.step(optimizer)
    return guard.last_step(optimizer).reason, float(norm), optimizer.grads[0].tolist()


def adapted(policy: DynamicScale, nonfinite: int) -> Any:
    """Return a policy's next states."""
    state = policy.init(np.zeros(()))
    return policy.update(state, nonfinite=np.int32(nonfinite)), policy.backoff(state)


def judged(rule: SkipSpikes) -> Any:
    """Return what a rule says of losses, and learns from them."""
    state, said = rule.init(np.zeros(())), []
    for loss in (1.0, 1e-300, 1e300, np.nan, np.inf, 1e-45):
        said.append(rule.judge(state, np.float64(loss)))
        state = rule.learn(state, np.float64(loss), skipped=said[-1])
    return said, state


NARROW = {"backoff_factor": 0.3, "growth_factor": 1.7, "growth_interval": 1}
ROUNDED: dict[str, tuple[Any, ...]] = {
    **{
        f"{dtype} {value:g}, max_norm {most:g}": (clipped, dtype, value, most)
        for dtype, values in {
            "float16": (6e4, 6e-8),
            "float32": (3e38, 1e38, 1e-45),
            "float64": (1e300, 1e-300),
        }.items()
        for value, most in itertools.product(values, (1.0, 1e-300, 1e300))
    },
    "backoff": (adapted, DynamicScale(init_scale=2.0**-126, **NARROW), 1),
    "growth": (adapted, DynamicScale(init_scale=3e38, **NARROW), 0),
    "spikes": (judged, SkipSpikes(window=4, min_values=2)),
    "bound": (judged, SkipSpikes(above=5.0)),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_a_program_that_lets_numpy_raise_gets_the_same_steps_scales_and_spikes(name: str):
    call, *given = ROUNDED[name]
    with np.errstate(all="ignore"):
        expected = repr(call(*given))
    with np.errstate(all="raise"):
        assert repr(call(*given)) == expected
