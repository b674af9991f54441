"""simulate: run a policy over recorded overflows or gradient magnitudes; a million steps in seconds by a DynamicScale.

What a run does to the scale depends on one number for each step: the largest magnitude among its gradients. The step
is skipped when that times the scale is above fp16's largest number, 65504.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NoReturn, TypeVar

from gradscale.core import validation
from gradscale.core.protocols import Numbers, Policy, ScaleState
from gradscale.errors import InvalidTypeError, InvalidValueError, reading, short_repr
from gradscale.extras import needs
from gradscale.policies.dynamic import next_numbers

__all__ = ["Gradients", "Simulation", "recorded", "simulate"]
__dir__ = __all__.copy

_Checked = TypeVar("_Checked")


@dataclasses.dataclass(frozen=True)
class Gradients:
    """The magnitudes that a simulation runs over.

    Attributes
    ----------
    largest : sequence of float
        The largest unscaled magnitude in each step; inf or NaN if it overflows whatever the scale, 0.0 if it never
        does. InvalidValueError for no step.

    Examples
    --------
    >>> from gradscale.tools.simulation import Gradients, simulate
    >>> from gradscale import presets
    >>> simulate(presets.torch(), Gradients(largest=[0.5, 1.0, 2.0])).skipped
    (False, True, True)
    """

    largest: Sequence[float]

    def __post_init__(self) -> None:
        # A recorded run has millions, floats already. A number of another precision would be multiplied by the scale in
        # that one, and overflow there.
        if type(self.largest) not in (list, tuple) or not all(type(x) is float and not x < 0.0 for x in self.largest):
            largest = _checked(self.largest, "numbers", validation.magnitude, "the magnitude of step")
            object.__setattr__(self, "largest", largest)
        if not self.largest:
            msg = "a trace must hold at least one step, got an empty one"
            raise InvalidValueError(msg)


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The scales and skipped steps of a simulated run.

    Attributes
    ----------
    name : str
        The policy's name.
    scale : tuple of float
        The scale that each step used.
    skipped : tuple of bool
        Whether each step was skipped.
    final_scale : float
        The scale after the last step.
    raised_at : int or None
        The step, from 1, in which the policy raised, which is then the last one; None for a run to the end.

    Examples
    --------
    >>> from gradscale import presets
    >>> from gradscale.tools.simulation import simulate
    >>> run = simulate(presets.torch(), "COO")
    >>> (run.steps, run.skipped_steps, run.final_scale)
    (3, 2, 16384.0)
    """

    name: str
    scale: tuple[float, ...] = dataclasses.field(repr=False)
    skipped: tuple[bool, ...] = dataclasses.field(repr=False)
    final_scale: float
    raised_at: int | None

    @property
    def steps(self) -> int:
        """How many steps were run."""
        return len(self.scale)

    @property
    def skipped_steps(self) -> int:
        """How many of them were skipped."""
        return sum(self.skipped)

    def to_dict(self) -> dict[str, str | float | None]:
        """Return the totals, as values that JSON has."""
        return {
            "name": self.name,
            "steps": self.steps,
            "skipped": self.skipped_steps,
            "skipped_fraction": self.skipped_steps / self.steps,
            "final_scale": self.final_scale,
            "smallest_scale": min(self.scale),
            "largest_scale": max(self.scale),
            "raised_at": self.raised_at,
        }


def recorded(overflows: str | Iterable[bool]) -> Gradients:
    """Return the gradients of a recorded run of which only the steps that overflowed are known.

    Parameters
    ----------
    overflows : str or iterable of bool
        ``"CCOC"``, C for a clean step and O for an overflow in either case, white space left out; or True for each
        overflow. Leave out steps that were skipped for a spike or a refusal, which move no scale. InvalidValueError for
        another character, with its position, and for no step; InvalidTypeError for anything else than booleans.

    Examples
    --------
    >>> from gradscale import presets
    >>> from gradscale.tools.simulation import recorded, simulate
    >>> simulate(presets.megatron(hysteresis=2), recorded("OCO")).final_scale
    2147483648.0
    """
    if isinstance(overflows, str):
        if wrong := re.search(r"[^cCoO\s]", overflows):
            msg = f"a trace must hold C (clean) and O (overflow) alone, got {wrong[0]!r} at position {wrong.end()}"
            raise InvalidValueError(msg)
        overflows = [letter in "oO" for letter in "".join(overflows.split())]
    steps = _checked(overflows, "True or False", validation.boolean, "step")
    return Gradients([math.inf if overflow else 0.0 for overflow in steps])


def _checked(values: object, wanted: str, check: Callable[[str, object], _Checked], name: str) -> list[_Checked]:
    """Return the values of a trace, each checked under its name and number."""
    if not isinstance(values, Iterable):
        raise validation.wrong_type(values, "a trace", f"an iterable of {wanted}")
    with reading("a trace"):
        return [check(f"{name} {number}", value) for number, value in enumerate(values, 1)]


def simulate(policy: Policy, gradients: Gradients | str | Iterable[bool], *, name: str | None = None) -> Simulation:
    """Run a policy over gradients, up to a step in which it raises; its states are those of ``update``, bit for bit.

    Parameters
    ----------
    policy : Policy
        Any that consists of pure functions of 0-d arrays of the array API standard. InvalidTypeError for one that asks
        for an array's value, or uses a function that the standard does not have for 0-d arrays.
    gradients : Gradients, str or iterable of bool
        Text and booleans as :func:`recorded` takes them.
    name : str, optional
        The policy's name in the result. Default: its ``repr``.

    Examples
    --------
    >>> from gradscale import presets
    >>> from gradscale.tools.simulation import simulate
    >>> simulate(presets.torch(growth_interval=2), "CCOC").scale
    (65536.0, 65536.0, 131072.0, 65536.0)
    """
    validation.policy(policy)
    if not isinstance(gradients, Gradients):
        gradients = recorded(gradients)
    with needs("simulate()", "numpy"):
        import numpy as np
    counts = np.zeros((), np.int32), np.ones((), np.int32)
    hidden = _hidden(np.ndarray)
    with _explained(policy):
        state = policy.init(np.zeros((), np.float32))
        numbers = _numbers_of(state)
        # A rule that reads an array's value fails here, whatever the value.
        unseen = ScaleState._make(x.view(hidden) for x in state)
        _numbers_of(policy.update(unseen, nonfinite=counts[1].view(hidden)))
        is_raising = policy.at_min_scale(state) is not None
    scales: list[float] = []
    skipped: list[bool] = []
    raised_at = None
    for magnitude in gradients.largest:
        # Not the opposite comparison: a NaN is an overflow.
        overflow = not magnitude * numbers.scale <= validation.LARGEST_FLOAT16
        scales.append(numbers.scale)
        skipped.append(overflow)
        if overflow and is_raising:
            state = ScaleState(*(x.dtype.type(y) for x, y in zip(state, numbers, strict=True)))
            if policy.at_min_scale(state):
                raised_at = len(scales)
                break
        # Of a policy whose rule is for arrays alone, the state is always the present one.
        following = next_numbers(policy, numbers, overflow)
        if following is None:
            with _explained(policy):
                state = policy.update(state, nonfinite=counts[overflow])
                following = _numbers_of(state)
        numbers = following
    return Simulation(
        name=repr(policy) if name is None else name,
        scale=tuple(scales),
        skipped=tuple(skipped),
        final_scale=numbers.scale,
        raised_at=raised_at,
    )


@contextlib.contextmanager
def _explained(policy: Policy) -> Iterator[None]:
    """Say that a policy cannot be simulated if trying it fails."""
    try:
        yield
    except Exception as error:
        msg = (
            f"the policy must be pure functions of 0-d arrays of the array API standard to be simulated, got "
            f"{short_repr(policy)}, and trying it failed with {type(error).__name__}: {error}"
        )
        raise InvalidTypeError(msg) from error


@functools.cache
def _hidden(kind: type) -> type:
    """Return a class of arrays whose values cannot be read; one, since adapters are kept by class."""
    return type("Hidden", (kind,), dict.fromkeys(("__bool__", "__int__", "__float__", "__index__"), _hide))


def _hide(*_: object) -> NoReturn:
    msg = "it asks for the value of an array, where it must choose by where()"
    raise InvalidTypeError(msg)


def _numbers_of(state: object) -> Numbers:
    """Return the numbers of a state of NumPy's arrays; ValueError for anything else."""
    if type(state) is not ScaleState or [x.dtype.name for x in state] != ["float32", *["int32"] * (len(state) - 1)]:
        msg = f"it must return a ScaleState of float32 and int32, got {short_repr(state)}"
        raise ValueError(msg)
    return Numbers(*(x.item() for x in state))
