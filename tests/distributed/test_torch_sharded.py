"""Scalers and diagnoses of torch over groups and meshes do what torch's scalers do, and what these fail at."""

import importlib
import math
from typing import Any

import diagnoses
import pytest
from axes import is_torch_2_6, leave_out_fsdp2
from tiers import later
from worlds import GlooWorld, agree, each

pytestmark = [pytest.mark.torch, pytest.mark.tier("ranks")]

MESHES = ("same", "half", "half first", "some")
# For each, the scenario and what it is asked beside each rank in turn.
TURNS: list[tuple[Any, ...]] = [
    *(("no_gradient_of_a_mesh", max_norm) for max_norm in (None, 0.5)),
    *(("two_meshes", kind, which, False) for kind in MESHES for which in range(2)),
]
ONCE: list[tuple[Any, ...]] = [
    *(("two_meshes", None, kind, 0, is_given) for kind in MESHES for is_given in (False, True)),
    *(("clip_of_two_meshes", kind) for kind in (*MESHES[:3], "plain")),
]


@pytest.fixture
def scenarios():
    """Return what the ranks do."""
    return importlib.import_module("fsdp_scenarios")


@pytest.mark.parametrize(("name", "others"), [(name, others) for name, *others in TURNS], ids=str)
def test_each_rank_in_turn(gloo: GlooWorld, scenarios, name: str, others: list[Any]):
    agree(gloo, getattr(scenarios, name), [(rank, *others) for rank in range(gloo.size)])


@pytest.mark.parametrize(("name", "arguments"), [(name, arguments) for name, *arguments in ONCE], ids=str)
def test_all_ranks(gloo: GlooWorld, scenarios, name: str, arguments: list[Any]):
    agree(gloo, getattr(scenarios, name), [tuple(arguments)])


def test_an_infinity_on_each_rank_of_crossed_meshes_is_found_on_all(scenarios):
    cases = [(bad_rank, "crossed", which, False) for bad_rank in range(4) for which in range(2)]
    agree(GlooWorld(4), scenarios.two_meshes, cases)


def test_the_norm_of_dtensors_is_that_of_all_parts_and_of_one_copy_and_names_whose_part_is_too_large(scenarios):
    bad = [(math.inf, 4.0), (3.0, math.inf), (1.7e38, 3e38)]
    cases = [((3.0, 4.0), False, 5.0), ((3.0, 4.0), True, 3.0), *((values, False, math.inf) for values in bad)]
    agree(GlooWorld(2), scenarios.clip_parts, cases)


# FSDP, and meshes.


@pytest.mark.parametrize("overflow", ["loss", "gradient"])
@pytest.mark.parametrize("size", [2, *later("all", 3)])
def test_training_is_that_with_torchs_own_scaler_bit_for_bit(scenarios, size: int, overflow: str):
    # Ranks of DDP decide alone, and an infinity in the gradients of one would part them.
    setups = [setup for setup in scenarios.SETUPS if (setup.method, overflow) != ("DDP", "gradient")]
    if is_torch_2_6():
        # Its FSDP2 does not run on CPUs.
        setups = [setup for setup in setups if setup.method != "FSDP2"]
    cases = [(setup, overflow, False) for setup in setups]
    cases += [(setup, overflow, True) for setup in setups if setup.method == "FSDP2"]
    agree(GlooWorld(size), scenarios.compare, cases)


@pytest.mark.parametrize("parallel", ["data", "hybrid", "data and tensor"])
def test_clipping_while_unscaling_is_torchs_unscaling_and_clipping(scenarios, parallel: str):
    leave_out_fsdp2()
    agree(GlooWorld(4), scenarios.clip, [(parallel, max_norm) for max_norm in (0.01, 1e6)])


def test_each_optimizer_costs_one_short_all_reduce_where_torch_makes_four(scenarios):
    leave_out_fsdp2()
    agree(GlooWorld(4), scenarios.count_collectives, [(False,), (True,)])


# Diagnoses, with a bad value on each rank in turn.


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
        *((4, "FSDP2", {}, "plain", (parallel, False)) for parallel in ("hybrid", "data and tensor")),
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
