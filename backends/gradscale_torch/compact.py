"""The MAX of a vector whose first number may differ between ranks and whose others rarely do, from two integers.

Gloo sends more messages for more elements: all-reducing 16 takes two to four times as long as 2. What the ranks agree
on is a verdict and a fingerprint that is the same everywhere unless they have drifted apart. With ``h`` a hash of all
numbers but the first, ``v``, each rank sends ``[h * K + v, -h * K + v]`` with ``K`` above any ``2 * v``. After an
element-wise MAX the sum of the two is ``2 * max(v)`` if all hashes are equal, and at least ``K`` if they are not: then
every rank sees it, and the whole vectors are reduced.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

__all__ = ["decode", "encode"]

_SHIFT = 15
_LARGEST = 2 ** (_SHIFT - 1) - 1
# Two hashes and a verdict must fit into 63 bits.
_HASH_BYTES = 5


def encode(values: Sequence[int]) -> list[int]:
    """Return two int64 for a vector of int32."""
    first = values[0]
    verdict = first if 0 <= first < _LARGEST else _LARGEST
    hashed = _hash(values[1:]) << _SHIFT
    return [hashed + verdict, -hashed + verdict]


def decode(values: Sequence[int], reduced: Sequence[int]) -> list[int] | None:
    """Return the element-wise MAX over the ranks.

    Parameters
    ----------
    values : sequence of int
        The vector of this rank.
    reduced : sequence of int
        The element-wise MAX of what ``encode`` has given on each rank.

    Returns
    -------
    list of int or None
        None, on every rank, where the two integers do not tell.
    """
    twice = reduced[0] + reduced[1]
    if twice >= 2 * _LARGEST:
        return None
    return [twice // 2, *values[1:]]


def _hash(values: Sequence[int]) -> int:
    packed = struct.pack(f"<{len(values)}i", *values)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=_HASH_BYTES).digest(), "little")
