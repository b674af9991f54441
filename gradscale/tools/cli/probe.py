"""The libraries that gradscale has adapters for, and a short use of each.

``python -m gradscale.tools.cli.probe NAME`` uses one and prints a line of JSON: the finding. Most failures are a
traceback and an exit code, or whatever a broken library makes of the process.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from array_api_compat import array_namespace

import gradscale
from gradscale.core import registry
from gradscale.core.backend import Backend
from gradscale.core.protocols import GroupBackend
from gradscale.errors import BackendError, BackendNotAvailableError, InvalidValueError
from gradscale.extras import remedy
from gradscale.testing import check_collectives

Details = dict[str, object]


class Component(NamedTuple):
    """A library with an adapter."""

    name: str
    modules: tuple[str, ...]  # what has to be importable
    extra: str = ""  # gradscale's extra that installs it; empty for other packages' adapters
    aliases: tuple[str, ...] = ()
    use: Callable[[], Details] | None = None  # returns the details; None to use the adapter of that name

    def remedy(self, reason: str) -> str:
        """Return a reason why it does not work, and the pip command that may help."""
        return f"{reason}; {remedy(self.extra)}" if self.extra else reason


class Finding(NamedTuple):
    """The finding about one component."""

    name: str
    # It was used and gave the right answers; is not installed; failed; or was not done in time.
    status: Literal["ok", "missing", "broken", "timed out"]
    reason: str = ""  # why it is not ok, and what may help
    details: Details = {}  # noqa: RUF012 - what was done with it, versions, devices


def components() -> list[Component]:
    """Return gradscale's own components, and the adapters that other packages have registered."""
    own_names = {name for component in _OURS for name in (component.name, *component.aliases)}
    return [*_OURS, *(Component(name, (name,)) for name in registry.names() if name not in own_names)]


def find(names: Sequence[str]) -> list[Component]:
    """Return the components of some names or aliases, each once; an InvalidValueError for an unknown one lists them."""
    by_name = {name: component for component in components() for name in (component.name, *component.aliases)}
    if unknown := [name for name in names if name not in by_name]:
        choices = ", ".join(component.extra or component.name for component in components())
        msg = f"doctor does not look at {', '.join(unknown)}; it looks at {choices}"
        raise InvalidValueError(msg)
    return list(dict.fromkeys(by_name[name] for name in names))


def examine(name: str) -> Finding:
    """Use one component if it is there."""
    (component,) = find([name])
    missing = [module for module in component.modules if importlib.util.find_spec(module) is None]
    if missing:
        return Finding(name, "missing", component.remedy(f"{', '.join(missing)} not installed"))
    try:
        return Finding(name, "ok", details=probe(component))
    except BackendNotAvailableError as error:
        # It names the remedy, such as a driver; a pip command would mislead.
        return Finding(name, "broken", " ".join(str(error).split()))


def probe(component: Component) -> Details:
    """Import and use one component, and return the details, with the versions of its modules."""
    modules = [importlib.import_module(module) for module in component.modules]
    details = component.use() if component.use else _adapter(component.name)
    return {"versions": {module.__name__: getattr(module, "__version__", "unknown") for module in modules}} | details


def _adapter(name: str) -> Details:
    backend = registry.get(name)
    if isinstance(backend, GroupBackend) and not isinstance(backend, Backend):
        return {"did": "loaded"}
    return _arrays(backend)


def _arrays(backend: Backend) -> Details:
    """Scale, unscale and update on small arrays, and compare with the right results."""
    like = backend.example()
    xp = array_namespace(like)
    policy = gradscale.DynamicScale(init_scale=1024.0)
    state = policy.init(like=like)
    results = [gradscale.scale(xp.asarray([1.0, -2.0], dtype=xp.float32), state)]
    for last in (0.0, math.inf):
        grads = [xp.asarray(values, dtype=xp.float32) for values in ([1024.0, -2048.0], [last])]
        unscaled, nonfinite = backend.unscale(grads, state, out=grads)
        results += [unscaled[0], nonfinite, policy.update(state, nonfinite=nonfinite).scale]
    answer = backend.read(xp.concat([xp.astype(xp.reshape(array, (-1,)), xp.int32) for array in results]))
    right = [1024, -2048, 1, -2, 0, 1024, 1, -2, 1, 512]
    if answer != right:
        msg = f"{backend.name!r} gives a wrong answer for scale and unscale: {answer}, not {right}"
        raise BackendError(msg)
    return {"did": "scale, unscale, update"}


def _fast() -> Details:
    import gradscale_numpy

    return _arrays(gradscale_numpy.NumpyBackend(fast=True))


def mpi_library() -> str:
    """Return the name and version of the MPI that mpi4py uses; initializes MPI."""
    from mpi4py import MPI

    first = MPI.Get_library_version().replace("\0", "").strip().splitlines()[0]
    return " ".join(first.split())


def _mpi4py() -> Details:
    import numpy as np
    from mpi4py import MPI

    check_collectives(registry.collectives_for(MPI.COMM_SELF, timeout=20.0), np.zeros(1), repetitions=1)
    return {"did": "MAX all-reduce on one process", "library": mpi_library()}


def _torch() -> Details:
    import torch

    others = [f"{torch.accelerator.current_accelerator()}:{i}" for i in range(torch.accelerator.device_count())]
    return _adapter("torch") | {"devices": ["cpu", *others]}


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
    details: Details = {"did": "a communicator of one process", "nccl": str(core.get_version().libnccl.version)}
    return details | {"versions": {"nccl4py": core.__version__}}


def _mlx() -> Details:
    import mlx.core as mx

    check_collectives(registry.collectives_for(mx.distributed.init(), timeout=20.0), mx.zeros(1), repetitions=1)
    groups = [name for name in ("ring", "mpi", "nccl", "jaccl") if mx.distributed.is_available(name)]
    # The package itself does not say its version.
    details = {"devices": [str(mx.default_device())], "groups": groups, "versions": {"mlx": mx.__version__}}
    return _adapter("mlx") | details


_OURS = (
    Component("numpy", ("numpy",), "numpy"),
    Component("mpi4py", ("mpi4py",), "mpi", ("mpi",), _mpi4py),
    Component("torch", ("torch",), "torch", (), _torch),
    Component("jax", ("jax", "jaxlib"), "jax", ("jaxlib",), _jax),
    Component("cupy", ("cupy",), "cupy", ("cupy_backends", "cupyx"), _cupy),
    Component("nccl4py", ("nccl",), "nccl4py", ("nccl",), _nccl4py),
    Component("mlx", ("mlx",), "mlx", (), _mlx),
    Component("fast", ("numba",), "fast", ("numba",), _fast),
)


if __name__ == "__main__":
    # On a line of its own, whatever the libraries have printed before.
    print("\n" + json.dumps(examine(sys.argv[1])._asdict()), flush=True)
