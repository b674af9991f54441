"""check_trainer on loops of torch: torch's scaler as documented, ours with all options, and faulty ones."""

from __future__ import annotations

import copy
import functools
import time
from typing import Any

import pytest
from axes_torch import GradScaler, StepGuard, TorchScaler, torch

import gradscale
from gradscale.testing import TrainerReport, check_trainer

pytestmark = [pytest.mark.torch, pytest.mark.tier("ranks")]

nn = torch.nn
FEATURES = 4


class Loop:
    """The loop of torch's documentation, with clipping, and a schedule and an average that do not move at a skip."""

    make_scaler: Any = staticmethod(functools.partial(TorchScaler, "cpu"))
    norm: Any = nn.Identity
    dtype = torch.float32

    def __init__(self, init_scale: float = 2.0**10):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(FEATURES, FEATURES), self.norm(), nn.Tanh(), nn.Linear(FEATURES, 1))
        self.model.to(self.dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        self.ema = copy.deepcopy(self.model)
        self.scaler = self.make_scaler(init_scale=init_scale, growth_interval=3)

    def loss(self, index: int):
        inputs = torch.randn((8, FEATURES), generator=torch.Generator().manual_seed(index))
        return self.model(inputs.to(self.dtype)).float().square().mean()

    def step(self, index: int, fault: float):
        self.optimizer.zero_grad()
        loss = self.loss(index) * fault
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.after(was_made=self.scaler.get_scale() >= scale)

    def after(self, was_made: bool):
        if was_made:
            self.schedule.step()
            self.average()

    def average(self):
        with torch.no_grad():
            for mean, weight in zip(self.ema.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(weight, 0.1)

    def state(self):
        return {name: vars(self)[name] for name in ("model", "optimizer", "schedule", "ema", "scaler")}

    def save(self):
        return copy.deepcopy({name: part.state_dict() for name, part in self.state().items()})

    def load(self, saved):
        for name, part in self.state().items():
            part.load_state_dict(saved[name])


def report_on(make, **options) -> TrainerReport:
    """Return the report on a loop."""
    return check_trainer(make, raises=False, progress=lambda *_: None, **options)


def test_torchs_scaler_as_its_documentation_has_it_in_a_few_seconds():
    begin = time.monotonic()
    assert str(report_on(Loop)) == "check_trainer: 21 runs, faults: 0"
    assert time.monotonic() - begin < 30.0


class Ours(Loop):
    make_scaler = staticmethod(functools.partial(GradScaler, "cpu"))


class AllOptions(Loop):
    norm = functools.partial(nn.BatchNorm1d, FEATURES)

    def __init__(self, init_scale: float = 2.0**10):
        super().__init__(init_scale)
        policy = gradscale.DynamicScale(init_scale=init_scale, growth_interval=3, hysteresis=2)
        rule = gradscale.SkipSpikes(window=8)
        options = {"hold": self.model, "diagnose": "on_overflow", "give_up_after": 9}
        self.scaler = GradScaler("cpu", policy=policy, skip=rule, **options)

    def step(self, index: int, fault: float):
        self.scaler.scale(self.loss(index) * fault).backward()
        self.scaler.unscale_(self.optimizer, max_norm=1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.end_step()

    def end_step(self):
        self.scaler.step_schedule(self.optimizer, self.schedule)
        if not self.scaler.last_step(self.optimizer).skipped:
            self.average()
        self.optimizer.zero_grad()


class Guarded(AllOptions):
    dtype = torch.bfloat16

    def __init__(self):
        super().__init__()
        rule = gradscale.SkipSpikes(window=8)
        self.scaler = StepGuard(max_norm=1.0, skip=rule, hold=self.model, give_up_after=9)

    def step(self, index: int, fault: float):
        loss = self.loss(index) * fault
        loss.backward()
        self.scaler.step(self.optimizer, loss=loss, batch=index)
        self.end_step()


@pytest.mark.parametrize("make", [Ours, AllOptions, Guarded])
def test_ours_have_no_fault(make):
    assert report_on(make).faults == []


@pytest.mark.parametrize("make", [AllOptions, Guarded])
def test_ours_leave_no_trace_of_spikes(make):
    report = report_on(make, kinds=["nan", "spike"], steps=14, bad_steps=[8, (9, 10)])
    assert report.faults == []
    # Before it has enough values the rule lets it pass.
    (fault,) = report_on(make, kinds=["spike"], steps=8, bad_steps=[2]).faults
    assert (fault.rule, fault.kind, fault.step) == (1, "spike", 2)


class Buffers(Loop):
    norm = functools.partial(nn.BatchNorm1d, FEATURES)


class ScheduleAlwaysMoves(Loop):
    def after(self, was_made: bool):
        super().after(was_made)
        if not was_made:
            self.schedule.step()


class AverageAlwaysMoves(Loop):
    def after(self, was_made: bool):
        super().after(was_made)
        if not was_made:
            self.average()


class NeverZeroes(Loop):
    """Only after a step that was made."""

    def __init__(self, init_scale: float = 2.0**10):
        super().__init__(init_scale)
        self.zero_grad, self.optimizer.zero_grad = self.optimizer.zero_grad, lambda: None

    def after(self, was_made: bool):
        super().after(was_made)
        if was_made:
            self.zero_grad()


class ClipsScaled(Loop):
    def step(self, index: int, fault: float):
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(index) * fault).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.after(was_made=self.scaler.get_scale() >= scale)


class StepsPastTheScaler(Loop):
    def step(self, index: int, fault: float):
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(index) * fault).backward()
        self.optimizer.step()
        self.after(was_made=True)


class ScalerIsNotSaved(Loop):
    def load(self, saved):
        super().load(saved | {"scaler": self.scaler.state_dict()})


class MomentsAreNotSaved(Loop):
    def load(self, saved):
        super().load(saved | {"optimizer": self.optimizer.state_dict()})


class NoGuard(Loop):
    make_scaler = staticmethod(functools.partial(TorchScaler, "cpu", enabled=False))

    def after(self, was_made: bool):
        assert was_made
        super().after(was_made)


FAULTY = [
    (Buffers, "pytorch #88474, #90342", 1, "model.1.running_mean", "buffers that the forward pass"),
    (ScheduleAlwaysMoves, "accelerate #4242", 1, "optimizer.param_groups[0].lr", "a schedule that counts"),
    (AverageAlwaysMoves, "lerobot #4652", 1, "ema.0.weight", "an average (EMA)"),
    (NeverZeroes, "PaddlePaddle #67895", 1, "model.0.weight", "does not zero"),
    (ClipsScaled, "accelerate #641", 2, "model.0.weight", "clipping before unscaling"),
    (StepsPastTheScaler, "Applio #860", 1, "model.0.weight", "the step was not skipped"),
    (ScalerIsNotSaved, "transformers #34053, the_well #77", 3, "scaler.", "is it saved"),
    (MomentsAreNotSaved, "ultralytics #24615", 3, "optimizer.state[0].", "is it saved"),
    (NoGuard, "DeepSpeed #8415, mlx-lm #1658", 1, "model.0.weight", "the step was not skipped"),
]


@pytest.mark.parametrize(("make", "after", "rule", "part", "words"), FAULTY, ids=[row[0].__name__ for row in FAULTY])
def test_a_faulty_loop_is_found(make, after: str, rule: int, part: str, words: str):
    report = report_on(make)
    lines = [str(fault) for fault in report.faults if fault.rule == rule and fault.part.startswith(part)]
    assert lines, (after, str(report))
    assert words in lines[0], (after, lines[0])
