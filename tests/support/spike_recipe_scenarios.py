"""What the ranks do in the tests of the recipes that skip spikes: run a block of torch's page in bfloat16."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from recipe_blocks import GUARD_PAGE, TORCH_PAGE, run_on
from recipe_scenarios import Losses, made_loader, made_model, sharded_by_torchtitan

import gradscale
from gradscale_torch import StepGuard

__all__ = ["Losses", "guarded", "made_loader", "made_model"]

BATCHES = 72  # more than half a window
PAGES = {"guard_ddp": GUARD_PAGE, "guard_fsdp2": GUARD_PAGE, "torchtitan": TORCH_PAGE}


def guarded(group, name: str, spikes: tuple[int, ...], bad_rank: int):
    """Run the block of this name, in which one rank has spikes; return what came of it."""
    given: dict[str, Any] = {"model": made_model()}
    if name == "torchtitan":
        groups = {".*": {"optimizer_name": "AdamW", "optimizer_kwargs": {"lr": 0.01}}}
        given = sharded_by_torchtitan(group, torch.bfloat16, groups, 100)
        given["scaler"] = StepGuard(skip=gradscale.SkipSpikes())
    given["loss_of"] = Losses(spikes if dist.get_rank(group) == bad_rank else (), 1e6)
    names = run_on(PAGES[name], name, **given, loader=made_loader(BATCHES))
    guard = names.get("guard") or names["scaler"]
    schedules, is_whole = names.get("lr_schedulers"), name == "guard_ddp"
    # Torchtitan's optimizers are a container of some.
    optimizers = names.get("optimizers") or [names["optimizer"]]
    return {
        "skipped": [(report.iteration, report.reason) for report in guard.history if report.skipped],
        "steps": {float(state["step"]) for optimizer in optimizers for state in optimizer.state.values()},
        "rates": None if schedules is None else list(schedules.get_metrics().values()),
        "scale": guard.get_scale(),
        "counts": guard.counts(),
        "followed": (names["schedule"].last_epoch, int(names["average"].n_averaged)) if is_whole else None,
        "weights": [(one if is_whole else one.full_tensor()).tolist() for one in given["model"].parameters()],
    }
