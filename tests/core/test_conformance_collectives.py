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


class Wrapped:
    """Right collectives, to be bent."""

    def __init__(self, inner: ThreadCollectives) -> None:
        self.inner, self.rank, self.size = inner, inner.rank, inner.size

    def start_max(self, x: Any, /) -> Callable[[], Any]:
        return self.inner.start_max(x)


class DropsTheMaximum(Wrapped):
    """Gives each rank its own values back."""

    def start_max(self, x: Any, /) -> Callable[[], Any]:
        pending = self.inner.start_max(x)
        return lambda: (pending(), x)[1]


class Minimum(Wrapped):
    def start_max(self, x: Any, /) -> Callable[[], Any]:
        pending = self.inner.start_max(-x)
        return lambda: -pending()


class Widens(Wrapped):
    def start_max(self, x: Any, /) -> Callable[[], Any]:
        pending = self.inner.start_max(x)
        return lambda: array_namespace(x).astype(pending(), arrays_int64(x))


class Reshapes(Wrapped):
    def start_max(self, x: Any, /) -> Callable[[], Any]:
        pending = self.inner.start_max(x)
        return lambda: array_namespace(x).reshape(pending(), (-1, 1))


class Hosts(Wrapped):
    """Gives back an array of another library."""

    def start_max(self, x: Any, /) -> Callable[[], Any]:
        pending = self.inner.start_max(x)
        return lambda: gradscale.registry.backend_for(x).read(pending())


class WrongRank(Wrapped):
    def __init__(self, inner: ThreadCollectives) -> None:
        super().__init__(inner)
        self.rank += 1


def arrays_int64(x: Any) -> Any:
    """Return the int64 of an array's library."""
    return array_namespace(x).int64


@pytest.mark.parametrize(
    "kind", [DropsTheMaximum, Minimum, Widens, Reshapes, WrongRank], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("size", [2, 3])
def test_wrong_collectives_fail(arrays: Library, kind: Any, size: int) -> None:
    with pytest.raises((AssertionError, RankFailedError)) as caught:
        check_on(size, arrays, kind)
    assert isinstance(caught.value, AssertionError)


def test_collectives_that_give_a_list_fail(arrays: Library) -> None:
    with pytest.raises((AssertionError, AttributeError)):
        check_on(2, arrays, Hosts)


@pytest.mark.numpy
def test_collectives_that_write_to_the_array_sent_fail() -> None:
    class Overwrites(Wrapped):
        def start_max(self, x: Any, /) -> Callable[[], Any]:
            pending = self.inner.start_max(x)

            def finish() -> Any:
                result = pending()
                x[...] = result
                return result

            return finish

    with opened("numpy") as library, pytest.raises(AssertionError, match="was modified to"):
        check_on(2, library, Overwrites)


@pytest.mark.numpy
def test_collectives_that_finish_in_one_buffer_fail() -> None:
    class OneBuffer(Wrapped):
        buffer = np.zeros(5, dtype=np.int32)

        def start_max(self, x: Any, /) -> Callable[[], Any]:
            result = self.inner.start_max(x)()
            self.buffer[: x.size] = result
            return lambda: self.buffer[: x.size]

    with opened("numpy") as library, pytest.raises(AssertionError):
        check_on(1, library, OneBuffer)
