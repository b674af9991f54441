"""Lists of NumPy arrays, read from their objects in memory by loops that Numba compiles.

To ask a small array for its class, flags, dtype and shape takes longer than to unscale it. What is read here instead
are the fields that Python and NumPy declare for every list and array (``PyListObject``, ``PyArrayObject_fields``), and
only where lists and arrays of known content have all of them in their places.
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

__all__ = [
    *("ANY", "OWNERS", "Table", "array_at", "elements_of_singles"),
    *("is_readable", "objects_in", "single_at", "table_of_singles"),
]

Table: TypeAlias = NDArray[np.int64]

_SINGLE = np.dtype(np.float32)

# Of a list's object: the places of words of 64 bits.
_LENGTH, _ITEMS, _ALLOCATED, _WORDS_OF_LIST = 2, 3, 4, 5
# Of an array's object; flags and number of dimensions fill the lower half of theirs.
_CLASS, _DATA, _NDIM, _SHAPE, _DTYPE, _FLAGS, _WORDS = 1, 2, 3, 4, 7, 8, 9
_LOWER_HALF = 0xFFFFFFFF

_FORTRAN, _OWNER = 0x0002, 0x0004
# C-contiguous, aligned and writable.
_PLAIN = 0x0001 | 0x0100 | 0x0400
# The class and the dtype, which flags are looked at, and what they are.
_OF_SINGLES = id(np.ndarray), id(_SINGLE)
_WANTED = np.array(
    [
        [*_OF_SINGLES, _LOWER_HALF & ~_FORTRAN, _PLAIN | _OWNER],
        [*_OF_SINGLES, _LOWER_HALF & ~(_FORTRAN | _OWNER), _PLAIN],
    ]
)

OWNERS = _WANTED[0].ctypes.data
"""What to look for, as compiled code takes it: C-contiguous, aligned and writable arrays of float32, each of which owns
its memory, so that no two share an element."""

ANY = _WANTED[1].ctypes.data
"""The same, whoever owns their memory."""


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


@compiled
def objects_in(listed: Any) -> Any:
    """Return the addresses of what is in a list, by the list's own address; for compiled code."""
    words = array_at(listed, _WORDS_OF_LIST, np.int64)
    return array_at(words[_ITEMS], words[_LENGTH], np.int64)


@compiled
def single_at(address: Any) -> Any:
    """Return the elements of an array of float32, whose object is at an address; for compiled code."""
    words = array_at(address, _WORDS, np.int64)
    size = 1
    for length in array_at(words[_SHAPE], words[_NDIM] & _LOWER_HALF, np.int64):
        size *= length
    return array_at(words[_DATA], size, np.float32)


@compiled
def elements_of_singles(objects: Any, wanted_at: Any) -> Any:
    """Return how many elements arrays have; -1 unless each is as it is wanted and there once; for compiled code."""
    wanted = array_at(wanted_at, 4, np.int64)
    elements = 0
    for i in range(objects.size):
        words = array_at(objects[i], _WORDS, np.int64)
        if words[_CLASS] != wanted[0] or words[_DTYPE] != wanted[1] or words[_FLAGS] & wanted[2] != wanted[3]:
            return -1
        elements += single_at(objects[i]).size
    return elements if _are_distinct(objects) else -1


@compiled
def _are_distinct(addresses: Any) -> Any:
    if addresses.size < 2:
        return True
    slots = 4
    while slots < 2 * addresses.size:
        slots *= 2
    met = np.zeros(slots, np.int64)
    for address in addresses:
        # Objects are 16 bytes apart at the least.
        slot = (address >> 4) & (slots - 1)
        while met[slot] != 0:
            if met[slot] == address:
                return False
            slot = (slot + 1) & (slots - 1)
        met[slot] = address
    return True


def _fill(table: Any, listed: Any, wanted_at: Any) -> Any:
    """Fill a table, and tell whether each object is as it is wanted and there once; else the table is left alone."""
    objects = objects_in(listed)
    if elements_of_singles(objects, wanted_at) < 0:
        return False
    for i in range(objects.size):
        elements = single_at(objects[i])
        table[0, i], table[1, i] = elements.ctypes.data, elements.size
    return True


# No other thread changes an array while it is read.
_fill = compiled(_fill, holds_lock=True)


def table_of_singles(objects: Sequence[Any]) -> Table | None:
    """Return where the elements of arrays of float32 are, and how many.

    Parameters
    ----------
    objects : sequence
        Of anything; to be kept as long as the table is used.

    Returns
    -------
    array or None
        2-d int64: a row of addresses, and one of sizes. None where an object is anything but a C-contiguous, aligned
        and writable array of float32 of NumPy's own class that is there once, or arrays cannot be read like this.
    """
    if not is_readable():
        return None
    listed = objects if type(objects) is list else list(objects)
    table = np.empty((2, len(listed)), np.int64)
    return table if _fill(table, id(listed), ANY) else None


@functools.cache
def is_readable() -> bool:
    """Tell whether lists and arrays of known content have all fields in their places; nothing else is read."""
    has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    if sys.implementation.name != "cpython" or not has_lock or np.ndarray.__basicsize__ < 8 * _WORDS:
        return False
    fixed = np.zeros((4, 6), np.float64)[:, ::2]
    fixed.flags.writeable = False
    examples: list[NDArray[Any]] = [np.zeros((), np.float32), np.zeros((2, 3, 5), np.float32, order="F")]
    # So that more is allocated than there is.
    examples.append(fixed)
    return _is_list(examples) and all(map(_is_array, examples))


def _is_list(objects: list[Any]) -> bool:
    words = (ctypes.c_int64 * _WORDS_OF_LIST).from_address(id(objects))
    allocated = (objects.__sizeof__() - list.__basicsize__) // 8
    # What is neither of the two numbers is the address, and only an address is followed.
    numbers = words[_LENGTH], words[_ALLOCATED]
    if list.__basicsize__ != 8 * _WORDS_OF_LIST or numbers != (len(objects), allocated) or allocated == len(objects):
        return False
    return list((ctypes.c_int64 * len(objects)).from_address(words[_ITEMS])) == list(map(id, objects))


def _is_array(array: NDArray[Any]) -> bool:
    words = (ctypes.c_int64 * _WORDS).from_address(id(array))
    found = words[_CLASS], words[_DATA], words[_NDIM] & _LOWER_HALF, words[_DTYPE], words[_FLAGS] & _LOWER_HALF
    if found != (id(np.ndarray), array.ctypes.data, array.ndim, id(array.dtype), array.flags.num):
        return False
    lengths = (ctypes.c_int64 * array.ndim).from_address(words[_SHAPE]) if array.ndim else ()
    return tuple(lengths) == array.shape
