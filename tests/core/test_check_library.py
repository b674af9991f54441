"""check_library: a library of the standard passes, each lack of one is named, and each wrong answer is found."""

import types
from collections.abc import Callable
from typing import Any

import pytest
from libraries import Library

import gradscale
from gradscale import BackendNotAvailableError, DynamicScale, InvalidTypeError, registry
from gradscale.core import arithmetic, summaries
from gradscale.core.arithmetic import device, on
from gradscale.policies import spikes
from gradscale.testing import check_library

BESIDE = (*arithmetic.CLIPPING_FUNCTIONS, *summaries.STANDARD_FUNCTIONS, *spikes.STANDARD_FUNCTIONS)
FUNCTIONS = sorted({*arithmetic.STANDARD_FUNCTIONS, *BESIDE})
# Of those that compare every Python object has one, and a library may know of no device.
COMPARISONS = {"__eq__", "__ne__", "__lt__", "__le__", "__ge__"}
MEMBERS = sorted(set(arithmetic.STANDARD_MEMBERS) - COMPARISONS - {"device", "to_device"})
DTYPES = ("float32", "int32")


class Namespace:
    """A namespace that has what another one has, but for what is set or taken away."""

    __name__ = "crippled"

    def __init__(self, xp, without: str = "", **replaced):
        self._xp, self._without = xp, without
        vars(self).update(replaced)

    def __getattr__(self, name: str):
        if name == self._without:
            raise AttributeError(name)
        return getattr(self._xp, name)


@pytest.fixture
def cripple(strict: Library, monkeypatch: pytest.MonkeyPatch):
    """Return a function that takes something away from array-api-strict, or replaces it, and returns an array."""
    x = strict.asarray([1.0, 2.0])

    def crippled(without: str = "", **replaced):
        namespace = Namespace(strict.xp, without, **replaced)
        monkeypatch.setattr(type(x), "__array_namespace__", lambda _self, **_options: namespace)
        return x

    return crippled


@pytest.fixture(autouse=True)
def _registry_forgets():
    """Make the registry look at each library anew."""
    registry.refresh()
    yield
    registry.refresh()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_the_pure_core_of_every_library_passes(arrays: Library):
    check_library(arrays.asarray([1.0, 2.0]))
    with pytest.raises(InvalidTypeError, match=r"like must be an array.*got 'text'"):
        check_library("text")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*FUNCTIONS, *DTYPES])
def test_each_function_and_dtype_that_is_missing_is_named(cripple: Callable[..., Any], name: str):
    x = cripple(name)
    with pytest.raises(BackendNotAvailableError, match=rf"crippled lacks.*\b{name} missing.*write an adapter"):
        check_library(x)
    if name == "isfinite":
        told = "crippled has no adapter for gradscale, and lacks.*functions isfinite missing: write an adapter"
        for use in (DynamicScale().init, gradscale.GradScaler().scale):
            with pytest.raises(BackendNotAvailableError, match=told):
                use(x)


@pytest.mark.parametrize("version", ["2021.12", "2022.12"])
@pytest.mark.filterwarnings("ignore:The 2021.12 version")
def test_a_library_of_an_older_standard_is_told_which_one_it_needs(strict: Library, version: str):
    x = strict.asarray([1.0, 2.0])
    told = r"lacks what .* standard of 2023\.12 or newer, got functions __array_namespace_info__ missing"
    with strict.xp.ArrayAPIStrictFlags(api_version=version):
        for use in (DynamicScale().init, gradscale.GradScaler().scale, check_library):
            with pytest.raises(BackendNotAvailableError, match=told if use is not check_library else "array_namespace"):
                use(x)


@pytest.mark.parametrize("name", MEMBERS)
def test_each_member_that_is_missing_is_named(strict: Library, name: str):
    had = dict.fromkeys({*arithmetic.STANDARD_MEMBERS} - COMPARISONS - {name}, ())
    kind = type("Array", (), {**had, "__array_namespace__": lambda _self, **_options: strict.xp})
    assert arithmetic.lacks(kind()) == {"members of arrays": [name]}
    # The host reads whole arrays, where they can be read so.
    kind.tolist = ()
    assert arithmetic.lacks(kind()) == ({} if name == "__int__" else {"members of arrays": [name]})


def test_arrays_are_made_on_a_device_only_if_their_library_knows_of_devices(strict: Library):
    away = strict.xp.Device("device1")
    x = strict.asarray(1.0, device=away)
    assert strict.asarray(2.0, **on(device(x))).device == away
    assert (device(object()), on(device(object()))) == (None, {})


def test_a_function_that_does_not_take_what_the_core_gives_is_named(cripple: Callable[..., Any]):
    def stack(_arrays):
        raise ValueError("only twins can be stacked")

    with pytest.raises(
        BackendNotAvailableError, match=r"crippled fails in gradscale's bits.*only twins can be stacked"
    ):
        check_library(cripple(stack=stack))


# What each function does instead of its own work.
WRONG = {
    "all": "any",
    "logical_not": "itself",
    "sqrt": "itself",
    "max": "min",
    "minimum": "maximum",
    "zeros_like": "ones_like",
}


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_found(strict: Library, cripple: Callable[..., Any], name: str):
    with pytest.raises(AssertionError, match="must be"):
        check_library(cripple(**{name: getattr(strict.xp, WRONG[name], lambda x: x)}))


def test_libraries_are_called_as_people_write_them():
    names = {"array_api_compat.numpy": "numpy", "jax.numpy": "jax", "torch": "torch"}
    names["array_api_compat.dask.array"] = "dask"
    assert {name: arithmetic.library_name(types.SimpleNamespace(__name__=name)) for name in names} == names
