"""The exceptions of gradscale: one root, and the built-in that fits beside it.

::

    GradscaleError
    ├── InvalidValueError (ValueError)          an argument of the right type, out of range
    │   └── StateDictError                      a state dict that cannot be loaded; nothing was changed
    ├── InvalidTypeError (TypeError)            an argument of the wrong type
    ├── CallOrderError (RuntimeError)           scale, unscale_, step, update called in a wrong order
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
    "StateDictError",
]


class GradscaleError(Exception):
    """Root of every exception that gradscale raises on its own account.

    Examples
    --------
    >>> import gradscale
    >>> try:
    ...     gradscale.GradScaler(init_scale=0.0)
    ... except gradscale.GradscaleError as error:
    ...     print(type(error).__name__)
    InvalidValueError
    """


class InvalidValueError(GradscaleError, ValueError):
    """An argument has the right type and a value out of range.

    Examples
    --------
    >>> import gradscale
    >>> try:
    ...     gradscale.GradScaler(init_scale=0.0)
    ... except gradscale.InvalidValueError as error:
    ...     print(error)
    init_scale must be above 0 and within float32's normal range, 1.17549e-38 to 3.40282e+38, got 0.0
    """


class StateDictError(InvalidValueError):
    """A state dict is empty, corrupted or of a newer version; the scaler is as it was before.

    Examples
    --------
    >>> import gradscale
    >>> try:
    ...     gradscale.GradScaler().load_state_dict({})
    ... except gradscale.StateDictError as error:
    ...     print(error)
    the state dict is empty, as a disabled scaler saves it; construct this scaler with enabled=False, or load another
    """


class InvalidTypeError(GradscaleError, TypeError):
    """An argument has the wrong type.

    Examples
    --------
    >>> import gradscale
    >>> try:
    ...     gradscale.GradScaler(growth_interval="often")
    ... except gradscale.InvalidTypeError as error:
    ...     print(error)
    growth_interval must be an integer from 1 to 2147483647, got 'often' of type str
    """


class CallOrderError(GradscaleError, RuntimeError):
    """A method was called at the wrong point of the iteration.

    Examples
    --------
    >>> import gradscale
    >>> optimizer = type("SGD", (), {"grads": None, "step": lambda self: None})()
    >>> try:
    ...     gradscale.GradScaler().unscale_(optimizer)
    ... except gradscale.CallOrderError as error:
    ...     print(str(error).partition(";")[0])
    gradients are to be unscaled, and scale() has never been called
    """


class ScaleUnderflowError(GradscaleError, FloatingPointError):
    """Gradients overflow although the scale is at its minimum, and ``at_min="raise"``.

    Examples
    --------
    >>> import gradscale
    >>> from gradscale.policies.simulation import recorded, simulate
    >>> policy = gradscale.DynamicScale(init_scale=1.0, min_scale=1.0, at_min="raise")
    >>> simulate(policy, recorded("CCO")).raised_at  # the step in which a scaler raises it
    3
    """


class ClosureOverflowError(GradscaleError, FloatingPointError):
    """A closure gives non-finite gradients at every scale after the optimizer has begun to move.

    Examples
    --------
    >>> import gradscale, numpy as np
    >>> class LBFGS:
    ...     def step(self, closure): closure(), closure()
    >>> optimizer, scaler = LBFGS(), gradscale.GradScaler()
    >>> def closure():  # finite the first time alone
    ...     optimizer.grads = scaler.scale(np.float32([np.nan if hasattr(optimizer, "grads") else 1.0]))
    >>> try: scaler.step(optimizer, closure)
    ... except gradscale.ClosureOverflowError as error: print(type(error).__name__)
    ClosureOverflowError
    """


class ScaleDesyncError(GradscaleError, RuntimeError):
    """Ranks of one group hold different states, or have come to it by different calls; raised on every rank.

    Examples
    --------
    >>> import gradscale
    >>> def work(group):
    ...     scaler = gradscale.ShardedGradScaler(group=group, init_scale=2.0 ** (10 + group.rank), backend="numpy")
    ...     optimizer = type("SGD", (), {"grads": [], "step": lambda self: None})()
    ...     scaler.step(optimizer)
    >>> results = gradscale.testing.run_ranks(2, work, return_exceptions=True)
    >>> [type(result).__name__ for result in results]
    ['ScaleDesyncError', 'ScaleDesyncError']
    """


class BackendNotAvailableError(GradscaleError, ImportError):
    """No usable adapter serves the library that an object belongs to.

    Examples
    --------
    >>> import gradscale
    >>> try:
    ...     gradscale.registry.get("mylibrary")
    ... except gradscale.BackendNotAvailableError as error:
    ...     print(str(error).partition(";")[0])
    no gradscale adapter is registered for 'mylibrary'
    """


class MissingExtraError(BackendNotAvailableError, ModuleNotFoundError):
    """A library that an extra of gradscale brings is not installed; ``name`` is the library's.

    Examples
    --------
    >>> import gradscale
    >>> from gradscale.extras import needs
    >>> try:
    ...     with needs("train.py", "torch", "a_library_that_is_not_there"): ...
    ... except gradscale.MissingExtraError as error:
    ...     print(error.name)
    a_library_that_is_not_there
    """


class LogWriteError(GradscaleError, OSError):
    """A file of a callback cannot be opened or written; the scaler's state is complete all the same.

    Examples
    --------
    >>> import gradscale, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     try:
    ...         gradscale.callbacks.JSONLines(f"{folder}/missing/scale.jsonl")
    ...     except gradscale.LogWriteError as error:
    ...         print(type(error).__name__)
    LogWriteError
    """


class BackendError(GradscaleError, RuntimeError):
    """An adapter, or the library behind it, failed; ``__cause__`` holds the original.

    Examples
    --------
    >>> import gradscale
    >>> try:
    ...     try: 1 // 0  # a call of an adapter's library
    ...     except ArithmeticError as error: raise gradscale.BackendError("the group is gone") from error
    ... except gradscale.BackendError as error:
    ...     print(error, "because of", repr(error.__cause__))
    the group is gone because of ZeroDivisionError('integer division or modulo by zero')
    """


class CollectiveTimeoutError(GradscaleError, TimeoutError):
    """A collective was not completed in time, because some rank has not come to it.

    Parameters
    ----------
    rank : int
        The rank that gave up waiting.
    size : int
        Number of ranks in the group.
    seconds : float
        How long it waited.
    iteration : int or None, default None
        The scaler's iteration; filled in by the scaler on the way up.
    operation : str, default "the agreement on a step"
        What was waited for.

    Examples
    --------
    >>> import gradscale, numpy as np
    >>> def work(group):  # rank 1 never comes
    ...     return group.rank == 0 and group.start_max(np.zeros(1, np.int32))()
    >>> error, _ = gradscale.testing.run_ranks(2, work, timeout=0.1, return_exceptions=True)
    >>> (type(error).__name__, error.rank, error.size, error.seconds)
    ('CollectiveTimeoutError', 0, 2, 0.1)
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
            f"never came. Look at the other ranks: one of them raised, ended, skipped a call to unscale_(), step() "
            f"or update(), or needs a longer timeout=. The group can no longer be used: end this process, and run "
            f"the program so that one failing rank ends the others (mpiexec -n {self.size} python -m mpi4py "
            f"..., or torchrun)."
        )
