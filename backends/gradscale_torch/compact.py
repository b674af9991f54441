"""The MAX of a vector whose first number may differ between ranks and whose others rarely do, from one or two integers.

Gloo sends more messages for more elements: over two ranks all-reducing 22 takes twice as long as 1, and 2 a fifth
longer. What the ranks agree on is a verdict and a fingerprint that is the same everywhere unless they have drifted
apart. So each rank sends a hash of all numbers but the first, and the ranks add up what they send: the sum is the
number of ranks times the own hash exactly when all hashes are equal. If it is not, every rank sees it, and the whole
vectors are reduced.

The lowest bits of what a rank sends are a tag of its own. The sum of all tags is known, and a sum that lacks one was
made with a message that is not gradscale's: a collective of the user's, made over the group in another order. MAX would
not do for that, since whatever is low is invisible in a maximum.

The first number, ``v``, goes beside the hash where there are 2 ranks, each of which knows the other's message by the
sum less its own; else in a second integer, in which each rank has a few bits.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

__all__ = ["Exchange", "ForeignMessageError", "largest_first"]

_TAG_BITS = 16
_TAG_MASK = (1 << _TAG_BITS) - 1
# Of the golden ratio, so that the tags of no two of 65536 ranks are equal, and none is a small or a round number.
_TAG_STEP = 0x9E37
# What is added up must fit into an int64.
_SUM_BITS = 62
_FIRST_BITS = 15
_LARGEST_HASH = 47
_WORD = 1 << 64


class ForeignMessageError(Exception):
    """What was received is no sum of gradscale's messages. It does not reach the user."""


def _bits_of_each(size: int) -> int:
    """Return how many bits each rank has for its first number."""
    return _FIRST_BITS if size <= 2 else min(_FIRST_BITS, max(1, _SUM_BITS // size))


def largest_first(size: int) -> int:
    """Return the largest first number that ``size`` ranks can send without the whole vector."""
    # All bits set say that it is larger.
    return (1 << _bits_of_each(size)) - 2 if size <= _SUM_BITS else 0


class Exchange:
    """What one rank sends for its vector of int32, and what it learns from the answer.

    Parameters
    ----------
    values : list of int
        The vector.
    rank, size : int
        Position in the group, and number of ranks.

    Attributes
    ----------
    sent : list of int
        One int64 for 2 ranks, else two, to be reduced by SUM.
    whole : list of int
        What is reduced by MAX where that does not tell: the vector, and its hash, so that the ranks know whether their
        vectors were different.
    """

    __slots__ = ("_first", "_hash", "_rank", "_size", "_values", "sent")

    def __init__(self, values: list[int], rank: int, size: int) -> None:
        self._values, self._rank, self._size = values, rank, size
        first, *others = values
        bits = _bits_of_each(size)
        self._first = first if 0 <= first <= largest_first(size) else (1 << bits) - 1
        free = _SUM_BITS - (size - 1).bit_length() - _TAG_BITS
        self._hash = _hash(others, min(_LARGEST_HASH, free - _FIRST_BITS if size == 2 else free))
        if size == 2:
            self.sent = [(self._hash << _FIRST_BITS | self._first) << _TAG_BITS | _tag(rank)]
        else:
            # Beyond so many ranks they share one sum, which tells only that it is zero.
            place = bits * rank if size <= _SUM_BITS else 0
            self.sent = [self._hash << _TAG_BITS | _tag(rank), self._first << place]

    @property
    def whole(self) -> list[int]:
        """The vector of this rank, its hash and the negative of it, and whether the first number did not fit."""
        low, high = self._hash & 0x7FFFFFFF, self._hash >> 31
        return [*self._values, low, high, -low, -high, int(self._first > largest_first(self._size))]

    def maximum(self, reduced: Sequence[int]) -> list[int] | None:
        """Return the element-wise MAX of the vectors over the ranks; None, on every rank, where it does not tell.

        Parameters
        ----------
        reduced : sequence of int
            What has become of ``sent``.

        Raises
        ------
        ForeignMessageError
            When that is no sum of such messages.
        """
        firsts = self._firsts(reduced)
        if firsts is None:
            return None
        largest = max(firsts)
        return None if largest > largest_first(self._size) else [largest, *self._values[1:]]

    def _firsts(self, reduced: Sequence[int]) -> list[int] | None:
        """Return the first numbers of the ranks; None where their hashes differ."""
        if self._size == 2:
            other = (reduced[0] - self.sent[0]) % _WORD
            if other >> _SUM_BITS - 1 or other & _TAG_MASK != _tag(1 - self._rank):
                raise ForeignMessageError
            hashed, first = divmod(other >> _TAG_BITS, 1 << _FIRST_BITS)
            return [self._first, first] if hashed == self._hash else None
        hashes = reduced[0] - sum(map(_tag, range(self._size)))
        if hashes & _TAG_MASK:
            raise ForeignMessageError
        if hashes != self._size * self._hash << _TAG_BITS:
            return None
        firsts = reduced[1]
        if self._size > _SUM_BITS:
            return [firsts]
        bits = _bits_of_each(self._size)
        return [firsts >> bits * rank & (1 << bits) - 1 for rank in range(self._size)]

    def whole_maximum(self, reduced: list[int]) -> list[int]:
        """Return the element-wise MAX of the vectors, from that of ``whole``.

        Raises
        ------
        ForeignMessageError
            When all vectors are equal and fit, which the sum has denied: it had another message in it.
        """
        *maximum, low, high, minus_low, minus_high, did_not_fit = reduced
        is_below = any(after < before for after, before in zip(reduced, self.whole, strict=True))
        if is_below or ((low, high) == (-minus_low, -minus_high) and not did_not_fit):
            raise ForeignMessageError
        return maximum


def _tag(rank: int) -> int:
    return (rank + 1) * _TAG_STEP & _TAG_MASK


def _hash(values: Sequence[int], bits: int) -> int:
    packed = struct.pack(f"<{len(values)}i", *values)
    digest = hashlib.blake2b(packed, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - bits)
