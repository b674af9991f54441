"""check_trainer: hold a training loop to four rules, by runs that are compared with each other."""

from __future__ import annotations

import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.pool import ThreadPool
from typing import Any, NamedTuple, TypeAlias

from gradscale.core import validation
from gradscale.errors import reading
from gradscale.tools.side_channel import SideChannel
from gradscale.tools.state_parts import State, differences
from gradscale.tools.training_runs import LEFT_OUT, Loop, Run, RunEndError, factor_of

# By the name of a part: why a bad step may leave a trace there.
_CAUSES = {
    r"\blr\b|sched|last_epoch|_step_count": "a schedule that counts skipped steps?",
    r"\bema|average|shadow": "an average (EMA) that moves with skipped steps?",
    r"running_|num_batches|buffer": "buffers that the forward pass of the bad batch has written?",
    r"optim|moment|exp_avg|\bmu\b|\bnu\b": "momentum of a step that was not skipped?",
    r"grad": "gradients that a skipped step does not zero?",
    r"\brng|random|generator$": "random numbers that the bad step has drawn?",
}

_Difference: TypeAlias = tuple[int, int, list[Any], int]
"""The step, how many parts differ, the first two of them, and the rank."""


class TrainerFault(NamedTuple):
    """What breaks one of the rules of :func:`check_trainer`; its text is one line.

    Attributes
    ----------
    rule : int
        1: a bad step leaves a trace; 2: the scale shows; 3: saving and loading change something; 4: a step hangs.
    kind : str
        How a step was bad, as ``kinds`` has it, or ``"clean"``.
    rank : int
        The rank that had the bad value, or that hangs; the one that differs, if no step was bad.
    step : int
        The bad step, the one after which the state was saved and loaded, or the one that raises or hangs.
    part : str
        What differs first, such as ``"optimizer.state[0].exp_avg"``; empty for errors and hangs.
    line : str
        All of it in words, with both values and the usual cause.

    Examples
    --------
    >>> import gradscale
    >>> fault = gradscale.testing.TrainerFault(1, "nan", 0, 4, "lr", "rule 1: after the NaN of step 4, `lr` is ...")
    >>> print(fault)
    rule 1: after the NaN of step 4, `lr` is ...
    """

    rule: int
    kind: str
    rank: int
    step: int
    part: str
    line: str

    def __str__(self) -> str:
        return self.line


class TrainerReport(NamedTuple):
    """What :func:`check_trainer` says of a training loop; its text has a line for each fault.

    Attributes
    ----------
    faults : list of TrainerFault
        Empty for a loop that keeps all rules; on all ranks the same.
    runs : int
        How many runs were made.

    Examples
    --------
    >>> import gradscale
    >>> print(gradscale.testing.TrainerReport(faults=[], runs=21))
    check_trainer: 21 runs, faults: 0
    """

    faults: list[TrainerFault]
    runs: int

    def __str__(self) -> str:
        return "\n".join([f"check_trainer: {self.runs} runs, faults: {len(self.faults)}", *map(str, self.faults)])


def print_total(done: int, total: int) -> None:
    """Say how many runs are made, before the first."""
    if done == 0:
        print(f"check_trainer: {total} runs", file=sys.stderr)


def check_trainer(
    make: Callable[..., Any],
    *,
    group: object = None,
    timeout: float = 60.0,
    raises: bool = True,
    steps: int = 8,
    bad_steps: Sequence[int | Sequence[int]] = (),
    kinds: str | Sequence[str] = ("nan", "inf"),
    micro_batches: int = 1,
    rtol: float = 0.0,
    exempt: str | Sequence[str] = ("scale",),
    progress: Callable[[int, int], object] = print_total,
) -> TrainerReport:
    """Hold a training loop to four rules, by runs of it that are compared with each other.

    1. A bad step leaves no trace: the state at the end is that of a run without that step.
    2. The scale is invisible: ``init_scale`` 2**8 and 2**12 give the same state.
    3. Saving and loading change nothing, after any step, also the bad one.
    4. Nothing hangs: each step ends within ``timeout``, on all ranks.

    Parameters
    ----------
    make : callable
        Returns a new trainer, always the same. It has ``step(index, fault)``, one step of the optimizer on the batch of
        that number, with the loss of this rank times ``fault``; ``state()``, which returns all that a step changes:
        nested containers of numbers, text, arrays of any library and objects with ``state_dict()``; ``save()`` and
        ``load(saved)``. Rule 2 asks for an argument ``init_scale``, and is left out without it.
    group : object, optional
        All ranks that train together, each of which calls this function: as ``group`` of
        :class:`gradscale.ShardedGradScaler`. Default: one process.
    timeout : float, default 60.0
        Seconds that a step may take on a rank. The trainer is called in a thread of its own.
    raises : bool, default True
        False: return the report also if there are faults.
    steps : int, default 8
        Number of steps of a run; 4 or more, if ``bad_steps`` are the default.
    bad_steps : sequence of int or sequence of ints, optional
        Which steps are bad, a run for each, or several in one run. Default: the first, one in the middle, two in a row.
    kinds : str or sequence of str, default ("nan", "inf")
        What ``fault`` is in a bad step. For loops that skip spikes: ``"spike"``, which is 1e6, or any number as text.
    micro_batches : int, default 1
        If more, ``fault`` is a tuple of a factor for each micro-batch, one of which is bad. In a run that is compared
        with it is None: that micro-batch is to be left out, as if it had not been there.
    rtol : float, default 0.0
        How much numbers of an array may differ, relative to its largest one. By default not in a bit.
    exempt : str or sequence of str, default ("scale",)
        Parts whose names contain one of these, in capitals or not, are compared by rule 3 alone.
    progress : callable, optional
        Called on rank 0 before each run, with how many were made, and how many there are at most. Default: print this
        number once, to stderr.

    Returns
    -------
    TrainerReport
        With the same faults on every rank.

    Raises
    ------
    AssertionError
        With all faults, if there are any.
    InvalidTypeError, InvalidValueError
        For a trainer that raises in a run without a bad step, or whose state does not change.

    Examples
    --------
    >>> import gradscale, numpy as np
    >>> class Trainer:
    ...     weights, lr = np.float32([1.0, -1.0]), 0.1
    ...     def step(self, index, fault):
    ...         grads = np.float32(fault) * self.weights
    ...         if np.isfinite(grads).all():
    ...             self.weights = self.weights - np.float32(self.lr) * grads
    ...         self.lr = self.lr / 2  # also after a step that was skipped
    ...     def state(self):
    ...         return {"weights": self.weights, "lr": self.lr}
    ...     def save(self):
    ...         return self.state()
    ...     def load(self, saved):
    ...         self.weights, self.lr = saved["weights"], saved["lr"]
    >>> report = gradscale.testing.check_trainer(Trainer, kinds=["nan"], bad_steps=[4], raises=False)
    >>> for part in str(report.faults[0]).split(", "):
    ...     print(part)
    rule 1: after the NaN of step 4
    `lr` is 0.003125
    and 0.00625 without that step (a schedule that counts skipped steps?)
    """
    faults: list[TrainerFault] = []
    steps = validation.count("steps", steps, 1 if bad_steps else 4)
    micro_batches = validation.count("micro_batches", micro_batches, 1)
    rtol = validation.number("rtol", rtol, at_least=0.0, at_most=1.0)
    with ThreadPool(1) as pool:
        channel = SideChannel(group, validation.number("timeout", timeout, above=0.0))
        loop = Loop(make, channel, pool, timeout, steps, micro_batches)
        with reading("an argument of check_trainer()"):
            kinds, exempt = map(_words, (kinds, exempt))
            _ = [*map(factor_of, kinds)]
            plan = _plan(loop, kinds, bad_steps or (0, steps // 2, (steps // 2 - 2, steps // 2 - 1)))
        references, made = set[Run]().union(*plan.values()), dict[Run, list[State]]()

        def states(run: Run) -> list[State]:
            if run not in made:
                if channel.rank == 0:
                    progress(len(made), len(references | plan.keys()))
                made[run] = loop.states(run)
            return made[run]

        def first_difference(run: Run, other: Run) -> _Difference | None:
            return _first_difference(channel, states(run), states(other), rtol, () if run.rule == 3 else exempt)

        for run, others in plan.items():
            try:
                faults += _compare(run, others, first_difference, channel.size)
            except RunEndError as end:
                is_hang, rank, step, text = end.args
                rule = 4 if is_hang else run.rule
                faults.append(TrainerFault(rule, run.kind, rank, step, "", f"rule {rule}: {text}"))
            if run in made and run not in references:
                made[run] = []  # only its number counts
            if faults and (faults[-1].rule == 4 or (faults[-1].kind == run.kind == "clean" and run.rule == 1)):
                break
    report = TrainerReport(faults, len(made))
    if raises and faults:
        raise AssertionError(str(report))
    return report


def _words(words: str | Sequence[str]) -> list[str]:
    """Return words in small letters; one alone may be bare."""
    return [*map(str.lower, [words] if isinstance(words, str) else words)]


def _plan(loop: Loop, kinds: Sequence[str], bad_steps: Sequence[int | Sequence[int]]) -> dict[Run, dict[Run, str]]:
    """Return runs, and those of which each must be like one, with what that is in words."""
    ranks, whole = range(loop.channel.size), Run("in a clean run")
    text = "in the first: give rtol=, or make the loop deterministic; of an object return the values"
    plan = {Run("in a second clean run"): {whole: text}}
    for each, kind, rank, k in itertools.product(bad_steps, kinds, ranks, range(loop.micro_batches)):
        bad = (each,) if isinstance(each, int) else tuple(each)
        for index in bad:
            validation.integer("a bad step", index, 0, loop.steps - 1)
        where = f", micro-batch {k}," * (loop.micro_batches > 1) + f" on rank {rank}" * (len(ranks) > 1)
        text = f"after the {kind.replace('nan', 'NaN')} of step {' and '.join(map(str, bad))}{where}"
        run, text = Run(text, 1, kind, bad, rank, k), "without that step"
        plan[run] = {Run(text, 1, LEFT_OUT, bad): text}
        if loop.micro_batches > 1:
            text = "without that micro-batch (it counts in the denominator?)"
            plan[run] |= {Run(text, 1, LEFT_OUT, bad, on, k): text for on in (None, rank)}
        whole = run if each == bad_steps[len(bad_steps) // 2] else whole
    if "init_scale" in inspect.signature(loop.make).parameters:
        low, high = (Run(f"with init_scale {scale:g}", 2, init_scale=scale) for scale in (2.0**8, 2.0**12))
        plan[high] = {low: "with 256 (clipping before unscaling, or gradients divided twice or never?)"}
    for index in range(loop.steps):
        saved = whole._replace(text=f"saved and loaded after step {index}", rule=3, saved_after=index)
        plan[saved] = {whole: "without that (is it saved, and loaded?)"}
    return plan


def _compare(
    run: Run, others: dict[Run, str], first_difference: Callable[[Run, Run], _Difference | None], size: int
) -> Iterator[TrainerFault]:
    """Yield the fault of a run that is like none of others at its end: what differs first."""
    firsts: list[Any] = []
    for other, text in others.items():
        first = first_difference(run, other)
        if first is None:
            return
        firsts.append((*first, text))
    index, _, ((part, our, their), *following), rank, text = max(firsts, key=lambda one: (one[0], -one[1]))
    moments = run.bad if run.saved_after is None else (run.saved_after,)
    late = "" if index in moments else f" and step {index}" if index >= 0 else ", at the beginning"
    of_rank = f" of rank {rank}" if size > 1 and rank != run.rank else ""
    if run.rule == 1 and run.bad:
        text += f" ({_cause(part, our, is_late=index > run.bad[-1])})"
    line = f"rule {run.rule}: {run.text}{late}, `{part or 'state()'}`{of_rank} is {our}, and {their} {text}"
    line += "".join(f"; `{name}` differs next" for name, *_ in following)
    step = index if index in moments or not moments else moments[-1]
    yield TrainerFault(run.rule, run.kind, rank if run.rank is None else run.rank, step, part, line)


def _first_difference(
    channel: SideChannel, ours: list[State], theirs: list[State], rtol: float, exempt: Sequence[str]
) -> _Difference | None:
    """Return the first difference of any rank; None if all ranks end alike."""
    is_same = not differences(ours[-1], theirs[-1], rtol, exempt)
    by_step = () if is_same else (differences(*pair, rtol, exempt) for pair in zip(ours, theirs, strict=True))
    first = next(((index, len(parts), parts[:2]) for index, parts in enumerate(by_step, -1) if parts), None)
    return min(((*first, rank) for rank, first in enumerate(channel.exchange(first)) if first), default=None)


def _cause(part: str, value: str, is_late: bool) -> str:
    """Return the usual cause of a trace that a bad step has left in a part."""
    if is_late:
        return "gradients that a skipped step does not zero, a scale that shows, or what state() does not return?"
    default = "the step was not skipped" if re.search("nan|inf", value) else "the step was made all the same?"
    return next((cause for pattern, cause in _CAUSES.items() if re.search(pattern, part)), default)
