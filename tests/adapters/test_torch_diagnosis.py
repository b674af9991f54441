"""diagnose() of torch's replacements: in true units at every stage, fused or not, and with the optimizer's names."""

from __future__ import annotations

import math
from typing import Any

import pytest
from axes import require

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def torch() -> Any:
    """Return torch."""
    return require("torch")


def largest(scaler: Any, optimizer: Any) -> dict[str, float | None]:
    return {entry.name: entry.largest for entry in scaler.diagnose(optimizer).entries}


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_magnitudes_are_those_of_the_true_gradients_at_every_stage(torch: Any, fused: bool, bad: float | None) -> None:
    from gradscale_torch import GradScaler

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, fused=fused)
    scaler = GradScaler("cpu")
    expected = {"weight": 4.0, "bias": 2.0}
    for _ in range(2):
        scaler.scale(torch.tensor(1.0))
        model.weight.grad = torch.full((2, 3), 4.0 * scaler.get_scale())
        model.bias.grad = torch.full((2,), -2.0 * scaler.get_scale())
        if bad is not None:
            model.weight.grad[1, 2] = bad
        before = model.weight.grad.clone()
        assert largest(scaler, optimizer) == expected
        assert torch.equal(model.weight.grad.nan_to_num(7.0), before.nan_to_num(7.0))
        scaler.step(optimizer)
        assert largest(scaler, optimizer) == expected
        assert scaler.last_step(optimizer).skipped == (bad is not None)
        scaler.update()
        assert largest(scaler, optimizer) == expected


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_skipped_step_is_diagnosed_by_itself_with_its_names_and_its_loss(torch: Any, fused: bool) -> None:
    from gradscale_torch import GradScaler

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, fused=fused)
    scaler = GradScaler("cpu", diagnose="on_overflow")
    for loss, cause in ((1.0, "scale"), (math.nan, "model")):
        scaler.scale(torch.tensor(loss))
        model.weight.grad = torch.full((2, 3), math.inf)
        model.bias.grad = torch.ones(2)
        scaler.step(optimizer)
        report = scaler.last_step(optimizer).overflow
        scaler.update()
        assert [entry.name for entry in report.nonfinite] == ["weight"]
        assert (report.nonfinite[0].inf, report.nonfinite[0].nan, report.cause) == (6, 0, cause)
    model.weight.grad = torch.ones(2, 3)
    scaler.scale(torch.tensor(1.0))
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).overflow is None


def test_names_that_do_not_match_are_refused_and_nothing_changes(torch: Any) -> None:
    from gradscale import InvalidValueError
    from gradscale_torch import GradScaler

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    before = scaler.state_dict()
    for names in (["weight"], ["weight", "bias", "more"], {"weight": model.weight}):
        with pytest.raises(InvalidValueError, match="names"):
            scaler.diagnose(optimizer, names)
    assert {entry.name for entry in scaler.diagnose(optimizer, model.named_parameters()).entries} == {"weight", "bias"}
    assert scaler.state_dict() == before
    scaler.step(optimizer)
    assert not scaler.last_step(optimizer).skipped
