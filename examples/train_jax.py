"""Train a float16 network on real handwritten digits with jax.jit, jax.shard_map and gradscale, on several devices.

    python examples/train_jax.py
    python examples/train_jax.py --devices 2 --inject 120:1 --inject 200:0

Four runs from the same weights on the same batches: float32; float16 without scaling; float16 with gradscale on one
device, and on all. Every device takes its micro-batches of each batch, and owns one shard of all weights: of float32
masters, gradients and optimizer state (as in FSDP). Overflow in a shard is seen by its owner alone, and all devices
must skip the step together: they agree inside the compiled step, and nothing is read from them in between. One device
and all must come to the same skipped steps, scales and scaler state, to the bit.

Runs on the host's processors as several devices, or, where JAX finds accelerators, on those.

Needs, from a clone of gradscale: python -m pip install '.[jax,examples]'.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gradscale import DynamicScale, ScaleState, StaticScale
from gradscale.core.protocols import Policy
from gradscale.extras import program_needs

with program_needs("examples/train_jax.py", "jax,examples", "sklearn", "matplotlib"):
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from tqdm import tqdm

    import gradscale_jax

# Where the small gradients come from: the loss is a mean over 512 images and 16 outputs, and the derivative of each
# sigmoid, at most 1/4, multiplies the gradient on its way back through five layers. In the first layers it falls below
# 6e-8, the smallest float16, although Adam, which divides by the gradient's own size, can learn from it in float32.
LAYER_SIZES = (64, 64, 64, 64, 64, 16)
# All are multiples of 16, so that each of up to 16 devices owns an equal shard; six of the outputs mean nothing.
BATCH_SIZE = 512
LEARNING_RATE = 0.01
# Short, so that a few hundred steps show the scale grow until float16 overflows; 2000 is usual.
GROWTH_INTERVAL = 15
TEST_IMAGES = 360
STEPS_BETWEEN_READS = 10
# Between one device and all, which may add numbers up in another order.
LOSS_TOLERANCE = 0.01

Weights = list[tuple[jax.Array, jax.Array]]
REPLICATED, SHARDED = PartitionSpec(), PartitionSpec("data")


def load_images(seed: int) -> tuple[Any, Any, Any, Any]:
    """Return training images and labels, test images and labels, from the 1797 that come with scikit-learn."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng([seed, 0]).permutation(len(labels))
    images, labels = (pixels[order] / 8 - 1).astype(np.float32), labels[order].astype(np.int32)
    return images[TEST_IMAGES:], labels[TEST_IMAGES:], images[:TEST_IMAGES], labels[:TEST_IMAGES]


def initial_weights(seed: int) -> Weights:
    """Return the matrix and the bias of each layer: normal with standard deviation 0.2, and zero."""
    rng = np.random.default_rng([seed, 1])
    sizes = itertools.pairwise(LAYER_SIZES)
    return [(jnp.float32(rng.normal(scale=0.2, size=size)), jnp.zeros(size[1], jnp.float32)) for size in sizes]


def forward(weights: Weights, images: jax.Array) -> jax.Array:
    """Return the outputs, in the dtype of the weights."""
    activations: jax.Array = images.astype(weights[0][0].dtype)
    for matrix, bias in weights:
        activations = jax.nn.sigmoid(activations @ matrix + bias)
    return activations


def mean_squared_error(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the float32 mean over images and outputs."""
    return jnp.mean(jnp.square(outputs.astype(jnp.float32) - jax.nn.one_hot(labels, LAYER_SIZES[-1])))


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


class Adam(NamedTuple):
    """Float32 master weights, and what Adam remembers of their gradients."""

    weights: Weights
    mean: Weights
    mean_square: Weights
    steps: jax.Array

    def step(self, grads: Weights) -> Adam:
        """Return what follows from one more gradient."""
        steps = self.steps + 1
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, self.mean, grads)
        mean_square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * jnp.square(g), self.mean_square, grads)
        rate = LEARNING_RATE * jnp.sqrt(1 - 0.999**steps) / (1 - 0.9**steps)
        weights = jax.tree.map(lambda w, m, s: w - rate * m / (jnp.sqrt(s) + 1e-8), self.weights, mean, mean_square)
        return Adam(weights, mean, mean_square, steps)


class Record(NamedTuple):
    """What a step leaves on the devices, for the host to read later."""

    loss: jax.Array
    scale: jax.Array
    next_scale: jax.Array
    skipped: jax.Array
    zeros: jax.Array
    saw: jax.Array


# How these lie on the devices: whole on each, or cut into as many blocks of rows as there are devices.
ADAM = Adam._make([SHARDED, SHARDED, SHARDED, REPLICATED])
RECORD = Record._make([*[REPLICATED] * 5, SHARDED])


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


@partial(jax.jit, static_argnums=0)
def evaluate(dtype: Any, masters: Weights, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return accuracy and loss, of weights that may be sharded."""
    outputs = forward(jax.tree.map(lambda master: master.astype(dtype), masters), images)
    return jnp.mean(jnp.argmax(outputs, axis=1) == labels), mean_squared_error(outputs, labels)


@dataclasses.dataclass
class Run:
    """One of the four runs: its settings, and what came of it."""

    name: str
    dtype: Any
    policy: Policy
    devices: list[Any]
    scales: list[float] = dataclasses.field(default_factory=list)
    skipped: list[int] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    accuracies: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    loss: float = math.nan
    zeros: float = 0.0
    seconds: float = 0.0
    compilations: int = 0
    state: bytes = b""
    are_devices_equal: bool = True

    def __str__(self) -> str:
        return f"{self.name}, {self.where}"

    @property
    def where(self) -> str:
        """How many devices there are."""
        return "1 device" if len(self.devices) == 1 else f"{len(self.devices)} devices"


def train(run: Run, options: argparse.Namespace, data: tuple[Any, Any, Any, Any]) -> None:
    """Train from the initial weights, and fill in what came of it."""
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
    injections = options.inject if isinstance(run.policy, DynamicScale) else []
    batches = np.random.default_rng([options.seed, 2])
    unread: list[Record] = []
    begin = time.perf_counter()
    progress = tqdm(total=options.steps, desc=f"{run!s:29}", file=sys.stdout, ncols=100)
    for number in range(1, options.steps + 1):
        # As many micro-batches as devices: one device takes all of them, in turn.
        chosen = batches.choice(len(images), BATCH_SIZE, replace=False).reshape(options.devices, -1)
        flags = np.array([(number, device) in injections for device in range(options.devices)])
        is_injected = flags.reshape(len(run.devices), -1).any(axis=1)
        batch = jax.device_put((images[chosen], labels[chosen], is_injected), sharded)
        # Nothing may be copied between host and devices in here. (A CPU's arrays are the host's own: JAX refuses only
        # what would be copied to them.)
        with jax.transfer_guard("disallow"):
            adam, state, record = step(adam, state, *batch)
        unread.append(record)
        if number % STEPS_BETWEEN_READS == 0 or number == options.steps:
            accuracy = float(evaluate(run.dtype, adam.weights, *test)[0])
            run.accuracies.append((number, accuracy))
            progress.set_postfix_str(f"accuracy {accuracy:.1%}", refresh=False)
            read(run, unread, injections, options.steps)
            unread.clear()
        progress.update()
    progress.close()
    run.compilations = step._cache_size()
    run.seconds = time.perf_counter() - begin
    run.loss = float(evaluate(run.dtype, adam.weights, *jax.device_put((images, labels), replicated))[1])
    # With the optimizer's count of steps: a device that skipped alone is found by it.
    states = contents((state, adam.steps))
    run.state = states[0]
    run.are_devices_equal &= len(set(states)) == 1


def contents(replicas: Any) -> list[bytes]:
    """Return what each device holds of arrays that should be the same on all."""
    shards = zip(*(leaf.addressable_shards for leaf in jax.tree.leaves(replicas)), strict=True)
    return [b"".join(np.asarray(shard.data).tobytes() for shard in device) for device in shards]


def read(run: Run, records: list[Record], injections: list[tuple[int, int]], steps: int) -> None:
    """Read what some steps have left on the devices, and report the skipped ones."""
    for record in records:
        number = len(run.scales) + 1
        run.losses.append(float(record.loss))
        run.scales.append(float(record.scale))
        run.zeros += float(record.zeros) / steps
        run.are_devices_equal &= len(set(contents(record[:-1]))) == 1
        skipped = [device for device, shard in enumerate(record.skipped.addressable_shards) if np.asarray(shard.data)]
        if skipped:
            run.skipped.append(number)
            source = name_devices([device for at, device in injections if at == number])
            injected = f" injected on {source}," if source else ""
            seen = f"seen by {name_devices(np.flatnonzero(record.saw))}; {name_devices(skipped)} skipped"
            change = f"2^{math.log2(record.scale):g} -> 2^{math.log2(record.next_scale):g}"
            tqdm.write(f"step {number}: overflow{injected} {seen}; scale {change}")


def name_devices(devices: Iterable[int]) -> str:
    """Return "device 2", "devices 0 1", or nothing."""
    numbers = [str(device) for device in devices]
    return f"{'device' if len(numbers) == 1 else 'devices'} {' '.join(numbers)}" if numbers else ""


def compare(one: Run, several: Run) -> list[str]:
    """Print how far two runs with gradscale are from each other, and return what must not differ and does."""
    gap = max(abs(a - b) for a, b in zip(one.losses, several.losses, strict=True))
    print(f"1 device and {len(several.devices)}: losses within {gap:.1e} at every step (allowed: {LOSS_TOLERANCE})")
    differ = {"skipped steps": one.skipped != several.skipped, "scales": one.scales != several.scales}
    differ |= {"states": one.state != several.state, "losses": not gap <= LOSS_TOLERANCE}
    return [f"{what} on 1 device and on {len(several.devices)}" for what in differ if differ[what]]


def print_table(runs: list[Run]) -> None:
    """Print what came of the runs."""
    print(f"\n{'':29}  test accuracy  training loss  steps taken  skipped  zero gradients  seconds  compilations")
    for run in runs:
        taken = len(run.scales) - len(run.skipped)
        results = f"{run!s:29} {run.accuracies[-1][1]:14.1%} {run.loss:14.5f} {taken:12} {len(run.skipped):8}"
        print(f"{results} {run.zeros:15.1%} {run.seconds:8.1f} {run.compilations:13}")
    print("(Compilations of the step. CPUs compute float16 in software: the seconds say nothing about accelerators.)\n")


def write_plot(runs: list[Run], options: argparse.Namespace) -> None:
    """Write scale, skipped steps and accuracy by step as a PNG."""
    from matplotlib.figure import Figure

    one, scaled, steps = runs[2], runs[-1], np.arange(1, options.steps + 1)
    injected = {step for step, _ in options.inject}
    figure = Figure(figsize=(9, 8), layout="constrained")
    top, middle, bottom = figure.subplots(3, sharex=True, height_ratios=[3, 1.6, 3])
    figure.suptitle(f"Handwritten digits learnt in float16 on {scaled.where}")
    if one is not scaled:
        top.step(steps, one.scales, where="post", color="tab:olive", linewidth=5, alpha=0.4, label="1 device")
    top.step(steps, scaled.scales, where="post", color="tab:green", label=scaled.where)
    top.set_yscale("log", base=2)
    top.set_ylabel("scale")
    middle.step(steps, np.cumsum(np.isin(steps, scaled.skipped)), where="post", color="tab:green")
    middle.set_ylabel("skipped steps\nso far")
    middle.set_ylim(0, max(1, 1.1 * len(scaled.skipped)))
    middle.locator_params(axis="y", integer=True)
    for is_injected, marker, color in [(False, "o", "black"), (True, "X", "tab:red")]:
        where = [step for step in scaled.skipped if (step in injected) is is_injected]
        label = "skipped: injected overflow" if is_injected else "skipped: scale too large for float16"
        if where:
            top.plot(where, [scaled.scales[step - 1] for step in where], marker, color=color, label=label)
            middle.plot(where, [scaled.skipped.index(step) + 1 for step in where], marker, color=color)
    top.legend(loc="lower right")
    for run, style in zip([*runs[:2], scaled], ["-", "-", "--"], strict=True):
        bottom.plot(*zip(*run.accuracies, strict=True), style, label=run.name)
    bottom.set(xlabel="step", ylabel="test accuracy", ylim=(0, 1))
    bottom.yaxis.set_major_formatter("{x:.0%}")
    bottom.legend(loc="center right")
    figure.savefig(options.plot, dpi=120)


def injection(text: str) -> tuple[int, int]:
    """Parse STEP:DEVICE."""
    try:
        step, device = (int(part) for part in text.split(":"))
    except ValueError:
        msg = f"must be STEP:DEVICE, such as 120:2, got {text!r}"
        raise argparse.ArgumentTypeError(msg) from None
    return step, device


def parse_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    devices_help = "1, 2, 4, 8 or 16 (default: 4, or as many accelerators as there are, if these are fewer)"
    parser.add_argument("--devices", type=int, help=devices_help)
    parser.add_argument("--steps", type=int, default=500, help="training steps of each run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default: %(default)s)")
    wanted: dict[str, Any] = {"type": injection, "action": "append", "default": [], "metavar": "STEP:DEVICE"}
    inject_help = "make a gradient of one device inf at one step of the runs with gradscale; may be repeated"
    parser.add_argument("--inject", help=inject_help, **wanted)
    plot_help = "plot to write (default: %(default)s)"
    parser.add_argument("--plot", type=Path, default="train_jax.png", metavar="FILE", help=plot_help)
    options = parser.parse_args()
    if options.steps < 1 or options.seed < 0:
        parser.error(f"--steps must be at least 1 and --seed at least 0, got {options.steps} and {options.seed}")
    if not options.plot.parent.is_dir():
        parser.error(f"argument --plot: there is no folder {options.plot.parent}")
    allowed = [1, 2, 4, 8, 16]
    if options.devices not in [None, *allowed]:
        parser.error(f"argument --devices: must be one of {allowed}, got {options.devices}")
    # Makes the host's processors look like several devices; must come before JAX looks for devices.
    jax.config.update("jax_num_cpu_devices", options.devices or 4)
    found = len(jax.devices())
    if options.devices is None:
        options.devices = max(number for number in allowed if number <= min(4, found))
    if options.devices > found:
        parser.error(f"argument --devices: must be at most {found}, which JAX finds, got {options.devices}")
    for step, device in options.inject:
        if not (1 <= step <= options.steps and 0 <= device < options.devices):
            steps = f"a step from 1 to {options.steps} and a device from 0 to {options.devices - 1}"
            parser.error(f"argument --inject: must be {steps}, got {step}:{device}")
    return options


def main() -> int:
    """Make the four runs, report and verify."""
    options = parse_options()
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
    print_table(runs)
    write_plot(runs, options)
    print(f"wrote {options.plot}")
    failures = compare(runs[2], runs[-1]) if options.devices > 1 else []
    failures += [f"devices of {run}" for run in runs if not run.are_devices_equal]
    failures += [f"{run.compilations} compilations of {run}" for run in runs if not 1 <= run.compilations <= 2]
    where = f"on 1 device and on each of {options.devices}" if options.devices > 1 else "on 1 device"
    verdict = f"verified: skipped steps, scales and scaler state are bit-identical {where}"
    print(f"FAILED: these differ: {'; '.join(failures)}" if failures else verdict)
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr, flush=True)
        # Not through Python's clean-up, which waits for what the devices still compute.
        os._exit(130)
