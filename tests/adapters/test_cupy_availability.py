"""What is said where CuPy cannot use CUDA, and that every other error stays what it is.

Errors are made as CuPy makes them; where CuPy is installed without a device, its own are taken as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from axes import require
from host_cupy import installed

from gradscale.errors import BackendError, BackendNotAvailableError, CallOrderError

pytestmark = pytest.mark.numpy

NO_DEVICE, OLD_DRIVER, CALL_TOO_NEW, PTX_TOO_NEW = 100, 35, 36, 222


class CUDARuntimeError(RuntimeError):
    """As CuPy's: with a status, and from one of its modules."""

    __module__ = "cupy_backends.cuda.api.runtime"

    def __init__(self, status: int, text: str = "cudaErrorSome: some text") -> None:
        super().__init__(text)
        self.status = status


class NVRTCError(CUDARuntimeError):
    """As CuPy's: its numbers mean other things."""

    __module__ = "cupy_backends.cuda.libs.nvrtc"


class CompileException(Exception):  # noqa: N818
    """As CuPy's."""

    __module__ = "cupy.cuda.compiler"


class DynamicLibNotFoundError(RuntimeError):
    """As cuda-pathfinder's, by which CuPy 14 finds libraries."""

    __module__ = "cuda.pathfinder._dynamic_libs.load_dl_common"


class OutOfMemoryError(MemoryError):
    """As CuPy's."""

    __module__ = "cupy.cuda.memory"


@pytest.fixture
def availability(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the module over a stand-in for CuPy, built for CUDA 12.9 and with a driver of CUDA 12.2."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with installed():
        from gradscale_cupy import availability

        set_versions(availability, 12020, 12090)
        yield availability


def set_versions(availability: Any, driver: int, runtime: int) -> None:
    vars(availability.runtime).update(driverGetVersion=lambda: driver, runtimeGetVersion=lambda: runtime)


def reason(availability: Any, error: Exception) -> str:
    """Return why CUDA is not available, from an error of CuPy's."""
    with pytest.raises(BackendNotAvailableError) as raised, availability.explained("arrays were made"):
        raise error
    assert raised.value.__cause__ is error
    assert isinstance(raised.value, ImportError)
    return str(raised.value)


@pytest.mark.parametrize(("number", "text"), [(12020, "12.2"), (11040, "11.4"), (13000, "13.0"), (10010, "10.1")])
def test_versions_are_written_as_people_do(availability: Any, number: int, text: str) -> None:
    assert availability.version_text(number) == text


@pytest.mark.parametrize("status", [OLD_DRIVER, CALL_TOO_NEW, PTX_TOO_NEW])
def test_an_old_driver_is_named_with_both_versions_and_the_cupy_for_it(availability: Any, status: int) -> None:
    set_versions(availability, 12080, 13020)
    assert reason(availability, CUDARuntimeError(status)) == (
        "CUDA's driver is too old (driver of CUDA 12.8, CuPy for CUDA 13.2): update it, or install the CuPy for it, "
        "cupy-cuda12x, in place of this one (cudaErrorSome: some text)"
    )
    # Where the one that is there is the one for the driver.
    set_versions(availability, 12020, 12090)
    assert ": update it (cuda" in reason(availability, CUDARuntimeError(status))


@pytest.mark.parametrize("status", [NO_DEVICE, OLD_DRIVER])
def test_a_machine_without_a_driver_is_told_so(availability: Any, status: int) -> None:
    set_versions(availability, 0, 13020)
    text = reason(availability, CUDARuntimeError(status))
    assert text.startswith("there is no CUDA driver here: install NVIDIA's driver")
    assert "pip" not in text


@pytest.mark.parametrize("visible", [None, "", "-1"], ids=["unset", "empty", "none"])
def test_a_machine_without_a_device_is_told_where_to_look(
    availability: Any, visible: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    text = reason(availability, CUDARuntimeError(NO_DEVICE))
    assert text.startswith("CUDA finds no device (driver of CUDA 12.2, CuPy for CUDA 12.9): ")
    assert "nvidia-smi -L" in text
    assert (f"CUDA_VISIBLE_DEVICES is {visible!r}: unset it" in text) == (visible is not None)


@pytest.mark.parametrize(("number", "package"), [(12090, "nvidia-nccl-cu12"), (13020, "nvidia-nccl-cu13")])
def test_nccl_has_a_package_for_each_cuda(availability: Any, number: int, package: str) -> None:
    assert availability.nccl_package(number) == package


@pytest.mark.parametrize(
    ("error", "said"),
    [
        pytest.param(
            RuntimeError("CuPy failed to load libnvrtc.so.12: OSError: libnvrtc.so.12: cannot open\n"),
            r"libnvrtc.so.12: cannot open\): python -m pip install 'cupy-cuda12x\[ctk\]'",
            id="nvrtc-13",
        ),
        pytest.param(DynamicLibNotFoundError("Failure finding libnvrtc"), "'cupy-cuda12x", id="nvrtc-14"),
        pytest.param(
            RuntimeError("CuPy failed to load libcuda.so.1: OSError: libcuda.so.1: cannot open"),
            r"libcuda.so.1: cannot open\): install NVIDIA's driver, or start the container with --gpus all$",
            id="driver",
        ),
    ],
)
def test_a_library_that_cannot_be_loaded_is_named_with_what_brings_it(
    availability: Any, error: Exception, said: str
) -> None:
    assert re.search(said, reason(availability, error))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        pytest.param(
            CUDARuntimeError(700, "cudaErrorIllegalAddress: an illegal access"),
            "CUDA failed while gradients were unscaled: cudaErrorIllegalAddress: an illegal access",
            id="kernel",
        ),
        pytest.param(
            NVRTCError(35, "NVRTC_ERROR_INVALID_INPUT"),
            "CUDA failed while gradients were unscaled: NVRTC_ERROR_INVALID_INPUT",
            id="another library's number",
        ),
        pytest.param(
            CUDARuntimeError(906, "capture"), "CUDA failed while gradients were unscaled: capture", id="other"
        ),
        pytest.param(
            CompileException("unscale.cu(7): error: no\n  such\n"),
            "CUDA failed while gradients were unscaled: unscale.cu(7): error: no\n  such\n",
            id="compiler",
        ),
    ],
)
def test_other_errors_of_cuda_keep_their_text(availability: Any, error: Exception, said: str) -> None:
    with pytest.raises(BackendError) as raised, availability.explained("gradients were unscaled"):
        raise error
    assert str(raised.value) == said
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [OutOfMemoryError("out of memory"), ValueError("shapes"), CallOrderError("order"), KeyboardInterrupt()],
    ids=["memory", "value", "gradscale", "interrupt"],
)
def test_errors_of_others_and_lack_of_memory_stay_what_they_are(availability: Any, error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, availability.explained("gradients were unscaled"):
        raise error
    assert raised.value is error


def test_a_device_is_required_and_none_is_touched(availability: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    availability.require_device()
    availability.runtime.getDeviceCount = lambda: 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(BackendNotAvailableError, match="CUDA_VISIBLE_DEVICES is '7'"):
        availability.require_device()

    def fail() -> int:
        raise CUDARuntimeError(OLD_DRIVER)

    availability.runtime.getDeviceCount = fail
    with pytest.raises(BackendNotAvailableError, match=r"CUDA's driver is too old \(driver of CUDA 12\.2"):
        availability.require_device()


@pytest.mark.cupy
def test_cupys_own_errors_without_a_device_are_explained() -> None:
    cupy = require("cupy")
    if cupy.cuda.runtime.driverGetVersion():
        pytest.skip("cupy: there is a CUDA driver, and this is about CuPy without one")
    from gradscale_cupy.availability import explained, require_device

    said = r"no CUDA driver here|driver is too old|finds no device"
    with pytest.raises(BackendNotAvailableError, match=said):
        require_device()
    with pytest.raises(BackendNotAvailableError, match=said) as raised, explained("an array was made"):
        cupy.zeros(3)
    assert isinstance(raised.value.__cause__, cupy.cuda.runtime.CUDARuntimeError)
