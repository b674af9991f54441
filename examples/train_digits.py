"""Train a float16 network on real handwritten digits, with gradscale, on any number of MPI ranks.

    python examples/train_digits.py
    mpiexec -n 4 python examples/train_digits.py --inject 120:2

Three runs from the same weights on the same batches: float32; float16 without scaling; float16 with gradscale. Every
rank takes its part of each batch, and owns one shard of the gradients, the float32 master weights and the optimizer
state (as in ZeRO). Overflow in a shard is therefore seen by its owner alone, and all ranks must skip the step together.

Needs, from a clone of gradscale: python -m pip install '.[mpich]' --group examples; without mpich, one rank.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from gradscale import GradScaler, ShardedGradScaler
from shared.program import program_needs

with program_needs("examples/train_digits.py", "", "sklearn", "matplotlib"):
    import numpy as np

    from shared.digits import Array, backward, forward, initial_weights, mean_squared_error
    from shared.ranks import Ranks
    from shared.runs import BATCH_SIZE, GROWTH_INTERVAL, Run, ShardedAdam, compare, parse_options


def train(run: Run, options: argparse.Namespace, data: tuple[Array, ...], ranks: Ranks) -> None:
    """Train from the initial weights, and record what comes of it."""
    images, wanted, *test = data
    weights = initial_weights(options.seed)
    optimizer = ShardedAdam(ranks.mine(weights))
    weights = weights.astype(run.dtype)
    settings: dict[str, Any] = {"growth_interval": GROWTH_INTERVAL, "enabled": run.is_scaled}
    settings["history_size"] = options.steps
    scaler = ShardedGradScaler(group=ranks.comm, **settings) if ranks.comm else GradScaler(**settings)
    batches = np.random.default_rng([options.seed, 2])
    for step in run.steps(options, ranks):
        # Every rank draws the same batch, and takes its own part of it.
        mine = ranks.mine(batches.choice(len(images), BATCH_SIZE, replace=False))
        activations = forward(weights, images[mine])
        _, output_gradient = mean_squared_error(activations[-1], wanted[mine], BATCH_SIZE)
        # The backward pass is linear: to scale what it starts from is to scale the loss.
        gradient = backward(weights, activations, scaler.scale(output_gradient))
        optimizer.grads = ranks.reduce_scatter(gradient)
        if run.is_scaled and (step, ranks.rank) in options.inject:
            # What float16 stores for anything above 65504, in the one shard that this rank owns.
            optimizer.grads[0] = np.inf
        run.zeros += int(np.count_nonzero(optimizer.grads == 0))
        # Unscales the shard and steps, or, when any rank's shard has overflowed, skips on all of them.
        scaler.step(optimizer)
        scaler.update()
        weights = ranks.all_gather(optimizer.weights.astype(run.dtype), len(weights))
        report = scaler.last_step(optimizer)
        outcomes = ranks.all_gather_objects((report.local_nonfinite > 0, report.skipped))
        if any(skipped for _, skipped in outcomes):
            run.say_skipped(step, outcomes, report.scale, scaler.get_scale(), options.inject)
        run.test(step, weights, *test)
    run.history = scaler.history
    run.loss = float(mean_squared_error(forward(weights, images)[-1], wanted, len(images))[0])
    # With the optimizer's count of steps: a rank that skipped alone would still gather the same weights as the others.
    run.verify(weights.tobytes(), scaler, optimizer)


def main(ranks: Ranks) -> int:
    """Train with NumPy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = parse_options(parser, "train_digits.png", ranks)
    note = "NumPy computes float16 in software: the seconds say nothing about accelerators."
    return compare(train, options, ranks, note)


if __name__ == "__main__":
    with Ranks() as world:
        sys.exit(main(world))
