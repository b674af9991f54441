"""Time calls in turn, and hold the results against their targets."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

# A scale at which gradients do not shrink from round to round.
STEADY: dict[str, Any] = {"init_scale": 1.0, "growth_interval": 1 << 30}

Run = Callable[[], object]
Calls = Mapping[str, Run | tuple[Run, Run]]
"""By name what is timed, or that and what then has to be done, off the clock, before it can be called again."""


class Idle:
    """An optimizer that does nothing."""

    def __init__(self, gradients: Iterable[Any] = (), parameters: list[Any] | None = None):
        self.param_groups = [{"params": parameters or [SimpleNamespace(grad=gradient) for gradient in gradients]}]

    def step(self):
        """Do nothing."""


class Row(NamedTuple):
    """One line of the table: what is measured against what, in seconds; what only informs has no target."""

    case: str
    ours: float
    other: float
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

    ``timed`` calls what it is given and returns the seconds; default: the host's.
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

    In the text of the case the name goes where ``{}`` is; targets are by name, or one of all.
    """
    times = interleaved(calls, rounds, **options)
    by_name = targets if isinstance(targets, Mapping) else {name: targets for name in calls if name != "peer"}
    return [Row(case.format(name), times[name], times["peer"], target) for name, target in by_name.items()]
