"""What can be installed beside gradscale: names, aliases, modules, and the extra that brings each."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable

from gradscale.core import registry
from gradscale.extras import install_command

__all__ = ["Component", "components", "find"]


@dataclasses.dataclass(frozen=True)
class Component:
    """A library with an adapter, or what an extra of gradscale brings.

    Attributes
    ----------
    name : str
        What ``--require`` calls it.
    modules : tuple of str
        What has to be importable.
    extra : str
        The extra of gradscale that brings it; empty where nothing is known.
    aliases : tuple of str
        Other names.
    is_adapter : bool
        Whether arrays or groups are served by it.
    """

    name: str
    modules: tuple[str, ...]
    extra: str
    aliases: tuple[str, ...] = ()
    is_adapter: bool = False

    @property
    def command(self) -> str:
        """The pip command, to be run in a clone, or an empty string."""
        return install_command(self.extra) if self.extra else ""


_OURS = (
    Component("numpy", ("numpy",), "numpy", is_adapter=True),
    Component("mpi4py", ("mpi4py",), "mpi", ("mpi",), is_adapter=True),
    Component("torch", ("torch",), "torch", is_adapter=True),
    Component("jax", ("jax", "jaxlib"), "jax", ("jaxlib",), is_adapter=True),
    Component("cupy", ("cupy",), "cupy", ("cupy_backends", "cupyx"), is_adapter=True),
    Component("fast", ("numba",), "fast", ("numba",)),
    Component("optax", ("optax",), "optax"),
    Component("flax", ("flax",), "flax"),
    Component("equinox", ("equinox",), "equinox"),
    Component("lightning", ("lightning",), "lightning"),
    Component("plot", ("matplotlib",), "plot", ("matplotlib",)),
    Component("cli", ("typer", "rich"), "cli", ("typer", "rich")),
)


def components() -> list[Component]:
    """Return all components: gradscale's own, and the adapters that other packages have registered."""
    known = {name for component in _OURS for name in (component.name, *component.aliases)}
    others = [name for name in registry.names() if name not in known]
    return [*_OURS, *(Component(name, (name,), "", is_adapter=True) for name in others)]


def find(names: Iterable[str]) -> list[Component]:
    """Return the components of some names or aliases, in the given order, each once.

    Raises
    ------
    KeyError
        For an unknown name; its text names the nearest one.
    """
    by_name = {name: component for component in components() for name in (component.name, *component.aliases)}
    found: dict[str, Component] = {}
    for name in names:
        if name not in by_name:
            near = difflib.get_close_matches(name, by_name, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(by_name)}"
            msg = f"there is no adapter or extra {name!r}: {hint}"
            raise KeyError(msg)
        found[by_name[name].name] = by_name[name]
    return list(found.values())
