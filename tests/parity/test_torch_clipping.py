"""unscale_(max_norm=) against unscale_ and torch.nn.utils.clip_grad_norm_, and against float64 where these fail."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from torch_runs import assert_same

from gradscale import CallOrderError, GradscaleError, InvalidValueError
from gradscale.testing import ThreadCollectives, run_ranks

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
]

TOLERANCE = 1e-5
SHAPES = [(3,), (), (5, 7), (0,), (130, 130), (20000,)]
# Of each kind, below and above the norm of the gradients, which is about 192.
NORMS = [0.5, 100.0, 150.0, 1e4, 0.0, math.inf]


def model(torch: Any, dtypes: Sequence[str], scale: float, factor: float = 1.0) -> tuple[list[Any], Any]:
    """Return parameters with scaled random gradients, and their optimizer."""
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for index, shape in enumerate(SHAPES):
        dtype = getattr(torch, dtypes[index % len(dtypes)])
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = (torch.randn(shape, generator=generator, dtype=torch.float64) * factor * scale).to(dtype)
        parameters.append(parameter)
    return parameters, torch.optim.SGD(parameters, lr=1.0)


def clipped_in_float64(gradients: list[Any], scale: float, max_norm: float) -> tuple[float, list[Any]]:
    """Return the norm and the clipped gradients, in float64."""
    wide = [gradient.double() / scale for gradient in gradients]
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in wide))
    factor = min(1.0, max_norm / (norm + 1e-6))
    return norm, [gradient * factor for gradient in wide]


def relative(one: Any, other: Any) -> float:
    """Return the largest difference of two tensors relative to the largest element."""
    if other.numel() == 0 or not other.any():
        return float(one.double().abs().max()) if one.numel() else 0.0
    return float((one.double() - other.double()).abs().max() / other.double().abs().max())


@pytest.mark.parametrize("max_norm", NORMS)
@pytest.mark.parametrize("scale", [65536.0, 1000.0, 1.0, 0.1])
@pytest.mark.parametrize("dtypes", [("float32",), ("float64",), ("float32", "float64")], ids="-".join)
def test_norm_and_gradients_are_torchs(
    torch: Any, ours: Any, theirs: Any, dtypes: tuple[str, ...], scale: float, max_norm: float
) -> None:
    results = []
    for make in (theirs, ours):
        scaler = make("cpu", init_scale=scale)
        scaler.scale(torch.ones(()))
        parameters, optimizer = model(torch, dtypes, scale)
        if make is theirs:
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        else:
            norm = scaler.unscale_(optimizer, max_norm=max_norm)
            assert (norm.dtype, norm.shape, norm.requires_grad) == (torch.float32, (), False)
        results.append((norm.item(), parameters))
        scaler.step(optimizer)
        scaler.update()
    (expected_norm, expected), (norm, parameters) = results
    assert norm == pytest.approx(expected_norm, rel=TOLERANCE)
    for one, other in zip(parameters, expected, strict=True):
        assert relative(one.grad, other.grad) <= TOLERANCE
        assert relative(one.detach(), other.detach()) <= TOLERANCE
    if max_norm == math.inf:
        # Nothing is clipped, so nothing is rounded otherwise.
        assert_same([each.grad for each in parameters], [each.grad for each in expected])


@pytest.mark.parametrize("max_norm", [1e-6, 5.5e-6, 1.0])
@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
def test_gradients_of_nearly_no_norm_are_clipped_as_by_torch(
    torch: Any, ours: Any, enabled: bool, max_norm: float
) -> None:
    """What torch adds to the norm is as large as these."""
    gradient = torch.tensor([3e-6, -4e-6])
    one, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    scaler = ours("cpu", init_scale=1024.0, enabled=enabled)
    scaler.scale(torch.ones(()))
    one.grad, other.grad = gradient * scaler.get_scale(), gradient.clone()
    norm = scaler.unscale_(torch.optim.SGD([one], lr=1.0), max_norm=max_norm)
    assert norm.item() == pytest.approx(torch.nn.utils.clip_grad_norm_(other, max_norm).item(), rel=TOLERANCE)
    assert relative(one.grad, other.grad) <= TOLERANCE


def test_a_comparison_with_other_gradients_fails(torch: Any) -> None:
    right = torch.tensor([1.0, 2.0])
    assert relative(right * (1 + 3e-5), right) > TOLERANCE
    assert relative(right, right) == 0.0
    assert relative(right, right * 0) > TOLERANCE


@pytest.mark.parametrize("max_norm", [0.5, 150.0, 1e4, 0.0, math.inf])
@pytest.mark.parametrize(
    "dtypes",
    [("bfloat16",), ("float16",), ("bfloat16", "float32"), ("float16", "float32", "float64")],
    ids="-".join,
)
def test_half_gradients_are_clipped_nearer_to_the_truth_than_at_torchs(
    torch: Any, ours: Any, dtypes: tuple[str, ...], max_norm: float
) -> None:
    scale = 64.0
    scaler = ours("cpu", init_scale=scale, allow_fp16_grads=True)
    scaler.scale(torch.ones(()))
    parameters, optimizer = model(torch, dtypes, scale)
    norm_wanted, wanted = clipped_in_float64([each.grad for each in parameters], scale, max_norm)
    norm = scaler.unscale_(optimizer, max_norm=max_norm)
    assert norm.dtype is torch.float32
    assert norm.item() == pytest.approx(norm_wanted, rel=TOLERANCE)
    for parameter, exact in zip(parameters, wanted, strict=True):
        # One rounding to the stored dtype, or to its smallest subnormal.
        unit = torch.finfo(parameter.dtype)
        allowed = exact.abs() * max(unit.eps / 2, TOLERANCE) * 1.01 + unit.smallest_normal * unit.eps
        assert ((parameter.grad.double() - exact).abs() <= allowed).all()
    # Torch rounds the norm to bfloat16.
    if dtypes == ("bfloat16",):
        others, _ = model(torch, dtypes, scale)
        for other in others:
            other.grad.div_(scale)
        theirs = torch.nn.utils.clip_grad_norm_(others, max_norm)
        assert theirs.dtype is torch.bfloat16
        assert abs(theirs.item() - norm_wanted) >= abs(norm.item() - norm_wanted)


@pytest.mark.parametrize("max_norm", [1.0, 1e30], ids=str)
@pytest.mark.parametrize(
    ("dtype", "factor", "scale"),
    [
        ("float32", 1e20, 65536.0),
        ("float32", 1e15, 65536.0),
        ("float32", 1e30, 1.0),
        ("float64", 1e30, 65536.0),
        ("float64", 1e36, 65536.0),
        ("float64", 1e200, 65536.0),
        ("bfloat16", 1e30, 65536.0),
    ],
    ids=str,
)
def test_norms_whose_squares_overflow_do_not_wipe_out_the_gradients(
    torch: Any, ours: Any, dtype: str, factor: float, scale: float, max_norm: float
) -> None:
    scaler = ours("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))
    parameters, optimizer = model(torch, [dtype], scale, factor)
    gradients = [each.grad.clone() for each in parameters]
    assert all(gradient.isfinite().all() for gradient in gradients)
    wide = [gradient.double() / scale for gradient in gradients]
    largest = max(float(gradient.abs().max()) for gradient in wide if gradient.numel())
    norm_wanted = largest * math.sqrt(sum(float((gradient / largest).square().sum()) for gradient in wide))
    norm = scaler.unscale_(optimizer, max_norm=max_norm)
    clipped = [parameter.grad.clone() for parameter in parameters]
    scaler.step(optimizer)
    if norm_wanted * scale > 3e38 and scaler.last_step(optimizer).skipped:
        # The factor is too small for float32: skipping is fine, and going on with other gradients is not.
        return
    assert not scaler.last_step(optimizer).skipped
    assert norm.item() == (pytest.approx(norm_wanted, rel=TOLERANCE) if norm_wanted < 3e38 else math.inf)
    allowed = TOLERANCE if dtype != "bfloat16" else 2.0**-8
    for gradient, exact in zip(clipped, wide, strict=True):
        assert relative(gradient, exact * min(1.0, max_norm / norm_wanted)) <= allowed


def test_torch_wipes_out_gradients_whose_squares_overflow(torch: Any, theirs: Any) -> None:
    scaler = theirs("cpu")
    scaler.scale(torch.ones(()))
    parameters, optimizer = model(torch, ["float32"], 65536.0, 1e20)
    scaler.unscale_(optimizer)
    assert torch.nn.utils.clip_grad_norm_(parameters, 1.0).item() == math.inf
    assert not any(parameter.grad.any() for parameter in parameters)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("max_norm", [1.0, 0.0, math.inf])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_step_with_gradients_that_are_not_finite_is_skipped(
    torch: Any, ours: Any, theirs: Any, dtype: str, bad: float, max_norm: float, fused: bool
) -> None:
    norms = []
    for make in (theirs, ours):
        scaler = make("cpu")
        scaler.scale(torch.ones(()))
        parameters, _ = model(torch, [dtype], 65536.0)
        optimizer = torch.optim.SGD(parameters, lr=1.0, fused=fused)
        parameters[2].grad[1, 1] = bad
        if make is theirs:
            scaler.unscale_(optimizer)
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, max_norm).item())
        else:
            norms.append(scaler.unscale_(optimizer, max_norm=max_norm).item())
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 32768.0
        assert not any(parameter.detach().any() for parameter in parameters)
    assert scaler.last_step(optimizer).skipped
    # inf for an infinite gradient, NaN for a NaN.
    assert_same(*norms)


@pytest.mark.parametrize("max_norm", [1.0, math.inf])
def test_gradients_that_overflow_when_divided_are_skipped_or_clipped_right_and_never_wiped_out(
    torch: Any, ours: Any, max_norm: float
) -> None:
    scaler = ours("cpu", init_scale=2.0**-10)
    scaler.scale(torch.ones(()))
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.tensor([3e37, -4e37])
    scaler.unscale_(optimizer, max_norm=max_norm)
    scaler.step(optimizer)
    scaler.update()
    if scaler.last_step(optimizer).skipped:
        assert parameter.tolist() == [0.0, 0.0]
        assert scaler.get_scale() == 2.0**-11
    else:
        assert parameter.tolist() == pytest.approx([-0.6, 0.8])


@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
@pytest.mark.parametrize("max_norm", [-1.0, -math.inf, math.nan, "1", None, True, 1j, [1.0]], ids=repr)
def test_a_norm_that_is_none_is_refused_before_anything_is_touched(
    torch: Any, ours: Any, max_norm: Any, enabled: bool
) -> None:
    scaler = ours("cpu", init_scale=4.0, enabled=enabled)
    scaler.scale(torch.ones(()))
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.full((2,), 8.0)
    if max_norm is None:
        # Which asks for no clipping.
        assert scaler.unscale_(optimizer, max_norm=None) is None
        assert parameter.grad.tolist() == [2.0 if enabled else 8.0] * 2
        return
    with pytest.raises(GradscaleError, match="max_norm"):
        scaler.unscale_(optimizer, max_norm=max_norm)
    assert parameter.grad.tolist() == [8.0, 8.0]
    assert scaler.unscale_(optimizer) is None
    assert parameter.grad.tolist() == [2.0 if enabled else 8.0] * 2


@pytest.mark.parametrize("max_norm", NORMS)
@pytest.mark.parametrize("dtypes", [("float32",), ("float64",), ("float32", "float64"), ("bfloat16",)], ids="-".join)
def test_a_disabled_scaler_clips_too(torch: Any, ours: Any, dtypes: tuple[str, ...], max_norm: float) -> None:
    scaler = ours("cpu", enabled=False)
    parameters, optimizer = model(torch, dtypes, 1.0)
    others, _ = model(torch, dtypes, 1.0)
    norm = scaler.unscale_(optimizer, max_norm=max_norm)
    expected = torch.nn.utils.clip_grad_norm_(others, max_norm)
    tolerance = 2.0**-7 if dtypes == ("bfloat16",) else TOLERANCE
    assert norm.item() == pytest.approx(expected.item(), rel=tolerance)
    for one, other in zip(parameters, others, strict=True):
        assert relative(one.grad, other.grad) <= tolerance
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
def test_the_norm_is_a_float32_of_no_dimensions(torch: Any, ours: Any, enabled: bool, dtype: str) -> None:
    scaler = ours("cpu", init_scale=64.0, enabled=enabled)
    scaler.scale(torch.ones(()))
    parameters, optimizer = model(torch, [dtype], scaler.get_scale())
    gradients = [parameter.grad.clone() for parameter in parameters]
    norm = scaler.unscale_(optimizer, max_norm=1.0)
    assert (norm.dtype, norm.shape) == (torch.float32, ())
    wanted, _ = clipped_in_float64(gradients, scaler.get_scale(), 1.0)
    assert norm.item() == pytest.approx(wanted, rel=TOLERANCE)


@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
def test_an_optimizer_without_gradients_has_the_norm_zero(torch: Any, ours: Any, enabled: bool) -> None:
    scaler = ours("cpu", enabled=enabled)
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    norm = scaler.unscale_(optimizer, max_norm=1.0)
    assert (norm.item(), norm.dtype, norm.shape) == (0.0, torch.float32, ())
    # A step without gradients is torch's error, with a norm of them or without.
    with (
        nullcontext() if not enabled else pytest.raises(AssertionError, match="none of whose parameters has a gradient")
    ):
        scaler.step(optimizer)
    assert scaler.last_step(optimizer).skipped is enabled


@pytest.mark.parametrize("kind", ["transposed", "strided", "complex", "coo"])
def test_gradients_of_other_layouts_are_clipped_as_dense_ones(torch: Any, ours: Any, kind: str) -> None:
    scaler = ours("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    dense = torch.arange(1.0, 13.0).reshape(4, 3)
    if kind == "complex":
        dense = torch.complex(dense, -dense)
    room = torch.zeros(8, 6)
    room[::2, ::2] = dense.real
    stored = {
        "transposed": lambda: dense.t().contiguous().t(),
        "strided": lambda: room[::2, ::2],
        "complex": dense.clone,
        "coo": dense.to_sparse,
    }[kind]()
    parameter = torch.nn.Parameter(torch.zeros_like(dense))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = stored * 8.0 if kind != "strided" else stored.mul_(8.0)
    norm = scaler.unscale_(optimizer, max_norm=2.0)
    expected = torch.linalg.vector_norm(dense).item()
    assert norm.item() == pytest.approx(expected, rel=TOLERANCE)
    gradient = parameter.grad.to_dense() if kind == "coo" else parameter.grad
    torch.testing.assert_close(gradient, dense * (2.0 / expected), rtol=TOLERANCE, atol=0)


def test_duplicates_have_no_norm_and_are_refused_before_anything_is_touched(torch: Any, ours: Any) -> None:
    scaler = ours("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.sparse_coo_tensor([[1, 1]], [8.0, 16.0], (4,))
    with pytest.raises(InvalidValueError, match="coalesce"):
        scaler.unscale_(optimizer, max_norm=1.0)
    assert parameter.grad._values().tolist() == [8.0, 16.0]
    parameter.grad = parameter.grad.coalesce()
    assert scaler.unscale_(optimizer, max_norm=1.0).item() == 3.0
    scaler.step(optimizer)
    assert parameter.tolist() == pytest.approx([0.0, -1.0, 0.0, 0.0], rel=TOLERANCE)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_fused_optimizer_takes_the_clipped_gradients_as_they_are(torch: Any, ours: Any, name: str) -> None:
    results = []
    for fused in (False, True):
        scaler = ours("cpu")
        scaler.scale(torch.ones(()))
        parameters, _ = model(torch, ["float32"], 65536.0)
        optimizer = getattr(torch.optim, name)(parameters, lr=0.5, fused=fused)
        scaler.unscale_(optimizer, max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        results.append([parameter.detach() for parameter in parameters])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_clipping_obeys_the_order_of_calls_and_serves_one_call_only(torch: Any, ours: Any) -> None:
    scaler = ours("cpu", init_scale=4.0)
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    first, second = (torch.optim.SGD([parameter], lr=1.0) for parameter in parameters)
    with pytest.raises(CallOrderError):
        scaler.unscale_(first, max_norm=1.0)
    scaler.scale(torch.ones(()))
    for parameter in parameters:
        parameter.grad = torch.full((1,), 40.0)
    assert scaler.unscale_(first, max_norm=1.0).item() == 10.0
    with pytest.raises(CallOrderError, match="already"):
        scaler.unscale_(first, max_norm=1.0)
    scaler.step(first)
    # It is not clipped: the largest norm was said of the other.
    scaler.step(second)
    scaler.update()
    assert [parameter.item() for parameter in parameters] == pytest.approx([-1.0, -10.0], rel=TOLERANCE)


def test_plain_gradients_over_a_group_are_clipped_as_the_refusal_says(torch: Any) -> None:
    from gradscale_torch import GradScaler

    def rank(group: ThreadCollectives) -> list[float]:
        scaler, parameter = GradScaler("cpu", group=group), torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        parameter.grad = scaler.scale(torch.full((1,), 3.0))
        with pytest.raises(InvalidValueError, match=r"Call unscale_\(optimizer\), and then"):
            scaler.unscale_(optimizer, max_norm=1.0)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        scaler.step(optimizer)
        return [round(value, 5) for value in parameter.tolist()]

    assert run_ranks(2, rank) == [[-1.0], [-1.0]]
