"""When CUDA cannot be used, and what to do then: the errors of CuPy and CUDA as gradscale's."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from types import ModuleType

import cupy
from cupy.cuda import runtime

from gradscale.errors import BackendError, BackendNotAvailableError, CallOrderError

# Status codes of CUDA's runtime; the driver has the same number for the same condition.
_NO_DEVICE = 100
_OLD_DRIVER = (35, 36, 222)  # for the runtime; for a call; for a compiled kernel
_INSTALL_DRIVER = "install NVIDIA's driver, or start the container with --gpus all"
# The packages that raise errors of CUDA and its libraries.
_PACKAGES = ("cupy", "cupy_backends", "cuda")


def version_text(number: int) -> str:
    """Return a version as CUDA numbers it, such as 12020, as text, such as 12.2."""
    return f"{number // 1000}.{number % 1000 // 10}"


def nccl_package(number: int) -> str:
    """Return the pip package that has NCCL for a CuPy of this version of CUDA."""
    return f"nvidia-nccl-cu{number // 1000}"


def _unusable(status: int) -> str:
    """Tell why no device can be used, and what to do; empty for other errors."""
    if status not in (_NO_DEVICE, *_OLD_DRIVER):
        return ""
    # Neither needs a device.
    driver, built_for = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    versions = f"driver of CUDA {version_text(driver)}, CuPy for CUDA {version_text(built_for)}"
    if not driver:
        return f"there is no CUDA driver here: {_INSTALL_DRIVER}; without a GPU use NumPy's arrays (backend='numpy')"
    if status in _OLD_DRIVER:
        other = f", or install the CuPy for it, cupy-cuda{driver // 1000}x, in place of this one"
        return f"CUDA's driver is too old ({versions}): update it{other if driver // 1000 < built_for // 1000 else ''}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    remedy = (
        "start the container with --gpus all, and look whether nvidia-smi -L lists one"
        if visible is None
        else f"CUDA_VISIBLE_DEVICES is {visible!r}: unset it, or name a device that nvidia-smi -L lists"
    )
    return f"CUDA finds no device ({versions}): {remedy}"


@contextlib.contextmanager
def explained(doing: str) -> Iterator[None]:
    """Raise gradscale's errors in place of CuPy's and CUDA's, with these as the cause; but not for lack of memory.

    The message begins "CUDA failed while ``doing``". BackendNotAvailableError: no device, driver or library of CUDA.
    """
    try:
        yield
    except Exception as error:
        text, name = str(error) or repr(error), type(error).__name__
        if text.startswith("CuPy failed to load ") or name == "DynamicLibNotFoundError":
            wheel = f"python -m pip install 'cupy-cuda{runtime.runtimeGetVersion() // 1000}x[ctk]', which brings it"
            remedy = _INSTALL_DRIVER if "libcuda.so" in text else wheel
            msg = f"CuPy lacks a library of CUDA ({text.strip()}): {remedy}"
            raise BackendNotAvailableError(msg) from error
        if isinstance(error, MemoryError) or type(error).__module__.partition(".")[0] not in _PACKAGES:
            raise
        # Other libraries number their errors, too.
        reason = _unusable(getattr(error, "status", 0)) if name in ("CUDARuntimeError", "CUDADriverError") else ""
        msg = f"{reason} ({text})" if reason else f"CUDA failed while {doing}: {text}"
        raise (BackendNotAvailableError if reason else BackendError)(msg) from error


def require_device() -> None:
    """Raise BackendNotAvailableError if CuPy can use no CUDA device; touches no device."""
    with explained("it counted the devices"):
        count = runtime.getDeviceCount()
    if not count:
        raise BackendNotAvailableError(_unusable(_NO_DEVICE))


def require_nccl() -> None:
    """Raise BackendNotAvailableError if there is no device, or CuPy finds no NCCL; names the package."""
    if not nccl_module().available:
        require_device()
        msg = (
            f"CuPy {cupy.__version__} finds no NCCL library, which its wheels do not bring: python -m pip install "
            f"{nccl_package(runtime.runtimeGetVersion())}"
        )
        raise BackendNotAvailableError(msg)


def nccl_module() -> ModuleType:
    """Return ``cupy.cuda.nccl``, without the warning that CuPy gives if there is no NCCL."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from cupy.cuda import nccl
    module: ModuleType = nccl
    return module


def forbid_capture(what: str) -> None:
    """Raise CallOrderError while the current stream is capturing a CUDA graph."""
    if cupy.cuda.get_current_stream().is_capturing():
        msg = (
            f"{what} cannot be part of a CUDA graph, since a replay runs no Python, got a stream that is capturing: "
            f"capture gradscale.unscale(grads, state, out=grads) and policy.update, and step outside of the graph"
        )
        raise CallOrderError(msg)
