"""TensorState: a state that keeps its tensors, so that frameworks and captured graphs see the scale; TensorScaling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from gradscale import DynamicScale, StaticScale, registry
from gradscale.core import tree
from gradscale.core.backend import Backend
from gradscale.core.messages import shown
from gradscale.core.protocols import Array, Policy, ScaleState
from gradscale.errors import InvalidTypeError, InvalidValueError
from gradscale.scaler.iteration import Iteration
from gradscale.scaler.live_state import numbers_of, placed, require_values, with_setting
from gradscale_torch.verdicts import is_capturing, moved, refuse_capture

__all__ = ["TensorScaling", "TensorState", "copied_into"]

Tensor = torch.Tensor

_CPU = torch.device("cpu")
_State = TypeVar("_State", bound=tuple[Any, ...])


class TensorState:
    """The state of a scaler: tensors adapted in place, by torch's kernel if that is the whole rule.

    See :class:`gradscale.scaler.parts.LiveState`. A rank without gradients has its state on ``device``.
    """

    def __init__(self, policy: Policy, device: torch.device | str | int | None) -> None:
        self.policy = policy
        self.version = 0
        self._device = device
        self._state: ScaleState | None = None
        # Numbers that a checkpoint or the user has set before there was a tensor.
        self._restored: dict[str, float] = {}
        # The policy if torch's kernel may adapt the state by it: the growth tracker must be below the growth interval.
        self._kernels_rule: DynamicScale | None = None
        # The smallest scale that there can be now, as far as the CPU knows without a read.
        self._floor = 0.0
        # The version in which the scale was last set, and not adapted.
        self._replaced_in = 0
        # Whether a captured graph adapts the state, and so lowers the scale without the CPU.
        self._is_replayed = False
        self.is_scaled_unseen = False

    @property
    def is_made(self) -> bool:
        """Whether there is a state."""
        return self._state is not None

    @property
    def is_known(self) -> bool:
        """Whether there is a state, or numbers that were loaded or set."""
        return self._state is not None or len(self._restored) > 0

    def tensors(self) -> ScaleState | None:
        """Return the state, to whose tensors frameworks may write; None without one."""
        return self._state

    @property
    def first(self) -> dict[str, float]:
        """The numbers that a state will be made of."""
        return {"scale": self.policy.init_scale, "growth_tracker": 0, **self._restored}

    def replace_first(self, name: str, value: float) -> None:
        """Set one of the numbers that a state will be made of; one that is made keeps its own."""
        if self._state is None:
            self._restored[name] = value

    def backend_for(self, x: Array) -> Backend:
        """Return the adapter of an array; a loss may be of another library."""
        return registry.backend_for(x)

    def example(self) -> Tensor:
        """Return a 0-d tensor on the device that is trained on."""
        return torch.zeros((), device=self._device)

    def current(self, like: Array | None = None) -> ScaleState:
        """Return the state, made on the device of ``like`` if there is none yet."""
        if self._state is None:
            require_values(like)
            home = like.device if isinstance(like, Tensor) else _CPU
            refuse_capture(home, "call scale() once before, or every replay would begin with the first scale again")
            self._floor = self.first["scale"]
            with torch.inference_mode(False):
                state = placed(self.policy.init(torch.zeros((), device=_CPU)), self._restored)
                # Filled by kernels, for which nobody waits as for copies of the CPU's memory.
                filled = (torch.full((), field.item(), dtype=field.dtype, device=home) for field in state)
                self._state = ScaleState(*filled)
            self._restored = {}
        return self._state

    def take(self, state: ScaleState) -> None:
        """Go on with a state from elsewhere, such as a lowered one, in the present tensors."""
        self._note_replaced()
        self._state = state if self._state is None else copied_into(self._state, state)

    def advance(self, counts: Sequence[Array], held: Sequence[Array] = ()) -> None:
        """Adapt the state in place, so that a captured CUDA graph sees the new scale. No host read.

        If all of ``held`` are true nothing is changed.
        """
        state = self._state or self.current()
        home = state.scale.device
        if held:
            before = ScaleState(*map(torch.clone, state))
            self.advance(counts)
            is_held = torch.stack([moved(flag, home) for flag in held]).all()
            for field, old in zip(state, before, strict=True):
                field.copy_(torch.where(is_held, old, field))
            return
        self.version += 1
        if home.type != "cpu":
            self._floor *= _smallest_factor(self.policy)
            self._is_replayed = self._is_replayed or is_capturing(home)
        found = counts[0] if len(counts) == 1 else torch.stack(list(counts)).amax()
        rule = self._kernels_rule
        if rule is not None:
            factors = rule.growth_factor, rule.backoff_factor, rule.growth_interval
            torch._amp_update_scale_(state.scale, state.growth_tracker, found, *factors)
            if home.type != "cpu" or state.scale.item() < rule.min_scale:
                # The kernel goes on into the subnormals, and to 0.
                state.scale.clamp_(min=rule.min_scale)
            # A new tuple of the same tensors: values kept for the old one are out of date.
            self._state = ScaleState(*state)
            return
        self._kernels_rule = _as_kernels_rule(self.policy)
        self._state = copied_into(state, self.policy.update(state, nonfinite=found))

    def at_min_scale(self, state: ScaleState) -> Tensor | None:
        """Return whether an overflow now must be raised, as the policy says."""
        return self.policy.at_min_scale(state)

    def arrays(self, state: ScaleState) -> ScaleState:
        """Return a state, which is of tensors."""
        return state

    def refuse_capture(self, what: str) -> None:
        """Raise CallOrderError while a graph of the state's device is captured; ``what`` says what to do instead."""
        if self._state is not None and self._state.scale.device.type != "cpu":
            refuse_capture(self._state.scale.device, what)

    def lowered(self, state: ScaleState) -> ScaleState:
        """Return a state with its scale backed off once; the very same one if the policy cannot."""
        return self.policy.backoff(state)

    def settle(self, state: ScaleState, values: Sequence[int]) -> None:
        """Do nothing: torch computes at once."""

    def observe(self, scale: float, version: int) -> None:
        """Take note of the scale that a verdict carries: since that version it has been backed off that often."""
        if version >= self._replaced_in:
            self._floor = scale * _smallest_factor(self.policy) ** (self.version - version)

    def may_be_below_one(self, state: ScaleState) -> bool:
        """Tell whether the scale may be below 1, so that a finite gradient may overflow when it is divided."""
        if state.scale.device.type == "cpu":
            return bool(state.scale.item() < 1.0)
        return self._is_replayed or self._floor < 1.0 or is_capturing(state.scale.device)

    def numbers(self) -> dict[str, float]:
        """Return the state as numbers, by the names of its fields. One host read."""
        if self._state is None:
            return {"scale": self.policy.init_scale, **self._restored}
        return numbers_of(self._state, self.backend_for(self._state.scale))

    def scale(self) -> float:
        """Return the scale as a number. One host read."""
        return float(self.first["scale"] if self._state is None else self._state.scale)

    def replace_scale(self, scale: float) -> None:
        """Set the scale in place, and keep the trackers."""
        self._note_replaced(scale)
        if self._state is None:
            self._restored["scale"] = scale
        else:
            self._state.scale.fill_(scale)
            self._state = ScaleState(*self._state)

    def _note_replaced(self, scale: float = 0.0) -> None:
        """Ignore verdicts that were begun before now; 0 stands for a scale that the CPU does not know."""
        self._floor = scale
        self.version += 1
        self._replaced_in = self.version

    def replace_field(self, name: str, value: Tensor) -> None:
        """Put a tensor of a framework's in the place of a field, by identity if it fits."""
        if not isinstance(value, Tensor):
            msg = f"_{name} must be a tensor, got {shown(value)}: to begin anew, load a state dict or make a new scaler"
            raise InvalidTypeError(msg)
        state = self.current(value)
        field: Tensor = getattr(state, name)
        fitting = moved(value, field.device, dtype=field.dtype)
        self._state = state._replace(**{name: fitting.reshape(()) if fitting.shape else fitting})
        self._kernels_rule = None
        self._note_replaced()

    def replace_setting(self, name: str, value: float) -> None:
        """Set one of a DynamicScale's settings."""
        self.policy = with_setting(self.policy, name, value)
        self._kernels_rule = None

    def load(self, policy: Policy, numbers: dict[str, float], *, keep: bool) -> None:
        """Go on with another policy and other numbers, in the same tensors unless the present ones are in use."""
        self.policy = policy
        self._kernels_rule = None
        self._note_replaced()
        if self._state is None:
            self._restored = numbers
            return
        loaded = placed(self._state, numbers)
        self._state = loaded if keep else copied_into(self._state, loaded)

    def __getstate__(self) -> dict[str, Any]:
        """Return numbers to pickle instead of tensors, so that the next tensor says where the state goes."""
        restored = dict(self._restored) if self._state is None else self.numbers()
        forgotten = {"_state": None, "_kernels_rule": None, "_is_replayed": False, "_floor": 0.0}
        return self.__dict__ | {"_restored": restored} | forgotten


def _smallest_factor(policy: Policy) -> float:
    """Return what one update may multiply the scale by at least; 0 if it is not known."""
    if type(policy) is DynamicScale:
        return policy.backoff_factor
    return 1.0 if type(policy) is StaticScale else 0.0


def _as_kernels_rule(policy: Policy) -> DynamicScale | None:
    """Return a policy if torch's kernel and a lower bound are the whole of its rule."""
    if type(policy) is not DynamicScale:
        return None
    is_plain = (
        policy.growth_after == "interval"
        and policy.hysteresis == 1
        and policy.tolerance is None
        and policy.max_scale is None
        and policy.at_min == "clamp"
    )
    return policy if is_plain else None


def copied_into(state: _State, new: _State) -> _State:
    """Write a state, a named tuple of tensors, into the tensors of another, and return these as a new tuple."""
    if state[0].is_inference():
        # They were made in torch's inference mode, and cannot be written outside of it.
        return type(state)(*map(torch.clone, new))
    for tensor, value in zip(state, new, strict=True):
        tensor.copy_(value)
    return type(state)(*state)


class TensorScaling:
    """The way of outputs through ``scale()``: with torch's promotion, one by one, iterators when they are consumed.

    See :class:`gradscale.scaler.parts.Scaling`. With ``keeps_dtype`` a half-precision loss comes back in its dtype.
    """

    def __init__(self, *, keeps_dtype: bool) -> None:
        self._keeps_dtype = keeps_dtype

    def scale(
        self, outputs: object, present: Callable[[], Iteration], look: Callable[[Sequence[object]], None] | None
    ) -> object:
        """Return outputs with every tensor multiplied.

        Lists, tuples, named tuples and dicts keep their kinds; any other iterable as an iterator, as torch
        has it, so that an unconsumed one scales nothing.
        """

        def multiply(tensor: Tensor) -> Tensor:
            iteration = present()
            state = iteration.in_force(tensor)
            iteration.note_scaled(state)
            device = tensor.device
            if device.type != "cpu" and is_capturing(device):
                iteration.live.is_scaled_unseen = True
            if look is not None:
                look((tensor,))
            scaled = tensor * moved(state.scale, device)
            return scaled.to(tensor.dtype) if self._keeps_dtype else scaled

        return multiply(outputs) if isinstance(outputs, Tensor) else _mapped(outputs, multiply)


def _mapped(outputs: object, multiply: Callable[[Tensor], Tensor]) -> object:
    leaves, rebuild = tree.flatten(outputs, _is_leaf)
    return rebuild([_scaled(leaf, multiply) for leaf in leaves])


def _is_leaf(node: object) -> bool:
    return isinstance(node, Tensor) or not isinstance(node, (list, tuple, Mapping))


def _scaled(leaf: object, multiply: Callable[[Tensor], Tensor]) -> object:
    if isinstance(leaf, Tensor):
        return multiply(leaf)
    if isinstance(leaf, Iterable) and not isinstance(leaf, (str, bytes)):
        return (_mapped(value, multiply) for value in leaf)
    msg = f"outputs must be a Tensor or an iterable of Tensors, got {shown(leaf)} of type {type(leaf).__name__}"
    raise InvalidValueError(msg)
