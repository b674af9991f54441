"""Train a float16 network on real handwritten digits, with gradscale, on any number of MPI ranks.

    python examples/train_digits.py
    mpiexec -n 4 python examples/train_digits.py --inject 120:2

Three runs from the same weights on the same batches: float32; float16 without scaling; float16 with gradscale. Every
rank takes its part of each batch, and owns one shard of the gradients, the float32 master weights and the optimizer
state (as in ZeRO). Overflow in a shard is therefore seen by its owner alone, and all ranks must skip the step together.

Needs, from a clone of gradscale: python -m pip install '.[examples]', and for more than one rank '.[mpich,examples]'.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Ranks share the cores; threads of their own would only be in each other's way.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from gradscale import GradScaler, ShardedGradScaler
from gradscale.extras import program_needs, remedy

with program_needs("examples/train_digits.py", "examples", "sklearn", "matplotlib"):
    import numpy as np
    from numpy.typing import NDArray
    from tqdm import tqdm

Array = NDArray[Any]

# Where the small gradients come from: the loss is a mean over 512 images and 10 outputs, and the derivative of each
# sigmoid, at most 1/4, multiplies the gradient on its way back through six layers. In the first layers it falls below
# 6e-8, the smallest float16, although Adam, which divides by the gradient's own size, can learn from it in float32.
LAYER_SIZES = (64, 64, 64, 64, 64, 64, 10)
BATCH_SIZE = 512
LEARNING_RATE = 0.01
# Short, so that a few hundred steps show the scale grow until float16 overflows; 2000 is usual.
GROWTH_INTERVAL = 25
TEST_IMAGES = 360
STEPS_BETWEEN_TESTS = 10


def load_images(seed: int) -> tuple[Array, Array, Array, Array]:
    """Return training images and labels, test images and labels, from the 1797 that come with scikit-learn."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng([seed, 0]).permutation(len(labels))
    images, labels = (pixels[order] / 8 - 1).astype(np.float32), labels[order]
    return images[TEST_IMAGES:], labels[TEST_IMAGES:], images[:TEST_IMAGES], labels[:TEST_IMAGES]


def initial_weights(seed: int) -> Array:
    """Return all weights as one float32 vector: normal with standard deviation 0.2, and biases of zero."""
    rng = np.random.default_rng([seed, 1])
    parts = []
    for inputs, outputs in itertools.pairwise(LAYER_SIZES):
        parts += [rng.normal(scale=0.2, size=inputs * outputs), np.zeros(outputs)]
    return np.concatenate(parts).astype(np.float32)


def split_layers(vector: Array) -> list[tuple[Array, Array]]:
    """Return the weight matrix and the bias of every layer, as views of the vector that holds them all."""
    layers = []
    start = 0
    for inputs, outputs in itertools.pairwise(LAYER_SIZES):
        bias = start + inputs * outputs
        layers.append((vector[start:bias].reshape(inputs, outputs), vector[bias : bias + outputs]))
        start = bias + outputs
    return layers


def in_float32(compute: Callable[..., Array]) -> Callable[..., Array]:
    """Return an operation that rounds once, to the dtype of its last argument, and is in float32 within, as on GPUs."""

    def operation(*arrays: Array) -> Array:
        # No warnings about overflow, which is what the scaler is there for.
        with np.errstate(over="ignore", invalid="ignore"):
            result = compute(*(array.astype(np.float32, copy=False) for array in arrays))
            return result.astype(arrays[-1].dtype, copy=False)

    return operation


linear = in_float32(lambda inputs, matrix, bias: inputs @ matrix + bias)
sigmoid = in_float32(lambda x: 1 / (1 + np.exp(-x)))
sigmoid_backward = in_float32(lambda gradient, outputs: gradient * outputs * (1 - outputs))
matmul = in_float32(lambda a, b: a @ b)
sum_rows = in_float32(lambda x: x.sum(axis=0))


def forward(weights: Array, images: Array) -> list[Array]:
    """Return the images and the activations of every layer, in the dtype of the weights; the last are the outputs."""
    activations = [images]
    for matrix, bias in split_layers(weights):
        activations.append(sigmoid(linear(activations[-1], matrix, bias)))
    return activations


def mean_squared_error(outputs: Array, wanted: Array, count: int) -> tuple[Any, Array]:
    """Return the part of these images in the mean over ``count`` images, and its float32 gradient."""
    error = outputs.astype(np.float32) - wanted
    divisor = np.float32(count * LAYER_SIZES[-1])
    return np.square(error).sum() / divisor, 2 * error / divisor


def backward(weights: Array, activations: list[Array], gradient: Array) -> Array:
    """Return the gradient of all weights as one vector, in their dtype, from the gradient of the outputs."""
    made = weights.copy()
    layers = zip(split_layers(weights), split_layers(made), activations[:-1], activations[1:], strict=True)
    for (matrix, _), (matrix_gradient, bias_gradient), inputs, outputs in reversed(list(layers)):
        gradient = sigmoid_backward(gradient, outputs)
        matrix_gradient[...], bias_gradient[...] = matmul(inputs.T, gradient), sum_rows(gradient)
        gradient = matmul(gradient, matrix.T)
    return made


class Ranks:
    """The processes that train together: MPI's world, or this process alone where there is no MPI."""

    def __init__(self) -> None:
        launched = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or 1)
        self.comm: Any = None
        try:
            from mpi4py import MPI

            self.comm = MPI.COMM_WORLD
        except (ImportError, RuntimeError) as error:
            if launched > 1:
                sys.exit(
                    f"mpiexec started {launched} processes, and mpi4py cannot be used, got: {error}; {remedy('mpi')}, "
                    f"or '.[mpich]' where there is no MPI"
                )
        self.rank: int = self.comm.Get_rank() if self.comm else 0
        self.size: int = self.comm.Get_size() if self.comm else 1
        if self.size < launched:
            sys.exit(f"mpiexec started {launched} processes, and mpi4py sees {self.size}: they are of different MPIs")

    def __str__(self) -> str:
        return "1 rank" if self.size == 1 else f"{self.size} ranks"

    def mine(self, vector: Array) -> Array:
        """Return this rank's shard of a vector."""
        return np.array_split(vector, self.size)[self.rank]

    def reduce_scatter(self, vector: Array) -> Array:
        """Return this rank's shard of the sum of every rank's vector.

        The float16 gradients travel as bytes; their owner sums them in float32 and rounds once. Not every MPI can sum
        float16, and one that can rounds after each addition.
        """
        if self.comm is None:
            return vector
        counts = [shard.nbytes for shard in np.array_split(vector, self.size)]
        received = np.empty((self.size, len(self.mine(vector))), vector.dtype)
        self.comm.Alltoallv([vector.view(np.uint8), counts], [received.view(np.uint8), [counts[self.rank]] * self.size])
        return sum_rows(received)

    def all_gather(self, shard: Array, length: int) -> Array:
        """Return the vector that every rank has one shard of."""
        if self.comm is None:
            return shard
        vector = np.empty(length, shard.dtype)
        counts = [part.nbytes for part in np.array_split(vector, self.size)]
        self.comm.Allgatherv(shard.view(np.uint8), [vector.view(np.uint8), counts])
        return vector

    def all_gather_objects(self, something: Any) -> list[Any]:
        """Return what every rank has passed, in the order of the ranks."""
        return [something] if self.comm is None else list(self.comm.allgather(something))

    def broadcast(self, something: Any) -> Any:
        """Return what rank 0 has passed."""
        return something if self.comm is None else self.comm.bcast(something)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End every rank when one fails: those that wait for it would wait forever."""
        if error is None or isinstance(error, SystemExit):
            return
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
        sys.stderr.write("\ninterrupted\n" if status == 130 else "".join(traceback.format_exception(error)))
        sys.stdout.flush()
        if self.size > 1:
            time.sleep(1)  # mpiexec reads what was printed through a pipe, and drops what it has not read by then
            self.comm.Abort(status)
        sys.exit(status)


class ShardedAdam:
    """Adam for one shard of the weights. gradscale needs ``grads`` and ``step()``, and honours ``master_dtype``."""

    # The scaler replaces the scaled float16 gradients by unscaled float32 ones.
    master_dtype = np.float32

    def __init__(self, weights: Array) -> None:
        self.weights = weights.copy()
        self.grads: Any = None
        self.mean = self.mean_square = weights - weights
        self.steps = 0

    def step(self) -> None:
        """Update the float32 master weights."""
        self.steps += 1
        gradient = self.grads.astype(np.float32, copy=False)
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.mean_square = 0.999 * self.mean_square + 0.001 * gradient**2
        mean = self.mean / (1 - 0.9**self.steps)
        mean_square = self.mean_square / (1 - 0.999**self.steps)
        self.weights -= LEARNING_RATE * mean / (np.sqrt(mean_square) + 1e-8)


@dataclasses.dataclass
class Run:
    """One of the three runs: its settings, and what came of it."""

    name: str
    dtype: type[np.floating[Any]]
    is_scaled: bool = False
    scales: list[float] = dataclasses.field(default_factory=list)
    skipped: list[int] = dataclasses.field(default_factory=list)
    accuracies: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    loss: float = math.nan
    zeros: float = math.nan
    seconds: float = math.nan
    is_verified: bool = False


def train(run: Run, options: argparse.Namespace, data: tuple[Array, ...], ranks: Ranks) -> None:
    """Train from the initial weights, and fill in what came of it."""
    images, labels, test_images, test_labels = data
    wanted = np.eye(LAYER_SIZES[-1], dtype=np.float32)[labels]
    weights = initial_weights(options.seed)
    optimizer = ShardedAdam(ranks.mine(weights))
    weights = weights.astype(run.dtype)
    settings: dict[str, Any] = {"growth_interval": GROWTH_INTERVAL, "enabled": run.is_scaled}
    scaler = ShardedGradScaler(group=ranks.comm, **settings) if ranks.comm else GradScaler(**settings)
    injections = options.inject if run.is_scaled else []
    batches = np.random.default_rng([options.seed, 2])
    zeros = 0
    begin = time.perf_counter()
    progress = tqdm(total=options.steps, desc=f"{run.name:19}", file=sys.stdout, ncols=100, disable=ranks.rank != 0)
    for step in range(1, options.steps + 1):
        # Every rank draws the same batch, and takes its own part of it.
        mine = ranks.mine(batches.choice(len(images), BATCH_SIZE, replace=False))
        activations = forward(weights, images[mine])
        _, output_gradient = mean_squared_error(activations[-1], wanted[mine], BATCH_SIZE)
        # The backward pass is linear: to scale what it starts from is to scale the loss.
        gradient = backward(weights, activations, scaler.scale(output_gradient))
        optimizer.grads = ranks.reduce_scatter(gradient)
        if (step, ranks.rank) in injections:
            # What float16 stores for anything above 65504, in the one shard that this rank owns.
            optimizer.grads[0] = np.inf
        zeros += int(np.count_nonzero(optimizer.grads == 0))
        # Unscales the shard and steps, or, when any rank's shard has overflowed, skips on all of them.
        scaler.step(optimizer)
        scaler.update()
        weights = ranks.all_gather(optimizer.weights.astype(run.dtype), len(weights))
        report = scaler.last_step(optimizer)
        run.scales.append(report.scale)
        outcomes = ranks.all_gather_objects((report.local_nonfinite > 0, report.skipped))
        if any(skipped for _, skipped in outcomes):
            run.skipped.append(step)
            if ranks.rank == 0:
                change = f"2^{math.log2(report.scale):g} -> 2^{math.log2(scaler.get_scale()):g}"
                tqdm.write(skip_line(step, outcomes, {rank for at, rank in injections if at == step}, change))
        if ranks.rank == 0 and (step % STEPS_BETWEEN_TESTS == 0 or step == options.steps):
            right = forward(weights, test_images)[-1].argmax(axis=1) == test_labels
            run.accuracies.append((step, float(right.mean())))
            progress.set_postfix_str(f"accuracy {right.mean():.1%}", refresh=False)
        progress.update()
    progress.close()
    run.seconds = time.perf_counter() - begin
    run.loss = float(mean_squared_error(forward(weights, images)[-1], wanted, len(images))[0])
    run.zeros = sum(ranks.all_gather_objects(zeros)) / (options.steps * len(weights))
    # With the optimizer's count of steps: a rank that skipped alone would still gather the same weights as the others.
    state = json.dumps([scaler.state_dict(), optimizer.steps], sort_keys=True)
    digest = hashlib.sha256(weights.tobytes() + state.encode()).hexdigest()
    run.is_verified = len(set(ranks.all_gather_objects(digest))) == 1


def skip_line(step: int, outcomes: list[tuple[bool, bool]], injected: set[int], change: str) -> str:
    """Say which ranks saw an overflow, which ranks skipped, and what became of the scale."""
    saw = [f"{rank} (injected)" if rank in injected else f"{rank}" for rank, (found, _) in enumerate(outcomes) if found]
    skipped = [f"{rank}" for rank, (_, skipped) in enumerate(outcomes) if skipped]
    saw_text, skipped_text = (f"{'rank' if len(ranks) == 1 else 'ranks'} {' '.join(ranks)}" for ranks in (saw, skipped))
    return f"step {step}: overflow seen by {saw_text}; {skipped_text} skipped; scale {change}"


def print_table(runs: list[Run], note: str) -> None:
    """Print what came of the runs."""
    print(f"\n{'':19}  test accuracy  training loss  steps taken  skipped  zero gradients  seconds")
    for run in runs:
        taken = len(run.scales) - len(run.skipped)
        results = f"{run.name:19} {run.accuracies[-1][1]:14.1%} {run.loss:14.5f} {taken:12} {len(run.skipped):8}"
        print(f"{results} {run.zeros:15.1%} {run.seconds:8.1f}")
    print(f"({note})\n")


def write_plot(runs: list[Run], options: argparse.Namespace, ranks: Ranks) -> None:
    """Write scale, skipped steps and accuracy by step as a PNG."""
    from matplotlib.figure import Figure

    scaled = runs[-1]
    steps = np.arange(1, options.steps + 1)
    injected = {step for step, _ in options.inject}
    figure = Figure(figsize=(9, 8), layout="constrained")
    top, middle, bottom = figure.subplots(3, sharex=True, height_ratios=[3, 1.6, 3])
    figure.suptitle(f"Handwritten digits learnt in float16 on {ranks}")
    top.step(steps, scaled.scales, where="post", color="tab:green")
    top.set_yscale("log", base=2)
    top.set_ylabel("scale")
    middle.step(steps, np.cumsum(np.isin(steps, scaled.skipped)), where="post", color="tab:green")
    middle.set_ylabel("skipped steps\nso far")
    middle.locator_params(axis="y", integer=True)
    for is_injected, marker, color in [(False, "o", "black"), (True, "X", "tab:red")]:
        where = [step for step in scaled.skipped if (step in injected) is is_injected]
        label = "skipped: injected overflow" if is_injected else "skipped: scale too large for float16"
        if where:
            top.plot(where, [scaled.scales[step - 1] for step in where], marker, color=color, label=label, markersize=8)
            middle.plot(where, [scaled.skipped.index(step) + 1 for step in where], marker, color=color, markersize=8)
    if scaled.skipped:
        top.legend(loc="lower right")
    for run, style in zip(runs, ["-", "-", "--"], strict=True):
        bottom.plot(*zip(*run.accuracies, strict=True), style, label=run.name)
    bottom.set(xlabel="step", ylabel="test accuracy", ylim=(0, 1))
    bottom.yaxis.set_major_formatter("{x:.0%}")
    bottom.legend(loc="center right")
    figure.savefig(options.output, dpi=120)


def injection(text: str) -> tuple[int, int]:
    """Parse STEP:RANK."""
    try:
        step, rank = (int(part) for part in text.split(":"))
    except ValueError:
        msg = f"must be STEP:RANK, such as 120:2, got {text!r}"
        raise argparse.ArgumentTypeError(msg) from None
    return step, rank


def parse_options(parser: argparse.ArgumentParser, output: str, ranks: Ranks) -> argparse.Namespace:
    """Return the command line's options: the parser's own, and those that every such program has."""
    parser.add_argument("--steps", type=int, default=600, help="training steps of each run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default: %(default)s)")
    inject_help = "make one rank's gradients overflow at one step of the run with gradscale; may be repeated"
    parser.add_argument("--inject", type=injection, action="append", default=[], metavar="STEP:RANK", help=inject_help)
    parser.add_argument("--output", type=Path, default=output, help="plot to write (default: %(default)s)")
    # Help and errors are the same on all ranks, and one of them says it.
    out, err = (sys.stdout, sys.stderr) if ranks.rank == 0 else (io.StringIO(), io.StringIO())
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        options = parser.parse_args()
        if options.steps < 1 or options.seed < 0:
            parser.error(f"--steps must be at least 1 and --seed at least 0, got {options.steps} and {options.seed}")
        for step, rank in options.inject:
            if not (1 <= step <= options.steps and 0 <= rank < ranks.size):
                allowed = f"a step from 1 to {options.steps} and a rank from 0 to {ranks.size - 1}"
                parser.error(f"argument --inject: must be {allowed}, got {step}:{rank}")
        if not options.output.parent.is_dir():
            parser.error(f"argument --output: there is no folder {options.output.parent}")
    return options


def compare(train: Callable[..., None], options: argparse.Namespace, ranks: Ranks, note: str) -> int:
    """Make the three runs, report and verify."""
    data = ranks.broadcast(load_images(options.seed) if ranks.rank == 0 else None)
    runs = [Run("fp32", np.float32), Run("fp16, no scaling", np.float16), Run("fp16 with gradscale", np.float16, True)]
    for run in runs:
        train(run, options, data, ranks)
    is_verified = all(run.is_verified for run in runs)
    if ranks.rank == 0:
        print_table(runs, note)
        write_plot(runs, options, ranks)
        print(f"wrote {options.output}")
        verdict = "verified: weights and scaler state are bit-identical"
        print(verdict if is_verified else "FAILED: weights or scaler state differ", f"on {ranks}")
    return 0 if is_verified else 1


def main(ranks: Ranks) -> int:
    """Train with NumPy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = parse_options(parser, "train_digits.png", ranks)
    note = "NumPy computes float16 in software: the seconds say nothing about accelerators."
    return compare(train, options, ranks, note)


if __name__ == "__main__":
    with Ranks() as world:
        sys.exit(main(world))
