"""The pure core reads nothing from the device, and modifies nothing: on arrays that raise when they are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from libraries import Library
from optimizers import Tree
from runs import start

import gradscale
from gradscale import DynamicScale, GradScaler
from gradscale.core import arithmetic
from gradscale.core.backend import Backend

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
