"""Steps of fused optimizers, which unscale and skip in their own kernels: torch's ``grad_scale`` and ``found_inf``."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

import torch

from gradscale.core.vector import Verdict
from gradscale.scaler.closure import find_closure
from gradscale.scaler.identity import IdentityMap
from gradscale.scaler.iteration import Progress, Stage
from gradscale_torch.compiling import untraced, untraced_but_for_calls, warn_caller
from gradscale_torch.kernels import combined
from gradscale_torch.momentum import mend_momentum, without_momentum
from gradscale_torch.reporting import LateReports
from gradscale_torch.verdicts import LocalVerdict, finish_alone

if TYPE_CHECKING:
    from gradscale.core.protocols import ScaleState

__all__ = ["FusedSteps"]

Tensor = torch.Tensor


class FusedSteps(LateReports):
    """``step`` for optimizers with ``_step_supports_amp_scaling``; all others are passed on."""

    def _forget_fused(self) -> None:
        self._takes_scaler: IdentityMap[bool] = IdentityMap()
        self._forget_unread()

    @untraced_but_for_calls
    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer unless one of its gradients, on any rank, is not finite.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
            Its ``step`` is called through the attribute exactly when the step is really made. One with ``fused=True``
            is called always, and skips in its kernel, by its attributes ``found_inf`` and ``grad_scale``.
        *args, **kwargs
            Passed on; a closure as in :meth:`gradscale.GradScaler.step`.

        Returns
        -------
        object
            What ``optimizer.step`` returned; None for a step that was left out. ``last_step`` tells the two apart.

        Raises
        ------
        CallOrderError
            When it was called already since the last ``update``.
        ScaleDesyncError, CollectiveTimeoutError
            Over a group: on every rank when the states differ; when some rank never comes.

        Notes
        -----
        One host read; none for a fused optimizer on a device, whose desync is then raised in one of the next calls,
        and until then no rank steps.
        """
        ready = self._prepare(optimizer, args, kwargs)
        if ready is None:
            return self._step_untraced(optimizer, args, kwargs)
        progress, verdict = ready
        # Called from a frame that the compiler has not left, so that it compiles the optimizer.
        returned = None if verdict.nonfinite else optimizer.step(*args, **kwargs)
        self._finish(optimizer, progress, verdict)
        return returned

    @untraced
    def _prepare(
        self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Progress, Verdict] | None:
        """Unscale and judge for a plain step; None for a fused optimizer, a closure or a disabled scaler."""
        is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        if not self._enabled or is_fused or find_closure(args, kwargs) is not None:
            return None
        progress = self._enter_step(optimizer)
        return progress, self._judge_for_step(optimizer, progress)

    @untraced
    def _finish(self, optimizer: Any, progress: Progress, verdict: Verdict) -> None:
        self._conclude(optimizer, progress, verdict)

    @untraced
    def _step_untraced(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_fused = self._enabled and getattr(optimizer, "_step_supports_amp_scaling", False)
        if not is_fused or find_closure(args, kwargs) is not None:
            return super().step(optimizer, *args, **kwargs)
        progress = self._enter_step(optimizer)
        if self._wants_the_scaler(optimizer):
            return self._step_with_the_scaler(optimizer, progress, args, kwargs)
        if progress.stage is Stage.READY:
            # The optimizer's kernel would divide by a scale below 1 without a look at the result.
            unscales = self._may_be_below_one(self._in_force(None)) if self._state is not None else True
            self._begin(optimizer, progress, allow_fp16=True, unscales=unscales)
            progress.stage = Stage.UNSCALED
        local: LocalVerdict = progress.found
        # A policy that raises at its minimum needs the host, and so does a verdict that may have been replaced.
        may_be_late = self._would_wait(local) and local.shown is None and not self._reports_at_once
        local.is_read_later = may_be_late and self._policy.exhausted(self._in_force(None)) is None
        verdict = None if local.is_read_later else self._judge(progress)
        scale = self._in_force(None).scale
        preset = getattr(optimizer, "grad_scale", None)
        if local.has_scaled_gradients:
            optimizer.grad_scale = scale.clone() if preset is None else scale * preset
        else:
            optimizer.grad_scale = preset
        # Copies: what an optimizer does to them is its own affair.
        found = self._agreed_flag(progress)
        optimizer.found_inf = found.clone()
        fresh = without_momentum(optimizer)
        try:
            returned = optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf
        mend_momentum(optimizer, fresh, found)
        if verdict is None:
            self._conclude_later(optimizer, progress, scale)
        else:
            self._conclude(optimizer, progress, verdict)
        return returned

    def _would_wait(self, local: LocalVerdict) -> bool:
        """Tell whether the host would have to wait for a device to know the verdict."""
        return local.home.type != "cpu"

    def _wants_the_scaler(self, optimizer: Any) -> bool:
        """Tell whether ``optimizer.step`` takes the scaler as ``grad_scaler=``."""
        if optimizer not in self._takes_scaler:
            self._takes_scaler[optimizer] = "grad_scaler" in inspect.signature(optimizer.step).parameters
        return self._takes_scaler[optimizer]

    def _step_with_the_scaler(
        self, optimizer: Any, progress: Progress, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Pass the scaler on to an optimizer that judges and unscales by asking it."""
        warn_caller(
            f"{type(optimizer).__name__}.step takes grad_scaler=, which torch has deprecated: have it read the "
            f"attributes grad_scale and found_inf, which scalers set, instead",
            FutureWarning,
        )
        returned = optimizer.step(*args, **kwargs, grad_scaler=self)
        if progress.finish is None and progress.found is not None and progress.found.shown:
            # It has told its own verdict.
            progress.finish = finish_alone
        judged = progress.finish is not None
        verdict = self._judge(progress) if judged else Verdict(0, 0, False, self.get_scale())
        self._conclude(optimizer, progress, verdict)
        return returned

    def _agreed_flag(self, progress: Progress) -> Tensor:
        """Return the agreed verdict as a 0-d float32 on the scale's device, exactly 0 or 1; no host read there."""
        local: LocalVerdict = progress.found
        if local.shown is not None:
            return (combined(local.shown, local.home) != 0).to(torch.float32)
        if not progress.groups:
            return local.flag
        if local.home.type == "cpu" and not local.is_read_later:
            return torch.tensor(float(self._judge(progress).nonfinite > 0))
        agreed = self._agreed_vector(progress)
        fields = agreed[2:].reshape(2, -1)
        # Where ranks differ no rank steps, until the host sees it.
        return ((agreed[0] != 0) | (fields.sum(0) != 0).any()).to(torch.float32)

    def _agreed_vector(self, progress: Progress) -> Tensor:
        if progress.agreed is None:
            if progress.finish is None:
                self._iteration.wrong_order("the gradients of this optimizer could not be unscaled completely before")
            progress.agreed = progress.finish()
        agreed: Tensor = progress.agreed
        return agreed

    def _agreed_found(self, progress: Progress) -> dict[torch.device, Tensor]:
        """Return the agreed verdict for each device of the gradients, and for the scale's without any."""
        local: LocalVerdict | None = progress.found
        if local is None:
            if self._state is None:
                return {}
            local = progress.found = LocalVerdict({}, self._in_force(None).scale.device)
        if local.shown is None:
            if progress.groups:
                flag = self._agreed_flag(progress)
                devices = local.found or [local.home]
                local.shown = {device: flag.to(device, copy=True, non_blocking=True) for device in devices}
            else:
                local.shown = local.found
        return local.shown

    def _judge(self, progress: Progress) -> Verdict:
        """Read the verdict, which a host that has looked at it may have replaced."""
        verdict: Verdict = super()._judge(progress)
        local: LocalVerdict | None = progress.found
        if local is None or local.shown is None:
            return verdict
        is_bad = any(flag.item() for flag in local.shown.values())
        if is_bad == (verdict.nonfinite > 0):
            return verdict
        return dataclasses.replace(verdict, nonfinite=int(is_bad))

    def _is_judged_by_host(self, progress: Progress) -> bool:
        return progress.found is None or not progress.found.is_read_later

    if TYPE_CHECKING:
        # What the scaler brings.
        _floor: float

        def _may_be_below_one(self, state: ScaleState) -> bool: ...
        def _begin(self, optimizer: Any, progress: Progress, *, allow_fp16: bool, unscales: bool) -> None: ...
