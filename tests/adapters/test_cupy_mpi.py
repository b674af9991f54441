"""CuPy arrays over MPI: through pinned memory of the host, which waits in the step and not before, in one order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from axes import require
from optimizers import Tree

from gradscale import BackendError, CollectiveTimeoutError, InvalidValueError, ShardedGradScaler
from gradscale.core.registry import collectives_for

pytestmark = [pytest.mark.mpi, pytest.mark.tier("ranks")]


@pytest.fixture
def comm() -> Any:
    require("mpi")
    from mpi4py import MPI

    return MPI.COMM_SELF.Dup()


class Requests:
    """A communicator that notes what is sent."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.sent: list[list[int]] = []

    def Iallreduce(self, send: Any, receive: Any, op: Any) -> Any:  # noqa: N802
        self.sent.append(send.tolist())
        return self.comm.Iallreduce(send, receive, op=op)


def watched(collectives: Any) -> list[list[int]]:
    """Return a list that grows by what collectives send."""
    requests = Requests(collectives._comm)
    collectives._comm = requests
    return requests.sent


def array(cupy: Any, *values: int, device: int = 0) -> Any:
    with cupy.cuda.Device(device):
        return cupy.array(values, dtype=np.int32)


def test_arrays_come_back_on_their_device_and_the_host_waits_at_the_end(cupy: Any, comm: Any) -> None:
    collectives = collectives_for(comm, 5.0)
    sent, messages = array(cupy, 3, -7, 2**31 - 1, device=1), watched(collectives)
    cupy.log.clear()
    finish = collectives.start_max(sent)
    assert (cupy.log, messages) == ([], [])
    found = finish()
    assert cupy.log == [("read", 1)]
    assert (type(found), found.device, found.dtype) == (type(sent), sent.device, np.int32)
    assert found.get().tolist() == finish().get().tolist() == [3, -7, 2**31 - 1]


def test_what_was_started_first_is_sent_first_whichever_is_finished_first(cupy: Any, comm: Any) -> None:
    # Of two scalers over one communicator.
    first, second = (collectives_for(comm, 5.0) for _ in range(2))
    sent = watched(first)
    second._comm = first._comm
    finishes = [one.start_max(array(cupy, k, device=k % 2)) for k, one in enumerate((first, second, first))]
    assert finishes[1]().get().tolist() == [1]
    assert sent == [[0], [1]]
    assert finishes[0]().get().tolist() == [0]
    assert sent == [[0], [1]]
    # An array of the host is sent at once, after those that were started before.
    last = second.start_max(np.array([3], np.int32))
    assert sent == [[0], [1], [2], [3]]
    assert (last().tolist(), finishes[2]().get().tolist()) == ([3], [2])


def test_other_dtypes_and_dimensions_are_refused(cupy: Any, comm: Any) -> None:
    collectives = collectives_for(comm, 5.0)
    for wrong in (cupy.zeros(2, dtype=np.float32), cupy.zeros((1, 2), dtype=np.int32), cupy.zeros((), dtype=np.int32)):
        with pytest.raises(InvalidValueError, match="only 1-d int32 arrays are reduced"):
            collectives.start_max(wrong)


def test_a_scaler_over_mpi_does_not_wait_before_the_step(cupy: Any, comm: Any) -> None:
    scaler = ShardedGradScaler(group=comm, timeout=5.0, init_scale=4.0)
    one, other = Tree([]), Tree([])
    for iteration, value in enumerate((4.0, 4.0, np.inf)):
        scaler.scale(cupy.ones((), dtype=np.float32))
        one.grads, other.grads = ([cupy.array([x], dtype=np.float32)] for x in (value, 4.0))
        cupy.log.clear()
        scaler.unscale_(one)
        scaler.unscale_(other)
        # But for the comparison of the ranks' versions, before the first message.
        assert bool([entry for entry in cupy.log if entry[0] == "read"]) == (iteration == 0)
        scaler.step(other)
        scaler.step(one)
        scaler.update()
    assert (one.steps, other.steps, scaler.get_scale()) == (2, 3, 2.0)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BackendError("CUDA failed")], ids=["Ctrl-C", "failure"])
def test_a_copy_that_ctrl_c_interrupts_keeps_its_place_and_one_that_fails_takes_the_group_with_it(
    cupy: Any, comm: Any, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    collectives = collectives_for(comm, 5.0)
    sent = watched(collectives)
    finish, later = (collectives.start_max(array(cupy, k)) for k in (1, 2))

    def fail(_: int) -> int:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(cupy.cuda.runtime, "eventQuery", fail)
        with pytest.raises(type(error)):
            finish()
    assert sent == []
    if isinstance(error, KeyboardInterrupt):
        assert later().get().tolist() == [2]
        assert (sent, finish().get().tolist()) == ([[1], [2]], [1])
        return
    for call in (finish, later, lambda: collectives.start_max(np.array([3], np.int32))):
        with pytest.raises(BackendError, match="was given up on rank 0 of 1"):
            call()
    assert sent == []


def test_a_device_that_never_comes_to_the_copy_is_a_timeout(cupy: Any, comm: Any) -> None:
    finish = collectives_for(comm, 0.1).start_max(array(cupy, 1))
    cupy.cuda.Event.broken = 600
    with pytest.raises(CollectiveTimeoutError, match=r"rank 0 of 1 waited 0\.1 s for its own device, before the"):
        finish()
