"""One or two integers for a vector: right where they tell, and every rank sees when they do not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from axes import require
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.torch

INT32 = st.integers(-(2**31) + 1, 2**31 - 1)
TAILS = st.lists(INT32, min_size=0, max_size=15)


def exchanged(vectors: list[list[int]]) -> list[list[int] | None]:
    """Return what each rank learns when these vectors are exchanged as a group does it."""
    from gradscale_torch.compact import Exchange

    exchanges = [Exchange(vector, len(vectors)) for vector in vectors]
    is_added = len(vectors) == 2
    assert [exchange.is_added for exchange in exchanges] == [is_added] * len(vectors)
    columns = list(zip(*(exchange.sent for exchange in exchanges), strict=True))
    assert len(columns) == (1 if is_added else 2)
    reduced = [(sum if is_added else max)(column) for column in columns]
    assert all(-(2**63) <= value < 2**63 for value in [*reduced, *(one for column in columns for one in column)])
    return [exchange.maximum(reduced) for exchange in exchanges]


@given(tail=TAILS, firsts=st.lists(st.integers(0, 2**14 - 2), min_size=1, max_size=5))
def test_ranks_that_hold_one_tail_get_the_maximum(tail: list[int], firsts: list[int]) -> None:
    require("torch")
    assert exchanged([[first, *tail] for first in firsts]) == [[max(firsts), *tail]] * len(firsts)


@given(data=st.data(), tail=st.lists(INT32, min_size=1, max_size=15), size=st.integers(2, 5))
def test_every_rank_sees_that_some_hold_other_tails(data: st.DataObject, tail: list[int], size: int) -> None:
    require("torch")
    place = data.draw(st.integers(0, len(tail) - 1))
    drifted = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size - 1))
    vectors = [[data.draw(st.integers(0, 2**14 - 2)), *tail] for _ in range(size)]
    for rank in drifted:
        vectors[rank][1 + place] = data.draw(INT32.filter(lambda value: value != tail[place]))
    assert exchanged(vectors) == [None] * size


@pytest.mark.parametrize("first", [-1, 2**14 - 1, 2**31 - 1, -(2**31) + 1])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_number_that_does_not_fit_sends_the_whole_vector(first: int, size: int) -> None:
    require("torch")
    for rank in range(size):
        vectors = [[0, 5] for _ in range(size)]
        vectors[rank][0] = first
        assert exchanged(vectors) == [None] * size
    assert exchanged([[first, 5]] * size) == [None] * size


@pytest.mark.parametrize("bits", [0, 2**64 - 1], ids=["smallest hash", "largest hash"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_extreme_hashes_fit_into_what_is_sent(monkeypatch: pytest.MonkeyPatch, bits: int, size: int) -> None:
    require("torch")
    from gradscale_torch import compact

    class Digest:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def digest(self) -> bytes:
            return bits.to_bytes(8, "little")

    monkeypatch.setattr(compact.hashlib, "blake2b", Digest)
    largest = 2**14 - 2
    assert exchanged([[rank * largest // size, 5] for rank in range(1, size + 1)]) == [[largest, 5]] * size


@pytest.mark.parametrize("at_min_scale", [False, True], ids=["not at_min_scale", "at_min_scale"])
@pytest.mark.parametrize("scale", [2.0**-126, 1.0, 65536.0, 1.2345e30])
def test_a_verdict_that_the_host_knows_is_packed_into_the_same_numbers(scale: float, at_min_scale: bool) -> None:
    torch = require("torch")
    from gradscale import DynamicScale, ScaleState, registry
    from gradscale.core.vector import AgreementVector

    class Policy(DynamicScale):
        def at_min_scale(self, state: ScaleState) -> Any:
            return state.growth_tracker > 4

    numbers = [torch.tensor(value, dtype=torch.int32) for value in (5 if at_min_scale else 4, 2**31 - 1, 7)]
    state = ScaleState(torch.tensor(scale), *numbers)
    backend = registry.backend_for(state.scale)
    mixed = AgreementVector()
    for policy in (DynamicScale(), Policy()):
        for call, count in enumerate((0, 3)):
            position = (2**31 + 11, call)
            packed = AgreementVector().pack(backend, policy, state, torch.tensor(count, dtype=torch.int32), position)
            assert packed.dtype == torch.int32
            assert packed[1].item() == (at_min_scale and type(policy) is Policy)
            assert AgreementVector().pack(backend, policy, state, count, position) == packed.tolist()
            # One rank may hold gradients on the host in one step and on a device in another.
            assert mixed.pack(backend, policy, state, count, position) == packed.tolist()
            again = mixed.pack(backend, policy, state, torch.tensor(count, dtype=torch.int32), position)
            assert again.tolist() == packed.tolist()


@pytest.mark.parametrize("kind", ["mutable", "frozen with a list"])
def test_a_policy_that_is_changed_in_place_is_told_apart_at_the_next_state(kind: str) -> None:
    torch = require("torch")
    from gradscale import DynamicScale, registry
    from gradscale.core.vector import AgreementVector, identify

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
    before = packer.pack(backend, policy, state, 0, (1, 0))
    if kind == "mutable":
        policy.factor = 4.0
    else:
        policy.factors[0] = 4.0
    after = packer.pack(backend, policy, type(state)(*state), 0, (2, 0))
    assert before[6] != after[6] == identify(policy)
