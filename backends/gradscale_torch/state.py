"""TensorState: a state that keeps its tensors, so that hosts and captured CUDA graphs see the new scale in them.

On the CPU it is one of Python numbers, until somebody asks for its tensors; from then on it is of tensors for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

import gradscale
from gradscale import registry
from gradscale.core.backend import Backend
from gradscale.core.protocols import Array, Policy, ScaleState
from gradscale.policies.plain import PlainRule, plain_rule
from gradscale.scaler.live_state import ANY_TRACKERS, largest_trackers, numbers_of, placed, require_values, with_setting
from gradscale_torch import kernels
from gradscale_torch.transfers import is_capturing, moved, refuse_capture

__all__ = ["TensorState"]

Tensor = torch.Tensor

_CPU = torch.device("cpu")


class TensorState:
    """The state of a scaler: numbers, or tensors adapted in place, by torch's kernel where that is the whole rule.

    Parameters
    ----------
    policy : Policy
        The rule that adapts it.
    device : str, torch.device, int or None
        Where the state is for a rank that has no gradients.
    """

    def __init__(self, policy: Policy, device: torch.device | str | int | None) -> None:
        self.policy = policy
        self.version = 0
        self._device = device
        self._state: ScaleState | None = None
        # What a checkpoint or the user has set before there was a tensor.
        self._restored: dict[str, Any] = {}
        # What the trackers can have reached since the scaler was made, and hosts have had no tensors to write to.
        self._largest = largest_trackers(policy)
        # Whether the growth tracker is below the growth interval, as torch's kernel takes for granted.
        self._is_regular = False
        # The smallest scale that there can be now, as far as the host knows without a read.
        self._floor = 0.0
        # The version in which the scale was last set, and not adapted.
        self._replaced_in = 0
        # Whether a captured graph adapts the state, and so lowers the scale when the host does not know.
        self._is_replayed = False
        self._judged_policy: Policy | None = None
        self._is_fused = False
        # None where the state is of tensors.
        self._rule: PlainRule | None = None
        # The state of numbers that has become tensors in this iteration.
        self._left: ScaleState | None = None
        # Of a state of numbers: its scale, and that and its reciprocal as tensors.
        self._shown: tuple[float, Tensor, Tensor] | None = None

    @property
    def is_made(self) -> bool:
        """Whether there is a state."""
        return self._state is not None

    @property
    def is_known(self) -> bool:
        """Whether there is a state, or numbers that were loaded or set."""
        return self._state is not None or len(self._restored) > 0

    def tensors(self) -> ScaleState | None:
        """Return the state in the tensors that it is kept in from now on; None without one."""
        self._largest = ANY_TRACKERS
        if self._state is not None and self._rule is not None:
            self._left, self._state = self._state, self.arrays(self._state)
            self._rule, self._is_regular = None, False
        return self._state

    def resolved(self, state: ScaleState) -> ScaleState:
        """Return the tensors that have taken the place of a state of numbers, or the state itself."""
        return self._state if state is self._left and self._state is not None else state

    @property
    def first(self) -> dict[str, Any]:
        """The numbers that a state will be made of."""
        return {"scale": self.policy.init_scale, "growth_tracker": 0, **self._restored}

    def replace_first(self, name: str, value: float) -> None:
        """Set one of the numbers that a state will be made of; one that is made keeps its own."""
        if self._state is None:
            self._restored[name] = value
            self._allow(self._restored)

    def backend_for(self, x: Array) -> Backend:
        """Return the adapter of an array; a loss may be of another library."""
        return registry.backend_for(x)

    def example(self) -> Tensor:
        """Return a 0-d tensor on the device that is trained on."""
        return torch.zeros((), device=self._device)

    def current(self, like: Array | None = None) -> ScaleState:
        """Return the state, made on the device of ``like`` if there is none yet."""
        if self._state is None:
            require_values(like)
            home = like.device if isinstance(like, Tensor) else _CPU
            refuse_capture(home, "call scale() once before, or every replay would begin with the first scale again")
            self._floor = float(self._restored.get("scale", self.policy.init_scale))
            self._state = placed(
                self.policy.init(like if home.type == "cpu" else torch.zeros((), device=_CPU)), self._restored
            )
            self._restored = {}
            if home.type == "cpu":
                self._settle_on(plain_rule(self.policy))
            else:
                # Filled by kernels, which nobody waits for, as for copies of the host's memory.
                filled = (torch.full((), field.item(), dtype=field.dtype, device=home) for field in self._state)
                self._state = ScaleState(*filled)
        return self._state

    def _settle_on(self, rule: PlainRule | None) -> None:
        assert self._state is not None
        self._rule = rule
        if rule is not None and not isinstance(self._state.scale, float):
            self._state = ScaleState(**numbers_of(self._state, self.backend_for(self._state.scale), self._largest))
        elif rule is None:
            self._state = self.arrays(self._state)

    def arrays(self, state: ScaleState) -> ScaleState:
        """Return a state in tensors; new ones on the CPU for one of numbers."""
        if not isinstance(state.scale, float):
            return state
        trackers = (torch.tensor(tracker, dtype=torch.int32, device=_CPU) for tracker in state[1:])
        return ScaleState(torch.tensor(state.scale, dtype=torch.float32, device=_CPU), *trackers)

    def scale_and_inverse(self, state: ScaleState) -> tuple[Tensor, Tensor | None]:
        """Return the scale of a state, and of one of numbers its reciprocal, as 0-d float32; not to be written to."""
        scale: Any = state.scale
        if not isinstance(scale, float):
            return scale, None
        if self._shown is None or self._shown[0] != scale:
            shown = torch.tensor(scale, dtype=torch.float32, device=_CPU)
            self._shown = scale, shown, kernels.inverse_of(shown)
        return self._shown[1:]

    def at_min_scale(self, state: ScaleState) -> Array | bool | None:
        """Return whether an overflow now must be raised, as the policy says: a bool for a state of numbers."""
        if isinstance(state.scale, float) and self._rule is not None:
            return self._rule.at_min_scale is not None and self._rule.at_min_scale(state)
        return self.policy.at_min_scale(self.arrays(state))

    def take(self, state: ScaleState) -> None:
        """Go on with a state from elsewhere, such as a lowered one; its tensors are the state's from now on."""
        self._state = state
        if self._rule is not None or isinstance(state.scale, float):
            self._settle_on(self._rule)

    def advance(self, counts: Sequence[Array | int]) -> None:
        """Adapt the state in place, so that a captured CUDA graph sees the new scale. No host read."""
        state = self.current()
        self.version += 1
        self._left = None
        if self._rule is not None:
            self._state = self._rule.update(state, max(map(int, counts)))
            return
        self._floor *= getattr(self.policy, "backoff_factor", 1.0)
        self._is_replayed = self._is_replayed or is_capturing(state.scale.device)
        first = counts[0]
        found = first if len(counts) == 1 and isinstance(first, Tensor) else _worst(counts, state.scale.device)
        if self._is_regular and self._has_fused_update():
            kernels.update_in_place(cast(gradscale.DynamicScale, self.policy), state, found)
            # A new tuple of the same tensors: what is kept of the old one is out of date.
            self._state = ScaleState(*state)
            return
        self._is_regular = True
        self._state = _copied_into(state, self.policy.update(state, nonfinite=found))

    def refuse_capture(self, what: str) -> None:
        """Raise CallOrderError while a graph of the state's device is captured; ``what`` says what to do instead."""
        if self._state is not None and not isinstance(self._state.scale, float):
            refuse_capture(self._state.scale.device, what)

    def lowered(self, state: ScaleState) -> ScaleState:
        """Return a state with its scale backed off once; the very same one where the policy cannot."""
        if isinstance(state.scale, float) and self._rule is not None:
            return self._rule.backoff(state)
        return self.policy.backoff(self.arrays(state))

    def settle(self, state: ScaleState, values: Sequence[int]) -> None:
        """Do nothing: torch computes at once."""

    def observe(self, scale: float, version: int) -> None:
        """Take note of the scale that a verdict carries: since that version it has been backed off that often."""
        if version < self._replaced_in:
            return
        self._floor = scale
        if version != self.version:
            self._floor *= getattr(self.policy, "backoff_factor", 1.0) ** (self.version - version)

    def may_be_below_one(self, state: ScaleState) -> bool:
        """Tell whether the scale may be below 1, so that a finite gradient may overflow when it is divided."""
        if isinstance(state.scale, float):
            return state.scale < 1.0
        if state.scale.device.type == "cpu":
            return bool(state.scale.item() < 1.0)
        return self._is_replayed or self._floor < 1.0 or is_capturing(state.scale.device)

    def numbers(self) -> dict[str, Any]:
        """Return the state as numbers, by the names of its fields. One host read."""
        if self._state is None:
            return {"scale": self.policy.init_scale, **self._restored}
        if isinstance(self._state.scale, float):
            return self._state._asdict()
        return numbers_of(self._state, self.backend_for(self._state.scale), self._largest)

    def scale(self) -> float:
        """Return the scale as a number. One host read."""
        scale: Any = self.first["scale"] if self._state is None else self._state.scale
        return float(scale)

    def replace_scale(self, scale: float) -> None:
        """Set the scale in place, and keep the trackers."""
        self._floor = scale
        self._note_replaced()
        if self._state is None:
            self._restored["scale"] = scale
        elif self._rule is not None:
            self._state = self._state._replace(scale=scale)
        else:
            self._state.scale.fill_(scale)
            self._state = ScaleState(*self._state)

    def _note_replaced(self) -> None:
        """Take no more note of verdicts that were begun before now."""
        self.version += 1
        self._replaced_in = self.version

    def replace_field(self, name: str, value: Tensor) -> None:
        """Put a tensor of a host's in the place of a field, by identity where it fits."""
        self.current(value)
        state = self.tensors()
        assert state is not None
        field: Tensor = getattr(state, name)
        placed_value = moved(value, field.device, dtype=field.dtype)
        self._state = state._replace(**{name: placed_value.reshape(()) if placed_value.shape else placed_value})
        self._is_regular = False

    def replace_setting(self, name: str, value: Any) -> None:
        """Set one of a DynamicScale's settings."""
        self.policy = with_setting(self.policy, name, value)
        self._largest = largest_trackers(self.policy, self._largest)
        self._is_regular = False
        if self._state is not None and self._rule is not None:
            self._settle_on(plain_rule(self.policy))

    def load(self, policy: Policy, numbers: dict[str, Any], *, keep: bool) -> None:
        """Go on with another policy and other numbers, in the same tensors unless the present ones are in use."""
        self.policy = policy
        self._allow(numbers)
        self._is_regular = False
        self._floor = 0.0
        self._note_replaced()
        if self._state is None:
            self._restored = numbers
            return
        if self._rule is not None:
            self._state = self._state._replace(**numbers)
            self._settle_on(plain_rule(policy))
            return
        loaded = placed(self._state, numbers)
        self._state = loaded if keep else _copied_into(self._state, loaded)

    def _allow(self, numbers: dict[str, Any]) -> None:
        """Take note that the trackers have reached what somebody has set or loaded, at the least."""
        self._largest = largest_trackers(self.policy, [numbers.get(name, 0) for name in ScaleState._fields[1:]])

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: numbers instead of tensors, so that the next tensor says where the state goes."""
        restored = dict(self._restored) if self._state is None else self.numbers()
        forgotten: dict[str, Any] = {"_is_regular": False, "_is_replayed": False, "_floor": 0.0}
        forgotten |= dict.fromkeys(("_state", "_judged_policy", "_rule", "_left", "_shown"))
        return self.__dict__ | {"_restored": restored} | forgotten

    def _has_fused_update(self) -> bool:
        if self._judged_policy is not self.policy:
            self._judged_policy, self._is_fused = self.policy, kernels.has_fused_update(self.policy)
        return self._is_fused


def _worst(counts: Sequence[Array | int], home: torch.device) -> Tensor:
    """Return the worst of several verdicts, numbers or 0-d flags on the state's device, as a flag."""
    flags: list[Tensor] = [count for count in counts if isinstance(count, Tensor)]
    known = [count for count in counts if isinstance(count, int)]
    if known:
        flags.append(torch.full((), float(max(known) > 0), dtype=torch.float32, device=home))
    return flags[0] if len(flags) == 1 else torch.stack(flags).amax()


def _copied_into(state: ScaleState, new: ScaleState) -> ScaleState:
    """Write a state into the tensors of another, and return these as a new tuple."""
    for tensor, value in zip(state, new, strict=True):
        tensor.copy_(value)
    return ScaleState(*state)
