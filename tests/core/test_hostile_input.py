"""What a user passes, whatever it does when it is read: a GradscaleError that says what was wrong, or success.

Nothing is changed by an error. Every entrance is tried with each hostile value, and with what a fuzz draws, as often as
``GRADSCALE_TEST_EXAMPLES=2000`` says. The cases with names are those that once came out as something else.
"""

import dataclasses
import functools
import math
import os
import pickle
import types
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
from axes import require
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optimizers import Grouped, Tree, iterate_plainly
from tiers import examples

import gradscale
from gradscale import DynamicScale, GradscaleError, GradScaler, InvalidTypeError, InvalidValueError, presets, tree
from gradscale.core import validation
from gradscale.errors import shown
from gradscale.testing import run_ranks
from gradscale.tools import simulation
from gradscale.tools.callbacks import read_log

pytestmark = pytest.mark.numpy


# Values.

HUGE = 10**5000
METHODS = ("float", "index", "int", "bool", "len", "iter", "getitem", "contains", "eq", "lt")
METHODS += ("repr", "str", "hash", "array", "call")


class _OddError(Exception):
    """What no library expects, and no text says."""

    def __str__(self) -> str:
        raise ValueError("not even this")


def _raise(*_):
    raise _OddError


def odd(name: str, base: type = object, **methods: Callable[..., Any]):
    """Return a class with these special methods."""
    return type(name, (base,), {f"__{method}__": function for method, function in methods.items()})


# Raise from whatever they are asked, answer it with the wrong kind of thing, or raise at each attribute.
Raising = odd("Raising", **dict.fromkeys(METHODS, _raise))
Lying = odd("Lying", **dict.fromkeys(METHODS, lambda *_: Lying))
Attributes = odd("Attributes", getattr=_raise)
RaisingMapping = odd(
    "RaisingMapping", Mapping, getitem=_raise, iter=lambda _: iter(("scale", "kind", "params")), len=lambda _: 7
)
# Longer than it is, no float when it is asked for one, and equal to everything.
LyingList = odd("LyingList", list, len=lambda _: 5, iter=lambda _: (_raise() if k else 1.0 for k in range(2)))
LyingFloat = odd("LyingFloat", float, float=lambda _: "1.0", lt=_raise, repr=_raise)
LyingText = odd("LyingText", str, eq=lambda *_: True, hash=str.__hash__)


def deep(levels: int, leaf=None):
    """Return a leaf in lists and dicts of so many levels."""
    made = np.float32(1.0) if leaf is None else leaf
    for level in range(levels):
        made = [made] if level % 2 else {"x": made}
    return made


def holding_itself():
    """Return a tree whose dict holds the list that it is in."""
    made: list[Any] = [np.ones(2, np.float32)]
    made.append({"back": made})
    return made


# Made anew for each use: some are arrays, which may be written to.
HOSTILE: dict[str, Callable[[], Any]] = {
    "huge": lambda: HUGE,
    "minus huge": lambda: -HUGE,
    "huge in a list": lambda: [HUGE],
    "huge key": lambda: {HUGE: 1.0},
    "bytes": lambda: b"1",
    "complex": lambda: 1j,
    "fraction": lambda: Fraction(1, 3),
    "object": object,
    "class": lambda: float,
    "function": lambda: deep,
    "array": lambda: np.array([1.0, 2.0]),
    "array of text": lambda: np.array(["interval", "growth"]),
    "0-d array": lambda: np.array(3),
    "empty array": lambda: np.array([]),
    "array of objects": lambda: np.array([object(), None], dtype=object),
    "array of complex": lambda: np.complex64(1),
    "raising": Raising,
    "lying": Lying,
    "no attributes": Attributes,
    "raising mapping": RaisingMapping,
    "lying list": lambda: LyingList([1, 2]),
    "lying float": lambda: LyingFloat(2.0),
    "lying text": lambda: LyingText("interval"),
    "namespace": lambda: types.SimpleNamespace(shape=None, dtype="float32"),
    "shape of nonsense": lambda: types.SimpleNamespace(shape="ab", dtype=Raising(), grad=1),
    "raising iterator": lambda: (_raise() for _ in range(2)),
    "holding itself": holding_itself,
    "very deep": lambda: deep(3000),
}


class Named(NamedTuple):
    """Stands for a hostile object, which Hypothesis could not print."""

    name: str


def made(spec):
    """Return what a strategy has drawn with the hostile objects in their places."""
    if isinstance(spec, Named):
        return HOSTILE[spec.name]()
    if type(spec) is dict:
        return {key: made(value) for key, value in spec.items()}
    return [*map(made, spec)] if type(spec) is list else spec


# Values that are fine, nearly fine or hostile, containers of these, and trees of arrays.
LIMITS = [1.0, 2.0, 0.5, 2000, 2**31 - 1, 2**31, 2**63, 2.0**-126, 2.0**127, 65536.0, 10**400]
TEXTS = ["", "interval", "growth", "clean_step", "clamp", "raise", "hold", "DynamicScale", "1"]
LEAVES = st.one_of(
    *(st.integers(-5, 5), st.integers(), st.floats(), st.sampled_from([*LIMITS, *TEXTS]), st.text(max_size=5)),
    *(st.booleans(), st.none(), st.floats(width=32).map(np.float32), st.integers(-5, 5).map(np.int64)),
    st.sampled_from([*map(Named, sorted(HOSTILE))]),
)
KEYS = st.text(max_size=3)
VALUES = LEAVES | st.lists(LEAVES, max_size=3) | st.dictionaries(KEYS, LEAVES, max_size=3)
ARRAYS = st.lists(st.floats(width=32), max_size=3).map(lambda found: np.array(found, np.float32))
ANY = VALUES | st.recursive(
    ARRAYS | ARRAYS | VALUES, lambda below: st.lists(below, max_size=3) | st.dictionaries(KEYS, below, max_size=3)
)


def changed(fine: Mapping[str, Any]):
    """Return a strategy of dicts that are fine but for a few keys, changed or left out."""
    keys = st.sampled_from(sorted(fine))
    replaced = st.dictionaries(keys | KEYS, VALUES, max_size=3)
    return st.builds(lambda new, gone: {**{k: fine[k] for k in fine if k != gone}, **new}, replaced, st.none() | keys)


# Entrances.

SETTINGS = [field.name for field in dataclasses.fields(DynamicScale)]
FOREIGN: list[dict[str, Any]] = [
    {"scale": 1.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 5, "_growth_tracker": 1},
    {"scale": 2.0, "growth_tracker": 1, "hysteresis_tracker": 2},
    {"cur_scale": 4.0, "cur_iter": 7, "last_overflow_iter": 2, "cur_hysteresis": 1, "scale_factor": 2.0},
    {"dynamic_loss_scale": True, "cur_scale": 4.0, "cur_iter": 7, "last_overflow_iter": 2, "scale_window": 3},
    {"loss_scaler0": {"loss_scale": 4.0, "unskipped": 3}, "loss_scaler1": {"loss_scale": 8.0, "unskipped": 1}},
    {"loss_scale": 4.0, "counter": 3, "factor": 2, "period": 7},
    {"dynamic_scale": np.float32(4.0), "step_counter": np.int32(2)},
]
IN_FOREIGN = [(number, key) for number, state in enumerate(FOREIGN) for key in [*state, HUGE]]
OPTIONS = ["policy", "enabled", "backend", "on_skip", "on_update", "diagnose", "history_size", "init_scale"]
SETTERS = ["set_growth_factor", "set_backoff_factor", "set_growth_interval"]
GROUP = run_ranks(1, lambda group: group)[0]
STATE = DynamicScale(init_scale=2.0).init(np.float32(1.0))
# One for all, since what it does with plain numbers is compiled once for each policy.
POLICY = DynamicScale(init_scale=1024.0, growth_interval=3)


def used() -> GradScaler:
    """Return a scaler that has made a few steps."""
    scaler = GradScaler(policy=POLICY)
    for _ in range(4):
        iterate_plainly(scaler, Tree())
    return scaler


SAVED = used().state_dict()


# What holds after a call that was not refused.


def keeps_its_state(scaler: GradScaler, _: object = None):
    assert pickle.dumps(scaler.state_dict()) == pickle.dumps(SAVED)


def can_be_used(_: GradScaler, found: GradScaler):
    assert found.state_dict() is not None


def never(*_: object):
    pytest.fail("it was not refused")


def comes_back(scaler: GradScaler, _: object):
    again = pickle.dumps(scaler.state_dict())
    scaler.load_state_dict(scaler.state_dict())
    assert pickle.dumps(scaler.state_dict()) == again


def keeps_scales_finite(_: GradScaler, policy):
    for overflow in range(4):
        state = policy.init(np.float32(1.0))
        for step in range(4):
            state = policy.update(state, nonfinite=np.asarray(int(step == overflow)))
        assert 0.0 < float(state.scale) < np.inf


def can_be_loaded(_: GradScaler, found):
    GradScaler().load_state_dict(found.state_dict)
    assert str(found)


class Entrance(NamedTuple):
    """A call with a scaler and a value, what holds if it is made, and what a refusal says."""

    call: Callable[[GradScaler, Any], Any]
    then: Callable[[GradScaler, Any], None] = lambda *_: None
    said: str = ""


def each(
    what: str, names: Iterable[Any], call: Callable[..., Any], then: Callable[..., None], *, is_said: bool = False
):
    """Return an entrance for each name, which the call is given first, and a refusal may say."""
    return {
        f"{what} {' '.join(map(shown, name if isinstance(name, tuple) else (name,)))}": Entrance(
            functools.partial(call, name), then, name if is_said else ""
        )
        for name in names
    }


def clip(scaler: GradScaler, max_norm):
    """Unscale and clip; a refusal leaves the gradients alone."""
    optimizer = Tree([scaler.scale(np.ones(2, np.float32)) / scaler.get_scale()])
    try:
        scaler.unscale_(optimizer, max_norm=max_norm)
    except GradscaleError:
        assert optimizer.grads[0][0] == 1.0
        raise
    assert optimizer.grads[0][0] != 1.0


def with_groups(groups) -> Grouped:
    """Return an optimizer with these ``param_groups``."""
    optimizer = Grouped([np.ones(1, np.float32)])
    optimizer.param_groups = groups
    return optimizer


ONE = Tree([np.ones(1, np.float32)])
# Where a value may stand: in an optimizer, in outputs, and where it is only read.
PLACES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda value: value,
    "grads": Tree,
    "one of grads": lambda value: Tree([np.ones(1, np.float32), value]),
    "grad": lambda value: Grouped([value]),
    "param_groups": with_groups,
    "a group": lambda value: with_groups([value]),
    "params": lambda value: with_groups([{"params": value}]),
}
OUTPUTS: dict[str, Callable[[Any], Any]] = {
    "alone": lambda value: value,
    "in a list": lambda value: [value],
    "in a dict": lambda value: {"a": np.float32(1.0), "b": (value,)},
}
READ: dict[str, Callable[[Any], Any]] = {
    "scale": lambda value: gradscale.scale(value, STATE),
    "unscale": lambda value: gradscale.unscale(value, STATE),
    "unscale out": lambda value: gradscale.unscale(value, STATE, out=value),
    "select": lambda value: gradscale.select(np.asarray(True), value, value),
    "leaves": tree.leaves_with_paths,
    "diagnose": lambda value: used().diagnose(value),
    "names": lambda value: used().diagnose(ONE, value),
    "weights": lambda value: used().diagnose(ONE, params=value),
    "optimizer state": lambda value: used().diagnose(ONE, state=value),
    "recorded": simulation.recorded,
    "Gradients": simulation.Gradients,
    "preset": presets.named,
    "policy": lambda value: simulation.simulate(value, "CO"),
    "steps": lambda value: simulation.simulate(DynamicScale(growth_interval=2), value),
    "name": lambda value: simulation.simulate(DynamicScale(), "CO", name=value),
    "one of gradients": lambda value: simulation.Gradients([1.0, value]),
    "preset growth_factor": lambda value: presets.named("torch", growth_factor=value),
    "timeout of a group": lambda value: gradscale.GroupAgreement(GROUP, value),
}


def unscale_begun(place: str, scaler: GradScaler, value):
    scaler.scale(np.float32(1.0))
    scaler.unscale_(PLACES[place](value))


def load_foreign(place: tuple[int, Any], _: GradScaler, value):
    return gradscale.load_foreign_state({**FOREIGN[place[0]], place[1]: value})


def load_policy(key: str, scaler: GradScaler, value):
    scaler.load_state_dict({**SAVED, "policy": {**SAVED["policy"], key: value}})


ENTRANCES = {
    **each("setting", SETTINGS, lambda name, _, x: DynamicScale(**{name: x}), keeps_scales_finite, is_said=True),
    **each("state", SAVED, lambda key, scaler, x: scaler.load_state_dict({**SAVED, key: x}), comes_back),
    **each("state policy", SAVED["policy"], load_policy, comes_back),
    **each("setter", SETTERS, lambda name, scaler, x: getattr(scaler, name)(x), comes_back),
    "update": Entrance(lambda scaler, x: (scaler.scale(np.float32(1.0)), scaler.update(x))),
    "max_norm": Entrance(clip),
    **each("option", OPTIONS, lambda name, _, x: GradScaler(**{name: x}), can_be_used),
    "timeout": Entrance(
        lambda _, x: gradscale.ShardedGradScaler(group=GROUP, timeout=x), can_be_used, "timeout must be"
    ),
    "state dict": Entrance(lambda scaler, x: scaler.load_state_dict(x), never),
    "group": Entrance(lambda _, x: gradscale.ShardedGradScaler(group=x), can_be_used),
    **each("optimizer", PLACES, unscale_begun, keeps_its_state),
    **each("output", OUTPUTS, lambda name, scaler, x: scaler.scale(OUTPUTS[name](x)), keeps_its_state),
    **each("read", READ, lambda name, _, x: READ[name](x), keeps_its_state),
    "foreign state": Entrance(lambda _, x: gradscale.load_foreign_state(x), never),
    "foreign model": Entrance(lambda _, x: gradscale.load_foreign_state({"model": x}), never),
    "foreign system": Entrance(lambda _, x: gradscale.load_foreign_state(FOREIGN[0], x), can_be_loaded),
    "foreign loss_id": Entrance(lambda _, x: gradscale.load_foreign_state(FOREIGN[4], loss_id=x), can_be_loaded),
    "foreign min_scale": Entrance(lambda _, x: gradscale.load_foreign_state(FOREIGN[0], min_scale=x), can_be_loaded),
    **each("foreign", IN_FOREIGN, load_foreign, can_be_loaded),
    # A number would be a file descriptor.
    "log": Entrance(lambda _, x: None if isinstance(x, int) else read_log(x)),
}
FUZZED = dict.fromkeys(ENTRANCES, ANY) | {
    "state dict": changed(SAVED),
    "state dict's policy": changed(SAVED["policy"]).map(lambda policy: {**SAVED, "policy": policy}),
    "foreign state": st.sampled_from(FOREIGN).flatmap(changed),
}
# What the fuzz gives these may be loaded.
LOADED = ENTRANCES | {
    "state dict": ENTRANCES["state dict"]._replace(then=comes_back),
    "state dict's policy": ENTRANCES["state dict"]._replace(then=comes_back),
    "foreign state": ENTRANCES["foreign state"]._replace(then=can_be_loaded),
}


def tried(entrance: Entrance, value):
    """Make a call that may be refused with an error of ours, and with no other; a refusal changes nothing."""
    scaler = used()
    message, found = "", None
    try:
        with np.errstate(all="ignore"):
            found = entrance.call(scaler, value)
    except GradscaleError as error:
        message = str(error)
        assert 0 < len(message) < 20_000
    if not message:
        entrance.then(scaler, found)
        return
    assert entrance.said in message
    keeps_its_state(scaler)
    # It goes on, after the iteration that the call may have begun.
    scaler.update(1024.0)
    iterate_plainly(scaler, Tree())


@pytest.mark.parametrize("entrance", ENTRANCES.values(), ids=ENTRANCES)
def test_a_hostile_value_is_taken_or_refused_and_a_refusal_changes_nothing(entrance: Entrance):
    for name in HOSTILE:
        try:
            tried(entrance, HOSTILE[name]())
        except Exception as error:
            error.add_note(f"of the value {name!r}")
            raise


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("name", FUZZED)
def test_whatever_is_drawn_is_taken_or_refused_and_a_refusal_changes_nothing(name: str):
    number = int(os.environ.get("GRADSCALE_TEST_EXAMPLES", examples(100)))
    fuzz = given(FUZZED[name])(lambda spec: tried(LOADED[name], made(spec)))
    settings(max_examples=number, suppress_health_check=list(HealthCheck))(fuzz)()


def test_a_tree_may_be_deep_and_hold_a_container_twice():
    scaler, levels = GradScaler(init_scale=2.0), 500
    scaled = scaler.scale(deep(levels))
    ((path, leaf),) = tree.leaves_with_paths(scaled)
    assert (leaf, path.count("["), tree.flatten(scaled)[0]) == (2.0, levels, [2.0])
    optimizer = Tree(deep(levels, np.full(1, 2.0, np.float32)))
    scaler.unscale_(optimizer)
    assert tree.flatten(optimizer.grads)[0] == [1.0]
    chosen = gradscale.select(np.asarray(True), deep(levels), gradscale.scale(deep(levels), STATE))
    assert tree.flatten(chosen)[0] == [1.0]
    shared = [np.float32(1.0)]
    assert tree.flatten([shared, {"again": shared}])[0] == [1.0, 1.0]


Endless = odd("Endless", iter=lambda _: iter([Endless()]))
BELOW = r"must have an end, got a (list|dict|Endless) that is below \d{3} others: make it anew from its own leaves"
ITSELF = "must have an end, got a list that holds itself"


@pytest.mark.parametrize(
    ("given", "said"),
    [(deep(5000), BELOW), (Endless(), BELOW), (holding_itself(), ITSELF), ((holding_itself(),), ITSELF)],
    ids=["deep", "endless", "holding itself", "deeper"],
)
def test_a_tree_without_an_end_is_an_error_that_says_so_and_changes_nothing(given, said: str):
    scaler = GradScaler(init_scale=2.0)
    scaler.scale(np.float32(1.0))
    walks: list[Callable[[Any], object]] = [
        *(scaler.scale, tree.leaves_with_paths, lambda given: tree.map_leaves(lambda leaf: leaf, given)),
        lambda given: gradscale.select(np.asarray(True), given, given),
        lambda given: scaler.unscale_(Tree(given)),
    ]
    for walk in walks:
        with pytest.raises(InvalidValueError, match=said):
            walk(given)
    assert scaler.get_scale() == 2.0


def test_what_is_shown_of_a_value_is_short_and_never_an_error():
    for value, text in {
        HUGE: f"an integer of {HUGE.bit_length()} bits",
        (HUGE,): "a tuple whose repr raises ValueError",
        "x" * 998: f"'{'x' * 998}'",
        "x" * 5000: f"'{'x' * 999}... (5002 characters)",
    }.items():
        assert shown(value) == text
    assert shown(Raising()) == "a Raising whose repr raises _OddError"
    # Numbers beyond every float keep their sign.
    assert validation.magnitude("m", HUGE) == math.inf
    with pytest.raises(InvalidValueError, match="m must be a number from 0 on, got an integer of"):
        validation.magnitude("m", -HUGE)


def test_a_parameter_that_raises_when_it_is_read_is_refused():
    kind = type("Odd", (), {"grad": property(lambda _: 1 // 0)})
    with pytest.raises(InvalidTypeError, match="an optimizer cannot be read, got ZeroDivisionError from it") as caught:
        used().step(with_groups([{"params": [kind()]}]))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.torch
@pytest.mark.tier("ranks")
@pytest.mark.parametrize("kind", ["gradscale", "gradscale_torch"])
def test_a_loss_gradients_or_a_number_without_values_are_refused_and_the_scaler_goes_on(kind: str):
    torch = require("torch")
    import gradscale_torch

    make = GradScaler if kind == "gradscale" else functools.partial(gradscale_torch.GradScaler, "cpu")
    parameter, nothing = torch.nn.Parameter(torch.ones(3, device="meta")), torch.ones((), device="meta")
    parameter.grad = torch.ones(3, device="meta")
    with pytest.raises(InvalidTypeError, match="the state cannot be made beside a tensor without values"):
        make().scale(nothing)
    one = make()
    one.scale(torch.ones(()))
    for call in (one.step, one.unscale_):
        with pytest.raises(InvalidTypeError, match=r"gradients must have values, got 1 of torch\.float32"):
            call(torch.optim.SGD([parameter], lr=0.1))
    with pytest.raises(GradscaleError, match="new_scale"):
        one.update(nothing)
    one.update(1024.0)
    assert one.state_dict()["scale"] == 1024.0
