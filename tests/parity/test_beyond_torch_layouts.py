"""Gradients of every layout, which torch's scaler refuses or judges wrongly, shown on the same script first."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from torch_runs import assert_same

from gradscale import CallOrderError, GradscaleError, InvalidValueError

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
]


def started(torch: Any, make: Any, scale: float = 4.0, **options: Any) -> Any:
    """Return a scaler whose scale is live."""
    scaler = make("cpu", init_scale=scale, **options)
    scaler.scale(torch.ones(()))
    return scaler


def plain(torch: Any, parameters: list[Any], **options: Any) -> Any:
    """Return an optimizer that moves by the gradient."""
    return torch.optim.SGD(parameters, lr=1.0, **options)


def layouts(torch: Any) -> dict[str, Callable[[Any], Any]]:
    """Return what stores the same values in another way."""

    def strided(dense: Any) -> Any:
        room = torch.full((2 * dense.shape[0], 3 * dense.shape[1]), 7.0)
        room[::2, 1::3] = dense
        return room[::2, 1::3]

    def twice(dense: Any) -> Any:
        parts = [(0.25 * dense).to_sparse(), (0.75 * dense).to_sparse()]
        indices, values = (torch.cat([getattr(part, name)() for part in parts], -1) for name in ("indices", "values"))
        return torch.sparse_coo_tensor(indices, values, dense.shape)

    return {
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


NAMES = ["contiguous", "transposed", "strided", "sliced", "offset", "channels-last", "coo", "coo-rows", "coo-twice"]
NAMES += ["subclass", "subclass-transposed"]


@pytest.mark.parametrize("bad", [None, math.inf, -math.inf, math.nan], ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [4.0, 3.0])
def test_gradients_of_every_layout_are_unscaled_as_by_torch(
    torch: Any, ours: Any, theirs: Any, name: str, bad: float | None, scale: float
) -> None:
    seen = []
    for make in (theirs, ours):
        scaler = started(torch, make, scale)
        dense = torch.arange(1.0, 13.0).reshape(4, 3)
        if bad is not None:
            dense[2, 1] = bad
        parameter, other = (torch.nn.Parameter(torch.zeros(4, 3)) for _ in range(2))
        optimizer = plain(torch, [parameter, other])
        parameter.grad, other.grad = layouts(torch)[name](dense), torch.ones(4, 3)
        base = parameter.grad._base
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        seen.append([parameter, other, parameter.grad, other.grad, base, scaler.get_scale()])
    assert_same(*seen)
    assert seen[0][0].detach().eq(0).all().item() is (bad is not None)


def test_the_memory_beside_a_view_stays_as_it_is(torch: Any, ours: Any) -> None:
    scaler = started(torch, ours)
    room = torch.full((8, 9), 7.0)
    parameter = torch.nn.Parameter(torch.zeros(4, 3))
    parameter.grad = room[::2, 1::3]
    parameter.grad.fill_(8.0)
    scaler.unscale_(plain(torch, [parameter]))
    assert room[::2, 1::3].eq(2.0).all()
    assert room.eq(7.0).sum() == room.numel() - 12


class Holding:
    """An optimizer that does nothing with its parameters."""

    def __init__(self, parameters: list[Any]) -> None:
        self.param_groups = [{"params": parameters}]

    def step(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "inf"])
def test_compressed_gradients_are_refused_by_torch_and_unscaled_by_ours(
    torch: Any, ours: Any, theirs: Any, layout: str, bad: bool
) -> None:
    options = [(2, 2)] if layout.startswith("bs") else []
    for make in (theirs, ours):
        scaler = started(torch, make)
        compressed = getattr(torch.eye(4).mul(4.0), f"to_sparse_{layout}")(*options)
        parameter = torch.nn.Parameter(compressed.clone())
        optimizer = Holding([parameter])
        if bad:
            compressed.values().view(-1)[0] = math.inf
        parameter.grad = compressed
        if make is theirs:
            with pytest.raises(RuntimeError, match="_amp_foreach_non_finite_check_and_unscale_"):
                scaler.unscale_(optimizer)
            continue
        scaler.unscale_(optimizer)
        assert parameter.grad is compressed
        expected = torch.eye(4)
        expected[0, 0] = math.inf if bad else 1.0
        assert torch.equal(compressed.to_dense(), expected)
        scaler.step(optimizer)
        assert scaler.last_step(optimizer).skipped is bad


def duplicates(torch: Any, value: float, dtype: Any) -> Any:
    """Return a sparse gradient that has a value twice at one place."""
    return torch.sparse_coo_tensor([[1, 1, 2]], torch.tensor([value, value, 4.0], dtype=dtype), (4,))


@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale-step"])
def test_float32_duplicates_that_overflow_only_in_their_sum_ruin_the_weights_at_torchs_and_are_skipped_at_ours(
    torch: Any, ours: Any, theirs: Any, explicit: bool
) -> None:
    for make in (theirs, ours):
        scaler = started(torch, make, 1.0)
        parameter = torch.nn.Parameter(torch.zeros(4))
        optimizer = plain(torch, [parameter])
        parameter.grad = duplicates(torch, 3e38, torch.float32)
        assert parameter.grad._values().isfinite().all()
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if make is theirs:
            assert parameter[1].item() == -math.inf
        else:
            assert parameter.tolist() == [0.0] * 4
            assert scaler.get_scale() == 0.5
            assert scaler.last_step(optimizer).nonfinite == 1


def test_float32_duplicates_whose_sum_overflows_only_before_it_is_divided_are_stepped_with_as_at_torchs(
    torch: Any, ours: Any, theirs: Any
) -> None:
    seen = []
    for make in (theirs, ours):
        scaler = started(torch, make)
        parameter = torch.nn.Parameter(torch.zeros(4))
        optimizer = plain(torch, [parameter])
        parameter.grad = duplicates(torch, 3e38, torch.float32)
        scaler.step(optimizer)
        scaler.update()
        seen.append([parameter, scaler.get_scale()])
    assert seen[0][0][1].item() == pytest.approx(-1.5e38)
    assert_same(*seen)


def test_float16_duplicates_that_overflow_only_in_their_sum_are_refused_by_torch_and_skipped_at_ours(
    torch: Any, ours: Any, theirs: Any
) -> None:
    for value, skipped in ((60000.0, True), (20000.0, False)):
        for make, options in ((theirs, {}), (ours, {"allow_fp16_grads": True})):
            scaler = started(torch, make, **options)
            parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
            optimizer = plain(torch, [parameter])
            parameter.grad = duplicates(torch, value, torch.float16)
            if make is theirs:
                with pytest.raises(ValueError, match="FP16"):
                    scaler.unscale_(optimizer)
                continue
            scaler.unscale_(optimizer)
            assert parameter.grad.is_coalesced()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.last_step(optimizer).skipped is skipped
            assert parameter.tolist() == ([0.0] * 4 if skipped else [0.0, -10000.0, -1.0, 0.0])


def overlapping(torch: Any) -> dict[str, Any]:
    """Return tensors of shape (3, 2) whose elements share memory."""
    return {
        "expanded": torch.full((3, 1), 16.0).expand(3, 2),
        "expanded-from-one": torch.full((1,), 16.0).expand(3, 2),
        "sliding": torch.full((4,), 16.0).as_strided((3, 2), (1, 1)),
        "unfolded": torch.full((4,), 16.0).unfold(0, 2, 1),
    }


@pytest.mark.parametrize("name", ["expanded", "expanded-from-one", "sliding", "unfolded"])
def test_gradients_that_overlap_themselves_are_an_obscure_error_or_wrong_at_torchs_and_refused_by_ours(
    torch: Any, ours: Any, theirs: Any, name: str
) -> None:
    for make in (theirs, ours):
        scaler = started(torch, make)
        parameter = torch.nn.Parameter(torch.zeros(3, 2))
        optimizer = plain(torch, [parameter])
        parameter.grad = overlapping(torch)[name]
        if make is theirs and name.startswith("expanded"):
            with pytest.raises(RuntimeError, match="unsupported operation"):
                scaler.unscale_(optimizer)
            continue
        if make is theirs:
            scaler.unscale_(optimizer)
            assert parameter.grad[1, 0].item() == 1.0
            continue
        with pytest.raises(InvalidValueError, match="overlaps itself"):
            scaler.unscale_(optimizer)
        with pytest.raises(GradscaleError):
            scaler.step(optimizer)
        assert parameter.eq(0).all()


@pytest.mark.parametrize("name", ["expanded", "expanded-from-one", "sliding", "unfolded"])
def test_later_gradients_that_overlap_themselves_are_errors_or_divided_as_at_torchs(
    torch: Any, ours: Any, theirs: Any, name: str
) -> None:
    seen: list[Any] = []
    for make in (theirs, ours):
        parameter = torch.nn.Parameter(torch.zeros(3, 2))
        scaler, optimizer = started(torch, make), plain(torch, [parameter])
        for gradient in (torch.zeros(3, 2), overlapping(torch)[name]):
            scaler.scale(torch.ones(()))
            parameter.grad = gradient
            try:
                scaler.step(optimizer)
            except RuntimeError:
                seen.append("an error")
                break
            scaler.update()
        seen.append(parameter.tolist())
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


def test_after_gradients_that_were_unscaled_in_part_no_step_is_made(torch: Any, ours: Any) -> None:
    scaler = started(torch, ours)
    parameters = [torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.float64, torch.float32)]
    optimizer = plain(torch, parameters)
    # Gradients are looked at thoroughly when they are met first, before any is unscaled.
    parameters[0].grad = torch.zeros(2, dtype=torch.float64)
    scaler.step(optimizer)
    scaler.update()
    scaler.scale(torch.ones(()))
    parameters[0].grad = torch.full((2,), 16.0, dtype=torch.float64)
    parameters[1].grad = torch.full((1,), 16.0).expand(2)
    with pytest.raises(InvalidValueError, match="overlaps itself"):
        scaler.unscale_(optimizer)
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(CallOrderError):
            call(optimizer)
    assert all(parameter.eq(0).all() for parameter in parameters)
