"""load_foreign_state: what it recognises, what it says was missing, and what it refuses, saying why."""

import contextlib
import io
import itertools
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from libraries import Library

from gradscale import DynamicScale, GradScaler, InvalidTypeError, InvalidValueError, StateDictError, StaticScale
from gradscale.tools.foreign import load_foreign_state

TORCH = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 7, "_growth_tracker": 5}
MEGATRON = {"scale": 4096.0, "growth_tracker": 3, "hysteresis_tracker": 1}
COUNTED = {"cur_scale": 256.0, "cur_iter": 10, "last_overflow_iter": 3}
WINDOW = COUNTED | {"scale_factor": 2.0, "scale_window": 4}
DEEPSPEED = WINDOW | {
    "min_scale": 1,
    "delayed_shift": 2,
    "cur_hysteresis": 1,
    "consecutive_hysteresis": False,
    "raise_error_at_min_scale": True,
    "dynamic": True,
    "dtype": object(),
}
STAGE0 = WINDOW | {"cur_iter": 4_000_010, "last_overflow_iter": 4_000_003, "dynamic_loss_scale": True}
# The dicts that optimizers save hold the scaler itself.
ZERO = {"loss_scaler": SimpleNamespace(**DEEPSPEED), "dynamic_loss_scale": True, "overflow": False, "zero_stage": 2}
APEX = {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 3}}
KERAS = {"dynamic_scale": 32768.0, "step_counter": 1}
FLAX = {"scale": 65536.0, "fin_steps": 4}
JMP = {"loss_scale": 32768.0, "counter": 3, "period": 2000, "factor": 2, "min_loss_scale": 1.0}

FACTORS = {"growth_factor", "backoff_factor"}
OF_APEX = {"growth_interval", "min_scale", "max_scale", "system"}
# The state, its format, its scale, its growth and overflow trackers, and what is not in it.
STATES: dict[str, tuple[Mapping[str, Any], str, float, int, int, set[str]]] = {
    "torch": (TORCH, "torch", 1024.0, 5, 0, set()),
    "nemo": (TORCH | {"_hysteresis_tracker": 1}, "nemo", 1024.0, 5, 0, {"hysteresis"}),
    "megatron": (MEGATRON, "megatron", 4096.0, 3, 1, {*FACTORS, "growth_interval", "hysteresis", "min_scale"}),
    "deepspeed": (DEEPSPEED, "deepspeed", 256.0, 2, 1, set()),
    "deepspeed-after-an-overflow": (DEEPSPEED | {"last_overflow_iter": 9}, "deepspeed", 256.0, 0, 1, set()),
    "deepspeed-stage0": (STAGE0, "deepspeed", 256.0, 2, 0, {"min_scale", "system"}),
    "apex-amp": (APEX, "apex", 512.0, 3, 0, OF_APEX),
    "apex-one": (APEX["loss_scaler0"], "apex", 512.0, 3, 0, OF_APEX),
    "deepspeed-zero": (ZERO, "deepspeed", 256.0, 2, 1, set()),
    "apex-fp16_utils-whole": (ZERO | {"loss_scaler": SimpleNamespace(**WINDOW)}, "apex", 256.0, 2, 0, set()),
    "apex-fp16_utils": (WINDOW, "apex", 256.0, 2, 0, set()),
    "keras": (KERAS, "keras", 32768.0, 1, 0, {"growth_interval"}),
    "flax": (FLAX, "flax", 65536.0, 4, 0, {*FACTORS, "growth_interval", "min_scale"}),
    "jmp": (JMP, "jmp", 32768.0, 3, 0, set()),
}


@pytest.mark.parametrize("name", STATES)
def test_a_format_is_recognised_by_its_keys_and_translated_and_arrays_of_one_element_are_numbers(
    arrays: Library, name: str
):
    def arrayed(value, shape: list[int]):
        if isinstance(value, Mapping):
            return {key: arrayed(inner, shape) for key, inner in value.items()}
        if isinstance(value, bool) or type(value) not in (int, float):
            return value
        return arrays.asarray([value] if shape else value, "int32" if isinstance(value, int) else "float32")

    state, system, scale, growth, overflows, missing = STATES[name]
    before = dict(state)
    for form in (None, system):
        loaded = load_foreign_state(state, form)
        assert loaded.format == system
        scaler = GradScaler()
        scaler.load_state_dict(loaded.state_dict)
        assert scaler.state_dict() == {**loaded.state_dict, "counts": scaler.counts(), "steps": 0}
        saved = [loaded.state_dict[key] for key in ("scale", "_growth_tracker", "_overflow_tracker")]
        assert saved == [scale, growth, overflows]
        assert isinstance(loaded.policy, DynamicScale)
        assert loaded.policy.init_scale == scale
        assert set(loaded.missing) == loaded.assumed.keys() == missing
        assert all(f"{setting} = {value}" in str(loaded) for setting, value in loaded.assumed.items())
        assert f"scale {scale!r}" in str(loaded)
        assert ("assumed" in str(loaded)) is bool(missing)
    for shape in ([], [1]):
        assert load_foreign_state(arrayed(state, shape)) == load_foreign_state(state)
    for key, load in itertools.product(state, (load_foreign_state, GradScaler().load_state_dict)):
        with contextlib.suppress(StateDictError):
            load({name: state[name] for name in state if name != key})
    assert state == before


def test_a_static_scale_stays_static():
    for form in ({"dynamic_loss_scale": False, "cur_iter": 4}, {"dynamic": False}):
        loaded = load_foreign_state(form | {"cur_scale": 128.0})
        assert (loaded.format, loaded.policy, loaded.missing) == ("deepspeed", StaticScale(128.0), ())
        scaler = GradScaler()
        scaler.load_state_dict(loaded.state_dict)
        assert scaler.get_scale() == 128.0


def test_what_is_given_is_not_assumed_and_a_hysteresis_is_that_the_tracker_allows():
    for state, given, settings in (
        (MEGATRON, {"growth_interval": 500, "hysteresis": 4}, (500, 4, 3)),
        (MEGATRON | {"hysteresis_tracker": 5}, {"growth_interval": 9}, (9, 5, 0)),
        (MEGATRON | {"hysteresis_tracker": -3}, {"growth_interval": 9}, (9, 2, 2)),
    ):
        loaded = load_foreign_state(state, **given)
        policy: Any = loaded.policy
        assert (policy.growth_interval, policy.hysteresis, loaded.state_dict["_overflow_tracker"]) == settings
        assert {"growth_factor", "backoff_factor", "min_scale"} == loaded.assumed.keys() - {"hysteresis"}
        assert ("hysteresis" in loaded.assumed) is ("hysteresis" not in given)
        assert "growth_interval =" not in str(loaded)


def test_apex_of_the_old_package_and_deepspeed_are_told_apart_by_the_name():
    deepspeed, apex = load_foreign_state(STAGE0), load_foreign_state(STAGE0, "apex")
    assert "format='apex'" in deepspeed.assumed["system"]
    assert deepspeed.policy.growth_after == "first_interval_plus_one"  # type: ignore[attr-defined]
    assert apex.policy.growth_after == "interval"  # type: ignore[attr-defined]
    # A factor that the system fixes is taken from its state all the same.
    policy = load_foreign_state(DEEPSPEED | {"scale_factor": 4.0}).policy
    assert (policy.growth_factor, policy.backoff_factor) == (4.0, 0.25)


SEVERAL = {f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": i} for i in range(3)}


# What is refused.

REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "empty": ({}, {}, r"no known format, got the keys \[\]"),
    "own": (GradScaler().state_dict(), {}, "gradscale's own.*load_state_dict"),
    "stage0-short": (
        {"dynamic_loss_scale": True, "cur_scale": 2, "cur_iter": 3},
        {},
        "True, and keys of a dynamic scale",
    ),
    "jmp-short": ({"loss_scale": 2.0, "period": 3, "factor": 2}, {}, "no known format.*jmp: loss_scale, counter$"),
    "below-its-own-minimum": (DEEPSPEED | {"cur_scale": 0.5}, {}, "deepspeed state cannot be read: .*min_scale=1.0"),
    "two-formats": (MEGATRON | {"fin_steps": 3}, {}, "no known format.*name|several formats"),
    "several-losses": (SEVERAL, {}, "loss_id= must be.*got None and loss_scaler0, loss_scaler1, loss_scaler2; load"),
    "no-such-loss": (SEVERAL, {"loss_id": 3}, "loss_id= must be.*got 3"),
    "no-losses": (MEGATRON, {"loss_id": 1}, "loss_id= must be.*got 1 and a state without any"),
    "nested": ({"MixedPrecision": TORCH, "epoch": 3}, {}, r"no known format.*'MixedPrecision'.*pass the part"),
    "nan": (TORCH | {"scale": float("nan")}, {}, "torch state cannot be read: scale .*nan"),
    "boolean": (MEGATRON | {"growth_tracker": True}, {}, "growth_tracker .*True"),
    "overflow-to-come": (DEEPSPEED | {"last_overflow_iter": 10}, {}, "last_overflow_iter .*got 10"),
    "static-apex": ({"loss_scale": 2.0, "unskipped": 2000}, {}, "unskipped .*2000 and 2000.*growth_interval="),
    "below-the-assumed-minimum": (MEGATRON | {"scale": 0.5}, {}, "megatron state cannot be read: .*min_scale=1.0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_saying_why(name: str):
    state, settings, message = REFUSED[name]
    with pytest.raises(StateDictError, match=f"(?s){message}"):
        load_foreign_state(state, **settings)


def test_a_wrong_argument_is_named_with_the_nearest():
    for state, settings, message in (
        (MEGATRON, {"format": "megatorn"}, "format must be one of.*got 'megatorn'"),
        (MEGATRON, {"growth_intervall": 4}, "got growth_intervall=4.*did you mean 'growth_interval'"),
        (MEGATRON, {"init_scale": 4.0}, "leaves out growth_factor, .*got init_scale=4.0"),
        (TORCH, {"growth_interval": 4}, "this torch state leaves out no setting, got growth_interval=4"),
    ):
        with pytest.raises(InvalidValueError, match=message) as caught:
            load_foreign_state(state, **settings)
        assert not isinstance(caught.value, StateDictError)


class Untouchable:
    """An object that would betray it if anything were run."""

    def __reduce__(self):
        pytest.fail("it was pickled")

    def __getattr__(self, name: str):
        if name != "read":
            pytest.fail(f"{name} was looked up")
        raise AttributeError(name)


def test_files_are_refused_with_how_to_load_them_safely_and_other_objects_without_a_look():
    for file in ("scaler.pt", Path("scaler.pt"), b"\x80\x04", bytearray(b"\x80"), io.BytesIO(b"\x80\x04")):
        with pytest.raises(InvalidTypeError, match=r"torch\.load\(path, weights_only=True\)"):
            load_foreign_state(file)
    for state in (None, 3.0, [TORCH], GradScaler(), Untouchable()):
        with pytest.raises(InvalidTypeError, match=r"state must be a mapping.*state_dict\(\), or vars\(\)"):
            load_foreign_state(state)
