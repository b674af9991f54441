"""Where torch's scalers fail on several ranks, on the very script on which gradscale does not."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
from axes import require
from worlds import GlooWorld, each

pytestmark = [pytest.mark.torch, pytest.mark.tier("ranks")]

LIBRARIES = ("torch", "gradscale")
FUSED = ["SGD", "Adam", "AdamW", "Adagrad"]
DRIFTS = {
    "scale": "scale from 4.0 to 8.0 (here {})",
    "tracker": "growth_tracker from 0 to 2 (here {})",
    "policy": "policy (here DynamicScale(init_scale=4.0, growth_factor=2.0, backoff_factor=0.5, growth_interval={}",
}
OWN = {"scale": (4.0, 8.0), "tracker": (0, 2), "policy": (3, 5)}
ONES, MOVED = [1.0] * 3, [0.0] * 3


@pytest.fixture
def scenarios() -> Any:
    """Return what the ranks do on plain tensors and DTensors."""
    require("torch")
    return importlib.import_module("torch_sharded_scenarios")


@pytest.fixture
def fsdp() -> Any:
    """Return what the ranks do with FSDP2."""
    require("torch")
    return importlib.import_module("fsdp_scenarios")


def both(world: GlooWorld, scenario: Any, cases: list[tuple[Any, ...]]) -> Iterator[tuple[list[Any], list[Any]]]:
    """Yield for each case what the ranks returned with torch's scaler, and with gradscale's."""
    asked = [(library, *case) for case in cases for library in LIBRARIES]
    answers = [results for _, results in each(world, scenario, asked)]
    yield from zip(answers[::2], answers[1::2], strict=True)


def skipped_once(records: list[dict[str, Any]]) -> bool:
    """Tell whether the second of three steps was skipped, and no other, with the scale halved then."""
    first, second, third = (record["weights"] for record in records)
    return first == second != third and [record["scale"] for record in records] == [4.0, 2.0, 2.0]


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_optimizer_is_skipped_on_all_ranks_though_torchs_ranks_diverge(
    gloo: GlooWorld, scenarios: Any, name: str
) -> None:
    cases = [({bad_rank: math.inf}, {"optimizer": name, "fused": True}) for bad_rank in range(gloo.size)]
    for bad_rank, (theirs, ours) in enumerate(both(gloo, scenarios.train, cases)):
        assert [skipped_once(records) for records in theirs] == [rank == bad_rank for rank in range(gloo.size)]
        assert all(map(skipped_once, ours))
        assert [[record["told"] for record in records] for records in ours] == [[[0.0], [1.0], [0.0]]] * gloo.size


@pytest.mark.parametrize("name", FUSED)
def test_fused_kernels_skip_what_overflows_on_all_ranks_though_torchs_do_not(
    gloo: GlooWorld, scenarios: Any, name: str
) -> None:
    settings = {"optimizer": name, "fused": True, "explicit": True}
    ((theirs, ours),) = both(gloo, scenarios.train, [(dict.fromkeys(range(gloo.size), math.inf), settings)])
    for records in theirs:
        # Torch's verdict is a sum over the ranks, and kernels compare it with 1.
        assert records[1]["told"] == [[float(gloo.size)]]
        assert not all(map(math.isfinite, records[1]["weights"][0]))
        assert records[1]["weights"][1] != records[0]["weights"][1]
        if name != "SGD":
            assert "broadcast shape" in records[1]["error"]
    assert all(map(skipped_once, ours))
    assert [record["error"] for records in ours for record in records] == [""] * 3 * gloo.size


def test_the_scale_stays_a_float32_though_torchs_grows_to_infinity(gloo: GlooWorld, scenarios: Any) -> None:
    ((theirs, ours),) = both(gloo, scenarios.grow, [()])
    assert theirs == [[math.inf] * 3] * gloo.size
    assert ours == [[2.0**127] * 3] * gloo.size


@pytest.mark.parametrize("what", DRIFTS)
def test_a_rank_that_has_drifted_is_an_error_on_all_though_torch_goes_on(
    gloo: GlooWorld, scenarios: Any, what: str
) -> None:
    cases = [(what, rank, rank > 0) for rank in range(gloo.size)]
    for drifting_rank, (theirs, ours) in enumerate(both(gloo, scenarios.drift, cases)):
        assert [(result["failure"], result["steps"]) for result in theirs] == [(None, 4)] * gloo.size
        states = [result["state"] for result in theirs]
        assert all((state != states[drifting_rank]) == (rank != drifting_rank) for rank, state in enumerate(states))
        for rank, result in enumerate(ours):
            assert result["failure"].kind == "ScaleDesyncError"
            assert f"rank {rank} of {gloo.size} in iteration 1" in result["failure"].message
            assert DRIFTS[what].format(OWN[what][rank == drifting_rank]) in result["failure"].message
            assert result["steps"] == 0


def test_a_call_that_one_rank_leaves_out_is_an_error_on_all_though_torch_swaps_verdicts(
    gloo: GlooWorld, scenarios: Any
) -> None:
    cases = [(rank,) for rank in range(gloo.size)]
    for drifting_rank, (theirs, ours) in enumerate(both(gloo, scenarios.missing_call, cases)):
        assert [result["failure"] for result in theirs] == [None] * gloo.size
        # The others' overflow in A has skipped the drifting rank's B, which was fine.
        is_skipped = [result["second"] == [0.5] * 3 for result in theirs]
        assert is_skipped == [rank == drifting_rank for rank in range(gloo.size)]
        for rank, result in enumerate(ours):
            assert result["failure"].kind == "ScaleDesyncError"
            for said in ("call of the iteration from 0 to 1", "iteration from 1 to 2", f"rank {rank} of {gloo.size}"):
                assert said in result["failure"].message
            # Nobody has moved.
            assert (result["steps"], result["second"]) == ([0, 0], ONES)


@pytest.mark.parametrize("is_fused", [False, True], ids=["plain", "fused"])
def test_a_rank_without_gradients_takes_part(gloo: GlooWorld, scenarios: Any, is_fused: bool) -> None:
    cases = [({(empty - 1) % gloo.size: math.inf}, {"empty": empty, "fused": is_fused}) for empty in range(gloo.size)]
    for empty_rank, (theirs, ours) in enumerate(both(gloo, scenarios.train, cases)):
        sent = [[record["sent"] for record in records[1:]] for records in (*theirs, *ours)]
        if is_fused:
            # Torch sends nothing, and only the rank that has overflowed backs off.
            bad_rank = (empty_rank - 1) % gloo.size
            assert [records[1]["scale"] == 2.0 for records in theirs] == [r == bad_rank for r in range(gloo.size)]
            assert sent[: gloo.size] == [[(0, 0)] * 2] * gloo.size
        else:
            assert all(map(skipped_once, theirs))
            assert sent[: gloo.size] == [[(1, 1)] * 2] * gloo.size
        assert all(map(skipped_once, ours))
        assert sent[gloo.size :] == [[(1, 1)] * 2] * gloo.size


@pytest.mark.parametrize("is_fused", [False, True], ids=["plain", "fused"])
def test_a_rank_that_has_never_scaled_takes_part(gloo: GlooWorld, scenarios: Any, is_fused: bool) -> None:
    cases = [
        ("gradscale", {(silent + 1) % gloo.size: math.inf}, {"silent": silent, "fused": is_fused})
        for silent in range(gloo.size)
    ]
    for _, results in each(gloo, scenarios.train, cases):
        assert all(map(skipped_once, results))


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_a_rank_without_gradients_of_a_mesh_takes_part_though_torchs_leaves_the_others_waiting(
    gloo: GlooWorld, scenarios: Any, max_norm: float | None
) -> None:
    norm = math.sqrt(2 * (gloo.size - 1))
    step = 1.0 if max_norm is None else max_norm / norm
    for empty_rank in range(gloo.size):
        cases = [("torch", empty_rank, None), ("gradscale", empty_rank, max_norm)]
        (_, theirs), (_, ours) = each(gloo, scenarios.no_gradient_of_a_mesh, cases)
        for rank, result in enumerate(theirs):
            missing = "No inf checks were recorded for this optimizer." if rank == empty_rank else None
            assert (result["failure"], result["steps"]) == (missing, int(rank != empty_rank))
        for rank, result in enumerate(ours):
            assert (result["failure"], result["steps"]) == (None, 1)
            assert result["norm"] == (None if max_norm is None else pytest.approx(norm, rel=1e-5))
            assert result["weights"] == pytest.approx([1.0 - (rank != empty_rank) * step] * 2, rel=1e-4)


def test_dtensors_of_two_meshes_need_a_group(gloo: GlooWorld, scenarios: Any) -> None:
    cases = [(False, None), (True, None), *((True, bad_rank) for bad_rank in range(gloo.size))]
    for (is_given, bad_rank), results in each(gloo, scenarios.two_meshes, cases):
        for rank, result in enumerate(results):
            if is_given:
                end = (
                    (1, 4.0, [1.0, 1.0]) if bad_rank is None else (0, 2.0, [math.inf if rank == bad_rank else 1.0] * 2)
                )
                assert (result["failure"], result["end"]) == (None, end)
                continue
            assert result["failure"].kind == "InvalidValueError"
            assert all(said in result["failure"].message for said in (*result["meshes"], "group="))
            assert result["end"] == (0, 4.0, [4.0, 4.0])


def test_clipping_dtensors_beside_plain_tensors_is_refused_before_anything_is_unscaled(
    gloo: GlooWorld, scenarios: Any
) -> None:
    for failure, gradient in gloo.run(scenarios.clip_dtensors_and_plain_tensors):
        assert failure.kind == "InvalidValueError"
        assert gradient == [4.0] * 3


def test_a_closure_that_overflows_on_one_rank_is_evaluated_again_on_all(gloo: GlooWorld, scenarios: Any) -> None:
    for _, results in each(gloo, scenarios.closure, [(bad_rank,) for bad_rank in range(gloo.size)]):
        for result in results:
            assert result == results[0]
            # Squares of three ones, at ever lower scales until no rank overflows.
            assert result["scaled"][:3] == [12.0, 6.0, 3.0]
            assert len(result["scaled"]) == 4
            assert (result["scale"], result["report"]) == (1.0, (False, 1.0, 2))
            assert all(0.0 < weight < 1.0 for weight in result["weights"])


@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale_ and step"])
def test_each_optimizer_costs_one_all_reduce_of_two_integers_where_torch_makes_four(fsdp: Any, explicit: bool) -> None:
    # Two dtypes for each optimizer, and two dimensions of the mesh.
    ((theirs, ours),) = both(GlooWorld(4), fsdp.count_collectives, [(explicit,)])
    assert [[count for count, _ in result["counts"]] for result in theirs] == [[8] * 3] * 4
    assert [result["counts"] for result in ours] == [[(2, [("c10d::allreduce_", 2, "torch.int64")] * 2)] * 3] * 4


@pytest.mark.parametrize("parallel", ["hybrid", "data and tensor"])
def test_ranks_of_a_mesh_stay_together_though_torchs_diverge(fsdp: Any, parallel: str) -> None:
    # Torch does not agree over a dimension that replicates, nor over one in which the first gradient is not sharded.
    apart = {"hybrid": lambda rank: rank // 2, "data and tensor": lambda rank: rank % 2}[parallel]
    asked = [((2, 2), parallel, library, bad, parallel != "hybrid") for bad in range(4) for library in LIBRARIES]
    answers = [results for _, results in each(GlooWorld(4), fsdp.mesh_overflow, asked)]
    for bad_rank, (theirs, ours) in enumerate(zip(answers[::2], answers[1::2], strict=True)):
        for rank, result in enumerate(theirs):
            shares = apart(rank) == apart(bad_rank)
            assert (result["stepped"], result["scale"]) == ((False, 4.0) if shares else (True, 8.0))
        for result in ours:
            assert (result["found"], result["stepped"], result["scale"]) == ({"cpu": 1.0}, False, 4.0)


def test_a_list_of_groups_is_agreed_over_in_turn(scenarios: Any) -> None:
    cases = [("gradscale", {bad_rank: math.inf}, {"over": "dimensions"}) for bad_rank in range(4)]
    for _, results in each(GlooWorld(4), scenarios.train, cases):
        assert all(map(skipped_once, results))
        assert [[record["sent"][0] for record in records[1:]] for records in results] == [[2, 2]] * 4
