"""The libraries that gradscale has adapters for, and a short use of each.

``python -m gradscale.tools.cli.probe NAME`` uses one and prints a line of JSON: the finding. Most failures are a
traceback and an exit code, or whatever a broken library makes of the process.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from array_api_compat import array_namespace

import gradscale
from gradscale.core import registry
from gradscale.core.backend import Backend
from gradscale.core.protocols import Array, GroupBackend
from gradscale.errors import BackendError, BackendNotAvailableError, MissingExtraError
from gradscale.extras import install_command, with_place
from gradscale.testing import check_collectives

_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")
_LEVELS = ("single", "funneled", "serialized", "multiple")

Details = dict[str, object]


class Component(NamedTuple):
    """A library with an adapter."""

    name: str
    modules: tuple[str, ...]  # what has to be importable
    extra: str = ""  # the one of gradscale that brings it; empty if it is not known
    aliases: tuple[str, ...] = ()
    use: Callable[[], Details] | None = None  # returns what it found; None to use the adapter of that name

    @property
    def command(self) -> str:
        """The pip command, or an empty string."""
        return install_command(self.extra) if self.extra else ""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The finding about one component."""

    name: str
    # It was used and gave the right answers; is not installed; failed; or was not done in time.
    status: Literal["ok", "missing", "broken", "timed out"]
    reason: str = ""  # why it is not ok
    command: str = ""  # the pip command that may help; empty if there is none, or if the reason says what to do
    details: Details = dataclasses.field(default_factory=dict)  # what was done with it, versions, devices

    @property
    def remedy(self) -> str:
        """The reason, and the command if there is one."""
        return f"{self.reason}; {with_place(self.command)}" if self.command else self.reason


def components() -> list[Component]:
    """Return gradscale's own components, and the adapters that other packages have registered."""
    known = {name for component in _OURS for name in (component.name, *component.aliases)}
    return [*_OURS, *(Component(name, (name,)) for name in registry.names() if name not in known)]


def find(names: Sequence[str]) -> list[Component]:
    """Return the components of some names or aliases, each once; a KeyError for an unknown one lists them."""
    by_name = {name: component for component in components() for name in (component.name, *component.aliases)}
    for name in names:
        if name not in by_name:
            known = ", ".join(component.extra or component.name for component in components())
            msg = f"doctor does not look at {name!r}; it looks at {known}"
            raise KeyError(msg)
    return list(dict.fromkeys(by_name[name] for name in names))


def examine(name: str) -> Finding:
    """Use one component if it is there."""
    (component,) = find([name])
    missing = [module for module in component.modules if importlib.util.find_spec(module) is None]
    if missing:
        return Finding(name, "missing", f"{', '.join(missing)} not installed", component.command)
    try:
        return Finding(name, "ok", details=probe(name))
    except (BackendNotAvailableError, MissingExtraError) as error:
        # It names the remedy, such as a driver; a pip command would mislead.
        return Finding(name, "broken", " ".join(str(error).split()))


def probe(name: str) -> Details:
    """Import and use one component, and return what it found, with the versions of its modules."""
    (component,) = find([name])
    modules = [importlib.import_module(module) for module in component.modules]
    details = component.use() if component.use else _adapter(name)
    return {"versions": {module.__name__: getattr(module, "__version__", "unknown") for module in modules}} | details


def _adapter(name: str) -> Details:
    backend = registry.get(name)
    if isinstance(backend, Backend):
        return _arrays(backend)
    if isinstance(backend, GroupBackend):
        return {"did": "loaded"}
    msg = f"the adapter for {name!r}, {backend!r}, is neither for arrays nor for groups"
    raise BackendError(msg)


def _arrays(backend: Backend) -> Details:
    """Scale, unscale and update on small arrays, and compare with the right results."""
    like = backend.example()
    xp = array_namespace(like)
    policy = gradscale.DynamicScale(init_scale=1024.0)
    state = policy.init(like=like)
    scaled = gradscale.scale([xp.asarray([1.0, -2.0], dtype=xp.float32), xp.asarray([3.0], dtype=xp.float32)], state)
    in_place = [xp.asarray(array, copy=True) for array in scaled]
    unscaled, finite = backend.unscale(in_place, state, out=in_place)
    bad = [xp.asarray([1.0, float("inf")], dtype=xp.float32), xp.asarray([float("nan")], dtype=xp.float32)]
    _, nonfinite = backend.unscale(bad, state)
    halved = policy.update(state, nonfinite=nonfinite)
    results: list[Array] = [*scaled, *unscaled, finite, nonfinite > 0, halved.scale]
    found = backend.read(xp.concat([xp.astype(xp.reshape(array, (-1,)), xp.int32) for array in results]))
    right = [1024, -2048, 3072, 1, -2, 3, 0, 1, 512]
    if found != right:
        msg = f"{backend.name!r} gives a wrong answer for scale and unscale: {found}, not {right}"
        raise BackendError(msg)
    return {"did": "scale, unscale, update"}


def _fast() -> Details:
    import gradscale_numpy

    details = _arrays(gradscale_numpy.NumpyBackend(fast=True))
    is_active = registry.get("numpy").is_compiled
    return details | {"kernels": "active" if is_active else "off (GRADSCALE_NUMPY_FAST=0)"}


def mpi_library() -> str:
    """Return the name and version of the MPI that mpi4py uses; initializes MPI."""
    from mpi4py import MPI

    first = MPI.Get_library_version().replace("\0", "").strip().splitlines()[0]
    return " ".join(first.split())


def _mpi4py() -> Details:
    import numpy as np
    from mpi4py import MPI

    check_collectives(registry.collectives_for(MPI.COMM_SELF, timeout=20.0), np.zeros(1), repetitions=1)
    threads = {getattr(MPI, f"THREAD_{level.upper()}"): level for level in _LEVELS}
    return {
        "did": "MAX all-reduce on one process",
        "library": mpi_library(),
        "standard": ".".join(map(str, MPI.Get_version())),
        "threads": threads[MPI.Query_thread()],
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
    number = nccl.get_version() if nccl.available else 0
    nccl_version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return details | {
        "devices": [f"cuda:{i} {name}" for i, name in enumerate(names)],
        "driver": version_text(runtime.driverGetVersion()),
        "runtime": version_text(built_for),
        "nccl": nccl_version if number else f"missing, python -m pip install {nccl_package(built_for)}",
    }


def _nccl4py() -> Details:
    from nccl import core

    registry.get("nccl")
    core.Communicator.init(1, 0, core.get_unique_id()).destroy()
    return {
        "did": "a communicator of one process",
        "nccl": str(core.get_version().libnccl),
        "versions": {"nccl4py": core.__version__},
    }


_OURS = (
    Component("numpy", ("numpy",), "numpy"),
    Component("mpi4py", ("mpi4py",), "mpi", ("mpi",), _mpi4py),
    Component("torch", ("torch",), "torch", (), _torch),
    Component("jax", ("jax", "jaxlib"), "jax", ("jaxlib",), _jax),
    Component("cupy", ("cupy",), "cupy", ("cupy_backends", "cupyx"), _cupy),
    Component("nccl4py", ("nccl",), "nccl4py", ("nccl",), _nccl4py),
    Component("fast", ("numba",), "fast", ("numba",), _fast),
)


def main() -> None:
    """Print the finding about the component named on the command line."""
    # On a line of its own, whatever the libraries have printed before.
    print("\n" + json.dumps(dataclasses.asdict(examine(sys.argv[1]))), flush=True)


if __name__ == "__main__":
    main()
