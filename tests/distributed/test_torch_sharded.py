"""Scalers and diagnoses of torch over groups and meshes (DDP, FSDP) do what torch's do, and what these fail at.

Where both are compared, each rank runs torch's first. What is returned must be the same on all ranks.
"""

import contextlib
import dataclasses
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import diagnoses
import pytest
from axes import is_torch_2_6, leave_out_fsdp2
from axes_torch import TorchScaler, gradscale_torch, torch
from libraries import Library
from scenarios import raised, rank_and_size
from tiers import examples, later
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from worlds import GlooWorld, agree, each

import gradscale
from gradscale_torch import devices

pytestmark = [pytest.mark.torch, pytest.mark.tier("ranks")]

LIBRARIES = ("torch", "gradscale")
LEARNING_RATE = 0.25
ITERATIONS = 8
SETTINGS = {
    "loss": {"init_scale": 2.0**18, "growth_interval": 2},
    "gradient": {"init_scale": 2.0**10, "growth_interval": 3},
}


class Setup(NamedTuple):
    """How a model is spread over the ranks.

    Attributes
    ----------
    method : str
        "DDP", "FSDP1" or "FSDP2".
    half : bool
        Whether weights are gathered, and gradients reduced, in float16.
    other : bool
        FSDP1: whether the optimizer sees flat parameters. FSDP2: whether weights and gradients rest on the CPU.
    """

    method: str
    half: bool = False
    other: bool = False


FSDP2 = Setup("FSDP2")


def make_model() -> nn.Sequential:
    """Return a model with a nested module, the same on every rank and in every run."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 4))


def distribute(setup: Setup) -> nn.Module:
    """Return the model as a method spreads it."""
    model, kind = make_model(), torch.float16
    if setup.method == "DDP":
        return DistributedDataParallel(model)
    if setup.method == "FSDP1":
        one: dict[str, Any] = {
            "use_orig_params": not setup.other,
            "mixed_precision": fsdp.MixedPrecision(kind, kind, kind) if setup.half else None,
            "device_id": torch.device("cpu"),
        }
        model[2] = fsdp.FullyShardedDataParallel(model[2], **one)
        return fsdp.FullyShardedDataParallel(model, **one)
    two: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        "mp_policy": fsdp.MixedPrecisionPolicy(kind, kind) if setup.half else fsdp.MixedPrecisionPolicy(),
        # Pinned memory needs an accelerator.
        "offload_policy": fsdp.CPUOffloadPolicy(pin_memory=False) if setup.other else fsdp.OffloadPolicy(),
    }
    for module in (model[2], model):
        fsdp.fully_shard(module, **two)
    return model


def make_scaler(setup: Setup, library: str, **settings):
    """Return the scaler that torch documents for a method, torch's own or gradscale's."""
    kinds: tuple[Any, Any] = (TorchScaler, gradscale_torch.GradScaler)
    if setup.method == "FSDP1":
        kinds = (TorchShardedGradScaler, gradscale_torch.ShardedGradScaler)
    return kinds[0]("cpu", **settings) if library == "torch" else kinds[1]("cpu", **{"timeout": 20.0, **settings})


def as_bytes(tensors: Iterable[Tensor]) -> bytes:
    """Return the bits of tensors, or of this rank's parts of DTensors."""
    # A copy: what NumPy has seen cannot be resized any more, as FSDP1 does.
    return b"".join(local_of(one.detach()).clone().contiguous().numpy().tobytes() for one in tensors)


def local_of(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor; any other tensor as it is."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def local_gradients(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield this rank's parts of the gradients."""
    return (local_of(one.grad.detach()) for one in parameters if one.grad is not None)


def inject_infinity(parameters: Iterable[Tensor]):
    """Write an infinity into this rank's part of the first gradient that has one."""
    next(gradient for gradient in local_gradients(parameters) if gradient.numel()).view(-1)[-1] = math.inf


# FSDP, and meshes.


def train(group, setup: Setup, library: str, overflow: str, is_fused: bool):
    """Train, overflowing now and then on one rank; what is known after each iteration, of this rank's shards.

    ``overflow`` is of the last rank's "loss" in the fourth iteration, and in float16 of the first scale; or of a
    "gradient" on one rank after the backward pass, each second iteration, each rank in turn, and nothing else.
    """
    rank, size = group.rank(), group.size()
    model = distribute(setup)
    weights = list(model.parameters())
    # A wrongly unscaled gradient makes a difference to SGD, hardly to Adam; but SGD is not fused over DTensors.
    optimizer: torch.optim.Optimizer
    if is_fused:
        optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE / 10, fused=True)
    else:
        optimizer = torch.optim.SGD(weights, lr=LEARNING_RATE, momentum=0.9)
    scaler = make_scaler(setup, library, **SETTINGS[overflow])
    random = torch.Generator().manual_seed(rank)
    records: list[dict[str, Any]] = []
    for iteration in range(ITERATIONS if overflow == "loss" else 2 * size + 2):
        inputs, targets = torch.randn(5, 6, generator=random), torch.randn(5, 4, generator=random)
        # Before the forward pass: after it, FSDP's model may hold other parameters than the optimizer.
        optimizer.zero_grad()
        # FSDP casts the inputs by itself.
        loss = (model(inputs).float() - targets).square().mean()
        is_bad = overflow == "loss" and iteration == 3 and rank == size - 1
        scaler.scale(loss * math.inf if is_bad else loss).backward()
        if overflow == "gradient" and iteration % 2 and rank == iteration // 2 % size:
            inject_infinity(weights)
        scaler.step(optimizer)
        scaler.update()
        held = optimizer.param_groups[0]["params"]
        moments = [x for one in held for x in optimizer.state[one].values() if isinstance(x, Tensor)]
        record = {"loss": loss.item(), "scale": scaler.get_scale(), "tracker": scaler._get_growth_tracker()}
        record |= {"weights": as_bytes(held), "others": [as_bytes(moments), as_bytes(local_gradients(held))]}
        if library == "gradscale" and records:
            # Momentum moves the weights in each step that is made, after the first.
            assert scaler.last_step(optimizer).skipped == (record["weights"] == records[-1]["weights"])
        records.append(record)
    return records


def compare(group, setup: Setup, overflow: str, is_fused: bool):
    """Train as torch does with its own scaler, bit for bit."""
    theirs, ours = (train(group, setup, library, overflow, is_fused) for library in LIBRARIES)
    assert ours == theirs
    changed = [before["weights"] != after["weights"] for before, after in itertools.pairwise(ours)]
    if overflow == "gradient":
        assert changed == [iteration % 2 == 0 for iteration in range(1, len(ours))]
    else:
        assert not changed[2]
    # 2**18 is too much for the gradients in float16, and for nothing else.
    assert ours[0]["scale"] == SETTINGS[overflow]["init_scale"] / (1 + (setup.half and overflow == "loss"))
    return [(record["scale"], record["tracker"]) for record in ours]


@pytest.mark.parametrize("overflow", ["loss", "gradient"])
@pytest.mark.parametrize("size", [2, *later("all", 3)])
def test_training_is_that_with_torchs_own_scaler_bit_for_bit(size: int, overflow: str):
    # The FSDP2 of torch 2.6 does not run on CPUs.
    methods = ("FSDP1",) if is_torch_2_6() else ("FSDP1", "FSDP2")
    setups = [Setup(*options) for options in itertools.product(methods, *[(False, True)] * 2)]
    # Ranks of DDP decide alone, and an infinity in the gradients of one would part them.
    cases = [(setup, overflow, False) for setup in setups + [Setup("DDP")] * (overflow == "loss")]
    cases += [(setup, overflow, True) for setup in setups if setup.method == "FSDP2"]
    agree(GlooWorld(size), compare, cases)


def backward_loss(model: nn.Module, rank: int) -> Tensor:
    """Return the loss of one batch of this rank."""
    inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(rank))
    loss: Tensor = model(inputs).square().mean()
    return loss


def distribute_over_grid() -> nn.Module:
    """Return a model of FSDP2 over a mesh of 2 x 2, of which one dimension is for tensors, whole or in parts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    # The last layer is there because FSDP2 warns of a view among a module's outputs.
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.Tanh())
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fsdp.fully_shard(model, mesh=mesh["data"])
    return model


def started() -> int:
    """Return how many collectives this rank has started in all groups, as the groups themselves count them."""
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups)


# DTensors, and the plain scaler.


def sharded(mesh, value: float | None = None, placement=None) -> torch.nn.Parameter:
    """Return a parameter of ones, two on each rank, and a gradient of this value; plain ones without a mesh."""

    def made(one: float) -> Any:
        part = torch.full((2,), one)
        placements = [placement or Shard(0)] * (mesh.ndim if mesh else 0)
        return DTensor.from_local(part, mesh, placements, run_check=False) if mesh else part

    parameter = torch.nn.Parameter(made(1.0))
    parameter.grad = None if value is None else made(value)
    return parameter


def meshes_over(size: int, rank: int, kind: str) -> list[DeviceMesh]:
    """Return one mesh, two over the same ranks, or one over all ranks and one over this one's half of them (experts).

    Of "some", the ranks of the second half have no mesh of their own; "crossed" are the dimensions of a mesh of 4.
    """
    if kind == "crossed":
        whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
        return [whole["data"], whole["expert"]]
    everyone = init_device_mesh("cpu", (size,))
    if kind in ("one", "same"):
        return [everyone, init_device_mesh("cpu", (size, 1))][: 1 + (kind == "same")]
    half = size - size // 2
    # Each rank makes both.
    parts = [DeviceMesh("cpu", list(ranks)) for ranks in (range(half), range(half, size))]
    own = [] if kind == "some" and rank >= half else [parts[rank >= half]]
    return [everyone, *own] if kind == "half" else [*own, everyone]


def step_shards(group, kind: str, seed: int):
    """Step an optimizer of shards of meshes: some have no gradient, or a bad one; clip them where a norm is defined.

    Where all meshes are over all ranks, each rank is told what all hold.

    "plain" is a plain tensor beside the shards of one mesh, "copies" are of one mesh, and differ, to tell which counts.
    """
    rank, size = rank_and_size(group)
    chance = random.Random(f"{kind} {seed}")
    meshes: list[Any] = [None] if kind == "plain" else []
    meshes = meshes_over(size, rank, {"plain": "one", "copies": "one"}.get(kind, kind)) + meshes
    placement = Replicate() if kind == "copies" else None
    # On each rank, of each parameter; there is a gradient on some rank.
    values = []
    for other in range(size):
        has_one = kind in ("one", "copies") or (kind == "some" and other >= size - size // 2)
        values.append(chance.choices([1.0, -3.0, 0.25, 4.0, None], k=1 if has_one else 2))
    values[0][0] = 2.0
    bad_rank, bad = chance.randrange(size), chance.choice([None, math.inf, math.nan, 3e38])
    if bad is not None:
        values[bad_rank][chance.randrange(len(values[bad_rank]))] = bad
    clips, max_norm, is_given = chance.random() < 0.5, chance.choice([0.5, 1e6]), chance.random() < 0.3
    # Where a rank has fewer meshes, others alone would refuse to clip.
    may_clip, clips = kind in ("one", "same", "copies"), clips and kind != "some"
    held = [value for row in values[: 1 if placement else size] for value in row if value is not None]
    norm = math.sqrt(2.0 * sum(value**2 for value in held)) if may_clip and clips else 0.0
    own = values[rank]
    scaler = make_scaler(FSDP2, "gradscale", init_scale=0.5, **({"group": group} if is_given else {}))
    parameters = [sharded(mesh, 0.0, placement) for mesh in meshes]
    optimizer = torch.optim.SGD(parameters, lr=1.0, foreach=False)
    told = []
    is_whole = kind in ("one", "same", "plain", "copies")
    for one in ([0.0] * len(meshes), own):
        for parameter, mesh, value in zip(parameters, meshes, one, strict=True):
            parameter.grad = sharded(mesh, None if value is None else 0.5 * value, placement).grad
        scaler.scale(torch.ones(()))
        if is_whole:
            names = [str(number) for number in range(len(meshes))]
            report = scaler.diagnose(optimizer, names, gather=True)
            part = part_of(names, parameters, 0.5, len(told) + 1, True)
            told.append(("gathered", report, part))
        before = started()
        if clips and not may_clip:
            said = ("plain",) if kind == "plain" else ("spread over the same ranks", "clip_grad_norm_")
            raised(gradscale.InvalidValueError, lambda: scaler.unscale_(optimizer, max_norm=0.5), *said)
        elif clips:
            found = scaler.unscale_(optimizer, max_norm=max_norm).item()
        scaler.step(optimizer)
        scaler.update()
    if not clips:
        assert started() - before == (len({*meshes} - {None}) if kind in KINDS[2:] and not is_given else 1)
    largest = torch.finfo(torch.float32).max
    is_huge = bad == 3e38 and norm > largest
    is_bad = is_huge or any(value is not None and not math.isfinite(value) for row in values for value in row)
    report = scaler.last_step(optimizer)
    assert (report.skipped, scaler.get_scale()) == (is_bad, 0.25 if is_bad else 0.5)
    # It is told whose part is too large.
    assert (report.local_nonfinite > 0) == (is_bad and rank == bad_rank)
    factor = 1.0
    if may_clip and clips and not is_bad:
        assert math.isclose(found, norm, rel_tol=1e-5)
        factor = min(max_norm / norm, 1.0)
    for parameter, value in zip(parameters, own, strict=True):
        if value is not None and not (is_bad and clips):
            torch.testing.assert_close(local_of(parameter.grad), torch.full((2,), value * factor), equal_nan=True)
        step = 0.0 if is_bad or value is None else value * factor
        torch.testing.assert_close(local_of(parameter.detach()), torch.full((2,), 1.0 - step))
    if may_clip and clips and not is_bad:
        # A disabled scaler clips gradients that nothing has scaled.
        found = make_scaler(FSDP2, "gradscale", enabled=False).unscale_(optimizer, max_norm=1e6)
        assert math.isclose(found.item(), norm * factor, rel_tol=1e-5)
    if kind == "one" and clips:
        # No rank's part is too large, but the norm of all is.
        parameters[0].grad = sharded(meshes[0], 2e38 * scaler.get_scale()).grad
        scaler.scale(torch.ones(()))
        assert scaler.unscale_(optimizer, max_norm=max_norm).item() == math.inf
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step(optimizer).local_nonfinite > 0
    if kind in ("one", "half first"):
        # All are told of a rank whose gradients are refused, but for a diagnosis.
        is_odd, odd = rank == bad_rank, torch.optim.SGD(parameters)
        parameters[0].grad = DTensor.from_local(torch.ones(1 if is_odd else 2).expand(2), meshes[0], [Shard(0)])
        scaler.scale(torch.ones(()))
        scaler.diagnose(odd, gather=True)
        refused, said = gradscale.ScaleDesyncError, f"rank {bad_rank} cannot unscale its gradients"
        if is_odd:
            refused, said = gradscale.InvalidValueError, "overlaps itself"
        raised(refused, lambda: (scaler.unscale_(odd), scaler.step(odd)), said)
    return told


KINDS = ("one", "same", "half", "half first", "some", "crossed", "plain", "copies")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_shards_of_any_meshes_are_diagnosed_clipped_skipped_and_stepped_together(size: int, kind: str):
    if kind != "crossed" or size == 4:
        for _, told in each(GlooWorld(size), step_shards, [(kind, seed) for seed in range(examples(40))]):
            diagnoses.check(told, [(rank,) for rank in range(size)])


# Diagnoses.

TORCH = Library("torch", torch)


def part_of(names: Sequence[str], parameters: Sequence[Tensor], scale: float, number: int, is_scaled, lost=None):
    """Return what this rank has to tell of its parts of the gradients."""
    gradients = [next(local_gradients([parameter]), None) for parameter in parameters]
    rows = [
        diagnoses.row(name, None if x is None else diagnoses.back(TORCH, x), k, scale if is_scaled else 1.0)
        for k, (name, x) in enumerate(zip(names, gradients, strict=True))
    ]
    return diagnoses.Part(rows, None, scale, number, is_scaled, lost, 0.0)


def clip(model: nn.Module, optimizer, scaler, rank: int):
    """Clip gradients of a mesh while they are unscaled: as torch does by their global norm, when they are."""
    optimizer.zero_grad()
    scaler.scale(backward_loss(model, rank)).backward()
    scaled = [gradient.clone() for gradient in local_gradients(model.parameters())]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf).full_tensor().item() / scaler.get_scale()
    max_norm = norm / 4.0
    found = scaler.unscale_(optimizer, max_norm=max_norm)
    assert norm > 0.02
    assert math.isclose(found.item(), norm, rel_tol=1e-5)
    expected = [gradient / (4.0 * scaler.get_scale()) for gradient in scaled]
    torch.testing.assert_close([*local_gradients(model.parameters())], expected, rtol=1e-4, atol=1e-9)
    scaler.step(optimizer)
    scaler.update()


def each_rank_in_turn(group, setup: Setup, how: str, is_given: bool):
    """Train with an infinity on each rank in turn, and a clean iteration at the end; each rank is told the same.

    Then a weight is broken, and a moment, on no rank and on each in turn: all are told which, and of which.
    ``how`` is the optimizer: "plain"; "fused", which unscales and skips in its kernel; "late", the same whose verdict
    the host reads only when it is asked for one, as on a device. Of 4 ranks there is a grid, whose dimensions may be
    given as groups: then a rank is told by its place in each.
    """
    rank, size = group.rank(), group.size()
    model = distribute_over_grid() if size == 4 else distribute(setup)
    parameters = list(model.parameters())
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=LEARNING_RATE, fused=how != "plain")
    # Automatic diagnoses have the host read each verdict at once.
    telling: dict[str, Any] = {"diagnose": "on_overflow"}
    if is_given:
        telling["group"] = parameters[0].device_mesh.get_all_groups()
    scaler = make_scaler(setup, "gradscale", init_scale=1024.0, **({} if how == "late" else telling))
    told = []
    late = mock.patch.object(devices, "is_on_cpu", return_value=False)
    with late if how == "late" else contextlib.nullcontext():
        for iteration in range(size + 1):
            optimizer.zero_grad()
            scaler.scale(backward_loss(model, rank)).backward()
            if rank == iteration:
                inject_infinity(parameters[iteration % len(parameters) :])
            is_bad, scale, lost = iteration < size, 1024.0 / 2**iteration, None if how == "late" else 0

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
    if size == 4:
        clip(model, optimizer, scaler, rank)
    # Of the optimizer, whose parameters FSDP1 may have put in the place of the model's.
    (parameter, *_) = optimizer.param_groups[0]["params"]
    broken = {("weight", ""): parameter, ("state", "exp_avg_sq"): optimizer.state[parameter]["exp_avg_sq"]}
    for bad_rank, (key, held) in itertools.product(range(-1, size), broken.items()):
        local = local_of(held.detach())
        before = local.clone()
        if rank == bad_rank:
            local.view(-1)[0] = math.nan
        report = scaler.diagnose(optimizer, gather=True, state=True)
        local.copy_(before)
        place = divmod(bad_rank, 2) if is_given else (bad_rank,)
        assert [(one.kind, one.key, one.rank, one.nan) for one in report.broken] == [(*key, place, 1)] * (bad_rank >= 0)
        assert {one.name for one in report.broken} <= {one.name for one in report.entries}
    return told


@pytest.mark.parametrize(
    ("size", "setup", "how", "is_given"),
    [
        *((size, FSDP2, how, False) for size in (2, 3) for how in ("plain", "fused")),
        (3, FSDP2, "late", False),
        (2, Setup("FSDP2", half=True), "plain", False),
        (2, Setup("FSDP1"), "plain", False),
        (2, Setup("FSDP1", other=True), "plain", False),
        *((4, FSDP2, "plain", is_given) for is_given in (True, False)),
    ],
)
def test_a_bad_shard_on_each_rank_in_turn_is_named_on_every_rank_at_every_stage(
    size: int, setup: Setup, how: str, is_given: bool
):
    if setup.method == "FSDP2":
        leave_out_fsdp2()
    ((_, told),) = each(GlooWorld(size), each_rank_in_turn, [(setup, how, is_given)])
    diagnoses.check(told, [divmod(rank, 2) if is_given else (rank,) for rank in range(size)])


def loss_of_a_mesh(group, bad_rank: int, placement: str):
    """Scale a loss that is a DTensor, replicated or a part on each rank, and skip the step."""
    mesh = init_device_mesh("cpu", (group.size(),))
    is_bad = group.rank() == bad_rank or placement == "replicated"
    local = torch.tensor([math.nan if is_bad else 1.0])
    loss = DTensor.from_local(local, mesh, [Replicate() if placement == "replicated" else Shard(0)])
    optimizer = torch.optim.SGD([sharded(mesh, math.inf)], lr=LEARNING_RATE)
    scaler = make_scaler(FSDP2, "gradscale", init_scale=4.0, diagnose="on_overflow")
    scaler.scale(loss)
    asked = scaler.diagnose(optimizer, loss={"main": loss, "other": math.nan})
    scaler.step(optimizer)
    overflow = scaler.last_step(optimizer).overflow
    # One more is a number that is not finite.
    assert asked.loss_nonfinite == 1 + is_bad
    assert overflow.loss_nonfinite == (group.size() if placement == "replicated" else 1)
    assert overflow.cause == "model"


@pytest.mark.parametrize("placement", ["replicated", "parts"])
@pytest.mark.parametrize("size", [2, *later("all", 3)])
def test_a_loss_that_is_a_dtensor_is_judged_by_its_part_on_each_rank(size: int, placement: str):
    agree(GlooWorld(size), loss_of_a_mesh, [(bad_rank, placement) for bad_rank in range(size)])


def one_clips(group, odd_rank: int, how: str):
    """Clip shards on one rank: its message that norms follow meets a verdict, and no all-reduce of another length."""
    optimizer = torch.optim.SGD([sharded(init_device_mesh("cpu", (group.size(),)), 1.0)], lr=LEARNING_RATE)
    scaler = gradscale_torch.StepGuard(timeout=60.0)

    def step() -> None:
        if group.rank() == odd_rank:
            scaler.unscale_(optimizer, max_norm=1.0)
        elif how == "refuses":
            scaler.refuse(optimizer)
        scaler.step(optimizer)

    raised(gradscale.ScaleDesyncError, step, "unscale_(max_norm=), for the norm over the group", f"on rank {odd_rank}")


@pytest.mark.parametrize("how", ["steps", "refuses"])
@pytest.mark.parametrize("size", [2, *later("all", 3)])
def test_the_norm_of_shards_is_announced_to_ranks_that_do_not_clip(size: int, how: str):
    agree(GlooWorld(size), one_clips, [(odd_rank, how) for odd_rank in range(size)])
