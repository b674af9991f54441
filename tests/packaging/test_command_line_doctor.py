"""``gradscale doctor``: what works is used; a library that is broken, hangs or is missing is a row of its table."""

import json
import subprocess
from pathlib import Path

import pytest
from commands import python

import gradscale
from gradscale.extras import remedy

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

# What the launchers of MPI leave in the environment of their ranks.
LAUNCHED = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_UNIVERSE_SIZE", "MPI_LOCALRANKID", "MLX_RANK")


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    usual = {"COLUMNS": "300", "GRADSCALE_NUMPY_FAST": "0"}
    return python("-m", "gradscale", "doctor", *arguments, **(usual | environment))


def rows(completed: subprocess.CompletedProcess[str]):
    """Return what JSON says of each component; it is alone on stdout."""
    return {row["name"]: row for row in json.loads(completed.stdout)["components"]}


@pytest.fixture
def third_party(tmp_path: Path) -> str:
    """Return a folder with the adapters of another distribution, all broken."""
    for name, (code, _) in BROKEN.items():
        (tmp_path / f"{name}.py").write_text(code)
    metadata = tmp_path / "gradscale_fake-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: gradscale-fake\nVersion: 1.0\n")
    entries = "\n".join(f"{name} = {name}:backend" for name in BROKEN)
    (metadata / "entry_points.txt").write_text(f"[gradscale.backends]\n{entries}\n")
    return str(tmp_path)


@pytest.mark.tier("quick")
def test_under_mpiexec_what_is_used_is_a_process_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from gradscale.tools.cli import doctor as command
    from gradscale.tools.cli.probe import find

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
    (numpy,) = find(["numpy"])
    assert command.examine([numpy], 120)[0].reason.startswith("KEPT;")


@pytest.mark.parametrize(
    ("library", "name", "details"),
    [
        pytest.param("numpy", "numpy", set(), marks=pytest.mark.tier("quick")),
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


def test_broken_adapters_are_rows_with_their_reasons_which_matter_only_if_they_are_required(third_party: str):
    names = ("numpy", ",".join(BROKEN) + ",")
    completed = doctor(*names, "cupy", "--json", "--timeout", "40", "--require", "numpy", PYTHONPATH=third_party)
    assert completed.returncode == 0
    found = rows(completed)
    assert list(found) == ["numpy", *BROKEN, "cupy"]
    assert found["numpy"]["status"] == "ok"
    for name, (_, reason) in BROKEN.items():
        status = "timed out" if name == "fakehang" else "broken"
        assert found[name]["status"] == status, name
        assert reason in found[name]["reason"], found[name]
    for arguments in (("numpy", "fakelib"), ("numpy", "--require", "fakelib")):
        completed = doctor(*arguments, PYTHONPATH=third_party)
        assert completed.returncode == 1
        assert "libfake.so.3" in completed.stdout
    assert list(rows(doctor("--json", "--require", "numpy", PYTHONPATH=third_party))) == ["numpy"]


def test_a_library_that_prints_when_its_process_ends_is_not_broken(tmp_path: Path):
    program = "import atexit, sys\nif 'gradscale.tools.cli.probe' in sys.orig_argv: atexit.register(print, 'bye')\n"
    (tmp_path / "sitecustomize.py").write_text(program)
    assert rows(doctor("numpy", "--json", PYTHONPATH=str(tmp_path)))["numpy"]["status"] == "ok"


def test_something_missing_is_listed_with_the_pip_command(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, package=None: None if name == 'torch' else find(name, package)\n"
    )
    said = f"torch not installed; {remedy('torch')}"
    for required, status in ((), 0), (("--require", "torch"), 1):
        completed = doctor("torch", *required, PYTHONPATH=str(tmp_path))
        assert completed.returncode == status, completed.stderr
        assert said in completed.stdout


@pytest.mark.parametrize("arguments", [("--require", "numpi"), ("numpy,numpi",)], ids=["required", "named"])
def test_an_unknown_name_is_an_error_that_lists_the_known(arguments: tuple[str, ...]):
    completed = doctor(*arguments)
    assert completed.returncode == 1
    looks_at = "numpy, mpi, torch, jax, cupy, nccl4py, mlx, fast"
    assert f"doctor does not look at numpi; it looks at {looks_at}" in completed.stderr


@pytest.mark.mpi
@pytest.mark.parametrize("command", [("doctor", "numpy", "--json"), ("check", "--group", "mpi", "--json")], ids=str)
def test_modules_of_the_working_directory_are_not_run(command: tuple[str, ...], tmp_path: Path):
    (tmp_path / "numpy.py").write_text("import pathlib\npathlib.Path('was_run').touch()\n")
    completed = python("-m", "gradscale", *command, folder=tmp_path, GRADSCALE_NUMPY_FAST="0")
    assert not (tmp_path / "was_run").exists()
    assert completed.returncode == 0, completed.stderr
