"""gather: the reports of all ranks on their gradients, by all-reduces with MAX alone."""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from collections.abc import Callable, Sequence

from gradscale.core.protocols import Collectives
from gradscale.errors import BackendError
from gradscale.reports.overflow import ParameterReport, RankReport

__all__ = ["gather"]

# A gathered report lists so many entries of all ranks together, or so many of each, whichever is more: all of 3000
# parameters on 512 ranks would be some 200 MB on every one of them.
_GATHERED = 4096
_GATHERED_OF_EACH = 8

_LOWEST_INT32 = -(2**31)


def gather(
    own: RankReport, groups: Sequence[Collectives], agree: Callable[[Collectives, list[int]], list[int]]
) -> list[RankReport]:
    """Return the reports of all ranks, the same on every rank, by two all-reduces for each group.

    ``agree`` returns the element-wise MAX over a group of a list of int32. If a rank could not look at its gradients,
    as its report's ``failure`` says, the other ranks raise a BackendError.
    """
    # A rank is known by its ranks in all groups: the report of one may arrive over two of them.
    rank = tuple(collectives.rank for collectives in groups)
    reports = {rank: dataclasses.replace(own, rank=rank)}
    for collectives in groups:
        limit = max(_GATHERED_OF_EACH, _GATHERED // (collectives.size * len(reports)))
        sent = _pack([report.worst(limit) for report in reports.values()])
        received = _all_gather(sent, collectives, agree)
        reports = {report.rank: report for message in received for report in _unpack(message)}
    failed = [report for report in reports.values() if report.failure]
    if failed and not own.failure:
        where = ", ".join("/".join(map(str, report.rank)) for report in failed)
        msg = f"the diagnosis failed on rank {where}, and so on all: {failed[0].failure}"
        raise BackendError(msg)
    return list(reports.values())


def _all_gather(
    sent: bytes, collectives: Collectives, agree: Callable[[Collectives, list[int]], list[int]]
) -> list[bytes]:
    """Return the bytes of every rank: each fills its own slot, and all others hold the lowest int32 there."""
    padded = struct.pack("<I", len(sent)) + sent + bytes(-len(sent) % 4)
    mine = list(struct.unpack(f"<{len(padded) // 4}i", padded))
    (slot,) = agree(collectives, [len(mine)])
    begin = collectives.rank * slot
    vector = [_LOWEST_INT32] * (slot * collectives.size)
    vector[begin : begin + len(mine)] = mine
    agreed = agree(collectives, vector)
    slots = [
        struct.pack(f"<{slot}i", *agreed[start : start + slot]) for start in range(0, slot * collectives.size, slot)
    ]
    return [packed[4 : 4 + struct.unpack_from("<I", packed)[0]] for packed in slots]


def _pack(reports: Sequence[RankReport]) -> bytes:
    rows = [dataclasses.astuple(report) for report in reports]
    return zlib.compress(json.dumps(rows, separators=(",", ":")).encode())


def _unpack(message: bytes) -> list[RankReport]:
    reports = []
    for rank, entries, *rest in json.loads(zlib.decompress(message)):
        restored = [
            ParameterReport(name, tuple(rank), index, tuple(shape), *more) for name, _, index, shape, *more in entries
        ]
        reports.append(RankReport(tuple(rank), tuple(restored), *rest))
    return reports
