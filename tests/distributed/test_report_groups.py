"""Callbacks and history over a group: told once, on rank 0, unless every rank is asked for."""

from __future__ import annotations

import pytest
import report_scenarios
from axes import require
from worlds import GlooWorld, ProcessWorld, ThreadWorld

World = ThreadWorld | ProcessWorld


def test_callbacks_run_on_rank_0_only_unless_told_otherwise(world: World) -> None:
    cases = [(bad_rank, grouped) for bad_rank in range(world.size) for grouped in ("one", "list", "grid")]
    for (bad_rank, _), results in zip(cases, world.run_each(report_scenarios.callbacks_on, cases), strict=True):
        for rank, result in enumerate(results):
            assert result == {
                "skips": [2] if rank == 0 else [],
                "updates": [(1, False), (2, True)] if rank == 0 else [],
                "every skip": [(2, 3, 3 if rank == bad_rank else 0)],
                "every update": [(1, False, rank), (2, True, rank)],
                "history": [(False, 65536.0), (True, 65536.0)],
            }, (rank, bad_rank)


@pytest.mark.tier("ranks")
@pytest.mark.torch
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_replicated_ranks_that_decide_alone_tell_once(fused: bool) -> None:
    require("torch")
    results = GlooWorld(2).run(report_scenarios.callbacks_without_a_group, fused)
    assert results == [{"first": 2, "every": [False, True]}, {"first": 0, "every": [False, True]}]
