"""New scales of each library, policies of users, callbacks that raise, disabled scalers."""

import contextlib
import inspect
import math

import numpy as np
import pytest
from libraries import Library
from optimizers import Tree, iterate

import gradscale
from gradscale import DynamicScale, GradScaler, InvalidValueError, StateDictError, StepGuard, StepReport
from gradscale.scaler.options import CommonOptions
from gradscale.scaler.reports import Reports


def test_the_scale_lives_in_the_library_of_the_first_floating_array(arrays: Library, strict: Library):
    scaler, stranger = GradScaler(), np.asarray(3) if arrays.name.startswith("strict") else strict.asarray(3, "int32")
    assert scaler.scale([stranger, None]) == [stranger, None]
    count, loss = scaler.scale((stranger, arrays.asarray(2.0)))
    assert count is stranger
    arrays.assert_array(loss, 131072.0)


@pytest.mark.parametrize("kind", [gradscale.ScaleUnderflowError, gradscale.TrainingStalledError, KeyboardInterrupt])
def test_a_callback_that_raises_does_not_hide_the_scale_at_its_minimum_or_that_all_give_up(strict: Library, kind):
    is_hidden, gives_up = kind is KeyboardInterrupt, kind is gradscale.TrainingStalledError
    error = KeyboardInterrupt() if is_hidden else OSError("no space left")

    def fail(_):
        raise error

    policy = DynamicScale(init_scale=1.0, min_scale=1.0, at_min="clamp" if gives_up else "raise")
    scaler = GradScaler(policy=policy, on_update=fail, give_up_after=1 if gives_up else None)
    with pytest.raises(kind) as caught:
        iterate(strict, scaler, Tree(), [math.inf])
    if not is_hidden:
        assert (caught.value.__context__, caught.value.__suppress_context__) == (error, False)
        assert caught.value.__notes__ == ["A callback of on_update has failed, too: OSError('no space left')"]
    assert scaler.state_dict()["iteration"] == 2


@pytest.mark.parametrize("raises", [False, True])
def test_a_users_policy_may_tell_by_a_plain_bool_whether_an_overflow_is_raised(arrays: Library, raises: bool):
    mine = type("Mine", (DynamicScale,), {"at_min_scale": lambda *_: raises})
    scaler = GradScaler(policy=mine())
    with pytest.raises(gradscale.ScaleUnderflowError) if raises else contextlib.nullcontext():
        iterate(arrays, scaler, Tree(), [math.inf])
    assert scaler.get_scale() == 32768.0


def test_gradients_of_before_a_load_are_stepped_whatever_trackers_the_loaded_policy_has(arrays: Library):
    scaler, optimizer = GradScaler(growth_interval=4000), Tree()
    scaler.load_state_dict(scaler.state_dict() | {"_growth_tracker": 3999})
    optimizer.grads = [scaler.scale(arrays.asarray([1.0, 2.0]))]
    scaler.load_state_dict(GradScaler(init_scale=8.0, growth_interval=5).state_dict())
    scaler.step(optimizer)
    arrays.assert_array(optimizer.grads[0], [1.0, 2.0])
    report = scaler.last_step(optimizer)
    assert (report.skipped, report.scale) == (False, 65536.0)


def test_a_policy_of_the_users_is_never_replaced():
    class Mine(DynamicScale):
        """A policy of a user's own."""

    scaler = GradScaler(policy=Mine(growth_interval=3))
    with pytest.raises(StateDictError, match=r"holds a DynamicScale, and this scaler's policy is .*leave out the key"):
        scaler.load_state_dict(GradScaler().state_dict())
    saved = GradScaler(init_scale=8.0, growth_interval=5).state_dict()
    del saved["policy"]
    scaler.load_state_dict(saved)
    assert "policy=test_a_policy_of_the_users_is_never_replaced.<locals>.Mine(" in repr(scaler)
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (8.0, 5)


@pytest.mark.parametrize("make", [GradScaler, StepGuard])
def test_a_disabled_scaler_passes_everything_through(arrays: Library, make):
    def never(report):
        raise AssertionError(report)

    scaler = make(enabled=False, on_skip=never, on_update=never)
    loss = [arrays.asarray(2.0), "anything"]
    assert scaler.scale(loss) is loss
    optimizer = Tree([arrays.asarray([math.nan])])
    for _ in range(2):
        scaler.unscale_(optimizer)
    assert scaler.step(optimizer, 1, two=2) == "stepped"
    assert scaler.step(optimizer) == "stepped"
    assert optimizer.calls == [((1,), {"two": 2}), ((), {})]
    arrays.assert_array(optimizer.grads[0], [math.nan])
    scaler.update()
    scaler.update("anything")
    assert scaler.last_step(optimizer) == StepReport(False, 1.0, 0, "disabled", 1, 0)
    assert (scaler.get_scale(), scaler.is_enabled(), scaler.history) == (1.0, False, [])
    scaler.load_state_dict({"anything": 1})
    assert scaler.state_dict() == {}
    for call, said in (
        (lambda: scaler.refuse(optimizer), "a disabled scaler makes every step"),
        (lambda: scaler.unscale_(optimizer, max_norm=1.0, norm_over="group"), "a disabled scaler talks to no group"),
        (lambda: GradScaler(enabled=False, growth_factor=0.5), "growth_factor"),
    ):
        with pytest.raises(InvalidValueError, match=said):
            call()


def test_whoever_wants_reports_has_each_step_read_in_that_step():
    for options in ({"on_skip": print}, {"on_update": print}, {"diagnose": "on_overflow"}, {"give_up_after": 2}):
        assert Reports(vars(CommonOptions(**options))).wants_each_step  # type: ignore[arg-type]
    assert not Reports(vars(CommonOptions())).wants_each_step


@pytest.mark.parametrize("kind", [GradScaler, StepGuard])
def test_the_defaults_that_a_constructor_shows_are_in_force(kind: type[GradScaler]):
    shown = {name: one.default for name, one in inspect.signature(kind).parameters.items()}
    assert len(shown) >= 14
    assert (repr(kind(**shown)), kind(**shown).state_dict()) == (repr(kind()), kind().state_dict())


def test_a_new_scale_is_set_in_spite_of_an_overflow_at_the_minimum(strict: Library):
    scaler = GradScaler(policy=DynamicScale(init_scale=1.0, min_scale=1.0, at_min="raise"))
    scaler.step(Tree([scaler.scale(strict.asarray([math.inf]))]))
    scaler.update(16.0)
    assert scaler.get_scale() == 16.0


def test_a_shorter_interval_takes_a_tracker_above_it_for_one_at_its_end(strict: Library):
    scaler, optimizer = GradScaler(growth_interval=9), Tree()
    for scale, shortens in ((65536.0, False), (65536.0, True), (131072.0, False)):
        iterate(strict, scaler, optimizer)
        if shortens:
            scaler.set_growth_interval(1)
        assert scaler.get_scale() == scale


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_new_scale_may_be_an_array_of_one_element_of_each_library(arrays: Library, shape: tuple[int, ...]):
    scaler = GradScaler()
    for number, dtype in enumerate((*arrays.reals, "int32")):
        scaler.update(arrays.xp.full(shape, 96 + number, dtype=arrays.dtype(dtype)))
        assert scaler.get_scale() == 96.0 + number
    arrays.assert_array(scaler.scale(arrays.asarray(2.0)), 2.0 * (96 + number))
