"""Train a float16 network on real handwritten digits with jax.jit, jax.shard_map and gradscale, on several devices.

    python examples/train_jax.py
    python examples/train_jax.py --devices 2 --inject 120:1 --inject 200:0

Four runs from the same weights on the same batches: float32; float16 without scaling; float16 with gradscale on one
device, and on all. Every device takes its micro-batches of each batch, and owns one shard of all weights: of float32
masters, gradients and optimizer state (as in FSDP). Overflow in a shard is seen by its owner alone, and all devices
must skip the step together: they agree inside the compiled step, and nothing is read from them in between. One device
and all must come to the same skipped steps, scales and scaler state, to the bit.

Runs on the host's processors as several devices, or, where JAX finds accelerators, on those.

Needs, from a clone of gradscale: python -m pip install '.[jax]' --group examples.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from typing import Any

from gradscale import DynamicScale, ScaleState, StaticScale
from gradscale.core.protocols import Policy
from shared.program import program_needs

with program_needs("examples/train_jax.py", "jax", "sklearn", "matplotlib"):
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding

    import gradscale_jax
    from shared.jax_digits import (
        REPLICATED,
        SHARDED,
        Adam,
        Weights,
        evaluate,
        forward,
        initial_weights,
        load_images,
        mean_squared_error,
    )
    from shared.jax_runs import ADAM, RECORD, Record, Run, contents, parse_options, report_runs

BATCH_SIZE = 512  # a multiple of 16, for up to 16 devices
# Short, so that a few hundred steps show the scale grow until float16 overflows; 2000 is usual.
GROWTH_INTERVAL = 15


def make_step(policy: Policy, dtype: Any, mesh: Mesh) -> Any:
    """Return the compiled train step; it runs on all devices of the mesh, and overwrites the state it is given."""

    def step(adam: Adam, state: ScaleState, images: Any, labels: Any, is_injected: Any) -> tuple[Any, ...]:
        def inject(grads: Weights) -> Weights:
            # What float16 stores for anything above 65504, in the one shard that this device owns.
            (first, bias), *others = grads
            return [(first.at[0, 0].set(jnp.where(is_injected[0], jnp.inf, first[0, 0])), bias), *others]

        loss = partial(shared_loss, dtype)
        differentiate = gradscale_jax.value_and_grad(loss, policy, axis_name="data", reduce=inject)
        value, grads, verdict, new_state = differentiate(state, adam.weights, images, labels)
        adam = gradscale_jax.select(verdict.finite, adam.step(grads), adam)
        mine = jnp.concatenate([grad.ravel() for grad in jax.tree.leaves(grads)])
        zeros = jax.lax.pmean(jnp.mean(mine == 0), "data")
        saw = jnp.reshape(~jnp.all(jnp.isfinite(mine)), 1)
        return adam, new_state, Record(value, state.scale, new_state.scale, ~verdict.finite, zeros, saw)

    in_specs = (ADAM, REPLICATED, SHARDED, SHARDED, SHARDED)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=(ADAM, REPLICATED, RECORD))
    return jax.jit(mapped, donate_argnums=(0, 1))


def shared_loss(dtype: Any, shards: Weights, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the loss of the whole batch, from one device's shards and its micro-batches."""
    # Gradients are computed in the dtype, and added up in float32: over micro-batches, and over devices.
    masters = jax.tree.map(lambda shard: jax.lax.all_gather(shard, "data", tiled=True), shards)

    def loss(batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        weights = jax.tree.map(lambda master: master.astype(dtype), masters)
        return mean_squared_error(forward(weights, batch[0]), batch[1])

    # shard_map differentiates collectives: each device receives the gradient of its own shards, already summed over
    # all devices. To sum or average it again would be wrong.
    mean: jax.Array = jax.lax.pmean(jnp.mean(jax.lax.map(loss, (images, labels))), "data")
    return mean


def train(run: Run, options: argparse.Namespace, data: tuple[Any, Any, Any, Any]) -> None:
    """Train from the initial weights, and record what comes of it."""
    images, labels, test_images, test_labels = data
    mesh = Mesh(np.array(run.devices), ("data",))
    sharded, replicated = NamedSharding(mesh, SHARDED), NamedSharding(mesh, REPLICATED)
    test = jax.device_put((test_images, test_labels), replicated)
    weights = initial_weights(options.seed)
    mean, mean_square = (jax.tree.map(jnp.zeros_like, weights) for _ in range(2))
    weights, mean, mean_square = jax.device_put((weights, mean, mean_square), sharded)
    steps_taken, state = jax.device_put((jnp.int32(0), run.policy.init(jnp.float32(0))), replicated)
    adam = Adam(weights, mean, mean_square, steps_taken)
    step = make_step(run.policy, run.dtype, mesh)
    batches = np.random.default_rng([options.seed, 2])
    for number in run.steps(options):
        # As many micro-batches as devices: one device takes all of them, in turn.
        chosen = batches.choice(len(images), BATCH_SIZE, replace=False).reshape(options.devices, -1)
        flags = np.array([(number, device) in run.injections for device in range(options.devices)])
        is_injected = flags.reshape(len(run.devices), -1).any(axis=1)
        batch = jax.device_put((images[chosen], labels[chosen], is_injected), sharded)
        # Nothing may be copied between host and devices in here. (A CPU's arrays are the host's own: JAX refuses only
        # what would be copied to them.)
        with jax.transfer_guard("disallow"):
            adam, state, record = step(adam, state, *batch)
        run.read(record, adam.weights, *test)
    run.compilations = step._cache_size()
    run.loss = float(evaluate(run.dtype, adam.weights, *jax.device_put((images, labels), replicated))[1])
    # With the optimizer's count of steps: a device that skipped alone is found by it.
    states = contents((state, adam.steps))
    run.state = states[0]
    run.are_devices_equal &= len(set(states)) == 1


def main() -> int:
    """Make the four runs, report and verify."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = parse_options(parser)
    data, devices = load_images(options.seed), jax.devices()[: options.devices]
    unscaled, dynamic = StaticScale(1.0), DynamicScale(growth_interval=GROWTH_INTERVAL)
    runs = [
        Run("fp32", jnp.float32, unscaled, devices),
        Run("fp16, no scaling", jnp.float16, unscaled, devices),
        Run("fp16 gradscale", jnp.float16, dynamic, devices[:1]),
        Run("fp16 gradscale", jnp.float16, dynamic, devices),
    ]
    print(f"{runs[0].where}, {devices[0].platform}", flush=True)
    runs = runs[: 2 + min(options.devices, 2)]
    for run in runs:
        train(run, options, data)
    return report_runs(runs, options)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr, flush=True)
        # Not through Python's clean-up, which waits for what the devices still compute.
        os._exit(130)
