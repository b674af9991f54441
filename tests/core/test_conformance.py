"""check_backend: right adapters pass, and each kind of wrong one fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from array_api_compat import array_namespace
from axes import require
from libraries import Library, opened

import gradscale
from gradscale.core.backend import Backend
from gradscale.testing import check_backend

# See conftest.py.
LONG = True

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


class Core(Backend):
    """The pure core as an adapter: what the wrong ones below differ from."""

    def __init__(self, arrays: Library) -> None:
        self.arrays = arrays

    def example(self) -> Any:
        return self.arrays.xp.zeros((), dtype=self.arrays.xp.float32)


def test_the_pure_core_passes(arrays: Library) -> None:
    names = (*arrays.reals, "complex64")
    if arrays.is_slow:
        # All dtypes of JAX are in its adapter's own tests.
        names = ("float16", "float64")
    dtypes = [arrays.dtype(name) for name in names]
    check_backend(Core(arrays), arrays.asarray(0.0), dtypes=dtypes)


@pytest.mark.numpy
def test_numpys_adapter_passes() -> None:
    names = ["float16", "float32", "float64", "longdouble", "complex64", "complex128"]
    check_backend(gradscale.registry.get("numpy"), np.zeros(()), dtypes=[np.dtype(name) for name in names])


@pytest.mark.numpy
def test_numpys_adapter_passes_with_dtypes_of_ml_dtypes() -> None:
    narrow = require("ml_dtypes")
    dtypes = [np.dtype(kind) for kind in (narrow.bfloat16, narrow.float8_e5m2)]
    check_backend(gradscale.registry.get("numpy"), np.zeros(()), dtypes=dtypes)


def answering(change: Any) -> dict[str, Any]:
    """Return an ``unscale`` whose answer is changed: by ``change(xp, gradients, arrays, count)``."""

    def unscale(self: Core, grads: Sequence[Any], *args: Any, **options: Any) -> Any:
        arrays, count = Core.unscale(self, grads, *args, **options)
        return change(self.arrays.xp, grads, arrays, count)

    return {"unscale": unscale}


def divided(self: Core, grads: Sequence[Any], state: Any, **options: Any) -> Any:
    """Divide by the scale instead of multiplying by its reciprocal: other bits where it is no power of two."""
    arrays, count = Core.unscale(self, grads, state, **options)
    single = state.scale.dtype
    return [x / state.scale if x.dtype == single else y for x, y in zip(grads, arrays, strict=True)], count


def judged_before(xp: Any, grads: Sequence[Any], arrays: Any, _: Any) -> Any:
    """Count what is not finite before it is divided, as torch does."""
    return arrays, xp.asarray(sum(not bool(xp.all(xp.isfinite(grad))) for grad in grads), dtype=xp.int32)


def plus_one(xp: Any, x: Any) -> Any:
    return xp.asarray(x + xp.full_like(x, 1))


WRONG: dict[str, dict[str, Any]] = {
    "counts one more": answering(lambda xp, _, arrays, count: (arrays, plus_one(xp, count))),
    "counts nothing": answering(lambda xp, _, arrays, count: (arrays, xp.zeros_like(count))),
    "a count of float32": answering(lambda xp, _, arrays, count: (arrays, xp.astype(count, xp.float32))),
    "a count with an axis": answering(lambda xp, _, arrays, count: (arrays, xp.reshape(count, (1,)))),
    "forgets an array": answering(lambda _xp, _, arrays, count: (arrays[1:], count)),
    "judges its input": answering(judged_before),
    "divides": {"unscale": divided},
    "ignores the dtype": {"unscale": lambda self, grads, state, **_: Core.unscale(self, grads, state)},
    "ignores the out": {
        "unscale": lambda self, grads, state, *, dtype=None, **_: Core.unscale(self, grads, state, dtype=dtype)
    },
    "wrong bits": {"fingerprint": lambda self, state: plus_one(self.arrays.xp, Core.fingerprint(self, state))},
    "reads floats": {"read": lambda self, x: list(map(float, Core.read(self, x)))},
    "reads backwards": {"read": lambda self, x: Core.read(self, x)[::-1]},
    "wrong integers": {
        "integers": lambda self, values, like: Core.integers(self, [min(value, 2**24) for value in values], like)
    },
    "wrong example": {"example": lambda self: self.arrays.xp.zeros((), dtype=self.arrays.xp.float64)},
}


@pytest.mark.rows("all")
@pytest.mark.parametrize("members", WRONG.values(), ids=WRONG)
def test_a_wrong_adapter_fails(arrays: Library, members: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        check_backend(type("Wrong", (Core,), members)(arrays), arrays.asarray(0.0))


def squares(arrays: Sequence[Any], state: Any) -> Any:
    return gradscale.core.arithmetic.sum_of_squares(arrays, state.scale)


class Clips(Core):
    """Has members of its own for clipping, right ones."""

    def unscale_with_squares(self, grads: Sequence[Any], state: Any, **options: Any) -> Any:
        arrays, count = self.unscale(grads, state, **options)
        return self.changed(grads, arrays, count, squares(self.squared(grads, arrays), state))

    def squared(self, _grads: Any, arrays: Any) -> Any:
        return arrays

    def changed(self, _grads: Any, *answer: Any) -> Any:
        return answer

    def multiply_in_place(self, arrays: Any, factor: Any) -> Any:
        arrays[:] = gradscale.core.arithmetic.multiply_arrays(arrays, factor)
        return arrays


CLIPS_WRONGLY: dict[str, dict[str, Any]] = {
    "squares what is scaled": {"squared": lambda _self, grads, _arrays: grads},
    "squares in float32": {
        "changed": lambda self, _, arrays, count, found: (
            arrays,
            count,
            self.arrays.xp.astype(found, self.arrays.xp.float32),
        )
    },
    "misses an array": {"squared": lambda _self, _grads, arrays: arrays[:-1]},
    "forgets to unscale": {"changed": lambda _self, grads, _, count, found: (list(grads), count, found)},
    "multiplies twice": {
        "multiply_in_place": lambda self, arrays, factor: Clips.multiply_in_place(
            self, Clips.multiply_in_place(self, arrays, factor), factor
        )
    },
}


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("members", CLIPS_WRONGLY.values(), ids=CLIPS_WRONGLY)
def test_an_adapter_that_clips_wrongly_fails(strict: Library, members: dict[str, Any]) -> None:
    check_backend(Clips(strict), strict.asarray(0.0), dtypes=[strict.xp.float32])
    with pytest.raises(AssertionError, match=r"^(unscale_with_squares|multiply_in_place) "):
        check_backend(type("Wrong", (Clips,), members)(strict), strict.asarray(0.0), dtypes=[strict.xp.float32])


def without_subnormals(x: Any) -> Any:
    xp = array_namespace(x)
    return xp.where(xp.abs(x) < xp.full_like(x, xp.finfo(x.dtype).smallest_normal), xp.zeros_like(x), x)


def without_the_last(x: Any) -> Any:
    flat = array_namespace(x).reshape(x, (-1,))
    return flat[: max(0, flat.shape[0] - 1)]


@pytest.mark.rows("all")
@pytest.mark.parametrize("seen", [without_subnormals, without_the_last], ids=lambda seen: seen.__name__)
def test_an_adapter_that_summarizes_wrongly_fails(arrays: Library, seen: Any) -> None:
    class Summarizes(Core):
        def summarize(self, arrays: Sequence[Any]) -> Any:
            return gradscale.core.summaries.summarize_arrays(list(map(seen, arrays)))

    with pytest.raises(AssertionError, match=r"^summarize of "):
        check_backend(Summarizes(arrays), arrays.asarray(0.0))


@pytest.mark.numpy
def test_an_adapter_that_modifies_its_input_fails() -> None:
    class InPlace(Core):
        def unscale(self, grads: Sequence[Any], *args: Any, **options: Any) -> Any:
            arrays, count = super().unscale(grads, *args, **options)
            for grad in grads:
                grad[...] = 1
            return arrays, count

    with opened("numpy") as library, pytest.raises(AssertionError, match="was modified to"):
        check_backend(InPlace(library), library.asarray(0.0))


@pytest.mark.numpy
def test_an_adapter_that_loses_the_sign_of_zero_fails() -> None:
    with opened("numpy") as library:
        state = gradscale.DynamicScale().init(np.zeros(()))
        lost = answering(lambda xp, _, arrays, count: ([x + xp.zeros_like(x) for x in arrays], count))
        with pytest.raises(AssertionError, match="must become"):
            gradscale.testing.conformance._check_unscale(
                type("Wrong", (Core,), lost)(library), state, [np.array([-0.0], np.float32)], 65536.0
            )


def test_an_object_that_is_no_backend_fails(arrays: Library) -> None:
    with pytest.raises(gradscale.InvalidTypeError, match=r"derives from gradscale\.Backend"):
        check_backend(object(), arrays.asarray(0.0))  # type: ignore[arg-type]
