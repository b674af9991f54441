"""What is said where CuPy cannot use CUDA, and that every other error stays what it is.

Errors are made as CuPy makes them.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from axes import require

from gradscale.errors import BackendError, BackendNotAvailableError, CallOrderError

pytestmark = pytest.mark.cupy

NO_DEVICE, OLD_DRIVER, CALL_TOO_NEW, PTX_TOO_NEW = 100, 35, 36, 222
RUNTIME = "cupy_backends.cuda.api.runtime.CUDARuntimeError"


def error_of(path: str, text: str = "cudaErrorSome: some text", status: int = 0, base: type = RuntimeError):
    """Return an error of a class of another library, by its name."""
    module, _, name = path.rpartition(".")
    error = type(name, (base,), {"__module__": module})(text)
    error.status = status
    return error


@pytest.fixture
def availability(monkeypatch: pytest.MonkeyPatch):
    """Return the module over a runtime built for CUDA 12.9, with a driver of CUDA 12.2 and no device."""
    require("cupy")
    from gradscale_cupy import availability

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    made = SimpleNamespace(driverGetVersion=lambda: 12020, runtimeGetVersion=lambda: 12090, getDeviceCount=lambda: 0)
    monkeypatch.setattr(availability, "runtime", made)
    return availability


TEXT = "(cudaErrorSome: some text)"
TOO_OLD = "CUDA's driver is too old (driver of CUDA 12.{}, CuPy for CUDA {}): update it{} " + TEXT
OTHER = ", or install the CuPy for it, cupy-cuda12x, in place of this one"
INSTALL = "install NVIDIA's driver, or start the container with --gpus all"
NO_DRIVER = f"there is no CUDA driver here: {INSTALL}; without a GPU use NumPy's arrays (backend='numpy') {TEXT}"
WHEEL = "CuPy lacks a library of CUDA ({}): python -m pip install 'cupy-cuda{}x[ctk]', which brings it"
NO_NVRTC, NO_LIBCUDA = (f"CuPy failed to load lib{name}.so: cannot open" for name in ("nvrtc", "cuda"))
NOT_FOUND = error_of("cuda.pathfinder._dynamic_libs.load_dl_common.DynamicLibNotFoundError", "no libnvrtc")
FAILED = "CUDA failed while arrays were made: "
NVRTC, COMPILER = "cupy_backends.cuda.libs.nvrtc.NVRTCError", "cupy.cuda.compiler.CompileException"
# The error, the versions of the driver and of CuPy, and what is said; None if the error stays what it is.
ERRORS: dict[str, tuple[BaseException | int, int, int, str | None]] = {
    "runtime too new": (OLD_DRIVER, 12080, 13020, TOO_OLD.format(8, 13.2, OTHER)),
    "call too new": (CALL_TOO_NEW, 12080, 13020, TOO_OLD.format(8, 13.2, OTHER)),
    "kernel too new": (PTX_TOO_NEW, 12020, 12090, TOO_OLD.format(2, 12.9, "")),
    "no driver": (OLD_DRIVER, 0, 13020, NO_DRIVER),
    "no driver and no device": (NO_DEVICE, 0, 13020, NO_DRIVER),
    "no nvrtc, CuPy 13": (RuntimeError(f"{NO_NVRTC}\n"), 12020, 12090, WHEEL.format(NO_NVRTC, 12)),
    "no nvrtc, CuPy 14": (NOT_FOUND, 13020, 13020, WHEEL.format("no libnvrtc", 13)),
    "no libcuda": (RuntimeError(NO_LIBCUDA), 12020, 12090, f"CuPy lacks a library of CUDA ({NO_LIBCUDA}): {INSTALL}"),
    "kernel": (700, 12020, 12090, f"{FAILED}cudaErrorSome: some text"),
    # Its numbers mean other things.
    "another library's number": (error_of(NVRTC, "NVRTC_ERROR", OLD_DRIVER), 12020, 12090, f"{FAILED}NVRTC_ERROR"),
    "compiler": (error_of(COMPILER, "error: no\n  such\n", base=Exception), 0, 0, f"{FAILED}error: no\\n  such\\n"),
    "memory": (error_of("cupy.cuda.memory.OutOfMemoryError", base=MemoryError), 12020, 12090, None),
    "gradscale": (CallOrderError("order"), 12020, 12090, None),
    "interrupt": (KeyboardInterrupt(), 12020, 12090, None),
}


@pytest.mark.parametrize(("error", "driver", "runtime", "said"), ERRORS.values(), ids=ERRORS)
def test_why_cuda_cannot_be_used_is_said_with_what_to_do_and_other_errors_stay_what_they_are(
    availability, error: BaseException | int, driver: int, runtime: int, said: str | None
):
    vars(availability.runtime).update(driverGetVersion=lambda: driver, runtimeGetVersion=lambda: runtime)
    raising = error_of(RUNTIME, status=error) if isinstance(error, int) else error
    with pytest.raises(BaseException) as raised, availability.explained("arrays were made"):  # noqa: PT011
        raise raising
    if said is None:
        assert raised.value is raising
        return
    kind = BackendError if said.startswith(FAILED) else BackendNotAvailableError
    assert (type(raised.value), str(raised.value)) == (kind, said)
    assert raised.value.__cause__ is raising


@pytest.mark.parametrize("visible", [None, "", "-1"], ids=["unset", "empty", "none"])
def test_a_machine_without_a_device_is_told_where_to_look(
    availability, visible: str | None, monkeypatch: pytest.MonkeyPatch
):
    remedy = "start the container with --gpus all, and look whether nvidia-smi -L lists one"
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        remedy = f"CUDA_VISIBLE_DEVICES is {visible!r}: unset it, or name a device that nvidia-smi -L lists"
    said = re.escape(f"CUDA finds no device (driver of CUDA 12.2, CuPy for CUDA 12.9): {remedy}")
    with pytest.raises(BackendNotAvailableError, match=f"^{said}$"):
        availability.require_device()
    availability.runtime.getDeviceCount = lambda: 1
    availability.require_device()


@pytest.mark.parametrize(("devices", "said"), [(1, "pip install nvidia-nccl-cu13$"), (0, "CUDA finds no device")])
def test_what_is_missing_is_named(availability, devices: int, said: str, monkeypatch: pytest.MonkeyPatch):
    from gradscale_cupy import nccl

    vars(availability.runtime).update(getDeviceCount=lambda: devices, runtimeGetVersion=lambda: 13020)
    monkeypatch.setattr(nccl.nccl, "available", False)
    with pytest.raises(BackendNotAvailableError, match=said):
        nccl.backend.collectives(None, timeout=1.0)
