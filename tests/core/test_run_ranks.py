"""run_ranks: threads as ranks, for users' own tests."""

import math
import threading
import time
from typing import Any

import numpy as np
import pytest

from gradscale import CollectiveTimeoutError, GradscaleError, InvalidTypeError, InvalidValueError
from gradscale.testing import RankFailedError, ThreadCollectives, run_ranks

ONE = np.zeros(1, np.int32)


def test_a_message_is_a_copy_of_what_was_sent_and_each_rank_has_a_result_of_its_own():
    before = threading.active_count()

    def rank(group: ThreadCollectives):
        sent = np.full(1, group.rank, np.int32)
        pending = group.start_max(sent)
        sent += 99
        return pending()

    one, other = run_ranks(2, rank)
    assert threading.active_count() == before
    one += 1
    assert (one.tolist(), other.tolist()) == ([2], [1])


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_raises_wakes_the_others_and_is_what_is_raised(failing: int):
    woken: list[type[BaseException]] = []

    def rank(collectives: ThreadCollectives):
        if collectives.rank == failing:
            time.sleep(0.05)
            raise KeyError(failing)
        try:
            collectives.start_max(ONE)()
        except GradscaleError as error:
            woken.append(type(error))
            raise

    begin = time.monotonic()
    with pytest.raises(KeyError):
        run_ranks(3, rank, timeout=60.0)
    assert time.monotonic() - begin < 30.0
    assert woken == [RankFailedError] * 2


def test_a_rank_that_never_comes_ends_in_a_timeout():
    def rank(collectives: ThreadCollectives, error: Exception | None = None):
        if error is not None and collectives.rank == 1:
            raise error
        if collectives.rank == 0:
            collectives.start_max(ONE)()

    with pytest.raises(CollectiveTimeoutError, match=r"rank 0 of 2 waited 0\.1 s"):
        run_ranks(2, rank, timeout=0.1)
    died = KeyError(1)
    results: list[Any] = run_ranks(2, lambda group: rank(group, died), timeout=0.1, return_exceptions=True)
    assert isinstance(results[0], CollectiveTimeoutError)
    assert results[1] is died


@pytest.mark.parametrize("other", [np.zeros(3, np.int32), np.zeros((1, 2), np.int32), np.zeros(2)], ids=repr)
def test_ranks_that_send_unequal_arrays_all_get_an_error(other):
    def rank(group: ThreadCollectives):
        group.start_max(other if group.rank == 1 else np.zeros(2, np.int32))()

    results = run_ranks(3, rank, timeout=5.0, return_exceptions=True)
    assert [type(result) for result in results] == [InvalidValueError] * 3
    assert "every rank must send an array of one library, shape and dtype, got" in str(results[0])


def test_what_is_no_array_size_or_timeout_is_refused():
    with pytest.raises(InvalidTypeError, match=r"what is reduced must be an array, got \[1\] of type list"):
        run_ranks(1, lambda group: group.start_max([1]))
    with pytest.raises(InvalidValueError, match="size must be an integer from 1 to"):
        run_ranks(0, print)
    with pytest.raises(InvalidValueError, match="timeout must be a finite number above 0, got -1"):
        run_ranks(1, print, timeout=-1)
    for seconds in (math.inf, 1e300):
        assert run_ranks(1, lambda group: group.start_max(ONE)(), timeout=seconds) == [0]
