"""The guard in one call: what a step is given, loss, norm and batch; and the end of its iteration."""

import contextlib
import dataclasses
import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from libraries import Library
from optimizers import Tree
from scenarios import rank_and_size

import gradscale
from gradscale import CallOrderError, GradScaler, InvalidTypeError, InvalidValueError, SkipSpikes, StepGuard
from gradscale.testing import run_ranks

RULE = SkipSpikes(window=8, min_values=4, of="loss")
LOSSES = (1.0, 1.1, 0.9, 1.0, 9.0, 1.0)


def stepped(guard: GradScaler, optimizer: Tree, value: float = 1.0, **inputs: Any) -> gradscale.StepReport:
    """Step by a gradient; the report."""
    optimizer.grads = [np.float32([value])]
    guard.step(optimizer, **inputs)
    return guard.last_step(optimizer)


# The loss.


@pytest.mark.parametrize("is_number", [True, False], ids=["number", "array"])
def test_the_loss_of_a_step_is_judged_in_place_of_that_of_scale(arrays: Library, is_number: bool):
    guard, optimizer, other = StepGuard(skip=RULE), Tree(), StepGuard(skip=RULE)
    for loss in LOSSES:
        given = loss if is_number else arrays.asarray([loss])
        optimizer.grads = [arrays.asarray([1.0])]
        guard.scale(arrays.asarray(1e6))
        guard.step(optimizer, loss=given)
        other.scale(arrays.asarray(loss))
        other.step(optimizer)
        one, two = (each.last_step(optimizer)._replace(loss=None) for each in (guard, other))
        assert one == two
        assert guard.last_step(optimizer).reason == ("spike" if loss == 9.0 else "stepped")
    assert guard.state_dict() == other.state_dict()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("skip", [None, SkipSpikes(of="norm"), RULE], ids=["no rule", "of norms", "of losses"])
def test_a_loss_that_is_not_finite_skips_finite_gradients_and_keeps_the_scale(arrays: Library, skip, bad: float):
    options = {"skip": skip, "max_norm": 9.0}
    for scaler in (StepGuard(**options), GradScaler(init_scale=8.0, growth_interval=1, **options)):
        optimizer = Tree([arrays.asarray([1.0])])
        scaler.scale(arrays.asarray(1.0))
        before = scaler.get_scale()
        scaler.step(optimizer, loss=arrays.asarray(bad))
        scaler.update()
        assert (scaler.last_step(optimizer).reason, optimizer.steps, scaler.get_scale()) == ("spike", 0, before)
        assert scaler.counts()["spike"] == 1


def test_a_loss_that_is_not_finite_and_given_to_scale_alone_skips_nothing():
    guard, optimizer = StepGuard(skip=RULE), Tree()
    guard.scale(np.float32(np.nan))
    assert stepped(guard, optimizer).reason == "stepped"


def test_gradients_that_are_not_finite_are_an_overflow_whatever_the_loss():
    scaler, optimizer = GradScaler(init_scale=8.0), Tree([np.float32([np.inf])])
    scaler.scale(np.float32(1.0))
    scaler.step(optimizer, loss=math.nan)
    scaler.update()
    assert (scaler.last_step(optimizer).reason, scaler.get_scale()) == ("overflow", 4.0)


def test_a_loss_after_unscale_is_an_error_since_the_step_is_judged():
    guard, optimizer = StepGuard(), Tree([np.float32([1.0])])
    guard.unscale_(optimizer)
    with pytest.raises(CallOrderError, match=r"step\(loss=\) was called after unscale_\(\).*give scale\(\) loss="):
        guard.step(optimizer, loss=1.0)
    guard.step(optimizer)
    assert optimizer.steps == 1


def test_a_step_that_fails_is_judged_once_by_its_loss():
    class Failing(Tree):
        fails = True

        def step(self):
            if self.fails:
                raise MemoryError
            return super().step()

    guard, optimizer = StepGuard(skip=RULE), Failing()
    with pytest.raises(MemoryError):
        stepped(guard, optimizer, loss=3.0)
    optimizer.fails = False
    assert stepped(guard, optimizer, loss=3.0).reason == "stepped"
    assert json.loads(guard.state_dict()["spikes"])[0]["loss"]["values"] == [3.0]


# Whose batch it was.


@pytest.mark.parametrize("bad", [math.nan, 1e9], ids=["nan", "spike"])
@pytest.mark.parametrize("odd", range(3))
def test_the_rank_with_the_bad_loss_is_named_though_all_have_its_gradients(odd: int, bad: float):
    def train(group) -> list[Any]:
        rank, _ = rank_and_size(group)
        guard, optimizer = StepGuard(group=group, skip=SkipSpikes(of="loss", above=9.0)), Tree()
        value = math.nan if math.isnan(bad) else math.inf
        # Beside a spike one that is no number goes first.
        losses = [bad if rank == odd else 1.0, (math.nan if rank == odd else 1e9) if math.isnan(bad) else 1.0]
        reports = [stepped(guard, optimizer, value, loss=loss, batch=rank) for loss in losses]
        return [(one.reason, one.by, one.by_loss, str(one.loss), one.batch) for one in reports]

    for rank, told in enumerate(run_ranks(3, train)):
        assert told[0] == ("overflow", odd, True, str(bad if rank == odd else 1.0), rank)
        assert told[1][:3] == (("overflow", odd, True) if math.isnan(bad) else ("overflow", 0, False))


def test_a_log_says_whose_loss_it_was_and_which_batch(caplog: pytest.LogCaptureFixture):
    guard = StepGuard(on_update=gradscale.callbacks.LogUpdates(), skip=SkipSpikes(of="loss", above=9.0))
    for value, loss in ((1.0, 99.0), (math.nan, math.nan), (math.nan, 1.0)):
        stepped(guard, Tree(), value, loss=loss, batch="part-3")
    second = "iteration 2: step skipped"
    assert caplog.messages == [
        "iteration 1: step skipped: rank 0 saw a spike of its loss (here loss 99, batch 'part-3')",
        f"{second}, 1 non-finite gradient (inf or NaN), rank 0 saw a bad loss (here loss nan, batch 'part-3')",
        "iteration 3: step skipped, 1 non-finite gradient (inf or NaN) (here batch 'part-3')",
    ]


# The norm.


def test_a_norm_is_judged_and_the_gradients_are_not_looked_at(arrays: Library):
    guard, optimizer = StepGuard(skip=SkipSpikes(of="norm", above=5.0)), Tree()
    optimizer.grads = [arrays.asarray([math.nan])]
    for norm, reason in ((1.0, "stepped"), (9.0, "spike"), (math.inf, "overflow"), (math.nan, "overflow")):
        for given in (norm, arrays.asarray(norm)):
            guard.step(optimizer, norm=given)
            report = guard.last_step(optimizer)
            assert (report.reason, report.norm) == (reason, norm if math.isfinite(norm) else math.inf)
    assert (optimizer.steps, json.loads(guard.state_dict()["spikes"])[0]["norm"]["values"]) == (2, [1.0, 1.0])


@pytest.mark.torch
def test_values_of_other_libraries_and_dtypes_are_taken():
    import torch

    import gradscale_torch

    parameter = torch.nn.Parameter(torch.ones(3))
    guard, optimizer = gradscale_torch.StepGuard(), torch.optim.SGD([parameter], lr=0.5)
    wide = torch.tensor([[2.0]], dtype=torch.float64, requires_grad=True)
    for given in (np.float32(2.0), np.asarray([2.0]), torch.tensor(2.0, dtype=torch.bfloat16), wide, 2):
        parameter.grad = torch.ones(3)
        guard.step(optimizer, norm=given, loss=given)
        report = guard.last_step(optimizer)
        assert (report.reason, report.norm, report.loss) == ("stepped", 2.0, 2.0)


@pytest.mark.torch
def test_a_loss_without_a_value_and_a_norm_that_cannot_be_read_are_refused_and_the_guard_goes_on():
    import torch

    guard, optimizer, nothing = StepGuard(skip=RULE), Tree([torch.ones(3)]), torch.ones((), device="meta")
    for call in (
        lambda: guard.step(optimizer, loss=nothing),
        lambda: guard.keeps(nothing),
        lambda: guard.scale(torch.ones(()), loss=nothing),
        lambda: guard.step(optimizer, norm=torch.ones(1).to_sparse(), loss=1.0),
    ):
        with pytest.raises(
            InvalidTypeError, match=r"loss must be a number or an array that has a value|norm cannot be r"
        ):
            call()
    guard.step(optimizer, loss=1.0)
    assert guard.counts()["taken"] == optimizer.steps == 1


@pytest.mark.parametrize("norm", [math.nan, math.inf, -1.0])
def test_a_norm_that_is_none_skips_the_step(arrays: Library, norm: float):
    """DeepSpeed gives -1 for a norm that is not finite."""
    guard, optimizer = StepGuard(), Tree([arrays.asarray([1.0])])
    for given in (norm, arrays.asarray(norm)):
        guard.step(optimizer, norm=given)
        report = guard.last_step(optimizer)
        assert (report.reason, report.norm, optimizer.steps) == ("overflow", math.inf, 0)


def test_a_scaler_takes_the_norm_of_gradients_that_were_unscaled(arrays: Library):
    scaler, optimizer = GradScaler(init_scale=8.0, skip=SkipSpikes(above=5.0)), Tree()
    optimizer.grads = [arrays.asarray([8.0])]
    scaler.scale(arrays.asarray(1.0))
    with pytest.raises(CallOrderError, match=r"norm of unscaled gradients: call unscale_\(\) before they are clipped"):
        scaler.step(optimizer, norm=1.0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer, norm=arrays.asarray(9.0))
    assert scaler.last_step(optimizer)[:4] == (True, 8.0, 0, "spike")
    scaler.update()
    scaler.scale(arrays.asarray(1.0))
    scaler.unscale_(optimizer)
    scaler.step(optimizer, norm=math.nan)
    scaler.update()
    assert (scaler.last_step(optimizer).reason, scaler.get_scale(), optimizer.steps) == ("overflow", 4.0, 0)
    # Both were of one loss for each step.
    assert json.loads(scaler.state_dict()["spikes"])[0]["loss"]["values"] == []


@pytest.mark.parametrize("kind", ["guard", "scaler"])
@pytest.mark.parametrize(("norms", "said"), [((1.0, 1.0005), "stepped"), ((1.0, math.nan), "overflow")])
def test_ranks_skip_together_by_their_norms(kind: str, norms, said: str):
    def train(group) -> tuple[str, int | None]:
        rank, _ = rank_and_size(group)
        scaler = StepGuard(group=group) if kind == "guard" else gradscale.ShardedGradScaler(group=group)
        optimizer = Tree([np.float32([1.0])])
        if kind == "scaler":
            scaler.scale(np.float32(1.0))
            scaler.unscale_(optimizer)
        scaler.step(optimizer, norm=np.float32(norms[rank]))
        scaler.update()
        return scaler.last_step(optimizer).reason, scaler.last_step(optimizer).by

    assert run_ranks(2, train) == [(said, None if said == "stepped" else 1)] * 2


@pytest.mark.parametrize("others", [-1.0, 1.0, math.inf, 50.0], ids=str)
@pytest.mark.parametrize("odd", range(2))
def test_a_norm_that_is_none_on_one_rank_skips_the_step_of_all(arrays: Library, odd: int, others: float):
    """DeepSpeed gives -1 for a norm that is not finite; it is no difference of ranks."""

    def train(group) -> list[tuple]:
        rank, _ = rank_and_size(group)
        guard, optimizer = StepGuard(group=group, skip=SkipSpikes(of="norm", above=9.0)), Tree([arrays.asarray([1.0])])
        norms, told = ((1.0, 1.0), (-1.0, others), (1.0, 1.0)), []
        for usual, other in norms:
            norm = usual if rank == odd else other
            guard.step(optimizer, norm=arrays.asarray(norm) if rank else norm)
            report = guard.last_step(optimizer)
            told.append((report.reason, report.by, report.norm == (norm if norm > 0 else math.inf), optimizer.steps))
        return told

    first = 0 if others in (-1.0, math.inf) else odd
    # Rank 1 gives an array, and a count of arrays that the host does not have names no rank.
    is_read = gradscale.registry.backend_for(arrays.asarray(1.0)).peek((arrays.asarray(1.0),)) is not None
    first = None if first == 1 and not is_read else first
    assert (
        run_ranks(2, train)
        == [[("stepped", None, True, 1), ("overflow", first, True, 1), ("stepped", None, True, 2)]] * 2
    )


@pytest.mark.parametrize("norms", [(1.0, 1.01), (1.0, None)], ids=["apart", "one rank alone"])
def test_norms_that_differ_are_an_error_on_every_rank(norms):
    def train(group) -> str:
        guard, optimizer = StepGuard(group=group), Tree([np.float32([1.0])])
        with pytest.raises(gradscale.ScaleDesyncError, match="norm of the gradients: 1 on rank 0") as caught:
            guard.step(optimizer, norm=norms[rank_and_size(group)[0]])
        return str(caught.value)

    assert len(run_ranks(2, train)) == 2


# What is refused, and what goes on to the optimizer.


@pytest.mark.parametrize(
    ("inputs", "error", "said"),
    [
        ({"loss": "1"}, InvalidTypeError, "loss must be a number or a real floating array of one element, got '1'"),
        ({"loss": True}, InvalidTypeError, "loss must be"),
        ({"loss": np.float32([1.0, 2.0])}, InvalidTypeError, "loss must be"),
        ({"norm": np.complex64(1.0)}, InvalidTypeError, "norm must be"),
        ({"batch": 1.5}, InvalidTypeError, "batch must be an int, a string, or a list of these.*got 1.5"),
        ({"batch": [object()]}, InvalidTypeError, "batch must be"),
        ({"loss": 1.0, "closure": float}, InvalidValueError, "a closure takes no loss= and no norm="),
        ({"norm": 1.0, "closure": float}, InvalidValueError, "a closure takes no loss= and no norm="),
    ],
    ids=lambda value: None if isinstance(value, type) else str(value)[:30],
)
def test_what_is_no_input_changes_nothing(inputs: dict[str, Any], error: type[Exception], said: str):
    guard, optimizer = StepGuard(skip=RULE), Tree()
    stepped(guard, optimizer, loss=1.0)
    before = guard.state_dict()
    with pytest.raises(error, match=said):
        stepped(guard, optimizer, **inputs)
    assert (guard.state_dict(), optimizer.steps) == (before, 1)
    assert stepped(guard, optimizer, loss=1.0).reason == "stepped"


def test_a_norm_beside_the_scalers_own_clipping_is_an_error():
    with pytest.raises(InvalidValueError, match=r"norm= .* got a scaler that clips by max_norm="):
        stepped(StepGuard(max_norm=1.0), Tree(), norm=1.0)


@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
def test_an_optimizer_gets_what_its_own_step_names(enabled: bool):
    class Named(Tree):
        def step(self, loss=None, *, batch=None):
            return loss, batch

    class Plain(Tree):
        def step(self):
            return ()

    for optimizer, expected in ((Named(), (2.0, [3, "a"])), (Plain(), ())):
        optimizer.grads = [np.float32([1.0])]
        guard = StepGuard(enabled=enabled)
        assert guard.step(optimizer, loss=2.0, batch=[3, "a"]) == expected
        assert guard.last_step(optimizer).batch == (3, "a")
        assert guard.step(optimizer) == (expected and (None, None))


def test_the_batch_is_in_the_rows_of_a_log(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    with gradscale.callbacks.JSONLines(path) as log:
        guard = StepGuard(on_update=log)
        # Samplers give numbers of NumPy.
        for batch in (7, "part-3", None, np.int64(8), [np.int32(9), np.str_("a")]):
            stepped(guard, Tree(), batch=batch)
    rows = [json.loads(line)["batch"] for line in path.read_text().splitlines()]
    assert rows == [7, "part-3", None, 8, [9, "a"]]


# The end of an iteration.


def test_a_step_ends_its_iteration_and_update_does_nothing_after_it(arrays: Library):
    told: list[gradscale.UpdateReport] = []
    guard, optimizer = StepGuard(on_update=told.append), Tree()
    for number in range(1, 5):
        optimizer.grads = [arrays.asarray([math.nan if number == 2 else 1.0])]
        guard.step(optimizer)
        assert (len(told), told[-1].iteration, told[-1].skipped) == (number, number, number == 2)
        if number % 2:
            guard.update()
    assert guard.counts() == {"taken": 3, "overflow": 1, "refused": 0, "spike": 0}
    assert guard.state_dict()["iteration"] == 5


def test_an_optimizer_that_was_unscaled_is_waited_for():
    guard, first, second = StepGuard(), Tree([np.float32([3.0])]), Tree([np.float32([1.0])])
    guard.unscale_(first, max_norm=1.0)
    guard.step(second)
    assert guard.state_dict()["iteration"] == 1
    guard.step(first)
    assert (guard.state_dict()["iteration"], guard.last_step(first).iteration) == (2, 1)


def test_a_refusal_of_one_rank_waits_for_its_optimizer_through_other_steps():
    def train(group):
        guard, first, second = StepGuard(group=group), Tree(), Tree()
        if rank_and_size(group)[0] == 1:
            guard.refuse(second)
        return [stepped(guard, one)[3:5] for one in (first, second, second)], guard.counts()["refused"]

    assert run_ranks(2, train) == [([("stepped", 1), ("refused", 2), ("stepped", 3)], 1)] * 2


def test_a_loss_serves_each_optimizer_and_enters_a_window_once():
    guard, first, second = StepGuard(skip=RULE), Tree(), Tree()
    for loss in (1.0, 2.0):
        guard.scale(np.float32(loss))
        stepped(guard, first)
        stepped(guard, second)
        # It is no loss of a second step.
        with pytest.warns(UserWarning, match="found nothing in this step") if loss == 1.0 else contextlib.nullcontext():
            stepped(guard, first)
    assert [window["loss"]["values"] for window in json.loads(guard.state_dict()["spikes"])] == [[1.0, 2.0]] * 2


def test_a_loss_that_is_none_ends_the_one_before():
    guard, first, second = StepGuard(skip=SkipSpikes(above=5.0, of="loss")), Tree(), Tree()
    guard.scale(np.float32(9.0))
    assert stepped(guard, first).reason == "spike"
    guard.scale(np.float32(9.0), loss=False)
    assert stepped(guard, second).reason == "stepped"


@pytest.mark.parametrize("calls_update", [True, False], ids=["update", "the next step"])
def test_an_iteration_whose_end_was_interrupted_is_ended_by_the_next_call(calls_update: bool):
    def interrupt(_):
        raise KeyboardInterrupt

    guard, optimizer = StepGuard(on_skip=interrupt), Tree()
    with pytest.raises(KeyboardInterrupt):
        stepped(guard, optimizer, math.nan)
    guard.on_skip = None
    if calls_update:
        guard.update()
    assert (stepped(guard, optimizer).iteration, guard.counts()["overflow"], guard.counts()["taken"]) == (2, 1, 1)


def test_a_run_that_stalls_ends_in_the_step_on_all_ranks():
    def train(group) -> int:
        guard, optimizer = StepGuard(group=group, give_up_after=3), Tree()
        value = math.nan if rank_and_size(group)[0] == 1 else 1.0
        for _ in range(2):
            stepped(guard, optimizer, value)
        with pytest.raises(gradscale.TrainingStalledError, match="each of the last 3 steps of Tree"):
            stepped(guard, optimizer, value)
        return guard.counts()["overflow"]

    assert run_ranks(2, train) == [3, 3]


@pytest.mark.parametrize("has_array", [True, False], ids=["after a loss", "first of all"])
def test_a_guard_steps_nothing_without_gradients_and_says_so_once(has_array: bool):
    guard, optimizer = StepGuard(), Tree([])
    if has_array:
        guard.scale(np.float32(1.0))
    with pytest.warns(UserWarning, match="none of whose parameters has a gradient.*Said once"):
        assert guard.step(optimizer) is None
    guard.update()
    assert guard.step(optimizer) is None
    assert (guard.last_step(optimizer).reason, optimizer.steps, guard.counts()["taken"]) == ("no gradients", 0, 0)
    assert stepped(guard, optimizer).reason == "stepped"


def test_a_loss_that_was_scaled_and_no_step_is_an_error_of_update():
    guard = StepGuard()
    guard.update()
    guard.scale(np.float32(1.0))
    with pytest.raises(CallOrderError, match="no optimizer was unscaled or stepped by the scaler"):
        guard.update()


# Rules that only look.


@pytest.mark.parametrize("is_number", [True, False], ids=["number", "array"])
def test_a_rule_that_does_not_act_skips_nothing_and_counts_what_it_sees(arrays: Library, is_number: bool, caplog):
    caplog.set_level(logging.INFO, "gradscale")
    rule = dataclasses.replace(RULE, act=False)
    guard, optimizer = StepGuard(skip=rule, on_update=gradscale.callbacks.LogUpdates()), Tree()
    reports = []
    for loss in LOSSES:
        optimizer.grads = [arrays.asarray([1.0])]
        guard.step(optimizer, loss=loss if is_number else arrays.asarray(loss), batch=7)
        reports.append(guard.last_step(optimizer))
    assert [report.reason for report in reports] == ["stepped"] * 6
    assert [report.by for report in reports] == [0 if loss == 9.0 else None for loss in LOSSES]
    assert [report.by_loss for report in reports] == [loss == 9.0 for loss in LOSSES]
    assert guard.counts() == {"taken": 6, "overflow": 0, "spike": 0, "refused": 0, "spikes seen": 1}
    own = "" if reports[4].loss is None else "loss 9, "
    said = f"iteration 5: rank 0 saw a spike of its loss (here {own}batch 7); the rule has act=False"
    assert [record.message for record in caplog.records] == [said]
    # Its value was learned, as that of any step that is made.
    assert json.loads(guard.state_dict()["spikes"])[0]["loss"]["values"] == pytest.approx(LOSSES)
    # It hides nothing else.
    optimizer.grads = [arrays.asarray([math.nan])]
    guard.step(optimizer, loss=9.0)
    assert guard.last_step(optimizer).reason == "overflow"
    optimizer.grads = [arrays.asarray([1.0])]
    guard.step(optimizer, loss=math.nan)
    assert guard.last_step(optimizer).reason == "spike"


def test_ranks_tell_each_other_of_a_spike_that_they_only_look_at():
    rule = dataclasses.replace(RULE, act=False)

    def rank(group) -> list[Any]:
        guard, optimizer, seen = StepGuard(group=group, skip=rule), Tree(), []
        for loss in LOSSES:
            report = stepped(guard, optimizer, loss=loss if group.rank == 1 else 1.0)
            seen.append((report.reason, report.by, report.by_loss))
        return [*seen, guard.counts()["spikes seen"]]

    nothing = ("stepped", None, False)
    assert run_ranks(3, rank) == [[*[nothing] * 4, ("stepped", 1, True), nothing, 1]] * 3


# Rules that are given nothing.


@pytest.mark.parametrize(("skip", "inputs"), [(RULE, {"norm": 1.0}), (SkipSpikes(of="norm"), {"loss": 1.0})])
def test_a_guard_whose_rule_never_had_a_value_refuses_to_step(skip: SkipSpikes, inputs: dict[str, float]):
    guard, optimizer = StepGuard(skip=skip), Tree()
    for _ in range(2):
        with pytest.raises(InvalidValueError, match=r"and found nothing in this step: give step\(\) loss="):
            stepped(guard, optimizer, **inputs)
    assert (optimizer.steps, guard.counts()["taken"]) == (0, 0)
    # What is missing later is told of once.
    stepped(guard, optimizer, loss=1.0, norm=1.0)
    with pytest.warns(UserWarning, match="found nothing in this step") as caught:
        assert [stepped(guard, optimizer, **inputs).reason for _ in range(2)] == ["stepped"] * 2
    assert len(caught) == 1


@pytest.mark.filterwarnings("ignore:skip= judges loss, and found nothing in this step:UserWarning")
@pytest.mark.parametrize("is_clipped", [True, False], ids=["clipped", "plain"])
def test_ranks_of_which_one_has_a_value_are_right_and_all_refuse_if_none_has(is_clipped: bool):
    def rank(group) -> tuple[list[int], int]:
        guard, optimizer = StepGuard(group=group, skip=RULE, max_norm=9.0 if is_clipped else None), Tree()
        made: list[int] = []
        for has_loss in (False, False, True, False):
            inputs = {"loss": 1.0} if has_loss and group.rank == 1 else {}
            said = "found nothing in this step"
            with contextlib.nullcontext() if sum(made) or has_loss else pytest.raises(InvalidValueError, match=said):
                stepped(guard, optimizer, **inputs)
            made.append(optimizer.steps)
        return made, guard.counts()["taken"]

    assert run_ranks(2, rank) == [([0, 0, 1, 2], 2)] * 2


def test_a_norm_of_a_call_that_was_refused_is_not_that_of_the_next_call():
    guard, optimizer = StepGuard(skip=RULE), Tree()
    with pytest.raises(InvalidValueError, match="found nothing in this step"):
        stepped(guard, optimizer, norm=1.0)
    guard.scale(np.float32(1.0))
    assert (stepped(guard, optimizer, math.inf).reason, optimizer.steps) == ("overflow", 0)


def test_a_loss_of_a_call_without_gradients_is_not_that_of_the_next_call():
    guard, optimizer = StepGuard(), Tree([np.float32([1.0])])
    guard.scale(np.float32(1.0))
    guard.step(optimizer)
    guard.keeps(1.0)
    optimizer.grads = [None]
    with pytest.warns(UserWarning, match="none of whose parameters has a gradient"):
        guard.step(optimizer, loss=1.0)
    assert stepped(guard, optimizer).reason == "stepped"


# What is held.


@pytest.mark.parametrize("kind", [StepGuard, GradScaler])
def test_arrays_that_the_program_writes_are_put_back_if_a_step_is_skipped(arrays: Library, kind: type[GradScaler]):
    average, optimizer = arrays.asarray([0.0, 0.0]), Tree()
    if arrays.name.startswith("jax") or arrays.readonly:
        with pytest.raises(InvalidTypeError, match=r"hold must be .*in a compiled step gradscale\.select chooses"):
            kind(hold=average)
        return
    scaler = kind(hold=[average])
    for value, gradient in ((1.0, 1.0), (math.nan, math.nan), (2.0, math.inf), (3.0, 1.0)):
        average[...] = arrays.asarray([value, value])
        optimizer.grads = [arrays.asarray([gradient])]
        scaler.scale(arrays.asarray(1.0))
        scaler.step(optimizer)
        scaler.update()
        arrays.assert_array(average, [3.0 if value == 3.0 else 1.0] * 2)


@pytest.mark.parametrize("odd", range(2))
@pytest.mark.parametrize("kind", [StepGuard, gradscale.ShardedGradScaler])
def test_an_array_that_can_no_longer_be_written_is_named_and_put_back_once_it_can_be(kind, odd: int):
    def train(group) -> tuple:
        average, optimizer = np.zeros(2), Tree()
        scaler = kind(group=group, hold=average)

        def end() -> None:
            scaler.step(optimizer)
            scaler.update()

        for gradient in (1.0, math.nan, 1.0):
            average += 1.0
            optimizer.grads = [np.float32([gradient])]
            scaler.scale(np.float32(1.0))
            if group.rank == odd and math.isnan(gradient):
                average.flags.writeable = False
                said = (
                    r"hold must be .* got array\(\[2., 2.\]\) .*read-only\. It has .*: let it be written, and call upd"
                )
                with pytest.raises(InvalidTypeError, match=said):
                    end()
                average.flags.writeable = True
                scaler.update()
            else:
                end()
        return average.tolist(), scaler.counts(), optimizer.steps, scaler.last_step(optimizer).iteration

    counts = {"taken": 2, "overflow": 1, "spike": 0, "refused": 0}
    assert run_ranks(2, train) == [([2.0, 2.0], counts, 2, 3)] * 2


@pytest.mark.parametrize("hold", [3.0, np.float32(1.0), {"mean": np.zeros(2)}, [[np.zeros(2)]]], ids=str)
def test_what_cannot_be_written_in_place_is_not_held(hold: object):
    with pytest.raises(InvalidTypeError, match="hold must be a module of torch, an array that can be written in place"):
        StepGuard(hold=hold)


def test_a_rank_that_holds_nothing_is_named_on_all():
    def rank(group) -> str:
        guard = StepGuard(group=group, **({"hold": np.zeros(2)} if group.rank == 1 else {}))
        with pytest.raises(gradscale.ScaleDesyncError) as caught:
            stepped(guard, Tree())
        return str(caught.value)

    assert all("hold=True" in said and "hold=False" in said for said in run_ranks(2, rank))
