"""CUDA devices for torch that compute on the host: copies to it arrive late, and what CUDA refuses in a capture fails.

It shows what the adapter asks for, in which order and of which device, and not that a GPU does it. Streams are as slow
as they may be: what is copied to the host without a wait is garbage until the host has waited for the right device.
Each wait is noted. Kernels of a captured graph run when it is replayed, and on what there is then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

aten = torch.ops.aten
Tensor = torch.Tensor

COUNT = 2
_CPU = torch.device("cpu")
# What memory holds to which nothing has been copied yet: no bits of a scale, a flag or a count.
_GARBAGE = 77.0
# What gives values to the host, or sizes that depend on values.
_READS = {
    *(aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten._coalesce.default),
    *(aten.masked_select.default, aten._unique2.default, aten.is_nonzero.default),
}
_UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default
_GET_GRADIENT, _SET_GRADIENT = Tensor.grad.__get__, Tensor.grad.__set__  # type: ignore[attr-defined]
_READS_OF_PYTHON = (Tensor.tolist, Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__bool__)


class DeviceTensor(Tensor):
    """A tensor that says it is on a device, and holds its values on the host."""

    values: Tensor
    gradient: Tensor | None = None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values: Tensor, device: torch.device) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.shape, strides=values.stride(), dtype=values.dtype, device=device
        )
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Run what is called outside of the stand-in, such as by the garbage collector or a failing test."""
        msg = f"{func} of a tensor of the stand-in, which is not there any more"
        raise RuntimeError(msg)


class Graph:
    """What a capture has recorded."""

    def __init__(self):
        self.calls: list[Callable[[], None]] = []
        self.made: list[Tensor] = []
        # What the capture itself does not overwrite.
        self.before: list[tuple[Tensor, Tensor]] = []

    def end(self):
        """Undo what was computed to find out the shapes."""
        for values, before in reversed(self.before):
            values.copy_(before)
        for values in self.made:
            values.fill_(_GARBAGE)

    def replay(self):
        """Run the kernels."""
        for call in self.calls:
            call()


class HostCuda:
    """Two devices, and what the host has done with them.

    Attributes
    ----------
    waits : list of str
        Which operations have made the host wait for a device.
    launches : int
        How many operations on the devices there were, but for views, empty tensors and copies to the host.
    current : int
        The current device.
    graph : Graph or None
        The graph that is captured.
    """

    def __init__(self):
        self.waits: list[str] = []
        self.launches = self.current = 0
        self.graph: Graph | None = None
        # By device, the copies that are on their way to the host: what they fill, and with what.
        self._copies: dict[int, list[tuple[Tensor, Tensor]]] = {index: [] for index in range(COUNT)}

    def refuse_capture(self):
        """Raise what CUDA does, while a graph is captured."""
        if self.graph is not None:
            msg = "CUDA error: operation not permitted when stream is capturing"
            raise RuntimeError(msg)

    def wait(self, device: torch.device, what: str):
        """Make the host wait for a device."""
        self.refuse_capture()
        self.waits.append(what)
        self.finish(device.index)

    def finish(self, index: int, count: int | None = None):
        """Let copies arrive: all of a device, or the first ones."""
        copies = self._copies[index]
        for target, source in copies[:count]:
            target.copy_(source)
        del copies[:count]

    @contextlib.contextmanager
    def capture(self) -> Iterator[Graph]:
        """Capture a graph."""
        self.graph = graph = Graph()
        try:
            yield graph
        finally:
            self.graph = None
            graph.end()

    def indexed(self, device) -> torch.device:
        """Return a device with its number, for which the current one stands in."""
        found = torch.device(device)
        return torch.device("cuda", self.current) if found.type == "cuda" and found.index is None else found

    def run(self, func, args, kwargs):
        """Run an operation of torch's."""
        if func is aten._to_copy.default:
            return self._copied(*args, **kwargs)
        if func is aten.copy_.default:
            return self.copied_into(*args, **kwargs)
        kwargs.pop("pin_memory", None)
        flat, spec = tree_flatten((args, kwargs))
        tensors = [one for one in flat if isinstance(one, DeviceTensor)]
        devices = {one.device for one in tensors}
        asked = kwargs.get("device")
        if asked is not None and torch.device(asked).type == "cuda":
            devices.add(self.indexed(asked))
        others = [one for one in flat if isinstance(one, Tensor) and not isinstance(one, DeviceTensor) and one.dim()]
        if len(devices) > 1 or (devices and others):
            msg = f"Expected all tensors to be on the same device, but {func} found {sorted(map(str, devices))} and cpu"
            raise RuntimeError(msg)
        if not devices:
            return func(*args, **kwargs)
        (home,) = devices
        self.launches += not func.is_view and "empty" not in func.name()
        if func in _READS:
            self.wait(home, str(func))
        by_values = {id(one.values): one for one in tensors}
        args, kwargs = tree_unflatten(list(map(on_host, flat)), spec)
        if "device" in kwargs:
            kwargs["device"] = _CPU

        def wrapped(value):
            known = by_values.get(id(value), value)
            return DeviceTensor(value, home) if known is value and isinstance(value, Tensor) else known

        return tree_map(wrapped, self._launched(func, args, kwargs))

    def _launched(self, func, args, kwargs):
        """Run a kernel, or record it where a graph is captured."""
        graph = self.graph
        if func is _UNSCALE:
            _require_kernel(*args)
        if graph is None:
            return func(*args, **kwargs)
        given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
        if func._schema.is_mutable:
            graph.before += [(one, one.clone()) for one in given]
        made = func(*args, **kwargs)
        known = {one.untyped_storage().data_ptr() for one in given}
        flat = [one for one in tree_flatten(made)[0] if isinstance(one, Tensor)]
        fresh = [one for one in flat if one.untyped_storage().data_ptr() not in known]
        graph.made += fresh

        def again():
            results = [one for one in tree_flatten(func(*args, **kwargs))[0] if isinstance(one, Tensor)]
            for target, result in zip(flat, results, strict=True):
                if any(target is one for one in fresh):
                    target.copy_(result)

        # A view is one of whatever there is.
        if fresh or func._schema.is_mutable:
            graph.calls.append(again)
        return made

    def _copied(self, x: Tensor, **options) -> Tensor:
        """Return a copy on any device, of any dtype."""
        asked = options.pop("device", None)
        options.pop("pin_memory", None)
        is_late = options.pop("non_blocking", False)
        device = x.device if asked is None else self.indexed(asked)
        values = on_host(x)
        if device.type == "cpu":
            if x is values:
                return aten._to_copy.default(values, **options)
            target = torch.full_like(values, _GARBAGE, dtype=options.get("dtype") or values.dtype)
            self._to_host(target, x, is_late=is_late)
            return target
        if x is values:
            self._from_host(device, is_late=is_late)
        self.launches += 1
        return DeviceTensor(self._launched(aten._to_copy.default, (values,), options), device)

    def copied_into(self, target: Tensor, x: Tensor, non_blocking: bool = False) -> Tensor:
        """Overwrite a tensor on any device."""
        if isinstance(target, DeviceTensor):
            self.launches += 1
            if x.device.type == "cpu" and x.dim():
                self._from_host(target.device, is_late=non_blocking)
            self._launched(aten.copy_.default, (target.values, on_host(x)), {})
        elif isinstance(x, DeviceTensor):
            target.fill_(_GARBAGE)
            self._to_host(target, x, is_late=non_blocking)
        else:
            aten.copy_.default(target, x)
        return target

    def _to_host(self, target: Tensor, x: Tensor, *, is_late: bool):
        assert isinstance(x, DeviceTensor)
        assert not is_late or self.graph is None, "a graph would fill memory of the host that has other owners by then"
        self._copies[x.device.index].append((target, x.values.clone()))
        if not is_late:
            self.wait(x.device, "a copy to the host")

    def _from_host(self, device: torch.device, *, is_late: bool):
        if not is_late:
            self.wait(device, "a copy from the host")
        assert self.graph is None, "a graph would read memory of the host that has other owners by then"


def _require_kernel(tensors: list[Tensor], flag: Tensor, factor: Tensor):
    """Refuse bfloat16, and take float64 that float32 cannot hold for infinite, as CUDA's kernel does."""
    if any(one.dtype is torch.bfloat16 for one in tensors):
        msg = "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'"
        raise NotImplementedError(msg)
    wide = [one.float() for one in tensors if one.dtype is torch.float64]
    if wide:
        _UNSCALE(wide, flag, factor)


def _is_device(x) -> bool:
    return isinstance(x, torch.device) or (isinstance(x, str) and x.startswith("cuda"))


def on_host(x):
    """Return what a tensor holds, without a wait; anything else as it is."""
    return x.values if isinstance(x, DeviceTensor) else x


@contextlib.contextmanager
def installed() -> Iterator[HostCuda]:
    """Give torch two such devices."""
    cuda = HostCuda()

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return cuda.run(func, args, dict(kwargs or {}))

    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if func is torch.asarray and torch.device(kwargs.get("device") or _CPU).type == "cuda":
                # Numbers are copied, and waited for.
                return func(*args, **{**kwargs, "device": None}).to(kwargs["device"])
            # These make the device current, which a build of torch without CUDA cannot.
            if func is Tensor.to:
                args, kwargs = tree_map(lambda one: cuda.indexed(one) if _is_device(one) else one, (args, kwargs))
            elif args and isinstance(args[0], DeviceTensor):
                if func in _READS_OF_PYTHON:
                    cuda.wait(args[0].device, f"Tensor.{func.__name__}")
                    return func(args[0].values)
                if func is Tensor.copy_:
                    return cuda.copied_into(*args, **kwargs)
                if func is Tensor.__getitem__:
                    return DeviceTensor(args[0].values[args[1]], args[0].device)
                if func == _GET_GRADIENT:
                    return args[0].gradient
                if func == _SET_GRADIENT:
                    args[0].gradient = args[1]
                    return None
            return func(*args, **kwargs)

    class Event:
        """A point in a stream, which its device stands for; over when the copies before it have arrived."""

        def __init__(self, device=None, **_options: bool):
            assert torch.device(device).type == "cuda"

        def record(self, stream: torch.device | None = None):
            # Without a stream that of the current device, whatever it was made with.
            self._index = cuda.current if stream is None else stream.index
            self._before = {id(target) for target, _ in cuda._copies[self._index]}

        def query(self) -> bool:
            cuda.refuse_capture()
            return self._before.isdisjoint(id(target) for target, _ in cuda._copies[self._index])

        def synchronize(self):
            if not self.query():
                cuda.wait(torch.device("cuda", self._index), "an event")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "Event", Event)
        patch.setattr(torch.accelerator, "current_stream", cuda.indexed)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: cuda.current)
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: cuda.graph is not None)
        with Functions(), Operations():
            yield cuda
