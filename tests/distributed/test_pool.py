"""The ranks that serve many scenarios: a broken world fails its own test with a reason, and never the next one."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pool_scenarios
import pytest
from axes import require
from pool import Pool, World
from worlds import MPI_RUNNER, Failure, MPIWorld, mpi_command, mpi_environment

pytestmark = [pytest.mark.mpi, pytest.mark.tier("ranks")]

LIMIT = 60.0  # seconds


@pytest.fixture(autouse=True)
def _mpi_is_there() -> None:
    require("mpi")


@pytest.fixture
def ranks() -> Iterator[Pool]:
    """Return a pool of its own, which must end well."""
    pool = Pool(command, mpi_environment)
    yield pool
    pool.close()


def command(size: int, address: str) -> list[str]:
    return mpi_command(size, MPI_RUNNER, address)


def ask(ranks: Pool, how: str = "well", where: int = 0, size: int = 2, limit: float = LIMIT) -> list[Any]:
    """Return what each rank answers to one case."""
    task = pickle.dumps(("pool_scenarios", "behave", [(how, where)], False))
    return [answer for (answer,) in ranks.run(size, task, limit)]


def pids(answers: list[dict[str, Any]]) -> list[int]:
    return [answer["pid"] for answer in answers]


def assert_gone(processes: list[int]) -> None:
    """Assert that processes end within some seconds."""
    end = time.monotonic() + 20.0
    while there := [process for process in processes if Path("/proc", str(process)).exists()]:
        assert time.monotonic() < end, f"still there: {there}"
        time.sleep(0.05)


def test_processes_serve_one_scenario_after_the_other_each_with_its_own_communicator(ranks: Pool) -> None:
    first, second, three = ask(ranks), ask(ranks), ask(ranks, size=3)
    assert pids(first) == pids(second)
    assert len({*pids(first), *pids(three), os.getpid()}) == 6
    assert {answer["communicator"] for answer in first + second + three} != {"MPI_COMM_WORLD"}
    ranks.close()
    assert_gone(pids(first) + pids(three))


def test_a_scenario_that_is_alone_has_the_world_and_new_processes() -> None:
    world = MPIWorld(2)
    shared, alone = world.run(pool_scenarios.behave), world.run(pool_scenarios.behave_alone)
    assert [answer["communicator"] for answer in alone] == ["MPI_COMM_WORLD"] * 2
    assert_gone(pids(alone))
    assert pids(world.run(pool_scenarios.behave)) == pids(shared)


def test_a_rank_that_raises_is_a_failure_with_its_traceback_and_the_world_is_replaced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = MPIWorld(2).run(pool_scenarios.behave)
    fine, failure = MPIWorld(2).run(pool_scenarios.behave, "raises", 1)
    assert not isinstance(fine, Failure)
    assert (failure.kind, failure.message) == ("KeyError", "'this rank fails on purpose'")
    printed = capsys.readouterr().out
    for said in ("rank 1 of 2 raised:\nTraceback", "in _raise\n", "KeyError: 'this rank fails on purpose'"):
        assert said in printed
    assert not set(pids(MPIWorld(2).run(pool_scenarios.behave))) & set(pids(before))


@pytest.mark.parametrize(
    ("how", "limit", "said"),
    [
        ("hangs", 1.5, r"ranks \[1\] gave no answer within 1.5 s.*task 2.*in _hang"),
        ("is killed", LIMIT, r"ranks \[.*1.*\] gave no answer: one has ended"),
        ("ends", LIMIT, r"ranks \[.*1.*\] gave no answer.*this rank ends on purpose"),
        ("answers what cannot be sent", LIMIT, r"ranks \[.*1.*\] gave no answer.*pickle"),
    ],
)
def test_a_rank_that_hangs_or_dies_ends_the_others_and_the_next_scenario_runs(
    ranks: Pool, how: str, limit: float, said: str
) -> None:
    before = pids(ask(ranks, size=3))
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=f"(?s){said}"):
        ask(ranks, how, 1, size=3, limit=limit)
    assert time.monotonic() - begin < 20.0
    assert_gone(before)
    assert not set(pids(ask(ranks, size=3))) & set(before)


def test_a_world_that_died_between_scenarios_is_replaced_and_is_an_error_at_the_end(ranks: Pool) -> None:
    before = pids(ask(ranks))
    os.kill(before[1], signal.SIGKILL)
    assert_gone(before)
    assert not set(pids(ask(ranks))) & set(before)
    with pytest.raises(RuntimeError, match="the ranks did not end well"):
        ranks.close()
    # It is told once.
    ranks.close()


@pytest.mark.parametrize("how", ["sets a variable", "draws a number", "changes the folder"])
def test_what_a_scenario_has_changed_does_not_meet_the_next_one(ranks: Pool, how: str) -> None:
    before = ask(ranks)
    assert pids(ask(ranks, how, 1)) == pids(before)
    after = ask(ranks)
    assert not set(pids(after)) & set(pids(before))
    assert [answer["left behind"] for answer in after] == [None, None]


def test_ranks_see_the_environment_of_the_test_that_asks(ranks: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [answer["left behind"] for answer in ask(ranks)] == [None, None]
    with monkeypatch.context() as patch:
        patch.setenv(pool_scenarios.LEFT, "2")
        assert [answer["left behind"] for answer in ask(ranks)] == ["2", "2"]
    assert [answer["left behind"] for answer in ask(ranks)] == [None, None]


def test_ranks_that_end_badly_after_their_answer_are_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"the ranks did not end well; the launcher's status is [1-9]"):
        MPIWorld(2).run(pool_scenarios.behave_alone, "fails at its end", 1)


@pytest.mark.parametrize(
    ("program", "said"),
    [("raise SystemExit('no rank starts')", "no rank starts"), ("import time; time.sleep(60)", "")],
    ids=["ends", "hangs"],
)
def test_ranks_that_do_not_start_are_an_error_with_what_they_print(program: str, said: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"(?s)ranks \[0, 1\] did not connect.*\n.*{said}"):
        World(2, lambda _: mpi_command(2, "-c", program), mpi_environment(), starting=3.0)
    assert time.monotonic() - begin < 30.0
