"""The exceptions of gradscale: one root, and each also derives from the built-in that fits.

::

    GradscaleError
    ├── InvalidValueError (ValueError)          an argument of the right type, out of range
    │   ├── StateDictError (RuntimeError)       a state dict that cannot be loaded; nothing was changed
    │   └── SharedMemoryError (RuntimeError)    elements to be divided share memory
    ├── InvalidTypeError (TypeError)            an argument of the wrong type
    ├── TrainingStalledError (RuntimeError)     as many iterations in a row were skipped as give_up_after= allows
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


class GradscaleError(Exception):
    """Root of every exception that gradscale raises on its own account."""


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
    """As many iterations in a row were skipped as ``give_up_after=`` allows; the scaler can be saved and used on."""


class TrainingStalledWarning(UserWarning):
    """Every step of many iterations in a row was skipped, so that no weight changes any longer."""


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
