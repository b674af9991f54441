"""Dtypes and parameters that torch's scaler refuses or unscales wrongly, shown on the same script first."""

from __future__ import annotations

import math
from typing import Any

import pytest
from axes_torch import GradScaler, TorchScaler, torch
from small_torch import Small, assert_same

from gradscale import CallOrderError, InvalidTypeError

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters:UserWarning"),
]

explicit = pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale-step"])


def pair(**options: Any) -> list[Small]:
    """Return a run with torch's scaler and one with ours, of scale 4."""
    return [Small(make("cpu", init_scale=4.0), **options) for make in (TorchScaler, GradScaler)]


# Dtypes.


@explicit
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("bad", [None, complex(math.inf, 1), complex(1, math.nan)], ids=["finite", "real", "imaginary"])
def test_complex_gradients_are_refused_by_torch_and_unscaled_by_ours(
    dtype: str, bad: complex | None, explicit: bool
) -> None:
    theirs, ours = pair(dtypes=[dtype])
    for run in (theirs, ours):
        run.put(torch.tensor([4 + 8j, -12j if bad is None else bad], dtype=run.parameter.dtype))
    with pytest.raises(RuntimeError, match="not implemented for 'Complex"):
        theirs.step(explicit=explicit)
    ours.step(explicit=explicit)
    assert ours.held == [[-1 - 2j, 3j] if bad is None else [0j, 0j]]
    assert ours.report.skipped is (bad is not None)


def test_conjugated_complex_gradients_are_unscaled_where_they_stand() -> None:
    _, run = pair(dtypes=["complex64"])
    run.put(torch.tensor([4 + 8j, -12j]).conj())
    assert run.parameter.grad.is_conj()
    run.scaler.unscale_(run.optimizer)
    assert run.parameter.grad.tolist() == [1 - 2j, 3j]


def test_a_complex_model_trains_as_without_scaling() -> None:
    results = []
    for enabled in (False, True):
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 2, dtype=torch.complex64)
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
        scaler = GradScaler("cpu", enabled=enabled)
        inputs = torch.randn(5, 3, dtype=torch.complex64)
        for _ in range(5):
            optimizer.zero_grad()
            scaler.scale(layer(inputs).abs().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append([parameter.detach().clone() for parameter in layer.parameters()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@explicit
def test_float16_gradients_are_refused_as_by_torch_and_taken_by_choice(explicit: bool) -> None:
    dtypes = ["float32", "float16"]
    for run in pair(dtypes=dtypes):
        run.put(12.0)
        call = run.scaler.unscale_ if explicit else run.scaler.step
        with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients\."):
            call(run.optimizer)
        # Nothing has been unscaled, and it can be tried again.
        assert [parameter.grad.tolist() for parameter in run.parameters] == [[12.0, 12.0]] * 2
        assert run.scaler._per_optimizer_states[id(run.optimizer)]["stage"].name == "READY"
        run.parameters[1].grad = None
        call(run.optimizer)
    run = Small(GradScaler("cpu", init_scale=4.0, allow_fp16_grads=True), dtypes=dtypes)
    run.put(12.0)
    run.step(explicit=explicit)
    assert run.held == [[-3.0, -3.0]] * 2


@pytest.mark.parametrize("value", [65504.0, 6e-8, -0.0, math.inf, math.nan])
@pytest.mark.parametrize("scale", [65536.0, 1000.0])
def test_float16_gradients_are_unscaled_as_by_torchs_kernel(value: float, scale: float) -> None:
    run = Small(GradScaler("cpu", scale, allow_fp16_grads=True), dtypes=["float16"], size=3)
    expected, found = torch.tensor([1.0, value, 300.0], dtype=torch.float16), torch.zeros(())
    run.put(expected.clone())
    inverse = torch.tensor(scale).double().reciprocal().float()
    torch._amp_foreach_non_finite_check_and_unscale_([expected], found, inverse)
    run.step()
    assert_same(run.parameter.grad, expected)
    assert run.report.skipped is bool(found.item())


def test_integer_gradients_are_refused_as_torch_refuses_them() -> None:
    for run, error, message in zip(
        pair(),
        (RuntimeError, InvalidTypeError),
        ("not implemented for 'Int'", r"floating or complex dtype.*got torch\.int32"),
        strict=True,
    ):
        run.put(8.0)
        integers = torch.zeros(2, dtype=torch.int32)
        integers.grad = torch.full_like(integers, 8)
        run.optimizer.param_groups[0]["params"].append(integers)
        with pytest.raises(error, match=message):
            run.scaler.unscale_(run.optimizer)
    assert (run.parameter.grad.tolist(), integers.grad.tolist()) == ([8.0, 8.0], [8, 8])


@pytest.mark.parametrize("is_recording", [True, False], ids=["recording", "not recording"])
def test_autograd_does_not_see_the_unscaling_and_records_as_before(is_recording: bool) -> None:
    _, run = pair()
    weight = run.parameter
    # As after backward(create_graph=True).
    run.put((weight + 1) * 8.0)
    before = weight.grad.grad_fn
    with torch.set_grad_enabled(is_recording):
        norm = run.scaler.unscale_(run.optimizer, max_norm=1e9)
        assert torch.is_grad_enabled() is is_recording
    assert not norm.requires_grad
    assert weight.grad.tolist() == [2.0] * 2
    assert weight.grad.grad_fn is before


# Which parameters.


@explicit
@pytest.mark.parametrize("variant", ["SGD", "SGD-fused"])
def test_an_optimizer_without_gradients_this_time_is_an_error_and_the_other_decides(
    variant: str, explicit: bool
) -> None:
    for make in (TorchScaler, GradScaler):
        scaler = make("cpu", init_scale=4.0)
        empty, full = (Small(scaler, variant, size=1) for _ in range(2))
        full.put(math.inf)
        if explicit:
            scaler.unscale_(empty.optimizer)
        if make is TorchScaler and "fused" in variant:
            scaler.step(empty.optimizer)
        else:
            error = AssertionError if make is TorchScaler else CallOrderError
            with pytest.raises(error, match=r"No inf checks were recorded|none of whose parameters has a gradient"):
                scaler.step(empty.optimizer)
        full.step()
        assert scaler.get_scale() == 2.0
    assert [run.report.reason for run in (empty, full)] == ["no gradients", "overflow"]
    assert not hasattr(empty.optimizer, "found_inf")
    empty.iterate(1.0)
    assert empty.held == [[-1.0]]


@explicit
def test_tied_parameters_are_unscaled_twice_by_torch_and_once_by_ours(explicit: bool) -> None:
    for run, expected in zip(pair(count=2), (1.0, 4.0), strict=True):
        run.optimizer.param_groups[0]["params"].append(run.parameter)
        run.put(16.0, 32.0)
        run.step(explicit=explicit)
        assert [parameter.grad.tolist() for parameter in run.parameters] == [[expected] * 2, [8.0] * 2]


def test_a_gradient_that_two_parameters_share_is_unscaled_once() -> None:
    for run, expected in zip(pair(count=2), (1.0, 4.0), strict=True):
        run.put(*[torch.full((2,), 16.0)] * 2)
        run.parameters[1].grad = run.parameter.grad
        run.scaler.unscale_(run.optimizer)
        assert run.parameter.grad.tolist() == [expected] * 2


def test_parameters_that_are_added_and_removed_between_iterations_are_noticed() -> None:
    _, run = pair(count=3, size=1)
    parameters, (group,) = run.parameters, run.optimizer.param_groups
    del group["params"][1:]
    seen = []
    for change in (
        lambda: None,
        lambda: run.optimizer.add_param_group({"params": [parameters[1]]}),
        lambda: group["params"].append(parameters[2]),
        lambda: group["params"].remove(parameters[0]),
        lambda: run.optimizer.param_groups.pop(),
    ):
        change()
        run.put(4.0)
        run.step()
        seen.append([parameter.grad.item() for parameter in parameters])
    assert seen == [[1.0, 4.0, 4.0], [1.0, 1.0, 4.0], [1.0, 1.0, 1.0], [4.0, 1.0, 1.0], [4.0, 4.0, 1.0]]


class Holding:
    """An optimizer with whatever it is given as ``param_groups``."""

    def __init__(self, param_groups: Any) -> None:
        self.param_groups = param_groups

    def step(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("bad", ["weights", 3, None, ("name", 1.0)], ids=["text", "int", "none", "named"])
@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_a_parameter_that_is_no_tensor_is_an_assertion_at_torchs_and_named_at_ours(bad: Any, call: str) -> None:
    for run, error in zip(pair(), (AssertionError, InvalidTypeError), strict=True):
        run.put(1.0)
        with pytest.raises(error, match=f"got {type(bad).__name__}") as caught:
            getattr(run.scaler, call)(Holding([{"params": [run.parameter, bad]}]))
        assert run.parameter.grad.tolist() == [1.0, 1.0]
    assert repr(bad) in str(caught.value)
    assert "Holding" in str(caught.value)


@pytest.mark.parametrize("groups", [None, 3, [3], [{}], [{"params": 3}]], ids=str)
def test_what_has_no_parameters_is_an_error_that_says_so(groups: Any) -> None:
    _, run = pair()
    run.put(1.0)
    for wrong in (Holding(groups), object()):
        with pytest.raises(InvalidTypeError, match="param_groups"):
            run.scaler.unscale_(wrong)
