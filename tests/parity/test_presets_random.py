"""The presets beside the installed originals in random runs of 10,000 steps: the same scale after each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from axes import require
from libraries import opened
from numpy.typing import NDArray

from gradscale import presets

pytestmark = pytest.mark.jax

STEPS = 10_000
# Probabilities of an overflow after a clean step, and after an overflow.
CHANCES = {"rare": (0.0005, 0.0005), "frequent": (0.03, 0.03), "bursts": (0.004, 0.7)}
SEEDS = (1, 2, 3)


def overflows(chances: str, seed: int) -> NDArray[np.bool_]:
    """Return which steps overflow."""
    after_clean, after_overflow = CHANCES[chances]
    draws = np.random.default_rng(seed).random(STEPS)
    found = np.zeros(STEPS, bool)
    for step in range(STEPS):
        found[step] = draws[step] < (after_overflow if step and found[step - 1] else after_clean)
    return found


RUNS = [(chances, seed) for chances in CHANCES for seed in SEEDS]


def ours(policy: Any, found: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return the scale after each step of a policy, compiled by JAX with float64."""
    import jax

    def step(state: Any, bad: Any) -> Any:
        state = policy.update(state, nonfinite=bad)
        return state, state.scale

    scales = jax.lax.scan(step, policy.init(jax.numpy.zeros(())), jax.numpy.asarray(found))[1]
    return np.asarray(scales)


def assert_same(got: NDArray[np.float32], wanted: NDArray[np.float32]) -> None:
    """Assert that two runs are equal, and that there was something to compare."""
    assert got.shape == wanted.shape == (STEPS,)
    assert wanted.dtype == np.float32
    assert np.isfinite(wanted).all()
    assert (wanted >= 2.0**-126).all(), "below that the originals leave the range that is kept here"
    assert len(set(wanted.tolist())) > 4
    np.testing.assert_array_equal(got, wanted)


@pytest.fixture(autouse=True)
def _jax() -> Iterator[None]:
    """Let JAX have float64."""
    with opened("jax"):
        yield


SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "short": {"growth_interval": 10, "init_scale": 1024.0},
    "odd": {"growth_interval": 25, "growth_factor": 3.0},
}
# One factor for both directions leaves no other choice to jmp; torch and flax have two.
BACKOFFS = {"defaults": {}, "short": {"backoff_factor": 0.25}, "odd": {"backoff_factor": 0.3}}

Original = tuple[Any, NDArray[np.float32]]
"""The policy that is said to be an original, and the original's scale after each step."""


def of_torch(setting: str, found: NDArray[np.bool_]) -> Original:
    """Give ``update()`` of torch.amp.GradScaler the verdict that ``unscale_`` leaves."""
    torch = require("torch")
    # Short, since without a minimum the original's scale would reach 0.
    settings = {"init_scale": 65536.0} | SETTINGS[setting] | BACKOFFS[setting] | {"growth_interval": 10}
    scaler = torch.amp.GradScaler("cpu", **settings)
    scaler.scale(torch.ones(()))
    verdicts = {False: torch.zeros(()), True: torch.ones(())}
    scales = np.empty(len(found), np.float32)
    for step, bad in enumerate(found.tolist()):
        scaler._per_optimizer_states[0]["found_inf_per_device"] = {torch.device("cpu"): verdicts[bad]}
        scaler.update()
        scales[step] = scaler._scale
    return presets.torch(**settings), scales


def of_jmp(setting: str, found: NDArray[np.bool_]) -> Original:
    jmp = require("jmp")
    from jax import lax
    from jax import numpy as jnp

    policy: Any = presets.jmp(**SETTINGS[setting], min_scale={"short": 2.0**-20}.get(setting, 1.0))

    def step(carry: Any, bad: Any) -> Any:
        # Made anew on each step: its minimum is lost on the way through a compiled loop. The factor is no constant,
        # since the compiler would multiply by its rounded reciprocal where jmp divides.
        scale, counter, factor = carry
        least = jnp.float32(policy.min_scale)
        original = jmp.DynamicLossScale(scale, counter, policy.growth_interval, factor, min_loss_scale=least)
        adjusted: Any = original.adjust(jnp.logical_not(bad))
        return (adjusted.loss_scale, adjusted.counter, factor), adjusted.loss_scale

    first = (jnp.float32(policy.init_scale), jnp.zeros((), jnp.int32), jnp.float32(policy.growth_factor))
    return policy, np.asarray(lax.scan(step, first, jnp.asarray(found))[1])


def of_flax(setting: str, found: NDArray[np.bool_]) -> Original:
    require("flax")
    from flax.training.dynamic_scale import DynamicScale as FlaxScale
    from jax import lax
    from jax import numpy as jnp

    least = {"short": 2.0**-20}.get(setting, 2.0**-126)
    policy: Any = presets.flax(**SETTINGS[setting], **BACKOFFS[setting], min_scale=least)
    factors = {name: getattr(policy, name) for name in ("growth_factor", "backoff_factor", "growth_interval")}

    def step(carry: Any, bad: Any) -> Any:
        scale, clean_steps = carry
        original = FlaxScale(**factors, fin_steps=clean_steps, scale=scale, minimum_scale=policy.min_scale)
        gradient = jnp.where(bad, jnp.inf, 2.0**-126).astype(jnp.float32)
        adjusted, is_finite, _, _ = original.value_and_grad(lambda x: x * gradient)(jnp.float32(1.0))
        return (adjusted.scale, adjusted.fin_steps), (adjusted.scale, is_finite)

    first = (jnp.float32(policy.init_scale), jnp.zeros((), jnp.int32))
    scales, finite = lax.scan(step, first, jnp.asarray(found))[1]
    np.testing.assert_array_equal(np.asarray(finite), ~found)
    return policy, np.asarray(scales)


CASES = [
    # One seed in the first tier, and for torch in all.
    *[
        pytest.param(of_torch, setting, chances, SEEDS[index], marks=pytest.mark.torch)
        for index, setting in enumerate(SETTINGS)
        for chances in CHANCES
    ],
    *[
        pytest.param(of, setting, *run, marks=pytest.mark.tier("quick" if (of, run[1]) == (of_jmp, 1) else "ranks"))
        for of in (of_jmp, of_flax)
        for setting in SETTINGS
        for run in RUNS
    ],
]


@pytest.mark.parametrize(("of", "setting", "chances", "seed"), CASES)
def test_the_scale_is_the_originals_after_each_step_of_a_long_run(
    of: Callable[[str, NDArray[np.bool_]], Original], setting: str, chances: str, seed: int
) -> None:
    found = overflows(chances, seed)
    policy, scales = of(setting, found)
    assert_same(ours(policy, found), scales)


def test_a_wrong_run_does_not_pass() -> None:
    found = overflows("frequent", 1)
    right = ours(presets.jmp(growth_interval=20), found)
    assert_same(right, right)
    for wrong in (presets.flax(growth_interval=20, init_scale=2.0**15), presets.jmp(growth_interval=21)):
        with pytest.raises(AssertionError):
            assert_same(ours(wrong, found), right)
