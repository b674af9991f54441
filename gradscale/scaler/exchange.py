"""Exchange: values of each rank of a group, such as norms and reports, in rounds of messages."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from typing import TypeAlias

from gradscale.core.protocols import Array, Collectives
from gradscale.scaler.claim import VALUES

Carry: TypeAlias = Callable[[Array, Sequence[int]], Sequence[int]]
"""Sends some values as a message of the library of an array, and returns the MAX of each over the ranks."""

_LOWEST_INT32 = -(2**31)


class Exchange:
    """Values of each rank of one group, in rounds of ``carry``; ``like`` is an array of the library of the message."""

    def __init__(self, collectives: Collectives, carry: Carry) -> None:
        self.rank, self.size, self._carry = collectives.rank, collectives.size, carry

    def announce(self, like: Array) -> None:
        """Tell the other ranks that a collective of another kind comes next."""
        self._carry(like, [0] * VALUES)

    def numbers(self, number: int, like: Array) -> list[int]:
        """Return the int32 of each rank; a round, and a host read, for each 8 of them."""
        return self._gather([number], self.rank, self.size, like)

    def texts(self, sent: bytes, like: Array) -> list[bytes]:
        """Return the bytes of each rank; a round, and a host read, for each 32 of them."""
        lengths = self.numbers(len(sent), like)
        counts = [-(-length // 4) for length in lengths]
        ends = list(itertools.accumulate(counts))
        own = struct.unpack(f"<{counts[self.rank]}i", sent + bytes(-len(sent) % 4))
        agreed = self._gather(own, ends[self.rank] - len(own), ends[-1], like)
        packed = struct.pack(f"<{ends[-1]}i", *agreed)
        begins = [4 * (end - count) for end, count in zip(ends, counts, strict=True)]
        return [packed[begin : begin + length] for begin, length in zip(begins, lengths, strict=True)]

    def _gather(self, own: Sequence[int], begin: int, total: int, like: Array) -> list[int]:
        """Return int32 of all ranks, of which this rank has those from ``begin`` on, and sends the lowest elsewhere."""
        behind = total + VALUES - begin - len(own)
        values = [*[_LOWEST_INT32] * begin, *own, *[_LOWEST_INT32] * behind]
        rounds = (self._carry(like, values[start : start + VALUES]) for start in range(0, total, VALUES))
        return list(itertools.chain.from_iterable(rounds))[:total]
