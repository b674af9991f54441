"""What the ranks do in the tests of diagnoses of sharded models: FSDP1, FSDP2 and DTensors made without them.

The functions take a process group first, and return plain Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from fsdp_scenarios import backward_loss, distribute, distribute_over, inject_infinity, local_gradients, make_scaler
from fsdp_setups import Setup
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch_sharded_scenarios import as_dtensor, sharded
from worlds import Failure

import gradscale
from gradscale import StepReport
from gradscale.reports.callbacks import every_rank
from gradscale_torch import verdicts

LEARNING_RATE = 0.25
SCALE = 1024.0
FSDP2 = Setup("FSDP2", half=False)


def each_rank_in_turn(group: Any, setup: Setup, how: str) -> list[dict[str, Any]]:
    """Train with an infinity on each rank in turn, and a clean iteration at the end; what each iteration was told.

    ``how`` is the optimizer: "plain"; "fused", which unscales and skips in its kernel; "late", the same whose verdict
    the host reads only when it is asked for one, as on a device.
    """
    model = distribute(setup)
    parameters = list(model.parameters())
    names = [name for name, _ in model.named_parameters()]
    optimizer: torch.optim.Optimizer
    if how == "plain":
        optimizer = torch.optim.SGD(model.named_parameters(), lr=LEARNING_RATE)
    else:
        optimizer = torch.optim.AdamW(model.named_parameters(), lr=LEARNING_RATE, fused=True)
    first: list[StepReport] = []
    every: list[StepReport] = []
    # Callbacks and automatic diagnoses have the host read each verdict at once.
    telling = {"on_skip": [first.append, every_rank(every.append)], "diagnose": "on_overflow"}
    scaler = make_scaler(setup, "gradscale", init_scale=SCALE, **({} if how == "late" else telling))
    would_wait: Callable[..., bool] = verdicts.would_wait
    if how == "late":
        verdicts.would_wait = lambda _: True
    records = []
    try:
        for iteration in range(group.size() + 1):
            optimizer.zero_grad()
            scaler.scale(backward_loss(model, group.rank())).backward()
            begin = iteration % len(parameters)
            is_bad = group.rank() == iteration
            if is_bad:
                inject_infinity(parameters[begin:])
            expected = look(names, parameters, scaler.get_scale())
            own = [scaler.diagnose(optimizer)]
            gathered = [scaler.diagnose(optimizer, model.named_parameters(), gather=True)]
            scaler.step(optimizer)
            gathered.append(scaler.diagnose(optimizer, gather=True))
            overflow = None if how == "late" else scaler.last_step(optimizer).overflow
            scaler.update()
            gathered.append(scaler.diagnose(optimizer, gather=True))
            own.append(scaler.diagnose(optimizer))
            records.append(
                {
                    "expected": expected,
                    "own": [report.to_dict() for report in own],
                    "gathered": [report.to_dict() for report in gathered],
                    "overflow": None if overflow is None else overflow.to_dict(),
                    "report": (scaler.last_step(optimizer).skipped, scaler.last_step(optimizer).scale),
                    "told": ([one.iteration for one in first], [one.iteration for one in every]),
                    "told overflow": every[-1].overflow == overflow if overflow is not None else None,
                    "history": [(one.iteration, one.skipped, one.scale) for one in scaler.history],
                }
            )
    finally:
        verdicts.would_wait = would_wait
    return records


def look(names: Sequence[str], parameters: Sequence[Tensor], scale: float) -> dict[str, Any]:
    """Return what a diagnosis is to say of this rank's gradients: shape, infinities and largest finite magnitude."""
    found: dict[str, Any] = dict.fromkeys(names)
    for name, parameter in zip(names, parameters, strict=True):
        for gradient in local_gradients([parameter]):
            finite = gradient[gradient.isfinite()].double().abs()
            largest = finite.max().item() / scale if finite.numel() else None
            found[name] = (list(gradient.shape), int(gradient.isinf().sum()), largest)
    return found


def bad_names_of_a_model(group: Any) -> list[Failure]:
    """Leave a name out on each rank in turn; then gather again with all of them, and step."""
    model = distribute(FSDP2)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    scaler = make_scaler(FSDP2, "gradscale", init_scale=SCALE)
    failures = []
    for bad_rank in range(group.size()):
        scaler.scale(backward_loss(model, group.rank())).backward()
        pairs = list(model.named_parameters())
        try:
            scaler.diagnose(optimizer, pairs[1:] if group.rank() == bad_rank else pairs, gather=True)
        except gradscale.GradscaleError as error:
            failures.append(Failure.of(error))
        scaler.diagnose(optimizer, pairs, gather=True)
        scaler.step(optimizer)
        scaler.update()
        assert not scaler.last_step(optimizer).skipped
    return failures


def each_rank_of_a_mesh(
    group: Any, shape: tuple[int, ...], parallel: str, is_given: bool
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Put an infinity on each rank of a mesh in turn; a diagnosis over the mesh, or over its dimensions one by one.

    Returns
    -------
    list of tuple
        What the skipped step was told, and what is to be said of this rank.
    """
    model = distribute_over(shape, parallel)
    parameters = list(model.parameters())
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.SGD(model.named_parameters(), lr=LEARNING_RATE)
    assert isinstance(parameters[0], DTensor)
    groups = {"group": parameters[0].device_mesh.get_all_groups()} if is_given else {}
    scaler = make_scaler(FSDP2, "gradscale", init_scale=SCALE, diagnose="on_overflow", **groups)
    records = []
    for bad_rank in range(group.size()):
        optimizer.zero_grad()
        scaler.scale(backward_loss(model, group.rank())).backward()
        if group.rank() == bad_rank:
            inject_infinity(parameters)
        expected = look(names, parameters, scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        overflow = scaler.last_step(optimizer).overflow
        records.append((overflow.to_dict(), expected))
    return records


def odd_gradients_of_a_mesh(group: Any, kind: str, odd_rank: int) -> tuple[dict[str, Any], str]:
    """Gather over a mesh where one rank has a gradient that is "missing" or "overlapping", or has seen no loss.

    Returns the report, and the error of the step after it.
    """
    mesh = init_device_mesh("cpu", (group.size(),))
    parameter = sharded(mesh)
    optimizer = torch.optim.SGD([parameter], lr=LEARNING_RATE)
    scaler = make_scaler(FSDP2, "gradscale", init_scale=4.0)
    is_odd = group.rank() == odd_rank
    if not is_odd or kind != "no loss":
        scaler.scale(torch.ones(()))
    if not is_odd or kind == "overlapping":
        parameter.grad = as_dtensor(mesh, torch.tensor([4.0]).expand(2) if is_odd else torch.full((2,), 4.0))
    report = scaler.diagnose(optimizer, ["weight"], gather=True).to_dict()
    try:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    except (gradscale.InvalidValueError, gradscale.ScaleDesyncError) as error:
        return report, str(error)
    return report, ""


def loss_of_a_mesh(group: Any, placement: str, bad_rank: int) -> dict[str, Any]:
    """Scale a loss that is a DTensor, replicated or a part on each rank, and skip the step."""
    mesh = init_device_mesh("cpu", (group.size(),))
    value = math.nan if group.rank() == bad_rank or placement == "replicated" else 1.0
    local = torch.tensor([value])
    loss = DTensor.from_local(local, mesh, [Replicate() if placement == "replicated" else Shard(0)])
    parameter = sharded(mesh)
    optimizer = torch.optim.SGD([parameter], lr=LEARNING_RATE)
    scaler = make_scaler(FSDP2, "gradscale", init_scale=4.0, diagnose="on_overflow")
    scaler.scale(loss)
    parameter.grad = as_dtensor(mesh, torch.full((2,), math.inf))
    asked = scaler.diagnose(optimizer, loss={"main": loss, "other": math.nan})
    scaler.step(optimizer)
    overflow = scaler.last_step(optimizer).overflow
    return {"asked": asked.loss_nonfinite, "told": overflow.loss_nonfinite, "cause": overflow.cause}
