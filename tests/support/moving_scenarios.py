"""What the ranks do in the tests of the pages that lead here from systems of several ranks: run their lines after."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from recipe_blocks import INTEROP, blocks_on
from recipe_scenarios import Losses, made_loader, made_model

__all__ = ["run_case"]


def run_case(group: Any, system: str, overflows: tuple[int, ...], bad_rank: int) -> dict[str, Any]:
    """Run the lines after of a page, in which one rank overflows, and those that load a saved state."""
    model = made_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        "loader": made_loader(),
        "loss_of": Losses(overflows if dist.get_rank(group) == bad_rank else ()),
        "group": group,
    }
    page = blocks_on(INTEROP / f"{system}.md")
    exec(compile(page["after"], f"{system}: after", "exec"), names)
    scaler = names["scaler"]
    answer = {
        "skipped": [report.iteration for report in scaler.history if report.skipped],
        "scale": scaler.get_scale(),
        "steps": names["schedule"].last_epoch,
        "dtypes": {str(parameter.dtype) for parameter in model.parameters()},
    }
    window = {"scale_factor": 2.0, "scale_window": 1000, "min_scale": 1, "dynamic": True, "delayed_shift": 2}
    saved = {
        "deepspeed": {"cur_scale": 512.0, "cur_iter": 9, "last_overflow_iter": 3, "cur_hysteresis": 1, **window}
        | {"consecutive_hysteresis": False, "raise_error_at_min_scale": True},
        "megatron": {"scale": torch.tensor([512.0]), "growth_tracker": 5, "hysteresis_tracker": 1},
    }
    exec(compile(page["state"], f"{system}: state", "exec"), names | {"saved": saved[system]}, loaded := {})
    state = loaded["scaler"].state_dict()
    return answer | {"loaded": [state[key] for key in ("scale", "_growth_tracker", "_overflow_tracker")]}
