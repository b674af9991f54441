"""The parts of a scaler, each by itself: the live state, the way of outputs, the unscaler, the agreement, reports."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
from libraries import Library
from optimizers import Tree

import gradscale
from gradscale import DynamicScale, InvalidTypeError, InvalidValueError, StaticScale, StepReport
from gradscale.core.vector import Purpose, Verdict
from gradscale.reports.recorder import Reports, step_report
from gradscale.scaler.agreement import Agreement, whereabouts
from gradscale.scaler.exchange import Exchange
from gradscale.scaler.iteration import Iteration, Parts
from gradscale.scaler.live_state import ArrayState, checked_scale
from gradscale.scaler.scaling import ArrayScaling
from gradscale.scaler.unscaler import ArrayFound, ArrayUnscaler, Clip
from gradscale.scaler.verdict import PendingVerdict
from gradscale.testing import ThreadCollectives, run_ranks


def parts(live: ArrayState, agreement: Agreement | None = None) -> Parts:
    return Parts(live, ArrayScaling(), ArrayUnscaler(), agreement or Agreement(), Reports(), PendingVerdict)


# The live state.


def test_a_state_is_made_beside_the_first_array_of_what_was_set_before(arrays: Library) -> None:
    live = ArrayState(DynamicScale(init_scale=8.0))
    assert (live.is_made, live.is_known, live.scale()) == (False, False, 8.0)
    live.replace_scale(32.0)
    live.load(DynamicScale(), {"scale": 16.0, "growth_tracker": 3}, keep=False)
    assert (live.is_made, live.is_known, live.scale()) == (False, True, 16.0)
    state = live.current(arrays.asarray(1.0))
    assert live.is_made
    assert live.current() is state
    arrays.assert_array(live.arrays(state).scale, 16.0)
    assert isinstance(state.scale, float) is live.backend.computes_on_host
    assert live.numbers() == {"scale": 16.0, "growth_tracker": 3, "overflow_tracker": 0, "rescale_tracker": 0}


def test_arrays_of_a_state_are_never_written_to(arrays: Library) -> None:
    live = ArrayState(DynamicScale(init_scale=8.0, growth_interval=1))
    first = live.current(arrays.asarray(1.0))
    live.advance([arrays.asarray(0, "int32"), arrays.asarray(2, "int32")])
    live.replace_scale(3.0)
    live.load(live.policy, {"scale": 5.0}, keep=False)
    arrays.assert_array(live.arrays(first).scale, 8.0)
    assert live.scale() == 5.0
    assert live.version == 1


def test_the_worst_of_several_counts_adapts_the_state_once(arrays: Library) -> None:
    for counts, scale in (([0, 0], 16.0), ([0, 3], 4.0), ([2, 3], 4.0), ([1], 4.0)):
        live = ArrayState(DynamicScale(init_scale=8.0, growth_interval=1))
        live.current(arrays.asarray(1.0))
        live.advance([arrays.asarray(count, "int32") for count in counts])
        assert live.scale() == scale


def test_a_lowered_state_is_another_one_or_the_same_where_the_policy_cannot(arrays: Library) -> None:
    live = ArrayState(DynamicScale(init_scale=8.0))
    state = live.current(arrays.asarray(1.0))
    arrays.assert_array(live.arrays(live.lowered(state)).scale, 4.0)
    assert live.current() is state
    fixed = ArrayState(StaticScale(8.0))
    assert fixed.lowered(fixed.current(arrays.asarray(1.0))) is fixed.current()


@pytest.mark.numpy
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda live: pickle.loads(pickle.dumps(live))])
def test_a_copied_state_is_numbers_until_its_first_array(how: Any) -> None:
    live = ArrayState(DynamicScale(init_scale=8.0))
    live.current(np.float32(1.0))
    live.advance([np.int32(0)])
    copied = how(live)
    assert (copied.is_made, copied.is_known) == (False, True)
    assert copied.numbers() == live.numbers()
    copied.replace_scale(2.0)
    assert live.scale() == 8.0


def test_settings_are_replaced_by_checked_ones() -> None:
    live = ArrayState(DynamicScale())
    live.replace_setting("growth_interval", 3)
    assert live.policy == DynamicScale(growth_interval=3)
    with pytest.raises(InvalidValueError, match="growth_interval"):
        live.replace_setting("growth_interval", 0)
    with pytest.raises(InvalidTypeError, match="only of a DynamicScale"):
        ArrayState(StaticScale()).replace_setting("growth_interval", 3)
    assert checked_scale(8, DynamicScale()) == 8.0
    with pytest.raises(InvalidValueError, match="bounds"):
        checked_scale(8, DynamicScale(max_scale=4.0, init_scale=4.0))


def test_a_backend_is_a_name_or_an_adapter() -> None:
    with pytest.raises(InvalidTypeError, match=r"derives from gradscale\.Backend"):
        ArrayState(DynamicScale(), object())  # type: ignore[arg-type]
    backend = gradscale.Backend()
    assert ArrayState(DynamicScale(), backend).backend_for(None) is backend
    assert ArrayState(DynamicScale()).example() is None


# The way of outputs.


def test_outputs_are_noted_once_they_are_scaled(arrays: Library) -> None:
    live, seen = ArrayState(DynamicScale(init_scale=8.0)), []
    frame = Iteration(1, parts(live))
    scaling = ArrayScaling()

    def scale(outputs: Any) -> Any:
        return scaling.scale(outputs, lambda: frame, lambda leaves: seen.append(list(leaves)))

    assert scale([None, arrays.asarray(3, "int32")])[0] is None
    assert not live.is_made
    with pytest.raises(InvalidTypeError):
        scale([arrays.asarray(1.0), "text"])
    assert (frame.scaled, seen) == (False, [])
    loss = arrays.asarray(2.0)
    arrays.assert_array(scale([loss, None])[0], 16.0)
    # A single array of a known kind goes a shorter way from its second time on.
    for _ in range(2):
        arrays.assert_array(scale(loss), 16.0)
    assert frame.scaled
    assert frame.state is live.current()
    assert all(leaves[0] is loss for leaves in seen)
    assert [len(leaves) for leaves in seen] == [2, 1, 1]


# The unscaler.


def test_gradients_are_collected_untouched_and_then_unscaled_and_judged(arrays: Library) -> None:
    live = ArrayState(DynamicScale(init_scale=4.0))
    optimizer = Tree([arrays.asarray([8.0]), None, arrays.asarray([math.inf])])
    gradients = ArrayUnscaler().collect(optimizer)
    assert gradients.like is optimizer.grads[0]
    assert (gradients.groups, gradients.is_touched) == ((), False)
    arrays.assert_array(optimizer.grads[0], [8.0])
    found = ArrayUnscaler().unscale(gradients, live, live.current(gradients.like))
    assert gradients.is_touched
    arrays.assert_array(optimizer.grads[0], [2.0])
    if live.backend.computes_on_host:
        assert found.nonfinite == 1
        assert type(found.nonfinite) is int
    else:
        arrays.assert_array(found.nonfinite, 1, "int32")
    assert found.norm is None


def test_gradients_are_clipped_in_the_same_pass_scaled_or_not(arrays: Library) -> None:
    live = ArrayState(DynamicScale(init_scale=4.0))
    optimizer = Tree([arrays.asarray([12.0]), arrays.asarray([16.0])])
    gradients = ArrayUnscaler().collect(optimizer, Clip(2.5))
    norm = ArrayUnscaler().unscale(gradients, live, live.current(gradients.like)).norm
    assert (arrays.item(norm), arrays.item(optimizer.grads[0][0])) == (5.0, pytest.approx(1.5))
    optimizer = Tree([arrays.asarray([3.0]), arrays.asarray([4.0])])
    assert arrays.item(ArrayUnscaler().clip_unscaled(optimizer, 2.5, live)) == 5.0
    assert arrays.item(optimizer.grads[1][0]) == pytest.approx(2.0)
    assert ArrayUnscaler().clip_unscaled(Tree([]), 2.5, live) is None


# The agreement.


def found(count: int) -> ArrayFound:
    return ArrayFound(count, None)


@pytest.mark.numpy
def test_a_process_alone_agrees_with_itself_and_sends_nothing() -> None:
    agreement, live = Agreement(), ArrayState(DynamicScale(init_scale=4.0))
    state = live.current(np.float32(1.0))
    pending = PendingVerdict(Iteration(3, parts(live, agreement)), found(2), state, (), Tree())
    assert pending.verdict() is pending.known == Verdict(2, 2, False, 4.0)
    assert pending.count() == 2
    assert (agreement.is_alone, agreement.rank(), agreement.example(live, 1)) == (True, 0, None)
    assert whereabouts((), 3) == "this process in iteration 3"


@pytest.mark.numpy
def test_ranks_agree_over_each_group_once_for_each_verdict() -> None:
    def rank(group: ThreadCollectives) -> Any:
        agreement = Agreement([group])
        live = ArrayState(DynamicScale(init_scale=4.0))
        state = live.current(np.float32(1.0))
        iteration, optimizer = Iteration(3, parts(live, agreement)), Tree()
        first, second = (PendingVerdict(iteration, found(n), state, [group], optimizer) for n in (group.rank, 0))
        exchange = Exchange(iteration, group, Purpose.NORM, Tree())
        return [
            *((each.verdict().nonfinite, each.verdict().local_nonfinite) for each in (first, second)),
            (group.calls, agreement.rank(), agreement.is_alone, whereabouts([group], 3)),
            exchange.maximum([group.rank, -group.rank], np.float32(1.0)),
        ]

    # And a greeting before the first.
    assert run_ranks(2, rank) == [
        [(1, index), (0, 0), (3, index, False, f"rank {index} of 2 in iteration 3"), [1, 0]] for index in range(2)
    ]


class Lost:
    """A group whose ranks never come."""

    rank, size = 1, 3

    def start_max(self, _: Any) -> Any:
        def finish() -> None:
            raise gradscale.CollectiveTimeoutError(self.rank, self.size, 1.0)

        return finish


@pytest.mark.numpy
def test_a_group_that_was_lost_is_used_no_more_until_there_is_another() -> None:
    agreement, live = Agreement([Lost()]), ArrayState(DynamicScale())
    frame, state = Iteration(5, parts(live, agreement)), live.current(np.float32(1.0))
    with pytest.raises(gradscale.CollectiveTimeoutError, match="in iteration 5"):
        PendingVerdict(frame, found(0), state, agreement.groups, Tree()).verdict()
    copied = copy.deepcopy(agreement)
    for one in (agreement, copied):
        with pytest.raises(gradscale.BackendError, match="lost before"):
            one.usable_groups()
        one.join([Lost()])
        one.usable_groups()
    restored = pickle.loads(pickle.dumps(agreement.__getstate__()))
    assert (restored["_groups"], restored["failure"]) == (None, None)
    exchange = Exchange(frame, Lost(), Purpose.NORM, Tree())
    assert agreement.failure is None
    with pytest.raises(gradscale.CollectiveTimeoutError):
        exchange.maximum([1], np.float32(1.0))
    assert isinstance(agreement.failure, gradscale.CollectiveTimeoutError)


def test_ranks_of_a_grid_of_groups_have_numbers_of_their_own() -> None:
    class Axis:
        def __init__(self, rank: int, size: int) -> None:
            self.rank, self.size = rank, size

    ranks = {Agreement([Axis(i, 2), Axis(j, 3)]).rank() for i in range(2) for j in range(3)}  # type: ignore[list-item]
    assert ranks == set(range(6))
    assert Agreement([Axis(1, 2)], own_rank=lambda: 7).rank() == 7  # type: ignore[list-item]
    assert Agreement([Axis(1, 2)], own_rank=lambda: None).rank() == 1  # type: ignore[list-item]


def test_without_a_group_nothing_can_be_agreed() -> None:
    agreement = Agreement(None)
    assert (agreement.is_alone, agreement.is_unjoined) == (False, True)
    with pytest.raises(gradscale.CallOrderError, match="set_group"):
        agreement.usable_groups()


# Reports of steps whose verdict comes later.


class Late:
    """A verdict that arrives when it is told to."""

    is_captured = False

    def __init__(self, nonfinite: int) -> None:
        self.arrived = False
        self.reads = 0
        self.found = Verdict(nonfinite, nonfinite, False, 8.0)

    def has_arrived(self) -> bool:
        return self.arrived

    def verdict(self) -> Verdict:
        self.reads += 1
        return self.found


def test_deferred_verdicts_are_read_when_somebody_asks() -> None:
    reports: Reports[Late] = Reports()
    optimizers, late = [Tree(), Tree()], [Late(1), Late(0)]
    for number, (optimizer, pending) in enumerate(zip(optimizers, late, strict=True)):
        reports.record_later(optimizer, number, pending)
        assert optimizer in reports
    assert list(reports.poll()) == []
    # In order: the second waits for the first.
    late[1].arrived = True
    assert list(reports.poll()) == []
    late[0].arrived = True
    assert list(reports.poll()) == late
    assert list(reports.poll()) == []
    assert [pending.reads for pending in late] == [0, 0]
    assert reports.last(optimizers[0]) == StepReport(True, 8.0, 1, "overflow", 0, 0, 1)
    assert reports.last(optimizers[0]) is reports.last(optimizers[0])
    assert late[0].reads == 1
    assert [report.skipped for report in reports.history] == [True, False]


def test_what_a_captured_graph_writes_has_no_place_in_the_history() -> None:
    reports: Reports[Late] = Reports()
    optimizer, pending = Tree(), Late(1)
    pending.is_captured = pending.arrived = True
    reports.record_later(optimizer, 1, pending)
    assert reports.history == []
    assert list(reports.poll()) == []
    assert reports.last(optimizer).skipped


def test_a_later_report_takes_the_place_of_a_deferred_one() -> None:
    reports: Reports[Late] = Reports(history_size=2)
    optimizer, pending = Tree(), Late(1)
    reports.record_later(optimizer, 1, pending)
    reports.record(optimizer, step_report(Verdict(0, 0, False, 4.0), 2))
    assert reports.last(optimizer).iteration == 2
    reports.record_later(optimizer, 3, pending)
    assert reports.last(optimizer).iteration == 3
    assert [report.iteration for report in reports.history] == [2, 3]


def test_callbacks_are_called_on_rank_0_and_where_they_want_it() -> None:
    told: list[Any] = []
    everywhere = gradscale.callbacks.every_rank(lambda report: told.append(("everywhere", report.iteration)))
    reports: Reports[Late] = Reports([lambda report: told.append(("first", report.iteration)), everywhere])
    assert reports.wants_each_step
    for iteration, (nonfinite, rank) in enumerate([(1, 0), (0, 0), (1, 1)]):
        reports.record(
            Tree(), step_report(Verdict(nonfinite, nonfinite, False, 4.0), iteration), lambda rank=rank: rank
        )
    assert told == [("first", 0), ("everywhere", 0), ("everywhere", 2)]
    copied = pickle.loads(pickle.dumps(Reports(diagnose="on_overflow", history_size=3)))
    assert (copied.on_skip, copied.on_update, copied.history, copied.wants_each_step) == (None, None, [], True)


class Refusing:
    """A group whose library refuses each message."""

    rank, size = 0, 2

    def start_max(self, _: Any) -> Any:
        msg = "the process group was destroyed"
        raise gradscale.BackendError(msg)


@pytest.mark.numpy
def test_a_message_that_cannot_be_sent_ends_the_iteration_as_one_that_is_not_answered() -> None:
    scaler, optimizer = gradscale.ShardedGradScaler(group=Refusing(), init_scale=1024.0), Tree()
    scaler.scale(np.float32(1.0))
    optimizer.grads = [np.float32([math.inf])]
    for call in (lambda: scaler.step(optimizer), lambda: scaler.step(optimizer), scaler.update):
        with pytest.raises(gradscale.BackendError, match="destroyed"):
            call()
    assert (scaler.get_scale(), optimizer.steps) == (1024.0, 0)
    scaler.set_group(Lost())


@pytest.mark.numpy
def test_an_exchange_that_cannot_be_sent_leaves_a_scaler_that_can_be_given_another_group() -> None:
    scaler, optimizer = gradscale.ShardedGradScaler(group=Refusing(), init_scale=1024.0), Tree()
    scaler.scale(np.float32(1.0))
    optimizer.grads = [np.float32([1024.0])]
    for call in (lambda: scaler.unscale_(optimizer, max_norm=1.0, norm_over="group"), lambda: scaler.step(optimizer)):
        with pytest.raises(gradscale.BackendError, match="destroyed"):
            call()
    scaler.set_group(Lost())
    agree = gradscale.GroupAgreement(Refusing(), DynamicScale())
    state = DynamicScale().init(np.float32(1.0))
    for message in ("destroyed", "construct a new GroupAgreement"):
        with pytest.raises(gradscale.BackendError, match=message):
            agree(np.asarray(0, np.int32), state)


@pytest.mark.numpy
def test_gradients_may_be_diagnosed_after_ranks_have_differed() -> None:
    def rank(group: ThreadCollectives) -> Any:
        scaler, optimizer = gradscale.ShardedGradScaler(group=group, init_scale=4.0 * (1 + group.rank)), Tree()
        scaler.scale(np.float32(1.0))
        optimizer.grads = [np.float32([8.0])]
        with pytest.raises(gradscale.ScaleDesyncError):
            scaler.step(optimizer)
        with pytest.raises(gradscale.ScaleDesyncError):
            scaler.scale(np.float32(1.0))
        return len(scaler.diagnose(optimizer).entries)

    assert run_ranks(2, rank) == [1, 1]


@pytest.mark.numpy
def test_a_verdict_of_before_a_loaded_state_ends_no_later_iteration() -> None:
    def rank(group: ThreadCollectives) -> Any:
        agreement, live = Agreement([group]), ArrayState(DynamicScale(init_scale=4.0 * (1 + group.rank)))
        state = live.current(np.float32(1.0))
        old = PendingVerdict(Iteration(1, parts(live, agreement)), found(0), state, agreement.groups, Tree())
        for _ in range(2):
            with pytest.raises(gradscale.ScaleDesyncError):
                old.verdict()
            agreement.recover()
        with pytest.raises(gradscale.ScaleDesyncError):
            old.verdict()
        return agreement.failure

    assert run_ranks(2, rank) == [None, None]
