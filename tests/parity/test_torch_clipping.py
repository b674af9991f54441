"""unscale_(max_norm=) against unscale_ and torch.nn.utils.clip_grad_norm_, and against float64 where these fail."""

from __future__ import annotations

import importlib
import math
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from axes import require
from axes_torch import GradScaler, TorchScaler, torch
from optimizers import Tree
from small_torch import Small, assert_same

import gradscale
from gradscale import InvalidValueError, StaticScale
from gradscale.testing import ThreadCollectives, run_ranks

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
]

TOLERANCE = 1e-5
SHAPES = [(3,), (), (5, 7), (0,), (130, 130), (20000,)]
# Of each kind, below and above the norm of the gradients, which is about 192.
NORMS = [0.5, 100.0, 150.0, 1e4, 0.0, math.inf]
SINGLES = ["float32", "float64", "bfloat16"]
enabled_or_not = pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])


def model(scaler, dtypes: Sequence[str], factor: float = 1.0, optimizer: str = "SGD", lr: float = 1.0) -> Small:
    """Return parameters of many shapes with scaled random gradients."""
    run = Small(scaler, optimizer, dtypes=[dtypes[index % len(dtypes)] for index in range(len(SHAPES))], lr=lr)
    generator = torch.Generator().manual_seed(0)
    scale, gradients = scaler.scale(torch.ones(())).item(), []
    for shape, parameter in zip(SHAPES, run.parameters, strict=True):
        parameter.data = torch.zeros(shape, dtype=parameter.dtype)
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * factor * scale
        gradients.append(values.to(parameter.dtype))
    run.put(*gradients)
    return run


def clip(run: Small, max_norm: float):
    """Unscale and clip: in two passes with torch's scaler, in one with ours."""
    if isinstance(run.scaler, GradScaler):
        norm = run.scaler.unscale_(run.optimizer, max_norm=max_norm)
        assert (norm.dtype, norm.shape, norm.requires_grad) == (torch.float32, (), False)
        return norm
    run.scaler.unscale_(run.optimizer)
    return torch.nn.utils.clip_grad_norm_(run.parameters, max_norm)


def finish(run: Small):
    """Step, and update."""
    run.scaler.step(run.optimizer)
    run.scaler.update()


def clipped_in_float64(gradients: list[Any], scale: float, max_norm: float):
    """Return the norm and the clipped gradients, in float64."""
    wide = [gradient.double() / scale for gradient in gradients]
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in wide))
    factor = min(1.0, max_norm / (norm + 1e-6))
    return norm, [gradient * factor for gradient in wide]


def assert_close(one, other, tolerance: float = TOLERANCE):
    """Assert that two tensors differ by little, relative to the largest element."""
    exact = other.detach().double()
    allowed = tolerance * float(exact.abs().max()) if exact.numel() else 0.0
    torch.testing.assert_close(one.detach().double(), exact, rtol=0.0, atol=allowed)


def assert_near(one, other, tolerance: float = TOLERANCE):
    """Assert that the norms, the gradients and the parameters of two runs, with their norms, are nearly the same."""
    assert one[1].item() == pytest.approx(other[1].item(), rel=tolerance)
    for mine, its in zip(one[0].parameters, other[0].parameters, strict=True):
        assert_close(mine.grad, its.grad, tolerance)
        assert_close(mine, its, tolerance)


@pytest.mark.parametrize("max_norm", NORMS)
@pytest.mark.parametrize("scale", [65536.0, 1000.0, 1.0, 0.1, None])
@pytest.mark.parametrize(
    ("dtypes", "factor"),
    [
        *[(("float32",), 1.0), (("float64",), 1.0), (("float32", "float64"), 1.0), (("bfloat16",), 1.0)],
        # What torch adds to the norm is as large as the norm of these.
        (("float32",), 2e-8),
    ],
    ids=str,
)
def test_norm_and_gradients_are_torchs(dtypes: tuple[str, ...], scale: float | None, max_norm: float, factor: float):
    # Without a scale the scaler is disabled.
    seen = []
    for make in (TorchScaler, GradScaler):
        run = model(make("cpu", init_scale=scale or 1.0, enabled=scale is not None), dtypes, factor)
        seen.append((run, clip(run, max_norm * factor)))
        finish(run)
    # Torch rounds the norm to bfloat16.
    assert_near(*seen, tolerance=2.0**-7 if dtypes == ("bfloat16",) else TOLERANCE)
    if max_norm == math.inf:
        # Nothing is clipped, so nothing is rounded otherwise.
        assert_same(*[[each.grad for each in run.parameters] for run, _ in seen])


@pytest.mark.parametrize("max_norm", [0.5, 150.0, 1e4, 0.0, math.inf])
@pytest.mark.parametrize(
    "dtypes", [("bfloat16",), ("float16",), ("bfloat16", "float32"), ("float16", "float32", "float64")], ids="-".join
)
def test_half_gradients_are_clipped_nearer_to_the_truth_than_at_torchs(dtypes: tuple[str, ...], max_norm: float):
    scale = 64.0
    run = model(GradScaler("cpu", init_scale=scale, allow_fp16_grads=True), dtypes)
    norm_wanted, wanted = clipped_in_float64([each.grad for each in run.parameters], scale, max_norm)
    norm = clip(run, max_norm)
    assert norm.item() == pytest.approx(norm_wanted, rel=TOLERANCE)
    for parameter, exact in zip(run.parameters, wanted, strict=True):
        # One rounding to the stored dtype, or to its smallest subnormal.
        unit = torch.finfo(parameter.dtype)
        allowed = exact.abs() * max(unit.eps / 2, TOLERANCE) * 1.01 + unit.smallest_normal * unit.eps
        assert ((parameter.grad.double() - exact).abs() <= allowed).all()
    finish(run)
    assert run.report.reason == "stepped"


def test_float16_gradients_are_clipped_where_torch_and_optax_make_zeros_of_them():
    """Their norm, 109,545, is above the largest float16; the factor is not."""
    jnp, optax = require("jax").numpy, require("optax")
    values = np.full(30_000, 200.0, np.float16)
    norm_wanted = 200.0 * math.sqrt(10 * values.size)
    wanted = np.full_like(values, 200.0 / norm_wanted)

    def tensors() -> Small:
        run = Small(
            GradScaler("cpu", policy=StaticScale(1.0), allow_fp16_grads=True), dtypes=["float16"] * 10, size=values.size
        )
        run.put(*[torch.from_numpy(values.copy()) for _ in run.parameters])
        return run

    run = tensors()
    assert torch.nn.utils.clip_grad_norm_(run.parameters, 1.0).item() == math.inf
    assert not any(parameter.grad.any() for parameter in run.parameters)
    run = tensors()
    assert run.scaler.unscale_(run.optimizer, max_norm=1.0).item() == pytest.approx(norm_wanted)
    assert all((parameter.grad.numpy() == wanted).all() for parameter in run.parameters)

    arrays = [jnp.asarray(values) for _ in range(10)]
    clip_by_norm = optax.clip_by_global_norm(1.0)
    assert not any(array.any() for array in clip_by_norm.update(arrays, clip_by_norm.init(arrays))[0])
    optimizer, scaler = Tree(arrays), gradscale.GradScaler(policy=StaticScale(1.0))
    scaler.scale(jnp.ones(()))
    assert float(scaler.unscale_(optimizer, max_norm=1.0)) == pytest.approx(norm_wanted)
    for array in optimizer.grads:
        np.testing.assert_array_max_ulp(np.asarray(array), wanted)
    tx = importlib.import_module("gradscale_jax").scaled(clip_by_norm, StaticScale(1.0), dtype=jnp.float32)
    for array in tx.update(arrays, tx.init(arrays))[0]:
        np.testing.assert_allclose(np.asarray(array), 200.0 / norm_wanted, rtol=TOLERANCE)


@pytest.mark.parametrize("max_norm", [1.0, 1e30], ids=str)
@pytest.mark.parametrize(
    ("dtype", "factor", "scale"),
    [
        *[("float32", 1e20, 65536.0), ("float32", 1e15, 65536.0), ("float32", 1e30, 1.0)],
        ("float32", 1.0, 2.0**-83),
        *[("float64", 1e30, 65536.0), ("float64", 1e36, 65536.0), ("float64", 1e200, 65536.0)],
        ("bfloat16", 1e30, 65536.0),
    ],
    ids=str,
)
def test_norms_whose_squares_float32_does_not_hold_do_not_wipe_out_the_gradients(
    dtype: str, factor: float, scale: float, max_norm: float
):
    run = model(GradScaler("cpu", init_scale=scale), [dtype], factor)
    wide = [parameter.grad.double() / scale for parameter in run.parameters]
    assert all(gradient.isfinite().all() for gradient in wide)
    largest = max(float(gradient.abs().max()) for gradient in wide if gradient.numel())
    norm_wanted = largest * math.sqrt(sum(float((gradient / largest).square().sum()) for gradient in wide))
    norm = clip(run, max_norm)
    clipped = [parameter.grad.clone() for parameter in run.parameters]
    finish(run)
    if norm_wanted * scale > 3e38 and run.report.skipped:
        # The factor is too small for float32: skipping is fine, and going on with other gradients is not.
        return
    assert not run.report.skipped
    assert norm.item() == (pytest.approx(norm_wanted, rel=TOLERANCE) if norm_wanted < 3e38 else math.inf)
    allowed = TOLERANCE if dtype != "bfloat16" else 2.0**-8
    for gradient, exact in zip(clipped, wide, strict=True):
        assert_close(gradient, exact * min(1.0, max_norm / norm_wanted), allowed)


@pytest.mark.parametrize("variant", ["SGD", "SGD-fused"])
@pytest.mark.parametrize("max_norm", [1.0, 0.0, math.inf])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", SINGLES)
def test_a_step_with_gradients_that_are_not_finite_is_skipped(dtype: str, bad: float, max_norm: float, variant: str):
    norms = []
    for make in (TorchScaler, GradScaler):
        run = model(make("cpu"), [dtype], optimizer=variant)
        run.parameters[2].grad[1, 1] = bad
        norms.append(clip(run, max_norm).item())
        finish(run)
        assert run.scaler.get_scale() == 32768.0
        assert not any(parameter.detach().any() for parameter in run.parameters)
    assert (run.report.skipped, run.report.nonfinite) == (True, 1)
    # inf for an infinite gradient, NaN for a NaN.
    assert_same(*norms)


@pytest.mark.parametrize("max_norm", [1.0, math.inf])
def test_gradients_that_overflow_when_divided_are_skipped_with_clipping_too(max_norm: float):
    run = Small(GradScaler("cpu", init_scale=2.0**-10))
    run.put(torch.tensor([3e37, -4e37]))
    run.step(max_norm=max_norm)
    assert (run.parameter.tolist(), run.report.skipped, run.scaler.get_scale()) == ([0.0, 0.0], True, 2.0**-11)


@enabled_or_not
def test_an_optimizer_without_gradients_has_the_norm_zero(enabled: bool):
    run = Small(GradScaler("cpu", enabled=enabled))
    run.put(None)
    assert clip(run, 1.0).item() == 0.0
    # A step without gradients is torch's error, with a norm of them or without.
    with pytest.raises(AssertionError, match="none of whose") if enabled else nullcontext():
        run.scaler.step(run.optimizer)
    assert run.report.skipped is enabled


@pytest.mark.parametrize("kind", ["transposed", "strided", "complex", "coo"])
def test_gradients_of_other_layouts_are_clipped_as_dense_ones(kind: str):
    dense = torch.arange(1.0, 13.0).reshape(4, 3)
    if kind == "complex":
        dense = torch.complex(dense, -dense)
    stored = {
        "transposed": lambda: (dense * 8.0).t().contiguous().t(),
        "strided": lambda: torch.zeros(8, 6)[::2, ::2].copy_(dense * 8.0),
        "complex": lambda: dense * 8.0,
        "coo": lambda: (dense * 8.0).to_sparse(),
    }[kind]()
    run = Small(GradScaler("cpu", init_scale=8.0), dtypes=[str(dense.dtype).partition(".")[2]])
    run.parameter.data = torch.zeros_like(dense)
    run.put(stored)
    expected = torch.linalg.vector_norm(dense).item()
    assert clip(run, 2.0).item() == pytest.approx(expected, rel=TOLERANCE)
    gradient = run.parameter.grad.to_dense() if kind == "coo" else run.parameter.grad
    torch.testing.assert_close(gradient, dense * (2.0 / expected), rtol=TOLERANCE, atol=0)


def test_duplicates_have_no_norm_and_are_refused_before_anything_is_touched():
    run = Small(GradScaler("cpu", init_scale=8.0), size=4)
    run.put(torch.sparse_coo_tensor([[1, 1]], [8.0, 16.0], (4,)))
    with pytest.raises(InvalidValueError, match="coalesce"):
        clip(run, 1.0)
    assert run.parameter.grad._values().tolist() == [8.0, 16.0]
    run.parameter.grad = run.parameter.grad.coalesce()
    assert clip(run, 1.0).item() == 3.0
    finish(run)
    assert run.parameter.tolist() == pytest.approx([0.0, -1.0, 0.0, 0.0], rel=TOLERANCE)


def test_plain_gradients_over_a_group_are_clipped_as_the_refusal_says():
    def rank(group: ThreadCollectives) -> list[list[float]]:
        run = Small(GradScaler("cpu", group=group), size=1)
        run.give(3.0)
        with pytest.raises(InvalidValueError, match=r"Call unscale_\(optimizer\), and then"):
            run.scaler.unscale_(run.optimizer, max_norm=1.0)
        run.scaler.unscale_(run.optimizer)
        torch.nn.utils.clip_grad_norm_(run.parameters, 1.0)
        finish(run)
        return [[round(value, 5) for value in values] for values in run.held]

    assert run_ranks(2, rank) == [[[-1.0]], [[-1.0]]]


class Mesh:
    """What looks to the adapter like a mesh of threads, and like the group over its ranks."""

    def __init__(self, place: int, held: list[Any], meeting: threading.Barrier):
        self.mesh = torch.arange(len(held))
        self._place, self._held, self._meeting = place, held, meeting

    def get_coordinate(self) -> list[int]:
        return [self._place]

    def rank(self) -> int:
        return self._place

    def size(self) -> int:
        return len(self._held)

    def allreduce(self, tensors: list[Any], options):
        self._held[self._place] = tensors[0].clone()
        self._meeting.wait(20.0)
        gathered = torch.stack(self._held)
        self._meeting.wait(20.0)
        tensors[0].copy_(gathered.sum(0) if options.reduceOp == torch.distributed.ReduceOp.SUM else gathered.amax(0))
        return SimpleNamespace(wait=lambda: None)


def clipped_on(values: tuple[float, float], placement) -> list[tuple[float, int, int]]:
    """Return on two ranks the norm of DTensors that hold these values, and how many are not finite."""
    held, meeting = [None] * 2, threading.Barrier(2)

    def rank(group: ThreadCollectives) -> tuple[float, int, int]:
        run = Small(GradScaler("cpu", init_scale=0.5), size=1)
        run.give(values[group.rank])
        run.parameter.device_mesh = run.parameter.grad.device_mesh = Mesh(group.rank, held, meeting)
        run.parameter.grad.placements = (placement,)
        norm = clip(run, 100.0).item()
        finish(run)
        return norm, run.report.nonfinite, run.report.local_nonfinite

    return run_ranks(2, rank)


def test_the_norm_of_dtensors_is_that_of_all_parts_and_of_one_copy():
    from torch.distributed.tensor import Replicate, Shard

    assert clipped_on((3.0, 4.0), Shard(0)) == [(5.0, 0, 0)] * 2
    # Which differ here to tell which of them counts.
    assert clipped_on((3.0, 4.0), Replicate()) == [(3.0, 0, 0)] * 2


# The last two are finite, and their norm is not one of float32.
@pytest.mark.parametrize("values", [(math.inf, 4.0), (3.0, math.inf), (1.7e38, 3e38)], ids=str)
def test_of_the_parts_of_a_norm_the_rank_is_told_whose_is_too_large(values: tuple[float, float]):
    from torch.distributed.tensor import Shard

    assert clipped_on(values, Shard(0)) == [(math.inf, 1, int(value > 2e38)) for value in values]
