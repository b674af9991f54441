"""What gradscale needs of the array API standard, and what a library lacks of it."""

from __future__ import annotations

from array_api_compat import array_namespace, device

from gradscale.core import arithmetic
from gradscale.core.protocols import Array, Namespace

__all__ = ["lacks", "library_name"]

# An array of a device is asked for it, and moved, by array_api_compat, which knows what some libraries say instead.
_BY_FUNCTION = ("device", "to_device")


def library_name(xp: Namespace) -> str:
    """Return the name of an array namespace's library as people write it: ``numpy``, ``jax``, ``dask``."""
    return xp.__name__.removeprefix("array_api_compat.").partition(".")[0]


def lacks(like: Array) -> dict[str, list[str]]:
    """Return by kind the functions, dtypes and members of arrays that a library lacks of those that the core needs."""
    xp = array_namespace(like)
    functions = [name for name in arithmetic.STANDARD_FUNCTIONS if not hasattr(xp, name)]
    dtypes = [name for name in arithmetic.STANDARD_DTYPES if name != "float64" and not hasattr(xp, name)]
    members = [name for name in arithmetic.STANDARD_MEMBERS if name not in _BY_FUNCTION and not hasattr(like, name)]
    if "__int__" in members and (hasattr(like, "compute") or hasattr(like, "tolist")):
        # Backend.read gets the values otherwise.
        members.remove("__int__")
    try:
        device(like)
    except AttributeError:
        members.append("device")
    found = {"functions": functions, "dtypes": dtypes, "members of arrays": members}
    return {kind: names for kind, names in found.items() if names}
