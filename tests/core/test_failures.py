"""What a scaler does after a failure: it fails again in the same way, or is brought back; it never goes on silently."""

import contextlib
import copy
import dataclasses
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from libraries import Library
from optimizers import Tree, iterate, iterate_plainly
from scenarios import Alone, grid_of_threads

import gradscale
from gradscale import BackendError, CallOrderError, DynamicScale, GradScaler, InvalidTypeError, ShardedGradScaler
from gradscale.core.backend import Backend
from gradscale.core.validation import LARGEST_INT32, bits_of_float32
from gradscale.policies.spikes import judge_number
from gradscale.scaler import claim as claims
from gradscale.scaler import guard as guards
from gradscale.scaler.agreement import Agreement
from gradscale.testing import run_ranks
from gradscale_numpy import NumpyBackend

pytestmark = pytest.mark.numpy


def begin(scaler: GradScaler) -> Tree:
    scaler.scale(np.float32(1.0))
    return Tree([np.full(3, 65536.0, np.float32)])


class Unreachable:
    """A group whose library refuses each message, or whose ranks never come."""

    rank, size = 1, 3

    def __init__(self, is_refusing: bool):
        self.is_refusing = is_refusing

    def start_max(self, _):
        if self.is_refusing:
            raise BackendError("the process group was destroyed")

        def finish():
            raise gradscale.CollectiveTimeoutError(self.rank, self.size, 1.0)

        return finish


@pytest.mark.parametrize("is_refusing", [True, False], ids=["not sent", "not answered"])
@pytest.mark.parametrize("clip", [{}, {"max_norm": 1.0, "norm_over": "group"}], ids=["verdict", "norm"])
def test_a_message_that_is_lost_ends_the_iteration_and_the_scaler_can_be_given_another_group(
    is_refusing: bool, clip: dict[str, Any]
):
    scaler = ShardedGradScaler(group=Unreachable(is_refusing), init_scale=1024.0)
    optimizer = begin(scaler)
    error, said = (BackendError, "destroyed") if is_refusing else (gradscale.CollectiveTimeoutError, "in iteration 1")
    for call in (
        lambda: scaler.unscale_(optimizer, **clip) if clip else scaler.step(optimizer),
        lambda: scaler.step(optimizer),
        scaler.update,
        lambda: scaler.unscale_(Tree([])),
        lambda: begin(scaler),
    ):
        with pytest.raises(error, match=said):
            call()
    # A checkpoint can be saved and loaded, and does not bring the group back.
    scaler.load_state_dict(scaler.state_dict())
    with pytest.raises(BackendError, match=r"group was lost before, .*set_group"):
        scaler.step(begin(scaler))
    assert (scaler.get_scale(), optimizer.steps) == (1024.0, 0)
    run_ranks(1, scaler.set_group)
    scaler.load_state_dict(scaler.state_dict())
    scaler.step(begin(scaler))


class Interrupting(Alone):
    """A group in which Ctrl-C comes in the start of the first message of some length; versions are 4 numbers."""

    def __init__(self, length: int):
        self.length = length

    def start_max(self, x):
        if len(x) == self.length:
            self.length = 0
            raise KeyboardInterrupt
        return super().start_max(x)


@pytest.mark.parametrize("length", [4, claims.LENGTH], ids=["versions", "step"])
@pytest.mark.parametrize("others", [0, 1], ids=["alone", "second group"])
def test_a_group_in_which_ctrl_c_came_in_the_start_of_a_message_is_not_used_again_after_a_load(
    others: int, length: int
):
    groups = [*(Alone() for _ in range(others)), Interrupting(length)]
    scaler = ShardedGradScaler(group=groups, init_scale=1024.0)
    optimizer = begin(scaler)
    with pytest.raises(KeyboardInterrupt):
        scaler.step(optimizer)
    said = "KeyboardInterrupt has interrupted the start of an agreement"
    with pytest.raises(BackendError, match=said):
        scaler.step(optimizer)
    for _ in range(2):
        scaler.load_state_dict(scaler.state_dict())
        with pytest.raises(BackendError, match=rf"group was lost before, .*set_group.*{said}"):
            scaler.step(begin(scaler))
    scaler.set_group(Alone())
    optimizer = begin(scaler)
    scaler.step(optimizer)
    assert optimizer.steps == 1


def test_ranks_that_have_stepped_alone_unequally_can_join():
    def rank(group) -> list[Any]:
        guard, trees = gradscale.StepGuard(), [Tree() for _ in range(1 + group.rank)]
        for tree in trees:
            tree.grads = [np.ones(1, np.float32)]
            guard.unscale_(tree)
        for tree in trees:
            guard.step(tree)
        # Ranks compare no steps that were made alone.
        alone, taken = guard.state_dict()["steps"], guard.counts()["taken"]
        guard.set_group(group)
        guard.step(trees[0])
        return [alone, taken, guard.last_step(trees[0]).reason, guard.state_dict()["steps"]]

    assert run_ranks(3, rank) == [[0, taken, "stepped", 1] for taken in (1, 2, 3)]


@pytest.mark.parametrize("calls", [("load", "set_group"), ("set_group", "load")], ids=" ".join)
def test_a_rank_that_loads_the_state_of_one_that_has_trained_alone_joins_it(calls: tuple[str, ...]):
    alone = gradscale.StepGuard()
    for _ in range(3):
        iterate_plainly(alone, Tree())
    saved = alone.state_dict()

    def rank(group) -> str:
        guard = gradscale.StepGuard() if group.rank else alone
        for call in calls if group.rank else ("set_group",):
            guard.set_group(group) if call == "set_group" else guard.load_state_dict(saved)
        return iterate_plainly(guard, Tree()).reason

    assert run_ranks(2, rank) == ["stepped"] * 2


def test_gradients_that_were_partly_unscaled_are_not_unscaled_again():
    class Breaking(NumpyBackend):
        def unscale(self, grads, state, /, **_):
            super().unscale(grads[:1], state, out=grads[:1])
            raise KeyboardInterrupt

    scaler = GradScaler(backend=Breaking(fast=False))
    optimizer = begin(scaler)
    optimizer.grads = [np.full(3, 65536.0, np.float32) for _ in range(2)]
    with pytest.raises(KeyboardInterrupt):
        scaler.step(optimizer)
    for call in (scaler.step, scaler.unscale_, lambda _: scaler.update()):
        with pytest.raises(CallOrderError, match=r"could not be unscaled completely.*update\(get_scale\(\)\)"):
            call(optimizer)
    assert [grad[0] for grad in optimizer.grads] == [1.0, 65536.0]
    assert optimizer.steps == 0
    with pytest.raises(CallOrderError, match="the middle of iteration 1"):
        pickle.dumps(scaler)
    # Both ways out; the second keeps nothing of the iteration.
    scaler.update(scaler.get_scale())
    begin(scaler)
    with pytest.raises(KeyboardInterrupt):
        scaler.step(optimizer)
    scaler.load_state_dict(scaler.state_dict())
    assert begin(scaler).grads[0].tolist() == [65536.0] * 3


STATE, NONE = DynamicScale().init(np.zeros(())), np.zeros((), np.int32)
RULES = (DynamicScale(), gradscale.StaticScale())
NO_STATE, WRAP = r"state must be a ScaleState, such as policy\.init", r"wrap it, such as np\.{}\({}\)"
LIKE = r"like must be an array, .*, got {}.*such as init\(params\['w'\]\)$"
WRONG: list[tuple[str, Callable[[Any], object], list[Any]]] = [
    (NO_STATE, lambda x: gradscale.scale(np.float32(1.0), x), [65536.0, None, gradscale.ScaleState(8.0, 0, 0, 0)]),
    (NO_STATE, lambda x: gradscale.unscale(np.float32(1.0), x), [RULES[0], GradScaler()]),
    *(
        (f"nonfinite must be a 0-d array.*got {said}", lambda x: RULES[0].update(STATE, nonfinite=x), [wrong])
        for said, wrong in (("1; " + WRAP.format("int32", 1), 1), ("True", True), ("array", np.array([1])))
    ),
    (LIKE.format(r"\{'w': "), lambda rule: rule.init({"w": np.zeros(3)}), [*RULES, gradscale.SkipSpikes()]),
    (LIKE.format("None"), lambda rule: rule.init(), [*RULES, gradscale.SkipSpikes()]),
    (f"must be an array.*{WRAP.format('float32', 3.0)}", lambda x: GradScaler().scale(x), [3.0]),
    ("by name, got array.*nonfinite=.*jmp's", lambda rule: rule.update(STATE, NONE), RULES),
    ("by name, got none", lambda rule: rule.update(STATE), RULES),
]


@pytest.mark.parametrize(("said", "call", "values"), WRONG)
def test_what_is_no_state_verdict_likeness_or_loss_is_named(
    said: str, call: Callable[[Any], object], values: list[Any]
):
    for value in values:
        with pytest.raises(InvalidTypeError, match=said):
            call(value)


def test_ranks_of_a_grid_of_groups_are_numbered_row_by_row():
    class Axis:
        def __init__(self, rank: int, size: int):
            self.rank, self.size = rank, size

    # As NumPy, MPI's cartesian communicators, torch's meshes and JAX's number a grid: the last group varies fastest.
    for sizes in ((2, 3), (3, 2), (2, 3, 4)):
        for number, places in enumerate(np.ndindex(*sizes)):
            assert Agreement(list(map(Axis, places, sizes))).rank() == number  # type: ignore[arg-type]
    assert Agreement([Axis(1, 2)], own_rank=lambda: 7).rank() == 7  # type: ignore[list-item]
    assert Agreement([Axis(1, 2)], own_rank=lambda: None).rank() == 1  # type: ignore[list-item]


class Wrapped:
    """Another object for a group, as each call of a library may give."""

    def __init__(self, group):
        self.identity, self.rank, self.size, self.start_max = group, group.rank, group.size, group.start_max


def test_a_scaler_has_its_number_again_in_a_group_that_it_joins_once_more():
    def rank(group):
        scaler = ShardedGradScaler(group=Wrapped(group))
        if group.rank == 0:
            scaler.set_group(Wrapped(group))
        optimizer = begin(scaler)
        scaler.step(optimizer)
        return scaler.last_step(optimizer).reason

    assert run_ranks(2, rank) == ["stepped", "stepped"]


class Leaving(Unreachable):
    """A group whose ranks come to compare their versions, and never again."""

    def start_max(self, x):
        return super().start_max(x) if len(x) > 4 else lambda: x


# In place of "set_group" and "load": whether one rank alone has begun when its group is lost, and all take another;
# or whether one alone was left by a group in which all have begun.
@pytest.mark.parametrize(
    "ways",
    [
        *(["set_group"], ["load"], ["load at scale 1"], ["copy"], ["lost", "set_group"], ["lost", "set_group", "load"]),
        ["left", "load", "set_group"],
    ],
    ids=" ".join,
)
def test_no_rank_divides_twice_what_another_has_divided_before_a_failure(ways: list[str]):
    def rank(group) -> list[Any]:
        lost: Any = {"lost": Unreachable, "left": Leaving}.get(ways[0], lambda _: group)(False)
        if lost is not group:
            lost.rank, lost.size = group.rank, group.size
        scaler = ShardedGradScaler(group=lost)
        saved, optimizer = scaler.state_dict(), begin(scaler)
        optimizer.grads[0].flags.writeable = group.rank == 0 or ways[0] == "left"
        if ways[0] == "left":
            scaler.unscale_(optimizer)
        if lost is group or group.rank == 0:
            with pytest.raises(gradscale.GradscaleError):
                scaler.step(optimizer)
        optimizer.grads = [np.array(optimizer.grads[0])]
        for way in ways[-2:]:
            if way == "set_group":
                scaler.set_group(group)
            elif way.startswith("load"):
                scaler.load_state_dict(saved | ({} if way == "load" else {"scale": 1.0}))
            elif way == "copy":
                scaler = copy.deepcopy(scaler)
        with pytest.raises(CallOrderError, match=r"scale\(\) has never been called on any rank since"):
            scaler.step(optimizer)
        optimizer = begin(scaler)
        scaler.step(optimizer)
        return [one.tolist() for one in optimizer.seen[0]]

    assert run_ranks(2, rank) == [[[65536.0 if "load at scale 1" in ways else 1.0] * 3]] * 2


SURVIVORS = ("set_group",), ("set_group", "load"), ("load", "set_group")
NEWCOMERS = ("construct", "load"), ("elsewhere", "load", "set_group"), ("elsewhere", "set_group", "load")


@pytest.mark.parametrize("newcomer", [*NEWCOMERS, ("alone", "load", "set_group")], ids=" ".join)
@pytest.mark.parametrize("survivor", SURVIVORS, ids=" ".join)
def test_a_new_rank_goes_on_with_those_that_have_lost_one(survivor: tuple[str, ...], newcomer: tuple[str, ...]):
    kind = gradscale.StepGuard if newcomer[0] == "alone" else ShardedGradScaler
    old, new = run_ranks(3, lambda group: group, timeout=0.3), run_ranks(3, lambda group: group, timeout=20.0)

    def lose_one(group) -> ShardedGradScaler:
        scaler, optimizer = kind(group=old[group.rank]), Tree()
        for _ in range(3):
            iterate_plainly(scaler, optimizer)
        if group.rank < 2:
            with pytest.raises(gradscale.CollectiveTimeoutError):
                iterate_plainly(scaler, optimizer)
        return scaler

    scalers = run_ranks(3, lose_one)
    saved = scalers[0].state_dict()

    def go_on(group) -> tuple[int, dict[str, int]]:
        scaler, calls = scalers[group.rank], survivor
        if group.rank == 2:
            over = {"construct": new[2], "elsewhere": run_ranks(1, lambda alone: alone)[0]}
            calls = newcomer[1:]
            scaler = gradscale.StepGuard() if newcomer[0] == "alone" else kind(group=over[newcomer[0]])
        for call in calls:
            scaler.set_group(new[group.rank]) if call == "set_group" else scaler.load_state_dict(saved)
        optimizer = Tree()
        for _ in range(3):
            iterate_plainly(scaler, optimizer)
        return optimizer.steps, scaler.counts()

    assert run_ranks(3, go_on) == [(3, {"taken": 6, "overflow": 0, "spike": 0, "refused": 0})] * 3


class Failing(Tree):
    """It evaluates a closure, if it is given one, and fails until it is told not to."""

    fails = True

    def step(self, closure=None):
        if closure is not None:
            closure()
        if self.fails:
            raise MemoryError
        return super().step()


@pytest.mark.parametrize("scales_again", [False, True])
@pytest.mark.parametrize("by_closure", [False, True])
def test_a_failed_step_can_be_made_again_but_not_with_the_gradients_of_another_loss(
    by_closure: bool, scales_again: bool
):
    scaler = GradScaler()
    optimizer = Failing(begin(scaler).grads)

    def evaluate():
        optimizer.grads = begin(scaler).grads

    closure = evaluate if by_closure else None
    with pytest.raises(MemoryError):
        scaler.step(optimizer, closure)
    optimizer.fails = False
    if scales_again:
        evaluate()
        with pytest.raises(CallOrderError, match=r"has failed, .* update\(get_scale\(\)\)"):
            scaler.step(optimizer)
        scaler.update(scaler.get_scale())
        evaluate()
    scaler.step(optimizer, None if scales_again else closure)
    assert [one.tolist() for one in optimizer.seen[0]] == [[1.0] * 3]


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)], ids=["rank 0", "rank 1", "both"])
@pytest.mark.parametrize("goes_on", [False, True], ids=["the same step", "the next batch"])
def test_after_a_failed_step_of_a_guard_the_next_batch_is_judged_and_the_same_step_is_made(goes_on: bool, failing):
    def train(group) -> object:
        guard, optimizer = gradscale.StepGuard(group=group), Failing([np.ones(3, np.float32)])
        optimizer.fails, loss = group.rank in failing, np.float32(1.0)
        with pytest.raises(MemoryError) if optimizer.fails else contextlib.nullcontext():
            guard.step(optimizer, loss=loss)
        is_late, optimizer.fails = optimizer.fails, False
        if goes_on:
            optimizer.grads = [np.full(3, math.nan, np.float32)]
            with pytest.raises(gradscale.ScaleDesyncError) if len(failing) == 1 else contextlib.nullcontext():
                guard.step(optimizer, loss=np.float32(1.0))
            return optimizer.steps + is_late, guard.last_step(optimizer).reason if len(failing) == 2 else "differ"
        if is_late:
            guard.step(optimizer, loss=loss)
        guard.step(optimizer)
        return optimizer.steps, guard.counts()["taken"]

    assert run_ranks(2, train) == [((1, "overflow" if len(failing) == 2 else "differ") if goes_on else (2, 2))] * 2


@pytest.mark.parametrize("failing", range(2))
def test_a_failed_step_of_a_guard_that_was_unscaled_before_is_made_again_by_one_rank(failing: int):
    def train(group) -> object:
        rule = gradscale.SkipSpikes(of="norm")
        guard, optimizer = gradscale.StepGuard(group=group, skip=rule), Failing([np.float32([3.0])])
        optimizer.fails = group.rank == failing
        guard.unscale_(optimizer, max_norm=1.0)
        if optimizer.fails:
            with pytest.raises(MemoryError):
                guard.step(optimizer)
            optimizer.fails = False
        guard.step(optimizer)
        guard.unscale_(optimizer, max_norm=1.0)
        guard.step(optimizer)
        return [report.norm for report in guard.history], json.loads(guard.state_dict()["spikes"])[0]["norm"]["values"]

    norms = pytest.approx([3.0, 1.0], rel=1e-5)
    assert run_ranks(2, train) == [(norms, norms)] * 2


def test_a_step_with_a_closure_is_judged_anew_when_it_is_made_again_after_a_failure():
    scaler, optimizer = GradScaler(skip=gradscale.SkipSpikes(window=8, min_values=4, of="loss")), Failing()
    losses = iter([1.0] * 5 + [9.0])

    def closure():
        scaler.scale(np.float32(next(losses)))
        optimizer.grads = [np.full(3, 65536.0, np.float32)]

    for fails in (False, False, False, False, True):
        optimizer.fails = fails
        with pytest.raises(MemoryError) if fails else contextlib.nullcontext():
            scaler.step(optimizer, closure)
            scaler.update()
    optimizer.fails = False
    scaler.step(optimizer, closure)
    assert scaler.last_step(optimizer).reason == "spike"


HUGE = np.full(3, 3e38, np.float32)


@pytest.mark.parametrize("is_grid", [False, True], ids=["one group", "grid"])
@pytest.mark.parametrize(
    ("bad", "loss"), [("text", 1.0), (HUGE, 1.0), (np.ones(3, np.float32), 666.0)], ids=["text", "NumPy", "rule"]
)
def test_a_rank_that_cannot_unscale_or_judge_is_told_of_whatever_step_is_next(
    bad: Any, loss: float, is_grid: bool, monkeypatch: pytest.MonkeyPatch
):
    def judge(rule, window, x: float) -> bool:
        if x == 666.0:
            raise FloatingPointError
        return judge_number(rule, window, x)

    def clip_factor(self, squares, max_norm: float):
        if squares > 1e70:
            raise FloatingPointError
        return Backend.clip_factor(self, squares, max_norm)

    monkeypatch.setattr(guards, "judge_number", judge)
    monkeypatch.setattr(NumpyBackend, "clip_factor", clip_factor)
    groups, size = grid_of_threads(), 4 if is_grid else 2

    def rank(group):
        over, is_bad = groups(group.rank) if is_grid else group, group.rank == 1
        guard = gradscale.StepGuard(group=over, skip=gradscale.SkipSpikes(of="loss", window=2), timeout=30.0)
        one, other = Tree(), Tree()
        for own in (loss if is_bad else 1.0, 1.0, 2.0):
            guard.scale(np.float32(own))
            one.grads, other.grads = [np.ones(3, np.float32)], [np.ones(3, np.float32)]
            one.grads = [copy.copy(bad)] if is_bad else one.grads
            guard.unscale_(one, max_norm=1.0, norm_over="rank")
            guard.unscale_(other)
            guard.step(other)
            guard.update()

    ended = run_ranks(size, rank, return_exceptions=True)
    own = InvalidTypeError if isinstance(bad, str) else FloatingPointError
    assert [type(one) for one in ended] == [own if k == 1 else gradscale.ScaleDesyncError for k in range(size)]


# What is read is believed only where a policy can have made it; else the library is named.

BITS = bits_of_float32(65536.0)


class Misplacing(Backend):
    """Reads a state whose pieces a wrong ``concat`` has put elsewhere, once it is told to."""

    values: list[int] | None = None

    def read(self, x) -> list[int]:
        values = super().read(x)
        if self.values is None:
            return values
        # The verdict's flag and a message's fields come before the numbers of the state.
        before = values[: {4: 0, 5: 1}.get(len(values), 6)]
        return [*before, *self.values, *values[len(before) + 4 :]]


MISREAD = {
    "bits in the growth tracker": [BITS, BITS, 0, 0],
    "a negative scale": [bits_of_float32(-1.0), 0, 0, 0],
    "nan": [bits_of_float32(math.nan), 0, 0, 0],
    "a negative tracker": [BITS, -1, 0, 0],
    "a tracker beyond its threshold": [BITS, 2001, 0, 0],
}


@pytest.mark.parametrize("wrong", MISREAD.values(), ids=MISREAD)
@pytest.mark.parametrize("call", ["state_dict", "step"])
def test_a_read_that_no_policy_can_have_made_names_the_library(strict: Library, wrong: list[int], call: str):
    backend = Misplacing()
    scaler = GradScaler(backend=backend)
    optimizer = Tree()
    iterate(strict, scaler, optimizer)
    before = scaler.state_dict()
    backend.values = wrong
    with pytest.raises(BackendError, match="from array_api_strict that no policy makes, got scale=") as caught:
        scaler.state_dict() if call == "state_dict" else iterate(strict, scaler, optimizer)
    assert optimizer.steps == 1
    assert "growth_tracker 2000, overflow_tracker 0, rescale_tracker 0" in str(caught.value)
    backend.values = None
    if call == "state_dict":
        assert scaler.state_dict() == before
        iterate(strict, scaler, Tree())


def test_a_policy_that_does_not_say_may_use_all_of_int32():
    @dataclasses.dataclass(frozen=True)
    class Own(gradscale.StaticScale):
        def update(self, state, *, nonfinite):  # type: ignore[override]  # noqa: ARG002
            return state._replace(growth_tracker=np.asarray(LARGEST_INT32, np.int32))

    scaler = GradScaler(policy=Own())
    iterate_plainly(scaler, Tree())
    assert scaler.state_dict()["_growth_tracker"] == LARGEST_INT32
