"""Ranks: the processes that train together over MPI, or one alone."""

from __future__ import annotations

import os
import sys
import time
import traceback
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from gradscale.extras import remedy
from shared.digits import Array, sum_rows


class Ranks:
    """The processes that train together: MPI's world, or this process alone where there is no MPI."""

    def __init__(self) -> None:
        launched = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or 1)
        self.comm: Any = None
        try:
            from mpi4py import MPI

            self.comm = MPI.COMM_WORLD
        except (ImportError, RuntimeError) as error:
            if launched > 1:
                sys.exit(
                    f"mpiexec started {launched} processes, and mpi4py cannot be used, got: {error}; {remedy('mpi')}, "
                    f"or '.[mpich]' where there is no MPI"
                )
        except KeyboardInterrupt:
            sys.exit(130)
        self.rank: int = self.comm.Get_rank() if self.comm else 0
        self.size: int = self.comm.Get_size() if self.comm else 1
        if self.size > 1:
            # Ranks share the cores: where the threads of each wait for one another, all others wait as well.
            threadpool_limits(1)
        if self.size < launched:
            sys.exit(f"mpiexec started {launched} processes, and mpi4py sees {self.size}: they are of different MPIs")

    def __str__(self) -> str:
        return "1 rank" if self.size == 1 else f"{self.size} ranks"

    def mine(self, vector: Array) -> Array:
        """Return this rank's shard of a vector."""
        return np.array_split(vector, self.size)[self.rank]

    def reduce_scatter(self, vector: Array) -> Array:
        """Return this rank's shard of the sum of every rank's vector.

        The float16 gradients travel as bytes; their owner sums them in float32 and rounds once. Not every MPI can sum
        float16, and one that can rounds after each addition.
        """
        if self.comm is None:
            return vector
        counts = [shard.nbytes for shard in np.array_split(vector, self.size)]
        received = np.empty((self.size, len(self.mine(vector))), vector.dtype)
        self.comm.Alltoallv([vector.view(np.uint8), counts], [received.view(np.uint8), [counts[self.rank]] * self.size])
        return sum_rows(received)

    def all_gather(self, shard: Array, length: int) -> Array:
        """Return the vector that every rank has one shard of."""
        if self.comm is None:
            return shard
        vector = np.empty(length, shard.dtype)
        counts = [part.nbytes for part in np.array_split(vector, self.size)]
        self.comm.Allgatherv(shard.view(np.uint8), [vector.view(np.uint8), counts])
        return vector

    def all_gather_objects(self, something: Any) -> list[Any]:
        """Return what every rank has passed, in the order of the ranks."""
        return [something] if self.comm is None else list(self.comm.allgather(something))

    def broadcast(self, something: Any) -> Any:
        """Return what rank 0 has passed."""
        return something if self.comm is None else self.comm.bcast(something)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End every rank when one fails: those that wait for it would wait forever."""
        if error is None or isinstance(error, SystemExit):
            return
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
        sys.stderr.write("\ninterrupted\n" if status == 130 else "".join(traceback.format_exception(error)))
        sys.stdout.flush()
        if self.size > 1:
            time.sleep(1)  # mpiexec reads what was printed through a pipe, and drops what it has not read by then
            self.comm.Abort(status)
        sys.exit(status)
