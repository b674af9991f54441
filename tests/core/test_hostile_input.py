"""What a user passes, whatever it does when it is read: a GradscaleError that says what was wrong, or success.

Nothing is changed by an error. The named cases are those that once came out as something else.
"""

from __future__ import annotations

import copy
import math
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from axes import require
from hostile import HOSTILE, HUGE, Attributes, Lying, Raising, RaisingMapping, deep, holding_itself
from optimizers import Grouped, Parameter, Tree, iterate_plainly

import gradscale
from gradscale import (
    DynamicScale,
    GradscaleError,
    GradScaler,
    InvalidTypeError,
    InvalidValueError,
    StateDictError,
    StaticScale,
    presets,
    tree,
)
from gradscale.core import validation
from gradscale.core.messages import shown
from gradscale.policies import simulation
from gradscale.testing import run_ranks

pytestmark = pytest.mark.numpy

SETTINGS = [
    *("init_scale", "growth_factor", "backoff_factor", "growth_interval", "growth_after", "hysteresis"),
    *("hysteresis_refill", "tolerance", "min_scale", "max_scale", "at_min"),
]


def refused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Assert that a call is refused with an error of ours; return its message."""
    with pytest.raises(GradscaleError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def refusal(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
    """Make a call that may be refused with an error of ours, and with no other; return the message if it was."""
    message = None
    try:
        call(*args, **kwargs)
    except GradscaleError as error:
        message = str(error)
    assert message is None or 0 < len(message) < 10_000
    return message


def allowed(call: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Make a call that may be refused with an error of ours, and with no other; tell whether it was made."""
    return refusal(call, *args, **kwargs) is None


def used() -> GradScaler:
    """Return a scaler that has made a few steps."""
    scaler = GradScaler(init_scale=1024.0, growth_interval=3)
    iterate_plainly(scaler, 4)
    return scaler


def bits(state: dict[str, Any]) -> bytes:
    """Return a state dict as bytes, so that -0.0, NaN and types count."""
    return pickle.dumps(state)


@pytest.mark.parametrize("name", sorted(HOSTILE))
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_is_taken_or_refused_by_name(setting: str, name: str) -> None:
    message = refusal(DynamicScale, **{setting: HOSTILE[name]()})
    assert message is None or setting in message


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_state_dict_with_a_hostile_value_changes_nothing(name: str) -> None:
    scaler = used()
    before = bits(scaler.state_dict())
    fine = scaler.state_dict()
    for key in fine:
        if not allowed(scaler.load_state_dict, {**fine, key: HOSTILE[name]()}):
            assert bits(scaler.state_dict()) == before, key
        scaler.load_state_dict(pickle.loads(before))
    for key in fine["policy"]:
        broken = {**fine, "policy": {**fine["policy"], key: HOSTILE[name]()}}
        if not allowed(scaler.load_state_dict, broken):
            assert bits(scaler.state_dict()) == before, key
        scaler.load_state_dict(pickle.loads(before))
    refused(scaler.load_state_dict, HOSTILE[name]())
    assert bits(scaler.state_dict()) == before


def test_a_huge_integer_in_a_state_dict_is_described() -> None:
    scaler = used()
    for key in ("scale", "growth_factor", "growth_interval", "_growth_tracker", "version", "iteration"):
        with pytest.raises(StateDictError, match=rf"{key} .*got an integer of {HUGE.bit_length()} bits"):
            scaler.load_state_dict({**scaler.state_dict(), key: HUGE})
    with pytest.raises(StateDictError, match=r"keys .* are missing, got .*an integer of"):
        scaler.load_state_dict({HUGE: 1.0})  # type: ignore[dict-item]


def test_an_array_as_the_kind_of_a_policy_is_refused() -> None:
    scaler = used()
    saved = scaler.state_dict()
    saved["policy"]["kind"] = np.array(["DynamicScale", "StaticScale"])
    with pytest.raises(StateDictError, match=r"the kind of the policy must be one of 'DelayedScale', .*got array"):
        scaler.load_state_dict(saved)


def test_a_policy_with_a_setting_that_is_not_known_is_refused_with_those_that_are() -> None:
    scaler = used()
    saved = scaler.state_dict()
    saved["policy"] |= {"warmup": 3}
    with pytest.raises(StateDictError, match=r"does not know, got \['warmup'\]; a DynamicScale has \['init_scale'"):
        scaler.load_state_dict(saved)


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_setter_changes_nothing_when_it_refuses(name: str) -> None:
    scaler = used()
    calls: list[Callable[[Any], Any]] = [
        scaler.set_growth_factor,
        scaler.set_backoff_factor,
        scaler.set_growth_interval,
        scaler.update,
    ]
    before = scaler.state_dict()
    for call in calls:
        if HOSTILE[name]() is None:
            continue
        if not allowed(call, HOSTILE[name]()):
            assert bits(scaler.state_dict()) == bits(before)
        scaler = used()
        calls = [scaler.set_growth_factor, scaler.set_backoff_factor, scaler.set_growth_interval, scaler.update]


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_an_option_of_a_scaler_is_taken_or_refused(name: str) -> None:
    for option in ("policy", "enabled", "backend", "on_skip", "on_update", "diagnose", "history_size", "init_scale"):
        allowed(GradScaler, **{option: HOSTILE[name]()})
    group = run_ranks(1, lambda group: group)[0]
    allowed(gradscale.ShardedGradScaler, group=group, timeout=HOSTILE[name]())
    allowed(gradscale.ShardedGradScaler, group=HOSTILE[name]())
    allowed(gradscale.GroupAgreement, group, HOSTILE[name]())


@pytest.mark.parametrize("bad", [np.array([1.0, 2.0]), HUGE, Raising(), Lying(), "1", None, math.nan], ids=shown)
def test_a_timeout_that_is_no_number_is_refused(bad: Any) -> None:
    group = run_ranks(1, lambda group: group)[0]
    with pytest.raises((InvalidTypeError, InvalidValueError), match=r"timeout must be a finite number above 0, got"):
        gradscale.ShardedGradScaler(group=group, timeout=bad)


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_gradients_of_any_kind_are_taken_or_refused(name: str) -> None:
    scaler = used()
    before = bits(scaler.state_dict())
    made = HOSTILE[name]
    optimizers: list[Any] = [Tree(made()), Tree([np.ones(1, np.float32), made()]), Grouped([made()]), made()]
    grouped = Grouped([np.ones(1, np.float32)])
    grouped.param_groups = made()
    params = Grouped([np.ones(1, np.float32)])
    params.param_groups = [{"params": made()}]
    group = Grouped([np.ones(1, np.float32)])
    group.param_groups = [made()]
    for optimizer in [*optimizers, grouped, params, group]:
        with np.errstate(all="ignore"):
            is_taken = allowed(scaler.unscale_, optimizer)
        assert bits(scaler.state_dict()) == before
        if is_taken:
            scaler = used()


@pytest.mark.parametrize("bad", [None, 3, "ab", Raising(), Attributes(), object()], ids=lambda bad: type(bad).__name__)
def test_param_groups_that_are_none_are_refused_with_what_they_should_be(bad: Any) -> None:
    scaler = used()
    optimizer = Grouped([np.ones(1, np.float32)])
    optimizer.param_groups = bad
    assert "param_groups" in refused(scaler.step, optimizer) or isinstance(bad, (Raising, Attributes))
    optimizer.param_groups = [{"params": bad}]
    refused(scaler.step, optimizer)
    assert optimizer.steps == 0


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_outputs_of_any_kind_are_scaled_or_refused(name: str) -> None:
    scaler = used()
    before = bits(scaler.state_dict())
    for outputs in (HOSTILE[name](), [HOSTILE[name]()], {"a": np.float32(1.0), "b": (HOSTILE[name](),)}):
        allowed(scaler.scale, outputs)
        assert bits(scaler.state_dict()) == before


def test_a_tree_may_be_deeper_than_python_recurses() -> None:
    scaler = GradScaler(init_scale=2.0)
    for levels in (900, 5000):
        scaled = scaler.scale(deep(levels))
        (leaf,), _ = tree.flatten(scaled)
        assert leaf == 2.0
        ((path, again),) = tree.leaves_with_paths(scaled)
        assert again is leaf
        assert path.count("[") == levels
        optimizer = Tree(deep(levels, np.full(1, 2.0, np.float32)))
        scaler.unscale_(optimizer)
        (gradient,), _ = tree.flatten(optimizer.grads)
        assert gradient == 1.0
        scaler.update()
        state = DynamicScale(init_scale=2.0).init(np.float32(1.0))
        chosen = gradscale.select(np.asarray(True), deep(levels), gradscale.scale(deep(levels), state))
        assert tree.flatten(chosen)[0] == [1.0]


@pytest.mark.parametrize("given", [holding_itself(), (holding_itself(),)], ids=["a list", "deeper"])
def test_a_tree_that_holds_itself_is_an_error_that_says_so(given: Any) -> None:
    with pytest.raises(InvalidValueError, match="must have an end, got a list that holds itself"):
        GradScaler().scale(given)
    with pytest.raises(InvalidValueError, match="holds itself"):
        tree.leaves_with_paths(given)
    with pytest.raises(InvalidValueError, match="holds itself"):
        tree.map_leaves(lambda leaf: leaf, given)


def test_one_container_in_two_places_is_no_tree_that_holds_itself() -> None:
    shared = [np.float32(1.0)]
    assert tree.flatten([shared, {"again": shared}])[0] == [1.0, 1.0]


def test_a_container_that_makes_others_for_ever_is_an_error() -> None:
    class Endless:
        def __iter__(self) -> Any:
            return iter([Endless()])

    with pytest.raises(InvalidValueError, match="got a Endless that is below 10000 others"):
        tree.flatten(Endless())


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_foreign_state_with_a_hostile_value_is_read_or_refused(name: str) -> None:
    made = HOSTILE[name]
    states: list[dict[Any, Any]] = [
        {"scale": 1.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 5, "_growth_tracker": 1},
        {"cur_scale": 4.0, "cur_iter": 7, "last_overflow_iter": 2, "cur_hysteresis": 1, "scale_factor": 2.0},
        {"loss_scaler0": {"loss_scale": 4.0, "unskipped": 3}},
        {"loss_scale": 4.0, "counter": 3, "factor": 2, "period": 7},
    ]
    for state in states:
        for key in state:
            allowed(gradscale.load_foreign_state, {**state, key: made()})
        allowed(gradscale.load_foreign_state, state, made())
        allowed(gradscale.load_foreign_state, state, loss_id=made())
        allowed(gradscale.load_foreign_state, state, min_scale=made())
        allowed(gradscale.load_foreign_state, {**state, HUGE: 1})
    refused(gradscale.load_foreign_state, made())
    refused(gradscale.load_foreign_state, {"model": made()})


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_traces_and_presets_are_taken_or_refused(name: str) -> None:
    made = HOSTILE[name]
    for function in (simulation.recorded, simulation.measured, simulation.Gradients, presets.named):
        allowed(function, made())
    allowed(simulation.measured, [1.0, made()])
    allowed(simulation.Gradients, [1.0, made()])
    allowed(simulation.simulate, made(), "CO")
    allowed(simulation.simulate, DynamicScale(), made())
    allowed(simulation.simulate, DynamicScale(), "CO", name=made())
    allowed(presets.named, "torch", growth_factor=made())
    allowed(gradscale.callbacks.read_log, made())


@pytest.mark.parametrize("where", [0, 1, 2])
def test_threads_that_send_unequal_arrays_all_get_an_error(where: int) -> None:
    others = (np.zeros(3, np.int32), np.zeros((1, 2), np.int32), np.zeros(2, np.int64), np.zeros(1, np.int32))

    def rank(group: Any, other: Any) -> None:
        group.start_max(other if group.rank == where else np.zeros(2, np.int32))()

    for other in others:
        results = run_ranks(3, lambda group, other=other: rank(group, other), timeout=5.0, return_exceptions=True)  # type: ignore[misc]
        assert [type(result) for result in results] == [InvalidValueError] * 3
        assert "every rank must send an array of one library, shape and dtype, got" in str(results[0])


def test_threads_send_arrays_alone_and_need_a_function_and_a_timeout() -> None:
    with pytest.raises(InvalidTypeError, match=r"what is reduced must be an array, got \[1\] of type list"):
        run_ranks(1, lambda group: group.start_max([1]))
    with pytest.raises(InvalidTypeError, match="function must be callable, got 3"):
        run_ranks(1, 3)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="timeout must be a finite number above 0, got -1"):
        run_ranks(1, lambda group: group, timeout=-1)
    for seconds in (math.inf, 1e300):
        (result,) = run_ranks(1, lambda group: group.start_max(np.zeros(1, np.int32))(), timeout=seconds)
        assert result == 0
    assert threading.TIMEOUT_MAX < 1e300


@pytest.mark.torch
@pytest.mark.tier("ranks")
def test_a_tensor_without_a_value_is_refused_wherever_a_number_is_wanted() -> None:
    require("torch")
    import torch

    for meta in (torch.zeros((), device="meta"), torch.zeros(2, device="meta"), torch.zeros(0)):
        for setting in SETTINGS:
            assert setting in refused(DynamicScale, **{setting: meta})
        scaler = used()
        before = bits(scaler.state_dict())
        for key in ("scale", "growth_factor", "growth_interval", "_growth_tracker", "version", "iteration"):
            refused(scaler.load_state_dict, {**scaler.state_dict(), key: meta})
        refused(scaler.update, meta)
        refused(scaler.set_growth_interval, meta)
        refused(gradscale.load_foreign_state, {"loss_scale": meta, "unskipped": 3})
        assert bits(scaler.state_dict()) == before


def test_what_is_shown_of_a_value_is_short_and_never_an_error() -> None:
    assert shown(1.5) == "1.5"
    assert shown(HUGE) == f"an integer of {HUGE.bit_length()} bits"
    assert shown([HUGE]) == "a list whose repr raises ValueError"
    assert shown(Raising()) == "a Raising whose repr raises _OddError"
    assert shown("x" * 5000) == f"'{'x' * 999}... (5002 characters)"
    for name in HOSTILE:
        assert len(shown(HOSTILE[name]())) < 1100


def test_numbers_beyond_every_float_keep_their_sign() -> None:
    assert validation.magnitude("m", HUGE) == math.inf
    with pytest.raises(InvalidValueError, match="m must be a number from 0 on, got an integer of"):
        validation.magnitude("m", -HUGE)


def test_a_policy_that_raises_when_it_is_read_is_refused() -> None:
    refused(GradScaler, policy=Attributes())
    refused(GradScaler, policy=RaisingMapping("init"))
    assert GradScaler(policy=StaticScale(2.0)).get_scale() == 2.0


def test_a_parameter_that_raises_when_it_is_read_is_refused() -> None:
    class Odd(Parameter):
        @property
        def grad(self) -> Any:
            raise ZeroDivisionError

        @grad.setter
        def grad(self, value: Any) -> None:
            pass

    optimizer = Grouped([None])
    optimizer.param_groups = [{"params": [Odd()]}]
    with pytest.raises(InvalidTypeError, match="an optimizer cannot be read, got ZeroDivisionError from it") as caught:
        used().step(optimizer)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert copy.copy(optimizer).steps == 0


@pytest.mark.torch
@pytest.mark.tier("ranks")
@pytest.mark.parametrize("kind", ["gradscale", "gradscale_torch"])
def test_a_loss_or_gradients_without_values_are_refused_and_the_scaler_goes_on(kind: str) -> None:
    require("torch")
    import torch

    import gradscale_torch

    def scaler() -> Any:
        return GradScaler() if kind == "gradscale" else gradscale_torch.GradScaler("cpu")

    parameter = torch.nn.Parameter(torch.ones(3, device="meta"))
    parameter.grad = torch.ones(3, device="meta")
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with pytest.raises(InvalidTypeError, match="the state cannot be made beside a tensor without values"):
        scaler().scale(torch.ones((), device="meta"))
    one = scaler()
    one.scale(torch.ones(()))
    for call in (one.step, one.unscale_):
        with pytest.raises(InvalidTypeError, match=r"gradients must have values, got 1 of torch\.float32"):
            call(optimizer)
    one.update()
    assert one.state_dict()["scale"] == 65536.0
    with pytest.raises(InvalidValueError, match="holds itself"):
        one.scale(holding_itself() if kind == "gradscale" else _tensors_that_hold_themselves())


def _tensors_that_hold_themselves() -> list[Any]:
    import torch

    tensors: list[Any] = [torch.ones(())]
    tensors.append(tensors)
    return tensors
