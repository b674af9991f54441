"""Gradients of every layout, which torch's scaler refuses or judges wrongly, shown on the same script first."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from axes_torch import GradScaler, TorchScaler, torch
from small_torch import Small, assert_same

from gradscale import CallOrderError, GradscaleError, InvalidValueError

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
]


def run_with(make: Any, gradient: Any, scale: float = 4.0, optimizer: Any = "SGD", **options: Any) -> Small:
    """Return a run of a parameter like this gradient, which is its scaled one, at some scale."""
    run = Small(make("cpu", init_scale=scale, **options), optimizer, dtypes=[str(gradient.dtype).partition(".")[2]])
    run.parameter.data = torch.zeros(gradient.shape, dtype=gradient.dtype)
    run.put(gradient)
    return run


def strided(dense: Any) -> Any:
    room = torch.full((2 * dense.shape[0], 3 * dense.shape[1]), 7.0)
    room[::2, 1::3] = dense
    return room[::2, 1::3]


def twice(dense: Any) -> Any:
    parts = [(0.25 * dense).to_sparse(), (0.75 * dense).to_sparse()]
    indices, values = (torch.cat([getattr(part, name)() for part in parts], -1) for name in ("indices", "values"))
    return torch.sparse_coo_tensor(indices, values, dense.shape)


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "contiguous": lambda dense: dense.clone(),
    "subclass": lambda dense: torch.nn.Parameter(dense.clone(), requires_grad=False),
    "subclass-transposed": lambda dense: torch.nn.Parameter(dense.t().contiguous().t(), requires_grad=False),
    "transposed": lambda dense: dense.t().contiguous().t(),
    "strided": strided,
    "sliced": lambda dense: torch.cat([dense, dense])[: len(dense)],
    "offset": lambda dense: torch.cat([torch.zeros(1), dense.flatten()])[1:].view(dense.shape),
    "channels-last": lambda dense: dense[None, :, :, None].to(memory_format=torch.channels_last)[0, :, :, 0],
    "coo": lambda dense: dense.to_sparse(),
    "coo-rows": lambda dense: dense.to_sparse(1),
    "coo-twice": twice,
}
"""What stores the same values in another way."""


@pytest.mark.parametrize("bad", [None, math.inf, -math.inf, math.nan], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("scale", [4.0, 3.0])
def test_gradients_of_every_layout_are_unscaled_as_by_torch(name: str, bad: float | None, scale: float) -> None:
    seen = []
    for make in (TorchScaler, GradScaler):
        dense = torch.arange(1.0, 13.0).reshape(4, 3)
        if bad is not None:
            dense[2, 1] = bad
        run = run_with(make, LAYOUTS[name](dense), scale)
        other, base = torch.nn.Parameter(torch.zeros(4, 3)), run.parameter.grad._base
        other.grad = torch.ones(4, 3)
        run.optimizer.param_groups[0]["params"].append(other)
        run.step(explicit=True)
        seen.append([run.parameter, other, run.parameter.grad, other.grad, base, run.scaler.get_scale()])
    # The base of a view shows that the memory beside it stays as it is.
    assert_same(*seen)
    assert seen[0][0].detach().eq(0).all().item() is (bad is not None)


class Holding:
    """An optimizer that does nothing with its parameters."""

    def __init__(self, parameters: list[Any]) -> None:
        self.param_groups = [{"params": parameters}]

    def step(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "inf"])
def test_compressed_gradients_are_refused_by_torch_and_unscaled_by_ours(layout: str, bad: bool) -> None:
    options = [(2, 2)] if layout.startswith("bs") else []
    theirs, ours = (run_with(make, torch.zeros(4, 4), optimizer=Holding) for make in (TorchScaler, GradScaler))
    for run in (theirs, ours):
        compressed = getattr(torch.eye(4).mul(4.0), f"to_sparse_{layout}")(*options)
        run.optimizer.param_groups[0]["params"] = [torch.nn.Parameter(compressed.clone())]
        if bad:
            compressed.values().view(-1)[0] = math.inf
        run.optimizer.param_groups[0]["params"][0].grad = compressed
    with pytest.raises(RuntimeError, match="_amp_foreach_non_finite_check_and_unscale_"):
        theirs.step()
    ours.step()
    expected = torch.eye(4)
    expected[0, 0] = math.inf if bad else 1.0
    assert ours.optimizer.param_groups[0]["params"][0].grad is compressed
    assert torch.equal(compressed.to_dense(), expected)
    assert ours.report.skipped is bad


def duplicates(value: float, dtype: Any = torch.float32) -> Any:
    """Return a sparse gradient that has a value twice at one place."""
    return torch.sparse_coo_tensor([[1, 1, 2]], torch.tensor([value, value, 4.0], dtype=dtype), (4,))


@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale-step"])
def test_float32_duplicates_that_overflow_only_in_their_sum_ruin_the_weights_at_torchs_and_are_skipped_at_ours(
    explicit: bool,
) -> None:
    theirs, ours = (run_with(make, duplicates(3e38), 1.0) for make in (TorchScaler, GradScaler))
    for run in (theirs, ours):
        assert run.parameter.grad._values().isfinite().all()
        run.step(explicit=explicit)
    assert theirs.parameter[1].item() == -math.inf
    assert (ours.held, ours.scaler.get_scale(), ours.report.nonfinite) == ([[0.0] * 4], 0.5, 1)


def test_float32_duplicates_whose_sum_overflows_only_before_it_is_divided_are_stepped_with_as_at_torchs() -> None:
    runs = [run_with(make, duplicates(3e38)) for make in (TorchScaler, GradScaler)]
    for run in runs:
        run.step()
        assert run.parameter[1].item() == pytest.approx(-1.5e38)
    assert_same(*[[run.parameter, run.scaler.get_scale()] for run in runs])


@pytest.mark.parametrize(("value", "weights"), [(60000.0, [0.0] * 4), (20000.0, [0.0, -10000.0, -1.0, 0.0])])
def test_float16_duplicates_that_overflow_only_in_their_sum_are_refused_by_torch_and_skipped_at_ours(
    value: float, weights: list[float]
) -> None:
    gradient = duplicates(value, torch.float16)
    with pytest.raises(ValueError, match="FP16"):
        run_with(TorchScaler, gradient).step(explicit=True)
    ours = run_with(GradScaler, gradient, allow_fp16_grads=True)
    ours.step(explicit=True)
    assert ours.parameter.grad.is_coalesced()
    assert (ours.held, ours.report.skipped) == ([weights], not any(weights))


OVERLAPPING: dict[str, Callable[[], Any]] = {
    "expanded": lambda: torch.full((3, 1), 16.0).expand(3, 2),
    "expanded-from-one": lambda: torch.full((1,), 16.0).expand(3, 2),
    "sliding": lambda: torch.full((4,), 16.0).as_strided((3, 2), (1, 1)),
    "unfolded": lambda: torch.full((4,), 16.0).unfold(0, 2, 1),
}
"""Tensors of shape (3, 2) whose elements share memory."""


@pytest.mark.parametrize("name", OVERLAPPING)
def test_gradients_that_overlap_themselves_are_an_obscure_error_or_wrong_at_torchs_and_refused_by_ours(
    name: str,
) -> None:
    theirs, ours = (run_with(make, OVERLAPPING[name]()) for make in (TorchScaler, GradScaler))
    if name.startswith("expanded"):
        with pytest.raises(RuntimeError, match="unsupported operation"):
            theirs.scaler.unscale_(theirs.optimizer)
    else:
        theirs.scaler.unscale_(theirs.optimizer)
        assert theirs.parameter.grad[1, 0].item() == 1.0
    with pytest.raises(InvalidValueError, match="overlaps itself"):
        ours.scaler.unscale_(ours.optimizer)
    with pytest.raises(GradscaleError):
        ours.scaler.step(ours.optimizer)
    assert ours.parameter.eq(0).all()


@pytest.mark.parametrize("name", OVERLAPPING)
def test_later_gradients_that_overlap_themselves_are_errors_or_divided_as_at_torchs(name: str) -> None:
    def trained(make: Any) -> Any:
        run = run_with(make, torch.zeros(3, 2))
        run.step()
        run.put(OVERLAPPING[name]())
        try:
            run.step()
        except RuntimeError:
            return "an error", run.held
        return run.held

    assert trained(GradScaler) == trained(TorchScaler)


def test_after_gradients_that_were_unscaled_in_part_no_step_is_made() -> None:
    run = Small(GradScaler("cpu", init_scale=4.0), dtypes=["float64", "float32"])
    # Gradients are looked at thoroughly when they are met first, before any is unscaled.
    run.put(0.0, None)
    run.step()
    run.put(16.0, torch.full((1,), 16.0).expand(2))
    with pytest.raises(InvalidValueError, match="overlaps itself"):
        run.scaler.unscale_(run.optimizer)
    for call in (run.scaler.step, run.scaler.unscale_):
        with pytest.raises(CallOrderError):
            call(run.optimizer)
    assert run.held == [[0.0, 0.0]] * 2
