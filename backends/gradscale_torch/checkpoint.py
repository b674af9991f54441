"""State dicts and pickles that torch's scalers can load, and the reverse."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.amp.grad_scaler import _refresh_per_optimizer_state

import gradscale
from gradscale.core.protocols import Policy

__all__ = ["as_torchs_pickle", "as_torchs_state_dict", "state_dict_of_pickle"]

_FACTORS = ("growth_factor", "backoff_factor", "growth_interval")
_TORCHS_KEYS = ("scale", *_FACTORS, "_growth_tracker")


def as_torchs_state_dict(saved: dict[str, Any], policy: Policy) -> dict[str, Any]:
    """Return a state dict with torch's five keys alone where they say everything of a policy."""
    return {key: saved[key] for key in _TORCHS_KEYS} if saved and _is_torchs(policy) else saved


def as_torchs_pickle(scaler: gradscale.GradScaler, device: torch.device | str | int | None) -> dict[str, Any]:
    """Return what torch's scalers pickle, so that theirs can be restored from ours. One host read."""
    if not scaler.is_enabled():
        return {"_device": device, "_enabled": False}
    saved = scaler.state_dict()
    return {
        "_device": device,
        "_enabled": True,
        "_init_scale": saved["scale"],
        "_scale": None,
        "_growth_factor": scaler.get_growth_factor(),
        "_backoff_factor": scaler.get_backoff_factor(),
        "_growth_interval": scaler.get_growth_interval(),
        "_init_growth_tracker": saved["_growth_tracker"],
        "_growth_tracker": None,
        "_per_optimizer_states": defaultdict(_refresh_per_optimizer_state),
    }


def state_dict_of_pickle(kept: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict of one of torch's scalers from what it pickles."""
    return {
        "scale": kept["_init_scale"],
        "growth_factor": kept["_growth_factor"],
        "backoff_factor": kept["_backoff_factor"],
        "growth_interval": kept["_growth_interval"],
        "_growth_tracker": kept["_init_growth_tracker"],
    }


def _is_torchs(policy: Policy) -> bool:
    """Tell whether torch's four factors describe a policy."""
    if not isinstance(policy, gradscale.DynamicScale):
        return False
    factors = {name: getattr(policy, name) for name in ("init_scale", *_FACTORS)}
    return policy == gradscale.DynamicScale(**factors)
