"""What the ranks do in the tests of the recipes for torch: run a block of the page, with what it takes for granted."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["BATCHES", "FEATURES", "Losses", "blocks", "made_model", "run_block", "run_case"]

PAGE = Path(__file__).parents[2] / "backends" / "gradscale_torch" / "RECIPES.md"
BATCHES, FEATURES = 8, 6


def blocks() -> dict[str, str]:
    """Return the page's blocks of Python by their names; those without one are under an empty name."""
    found = re.findall(r"(?:<!-- recipe: (\w+) -->\n)?```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len({name for name, _ in found}) == len(found)
    return dict(found)


def made_model(seed: int = 0) -> nn.Sequential:
    """Return a small network, the same for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, 1))


def made_loader() -> list[Tensor]:
    """Return the batches, of 8 examples each."""
    return list(torch.randn((BATCHES, 8, FEATURES), generator=torch.Generator().manual_seed(1)))


class Losses:
    """The losses of a model, some of which are infinite.

    Parameters
    ----------
    overflows : collection of int
        Which calls, counted from 1.
    """

    def __init__(self, overflows: Collection[int] = ()) -> None:
        self.overflows = overflows
        self.calls = itertools.count(1)

    def __call__(self, model: Any, batch: Tensor) -> Tensor:
        loss: Tensor = model(batch).float().square().mean()
        return loss * torch.inf if next(self.calls) in self.overflows else loss


def run_block(name: str, **given: Any) -> dict[str, Any]:
    """Run a block of the page with these names, and return all names that there are then."""
    names = {"loader": made_loader(), "loss_of": Losses()} | given
    exec(compile(blocks()[name], f"{PAGE.name}: {name}", "exec"), names)
    return names


def run_case(group: Any, name: str, *args: Any) -> Any:
    """Run the scenario of this name."""
    return globals()[name](group, *args)


def actor(group: Any, overflows: tuple[int, ...], bad_rank: int) -> dict[str, Any]:
    """Train the actor over the ranks, of which one overflows in some micro-batches."""
    model = made_model()
    dtypes = set()
    model[0].register_forward_hook(lambda _module, _inputs, output: dtypes.add(str(output.dtype)))
    losses = Losses(overflows if dist.get_rank(group) == bad_rank else ())
    names = run_block("actor", actor=model, loss_of=losses)
    optimizer, scaler = names["optimizer"], names["scaler"]
    return {
        "skipped": [report.iteration for report in scaler.history if report.skipped],
        "scale": scaler.get_scale(),
        "weights": [parameter.full_tensor().tolist() for parameter in model.parameters()],
        "dtypes": dtypes,
        "masters": {str(parameter.dtype) for parameter in model.parameters()},
        "moments": {str(state["exp_avg"].dtype) for state in optimizer.state.values()},
        "norm": float(names["norm"].full_tensor() if hasattr(names["norm"], "full_tensor") else names["norm"]),
    }


def checkpoint(group: Any, folder: str) -> dict[str, Any]:
    """Train the actor, save it, and load what was saved into another scaler."""
    losses = Losses([2] if dist.get_rank(group) == 1 else [])
    names = run_block("actor", actor=made_model(), loss_of=losses)
    before = names["scaler"]
    names = run_block("checkpoint", folder=folder, **{name: names[name] for name in ("actor", "optimizer", "scaler")})
    assert names["scaler"] is not before
    return {"before": before.state_dict(), "after": names["scaler"].state_dict()}
