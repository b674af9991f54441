"""The ranks of a check: who they are, and messages between them that need no collective.

A collective that some rank does not come to tells nobody which one it is. So every rank reports to rank 0 beside the
group that is checked, by messages of its own over MPI or by the store of torch.distributed, and rank 0 knows who has
not.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from datetime import timedelta
from typing import Any, Protocol

from gradscale.errors import BackendNotAvailableError

__all__ = ["MPIWorld", "TorchWorld", "World"]

_REPORT, _WORD = 1, 2  # MPI's tags
_GRADIENTS = ((8, "float32"), (3, "float16"))


class World(Protocol):
    """One process of a group that is checked; its rank and size are known once it is entered."""

    rank: int
    """Position of this process in the group, from 0."""
    size: int
    """Number of processes."""
    device: str
    """What the gradients are on, for people."""

    def enter(self, timeout: float) -> None:
        """Become one of the ranks."""

    def join(self, timeout: float) -> Any:
        """Return the group; collective over all ranks."""

    def gradients(self, last: float) -> list[Any]:
        """Return gradients for a scale of 1024: 1.0 after it is divided by, but ``last`` at the end."""

    def message(self) -> Any:
        """Return 16 int32, as a scaler agrees on."""

    def versions(self) -> dict[str, str]:
        """Return the versions of what the group is made with."""

    def post(self, stage: int, report: dict[str, Any]) -> None:
        """Send rank 0 what this rank has found in a stage."""

    def reports(self, stage: int) -> dict[int, dict[str, Any]]:
        """Return what has come for a stage, by rank; on rank 0, without waiting."""

    def say(self, word: dict[str, Any]) -> None:
        """Send every other rank a word; on rank 0."""

    def hear(self) -> dict[str, Any] | None:
        """Return rank 0's next word, or None if it has not come yet."""

    def leave(self, code: int) -> None:
        """Leave the group; with a code other than 0, end all ranks, as far as the group's library can."""


class MPIWorld:
    """The ranks of MPI.COMM_WORLD."""

    device = "cpu"

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self._mpi: Any = None
        self._comm: Any = None
        self._reports: dict[int, dict[int, dict[str, Any]]] = {}
        # Requests and buffers live as long as this.
        self._sent: list[Any] = []

    def enter(self, timeout: float) -> None:  # noqa: ARG002
        """Initialize MPI, which waits for all ranks, however long it takes."""
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = MPI.COMM_WORLD
        self.rank, self.size = self._comm.rank, self._comm.size

    def join(self, timeout: float) -> Any:  # noqa: ARG002
        """Return MPI.COMM_WORLD."""
        return self._comm

    def gradients(self, last: float) -> list[Any]:
        """Return NumPy arrays."""
        import numpy as np

        arrays = [np.full(size, 1024.0, dtype) for size, dtype in _GRADIENTS]
        arrays[-1][-1] = last
        return arrays

    def message(self) -> Any:
        """Return a NumPy array."""
        import numpy as np

        return np.arange(16, dtype=np.int32)

    def versions(self) -> dict[str, str]:
        """Return the versions of NumPy, mpi4py and the MPI library."""
        library = self._mpi.Get_library_version().replace("\0", "").strip().splitlines()[0]
        found = {name: importlib.metadata.version(name) for name in ("numpy", "mpi4py")}
        return found | {"MPI": " ".join(library.split())}

    def post(self, stage: int, report: dict[str, Any]) -> None:
        """Send a message, or keep what is rank 0's own."""
        if self.rank == 0:
            self._reports.setdefault(stage, {})[0] = report
        else:
            self._sent.append(self._comm.isend((stage, report), 0, _REPORT))

    def reports(self, stage: int) -> dict[int, dict[str, Any]]:
        """Receive what there is."""
        status = self._mpi.Status()
        while (found := self._comm.improbe(self._mpi.ANY_SOURCE, _REPORT, status)) is not None:
            of, report = found.recv()
            self._reports.setdefault(of, {})[status.Get_source()] = report
        return self._reports.setdefault(stage, {})

    def say(self, word: dict[str, Any]) -> None:
        """Send one message to each rank."""
        self._sent += [self._comm.isend(word, rank, _WORD) for rank in range(1, self.size)]

    def hear(self) -> dict[str, Any] | None:
        """Receive a message if there is one."""
        found = self._comm.improbe(0, _WORD)
        word: dict[str, Any] | None = found.recv() if found is not None else None
        return word

    def leave(self, code: int) -> None:
        """Finalize MPI, or abort."""
        if code:
            self._comm.Abort(code)
        for request in self._sent:
            request.wait()


class TorchWorld:
    """The ranks of torch's default process group, as torchrun starts them.

    Parameters
    ----------
    backend : str or None
        Of torch.distributed: None for NCCL where each rank of this machine has a CUDA device of its own, else gloo.
    """

    def __init__(self, backend: str | None) -> None:
        import torch
        import torch.distributed as dist

        self._torch: Any = torch
        self._dist: Any = dist
        torch.set_num_threads(1)
        environment = os.environ
        self.rank, self.size = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
        place = int(environment.get("LOCAL_RANK", "0"))
        on_this_machine = int(environment.get("LOCAL_WORLD_SIZE", "1"))
        has_devices = torch.cuda.is_available() and torch.cuda.device_count() >= on_this_machine
        self._backend = backend or ("nccl" if has_devices and dist.is_nccl_available() else "gloo")
        self._device = torch.device("cpu")
        self.device = "cpu"
        if self._backend == "nccl":
            if not (has_devices and dist.is_nccl_available()):
                msg = (
                    f"nccl needs a CUDA device for each rank of this machine, got {torch.cuda.device_count()} for "
                    f"{on_this_machine}; leave --backend out, or give --backend gloo"
                )
                raise BackendNotAvailableError(msg)
            self._device = torch.device("cuda", place)
            torch.cuda.set_device(self._device)
            self.device = f"{self._device} {torch.cuda.get_device_name(self._device)}"
        self._store: Any = None
        self._heard = self._said = 0
        self._reports: dict[int, dict[int, dict[str, Any]]] = {}

    def enter(self, timeout: float) -> None:
        """Connect to the store of all ranks."""
        dist: Any = self._dist
        environment = os.environ
        if "WORLD_SIZE" not in environment:
            self._store = dist.HashStore()
            return
        # torchrun keeps the store itself; other launchers leave that to rank 0.
        is_kept = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = dist.TCPStore(
            environment["MASTER_ADDR"],
            int(environment["MASTER_PORT"]),
            self.size,
            self.rank == 0 and not is_kept,
            timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
        self._store = dist.PrefixStore(f"gradscale check {environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    def join(self, timeout: float) -> Any:
        """Make the default process group."""
        self._dist.init_process_group(
            self._backend,
            store=self._dist.PrefixStore("group", self._store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=timeout),
        )
        return self._dist.group.WORLD

    def gradients(self, last: float) -> list[Any]:
        """Return tensors on this rank's device."""
        torch = self._torch
        tensors = [torch.full((size,), 1024.0, dtype=getattr(torch, kind)) for size, kind in _GRADIENTS]
        tensors[-1][-1] = last
        return [tensor.to(self._device) for tensor in tensors]

    def message(self) -> Any:
        """Return a tensor on this rank's device."""
        return self._torch.arange(16, dtype=self._torch.int32, device=self._device)

    def versions(self) -> dict[str, str]:
        """Return torch's version and the backend."""
        return {"torch": str(self._torch.__version__), "backend": self._backend}

    def post(self, stage: int, report: dict[str, Any]) -> None:
        """Set a key of the store."""
        self._store.set(f"report {stage} {self.rank}", json.dumps(report))

    def reports(self, stage: int) -> dict[int, dict[str, Any]]:
        """Read the keys that are there."""
        found = self._reports.setdefault(stage, {})
        for rank in range(self.size):
            key = f"report {stage} {rank}"
            if rank not in found and self._store.check([key]):
                found[rank] = json.loads(self._store.get(key))
        return found

    def say(self, word: dict[str, Any]) -> None:
        """Set one key for all ranks."""
        self._store.set(f"word {self._said}", json.dumps(word))
        self._said += 1

    def hear(self) -> dict[str, Any] | None:
        """Read the next key if it is there."""
        key = f"word {self._heard}"
        if not self._store.check([key]):
            return None
        self._heard += 1
        word: dict[str, Any] = json.loads(self._store.get(key))
        return word

    def leave(self, code: int) -> None:
        """Destroy the group; torch has no way to end the other ranks, which their launcher does."""
        if not code:
            self._dist.destroy_process_group()
