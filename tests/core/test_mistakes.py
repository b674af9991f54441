"""Mistakes of a training loop without an overflow: torch's scalers raise, and so do ours, before anything moves."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from libraries import Library
from optimizers import Tree

import gradscale
from gradscale import CallOrderError, GradScaler, ShardedGradScaler
from gradscale.testing import ThreadCollectives, run_ranks


def scaled(arrays: Library, scaler: GradScaler, *values: float) -> list[Any]:
    return [scaler.scale(arrays.asarray([value])) for value in values]


@pytest.mark.parametrize("grads", [[], None, {}, [None], [[], {"w": None}]], ids=repr)
@pytest.mark.parametrize("unscales", [False, True], ids=["step", "unscale_ and step"])
def test_a_step_without_a_single_gradient_is_an_error(arrays: Library, grads: Any, unscales: bool) -> None:
    scaler, optimizer = GradScaler(init_scale=4.0), Tree()
    scaler.scale(arrays.asarray(1.0))
    optimizer.grads = grads
    if unscales:
        scaler.unscale_(optimizer)
    with pytest.raises(
        CallOrderError, match=r"none of whose parameters has a gradient: they were zeroed after backward"
    ):
        scaler.step(optimizer)
    assert (optimizer.calls, optimizer.grads) == ([], grads)
    assert scaler.last_step(optimizer).reason == "no gradients"
    assert scaler.history == []
    with pytest.raises(CallOrderError, match="no optimizer was unscaled or stepped"):
        scaler.update()
    # The gradients may be made, and the same step be called again.
    optimizer.grads = scaled(arrays, scaler, 2.0)
    scaler.step(optimizer)
    scaler.update()
    assert (len(optimizer.calls), scaler.last_step(optimizer).reason) == (1, "stepped")


def test_an_update_after_a_plain_step_of_the_optimizer_is_an_error(arrays: Library) -> None:
    scaler, optimizer = GradScaler(init_scale=4.0), Tree()
    optimizer.grads = scaled(arrays, scaler, 2.0)
    optimizer.step()
    message = r"still multiplied by the scale; call scaler\.step\(optimizer\) in place of optimizer\.step\(\)"
    with pytest.raises(CallOrderError, match=message):
        scaler.update()
    # A scale that the user sets ends the iteration, as in torch.
    scaler.update(8.0)
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_gradients_of_an_iteration_that_has_scaled_nothing_are_told_of_once(arrays: Library, call: str) -> None:
    scaler, first, second = GradScaler(init_scale=4.0, growth_interval=1), Tree(), Tree()
    first.grads, second.grads = [scaled(arrays, scaler, 1.0) for _ in range(2)]
    scaler.step(first)
    scaler.update()
    told = r"scale\(\) was not called in iteration 2, and gradients of Tree are divided .* step each optimizer before"
    # As an error it comes before anything is touched.
    with pytest.raises(UserWarning, match=told):
        getattr(scaler, call)(second)
    arrays.assert_array(second.grads[0], [4.0])
    with pytest.warns(UserWarning, match=told) as warned:
        getattr(scaler, call)(second)
    assert [one.filename for one in warned] == [__file__]
    arrays.assert_array(second.grads[0], [0.5])
    scaler.update()
    # A loop that multiplies by the scale itself goes on, and so does a copy of its scaler.
    for each in (scaler, copy.copy(scaler)):
        first.grads = [arrays.asarray([2.0 * each.get_scale()])]
        each.step(first)
        each.update()
        arrays.assert_array(first.grads[0], [2.0])


class Other(Tree):
    """Another class of optimizer."""


@pytest.mark.numpy
@pytest.mark.parametrize(("kinds", "named"), [((Tree, Other), False), ((Tree, Tree), True)], ids=["classes", "names"])
def test_optimizers_in_another_order_from_the_first_iteration_on_are_an_error(kinds: Any, named: bool) -> None:
    def rank(group: ThreadCollectives) -> str:
        scaler = ShardedGradScaler(group=group, init_scale=4.0)
        optimizers = [kind([np.float32([4.0])]) for kind in kinds]
        if named:
            for optimizer, name in zip(optimizers, ("generator", "critic"), strict=True):
                scaler.name(optimizer, name)
        scaler.scale(np.float32(1.0))
        try:
            for optimizer in reversed(optimizers) if group.rank == 1 else optimizers:
                scaler.step(optimizer)
        except gradscale.ScaleDesyncError as error:
            assert not any(optimizer.calls for optimizer in optimizers)
            return str(error)
        return "stepped"

    messages = run_ranks(2, rank)
    first = (
        ("(here Tree, named 'generator')", "(here Tree, named 'critic')") if named else ("(here Tree)", "(here Other)")
    )
    for message, here in zip(messages, first, strict=True):
        assert f"optimizer's class, number of param_groups or name {here}" in message


def iterate(scaler: GradScaler, *optimizers: Tree) -> None:
    """Make a clean iteration."""
    for optimizer in optimizers:
        optimizer.grads = [scaler.scale(np.float32([2.0]))]
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


@pytest.mark.numpy
def test_ranks_may_step_other_classes_under_one_name_and_name_them_in_any_order() -> None:
    def rank(group: ThreadCollectives) -> int:
        scaler = ShardedGradScaler(group=group)
        optimizers = [Tree(), Other()] if group.rank == 0 else [Other(), Tree()]
        named = list(zip(optimizers, ("generator", "critic"), strict=True))
        for optimizer, name in named if group.rank == 0 else reversed(named):
            scaler.name(optimizer, name)
        iterate(scaler, *optimizers)
        scaler.set_group(group)
        # The names go with the scaler to another group.
        iterate(scaler, *optimizers)
        with pytest.raises(gradscale.ScaleDesyncError, match=r"named '(generator|critic)'"):
            iterate(scaler, *(optimizers if group.rank == 0 else reversed(optimizers)))
        return sum(optimizer.steps for optimizer in optimizers)

    assert run_ranks(2, rank) == [4, 4]


@pytest.mark.numpy
@pytest.mark.parametrize("what", ["a step left out", "another order"])
def test_a_checkpoint_on_every_rank_mends_counts_that_differ(what: str) -> None:
    def rank(group: ThreadCollectives) -> int:
        scaler, one, other = ShardedGradScaler(group=group), Tree(), Other()
        saved = scaler.state_dict()
        met = [one]
        if what == "another order":
            met = [one, other] if group.rank == 0 else [other, one]
        else:
            one.grads = [scaler.scale(np.float32([2.0]))]
            scaler.unscale_(one)
            if group.rank == 0:
                scaler.step(one)
            scaler.update()
        with pytest.raises(gradscale.ScaleDesyncError):
            iterate(scaler, *met)
        before = one.steps
        scaler.load_state_dict(saved)
        for _ in range(2):
            iterate(scaler, one, other)
        return one.steps - before

    assert run_ranks(2, rank) == [2, 2]


@pytest.mark.numpy
def test_ctrl_c_while_versions_are_compared_leaves_a_scaler_that_takes_another_group() -> None:
    class Interrupted(Solo):
        def start_max(self, x: Any, /) -> Callable[[], Any]:  # noqa: ARG002
            raise KeyboardInterrupt

    scaler, optimizer = ShardedGradScaler(group=Interrupted()), Tree()
    optimizer.grads = [scaler.scale(np.float32([2.0]))]
    with pytest.raises(KeyboardInterrupt):
        scaler.unscale_(optimizer)
    with pytest.raises(gradscale.BackendError, match=r"KeyboardInterrupt has interrupted .* call set_group\(\)"):
        scaler.step(optimizer)
    scaler.set_group(Solo())
    iterate(scaler, optimizer)
    assert optimizer.steps == 1


@pytest.mark.numpy
@pytest.mark.parametrize("place", [0, 1])
def test_ctrl_c_in_one_of_two_groups_sends_nothing_twice(place: int) -> None:
    class Waiting(Solo):
        started = interrupted = 0

        def start_max(self, x: Any, /) -> Callable[[], Any]:
            self.started += 1
            finish = super().start_max(x)
            return self.wait if self is groups[place] and self.started == 2 else finish

        def wait(self) -> Any:
            self.interrupted += 1
            if self.interrupted == 1:
                raise KeyboardInterrupt
            return self.sent

    groups = [Waiting(), Waiting()]
    scaler, optimizer = ShardedGradScaler(group=groups), Tree()
    optimizer.grads = [scaler.scale(np.float32([2.0]))]
    with pytest.raises(KeyboardInterrupt):
        scaler.step(optimizer)
    scaler.step(optimizer)
    scaler.update()
    # The first message of a group compares versions.
    assert ([group.started for group in groups], optimizer.steps) == ([2, 2], 1)


class Solo:
    """A group of one rank."""

    sent: Any = None

    rank, size = 0, 1

    def start_max(self, x: Any, /) -> Callable[[], Any]:
        self.sent = x
        return lambda: x


BUSY = "while another call of this scaler is under way"


@pytest.mark.numpy
@pytest.mark.parametrize("call", ["unscale_", "step", "update"])
def test_a_call_inside_of_a_step_is_an_error_and_the_step_is_made_once(call: str) -> None:
    scaler = GradScaler(init_scale=4.0)

    class Nested(Tree):
        def step(self, *args: Any, **kwargs: Any) -> str:
            with pytest.raises(CallOrderError, match=rf"^{call}\(\) was called {BUSY}"):
                getattr(scaler, call)(*() if call == "update" else (self,))
            return super().step(*args, **kwargs)

    optimizer = Nested([scaler.scale(np.float32([2.0]))])
    scaler.step(optimizer)
    scaler.update()
    assert (optimizer.steps, optimizer.grads[0].tolist(), scaler.last_step(optimizer).iteration) == (1, [2.0], 1)


@pytest.mark.numpy
def test_a_loss_may_be_scaled_inside_of_a_step_and_in_another_thread() -> None:
    scaler = GradScaler(init_scale=4.0)

    class Scaling(Tree):
        def step(self, *args: Any, **kwargs: Any) -> str:
            with ThreadPoolExecutor(1) as pool:
                self.losses = [scaler.scale(np.float32(1.0)), pool.submit(scaler.scale, np.float32(1.0)).result()]
            return super().step(*args, **kwargs)

    optimizer = Scaling([scaler.scale(np.float32([2.0]))])
    scaler.step(optimizer)
    scaler.update()
    assert (optimizer.losses, optimizer.grads[0].tolist()) == ([4.0, 4.0], [2.0])


@pytest.mark.numpy
def test_a_callback_that_updates_is_an_error_of_the_update() -> None:
    scaler = GradScaler(init_scale=4.0)
    scaler.on_update = lambda _: scaler.update()
    optimizer = Tree([scaler.scale(np.float32([2.0]))])
    scaler.step(optimizer)
    with pytest.raises(CallOrderError, match=BUSY):
        scaler.update()
    scaler.on_update = None
    optimizer.grads = [scaler.scale(np.float32([2.0]))]
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).iteration == 2


@pytest.mark.numpy
def test_a_second_thread_is_refused_until_the_first_has_returned() -> None:
    scaler, begun, seen = GradScaler(init_scale=4.0), threading.Event(), threading.Event()

    class Slow(Tree):
        def step(self, *args: Any, **kwargs: Any) -> str:
            begun.set()
            assert seen.wait(10)
            return super().step(*args, **kwargs)

    optimizer = Slow([scaler.scale(np.float32([2.0]))])
    thread = threading.Thread(target=scaler.step, args=(optimizer,))
    thread.start()
    assert begun.wait(10)
    with pytest.raises(CallOrderError, match=BUSY):
        scaler.step(Tree([np.float32([2.0])]))
    seen.set()
    thread.join()
    scaler.update()
    assert optimizer.steps == 1


@pytest.mark.parametrize("by_closure", [False, True])
def test_an_optimizer_without_step_is_an_error_before_its_gradients_are_touched(
    arrays: Library, by_closure: bool
) -> None:
    class Stepless:
        """Of the tree protocol."""

    scaler, optimizer = GradScaler(init_scale=4.0), Stepless()
    optimizer.grads = grads = scaled(arrays, scaler, 2.0)  # type: ignore[attr-defined]
    with pytest.raises(gradscale.InvalidTypeError, match=r"must have step\(\), got .* of type Stepless"):
        scaler.step(optimizer, *[lambda: None] * by_closure)  # type: ignore[arg-type]
    assert [float(gradient[0]) for gradient in grads] == [8.0]
    with pytest.raises(CallOrderError, match=r"first, got one of type Stepless$"):
        scaler.last_step(optimizer)  # type: ignore[arg-type]
