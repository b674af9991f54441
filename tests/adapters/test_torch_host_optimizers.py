"""Optimizers and scripts that use the private surface of torch's scaler, as small stand-ins: gradscale serves them too.

What they do is what apex, Transformer Engine, NeMo and widely copied training scripts do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from axes import require
from hosts import (
    SCALES,
    SKIPS,
    TRACKERS,
    Make,
    Row,
    batches,
    bits,
    check_weights_move,
    column,
    maker,
    network,
    optimizer_named,
    overflow,
    same_as_torch,
)

pytestmark = [pytest.mark.torch, pytest.mark.tier("ranks")]

STEPPED = [not skipped for skipped in SKIPS]
BOTH = ["torch", "gradscale"]


@pytest.fixture(params=BOTH)
def make(request: pytest.FixtureRequest) -> Make:
    """Return what makes a scaler: torch's, which shows what the host expects, or ours."""
    return maker(request.param)


@functools.cache
def optimizer_classes() -> dict[str, Any]:
    """Return optimizers that take the scaler as an argument of ``step``, by what they do with it."""
    torch = require("torch")
    states = torch.amp.grad_scaler.OptState

    class TakesScaler(torch.optim.SGD):  # type: ignore[misc]
        """Descend, after judging and unscaling with the scaler's help."""

        _step_supports_amp_scaling = True

        def __init__(self, model: Any) -> None:
            super().__init__(model.parameters(), lr=0.1)
            self.scalers: list[Any] = []

        def gradients(self) -> list[Any]:
            return [parameter.grad for group in self.param_groups for parameter in group["params"]]

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
            assert closure is None
            assert grad_scaler._enabled
            self.scalers.append(grad_scaler)
            if not self.overflows(grad_scaler):
                super().step()
            return "called"

        def unscale(self, scaler: Any) -> None:
            if scaler._per_optimizer_states[id(self)]["stage"] is states.READY:
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
            state = scaler._per_optimizer_states[id(self)]
            if state["stage"] is states.READY:
                (found,) = scaler._check_inf_per_device(self).values()
            else:
                (found,) = scaler._found_inf_per_device(self).values()
            assert (found.shape, found.dtype) == ((), torch.float32)
            assert found in scaler._per_optimizer_states[id(self)]["found_inf_per_device"].values()
            self.unscale(scaler)
            return bool(found.item())

    class AsksByDevice(TakesScaler):
        def overflows(self, scaler: Any) -> bool:
            found = scaler._check_inf_per_device(self)[torch.device("cpu")]
            if scaler._per_optimizer_states[id(self)]["stage"] is states.READY:
                inverse = scaler._get_scale_async().double().reciprocal().float()
                for gradient in self.gradients():
                    gradient.mul_(inverse)
            return bool(found.item())

    class LetsItUnscale(TakesScaler):
        def overflows(self, scaler: Any) -> bool:
            if scaler._per_optimizer_states[id(self)]["stage"] is states.READY:
                scaler.unscale_(self)
            assert scaler._per_optimizer_states[id(self)]["stage"] is states.UNSCALED
            return any(found.item() for found in scaler._found_inf_per_device(self).values())

    class TellsItsVerdict(TakesScaler):
        def overflows(self, scaler: Any) -> bool:
            self.unscale(scaler)
            found = self.flag()
            scaler._per_optimizer_states[id(self)]["found_inf_per_device"] = {found.device: found}
            return bool(found.item())

    class TellsItsVerdictByDevice(TakesScaler):
        def overflows(self, scaler: Any) -> bool:
            self.unscale(scaler)
            found = self.flag()
            scaler._per_optimizer_states[id(self)]["found_inf_per_device"][found.device] = found
            return bool(found.item())

    kinds = (AsksForTheVerdict, AsksByDevice, LetsItUnscale, TellsItsVerdict, TellsItsVerdictByDevice)
    return {kind.__name__: kind for kind in kinds}


def trained(make: Make, optimizer_class: Any, *, unscales: bool) -> list[Row]:
    """Train with an optimizer that gets the scaler, and return what is known after each step."""
    scaler = make()
    model = network()
    optimizer = optimizer_class(model)
    rows: list[Row] = []
    for index, batch in enumerate(batches()):
        optimizer.zero_grad()
        scaler.scale(model(batch).square().mean()).backward()
        if SKIPS[index]:
            overflow(model)
        if unscales:
            scaler.unscale_(optimizer)
        with pytest.warns(FutureWarning, match="grad_scaler|pass(ing)? itself"):
            assert scaler.step(optimizer) == "called"
        assert optimizer.scalers.pop() is scaler
        scaler.update()
        tracker = scaler._get_growth_tracker()
        rows.append({"scale": scaler.get_scale(), "tracker": tracker, "weights": bits(model)})
        if hasattr(scaler, "last_step"):
            report = scaler.last_step(optimizer)
            assert (report.skipped, report.nonfinite > 0) == (SKIPS[index], SKIPS[index])
    return rows


@pytest.mark.parametrize("unscales", [True, False], ids=["unscaled", ""])
@pytest.mark.parametrize(
    "kind", ["AsksForTheVerdict", "AsksByDevice", "LetsItUnscale", "TellsItsVerdict", "TellsItsVerdictByDevice"]
)
def test_an_optimizer_that_takes_the_scaler_is_served(make: Make, kind: str, unscales: bool) -> None:
    optimizer_class = optimizer_classes()[kind]
    rows = same_as_torch(lambda make: trained(make, optimizer_class, unscales=unscales), make)
    assert column(rows, "scale") == SCALES
    assert column(rows, "tracker") == TRACKERS
    check_weights_move([bits(network()), *column(rows, "weights")], STEPPED)


@pytest.mark.parametrize("unscales", [True, False], ids=["unscaled", ""])
@pytest.mark.parametrize("preset", [None, 4.0], ids=["", "preset"])
def test_an_optimizer_that_reads_attributes_is_served(make: Make, preset: float | None, unscales: bool) -> None:
    torch = require("torch")

    class ReadsAttributes(torch.optim.SGD):  # type: ignore[misc]
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None) -> Any:
            assert closure is None
            assert (self.found_inf.shape, self.found_inf.dtype) == ((), torch.float32)
            assert self.found_inf.item() in (0.0, 1.0)
            divisor = 1.0 if self.grad_scale is None else float(self.grad_scale)
            divisors.append(divisor)
            for parameter in self.param_groups[0]["params"]:
                parameter.grad.div_(divisor)
                if not self.found_inf.item():
                    parameter.data.add_(parameter.grad, alpha=-0.1)
            return "called"

    divisors: list[float] = []

    def run(make: Make) -> list[Row]:
        divisors.clear()
        scaler = make()
        model = network()
        optimizer = ReadsAttributes(model.parameters(), lr=0.1)
        rows: list[Row] = []
        for index, batch in enumerate(batches()):
            optimizer.zero_grad()
            scaler.scale((preset or 1.0) * model(batch).square().mean()).backward()
            if SKIPS[index]:
                overflow(model)
            if unscales:
                scaler.unscale_(optimizer)
            if preset is not None:
                optimizer.grad_scale = preset
            assert scaler.step(optimizer) == "called"
            assert not hasattr(optimizer, "grad_scale")
            assert not hasattr(optimizer, "found_inf")
            scaler.update()
            rows.append({"scale": scaler.get_scale(), "weights": bits(model), "divisor": divisors[-1]})
            if hasattr(scaler, "last_step"):
                assert scaler.last_step(optimizer).skipped == SKIPS[index]
        return rows

    rows = same_as_torch(run, make)
    assert column(rows, "scale") == SCALES
    used = [1024.0, *SCALES[:-1]]
    assert column(rows, "divisor") == [(preset or 1.0) * (1.0 if unscales else scale) for scale in used]
    check_weights_move([bits(network()), *column(rows, "weights")], STEPPED)
    if preset is None:
        assert column(rows, "weights") == column(scripted(make), "weights")


def scripted(
    make: Make,
    optimizer: str = "SGD",
    *,
    local: Callable[[Any], None] = overflow,
    between: Callable[[Any, Any], None] | None = None,
) -> list[Row]:
    """Train with a script that overflows at some steps, there in the gradients or between ``unscale_`` and ``step``."""
    scaler = make()
    model = network()
    raw = optimizer_named(optimizer, model)
    rows: list[Row] = []
    for index, batch in enumerate(batches()):
        raw.zero_grad()
        scaler.scale(model(batch).square().mean()).backward()
        if SKIPS[index]:
            local(model)
        scaler.unscale_(raw)
        if SKIPS[index] and between is not None:
            between(scaler, raw)
        scaler.step(raw)
        scaler.update()
        rows.append({"scale": scaler.get_scale(), "tracker": scaler._get_growth_tracker(), "weights": bits(model)})
        if hasattr(scaler, "last_step"):
            assert scaler.last_step(raw).skipped == SKIPS[index]
    return rows


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "SGD-fused", "AdamW-fused"])
@pytest.mark.parametrize("how", ["method", "state"])
def test_a_verdict_that_a_script_reduces_by_itself_counts(make: Make, how: str, optimizer: str) -> None:
    def reduce(scaler: Any, raw: Any) -> None:
        """Do what an all-reduce with MAX does where another rank has overflowed."""
        if how == "method":
            flags = scaler._found_inf_per_device(raw)
        else:
            flags = scaler._per_optimizer_states[id(raw)]["found_inf_per_device"]
        assert len(flags) == 1
        for flag in flags.values():
            flag.fill_(1.0)

    rows = same_as_torch(
        lambda make: scripted(make, optimizer, local=lambda model: None, between=reduce),  # noqa: ARG005
        make,
    )
    assert column(rows, "scale") == SCALES
    assert column(rows, "tracker") == TRACKERS
    check_weights_move([bits(network()), *column(rows, "weights")], STEPPED)


@pytest.mark.parametrize("overflows", [True, False], ids=["overflow", ""])
def test_stage_and_verdict_are_read_at_every_point(make: Make, overflows: bool) -> None:
    scaler = make()
    model = network()
    optimizer = optimizer_named("SGD", model)

    def read() -> tuple[str, list[float], list[float]]:
        state = scaler._per_optimizer_states[id(optimizer)]
        found = [flag.item() for flag in state["found_inf_per_device"].values()]
        return state["stage"].name, found, [flag.item() for flag in scaler._found_inf_per_device(optimizer).values()]

    flags = [float(overflows)]
    for _ in range(2):
        scaler.scale(model(batches(1)[0]).square().mean()).backward()
        if overflows:
            overflow(model)
        assert read() == ("READY", [], [])
        scaler.unscale_(optimizer)
        assert read() == ("UNSCALED", flags, flags)
        scaler.step(optimizer)
        assert read() == ("STEPPED", flags, flags)
        scaler.update()
        assert read() == ("READY", [], [])
        optimizer.zero_grad()


def test_the_state_is_none_before_the_first_loss_and_made_on_demand(make: Make) -> None:
    torch = require("torch")
    scaler = make()
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler._enabled
    assert scaler._scale is None
    assert scaler._growth_tracker is None
    assert scaler._get_scale_async() is None
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (1024.0, 0)
    optimizer = optimizer_named("SGD", network())
    assert scaler._found_inf_per_device(optimizer) == {}
    assert scaler._per_optimizer_states[id(optimizer)]["stage"].name == "READY"
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    assert scaler._get_scale_async() is scaler._scale
    assert (scaler._scale.dtype, scaler._scale.shape, scaler._scale.item()) == (torch.float32, (), 1024.0)
    assert (scaler._growth_tracker.dtype, scaler._growth_tracker.item()) == (torch.int32, 0)


def test_a_captured_scale_sees_every_update(make: Make) -> None:
    scaler = make()
    model = network()
    optimizer = optimizer_named("SGD", model)
    scaler._lazy_init_scale_growth_tracker("cpu")
    scale, tracker = scaler._scale, scaler._growth_tracker
    for index, batch in enumerate(batches()):
        optimizer.zero_grad()
        scaler.scale(model(batch).square().mean()).backward()
        if SKIPS[index]:
            overflow(model)
        scaler.step(optimizer)
        scaler.update()
        assert (scale.item(), tracker.item()) == (SCALES[index], TRACKERS[index])


def test_a_disabled_scaler_is_not_passed_on() -> None:
    torch = require("torch")
    from gradscale_torch import GradScaler

    class TakesScaler(torch.optim.SGD):  # type: ignore[misc]
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:  # noqa: ARG002
            return grad_scaler

    for scaler in (torch.amp.GradScaler("cpu", enabled=False), GradScaler("cpu", enabled=False)):
        assert not scaler._enabled
        assert scaler._get_growth_tracker() == 0
        assert scaler.step(TakesScaler(network().parameters(), lr=0.1)) is None
