"""Extras: what to install for a library that is missing, and the one error that says so."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from gradscale.errors import BackendNotAvailableError, InvalidTypeError, InvalidValueError, MissingExtraError

# What an extra does not bring, since it is another distribution or version for each CUDA.
_BESIDES = {"cupy": " cupy-cuda12x", "nccl4py": " 'cuda-bindings==13.*' nvidia-nccl-cu13"}


def is_clone() -> bool:
    """Return whether this module lies in a clone, and not in an installed package."""
    return (Path(__file__).parents[1] / "pyproject.toml").exists()


def install_command(extras: str, groups: str = "") -> str:
    """Return the command for extras such as ``mpich,cli``, and for a clone's dependency groups such as ``examples``."""
    source = "." if groups or is_clone() else "gradscale"
    wanted = f"'{source}[{extras}]'" if extras else source
    options = "".join(f" --group {group}" for group in groups.split())
    return f"python -m pip install {wanted}{_BESIDES.get(extras, '')}{options}"


def remedy(extras: str, groups: str = "") -> str:
    """Return the end of every message about a missing library: the command, and where to run it."""
    command = install_command(extras, groups)
    return command if "gradscale" in command else f"from a clone of gradscale: {command}"


@contextlib.contextmanager
def needs(user: str, extras: str, *modules: str, groups: str = "") -> Iterator[None]:
    """Say what to install if an import inside this block fails, or if one of ``modules`` is not there.

    The message begins with ``user``, and names the extras, and the dependency groups of a clone, that bring what is
    missing. ``modules`` are imported later, and so only looked up. MissingExtraError if a library is not installed, and
    BackendNotAvailableError if it cannot be imported.
    """
    try:
        for module in modules:
            if importlib.util.find_spec(module) is None:
                msg = f"No module named {module!r}"
                raise ModuleNotFoundError(msg, name=module)
        yield
    except ImportError as error:
        library = (error.name or "").partition(".")[0]
        cause = error.__cause__ if isinstance(error, MissingExtraError) else error
        if isinstance(cause, BackendNotAvailableError) or library.startswith("gradscale"):
            # It says what to do already; or it is a fault of gradscale's own, which no extra mends.
            raise
        kind = MissingExtraError if isinstance(error, ModuleNotFoundError) else BackendNotAvailableError
        msg = f"{user} needs {library or 'what cannot be imported'}, got: {cause}; {remedy(extras, groups)}"
        raise kind(msg, name=error.name) from cause


def import_keras(backend: str) -> ModuleType:
    """Import Keras; BackendNotAvailableError if it cannot be imported, or computes on another backend."""
    msg = (
        f"gradscale_{backend}.keras_optimizer needs Keras on {backend}, got: {{}}; install Keras "
        f"(python -m pip install keras), and set KERAS_BACKEND={backend} before it is imported"
    )
    try:
        keras = importlib.import_module("keras")
    except ImportError as error:
        # Without TensorFlow, Keras cannot be imported as it comes.
        raise BackendNotAvailableError(msg.format(error)) from error
    if keras.config.backend() != backend:
        raise BackendNotAvailableError(msg.format(f"Keras on {keras.config.backend()}"))
    return keras


def require_unscaled(keras: ModuleType, optimizer: object) -> None:
    """Raise InvalidTypeError for what is no optimizer of Keras, and for one that scales already."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or not isinstance(optimizer, keras.Optimizer):
        msg = (
            f"inner_optimizer must be an optimizer of Keras that does not scale, such as keras.optimizers.Adam(0.01), "
            f"got a {type(optimizer).__name__}: for a name call keras.optimizers.get(name); an optimizer that scales "
            f"already would divide the gradients twice: pass the one inside"
        )
        raise InvalidTypeError(msg)


def require_variables(optimizer: Any, variables: Sequence[Any] | None) -> Sequence[Any]:
    """Return the variables that an optimizer of Keras is to step, for which it is built; InvalidValueError for none."""
    if variables is None:
        msg = "apply needs the variables, got none; call apply(grads, variables)"
        raise InvalidValueError(msg)
    if not optimizer.built:
        optimizer.build(variables)
    return variables
