"""What the ranks do in the tests of sharded models: DDP, FSDP1 and FSDP2 with gradscale's scalers, and with torch's.

Where both are compared, each rank runs torch's first. What is returned must be the same on all ranks.
"""

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import gradscale_torch

LIBRARIES = ("torch", "gradscale")
LEARNING_RATE = 0.25
ITERATIONS = 8
TIMEOUT = 20.0
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
    reshard : bool
        Whether weights are freed between the forward and the backward pass (full shard), or kept (shard-grad-op).
    original : bool
        FSDP1: whether the optimizer sees the original parameters, or flat ones.
    offload : bool
        FSDP2: whether weights and gradients rest on the CPU, by its option.
    """

    method: str
    half: bool = False
    reshard: bool = True
    original: bool = True
    offload: bool = False


FSDP2 = Setup("FSDP2")
_BOTH = (False, True)
SETUPS = [
    Setup("DDP"),
    *(Setup("FSDP1", *options) for options in itertools.product(_BOTH, repeat=3)),
    *(Setup("FSDP2", half, reshard, True, off) for half, reshard, off in itertools.product(_BOTH, repeat=3)),
]
"""What CPUs can run."""


def make_model() -> nn.Sequential:
    """Return a model with a nested module, the same on every rank and in every run."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 4))


def distribute(setup: Setup, mesh: DeviceMesh | None = None) -> nn.Module:
    """Return the model as a method spreads it."""
    model = make_model()
    kind = torch.float16
    if setup.method == "DDP":
        return DistributedDataParallel(model)
    if setup.method == "FSDP1":
        one: dict[str, Any] = {
            "sharding_strategy": ShardingStrategy.FULL_SHARD if setup.reshard else ShardingStrategy.SHARD_GRAD_OP,
            "use_orig_params": setup.original,
            "mixed_precision": MixedPrecision(kind, kind, kind) if setup.half else None,
            "device_id": torch.device("cpu"),
        }
        model[2] = FullyShardedDataParallel(model[2], **one)
        return FullyShardedDataParallel(model, **one)
    two: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh,
        "reshard_after_forward": setup.reshard,
        "mp_policy": MixedPrecisionPolicy(kind, kind) if setup.half else MixedPrecisionPolicy(),
        # Pinned memory needs an accelerator.
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if setup.offload else OffloadPolicy(),
    }
    for module in (model[2], model):
        fully_shard(module, **two)
    return model


def make_scaler(setup: Setup, library: str, **settings):
    """Return the scaler that torch documents for a method, torch's own or gradscale's."""
    if library == "gradscale":
        settings = {"timeout": TIMEOUT} | settings
    if setup.method == "FSDP1":
        return {"torch": TorchShardedGradScaler, "gradscale": gradscale_torch.ShardedGradScaler}[library](
            "cpu", **settings
        )
    return {"torch": torch.amp.GradScaler, "gradscale": gradscale_torch.GradScaler}[library]("cpu", **settings)


def whole_weights(model: nn.Module) -> bytes:
    """Return all float32 weights of a model, gathered from the ranks."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return as_bytes(list(model.parameters()))
    return as_bytes([p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()])


def as_bytes(tensors: Sequence[Tensor]) -> bytes:
    """Return the bits of tensors, or of this rank's parts of DTensors."""
    locals_ = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    # A copy: what NumPy has seen cannot be resized any more, as FSDP1 does.
    return b"".join(tensor.detach().clone().contiguous().numpy().tobytes() for tensor in locals_)


def digest(optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of this rank's parameters, gradients and optimizer state."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    kept = [value for p in parameters for value in optimizer.state[p].values() if isinstance(value, Tensor)]
    return hashlib.sha256(as_bytes([*parameters, *gradients, *kept])).hexdigest()


def inject_infinity(parameters: Iterable[Tensor]):
    """Write an infinity into this rank's part of the first gradient that has one."""
    for gradient in local_gradients(parameters):
        if gradient.numel():
            gradient.view(-1)[-1] = math.inf
            return
    raise AssertionError("this rank holds no gradient")


def local_gradients(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield this rank's parts of the gradients."""
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad.detach()
            yield gradient.to_local() if hasattr(gradient, "to_local") else gradient


def train(group, setup: Setup, library: str, overflow: str, is_fused: bool):
    """Train, overflowing now and then on one rank; what is known after each iteration.

    Parameters
    ----------
    setup : Setup
        How the model is spread.
    library : str
        Whose scaler: "torch" or "gradscale".
    overflow : str
        "loss": the last rank's loss in the fourth iteration; in float16 also the first scale. "gradient": a gradient
        on one rank after the backward pass, each second iteration, each rank in turn, and nothing else.
    is_fused : bool
        Whether the optimizer unscales and skips in its kernel.
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
        record = {
            "loss": loss.item(),
            "scale": scaler.get_scale(),
            "tracker": scaler._get_growth_tracker(),
            "weights": whole_weights(model),
            "digest": digest(optimizer),
        }
        if library == "gradscale" and records:
            # Momentum moves the weights in each step that is made, after the first.
            assert scaler.last_step(optimizer).skipped == (record["weights"] == records[-1]["weights"])
        records.append(record)
    return records


def compare(group, setup: Setup, overflow: str, is_fused: bool):
    """Train as torch does with its own scaler, bit for bit; what all ranks must have alike."""
    theirs, ours = (train(group, setup, library, overflow, is_fused) for library in LIBRARIES)
    # The digest is of this rank's shards of the weights, the gradients and the momentum.
    assert ours == theirs
    changed = [before["weights"] != after["weights"] for before, after in itertools.pairwise(ours)]
    if overflow == "gradient":
        assert changed == [iteration % 2 == 0 for iteration in range(1, len(ours))]
    else:
        assert not changed[2]
    # 2**18 is too much for the gradients in float16, and for nothing else.
    assert ours[0]["scale"] == SETTINGS[overflow]["init_scale"] / (1 + (setup.half and overflow == "loss"))
    return [(record["scale"], record["tracker"], record["weights"]) for record in ours]


MESHES = {"data": (4,), "hybrid": (2, 2), "data and tensor": (2, 2)}


def mesh_overflow(group, bad_rank: int, parallel: str, is_reversed: bool):
    """Overflow in the first gradient on one rank of a mesh, with the plain scaler and no group given.

    With ``is_reversed`` the optimizer holds the parameters from last to first. Torch does not agree over a dimension
    that replicates, nor over one in which the first gradient is not sharded.
    """
    rank = group.rank()
    apart = {"data": 1, "hybrid": rank // 2 == bad_rank // 2, "data and tensor": rank % 2 == bad_rank % 2}[parallel]
    for library in LIBRARIES:
        model = distribute_over(MESHES[parallel], parallel)
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters[::-1] if is_reversed else parameters, lr=LEARNING_RATE)
        scaler = make_scaler(FSDP2, library, init_scale=8.0)
        scaler.scale(backward_loss(model, rank)).backward()
        if rank == bad_rank:
            inject_infinity(parameters)
        initial = [gradient.clone() for gradient in local_gradients(parameters)]
        assert all(bool(gradient.isfinite().all()) for gradient in initial) == (rank != bad_rank)
        weights = as_bytes(parameters)
        scaler.unscale_(optimizer)
        # Each gradient is the initial one times exactly 1/8.
        assert all(torch.equal(g, i * 0.125) for g, i in zip(local_gradients(parameters), initial, strict=True))
        scaler.step(optimizer)
        scaler.update()
        skips = library == "gradscale" or apart or (parallel != "hybrid" and not is_reversed)
        assert (as_bytes(parameters) == weights, scaler.get_scale()) == ((True, 4.0) if skips else (False, 8.0))


def clip(group, parallel: str, max_norm: float):
    """Clip unscaled gradients of a mesh by their global norm: torch's two calls, or gradscale's one."""
    norms, gradients = [], []
    for library in LIBRARIES:
        model = distribute_over(MESHES[parallel], parallel)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        scaler = make_scaler(FSDP2, library, init_scale=8.0)
        scaler.scale(backward_loss(model, group.rank())).backward()
        if library == "torch":
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            norm = norm.full_tensor()
        else:
            norm = scaler.unscale_(optimizer, max_norm=max_norm)
        scaler.step(optimizer)
        scaler.update()
        norms.append(norm.item())
        gradients.append(torch.cat([gradient.flatten() for gradient in local_gradients(model.parameters())]))
    assert math.isclose(*norms, rel_tol=1e-5)
    assert norms[1] > 0.02
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-9)
    return norms[1]


def backward_loss(model: nn.Module, rank: int) -> Tensor:
    """Return the loss of one batch of this rank."""
    inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(rank))
    loss: Tensor = model(inputs).square().mean()
    return loss


def distribute_over(shape: tuple[int, ...], parallel: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model of FSDP2 over a mesh.

    ``parallel`` is what the mesh is for: "data"; "hybrid" data parallelism, in which its first dimension replicates;
    "data and tensor".
    """
    if parallel != "data and tensor":
        names = ("replicate", "shard")[-len(shape) :]
        return distribute(FSDP2, init_device_mesh("cpu", shape, mesh_dim_names=names))
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    # The last layer is there because FSDP2 warns of a view among a module's outputs.
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.Tanh()).to(dtype)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    return model


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists what is sent through torch.distributed while it is entered: operation, number of elements and dtype."""

    def __init__(self):
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: list[tuple[str, int, str]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and "wait_tensor" not in func.name():
            first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
            self.sent.append((func.name(), first.numel(), str(first.dtype)))
        return func(*args, **(kwargs or {}))


def started() -> int:
    """Return how many collectives this rank has started in all groups, as the groups themselves count them."""
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups)


def count_collectives(group, explicit: bool):
    """Count what one iteration sends for two optimizers with two dtypes each, over a mesh of data and tensor ranks."""
    del group
    for library in LIBRARIES:
        pairs = [
            [distribute_over((2, 2), "data and tensor", dtype) for dtype in (torch.float32, torch.bfloat16)]
            for _ in range(2)
        ]
        optimizers = [torch.optim.SGD([p for model in pair for p in model.parameters()], lr=0.1) for pair in pairs]
        scaler = make_scaler(FSDP2, library, init_scale=8.0)
        for iteration in range(4):
            losses = [
                model(torch.ones(2, 6, dtype=next(model.parameters()).dtype)).float().sum()
                for pair in pairs
                for model in pair
            ]
            torch.autograd.backward(scaler.scale(losses))
            before = started()
            with Collectives() as collectives:
                for optimizer in optimizers:
                    if explicit:
                        scaler.unscale_(optimizer)
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scaler.update()
            # The first compares the ranks' versions, too.
            if iteration:
                assert started() - before == (8 if library == "torch" else 2)
                assert library == "torch" or collectives.sent == [("c10d::allreduce_", 21, "torch.int32")] * 2
