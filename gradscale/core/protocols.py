"""Protocols of what plugs in, and the state: Array, Indexable, ScaleState, Policy, Collectives, Group, Optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

Array: TypeAlias = Any
"""An array of any library that follows the Python array API standard."""

Namespace: TypeAlias = Any
"""An array library's namespace, as the array API standard has it."""

ArrayT = TypeVar("ArrayT")
"""A library's class of arrays."""

if TYPE_CHECKING:
    # typing's own has a default from Python 3.13 on.
    import typing_extensions

    ArrayT_co = typing_extensions.TypeVar("ArrayT_co", covariant=True, default=Any)
else:
    ArrayT_co = TypeVar("ArrayT_co", covariant=True)


class Indexable(Protocol[ArrayT_co]):
    """An array whose elements are arrays of its library's class: of torch, JAX and most others, but not of NumPy.

    The types of NumPy's arrays say a dtype, which those of a state do not share.
    """

    def __getitem__(self, key: int, /) -> ArrayT_co:
        """Return an element."""


class ScaleState(NamedTuple, Generic[ArrayT_co]):
    """Scale and trackers; a pytree as it stands, every field a 0-d array of one library on one device.

    A fresh state has trackers of zero whatever the policy, so that a state of any policy, or of a
    system that keeps only a scale, can be continued by another.

    Attributes
    ----------
    scale : array
        The factor that the loss is multiplied by; 0-d float32, finite and above zero.
    growth_tracker : array
        Clean steps counted towards the next growth; 0-d int32, not negative.
    overflow_tracker : array
        Overflows counted towards the next backoff (hysteresis, or the numerator of a ratio tolerance); 0-d int32.
    rescale_tracker : array
        Steps since the scale last changed (the denominator of a ratio tolerance); 0-d int32, and zero for
        policies without a tolerance.

    Examples
    --------
    >>> import gradscale, numpy as np
    >>> state = gradscale.DynamicScale(growth_interval=2).init(like=np.float32(0.0))
    >>> print(*state)
    65536.0 0 0 0
    >>> print(*gradscale.DynamicScale(growth_interval=2).update(state, nonfinite=np.int32(0)))
    65536.0 1 0 0
    """

    scale: ArrayT_co
    growth_tracker: ArrayT_co
    overflow_tracker: ArrayT_co
    rescale_tracker: ArrayT_co


# Generic is for type checkers: torch's pytrees take a NamedTuple of two bases for a leaf.
ScaleState.__bases__ = (tuple,)


class Numbers(NamedTuple):
    """The numbers of a :class:`ScaleState`, on the host."""

    scale: float
    growth_tracker: int = 0
    overflow_tracker: int = 0
    rescale_tracker: int = 0


class Collectives(Protocol):
    """A group of processes that can agree on a few integers.

    Notes
    -----
    These members are optional:

    - ``example()`` returns a 0-d float32 array, with which a rank takes part that never has one of its own. Else
      ``backend=`` names the library of such a rank.
    - ``identity`` is the library's own group, the same object in all Collectives over it. Else each of them counts as a
      group of its own.
    - ``resolve()`` is called before ``rank`` and ``size`` are read, for a group that is looked up late.
    - ``within(seconds)`` returns a context in which no wait takes longer; one that does raises CollectiveTimeoutError.
      Else ranks that differ call ``start_max`` and what it returns in a thread while they tell each other what they
      hold, and leave that thread behind after 5 seconds.
    - ``wait()``, of the object that ``start_max`` returns, makes the CPU wait for the ranks where calling that object
      makes a device wait.

    Examples
    --------
    >>> import numpy as np
    >>> class Alone:  # a group of one process
    ...     rank, size = 0, 1
    ...     def start_max(self, x, /):
    ...         return lambda: x.copy()
    >>> Alone().start_max(np.zeros(2, np.int32))()
    array([0, 0], dtype=int32)
    """

    rank: int
    """Position of this process in the group, from 0."""
    size: int
    """Number of processes in the group."""

    def start_max(self, x: Array, /) -> Callable[[], Array]:
        """Begin an element-wise MAX all-reduce of a 1-d int32 array; the returned call finishes it.

        Every rank starts the same collectives in the same order. ``x`` is left alone; the result is another array of
        the same library and device, which a second call gives once more. The call raises
        :class:`~gradscale.CollectiveTimeoutError` when a rank does not come in time, and
        :class:`~gradscale.BackendError` for failures of the group's library.
        """


Group: TypeAlias = Collectives | Any
"""What ranks agree over: a communicator of MPI or NCCL, a ProcessGroup or DeviceMesh of torch, a group of MLX, or a
list of these."""


@runtime_checkable
class GroupBackend(Protocol):
    """The adapter of a communication library; registered like a :class:`~gradscale.Backend`.

    One object may be both, for a library that brings arrays and process groups.

    Examples
    --------
    >>> from gradscale import GroupBackend, testing
    >>> class ThreadBackend:
    ...     name = "mylibrary"
    ...     def collectives(self, group, /, *, timeout):
    ...         return testing.ThreadCollectives(group, timeout=timeout)
    >>> isinstance(ThreadBackend(), GroupBackend)
    True
    """

    name: str
    """The entry point's name."""

    def collectives(self, group: object, /, *, timeout: float) -> Collectives:
        """Wrap a communicator; ``timeout`` in seconds. May be collective over the group (duplicating it is)."""


class NotStepped:
    """The type of :data:`NOT_STEPPED`, which copies and pickles to itself."""

    def __repr__(self) -> str:
        return "gradscale.NOT_STEPPED"

    def __reduce__(self) -> str:
        return "NOT_STEPPED"


NOT_STEPPED = NotStepped()
"""What ``step`` of an optimizer returns if it has refused by itself: the step then counts as refused."""


class _Steps(Protocol):
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Update the parameters from the gradients; return :data:`NOT_STEPPED` if they were left as they are."""


@runtime_checkable
class OptimizerWithGroups(_Steps, Protocol):
    """An optimizer of torch's convention."""

    @property
    def param_groups(self) -> Iterable[Mapping[str, object]]:
        """Dicts whose ``"params"`` have ``.grad``; ``None`` is skipped."""


@runtime_checkable
class OptimizerWithGrads(_Steps, Protocol):
    """An optimizer that holds its gradients itself.

    Examples
    --------
    >>> import gradscale
    >>> class SGD:
    ...     grads = {"weights": None, "bias": None}
    ...     def step(self): ...
    >>> isinstance(SGD(), gradscale.Optimizer)
    True
    """

    grads: Any
    """Nested containers of floating arrays (None for no gradient), which can be read and assigned."""


Optimizer: TypeAlias = OptimizerWithGroups | OptimizerWithGrads
"""Anything with ``step()`` and gradients, in ``param_groups`` or, without them, in ``grads``.

An optional attribute ``master_dtype`` asks for the unscaled gradients in that dtype (float32 masters out of
float16 gradients): they are then new arrays, assigned back. Without it they are overwritten in place, in their own
dtype, if the library can. A disabled scaler leaves them as they are.
"""


class Policy(Protocol):
    """The rule that adapts the scale: pure functions of a state; no host read.

    Examples
    --------
    >>> import gradscale
    >>> policy: gradscale.Policy = gradscale.presets.megatron()
    >>> policy.init_scale
    4294967296.0
    >>> policy.clamp(0.25)  # below its minimum
    1.0
    """

    @property
    def init_scale(self) -> float:
        """The first scale."""

    def init(self, like: Array) -> ScaleState:
        """Return the first state, in the library and on the device of ``like``."""

    def update(self, state: ScaleState, *, nonfinite: Array) -> ScaleState:
        """Return the state after a step whose gradients had ``nonfinite`` bad leaves (0 for a clean step).

        Always called with ``nonfinite=``, since other libraries take the opposite flag in its place.
        """

    def backoff(self, state: ScaleState) -> ScaleState:
        """Return the state with the scale lowered once, whatever is tolerated (a closure is tried again)."""

    def clamp(self, scale: float) -> float:
        """Return the nearest scale in the range that the policy allows (a checkpoint's, or one set by hand)."""

    def at_min_scale(self, state: ScaleState) -> Array | bool | None:
        """Return a bool or a 0-d one: would one more overflow have to be raised; None if the policy never raises."""
