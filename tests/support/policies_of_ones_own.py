"""Policies of a user's own, with settings of every kind; run as a program, it prints what they are identified by."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import gradscale
from gradscale.core.vector import identify

__all__ = ["Odd", "Schedule", "Slope", "by_name", "made"]


class Slope(enum.Enum):
    """A setting that is one of a few."""

    FLAT = 0
    STEEP = 1


def ramp(step: int) -> float:
    """Return a factor."""
    return step + 1.0


def fall(step: int) -> float:
    """Return another factor."""
    return 1.0 / (step + 1.0)


def power(exponent: float) -> Callable[[int], float]:
    """Return a function that holds a value."""
    return lambda step: step**exponent


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What a setting may hold."""

    function: Any = ramp
    names: Any = frozenset({"embedding", "head", "norm", "bias", "router"})


class Odd:
    """An object that says nothing of itself."""


@dataclasses.dataclass(frozen=True)
class Own(gradscale.DynamicScale):
    """A policy with one setting more."""

    setting: Any = None
    log: Any = dataclasses.field(default_factory=list, compare=False)


def by_name() -> dict[str, Any]:
    """Return settings, no two of which are equal, made anew."""
    return {
        "none": None,
        "number": 2,
        "fraction": 0.1,
        "text": "2",
        "bytes": b"2",
        "list": [1, 2.5, None],
        "tuple": (1, 2.5, None),
        "nested": [[1], [2.5, None]],
        "set": {"embedding", "head", "norm", "bias"},
        "smaller set": {"embedding", "head", "norm"},
        "mapping": {"head": {1, 2}, "body": {3}},
        "other mapping": {"head": {1, 2}, "body": {4}},
        "enumeration": Slope.STEEP,
        "function": ramp,
        "other function": fall,
        "lambda": lambda step: step + 1,
        "other lambda": lambda step: step + 2,
        "lambda with a set": lambda step: step in {"embedding", "head", "norm", "bias"},
        "closure": power(2.0),
        "other closure": power(3.0),
        "partial": functools.partial(math.pow, 2.0),
        "other partial": functools.partial(math.pow, 3.0),
        "builtin": math.sqrt,
        "numpy's function": np.sum,
        "class": Schedule,
        "dataclass": Schedule(),
        "other dataclass": Schedule(fall),
        "method": Schedule(fall).__eq__,
        "array": np.arange(3, dtype=np.float32),
        "other array": np.arange(3, dtype=np.float32) + 1,
        "wider array": np.arange(3, dtype=np.float64),
        "path": Path("schedule"),
    }


def made(setting: Any, **settings: Any) -> Own:
    """Return a policy with a setting."""
    return Own(setting=setting, log=[object()], **settings)


if __name__ == "__main__":
    # Addresses differ from process to process.
    kept = [object() for _ in range(hash(sys.argv[1]) % 1000)]
    print({name: identify(made(setting)) for name, setting in by_name().items()})
