"""constructor: makes named tuples of all their values without the detour by their class."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["constructor"]

_Named = TypeVar("_Named", bound=tuple[Any, ...])


def constructor(kind: type[_Named]) -> Callable[[tuple[Any, ...]], _Named]:
    """Return what makes a named tuple of a tuple of all its values, which are not checked.

    It takes about half the time of the class itself: for what is made in each iteration.

    Examples
    --------
    >>> import gradscale
    >>> constructor(gradscale.ScaleState)((1024.0, 0, 0, 0)).scale
    1024.0
    """
    return functools.partial(tuple.__new__, kind)
