"""show_versions: what a report of a fault says of the machine."""

from __future__ import annotations

import platform
from importlib.metadata import packages_distributions, version

from gradscale.version import __version__

__all__ = ["show_versions", "system"]

_MODULES = ("numpy", "numba", "mpi4py", "torch", "jax", "jaxlib", "optax", "cupy", "nccl", "mlx", "array_api_compat")


def system() -> str:
    """Return gradscale's version, Python's, and the name of the platform."""
    return f"gradscale {__version__}, Python {platform.python_version()}, {platform.platform()}"


def show_versions() -> None:
    """Print the versions of gradscale, Python, the platform and the libraries that are installed; none is imported.

    Examples
    --------
    >>> import gradscale
    >>> gradscale.show_versions()  # doctest: +ELLIPSIS
    gradscale ..., Python 3..., ...
    """
    print(system())
    distributions = packages_distributions()
    for name in sorted({name for module in _MODULES for name in distributions.get(module, ())}):
        print(name, version(name))
