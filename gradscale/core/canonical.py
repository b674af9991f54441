"""Canonical bytes: what stands for a value in every process, whatever its addresses, hash seed and order of insertion.

Values that compare equal have the same bytes, of whichever type they are; others have different ones.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import numbers
import operator
import re
import struct
import types
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from array_api_compat import is_array_api_obj

from gradscale.errors import InvalidTypeError

__all__ = ["canonical"]

# Containers within containers; deeper ones may hold themselves.
_DEEPEST = 64
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")
_MAIN = "__main__"
# How a module is called that a process which was spawned runs as its program.
_SPAWNED_MAIN = "__mp_main__"


def canonical(value: Any, what: str) -> bytes:
    """Return the canonical bytes of a value.

    Parameters
    ----------
    value : object
        None, numbers, strings, bytes, enumerations; arrays of NumPy's; containers and dataclasses of these
        (fields that do not compare are left out); functions and classes, by their module and name, and functions
        without a name of their own by their code; objects whose ``repr`` says what they are.
    what : str
        What it is, for the error.

    Raises
    ------
    InvalidTypeError
        For what has no value that is the same in every process, such as an object without a ``repr`` of its own.
    """
    return _bytes(value, what, 0)


def _bytes(value: Any, what: str, depth: int) -> bytes:
    if depth > _DEEPEST:
        msg = f"{what} must be the same value in every process, got one that is {_DEEPEST} levels deep or holds itself"
        raise InvalidTypeError(msg)
    plain = _plain(value)
    if plain is not None:
        return plain
    deeper = depth + 1
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [
            _joined(b"field", [field.name.encode(), _bytes(getattr(value, field.name), f"{what}.{field.name}", deeper)])
            for field in dataclasses.fields(value)
            if field.compare
        ]
        return _joined(b"dataclass", [type(value).__qualname__.encode(), *parts])
    if isinstance(value, (list, tuple, deque)):
        tag = b"tuple" if isinstance(value, tuple) else b"list"
        return _joined(tag, [_bytes(item, f"{what}[{index}]", deeper) for index, item in enumerate(value)])
    if isinstance(value, AbstractSet):
        return _joined(b"set", sorted(_bytes(item, f"an element of {what}", deeper) for item in value))
    if isinstance(value, Mapping):
        items = [
            _joined(b"item", [_bytes(key, f"a key of {what}", deeper), _bytes(item, f"{what}[{key!r}]", deeper)])
            for key, item in value.items()
        ]
        return _joined(b"mapping", sorted(items))
    if is_array_api_obj(value):
        return _array(value, what)
    found = _callable(value, what, deeper)
    return _by_repr(value, what) if found is None else found


def _array(value: Any, what: str) -> bytes:
    """Return the bytes of an array that shows its memory, as NumPy's do."""
    try:
        memory = memoryview(value).tobytes()
    except (BufferError, TypeError, ValueError) as error:
        msg = f"{what} must be a number, a string or an array of NumPy's, got {value!r}"
        raise InvalidTypeError(msg) from error
    return _joined(b"array", [str(tuple(value.shape)).encode(), str(value.dtype).encode(), memory])


def _plain(value: Any) -> bytes | None:
    """Return the bytes of a number, a text or an enumeration; None for anything else."""
    if value is None or value is Ellipsis:
        return _joined(b"single", [repr(value).encode()])
    if isinstance(value, numbers.Integral):
        return _joined(b"number", [b"%d" % operator.index(value)])
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational):
        (wide,) = struct.unpack("<d", packed := struct.pack("<d", value))
        return _joined(b"number", [b"%d" % wide if wide.is_integer() else packed])
    if isinstance(value, complex):
        return _joined(b"complex", [struct.pack("<dd", value.real, value.imag)])
    if isinstance(value, str):
        return _joined(b"str", [value.encode("utf-8", "surrogatepass")])
    if isinstance(value, (bytes, bytearray)):
        return _joined(b"bytes", [bytes(value)])
    if isinstance(value, enum.Enum):
        return _joined(b"enum", [_name(type(value)), str(value.name).encode()])
    return None


def _callable(value: Any, what: str, depth: int) -> bytes | None:
    """Return the bytes of a function, a class or a module; None for anything else."""
    if isinstance(value, functools.partial):
        parts = _bytes((value.func, value.args, value.keywords), what, depth)
        return _joined(b"partial", [parts])
    owner = getattr(value, "__self__", None)
    if callable(value) and owner is not None and not isinstance(owner, types.ModuleType):
        return _joined(b"method", [_bytes(owner, f"the object of {what}", depth), value.__name__.encode()])
    if isinstance(value, types.FunctionType):
        return _function(value, what, depth)
    if isinstance(value, types.ModuleType):
        return _joined(b"module", [value.__name__.encode()])
    # Such as NumPy's functions, whose text has an address.
    name = getattr(value, "__qualname__", None)
    if callable(value) and isinstance(name, str) and ("<" not in name or isinstance(value, type)):
        return _joined(b"named", [_name(value)])
    if callable(value) and hasattr(value, "__wrapped__"):
        # What a decorator has made of a function without a name.
        return _joined(b"wrapped", [_name(type(value)), _bytes(value.__wrapped__, what, depth)])
    return None


def _function(function: types.FunctionType, what: str, depth: int) -> bytes:
    parts = [_name(function)]
    if "<" in function.__qualname__:
        # A lambda, or a function within one: others have the same name.
        cells = [_cell(cell) for cell in function.__closure__ or ()]
        parts.append(_code(function.__code__, what, depth))
        parts.append(_bytes((function.__defaults__, function.__kwdefaults__, cells), f"what {what} holds", depth))
    return _joined(b"function", parts)


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # Not assigned yet.
        return None


def _code(code: types.CodeType, what: str, depth: int) -> bytes:
    constants = [
        _code(constant, what, depth + 1)
        if isinstance(constant, types.CodeType)
        else _bytes(constant, f"a constant of {what}", depth + 1)
        for constant in code.co_consts
    ]
    names = " ".join((*code.co_names, "|", *code.co_varnames, "|", *code.co_freevars)).encode()
    return _joined(b"code", [code.co_code, names, *constants])


def _by_repr(value: Any, what: str) -> bytes:
    """Return the bytes of what an object says of itself."""
    own: Any = type(value).__repr__
    if own is not object.__repr__:
        text = repr(value)
        if not _ADDRESS.search(text):
            return _joined(b"repr", [_name(type(value)), text.encode("utf-8", "surrogatepass")])
    msg = (
        f"{what} must be the same value in every process, so that ranks can tell whether they hold one policy, got "
        f"{value!r}: make it a number, a string, a function with a name or a dataclass of these, or leave the field "
        f"out with dataclasses.field(compare=False)"
    )
    raise InvalidTypeError(msg)


def _name(value: Any) -> bytes:
    module = getattr(value, "__module__", None)
    qualified = f"{_MAIN if module == _SPAWNED_MAIN else module}.{value.__qualname__}"
    return qualified.encode("utf-8", "surrogatepass")


def _joined(tag: bytes, parts: Iterable[bytes]) -> bytes:
    """Return parts as bytes from which they could be told apart again; long ones as a digest."""
    joined = b"%s(%s)" % (tag, b"".join(b"%d:%s" % (len(part), part) for part in parts))
    return joined if len(joined) <= 256 else b"digest:" + hashlib.sha256(joined).digest()
