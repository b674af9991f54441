"""The scaler that torch's replacements hold: gradscale's, made of torch's parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

import gradscale
from gradscale.scaler.agreement import Agreement
from gradscale.scaler.options import chosen_policy, completed, made_reports
from gradscale.scaler.scaler import Parts
from gradscale.scaler.stepper import ClosureStepper, PlainStepper
from gradscale_torch.fused import FusedStepper
from gradscale_torch.scaling import TensorScaling
from gradscale_torch.state import TensorState
from gradscale_torch.unscaler import TensorUnscaler
from gradscale_torch.verdicts import TensorVerdict

__all__ = ["made_scaler"]


def made_scaler(
    device: torch.device | str | int | None,
    factors: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    enabled: bool,
    keeps_dtype: bool,
    allows_fp16: bool,
    timeout: float,
) -> gradscale.GradScaler:
    """Return a scaler whose gradients, state and verdicts are tensors, and which agrees over nothing yet.

    Parameters
    ----------
    device : str, torch.device, int or None
        That is trained on.
    factors : mapping
        Arguments of :class:`gradscale.DynamicScale`.
    options : mapping
        Of :class:`gradscale.scaler.options.CommonOptions`.
    enabled : bool
        False makes every method pass through.
    keeps_dtype : bool
        Whether ``scale`` gives a half-precision loss back in its dtype.
    allows_fp16 : bool
        Whether gradients may be float16.
    timeout : float
        Seconds to wait for the ranks of a mesh.
    """
    given = completed(options)
    reports = made_reports(given)
    parts = Parts(
        live=TensorState(chosen_policy(given["policy"], factors), device),
        scaling=TensorScaling(keeps_dtype=keeps_dtype),
        unscaler=TensorUnscaler(device, allows_fp16=allows_fp16, timeout=timeout),
        steppers=(ClosureStepper(), FusedStepper(), PlainStepper()),
        agreement=Agreement(None, diagnoses=reports.diagnoses, pending=TensorVerdict, own_rank=_own_rank),
        reports=reports,
    )
    return gradscale.GradScaler.of(parts, enabled=enabled)


def _own_rank() -> int | None:
    # Also where every rank decides alone, as under DDP.
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else None
