"""check_trainer finds what public threads report of training loops, and finds nothing in a loop that is right."""

from __future__ import annotations

import functools
import math
import random
import sys
import time
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from commands import python
from trainers import Loop

from gradscale import InvalidTypeError, InvalidValueError
from gradscale.testing import TrainerReport, check_trainer, run_ranks


def silent(*_: int):
    """Say nothing."""


def check(make, size: int = 1, **options) -> TrainerReport:
    """Return the report on a loop, which is the same on all ranks."""
    options = {"raises": False, "progress": silent} | options
    if size == 1:
        return check_trainer(functools.partial(make, None), **options)
    reports = run_ranks(size, lambda group: check_trainer(functools.partial(make, group), group=group, **options))
    assert all(report == reports[0] for report in reports)
    return reports[0]


class StepsAlways(Loop):
    def is_finite(self):
        return True


class MomentsOfBadSteps(Loop):
    def clip(self):
        super().clip()
        self.momentum = np.float32(0.9) * self.momentum + self.grads

    def optimizer_step(self):
        self.weights = self.weights - np.float32(self.lr) * self.momentum


class ScheduleCountsSkippedSteps(Loop):
    def update(self, is_clean: bool):
        super().update(is_clean)
        self.lr *= 1.0 if is_clean else 0.8


class AverageMovesWithSkippedSteps(Loop):
    def update(self, is_clean: bool):
        super().update(is_clean)
        if not is_clean:
            self.ema = np.float32(0.9) * self.ema + np.float32(0.1) * self.weights


class BuffersKeepTheBadBatch(Loop):
    def train(self, index: int, faults: Any):
        super().train(index, faults)
        if not self.is_finite():
            self.buffers["running_mean"] = self.buffers["running_mean"] * np.float32(math.nan)


class CountsSkippedSteps(Loop):
    def update(self, is_clean: bool):
        super().update(is_clean)
        self.steps_made += not is_clean


class ReplacesBadGradients(Loop):
    """Momentum moves the weights all the same."""

    def unscale(self):
        super().unscale()
        self.grads = np.nan_to_num(self.grads, nan=0.0, posinf=0.0, neginf=0.0)


class KeepsBadGradients(Loop):
    stale = np.float32(0.0)

    def zero_grad(self):
        if self.is_finite():
            super().zero_grad()


class GivesUp(Loop):
    """Of two bad steps in a row it makes the second one."""

    skipped = 0

    def is_finite(self):
        self.skipped = 0 if super().is_finite() else self.skipped
        return super().is_finite() or self.skipped > 0

    def update(self, is_clean: bool):
        super().update(is_clean)
        self.skipped += not is_clean


class RaisesOnBadSteps(Loop):
    def clip(self):
        if not self.is_finite():
            raise FloatingPointError("the norm is not finite")
        super().clip()


class RaisesAfterSkips(Loop):
    """A skipped step does not end the iteration."""

    is_unscaled = False

    def unscale(self):
        if self.is_unscaled:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        super().unscale()

    def update(self, is_clean: bool):
        super().update(is_clean)
        self.is_unscaled = not is_clean


class UnscalesTwice(Loop):
    def unscale(self):
        super().unscale()
        super().unscale()


class NeverUnscales(Loop):
    max_norm = math.inf

    def unscale(self):
        pass


class ClipsBeforeUnscaling(Loop):
    def unscale(self):
        super().clip()
        super().unscale()

    def clip(self):
        pass


class ClipsInFloat16(Loop):
    """The norm of scaled gradients is inf there, and they become 0."""

    def unscale(self):
        norm = np.sqrt(np.sum((self.grads / np.float32(8.0)).astype(np.float16) ** 2, dtype=np.float16))
        self.grads = self.grads * np.minimum(np.float32(1e4) / norm.astype(np.float32), np.float32(1.0))
        super().unscale()


class UnscalesWithTheNextScale(Loop):
    def unscale(self):
        grows = self.growth_tracker + 1 == self.growth_interval
        self.grads = self.grads / np.float32(self.scale * (2.0 if grows else 1.0))


class LeavesGradientsScaledAfterOverflow(Loop):
    after_overflow = False

    def unscale(self):
        if not self.after_overflow:
            super().unscale()

    def update(self, is_clean: bool):
        super().update(is_clean)
        self.after_overflow = not is_clean


class ScaleIsNotSaved(Loop):
    def save(self):
        return {name: value for name, value in super().save().items() if name != "scale"}


class GrowthTrackerIsNotSaved(Loop):
    def save(self):
        return {name: value for name, value in super().save().items() if name != "growth_tracker"}


class LoadingMovesTheScale(Loop):
    def load(self, saved):
        super().load(saved)
        self.update(True)


class RaisesAfterLoading(Loop):
    is_lazy = False

    def load(self, saved):
        super().load(saved)
        self.is_lazy = True

    def unscale(self):
        if self.is_lazy:
            raise AssertionError("Attempted unscale_ but _scale is None")
        super().unscale()


class AverageIsNotSaved(Loop):
    def save(self):
        return {name: value for name, value in super().save().items() if name != "ema"}


class DropsMicroBatches(Loop):
    def train(self, index: int, faults: Any):
        super().train(index, tuple(fault if fault == 1.0 else None for fault in faults))


class CountsDroppedMicroBatches(Loop):
    def train(self, index: int, faults: Any):
        self.dropped = np.float32(len([fault for fault in faults if fault is not None]))
        kept = tuple(fault if fault == 1.0 else None for fault in faults)
        self.dropped = np.float32(sum(fault is not None for fault in kept)) / self.dropped
        super().train(index, kept)

    def unscale(self):
        super().unscale()
        self.grads = self.grads * self.dropped


class Waits(Loop):
    def step(self, index: int, fault: Any):
        if fault != 1.0:
            time.sleep(3.0)
        super().step(index, fault)


class Case(NamedTuple):
    """A faulty loop, the public thread that it is after, and the rule, the part and words of the first line."""

    make: type[Loop]
    after: str
    rule: int
    part: str
    words: str


class DrawsInEachStep(Loop):
    """As a dropout does, and a checkpoint has it."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.generator = np.random.default_rng(0)

    def train(self, index: int, faults: Any):
        super().train(index, faults)
        self.generator.random()

    def state(self):
        return super().state() | {"rng": self.generator.bit_generator.state}


ONE = [
    Case(StepsAlways, "mlx-lm #1658: one bad batch loses the whole run", 1, "weights", "the step was not skipped"),
    Case(MomentsOfBadSteps, "DeepSpeed #8035: one element makes the moments NaN", 1, "optimizer.momentum", "momentum"),
    Case(ScheduleCountsSkippedSteps, "accelerate #4242", 1, "lr", "a schedule that counts skipped steps"),
    Case(AverageMovesWithSkippedSteps, "lerobot #4652", 1, "ema", "an average (EMA)"),
    Case(BuffersKeepTheBadBatch, "pytorch #88474", 1, "buffers.running_mean", "buffers that the forward pass"),
    Case(CountsSkippedSteps, "accelerate #4243", 1, "optimizer.steps", "a step that was not skipped"),
    Case(ReplacesBadGradients, "levanter #973: zeros for the inner optimizer", 1, "optimizer.steps", "momentum"),
    Case(KeepsBadGradients, "PaddlePaddle #67895: gradients that were never cleared", 1, "weights", "does not zero"),
    Case(GivesUp, "optax apply_if_finite, which accepts the NaN when it gives up", 1, "weights", "not skipped"),
    Case(RaisesOnBadSteps, "torchtitan #916", 1, "", "FloatingPointError: the norm is not finite"),
    Case(RaisesAfterSkips, "LVSM #19, espnet #2362", 1, "", "unscale_() has already been called"),
    Case(DrawsInEachStep, "of a strange loop", 1, "rng.state.state", "random numbers that the bad step has drawn"),
    Case(UnscalesTwice, "accelerate #113, Relax #44", 2, "weights", "gradients divided twice"),
    Case(NeverUnscales, "Applio #860, ColossalAI #1218", 2, "weights", "or never"),
    Case(ClipsBeforeUnscaling, "accelerate #641, determined #699", 2, "weights", "clipping before unscaling"),
    Case(ClipsInFloat16, "unsloth-zoo #1261", 2, "weights", "clipping before unscaling"),
    Case(UnscalesWithTheNextScale, "DeepSpeed #8588", 1, "weights", "a scale that shows"),
    Case(LeavesGradientsScaledAfterOverflow, "fairscale #879", 1, "weights", "a scale that shows"),
    Case(ScaleIsNotSaved, "transformers #34053", 3, "scaler.scale", "is it saved"),
    Case(GrowthTrackerIsNotSaved, "metaseq #3", 3, "scaler.growth_tracker", "is it saved"),
    Case(LoadingMovesTheScale, "accelerate #4289", 3, "scaler", "is it saved"),
    Case(RaisesAfterLoading, "fairseq2 #1346", 3, "", "Attempted unscale_ but _scale is None"),
    Case(AverageIsNotSaved, "ultralytics #24986", 3, "ema", "is it saved"),
]


def expect(report: TrainerReport, case: Case):
    """Assert that a report names the rule, the part and the cause, and says what the case is after if it does not."""
    faults = [fault for fault in report.faults if fault.rule == case.rule]
    assert faults, (case.after, str(report))
    line = str(faults[0])
    assert faults[0].part.startswith(case.part), (case.after, line)
    assert (faults[0].part == "") == (case.part == ""), (case.after, line)
    assert f"`{faults[0].part}`" in line or not case.part, (case.after, line)
    assert case.words in line, (case.after, line)
    assert line.startswith(f"rule {case.rule}: "), (case.after, line)


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.tier("ranks"))])
def test_a_loop_that_is_right_has_no_fault(size: int):
    report = check(Loop, size, raises=True)
    assert report.faults == []
    assert report.runs == 5 + 6 * size + 2 + 8


@pytest.mark.parametrize("case", ONE, ids=lambda case: case.make.__name__)
def test_a_faulty_loop_is_found(case: Case):
    expect(check(case.make, kinds=["nan"]), case)


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("case", ONE, ids=lambda case: case.make.__name__)
def test_a_faulty_loop_is_found_on_two_ranks(case: Case):
    report = check(case.make, 2)
    expect(report, case)
    bad = {fault.rank for fault in report.faults if fault.rule == 1 and fault.part}
    assert bad in (set(), {0, 1})


class DecidesAlone(Loop):
    """The rank that has the bad loss skips, and the others apply the reduced NaN."""

    def reduce(self, grads):
        self.is_bad = not np.isfinite(grads).all()
        return super().reduce(grads)

    def is_finite(self):
        return not self.is_bad


class AdaptsItsScaleAlone(DecidesAlone):
    is_finite = Loop.is_finite

    def update(self, is_clean: bool):
        super().update(is_clean or not self.is_bad)


class CountsStepsAlone(DecidesAlone):
    is_finite = Loop.is_finite

    def update(self, is_clean: bool):
        super().update(is_clean)
        self.steps_made += not is_clean and not self.is_bad


class ContinuesAlone(Loop):
    def step(self, index: int, fault: Any):
        if math.isfinite(fault):
            super().step(index, fault)


class RaisesAlone(Loop):
    def step(self, index: int, fault: Any):
        if not math.isfinite(fault):
            raise FloatingPointError("loss is not finite")
        super().step(index, fault)


RANKS = [
    Case(DecidesAlone, "WeatherGenerator #2724, ace #850, pytorch #115710", 1, "weights", "` of rank 1 is nan at"),
    Case(AdaptsItsScaleAlone, "pytorch #136009, #90057", 1, "weights", "a scale that shows"),
    Case(CountsStepsAlone, "Neuron_SP #2", 1, "optimizer.steps", "` of rank 1 is 1, and 0 without that step"),
    Case(ContinuesAlone, "NeMo Automodel #2468, fairscale #179", 4, "", "rank 0 ends it; rank 1 hangs: no answer"),
    Case(RaisesAlone, "torchtitan #916", 4, "", "rank 0 raises: FloatingPointError: loss is not finite; rank 1 hangs"),
]


@pytest.mark.parametrize("case", RANKS, ids=lambda case: case.make.__name__)
def test_a_loop_whose_ranks_do_not_go_together_is_found(case: Case):
    # On a busy machine a step of those that do not hang may take a while.
    report = check(case.make, 2, timeout=2.0 if case.rule == 4 else 60.0, kinds=["nan"])
    expect(report, case)
    if case.rule == 4:
        (fault,) = report.faults
        assert (fault.rank, fault.kind, fault.step) == (1, "nan", 0)


@pytest.mark.parametrize("make", [Loop, DropsMicroBatches])
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.tier("ranks"))])
def test_a_bad_micro_batch_may_be_left_out_or_the_step_skipped(make, size: int):
    assert check(make, size, micro_batches=3, kinds=["nan"], raises=True).faults == []


def test_a_micro_batch_that_is_left_out_and_counted_is_found():
    words = "without that micro-batch (it counts in the denominator?)"
    report = check(CountsDroppedMicroBatches, micro_batches=2)
    expect(report, Case(CountsDroppedMicroBatches, "prime-rl #1961, mflux #447", 1, "weights", words))
    assert len([fault for fault in report.faults if fault.rule == 1]) == 3 * 2 * 2
    assert "micro-batch 1" in str(report)


def test_a_step_that_hangs_is_told():
    report = check(Waits, timeout=1.0)
    (fault,) = report.faults
    assert (fault.rule, fault.kind, fault.rank, fault.step, fault.part) == (4, "nan", 0, 0, "")
    assert str(fault) == "rule 4: after the NaN of step 0, in step 0: rank 0 hangs: no answer within 1 s"


def test_the_report_says_what_differs_first_and_all_of_it_is_raised():
    report = check(ScheduleCountsSkippedSteps)
    assert [(fault.rule, fault.kind, fault.rank, fault.step, fault.part) for fault in report.faults] == [
        (1, kind, 0, step, "lr") for step in (0, 4, 2) for kind in ("nan", "inf")
    ]
    with pytest.raises(AssertionError) as raised:
        check(ScheduleCountsSkippedSteps, raises=True)
    assert str(raised.value) == str(report)
    assert all(str(fault) in str(report) for fault in report.faults)


def test_bad_steps_and_kinds_are_chosen():
    report = check(ScheduleCountsSkippedSteps, steps=5, bad_steps=[1, (2, 3)], kinds=["inf"])
    assert [(fault.kind, fault.step) for fault in report.faults] == [("inf", 1), ("inf", 2)]
    report = check(Loop, kinds=["spike"])
    assert {(fault.kind, fault.rule) for fault in report.faults} == {("spike", 1)}
    assert report.faults[0].part == "weights"


class SkipsSpikes(Loop):
    max_norm = math.inf

    def is_finite(self):
        return super().is_finite() and float(np.abs(self.grads).max()) < 1e3


def test_a_loop_that_skips_spikes_leaves_no_trace_of_them():
    """After MaxText #3490 and xtuner #1178."""
    assert check(SkipsSpikes, kinds=["nan", "spike", "1e5"], raises=True).faults == []


class Differs(Loop):
    """As by sums in another order."""

    def reduce(self, grads):
        return super().reduce(grads) * np.float32(1.0 + random.SystemRandom().uniform(1e-6, 1e-5))


class DiffersAndCounts(Differs, ScheduleCountsSkippedSteps):
    pass


def test_a_loop_that_is_not_the_same_twice_is_told_so_and_rtol_lets_it_pass():
    report = check(Differs)
    (fault,) = report.faults
    assert (fault.rule, fault.kind, fault.step, fault.part) == (1, "clean", 0, "weights")
    assert str(fault).startswith("rule 1: in a second clean run and step 0, `weights` is ")
    assert "in the first: give rtol=, or make the loop deterministic" in str(fault)
    assert report.runs == 2
    assert check(Differs, rtol=1e-3, raises=True).faults == []
    faulty = Case(DiffersAndCounts, "accelerate #4242", 1, "lr", "a schedule that counts skipped steps")
    expect(check(DiffersAndCounts, rtol=1e-3), faulty)


def test_a_class_that_is_none_is_refused():
    class NoStep:
        def state(self):
            return {"w": 1.0}

    with pytest.raises(InvalidTypeError, match=r"in step 0: rank 0 raises: AttributeError: 'NoStep' object has no"):
        check_trainer(NoStep, progress=print)
    with pytest.raises(InvalidTypeError, match=r"in the making of a trainer: rank 0 raises: TypeError"):
        check_trainer(lambda: Loop(1, 2, 3))


@pytest.mark.parametrize("bad_steps", [[8], [-1], [(2, 8)]], ids=repr)
def test_a_bad_step_that_is_none_is_refused(bad_steps):
    with pytest.raises(InvalidValueError, match="a bad step must be"):
        check(Loop, bad_steps=bad_steps)


def test_options_that_make_no_runs_are_refused():
    with pytest.raises(InvalidValueError, match="steps must be an integer from 4 to"):
        check(Loop, steps=3)
    assert check(Loop, steps=3, bad_steps=[1], kinds=["nan"]).faults == []
    with pytest.raises(InvalidValueError, match="steps must be an integer from 1 to"):
        check(Loop, steps=0, bad_steps=[0])
    with pytest.raises(InvalidValueError, match="micro_batches must be an integer from 1 to"):
        check(Loop, micro_batches=0)


def test_one_kind_and_one_word_may_be_alone():
    """Not taken for the letters of it, which are in most names."""
    report = check(ScheduleCountsSkippedSteps, kinds="nan", exempt="scale", bad_steps=[4])
    assert [(fault.kind, fault.part) for fault in report.faults] == [("nan", "lr")]
    assert check(AverageMovesWithSkippedSteps, kinds="nan", exempt=["scale", "EMA"]).faults == []


class Exits(Loop):
    def step(self, index: int, fault: Any):
        if fault != 1.0:
            sys.exit("the loss is not finite")
        super().step(index, fault)


@pytest.mark.parametrize(
    "arguments",
    [
        *({"kinds": kinds} for kinds in (3, [3], ["x"], "bad")),
        *({"steps": steps} for steps in (0, 2.5, "a")),
        *({"bad_steps": bad} for bad in (3, [None], "a")),
        *({"rtol": rtol} for rtol in (-1.0, math.nan, "x")),
        *({"exempt": exempt} for exempt in (3, [3])),
        *({"micro_batches": number} for number in (0, "x")),
        *({"make": make} for make in (None, 3, "module:Class", math)),
    ],
    ids=str,
)
def test_an_argument_that_is_none_is_refused_before_the_first_run(arguments: dict[str, Any]):
    made: list[Any] = []
    with pytest.raises((InvalidTypeError, InvalidValueError), match=r" must be |cannot be read, got "):
        check_trainer(**{"make": lambda: made.append(1), **arguments})
    assert not made


def test_a_loop_that_exits_is_told():
    expect(
        check(Exits), Case(Exits, "DeepSpeedExamples #419: Exiting run", 1, "", "SystemExit: the loss is not finite")
    )


class Interrupts(Loop):
    def step(self, index: int, fault: Any):
        if fault != 1.0:
            raise KeyboardInterrupt("by hand")
        super().step(index, fault)


def test_a_loop_that_interrupts_itself_does_not_hang():
    report = check(Interrupts, kinds=["nan"], bad_steps=[1])
    assert (report.faults[0].rule, report.faults[0].step) == (1, 1)
    assert "raises: RuntimeError: KeyboardInterrupt: by hand" in str(report.faults[0])


class RaisesAfterReduction(Loop):
    """On one rank, and the others do not wait for it in this step."""

    def step(self, index: int, fault: Any):
        super().step(index, fault)
        if not math.isfinite(fault):
            raise FloatingPointError("loss is not finite")


def test_where_one_rank_raises_and_none_hangs_no_hang_is_explained():
    report = check(RaisesAfterReduction, 2, kinds=["nan"], bad_steps=[1])
    end = "in step 1: rank 0 raises: FloatingPointError: loss is not finite; rank 1 ends it"
    assert str(report.faults[0]) == f"rule 1: after the NaN of step 1 on rank 0, {end}"


class IsArray(Loop):
    """Its state is an array, without a name."""

    def state(self):
        return self.weights


class IsArrayThatSteps(IsArray):
    is_finite = StepsAlways.is_finite


def test_a_state_without_names_is_called_state():
    assert check(IsArray, raises=True).faults == []
    report = check(IsArrayThatSteps, kinds=["nan"])
    assert report.faults[0].part == ""
    assert str(report.faults[0]).startswith("rule 1: after the NaN of step 0, `state()` is nan at element 0, and ")


class BeginsElsewhere(Loop):
    """With an object whose text does not have its values; all are kept, so that no two are at one place."""

    generators: ClassVar[list[Any]] = []

    def state(self):
        self.generators.append(np.random.default_rng(0))
        return {"generator": self.generators[-1]} | super().state()


def test_what_differs_from_the_beginning_on_is_told():
    (fault,) = check(BeginsElsewhere).faults
    assert (fault.rule, fault.kind, fault.step, fault.part) == (1, "clean", -1, "generator")
    assert str(fault).startswith("rule 1: in a second clean run, at the beginning, `generator` is 'Generator(PCG64)")
    assert str(fault).endswith(
        "in the first: give rtol=, or make the loop deterministic; of an object return the values"
    )


def test_a_state_that_does_not_change_is_refused():
    class Still(Loop):
        def state(self):
            return {"weights": np.zeros(3)}

    with pytest.raises(InvalidValueError, match="state\\(\\) must change from step to step, got the same one after 8"):
        check(Still)


def test_a_loop_without_a_scale_is_held_to_the_other_rules():
    report = check_trainer(lambda: Loop(None), progress=silent)
    assert (report.faults, report.runs) == ([], 5 + 6 + 8)


def test_random_numbers_are_those_of_the_step():
    class Noisy(Loop):
        def batch(self, index: int, number: int):
            return super().batch(index, number) + np.float32(np.random.rand() + random.random())  # noqa: NPY002

    assert check(Noisy, raises=True).faults == []


def test_one_process_imports_no_framework():
    code = """
import sys
from gradscale.testing import check_trainer

class Trainer:
    weight = 1.0
    def step(self, index, fault):
        new = self.weight - 0.1 * fault * self.weight
        self.weight = new if new - new == 0.0 else self.weight
    def state(self):
        return {"weight": self.weight}
    save = state
    def load(self, saved):
        self.weight = saved["weight"]

print(check_trainer(Trainer))
print(sys.modules.keys() & {"numpy", "torch", "jax", "mlx", "cupy", "mpi4py"})
"""
    completed = python("-c", code)
    assert completed.stdout.splitlines() == ["check_trainer: 19 runs, faults: 0", "set()"], completed.stderr


def test_the_number_of_runs_is_said_before_the_first(capsys: pytest.CaptureFixture[str]):
    said = []
    check_trainer(functools.partial(Loop, None), progress=lambda done, total: said.append((done, total)))
    assert said == [(done, 21) for done in range(21)]
    assert capsys.readouterr().err == ""
    check_trainer(functools.partial(Loop, None))
    assert capsys.readouterr().err == "check_trainer: 21 runs\n"
