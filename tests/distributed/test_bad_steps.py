"""Spikes and refused steps where ranks have no loss, other rules or optimizers of torch; lives.py has the others."""

import bad_step_scenarios as scenarios
import pytest
from worlds import agree

LIBRARIES = ["numpy", pytest.param("torch", marks=[pytest.mark.torch, pytest.mark.tier("ranks")])]


def test_another_option_on_one_rank_is_named_on_all(world):
    agree(world, scenarios.another_option, [(rank, said) for rank in range(world.size) for said in scenarios.OPTIONS])


@pytest.mark.parametrize("library", [LIBRARIES[-1], pytest.param("torch fused", marks=LIBRARIES[-1].marks)])
@pytest.mark.parametrize("bad", ["nan", "inf", "spike", "refused"])
def test_a_guarded_run_is_to_the_bit_the_run_without_the_bad_batch_of_any_rank(world, bad: str, library: str):
    agree(world, scenarios.guarded, [(rank, bad, library) for rank in range(world.size)])
