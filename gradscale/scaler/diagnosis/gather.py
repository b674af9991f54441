"""The reports of all ranks of a group, the same on every rank."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Sequence
from typing import Any

from gradscale.core.protocols import Array
from gradscale.errors import BackendError
from gradscale.scaler.diagnosis.report import OverflowReport, ParameterReport, RankReport, rank_text
from gradscale.scaler.exchange import Exchange

# A gathered report lists so many entries of all ranks together, or so many of each, whichever is more: all of 3000
# parameters on 512 ranks would be some 200 MB on every one of them.
_GATHERED = 4096
_GATHERED_OF_EACH = 8


def gather(own: RankReport, exchanges: Sequence[Exchange], like: Array) -> list[RankReport]:
    """Return the reports of all ranks over groups in turn, in order; BackendError if another rank has failed."""
    # The ranks in all groups identify a rank, whose report may arrive over two of them.
    rank = tuple(exchange.rank for exchange in exchanges)
    reports = {rank: dataclasses.replace(own, rank=rank)}
    for exchange in exchanges:
        limit = max(_GATHERED_OF_EACH, _GATHERED // (exchange.size * len(reports)))
        rows = [_pack(one, limit) for one in reports.values()]
        received = exchange.texts(zlib.compress(json.dumps(rows).encode()), like)
        # The decompressor ignores the padding behind the compressed text.
        texts = [zlib.decompressobj().decompress(message) for message in received]
        reports = {one.rank: one for text in texts for one in map(_unpack, json.loads(text))}
    failed = [one for one in reports.values() if one.failure]
    if failed and not own.failure:
        where = ", ".join(rank_text(one.rank) for one in failed)
        msg = f"the diagnosis failed on rank {where}, and so on all: {failed[0].failure}"
        raise BackendError(msg)
    return [reports[rank] for rank in sorted(reports)]


def _pack(one: RankReport, limit: int) -> tuple[object, ...]:
    report = one.report.of_some(one.report.entries[:limit], limit)
    return dataclasses.astuple(dataclasses.replace(one, report=report))


def _unpack(row: list[Any]) -> RankReport:
    (entries, *middle, broken, omitted_broken), numbers, *rest = row
    rank = tuple(numbers)

    def parameters(rows: list[Any]) -> tuple[ParameterReport, ...]:
        return tuple(ParameterReport(name, rank, k, tuple(shape), *more) for name, _, k, shape, *more in rows)

    searched = None if broken is None else parameters(broken)
    report: list[Any] = [parameters(entries), *middle, searched, omitted_broken]
    return RankReport(OverflowReport(*report), rank, *rest)
