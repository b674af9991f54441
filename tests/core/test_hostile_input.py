"""What a user passes, whatever it does when it is read: a GradscaleError that says what was wrong, or success.

Nothing is changed by an error. Every entrance is tried with each hostile value, and with what a fuzz draws, as often as
``GRADSCALE_TEST_EXAMPLES=2000`` says. The cases with names are those that once came out as something else.
"""

import dataclasses
import functools
import math
import os
import pickle
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import pytest
from axes import require
from hostile import HOSTILE, HUGE, Raising, changed, deep, holding_itself, made, trees, values
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
OPTIONS = ["policy", "enabled", "backend", "on_skip", "on_update", "diagnose", "history_size", "init_scale"]
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


def keeps_its_state(scaler: GradScaler, _: object = None):
    """Assert that a used scaler has changed in nothing."""
    assert pickle.dumps(scaler.state_dict()) == pickle.dumps(SAVED)


def can_be_used(_: GradScaler, made_one: GradScaler):
    assert made_one.state_dict() is not None


def never(*_: object):
    pytest.fail("it was not refused")


def comes_back(scaler: GradScaler, _: object):
    """Assert that what was loaded is loaded again as it is."""
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
    """A call with a scaler and a value, what holds if it is made, and what the fuzz draws for it."""

    call: Callable[[GradScaler, Any], Any]
    then: Callable[[GradScaler, Any], None] = lambda *_: None
    drawn: st.SearchStrategy[Any] | None = None
    said: str = ""  # by a refusal


def each(what: str, names: Iterable[Any], call: Callable[..., Any], *more) -> dict[str, Entrance]:
    """Return an entrance for each name, which the call is given first."""
    return {f"{what} {name}": Entrance(functools.partial(call, name), *more) for name in names}


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


def clip(scaler: GradScaler, max_norm):
    """Unscale and clip; a refusal leaves the gradients alone."""
    optimizer = Tree([scaler.scale(np.ones(2, np.float32)) / scaler.get_scale()])
    try:
        scaler.unscale_(optimizer, max_norm=max_norm)
    except GradscaleError:
        assert optimizer.grads[0][0] == 1.0
        raise
    assert optimizer.grads[0][0] != 1.0


def unscale_begun(place: str, scaler: GradScaler, value):
    scaler.scale(np.float32(1.0))
    scaler.unscale_(PLACES[place](value))


def with_groups(groups) -> Grouped:
    """Return an optimizer with these ``param_groups``."""
    optimizer = Grouped([np.ones(1, np.float32)])
    optimizer.param_groups = groups
    return optimizer


# Where a value may stand: in an optimizer, and in outputs.
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
    "names": lambda value: used().diagnose(Tree([np.ones(1, np.float32)]), value),
    "weights": lambda value: used().diagnose(Tree([np.ones(1, np.float32)]), params=value),
    "optimizer state": lambda value: used().diagnose(Tree([np.ones(1, np.float32)]), state=value),
    "recorded": simulation.recorded,
    "Gradients": simulation.Gradients,
    "preset": presets.named,
    "policy": lambda value: simulation.simulate(value, "CO"),
    "steps": lambda value: simulation.simulate(DynamicScale(growth_interval=2), value),
    "name": lambda value: simulation.simulate(DynamicScale(), "CO", name=value),
    "one of gradients": lambda value: simulation.Gradients([1.0, value]),
    "preset growth_factor": lambda value: presets.named("torch", growth_factor=value),
}
IN_FOREIGN: dict[str, Callable[[Any], Any]] = {
    "system": lambda value: gradscale.load_foreign_state(FOREIGN[0], value),
    "loss_id": lambda value: gradscale.load_foreign_state(FOREIGN[4], loss_id=value),
    "min_scale": lambda value: gradscale.load_foreign_state(FOREIGN[0], min_scale=value),
    **{
        f"{number} {shown(key)}": lambda value, state=state, key=key: gradscale.load_foreign_state(
            {**state, key: value}
        )
        for number, state in enumerate(FOREIGN)
        for key in [*state, HUGE]
    },
}
SETTERS = ["set_growth_factor", "set_backoff_factor", "set_growth_interval"]
ENTRANCES = {
    **{
        f"setting {name}": Entrance(
            lambda _, value, name=name: DynamicScale(**{name: value}), keeps_scales_finite, values(), name
        )
        for name in SETTINGS
    },
    **each("state", SAVED, lambda key, scaler, value: scaler.load_state_dict({**SAVED, key: value}), comes_back),
    **each(
        "state policy",
        SAVED["policy"],
        lambda key, scaler, value: scaler.load_state_dict({**SAVED, "policy": {**SAVED["policy"], key: value}}),
        comes_back,
    ),
    **each("setter", SETTERS, lambda name, scaler, value: getattr(scaler, name)(value), comes_back, values()),
    "update": Entrance(lambda scaler, value: (scaler.scale(np.float32(1.0)), scaler.update(value)), drawn=values()),
    "max_norm": Entrance(clip, drawn=values()),
    **each("option", OPTIONS, lambda name, _, value: GradScaler(**{name: value}), can_be_used),
    "timeout": Entrance(
        lambda _, value: gradscale.ShardedGradScaler(group=GROUP, timeout=value), can_be_used, said="timeout must be"
    ),
    "state dict": Entrance(lambda scaler, state: scaler.load_state_dict(state), never),
    "timeout of a group": Entrance(lambda _, value: gradscale.GroupAgreement(GROUP, value)),
    "group": Entrance(lambda _, value: gradscale.ShardedGradScaler(group=value), can_be_used, values()),
    **each("optimizer", PLACES, unscale_begun, keeps_its_state, trees()),
    **each("output", OUTPUTS, lambda name, scaler, value: scaler.scale(OUTPUTS[name](value)), keeps_its_state, trees()),
    **each("read", READ, lambda name, _, value: READ[name](value), keeps_its_state, values() | trees()),
    "foreign state": Entrance(lambda _, value: gradscale.load_foreign_state(value), never),
    "foreign model": Entrance(lambda _, value: gradscale.load_foreign_state({"model": value}), never),
    **each("foreign", IN_FOREIGN, lambda name, _, value: IN_FOREIGN[name](value), can_be_loaded),
    "log": Entrance(lambda _, value: read_log(value), drawn=values().filter(lambda value: not isinstance(value, int))),
}
FUZZED = {
    **{name: entrance for name, entrance in ENTRANCES.items() if entrance.drawn is not None},
    "state dict's keys": Entrance(lambda scaler, state: scaler.load_state_dict(state), comes_back, changed(SAVED)),
    "state dict's policy": Entrance(
        lambda scaler, policy: scaler.load_state_dict({**SAVED, "policy": policy}), comes_back, changed(SAVED["policy"])
    ),
    "foreign state's keys": Entrance(
        lambda _, state: gradscale.load_foreign_state(state), can_be_loaded, st.sampled_from(FOREIGN).flatmap(changed)
    ),
}


@pytest.mark.parametrize("entrance", ENTRANCES.values(), ids=ENTRANCES)
def test_a_hostile_value_is_taken_or_refused_and_a_refusal_changes_nothing(entrance: Entrance):
    for name in HOSTILE:
        try:
            tried(entrance, HOSTILE[name]())
        except Exception as error:
            error.add_note(f"of the value {name!r}")
            raise


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("entrance", FUZZED.values(), ids=FUZZED)
def test_whatever_is_drawn_is_taken_or_refused_and_a_refusal_changes_nothing(entrance: Entrance):
    number = int(os.environ.get("GRADSCALE_TEST_EXAMPLES", examples(300)))

    @settings(max_examples=number, suppress_health_check=list(HealthCheck))
    @given(entrance.drawn)
    def fuzz(spec):
        tried(entrance, made(spec))

    fuzz()


def test_a_tree_may_be_deep():
    scaler, levels = GradScaler(init_scale=2.0), 500
    scaled = scaler.scale(deep(levels))
    ((path, leaf),) = tree.leaves_with_paths(scaled)
    assert (leaf, path.count("["), tree.flatten(scaled)[0]) == (2.0, levels, [2.0])
    optimizer = Tree(deep(levels, np.full(1, 2.0, np.float32)))
    scaler.unscale_(optimizer)
    assert tree.flatten(optimizer.grads)[0] == [1.0]
    chosen = gradscale.select(np.asarray(True), deep(levels), gradscale.scale(deep(levels), STATE))
    assert tree.flatten(chosen)[0] == [1.0]


class Endless:
    """A container that makes others for ever."""

    def __iter__(self):
        return iter([Endless()])


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


def test_one_container_in_two_places_is_no_tree_that_holds_itself():
    shared = [np.float32(1.0)]
    assert tree.flatten([shared, {"again": shared}])[0] == [1.0, 1.0]


def test_what_is_shown_of_a_value_is_short_and_never_an_error():
    assert shown(HUGE) == f"an integer of {HUGE.bit_length()} bits"
    assert shown([HUGE]) == "a list whose repr raises ValueError"
    assert shown(Raising()) == "a Raising whose repr raises _OddError"
    assert shown("x" * 998) == f"'{'x' * 998}'"
    assert shown("x" * 5000) == f"'{'x' * 999}... (5002 characters)"


def test_numbers_beyond_every_float_keep_their_sign():
    assert validation.magnitude("m", HUGE) == math.inf
    with pytest.raises(InvalidValueError, match="m must be a number from 0 on, got an integer of"):
        validation.magnitude("m", -HUGE)


def test_a_parameter_that_raises_when_it_is_read_is_refused():
    class Odd:
        @property
        def grad(self):
            raise ZeroDivisionError

    with pytest.raises(InvalidTypeError, match="an optimizer cannot be read, got ZeroDivisionError from it") as caught:
        used().step(with_groups([{"params": [Odd()]}]))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.torch
@pytest.mark.tier("ranks")
@pytest.mark.parametrize("kind", ["gradscale", "gradscale_torch"])
def test_a_loss_gradients_or_a_number_without_values_are_refused_and_the_scaler_goes_on(kind: str):
    torch = require("torch")
    import gradscale_torch

    def scaler():
        return GradScaler() if kind == "gradscale" else gradscale_torch.GradScaler("cpu")

    parameter = torch.nn.Parameter(torch.ones(3, device="meta"))
    parameter.grad = torch.ones(3, device="meta")
    with pytest.raises(InvalidTypeError, match="the state cannot be made beside a tensor without values"):
        scaler().scale(torch.ones((), device="meta"))
    one = scaler()
    one.scale(torch.ones(()))
    for call in (one.step, one.unscale_):
        with pytest.raises(InvalidTypeError, match=r"gradients must have values, got 1 of torch\.float32"):
            call(torch.optim.SGD([parameter], lr=0.1))
    with pytest.raises(GradscaleError, match="new_scale"):
        one.update(torch.ones((), device="meta"))
    one.update(1024.0)
    assert one.state_dict()["scale"] == 1024.0
