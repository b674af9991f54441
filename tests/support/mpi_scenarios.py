"""What the ranks do in the tests of MPI itself: communicators, grids, messages, and programs that end badly."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from events import tell, wait_for
from mpi4py import MPI
from scenarios import SGD, gradients, iterate
from worlds import Failure, alone

import gradscale
from gradscale_numpy.mpi import MPICollectives


class Counting:
    """Collectives that count what passes through them."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size
        self.messages: list[int] = []

    def start_max(self, x: Any, /) -> Callable[[], Any]:
        """Note the size in bytes, and pass on."""
        self.messages.append(x.nbytes)
        finish: Callable[[], Any] = self.inner.start_max(x)
        return finish


def messages(comm: MPI.Intracomm, optimizers: int, bad_rank: int, parameters: int) -> dict[str, Any]:
    """Count the collectives of three iterations; parameters of several dtypes, some clipped in between."""
    counting = Counting(MPICollectives(comm, 20.0))
    scaler = gradscale.ShardedGradScaler(group=counting)
    all_optimizers = [SGD(None) for _ in range(optimizers)]
    dtypes = (np.float16, np.float32, np.float64, np.complex64)
    for iteration in range(3):
        scaler.scale(np.float32(1.0))
        for index, optimizer in enumerate(all_optimizers):
            value = np.inf if (comm.rank, iteration) == (bad_rank, 1) else 1.0
            optimizer.grads = [np.full(3, value, dtype=dtypes[place % 4]) for place in range(parameters)]
            if index % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()
    return {"messages": counting.messages, "steps": [optimizer.steps for optimizer in all_optimizers]}


def overlapped(comm: MPI.Intracomm, rounds: int) -> float:
    """Use the communicator between unscale_ and step, blocking and not, as gradient clipping does."""
    scaler = gradscale.ShardedGradScaler(group=comm, timeout=20.0)
    optimizer = SGD(None)
    total = 0.0
    for iteration in range(rounds):
        scaler.scale(np.float32(1.0))
        optimizer.grads = gradients("numpy")
        mine, theirs = np.full(14, comm.rank, dtype=np.int32), np.zeros(14, dtype=np.int32)
        request = comm.Iallreduce(mine, theirs, op=MPI.MAX)
        scaler.unscale_(optimizer)
        total += comm.allreduce(1.0)
        if iteration % 2:
            request.Wait()
            scaler.step(optimizer)
        else:
            scaler.step(optimizer)
            request.Wait()
        scaler.update()
        if theirs.tolist() != [comm.size - 1] * 14:
            msg = f"the user's own messages were mixed up: {theirs}"
            raise RuntimeError(msg)
    return total


def grid(comm: MPI.Intracomm, columns: int, bad_rank: int, kind: str) -> dict[str, Any]:
    """Agree over the rows and then the columns of a grid of ranks, or over one of the two alone."""
    row = comm.Split(color=comm.rank // columns, key=comm.rank)
    column = comm.Split(color=comm.rank % columns, key=comm.rank)
    group = {"both": [row, column], "rows": row}[kind]
    scaler = gradscale.ShardedGradScaler(group=group, timeout=20.0)
    optimizer = SGD(None)
    report = iterate(scaler, optimizer, gradients("numpy", np.nan if comm.rank == bad_rank else 1.0))
    row.Free()
    column.Free()
    return {"skipped": report.skipped, "scale": scaler.get_scale(), "row": comm.rank // columns}


@alone
def many_scalers(comm: MPI.Intracomm, count: int) -> str:
    """Construct more scalers than there are communicators to be had, over one group and over short-lived ones."""
    for _ in range(count):
        gradscale.ShardedGradScaler(group=comm, timeout=20.0)
    for _ in range(count):
        short_lived = comm.Dup()
        scaler = gradscale.ShardedGradScaler(group=short_lived, timeout=20.0)
        iterate(scaler, SGD(None), gradients("numpy"))
        short_lived.Free()
    return "done"


def bad_groups(comm: MPI.Intracomm) -> list[str]:
    """Offer what cannot be a group."""
    half = comm.Split(color=min(comm.rank, 1))
    remote = 1 if comm.rank == 0 else 0
    between = half.Create_intercomm(0, comm, remote)
    messages = []
    for group in (between, MPI.COMM_NULL, [], "world", None, comm.Get_group()):
        try:
            gradscale.ShardedGradScaler(group=group, timeout=5.0)
            messages.append("accepted")
        except (gradscale.InvalidTypeError, gradscale.InvalidValueError) as error:
            messages.append(str(error))
    between.Free()
    half.Free()
    return messages


@alone
def missing_construction(comm: MPI.Intracomm, absent_rank: int, folder: str) -> Failure | None:
    """Leave out the constructor on one rank."""
    if comm.rank == absent_rank:
        wait_for(folder, "gave up", comm.size - 1)
        return None
    failure = None
    try:
        gradscale.ShardedGradScaler(group=comm, timeout=1.0)
    except gradscale.CollectiveTimeoutError as error:
        failure = Failure.of(error)
    tell(folder, "gave up", comm.rank)
    return failure


@alone
def after_a_timeout(comm: MPI.Intracomm, late_rank: int, folder: str) -> dict[str, Any]:
    """Time out, wait for the late rank by other means, and go on with new scalers over the same communicator."""
    iterate(gradscale.ShardedGradScaler(group=comm, timeout=20.0), SGD(None), gradients("numpy"))
    scaler = gradscale.ShardedGradScaler(group=comm, timeout=0.5)
    failures = 0
    if comm.rank == late_rank:
        wait_for(folder, "gave up", comm.size - 1)
    try:
        iterate(scaler, SGD(None), gradients("numpy"))
    except gradscale.CollectiveTimeoutError:
        failures = 1
        tell(folder, "gave up", comm.rank)
    refused = ""
    if failures:
        try:
            gradscale.ShardedGradScaler(group=comm, timeout=0.5)
        except gradscale.BackendError as error:
            refused = str(error)
    # The late rank met the messages of the others, and knows nothing of their timeout; they tell it.
    total = comm.allreduce(failures, op=MPI.SUM)
    fresh = comm.Dup()
    anew = gradscale.ShardedGradScaler(group=fresh, timeout=20.0)
    report = iterate(anew, SGD(None), gradients("numpy", np.inf if comm.rank == late_rank else 1.0))
    return {"failures": total, "refused": "comm.Dup()" in refused, "skipped": report.skipped, "scale": anew.get_scale()}


def wrong_arrays(comm: MPI.Intracomm) -> list[str]:
    """Try to reduce what is not a 1-d int32 array."""
    collectives = MPICollectives(comm, 5.0)
    messages = []
    for array in (np.zeros(3, dtype=np.float32), np.zeros(3, dtype=np.int64), np.zeros((1, 3), dtype=np.int32)):
        try:
            collectives.start_max(array)
            messages.append("accepted")
        except gradscale.InvalidValueError as error:
            messages.append(str(error))
    return messages


@alone
def dropped(comm: MPI.Intracomm) -> list[bool]:
    """Start a reduction and forget it before the other ranks have come; MPI still needs its memory."""
    collectives = MPICollectives(comm, 5.0)
    alive = []
    for rank in range(comm.size):
        if comm.rank == rank:
            sent = np.zeros(3, dtype=np.int32)
            watched = weakref.ref(sent)
            collectives.start_max(sent)
            del sent
            gc.collect()
            alive.append(watched() is not None)
        comm.Barrier()
    return alive


def strided(comm: MPI.Intracomm) -> list[int]:
    """Reduce a view that is not contiguous."""
    collectives = MPICollectives(comm, 5.0)
    values: list[int] = collectives.start_max(np.arange(10, dtype=np.int32)[::3] + np.int32(comm.rank))().tolist()
    return values


def never_an_array(comm: MPI.Intracomm, empty_rank: int, bad_rank: int) -> list[Any]:
    """Take part on a rank that never has a loss, a gradient or a backend named."""
    scaler = gradscale.ShardedGradScaler(group=comm, timeout=20.0)
    optimizer = SGD(None)
    seen = []
    for iteration in range(3):
        if comm.rank == empty_rank:
            optimizer.grads = []
        else:
            scaler.scale(np.float32(1.0))
            optimizer.grads = gradients("numpy", np.nan if (comm.rank, iteration) == (bad_rank, 1) else 1.0)
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.last_step(optimizer).skipped, scaler.get_scale()))
    return seen
