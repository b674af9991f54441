"""TensorUnscaler: an optimizer's gradients collected, unscaled, clipped and judged by torch's fused kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradscale import registry
from gradscale.core.gradients import named_gradients
from gradscale.core.identity import IdentityMap
from gradscale.core.protocols import Collectives, ScaleState
from gradscale.core.validation import SMALLEST_NORMAL
from gradscale.errors import InvalidValueError
from gradscale_torch import clipping, kernels
from gradscale_torch.diagnosis import values_of
from gradscale_torch.gradients import (
    GradientGroups,
    Parameters,
    collect,
    group_tensors,
    kernel_view,
    local_tensor,
    parameters_of,
)
from gradscale_torch.state import TensorState
from gradscale_torch.verdicts import TensorFound, count_nonfinite, would_wait

__all__ = ["Request", "TensorGradients", "TensorUnscaler"]

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What an unscaler is asked for besides.

    Attributes
    ----------
    max_norm : float or None
        The largest norm, to clip to.
    is_shared : bool
        Whether the scaler was given groups, over which the norm of plain tensors is not defined.
    unscales : bool
        Whether to unscale; else gradients are judged, and left scaled.
    takes_fp16 : bool
        Whether gradients may be float16 also where the scaler refuses them, as fused optimizers take them.
    announce : callable or None
        Called with collectives and a tensor before the norm is summed up over them, where the host waits for them.
    """

    max_norm: float | None = None
    is_shared: bool = False
    unscales: bool = True
    takes_fp16: bool = False
    announce: Callable[[Collectives, Tensor], None] | None = None


_PLAIN = Request()
_CPU = torch.device("cpu")


class TensorGradients:
    """An optimizer's gradients on their way; see :class:`gradscale.scaler.parts.Gradients`."""

    __slots__ = ("_unscaler", "grouped", "is_touched", "optimizer", "parameters", "request")

    def __init__(
        self,
        unscaler: TensorUnscaler,
        optimizer: Any,
        parameters: Parameters,
        grouped: GradientGroups,
        request: Request,
    ) -> None:
        self._unscaler = unscaler
        self.optimizer = optimizer
        self.parameters = parameters
        self.grouped = grouped
        self.request = request
        self.is_touched = False

    @property
    def like(self) -> Tensor:
        """A gradient, beside which the state belongs; on the device that is trained on where they are elsewhere.

        The loss of other ranks is there, also if all gradients are on the host, so that messages go the same way.
        """
        first = next(iter(self.grouped.groups.values()), None)
        if first is None or (first[0].device.type == "cpu" and not self._unscaler.trains_on_host):
            return torch.zeros((), device=self._unscaler.device)
        return first[0]

    def groups(self) -> Sequence[Collectives]:
        """Return the mesh of DTensor parameters.

        Raises
        ------
        InvalidValueError
            For several meshes.
        """
        meshes = self.parameters.meshes
        return self._unscaler.groups_of(self.optimizer, meshes) if meshes else ()


class TensorUnscaler:
    """Unscales in place, and keeps an optimizer's parameters in mind from call to call.

    Parameters
    ----------
    device : str, torch.device, int or None
        That is trained on.
    allows_fp16 : bool
        Whether gradients may be float16.
    timeout : float
        Seconds to wait for the ranks of a mesh.
    """

    def __init__(self, device: torch.device | str | int | None, *, allows_fp16: bool, timeout: float) -> None:
        self.device = device
        self._allows_fp16 = allows_fp16
        self._timeout = timeout
        self.forget()

    @property
    def trains_on_host(self) -> bool:
        """Whether the device that is trained on is the host, or none was named."""
        return self.device is None or (not isinstance(self.device, int) and torch.device(self.device).type == "cpu")

    def forget(self) -> None:
        """Forget parameters, meshes and steps."""
        self._known: IdentityMap[Parameters] = IdentityMap()
        self._meshes: dict[Any, list[Collectives]] = {}
        # The optimizers whose last step was left to unscale by itself.
        self._left_scaled: IdentityMap[bool] = IdentityMap()
        # Flags of the host that the last kernels have left 0, for the next ones: making one takes as long as a kernel.
        self._zeros: kernels.Found = {}

    def __getstate__(self) -> tuple[torch.device | str | int | None, bool, float]:
        """Return what is pickled: the settings."""
        return self.device, self._allows_fp16, self._timeout

    def __setstate__(self, kept: tuple[torch.device | str | int | None, bool, float]) -> None:
        self.device, self._allows_fp16, self._timeout = kept
        self.forget()

    def collect(self, optimizer: Any, request: Request | None = None) -> TensorGradients:
        """Return an optimizer's gradients; nothing is modified, but for sparse float16 ones, which are coalesced.

        Raises
        ------
        InvalidTypeError, InvalidValueError
            When a parameter is no tensor, and for gradients that are refused: float16, or elements that share memory.
        """
        request = request or _PLAIN
        parameters = self._known.by_id(id(optimizer))
        if parameters is None or not parameters.listed.are_those_of(optimizer):
            parameters = parameters_of(optimizer)
            self._known.put(optimizer, parameters)
        grouped = collect(parameters, allow_fp16=self._allows_fp16 or request.takes_fp16)
        return TensorGradients(self, optimizer, parameters, grouped, request)

    def unscale(self, gradients: TensorGradients, live: TensorState, state: ScaleState) -> TensorFound:
        """Divide gradients by the scale of a state, clip and judge them; or judge them alone.

        No host read, but of the scale of a device that gradients of the host are divided by.

        The norm of DTensors costs an all-reduce of its own.

        Raises
        ------
        InvalidValueError
            For gradients whose elements share memory, or whose norm is not defined here.
        """
        request, grouped, optimizer = gradients.request, gradients.grouped, gradients.optimizer
        if request.max_norm is not None:
            clipping.require_norm(optimizer, gradients.parameters, grouped, is_shared=request.is_shared)
        gradients.is_touched = True
        if self._left_scaled.by_id(id(optimizer)):
            self._left_scaled.pop(optimizer)
        found: kernels.Found = {}
        norm = None
        # As torch.no_grad() does it, which takes as long as the kernel of a few gradients.
        is_recording = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            if request.unscales:
                scale, inverse = live.scale_and_inverse(state)
                if inverse is None:
                    inverse = kernels.inverse_of(scale)
                if request.max_norm is not None:
                    self._announce(gradients, inverse)
                    inverse, norm = self._clipped(inverse, gradients, request.max_norm, found)
                judge_again = live.may_be_below_one(state)
                kernels.unscale_in_place(grouped.groups, inverse, found, self._zeros, judge_again=judge_again)
            else:
                kernels.judge(grouped.groups, found)
            if grouped.uncoalesced:
                # What the optimizer will see are the sums of duplicates.
                kernels.judge(group_tensors([kernel_view(one.coalesce()) for one in grouped.uncoalesced]), found)
            count = count_nonfinite(found, grouped)
        finally:
            torch._C._set_grad_enabled(is_recording)
        home = _CPU if isinstance(state.scale, float) else state.scale.device
        if count is None or not found:
            return TensorFound(found, home, count, not request.unscales, norm)
        if count == 0 and not found[_CPU].is_inference():
            self._zeros = found
        return TensorFound(None, home, count, not request.unscales, norm)

    def clip_unscaled(self, optimizer: Any, max_norm: float, live: Any) -> Tensor:  # noqa: ARG002
        """Clip gradients that are not scaled, and return their norm, 0-d float32."""
        gradients = self.collect(optimizer, Request(takes_fp16=True))
        clipping.require_norm(optimizer, gradients.parameters, gradients.grouped, is_shared=False)
        mesh = self._mesh_of(gradients.parameters.meshes)
        return clipping.clip_unscaled(gradients.parameters, gradients.grouped, max_norm, mesh)

    def groups_of(self, optimizer: Any, meshes: Sequence[Any]) -> Sequence[Collectives]:
        """Return what the ranks of DTensor parameters agree over, where the scaler was given no group.

        Raises
        ------
        InvalidValueError
            For several meshes.
        """
        if len(meshes) > 1:
            both = " and ".join(map(repr, meshes))
            msg = (
                f"the parameters of {type(optimizer).__name__} are DTensors of {len(meshes)} meshes, "
                f"{both}: which ranks have to agree is not known. Construct the scaler with group= (a mesh or process "
                f"group over all of them, such as torch.distributed.group.WORLD), or use an optimizer for each mesh"
            )
            raise InvalidValueError(msg)
        mesh = self._mesh_of(meshes)
        return () if mesh is None else [mesh]

    def groups_for(self, optimizer: Any, groups: Sequence[Collectives]) -> Sequence[Collectives]:
        """Return what an optimizer's ranks are gathered over: these groups, or the mesh of its parameters."""
        if not groups:
            # Without a look at the gradients: a rank whose gradients are refused must not stay away.
            parameters = [one.parameter for one in named_gradients(optimizer)]
            meshes = dict.fromkeys(one.device_mesh for one in parameters if hasattr(one, "device_mesh"))
            groups = self.groups_of(optimizer, tuple(meshes))
        for collectives in groups:
            # The default group is looked up when it is first needed.
            resolve = getattr(collectives, "resolve", None)
            if resolve is not None:
                resolve()
        return groups

    def values_of(self, gradient: Any) -> Any:
        """Return the dense tensor of a gradient's values on this rank. A loss may be of another library."""
        return values_of(gradient) if isinstance(gradient, Tensor) else gradient

    def shape_of(self, gradient: Any) -> tuple[int, ...]:
        """Return the shape of a gradient on this rank: of a DTensor, that of its local part."""
        return tuple(local_tensor(gradient).shape)

    def was_left_scaled(self, optimizer: Any) -> bool:
        """Tell whether an optimizer's last step was left to divide its gradients by itself."""
        return optimizer in self._left_scaled

    def remember_left_scaled(self, optimizer: Any) -> None:
        """Keep in mind that an optimizer was left to divide its gradients by itself, until they are unscaled."""
        self._left_scaled.put(optimizer, True)

    def _announce(self, gradients: TensorGradients, like: Tensor) -> None:
        """Let the ranks know that a norm comes; on a device, where the host waits for nobody, it comes unannounced."""
        mesh, announce = self._mesh_of(gradients.parameters.meshes), gradients.request.announce
        if mesh is not None and announce is not None and not would_wait(like.device):
            announce(mesh, like)

    def _clipped(
        self, inverse: Tensor, gradients: TensorGradients, max_norm: float, found: kernels.Found
    ) -> tuple[Tensor, Tensor]:
        """Return what unscales and clips at once, and the norm."""
        parameters = gradients.parameters
        mesh = self._mesh_of(parameters.meshes)
        norm = clipping.global_norm(parameters, gradients.grouped.groups, inverse.device, mesh) * inverse
        wanted = inverse * clipping.clip_factor(norm, max_norm)
        # A norm that overflows, or a factor that loses bits, is an overflow, too.
        is_bad = torch.logical_not(torch.isfinite(norm)) | ((wanted > 0) & (wanted < SMALLEST_NORMAL))
        found[inverse.device] = is_bad.float()
        return wanted.float(), norm.float()

    def _mesh_of(self, meshes: Sequence[Any]) -> Any:
        """Return the collectives over the mesh of DTensor parameters; None without one."""
        if not meshes:
            return None
        if meshes[0] not in self._meshes:
            self._meshes[meshes[0]] = [registry.collectives_for(meshes[0], self._timeout)]
        return self._meshes[meshes[0]][0]
