"""Tables of many NumPy arrays, read from their objects in memory by a loop that Numba compiles.

To ask a small array for its class, flags, dtype and shape takes longer than to unscale it. What is read here instead
are the fields that NumPy's C API declares for every array (``PyArrayObject_fields``), and only where arrays of known
content have all of them in their places.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradscale.extras import needs
from gradscale_numpy.compiling import compiled

with needs("gradscale_numpy.fast", "fast"):
    import numba
    from numba.core import cgutils
    from numba.extending import intrinsic

__all__ = ["Table", "array_at", "table_of_singles"]

Table: TypeAlias = NDArray[np.int64]

_SINGLE = np.dtype(np.float32)

# Of an array's object: the places of words of 64 bits, of which flags and number of dimensions fill the lower half.
_CLASS, _DATA, _NDIM, _SHAPE, _DTYPE, _FLAGS, _WORDS = 1, 2, 3, 4, 7, 8, 9
_LOWER_HALF = 0xFFFFFFFF

_FORTRAN, _OWNER = 0x0002, 0x0004
# C-contiguous, aligned and writable.
_PLAIN = 0x0001 | 0x0100 | 0x0400
# The class and the dtype, which flags are looked at, and what they are.
_OF_SINGLES = id(np.ndarray), id(_SINGLE)
_OWNERS = np.array([*_OF_SINGLES, _LOWER_HALF & ~_FORTRAN, _PLAIN | _OWNER])
_ANY = np.array([*_OF_SINGLES, _LOWER_HALF & ~(_FORTRAN | _OWNER), _PLAIN])


@intrinsic
def _pointer(_typing: Any, address: Any) -> Any:
    """Return an address as a pointer."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return numba.types.voidptr(address), generate


@compiled
def array_at(address: Any, size: Any, dtype: Any) -> Any:
    """Return the array of some elements at an address; for compiled code."""
    # Typed as they are called here, and not as what Numba makes of them.
    return numba.carray(_pointer(address), (size,), dtype)  # type: ignore[attr-defined, call-arg]


def _fill(table: Any, objects: Any, wanted: Any) -> Any:
    """Fill a table, and tell whether each object is an array as it is wanted; the others are read no further."""
    for i in range(objects.size):
        words = array_at(objects[i], _WORDS, np.int64)
        if words[_CLASS] != wanted[0] or words[_DTYPE] != wanted[1] or words[_FLAGS] & wanted[2] != wanted[3]:
            return False
        size = 1
        for length in array_at(words[_SHAPE], words[_NDIM] & _LOWER_HALF, np.int64):
            size *= length
        table[0, i], table[1, i] = words[_DATA], size
    return True


# No other thread changes an array while it is read.
_fill = compiled(_fill, holds_lock=True)


def table_of_singles(objects: Sequence[Any], *, owners: bool) -> Table | None:
    """Return where the elements of arrays of float32 are, and how many.

    Parameters
    ----------
    objects : sequence
        Of anything; to be kept as long as the table is used.
    owners : bool
        Whether each must own its memory and be there once, so that no two share an element.

    Returns
    -------
    array or None
        2-d int64: a row of addresses, and one of sizes. None where an object is anything but a C-contiguous, aligned
        and writable array of float32 of NumPy's own class, and where arrays cannot be read like this.
    """
    if not _is_readable():
        return None
    count = len(objects)
    addresses = np.fromiter(map(id, objects), np.int64, count)
    table = np.empty((2, count), np.int64)
    if not _fill(table, addresses, _OWNERS if owners else _ANY):
        return None
    if owners and count > 1:
        addresses.sort()
        if (addresses[1:] == addresses[:-1]).any():
            return None
    return table


@functools.cache
def _is_readable() -> bool:
    """Tell whether arrays of known content have all fields in their places; nothing outside of them is read."""
    has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    if sys.implementation.name != "cpython" or not has_lock or np.ndarray.__basicsize__ < 8 * _WORDS:
        return False
    fixed = np.zeros((4, 6), np.float64)[:, ::2]
    fixed.flags.writeable = False
    examples: list[NDArray[Any]] = [np.zeros((), np.float32), np.zeros((2, 3, 5), np.float32, order="F"), fixed]
    return all(map(_is_as_declared, examples))


def _is_as_declared(array: NDArray[Any]) -> bool:
    words = (ctypes.c_int64 * _WORDS).from_address(id(array))
    found = words[_CLASS], words[_DATA], words[_NDIM] & _LOWER_HALF, words[_DTYPE], words[_FLAGS] & _LOWER_HALF
    if found != (id(np.ndarray), array.ctypes.data, array.ndim, id(array.dtype), array.flags.num):
        return False
    lengths = (ctypes.c_int64 * array.ndim).from_address(words[_SHAPE]) if array.ndim else ()
    return tuple(lengths) == array.shape
