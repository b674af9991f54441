"""Dtypes and parameters that torch's scaler refuses or unscales wrongly, shown on the same script first."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from torch_runs import assert_same

from gradscale import CallOrderError, GradscaleError, InvalidTypeError

pytestmark = pytest.mark.torch


def started(torch: Any, make: Any, scale: float = 4.0, **options: Any) -> Any:
    """Return a scaler whose scale is live."""
    scaler = make("cpu", init_scale=scale, **options)
    scaler.scale(torch.ones(()))
    return scaler


def plain(torch: Any, parameters: list[Any], **options: Any) -> Any:
    """Return an optimizer that moves by the gradient."""
    return torch.optim.SGD(parameters, lr=1.0, **options)


# Dtypes.


@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale-step"])
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("bad", [None, complex(math.inf, 1), complex(1, math.nan)], ids=["finite", "real", "imaginary"])
def test_complex_gradients_are_refused_by_torch_and_unscaled_by_ours(
    torch: Any, ours: Any, theirs: Any, dtype: str, bad: complex | None, explicit: bool
) -> None:
    for make in (theirs, ours):
        scaler = started(torch, make)
        parameter = torch.nn.Parameter(torch.zeros(2, dtype=getattr(torch, dtype)))
        optimizer = plain(torch, [parameter])
        parameter.grad = torch.tensor([4 + 8j, -12j if bad is None else bad], dtype=parameter.dtype)
        if make is theirs:
            with pytest.raises(RuntimeError, match="not implemented for 'Complex"):
                scaler.unscale_(optimizer)
            continue
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert parameter.tolist() == ([-1 - 2j, 3j] if bad is None else [0j, 0j])
        assert scaler.last_step(optimizer).skipped is (bad is not None)


def test_conjugated_complex_gradients_are_unscaled_where_they_stand(torch: Any, ours: Any) -> None:
    scaler = started(torch, ours)
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    optimizer = plain(torch, [parameter])
    parameter.grad = torch.tensor([4 + 8j, -12j]).conj()
    assert parameter.grad.is_conj()
    scaler.unscale_(optimizer)
    assert parameter.grad.tolist() == [1 - 2j, 3j]


def test_a_complex_model_trains_as_without_scaling(torch: Any, ours: Any) -> None:
    results = []
    for enabled in (False, True):
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 2, dtype=torch.complex64)
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
        scaler = ours("cpu", enabled=enabled)
        inputs = torch.randn(5, 3, dtype=torch.complex64)
        for _ in range(5):
            optimizer.zero_grad()
            scaler.scale(layer(inputs).abs().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append([parameter.detach().clone() for parameter in layer.parameters()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale-step"])
def test_float16_gradients_are_refused_as_by_torch_and_taken_by_choice(
    torch: Any, ours: Any, theirs: Any, explicit: bool
) -> None:
    for make, options in ((theirs, {}), (ours, {}), (ours, {"allow_fp16_grads": True})):
        scaler = started(torch, make, **options)
        parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))]
        optimizer = plain(torch, parameters)
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 12.0)
        call: Callable[[Any], Any] = scaler.unscale_ if explicit else scaler.step
        if not options:
            with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients\."):
                call(optimizer)
            # Nothing has been unscaled, and it can be tried again.
            assert [parameter.grad.tolist() for parameter in parameters] == [[12.0, 12.0]] * 2
            assert scaler._per_optimizer_states[id(optimizer)]["stage"].name == "READY"
            parameters[1].grad = None
            call(optimizer)
            continue
        call(optimizer)
        if explicit:
            scaler.step(optimizer)
        scaler.update()
        assert [parameter.tolist() for parameter in parameters] == [[-3.0, -3.0]] * 2


@pytest.mark.parametrize("value", [65504.0, 6e-8, -0.0, math.inf, math.nan])
@pytest.mark.parametrize("scale", [65536.0, 1000.0])
def test_float16_gradients_are_unscaled_as_by_torchs_kernel(torch: Any, ours: Any, value: float, scale: float) -> None:
    scaler = started(torch, ours, scale, allow_fp16_grads=True)
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
    optimizer = plain(torch, [parameter])
    parameter.grad = torch.tensor([1.0, value, 300.0], dtype=torch.float16)
    expected, found = parameter.grad.clone(), torch.zeros(())
    inverse = torch.tensor(scale).double().reciprocal().float()
    torch._amp_foreach_non_finite_check_and_unscale_([expected], found, inverse)
    scaler.unscale_(optimizer)
    assert_same(parameter.grad, expected)
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).skipped is bool(found.item())


def test_integer_gradients_are_refused_as_torch_refuses_them(torch: Any, ours: Any, theirs: Any) -> None:
    for make in (theirs, ours):
        scaler = started(torch, make)
        parameters = [torch.nn.Parameter(torch.zeros(2)), torch.zeros(2, dtype=torch.int32)]
        optimizer = plain(torch, parameters)
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 8)
        if make is theirs:
            with pytest.raises(RuntimeError, match="not implemented for 'Int'"):
                scaler.unscale_(optimizer)
            continue
        with pytest.raises(InvalidTypeError, match=r"floating or complex dtype.*got torch\.int32"):
            scaler.unscale_(optimizer)
        assert [parameter.grad.tolist() for parameter in parameters] == [[8.0, 8.0], [8, 8]]


# Which parameters.


@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale-step"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_an_optimizer_without_gradients_this_time_is_an_error_and_the_other_decides(
    torch: Any, ours: Any, theirs: Any, fused: bool, explicit: bool
) -> None:
    for make in (theirs, ours):
        scaler = started(torch, make)
        parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        empty, full = (plain(torch, [parameter], fused=fused) for parameter in parameters)
        parameters[1].grad = torch.full((1,), math.inf)
        if explicit:
            scaler.unscale_(empty)
        if make is theirs and not fused:
            with pytest.raises(AssertionError, match="No inf checks were recorded"):
                scaler.step(empty)
            continue
        if make is ours:
            with pytest.raises(CallOrderError, match="none of whose parameters has a gradient"):
                scaler.step(empty)
        else:
            scaler.step(empty)
        scaler.step(full)
        scaler.update()
        assert scaler.get_scale() == 2.0
        if make is ours:
            assert [scaler.last_step(each).reason for each in (empty, full)] == ["no gradients", "overflow"]
            assert not hasattr(empty, "found_inf")
            scaler.scale(torch.ones(()))
            parameters[0].grad = torch.full((1,), 2.0)
            scaler.step(empty)
            scaler.update()
            assert parameters[0].item() == -1.0


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters:UserWarning")
@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale-step"])
def test_tied_parameters_are_unscaled_twice_by_torch_and_once_by_ours(
    torch: Any, ours: Any, theirs: Any, explicit: bool
) -> None:
    for make, expected in ((theirs, 1.0), (ours, 4.0)):
        scaler = started(torch, make)
        first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        optimizer = plain(torch, [first, second, first])
        first.grad, second.grad = torch.full((2,), 16.0), torch.full((2,), 32.0)
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert first.grad.tolist() == [expected] * 2
        assert second.grad.tolist() == [8.0] * 2


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters:UserWarning")
def test_a_gradient_that_two_parameters_share_is_unscaled_once(torch: Any, ours: Any, theirs: Any) -> None:
    for make, expected in ((theirs, 1.0), (ours, 4.0)):
        scaler = started(torch, make)
        parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        parameters[0].grad = torch.full((2,), 16.0)
        parameters[1].grad = parameters[0].grad
        scaler.unscale_(plain(torch, parameters))
        assert parameters[0].grad.tolist() == [expected] * 2


def test_parameters_that_are_added_and_removed_between_iterations_are_noticed(torch: Any, ours: Any) -> None:
    scaler = started(torch, ours)
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    optimizer = plain(torch, parameters[:1])
    seen = []
    for change in (
        lambda: None,
        lambda: optimizer.add_param_group({"params": [parameters[1]]}),
        lambda: optimizer.param_groups[0]["params"].append(parameters[2]),
        lambda: optimizer.param_groups[0]["params"].remove(parameters[0]),
        lambda: optimizer.param_groups.pop(),
    ):
        change()
        scaler.scale(torch.ones(()))
        for parameter in parameters:
            parameter.grad = torch.full((1,), 4.0)
        scaler.step(optimizer)
        scaler.update()
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
def test_a_parameter_that_is_no_tensor_is_an_assertion_at_torchs_and_named_at_ours(
    torch: Any, ours: Any, theirs: Any, bad: Any, call: str
) -> None:
    for make, error in ((theirs, AssertionError), (ours, InvalidTypeError)):
        scaler = started(torch, make)
        good = torch.nn.Parameter(torch.zeros(1))
        good.grad = torch.ones(1)
        with pytest.raises(error, match=f"got {type(bad).__name__}") as caught:
            getattr(scaler, call)(Holding([{"params": [good, bad]}]))
        assert good.grad.item() == 1.0
        assert make is theirs or (repr(bad) in str(caught.value) and "Holding" in str(caught.value))


@pytest.mark.parametrize("groups", [None, 3, [3], [{}], [{"params": 3}]], ids=str)
def test_what_has_no_parameters_is_an_error_that_says_so(torch: Any, ours: Any, groups: Any) -> None:
    with pytest.raises(InvalidTypeError, match="param_groups"):
        started(torch, ours).unscale_(Holding(groups))
    with pytest.raises(InvalidTypeError, match="param_groups"):
        started(torch, ours).unscale_(object())


@pytest.mark.parametrize("device", ["nonsense", "cdua", "cpu:", "gpu", ""], ids=repr)
def test_a_device_that_does_not_exist_is_named(ours: Any, theirs: Any, device: str) -> None:
    assert theirs(device).is_enabled()
    with pytest.raises(GradscaleError, match="device") as caught:
        ours(device)
    assert repr(device) in str(caught.value)
