"""Waiting for ranks: what poll asks and when it ends; DeviceCollectives over a communicator made here, to every end.

What two libraries' communicators add is tested over these: test_cupy_nccl.py in ../adapters.
"""

import math
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from optimizers import Tree
from tiers import examples

import gradscale
from gradscale import BackendError, CollectiveTimeoutError, InvalidValueError, waiting
from gradscale.testing import ThreadCollectives, run_ranks
from gradscale.waiting import DeviceCollectives, GroupWait, poll

pytestmark = pytest.mark.numpy

PATIENCE = 10.0
SHORT = 0.05


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
def test_it_asks_once_more_when_the_time_is_over(clock: Clock, timeout: float):
    asked: list[float] = []

    def ask() -> bool:
        asked.append(clock.now)
        clock.now += timeout / 4
        return asked[-1] >= timeout and len(asked) > 1

    assert poll(ask, timeout)


class Courier:
    """A communicator of one of two ranks, of which the other comes when the test says so."""

    rank, size = 0, 2

    def __init__(self, *, connects: bool = False, here: bool = False):
        # Whether the first collective of each length holds the thread that starts it, which may have to be this one.
        self.connects, self.here = connects, here
        self.has_come = threading.Event()
        self.lengths: set[int] = set()
        self.issued_by: list[str] = []
        self.aborts = 0
        # What the library, the device and the end of the communicator come to.
        self.error: BaseException | None = None
        self.failure: Exception | None = None
        self.end: Callable[[], object] = lambda: None

    def example(self):
        return np.zeros((), np.float32)

    def all_reduce(self, x: Any, start: Callable[..., None]):
        def issue():
            self.issued_by.append(threading.current_thread().name)
            if self.connects and len(x) not in self.lengths:
                self.has_come.wait()
            self.lengths.add(len(x))

        def is_done() -> bool:
            if self.failure is not None:
                raise self.failure
            return self.has_come.is_set()

        if x[0] < 0:
            raise gradscale.CallOrderError("elsewhere")
        start(issue, here=self.here)
        return is_done, lambda: x + 1

    def check(self):
        if self.error is not None:
            raise self.error

    def abort(self):
        self.aborts += 1
        self.end()
        # What waits on a device, or to connect, ends with the communicator.
        self.has_come.set()


def wait_on(comm: Any, timeout: float = SHORT) -> GroupWait:
    options: dict[str, Any] = {"rank": 1, "size": 3, "describe": lambda error: f"status {error}"}
    return GroupWait(comm, library="Courier", timeout=timeout, refusal="pass another one", **options)


def over(comm: Any, timeout: float = SHORT) -> DeviceCollectives:
    return DeviceCollectives(wait_on(comm, timeout), lambda group: group.group, comm)


def vector(*values: int):
    return np.array(values, np.int32)


def test_starting_waits_for_nothing_but_the_first_of_each_length_and_a_result_is_waited_for_once():
    here = threading.current_thread().name
    for comm, names in ((Courier(), ["gradscale", here, here, "gradscale"]), (Courier(here=True), [here] * 4)):
        collectives = over(comm)
        for length in (2, 2, 2, 3):
            collectives.start_max(vector(*range(length)))
        assert comm.issued_by == names
    pending = over(comm, PATIENCE).start_max(vector(1, 2))
    threading.Timer(0.02, comm.has_come.set).start()
    result = pending()
    comm.failure = ValueError("asked once more")
    assert pending() is result
    assert result.tolist() == [2, 3]


def test_what_cannot_be_reduced_is_an_error_before_it_is_sent_and_gives_nothing_up_but_what_fails_in_the_library():
    comm = Courier()
    collectives = over(comm)
    for values, dtype, text in (([1], np.int64, "1-d int64"), ([[1]], np.int32, "2-d int32"), (1, np.int32, "0-d")):
        with pytest.raises(InvalidValueError, match=f"only 1-d int32 arrays are reduced, got {text}"):
            collectives.start_max(np.asarray(values, dtype))
    with pytest.raises(gradscale.CallOrderError, match="elsewhere"):
        collectives.start_max(vector(-1))
    assert (comm.issued_by, comm.aborts) == ([], 0)
    collectives.start_max(vector(1))


def failing(name: str, error: BaseException, *, has_come: bool = False):
    """Return what happens to a communicator when the library or the device fails, perhaps after an answer."""

    def fail(comm: Courier):
        setattr(comm, name, error)
        if has_come:
            comm.has_come.set()

    return fail


LAME = OSError("the horse is lame")
FAILED = "^Courier failed on rank 0 of 2 while the ranks agreed on a step: status the horse is lame$"
# What happens while a rank waits, and what it ends with; and whether it may wait for the library to connect the ranks.
ENDS: dict[str, tuple[Callable[[Courier], None], type[BaseException], str, bool]] = {
    "nobody comes": (lambda _: None, CollectiveTimeoutError, r"waited 0\.05 s for the agreement on a step", True),
    "the library fails": (failing("error", LAME), BackendError, FAILED, True),
    "the library fails after an answer": (failing("error", LAME, has_come=True), BackendError, FAILED, False),
    "the device fails": (failing("failure", LAME), BackendError, FAILED, False),
    "an error of gradscale": (failing("error", InvalidValueError("wrong")), InvalidValueError, "^wrong$", True),
    "Ctrl-C": (lambda _: signal.raise_signal(signal.SIGINT), KeyboardInterrupt, "^$", True),
}


@pytest.mark.parametrize(
    ("name", "connects"), [(name, connects) for name in ENDS for connects in {False, ENDS[name][3]}]
)
def test_whatever_ends_a_wait_is_raised_soon_and_ends_the_group_once(name: str, connects: bool):
    happen, kind, said, _ = ENDS[name]
    comm, is_late = Courier(connects=connects), kind is CollectiveTimeoutError
    collectives = over(comm, SHORT if is_late else PATIENCE)

    def soon():
        while not comm.issued_by:
            time.sleep(1e-3)
        time.sleep(SHORT)
        happen(comm)

    begin = time.monotonic()
    threading.Thread(target=soon, daemon=True).start()
    with pytest.raises(kind, match=said) as caught:
        collectives.start_max(vector(1, 2))()
    assert SHORT <= time.monotonic() - begin < PATIENCE
    assert caught.value.__cause__ is (LAME if kind is BackendError else None)
    if is_late:
        assert (caught.value.rank, caught.value.size, caught.value.seconds) == (0, 2, SHORT)
    # The first reason is kept, whoever holds the group: the messages of both would meet.
    wait_on(comm).give_up(ValueError("second"))
    for use in (lambda: collectives.start_max(vector(1, 2)), lambda: over(comm), wait_on(comm).require_usable):
        with pytest.raises(BackendError, match=rf"^pass another one\. It was given up for: {kind.__name__}\("):
            use()
    assert comm.aborts == 1


NOT_ABORTED = "the communicator was not aborted within 0.01 s: end this process"
NO_ABORT = "the communicator could not be aborted: status it is not here: end this process"


@pytest.mark.parametrize("said", [NOT_ABORTED, NO_ABORT], ids=["hangs", "fails"])
def test_an_end_that_does_not_work_hides_no_error_and_what_was_under_way_is_no_answer(
    said: str, monkeypatch: pytest.MonkeyPatch
):
    def end():
        if said == NO_ABORT:
            raise OSError("it is not here")
        time.sleep(0.5)

    monkeypatch.setattr(waiting, "_ABORTING", 10.0 if said == NO_ABORT else 0.01)
    comm = Courier()
    comm.end, collectives = end, over(comm)
    first, second = (collectives.start_max(vector(k)) for k in range(2))
    with pytest.raises(CollectiveTimeoutError, match="agreement on a step") as raised:
        first()
    assert raised.value.__notes__ == [said]
    # Though it has ended.
    comm.has_come.set()
    for pending in (first, second):
        with pytest.raises(BackendError, match="given up"):
            pending()


@pytest.mark.parametrize(("seconds", "lines"), [(59.0, 0), (61.0, 1), (300.0, 1)])
@pytest.mark.parametrize("timeout", [400.0, math.inf])
def test_a_wait_of_more_than_a_minute_is_told_once_on_the_log(
    clock: Clock, caplog: pytest.LogCaptureFixture, seconds: float, lines: int, timeout: float
):
    wait_on(Courier(), timeout).until(lambda: clock.now >= seconds, "a letter", longest_pause=0.4)
    left = "never gives up" if math.isinf(timeout) else f"gives up in {timeout - 60:g} s"
    told = f"rank 1 of 3 has waited 60 s for the other ranks to come to a letter, and {left}"
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [told] * lines
    assert all((record.name, record.levelname) == ("gradscale", "WARNING") for record in caplog.records)


@pytest.mark.parametrize("timeout", [59.0, 60.0, 61.0, 100.0, 1800.0])
def test_a_wait_for_nobody_ends_when_its_time_is_over_also_above_a_minute(clock: Clock, timeout: float):
    with pytest.raises(CollectiveTimeoutError, match=rf"waited {timeout:g} s for a letter"):
        wait_on(Courier(), timeout).until(lambda: False, "a letter", longest_pause=0.4)
    assert timeout <= clock.now < timeout + 1.0


def test_ranks_that_are_threads_say_that_they_wait(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(waiting, "_SILENT", 0.05)
    has_told = threading.Event()
    caplog.handler.addFilter(lambda _record: has_told.set() or True)

    def train(group: ThreadCollectives) -> float:
        scaler, optimizer = gradscale.ShardedGradScaler(group=group, init_scale=4.0), Tree()
        if group.rank == 1:
            assert has_told.wait(20.0)
        optimizer.grads = [scaler.scale(np.float32([1.0]))]
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    assert run_ranks(2, train) == [4.0, 4.0]
    assert ["rank 0 of 2 has waited" in record.getMessage() for record in caplog.records] == [True]
