"""Optimizers and scripts that use the private surface of torch's scaler, as small stand-ins: gradscale serves them too.

What they do is what apex, Transformer Engine, NeMo and widely copied training scripts do.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hosts
import pytest
from axes_torch import GradScaler, TorchScaler, torch
from hosts import Make, Row, batches, column, loss_of, network, row
from torch.amp.grad_scaler import OptState

pytestmark = [pytest.mark.torch, pytest.mark.tier("ranks")]

unscaled_or_not = pytest.mark.parametrize("unscales", [True, False], ids=["unscaled", ""])


def state_of(scaler: Any, optimizer: Any) -> Any:
    """Return what a scaler keeps of an optimizer in an iteration."""
    return scaler._per_optimizer_states[id(optimizer)]


def scripted(
    make: Make,
    make_optimizer: Callable[[Any], Any],
    *,
    unscales: bool = True,
    local: Callable[[Any], object] = hosts.overflow,
    between: Callable[[Any, Any], object] = lambda _scaler, _optimizer: None,
    returns: object = None,
    preset: float | None = None,
    **more: Callable[[Any, Any], Any],
) -> list[Row]:
    """Train with a script that overflows at some steps: there in the gradients, or ``between`` unscaling and step."""
    scaler, model, rows = make(), network(), []
    optimizer = make_optimizer(model)
    # torch warns, at the caller's line, of what it passes itself to.
    is_passed = isinstance(optimizer, TakesScaler)
    expected = functools.partial(pytest.warns, FutureWarning, match="grad_scaler|pass(ing)? itself")
    for index, batch in enumerate(batches()):
        optimizer.zero_grad()
        scaler.scale((preset or 1.0) * loss_of(model, batch)).backward()
        if hosts.SKIPS[index]:
            local(model)
        if unscales:
            scaler.unscale_(optimizer)
        if hosts.SKIPS[index]:
            between(scaler, optimizer)
        if preset is not None:
            optimizer.grad_scale = preset
        with expected() if is_passed else contextlib.nullcontext([]) as warned:
            assert scaler.step(optimizer) == returns
        assert {Path(each.filename) for each in warned} <= {Path(__file__)}
        told = {name: tell(scaler, optimizer) for name, tell in more.items()}
        scaler.update()
        rows.append(row(scaler, model, **told))
    return rows


class TakesScaler(torch.optim.SGD):  # type: ignore[misc]
    """Descend, after judging and unscaling with the help of the scaler, an argument of ``step``."""

    _step_supports_amp_scaling = True

    def __init__(self, model: Any) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.scaler: Any = None

    def gradients(self) -> list[Any]:
        return [parameter.grad for group in self.param_groups for parameter in group["params"]]

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
        assert closure is None
        self.scaler = grad_scaler
        if grad_scaler._enabled and not self.overflows(grad_scaler):
            super().step()
        return "called"

    def unscale(self, scaler: Any) -> None:
        if state_of(scaler, self)["stage"] is OptState.READY:
            for gradient in self.gradients():
                gradient.mul_(scaler._scale.double().reciprocal().float())

    def flag(self) -> Any:
        """Return the optimizer's own verdict, 0-d float32."""
        finite = torch.isfinite(torch.nn.utils.get_total_norm(self.gradients()))
        return torch.logical_not(finite).float()

    def overflows(self, scaler: Any) -> bool:
        raise NotImplementedError


class AsksForTheVerdict(TakesScaler):
    def overflows(self, scaler: Any) -> bool:
        is_ready = state_of(scaler, self)["stage"] is OptState.READY
        ask = scaler._check_inf_per_device if is_ready else scaler._found_inf_per_device
        (found,) = ask(self).values()
        assert (found.shape, found.dtype) == ((), torch.float32)
        assert found in state_of(scaler, self)["found_inf_per_device"].values()
        self.unscale(scaler)
        return bool(found.item())


class AsksByDevice(TakesScaler):
    def overflows(self, scaler: Any) -> bool:
        found = scaler._check_inf_per_device(self)[torch.device("cpu")]
        if state_of(scaler, self)["stage"] is OptState.READY:
            inverse = scaler._get_scale_async().double().reciprocal().float()
            for gradient in self.gradients():
                gradient.mul_(inverse)
        return bool(found.item())


class LetsItUnscale(TakesScaler):
    def overflows(self, scaler: Any) -> bool:
        if state_of(scaler, self)["stage"] is OptState.READY:
            scaler.unscale_(self)
        assert state_of(scaler, self)["stage"] is OptState.UNSCALED
        return any(found.item() for found in scaler._found_inf_per_device(self).values())


class TellsItsVerdict(TakesScaler):
    def overflows(self, scaler: Any) -> bool:
        self.unscale(scaler)
        found = self.flag()
        state_of(scaler, self)["found_inf_per_device"] = {found.device: found}
        return bool(found.item())


class TellsItsVerdictByDevice(TakesScaler):
    def overflows(self, scaler: Any) -> bool:
        self.unscale(scaler)
        found = self.flag()
        state_of(scaler, self)["found_inf_per_device"][found.device] = found
        return bool(found.item())


@unscaled_or_not
@pytest.mark.parametrize(
    "kind", [AsksForTheVerdict, AsksByDevice, LetsItUnscale, TellsItsVerdict, TellsItsVerdictByDevice]
)
def test_an_optimizer_that_takes_the_scaler_is_served(make: Make, kind: Any, unscales: bool) -> None:
    def is_given(scaler: Any, optimizer: Any) -> bool:
        return optimizer.scaler is scaler

    rows = hosts.same_as_torch(
        lambda make: scripted(make, kind, unscales=unscales, returns="called", is_given=is_given), make
    )
    hosts.check_run(rows)
    assert all(column(rows, "is_given"))


@unscaled_or_not
@pytest.mark.parametrize("preset", [None, 4.0], ids=["", "preset"])
def test_an_optimizer_that_reads_attributes_is_served(make: Make, preset: float | None, unscales: bool) -> None:
    class ReadsAttributes(torch.optim.SGD):  # type: ignore[misc]
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None) -> Any:
            assert closure is None
            assert (self.found_inf.shape, self.found_inf.dtype) == ((), torch.float32)
            assert self.found_inf.item() in (0.0, 1.0)
            self.divisor = 1.0 if self.grad_scale is None else float(self.grad_scale)
            for parameter in self.param_groups[0]["params"]:
                parameter.grad.div_(self.divisor)
                if not self.found_inf.item():
                    parameter.data.add_(parameter.grad, alpha=-0.1)
            return "called"

    def made(model: Any) -> Any:
        return ReadsAttributes(model.parameters(), lr=0.1)

    def divisor(_: Any, optimizer: Any) -> float:
        assert not hasattr(optimizer, "grad_scale")
        assert not hasattr(optimizer, "found_inf")
        result: float = optimizer.divisor
        return result

    def run(make: Make) -> list[Row]:
        return scripted(make, made, unscales=unscales, returns="called", preset=preset, divisor=divisor)

    rows = hosts.same_as_torch(run, make)
    hosts.check_run(rows)
    used = [1024.0, *hosts.SCALES[:-1]]
    assert column(rows, "divisor") == [(preset or 1.0) * (1.0 if unscales else scale) for scale in used]
    if preset is None:
        plain = scripted(make, functools.partial(hosts.optimizer_named, "SGD"))
        assert column(rows, "weights") == column(plain, "weights")


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "SGD-fused", "AdamW-fused"])
@pytest.mark.parametrize("how", ["method", "state"])
def test_a_verdict_that_a_script_reduces_by_itself_counts(make: Make, how: str, optimizer: str) -> None:
    def reduce(scaler: Any, raw: Any) -> None:
        """Do what an all-reduce with MAX does where another rank has overflowed."""
        by_state = state_of(scaler, raw)["found_inf_per_device"]
        (flag,) = (scaler._found_inf_per_device(raw) if how == "method" else by_state).values()
        flag.fill_(1.0)

    made = functools.partial(hosts.optimizer_named, optimizer)
    hosts.check_run(hosts.same_as_torch(lambda make: scripted(make, made, local=lambda _: None, between=reduce), make))


@pytest.mark.parametrize("overflows", [True, False], ids=["overflow", ""])
def test_stage_and_verdict_are_read_at_every_point(make: Make, overflows: bool) -> None:
    scaler, model = make(), network()
    optimizer = hosts.optimizer_named("SGD", model)

    def read() -> tuple[str, list[float], list[float]]:
        state = state_of(scaler, optimizer)
        flags = state["found_inf_per_device"], scaler._found_inf_per_device(optimizer)
        found, asked = ([flag.item() for flag in each.values()] for each in flags)
        return state["stage"].name, found, asked

    flags = [float(overflows)]
    for _ in range(2):
        scaler.scale(loss_of(model, batches(1)[0])).backward()
        if overflows:
            hosts.overflow(model)
        assert read() == ("READY", [], [])
        scaler.unscale_(optimizer)
        assert read() == ("UNSCALED", flags, flags)
        scaler.step(optimizer)
        assert read() == ("STEPPED", flags, flags)
        scaler.update()
        assert read() == ("READY", [], [])
        optimizer.zero_grad()


def test_the_state_is_none_before_the_first_loss_and_made_on_demand(make: Make) -> None:
    scaler = make()
    assert isinstance(scaler, TorchScaler)
    assert scaler._enabled
    assert scaler._scale is scaler._growth_tracker is scaler._get_scale_async() is None
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (1024.0, 0)
    optimizer = hosts.optimizer_named("SGD", network())
    assert scaler._found_inf_per_device(optimizer) == {}
    assert state_of(scaler, optimizer)["stage"].name == "READY"
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    assert scaler._get_scale_async() is scaler._scale
    assert (scaler._scale.dtype, scaler._scale.shape, scaler._scale.item()) == (torch.float32, (), 1024.0)
    assert (scaler._growth_tracker.dtype, scaler._growth_tracker.item()) == (torch.int32, 0)


def test_a_captured_scale_sees_every_update(make: Make) -> None:
    scaler = make()
    scaler._lazy_init_scale_growth_tracker("cpu")
    held, seen = (scaler._scale, scaler._growth_tracker), []

    def made(model: Any) -> Any:
        optimizer = hosts.optimizer_named("SGD", model)
        optimizer.register_step_pre_hook(lambda *_: seen.append([tensor.item() for tensor in held]))
        return optimizer

    rows = scripted(lambda: scaler, made)
    assert [tensor.item() for tensor in held] == [hosts.SCALES[-1], hosts.TRACKERS[-1]]
    before = zip([1024.0, *column(rows, "scale")], [0, *column(rows, "tracker")], hosts.SKIPS, strict=False)
    assert seen == [[scale, tracker] for scale, tracker, skipped in before if not skipped]


def test_a_disabled_scaler_is_not_passed_on() -> None:
    class Told(TakesScaler):
        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:  # noqa: ARG002
            return grad_scaler

    for scaler in (TorchScaler("cpu", enabled=False), GradScaler("cpu", enabled=False)):
        assert not scaler._enabled
        assert scaler._get_growth_tracker() == 0
        assert scaler.step(Told(network())) is None
