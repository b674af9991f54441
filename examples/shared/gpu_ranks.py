"""GPURanks: the processes that train together, each with a GPU, over MPI through the host or over NCCL."""

from __future__ import annotations

import math
import platform
import sys
import warnings
from typing import Any

from gradscale import BackendNotAvailableError, GradscaleError
from gradscale.extras import needs, remedy
from shared.digits import Array
from shared.ranks import Ranks

# Of the ranks, one says it.
why_no_cupy = ""
cupy: Any = None
try:
    with needs("examples/train_cupy.py", "cupy", groups="examples"), warnings.catch_warnings():
        # CuPy warns where it finds no NCCL, which matters to --group nccl alone.
        warnings.simplefilter("ignore")
        import cupy  # type: ignore[no-redef]
        from cupy.cuda import nccl

        from gradscale_cupy.availability import explained, require_device, require_nccl
except BackendNotAvailableError as error:
    why_no_cupy = str(error)


class GPURanks(Ranks):
    """The processes that train together, each with a GPU; a single one has no group, and sends nothing."""

    # What the scalers agree over.
    group: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.neighbours: Any = None
        if self.comm:
            from mpi4py import MPI

            self.neighbours = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.refuse(why_no_cupy or self.take_device())
        self.connect()

    def take_device(self) -> str:
        """Make a device of this machine the current one, for each of its ranks the next; or say why that cannot be."""
        place = self.neighbours.Get_rank() if self.neighbours else 0
        try:
            require_device()
            with explained("a rank took its device"):
                cupy.cuda.Device(place % cupy.cuda.runtime.getDeviceCount()).use()
        except GradscaleError as error:
            return f"{platform.node()}: {error}"
        return ""

    def refuse(self, reason: str) -> None:
        """End all ranks where any of them has a reason; one says them all."""
        reasons = dict.fromkeys(filter(None, self.all_gather_objects(reason)))
        if reasons:
            sys.exit("\n".join(reasons) if self.rank == 0 else 1)

    def connect(self) -> None:
        """Make the group."""

    def disconnect(self) -> None:
        """Free the group."""

    def reduce_scatter(self, vector: Array) -> Array:
        """Return this rank's shard of the sum of every rank's vector."""
        return vector

    def all_gather(self, shard: Array, length: int) -> Array:  # noqa: ARG002
        """Return the vector that every rank has one shard of."""
        return shard


class MPIRanks(GPURanks):
    """Ranks that talk over MPI, through the host."""

    def connect(self) -> None:
        self.refuse("" if self.comm else f"--group mpi needs mpi4py, which cannot be used here; {remedy('mpi')}")
        self.group = self.comm

    def reduce_scatter(self, vector: Array) -> Array:
        return cupy.asarray(Ranks.reduce_scatter(self, vector.get()))

    def all_gather(self, shard: Array, length: int) -> Array:
        return cupy.asarray(Ranks.all_gather(self, shard.get(), length))


class NCCLRanks(GPURanks):
    """Ranks that talk over NCCL, in the order of the current stream: the host does not wait."""

    def connect(self) -> None:
        self.refuse(self.obstacle())
        unique_id = self.broadcast(nccl.get_unique_id() if self.rank == 0 else None)
        self.group = nccl.NcclCommunicator(self.size, unique_id, self.rank)

    def obstacle(self) -> str:
        """Say why these ranks cannot use NCCL; nothing where they can."""
        gpu = cupy.cuda.Device().pci_bus_id
        gpus = self.neighbours.allgather(gpu) if self.neighbours else [gpu]
        try:
            require_nccl()
        except GradscaleError as error:
            return str(error)
        if len(set(gpus)) < len(gpus):
            found = f"{len(gpus)} ranks on {platform.node()}, which share {len(set(gpus))}"
            return f"NCCL needs a GPU for each rank, got {found}: start fewer ranks (mpiexec -n), or give --group mpi"
        return ""

    def disconnect(self) -> None:
        self.group.destroy()

    def shard_length(self, length: int) -> int:
        """Return the one length that NCCL wants all shards to have; the end of the last is beyond the vector's."""
        return math.ceil(length / self.size)

    def mine(self, vector: Array) -> Array:
        count = self.shard_length(len(vector))
        return vector[self.rank * count : (self.rank + 1) * count]

    def reduce_scatter(self, vector: Array) -> Array:
        count = self.shard_length(len(vector))
        sent, received = lengthened(vector, self.size * count), cupy.empty(count, vector.dtype)
        # Added up in the vectors' dtype, as is usual: a sum beyond float16 is one more overflow.
        settings = nccl_dtype(vector), nccl.NCCL_SUM, cupy.cuda.get_current_stream().ptr
        self.group.reduceScatter(sent.data.ptr, received.data.ptr, count, *settings)
        return received[: len(self.mine(vector))]

    def all_gather(self, shard: Array, length: int) -> Array:
        count = self.shard_length(length)
        sent, received = lengthened(shard, count), cupy.empty(self.size * count, shard.dtype)
        settings = nccl_dtype(shard), cupy.cuda.get_current_stream().ptr
        self.group.allGather(sent.data.ptr, received.data.ptr, count, *settings)
        return received[:length]


def nccl_dtype(vector: Array) -> int:
    """Return NCCL's number of a vector's dtype."""
    numbers: dict[str, int] = {"float16": nccl.NCCL_FLOAT16, "float32": nccl.NCCL_FLOAT32}
    return numbers[vector.dtype.name]


def lengthened(vector: Array, length: int) -> Array:
    """Return a copy with zeros at its end."""
    made = cupy.zeros(length, vector.dtype)
    made[: len(vector)] = vector
    return made
