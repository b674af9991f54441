"""The replacements of torch's scalers over groups and meshes do what torch's do, and what torch's fail at."""

from __future__ import annotations

import collections
import importlib
from typing import Any

import pytest
from axes import require
from tiers import later
from worlds import GlooWorld, MPIWorld, agree

pytestmark = [pytest.mark.torch, pytest.mark.tier("ranks")]

FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
# For each, the scenario and what it is asked beside each rank in turn.
TURNS: list[tuple[Any, ...]] = [
    *(("as_torchs", explicit) for explicit in (False, True)),
    *(("fused_on_one", name) for name in FUSED),
    *(("drift", what) for what in ("scale", "tracker", "policy")),
    ("missing_call",),
    *(("without_gradients", is_fused) for is_fused in (False, True)),
    *(("never_scaled", is_fused) for is_fused in (False, True)),
    *(("no_gradient_of_a_mesh", max_norm) for max_norm in (None, 0.5)),
    ("closure",),
]
ONCE: list[tuple[Any, ...]] = [
    *(("fused_on_all", name) for name in FUSED),
    ("grow",),
    *(("two_meshes", is_given, bad_rank) for is_given, bad_rank in ((False, None), (True, None), (True, 0), (True, 1))),
    ("clip_dtensors_and_plain_tensors",),
]
Pair = collections.namedtuple("Pair", ["first", "second"])


@pytest.fixture(autouse=True)
def torch() -> Any:
    """Return torch."""
    return require("torch")


@pytest.fixture
def scenarios() -> Any:
    """Return what the ranks do on plain tensors and DTensors."""
    return importlib.import_module("torch_sharded_scenarios")


@pytest.fixture
def fsdp() -> Any:
    """Return what the ranks do with FSDP."""
    return importlib.import_module("fsdp_scenarios")


@pytest.mark.parametrize(("name", "others"), [(name, others) for name, *others in TURNS], ids=str)
def test_each_rank_in_turn(gloo: GlooWorld, scenarios: Any, name: str, others: list[Any]) -> None:
    agree(gloo, getattr(scenarios, name), [(rank, *others) for rank in range(gloo.size)])


@pytest.mark.parametrize(("name", "arguments"), [(name, arguments) for name, *arguments in ONCE], ids=str)
def test_all_ranks(gloo: GlooWorld, scenarios: Any, name: str, arguments: list[Any]) -> None:
    agree(gloo, getattr(scenarios, name), [tuple(arguments)])


@pytest.mark.mpi
@pytest.mark.parametrize(("name", "is_fused"), [("SGD", False), ("AdamW", True)])
def test_the_sharded_scaler_of_torch_tensors_agrees_over_mpi(
    mpi: MPIWorld, scenarios: Any, name: str, is_fused: bool
) -> None:
    agree(mpi, scenarios.over_mpi, [(rank, name, is_fused) for rank in range(mpi.size)])


def test_a_list_of_groups_is_agreed_over_in_turn(scenarios: Any) -> None:
    agree(GlooWorld(4), scenarios.dimensions, [(bad_rank,) for bad_rank in range(4)])


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
    theirs, scaler = (scenarios.make_scaler(library, init_scale=2.0) for library in ("torch", "gradscale"))
    assert scaler._scale is None
    ours = described(torch, scaler.scale(outputs))
    assert ours == described(torch, theirs.scale(outputs))
    assert ours[1][0] == ("torch.float32", 3.0)
    # The state is made on the device of the first output.
    assert (scaler._scale.device.type, scaler._scale.dtype) == ("cpu", torch.float32)


def test_a_named_tuple_and_a_dict_are_scaled_though_torch_fails_on_them(torch: Any, scenarios: Any) -> None:
    outputs = Pair(torch.tensor(1.0), {"loss": torch.tensor(2.0)})
    with pytest.raises(TypeError, match="second"):
        scenarios.make_scaler("torch", init_scale=2.0).scale(outputs)
    scaled = scenarios.make_scaler("gradscale", init_scale=2.0).scale(outputs)
    assert type(scaled) is Pair
    assert (scaled.first.item(), scaled.second["loss"].item()) == (2.0, 4.0)


# FSDP, and meshes.


@pytest.mark.parametrize("overflow", ["loss", "gradient"])
@pytest.mark.parametrize("size", [2, *later("all", 3)])
def test_training_is_that_with_torchs_own_scaler_bit_for_bit(fsdp: Any, size: int, overflow: str) -> None:
    # Ranks of DDP decide alone, and an infinity in the gradients of one would part them.
    setups = [setup for setup in fsdp.SETUPS if (setup.method, overflow) != ("DDP", "gradient")]
    cases = [(setup, overflow, False) for setup in setups]
    cases += [(setup, overflow, True) for setup in setups if setup.method == "FSDP2"]
    agree(GlooWorld(size), fsdp.compare, cases)


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("parallel", ["data", "hybrid", "data and tensor"])
def test_an_infinity_on_each_rank_of_a_mesh_is_found_on_all_without_a_group(
    fsdp: Any, parallel: str, is_reversed: bool
) -> None:
    agree(GlooWorld(4), fsdp.mesh_overflow, [(bad_rank, parallel, is_reversed) for bad_rank in range(4)])


@pytest.mark.parametrize("parallel", ["data", "hybrid", "data and tensor"])
def test_clipping_while_unscaling_is_torchs_unscaling_and_clipping(fsdp: Any, parallel: str) -> None:
    agree(GlooWorld(4), fsdp.clip, [(parallel, max_norm) for max_norm in (0.01, 1e6)])


def test_each_optimizer_costs_one_all_reduce_of_two_integers_where_torch_makes_four(fsdp: Any) -> None:
    agree(GlooWorld(4), fsdp.count_collectives, [(False,), (True,)])
