"""ScaleState: what a policy remembers between iterations, as 0-d arrays."""

from typing import NamedTuple

from gradscale.protocols import Array

__all__ = ["ScaleState"]


class ScaleState(NamedTuple):
    """Scale and trackers; a pytree as it stands, every field a 0-d array of one library on one device.

    A fresh state has trackers of zero whatever the policy, so that a state of any policy, or of a
    system that keeps only a scale, can be continued by another.

    Attributes
    ----------
    scale : array
        The factor that the loss is multiplied by; 0-d float32, finite and above zero.
    growth_tracker : array
        Clean steps counted towards the next growth; 0-d int32, not negative.
    overflow_tracker : array
        Overflows counted towards the next backoff (hysteresis, or the numerator of a ratio tolerance); 0-d int32.
    rescale_tracker : array
        Steps since the scale last changed (the denominator of a ratio tolerance); 0-d int32, and zero for
        policies without a tolerance.
    """

    scale: Array
    growth_tracker: Array
    overflow_tracker: Array
    rescale_tracker: Array
