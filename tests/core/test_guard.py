"""StepGuard: it skips steps as a scaler does, scales nothing, and speaks of no scale."""

from __future__ import annotations

import logging
import pickle
import re
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from libraries import Library
from momentum import Momentum, of
from optimizers import Evaluating, Tree

import gradscale
from gradscale import GradScaler, SkipSpikes, StaticScale, StepGuard
from gradscale.tools.callbacks import LogUpdates

RULE = SkipSpikes(window=8, min_values=4, of="loss")
# The nouns; the names of methods are those of a scaler.
OF_A_SCALE = re.compile(r"\b(scale|scales|scaled)\b(?!\()|overflow", re.IGNORECASE)


def iterate(guard: GradScaler, optimizer, value, loss: float | None = 1.0) -> gradscale.StepReport:
    """Make one iteration with a gradient."""
    if loss is not None:
        guard.scale(np.float32(loss))
    for weight in getattr(optimizer, "weights", ()):
        weight.grad = np.full(3, value, np.float32)
    optimizer.grads = [np.full(3, value, np.float32)]
    guard.step(optimizer)
    guard.update()
    return guard.last_step(optimizer)


def test_steps_that_ranks_have_made_alone_do_not_count_in_a_group():
    def train(group) -> str:
        guard, optimizers = StepGuard(), [Tree(), Tree()]
        for optimizer in optimizers[group.rank :]:
            optimizer.grads = [np.ones(3, np.float32)]
            guard.step(optimizer)
        guard.update()
        guard.set_group(group)
        return iterate(guard, optimizers[1], 1.0).reason

    assert gradscale.testing.run_ranks(2, train) == ["stepped"] * 2


def test_a_loss_comes_back_as_it_is(arrays: Library):
    for guard in (StepGuard(), StepGuard(skip=RULE), GradScaler(policy=StaticScale(1.0))):
        loss = arrays.asarray(3.0)
        assert guard.scale(loss) is loss
    half = np.float16(3.0)
    assert StepGuard().scale(half) is half


@pytest.mark.parametrize("skip", [None, SkipSpikes(of="norm")], ids=["no-rule", "norm"])
def test_a_loop_without_scale_is_right_and_quiet(arrays: Library, skip: SkipSpikes | None):
    guard, optimizer = StepGuard(skip=skip), Tree()
    for value, reason in ((1.0, "stepped"), (np.nan, "overflow"), (1.0, "stepped")):
        optimizer.grads = [arrays.asarray([value])]
        guard.unscale_(optimizer, max_norm=10.0)
        guard.step(optimizer)
        guard.update()
        assert guard.last_step(optimizer).reason == reason
        # Also after a load.
        guard.load_state_dict(guard.state_dict())


def test_a_rule_for_losses_that_is_given_none_says_so():
    with pytest.warns(UserWarning, match="skip= judges loss, and found nothing"):
        iterate(StepGuard(skip=RULE), Tree(), 1.0, loss=None)


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
    with pytest.raises(gradscale.InvalidTypeError, match="group must be"):
        StepGuard(group=3)


def test_a_guard_shows_its_rule():
    assert repr(StepGuard(skip=RULE)).startswith("StepGuard(skip=SkipSpikes(window=8")


@pytest.mark.parametrize("is_met", [False, True], ids=["new", "used"])
def test_the_state_of_a_scaler_of_float16_gives_counts_and_windows_and_no_scale(is_met: bool):
    scaler, optimizer = GradScaler(init_scale=1024.0, skip=RULE), Tree()
    for value in (1.0, 1.0, np.inf, 1.0):
        iterate(scaler, optimizer, value)
    guard, other = StepGuard(skip=RULE), Tree()
    if is_met:
        iterate(guard, other, 1.0)
    saved = scaler.state_dict()
    guard.load_state_dict(saved)
    held = guard.state_dict()
    assert {name: held[name] for name in ("iteration", "counts", "spikes")} == {
        name: saved[name] for name in ("iteration", "counts", "spikes")
    }
    assert iterate(guard, other, 3.0, 1.0).reason == "stepped"
    assert (other.grads[0].tolist(), guard.get_scale()) == ([3.0] * 3, 1.0)
    torchs = {"scale": 64.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9, "_growth_tracker": 1}
    guard.load_state_dict(torchs)
    assert guard.get_scale() == 1.0


@pytest.mark.parametrize("bad", [{}, {"scale": 2.0}, None, {"scale": -1.0}], ids=str)
def test_a_bad_state_changes_nothing(bad):
    guard = StepGuard()
    iterate(guard, Tree(), 1.0)
    before = guard.state_dict()
    with pytest.raises(gradscale.StateDictError):
        guard.load_state_dict(bad if not bad or bad["scale"] > 0 else before | bad)
    assert guard.state_dict() == before


def test_a_disabled_guard_passes_all_through():
    guard, optimizer = StepGuard(enabled=False), Tree()
    assert iterate(guard, optimizer, np.nan).reason == "disabled"
    assert (optimizer.steps, guard.state_dict()) == (1, {})
    guard.load_state_dict(GradScaler().state_dict())


# Words.


def stalled(guard: GradScaler):
    """Skip every step, for each reason, with NaN in the gradients alone, in the weights and in the state."""
    optimizers = [Momentum(1) for _ in range(3)]
    optimizers[1].weights[0][:] = np.nan
    of(optimizers[2], 0)["exp_avg"][:] = np.inf
    for optimizer in [*optimizers, Tree()]:
        for _ in range(60):
            iterate(guard, optimizer, np.nan)
        iterate(guard, Tree(), 1.0)
    for _ in range(60):
        guard.refuse(optimizer)
        iterate(guard, optimizer, 1.0)
    iterate(guard, Tree(), 1.0)
    for _ in range(60):
        iterate(guard, optimizer, 1.0, np.inf)


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


def mistakes(guard: GradScaler) -> Iterator[str]:
    """Yield the errors of a loop that is wrong."""
    optimizer, closure = Tree([np.ones(3, np.float32)]), Evaluating(3)

    def fails():
        raise MemoryError

    def overflows():
        guard.scale(np.float32(1.0))
        closure.grads = [np.full(3, np.nan if closure.seen else 1.0, np.float32)]

    for wrong in (
        guard.update,
        lambda: guard.step(object()),
        lambda: [guard.scale(np.float32(1.0)), guard.update()],
        lambda: guard.step(Tree([None])),
        lambda: [guard.unscale_(optimizer), guard.unscale_(optimizer)],
        lambda: [guard.step(optimizer), guard.step(optimizer)],
        lambda: guard.unscale_(optimizer),
        lambda: guard.refuse(optimizer),
        lambda: [guard.update(), guard.refuse(optimizer), guard.update()],
        lambda: pickle.dumps(guard),
        lambda: [guard.update(1.0), guard.step(closure, overflows)],
        lambda: guard.step(Tree([np.int32([1])])),
        lambda: StepGuard(enabled=False).refuse(optimizer),
        lambda: StepGuard(enabled=False).unscale_(optimizer, max_norm=1.0, norm_over="group"),
        lambda: guard.unscale_(optimizer, norm_over="rank"),
        lambda: guard.load_state_dict({}),
        lambda: guard.last_step(Tree()),
        lambda: [guard.update(1.0), guard.step(closure, fails)],
        lambda: guard.unscale_(closure),
    ):
        with pytest.raises((gradscale.GradscaleError, MemoryError)) as raised:
            wrong()
        yield str(raised.value)


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
        return [*reports(guard), *mistakes(guard)]

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
