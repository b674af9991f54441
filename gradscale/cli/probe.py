"""Use one component as a program would, in a process of its own: ``python -m gradscale.cli.probe NAME``.

Prints one line of JSON: whether it works, versions, and what it found. A failure is a traceback and an exit code, or
whatever a broken library makes of the process.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from collections.abc import Callable
from typing import Any

from array_api_compat import array_namespace

import gradscale
from gradscale.cli.components import find
from gradscale.core import registry
from gradscale.core.backend import Backend
from gradscale.core.protocols import GroupBackend
from gradscale.errors import BackendError

__all__ = ["main"]

_SCALE = 1024.0
_TIMEOUT = 20.0  # seconds
_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")
_LEVELS = ("single", "funneled", "serialized", "multiple")

Details = dict[str, Any]


def try_arrays(backend: Backend) -> None:
    """Scale, unscale and update on small arrays, and compare with what must come out.

    Raises
    ------
    BackendError
        When an answer is wrong.
    """
    like = backend.example()
    xp = array_namespace(like)
    policy = gradscale.DynamicScale(init_scale=_SCALE)
    state = policy.init(like=like)
    gradients = [xp.asarray([1.0, -2.0, 3.0], dtype=xp.float32), xp.asarray([4.0], dtype=xp.float32)]
    scaled = gradscale.scale(gradients, state)
    unscaled, nonfinite = backend.unscale(scaled, state)
    in_place = [xp.asarray(array, copy=True) for array in scaled]
    again, _ = backend.unscale(in_place, state, out=in_place)
    whole = xp.concat([xp.astype(array, xp.int32) for array in [*scaled, *unscaled, *again]])
    answers = {
        "scale and unscale": (backend.read(whole), [1024, -2048, 3072, 4096, *2 * (1, -2, 3, 4)]),
        "the verdict on finite gradients": (backend.read(xp.reshape(nonfinite, (1,))), [0]),
    }
    bad = [xp.asarray([1.0, float("inf")], dtype=xp.float32), xp.asarray([float("nan")], dtype=xp.float32)]
    _, nonfinite = backend.unscale(bad, state)
    verdict = xp.astype(xp.reshape(nonfinite, (1,)) > 0, xp.int32)
    answers["the verdict on inf and NaN"] = (backend.read(verdict), [1])
    halved = policy.update(state, nonfinite=nonfinite)
    scale = xp.astype(xp.reshape(halved.scale, (1,)), xp.int32)
    answers["the scale after them"] = (backend.read(scale), [512])
    for what, (found, right) in answers.items():
        if found != right:
            msg = f"{backend.name!r} gives a wrong answer for {what}: {found}, not {right}"
            raise BackendError(msg)


def _adapter(name: str) -> Details:
    backend = registry.get(name)
    if isinstance(backend, Backend):
        try_arrays(backend)
        return {"did": "scale, unscale, update"}
    if isinstance(backend, GroupBackend):
        return {"did": "loaded"}
    msg = f"the adapter for {name!r}, {backend!r}, is neither for arrays nor for groups"
    raise BackendError(msg)


def _numpy() -> Details:
    return _adapter("numpy")


def _fast() -> Details:
    import gradscale_numpy

    try_arrays(gradscale_numpy.NumpyBackend(fast=True))
    default = registry.get("numpy")
    return {
        "did": "scale, unscale, update",
        "kernels": "active" if default.is_compiled else "off (GRADSCALE_NUMPY_FAST=0)",
    }


def _mpi4py() -> Details:
    import numpy as np
    from mpi4py import MPI

    collectives = registry.collectives_for(MPI.COMM_SELF, timeout=_TIMEOUT)
    sent = np.arange(16, dtype=np.int32)
    found = collectives.start_max(sent)().tolist()
    if found != sent.tolist():
        msg = f"MPI gives a wrong maximum of one rank: {found}, not {sent.tolist()}"
        raise BackendError(msg)
    registry.collectives_for(MPI.COMM_WORLD, timeout=_TIMEOUT)
    library = MPI.Get_library_version().replace("\0", "").strip().splitlines()[0]
    return {
        "did": "MAX all-reduce on one process",
        "library": " ".join(library.split()),
        "standard": ".".join(map(str, MPI.Get_version())),
        "threads": dict(
            zip(
                (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE),
                _LEVELS,
                strict=True,
            )
        )[MPI.Query_thread()],
    }


def _torch() -> Details:
    import torch
    import torch.distributed as dist

    details = _adapter("torch")
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices += [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    groups = [name for name in _BACKENDS if dist.is_available() and dist.is_backend_available(name)]
    return details | {"devices": devices, "groups": groups}


def _jax() -> Details:
    import jax

    return _adapter("jax") | {"devices": [f"{device.platform}:{device.id}" for device in jax.devices()]}


def _cupy() -> Details:
    from cupy.cuda import runtime

    from gradscale_cupy.availability import nccl_module, nccl_package, require_device, version_text

    require_device()
    details = _adapter("cupy")
    names = [runtime.getDeviceProperties(i)["name"].decode() for i in range(runtime.getDeviceCount())]
    built_for = runtime.runtimeGetVersion()
    nccl = nccl_module()
    nccl_text = f"missing, python -m pip install {nccl_package(built_for)}"
    if nccl.available:
        number = nccl.get_version()
        nccl_text = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return details | {
        "devices": [f"cuda:{i} {name}" for i, name in enumerate(names)],
        "driver": version_text(runtime.driverGetVersion()),
        "runtime": version_text(built_for),
        "nccl": nccl_text,
    }


_SPECIAL: dict[str, Callable[[], Details]] = {
    "numpy": _numpy,
    "mpi4py": _mpi4py,
    "torch": _torch,
    "jax": _jax,
    "cupy": _cupy,
    "fast": _fast,
}


def probe(name: str) -> Details:
    """Import and use one component; what it found, with the versions of its modules."""
    (component,) = find([name])
    for module in component.modules:
        importlib.import_module(module)
    special = _SPECIAL.get(name)
    if special is not None:
        details = special()
    else:
        details = _adapter(name) if component.is_adapter else {"did": "imported"}
    return details | {"versions": {module: _version(module) for module in component.modules}}


def _version(module: str) -> str:
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules[module], "__version__", "unknown"))


def main() -> None:
    """Probe what is named on the command line."""
    # On a line of its own, whatever the libraries have printed before.
    print("\n" + json.dumps(probe(sys.argv[1])), flush=True)


if __name__ == "__main__":
    main()
