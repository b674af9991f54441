"""Why CUDA cannot be used here, and what to do then: the errors of CuPy and CUDA as gradscale's.

The texts are pure functions of what was found. CuPy is imported where something is asked of it.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

from gradscale.errors import BackendError, BackendNotAvailableError, GradscaleError

__all__ = [
    "explained",
    "missing_library",
    "nccl_module",
    "nccl_package",
    "require_device",
    "require_nccl",
    "unusable_device",
    "version_text",
]

# Of CUDA's runtime; where the driver has the same condition, it has the same number.
_NO_DEVICE = 100
_OLD_DRIVER = (35, 36, 222)  # for the runtime; for a call; for what was compiled
_REMEDIES = {
    3: "a forked process cannot use it after its parent has: start processes by the method 'spawn'",
    46: "another process may hold the device for itself alone: look at what nvidia-smi shows",
    802: "a service that the device needs is not up, such as nvidia-fabricmanager: start it",
    803: "the driver's library and its kernel module differ in version, as after an update: restart the machine",
}
# What a kernel has done wrong: seen when it happens to be noticed, perhaps in another call.
_OF_KERNELS = frozenset({700, 702, *range(710, 720)})
_INSTALL_DRIVER = "install NVIDIA's driver, or start the container with --gpus all"

# The first CUDA for whose drivers there are wheels of CuPy 13.5 or later, which gradscale needs.
_FIRST_MAJOR = 11
_OF_CUDA = ("CUDARuntimeError", "CUDADriverError")
_PACKAGES = ("cupy", "cupy_backends", "cuda")


def version_text(number: int) -> str:
    """Return a version as CUDA numbers it, such as 12020, as text, such as 12.2."""
    return f"{number // 1000}.{number % 1000 // 10}"


def nccl_package(runtime: int) -> str:
    """Return the pip package that has NCCL for a CuPy of this CUDA runtime."""
    return f"nvidia-nccl-cu{runtime // 1000}"


def unusable_device(status: int, driver: int, runtime: int, visible: str | None) -> str:
    """Tell why no device can be used, and what to do, in one line; empty for an error that does not mean this.

    Parameters
    ----------
    status : int
        CUDA's error; 0 where it has none and there is no device.
    driver, runtime : int
        The newest CUDA that the driver knows, 0 without one, and that CuPy was built for, as CUDA numbers them.
    visible : str or None
        ``CUDA_VISIBLE_DEVICES``; None where it is not set.
    """
    known, built_for = version_text(driver), version_text(runtime)
    if driver == 0 and status in (0, _NO_DEVICE, *_OLD_DRIVER):
        return (
            f"there is no CUDA driver here, and CuPy was built for CUDA {built_for}: {_INSTALL_DRIVER}; without a GPU "
            f"use NumPy's arrays (backend='numpy')"
        )
    if status in _OLD_DRIVER:
        is_older = f"is older than the runtime {built_for} that CuPy was built for"
        needed = is_older if driver < runtime else "is too old for what CuPy asks of it"
        fits = _FIRST_MAJOR <= driver // 1000 < runtime // 1000
        other = f", or put the CuPy for it in place of this one: python -m pip install cupy-cuda{driver // 1000}x"
        return f"CUDA driver {known} {needed}: update NVIDIA's driver{other if fits else ''}"
    versions = f"driver of CUDA {known}, CuPy for CUDA {built_for}"
    if status in (0, _NO_DEVICE):
        remedy = (
            "start the container with --gpus all, and look whether nvidia-smi -L lists one"
            if visible is None
            else f"CUDA_VISIBLE_DEVICES is {visible!r}: unset it, or name a device that nvidia-smi -L lists"
        )
        return f"CUDA finds no device ({versions}): {remedy}"
    return f"CUDA cannot use a device ({versions}): {_REMEDIES[status]}" if status in _REMEDIES else ""


def missing_library(error: str, runtime: int) -> str:
    """Tell what to do where a library of CUDA cannot be loaded, whose name is in CuPy's text."""
    wheel = f"python -m pip install 'cupy-cuda{runtime // 1000}x[ctk]', which brings CUDA's libraries"
    remedy = _INSTALL_DRIVER if "libcuda.so" in error else wheel
    return f"CuPy lacks a library of CUDA ({error.strip()}): {remedy}"


def _translated(error: Exception, doing: str) -> GradscaleError | None:
    """Return what to raise in place of an error of CuPy or CUDA; None for other errors and for lack of memory."""
    text, name = str(error) or repr(error), type(error).__name__
    is_lacking = text.startswith("CuPy failed to load ") or name == "DynamicLibNotFoundError"
    if isinstance(error, MemoryError) or not (is_lacking or type(error).__module__.partition(".")[0] in _PACKAGES):
        return None
    driver, runtime = _versions()
    if is_lacking:
        return BackendNotAvailableError(missing_library(text, runtime))
    # Libraries beside CUDA number their errors, too.
    status = getattr(error, "status", -1) if name in _OF_CUDA else -1
    reason = unusable_device(status, driver, runtime, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if reason:
        return BackendNotAvailableError(f"{reason} ({text})")
    late = "; any kernel before may have done it, and CUDA_LAUNCH_BLOCKING=1 shows which"
    return BackendError(f"CUDA failed while {doing}: {text}{late if status in _OF_KERNELS else ''}")


@contextlib.contextmanager
def explained(doing: str) -> Iterator[None]:
    """Raise gradscale's errors in place of CuPy's and CUDA's, with these as the cause.

    Parameters
    ----------
    doing : str
        What is done inside, to follow "while".

    Raises
    ------
    BackendNotAvailableError
        When there is no device, no driver or an old one, or a library of CUDA is missing; says what to do.
    BackendError
        When CUDA fails otherwise, or a kernel cannot be compiled; with the text of CUDA or the compiler.
    """
    try:
        yield
    except Exception as error:
        failure = _translated(error, doing)
        if failure is None:
            raise
        raise failure from error


def require_device() -> None:
    """Raise BackendNotAvailableError where CuPy can use no CUDA device; touches no device."""
    runtime = _runtime()
    with explained("it counted the devices"):
        count = runtime.getDeviceCount()
    if not count:
        raise BackendNotAvailableError(unusable_device(0, *_versions(), os.environ.get("CUDA_VISIBLE_DEVICES")))


def require_nccl() -> None:
    """Raise BackendNotAvailableError where CuPy finds no NCCL, with the package; or first, where there is no device."""
    if nccl_module().available:
        return
    import cupy

    require_device()
    built_for = _runtime().runtimeGetVersion()
    # Before 13.5 CuPy does not look where pip puts it.
    is_old = tuple(map(int, cupy.__version__.split(".")[:2])) < (13, 5)
    newer = f"'cupy-cuda{built_for // 1000}x>=13.5' " if is_old else ""
    msg = (
        f"CuPy {cupy.__version__} finds no NCCL library, which its wheels do not bring: python -m pip install "
        f"{newer}{nccl_package(built_for)}"
    )
    raise BackendNotAvailableError(msg)


def nccl_module() -> Any:
    """Return ``cupy.cuda.nccl``, without CuPy's warning where ``available`` is False: that is for who needs it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from cupy.cuda import nccl
    return nccl


def _versions() -> tuple[int, int]:
    """Return the versions of CUDA of the driver and of CuPy, neither of which needs a device."""
    runtime = _runtime()
    return runtime.driverGetVersion(), runtime.runtimeGetVersion()


def _runtime() -> Any:
    from cupy.cuda import runtime

    return runtime
