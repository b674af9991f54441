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
    "translated",
    "unusable_device",
    "version_text",
]

_OF_CUDA = ("CUDARuntimeError", "CUDADriverError")
# Of CUDA's runtime; where the driver has the same condition, it has the same number.
_NOT_INITIALIZED, _INSUFFICIENT_DRIVER, _CALL_NEEDS_NEWER_DRIVER, _NO_DEVICE, _PTX_TOO_NEW = 3, 35, 36, 100, 222
_OLD_DRIVER = (_INSUFFICIENT_DRIVER, _CALL_NEEDS_NEWER_DRIVER, _PTX_TOO_NEW)
_REMEDIES = {
    _NOT_INITIALIZED: "a forked process cannot use it after its parent has: start processes by the method 'spawn'",
    46: "another process may hold the device for itself alone: look at what nvidia-smi shows",
    802: "a service that the device needs is not up, such as nvidia-fabricmanager: start it",
    803: "the driver's library and its kernel module differ in version, as after an update: restart the machine",
}
# What a kernel has done wrong: seen when it happens to be noticed, perhaps in another call.
_OF_KERNELS = frozenset({700, 702, *range(710, 720)})

# The first CUDA for whose drivers there are wheels of CuPy 13 or later, which gradscale needs.
_FIRST_MAJOR = 11
_PACKAGES = ("cupy", "cupy_backends", "cuda")
_NOT_LOADED = "CuPy failed to load "


def version_text(number: int) -> str:
    """Return a version as CUDA numbers it, such as 12020, as text, such as 12.2."""
    return f"{number // 1000}.{number % 1000 // 10}"


def nccl_package(runtime: int) -> str:
    """Return the pip package that has NCCL for a CuPy of this CUDA runtime."""
    return f"nvidia-nccl-cu{runtime // 1000}"


def unusable_device(status: int, driver: int, runtime: int, visible: str | None) -> str:
    """Tell why no device can be used, and what to do.

    Parameters
    ----------
    status : int
        CUDA's error; 0 where it has none and there is no device.
    driver, runtime : int
        The newest CUDA that the driver knows, and the CUDA that CuPy was built for, as CUDA numbers them; 0 for a
        driver that is not there.
    visible : str or None
        ``CUDA_VISIBLE_DEVICES``; None where it is not set.

    Returns
    -------
    text : str
        One line; empty for an error that does not mean this.
    """
    if driver == 0 and status in (0, _NO_DEVICE, *_OLD_DRIVER):
        return (
            f"there is no CUDA driver here, and CuPy was built for CUDA {version_text(runtime)}: install NVIDIA's "
            f"driver, or start the container with --gpus all; without a GPU use NumPy's arrays (backend='numpy')"
        )
    versions = f"driver of CUDA {version_text(driver)}, CuPy for CUDA {version_text(runtime)}"
    if status in _OLD_DRIVER:
        major = driver // 1000
        fits = _FIRST_MAJOR <= major < runtime // 1000
        other = f", or put the CuPy for it in place of this one: python -m pip install cupy-cuda{major}x"
        needed = (
            f"is older than the runtime {version_text(runtime)} that CuPy was built for"
            if driver < runtime
            else "is too old for what CuPy asks of it"
        )
        return f"CUDA driver {version_text(driver)} {needed}: update NVIDIA's driver{other if fits else ''}"
    if status in (0, _NO_DEVICE):
        remedy = (
            "start the container with --gpus all, and look whether nvidia-smi -L lists one"
            if visible is None
            else f"CUDA_VISIBLE_DEVICES is {visible!r}: unset it, or name a device that nvidia-smi -L lists"
        )
        return f"CUDA finds no device ({versions}): {remedy}"
    if status in _REMEDIES:
        return f"CUDA cannot use a device ({versions}): {_REMEDIES[status]}"
    return ""


def missing_library(error: str, runtime: int) -> str:
    """Tell what to do where a library of CUDA cannot be loaded, whose name is in CuPy's text."""
    remedy = (
        "install NVIDIA's driver, or start the container with --gpus all"
        if "libcuda.so" in error
        else f"python -m pip install 'cupy-cuda{runtime // 1000}x[ctk]', which brings CUDA's libraries"
    )
    return f"CuPy lacks a library of CUDA ({error.strip()}): {remedy}"


def translated(error: Exception, doing: str) -> GradscaleError | None:
    """Return what to raise in place of an error of CuPy or CUDA, or None for other errors and for lack of memory.

    Parameters
    ----------
    error : Exception
        As it was caught.
    doing : str
        What failed, to follow "while".

    Returns
    -------
    error : BackendNotAvailableError, BackendError or None
        The former where CUDA cannot be used here at all.
    """
    text = str(error) or repr(error)
    is_lacking = text.startswith(_NOT_LOADED) or type(error).__name__ == "DynamicLibNotFoundError"
    origin = type(error).__module__.partition(".")[0]
    if isinstance(error, MemoryError) or not (is_lacking or origin in _PACKAGES):
        return None
    # Libraries beside CUDA number their errors, too.
    status = getattr(error, "status", -1) if type(error).__name__ in _OF_CUDA else -1
    driver, runtime = _versions()
    if is_lacking:
        return BackendNotAvailableError(missing_library(text, runtime))
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
    except GradscaleError:
        raise
    except Exception as error:
        failure = translated(error, doing)
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
