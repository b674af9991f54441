"""poll: what it asks, and when it ends."""

from __future__ import annotations

import math

import pytest

from gradscale.groups import poll


@pytest.mark.parametrize("questions", [1, 2, 50])
def test_it_asks_until_the_answer_is_yes(questions: int) -> None:
    asked = iter(range(1, questions + 1))
    assert poll(lambda: next(asked) == questions, math.inf)
    assert list(asked) == []


def test_it_ends_when_the_time_is_over_and_has_asked_once() -> None:
    asked: list[int] = []
    assert not poll(lambda: bool(asked.append(1)), 0.0)
    assert asked
    assert poll(lambda: True, 0.0)


def test_what_is_raised_ends_the_wait() -> None:
    def fail() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        poll(fail, math.inf)
