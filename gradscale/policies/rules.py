"""The rule that no setting of DynamicScale expresses, and why; ``gradscale.presets`` makes it.

Like DynamicScale it is a pure function of a state, without a host read.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import ClassVar

from array_api_compat import array_namespace

from gradscale.core import validation
from gradscale.core.arithmetic import device, has_float64
from gradscale.core.protocols import Array, ScaleState
from gradscale.policies.dynamic import AtMin, BoundedScale, new_state, times

# The ratio that GradualScale remembers, in units that are finer than float32's by 2**5.
_RATIO_UNIT = 2.0**-30


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
    LARGEST_INTERVAL: ClassVar[int] = 2**20
    LARGEST_GROWTH: ClassVar[float] = 2.0

    def checked_settings(self) -> dict[str, object]:
        """Return the checked values of all fields."""
        return {"fast_start": validation.boolean("fast_start", self.fast_start)} | super().checked_settings()

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
        real = xp.float64 if has_float64(xp, device(state.scale)) else xp.float32
        zero, one = xp.zeros_like(state.growth_tracker), xp.full_like(state.growth_tracker, 1)
        is_fast = xp.logical_and(state.overflow_tracker == zero, xp.full_like(overflow, self.fast_start))
        base, phase = self._recall(xp, state, is_fast, real)
        base = xp.astype(xp.where(overflow, times(xp, base, self.backoff_factor), base), real)
        whole = xp.full_like(phase, self.growth_interval)
        phase = xp.where(overflow, phase, xp.where(is_fast, whole, phase + one))

        power = self._power(xp, phase, real)
        one_real, largest = xp.full_like(power, 1.0), xp.full_like(power, self.largest_scale)
        smallest = xp.full_like(power, self.min_scale)
        # Compared before the product, which float32 might not hold.
        above = base >= largest / power
        exact = xp.where(above, largest, xp.where(above, one_real, base) * power)
        scale = xp.astype(xp.maximum(exact, smallest), xp.float32)

        # At a bound, and at the end of an interval, the scale is the new base.
        is_base = xp.logical_or(xp.logical_or(above, exact <= smallest), phase >= whole)
        phase = xp.where(is_base, zero, phase)
        ratio = xp.minimum(base / xp.astype(scale, real), one_real) / xp.full_like(power, _RATIO_UNIT)
        ratio = xp.astype(ratio + xp.full_like(power, 0.5), xp.int32)
        seen = xp.where(overflow, one, state.overflow_tracker)
        return new_state(xp, scale, phase, seen, xp.where(phase == zero, zero, ratio))

    def _recall(self, xp: ModuleType, state: ScaleState, is_fast: Array, real: object) -> tuple[Array, Array]:
        """Return the base, as float32, and the phase; the scale and 0 for a state that this policy has not made."""
        ratio = xp.astype(state.rescale_tracker, real)
        one, ratio = xp.full_like(ratio, 1.0), ratio * xp.full_like(ratio, _RATIO_UNIT)
        is_ratio = xp.logical_and(ratio >= xp.full_like(ratio, 0.49), ratio <= one)
        is_phase = state.growth_tracker < xp.full_like(state.growth_tracker, self.growth_interval)
        known = xp.logical_and(xp.logical_and(is_ratio, is_phase), xp.logical_not(is_fast))
        base = xp.astype(xp.astype(state.scale, real) * xp.where(known, ratio, one), xp.float32)
        return base, xp.where(known, state.growth_tracker, xp.zeros_like(state.growth_tracker))

    def _power(self, xp: ModuleType, phase: Array, real: object) -> Array:
        """Return ``growth_factor**(phase/growth_interval)``, exact for the whole interval: from its binary digits."""
        power = xp.astype(xp.full_like(phase, 1), real)
        digits = reversed(range((self.growth_interval - 1).bit_length()))
        for steps in (self.growth_interval, *(1 << digit for digit in digits)):
            has = phase >= xp.full_like(phase, steps)
            factor = xp.full_like(power, self.growth_factor ** (steps / self.growth_interval))
            power = xp.where(has, power * factor, power)
            phase = xp.where(has, phase - xp.full_like(phase, steps), phase)
        return power
