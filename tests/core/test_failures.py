"""What a scaler does after a failure: it fails again in the same way, or is brought back; it never goes on silently."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest

import gradscale
from gradscale import (
    BackendError,
    CallOrderError,
    CollectiveTimeoutError,
    DynamicScale,
    GradScaler,
    InvalidTypeError,
    InvalidValueError,
    ScaleDesyncError,
    ShardedGradScaler,
    StaticScale,
    presets,
)
from gradscale.testing import run_ranks

pytestmark = pytest.mark.numpy


class SGD:
    """An optimizer that counts its steps."""

    def __init__(self) -> None:
        self.grads: Any = [np.full(3, 65536.0, np.float32)]
        self.steps = 0

    def step(self) -> None:
        """Count."""
        self.steps += 1


def begin(scaler: GradScaler) -> SGD:
    scaler.scale(np.float32(1.0))
    return SGD()


def test_after_a_timeout_every_call_fails_until_there_is_another_group() -> None:
    groups: dict[int, list[Any]] = {0: [], 1: []}

    def first(group: Any) -> Any:
        groups[0].append(group)
        if group.rank == 1:
            return None
        scaler = ShardedGradScaler(group=group)
        optimizer = begin(scaler)
        with pytest.raises(CollectiveTimeoutError):
            scaler.step(optimizer)
        for call in (
            lambda: scaler.step(optimizer),
            scaler.update,
            lambda: scaler.unscale_(SGD()),
            lambda: begin(scaler),
        ):
            with pytest.raises(CollectiveTimeoutError):
                call()
        assert optimizer.steps == 0
        # A checkpoint can be saved and loaded, and does not bring the group back.
        scaler.load_state_dict(scaler.state_dict())
        optimizer = begin(scaler)
        with pytest.raises(BackendError, match=r"group was lost before, .*set_group"):
            scaler.step(optimizer)
        assert optimizer.grads[0].tolist() == [65536.0] * 3
        return scaler

    scaler, _ = run_ranks(2, first, timeout=0.2)

    def second(group: Any) -> tuple[int, float]:
        mine = scaler if group.rank == 0 else ShardedGradScaler(group=group)
        mine.set_group(group)
        mine.load_state_dict(GradScaler(init_scale=65536.0).state_dict())
        optimizer = begin(mine)
        mine.step(optimizer)
        mine.update()
        return optimizer.steps, mine.get_scale()

    assert run_ranks(2, second) == [(1, 65536.0)] * 2


class Unreachable:
    """A group whose library refuses each message, or whose ranks never come."""

    rank, size = 1, 3

    def __init__(self, is_refusing: bool) -> None:
        self.is_refusing = is_refusing

    def start_max(self, _: Any) -> Any:
        if self.is_refusing:
            msg = "the process group was destroyed"
            raise BackendError(msg)

        def finish() -> None:
            raise CollectiveTimeoutError(self.rank, self.size, 1.0)

        return finish


@pytest.mark.parametrize("is_refusing", [True, False], ids=["not sent", "not answered"])
@pytest.mark.parametrize("clip", [{}, {"max_norm": 1.0, "norm_over": "group"}], ids=["verdict", "norm"])
def test_a_message_that_is_lost_ends_the_iteration_and_the_scaler_can_be_given_another_group(
    is_refusing: bool, clip: dict[str, Any]
) -> None:
    scaler = ShardedGradScaler(group=Unreachable(is_refusing), init_scale=1024.0)
    optimizer = begin(scaler)
    error, said = (BackendError, "destroyed") if is_refusing else (CollectiveTimeoutError, "in iteration 1")
    for call in (
        lambda: scaler.unscale_(optimizer, **clip) if clip else scaler.step(optimizer),
        lambda: scaler.step(optimizer),
        scaler.update,
    ):
        with pytest.raises(error, match=said):
            call()
    assert (scaler.get_scale(), optimizer.steps) == (1024.0, 0)
    scaler.set_group(Unreachable(is_refusing))


def test_a_group_agreement_whose_message_is_lost_must_be_made_anew() -> None:
    agree = gradscale.GroupAgreement(Unreachable(is_refusing=True), DynamicScale())
    state = DynamicScale().init(np.float32(1.0))
    for message in ("destroyed", "construct a new GroupAgreement"):
        with pytest.raises(BackendError, match=message):
            agree(np.asarray(0, np.int32), state)


def test_gradients_may_be_diagnosed_after_ranks_have_differed() -> None:
    def rank(group: Any) -> int:
        scaler = ShardedGradScaler(group=group, init_scale=4.0 * (1 + group.rank))
        optimizer = begin(scaler)
        with pytest.raises(ScaleDesyncError):
            scaler.step(optimizer)
        with pytest.raises(ScaleDesyncError):
            begin(scaler)
        return len(scaler.diagnose(optimizer).entries)

    assert run_ranks(2, rank) == [1, 1]


def test_a_desync_is_raised_again_on_every_rank_and_a_common_checkpoint_mends_it() -> None:
    def train(group: Any) -> list[Any]:
        scaler = ShardedGradScaler(group=group, init_scale=65536.0 / (1 + group.rank))
        optimizer = begin(scaler)
        seen = []
        for call in (
            lambda: scaler.step(optimizer),
            scaler.update,
            lambda: scaler.update(8.0),
            lambda: scaler.step(optimizer),
        ):
            with pytest.raises(ScaleDesyncError) as caught:
                call()
            seen.append(str(caught.value))
        assert len(set(seen)) == 1
        assert optimizer.steps == 0
        pickle.dumps(scaler)
        scaler.load_state_dict(GradScaler(init_scale=1024.0).state_dict())
        optimizer = begin(scaler)
        optimizer.grads[0] /= 64
        scaler.step(optimizer)
        scaler.update()
        return [optimizer.steps, optimizer.grads[0].tolist(), scaler.get_scale()]

    assert run_ranks(3, train) == [[1, [1.0] * 3, 1024.0]] * 3


def test_a_rank_that_leaves_out_an_iteration_is_found_by_every_rank() -> None:
    def train(group: Any) -> Any:
        scaler = ShardedGradScaler(group=group, policy=gradscale.StaticScale(65536.0))
        for iteration in range(6):
            if group.rank == 1 and iteration == 3:
                scaler.scale(np.float32(1.0))
                scaler.update(65536.0)
                continue
            optimizer = begin(scaler)
            try:
                scaler.step(optimizer)
            except ScaleDesyncError as error:
                return iteration, "iteration from 4 to 5" in str(error)
            scaler.update()
        return None

    assert run_ranks(2, train) == [(3, True), (4, True)]


def test_an_update_without_a_step_is_an_error_on_every_rank_whichever_has_scaled() -> None:
    def train(group: Any) -> int:
        scaler = ShardedGradScaler(group=group)
        if group.rank == 0:
            scaler.scale(np.float32(1.0))
        with pytest.raises(CallOrderError, match=r"update\(\) was called"):
            scaler.update()
        optimizer = begin(scaler)
        scaler.step(optimizer)
        return optimizer.steps

    assert run_ranks(2, train) == [1, 1]


def test_waiting_for_ever_can_be_asked_for() -> None:
    run_ranks(1, lambda group: ShardedGradScaler(group=group, timeout=math.inf))
    for timeout in (0.0, -1.0, math.nan):
        with pytest.raises(InvalidValueError, match="timeout"):
            run_ranks(1, lambda group, timeout=timeout: ShardedGradScaler(group=group, timeout=timeout))


def test_gradients_that_were_partly_unscaled_are_not_unscaled_again() -> None:
    from gradscale_numpy import NumpyBackend

    class Breaking(NumpyBackend):
        def unscale(self, grads: Any, state: Any, /, **_: Any) -> Any:
            super().unscale(grads[:1], state, out=grads[:1])
            raise KeyboardInterrupt

    scaler = GradScaler(backend=Breaking(fast=False))
    optimizer = begin(scaler)
    optimizer.grads = [np.full(3, 65536.0, np.float32) for _ in range(2)]
    with pytest.raises(KeyboardInterrupt):
        scaler.step(optimizer)
    with pytest.raises(CallOrderError, match="could not be unscaled completely"):
        scaler.step(optimizer)
    assert [grad[0] for grad in optimizer.grads] == [1.0, 65536.0]
    assert optimizer.steps == 0


def test_gradients_that_can_be_walked_once_are_refused() -> None:
    scaler = GradScaler()
    optimizer = begin(scaler)
    optimizer.grads = (np.full(3, 65536.0, np.float32) for _ in range(2))
    with pytest.raises(InvalidTypeError, match="grads of SGD must be arrays in nested containers"):
        scaler.step(optimizer)
    assert optimizer.steps == 0


def test_what_is_no_adapter_for_arrays_is_refused_at_once() -> None:
    # With MPI it is no adapter for arrays; without, it cannot be imported.
    with pytest.raises((BackendError, gradscale.BackendNotAvailableError)):
        GradScaler(backend="mpi4py")


@pytest.mark.parametrize("wrong", [65536.0, DynamicScale(), None])
def test_what_is_no_state_is_named(wrong: Any) -> None:
    for function in (gradscale.scale, gradscale.unscale):
        with pytest.raises(InvalidTypeError, match=r"state must be a ScaleState, such as policy\.init"):
            function(np.float32(1.0), wrong)


def test_a_verdict_and_a_likeness_that_are_no_arrays_are_named() -> None:
    policy = DynamicScale()
    state = policy.init(np.zeros(()))
    for wrong in (1, True, np.array([1])):
        with pytest.raises(InvalidTypeError, match="nonfinite must be a 0-d array"):
            policy.update(state, nonfinite=wrong)
    with pytest.raises(InvalidTypeError, match="like must be an array"):
        policy.init({"w": np.zeros(3)})


@pytest.mark.parametrize(
    "policy",
    [DynamicScale(), StaticScale(), presets.mxnet(), presets.metaseq(), presets.chainer()],
    ids=lambda p: type(p).__name__,
)
def test_a_verdict_without_its_name_is_refused_with_the_reason(policy: Any) -> None:
    state = policy.init(np.zeros(()))
    nonfinite = np.zeros((), np.int32)
    policy.update(state, nonfinite=nonfinite)
    policy.update(state=state, nonfinite=nonfinite)
    for call in (lambda: policy.update(state, nonfinite), lambda: policy.update(state, nonfinite, nonfinite=nonfinite)):
        with pytest.raises(
            InvalidTypeError, match=r"by name, got array\(0, .*nonfinite=.*jmp's adjust takes the opposite"
        ):
            call()
    with pytest.raises(InvalidTypeError, match="by name, got none"):
        policy.update(state)


def test_a_bare_integer_is_no_loss() -> None:
    for value in (2, True):
        with pytest.raises(InvalidTypeError, match="outputs must be an array"):
            GradScaler().scale(value)
