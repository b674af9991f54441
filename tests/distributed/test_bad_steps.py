"""Options of spikes that differ on one rank, and guards of torch's optimizers; lives.py has what steps are skipped."""

import bad_step_scenarios as scenarios
import pytest
from worlds import agree


def test_another_option_on_one_rank_is_named_on_all(world):
    agree(world, scenarios.another_option, [(rank, said) for rank in range(world.size) for said in scenarios.OPTIONS])


@pytest.mark.torch
@pytest.mark.tier("ranks")
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("bad", ["nan", "inf", "spike", "refused"])
def test_a_guarded_run_is_to_the_bit_the_run_without_the_bad_batch_of_any_rank(world, bad: str, fused: bool):
    agree(world, scenarios.guarded, [(rank, bad, fused) for rank in range(world.size)])
