"""TorchScaler: gradscale's scalers with torch's kernels, fused optimizers, and the mesh of DTensor parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import gradscale
from gradscale import registry
from gradscale.core.clipping import checked_norm
from gradscale.core.protocols import Array, Collectives, Policy, ScaleState
from gradscale.core.validation import SMALLEST_NORMAL
from gradscale.core.vector import Verdict, read_verdict
from gradscale.errors import InvalidValueError
from gradscale.scaler.identity import IdentityMap
from gradscale.scaler.iteration import Iteration, Progress, Stage
from gradscale_torch import clipping, kernels
from gradscale_torch.compiling import untraced
from gradscale_torch.fused import FusedSteps
from gradscale_torch.gradients import (
    Gathered,
    Groups,
    Parameters,
    gather,
    group_tensors,
    kernel_view,
    parameters_of,
)
from gradscale_torch.hosts import HostSurface
from gradscale_torch.inplace import InPlaceState
from gradscale_torch.interchange import Interchange
from gradscale_torch.scaling import scale_outputs
from gradscale_torch.verdicts import LocalVerdict, count_nonfinite, finish_alone, is_capturing

__all__ = ["TorchScaler"]

Tensor = torch.Tensor


class TorchScaler(FusedSteps, Interchange, InPlaceState, HostSurface, torch.amp.GradScaler):  # type: ignore[misc,override]
    """What both replacements share.

    Parameters
    ----------
    device : str
        Type of the device that is trained on.
    factors : dict
        Arguments of :class:`gradscale.DynamicScale`.
    enabled, policy, timeout
        As in :class:`gradscale.ShardedGradScaler`.
    group : group, list of groups or None
        What to agree over; None for the mesh of an optimizer's parameters, or nothing.
    allow_fp16_grads : bool
        Whether gradients may be float16.
    reporting : dict
        ``on_skip``, ``on_update``, ``diagnose`` and ``history_size`` of :class:`gradscale.GradScaler`.
    """

    # Whether scale() gives a half-precision loss back in its dtype.
    _keeps_dtype = False

    def __init__(
        self,
        device: str,
        *,
        factors: dict[str, Any],
        enabled: bool,
        policy: Policy | None,
        group: Any,
        allow_fp16_grads: bool,
        timeout: float,
        reporting: dict[str, Any],
    ) -> None:
        self._device = device
        self._allow_fp16 = allow_fp16_grads
        self._forget_tensors()
        gradscale.ShardedGradScaler.__init__(
            # A disabled scaler of torch's takes any factors.
            self,
            group=group,
            timeout=timeout,
            policy=policy,
            enabled=enabled,
            **(factors if enabled else {}),
            **reporting,
        )

    def _forget_tensors(self) -> None:
        """Drop what is kept from call to call, which belongs to tensors of this process."""
        self._known_parameters: IdentityMap[Parameters] = IdentityMap()
        self._meshes: dict[Any, list[Collectives]] = {}
        # Whether the growth tracker is below the growth interval, as torch's kernel takes for granted.
        self._is_regular = False
        # The smallest scale that there can be now, as far as the host knows without a read.
        self._floor = 0.0
        self._forget_fused()

    def set_group(self, group: Any) -> None:
        """Agree over another group from now on; None for what the scaler agrees over by default.

        Raises
        ------
        CallOrderError
            In the middle of an iteration, unless its agreement has failed: it is then abandoned.
        """
        self._meshes = {}
        self._rejoins = group is None
        if group is not None:
            if isinstance(group, int):
                # What new_group() gives to ranks that are not in it.
                group = registry.get("torch").collectives(group, timeout=self._timeout)
            super().set_group(group)
            return
        self._iteration.require_boundary("set_group()")
        if self._iteration.failure is not None:
            self._iteration = Iteration(self._iteration.number)
        self._lost = None
        self._groups = self._default_groups()

    @untraced
    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or containers of tensors, by the scale.

        Parameters
        ----------
        outputs : tensor, mapping or iterable of tensors
            On any devices; part of their autograd graph.

        Returns
        -------
        same as outputs
            New tensors, with torch's promotion: a 0-d half loss becomes float32 (ShardedGradScaler keeps its dtype).
            Iterables that are no containers come back as iterators. The very same object when the scaler is disabled.
            No host read, no collective.

        Raises
        ------
        InvalidValueError
            For anything that is neither.
        """
        if not self._enabled:
            return outputs
        if self._iteration.failure is not None:
            self._iteration.require_sound()
        if type(outputs) is Tensor:
            return self._scale_tensor(outputs)
        return scale_outputs(outputs, self._scale_tensor)

    def _scale_tensor(self, tensor: Tensor) -> Tensor:
        state = self._in_force(tensor)
        if self._closure_state is None:
            self._iteration.state = state
        self._iteration.scaled = True
        if self._diagnoses:
            self._remember_loss([tensor.detach()])
        scale = state.scale
        if scale.device != tensor.device:
            scale = scale.to(tensor.device, non_blocking=True)
        scaled: Tensor = tensor * scale
        return scaled.to(tensor.dtype) if self._keeps_dtype else scaled

    @untraced
    def unscale_(self, optimizer: Any, *, max_norm: float | None = None) -> Tensor | None:  # type: ignore[override]
        """Divide an optimizer's gradients by the scale and judge them; at most once in an iteration.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
            Its gradients are overwritten. Sparse float16 ones are coalesced first, which replaces ``.grad``.
        max_norm : float, optional
            Clip them to this global 2-norm in the same pass, as ``torch.nn.utils.clip_grad_norm_`` does afterwards.

        Returns
        -------
        tensor or None
            With ``max_norm`` the norm before clipping, 0-d float32. No host read. Over a group the agreement is
            started, which ``step`` finishes; the norm of DTensors costs an all-reduce of its own.

        Raises
        ------
        CallOrderError
            When it was called already, or after ``step``, or before any ``scale``.
        InvalidValueError
            For float16 gradients that are not allowed, gradients whose elements share memory, DTensors of two meshes,
            and ``max_norm`` for plain tensors over a group.
        InvalidTypeError
            When a parameter is no tensor.
        """
        largest = None if max_norm is None else checked_norm(max_norm)
        if not self._enabled:
            return None if largest is None else self._clip_disabled(optimizer, largest)
        self._largest_norm, self._norm = largest, None
        try:
            gradscale.ShardedGradScaler.unscale_(self, optimizer)
            return self._norm
        finally:
            self._largest_norm = self._norm = None

    def _clip_disabled(self, optimizer: Any, max_norm: float) -> Tensor:
        parameters, gathered = self._gather(optimizer, allow_fp16=True)
        clipping.require_norm(optimizer, parameters, gathered, ())
        return clipping.clip_unscaled(parameters, gathered, max_norm, self._mesh_of(parameters))

    _largest_norm: float | None = None
    _norm: Tensor | None = None

    @untraced
    def update(self, new_scale: Any = None) -> None:
        """Adapt the scale, in place, to this iteration's verdicts, and begin the next iteration.

        Parameters
        ----------
        new_scale : number or 1-element tensor, optional
            Set this scale instead; the tracker stays. A tensor is read by the host.

        Raises
        ------
        CallOrderError
            When nothing has been scaled or unscaled since the last ``update``.
        ScaleUnderflowError, InvalidValueError, InvalidTypeError, ScaleDesyncError, CollectiveTimeoutError
            As :meth:`gradscale.GradScaler.update`.
        """
        super().update(new_scale)

    def get_scale(self) -> float:
        """Return the scale as a float, 1.0 when disabled. One host read."""
        if not self._enabled or self._state is None:
            return super().get_scale()
        return float(self._state.scale.item())

    def _default_groups(self) -> Sequence[Collectives]:
        """Return what to agree over where no group was given."""
        return []

    # What the core asks for.

    def _like_nothing(self) -> Array:
        return torch.zeros((), device=self._device)

    def _may_unscale_unscaled(self) -> bool:
        # A pipeline's inner stages get gradients that the last stage has scaled.
        return bool(self._groups)

    def _require_group(self) -> None:
        if self._groups != []:
            super()._require_group()

    def _groups_of(self, optimizer: Any, parameters: Parameters) -> Sequence[Collectives]:
        """Return what to agree over: the groups that were given, or the mesh of the parameters."""
        if self._groups or not parameters.meshes:
            return self._groups or ()
        if len(parameters.meshes) > 1:
            both = " and ".join(map(repr, parameters.meshes))
            msg = (
                f"the parameters of {type(optimizer).__name__} are DTensors of {len(parameters.meshes)} meshes, "
                f"{both}: which ranks have to agree is not known. Construct the scaler with group= (a mesh or process "
                f"group over all of them, such as torch.distributed.group.WORLD), or use an optimizer for each mesh"
            )
            raise InvalidValueError(msg)
        return [self._mesh_of(parameters)]

    def _gather(self, optimizer: Any, *, allow_fp16: bool) -> tuple[Parameters, Gathered]:
        if optimizer in self._known_parameters:
            parameters = self._known_parameters[optimizer]
            if parameters.are_those_of(optimizer):
                return parameters, gather(parameters, allow_fp16=allow_fp16)
        parameters = self._known_parameters[optimizer] = parameters_of(optimizer)
        return parameters, gather(parameters, allow_fp16=allow_fp16)

    def _unscale(self, optimizer: Any, progress: Progress, clip: Any = None) -> None:  # noqa: ARG002
        self._begin(optimizer, progress, allow_fp16=self._allow_fp16, unscales=True)

    def _check(self, optimizer: Any, progress: Progress) -> None:
        """Judge gradients, start the agreement on them, and leave them scaled."""
        stage = progress.stage
        self._begin(optimizer, progress, allow_fp16=True, unscales=False)
        progress.stage = stage

    def _begin(self, optimizer: Any, progress: Progress, *, allow_fp16: bool, unscales: bool) -> None:
        self._require_group()
        self._check_unread()
        parameters, gathered = self._gather(optimizer, allow_fp16=allow_fp16)
        groups = self._groups_of(optimizer, parameters)
        state = self._state_beside(gathered, has_groups=bool(groups))
        if self._largest_norm is not None:
            clipping.require_norm(optimizer, parameters, gathered, groups)
        # Whatever fails from here on may have unscaled some gradients.
        progress.stage = Stage.UNSCALED
        self._forget_gradients(optimizer)
        progress.verdict = progress.finish = progress.sent = progress.agreed = None
        home = state.scale.device
        found: kernels.Found = {}
        tensors = gathered.groups
        with torch.no_grad():
            if unscales:
                inverse = kernels.inverse_of(state.scale)
                if self._largest_norm is not None:
                    inverse = self._clipped(inverse, parameters, tensors, found)
                kernels.unscale_in_place(tensors, inverse, found, judge_again=self._may_be_below_one(state))
            else:
                kernels.judge(tensors, found)
            if gathered.uncoalesced:
                # What the optimizer will see are the sums of duplicates.
                kernels.judge(group_tensors([kernel_view(one.coalesce()) for one in gathered.uncoalesced]), found)
            count = count_nonfinite(found, gathered)
            progress.found = LocalVerdict(found, home, count, has_scaled_gradients=not unscales)
            if groups:
                progress.groups = groups
                nonfinite = progress.found.nonfinite if self._needs_tensors(progress) else count
                self._agree(progress, self._backend_for(state.scale), state, nonfinite)
            else:
                progress.finish = finish_alone

    def _needs_tensors(self, progress: Progress) -> bool:
        """Tell whether the groups must agree on a tensor; False where the host knows the verdict and they take ints."""
        local: LocalVerdict = progress.found
        if local.count is None or self._would_wait(local):
            return True
        return not all(getattr(collectives, "takes_lists", False) for collectives in progress.groups)

    def _clipped(self, inverse: Tensor, parameters: Parameters, tensors: Groups, found: kernels.Found) -> Tensor:
        """Return what unscales and clips at once, and remember the norm."""
        assert self._largest_norm is not None
        norm = clipping.global_norm(parameters, tensors, inverse.device, self._mesh_of(parameters)) * inverse
        self._norm = norm.float()
        wanted = inverse * clipping.clip_factor(norm, self._largest_norm)
        # A norm that overflows, or a factor that loses bits, is an overflow, too.
        is_bad = torch.logical_not(torch.isfinite(norm)) | ((wanted > 0) & (wanted < SMALLEST_NORMAL))
        found[inverse.device] = is_bad.float()
        return wanted.float()

    def _mesh_of(self, parameters: Parameters) -> Any:
        """Return the collectives over the mesh of DTensor parameters; None without one."""
        if not parameters.meshes:
            return None
        mesh = parameters.meshes[0]
        if mesh not in self._meshes:
            self._meshes[mesh] = [registry.collectives_for(mesh, self._timeout)]
        return self._meshes[mesh][0]

    def _state_beside(self, gathered: Gathered, *, has_groups: bool) -> ScaleState:
        """Return the state in force, made beside the gradients if there is none yet."""
        if self._state is not None:
            return self._in_force(None)
        if not self._restored and not has_groups:
            self._iteration.wrong_order("gradients are to be unscaled, and scale() has never been called")
        first = next(iter(gathered.groups.values()), None)
        return self._in_force(self._like_nothing() if first is None else first[0])

    def _advance(self, judged: Sequence[Progress]) -> ScaleState:
        """Adapt the state in place, to the worst of the verdicts where the host knows them all."""
        if len(judged) > 1 and all(isinstance(progress.agreed, list) for progress in judged):
            judged = [max(judged, key=lambda progress: self._judge(progress).nonfinite)]
        return super()._advance(judged)

    def _may_be_below_one(self, state: ScaleState) -> bool:
        """Tell whether the scale may be below 1, so that a finite gradient may overflow when it is divided."""
        if state.scale.device.type == "cpu":
            return bool(state.scale.item() < 1.0)
        return self._floor < 1.0 or is_capturing(state.scale.device)

    def _read_verdict(self, progress: Progress) -> Verdict:
        if progress.groups and isinstance(progress.sent, list) and progress.finish is not None:
            progress.agreed = progress.finish()
            verdict = read_verdict(progress.agreed, progress.sent, self._policy, lambda: self._whereabouts(progress))
        elif progress.groups:
            verdict = super()._read_verdict(progress)
        else:
            if progress.finish is None:
                self._iteration.wrong_order("the gradients of this optimizer could not be unscaled completely before")
            verdict = self._read_alone(progress.found)
        self._floor = verdict.scale
        return verdict

    def _read_alone(self, local: LocalVerdict) -> Verdict:
        """Read the verdict of a process that decides alone: on a device, one read for all of it."""
        state = self._in_force(None)
        exhausted = self._policy.exhausted(state)
        if local.count is not None and local.home.type == "cpu":
            is_exhausted = exhausted is not None and bool(exhausted.item())
            return Verdict(local.count, local.count, is_exhausted, state.scale.item())
        flags = [local.flag, state.scale] + ([] if exhausted is None else [exhausted.float()])
        nonfinite, scale, *rest = torch.stack(flags).tolist()
        return Verdict(int(nonfinite), int(nonfinite), any(rest), scale)
