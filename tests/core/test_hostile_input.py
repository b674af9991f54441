"""What a user passes, whatever it does when it is read: a GradscaleError that says what was wrong, or success.

Nothing is changed by an error. Every entrance is tried with each value. The cases with names are those that once came
out as something else.
"""

import copy
import dataclasses
import functools
import math
import pickle
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
from axes import require
from optimizers import Grouped, Tree, iterate_plainly, with_groups
from tiers import later

import gradscale
from gradscale import DynamicScale, GradscaleError, GradScaler, InvalidTypeError, InvalidValueError, presets, tree
from gradscale.core import validation
from gradscale.errors import short_repr
from gradscale.testing import run_ranks
from gradscale.tools import simulation
from gradscale.tools.callbacks import read_log
from gradscale.tools.foreign import ForeignState, load_foreign_state

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
    "huge in a list": lambda: [HUGE],
    "huge key": lambda: {HUGE: 1.0},
    "complex": lambda: 1j,
    "object": object,
    "class": lambda: float,
    "array": lambda: np.array([1.0, 2.0]),
    "array of text": lambda: np.array(["interval", "growth"]),
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


# Numbers and words that are fine or nearly so.
WORDS = ["", "interval", "growth", "clean_step", "clamp", "raise", "hold", "DynamicScale", "1", "é", True, False, None]
NUMBERS = [1.0, 2.0, 0.5, 2000, 2**31 - 1, 2**31, 2**63, 2.0**-126, 2.0**127, 65536.0, 10**400, 0, -1, -0.5, math.nan]
NUMBERS += [math.inf, 1e39, 1e-40, np.float32(4.0), np.int64(3)]
PLAIN = {short_repr(value): functools.partial(copy.copy, value) for value in [*WORDS, *NUMBERS]}


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


def assert_whole(scaler: GradScaler, found: Any):
    """Assert what holds after a call that was not refused: what is saved can be loaded."""
    saved = scaler.state_dict()
    scaler.load_state_dict(saved)
    assert pickle.dumps(scaler.state_dict()) == pickle.dumps(saved)
    if isinstance(found, GradScaler):
        found.state_dict()
    elif isinstance(found, ForeignState):
        GradScaler().load_state_dict(found.state_dict)
        assert str(found)


Call = Callable[[GradScaler, Any], Any]


def each(what: str, names: Iterable[Any], call: Callable[..., Any]) -> dict[str, Call]:
    """Return a call for each name, which it is given first."""
    return {f"{what} {short_repr(name)}": functools.partial(call, name) for name in names}


ONE = Tree([np.ones(1, np.float32)])
# Where a value may stand: in an optimizer, and where it is only read.
PLACES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda value: value,
    "grads": Tree,
    "one of grads": lambda value: Tree([np.ones(1, np.float32), value]),
    "grad": lambda value: Grouped([value]),
    "param_groups": with_groups,
    "a group": lambda value: with_groups([value]),
    "params": lambda value: with_groups([{"params": value}]),
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


def clip(scaler: GradScaler, max_norm):
    """Unscale and clip; a refusal leaves the gradients alone."""
    optimizer = Tree([scaler.scale(np.ones(2, np.float32)) / scaler.get_scale()])
    try:
        scaler.unscale_(optimizer, max_norm=max_norm)
    except GradscaleError:
        assert optimizer.grads[0][0] == 1.0
        raise
    assert optimizer.grads[0][0] != 1.0


def load_policy(key: str, scaler: GradScaler, value):
    scaler.load_state_dict({**SAVED, "policy": {**SAVED["policy"], key: value}})


ENTRANCES: dict[str, Call] = {
    **each("setting", SETTINGS, lambda name, _, x: DynamicScale(**{name: x})),
    **each("state", SAVED, lambda key, scaler, x: scaler.load_state_dict({**SAVED, key: x})),
    **each("state policy", SAVED["policy"], load_policy),
    **each("setter", SETTERS, lambda name, scaler, x: getattr(scaler, name)(x)),
    "update": lambda scaler, x: (scaler.scale(np.float32(1.0)), scaler.update(x)),
    "max_norm": clip,
    **each("option", OPTIONS, lambda name, _, x: GradScaler(**{name: x})),
    **each("group", ["timeout", "group"], lambda name, _, x: gradscale.ShardedGradScaler(**{"group": GROUP, name: x})),
    "state dict": lambda scaler, x: scaler.load_state_dict(x),
    **each("optimizer", PLACES, unscale_begun),
    "output": lambda scaler, x: scaler.scale(x),
    "one of outputs": lambda scaler, x: scaler.scale({"a": np.float32(1.0), "b": (x,)}),
    **each("read", READ, lambda name, _, x: READ[name](x)),
    "foreign state": lambda _, x: load_foreign_state(x),
    "foreign model": lambda _, x: load_foreign_state({"model": x}),
    "foreign system": lambda _, x: load_foreign_state(FOREIGN[0], x),
    "foreign loss_id": lambda _, x: load_foreign_state(FOREIGN[4], loss_id=x),
    "foreign min_scale": lambda _, x: load_foreign_state(FOREIGN[0], min_scale=x),
    **each("foreign", IN_FOREIGN, lambda at, _, x: load_foreign_state({**FOREIGN[at[0]], at[1]: x})),
    # A number would be a file descriptor.
    "log": lambda _, x: None if isinstance(x, int) else read_log(x),
}


def tried(name: str, value, story: str) -> str:
    """Make a call that may be refused with an error of ours, and with no other; return what the refusal says."""
    scaler, said = used(), ""
    try:
        with np.errstate(all="ignore"):
            found = ENTRANCES[name](scaler, value)
    except GradscaleError as error:
        said = str(error)
    except Exception as error:
        error.add_note(story)
        raise
    if said or not name.startswith(("state", "setter", "update")):
        assert pickle.dumps(scaler.state_dict()) == pickle.dumps(SAVED), story
    if not said:
        assert_whole(scaler, found)
        return said
    assert len(said) < 20_000
    # The name of a setting is said.
    assert name.removeprefix("setting ").strip("'") in said or not name.startswith("setting"), story
    # It goes on, after the iteration that the call may have begun.
    scaler.update(1024.0)
    iterate_plainly(scaler, Tree())
    return said


@pytest.mark.parametrize("values", [HOSTILE, *later("ranks", PLAIN)], ids=["hostile", "plain"])
@pytest.mark.parametrize("name", ENTRANCES)
def test_a_value_is_taken_or_refused_and_a_refusal_changes_nothing(name: str, values: dict[str, Callable[[], Any]]):
    for what, make in values.items():
        assert tried(name, make(), what) or name not in ("state dict", "foreign state", "foreign model"), what


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
        assert short_repr(value) == text
    # Numbers beyond every float keep their sign.
    assert (validation.magnitude("m", HUGE), short_repr(Raising())) == (
        math.inf,
        "a Raising whose repr raises _OddError",
    )
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
