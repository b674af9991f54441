"""A scaler's random life on every rank of a group, held to a plain model in each of its iterations.

Several optimizers, overflows on one rank, steps that are left out, clipping, scales and settings that are set, state
dicts that are loaded, pickles and copies. All ranks draw the same life, and the fault is one rank's. As a program it
lives longer than a test may, and prints what an iteration took and the process held in each tenth of the life::

    python tests/support/lives.py --iterations 1000000
    mpiexec -n 2 python tests/support/lives.py --iterations 100000 --world mpi
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import pickle
import random
import resource
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

from scenarios import rank_and_size

import gradscale
from gradscale.testing import run_ranks

__all__ = ["Model", "live"]

OPTIMIZERS = 3
BAD = (math.inf, -math.inf, math.nan)
MAX_NORM = 0.5
LOWEST, HIGHEST = 2.0**-126, 2.0**127
ONE = np.float32(1.0)
# What becomes of an optimizer in an iteration, by a random number; the rest are stepped without unscale_.
# An agreement costs most of an iteration, and so many of them are left out.
LEFT_OUT, CLIPPED_OVER_GROUP, CLIPPED, UNSCALED_ALONE, UNSCALED = 0.6, 0.61, 0.68, 0.76, 0.8


class Model:
    """What a scaler does to its scale, as plainly as it can be said."""

    def __init__(self) -> None:
        self.scale, self.run, self.iteration = 2.0**16, 0, 1
        self.growth, self.backoff, self.interval = 2.0, 0.5, 5

    def update(self, verdicts: list[bool]) -> None:
        """End an iteration whose optimizers were judged so: True for an overflow on any rank."""
        self.iteration += 1
        if any(verdicts):
            self.scale, self.run = max(self.scale * self.backoff, LOWEST), 0
        elif verdicts:
            self.run += 1
            if self.run >= self.interval:
                grown = self.scale * self.growth
                self.scale, self.run = grown if grown <= HIGHEST else self.scale, 0

    def set_scale(self, scale: float) -> None:
        """End an iteration by a scale that the user sets."""
        self.iteration += 1
        self.scale = scale

    def agrees(self, saved: dict[str, Any]) -> bool:
        """Tell whether a state dict says the same."""
        mine = (self.scale, self.run, self.iteration, self.growth, self.backoff, self.interval)
        keys = ("scale", "_growth_tracker", "iteration", "growth_factor", "backoff_factor", "growth_interval")
        return mine == tuple(saved[key] for key in keys)


class _Walker:
    """An optimizer with one gradient, which counts its steps and keeps what it saw in the last."""

    def __init__(self) -> None:
        self.grads: Any = None
        self.steps = 0
        self.seen = 0.0

    def step(self) -> str:
        """Count."""
        self.steps += 1
        self.seen = float(self.grads[0][0])
        return "stepped"


def live(group: Any, iterations: int, seed: int, library: str = "numpy") -> dict[str, Any]:  # noqa: ARG001
    """Live so many iterations on one rank, comparing each with the model; return what all ranks must have alike.

    Raises
    ------
    AssertionError
        At the first difference, with the iteration.
    """
    return _Life(group, seed).run(iterations)


class _Life:
    def __init__(self, group: Any, seed: int) -> None:
        self.group, self.chance = group, random.Random(seed)
        self.rank, self.size = rank_and_size(group)
        self.scaler = gradscale.ShardedGradScaler(group=group, growth_interval=5, timeout=60.0)
        self.model = Model()
        self.optimizers = [_Walker() for _ in range(OPTIMIZERS)]
        self.steps = [0] * OPTIMIZERS
        self.skipped = self.told = 0
        self.digest = 0

    def run(self, iterations: int, tell: Any = None) -> dict[str, Any]:
        """Live; ``tell`` is called with the number of iterations lived after each tenth."""
        tenth = max(iterations // 10, 1)
        for number in range(1, iterations + 1):
            self._iterate()
            if number % 50 == 0:
                assert self.model.agrees(self.scaler.state_dict()), self._where()
                self._turn_of_fate()
            self.digest = zlib.crc32(f"{self.scaler.get_scale()!r}{self.skipped}".encode(), self.digest)
            if tell is not None and number % tenth == 0:
                tell(number)
        assert self.model.agrees(self.scaler.state_dict()), self._where()
        state = self.scaler.state_dict()
        return {"state": state, "digest": self.digest, "steps": self.steps, "skipped": self.skipped}

    def _iterate(self) -> None:
        """Make one iteration, in which the true gradient of optimizer k is 2**k, but for one overflow now and then."""
        chance, scaler, model = self.chance.random, self.scaler, self.model
        assert float(scaler.scale(ONE)) == model.scale, self._where()
        verdicts = []
        for k in self.chance.sample(range(OPTIMIZERS), OPTIMIZERS) if chance() < 0.5 else range(OPTIMIZERS):
            way, fault, victim = chance(), chance(), int(chance() * self.size)
            optimizer, true = self.optimizers[k], 2.0**k
            # At the largest scales the gradients of some optimizers overflow by themselves, on every rank.
            scaled = true * model.scale if true * model.scale < 2.0 * HIGHEST else math.inf
            is_bad = fault < 0.05 or scaled == math.inf
            value = BAD[int(fault * 60.0)] if fault < 0.05 and victim == self.rank else scaled
            optimizer.grads = [np.full(1, value, np.float32)]
            if way < LEFT_OUT:
                continue
            wanted = true
            if way < UNSCALED:
                wanted = self._unscale(optimizer, true, over_group=way < CLIPPED_OVER_GROUP, clips=way < CLIPPED)
            verdicts.append(is_bad)
            # A step that is left out after unscale_ counts all the same.
            if UNSCALED_ALONE < way < UNSCALED:
                continue
            returned = scaler.step(optimizer)
            self.steps[k] += not is_bad
            self.skipped += is_bad
            assert returned == (None if is_bad else "stepped"), self._where()
            assert optimizer.steps == self.steps[k], self._where()
            assert is_bad or abs(optimizer.seen - wanted) <= 2e-6 * wanted, (optimizer.seen, wanted, self._where())
            report = scaler.last_step(optimizer)
            assert (report.skipped, report.scale, report.iteration) == (is_bad, model.scale, model.iteration)
        if chance() < 0.004:
            wanted = 2.0 ** self.chance.randint(-20, 30)
            scaler.update(wanted)
            model.set_scale(wanted)
        elif not verdicts:
            self._end_without_a_verdict()
        else:
            scaler.update()
            model.update(verdicts)

    def _end_without_a_verdict(self) -> None:
        """Be refused, and end the iteration by setting the scale that there is."""
        try:
            self.scaler.update()
        except gradscale.CallOrderError:
            self.scaler.update(self.model.scale)
            self.model.set_scale(self.model.scale)
        else:
            raise AssertionError(self._where())

    def _unscale(self, optimizer: Any, true: float, *, over_group: bool, clips: bool) -> float:
        """Unscale an optimizer's gradient, and clip it if that is wanted; return what it should be."""
        if not clips:
            self.scaler.unscale_(optimizer)
            return true
        self.scaler.unscale_(optimizer, max_norm=MAX_NORM, norm_over="group" if over_group else "rank")
        norm = true * math.sqrt(self.size) if over_group else true
        return true * min(MAX_NORM / (norm + 1e-6), 1.0)

    def _turn_of_fate(self) -> None:
        """Load, pickle, copy or change a setting between two iterations; mostly nothing."""
        draw, scaler, model = self.chance.random(), self.scaler, self.model
        if draw < 0.1:
            scaler.load_state_dict(scaler.state_dict())
        elif draw < 0.15:
            other = gradscale.ShardedGradScaler(group=self.group, init_scale=3.0, timeout=60.0)
            other.load_state_dict(scaler.state_dict())
            self.scaler = other
        elif draw < 0.2:
            self.scaler = pickle.loads(pickle.dumps(scaler))
            self.scaler.set_group(self.group)
        elif draw < 0.25:
            self.scaler = copy.deepcopy(scaler)
        elif draw < 0.3:
            model.interval = self.chance.randint(1, 9)
            scaler.set_growth_interval(model.interval)
        elif draw < 0.35:
            model.growth = self.chance.choice([2.0, 4.0])
            scaler.set_growth_factor(model.growth)
        elif draw < 0.4:
            model.backoff = self.chance.choice([0.5, 0.25])
            scaler.set_backoff_factor(model.backoff)

    def _where(self) -> str:
        return f"rank {self.rank} of {self.size}, iteration {self.model.iteration}, {vars(self.model)}"


def _memory() -> float:
    """Return the memory that this process holds now, in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def _tell_tenths(life: _Life, iterations: int) -> dict[str, Any]:
    last = [0, time.perf_counter(), time.process_time()]

    def tell(number: int) -> None:
        now, busy = time.perf_counter(), time.process_time()
        made = number - last[0]
        taken = f"{(now - last[1]) / made * 1e6:7.0f} us, {(busy - last[2]) / made * 1e6:6.0f} us of the processor"
        print(f"rank {life.rank}: {number:9} iterations, {taken} for each, {_memory():7.1f} MiB", flush=True)
        last[:] = [number, time.perf_counter(), time.process_time()]

    return life.run(iterations, tell if life.rank == 0 else None)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2, help="how many threads (default: %(default)s)")
    parser.add_argument("--world", choices=["threads", "mpi"], default="threads")
    given = parser.parse_args()
    if given.world == "threads":
        results = run_ranks(given.ranks, lambda group: _tell_tenths(_Life(group, given.seed), given.iterations))
    else:
        from mpi4py import MPI

        own = _tell_tenths(_Life(MPI.COMM_WORLD, given.seed), given.iterations)
        results = MPI.COMM_WORLD.allgather(own)
    if any(result != results[0] for result in results):
        msg = f"the ranks differ: {results}"
        raise SystemExit(msg)
    print(f"process {os.getpid()}: {len(results)} ranks agree: {results[0]}")


if __name__ == "__main__":
    _main()
