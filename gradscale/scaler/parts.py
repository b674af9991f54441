"""The interfaces of a scaler's parts, which an adapter may bring in the place of the core's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gradscale.core.backend import Backend
from gradscale.core.protocols import Array, Collectives, Policy, ScaleState
from gradscale.core.vector import Verdict

__all__ = ["Found", "Gradients", "LiveState", "Pending", "Scaling", "Unscaler"]


class LiveState(Protocol):
    """Where the state lives: a policy, and its state from the first array on."""

    policy: Policy

    @property
    def is_made(self) -> bool:
        """Whether there is a state; before, there are numbers at most, which a checkpoint has left."""
        ...

    @property
    def is_known(self) -> bool:
        """Whether something is known of the scale: there is a state, or numbers that were loaded or set."""
        ...

    @property
    def version(self) -> int:
        """A number that rises when the state is adapted, by one each time, and when its scale is set."""
        ...

    def backend_for(self, x: Array) -> Backend:
        """Return the adapter of an array: the scaler's own, or the one of the array's library."""
        ...

    def example(self) -> Array | None:
        """Return an array of the scaler's own adapter; None where it has none of its own."""
        ...

    def current(self, like: Array | None = None) -> ScaleState:
        """Return the state, made on the library and device of ``like`` if there is none yet."""
        ...

    def arrays(self, state: ScaleState) -> ScaleState:
        """Return a state as arrays, which one of numbers is made into."""
        ...

    def at_min_scale(self, state: ScaleState) -> Array | bool | None:
        """Return whether an overflow now must be raised, as the policy says: a bool for a state of numbers."""
        ...

    def take(self, state: ScaleState) -> None:
        """Go on with a state from elsewhere, such as a lowered one."""
        ...

    def advance(self, counts: Sequence[Array | int]) -> None:
        """Adapt the state to the counts of an iteration: any overflow backs the scale off once. No host read."""
        ...

    def lowered(self, state: ScaleState) -> ScaleState:
        """Return a state with its scale backed off once; the very same one where the policy cannot."""
        ...

    def settle(self, state: ScaleState, values: Sequence[int]) -> None:
        """Put what the host has read of a state in the place of what a lazy library only plans."""
        ...

    def observe(self, scale: float, version: int) -> None:
        """Take note of the scale that a verdict carries, which was the one of that version."""
        ...

    def numbers(self) -> dict[str, Any]:
        """Return the state as numbers, by the names of its fields. One host read."""
        ...

    def scale(self) -> float:
        """Return the scale as a number. One host read."""
        ...

    def replace_scale(self, scale: float) -> None:
        """Set the scale and keep the trackers."""
        ...

    def replace_setting(self, name: str, value: Any) -> None:
        """Set one of a DynamicScale's settings."""
        ...

    def load(self, policy: Policy, numbers: dict[str, Any], *, keep: bool) -> None:
        """Go on with another policy and other numbers; ``keep`` says that the present state is still in use."""
        ...


class Gradients(Protocol):
    """An optimizer's gradients on their way through an unscaler; kept by nobody.

    Attributes
    ----------
    is_touched : bool
        Whether some of them may have been overwritten, so that they cannot be unscaled again.
    """

    is_touched: bool

    @property
    def like(self) -> Array | None:
        """An array beside which the state belongs; None without any."""
        ...

    def groups(self) -> Sequence[Collectives]:
        """Return the groups that the gradients themselves are spread over, where the scaler was given none."""
        ...


class Found(Protocol):
    """What an unscaler has found: the norm before clipping where it was asked for, and what only a Pending reads."""

    @property
    def norm(self) -> Array | None:
        """The norm before clipping, 0-d float32; None where nothing was clipped."""
        ...


class Unscaler(Protocol):
    """Collects an optimizer's gradients; unscales, clips and judges them."""

    def collect(self, optimizer: Any, request: Any = None) -> Any:
        """Return an optimizer's :class:`Gradients`; ``request`` is what the unscaler understands, such as a Clip."""
        ...

    def unscale(self, gradients: Any, live: Any, state: ScaleState) -> Any:
        """Divide gradients by the scale of a state, clip and judge them; return what was :class:`Found`."""
        ...

    def clip_unscaled(self, optimizer: Any, max_norm: float, live: Any) -> Array | None:
        """Clip gradients that are not scaled, and return their norm; None without any."""
        ...

    def groups_for(self, optimizer: Any, groups: Sequence[Collectives]) -> Sequence[Collectives]:
        """Return what an optimizer's ranks are gathered over, before its gradients are looked at."""
        ...

    def values_of(self, gradient: Any) -> Array | None:
        """Return the array that holds a gradient's values on this rank; None where it has none."""
        ...

    def shape_of(self, gradient: Any) -> tuple[int, ...]:
        """Return the shape of a gradient on this rank."""
        ...

    def was_left_scaled(self, optimizer: Any) -> bool:
        """Tell whether an optimizer's last step was left to divide its gradients by itself."""
        ...

    def remember_left_scaled(self, optimizer: Any) -> None:
        """Keep in mind that an optimizer was left to divide its gradients by itself, until they are unscaled."""
        ...


class Pending(Protocol):
    """The verdict on one optimizer's gradients, from the start of the agreement on.

    Attributes
    ----------
    groups : sequence of Collectives
        What is agreed over; empty for a process that decides alone.
    known : Verdict or None
        What the host has read.
    numbers : ScaleState or None
        The state that it was unscaled with, as numbers that were read with the verdict; None where they were not.
    is_begun : bool
        Whether there is anything to be read.
    is_read_later : bool
        Whether the optimizer acts on it by itself, so that the host reads it only when somebody asks.
    is_scaled : bool
        Whether the gradients were only judged, and are left to the optimizer to unscale.
    is_captured : bool
        Whether a captured graph writes it anew at each replay.
    version : int
        The live state's, when it began.
    """

    @property
    def groups(self) -> Sequence[Collectives]: ...  # noqa: D102

    @property
    def known(self) -> Verdict | None: ...  # noqa: D102

    @property
    def numbers(self) -> ScaleState | None: ...  # noqa: D102

    @property
    def is_begun(self) -> bool: ...  # noqa: D102

    @property
    def is_read_later(self) -> bool: ...  # noqa: D102

    @property
    def is_scaled(self) -> bool: ...  # noqa: D102

    @property
    def is_captured(self) -> bool: ...  # noqa: D102

    @property
    def version(self) -> int: ...  # noqa: D102

    def verdict(self) -> Verdict:
        """Finish the agreement and read its verdict: the one host read of a step."""
        ...

    def count(self) -> Array | int:
        """Return the agreed count, for the live state; no host read."""
        ...

    def has_arrived(self) -> bool:
        """Tell whether the verdict can be read without waiting."""
        ...


class Scaling(Protocol):
    """The way of outputs through ``scale()``."""

    def scale(
        self,
        outputs: Any,
        iteration: Any,
        look: Callable[[Sequence[Any]], None] | None,
    ) -> Any:
        """Return outputs multiplied by the scale.

        Parameters
        ----------
        outputs : object
            What the user passed.
        iteration : Iteration
            Says what to scale with, and is told once it is done.
        look : callable or None
            Called with the unscaled leaves, once they are scaled.
        """
        ...
