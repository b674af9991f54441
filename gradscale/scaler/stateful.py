"""StatefulScale: a policy and its state, with settings, state dict and pickling; the part of a scaler that lasts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from array_api_compat import array_namespace, device

from gradscale.core import registry, validation
from gradscale.core.arithmetic import Kind, has_float64, kind_of
from gradscale.core.backend import Backend
from gradscale.core.protocols import Array, Policy, ScaleState
from gradscale.core.vector import Packer
from gradscale.errors import InvalidTypeError, InvalidValueError
from gradscale.policies.dynamic import DynamicScale
from gradscale.scaler import checkpoint
from gradscale.scaler.iteration import Iteration, Progress

__all__ = ["StatefulScale"]

_POLICY_MEMBERS = ("init_scale", "init", "update", "backoff", "clamp", "exhausted")


class StatefulScale:
    """A policy and its state, which is made on the library and device of the first array that comes along.

    Parameters
    ----------
    policy : Policy or None
        The rule; instead of ``factors``.
    factors : dict
        Arguments of :class:`DynamicScale`, None where not given.
    enabled : bool
        Whether the scaler does anything.
    backend : str, Backend or None
        An adapter or its registered name; None for the one of the arrays' library.
    """

    def __init__(
        self, policy: Policy | None, factors: dict[str, Any], enabled: bool, backend: str | Backend | None
    ) -> None:
        given = {name: value for name, value in factors.items() if value is not None}
        if policy is not None and given:
            msg = f"give policy= or {', '.join(f'{name}=' for name in given)}, not both, got {policy!r} and {given!r}"
            raise InvalidValueError(msg)
        if policy is not None:
            validation.policy(policy, _POLICY_MEMBERS)
        if isinstance(backend, str):
            registry.array_backend(backend)
        elif backend is not None and not isinstance(backend, Backend):
            msg = (
                f"backend must be a registered name ({', '.join(registry.names())}) or an instance of a class that "
                f"derives from gradscale.Backend, got {backend!r}"
            )
            raise InvalidTypeError(msg)
        self._enabled = validation.boolean("enabled", enabled)
        self._policy: Policy = DynamicScale(**given) if policy is None else policy
        self._backend = backend
        self._state: ScaleState | None = None
        self._restored: dict[str, Any] = {}
        self._iteration = Iteration(1)
        self._packer = Packer()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(policy={self._policy!r}, enabled={self._enabled})"

    def get_scale(self) -> float:
        """Return the scale as a float, 1.0 when disabled. One host read."""
        if not self._enabled:
            return 1.0
        scale: float = self._snapshot()["scale"]
        return scale

    def is_enabled(self) -> bool:
        """Return whether the scaler is enabled."""
        return self._enabled

    def get_growth_factor(self) -> float:
        """Return the growth factor; 1.0 for a policy without one."""
        return float(getattr(self._policy, "growth_factor", 1.0))

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor: above 1."""
        self._replace_setting("growth_factor", new_factor)

    def get_backoff_factor(self) -> float:
        """Return the backoff factor; 1.0 for a policy without one."""
        return float(getattr(self._policy, "backoff_factor", 1.0))

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor: between 0 and 1."""
        self._replace_setting("backoff_factor", new_factor)

    def get_growth_interval(self) -> int:
        """Return the growth interval in clean steps; 1 for a policy without one."""
        return int(getattr(self._policy, "growth_interval", 1))

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval, in clean steps; a run that is already as long grows at its next clean step."""
        self._replace_setting("growth_interval", new_interval)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain Python values; empty when disabled. One host read.

        Keys: torch's five (``scale``, ``growth_factor``, ``backoff_factor``, ``growth_interval``, ``_growth_tracker``),
        so that torch's scalers can load it; ``version``, ``iteration``, the other trackers, and ``policy`` with every
        setting. Call it between iterations.
        """
        if not self._enabled:
            return {}
        return checkpoint.build(self._policy, self._snapshot(), self._iteration.number)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict of gradscale's or torch's scalers; does nothing when disabled.

        The policy's settings in it replace this scaler's; leave out the key ``policy`` to keep them (torch's three
        factors are taken over all the same). A scale outside of the bounds is moved to the nearer one.

        Raises
        ------
        StateDictError
            When it is empty, lacks one of torch's five keys, holds a bad value, or was written by a newer version;
            every value is checked first, and nothing is changed.
        CallOrderError
            In the middle of an iteration.
        """
        if not self._enabled:
            return
        self._iteration.require_boundary("load_state_dict()")
        loaded = checkpoint.parse(state_dict, self._policy)
        self._policy = loaded.policy
        before, self._iteration = self._iteration, Iteration(loaded.iteration)
        if before.failure is None:
            # Gradients under way are unscaled by what they were scaled with.
            self._iteration.scaled, self._iteration.state = before.scaled, before.state
        if self._state is None:
            self._restored = loaded.snapshot
        else:
            self._state = _place(self._state, loaded.snapshot)

    def __getstate__(self) -> dict[str, Any]:
        self._iteration.require_boundary("pickling or copying a scaler")
        kept = self.__dict__.copy()
        # Numbers instead of arrays: they belong to no device, and the next array says where the state goes.
        kept["_restored"] = dict(self._restored) if self._state is None else self._snapshot()
        kept["_state"] = None
        kept["_packer"] = Packer()
        kept["_iteration"] = (self._iteration.number, self._iteration.scaled)
        return kept

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__dict__.update(kept)
        number, scaled = kept["_iteration"]
        self._iteration = Iteration(number)
        self._iteration.scaled = scaled

    def _current(self, like: Array | None) -> ScaleState:
        """Return the state, made where ``like`` is if there is none yet."""
        if self._state is None:
            if like is None:
                self._iteration.wrong_order("no array has been seen yet, so it is not known where the scale belongs")
            self._state = _place(self._policy.init(like), self._restored)
            self._restored = {}
        return self._state

    def _snapshot(self) -> dict[str, Any]:
        """Return the numbers of the state by the names of its fields. One host read."""
        if self._state is None:
            return {"scale": self._policy.init_scale, **self._restored}
        state = self._state
        bits, *trackers = self._backend_for(state.scale).read(self._backend_for(state.scale).fingerprint(state))
        names = ScaleState._fields[1:]
        return {"scale": validation.float32_from_bits(bits), **dict(zip(names, trackers, strict=True))}

    def _set_scale(self, scale: float) -> None:
        """Replace the scale and keep the trackers."""
        if self._state is None:
            self._restored["scale"] = scale
        else:
            self._state = _place(self._state, {"scale": scale})

    def _refuse_tracing(self, like: Array, what: str) -> None:
        """Raise where a compiler would take the scale of this moment for a constant."""
        self._backend_for(like).refuse_tracing(what)

    def _settle(self, progress: Progress, agreed: Sequence[int]) -> None:
        """Put what the host has read in the place of what a lazy library only plans.

        Its plans would otherwise hold all iterations before, and each read compute them again.
        """
        if not hasattr(progress.agreed, "compute"):
            return
        xp = array_namespace(progress.agreed)
        progress.agreed = xp.asarray(agreed, dtype=xp.int32)
        if self._state is not None and self._state is self._packer.packed:
            fields = (validation.float32_from_bits(agreed[2]), *agreed[3:6])
            self._state = _place(self._state, dict(zip(ScaleState._fields, fields, strict=True)))

    def _checked_scale(self, new_scale: Any) -> float:
        """Return a new scale as a float: a number, or a 1-element array, which the host reads."""
        shape = getattr(new_scale, "shape", None)
        if shape is None or isinstance(new_scale, float):
            value = validation.scale("new_scale", new_scale)
        else:
            value = self._read_scale(new_scale)
        if self._policy.clamp(value) != value:
            msg = f"new_scale must lie within the policy's bounds, got {new_scale!r} with {self._policy!r}"
            raise InvalidValueError(msg)
        return value

    def _read_scale(self, array: Array) -> float:
        xp = array_namespace(array)
        is_real = kind_of(array) in (Kind.NARROW, Kind.WIDE) or "int" in str(array.dtype)
        if math.prod(array.shape) != 1 or not is_real:
            msg = f"new_scale must be a number or a real array of 1 element, got {array!r}"
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
            msg = f"new_scale must be above 0, finite and a normal float32, got {array!r}"
            raise InvalidValueError(msg)
        return validation.float32_from_bits(bits)

    def _replace_setting(self, name: str, value: Any) -> None:
        if not isinstance(self._policy, DynamicScale):
            msg = f"{name} can be set only of a DynamicScale, got the policy {self._policy!r}"
            raise InvalidTypeError(msg)
        # A validated copy: nothing is changed when the value is refused.
        self._policy = dataclasses.replace(self._policy, **{name: value})

    def _backend_for(self, x: Array) -> Backend:
        if self._backend is None:
            return registry.backend_for(x)
        if isinstance(self._backend, str):
            return registry.array_backend(self._backend)
        return self._backend


def _place(state: ScaleState, numbers: dict[str, Any]) -> ScaleState:
    """Return a state with some fields replaced by numbers, in the library and on the device of the others."""
    xp = array_namespace(state.scale)
    where = registry.backend_for(state.scale).placement(state.scale)
    arrays = {
        name: xp.asarray(number, dtype=getattr(state, name).dtype, device=where) for name, number in numbers.items()
    }
    return state._replace(**arrays)
