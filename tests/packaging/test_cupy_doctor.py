"""``gradscale doctor cupy``: without a device the reason and no misleading command; with one, what it is and has.

The CuPy that it finds is a few lines that answer as CuPy does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from axes import require
from host_cupy import installed

from gradscale.cli import probe

pytestmark = [pytest.mark.numpy, pytest.mark.tier("all")]

LIMIT = 120
RUNTIME = """
class CUDARuntimeError(RuntimeError):
    def __init__(self, status):
        super().__init__("cudaErrorSome: CUDA's text")
        self.status = status
CUDARuntimeError.__module__ = "cupy_backends.cuda.api.runtime"
def getDeviceCount():
    raise CUDARuntimeError({status})
def driverGetVersion():
    return {driver}
def runtimeGetVersion():
    return 12090
"""


def doctor(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    require("cli")
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return subprocess.run(
        [sys.executable, "-m", "gradscale", "doctor", "cupy", *arguments],
        env=environment | {"COLUMNS": "300", "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@pytest.mark.parametrize(
    ("status", "driver", "reason"),
    [
        pytest.param(100, 12020, "CUDA finds no device (driver of CUDA 12.2, CuPy for CUDA 12.9): ", id="no-device"),
        pytest.param(
            35, 11040, "CUDA's driver is too old (driver of CUDA 11.4, CuPy for CUDA 12.9): update it", id="old-driver"
        ),
        pytest.param(35, 0, "there is no CUDA driver here: install NVIDIA's driver", id="no-driver"),
    ],
)
def test_without_a_device_the_reason_says_what_to_do_and_no_other_command_is_given(
    tmp_path: Path, status: int, driver: int, reason: str
) -> None:
    cuda = tmp_path / "cupy" / "cuda"
    cuda.mkdir(parents=True)
    (tmp_path / "cupy" / "__init__.py").write_text("ndarray = type('ndarray', (), {})\n__version__ = '14.2.0'\n")
    (cuda / "__init__.py").write_text("from types import SimpleNamespace\nnccl = SimpleNamespace(available=False)\n")
    (cuda / "runtime.py").write_text(RUNTIME.format(status=status, driver=driver))
    completed = doctor(tmp_path, "--json")
    assert completed.returncode == 1
    (found,) = json.loads(completed.stdout)["components"]
    assert found["status"] == "broken"
    assert found["reason"].startswith(reason)
    assert found["reason"].endswith("(cudaErrorSome: CUDA's text)")
    assert found["command"] == ""
    assert "gradscale[cupy]" not in completed.stderr
    assert f"gradscale: doctor: cupy is broken: {reason}" in completed.stderr


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return ``cupy.cuda`` of a stand-in with two devices, whose arrays are not tried."""
    monkeypatch.setattr(probe, "_adapter", lambda name: {"did": f"tried {name}"})
    with installed() as module:
        module.cuda.nccl = SimpleNamespace(available=True, get_version=lambda: 22703)
        vars(module.cuda.runtime).update(
            driverGetVersion=lambda: 12020,
            runtimeGetVersion=lambda: 12090,
            getDeviceProperties=lambda number: {"name": f"Card {number}".encode()},
        )
        yield module.cuda


def test_with_devices_they_are_named_and_so_are_the_driver_the_runtime_and_nccl(cuda: Any) -> None:
    assert probe.probe("cupy") == {
        "did": "tried cupy",
        "devices": ["cuda:0 Card 0", "cuda:1 Card 1"],
        "driver": "12.2",
        "runtime": "12.9",
        "nccl": "2.27.3",
        "versions": {"cupy": "14.2.0"},
    }
    cuda.nccl.available = False
    assert probe.probe("cupy")["nccl"] == "missing, python -m pip install nvidia-nccl-cu12"
