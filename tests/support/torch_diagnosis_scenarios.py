"""What the ranks do in the tests of diagnoses of sharded models: FSDP1, FSDP2 and DTensors made without them.

Each rank asserts what it is told, and returns what must be the same on all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
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
from scenarios import raised
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch_sharded_scenarios import as_dtensor, sharded

import gradscale
from gradscale import OverflowReport
from gradscale_torch import devices

LEARNING_RATE = 0.25
SCALE = 1024.0


def spread(value):
    """Return what each rank has."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def found_in(report: OverflowReport):
    """Return the entries of a report by rank and name, as ``look`` says what is expected."""
    by_rank = {}
    for one in report.entries:
        value = None if one.missing else (list(one.shape), one.inf, one.largest)
        by_rank.setdefault(one.rank, {})[one.name] = value
    return by_rank


def assert_is_told(report: OverflowReport, expected, bad: tuple[int, ...] | None):
    """Assert that a report says of each rank what is expected, and names the only bad one."""
    assert found_in(report) == expected
    assert [one.rank for one in report.entries if one.inf or one.nan] == ([] if bad is None else [bad])
    assert report.cause == ("none" if bad is None else "scale")
    if bad is not None:
        worst = report.entries[0]
        assert worst.rank == bad
        said = f"{worst.name} on rank {'/'.join(map(str, bad))} overflows"
        assert said in report.to_dict()["explanation"]


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
    places = [divmod(number, 2) if is_given else (number,) for number in range(size)]
    scaler = make_scaler(setup, "gradscale", init_scale=SCALE, **({} if how == "late" else telling))
    told = []
    late = mock.patch.object(devices, "would_wait", return_value=True)
    with late if how == "late" else contextlib.nullcontext():
        for iteration in range(size + 1):
            optimizer.zero_grad()
            scaler.scale(backward_loss(model, rank)).backward()
            if rank == iteration:
                inject_infinity(parameters[iteration % len(parameters) :])
            scale, bad = SCALE / 2**iteration, places[iteration] if iteration < size else None
            expected = dict(zip(places, spread(look(names, parameters, scale)), strict=True))
            assert any(expected[places[0]].values())
            own = [scaler.diagnose(optimizer)]
            # Before the step, after it and after the update.
            gathered = [scaler.diagnose(optimizer, model.named_parameters(), gather=True)]
            scaler.step(optimizer)
            gathered.append(scaler.diagnose(optimizer, gather=True))
            if how != "late":
                overflow = scaler.last_step(optimizer).overflow
                # The third in a row is also a search of the weights and the state.
                searched = () if bad is not None and iteration > 1 else None
                assert overflow == (None if bad is None else dataclasses.replace(gathered[1], broken=searched))
                assert overflow is None or overflow.loss_nonfinite == 0
            scaler.update()
            gathered.append(scaler.diagnose(optimizer, gather=True))
            own.append(scaler.diagnose(optimizer))
            for report in gathered:
                assert_is_told(report, expected, bad)
                assert (report.scale, report.iteration) == (scale, iteration + 1)
            assert [found_in(report) for report in own] == [{(): expected[places[rank]]}] * 2
            report = scaler.last_step(optimizer)
            assert (report.skipped, report.scale) == (bad is not None, scale)
            told += [report.to_dict() for report in gathered]
    return told


def broken_shards(group, setup: Setup):
    """Break a weight, and then a moment, on each rank in turn, and overflow three times on rank 0; what all are told.

    Before it and after it the model is whole, which is told first and last.
    """
    model = distribute(setup)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=LEARNING_RATE)
    scaler = make_scaler(setup, "gradscale", init_scale=SCALE, diagnose="on_overflow")

    def iterate(overflows: bool):
        optimizer.zero_grad()
        scaler.scale(backward_loss(model, group.rank())).backward()
        if overflows and group.rank() == 0:
            inject_infinity(list(model.parameters()))
        scaler.step(optimizer)
        scaler.update()
        return scaler.last_step(optimizer).overflow

    def asked():
        return scaler.diagnose(optimizer, gather=True, state=True).to_dict()

    iterate(False)
    told = [[asked()]]
    for bad_rank in range(group.size()):
        for place in ("weight", "state"):
            # Of the optimizer, whose parameters FSDP1 may have put in the place of the model's.
            (parameter, *_) = optimizer.param_groups[0]["params"]
            held = parameter.detach() if place == "weight" else optimizer.state[parameter]["exp_avg_sq"]
            local = held.to_local() if isinstance(held, DTensor) else held
            assert local.numel() > 0
            before = local.clone()
            if group.rank() == bad_rank:
                local.view(-1)[0] = math.nan
            report = asked()
            # A weight that is not finite makes all gradients so.
            overflows = [iterate(True).to_dict() for _ in range(3)]
            local.copy_(before)
            told.append([report, *overflows])
            iterate(False)
    return [*told, [asked()]]


def look(names: Sequence[str], parameters: Sequence[Tensor], scale: float):
    """Return what a diagnosis is to say of this rank's gradients: shape, infinities and largest finite magnitude."""
    found: dict[str, Any] = dict.fromkeys(names)
    for name, parameter in zip(names, parameters, strict=True):
        for gradient in local_gradients([parameter]):
            finite = gradient[gradient.isfinite()].double().abs()
            largest = finite.max().item() / scale if finite.numel() else None
            found[name] = (list(gradient.shape), int(gradient.isinf().sum()), largest)
    return found


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
    values = {(rank,): {"weight": ([2], 0, 1.0)} for rank in range(group.size())}
    if kind != "overlapping":
        values[odd_rank,]["weight"] = None
    assert (report.scale, report.cause, found_in(report)) == (4.0, "none", values)
    if kind == "overlapping":
        # Whether a gradient can be unscaled in place is still looked at when it is.
        refusals = (gradscale.ScaleDesyncError, f"rank {odd_rank} cannot unscale its gradients")
        refusal = (gradscale.InvalidValueError, "overlaps itself") if is_odd else refusals
        raised(refusal[0], lambda: (scaler.unscale_(optimizer), scaler.step(optimizer)), refusal[1])
    else:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    return report.to_dict()


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
