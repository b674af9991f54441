"""Compare HeadroomScale, which watches the largest gradient, with torch's rule, and print one table.

    python -m gradscale_bench.headroom
    python -m gradscale_bench.headroom --only digits --seeds 3

Measured for each run: the steps that are skipped; the fraction of float16 gradients that underflow to zero, and that
are subnormal, over all steps; and at the end the training loss and the test accuracy, or the validation loss. Printed
are the mean and the standard deviation over seeds, and for the loss the difference to torch's rule on the same seed.

- ``digits``: the float16 network of examples/train_digits.py in NumPy, trained with each policy in the loop.
- ``text``: the transformer of examples/train_fsdp.py in torch, with float16 autocast on one process. The embeddings of
  characters that a batch does not hold have zero gradients in float32, too.
- ``drift``, ``spikes``, ``hidden``: log-normal gradients whose middle wanders; jumps up for single steps; and has,
  beside the parameters' gradients, others 64 times as large that overflow first and are not seen.

``torch`` begins at 65536, ``torch24`` at 2**24, where its climb is done sooner. ``headroom`` keeps a margin of two
powers of two; ``headroom1``, ``headroom3`` and ``headroom4`` as many as they say. The number in a row's name is
``growth_interval``, for HeadroomScale that of its ceiling.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# The networks are small: threads would only be in each other's way.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray

from gradscale import presets
from gradscale_bench.headroom_policy import LARGEST_HALF, HeadroomScale

__all__ = ["Outcome", "Policy", "digits", "main", "synthetic", "text"]

SMALLEST_HALF, SMALLEST_NORMAL_HALF = 2.0**-24, 2.0**-14
_GRADIENTS = 1_000_000  # of the synthetic model
_SPREAD = 4.0  # their standard deviation, in powers of two
_SMALLEST_KEPT = SMALLEST_HALF / 2  # what is not above it becomes zero
_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one run: counts of steps, fractions of gradients, and what was learnt."""

    skipped: int
    zeros: float
    subnormal: float
    loss: float = math.nan
    accuracy: float = math.nan


class Policy:
    """Torch's rule or HeadroomScale on NumPy, by one interface: ``scale``, and ``update`` after each step."""

    def __init__(self, name: str, interval: int) -> None:
        self._watches = name.startswith("headroom")
        if self._watches:
            margin = int(name.removeprefix("headroom") or 2)
            window = min(100, interval)
            self._rule: Any = HeadroomScale(margin_bits=margin, window=window, growth_interval=interval)
        else:
            bits = int(name.removeprefix("torch") or 16)
            self._rule = presets.torch(init_scale=2.0**bits, growth_interval=interval)
        self._state = self._rule.init(np.zeros((), np.float32))

    @property
    def scale(self) -> float:
        """The scale of the step to come."""
        return float(self._state.scale)

    def update(self, is_overflow: bool, largest: float) -> None:
        """Take the verdict and the largest finite magnitude of the unscaled gradients."""
        verdict = np.asarray(is_overflow, np.int32)
        if self._watches:
            self._state = self._rule.update(self._state, verdict, np.asarray(largest, np.float32))
        else:
            self._state = self._rule.update(self._state, verdict)


class Tally:
    """Counts over the steps of a run."""

    def __init__(self) -> None:
        self.skipped = 0
        self.steps = 0
        self._zeros = 0.0
        self._subnormal = 0.0

    def add(self, is_skipped: bool, zeros: float, subnormal: float) -> None:
        """Count a step, and the fractions of its gradients that are zero and subnormal in float16."""
        self.steps += 1
        self.skipped += int(is_skipped)
        self._zeros += zeros
        self._subnormal += subnormal

    def judge(self, scaled: NDArray[Any], policy: Policy) -> bool:
        """Count a step of scaled gradients, let the policy adapt, and return whether it is to be skipped."""
        magnitudes = np.abs(scaled.astype(np.float32, copy=False))
        finite = np.isfinite(magnitudes)
        is_overflow = not finite.all()
        largest = float(magnitudes.max(initial=0.0, where=finite)) / policy.scale
        zeros = float(np.mean(magnitudes <= _SMALLEST_KEPT))
        self.add(is_overflow, zeros, float(np.mean(magnitudes < SMALLEST_NORMAL_HALF)) - zeros)
        policy.update(is_overflow, largest)
        return is_overflow

    def outcome(self, loss: float = math.nan, accuracy: float = math.nan) -> Outcome:
        """Return the counts with what was learnt."""
        return Outcome(self.skipped, self._zeros / self.steps, self._subnormal / self.steps, loss, accuracy)


def example(name: str) -> Any:
    """Return a program of examples/ as a module."""
    path = _EXAMPLES / f"{name}.py"
    if not path.is_file():
        sys.exit(f"there is no {path}: run this in a clone of gradscale's repository")
    if name not in sys.modules:
        specification = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(specification)  # type: ignore[arg-type]
        # Dataclasses look their module up.
        sys.modules[name] = module
        specification.loader.exec_module(module)  # type: ignore[union-attr]
    return sys.modules[name]


def digits(policy: Policy, seed: int, steps: int) -> Outcome:
    """Train the digits' network in float16; the loss is over all training images."""
    train = example("train_digits")
    images, labels, test_images, test_labels = train.load_images(seed)
    weights = train.initial_weights(seed)
    optimizer, half = train.ShardedAdam(weights), weights.astype(np.float16)
    batches, tally = np.random.default_rng([seed, 2]), Tally()
    for _ in range(steps):
        batch = batches.choice(len(images), train.BATCH_SIZE, replace=False)
        activations = train.forward(half, images[batch])
        _, error = train.mean_squared_error(activations[-1], labels[batch], train.BATCH_SIZE)
        scale = np.float32(policy.scale)
        gradient = train.backward(half, activations, error * scale)
        if not tally.judge(gradient, policy):
            optimizer.grads = gradient.astype(np.float32) / scale
            optimizer.step()
            half = optimizer.weights.astype(np.float16)
    loss, _ = train.mean_squared_error(train.forward(half, images)[-1], labels, len(labels))
    right = train.forward(half, test_images)[-1].argmax(axis=1) == test_labels
    return tally.outcome(loss, float(right.mean()))


def text(policy: Policy, seed: int, steps: int) -> Outcome:
    """Train the transformer with float16 autocast; the loss is over batches that it has not seen."""
    train = example("train_fsdp")
    torch = train.torch
    torch.set_num_threads(1)
    training, validation, characters = train.load_text()
    torch.manual_seed(seed)
    model, ranks = train.Transformer(characters), train.Ranks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=train.LEARNING_RATE, eps=train.EPSILON)
    batches, tally = torch.Generator().manual_seed(seed), Tally()
    autocast = torch.autocast("cpu", torch.float16)
    for _ in range(steps):
        windows, scale = train.draw_windows(training, batches, ranks), policy.scale
        with autocast:
            loss = model(windows)
        optimizer.zero_grad()
        (loss / train.MICRO_BATCHES * scale).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        if not tally.judge(torch.cat([gradient.flatten() for gradient in gradients]).numpy(), policy):
            for gradient in gradients:
                gradient /= scale
            optimizer.step()
    with torch.no_grad(), autocast:
        losses = [model(train.draw_windows(validation, batches, ranks)).item() for _ in range(32)]
    return tally.outcome(statistics.fmean(losses))


def synthetic(kind: str, policy: Policy, seed: int, steps: int) -> Outcome:
    """Follow a million log-normal gradients, of which only the largest is drawn and the small ones are computed."""
    draw, normal, tally = np.random.default_rng([seed, 3]), statistics.NormalDist(), Tally()
    # Powers of two: down by 6 over the run, as gradients shrink, and a random walk. 65536 is right at the start.
    middle = -20.0 - 6.0 * np.linspace(0.0, 1.0, steps) + np.cumsum(draw.normal(scale=0.03, size=steps))
    largest = middle + _SPREAD * np.asarray([normal.inv_cdf(u) for u in draw.random(steps) ** (1 / _GRADIENTS)])
    if kind == "spikes":
        largest = largest + np.where(draw.random(steps) < 0.002, draw.uniform(3.0, 8.0, steps), 0.0)
    hidden = 6.0 if kind == "hidden" else 0.0
    for power, center in zip(largest, middle, strict=True):
        bits = math.log2(policy.scale)
        is_overflow = power + hidden + bits > math.log2(LARGEST_HALF)
        below = [
            normal.cdf((math.log2(limit) - bits - center) / _SPREAD) for limit in (_SMALLEST_KEPT, SMALLEST_NORMAL_HALF)
        ]
        tally.add(is_overflow, below[0], below[1] - below[0])
        # Of an overflow the largest that is still finite is close to the limit, unless it is another's.
        policy.update(is_overflow, 2.0 ** min(power, math.log2(LARGEST_HALF) - bits))
    return tally.outcome()


@dataclasses.dataclass(frozen=True)
class Comparison:
    """An experiment at one interval, and the policies that it compares; torch's rule is the first."""

    name: str
    run: Callable[[Policy, int, int], Outcome]
    interval: int
    steps: int
    policies: tuple[str, ...] = ("torch", "torch24", "headroom")


def comparisons(options: argparse.Namespace) -> Iterator[Comparison]:
    """Yield what is compared."""
    yield Comparison("digits", digits, 2000, options.steps)
    yield Comparison("digits long", digits, 25, options.long_steps)
    for interval in (10, 2000):
        yield Comparison("text", text, interval, options.text_steps)
    for kind in ("drift", "spikes", "hidden"):

        def run(policy: Policy, seed: int, steps: int, kind: str = kind) -> Outcome:
            return synthetic(kind, policy, seed, steps)

        policies = ("torch", "torch24", "headroom1", "headroom", "headroom3", "headroom4")
        yield Comparison(kind, run, 2000, options.synthetic_steps, policies)


def compare(comparison: Comparison, seeds: range) -> None:
    """Run and print the rows of one experiment."""
    reference: list[Outcome] = []
    for name in comparison.policies:
        outcomes = [comparison.run(Policy(name, comparison.interval), seed, comparison.steps) for seed in seeds]
        reference = reference or outcomes
        cells = [
            spread([outcome.skipped for outcome in outcomes], ".1f"),
            spread([100 * outcome.zeros for outcome in outcomes], ".3f"),
            spread([100 * outcome.subnormal for outcome in outcomes], ".3f"),
            spread([outcome.loss for outcome in outcomes], ".5f"),
            spread([a.loss - b.loss for a, b in zip(outcomes, reference, strict=True)], "+.5f"),
            spread([100 * outcome.accuracy for outcome in outcomes], ".1f"),
        ]
        row = f"{comparison.name}, {comparison.steps} steps, {comparison.interval}"
        print(f"{row:28} {name:10} " + " ".join(f"{cell:>20}" for cell in cells), flush=True)


def spread(values: list[float], form: str) -> str:
    """Return mean and standard deviation as text, or a dash for what was not measured."""
    if any(math.isnan(value) for value in values):
        return "-"
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):{form}} ± {deviation:{form.lstrip('+')}}"


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen experiments and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m gradscale_bench.headroom", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="run only experiments with this in their name")
    parser.add_argument("--seeds", type=int, default=5, help="how many runs of each (%(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, help="the runs take this seed and the next (%(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="of digits (%(default)s)")
    parser.add_argument("--long-steps", type=int, default=1000, help="of digits long (%(default)s)")
    parser.add_argument("--text-steps", type=int, default=100, help="of text (%(default)s)")
    parser.add_argument("--synthetic-steps", type=int, default=10000, help="of the others (%(default)s)")
    options = parser.parse_args(arguments)
    chosen = [comparison for comparison in comparisons(options) if options.only in comparison.name]
    if not chosen:
        parser.error(f"no experiment has {options.only!r} in its name")
    heads = ["skipped", "zeros %", "subnormal %", "loss", "loss against torch", "accuracy %"]
    print(f"{'':28} {'':10} " + " ".join(f"{head:>20}" for head in heads))
    for comparison in chosen:
        compare(comparison, range(options.first_seed, options.first_seed + options.seeds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
