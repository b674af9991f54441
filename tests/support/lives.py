"""A scaler's random life, held to a plain model in each of its calls: alone, or on every rank of a group.

Legal and illegal calls on several optimizers of one scaler: overflows, spikes and refusals on one rank, steps that are
left out, come twice or are declined by the optimizer, closures, clipping, scales and settings that are set, state dicts
that are loaded, pickles and copies, and callbacks that raise. What callbacks are told and warnings are held to the
model, too. All ranks draw the same life, and what is bad is one rank's.
"""

import collections
import contextlib
import copy
import dataclasses
import functools
import gc
import importlib
import itertools
import json
import math
import pickle
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scenarios import OF_A_SCALE, SGD, Alone, raised, rank_and_size

import gradscale
from gradscale import DynamicScale, SkipSpikes, StaticScale, StepReport, UpdateReport

InvalidTypeError, InvalidValueError = gradscale.InvalidTypeError, gradscale.InvalidValueError
StateDictError = gradscale.StateDictError
OPTIMIZERS = 3
VALUES = (1.0, 1.0, -2.0, 0.25)
BAD = (math.inf, -math.inf, math.nan)
# The last is so large that its quotient by a norm of 0 overflows.
MAX_NORMS = (0.5, 0.5, 0.5, 0.0, 1e308)
# How often each call is drawn, and after how many a life ends.
CALLS = ("backward", "unscale", "refuse", "step", "minimise", "update", "set_scale", "resume", "change_setting")
OFTEN = (4.0, 7.0, 0.8, 8.0, 1.0, 5.0, 0.1, 1.0, 0.2)
LENGTH = 200
ORDER = "The right order: scale(loss), backward pass, unscale_(optimizer) if wanted, step(optimizer), update()"
# What an update may end in, beside nothing.
ENDS = ("ScaleUnderflowError", "TrainingStalledError", "TrainingStalledWarning", "OSError")
KINDS = {kind.__name__: kind for kind in (DynamicScale, StaticScale)}
FACTORS = ("growth_factor", "backoff_factor", "growth_interval")
# What a state dict may lack, and what a StepGuard makes nothing of.
OPTIONAL = ("policy", "counts", "spikes", "streaks", "iteration", "version", "_overflow_tracker", "_rescale_tracker")
FOREIGN = {"scale": 64.0, "growth_factor": 1.5, "backoff_factor": 0.25, "growth_interval": 9, "_growth_tracker": 1}

POLICIES = [
    DynamicScale(growth_interval=5),
    DynamicScale(growth_interval=2, init_scale=2.0**13, min_scale=2.0**12, at_min="raise"),
    DynamicScale(
        init_scale=512.0, growth_factor=1.5, backoff_factor=0.3, growth_interval=2, min_scale=0.1, hysteresis=2
    ),
    DynamicScale(growth_interval=2, growth_after="first_interval_plus_one", max_scale=2.0**20, at_min="hold"),
    DynamicScale(tolerance=0.3, growth_interval=3),
    StaticScale(8.0),
    # As a StepGuard.
    StaticScale(1.0),
]
RULES = [
    SkipSpikes(window=5, min_values=2, of="loss", patience=1),
    SkipSpikes(window=3, deviations=2.9, of="norm", sides="both", patience=0),
    SkipSpikes(window=3, min_values=2, deviations=5.3, learns_from_skipped=True),
    SkipSpikes(of=("norm", "loss"), above=9.0),
    SkipSpikes(window=4, min_values=2, deviations=2.0, act=False),
]


class Memory:
    """What one rank's rule for spikes remembers: the values of each optimizer, in the order of their first judgements.

    ``saved`` is as in a state dict. A copy, or a scaler that has loaded it, gives these to its optimizers in turn.
    """

    def __init__(self, rule: SkipSpikes | None):
        self.rule, self.saved, self.owners = rule, [], []

    def load(self, saved):
        """Go on with saved values."""
        self.saved = copy.deepcopy(saved)
        for position in range(0 if self.rule is None else max(len(self.owners), len(saved))):
            self._restore(position)

    def _restore(self, position: int):
        """Take over of what was saved what the rule can use."""
        found, kept = (self.saved[position : position + 1] or [{}])[0], {}
        for name in self.rule.of:
            one = found.get(name, {"values": [], "skipped": 0})
            values, skipped = one["values"][-self.rule.window :], min(one["skipped"], self.rule.patience)
            kept[name] = {"values": values, "skipped": skipped}
        self.saved[position : position + 1] = [kept]

    def of(self, k: int) -> dict[str, Any]:
        """Return the values of an optimizer by quantity."""
        if k not in self.owners:
            self.owners.append(k)
            self._restore(len(self.owners) - 1)
        return self.saved[self.owners.index(k)]

    def _state(self, k: int, name: str) -> Any:
        one, numbers = self.of(k)[name], np.zeros(self.rule.window, np.float32)
        count = len(one["values"])
        numbers[:] = one["values"][:1] or 0.0
        numbers[self.rule.window - count :] = one["values"]
        counts = {
            name: np.asarray(number, np.int32) for name, number in (("count", count), ("skipped", one["skipped"]))
        }
        return self.rule.init(np.float32(0.0))._replace(values=numbers, **counts)

    def finds_spike(self, k: int, found: dict[str, float | None]) -> bool:
        """Tell whether a value is a spike beside those before; None is no value."""
        known = [(name, np.float32(found[name])) for name in self.rule.of if found[name] is not None]
        return any(bool(self.rule.judge(self._state(k, name), np.asarray(x))) for name, x in known)

    def learn(self, k: int, found: dict[str, float | None], is_spike: bool):
        """Learn from a step that was made, or skipped for a spike."""
        for name in self.rule.of if any(found[name] is not None for name in self.rule.of) else ():
            x = np.asarray(math.nan if found[name] is None else found[name], np.float32)
            state = self.rule.learn(self._state(k, name), x, skipped=is_spike)
            values = state.values[self.rule.window - int(state.count) :].tolist()
            self.of(k)[name].update(values=values, skipped=int(state.skipped))


@dataclasses.dataclass
class Streak:
    """Skipped steps of an optimizer in a row: how many for each reason; of those since a load, the rank; the scales."""

    reasons: collections.Counter[str]
    ranks: list[int | None] = dataclasses.field(default_factory=list)
    scales: list[float] = dataclasses.field(default_factory=list)
    warned_at: int = 0

    def __len__(self) -> int:
        return sum(self.reasons.values())

    @property
    def saved(self) -> dict[str, Any]:
        """What a state dict has of it: how many for each reason; the first scale, the steps since a fall, the last."""
        falls = [index for index, (a, b) in enumerate(itertools.pairwise(self.scales), 2) if b < a]
        since, ends = len(self.scales) - max(falls, default=0), self.scales or [0.0]
        return {**self.reasons, "scales": [ends[0], since, ends[-1]]}

    @classmethod
    def of(cls, saved: dict[str, Any]) -> "Streak":
        """Return a streak with scales as those that were saved."""
        reasons = {**saved}
        first, since, last = reasons.pop("scales")
        # A fall as many steps ago as it was saved; without any it counts the same.
        scales = [first, math.nextafter(last, math.inf), *[last] * (since + 1)]
        return cls(collections.Counter(reasons), scales=scales if first else [])


@dataclasses.dataclass
class Turn:
    """How far an optimizer is in its iteration, and why its step is skipped, if so: what all ranks agree on."""

    stage: str = "ready"
    reason: str = "stepped"
    # The lowest rank with the reason, and the scale that gradients were divided by.
    by: int | None = None
    scale: float = 0.0
    bad: Sequence[bool] = ()
    refused: set[int] = dataclasses.field(default_factory=set)
    norm: float | None = None
    # On each rank, what the rule for spikes has judged.
    found: Sequence[dict[str, float | None] | None] = ()
    # The losses of ranks that were judged, and whether that of the rank with the reason is its cause.
    losses: Sequence[float | None] = ()
    by_loss = False
    # Whether this rank has seen the cause itself.
    saw = True
    lacks_values = is_zero = is_idle = is_declined = is_left_out = is_at_min = by_closure = has_begun = False

    @property
    def is_over(self) -> bool:
        """Whether the step was made or skipped; one that all skip may be left out."""
        return self.stage == "stepped" or (self.stage == "unscaled" and self.reason not in ("stepped", "no gradients"))


class Model:
    """What a scaler does, as plainly as it can be said. The pure functions of its policy adapt the scale."""

    def __init__(self, rank: int, size: int, has_group: bool, is_guard: bool, policy, settings: dict[str, Any]):
        self.is_guard = is_guard
        self.rank, self.size, self.policy, self.state = rank, size, policy, policy.init(np.float32(0.0))
        self.loaded_steps = 0
        self.iteration, self.steps, self.counts = 1, 0, dict.fromkeys(("taken", "overflow", "spike", "refused"), 0)
        # Whether another rank may have scaled; whether nothing ever was, or since a load or by this state.
        self.has_group, self.is_new, self.is_unused, self.is_fresh = has_group, True, True, True
        # Whether gradients of an iteration that a load has given up may still be scaled.
        self.is_given_up = False
        # By optimizer the gradient on each rank, None for none.
        self.gradients: list[list[float | None]] = [[0.0] * size for _ in range(OPTIMIZERS)]
        self.configure(settings)
        self.begin()

    def configure(self, settings: dict[str, Any]):
        """Begin as a scaler with some settings."""
        self.settings = settings
        names = ["taken", "overflow", "spike", "refused", *["spikes seen"] * (not self.acts)]
        self.counts = {name: self.counts.get(name, 0) for name in names}
        self.memories = [Memory(settings["skip"]) for _ in range(self.size)]
        self.history: collections.deque[StepReport] = collections.deque(maxlen=settings["history_size"])
        # Whether there was an array, of whose library the state is.
        self.has_array = False
        # Whether it was said that nothing was scaled, and that a rule has nothing to judge.
        self.knows_unscaled = self.knows_nothing = self.knows_no_gradients = False
        # Whether a guard's rule ever had something to judge.
        self.has_judged = False
        # Whose streaks these are, in the order of their first steps.
        self.owners: list[int] = []
        self.restart()

    @property
    def acts(self) -> bool:
        """Whether spikes are skipped."""
        return self.settings["skip"] is None or self.settings["skip"].act

    def restart(self, saved: str = "[]"):
        """Count the steps of each optimizer that are skipped in a row from here on, after those that were saved."""
        self.streaks = [Streak.of(one) for one in json.loads(saved)]

    def streak(self, k: int) -> "Streak":
        """Return the skipped steps of an optimizer in a row."""
        if k not in self.owners:
            self.owners.append(k)
        while len(self.streaks) <= (position := self.owners.index(k)):
            self.streaks.append(Streak(collections.Counter()))
        return self.streaks[position]

    def begin(self):
        """Begin an iteration."""
        # The turns of optimizers, in the order in which they are met; the reports of steps; on each rank, the losses.
        self.turns: dict[int, Turn] = collections.defaultdict(Turn)
        self.reports: list[StepReport] = []
        self.steppers: list[int] = []
        self.losses: list[list[float]] = []
        # Whether an optimizer was judged by them, so that the next are another's.
        self.is_judged = self.is_scaled = False
        # Optimizers that were judged by them in an iteration before.
        self.judged: set[int] = set()
        # The state that the loss was scaled with last, which gradients are divided by, and the one after closures.
        self.used = self.lowered = None

    @property
    def scale(self) -> float:
        """The scale of the next loss."""
        return float(self.state.scale)

    @property
    def never_scales(self) -> bool:
        """Whether the scale is 1 for good."""
        return isinstance(self.policy, StaticScale) and self.scale == 1.0

    @property
    def is_begun(self) -> bool:
        """Whether this is the middle of an iteration."""
        return any(turn.stage != "ready" or self.rank in turn.refused for turn in self.turns.values())

    def scaled(self, losses: list[float] | None, lowered=None):
        """Scale a loss on each rank, by which the next optimizer is judged; None for something else."""
        if lowered is None:
            # The losses before were those of an iteration that a load has given up.
            if self.is_fresh and self.used is not None:
                self.losses, self.is_judged = [], False
            self.used = self.state
        self.is_new, self.is_unused, self.is_fresh, self.has_array = False, False, False, True
        self.is_given_up, self.is_scaled = False, True
        if losses is not None:
            self.judged = set() if self.is_judged else self.judged
            self.losses, self.is_judged = [*([] if self.is_judged else self.losses), losses], False

    def may_unscale(self, k: int) -> bool:
        """Tell whether gradients may be unscaled: after a load zeros alone, or those of a loss that was scaled."""
        turn, held = self.turns[k], [value for value in self.gradients[k] if value is not None]
        turn.is_idle = turn.is_zero = False
        if self.used is not None or not self.is_fresh or turn.refused:
            return True
        is_one = self.never_scales or (self.scale == 1.0 and (self.has_group or not self.is_new))
        if is_one and not self.is_given_up:
            return True
        turn.is_zero = not any(held) and not self.is_new
        turn.is_idle = turn.is_zero and bool(held)
        return turn.is_zero or not self.is_unused

    def lacks_values(self, k: int, has_norm: bool) -> bool:
        """Tell whether the rule for spikes has nothing to judge on any rank, and no rank refuses the step."""
        turn, rule = self.turns[k], self.settings["skip"]
        known = ["norm"] * has_norm + ["loss"] * (bool(self.losses) and k not in self.judged)
        is_excused = turn.refused or turn.has_begun or (self.is_judged and k not in self.judged)
        return rule is not None and not is_excused and not {*rule.of} & {*known}

    def is_wrong(self, k: int, has_norm: bool) -> bool:
        """Tell whether a guard raises since its rule never had anything to judge."""
        return self.is_guard and not self.has_judged and self.lacks_values(k, has_norm)

    def has_nothing(self, k: int, has_norm: bool) -> bool:
        """Tell whether a process alone gives its rule nothing to judge, which is said once."""
        found = not self.has_group and self.lacks_values(k, has_norm) and not self.knows_nothing
        self.knows_nothing = self.knows_nothing or found
        return found

    def warnings(self, k: int, has_norm: bool) -> list[str]:
        """Return what a process alone is warned of before gradients are divided."""
        is_one = isinstance(self.policy, StaticScale) and (self.used or self.state).scale == 1.0
        turn = self.turns[k]
        is_excused = self.has_group or self.used or self.rank in turn.refused or turn.is_zero
        is_unscaled = not (is_excused or is_one or self.knows_unscaled)
        self.knows_unscaled = self.knows_unscaled or is_unscaled
        said = [f"scale() was not called in iteration {self.iteration}, and the gradients of"] * is_unscaled
        return said + ["found nothing in this step"] * self.has_nothing(k, has_norm)

    def quotients(self, k: int, state=None) -> list[float | None]:
        """Return gradients as they are after they were divided, by float32."""
        scale = float((state or self.used or self.state).scale)
        return [None if value is None else rounded(value / scale) for value in self.gradients[k]]

    def divide(self, k: int, state=None):
        """Unscale in float32: gradients that are unscaled again in a later iteration drift away."""
        turn, state, self.is_new = self.turns[k], state or self.used or self.state, False
        self.has_array = True
        # Where a closure has lowered the scale to the least, the update starts from another one.
        is_own = state is (self.used or self.state)
        turn.scale, turn.is_at_min = float(state.scale), is_own and bool(self.policy.at_min_scale(state))
        self.gradients[k] = self.quotients(k, state)
        turn.bad = [value is not None and not math.isfinite(value) for value in self.gradients[k]]

    def is_too_large(self, k: int) -> bool:
        """Tell whether squares of gradients that have drifted away might overflow."""
        return any(400.0 < abs(value) < math.inf for value in self.quotients(k) if value is not None)

    def clip(self, k: int, max_norm: float | None, how: str = "group") -> float | None:
        """Clip unscaled gradients to the norm of all ranks', or of this rank's, which all hold; return the norm."""
        values = self.gradients[k]
        held = [value for value in values if value is not None]
        if max_norm is None:
            return None
        norm = math.sqrt(sum(value**2 for value in held)) if how == "group" else abs([*held, 0.0][0])
        if not any(self.turns[k].bad):
            factor = min(max_norm / (norm + 1e-6), 1.0)
            self.gradients[k] = [None if value is None else value * factor for value in values]
        return norm

    def judge(self, k: int, norm: float | None = None):
        """Judge unscaled gradients: an overflow comes before a refusal, that before a spike. The scale's is later."""
        turn, ranks = self.turns[k], range(self.size)
        # As it travels: infinite if it is not finite, 0 below the normal numbers.
        small = 0.0 if norm is None or norm < 2.0**-126 else norm
        if self.settings["give_up_after"] is not None:
            self.streak(k)
        turn.stage, turn.norm = "unscaled", None if norm is None else small if norm < math.inf else math.inf
        spikes: list[int] = []
        by_loss: list[bool] = [False] * self.size
        if self.settings["skip"] is not None:
            self.has_nothing(k, norm is not None)
            turn.lacks_values = self.lacks_values(k, norm is not None)
            self.has_judged |= not (turn.lacks_values or turn.refused) and (turn.by_closure or not self.has_group)
            losses = [] if k in self.judged else self.losses
            turn.losses = means = [*map(mean, zip(*losses, strict=True))] or [None] * self.size
            if not turn.has_begun:
                turn.found = [{"loss": means[rank], "norm": norm} for rank in ranks]
                pairs = [*zip(self.memories, turn.found, strict=True)]
                told = [memory.finds_spike(k, one) for memory, one in pairs]
                # A rank that refuses says nothing of a spike.
                by_loss = [
                    rank not in turn.refused and memory.finds_spike(k, one | {"norm": None})
                    for rank, (memory, one) in enumerate(pairs)
                ]
                spikes = [rank for rank in ranks if told[rank] and rank not in turn.refused]
            self.is_judged = True
        overflows = [rank for rank in ranks if turn.bad[rank]]
        has_gradients = any(value is not None for value in self.gradients[k])
        spike = "spike" if self.acts else "stepped" if has_gradients else "no gradients"
        for reason, seen in (("overflow", overflows), ("refused", sorted(turn.refused)), (spike, spikes)):
            if seen and reason != "no gradients":
                # A loss that is not finite goes before one that is a spike, and that before none.
                faults = [
                    0 if reason == "refused" else 2 if not math.isfinite(loss or 0.0) else int(by_loss[rank])
                    for rank, loss in enumerate(turn.losses or [None] * self.size)
                ]
                turn.reason, turn.by = reason, max(seen, key=lambda rank: (faults[rank], -rank))
                turn.by_loss = faults[turn.by] > 0
                turn.saw = faults[self.rank] >= faults[turn.by] if turn.by_loss else self.rank in seen
                return
        turn.reason, turn.by, turn.by_loss = "stepped" if has_gradients else "no gradients", None, False

    def report(self, turn: Turn, retries: int = 0) -> StepReport:
        """Return the report of a step on this rank."""
        is_overflow, is_skipped = turn.reason == "overflow", turn.reason != "stepped"
        local = int(is_overflow and turn.bad[self.rank])
        told = is_skipped, turn.scale, int(is_overflow), turn.reason, self.iteration, retries, local, None, turn.by
        loss = turn.losses[self.rank] if turn.losses else None
        loss = math.nan if loss is not None and math.isnan(loss) else loss
        rank = self.rank if turn.saw and is_skipped and turn.reason != "no gradients" else None
        return StepReport(*told, norm=turn.norm, by_loss=turn.by_loss, loss=loss, rank=rank)

    def stepped(self, k: int, declines: bool, retries: int) -> StepReport:
        """Step an optimizer by its verdict, or see that it declines to make the step: each rank by itself."""
        turn = self.turns[k]
        if declines and turn.reason == "stepped":
            turn.is_declined, turn.reason, turn.by, turn.by_loss, turn.saw = True, "refused", self.rank, False, True
        turn.stage = "stepped"
        self.reports.append(self.report(turn, retries))
        self.steppers.append(k)
        self.streak(k)
        self.history.append(self.reports[-1])
        return self.reports[-1]

    def evaluated(self, k: int, closure: "Closure") -> str:
        """Step an optimizer with a closure, which is evaluated again at lower scales while gradients overflow."""
        turn, before = self.turns[k], self.lowered
        turn.by_closure, turn.has_begun = True, False
        for number in range(closure.evaluations):
            previous = None
            for attempt in range(17):
                closure.retries += attempt > 0
                turn.stage, state, kept = "ready", self.lowered or self.state, (self.losses, self.is_judged)
                if closure.fails_at == 0:
                    return "fails"
                closure.expected.append(float(state.scale))
                self.scaled(closure.losses[len(closure.expected) > 1], self.lowered)
                if len(closure.expected) == closure.fails_at:
                    self.losses, self.is_judged = kept
                    return "fails"
                if len(closure.expected) == closure.refuses_at:
                    turn.refused.add(closure.bad_rank)
                self.gradients[k] = closure.gradients(len(closure.expected), closure.expected[-1])
                self.divide(k, self.lowered or self.used)
                self.judge(k, self.clip(k, self.settings["max_norm"]))
                if turn.reason != "overflow":
                    break
                lowered = self.policy.backoff(self.lowered or self.used)
                if turn.scale == previous or lowered is state:
                    break
                previous, self.lowered = turn.scale, lowered
            if turn.reason == "overflow":
                # The scale is not to blame, and is backed off once, as for any overflow.
                self.lowered = before
            if turn.reason != "stepped":
                return "skips" if number == 0 else "has begun" if turn.reason == "overflow" else "refused later"
            turn.has_begun = True
        return "steps"

    def update(self, new_scale: float | None = None, failure: BaseException | None = None):
        """End an iteration in which optimizers have been judged; return its report, and what it raises or warns of.

        ``failure`` is what a callback raises.
        """
        judged = {k: turn for k, turn in self.turns.items() if turn.stage != "ready" and turn.reason != "no gradients"}
        has_retried = any(report.retries for report in self.reports)
        before = self.scale if has_retried else [*self.reports, *judged.values(), self][0].scale
        told = [*zip(self.steppers, self.reports, strict=True)]
        for k, turn in judged.items():
            if turn.is_over:
                self.steps += not turn.is_declined
                for memory, found in zip(self.memories, turn.found, strict=False):
                    if found is not None and turn.reason in ("stepped", "spike"):
                        memory.learn(k, found, turn.reason == "spike")
                if turn.stage == "unscaled" or turn.is_left_out:
                    told.append((k, self.report(turn)))
        grown: list[int] = []
        for k, report in told:
            self.counts["taken" if report.reason == "stepped" else report.reason] += 1
            if report.reason == "stepped" and report.by is not None:
                self.counts["spikes seen"] += 1
            streak = self.streak(k)
            if report.reason == "stepped":
                self.streaks[self.owners.index(k)] = Streak(collections.Counter())
            elif report.reason != "refused":
                streak.reasons[report.reason] += 1
                streak.ranks.append(report.by)
                streak.scales.append(report.scale)
                grown.append(self.owners.index(k))
        grown.sort(key=lambda position: (len(self.streaks[position]), position))
        most = self.settings["give_up_after"]
        gives_up = most is not None and len(grown) > 0 and len(self.streaks[grown[-1]]) >= most
        # A spike or a refusal moves no scale, nor do gradients that are nothing but zeros after a load.
        moving = [turn for turn in judged.values() if turn.reason in ("stepped", "overflow") and not turn.is_idle]
        overflows = [turn for turn in moving if turn.reason == "overflow"]
        if new_scale is not None:
            self.state = self.state._replace(scale=np.asarray(new_scale, np.float32))
            self.is_new = False
        elif self.lowered is not None:
            self.state = self.lowered
        elif moving:
            self.state = self.policy.update(self.state, nonfinite=np.asarray(len(overflows), np.int32))
            self.is_fresh = False
        skipped, counts = any(turn.reason != "stepped" for turn in judged.values()), {**self.counts}
        report = UpdateReport(self.iteration, before, skipped, self.rank, tuple(self.reports), self.scale, counts)
        is_at_min = new_scale is None and any(turn.is_at_min for turn in overflows)
        self.iteration += 1
        self.begin()
        if is_at_min and not isinstance(failure, KeyboardInterrupt):
            return report, gradscale.ScaleUnderflowError, ["at its minimum, "]
        if failure is not None and (isinstance(failure, KeyboardInterrupt) or not gives_up):
            return report, type(failure), [str(failure)]
        return report, *self.stall(grown, gives_up)

    def stall(self, grown: Sequence[int], gives_up: bool) -> tuple[type[Exception] | None, Sequence[str]]:
        """Return the error or the warning after skipped steps of an optimizer in a row; ``grown``: the longest last."""
        for position in reversed(grown):
            streak, most = self.streaks[position], self.settings["warn_after"]
            scales = streak.scales
            # As a first scale that is much too large does for long.
            is_falling = 1.0 < scales[-1] < scales[0] and any(a > b for a, b in itertools.pairwise(scales[-33:]))
            is_due = most is not None and len(streak) >= (10 * streak.warned_at or most) and not is_falling
            if gives_up or is_due:
                break
        else:
            return None, ()
        streak.warned_at = len(streak)
        causes = {"overflow": "non-finite gradients (inf or NaN)", "spike": "a spike"}
        reasons = ", ".join(f"{count} for {causes[name]}" for name, count in streak.reasons.items())
        ranks = ", ".join(map(str, sorted(set(streak.ranks))))
        moved = "" if scales[0] == scales[-1] == 1.0 else f"the scale went from {scales[0]:g} to {scales[-1]:g}, and "
        said = [
            f"each of the last {len(streak)} steps of ",
            f" was skipped: {reasons}; first seen by rank {ranks}; {moved}no weight has changed since, of those that "
            f"it steps",
            *(["All is judged by skip=SkipSpikes("] if streak.reasons["spike"] and self.settings["skip"] else []),
        ]
        return gradscale.TrainingStalledError if gives_up else gradscale.TrainingStalledWarning, said

    @property
    def is_over(self) -> bool:
        """Whether a step was made or skipped, and none is to come of an optimizer that was unscaled."""
        stages = [turn.stage for turn in self.turns.values()]
        return "stepped" in stages and "unscaled" not in stages

    def end_in_step(self, failure: BaseException | None, new_scale: float | None = None):
        """End an iteration as a guard's step does, with the loss for other optimizers, and what is still refused."""
        losses, judged = self.losses, self.judged | {k for k, turn in self.turns.items() if turn.stage == "stepped"}
        refused = {k: turn.refused for k, turn in self.turns.items() if turn.stage == "ready"}
        returned = self.update(new_scale, failure)
        if losses:
            self.losses, self.judged, self.is_judged = losses, judged, True
        for k, ranks in refused.items():
            self.turns[k].refused = ranks
        return returned

    def saved(self) -> dict[str, Any]:
        """Return what a state dict must say."""
        fields = {f"_{name}": int(getattr(self.state, name)) for name in self.state._fields[1:]}
        fixed = {"growth_factor": 1.0, "backoff_factor": 1.0, "growth_interval": 1}
        memory = self.memories[self.rank]
        return {
            "scale": self.scale,
            **{name: getattr(self.policy, name, value) for name, value in fixed.items()},
            **fields,
            "version": 1,
            "iteration": self.iteration,
            "policy": {"kind": type(self.policy).__name__, **dataclasses.asdict(self.policy)},
            **({} if memory.rule is None else {"spikes": json.dumps(memory.saved)}),
            **({} if self.settings["give_up_after"] is None else {"streaks": self.saved_streaks()}),
            "counts": self.counts | ({"dropped": 0} if self.is_guard else {}),
            # Without those of this iteration that are skipped.
            "steps": self.steps_over_ranks(),
        }

    def steps_over_ranks(self) -> int:
        """Return how many steps were made, but for those made alone; those of this iteration, too."""
        is_made = [turn.stage == "stepped" and turn.reason == "stepped" for turn in self.turns.values()]
        return self.steps + sum(is_made) if self.has_group else self.loaded_steps

    def saved_streaks(self) -> str:
        """Return the streaks as a state dict has them."""
        last = max((index for index, one in enumerate(self.streaks) if len(one)), default=-1)
        return json.dumps([streak.saved for streak in self.streaks[: last + 1]])

    def load(self, saved: Mapping[str, Any], spikes: Sequence[Any], is_kept: bool):
        """Go on with a state dict, and the windows of each rank; gradients that nobody has unscaled may be kept."""
        was_one = isinstance(self.policy, StaticScale) and float((self.used or self.state).scale) == 1.0
        self.is_given_up = self.is_given_up or (self.is_begun and not was_one)
        described = {**saved.get("policy", {"kind": type(self.policy).__name__, **dataclasses.asdict(self.policy)})}
        self.policy = KINDS[described.pop("kind")](**described)
        if not isinstance(self.policy, StaticScale):
            self.policy = dataclasses.replace(self.policy, **{name: saved[name] for name in FACTORS})
        trackers = [np.asarray(saved.get(f"_{name}", 0), np.int32) for name in self.state._fields[1:]]
        self.state = type(self.state)(np.asarray(self.policy.clamp(saved["scale"]), np.float32), *trackers)
        counts, self.iteration = saved.get("counts", {}), saved.get("iteration", 1)
        self.counts = {name: counts.get(name, 0) for name in self.counts}
        kept = self.used, self.losses, self.is_judged, self.is_scaled
        self.steps = self.loaded_steps = saved.get("steps", 0)
        self.is_unused = self.is_unused or self.is_begun
        self.is_new, self.is_fresh = False, True
        self.restart(saved.get("streaks", "[]"))
        self.has_judged = False
        for memory, one in zip(self.memories, spikes, strict=True):
            memory.load(one) if memory.rule is not None else None
        self.begin()
        if is_kept and kept[0] is not None and self.has_array:
            self.used, self.losses, self.is_judged, self.is_scaled = kept

    def copied(self):
        """Go on as a copy, without the reports and the gradients of a loss that was scaled before a load."""
        self.history.clear()
        self.owners, self.has_judged = [], False
        for memory in self.memories:
            memory.owners = []
        if self.is_fresh and self.used is not None:
            self.is_unused, self.losses, self.used, self.is_scaled = True, [], None, False
        is_kept = not self.judged
        losses = self.losses if is_kept else []
        kept = self.used and self.state, losses, self.is_judged and is_kept, self.is_scaled
        self.begin()
        self.used, self.losses, self.is_judged, self.is_scaled = kept
        self.has_array = False


def mean(losses: Sequence[float]) -> float | None:
    """Return the mean in float32."""
    return rounded(functools.reduce(lambda total, loss: rounded(total + loss), losses) / len(losses))


def with_norms_of(found: Any, expected: Any, *, knows_losses: bool = True) -> Any:
    """Return reports with the norms of others where these are as close as float32 is."""
    if type(found) in (list, tuple):
        pairs = zip(found, expected, strict=False)
        return (
            type(found)([with_norms_of(*pair, knows_losses=knows_losses) for pair in pairs])
            if len(found) == len(expected)
            else found
        )
    if isinstance(found, UpdateReport) and isinstance(expected, UpdateReport):
        return found._replace(steps=with_norms_of(found.steps, expected.steps, knows_losses=knows_losses))
    if isinstance(found, StepReport) and isinstance(expected, StepReport) and not knows_losses:
        found = found._replace(loss=expected.loss, by_loss=expected.by_loss)
    norms = [one.norm for one in (found, expected) if isinstance(one, StepReport) and one.norm is not None]
    is_close = len(norms) == 2 and math.isclose(*norms, rel_tol=2e-6, abs_tol=1e-18)
    return found._replace(norm=expected.norm) if is_close else found


# The rule behind what is compared, by its name.
WORDS = {
    **dict.fromkeys(("scale", "new_scale"), "one update for an iteration: back off if any step overflowed, else count"),
    **dict.fromkeys(("_growth_tracker", "_overflow_tracker", "_rescale_tracker"), "as the policy's pure update has it"),
    **dict.fromkeys(
        ("taken", "overflow", "spike", "refused", "spikes seen"), "each step once, at update, by its reason"
    ),
    "reason": "an overflow goes before a refusal, that before a spike; all ranks skip together",
    "by": "of the ranks that saw the reason the one with the worst loss, and of these the lowest",
    "by_loss": "whether the loss of that rank is the cause",
    "rank": "this rank, if it saw the cause itself",
    "local_nonfinite": "how many gradients of this rank are not finite",
    "norm": "of the gradients before they are clipped",
    "loss": "the mean of this rank's losses up to this optimizer",
    "retries": "how often the closure was evaluated again at a lower scale",
    "skipped": "a report: whether the step was skipped; a window: its spikes in a row",
    "values": "a window learns from steps that are made, and from spikes if its rule says so",
    "streaks": "steps skipped in a row; one that is made ends them, a refusal neither counts nor ends",
    "iteration": "one more after each update; a load goes on with the saved one",
    "steps": "those made since the scaler joined its groups or loaded a state",
    "gradient": "divided once, by the scale that made it, and clipped by the norm of all",
}


def difference(found: Any, expected: Any, what: str) -> str:
    """Say in what a scaler first differs from the model, and by which rule."""
    mine, models = _parts_of(found), _parts_of(expected)
    for name in models if [*mine] == [*models] else ():
        if repr(mine[name]) != repr(models[name]):
            return difference(mine[name], models[name], f"{what}, {name}")
    rule = WORDS.get(what.rpartition(", ")[2])
    return f"{what}: {found!r} of the scaler, {expected!r} of the model" + (f" ({rule})" if rule else "")


def _parts_of(x: Any) -> dict[Any, Any]:
    """Return what a container holds by its names or positions."""
    if isinstance(x, (list, tuple)):
        return dict(zip(getattr(x, "_fields", range(len(x))), x, strict=True))
    return x if isinstance(x, dict) else {}


def rounded(x: float) -> float:
    """Return the nearest float32."""
    return float(np.float32(x))


class Closure:
    """A closure whose gradients overflow on one rank above a scale, from one of its calls on."""

    def __init__(self, life: "_Life"):
        chance, self.size = life.chance, life.size
        self.evaluations, self.value = chance.randint(1, 3), chance.choice(VALUES)
        self.limit = chance.choice([math.inf, math.inf, life.model.scale / 4.0, life.model.scale / 4.0, 0.0])
        self.late, self.bad_rank = chance.choice([0, 0, 1]), chance.randrange(self.size)
        # The call that fails, 0 before the first scale, and that which refuses.
        self.fails_at, self.refuses_at = chance.choice([*[None] * 4, 0, 1, 2]), chance.choice([*[None] * 10, 1, 2])
        self.begin(life.draw_losses(), life.draw_losses())

    def begin(self, *losses: list[float]):
        """Begin with losses on each rank, in the first call and in others."""
        self.losses, self.retries = losses, 0
        self.expected: list[float] = []

    def gradients(self, number: int, scale: float) -> list[float | None]:
        """Return the gradient on each rank."""
        gradients: list[float | None] = [rounded(self.value * scale)] * self.size
        if scale > self.limit and number > self.late:
            gradients[self.bad_rank] = math.inf
        return gradients


class Optimizer(SGD):
    """Evaluates a closure several times, and makes no step of its own accord while it has an answer to give."""

    evaluations = 1
    answer: Any = None
    fails = False

    def step(self, closure=None):
        """Step, answer or fail."""
        for _ in range(0 if closure is None else self.evaluations):
            closure()
        if self.fails:
            raise MemoryError
        return super().step() if self.answer is None else self.answer


class TorchOptimizer(Optimizer):
    """The same with a parameter of torch's."""

    def __init__(self, grads):
        torch = importlib.import_module("torch")
        self.parameter = torch.nn.Parameter(torch.ones(1))
        self.param_groups = [{"params": [self.parameter]}]
        super().__init__(grads)

    grads = property(lambda self: [self.parameter.grad], lambda self, grads: setattr(self.parameter, "grad", *grads))


def live(group, calls: int, seed: int, library: str = "numpy"):
    """Make so many calls on one rank, comparing each with the model; return what all ranks must have alike.

    Raises
    ------
    AssertionError
        At the first difference, with the last calls.
    """
    # New optimizers have their scalers collect garbage.
    gc.freeze()
    counts: collections.Counter[str] = collections.Counter()
    ended = []
    for number in range(max(1, calls // LENGTH)):
        policy = POLICIES[(seed + number) % len(POLICIES)]
        life = _Life(group, policy, random.Random(f"{seed} {number}"), library, counts)
        # At the largest scales losses overflow, too, of which NumPy warns.
        with np.errstate(over="ignore", invalid="warn" if library == "numpy" else "ignore"):
            for call in range(LENGTH):
                try:
                    life.call(compares=call % 10 == 0)
                except Exception as error:
                    error.add_note(f"rank {life.rank} of {life.size}: {[*life.story]}")
                    raise
        if life.model.is_begun and not any(turn.refused for turn in life.model.turns.values()):
            life.update()
        # The windows and the norms of ranks are their own; but a norm over a group is that of all, to the bit.
        ended.append([life.norms, {name: one for name, one in life.scaler.state_dict().items() if name != "spikes"}])
    return {"states": ended, "counts": {name: n for name, n in counts.items() if "raises" not in name or group is None}}


class _Life:
    def __init__(self, group, policy, chance: random.Random, library: str, counts: collections.Counter[str]):
        self.group, self.chance, self.library, self.counts = group, chance, library, counts
        self.rank, self.size = (0, 1) if group is None else rank_and_size(group)
        self.xp = importlib.import_module({"strict": "array_api_strict"}.get(library, library))
        # What the callbacks of rank 0 and those of every rank were told, and what they raise.
        self.told: list[Any] = []
        self.told_everywhere: list[Any] = []
        self.failure: BaseException | None = None
        self.norms: list[bytes] = []
        # The warnings of the next call.
        self.expected: list[str] = []
        self.is_bad = False
        # Torch's clips by one factor with the reciprocal: what overflows or loses bits on the way there may be right.
        self.exponents = (-60, 100) if library == "torch" else (-126, 127)
        # Such a scaler speaks of no scale.
        self.keeps_one = policy == StaticScale(1.0) and chance.random() < 0.7
        self.is_guard = self.keeps_one and chance.random() < 0.7
        self.over: Any = chance.choice([group, [group], [group, Alone()]])
        self.is_grid = group is not None and isinstance(self.over, list) and len(self.over) > 1
        self.settings = self.draw_settings()
        self.scaler = self.make(policy)
        kind = TorchOptimizer if library == "torch" else Optimizer
        self.optimizers = [kind([self.array(0.0)]) for _ in range(OPTIMIZERS)]
        self.model = Model(self.rank, self.size, group is not None, self.is_guard, policy, self.settings)
        self.story: collections.deque[str] = collections.deque([f"{policy}", f"{self.settings}"], maxlen=20)
        self.keep()
        if group is not None:
            self.backward()

    def draw_settings(self) -> dict[str, Any]:
        warn_after = self.chance.choice([None, 1, 2, 3])
        # A scaler with torch's settings alone saves no more than torch's does.
        rules = RULES if self.library == "torch" else [None, *2 * RULES]
        return {
            "skip": self.chance.choice(rules),
            # Of several groups it is not known which hold parts.
            "max_norm": None if self.is_grid else self.chance.choice([None, None, *MAX_NORMS]),
            "history_size": self.chance.choice([0, 3, 1024]),
            "give_up_after": self.chance.choice([None, None, 2]),
            # Threads cannot listen to warnings.
            "warn_after": warn_after if self.group is None else None,
        }

    def make(self, policy):
        settings = self.settings | {"on_skip": self.callbacks(), "on_update": self.callbacks()}
        over = {} if self.group is None else {"group": self.over, "timeout": 60.0}
        home = importlib.import_module("gradscale_torch" if self.library == "torch" else "gradscale")
        if over and settings["max_norm"] is not None:
            settings["norm_over"] = "group"
        if self.is_guard:
            return home.StepGuard(**over, **settings)
        device = () if home is gradscale else ("cpu",)
        return (home.ShardedGradScaler if over else home.GradScaler)(*device, policy=policy, **over, **settings)

    def callbacks(self) -> list[Any]:
        every_rank = gradscale.callbacks.every_rank
        return [self.told.append, every_rank(self.told_everywhere.append), every_rank(self.fail)]

    def fail(self, _):
        if self.failure is not None:
            raise self.failure

    def draw_failure(self) -> BaseException | None:
        """Draw what callbacks raise in the next call, and forget what they were told."""
        self.told.clear()
        self.told_everywhere.clear()
        self.failure = self.chance.choice([*[None] * 30, OSError("no space left"), KeyboardInterrupt()])
        return self.failure

    @contextlib.contextmanager
    def watching(self):
        """Assert that a process alone is warned as expected: threads cannot listen to warnings."""
        with warnings.catch_warnings(record=True) if self.group is None else contextlib.nullcontext() as caught:
            if self.group is None:
                warnings.simplefilter("always")
            yield
        heard = [(str(one.message), one.filename) for one in caught or ()]
        for said, (text, file) in zip(self.expected, heard, strict=True):
            assert (said in text, file) == (True, __file__), (said, text, file)
        self.expected = []

    def require_told(self, reports: list[Any]):
        self.require(self.told, reports * (self.rank == 0), "what callbacks of rank 0 are told")
        self.require(self.told_everywhere, reports, "what callbacks of every rank are told")
        self.failure = None

    def speaks(self, text: str):
        """Assert that a scaler that never scales does not speak of a scale."""
        assert not (self.keeps_one and OF_A_SCALE.search(text)), text

    def array(self, value: Any):
        return self.xp.asarray([value], dtype=self.xp.float32)

    def number(self, value: float):
        return self.xp.asarray(value, dtype=self.xp.float32)

    def call(self, compares: bool):
        (name,) = self.chance.choices(CALLS, OFTEN)
        self.story.append(name)
        self.counts[name] += 1
        getattr(self, name)()
        if compares:
            found, expected = self.scaler.state_dict(), self.model.saved()
            # In the same order, and of plain types.
            assert repr(found) == repr(expected), difference(found, expected, "the saved state")
            getters = [getattr(self.scaler, f"get_{name}")() for name in ("scale", *FACTORS)]
            self.require(repr(getters), repr([*expected.values()][:4]), "what get_scale() and the like return")
            self.require(self.scaler.history, list(self.model.history), "history")
            self.scaler.history.clear()
        for k, optimizer in enumerate(self.optimizers):
            expected, (found,) = self.model.gradients[k][self.rank], optimizer.grads
            is_close = found is expected is None
            if found is not None and expected is not None:
                is_close = math.isclose(float(found[0]), expected, rel_tol=2e-6, abs_tol=1e-37)
                is_close = is_close or (math.isnan(found[0]) and math.isnan(expected))
            assert is_close, difference(found, expected, f"optimizer {k}, gradient")

    def require(self, found, expected, what: str):
        # The host does not see the losses of another library, but where it reads them with the verdict.
        found = with_norms_of(found, expected, knows_losses=self.library != "strict")
        assert found == expected, difference(found, expected, f"{self.story[-1]}: {what}")

    def raises(self, call: Callable[[], Any], *said: str, kind: type[BaseException] = gradscale.CallOrderError):
        """Assert that a call is an error that says these texts, one of order if nothing else is said."""
        self.counts[f"{self.story[-1]} raises"] += 1
        self.speaks(str(raised(kind, call, *said)))

    def turn(self) -> tuple[int, Turn, Optimizer]:
        """Draw an optimizer, more often one that can still be stepped."""
        drawn = self.chance.sample(range(OPTIMIZERS), 2)
        over = [k for k, turn in self.model.turns.items() if turn.stage == "stepped"]
        k = min(drawn, key=lambda k: k in over)
        return k, self.model.turns[k], self.optimizers[k]

    def draw_losses(self) -> list[float]:
        losses = [self.chance.choice([1.0, rounded(1.1), 1.5, rounded(2.3)]) for _ in range(self.size)]
        # Several in a row.
        self.is_bad = self.chance.random() < (0.7 if self.is_bad else 0.08)
        if self.is_bad:
            losses[self.chance.randrange(self.size)] = self.chance.choice([50.0, 50.0, math.nan, math.inf])
        return losses

    def backward(self):
        for _ in range(self.chance.choice([1, 1, 2, 3])):
            self.scale_loss()
        model = self.model
        for k, optimizer in enumerate(self.optimizers):
            values: list[float | None] = [self.chance.choice(VALUES) for _ in range(self.size)]
            if self.chance.random() < 0.1:
                values[self.chance.randrange(self.size)] = self.chance.choice([*BAD, 100.0])
            if self.chance.random() < 0.05:
                values = [None if self.chance.random() < 0.7 else value for value in values]
            elif self.chance.random() < 0.1:
                values = [0.0] * self.size
            # At the largest scales gradients overflow by themselves, on every rank.
            model.gradients[k] = [None if value is None else rounded(value * model.scale) for value in values]
            own = model.gradients[k][self.rank]
            optimizer.grads = [None if own is None else self.array(own)]

    def scale_loss(self):
        losses = self.draw_losses()
        mine, five = losses[self.rank], self.number(5.0)
        others = [self.array([mine, mine])] if self.library == "torch" else [self.xp.asarray(9), None]
        # Outputs, what is given as the loss, and whether it is one: a number, or an array of one element.
        outputs, loss, is_loss = self.chance.choice(
            [
                *[(self.number(mine), None, True)] * 5,
                (self.array([mine]), None, True),
                (self.xp.asarray([mine, mine], dtype=self.xp.float32), None, False),
                (self.xp.asarray(9.0, dtype=self.xp.complex64), None, False),
                ([self.number(mine), *others], None, True),
                (five, mine, True),
                (five, 10**400 if mine == math.inf else mine, True),
                (five, self.xp.asarray([[mine]], dtype=self.xp.float64), True),
                (five, False, False),
            ]
        )
        with self.watching():
            found = self.scaler.scale(outputs, loss=loss)
        assert (found is outputs) or not self.keeps_one or isinstance(outputs, list), outputs
        factor = self.model.scale
        if outputs is five:
            self.require(float(found), rounded(5.0 * factor), "what scale(5.0) returns")
        self.model.scaled(losses if is_loss else None)
        if loss is False and (self.model.is_judged or not self.model.losses):
            # Nothing is judged on purpose.
            self.model.losses, self.model.judged, self.model.is_judged = [], set(), True

    def begin(self, k: int, call: Callable[..., Any], **clip) -> bool:
        """Let the model divide gradients; False, after asserting the error, if no rank has scaled their loss."""
        since = "" if self.model.is_new else " since a state was loaded, or a scale or a group set"
        may, where = self.model.may_unscale(k), "" if self.group is None else " on any rank"
        said = f"scale() has never been called{where}{since}: make the gradients of", ORDER
        if not self.model.has_array and None in self.model.gradients[k]:
            return False
        if not may and self.group is None:
            self.raises(lambda: call(self.optimizers[k]), *said)
            return False
        has_norm = bool(clip) or self.settings["max_norm"] is not None
        if self.group is None and self.model.is_wrong(k, has_norm):
            self.raises(lambda: call(self.optimizers[k], **clip), "found nothing in this step", kind=InvalidValueError)
            return False
        said = self.model.warnings(k, has_norm) if may else []
        if said:
            # As an error it comes before anything is touched, and is said once, too.
            self.raises(lambda: call(self.optimizers[k], **clip), said[0], kind=UserWarning)
        self.expected = said[1:]
        self.model.divide(k)
        if may:
            return True
        self.model.judge(k, self.model.clip(k, self.settings["max_norm"]))
        if self.model.turns[k].reason in ("stepped", "overflow", "spike"):
            self.raises(lambda: call(self.optimizers[k]), *said)
        else:
            call(self.optimizers[k])
        self.model.turns[k].stage = "ready"
        return False

    def unscale(self):
        (k, turn, optimizer), how = self.turn(), self.chance.choice(["plain", "rank", "group"])
        if turn.stage != "ready":
            said = "unscale_() is being called after step()" if turn.stage == "stepped" else "has already been called"
            self.raises(lambda: self.scaler.unscale_(optimizer), "" if turn.is_left_out else said, ORDER)
            return
        values = self.model.quotients(k)
        clip: dict[str, Any] = {}
        is_too_large, largest = self.model.is_too_large(k), self.settings["max_norm"]
        if how == "rank" and len({None if value is None else abs(value) for value in values}) > 1:
            # The ranks do not hold the same gradients.
            how = "group"
        # Of several groups it is not known which hold parts.
        how = "plain" if how == "group" and self.is_grid else how
        if how != "plain" and not is_too_large:
            largest = self.chance.choice(MAX_NORMS)
            # A process alone is all of its group, and by default each rank has a norm of its own.
            is_said = how == "group" or self.chance.random() < 0.5
            clip = {"max_norm": largest} | ({"norm_over": how} if is_said else {})
        elif largest is not None and is_too_large:
            return
        if not self.begin(k, self.scaler.unscale_, **clip):
            return
        with self.watching():
            returned = self.scaler.unscale_(optimizer, **clip)
        norm = self.model.clip(k, largest, "rank" if how == "rank" else "group")
        self.model.judge(k, None if norm is None else float(returned))
        if norm is not None:
            self.take_over(k)
            is_close = any(turn.bad) or math.isclose(float(returned), norm, rel_tol=2e-6, abs_tol=1e-18)
            assert is_close, (returned, norm)
            self.norms += [] if any(turn.bad) else [np.float32(returned).tobytes()]

    def take_over(self, k: int):
        """Have the model hold what a skipped step has left: what becomes of such gradients is not said."""
        values, (held,) = self.model.gradients[k], self.optimizers[k].grads
        if (self.model.turns[k].reason != "stepped" or any(self.model.turns[k].bad)) and values[self.rank] is not None:
            values[self.rank] = float(held[0])

    def refuse(self):
        _, turn, optimizer = self.turn()
        ranks = self.chance.sample(range(self.size), self.chance.randint(1, self.size))
        if turn.is_left_out:
            return
        if turn.stage == "stepped" or (turn.stage == "unscaled" and self.group is not None):
            said = "refuse() is being called after step()" if turn.stage == "stepped" else "has told the other ranks"
            self.raises(lambda: self.scaler.refuse(optimizer), said, ORDER)
            return
        if self.rank in ranks:
            self.scaler.refuse(optimizer)
        turn.refused.update(ranks)
        if turn.stage == "unscaled" and turn.reason != "overflow":
            turn.reason, turn.by, turn.by_loss = "refused", 0, False

    def step(self):
        k, turn, optimizer = self.turn()
        answer = self.draw_answer()
        if turn.stage == "stepped":
            if not turn.is_left_out:
                self.raises(lambda: self.scaler.step(optimizer), "step() has already been called", ORDER)
            return
        # A guard's step ends the iteration, on all ranks.
        lazy = self.chance.randrange(self.size) if self.chance.random() < 0.3 and not self.is_guard else None
        if turn.stage == "unscaled" and turn.is_over and self.rank == lazy:
            # One rank alone may leave out a step that all skip.
            turn.stage, turn.is_left_out = "stepped", True
            self.counts[turn.reason] += 1
            return
        if turn.stage == "ready":
            if self.settings["max_norm"] is not None and self.model.is_too_large(k):
                return
            if not self.begin(k, self.scaler.step):
                return
            self.model.judge(k, self.model.clip(k, self.settings["max_norm"]))
        if turn.reason == "no gradients":
            ranks = "" if self.group is None else " on any rank"
            said = f"none of whose parameters has a gradient{ranks}: they were zeroed"
            if self.is_guard and self.group is None and not self.model.knows_no_gradients:
                self.expected.append(said)
                self.model.knows_no_gradients = True
            report = self.model.report(turn)._replace(nonfinite=0, norm=None, loss=None)
            turn.stage, ends = "ready", ([], [])
            with self.watching():
                if self.is_guard:
                    self.model.is_scaled = False
                    ends = self.outcome(lambda: self.scaler.step(optimizer), None)
                else:
                    self.raises(lambda: self.scaler.step(optimizer), said)
            self.require(self.scaler.last_step(optimizer), report, "last_step()")
            # Others may have waited for it.
            self.require_told(self.ended(*ends) if self.is_guard and self.model.is_over else [])
            return
        if self.is_guard and turn.lacks_values and not self.model.has_judged:
            self.raises(lambda: self.scaler.step(optimizer), "found nothing in this step", kind=InvalidValueError)
            turn.stage, self.model.losses, self.model.is_judged = "ready", [], False
            return
        self.made(k, answer, lambda: self.scaler.step(optimizer))

    def draw_answer(self) -> Any:
        """Return what an optimizer says that makes no step of its own accord; mostly None. Callbacks may fail, too."""
        self.draw_failure()
        return self.chance.choice([*[None] * 40, gradscale.NOT_STEPPED, (False, None)])

    def made(self, k: int, answer: Any, call: Callable[[], Any], retries: int = 0):
        """Assert that a step is as the model says."""
        optimizer, is_called = self.optimizers[k], self.model.turns[k].reason == "stepped"
        optimizer.answer, before, failure = answer, optimizer.steps, self.failure
        told = not self.model.turns[k].lacks_values and self.model.turns[k].reason != "refused"
        self.model.has_judged |= told and self.group is not None
        report = self.model.stepped(k, answer is not None, retries)
        self.counts[report.reason] += 1
        ends = self.is_guard and self.model.is_over
        fails = report.skipped and failure is not None
        raises, stalls = [], []
        with self.watching():
            if fails:
                self.raises(call, str(failure), kind=type(failure))
            elif ends:
                raises, stalls = self.outcome(call, answer or "moved" if is_called else None)
            else:
                self.require(call(), answer or "moved" if is_called else None, "what step() returns")
        self.require(self.scaler.last_step(optimizer), report, "last_step()")
        if self.settings["max_norm"] is not None:
            self.take_over(k)
            norm, turn = self.scaler.last_step(optimizer).norm, self.model.turns[k]
            if norm and turn.norm and math.isclose(norm, turn.norm, rel_tol=2e-6):
                # It is exact for what the gradients are, which have drifted away from the model's.
                turn.found = [found and {**found, "norm": norm} for found in turn.found]
        self.require(optimizer.steps, before + (is_called and answer is None), "steps that the optimizer has made")
        told: list[Any] = [report] if report.skipped else []
        if ends and not fails:
            self.take_over(k)
            told += self.ended(raises, stalls)
        self.require_told(told)
        wrapper = SimpleNamespace(optimizer=optimizer)
        self.raises(lambda: self.scaler.last_step(wrapper), "got one of type SimpleNamespace, ", "attribute .optimizer")
        self.speaks(str(self.scaler.diagnose(optimizer)))
        if ends and fails:
            self.end(None, self.scaler.update)

    def ended(self, raises: list[BaseException], stalls: list[Warning]) -> list[UpdateReport]:
        """Assert that a guard's step has ended its iteration as the model says; return what is told."""
        update, kind, said = self.model.end_in_step(self.failure)
        self.counts["step ends" if kind is None else kind.__name__] += 1
        self.require([type(one) for one in raises + stalls], [kind] * (kind is not None), "how it ends")
        found = [text if text in str(one) else str(one) for one in raises + stalls for text in said]
        self.require(found, [*said], "what its end says")
        return [update]

    def outcome(self, call: Callable[[], Any], expected: Any) -> tuple[list[BaseException], list[Warning]]:
        """Make a call that may end an iteration; return what it raises, and its warnings of a run that stalls."""
        raises: list[BaseException] = []
        with warnings.catch_warnings(record=True) if self.group is None else contextlib.nullcontext() as caught:
            try:
                self.require(call(), expected, "what step() returns")
            except (gradscale.TrainingStalledError, OSError, KeyboardInterrupt) as error:
                raises.append(error)
        stalls = [one.message for one in caught or () if one.category is gradscale.TrainingStalledWarning]
        for one in caught or ():
            if one.message not in stalls:
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        for said in raises + stalls:
            self.speaks(str(said))
        return raises, stalls

    def minimise(self):
        k, turn, optimizer = self.turn()
        if turn.stage == "stepped" or (turn.stage == "unscaled" and not turn.by_closure):
            said = "step() has already been called" if turn.stage == "stepped" else "and unscale_() was called before"
            if not turn.is_left_out:
                self.raises(lambda: self.scaler.step(optimizer, lambda: None), said, ORDER)
            return
        rule = self.settings["skip"]
        if self.is_guard and rule is not None and rule.of == ("norm",) and self.settings["max_norm"] is None:
            # An evaluation without a norm may be an error, which a step without a closure shows.
            return
        plan = Closure(self)
        again = self.draw_losses()
        optimizer.evaluations, answer = plan.evaluations, self.draw_answer()
        seen: list[float] = []

        def closure():
            if plan.fails_at == 0:
                raise MemoryError
            number = len(seen) + 1
            seen.append(float(self.scaler.scale(self.number(1.0), loss=plan.losses[number > 1][self.rank])))
            if number == plan.fails_at:
                raise MemoryError
            if number == plan.refuses_at and self.rank == plan.bad_rank:
                self.scaler.refuse(optimizer)
            optimizer.grads = [self.array(plan.gradients(number, seen[-1])[self.rank])]
            return "evaluated"

        def call():
            # Warnings are not of one thread.
            with warnings.catch_warnings() if self.group is None else contextlib.nullcontext():
                warnings.filterwarnings("ignore", "skip= judges") if self.group is None else None
                return self.scaler.step(optimizer, closure)

        ends = self.model.evaluated(k, plan)
        optimizer.fails = ends == "steps" and self.chance.random() < 0.1
        if ends == "fails" or optimizer.fails:
            self.raises(call, kind=MemoryError)
            self.require(seen, plan.expected, "the scales that the closure has seen")
            if ends == "fails":
                said = "a closure of this optimizer has failed", "or end the iteration with update(get_scale())"
                for refused in (self.scaler.unscale_, self.scaler.step):
                    self.raises(lambda refused=refused: refused(optimizer), *said, ORDER)
            seen.clear()
            plan.begin(again, again)
            plan.fails_at, optimizer.fails = None, False
            ends = self.model.evaluated(k, plan)
        self.counts[f"closure {ends}"] += 1
        if ends == "has begun":
            self.raises(call, "The optimizer has begun its step", kind=gradscale.ClosureOverflowError)
        elif ends == "refused later":
            self.raises(
                call, "refuse() was called", "of a closure", "restore its parameters and state from a copy", ORDER
            )
        else:
            self.made(k, answer, call, plan.retries)
        self.take_over(k)
        self.require(seen, plan.expected, "the scales that the closure has seen")

    def update(self):
        # A step that is left out after unscale_ counts all the same.
        turns = self.model.turns.values()
        if any(turn.refused and turn.stage == "ready" for turn in turns):
            if any(self.rank in turn.refused and turn.stage == "ready" for turn in turns):
                self.raises(self.scaler.update, "refuse() was called for an optimizer that was neither")
            return
        if self.model.lowered is None and all(t.stage == "ready" or t.reason == "no gradients" for t in turns):
            if self.is_guard and not self.model.is_scaled and not self.model.is_begun:
                self.scaler.update()
                return
            is_scaled = self.model.used is not None or self.model.never_scales
            said = "unscaled or stepped by the scaler" if is_scaled else "nothing was scaled or unscaled since the last"
            self.raises(self.scaler.update, said, ORDER)
            return
        self.end(None, self.scaler.update)

    def set_scale(self):
        policy = self.model.policy
        wanted = policy.clamp(1.0 if self.keeps_one else 2.0 ** self.chance.randint(*self.exponents))
        for outside in (policy.clamp(2.0**-126) / 2.0, policy.clamp(2.0**127) * 2.0):
            if 2.0**-126 <= outside < 2.0**127:
                said = "within the policy's bounds"
                self.raises(lambda x=outside: self.scaler.update(x), said, kind=InvalidValueError)
        forms: list[Callable[[Any], Any]] = [float, np.float32, np.asarray, self.number, self.array]
        if wanted.is_integer() and wanted < 2.0**31:
            forms += [int, np.int64, lambda x: self.xp.asarray([[int(x)]], dtype=self.xp.int32)]
        given = self.chance.choice(forms)(wanted)
        self.end(wanted, lambda: self.scaler.update(given))

    def end(self, wanted: float | None, call: Callable[[], Any]):
        """Assert that an update tells, warns and raises as the model says."""
        # Also of a guard's step that a callback has left without its end.
        is_over = self.is_guard and self.model.is_over
        update = functools.partial(self.model.end_in_step, new_scale=wanted) if is_over else None
        failure = self.draw_failure()
        report, kind, said = self.model.update(wanted, failure) if update is None else update(failure)
        self.counts["update" if kind is None else kind.__name__] += 1
        if kind is gradscale.TrainingStalledWarning:
            with pytest.warns(kind) as warned:
                call()
            text = str(warned[0].message)
            self.require([one if one in text else text for one in said], [*said], "what its warning says")
            self.speaks(str(warned[0].message))
        elif kind is not None:
            self.raises(call, *said, kind=kind)
        else:
            call()
        self.require_told([report])

    def keep(self):
        """Save what the scaler is now, to be loaded some time."""
        windows = [copy.deepcopy(memory.saved) for memory in self.model.memories]
        self.kept = json.loads(json.dumps(self.scaler.state_dict())), windows

    def resume(self):
        """Go on with a copy, or with a state dict that is loaded, of now or from before."""
        how = self.chance.choice(["pickle", "deepcopy", "copy", "same", "same", "fresh"])
        if self.chance.random() < 0.5:
            self.keep()
        if self.group is not None and any(t.refused and t.stage == "ready" for t in self.model.turns.values()):
            # The others are not in the middle of an iteration.
            return
        copies: dict[str, Callable[[Any], Any]] = {
            "pickle": lambda scaler: pickle.loads(pickle.dumps(scaler)),
            "deepcopy": copy.deepcopy,
            "copy": copy.copy,
        }
        if how in copies:
            if self.model.is_begun:
                self.raises(lambda: copies[how](self.scaler), "the middle of iteration")
                return
            made = copies[how](self.scaler)
            kept = repr(made), made.on_skip, made.on_update, made.history
            self.require(kept, (repr(self.scaler), None, None, []), "the copy")
            # What becomes of the original is not the copy's.
            self.scaler.load_state_dict(FOREIGN)
            made.on_skip, made.on_update, self.scaler = self.callbacks(), self.callbacks(), made
            self.model.copied()
            if how == "pickle" and self.group is not None:
                self.raises(lambda: copy.copy(made).step(self.optimizers[0]), "set_group")
                self.scaler.set_group(self.over)
            return
        saved, windows = {**self.kept[0]}, self.kept[1]
        if self.is_guard and self.chance.random() < 0.3:
            saved |= FOREIGN
        for name in self.chance.sample(OPTIONAL, self.chance.choice([0, 0, 0, 1, 4, len(OPTIONAL)])):
            saved.pop(name, None)
            # Older states have neither.
            saved.pop("steps", None) if name == "counts" else None
        if saved["growth_factor"] > 1.0 and self.chance.random() < 0.2:
            saved["growth_interval"] = 4
        if self.chance.random() < 0.2 and not self.keeps_one:
            saved["scale"] = 2.0 ** self.chance.randint(*self.exponents)
        if self.chance.random() < 0.2 and not self.is_guard:
            # A run that was already as long grows at its next clean step.
            saved |= {"_growth_tracker": 4000, "_overflow_tracker": 7, "_rescale_tracker": 9}
        form = self.chance.choice([lambda x: x, np.asarray, lambda x: np.asarray(x)[()]])
        given = {name: form(one) if type(one) in (int, float) else one for name, one in saved.items()}
        is_kept = how == "same" and not self.model.is_begun
        if how == "fresh":
            self.settings = self.draw_settings()
            own = StaticScale(1.0 if self.keeps_one else 3.0)
            self.scaler = self.make(own)
            self.model.configure(self.settings)
            self.model.is_unused, self.model.policy = True, own
        elif "policy" not in saved and isinstance(self.model.policy, DynamicScale) and saved["growth_factor"] == 1.0:
            # The factors of a static scale are none of a dynamic one.
            self.raises(lambda: self.scaler.load_state_dict(given), "growth_factor", kind=StateDictError)
            return
        self.scaler.load_state_dict(given | {"unknown": object(), "scheduler": None})
        if self.is_guard:
            saved |= {"scale": 1.0, "_growth_tracker": 0, "policy": {"kind": "StaticScale", "init_scale": 1.0}}
        self.model.load(saved, windows if "spikes" in saved else [[]] * self.size, is_kept)
        # A scaler that was just made has given up nothing.
        self.model.is_given_up = self.model.is_given_up and how != "fresh"

    def change_setting(self):
        name = self.chance.choice(["growth_interval", "growth_factor", "backoff_factor"])
        value = self.chance.choice({"growth_interval": [1, 4, 9], "growth_factor": [2.0, 4.0]}.get(name, [0.5, 0.25]))
        change = getattr(self.scaler, f"set_{name}")
        if not isinstance(self.model.policy, DynamicScale):
            self.raises(lambda: change(value), "can be set only of a DynamicScale", kind=InvalidTypeError)
        elif not self.model.is_begun and not any(turn.refused for turn in self.model.turns.values()):
            change(value)
            self.model.policy = dataclasses.replace(self.model.policy, **{name: value})
