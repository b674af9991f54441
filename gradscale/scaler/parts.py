"""The interfaces of a scaler's parts, which an adapter may replace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gradscale.core.backend import Backend
from gradscale.core.protocols import Array, Collectives, Policy, ScaleState
from gradscale.core.vector import Reason, Verdict

__all__ = ["Found", "Gradients", "LiveState", "Pending", "Request", "Scaling", "Unscaler"]


class LiveState(Protocol):
    """Where the state lives: a policy, and its state from the first array on."""

    policy: Policy
    is_scaled_unseen: bool
    """Whether outputs may be scaled without a call of ``scale``: by replays of a captured graph, or by a user who was
    told of it."""

    @property
    def is_made(self) -> bool:
        """Whether there is a state; before, there are numbers at most, which a checkpoint has left."""

    @property
    def is_known(self) -> bool:
        """Whether something is known of the scale: there is a state, or numbers that were loaded or set."""

    @property
    def version(self) -> int:
        """A number that rises by one each time the state is adapted; ``observe`` is told that of an earlier verdict."""

    def backend_for(self, x: Array) -> Backend:
        """Return the adapter of an array: the scaler's own, or the one of the array's library."""

    def example(self) -> Array | None:
        """Return an array of the scaler's own adapter; None if it has none."""

    def current(self, like: Array | None = None) -> ScaleState:
        """Return the state, made in the library and on the device of ``like`` if there is none yet."""

    def arrays(self, state: ScaleState) -> ScaleState:
        """Return a state as arrays, converted from numbers if it is of numbers."""

    def at_min_scale(self, state: ScaleState) -> Array | bool | None:
        """Return whether an overflow now must be raised: a bool for a state of numbers; None if never."""

    def take(self, state: ScaleState) -> None:
        """Go on with a state from elsewhere, such as a lowered one."""

    def advance(self, counts: Sequence[Array | int], held: Sequence[Array] = ()) -> None:
        """Adapt the state to the counts of an iteration: any overflow backs the scale off once. No host read.

        If all of ``held`` are true, 0-d, nothing is changed.
        """

    def lowered(self, state: ScaleState) -> ScaleState:
        """Return a state with its scale backed off once; the very same one if the policy cannot."""

    def settle(self, state: ScaleState, values: Sequence[int]) -> None:
        """Replace a lazy state by the values just read."""

    def observe(self, scale: float, version: int) -> None:
        """Record the scale that a verdict carries, which was the one of that version."""

    def numbers(self) -> dict[str, float]:
        """Return the state as numbers, by the names of its fields. One host read."""

    def scale(self) -> float:
        """Return the scale as a number. One host read."""

    def replace_scale(self, scale: float) -> None:
        """Set the scale and keep the trackers."""

    def replace_setting(self, name: str, value: float) -> None:
        """Set one of a DynamicScale's settings."""

    def load(self, policy: Policy, numbers: dict[str, float], *, keep: bool) -> None:
        """Go on with another policy and other numbers; ``keep`` says that the present state is still in use."""


class Request(Protocol):
    """What an unscaler is asked for besides unscaling."""

    @property
    def max_norm(self) -> float | None:
        """What the gradients are clipped to, if at all."""


class Gradients(Protocol):
    """An optimizer's gradients on their way through an unscaler; kept by nobody."""

    is_touched: bool
    """Whether some of them may have been overwritten, so that they cannot be unscaled again."""

    @property
    def like(self) -> Array | None:
        """An array that says in which library and on which device the state belongs; None without any."""

    @property
    def groups(self) -> Sequence[Collectives]:
        """The groups that the gradients themselves are spread over, for a scaler that was given none."""


class Found(Protocol):
    """What an unscaler has found: the norm if it was asked for, and what only its Pending reads."""

    @property
    def norm(self) -> Array | None:
        """The norm before clipping, 0-d float32; None if nothing was clipped."""


class Unscaler(Protocol):
    """Collects an optimizer's gradients; unscales, clips and judges them."""

    def collect(self, optimizer: Any, request: Any = None) -> Gradients:
        """Return an optimizer's gradients; nothing is modified."""

    def unscale(self, gradients: Any, live: Any, state: ScaleState) -> Found:
        """Divide gradients by the scale of a state, clip and judge them."""

    def clip_unscaled(self, optimizer: Any, max_norm: float, live: Any) -> Array | None:
        """Clip gradients that are not scaled, and return their norm; None without any."""

    def groups_for(self, optimizer: Any, groups: Sequence[Collectives]) -> Sequence[Collectives]:
        """Return the groups that an optimizer's ranks agree over, before its gradients are looked at."""

    def values_of(self, gradient: Array) -> Array | None:
        """Return the array that holds a gradient's values on this rank; None if it has none."""

    def shape_of(self, gradient: Array) -> tuple[int, ...]:
        """Return the shape of a gradient on this rank."""

    def was_left_scaled(self, optimizer: Any) -> bool:
        """Tell whether the optimizer unscaled its own gradients in its last step."""

    def remember_left_scaled(self, optimizer: Any) -> None:
        """Record that the optimizer unscales its own gradients, until they are unscaled here."""


class Pending(Protocol):
    """The verdict on one optimizer's gradients, from the start of the agreement on."""

    groups: Sequence[Collectives]
    """What is agreed over; empty for a process that decides alone."""
    known: Verdict | None
    """The verdict, if it has been read."""
    numbers: ScaleState | None
    """The state that it was unscaled with, as numbers that were read with the verdict, if they were."""
    is_read_later: bool
    """Whether the optimizer acts on it by itself, so that it is read only when somebody asks."""
    is_scaled: bool
    """Whether the gradients were only judged, and are left to the optimizer to unscale."""
    is_captured: bool
    """Whether a captured graph writes it at each replay."""
    version: int
    """The live state's, when it began."""

    @property
    def is_begun(self) -> bool:
        """Whether there is anything to be read."""

    def verdict(self) -> Verdict:
        """Finish the agreement and read its verdict: the one host read of a step."""

    def count(self) -> Array | int | None:
        """Return the agreed count, for the live state; None for a known spike or refusal, which moves no scale."""

    def held(self) -> Array | bool:
        """Return whether the scale stays as it is, for a spike or a refusal; a 0-d bool if the CPU does not know."""

    def reason(self) -> Reason | Array:
        """Return why the ranks skip the step; its number as a 0-d int32 if the CPU does not know."""

    def refuse(self, code: int) -> None:
        """Skip the step of a process that decides alone."""

    def has_arrived(self) -> bool:
        """Tell whether the verdict can be read without waiting."""


class Scaling(Protocol):
    """Multiplies what is passed to ``scale()``."""

    def scale(self, outputs: Any, present: Callable[[], Any], look: Callable[[Sequence[Array]], None] | None) -> Any:
        """Return outputs multiplied by the present iteration's scale; ``look`` is called with the unscaled leaves then.

        An iterator may be consumed in a later iteration, which is then the present one.
        """
