"""LateReports: reports of steps that a fused optimizer has judged on a device, read by the host when it is asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import gradscale
from gradscale.core import vector
from gradscale.core.gradients import located_gradients
from gradscale.core.protocols import Collectives
from gradscale.core.vector import Verdict
from gradscale.errors import ScaleDesyncError
from gradscale.reports.overflow import OverflowReport
from gradscale.reports.steps import StepReport
from gradscale.scaler.identity import IdentityMap
from gradscale.scaler.iteration import Progress, Stage
from gradscale.scaler.reporting import step_report
from gradscale_torch.diagnosis import values_of
from gradscale_torch.gradients import Parameters, local_tensor
from gradscale_torch.verdicts import LocalVerdict, is_capturing, start_reading

__all__ = ["LateReports"]

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Unread:
    """A verdict that the optimizer has acted on by itself, on its way to the host.

    Attributes
    ----------
    read : callable
        From :func:`gradscale_torch.verdicts.start_reading`.
    progress : Progress
        Of the step.
    iteration, updates : int
        The number of the iteration, and of the updates made before.
    """

    read: Callable[[bool], list[float] | None]
    progress: Progress
    iteration: int
    updates: int


class LateReports(gradscale.ShardedGradScaler):
    """``last_step`` and ``history`` over steps whose verdict the host has not seen, and the rank of this process."""

    def _forget_unread(self) -> None:
        self._unread: IdentityMap[Unread] = IdentityMap()
        self._unchecked: list[Unread] = []
        # Whether an optimizer's last step was left to unscale by itself.
        self._steps_with_scaled: IdentityMap[bool] = IdentityMap()
        self._updates = 0

    def last_step(self, optimizer: Any) -> StepReport:
        """Return what happened in the last ``step`` of an optimizer.

        With a fused optimizer on a device, which skips by itself, the first call reads the verdict from the device;
        else there is no host read beyond the one that ``step`` made.

        Raises
        ------
        CallOrderError
            When it has not been stepped by this scaler.
        """
        self._complete_report(optimizer)
        return super().last_step(optimizer)

    @property
    def history(self) -> list[StepReport]:
        """The reports of the last steps of all optimizers, oldest first; ``history_size`` of them at most.

        Steps that a fused optimizer has judged on a device are read from it now. Copies and pickles begin with none.
        """
        for index, entry in enumerate(self._history):
            if isinstance(entry, Unread):
                values = entry.read(True)
                assert values is not None
                self._history[index] = step_report(self._verdict_of(entry, values), entry.iteration)
        return super().history

    def _conclude_later(self, optimizer: Any, progress: Progress, scale: Tensor) -> None:
        """End a step whose verdict the host has not seen, and send it on its way."""
        progress.stage = Stage.STEPPED
        self._remember_gradients(optimizer, progress)
        local: LocalVerdict = progress.found
        if progress.groups:
            sent: Any = progress.sent
            values = torch.cat([self._agreed_vector(progress), sent])
        else:
            values = torch.stack([local.flag, scale])
        unread = Unread(start_reading(values), progress, self._iteration.number, self._updates)
        self._unread[optimizer] = unread
        if not is_capturing(values.device):
            self._unchecked.append(unread)
            self._history.append(unread)

    def _conclude(self, optimizer: Any, progress: Progress, verdict: Verdict, retries: int = 0) -> None:
        self._remember_gradients(optimizer, progress)
        super()._conclude(optimizer, progress, verdict, retries)

    def _remember_gradients(self, optimizer: Any, progress: Progress) -> None:
        """Keep in mind whether the optimizer was left to unscale by itself in its last step."""
        local: LocalVerdict | None = progress.found
        was_left = local is not None and local.has_scaled_gradients
        if was_left or optimizer in self._steps_with_scaled:
            self._steps_with_scaled[optimizer] = was_left

    def _forget_gradients(self, optimizer: Any) -> None:
        """Take the gradients of an optimizer for new ones, whatever its last step has left."""
        if optimizer in self._steps_with_scaled:
            self._steps_with_scaled.pop(optimizer)

    def _check_unread(self) -> None:
        """Look at the verdicts that have arrived: ranks may differ, and the scale is known for a while."""
        while self._unchecked:
            values = self._unchecked[0].read(False)
            if values is None:
                return
            unread = self._unchecked.pop(0)
            try:
                verdict = self._verdict_of(unread, values)
            except ScaleDesyncError as error:
                self._iteration.failure = error
                raise
            self._floor = verdict.scale * self.get_backoff_factor() ** (self._updates - unread.updates)

    def _complete_report(self, optimizer: Any) -> None:
        """Read the verdict on a step that the optimizer has decided by itself, and report it."""
        if optimizer not in self._unread:
            return
        unread = self._unread.pop(optimizer)
        values = unread.read(True)
        assert values is not None
        self._reports[optimizer] = step_report(self._verdict_of(unread, values), unread.iteration)

    def _verdict_of(self, unread: Unread, values: list[float]) -> Verdict:
        if not unread.progress.groups:
            found, scale = values
            return Verdict(int(found), int(found), False, scale)
        whole = [int(value) for value in values]
        agreed, sent = whole[: vector.LENGTH], whole[vector.LENGTH :]
        return vector.read_verdict(agreed, sent, self._policy, lambda: self._whereabouts(unread.progress))

    def _rank(self) -> int:
        # Also where every rank decides alone, as under DDP.
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else super()._rank()

    # What a diagnosis asks for.

    def diagnose(self, optimizer: Any, names: Any = None, *, loss: Any = None, gather: bool = False) -> OverflowReport:
        """Report inf, NaN, zeros, subnormals and the largest magnitude of each gradient, and what is the cause.

        As :meth:`gradscale.GradScaler.diagnose`: of sparse gradients the stored values, of a DTensor this rank's part.
        The gradients of a fused optimizer that has skipped its step are still scaled, which is allowed for.
        """
        self._complete_report(optimizer)
        return super().diagnose(optimizer, names, loss=loss, gather=gather)

    def _values_of(self, gradient: Any) -> Any:
        # A loss, or what is no optimizer of torch's, may be of another library.
        return values_of(gradient) if isinstance(gradient, Tensor) else gradient

    def _shape_of(self, gradient: Any) -> tuple[int, ...]:
        return tuple(local_tensor(gradient).shape)

    def _holds_scaled(self, optimizer: Any, progress: Progress | None) -> bool:
        stage = Stage.READY if progress is None else progress.stage
        if stage is Stage.READY and super()._holds_scaled(optimizer, progress):
            return True
        if progress is not None and stage is Stage.UNSCALED:
            return progress.found is not None and progress.found.has_scaled_gradients
        if optimizer not in self._steps_with_scaled or not self._steps_with_scaled[optimizer]:
            return False
        # The kernel of a fused optimizer unscales as it steps.
        verdict = None if progress is None else progress.verdict
        return self.last_step(optimizer).skipped if verdict is None else verdict.nonfinite > 0

    def _groups_for_gathering(self, optimizer: Any, progress: Progress | None) -> Sequence[Collectives]:
        self._require_group()
        chosen = (progress.groups if progress is not None else ()) or self._groups
        if not chosen:
            # Parameters that are known from here on would not be looked at when their gradients are there; and a rank
            # whose gradients are refused must not stay away.
            chosen = self._groups_of(optimizer, Parameters([], [], _meshes_of(optimizer)))
        for collectives in chosen:
            # The default group is looked up when it is first needed.
            resolve = getattr(collectives, "resolve", None)
            if resolve is not None:
                resolve()
        return chosen

    if TYPE_CHECKING:
        # What the scaler brings.
        _floor: float

        def _agreed_vector(self, progress: Progress) -> Tensor: ...
        def _groups_of(self, optimizer: Any, parameters: Parameters) -> Sequence[Collectives]: ...


def _meshes_of(optimizer: Any) -> tuple[Any, ...]:
    """Return the meshes of an optimizer's DTensor parameters, without a look at its gradients."""
    parameters = [one.parameter for one in located_gradients(optimizer)]
    return tuple(dict.fromkeys(one.device_mesh for one in parameters if hasattr(one, "device_mesh")))
