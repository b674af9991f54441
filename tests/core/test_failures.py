"""What a scaler does after a failure: it fails again in the same way, or is brought back; it never goes on silently."""

import contextlib
import copy
import pickle
from typing import Any

import numpy as np
import pytest
from optimizers import Tree
from scenarios import grid_of_threads

import gradscale
from gradscale import BackendError, DynamicScale, GradScaler, InvalidTypeError, ShardedGradScaler, presets
from gradscale.scaler.agreement import Agreement
from gradscale.testing import run_ranks

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


def test_copies_of_scalers_that_have_met_a_desync_go_on_with_one_scale():
    def train(group) -> int:
        scaler = ShardedGradScaler(group=group)
        scaler.update(8.0 * (1 + group.rank))
        with pytest.raises(gradscale.ScaleDesyncError):
            scaler.step(begin(scaler))
        copied = copy.deepcopy(scaler)
        copied.update(8.0)
        optimizer = begin(copied)
        copied.step(optimizer)
        return optimizer.steps

    assert run_ranks(2, train) == [1, 1]


def test_gradients_that_were_partly_unscaled_are_not_unscaled_again():
    from gradscale_numpy import NumpyBackend

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
        with pytest.raises(
            gradscale.CallOrderError, match=r"could not be unscaled completely.*update\(get_scale\(\)\)"
        ):
            call(optimizer)
    assert [grad[0] for grad in optimizer.grads] == [1.0, 65536.0]
    assert optimizer.steps == 0
    with pytest.raises(gradscale.CallOrderError, match="the middle of iteration 1"):
        pickle.dumps(scaler)
    # Both ways out; the second keeps nothing of the iteration.
    scaler.update(scaler.get_scale())
    begin(scaler)
    with pytest.raises(KeyboardInterrupt):
        scaler.step(optimizer)
    scaler.load_state_dict(scaler.state_dict())
    assert begin(scaler).grads[0].tolist() == [65536.0] * 3
    # Gradients that can be walked once could not be unscaled at all.
    once = Tree(iter([np.full(3, 65536.0, np.float32)]))
    with pytest.raises(InvalidTypeError, match="grads of Tree must be arrays in nested containers"):
        scaler.step(once)
    assert once.steps == 0


def test_what_is_no_state_verdict_likeness_or_loss_is_named():
    for wrong in (65536.0, DynamicScale(), None, GradScaler(), gradscale.ScaleState(8.0, 0, 0, 0)):
        for function in (gradscale.scale, gradscale.unscale):
            with pytest.raises(InvalidTypeError, match=r"state must be a ScaleState, such as policy\.init"):
                function(np.float32(1.0), wrong)  # type: ignore[operator]
    policy = DynamicScale()
    state = policy.init(np.zeros(()))
    for wrong, said in (
        (1, r"got 1; wrap it, such as np\.int32\(1\)"),
        (True, "got True"),
        (np.array([1]), "got array"),
    ):
        with pytest.raises(InvalidTypeError, match=f"nonfinite must be a 0-d array.*{said}"):
            policy.update(state, nonfinite=wrong)
    for rule in (policy, gradscale.StaticScale(), presets.chainer(), gradscale.SkipSpikes()):
        told = r"like must be an array, .*, got {}.*such as init\(params\['w'\]\)$"
        with pytest.raises(InvalidTypeError, match=told.format(r"\{'w': ")):
            rule.init({"w": np.zeros(3)})
        with pytest.raises(InvalidTypeError, match=told.format("None")):
            rule.init()
    for value in (2, True, 3.0):
        with pytest.raises(InvalidTypeError, match=rf"must be an array.*wrap it, such as np\.float32\({value}\)"):
            GradScaler().scale(value)


@pytest.mark.parametrize(
    "policy",
    [DynamicScale(), gradscale.StaticScale(), presets.chainer()],
    ids=lambda p: type(p).__name__,
)
def test_a_verdict_without_its_name_is_refused_with_the_reason(policy):
    state = policy.init(np.zeros(()))
    nonfinite = np.zeros((), np.int32)
    policy.update(state, nonfinite=nonfinite)
    policy.update(state=state, nonfinite=nonfinite)
    for named in ({}, {"nonfinite": nonfinite}):
        with pytest.raises(InvalidTypeError, match=r"by name, got array\(0, .*nonfinite=.*jmp's adjust takes the oppo"):
            policy.update(state, nonfinite, **named)
    with pytest.raises(InvalidTypeError, match="by name, got none"):
        policy.update(state)


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


# In place of "set_group" and "load": whether one rank alone has begun when its group is lost, and all take another.
@pytest.mark.parametrize(
    "ways",
    [["set_group"], ["load"], ["load at scale 1"], ["copy"], ["lost", "set_group"], ["lost", "set_group", "load"]],
    ids=" ".join,
)
def test_no_rank_divides_twice_what_another_has_divided_before_a_failure(ways: list[str]):
    def rank(group) -> list[Any]:
        lost = Unreachable(is_refusing=False)
        lost.rank, lost.size = group.rank, group.size
        scaler = ShardedGradScaler(group=lost if "lost" in ways else group)
        saved, optimizer = scaler.state_dict(), begin(scaler)
        optimizer.grads[0].flags.writeable = group.rank == 0
        if "lost" not in ways or group.rank == 0:
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
        with pytest.raises(gradscale.CallOrderError, match=r"scale\(\) has never been called on any rank since"):
            scaler.step(optimizer)
        optimizer = begin(scaler)
        scaler.step(optimizer)
        return [one.tolist() for one in optimizer.seen[0]]

    assert run_ranks(2, rank) == [[[65536.0 if "load at scale 1" in ways else 1.0] * 3]] * 2


def test_a_state_can_be_loaded_before_another_group_where_one_rank_alone_was_left():
    class Leaving(Unreachable):
        def start_max(self, x):
            # It has compared its versions.
            return super().start_max(x) if len(x) > 4 else lambda: x

    def rank(group) -> list[Any]:
        lost = Leaving(is_refusing=False)
        lost.rank, lost.size = group.rank, group.size
        scaler = ShardedGradScaler(group=lost)
        saved, optimizer = scaler.state_dict(), begin(scaler)
        with contextlib.suppress(gradscale.CollectiveTimeoutError):
            scaler.unscale_(optimizer)
            if group.rank == 0:
                scaler.step(optimizer)
        scaler.load_state_dict(saved)
        scaler.set_group(group)
        optimizer = begin(scaler)
        scaler.step(optimizer)
        return [one.tolist() for one in optimizer.seen[0]]

    assert run_ranks(2, rank) == [[[1.0] * 3]] * 2


def test_a_failed_step_can_be_made_again_but_not_with_the_gradients_of_another_loss():
    class Failing(Tree):
        def step(self, *_):
            if self.fails:
                raise MemoryError
            return super().step()

    for scales_again in (False, True):
        scaler, optimizer = GradScaler(), Failing()
        scaler.scale(np.float32(1.0))
        optimizer.grads, optimizer.fails = [np.full(3, 65536.0, np.float32)], True
        with pytest.raises(MemoryError):
            scaler.step(optimizer)
        optimizer.fails = False
        if scales_again:
            scaler.scale(np.float32(1.0))
            with pytest.raises(gradscale.CallOrderError, match=r"has failed, .* update\(get_scale\(\)\)"):
                scaler.step(optimizer)
            scaler.update(scaler.get_scale())
            optimizer.grads = begin(scaler).grads
        scaler.step(optimizer)
        assert [one.tolist() for one in optimizer.seen[0]] == [[1.0] * 3]


def test_a_rule_for_spikes_that_fails_on_one_rank_is_told_to_the_others():
    def rank(group):
        guard, optimizer = gradscale.StepGuard(group=group, skip=gradscale.SkipSpikes(window=2), timeout=30.0), Tree()

        def train():
            for loss in (3e38 if group.rank == 0 else 1.0, 1.0, 2.0):
                guard.scale(np.float32(loss))
                optimizer.grads = [np.ones(1, np.float32)]
                guard.step(optimizer)
                guard.update()

        with np.errstate(over="raise"), pytest.raises((gradscale.GradscaleError, FloatingPointError)) as caught:
            train()
        return type(caught.value)

    assert run_ranks(2, rank) == [FloatingPointError, gradscale.ScaleDesyncError]


@pytest.mark.parametrize("broken", ["text", np.full(3, 3e38, np.float32)], ids=["text", "error of NumPy"])
def test_a_rank_that_cannot_unscale_is_told_of_whatever_step_is_next(broken: Any):
    def rank(group):
        scaler = ShardedGradScaler(group=group, policy=gradscale.StaticScale(1.0), timeout=5.0)
        one, other = begin(scaler), begin(scaler)
        one.grads = [broken] if group.rank == 1 else one.grads

        def calls():
            scaler.unscale_(one, max_norm=1.0, norm_over="rank")
            scaler.unscale_(other)
            scaler.step(other)

        with pytest.raises((gradscale.GradscaleError, FloatingPointError)) as caught, np.errstate(over="raise"):
            calls()
        return type(caught.value)

    assert run_ranks(2, rank)[0] is gradscale.ScaleDesyncError


def test_a_rank_that_cannot_unscale_is_told_of_over_several_groups():
    groups = grid_of_threads()

    def rank(group):
        scaler = ShardedGradScaler(group=groups(group.rank), timeout=5.0)
        optimizer = begin(scaler)
        optimizer.grads = ["text"] if group.rank == 1 else optimizer.grads
        scaler.step(optimizer)

    ended = run_ranks(4, rank, return_exceptions=True)
    assert [type(one) for one in ended] == [
        InvalidTypeError if k == 1 else gradscale.ScaleDesyncError for k in range(4)
    ]
