"""Two integers for a vector: right where they tell, and every rank sees when they do not."""

from __future__ import annotations

import pytest
from axes import require
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.torch

INT32 = st.integers(-(2**31) + 1, 2**31 - 1)
TAILS = st.lists(INT32, min_size=0, max_size=15)


def reduced(vectors: list[list[int]]) -> list[int]:
    """Return the element-wise MAX of the encoded vectors, as a group makes it."""
    from gradscale_torch.compact import encode

    encoded = [encode(vector) for vector in vectors]
    assert all(-(2**63) <= value < 2**63 for pair in encoded for value in pair)
    return [max(column) for column in zip(*encoded, strict=True)]


@given(tail=TAILS, firsts=st.lists(st.integers(0, 2**14 - 2), min_size=1, max_size=5))
def test_ranks_that_hold_one_tail_get_the_maximum_from_two_integers(tail: list[int], firsts: list[int]) -> None:
    require("torch")
    from gradscale_torch.compact import decode

    vectors = [[first, *tail] for first in firsts]
    for vector in vectors:
        assert decode(vector, reduced(vectors)) == [max(firsts), *tail]


@given(data=st.data(), tail=st.lists(INT32, min_size=1, max_size=15), size=st.integers(2, 4))
def test_every_rank_sees_that_one_holds_another_tail(data: st.DataObject, tail: list[int], size: int) -> None:
    require("torch")
    from gradscale_torch.compact import decode

    place = data.draw(st.integers(0, len(tail) - 1))
    other = [*tail]
    other[place] = data.draw(INT32.filter(lambda value: value != tail[place]))
    drifted = data.draw(st.integers(0, size - 1))
    firsts = data.draw(st.lists(st.integers(0, 300), min_size=size, max_size=size))
    vectors = [[first, *(other if rank == drifted else tail)] for rank, first in enumerate(firsts)]
    assert [decode(vector, reduced(vectors)) for vector in vectors] == [None] * size


@pytest.mark.parametrize("first", [-1, 2**14 - 1, 2**31 - 1, -(2**31) + 1])
def test_a_number_that_does_not_fit_sends_the_whole_vector(first: int) -> None:
    require("torch")
    from gradscale_torch.compact import decode

    for vectors in ([[first, 5], [0, 5]], [[0, 5], [first, 5]], [[first, 5]] * 2):
        assert [decode(vector, reduced(vectors)) for vector in vectors] == [None] * len(vectors)
