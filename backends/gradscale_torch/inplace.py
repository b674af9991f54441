"""InPlaceState: a state that keeps its tensors, so that hosts and captured CUDA graphs see the new scale in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

import gradscale
from gradscale.core.protocols import Array, Policy, ScaleState
from gradscale.scaler.iteration import Progress
from gradscale_torch import kernels

__all__ = ["InPlaceState", "copy_into"]


class InPlaceState(gradscale.ShardedGradScaler):
    """Adapts the state in place, by torch's kernel where that is the whole rule."""

    def _advance(self, judged: Sequence[Progress]) -> ScaleState:
        """Adapt the state in place, so that a captured CUDA graph sees the new scale."""
        state = self._current(None)
        flags = [self._agreed_flag(progress) for progress in judged]
        found = flags[0] if len(flags) == 1 else torch.stack(flags).amax()
        self._updates += 1
        self._floor *= self.get_backoff_factor()
        self._check_unread()
        if self._is_regular and self._has_fused_update():
            kernels.update_in_place(cast(gradscale.DynamicScale, self._policy), state, found)
            # A new tuple of the same tensors: what is kept of the old one is out of date.
            return ScaleState(*state)
        self._is_regular = True
        return copy_into(state, self._policy.update(state, nonfinite=found))

    def _has_fused_update(self) -> bool:
        policy = self._policy
        if self._judged_policy is not policy:
            self._judged_policy, self._policy_is_fused = policy, kernels.has_fused_update(policy)
        return self._policy_is_fused

    _judged_policy: Policy | None = None
    _policy_is_fused = False

    def _current(self, like: Array | None) -> ScaleState:
        if self._state is None:
            self._floor = float(self._restored.get("scale", self._policy.init_scale))
        return super()._current(like)

    def _set_scale(self, scale: float) -> None:
        self._floor = scale
        if self._state is None:
            super()._set_scale(scale)
        else:
            self._state.scale.fill_(scale)
            self._state = ScaleState(*self._state)

    def _replace_setting(self, name: str, value: Any) -> None:
        super()._replace_setting(name, value)
        self._is_regular = False

    if TYPE_CHECKING:
        # What the scaler brings.
        _floor: float
        _updates: int
        _is_regular: bool

        def _check_unread(self) -> None: ...
        def _agreed_flag(self, progress: Progress) -> torch.Tensor: ...


def copy_into(state: ScaleState, new: ScaleState) -> ScaleState:
    """Write a state into the tensors of another, and return these as a new tuple."""
    for tensor, value in zip(state, new, strict=True):
        tensor.copy_(value)
    return ScaleState(*state)
