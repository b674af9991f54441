"""The presets as a user meets them: names, wrong arguments, in a scaler, and what their scales can never become."""

import inspect
import math

import numpy as np
import pytest

from gradscale import DynamicScale, InvalidTypeError, InvalidValueError, presets

LONG = True

ALL = presets.names()
LARGEST = float(np.finfo(np.float32).max)

DEFAULTS = {
    (2.0**16, 2000): "apex apex_hysteresis flax paddle paddle_static torch",
    (2.0**16, 1000): "colossalai deepspeed deepspeed_stage0",
    (2.0**15, 2000): "fairseq jmp keras mpx",
    (2.0**32, 1000): "megatron",
    (2.0**24, 2000): "mindspore",
}


def test_each_preset_has_the_defaults_of_its_system():
    assert sorted(" ".join(DEFAULTS.values()).split()) == ALL
    for defaults, names in DEFAULTS.items():
        for name in names.split():
            rule = presets.named(name)
            assert (rule.init_scale, rule.growth_interval) == defaults
            assert getattr(presets, name)() == rule
    assert presets.torch() == DynamicScale() == DynamicScale(growth_factor=2.0, backoff_factor=0.5, hysteresis=1)


# The least and the greatest scale; whoever has no bounds ends at the last power of two that float32 has.
BOUNDS = {
    (2.0**-126, 2.0**127): "apex_hysteresis colossalai keras paddle torch",
    (2.0**-126, 2.0**24): "apex",
    (2.0**-126, LARGEST): "flax",
    (2.0**-13, 2.0**127): "fairseq",
    (1.0, 2.0**127): "deepspeed deepspeed_stage0 jmp megatron mindspore paddle_static",
    (1.0, 65504.0): "mpx",
}


def test_each_preset_ends_at_the_bounds_of_its_system():
    assert sorted(" ".join(BOUNDS.values()).split()) == ALL
    for bounds, names in BOUNDS.items():
        for name in names.split():
            rule, ends = presets.named(name, growth_interval=1), []
            for overflow in np.int32([[1], [0]]):
                state = rule.init(np.float32(0.0))
                for _ in range(260):
                    state = rule.update(state, nonfinite=overflow.reshape(()))
                ends.append(float(state.scale))
            assert tuple(ends) == bounds, name


def test_an_unknown_name_is_refused_with_the_nearest_and_all_others_and_so_is_a_setting_that_a_preset_has_not():
    for name, said in (("megatrn", "did you mean 'megatron'"), ("Torch", "'torch'"), ("", "mpx")):
        with pytest.raises(InvalidValueError, match=f"got {name!r}.*{said}") as error:
            presets.named(name)
        assert all(known in str(error.value) for known in ALL)
    with pytest.raises(InvalidValueError, match=r"'keras' has no setting hysteresis.* init_scale, growth_interval"):
        presets.named("keras", hysteresis=2)


def test_jmps_numbers_are_taken_and_moved_to_what_they_mean():
    policy = presets.jmp(min_scale=0.0, growth_interval=3.0)
    assert policy == presets.jmp(min_scale=2.0**-126, growth_interval=3)
    assert type(policy.growth_interval) is int
    with pytest.raises(InvalidTypeError, match=r"growth_interval must be an integer .*2\.5"):
        presets.jmp(growth_interval=2.5)


@pytest.mark.parametrize("threshold", [None, 0.5, 1.0, 2.0])
def test_fairseq_stays_at_a_threshold_above_its_minimum_and_else_raises(threshold: float | None):
    rule = presets.fairseq(min_scale=1.0, threshold=threshold)
    assert (rule.min_scale, rule.at_min) == (2.0, "clamp" if threshold == 2.0 else "raise")


@pytest.mark.parametrize("name", ["colossalai", "megatron", "paddle", "paddle_static"])
def test_factors_are_float32_where_the_original_multiplies_by_such(name: str):
    settings = {"init_scale": 2.0**40, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 1}
    policies = presets.named(name, hysteresis=1, **settings), presets.torch(**settings)
    wanted, states = np.float32(2.0**40), [policy.init(np.float32(0.0)) for policy in policies]
    for overflow in np.random.default_rng(3).choice([0, 0, 1], 200).astype(np.int32):
        wanted *= np.float32(0.3 if overflow else 1.7)
        states = [policy.update(one, nonfinite=overflow) for policy, one in zip(policies, states, strict=True)]
        assert states[0].scale == wanted
    assert states[1].scale != wanted, "torch multiplies by float64 numbers"


@pytest.mark.parametrize("name", ALL)
def test_a_wrong_argument_is_refused_by_its_name(name: str):
    # What else DynamicScale refuses is in test_validation.py.
    for setting in inspect.signature(getattr(presets, name)).parameters:
        for value in ("8", -1, math.nan):
            with pytest.raises((InvalidValueError, InvalidTypeError), match=setting):
                presets.named(name, **{setting: value})
