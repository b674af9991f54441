"""The reports of all ranks of a group, the same on every rank."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Sequence

from gradscale.core.protocols import Array
from gradscale.errors import BackendError
from gradscale.scaler.diagnosis.report import ParameterReport, RankReport, rank_text
from gradscale.scaler.exchange import Exchange

# A gathered report lists so many entries of all ranks together, or so many of each, whichever is more: all of 3000
# parameters on 512 ranks would be some 200 MB on every one of them.
_GATHERED = 4096
_GATHERED_OF_EACH = 8


def gather(own: RankReport, exchanges: Sequence[Exchange], like: Array) -> list[RankReport]:
    """Return the reports of all ranks over groups in turn; BackendError if another rank's has a ``failure``."""
    # The ranks in all groups identify a rank, whose report may arrive over two of them.
    rank = tuple(exchange.rank for exchange in exchanges)
    reports = {rank: dataclasses.replace(own, rank=rank)}
    for exchange in exchanges:
        limit = max(_GATHERED_OF_EACH, _GATHERED // (exchange.size * len(reports)))
        rows = [dataclasses.astuple(report.worst(limit)) for report in reports.values()]
        received = exchange.texts(zlib.compress(json.dumps(rows).encode()), like)
        reports = {report.rank: report for message in received for report in _unpack(message)}
    failed = [report for report in reports.values() if report.failure]
    if failed and not own.failure:
        where = ", ".join(rank_text(report.rank) for report in failed)
        msg = f"the diagnosis failed on rank {where}, and so on all: {failed[0].failure}"
        raise BackendError(msg)
    return list(reports.values())


def _unpack(message: bytes) -> list[RankReport]:
    reports = []
    # The decompressor ignores the padding behind the compressed text.
    for rank, entries, broken, *rest in json.loads(zlib.decompressobj().decompress(message)):
        first, second = (
            tuple(ParameterReport(name, tuple(rank), k, tuple(shape), *more) for name, _, k, shape, *more in rows)
            for rows in (entries, broken or ())
        )
        reports.append(RankReport(tuple(rank), first, None if broken is None else second, *rest))
    return reports
