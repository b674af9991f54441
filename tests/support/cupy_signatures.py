"""The calls that gradscale_cupy makes of CuPy, held against the parameters that CuPy's functions really have.

The stand-ins for CuPy let every call of the adapter through ``checked``: one that CuPy 13.5 or 14 would refuse, and one
of a function that the table does not have, are errors in whatever test makes them.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

__all__ = ["SIGNATURES", "VERSIONS", "called", "checked", "checked_class", "documented", "parsed"]

Class = TypeVar("Class", bound=type)

VERSIONS = ("13.5", "14.2")

_ARRAYS = "shape, dtype=float, order='C'"
_KERNEL = "code: str, name: str, options: tuple = (), backend='nvrtc', translate_cucomplex=False, *, "
# By name, the parameters; in either version, or in the first and the second. C integers take no other object.
SIGNATURES: dict[str, str | tuple[str, str]] = {
    "cupy.add": "x1, x2, /, out=None, *, casting='same_kind', dtype=None",
    "cupy.array": "obj, dtype=None, copy=True, order='K', subok=False, ndmin=0, *, blocking=False",
    "cupy.asarray": (
        "a, dtype=None, order=None, *, blocking=False",
        "a, dtype=None, order=None, *, copy=None, blocking=False",
    ),
    "cupy.ascontiguousarray": "a, dtype=None",
    "cupy.asnumpy": "a, stream=None, order='C', out=None, *, blocking=True",
    "cupy.empty": _ARRAYS,
    "cupy.empty_like": "prototype, dtype=None, order='K', subok=None, shape=None",
    "cupy.zeros": _ARRAYS,
    "cupy.RawKernel": f"{_KERNEL}enable_cooperative_groups=False, jitify=False",
    "cupy.RawKernel.__call__": ("grid, block, args, *, shared_mem=0", "grid, block, args, **kwargs"),
    "cupy.ndarray.get": "stream=None, order='C', out=None, blocking=True",
    "cupy.ndarray.view": "dtype=None, type=None",
    "cupy.cuda.Device": "device=None",
    "cupy.cuda.Device.use": "",
    "cupy.cuda.Event": "block=False, disable_timing=False, interprocess=False",
    "cupy.cuda.Event.record": "stream=None",
    "cupy.cuda.Event.synchronize": "",
    "cupy.cuda.MemoryPointer.copy_to_host_async": "mem, size: int, stream=None",
    "cupy.cuda.Stream.is_capturing": "",
    "cupy.cuda.Stream.wait_event": "event",
    "cupy.cuda.alloc_pinned_memory": "size: int",
    "cupy.cuda.get_current_stream": "device_id: int = -1",
    "cupy.cuda.nccl.NcclCommunicator.abort": "",
    "cupy.cuda.nccl.NcclCommunicator.allReduce": (
        "sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int"
    ),
    "cupy.cuda.nccl.NcclCommunicator.check_async_error": "",
    "cupy.cuda.nccl.NcclCommunicator.device_id": "",
    "cupy.cuda.nccl.NcclCommunicator.rank_id": "",
    "cupy.cuda.nccl.NcclCommunicator.size": "",
    "cupy.cuda.runtime.CUDARuntimeError": "status",
    "cupy.cuda.runtime.driverGetVersion": "",
    "cupy.cuda.runtime.eventQuery": "event: int",
    "cupy.cuda.runtime.getDeviceCount": "",
    "cupy.cuda.runtime.runtimeGetVersion": "",
}

called: set[str] = set()
"""The names that the adapter has called since this was cleared."""


@functools.cache
def parsed(name: str) -> tuple[inspect.Signature, ...]:
    """Return the signatures of a function in the versions."""
    if name not in SIGNATURES:
        msg = f"gradscale_cupy calls {name}, which tests/support/cupy_signatures.py does not have: look it up in CuPy"
        raise TypeError(msg)
    given = SIGNATURES[name]
    made = []
    for parameters in given if isinstance(given, tuple) else (given, given):
        made.append(_signature(parameters))
    return tuple(made)


def _signature(parameters: str) -> inspect.Signature:
    found: dict[str, Any] = {}
    # The annotations are the types themselves, as this file's are not.
    exec(compile(f"def f({parameters}): ...", "f", "exec", dont_inherit=True), {}, found)
    return inspect.signature(found["f"])


def _hold(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    called.add(name)
    for version, signature in zip(VERSIONS, parsed(name), strict=True):
        try:
            bound = signature.bind(*args, **options).arguments
        except TypeError as error:
            msg = f"CuPy {version} refuses {name}: {error}"
            raise TypeError(msg) from None
        for parameter, value in bound.items():
            wanted = signature.parameters[parameter].annotation
            if wanted is not inspect.Parameter.empty and not isinstance(value, _CONVERTED.get(wanted, wanted)):
                msg = f"CuPy {version} refuses {name}: {parameter} is no {wanted.__name__}, got {type(value).__name__}"
                raise TypeError(msg)


# What Cython takes for these.
_CONVERTED: dict[Any, Any] = {int: (int, np.integer)}


def checked(name: str, call: Callable[..., Any], *, is_method: bool = False) -> Callable[..., Any]:
    """Return a function whose calls by the adapter are held against CuPy's; those of others are theirs."""

    @functools.wraps(call)
    def made(*args: Any, **options: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("gradscale_cupy"):
            _hold(name, args[is_method:], options)
        return call(*args, **options)

    return made


def checked_class(name: str) -> Callable[[Class], Class]:
    """Do so for the constructor of a class and its public methods."""

    def change(kind: Class) -> Class:
        for method, call in list(vars(kind).items()):
            if inspect.isfunction(call) and (method in ("__call__", "__init__") or not method.startswith("_")):
                whole = name if method == "__init__" else f"{name}.{method}"
                setattr(kind, method, checked(whole, call, is_method=True))
        return kind

    return change


def documented(function: Any) -> list[tuple[str, Any, bool]]:
    """Return the names, kinds and whether there is a default of a real function's parameters.

    A function that is compiled has no signature, and begins its docstring with it.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        line = function.__doc__.strip().split("\n\n")[0].replace("\n", " ").replace("\\*", "*")
        inside = re.match(r"[\w.]+\((.*)\)", line)
        assert inside is not None, line
        # Without the types of C in front of the names.
        parameters = [re.sub(r"^[\w ]+ (?=\w+ *(=|$))", "", one.strip()) for one in inside[1].split(",") if one.strip()]
        signature = _signature(", ".join(parameters))
    return [
        (one.name, one.kind, one.default is not inspect.Parameter.empty)
        for one in signature.parameters.values()
        if one.name != "self"
    ]
