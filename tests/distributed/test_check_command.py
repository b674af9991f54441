"""``gradscale check`` on real ranks: what passes, each fault on each rank in turn, and ranks that never come."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import ran
from scenarios import Around
from worlds import mpi_command, mpi_environment

from gradscale import BackendError
from gradscale.scaler import claim as claims
from gradscale.testing import ThreadCollectives, run_ranks

with contextlib.suppress(ImportError):
    from typer import Exit

    from gradscale.tools.cli import check as command
    from gradscale.tools.cli import check_rank as ranks

pytestmark = [pytest.mark.tier("all"), pytest.mark.usefixtures("cli")]

mpi = pytest.mark.mpi
torch = pytest.mark.torch

FAULTY = str(Path(__file__).parents[1] / "support" / "faulty_check.py")
# In which stage a fault is found.
STAGES = {"late": "report in", "hang": "inf on rank 0", "die": "inf on rank 0"}
# The launcher, the number of ranks, and a fault of one; two of them run before the last tier.
EARLY = [("mpi", 2, "", 0), ("mpi", 2, "die", 1)]
RUNS = [
    *EARLY,
    *(("mpi", 2, kind, rank) for kind, rank in (("late", 0), ("late", 1), ("hang", 0), ("die", 0))),
    *(("mpi", 3, "", 0), ("mpi", 3, "hang", 2), ("torch", 2, "", 0), ("torch", 2, "late", 1), ("torch", 2, "die", 0)),
]
# Loading numba takes longer than most checks, and MPICH says on stdout what it is made of.
ENVIRONMENT = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "300", "GRADSCALE_NUMPY_FAST": "0"}
ENVIRONMENT |= {"MPIR_CVAR_DEBUG_SUMMARY": "1"}


def run(*command: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return ran(*command, **(mpi_environment() | ENVIRONMENT | variables))


def check(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command as one process."""
    return run(sys.executable, "-m", "gradscale", "check", *arguments, **variables)


def launched(group: str, size: int, *arguments: str, fault: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command under mpiexec or torchrun, perhaps with a fault such as ``die:1``."""
    program = [FAULTY, fault] if fault else ["-m", "gradscale", "check"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    command = mpi_command(size, *program) if group == "mpi" else [*torchrun, *program]
    return run(*command, *arguments)


def page_of(completed: subprocess.CompletedProcess[str]):
    """Return the page, the one thing on stdout."""
    try:
        page: dict[str, Any] = json.loads(completed.stdout)
    except ValueError:
        pytest.fail(f"{completed.stdout!r} is no JSON; status {completed.returncode}, {completed.stderr}")
    return page


@pytest.mark.parametrize(
    ("group", "size", "kind", "rank"),
    [
        pytest.param(*run, marks=[getattr(pytest.mark, run[0]), pytest.mark.tier("ranks" if run in EARLY else "all")])
        for run in RUNS
    ],
)
def test_ranks_pass_or_all_end_and_name_the_one_with_a_fault(group: str, size: int, kind: str, rank: int):
    # A rank that waits must not be given up by its supervisor before the others name the one that it waits for.
    limit = "7" if kind else "30"
    completed = launched(group, size, "--json", "--timeout", limit, fault=f"{kind}:{rank}" if kind else "")
    page = page_of(completed)
    assert (page["ok"], completed.returncode == 0) == (not kind, not kind), completed.stderr
    if kind:
        (problem,) = page["problems"]
        assert problem["rank"] == rank
        assert "did not answer" in problem["problem"]
        assert problem["problem"].endswith(f"in: {STAGES[kind]}")
        assert f"gradscale: check: rank {rank}: " in completed.stderr
        if kind == "die":
            assert f"rank {rank} of {size} (" in completed.stderr
            assert "ended with exit code -9, in: inf on rank 0" in completed.stderr
        return
    assert (page["group"], page["size"], page["problems"]) == (group, size, [])
    assert [one["rank"] for one in page["ranks"]] == list(range(size))
    assert len({one["pid"] for one in page["ranks"]}) == size
    wanted = [f"{value} on rank {rank}" for value in ("inf", "nan") for rank in range(size)]
    wanted += ["clean step", *(f"other scale on rank {rank}" for rank in range(size)), "late inf"]
    assert [stage["name"] for stage in page["stages"]] == ["report in", "make the group", *wanted, "latency"]
    assert all(stage["ok"] for stage in page["stages"])
    assert page["latency_us"] > 0
    assert "gradscale:" not in completed.stderr
    if (group, size) == ("mpi", 2):
        assert launched(group, size, "--timeout", "30").stdout.count("gradscale check over mpi, size 2: passed") == 1


@mpi
def test_a_rank_that_never_comes_to_mpi_init_does_not_hang_the_others():
    mpiexec, _, _, *command = mpi_command(1, "-m", "gradscale", "check", "--group", "mpi", "--timeout", "1")
    absent = [sys.executable, "-c", "import time; time.sleep(60)"]
    completed = run(mpiexec, "-n", "1", *command, ":", "-n", "1", *absent)
    assert completed.returncode != 0
    said = r"a rank \(.*, process \d+\) did not answer within 3 s, in: waiting for all ranks to start: one is missing"
    assert re.search(said, completed.stderr)


class World:
    """Threads as the ranks of a check."""

    def __init__(self, group: ThreadCollectives, reports: dict[Any, Any], wrap: Callable[[Any], Any]):
        self.rank, self.size, self.group, self._reports = group.rank, group.size, wrap(group), reports

    def versions(self) -> dict[str, str]:
        return {"numpy": f"2.{self.rank}"} | ({"torch": "2.7"} if self.rank == 0 else {})

    def send(self, number: int, report):
        self._reports[self.rank, number] = report

    def get(self, rank: int, number: int):
        return self._reports.get((rank, number))


class Faulty(Around):
    """Collectives whose every message fails, that are "blind" to bad gradients or "deaf" to others' states."""

    def __init__(self, inner, fault: Exception | str):
        super().__init__(inner)
        self._fault = fault

    def start_max(self, x, /):
        if isinstance(self._fault, Exception):
            raise self._fault
        finish = super().start_max(x)

        def answer():
            agreed = finish()
            # The comparison of the versions, which comes first, is shorter.
            if len(x) == claims.LENGTH and self._fault == "deaf":
                agreed = np.concatenate([agreed[:5], x[5:]])
            elif len(x) == claims.LENGTH and self._fault == "blind":
                # Neither a count nor a reason.
                agreed[[0, 4]] = 0
            return agreed

        return answer


def checked(wrap: Callable[[Any], Any]):
    """Return the page of rank 0 of two threads."""
    reports: dict[Any, Any] = {}

    def run(group: ThreadCollectives):
        page: dict[str, Any] = {"stages": [], "latency": None}
        ranks.Rank(World(group, reports, wrap), np.zeros((), np.float32), 20.0).run(page, lambda _: None)
        return page

    return run_ranks(2, run)[0]


@pytest.mark.tier("quick")
def test_all_that_is_tried_passes_and_is_in_the_page_and_the_late_rank_is_late(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    sleep, slept = time.sleep, []
    monkeypatch.setattr(time, "sleep", lambda seconds: (slept.append(seconds), sleep(seconds)))
    page = checked(lambda group: group)
    assert (page["ok"], page["problems"]) == (True, [])
    assert [seconds for seconds in slept if seconds > 0.1] == [0.3]
    command.show(page | {"group": "mpi"}, as_json=False)
    printed = capsys.readouterr().out
    assert printed.startswith("gradscale check over mpi, size 2: passed\n")
    assert "numpy 2.0 and 2.1, torch 2.7 and none\n" in printed
    assert printed.count("inf on each rank") == 1
    assert "one agreement takes " in printed


DOWN = "the network is down"


@pytest.mark.tier("quick")
@pytest.mark.parametrize(
    ("errors", "stage", "blamed", "problem"),
    [
        ((BackendError(DOWN), BackendError(DOWN)), "inf on rank 0", [0, 1], DOWN),
        (("deaf", "deaf"), "other scale on rank 0", [0, 1], "did not notice that rank 0 holds another scale"),
        (("", "blind"), "inf on rank 0", [1], "stepped where every rank should have skipped"),
        # A rank that waited for one that failed is not to blame.
        ((BackendError("some rank never came"), ValueError(DOWN)), "inf on rank 0", [1], DOWN),
    ],
    ids=["fails", "deaf", "blind", "waited"],
)
def test_what_ranks_fail_at_is_a_problem_of_these(errors, stage: str, blamed: list[int], problem: str):
    page = checked(lambda group: Faulty(group, errors[group.rank]))
    assert (page["ok"], page["stages"][-1]["name"]) == (False, stage)
    assert [one["rank"] for one in page["problems"]] == blamed
    assert all(problem in one["problem"] for one in page["problems"])


@mpi
def test_one_process_does_not_pass_and_does_not_pass_where_several_were_started():
    completed = check("--group", "mpi")
    assert completed.returncode == 2, completed.stderr
    assert "gradscale check over mpi, size 1: nothing to compare, start several ranks" in completed.stdout
    assert completed.stderr.endswith("start several: mpiexec -n 4 python -m gradscale check --group mpi\n")
    completed = check("--group", "mpi", "--json")
    assert (completed.returncode, page_of(completed)["ok"]) == (2, False)
    # As under the mpiexec of another MPI than the one of mpi4py.
    completed = check("--group", "mpi", "--json", OMPI_COMM_WORLD_SIZE="4")
    assert completed.returncode == 1
    (problem,) = page_of(completed)["problems"]
    assert problem["problem"].startswith("4 processes were started, and each is alone in its group: take the mpiexec")


@mpi
def test_a_rank_does_not_outlive_the_process_that_has_started_it():
    command = [sys.executable, FAULTY, "late:0", "--group", "mpi", "--timeout", "1000"]
    with subprocess.Popen(command, env=mpi_environment() | ENVIRONMENT, stdout=subprocess.PIPE) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not children.read_text():
            time.sleep(0.01)
        process.kill()
        # Its end comes when nobody can write any more: the rank has the same stdout.
        assert process.communicate(timeout=60) == (b"", None)


@torch
def test_a_store_that_is_not_there_is_an_error_within_the_timeout():
    completed = check("--timeout", "1", RANK="1", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="9")
    assert completed.returncode == 1
    # Torch tries again and gives up, or the command's own watch is the first to see that it takes too long.
    said = ("cannot join the group over torch: ", "did not answer within 3 s, in: waiting for all ranks to start")
    assert any(text in completed.stderr for text in said), completed.stderr


def test_a_process_that_no_launcher_has_started_is_told_how_to_start(monkeypatch: pytest.MonkeyPatch):
    for name in [*os.environ]:
        if name.startswith(("PMI", "OMPI", "MPI", "RANK", "WORLD_SIZE", "SLURM_")):
            monkeypatch.delenv(name)
    completed = ran(sys.executable, "-m", "gradscale", "check", **ENVIRONMENT)
    assert completed.returncode == 2
    told = " ".join(completed.stderr.replace("│", " ").split())
    for said in (
        "neither mpiexec nor torchrun has started this process: start it with",
        "mpiexec -n 4 python -m gradscale check --group mpi",
        "torchrun --nproc-per-node 2 -m gradscale check --group torch",
    ):
        assert said in told


@mpi
@pytest.mark.tier("quick")
def test_a_rank_that_dies_before_it_joins_says_who_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(command, "RANK_PROGRAM", ("-c", "import os; os.kill(os.getpid(), 9)"))
    with pytest.raises(Exit) as ended:
        command.check(command.Group.mpi)
    said = r"a rank \(.*, process \d+\) did not answer: it ended with exit code -9, in: its start\n"
    assert re.search(said, capsys.readouterr().err)
    assert ended.value.exit_code == 1
