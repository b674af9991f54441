"""Policies of a user's own, with settings of every kind; run as a program, it prints what they are identified by."""

import dataclasses
import enum
import sys
from typing import Any

import numpy as np

import gradscale
from gradscale.scaler.claim import identify


class Slope(enum.Enum):
    """A setting that is one of a few."""

    FLAT = 0
    STEEP = 1


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What a setting may hold."""

    kind: Any = Slope.FLAT
    names: Any = ("embedding", "head", "norm", "bias", "router")


class Odd:
    """An object that says nothing of itself."""


@dataclasses.dataclass(frozen=True)
class Own(gradscale.DynamicScale):
    """A policy with one setting more."""

    setting: Any = None
    log: Any = dataclasses.field(default_factory=list, compare=False)


def by_name():
    """Return settings, no two of which are equal, made anew."""
    return {
        "none": None,
        "fraction": 0.1,
        "complex": 2j,
        "large number": 10**5000,
        "text": "2",
        "text that is not in every Python's tables": "\U0001fae9",
        "bytes": b"2",
        "tuple": (1, 2.5, None),
        "nested": ((1,), (2.5, None)),
        "enumeration": Slope.STEEP,
        "other enumeration": Slope.FLAT,
        "class": Schedule,
        "NumPy's class": np.float32,
        "class of the same name": type("float32", (), {}),
        "dataclass": Schedule(),
        "other dataclass": Schedule(Slope.STEEP),
    }


def made(setting, **settings) -> Own:
    """Return a policy with a setting."""
    return Own(setting=setting, log=[object()], **settings)


if __name__ == "__main__":
    # Addresses differ from process to process.
    kept = [object() for _ in range(hash(sys.argv[1]) % 1000)]
    print({name: identify(made(setting)) for name, setting in by_name().items()})
