"""Canonical bytes of a policy: the same in every process, whatever its Python version, addresses and hash seed.

Settings that compare equal have the same bytes, of whichever type they are; others have different ones.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
from typing import Any, SupportsFloat, TypeAlias

from gradscale.core.messages import shown
from gradscale.errors import InvalidTypeError

__all__ = ["canonical"]

_Form: TypeAlias = "str | bytes | tuple[_Form, ...] | None"

_MAIN = "__main__"
# The name that the program's module has in a spawned process.
_SPAWNED_MAIN = "__mp_main__"


def canonical(policy: Any, what: str) -> bytes:
    """Return the canonical bytes of a dataclass: of its name and of the fields that are compared.

    The fields are numbers, text, bytes, enumerations, None, classes, tuples and frozen dataclasses of these;
    InvalidTypeError names any other one, after ``what``.
    """
    try:
        # Not repr: which characters it escapes depends on the version of Python.
        return ascii(_fields(policy, what)).encode()
    except RecursionError as error:
        msg = f"{what} must be the same value in every process, got one that is too deep or holds itself"
        raise InvalidTypeError(msg) from error


def _fields(value: Any, what: str) -> _Form:
    compared = [field.name for field in dataclasses.fields(value) if field.compare]
    forms = [(name, _form(getattr(value, name), f"{what}.{name}")) for name in compared]
    return ("dataclass", type(value).__qualname__, *forms)


def _form(value: object, what: str) -> _Form:
    """Return a value as nested tuples of text."""
    if value is None:
        return None
    if isinstance(value, numbers.Complex):
        return ("number", _real(value.real), _real(value.imag))
    if isinstance(value, str):
        return ("text", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return ("bytes", bytes(value))
    if isinstance(value, enum.Enum):
        return ("enumeration", _name(type(value)), str(value.name))
    if isinstance(value, type):
        return ("class", _name(value))
    if isinstance(value, tuple):
        return ("tuple", *(_form(item, f"{what}[{index}]") for index, item in enumerate(value)))
    settings = getattr(type(value), "__dataclass_params__", None)
    if dataclasses.is_dataclass(value) and settings is not None and settings.frozen:
        return _fields(value, what)
    msg = (
        f"{what} must be the same value in every process, so that ranks can tell whether they hold one policy, got "
        f"{shown(value)}: make it a number, text, bytes, an enumeration, a class, or a tuple or frozen dataclass of "
        f"these, or leave the field out with dataclasses.field(compare=False)"
    )
    raise InvalidTypeError(msg)


def _real(value: SupportsFloat) -> str:
    """Return a real number as its exact ratio, in digits that Python does not limit; or as inf or nan."""
    if isinstance(value, numbers.Rational):
        return f"{value.numerator:x}/{value.denominator:x}"
    wide = float(value)
    return "{:x}/{:x}".format(*wide.as_integer_ratio()) if math.isfinite(wide) else str(wide)


def _name(kind: type) -> str:
    module = _MAIN if kind.__module__ == _SPAWNED_MAIN else kind.__module__
    return f"{module}.{kind.__qualname__}"
