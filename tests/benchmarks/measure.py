"""Time calls in turn, and hold the results against their targets."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

# A scale at which gradients do not shrink from round to round.
STEADY: dict[str, Any] = {"init_scale": 1.0, "growth_interval": 1 << 30}

Run = Callable[[], object]
Calls = Mapping[str, Run | tuple[Run, Run]]
"""By name what is timed, or that and what then has to be done, off the clock, before it can be called again."""


class NotOnThisMachineError(Exception):
    """A case needs what this machine lacks, such as a device; the text says what, and what to do."""


class Idle:
    """An optimizer that does nothing."""

    def __init__(self, gradients: Iterable[Any] = (), parameters: list[Any] | None = None):
        self.param_groups = [{"params": parameters or [SimpleNamespace(grad=gradient) for gradient in gradients]}]

    def step(self):
        """Do nothing."""


@dataclass(frozen=True)
class Row:
    """One line of the table: ours against a peer's time or against a limit, in seconds or MiB, or a count.

    Attributes
    ----------
    case : str
        What is measured, and against what.
    ours, other : float
        The two numbers.
    unit : str
        Theirs: "s" or "MiB", or empty for counts.
    target : float or None
        The largest ratio of the two that is good enough, 0 where there must be none; None for a row that only informs.
    """

    case: str
    ours: float
    other: float
    unit: str
    target: float | None

    @property
    def ratio(self) -> float:
        """Ours in units of the other."""
        return self.ours / self.other

    @property
    def met(self) -> bool:
        """Whether the ratio is good enough."""
        return self.target is None or self.ratio <= self.target


def by_the_clock(run: Run) -> float:
    """Return the seconds that a call takes the host."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def interleaved(calls: Calls, rounds: int, timed: Callable[[Run], float] = by_the_clock) -> dict[str, float]:
    """Time every call once in each round, after one round to warm up, and return the median seconds of each.

    Parameters
    ----------
    calls : mapping
        By name.
    rounds : int
        Rounds that count.
    timed : callable, optional
        Calls what it is given and returns the seconds; default: the host's.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            run, *resets = call if isinstance(call, tuple) else (call,)
            times[name].append(timed(run))
            for reset in resets:
                reset()
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


def compared(
    case: str, calls: Calls, rounds: int, targets: Mapping[str, float | None] | float | None, **options: Any
) -> list[Row]:
    """Time calls in turn, and return a row for each that has a target, against the one called ``peer``.

    Parameters
    ----------
    case : str
        What is measured, with ``{}`` where the name goes.
    calls, rounds, options
        As for :func:`interleaved`.
    targets : mapping or float
        By name, or the one of all.
    """
    times = interleaved(calls, rounds, **options)
    by_name = targets if isinstance(targets, Mapping) else {name: targets for name in calls if name != "peer"}
    return [Row(case.format(name), times[name], times["peer"], "s", target) for name, target in by_name.items()]


def readable(value: float, unit: str) -> str:
    """Return a number with its unit: seconds as ms or us."""
    if unit != "s":
        return f"{value:.2f} {unit}".rstrip()
    return f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} us"
