"""StepGuard: it skips steps as a scaler does, scales nothing, and speaks of no scale."""

import logging
import math
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from libraries import Library
from lives import OF_A_SCALE
from optimizers import Momentum, Tree, iterate_plainly

import gradscale
from gradscale import GradScaler, SkipSpikes, StaticScale, StepGuard
from gradscale.tools.callbacks import LogUpdates

RULE = SkipSpikes(window=8, min_values=4, of="loss")


@pytest.mark.parametrize(
    "name", ["init_scale", "growth_factor", "backoff_factor", "growth_interval", "policy", "min_scale", "device"]
)
def test_settings_of_a_scale_are_refused(name: str):
    said = rf"unexpected keyword arguments \['{name}'\].*a StepGuard multiplies nothing: .* taken by GradScaler$"
    with pytest.raises(gradscale.InvalidTypeError, match=said):
        StepGuard(**{name: 2.0})


def test_other_mistakes_are_those_of_a_scaler():
    with pytest.raises(gradscale.InvalidTypeError, match="did you mean 'give_up_after'"):
        StepGuard(give_up=3)  # type: ignore[call-arg]
    with pytest.raises(gradscale.InvalidTypeError, match=r"takes its options by name, such as group=, got \(2\.0,\)"):
        StepGuard(2.0)  # type: ignore[misc]


def test_a_guard_shows_its_rule():
    assert repr(StepGuard(skip=RULE)).startswith("StepGuard(skip=SkipSpikes(window=8")


def test_a_guard_skips_bad_steps_and_leaves_gradients_as_they_are(arrays: Library):
    guard, optimizer = StepGuard(), Tree()
    for value, reason in ((3.0, "stepped"), (math.nan, "overflow"), (math.inf, "overflow"), (-3.0, "stepped")):
        optimizer.grads = [given := arrays.asarray([value, 1.0])]
        guard.step(optimizer)
        guard.update()
        assert guard.last_step(optimizer).reason == reason
        arrays.assert_array(optimizer.grads[0], [value, 1.0])
        arrays.assert_array(given, [value, 1.0])
    assert (guard.get_scale(), optimizer.steps) == (1.0, 2)


def test_a_guard_keeps_its_scale_of_1():
    guard = StepGuard()
    iterate_plainly(guard, Tree(), 1.0)
    for same in (1, 1.0, np.float32(1.0)):
        guard.update(same)
    with pytest.raises(gradscale.InvalidValueError, match=r"new_scale must be 1 for a guard, .*got 4\.0"):
        guard.update(4.0)
    StepGuard(enabled=False).update(4.0)


def test_a_group_that_cannot_be_joined_leaves_a_guard_that_decides_alone():
    guard, optimizer = StepGuard(), Tree([np.full(1, 4.0, np.float32)])
    with pytest.raises(gradscale.InvalidTypeError):
        guard.set_group("world")
    assert guard.unscale_(optimizer, max_norm=1.0) == 4.0


@pytest.mark.parametrize("is_met", [False, True], ids=["new", "used"])
def test_the_state_of_a_scaler_of_float16_gives_counts_and_windows_and_no_scale(is_met: bool):
    scaler, optimizer = GradScaler(init_scale=1024.0, skip=RULE), Tree()
    for value in (1.0, 1.0, np.inf, 1.0):
        iterate_plainly(scaler, optimizer, value)
    guard, other = StepGuard(skip=RULE), Tree()
    if is_met:
        iterate_plainly(guard, other, 1.0)
    saved = scaler.state_dict()
    guard.load_state_dict(saved)
    held = guard.state_dict()
    assert {name: held[name] for name in ("iteration", "counts", "spikes")} == {
        name: saved[name] for name in ("iteration", "counts", "spikes")
    }
    assert iterate_plainly(guard, other, 3.0, 1.0).reason == "stepped"
    assert (other.grads[0].tolist(), guard.get_scale()) == ([3.0] * 3, 1.0)
    torchs = {"scale": 64.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9, "_growth_tracker": 1}
    guard.load_state_dict(torchs)
    assert guard.get_scale() == 1.0


# Words.


def stalled(guard: GradScaler):
    """Skip every step, for each reason, with NaN in the gradients alone, in the weights and in the state."""
    optimizers = [Momentum(1) for _ in range(3)]
    optimizers[1].weights[0][:] = np.nan
    optimizers[2].of(0)["exp_avg"][:] = np.inf
    for optimizer in [*optimizers, Tree()]:
        for _ in range(60):
            iterate_plainly(guard, optimizer, np.nan)
        iterate_plainly(guard, Tree(), 1.0)
    for _ in range(60):
        guard.refuse(optimizer)
        iterate_plainly(guard, optimizer, 1.0)
    iterate_plainly(guard, Tree(), 1.0)
    for _ in range(60):
        iterate_plainly(guard, optimizer, 1.0, np.inf)


def reports(guard: GradScaler) -> Iterator[str]:
    """Yield the reports on an optimizer for every cause."""
    optimizer = Momentum(1)
    (weight,) = optimizer.weights
    for value in (np.nan, np.inf, 1.0, 0.0, 1e-42):
        weight.grad = np.full(3, value, np.float32)
        for asked in ({}, {"loss": np.float32(np.nan)}, {"state": True}):
            yield str(guard.diagnose(optimizer, **asked))
    weight[0] = np.nan
    yield str(guard.diagnose(optimizer, state=True))
    weight[0], weight.grad = 1.0, None
    yield str(guard.diagnose(optimizer))


@pytest.mark.parametrize("make", [StepGuard, lambda **options: GradScaler(policy=StaticScale(1.0), **options)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_message_speaks_of_a_scale(make, ranks: int, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    log = LogUpdates(summary_every=10)

    def train(group) -> list[str]:
        over = {"skip": SkipSpikes(of="loss", above=9.0), "warn_after": 50, "backend": "numpy"}
        if ranks > 1:
            over["group"] = group
            guard = make(**over) if make is StepGuard else gradscale.ShardedGradScaler(policy=StaticScale(1.0), **over)
        else:
            guard = make(**over, diagnose="on_overflow", on_update=log)
        stalled(guard)
        return [*reports(guard)]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said = [one for rank in gradscale.testing.run_ranks(ranks, train) for one in rank]
    told = [str(one.message) for one in caught]
    assert sum("each step of the last 50 iterations was skipped" in one for one in told) == 6 * ranks
    for words in (
        "Cause: model. The gradient of layer.0 holds NaN; the weights and the state that were searched are finite:",
        "Cause: weights. Weights hold inf or NaN",
        "Cause: optimizer state. The optimizer's state holds inf or NaN",
        "50 for a spike",
        "50 for a refusal",
    ):
        assert any(words in one for one in told), words
    if ranks == 1:
        logged = "\n".join(caplog.messages)
        assert "step skipped, 1 non-finite gradient (inf or NaN): layer.0; the model is at fault\n" in logged
        assert "10 of the last 10 steps skipped (100 %); in all 0 taken, 10 non-finite, 0 spike, 0 refused" in logged
    assert [one for one in [*told, *said, *caplog.messages] if OF_A_SCALE.search(one)] == []


def test_a_scaler_whose_scale_is_1_and_may_change_speaks_of_it():
    scaler, optimizer = GradScaler(init_scale=1.0), Tree()
    optimizer.grads = [scaler.scale(np.float32([np.inf, 1.0]))]
    assert "overflows at scale 1, which amplifies nothing" in str(scaler.diagnose(optimizer))
    optimizer.grads = [np.zeros(200, np.float32)]
    assert "raise the scale" in str(scaler.diagnose(optimizer))
