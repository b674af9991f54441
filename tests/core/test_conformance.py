"""check_backend and check_collectives: right adapters and groups pass, and each kind of wrong one fails."""

import itertools
import threading
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


class Writing(Core):
    """An adapter as those of libraries whose arrays can be written to: unscaled in place, or into new arrays."""

    def unscale(self, grads, state, /, *, dtype=None, out=None):
        arrays, count = super().unscale(grads, state, dtype=dtype, out=out)
        for target, array in zip(out or (), arrays, strict=False):
            target[...] = array
        return out or arrays, count

    def multiply_in_place(self, arrays, factor, /):
        for x, product in zip(arrays, super().multiply_in_place(arrays, factor), strict=True):
            x[...] = product
        return arrays


def by_blocks(sees, block: int = 65536):
    """Judge large arrays by some of their blocks, which are told by number and number of all."""

    def is_bad(x):
        flat = x.reshape(-1)
        blocks = [flat[start : start + block] for start in range(0, x.size, block)]
        return any(not np.isfinite(one).all() for k, one in enumerate(blocks) if sees(k, len(blocks)))

    return answering(lambda _, arrays, __: (arrays, np.asarray(sum(map(is_bad, arrays)), np.int32)))


def missing(value: float):
    """Judge all values but one, in arrays of 65,537 elements or more."""

    def is_bad(x):
        bad = ~np.isfinite(x)
        return (bad & ~np.equal(x, value) & ~(np.isnan(x) & np.isnan(value)) if x.size > 65536 else bad).any()

    return answering(lambda _, arrays, __: (arrays, np.asarray(sum(map(is_bad, arrays)), np.int32)))


def count_of(change):
    """Return members whose count is changed, by ``change(arrays, count)``."""
    return answering(lambda _, arrays, count: (arrays, np.asarray(change(arrays, count), np.int32)))


def in_the_same_memory(member: str):
    """Return a member whose results, are in memory that its next call writes to."""
    memory: dict[Any, Any] = {}

    def kept(index: int, x):
        shared = memory.setdefault((index, x.shape, x.dtype), np.empty_like(x))
        shared[...] = x
        return shared

    def call(self, *args, **options):
        result = getattr(Writing, member)(self, *args, **options)
        if options.get("out") is not None:
            return result
        if isinstance(result, np.ndarray):
            return kept(0, result)
        if member != "unscale":
            made = [kept(index, x) for index, x in enumerate(result)]
            return type(result)(*made) if hasattr(result, "_fields") else type(result)(made)
        arrays, count = result
        return [kept(index, x) for index, x in enumerate(arrays)], count

    return {member: call}


def writing_to(member: str, change):
    """Return a member that also writes to what it is given."""

    def call(self, *args, **options):
        result = getattr(Writing, member)(self, *args, **options)
        change(*args)
        return result

    return {member: call}


def stays(is_left_out):
    """Return an ``unscale`` that does not write to some arrays that it is to write to."""

    def unscale(self, grads, state, /, **options):
        before = [x.copy() for x in grads]
        arrays, count = Writing.unscale(self, grads, state, **options)
        for x, old in zip(arrays, before, strict=True):
            if is_left_out(x):
                x[...] = old
        return arrays, count

    return {"unscale": unscale}


def scaled_in_place(outputs, state):
    for x in outputs:
        x *= state.scale.astype(x.dtype)


def squares_of(change):
    return {"sum_of_squares": lambda self, arrays, like: Core.sum_of_squares(self, change(list(arrays)), like)}


def written(field: str, value: int):
    """Return a function that writes to a field of a state."""
    return lambda *args: getattr(args[-1], field).__setitem__(..., value)


def bits_of(change):
    return {"fingerprint": lambda self, state: change(Core.fingerprint(self, state).copy())}


def with_entry(index: int, change):
    def changed(x):
        x[index] = change(x[index])
        return x

    return changed


def first_multiplied(number: int):
    def multiply_in_place(self, arrays, factor):
        Writing.multiply_in_place(self, arrays[:number], factor)
        return arrays

    return {"multiply_in_place": multiply_in_place}


def by_the_sum(_, arrays, __):
    return arrays, np.asarray(sum(not np.isfinite(x.sum(dtype=x.dtype)) for x in arrays), np.int32)


def if_unit(change):
    """Return an ``unscale`` whose count is changed only for a scale that is known to be 1."""

    def unscale(self, grads, state, /, **options):
        arrays, count = Writing.unscale(self, grads, state, **options)
        return arrays, np.asarray(change(arrays), np.int32) if isinstance(state, arithmetic.UnitState) else count

    return {"unscale": unscale}


def first_scaled(number: int):
    def scale(self, outputs, state):
        return [*Core.scale(self, outputs[:number], state), *(x.copy() for x in outputs[number:])]

    return {"scale": scale}


def first_elements_scaled(self, outputs, state):
    made = Core.scale(self, outputs, state)
    for x, new in zip(outputs, made, strict=True):
        new.reshape(-1)[65536:] = x.reshape(-1)[65536:]
    return made


PLANTED: dict[str, dict[str, Any]] = {
    "the last block decides": by_blocks(lambda k, number: k == number - 1),
    "the first block decides": by_blocks(lambda k, _: k == 0),
    "the middle blocks are left out": by_blocks(lambda k, number: k in (0, number - 1)),
    "the last block is left out": by_blocks(lambda k, number: k == 0 or k < number - 1),
    "every other small block": by_blocks(lambda k, _: k % 2 == 0, block=4096),
    "inf in large arrays": missing(np.inf),
    "-inf in large arrays": missing(-np.inf),
    "NaN in large arrays": missing(np.nan),
    "the first 32 arrays decide": count_of(lambda arrays, _: judged(arrays[:32])),
    "the first 256 arrays decide": count_of(lambda arrays, _: judged(arrays[:256])),
    "the last 64 arrays decide": count_of(lambda arrays, _: judged(arrays[-64:])),
    "a count of 8 bits": count_of(lambda _, count: count % 256),
    "the sum decides": answering(by_the_sum),
    "the first block decides at a scale of 1": if_unit(lambda arrays: judged([x.reshape(-1)[:65536] for x in arrays])),
    "results in one memory": in_the_same_memory("unscale"),
    "fingerprints in one memory": in_the_same_memory("fingerprint"),
    "states in one memory": in_the_same_memory("update"),
    "factors in one memory": in_the_same_memory("clip_factor"),
    "scaled losses in one memory": in_the_same_memory("scale"),
    "scales what it is given": writing_to("scale", scaled_in_place),
    "empties the squares": writing_to("clip_factor", lambda squares, _: squares.fill(0.0)),
    "counts on in the given state": writing_to("update", lambda _, state, __: state.growth_tracker.fill(1)),
    "resets a tracker of the scale": writing_to("fingerprint", written("rescale_tracker", 0)),
    "the last tracker is left out": bits_of(with_entry(3, lambda _: 0)),
    "a tracker of float32": bits_of(with_entry(1, lambda x: np.int32(np.float32(x) % 2**30))),
    "the last bits of the scale are left out": bits_of(with_entry(0, lambda x: x & ~0xFFFF)),
    "reversed views stay": stays(lambda x: any(stride < 0 for stride in x.strides)),
    "arrays of Fortran's order stay": stays(lambda x: x.ndim == 2 and x.flags.f_contiguous),
    "the squares of 64 arrays": squares_of(lambda arrays: arrays[:64]),
    "the squares of the first block": squares_of(lambda arrays: [x.reshape(-1)[:65536] for x in arrays]),
    "64 arrays are multiplied": first_multiplied(64),
    "64 losses are scaled": first_scaled(64),
    "the first block is scaled": {"scale": first_elements_scaled},
    "summaries of the first block": seeing(lambda x: x.reshape(-1)[:65536]),
}


@pytest.mark.numpy
@pytest.mark.parametrize("what", PLANTED)
def test_a_fault_that_small_arrays_or_single_calls_do_not_show_is_found(what: str):
    with pytest.raises(AssertionError):
        check_backend(type("Adapter", (Writing,), PLANTED[what])(), np.zeros(()), dtypes=[np.dtype(np.float32)])


def beside_float32(self, grads, state, /, **options):
    """Judge only arrays of the first one's dtype."""
    arrays, _ = Writing.unscale(self, grads, state, **options)
    return arrays, judged([x for x, grad in zip(arrays, grads, strict=True) if grad.dtype == grads[0].dtype])


@pytest.mark.numpy
@pytest.mark.parametrize(
    ("dtype", "members"),
    [
        pytest.param(np.float16, {"unscale": beside_float32}, id="other dtypes are not judged"),
        pytest.param(
            np.complex64, count_of(lambda arrays, _: judged([x.real for x in arrays])), id="real parts decide"
        ),
        pytest.param(
            np.complex64, squares_of(lambda arrays: [x.real.copy() for x in arrays]), id="squares of real parts"
        ),
    ],
)
def test_a_fault_of_a_dtype_is_found(dtype: type, members: dict[str, Any]):
    with pytest.raises(AssertionError):
        check_backend(type("Adapter", (Writing,), members)(), np.zeros(()), dtypes=[np.dtype(dtype)])


@pytest.mark.numpy
def test_an_adapter_that_writes_passes():
    check_backend(Writing(), np.zeros(()), dtypes=[np.dtype(np.float32)])


@pytest.mark.numpy
def test_an_adapter_that_clips_by_itself_passes():
    check_numpy(RIGHT)


# Groups.


def check_on(size: int, like, wrap: Callable[[ThreadCollectives], Any]):
    """Check collectives of threads, wrapped on each rank."""

    def rank(collectives: ThreadCollectives):
        check_collectives(wrap(collectives), like)

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


BUFFER = np.zeros(21, dtype=np.int32)


def in_one_buffer(start: Start, x):
    BUFFER[: x.size] = start(x)()
    return lambda: BUFFER[: x.size]


def only_first(number: int, bend: Callable[[Any, Any], Any]):
    """Bend what is beyond a number of integers."""
    return after(lambda result, x: np.concatenate([result[:number], bend(result, x)[number:]]))


class Bending:
    """What a group of threads keeps between messages, on each rank, to be wrong with."""

    def __init__(self, how: Callable[[list[Any], Any], Any]):
        self.how, self.begun = how, threading.local()

    def __call__(self, start: Start, x):
        begun = vars(self.begun).setdefault("pending", [])
        begun.append(start(x))
        number = len(begun) - 1
        return lambda: self.how(begun, number)


def in_a_ring(size: int):
    """Let a message take the place of the one so many before it, if that is not finished yet."""
    return Bending(lambda begun, number: begun[number + (len(begun) - 1 - number) // size * size]())


def in_buffers(number: int):
    """Give results in so many buffers, in turn."""
    buffers = threading.local()

    def how(begun: list[Any], index: int):
        result, mine = begun[index](), vars(buffers).setdefault("all", {})
        mine.setdefault(index % number, np.zeros(64, np.int32))[: result.size] = result
        return mine[index % number][: result.size]

    return Bending(how)


WRONG_GROUPS = {
    "sixteen integers": only_first(16, lambda _, x: x),
    "of twenty integers": only_first(20, lambda _, x: x),
    "two under way": in_a_ring(2),
    "three under way": in_a_ring(3),
    "four under way": in_a_ring(4),
    "results in one buffer": in_buffers(1),
    "results in six buffers": in_buffers(6),
    "the first result after 255 messages": Bending(lambda begun, number: begun[number % 255]()),
    "floats of 32 bits": after(lambda result, _: np.minimum(result.astype(np.float32), 2**30).astype(np.int32)),
    "magnitudes": after(lambda result, _: np.abs(result)),
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
