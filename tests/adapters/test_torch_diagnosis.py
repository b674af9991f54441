"""diagnose() of torch's replacements: in true units at every stage, fused or not, and with the optimizer's names."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
from axes import require

from gradscale.testing import run_ranks

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


@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale"])
@pytest.mark.parametrize("scale", [1024.0, 0.5])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_every_fused_kernel_is_allowed_for(
    torch: Any, monkeypatch: pytest.MonkeyPatch, name: str, scale: float, explicit: bool, late: bool
) -> None:
    from gradscale_torch import GradScaler, verdicts

    # Late is a verdict that the host reads when it is asked for it, as those of a device are.
    monkeypatch.setattr(verdicts, "would_wait", lambda _: late)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = getattr(torch.optim, name)([("weight", weight)], lr=0.1, fused=True)
    scaler = GradScaler("cpu", init_scale=scale)
    for value in (1.0, math.nan, math.inf, 2.0):
        current = scaler.get_scale()
        scaler.scale(torch.tensor(1.0))
        weight.grad = torch.tensor([value, -4.0, 2.0]) * current
        found = [largest(scaler, optimizer)]
        if explicit:
            scaler.unscale_(optimizer)
            found.append(largest(scaler, optimizer))
        scaler.step(optimizer)
        found.append(largest(scaler, optimizer))
        scaler.update()
        report = scaler.diagnose(optimizer)
        assert (report.scale, len(report.nonfinite)) == (current, int(not math.isfinite(value)))
        assert [*found, {"weight": report.entries[0].largest}] == [{"weight": 4.0}] * (4 if explicit else 3)


def test_a_closure_after_a_skipped_fused_step_leaves_unscaled_gradients(torch: Any) -> None:
    from gradscale_torch import GradScaler

    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([("weight", weight)], lr=0.1, fused=True)
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.tensor(1.0))
    weight.grad = torch.tensor([math.inf, 4096.0, 0.0])
    scaler.step(optimizer)
    scaler.update()
    assert largest(scaler, optimizer) == {"weight": 4.0}

    def closure() -> Any:
        weight.grad = torch.tensor([math.inf, 4.0, 0.0]) * scaler.scale(torch.tensor(1.0))
        return weight.grad.sum()

    scaler.scale(torch.tensor(1.0))
    scaler.step(optimizer, closure)
    assert scaler.last_step(optimizer).skipped
    assert largest(scaler, optimizer) == {"weight": 4.0}
    scaler.update()
    assert largest(scaler, optimizer) == {"weight": 4.0}


def test_gradients_unscaled_after_a_skipped_fused_step_are_unscaled_though_no_step_follows(torch: Any) -> None:
    from gradscale_torch import GradScaler

    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([("weight", weight)], lr=0.1, fused=True)
    scaler = GradScaler("cpu", init_scale=1024.0)
    for leaves_out_the_step in (False, True):
        scale = float(scaler.scale(torch.tensor(1.0)))
        weight.grad = torch.tensor([math.inf, 4.0, 0.0]) * scale
        if leaves_out_the_step:
            scaler.unscale_(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
        assert largest(scaler, optimizer) == {"weight": 4.0}


@pytest.mark.filterwarnings("ignore:.*takes grad_scaler=.*:FutureWarning")
@pytest.mark.parametrize("options", [{}, {"diagnose": "on_overflow"}], ids=["asked", "automatic"])
def test_an_optimizer_that_asks_the_scaler_leaves_what_it_skips_scaled(torch: Any, options: dict[str, Any]) -> None:
    from gradscale_torch import GradScaler

    class Asking(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, *, grad_scaler: Any) -> None:
            if any(flag.item() for flag in grad_scaler._check_inf_per_device(self).values()):
                return
            weight.grad /= grad_scaler._get_scale_async()
            super().step()

    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = Asking([("weight", weight)], lr=0.1)
    scaler = GradScaler("cpu", init_scale=1024.0, **options)
    for value in (1.0, math.nan, 1.0):
        weight.grad = torch.tensor([value, 4.0, 2.0]) * scaler.scale(torch.tensor(1.0))
        found = [largest(scaler, optimizer)]
        scaler.step(optimizer)
        found.append(largest(scaler, optimizer))
        report = scaler.last_step(optimizer)
        scaler.update()
        found.append(largest(scaler, optimizer))
        assert found == [{"weight": 4.0}] * 3
        assert report.skipped == math.isnan(value)
        if report.skipped and options:
            assert report.overflow.entries[0].largest == 4.0


def test_gradients_that_are_lazily_negated_are_looked_at(torch: Any) -> None:
    from gradscale_torch import GradScaler

    weight = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = torch.optim.SGD([("weight", weight)], lr=0.1)
    weight.grad = torch.tensor([[1 + 0j, 3 - 4j], [0, 2 + 5j]]).conj().imag
    assert weight.grad.is_neg()
    (entry,) = GradScaler("cpu").diagnose(optimizer).entries
    assert (entry.largest, entry.zeros, entry.shape) == (5.0, 2, (2, 2))


def test_a_diagnosis_of_a_group_before_the_first_gradients_hides_nothing_from_the_first_step(torch: Any) -> None:
    from gradscale_torch import GradScaler

    def train(collectives: Any, looks: bool) -> list[float]:
        parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        scaler = GradScaler("cpu", init_scale=4.0, group=collectives)
        if looks:
            assert all(entry.missing for entry in scaler.diagnose(optimizer, gather=True).entries)
        scaler.scale(torch.tensor(1.0))
        # One tensor is the gradient of two parameters, and is to be unscaled once.
        parameters[0].grad = parameters[1].grad = torch.full((1,), 8.0)
        scaler.step(optimizer)
        return [parameter.item() for parameter in parameters]

    for looks in (False, True):
        assert run_ranks(1, functools.partial(train, looks=looks)) == [[-1.0, -1.0]]


def test_a_default_group_that_came_after_the_scaler_is_gathered_over_before_the_first_step(torch: Any) -> None:
    from gradscale_torch import ShardedGradScaler

    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([1.0, 3.0])
    optimizer = torch.optim.SGD([("weight", weight)], lr=1.0)
    scaler = ShardedGradScaler("cpu")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        (entry,) = scaler.diagnose(optimizer, gather=True).entries
    finally:
        torch.distributed.destroy_process_group()
    assert (entry.name, entry.rank, entry.largest) == ("weight", (0,), 3.0)


def test_sparse_gradients_with_duplicates_are_left_as_they_are(torch: Any) -> None:
    from gradscale_torch import GradScaler

    def look(collectives: Any, gather: bool) -> Any:
        weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
        values = torch.tensor([8.0, 16.0, 20.0], dtype=torch.float16)
        gradient = torch.sparse_coo_tensor([[0, 0, 2]], values, (4,), check_invariants=True)
        weight.grad = gradient
        scaler = GradScaler("cpu", init_scale=4.0, group=collectives, allow_fp16_grads=True)
        scaler.scale(torch.tensor(1.0))
        (entry,) = scaler.diagnose(torch.optim.SGD([weight], lr=0.1), gather=gather).entries
        assert weight.grad is gradient
        assert not gradient.is_coalesced()
        return entry.shape, entry.size, entry.largest

    for gather in (False, True):
        assert run_ranks(1, functools.partial(look, gather=gather)) == [((4,), 2, 6.0)]


def test_a_loss_of_any_library_counts_once(torch: Any) -> None:
    from gradscale_torch import GradScaler

    scaler = GradScaler("cpu")
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for loss in (math.nan, np.float64(math.nan), np.float32(math.nan), np.full(2, math.inf), torch.tensor(math.nan)):
        assert scaler.diagnose(optimizer, loss=loss).loss_nonfinite == 1
        assert scaler.diagnose(optimizer, loss=[loss, 1.0, None, torch.empty(1, device="meta")]).loss_nonfinite == 1
