"""State dicts and pickles that torch's scalers can load, and the reverse."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.amp.grad_scaler import _refresh_per_optimizer_state

import gradscale
from gradscale.core.protocols import Collectives, Policy
from gradscale_torch.inplace import copy_into

__all__ = ["Interchange"]

_FACTORS = ("growth_factor", "backoff_factor", "growth_interval")
_TORCHS_KEYS = ("scale", *_FACTORS, "_growth_tracker")
# What belongs to tensors and optimizers of this process.
_NOT_PICKLED = (
    "_known_parameters",
    "_meshes",
    "_steps_with_scaled",
    "_takes_scaler",
    "_unchecked",
    "_unread",
    "process_group",
)


class Interchange(gradscale.ShardedGradScaler):
    """Saving and loading in torch's formats."""

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain Python values; empty when disabled. One host read.

        Torch's five keys; for a policy that they do not describe, also what :meth:`gradscale.GradScaler.state_dict`
        adds to them.
        """
        saved = super().state_dict()
        return {key: saved[key] for key in _TORCHS_KEYS} if saved and _is_torchs(self._policy) else saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict of torch's scalers or of gradscale's; does nothing when disabled.

        The scale's tensor stays the same one, so that captured CUDA graphs see the new value, unless gradients are
        under way that were scaled with the old.

        Raises
        ------
        StateDictError
            When it is empty, lacks one of torch's five keys or holds a bad value; nothing is changed.
        CallOrderError
            In the middle of an iteration.
        """
        before, is_under_way = self._state, self._iteration.scaled
        super().load_state_dict(state_dict)
        self._is_regular = False
        self._floor = 0.0
        if before is not None and not is_under_way and self._state is not None:
            self._state = copy_into(before, self._state)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: what torch's scalers pickle, and under one more key the rest, without tensors."""
        kept = super().__getstate__()
        for name in _NOT_PICKLED:
            kept.pop(name, None)
        return _pickled_as_torchs(self) | {"gradscale": kept}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        if "gradscale" not in kept:
            self.__init__(kept["_device"], enabled=kept["_enabled"])  # type: ignore[misc]
            if kept["_enabled"]:
                self.load_state_dict(_state_dict_of_torchs(kept))
            return
        super().__setstate__(kept["gradscale"])
        self._forget_tensors()
        if self._rejoins:
            self._groups = self._default_groups()

    if TYPE_CHECKING:
        # What the scaler brings.
        _is_regular: bool
        _floor: float
        _rejoins: bool

        def _forget_tensors(self) -> None: ...
        def _default_groups(self) -> Sequence[Collectives]: ...


def _pickled_as_torchs(scaler: Any) -> dict[str, Any]:
    """Return what torch's scalers pickle, so that theirs can be restored from ours."""
    if not scaler.is_enabled():
        return {"_device": scaler._device, "_enabled": False}
    return {
        "_device": scaler._device,
        "_enabled": True,
        "_init_scale": scaler.get_scale(),
        "_scale": None,
        "_growth_factor": scaler.get_growth_factor(),
        "_backoff_factor": scaler.get_backoff_factor(),
        "_growth_interval": scaler.get_growth_interval(),
        "_init_growth_tracker": scaler._get_growth_tracker(),
        "_growth_tracker": None,
        "_per_optimizer_states": defaultdict(_refresh_per_optimizer_state),
    }


def _is_torchs(policy: Policy) -> bool:
    """Tell whether torch's four factors describe a policy."""
    if not isinstance(policy, gradscale.DynamicScale):
        return False
    factors = {name: getattr(policy, name) for name in ("init_scale", *_FACTORS)}
    return policy == gradscale.DynamicScale(**factors)


def _state_dict_of_torchs(kept: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict of one of torch's scalers from what it pickles."""
    return {
        "scale": kept["_init_scale"],
        "growth_factor": kept["_growth_factor"],
        "backoff_factor": kept["_backoff_factor"],
        "growth_interval": kept["_growth_interval"],
        "_growth_tracker": kept["_init_growth_tracker"],
    }
