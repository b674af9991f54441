"""The four runs on devices of JAX, and what is recorded of each."""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from gradscale import DynamicScale, StepReport
from gradscale.core.protocols import Policy
from shared.jax_digits import REPLICATED, SHARDED, Adam, evaluate
from shared.options import add_options, check_injections, check_options
from shared.report import change, named, print_table, progress_bar, say, write_plot

STEPS_BETWEEN_READS = 10
# Between one device and all, which may add numbers up in another order.
LOSS_TOLERANCE = 0.01
DEVICES = (1, 2, 4, 8, 16)
TITLES = (*("test accuracy", "training loss", "steps taken", "skipped", "zero gradients", "seconds", "compilations"),)
NOTE = "Compilations of the step. CPUs compute float16 in software: the seconds say nothing about accelerators."


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


@dataclasses.dataclass
class Run:
    """One of the four runs: its settings, and what came of it."""

    name: str
    dtype: Any
    policy: Policy
    devices: list[Any]
    history: list[StepReport] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    accuracies: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    loss: float = math.nan
    zeros: float = 0.0
    seconds: float = 0.0
    compilations: int = 0
    state: bytes = b""
    are_devices_equal: bool = True
    unread: list[Record] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.name}, {self.where}"

    @property
    def where(self) -> str:
        """How many devices there are."""
        return "1 device" if len(self.devices) == 1 else f"{len(self.devices)} devices"

    def steps(self, options: argparse.Namespace) -> Iterator[int]:
        """Yield the numbers of the steps, from 1, with a progress bar."""
        self.count = options.steps
        self.injections = options.inject if isinstance(self.policy, DynamicScale) else []
        say(f"{self}:")
        begin = time.perf_counter()
        with progress_bar(str(self), self.count, 29) as self.progress:
            for step in range(1, self.count + 1):
                yield step
                self.progress.update()
        self.seconds = time.perf_counter() - begin

    def read(self, record: Record, weights: Any, *test: Any) -> None:
        """Keep what a step has left on the devices, and after some steps read it, and the accuracy."""
        self.unread.append(record)
        step = len(self.history) + len(self.unread)
        if step % STEPS_BETWEEN_READS == 0 or step == self.count:
            for each in self.unread:
                self.read_one(each)
            self.unread.clear()
            accuracy = float(evaluate(self.dtype, weights, *test)[0])
            self.accuracies.append((step, accuracy))
            self.progress.set_postfix_str(f"accuracy {accuracy:.1%}", refresh=False)

    def read_one(self, record: Record) -> None:
        """Read what a step has left on the devices, and say if it was skipped."""
        step, scale = len(self.history) + 1, float(record.scale)
        self.losses.append(float(record.loss))
        self.zeros += float(record.zeros) / self.count
        self.are_devices_equal &= len(set(contents(record[:-1]))) == 1
        skipped = [device for device, shard in enumerate(record.skipped.addressable_shards) if np.asarray(shard.data)]
        saw = np.flatnonzero(record.saw)
        reason: Any = "overflow" if skipped else "stepped"
        self.history.append(StepReport(bool(skipped), scale, len(saw), reason, step))
        if skipped:
            source = named((device for at, device in self.injections if at == step), "device")
            injected = f" injected on {source}," if source else ""
            seen = f"seen by {named(saw, 'device')}; {named(skipped, 'device')} skipped"
            say(f"step {step}: overflow{injected} {seen}; {change(scale, float(record.next_scale))}")

    @property
    def skipped(self) -> list[int]:
        """The steps that were left out."""
        return [report.iteration for report in self.history if report.skipped]

    @property
    def scales(self) -> list[float]:
        """The scale of each step."""
        return [report.scale for report in self.history]

    def row(self) -> tuple[str, ...]:
        """Return a row of the table."""
        taken, skipped = len(self.history) - len(self.skipped), len(self.skipped)
        results = f"{self.accuracies[-1][1]:.1%}", f"{self.loss:.5f}", f"{taken}", f"{skipped}"
        return (str(self), *results, f"{self.zeros:.1%}", f"{self.seconds:.1f}", f"{self.compilations}")


def contents(replicas: Any) -> list[bytes]:
    """Return what each device holds of arrays that should be the same on all."""
    shards = zip(*(leaf.addressable_shards for leaf in jax.tree.leaves(replicas)), strict=True)
    return [b"".join(np.asarray(shard.data).tobytes() for shard in device) for device in shards]


def failures(runs: Sequence[Run]) -> list[str]:
    """Return what must not differ, between devices and between one device and all, and does."""
    found = []
    one, several = runs[2], runs[-1]
    if one is not several:
        gap = max(abs(a - b) for a, b in zip(one.losses, several.losses, strict=True))
        print(f"1 device and {len(several.devices)}: losses within {gap:.1e} at every step (allowed: {LOSS_TOLERANCE})")
        differ = {"skipped steps": one.skipped != several.skipped, "scales": one.scales != several.scales}
        differ |= {"states": one.state != several.state, "losses": not gap <= LOSS_TOLERANCE}
        found += [f"{what} on 1 device and on {len(several.devices)}" for what in differ if differ[what]]
    found += [f"devices of {run}" for run in runs if not run.are_devices_equal]
    return found + [f"{run.compilations} compilations of {run}" for run in runs if not 1 <= run.compilations <= 2]


def report_runs(runs: Sequence[Run], options: argparse.Namespace) -> int:
    """Print the table, write the plot, and say whether what must be equal is."""
    print_table(TITLES, [run.row() for run in runs], NOTE)
    curves = [
        (run.name, [step for step, _ in run.accuracies], [share for _, share in run.accuracies])
        for run in [*runs[:2], runs[-1]]
    ]
    title = f"Handwritten digits learnt in float16 on {runs[-1].where}"
    write_plot(options.output, title, [runs[-1].history], curves, "test accuracy", percent=True)
    print(f"wrote {options.output}")
    found = failures(runs)
    where = f"on 1 device and on each of {options.devices}" if options.devices > 1 else "on 1 device"
    verdict = f"verified: skipped steps, scales and scaler state are bit-identical {where}"
    print(f"FAILED: these differ: {'; '.join(found)}" if found else verdict)
    return 1 if found else 0


def parse_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the command line's options."""
    devices_help = "1, 2, 4, 8 or 16 (default: 4, or as many accelerators as there are, if these are fewer)"
    parser.add_argument("--devices", type=int, help=devices_help)
    add_options(parser, steps=500, output="train_jax.png", example="120:2", where="device")
    options = parser.parse_args()
    check_options(parser, options)
    if options.devices not in (None, *DEVICES):
        parser.error(f"argument --devices: must be one of {list(DEVICES)}, got {options.devices}")
    # Makes the host's processors look like several devices; must come before JAX looks for devices.
    jax.config.update("jax_num_cpu_devices", options.devices or 4)
    found = len(jax.devices())
    if options.devices is None:
        options.devices = max(number for number in DEVICES if number <= min(4, found))
    if options.devices > found:
        parser.error(f"argument --devices: must be at most {found}, which JAX finds, got {options.devices}")
    check_injections(parser, options, options.devices, "device")
    return options
