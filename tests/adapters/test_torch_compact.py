"""One or two integers for a vector: right where they tell, and every rank sees when they do not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from axes import require
from hypothesis import given
from hypothesis import strategies as st
from tiers import later

pytestmark = pytest.mark.torch

INT32 = st.integers(-(2**31) + 1, 2**31 - 1)
TAILS = st.lists(INT32, min_size=0, max_size=15)
SIZES = [1, 2, 3, 5, 30, 62, 63, 1000]


def largest_first(size: int) -> int:
    """Return the largest first number that is told without the whole vector."""
    from gradscale_torch import compact

    return compact.largest_first(size)


def exchanges_of(vectors: list[list[int]]) -> list[Any]:
    """Return what each rank holds for the exchange."""
    from gradscale_torch.compact import Exchange

    return [Exchange(vector, rank, len(vectors)) for rank, vector in enumerate(vectors)]


def added(exchanges: list[Any]) -> list[int]:
    """Return the sums of what the ranks send, all of which are int64."""
    columns = list(zip(*(exchange.sent for exchange in exchanges), strict=True))
    assert len(columns) == (1 if len(exchanges) == 2 else 2)
    reduced = list(map(sum, columns))
    assert all(-(2**63) <= value < 2**63 for value in [*reduced, *(one for column in columns for one in column)])
    return reduced


def exchanged(vectors: list[list[int]]) -> list[list[int] | None]:
    """Return what each rank learns when these vectors are exchanged as a group does it."""
    exchanges = exchanges_of(vectors)
    reduced = added(exchanges)
    return [exchange.maximum(reduced) for exchange in exchanges]


def exchanged_whole(vectors: list[list[int]]) -> list[list[int]]:
    """Return what each rank learns from the whole vectors."""
    exchanges = exchanges_of(vectors)
    reduced = list(map(max, zip(*(exchange.whole for exchange in exchanges), strict=True)))
    assert all(-(2**31) <= value < 2**31 for value in reduced)
    return [exchange.whole_maximum(reduced) for exchange in exchanges]


@given(data=st.data(), tail=TAILS, size=st.sampled_from(SIZES))
def test_ranks_that_hold_one_tail_get_the_maximum(data: st.DataObject, tail: list[int], size: int) -> None:
    require("torch")
    largest = largest_first(size)
    assert largest >= {1: 2**15 - 2, 2: 2**15 - 2, 3: 2**15 - 2, 5: 2**12 - 2, 30: 2}.get(size, 0)
    firsts = data.draw(st.lists(st.integers(0, largest), min_size=size, max_size=size))
    assert exchanged([[first, *tail] for first in firsts]) == [[max(firsts), *tail]] * len(firsts)


@given(data=st.data(), tail=st.lists(INT32, min_size=1, max_size=15), size=st.integers(2, 5))
def test_every_rank_sees_that_some_hold_other_tails(data: st.DataObject, tail: list[int], size: int) -> None:
    require("torch")
    place = data.draw(st.integers(0, len(tail) - 1))
    drifted = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size - 1))
    vectors = [[data.draw(st.integers(0, 2**12 - 2)), *tail] for _ in range(size)]
    for rank in drifted:
        vectors[rank][1 + place] = data.draw(INT32.filter(lambda value: value != tail[place]))
    assert exchanged(vectors) == [None] * size
    assert exchanged_whole(vectors) == [list(map(max, zip(*vectors, strict=True)))] * size


@pytest.mark.parametrize("first", [-1, None, 2**31 - 1, -(2**31) + 1])
@pytest.mark.parametrize("size", [*SIZES[:2], *later("ranks", *SIZES[2:])])
def test_a_number_that_does_not_fit_sends_the_whole_vector(first: int | None, size: int) -> None:
    require("torch")
    first = largest_first(size) + 1 if first is None else first
    for rank in {0, 1, size // 2, size - 1} & set(range(size)):
        vectors = [[0, 5] for _ in range(size)]
        vectors[rank][0] = first
        assert exchanged(vectors) == [None] * size
        assert exchanged_whole(vectors) == [[max(column) for column in zip(*vectors, strict=True)]] * size
    assert exchanged([[first, 5]] * size) == [None] * size


@given(data=st.data(), size=st.integers(2, 5), foreign=st.integers(-(2**63), 2**63 - 1) | st.integers(-9, 9))
def test_a_sum_with_a_message_of_the_users_own_is_never_taken_for_an_agreement(
    data: st.DataObject, size: int, foreign: int
) -> None:
    require("torch")
    from gradscale_torch.compact import ForeignMessageError

    odd_rank = data.draw(st.integers(0, size - 1))
    exchanges = exchanges_of([[0, 5, 7]] * size)
    own = exchanges[odd_rank].sent
    reduced = [total - mine + foreign for total, mine in zip(added(exchanges), own, strict=True)]
    # As an int64 adds.
    reduced = [(value + 2**63) % 2**64 - 2**63 for value in reduced]
    for rank, exchange in enumerate(exchanges):
        if rank == odd_rank:
            continue
        try:
            assert exchange.maximum(reduced) is None
        except ForeignMessageError:
            continue
        # One of 65536 has a rank's tag; then the whole vectors, which are equal, show that it was no sum of theirs.
        with pytest.raises(ForeignMessageError):
            exchange.whole_maximum(exchange.whole)


@pytest.mark.parametrize("size", [2, 3, 5, 1000])
@pytest.mark.parametrize("foreign", [0, 1, 3, -1, 2**62, -(2**63), 0x3FF0000000000000, 0x3FB999999999999A])
def test_what_users_add_up_is_seen_at_once(size: int, foreign: int) -> None:
    require("torch")
    from gradscale_torch.compact import ForeignMessageError

    exchanges = exchanges_of([[0, 5, 7]] * size)
    reduced = [total - mine + foreign for total, mine in zip(added(exchanges), exchanges[0].sent, strict=True)]
    with pytest.raises(ForeignMessageError):
        exchanges[1].maximum(reduced)


def test_whole_vectors_below_what_went_into_them_are_foreign() -> None:
    require("torch")
    from gradscale_torch.compact import ForeignMessageError

    (exchange, _) = exchanges_of([[0, 5], [0, 6]])
    with pytest.raises(ForeignMessageError):
        exchange.whole_maximum([0] * len(exchange.whole))


@pytest.mark.parametrize("bits", [0, 2**64 - 1], ids=["smallest hash", "largest hash"])
@pytest.mark.parametrize("size", SIZES)
def test_the_extreme_hashes_fit_into_what_is_sent(monkeypatch: pytest.MonkeyPatch, bits: int, size: int) -> None:
    require("torch")
    from gradscale_torch import compact

    class Digest:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def digest(self) -> bytes:
            return bits.to_bytes(8, "little")

    monkeypatch.setattr(compact.hashlib, "blake2b", Digest)
    largest = largest_first(size)
    assert exchanged([[rank * largest // size, 5] for rank in range(1, size + 1)]) == [[largest, 5]] * size


@pytest.mark.parametrize("at_min_scale", [False, True], ids=["not at_min_scale", "at_min_scale"])
@pytest.mark.parametrize("scale", [2.0**-126, 1.0, 65536.0, 1.2345e30])
def test_a_verdict_that_the_host_knows_is_packed_into_the_same_numbers(scale: float, at_min_scale: bool) -> None:
    torch = require("torch")
    from gradscale import DynamicScale, ScaleState, registry
    from gradscale.core.vector import AgreementVector, position

    class Policy(DynamicScale):
        def at_min_scale(self, state: ScaleState) -> Any:
            return state.growth_tracker > 4

    numbers = [torch.tensor(value, dtype=torch.int32) for value in (5 if at_min_scale else 4, 2**31 - 1, 7)]
    state = ScaleState(torch.tensor(scale), *numbers)
    backend = registry.backend_for(state.scale)
    mixed = AgreementVector()
    for policy in (DynamicScale(), Policy()):
        for call, count in enumerate((0, 3)):
            about = position(2**31 + 11, call, optimizer=3, scaler=1, steps=7, max_norm=None if call else 0.1)
            packed = AgreementVector().pack(backend, policy, state, torch.tensor(count, dtype=torch.int32), about)
            assert packed.dtype == torch.int32
            assert packed[1].item() == (at_min_scale and type(policy) is Policy)
            assert AgreementVector().pack(backend, policy, state, count, about) == packed.tolist()
            # One rank may hold gradients on the host in one step and on a device in another.
            assert mixed.pack(backend, policy, state, count, about) == packed.tolist()
            again = mixed.pack(backend, policy, state, torch.tensor(count, dtype=torch.int32), about)
            assert again.tolist() == packed.tolist()


@pytest.mark.parametrize("kind", ["mutable", "frozen with a list"])
def test_a_policy_that_is_changed_in_place_is_told_apart_at_the_next_state(kind: str) -> None:
    torch = require("torch")
    from gradscale import DynamicScale, registry
    from gradscale.core.vector import AgreementVector, identify, position

    class Settings:
        def at_min_scale(self, _: Any) -> None:
            return None

    if kind == "mutable":
        policy: Any = dataclasses.make_dataclass("Mutable", [("factor", float)], bases=(Settings,))(2.0)
    else:
        policy = dataclasses.make_dataclass("Frozen", [("factors", list)], bases=(Settings,), frozen=True)([2.0])
    state = DynamicScale().init(torch.ones(()))
    backend = registry.backend_for(state.scale)
    packer = AgreementVector()
    before = packer.pack(backend, policy, state, 0, position(1))
    if kind == "mutable":
        policy.factor = 4.0
    else:
        policy.factors[0] = 4.0
    after = packer.pack(backend, policy, type(state)(*state), 0, position(2))
    assert before[6] != after[6] == identify(policy)
