"""Extras: what to install for a library that is missing, and the one error that says so."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

from gradscale.errors import BackendNotAvailableError, MissingExtraError

__all__ = ["install_command", "needs", "program_needs", "remedy"]

_INTERRUPTED = 130


def install_command(extras: str) -> str:
    """Return the command that installs gradscale with some extras, to be run in a clone.

    Parameters
    ----------
    extras : str
        Names as ``pyproject.toml`` has them, such as ``torch`` or ``mpich,examples``.
    """
    return f"python -m pip install '.[{extras}]'"


def remedy(extras: str) -> str:
    """Return what every message about a missing library ends with: where to install from, and the command.

    Parameters
    ----------
    extras : str
        As for :func:`install_command`.
    """
    return f"from a clone of gradscale: {install_command(extras)}"


@contextlib.contextmanager
def needs(user: str, extras: str, *modules: str) -> Iterator[None]:
    """Say what to install where an import inside this block fails.

    Parameters
    ----------
    user : str
        What imports, as the message begins: a module, a function or a program.
    extras : str
        What brings all that it imports, as for :func:`install_command`.
    *modules : str
        Top-level modules that are imported later. They are looked up, and not imported.

    Raises
    ------
    MissingExtraError
        When a library is not installed.
    BackendNotAvailableError
        When a library is installed, and cannot be imported.
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


@contextlib.contextmanager
def program_needs(program: str, extras: str, *modules: str) -> Iterator[None]:
    """End a program where an import inside this block fails, with one line in place of a traceback.

    Parameters
    ----------
    program, extras, *modules : str
        As for :func:`needs`.

    Raises
    ------
    SystemExit
        With that line, which Python prints on stderr before it exits with 1; and with 130 and nothing printed where
        Ctrl-C interrupts the imports.
    """
    try:
        with needs(program, extras, *modules):
            yield
    except BackendNotAvailableError as error:
        raise SystemExit(str(error)) from error
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None
