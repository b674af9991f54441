"""A policy's number is the same in every process for equal settings, and another one for others."""

import ast
import dataclasses
import enum
import os
import subprocess
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import gradscale
from gradscale.scaler.claim import identify
from gradscale.testing import run_ranks

pytestmark = pytest.mark.numpy


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
        # No two tuples run together.
        **{str(one): one for one in [(1, 23), (12, 3), ("1", 23), ((1, 23),), (1, (23,)), ("ab", "c"), ("a", "bc")]},
        **{str(one): one for one in [("a', 'bc",), ()]},
    }


def made(setting, **settings) -> Own:
    """Return a policy with a setting."""
    return Own(setting=setting, log=[object()], **settings)


def test_settings_are_told_apart_and_equal_ones_are_not():
    once, again = ({name: identify(made(setting)) for name, setting in by_name().items()} for _ in range(2))
    assert once == again
    assert len(set(once.values())) == len(once), once
    assert identify(made(None, growth_interval=5)) != identify(made(None, growth_interval=6))
    assert identify(gradscale.DynamicScale()) != identify(gradscale.StaticScale())


def test_neither_the_hash_seed_nor_addresses_make_a_difference():
    def printed(seed: str):
        command, environment = [sys.executable, __file__, seed], os.environ | {"PYTHONHASHSEED": seed}
        return ast.literal_eval(subprocess.check_output(command, env=environment, text=True))

    first = printed("1")
    assert first == printed("2")
    assert first.keys() == by_name().keys()


def test_settings_that_compare_equal_are_no_difference():
    halves, twos = (0.5, np.float32(0.5), Fraction(1, 2)), (2, 2.0, 2 + 0j, np.int64(2))
    for equal in (halves, twos, (1, True), (0.0, -0.0)):
        assert len(set(equal)) == 1
        assert len({identify(made(one)) for one in equal}) == 1, equal


def endless():
    """Return a setting that holds itself."""
    found = Schedule()
    object.__setattr__(found, "kind", (found,))
    return found


@dataclasses.dataclass
class Changeable:
    """A setting that may differ from one step to the next."""

    factor: float = 1.0


MUST = r"the policy Own\.setting must be"
REFUSED: dict[str, tuple[Any, str]] = {
    "object": (Odd(), MUST),
    "in a tuple": ((1, Odd()), r"Own\.setting\[1\] must be"),
    "in a dataclass": (Schedule(Odd()), r"Own\.setting\.kind must be"),
    "lambda": (lambda step: step, f"{MUST} .* make it a number, text, bytes, an"),
    "list": ([1], MUST),
    "array": (np.zeros(2), MUST),
    "dataclass that is not frozen": (Changeable(), MUST),
    "endless": (endless(), "holds itself"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_value_in_another_process_is_refused_by_its_name(name: str):
    setting, named = REFUSED[name]
    with pytest.raises(gradscale.InvalidTypeError, match=named):
        identify(made(setting))

    constructors: list[Any] = [
        lambda group: gradscale.ShardedGradScaler(group=group, policy=made(setting)),
        lambda group: gradscale.GroupAgreement(group, made(setting)),
    ]
    for construct in constructors:
        with pytest.raises(gradscale.InvalidTypeError, match=named):
            run_ranks(1, construct)
    # A process alone compares it with nobody's.
    gradscale.GradScaler(policy=made(setting))


if __name__ == "__main__":
    # Addresses differ from process to process.
    kept = [object() for _ in range(hash(sys.argv[1]) % 1000)]
    print({name: identify(made(setting)) for name, setting in by_name().items()})
