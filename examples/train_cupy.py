"""Train a float16 network on handwritten digits with CuPy and gradscale, one process for each GPU.

    python examples/train_cupy.py
    mpiexec -n 4 python examples/train_cupy.py --group nccl --inject 120:2
    mpiexec -n 4 python examples/train_cupy.py --group mpi --inject 120:2

The network, the images, the three runs and the table are those of train_digits.py, and so is the division of work:
every rank takes its part of each batch, and owns one shard of the gradients, the float32 master weights and the
optimizer state. All of it stays on the GPU: in an iteration the host asks for one thing, whether to skip the step.

With --group nccl the gradients, the weights and the ranks' agreement travel from GPU to GPU; MPI starts the processes
and tells them NCCL's id. With --group mpi all that travels is copied to the host first, so that any MPI will do, and
ranks may share a GPU.

Needs, from a clone of gradscale: python -m pip install '.[cupy,examples]'; for NCCL also nvidia-nccl-cu12, or for CUDA
13 nvidia-nccl-cu13; for more than one rank '.[mpi]' where there is an MPI, else '.[mpich]'.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sys
import time
import warnings
from typing import Any

from gradscale import BackendNotAvailableError, GradscaleError, GradScaler, ShardedGradScaler
from gradscale.extras import needs, program_needs, remedy

with program_needs("examples/train_cupy.py", "cupy,examples", "sklearn", "matplotlib"):
    import numpy as np
    from numpy.typing import NDArray
    from tqdm import tqdm

from train_digits import (
    BATCH_SIZE,
    GROWTH_INTERVAL,
    LAYER_SIZES,
    STEPS_BETWEEN_TESTS,
    Ranks,
    Run,
    ShardedAdam,
    backward,
    compare,
    forward,
    initial_weights,
    mean_squared_error,
    parse_options,
    skip_line,
)

# Of the ranks, one says it.
why_no_cupy = ""
try:
    with needs("examples/train_cupy.py", "cupy,examples"), warnings.catch_warnings():
        # CuPy warns where it finds no NCCL, which matters to --group nccl alone.
        warnings.simplefilter("ignore")
        import cupy
        from cupy.cuda import nccl

        from gradscale_cupy.availability import explained, require_device, require_nccl
except BackendNotAvailableError as error:
    why_no_cupy = str(error)

# Of CuPy; those of NumPy are NDArray. The network and the optimizer of train_digits.py work on both: the methods and
# operators are the same, and np.exp and np.sqrt of CuPy's arrays are computed by CuPy.
Array = Any


class GPURanks(Ranks):
    """The processes that train together, each with a GPU; a single one has no group, and sends nothing."""

    # What the scalers agree over.
    group: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.neighbours: Any = None
        if self.comm:
            from mpi4py import MPI

            self.neighbours = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.refuse(why_no_cupy or self.take_device())
        self.connect()

    def take_device(self) -> str:
        """Make a device of this machine the current one, for each of its ranks the next; or say why that cannot be."""
        place = self.neighbours.Get_rank() if self.neighbours else 0
        try:
            require_device()
            with explained("a rank took its device"):
                cupy.cuda.Device(place % cupy.cuda.runtime.getDeviceCount()).use()
        except GradscaleError as error:
            return f"{platform.node()}: {error}"
        return ""

    def refuse(self, reason: str) -> None:
        """End all ranks where any of them has a reason; one says them all."""
        reasons = dict.fromkeys(filter(None, self.all_gather_objects(reason)))
        if reasons:
            sys.exit("\n".join(reasons) if self.rank == 0 else 1)

    def connect(self) -> None:
        """Make the group."""

    def disconnect(self) -> None:
        """Free the group."""

    def reduce_scatter(self, vector: Array) -> Array:
        """Return this rank's shard of the sum of every rank's vector."""
        return vector

    def all_gather(self, shard: Array, length: int) -> Array:  # noqa: ARG002
        """Return the vector that every rank has one shard of."""
        return shard


class MPIRanks(GPURanks):
    """Ranks that talk over MPI, through the host."""

    def connect(self) -> None:
        self.refuse("" if self.comm else f"--group mpi needs mpi4py, which cannot be used here; {remedy('mpi')}")
        self.group = self.comm

    def reduce_scatter(self, vector: Array) -> Array:
        return cupy.asarray(Ranks.reduce_scatter(self, vector.get()))

    def all_gather(self, shard: Array, length: int) -> Array:
        return cupy.asarray(Ranks.all_gather(self, shard.get(), length))


class NCCLRanks(GPURanks):
    """Ranks that talk over NCCL, in the order of the current stream: the host does not wait."""

    def connect(self) -> None:
        self.refuse(self.obstacle())
        unique_id = self.broadcast(nccl.get_unique_id() if self.rank == 0 else None)
        self.group = nccl.NcclCommunicator(self.size, unique_id, self.rank)

    def obstacle(self) -> str:
        """Say why these ranks cannot use NCCL; nothing where they can."""
        gpu = cupy.cuda.Device().pci_bus_id
        gpus = self.neighbours.allgather(gpu) if self.neighbours else [gpu]
        try:
            require_nccl()
        except GradscaleError as error:
            return str(error)
        if len(set(gpus)) < len(gpus):
            found = f"{len(gpus)} ranks on {platform.node()}, which share {len(set(gpus))}"
            return f"NCCL needs a GPU for each rank, got {found}: start fewer ranks (mpiexec -n), or give --group mpi"
        return ""

    def disconnect(self) -> None:
        self.group.destroy()

    def shard_length(self, length: int) -> int:
        """Return the one length that NCCL wants all shards to have; the end of the last is beyond the vector's."""
        return math.ceil(length / self.size)

    def mine(self, vector: Array) -> Array:
        count = self.shard_length(len(vector))
        return vector[self.rank * count : (self.rank + 1) * count]

    def reduce_scatter(self, vector: Array) -> Array:
        count = self.shard_length(len(vector))
        sent, received = lengthened(vector, self.size * count), cupy.empty(count, vector.dtype)
        # Added up in the vectors' dtype, as is usual: a sum beyond float16 is one more overflow.
        settings = nccl_dtype(vector), nccl.NCCL_SUM, cupy.cuda.get_current_stream().ptr
        self.group.reduceScatter(sent.data.ptr, received.data.ptr, count, *settings)
        return received[: len(self.mine(vector))]

    def all_gather(self, shard: Array, length: int) -> Array:
        count = self.shard_length(length)
        sent, received = lengthened(shard, count), cupy.empty(self.size * count, shard.dtype)
        settings = nccl_dtype(shard), cupy.cuda.get_current_stream().ptr
        self.group.allGather(sent.data.ptr, received.data.ptr, count, *settings)
        return received[:length]


def nccl_dtype(vector: Array) -> int:
    """Return NCCL's number of a vector's dtype."""
    numbers: dict[str, int] = {"float16": nccl.NCCL_FLOAT16, "float32": nccl.NCCL_FLOAT32}
    return numbers[vector.dtype.name]


def lengthened(vector: Array, length: int) -> Array:
    """Return a copy with zeros at its end."""
    made = cupy.zeros(length, vector.dtype)
    made[: len(vector)] = vector
    return made


def train(run: Run, options: argparse.Namespace, data: tuple[NDArray[Any], ...], ranks: GPURanks) -> None:
    """Train from the initial weights, and fill in what came of it."""
    images, labels, test_images, test_labels = (cupy.asarray(part) for part in data)
    wanted = cupy.eye(LAYER_SIZES[-1], dtype=np.float32)[labels]
    masters = initial_weights(options.seed)
    optimizer = ShardedAdam(cupy.asarray(ranks.mine(masters)))
    weights = cupy.asarray(masters.astype(run.dtype))
    settings: dict[str, Any] = {"growth_interval": GROWTH_INTERVAL, "enabled": run.is_scaled}
    scaler = GradScaler(**settings) if ranks.group is None else ShardedGradScaler(group=ranks.group, **settings)
    injections = options.inject if run.is_scaled else []
    batches = np.random.default_rng([options.seed, 2])
    zeros = cupy.zeros((), dtype=np.int64)
    begin = time.perf_counter()
    progress = tqdm(total=options.steps, desc=f"{run.name:19}", file=sys.stdout, ncols=100, disable=ranks.rank != 0)
    for step in range(1, options.steps + 1):
        # Every rank draws the same batch, and takes its own part of it.
        mine = cupy.asarray(ranks.mine(batches.choice(len(images), BATCH_SIZE, replace=False)))
        activations = forward(weights, images[mine])
        _, output_gradient = mean_squared_error(activations[-1], wanted[mine], BATCH_SIZE)
        # The backward pass is linear: to scale what it starts from is to scale the loss.
        gradient = backward(weights, activations, scaler.scale(output_gradient))
        optimizer.grads = ranks.reduce_scatter(gradient)
        if (step, ranks.rank) in injections:
            # What float16 stores for anything above 65504, in the one shard that this rank owns.
            optimizer.grads[0] = np.inf
        zeros += cupy.count_nonzero(optimizer.grads == 0)
        # Unscales the shard by one kernel, and reads the one number that the host needs: whether any rank's shard has
        # overflowed. All step, or all skip.
        scaler.step(optimizer)
        scaler.update()
        weights = ranks.all_gather(optimizer.weights.astype(run.dtype), len(weights))
        report = scaler.last_step(optimizer)
        run.scales.append(report.scale)
        if report.skipped:
            run.skipped.append(step)
            outcomes = ranks.all_gather_objects((report.local_nonfinite > 0, report.skipped))
            if ranks.rank == 0:
                # The new scale is on the GPU, and need not be read for this.
                exponent = math.log2(report.scale)
                change = f"2^{exponent:g} -> 2^{exponent + math.log2(scaler.get_backoff_factor()):g}"
                tqdm.write(skip_line(step, outcomes, {rank for at, rank in injections if at == step}, change))
        if ranks.rank == 0 and (step % STEPS_BETWEEN_TESTS == 0 or step == options.steps):
            right = forward(weights, test_images)[-1].argmax(axis=1) == test_labels
            accuracy = float(right.mean().get())
            run.accuracies.append((step, accuracy))
            progress.set_postfix_str(f"accuracy {accuracy:.1%}", refresh=False)
        progress.update()
    counted = int(zeros.get())
    progress.close()
    run.seconds = time.perf_counter() - begin
    run.loss = float(mean_squared_error(forward(weights, images)[-1], wanted, len(images))[0].get())
    run.zeros = sum(ranks.all_gather_objects(counted)) / (options.steps * len(weights))
    # With the optimizer's count of steps: a rank that skipped alone would still gather the same weights as the others.
    state = json.dumps([scaler.state_dict(), optimizer.steps], sort_keys=True)
    digest = hashlib.sha256(weights.get().tobytes() + state.encode()).hexdigest()
    run.is_verified = len(set(ranks.all_gather_objects(digest))) == 1


def main(world: Ranks) -> int:
    """Train with CuPy."""
    groups = {"nccl": NCCLRanks, "mpi": MPIRanks}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group_help = "what the ranks talk over (default: nccl; a single one talks to nobody)"
    parser.add_argument("--group", choices=groups, help=group_help)
    options = parse_options(parser, "train_cupy.png", world)
    name = options.group or ("nccl" if world.size > 1 else "no group")
    ranks = groups.get(name, GPURanks)()
    device = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    status = compare(train, options, ranks, f"{ranks}, {name}; rank 0 on {device}")
    ranks.disconnect()
    return status


if __name__ == "__main__":
    with Ranks() as world:
        sys.exit(main(world))
