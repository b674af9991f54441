"""``gradscale doctor`` of CuPy and nccl4py: without a device the reason and what to do; with one, what it has."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from axes import require
from commands import python
from host_nccl import bindings_installed, installed

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


@pytest.mark.parametrize(
    ("has_nccl", "nccl"), [(True, "2.27.3"), (False, "missing, python -m pip install nvidia-nccl-cu13")]
)
def test_with_devices_they_are_named_and_so_are_the_driver_the_runtime_and_nccl(has_nccl: bool, nccl: str):
    with installed(has_nccl=has_nccl):
        assert probe.probe(*probe.find(["cupy"])) == {
            "did": "scale, unscale, update",
            "devices": ["cuda:0 host 0", "cuda:1 host 1"],
            "driver": "13.2",
            "runtime": "13.2",
            "nccl": nccl,
            "versions": {"cupy": "14.2.0"},
        }


def test_nccl4py_makes_a_communicator_and_names_nccls_version_and_its_own():
    version = require("nccl4py").__version__
    with bindings_installed():
        assert probe.probe("nccl4py") == {
            "did": "a communicator of one process",
            "nccl": "2.32.3",
            "versions": {"nccl4py": version},
        }


def test_without_nccl_nccl4py_says_so():
    require("cli")
    if require("nccl4py").get_version().libnccl is not None:
        pytest.skip("gpu: there is an NCCL here")
    completed = python("-m", "gradscale", "doctor", "nccl4py", "--json", COLUMNS="300")
    (found,) = json.loads(completed.stdout)["components"]
    assert (completed.returncode, found["status"]) == (1, "broken")
    assert "libnccl.so" in found["reason"]
    assert found["command"].endswith("'cuda-bindings==13.*' nvidia-nccl-cu13")
