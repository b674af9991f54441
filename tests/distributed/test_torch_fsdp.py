"""Training with DDP, FSDP1 and FSDP2 on the CPU: the same as with torch's scalers, and the same as on one device."""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
from typing import Any

import numpy as np
import pytest
from axes import require
from fsdp_setups import DDP, OFFLOADED_FSDP1, SHARDED, Setup
from tiers import later
from worlds import GlooWorld, each

pytestmark = [pytest.mark.torch, pytest.mark.tier("ranks")]

SIZES = [2, *later("all", 3)]
LIBRARIES = ("torch", "gradscale")
FSDP2 = [setup for setup in SHARDED if setup.method == "FSDP2"]
# Largest difference between FSDP and DDP, which add the ranks' gradients in another order; weights are about 0.3.
TOLERANCE = {"fp32": 1e-6, "fp16": 1e-3}
EVERYTHING = ["loss", "scale", "tracker", "weights", "digest"]
# What a mesh is for, and its shape.
MESHES = {"data": (4,), "hybrid": (2, 2), "data and tensor": (2, 2)}

Record = dict[str, Any]


@pytest.fixture(autouse=True)
def scenarios() -> Any:
    """Return what the ranks do."""
    require("torch")
    return importlib.import_module("fsdp_scenarios")


@functools.cache
def trained(size: int, overflow: str, is_fused: bool) -> dict[tuple[Setup, str], list[list[Record]]]:
    """Return what each rank has recorded with each setup and library."""
    setups = FSDP2 if is_fused else [*DDP, *SHARDED]
    cases = [(setup, library, overflow, is_fused) for setup in setups for library in LIBRARIES]
    train = importlib.import_module("fsdp_scenarios").train
    return {case[:2]: results for case, results in each(GlooWorld(size), train, cases)}


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
@pytest.mark.parametrize(
    ("setup", "is_fused"),
    [
        *(pytest.param(setup, False, id=str(setup)) for setup in [*DDP, *SHARDED]),
        *(pytest.param(setup, True, id=f"{setup}-fused") for setup in FSDP2),
    ],
)
@pytest.mark.parametrize("size", SIZES)
def test_each_iteration_ends_as_with_torchs_own_scaler_bit_for_bit(
    size: int, setup: Setup, is_fused: bool, overflow: str
) -> None:
    runs = trained(size, overflow, is_fused)
    for ours, theirs in zip(runs[setup, "gradscale"], runs[setup, "torch"], strict=True):
        # The digest is of this rank's shards of the weights, the gradients and the momentum.
        assert_same_training(ours, theirs, EVERYTHING)
        if is_fused:
            assert [record["report"] for record in ours][1:] == skips(ours)[1:]
            assert True in skips(ours)


@pytest.mark.parametrize("setup", SHARDED, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_sharded_training_is_the_training_of_ddp(size: int, setup: Setup) -> None:
    runs = trained(size, "loss", False)
    # Torch's own scaler and DDP; in float16 with float32 masters beside the model.
    for ours, theirs in zip(runs[setup, "gradscale"], runs[Setup("DDP", setup.half), "torch"], strict=True):
        assert_same_training(ours, theirs, ["scale", "tracker"])
        assert_close_weights(ours, theirs, TOLERANCE["fp16" if setup.half else "fp32"])
        assert skips(ours)[3]
        # 2**18 is too much for the gradients in float16, and for nothing else.
        assert ours[0]["report"] == setup.half


@pytest.mark.parametrize("setup", SHARDED, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_an_infinity_on_each_rank_in_turn_makes_all_ranks_skip_together(size: int, setup: Setup) -> None:
    results = trained(size, "gradient", False)[setup, "gradscale"]
    overflows = [bool(iteration % 2) for iteration in range(2 * size + 2)]
    for records in results:
        assert [record["report"] for record in records] == overflows
        assert skips(records) == overflows
        states = [(record["scale"], record["tracker"]) for record in records]
        assert states == expected_scales(overflows, 2.0**10, 3)
        # The whole weights, gathered on each rank, are equal.
        assert_same_training(records, results[0], ["weights", "scale", "tracker"])


@pytest.mark.parametrize("name", EVERYTHING)
def test_the_comparison_of_runs_sees_any_difference(name: str) -> None:
    ours = [dict.fromkeys(EVERYTHING, 1) for _ in range(2)]
    with pytest.raises(AssertionError, match=f"{name} after iteration 1"):
        assert_same_training(ours, [ours[0], ours[1] | {name: 2}], EVERYTHING)


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
def test_the_comparison_of_weights_sees_one_step_unscaled_by_half_the_scale(half: bool) -> None:
    tolerance = TOLERANCE["fp16" if half else "fp32"]
    ours = trained(2, "loss", False)[Setup("FSDP2", half), "gradscale"][0]
    wrong = copy.deepcopy(ours)
    weights = whole_weights(ours)
    wrong[-1]["weights"] = (weights[-1] + (weights[-1] - weights[-2])).tobytes()
    with pytest.raises(AssertionError, match="Mismatched elements"):
        assert_close_weights(wrong, ours, tolerance)
    with pytest.raises(AssertionError):
        assert_close_weights(ours[:1], ours[:1], tolerance)


NO_DEVICE = "Cannot access accelerator device when none is available"


@pytest.mark.parametrize(
    ("setup", "change", "message"),
    [
        *(pytest.param(setup, "nothing", NO_DEVICE, id=str(setup)) for setup in OFFLOADED_FSDP1),
        pytest.param(Setup("FSDP2", half=False, offload=True), "pinned memory", NO_DEVICE, id="FSDP2-pinned"),
        pytest.param(
            Setup("FSDP1", half=False), "no device", "FSDP needs a non-CPU accelerator device", id="FSDP1-no-device"
        ),
    ],
)
def test_some_setups_run_only_where_there_is_an_accelerator(
    scenarios: Any, setup: Setup, change: str, message: str
) -> None:
    if require("torch").accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    for failure in GlooWorld(2).run(scenarios.train_once, setup, change):
        assert failure.kind == "RuntimeError"
        assert message in failure.message


@pytest.mark.parametrize("parallel", MESHES)
def test_an_infinity_on_each_rank_of_a_mesh_is_found_on_all_without_a_group(scenarios: Any, parallel: str) -> None:
    cases = [(MESHES[parallel], parallel, library, bad) for bad in range(4) for library in LIBRARIES]
    answers = [results for _, results in each(GlooWorld(4), scenarios.mesh_overflow, cases)]
    for bad_rank, (theirs, ours) in enumerate(zip(answers[::2], answers[1::2], strict=True)):
        assert [result["finite here"] for result in ours] == [rank != bad_rank for rank in range(4)]
        for result in ours:
            assert result["found"] == {"cpu": 1.0}
            # Each gradient is the initial one times exactly 1/8.
            assert set(result["unscaled"]) == {True}
            assert result["stages"] == ("UNSCALED", "STEPPED")
            assert (result["stepped"], result["scale"]) == (False, 4.0)
        if parallel != "hybrid":
            # Torch's scaler does the same, but where a dimension replicates.
            assert ours == theirs


@pytest.mark.parametrize("max_norm", [0.01, 1e6])
@pytest.mark.parametrize("parallel", MESHES)
def test_clipping_while_unscaling_is_torchs_unscaling_and_clipping(
    scenarios: Any, parallel: str, max_norm: float
) -> None:
    cases = [(MESHES[parallel], parallel, library, max_norm) for library in LIBRARIES]
    (_, theirs), (_, ours) = each(GlooWorld(4), scenarios.clip, cases)
    for one, other in zip(ours, theirs, strict=True):
        assert one["norm"] == pytest.approx(other["norm"], rel=1e-5)
        assert one["norm"] == ours[0]["norm"] > 0.02
        for gradient, expected in zip(one["gradients"], other["gradients"], strict=True):
            assert gradient == pytest.approx(expected, rel=1e-5, abs=1e-9)
