"""The registry: adapters by name, loaded lazily, with errors that say what to do."""

import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from libraries import Library
from scenarios import Alone

import gradscale
from gradscale import BackendError, BackendNotAvailableError, GradScaler, InvalidTypeError, registry
from gradscale.core.backend import Backend
from gradscale.extras import remedy
from gradscale.testing import check_backend

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function that makes the given entry points (name, value) the only installed ones."""

    def replace(*entries: tuple[str, str]):
        points = [EntryPoint(name, value, registry.GROUP) for name, value in entries]

        def entry_points(*, group: str) -> list[EntryPoint]:
            assert group == "gradscale.backends"
            return points

        monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
        registry.refresh()

    yield replace
    monkeypatch.undo()
    registry.refresh()


class Adapter(Backend):
    """A whole array adapter."""

    name = "mine"


def module(monkeypatch: pytest.MonkeyPatch, name: str, **members):
    """Make a module importable."""
    made = ModuleType(name)
    vars(made).update(members)
    monkeypatch.setitem(sys.modules, name, made)


def test_the_adapters_of_this_distribution_are_registered():
    assert {"numpy", "mpi4py"} <= set(registry.names())
    assert registry.names() == sorted(registry.names())
    assert registry.get("numpy").name == "numpy"
    assert registry.get("numpy") is registry.get("numpy")


@pytest.mark.numpy
def test_numpys_arrays_scalars_and_subclasses_are_served_by_its_adapter():
    class Mine(np.ndarray[Any, Any]):
        pass

    for x in (np.zeros(2), np.float32(1), np.zeros(2).view(Mine)):
        assert registry.backend_for(x) is registry.get("numpy")
    # One that is a Python float as well.
    assert gradscale.GradScaler(init_scale=4.0).scale(np.float64(1.5)) == 6.0


def test_a_library_without_adapter_is_served_by_the_pure_core(strict: Library):
    assert registry.backend_for(strict.asarray(1.0)).name == "generic"
    with pytest.raises(BackendNotAvailableError, match="backend= must name a library's adapter"):
        registry.backend_for(strict.asarray(1.0)).example()


def test_an_adapter_is_found_along_the_mro_by_the_top_level_module(install: Install, monkeypatch: pytest.MonkeyPatch):
    class Tensor:
        __module__ = "mylib.deep.inside"

    class Derived(Tensor):
        __module__ = "elsewhere"

    install(("mylib", "gradscale_mylib:backend"))
    module(monkeypatch, "gradscale_mylib", backend=Adapter())
    assert registry.backend_for(Derived()) is registry.get("mylib")
    assert registry.names() == ["mylib"]


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("numpy", re.escape(remedy("numpy"))),
        ("mpi4py", re.escape(remedy("mpi"))),
        ("mylib", "install the package that provides it"),
    ],
)
def test_a_missing_adapter_is_named_with_what_to_install(install: Install, name: str, command: str):
    install(("other", "gradscale_other:backend"))
    with pytest.raises(BackendNotAvailableError, match=f"registered for '{name}'; {command}. Registered: other"):
        registry.get(name)
    install()
    with pytest.raises(BackendNotAvailableError, match="Registered: none"):
        registry.get(name)


def test_two_adapters_of_one_name_are_an_error_that_names_both_but_one_that_is_found_twice_is_one(
    install: Install, monkeypatch: pytest.MonkeyPatch
):
    install(("mine", "second:backend"), ("mine", "first:backend"))
    message = r"2 gradscale adapters .*'mine': first:backend \(from .*\) and second:backend \(from .*\); uninstall"
    with pytest.raises(BackendError, match=message):
        registry.get("mine")
    install(("mine", "gradscale_mine:backend"), ("mine", "gradscale_mine:backend"))
    module(monkeypatch, "gradscale_mine", backend=Adapter())
    assert isinstance(registry.get("mine"), Adapter)


def test_an_adapter_that_cannot_be_loaded_keeps_the_cause(install: Install, monkeypatch: pytest.MonkeyPatch):
    install(("numpy", "no_such_module_at_all:backend"), ("mine", "gradscale_mine:backend"))
    said = "no_such_module_at_all.*; " + re.escape(remedy("numpy"))
    with pytest.raises(BackendNotAvailableError, match=said) as caught:
        registry.get("numpy")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    module(monkeypatch, "gradscale_mine")
    with pytest.raises(BackendError, match="'mine', gradscale_mine:backend, failed while it was loaded") as failed:
        registry.get("mine")
    assert isinstance(failed.value.__cause__, AttributeError)


class Lookalike:
    """What has the methods of an adapter, and is none."""

    name = "mine"
    read, unscale, placement, example, fingerprint = (
        *(Backend.read, Backend.unscale, Backend.placement, Backend.example, Backend.fingerprint),
    )


@pytest.mark.parametrize("kind", [object, Lookalike])
def test_an_adapter_that_does_not_derive_from_backend_is_an_error(
    kind: type[Any], install: Install, monkeypatch: pytest.MonkeyPatch
):
    install(("numpy", "gradscale_mine:backend"))
    module(monkeypatch, "gradscale_mine", backend=kind())
    for use in (lambda: registry.backend_for(np.zeros(1)), lambda: GradScaler(backend="numpy")):
        with pytest.raises(BackendError, match=r"'numpy' must be .* derives from gradscale\.Backend, got "):
            use()
    for use in (lambda: GradScaler(backend=kind()), lambda: check_backend(kind(), np.zeros(()))):
        with pytest.raises(InvalidTypeError, match=r"^backend must be .* derives from gradscale\.Backend, got "):
            use()


def test_refresh_finds_what_was_installed_since(install: Install, monkeypatch: pytest.MonkeyPatch):
    install()
    assert registry.backend_for(np.zeros(1)).name == "generic"
    install(("numpy", "gradscale_mine:backend"))
    module(monkeypatch, "gradscale_mine", backend=Adapter())
    assert registry.backend_for(np.zeros(1)).name == "mine"


def test_a_group_is_an_object_with_the_members_of_collectives_and_nothing_else():
    group = Alone()
    assert registry.collectives_for(group, 1.0) is group
    for wrong in (None, 3, "world", object(), np.zeros(1)):
        with pytest.raises(InvalidTypeError, match=r"group must be a communicator, .*got"):
            registry.collectives_for(wrong, 1.0)
    with pytest.raises(InvalidTypeError, match=r"None until torch\.distributed\.init_process_group\(\) is called"):
        registry.collectives_for(None, 1.0)


FITS: dict[type[Exception], str] = {
    ValueError: "InvalidValueError StateDictError SharedMemoryError",
    TypeError: "InvalidTypeError",
    RuntimeError: "CallOrderError ScaleDesyncError BackendError TrainingStalledError",
    FloatingPointError: "ScaleUnderflowError ClosureOverflowError",
    TimeoutError: "CollectiveTimeoutError",
    OSError: "LogWriteError",
    ImportError: "BackendNotAvailableError",
    ModuleNotFoundError: "MissingExtraError",
}


def test_every_error_is_a_gradscale_error_and_the_built_in_that_fits():
    assert {"GradscaleError", *" ".join(FITS.values()).split()} == set(gradscale.errors.__all__) < set(dir(gradscale))
    for built_in, names in FITS.items():
        for name in names.split():
            assert {gradscale.GradscaleError, built_in} <= set(getattr(gradscale, name).__mro__)
            assert f"── {name} " in str(gradscale.errors.__doc__)
