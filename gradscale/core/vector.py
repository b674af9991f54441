"""What the ranks agree on: a vector of 16 int32 (64 bytes) that carries the verdict and a fingerprint of the state.

::

    [nonfinite, at_min_scale, f1 .. f7, -f1 .. -f7]

After an element-wise MAX over the ranks, the first two are what any rank found, and ``max(f) == -max(-f)`` exactly
when all ranks hold one value, so that a rank that has drifted is found in the same message, on every rank. Only int32
travels: MAX over floats gives ranks different answers when one of them holds a NaN.
"""

from __future__ import annotations

import dataclasses
import operator
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from array_api_compat import array_namespace

from gradscale.core.backend import Backend
from gradscale.core.protocols import Array, Policy, ScaleState
from gradscale.core.validation import LARGEST_INT32, bits_of_float32, float32_from_bits
from gradscale.errors import ScaleDesyncError

__all__ = [
    "LENGTH",
    "AgreementVector",
    "Verdict",
    "describe_differences",
    "identify",
    "is_fixed",
    "read_both",
    "read_verdict",
]

_FIELDS = ("scale", "growth_tracker", "overflow_tracker", "rescale_tracker", "policy", "iteration", "call")
LENGTH = 2 + 2 * len(_FIELDS)
# Positions whose numbers are kept as arrays: of two scalers' worth of optimizers in an iteration.
_KEPT = 8


class Verdict(NamedTuple):
    """What the group agreed on, on the host.

    Attributes
    ----------
    nonfinite, local_nonfinite : int
        Largest number of non-finite gradient arrays on any rank, and the number on this one.
    at_min_scale : bool
        Whether an overflow now must be raised, as the policy says.
    scale : float
        The scale that all ranks hold.
    """

    nonfinite: int
    local_nonfinite: int
    at_min_scale: bool
    scale: float


class AgreementVector:
    """Makes the vector to agree on, and keeps the parts of it that stay the same from call to call.

    Parameters
    ----------
    diagnoses : bool, default False
        Whether the scaler makes more collectives after an overflow, which has to be the same on every rank.
    """

    def __init__(self, *, diagnoses: bool = False) -> None:
        self._diagnoses = diagnoses
        self._state: ScaleState | None = None
        self._policy: Policy | None = None
        self._fingerprint: Array | None = None
        self._identity = 0
        # Whether the policy's settings cannot change without a new object.
        self._is_fixed = False
        self._constants: dict[tuple[int, int, int], Array] = {}
        # Of a verdict that the host knows: the flag and the first fields.
        self._numbers: list[int] | None = None

    @property
    def packed(self) -> ScaleState | None:
        """The state of the last vector."""
        return self._state

    def pack(
        self, backend: Backend, policy: Policy, state: ScaleState, nonfinite: Array | int, position: tuple[int, int]
    ) -> Any:
        """Return the vector: 1-d int32 on the state's device, or a list of the same numbers if the host knows them.

        Parameters
        ----------
        backend : Backend
            Takes the fingerprint.
        policy : Policy
            Must be the same on every rank.
        state : ScaleState
            What the gradients were unscaled with.
        nonfinite : array or int
            The local count: 0-d int32; or an int, for a state that the host reads without waiting.
        position : tuple of int
            The iteration, and the number of this agreement in it: ranks that leave one out are found.
        """
        if self._state is not state or self._policy is not policy:
            self._identify(policy)
            self._state = state
            self._fingerprint = self._numbers = None
            self._constants = {}
        iteration, call = position
        key = (self._identity, iteration & LARGEST_INT32, call)
        if isinstance(nonfinite, int):
            if self._numbers is None:
                self._numbers = _read_state(backend, policy, state)
            flag, *first = self._numbers
            return _vector(nonfinite, flag, [*first, *key])
        xp = array_namespace(state.scale)
        where = backend.placement(state.scale)
        if self._fingerprint is None:
            self._fingerprint = backend.fingerprint(state)
        if key not in self._constants:
            if len(self._constants) >= _KEPT:
                self._constants = {}
            self._constants[key] = xp.asarray(key, dtype=xp.int32, device=where)
        at_min_scale = policy.at_min_scale(state)
        if at_min_scale is None:
            is_at_min_scale = xp.asarray([0], dtype=xp.int32, device=where)
        else:
            is_at_min_scale = xp.reshape(xp.astype(at_min_scale, xp.int32), (1,))
        fields = xp.concat([self._fingerprint, self._constants[key]])
        return xp.concat([xp.reshape(nonfinite, (1,)), is_at_min_scale, fields, -fields])

    def pack_plain(
        self, policy: Policy, state: ScaleState, nonfinite: int, position: tuple[int, int], *, at_min_scale: bool
    ) -> list[int]:
        """Return the vector of a state of Python numbers, as a list; ``at_min_scale`` is what the policy says of it."""
        self._identify(policy)
        iteration, call = position
        fields = [bits_of_float32(state.scale), *state[1:], self._identity, iteration & LARGEST_INT32, call]
        return _vector(nonfinite, at_min_scale, fields)

    def _identify(self, policy: Policy) -> None:
        if self._policy is not policy or not self._is_fixed:
            self._identity, self._is_fixed = identify(policy) ^ self._diagnoses, is_fixed(policy)
            self._policy = policy


def _vector(nonfinite: int, flag: int, fields: list[int]) -> list[int]:
    return [nonfinite, flag, *fields, *map(operator.neg, fields)]


def _read_state(backend: Backend, policy: Policy, state: ScaleState) -> list[int]:
    """Return whether an overflow now must be raised, and the state's fingerprint, read by the host."""
    fingerprint = backend.fingerprint(state)
    at_min_scale = policy.at_min_scale(state)
    if at_min_scale is None:
        return [0, *backend.read(fingerprint)]
    xp = array_namespace(fingerprint)
    return backend.read(xp.concat([xp.reshape(xp.astype(at_min_scale, xp.int32), (1,)), fingerprint]))


def is_fixed(policy: Any) -> bool:
    """Tell whether a policy is a frozen dataclass of settings that cannot change either."""
    parameters = getattr(type(policy), "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        return False
    try:
        hash(policy)
    except TypeError:
        return False
    return True


def identify(policy: Any) -> int:
    """Return a number from 0 to 2**31-1 that tells policies apart: of its settings, if it is a dataclass."""
    text = repr(policy) if dataclasses.is_dataclass(policy) else type(policy).__qualname__
    return zlib.crc32(text.encode()) & 0x7FFFFFFF


def read_both(backend: Backend, agreed: Array, sent: Array) -> tuple[list[int], list[int]]:
    """Return the group's answer and what this rank has put in, from one host read."""
    if agreed is sent:
        values = backend.read(agreed)
        return values, values
    both = backend.read(array_namespace(agreed).concat([agreed, sent]))
    return both[:LENGTH], both[LENGTH:]


def read_verdict(values: Sequence[int], own: Sequence[int], policy: Any, where: Callable[[], str]) -> Verdict:
    """Return the verdict, or say in which fields the ranks differ.

    Parameters
    ----------
    values : sequence of int
        The vector after MAX.
    own : sequence of int
        This rank's vector before MAX.
    policy : object
        This rank's policy, for the message.
    where : callable
        Returns which rank this is, and in which iteration, for the message.

    Raises
    ------
    ScaleDesyncError
        When the ranks differ.
    """
    count = len(_FIELDS)
    highest = values[2 : 2 + count]
    negated = values[2 + count : LENGTH]
    if any(map(operator.add, highest, negated)):
        differing = describe_differences([-value for value in negated], highest, own[2 : 2 + count], policy)
        msg = (
            f"ranks hold different states, seen by {where()}: {differing}. No rank takes this step. Load "
            f"one checkpoint on every rank, construct every scaler with one policy, and call unscale_(), step() and "
            f"update() for the same optimizers in the same order everywhere"
        )
        raise ScaleDesyncError(msg)
    return Verdict(values[0], own[0], bool(values[1]), float32_from_bits(values[2]))


def describe_differences(lowest: Sequence[int], highest: Sequence[int], own: Sequence[int] | None, policy: Any) -> str:
    """Name the fields of the fingerprint in which ranks differ.

    Parameters
    ----------
    lowest, highest : sequence of int
        Each field's least and greatest value on any rank.
    own : sequence of int, optional
        This rank's; None where one process drives them all.
    policy : object
        This rank's policy.
    """
    mine: Sequence[int | None] = [None] * len(_FIELDS) if own is None else own
    fields = zip(_FIELDS, lowest, highest, mine, strict=True)
    return "; ".join(_difference(*field, policy) for field in fields if field[1] != field[2])


def _difference(name: str, low: int, high: int, own: int | None, policy: Any) -> str:
    if name == "policy":
        return f"policy (here {policy!r}) or diagnose="
    least, most, here = (_readable(name, value) for value in (low, high, own))
    described = f"{name} of the iteration" if name == "call" else name
    consequence = ", so some rank left one out" if name == "call" else ""
    return f"{described} from {least} to {most}" + (f" (here {here})" if own is not None else "") + consequence


def _readable(name: str, value: int | None) -> str:
    return repr(float32_from_bits(value)) if name == "scale" and value is not None else str(value)
