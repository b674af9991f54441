"""The exceptions of gradscale: one root, and each also derives from the built-in that fits; the words of messages.

::

    GradscaleError
    ├── InvalidValueError (ValueError)          an argument of the right type, out of range
    │   ├── StateDictError (RuntimeError)       a state dict that cannot be loaded; nothing was changed
    │   └── SharedMemoryError (RuntimeError)    elements to be divided share memory
    ├── InvalidTypeError (TypeError)            an argument of the wrong type
    ├── TrainingStalledError (RuntimeError)     as many steps in a row were skipped as give_up_after= allows
    ├── CallOrderError (RuntimeError, AssertionError)   scale, unscale_, step, update called in a wrong order
    ├── ScaleUnderflowError (FloatingPointError)    still overflowing at min_scale, and the policy says raise
    ├── ClosureOverflowError (FloatingPointError)   a closure overflows at every scale, in mid-step
    ├── ScaleDesyncError (RuntimeError)         ranks that should hold one state hold different ones
    ├── CollectiveTimeoutError (TimeoutError)   a rank never came to a collective
    ├── BackendNotAvailableError (ImportError)  the adapter for a library is not installed, or cannot be imported
    │   └── MissingExtraError (ModuleNotFoundError)     a library that an extra of gradscale brings is not installed
    ├── LogWriteError (OSError)                 a log of the scale cannot be written
    └── BackendError (RuntimeError)             an adapter or its library failed; the cause is attached

Catch :class:`GradscaleError` for all of them, or the built-in one would expect.
"""

import contextlib
import difflib
import sys
import warnings
from collections.abc import Iterable
from types import TracebackType

__all__ = [
    "BackendError",
    "BackendNotAvailableError",
    "CallOrderError",
    "ClosureOverflowError",
    "CollectiveTimeoutError",
    "GradscaleError",
    "InvalidTypeError",
    "InvalidValueError",
    "LogWriteError",
    "MissingExtraError",
    "ScaleDesyncError",
    "ScaleUnderflowError",
    "SharedMemoryError",
    "StateDictError",
    "TrainingStalledError",
]
__dir__ = __all__.copy

_LONGEST = 1000
# Of a message, whose end says what to do.
_LONGEST_MESSAGE = 2000
_MOST_NAMES = 12
# Packages with frames between a user's line and a warning; torch's are its compiler's.
_BETWEEN = {"gradscale", "gradscale_numpy", "gradscale_torch", "gradscale_jax", "torch", "contextlib", "functools"}


class GradscaleError(Exception):
    """Root of every exception that gradscale raises on its own account."""

    def __str__(self) -> str:
        return one_line(super().__str__())


class InvalidValueError(GradscaleError, ValueError):
    """An argument has the right type and a value out of range."""


# The second built-in of these is what torch's scalers raise, and what scripts written for them catch.


class StateDictError(InvalidValueError, RuntimeError):
    """A state dict is empty, corrupted or of a newer version; the scaler is as it was before."""


class SharedMemoryError(InvalidValueError, RuntimeError):
    """Elements of gradients that are to be divided in place share memory, so that they would be divided twice."""


class InvalidTypeError(GradscaleError, TypeError):
    """An argument has the wrong type."""


class CallOrderError(GradscaleError, RuntimeError, AssertionError):
    """A method was called at the wrong point of the iteration."""


class TrainingStalledError(GradscaleError, RuntimeError):
    """As many steps of an optimizer in a row were skipped as ``give_up_after=`` allows; the scaler can be used on."""


class TrainingStalledWarning(UserWarning):
    """Many steps of an optimizer in a row were skipped, so that its weights do not change any longer."""


class ScaleUnderflowError(GradscaleError, FloatingPointError):
    """Gradients overflow although the scale is at its minimum, and ``at_min="raise"``."""


class ClosureOverflowError(GradscaleError, FloatingPointError):
    """A closure gives non-finite gradients at every scale after the optimizer has begun to move."""


class ScaleDesyncError(GradscaleError, RuntimeError):
    """Ranks of one group hold different states, or have come to it by different calls; raised on every rank."""


class BackendNotAvailableError(GradscaleError, ImportError):
    """No usable adapter serves the library that an object belongs to."""


class MissingExtraError(BackendNotAvailableError, ModuleNotFoundError):
    """A library that an extra of gradscale brings is not installed; ``name`` is the library's."""


class LogWriteError(GradscaleError, OSError):
    """A file of a callback cannot be opened or written; the scaler's state is complete all the same."""


class BackendError(GradscaleError, RuntimeError):
    """An adapter, or the library behind it, failed; ``__cause__`` holds the original."""


class CollectiveTimeoutError(GradscaleError, TimeoutError):
    """A collective was not completed in time, because some rank has not come to it.

    ``rank`` of ``size`` ranks gave up waiting for ``operation`` after ``seconds``; the scaler adds its ``iteration``.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        seconds: float,
        iteration: int | None = None,
        operation: str = "the agreement on a step",
    ) -> None:
        super().__init__(rank, size, seconds, iteration, operation)
        self.rank = rank
        self.size = size
        self.seconds = seconds
        self.iteration = iteration
        self.operation = operation

    def __str__(self) -> str:
        where = "" if self.iteration is None else f" in iteration {self.iteration}"
        return (
            f"rank {self.rank} of {self.size} waited {self.seconds:g} s for {self.operation}{where}, and some rank "
            f"never came. Look at the other ranks: one of them raised, ended, skipped a call to unscale_() or "
            f"step(), or needs a longer timeout=. The group can no longer be used: give every rank a new one with "
            f"set_group(), or end this process, and run the program so that one failing rank ends the others "
            f"(mpiexec -n {self.size} python -m mpi4py ..., or torchrun)."
        )


# The words of a message: users' objects, short, and safe whatever they raise.


def short_repr(value: object) -> str:
    """Return the ``repr`` of an object on one line, cut to 1000 characters; a few words if it raises."""
    try:
        text = " ".join(line.strip() for line in repr(value).splitlines())
    except Exception as error:
        if type(value) is int:
            return f"an integer of {value.bit_length()} bits"
        return f"a {type(value).__name__} whose repr raises {type(error).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def one_line(text: str) -> str:
    """Return text that may hold names from outside, with line breaks and escapes written out; 2000 characters of it."""
    line = text
    if not text.isprintable():
        line = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
    return line if len(line) <= _LONGEST_MESSAGE else f"{line[: _LONGEST_MESSAGE - 605]} ... {line[-600:]}"


def key_names(keys: Iterable[object]) -> str:
    """Return the keys of a mapping as text, sorted, the first of many."""
    names = sorted(key if type(key) is str else short_repr(key) for key in keys)
    return f"{short_repr(names[:_MOST_NAMES])}{' ...' if len(names) > _MOST_NAMES else ''}"


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
    warnings.warn(one_line(message), category, stacklevel=level)


class reading(  # noqa: N801 - called as a function, in a with statement or above a function
    contextlib.ContextDecorator, contextlib.AbstractContextManager[object]
):
    """Turn an exception of a user's object into an InvalidTypeError that names it, such as "the state dict"."""

    def __init__(self, what: str) -> None:
        self._what = what

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
