"""Users' objects in the text of errors: short, and safe whatever the object raises."""

import contextlib
import difflib
import sys
import warnings
from collections.abc import Iterable
from types import TracebackType

from gradscale.errors import GradscaleError, InvalidTypeError

_LONGEST = 1000
_SHOWN = 12
# Packages with frames between a user's line and a warning; torch's are its compiler's.
_BETWEEN = {"gradscale", "gradscale_numpy", "gradscale_torch", "gradscale_jax", "torch", "contextlib", "functools"}


def shown(value: object) -> str:
    """Return the ``repr`` of an object on one line, cut to 1000 characters; a few words if it raises."""
    try:
        text = " ".join(line.strip() for line in repr(value).splitlines())
    except Exception as error:
        if type(value) is int:
            return f"an integer of {value.bit_length()} bits"
        return f"a {type(value).__name__} whose repr raises {type(error).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def key_names(keys: Iterable[object]) -> str:
    """Return the keys of a mapping as text, sorted, the first of many."""
    names = sorted(key if type(key) is str else shown(key) for key in keys)
    return f"{shown(names[:_SHOWN])}{' ...' if len(names) > _SHOWN else ''}"


def nearest(name: object, names: Iterable[str]) -> str:
    """Return a question for the nearest of some names, or an empty string."""
    close = difflib.get_close_matches(name.lower(), sorted(names), 1) if isinstance(name, str) else []
    return f"; did you mean {close[0]!r}?" if close else ""


def at_scale(scale: float) -> str:
    """Return a scale as the end of a phrase; nothing for 1, which multiplies nothing."""
    return "" if scale == 1.0 else f" at scale {scale:g}"


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn of the user's line that has led here."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


class reading(contextlib.ContextDecorator):  # noqa: N801 - called as a function, in a with statement or above a function
    """Turn an exception of a user's object into an InvalidTypeError that names it, such as "the state dict"."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, Exception) and not isinstance(error, GradscaleError):
            raise unreadable(self._what, error) from error


def unreadable(what: str, error: Exception) -> InvalidTypeError:
    """Return the error for an object that raises when it is read; raise it from the original."""
    try:
        text = f"{error}"[:_LONGEST]
    except Exception:
        text = "an error without a text"
    return InvalidTypeError(
        f"{what} cannot be read, got {type(error).__name__} from it: {text}; pass plain Python values, arrays and "
        f"containers"
    )
