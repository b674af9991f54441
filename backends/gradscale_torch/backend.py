"""ScalerBackend: what torch's scalers do in another way than those of plain arrays: the hooks of the one shell."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from gradscale import DynamicScale
from gradscale.core import gradients, tree
from gradscale.core.backend import require_values
from gradscale.core.messages import shown
from gradscale.core.protocols import Array, Collectives, Policy, ScaleState
from gradscale.core.unscaling import Listed, Request
from gradscale.errors import InvalidValueError
from gradscale.scaler.stepper import Step
from gradscale_torch import kernels
from gradscale_torch.arrays import TorchBackend
from gradscale_torch.devices import is_capturing, moved, refuse_capture
from gradscale_torch.gradients import TensorGradients, local_tensor, meshes_of, require_norm, values_of
from gradscale_torch.stepping import stepping

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from gradscale_torch.collectives import TorchCollectives

__all__ = ["ScalerBackend"]

Tensor = torch.Tensor
Optimizer = torch.optim.Optimizer

_CPU = torch.device("cpu")
# What the kernel is told that adapts a state of the CPU.
_FOUND = torch.zeros((), device=_CPU), torch.ones((), device=_CPU)
_State = TypeVar("_State", bound=tuple[Any, ...])


class ScalerBackend(TorchBackend):
    """The state stays in its tensors, so that frameworks and captured graphs see the scale; torch's kernels unscale.

    Parameters
    ----------
    device : torch.device, str, int or None
        The one that is trained on.
    allows_fp16 : bool
        Whether gradients may be float16.
    keeps_dtype : bool
        Whether a half-precision loss comes back in its dtype.
    timeout : float
        Seconds to wait for the ranks of a mesh.
    is_enabled : bool
        Whether the scaler scales.
    """

    is_shared = True

    def __init__(
        self,
        device: torch.device | str | int | None,
        *,
        allows_fp16: bool,
        keeps_dtype: bool,
        timeout: float,
        is_enabled: bool,
    ) -> None:
        self.device, self.allows_fp16, self.is_enabled = device, allows_fp16, is_enabled
        self._keeps_dtype, self._timeout = keeps_dtype, timeout
        self.is_replayed = False
        # The last scale of the CPU, and its reciprocal.
        self._inverse: tuple[float | None, Tensor] = 1.0, torch.ones((), dtype=torch.float32, device=_CPU)
        # The policy and the growth tracker that torch's kernel may adapt: the tracker must be below the interval.
        self._kernels: tuple[Policy, Tensor] | None = None
        self._meshes: dict[DeviceMesh, TorchCollectives] = {}

    def __reduce__(self) -> tuple[Callable[[], ScalerBackend], tuple[()]]:
        made = functools.partial(type(self), self.device, allows_fp16=self.allows_fp16, keeps_dtype=self._keeps_dtype)
        return functools.partial(made, timeout=self._timeout, is_enabled=self.is_enabled), ()

    @property
    def trains_on_cpu(self) -> bool:
        """Whether the device that is trained on is the CPU, or none was named."""
        return self.device is None or (not isinstance(self.device, int) and torch.device(self.device).type == "cpu")

    def example(self) -> Tensor:
        """Return a 0-d tensor on the device that is trained on."""
        return torch.zeros((), device=self.device)

    # The state.

    def first_state(self, policy: Policy, numbers: Mapping[str, float], like: Array) -> ScaleState:
        """Return a policy's first state on the device of a tensor."""
        require_values(like)
        home = like.device if isinstance(like, Tensor) else _CPU
        refuse_capture(home, "call scale() once before, or every replay would begin with the first scale again")
        with torch.inference_mode(False):
            state = self.with_numbers(policy.init(torch.zeros((), device=_CPU)), numbers)
            # Filled by kernels, for which nobody waits as for copies of the CPU's memory.
            return ScaleState(*(torch.full((), one.item(), dtype=one.dtype, device=home) for one in state))

    def adapt(self, policy: Policy, state: ScaleState, nonfinite: Tensor | int, held: Tensor | None) -> ScaleState:
        """Adapt the state in its tensors, so that a captured graph sees the new scale: by torch's kernel if it can."""
        if held is not None:
            before = ScaleState._make(map(torch.clone, state))
            state = self.adapt(policy, state, nonfinite, None)
            for field, old in zip(state, before, strict=True):
                field.copy_(torch.where(held, old, field))
            return state
        home = state.scale.device
        if home.type != "cpu" and is_capturing(home):
            self.is_replayed = True
        if isinstance(nonfinite, int):
            nonfinite = _FOUND[nonfinite > 0]
        if self._kernels is None or self._kernels[0] is not policy or self._kernels[1] is not state.growth_tracker:
            adapted = self.put(state, self.update(policy, state, nonfinite))
            self._kernels = (policy, adapted.growth_tracker) if _is_kernels_rule(policy) else None
            return adapted
        assert isinstance(policy, DynamicScale)
        factors = policy.growth_factor, policy.backoff_factor, policy.growth_interval
        found = nonfinite if nonfinite.dtype == torch.float32 else nonfinite.float()
        torch._amp_update_scale_(state.scale, state.growth_tracker, found, *factors)
        if home.type != "cpu" or state.scale.item() < policy.min_scale:
            # The kernel goes on into the subnormals, and to 0.
            state.scale.clamp_(min=policy.min_scale)
        # A new tuple of the same tensors: values kept for the old one are out of date.
        return ScaleState(*state)

    def put(self, old: _State, new: _State) -> _State:
        """Write a state, a named tuple of tensors, into the tensors of another, and return these as a new tuple."""
        if isinstance(old, ScaleState):
            self._kernels = None
        if old[0].is_inference():
            # They were made in torch's inference mode, and cannot be written outside of it.
            return type(old)(*map(torch.clone, new))
        for tensor, value in zip(old, new, strict=True):
            tensor.copy_(value)
        return type(old)(*old)

    # Outputs.

    def scale(self, outputs: Sequence[Tensor], state: ScaleState, /) -> list[Tensor]:
        """Multiply tensors by the scale, with torch's promotion."""
        scaled = []
        for tensor in outputs:
            if tensor.device.type != "cpu" and is_capturing(tensor.device):
                self.is_replayed = True
            product = tensor * moved(state.scale, tensor.device)
            scaled.append(product.to(tensor.dtype) if self._keeps_dtype else product)
        return scaled

    def map_outputs(
        self,
        outputs: object,
        home_for: Callable[[Tensor], Any],  # noqa: ARG002
        multiply: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    ) -> object:
        """Return outputs with every tensor multiplied, one by one.

        Lists, tuples, named tuples and dicts keep their kinds; any other iterable as an iterator, as torch has it, so
        that an unconsumed one scales nothing.
        """
        return multiply((outputs,))[0] if isinstance(outputs, Tensor) else _mapped(outputs, multiply)

    # Optimizers.

    def collect(self, optimizer: Any, listed: Listed, request: Request) -> TensorGradients:
        """Return an optimizer's gradients."""
        return TensorGradients(self, optimizer, listed, request)

    def stepping(self, step: Step) -> contextlib.AbstractContextManager[None] | None:
        """Return a context to make a step in of a fused optimizer; None for another one."""
        return stepping(step)

    def was_left_scaled(self, optimizer: Any, listed: Listed) -> bool:
        """Tell whether an optimizer's last step was left to unscale its gradients by itself."""
        parameters = listed.by_id(id(optimizer))
        return parameters is not None and parameters.left_scaled

    def inverse_of(self, scale: Tensor, number: float | None) -> Tensor:
        """Return the reciprocal of a scale, whose number is known on the CPU."""
        if number is None or number != self._inverse[0]:
            self._inverse = number, kernels.inverse_of(scale)
        return self._inverse[1]

    def groups_of(self, optimizer: Any) -> Sequence[Collectives]:
        """Return the mesh of an optimizer's DTensor parameters."""
        # Without a look at the gradients: a rank whose gradients are refused must not stay away.
        named = gradients.named_gradients(optimizer)
        return self.groups_over(optimizer, meshes_of(one.parameter for one in named))

    def groups_over(self, optimizer: Optimizer, meshes: Sequence[DeviceMesh]) -> Sequence[Collectives]:
        """Return the mesh of DTensor parameters as groups, if the scaler was given none."""
        if len(meshes) > 1:
            both = " and ".join(map(repr, meshes))
            msg = (
                f"the parameters of {type(optimizer).__name__} are DTensors of {len(meshes)} meshes, "
                f"{both}: which ranks have to agree is not known. Construct the scaler with group= (a mesh or process "
                f"group over all of them, such as torch.distributed.group.WORLD), or use an optimizer for each mesh"
            )
            raise InvalidValueError(msg)
        mesh = self.mesh_of(meshes)
        return () if mesh is None else [mesh]

    def norm_groups(self, optimizer: Any, *, is_alone: bool) -> Sequence[Collectives]:
        """Return the mesh over which the norm of DTensor gradients is taken."""
        mesh = self.mesh_of(require_norm(optimizer, is_alone=is_alone))
        return () if mesh is None else [mesh]

    def mesh_of(self, meshes: Sequence[DeviceMesh]) -> TorchCollectives | None:
        """Return the collectives over the mesh of DTensor parameters; None without one."""
        if not meshes:
            return None
        known = self._meshes.get(meshes[0])
        # A mesh of another world equals that of the one before.
        if known is None or not known.is_of_present_world:
            from gradscale_torch.collectives import TorchCollectives

            self._meshes[meshes[0]] = TorchCollectives(meshes[0], self._timeout)
        return self._meshes[meshes[0]]

    # What a diagnosis looks at.

    def values_of(self, x: Array) -> Array | None:
        """Return the dense tensor of a gradient's values on this rank. A loss may be of another library."""
        return values_of(x) if isinstance(x, Tensor) else x

    def shape_of(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of a gradient on this rank: of a DTensor, that of its local part."""
        return tuple(local_tensor(x).shape)


def _is_kernels_rule(policy: Policy) -> bool:
    """Tell whether torch's kernel and a lower bound are the whole of a policy's rule."""
    return (
        type(policy) is DynamicScale
        and policy.growth_after == "interval"
        and policy.hysteresis == 1
        and policy.tolerance is None
        and policy.max_scale is None
        and policy.at_min == "clamp"
    )


def _mapped(outputs: object, multiply: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> object:
    leaves, rebuild = tree.flatten(outputs, _is_leaf)
    return rebuild([_scaled(leaf, multiply) for leaf in leaves])


def _is_leaf(node: object) -> bool:
    return isinstance(node, Tensor) or not isinstance(node, (list, tuple, Mapping))


def _scaled(leaf: object, multiply: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> object:
    if isinstance(leaf, Tensor):
        return multiply((leaf,))[0]
    if isinstance(leaf, Iterable) and not isinstance(leaf, (str, bytes)):
        return (_mapped(value, multiply) for value in leaf)
    msg = f"outputs must be a Tensor or an iterable of Tensors, got {shown(leaf)} of type {type(leaf).__name__}"
    raise InvalidValueError(msg)
