"""check_backend and check_collectives: right adapters and groups pass, and each kind of wrong one fails."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from array_api_compat import array_namespace
from axes import require
from libraries import Library
from scenarios import Around
from tiers import later

import gradscale
from gradscale.core import arithmetic, summaries
from gradscale.core.backend import Backend
from gradscale.testing import ThreadCollectives, check_backend, check_collectives, run_ranks

# See conftest.py.
LONG = True

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


class Core(Backend):
    """The pure core as NumPy's adapter: what the wrong ones below differ from."""

    def example(self):
        return np.zeros((), np.float32)


@pytest.mark.numpy
@pytest.mark.parametrize("name", ["float16", *later("ranks", "float64", "longdouble", "complex64", "bfloat16")])
def test_numpys_adapter_passes(name: str):
    dtype = np.dtype(getattr(require("ml_dtypes"), name, name))
    check_backend(gradscale.registry.get("numpy"), np.zeros(()), dtypes=[dtype])


def answering(change):
    """Return an ``unscale`` whose answer is changed: by ``change(gradients, arrays, count)``."""
    return {"unscale": lambda self, xs, *args, **options: change(xs, *Core.unscale(self, xs, *args, **options))}


def divided(self: Core, grads: Sequence[Any], state, **options):
    """Divide by the scale instead of multiplying by its reciprocal: other bits where it is no power of two."""
    arrays, count = Core.unscale(self, grads, state, **options)
    single = state.scale.dtype
    return [x / state.scale if x.dtype == single else y for x, y in zip(grads, arrays, strict=True)], count


def judged(arrays: Sequence[Any]):
    """Count what is not finite."""
    return np.asarray(sum(not np.isfinite(x).all() for x in arrays), np.int32)


def unjudged_at_one(self: Core, grads: Sequence[Any], state, **options):
    """Count nothing if the scale is known to be 1, as it always is for a StepGuard."""
    arrays, count = Core.unscale(self, grads, state, **options)
    return arrays, np.zeros_like(count) if isinstance(state, arithmetic.UnitState) else count


def seeing(change):
    """Return a ``summarize`` that sees arrays changed."""
    return {"summarize": lambda _, arrays: summaries.summarize_arrays([*map(change, arrays)])}


def flushed(x):
    # Each 0 keeps its sign.
    return x * (np.abs(x) >= np.finfo(x.dtype).smallest_normal)


def plus_one(x):
    return np.asarray(x + np.ones_like(x))


WRONG: dict[str, dict[str, Any]] = {
    "counts one more": answering(lambda _, arrays, count: (arrays, plus_one(count))),
    "a count with an axis": answering(lambda _, arrays, count: (arrays, count.reshape(1))),
    "a count of float32": answering(lambda _, arrays, count: (arrays, count.astype(np.float32))),
    "counts nothing": answering(lambda _, arrays, count: (arrays, np.zeros_like(count))),
    "forgets an array": answering(lambda _, arrays, count: (arrays[1:], count)),
    # As torch does.
    "judges its input": answering(lambda grads, arrays, _: (arrays, judged(grads))),
    "divides": {"unscale": divided},
    "judges the first elements": answering(lambda _, arrays, __: (arrays, judged([x.ravel()[:4096] for x in arrays]))),
    "judges nothing at a scale of 1": {"unscale": unjudged_at_one},
    "ignores the dtype": {"unscale": lambda self, xs, state, out=None, **_: Core.unscale(self, xs, state, out=out)},
    "ignores the out": {"unscale": lambda self, xs, state, dtype=None, **_: Core.unscale(self, xs, state, dtype=dtype)},
    "wrong bits": {"fingerprint": lambda self, state: plus_one(Core.fingerprint(self, state))},
    "reads floats": {"read": lambda self, x: list(map(float, Core.read(self, x)))},
    "reads backwards": {"read": lambda self, x: Core.read(self, x)[::-1]},
    "wrong integers": {"integers": lambda self, xs, like: Core.integers(self, [min(x, 2**24) for x in xs], like)},
    "misses subnormals": seeing(flushed),
    "misses the last": seeing(lambda x: x.ravel()[: max(0, x.size - 1)]),
    "ignores the count": {"update": lambda _, policy, state, n: policy.update(state, nonfinite=np.zeros_like(n))},
    "clips to another norm": {"clip_factor": lambda self, squares, _: Core.clip_factor(self, squares, 1.0)},
    "wrong example": {"example": lambda _: np.zeros((), np.float64)},
}


def clipping(change):
    """Return members for clipping, whose answer is changed by ``change(gradients, arrays, count, squares)``."""

    def unscale_with_squares(self: Core, grads: Sequence[Any], state, **options):
        arrays, count = self.unscale(grads, state, **options)
        return change(grads, arrays, count, lambda xs: arithmetic.sum_of_squares(xs, state.scale))

    return {"unscale_with_squares": unscale_with_squares}


def multiplied(times: int):
    def multiply_in_place(_: Core, arrays, factor):
        for _ in range(times):
            arrays[:] = arithmetic.multiply_arrays(arrays, factor)
        return arrays

    return {"multiply_in_place": multiply_in_place}


def overwriting(grads: Sequence[Any], arrays, count):
    for grad in grads:
        grad[...] = 1.0
    return arrays, count


def written_flat(self: Core, grads: Sequence[Any], state, *, out=None, **options):
    """Write in place to flat views of arrays, which are copies of those that have gaps."""
    arrays, count = Core.unscale(self, grads, state, out=out, **options)
    for target, array in zip(out or (), arrays, strict=False):
        target.reshape(-1)[...] = array.reshape(-1)
    return out or arrays, count


RIGHT = clipping(lambda _, arrays, count, squares: (arrays, count, squares(arrays))) | multiplied(1)
SQUARES, MULTIPLY = "^unscale_with_squares ", "^multiply_in_place "
BITS: dict[str, Any] = {"bits": lambda _, x: gradscale.registry.get("numpy").bits(x)}
KEPT = r"must give 8\.8.*e-39, since the library keeps subnormals, got 0\.0"
# By what is said of them.
SAID: list[tuple[str, dict[str, Any]]] = [
    (SQUARES, clipping(lambda grads, arrays, count, squares: (arrays, count, squares(grads)))),
    (SQUARES, clipping(lambda grads, arrays, count, squares: (list(grads), count, squares(arrays)))),
    (MULTIPLY, multiplied(2)),
    ("was modified to", answering(overwriting)),
    ("in place with gaps", {"unscale": written_flat}),
    (KEPT, answering(lambda _, arrays, count: ([*map(flushed, arrays)], count)) | BITS),
    ("must become", answering(lambda _, arrays, count: ([x + np.zeros_like(x) for x in arrays], count))),
]


def check_numpy(members: dict[str, Any], dtypes: Sequence[type] = (np.float32,)):
    check_backend(type("Adapter", (Core,), members)(), np.zeros(()), dtypes=[*map(np.dtype, dtypes)])


@pytest.mark.numpy
@pytest.mark.parametrize(
    ("said", "members"),
    [*(pytest.param(None, one, id=name) for name, one in WRONG.items()), *((said, RIGHT | one) for said, one in SAID)],
)
def test_a_wrong_adapter_fails(said: str | None, members: dict[str, Any]):
    with pytest.raises(AssertionError, match=said):
        check_numpy(members, [np.float32] if said else [np.float16, np.float32])


@pytest.mark.numpy
def test_an_adapter_that_clips_by_itself_passes():
    check_numpy(RIGHT)


# Groups.


def check_on(size: int, like, wrap: Callable[[ThreadCollectives], Any]):
    """Check collectives of threads, wrapped on each rank."""

    def rank(collectives: ThreadCollectives):
        check_collectives(wrap(collectives), like, repetitions=4)

    run_ranks(size, rank, timeout=10.0)


def test_a_library_that_does_not_tell_its_dtypes_is_told_so(monkeypatch: pytest.MonkeyPatch):
    like = np.zeros(1, np.float32)
    monkeypatch.delattr(array_namespace(like), "__array_namespace_info__")
    with pytest.raises(gradscale.BackendNotAvailableError, match=r"numpy must have __array_namespace_info__\(\)"):
        check_backend(Core(), like, dtypes=[np.float32])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_collectives_of_threads_pass(arrays: Library, size: int):
    check_on(size, arrays.asarray(0.0), lambda collectives: collectives)


Start = Callable[[Any], Callable[[], Any]]


class Bent(Around):
    """Collectives that do something wrong with what is sent, or with what comes back."""

    def __init__(self, inner: ThreadCollectives, how: Callable[[Start, Any], Callable[[], Any]]):
        super().__init__(inner)
        self.how = how

    def start_max(self, x, /):
        return self.how(super().start_max, x)


def after(bend: Callable[[Any, Any], Any]):
    """Bend what comes back, given what was sent as well."""

    def how(start: Start, x):
        pending = start(x)
        return lambda: bend(pending(), x)

    return how


def anew(start: Start, x):
    pending, times = start(x), itertools.count()
    return lambda: pending() + next(times)


def overwritten(result, x):
    x[...] = result
    return result


BUFFER = np.zeros(5, dtype=np.int32)


def in_one_buffer(start: Start, x):
    BUFFER[: x.size] = start(x)()
    return lambda: BUFFER[: x.size]


WRONG_GROUPS = {
    "gives another answer when it is finished again": anew,
    "gives each rank its own values back": after(lambda _, x: x),
    "widens": after(lambda result, x: array_namespace(x).astype(result, array_namespace(x).int64)),
    "reshapes": after(lambda result, x: array_namespace(x).reshape(result, (-1, 1))),
    "writes to the array sent": after(overwritten),
    "finishes in one buffer": in_one_buffer,
}


@pytest.mark.numpy
@pytest.mark.parametrize("what", WRONG_GROUPS)
@pytest.mark.parametrize("size", [2, 3])
def test_wrong_collectives_fail(what: str, size: int):
    with pytest.raises(AssertionError):
        check_on(size, np.zeros(()), lambda inner: Bent(inner, WRONG_GROUPS[what]))


@pytest.mark.numpy
def test_a_wrong_rank_fails():
    def wrong(inner: ThreadCollectives):
        inner.rank += 1
        return inner

    with pytest.raises(AssertionError):
        check_on(2, np.zeros(()), wrong)
