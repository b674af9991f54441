"""A ``cupy`` over NumPy: what gradscale_cupy needs of it, with kernels that run on the host and two devices.

It proves what the adapter asks for, in which order and on which device, and not that a GPU does it. Reading a value
other than by ``get`` is an error here, so that every host read is seen. While a stream is captured it forbids what CUDA
does: to wait for a device, to ask for an event, to wait for one of outside, and to copy from the host.
"""

from __future__ import annotations

import ctypes
import dataclasses
import sys
import threading
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import host_kernels
import numpy as np
import pytest

from gradscale import registry

__all__ = ["Device", "Event", "HostCupy", "Stream", "Work", "add_work", "forget", "installed", "log"]

_current = threading.local()
_ROW = 24  # bytes
_NOT_READY = 600
_PATIENCE = 10  # seconds

log: list[tuple[Any, ...]] = []


@dataclasses.dataclass(eq=False)
class Work:
    """What a stream does later: as late as it may, not before ``ready``, and never without a time."""

    write: Callable[[], object] = lambda: None
    ready: float | None = 0.0
    is_done: bool = False


_work: defaultdict[int, list[Work]] = defaultdict(list)
_working = threading.Lock()


def add_work(device_id: int, work: Work):
    """Put work on the stream of a device."""
    with _working:
        _work[device_id].append(work)


def _advance(device_id: int):
    """Let a stream do what is ready, in its order."""
    with _working:
        queue = _work[device_id]
        while queue and queue[0].ready is not None and queue[0].ready <= time.monotonic():
            queue[0].write()
            queue.pop(0).is_done = True


def _wait(device_id: int, last: Work | None):
    """Wait for work on a stream; a kernel that waits for others has no end, so that there is a limit here."""
    limit = time.monotonic() + _PATIENCE
    _advance(device_id)
    while last is not None and not last.is_done:
        assert time.monotonic() < limit, "the host waits for a kernel that never ends"
        time.sleep(1e-4)
        _advance(device_id)


class Device:
    """One of two devices, or of as many as ``count`` says; current in a ``with`` block."""

    count: ClassVar[int] = 2

    def __init__(self, device=None):
        self.id: int = _device_id() if device is None else getattr(device, "id", device)
        if not 0 <= self.id < self.count:
            msg = f"there is no device {self.id}"
            raise ValueError(msg)

    @property
    def pci_bus_id(self) -> str:
        """The name of its place in the machine."""
        return f"0000:0{self.id}:00.0"

    def use(self) -> Device:
        """Make it the thread's current device."""
        _current.stack = [*getattr(_current, "stack", [])[:-1], self.id]
        return self

    def __enter__(self) -> Device:
        _current.stack = [*getattr(_current, "stack", []), self.id]
        return self

    def __exit__(self, *_: object):
        _current.stack = _current.stack[:-1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    # As CuPy's.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"


class CUDARuntimeError(RuntimeError):
    """As CuPy's: a status, and the text of CUDA."""

    __module__ = "cupy_backends.cuda.api.runtime"

    def __init__(self, status: int):
        super().__init__(_ERRORS[status])
        self.status = status


_ERRORS = {
    700: "cudaErrorIllegalAddress: an illegal memory access was encountered",
    900: "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing",
    905: "cudaErrorStreamCaptureIsolation: dependency created on uncaptured work in another stream",
}


def _forbid_capture():
    if HostCupy.capturing:
        raise CUDARuntimeError(900)


def _device_id() -> int:
    stack: list[int] = getattr(_current, "stack", [])
    return stack[-1] if stack else 0


class Ndarray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array on a device; operations on arrays of two devices, and implicit reads, are errors."""

    # By which the registry knows whose they are.
    __module__ = "cupy"

    def __init__(self, x, device: Device):
        self._x = np.asarray(x)
        self.device = device

    @property
    def data(self):
        """The memory."""
        return SimpleNamespace(ptr=self._x.ctypes.data, device_id=self.device.id)

    def get(self):
        """Return a NumPy array: a host read."""
        _forbid_capture()
        log.append(("read", self.device.id))
        _wait(self.device.id, next(reversed(_work[self.device.id]), None))
        return self._x.copy()

    def __array_ufunc__(self, ufunc, method: str, *inputs, **options):
        return _call(_flushing(getattr(ufunc, method)), inputs, options)

    def __getattr__(self, name: str):
        if name.startswith("__") or name in _READS:
            msg = f"implicit conversion to a host value: {name}"
            raise AttributeError(msg)
        found = getattr(self._x, name)
        if isinstance(found, np.ndarray):
            return Ndarray(found, self.device)
        if callable(found):
            cast = (lambda *args, **options: _flushed(found(*args, **options))) if name == "astype" else found
            return lambda *args, **options: _call(cast, args, options, self.device)
        return found

    # Asked for most.
    shape = property(lambda self: self._x.shape)
    dtype = property(lambda self: self._x.dtype)
    strides = property(lambda self: self._x.strides)
    size = property(lambda self: self._x.size)
    ndim = property(lambda self: self._x.ndim)
    nbytes = property(lambda self: self._x.nbytes)

    def __getitem__(self, key):
        return _wrapped(self._x[_plain(key, [])], self.device)

    def __setitem__(self, key, value):
        used = [self.device]
        self._x[_plain(key, [])] = _plain(value, used)
        assert all(device == self.device for device in used), f"assignment of arrays on {used}"

    def __len__(self) -> int:
        return len(self._x)

    def __repr__(self) -> str:
        return f"{self._x!r} on {self.device}"

    def _forbid(self, *_):
        msg = "implicit conversion to a host value"
        raise TypeError(msg)

    __bool__ = __int__ = __float__ = __complex__ = __index__ = __array__ = _forbid


_READS = ("item", "tolist", "tobytes", "__array_interface__", "__dlpack__")


def _plain(value, used: list[Device]):
    """Return what NumPy can work with, and note the devices of the arrays in it."""
    kind = type(value)
    if kind is Ndarray:
        used.append(value.device)
        return value._x
    return kind([_plain(one, used) for one in value]) if kind is tuple or kind is list else value


def _wrapped(value, device: Device):
    if isinstance(value, (np.ndarray, np.generic)):
        return Ndarray(value, device)
    if isinstance(value, (tuple, list)):
        return type(value)(_wrapped(one, device) for one in value)
    return value


def _call(function: Callable[..., Any], args, options: dict[str, Any], home: Device | None = None):
    used = [home] if home else []
    plain = [_plain(one, used) for one in args]
    named = {name: _plain(value, used) for name, value in options.items()} if options else {}
    first = used[0] if used else Device()
    for device in used:
        # Thousands of calls go through here.
        assert device is first or device.id == first.id, f"{function} of arrays on {used}"
    with np.errstate(all="ignore"):
        made = function(*plain, **named)
    given = options.get("out")
    if given is not None:
        return given[0] if isinstance(given, tuple) else given
    return _wrapped(made, first)


def _flushed(x):
    """Return values with 0 in the place of float32 subnormals, for which CuPy's own kernels take them (-ftz=true)."""
    if getattr(x, "dtype", None) != np.float32:
        return x
    is_subnormal = (x != 0) & (np.abs(x) < np.finfo(np.float32).smallest_normal)
    return np.where(is_subnormal, np.copysign(np.float32(0), x), x) if is_subnormal.any() else x


def _flushing(function: Callable[..., Any]):
    """Return a function of NumPy's that computes as CuPy's kernels do."""

    def flushing(*args, **options):
        made = function(*map(_flushed, args), **options)
        return made if "out" in options else _flushed(made)

    return flushing


class Stream:
    """The stream of a device; it is its own."""

    ptr = 0

    def __init__(self, device_id: int):
        self.device_id = device_id

    def is_capturing(self) -> bool:
        """Tell whether a graph is captured."""
        return self.device_id in HostCupy.capturing

    def record(self) -> Event:
        """Return a new event behind what is in the stream."""
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event):
        """Note that the stream waits."""
        if self.is_capturing() and not event.is_captured:
            raise CUDARuntimeError(905)
        log.append(("wait", self.device_id, event.device_id))


class Event:
    """A point in a stream."""

    _all: ClassVar[list[Event]] = []
    queries: ClassVar[list[int]] = []
    # The status of all, after the device has failed.
    broken: ClassVar[int | None] = None

    def __init__(self, **_options: bool):
        self.device_id = -1
        self.is_captured = False
        self.ptr = len(self._all)
        self._all.append(self)

    def record(self, stream: Stream | None = None):
        """Note what is in the stream."""
        self.device_id = _device_id() if stream is None else stream.device_id
        self.is_captured = self.device_id in HostCupy.capturing
        self._last = next(reversed(_work[self.device_id]), None)

    def synchronize(self):
        """Make the host wait: a host read."""
        _forbid_capture()
        log.append(("read", self.device_id))
        _wait(self.device_id, self._last)

    @classmethod
    def query(cls, ptr: int) -> int:
        """Return a status of CUDA: whether an event is over, or the device has failed."""
        _forbid_capture()
        cls.queries.append(ptr)
        if cls.broken is not None:
            return cls.broken
        event = cls._all[ptr]
        _advance(event.device_id)
        return 0 if event._last is None or event._last.is_done else _NOT_READY


class RawKernel:
    """A kernel, on the host."""

    def __init__(self, code: str, name: str, _options: tuple[str, ...]):
        assert code == host_kernels.SOURCE.read_text(encoding="utf-8")
        self._name = name

    def __call__(self, grid: tuple[int], block: tuple[int], args: tuple[Any, ...]):
        """Launch it as CuPy does."""
        expected = host_kernels.ARGUMENTS[self._name.partition("_")[0]]
        assert (grid[0] > 0, block) == (True, (256,))
        assert len(args) == len(expected)
        assert all(x.dtype == kind for x, kind in zip(args, expected, strict=True))
        assert {x.device.id for x in args if isinstance(x, Ndarray)} == {_device_id()}
        _advance(_device_id())
        host_kernels.run(host_kernels.library(), self._name, grid[0], [_c_value(x) for x in args])
        arrays = args[0].size // _ROW if len(expected) > 3 else 1
        log.append(("launch", self._name, _device_id(), arrays))


def _c_value(x):
    if isinstance(x, Ndarray):
        return ctypes.c_void_p(x.ctypes.data)
    return np.ctypeslib.as_ctypes_type(x.dtype)(x.item())


def _current_stream(device_id: int = -1) -> Stream:
    return Stream(_device_id() if device_id < 0 else device_id)


class HostCupy(types.ModuleType):
    """The module: NumPy's functions, on arrays of the current device."""

    capturing: ClassVar[set[int]] = set()

    def __init__(self, devices: int):
        super().__init__("cupy")
        self.__version__ = "14.2.0"
        hidden = ("abs", "max", "min", "round")
        self.__all__ = [name for name in np.__all__ if name not in hidden and not name.startswith("__")]
        self.__path__: list[str] = []
        self.ndarray = Ndarray
        self.RawKernel = RawKernel
        self.cuda = types.ModuleType("cupy.cuda")
        self.cuda.Device, self.cuda.Event, self.cuda.Stream = Device, Event, Stream
        self.cuda.get_current_stream = _current_stream
        self.cuda.device = types.ModuleType("cupy.cuda.device")
        self.cuda.device.Device = Device
        self.cuda.nccl = SimpleNamespace(available=False)
        self.cuda.runtime = SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            driverGetVersion=lambda: 13020 if devices else 0,
            eventQuery=Event.query,
            getDeviceCount=lambda: devices,
            getDeviceProperties=lambda device: {"name": f"host {device}".encode()},
            runtimeGetVersion=lambda: 13020,
        )
        self.log = log

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(np, name)
        if not isinstance(found, type) and callable(found):
            # Asked for thousands of times, and found at once from now on.
            function = _flushing(found) if isinstance(found, np.ufunc) else found
            vars(self)[name] = lambda *args, **options: _call(function, args, options)
            return vars(self)[name]
        return found

    def array(self, x, dtype=None, **options):
        """Return a copy on the current device, also of an array of another one."""
        made = np.array(_plain(x, []), dtype=dtype, **options)
        if not isinstance(x, Ndarray) and made.ndim:
            # It goes through pinned memory; a number is what a kernel is called with.
            _forbid_capture()
        return _wrapped(made, Device())

    def asnumpy(self, x: Ndarray):
        """Return a NumPy array: a host read."""
        return x.get()

    def asarray(self, x, dtype=None, **options):
        """Return an array of the current device: itself where it is one."""
        if isinstance(x, Ndarray) and x.device == Device() and dtype in (None, x.dtype):
            return x
        return self.array(x, dtype, **options)


def forget():
    """Forget what devices have done and have yet to do."""
    log.clear()
    _work.clear()
    Event.queries.clear()
    Event.broken = None
    HostCupy.capturing = set()


@contextmanager
def installed(*, devices: int = 2) -> Iterator[HostCupy]:
    """Put the module in the place of CuPy, with so many devices; forget all that was imported with it afterwards."""
    module = HostCupy(devices)
    forget()
    replaced: dict[str, Any] = {"cupy.linalg": np.linalg, "cupy.fft": np.fft}
    replaced |= {"cupy": module, "cupy.cuda": module.cuda, "cupy.cuda.device": module.cuda.device}
    before = [name for name in sys.modules if _is_affected(name)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Device, "count", max(devices, 1))
        for name in before:
            patch.delitem(sys.modules, name)
        for name, value in replaced.items():
            patch.setitem(sys.modules, name, value)
        registry.refresh()
        try:
            yield module
        finally:
            registry.refresh()
            for name in [name for name in sys.modules if _is_affected(name)]:
                del sys.modules[name]


def _is_affected(name: str) -> bool:
    return name.startswith(("cupy", "gradscale_cupy", "array_api_compat.cupy"))
