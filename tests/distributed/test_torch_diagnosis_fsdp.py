"""diagnose() of sharded models over gloo: FSDP1, FSDP2 and meshes, with a bad value on each rank in turn."""

import importlib

import diagnoses
import pytest
from axes import leave_out_fsdp2
from tiers import later
from worlds import GlooWorld, agree, each

pytestmark = [pytest.mark.torch, pytest.mark.tier("ranks")]


@pytest.fixture(autouse=True)
def scenarios():
    """Return what the ranks do."""
    return importlib.import_module("torch_diagnosis_scenarios")


@pytest.mark.parametrize(
    ("size", "method", "options", "how", "mesh"),
    [
        *((size, "FSDP2", {}, how, ()) for size in (2, 3) for how in ("plain", "fused")),
        (3, "FSDP2", {}, "late", ()),
        (2, "FSDP2", {"half": True}, "plain", ()),
        (3, "FSDP1", {}, "plain", ()),
        (2, "FSDP1", {"original": False}, "plain", ()),
        # Whose groups are given, and where they are the mesh's own.
        (4, "FSDP2", {}, "plain", ("hybrid", True)),
        (4, "FSDP2", {}, "plain", ("data and tensor", False)),
    ],
)
def test_a_bad_shard_on_each_rank_in_turn_is_named_on_every_rank_at_every_stage(
    scenarios, size: int, method: str, options: dict[str, bool], how: str, mesh: tuple[str, bool] | tuple[()]
):
    if method == "FSDP2":
        leave_out_fsdp2()
    ((_, told),) = each(
        GlooWorld(size), scenarios.each_rank_in_turn, [(scenarios.Setup(method, **options), how, *mesh)]
    )
    diagnoses.check(told, [divmod(rank, 2) if mesh[1:] == (True,) else (rank,) for rank in range(size)])


@pytest.mark.parametrize(("method", "options"), [("FSDP2", {}), ("FSDP1", {}), ("FSDP1", {"original": False})])
def test_a_broken_shard_on_each_rank_in_turn_is_named_on_every_rank(scenarios, method: str, options: dict[str, bool]):
    if method == "FSDP2":
        leave_out_fsdp2()
    ((_, results),) = each(GlooWorld(2), scenarios.broken_shards, [(scenarios.Setup(method, **options),)])
    assert results[0] == results[1]
    for number, report in enumerate(results[0]):
        bad_rank, is_state = number // 2 - 1, number % 2
        expected = [("state", "exp_avg_sq", [bad_rank], 1) if is_state else ("weight", "", [bad_rank], 1)]
        found = [(one["kind"], one["key"], one["rank"], one["nan"]) for one in report["broken"]]
        assert found == (expected if bad_rank >= 0 else [])
        assert {one["name"] for one in report["broken"]} <= {one["name"] for one in report["entries"]}


@pytest.mark.parametrize("kind", ["missing", "overlapping", "no loss"])
def test_a_rank_whose_gradients_are_missing_or_refused_takes_part(gloo: GlooWorld, scenarios, kind: str):
    for _, told in each(gloo, scenarios.odd_gradients_of_a_mesh, [(odd_rank, kind) for odd_rank in range(gloo.size)]):
        diagnoses.check(told, [(rank,) for rank in range(gloo.size)])


@pytest.mark.parametrize("placement", ["replicated", "parts"])
@pytest.mark.parametrize("size", [2, *later("all", 3)])
def test_a_loss_that_is_a_dtensor_is_judged_by_its_part_on_each_rank(scenarios, size: int, placement: str):
    agree(GlooWorld(size), scenarios.loss_of_a_mesh, [(bad_rank, placement) for bad_rank in range(size)])
