"""Extras: what to install for a library that is missing, and the one error that says so."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

from gradscale.errors import BackendNotAvailableError, MissingExtraError

__all__ = ["install_command", "needs", "remedy"]


def install_command(extras: str) -> str:
    """Return the command that installs gradscale with extras such as ``mpich,examples``, to be run in a clone."""
    return f"python -m pip install '.[{extras}]'"


def remedy(extras: str) -> str:
    """Return the end of every message about a missing library: where to install from, and the command."""
    return f"from a clone of gradscale: {install_command(extras)}"


@contextlib.contextmanager
def needs(user: str, extras: str, *modules: str) -> Iterator[None]:
    """Say what to install if an import inside this block fails.

    Parameters
    ----------
    user : str
        The module, function or program that imports: the message begins with it.
    extras : str
        Extras that bring all that it imports.
    *modules : str
        Top-level modules that are imported later. They are looked up, and not imported.

    Raises
    ------
    MissingExtraError
        If a library is not installed.
    BackendNotAvailableError
        If a library is installed, and cannot be imported.
    """
    try:
        for module in modules:
            if importlib.util.find_spec(module) is None:
                msg = f"No module named {module!r}"
                raise ModuleNotFoundError(msg, name=module)
        yield
    except ImportError as error:
        library = (error.name or "").partition(".")[0]
        cause = error.__cause__ if isinstance(error, MissingExtraError) else error
        if isinstance(cause, BackendNotAvailableError) or library.startswith("gradscale"):
            # It says what to do already; or it is a fault of gradscale's own, which no extra mends.
            raise
        kind = MissingExtraError if isinstance(error, ModuleNotFoundError) else BackendNotAvailableError
        msg = f"{user} needs {library or 'what cannot be imported'}, got: {cause}; {remedy(extras)}"
        raise kind(msg, name=error.name) from cause
