"""What is said where CuPy cannot use CUDA, and that every other error stays what it is.

Errors are made as CuPy makes them; where CuPy is installed without a device, its own are taken as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fake_nccl
import pytest
from axes import require
from host_cupy import installed

from gradscale.errors import BackendError, BackendNotAvailableError, CallOrderError

with installed():
    from gradscale_cupy.availability import (
        explained,
        missing_library,
        nccl_package,
        require_device,
        unusable_device,
        version_text,
    )

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
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the runtime of a stand-in for CuPy, built for CUDA 12.9 and with a driver of CUDA 12.2."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with installed() as module:
        found = module.cuda.runtime
        vars(found).update(driverGetVersion=lambda: 12020, runtimeGetVersion=lambda: 12090)
        yield found


@pytest.mark.parametrize(("number", "text"), [(12020, "12.2"), (11040, "11.4"), (13000, "13.0"), (10010, "10.1")])
def test_versions_are_written_as_people_do(number: int, text: str) -> None:
    assert version_text(number) == text


@pytest.mark.parametrize("status", [OLD_DRIVER, CALL_TOO_NEW, PTX_TOO_NEW])
def test_an_old_driver_is_named_with_both_versions_and_the_cupy_for_it(status: int) -> None:
    assert unusable_device(status, 11040, 12020, None) == (
        "CUDA driver 11.4 is older than the runtime 12.2 that CuPy was built for: update NVIDIA's driver, or put the "
        "CuPy for it in place of this one: python -m pip install cupy-cuda11x"
    )
    assert unusable_device(status, 12080, 13020, None).endswith("python -m pip install cupy-cuda12x")


@pytest.mark.parametrize(
    ("driver", "runtime", "said"),
    [
        pytest.param(10020, 12020, "CUDA driver 10.2 is older than the runtime 12.2", id="no-wheel"),
        pytest.param(12020, 12090, "CUDA driver 12.2 is older than the runtime 12.9", id="same-major"),
        pytest.param(12090, 12090, "CUDA driver 12.9 is too old for what CuPy asks of it", id="not-older"),
    ],
)
def test_no_cupy_is_named_where_none_would_help(driver: int, runtime: int, said: str) -> None:
    text = unusable_device(OLD_DRIVER, driver, runtime, None)
    assert text.startswith(said)
    assert text.endswith(": update NVIDIA's driver")


@pytest.mark.parametrize("status", [0, NO_DEVICE, OLD_DRIVER])
def test_a_machine_without_a_driver_is_told_so(status: int) -> None:
    text = unusable_device(status, 0, 13020, None)
    assert text.startswith("there is no CUDA driver here, and CuPy was built for CUDA 13.2: install NVIDIA's driver")
    assert "pip" not in text


@pytest.mark.parametrize("status", [0, NO_DEVICE])
@pytest.mark.parametrize("visible", [None, "", "-1"], ids=["unset", "empty", "none"])
def test_a_machine_without_a_device_is_told_where_to_look(status: int, visible: str | None) -> None:
    text = unusable_device(status, 12020, 12090, visible)
    assert text.startswith("CUDA finds no device (driver of CUDA 12.2, CuPy for CUDA 12.9): ")
    assert "nvidia-smi -L" in text
    assert (f"CUDA_VISIBLE_DEVICES is {visible!r}: unset it" in text) == (visible is not None)


@pytest.mark.parametrize(
    ("status", "remedy"),
    [(3, "start processes by the method 'spawn'"), (46, "nvidia-smi"), (802, "fabricmanager"), (803, "restart")],
)
def test_other_conditions_that_the_user_can_end_have_their_remedy(status: int, remedy: str) -> None:
    text = unusable_device(status, 12020, 12090, None)
    assert text.startswith("CUDA cannot use a device (driver of CUDA 12.2, CuPy for CUDA 12.9): ")
    assert remedy in text


@pytest.mark.parametrize("status", [-1, 1, 2, 209, 700, 719, 906, 999])
def test_an_error_that_means_something_else_is_not_explained_away(status: int) -> None:
    assert unusable_device(status, 12020, 12090, None) == ""


@pytest.mark.parametrize(("runtime", "package"), [(12090, "nvidia-nccl-cu12"), (13020, "nvidia-nccl-cu13")])
def test_nccl_has_a_package_for_each_cuda(runtime: int, package: str) -> None:
    assert nccl_package(runtime) == package


def test_a_library_that_cannot_be_loaded_is_named_with_what_brings_it() -> None:
    text = missing_library("CuPy failed to load libnvrtc.so.12: OSError: libnvrtc.so.12: cannot open\n", 12090)
    assert "libnvrtc.so.12: cannot open): python -m pip install 'cupy-cuda12x[ctk]'" in text
    assert "pip" in missing_library("CuPy failed to load libcudart.so.12: OSError: libcudart.so.12: cannot open", 12090)
    text = missing_library("CuPy failed to load libcuda.so.1: OSError: libcuda.so.1: cannot open", 12090)
    assert "install NVIDIA's driver" in text
    assert "pip" not in text


@pytest.mark.parametrize(
    ("error", "said"),
    [
        pytest.param(CUDARuntimeError(NO_DEVICE), r"CUDA finds no device .*\(cudaErrorSome: some text\)", id="device"),
        pytest.param(CUDARuntimeError(OLD_DRIVER), "driver 12.2 is older than the runtime 12.9", id="old"),
        pytest.param(RuntimeError("CuPy failed to load libnvrtc.so.12: OSError: no"), "cupy-cuda12x", id="nvrtc-13"),
        pytest.param(DynamicLibNotFoundError("Failure finding libnvrtc"), "cupy-cuda12x", id="nvrtc-14"),
    ],
)
@pytest.mark.usefixtures("runtime")
def test_what_makes_cuda_unusable_is_not_available_and_has_its_cause(error: Exception, said: str) -> None:
    with pytest.raises(BackendNotAvailableError, match=said) as raised, explained("arrays were made"):
        raise error
    assert raised.value.__cause__ is error
    assert isinstance(raised.value, ImportError)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        pytest.param(
            CUDARuntimeError(700, "cudaErrorIllegalAddress: an illegal access"),
            "CUDA failed while gradients were unscaled: cudaErrorIllegalAddress: an illegal access; any kernel before "
            "may have done it, and CUDA_LAUNCH_BLOCKING=1 shows which",
            id="kernel",
        ),
        pytest.param(
            NVRTCError(3, "NVRTC_ERROR_INVALID_INPUT"),
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
@pytest.mark.usefixtures("runtime")
def test_other_errors_of_cuda_keep_their_text(error: Exception, said: str) -> None:
    with pytest.raises(BackendError) as raised, explained("gradients were unscaled"):
        raise error
    assert str(raised.value) == said
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [OutOfMemoryError("out of memory"), ValueError("shapes"), CallOrderError("order"), KeyboardInterrupt()],
    ids=["memory", "value", "gradscale", "interrupt"],
)
@pytest.mark.usefixtures("runtime")
def test_errors_of_others_and_lack_of_memory_stay_what_they_are(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, explained("gradients were unscaled"):
        raise error
    assert raised.value is error


def test_a_device_is_required_and_none_is_touched(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    require_device()
    runtime.getDeviceCount = lambda: 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(BackendNotAvailableError, match="CUDA_VISIBLE_DEVICES is '7'"):
        require_device()

    def fail() -> int:
        raise CUDARuntimeError(OLD_DRIVER)

    vars(runtime).update(getDeviceCount=fail, driverGetVersion=lambda: 11040)
    with pytest.raises(BackendNotAvailableError, match=r"CUDA driver 11\.4 is older than the runtime 12\.9"):
        require_device()


@pytest.mark.parametrize(
    ("version", "packages"),
    [
        ("13.0.0", "'cupy-cuda13x>=13.5' nvidia-nccl-cu13"),
        ("13.4.1", "'cupy-cuda13x>=13.5' nvidia-nccl-cu13"),
        ("13.5.0", "nvidia-nccl-cu13"),
        ("14.0.0rc1", "nvidia-nccl-cu13"),
    ],
)
def test_without_nccl_a_group_names_what_brings_it_and_a_cupy_that_finds_it(version: str, packages: str) -> None:
    with fake_nccl.installed() as fake:
        fake.cupy.nccl.available = False
        fake.cupy.__version__ = version
        vars(fake.cupy.runtime).update(driverGetVersion=lambda: 13020, getDeviceCount=lambda: 1)
        said = rf"^CuPy {version} finds no NCCL library, .*: python -m pip install {packages}$"
        with pytest.raises(BackendNotAvailableError, match=said):
            fake.nccl.NCCLCollectives(None, 1.0)


def test_without_a_device_a_group_says_that_and_names_no_library() -> None:
    with fake_nccl.installed() as fake:
        fake.cupy.nccl.available = False
        vars(fake.cupy.runtime).update(driverGetVersion=lambda: 0, getDeviceCount=lambda: 0)
        with pytest.raises(BackendNotAvailableError, match=r"no CUDA driver here, and CuPy was built for CUDA 13\.2"):
            fake.nccl.NCCLCollectives(None, 1.0)


@pytest.mark.cupy
def test_cupys_own_errors_without_a_device_are_explained() -> None:
    cupy = require("cupy")
    if cupy.cuda.is_available():
        pytest.skip("cupy: there is a CUDA device, and this is about CuPy without one")
    said = r"no CUDA driver here|is older than the runtime|finds no device"
    with pytest.raises(BackendNotAvailableError, match=said):
        require_device()
    with pytest.raises(BackendNotAvailableError, match=said) as raised, explained("an array was made"):
        cupy.zeros(3)
    assert isinstance(raised.value.__cause__, cupy.cuda.runtime.CUDARuntimeError)
