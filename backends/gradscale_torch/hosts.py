"""HostSurface: the private attributes of torch's scalers that optimizers and training frameworks read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from gradscale.errors import InvalidValueError
from gradscale.scaler.iteration import Progress, Stage

if TYPE_CHECKING:
    from gradscale.core.protocols import ScaleState

__all__ = ["HostSurface"]

Tensor = torch.Tensor

_OPT_STATES = {Stage.READY: OptState.READY, Stage.UNSCALED: OptState.UNSCALED, Stage.STEPPED: OptState.STEPPED}


class OptimizerState(dict[str, Any]):
    """``stage``, and ``found_inf_per_device`` as the group has agreed.

    Optimizers that judge by themselves (apex, NeMo) set the latter, or write into it: that is then the verdict.
    """

    def __init__(self, scaler: HostSurface, progress: Progress) -> None:
        found = scaler._agreed_found(progress)
        super().__init__(stage=_OPT_STATES[progress.stage], found_inf_per_device=found)
        self._progress = progress

    def __setitem__(self, key: str, value: Any) -> None:
        """Take over the verdict; the stage is the scaler's own."""
        if key != "found_inf_per_device":
            msg = f"only found_inf_per_device can be set, got {key!r}"
            raise InvalidValueError(msg)
        super().__setitem__(key, value)
        self._progress.found.shown = value


class OptimizerStates(Mapping[int, dict[str, Any]]):
    """A view of an iteration by ``id(optimizer)``.

    Reading an optimizer's entry finishes the agreement on it.
    """

    def __init__(self, scaler: HostSurface) -> None:
        self._scaler = scaler

    def __getitem__(self, key: int) -> dict[str, Any]:
        progress = self._scaler._iteration.by_id(key)
        return _refresh_per_optimizer_state() if progress is None else OptimizerState(self._scaler, progress)

    def __iter__(self) -> Iterator[int]:
        return iter(self._scaler._iteration.ids())

    def __len__(self) -> int:
        return len(self._scaler._iteration.ids())


class HostSurface:
    """What hosts read beyond the public methods.

    apex's and NeMo's optimizers, accelerate, Composer and torch's own fused optimizers do. Nothing of gradscale
    depends on it.
    """

    _enabled: bool
    _device: str
    _iteration: Any
    _state: ScaleState | None
    _policy: Any

    @property
    def _scale(self) -> Tensor | None:
        """The scale, 0-d float32; None before the first ``scale``. Kept by identity through ``update``."""
        return None if self._state is None else self._state.scale

    @_scale.setter
    def _scale(self, value: Tensor) -> None:
        self._replace_field("scale", value)

    @property
    def _growth_tracker(self) -> Tensor | None:
        """The number of clean steps in a row, 0-d int32; None before the first ``scale``."""
        return None if self._state is None else self._state.growth_tracker

    @_growth_tracker.setter
    def _growth_tracker(self, value: Tensor) -> None:
        self._replace_field("growth_tracker", value)

    def _replace_field(self, name: str, value: Tensor) -> None:
        state = self._current(value)
        fields = {name: value.to(getattr(state, name).dtype).reshape(())}
        self._state = state._replace(**fields)
        self._is_regular = False

    @property
    def _per_optimizer_states(self) -> OptimizerStates:
        return OptimizerStates(self)

    @property
    def _init_scale(self) -> float:
        return float(self._restored.get("scale", self._policy.init_scale))

    @property
    def _init_growth_tracker(self) -> int:
        return int(self._restored.get("growth_tracker", 0))

    @property
    def _growth_factor(self) -> float:
        return float(self._policy.growth_factor)

    @property
    def _backoff_factor(self) -> float:
        return float(self._policy.backoff_factor)

    @property
    def _growth_interval(self) -> int:
        return int(self._policy.growth_interval)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str) -> None:
        """Make the state on a device, where it is not made yet."""
        self._current(torch.empty((), device=dev))

    def _check_inf_per_device(self, optimizer: Any) -> dict[torch.device, Tensor]:
        """Judge gradients and leave them scaled; the stage stays. Over a group, this is the group's verdict."""
        progress = self._iteration.of(optimizer)
        self._check(optimizer, progress)
        return self._agreed_found(progress)

    def _found_inf_per_device(self, optimizer: Any) -> dict[torch.device, Tensor]:
        """Return the verdict on each device of an optimizer's gradients, as the group has agreed."""
        return self._agreed_found(self._iteration.of(optimizer))

    def _get_scale_async(self) -> Tensor | None:
        return self._scale

    def _get_growth_tracker(self) -> int:
        """Return the number of clean steps in a row. One host read."""
        if not self._enabled:
            return 0
        return self._init_growth_tracker if self._growth_tracker is None else int(self._growth_tracker.item())

    if TYPE_CHECKING:
        # What the scaler brings.
        _restored: dict[str, Any]
        _is_regular: bool

        def _current(self, like: Tensor | None) -> ScaleState: ...
        def _check(self, optimizer: Any, progress: Progress) -> None: ...
        def _agreed_found(self, progress: Progress) -> dict[torch.device, Tensor]: ...
