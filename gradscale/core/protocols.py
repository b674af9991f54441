"""What plugs in, and what goes between: Array, ScaleState, Policy, Backend, Collectives, Optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

__all__ = ["Array", "Backend", "Collectives", "GroupBackend", "Optimizer", "Policy", "ScaleState"]

Array: TypeAlias = Any
"""An array of any library that follows the Python array API standard."""


class ScaleState(NamedTuple):
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
    """

    scale: Array
    growth_tracker: Array
    overflow_tracker: Array
    rescale_tracker: Array


@runtime_checkable
class Backend(Protocol):
    """What an array library's adapter adds to the array API standard.

    Registered in the entry-point group ``gradscale.backends`` under the top-level module of the array type.
    Hold it to :func:`gradscale.testing.check_backend`.

    An adapter may have more members, each found by its name:

    - ``summarize(arrays)`` counts what floating arrays hold, faster than
      :func:`gradscale.core.summaries.summarize_arrays` and to the same numbers;
    - ``unscale_with_squares`` takes what ``unscale`` takes, and returns as a third thing the sum of the squares of all
      unscaled elements, 0-d float64 (float32 where there is none) on the state's device, from the same pass;
    - ``multiply_in_place(arrays, factor)`` multiplies arrays that ``unscale`` has returned by a 0-d float32 of at most
      1, to the bits of :func:`gradscale.core.arithmetic.multiply_arrays`;
    - ``start_read(x)`` begins what ``read`` does without making the host wait; what it returns has ``is_done()``, and
      called gives the ints;
    - ``move(x, like)`` returns a 0-d array on the device of another array, in the order of the devices' streams;
    - ``refuse_tracing(what)`` raises in a function that is compiled or captured, where a scaler's scale would become a
      constant.
    """

    name: str
    """The entry point's name."""

    def read(self, x: Array, /) -> list[int]:
        """Return a 1-d int32 array as Python ints: the one place where the host waits for the device."""
        ...

    def unscale(
        self, grads: Sequence[Array], state: ScaleState, /, *, dtype: Any = None, out: Sequence[Array] | None = None
    ) -> tuple[Sequence[Array], Array]:
        """Divide floating arrays by the scale and count those that are not finite afterwards.

        Same answer, bit for bit, as :func:`gradscale.core.arithmetic.unscale_arrays`, which any adapter may call; of a
        complex value that is not finite, only that it is not. ``out`` names an array to write to for each gradient, the
        gradients themselves among them; where the library cannot write, new arrays of these dtypes come back. Without
        it new arrays come back, of ``dtype`` if that is given. Returns the arrays and a 0-d int32 count, which a kernel
        that judges many arrays at once may understate, but never to 0.
        """
        ...

    def placement(self, like: Array, /) -> Any:
        """Return the ``device=`` of a 0-d array that is to be combined with ``like``; None where any one will do.

        :func:`array_api_compat.device` is right for a library whose arrays are each on one device.
        """
        ...

    def example(self) -> Array:
        """Return a 0-d float32 array on the default device, for a rank that has no arrays of its own."""
        ...

    def fingerprint(self, state: ScaleState, /) -> Array:
        """Return a state as a 1-d int32 array: the IEEE bits of the scale, then each tracker.

        Same answer as :func:`gradscale.core.arithmetic.fingerprint`, which any adapter may call.
        """
        ...


class Collectives(Protocol):
    """A group of processes that can agree on a few integers."""

    rank: int
    """Position of this process in the group, from 0."""
    size: int
    """Number of processes in the group."""

    def start_max(self, x: Array, /) -> Callable[[], Array]:
        """Begin an element-wise MAX all-reduce of a 1-d int32 array; the returned call finishes it.

        Every rank starts the same collectives in the same order. ``x`` is left alone; the result is a new array of
        the same library and device, also when it is called again. The call raises
        :class:`~gradscale.CollectiveTimeoutError` when a rank does not come in time, and
        :class:`~gradscale.BackendError` for failures of the group's library.
        """
        ...


@runtime_checkable
class GroupBackend(Protocol):
    """What the adapter of a communication library supplies; registered like a :class:`Backend`.

    One object may be both, for a library that brings arrays and process groups.
    """

    name: str
    """The entry point's name."""

    def collectives(self, group: Any, /, *, timeout: float) -> Collectives:
        """Wrap a communicator; ``timeout`` in seconds. May be collective over the group (duplicating it is)."""
        ...


@runtime_checkable
class Optimizer(Protocol):
    """Anything with ``step()`` and gradients.

    The gradients are found in one of two places:

    - ``param_groups``: a list of dicts whose ``"params"`` have ``.grad`` (torch's convention); ``None`` is skipped;
    - ``grads``: nested containers of arrays, which can be read and assigned.

    An optional attribute ``master_dtype`` asks for the unscaled gradients in that dtype (float32 masters out of
    float16 gradients): they are then new arrays, assigned back. Without it they are overwritten in place, in their own
    dtype, where the library can. A disabled scaler leaves them as they are.
    """

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Update the parameters from the gradients."""
        ...


class Policy(Protocol):
    """The rule that adapts the scale: pure functions of a state; no host read."""

    @property
    def init_scale(self) -> float:
        """The first scale."""
        ...

    def init(self, like: Array) -> ScaleState:
        """Return the first state, in the library and on the device of ``like``."""
        ...

    def update(self, state: ScaleState, *, nonfinite: Array) -> ScaleState:
        """Return the state after a step whose gradients had ``nonfinite`` bad leaves (0 for a clean step).

        Always called with ``nonfinite=``, since other libraries take the opposite flag in its place.
        """
        ...

    def backoff(self, state: ScaleState) -> ScaleState:
        """Return the state with the scale lowered once, whatever is tolerated (a closure is tried again)."""
        ...

    def clamp(self, scale: float) -> float:
        """Return a scale moved into the range that the policy allows (a checkpoint's, or one set by hand)."""
        ...

    def exhausted(self, state: ScaleState) -> Array | None:
        """Return a 0-d bool: would one more overflow have to be raised; None where the policy never raises."""
        ...
