"""Groups of processes, under MPI and over torch's gloo: what may be one, what passes, and programs that end badly."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import group_scenarios as scenarios
import pytest
from axes import require
from commands import ran
from tiers import later
from worlds import GlooWorld, MPIWorld, ProcessWorld, agree, mpi_command, mpi_environment

pytestmark = pytest.mark.tier("ranks")

mpi_only = pytest.mark.mpi
torch_only = pytest.mark.torch


def test_messages_never_meet_the_users_own(processes: ProcessWorld):
    agree(processes, scenarios.overlapped, [()])


@pytest.mark.parametrize(
    ("world", "kinds"),
    [
        pytest.param(MPIWorld(4), ["both", "rows"], id="mpi-4", marks=mpi_only),
        pytest.param(GlooWorld(4), ["both", "mixed", "rows"], id="gloo-4", marks=torch_only),
    ],
)
def test_a_list_of_groups_reaches_every_rank_of_a_grid(world: ProcessWorld, kinds: list[str]):
    agree(world, scenarios.grid, [(bad_rank, kind) for bad_rank in range(4) for kind in kinds])


def test_after_a_timeout_another_group_is_needed_and_meets_no_old_messages(processes: ProcessWorld, tmp_path: Path):
    for late_rank in (0, processes.size - 1):
        (folder := tmp_path / str(late_rank)).mkdir()
        agree(processes, scenarios.after_a_timeout, [(late_rank, str(folder))])


def test_int32_vectors_of_any_layout_are_reduced_and_nothing_else(processes: ProcessWorld):
    last = processes.size - 1
    every, strided = list(range(last, last + 10)), [last, 3 + last, 6 + last, 9 + last]
    expected = [every, strided, strided[::-1]] + [strided, every] * isinstance(processes, GlooWorld)
    assert processes.run(scenarios.arrays) == [expected] * processes.size


@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.what_is_no_communicator,
        scenarios.dropped_by_mpi,
        scenarios.freed_before_its_end,
        scenarios.many_scalers,
    ],
)
def test_communicators(mpi: MPIWorld, scenario):
    agree(mpi, scenario, [()])


WITHOUT_MPI = """
import sys
import mpi4py
how = sys.argv[1]
mpi4py.rc.initialize = how == "finalized"
from mpi4py import MPI
import numpy as np
import gradscale
from scenarios import SGD, gradients, raised

construct = lambda: gradscale.ShardedGradScaler(group=MPI.COMM_WORLD, timeout=20.0)
if how == "not initialised":
    raised(gradscale.CallOrderError, construct, "MPI is not initialised in this process", "MPI.Init()")
    MPI.Init()
scaler, optimizers = construct(), [SGD(gradients("numpy")) for _ in range(3)]
scaler.scale(np.float32(1.0))
scaler.step(optimizers[0])
scaler.unscale_(optimizers[1])
MPI.Finalize()
for call in (lambda: scaler.step(optimizers[1]), lambda: scaler.step(optimizers[2]), construct):
    raised(gradscale.CallOrderError, call, "MPI was finalised in this process", "before MPI.Finalize()")
assert [optimizer.steps for optimizer in optimizers] == [1, 0, 0]
sys.stdout.write("survived\\n")
"""


@mpi_only
@pytest.mark.parametrize("how", ["not initialised", "finalized"])
@pytest.mark.parametrize("size", [None, 1, 2], ids=["without mpiexec", "1 rank", "2 ranks"])
def test_without_mpi_a_scaler_is_refused_and_the_process_lives(size: int | None, how: str):
    program = ["-c", WITHOUT_MPI, how]
    command = [sys.executable, *program] if size is None else mpi_command(size, *program)
    completed = ran(*command, **(mpi_environment() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}))
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.split() == ["survived"] * (size or 1)


# torch.


@torch_only
@pytest.mark.parametrize(
    "shape", [(2, 1), (2, 2), *later("all", (2,), (4,), (1, 2, 2))], ids=lambda shape: "x".join(map(str, shape))
)
def test_a_mesh_of_any_dimensions_is_one_group_of_all_its_ranks(shape: tuple[int, ...]):
    size = math.prod(shape)
    agree(GlooWorld(size), scenarios.mesh_of_the_world, [(shape, bad_rank) for bad_rank in range(size)])


@torch_only
def test_dimensions_of_a_mesh_that_do_not_cover_the_world_agree_among_themselves():
    agree(GlooWorld(4), scenarios.part_of_a_mesh, [(0,), (3,)])


@pytest.mark.parametrize("scenario", [scenarios.outside, scenarios.what_is_no_group, scenarios.dropped_by_torch])
def test_groups_of_torch(gloo: GlooWorld, scenario):
    agree(gloo, scenario, [()])


@pytest.mark.parametrize("scenario", [scenarios.worlds_end, scenarios.two_under_way_time_out, scenarios.polled])
def test_groups_of_torch_that_end_or_do_not_come(gloo: GlooWorld, scenario, tmp_path: Path):
    agree(gloo, scenario, [(str(tmp_path),)])


@torch_only
@pytest.mark.tier("quick")
def test_torch_is_given_the_timeout_as_it_is_and_one_that_its_clock_holds_for_ever():
    from gradscale_torch.groups import seconds

    assert seconds(1800.0) == 1800.0
    # Weeks of a run, and far from the end of 64-bit nanoseconds, whatever is added.
    assert 100 * 86400.0 < seconds(math.inf) == seconds(1e300) < 2**62 / 1e9


@torch_only
def test_a_rank_of_a_mesh_that_constructs_too_late_is_a_timeout_after_which_all_may_try_again(tmp_path: Path):
    for late_rank in (0, 1):
        (folder := tmp_path / str(late_rank)).mkdir()
        agree(GlooWorld(3), scenarios.late_member_of_a_mesh, [(late_rank, str(folder))])


@torch_only
@pytest.mark.parametrize("size", [3, 8])
@pytest.mark.parametrize("bad", [200, 40_000])
def test_only_the_order_of_starts_matters_and_each_agreement_is_one_reduction(size: int, bad: int):
    agree(GlooWorld(size), scenarios.finished_in_another_order, [(bad,)])


@torch_only
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
        # A rank without arrays takes part on the group's accelerator.
        ("cpu:gloo,cuda:gloo", None, "cpu"),
        ("cpu:gloo,cuda:nccl", None, "cuda"),
        ("cuda:nccl", None, "cuda"),
    ],
)
def test_a_tensor_travels_on_its_own_device_or_on_one_that_the_group_carries(
    backends: str, device: str | None, expected: str
):
    torch = require("torch")
    from gradscale_torch import groups

    group = SimpleNamespace(bound_device_id=torch.device("cuda:3"))
    found = dict(pair.split(":") for pair in backends.split(","))
    if device is None:
        assert groups.example_device(found, group, None).type == expected
    else:
        assert groups.travels_on(found, torch.device(device), group) == torch.device(expected)


# Whole programs.

PROGRAM = """
import os, signal, sys, time
import numpy as np
import gradscale
from scenarios import SGD, gradients

kind, how, timeout, folder, rank = *sys.argv[1:3], float(sys.argv[3]), sys.argv[4], int(sys.argv[5])
if kind == "mpi":
    from mpi4py import MPI
    group = MPI.COMM_WORLD
    rank, barrier = group.rank, group.Barrier
else:
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group, barrier = dist.group.WORLD, dist.barrier
scaler = gradscale.ShardedGradScaler(group=group, timeout=timeout)
scaler.scale(np.float32(1.0))
barrier()
if rank:
    if how == "ends":
        os._exit(0)
    time.sleep(60)
print("waiting", flush=True)
scaler.step(SGD(gradients("numpy")))
"""
FAILED = "BackendError: torch.distributed failed on rank 0 of 2 while the ranks agreed on a step"
# Over what, what the other rank does, the timeout, what is said after Ctrl-C or without it, and from which tier on.
PROGRAMS: list[tuple[str, str, float, str, str]] = [
    ("mpi", "hangs", 1000.0, "", "ranks"),
    ("gloo", "hangs", 1000.0, "KeyboardInterrupt", "ranks"),
    ("gloo", "hangs", math.inf, "KeyboardInterrupt", "all"),
    ("gloo", "ends", 1000.0, FAILED, "ranks"),
    ("gloo", "ends", math.inf, FAILED, "all"),
]


@pytest.mark.parametrize(
    ("kind", "how", "timeout", "said"),
    [
        pytest.param(*row, marks=[pytest.mark.tier(tier), mpi_only if row[0] == "mpi" else torch_only])
        for *row, tier in PROGRAMS
    ],
)
def test_a_program_that_is_interrupted_or_left_alone_ends_with_what_went_wrong(
    tmp_path: Path, kind: str, how: str, timeout: float, said: str
):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    arguments = [str(program), kind, how, str(timeout), str(tmp_path)]
    if kind == "gloo":
        commands = [[sys.executable, *arguments, str(rank)] for rank in range(2)]
    else:
        commands = [mpi_command(2, "-m", "mpi4py", *arguments, "0")]
    environment = mpi_environment() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = [
        subprocess.Popen(command, env=environment, text=True, **(pipes if command is commands[0] else {}))
        for command in commands
    ]
    first = started[0]
    try:
        assert first.stdout is not None
        assert first.stdout.readline().strip() == "waiting"
        if how == "hangs":
            time.sleep(0.5)
            first.send_signal(signal.SIGINT)
        _, errors = first.communicate(timeout=50)
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert first.returncode != 0
    assert said in errors
