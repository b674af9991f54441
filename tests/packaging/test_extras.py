"""A library that is missing is the same kind of message everywhere: what is missing, and the line that installs it."""

import re
import tomllib
from pathlib import Path

import pytest
from axes import require
from commands import python

import gradscale
from gradscale import BackendNotAvailableError, MissingExtraError
from gradscale.extras import needs, remedy

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
name, *rest = sys.argv[2:]
sys.argv = [name, *rest]
if name.endswith(".py"):
    sys.path.insert(0, str(pathlib.Path(name).parent))
    runpy.run_path(name, run_name="__main__")
elif rest:
    runpy.run_module(name, run_name="__main__", alter_sys=True)
else:
    exec(name)
"""
# Begins the line that an uncaught exception ends with.
RAISED = "gradscale.errors.MissingExtraError: "
DRAW = (
    "from gradscale import DynamicScale, plot; from gradscale.tools.simulation import simulate; "
    "plot.simulation([simulate(DynamicScale(), 'CO', name='a')], 'x.png')"
)
OPTAX = "import gradscale_jax as on; assert (hasattr(on, 'scale'), hasattr(on, 'nothing')) == (True, False); on.scaled"
# What is run, without which libraries, and who says that they are missing, with which extras.
IMPORTS = [
    ("import gradscale_torch", "torch", "gradscale_torch", "torch"),
    ("import gradscale_torch.plugins", "lightning", "gradscale_torch.plugins", "lightning"),
    ("import gradscale_jax", "jax", "gradscale_jax", "jax"),
    ("import gradscale_cupy", "cupy", "gradscale_cupy", "cupy"),
    ("import gradscale_nccl", "nccl", "gradscale_nccl", "nccl4py"),
    ("import gradscale_mlx", "mlx", "gradscale_mlx", "mlx"),
    ("import gradscale_numpy", "numpy", "gradscale_numpy", "numpy"),
    ("import gradscale_numpy.mpi", "mpi4py", "gradscale_numpy.mpi", "mpi"),
    ("import gradscale_numpy.fast", "numba", "gradscale_numpy.fast", "fast"),
    (OPTAX, "optax", "gradscale_jax.scaled", "optax"),
    (DRAW, "matplotlib", "gradscale.plot", "plot"),
    ("import gradscale; gradscale.registry.get('cupy_backends')", "cupy", "gradscale_cupy", "cupy"),
]
COMMANDS = [
    ("gradscale doctor", "typer rich", "the command line", "cli"),
    ("gradscale check --group mpi", "mpi4py", "check --group mpi", "mpi"),
    ("gradscale check --group torch", "torch", "check --group torch", "torch"),
]
PROGRAMS = [
    ("train_digits.py", "numpy tqdm sklearn matplotlib", "", "examples"),
    ("train_cupy.py", "numpy matplotlib cupy", "cupy", "examples"),
    *((name, "torch matplotlib", "torch", "examples") for name in ("train_fsdp.py", "fp16_rl.py", "spikes.py")),
    ("train_jax.py", "jax sklearn matplotlib", "jax", "examples"),
    ("lightning_plugin.py", "torch sklearn", "lightning", "examples"),
    *((name, "jax", "optax", "examples flax") for name in ("flax_linen.py", "flax_nnx.py")),
    ("equinox_train.py", "equinox", "optax", "examples equinox"),
    ("train_mlx.py", "mlx", "mlx", ""),
]
METADATA = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text())


def message(user: str, library: str, extras: str, groups: str = "") -> str:
    got = f"No module named '{library}[.\\w]*'"
    return f"{re.escape(user)} needs {library}, got: {got}; {re.escape(remedy(extras, groups))}"


def cases() -> list[object]:
    found = []
    for statement, library, user, extras in IMPORTS:
        needed = {"gradscale_torch.plugins": "torch", "gradscale_jax.scaled": "jax"}.get(user, "numpy")
        found.append(([statement], library, RAISED, message(user, library, extras), needed))
    for command, libraries, user, extras in COMMANDS:
        for library in libraries.split():
            found.append((command.split(), library, "gradscale: ", message(user, library, extras), "cli"))
    for program, libraries, extras, groups in PROGRAMS:
        for library in libraries.split():
            said = message(f"examples/{program}", library, extras, groups)
            found.append(([str(EXAMPLES / program)], library, "", said, "examples"))
    return [
        pytest.param(
            *case,
            id=f"{Path(case[0][0]).name[:60]}-{case[1]}",
            marks=[pytest.mark.tier("ranks")] * (k not in (0, 7, 14, 16)),
        )
        for k, case in enumerate(found)
    ]


@pytest.mark.parametrize(("arguments", "library", "begin", "said", "needed"), cases())
def test_what_is_missing_is_said_in_the_last_line(
    arguments: list[str], library: str, begin: str, said: str, needed: str
):
    require(needed)
    completed = python("-c", WITHOUT, library, *arguments, COLUMNS="200", NO_COLOR="1", TERM="dumb")
    assert completed.returncode in (1, 3)
    assert completed.stdout == ""
    *before, last = completed.stderr.splitlines()
    assert re.fullmatch(re.escape(begin) + said, last), completed.stderr
    # Programs print nothing else.
    assert begin == RAISED or not before


def test_every_example_is_among_them_and_every_extra_and_group_that_is_named_is_one():
    assert {name for name, *_ in PROGRAMS} == {path.name for path in EXAMPLES.glob("*.py")}
    named = {extras for *_, extras in (*IMPORTS, *COMMANDS)} | {extras for *_, extras, _ in PROGRAMS if extras}
    assert named <= {*METADATA["project"]["optional-dependencies"]}
    assert {group for *_, groups in PROGRAMS for group in groups.split()} <= {*METADATA["dependency-groups"]}


IN_A_CLONE = "from a clone of gradscale: python -m pip install"
# Of some extras, and groups.
REMEDIES = {
    ("torch", ""): "python -m pip install '{}[torch]'",
    ("cupy", ""): "python -m pip install '{}[cupy]' cupy-cuda12x",
    ("nccl4py", ""): "python -m pip install '{}[nccl4py]' 'cuda-bindings==13.*' nvidia-nccl-cu13",
    ("optax", "examples flax"): f"{IN_A_CLONE} '.[optax]' --group examples --group flax",
    ("", "examples"): f"{IN_A_CLONE} . --group examples",
}


@pytest.mark.parametrize("is_clone", [True, False], ids=["clone", "installed"])
def test_a_command_is_that_of_a_clone_only_in_a_clone(tmp_path: Path, is_clone: bool):
    (tmp_path / "gradscale").symlink_to(Path(gradscale.__file__).parent)
    (tmp_path / ("pyproject.toml" if is_clone else "another.py")).touch()
    program = f"from gradscale.extras import remedy\nfor given in {[*REMEDIES]}: print(remedy(*given))"
    completed = python("-P", "-c", program, PYTHONPATH=str(tmp_path))
    begin, source = ("from a clone of gradscale: ", ".") if is_clone else ("", "gradscale")
    assert completed.stdout.splitlines() == [
        said if said.startswith("from") else begin + said.format(source) for said in REMEDIES.values()
    ]


OWN = ModuleNotFoundError("No module named 'gradscale_torch.nothing'", name="gradscale_torch.nothing")
NO_TORCH = ModuleNotFoundError("No module named 'torch'", name="torch")
BROKEN = ImportError("libfake.so.3", name="torch._C")


@pytest.mark.parametrize("error", [OWN, BackendNotAvailableError("update the driver")], ids=["own", "driver"])
def test_what_no_extra_mends_passes_unchanged(error: ImportError):
    with pytest.raises(ImportError) as caught, needs("this", "torch"):
        raise error
    assert caught.value is error


def test_what_is_broken_is_not_called_missing_and_the_outermost_says_what_brings_all_that_it_needs():
    with pytest.raises(BackendNotAvailableError) as caught, needs("this", "torch"):
        raise BROKEN
    assert not isinstance(caught.value, ModuleNotFoundError)
    assert str(caught.value) == f"this needs torch, got: libfake.so.3; {remedy('torch')}"
    assert caught.value.__cause__ is BROKEN
    with pytest.raises(MissingExtraError) as missing, needs("program.py", "torch"), needs("inner", "torch"):
        raise NO_TORCH
    assert re.fullmatch(message("program.py", "torch", "torch"), str(missing.value))
    # Before anything is imported.
    with pytest.raises(MissingExtraError) as found, needs("x", "plot", "no_such_module_at_all"):
        pytest.fail("the block was run")
    assert found.value.name == "no_such_module_at_all"


@pytest.mark.mpi
def test_mpi4py_without_an_mpi_says_what_brings_one():
    completed = python("-c", "import gradscale_numpy.mpi", MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert completed.stderr.splitlines()[-1] == (
        "gradscale.errors.BackendNotAvailableError: gradscale_numpy.mpi needs an MPI library, got: cannot load MPI "
        f"library; load the cluster's, or {remedy('mpich')}"
    )
