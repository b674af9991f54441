"""The replacements of torch's scalers over groups and meshes do what torch's do, and what torch's fail at."""

import importlib
from typing import Any

import pytest
from axes import is_torch_2_6, leave_out_fsdp2
from tiers import later
from worlds import GlooWorld, agree

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
    """Return what the ranks do on plain tensors and DTensors."""
    return importlib.import_module("torch_sharded_scenarios")


@pytest.fixture
def fsdp():
    """Return what the ranks do with FSDP."""
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


# FSDP, and meshes.


@pytest.mark.parametrize("overflow", ["loss", "gradient"])
@pytest.mark.parametrize("size", [2, *later("all", 3)])
def test_training_is_that_with_torchs_own_scaler_bit_for_bit(fsdp, size: int, overflow: str):
    # Ranks of DDP decide alone, and an infinity in the gradients of one would part them.
    setups = [setup for setup in fsdp.SETUPS if (setup.method, overflow) != ("DDP", "gradient")]
    if is_torch_2_6():
        # Its FSDP2 does not run on CPUs.
        setups = [setup for setup in setups if setup.method != "FSDP2"]
    cases = [(setup, overflow, False) for setup in setups]
    cases += [(setup, overflow, True) for setup in setups if setup.method == "FSDP2"]
    agree(GlooWorld(size), fsdp.compare, cases)


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("parallel", ["data", "hybrid", "data and tensor"])
def test_an_infinity_on_each_rank_of_a_mesh_is_found_on_all_without_a_group(fsdp, parallel: str, is_reversed: bool):
    leave_out_fsdp2()
    agree(GlooWorld(4), fsdp.mesh_overflow, [(bad_rank, parallel, is_reversed) for bad_rank in range(4)])


@pytest.mark.parametrize("parallel", ["data", "hybrid", "data and tensor"])
def test_clipping_while_unscaling_is_torchs_unscaling_and_clipping(fsdp, parallel: str):
    leave_out_fsdp2()
    agree(GlooWorld(4), fsdp.clip, [(parallel, max_norm) for max_norm in (0.01, 1e6)])


def test_each_optimizer_costs_one_short_all_reduce_where_torch_makes_four(fsdp):
    leave_out_fsdp2()
    agree(GlooWorld(4), fsdp.count_collectives, [(False,), (True,)])
