"""Ranks: the processes that torchrun has started, or this one alone."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist


class Ranks:
    """The processes that torchrun has started, or this one alone."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.device = torch.device("cpu")
        if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))

    def __str__(self) -> str:
        return "1 rank" if self.size == 1 else f"{self.size} ranks"

    def join(self) -> None:
        """Make the group of all processes."""
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        settings: dict[str, Any] = {"backend": "gloo"}
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            settings = {"backend": "nccl", "device_id": self.device}
        if "RANK" not in os.environ:
            settings |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
        dist.init_process_group(**settings)

    def announce(self) -> None:
        """Print how many ranks there are, and how to have more."""
        if self.rank == 0:
            hint = "; for more: torchrun --nproc-per-node 2 " + sys.argv[0] if self.size == 1 else ""
            print(f"{self}, {dist.get_backend()} on {self.device.type}{hint}", flush=True)

    def all_gather_objects(self, something: Any) -> list[Any]:
        """Return what every rank has passed, in the order of the ranks."""
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, something)
        return gathered

    def stop(self, status: int) -> NoReturn:
        """End this process at once: after a failure torchrun ends the others, which may wait for it."""
        sys.stdout.flush()
        os._exit(status)

    def run(self, main: Callable[[Ranks], int]) -> NoReturn:
        """Call a program's main function, and end the process with what it returns; quietly on Ctrl-C."""
        try:
            status = main(self)
        except KeyboardInterrupt:
            if self.rank == 0:
                print("\ninterrupted", file=sys.stderr)
            self.stop(130)
        except Exception:
            traceback.print_exc()
            self.stop(1)
        dist.destroy_process_group()
        # Not through Python's clean-up: some 3 % of runs on gloo (torch 2.13) abort there, although all is done.
        self.stop(status)
