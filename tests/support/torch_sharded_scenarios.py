"""What the ranks do in the tests of torch's sharded scaler, gradscale's, on plain tensors and DTensors."""

import math
from collections.abc import Sequence

import torch
from fsdp_scenarios import FSDP2, make_scaler, started
from scenarios import raised, rank_and_size
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import gradscale

# Steps of 1 in the direction of the gradient are easy to read off.
LEARNING_RATE = 1.0


def make_optimizer(parameters: Sequence[Tensor], **options):
    """Return an SGD that counts, in ``real_steps``, how often it has been called."""
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE, **options)
    optimizer.real_steps = 0
    optimizer.register_step_post_hook(lambda one, *_: setattr(one, "real_steps", one.real_steps + 1))
    return optimizer


# DTensors, and the plain scaler.


def as_dtensor(mesh, local: Tensor) -> DTensor:
    """Return a DTensor sharded over all dimensions of a mesh, of which this is the rank's part."""
    return DTensor.from_local(local, mesh, [Shard(0)] * mesh.ndim)


def sharded(mesh, value: float | None = None) -> torch.nn.Parameter:
    """Return a parameter of ones, two on each rank, and a gradient of this value."""
    parameter = torch.nn.Parameter(as_dtensor(mesh, torch.ones(2)))
    parameter.grad = None if value is None else as_dtensor(mesh, torch.full((2,), value))
    return parameter


def local(tensor) -> list[float]:
    """Return this rank's part of a DTensor."""
    part: list[float] = tensor.to_local().tolist()
    return part


def no_gradient_of_a_mesh(group, empty_rank: int, max_norm: float | None):
    """Have no gradient on one rank, with DTensors and the plain scaler, where torch's fails and leaves the others."""
    rank, size = rank_and_size(group)
    expected, step = math.sqrt(2 * (size - 1)), 1.0
    scaler = make_scaler(FSDP2, "gradscale", init_scale=4.0)
    parameter = sharded(init_device_mesh("cpu", (size,)), None if rank == empty_rank else 4.0)
    optimizer = make_optimizer([parameter])
    scaler.scale(torch.ones(()))
    if max_norm is not None:
        norm = scaler.unscale_(optimizer, max_norm=max_norm).item()
        assert math.isclose(norm, expected, rel_tol=1e-5)
        step = max_norm / expected
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.real_steps == 1
    assert math.isclose(local(parameter.data)[1], 1.0 - (rank != empty_rank) * step, rel_tol=1e-4)


def meshes_over(size: int, rank: int, kind: str) -> list[DeviceMesh]:
    """Return two meshes: over the same ranks, or over all ranks and over this one's half of them, as of experts.

    Of "some", the ranks of the second half have no mesh of their own; "crossed" are the dimensions of a mesh of 4.
    """
    if kind == "crossed":
        whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
        return [whole["data"], whole["expert"]]
    everyone = init_device_mesh("cpu", (size,))
    if kind == "same":
        return [everyone, init_device_mesh("cpu", (size, 1))]
    half = size - size // 2
    # Each rank makes both.
    parts = [DeviceMesh("cpu", list(ranks)) for ranks in (range(half), range(half, size))]
    own = [] if kind == "some" and rank >= half else [parts[rank >= half]]
    return [everyone, *own] if kind == "half" else [*own, everyone]


def two_meshes(group, bad_rank: int | None, kind: str, which: int, is_given: bool):
    """Step one optimizer with DTensors of two meshes, one of which then has a bad value on one rank."""
    rank, size = rank_and_size(group)
    parameters = [sharded(mesh, 4.0) for mesh in meshes_over(size, rank, kind)]
    scaler = make_scaler(FSDP2, "gradscale", init_scale=4.0, **{"group": group} if is_given else {})
    optimizer = make_optimizer(parameters)
    values = [4.0] * len(parameters)
    for is_bad in (False, rank == bad_rank):
        values[which % len(values)] = math.inf if is_bad else 4.0
        for one, value in zip(parameters, values, strict=True):
            one.grad.to_local().fill_(value)  # type: ignore[union-attr]
        before = started()
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        assert [local(one.grad) for one in parameters] == [[value / 4.0] * 2 for value in values]
    assert started() - before == (1 if is_given or kind == "same" else len(parameters))
    assert (optimizer.real_steps, scaler.get_scale()) == ((2, 4.0) if bad_rank is None else (1, 2.0))


def clip_of_two_meshes(group, kind: str):
    """Clip by the norm of all shards over the same ranks; with others it is not defined, and nothing is modified.

    "plain" is a plain tensor beside the shards.
    """
    rank, size = rank_and_size(group)
    parameters = [sharded(mesh, 4.0) for mesh in meshes_over(size, rank, "same" if kind == "plain" else kind)]
    scaler = make_scaler(FSDP2, "gradscale", init_scale=4.0)
    if kind == "plain":
        parameters[1] = torch.nn.Parameter(torch.ones(2))
        parameters[1].grad = torch.full((2,), 4.0)
    optimizer = make_optimizer(parameters, foreach=False)
    scaler.scale(torch.ones(()))
    if kind != "same":
        said = ("plain",) if kind == "plain" else ("spread over the same ranks", "clip_grad_norm_")
        raised(gradscale.InvalidValueError, lambda: scaler.unscale_(optimizer, max_norm=0.5), *said)
        assert (local(parameters[0].grad), scaler.get_scale()) == ([4.0] * 2, 4.0)
        if kind == "plain":
            assert parameters[1].grad.tolist() == [4.0] * 2
        scaler.step(optimizer)
        return
    norm = math.sqrt(2 * 2 * size)
    assert math.isclose(scaler.unscale_(optimizer, max_norm=0.5).item(), norm, rel_tol=1e-6)
    scaler.step(optimizer)
    scaler.update()
    for one in parameters:
        assert math.isclose(local(one.grad)[0], 0.5 / norm, rel_tol=1e-4)
