"""simulate: run a policy over recorded overflows, gradient magnitudes or a model of them, a million steps in seconds.

What a run does to the scale depends on one number for each step: the largest magnitude among its gradients. The step
is skipped when that times the scale is above fp16's largest number, 65504.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import NormalDist
from typing import Any

from gradscale.core import validation
from gradscale.core.messages import reading, shown
from gradscale.core.protocols import Policy
from gradscale.errors import InvalidTypeError, InvalidValueError
from gradscale.policies.plain import LARGEST_FLOAT16, first_state, traced_rule

__all__ = ["Gradients", "Simulation", "SyntheticGradients", "measured", "recorded", "simulate"]

# Half of fp16's smallest number, 2**-24: what is not above rounds to 0.
_UNDERFLOW_EXPONENT = -25.0
_STEPS_AT_ONCE = 20_000
_LARGEST_EXPONENT = 1000.0


@dataclasses.dataclass(frozen=True)
class Gradients:
    """What a simulation runs over: the gradients' magnitudes in each step.

    Attributes
    ----------
    largest : sequence of float
        The largest unscaled magnitude in each step; inf or NaN where it overflows whatever the scale, 0.0 where it
        never does.
    medians : sequence of float or None
        The base-2 logarithm of the median magnitude in each step, where that is known.
    sigma : float
        The standard deviation of the base-2 logarithm of the magnitudes in one step; above 0 where medians are known.

    Raises
    ------
    InvalidValueError
        For no step, or another number of medians than of steps.

    Examples
    --------
    >>> from gradscale.policies.simulation import Gradients, simulate
    >>> from gradscale import presets
    >>> gradients = Gradients(largest=[0.5, 1.0, 2.0])
    >>> simulate(presets.torch(), gradients).skipped
    (False, True, True)
    """

    largest: Sequence[float]
    medians: Sequence[float] | None = None
    sigma: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "largest", _floats("the magnitude", self.largest, validation.magnitude))
        if len(self.largest) == 0:
            msg = "a trace must hold at least one step, got an empty one"
            raise InvalidValueError(msg)
        if self.medians is not None:
            object.__setattr__(self, "medians", _floats("the median", self.medians, validation.number))
            validation.number("sigma", self.sigma, above=0.0)
            if len(self.medians) != len(self.largest):
                msg = f"there must be a median for each step, got {len(self.medians)} for {len(self.largest)} steps"
                raise InvalidValueError(msg)


def _floats(what: str, values: Any, check: Callable[[str, Any], float]) -> Sequence[float]:
    """Return a sequence of floats: the very same one where it is a list or tuple of them."""
    # Asked for in one go: a recorded run has millions.
    if type(values) in (list, tuple) and set(map(type, values)) == {float}:
        floats: Sequence[float] = values
        return floats
    return [check(f"{what} of step {number}", value) for number, value in _numbered(values, "numbers")]


@dataclasses.dataclass(frozen=True, repr=False)
class Simulation:
    """What a policy has done in a simulated run.

    Attributes
    ----------
    name : str
        What the policy is called.
    scale : tuple of float
        The scale that each step used.
    skipped : tuple of bool
        Whether each step was skipped.
    underflow : tuple of float or None
        The fraction of the gradients' elements that fp16 made 0 in each step; None where the gradients do not tell.
    final_scale : float
        The scale after the last step.
    raised_at : int or None
        The step, from 1, in which the policy raised, which is then the last one; None for a run to the end.

    Examples
    --------
    >>> from gradscale import presets
    >>> from gradscale.policies.simulation import recorded, simulate
    >>> run = simulate(presets.torch(), recorded("COO"))
    >>> (run.steps, run.skipped_steps, run.final_scale)
    (3, 2, 16384.0)
    """

    name: str
    scale: tuple[float, ...]
    skipped: tuple[bool, ...]
    underflow: tuple[float, ...] | None
    final_scale: float
    raised_at: int | None

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self.to_dict().items())
        return f"Simulation({values})"

    @property
    def steps(self) -> int:
        """How many steps were run."""
        return len(self.scale)

    @property
    def skipped_steps(self) -> int:
        """How many of them were skipped."""
        return sum(self.skipped)

    @property
    def mean_underflow(self) -> float | None:
        """The mean fraction that underflowed, over the steps that were made; None where that is unknown."""
        if self.underflow is None:
            return None
        made = [value for value, skipped in zip(self.underflow, self.skipped, strict=True) if not skipped]
        return math.fsum(made) / len(made) if made else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the totals, as values that JSON has."""
        return {
            "name": self.name,
            "steps": self.steps,
            "skipped": self.skipped_steps,
            "skipped_fraction": self.skipped_steps / self.steps,
            "final_scale": self.final_scale,
            "smallest_scale": min(self.scale),
            "largest_scale": max(self.scale),
            "underflow_fraction": self.mean_underflow,
            "raised_at": self.raised_at,
        }


def recorded(overflows: str | Iterable[bool]) -> Gradients:
    """Return the gradients of a recorded run, of which only is known which steps overflowed.

    Parameters
    ----------
    overflows : str or iterable of bool
        ``"CCOC"``, C for a clean step and O for an overflow in either case, white space left out; or True for each
        overflow.

    Raises
    ------
    InvalidValueError
        For another character, with its position, and when there is no step.
    InvalidTypeError
        For anything else than booleans.

    Examples
    --------
    >>> from gradscale import presets
    >>> from gradscale.policies.simulation import recorded, simulate
    >>> simulate(presets.megatron(hysteresis=2), recorded("OCO")).final_scale
    2147483648.0
    """
    if isinstance(overflows, str):
        steps = _from_letters(overflows)
    else:
        steps = [validation.boolean(f"step {number}", value) for number, value in _numbered(overflows, "True or False")]
    return Gradients([math.inf if overflow else 0.0 for overflow in steps])


def _from_letters(text: str) -> list[bool]:
    steps = []
    for position, letter in enumerate(text, 1):
        if letter in "cCoO":
            steps.append(letter in "oO")
        elif not letter.isspace():
            msg = f"a trace must hold C (clean) and O (overflow) alone, got {letter!r} at position {position}"
            raise InvalidValueError(msg)
    return steps


def measured(magnitudes: Iterable[float]) -> Gradients:
    """Return the gradients of a run whose largest unscaled magnitude is known for each step.

    Raises
    ------
    InvalidValueError
        For a negative magnitude, and when there is none. An inf or NaN overflows whatever the scale.
    InvalidTypeError
        For anything else than numbers.

    Examples
    --------
    >>> from gradscale import presets
    >>> from gradscale.policies.simulation import measured, simulate
    >>> run = simulate(presets.torch(), measured([0.5, 2.0, 0.5]))  # 2.0 times 65536 overflows
    >>> run.skipped
    (False, True, False)
    """
    # A number of another precision would be multiplied by the scale in that one, and overflow there.
    largest = [
        validation.magnitude(f"the magnitude of step {number}", value)
        for number, value in _numbered(magnitudes, "numbers")
    ]
    return Gradients(largest)


def _numbered(values: Any, wanted: str) -> Iterator[tuple[int, Any]]:
    if not isinstance(values, Iterable):
        msg = f"a trace must be an iterable of {wanted}, got {shown(values)} of type {type(values).__name__}"
        raise InvalidTypeError(msg)
    with reading("a trace"):
        yield from enumerate(values, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticGradients:
    """A model of a run's gradients: magnitudes that are log-normal in each step, with a drift and with spikes.

    Exponents are of 2, as the scale's are. Equal settings give equal runs.

    Parameters
    ----------
    steps : int, default 100000
        How many.
    seed : int, default 0
        Of the random numbers; a setting does not change those that belong to another.
    median : float, default 2**-22
        The median magnitude in the first step, without the scale.
    sigma : float, default 4.0
        The standard deviation of the magnitudes' base-2 logarithm within a step; above 0.
    elements : int, default 1000000
        How many elements the gradients have; the largest of them is drawn from its exact distribution.
    drift : float, default 0.0
        Added to the exponent in each step: -1e-5 halves the magnitudes every 100,000 steps.
    spike_probability : float, default 0.0
        How probable it is that a step's gradients are all larger.
    spike_size : float, default 6.0
        By how many powers of two.
    nan_probability : float, default 0.0
        How probable it is that a step overflows whatever the scale.

    Raises
    ------
    InvalidValueError, InvalidTypeError
        For a setting out of range or of a wrong type, with its name and value.

    Examples
    --------
    >>> from gradscale import presets
    >>> from gradscale.policies.simulation import SyntheticGradients, simulate
    >>> gradients = SyntheticGradients(steps=1000, seed=1).gradients()
    >>> simulate(presets.torch(growth_interval=100), gradients).steps
    1000
    """

    steps: int = 100_000
    seed: int = 0
    median: float = 2.0**-22
    sigma: float = 4.0
    elements: int = 1_000_000
    drift: float = 0.0
    spike_probability: float = 0.0
    spike_size: float = 6.0
    nan_probability: float = 0.0

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "steps": validation.integer("steps", self.steps, 1, 10**9),
            "seed": validation.integer("seed", self.seed, 0, 2**63 - 1),
            "median": validation.number("median", self.median, above=0.0),
            "sigma": validation.number("sigma", self.sigma, above=0.0),
            "elements": validation.integer("elements", self.elements, 1, 10**15),
            "drift": validation.number("drift", self.drift),
            "spike_size": validation.number("spike_size", self.spike_size),
        }
        for name in ("spike_probability", "nan_probability"):
            checked[name] = validation.number(name, getattr(self, name), at_least=0.0, at_most=1.0)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def gradients(self, progress: Callable[[int], Any] | None = None) -> Gradients:
        """Return the run's gradients; ``progress`` is called with the number of steps made, now and then."""
        uniform = random.Random(self.seed).random
        quantile = NormalDist().inv_cdf
        exponent = math.log2(self.median)
        largest, medians = [], []
        for step in range(self.steps):
            # Three numbers for each step, whatever they are used for.
            drawn, spike, nan = uniform(), uniform(), uniform()
            centre = exponent + self.drift * step
            if spike < self.spike_probability:
                centre += self.spike_size
            # The largest of n is below x with the n-th power of an element's probability; taken from the upper tail,
            # where it is not rounded to 1.
            tail = -math.expm1(math.log(1.0 - drawn) / self.elements)
            reached = centre - self.sigma * quantile(min(max(tail, 1e-300), 1.0 - 2.0**-53))
            medians.append(centre)
            is_nan = nan < self.nan_probability
            largest.append(math.inf if is_nan else 2.0 ** max(min(reached, _LARGEST_EXPONENT), -_LARGEST_EXPONENT))
            if progress is not None and step % _STEPS_AT_ONCE == _STEPS_AT_ONCE - 1:
                progress(step + 1)
        return Gradients(largest, medians, self.sigma)


def simulate(
    policy: Policy,
    gradients: Gradients | SyntheticGradients | str | Iterable[bool],
    *,
    name: str | None = None,
    progress: Callable[[int], Any] | None = None,
) -> Simulation:
    """Run a policy over gradients; the same states as its ``update`` gives on arrays, bit for bit.

    Parameters
    ----------
    policy : Policy
        Any that consists of pure functions of 0-d arrays of the array API standard.
    gradients : Gradients, SyntheticGradients, str or iterable of bool
        What it runs over; text and booleans as :func:`recorded` takes them.
    name : str, optional
        What it is called in the result. Default: its ``repr``.
    progress : callable, optional
        Called with the number of steps made, now and then.

    Returns
    -------
    Simulation
        Up to the step in which the policy raised, if it did.

    Raises
    ------
    InvalidTypeError
        For a policy that cannot be traced: it asks for an array's value.
    InvalidValueError
        For gradients of no steps.

    Examples
    --------
    >>> from gradscale import presets
    >>> from gradscale.policies.simulation import recorded, simulate
    >>> run = simulate(presets.torch(growth_interval=2), recorded("CCOC"))
    >>> run.scale
    (65536.0, 65536.0, 131072.0, 65536.0)
    """
    validation.policy(policy)
    if progress is not None and not callable(progress):
        msg = f"progress must be callable, got {shown(progress)} of type {type(progress).__name__}"
        raise InvalidTypeError(msg)
    if isinstance(gradients, SyntheticGradients):
        gradients = gradients.gradients()
    elif not isinstance(gradients, Gradients):
        gradients = recorded(gradients)
    rule, state, raised = traced_rule(policy), first_state(policy), False
    scales: list[float] = []
    skipped: list[bool] = []
    for step, magnitude in enumerate(gradients.largest, 1):
        # Not the opposite comparison: a NaN is an overflow.
        overflow = not magnitude * state.scale <= LARGEST_FLOAT16
        scales.append(state.scale)
        skipped.append(overflow)
        raised = overflow and rule.at_min_scale is not None and rule.at_min_scale(state)
        if progress is not None and (raised or step % _STEPS_AT_ONCE == 0 or step == len(gradients.largest)):
            progress(step)
        if raised:
            break
        state = rule.update(state, overflow)
    return Simulation(
        name=repr(policy) if name is None else name,
        scale=tuple(scales),
        skipped=tuple(skipped),
        underflow=_underflow(gradients, scales),
        final_scale=state.scale,
        raised_at=len(scales) if raised else None,
    )


def _underflow(gradients: Gradients, scales: Sequence[float]) -> tuple[float, ...] | None:
    """Return the fraction of a normal distribution of exponents that a scale leaves below fp16's range."""
    if gradients.medians is None:
        return None
    width = gradients.sigma * math.sqrt(2.0)
    log2, erfc, threshold = math.log2, math.erfc, _UNDERFLOW_EXPONENT
    pairs = zip(scales, gradients.medians, strict=False)
    return tuple([0.5 * erfc((log2(scale) + median - threshold) / width) for scale, median in pairs])
