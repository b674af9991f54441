"""Dynamic gradient scaling for low-precision training, for every array framework and every process group."""

import importlib
import typing

from gradscale import registry, testing, tree
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
from gradscale.group_agreement import GroupAgreement
from gradscale.ops import scale, select, unscale
from gradscale.overflow import OverflowReport, ParameterReport
from gradscale.policy import DynamicScale, StaticScale
from gradscale.protocols import Backend, Collectives, GroupBackend, Optimizer, Policy
from gradscale.report import StepReport, UpdateReport
from gradscale.scaler import GradScaler
from gradscale.sharded import ShardedGradScaler
from gradscale.state import ScaleState

if typing.TYPE_CHECKING:
    from gradscale import callbacks, plot, presets
    from gradscale.foreign import ForeignState, load_foreign_state

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
    "ForeignState": "gradscale.foreign",
    "load_foreign_state": "gradscale.foreign",
    **{name: f"gradscale.{name}" for name in ("callbacks", "plot", "presets")},
}


def __getattr__(name: str) -> typing.Any:
    if name not in _LATER:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    module = importlib.import_module(_LATER[name])
    found = module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
