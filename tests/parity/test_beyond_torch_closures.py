"""Steps with a closure (LBFGS, SAM), which torch's scaler refuses, or calls for gradients that are still scaled."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
from torch_runs import assert_same

from gradscale import ClosureOverflowError, DynamicScale

pytestmark = pytest.mark.torch


def pass_closure(scaler: Any, optimizer: Any, closure: Callable[[], Any], keyword: bool) -> Any:
    """Step with a closure in either way."""
    return scaler.step(optimizer, closure=closure) if keyword else scaler.step(optimizer, closure)


def rosenbrock(parameter: Any) -> Any:
    """Return a function with a bent valley, whose minimum 0 lies at (1, 1)."""
    x, y = parameter
    return (1 - x) ** 2 + 10 * (y - x * x) ** 2


def minimised(
    torch: Any, scaler: Any, optimizer: Any, parameter: Any, keyword: bool, iterations: int, spoil_at: float = math.inf
) -> list[float]:
    """Minimise, with gradients that overflow at a scale from ``spoil_at`` on; return the losses."""
    losses = []

    def closure() -> Any:
        optimizer.zero_grad()
        loss = rosenbrock(parameter)
        factor = scaler.scale(torch.ones(()))
        (loss * factor).backward()
        if factor >= spoil_at:
            parameter.grad[0] = math.inf
        return loss

    for _ in range(iterations):
        losses.append(pass_closure(scaler, optimizer, closure, keyword).item())
        scaler.update()
    return losses


class SharpnessAware:
    """Climbs along the gradient, evaluates again there, and steps from where it was: two evaluations."""

    def __init__(self, torch: Any, parameters: list[Any]) -> None:
        self._torch = torch
        self._inner = torch.optim.SGD(parameters, lr=0.01, momentum=0.5)
        self.param_groups = self._inner.param_groups
        self.seen: list[Any] = []

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._inner.zero_grad()

    def step(self, closure: Callable[[], Any]) -> Any:
        """Make one step."""
        torch = self._torch
        loss = closure()
        with torch.no_grad():
            self.seen.append(self.param_groups[0]["params"][0].grad.clone())
            climbs = [1e-3 * parameter.grad.sign() for group in self.param_groups for parameter in group["params"]]
            for parameter, climb in zip(self.param_groups[0]["params"], climbs, strict=True):
                parameter.add_(climb)
        closure()
        with torch.no_grad():
            self.seen.append(self.param_groups[0]["params"][0].grad.clone())
            for parameter, climb in zip(self.param_groups[0]["params"], climbs, strict=True):
                parameter.sub_(climb)
        self._inner.step()
        return loss


def closure_optimizers(torch: Any) -> dict[str, tuple[Any, int]]:
    """Return optimizers that evaluate a closure more than once, and how many steps they are given."""
    return {
        "LBFGS": (functools.partial(torch.optim.LBFGS, lr=0.5, max_iter=10), 12),
        "LBFGS-wolfe": (functools.partial(torch.optim.LBFGS, lr=1.0, line_search_fn="strong_wolfe"), 5),
        "SAM": (functools.partial(SharpnessAware, torch), 300),
    }


@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
@pytest.mark.parametrize("name", ["LBFGS", "LBFGS-wolfe", "SAM"])
def test_a_closure_is_refused_or_sees_scaled_gradients_at_torchs_and_works_at_ours(
    torch: Any, ours: Any, theirs: Any, name: str, keyword: bool
) -> None:
    make_optimizer, iterations = closure_optimizers(torch)[name]
    start = [-1.0, 1.5]

    def run(scaler: Any, **options: Any) -> tuple[list[float], Any]:
        parameter = torch.nn.Parameter(torch.tensor(start))
        optimizer = make_optimizer([parameter])
        return minimised(torch, scaler, optimizer, parameter, keyword, iterations, **options), parameter

    refused = (RuntimeError, "Closure use is not") if keyword else (AssertionError, "_scale is None")
    with pytest.raises(refused[0], match=refused[1]):
        run(theirs("cpu"))
    unscaled, expected = run(ours("cpu", enabled=False))
    losses, parameter = run(ours("cpu"))
    assert losses[0] == pytest.approx(4.0 + 10 * 0.25)
    assert losses[-1] < 1e-2
    # The scale is a power of two, so that nothing is rounded by it.
    assert losses == unscaled
    assert_same(parameter, expected)


def test_a_positional_closure_shows_the_optimizer_scaled_gradients_at_torchs_and_true_ones_at_ours(
    torch: Any, ours: Any, theirs: Any
) -> None:
    for make in (theirs, ours):
        parameter = torch.nn.Parameter(torch.tensor([-1.0, 1.5]))
        optimizer = SharpnessAware(torch, [parameter])
        scaler = make("cpu")
        # Left over from before, without which torch says that it has recorded nothing.
        parameter.grad = torch.zeros(2)
        scaler.scale(torch.ones(()))
        minimised(torch, scaler, optimizer, parameter, False, 1)
        first, second = optimizer.seen
        factor = 65536.0 if make is theirs else 1.0
        assert first.tolist() == [16.0 * factor, 10.0 * factor]
        assert second.tolist() == pytest.approx(first.tolist(), rel=0.1)


@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
@pytest.mark.parametrize("name", ["LBFGS", "LBFGS-wolfe", "SAM"])
def test_an_overflow_inside_a_closure_is_retried_at_a_lower_scale(
    torch: Any, ours: Any, name: str, keyword: bool
) -> None:
    make_optimizer, iterations = closure_optimizers(torch)[name]
    results = []
    for spoil_at in (math.inf, 2.0**12):
        parameter = torch.nn.Parameter(torch.tensor([-1.0, 1.5]))
        optimizer = make_optimizer([parameter])
        scaler = ours("cpu")
        losses = minimised(torch, scaler, optimizer, parameter, keyword, 1, spoil_at)
        report = scaler.last_step(optimizer)
        assert not report.skipped
        assert report.retries == (0 if spoil_at == math.inf else 5)
        assert scaler.get_scale() == (65536.0 if spoil_at == math.inf else 2.0**11)
        losses += minimised(torch, scaler, optimizer, parameter, keyword, iterations - 1, spoil_at)
        results.append([losses, parameter])
    assert_same(*results)


def test_a_closure_that_always_overflows_is_skipped_once_and_backs_off_once(torch: Any, ours: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.LBFGS([parameter])
    scaler = ours("cpu")

    def closure() -> Any:
        optimizer.zero_grad()
        scaler.scale(parameter.sum()).backward()
        parameter.grad[0] = math.nan
        return parameter.sum()

    assert scaler.step(optimizer, closure) is None
    scaler.update()
    assert scaler.last_step(optimizer).skipped
    assert scaler.get_scale() == 32768.0
    assert parameter.tolist() == [1.0, 1.0]


def test_a_closure_that_overflows_at_every_scale_in_mid_step_is_an_error(torch: Any, ours: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = SharpnessAware(torch, [parameter])
    scaler = ours("cpu")
    calls = []

    def closure() -> Any:
        calls.append(None)
        optimizer.zero_grad()
        scaler.scale(parameter.sum()).backward()
        if len(calls) > 1:
            parameter.grad[0] = math.nan
        return parameter.sum()

    with pytest.raises(ClosureOverflowError, match="evaluation 2"):
        scaler.step(optimizer, closure)


@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_closure_of_a_fused_optimizer_is_unscaled_before_the_kernel(
    torch: Any, ours: Any, name: str, keyword: bool
) -> None:
    results = []
    for spoil_at in (None, math.inf, 2.0**12):
        parameter = torch.nn.Parameter(torch.tensor([-1.0, 1.5]))
        optimizer = getattr(torch.optim, name)([parameter], lr=0.01, fused=True)
        scaler = ours("cpu", enabled=spoil_at is not None)
        losses = minimised(torch, scaler, optimizer, parameter, keyword, 20, spoil_at or math.inf)
        results.append([losses, parameter, optimizer.state_dict()])
        assert not hasattr(optimizer, "found_inf")
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


@pytest.mark.parametrize("overflows", [False, True], ids=["", "overflow"])
def test_a_closure_of_an_optimizer_that_reads_attributes_finds_them(torch: Any, ours: Any, overflows: bool) -> None:
    class ReadsAttributes(torch.optim.SGD):  # type: ignore[misc]
        _step_supports_amp_scaling = True

        def step(self, closure: Any) -> None:
            before = self.grad_scale, self.found_inf.item()
            closure()
            seen.append([before, (self.grad_scale, self.found_inf.item()), parameter.grad.tolist()])

    def closure() -> None:
        parameter.grad = scaler.scale(torch.full((1,), math.inf if overflows else 2.0))

    seen: list[Any] = []
    parameter = torch.nn.Parameter(torch.zeros(1))
    scaler, optimizer = ours("cpu"), ReadsAttributes([parameter])
    scaler.step(optimizer, closure)
    scaler.update()
    assert seen == ([] if overflows else [[(None, 0.0), (None, 0.0), [2.0]]])
    assert not hasattr(optimizer, "found_inf")
    assert not hasattr(optimizer, "grad_scale")


def test_a_closure_with_a_lower_bound_of_the_scale_stops_there(torch: Any, ours: Any) -> None:
    parameter = torch.nn.Parameter(torch.tensor([-1.0, 1.5]))
    optimizer = torch.optim.LBFGS([parameter])
    scaler = ours("cpu", policy=DynamicScale(init_scale=2.0**14, min_scale=2.0**13))
    calls = []

    def closure() -> Any:
        optimizer.zero_grad()
        factor = scaler.scale(torch.ones(()))
        calls.append(factor.item())
        (parameter.sum() * factor).backward()
        parameter.grad[0] = math.inf
        return parameter.sum()

    assert scaler.step(optimizer, closure=closure) is None
    assert calls[:2] == [2.0**14, 2.0**13]
    assert set(calls) == {2.0**14, 2.0**13}
    scaler.update()
    assert scaler.get_scale() == 2.0**13
