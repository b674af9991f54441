"""What the ranks do in the tests of the sharded scaler on plain tensors: gradscale's replacement, and torch's own.

The functions take a group first and, where both are compared, the library whose scaler is meant: "torch" or
"gradscale". They return plain Python. ``run_case`` runs any of them by name, so that one world serves many tests.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fsdp_scenarios import TIMEOUT, Collectives, started
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler
from worlds import Failure

import gradscale
import gradscale_torch

# Steps of 1 in the direction of the gradient are easy to read off.
LEARNING_RATE = 1.0


def run_case(group: Any, name: str, *args: Any) -> Any:
    """Run the scenario of this name."""
    return globals()[name](group, *args)


def make_scaler(library: str, **settings: Any) -> Any:
    """Return a sharded scaler for the CPU."""
    if library == "torch":
        return TorchShardedGradScaler("cpu", **settings)
    return gradscale_torch.ShardedGradScaler("cpu", **{"timeout": TIMEOUT} | settings)


def make_optimizer(name: str, parameters: Sequence[Tensor], **options: Any) -> Any:
    """Return an optimizer of torch that counts, in ``real_steps``, how often it has been called."""
    optimizer = getattr(torch.optim, name)(parameters, lr=LEARNING_RATE, **options)
    optimizer.real_steps = 0

    def count(*_: Any) -> None:
        optimizer.real_steps += 1

    optimizer.register_step_post_hook(count)
    return optimizer


def rank_of(group: Any) -> int:
    """Return the rank in a process group or an MPI communicator."""
    rank: int = group.rank() if callable(group.rank) else group.rank
    return rank


def parameters_with(*values: float) -> list[torch.nn.Parameter]:
    """Return parameters of ones, whose gradients hold these values."""
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.full((3,), value)
    return parameters


def loss() -> Tensor:
    """Return a loss."""
    return torch.ones(())


class Speaking(torch.optim.SGD):
    """SGD whose step returns something, as a step with a closure does."""

    def step(self, closure: Any = None) -> Any:
        """Step, and say so."""
        super().step(closure)
        return "stepped"


def skip_on_infinity(group: Any, library: str, bad_rank: int, explicit: bool) -> dict[str, Any]:
    """Overflow on one rank in the second of three iterations; what ``step`` returns."""
    scaler = make_scaler(library, init_scale=4.0, growth_interval=2)
    (parameter,) = parameters_with(4.0)
    optimizer = Speaking([parameter], lr=LEARNING_RATE)
    records = []
    for iteration in range(3):
        scaler.scale(loss())
        parameter.grad = torch.full((3,), scaler.get_scale())
        if iteration == 1 and rank_of(group) == bad_rank:
            parameter.grad[1] = math.inf
        if explicit:
            scaler.unscale_(optimizer)
        returned = scaler.step(optimizer)
        scaler.update()
        records.append((returned, scaler.get_scale(), scaler._get_growth_tracker(), parameter.tolist()))
    return {"records": records}


def sparse_gradients(group: Any, library: str, dtype: str, bad_rank: int | None, kind: str) -> dict[str, Any]:
    """Unscale sparse gradients; ``kind`` is what is wrong with them on the bad rank.

    "inf" or "nan": one value. "sum of 2", "sum of 3": finite values at one index whose scaled sum is not finite.
    """
    chosen = getattr(torch, dtype)
    scaler = make_scaler(library, init_scale=2.0)
    scaler.scale(loss())
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=chosen))
    large = 0.9 * torch.finfo(chosen).max
    values, indices = [16.0, 32.0, 64.0], [1, 1, 3]
    if rank_of(group) == bad_rank:
        values = {"inf": [16.0, math.inf, 64.0], "nan": [16.0, math.nan, 64.0]}.get(kind, [large] * 3)
        indices = [1, 1, 1] if kind == "sum of 3" else indices
        values[2] = 64.0 if kind == "sum of 2" else values[2]
    parameter.grad = torch.sparse_coo_tensor(
        torch.tensor([indices]), torch.tensor(values, dtype=chosen), (4,), check_invariants=False
    )
    optimizer = make_optimizer("SGD", [parameter])
    scaler.unscale_(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    dense = parameter.grad.coalesce().to_dense().float().tolist()
    if dtype == "float32":
        scaler.step(optimizer)
        scaler.update()
    return {
        "found": [flag.item() for flag in found.values()],
        "gradient": dense,
        "is coalesced": parameter.grad.is_coalesced(),
        "steps": optimizer.real_steps,
        "scale": scaler.get_scale(),
    }


def fused(group: Any, library: str, name: str, bad_ranks: tuple[int, ...], explicit: bool) -> dict[str, Any]:
    """Overflow on some ranks with a fused optimizer; what its kernel is told, and what it did."""
    rank = rank_of(group)
    scaler = make_scaler(library, init_scale=4.0)
    parameters = parameters_with(math.inf if rank in bad_ranks else 4.0, 4.0)
    optimizer = make_optimizer(name, parameters, fused=True)
    told: list[Any] = []
    optimizer.register_step_pre_hook(lambda chosen, *_: told.append(chosen.found_inf.tolist()))
    scaler.scale(loss())
    if explicit:
        scaler.unscale_(optimizer)
    result: dict[str, Any] = {"error": None}
    try:
        scaler.step(optimizer)
    except RuntimeError as error:
        result["error"] = str(error)
    scaler.update()
    result |= {"told": told, "scale": scaler.get_scale(), "weights": [p.tolist() for p in parameters]}
    if library == "gradscale":
        result["skipped"] = scaler.last_step(optimizer).skipped
    return result


def grow(group: Any, library: str) -> list[float]:
    """Grow from the largest power of two; the scale after each iteration."""
    del group
    scaler = make_scaler(library, init_scale=2.0**127, growth_interval=1)
    scales = []
    for _ in range(3):
        optimizer = make_optimizer("SGD", parameters_with(0.0))
        scaler.scale(loss())
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def drift(group: Any, library: str, what: str, drifting_rank: int, is_fused: bool) -> dict[str, Any]:
    """Let one rank resume from another checkpoint or have other factors; train until it is noticed."""
    drifts = rank_of(group) == drifting_rank
    scaler = make_scaler(library, init_scale=4.0, growth_interval=5 if what == "policy" and drifts else 3)
    saved = scaler.state_dict()
    if drifts:
        saved |= {"scale": {"scale": 8.0}, "tracker": {"_growth_tracker": 2}}.get(what, {})
    scaler.load_state_dict(saved)
    (parameter,) = parameters_with(0.0)
    optimizer = make_optimizer("SGD", [parameter], fused=is_fused)
    failure = None
    try:
        for _ in range(4):
            scaler.scale(loss())
            parameter.grad = torch.full((3,), scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
    except Exception as error:
        failure = Failure.of(error)
    return {
        "failure": failure,
        "steps": optimizer.real_steps,
        "state": (scaler.get_scale(), scaler._get_growth_tracker(), scaler.get_growth_interval()),
    }


def missing_call(group: Any, library: str, drifting_rank: int) -> dict[str, Any]:
    """Step optimizers A and B; one rank leaves A out at first, and the others leave B out at the end.

    Each rank makes three agreements, so that they meet. A overflows at first on the ranks that step it.
    """
    drifts = rank_of(group) == drifting_rank
    scaler = make_scaler(library, init_scale=4.0)
    first, second = parameters_with(4.0 if drifts else math.inf, 4.0)
    optimizers = {"A": make_optimizer("SGD", [first]), "B": make_optimizer("SGD", [second])}
    failure = None
    try:
        for names in ("B", "AB") if drifts else ("AB", "A"):
            scaler.scale(loss())
            for name in names:
                scaler.step(optimizers[name])
            scaler.update()
            first.grad = torch.full((3,), scaler.get_scale())
    except Exception as error:
        failure = Failure.of(error)
    return {
        "failure": failure,
        "steps": {name: optimizer.real_steps for name, optimizer in optimizers.items()},
        "second": second.tolist(),
    }


def nothing_here(group: Any, library: str, empty_rank: int, bad_rank: int, is_fused: bool) -> dict[str, Any]:
    """Have no gradient on one rank in the second iteration, while another overflows; count what is sent."""
    rank = rank_of(group)
    scaler = make_scaler(library, init_scale=4.0)
    (parameter,) = parameters_with(4.0)
    optimizer = make_optimizer("SGD", [parameter], fused=is_fused)
    records = []
    for iteration in range(3):
        before = started()
        scaler.scale(loss())
        parameter.grad = torch.full((3,), scaler.get_scale())
        if iteration == 1:
            if rank == bad_rank:
                parameter.grad[0] = math.inf
            if rank == empty_rank:
                parameter.grad = None
        with Collectives() as collectives:
            scaler.step(optimizer)
        scaler.update()
        records.append((scaler.get_scale(), parameter.tolist(), started() - before, len(collectives.sent)))
    return {"records": records}


def absence(
    group: Any, how: str, absent_rank: int, is_fused: bool, seconds: tuple[tuple[str, float], ...]
) -> dict[str, Any]:
    """Let one rank raise before its step, be late or end; the others step in a group of their own.

    ``seconds`` are a dict's items: "timeout" and, for the late rank, "late".
    """
    settings = dict(seconds)
    own = dist.new_group()
    scaler = make_scaler("gradscale", init_scale=4.0, group=own, timeout=settings["timeout"])
    (parameter,) = parameters_with(4.0)
    optimizer = make_optimizer("SGD", [parameter], fused=is_fused)
    scaler.scale(loss())
    scaler.step(optimizer)
    scaler.update()
    parameter.grad = torch.full((3,), 4.0)
    begin = time.monotonic()
    failures = []
    if group.rank() == absent_rank:
        if how == "raises":
            msg = "this rank fails before its step"
            raise ValueError(msg)
        if how == "ends":
            os._exit(7)
        time.sleep(settings["late"])
    scaler.scale(loss())
    # The second time shows that nobody goes on as if nothing had happened.
    for _ in range(2):
        try:
            scaler.step(optimizer)
        except gradscale.GradscaleError as error:
            failures.append(Failure.of(error))
    return {
        "failures": failures,
        "seconds": time.monotonic() - begin,
        "steps": optimizer.real_steps,
        "weights": parameter.tolist(),
    }


def list_of_groups(group: Any, bad_rank: int) -> dict[str, Any]:
    """Agree over a data and a tensor group in turn: a mesh of 2 x 2 ranks, plain tensors."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    groups = [mesh.get_group("data"), mesh.get_group("tensor")]
    scaler = make_scaler("gradscale", init_scale=4.0, group=groups)
    (parameter,) = parameters_with(math.inf if group.rank() == bad_rank else 4.0)
    optimizer = make_optimizer("SGD", [parameter])
    for _ in range(2):
        # The first step over a group compares the ranks' versions, too.
        before = started()
        scaler.scale(loss())
        scaler.step(optimizer)
        scaler.update()
    return {"sent": started() - before, "scale": scaler.get_scale(), "steps": optimizer.real_steps}


def never_scales(group: Any, silent_rank: int, is_fused: bool) -> dict[str, Any]:
    """Step on every rank, though one has never called scale: a pipeline's inner stage; another overflows once."""
    rank = rank_of(group)
    scaler = make_scaler("gradscale", init_scale=4.0)
    (parameter,) = parameters_with(4.0)
    optimizer = make_optimizer("SGD", [parameter], fused=is_fused)
    records = []
    for iteration in range(3):
        if rank != silent_rank:
            scaler.scale(loss())
        is_bad = iteration == 1 and rank == (silent_rank + 1) % group.size()
        parameter.grad = torch.full((3,), math.inf if is_bad else scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        records.append((scaler.get_scale(), parameter.tolist()))
    return {"records": records}


def closure(group: Any, bad_rank: int) -> dict[str, Any]:
    """Minimise with LBFGS, overflowing on one rank in the first two evaluations; every rank tries again."""
    scaler = make_scaler("gradscale", init_scale=4.0)
    (parameter,) = parameters_with(0.0)
    optimizer = torch.optim.LBFGS([parameter], lr=0.1, max_iter=2)
    scaled: list[float] = []

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        value = parameter.square().sum()
        scaled_value = scaler.scale(value)
        scaled_value.backward()
        scaled.append(scaled_value.item())
        if rank_of(group) == bad_rank and len(scaled) <= 2:
            assert parameter.grad is not None
            parameter.grad[0] = math.inf
        return value

    scaler.step(optimizer, evaluate)
    scaler.update()
    report = scaler.last_step(optimizer)
    return {
        "scaled": scaled,
        "weights": parameter.tolist(),
        "scale": scaler.get_scale(),
        "report": (report.skipped, report.scale, report.retries),
    }


class Tree:
    """The smallest optimizer of gradscale's own protocol, for NumPy arrays."""

    def __init__(self) -> None:
        self.grads: Any = None
        self.steps = 0

    def step(self) -> None:
        """Count."""
        self.steps += 1


def numpy_arrays(group: Any, bad_rank: int) -> dict[str, Any]:
    """Scale NumPy arrays over a process group of torch, overflowing on one rank in the second iteration."""
    scaler = gradscale.ShardedGradScaler(group=group, init_scale=4.0, timeout=TIMEOUT)
    optimizer = Tree()
    records = []
    for iteration in range(3):
        scaler.scale(np.float32(1.0))
        is_bad = iteration == 1 and rank_of(group) == bad_rank
        optimizer.grads = [np.full(3, np.nan if is_bad else 4.0, dtype=np.float32)]
        scaler.step(optimizer)
        scaler.update()
        report = scaler.last_step(optimizer)
        records.append((report.skipped, report.scale, report.local_nonfinite, optimizer.steps))
    return {"records": records, "gradient": optimizer.grads[0].tolist()}


def over_mpi(communicator: Any, name: str, is_fused: bool, bad_rank: int) -> dict[str, Any]:
    """Use the replacement of torch's sharded scaler over MPI, overflowing on one rank in the second iteration."""
    scaler = make_scaler("gradscale", init_scale=4.0, group=communicator)
    (parameter,) = parameters_with(4.0)
    optimizer = make_optimizer(name, [parameter], fused=is_fused)
    records = []
    for iteration in range(3):
        scaler.scale(loss())
        parameter.grad = torch.full((3,), scaler.get_scale())
        if iteration == 1 and rank_of(communicator) == bad_rank:
            parameter.grad[0] = math.nan
        scaler.step(optimizer)
        scaler.update()
        report = scaler.last_step(optimizer)
        records.append((report.skipped, report.scale, scaler.get_scale(), parameter.tolist()))
    return {"records": records}
