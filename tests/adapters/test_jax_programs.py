"""Drawn training programs of gradscale_jax: each step leaves what the core's scaler on NumPy arrays comes to."""

from __future__ import annotations

import types
from pathlib import Path

import numpy as np
import pytest
from axes_jax import assert_close, assert_same_bits
from jax_programs import assert_held, draw
from tiers import later

from gradscale import DynamicScale, SkipSpikes

pytestmark = [
    pytest.mark.jax,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Sharding info not provided:UserWarning"),
]


# By 77 every optimizer has run in every way. 31, 45 and 73 are of one model over ranks.
QUICK = {1, 3, 4, 5, 7, 9, 13, 31, 45, 73}
NUMBERS = [*QUICK, *later("ranks", *({*range(77)} - QUICK)), *later("all", *range(77, 231))]


@pytest.mark.parametrize("number", NUMBERS)
def test_each_step_of_a_program_leaves_what_the_core_comes_to(number: int, tmp_path: Path):
    assert_held(draw(number), tmp_path)


WRONG = {
    "policy": DynamicScale(init_scale=16.0),
    "rule": SkipSpikes(window=4, deviations=1e6),
    "limits": {"give_up_after": 4},
    "inner": "no state",
    "skipped": 1,
}


@pytest.mark.parametrize("setting", ["policy", *later("ranks", *list(WRONG)[1:])])
def test_a_program_of_another_setting_is_found(setting: str, tmp_path: Path):
    program = draw(30)
    wrong = types.SimpleNamespace(**vars(program) | {setting: WRONG[setting]})
    with pytest.raises(AssertionError):
        assert_held(program, tmp_path, wrong)


@pytest.mark.parametrize("compare", [assert_same_bits, assert_close])
def test_trees_that_differ_are_told_apart(compare):
    for other in (np.float32([1.0, 2.001]), np.float64([1.0, 2.0]), np.float32([1.0]), None):
        with pytest.raises(AssertionError):
            compare({"a": np.float32([1.0, 2.0])}, {"a": other})
