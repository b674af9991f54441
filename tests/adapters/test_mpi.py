"""MPICollectives under real MPI: messages, communicators, grids, and programs that end badly."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from axes import require
from tiers import later
from worlds import Failure, MPIWorld, mpi_command, mpi_environment

pytestmark = [pytest.mark.mpi, pytest.mark.tier("ranks")]


@pytest.fixture(autouse=True)
def _mpi_is_there() -> None:
    require("mpi")


@pytest.fixture(params=[2, *later("all", 3)], ids=["mpi-2", "mpi-3"])
def world(request: pytest.FixtureRequest) -> MPIWorld:
    return MPIWorld(request.param)


def scenario(name: str):  # type: ignore[no-untyped-def]
    import mpi_scenarios

    return getattr(mpi_scenarios, name)


@pytest.mark.parametrize("optimizers", [1, 3])
def test_one_message_of_at_most_128_bytes_for_each_optimizer_and_iteration(world: MPIWorld, optimizers: int) -> None:
    cases = [(optimizers, bad_rank, parameters) for bad_rank in (-1, 0, world.size - 1) for parameters in (1, 40)]
    for (_, bad_rank, _), results in zip(cases, world.run_each(scenario("messages"), cases), strict=True):
        for result in results:
            # After the greeting.
            assert result["messages"] == [16] + [100] * (3 * optimizers)
            assert result["steps"] == [2 if bad_rank >= 0 else 3] * optimizers


def test_messages_never_meet_the_users_own(world: MPIWorld) -> None:
    assert world.run(scenario("overlapped"), 50) == [50.0 * world.size] * world.size


@pytest.mark.parametrize("bad_rank", range(4))
def test_a_list_of_groups_reaches_every_rank_of_a_grid(bad_rank: int) -> None:
    both, rows = MPIWorld(4).run_each(scenario("grid"), [(2, bad_rank, "both"), (2, bad_rank, "rows")])
    assert [(result["skipped"], result["scale"]) for result in both] == [(True, 32768.0)] * 4
    # Over the rows alone only the bad one's row skips: the test can tell the difference.
    assert [result["skipped"] for result in rows] == [result["row"] == bad_rank // 2 for result in rows]


def test_scalers_do_not_use_up_communicators() -> None:
    assert MPIWorld(2).run(scenario("many_scalers"), 2500) == ["done", "done"]


def test_what_cannot_be_a_group_is_refused(world: MPIWorld) -> None:
    for between, null, empty, text, nothing, group in world.run(scenario("bad_groups")):
        assert "intracommunicator" in between
        assert "COMM_NULL" in null
        assert "at least one group" in empty
        assert "'world' of type str" in text
        assert "None of type NoneType" in nothing
        assert "Group" in group


def test_a_rank_that_constructs_no_scaler_is_a_timeout(world: MPIWorld, tmp_path: Path) -> None:
    for rank, result in enumerate(world.run(scenario("missing_construction"), 1, str(tmp_path))):
        if rank == 1:
            continue
        assert isinstance(result, Failure)
        assert f"rank {rank} of {world.size} waited 1 s for the construction of a ShardedGradScaler" in result.message


def test_after_a_timeout_another_communicator_is_needed_and_meets_no_old_messages(
    world: MPIWorld, tmp_path: Path
) -> None:
    for late_rank in (0, world.size - 1):
        (folder := tmp_path / str(late_rank)).mkdir()
        results = world.run(scenario("after_a_timeout"), late_rank, str(folder))
        assert results == [
            {"failures": world.size - 1, "refused": rank != late_rank, "skipped": True, "scale": 32768.0}
            for rank in range(world.size)
        ]


def test_a_rank_that_never_has_an_array_needs_no_backend(world: MPIWorld) -> None:
    cases = [(empty, (empty + 1) % world.size) for empty in range(world.size)]
    for results in world.run_each(scenario("never_an_array"), cases):
        assert results == [[(False, 65536.0), (True, 32768.0), (False, 32768.0)]] * world.size


def test_the_adapter_can_be_imported_before_mpi_is_initialized() -> None:
    program = "import mpi4py; mpi4py.rc.initialize = False; import gradscale_numpy.mpi; print('imported')"
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (completed.returncode, completed.stdout.strip()) == (0, "imported"), completed.stderr


WITHOUT_MPI = """
import sys
import mpi4py
how = sys.argv[1]
mpi4py.rc.initialize = how == "finalized"
from mpi4py import MPI
import numpy as np
import gradscale

class Optimizer:
    steps = 0
    def __init__(self): self.grads = [np.full(3, 65536.0, dtype=np.float32)]
    def step(self): self.steps += 1

def said(call):
    try:
        call()
    except gradscale.CallOrderError as error:
        return str(error)
    return "came out"

def construct():
    gradscale.ShardedGradScaler(group=MPI.COMM_WORLD, timeout=20.0)

if how == "not initialised":
    before = said(construct)
    assert before.startswith("MPI is not initialised in this process"), before
    assert "MPI.Init()" in before
    MPI.Init()
scaler = gradscale.ShardedGradScaler(group=MPI.COMM_WORLD, timeout=20.0)
optimizers = [Optimizer(), Optimizer(), Optimizer()]
scaler.scale(np.float32(1.0))
scaler.step(optimizers[0])
scaler.unscale_(optimizers[1])
MPI.Finalize()
for call in (lambda: scaler.step(optimizers[1]), lambda: scaler.step(optimizers[2]), construct):
    after = said(call)
    assert after.startswith("MPI was finalised in this process"), after
    assert "before MPI.Finalize()" in after
assert [optimizer.steps for optimizer in optimizers] == [1, 0, 0]
sys.stdout.write("survived\\n")
"""


@pytest.mark.parametrize("how", ["not initialised", "finalized"])
@pytest.mark.parametrize("size", [None, 1, 2], ids=["without mpiexec", "1 rank", "2 ranks"])
def test_without_mpi_a_scaler_is_refused_and_the_process_lives(size: int | None, how: str) -> None:
    program = ["-c", WITHOUT_MPI, how]
    command = [sys.executable, *program] if size is None else mpi_command(size, *program)
    completed = subprocess.run(command, env=mpi_environment(), capture_output=True, text=True, timeout=90, check=False)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.split() == ["survived"] * (size or 1)


def test_only_int32_vectors_travel(world: MPIWorld) -> None:
    for messages in world.run(scenario("wrong_arrays")):
        assert [message.rpartition("got ")[2] for message in messages] == ["1-d float32", "1-d int64", "2-d int32"]


def test_memory_that_mpi_reads_outlives_whoever_asked_for_it(world: MPIWorld) -> None:
    assert world.run(scenario("dropped")) == [[True]] * world.size


def test_a_strided_vector_is_reduced(world: MPIWorld) -> None:
    last = world.size - 1
    assert world.run(scenario("strided")) == [[last, 3 + last, 6 + last, 9 + last]] * world.size


PROGRAM = """
import os, signal, sys, time
import numpy as np
from mpi4py import MPI
import gradscale

class Optimizer:
    grads = [np.ones(3, dtype=np.float32)]
    def step(self): pass

comm = MPI.COMM_WORLD
scaler = gradscale.ShardedGradScaler(group=comm, timeout=float(sys.argv[2]))
scaler.scale(np.float32(1.0))
comm.Barrier()
if comm.rank == 1:
    if sys.argv[1] == "raises":
        raise ValueError("rank 1 fails")
    if sys.argv[1] == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "sleeps":
        time.sleep(60)
print("waiting", flush=True)
scaler.step(Optimizer())
"""


def run_program(
    tmp_path: Path, how: str, timeout: float, *flags: str
) -> tuple[subprocess.CompletedProcess[str], float]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    begin = time.monotonic()
    completed = subprocess.run(
        mpi_command(2, *flags, program, how, str(timeout)),
        env=mpi_environment(),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    return completed, time.monotonic() - begin


def test_a_program_with_a_rank_that_raises_ends_with_its_error(tmp_path: Path) -> None:
    completed, seconds = run_program(tmp_path, "raises", 1000.0, "-m", "mpi4py")
    assert completed.returncode != 0
    assert "ValueError: rank 1 fails" in completed.stderr
    assert seconds < 60


def test_a_program_with_a_rank_that_is_killed_ends(tmp_path: Path) -> None:
    completed, seconds = run_program(tmp_path, "is killed", 1000.0)
    assert completed.returncode != 0
    assert seconds < 60


def test_a_program_with_a_rank_that_hangs_ends_with_the_timeout(tmp_path: Path) -> None:
    completed, seconds = run_program(tmp_path, "sleeps", 1.0, "-m", "mpi4py")
    assert completed.returncode != 0
    assert (
        "CollectiveTimeoutError: rank 0 of 2 waited 1 s for the agreement on a step in iteration 1" in completed.stderr
    )
    assert seconds < 60


def test_ctrl_c_ends_the_wait(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = mpi_command(2, program, "sleeps", "1000")
    with subprocess.Popen(
        command, env=mpi_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "waiting"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        try:
            process.communicate(timeout=30)
        finally:
            process.kill()
        assert process.returncode != 0
        assert time.monotonic() - begin < 20
