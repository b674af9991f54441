"""What the ranks do in the tests of the pages that lead here from systems of several ranks: run their lines after."""

from __future__ import annotations

import torch
import torch.distributed as dist
from recipe_blocks import INTEROP, run_on
from recipe_scenarios import granted

__all__ = ["moved"]


def moved(group, system: str, overflows: tuple[int, ...], bad_rank: int):
    """Run the lines after of a page, in which one rank overflows, and those that load a saved state."""
    given, page = granted(overflows if dist.get_rank(group) == bad_rank else ()), INTEROP / f"{system}.md"
    names = run_on(page, "after", **given, group=group)
    scaler = names["scaler"]
    answer = {
        "skipped": [report.iteration for report in scaler.history if report.skipped],
        "scale": scaler.get_scale(),
        "steps": names["schedule"].last_epoch,
        "dtypes": {str(parameter.dtype) for parameter in given["model"].parameters()},
    }
    window = {"scale_factor": 2.0, "scale_window": 1000, "min_scale": 1, "dynamic": True, "delayed_shift": 2}
    saved = {
        "deepspeed": {"cur_scale": 512.0, "cur_iter": 9, "last_overflow_iter": 3, "cur_hysteresis": 1, **window}
        | {"consecutive_hysteresis": False, "raise_error_at_min_scale": True},
        "megatron": {"scale": torch.tensor([512.0]), "growth_tracker": 5, "hysteresis_tracker": 1},
    }
    del names["scaler"]
    state = run_on(page, "state", **names, saved=saved[system])["scaler"].state_dict()
    return answer | {"loaded": [state[key] for key in ("scale", "_growth_tracker", "_overflow_tracker")]}
