"""untraced: methods that torch.compile calls as they are, so that it breaks the graph once for each, as at torch's."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch._compile import _disable_dynamo

__all__ = ["untraced", "untraced_but_for_calls", "warn_caller"]

# Between a user's line and one of ours there are frames of the compiler.
_INSIDE = tuple(str(Path(file).parent) for file in (__file__, torch.__file__))

# How the compiler treats a frame and those that it calls; not there in every version of torch.
_compiler: Any = torch._C._dynamo.eval_frame
_IS_ASKED = hasattr(_compiler, "set_code_exec_strategy")

_Method = TypeVar("_Method", bound=Callable[..., Any])


def untraced(method: _Method) -> _Method:
    """Return a method that torch.compile does not look into: bookkeeping on the host, and a few kernels.

    Torch's own optimizers are decorated like this. ``torch.compiler.disable`` would do the same, but imports the
    compiler at once, which takes seconds, instead of at the first call.
    """
    return _skipped(method, recursive=True)


def untraced_but_for_calls(method: _Method) -> _Method:
    """Return a method that torch.compile does not look into, though it compiles what the method calls."""
    return _skipped(method, recursive=False)


def _skipped(method: _Method, *, recursive: bool) -> _Method:
    if not _IS_ASKED:
        return cast(_Method, _disable_dynamo(method, recursive=recursive))
    # As a mark of the function's code it costs nothing where nothing is compiled, as a wrapper would.
    skip, default = _compiler._FrameAction.SKIP, _compiler._FrameAction.DEFAULT
    function = cast("FunctionType", method)
    strategy = _compiler._FrameExecStrategy(skip, skip if recursive else default)
    _compiler.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return method


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn of the line of the caller's that has called the adapter."""
    frame, level = sys._getframe(1), 3
    while frame.f_back is not None and frame.f_back.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
