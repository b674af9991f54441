"""Dtypes, parameters and layouts that torch's scaler refuses or unscales wrongly, and ours does not."""

from __future__ import annotations

import math

import pytest
from axes_torch import GradScaler, TorchScaler, torch
from small_torch import Small

from gradscale import CallOrderError, GradscaleError, InvalidTypeError, InvalidValueError

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
]

explicit = pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale-step"])


def pair(**options) -> list[Small]:
    """Return a run with torch's scaler and one with ours, of scale 4."""
    return [Small(make("cpu", init_scale=4.0), **options) for make in (TorchScaler, GradScaler)]


# Dtypes.


@explicit
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("bad", [None, complex(math.inf, 1), complex(1, math.nan)], ids=["finite", "real", "imaginary"])
def test_complex_gradients_which_torch_refuses_are_unscaled(dtype: str, bad: complex | None, explicit: bool):
    _, run = pair(dtypes=[dtype])
    run.put(torch.tensor([4 + 8j, -12j if bad is None else bad], dtype=run.parameter.dtype))
    run.step(explicit=explicit)
    assert run.held == [[-1 - 2j, 3j] if bad is None else [0j, 0j]]
    assert run.report.skipped is (bad is not None)
    if bad is None:
        run.put(torch.tensor([4 + 8j, -12j], dtype=run.parameter.dtype).conj())
        run.scaler.unscale_(run.optimizer)
        assert run.parameter.grad.is_conj()
        assert run.parameter.grad.tolist() == [1 - 2j, 3j]


@explicit
def test_float16_gradients_are_refused_as_by_torch_and_taken_by_choice(explicit: bool):
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


def test_integer_gradients_are_refused_before_anything_is_unscaled():
    _, run = pair()
    run.put(8.0)
    integers = torch.zeros(2, dtype=torch.int32)
    integers.grad = torch.full_like(integers, 8)
    run.optimizer.param_groups[0]["params"].append(integers)
    with pytest.raises(InvalidTypeError, match=r"floating or complex dtype.*got torch\.int32"):
        run.scaler.unscale_(run.optimizer)
    assert (run.parameter.grad.tolist(), integers.grad.tolist()) == ([8.0, 8.0], [8, 8])


@pytest.mark.parametrize("is_recording", [True, False], ids=["recording", "not recording"])
def test_autograd_does_not_see_the_unscaling_and_records_as_before(is_recording: bool):
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
def test_an_optimizer_without_gradients_this_time_is_an_error_and_the_other_decides(variant: str, explicit: bool):
    # torch's steps a fused one.
    scaler = GradScaler("cpu", init_scale=4.0)
    empty, full = (Small(scaler, variant, size=1) for _ in range(2))
    full.put(math.inf)
    if explicit:
        scaler.unscale_(empty.optimizer)
    with pytest.raises(CallOrderError, match="none of whose parameters has a gradient"):
        scaler.step(empty.optimizer)
    full.step()
    assert scaler.get_scale() == 2.0
    assert [run.report.reason for run in (empty, full)] == ["no gradients", "overflow"]
    assert not hasattr(empty.optimizer, "found_inf")
    empty.iterate(1.0)
    assert empty.held == [[-1.0]]


@explicit
@pytest.mark.parametrize("shared", ["parameter", "gradient"])
def test_what_two_parameters_share_is_unscaled_twice_by_torch_and_once_by_ours(shared: str, explicit: bool):
    for run, expected in zip(pair(count=2), (1.0, 4.0), strict=True):
        run.put(*[torch.full((2,), 16.0)] * 2)
        if shared == "gradient":
            run.parameters[1].grad = run.parameter.grad
        else:
            run.optimizer.param_groups[0]["params"][1] = run.parameter
        run.step(explicit=explicit)
        assert run.parameter.grad.tolist() == [expected] * 2


def test_a_gradient_that_two_parameters_come_to_share_is_unscaled_once():
    _, run = pair(count=2)
    for is_shared in (False, True):
        run.put(16.0)
        if is_shared:
            run.parameters[1].grad = run.parameter.grad
        run.step()
        assert [parameter.grad.tolist() for parameter in run.parameters] == [[4.0] * 2] * 2


def test_a_parameter_that_takes_the_place_of_another_in_its_list_is_noticed():
    _, run = pair(count=2, size=1)
    (group,) = run.optimizer.param_groups
    del group["params"][1:]
    seen = []
    for chosen in run.parameters:
        group["params"][0] = chosen
        run.put(4.0)
        run.step()
        seen.append([parameter.grad.item() for parameter in run.parameters])
    assert seen == [[1.0, 4.0], [4.0, 1.0]]


class Holding:
    """An optimizer with whatever it is given as ``param_groups``."""

    def __init__(self, param_groups):
        self.param_groups = param_groups

    def step(self):
        """Do nothing."""


@pytest.mark.parametrize("bad", ["weights", 3, None, ("name", 1.0)], ids=["text", "int", "none", "named"])
@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_a_parameter_that_is_no_tensor_is_an_assertion_at_torchs_and_named_at_ours(bad, call: str):
    for run, error in zip(pair(), (AssertionError, InvalidTypeError), strict=True):
        run.put(1.0)
        # torch 2.6 says nothing.
        said = None if error is AssertionError else f"got {type(bad).__name__}"
        with pytest.raises(error, match=said) as caught:
            getattr(run.scaler, call)(Holding([{"params": [run.parameter, bad]}]))
        assert run.parameter.grad.tolist() == [1.0, 1.0]
    assert repr(bad) in str(caught.value)
    assert "Holding" in str(caught.value)


@pytest.mark.parametrize("wrong", [*map(Holding, [None, 3, [3], [{}], [{"params": 3}]]), object()])
def test_what_has_no_parameters_is_an_error_that_says_so(wrong):
    _, run = pair()
    run.put(1.0)
    with pytest.raises(InvalidTypeError, match="param_groups"):
        run.scaler.unscale_(wrong)


# Layouts.


def run_with(make, gradient, scale: float = 4.0, optimizer="SGD", **options) -> Small:
    """Return a run of a parameter like this gradient, which is its scaled one, at some scale."""
    run = Small(make("cpu", init_scale=scale, **options), optimizer, dtypes=[str(gradient.dtype).partition(".")[2]])
    run.parameter.data = torch.zeros(gradient.shape, dtype=gradient.dtype)
    run.put(gradient)
    return run


@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
@pytest.mark.parametrize(("dtype", "bad"), [("float32", False), ("float32", True), ("complex64", False)])
def test_compressed_gradients_which_torch_refuses_are_unscaled(layout: str, dtype: str, bad: bool):
    dense = torch.eye(4, dtype=getattr(torch, dtype)).mul(4.0)
    compressed = getattr(dense, f"to_sparse_{layout}")(*[(2, 2)] * layout.startswith("bs"))
    parameter = torch.nn.Parameter(compressed.clone())
    if bad:
        compressed.values().view(-1)[0] = math.inf
    parameter.grad = compressed
    run = Small(GradScaler("cpu", init_scale=4.0), lambda _: Holding([{"params": [parameter]}]))
    run.put(None)
    run.step()
    expected = torch.eye(4, dtype=dense.dtype)
    expected[0, 0] = math.inf if bad else 1.0
    assert parameter.grad is compressed
    assert torch.equal(compressed.to_dense(), expected)
    assert run.report.skipped is bad


def duplicates(value: float, dtype=torch.float32):
    """Return a sparse gradient that has a value twice at one place."""
    return torch.sparse_coo_tensor([[1, 1, 2]], torch.tensor([value, value, 4.0], dtype=dtype), (4,))


@explicit
def test_float32_duplicates_are_judged_by_their_sum(explicit: bool):
    run = run_with(GradScaler, duplicates(3e38), 1.0)
    run.step(explicit=explicit)
    assert (run.held, run.scaler.get_scale(), run.report.nonfinite) == ([[0.0] * 4], 0.5, 1)
    # One that overflows only before it is divided is none.
    run = run_with(GradScaler, duplicates(3e38))
    run.step(explicit=explicit)
    assert run.parameter[1].item() == pytest.approx(-1.5e38)


@pytest.mark.parametrize(("value", "weights"), [(60000.0, [0.0] * 4), (20000.0, [0.0, -10000.0, -1.0, 0.0])])
def test_float16_duplicates_are_added_before_they_are_judged(value: float, weights: list[float]):
    run = run_with(GradScaler, duplicates(value, torch.float16), allow_fp16_grads=True)
    run.step(explicit=True)
    assert run.parameter.grad.is_coalesced()
    assert (run.held, run.report.skipped) == ([weights], not any(weights))


def test_gradients_that_overlap_themselves_are_refused():
    run = run_with(GradScaler, torch.full((4,), 16.0).as_strided((3, 2), (1, 1)))
    with pytest.raises(InvalidValueError, match="overlaps itself"):
        run.scaler.unscale_(run.optimizer)
    with pytest.raises(GradscaleError):
        run.scaler.step(run.optimizer)
    assert run.parameter.eq(0).all()


def test_after_gradients_that_were_unscaled_in_part_no_step_is_made():
    run = Small(GradScaler("cpu", init_scale=4.0), dtypes=["float64", "float32"])
    # Gradients are looked at thoroughly when they are met first, before any is unscaled.
    run.put(0.0, None)
    run.step()
    run.put(16.0, torch.full((1,), 16.0).expand(2))
    with pytest.raises(InvalidValueError, match="overlaps itself"):
        run.scaler.unscale_(run.optimizer)
    run.parameters[1].grad = torch.full((2,), 16.0)
    # A look at the verdict makes none.
    assert run.scaler._per_optimizer_states[id(run.optimizer)]["found_inf_per_device"] == {}
    scaler = run.scaler
    for call in (scaler.step, scaler.unscale_, scaler._check_inf_per_device, lambda _: scaler.update()):
        with pytest.raises(CallOrderError, match="could not be unscaled completely"):
            call(run.optimizer)
    assert run.held == [[0.0, 0.0]] * 2
    scaler.load_state_dict(scaler.state_dict())


@explicit
def test_ctrl_c_in_a_look_at_gradients_changes_nothing(explicit: bool, monkeypatch: pytest.MonkeyPatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    run = Small(GradScaler("cpu"))
    run.give(1.0)
    if explicit:
        run.scaler.unscale_(run.optimizer)
    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.scaler._check_inf_per_device(run.optimizer)
    monkeypatch.undo()
    run.step()
    assert run.held == [[-1.0, -1.0]]
