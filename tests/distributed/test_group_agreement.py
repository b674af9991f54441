"""GroupAgreement: loops of pure functions agree on every step, over any group, with arrays of any library."""

import math
from typing import Any

import group_scenarios
import numpy as np
import pytest
from axes import require
from worlds import ProcessWorld, ThreadWorld, assert_all_equal, each

import gradscale
from gradscale import GroupAgreement

World = ThreadWorld | ProcessWorld
LIBRARIES = [
    pytest.param("numpy", id="numpy"),
    pytest.param("strict", id="strict"),
    pytest.param("torch", id="torch", marks=[pytest.mark.torch, pytest.mark.tier("ranks")]),
    pytest.param("jax", id="jax", marks=[pytest.mark.jax, pytest.mark.tier("ranks")]),
]


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_overflow_on_each_rank_in_turn_is_seen_by_all(world: World, library: str) -> None:
    require(library)
    cases = [(rank, value, library) for rank in range(world.size) for value in (math.inf, -math.inf, math.nan)]
    for _, results in each(world, group_scenarios.pure_loop, cases):
        assert_all_equal(results)
        # Three gradients are bad at step 1, and the scale grows after two clean steps.
        assert results[0]["counts"] == [0, 3, 0, 0]
        exponents = [state[0] >> 23 for state in results[0]["states"]]
        assert exponents == [127 + 16, 127 + 15, 127 + 15, 127 + 16]


@pytest.mark.parametrize("what", ["scale", "policy", "call"])
def test_ranks_that_differ_are_an_error_on_every_rank_from_then_on(world: World, what: str) -> None:
    expected = {"scale": "scale from 2.0 to 4.0", "policy": "policy (here", "call": "iteration from 0 to 1"}[what]
    cases = [(rank, what) for rank in range(world.size)]
    for results in world.run_each(group_scenarios.differing, cases):
        for rank, result in enumerate(results):
            first, second = result["failures"]
            assert first.kind == "ScaleDesyncError"
            assert expected in first.message
            assert f"rank {rank} of {world.size}" in first.message
            assert second.kind == "BackendError"
            assert "construct a new GroupAgreement" in second.message


def test_an_overflow_at_a_minimum_that_must_be_raised_is_raised_on_every_rank(world: World) -> None:
    for results in world.run_each(group_scenarios.exhaustion, [(rank,) for rank in range(world.size)]):
        for rank, (raised, after) in enumerate(results):
            assert "minimum, 1.0" in raised
            # The number that an error of ranks that differ would name.
            assert f"rank {rank} of {world.size} in iteration 0" in raised
            assert after == ""


@pytest.mark.parametrize("dtype", ["uint32", "int64", "int16", "float32", "bool"])
def test_a_count_of_another_dtype_is_refused(dtype: str) -> None:
    def call(group: Any) -> None:
        policy = gradscale.DynamicScale()
        count = np.zeros((), dtype)
        GroupAgreement(group, policy)(count, policy.init(like=np.zeros((), np.float32)))

    with pytest.raises(gradscale.InvalidTypeError, match="nonfinite must be a 0-d int32 array"):
        gradscale.testing.run_ranks(1, call)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"group": []}, r"at least one group, got \[\]", id="no-group"),
        pytest.param({"group": 3}, "got 3 of type int", id="number"),
        pytest.param({"timeout": 0.0}, "timeout must be", id="timeout-0"),
        pytest.param({"timeout": math.nan}, "timeout must be", id="timeout-nan"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    def construct(collectives: Any) -> None:
        settings = {"group": collectives, "timeout": 5.0} | arguments
        GroupAgreement(settings["group"], gradscale.DynamicScale(), timeout=settings["timeout"])

    with pytest.raises((gradscale.InvalidTypeError, gradscale.InvalidValueError), match=message):
        gradscale.testing.run_ranks(1, construct)
