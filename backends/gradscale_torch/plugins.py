"""MixedPrecision and FabricMixedPrecision: Lightning's float16 plugins with a scaler of gradscale's."""

from __future__ import annotations

import contextlib
import math
from typing import Any, Literal, TypeAlias

import torch

from gradscale.core.validation import wrong_type
from gradscale.errors import CallOrderError
from gradscale.extras import needs
from gradscale.scaler.progress import Stage
from gradscale.scaler.reports import StepReport
from gradscale.scaler.scaler import iteration_of
from gradscale_torch.amp import GradScaler, StepGuard

with needs("gradscale_torch.plugins", "lightning"):
    from lightning.fabric import is_wrapped
    from lightning.fabric.plugins import MixedPrecision as FabricsMixedPrecision
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.plugins import MixedPrecision as TrainersMixedPrecision

__all__ = ["FabricMixedPrecision", "GatedSchedule", "MixedPrecision"]
__dir__ = __all__.copy

Precision: TypeAlias = Literal["16-mixed", "bf16-mixed", "32-true"]


class MixedPrecision(TrainersMixedPrecision):
    """Lightning's plugin of this name for its Trainer, whose learning-rate schedules hold on skipped steps.

    Parameters
    ----------
    precision : {"16-mixed", "bf16-mixed", "32-true"}, default "16-mixed"
        As in Lightning. The last two have no scaler, but may have a guard.
    device : str, default "cuda"
        The type of the device that is trained on.
    scaler : GradScaler, ShardedGradScaler or StepGuard, optional
        Of ``gradscale_torch``, and a StepGuard but for "16-mixed", else InvalidTypeError. Default:
        ``GradScaler(device)`` for "16-mixed". Callbacks find it as an attribute:
        ``trainer.precision_plugin.scaler.last_step(trainer.optimizers[0])``.

    Notes
    -----
    Schedules with ``interval="step"`` are stepped when the optimizer is, and so hold in a batch without a loss, too.
    With ``frequency=n`` it is the step of each n-th batch that counts. Schedules of epochs, Lightning's default, are
    left alone.

    In manual optimization ``self.clip_gradients(optimizer, 0.5)`` clips gradients by their unscaled values, and leaves
    them multiplied by the scale, so that more can be added and the step unscales them; gradients that overflow become
    NaN, for which the step is skipped. It reads the verdict. Lightning's own plugin clips gradients that are scaled.

    Checkpoints hold the scaler's state under the key of Lightning's own plugin, and either plugin takes the other's.
    Without Lightning an import of this module raises MissingExtraError.
    """

    scaler: GradScaler | None

    def __init__(
        self, precision: Precision = "16-mixed", device: str = "cuda", scaler: GradScaler | None = None
    ) -> None:
        super().__init__("bf16-mixed" if precision == "32-true" else precision, device)
        # Lightning's own refuses one for any but float16.
        self.precision, self.scaler = precision, _scaler_for(precision, device, scaler)

    def autocast_context_manager(self) -> Any:
        """Return the context of the forward pass; nothing is cast for "32-true"."""
        return contextlib.nullcontext() if self.precision == "32-true" else super().autocast_context_manager()

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, *args: Any, **kwargs: Any) -> None:
        """Clip gradients by their unscaled values; those that are scaled, as in manual optimization, stay scaled."""
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        has_gradients = any(parameter.grad is not None for parameter in self.main_params(inner))
        scaler = self.scaler if clip_val > 0 and has_gradients else None
        if (
            scaler is None
            or not scaler.is_enabled()
            or iteration_of(scaler).progress_of(inner).stage is not Stage.READY
        ):
            super().clip_gradients(optimizer, clip_val, *args, **kwargs)
            return
        iteration = iteration_of(scaler)
        progress = iteration.progress_of(inner)
        scaler.unscale_(inner)
        super().clip_gradients(optimizer, clip_val, *args, **kwargs)
        verdict = iteration.verdict(progress)
        # More may be added to them, and update() forgets what is unscaled. An overflow may be clipped to a number.
        for parameter in {*self.main_params(inner)}:
            if parameter.grad is not None:
                parameter.grad.mul_(math.nan if verdict.nonfinite else verdict.scale)
        progress.begin_again()

    def connect(
        self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], lr_schedulers: list[Any]
    ) -> tuple[torch.nn.Module, list[torch.optim.Optimizer], list[object]]:
        """Gate the schedules that count steps; Lightning calls it when it has constructed them."""
        for config in lr_schedulers:
            if self.scaler is not None and _counts_steps(config):
                own = getattr(config.scheduler, "optimizer", None)
                optimizer = next((one for one in optimizers if one is own), optimizers[0])
                config.scheduler = GatedSchedule(self.scaler, optimizer, config.scheduler)
        return super().connect(model, optimizers, lr_schedulers)


class FabricMixedPrecision(FabricsMixedPrecision):
    """Lightning's plugin ``MixedPrecision`` for Fabric, which can hold learning-rate schedules on skipped steps.

    Parameters
    ----------
    precision, device, scaler
        As for :class:`MixedPrecision`.

    Notes
    -----
    Name the plugin to save it: ``fabric.save(path, {"model": model, "optimizer": optimizer, "precision": plugin})``.
    """

    scaler: GradScaler | None

    def __init__(
        self, precision: Precision = "16-mixed", device: str = "cuda", scaler: GradScaler | None = None
    ) -> None:
        super().__init__("bf16-mixed" if precision == "32-true" else precision, device)
        self.precision, self.scaler = precision, _scaler_for(precision, device, scaler)

    def forward_context(self) -> Any:
        """Return the context of the forward pass; nothing is cast for "32-true"."""
        return contextlib.nullcontext() if self.precision == "32-true" else super().forward_context()

    def convert_input(self, data: Any) -> Any:
        """Cast the inputs of the forward pass; for "32-true" return them as they are."""
        return data if self.precision == "32-true" else super().convert_input(data)

    def convert_output(self, data: Any) -> Any:
        """Cast the outputs of the forward pass; for "32-true" return them as they are."""
        return data if self.precision == "32-true" else super().convert_output(data)

    def step_schedule(self, optimizer: torch.optim.Optimizer, schedule: Any, *args: object, **kwargs: object) -> None:
        """Step a schedule as :meth:`gradscale.GradScaler.step_schedule`; the optimizer is Fabric's or your own."""
        if self.scaler is None:
            schedule.step(*args, **kwargs)
        else:
            inner: Any = optimizer
            if is_wrapped(optimizer):
                inner = inner.optimizer
            self.scaler.step_schedule(inner, schedule, *args, **kwargs)


class GatedSchedule:
    """A schedule, to ``isinstance`` as well, whose ``step`` waits for a step of the optimizer by the scaler."""

    __slots__ = ("_last", "_optimizer", "_scaler", "_schedule")

    def __init__(self, scaler: GradScaler, optimizer: torch.optim.Optimizer, schedule: object) -> None:
        for name, value in zip(self.__slots__, (None, optimizer, scaler, schedule), strict=True):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_last", self._report())

    def step(self, *args: object, **kwargs: object) -> None:
        """Step the schedule if its optimizer has stepped since the last call or the construction."""
        report = self._report()
        # Compared by identity: a disabled scaler counts no iterations, and one that loads a state counts some again.
        if report is not None and report is not self._last:
            object.__setattr__(self, "_last", report)
            self._scaler.step_schedule(self._optimizer, self._schedule, *args, **kwargs)

    def _report(self) -> StepReport | None:
        """Return the report of the optimizer's last step, if any batch has had a loss."""
        try:
            report: StepReport = self._scaler.last_step(self._optimizer)
        except CallOrderError:
            return None
        return report

    def __reduce__(self) -> tuple[object, ...]:
        return GatedSchedule, (self._scaler, self._optimizer, self._schedule)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The schedule's class, for ``isinstance``."""
        return type(self._schedule)

    def __getattr__(self, name: str) -> Any:
        if name in GatedSchedule.__slots__:
            # Before __init__ has set it.
            raise AttributeError(name)
        return getattr(self._schedule, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._schedule, name, value)


def _scaler_for(precision: str, device: str, scaler: GradScaler | None) -> GradScaler | None:
    if scaler is None:
        return GradScaler(device) if precision == "16-mixed" else None
    wanted = GradScaler if precision == "16-mixed" else StepGuard
    if not isinstance(scaler, wanted):
        raise wrong_type(scaler, "scaler", f"a {wanted.__name__} of gradscale_torch for {precision!r}")
    return scaler


def _counts_steps(config: Any) -> bool:
    """Tell whether Lightning steps a schedule after each batch, and it is not gated already."""
    return config.interval == "step" and type(config.scheduler) is not GatedSchedule
