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

Needs, from a clone of gradscale: python -m pip install '.[cupy]' cupy-cuda12x --group examples; for NCCL
also nvidia-nccl-cu12 (for CUDA 13: cupy-cuda13x, nvidia-nccl-cu13); for more than one rank '.[mpi]' where there is an
MPI, else '.[mpich]'.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from gradscale import GradScaler, ShardedGradScaler
from shared.program import program_needs

with program_needs("examples/train_cupy.py", "cupy", "sklearn", "matplotlib"):
    import numpy as np

    from shared.digits import Array, backward, forward, initial_weights, mean_squared_error
    from shared.gpu_ranks import GPURanks, MPIRanks, NCCLRanks, cupy
    from shared.ranks import Ranks
    from shared.runs import BATCH_SIZE, GROWTH_INTERVAL, Run, ShardedAdam, compare, parse_options


def train(run: Run, options: argparse.Namespace, data: tuple[Array, ...], ranks: GPURanks) -> None:
    """Train from the initial weights, and record what comes of it."""
    images, wanted, *test = (cupy.asarray(part) for part in data)
    masters = initial_weights(options.seed)
    optimizer = ShardedAdam(cupy.asarray(ranks.mine(masters)))
    weights = cupy.asarray(masters.astype(run.dtype))
    settings: dict[str, Any] = {"growth_interval": GROWTH_INTERVAL, "enabled": run.is_scaled}
    settings["history_size"] = options.steps
    scaler = GradScaler(**settings) if ranks.group is None else ShardedGradScaler(group=ranks.group, **settings)
    batches = np.random.default_rng([options.seed, 2])
    zeros = cupy.zeros((), dtype=np.int64)
    for step in run.steps(options, ranks):
        # Every rank draws the same batch, and takes its own part of it.
        mine = cupy.asarray(ranks.mine(batches.choice(len(images), BATCH_SIZE, replace=False)))
        activations = forward(weights, images[mine])
        _, output_gradient = mean_squared_error(activations[-1], wanted[mine], BATCH_SIZE)
        # The backward pass is linear: to scale what it starts from is to scale the loss.
        gradient = backward(weights, activations, scaler.scale(output_gradient))
        optimizer.grads = ranks.reduce_scatter(gradient)
        if run.is_scaled and (step, ranks.rank) in options.inject:
            # What float16 stores for anything above 65504, in the one shard that this rank owns.
            optimizer.grads[0] = np.inf
        zeros += cupy.count_nonzero(optimizer.grads == 0)
        # Unscales the shard by one kernel, and reads the one number that the host needs: whether any rank's shard has
        # overflowed. All step, or all skip.
        scaler.step(optimizer)
        scaler.update()
        weights = ranks.all_gather(optimizer.weights.astype(run.dtype), len(weights))
        report = scaler.last_step(optimizer)
        if report.skipped:
            outcomes = ranks.all_gather_objects((report.local_nonfinite > 0, report.skipped))
            # The new scale is on the GPU, and need not be read for this.
            new_scale = report.scale * scaler.get_backoff_factor()
            run.say_skipped(step, outcomes, report.scale, new_scale, options.inject)
        run.test(step, weights, *test)
    run.history, run.zeros = scaler.history, int(zeros.get())
    run.loss = float(mean_squared_error(forward(weights, images)[-1], wanted, len(images))[0].get())
    # With the optimizer's count of steps: a rank that skipped alone would still gather the same weights as the others.
    run.verify(weights.get().tobytes(), scaler, optimizer)


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
