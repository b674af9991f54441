"""run_ranks: threads as ranks, for users' own tests."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from libraries import Library

from gradscale import CollectiveTimeoutError, GradscaleError, registry
from gradscale.testing import RankFailedError, ThreadCollectives, run_ranks


def test_the_results_come_in_the_order_of_the_ranks() -> None:
    def rank(collectives: ThreadCollectives) -> tuple[int, int]:
        time.sleep(0.01 * (2 - collectives.rank))
        return collectives.rank, collectives.size

    assert run_ranks(3, rank) == [(0, 3), (1, 3), (2, 3)]
    assert run_ranks(1, rank) == [(0, 1)]


def test_the_maximum_is_of_all_ranks_and_the_array_sent_may_be_reused(arrays: Library) -> None:
    def rank(collectives: ThreadCollectives) -> list[int]:
        sent = arrays.asarray([collectives.rank, -collectives.rank, 7], "int32")
        pending = collectives.start_max(sent)
        if arrays.name == "numpy":
            sent[...] = 99
        result = pending()
        arrays.assert_is_mine(result)
        return registry.backend_for(result).read(result)

    assert run_ranks(3, rank) == [[2, 0, 7]] * 3


def test_collectives_may_overlap_and_are_counted() -> None:
    import numpy as np

    def rank(collectives: ThreadCollectives) -> tuple[Any, int]:
        pending = [collectives.start_max(np.asarray([collectives.rank + index])) for index in range(3)]
        return [int(finish()[0]) for finish in reversed(pending)], collectives.calls

    assert run_ranks(2, rank) == [([3, 2, 1], 3)] * 2


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_raises_wakes_the_others_and_is_what_is_raised(failing: int) -> None:
    import numpy as np

    woken: list[type[BaseException]] = []

    def rank(collectives: ThreadCollectives) -> None:
        if collectives.rank == failing:
            time.sleep(0.05)
            raise KeyError(failing)
        try:
            collectives.start_max(np.asarray([1]))()
        except GradscaleError as error:
            woken.append(type(error))
            raise

    begin = time.monotonic()
    with pytest.raises(KeyError):
        run_ranks(3, rank, timeout=60.0)
    assert time.monotonic() - begin < 30.0
    assert woken == [RankFailedError] * 2


def test_a_rank_that_never_comes_ends_in_a_timeout() -> None:
    import numpy as np

    def rank(collectives: ThreadCollectives) -> str:
        if collectives.rank == 1:
            return "left"
        collectives.start_max(np.asarray([1]))()
        return "not reached"

    with pytest.raises(CollectiveTimeoutError, match=r"rank 0 of 2 waited 0\.1 s"):
        run_ranks(2, rank, timeout=0.1)
    results = run_ranks(2, rank, timeout=0.1, return_exceptions=True)
    assert isinstance(results[0], CollectiveTimeoutError)
    assert results[1] == "left"


def test_exceptions_may_stand_in_place_of_results() -> None:
    def rank(collectives: ThreadCollectives) -> int:
        if collectives.rank:
            raise KeyError(collectives.rank)
        return 7

    results: list[Any] = run_ranks(2, rank, return_exceptions=True)
    assert results[0] == 7
    assert isinstance(results[1], KeyError)


def test_no_thread_is_left_behind() -> None:
    before = threading.active_count()
    run_ranks(3, lambda collectives: collectives.rank)
    assert threading.active_count() == before


@pytest.mark.parametrize("wrong", [0, -1, 2.0, "2", None])
def test_the_size_must_be_a_positive_integer(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="size must be an integer from 1 to"):
        run_ranks(wrong, lambda _: None)
