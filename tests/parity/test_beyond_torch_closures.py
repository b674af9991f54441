"""Steps with a closure (LBFGS, SAM), which torch's scaler refuses, or calls for gradients that are still scaled."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
from axes_torch import GradScaler, TorchScaler, torch
from small_torch import Small, assert_same

from gradscale import ClosureOverflowError, DynamicScale

pytestmark = pytest.mark.torch


class SharpnessAware(torch.optim.SGD):  # type: ignore[misc]
    """Climbs along the gradient, evaluates again there, and steps from where it was: two evaluations."""

    def __init__(self, parameters: list[Any]) -> None:
        super().__init__(parameters, lr=0.01, momentum=0.5)

    def step(self, closure: Callable[[], Any]) -> Any:
        """Make one step."""
        [parameter] = self.param_groups[0]["params"]
        loss = closure()
        climb = 1e-3 * parameter.grad.sign()
        parameter.data.add_(climb)
        closure()
        parameter.data.sub_(climb)
        super().step()
        return loss


# What evaluates a closure, most of them more than once, and how many steps it is given.
OPTIMIZERS: dict[str, tuple[Any, int]] = {
    "LBFGS": (functools.partial(torch.optim.LBFGS, lr=0.5, max_iter=10), 12),
    "LBFGS-wolfe": (functools.partial(torch.optim.LBFGS, lr=1.0, line_search_fn="strong_wolfe"), 5),
    "SAM": (SharpnessAware, 40),
    "SGD-fused": ("SGD-fused", 20),
    "AdamW-fused": ("AdamW-fused", 20),
}


def begun(scaler: Any, optimizer: Any) -> Small:
    """Return a run that begins where the valley of Rosenbrock's function is to be followed."""
    run = Small(scaler, optimizer, lr=0.01)
    run.parameter.data = torch.tensor([-1.0, 1.5])
    return run


def minimised(run: Small, keyword: bool, iterations: int, spoil_at: float = math.inf) -> list[float]:
    """Minimise, with gradients that overflow at a scale from ``spoil_at`` on; return the losses."""
    losses = []

    def closure() -> Any:
        run.optimizer.zero_grad()
        x, y = run.parameter
        loss = (1 - x) ** 2 + 10 * (y - x * x) ** 2
        factor = run.scaler.scale(torch.ones(()))
        (loss * factor).backward()
        if factor >= spoil_at:
            run.parameter.grad[0] = math.inf
        return loss

    for _ in range(iterations):
        given = ((), {"closure": closure}) if keyword else ((closure,), {})
        losses.append(run.scaler.step(run.optimizer, *given[0], **given[1]).item())
        run.scaler.update()
    return losses


@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_closure_is_refused_at_torchs_and_retried_at_a_lower_scale_at_ours(name: str, keyword: bool) -> None:
    make_optimizer, iterations = OPTIMIZERS[name]
    refused = (RuntimeError, "Closure use is not") if keyword else (AssertionError, "_scale is None")
    with pytest.raises(refused[0], match=refused[1]):
        minimised(begun(TorchScaler("cpu"), make_optimizer), keyword, 1)
    plain = begun(GradScaler("cpu", enabled=False), make_optimizer)
    expected = minimised(plain, keyword, iterations)
    assert expected[0] == pytest.approx(4.0 + 10 * 0.25)
    assert expected[-1] < expected[0]
    for spoil_at, retries, scale in ((math.inf, 0, 65536.0), (2.0**12, 5, 2.0**11)):
        run = begun(GradScaler("cpu"), make_optimizer)
        losses = minimised(run, keyword, 1, spoil_at)
        assert (run.report.skipped, run.report.retries, run.scaler.get_scale()) == (False, retries, scale)
        losses += minimised(run, keyword, iterations - 1, spoil_at)
        assert not hasattr(run.optimizer, "found_inf")
        # The scale is a power of two, so that nothing is rounded by it.
        assert_same([losses, run.parameter], [expected, plain.parameter])


def always_bad(run: Small, scales: list[float], clean: int = 0) -> Callable[[], Any]:
    """Return a closure whose gradients overflow but for the first ones, and which notes the scales."""

    def closure() -> Any:
        scales.append(run.scaler.scale(torch.ones(())).item())
        run.parameter.grad = torch.full((2,), scales[-1] if len(scales) <= clean else math.inf)
        return torch.ones(())

    return closure


@pytest.mark.parametrize(
    ("policy", "scales"),
    [(DynamicScale(), []), (DynamicScale(init_scale=2.0**14, min_scale=2.0**13), [2.0**14, 2.0**13])],
    ids=["unbounded", "with-a-minimum"],
)
def test_a_closure_that_always_overflows_is_skipped_once_and_backs_off_once(policy: Any, scales: list[float]) -> None:
    run, seen = Small(GradScaler("cpu", policy=policy), torch.optim.LBFGS), []  # type: ignore[var-annotated]
    assert run.scaler.step(run.optimizer, always_bad(run, seen)) is None
    run.scaler.update()
    assert run.report.skipped
    assert run.scaler.get_scale() == policy.init_scale / 2
    assert run.held == [[0.0, 0.0]]
    # A lower bound is where it stops.
    assert not scales or (seen[:2], set(seen)) == (scales, set(scales))


def test_a_closure_that_overflows_at_every_scale_in_mid_step_is_an_error() -> None:
    run = Small(GradScaler("cpu"), SharpnessAware)
    with pytest.raises(ClosureOverflowError, match="evaluation 2"):
        run.scaler.step(run.optimizer, always_bad(run, [], clean=1))


@pytest.mark.parametrize("gradient", [2.0, math.inf], ids=["", "overflow"])
def test_a_closure_of_an_optimizer_that_reads_attributes_finds_them(gradient: float) -> None:
    class ReadsAttributes(torch.optim.SGD):  # type: ignore[misc]
        _step_supports_amp_scaling = True

        def step(self, closure: Any) -> None:
            before = self.grad_scale, self.found_inf.item()
            closure()
            seen.append([before, (self.grad_scale, self.found_inf.item()), run.parameter.grad.tolist()])

    seen: list[Any] = []
    run = Small(GradScaler("cpu"), ReadsAttributes, size=1)
    run.scaler.step(run.optimizer, lambda: run.give(gradient))
    run.scaler.update()
    assert seen == ([[(None, 0.0), (None, 0.0), [2.0]]] if gradient == 2.0 else [])
    assert not hasattr(run.optimizer, "found_inf")
    assert not hasattr(run.optimizer, "grad_scale")
