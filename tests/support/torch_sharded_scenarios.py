"""What the ranks do in the tests of torch's sharded scaler on plain tensors and DTensors: torch's own, and gradscale's.

Where both are compared, each rank runs torch's first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from fsdp_scenarios import TIMEOUT, Collectives, started
from scenarios import raised, rank_and_size
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler
from torch.distributed.tensor import DTensor, Shard

import gradscale
import gradscale_torch

# Steps of 1 in the direction of the gradient are easy to read off.
LEARNING_RATE = 1.0
ONES = [1.0] * 3


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


def train(group: Any, library: str, bad: Sequence[int], value: float = math.inf, **settings: Any) -> list[Any]:
    """Make three iterations, in the second of which some ranks' first gradient has a bad value; what became of each.

    Settings
    --------
    optimizer, fused, explicit
        The optimizer; whether its kernel unscales and skips; whether ``unscale_`` is called.
    empty, silent
        A rank that has no gradients in the second iteration, and one that never calls ``scale``.
    over
        The group that the scaler is given.
    """
    rank, _ = rank_and_size(group)
    given = {"group": settings["over"]} if "over" in settings else {}
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
            gradient[1] = value
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


def skipped_once(records: list[dict[str, Any]]) -> bool:
    """Tell whether the second of three steps was skipped, and no other, with the scale halved then."""
    first, second, third = (record["weights"] for record in records)
    return first == second != third and [record["scale"] for record in records] == [4.0, 2.0, 2.0]


def sent(records: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return what was sent after the first iteration, which compares the ranks' versions, too."""
    return [record["sent"] for record in records[1:]]


# As torch's.


def as_torchs(group: Any, bad_rank: int, explicit: bool) -> Any:
    """Overflow on one rank: ``step`` returns None on all, and all is as with torch's scaler."""
    names = ("returned", "scale", "tracker", "weights")
    theirs, ours = (
        [[record[name] for name in names] for record in train(group, library, [bad_rank], explicit=explicit)]
        for library in ("torch", "gradscale")
    )
    moved, later = [[0.0] * 3] * 2, [[-1.0] * 3] * 2
    assert ours == [["stepped", 4.0, 1, moved], [None, 2.0, 0, moved], ["stepped", 2.0, 1, later]]
    assert ours == theirs


def over_mpi(group: Any, bad_rank: int, name: str, is_fused: bool) -> Any:
    """Agree over MPI on torch's tensors."""
    records = train(group, "gradscale", [bad_rank], math.nan, optimizer=name, fused=is_fused, over=group)
    assert skipped_once(records)
    return [(record["scale"], record["weights"]) for record in records]


# Beyond torch's.


def fused_on_one(group: Any, bad_rank: int, name: str) -> None:
    """Overflow on one rank with a fused optimizer: torch's other ranks step, and ours skip."""
    settings = {"optimizer": name, "fused": True}
    assert skipped_once(train(group, "torch", [bad_rank], **settings)) == (group.rank() == bad_rank)
    ours = train(group, "gradscale", [bad_rank], **settings)
    assert skipped_once(ours)
    assert [record["told"] for record in ours] == [[0.0], [1.0], [0.0]]


def fused_on_all(group: Any, name: str) -> None:
    """Overflow on all ranks with a fused optimizer after ``unscale_``: torch's steps, and ours skips."""
    bad, settings = range(group.size()), {"optimizer": name, "fused": True, "explicit": True}
    theirs, ours = (train(group, library, bad, **settings) for library in ("torch", "gradscale"))
    # Torch's verdict is a sum over the ranks, and kernels compare it with 1.
    assert theirs[1]["told"] == [[float(group.size())]]
    assert not all(map(math.isfinite, theirs[1]["weights"][0]))
    assert theirs[1]["weights"][1] != theirs[0]["weights"][1]
    assert name == "SGD" or "broadcast shape" in theirs[1]["error"]
    assert skipped_once(ours)
    assert [record["error"] for record in ours] == [""] * 3


def grow(group: Any) -> None:
    """Grow from the largest power of two: torch's scale becomes infinite."""
    del group
    for library, expected in (("torch", math.inf), ("gradscale", 2.0**127)):
        scaler = make_scaler(library, init_scale=2.0**127, growth_interval=1)
        for _ in range(3):
            scaler.scale(loss())
            scaler.step(make_optimizer("SGD", parameters_with(0.0)))
            scaler.update()
            assert scaler.get_scale() == expected


DRIFTS = {
    "scale": "scale from 4.0 to 8.0 (here {})",
    "tracker": "growth_tracker from 0 to 2 (here {})",
    "policy": "policy (here DynamicScale(init_scale=4.0, growth_factor=2.0, backoff_factor=0.5, growth_interval={}",
}
OWN = {"scale": (4.0, 8.0), "tracker": (0, 2), "policy": (3, 5)}


def drift(group: Any, drifting_rank: int, what: str) -> None:
    """Let one rank resume from another checkpoint or have other factors: torch goes on, and we raise on all."""
    rank, size = rank_and_size(group)
    drifts = rank == drifting_rank
    for library in ("torch", "gradscale"):
        scaler = make_scaler(library, init_scale=4.0, growth_interval=5 if what == "policy" and drifts else 3)
        saved = scaler.state_dict()
        if drifts:
            saved |= {"scale": {"scale": 8.0}, "tracker": {"_growth_tracker": 2}}.get(what, {})
        scaler.load_state_dict(saved)
        (parameter,) = parameters_with(0.0)
        optimizer = make_optimizer("SGD", [parameter], fused=drifting_rank > 0)

        def loop(scaler: Any = scaler, parameter: Any = parameter, optimizer: Any = optimizer) -> None:
            for _ in range(4):
                scaler.scale(loss())
                parameter.grad = torch.full((3,), scaler.get_scale())
                scaler.step(optimizer)
                scaler.update()

        if library == "torch":
            loop()
        else:
            said = DRIFTS[what].format(OWN[what][drifts]), f"rank {rank} of {size} in iteration 1"
            raised(gradscale.ScaleDesyncError, loop, *said)
        assert optimizer.real_steps == (4 if library == "torch" else 0)


def missing_call(group: Any, drifting_rank: int) -> None:
    """Step optimizers A and B; one rank leaves A out at first, and the others leave B out at the end.

    Each rank makes three agreements, so that they meet. A overflows at first on the ranks that step it: torch skips
    the drifting rank's B, which was fine.
    """
    rank, size = rank_and_size(group)
    drifts = rank == drifting_rank
    for library in ("torch", "gradscale"):
        scaler = make_scaler(library, init_scale=4.0)
        first, second = parameters_with(4.0 if drifts else math.inf, 4.0)
        optimizers = {"A": make_optimizer("SGD", [first]), "B": make_optimizer("SGD", [second])}

        def loop(scaler: Any = scaler, first: Any = first, optimizers: Any = optimizers) -> None:
            for names in ("B", "AB") if drifts else ("AB", "A"):
                scaler.scale(loss())
                for name in names:
                    scaler.step(optimizers[name])
                scaler.update()
                first.grad = torch.full((3,), scaler.get_scale())

        if library == "torch":
            loop()
            assert (second.tolist() == [0.5] * 3) == drifts
        else:
            said = "call of the iteration from 0 to 1", "iteration from 1 to 2", f"rank {rank} of {size}"
            raised(gradscale.ScaleDesyncError, loop, *said)
            assert [one.real_steps for one in optimizers.values()] == [0, 0]
            assert second.tolist() == ONES


def without_gradients(group: Any, empty_rank: int, is_fused: bool) -> None:
    """Have no gradients on one rank while another one overflows: with fused optimizers torch's ranks diverge."""
    bad_rank = (empty_rank - 1) % group.size()
    theirs, ours = (
        train(group, library, [bad_rank], empty=empty_rank, fused=is_fused) for library in ("torch", "gradscale")
    )
    assert skipped_once(ours)
    assert sent(ours) == [(1, 1)] * 2
    if is_fused:
        # Torch sends nothing, and only the rank that has overflowed backs off.
        assert (theirs[1]["scale"] == 2.0) == (group.rank() == bad_rank)
        assert sent(theirs) == [(0, 0)] * 2
    else:
        assert skipped_once(theirs)
        assert sent(theirs) == [(1, 1)] * 2


def never_scaled(group: Any, silent: int, is_fused: bool) -> None:
    """Never call ``scale`` on one rank while another one overflows."""
    assert skipped_once(train(group, "gradscale", [(silent + 1) % group.size()], silent=silent, fused=is_fused))


def closure(group: Any, bad_rank: int) -> Any:
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
    # Squares of three ones, at ever lower scales until no rank overflows.
    assert scaled[:3] == [12.0, 6.0, 3.0]
    assert len(scaled) == 4
    assert (scaler.get_scale(), report.skipped, report.scale, report.retries) == (1.0, False, 1.0, 2)
    assert all(0.0 < weight < 1.0 for weight in parameter.tolist())
    return parameter.tolist(), scaled


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


def local(tensor: Any) -> list[float]:
    """Return this rank's part of a DTensor."""
    part: list[float] = tensor.to_local().tolist()
    return part


def no_gradient_of_a_mesh(group: Any, empty_rank: int, max_norm: float | None) -> None:
    """Have no gradient on one rank, with DTensors and the plain scaler: torch's fails there, and leaves the others."""
    rank, size = rank_and_size(group)
    mesh = init_device_mesh("cpu", (size,))
    expected = math.sqrt(2 * (size - 1))
    for library in ("torch", "gradscale"):
        scaler = plain_scaler(library)
        parameter = sharded(mesh, None if rank == empty_rank else 4.0)
        optimizer = make_optimizer("SGD", [parameter])
        scaler.scale(loss())
        if library == "torch" and rank == empty_rank:
            raised(AssertionError, lambda: scaler.step(optimizer), "No inf checks were recorded for this optimizer.")  # noqa: B023
            # Join the others' reduction, which would else never end.
            dist.all_reduce(torch.zeros(()), group=mesh.get_group())
            continue
        step = 1.0
        if library == "gradscale" and max_norm is not None:
            norm = scaler.unscale_(optimizer, max_norm=max_norm).item()
            assert math.isclose(norm, expected, rel_tol=1e-5)
            step = max_norm / expected
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.real_steps == 1
        assert math.isclose(local(parameter.data)[1], 1.0 - (rank != empty_rank) * step, rel_tol=1e-4)


def two_meshes(group: Any, is_given: bool, bad_rank: int | None) -> None:
    """Step one optimizer with DTensors of two meshes, which needs a group."""
    is_bad = group.rank() == bad_rank
    meshes = [init_device_mesh("cpu", shape) for shape in ((group.size(),), (group.size(), 1))]
    parameters = [sharded(mesh, math.inf if is_bad else 4.0) for mesh in meshes]
    scaler = plain_scaler("gradscale", **{"group": group} if is_given else {})
    optimizer = make_optimizer("SGD", parameters)
    scaler.scale(loss())
    if not is_given:
        said = *map(repr, meshes), "group="
        raised(gradscale.InvalidValueError, lambda: scaler.step(optimizer), *said)
        assert (optimizer.real_steps, scaler.get_scale(), local(parameters[0].grad)) == (0, 4.0, [4.0] * 2)
        return
    scaler.step(optimizer)
    scaler.update()
    has_stepped = bad_rank is None
    assert (optimizer.real_steps, scaler.get_scale()) == ((1, 4.0) if has_stepped else (0, 2.0))
    assert local(parameters[0].grad) == [math.inf if is_bad else 1.0] * 2


def clip_dtensors_and_plain_tensors(group: Any) -> None:
    """Clip while unscaling what has no norm that is defined: DTensors beside plain tensors."""
    scaler = plain_scaler("gradscale")
    (plain,) = parameters_with(4.0)
    optimizer = make_optimizer("SGD", [sharded(init_device_mesh("cpu", (group.size(),)), 4.0), plain], foreach=False)
    scaler.scale(loss())
    raised(gradscale.InvalidValueError, lambda: scaler.unscale_(optimizer, max_norm=0.5))
    assert plain.grad is not None
    assert plain.grad.tolist() == [4.0] * 3


def dimensions(group: Any, bad_rank: int) -> None:
    """Agree over a list of groups, the dimensions of a mesh of 2 x 2 ranks, in turn."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    records = train(group, "gradscale", [bad_rank], over=[mesh.get_group("data"), mesh.get_group("tensor")])
    assert skipped_once(records)
    assert [count for count, _ in sent(records)] == [2, 2]
