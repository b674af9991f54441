"""Fused optimizers whose verdict the host reads later, as on a device: reports, drift between ranks, the scale's bound.

Tensors of the host stand in for a device's: the scaler is told that reading them would make the host wait.
"""

from __future__ import annotations

from typing import Any

import pytest
from axes import require

import gradscale
from gradscale.testing import ThreadCollectives, run_ranks

pytestmark = pytest.mark.torch


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return torch, with tensors of the host that are treated like those of a device."""
    torch = require("torch")
    from gradscale_torch import verdicts

    monkeypatch.setattr(verdicts, "would_wait", lambda _: True)
    return torch


def fused_sgd(torch: Any) -> Any:
    """Return a fused optimizer of one parameter of ones."""
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.5, fused=True)


def iterate(torch: Any, scaler: Any, optimizer: Any, gradient: float, *, explicit: bool = False) -> None:
    """Make one iteration with every gradient set to a value times the scale."""
    (parameter,) = optimizer.param_groups[0]["params"]
    scaler.scale(torch.ones(()))
    parameter.grad = torch.full((3,), gradient) * scaler._scale
    if explicit:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale_-then-step"])
def test_the_verdict_is_read_when_somebody_asks_and_not_before(
    torch: Any, monkeypatch: pytest.MonkeyPatch, explicit: bool
) -> None:
    from gradscale_torch import GradScaler
    from gradscale_torch.verdicts import TensorVerdict

    reads = []
    original = TensorVerdict._read
    monkeypatch.setattr(TensorVerdict, "_read", lambda *args: reads.append(1) or original(*args))
    scaler, optimizer = GradScaler("cpu", init_scale=8.0, growth_interval=2), fused_sgd(torch)
    for gradient, weight, scale in ((1.0, 0.5, 8.0), (float("inf"), 0.5, 4.0), (1.0, 0.0, 4.0), (1.0, -0.5, 8.0)):
        iterate(torch, scaler, optimizer, gradient, explicit=explicit)
        assert optimizer.param_groups[0]["params"][0].tolist() == [weight] * 3
        assert scaler.get_scale() == scale
        if gradient != 1.0:
            report = scaler.last_step(optimizer)
            assert (report.skipped, report.reason, report.scale, report.iteration) == (True, "overflow", 8.0, 2)
            assert scaler.last_step(optimizer) == report
    assert not scaler.last_step(optimizer).skipped
    assert reads == []


def test_a_policy_that_raises_at_its_minimum_is_read_at_once(torch: Any) -> None:
    from gradscale_torch import GradScaler

    policy = gradscale.DynamicScale(init_scale=2.0, min_scale=2.0, at_min="raise")
    scaler, optimizer = GradScaler("cpu", policy=policy), fused_sgd(torch)
    with pytest.raises(gradscale.ScaleUnderflowError, match=r"minimum, 2\.0"):
        iterate(torch, scaler, optimizer, float("nan"))
    assert optimizer.param_groups[0]["params"][0].tolist() == [1.0] * 3


@pytest.mark.parametrize("bad_rank", [0, 1, 2])
def test_all_ranks_skip_by_themselves(torch: Any, bad_rank: int) -> None:
    from gradscale_torch import ShardedGradScaler

    def rank(group: ThreadCollectives) -> Any:
        scaler = ShardedGradScaler("cpu", init_scale=4.0, growth_interval=1, group=group)
        optimizer = fused_sgd(torch)
        for step in range(2):
            iterate(torch, scaler, optimizer, float("inf") if step == 0 and group.rank == bad_rank else 1.0)
            if step == 0:
                report = scaler.last_step(optimizer)
        return report.skipped, report.nonfinite, report.local_nonfinite, scaler.get_scale(), group.calls

    results = run_ranks(3, rank)
    # With a greeting before the first of two.
    assert results == [(True, 1, int(rank == bad_rank), 4.0, 3) for rank in range(3)]


def test_ranks_that_differ_do_not_step_and_are_told_at_the_next_call(torch: Any) -> None:
    from gradscale_torch import ShardedGradScaler

    def rank(group: ThreadCollectives) -> Any:
        scaler = ShardedGradScaler("cpu", init_scale=4.0 if group.rank == 0 else 8.0, group=group)
        optimizer = fused_sgd(torch)
        with pytest.raises(gradscale.ScaleDesyncError, match=r"scale from 4\.0 to 8\.0"):
            iterate(torch, scaler, optimizer, 1.0)
        return optimizer.param_groups[0]["params"][0].tolist()

    assert run_ranks(2, rank) == [[1.0] * 3] * 2


def test_a_scale_that_may_be_below_one_is_divided_out_before_the_step(torch: Any) -> None:
    from gradscale_torch import GradScaler

    scaler, optimizer = GradScaler("cpu", init_scale=0.25), fused_sgd(torch)
    (parameter,) = optimizer.param_groups[0]["params"]
    scaler.scale(torch.ones(()))
    parameter.grad = torch.tensor([1.0, 2e38, 1.0])
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [1.0] * 3
    assert scaler.last_step(optimizer).skipped
    assert scaler.get_scale() == 0.125


def test_each_step_since_a_verdict_may_have_lowered_the_scale_on_a_device(torch: Any) -> None:
    from gradscale_torch.state import TensorState

    live = TensorState(gradscale.DynamicScale(), "meta")
    # On a device that the host does not read.
    state = live.policy.init(torch.zeros((), device="meta"))
    live.take(state)
    assert live.may_be_below_one(state)
    live.replace_scale(64.0)
    assert not live.may_be_below_one(state)
    live.version += 4
    for steps, is_possible in {0: False, 1: False, 2: False, 3: True, 4: True}.items():
        live.observe(4.0, live.version - steps)
        assert live.may_be_below_one(state) is is_possible, steps


@pytest.mark.parametrize("policy", [gradscale.DynamicScale, gradscale.StaticScale, "own"], ids=str)
def test_how_far_an_own_policy_lowers_the_scale_is_not_known(torch: Any, policy: Any) -> None:
    from gradscale_torch.state import TensorState

    class Own(gradscale.StaticScale):
        """Lower the scale as it likes."""

    live = TensorState(Own() if policy == "own" else policy(), "meta")
    state = live.policy.init(torch.zeros((), device="meta"))
    live.take(state)
    live.version += 1
    live.observe(4.0, live.version)
    assert not live.may_be_below_one(state)
    live.version += 1
    live.observe(4.0, live.version - 1)
    assert live.may_be_below_one(state) is (policy == "own")


def test_an_update_is_reported_if_somebody_wants_it_after_the_step(torch: Any) -> None:
    from gradscale_torch import GradScaler

    scaler, optimizer = GradScaler("cpu"), fused_sgd(torch)
    updates: list[Any] = []
    scaler.scale(torch.ones(()))
    optimizer.param_groups[0]["params"][0].grad = torch.full((3,), float("inf"))
    scaler.step(optimizer)
    scaler.on_update = updates.append
    scaler.update()
    [update] = updates
    assert (update.skipped, update.scale, update.new_scale) == (True, 65536.0, 32768.0)
    assert update.steps == (scaler.last_step(optimizer),)


def test_attributes_of_the_optimizer_are_removed_when_its_step_raises(
    torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradscale_torch import GradScaler

    scaler, optimizer = GradScaler("cpu"), fused_sgd(torch)
    seen = []

    def fail() -> None:
        seen.append((float(optimizer.grad_scale), float(optimizer.found_inf)))
        raise RuntimeError("no memory")

    monkeypatch.setattr(optimizer, "step", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        iterate(torch, scaler, optimizer, 1.0)
    assert seen == [(65536.0, 0.0)]
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
