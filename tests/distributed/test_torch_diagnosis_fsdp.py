"""diagnose() of sharded models over gloo: FSDP1, FSDP2 and meshes, with a bad value on each rank in turn."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import pytest
from axes import require
from fsdp_setups import Setup
from worlds import GlooWorld, each

pytestmark = [pytest.mark.torch, pytest.mark.tier("ranks")]

SCALE = 1024.0
# How the model is spread, the optimizer, and the numbers of ranks.
RUNS = {
    "FSDP2-plain": (Setup("FSDP2", half=False), "plain", (2, 3)),
    "FSDP2-fused": (Setup("FSDP2", half=False), "fused", (2, 3)),
    "FSDP2-late": (Setup("FSDP2", half=False), "late", (3,)),
    "FSDP2-fp16": (Setup("FSDP2", half=True), "plain", (2,)),
    "FSDP1-original": (Setup("FSDP1", half=False, original=True), "plain", (3,)),
    "FSDP1-flat": (Setup("FSDP1", half=False, original=False), "plain", (2,)),
}
# The shape of the mesh, what its ranks are for, and whether the scaler is given the groups of its dimensions.
MESHES = {"hybrid-dimensions": ((2, 2), "hybrid", True), "data-and-tensor-whole": ((2, 2), "data and tensor", False)}

Report = dict[str, Any]
Found = dict[tuple[int, ...], dict[str, Any]]


@pytest.fixture(autouse=True)
def scenarios() -> Any:
    """Return what the ranks do."""
    require("torch")
    return importlib.import_module("torch_diagnosis_scenarios")


@functools.cache
def each_rank_in_turn(run: str, size: int) -> list[list[dict[str, Any]]]:
    """Return what each rank was told in each iteration of a run."""
    scenario = importlib.import_module("torch_diagnosis_scenarios").each_rank_in_turn
    ((_, results),) = each(GlooWorld(size), scenario, [RUNS[run][:2]])
    return results


def runs(*names: str) -> pytest.MarkDecorator:
    """Parametrize a test over runs and their numbers of ranks."""
    pairs = [(name, size) for name in names for size in RUNS[name][2]]
    return pytest.mark.parametrize(("run", "size"), pairs, ids=[f"{name}-{size}" for name, size in pairs])


def found(report: Report) -> Found:
    """Return the entries of a report by rank and name, as the scenarios say what is expected."""
    by_rank: Found = {}
    for entry in report["entries"]:
        value = None if entry["missing"] else (entry["shape"], entry["inf"], entry["largest"])
        by_rank.setdefault(tuple(entry["rank"]), {})[entry["name"]] = value
    return by_rank


def assert_is_told(report: Report, expected: Found, bad: tuple[int, ...] | None) -> None:
    """Assert that a report says of each rank what is expected, and names the only bad one."""
    assert found(report) == expected
    ranks = [tuple(entry["rank"]) for entry in report["entries"] if entry["inf"] or entry["nan"]]
    assert ranks == ([] if bad is None else [bad])
    if bad is None:
        assert report["cause"] == "none"
        return
    worst = report["entries"][0]
    assert tuple(worst["rank"]) == bad
    assert report["cause"] == "scale"
    assert f"{worst['name']} on rank {'/'.join(map(str, bad))} overflows" in report["explanation"]


@runs(*RUNS)
def test_a_bad_shard_on_each_rank_in_turn_is_named_on_every_rank_at_every_stage(run: str, size: int) -> None:
    results = each_rank_in_turn(run, size)
    for iteration in range(size + 1):
        records = [result[iteration] for result in results]
        bad = (iteration,) if iteration < size else None
        scale = SCALE / 2**iteration
        expected = {(rank,): record["expected"] for rank, record in enumerate(records)}
        assert sum(entry is not None for entry in expected[0,].values()) > 0
        for rank, record in enumerate(records):
            # Before the step, after it and after the update.
            for report in record["gathered"]:
                assert_is_told(report, expected, bad)
                assert (report["scale"], report["iteration"]) == (scale, iteration + 1)
            assert record["gathered"] == records[0]["gathered"]
            for own in record["own"]:
                assert found(own) == {(): expected[rank,]}
            assert record["report"] == (bad is not None, scale)
            steps = [(number + 1, number < size, SCALE / 2**number) for number in range(iteration + 1)]
            assert record["history"] == steps


@runs(*(run for run in RUNS if run != "FSDP2-late"))
def test_skipped_steps_are_diagnosed_by_themselves_alike_on_every_rank(run: str, size: int) -> None:
    results = each_rank_in_turn(run, size)
    for iteration in range(size):
        records = [result[iteration] for result in results]
        expected = {(rank,): record["expected"] for rank, record in enumerate(records)}
        for record in records:
            assert_is_told(record["overflow"], expected, (iteration,))
            assert record["overflow"] == records[0]["overflow"] == record["gathered"][1]
            assert record["overflow"]["loss_nonfinite"] == 0
    assert all(result[size]["overflow"] is None for result in results)


@runs("FSDP2-plain", "FSDP2-fused", "FSDP1-flat")
def test_callbacks_of_sharded_models_run_on_rank_0_unless_told_otherwise(run: str, size: int) -> None:
    for rank, result in enumerate(each_rank_in_turn(run, size)):
        skipped = list(range(1, size + 1))
        assert result[-1]["told"] == (skipped if rank == 0 else [], skipped)
        assert [record["told overflow"] for record in result] == [True] * size + [None]


@runs("FSDP2-plain", "FSDP1-original")
def test_the_parts_of_all_ranks_are_the_whole_model(run: str, size: int) -> None:
    report = each_rank_in_turn(run, size)[0][0]["gathered"][0]
    sizes: dict[str, int] = {}
    for entry in report["entries"]:
        name = entry["name"].replace("_fsdp_wrapped_module.", "")
        sizes[name] = sizes.get(name, 0) + entry["size"]
    assert sizes == {"0.weight": 48, "0.bias": 8, "2.0.weight": 64, "2.0.bias": 8, "3.weight": 32, "3.bias": 4}
    # Of the last layer, whose 4 rows do not go round, the third rank has nothing.
    empty = [entry for entry in report["entries"] if entry["size"] == 0]
    if size == 3 and run == "FSDP2-plain":
        assert [(entry["name"], entry["rank"], entry["shape"]) for entry in empty] == [
            ("3.weight", [2], [0, 8]),
            ("3.bias", [2], [0]),
        ]
        assert all(entry["largest"] is None and not entry["missing"] for entry in empty)


@pytest.mark.parametrize("wrong", ["largest", "rank", "name", "shape", "inf"])
def test_the_comparison_of_reports_sees_any_difference(wrong: str) -> None:
    results = each_rank_in_turn("FSDP2-plain", 2)
    expected = {(rank,): result[0]["expected"] for rank, result in enumerate(results)}
    report = results[0][0]["gathered"][0]
    other = {"largest": 3.0, "rank": [1], "name": "other", "shape": [1], "inf": 2}[wrong]
    changed = report | {"entries": [report["entries"][0] | {wrong: other}, *report["entries"][1:]]}
    assert_is_told(report, expected, (0,))
    with pytest.raises(AssertionError):
        assert_is_told(changed, expected, (0,))


def test_a_name_left_out_on_one_rank_is_an_error_on_all_and_training_goes_on(gloo: GlooWorld, scenarios: Any) -> None:
    ((_, results),) = each(gloo, scenarios.bad_names_of_a_model, [()])
    for rank, failures in enumerate(results):
        for bad_rank, failure in enumerate(failures):
            assert failure.kind == ("InvalidValueError" if rank == bad_rank else "BackendError")
            assert "names must hold each of the optimizer's 6 parameters, got 5 names" in failure.message
            assert rank == bad_rank or f"failed on rank {bad_rank}" in failure.message


@pytest.mark.parametrize("mesh", MESHES)
def test_a_bad_shard_on_each_rank_of_a_mesh_is_named_by_its_place(scenarios: Any, mesh: str) -> None:
    ((_, results),) = each(GlooWorld(4), scenarios.each_rank_of_a_mesh, [MESHES[mesh]])
    *_, is_given = MESHES[mesh]
    places = [divmod(rank, 2) if is_given else (rank,) for rank in range(4)]
    for bad_rank in range(4):
        expected = {place: result[bad_rank][1] for place, result in zip(places, results, strict=True)}
        for result in results:
            assert_is_told(result[bad_rank][0], expected, places[bad_rank])
            assert result[bad_rank][0] == results[0][bad_rank][0]


@pytest.mark.parametrize("kind", ["missing", "overlapping", "no loss"])
def test_a_rank_whose_gradients_are_missing_or_refused_takes_part(gloo: GlooWorld, scenarios: Any, kind: str) -> None:
    cases = [(kind, odd_rank) for odd_rank in range(gloo.size)]
    for (_, odd_rank), results in each(gloo, scenarios.odd_gradients_of_a_mesh, cases):
        values = {(rank,): {"weight": ([2], 0, 1.0)} for rank in range(gloo.size)}
        if kind != "overlapping":
            values[odd_rank,]["weight"] = None
        for rank, (report, error) in enumerate(results):
            assert report == results[0][0]
            assert (report["scale"], report["cause"]) == (4.0, "none")
            assert found(report) == values
            # Whether a gradient can be unscaled in place is still looked at when it is.
            expected = "overlaps itself" if rank == odd_rank else f"rank {odd_rank} has refused its gradients"
            assert (expected in error) if kind == "overlapping" else error == ""


@pytest.mark.parametrize(("placement", "own"), [("replicated", 1), ("parts", 0)])
def test_a_loss_that_is_a_dtensor_is_judged_by_its_part_on_each_rank(
    gloo: GlooWorld, scenarios: Any, placement: str, own: int
) -> None:
    cases = [(placement, bad_rank) for bad_rank in range(gloo.size)]
    for (_, bad_rank), results in each(gloo, scenarios.loss_of_a_mesh, cases):
        for rank, result in enumerate(results):
            # One more is a number that is not finite.
            assert result["asked"] == 1 + (own or int(rank == bad_rank))
            assert (result["told"], result["cause"]) == (gloo.size if own else 1, "model")
