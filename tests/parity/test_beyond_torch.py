"""What torch's scalers get wrong or do not say, in one process: scales, fused optimizers, closures, saved states."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from axes_torch import GradScaler, ShardedGradScaler, StepGuard, TorchScaler, torch
from interrupts import interrupted_anywhere
from small_torch import Small, assert_same
from tiers import later
from torch.amp.grad_scaler import OptState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import gradscale
from gradscale import CallOrderError, DynamicScale, ScaleDesyncError, StaticScale
from gradscale.testing import ThreadCollectives, run_ranks

pytestmark = pytest.mark.torch

explicit = pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale-step"])


@pytest.fixture
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Treat tensors of the host like those of a device, which make the host wait, or not, as the test says."""
    is_late = getattr(request, "param", True)
    monkeypatch.setattr("gradscale_torch.devices.is_on_cpu", lambda _: not is_late)


late_or_not = pytest.mark.parametrize("late", [False, True], ids=["at-once", "late"], indirect=True)


# The scale.


def sharded(*args, **options) -> ShardedGradScaler:
    """Return a scaler of one rank, whose state torch's kernel adapts."""
    return ShardedGradScaler(*args, group=run_ranks(1, lambda group: group)[0], **options)


@pytest.mark.parametrize("kind", [GradScaler, sharded])
def test_a_run_as_long_as_a_new_interval_grows_at_once(kind):
    run, scales = Small(kind("cpu", 4.0, growth_interval=100)), []
    for number in range(7):
        if number == 3:
            run.scaler.set_growth_interval(2)
        run.iterate(1.0)
        scales.append(run.scaler.get_scale())
    assert scales[3:] == [8.0, 8.0, 16.0, 16.0]


# Interrupted and failed steps.


@pytest.mark.parametrize("optimizer", ["SGD", "SGD-fused"])
@pytest.mark.parametrize("name", ["step", "_check_inf_per_device"])
def test_ctrl_c_anywhere_in_a_step_or_a_look_leaves_what_can_be_called(name: str, optimizer: str):
    def begin():
        run = Small(GradScaler("cpu", init_scale=4.0), optimizer)
        run.give(1.0)
        return run, lambda: getattr(run.scaler, name)(run.optimizer)

    for run in interrupted_anywhere("/gradscale_torch/", begin):
        if name == "step":
            run.scaler.update(4.0)
            before = run.parameter.tolist()
            run.give(1.0)
        else:
            # Gradients stay as they are.
            before = [0.0, 0.0]
        run.step()
        assert run.parameter.tolist() == [value - 1.0 for value in before]


@pytest.mark.parametrize("gradient", [math.inf, *later("ranks", 1.0)])
@pytest.mark.parametrize(("optimizer", "late"), [("SGD", False), ("SGD-fused", True)], indirect=["late"])
@pytest.mark.usefixtures("late")
def test_ctrl_c_anywhere_in_an_update_that_is_made_again_moves_the_scale_once(gradient: float, optimizer: str):
    def begin():
        policy = DynamicScale(init_scale=4.0, growth_interval=1, hysteresis=2)
        run = Small(GradScaler("cpu", policy=policy), optimizer)
        run.iterate(math.inf)
        run.give(gradient)
        run.scaler.step(run.optimizer)
        return run, run.scaler.update

    uninterrupted, update = begin()
    update()
    for run in interrupted_anywhere("/gradscale", begin):
        # It may have come when all was done.
        with contextlib.suppress(CallOrderError):
            run.scaler.update()
        found, expected = run.scaler.state_dict(), uninterrupted.scaler.state_dict()
        # A late verdict that was just being counted may be lost.
        assert found | {"counts": None} == expected | {"counts": None}


# Fused optimizers, whose verdict the host reads later, as on a device.


@late_or_not
@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("settings", [{}, {"dampening": 0.5}, {"nesterov": True}], ids=str)
def test_after_a_first_fused_step_that_was_skipped_the_next_one_is_the_first(settings: dict[str, Any]):
    # Torch allocates the momentum before the kernel that skips, and then takes it for filled; here it is all NaN.
    seen = []
    torch.use_deterministic_algorithms(True)
    try:
        for variant, gradients in (("fused", (math.inf, 1.0, 3.0)), ("single", (1.0, 3.0))):
            run = Small(GradScaler("cpu"), f"SGD-{variant}", momentum=0.5, **settings)
            for gradient in gradients:
                run.iterate(gradient)
            seen.append(run.parameter)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(*seen)


@pytest.mark.usefixtures("late")
def test_a_policy_that_raises_at_its_minimum_is_read_at_once():
    policy = DynamicScale(init_scale=2.0, min_scale=2.0, at_min="raise")
    run = Small(GradScaler("cpu", policy=policy), "SGD-fused")
    with pytest.raises(gradscale.ScaleUnderflowError, match=r"minimum, 2\.0"):
        run.iterate(math.nan)
    assert run.held == [[0.0, 0.0]]


@pytest.mark.usefixtures("late")
@explicit
@pytest.mark.parametrize("bad_rank", [0, 1, 2])
def test_all_ranks_skip_by_themselves_and_those_that_differ_are_told_at_the_next_call(bad_rank: int, explicit: bool):
    def rank(group: ThreadCollectives):
        run = Small(ShardedGradScaler("cpu", init_scale=4.0, growth_interval=1, group=group), "SGD-fused")
        run.iterate(math.inf if group.rank == bad_rank else 1.0, explicit=explicit)
        report = run.report
        run.iterate(1.0, explicit=explicit)
        told = (report.skipped, report.reason, report.scale, report.nonfinite, report.local_nonfinite)
        seen = told, run.held, run.scaler.get_scale(), group.calls
        if group.rank == bad_rank:
            run.scaler.update(8.0)
        run.give(1.0)
        with pytest.raises(ScaleDesyncError, match=r"scale from 4\.0 to 8\.0"):
            run.step(explicit=explicit)
        assert run.held == seen[1]
        return seen

    # With a greeting before the first of two.
    assert run_ranks(3, rank) == [
        ((True, "overflow", 4.0, 1, int(rank == bad_rank)), [[-1.0, -1.0]], 4.0, 3) for rank in range(3)
    ]


class Judging(torch.optim.SGD):  # type: ignore[misc]
    """As those of apex and NeMo: it is passed the scaler, and has it judge, or tells what it has found itself."""

    _step_supports_amp_scaling = True

    def step(self, *, grad_scaler, tells: bool = False):
        (parameter,) = self.param_groups[0]["params"]
        if tells:
            parameter.grad /= grad_scaler._scale
            is_bad = torch.logical_not(parameter.grad.isfinite().all()).float()
            grad_scaler._per_optimizer_states[id(self)]["found_inf_per_device"] = {is_bad.device: is_bad}
        else:
            grad_scaler.unscale_(self)
            (is_bad,) = grad_scaler._found_inf_per_device(self).values()
        if not is_bad:
            super().step()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("options", [{}, {"tells": True}], ids=["asks", "tells"])
def test_an_optimizer_that_is_passed_the_scaler_has_it_judge_or_tells_what_it_has_found(options: dict[str, bool]):
    for make in (TorchScaler, GradScaler):
        run = Small(make("cpu", init_scale=4.0), functools.partial(Judging, lr=1.0))
        for gradient in (1.0, math.inf, 1.0, math.nan):
            run.give(gradient)
            run.scaler.step(run.optimizer, **options)
            run.scaler.update()
        assert (run.held, run.state) == ([[-2.0, -2.0]], (1.0, 0))
    assert run.report.reason == "overflow"


def test_refusals_and_overflows_count_beside_the_verdicts_of_frameworks():
    scaler = GradScaler("cpu", init_scale=4.0)
    runs = [Small(scaler) for _ in range(3)]
    for run, gradient in zip(runs, (math.inf, 1.0, math.inf), strict=True):
        run.give(gradient)
        scaler.unscale_(run.optimizer)
    scaler.refuse(runs[0].optimizer)
    for run in runs[:2]:
        next(iter(scaler._found_inf_per_device(run.optimizer).values())).zero_()
    for run in runs:
        scaler.step(run.optimizer)
    scaler.update()
    assert [run.report.reason for run in runs] == ["refused", "stepped", "overflow"]
    assert (runs[0].held, scaler.get_scale()) == ([[0.0, 0.0]], 2.0)


@pytest.mark.parametrize("optimizer", ["SGD", "SGD-fused"])
@pytest.mark.parametrize("is_refused_first", [True, False], ids=["before unscale_", "after"])
@late_or_not
@pytest.mark.usefixtures("late")
def test_a_step_whose_overflow_a_framework_overrules_is_still_refused(is_refused_first: bool, optimizer: str):
    run = Small(GradScaler("cpu", init_scale=4.0), optimizer)
    run.give(math.inf)
    calls = [run.scaler.refuse, run.scaler.unscale_]
    for call in calls if is_refused_first else calls[::-1]:
        call(run.optimizer)
    for flag in run.scaler._found_inf_per_device(run.optimizer).values():
        flag.zero_()
    run.scaler.step(run.optimizer)
    run.scaler.update()
    assert (run.report.reason, run.held, run.scaler.get_scale()) == ("refused", [[0.0, 0.0]], 4.0)


@pytest.mark.parametrize("bad", range(3))
@pytest.mark.parametrize("odd", range(3))
def test_a_step_that_one_rank_refuses_is_not_made_if_frameworks_overrule_the_overflow_of_any(odd: int, bad: int):
    def rank(group) -> list[Any]:
        run = Small(ShardedGradScaler("cpu", 4.0, group=group))
        run.give(math.inf if group.rank == bad else 1.0)
        if group.rank == odd:
            run.scaler.refuse(run.optimizer)
        run.scaler.unscale_(run.optimizer)
        for flag in run.scaler._found_inf_per_device(run.optimizer).values():
            flag.zero_()
        run.scaler.step(run.optimizer)
        run.scaler.update()
        return [run.report.reason, run.held, run.scaler.get_scale()]

    assert run_ranks(3, rank) == [["refused", [[0.0, 0.0]], 4.0]] * 3


@pytest.mark.parametrize("gradient", [1.0, math.inf])
def test_an_update_tells_of_a_skip_that_a_framework_has_made_by_itself(gradient: float):
    told: list[gradscale.UpdateReport] = []
    run = Small(GradScaler("cpu", init_scale=4.0, on_update=told.append))
    run.give(gradient)
    run.scaler.unscale_(run.optimizer)
    run.scaler._per_optimizer_states[id(run.optimizer)]["stage"] = OptState.STEPPED
    run.scaler.update()
    is_bad = math.isinf(gradient)
    assert [(one.skipped, one.steps, one.scale) for one in told] == [(is_bad, (), 4.0)]
    assert run.scaler.get_scale() == (2.0 if is_bad else 4.0)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_refused_step_of_an_optimizer_that_judges_by_itself_is_not_made_and_over_a_group_an_error():
    def refused(group=None):
        run = Small(GradScaler("cpu", init_scale=4.0, group=group), functools.partial(Judging, lr=1.0))
        run.give(1.0)
        run.scaler.refuse(run.optimizer)
        run.scaler.step(run.optimizer, tells=True)
        run.scaler.update()
        assert run.scaler.counts()["refused"] == 1
        return run.held, run.report.reason

    assert refused() == ([[0.0, 0.0]], "refused")
    with pytest.raises(CallOrderError, match="let the framework's own flags skip the step"):
        run_ranks(2, refused)


# Closures.


def minimised(scaler, name: str, spoil_at: float = math.inf):
    """Follow the valley of Rosenbrock's function, with gradients that overflow at a scale from ``spoil_at`` on.

    Return the losses, the parameter, and how often the closure was tried again.
    """
    options = {"lr": 0.5, "max_iter": 10} if name == "LBFGS" else {"lr": 0.01}
    run, losses, retries = Small(scaler, name, start=0.5, **options), [], []

    def closure():
        run.optimizer.zero_grad()
        x, y = run.parameter
        loss = (1 - x) ** 2 + 10 * (y - x * x) ** 2
        factor = scaler.scale(torch.ones(()))
        (loss * factor).backward()
        if factor >= spoil_at:
            run.parameter.grad[0] = math.inf
        return loss

    for _ in range(12):
        losses.append(scaler.step(run.optimizer, closure).item())
        retries.append(run.report.retries)
        scaler.update()
    return [losses, run.parameter], retries


# The first evaluates it more than once.
@pytest.mark.parametrize("name", ["LBFGS", "SGD-fused"])
def test_a_closure_is_retried_at_a_lower_scale(name: str):
    plain, _ = minimised(GradScaler("cpu", enabled=False), name)
    assert plain[0][-1] < plain[0][0] == 0.875
    for spoil_at, retries, scale in ((math.inf, 0, 65536.0), (2.0**12, 5, 2.0**11)):
        scaler = GradScaler("cpu")
        found, retried = minimised(scaler, name, spoil_at)
        assert (retried, scaler.get_scale()) == ([retries, *[0] * 11], scale)
        # The scale is a power of two, so that nothing is rounded by it.
        assert_same(found, plain)


# Worlds.


@pytest.mark.parametrize("kind", [GradScaler, ShardedGradScaler])
def test_a_scaler_without_a_group_goes_on_in_a_second_world(kind):
    scaler = kind("cpu", init_scale=4.0)
    for _ in range(2):
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            world = torch.distributed.group.WORLD
            parameter = torch.nn.Parameter(DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)]))
            optimizer = torch.optim.SGD([parameter], lr=0.5)
            scaler.scale(parameter.sum().full_tensor()).backward()
            before = world._get_sequence_number_for_group()
            scaler.step(optimizer)
            # A group of the world before would answer, too.
            assert world._get_sequence_number_for_group() > before
            scaler.update()
        finally:
            torch.distributed.destroy_process_group()
        assert parameter.to_local().tolist() == [0.5, 0.5]


# State dicts and pickles.


def trained(scaler, gradients: list[float]):
    """Train on with these gradients; return the scale, the tracker and the parameter after each iteration."""
    run, seen = Small(scaler, momentum=0.9), []
    for gradient in gradients:
        run.iterate(gradient)
        seen.append([*run.state, run.parameter.detach().clone()])
    return seen


MORE = [0.5, 0.25, -1.0, math.nan, 1.0, 2.0, 3.0, 4.0]


RULE = gradscale.SkipSpikes(window=4, min_values=2)
KEPT = {
    "guard": functools.partial(StepGuard, skip=RULE, give_up_after=9),
    "plain guard": StepGuard,
    "scaler": functools.partial(GradScaler, "cpu", skip=RULE, give_up_after=9),
    "scaler of a policy": functools.partial(GradScaler, "cpu", policy=DynamicScale(hysteresis=2)),
    "plain scaler": functools.partial(GradScaler, "cpu"),
}


def run_for(scaler: Any, numbers: int, optimizers: int) -> Any:
    """Make steps of optimizers, of which one overflows and one is a spike; a guard drops micro-batches, too."""
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(optimizers)]
    steps = [torch.optim.SGD([weight], lr=0.0) for weight in weights]
    for number in range(numbers):
        for weight, optimizer in zip(weights, steps, strict=True):
            if isinstance(scaler, StepGuard):
                scaler.keeps(torch.tensor(math.nan if number == 1 else 1.0))
            value = {2: math.inf, 4: 99.0}.get(number, 1.0)
            scaler.scale((weight * value).sum()).backward()
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    return scaler


def split_windows(scaler: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return the state dict of a scaler without its windows, and these."""
    saved = scaler.state_dict()
    return saved, json.loads(saved.pop("spikes", "[]"))


@pytest.mark.filterwarnings("ignore:torch.distributed is .*single process:UserWarning")
@pytest.mark.parametrize("kind", KEPT)
def test_dcp_loads_a_scaler_whatever_both_have_met(kind: str, tmp_path: Path):
    dcp = importlib.import_module("torch.distributed.checkpoint")
    ways = [(0, 0), (1, 1), (6, 2)]
    for index, (saved, loaded) in enumerate(itertools.permutations(ways, 2)):
        scaler, other = (run_for(KEPT[kind](), *way) for way in (saved, loaded))
        folder = tmp_path / str(index)
        dcp.save({"scaler": scaler}, checkpoint_id=folder)
        dcp.load({"scaler": other}, checkpoint_id=folder)
        (expected, windows), (found, others) = (split_windows(one) for one in (scaler, other))
        assert found == expected
        assert others[: len(windows)] == windows
        assert not any(one["values"] for each in others[len(windows) :] for one in each.values())


def test_a_policy_that_torch_does_not_know_is_saved_and_torch_loads_its_part_of_it():
    policy = DynamicScale(init_scale=8.0, growth_interval=3, hysteresis=2, max_scale=64.0)
    scaler = GradScaler("cpu", policy=policy)
    trained(scaler, [1.0, math.inf])
    saved = scaler.state_dict()
    assert saved["_overflow_tracker"] == 1
    restored, plain = GradScaler("cpu"), TorchScaler("cpu")
    for one in (restored, plain):
        one.load_state_dict(saved)
    keys = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
    assert plain.state_dict() == {key: saved[key] for key in keys}
    assert_same(trained(restored, MORE), trained(scaler, MORE))
    plain.load_state_dict(GradScaler("cpu", policy=StaticScale(init_scale=32.0)).state_dict())
    assert plain.get_scale() == 32.0


@pytest.mark.parametrize("optimizer", ["SGD", "SGD-fused"])
@pytest.mark.parametrize("make", [GradScaler, sharded])
@late_or_not
@pytest.mark.usefixtures("late")
def test_gradients_that_were_scaled_before_a_load_are_divided_by_the_state_that_made_them(make, optimizer: str):
    run = Small(make("cpu", 4.0), optimizer)
    run.iterate(1.0)
    run.give(1.0)
    run.scaler.load_state_dict(run.scaler.state_dict() | {"scale": 1024.0})
    run.step()
    assert (run.held, run.report.scale, run.scaler.get_scale()) == ([[-2.0, -2.0]], 4.0, 1024.0)


@pytest.mark.parametrize(("gradient", "steps"), [(1.0, 2), (math.inf, 1)], ids=["made", "skipped"])
def test_a_state_over_a_group_between_step_and_update_has_the_steps_that_are_not_in_torchs_keys(gradient, steps: int):
    def rank(group) -> list[Any]:
        run = Small(GradScaler("cpu", 4.0, group=group))
        run.iterate(1.0)
        run.give(gradient)
        run.scaler.step(run.optimizer)
        saved = run.scaler.state_dict()
        run.scaler.update()
        after = run.scaler.state_dict()
        # The weights of one rank are newer than its scale, or may be, and those of the other are not.
        run.scaler.load_state_dict((saved if group.rank else after) | {"iteration": 3})
        with pytest.raises(ScaleDesyncError, match=rf"steps made in .*: 0 on rank 0 \| {steps} on rank 1"):
            run.iterate(1.0)
        return [saved.get("steps"), after.get("steps")]

    assert run_ranks(2, rank) == [[steps, None]] * 2


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("make", [GradScaler, ShardedGradScaler])
def test_a_tracker_at_the_interval_or_beyond_it_lets_the_scale_grow_after_one_clean_step(make):
    for tracker in (3, 4):
        scaler = make("cpu", init_scale=8.0, growth_interval=3)
        scaler.load_state_dict(scaler.state_dict() | {"_growth_tracker": tracker})
        assert trained(scaler, [1.0])[0][:2] == [16.0, 0]


def test_what_torchs_scaler_pickles_is_loaded_though_it_was_restored_from_ours_before():
    ours, theirs = (kind("cpu", init_scale=8.0) for kind in (GradScaler, TorchScaler))
    theirs.__setstate__(pickle.loads(pickle.dumps(ours.__getstate__())))
    run = Small(theirs)
    run.give(math.inf)
    run.step()
    again = GradScaler.__new__(GradScaler)
    again.__setstate__(pickle.loads(pickle.dumps(theirs.__getstate__())))
    assert again.get_scale() == theirs.get_scale() == 4.0


@pytest.mark.usefixtures("group")
def test_a_sharded_scaler_takes_gradients_of_float16_as_torchs_does():
    run = Small(ShardedGradScaler("cpu", 8.0), dtypes=["float16"])
    run.iterate(1.0)
    assert run.parameter.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("given", [{}, {"max_norm": 2.5}], ids=["constructor", "unscale_"])
def test_a_disabled_scaler_clips_gradients_of_float16(given: dict[str, float]):
    run = Small(GradScaler("cpu", enabled=False, max_norm=None if given else 2.5), dtypes=["float16"])
    run.put(torch.tensor([3.0, -4.0], dtype=torch.float16))
    run.step(**given)
    assert run.held == [[-1.5, 2.0]]


@pytest.mark.usefixtures("group")
def test_an_unpickled_sharded_scaler_agrees_over_the_default_group_and_asks_for_any_other():
    scaler = ShardedGradScaler("cpu", 2.0**10, 0.25, 4.0, 4)
    trained(scaler, [1.0, math.inf, 3.0])
    assert_same(trained(pickle.loads(pickle.dumps(scaler)), MORE), trained(scaler, MORE))
    scaler.set_group(torch.distributed.group.WORLD)
    unpickled = pickle.loads(pickle.dumps(scaler))
    with pytest.raises(CallOrderError, match="set_group"):
        trained(unpickled, MORE)
