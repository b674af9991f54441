"""keeps(): micro-batches whose loss is not finite on any rank are dropped on all."""

import json
import math
from typing import Any

import numpy as np
import pytest
from libraries import Library
from optimizers import Tree

import gradscale
from gradscale import InvalidTypeError, SkipSpikes, StepGuard
from gradscale.testing import run_ranks

# Of each step the losses of its micro-batches, on the rank that is odd; the others have ones.
STEPS = ((1.0, math.nan, 2.0), (math.inf, -math.inf), (3.0,))
MADE = [("stepped", 2), ("refused", 0), ("stepped", 1)]


def train(guard: StepGuard, is_odd: bool, asarray=np.float32) -> tuple[Any, ...]:
    """Train with a mean that each forward pass writes; what was kept, the mean, and the reports."""
    optimizer, mean, rows = Tree(), MEANS[guard], []
    for losses in STEPS:
        optimizer.grads, kept = [], []
        for loss in losses:
            own = loss if is_odd else 1.0
            mean += own if math.isfinite(loss) else math.nan
            kept.append(guard.keeps(asarray(own)))
            if kept[-1]:
                optimizer.grads = [asarray([own])]
        number = guard.kept
        guard.step(optimizer)
        report = guard.last_step(optimizer)
        rows.append((kept, number, report.reason, float(mean[0])))
    return rows, guard.counts(), optimizer.steps


MEANS: dict[StepGuard, Any] = {}


def made(**options: Any) -> StepGuard:
    mean = np.zeros(1)
    guard = StepGuard(hold=mean, **options)
    MEANS[guard] = mean
    return guard


def test_a_micro_batch_with_a_bad_loss_is_dropped_and_a_step_of_none_is_refused(arrays: Library):
    guard = made(skip=SkipSpikes(of="loss", window=4))
    rows, counts, steps = train(guard, True, lambda x: arrays.asarray(x))
    assert [row[0] for row in rows] == [[math.isfinite(loss) for loss in losses] for losses in STEPS]
    assert [(row[2], row[1]) for row in rows] == MADE
    assert [row[3] for row in rows] == [3.0, 3.0, 6.0]
    assert (counts["dropped"], counts["taken"], counts["refused"], steps) == (3, 2, 1, 2)
    # The mean of those that were kept is judged.
    saved = guard.state_dict()
    assert json.loads(saved["spikes"])[0]["loss"]["values"] == [1.5, 3.0]
    other = StepGuard()
    other.load_state_dict(saved)
    assert other.counts()["dropped"] == 3


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("odd", [0, 1])
def test_it_is_dropped_on_all_ranks(size: int, odd: int):
    def rank(group) -> tuple[Any, ...]:
        return train(made(group=group, norm_over="group", max_norm=99.0), group.rank == odd)

    results = run_ranks(size, rank)
    for number, (rows, counts, steps) in enumerate(results):
        assert [(row[2], row[1]) for row in rows] == MADE
        assert [row[3] for row in rows] == ([3.0, 3.0, 6.0] if number == odd else [2.0, 2.0, 3.0])
        assert (counts["dropped"], counts["taken"], steps) == (3, 2, 2)


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_no_optimizer_is_stepped_by_micro_batches_that_were_all_dropped(call: str):
    guard, optimizers = StepGuard(), [Tree([np.float32([1.0])]) for _ in range(2)]
    for optimizer in optimizers:
        guard.step(optimizer)
    assert not guard.keeps(math.nan)
    for optimizer in optimizers if call == "unscale_" else ():
        guard.unscale_(optimizer)
    for optimizer in optimizers:
        guard.step(optimizer)
        assert (guard.last_step(optimizer).reason, optimizer.steps, guard.kept) == ("refused", 1, 0)
    assert guard.counts()["dropped"] == 1
    # Those of the next step are others.
    assert (guard.keeps(1.0), guard.kept) == (True, 1)
    for optimizer in optimizers:
        guard.step(optimizer)
        assert guard.last_step(optimizer).reason == "stepped"


def test_micro_batches_of_a_step_without_gradients_are_none_of_the_next():
    guard, optimizer = StepGuard(), Tree([])
    assert [guard.keeps(loss) for loss in (math.nan, 0.5)] == [False, True]
    with pytest.warns(UserWarning, match="none of whose parameters has a gradient"):
        guard.step(optimizer)
    assert (guard.kept, guard.counts()["dropped"]) == (0, 1)
    assert not guard.keeps(math.nan)
    optimizer.grads = [np.float32([0.0])]
    guard.step(optimizer)
    assert (guard.last_step(optimizer).reason, guard.counts()["dropped"]) == ("refused", 2)


DIFFERENT = {
    "order": ([1.0, 2.0], [2.0, 1.0]),
    "signs": ([1.0, -2.0, 0.5, 0.75], [-1.0, 2.0, -0.5, 0.75]),
    "rows": ([[1.0, 2.0], [3.0, 4.0]], [[3.0, 4.0], [1.0, 2.0]]),
    "last bit": ([1.0, 2.0], [1.0, 2.0 + 2.0**-22]),
    "complex": ([1.0 + 2.0j, 3.0 + 4.0j], [3.0 + 4.0j, 1.0 + 2.0j]),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_any_difference_of_gradients_is_seen_after_a_drop(case: str):
    def rank(group) -> None:
        guard, optimizer = StepGuard(group=group), Tree()
        assert [guard.keeps(np.float32(loss)) for loss in (1.0, math.nan)] == [True, False]
        dtype = np.complex64 if case == "complex" else np.float32
        optimizer.grads = [np.asarray(DIFFERENT[case][group.rank], dtype)]
        with pytest.raises(gradscale.ScaleDesyncError):
            guard.step(optimizer)

    run_ranks(2, rank)


@pytest.mark.parametrize("averages", [True, False])
def test_gradients_that_nothing_has_averaged_are_an_error_on_all_ranks(averages: bool):
    def rank(group) -> str:
        guard, optimizer = StepGuard(group=group), Tree()
        # The second was to average them.
        assert [guard.keeps(np.float32(loss)) for loss in (1.0, math.nan)] == [True, False]
        optimizer.grads = [np.float32([1.0 if averages else 1.0 + group.rank])]
        if averages:
            guard.step(optimizer)
            return guard.last_step(optimizer).reason
        with pytest.raises(gradscale.ScaleDesyncError) as caught:
            guard.step(optimizer)
        assert optimizer.steps == 0
        return str(caught.value)

    said = run_ranks(2, rank)
    assert all(one == "stepped" if averages else "make a backward pass in its place, of zeros" in one for one in said)


def test_what_is_no_loss_is_refused_and_a_disabled_guard_keeps_all():
    for wrong in ("1", None, np.ones(2), True):
        with pytest.raises(InvalidTypeError, match="loss must be a number or a real floating array of one element"):
            StepGuard().keeps(wrong)  # type: ignore[arg-type]
    guard, optimizer = StepGuard(enabled=False), Tree([np.float32([1.0])])
    assert [guard.keeps(loss) for loss in (1.0, math.nan)] == [True, True]
    assert guard.kept == 2
    guard.step(optimizer)
    assert guard.kept == 0


def test_a_rank_that_asks_less_often_is_told():
    def rank(group) -> None:
        guard, optimizer = StepGuard(group=group), Tree([np.float32([1.0])])
        guard.keeps(np.float32(1.0))
        with pytest.raises(gradscale.ScaleDesyncError):
            guard.keeps(np.float32(1.0)) if group.rank else guard.step(optimizer)

    run_ranks(2, rank)
