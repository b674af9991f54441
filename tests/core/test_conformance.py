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


class OffByOne(Core):
    def unscale(self, *args: Any, **options: Any) -> Any:
        arrays, count = super().unscale(*args, **options)
        return arrays, self.arrays.xp.asarray(count + self.arrays.xp.full_like(count, 1))


class Flag(Core):
    """Says that there is an overflow, and not how many."""

    def unscale(self, grads: Sequence[Any], *args: Any, **options: Any) -> Any:
        arrays, count = super().unscale(grads, *args, **options)
        xp = self.arrays.xp
        return arrays, xp.asarray(xp.minimum(count, xp.full_like(count, 0)))


class FloatCount(Core):
    def unscale(self, *args: Any, **options: Any) -> Any:
        arrays, count = super().unscale(*args, **options)
        return arrays, self.arrays.xp.astype(count, self.arrays.xp.float32)


class VectorCount(Core):
    def unscale(self, *args: Any, **options: Any) -> Any:
        arrays, count = super().unscale(*args, **options)
        return arrays, self.arrays.xp.reshape(count, (1,))


class Forgetful(Core):
    def unscale(self, *args: Any, **options: Any) -> Any:
        arrays, count = super().unscale(*args, **options)
        return arrays[1:], count


class JudgesItsInput(Core):
    """Counts what is not finite before it is divided, as torch does."""

    def unscale(self, grads: Sequence[Any], *args: Any, **options: Any) -> Any:
        arrays, _ = super().unscale(grads, *args, **options)
        xp = self.arrays.xp
        count = sum(not bool(xp.all(xp.isfinite(grad))) for grad in grads)
        return arrays, xp.asarray(count, dtype=xp.int32)


class Divides(Core):
    """Divides by the scale instead of multiplying by its reciprocal: other bits where it is no power of two."""

    def unscale(self, grads: Sequence[Any], state: Any, **options: Any) -> Any:
        arrays, count = super().unscale(grads, state, **options)
        single = state.scale.dtype
        divided = [x / state.scale if x.dtype == single else y for x, y in zip(grads, arrays, strict=True)]
        return divided, count


class IgnoresTheDtype(Core):
    def unscale(self, grads: Sequence[Any], state: Any, **_options: Any) -> Any:
        return super().unscale(grads, state)


class LosesTheSignOfZero(Core):
    def unscale(self, *args: Any, **options: Any) -> Any:
        arrays, count = super().unscale(*args, **options)
        return [x + self.arrays.xp.zeros_like(x) for x in arrays], count


class Summarizes(Core):
    """Has an adapter's optional member, a right one."""

    def summarize(self, arrays: Sequence[Any]) -> Any:
        return gradscale.core.summaries.summarize_arrays(arrays)


class TakesSubnormalsForZero(Summarizes):
    def summarize(self, arrays: Sequence[Any]) -> Any:
        xp = array_namespace(arrays[0])
        tiny = xp.finfo(arrays[0].dtype).smallest_normal
        normal = [xp.where(xp.abs(x) < xp.full_like(x, tiny), xp.zeros_like(x), x) for x in arrays]
        return super().summarize(normal)


class MissesTheLastElement(Summarizes):
    def summarize(self, arrays: Sequence[Any]) -> Any:
        xp = array_namespace(arrays[0])
        kept = [xp.reshape(x, (-1,)) for x in arrays]
        return super().summarize([x[: max(0, x.shape[0] - 1)] for x in kept])


class IgnoresTheOut(Core):
    """Keeps each gradient's dtype, whatever it is to be written to."""

    def unscale(self, grads: Sequence[Any], state: Any, *, dtype: Any = None, **_options: Any) -> Any:
        return super().unscale(grads, state, dtype=dtype)


class WrongBits(Core):
    def fingerprint(self, state: Any) -> Any:
        bits = super().fingerprint(state)
        return self.arrays.xp.asarray(bits + self.arrays.xp.full_like(bits, 1))


class ReadsFloats(Core):
    def read(self, x: Any) -> Any:
        return [float(value) for value in super().read(x)]


class ReadsBackwards(Core):
    def read(self, x: Any) -> list[int]:
        return super().read(x)[::-1]


class WrongIntegers(Core):
    def integers(self, values: Sequence[int], like: Any, /) -> Any:
        return super().integers([min(value, 2**24) for value in values], like)


class WrongExample(Core):
    def example(self) -> Any:
        return self.arrays.xp.zeros((), dtype=self.arrays.xp.float64)


WRONG = [
    OffByOne,
    Flag,
    FloatCount,
    VectorCount,
    Forgetful,
    JudgesItsInput,
    Divides,
    IgnoresTheDtype,
    IgnoresTheOut,
    WrongBits,
    ReadsFloats,
    ReadsBackwards,
    WrongIntegers,
    WrongExample,
]


@pytest.mark.rows("all")
@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
def test_a_wrong_adapter_fails(arrays: Library, kind: type[Core]) -> None:
    with pytest.raises(AssertionError):
        check_backend(kind(arrays), arrays.asarray(0.0))


class Clips(Core):
    """Has members of its own for clipping, right ones."""

    def unscale_with_squares(self, grads: Sequence[Any], state: Any, **options: Any) -> Any:
        arrays, count = self.unscale(grads, state, **options)
        return arrays, count, gradscale.core.arithmetic.sum_of_squares(arrays, state.scale)

    def multiply_in_place(self, arrays: Any, factor: Any) -> Any:
        arrays[:] = gradscale.core.arithmetic.multiply_arrays(arrays, factor)
        return arrays


class SquaresWhatIsScaled(Clips):
    def unscale_with_squares(self, grads: Sequence[Any], state: Any, **options: Any) -> Any:
        squares = gradscale.core.arithmetic.sum_of_squares(grads, state.scale)
        return *self.unscale(grads, state, **options), squares


class SquaresInSingle(Clips):
    def unscale_with_squares(self, *args: Any, **options: Any) -> Any:
        arrays, count, squares = super().unscale_with_squares(*args, **options)
        return arrays, count, self.arrays.xp.astype(squares, self.arrays.xp.float32)


class MissesAnArray(Clips):
    def unscale_with_squares(self, grads: Sequence[Any], state: Any, **options: Any) -> Any:
        arrays, count, _ = super().unscale_with_squares(grads, state, **options)
        return arrays, count, gradscale.core.arithmetic.sum_of_squares(arrays[:-1], state.scale)


class ForgetsToUnscale(Clips):
    def unscale_with_squares(self, grads: Sequence[Any], state: Any, **options: Any) -> Any:
        _, count, squares = super().unscale_with_squares(grads, state, **options)
        return list(grads), count, squares


class MultipliesTwice(Clips):
    def multiply_in_place(self, arrays: Any, factor: Any) -> Any:
        return super().multiply_in_place(super().multiply_in_place(arrays, factor), factor)


@pytest.mark.tier("ranks")
@pytest.mark.parametrize(
    "kind",
    [SquaresWhatIsScaled, SquaresInSingle, MissesAnArray, ForgetsToUnscale, MultipliesTwice],
    ids=lambda kind: kind.__name__,
)
def test_an_adapter_that_clips_wrongly_fails(strict: Library, kind: type[Clips]) -> None:
    check_backend(Clips(strict), strict.asarray(0.0), dtypes=[strict.xp.float32])
    with pytest.raises(AssertionError, match=r"^(unscale_with_squares|multiply_in_place) "):
        check_backend(kind(strict), strict.asarray(0.0), dtypes=[strict.xp.float32])


@pytest.mark.rows("all")
@pytest.mark.parametrize("kind", [TakesSubnormalsForZero, MissesTheLastElement], ids=lambda kind: kind.__name__)
def test_an_adapter_that_summarizes_wrongly_fails(arrays: Library, kind: type[Core]) -> None:
    with pytest.raises(AssertionError, match=r"^summarize of "):
        check_backend(kind(arrays), arrays.asarray(0.0))


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
        with pytest.raises(AssertionError, match="must become"):
            gradscale.testing.conformance._check_unscale(
                LosesTheSignOfZero(library), state, [np.array([-0.0], np.float32)], 65536.0
            )


def test_an_object_that_is_no_backend_fails(arrays: Library) -> None:
    with pytest.raises(gradscale.InvalidTypeError, match=r"derives from gradscale\.Backend"):
        check_backend(object(), arrays.asarray(0.0))  # type: ignore[arg-type]


# Collectives.
