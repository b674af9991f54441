"""Dynamic gradient scaling for low-precision training, for every array framework and every process group.

An iteration, with an optimizer or in pure functions::

    scaler = GradScaler()          state = policy.init(like=loss)
    scaler.scale(loss)             scale(loss, state)
          |                              |               the backward pass
    scaler.unscale_(optimizer)     grads, nonfinite = unscale(grads, state)
    scaler.step(optimizer)         params = select(nonfinite == 0, new, params)
    scaler.update()                state = policy.update(state, nonfinite=nonfinite)

Over ranks it is ``ShardedGradScaler(group=comm)``, or ``GroupAgreement(comm, policy)`` beside the pure functions: all
step, or none does. ``unscale_`` is optional, for clipping. What there is besides::

    the rule          DynamicScale, StaticScale, presets; ScaleState
    what happened     scaler.last_step(optimizer), scaler.history: StepReport
                      UpdateReport, callbacks, plot
    which parameter   scaler.diagnose(optimizer): OverflowReport, ParameterReport
    other scalers     load_foreign_state: ForeignState
    what plugs in     Policy, Optimizer, Collectives; Backend, GroupBackend
                      registry, tree, testing
    what is raised    GradscaleError, and those below it in gradscale.errors

``gradscale_torch`` has replacements of torch's scalers, ``gradscale_jax`` a ``value_and_grad`` for compiled steps; on
the command line there are ``gradscale doctor``, ``check`` and ``simulate``.
"""

import importlib
import typing

from gradscale import testing
from gradscale.core import registry, tree
from gradscale.core.backend import Backend
from gradscale.core.ops import scale, select, unscale
from gradscale.core.protocols import Collectives, GroupBackend, Optimizer, Policy, ScaleState
from gradscale.errors import (
    BackendError,
    BackendNotAvailableError,
    CallOrderError,
    ClosureOverflowError,
    CollectiveTimeoutError,
    GradscaleError,
    InvalidTypeError,
    InvalidValueError,
    LogWriteError,
    MissingExtraError,
    ScaleDesyncError,
    ScaleUnderflowError,
    SharedMemoryError,
    StateDictError,
)
from gradscale.policies.dynamic import DynamicScale, StaticScale
from gradscale.policies.spikes import SkipSpikes
from gradscale.reports.overflow import OverflowReport, ParameterReport
from gradscale.reports.steps import StepReport, UpdateReport
from gradscale.scaler.group_agreement import GroupAgreement
from gradscale.scaler.scaler import GradScaler, ShardedGradScaler

if typing.TYPE_CHECKING:
    from gradscale.interop.foreign import ForeignState, load_foreign_state
    from gradscale.policies import presets
    from gradscale.reports import callbacks, plot

__all__ = [
    "Backend",
    "BackendError",
    "BackendNotAvailableError",
    "CallOrderError",
    "ClosureOverflowError",
    "CollectiveTimeoutError",
    "Collectives",
    "DynamicScale",
    "ForeignState",
    "GradScaler",
    "GradscaleError",
    "GroupAgreement",
    "GroupBackend",
    "InvalidTypeError",
    "InvalidValueError",
    "LogWriteError",
    "MissingExtraError",
    "Optimizer",
    "OverflowReport",
    "ParameterReport",
    "Policy",
    "ScaleDesyncError",
    "ScaleState",
    "ScaleUnderflowError",
    "ShardedGradScaler",
    "SharedMemoryError",
    "SkipSpikes",
    "StateDictError",
    "StaticScale",
    "StepReport",
    "UpdateReport",
    "callbacks",
    "load_foreign_state",
    "plot",
    "presets",
    "registry",
    "scale",
    "select",
    "testing",
    "tree",
    "unscale",
]

__version__ = "0.1.0"

# What a training loop may do without is loaded when it is asked for, and would double the time of the import.
_LATER = {
    "ForeignState": "gradscale.interop.foreign",
    "load_foreign_state": "gradscale.interop.foreign",
    "callbacks": "gradscale.reports.callbacks",
    "plot": "gradscale.reports.plot",
    "presets": "gradscale.policies.presets",
}


def __getattr__(name: str) -> typing.Any:
    if name not in _LATER:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    module = importlib.import_module(_LATER[name])
    found = module if module.__name__.endswith(f".{name}") else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
