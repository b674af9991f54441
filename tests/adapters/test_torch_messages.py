"""Two integers for a vector over gloo: the flags if the ranks hold the same, and all ranks see it if they do not."""

from __future__ import annotations

from typing import Any

import pytest
from axes_torch import gradscale_torch
from hypothesis import given
from hypothesis import strategies as st

from gradscale.core.vector import Reason, reason_code

pytestmark = pytest.mark.torch

collectives = gradscale_torch.collectives

INT32 = st.integers(-(2**31) + 1, 2**31 - 1)
TAILS = st.lists(INT32, min_size=1, max_size=21)
# What fits into 15 bits next to a hash, but for no gradients, none that is bad, and a count that does not fit.
MOST = 2**15 - 3


CODES = st.one_of(st.just(0), st.builds(reason_code, st.sampled_from(list(Reason)[1:]), st.integers(0, 4095)))


def told(vectors: list[list[int]]) -> tuple[int, bool, int] | None:
    """Return what every rank learns from the short forms of these vectors."""
    sent = [collectives.short_form(vector) for vector in vectors]
    assert all(len(one) == 2 and all(-(2**63) <= value < 2**63 for value in one) for one in sent)
    return collectives.told_flags([max(column) for column in zip(*sent, strict=True)])


@given(found=st.lists(st.tuples(st.integers(0, MOST), CODES), min_size=1, max_size=8), tail=TAILS)
def test_ranks_that_hold_the_same_learn_the_greatest_count_and_code(
    found: list[tuple[int, int]], tail: list[int]
) -> None:
    vectors = [[count, 0, True, code, *tail] for count, code in found]
    most, gravest = (max(each) for each in zip(*found, strict=True))
    assert told(vectors) == (most, True, gravest)
    # A rank without gradients holds the same as the others.
    assert told([[0, 0, False, 0, *tail], *vectors]) == (most, True, gravest)
    assert told([[0, 0, False, 0, *tail]] * 3) == (0, False, 0)


def test_a_rank_whose_number_does_not_fit_is_seen_by_every_rank() -> None:
    for rank in (4096, 2**20):
        assert told([[0, 0, True, reason_code(Reason.SPIKE, rank), 7], [0, 0, True, 0, 7]]) is None


@given(data=st.data(), tail=TAILS, size=st.integers(2, 8))
def test_every_rank_sees_that_some_hold_something_else(data: st.DataObject, tail: list[int], size: int) -> None:
    place = data.draw(st.integers(0, len(tail) - 1))
    vectors = [[data.draw(st.integers(0, MOST)), 0, True, data.draw(CODES), *tail] for _ in range(size)]
    for rank in data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size - 1)):
        vectors[rank][4 + place] = data.draw(INT32.filter(lambda value: value != tail[place]))
    assert told(vectors) is None


@pytest.mark.parametrize("first", [-1, MOST + 1, 2**31 - 1, -(2**31) + 1])
def test_a_first_number_that_does_not_fit_is_seen_by_every_rank(first: int) -> None:
    for rank in range(3):
        assert told([[first if rank == bad else 5, 0, True, 0, 7, -7] for bad in range(3)]) is None
    assert told([[first, 0, True, 0, 7, -7]] * 3) is None


@pytest.mark.parametrize("bits", [0, 2**64 - 1], ids=["smallest hash", "largest hash"])
def test_the_extreme_hashes_fit_into_an_int64(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    class Digest:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def digest(self) -> bytes:
            return bits.to_bytes(8, "little")

    monkeypatch.setattr(collectives.hashlib, "blake2b", Digest)
    code = reason_code(Reason.FAILED, 0)
    assert told([[count, 0, True, code, 5] for count in (0, MOST, 3)]) == (MOST, True, code)
