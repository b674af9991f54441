"""What the ranks do in the tests of torch's sharded scaler on plain tensors and DTensors: torch's own, and gradscale's.

The functions take a group first and, where both are compared, the library whose scaler is meant: "torch" or
"gradscale". They return plain Python.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from fsdp_scenarios import TIMEOUT, Collectives, started
from scenarios import failure_of, rank_and_size
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler
from torch.distributed.tensor import DTensor, Shard
from worlds import Failure

import gradscale_torch

# Steps of 1 in the direction of the gradient are easy to read off.
LEARNING_RATE = 1.0


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


def train(group: Any, library: str, bad: dict[int, float], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Make three iterations, in the second of which some ranks' first gradient has a bad value; what became of each.

    Settings
    --------
    optimizer, fused, explicit
        The optimizer; whether its kernel unscales and skips; whether ``unscale_`` is called.
    empty, silent
        A rank that has no gradients in the second iteration, and one that never calls ``scale``.
    over
        "default", the "group" itself, or the "dimensions" of a mesh of 2 x 2 ranks.
    """
    rank, _ = rank_and_size(group)
    given: dict[str, Any] = {"default": {}, "group": {"group": group}}.get(settings.get("over", "default"), {})
    if settings.get("over") == "dimensions":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        given = {"group": [mesh.get_group("data"), mesh.get_group("tensor")]}
    scaler = make_scaler(library, init_scale=4.0, growth_interval=2, **given)
    parameters = parameters_with(4.0, 4.0)
    name = settings.get("optimizer", "SGD")
    kind = Speaking if name == "SGD" else getattr(torch.optim, name)
    optimizer = kind(parameters, lr=LEARNING_RATE, fused=settings.get("fused", False))
    told: list[Any] = []
    optimizer.register_step_pre_hook(
        lambda chosen, *_: told.append(getattr(chosen, "found_inf", torch.zeros(())).tolist())
    )
    records = []
    for iteration in range(3):
        before = started()
        if rank != settings.get("silent"):
            scaler.scale(loss())
        for parameter in parameters:
            parameter.grad = torch.full((3,), scaler.get_scale())
            if iteration == 1 and rank == settings.get("empty"):
                parameter.grad = None
        gradient = parameters[0].grad
        if iteration == 1 and rank in bad and gradient is not None:
            gradient[1] = bad[rank]
        returned: Any = None
        error = ""
        with Collectives() as collectives:
            try:
                if settings.get("explicit"):
                    scaler.unscale_(optimizer)
                returned = scaler.step(optimizer)
            except RuntimeError as caught:
                error = str(caught)
        scaler.update()
        records.append(
            {
                "returned": returned,
                "error": error,
                "told": told[-1:],
                "scale": scaler.get_scale(),
                "tracker": scaler._get_growth_tracker(),
                "weights": [parameter.tolist() for parameter in parameters],
                "sent": (started() - before, len(collectives.sent)),
            }
        )
    return records


def sparse_gradients(group: Any, library: str, dtype: str, kind: str, bad_rank: int) -> dict[str, Any]:
    """Unscale sparse gradients; ``kind`` is what is wrong with them on the bad rank.

    "inf" or "nan": one value. "sum of 2", "sum of 3": finite values at one index whose scaled sum is not finite.
    """
    chosen = getattr(torch, dtype)
    scaler = make_scaler(library, init_scale=2.0)
    scaler.scale(loss())
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=chosen))
    large = 0.9 * torch.finfo(chosen).max
    values, indices = [16.0, 32.0, 64.0], [1, 1, 3]
    if group.rank() == bad_rank and kind != "finite":
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


def grow(group: Any, library: str) -> list[float]:
    """Grow from the largest power of two; the scale after each iteration."""
    del group
    scaler = make_scaler(library, init_scale=2.0**127, growth_interval=1)
    scales = []
    for _ in range(3):
        scaler.scale(loss())
        scaler.step(make_optimizer("SGD", parameters_with(0.0)))
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def drift(group: Any, library: str, what: str, drifting_rank: int, is_fused: bool) -> dict[str, Any]:
    """Let one rank resume from another checkpoint or have other factors; train until it is noticed."""
    drifts = group.rank() == drifting_rank
    scaler = make_scaler(library, init_scale=4.0, growth_interval=5 if what == "policy" and drifts else 3)
    saved = scaler.state_dict()
    if drifts:
        saved |= {"scale": {"scale": 8.0}, "tracker": {"_growth_tracker": 2}}.get(what, {})
    scaler.load_state_dict(saved)
    (parameter,) = parameters_with(0.0)
    optimizer = make_optimizer("SGD", [parameter], fused=is_fused)

    def loop() -> None:
        for _ in range(4):
            scaler.scale(loss())
            parameter.grad = torch.full((3,), scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()

    return {
        "failure": failure_of(loop),
        "steps": optimizer.real_steps,
        "state": (scaler.get_scale(), scaler._get_growth_tracker(), scaler.get_growth_interval()),
    }


def missing_call(group: Any, library: str, drifting_rank: int) -> dict[str, Any]:
    """Step optimizers A and B; one rank leaves A out at first, and the others leave B out at the end.

    Each rank makes three agreements, so that they meet. A overflows at first on the ranks that step it.
    """
    drifts = group.rank() == drifting_rank
    scaler = make_scaler(library, init_scale=4.0)
    first, second = parameters_with(4.0 if drifts else math.inf, 4.0)
    optimizers = {"A": make_optimizer("SGD", [first]), "B": make_optimizer("SGD", [second])}

    def loop() -> None:
        for names in ("B", "AB") if drifts else ("AB", "A"):
            scaler.scale(loss())
            for name in names:
                scaler.step(optimizers[name])
            scaler.update()
            first.grad = torch.full((3,), scaler.get_scale())

    return {
        "failure": failure_of(loop),
        "steps": [optimizer.real_steps for optimizer in optimizers.values()],
        "second": second.tolist(),
    }


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
        if group.rank() == bad_rank and len(scaled) <= 2:
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


# DTensors, and the plain scaler.


def plain_scaler(library: str, **settings: Any) -> Any:
    """Return a plain scaler for the CPU."""
    if library == "torch":
        return torch.amp.GradScaler("cpu", init_scale=4.0, **settings)
    return gradscale_torch.GradScaler("cpu", init_scale=4.0, timeout=TIMEOUT, **settings)


def as_dtensor(mesh: Any, local: Tensor) -> DTensor:
    """Return a DTensor sharded over all dimensions of a mesh, of which this is the rank's part."""
    return DTensor.from_local(local, mesh, [Shard(0)] * mesh.ndim)


def sharded(mesh: Any, value: float | None = None) -> torch.nn.Parameter:
    """Return a parameter of ones, two on each rank, and a gradient of this value."""
    parameter = torch.nn.Parameter(as_dtensor(mesh, torch.ones(2)))
    parameter.grad = None if value is None else as_dtensor(mesh, torch.full((2,), value))
    return parameter


def no_gradient_of_a_mesh(group: Any, library: str, empty_rank: int, max_norm: float | None) -> dict[str, Any]:
    """Have no gradient on one rank, with DTensors and the plain scaler, which may clip while unscaling."""
    mesh = init_device_mesh("cpu", (group.size(),))
    scaler = plain_scaler(library)
    parameter = sharded(mesh, None if group.rank() == empty_rank else 4.0)
    optimizer = make_optimizer("SGD", [parameter])
    scaler.scale(loss())
    norm, failure = None, None
    try:
        if max_norm is not None:
            norm = scaler.unscale_(optimizer, max_norm=max_norm).item()
        scaler.step(optimizer)
        scaler.update()
    except AssertionError as error:
        # Join the others' reduction, which would else never end.
        failure = str(error)
        dist.all_reduce(torch.zeros(()), group=mesh.get_group())
    assert isinstance(parameter.data, DTensor)
    weights = parameter.data.to_local().tolist()
    return {"failure": failure, "steps": optimizer.real_steps, "norm": norm, "weights": weights}


def two_meshes(group: Any, given: bool, bad_rank: int | None) -> dict[str, Any]:
    """Step one optimizer with DTensors of two meshes, with and without a group given."""
    meshes = [init_device_mesh("cpu", shape) for shape in ((group.size(),), (group.size(), 1))]
    parameters = [sharded(mesh, math.inf if group.rank() == bad_rank else 4.0) for mesh in meshes]
    scaler = plain_scaler("gradscale", **{"group": group} if given else {})
    optimizer = make_optimizer("SGD", parameters)
    scaler.scale(loss())
    failure = failure_of(lambda: (scaler.step(optimizer), scaler.update()))
    gradient = parameters[0].grad
    assert isinstance(gradient, DTensor)
    return {
        "failure": failure,
        "meshes": [repr(mesh) for mesh in meshes],
        "end": (optimizer.real_steps, scaler.get_scale(), gradient.to_local().tolist()),
    }


def clip_dtensors_and_plain_tensors(group: Any) -> tuple[Failure | None, list[float]]:
    """Clip while unscaling what has no norm that is defined: DTensors beside plain tensors."""
    scaler = plain_scaler("gradscale")
    (plain,) = parameters_with(4.0)
    optimizer = make_optimizer("SGD", [sharded(init_device_mesh("cpu", (group.size(),)), 4.0), plain], foreach=False)
    scaler.scale(loss())
    failure = failure_of(lambda: scaler.unscale_(optimizer, max_norm=0.5))
    assert plain.grad is not None
    return failure, plain.grad.tolist()
