"""The pure core reads nothing from the device, and modifies nothing: on arrays that raise when they are read."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from libraries import Library
from optimizers import Tree, iterate
from runs import start

import gradscale
from gradscale import BackendError, DynamicScale, GradScaler, presets
from gradscale.core import arithmetic
from gradscale.core.backend import Backend
from gradscale.core.validation import LARGEST_INT32, bits_of_float32
from gradscale.core.vector import FLAGS
from gradscale.scaler.live_state import largest_trackers, numbers_of

READS = ("__bool__", "__float__", "__int__", "__index__", "__complex__", "__array__", "__dlpack__", "__buffer__")


class HostReadError(Exception):
    """A value was read."""


@pytest.fixture
def unreadable(strict: Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that makes strict arrays unreadable from now on."""

    def forbid() -> None:
        kind = type(strict.asarray(1.0))
        for name in READS:
            if hasattr(kind, name):

                def read(*_args: Any, _name: str = name, **_kwargs: Any) -> Any:
                    raise HostReadError(_name)

                monkeypatch.setattr(kind, name, read)

    yield forbid
    monkeypatch.undo()


POLICIES = [
    DynamicScale(),
    DynamicScale(growth_factor=1.5, backoff_factor=0.3, growth_interval=1, growth_after="first_interval_plus_one"),
    DynamicScale(hysteresis=2, hysteresis_refill=("growth", "backoff"), min_scale=2.0, at_min="hold"),
    DynamicScale(tolerance=0.3, max_scale=2.0**20, at_min="raise"),
]


def whole_step(policy: Any, like: Any, grads: Any, dtype: Any) -> tuple[Any, ...]:
    """Return everything that the pure core computes in one step."""
    state = policy.init(like)
    loss = gradscale.scale({"loss": like, "more": [grads[0], None, 3]}, state)
    unscaled, nonfinite = gradscale.unscale(grads, state)
    masters, _ = gradscale.unscale(grads, state, dtype=dtype)
    chosen = gradscale.select(nonfinite == 0, unscaled, grads)
    new = policy.update(state, nonfinite=nonfinite)
    return loss, masters, chosen, new, policy.backoff(new), policy.at_min_scale(new), arithmetic.fingerprint(new)


@pytest.mark.parametrize("policy", POLICIES, ids=["default", "odd", "hysteresis", "tolerance"])
def test_on_strict_arrays(strict: Library, unreadable: Any, policy: DynamicScale) -> None:
    like = strict.asarray(1.0)
    grads = [strict.asarray([1.0, float("nan")], dtype) for dtype in ("float32", "float64", "complex64")]
    unreadable()
    whole_step(policy, like, grads, strict.dtype("float32"))
    with pytest.raises(HostReadError):
        bool(like)


@pytest.mark.parametrize("explicit", [False, True], ids=["before step", "after unscale_"])
def test_the_scaler_reads_only_in_step(strict: Library, unreadable: Any, explicit: bool) -> None:
    class Reading(Backend):
        def read(self, _x: Any, /) -> list[int]:
            raise HostReadError

    scaler, optimizer = GradScaler(backend=Reading()), Tree([strict.asarray([1.0])])
    loss = strict.asarray(1.0)
    unreadable()
    scaler.scale(loss)
    if explicit:
        scaler.unscale_(optimizer)
    with pytest.raises(HostReadError):
        scaler.step(optimizer)
    assert optimizer.steps == 0


@pytest.mark.parametrize("scale", [2.0**-126, 65536.0, 0.1, (2.0 - 2.0**-23) * 2.0**127])
def test_the_fingerprint_holds_the_bits_of_the_scale_and_the_trackers(arrays: Library, scale: float) -> None:
    state = start(arrays, DynamicScale(init_scale=scale), growth_tracker=3, overflow_tracker=2**31 - 1)
    expected = [int(np.float32(scale).view(np.int32)), 3, 2**31 - 1, 0]
    for backend in (Backend(), gradscale.registry.backend_for(state.scale)):
        fingerprint = backend.fingerprint(state)
        arrays.assert_array(fingerprint, expected, "int32")
        values = backend.read(fingerprint)
        assert (values, {type(value) for value in values}) == (expected, {int})


# What is read is believed only where a policy can have made it; else the library is named.

BITS = bits_of_float32(65536.0)


class Misplacing(Backend):
    """Reads a state whose pieces a wrong ``concat`` has put elsewhere, once it is told to."""

    values: list[int] | None = None

    def read(self, x: Any) -> list[int]:
        values = super().read(x)
        if self.values is None:
            return values
        # A verdict's vector holds flags before the numbers of the state.
        before = values[:FLAGS] if len(values) > 4 else []
        return [*before, *self.values, *values[len(before) + 4 :]]


WRONG = {
    "bits in the growth tracker": [BITS, BITS, 0, 0],
    "bits in the overflow tracker": [BITS, 0, BITS, 0],
    "bits in the rescale tracker": [BITS, 0, 0, BITS],
    "zeros": [0, 0, 0, 0],
    "a negative scale": [bits_of_float32(-1.0), 0, 0, 0],
    "an infinite scale": [bits_of_float32(math.inf), 0, 0, 0],
    "nan": [bits_of_float32(math.nan), 0, 0, 0],
    "a negative tracker": [BITS, -1, 0, 0],
    "a tracker beyond its threshold": [BITS, 2001, 0, 0],
}


@pytest.mark.numpy
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("call", ["state_dict", "step"])
def test_a_read_that_no_policy_can_have_made_names_the_library(strict: Library, wrong: list[int], call: str) -> None:
    backend = Misplacing()
    scaler = GradScaler(backend=backend)
    optimizer = Tree()
    iterate(strict, scaler, optimizer)
    before = scaler.state_dict()
    backend.values = wrong
    with pytest.raises(BackendError, match="from array_api_strict that no policy makes, got scale=") as caught:
        scaler.state_dict() if call == "state_dict" else iterate(strict, scaler, optimizer)
    assert optimizer.steps == 1
    assert "growth_tracker 2000, overflow_tracker 0, rescale_tracker 0" in str(caught.value)
    backend.values = None
    if call == "state_dict":
        assert scaler.state_dict() == before
        iterate(strict, scaler, Tree())


@pytest.mark.numpy
def test_what_was_loaded_or_set_may_be_beyond_a_threshold(strict: Library) -> None:
    scaler = GradScaler(growth_interval=5)
    iterate(strict, scaler, Tree())
    saved = scaler.state_dict()
    saved |= {"_growth_tracker": 4000, "_overflow_tracker": 7, "_rescale_tracker": 9}
    scaler.load_state_dict(saved)
    assert scaler.state_dict()["_growth_tracker"] == 4000
    scaler = pickle.loads(pickle.dumps(scaler))
    iterate(strict, scaler, Tree())
    assert scaler.state_dict()["_growth_tracker"] == 0
    assert scaler.state_dict()["_rescale_tracker"] == 9
    scaler = GradScaler(growth_interval=1000)
    for _ in range(8):
        iterate(strict, scaler, Tree())
    scaler.set_growth_interval(2)
    assert scaler.state_dict()["_growth_tracker"] == 8
    iterate(strict, scaler, Tree())
    assert scaler.state_dict()["_growth_tracker"] == 0


@pytest.mark.numpy
@pytest.mark.parametrize("name", presets.names())
def test_no_rule_passes_what_it_says_its_trackers_reach(name: str) -> None:
    policy = presets.named(name, growth_interval=3)
    largest = largest_trackers(policy)
    reached = [0, 0, 0]
    state = policy.init(np.float32(1.0))
    generator = np.random.default_rng(5)
    for bad in generator.random(150) < 0.3:
        state = policy.update(state, nonfinite=np.asarray(int(bad)))
        reached = [max(int(tracker), most) for tracker, most in zip(state[1:], reached, strict=True)]
    assert all(most <= limit for most, limit in zip(reached, largest, strict=True)), (reached, largest)
    assert numbers_of(state, gradscale.registry.backend_for(state.scale), largest)["scale"] == float(state.scale)


def test_a_policy_that_does_not_say_may_use_all_of_int32() -> None:
    class Own:
        pass

    assert largest_trackers(Own()) == (LARGEST_INT32,) * 3  # type: ignore[arg-type]
    assert largest_trackers(DynamicScale(hysteresis=3), [5, 1, 2]) == (2000, 3, 2)
