"""Where torch's scalers fail on several ranks, on the very script on which gradscale does not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import worlds
from axes import require
from batches import Batch, Case, survivors
from tiers import later

pytestmark = [pytest.mark.torch, pytest.mark.tier("ranks")]

SIZES = [2, *later("all", 3)]
LIBRARIES = ("torch", "gradscale")
FUSED = ["SGD", "Adam", "AdamW", "Adagrad"]
DRIFTS = {
    "scale": "scale from 4.0 to 8.0 (here {})",
    "tracker": "growth_tracker from 0 to 2 (here {})",
    "policy": "policy (here DynamicScale(init_scale=4.0, growth_factor=2.0, backoff_factor=0.5, growth_interval={}",
}
OWN = {"scale": (4.0, 8.0), "tracker": (0, 2), "policy": (3, 5)}
# Seconds; the first time is what the ranks wait.
ABSENCE = (("timeout", 1.0), ("late", 3.0))
ONES, MOVED = [1.0] * 3, [0.0] * 3


@pytest.fixture(autouse=True)
def _torch_is_there() -> None:
    require("torch")


def cases(size: int) -> list[Case]:
    """Return what this file asks of a world of some ranks, of scenarios on plain tensors."""
    ranks = range(size)
    asked: list[Case] = []
    if size == 4:
        return [("list_of_groups", bad) for bad in ranks]
    for library in LIBRARIES:
        asked += [("fused", library, name, (bad,), False) for name in FUSED for bad in ranks]
        asked += [("fused", library, name, tuple(ranks), True) for name in FUSED]
        asked += [("drift", library, what, drifting, drifting > 0) for what in DRIFTS for drifting in ranks]
        asked += [("nothing_here", library, empty, (empty - 1) % size, how) for empty in ranks for how in (False, True)]
        asked += [("missing_call", library, drifting) for drifting in ranks]
        asked += [("grow", library)]
    asked += [("never_scales", silent, is_fused) for silent in ranks for is_fused in (False, True)]
    asked += [("closure", bad) for bad in ranks]
    asked += [("numpy_arrays", bad) for bad in ranks]
    # The last, since ranks go different ways in them.
    return asked + [
        ("absence", how, absent, is_fused, ABSENCE)
        for how in ("raises", "is late")
        for absent, is_fused in zip(ranks, (False, True, False), strict=False)
    ]


def mesh_cases(size: int) -> list[Case]:
    """Return what this file asks of a world of some ranks, of scenarios on DTensors."""
    ranks = range(size)
    return [
        *(("no_gradient_of_a_mesh", library, empty) for library in LIBRARIES for empty in ranks),
        *(("two_meshes", given, bad) for given in (False, True) for bad in (None, *ranks)),
        ("clip_dtensors_and_plain_tensors",),
    ]


def fsdp_cases(size: int) -> list[Case]:
    """Return what this file asks of a world of 2 x 2 ranks, of scenarios on FSDP2."""
    counts = [("count_collectives", library, explicit) for library in LIBRARIES for explicit in (False, True)]
    overflows: list[Case] = [
        ("mesh_overflow", (2, 2), parallel, library, bad, is_reversed)
        for parallel, is_reversed in (("hybrid", False), ("data and tensor", True))
        for library in LIBRARIES
        for bad in range(size)
    ]
    return counts + overflows


PLAIN = Batch("torch_sharded_scenarios", cases, limit=180.0)
MESH = Batch("mesh_scenarios", mesh_cases)
FSDP = Batch("fsdp_scenarios", fsdp_cases, limit=120.0)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("size", SIZES)
def test_a_fused_optimizer_is_skipped_on_all_ranks_though_torchs_ranks_diverge(size: int, name: str) -> None:
    for bad_rank in range(size):
        theirs = PLAIN.answer(size, "fused", "torch", name, (bad_rank,), False)
        for rank, result in enumerate(theirs):
            assert result["scale"] == (2.0 if rank == bad_rank else 4.0)
            assert (result["weights"][0] == ONES) == (rank == bad_rank)
        for result in PLAIN.answer(size, "fused", "gradscale", name, (bad_rank,), False):
            assert result == {
                "error": None,
                "told": [1.0],
                "scale": 2.0,
                "weights": [ONES, ONES],
                "skipped": True,
            }


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("size", SIZES)
def test_fused_kernels_skip_what_overflows_on_all_ranks_though_torchs_do_not(size: int, name: str) -> None:
    for result in PLAIN.answer(size, "fused", "torch", name, tuple(range(size)), True):
        # Torch's verdict is a sum over the ranks, and kernels compare it with 1.
        assert result["told"] == [[float(size)]]
        assert not any(map(math.isfinite, result["weights"][0]))
        assert result["weights"][1] != ONES
        if name != "SGD":
            assert "broadcast shape" in result["error"]
    for result in PLAIN.answer(size, "fused", "gradscale", name, tuple(range(size)), True):
        assert result == {"error": None, "told": [1.0], "scale": 2.0, "weights": [ONES, ONES], "skipped": True}


@pytest.mark.parametrize("size", SIZES)
def test_the_scale_stays_a_float32_though_torchs_grows_to_infinity(size: int) -> None:
    assert PLAIN.answer(size, "grow", "torch") == [[math.inf] * 3] * size
    assert PLAIN.answer(size, "grow", "gradscale") == [[2.0**127] * 3] * size


@pytest.mark.parametrize("what", DRIFTS)
@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_has_drifted_is_an_error_on_all_though_torch_goes_on(size: int, what: str) -> None:
    for drifting_rank in range(size):
        theirs = PLAIN.answer(size, "drift", "torch", what, drifting_rank, drifting_rank > 0)
        assert [(result["failure"], result["steps"]) for result in theirs] == [(None, 4)] * size
        states = [result["state"] for result in theirs]
        assert all((state != states[drifting_rank]) == (rank != drifting_rank) for rank, state in enumerate(states))
        for rank, result in enumerate(PLAIN.answer(size, "drift", "gradscale", what, drifting_rank, drifting_rank > 0)):
            assert result["failure"].kind == "ScaleDesyncError"
            assert f"rank {rank} of {size} in iteration 1" in result["failure"].message
            assert DRIFTS[what].format(OWN[what][rank == drifting_rank]) in result["failure"].message
            assert result["steps"] == 0


@pytest.mark.parametrize("size", SIZES)
def test_a_call_that_one_rank_leaves_out_is_an_error_on_all_though_torch_swaps_verdicts(size: int) -> None:
    for drifting_rank in range(size):
        theirs = PLAIN.answer(size, "missing_call", "torch", drifting_rank)
        assert [result["failure"] for result in theirs] == [None] * size
        # The others' overflow in A has skipped the drifting rank's B, which was fine.
        seconds = [result["second"] for result in theirs]
        assert all((second == [0.5] * 3) == (rank == drifting_rank) for rank, second in enumerate(seconds))
        for rank, result in enumerate(PLAIN.answer(size, "missing_call", "gradscale", drifting_rank)):
            assert result["failure"].kind == "ScaleDesyncError"
            assert "call of the iteration from 0 to 1" in result["failure"].message
            assert "iteration from 1 to 2" in result["failure"].message
            assert f"rank {rank} of {size}" in result["failure"].message
            # Nobody has moved.
            assert (result["steps"], result["second"]) == ({"A": 0, "B": 0}, ONES)


@pytest.mark.parametrize("is_fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("size", SIZES)
def test_a_rank_without_gradients_takes_part(size: int, is_fused: bool) -> None:
    expected = [(4.0, MOVED, 1, 1), (2.0, MOVED, 1, 1), (2.0, [-1.0] * 3, 1, 1)]
    for empty_rank in range(size):
        bad_rank = (empty_rank - 1) % size
        theirs = PLAIN.answer(size, "nothing_here", "torch", empty_rank, bad_rank, is_fused)
        if is_fused:
            # Torch sends nothing, and only the rank that has overflowed backs off.
            assert [result["records"][1][0] == 2.0 for result in theirs] == [rank == bad_rank for rank in range(size)]
            assert all(record[2:] == (0, 0) for result in theirs for record in result["records"])
        else:
            assert [result["records"] for result in theirs] == [expected] * size
        ours = PLAIN.answer(size, "nothing_here", "gradscale", empty_rank, bad_rank, is_fused)
        assert [result["records"] for result in ours] == [expected] * size


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_without_gradients_of_a_mesh_takes_part_though_torchs_leaves_the_others_waiting(size: int) -> None:
    for empty_rank in range(size):
        for rank, result in enumerate(MESH.answer(size, "no_gradient_of_a_mesh", "torch", empty_rank)):
            missing = "No inf checks were recorded for this optimizer." if rank == empty_rank else None
            assert (result["failure"], result["steps"]) == (missing, int(rank != empty_rank))
        for result in MESH.answer(size, "no_gradient_of_a_mesh", "gradscale", empty_rank):
            assert result == {"failure": None, "steps": 1, "scale": 4.0}


@pytest.mark.parametrize("size", SIZES)
def test_dtensors_of_two_meshes_need_a_group(size: int) -> None:
    for result in MESH.answer(size, "two_meshes", False, None):
        assert result["failure"].kind == "InvalidValueError"
        assert all(mesh in result["failure"].message for mesh in result["meshes"])
        assert "group=" in result["failure"].message
        assert (result["steps"], result["scale"], result["gradient"]) == (0, 4.0, [4.0, 4.0])
    for result in MESH.answer(size, "two_meshes", True, None):
        assert result["failure"] is None
        assert (result["steps"], result["scale"], result["gradient"]) == (1, 4.0, [1.0, 1.0])
    for bad_rank in range(size):
        for result in MESH.answer(size, "two_meshes", True, bad_rank):
            assert (result["failure"], result["steps"], result["scale"]) == (None, 0, 2.0)


@pytest.mark.parametrize("size", SIZES)
def test_clipping_while_unscaling_needs_no_gradient_on_each_rank(size: int) -> None:
    import mesh_scenarios

    cases = [(empty_rank,) for empty_rank in range(size)]
    by_case = worlds.GlooWorld(size).run_each(mesh_scenarios.clip_without_a_gradient, cases)
    for empty_rank, results in enumerate(by_case):
        assert not any(isinstance(result, worlds.Failure) for result in results), results
        norm = math.sqrt(2 * (size - 1))
        for rank, result in enumerate(results):
            assert result["norm"] == pytest.approx(norm, rel=1e-5)
            moved = 0.0 if rank == empty_rank else 0.5 / norm
            assert result["weights"] == pytest.approx([1.0 - moved] * 2, rel=1e-4)
            assert result["steps"] == 1


@pytest.mark.parametrize("size", SIZES)
def test_clipping_dtensors_beside_plain_tensors_is_refused_before_anything_is_unscaled(size: int) -> None:
    for result in MESH.answer(size, "clip_dtensors_and_plain_tensors"):
        assert result["failure"].kind == "InvalidValueError"
        assert result["gradient"] == [4.0] * 3


@pytest.mark.parametrize("is_fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_has_never_scaled_takes_part(size: int, is_fused: bool) -> None:
    for silent_rank in range(size):
        for result in PLAIN.answer(size, "never_scales", silent_rank, is_fused):
            assert result["records"] == [(4.0, MOVED), (2.0, MOVED), (2.0, [-1.0] * 3)]


@pytest.mark.parametrize("size", SIZES)
def test_a_closure_that_overflows_on_one_rank_is_evaluated_again_on_all(size: int) -> None:
    for bad_rank in range(size):
        results = PLAIN.answer(size, "closure", bad_rank)
        for result in results:
            assert result == results[0]
            # Squares of three ones, at ever lower scales until no rank overflows.
            assert result["scaled"][:3] == [12.0, 6.0, 3.0]
            assert len(result["scaled"]) == 4
            assert (result["scale"], result["report"]) == (1.0, (False, 1.0, 2))
            assert all(0.0 < weight < 1.0 for weight in result["weights"])


@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale_ and step"])
def test_each_optimizer_costs_one_all_reduce_of_two_integers_where_torch_makes_four(explicit: bool) -> None:
    # Two dtypes for each optimizer, and two dimensions of the mesh.
    for result in FSDP.answer(4, "count_collectives", "torch", explicit):
        assert [count for count, _ in result["counts"]] == [8] * 3
    for result in FSDP.answer(4, "count_collectives", "gradscale", explicit):
        assert result["counts"] == [(2, [("c10d::allreduce_", 2, "torch.int64")] * 2)] * 3


def test_replicas_of_a_mesh_stay_together_though_torchs_diverge() -> None:
    for bad_rank in range(4):
        theirs = FSDP.answer(4, "mesh_overflow", (2, 2), "hybrid", "torch", bad_rank, False)
        # The mesh's first dimension replicates, and torch does not agree over it.
        for rank, result in enumerate(theirs):
            shares = rank // 2 == bad_rank // 2
            assert (result["stepped"], result["scale"]) == ((False, 4.0) if shares else (True, 8.0))
        for result in FSDP.answer(4, "mesh_overflow", (2, 2), "hybrid", "gradscale", bad_rank, False):
            assert (result["found"], result["stepped"], result["scale"]) == ({"cpu": 1.0}, False, 4.0)


def test_tensor_ranks_stay_together_though_torchs_diverge_with_a_replicated_parameter_first() -> None:
    for bad_rank in range(4):
        theirs = FSDP.answer(4, "mesh_overflow", (2, 2), "data and tensor", "torch", bad_rank, True)
        # Torch agrees over the dimensions in which the first gradient is sharded.
        for rank, result in enumerate(theirs):
            shares = rank % 2 == bad_rank % 2
            assert (result["stepped"], result["scale"]) == ((False, 4.0) if shares else (True, 8.0))
        for result in FSDP.answer(4, "mesh_overflow", (2, 2), "data and tensor", "gradscale", bad_rank, True):
            assert (result["found"], result["stepped"], result["scale"]) == ({"cpu": 1.0}, False, 4.0)


def test_a_list_of_groups_is_agreed_over_in_turn() -> None:
    for bad_rank in range(4):
        for result in PLAIN.answer(4, "list_of_groups", bad_rank):
            assert result == {"sent": 2, "scale": 1.0, "steps": 0}


@pytest.mark.parametrize("how", ["raises", "is late"])
@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_does_not_come_is_a_timeout_on_the_others(size: int, how: str) -> None:
    for absent, is_fused in zip(range(size), (False, True, False), strict=False):
        results = PLAIN.outcome(size, "absence", how, absent, is_fused, ABSENCE)
        for rank, result in enumerate(results):
            if rank == absent:
                if how == "raises":
                    assert result.kind == "ValueError"
                continue
            assert_told(result, rank, size, {"CollectiveTimeoutError"})
            assert result["failures"][0].message.startswith(
                f"rank {rank} of {size} waited 1 s for the agreement on a step in iteration 2"
            )
            assert 0.9 <= result["seconds"] < 30.0


def assert_told(result: dict[str, Any], rank: int, size: int, kinds: set[str]) -> None:
    """Assert that a rank was told twice, with an error of some kind, and has not stepped."""
    assert [failure.kind in kinds for failure in result["failures"]] == [True, True], result["failures"]
    assert all(f"rank {rank} of {size}" in failure.message for failure in result["failures"])
    assert (result["steps"], result["weights"]) == (1, MOVED)


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_dies_is_an_error_on_the_others(size: int) -> None:
    dead_rank = size - 1
    settings = (("timeout", 10.0),)
    results = survivors(size, dead_rank, 7, "torch_sharded_scenarios", "absence", "ends", dead_rank, False, settings)
    for rank, result in enumerate(results):
        if rank == dead_rank:
            assert result is None
            continue
        assert_told(result, rank, size, {"BackendError", "CollectiveTimeoutError"})
        assert result["seconds"] < 60.0


@pytest.mark.numpy
@pytest.mark.parametrize("size", SIZES)
def test_numpy_arrays_agree_over_a_process_group_of_torch(size: int) -> None:
    for bad_rank in range(size):
        for rank, result in enumerate(PLAIN.answer(size, "numpy_arrays", bad_rank)):
            here = int(rank == bad_rank)
            assert result["records"] == [(False, 4.0, 0, 1), (True, 4.0, here, 1), (False, 2.0, 0, 2)]
            assert result["gradient"] == [2.0] * 3


@pytest.mark.mpi
@pytest.mark.parametrize("size", SIZES)
def test_the_sharded_scaler_of_torch_tensors_agrees_over_mpi(size: int) -> None:
    require("mpi")
    import torch_sharded_scenarios

    asked = [("over_mpi", name, fused, bad) for name, fused in (("SGD", False), ("AdamW", True)) for bad in range(size)]
    world = worlds.MPIWorld(size)
    for case, results in zip(asked, world.run_each(torch_sharded_scenarios.run_case, asked), strict=True):
        assert not any(isinstance(result, worlds.Failure) for result in results), results
        for result in results:
            skipped, used, scales, weights = zip(*result["records"], strict=True)
            assert skipped == (False, True, False), case
            assert (used, scales) == ((4.0, 4.0, 2.0), (4.0, 2.0, 2.0))
            assert weights[0] == weights[1] != weights[2]
            assert result["records"] == results[0]["records"]
