"""HeadroomScale, an experiment of gradscale_bench: what its policy does, and the table that compares it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.numpy, pytest.mark.tier("all")]

LARGEST_HALF = 65504.0


def follow(policy: Any, magnitudes: list[float], hidden: float = 1.0) -> tuple[list[float], int]:
    """Return the scale of each step, and how many overflowed; others are ``hidden`` times as large and not seen."""
    state = policy.init(np.zeros((), np.float32))
    scales, skipped = [], 0
    for magnitude in magnitudes:
        scale = float(state.scale)
        overflows = magnitude * hidden * scale > LARGEST_HALF
        seen = min(magnitude, LARGEST_HALF / scale)
        state = policy.update(state, np.asarray(overflows, np.int32), np.asarray(seen, np.float32))
        scales.append(scale)
        skipped += overflows
    return scales, skipped


def test_it_climbs_at_once_and_keeps_its_margin() -> None:
    from gradscale_bench.headroom_policy import HeadroomScale

    scales, skipped = follow(HeadroomScale(), [2.0**-20] * 300)
    assert skipped == 0
    assert scales[1] == 2.0**33
    assert set(scales[1:]) == {2.0**33}


def test_it_falls_before_growing_gradients_overflow() -> None:
    from gradscale_bench.headroom_policy import HeadroomScale

    growing = [2.0 ** (-10 + step / 20) for step in range(600)]
    scales, skipped = follow(HeadroomScale(), growing)
    assert skipped == 0
    assert scales[-1] * growing[-1] <= LARGEST_HALF
    assert min(scales) == scales[-1] < 2.0**-2


def test_an_overflow_that_magnitudes_do_not_show_sets_a_ceiling() -> None:
    from gradscale_bench.headroom_policy import HeadroomScale

    scales, skipped = follow(HeadroomScale(growth_interval=1000), [2.0**-10] * 900, hidden=2.0**8)
    assert 0 < skipped < 8
    assert scales[-1] * 2.0**-10 * 2.0**8 <= LARGEST_HALF


def test_the_comparison_prints_a_row_for_each_policy(capsys: pytest.CaptureFixture[str]) -> None:
    from gradscale_bench import headroom

    assert headroom.main(["--only", "drift", "--seeds", "2", "--first-seed", "7", "--synthetic-steps", "200"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    names = ["torch", "torch24", "headroom1", "headroom", "headroom3", "headroom4"]
    assert [row.split()[4] for row in rows] == names
    with pytest.raises(SystemExit) as refused:
        headroom.main(["--only", "nothing"])
    assert refused.value.code == 2
