"""Whole runs with the replacements of torch's scalers and with torch's own, bit for bit; and where they differ."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
from axes_torch import GradScaler, ShardedGradScaler, TorchScaler, torch
from hypothesis import example, given, settings
from small_torch import Small
from tiers import examples, later
from torch_runs import KINDS, Iteration, Treatment, assert_same, assert_same_runs, iterations, private_states

from gradscale import CallOrderError, GradscaleError

pytestmark = pytest.mark.torch

UNSCALED = Treatment(unscale=True, clip="norm")
OVERFLOW = Iteration(bad=(1, math.inf))
# One of each kind, with the second optimizer of the next kind.
PAIRS = list(zip(KINDS, KINDS[1:] + KINDS[:1], strict=True))
SCALES = {
    "powers-of-two": {"init_scale": 2.0**12, "growth_interval": 2},
    "others": {"init_scale": 1000.0, "growth_factor": 1.7, "backoff_factor": 0.7, "growth_interval": 3},
}
BOTH = (GradScaler, TorchScaler)
MAKERS = [functools.partial(make, "cpu") for make in BOTH]
finite_or_not = pytest.mark.parametrize("gradient", [1.0, math.inf], ids=["finite", "inf"])


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("kinds", [*PAIRS[::2], *later("ranks", *PAIRS[1::2])], ids="-".join)
@settings(max_examples=examples(25))
@given(plan=iterations(6))
@example(plan=[OVERFLOW, Iteration((UNSCALED, Treatment())), OVERFLOW, Iteration(restart="pickle"), Iteration()])
@example(plan=[Iteration((UNSCALED, Treatment(step=False)), bad=(5, math.nan), penalty=True), Iteration()])
def test_a_run_is_torchs(kinds: tuple[str, str], scales: str, plan: list[Iteration]) -> None:
    assert_same_runs(*MAKERS, kinds, plan, **SCALES[scales])


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("kinds", [("Adam-foreach", "SGD-sparse"), ("SGD-fused", "Adam-fused")], ids="-".join)
@settings(max_examples=examples(25))
@given(plan=iterations(6))
def test_a_sharded_run_of_one_rank_is_torchs(kinds: tuple[str, str], plan: list[Iteration]) -> None:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchSharded

    # Torch's rounds other factors to float32 before it multiplies, unlike its GradScaler, and cannot be pickled.
    restarts = {"pickle": "state_dict", "deepcopy": "state_dict"}
    for index, each in enumerate(plan):
        treatments = each.treatments
        if "fused" in kinds[0]:
            # With unscale_() and a fused optimizer torch's raises.
            treatments = tuple(Treatment(step=its.step) for its in treatments)  # type: ignore[assignment]
        restart = restarts.get(str(each.restart), each.restart)
        plan[index] = dataclasses.replace(each, setting=None, restart=restart, treatments=treatments)
    makers = [functools.partial(make, "cpu") for make in (ShardedGradScaler, TorchSharded)]
    assert_same_runs(*makers, kinds, plan, **SCALES["powers-of-two"])


def test_every_kind_of_iteration_of_a_run_is_torchs() -> None:
    variants = {
        "container": ["apart", "list", "tuple", "nested", "generator"],
        "precision": [None, "bfloat16", "float16"],
        "restart": [None, "state_dict", "pickle", "deepcopy"],
        "new_scale": [None, (512.0, "float"), (3000.1, "float32"), (3000.1, "float64")],
        "bad": [None, (3, -math.inf), (6, math.nan)],
    }
    plan = [
        Iteration((UNSCALED, Treatment()), micro_batches=2, **{name: value})
        for name, values in variants.items()
        for value in values
    ]
    assert_same_runs(*MAKERS, ("Adam-foreach", "AdamW-fused"), plan, **SCALES["others"])


# A comparison that cannot fail shows nothing.


class Inexact(TorchScaler):  # type: ignore[misc]
    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        inverse = torch.nextafter(inv_scale, torch.ones(()))
        return super()._unscale_grads_(optimizer, inverse, found_inf, allow_fp16)


class Forgetful(TorchScaler):  # type: ignore[misc]
    def update(self, new_scale: Any = None) -> None:
        super().update(new_scale)
        self._growth_tracker.fill_(0)


class Reckless(TorchScaler):  # type: ignore[misc]
    def _maybe_opt_step(self, optimizer: Any, _: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)


class Silent(TorchScaler):  # type: ignore[misc]
    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().step(optimizer, *args, **kwargs)


class Late(TorchScaler):  # type: ignore[misc]
    def unscale_(self, optimizer: Any) -> None:
        super().unscale_(optimizer)
        self._per_optimizer_states[id(optimizer)]["stage"] = torch.amp.grad_scaler.OptState.READY


@pytest.mark.parametrize("wrong", [Inexact, Forgetful, Reckless, Silent, Late])
def test_a_run_with_a_wrong_scaler_is_found(wrong: Any) -> None:
    plan = [Iteration((UNSCALED, UNSCALED), bad=bad) for bad in (None, (2, math.inf), None)]
    with pytest.raises(AssertionError, match="is not"):
        assert_same_runs(
            functools.partial(wrong, "cpu"), MAKERS[1], ("Adam-foreach", "SGD-foreach"), plan, init_scale=1e3
        )


# The private surface.


@finite_or_not
def test_private_methods_are_torchs(gradient: float) -> None:
    seen = []
    for make in BOTH:
        scaler = make("cpu", init_scale=8.0)

        def numbers(scaler: Any = scaler) -> list[Any]:
            return [scaler._get_scale_async(), scaler._scale, scaler._growth_tracker, scaler._get_growth_tracker()]

        told = [*numbers(), scaler._enabled, scaler._device, scaler._init_scale, scaler._init_growth_tracker]
        scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
        run = Small(scaler, size=3)
        run.put(torch.tensor([8.0, gradient, 16.0]))
        told += [dict(scaler._check_inf_per_device(run.optimizer)), private_states(scaler, run.optimizer)]
        told += [run.parameter.grad.clone(), scaler.unscale_(run.optimizer)]
        told += [dict(scaler._found_inf_per_device(run.optimizer)), scaler.step(run.optimizer)]
        told += [private_states(scaler, run.optimizer), scaler.update(), *numbers()]
        seen.append([*told, len(scaler._per_optimizer_states), private_states(scaler, run.optimizer), run.parameter])
    assert_same(*seen)


@finite_or_not
def test_the_private_check_takes_float16_gradients_as_at_torchs(gradient: float) -> None:
    seen = []
    for make in BOTH:
        run = Small(make("cpu", init_scale=8.0), dtypes=["float16"])
        run.put(torch.tensor([8.0, gradient], dtype=torch.float16))
        seen.append([dict(run.scaler._check_inf_per_device(run.optimizer)), run.parameter.grad])
    assert_same(*seen)


def test_the_scale_and_the_tracker_stay_the_same_tensors() -> None:
    for make in BOTH:
        run = Small(make("cpu", growth_interval=2))
        scaler = run.scaler
        scaler.scale(torch.ones(()))
        scale, tracker = scaler._scale, scaler._growth_tracker
        for change in (
            *[functools.partial(run.iterate, value) for value in (1.0, math.inf, 1.0, 1.0, 1.0)],
            functools.partial(scaler.update, 4.0),
            lambda scaler=scaler: scaler.load_state_dict(scaler.state_dict()),
        ):
            change()
            assert scaler._scale is scale
            assert scaler._growth_tracker is tracker
        assert (scale.item(), tracker.item()) == run.state == (4.0, 1)


@finite_or_not
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_a_fused_optimizer_steps_parameters_of_other_dtypes_as_at_torchs(dtype: str, gradient: float) -> None:
    seen = []
    for make in BOTH:
        run = Small(make("cpu", init_scale=8.0), "AdamW-fused", start=1.0, dtypes=[dtype], lr=0.5)
        for value in (gradient, 1.0):
            # Without unscale_(), which refuses float16.
            run.iterate(value)
        seen.append([run.parameter, run.parameter.grad, run.optimizer.state_dict(), run.scaler.get_scale()])
    assert_same(*seen)


# Mistakes: errors of the types of torch's, and where the order of calls is wrong with the same words first.


def unscale_an_expanded_gradient(run: Small) -> None:
    run.put(torch.ones(()).expand(2))
    run.scaler.unscale_(run.optimizer)


MISTAKES: dict[str, Callable[[Small], Any]] = {
    "update-first": lambda run: run.scaler.update(),
    "unscale-first": lambda run: run.scaler.unscale_(run.optimizer),
    "step-first": lambda run: run.scaler.step(run.optimizer),
    "unscale-twice": lambda run: (run.put(1.0), *[run.scaler.unscale_(run.optimizer) for _ in range(2)]),
    "unscale-after-step": lambda run: (run.put(1.0), run.scaler.step(run.optimizer), run.step(explicit=True)),
    "step-twice": lambda run: (run.put(1.0), *[run.scaler.step(run.optimizer) for _ in range(2)]),
    "update-without-step": lambda run: (run.put(1.0), run.scaler.update()),
    "copy-in-the-middle": lambda run: (run.put(1.0), run.scaler.unscale_(run.optimizer), copy.copy(run.scaler)),
    "empty-state-dict": lambda run: run.scaler.load_state_dict({}),
    "shared-memory": unscale_an_expanded_gradient,
}


@pytest.mark.parametrize("variant", ["SGD", "SGD-fused"])
@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_caught_as_torchs_error_is(mistake: Callable[[Small], Any], variant: str) -> None:
    runs = [Small(make("cpu"), variant) for make in (TorchScaler, GradScaler)]
    for run in runs:
        run.parameter.grad = torch.ones(2)
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        mistake(runs[0])
    with pytest.raises(caught.type) as ours:
        mistake(runs[1])
    assert isinstance(ours.value, GradscaleError)
    if "already been called" in str(caught.value):
        # Ours goes on, and says in "on this optimizer" what torch's leaves out.
        begin = str(caught.value).split(" since")[0].removesuffix(".").removesuffix(" on this optimizer")
        assert str(ours.value).startswith(begin)


# Where ours is meant to differ; both are shown.


def test_torch_never_grows_beyond_a_lowered_interval_and_ours_does() -> None:
    states = []
    for make in (TorchScaler, GradScaler):
        run = Small(make("cpu", init_scale=2.0))
        for _ in range(5):
            run.iterate(0.0)
        run.scaler.set_growth_interval(3)
        states.append([run.state])
        for _ in range(4):
            run.iterate(0.0)
            states[-1].append(run.state)
    assert states[0] == [(2.0, 5), (2.0, 6), (2.0, 7), (2.0, 8), (2.0, 9)]
    assert states[1] == [(2.0, 5), (4.0, 0), (4.0, 1), (4.0, 2), (8.0, 0)]


@pytest.mark.parametrize("how", ["zeroed", "another model", "plain step", "step forgotten"])
def test_steps_without_gradients_and_updates_without_steps_are_errors_at_torchs_and_at_ours(how: str) -> None:
    for make, error in ((TorchScaler, AssertionError), (GradScaler, CallOrderError)):
        scaler = make("cpu", init_scale=4.0, growth_interval=1)
        run, stranger = (Small(scaler, size=1) for _ in range(2))
        optimizer = stranger.optimizer if how == "another model" else run.optimizer
        run.give(1.0)
        if how == "zeroed":
            optimizer.zero_grad()
        if how in ("zeroed", "another model"):
            with pytest.raises(error, match=r"No inf checks were recorded for this optimizer|none of whose parameters"):
                scaler.step(optimizer)
        elif how == "plain step":
            optimizer.step()
        with pytest.raises(error, match=r"No inf checks were recorded prior to update|no optimizer was unscaled"):
            scaler.update()
        assert (stranger.held, run.held) == ([[0.0]], [[-4.0 if how == "plain step" else 0.0]])
        assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("new_scale", [8, torch.full((1,), 8.0), torch.full((1,), 8.0, dtype=torch.float64)], ids=str)
def test_torch_refuses_some_new_scales_that_its_message_names_and_ours_takes_them(new_scale: Any) -> None:
    theirs, mine = TorchScaler("cpu"), GradScaler("cpu")
    for scaler in (theirs, mine):
        scaler.scale(torch.ones(()))
    with pytest.raises((AttributeError, RuntimeError)):
        theirs.update(new_scale)
    mine.update(new_scale)
    assert mine.get_scale() == 8.0


WAYS: dict[str, Callable[[Any, float], Any]] = {
    "number": lambda scaler, scale: scaler.update(scale),
    "tensor": lambda scaler, scale: scaler.update(torch.tensor(scale)),
    "state dict": lambda scaler, scale: scaler.load_state_dict(scaler.state_dict() | {"scale": scale}),
}


@pytest.mark.parametrize("new_scale", [0.0, -1.0, math.inf, math.nan, 1e-40])
@pytest.mark.parametrize("way", WAYS)
def test_torch_takes_scales_that_ruin_the_run_and_ours_refuses_them(way: str, new_scale: float) -> None:
    theirs, ours = (Small(make("cpu")) for make in (TorchScaler, GradScaler))
    for run in (theirs, ours):
        run.iterate(1.0)
    WAYS[way](theirs.scaler, new_scale)
    for _ in range(20):
        theirs.iterate(1.0)
    assert not theirs.scaler.get_scale() >= 2.0**-126 or math.isinf(theirs.scaler.get_scale())
    with pytest.raises(ValueError, match="scale"):
        WAYS[way](ours.scaler, new_scale)
    ours.iterate(1.0)
    assert (ours.held, ours.scaler.get_scale()) == ([[-2.0, -2.0]], 65536.0)
