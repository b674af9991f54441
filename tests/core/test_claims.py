"""Ranks that differ tell what each of them holds, wherever they are in their programs; and no rank waits for ever."""

import functools
import textwrap
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optimizers import Grouped, Parameter, Tree
from scenarios import Around, grid_of_threads, raised

import gradscale
from gradscale import ScaleState, ShardedGradScaler
from gradscale.scaler import agreement
from gradscale.scaler import claim as claims
from gradscale.scaler.claim import Call, Claim, Outcome, Reason
from gradscale.testing import ThreadCollectives, run_ranks

pytestmark = pytest.mark.numpy

WORDS = claims.hash_of(Claim(Call.STEP))
COUNTERS = st.integers(0, 2**31 - 1)
STATES = st.builds(ScaleState, st.floats(2.0**-126, 2.0**127, width=32), COUNTERS, COUNTERS, COUNTERS)
CODES = st.one_of(st.just(0), st.builds(claims.reason_code, st.sampled_from(list(Reason)[1:4]), st.integers(0, 2**20)))
PRESENCES = st.sampled_from([claims.Presence.NONE, claims.Presence.SOME])
FOUND = st.builds(
    lambda *found: claims.Flags(found[0], False, found[1], 2, found[2]), st.just(0) | COUNTERS, PRESENCES, CODES
)
NORMS = st.just(0.0) | st.floats(2.0**-100, 2.0**100, width=32)
FACTORS = st.sampled_from([1.0, 1 + 2**-23, 1 - 2**-20, 1 + 2**-12, 1 + 2**-8, 1 - 2**-8, 2.0, 2.0**-20])


def maximum(messages: list[list[int]]) -> list[int]:
    return [max(column) for column in zip(*messages, strict=True)]


@given(data=st.data(), state=STATES, size=st.integers(1, 8))
def test_all_ranks_see_whether_they_hold_the_same_and_learn_the_gravest_finding(data, state: ScaleState, size: int):
    field = data.draw(st.sampled_from(["", "claim", "norm", *ScaleState._fields]))
    other, words, norm, factor = state, WORDS, data.draw(NORMS), 1.0
    if field == "claim":
        words = claims.hash_of(Claim(Call.STEP, iteration=data.draw(st.integers(1, 2**31))))
    elif field == "norm":
        factor = data.draw(FACTORS)
    elif field:
        other = state._replace(**{field: getattr(data.draw(STATES), field)})
    odd = data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    found = data.draw(st.lists(FOUND, min_size=size, max_size=size))
    sent = [
        claims.of_numbers(other, words, each, norm * factor)
        if rank in odd
        else claims.of_numbers(state, WORDS, each, norm)
        for rank, each in enumerate(found)
    ]
    agreed, (count, _, presence, _, code) = maximum(sent), map(max, zip(*found, strict=True))
    is_close = not odd or count > 0 or norm == 0.0 or abs(factor - 1.0) < 2**-11
    is_one = is_close and (not odd or (other, words) == (state, WORDS))
    reason, by = claims.reason_and_rank(code) if code else (Reason.STEPPED if presence else Reason.NO_GRADIENTS, None)
    if count and reason is not Reason.OVERFLOW:
        reason, by = Reason.OVERFLOW, None
    assert count > 0 or bool(claims.differ_in(np.asarray(agreed, np.int32))) is not is_one
    for own in sent:
        assert (claims.outcome(agreed, own) is Outcome.ONE_STATE) == is_one
        assert ("average them before unscale_()" in str(claims.spread_of(agreed, own))) == (not is_close)
        verdict = claims.verdict_of(agreed, own)
        assert not is_one or verdict[:4] == (reason, by, count, own[0])
        assert not is_one or verdict.scale == state.scale


def test_no_two_claims_are_taken_for_one():
    base = Claim(Call.STEP, kind="SGD")
    others = [base._replace(call=call) for call in Call]
    others += [base._replace(**{name: number}) for name in Claim._fields[1:8] for number in range(1, 500)]
    others += [base._replace(max_norm=value) for value in (0.1, 0.1 * (1 + 2**-40), 1.0, 0.0)]
    others += [base._replace(kind=kind) for kind in ("Adam", "named 'SGD'", "SGD\n1", "1\nSGD", "\ud800")]
    # The usual call is the first.
    assert len({claims.hash_of(one) for one in others}) == len(others)
    assert all(0 <= word < 2**30 for one in others for word in claims.hash_of(one))


class Step:
    """A rank with two optimizers, and a scale of its own."""

    def __init__(self, group, scale: float):
        self.scaler = ShardedGradScaler(group=group, init_scale=scale, timeout=5.0)
        self.one, self.other = Tree(), Tree()
        self.scaler.scale(np.float32(1.0))
        for tree in (self.one, self.other):
            tree.grads = [np.ones(3, np.float32)]


TOLD = "scale: 4.0 on rank 0 | 8.0 on rank 1, 2"


@pytest.mark.parametrize("early", [0, 1, 2])
def test_ranks_that_have_sent_more_by_then_are_told_the_same(early: int):
    """One rank reads the first answer before it sends the second message, and others after three."""

    def rank(group: ThreadCollectives) -> str:
        step = Step(group, 4.0 if group.rank == 0 else 8.0)
        third = Tree([np.ones(3, np.float32)])

        def iterate():
            step.scaler.unscale_(step.one)
            if group.rank != early:
                step.scaler.unscale_(step.other)
                if group.rank != (early + 1) % 3:
                    step.scaler.unscale_(third)
            step.scaler.step(step.one)

        told = str(raised(gradscale.ScaleDesyncError, iterate))
        return told.partition("seen by rank")[2].partition(": ")[2].partition("; settings")[0]

    assert run_ranks(3, rank) == [TOLD] * 3


def test_a_message_that_meets_a_rank_which_tells_its_claim_is_an_error_of_its_own():
    """Of another scaler over the group, which holds the same everywhere."""

    def rank(group: ThreadCollectives):
        first, second = Step(group, 4.0 * (1 + group.rank)), Step(group, 4.0)
        first.scaler.unscale_(first.one)
        if group.rank == 0:
            second.scaler.unscale_(second.one)
        said = "scale: 4.0 on rank 0 | 8.0 on rank 1"
        raised(gradscale.ScaleDesyncError, lambda: first.scaler.step(first.one), said)
        if group.rank == 0:
            said = "of which the other ranks tell; what this rank holds"
            raised(gradscale.ScaleDesyncError, lambda: second.scaler.step(second.one), said)

    run_ranks(2, rank)


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_dies_before_it_tells_its_claim_leaves_the_others_with_their_own(dying: int):
    def rank(group: ThreadCollectives):
        step = Step(group, 4.0 * (1 + group.rank))
        step.scaler.unscale_(step.one)
        if group.rank == dying:
            raise ZeroDivisionError
        step.scaler.step(step.one)

    ended = run_ranks(2, rank, timeout=0.5, return_exceptions=True)
    assert type(ended[dying]) is ZeroDivisionError
    assert_unanswered(ended[1 - dying], 4.0 * (2 - dying))


def assert_unanswered(error: Exception, scale: float):
    """Assert that a rank that tells, and hears nothing, says what it knows: the scales, and its own claim."""
    assert type(error) is gradscale.ScaleDesyncError
    assert f"scale from 4.0 to 8.0 (here {scale}); what this rank holds is call=" in str(error)
    assert "Call set_group() with another group, too, since some rank has not told its own in time" in str(error)
    assert isinstance(error.__cause__, TimeoutError)


def test_a_wait_without_an_end_ends_when_a_rank_tells(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(agreement, "_PATIENCE", 0.3)

    def rank(group: ThreadCollectives) -> list[Exception]:
        step, errors = Step(Around(group), 4.0 * (1 + group.rank)), []
        step.scaler.unscale_(step.one)
        if group.rank == 0:
            return []
        for _ in range(2):
            errors.append(raised(gradscale.ScaleDesyncError, lambda: step.scaler.step(step.one)))
        step.scaler.load_state_dict(step.scaler.state_dict())
        step.scaler.scale(np.float32(1.0))
        with pytest.raises(gradscale.BackendError, match=r"lost before, and needs set_group\(\)"):
            step.scaler.unscale_(step.one)
        return errors

    begin = time.monotonic()
    first, second = run_ranks(2, rank, timeout=600.0)[1]
    assert time.monotonic() - begin < 60.0
    assert_unanswered(first, 8.0)
    assert second is first


def test_the_group_of_a_wait_that_ended_waits_for_as_long_as_before():
    def rank(group: ThreadCollectives):
        with group.within(0.1), pytest.raises(gradscale.CollectiveTimeoutError, match=r"after 0.1 s|0.1 s"):
            group.start_max(np.zeros(1, np.int32))()
        with group.within(60.0), pytest.raises(gradscale.CollectiveTimeoutError, match=r"0.2 s"):
            group.start_max(np.zeros(1, np.int32))()

    run_ranks(2, lambda group: rank(group) if group.rank else None, timeout=0.2)


@pytest.mark.parametrize("size", [2, 64])
def test_an_error_of_many_ranks_is_as_readable_as_one_of_two(size: int):
    def rank(group: ThreadCollectives) -> str:
        step = Step(group, 4.0 if group.rank == size - 2 else 8.0)
        return str(raised(gradscale.ScaleDesyncError, lambda: step.scaler.step(step.one)))

    texts = run_ranks(size, rank, timeout=120.0)
    others = "1" if size == 2 else f"0-{size - 3}, {size - 1}"
    assert {text.partition(f" of {size} in iteration 1: ")[2] for text in texts} == {
        texts[0].partition(f" of {size} in iteration 1: ")[2]
    }
    for text in texts:
        assert f"4.0 on rank {size - 2}" in text
        assert f"8.0 on rank {others}" in text
        assert f"init_scale=4.0 on rank {size - 2}" in text
        assert len(textwrap.wrap(text, 120)) <= 20


def told(**values):
    own = claims.of_numbers(ScaleState(4.0, 0, 0, 0), WORDS, claims.Flags())
    return claims.claimed(own, Claim(Call.STEP)._replace(**values), "DynamicScale()")


def test_many_ranks_and_values_are_cut():
    text = claims.difference({(rank,): told(optimizer=rank % 10) for rank in range(200)})
    assert text.startswith("optimizer: 0 on rank 0, 10, 20, 30, 40, 50, 60, 70 and 12 others | 1 on rank 1, ")
    assert "7 on rank 7" in text
    assert "8 on rank 8" not in text
    assert " | and 2 other values (numbered in the order" in text


def test_ranks_that_differ_in_all_they_hold_are_told_so_in_20_lines():
    fields = [name for name in Claim._fields if name not in ("call", "settings", "kind")]
    each = {
        (rank,): told(**dict.fromkeys(fields, 10**9 + rank), kind=f"named {'a' * 500 + str(rank)!r}")
        | dict.fromkeys(ScaleState._fields, 2.0**rank)
        | {"settings": [rank, f"Policy({', '.join(f'setting{k}={rank + k}' for k in range(50))})"]}
        for rank in range(256)
    }
    text = claims.difference(each)
    assert len(textwrap.wrap(text, 120)) <= 17
    assert text.endswith("; and also iteration, message, optimizer, scaler, group, settings, steps, max_norm, kind")


def test_of_settings_the_words_that_differ_are_told():
    texts = (
        "DynamicScale(init_scale=4.0, growth_interval=7), diagnose=False",
        "DynamicScale(init_scale=4.0), diagnose=False",
    )
    held = {(rank,): told() | {"settings": [number, texts[number]]} for rank, number in enumerate((0, 1, 1))}
    assert claims.difference(held) == f"settings: growth_interval=7 on rank 0 | {texts[1]} on rank 1, 2"
    # Ranks may write one policy in several ways.
    assert not claims.difference({(rank,): told() | {"settings": [7, f"<Policy at {rank}>"]} for rank in range(3)})


def test_an_optimizer_that_gains_parameters_or_a_name_on_one_rank_alone_is_a_difference():
    def rank(group: ThreadCollectives, *, is_named: bool) -> str:
        scaler, optimizer = ShardedGradScaler(group=group, init_scale=1.0, timeout=5.0), Grouped([np.ones(1)])
        told = ""
        for iteration in range(2):
            scaler.scale(np.float32(1.0))
            if iteration and group.rank == 0 and is_named:
                scaler.name(optimizer, "critic")
            elif iteration and group.rank == 0:
                optimizer.param_groups.append({"params": [Parameter(np.ones(1))]})
            try:
                scaler.step(optimizer)
                scaler.update()
            except gradscale.ScaleDesyncError as error:
                told = str(error)
        return told

    for is_named, held in ((True, "named 'critic'"), (False, "Grouped with 2 param_groups")):
        for text in run_ranks(2, functools.partial(rank, is_named=is_named)):
            assert f"name: {held} on rank 0 | Grouped with 1 param_groups on rank 1" in text


def test_of_ranks_at_other_calls_it_is_told_where_they_are_and_nothing_that_follows_from_it():
    text = claims.difference({(0,): told(max_norm=1.0, message=1), (1,): told(call=Call.DIAGNOSIS, kind="Tree")})
    assert [part.partition(":")[0] for part in text.split("; ")] == ["the call itself", "call of the iteration"]


class Noting:
    """A group of this process alone, which notes that somebody waits for its ranks."""

    rank, size = 0, 1

    def __init__(self, waited: "list[Noting]"):
        self.waited = waited

    def start_max(self, x: np.ndarray, /):
        def finish() -> np.ndarray:
            return x.copy()

        vars(finish)["wait"] = lambda: self.waited.append(self)
        return finish


def test_a_read_waits_for_the_ranks_of_each_group_of_a_list():
    waited: list[Noting] = []
    groups = [Noting(waited), Noting(waited)]
    step = Step(groups, 4.0)
    waited.clear()
    step.scaler.step(step.one)
    assert waited[-2:] == groups


def test_ranks_of_a_grid_are_told_by_their_rank_in_each_group():
    groups = grid_of_threads()

    def rank(collectives: ThreadCollectives) -> str:
        step = Step(groups(collectives.rank), 8.0 if collectives.rank == 2 else 4.0)
        error = raised(gradscale.ScaleDesyncError, lambda: step.scaler.step(step.one))
        return str(error).partition("in iteration 1: ")[2]

    row, column = "scale: 8.0 on rank 0/1 | 4.0 on rank 1/1", "scale: 4.0 on rank 0/0 | 8.0 on rank 0/1"
    texts = run_ranks(4, rank)
    assert all(row in text for text in texts)
    assert [column in text for text in texts] == [True, False, True, False]


def test_values_of_ranks_travel_in_messages_of_the_usual_form():
    """Of any number and length, and none is lost."""

    def rank(group: ThreadCollectives) -> tuple[list[int], list[bytes]]:
        def carry(values: Sequence[int]) -> list[int]:
            sent = np.asarray(claims.carrying(WORDS, values), np.int32)
            assert sent.size == claims.LENGTH
            agreed = group.start_max(sent)().tolist()
            assert claims.outcome(agreed, sent.tolist()) is Outcome.ONE_STATE
            return claims.carried(agreed)

        number = (-1) ** group.rank * (2**31 - group.rank - 1)
        sent = bytes(range(256)) * group.rank + b"\xff" * (group.rank % 5)
        return agreement.gather_numbers(number, group, carry), agreement.gather_texts(sent, group, carry)

    for size in (1, 2, 8, 9):
        numbers = [(-1) ** rank * (2**31 - rank - 1) for rank in range(size)]
        texts = [bytes(range(256)) * rank + b"\xff" * (rank % 5) for rank in range(size)]
        assert run_ranks(size, rank) == [(numbers, texts)] * size


@given(data=st.data(), state=STATES, values=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=8, max_size=8))
def test_a_message_that_carries_values_is_taken_for_no_other(data, state, values: list[int]):
    carrying = claims.carrying(WORDS, values)
    others = [
        claims.of_numbers(state, WORDS, claims.Flags()),
        claims.telling(),
        claims.failure(WORDS, 1),
        claims.carrying(claims.hash_of(Claim(Call.NORM)), values),
        data.draw(st.lists(st.integers(-(2**31) + 1, 2**31 - 1), min_size=claims.LENGTH, max_size=claims.LENGTH)),
    ]
    wanted = [Outcome.DIFFERENT, Outcome.TOLD, Outcome.FAILED, Outcome.DIFFERENT, None]
    for other, expected in zip(others, wanted, strict=True):
        agreed = maximum([carrying, other])
        found = claims.outcome(agreed, carrying)
        assert found is not Outcome.ONE_STATE
        assert expected in (None, found)
        assert expected is None or claims.outcome(agreed, other) is not Outcome.ONE_STATE
        assert claims.spread_of(agreed, other) == [] or expected is None
