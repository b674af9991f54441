"""Dynamic gradient scaling for low-precision training, for every array framework and every process group."""

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
    StateDictError,
)
from gradscale.policies.dynamic import DynamicScale, StaticScale
from gradscale.reports.overflow import OverflowReport, ParameterReport
from gradscale.reports.steps import StepReport, UpdateReport
from gradscale.scaler.agreement import GroupAgreement
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
