"""Rules of known systems that no setting of DynamicScale expresses; each is a policy, and says why it is one.

Users make them by ``gradscale.presets``. Like DynamicScale they are pure functions of a state, without a host read.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import ClassVar

from array_api_compat import array_namespace, device

from gradscale.core import validation
from gradscale.core.arithmetic import has_float64
from gradscale.core.protocols import Array, ScaleState
from gradscale.policies.dynamic import (
    AtMin,
    BoundedScale,
    is_reached,
    new_state,
    next_count,
    times,
)

__all__ = ["DelayedScale", "GradualScale", "WideningScale"]

# A radix of the packed tracker of WideningScale, and the largest interval that it reaches.
_LEVELS = 32
_LARGEST_INTERVAL = 2**30
_LEVEL_STEPS = (16, 8, 4, 2, 1)
# The ratio that GradualScale remembers, in units that are finer than float32's by 2**5.
_RATIO_UNIT = 2.0**-30


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedScale(BoundedScale):
    """Change the scale one step after the step that asks for it (MXNet).

    A class of its own, because the change that is due is one more thing to remember: the growth tracker stays at the
    interval for a growth that is due, and the overflow tracker is 1 for a backoff.
    """

    @property
    def largest_trackers(self) -> tuple[int, int, int]:
        """The largest growth, overflow and rescale tracker that ``update`` makes of a fresh state."""
        return self.growth_interval, 1, 0

    def next_state(self, xp: ModuleType, state: ScaleState, overflow: Array) -> ScaleState:
        """Return the state after a step."""
        zero, one = xp.zeros_like(state.growth_tracker), xp.full_like(state.growth_tracker, 1)
        lower = state.overflow_tracker != zero
        grow = state.growth_tracker >= xp.full_like(zero, self.growth_interval)
        scale = self.next_scale(xp, state.scale, lower, grow)
        run = xp.where(grow, one, next_count(xp, state.growth_tracker, self.growth_interval))
        return new_state(xp, scale, xp.where(overflow, zero, run), xp.where(overflow, one, zero), zero)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WideningScale(BoundedScale):
    """Let each growth double the growth interval, and each backoff halve it, down to 1 (metaseq).

    A class of its own, because the interval changes. The overflow tracker holds it: 1024 overflows + 32 halvings of
    ``growth_interval`` + the doublings since. The growth tracker counts the clean steps since the last overflow, and
    growth comes when they reach the interval.
    """

    tolerance: float = 0.0

    def checked_settings(self) -> dict[str, object]:
        """Return the checked values of all fields."""
        tolerance = validation.number("tolerance", self.tolerance, at_least=0.0, at_most=1.0)
        return {"tolerance": tolerance} | super().checked_settings()

    @property
    def largest_interval(self) -> int:
        """The largest growth interval that its tracker can count."""
        return _LARGEST_INTERVAL

    def backoff(self, state: ScaleState) -> ScaleState:
        """Return the state with the scale and the interval lowered once, even if the overflow is tolerated."""
        overflow = array_namespace(state.scale).full_like(state.growth_tracker, 1)
        return dataclasses.replace(self, tolerance=0.0).update(state, nonfinite=overflow)

    def next_state(self, xp: ModuleType, state: ScaleState, overflow: Array) -> ScaleState:
        """Return the state after a step."""
        overflows, levels = _split(xp, state.overflow_tracker, _LEVELS * _LEVELS)
        halvings, doublings = _split(xp, levels, _LEVELS)
        interval = self._interval(xp, halvings, doublings)
        zero, one = xp.zeros_like(interval), xp.full_like(interval, 1)

        run = next_count(xp, state.growth_tracker, validation.LARGEST_INT32)
        grow = xp.logical_and(xp.logical_not(overflow), run >= interval)
        lower = xp.logical_and(overflow, is_reached(xp, self.tolerance, overflows, state.rescale_tracker))
        scale = self.next_scale(xp, state.scale, lower, grow)

        # An interval that has been doubled is halved by taking a doubling back, which loses no remainder.
        widens = xp.logical_and(grow, interval <= xp.full_like(interval, _LARGEST_INTERVAL // 2))
        narrows = xp.logical_and(lower, doublings == zero)
        deepest = xp.full_like(halvings, self.growth_interval.bit_length() - 1)
        halvings = xp.where(narrows, xp.minimum(halvings + one, deepest), halvings)
        doublings = xp.where(widens, doublings + one, xp.where(lower, xp.maximum(doublings - one, zero), doublings))
        counted = next_count(xp, overflows, validation.LARGEST_INT32 // _LEVELS**2)
        overflows = xp.where(lower, zero, xp.where(overflow, counted, overflows))
        radix = xp.full_like(zero, _LEVELS)

        steps = next_count(xp, state.rescale_tracker, validation.LARGEST_INT32)
        # A tracker of another policy may be beyond the interval.
        run = xp.where(overflow, zero, xp.where(grow, interval, run))
        return new_state(
            xp,
            scale,
            run,
            (overflows * radix + halvings) * radix + doublings,
            xp.where(xp.logical_or(lower, grow), zero, steps),
        )

    def _interval(self, xp: ModuleType, halvings: Array, doublings: Array) -> Array:
        """Return the interval after so many halvings and then doublings; at most 2**30."""
        interval = xp.full_like(halvings, 1)
        for level in range(self.growth_interval.bit_length()):
            shifted = xp.full_like(halvings, self.growth_interval >> level)
            interval = xp.where(halvings == xp.full_like(halvings, level), shifted, interval)
        for step in _LEVEL_STEPS:
            wide = doublings >= xp.full_like(doublings, step)
            largest = xp.full_like(interval, _LARGEST_INTERVAL >> step)
            interval = xp.where(wide, xp.minimum(interval, largest) * xp.full_like(interval, 1 << step), interval)
            doublings = xp.where(wide, doublings - xp.full_like(doublings, step), doublings)
        return interval


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradualScale(BoundedScale):
    """Grow a little on every clean step, by ``growth_factor`` in ``growth_interval`` steps (Chainer, guided-diffusion).

    A class of its own, because its scale is no product of the factors: m clean steps above a base it is
    ``base * growth_factor**(m/N)``, computed from the base on each step, so that no error adds up and each scale is the
    nearest float32. The growth tracker is m. The rescale tracker holds the base's ratio to the scale, or 0 if the base
    is the scale. The overflow tracker is 1 from the first overflow on. On a device without float64, as JAX's by
    default, each step may add an error of some 2**-23. With ``fast_start`` every clean step until the first overflow
    multiplies by the whole ``growth_factor`` (Chainer).
    """

    fast_start: bool = False

    AT_MIN_CHOICES: ClassVar[tuple[AtMin, ...]] = ("clamp",)
    LARGEST_GROWTH: ClassVar[float] = 2.0

    def checked_settings(self) -> dict[str, object]:
        """Return the checked values of all fields."""
        return {"fast_start": validation.boolean("fast_start", self.fast_start)} | super().checked_settings()

    @property
    def largest_interval(self) -> int:
        """The largest growth interval that its tracker can count."""
        return 2**20

    @property
    def largest_trackers(self) -> tuple[int, int, int]:
        """The largest growth, overflow and rescale tracker that ``update`` makes of a fresh state."""
        # A ratio is at most 1, in its unit.
        return self.growth_interval, 1, 2**30

    def backoff(self, state: ScaleState) -> ScaleState:
        """Return the state after an overflow, each of which backs off."""
        return self.update(state, nonfinite=array_namespace(state.scale).full_like(state.growth_tracker, 1))

    def next_state(self, xp: ModuleType, state: ScaleState, overflow: Array) -> ScaleState:
        """Return the state after a step."""
        zero, one = xp.zeros_like(state.growth_tracker), xp.full_like(state.growth_tracker, 1)
        real = xp.float64 if has_float64(xp, device(state.scale)) else xp.float32
        base, phase = self._recall(xp, state, real)

        fast = xp.logical_and(state.overflow_tracker == zero, xp.full_like(overflow, self.fast_start))
        clean = xp.logical_not(overflow)
        advanced = xp.where(xp.logical_and(clean, xp.logical_not(fast)), phase + one, phase)
        full = advanced >= xp.full_like(zero, self.growth_interval)
        phase = xp.where(full, zero, advanced)
        largest, one_real = xp.full_like(base, self.largest_scale), xp.full_like(base, 1.0)
        grows = xp.logical_or(full, xp.logical_and(clean, fast))
        fits = base <= xp.full_like(base, validation.largest_with_finite_product(self.growth_factor))
        grown = xp.where(fits, times(xp, xp.where(fits, base, one_real), self.growth_factor), largest)
        base = xp.where(overflow, times(xp, base, self.backoff_factor), xp.where(grows, grown, base))

        power = self._power(xp, phase, real)
        wide_base, wide_one = xp.astype(base, real), xp.full_like(power, 1.0)
        # Compared before the product, which float32 might not hold.
        above = wide_base >= xp.full_like(power, self.largest_scale) / power
        exact = xp.where(above, wide_one, wide_base) * power
        below = xp.logical_and(xp.logical_not(above), exact <= xp.full_like(power, self.min_scale))
        bounded = xp.logical_or(above, below)
        bound = xp.where(above, largest, xp.full_like(base, self.min_scale))
        scale = xp.where(bounded, bound, xp.astype(exact, xp.float32))
        phase = xp.where(bounded, zero, phase)

        # Beyond a bound the base is above the scale, and forgotten.
        ratio = xp.minimum(wide_base / xp.astype(scale, real), wide_one) / xp.full_like(power, _RATIO_UNIT)
        ratio = xp.astype(ratio + xp.full_like(power, 0.5), xp.int32)
        seen = xp.where(overflow, one, state.overflow_tracker)
        return new_state(xp, scale, phase, seen, xp.where(phase == zero, zero, ratio))

    def _recall(self, xp: ModuleType, state: ScaleState, real: object) -> tuple[Array, Array]:
        """Return the base, as float32, and the phase."""
        wide = xp.astype(state.scale, real)
        ratio = xp.astype(state.rescale_tracker, real) * xp.full_like(wide, _RATIO_UNIT)
        base = xp.astype(wide * xp.minimum(ratio, xp.full_like(ratio, 1.0)), xp.float32)
        # What a state of another policy, or a fresh one, has in these trackers is no phase.
        known = xp.logical_and(
            state.scale * xp.full_like(base, 0.49) < base,
            state.growth_tracker < xp.full_like(state.growth_tracker, self.growth_interval),
        )
        return xp.where(known, base, state.scale), xp.where(
            known, state.growth_tracker, xp.zeros_like(state.growth_tracker)
        )

    def _power(self, xp: ModuleType, phase: Array, real: object) -> Array:
        """Return ``growth_factor**(phase/growth_interval)``, from the powers of the phase's binary digits."""
        power = xp.astype(xp.full_like(phase, 1), real)
        for digit in reversed(range((self.growth_interval - 1).bit_length())):
            has = phase >= xp.full_like(phase, 1 << digit)
            factor = self.growth_factor ** ((1 << digit) / self.growth_interval)
            power = xp.where(has, power * xp.full_like(power, factor), power)
            phase = xp.where(has, phase - xp.full_like(phase, 1 << digit), phase)
        return power


def _split(xp: ModuleType, x: Array, divisor: int) -> tuple[Array, Array]:
    """Return quotient and remainder of an int32 that is not negative by a power of two."""
    # float32 may round up to the next multiple, never down beyond one.
    real = xp.astype(x, xp.float32)
    quotient = xp.astype(real * xp.full_like(real, 1.0 / divisor), xp.int32)
    rest = x - quotient * xp.full_like(x, divisor)
    high = rest < xp.zeros_like(x)
    one = xp.full_like(x, 1)
    return xp.where(high, quotient - one, quotient), xp.where(high, rest + xp.full_like(x, divisor), rest)
