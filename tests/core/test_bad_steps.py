"""Steps that are skipped for another reason than an overflow: spikes by a rule, and what the user refuses."""

from __future__ import annotations

import copy
import gc
import json
import logging
import math
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
from libraries import Library
from optimizers import Tree

import gradscale

RULE = gradscale.SkipSpikes(window=8, min_values=4, of="loss")
ONE = gradscale.StaticScale(1.0)


class Optimizer(Tree):
    """Evaluates a closure three times."""

    def step(self, closure=None) -> str:
        for _ in range(0 if closure is None else 3):
            closure()
        return super().step()


def iterate(
    scaler: gradscale.GradScaler, optimizer: Optimizer, loss: float, gradient: float = 1.0, **clip
) -> gradscale.StepReport:
    """Make one iteration."""
    scaler.scale(np.float32(loss))
    optimizer.grads = [np.full(3, gradient * scaler.get_scale(), np.float32)]
    if clip:
        scaler.unscale_(optimizer, **clip)
    scaler.step(optimizer)
    scaler.update()
    return scaler.last_step(optimizer)


def trained(steps: int = 5, **settings) -> tuple[gradscale.GradScaler, Optimizer]:
    """Return a scaler and an optimizer after usual steps."""
    scaler, optimizer = gradscale.GradScaler(**{"skip": RULE} | settings), Optimizer()
    for _ in range(steps):
        assert iterate(scaler, optimizer, 1.0).reason == "stepped"
    return scaler, optimizer


def test_a_spike_skips_the_step_and_leaves_the_scale_and_its_trackers():
    scaler, optimizer = trained(policy=gradscale.DynamicScale(init_scale=4.0, growth_interval=7, hysteresis=2))
    before = scaler.state_dict()
    report = iterate(scaler, optimizer, 9.0)
    assert (report.reason, report.by, report.skipped, report.nonfinite, optimizer.steps) == ("spike", 0, True, 0, 5)
    kept = {name: before[name] for name in ("spikes", "counts", "steps")}
    assert {**scaler.state_dict(), "iteration": 6, **kept} == before


def test_an_overflow_in_the_same_step_is_an_overflow_and_teaches_nothing(strict: Library):
    saved = trained(init_scale=4.0)[0].state_dict()
    # The host knows NumPy's verdict when the step is refused, and reads the other one later.
    for xp in (np, strict.xp):
        for names in (["refuse", "unscale_", "step"], ["unscale_", "refuse", "step"]):
            scaler, optimizer = gradscale.GradScaler(skip=RULE), Optimizer()
            scaler.load_state_dict(saved)
            scaler.scale(xp.asarray(9.0, dtype=xp.float32))
            optimizer.grads = [xp.asarray([math.inf], dtype=xp.float32)]
            for name in names:
                getattr(scaler, name)(optimizer)
            scaler.update()
            report = scaler.last_step(optimizer)
            assert (report.reason, report.by, scaler.get_scale()) == ("overflow", 0, 2.0)
            assert scaler.state_dict()["spikes"] == saved["spikes"]


def test_refusing_too_late_or_with_a_disabled_scaler_is_an_error():
    scaler, optimizer = trained()
    scaler.scale(np.float32(1.0))
    optimizer.grads = [np.ones(3, np.float32)]
    scaler.step(optimizer)
    with pytest.raises(gradscale.CallOrderError, match="after step"):
        scaler.refuse(optimizer)
    with pytest.raises(gradscale.InvalidValueError, match="a disabled scaler makes every step"):
        gradscale.GradScaler(enabled=False).refuse(optimizer)


@pytest.mark.parametrize(
    ("outputs", "is_spike"),
    [
        pytest.param([[9.0]], True, id="loss"),
        pytest.param([[1.0], [9.0], [1.0]], True, id="mean-above"),
        pytest.param([[9.0], [-7.0]], False, id="mean-of-accumulation"),
        pytest.param([[1.0], [9.0, 9.0]], False, id="not-of-several-elements"),
        pytest.param([[[9.0]]], True, id="two-axes"),
        pytest.param([[1.0], 9], False, id="not-of-integers"),
        pytest.param([[1.0], np.complex64(9.0)], False, id="not-of-complex-numbers"),
        pytest.param([[9.0], {"loss": -7.0}], False, id="given"),
        pytest.param([[1.0], {"loss": 17.0}], True, id="given-mean"),
        pytest.param([{"loss": np.float64(9.0)}], True, id="given-array"),
        pytest.param([{"loss": np.ones((1, 1)) * 9.0}], True, id="given-array-of-two-axes"),
        pytest.param([{"loss": 10**400}], True, id="given-beyond-any-float"),
        pytest.param([{"loss": False}], False, id="none"),
        pytest.param([[9.0], {"loss": False}, [9.0]], True, id="none-between"),
        pytest.param([[1.0], {"loss": False}, [9.0]], True, id="mean-around-none"),
        pytest.param([[9.0], {"loss": False}, [-7.0]], False, id="mean-of-accumulation-around-none"),
    ],
)
def test_what_scale_is_given_is_judged(outputs: list[Any], is_spike: bool):
    scaler, optimizer = trained(policy=ONE)
    for one in outputs:
        if isinstance(one, dict):
            scaler.scale(np.float32(5.0), **one)
        else:
            scaler.scale(np.asarray(one) if isinstance(one, int) else one if np.ndim(one) == 0 else np.float32(one))
    optimizer.grads = [np.ones(3, np.float32)]
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).skipped == is_spike


@pytest.mark.parametrize("loss", ["1.0", True, np.ones(2, np.float32), np.int32(1), 1j, [1.0]], ids=str)
def test_a_loss_of_another_kind_is_refused(loss):
    scaler, _ = trained()
    with pytest.raises(gradscale.InvalidTypeError, match="loss must be a number"):
        scaler.scale(np.float32(1.0), loss=loss)


def test_losses_are_averaged_to_the_same_bits_as_numbers_and_as_arrays_of_a_device(strict: Library):
    windows = []
    for xp in (np, strict.xp):
        scaler, optimizer = gradscale.GradScaler(policy=ONE, skip=RULE), Optimizer()
        for each in (3.1, 3.0, 3.0000002):
            scaler.scale(xp.asarray(each, dtype=xp.float32))
        optimizer.grads = [xp.ones(3, dtype=xp.float32)]
        scaler.step(optimizer)
        scaler.update()
        windows.append(scaler.state_dict()["spikes"])
    assert windows[0] == windows[1]


@pytest.mark.parametrize(
    ("given", "clip", "told"),
    [
        pytest.param(np.ones(2, np.float32), {}, 1, id="losses-of-several-elements"),
        pytest.param(np.float32(1.0), {}, 0, id="loss"),
        pytest.param(np.ones(2, np.float32), {"max_norm": 1.0}, 0, id="norm"),
        pytest.param(False, {}, 0, id="nothing-on-purpose"),
    ],
)
def test_a_rule_that_has_nothing_to_judge_is_told_of_once(given, clip: dict[str, float], told: int):
    scaler, optimizer = gradscale.GradScaler(policy=ONE, skip=gradscale.SkipSpikes()), Optimizer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            scaler.scale(np.float32(1.0), loss=False) if given is False else scaler.scale(given)
            optimizer.grads = [np.ones(3, np.float32)]
            if clip:
                scaler.unscale_(optimizer, **clip)
            scaler.step(optimizer)
            scaler.update()
    assert [str(one.message)[:38] for one in caught] == ["skip= judges loss and norm, and found "] * told


def test_that_warning_as_an_error_comes_before_anything_is_touched():
    scaler, optimizer = gradscale.GradScaler(init_scale=4.0, skip=RULE), Optimizer()
    scaler.scale(np.ones(2, np.float32))
    optimizer.grads = [np.full(3, 4.0, np.float32)]
    with pytest.raises(UserWarning, match="found nothing in this step"):
        scaler.step(optimizer)
    scaler.step(optimizer)
    assert (optimizer.grads[0].tolist(), optimizer.steps) == ([1.0] * 3, 1)


def test_so_many_optimizers_that_none_is_ever_judged_are_told_of():
    scaler, kept = gradscale.GradScaler(skip=RULE), [Optimizer() for _ in range(65)]
    for optimizer in kept[:-1]:
        iterate(scaler, optimizer, 1.0)
    with pytest.warns(UserWarning, match="has begun window 65, one for each optimizer that is alive"):
        iterate(scaler, kept[-1], 1.0)


def test_a_window_in_a_state_dict_is_a_copy():
    scaler, _ = trained()
    other = gradscale.GradScaler(skip=RULE)
    other.load_state_dict(saved := scaler.state_dict())
    other.state_dict()["spikes"][0]["loss"]["values"].clear()
    assert other.state_dict()["spikes"] == saved["spikes"]


def test_a_closure_that_failed_is_judged_by_its_first_evaluation_when_it_is_tried_again():
    scaler, optimizer = trained(policy=ONE)
    losses = iter([1.0, None, 9.0])

    def closure():
        loss = next(losses)
        if loss is None:
            raise MemoryError
        scaler.scale(np.float32(loss))
        optimizer.grads = [np.ones(3, np.float32)]

    with pytest.raises(MemoryError):
        scaler.step(optimizer, closure)
    scaler.step(optimizer, closure)
    assert scaler.last_step(optimizer).reason == "spike"


def test_the_loss_of_an_evaluation_that_failed_is_not_judged():
    scaler, optimizer = trained(policy=ONE)
    losses = iter([9.0, 1.0, 1.0, 1.0])

    def closure():
        scaler.scale(np.float32(loss := next(losses)))
        if loss == 9.0:
            raise MemoryError
        optimizer.grads = [np.ones(3, np.float32)]

    with pytest.raises(MemoryError):
        scaler.step(optimizer, closure)
    scaler.step(optimizer, closure)
    assert scaler.last_step(optimizer).reason == "stepped"


@pytest.mark.parametrize(("size", "first"), [(1, 1.0), (2, 1.0), (2, math.inf)])
def test_refusing_a_later_evaluation_of_a_closure_is_an_error_on_every_rank_but_after_an_overflow(
    size: int, first: float
):
    def train(group) -> tuple[str, int]:
        optimizer, calls = Optimizer(), []
        over = {"group": group} if size > 1 else {}
        scaler = (gradscale.ShardedGradScaler if size > 1 else gradscale.GradScaler)(init_scale=1024.0, **over)

        def closure():
            calls.append(1)
            if len(calls) == 2 and group.rank == size - 1:
                scaler.refuse(optimizer)
            scaler.scale(np.float32(1.0))
            optimizer.grads = [np.float32([first if len(calls) == 1 else 1.0])]

        if first == math.inf:
            scaler.step(optimizer, closure)
            return scaler.last_step(optimizer).reason, optimizer.steps
        with pytest.raises(gradscale.CallOrderError, match=r"in evaluation 2 of a closure.*restore its parameters"):
            scaler.step(optimizer, closure)
        return "raised", optimizer.steps

    assert gradscale.testing.run_ranks(size, train) == [("refused" if first == math.inf else "raised", 0)] * size


def test_a_refusal_is_of_an_optimizer_that_is_stepped_afterwards():
    scaler, optimizer = trained()
    for wrong in ("adam", object()):
        with pytest.raises(gradscale.InvalidTypeError, match=r"an optimizer must have step\(\)"):
            scaler.refuse(wrong)  # type: ignore[arg-type]
    scaler.scale(np.float32(1.0))
    scaler.refuse(wrapped := Optimizer())
    optimizer.grads = [np.ones(3, np.float32)]
    with pytest.raises(gradscale.CallOrderError, match="the middle of iteration 6"):
        copy.deepcopy(scaler)
    scaler.step(optimizer)
    with pytest.raises(gradscale.CallOrderError, match=r"nor stepped: call step\(\) of the same object"):
        scaler.update()
    scaler.step(wrapped)
    scaler.update()
    assert wrapped.steps == 0
    # One that cannot be stepped, or is gone.
    scaler.refuse(Optimizer())
    scaler.update(scaler.get_scale())
    scaler.load_state_dict(scaler.state_dict())


def test_a_closure_is_judged_by_its_first_evaluation():
    scaler, optimizer = trained(policy=ONE)
    losses = iter([1.0, 50.0, 50.0, 9.0, 1.0, 1.0])

    def closure() -> float:
        loss = next(losses)
        scaler.scale(np.float32(loss))
        optimizer.grads = [np.ones(3, np.float32)]
        return loss

    for reason, steps in (("stepped", 6), ("spike", 6)):
        scaler.step(optimizer, closure)
        scaler.update()
        assert (scaler.last_step(optimizer).reason, optimizer.steps) == (reason, steps)


def losses(steps: int = 60) -> list[float]:
    generator = np.random.default_rng(0)
    return [float(generator.normal() + (20.0 if step % 7 == 6 else 5.0)) for step in range(steps)]


@pytest.mark.parametrize("road", ["state_dict", "json", "pickle", "deepcopy"])
def test_a_resumed_run_decides_bit_for_bit_alike(road: str):
    settings: dict[str, Any] = {"skip": gradscale.SkipSpikes(window=16, deviations=2.0), "policy": ONE}
    scaler, optimizer = trained(0, **settings)
    for loss in losses():
        iterate(scaler, optimizer, loss, loss, max_norm=1.0)
    if road in ("pickle", "deepcopy"):
        other = pickle.loads(pickle.dumps(scaler)) if road == "pickle" else copy.deepcopy(scaler)
    else:
        other = gradscale.GradScaler(**settings)
        saved = scaler.state_dict()
        other.load_state_dict(json.loads(json.dumps(saved)) if road == "json" else saved)
    twin = Optimizer()
    for loss in losses():
        here, there = (iterate(one, of, loss, loss, max_norm=1.0) for one, of in ((scaler, optimizer), (other, twin)))
        assert here.reason == there.reason
    assert other.state_dict() == scaler.state_dict()
    assert "spike" in {report.reason for report in other.history}


def loaded(scaler: gradscale.GradScaler) -> gradscale.GradScaler:
    scaler.load_state_dict(scaler.state_dict())
    return scaler


@pytest.mark.parametrize(
    "road", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler)), loaded], ids=["copy", "pickle", "load"]
)
def test_a_loss_that_was_scaled_before_a_copy_or_a_load_is_judged(road):
    scaler, optimizer = trained(policy=ONE)
    scaler.scale(np.float32(9.0))
    other = road(scaler)
    optimizer.grads = [np.ones(3, np.float32)]
    other.step(optimizer)
    assert other.last_step(optimizer).reason == "spike"


@pytest.mark.parametrize(
    ("spikes", "message"),
    [
        pytest.param({"loss": 1}, "spikes must be a list", id="mapping"),
        pytest.param([3], r"spikes\[0\] must be a mapping", id="number"),
        pytest.param([{"loss": [1.0]}], r"spikes\[0\]\['loss'\] must be a mapping", id="list"),
        pytest.param([{"loss": {"values": "1"}}], r"'values'\] must be a list", id="text"),
        pytest.param([{"loss": {"values": [math.nan], "skipped": 0}}], r"'values'\] must be", id="nan"),
        pytest.param([{"loss": {"values": [1e39], "skipped": 0}}], r"'values'\] must be", id="too-large"),
        pytest.param([{"loss": {"values": [1.0], "skipped": -1}}], r"'skipped'\] must be", id="negative"),
        pytest.param([{"loss": {"values": [1.0]}}], r"'skipped'\] must be", id="missing"),
    ],
)
def test_bad_windows_in_a_state_dict_change_nothing(spikes, message: str):
    scaler, _ = trained()
    before = scaler.state_dict()
    with pytest.raises(gradscale.StateDictError, match=message):
        scaler.load_state_dict(before | {"spikes": spikes})
    assert scaler.state_dict() == before


def test_a_state_dict_without_windows_begins_new_ones():
    scaler, optimizer = trained()
    without = {name: value for name, value in scaler.state_dict().items() if name != "spikes"}
    scaler.load_state_dict(without)
    assert iterate(scaler, optimizer, 99.0).reason == "stepped"


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
def test_a_loss_that_is_not_finite_skips_nothing_before_there_are_values_and_an_overflow_comes_first(value: float):
    scaler, optimizer = gradscale.GradScaler(init_scale=4.0, skip=gradscale.SkipSpikes(window=4)), Optimizer()
    reasons = [iterate(scaler, optimizer, loss).reason for loss in (1.0, value, 1.0, value)]
    assert reasons == ["stepped", "stepped", "stepped", "spike"]
    assert (iterate(scaler, optimizer, value, value).reason, scaler.get_scale()) == ("overflow", 2.0)


def test_saved_windows_of_losses_are_not_taken_for_those_of_norms():
    saved = trained(policy=ONE, skip=gradscale.SkipSpikes(window=8, of="loss"))[0].state_dict()
    scaler, optimizer = gradscale.GradScaler(policy=ONE, skip=gradscale.SkipSpikes(window=8, of="norm")), Optimizer()
    scaler.load_state_dict(saved)
    assert iterate(scaler, optimizer, 1.0, 99.0, max_norm=1e9).reason == "stepped"
    [window] = scaler.state_dict()["spikes"]
    assert list(window) == ["norm"]
    assert len(window["norm"]["values"]) == 1


def test_a_shorter_window_goes_on_from_the_last_of_the_saved_values():
    saved = trained(policy=ONE)[0].state_dict()
    saved["spikes"][0]["loss"]["values"] = [1.0, 2.0, 3.0, 4.0, 5.0]
    scaler, optimizer = gradscale.GradScaler(policy=ONE, skip=gradscale.SkipSpikes(window=4, of="loss")), Optimizer()
    scaler.load_state_dict(saved)
    iterate(scaler, optimizer, 6.0)
    assert scaler.state_dict()["spikes"][0]["loss"]["values"] == [3.0, 4.0, 5.0, 6.0]


def test_what_is_unscaled_and_not_stepped_is_not_learned():
    scaler, optimizer = trained(policy=ONE, skip=gradscale.SkipSpikes(window=8))
    other = Optimizer()
    for value, skips in ((50.0, []), (2.0, [other])):
        scaler.scale(np.float32(value))
        for each in (optimizer, other):
            each.grads = [np.float32([value])]
            scaler.unscale_(each, max_norm=1e9)
        for each in skips:
            scaler.step(each)
        scaler.update()
    windows = [{name: one["values"] for name, one in each.items()} for each in scaler.state_dict()["spikes"]]
    assert windows == [{"loss": [1.0] * 5, "norm": []}, {"loss": [2.0], "norm": [2.0]}]


def test_a_spike_counts_whether_its_step_is_called_or_left_out_and_a_scale_is_set():
    counts = []
    for is_called, new_scale in ((True, None), (False, None), (True, 1.0)):
        scaler, optimizer = trained(policy=ONE)
        for value in (9.0, 9.0):
            scaler.scale(np.float32(value))
            optimizer.grads = [np.ones(3, np.float32)]
            scaler.unscale_(optimizer)
            if is_called:
                scaler.step(optimizer)
            scaler.update(new_scale)
        counts.append(scaler.state_dict()["spikes"])
    assert counts == [[{"loss": {"values": [1.0] * 5, "skipped": 2}}]] * 3


def test_refusing_while_a_step_is_under_way_is_an_error_and_changes_nothing():
    class Refusing(Optimizer):
        def step(self, closure=None) -> str:
            with pytest.raises(gradscale.CallOrderError, match=r"refuse\(\) was called while another call"):
                scaler.refuse(self)
            return super().step(closure)

    scaler, optimizer = gradscale.GradScaler(init_scale=4.0, skip=RULE), Refusing()
    for _ in range(3):
        assert iterate(scaler, optimizer, 1.0).reason == "stepped"
    saved = scaler.state_dict()
    assert (optimizer.steps, saved["_growth_tracker"], saved["spikes"][0]["loss"]["values"]) == (3, 3, [1.0] * 3)


def test_a_new_optimizer_continues_the_window_of_one_that_is_deleted_in_a_cycle():
    class Cyclic(Optimizer):
        def __init__(self):
            super().__init__()
            self.owner = self

    gc.collect()
    gc.disable()
    try:
        scaler = gradscale.GradScaler(skip=RULE)
        reasons = [iterate(scaler, Cyclic(), loss).reason for loss in (1.0, 1.0, 1.0, 1.0, 9.0)]
    finally:
        gc.enable()
    assert reasons == ["stepped"] * 4 + ["spike"]
    assert len(scaler.state_dict()["spikes"]) == 1


def test_what_is_no_rule_is_refused():
    with pytest.raises(gradscale.InvalidTypeError, match="skip must be a SkipSpikes"):
        gradscale.GradScaler(skip="spikes")  # type: ignore[arg-type]


def test_callbacks_logs_and_schedules_tell_a_spike_from_an_overflow(caplog, tmp_path):
    log = gradscale.callbacks.JSONLines(tmp_path / "scale.jsonl")
    skipped: list[Any] = []
    scaler, optimizer = trained(
        on_skip=[lambda report: skipped.append(report.reason)], on_update=[gradscale.callbacks.LogUpdates(), log]
    )
    stepped: list[int] = []
    schedule = type("Schedule", (), {"step": lambda _: stepped.append(1)})()
    with caplog.at_level(logging.WARNING):
        for loss, gradient in ((9.0, 1.0), (1.0, math.inf)):
            iterate(scaler, optimizer, loss, gradient)
            scaler.step_schedule(optimizer, schedule)
        scaler.refuse(optimizer)
        iterate(scaler, optimizer, 1.0)
    assert skipped == ["spike", "overflow", "refused"]
    assert stepped == []
    rows = [json.loads(row) for row in (tmp_path / "scale.jsonl").read_text().splitlines()]
    assert [row["reason"] for row in rows] == [None] * 5 + skipped
    assert [text.partition(": ")[2] for text in caplog.messages] == [
        "step skipped: rank 0 saw a spike",
        "step skipped at scale 65536, 1 non-finite gradient (inf or NaN)",
        "step skipped: rank 0 refused it",
    ]


class Declining(Optimizer):
    """Makes no step of its own accord while it has an answer to give."""

    answer: Any = None

    def step(self, closure=None):
        if self.answer is None:
            return super().step(closure)
        if closure is not None:
            closure()
        return self.answer


def declining(answer, **settings) -> tuple[gradscale.GradScaler, Declining]:
    """Return a scaler and an optimizer that has made two steps, and declines the next one."""
    scaler, optimizer = gradscale.GradScaler(init_scale=4.0, growth_interval=3, **settings), Declining()
    for _ in range(2):
        iterate(scaler, optimizer, 1.0)
    optimizer.answer = answer
    return scaler, optimizer


@pytest.mark.parametrize("answer", [gradscale.NOT_STEPPED, (False, None, None)], ids=str)
def test_a_step_that_the_optimizer_itself_does_not_make_counts_as_refused_and_moves_nothing(answer):
    told: list[gradscale.StepReport] = []
    scaler, optimizer = declining(answer, skip=RULE, on_skip=told.append)
    before = scaler.state_dict()
    scaler.scale(np.float32(2.0))
    optimizer.grads = [np.full(3, 4.0, np.float32)]
    assert scaler.step(optimizer) == answer
    scaler.update()
    assert [(one.reason, one.by, one.skipped) for one in told] == [("refused", 0, True)]
    assert scaler.last_step(optimizer) == told[0]
    counts = {"taken": 2, "overflow": 0, "spike": 0, "refused": 1}
    assert scaler.state_dict() == before | {"iteration": 4, "counts": counts}
    scaler.step_schedule(optimizer, Tree())
    optimizer.answer = None
    assert (iterate(scaler, optimizer, 1.0).reason, scaler.get_scale(), optimizer.steps) == ("stepped", 8.0, 3)


@pytest.mark.parametrize(
    "answer", [False, 0.0, (), (0, None), (True, None, None), (np.zeros(2),), [False], "no"], ids=str
)
def test_other_answers_of_an_optimizer_say_nothing(answer):
    scaler, optimizer = declining(answer)
    assert (iterate(scaler, optimizer, 1.0).reason, scaler.get_scale()) == ("stepped", 8.0)


def test_an_optimizer_that_declines_after_its_closure_has_refused_the_step():
    scaler, optimizer = declining(gradscale.NOT_STEPPED)

    def closure():
        scaler.scale(np.float32(1.0))
        optimizer.grads = [np.full(3, 4.0, np.float32)]

    assert scaler.step(optimizer, closure) is gradscale.NOT_STEPPED
    scaler.update()
    assert (scaler.last_step(optimizer).reason, scaler.get_scale()) == ("refused", 4.0)


def test_an_overflow_of_another_optimizer_still_lowers_the_scale():
    scaler, optimizer = declining(gradscale.NOT_STEPPED)
    scaler.scale(np.float32(1.0))
    other = Optimizer()
    optimizer.grads, other.grads = [np.ones(3, np.float32)], [np.float32([math.inf])]
    scaler.step(optimizer)
    scaler.step(other)
    scaler.update()
    assert (scaler.get_scale(), scaler.counts()["refused"], scaler.counts()["overflow"]) == (2.0, 1, 1)


def test_a_run_of_steps_that_the_optimizer_refuses_is_told_of():
    scaler, optimizer = declining(gradscale.NOT_STEPPED, give_up_after=2)
    iterate(scaler, optimizer, 1.0)
    with pytest.raises(gradscale.TrainingStalledError, match=r"2 for a refusal.*or the optimizer refuses it by itself"):
        iterate(scaler, optimizer, 1.0)


def test_not_stepped_is_one_object_in_copies_and_pickles():
    one = gradscale.NOT_STEPPED
    assert all(other is one for other in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))))
    assert (repr(one), str(one)) == ("gradscale.NOT_STEPPED",) * 2
