"""TensorState: a state that keeps its tensors, so that hosts and captured CUDA graphs see the new scale in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

import gradscale
from gradscale import registry
from gradscale.core.backend import Backend
from gradscale.core.protocols import Array, Policy, ScaleState
from gradscale.scaler.live_state import numbers_of, placed, with_setting
from gradscale_torch import kernels
from gradscale_torch.verdicts import is_capturing

__all__ = ["TensorState"]

Tensor = torch.Tensor


class TensorState:
    """The state of a scaler, in tensors that are adapted in place, by torch's kernel where that is the whole rule.

    Parameters
    ----------
    policy : Policy
        The rule that adapts it.
    device : str
        Where the state is for a rank that has no gradients.
    """

    def __init__(self, policy: Policy, device: str) -> None:
        self.policy = policy
        self.version = 0
        self._device = device
        self._state: ScaleState | None = None
        # What a checkpoint or the user has set before there was a tensor.
        self._restored: dict[str, Any] = {}
        # Whether the growth tracker is below the growth interval, as torch's kernel takes for granted.
        self._is_regular = False
        # The smallest scale that there can be now, as far as the host knows without a read.
        self._floor = 0.0
        self._judged_policy: Policy | None = None
        self._is_fused = False

    @property
    def is_made(self) -> bool:
        """Whether there is a state."""
        return self._state is not None

    @property
    def is_known(self) -> bool:
        """Whether there is a state, or numbers that were loaded or set."""
        return self._state is not None or len(self._restored) > 0

    @property
    def state(self) -> ScaleState | None:
        """The state, where there is one."""
        return self._state

    @property
    def first(self) -> dict[str, Any]:
        """The numbers that a state will be made of."""
        return {"scale": self.policy.init_scale, "growth_tracker": 0, **self._restored}

    def backend_for(self, x: Array) -> Backend:
        """Return the adapter of an array; a loss may be of another library."""
        return registry.backend_for(x)

    def example(self) -> Tensor:
        """Return a 0-d tensor on the device that is trained on."""
        return torch.zeros((), device=self._device)

    def current(self, like: Array | None = None) -> ScaleState:
        """Return the state, made on the device of ``like`` if there is none yet."""
        if self._state is None:
            self._floor = float(self._restored.get("scale", self.policy.init_scale))
            self._state = placed(self.policy.init(like), self._restored)
            self._restored = {}
        return self._state

    def take(self, state: ScaleState) -> None:
        """Go on with a state from elsewhere, such as a lowered one; its tensors are the state's from now on."""
        self._state = state

    def advance(self, counts: Sequence[Array | int]) -> None:
        """Adapt the state in place, so that a captured CUDA graph sees the new scale. No host read."""
        state = self.current()
        self.version += 1
        self._floor *= getattr(self.policy, "backoff_factor", 1.0)
        first = counts[0]
        found = first if len(counts) == 1 and isinstance(first, Tensor) else _worst(counts, state.scale.device)
        if self._is_regular and self._has_fused_update():
            kernels.update_in_place(cast(gradscale.DynamicScale, self.policy), state, found)
            # A new tuple of the same tensors: what is kept of the old one is out of date.
            self._state = ScaleState(*state)
            return
        self._is_regular = True
        self._state = _copied_into(state, self.policy.update(state, nonfinite=found))

    def lowered(self, state: ScaleState) -> ScaleState:
        """Return a state with its scale backed off once; the very same one where the policy cannot."""
        return self.policy.backoff(state)

    def settle(self, state: ScaleState, values: Sequence[int]) -> None:
        """Do nothing: torch computes at once."""

    def observe(self, scale: float, version: int) -> None:
        """Take note of the scale that a verdict carries: since that version it has been backed off that often."""
        self._floor = scale
        if version != self.version:
            self._floor *= getattr(self.policy, "backoff_factor", 1.0) ** (self.version - version)

    def may_be_below_one(self, state: ScaleState) -> bool:
        """Tell whether the scale may be below 1, so that a finite gradient may overflow when it is divided."""
        if state.scale.device.type == "cpu":
            return bool(state.scale.item() < 1.0)
        return self._floor < 1.0 or is_capturing(state.scale.device)

    def numbers(self) -> dict[str, Any]:
        """Return the state as numbers, by the names of its fields. One host read."""
        if self._state is None:
            return {"scale": self.policy.init_scale, **self._restored}
        return numbers_of(self._state, self.backend_for(self._state.scale))

    def scale(self) -> float:
        """Return the scale as a number. One host read."""
        return float(self.first["scale"] if self._state is None else self._state.scale.item())

    def replace_scale(self, scale: float) -> None:
        """Set the scale in place, and keep the trackers."""
        self._floor = scale
        if self._state is None:
            self._restored["scale"] = scale
        else:
            self._state.scale.fill_(scale)
            self._state = ScaleState(*self._state)

    def replace_field(self, name: str, value: Tensor) -> None:
        """Put a tensor of a host's in the place of a field, by identity where it fits."""
        state = self.current(value)
        fields = {name: value.to(getattr(state, name).dtype).reshape(())}
        self._state = state._replace(**fields)
        self._is_regular = False

    def replace_setting(self, name: str, value: Any) -> None:
        """Set one of a DynamicScale's settings."""
        self.policy = with_setting(self.policy, name, value)
        self._is_regular = False

    def load(self, policy: Policy, numbers: dict[str, Any], *, keep: bool) -> None:
        """Go on with another policy and other numbers, in the same tensors unless the present ones are in use."""
        self.policy = policy
        self._is_regular = False
        self._floor = 0.0
        if self._state is None:
            self._restored = numbers
            return
        loaded = placed(self._state, numbers)
        self._state = loaded if keep else _copied_into(self._state, loaded)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: numbers instead of tensors, so that the next tensor says where the state goes."""
        restored = dict(self._restored) if self._state is None else self.numbers()
        forgotten = {"_state": None, "_is_regular": False, "_floor": 0.0, "_judged_policy": None}
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
        flags.append(torch.tensor(float(max(known) > 0), device=home))
    return flags[0] if len(flags) == 1 else torch.stack(flags).amax()


def _copied_into(state: ScaleState, new: ScaleState) -> ScaleState:
    """Write a state into the tensors of another, and return these as a new tuple."""
    for tensor, value in zip(state, new, strict=True):
        tensor.copy_(value)
    return ScaleState(*state)
