"""TensorState: a state that keeps its tensors, so that hosts and captured graphs see the new scale; TensorScaling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch

import gradscale
from gradscale import registry
from gradscale.core import tree
from gradscale.core.backend import Backend
from gradscale.core.messages import shown
from gradscale.core.protocols import Array, Policy, ScaleState
from gradscale.errors import InvalidValueError
from gradscale.scaler.iteration import Iteration
from gradscale.scaler.live_state import ANY_TRACKERS, largest_trackers, numbers_of, placed, require_values, with_setting
from gradscale_torch import kernels
from gradscale_torch.verdicts import is_capturing, moved, refuse_capture

__all__ = ["TensorScaling", "TensorState"]

Tensor = torch.Tensor

_CPU = torch.device("cpu")


class TensorState:
    """The state of a scaler: tensors adapted in place, by torch's kernel where that is the whole rule.

    Parameters
    ----------
    policy : Policy
        The rule that adapts it.
    device : str, torch.device, int or None
        Where the state is for a rank that has no gradients.
    """

    def __init__(self, policy: Policy, device: torch.device | str | int | None) -> None:
        self.policy = policy
        self.version = 0
        self._device = device
        self._state: ScaleState | None = None
        # What a checkpoint or the user has set before there was a tensor.
        self._restored: dict[str, Any] = {}
        # What the trackers can have reached since the scaler was made, and hosts have had no tensors to write to.
        self._largest = largest_trackers(policy)
        # Whether the growth tracker is below the growth interval, as torch's kernel takes for granted.
        self._is_regular = False
        # The smallest scale that there can be now, as far as the host knows without a read.
        self._floor = 0.0
        # The version in which the scale was last set, and not adapted.
        self._replaced_in = 0
        # Whether a captured graph adapts the state, and so lowers the scale when the host does not know.
        self._is_replayed = False
        # What counts that are 0, and others, are for the kernel.
        self._flags: tuple[Tensor, Tensor] | None = None
        # The scale of a state on the host, and its reciprocal.
        self._inverse: tuple[float, Tensor] | None = None

    @property
    def is_made(self) -> bool:
        """Whether there is a state."""
        return self._state is not None

    @property
    def is_known(self) -> bool:
        """Whether there is a state, or numbers that were loaded or set."""
        return self._state is not None or len(self._restored) > 0

    def tensors(self) -> ScaleState | None:
        """Return the state in its tensors, which hosts may write to; None without one."""
        self._largest = ANY_TRACKERS
        return self._state

    @property
    def first(self) -> dict[str, Any]:
        """The numbers that a state will be made of."""
        return {"scale": self.policy.init_scale, "growth_tracker": 0, **self._restored}

    def replace_first(self, name: str, value: float) -> None:
        """Set one of the numbers that a state will be made of; one that is made keeps its own."""
        if self._state is None:
            self._restored[name] = value
            self._allow(self._restored)

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
            self._floor = float(self._restored.get("scale", self.policy.init_scale))
            with torch.inference_mode(False):
                state = placed(self.policy.init(torch.zeros((), device=_CPU)), self._restored)
                # Filled by kernels, which nobody waits for, as for copies of the host's memory.
                filled = (torch.full((), field.item(), dtype=field.dtype, device=home) for field in state)
                self._state = ScaleState(*filled)
            self._restored = {}
        return self._state

    def inverse(self, scale: Tensor, number: float | None) -> Tensor:
        """Return the reciprocal of a scale, not to be written to; ``number`` is the scale where it is the host's."""
        if number is None:
            return kernels.inverse_of(scale)
        if self._inverse is None or self._inverse[0] != number:
            self._inverse = number, kernels.inverse_of(scale)
        return self._inverse[1]

    def take(self, state: ScaleState) -> None:
        """Go on with a state from elsewhere, such as a lowered one; its tensors are the state's from now on."""
        self._state = state

    def advance(self, counts: Sequence[Array | int]) -> None:
        """Adapt the state in place, so that a captured CUDA graph sees the new scale. No host read."""
        state = self._state or self.current()
        home = state.scale.device
        self.version += 1
        if home.type != "cpu":
            self._floor *= getattr(self.policy, "backoff_factor", 1.0)
            self._is_replayed = self._is_replayed or is_capturing(home)
        if self._flags is None or self._flags[0].device != home:
            self._flags = torch.zeros((), dtype=torch.float32, device=home), torch.ones((), dtype=torch.float32, device=home)
        flags = [count if isinstance(count, Tensor) else self._flags[count > 0] for count in counts]
        found = flags[0] if len(flags) == 1 else torch.stack(flags).amax()
        if self._is_regular and kernels.has_fused_update(self.policy):
            may_fall = found is not self._flags[0]
            kernels.update_in_place(cast(gradscale.DynamicScale, self.policy), state, found, may_fall=may_fall)
            # A new tuple of the same tensors: what is kept of the old one is out of date.
            self._state = ScaleState(*state)
            return
        self._is_regular = True
        self._state = _copied_into(state, self.policy.update(state, nonfinite=found))

    def at_min_scale(self, state: ScaleState) -> Array | None:
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
        """Return a state with its scale backed off once; the very same one where the policy cannot."""
        return self.policy.backoff(state)

    def settle(self, state: ScaleState, values: Sequence[int]) -> None:
        """Do nothing: torch computes at once."""

    def observe(self, scale: float, version: int) -> None:
        """Take note of the scale that a verdict carries: since that version it has been backed off that often."""
        if version < self._replaced_in:
            return
        self._floor = scale
        if version != self.version:
            self._floor *= getattr(self.policy, "backoff_factor", 1.0) ** (self.version - version)

    def may_be_below_one(self, state: ScaleState) -> bool:
        """Tell whether the scale may be below 1, so that a finite gradient may overflow when it is divided."""
        if state.scale.device.type == "cpu":
            return bool(state.scale.item() < 1.0)
        return self._is_replayed or self._floor < 1.0 or is_capturing(state.scale.device)

    def numbers(self) -> dict[str, Any]:
        """Return the state as numbers, by the names of its fields. One host read."""
        if self._state is None:
            return {"scale": self.policy.init_scale, **self._restored}
        return numbers_of(self._state, self.backend_for(self._state.scale), self._largest)

    def scale(self) -> float:
        """Return the scale as a number. One host read."""
        scale: Any = self.first["scale"] if self._state is None else self._state.scale
        return float(scale)

    def replace_scale(self, scale: float) -> None:
        """Set the scale in place, and keep the trackers."""
        self._floor = scale
        self._note_replaced()
        if self._state is None:
            self._restored["scale"] = scale
        else:
            self._state.scale.fill_(scale)
            self._state = ScaleState(*self._state)

    def _note_replaced(self) -> None:
        """Take no more note of verdicts that were begun before now."""
        self.version += 1
        self._replaced_in = self.version

    def replace_field(self, name: str, value: Tensor) -> None:
        """Put a tensor of a host's in the place of a field, by identity where it fits."""
        self.current(value)
        state = self.tensors()
        assert state is not None
        field: Tensor = getattr(state, name)
        placed_value = moved(value, field.device, dtype=field.dtype)
        self._state = state._replace(**{name: placed_value.reshape(()) if placed_value.shape else placed_value})
        self._is_regular = False

    def replace_setting(self, name: str, value: Any) -> None:
        """Set one of a DynamicScale's settings."""
        self.policy = with_setting(self.policy, name, value)
        self._largest = largest_trackers(self.policy, self._largest)
        self._is_regular = False

    def load(self, policy: Policy, numbers: dict[str, Any], *, keep: bool) -> None:
        """Go on with another policy and other numbers, in the same tensors unless the present ones are in use."""
        self.policy = policy
        self._allow(numbers)
        self._is_regular = False
        self._floor = 0.0
        self._note_replaced()
        if self._state is None:
            self._restored = numbers
            return
        loaded = placed(self._state, numbers)
        self._state = loaded if keep else _copied_into(self._state, loaded)

    def _allow(self, numbers: dict[str, Any]) -> None:
        """Take note that the trackers have reached what somebody has set or loaded, at the least."""
        self._largest = largest_trackers(self.policy, [numbers.get(name, 0) for name in ScaleState._fields[1:]])

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: numbers instead of tensors, so that the next tensor says where the state goes."""
        restored = dict(self._restored) if self._state is None else self.numbers()
        forgotten: dict[str, Any] = {"_is_regular": False, "_is_replayed": False, "_floor": 0.0}
        forgotten |= dict.fromkeys(("_state", "_flags", "_inverse"))
        return self.__dict__ | {"_restored": restored} | forgotten


def _copied_into(state: ScaleState, new: ScaleState) -> ScaleState:
    """Write a state into the tensors of another, and return these as a new tuple."""
    for tensor, value in zip(state, new, strict=True):
        tensor.copy_(value)
    return ScaleState(*state)


class TensorScaling:
    """The way of outputs through ``scale()``: with torch's promotion, one by one, iterators when they are consumed.

    Parameters
    ----------
    keeps_dtype : bool
        Whether a half-precision loss comes back in its dtype.
    """

    def __init__(self, *, keeps_dtype: bool) -> None:
        self._keeps_dtype = keeps_dtype

    def scale(
        self,
        outputs: Any,
        iteration: Iteration,
        look: Callable[[Sequence[Any]], None] | None,
    ) -> Any:
        """Return outputs with every tensor multiplied; see :class:`gradscale.scaler.parts.Scaling`.

        Lists, tuples, named tuples and dicts come back as what they are; any other iterable as an iterator, as torch
        has it, so that an unconsumed one scales nothing.

        Raises
        ------
        InvalidValueError
            For what is neither a tensor nor an iterable of these.
        """
        if type(outputs) is Tensor:
            return self._multiplied(outputs, iteration, look)
        return _mapped(outputs, lambda tensor: self._multiplied(tensor, iteration, look))

    def _multiplied(
        self, tensor: Tensor, iteration: Iteration, look: Callable[[Sequence[Any]], None] | None
    ) -> Tensor:
        state = iteration.in_force(tensor)
        iteration.note_scaled(state)
        if look is not None:
            look((tensor,))
        scaled: Tensor = tensor * moved(state.scale, tensor.device)
        return scaled.to(tensor.dtype) if self._keeps_dtype else scaled


def _mapped(outputs: Any, multiply: Callable[[Tensor], Tensor]) -> Any:
    leaves, rebuild = tree.flatten(outputs, _is_leaf)
    return rebuild([_scaled(leaf, multiply) for leaf in leaves])


def _is_leaf(node: Any) -> bool:
    return isinstance(node, Tensor) or not isinstance(node, (list, tuple, Mapping))


def _scaled(leaf: Any, multiply: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(leaf, Tensor):
        return multiply(leaf)
    if isinstance(leaf, Iterable) and not isinstance(leaf, (str, bytes)):
        return (_mapped(value, multiply) for value in leaf)
    msg = f"outputs must be a Tensor or an iterable of Tensors, got {shown(leaf)} of type {type(leaf).__name__}"
    raise InvalidValueError(msg)
