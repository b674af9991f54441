"""TorchCollectives over real gloo processes: groups, meshes, worlds that end, and programs that end badly."""

import importlib
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from axes import require
from tiers import later
from worlds import GlooWorld

pytestmark = [pytest.mark.torch, pytest.mark.tier("ranks")]


@pytest.fixture(autouse=True)
def _torch_is_there() -> None:
    require("torch")


@pytest.fixture(params=[2, *later("all", 3)], ids=["gloo-2", "gloo-3"])
def world(request: pytest.FixtureRequest) -> GlooWorld:
    return GlooWorld(request.param)


def scenario(name: str):  # type: ignore[no-untyped-def]
    import gloo_scenarios

    return getattr(gloo_scenarios, name)


@pytest.mark.parametrize(
    "shape", [(2, 1), (2, 2), *later("all", (2,), (4,), (1, 2, 2))], ids=lambda shape: "x".join(map(str, shape))
)
def test_a_mesh_of_any_dimensions_is_one_group_of_all_its_ranks(shape: tuple[int, ...]) -> None:
    size = 2 if shape in {(2,), (2, 1)} else 4
    for bad_rank, results in enumerate(
        GlooWorld(size).run_each(scenario("mesh_of_the_world"), [(shape, bad_rank) for bad_rank in range(size)])
    ):
        for rank, result in enumerate(results):
            assert (result["rank"], result["size"]) == (rank, size), bad_rank
            assert result["skips"] == (True, 32768.0)
            assert result["is the world's"]


@pytest.mark.parametrize("bad_rank", [0, 3])
def test_dimensions_of_a_mesh_that_do_not_cover_the_world_agree_among_themselves(bad_rank: int) -> None:
    for rank, result in enumerate(GlooWorld(4).run(scenario("part_of_a_mesh"), bad_rank)):
        bad = rank // 2 == bad_rank // 2
        assert result == {
            "skips": (bad, 32768.0 if bad else 65536.0),
            "size": 2,
            "made once": True,
            "is the world's": False,
        }


@pytest.mark.parametrize("bad_rank", range(4))
def test_a_list_of_groups_reaches_every_rank_of_a_grid(bad_rank: int) -> None:
    cases = [(bad_rank, kind) for kind in ("both", "mixed", "rows")]
    both, mixed, rows = GlooWorld(4).run_each(scenario("grid"), cases)
    assert both == mixed == [(True, 32768.0)] * 4
    # Over the rows alone only the bad one's row skips: the test can tell the difference.
    assert [skipped for skipped, _ in rows] == [rank // 2 == bad_rank // 2 for rank in range(4)]


def test_a_rank_outside_a_group_or_mesh_is_told_so(world: GlooWorld) -> None:
    *members, other = world.run(scenario("outside"))
    assert members == [{"group": "accepted", "mesh": "accepted"}] * (world.size - 1)
    assert other["group"].startswith("InvalidValueError: group must be a process group that this process belongs to")
    assert "GroupMember.NON_GROUP_MEMBER" in other["group"]
    assert other["mesh"].startswith("InvalidValueError: group must be a mesh that this process belongs to")
    for said in other.values():
        assert f"rank {world.size - 1} of the world" in said


def test_what_is_no_group_is_refused(world: GlooWorld) -> None:
    for said in world.run(scenario("wrong_groups")):
        kinds = {"text": "str", "number": "int", "backend": "ProcessGroupGloo", "list": "list"}
        for name, kind in kinds.items():
            assert said[name].startswith(
                "InvalidTypeError: group must be a torch.distributed ProcessGroup, a DeviceMesh"
            )
            assert said[name].endswith(f"of type {kind}")


def test_a_group_without_a_device_of_this_machine_is_refused() -> None:
    torch = require("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has the device that the group names")
    for said in GlooWorld(2).run(scenario("devices_elsewhere")):
        assert said.startswith("InvalidValueError: group must carry tensors of a device of this machine")
        assert "'cuda:gloo'" in said


def test_worlds_may_end_and_begin_around_a_scaler(world: GlooWorld, tmp_path: Path) -> None:
    for rank, said in enumerate(world.run(scenario("worlds_end"), str(tmp_path))):
        assert said["late"] == (-1, 0)
        assert said["late after"] == (rank, world.size)
        assert said["late skipped"]
        assert said["default without"].startswith("CallOrderError: torch.distributed is not initialised")
        assert "init_process_group()" in said["default without"]
        assert "torchrun" in said["default without"]
        assert said["default"] == [world.size - 1]
        for when in ("", " without"):
            assert said[f"explicit{when}"].startswith("BackendError: the process group was destroyed")
            assert "of a destroyed world" in said[f"group{when}"]
            assert said[f"mesh{when}"].startswith("InvalidValueError: group must")


def test_without_a_world_everything_says_what_to_do_first() -> None:
    torch = require("torch")
    import gradscale
    from gradscale_torch.collectives import TorchCollectives

    collectives = TorchCollectives(None, 5.0)
    for call in (lambda: collectives.start_max(torch.zeros(1, dtype=torch.int32)), collectives.example):
        with pytest.raises(gradscale.CallOrderError, match=r"init_process_group\(\) before the first step.*torchrun"):
            call()
    with pytest.raises(gradscale.InvalidValueError, match="NON_GROUP_MEMBER"):
        TorchCollectives(torch.distributed.GroupMember.NON_GROUP_MEMBER, 5.0)
    with pytest.raises(gradscale.InvalidTypeError, match="got 'world' of type str"):
        TorchCollectives("world", 5.0)  # type: ignore[arg-type]


@pytest.mark.tier("quick")
def test_torch_is_given_the_timeout_as_it_is_and_one_that_its_clock_holds_for_ever() -> None:
    require("torch")
    from gradscale_torch.groups import seconds

    assert seconds(1800.0) == 1800.0
    # Weeks of a run, and far from the end of 64-bit nanoseconds, whatever is added.
    assert 100 * 86400.0 < seconds(math.inf) == seconds(1e300) < 2**62 / 1e9


def test_after_a_timeout_another_group_is_needed_and_meets_no_old_messages(world: GlooWorld, tmp_path: Path) -> None:
    for late_rank in (0, world.size - 1):
        (folder := tmp_path / str(late_rank)).mkdir()
        for rank, result in enumerate(world.run(scenario("after_a_timeout"), late_rank, str(folder))):
            assert result["failures"] == world.size - 1
            assert result["skips"] == (True, 32768.0)
            assert len(result["refused"]) == (0 if rank == late_rank else 4)
            for said in result["refused"]:
                assert said.startswith("BackendError: an agreement over this process group was given up on rank")
                assert "new_group()" in said


def test_the_second_of_two_reductions_is_not_waited_for_when_the_first_was_given_up(
    world: GlooWorld, tmp_path: Path
) -> None:
    for said in world.run(scenario("two_under_way_time_out"), str(tmp_path))[1:]:
        assert said == ["CollectiveTimeoutError", "BackendError", "BackendError", "BackendError"]


def test_a_rank_of_a_mesh_that_constructs_too_late_is_a_timeout_after_which_all_may_try_again(tmp_path: Path) -> None:
    for late_rank in (0, 1):
        (folder := tmp_path / str(late_rank)).mkdir()
        results = GlooWorld(3).run(scenario("late_member_of_a_mesh"), late_rank, str(folder))
        assert results[late_rank] == [(True, 32768.0)]
        failure, then = results[1 - late_rank]
        assert failure.kind == "CollectiveTimeoutError"
        assert f"rank {1 - late_rank} of 2 waited 0.5 s for the construction of a ShardedGradScaler" in failure.message
        assert then == (True, 32768.0)


def test_the_ranks_of_a_mesh_meet_again_in_the_next_world() -> None:
    torch = require("torch")
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    from gradscale import CollectiveTimeoutError, ShardedGradScaler

    dist, store = torch.distributed, torch.distributed.HashStore()
    for others in (3, 0):
        dist.init_process_group("fake", store=store, rank=0, world_size=8)
        try:
            mesh = dist.device_mesh.DeviceMesh("cpu", [[0, 1], [2, 3]])
            # What the others do.
            dist.distributed_c10d._get_default_store().add("gradscale/0,1,2,3", others)
            if others:
                ShardedGradScaler(group=mesh, timeout=0.2)
                continue
            with pytest.raises(CollectiveTimeoutError, match=r"construction of a ShardedGradScaler"):
                ShardedGradScaler(group=mesh, timeout=0.2)
        finally:
            dist.destroy_process_group()


def test_memory_that_torch_reads_outlives_whoever_asked_for_it_and_no_longer(world: GlooWorld) -> None:
    for rank, result in enumerate(world.run(scenario("dropped"))):
        others = [other for other in range(world.size) if other != rank]
        assert result["largest"] == [[1000 * other + value for value in range(20)] for other in others]
        assert result["kept"] <= 9


def test_lists_of_numbers_are_reduced(world: GlooWorld) -> None:
    lists = scenario("LISTS")
    expected = [[max(column) for column in zip(*offered[: world.size], strict=True)] for offered in lists]
    assert world.run(scenario("numbers")) == [expected] * world.size


@pytest.mark.parametrize("size", [3, 8])
@pytest.mark.parametrize("bad", [200, 40_000])
def test_only_the_order_of_starts_matters_and_each_agreement_is_one_reduction(size: int, bad: int) -> None:
    # The count is told up to what its bits hold.
    counts = [min(bad - index, 2**15 - 3) for index in range(2)]
    expected = {"nonfinite": counts, "scale": 2.0, "reductions": 2}
    assert GlooWorld(size).run(scenario("finished_in_another_order"), bad) == [expected] * size


def test_arrays_of_any_layout_are_reduced(world: GlooWorld) -> None:
    last = world.size - 1
    strided = [last, 3 + last, 6 + last, 9 + last]
    assert (
        world.run(scenario("odd_arrays"))
        == [[strided, list(range(last, last + 10)), strided, strided[::-1], [0, 1, 2]]] * world.size
    )


def test_only_int32_vectors_travel(world: GlooWorld) -> None:
    for messages in world.run(scenario("wrong_arrays")):
        assert messages == ["1-d torch.float32", "1-d torch.int64", "2-d torch.int32", "1-d float64", "2-d int32"]


def test_messages_never_meet_the_users_own(world: GlooWorld) -> None:
    assert world.run(scenario("overlapped"), 50) == [50.0 * world.size] * world.size


def test_waiting_by_asking_gives_the_result_or_the_timeout(world: GlooWorld, tmp_path: Path) -> None:
    for rank, said in enumerate(world.run(scenario("polled"), str(tmp_path))[1:], start=1):
        assert len(said) == 1
        assert f"rank {rank} of {world.size} waited 1 s for the agreement on a step" in said[0]


def test_a_rank_that_never_has_an_array_needs_no_backend(world: GlooWorld) -> None:
    for results in world.run_each(scenario("never_an_array"), [(rank,) for rank in range(world.size)]):
        assert results == [[(False, 65536.0), (True, 32768.0), (False, 32768.0)]] * world.size


@pytest.mark.parametrize(
    ("backends", "device", "expected"),
    [
        ("cpu:gloo", "cpu", "cpu"),
        ("cpu:gloo,cuda:gloo", "cuda:1", "cpu"),
        ("cpu:mpi,cuda:mpi", "cuda:1", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda:1", "cuda:1"),
        ("cpu:gloo,cuda:nccl", "cpu", "cpu"),
        ("cpu:gloo,cuda:nccl", "mps", "cpu"),
        ("cuda:nccl", "cuda:1", "cuda:1"),
        ("cuda:nccl", "cpu", "cuda:3"),
        ("xpu:xccl", "xpu:1", "xpu:1"),
    ],
)
def test_a_tensor_travels_on_its_own_device_or_on_one_that_the_group_carries(
    backends: str, device: str, expected: str
) -> None:
    torch = require("torch")
    from gradscale_torch import groups

    group: Any = SimpleNamespace(bound_device_id=torch.device("cuda:3"))
    found = dict(pair.split(":") for pair in backends.split(","))
    assert groups.travels_on(found, torch.device(device), group) == torch.device(expected)


@pytest.mark.parametrize(
    ("backends", "expected"), [("cpu:gloo,cuda:gloo", "cpu"), ("cpu:gloo,cuda:nccl", "cuda:3"), ("cuda:nccl", "cuda:3")]
)
def test_a_rank_without_arrays_takes_part_on_the_groups_accelerator(backends: str, expected: str) -> None:
    torch = require("torch")
    from gradscale_torch import groups

    group: Any = SimpleNamespace(bound_device_id=torch.device("cuda:3"))
    found = dict(pair.split(":") for pair in backends.split(","))
    assert groups.example_device(found, group, None).type == torch.device(expected).type


PROGRAM = """
import math, os, signal, sys, time
import numpy as np
import torch, torch.distributed as dist
import gradscale
from torch.distributed.device_mesh import DeviceMesh

class Optimizer:
    grads = [np.ones(3, dtype=np.float32)]
    def step(self): pass

how, timeout, folder, rank = sys.argv[1], float(sys.argv[2]), sys.argv[3], int(sys.argv[4])
torch.set_num_threads(1)
size = 3 if how == "constructs alone" else 2
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
if how == "constructs alone":
    mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("a", "b"))
else:
    scaler = gradscale.ShardedGradScaler(group=dist.group.WORLD, timeout=timeout)
    scaler.scale(np.float32(1.0))
    if how == "leaves one under way":
        # The first message waits for every rank.
        scaler.step(Optimizer())
        scaler.update()
        scaler.scale(np.float32(1.0))
dist.barrier()
if rank:
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "ends":
        os._exit(0)
    time.sleep(60)
print("waiting", flush=True)
if how == "constructs alone":
    gradscale.ShardedGradScaler(group=mesh, timeout=timeout)
elif how == "leaves one under way":
    scaler.unscale_(Optimizer())
    raise ValueError("rank 0 fails")
scaler.step(Optimizer())
"""


def run_program(
    tmp_path: Path, how: str, timeout: float, interrupt: bool = False
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run the program on 2 or 3 ranks; how rank 0 ended, and seconds since it began to wait."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    size = 3 if how == "constructs alone" else 2
    arguments = [sys.executable, str(program), how, str(timeout), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    others = [subprocess.Popen([*arguments, str(rank)], env=environment) for rank in range(1, size)]
    first = subprocess.Popen(
        [*arguments, "0"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout is not None
        assert first.stdout.readline().strip() == "waiting"
        begin = time.monotonic()
        if interrupt:
            time.sleep(0.5)
            first.send_signal(signal.SIGINT)
        printed, errors = first.communicate(timeout=90)
        seconds = time.monotonic() - begin
    finally:
        for process in (first, *others):
            process.kill()
            process.communicate()
    return subprocess.CompletedProcess(arguments, first.returncode, printed, errors), seconds


@pytest.mark.parametrize("how", ["is killed", *later("all", "ends")])
@pytest.mark.parametrize("timeout", [1000.0, *later("all", float("inf"))])
def test_a_program_with_a_rank_that_dies_ends_with_torchs_error(tmp_path: Path, how: str, timeout: float) -> None:
    completed, seconds = run_program(tmp_path, how, timeout)
    assert completed.returncode != 0
    assert "BackendError: torch.distributed failed on rank 0 of 2 while the ranks agreed on a step" in completed.stderr
    assert "gloo" in completed.stderr
    assert seconds < 60


@pytest.mark.parametrize("how", ["hangs", "constructs alone"])
def test_a_program_with_a_rank_that_hangs_ends_with_the_timeout(tmp_path: Path, how: str) -> None:
    completed, seconds = run_program(tmp_path, how, 1.0)
    assert completed.returncode != 0
    operation = "the construction of a ShardedGradScaler" if how == "constructs alone" else "the agreement on a step"
    assert f"CollectiveTimeoutError: rank 0 of 2 waited 1 s for {operation}" in completed.stderr
    assert 0.9 < seconds < 60


@pytest.mark.parametrize("how", ["hangs", *later("all", "constructs alone")])
@pytest.mark.parametrize("timeout", [1000.0, *later("all", float("inf"))])
def test_ctrl_c_ends_the_wait_and_the_program(tmp_path: Path, how: str, timeout: float) -> None:
    completed, seconds = run_program(tmp_path, how, timeout, interrupt=True)
    assert completed.returncode != 0
    assert "KeyboardInterrupt" in completed.stderr
    assert seconds < 60


@pytest.mark.tier("all")
def test_a_program_that_fails_between_unscale_and_step_ends(tmp_path: Path) -> None:
    completed, seconds = run_program(tmp_path, "leaves one under way", 1000.0)
    assert completed.returncode != 0
    assert "ValueError: rank 0 fails" in completed.stderr
    assert seconds < 60
