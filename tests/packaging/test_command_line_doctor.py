"""``gradscale doctor``: what works is used; a library that is broken, hangs or is missing is a row of its table."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from axes import require
from commands import python
from cupy_devices import require_cupy

import gradscale
from gradscale.extras import remedy
from gradscale.tools.cli import probe

pytestmark = [pytest.mark.tier("all"), pytest.mark.usefixtures("cli")]

# Modules of third-party adapters, and the reasons why they are broken.
BROKEN = {
    "fakelib": ("raise OSError('libfake.so.3: cannot open shared object file')", "libfake.so.3: cannot open shared"),
    "fakeabort": ("import os\nos.abort()", "exit code -6"),
    "fakequiet": ("import os\nos._exit(0)", "ended with exit code 0"),
    "fakehang": ("import time\ntime.sleep(1000)", "was not done in time; a longer --timeout gives it more"),
    "fakewrong": (
        "from gradscale_numpy import NumpyBackend\n"
        "class Wrong(NumpyBackend):\n"
        "    def unscale(self, grads, state, /, *, dtype=None, out=None):\n"
        "        return grads, super().unscale(grads, state)[1]\n"
        "backend = Wrong()",
        "a wrong answer for scale and unscale",
    ),
    "fakeneither": ("backend = object()", "AttributeError: 'object' object has no attribute 'example'"),
}
# CuPy on a machine without a driver.
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
# What each Python runs first: there is no torch, and a library prints when the process of numpy ends.
SITE = """
import atexit, importlib.util as util, sys
find = util.find_spec
util.find_spec = lambda name, package=None: None if name == 'torch' else find(name, package)
if 'gradscale.tools.cli.probe' in sys.orig_argv: atexit.register(print, 'bye')
"""
# What the launchers of MPI leave in the environment of their ranks.
LAUNCHED = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_UNIVERSE_SIZE", "MPI_LOCALRANKID", "MLX_RANK")


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    usual = {"COLUMNS": "300", "GRADSCALE_NUMPY_FAST": "0"}
    return python("-m", "gradscale", "doctor", *arguments, **(usual | environment))


def rows(completed: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """Return what JSON says of each component; it is alone on stdout."""
    return {row["name"]: row for row in json.loads(completed.stdout)["components"]}


@pytest.fixture
def third_party(tmp_path: Path) -> str:
    """Return a folder with the adapters of another distribution, all broken, such a CuPy, and what runs first."""
    metadata = "gradscale_fake-1.0.dist-info"
    entries = "\n".join(f"{name} = {name}:backend" for name in BROKEN)
    files = {f"{name}.py": code for name, (code, _) in BROKEN.items()} | {
        f"{metadata}/METADATA": "Metadata-Version: 2.1\nName: gradscale-fake\nVersion: 1.0\n",
        f"{metadata}/entry_points.txt": f"[gradscale.backends]\n{entries}\n",
        "cupy/__init__.py": "ndarray = type('ndarray', (), {})\n",
        "cupy/cuda.py": CUDA,
        "sitecustomize.py": SITE,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return str(tmp_path)


@pytest.mark.tier("quick")
def test_under_mpiexec_what_is_used_is_a_process_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from gradscale.tools.cli import doctor as command

    for name in LAUNCHED:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # It ends before anything is used, and says what it was started with.
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        f"left = [name for name in {(*LAUNCHED, 'KEPT')!r} if name in os.environ]\n"
        "os.write(2, ' '.join(left).encode())\nos._exit(1)\n"
    )
    assert command.examine(probe.find(["numpy"]), 120)[0].reason.startswith("KEPT;")


@pytest.mark.tier("quick")
def test_how_far_it_is_is_said_for_each_library(monkeypatch: pytest.MonkeyPatch):
    from gradscale.tools.cli import doctor as command

    monkeypatch.setattr(command, "_outcome", lambda component, *_: component.name)
    said: list[str] = []
    assert command.examine(probe.find(["mpi", "numpy"]), 120, said.append) == ["mpi4py", "numpy"]
    assert said == ["using mpi4py, 1 of 2", "using numpy, 2 of 2"]


@pytest.mark.parametrize(
    ("library", "name", "details"),
    [
        pytest.param("numpy", "numpy", set(), marks=pytest.mark.tier("ranks")),
        pytest.param("mpi", "mpi4py", {"library"}, marks=pytest.mark.mpi),
        pytest.param("torch", "torch", {"devices"}, marks=pytest.mark.torch),
        pytest.param("jax", "jax", {"devices"}, marks=pytest.mark.jax),
        pytest.param("mlx", "mlx", {"devices", "groups"}, marks=pytest.mark.mlx),
    ],
)
def test_a_library_is_used_and_shows_what_it_has(library: str, name: str, details: set[str]):
    completed = doctor(library, "--json", "--require", library)
    assert completed.returncode == 0, completed.stderr
    (row,) = rows(completed).values()
    assert (row["name"], row["status"]) == (name, "ok")
    assert {"did", "versions", *details} <= {one for one, found in row["details"].items() if found}
    report = json.loads(completed.stdout)
    assert report["ok"]
    assert report["system"].startswith(f"gradscale {gradscale.__version__}, Python 3.")


def test_what_is_broken_or_missing_is_a_row_with_its_reason_which_matters_only_if_it_is_required(third_party: str):
    names = ("numpy", ",".join(BROKEN) + ",")
    arguments = ("cupy", "torch", "--json", "--timeout", "40", "--require", "numpy")
    completed = doctor(*names, *arguments, PYTHONPATH=third_party)
    assert completed.returncode == 0
    found = rows(completed)
    assert list(found) == ["numpy", *BROKEN, "cupy", "torch"]
    told = {name: row["status"] for name, row in found.items()}
    assert told == dict.fromkeys(found, "broken") | {"numpy": "ok", "fakehang": "timed out", "torch": "missing"}
    for name, (_, reason) in BROKEN.items():
        assert reason in found[name]["reason"], found[name]
    # What to do is said by the reason, and no other command is given.
    said = r"there is no CUDA driver here: install NVIDIA's driver.*\(cudaErrorSome: CUDA's text\)"
    assert re.fullmatch(said, found["cupy"]["reason"])
    missing = f"torch not installed; {remedy('torch')}"
    for arguments, status, said in (
        *((given, 1, "libfake.so.3") for given in (("numpy", "fakelib"), ("numpy", "--require", "fakelib"))),
        *((given, len(given) // 2, missing) for given in (("torch",), ("--require", "torch"))),
    ):
        completed = doctor(*arguments, PYTHONPATH=third_party)
        assert completed.returncode == status
        assert said in completed.stdout
    assert list(rows(doctor("--json", "--require", "numpy", PYTHONPATH=third_party))) == ["numpy"]


@pytest.mark.tier("quick")
def test_an_unknown_name_is_an_error_that_lists_the_known():
    looks_at = "numpy, mpi, torch, jax, cupy, nccl4py, mlx, fast"
    with pytest.raises(gradscale.InvalidValueError, match=f"doctor does not look at numpi; it looks at {looks_at}"):
        probe.find(["numpy", "numpi"])


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("command", "status"),
    # Of a check one process alone compares nothing, which is no success.
    [(("doctor", "numpy", "--json"), 0), (("check", "--group", "mpi", "--json"), 2)],
    ids=str,
)
def test_modules_of_the_working_directory_are_not_run(command: tuple[str, ...], status: int, tmp_path: Path):
    (tmp_path / "numpy.py").write_text("import pathlib\npathlib.Path('was_run').touch()\n")
    completed = python("-m", "gradscale", *command, folder=tmp_path, GRADSCALE_NUMPY_FAST="0")
    assert not (tmp_path / "was_run").exists()
    assert completed.returncode == status, completed.stderr


@pytest.mark.cupy
@pytest.mark.gpu
def test_with_devices_they_are_named_and_so_are_the_driver_the_runtime_and_nccl():
    runtime = require_cupy().cuda.runtime
    names = [runtime.getDeviceProperties(number)["name"].decode() for number in range(runtime.getDeviceCount())]
    found = probe.probe(*probe.find(["cupy"]))
    assert found["devices"] == [f"cuda:{number} {name}" for number, name in enumerate(names)]
    version = runtime.runtimeGetVersion()
    assert found["runtime"] == f"{version // 1000}.{version % 1000 // 10}"
    assert re.fullmatch(r"\d+\.\d+", str(found["driver"]))
    assert re.match(r"\d+\.\d+\.\d+$|missing, python -m pip install nvidia-nccl-cu1[23]$", str(found["nccl"]))


@pytest.mark.cupy
@pytest.mark.gpu
def test_nccl4py_makes_a_communicator_and_names_nccls_version_and_its_own():
    require_cupy()
    version = require("nccl4py").__version__
    found = probe.probe(*probe.find(["nccl4py"]))
    assert re.fullmatch(r"\d+\.\d+\.\d+", found.pop("nccl"))
    assert found == {"did": "a communicator of one process", "versions": {"nccl4py": version}}


def test_without_nccl_nccl4py_says_so():
    if require("nccl4py").get_version().libnccl is not None:
        pytest.skip("gpu: there is an NCCL here")
    completed = doctor("nccl4py", "--json")
    reason = rows(completed)["nccl4py"]["reason"]
    assert (completed.returncode, rows(completed)["nccl4py"]["status"]) == (1, "broken")
    assert "libnccl.so" in reason
    assert reason.endswith("'cuda-bindings==13.*' nvidia-nccl-cu13")
