"""Which libraries the tests may use, and which must not be missing.

``GRADSCALE_TEST_REQUIRE=numpy,torch,mpi`` turns the absence of these into a failure: a skip must never look like a
pass.
"""

import functools
import importlib
import os
import shutil
from typing import NoReturn

import pytest
from worlds import find_mpiexec

VARIABLE = "GRADSCALE_TEST_REQUIRE"

# The names that the variable takes, and the modules behind them. Many names are those of their modules.
MODULES = {
    **{name: (name,) for name in ("numpy", "torch", "ndonnx", "jax", "optax", "flax", "jmp", "equinox", "ml_dtypes")},
    **{name: (name,) for name in ("lightning", "accelerate", "transformers", "timm", "ignite", "keras")},
    **{name: (name,) for name in ("tensorboard", "mypy", "pyright", "cupy")},
    "strict": ("array_api_strict",),
    "dask": ("dask.array",),
    "mlx": ("mlx.core",),
    "mpi": ("mpi4py.MPI",),
    "orbax": ("orbax.checkpoint",),
    "fast": ("numba",),
    "examples": ("sklearn", "matplotlib", "tqdm"),
    "torchtitan": ("torchtitan.components.optimizer",),
    "cli": ("typer", "rich"),
    "plot": ("matplotlib",),
    "hatchling": ("hatchling", "hatch_fancy_pypi_readme"),
    "nccl4py": ("nccl.core",),
}

# Programs.
PROGRAMS = ("nvcc",)


def required() -> frozenset[str]:
    """Return the names that must not be missing."""
    names = frozenset(filter(None, (name.strip() for name in os.environ.get(VARIABLE, "").split(","))))
    known = {*MODULES, *PROGRAMS, "gpu"}
    if not names <= known:
        raise pytest.UsageError(f"{VARIABLE} names {sorted(names - known)}; known are {sorted(known)}")
    return names


@functools.cache
def _missing(name: str) -> str:
    """Return why a library cannot be used, or an empty string."""
    for module in MODULES[name]:
        try:
            importlib.import_module(module)
        except ImportError as error:
            return f"{name}: {error}"
        except RuntimeError as error:
            # mpi4py is installed, and no MPI library is.
            return f"{name}: {error}"
    if name == "mpi" and find_mpiexec() is None:
        return "mpi: there is no mpiexec beside this Python nor on the PATH"
    return ""


def require(name: str):
    """Return the library's module; without it skip the test with the reason, or fail if it is required."""
    reason = _missing(name)
    if reason:
        _leave_out(name, reason)
    return importlib.import_module(MODULES[name][0])


def require_program(name: str) -> str:
    """Return the path of a program; without it as :func:`require` does."""
    found = shutil.which(name)
    if found is None:
        _leave_out(name, f"{name} is not on the PATH")
    return found


def leave_out_gpu(reason: str) -> NoReturn:
    """Skip a test that needs a GPU, with the reason why there is none; fail if one is required."""
    _leave_out("gpu", f"gpu: {reason}")


def is_torch_2_6() -> bool:
    """Tell whether torch is of the oldest version that is tested, which cannot do all that later ones do."""
    version: str = require("torch").__version__
    return version.startswith("2.6.")


def leave_out_fsdp2():
    """Skip a test of FSDP2 with a torch whose FSDP2 does not run on CPUs."""
    if is_torch_2_6():
        pytest.skip("torch 2.6: its FSDP2 does not run on CPUs")


def _leave_out(name: str, reason: str) -> NoReturn:
    if name in required():
        pytest.fail(f"{reason}, and {VARIABLE} requires it")
    pytest.skip(reason, allow_module_level=True)
