"""untraced: methods that torch.compile calls as they are, so that it breaks the graph once for each, as at torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch._compile import _disable_dynamo

__all__ = ["untraced", "untraced_but_for_calls"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def untraced(method: _Method) -> _Method:
    """Return a method that torch.compile does not look into: bookkeeping on the host, and a few kernels.

    Torch's own optimizers are decorated like this. ``torch.compiler.disable`` would do the same, but imports the
    compiler at once, which takes seconds, instead of at the first call.
    """
    return cast(_Method, _disable_dynamo(method))


def untraced_but_for_calls(method: _Method) -> _Method:
    """Return a method that torch.compile does not look into, though it compiles what the method calls."""
    return cast(_Method, _disable_dynamo(method, recursive=False))
