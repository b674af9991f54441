"""The ranks that serve many scenarios: a broken world fails its own test with a reason, and never the next one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from axes import require
from pool_scenarios import behave, behave_alone
from worlds import Failure, MPIWorld, end_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.tier("ranks")]


@pytest.fixture(autouse=True)
def _mpi_is_there():
    require("mpi")


def processes(size: int = 2) -> set[int]:
    """Return the processes of ranks that do well."""
    return {pid for pid, _ in MPIWorld(size).run(behave)}


def assert_gone(pids: set[int]):
    """Assert that processes end within some seconds."""
    end = time.monotonic() + 20.0
    while there := [pid for pid in pids if Path("/proc", str(pid)).exists()]:
        assert time.monotonic() < end, f"still there: {there}"
        time.sleep(0.05)


def test_ranks_serve_one_scenario_after_the_other_but_for_those_that_are_alone():
    shared = processes()
    ((first, name), _), alone = MPIWorld(2).run(behave), MPIWorld(2).run(behave_alone)
    assert processes() == shared
    assert first in shared
    assert name != "MPI_COMM_WORLD"
    assert {name for _, name in alone} == {"MPI_COMM_WORLD"}
    assert not {pid for pid, _ in alone} & shared
    three = processes(3)
    assert len(three | shared) == 5
    end_ranks()
    assert_gone(three | shared)


@pytest.mark.parametrize(
    ("how", "limit", "said"),
    [
        ("raises", 60.0, ""),
        ("hangs", 1.5, r"ranks \[1\] gave no answer within 1.5 s.*in behave"),
        ("is killed", 60.0, r"ranks \[.*1.*\] gave no answer: one has ended"),
    ],
)
def test_a_rank_that_raises_hangs_or_dies_ends_the_others_and_the_next_scenario_runs(how: str, limit: float, said: str):
    before = processes(3)
    if how == "raises":
        kinds = [type(result) for result in MPIWorld(3).run(behave, how, 1)]
        assert kinds == [tuple, Failure, tuple]
    else:
        with pytest.raises(RuntimeError, match=f"(?s){said}"):
            MPIWorld(3).run_each(behave, [(how, 1)], limit=limit)
    assert_gone(before)
    assert not processes(3) & before


def test_ranks_that_end_badly_after_their_answer_are_an_error():
    with pytest.raises(RuntimeError, match=r"the ranks did not end well; the launcher's status is [1-9]"):
        MPIWorld(2).run(behave_alone, "fails at its end", 1)
