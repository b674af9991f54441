"""``gradscale doctor`` of CuPy and nccl4py: without a device the reason and what to do; with one, what it has."""

import json
import os
import re
from pathlib import Path

import pytest
from axes import require
from commands import python
from cupy_devices import require_cupy

from gradscale.tools.cli import probe

pytestmark = [pytest.mark.numpy, pytest.mark.tier("all")]

# Of a CuPy on a machine without a driver.
CUDA = """
from types import SimpleNamespace
class CUDARuntimeError(RuntimeError):
    status = 35
CUDARuntimeError.__module__ = "cupy_backends.cuda.api.runtime"
def count():
    raise CUDARuntimeError("cudaErrorSome: CUDA's text")
runtime = SimpleNamespace(getDeviceCount=count, driverGetVersion=lambda: 0, runtimeGetVersion=lambda: 12090)
nccl = SimpleNamespace(available=False)
"""


def test_without_a_device_the_reason_says_what_to_do_and_no_other_command_is_given(tmp_path: Path):
    require("cli")
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text("ndarray = type('ndarray', (), {})\n")
    (tmp_path / "cupy" / "cuda.py").write_text(CUDA)
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    completed = python("-m", "gradscale", "doctor", "cupy", "--json", COLUMNS="300", PYTHONPATH=path)
    (found,) = json.loads(completed.stdout)["components"]
    assert (completed.returncode, found["status"]) == (1, "broken")
    assert found["reason"].startswith("there is no CUDA driver here: install NVIDIA's driver")
    assert found["reason"].endswith("(cudaErrorSome: CUDA's text)")


@pytest.mark.cupy
@pytest.mark.gpu
@pytest.mark.parametrize("has_nccl", [True, False])
def test_with_devices_they_are_named_and_so_are_the_driver_the_runtime_and_nccl(
    has_nccl: bool, monkeypatch: pytest.MonkeyPatch
):
    cupy = require_cupy()
    from gradscale_cupy import availability

    runtime, nccl = cupy.cuda.runtime, availability.nccl_module()
    monkeypatch.setattr(nccl, "available", nccl.available and has_nccl)
    driver, built_for = (
        availability.version_text(get()) for get in (runtime.driverGetVersion, runtime.runtimeGetVersion)
    )
    package = f"nvidia-nccl-cu{built_for.partition('.')[0]}"
    version = nccl.get_version() if nccl.available else 0
    names = [runtime.getDeviceProperties(number)["name"].decode() for number in range(runtime.getDeviceCount())]
    assert probe.probe(*probe.find(["cupy"])) == {
        "did": "scale, unscale, update",
        "devices": [f"cuda:{number} {name}" for number, name in enumerate(names)],
        "driver": driver,
        "runtime": built_for,
        "nccl": f"{version // 10000}.{version // 100 % 100}.{version % 100}"
        if version
        else f"missing, python -m pip install {package}",
        "versions": {"cupy": cupy.__version__},
    }


@pytest.mark.cupy
@pytest.mark.gpu
def test_nccl4py_makes_a_communicator_and_names_nccls_version_and_its_own():
    require_cupy()
    version = require("nccl4py").__version__
    found = probe.probe(*probe.find(["nccl4py"]))
    assert (found.pop("did"), found.pop("versions")) == ("a communicator of one process", {"nccl4py": version})
    assert re.fullmatch(r"\d+\.\d+\.\d+", found.pop("nccl"))
    assert not found


def test_without_nccl_nccl4py_says_so():
    require("cli")
    if require("nccl4py").get_version().libnccl is not None:
        pytest.skip("gpu: there is an NCCL here")
    completed = python("-m", "gradscale", "doctor", "nccl4py", "--json", COLUMNS="300")
    (found,) = json.loads(completed.stdout)["components"]
    assert (completed.returncode, found["status"]) == (1, "broken")
    assert "libnccl.so" in found["reason"]
    assert found["reason"].endswith("'cuda-bindings==13.*' nvidia-nccl-cu13")
