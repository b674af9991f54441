"""Dynamic gradient scaling for low-precision training, for every array framework and every process group."""

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
    ScaleDesyncError,
    ScaleUnderflowError,
    StateDictError,
)
from gradscale.group_agreement import GroupAgreement
from gradscale.ops import scale, select, unscale
from gradscale.policy import DynamicScale, StaticScale
from gradscale.protocols import Backend, Collectives, GroupBackend, Optimizer, Policy
from gradscale.report import StepReport
from gradscale.scaler import GradScaler
from gradscale.sharded import ShardedGradScaler
from gradscale.state import ScaleState

__all__ = [
    "Backend",
    "BackendError",
    "BackendNotAvailableError",
    "CallOrderError",
    "ClosureOverflowError",
    "CollectiveTimeoutError",
    "Collectives",
    "DynamicScale",
    "GradScaler",
    "GradscaleError",
    "GroupAgreement",
    "GroupBackend",
    "InvalidTypeError",
    "InvalidValueError",
    "Optimizer",
    "Policy",
    "ScaleDesyncError",
    "ScaleState",
    "ScaleUnderflowError",
    "ShardedGradScaler",
    "StateDictError",
    "StaticScale",
    "StepReport",
    "registry",
    "scale",
    "select",
    "testing",
    "tree",
    "unscale",
]

__version__ = "0.1.0"
