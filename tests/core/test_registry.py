"""The registry: adapters by name, loaded lazily, with errors that say what to do; and the tree of errors."""

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


class Adapter(Backend):
    """A whole array adapter."""

    name = "mine"


# What has the methods of an adapter, and is none.
METHODS = ("read", "unscale", "placement", "example", "fingerprint")
Lookalike = type("Lookalike", (), {"name": "mine"} | {name: getattr(Backend, name) for name in METHODS})


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function that makes some entry points (name, value) the only ones; there is a module ``mine``."""
    mine: Any = ModuleType("mine")
    mine.adapter, mine.other = Adapter(), Lookalike()
    monkeypatch.setitem(sys.modules, "mine", mine)

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


@pytest.mark.numpy
def test_numpys_arrays_scalars_and_subclasses_are_served_by_its_adapter():
    class Mine(np.ndarray[Any, Any]):
        """An array of another class."""

    for x in (np.zeros(2), np.float32(1), np.zeros(2).view(Mine)):
        assert registry.backend_for(x) is registry.get("numpy")
    # One that is a Python float as well.
    assert gradscale.GradScaler(init_scale=4.0).scale(np.float64(1.5)) == 6.0


def test_a_library_without_adapter_is_served_by_the_pure_core(strict: Library):
    assert registry.backend_for(strict.asarray(1.0)).name == "generic"
    with pytest.raises(BackendNotAvailableError, match="backend= must name a library's adapter"):
        registry.backend_for(strict.asarray(1.0)).example()


def test_an_adapter_is_found_along_the_mro_by_the_top_level_module_also_when_it_is_installed_later(install: Install):
    tensor = type("Tensor", (), {"__module__": "mylib.deep.inside"})
    derived = type("Derived", (tensor,), {"__module__": "elsewhere"})
    install()
    assert registry.backend_for(derived()).name == "generic"
    # One that is found twice is one.
    install(("mylib", "mine:adapter"), ("another", "nowhere:adapter"), ("mylib", "mine:adapter"))
    assert registry.backend_for(derived()) is registry.get("mylib") is sys.modules["mine"].adapter
    assert registry.names() == ["another", "mylib"]


NUMPY, MPI = (re.escape(remedy(extra)) for extra in ("numpy", "mpi"))
MISSING, FAILED = BackendNotAvailableError, BackendError
# What is asked for, the entry points that there are, the error, what it says, and its cause.
WRONG: list[tuple[str, list[tuple[str, str]], type[Exception], str, type[Exception] | None]] = [
    ("numpy", [("other", "any:one")], MISSING, f"registered for 'numpy'; {NUMPY}. Registered: other", None),
    ("mpi4py", [("other", "any:one")], MISSING, f"registered for 'mpi4py'; {MPI}. Registered: other", None),
    ("mylib", [], MISSING, "'mylib'; install the package that provides it. Registered: none", None),
    ("numpy", [("numpy", "nowhere:one")], MISSING, f"nowhere.*; {NUMPY}", ModuleNotFoundError),
    ("a", [("a", "mine:none")], FAILED, "'a', mine:none, failed while it was loaded", AttributeError),
    (
        *("a", [("a", "second:one"), ("a", "first:one")], FAILED),
        *(r"^2 gradscale adapters .*'a': first:one \(from .*\) and second:one \(from .*\); uninstall", None),
    ),
]


@pytest.mark.parametrize(("name", "entries", "kind", "said", "cause"), WRONG)
def test_an_adapter_that_is_not_there_or_fails_is_named_with_what_to_do(
    install: Install, name: str, entries: list[tuple[str, str]], kind: type[Exception], said: str, cause: Any
):
    install(*entries)
    with pytest.raises(kind, match=said) as caught:
        registry.get(name)
    assert type(caught.value.__cause__) is (cause or type(None))


def test_an_adapter_that_does_not_derive_from_backend_is_an_error(install: Install):
    install(("numpy", "mine:other"))
    for use in (lambda: registry.backend_for(np.zeros(1)), lambda: GradScaler(backend="numpy")):
        with pytest.raises(BackendError, match=r"'numpy' must be .* derives from gradscale\.Backend, got "):
            use()
    for use in (lambda: GradScaler(backend=Lookalike()), lambda: check_backend(Lookalike(), np.zeros(()))):
        with pytest.raises(InvalidTypeError, match=r"^backend must be .* derives from gradscale\.Backend, got "):
            use()


def test_a_group_is_an_object_with_the_members_of_collectives_and_nothing_else():
    assert registry.collectives_for(Alone(), 1.0).size == 1
    for wrong, said in (("world", "got 'world'"), (None, r"None until torch\.distributed\.init_process_group\(\)")):
        with pytest.raises(InvalidTypeError, match=rf"group must be a communicator, .*{said}"):
            registry.collectives_for(wrong, 1.0)


def test_every_error_is_a_gradscale_error_and_the_built_in_that_fits_as_their_tree_says():
    tree = re.findall(r"── (\w+) \(([\w, ]+)\)", str(gradscale.errors.__doc__))
    assert {"GradscaleError", *(name for name, _ in tree)} == set(gradscale.errors.__all__) < set(dir(gradscale))
    for name, built_ins in tree:
        above = {kind.__name__ for kind in getattr(gradscale, name).__mro__}
        assert {"GradscaleError", *built_ins.split(", ")} <= above
