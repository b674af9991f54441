"""Learning-rate schedules hold on skipped steps: 12 steps of which 8 are skipped are 4 steps of the schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from axes import require

import gradscale
from gradscale.testing import ThreadCollectives, run_ranks

pytestmark = pytest.mark.torch

STEPS = 12
OVERFLOWS = frozenset({1, 2, 4, 5, 6, 8, 9, 12})  # the first and the last, too
TAKEN = [sum(taken not in OVERFLOWS for taken in range(1, step + 1)) for step in range(1, STEPS + 1)]
FACTOR = 0.5

Iterate = Callable[[int], None]


@pytest.fixture(autouse=True)
def torch() -> Any:
    """Return torch."""
    return require("torch")


def made(name: str) -> Any:
    """Return an optimizer of one parameter, such as ``SGD-fused``."""
    torch = require("torch")
    kind, _, variant = name.partition("-")
    options = {variant: True} if variant else {}
    return getattr(torch.optim, kind)([torch.nn.Parameter(torch.ones(3))], lr=1.0, **options)


def decaying(optimizer: Any) -> Any:
    """Return a schedule whose rate tells how often it has been stepped."""
    return require("torch").optim.lr_scheduler.StepLR(optimizer, 1, FACTOR)


def backward(scaler: Any, optimizer: Any, *, overflows: bool) -> None:
    """Leave a scaled gradient, or an infinite one."""
    torch = require("torch")
    (parameter,) = optimizer.param_groups[0]["params"]
    scale = float(scaler.scale(torch.ones(())))
    parameter.grad = torch.full_like(parameter, math.inf if overflows else scale)


def train(scaler: Any, optimizer: Any, hold: Callable[[], None], overflows: frozenset[int] = OVERFLOWS) -> list[float]:
    """Make the steps, each followed by ``hold``, and return the learning rate after each."""
    rates = []
    for step in range(1, STEPS + 1):
        backward(scaler, optimizer, overflows=step in overflows)
        scaler.step(optimizer)
        scaler.update()
        hold()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("name", ["SGD", "AdamW", "SGD-fused", "AdamW-fused"])
def test_a_schedule_takes_the_steps_that_the_optimizer_takes(name: str) -> None:
    from gradscale_torch import GradScaler

    scaler, optimizer = GradScaler("cpu"), made(name)
    schedule = decaying(optimizer)
    rates = train(scaler, optimizer, lambda: scaler.step_schedule(optimizer, schedule))
    assert rates == [FACTOR**taken for taken in TAKEN]
    assert TAKEN[-1] == 4
    assert schedule.last_epoch == 4


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_torchs_own_loop_steps_it_always(torch: Any) -> None:
    scaler, optimizer = torch.amp.GradScaler("cpu"), made("SGD")
    rates = train(scaler, optimizer, decaying(optimizer).step)
    assert rates == [FACTOR**step for step in range(1, STEPS + 1)]


def test_the_rates_are_those_of_plain_torch_without_the_skipped_steps(torch: Any) -> None:
    from gradscale_torch import GradScaler

    def chained(optimizer: Any) -> Any:
        rates = torch.optim.lr_scheduler
        warmup, cosine = rates.LinearLR(optimizer, 0.1, total_iters=2), rates.CosineAnnealingLR(optimizer, 4)
        return rates.SequentialLR(optimizer, [warmup, cosine], milestones=[2])

    plain = made("SGD")
    schedule = chained(plain)
    expected = [plain.param_groups[0]["lr"]]
    for _ in range(TAKEN[-1]):
        plain.step()
        schedule.step()
        expected.append(plain.param_groups[0]["lr"])

    scaler, optimizer = GradScaler("cpu"), made("SGD")
    held = chained(optimizer)
    rates = train(scaler, optimizer, lambda: scaler.step_schedule(optimizer, held))
    assert rates == [expected[taken] for taken in TAKEN]
    assert held.state_dict() == schedule.state_dict()


def test_each_optimizer_holds_its_own_schedules() -> None:
    from gradscale_torch import GradScaler

    scaler, optimizers = GradScaler("cpu"), [made("SGD"), made("AdamW")]
    schedules = [[decaying(optimizer), decaying(optimizer)] for optimizer in optimizers]
    for step in range(1, STEPS + 1):
        for which, optimizer in enumerate(optimizers):
            backward(scaler, optimizer, overflows=which == 1 and step in OVERFLOWS)
        for optimizer, own in zip(optimizers, schedules, strict=True):
            scaler.step(optimizer)
            for schedule in own:
                scaler.step_schedule(optimizer, schedule)
        scaler.update()
    assert [[schedule.last_epoch for schedule in own] for own in schedules] == [[12, 12], [4, 4]]


def test_a_plateau_is_given_its_metric(torch: Any) -> None:
    from gradscale_torch import GradScaler

    scaler, optimizer = GradScaler("cpu"), made("SGD")
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=FACTOR, patience=0, threshold=0.0)
    train(scaler, optimizer, lambda: scaler.step_schedule(optimizer, plateau, 1.0))
    # The first of four metrics is the best, and none of the others is better.
    assert (plateau.last_epoch, plateau.best, optimizer.param_groups[0]["lr"]) == (4, 1.0, FACTOR**3)
    scaler.step_schedule(optimizer, plateau, metrics=0.5)
    assert plateau.last_epoch == 4
    train(scaler, optimizer, lambda: scaler.step_schedule(optimizer, plateau, metrics=0.5))
    assert (plateau.last_epoch, plateau.best) == (8, 0.5)


def test_a_disabled_scaler_skips_nothing() -> None:
    from gradscale_torch import GradScaler

    scaler, optimizer = GradScaler("cpu", enabled=False), made("SGD")
    schedule = decaying(optimizer)
    train(scaler, optimizer, lambda: scaler.step_schedule(optimizer, schedule))
    assert schedule.last_epoch == STEPS


def test_a_step_that_a_closure_has_made_at_a_lower_scale_counts() -> None:
    from gradscale_torch import GradScaler

    scaler, optimizer = GradScaler("cpu", init_scale=8.0), made("SGD")
    schedule = decaying(optimizer)
    evaluations = []

    def closure() -> Any:
        optimizer.zero_grad()
        evaluations.append(1)
        backward(scaler, optimizer, overflows=len(evaluations) == 1)
        return 0.0

    scaler.step(optimizer, closure)
    scaler.update()
    scaler.step_schedule(optimizer, schedule)
    assert (len(evaluations), schedule.last_epoch) == (2, 1)


@pytest.mark.parametrize("name", ["SGD", "SGD-fused"])
def test_the_verdict_is_read_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from gradscale_torch import GradScaler, verdicts

    # Tensors of the host that are treated like those of a device.
    monkeypatch.setattr(verdicts, "would_wait", lambda _: True)
    reads = []
    for read in ("_read", "_read_late"):
        original = getattr(verdicts.TensorVerdict, read)
        monkeypatch.setattr(
            verdicts.TensorVerdict,
            read,
            lambda *args, original=original: reads.append(1) or original(*args),
        )
    scaler, optimizer = GradScaler("cpu"), made(name)
    schedules = [decaying(optimizer), decaying(optimizer)]

    def hold() -> None:
        for schedule in schedules:
            scaler.step_schedule(optimizer, schedule)

    train(scaler, optimizer, hold)
    assert [schedule.last_epoch for schedule in schedules] == [4, 4]
    assert len(reads) == STEPS


@pytest.mark.parametrize("name", ["SGD", "SGD-fused"])
def test_the_schedules_of_all_ranks_stay_equal(name: str) -> None:
    from gradscale_torch import ShardedGradScaler

    def rank(group: ThreadCollectives) -> Any:
        scaler, optimizer = ShardedGradScaler("cpu", group=group), made(name)
        schedule = decaying(optimizer)
        # Each rank has overflows that the other one does not have.
        own = frozenset(step for step in OVERFLOWS if step % 2 == group.rank)
        return train(scaler, optimizer, lambda: scaler.step_schedule(optimizer, schedule), own)

    assert run_ranks(2, rank) == [[FACTOR**taken for taken in TAKEN]] * 2


def test_what_is_no_schedule_is_refused_and_so_is_an_optimizer_without_a_step() -> None:
    from gradscale_torch import GradScaler

    scaler, optimizer = GradScaler("cpu"), made("SGD")
    schedule = decaying(optimizer)
    with pytest.raises(gradscale.CallOrderError, match=r"needs a step\(\) of this optimizer first"):
        scaler.step_schedule(optimizer, schedule)
    train(scaler, optimizer, lambda: None)
    for wrong in (None, optimizer):
        with pytest.raises(gradscale.InvalidTypeError, match=r"call step_schedule\(optimizer, schedule\)"):
            scaler.step_schedule(schedule, wrong)
    assert schedule.last_epoch == 0


def test_gradscales_own_scaler_holds_a_schedule_of_any_kind() -> None:
    class Schedule:
        steps = 0

        def step(self) -> None:
            self.steps += 1

    class SGD:
        grads = (1.0,)

        def step(self) -> None:
            """Do nothing."""

    np = require("numpy")
    scaler, optimizer, schedule = gradscale.GradScaler(), SGD(), Schedule()
    for step in range(1, STEPS + 1):
        optimizer.grads = (scaler.scale(np.full(2, math.inf if step in OVERFLOWS else 1.0, np.float32)),)
        scaler.step(optimizer)
        scaler.step_schedule(optimizer, schedule)
        scaler.update()
    assert schedule.steps == 4
