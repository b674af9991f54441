"""Whole runs with the replacements of torch's scalers and with torch's own, bit for bit; and where they differ."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from axes import require
from hypothesis import example, given, settings
from tiers import examples, later
from torch_runs import KINDS, Iteration, Treatment, assert_same, assert_same_runs, iterations, private_states

from gradscale import CallOrderError

pytestmark = pytest.mark.torch

UNSCALED = Treatment(unscale=True, clip="norm")
OVERFLOW = Iteration(bad=(1, math.inf))
# One of each kind, with the second optimizer of the next kind.
PAIRS = list(zip(KINDS, KINDS[1:] + KINDS[:1], strict=True))
SCALES = {
    "powers-of-two": {"init_scale": 2.0**12, "growth_interval": 2},
    "others": {"init_scale": 1000.0, "growth_factor": 1.7, "backoff_factor": 0.7, "growth_interval": 3},
}


@pytest.fixture(scope="module")
def ours() -> Any:
    """Return the adapter."""
    require("torch")
    import gradscale_torch

    return gradscale_torch


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("kinds", [*PAIRS[::2], *later("ranks", *PAIRS[1::2])], ids="-".join)
@settings(max_examples=examples(25))
@given(plan=iterations(6))
@example(plan=[OVERFLOW, Iteration((UNSCALED, Treatment())), OVERFLOW, Iteration(restart="pickle"), Iteration()])
@example(plan=[Iteration((UNSCALED, Treatment(step=False)), bad=(5, math.nan), penalty=True), Iteration()])
def test_a_run_is_torchs(torch: Any, ours: Any, kinds: tuple[str, str], scales: str, plan: list[Iteration]) -> None:
    makers = [functools.partial(make, "cpu") for make in (ours.GradScaler, torch.amp.GradScaler)]
    assert_same_runs(*makers, kinds, plan, **SCALES[scales])


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("kinds", [("Adam-foreach", "SGD-sparse"), ("SGD-fused", "Adam-fused")], ids="-".join)
@settings(max_examples=examples(25))
@given(plan=iterations(6))
def test_a_sharded_run_of_one_rank_is_torchs(ours: Any, kinds: tuple[str, str], plan: list[Iteration]) -> None:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    # Torch's rounds other factors to float32 before it multiplies, unlike its GradScaler, and cannot be pickled.
    restarts = {"pickle": "state_dict", "deepcopy": "state_dict"}
    plan = [
        dataclasses.replace(each, setting=None, restart=restarts.get(str(each.restart), each.restart)) for each in plan
    ]
    if "fused" in kinds[0]:
        # With unscale_() and a fused optimizer torch's raises.
        plan = [
            dataclasses.replace(each, treatments=tuple(Treatment(step=its.step) for its in each.treatments))
            for each in plan
        ]
    makers = [functools.partial(make, "cpu") for make in (ours.ShardedGradScaler, ShardedGradScaler)]
    assert_same_runs(*makers, kinds, plan, **SCALES["powers-of-two"])


def test_every_kind_of_iteration_of_a_run_is_torchs(torch: Any, ours: Any) -> None:
    makers = [functools.partial(make, "cpu") for make in (ours.GradScaler, torch.amp.GradScaler)]
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
    assert_same_runs(*makers, ("Adam-foreach", "AdamW-fused"), plan, **SCALES["others"])


# A comparison that cannot fail shows nothing.


def wrong_scalers(torch: Any) -> dict[str, type[Any]]:
    """Return scalers that are not quite torch's."""

    class Inexact(torch.amp.GradScaler):  # type: ignore[misc,name-defined]
        def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
            inverse = torch.nextafter(inv_scale, torch.ones(()))
            return super()._unscale_grads_(optimizer, inverse, found_inf, allow_fp16)

    class Forgetful(torch.amp.GradScaler):  # type: ignore[misc,name-defined]
        def update(self, new_scale: Any = None) -> None:
            super().update(new_scale)
            self._growth_tracker.fill_(0)

    class Reckless(torch.amp.GradScaler):  # type: ignore[misc,name-defined]
        def _maybe_opt_step(self, optimizer: Any, _: Any, *args: Any, **kwargs: Any) -> Any:
            return optimizer.step(*args, **kwargs)

    class Silent(torch.amp.GradScaler):  # type: ignore[misc,name-defined]
        def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            super().step(optimizer, *args, **kwargs)

    class Late(torch.amp.GradScaler):  # type: ignore[misc,name-defined]
        def unscale_(self, optimizer: Any) -> None:
            super().unscale_(optimizer)
            self._per_optimizer_states[id(optimizer)]["stage"] = torch.amp.grad_scaler.OptState.READY

    return {each.__name__: each for each in (Inexact, Forgetful, Reckless, Silent, Late)}


@pytest.mark.parametrize("name", ["Inexact", "Forgetful", "Reckless", "Silent", "Late"])
def test_a_run_with_a_wrong_scaler_is_found(torch: Any, name: str) -> None:
    makers = [functools.partial(make, "cpu") for make in (wrong_scalers(torch)[name], torch.amp.GradScaler)]
    plan = [Iteration((UNSCALED, UNSCALED), bad=bad) for bad in (None, (2, math.inf), None)]
    with pytest.raises(AssertionError, match="is not"):
        assert_same_runs(*makers, ("Adam-foreach", "SGD-foreach"), plan, init_scale=1000.0)


# The private surface.


@pytest.mark.parametrize("bad", [1.0, math.inf], ids=["finite", "inf"])
def test_private_methods_are_torchs(torch: Any, ours: Any, bad: float) -> None:
    seen = []
    for make in (ours.GradScaler, torch.amp.GradScaler):
        scaler = make("cpu", init_scale=8.0)
        before = [scaler._get_scale_async(), scaler._scale, scaler._growth_tracker, scaler._get_growth_tracker()]
        lazy = [scaler._enabled, scaler._device, scaler._init_scale, scaler._init_growth_tracker]
        scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
        parameter = torch.nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        parameter.grad = torch.tensor([8.0, bad, 16.0])
        scaler.scale(torch.ones(()))
        checked = dict(scaler._check_inf_per_device(optimizer))
        stage = private_states(scaler, optimizer)
        gradient = parameter.grad.clone()
        scaler.unscale_(optimizer)
        found = dict(scaler._found_inf_per_device(optimizer))
        scaler.step(optimizer)
        stepped = private_states(scaler, optimizer)
        scaler.update()
        after = [scaler._get_scale_async(), scaler._scale, scaler._growth_tracker, scaler._get_growth_tracker()]
        ended = [len(scaler._per_optimizer_states), private_states(scaler, optimizer)]
        seen.append([before, lazy, checked, stage, gradient, found, stepped, after, ended, parameter])
    assert_same(*seen)


@pytest.mark.parametrize("bad", [1.0, math.inf], ids=["finite", "inf"])
def test_the_private_check_takes_float16_gradients_as_at_torchs(torch: Any, ours: Any, bad: float) -> None:
    seen = []
    for make in (ours.GradScaler, torch.amp.GradScaler):
        scaler = make("cpu", init_scale=8.0)
        scaler.scale(torch.ones(()))
        parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
        parameter.grad = torch.tensor([8.0, bad], dtype=torch.float16)
        seen.append([dict(scaler._check_inf_per_device(torch.optim.SGD([parameter], lr=1.0))), parameter.grad])
    assert_same(*seen)


def test_the_scale_and_the_tracker_stay_the_same_tensors(torch: Any, ours: Any) -> None:
    for make in (ours.GradScaler, torch.amp.GradScaler):
        scaler = make("cpu", growth_interval=2)
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scaler.scale(torch.ones(()))
        scale, tracker = scaler._scale, scaler._growth_tracker
        for value in (1.0, math.inf, 1.0, 1.0, 1.0):
            scaler.scale(torch.ones(()))
            parameter.grad = torch.full((1,), value)
            scaler.step(optimizer)
            scaler.update()
            assert scaler._scale is scale
            assert scaler._growth_tracker is tracker
        scaler.update(4.0)
        scaler.load_state_dict(scaler.state_dict())
        assert scaler._scale is scale
        assert scaler._growth_tracker is tracker
        assert (scale.item(), tracker.item()) == (4.0, 1)


@pytest.mark.parametrize("gradient", [3.0, math.inf], ids=["finite", "inf"])
def test_an_optimizer_that_takes_the_scaler_is_given_it_with_a_warning_as_by_torch(
    torch: Any, ours: Any, gradient: float
) -> None:
    class Asking(torch.optim.SGD):  # type: ignore[misc,name-defined]
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> str:
            assert not hasattr(self, "found_inf")
            found = grad_scaler._check_inf_per_device(self)
            scale = grad_scaler._get_scale_async()
            if any(flag.item() for flag in found.values()):
                return "skipped"
            for parameter in self.param_groups[0]["params"]:
                parameter.grad.div_(scale)
            super().step(closure)
            return "stepped"

    seen = []
    for make in (ours.GradScaler, torch.amp.GradScaler):
        scaler = make("cpu", init_scale=8.0)
        parameter = torch.nn.Parameter(torch.zeros(2))
        optimizer = Asking([parameter], lr=1.0)
        parameter.grad = torch.tensor([1.0, gradient]) * scaler.scale(torch.ones(()))
        with pytest.warns(FutureWarning) as warned:
            returned = scaler.step(optimizer)
        # The caller's line.
        assert [Path(each.filename) for each in warned] == [Path(__file__)]
        stepped = private_states(scaler, optimizer)
        scaler.update()
        seen.append([returned, stepped, parameter, parameter.grad, scaler.get_scale(), scaler._get_growth_tracker()])
    assert_same(*seen)
    assert seen[0][0] == ("stepped" if math.isfinite(gradient) else "skipped")


@pytest.mark.parametrize("gradient", [3.0, math.inf], ids=["finite", "inf"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_a_fused_optimizer_steps_parameters_of_other_dtypes_as_at_torchs(
    torch: Any, ours: Any, dtype: str, gradient: float
) -> None:
    seen = []
    for make in (ours.GradScaler, torch.amp.GradScaler):
        scaler = make("cpu", init_scale=8.0)
        parameter = torch.nn.Parameter(torch.ones(3, dtype=getattr(torch, dtype)))
        optimizer = torch.optim.AdamW([parameter], lr=0.5, fused=True)
        for value in (gradient, 1.0):
            scaler.scale(torch.ones(()))
            parameter.grad = torch.full_like(parameter, value) * 8.0
            # Without unscale_(), which refuses float16.
            scaler.step(optimizer)
            scaler.update()
        seen.append([parameter, parameter.grad, optimizer.state_dict(), scaler.get_scale()])
    assert_same(*seen)


# Calls in a wrong order: torch's exceptions of torch's types, with the same words first.


def wrong_calls(torch: Any) -> dict[str, list[Any]]:
    """Return sequences of calls of which the last is an error."""

    def unscale(scaler: Any, optimizer: Any) -> None:
        scaler.unscale_(optimizer)

    def step(scaler: Any, optimizer: Any) -> None:
        scaler.step(optimizer)

    def scale(scaler: Any, _optimizer: Any) -> None:
        scaler.scale(torch.ones(()))

    return {
        "unscale-twice": [scale, unscale, unscale],
        "unscale-after-step": [scale, step, unscale],
        "step-twice": [scale, step, step],
    }


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("name", ["unscale-twice", "unscale-after-step", "step-twice"])
def test_a_wrong_order_is_torchs_error(torch: Any, ours: Any, name: str, fused: bool) -> None:
    *calls, last = wrong_calls(torch)[name]
    messages = []
    for make in (ours.GradScaler, torch.amp.GradScaler):
        scaler = make("cpu")
        parameter = torch.nn.Parameter(torch.zeros(1))
        parameter.grad = torch.ones(1)
        optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
        for call in calls:
            call(scaler, optimizer)
        with pytest.raises(RuntimeError) as caught:
            last(scaler, optimizer)
        messages.append(str(caught.value))
    # Ours goes on, and says in "on this optimizer" what torch's leaves out.
    begin = messages[1].split(" since")[0].removesuffix(".").removesuffix(" on this optimizer")
    assert messages[0].startswith(begin), messages


# Where ours is meant to differ; both are shown.


def trained(torch: Any, scaler: Any, gradients: list[float]) -> list[tuple[float, int]]:
    """Return scale and tracker after iterations with these gradients."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    seen = []
    for gradient in gradients:
        scaler.scale(torch.ones(()))
        parameter.grad = torch.tensor([gradient])
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), scaler._get_growth_tracker()))
    return seen


def test_torch_never_grows_beyond_a_lowered_interval_and_ours_does(torch: Any, ours: Any) -> None:
    theirs, mine = torch.amp.GradScaler("cpu", init_scale=2.0), ours.GradScaler("cpu", init_scale=2.0)
    assert trained(torch, mine, [0.0] * 5) == trained(torch, theirs, [0.0] * 5)
    for scaler in (theirs, mine):
        scaler.set_growth_interval(3)
    assert trained(torch, theirs, [0.0] * 4) == [(2.0, 6), (2.0, 7), (2.0, 8), (2.0, 9)]
    assert trained(torch, mine, [0.0] * 4) == [(4.0, 0), (4.0, 1), (4.0, 2), (8.0, 0)]


@pytest.mark.parametrize("how", ["zeroed", "another model", "plain step", "step forgotten"])
def test_steps_without_gradients_and_updates_without_steps_are_errors_at_torchs_and_at_ours(
    torch: Any, ours: Any, how: str
) -> None:
    for make in (torch.amp.GradScaler, ours.GradScaler):
        scaler = make("cpu", init_scale=4.0, growth_interval=1)
        parameter, stranger = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
        optimizer = torch.optim.SGD([stranger if how == "another model" else parameter], lr=1.0)
        scaler.scale(parameter.sum()).backward()
        if how == "zeroed":
            optimizer.zero_grad()
        error = AssertionError if make is torch.amp.GradScaler else CallOrderError
        if how in ("zeroed", "another model"):
            with pytest.raises(error, match=r"No inf checks were recorded for this optimizer|none of whose parameters"):
                scaler.step(optimizer)
        elif how == "plain step":
            optimizer.step()
        with pytest.raises(error, match=r"No inf checks were recorded prior to update|no optimizer was unscaled"):
            scaler.update()
        assert (stranger.item(), parameter.item()) == (0.0, -4.0 if how == "plain step" else 0.0)
        assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("call", ["unscale_", "step", "update"])
def test_a_call_before_scale_is_an_assertion_error_at_torchs_and_one_of_order_at_ours(
    torch: Any, ours: Any, call: str
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    arguments = [] if call == "update" else [torch.optim.SGD([parameter], lr=1.0)]
    with pytest.raises(AssertionError, match="_scale is None"):
        getattr(torch.amp.GradScaler("cpu"), call)(*arguments)
    with pytest.raises(CallOrderError, match="scale"):
        getattr(ours.GradScaler("cpu"), call)(*arguments)
    assert parameter.grad.item() == 1.0


@pytest.mark.parametrize("new_scale", [8, "1-d", "float64-1-d"])
def test_torch_refuses_some_new_scales_that_its_message_names_and_ours_takes_them(
    torch: Any, ours: Any, new_scale: Any
) -> None:
    values = {8: 8, "1-d": torch.full((1,), 8.0), "float64-1-d": torch.full((1,), 8.0, dtype=torch.float64)}
    theirs, mine = torch.amp.GradScaler("cpu"), ours.GradScaler("cpu")
    for scaler in (theirs, mine):
        scaler.scale(torch.ones(()))
    with pytest.raises((AttributeError, RuntimeError)):
        theirs.update(values[new_scale])
    mine.update(values[new_scale])
    assert mine.get_scale() == 8.0


@pytest.mark.parametrize("new_scale", [0.0, -1.0, math.inf, math.nan, 1e-40])
def test_torch_takes_scales_that_ruin_the_run_and_ours_refuses_them(torch: Any, ours: Any, new_scale: float) -> None:
    theirs, mine = torch.amp.GradScaler("cpu"), ours.GradScaler("cpu")
    for scaler, value in itertools.product((theirs, mine), (new_scale, torch.tensor(new_scale))):
        scaler.scale(torch.ones(()))
        if scaler is theirs:
            theirs.update(value)
            assert not theirs.get_scale() >= 2.0**-126 or math.isinf(theirs.get_scale())
            continue
        with pytest.raises(ValueError, match="new_scale"):
            mine.update(value)
        assert mine.get_scale() == 65536.0
