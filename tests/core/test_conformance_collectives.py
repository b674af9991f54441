"""check_collectives: right collectives pass, and each kind of wrong one fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from array_api_compat import array_namespace
from libraries import Library, opened

import gradscale
from gradscale.testing import RankFailedError, ThreadCollectives, check_collectives, run_ranks

# See conftest.py.
LONG = True

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


class One:
    """A group of one rank."""

    rank = 0
    size = 1

    def start_max(self, x: Any, /) -> Callable[[], Any]:
        return lambda: x


def check_on(size: int, arrays: Library, wrap: Callable[[ThreadCollectives], Any]) -> None:
    """Check collectives of threads, wrapped on each rank."""
    like = arrays.asarray(0.0)

    def rank(collectives: ThreadCollectives) -> None:
        check_collectives(wrap(collectives), like, repetitions=4)

    run_ranks(size, rank, timeout=10.0)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_collectives_of_threads_pass(arrays: Library, size: int) -> None:
    check_on(size, arrays, lambda collectives: collectives)


def test_a_group_of_one_passes(arrays: Library) -> None:
    check_collectives(One(), arrays.asarray(0.0))


Start = Callable[[Any], Callable[[], Any]]


class Bent:
    """Collectives that do something wrong with what is sent, or with what comes back."""

    def __init__(self, inner: ThreadCollectives, how: Callable[[Start, Any], Callable[[], Any]]) -> None:
        self.rank, self.size = inner.rank, inner.size
        self.inner, self.how = inner, how

    def start_max(self, x: Any, /) -> Callable[[], Any]:
        return self.how(self.inner.start_max, x)


def after(bend: Callable[[Any, Any], Any]) -> Callable[[Start, Any], Callable[[], Any]]:
    """Bend what comes back, given what was sent as well."""

    def how(start: Start, x: Any) -> Callable[[], Any]:
        pending = start(x)
        return lambda: bend(pending(), x)

    return how


def minimum(start: Start, x: Any) -> Callable[[], Any]:
    pending = start(-x)
    return lambda: -pending()


WRONG = {
    "gives each rank its own values back": after(lambda _, x: x),
    "takes the minimum": minimum,
    "widens": after(lambda result, x: array_namespace(x).astype(result, array_namespace(x).int64)),
    "reshapes": after(lambda result, x: array_namespace(x).reshape(result, (-1, 1))),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("size", [2, 3])
def test_wrong_collectives_fail(arrays: Library, what: str, size: int) -> None:
    with pytest.raises((AssertionError, RankFailedError)) as caught:
        check_on(size, arrays, lambda inner: Bent(inner, WRONG[what]))
    assert isinstance(caught.value, AssertionError)


@pytest.mark.parametrize("size", [2, 3])
def test_a_wrong_rank_fails(arrays: Library, size: int) -> None:
    def wrong(inner: ThreadCollectives) -> Bent:
        bent = Bent(inner, lambda start, x: start(x))
        bent.rank += 1
        return bent

    with pytest.raises(AssertionError):
        check_on(size, arrays, wrong)


def test_collectives_that_give_a_list_fail(arrays: Library) -> None:
    hosts = after(lambda result, x: gradscale.registry.backend_for(x).read(result))
    with pytest.raises((AssertionError, AttributeError)):
        check_on(2, arrays, lambda inner: Bent(inner, hosts))


@pytest.mark.numpy
def test_collectives_that_write_to_the_array_sent_fail() -> None:
    def overwrite(result: Any, x: Any) -> Any:
        x[...] = result
        return result

    with opened("numpy") as library, pytest.raises(AssertionError, match="was modified to"):
        check_on(2, library, lambda inner: Bent(inner, after(overwrite)))


@pytest.mark.numpy
def test_collectives_that_finish_in_one_buffer_fail() -> None:
    buffer = np.zeros(5, dtype=np.int32)

    def fill(start: Start, x: Any) -> Callable[[], Any]:
        buffer[: x.size] = start(x)()
        return lambda: buffer[: x.size]

    with opened("numpy") as library, pytest.raises(AssertionError):
        check_on(1, library, lambda inner: Bent(inner, fill))
