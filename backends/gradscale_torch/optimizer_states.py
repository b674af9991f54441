"""OptimizerStates: what training frameworks read and write as ``_per_optimizer_states`` of torch's scalers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

import gradscale
from gradscale.errors import InvalidValueError
from gradscale.scaler.iteration import Iteration, Stage, Turn
from gradscale_torch.kernels import Found
from gradscale_torch.verdicts import TensorVerdict

__all__ = ["OptimizerState", "OptimizerStates", "found_by_device"]

Tensor = torch.Tensor

_OPT_STATES = {Stage.READY: OptState.READY, Stage.UNSCALED: OptState.UNSCALED, Stage.STEPPED: OptState.STEPPED}


def found_by_device(iteration: Iteration, turn: Turn) -> Found:
    """Return the agreed verdict for each device of an optimizer's gradients, and for the scale's without any."""
    if turn.pending is None:
        if not iteration.live.is_made:
            return {}
        turn.pending = TensorVerdict.unjudged(iteration)
    pending = cast(TensorVerdict, turn.pending)
    if pending.is_read_by_host:
        iteration.verdict(turn)
    return pending.show()


class OptimizerState(dict[str, Any]):
    """``stage``, and ``found_inf_per_device`` as the group has agreed.

    Optimizers that judge by themselves (apex, NeMo) set the latter, or write into it: that is then the verdict.
    """

    def __init__(self, iteration: Iteration, turn: Turn) -> None:
        super().__init__(stage=_OPT_STATES[turn.stage], found_inf_per_device=found_by_device(iteration, turn))
        self._pending = cast(TensorVerdict, turn.pending)

    def __setitem__(self, key: str, value: Any) -> None:
        """Take over the verdict; the stage is the scaler's own."""
        if key != "found_inf_per_device":
            msg = f"only found_inf_per_device can be set, got {key!r}"
            raise InvalidValueError(msg)
        super().__setitem__(key, value)
        self._pending.override(value)


class OptimizerStates(Mapping[int, dict[str, Any]]):
    """A view of the present iteration by ``id(optimizer)``. Reading an optimizer's entry finishes its agreement.

    Parameters
    ----------
    scaler : gradscale.GradScaler
        Whose iteration.

    Attributes
    ----------
    scaler : gradscale.GradScaler
        As given.
    """

    def __init__(self, scaler: gradscale.GradScaler) -> None:
        self.scaler = scaler

    def __getitem__(self, key: int) -> dict[str, Any]:
        turn = self.scaler.iteration.by_id(key)
        return _refresh_per_optimizer_state() if turn is None else OptimizerState(self.scaler.iteration, turn)

    def __iter__(self) -> Iterator[int]:
        return iter(self.scaler.iteration.ids())

    def __len__(self) -> int:
        return len(self.scaler.iteration.ids())
