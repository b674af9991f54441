"""Tiers: which tests a run takes, of those that each change needs at once up to those of a night.

``quick`` is what plain ``pytest`` runs, ``--tier ranks`` adds to it, and ``--tier all`` leaves out nothing. The first
tier that runs a test is, in this order:

- what ``pytest.mark.tier(name)`` on the test or on its parameters says, the latest where there are several;
- what it says on the class or the module;
- ``ranks`` for a world of real processes, else ``quick``.

Of the rows of ``arrays`` only the first two libraries are ``quick``: the shell runs the same Python on every one. In a
module that says ``PURE = True`` those are quick, too, on which the pure functions are other code.

A function of many cases takes all of them on NumPy, and before ``all`` a third on each other row, which is not the same
third on the next one. A test that is asked for by its id is run.
"""

import collections
import os
from collections.abc import Iterable
from typing import Any

import pytest
from libraries import ROWS
from worlds import ProcessWorld

TIERS = ("quick", "ranks", "all")
_VARIABLE = "GRADSCALE_TEST_TIER"
_QUICK_ROWS = {False: ("numpy", "strict"), True: ("numpy", "numpy-readonly", "strict", "torch", "jax")}
_SHARE = 3  # one case of so many on a row that repeats another one


def choose(tier: str):
    """Say which tier this run is of, before the modules of tests are imported."""
    os.environ[_VARIABLE] = tier


def examples(number: int) -> int:
    """Return how many random examples a test tries: all of them in the last tier, and a fifth before."""
    return number if os.environ.get(_VARIABLE) == TIERS[-1] else max(3, number // 5)


def later(tier: str, *values):
    """Return parameters that begin with a tier."""
    return [pytest.param(value, marks=pytest.mark.tier(tier)) for value in values]


def is_in(tier: str, item: pytest.Item) -> bool:
    """Return whether a run of a tier takes a test."""
    return _position(_tier_of(item)) <= _position(tier)


def repeats(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the cases that run on another row of ``arrays``, and are left to the last tier on their own."""
    cases: dict[tuple[Any, str], list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        row = item.callspec.params.get("arrays", "numpy") if hasattr(item, "callspec") else "numpy"
        if row != "numpy":
            cases[item.nodeid.partition("[")[0], row].append(item)
    rows = [parameter.values[0] for parameter in ROWS]
    return {
        item
        for (_, row), those in cases.items()
        if len(those) >= _SHARE
        for number, item in enumerate(those)
        if (_sum_of_digits(number) + rows.index(row)) % _SHARE
    }


def _sum_of_digits(number: int) -> int:
    """Return the sum of the digits to the base of the share: numbers with like remainders are spread over all values.

    Counted by remainder alone, a row would have one dtype of three, say, and never the others.
    """
    return number and number % _SHARE + _sum_of_digits(number // _SHARE)


def _tier_of(item: pytest.Item) -> str:
    own = [mark.args[0] for mark in item.own_markers if mark.name == "tier"]
    outer = item.get_closest_marker("tier")
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if own:
        said = max(own, key=_position)
    elif outer is not None:
        said = outer.args[0]
    else:
        said = "ranks" if isinstance(parameters.get("world"), ProcessWorld) else "quick"
    is_pure: bool = getattr(getattr(item, "module", None), "PURE", False)
    is_late = "arrays" in parameters and parameters["arrays"] not in _QUICK_ROWS[is_pure]
    return max(said, "ranks" if is_late else "quick", key=_position)


def _position(tier: str) -> int:
    if tier not in TIERS:
        raise pytest.UsageError(f"there is no tier {tier!r}; known are {', '.join(TIERS)}")
    return TIERS.index(tier)
