"""unscale_(max_norm=) over threads, MPI and gloo: one norm and one factor on every rank, and no hang."""

import math

import clipping_scenarios
import numpy as np
import pytest
from worlds import ProcessWorld, ThreadWorld, each

World = ThreadWorld | ProcessWorld


def test_every_rank_clips_by_the_norm_of_all_parts_and_skips_with_each_in_turn(world: World) -> None:
    cases = [(rank, value) for rank in range(world.size) for value in (math.inf, math.nan)]
    parts = [np.array(values) for values in clipping_scenarios.PARTS[: world.size]]
    norm = math.sqrt(sum(float(x @ x) for x in parts))
    for _, results in each(world, clipping_scenarios.clip_parts, cases):
        for rank, result in enumerate(results):
            assert (result["skipped"], result["scale"]) == ([False, True, False], 4.0)
            # The same bits on all ranks.
            assert result["norms"] == results[0]["norms"]
            for iteration in (0, 2):
                assert np.frombuffer(result["norms"][iteration], np.float32)[0] == pytest.approx(norm, rel=1e-6)
                got = np.concatenate([np.zeros(0), *result["clipped"][iteration]])
                np.testing.assert_allclose(got, parts[rank] * (2.0 / norm), rtol=1e-6)
