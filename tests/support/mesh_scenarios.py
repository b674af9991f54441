"""What the ranks do in the tests of optimizers with DTensors, made without FSDP: missing gradients, several meshes.

The functions take a process group first, and return plain Python. ``run_case`` runs any of them by name.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from fsdp_scenarios import TIMEOUT
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch_sharded_scenarios import loss, make_optimizer, parameters_with
from worlds import Failure

import gradscale
import gradscale_torch


def run_case(group: Any, name: str, *args: Any) -> Any:
    """Run the scenario of this name."""
    return globals()[name](group, *args)


def make_scaler(library: str, **settings: Any) -> Any:
    """Return a plain scaler for the CPU."""
    if library == "torch":
        return torch.amp.GradScaler("cpu", init_scale=4.0, **settings)
    return gradscale_torch.GradScaler("cpu", init_scale=4.0, timeout=TIMEOUT, **settings)


def as_dtensor(mesh: Any, local: Tensor) -> DTensor:
    """Return a DTensor sharded over all dimensions of a mesh, of which this is the rank's part."""
    return DTensor.from_local(local, mesh, [Shard(0)] * mesh.ndim)


def sharded(mesh: Any) -> torch.nn.Parameter:
    """Return a parameter of ones, two on each rank."""
    return torch.nn.Parameter(as_dtensor(mesh, torch.ones(2)))


def no_gradient_of_a_mesh(group: Any, library: str, empty_rank: int) -> dict[str, Any]:
    """Have no gradient on one rank, with DTensors and the plain scaler."""
    mesh = init_device_mesh("cpu", (group.size(),))
    scaler = make_scaler(library)
    parameter = sharded(mesh)
    optimizer = make_optimizer("SGD", [parameter])
    scaler.scale(loss())
    parameter.grad = None if group.rank() == empty_rank else as_dtensor(mesh, torch.full((2,), 4.0))
    failure = None
    try:
        scaler.step(optimizer)
        scaler.update()
    except AssertionError as error:
        # Join the others' reduction, which would else never end.
        failure = str(error)
        dist.all_reduce(torch.zeros(()), group=mesh.get_group())
    return {"failure": failure, "steps": optimizer.real_steps, "scale": scaler.get_scale()}


def two_meshes(group: Any, given: bool, bad_rank: int | None) -> dict[str, Any]:
    """Step one optimizer with DTensors of two meshes, with and without a group given."""
    meshes = [init_device_mesh("cpu", shape) for shape in ((group.size(),), (group.size(), 1))]
    values = torch.full((2,), math.inf if group.rank() == bad_rank else 4.0)
    parameters = [sharded(mesh) for mesh in meshes]
    for mesh, parameter in zip(meshes, parameters, strict=True):
        parameter.grad = as_dtensor(mesh, values.clone())
    scaler = make_scaler("gradscale", **{"group": group} if given else {})
    optimizer = make_optimizer("SGD", parameters)
    scaler.scale(loss())
    failure = None
    try:
        scaler.step(optimizer)
        scaler.update()
    except gradscale.GradscaleError as error:
        failure = Failure.of(error)
    gradient = parameters[0].grad
    assert isinstance(gradient, DTensor)
    return {
        "failure": failure,
        "meshes": [repr(mesh) for mesh in meshes],
        "gradient": gradient.to_local().tolist(),
        "steps": optimizer.real_steps,
        "scale": scaler.get_scale(),
    }


def clip_without_a_gradient(group: Any, empty_rank: int) -> dict[str, Any]:
    """Clip while unscaling, with no gradient on one rank."""
    mesh = init_device_mesh("cpu", (group.size(),))
    scaler = make_scaler("gradscale")
    parameter = sharded(mesh)
    optimizer = make_optimizer("SGD", [parameter])
    scaler.scale(loss())
    parameter.grad = None if group.rank() == empty_rank else as_dtensor(mesh, torch.full((2,), 4.0))
    norm = scaler.unscale_(optimizer, max_norm=0.5)
    scaler.step(optimizer)
    scaler.update()
    assert isinstance(parameter.data, DTensor)
    return {"norm": norm.item(), "weights": parameter.data.to_local().tolist(), "steps": optimizer.real_steps}


def clip_dtensors_and_plain_tensors(group: Any) -> dict[str, Any]:
    """Clip while unscaling what has no norm that is defined: DTensors beside plain tensors."""
    mesh = init_device_mesh("cpu", (group.size(),))
    scaler = make_scaler("gradscale")
    parameter, (plain,) = sharded(mesh), parameters_with(4.0)
    parameter.grad = as_dtensor(mesh, torch.full((2,), 4.0))
    optimizer = make_optimizer("SGD", [parameter, plain], foreach=False)
    scaler.scale(loss())
    failure = None
    try:
        scaler.unscale_(optimizer, max_norm=0.5)
    except Exception as error:
        failure = Failure.of(error)
    assert plain.grad is not None
    return {"failure": failure, "gradient": plain.grad.tolist()}
