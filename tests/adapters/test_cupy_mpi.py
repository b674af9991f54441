"""CuPy arrays over MPI: the host reads a message where it starts, and sends it at once."""

from __future__ import annotations

import numpy as np
import pytest
from axes import require
from cupy_devices import array_on, device_fails, stall

from gradscale import BackendError
from gradscale.core.registry import collectives_for

pytestmark = [pytest.mark.cupy, pytest.mark.gpu, pytest.mark.mpi]


@pytest.fixture
def comm():
    require("mpi")
    from mpi4py import MPI

    return MPI.COMM_SELF.Dup()


@pytest.mark.parametrize("device", [0, 1])
def test_arrays_come_back_on_their_device_and_the_host_waits_where_it_starts(cupy, comm, device: int):
    collectives = collectives_for(comm, 5.0)
    sent = array_on(cupy, device, 3, -7, 2**31 - 1, dtype=np.int32)
    with cupy.cuda.Device(device):
        stall(cupy, 100)
        stalled = cupy.cuda.get_current_stream().record()
    finish = collectives.start_max(sent)
    assert stalled.done
    found = finish()
    assert (type(found), found.device, found.dtype) == (type(sent), sent.device, np.int32)
    assert found.get().tolist() == finish().get().tolist() == [3, -7, 2**31 - 1]


def test_a_device_that_fails_is_its_error_and_sends_nothing(cupy, comm):
    collectives, sent = collectives_for(comm, 5.0), array_on(cupy, 0, 1, dtype=np.int32)
    with device_fails(700), pytest.raises(BackendError, match="while the verdict was read: cudaErrorIllegalAddress"):
        collectives.start_max(sent)
    assert collectives.start_max(sent)().get().tolist() == [1]
