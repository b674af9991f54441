"""How models are spread over ranks in the tests: DDP, and every kind of FSDP that there is on CPUs."""

from __future__ import annotations

import itertools
from typing import NamedTuple

__all__ = ["DDP", "OFFLOADED_FSDP1", "SHARDED", "Setup"]


class Setup(NamedTuple):
    """How a model is spread over the ranks.

    Attributes
    ----------
    method : str
        "DDP", "FSDP1" or "FSDP2".
    half : bool
        Whether weights are gathered, and gradients reduced, in float16.
    reshard : bool
        Whether weights are freed between the forward and the backward pass (full shard), or kept (shard-grad-op).
    original : bool
        FSDP1: whether the optimizer sees the original parameters, or flat ones.
    offload : bool
        Whether weights and gradients rest on the CPU, by the offload option of the method.
    """

    method: str
    half: bool
    reshard: bool = True
    original: bool = True
    offload: bool = False

    def __str__(self) -> str:
        parts = [self.method, "fp16" if self.half else "fp32"]
        if self.method != "DDP":
            parts.append("full-shard" if self.reshard else "shard-grad-op")
        if self.method == "FSDP1":
            parts.append("original" if self.original else "flat")
        return "-".join([*parts, *["offload"] * self.offload])


_BOTH = (False, True)

DDP = [Setup("DDP", half) for half in _BOTH]

SHARDED = [
    *(Setup("FSDP1", *options) for options in itertools.product(_BOTH, repeat=3)),
    *(Setup("FSDP2", half, reshard, True, off) for half, reshard, off in itertools.product(_BOTH, repeat=3)),
]
"""What CPUs can run."""

OFFLOADED_FSDP1 = [setup._replace(offload=True) for setup in SHARDED if setup.method == "FSDP1"]
"""What only machines with an accelerator can."""
