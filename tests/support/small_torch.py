"""A few parameters, their optimizer and a scaler, with gradients that a test says; and what is the same to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from axes_torch import GradScaler, torch
from host_cuda import on_host
from scenarios import Alone

__all__ = ["LAYOUTS", "Small", "assert_same", "groups_in_use", "optimizer_of", "without_kernel"]

KERNEL = torch._amp_foreach_non_finite_check_and_unscale_


def without_kernel(*dtypes: str) -> Callable[..., None]:
    """Return torch's unscaling kernel as a device has it that lacks it for some dtypes, as CUDA does for bfloat16."""

    def kernel(tensors, *rest):
        if any(str(tensor.dtype).removeprefix("torch.") in dtypes for tensor in tensors):
            msg = "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'"
            raise NotImplementedError(msg)
        KERNEL(tensors, *rest)

    return kernel


def strided(dense):
    room = torch.full((2 * dense.shape[0], 3 * dense.shape[1]), 7.0, dtype=dense.dtype)
    room[::2, 1::3] = dense
    return room[::2, 1::3]


def twice(dense):
    parts = [(0.25 * dense).to_sparse(), (0.75 * dense).to_sparse()]
    indices, values = (torch.cat([getattr(part, name)() for part in parts], -1) for name in ("indices", "values"))
    return torch.sparse_coo_tensor(indices, values, dense.shape)


# What stores the values of a gradient in another way.
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "subclass": lambda dense: torch.nn.Parameter(dense.clone(), requires_grad=False),
    "subclass-transposed": lambda dense: torch.nn.Parameter(dense.t().contiguous().t(), requires_grad=False),
    "transposed": lambda dense: dense.t().contiguous().t(),
    "strided": strided,
    "sliced": lambda dense: torch.cat([dense, dense])[: len(dense)],
    "offset": lambda dense: torch.cat([dense[0, :1], dense.flatten()])[1:].view(dense.shape),
    "channels-last": lambda dense: dense[None, :, :, None].to(memory_format=torch.channels_last)[0, :, :, 0],
    "coo": lambda dense: dense.to_sparse(),
    "coo-rows": lambda dense: dense.to_sparse(1),
    "coo-twice": twice,
}


def optimizer_of(name: str, parameters, **options):
    """Return an optimizer by its name and its implementation, such as ``SGD``, ``Adam-foreach`` and ``AdamW-fused``."""
    kind, _, variant = name.partition("-")
    switches = {"": {}, "single": {"foreach": False}}.get(variant, {variant: True})
    return getattr(torch.optim, kind)(parameters, **{"lr": 1.0, **options}, **switches)


class Small:
    """Parameters with their optimizer and their scaler.

    Parameters
    ----------
    scaler : object
        Torch's or ours.
    optimizer : str or callable, default "SGD"
        As for :func:`optimizer_of`, or what makes one of a list of parameters.
    count, size, start : optional
        How many parameters there are, of how many elements, and what these are.
    dtypes, devices : sequence of str
        Of the parameters; ``count`` is not needed then.
    home : str, default "cpu"
        Where the loss is.
    **options
        Of the optimizer; ``lr`` is 1.
    """

    def __init__(
        self,
        scaler,
        optimizer="SGD",
        *,
        count: int = 1,
        size: int = 2,
        start: float = 0.0,
        dtypes: Sequence[str] = ("float32",),
        devices: Sequence[str] = ("cpu",),
        home: str = "cpu",
        **options,
    ):
        self.scaler, self.home = scaler, home
        kinds = [{"dtype": getattr(torch, dtype), "device": device} for dtype in dtypes for device in devices]
        kinds *= max(1, count // len(kinds))
        self.parameters = [torch.nn.Parameter(torch.full((size,), start, **kind)) for kind in kinds]
        self.parameter = self.parameters[0]
        make = (lambda given: optimizer_of(optimizer, given, **options)) if isinstance(optimizer, str) else optimizer
        self.optimizer = make(self.parameters)

    def put(self, *gradients):
        """Scale a loss, and set the gradients to what is given: tensors, numbers or None; one serves all."""
        self.scaler.scale(torch.ones((), device=self.home))
        given = gradients if len(gradients) > 1 else gradients * len(self.parameters)
        for parameter, gradient in zip(self.parameters, given, strict=True):
            parameter.grad = torch.full_like(parameter, gradient) if isinstance(gradient, (int, float)) else gradient

    def give(self, *gradients):
        """Scale a loss, and set the gradients to these numbers or tensors times the scale; one serves all."""
        factor = self.scaler.scale(torch.ones((), device=self.home))
        given = gradients if len(gradients) > 1 else gradients * len(self.parameters)
        for parameter, gradient in zip(self.parameters, given, strict=True):
            values = torch.ones_like(parameter) * gradient * factor.to(parameter.device)
            parameter.grad = values.to(parameter.dtype)

    def step(self, *, explicit: bool = False, **options):
        """Make the step and the update, after ``unscale_`` if asked for, and return what ``step`` returned."""
        if explicit or options:
            self.scaler.unscale_(self.optimizer, **options)
        returned = self.scaler.step(self.optimizer)
        self.scaler.update()
        return returned

    def iterate(self, *gradients, explicit: bool = False):
        """Make one iteration with these numbers, times the scale, as gradients; return what ``step`` returned."""
        self.give(*gradients)
        return self.step(explicit=explicit)

    @property
    def report(self):
        """Return the report of the last step."""
        return self.scaler.last_step(self.optimizer)

    @property
    def held(self):
        """Return what the parameters hold, on whatever device."""
        return [on_host(parameter).tolist() for parameter in self.parameters]

    @property
    def state(self) -> tuple[float, int]:
        """Return the scale and the growth tracker."""
        return self.scaler.get_scale(), self.scaler._get_growth_tracker()


def groups_in_use(count: int, kind: Callable[[], Any] = Alone):
    """Return groups over which there was a message before, or None for none: the first one makes the host wait."""
    made = [kind() for _ in range(count)]
    if made:
        Small(GradScaler("cpu", group=made)).iterate(1.0)
    return made or None


def assert_same(one, other):
    """Assert that two values are equal: containers by their parts, tensors in dtype, layout and every bit."""
    assert _parts_of(one) == _parts_of(other), f"{one!r} is not {other!r}"


def _parts_of(value):
    """Return plain values that are equal where two values are the same."""
    if isinstance(value, torch.Tensor):
        x = value.detach()
        kind = type(value), x.dtype, x.layout, x.device, x.shape
        if x.layout == torch.sparse_coo:
            return kind, x.is_coalesced(), _parts_of(x._indices()), _parts_of(x._values())
        return kind, on_host(x).contiguous().flatten().view(torch.uint8).tolist()
    if isinstance(value, (dict, list, tuple)):
        return type(value), [_parts_of(part) for part in (value.items() if isinstance(value, dict) else value)]
    return type(value), "nan" if value != value else value
