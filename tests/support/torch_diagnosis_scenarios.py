"""What the ranks do in the tests of diagnoses of sharded models: FSDP1, FSDP2 and DTensors made without them.

Each rank asserts what it is told, and returns what must be the same on all.
"""

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import array_api_compat.torch
import torch
from diagnoses import Part, back, row
from fsdp_scenarios import (
    FSDP2,
    Setup,
    backward_loss,
    distribute,
    distribute_over,
    inject_infinity,
    local_gradients,
    make_scaler,
)
from libraries import Library
from scenarios import raised
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch_sharded_scenarios import as_dtensor, sharded

import gradscale
from gradscale_torch import devices

TORCH = Library("torch", array_api_compat.torch)
LEARNING_RATE = 0.25
SCALE = 1024.0


def part_of(names: Sequence[str], parameters: Sequence[Tensor], scale: float, number: int, is_scaled, lost=None):
    """Return what this rank has to tell of its parts of the gradients."""
    gradients = [next(local_gradients([parameter]), None) for parameter in parameters]
    rows = [
        row(name, None if x is None else back(TORCH, x), k, scale if is_scaled else 1.0)
        for k, (name, x) in enumerate(zip(names, gradients, strict=True))
    ]
    return Part(rows, None, scale, number, is_scaled, lost, 0.0)


def each_rank_in_turn(group, setup: Setup, how: str, parallel: str = "", is_given: bool = False):
    """Train with an infinity on each rank in turn, and a clean iteration at the end; each rank is told the same.

    ``how`` is the optimizer: "plain"; "fused", which unscales and skips in its kernel; "late", the same whose verdict
    the host reads only when it is asked for one, as on a device. ``parallel`` is for a mesh of 2 x 2, whose dimensions
    may be given as groups: then a rank is told by its place in each.
    """
    rank, size = group.rank(), group.size()
    model = distribute_over((2, 2), parallel) if parallel else distribute(setup)
    parameters = list(model.parameters())
    names = [name for name, _ in model.named_parameters()]
    optimizer: torch.optim.Optimizer
    if how == "plain":
        optimizer = torch.optim.SGD(model.named_parameters(), lr=LEARNING_RATE)
    else:
        optimizer = torch.optim.AdamW(model.named_parameters(), lr=LEARNING_RATE, fused=True)
    # Automatic diagnoses have the host read each verdict at once.
    telling: dict[str, Any] = {"diagnose": "on_overflow"}
    if is_given:
        telling["group"] = parameters[0].device_mesh.get_all_groups()
    scaler = make_scaler(setup, "gradscale", init_scale=SCALE, **({} if how == "late" else telling))
    told = []
    late = mock.patch.object(devices, "would_wait", return_value=True)
    with late if how == "late" else contextlib.nullcontext():
        for iteration in range(size + 1):
            optimizer.zero_grad()
            scaler.scale(backward_loss(model, rank)).backward()
            if rank == iteration:
                inject_infinity(parameters[iteration % len(parameters) :])
            is_bad, scale, lost = iteration < size, SCALE / 2**iteration, None if how == "late" else 0

            def look(is_scaled: bool, lost, story: str = "gathered", scale=scale, number=iteration + 1, **options):
                part = part_of(names, parameters, scale, number, is_scaled, lost)
                report = scaler.diagnose(optimizer, gather=story == "gathered", **options)
                told.append((f"{story} {how} {number}", report, part))

            look(True, lost, names=model.named_parameters())
            scaler.step(optimizer)
            is_left = how != "plain" and is_bad
            look(is_left, lost)
            if how != "late":
                # The third in a row is also a search of the weights and the state.
                expected = dataclasses.replace(told[-1][1], broken=() if iteration > 1 else None)
                assert scaler.last_step(optimizer).overflow == (expected if is_bad else None)
            scaler.update()
            look(is_left, None)
            look(is_left, None, "its own")
            assert (scaler.last_step(optimizer).skipped, scaler.last_step(optimizer).scale) == (is_bad, scale)
    return told


def broken_shards(group, setup: Setup):
    """Break a weight, and then a moment, on no rank and on each in turn; what all are told."""
    model = distribute(setup)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=LEARNING_RATE)
    scaler = make_scaler(setup, "gradscale", init_scale=SCALE)
    scaler.scale(backward_loss(model, group.rank())).backward()
    scaler.step(optimizer)
    # Of the optimizer, whose parameters FSDP1 may have put in the place of the model's.
    (parameter, *_) = optimizer.param_groups[0]["params"]
    told = []
    for bad_rank in range(-1, group.size()):
        for held in (parameter.detach(), optimizer.state[parameter]["exp_avg_sq"]):
            local = held.to_local() if isinstance(held, DTensor) else held
            before = local.clone()
            if group.rank() == bad_rank:
                local.view(-1)[0] = math.nan
            told.append(scaler.diagnose(optimizer, gather=True, state=True).to_dict())
            local.copy_(before)
    return told


def odd_gradients_of_a_mesh(group, odd_rank: int, kind: str):
    """Gather over a mesh where one rank has a gradient that is "missing" or "overlapping", or has seen no loss."""
    mesh = init_device_mesh("cpu", (group.size(),))
    parameter = sharded(mesh)
    optimizer = torch.optim.SGD([parameter], lr=LEARNING_RATE)
    scaler = make_scaler(FSDP2, "gradscale", init_scale=4.0)
    is_odd = group.rank() == odd_rank
    if not is_odd or kind != "no loss":
        scaler.scale(torch.ones(()))
    if not is_odd or kind == "overlapping":
        parameter.grad = as_dtensor(mesh, torch.tensor([4.0]).expand(2) if is_odd else torch.full((2,), 4.0))
    report = scaler.diagnose(optimizer, ["weight"], gather=True)
    told = "gathered", report, part_of(["weight"], [parameter], 4.0, 1, not (is_odd and kind == "no loss"))
    if kind == "overlapping":
        # Whether a gradient can be unscaled in place is still looked at when it is.
        refusals = (gradscale.ScaleDesyncError, f"rank {odd_rank} cannot unscale its gradients")
        refusal = (gradscale.InvalidValueError, "overlaps itself") if is_odd else refusals
        raised(refusal[0], lambda: (scaler.unscale_(optimizer), scaler.step(optimizer)), refusal[1])
    else:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    return [told]


def loss_of_a_mesh(group, bad_rank: int, placement: str):
    """Scale a loss that is a DTensor, replicated or a part on each rank, and skip the step."""
    mesh = init_device_mesh("cpu", (group.size(),))
    is_bad = group.rank() == bad_rank or placement == "replicated"
    local = torch.tensor([math.nan if is_bad else 1.0])
    loss = DTensor.from_local(local, mesh, [Replicate() if placement == "replicated" else Shard(0)])
    parameter = sharded(mesh)
    optimizer = torch.optim.SGD([parameter], lr=LEARNING_RATE)
    scaler = make_scaler(FSDP2, "gradscale", init_scale=4.0, diagnose="on_overflow")
    scaler.scale(loss)
    parameter.grad = as_dtensor(mesh, torch.full((2,), math.inf))
    asked = scaler.diagnose(optimizer, loss={"main": loss, "other": math.nan})
    scaler.step(optimizer)
    overflow = scaler.last_step(optimizer).overflow
    # One more is a number that is not finite.
    assert asked.loss_nonfinite == 1 + is_bad
    assert overflow.loss_nonfinite == (group.size() if placement == "replicated" else 1)
    assert overflow.cause == "model"
