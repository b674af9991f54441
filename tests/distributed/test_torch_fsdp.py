"""Training with DDP, FSDP1 and FSDP2 on the CPU: the same as with torch's scalers, and the same as on one device."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
from axes import require
from batches import Batch, Case
from fsdp_setups import DDP, OFFLOADED_FSDP1, SHARDED, Setup
from tiers import later

pytestmark = [pytest.mark.torch, pytest.mark.tier("ranks")]

SIZES = [2, *later("all", 3)]
LIBRARIES = ("torch", "gradscale")
FSDP2 = [setup for setup in SHARDED if setup.method == "FSDP2"]
# Largest difference between FSDP and DDP, which add the ranks' gradients in another order; weights are about 0.3.
TOLERANCE = {"fp32": 1e-6, "fp16": 1e-3}
# The ranks that a mesh is for, and its shape.
MESHES = {
    "data": ("data", (4,)),
    "hybrid": ("hybrid", (2, 2)),
    "data-and-tensor": ("data and tensor", (2, 2)),
}

Record = dict[str, Any]


@pytest.fixture(autouse=True)
def _torch_is_there() -> None:
    require("torch")


def cases(size: int) -> list[Case]:
    """Return what this file asks of a world of some ranks."""
    if size == 4:
        overflows = itertools.product(MESHES.values(), LIBRARIES, range(size))
        clips = itertools.product(MESHES.values(), LIBRARIES, (0.01, 1e6))
        return [
            *(("mesh_overflow", shape, parallel, library, bad) for (parallel, shape), library, bad in overflows),
            *(("clip", shape, parallel, library, max_norm) for (parallel, shape), library, max_norm in clips),
        ]
    runs = itertools.product([*DDP, *SHARDED], LIBRARIES, ("loss", "gradient"))
    fused = itertools.product(FSDP2, LIBRARIES, ("loss", "gradient"))
    return [
        *(("train", setup, lib, how, False) for setup, lib, how in runs if setup.method != "DDP" or how == "loss"),
        *(("train", setup, lib, how, True) for setup, lib, how in fused),
        *(("train_once", setup, "nothing") for setup in OFFLOADED_FSDP1),
        ("train_once", Setup("FSDP2", half=False, offload=True), "pinned memory"),
        ("train_once", Setup("FSDP1", half=False), "no device"),
        ("has_accelerator",),
    ]


BATCH = Batch("fsdp_scenarios", cases, limit=240.0)


def whole_weights(records: list[Record]) -> Any:
    """Return the whole weights after each iteration, float32."""
    return np.stack([np.frombuffer(record["weights"], dtype=np.float32) for record in records])


def assert_same_training(ours: list[Record], theirs: list[Record], names: list[str]) -> None:
    """Assert that each iteration ended with the same values, bit for bit."""
    assert len(ours) == len(theirs) > 0
    for iteration, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for name in names:
            assert one[name] == other[name], f"{name} after iteration {iteration}"


def assert_close_weights(ours: list[Record], theirs: list[Record], tolerance: float) -> None:
    """Assert that two runs went the same way, and that the weights moved much further than they may differ."""
    one, other = whole_weights(ours), whole_weights(theirs)
    np.testing.assert_allclose(one, other, rtol=0.0, atol=tolerance)
    assert np.abs(one[-1] - one[0]).max() > 50 * tolerance


def skips(records: list[Record]) -> list[bool]:
    """Return which iterations moved no weight."""
    weights = [record["weights"] for record in records]
    # Momentum moves the weights in each step that is made, after the first.
    return [False, *(before == after for before, after in itertools.pairwise(weights))]


def expected_scales(overflows: list[bool], scale: float, interval: int) -> list[tuple[float, int]]:
    """Return the scale and the tracker after each iteration."""
    states, tracker = [], 0
    for overflow in overflows:
        tracker = 0 if overflow else tracker + 1
        scale = scale / 2 if overflow else scale
        if tracker == interval:
            scale, tracker = scale * 2, 0
        states.append((scale, tracker))
    return states


@pytest.mark.parametrize("overflow", ["loss", "gradient"])
@pytest.mark.parametrize("setup", SHARDED, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_each_iteration_ends_as_with_torchs_own_scaler_bit_for_bit(size: int, setup: Setup, overflow: str) -> None:
    ours = BATCH.answer(size, "train", setup, "gradscale", overflow, False)
    theirs = BATCH.answer(size, "train", setup, "torch", overflow, False)
    for one, other in zip(ours, theirs, strict=True):
        # The digest is of this rank's shards of the weights, the gradients and the momentum.
        assert_same_training(one, other, ["loss", "scale", "tracker", "weights", "digest"])


@pytest.mark.parametrize("overflow", ["loss", "gradient"])
@pytest.mark.parametrize("setup", FSDP2, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_fused_steps_over_a_mesh_end_as_with_torchs_own_scaler(size: int, setup: Setup, overflow: str) -> None:
    ours = BATCH.answer(size, "train", setup, "gradscale", overflow, True)
    theirs = BATCH.answer(size, "train", setup, "torch", overflow, True)
    for one, other in zip(ours, theirs, strict=True):
        assert_same_training(one, other, ["loss", "scale", "tracker", "weights", "digest"])
        assert [record["report"] for record in one][1:] == skips(one)[1:]
        assert True in skips(one)


@pytest.mark.parametrize("setup", SHARDED, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_sharded_training_is_the_training_of_ddp(size: int, setup: Setup) -> None:
    ours = BATCH.answer(size, "train", setup, "gradscale", "loss", False)
    # Torch's own scaler and DDP; in float16 with float32 masters beside the model.
    theirs = BATCH.answer(size, "train", Setup("DDP", setup.half), "torch", "loss", False)
    for one, other in zip(ours, theirs, strict=True):
        assert_same_training(one, other, ["scale", "tracker"])
        assert_close_weights(one, other, TOLERANCE["fp16" if setup.half else "fp32"])
        assert skips(one)[3]
        # 2**18 is too much for the gradients in float16, and for nothing else.
        assert one[0]["report"] == setup.half


@pytest.mark.parametrize("setup", DDP, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_ddp_needs_no_group_and_ends_as_with_torchs_own_scaler(size: int, setup: Setup) -> None:
    ours = BATCH.answer(size, "train", setup, "gradscale", "loss", False)
    theirs = BATCH.answer(size, "train", setup, "torch", "loss", False)
    for one, other in zip(ours, theirs, strict=True):
        assert_same_training(one, other, ["loss", "scale", "tracker", "weights", "digest"])


@pytest.mark.parametrize("setup", SHARDED, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_an_infinity_on_each_rank_in_turn_makes_all_ranks_skip_together(size: int, setup: Setup) -> None:
    results = BATCH.answer(size, "train", setup, "gradscale", "gradient", False)
    overflows = [bool(iteration % 2) for iteration in range(2 * size + 2)]
    for records in results:
        assert [record["report"] for record in records] == overflows
        assert skips(records) == overflows
        states = [(record["scale"], record["tracker"]) for record in records]
        assert states == expected_scales(overflows, 2.0**10, 3)
        # The whole weights, gathered on each rank, are equal.
        assert_same_training(records, results[0], ["weights", "scale", "tracker"])


@pytest.mark.parametrize("name", ["loss", "scale", "tracker", "weights", "digest"])
def test_the_comparison_of_runs_sees_any_difference(name: str) -> None:
    ours = BATCH.answer(2, "train", SHARDED[0], "gradscale", "loss", False)[0]
    other = copy.deepcopy(ours)
    other[-1][name] = {"weights": b"\x01" + ours[-1]["weights"][1:], "digest": "other"}.get(name, 1234)
    with pytest.raises(AssertionError, match=f"{name} after iteration {len(ours) - 1}"):
        assert_same_training(ours, other, ["loss", "scale", "tracker", "weights", "digest"])


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
def test_the_comparison_of_weights_sees_one_step_unscaled_by_half_the_scale(half: bool) -> None:
    tolerance = TOLERANCE["fp16" if half else "fp32"]
    ours = BATCH.answer(2, "train", Setup("FSDP2", half), "gradscale", "loss", False)[0]
    wrong = copy.deepcopy(ours)
    weights = whole_weights(ours)
    wrong[-1]["weights"] = (weights[-1] + (weights[-1] - weights[-2])).tobytes()
    with pytest.raises(AssertionError, match="Mismatched elements"):
        assert_close_weights(wrong, ours, tolerance)
    with pytest.raises(AssertionError):
        assert_close_weights(ours[:1], ours[:1], tolerance)


@pytest.mark.parametrize("setup", OFFLOADED_FSDP1, ids=str)
def test_fsdp1_offloads_to_the_cpu_only_where_there_is_an_accelerator(setup: Setup) -> None:
    assert_needs_accelerator("Cannot access accelerator device when none is available", setup, "nothing")


def test_fsdp2_offloads_to_pinned_memory_only_where_there_is_an_accelerator() -> None:
    setup = Setup("FSDP2", half=False, offload=True)
    assert_needs_accelerator("Cannot access accelerator device when none is available", setup, "pinned memory")


def test_fsdp1_must_be_told_its_device_where_there_is_no_accelerator() -> None:
    assert_needs_accelerator("FSDP needs a non-CPU accelerator device", Setup("FSDP1", half=False), "no device")


def assert_needs_accelerator(message: str, setup: Setup, change: str) -> None:
    """Assert that torch fails with a message on every rank without an accelerator; else there is nothing to assert."""
    if any(BATCH.answer(2, "has_accelerator")):
        pytest.skip("this machine has an accelerator")
    for failure in BATCH.outcome(2, "train_once", setup, change):
        assert failure.kind == "RuntimeError"
        assert message in failure.message


@pytest.mark.parametrize("mesh", MESHES)
def test_an_infinity_on_each_rank_of_a_mesh_is_found_on_all_without_a_group(mesh: str) -> None:
    parallel, shape = MESHES[mesh]
    for bad_rank in range(4):
        results = BATCH.answer(4, "mesh_overflow", shape, parallel, "gradscale", bad_rank)
        assert [result["finite here"] for result in results] == [rank != bad_rank for rank in range(4)]
        for result in results:
            assert result["found"] == {"cpu": 1.0}
            # Each gradient is the initial one times exactly 1/8.
            assert result["unscaled"]
            assert all(result["unscaled"])
            assert result["stages"] == ("UNSCALED", "STEPPED")
            assert not result["stepped"]
            assert result["scale"] == 4.0
        if mesh != "hybrid":
            # Torch's scaler does the same, but where a dimension replicates.
            assert results == BATCH.answer(4, "mesh_overflow", shape, parallel, "torch", bad_rank)


@pytest.mark.parametrize("max_norm", [0.01, 1e6])
@pytest.mark.parametrize("mesh", MESHES)
def test_clipping_while_unscaling_is_torchs_unscaling_and_clipping(mesh: str, max_norm: float) -> None:
    parallel, shape = MESHES[mesh]
    ours = BATCH.answer(4, "clip", shape, parallel, "gradscale", max_norm)
    theirs = BATCH.answer(4, "clip", shape, parallel, "torch", max_norm)
    for one, other in zip(ours, theirs, strict=True):
        assert one["norm"] == pytest.approx(other["norm"], rel=1e-5)
        assert one["norm"] == ours[0]["norm"] > 0.02
        for gradient, expected in zip(one["gradients"], other["gradients"], strict=True):
            assert gradient == pytest.approx(expected, rel=1e-5, abs=1e-9)
