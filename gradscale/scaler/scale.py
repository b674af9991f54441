"""CurrentScale: the policy, and the state in force as 0-d arrays beside the first array that comes along.

If the host has the numbers of the arrays, as those of NumPy, a DynamicScale adapts them by its rule for numbers.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from array_api_compat import array_namespace, is_array_api_obj

from gradscale.core import registry, validation
from gradscale.core.arithmetic import Kind, kind_of
from gradscale.core.backend import Backend
from gradscale.core.gradients import norm_bits
from gradscale.core.protocols import Array, Namespace, Numbers, Policy, ScaleState
from gradscale.errors import BackendError, InvalidTypeError, InvalidValueError, reading, short_repr
from gradscale.policies.dynamic import DynamicScale, StaticScale, next_numbers

_Trackers: TypeAlias = tuple[float, ...]
Saved: TypeAlias = list[Any] | ScaleState | Array
"""A state: as a list of numbers, if the host has them; as its fingerprint, if others write to its arrays."""

# What trackers may reach if the policy does not say.
_ANY_TRACKERS: _Trackers = (validation.LARGEST_INT32,) * 3


class Use(enum.Enum):
    """What a state was used for since it began or was loaded, which tells whether gradients can be scaled by it."""

    NONE = "nothing was scaled, so no gradients can be"
    LEFTOVERS = "nothing was scaled, but gradients of an iteration that was abandoned may be"
    LOADED = "nothing was scaled since it was loaded, but gradients before may be"
    ADAPTED = "updates have adapted it, and nothing was scaled but by a framework itself"
    ADAPTED_LEFTOVERS = "the same, and gradients of an iteration that was abandoned may be scaled"
    SCALED = "outputs were scaled by it"

    def __init__(self, _: str) -> None:
        self.is_fresh = self.name in ("NONE", "LEFTOVERS", "LOADED")
        self.has_leftovers = self.name in ("LEFTOVERS", "ADAPTED_LEFTOVERS")
        self.is_scaled = self.name == "SCALED"


_ADAPTED = {Use.NONE: Use.ADAPTED, Use.LEFTOVERS: Use.ADAPTED_LEFTOVERS, Use.LOADED: Use.SCALED}
# A load goes the other way.
_LOADED = {after: before for before, after in _ADAPTED.items()}


class CurrentScale:
    """The state of a scaler, and the adapter and namespace of its library.

    ``adapter`` is the one of ``backend``, as torch's scalers pass it, or plain ``Backend()``; ``state_adapter`` is that
    of the state's library. ``updates`` tells ``note_scale`` how old a verdict's scale is.
    """

    state_adapter: Backend

    def __init__(self, policy: Policy, backend: str | Backend | None = None) -> None:
        if backend is not None and not isinstance(backend, (str, Backend)):
            names = ", ".join(registry.names())
            expected = f"a registered name ({names}) or an instance of a class that derives from gradscale.Backend"
            raise validation.wrong_type(backend, "backend", expected)
        self.policy, self.is_static = policy, type(policy) is StaticScale
        self.updates = 0
        self.use = Use.NONE
        # A scale that the host knows, and the number of updates before it; 0 if it knows none. And the smallest factor
        # of an update since then, by any rule that was in force.
        self._seen = 0.0, 0
        self._least_factor = _smallest_factor(policy)
        self.xp: Namespace = None
        self.state: ScaleState | None = None
        self._use(backend)
        # What a checkpoint or the user has set before there was an array.
        self._restored: dict[str, float] = {}
        # The largest trackers that the policies so far allow.
        self._largest = self._reachable(policy)
        # The number of updates before the scale was last set, and not adapted.
        self._replaced_at = 0

    def _use(self, backend: str | Backend | None) -> None:
        self._backend = backend
        self.adapter = registry.array_backend(backend) if isinstance(backend, str) else backend or Backend()

    @property
    def is_set(self) -> bool:
        """Whether there is a state, or numbers that were loaded or set."""
        return self.state is not None or len(self._restored) > 0

    @property
    def first(self) -> dict[str, float]:
        """The numbers of the first state."""
        return {"scale": self.policy.init_scale, **self._restored}

    def set_initial(self, name: str, value: float) -> None:
        """Set one of the numbers of the first state, if there is no state yet."""
        if self.state is None:
            self._restored[name] = value

    def backend_for(self, x: Array) -> Backend:
        """Return the adapter of an array: the scaler's own, or the one of the array's library."""
        return registry.backend_for(x) if self._backend is None else self.adapter

    def example(self) -> Array | None:
        """Return an array of the scaler's own adapter; None if it has none."""
        return None if self._backend is None else self.adapter.example()

    def materialize(self, like: Array | None = None) -> ScaleState:
        """Return the state, a new one in the library and on the device of ``like`` if there is none yet."""
        if self.state is None:
            state = self.adapter.first_state(self.policy, self._restored, like)
            self._seen = self.first["scale"], self.updates
            self._restored = {}
            self.xp, self.state_adapter = array_namespace(state.scale), self.backend_for(state.scale)
            self.state = state
        return self.state

    def at_min_scale(self, state: ScaleState) -> Array | bool | None:
        """Return whether an overflow now must be raised: a bool if the host knows it; None if never."""
        flag = self.policy.at_min_scale(state)
        numbers = None if flag is None or isinstance(flag, bool) else self.state_adapter.peek((flag,))
        return flag if numbers is None else numbers[0] > 0

    def saved(self) -> Saved:
        """Return the state for ``restore``. No host read."""
        state = self.state or self.materialize()
        if self.is_static:
            return state
        return self.state_adapter.peek(state) or (
            self.state_adapter.fingerprint(state) if self.state_adapter.is_shared else state
        )

    def restore(self, saved: Saved) -> None:
        """Go back to a state that was saved before an update that was interrupted; one host read for a fingerprint."""
        state = self.materialize()
        if not isinstance(saved, (list, ScaleState)):
            saved = [*self.checked(self.state_adapter.read(saved))]
        if isinstance(saved, list):
            saved = self.state_adapter.with_numbers(state, saved)
        self.state = self.state_adapter.write_into(state, saved)

    def advance(self, counts: Sequence[Array | int], flags: Sequence[Array], before: Saved) -> None:
        """Adapt the state to the counts of an iteration, unless all ``flags`` (0-d) keep the scale. No host read.

        ``before`` is the state as ``saved`` has just returned it.
        """
        state = self.state or self.materialize()
        self.updates += 1
        if self.use.is_fresh:
            self.mark_adapted()
        if self.is_static:
            return
        count = counts[0] if len(counts) == 1 else self._largest_of(counts)
        is_kept = functools.reduce(self.xp.logical_and, flags) if flags else None
        if isinstance(count, int) and is_kept is None and isinstance(before, list) and self.state_adapter.takes_numbers:
            new = next_numbers(self.policy, before, count)
            if new is not None:
                self.state = self.state_adapter.with_numbers(state, new, before)
                return
        self.state = self.state_adapter.adapt(self.policy, state, count, is_kept, self.scale_lower_bound(state))

    def _largest_of(self, counts: Sequence[Array | int]) -> Array | int:
        """Return a count of all optimizers; what the host knows is an overflow, or says nothing."""
        count = max([one for one in counts if isinstance(one, int)], default=0)
        late = [one for one in counts if not isinstance(one, int)]
        return functools.reduce(self.xp.maximum, late) if late and not count else count

    def set_state(self, state: ScaleState) -> None:
        """Make the state that a closure's retries have backed off the scaler's own."""
        self._note_replaced()
        self.state = self.state_adapter.write_into(self.materialize(), state)

    def set_read_values(self, state: ScaleState, values: Sequence[int]) -> None:
        """Replace a lazy state by the values just read, or its graph would hold all iterations before."""
        if self.state is state:
            self.state = self.state_adapter.with_numbers(state, self.checked(values))

    def require_possible(self, scale: float, state: ScaleState | None = None) -> None:
        """Raise BackendError for the scale of a verdict that no policy makes, to whose array others may write.

        Of a ``state`` whose scale is 1 by ``is_one`` no other is possible.
        """
        is_possible = scale == 1.0 if state is not None and self.is_one(state) else 0.0 < scale < math.inf
        if self.state_adapter.is_shared and not is_possible:
            msg = (
                f"gradients were divided by a scale that no policy makes, got scale={scale!r}: something else "
                f"has written to the scaler's tensor _scale, or torch gives wrong values. Nothing is stepped; load a "
                f"checkpoint with load_state_dict(), which begins the iteration anew"
            )
            raise BackendError(msg)

    def checked(self, values: Sequence[int]) -> Numbers:
        """Return a fingerprint that was read as numbers; BackendError for numbers that no policy makes."""
        bits, *trackers = values
        scale = validation.float32_from_bits(bits)
        self.require_possible(scale)
        return self._possible(Numbers(scale, *trackers))

    def note_scale(self, scale: float, updates: int) -> None:
        """Note the scale that a verdict carries, which was the one after so many updates."""
        if updates >= self._replaced_at:
            self._seen = scale, updates

    def scale_lower_bound(self, state: ScaleState | None) -> float:
        """Return the smallest value that the scale of a state can have, as far as the host knows without a read."""
        scale, updates = self._seen
        return scale * self._least_factor ** (self.updates - updates) if state is self.state else 0.0

    def is_one(self, state: ScaleState | None) -> bool:
        """Tell whether the scale of a state is 1, and stays so, as far as the host knows without a read."""
        if not self.is_static:
            return False
        # Something else may have written to it.
        numbers = [self.first["scale"]] if state is None else self.state_adapter.peek(state[:1])
        return (self.scale_lower_bound(state) if numbers is None else numbers[0]) == 1.0

    @property
    def never_scales(self) -> bool:
        """Whether the scale is 1 for good, as far as the host knows without a read: messages speak of none then."""
        return self.is_one(self.state)

    def _note_replaced(self, scale: float = 0.0) -> None:
        """Ignore verdicts that were begun before now; 0 stands for a scale that the host does not know."""
        self.updates += 1
        self._seen, self._replaced_at = (scale, self.updates), self.updates

    def numbers(self) -> dict[str, float]:
        """Return the state as numbers, by their names: one host read. BackendError for some that no policy makes."""
        if self.state is None:
            return self.first
        backend, values = self.state_adapter, self.state_adapter.peek(self.state)
        if values is None:
            return self.checked(backend.read(backend.fingerprint(self.state)))._asdict()
        return self._possible(Numbers(*values))._asdict()

    def scale(self) -> float:
        """Return the scale as a number. One host read."""
        numbers = None if self.state is None else self.state_adapter.peek(self.state[:1])
        return self.numbers()["scale"] if numbers is None else numbers[0]

    def set_scale(self, scale: float) -> None:
        """Set the scale and keep the trackers."""
        self._note_replaced(scale)
        self._replace({"scale": scale})

    def set_field(self, name: str, value: Array) -> None:
        """Replace a field by an array of a framework's."""
        self.mark_adapted()
        self._note_replaced()
        self.state = self.materialize(value)._replace(**{name: value})

    def set_policy_setting(self, name: str, value: Any) -> None:
        """Set one of a DynamicScale's settings."""
        policy = self.policy
        if not isinstance(policy, DynamicScale):
            msg = f"{name} can be set only of a DynamicScale, got the policy {short_repr(policy)}"
            raise InvalidTypeError(msg)
        # A validated copy: nothing is changed when the value is wrong.
        changed = dataclasses.replace(policy, **{name: value})
        # The rule of another policy would be tried.
        self.policy = policy if getattr(changed, name) == getattr(policy, name) else changed
        self._largest = self._reachable(self.policy, self._largest)
        self._least_factor = min(self._least_factor, _smallest_factor(self.policy))

    def mark_scaled(self) -> None:
        """Note that outputs were scaled by the state."""
        self.use = Use.SCALED

    def mark_adapted(self) -> None:
        """Note that an update, or a framework, has gone on with the state."""
        self.use = _ADAPTED.get(self.use, self.use)

    def mark_unused(self, *, has_leftovers: bool = False) -> None:
        """Treat gradients as unscaled until ``scale`` is called, but for leftovers of an iteration."""
        self.use = Use.LEFTOVERS if has_leftovers or self.use.has_leftovers else Use.NONE

    def load(self, policy: Policy, numbers: Mapping[str, float]) -> None:
        """Go on with another policy and other numbers."""
        self.use = _LOADED.get(self.use, self.use)
        self.policy, self.is_static, self._least_factor = policy, type(policy) is StaticScale, _smallest_factor(policy)
        # Gradients of before may still be divided by the state that made them.
        loaded = [numbers.get(name, 0) for name in ScaleState._fields[1:]]
        self._largest = self._reachable(policy, [*map(max, self._largest, loaded)])
        self._note_replaced(numbers["scale"])
        self._replace(numbers)

    def _replace(self, numbers: Mapping[str, float]) -> None:
        if self.state is None:
            self._restored |= numbers
            return
        fields = [numbers.get(name) for name in ScaleState._fields]
        self.state = self.state_adapter.write_into(self.state, self.state_adapter.with_numbers(self.state, fields))

    def _reachable(self, policy: Policy, reached: Sequence[float] = ()) -> _Trackers:
        said = _ANY_TRACKERS if self.adapter.is_shared else getattr(policy, "largest_trackers", _ANY_TRACKERS)
        return tuple(map(max, said, reached)) if reached else said

    def _possible(self, numbers: Numbers) -> Numbers:
        """Return numbers; BackendError for some that no policy makes."""
        trackers = [*zip(ScaleState._fields[1:], numbers[1:], self._largest, strict=True)]
        if 0.0 < numbers.scale < math.inf and all(0 <= tracker <= most for _, tracker, most in trackers):
            return numbers
        values = ", ".join(f"{name}={value!r}" for name, value in numbers._asdict().items())
        most = ", ".join(f"{name} {most}" for name, _, most in trackers)
        msg = (
            f"the host has read a state from {self.xp.__name__} that no policy makes, got {values}; "
            f"the scale is finite and above 0, and no tracker negative or above {most}. A function of the library, "
            f"such as concat, gives wrong values for arrays this small, or something else has written to the state; "
            f"the scaler has not taken it over. gradscale.testing.check_backend may show which; try another version "
            f"of the library"
        )
        raise BackendError(msg)

    def __getstate__(self) -> dict[str, object]:
        """Return the state to pickle: numbers in place of arrays; the next array says where the state goes."""
        kept = {name: value for name, value in self.__dict__.items() if name not in ("state_adapter", "adapter")}
        restored = dict(self._restored) if self.state is None else self.numbers()
        return kept | {
            "_restored": restored,
            "_seen": (0.0, 0),
            "_backend": copy.copy(self._backend),
            "state": None,
            "xp": None,
        }

    def __setstate__(self, kept: dict[str, object]) -> None:
        self.__dict__.update(kept)
        self._use(self._backend)


def copied(state: ScaleState) -> ScaleState:
    """Return a state in arrays of its own."""
    xp = array_namespace(state.scale)
    return ScaleState(*(xp.asarray(one, copy=True) for one in state))


def _smallest_factor(policy: Policy) -> float:
    """Return the smallest factor that one update may multiply the scale by; 0 for a user's policy."""
    if type(policy) is DynamicScale:
        return policy.backoff_factor
    return 1.0 if type(policy) is StaticScale else 0.0


def checked_scale(new_scale: object, policy: Policy) -> float:
    """Return a scale that a user sets, a number or a 1-element array, as a float within the policy's bounds."""
    with reading("new_scale"):
        is_array = is_array_api_obj(new_scale) and not isinstance(new_scale, float)
        value = validation.scale("new_scale", _number_in(new_scale) if is_array else new_scale)
    if policy.clamp(value) != value:
        msg = f"new_scale must lie within the policy's bounds, got {short_repr(new_scale)} with {short_repr(policy)}"
        raise InvalidValueError(msg)
    return value


def _number_in(x: Array) -> float:
    """Return the scale in an array of one element; one host read."""
    if math.prod(x.shape) != 1 or not (kind_of(x) in (Kind.HALF, Kind.WIDE) or "int" in str(x.dtype)):
        raise validation.wrong_type(x, "new_scale", "a number or a real array of 1 element")
    xp, backend = array_namespace(x), registry.backend_for(x)
    element = xp.reshape(x, ())
    numbers = backend.peek((element,))
    if numbers is not None:
        return float(numbers[0])
    (bits,) = backend.read(xp.reshape(norm_bits(backend, xp.astype(element, xp.float32)), (1,)))
    number = validation.float32_from_bits(bits)
    if not 0.0 < number < math.inf:
        raise validation.wrong_value(x, "new_scale", "above 0, finite and a normal float32")
    return number
