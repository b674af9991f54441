"""The replacement of torch's ShardedGradScaler on plain tensors does what torch's does, on every rank."""

from __future__ import annotations

import collections
import math
from typing import Any

import pytest
from axes import require
from batches import Batch, Case
from tiers import later

pytestmark = [pytest.mark.torch, pytest.mark.tier("ranks")]

SIZES = [2, *later("all", 3)]
LIBRARIES = ("torch", "gradscale")
SPARSE = [
    (dtype, kind) for dtype in ("float32", "float16") for kind in ("finite", "inf", "nan", "sum of 2", "sum of 3")
]


@pytest.fixture(autouse=True)
def torch() -> Any:
    """Return torch."""
    return require("torch")


def make_scaler(library: str, **settings: Any) -> Any:
    """Return a sharded scaler for the CPU, before there is any process group."""
    from torch_sharded_scenarios import make_scaler

    return make_scaler(library, **settings)


def cases(size: int) -> list[Case]:
    """Return what this file asks of a world of some ranks."""
    ranks = range(size)
    skips = [("skip_on_infinity", lib, bad, how) for lib in LIBRARIES for bad in ranks for how in (False, True)]
    sparse = [
        ("sparse_gradients", lib, dtype, None if kind == "finite" else bad, kind)
        for lib in LIBRARIES
        for dtype, kind in SPARSE
        for bad in (ranks if kind == "inf" else [size - 1])
    ]
    return skips + sparse


BATCH = Batch("torch_sharded_scenarios", cases)
Pair = collections.namedtuple("Pair", ["first", "second"])


def scaled_by(torch: Any, scaler: Any) -> Any:
    """Return nested containers of tensors after scaling, as dtypes and values."""
    outputs = (
        torch.tensor(1.5),
        [torch.tensor([1.0, 2.0]), (torch.tensor([3.0], dtype=torch.float64), [torch.tensor(4.0)])],
        [torch.tensor(5.0, dtype=torch.float16), torch.tensor([6.0], dtype=torch.bfloat16)],
    )
    return described(torch, scaler.scale(outputs))


def described(torch: Any, outputs: Any) -> Any:
    """Return nested containers of tensors as types, dtypes and values."""
    if isinstance(outputs, torch.Tensor):
        return str(outputs.dtype), outputs.tolist()
    return type(outputs).__name__, [described(torch, output) for output in outputs]


def test_nested_containers_are_scaled_as_torch_scales_them(torch: Any) -> None:
    ours = scaled_by(torch, make_scaler("gradscale", init_scale=2.0))
    assert ours == scaled_by(torch, make_scaler("torch", init_scale=2.0))
    assert ours == (
        "tuple",
        [
            ("torch.float32", 3.0),
            (
                "list",
                [
                    ("torch.float32", [2.0, 4.0]),
                    ("tuple", [("torch.float64", [6.0]), ("list", [("torch.float32", 8.0)])]),
                ],
            ),
            ("list", [("torch.float16", 10.0), ("torch.bfloat16", [12.0])]),
        ],
    )


def test_a_named_tuple_and_a_dict_are_scaled_though_torch_fails_on_them(torch: Any) -> None:
    outputs = Pair(torch.tensor(1.0), {"loss": torch.tensor(2.0)})
    with pytest.raises(TypeError, match="second"):
        make_scaler("torch", init_scale=2.0).scale(outputs)
    scaled = make_scaler("gradscale", init_scale=2.0).scale(outputs)
    assert type(scaled) is Pair
    assert (scaled.first.item(), scaled.second["loss"].item()) == (2.0, 4.0)


def test_the_state_is_made_on_the_device_of_the_first_output(torch: Any) -> None:
    scaler = make_scaler("gradscale", init_scale=2.0)
    assert scaler._scale is None
    scaler.scale([torch.tensor(1.0), (torch.tensor(2.0),)])
    assert scaler._scale is not None
    assert (scaler._scale.device.type, scaler._scale.dtype) == ("cpu", torch.float32)


@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale_ and step"])
@pytest.mark.parametrize("size", SIZES)
def test_an_infinity_on_each_rank_in_turn_makes_step_return_none_on_all(size: int, explicit: bool) -> None:
    for bad_rank in range(size):
        ours = BATCH.answer(size, "skip_on_infinity", "gradscale", bad_rank, explicit)
        assert ours == BATCH.answer(size, "skip_on_infinity", "torch", bad_rank, explicit)
        assert (
            ours
            == [
                {
                    "records": [
                        ("stepped", 4.0, 1, [0.0] * 3),
                        (None, 2.0, 0, [0.0] * 3),
                        ("stepped", 2.0, 1, [-1.0] * 3),
                    ]
                }
            ]
            * size
        )


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("size", SIZES)
def test_a_sparse_infinity_on_one_rank_is_found_on_all(size: int, dtype: str) -> None:
    for kind, bad_ranks in (("inf", range(size)), ("nan", [size - 1])):
        for bad_rank in bad_ranks:
            ours = BATCH.answer(size, "sparse_gradients", "gradscale", dtype, bad_rank, kind)
            theirs = BATCH.answer(size, "sparse_gradients", "torch", dtype, bad_rank, kind)
            assert repr(ours) == repr(theirs)  # NaN is not equal to itself
            bad = math.inf if kind == "inf" else math.nan
            for rank, result in enumerate(ours):
                assert result["found"] == [1.0]
                expected = [0.0, bad, 0.0, 32.0] if rank == bad_rank else [0.0, 24.0, 0.0, 32.0]
                assert repr(result["gradient"]) == repr(expected)
                assert result["steps"] == 0


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("size", SIZES)
def test_sparse_gradients_are_unscaled_and_duplicates_summed(size: int, dtype: str) -> None:
    ours = BATCH.answer(size, "sparse_gradients", "gradscale", dtype, None, "finite")
    assert ours == BATCH.answer(size, "sparse_gradients", "torch", dtype, None, "finite")
    for result in ours:
        assert result["found"] == [0.0]
        assert result["gradient"] == [0.0, 24.0, 0.0, 32.0]
        assert result["scale"] == 2.0


@pytest.mark.parametrize("kind", ["sum of 2", "sum of 3"])
@pytest.mark.parametrize("size", SIZES)
def test_float16_duplicates_whose_sum_overflows_on_one_rank_are_found_on_all(size: int, kind: str) -> None:
    ours = BATCH.answer(size, "sparse_gradients", "gradscale", "float16", size - 1, kind)
    assert ours == BATCH.answer(size, "sparse_gradients", "torch", "float16", size - 1, kind)
    assert [result["found"] for result in ours] == [[1.0]] * size
    # The optimizer gets the duplicates summed, and would see the infinity.
    assert ours[-1]["gradient"][1] == math.inf


@pytest.mark.parametrize("size", SIZES)
def test_float32_duplicates_that_are_finite_once_unscaled_are_stepped_as_torch_steps_them(size: int) -> None:
    ours = BATCH.answer(size, "sparse_gradients", "gradscale", "float32", size - 1, "sum of 2")
    theirs = BATCH.answer(size, "sparse_gradients", "torch", "float32", size - 1, "sum of 2")
    assert math.isfinite(theirs[-1]["gradient"][1])
    assert [result["steps"] for result in theirs] == [1] * size
    assert ours == theirs


@pytest.mark.parametrize("size", SIZES)
def test_float32_duplicates_whose_unscaled_sum_overflows_are_found_though_torch_steps_with_them(size: int) -> None:
    theirs = BATCH.answer(size, "sparse_gradients", "torch", "float32", size - 1, "sum of 3")
    assert theirs[-1]["gradient"][1] == math.inf
    assert [result["steps"] for result in theirs] == [1] * size
    ours = BATCH.answer(size, "sparse_gradients", "gradscale", "float32", size - 1, "sum of 3")
    assert [(result["steps"], result["found"], result["scale"]) for result in ours] == [(0, [1.0], 1.0)] * size
