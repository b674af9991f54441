"""Gradients of every dtype and layout through unscale_, clipping and steps: as in float64, also where torch's fail."""

from __future__ import annotations

import collections
import functools
import math
import random
from contextlib import nullcontext
from typing import Any

import pytest
from axes_torch import GradScaler, torch
from small_torch import KERNEL, LAYOUTS, Small, optimizer_of
from tiers import examples

from gradscale import CallOrderError, InvalidTypeError, InvalidValueError

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
]

explicit = pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale-step"])

# Relative, of a norm and of what it has clipped.
TOLERANCE = 1e-5
REALS = ["float32", "float64", "bfloat16", "float16"]
# The last is not joined with others for its norm.
SHAPES = [(4, 6), (3,), (), (0,), (130, 130)]
# Up to which powers of two gradients go; the squares of some overflow.
POWERS = {"float16": 12, "float64": 480, "complex128": 480}
SMALLEST_NORMAL = 2.0**-126
LARGEST = torch.finfo(torch.float32).max


class Holding:
    """An optimizer of whatever it is given as ``param_groups``, which makes no steps."""

    def __init__(self, param_groups):
        self.param_groups = param_groups

    def step(self):
        """Do nothing."""


def drawn(chance: random.Random, name: str, power: int, kind: str):
    """Return a random gradient for a kind of optimizer."""
    dtype, shape = getattr(torch, name), chance.choice(SHAPES)
    generator = torch.Generator().manual_seed(chance.getrandbits(32))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    dense = (torch.randn(shape, generator=generator, dtype=wide) * 2.0**power).to(dtype)
    if dtype.is_complex and chance.random() < 0.5:
        return dense.conj()
    if shape != (4, 6) or "fused" in kind:
        return dense
    if kind == "holding":
        layout = chance.choice(["csr", "csc", "bsr", "bsc"])
        return getattr(dense, f"to_sparse_{layout}")(*[(2, 2)] * layout.startswith("bs"))
    return LAYOUTS[chance.choice(list(LAYOUTS))](dense)


def values_of(gradient):
    """Return what a gradient stores, which may be written."""
    if gradient.layout == torch.strided:
        return gradient
    return gradient._values() if gradient.is_sparse else gradient.values().detach()


def exact(gradient):
    """Return a gradient as a dense one in float64, with the sums of duplicates that an optimizer sees."""
    gradient = gradient.detach().resolve_conj()
    wide = gradient.to(torch.complex128 if gradient.is_complex() else torch.float64).to_dense()
    # Those of float16 are summed before they are divided.
    return wide.half().double() if gradient.dtype is torch.float16 else wide


def norm_of(gradients) -> float:
    """Return the 2-norm of all, also where their squares overflow."""
    largest = [one.abs().max().item() for one in gradients if one.numel()]
    if not all(map(math.isfinite, largest)):
        return math.nan if any(map(math.isnan, largest)) else math.inf
    by = max(largest, default=0.0) or 1.0
    return by * math.sqrt(sum((one / by).abs().square().sum().item() for one in gradients))


class Case:
    """Random gradients of an optimizer, and what is to become of them by float64."""

    def __init__(self, seed: int):
        chance = random.Random(seed)
        choice, draw = chance.choice, chance.random
        self.is_enabled, self.kind = draw() < 0.9, choice(["SGD", "SGD", "SGD-foreach", "SGD-fused", "holding"])
        self.scale = choice([65536.0, 1000.0, 1.0, 0.75, 2.0**-10, 2.0**-83]) if self.is_enabled else 1.0
        names = [choice(REALS)] if draw() < 0.6 else REALS + ["complex64", "complex128"] * ("fused" not in self.kind)
        self.gradients = []
        for name in (choice(names) for _ in range(choice([1, 1, 2, 5]))):
            power = chance.randint(-60, POWERS.get(name, 120)) if draw() < 0.3 else round(math.log2(self.scale))
            self.gradients.append(drawn(chance, name, power, self.kind))
        filled = [one for one in map(values_of, self.gradients) if one.numel()]
        if self.is_enabled and filled and draw() < 0.2:
            target, bad = choice(filled), choice([math.inf, -math.inf, math.nan])
            target[(0,) * target.dim()] = complex(1.0, bad) if target.is_complex() else bad
        self.stored = [exact(one) for one in self.gradients]
        unscaled = [one / self.scale for one in self.stored]
        self.norm, self.factor, self.max_norm = norm_of(unscaled), 1.0, None
        self.has_duplicates = any(one.is_sparse and not one.is_coalesced() for one in self.gradients)
        if draw() < 0.5:
            self.max_norm = choice([0.0, 1.0, math.inf, self.norm / 2, self.norm * 2])
            # The norm is a float32, and an infinite one is an overflow.
            if self.norm < (LARGEST if self.is_enabled else math.inf):
                self.factor = min(1.0, self.max_norm / (self.norm + 1e-6))
            elif not self.norm < math.inf:
                self.max_norm = 1.0
        self.wanted = [one * self.factor for one in unscaled]
        # Whether the step clips by itself.
        self.is_later = self.max_norm is not None and draw() < 0.5
        self.is_explicit = not self.is_later and (self.max_norm is not None or draw() < 0.5)

    def skips(self) -> bool | None:
        """Return whether the step is skipped; None where it is a matter of rounding, or of squares in float64."""
        if self.max_norm is not None and 0.99 < self.norm / LARGEST < 1.01:
            return None
        is_overflowing = not self.norm < (math.inf if self.max_norm is None else LARGEST)
        for gradient, one in zip(self.gradients, self.wanted, strict=True):
            size = largest(one) / torch.finfo(gradient.dtype).max
            if 0.99 < size < 1.01:
                return None
            is_overflowing |= not size <= 1.0
        if self.max_norm and not is_overflowing:
            # The smallest factor that has all its bits in float32.
            size = self.factor / self.scale * 2.0**126
            if 0.99 < size < 1.01 or self.norm * self.scale > 1e150:
                return None
            is_overflowing = size < 1.0
        return self.is_enabled and is_overflowing

    def assert_close(self, index: int, found, sign: float = 1.0):
        """Assert that a gradient is what it is to be, but for its rounding and that of the factor."""
        unit, wanted = torch.finfo(self.gradients[index].dtype), sign * self.wanted[index]
        # The reciprocal of a power of two is exact.
        rounding = TOLERANCE if self.factor < 1.0 else 2.0**-24 * (math.frexp(self.scale)[0] != 0.5)
        relative = (unit.eps / 2 + rounding) * 1.01
        # Duplicates are rounded one by one.
        allowed = wanted.abs() * relative * (1 + self.has_duplicates) + 2 * unit.smallest_normal * unit.eps
        is_close = (exact(found) - wanted).abs() <= allowed
        assert is_close[wanted.abs() <= unit.max].all(), f"gradient {index}: {found} is not {wanted}"


def largest(one) -> float:
    """Return the largest magnitude; NaN if there is one."""
    return (torch.view_as_real(one) if one.is_complex() else one).abs().max().item() if one.numel() else 0.0


def check(case: Case) -> str:
    """Unscale, clip and step; return what has become of the step."""
    own_norm = case.max_norm if case.is_later else None
    scaler = GradScaler("cpu", init_scale=case.scale, enabled=case.is_enabled, allow_fp16_grads=True, max_norm=own_norm)
    parameters = [torch.nn.Parameter(torch.zeros_like(one)) for one in case.gradients]
    make = Holding if case.kind == "holding" else functools.partial(optimizer_of, case.kind)
    optimizer = make([{"params": parameters}])
    scaler.scale(torch.ones(()))
    for parameter, gradient in zip(parameters, case.gradients, strict=True):
        parameter.grad = gradient
    if case.is_explicit:
        norm = scaler.unscale_(optimizer, max_norm=case.max_norm)
        if case.max_norm is None:
            assert norm is None
        else:
            assert (norm.dtype, norm.shape, norm.requires_grad) == (torch.float32, (), False)
            wanted = math.inf if case.norm > LARGEST else case.norm
            assert norm.item() == pytest.approx(wanted, rel=TOLERANCE, nan_ok=True)
    scaler.step(optimizer)
    scaler.update()
    report, skips = scaler.last_step(optimizer), case.skips()
    if skips is None:
        return "unclear"
    assert (report.skipped, scaler.get_scale()) == (skips, case.scale / (1 + skips))
    if case.max_norm is not None and case.is_enabled:
        known = case.norm if 2.0**-126 <= case.norm <= LARGEST else 0.0 if case.norm < 1.0 else math.inf
        assert report.norm == pytest.approx(known, rel=TOLERANCE)
    else:
        assert report.norm is None
    # What is left of those that a kernel divides by itself is no result, and of clipped ones that nobody steps with.
    is_told = (case.is_explicit or "fused" not in case.kind) and not (skips and case.max_norm)
    for index, (parameter, gradient) in enumerate(zip(parameters, case.gradients, strict=True)):
        if is_told:
            assert gradient.is_sparse or parameter.grad is gradient
            case.assert_close(index, parameter.grad)
        if skips or case.kind == "holding":
            assert not values_of(parameter.detach()).any()
        elif "fused" not in case.kind or gradient.itemsize > 2:
            # torch's fused kernel of the CPU leaves most large half-precision parameters where they are.
            case.assert_close(index, parameter, -1.0)
    if skips and not case.max_norm:
        # A kernel that skips leaves finite gradients whose quotients are not, and so may a norm.
        found = sum(not values_of(parameter.grad).isfinite().all() for parameter in parameters)
        assert report.nonfinite == (found if is_told and case.max_norm is None else max(1, found))
    return report.reason


def test_random_gradients_are_unscaled_clipped_judged_and_stepped_with_as_in_float64():
    seen = collections.Counter()
    for seed in range(examples(2000)):
        case = Case(seed)
        try:
            seen[check(case)] += 1
        except AssertionError as difference:
            difference.add_note(f"seed {seed}: {case.kind}, scale {case.scale}, {case.max_norm=}, {case.is_explicit=}")
            raise
    assert min(seen["stepped"], seen["overflow"], seen["disabled"]) > sum(seen.values()) / 20


def test_a_factor_that_is_one_bit_too_large_is_found(monkeypatch: pytest.MonkeyPatch):
    def inexact(tensors, flag, factor):
        KERNEL(tensors, flag, factor * (1 + 2.0**-23))

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", inexact)
    with pytest.raises(AssertionError, match="gradient 0"):
        collections.deque(map(check, map(Case, range(50))), maxlen=0)


# Clipping.


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("indices", [[1, 1], [1, 2], [1]], ids=["duplicates", "not coalesced", "coalesced"])
@pytest.mark.parametrize(("enabled", "norm"), [(True, 5.0), (False, 40.0)], ids=["enabled", "disabled"])
def test_sparse_gradients_are_clipped_by_the_norm_of_their_sums(enabled, norm: float, indices: list[int], dtype: str):
    scaler = GradScaler("cpu", init_scale=8.0, enabled=enabled, allow_fp16_grads=True)
    run = Small(scaler, dtypes=[dtype], size=4)
    values = {(1, 1): [16.0, 24.0], (1, 2): [24.0, 32.0], (1,): [40.0]}[tuple(indices)]
    given = torch.sparse_coo_tensor([indices], values, (4,), dtype=run.parameter.dtype)
    run.put(given.coalesce() if len(indices) == 1 else given)
    assert run.scaler.unscale_(run.optimizer, max_norm=1.0).item() == norm
    run.scaler.step(run.optimizer)
    wanted = [0.0, -0.6, -0.8, 0.0] if indices == [1, 2] else [0.0, -1.0, 0.0, 0.0]
    assert run.parameter.tolist() == pytest.approx(wanted, rel=2.0**-8 if dtype == "bfloat16" else 2.0**-10)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_gradients_of_8_bits_are_clipped(name: str):
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=getattr(torch, name)))
    parameter.grad = torch.tensor([3.0, 4.0]).to(parameter.dtype)
    scaler = GradScaler("cpu", init_scale=1.0, allow_fp16_grads=True, max_norm=1.0)
    optimizer = Holding([{"params": [parameter]}])
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).norm == 5.0
    assert parameter.grad.float().tolist() == torch.tensor([0.6, 0.8]).to(parameter.dtype).float().tolist()


def test_a_gradient_that_overlaps_itself_later_is_refused_by_a_step_that_clips():
    run = Small(GradScaler("cpu", init_scale=4.0, max_norm=1.0), size=3)
    run.put(8.0)
    run.scaler.scale(torch.ones(()))
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.parameter.grad = overlapping()
    run.scaler.scale(torch.ones(()))
    with pytest.raises(InvalidValueError, match="overlaps itself"):
        run.scaler.step(run.optimizer)


def test_an_optimizer_that_unscales_by_asking_the_scaler_cannot_be_clipped_for():
    class Asking(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):  # noqa: ARG002
            raise AssertionError

    parameter = torch.nn.Parameter(torch.ones(2))
    scaler, optimizer = GradScaler("cpu", max_norm=1.0), Asking([parameter])
    scaler.scale(parameter.sum()).backward()
    with pytest.raises(InvalidValueError, match="max_norm= cannot clip for Asking"):
        scaler.step(optimizer)


# What torch refuses, or unscales wrongly.


def overlapping(shape: tuple[int, ...] = (3,), strides: tuple[int, ...] = (0,)):
    """Return a tensor whose elements share memory."""
    return torch.full((4,), 16.0).as_strided(shape, strides)


INTEGERS, HALF = (torch.zeros(2, dtype=dtype) for dtype in (torch.int32, torch.float16))
# A parameter beside the first one, its gradient, and what is said of them.
REFUSED: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "float16": (HALF, HALF + 8, InvalidValueError, r"Attempting to unscale FP16 gradients\."),
    "integers": (INTEGERS, INTEGERS + 8, InvalidTypeError, r"floating or complex dtype.*got torch\.int32"),
    "expanded": (torch.zeros(3), overlapping(), InvalidValueError, "overlaps itself"),
    "sliding": (torch.zeros(3, 2), overlapping((3, 2), (1, 1)), InvalidValueError, "overlaps itself"),
    "text": ("weights", None, InvalidTypeError, "got str: 'weights'"),
}


@explicit
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_unscaled_is_refused_before_anything_is_and_it_can_be_tried_again(name: str, explicit: bool):
    other, gradient, kind, said = REFUSED[name]
    run = Small(GradScaler("cpu", init_scale=4.0))
    run.put(8.0)
    if gradient is not None:
        other.grad = gradient
    optimizer = Holding([{"params": [run.parameter, other]}])
    call = run.scaler.unscale_ if explicit else run.scaler.step
    with pytest.raises(kind, match=said):
        call(optimizer)
    assert run.parameter.grad.tolist() == [8.0, 8.0]
    assert run.scaler._per_optimizer_states[id(optimizer)]["stage"].name == "READY"
    optimizer.param_groups[0]["params"].pop()
    call(optimizer)
    assert run.parameter.grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
@pytest.mark.parametrize("is_recording", [True, False], ids=["recording", "not recording"])
def test_autograd_does_not_see_the_unscaling_and_records_as_before(is_recording: bool, enabled: bool):
    run = Small(GradScaler("cpu", init_scale=4.0, enabled=enabled))
    weight = run.parameter
    # As after backward(create_graph=True).
    run.put((weight + 1) * 8.0)
    before = weight.grad.grad_fn
    with torch.set_grad_enabled(is_recording):
        norm = run.scaler.unscale_(run.optimizer, max_norm=1e9)
        assert torch.is_grad_enabled() is is_recording
    assert not norm.requires_grad
    assert weight.grad.tolist() == [2.0 if enabled else 8.0] * 2
    assert weight.grad.grad_fn is before


@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}], ids=["step", "clip-step"])
@pytest.mark.parametrize("variant", ["SGD", "SGD-fused"])
def test_an_optimizer_without_gradients_this_time_is_an_error_and_the_other_decides(variant: str, options):
    # torch's steps a fused one.
    scaler = GradScaler("cpu", init_scale=4.0)
    empty, full = (Small(scaler, variant, size=1) for _ in range(2))
    full.put(math.inf)
    if options:
        assert scaler.unscale_(empty.optimizer, **options).item() == 0.0
    with pytest.raises(CallOrderError, match="none of whose parameters has a gradient"):
        scaler.step(empty.optimizer)
    full.step()
    assert scaler.get_scale() == 2.0
    assert [run.report.reason for run in (empty, full)] == ["no gradients", "overflow"]


@explicit
@pytest.mark.parametrize("shared", ["parameter", "gradient"])
def test_what_two_parameters_share_is_unscaled_once(shared: str, explicit: bool):
    # By torch's twice.
    run, given = Small(GradScaler("cpu", init_scale=4.0), count=2), torch.full((2,), 16.0)
    # At first they share nothing.
    run.put(16.0)
    run.step(explicit=explicit)
    run.put(given, given)
    if shared == "parameter":
        run.optimizer.param_groups[0]["params"][1] = run.parameter
    run.step(explicit=explicit)
    assert [one.grad.tolist() for one in run.optimizer.param_groups[0]["params"]] == [[4.0, 4.0]] * 2


@explicit
@pytest.mark.parametrize(
    ("dtype", "value", "scale", "weight"),
    # One that overflows only before it is divided is none, but float16 is summed before.
    [
        *[("float32", 3e38, 1.0, 0.0), ("float32", 3e38, 4.0, -1.5e38)],
        *[("float16", 60000.0, 4.0, 0.0), ("float16", 20000.0, 4.0, -10000.0)],
    ],
)
def test_duplicates_are_judged_by_their_sum(dtype: str, value: float, scale: float, weight: float, explicit: bool):
    run = Small(GradScaler("cpu", init_scale=scale, allow_fp16_grads=True), dtypes=[dtype], size=4)
    run.put(torch.sparse_coo_tensor([[1, 1, 2]], [value, value, 4.0], (4,), dtype=run.parameter.dtype))
    run.step(explicit=explicit)
    assert run.held == [[0.0, pytest.approx(weight), -1.0 if weight else 0.0, 0.0]]
    assert (run.report.nonfinite, run.scaler.get_scale()) == ((0, scale) if weight else (1, scale / 2))


def test_a_sparse_gradient_of_float16_that_two_parameters_share_is_summed_for_both():
    run = Small(GradScaler("cpu", init_scale=4.0, allow_fp16_grads=True), count=2, dtypes=["float16"])
    # Their sum in float16 would overflow on its way.
    values = torch.tensor([40000.0, 40000.0, -40000.0, -40000.0, 16.0, 16.0]).half()
    given = torch.sparse_coo_tensor([[0] * 5 + [1]], values, (2,))
    run.put(given, given)
    run.step()
    assert [one.grad.to_dense().tolist() for one in run.parameters] == [[4.0, 4.0]] * 2


# Steps that fail.


def test_after_gradients_that_were_unscaled_in_part_no_step_is_made():
    run = Small(GradScaler("cpu", init_scale=4.0), dtypes=["float64", "float32"])
    # Gradients are looked at thoroughly when they are met first, before any is unscaled.
    run.put(0.0, None)
    run.step()
    run.put(16.0, overlapping((2,)))
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


@pytest.mark.parametrize("name", ["SGD", "SGD-fused"])
def test_a_step_that_fails_behind_the_optimizer_is_made_again_unless_a_kernel_has_divided(name: str):
    run = Small(GradScaler("cpu", init_scale=4.0), name)
    fails = iter([True, False])

    def hook(*_):
        if next(fails):
            raise KeyboardInterrupt

    run.optimizer.register_step_post_hook(hook)
    run.give(1.0)
    is_divided = name == "SGD-fused"
    if is_divided:
        run.optimizer.grad_scale = torch.tensor(2.0)
    with pytest.raises(KeyboardInterrupt):
        run.scaler.step(run.optimizer)
    assert not {"grad_scale", "found_inf"} & set(vars(run.optimizer))
    for call in (run.scaler._check_inf_per_device, run.scaler.step):
        with pytest.raises(CallOrderError, match="could not be unscaled completely") if is_divided else nullcontext():
            call(run.optimizer)
    assert run.held == [[-0.5 if is_divided else -2.0] * 2]
