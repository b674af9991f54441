"""DeviceCollectives over a communicator made here: what it starts where, how it waits, and every way to end.

What two libraries' communicators add is tested over these: test_cupy_nccl.py and test_nccl4py_gpu.py in ../adapters.
"""

import math
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gradscale import BackendError, CallOrderError, CollectiveTimeoutError, InvalidValueError
from gradscale.waiting import DeviceCollectives, GroupWait

pytestmark = pytest.mark.numpy

CONNECTS = pytest.mark.parametrize("connects", [False, True], ids=["waiting", "connecting"])
PATIENCE = 20.0
SHORT = 0.05


class Courier:
    """A communicator of one of two ranks, of which the other comes when the test says so."""

    rank, size = 0, 2

    def __init__(self, *, connects: bool = False):
        # Whether the first collective of each length holds the thread that starts it.
        self.connects = connects
        self.has_come = threading.Event()
        self.lengths: set[int] = set()
        self.issued_by: list[str] = []
        self.aborts = 0
        # What the library, the device and the end of the communicator come to.
        self.error: Exception | None = None
        self.failure: Exception | None = None
        self.end: Callable[[], object] = lambda: None

    def example(self):
        return np.zeros((), np.float32)

    def all_reduce(self, x: Any, start: Callable[..., None], *, here: bool = False):
        def issue():
            self.issued_by.append(threading.current_thread().name)
            if self.connects and len(x) not in self.lengths:
                self.has_come.wait()
            self.lengths.add(len(x))

        def is_done() -> bool:
            if self.failure is not None:
                raise self.failure
            return self.has_come.is_set()

        start(issue, here=here)
        return is_done, lambda: x + 1

    def check(self):
        if self.error is not None:
            raise self.error

    def abort(self):
        self.aborts += 1
        self.end()
        # What waits on a device, or to connect, ends with the communicator.
        self.has_come.set()


def over(comm: Any, timeout: float = SHORT) -> DeviceCollectives:
    wait = GroupWait(comm, library="Courier", timeout=timeout, refusal="pass another one", rank=-1, size=0)
    return DeviceCollectives(wait, lambda group: group.group, comm)


def vector(*values: int):
    return np.array(values, np.int32)


def test_starting_waits_for_nothing_but_the_first_of_each_length():
    comm = Courier()
    collectives, here = over(comm), threading.current_thread().name
    for length in (2, 2, 2, 3):
        collectives.start_max(vector(*range(length)))
    assert comm.issued_by == ["gradscale", here, here, "gradscale"]


def test_what_must_be_issued_in_this_thread_is():
    class Here(Courier):
        def all_reduce(self, x: Any, start: Callable[..., None], **_: bool):
            return super().all_reduce(x, start, here=True)

    comm = Here()
    over(comm).start_max(vector(1))
    assert comm.issued_by == [threading.current_thread().name]


def test_a_result_is_waited_for_once_and_is_the_same_each_time():
    comm = Courier()
    pending = over(comm, PATIENCE).start_max(vector(1, 2))
    threading.Timer(0.02, comm.has_come.set).start()
    result = pending()
    comm.failure = ValueError("asked once more")
    assert pending() is result
    assert result.tolist() == [2, 3]


def test_what_cannot_be_reduced_is_an_error_before_it_is_sent():
    comm = Courier()
    collectives = over(comm)
    for values, dtype, text in (([1], np.int64, "1-d int64"), ([[1]], np.int32, "2-d int32"), (1, np.int32, "0-d")):
        with pytest.raises(InvalidValueError, match=f"only 1-d int32 arrays are reduced, got {text}"):
            collectives.start_max(np.asarray(values, dtype))
    assert (comm.issued_by, comm.aborts) == ([], 0)


def test_an_array_that_the_library_refuses_gives_nothing_up():
    class Refuses(Courier):
        def all_reduce(self, x: Any, start: Callable[..., None], **options: bool):
            if x[0] < 0:
                raise CallOrderError("elsewhere")
            return super().all_reduce(x, start, **options)

    comm = Refuses()
    collectives = over(comm)
    with pytest.raises(CallOrderError):
        collectives.start_max(vector(-1))
    collectives.start_max(vector(1))
    assert comm.aborts == 0


@CONNECTS
def test_a_rank_that_never_comes_is_a_timeout_that_ends_the_group_once(connects: bool):
    comm = Courier(connects=connects)
    collectives, begin = over(comm), time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match=r"waited 0\.05 s for the agreement on a step") as raised:
        collectives.start_max(vector(1, 2))()
    assert SHORT <= time.monotonic() - begin < PATIENCE
    assert (raised.value.rank, raised.value.size, raised.value.seconds) == (0, 2, SHORT)
    with pytest.raises(BackendError, match=r"pass another one(.|\n)*CollectiveTime"):
        collectives.start_max(vector(1, 2))
    with pytest.raises(BackendError, match="given up"):
        over(comm, PATIENCE)
    assert comm.aborts == 1


@CONNECTS
def test_an_error_that_the_library_finds_is_raised_and_ends_the_group_once(connects: bool):
    comm = Courier(connects=connects)
    threading.Timer(0.05, lambda: setattr(comm, "error", OSError("a road is closed"))).start()
    begin = time.monotonic()
    with pytest.raises(BackendError, match=r"Courier failed on rank 0 of 2 .*: a road is closed"):
        over(comm, PATIENCE).start_max(vector(1))()
    assert (comm.aborts, time.monotonic() - begin < PATIENCE / 2) == (1, True)


@pytest.mark.parametrize("has_come", [False, True], ids=["and no timeout", "though an answer has come"])
def test_a_device_or_a_library_that_has_failed_is_its_error(has_come: bool):
    comm = Courier()
    pending = over(comm, PATIENCE).start_max(vector(1))
    setattr(comm, "error" if has_come else "failure", OSError("the horse is lame"))
    if has_come:
        comm.has_come.set()
    with pytest.raises(BackendError, match="the horse is lame"):
        pending()
    assert comm.aborts == 1


def test_what_was_under_way_at_a_timeout_is_no_answer_though_it_has_ended():
    collectives = over(Courier())
    first, second = (collectives.start_max(vector(k)) for k in range(2))
    with pytest.raises(CollectiveTimeoutError):
        first()
    for pending in (first, second):
        with pytest.raises(BackendError, match="given up"):
            pending()


@CONNECTS
def test_ctrl_c_ends_the_wait_and_the_group(connects: bool):
    comm = Courier(connects=connects)
    collectives = over(comm, math.inf)

    def interrupt():
        while not comm.issued_by:
            time.sleep(1e-3)
        time.sleep(0.1)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        collectives.start_max(vector(1))()
    assert comm.aborts == 1
    with pytest.raises(BackendError, match="KeyboardInterrupt"):
        collectives.start_max(vector(1))


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.5, r"the communicator was not aborted within 0\.01 s: end this process"),
        (None, "the communicator could not be aborted: it is not here: end this process"),
    ],
    ids=["hangs", "fails"],
)
def test_an_end_that_does_not_work_hides_no_error(seconds: float | None, said: str, monkeypatch: pytest.MonkeyPatch):
    def end():
        if seconds is None:
            raise OSError("it is not here")
        time.sleep(seconds)

    monkeypatch.setattr("gradscale.waiting._ABORTING", 0.01 if seconds else 10.0)
    comm = Courier()
    comm.end = end
    with pytest.raises(CollectiveTimeoutError, match="agreement on a step") as raised:
        over(comm).start_max(vector(1))()
    (note,) = raised.value.__notes__
    assert re.fullmatch(said, note), note
