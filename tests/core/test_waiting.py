"""Waiting on a group: what poll asks and when it ends; what GroupWait raises, and when it gives the group up."""

import math
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from optimizers import Tree
from tiers import examples

from gradscale import BackendError, InvalidValueError, ShardedGradScaler, waiting
from gradscale.testing import ThreadCollectives, run_ranks
from gradscale.waiting import GroupWait, poll


class Clock:
    """A clock that goes on by a little with each look at it, and by what is slept."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 1e-5
        return self.now

    def sleep(self, seconds: float):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(waiting, "time", made)
    return made


def test_a_wait_ends_when_the_others_come_or_soon_after_the_time_in_which_the_process_has_run(clock: Clock):
    for seed in range(examples(500)):
        chance = random.Random(seed)
        timeout, pause, comes = chance.choice([0.02, 1.0, 10.0]), chance.choice([1e-3, 0.4]), chance.random() < 0.5
        gaps = [chance.choice([1.0, 3600.0, 1e7]) for _ in range(chance.choice([0, 1] if comes else [0, 2]))]
        # Each counts half a second at most.
        least, clock.now, suspended = timeout - 0.5 * len(gaps), 0.0, 0.0

        def ask(timeout=timeout, pause=pause, comes=comes, gaps=gaps) -> bool:
            nonlocal suspended
            if gaps and clock.now - suspended > 0.3 * timeout:
                suspended += gaps[-1]
                clock.now += gaps.pop()
            clock.now += min(pause, timeout / 8)
            # The other rank, which was suspended as well, comes as long after as it would have without.
            return comes and clock.now - suspended > 0.7 * timeout

        assert poll(ask, timeout) is comes, seed
        assert comes or least <= clock.now - suspended < 1.01 * timeout + 1.0, seed


@pytest.mark.parametrize("timeout", [0.0, 1.0])
@pytest.mark.parametrize("comes", [False, True])
def test_it_asks_once_more_when_the_time_is_over(clock: Clock, timeout: float, comes: bool):
    asked: list[float] = []

    def ask() -> bool:
        asked.append(clock.now)
        is_late = clock.now >= timeout and len(asked) > 1
        clock.now += timeout / 4
        return comes and is_late

    assert poll(ask, timeout) is comes
    assert asked[-1] >= timeout


class Group:
    """A library's group."""


def wait_on(group: Group, given_up: list[BaseException] | None = None, **options) -> GroupWait:
    settings: dict[str, Any] = {
        "library": "Courier",
        "timeout": 0.0,
        "refusal": "pass another one",
        "rank": 1,
        "size": 3,
    }
    return GroupWait(group, on_give_up=None if given_up is None else given_up.append, **settings | options)


def raising(error: BaseException) -> Callable[[], None]:
    def call():
        raise error

    return call


def test_what_the_library_raises_becomes_a_backend_error_and_gives_the_group_up():
    group, given_up = Group(), []
    wait = wait_on(group, given_up, describe=lambda error: f"status {error}")
    assert wait.run(lambda: 4) == 4
    cause = OSError(7)
    with pytest.raises(
        BackendError, match=r"^Courier failed on rank 1 of 3 while the ranks agreed on a step: status 7$"
    ) as caught:
        wait.run(raising(cause))
    assert caught.value.__cause__ is cause
    assert given_up == [caught.value]
    # Whoever holds it: the messages of both would meet.
    for one in (wait, wait_on(group)):
        with pytest.raises(BackendError, match=r"^pass another one\. It was given up for: BackendError\(.*status 7"):
            one.require_usable()
    wait_on(Group()).require_usable()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), InvalidValueError("wrong")])
def test_ctrl_c_and_errors_of_gradscale_are_raised_as_they_are_and_give_the_group_up(error: BaseException):
    group, given_up = Group(), []
    with pytest.raises(type(error)) as caught:
        wait_on(group, given_up).run(raising(error))
    assert caught.value is error
    # The first reason is kept, and told once.
    wait_on(group, given_up).give_up(ValueError("second"))
    assert given_up == [error]
    with pytest.raises(BackendError, match=type(error).__name__):
        wait_on(group).require_usable()


@pytest.mark.parametrize(("seconds", "lines"), [(59.0, 0), (61.0, 1), (300.0, 1)])
@pytest.mark.parametrize("timeout", [400.0, math.inf])
def test_a_wait_of_more_than_a_minute_is_told_once_on_the_log(
    clock: Clock, caplog: pytest.LogCaptureFixture, seconds: float, lines: int, timeout: float
):
    wait_on(Group(), timeout=timeout).until(lambda: clock.now >= seconds, "a letter", longest_pause=0.4)
    left = "never gives up" if math.isinf(timeout) else f"gives up in {timeout - 60:g} s"
    told = f"rank 1 of 3 has waited 60 s for the other ranks to come to a letter, and {left}"
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [told] * lines
    assert all((record.name, record.levelname) == ("gradscale", "WARNING") for record in caplog.records)


def test_ranks_that_are_threads_say_that_they_wait(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(waiting, "_SILENT", 0.05)
    has_told = threading.Event()
    caplog.handler.addFilter(lambda _record: has_told.set() or True)

    def train(group: ThreadCollectives) -> float:
        scaler, optimizer = ShardedGradScaler(group=group, init_scale=4.0), Tree()
        if group.rank == 1:
            assert has_told.wait(20.0)
        optimizer.grads = [scaler.scale(np.float32([1.0]))]
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    assert run_ranks(2, train) == [4.0, 4.0]
    assert ["rank 0 of 2 has waited" in record.getMessage() for record in caplog.records] == [True]
