"""diagnose() of torch's replacements: in true units at every stage, fused or not, of tensors of any kind."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import diagnoses
import pytest
from axes_torch import GradScaler, ShardedGradScaler, StepGuard, torch
from libraries import opened
from small_torch import Small, optimizer_of
from tiers import examples

from gradscale.testing import run_ranks

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:gradients of .* are divided by the scale in .*float16:UserWarning"),
]


FUSED = functools.partial(optimizer_of, "SGD-fused", lr=0.1)


def named(scaler, make: Callable[[Any], Any] = FUSED) -> Small:
    """Return a run of an optimizer that knows the name of its parameter, of three elements."""
    return Small(scaler, lambda parameters: make([("weight", *parameters)]), size=3)


def largest(run: Small):
    return {entry.name: entry.largest for entry in run.scaler.diagnose(run.optimizer).entries}


WEIGHT = {"weight": 4.0}


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
def test_random_diagnoses_are_the_models_when_verdicts_are_read(monkeypatch: pytest.MonkeyPatch):
    with opened("torch") as arrays:
        for seed in range(examples(200)):
            # The host reads a late verdict when it is asked for it, as those of a device are.
            monkeypatch.setattr("gradscale_torch.devices.is_on_cpu", lambda _, is_known=seed % 2 == 0: is_known)
            diagnoses.check([diagnoses.diagnosed(None, seed, arrays)])


@pytest.mark.filterwarnings("ignore:.*takes grad_scaler=.*:FutureWarning")
def test_an_optimizer_that_asks_the_scaler_leaves_what_it_skips_scaled():
    class Asking(torch.optim.SGD):  # type: ignore[misc]
        _step_supports_amp_scaling = True

        def step(self, *, grad_scaler):
            if any(flag.item() for flag in grad_scaler._check_inf_per_device(self).values()):
                return
            run.parameter.grad /= grad_scaler._get_scale_async()
            super().step()

    run = named(GradScaler("cpu", init_scale=1024.0, diagnose="on_overflow"), Asking)
    for value in (1.0, math.nan, 1.0):
        run.give(torch.tensor([value, 4.0, 2.0]))
        assert largest(run) == WEIGHT
        run.scaler.step(run.optimizer)
        assert largest(run) == WEIGHT
        report = run.report
        run.scaler.update()
        assert largest(run) == WEIGHT
        assert report.skipped == math.isnan(value)
        assert not report.skipped or report.overflow.entries[0].largest == 4.0


def test_a_default_group_that_came_after_the_scaler_is_gathered_over_before_the_first_step():
    run = named(ShardedGradScaler("cpu"))
    run.parameter.grad = torch.tensor([1.0, 3.0, 2.0])
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        (entry,) = run.scaler.diagnose(run.optimizer, gather=True).entries
    finally:
        torch.distributed.destroy_process_group()
    assert (entry.name, entry.rank, entry.largest) == ("weight", (0,), 3.0)


# 2,048 and 1 are no float16 together.
VALUES = torch.tensor([2048.0, 1.0, 1.0, 20.0], dtype=torch.float16)
DUPLICATES = torch.sparse_coo_tensor([[0, 0, 0, 2]], VALUES, (4,), check_invariants=True)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("gather", [False, True])
def test_gradients_of_any_layout_are_left_as_they_are(gather: bool):
    def look(collectives):
        seen = []
        for gradient in (DUPLICATES, torch.eye(2).to_sparse_csr(), torch.ones(2, requires_grad=True) * 2):
            scaler = GradScaler("cpu", init_scale=4.0, group=collectives, allow_fp16_grads=True)
            scaler.scale(torch.ones(()))
            parameter = torch.nn.Parameter(torch.zeros_like(gradient.detach()))
            parameter.grad = gradient
            (entry,) = scaler.diagnose(torch.optim.SGD([parameter]), gather=gather).entries
            assert parameter.grad is gradient
            seen.append((entry.shape, entry.size, entry.largest))
        return seen

    assert run_ranks(1, look) == [[((4,), 2, 2050.0 / 4.0), ((2, 2), 2, 0.25), ((2,), 2, 0.5)]]
    assert not DUPLICATES.is_coalesced()


def test_a_state_of_a_tensor_subclass_is_searched_inside():
    class Quantized(torch.Tensor):  # type: ignore[misc]
        """Codes of 8 bits and their scales, as 8-bit optimizers keep their moments; only its parts can be computed."""

        @staticmethod
        def __new__(cls, codes, scale):
            made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
            made.codes, made.scale = codes, scale
            return made

        def __tensor_flatten__(self):
            return ["codes", "scale"], None

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.detach.default:
                return cls(args[0].codes, args[0].scale)
            raise NotImplementedError(function)

    run = named(GradScaler("cpu"))
    run.give(1.0)
    for dtype in (torch.uint8, torch.float8_e4m3fn):
        for scale, found in ((1.0, []), (math.inf, ["exp_avg of weight"])):
            codes = torch.zeros(3, dtype=dtype)
            run.optimizer.state[run.parameter]["exp_avg"] = Quantized(codes, torch.tensor([1.0, scale]))
            report = run.scaler.diagnose(run.optimizer, state=True)
            assert [entry.place for entry in report.broken] == found


def test_the_buffers_of_a_module_are_searched_with_its_weights():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(4, 2)).sum().backward()
    model[1].running_var[1] = math.nan
    report = StepGuard().diagnose(optimizer, model.named_parameters(), params=model)
    assert [(entry.place, entry.nan) for entry in report.broken] == [("1.running_var", 1)]
    assert report.cause == "weights"
