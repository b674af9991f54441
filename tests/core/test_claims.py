"""Ranks that differ tell what each of them holds, wherever they are in their programs; and no rank waits for ever."""

import dataclasses
import enum
import functools
import json
import os
import subprocess
import sys
import textwrap
import time
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optimizers import Grouped, Parameter, Tree
from scenarios import Alone, Around, raised

import gradscale
from gradscale import ScaleState, ShardedGradScaler
from gradscale.scaler import agreement
from gradscale.scaler import claim as claims
from gradscale.scaler.claim import Claim, Outcome, Purpose, Reason
from gradscale.scaler.differences import difference
from gradscale.testing import ThreadCollectives, run_ranks

pytestmark = pytest.mark.numpy

WORDS = claims.hash_of(Claim(Purpose.STEP))
COUNTERS = st.integers(0, 2**31 - 1)
STATES = st.builds(ScaleState, st.floats(2.0**-126, 2.0**127, width=32), COUNTERS, COUNTERS, COUNTERS)
CODES = st.one_of(
    st.just(0),
    st.builds(claims.reason_code, st.sampled_from([*claims.KEEPS_SCALE, Reason.OVERFLOW]), st.integers(0, 2**20)),
)
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
        words = claims.hash_of(Claim(Purpose.STEP, iteration=data.draw(st.integers(1, 2**31))))
    elif field == "norm":
        factor = data.draw(FACTORS)
    elif field:
        other = state._replace(**{field: getattr(data.draw(STATES), field)})
    odd = data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    found = data.draw(st.lists(FOUND, min_size=size, max_size=size))
    sent = [
        claims.pack_numbers(other, words, each, norm * factor)
        if rank in odd
        else claims.pack_numbers(state, WORDS, each, norm)
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
    base = Claim(Purpose.STEP, kind="SGD")
    others = [base._replace(call=call) for call in Purpose]
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
    # It tells, hears nothing, and says what it knows: the scales, and its own claim.
    assert type(first) is gradscale.ScaleDesyncError
    assert "scale from 4.0 to 8.0 (here 8.0); what this rank holds is call=" in str(first)
    assert "Call set_group() with another group, too, since some rank has not told its own in time" in str(first)
    assert isinstance(first.__cause__, TimeoutError)
    assert second is first


def test_the_group_of_a_wait_that_ended_waits_for_as_long_as_before():
    def rank(group: ThreadCollectives):
        with group.within(0.1), pytest.raises(gradscale.CollectiveTimeoutError, match=r"0.1 s"):
            group.start_max(np.zeros(1, np.int32))()
        with group.within(60.0), pytest.raises(gradscale.CollectiveTimeoutError, match=r"0.2 s"):
            group.start_max(np.zeros(1, np.int32))()

    run_ranks(2, lambda group: rank(group) if group.rank else None, timeout=0.2)


def told(**values):
    own = claims.pack_numbers(ScaleState(4.0, 0, 0, 0), WORDS, claims.Flags())
    return claims.claimed(own, Claim(Purpose.STEP)._replace(**values), "DynamicScale()")


def test_a_difference_of_many_ranks_and_values_is_cut_and_begins_with_what_others_follow_from():
    text = difference({(rank,): told(optimizer=rank % 10) for rank in range(200)})
    assert text.startswith("optimizer: 0 on rank 0, 10, 20, 30, 40, 50, 60, 70 and 12 others | 1 on rank 1, ")
    assert ("7 on rank 7" in text, "8 on rank 8" in text) == (True, False)
    assert " | and 2 other values (numbered in the order" in text
    fields = [name for name in Claim._fields if name not in ("call", "settings", "kind")]
    each = {
        (rank,): told(**dict.fromkeys(fields, 10**9 + rank), kind=f"named {'a' * 500 + str(rank)!r}")
        | dict.fromkeys(ScaleState._fields, 2.0**rank)
        | {"settings": [rank, f"Policy({', '.join(f'setting{k}={rank + k}' for k in range(50))})"]}
        for rank in range(256)
    }
    text = difference(each)
    assert len(textwrap.wrap(text, 120)) <= 17
    assert text.endswith(
        "; and also iteration, message, optimizer, scaler, group, settings, steps, max_norm, checksum, kind"
    )
    # Of ranks at other calls it is told where they are, and nothing that follows from it.
    text = difference({(0,): told(max_norm=1.0, message=1), (1,): told(call=Purpose.DIAGNOSIS, kind="Tree")})
    assert [part.partition(":")[0] for part in text.split("; ")] == ["the call itself", "call of the iteration"]
    # Of settings the words that differ.
    texts = [f"DynamicScale(init_scale=4.0{more}), diagnose=False" for more in (", growth_interval=7", "")]
    held = {(rank, 1): told() | {"settings": [number, texts[number]]} for rank, number in enumerate((0, 1, 1))}
    assert difference(held) == f"settings: growth_interval=7 on rank 0/1 | {texts[1]} on rank 1/1, 2/1"
    # Ranks may write one policy in several ways.
    assert not difference({(rank,): told() | {"settings": [7, f"<Policy at {rank}>"]} for rank in range(3)})


@pytest.mark.parametrize(
    ("is_named", "held"), [(True, "named 'critic'"), (False, "Grouped with 2 param_groups")], ids=["name", "parameters"]
)
def test_an_optimizer_that_gains_parameters_or_a_name_on_one_rank_alone_is_a_difference(is_named: bool, held: str):
    def rank(group: ThreadCollectives):
        scaler, optimizer = ShardedGradScaler(group=group, init_scale=1.0, timeout=5.0), Grouped([np.ones(1)])
        scaler.scale(np.float32(1.0))
        scaler.step(optimizer)
        scaler.update()
        scaler.scale(np.float32(1.0))
        if group.rank == 0 and is_named:
            scaler.name(optimizer, "critic")
        elif group.rank == 0:
            optimizer.param_groups.append({"params": [Parameter(np.ones(1))]})
        said = f"name: {held} on rank 0 | Grouped with 1 param_groups on rank 1"
        raised(gradscale.ScaleDesyncError, lambda: scaler.step(optimizer), said)

    run_ranks(2, rank)


class Noting(Alone):
    """Notes that somebody waits for its ranks."""

    def __init__(self, waited: list[Any]):
        self.waited = waited

    def start_max(self, x: np.ndarray, /):
        finish = functools.partial(np.copy, x)
        vars(finish)["wait"] = functools.partial(self.waited.append, self)
        return finish


def test_a_read_waits_for_the_ranks_of_each_group_of_a_list():
    waited: list[Any] = []
    groups = [Noting(waited), Noting(waited)]
    step = Step(groups, 4.0)
    waited.clear()
    step.scaler.step(step.one)
    assert waited[-2:] == groups


@given(data=st.data(), state=STATES, values=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=8, max_size=8))
def test_a_message_that_carries_values_is_taken_for_no_other(data, state, values: list[int]):
    carrying = claims.pack_values(WORDS, values)
    drawn = data.draw(st.lists(st.integers(-(2**31) + 1, 2**31 - 1), min_size=claims.LENGTH, max_size=claims.LENGTH))
    for other, expected in (
        (claims.pack_numbers(state, WORDS, claims.Flags()), Outcome.DIFFERENT),
        (claims.details_message(), Outcome.DETAILS),
        (claims.pack_failure(WORDS, 1), Outcome.FAILED),
        (claims.pack_values(claims.hash_of(Claim(Purpose.NORM)), values), Outcome.DIFFERENT),
        (drawn, None),
    ):
        agreed = maximum([carrying, other])
        found = claims.outcome(agreed, carrying)
        assert found is not Outcome.ONE_STATE
        assert expected in (None, found)
        assert expected is None or claims.outcome(agreed, other) is not Outcome.ONE_STATE
        assert claims.spread_of(agreed, other) == [] or expected is None


# What a policy is to other processes.


class Slope(enum.Enum):
    """A setting that is one of a few."""

    FLAT = 0
    STEEP = 1


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What a setting may hold."""

    kind: Any = Slope.FLAT
    names: Any = ("embedding", "head", "norm", "bias", "router")


@dataclasses.dataclass(frozen=True)
class Own(gradscale.DynamicScale):
    """A policy with one setting more."""

    setting: Any = None
    log: Any = dataclasses.field(default_factory=list, compare=False)


def by_name():
    """Return settings, no two of which are equal, made anew."""
    return {
        "fraction": 0.1,
        "complex": 2j,
        "text": "2",
        "bytes": b"2",
        "tuple": (1, 2.5, None),
        "nested": ((1,), (2.5, None)),
        "enumeration": Slope.STEEP,
        "class": Schedule,
        "NumPy's class": np.float32,
        "class of the same name": type("float32", (), {}),
        "dataclass": Schedule(),
        "other dataclass": Schedule(Slope.STEEP),
        # No two tuples run together.
        **{str(one): one for one in [(1, 23), (12, 3), ("1", 23), ((1, 23),), (1, (23,)), ("ab", "c"), ("a", "bc")]},
        **{str(one): one for one in [("a', 'bc",), ()]},
    }


def made(setting, **settings) -> Own:
    """Return a policy with a setting."""
    return Own(setting=setting, log=[object()], **settings)


def test_settings_are_told_apart_and_equal_ones_are_not_in_any_process():
    found = {name: claims.settings_hash(made(setting)) for name, setting in by_name().items()}
    assert len(set(found.values())) == len(found), found
    assert claims.settings_hash(made(None, growth_interval=5)) != claims.settings_hash(made(None, growth_interval=6))
    assert claims.settings_hash(gradscale.DynamicScale()) != claims.settings_hash(gradscale.StaticScale())
    # Neither the hash seed nor addresses make a difference.
    program = "import json, runpy, sys; t = runpy.run_path(sys.argv[1], None, sys.argv[2])"
    program += "; print(json.dumps({k: t['claims'].settings_hash(t['made'](x)) for k, x in t['by_name']().items()}))"
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    printed = subprocess.check_output([sys.executable, "-c", program, __file__, __name__], env=environment, text=True)
    assert json.loads(printed) == found
    for equal in ((0.5, np.float32(0.5), Fraction(1, 2)), (2, 2.0, 2 + 0j, np.int64(2)), (1, True), (0.0, -0.0)):
        assert len({claims.settings_hash(made(one)) for one in equal}) == 1, equal


def test_a_kind_of_the_program_is_one_setting_in_a_process_that_it_has_spawned():
    """Its module is ``__main__`` here, and ``__mp_main__`` there."""
    found = {}
    for module in ("__main__", "__mp_main__", "elsewhere"):
        kind, other = enum.Enum("Kind", "A B", module=module), type("Kind", (), {"__module__": module})
        settings = {"enumeration": kind.A, "class": other, "nested": ((other, kind.A), Schedule(kind.A))}
        found[module] = {name: claims.settings_hash(made(setting)) for name, setting in settings.items()}
    assert found["__main__"] == found["__mp_main__"]
    assert not {*found["__main__"].values()} & {*found["elsewhere"].values()}


def endless():
    """Return a setting that holds itself."""
    found = Schedule()
    object.__setattr__(found, "kind", (found,))
    return found


MUST = r"the policy Own\.setting must be"
REFUSED: dict[str, tuple[Any, str]] = {
    "object": (object(), MUST),
    "in a tuple": ((1, object()), r"Own\.setting\[1\] must be"),
    "in a dataclass": (Schedule(object()), r"Own\.setting\.kind must be"),
    "lambda": (lambda step: step, f"{MUST} .* make it a number, text, bytes, an"),
    "list": ([1], MUST),
    "array": (np.zeros(2), MUST),
    "dataclass that is not frozen": (dataclasses.make_dataclass("Changeable", [("factor", float)])(1.0), MUST),
    "endless": (endless(), "holds itself"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_value_in_another_process_is_refused_by_its_name(name: str):
    setting, named = REFUSED[name]
    for construct in (
        lambda group: gradscale.ShardedGradScaler(group=group, policy=made(setting)),
        lambda group: gradscale.GroupAgreement(group, made(setting)),
    ):
        with pytest.raises(gradscale.InvalidTypeError, match=named):
            run_ranks(1, construct)
    # A process alone compares it with nobody's.
    gradscale.GradScaler(policy=made(setting))
