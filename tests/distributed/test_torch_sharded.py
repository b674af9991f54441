"""The replacement of torch's ShardedGradScaler on plain tensors does what torch's does, on every rank."""

from __future__ import annotations

import collections
import importlib
import math
from typing import Any

import pytest
from axes import require
from worlds import GlooWorld, MPIWorld, each

pytestmark = [pytest.mark.torch, pytest.mark.tier("ranks")]

LIBRARIES = ("torch", "gradscale")
ONES = [1.0] * 3
Pair = collections.namedtuple("Pair", ["first", "second"])


@pytest.fixture(autouse=True)
def torch() -> Any:
    """Return torch."""
    return require("torch")


@pytest.fixture
def scenarios() -> Any:
    """Return what the ranks do."""
    return importlib.import_module("torch_sharded_scenarios")


def described(torch: Any, outputs: Any) -> Any:
    """Return nested containers of tensors as types, dtypes and values."""
    if isinstance(outputs, torch.Tensor):
        return str(outputs.dtype), outputs.tolist()
    return type(outputs).__name__, [described(torch, output) for output in outputs]


def test_nested_containers_are_scaled_as_torch_scales_them(torch: Any, scenarios: Any) -> None:
    outputs = (
        torch.tensor(1.5),
        [torch.tensor([1.0, 2.0]), (torch.tensor([3.0], dtype=torch.float64), [torch.tensor(4.0)])],
        [torch.tensor(5.0, dtype=torch.float16), torch.tensor([6.0], dtype=torch.bfloat16)],
    )
    theirs, ours = (
        described(torch, scenarios.make_scaler(library, init_scale=2.0).scale(outputs)) for library in LIBRARIES
    )
    assert ours == theirs
    inner = ("tuple", [("torch.float64", [6.0]), ("list", [("torch.float32", 8.0)])])
    halves = ("list", [("torch.float16", 10.0), ("torch.bfloat16", [12.0])])
    assert ours == ("tuple", [("torch.float32", 3.0), ("list", [("torch.float32", [2.0, 4.0]), inner]), halves])


def test_a_named_tuple_and_a_dict_are_scaled_though_torch_fails_on_them(torch: Any, scenarios: Any) -> None:
    outputs = Pair(torch.tensor(1.0), {"loss": torch.tensor(2.0)})
    with pytest.raises(TypeError, match="second"):
        scenarios.make_scaler("torch", init_scale=2.0).scale(outputs)
    scaled = scenarios.make_scaler("gradscale", init_scale=2.0).scale(outputs)
    assert type(scaled) is Pair
    assert (scaled.first.item(), scaled.second["loss"].item()) == (2.0, 4.0)


def test_the_state_is_made_on_the_device_of_the_first_output(torch: Any, scenarios: Any) -> None:
    scaler = scenarios.make_scaler("gradscale", init_scale=2.0)
    assert scaler._scale is None
    scaler.scale([torch.tensor(1.0), (torch.tensor(2.0),)])
    assert scaler._scale is not None
    assert (scaler._scale.device.type, scaler._scale.dtype) == ("cpu", torch.float32)


@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale_ and step"])
def test_an_infinity_on_each_rank_in_turn_makes_step_return_none_on_all(
    gloo: GlooWorld, scenarios: Any, explicit: bool
) -> None:
    cases = [(lib, {bad: math.inf}, {"explicit": explicit}) for lib in LIBRARIES for bad in range(gloo.size)]
    answers = [results for _, results in each(gloo, scenarios.train, cases)]
    for theirs, ours in zip(answers[: gloo.size], answers[gloo.size :], strict=True):
        names = ("returned", "scale", "tracker", "weights")
        found, expected = (
            [[tuple(record[name] for name in names) for record in records] for records in results]
            for results in (ours, theirs)
        )
        assert found == expected
        moved = [0.0] * 3
        steps = [("stepped", 4.0, 1), (None, 2.0, 0), ("stepped", 2.0, 1)]
        weights = [moved, moved, [-1.0] * 3]
        assert found == [[(*step, [one, one]) for step, one in zip(steps, weights, strict=True)]] * gloo.size


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", ["finite", "inf", "nan", "sum of 2", "sum of 3"])
def test_sparse_gradients_are_judged_as_torch_judges_them_but_for_sums_that_overflow(
    gloo: GlooWorld, scenarios: Any, dtype: str, kind: str
) -> None:
    # The optimizer gets duplicates summed: two large ones of float32 are finite once they are unscaled.
    is_found = kind != "finite" and (kind, dtype) != ("sum of 2", "float32")
    is_torchs_fault = (kind, dtype) == ("sum of 3", "float32")
    cases = [(library, dtype, kind, bad_rank) for library in LIBRARIES for bad_rank in range(gloo.size)]
    answers = [results for _, results in each(gloo, scenarios.sparse_gradients, cases)]
    for bad_rank, (theirs, ours) in enumerate(zip(answers[: gloo.size], answers[gloo.size :], strict=True)):
        if is_torchs_fault:
            assert theirs[bad_rank]["gradient"][1] == math.inf
            assert [result["steps"] for result in theirs] == [1] * gloo.size
        else:
            assert repr(ours) == repr(theirs)  # NaN is not equal to itself
        for rank, result in enumerate(ours):
            assert result["found"] == [float(is_found)]
            steps = int(dtype == "float32" and not is_found)
            assert (result["steps"], result["scale"]) == (steps, 1.0 if is_found and dtype == "float32" else 2.0)
            if rank != bad_rank or kind == "finite":
                assert result["gradient"] == [0.0, 24.0, 0.0, 32.0]
            elif is_found:
                assert repr(result["gradient"][1]) == ("nan" if kind == "nan" else "inf")
            else:
                assert math.isfinite(result["gradient"][1])


@pytest.mark.mpi
@pytest.mark.parametrize(("name", "is_fused"), [("SGD", False), ("AdamW", True)])
def test_the_sharded_scaler_of_torch_tensors_agrees_over_mpi(
    mpi: MPIWorld, scenarios: Any, name: str, is_fused: bool
) -> None:
    settings = {"optimizer": name, "fused": is_fused, "over": "group"}
    cases = [("gradscale", {bad: math.nan}, settings) for bad in range(mpi.size)]
    for _, results in each(mpi, scenarios.train, cases):
        for records in results:
            assert [record["scale"] for record in records] == [4.0, 2.0, 2.0]
            first, second, third = (record["weights"] for record in records)
            assert first == second != third
            assert records == results[0]
