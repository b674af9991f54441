"""ArrayState: a policy and its state, made in the library and on the device of the first array that comes along.

If the CPU computes with the arrays anyway, the state is one of Python numbers, and the rule is the policy's
:func:`gradscale.policies.plain.plain_rule`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from array_api_compat import array_namespace, device

from gradscale.core import registry, validation
from gradscale.core.arithmetic import Kind, has_float64, kind_of
from gradscale.core.backend import Backend
from gradscale.core.messages import reading, shown
from gradscale.core.protocols import Array, Policy, ScaleState
from gradscale.errors import BackendError, InvalidTypeError, InvalidValueError
from gradscale.policies.dynamic import DynamicScale
from gradscale.policies.plain import PlainRule, plain_rule

__all__ = [
    "ANY_TRACKERS",
    "ArrayState",
    "checked_scale",
    "largest_trackers",
    "numbers_of",
    "placed",
    "require_values",
    "with_setting",
]

Trackers: TypeAlias = tuple[int, ...]

ANY_TRACKERS: Trackers = (validation.LARGEST_INT32,) * 3
"""What the trackers may reach if the policy does not say."""


class ArrayState:
    """The state of a scaler, as 0-d arrays or Python numbers that each update replaces by new ones.

    Parameters
    ----------
    policy : Policy
        The rule that adapts it.
    backend : str, Backend or None
        An adapter or its registered name; None for the one of the arrays' library.

    Attributes
    ----------
    backend : Backend
        The adapter of the library that the state is in, once there is a state.
    home : namespace
        Of that library; None without a state.
    """

    backend: Backend

    def __init__(self, policy: Policy, backend: str | Backend | None = None) -> None:
        if isinstance(backend, str):
            registry.array_backend(backend)
        elif backend is not None and not isinstance(backend, Backend):
            msg = (
                f"backend must be a registered name ({', '.join(registry.names())}) or an instance of a class that "
                f"derives from gradscale.Backend, got {shown(backend)}"
            )
            raise InvalidTypeError(msg)
        self.policy = policy
        self.version = 0
        self.is_scaled_unseen = False
        self.home: Any = None
        self._given = backend
        self._state: ScaleState | None = None
        # None if the state is of arrays.
        self._rule: PlainRule | None = None
        self._like: Array | None = None
        # What a checkpoint or the user has set before there was an array.
        self._restored: dict[str, float] = {}
        # What the trackers can have reached since the scaler was made.
        self._largest = largest_trackers(policy)

    @property
    def is_made(self) -> bool:
        """Whether there is a state."""
        return self._state is not None

    @property
    def is_known(self) -> bool:
        """Whether there is a state, or numbers that were loaded or set."""
        return self._state is not None or len(self._restored) > 0

    def backend_for(self, x: Array) -> Backend:
        """Return the adapter of an array: the scaler's own, or the one of the array's library."""
        if self._given is None:
            return registry.backend_for(x)
        if isinstance(self._given, str):
            return registry.array_backend(self._given)
        return self._given

    def example(self) -> Array | None:
        """Return an array of the scaler's own adapter; None if it has none."""
        return None if self._given is None else self.backend_for(None).example()

    def current(self, like: Array | None = None) -> ScaleState:
        """Return the state, made in the library and on the device of ``like`` if there is none yet."""
        if self._state is None:
            require_values(like)
            state = placed(self.policy.init(like), self._restored)
            self._restored = {}
            self._like, self.home = state.scale, array_namespace(state.scale)
            self.backend = self.backend_for(state.scale)
            self.take(state)
        return self._state  # type: ignore[return-value]

    def take(self, state: ScaleState) -> None:
        """Make a state the present one: as numbers if the policy allows it, else as arrays."""
        self._rule = plain_rule(self.policy) if self.backend.computes_on_host else None
        self._state = self.arrays(state) if self._rule is None else self._numbers_of(state)

    def arrays(self, state: ScaleState) -> ScaleState:
        """Return a state as arrays."""
        if not isinstance(state.scale, float):
            return state
        like = self.policy.init(self._like)
        return placed(like, state._asdict())

    def _numbers_of(self, state: ScaleState) -> ScaleState:
        if isinstance(state.scale, float):
            return state
        return ScaleState(**numbers_of(state, self.backend, self._largest))

    def at_min_scale(self, state: ScaleState) -> Array | bool | None:
        """Return whether an overflow now must be raised: a bool for a state of numbers; None if never."""
        if isinstance(state.scale, float) and self._rule is not None:
            return self._rule.at_min_scale is not None and self._rule.at_min_scale(state)
        found = self.policy.at_min_scale(self.arrays(state))
        if found is None or not isinstance(state.scale, float):
            return found
        xp = self.home
        return self.backend.read(xp.reshape(xp.astype(found, xp.int32), (1,)))[0] > 0

    def advance(self, counts: Sequence[Array | int], held: Sequence[Array] = ()) -> None:  # noqa: ARG002
        """Adapt the state to the counts of an iteration: any overflow backs the scale off once. No host read."""
        state = self._state or self.current()
        self.version += 1
        if self._rule is not None:
            self._state = self._rule.update(state, max(counts))
            return
        xp = self.home
        arrays = [xp.asarray(x, dtype=xp.int32) if isinstance(x, int) else x for x in counts]
        self._state = self.backend.update(self.policy, state, functools.reduce(xp.maximum, arrays))

    def lowered(self, state: ScaleState) -> ScaleState:
        """Return a state with its scale backed off once; the very same one if the policy cannot."""
        if isinstance(state.scale, float) and self._rule is not None:
            return self._rule.backoff(state)
        return self.policy.backoff(self.arrays(state))

    def settle(self, state: ScaleState, values: Sequence[int]) -> None:
        """Replace a lazy state by the values just read, or its graph would hold all iterations before."""
        if self._state is state:
            self._state = placed(state, self.checked(values))

    def checked(self, values: Sequence[int]) -> dict[str, float]:
        """Return a fingerprint that was read as numbers by name; BackendError for what no policy makes."""
        return _possible(values, self._largest, self.home)

    def observe(self, scale: float, version: int) -> None:
        """Do nothing: no verdict is late here."""

    def numbers(self) -> dict[str, float]:
        """Return the state as numbers, by the names of its fields. One host read."""
        if self._state is None:
            return {"scale": self.policy.init_scale, **self._restored}
        return self._numbers_of(self._state)._asdict()

    def scale(self) -> float:
        """Return the scale as a number. One host read."""
        return self.numbers()["scale"]

    def replace_scale(self, scale: float) -> None:
        """Set the scale and keep the trackers."""
        if self._state is None:
            self._restored["scale"] = scale
        else:
            self._state = replaced(self._state, {"scale": scale})

    def replace_setting(self, name: str, value: float) -> None:
        """Set one of a DynamicScale's settings."""
        self.policy = with_setting(self.policy, name, value)
        self._largest = largest_trackers(self.policy, self._largest)
        if self._state is not None:
            self.take(self._state)

    def load(self, policy: Policy, numbers: dict[str, Any], *, keep: bool) -> None:  # noqa: ARG002
        """Go on with another policy and other numbers; the arrays of the present state are never written to."""
        self.policy = policy
        self._largest = largest_trackers(policy, [numbers.get(name, 0) for name in ScaleState._fields[1:]])
        if self._state is None:
            self._restored = numbers
        else:
            self.take(replaced(self._state, numbers))

    def __getstate__(self) -> dict[str, float]:
        """Return the state to pickle: numbers in place of arrays; the next array says where the state goes."""
        restored = dict(self._restored) if self._state is None else self.numbers()
        forgotten = dict.fromkeys(("_state", "home", "_rule", "_like"))
        kept = {name: value for name, value in self.__dict__.items() if name != "backend"}
        return kept | {"_restored": restored} | forgotten


def require_values(like: Array | None) -> None:
    """Raise InvalidTypeError for a tensor on torch's meta device, where a state would have no values."""
    if getattr(getattr(like, "device", None), "type", None) == "meta":
        msg = (
            f"the state cannot be made beside a tensor without values, got {shown(like)}: materialize the model, and "
            f"scale its loss on a device that computes"
        )
        raise InvalidTypeError(msg)


def replaced(state: ScaleState, numbers: dict[str, float]) -> ScaleState:
    """Return a state of arrays or of numbers with some fields replaced."""
    return state._replace(**numbers) if isinstance(state.scale, float) else placed(state, numbers)


def placed(state: ScaleState, numbers: dict[str, float]) -> ScaleState:
    """Return a state with some fields replaced by numbers, in the library and on the device of the others."""
    xp = array_namespace(state.scale)
    where = registry.backend_for(state.scale).placement(state.scale)
    arrays = {
        name: xp.asarray(number, dtype=getattr(state, name).dtype, device=where) for name, number in numbers.items()
    }
    return state._replace(**arrays)


def numbers_of(state: ScaleState, backend: Backend, largest: Trackers = ANY_TRACKERS) -> dict[str, float]:
    """Return a state of arrays as numbers by name: one host read. BackendError for what no policy makes."""
    return _possible(backend.read(backend.fingerprint(state)), largest, array_namespace(state.scale))


def _possible(values: Sequence[int], largest: Trackers, library: Any) -> dict[str, float]:
    """Return a fingerprint as numbers by name, having checked that a policy can have made it."""
    bits, *trackers = values
    scale = validation.float32_from_bits(bits)
    if 0.0 < scale < math.inf and all(0 <= tracker <= most for tracker, most in zip(trackers, largest, strict=True)):
        return dict(zip(ScaleState._fields, (scale, *trackers), strict=True))
    names = ScaleState._fields[1:]
    found = ", ".join(f"{name}={tracker}" for name, tracker in zip(names, trackers, strict=True))
    most = ", ".join(f"{name} {most}" for name, most in zip(names, largest, strict=True))
    msg = (
        f"the host has read a state from {library.__name__} that no policy makes, got scale={scale!r}, {found}; the "
        f"scale is finite and above 0, and no tracker negative or above {most}. A function of the library, such as "
        f"concat, gives wrong values for arrays this small, or something else has written to the state; the scaler has "
        f"not taken it over. gradscale.testing.check_backend may show which; try another version of the library"
    )
    raise BackendError(msg)


def largest_trackers(policy: Policy, reached: Sequence[int] = ()) -> Trackers:
    """Return the largest values that the trackers of a policy's states can have."""
    said: Trackers = getattr(policy, "largest_trackers", ANY_TRACKERS)
    return tuple(map(max, said, reached)) if reached else said


def with_setting(policy: Policy, name: str, value: Any) -> DynamicScale:
    """Return a DynamicScale with one of its settings replaced; InvalidTypeError for another policy."""
    if not isinstance(policy, DynamicScale):
        msg = f"{name} can be set only of a DynamicScale, got the policy {shown(policy)}"
        raise InvalidTypeError(msg)
    # A validated copy: nothing is changed when the value is refused.
    changed = dataclasses.replace(policy, **{name: value})
    # The rule of another policy would be traced.
    return policy if getattr(changed, name) == getattr(policy, name) else changed


def checked_scale(new_scale: object, policy: Policy) -> float:
    """Return a scale that a user sets, a number or a 1-element array, as a float within the policy's bounds."""
    with reading("new_scale"):
        shape = getattr(new_scale, "shape", None)
        if shape is None or isinstance(new_scale, float):
            value = validation.scale("new_scale", new_scale)
        else:
            value = _read_scale(new_scale)
    if policy.clamp(value) != value:
        msg = f"new_scale must lie within the policy's bounds, got {shown(new_scale)} with {shown(policy)}"
        raise InvalidValueError(msg)
    return value


def _read_scale(array: Array) -> float:
    xp = array_namespace(array)
    is_real = kind_of(array) in (Kind.HALF, Kind.WIDE) or "int" in str(array.dtype)
    if math.prod(array.shape) != 1 or not is_real:
        msg = f"new_scale must be a number or a real array of 1 element, got {shown(array)}"
        raise InvalidTypeError(msg)
    wide_dtype = xp.float64 if has_float64(xp, device(array)) else xp.float32
    wide = xp.reshape(xp.astype(array, wide_dtype), ())
    smallest, largest = (xp.full_like(wide, x) for x in (validation.SMALLEST_NORMAL, validation.LARGEST_FLOAT32))
    valid = xp.logical_and(wide >= smallest, wide <= largest)
    scale = xp.astype(xp.where(valid, wide, xp.full_like(wide, 1.0)), xp.float32)
    state = DynamicScale().init(scale)._replace(scale=xp.asarray(scale))
    backend = registry.backend_for(state.scale)
    flag = xp.reshape(xp.astype(valid, xp.int32), (1,))
    is_valid, bits, *_ = backend.read(xp.concat([flag, backend.fingerprint(state)]))
    if not is_valid:
        msg = f"new_scale must be above 0, finite and a normal float32, got {shown(array)}"
        raise InvalidValueError(msg)
    return validation.float32_from_bits(bits)
