"""For frameworks that inspect a scaler: torch's states and pickles, ``_per_optimizer_states``, methods to compile."""

from __future__ import annotations

import copy as copies
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, ParamSpec, TypeGuard, TypeVar

import torch
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

import gradscale
from gradscale.core.protocols import Policy
from gradscale.errors import InvalidValueError, short_repr
from gradscale.scaler.iteration import Iteration
from gradscale.scaler.progress import Progress
from gradscale.scaler.scaler import iteration_of
from gradscale.scaler.verdict import PendingVerdict
from gradscale_torch.backend import is_torchs
from gradscale_torch.devices import Flags, combine_flags, to_device
from gradscale_torch.stepping import flag_of

_FACTORS = ("growth_factor", "backoff_factor", "growth_interval")
_TORCHS_KEYS = ("scale", *_FACTORS, "_growth_tracker")
# For optimizers whose flags there are none to write to.
_NO_FLAGS: Mapping[torch.device, torch.Tensor] = MappingProxyType({})

# What a framework that sets one of torch's stages says.
_TRANSITIONS: Mapping[OptState, Callable[[Progress], None]] = {
    OptState.READY: Progress.judge_again,
    OptState.UNSCALED: Progress.take_for_unscaled,
    OptState.STEPPED: lambda progress: progress.end_step(None),
}

# How the compiler treats a frame and those that it calls; not there in every version of torch.
_compiler: Any = torch._C._dynamo.eval_frame

_Arguments = ParamSpec("_Arguments")
_Returned = TypeVar("_Returned")


def untraced(method: Callable[_Arguments, _Returned], *, recursive: bool = True) -> Callable[_Arguments, _Returned]:
    """Return a method that torch.compile does not trace, but for the functions that it calls if not ``recursive``.

    ``torch.compiler.disable`` would do the same, but imports the compiler at once, which takes seconds.
    """
    if not hasattr(_compiler, "set_code_exec_strategy"):
        wrapped: Callable[_Arguments, _Returned] = _disable_dynamo(method, recursive=recursive)
        return wrapped
    # As a mark of the function's code it costs nothing if nothing is compiled; a wrapper would.
    skip, default = _compiler._FrameAction.SKIP, _compiler._FrameAction.DEFAULT
    strategy = _compiler._FrameExecStrategy(skip, skip if recursive else default)
    _compiler.set_code_exec_strategy(method.__code__, strategy)
    vars(method)["_torchdynamo_disable"] = True
    return method


def as_torchs_state_dict(saved: dict[str, object], policy: Policy) -> dict[str, object]:
    """Return a state dict with torch's five keys alone if they say everything of the policy."""
    is_all = (
        saved
        and type(policy) is gradscale.DynamicScale
        and is_torchs(policy)
        and not {"spikes", "streaks"} & saved.keys()
    )
    return {key: saved[key] for key in _TORCHS_KEYS} if is_all else saved


def as_torchs_pickle(scaler: gradscale.GradScaler, device: torch.device | str | int | None) -> dict[str, object]:
    """Return the attributes that torch's scalers pickle, so that theirs can be restored from ours. One host read."""
    if not scaler.is_enabled():
        return {"_device": device, "_enabled": False}
    saved = scaler.state_dict()
    factors = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    return {
        "_device": device,
        "_enabled": True,
        "_init_scale": saved["scale"],
        "_init_growth_tracker": saved["_growth_tracker"],
        "_scale": None,
        "_growth_tracker": None,
        "_per_optimizer_states": defaultdict(_refresh_per_optimizer_state),
        **{f"_{name}": factor for name, factor in zip(_FACTORS, factors, strict=True)},
    }


def state_dict_of_pickle(attributes: dict[str, object]) -> dict[str, object]:
    """Return the state dict of one of torch's scalers from the attributes that it pickles."""
    factors = {name: attributes[f"_{name}"] for name in _FACTORS}
    return {"scale": attributes["_init_scale"], **factors, "_growth_tracker": attributes["_init_growth_tracker"]}


class FrameworkFlags:
    """A verdict by device, which frameworks read and may write to: what they write replaces the verdict."""

    def __init__(self, flags: Flags, target: torch.device) -> None:
        self.flags, self._target = flags, target

    def __call__(self) -> torch.Tensor | None:
        """Return whether to skip the step, 0-d float32, exactly 0 or 1; None without any flag."""
        # Some have one element in one dimension.
        flags = {device: flag.reshape(()) for device, flag in self.flags.items()}
        return (combine_flags(flags, self._target) != 0).to(torch.float32) if flags else None


def flags_by_device(iteration: Iteration, progress: Progress) -> Mapping[torch.device, torch.Tensor]:
    """Return the agreed verdict for each device of an optimizer's gradients, or for the scale's without any."""
    verdict = framework_flags_of(iteration, progress)
    return _NO_FLAGS if verdict is None else verdict.flags


def framework_flags_of(iteration: Iteration, progress: Progress) -> FrameworkFlags | None:
    """Return the verdict on an optimizer as one that a framework may replace; None before there is a state."""
    pending, current = progress.pending, iteration.current
    if pending is None:
        if current.state is None:
            return None
        pending = progress.pending = PendingVerdict.of_framework(current, iteration.agreement, current.state)
    if not isinstance(pending.override, FrameworkFlags):
        pending.override = _flags_from(iteration, progress, pending)
    assert isinstance(pending.override, FrameworkFlags)
    return pending.override


def _flags_from(iteration: Iteration, progress: Progress, pending: PendingVerdict) -> FrameworkFlags:
    """Return a verdict as flags: of each device if this process alone has judged the gradients there."""
    target, flags = pending.state.scale.device, dict(pending.findings.flags or {})
    is_waited_for = pending.groups and target.type == "cpu" and not pending.reading.is_late
    if pending.is_judged_late or pending.is_judged_by_host or is_waited_for:
        iteration.verdict(progress)
    if pending.groups or pending.is_judged_by_host or not isinstance(progress.code, int) or progress.code:
        flag = flag_of(pending, target)
        flags = {device: to_device(flag, device).clone() for device in flags or [target]}
    return FrameworkFlags(flags, target)


class OptimizerState(MutableMapping[str, object]):
    """``stage`` and ``found_inf_per_device`` of an optimizer in one iteration, as they are when they are read.

    Optimizers that judge by themselves (apex, NeMo) set the latter, or write into it: that is then the verdict.
    """

    def __init__(self, iteration: Iteration, progress: Progress) -> None:
        self._iteration, self._progress = iteration, progress

    def __getitem__(self, name: str) -> object:
        if name == "stage":
            progress = self._progress
            if progress.stage.has_ended:
                return OptState.STEPPED
            return OptState.UNSCALED if progress.stage.is_unscaled else OptState.READY
        if name != "found_inf_per_device":
            raise KeyError(name)
        return flags_by_device(self._iteration, self._progress)

    def __setitem__(self, name: str, value: object) -> None:
        if name == "stage" and isinstance(value, OptState):
            _TRANSITIONS[value](self._progress)
        elif name == "found_inf_per_device" and _are_flags(value):
            for flag in value.values():
                # Beside one of them, if there is no state yet.
                self._iteration.current.materialize(flag)
            override = framework_flags_of(self._iteration, self._progress)
            if override is not None:
                override.flags = value
        else:
            msg = f"stage (an OptState) and found_inf_per_device (a dict) can be set, got {name!r}: {short_repr(value)}"
            raise InvalidValueError(msg)

    def __delitem__(self, name: str) -> None:
        self[name] = _refresh_per_optimizer_state()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(("stage", "found_inf_per_device"))

    def __len__(self) -> int:
        return 2

    def __reduce__(self) -> tuple[object, ...]:
        return dict, (dict(self, found_inf_per_device=dict(flags_by_device(self._iteration, self._progress))),)

    copy = copies.copy


class OptimizerStates(MutableMapping[int, OptimizerState]):
    """A view of the present iteration by ``id(optimizer)``. Reading a verdict in it finishes the agreement on it."""

    def __init__(self, scaler: gradscale.GradScaler) -> None:
        self.scaler = scaler

    def __contains__(self, key: object) -> bool:
        return key in iteration_of(self.scaler).progresses.ids()

    def __getitem__(self, key: int) -> OptimizerState:
        iteration = iteration_of(self.scaler)
        return OptimizerState(iteration, iteration.progresses.of(key))

    def __setitem__(self, key: int, state: Mapping[str, object]) -> None:
        fields = dict(state)
        self.pop(key, None)
        self[key].update(fields)

    def __delitem__(self, key: int) -> None:
        self._forget(key)

    def get(self, key: int, default: Any = None) -> Any:
        """Return a state without adding one, as torch's defaultdict."""
        return super().get(key) if key in self else default

    def pop(self, key: int, *default: Any) -> Any:
        """Remove and return a state without adding one, as torch's defaultdict."""
        return super().pop(key) if key in self else dict[int, Any]().pop(key, *default)

    def setdefault(self, key: int, default: Any = None) -> Any:
        """Return a state; if there is none, first set it to the default, if this is a mapping."""
        if key not in self and isinstance(default, Mapping):
            self[key] = default
        return self[key]

    def clear(self) -> None:
        """Begin the iteration again."""
        self._forget()

    def _forget(self, key: int | None = None) -> None:
        iteration = iteration_of(self.scaler)
        # Agreements that are under way are finished first.
        iteration.read_verdicts()
        iteration.progresses.forget(key)

    def __iter__(self) -> Iterator[int]:
        return iter(iteration_of(self.scaler).progresses.ids())

    def __len__(self) -> int:
        return len(iteration_of(self.scaler).progresses.ids())

    def __reduce__(self) -> tuple[object, ...]:
        return defaultdict, (_refresh_per_optimizer_state, dict(self))

    copy = copies.copy


def _are_flags(value: object) -> TypeGuard[Flags]:
    return isinstance(value, Mapping) and all(isinstance(flag, torch.Tensor) for flag in value.values())
