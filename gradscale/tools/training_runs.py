"""Runs of a training loop, on one rank or on all of a group, with bad steps, in a thread that may hang."""

from __future__ import annotations

import multiprocessing
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from multiprocessing.pool import ThreadPool
from typing import Any, NamedTuple

from gradscale.errors import InvalidTypeError, InvalidValueError, one_line
from gradscale.tools.side_channel import SideChannel
from gradscale.tools.state_parts import State, parts_of

LEFT_OUT = "left out"
_SEEDS = {"random": "seed", "numpy": "random.seed", "torch": "manual_seed", "mlx.core": "random.seed"}


class Run(NamedTuple):
    """Which steps of a run are bad, and how; on which rank and in which micro-batch, if not in all; and in words."""

    text: str
    rule: int = 1
    kind: str = "clean"
    bad: tuple[int, ...] = ()
    rank: int | None = None
    micro_batch: int | None = None
    saved_after: int | None = None
    init_scale: float | None = None


def factor_of(kind: str) -> float:
    """Return the factor of the loss in a bad step."""
    return 1e6 if kind == "spike" else float(kind)


class RunEndError(Exception):
    """A run has ended too soon: whether it hangs, on which rank, in which step, and in words."""


def _forbid_end(run: Run, index: int, ends: Sequence[str], cause: Exception | None) -> None:
    """Raise if a rank has ended a run in a step, by what each rank says of it."""
    # A rank may hang because another one has raised.
    worst = min(filter(None, ends), key=lambda end: end.startswith("raises"), default="")
    if not worst:
        return
    is_hang, place = worst.startswith("hangs"), "the making of a trainer" if index < 0 else f"step {index}"
    text = f"{run.text}, in {place}: " + "; ".join(f"rank {rank} {end or 'ends it'}" for rank, end in enumerate(ends))
    text += " (does one rank alone skip, or return?)" if is_hang and "" in ends else ""
    if run.kind in ("clean", LEFT_OUT) and not is_hang:
        msg = f"a trainer must end a run that has no bad step, got {text}"
        raise InvalidTypeError(msg) from cause
    raise RunEndError(is_hang, ends.index(worst), index, text) from cause


class Loop(NamedTuple):
    """A training loop, and where it runs."""

    make: Callable[..., Any]
    channel: SideChannel
    pool: ThreadPool
    timeout: float
    steps: int
    micro_batches: int

    def states(self, run: Run) -> list[State]:
        """Make a run, and return the states at its beginning and after each step; RunEndError on all ranks."""
        states, making = list[State](), self._steps(run)
        for index in range(-1, self.steps):
            end, cause = "", None
            try:
                states.append(self.pool.apply_async(copy_context().run, (next, making)).get(self.timeout))
            except multiprocessing.TimeoutError:
                end = f"hangs: no answer within {self.timeout:g} s"
            except Exception as error:
                verb = "hangs" if isinstance(error, TimeoutError) else "raises"
                end, cause = one_line(f"{verb}: {type(error).__name__}: {error}"), error
            _forbid_end(run, index, self.channel.exchange(end), cause)
        if run.kind == "clean" and not any(self.channel.exchange(states[0] != states[-1])):
            msg = f"state() must change from step to step, got the same one after {self.steps} steps"
            raise InvalidValueError(msg)
        return states

    def _steps(self, run: Run) -> Iterator[State]:
        """Make the steps of a run, and yield the state at its beginning and after each."""
        options = {} if run.init_scale is None else {"init_scale": run.init_scale}
        for index in range(-1, self.steps):
            for module in _SEEDS.keys() & sys.modules.keys():
                operator.attrgetter(_SEEDS[module])(sys.modules[module])(index + 1)
            fault = self._fault(run, index)
            try:
                if index < 0:
                    trainer = self.make(**options)
                elif fault is not None:
                    trainer.step(index, fault)
                if index == run.saved_after:
                    saved, trainer = trainer.save(), self.make(**options)
                    trainer.load(saved)
                yield parts_of(trainer.state())
            except (SystemExit, KeyboardInterrupt) as error:
                # Else the thread would end, and the runs would wait for it.
                msg = f"{type(error).__name__}: {error}"
                raise RuntimeError(msg) from error

    def _fault(self, run: Run, index: int) -> Any:
        """Return the factor of a step's loss, or those of its micro-batches; None for what is left out."""
        is_bad = index in run.bad and run.rank in (None, self.channel.rank)
        factor = 1.0 if not is_bad else None if run.kind == LEFT_OUT else factor_of(run.kind)
        if self.micro_batches == 1 or (factor is None and run.micro_batch is None):
            return factor
        return tuple(factor if run.micro_batch in (None, k) else 1.0 for k in range(self.micro_batches))
