"""compiled: functions that Numba compiles when they are first called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from gradscale.extras import needs

with needs("gradscale_numpy.fast", "fast"):
    import numba

__all__ = ["compiled"]

_Function = TypeVar("_Function", bound=Callable[..., object])


def compiled(function: _Function, *, holds_lock: bool = False) -> _Function:
    """Return a function that is compiled on first use, and whose machine code is kept on disk where there is a place.

    What is kept is of one version of the function's own file. Who changes a function of another file that it calls
    removes the ``.nbi`` files beside it.

    Parameters
    ----------
    function : callable
        What is compiled; never with fast-math, which lets the compiler assume that there are no infinities and NaNs.
    holds_lock : bool, default False
        Whether no other thread of Python runs meanwhile.
    """
    try:
        return cast("_Function", numba.njit(function, cache=True, nogil=not holds_lock))
    except RuntimeError:  # no folder to write to, neither beside the function's file nor in the user's cache
        return cast("_Function", numba.njit(function, nogil=not holds_lock))
