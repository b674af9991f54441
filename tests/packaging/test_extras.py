"""A library that is missing is the same kind of message everywhere: what is missing, and the line that installs it."""

import importlib.metadata
import re
import subprocess
from pathlib import Path

import pytest
from axes import require
from commands import python

from gradscale import BackendNotAvailableError, GradscaleError, MissingExtraError
from gradscale.extras import needs

EXAMPLES = Path(__file__).parents[2] / "examples"

# Runs what follows the first argument as if the library that this names were not installed.
WITHOUT = """
import pathlib, runpy, sys
missing = sys.argv[1]
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
kind, name, *rest = sys.argv[2:]
sys.argv = [name, *rest]
if kind == "run":
    sys.path.insert(0, str(pathlib.Path(name).parent))
    runpy.run_path(name, run_name="__main__")
elif kind == "module":
    runpy.run_module(name, run_name="__main__", alter_sys=True)
else:
    exec(name)
"""


def run(library: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-c", WITHOUT, library, *arguments, COLUMNS="200", NO_COLOR="1", TERM="dumb")


def message(user: str, library: str, extras: str) -> str:
    got = f"No module named '{library}[.\\w]*'"
    command = re.escape(f"python -m pip install '.[{extras}]'")
    return f"{re.escape(user)} needs {library}, got: {got}; from a clone of gradscale: {command}"


DRAW = (
    "from gradscale import DynamicScale, plot; from gradscale.policies.simulation import simulate; "
    "plot.simulation([simulate(DynamicScale(), 'CO', name='a')], 'x.png')"
)
IMPORTS = [
    ("import gradscale_torch", "torch", "gradscale_torch", "torch"),
    ("import gradscale_torch.plugins", "lightning", "gradscale_torch.plugins", "lightning"),
    ("import gradscale_jax", "jax", "gradscale_jax", "jax"),
    ("import gradscale_cupy", "cupy", "gradscale_cupy", "cupy"),
    ("import gradscale_cupy.nccl", "cupy", "gradscale_cupy", "cupy"),
    ("import gradscale_numpy", "numpy", "gradscale_numpy", "numpy"),
    ("import gradscale_numpy.mpi", "mpi4py", "gradscale_numpy.mpi", "mpi"),
    ("import gradscale_numpy.fast", "numba", "gradscale_numpy.fast", "fast"),
    (DRAW, "matplotlib", "gradscale.plot", "plot"),
    ("import gradscale; gradscale.registry.get('torch')", "torch", "gradscale_torch", "torch"),
    ("import gradscale; gradscale.registry.get('cupy_backends')", "cupy", "gradscale_cupy", "cupy"),
]


@pytest.mark.parametrize(
    ("statement", "library", "user", "extra"),
    [
        pytest.param(
            *one,
            id=f"{one[0].partition('.')[0].split()[-1]}-{one[1]}-{one[2]}",
            marks=pytest.mark.tier("ranks" if number % 3 else "quick"),
        )
        for number, one in enumerate(IMPORTS)
    ],
)
def test_an_import_says_what_is_missing(statement: str, library: str, user: str, extra: str) -> None:
    if user in ("gradscale_numpy.mpi", "gradscale_numpy.fast"):
        require("numpy")
    if user == "gradscale_torch.plugins":
        require("torch")
    caught = (
        f"try:\n    {statement}\nexcept ModuleNotFoundError as error:\n"
        "    from gradscale import GradscaleError\n    assert isinstance(error, GradscaleError)\n"
        "    print(error.name.partition('.')[0])\n    print(error)"
    )
    completed = run(library, "statement", caught)
    assert completed.returncode == 0, completed.stderr
    name, said = completed.stdout.splitlines()
    assert name == library
    assert re.fullmatch(message(user, library, extra), said), said


COMMANDS = [
    pytest.param("typer", ["doctor"], 3, "the command line", "cli", id="typer"),
    pytest.param("rich", ["doctor"], 3, "the command line", "cli", id="rich"),
    pytest.param("mpi4py", ["check", "--group", "mpi"], 1, "check --group mpi", "mpi", id="check-mpi"),
    pytest.param("torch", ["check", "--group", "torch"], 1, "check --group torch", "torch", id="check-torch"),
]


@pytest.mark.parametrize(("library", "arguments", "status", "user", "extra"), COMMANDS)
def test_the_command_line_says_what_is_missing(
    library: str, arguments: list[str], status: int, user: str, extra: str
) -> None:
    require("cli")
    completed = run(library, "module", "gradscale", *arguments)
    assert completed.returncode == status
    assert re.fullmatch(f"gradscale: {message(user, library, extra)}\n", completed.stderr), completed.stderr


PROGRAMS = [
    ("train_digits.py", "examples", ("numpy", "tqdm", "sklearn", "matplotlib")),
    ("train_cupy.py", "cupy,examples", ("numpy", "matplotlib", "cupy")),
    ("train_fsdp.py", "torch,examples", ("torch", "matplotlib")),
    ("fp16_rl.py", "torch,examples", ("torch", "matplotlib")),
    ("train_jax.py", "jax,examples", ("jax", "sklearn", "matplotlib")),
    ("lightning_plugin.py", "lightning,examples", ("torch", "sklearn")),
    ("flax_linen.py", "flax,examples", ("jax",)),
    ("flax_nnx.py", "flax,examples", ("jax",)),
    ("equinox_train.py", "equinox,examples", ("equinox",)),
    ("adapter_mlx.py", "mlx", ("mlx",)),
]


def test_every_example_is_among_them() -> None:
    assert {name for name, _, _ in PROGRAMS} == {path.name for path in EXAMPLES.glob("*.py")}


@pytest.mark.tier("ranks")
@pytest.mark.parametrize(
    ("program", "extras", "library"),
    [
        pytest.param(program, extras, library, id=f"{program}-{library}")
        for program, extras, libraries in PROGRAMS
        for library in libraries
    ],
)
def test_an_example_ends_with_one_line_that_says_what_is_missing(program: str, extras: str, library: str) -> None:
    require("examples")
    completed = run(library, "run", str(EXAMPLES / program))
    assert completed.returncode == 1
    said = completed.stderr.removesuffix("\n")
    assert re.fullmatch(message(f"examples/{program}", library, extras), said), completed.stderr
    assert completed.stdout == ""


def test_every_extra_that_is_named_is_one() -> None:
    named = {extra for *_, extra in IMPORTS} | {str(one.values[-1]) for one in COMMANDS}
    named |= {extra for _, extras, _ in PROGRAMS for extra in extras.split(",")}
    assert named <= set(importlib.metadata.metadata("gradscale").get_all("Provides-Extra") or [])


def test_a_library_that_cannot_be_imported_is_not_called_missing() -> None:
    with pytest.raises(BackendNotAvailableError) as caught, needs("this", "torch"):
        raise ImportError("libfake.so.3: cannot open", name="torch._C")
    assert not isinstance(caught.value, ModuleNotFoundError)
    command = "python -m pip install '.[torch]'"
    assert (
        str(caught.value) == f"this needs torch, got: libfake.so.3: cannot open; from a clone of gradscale: {command}"
    )
    assert str(caught.value.__cause__) == "libfake.so.3: cannot open"


def test_the_outermost_says_what_brings_all_that_it_needs() -> None:
    with pytest.raises(MissingExtraError) as caught, needs("program.py", "torch,examples"), needs("inner", "torch"):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    assert re.fullmatch(message("program.py", "torch", "torch,examples"), str(caught.value))


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'gradscale_torch.nothing'", name="gradscale_torch.nothing"),
        BackendNotAvailableError("update the driver"),
    ],
    ids=["its-own-fault", "says-what-to-do"],
)
def test_what_no_extra_mends_passes_unchanged(error: ImportError) -> None:
    with pytest.raises(ImportError) as caught, needs("this", "torch"):
        raise error
    assert caught.value is error


def test_a_missing_library_is_found_before_anything_is_imported() -> None:
    with pytest.raises(MissingExtraError) as caught, needs("x", "plot", "no_such_module_at_all"):
        pytest.fail("the block was run")
    assert isinstance(caught.value, GradscaleError)
    assert caught.value.name == "no_such_module_at_all"


@pytest.mark.mpi
def test_mpi4py_without_an_mpi_says_what_brings_one() -> None:
    require("mpi")
    completed = python("-c", "import gradscale_numpy.mpi", MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert completed.stderr.splitlines()[-1] == (
        "gradscale.errors.BackendNotAvailableError: gradscale_numpy.mpi needs an MPI library, got: cannot load MPI "
        "library; load the cluster's, or from a clone of gradscale: python -m pip install '.[mpich]'"
    )
