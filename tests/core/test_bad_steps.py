"""Bad steps: spikes, guards, and runs whose every step is skipped: errors, warnings and logs; see lives.py, too."""

import copy
import functools
import gc
import json
import logging
import math
import pickle

import numpy as np
import pytest
from libraries import Library
from optimizers import Momentum, Tree, iterate_plainly
from tiers import later

import gradscale
from gradscale import StepGuard
from gradscale.scaler import guard as guards
from gradscale.testing import run_ranks
from gradscale.tools.callbacks import LogUpdates

RULE = gradscale.SkipSpikes(window=8, min_values=4, of="loss")


def test_so_many_optimizers_that_none_is_ever_judged_are_told_of(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(guards, "_MANY", 3)
    scaler, kept = gradscale.GradScaler(skip=RULE), [Tree() for _ in range(4)]
    for optimizer in kept[:-1]:
        iterate_plainly(scaler, optimizer)
    with pytest.warns(UserWarning, match="has begun window 4, one for each optimizer that is alive"):
        iterate_plainly(scaler, kept[-1])


def test_a_shorter_window_goes_on_from_the_last_of_the_saved_values():
    scaler, other = (gradscale.GradScaler(skip=gradscale.SkipSpikes(window=n, of="loss")) for n in (8, 4))
    for loss in (1.0, 2.0, 3.0, 4.0, 5.0):
        iterate_plainly(scaler, Tree(), loss=loss)
    other.load_state_dict(scaler.state_dict())
    iterate_plainly(other, Tree(), loss=6.0)
    assert json.loads(other.state_dict()["spikes"])[0]["loss"]["values"] == [3.0, 4.0, 5.0, 6.0]


def test_what_is_loaded_at_the_limits_of_numbers_can_be_saved_and_loaded_again():
    guard, optimizer, most = StepGuard(skip=RULE, give_up_after=9), Tree(), 2**63 - 1
    windows = [{"loss": {"values": [1.0] * 1000, "skipped": 2**31 - 1}}] * 3
    saved = guard.state_dict() | {
        "iteration": most,
        "steps": most,
        "counts": dict.fromkeys(["taken", "overflow"], most),
    }
    saved |= {"spikes": json.dumps(windows), "streaks": json.dumps([{"overflow": most}])}
    guard.load_state_dict(saved | {"_growth_tracker": 2**31 - 1})
    for value in (1.0, math.nan):
        assert max(len(one["loss"]["values"]) for one in json.loads(guard.state_dict()["spikes"])) == RULE.window
        iterate_plainly(guard, optimizer, value)
        guard.load_state_dict(guard.state_dict())
    with pytest.raises(gradscale.StateDictError, match="iteration must be an integer from 1 to"):
        guard.load_state_dict(saved | {"iteration": most + 1})


def test_a_new_optimizer_collects_garbage_only_if_no_window_is_free():
    collections: list[dict[str, int]] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            collections.append(info)

    scaler = gradscale.GradScaler(skip=RULE)
    gc.collect()
    gc.disable()
    gc.callbacks.append(note)
    try:
        reasons = [iterate_plainly(scaler, Tree(), loss=loss).reason for loss in (1.0, 1.0, 1.0, 1.0, 9.0)]
    finally:
        gc.callbacks.remove(note)
        gc.enable()
    assert (collections, reasons) == ([], ["stepped"] * 4 + ["spike"])


def test_a_new_optimizer_continues_the_window_of_one_that_is_deleted_in_a_cycle():
    class Cyclic(Tree):
        def __init__(self):
            super().__init__()
            self.owner = self

    gc.collect()
    gc.disable()
    try:
        scaler = gradscale.GradScaler(skip=RULE)
        reasons = [iterate_plainly(scaler, Cyclic(), loss=loss).reason for loss in (1.0, 1.0, 1.0, 1.0, 9.0)]
    finally:
        gc.enable()
    assert reasons == ["stepped"] * 4 + ["spike"]
    assert len(json.loads(scaler.state_dict()["spikes"])) == 1


@pytest.mark.parametrize("answer", [False, (0, None), (True, None, None), (np.zeros(2),), [False], "no"], ids=str)
def test_an_optimizer_declines_by_no_other_answers(answer):
    scaler, optimizer = gradscale.GradScaler(), Tree()
    optimizer.step = lambda: answer  # type: ignore[method-assign]
    assert iterate_plainly(scaler, optimizer).reason == "stepped"


def test_not_stepped_is_one_object_in_copies_and_pickles():
    one = gradscale.NOT_STEPPED
    assert all(other is one for other in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))))
    assert (repr(one), str(one)) == ("gradscale.NOT_STEPPED",) * 2


def test_a_guard_skips_bad_steps_and_leaves_gradients_as_they_are(arrays: Library):
    guard, optimizer = StepGuard(), Tree()
    for value, reason in ((3.0, "stepped"), (math.nan, "overflow"), (math.inf, "overflow"), (-3.0, "stepped")):
        optimizer.grads = [given := arrays.asarray([value, 1.0])]
        guard.step(optimizer)
        guard.update()
        assert guard.last_step(optimizer).reason == reason
        arrays.assert_array(optimizer.grads[0], [value, 1.0])
        arrays.assert_array(given, [value, 1.0])
    assert (guard.get_scale(), optimizer.steps) == (1.0, 2)


def test_a_group_that_cannot_be_joined_or_a_new_scale_leaves_a_guard_as_it_is():
    guard, optimizer = StepGuard(), Tree([np.full(1, 4.0, np.float32)])
    with pytest.raises(gradscale.InvalidTypeError):
        guard.set_group("world")
    assert guard.unscale_(optimizer, max_norm=1.0) == 4.0
    with pytest.raises(gradscale.InvalidValueError, match=r"new_scale must be 1 for a guard, .*got 4\.0"):
        guard.update(4.0)


def test_what_a_guard_shows_and_logs_speaks_of_no_scale(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    guard = StepGuard(diagnose="on_overflow", on_update=LogUpdates(summary_every=2), skip=RULE)
    for _ in range(2):
        iterate_plainly(guard, Momentum(1), np.nan)
    told = "step skipped, 1 non-finite gradient (inf or NaN): layer.0; the model is at fault"
    summary = "2 of the last 2 steps skipped (100 %); in all 0 taken, 2 non-finite, 0 spike, 0 refused"
    assert caplog.messages == [f"iteration 1: {told}", f"iteration 2: {told}", f"iteration 2: {summary}"]
    assert repr(guard).startswith("StepGuard(skip=SkipSpikes(window=8")


@pytest.mark.parametrize("is_met", [False, True], ids=["new", "used"])
def test_the_state_of_a_scaler_of_float16_gives_counts_and_windows_and_no_scale(is_met: bool):
    scaler, optimizer = gradscale.GradScaler(init_scale=1024.0, skip=RULE), Tree()
    for value in (1.0, 1.0, np.inf, 1.0):
        iterate_plainly(scaler, optimizer, value)
    guard, other, saved = StepGuard(skip=RULE), Tree(), scaler.state_dict()
    if is_met:
        iterate_plainly(guard, other, 1.0)
    guard.load_state_dict(saved)
    held, saved["counts"] = guard.state_dict(), {**saved["counts"], "dropped": 0}
    assert [held[name] == saved[name] for name in ("iteration", "counts", "spikes", "scale")] == [True] * 3 + [False]
    assert iterate_plainly(guard, other, 3.0, 1.0).reason == "stepped"
    assert (other.grads[0].tolist(), guard.get_scale()) == ([3.0] * 3, 1.0)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_goes_on_from_the_counts_and_leaves_those_of_the_original_and_of_reports(copied):
    reports: list[gradscale.UpdateReport] = []
    scaler, optimizer = StepGuard(on_update=reports.append), Tree()
    iterate_plainly(scaler, optimizer)
    other = copied(scaler)
    iterate_plainly(other, Tree())
    iterate_plainly(scaler, optimizer, np.inf)
    assert [one.counts()["taken"] for one in (scaler, other)] == [1, 2]
    assert [report.counts and report.counts["overflow"] for report in reports] == [0, 1]


# Runs whose every step is skipped.


def stall_warning(scaler: gradscale.GradScaler, optimizer) -> str:
    with pytest.warns(gradscale.TrainingStalledWarning) as caught:
        assert all(iterate_plainly(scaler, optimizer, np.nan).skipped for _ in range(60))
    (one,) = caught
    return str(one.message)


def test_the_warning_says_how_long_why_and_what_holds_nan():
    scaler, optimizer = gradscale.GradScaler(init_scale=1024.0), Momentum(1)
    optimizer.weights[0][:] = np.nan
    words = stall_warning(scaler, optimizer)
    assert "Cause: weights. Weights hold inf or NaN, the most in 'layer.0': load a checkpoint" in words
    assert words.startswith(
        "each of the last 50 steps of Momentum was skipped: 50 for non-finite gradients (inf or NaN)"
    )
    assert "first seen by rank 0; the scale went from 1024 to 1.8" in words
    optimizer.weights[0][:] = 1.0
    optimizer.of(0)["exp_avg"][0] = np.inf
    assert "Cause: optimizer state. The optimizer's state holds inf or NaN" in stall_warning(StepGuard(), optimizer)
    # Gradients that hold themselves cannot be looked at, which hides no warning.
    other = Tree()
    scaler = gradscale.GradScaler(on_skip=lambda _: vars(other).update(grads=vars(other)))
    assert "Cause" not in stall_warning(scaler, other)


class Critic(Tree):
    """An optimizer of another name."""


TWO = Tree(), Critic()


def run_two(scaler: gradscale.GradScaler, *gradients: float, times: int = 1, refused: bool = False) -> None:
    """Step one optimizer for each gradient."""
    for _ in range(times):
        for optimizer, gradient in zip(TWO, gradients, strict=True):
            optimizer.grads = scaler.scale([np.float32([gradient])])
            if refused:
                scaler.refuse(optimizer)
            scaler.step(optimizer)
        scaler.update()


# Below a scale of 1 it does not count as falling.
KINDS = {"scaler": functools.partial(gradscale.GradScaler, init_scale=1.0), "guard": StepGuard}


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_that_is_never_stepped_is_told_of_beside_one_that_is(kind: str):
    scaler = KINDS[kind](warn_after=3, give_up_after=40)
    with pytest.warns(gradscale.TrainingStalledWarning, match="each of the last 3 steps of Tree was skipped") as caught:
        run_two(scaler, math.nan, 1.0, times=29)
    assert len(caught) == 1
    with pytest.warns(gradscale.TrainingStalledWarning, match="each of the last 30 steps of Tree"):
        run_two(scaler, math.nan, 1.0, times=10)
    with pytest.raises(gradscale.TrainingStalledError, match="each of the last 40 steps of Tree was skipped: 40 for"):
        run_two(scaler, math.nan, 1.0)
    # The other optimizer's steps raise nothing.
    TWO[1].grads = scaler.scale([np.float32([1.0])])
    scaler.step(TWO[1])
    scaler.update()


@pytest.mark.parametrize(("hysteresis", "times"), [(1, 30), (2, 60), (8, 240)])
def test_a_first_scale_that_still_falls_is_no_stall_but_one_that_has_ended_to_fall_is(hysteresis: int, times: int):
    policy = gradscale.DynamicScale(
        init_scale=2.0**40, hysteresis=hysteresis, hysteresis_refill="backoff", min_scale=2.0**10
    )
    scaler = gradscale.GradScaler(policy=policy, warn_after=10)
    run_two(scaler, math.inf, 1.0, times=times)
    assert scaler.get_scale() == 2.0**10
    with pytest.warns(gradscale.TrainingStalledWarning, match=r"went from 1.09951e\+12 to 1024"):
        run_two(scaler, math.inf, 1.0, times=40)


LEFT_OVER = "he loss is finite: see whether gradients are zeroed after a skipped step, too, which keep NaN"


@pytest.mark.parametrize(
    ("loss", "weight", "said"),
    [
        (1.0, 1.0, f". T{LEFT_OVER}"),
        (None, 1.0, f". If t{LEFT_OVER}"),
        (math.nan, 1.0, ""),
        (1.0, math.nan, ""),
    ],
    ids=["loss", "no loss", "bad loss", "bad weight"],
)
@pytest.mark.parametrize("kind", [StepGuard, functools.partial(gradscale.GradScaler, init_scale=2.0)])
def test_gradients_that_are_not_zeroed_after_a_skip_are_thought_of(kind, loss: float | None, weight: float, said: str):
    scaler, optimizer = kind(give_up_after=2), Momentum(1)
    optimizer.weights[0][:] = weight

    def iterate() -> None:
        scaler.scale(np.float32(1.0))
        optimizer.weights[0].grad = np.float32([math.nan])
        scaler.step(optimizer, **({} if loss is None else {"loss": loss}))
        scaler.update()

    iterate()
    with pytest.raises(gradscale.TrainingStalledError) as caught:
        iterate()
    assert said in str(caught.value)
    assert (LEFT_OVER in str(caught.value)) == bool(said)


@pytest.mark.parametrize("gradients", [[np.float32([1.0])], [np.float32([0.0])], []], ids=["finite", "zeros", "none"])
@pytest.mark.parametrize("odd", range(3))
def test_a_rank_whose_gradients_are_finite_names_the_ranks_whose_logs_have_the_cause(gradients: list, odd: int):
    def rank(group) -> str:
        guard, optimizer = StepGuard(group=group, give_up_after=1, backend="numpy"), Tree()
        optimizer.grads = [np.float32([math.inf])] if group.rank == odd else [*gradients]
        with pytest.raises(gradscale.TrainingStalledError) as caught:
            guard.step(optimizer)
        return str(caught.value).partition("no weight has changed since")[2]

    for place, said in enumerate(run_ranks(3, rank)):
        other = f". No gradient of this rank is inf or NaN: the log of rank {odd} may have the cause"
        assert said.endswith(other) == (place != odd), said
        assert ("Cause: model" in said) == (place == odd)


def test_refusals_of_the_program_are_no_stall_and_end_none():
    scaler = KINDS["scaler"](warn_after=2, give_up_after=3)
    run_two(scaler, 1.0, 1.0, times=5, refused=True)
    run_two(scaler, math.nan, 1.0)
    run_two(scaler, 1.0, 1.0, refused=True)
    with pytest.warns(gradscale.TrainingStalledWarning, match="2 steps of Tree was skipped: 2 for non-finite"):
        run_two(scaler, math.nan, 1.0)
    run_two(scaler, 1.0, 1.0, refused=True)
    with pytest.raises(gradscale.TrainingStalledError, match="3 steps of Tree was skipped: 3 for non-finite"):
        run_two(scaler, math.nan, 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_jobs_that_each_end_too_soon_give_up_together(kind: str):
    scaler, resumed = (KINDS[kind](give_up_after=10) for _ in range(2))
    run_two(scaler, 1.0, math.inf, times=6)
    saved = json.loads(json.dumps(scaler.state_dict()))
    resumed.load_state_dict(saved)
    run_two(resumed, 1.0, math.inf, times=3)
    with pytest.raises(gradscale.TrainingStalledError, match="10 steps of Critic was skipped: 10 for non-finite"):
        run_two(resumed, 1.0, math.inf)
    # A scaler that gives up for none has no such key, and takes it.
    other = KINDS[kind]()
    other.load_state_dict(saved)
    assert "streaks" not in other.state_dict()


def given_up(group, streaks: str | None = None) -> int:
    """Train on bad gradients until all ranks give up; in which step."""
    scaler, optimizer = gradscale.ShardedGradScaler(group=group, give_up_after=4), Tree()
    if streaks is not None:
        scaler.load_state_dict(scaler.state_dict() | {"streaks": streaks, "iteration": 1})
    for number in range(5):
        optimizer.grads = scaler.scale([np.float32([math.nan])])
        scaler.step(optimizer)
        try:
            scaler.update()
        except gradscale.TrainingStalledError:
            return number
    return -1


@pytest.mark.parametrize("odd", range(3))
def test_a_rank_that_has_joined_later_gives_up_in_the_same_call(odd: int):
    def rank(group) -> int:
        return given_up(group, '[{"overflow": 2}]' if group.rank == odd else None)

    assert gradscale.testing.run_ranks(3, rank) == [1] * 3
    # Of a first step, too.
    saved = ['[{"spike": 1}]', '[{"spike": 3}]']
    assert gradscale.testing.run_ranks(2, lambda group: given_up(group, saved[group.rank])) == [0] * 2


def test_a_new_optimizer_does_not_go_on_with_the_streak_of_one_that_is_gone():
    def rank(group) -> list[str]:
        guard, first = StepGuard(group=group, give_up_after=3), Tree()
        for _ in range(2):
            first.grads = [np.float32([math.nan])]
            guard.step(first)
        if group.rank == 0:
            # On this rank it lives until it is collected.
            first.itself = first
        del first
        second = Tree()
        for _ in range(2):
            second.grads = [np.float32([math.nan])]
            guard.step(second)
        with pytest.raises(gradscale.TrainingStalledError, match="the last 3 steps of Tree"):
            guard.step(second)
        return [step.reason for step in guard.history]

    assert gradscale.testing.run_ranks(2, rank) == [["overflow"] * 5] * 2


BAD_STREAKS = [
    3,
    None,
    "",
    "{",
    "{}",
    "[3]",
    '[{"overflow": -1}]',
    '[{"spike": "many"}]',
    '[{"overflow": 1e400}]',
    "[" * 10**5,
]


@pytest.mark.parametrize("streaks", BAD_STREAKS, ids=lambda streaks: str(streaks)[:20])
def test_streaks_that_no_scaler_has_saved_are_not_loaded(streaks: object):
    scaler = gradscale.GradScaler(give_up_after=2)
    with pytest.raises(gradscale.StateDictError, match="streaks must be"):
        scaler.load_state_dict(scaler.state_dict() | {"streaks": streaks})


@pytest.mark.parametrize("runs", [8, *later("ranks", 50), *later("all", 10_000)])
def test_no_healthy_run_is_taken_for_a_stalled_one(runs: int):
    random = np.random.default_rng(runs)
    optimizer = Tree()
    for _ in range(runs):
        settings = {"growth_factor": random.choice([1.1, 2.0, 4.0]), "backoff_factor": random.choice([0.5, 0.8])}
        settings |= {"growth_interval": int(random.choice([1, 5, 20])), "hysteresis": int(random.choice([1, 2]))}
        policy = gradscale.DynamicScale(init_scale=2.0 ** random.choice([0, 10, 16, 24, 32, 60]), **settings)
        scaler = gradscale.GradScaler(policy=policy)
        # The largest scale at which float16 holds the gradients wanders, and jumps now and then.
        limit = random.uniform(1.0, 24.0)
        for _ in range(120):
            limit = max(0.5, limit + random.normal(0.0, 0.5) + random.choice([0.0, -6.0, 6.0], p=[0.98, 0.01, 0.01]))
            iterate_plainly(scaler, optimizer, np.inf if scaler.get_scale() > 2.0**limit else 1.0)
        counts = scaler.counts()
        assert counts["taken"] + counts["overflow"] == 120


@pytest.mark.parametrize("skip", [None, gradscale.SkipSpikes(of="loss")], ids=["no rule", "a rule"])
def test_a_run_whose_every_loss_is_nan_is_told_that_such_a_loss_is_a_spike(skip: gradscale.SkipSpikes | None):
    guard, optimizer = gradscale.StepGuard(skip=skip, warn_after=2), Tree([np.float32([1.0])])
    guard.step(optimizer, loss=math.nan)
    with pytest.warns(gradscale.TrainingStalledWarning) as caught:
        guard.step(optimizer, loss=math.nan)
    (said,) = [str(one.message) for one in caught]
    assert ("which may be too strict" in said) == (skip is not None)
    assert said.endswith(". A loss that step() is given is a spike, too, if it is not finite")
