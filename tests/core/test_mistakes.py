"""Mistakes of a training loop without an overflow: torch's scalers raise, and so do ours, before anything moves."""

import contextlib
import copy
import functools
import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from interrupts import interrupted_anywhere
from optimizers import Evaluating, Grouped, Tree

import gradscale
from gradscale import CallOrderError, GradScaler, ShardedGradScaler
from gradscale.testing import ThreadCollectives, run_ranks


def scaled(scaler: GradScaler, gradient=None):
    return [scaler.scale(np.float32([2.0]) if gradient is None else gradient)]


class Other(Tree):
    """Another class of optimizer."""


def iterate_cleanly(scaler: GradScaler, *optimizers: Tree):
    """Make a clean iteration."""
    for optimizer in optimizers:
        optimizer.grads = scaled(scaler)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


def assert_order_counts(scaler: GradScaler, optimizers: list[Tree], is_first: bool):
    """Assert that a rank which steps named optimizers in another order than the others is told so."""
    with pytest.raises(gradscale.ScaleDesyncError, match=r"named '(generator|critic)'"):
        iterate_cleanly(scaler, *(optimizers if is_first else reversed(optimizers)))


@pytest.mark.numpy
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_ranks_may_step_other_classes_under_one_name_and_copies_are_to_be_named_again(copied: Callable[[Any], Any]):
    def rank(group: ThreadCollectives) -> int:
        scaler, is_first = ShardedGradScaler(group=group), group.rank == 0
        generator, critic = optimizers = [Tree(), Other()] if is_first else [Other(), Tree()]
        named = [(generator, "generator"), (critic, "critic")]
        # In any order; to say it again changes nothing.
        for optimizer, name in [*named, named[0]] if is_first else reversed(named):
            scaler.name(optimizer, name)
        iterate_cleanly(scaler, *optimizers, Tree())
        # The names go with the scaler to another group.
        scaler.set_group(group)
        saved = scaler.state_dict()
        assert_order_counts(scaler, optimizers, is_first)
        # A checkpoint on every rank mends it.
        scaler.load_state_dict(saved)
        iterate_cleanly(scaler, *optimizers)
        scaler, *optimizers = copied((scaler, *optimizers, unnamed := Tree()))
        scaler.set_group(group)
        scaler.name(optimizers[1], "critic")
        for optimizer in (optimizers[0], unnamed):
            with pytest.raises(CallOrderError, match=r"or copying.* named \['generator'\], got a (Tree|Other) "):
                iterate_cleanly(scaler, optimizer)
            # As after any failed agreement.
            scaler.set_group(group)
        scaler.name(optimizers[0], "generator")
        iterate_cleanly(scaler, *optimizers)
        assert_order_counts(scaler, optimizers[:2], is_first)
        return sum(optimizer.steps for optimizer in optimizers)

    assert run_ranks(2, rank) == [7, 7]


class Solo:
    """A group of one rank, which Ctrl-C interrupts in the message of this number, once."""

    rank, size = 0, 1

    def __init__(self, interrupted: int = 0):
        self.started, self.interrupted = 0, interrupted

    def start_max(self, x, /):
        self.started += 1

        def finish():
            if self.started == self.interrupted:
                self.interrupted = 0
                raise KeyboardInterrupt
            return x

        return finish


@pytest.mark.numpy
@pytest.mark.parametrize("place", [0, 1])
def test_ctrl_c_in_one_of_two_groups_sends_nothing_twice_or_leaves_a_scaler_that_takes_another_group(place: int):
    for message in (1, 2):
        groups = [Solo(message if index == place else 0) for index in range(2)]
        scaler, optimizer = ShardedGradScaler(group=groups), Tree()
        optimizer.grads = scaled(scaler)
        with pytest.raises(KeyboardInterrupt):
            scaler.step(optimizer)
        # The first message of a group compares versions.
        if message == 1:
            with pytest.raises(gradscale.BackendError, match=r"KeyboardInterrupt has interrupted .* set_group\(\)"):
                scaler.step(optimizer)
            scaler.set_group(groups := [Solo(), Solo()])
            optimizer.grads = scaled(scaler)
        scaler.step(optimizer)
        scaler.update()
        assert ([group.started for group in groups], optimizer.steps) == ([2, 2], 1)


@pytest.mark.numpy
def test_calls_inside_of_a_step_are_errors_in_any_thread_but_a_loss_may_be_scaled():
    scaler = GradScaler(init_scale=4.0)
    busy = "was called while another call of this scaler is under way"

    class Nested(Tree):
        def step(self, *args, **kwargs) -> str:
            with ThreadPoolExecutor(1) as pool:
                for run in (lambda call: call(), lambda call: pool.submit(call).result()):
                    for name in ("unscale_", "step", "refuse", "update"):
                        with pytest.raises(CallOrderError, match=busy):
                            run(functools.partial(getattr(scaler, name), *[self] * (name != "update")))
                    assert run(lambda: scaler.scale(np.float32(1.0))) == 4.0
            return super().step(*args, **kwargs)

    optimizer = Nested(scaled(scaler))
    scaler.step(optimizer)
    with pytest.raises(CallOrderError, match=r"was called in step\(\)"):
        scaler.step(Evaluating(), lambda: scaler.load_state_dict(scaler.state_dict()))
    scaler.on_update = lambda _: scaler.update()
    with pytest.raises(CallOrderError, match=rf"^update\(\) {busy}"):
        scaler.update()
    assert (optimizer.steps, optimizer.grads[0].tolist()) == (1, [2.0])
    scaler.on_update = None
    iterate_cleanly(scaler, other := Tree())
    assert scaler.last_step(other).iteration == 2


def interrupted(call: str, value: float = 2.0, **settings) -> Iterator[GradScaler]:
    """Interrupt a call at each place, in an iteration with a loss of 3."""

    def begin() -> tuple[GradScaler, Callable[[], object]]:
        scaler = GradScaler(init_scale=4.0, **settings)
        scaler.scale(np.float32(3.0))
        optimizer = Tree([scaler.scale(np.asarray([value], np.float32), loss=False)])
        if call == "update":
            scaler.step(optimizer)
        return scaler, functools.partial(getattr(scaler, call), *[optimizer] * (call != "update"))

    return interrupted_anywhere("/gradscale/scaler/", begin)


@pytest.mark.numpy
@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_ctrl_c_anywhere_in_a_call_leaves_a_scaler_that_can_be_called(call: str):
    for scaler in interrupted(call):
        scaler.update(4.0)
        iterate_cleanly(scaler, other := Tree())
        assert other.steps == 1


@pytest.mark.numpy
@pytest.mark.parametrize("value", [1.0, np.inf])
def test_ctrl_c_anywhere_in_an_update_that_is_made_again_counts_and_learns_once(value: float):
    for scaler in interrupted("update", value, skip=gradscale.SkipSpikes(of="loss", window=8)):
        # It may have come when all was done.
        with contextlib.suppress(CallOrderError):
            scaler.update()
        saved = scaler.state_dict()
        found = (
            scaler.get_scale(),
            saved["_growth_tracker"],
            saved["iteration"],
            json.loads(saved["spikes"])[0]["loss"]["values"],
        )
        assert found == ((2.0, 0, 2, []) if np.isinf(value) else (4.0, 1, 2, [3.0]))


@pytest.mark.numpy
def test_no_optimizer_is_stepped_between_an_interrupted_update_and_the_next():
    told = []
    for scaler in interrupted("update"):
        other = Tree(scaled(scaler, np.asarray([np.inf], np.float32)))
        try:
            scaler.step(other)
        except CallOrderError as error:
            told.append("update() was interrupted" in str(error))
        # The overflow counts if it was judged.
        scaler.update()
        assert scaler.get_scale() == (2.0 if scaler.counts()["overflow"] else 4.0)
    assert told
    assert all(told)


@pytest.mark.numpy
@pytest.mark.parametrize("calls", ["step", "unscale_", "update"])
@pytest.mark.parametrize("rank_with_loss", [None, 0, 1])
def test_ranks_of_which_none_has_scaled_in_an_iteration_warn_of_it_once(rank_with_loss: int | None, calls: str):
    def rank(group: ThreadCollectives):
        scaler, optimizer = ShardedGradScaler(group=group), Tree()
        iterate_cleanly(scaler, optimizer)
        for _ in range(2):
            optimizer.grads = [np.float32([2.0])]
            if group.rank == rank_with_loss:
                # As the last stage of a pipeline.
                scaler.scale(np.float32(1.0))
            if calls != "step":
                scaler.unscale_(optimizer)
            if calls != "update":
                scaler.step(optimizer)
            scaler.update()

    text = "scale() was not called in iteration 2, and the gradients of all ranks are divided by the scale. "
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run_ranks(2, rank)
    assert [str(one.message)[: len(text)] for one in told] == ([text] * 2 if rank_with_loss is None else [])


LOSS = gradscale.SkipSpikes(window=4, of="loss")
# What each kind of loop is made with, and the beginning of what it is warned of.
SLIPS: dict[str, tuple[dict[str, Any], str]] = {
    "no scale": ({}, "scale() was not called in iteration 2"),
    "no loss": ({"skip": LOSS}, "skip= judges loss, and found nothing"),
    "no gradients": ({}, "step() of Tree, none of whose parameters has a gradient"),
    "many optimizers": ({"skip": LOSS}, "skip= has begun window 2"),
    "half": ({}, "gradients of Tree are divided by the scale in float16"),
    "stalled": ({"warn_after": 2, "init_scale": 1.0}, "each of the last 2 steps of Tree was skipped"),
}


@pytest.mark.parametrize("size", [0, 2], ids=["alone", "2 ranks"])
@pytest.mark.parametrize("slip", SLIPS)
def test_a_loop_goes_on_after_a_warning_that_is_an_error(slip: str, size: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gradscale.scaler.guard._MANY", 1)
    options, text = SLIPS[slip]
    if slip == "no gradients":
        kind: Any = gradscale.StepGuard
    else:
        kind = ShardedGradScaler if size else GradScaler

    def rank(group: ThreadCollectives | None) -> tuple[list[str], int]:
        scaler, optimizers, said = kind(**options, **({"group": group} if group else {})), [Tree(), Tree()], []
        for number in range(1, 7):
            is_slip = number in (2, 3)
            optimizer = optimizers[slip == "many optimizers" and is_slip]
            if not (slip == "no scale" and is_slip):
                scaler.scale(np.ones(2 if slip == "no loss" and is_slip else 1, np.float32))
            value = np.nan if slip == "stalled" and is_slip else 1.0
            gradient = np.array([value], np.float16 if slip == "half" and is_slip else np.float32)
            optimizer.grads = None if slip == "no gradients" and is_slip else [gradient]
            for call in (lambda one=optimizer: scaler.step(one), scaler.update):
                try:
                    call()
                except Warning as warning:
                    said.append(str(warning)[: len(text)])
                    if slip != "stalled":
                        call()
        return said, sum(one.steps for one in optimizers)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = run_ranks(size, rank) if size else [rank(None)]
    steps = 6 - 2 * (slip in ("no gradients", "stalled"))
    assert results == [([text], steps)] * max(size, 1)


# What is passed in place of an optimizer, or has another signature.


class Model:
    """A model whose text is long."""

    def __call__(self) -> None: ...

    def __repr__(self) -> str:
        return "Linear(4, 4)\n" * 1000


KINDS = {"scaler": GradScaler, "guard": gradscale.StepGuard}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("call", ["step", "unscale_", "refuse", "diagnose"])
@pytest.mark.parametrize("model", [Model(), lambda: None], ids=["model", "function"])
def test_a_model_in_place_of_its_optimizer_is_told_in_a_few_words(kind, call: str, model: object):
    scaler = kind()
    scaler.scale(np.float32(1.0))
    with pytest.raises(gradscale.InvalidTypeError, match=r", a model or a function: pass the optimizer$") as caught:
        getattr(scaler, call)(model)
    assert len(str(caught.value)) <= 300


class Handwritten(Tree):
    """An optimizer whose step takes arguments, and may raise an error of its own."""

    def step(self, grads: object, lr: Any = 0.1):
        """Take gradients."""
        return grads if lr else len(lr)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_step_that_takes_gradients_is_told_of_and_errors_of_its_own_stay(kind):
    def step(*args: object, **kwargs: object):
        scaler, optimizer = kind(), Handwritten([np.float32([1.0])])
        scaler.scale(np.float32(1.0))
        return scaler.step(optimizer, *args, **kwargs)

    said = r"Handwritten\.step\(\) is called without arguments, .*got {}: let it .* from \.grads; .* takes loss="
    for args, options, wrong in (
        ((), {}, "missing .*'grads'"),
        ((1, 2, 3), {}, "too many.*"),
        (("a",), {"losses": 1.0}, "an unexpected .*'losses'"),
    ):
        with pytest.raises(gradscale.InvalidTypeError, match=said.format(wrong)):
            step(*args, **options)
    assert step("a") == "a"
    scaler = kind()
    scaler.scale(np.float32(1.0))
    for call, wrong in (
        (lambda: step("a", lr=0), "has no len"),
        (lambda: scaler.step(Evaluating(), lambda: Handwritten().step()), "missing 1 required"),  # type: ignore[call-arg]
    ):
        with pytest.raises(TypeError, match=wrong) as caught:
            call()
        assert not isinstance(caught.value, gradscale.GradscaleError)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_what_comes_after_a_step_says_so_before_it(kind):
    scaler, optimizer = kind(), Tree([np.float32([1.0])])
    schedule = type("Schedule", (), {"step": lambda _: None})()
    for call, said in (
        (lambda: scaler.step_schedule(optimizer, schedule), r"step_schedule\(optimizer, schedule\)"),
        (lambda: scaler.last_step(optimizer), r"last_step\(\)"),
    ):
        with pytest.raises(
            CallOrderError, match=rf"^call {said} after a step\(\) of this optimizer, got one of type Tree$"
        ):
            call()


def test_the_class_of_a_schedule_is_no_schedule():
    schedule = type("Schedule", (), {"step": lambda _: None})
    guard, optimizer = gradscale.StepGuard(), Tree([np.float32([1.0])])
    guard.step(optimizer)
    with pytest.raises(gradscale.InvalidTypeError, match="must be a learning-rate schedule with step"):
        guard.step_schedule(optimizer, schedule)


def halves(scaler: GradScaler, dtype: object = "float16", master: object = None, *, is_grouped: bool = False) -> Any:
    """Step an optimizer by gradients of a narrow dtype."""
    scaler.scale(np.float32(1.0))
    gradients = [np.float32([1.0]), (np.float32([2e-8]) * np.float32(1024.0)).astype(dtype)]  # type: ignore[call-overload]
    optimizer: Any = Grouped(gradients) if is_grouped else Tree(gradients)
    if master is not None:
        optimizer.master_dtype = master
    scaler.step(optimizer)
    return optimizer.gradients()[1]


@pytest.mark.numpy
@pytest.mark.parametrize("is_grouped", [False, True], ids=["grads", "param_groups"])
@pytest.mark.parametrize("dtype", ["float16", ">f2", "float8_e5m2"])
def test_gradients_that_are_divided_in_half_precision_are_told_of_once(dtype: str, is_grouped: bool):
    narrow, scaler = np.dtype(getattr(ml_dtypes, dtype, dtype)), GradScaler(init_scale=1024.0)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with pytest.warns(UserWarning, match=rf"gradients of {'Grouped' if is_grouped else 'Tree'} .*\bmaster_dtype"):
            halves(scaler, narrow, is_grouped=is_grouped)
        warnings.simplefilter("error")
        scaler.update()
        halves(scaler, narrow, is_grouped=is_grouped)


QUIET: dict[str, Callable[[], Any]] = {
    "guard": lambda: halves(gradscale.StepGuard(max_norm=1.0)),
    "scale of 1": lambda: halves(GradScaler(policy=gradscale.StaticScale(1.0))),
    "disabled": lambda: halves(GradScaler(enabled=False, max_norm=1.0)),
    "bfloat16": lambda: halves(GradScaler(), np.dtype(ml_dtypes.bfloat16)),
    "float32 masters": lambda: halves(GradScaler(), master=np.float32),
    "float16 is wanted": lambda: halves(GradScaler(), master=np.float16),
}


@pytest.mark.numpy
@pytest.mark.parametrize("name", QUIET)
def test_gradients_that_lose_nothing_or_as_the_user_says_are_divided_quietly(name: str):
    QUIET[name]()
