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
    a bad batch       GradScaler(skip=SkipSpikes()); StepGuard, which scales nothing; NOT_STEPPED
    a dead run        TrainingStalledWarning, GradScaler(give_up_after=100), scaler.counts()
    other scalers     load_foreign_state: ForeignState
    what plugs in     Policy, Optimizer, Collectives, Group; Backend, GroupBackend
                      registry, tree, testing
    what is raised    GradscaleError, and those below it in gradscale.errors
    a report          show_versions(), for a fault of gradscale's

``gradscale_torch`` has replacements of torch's scalers, ``gradscale_jax`` a ``value_and_grad`` for compiled steps; on
the command line there are ``gradscale doctor``, ``check``, ``simulate`` and ``plot``.
"""

import importlib
import typing

# Each name is imported as itself, which makes it public, in place of a list in __all__: of the classes in such a list
# help(gradscale) would print every method.
from gradscale.core import registry as registry
from gradscale.core import tree as tree
from gradscale.core.backend import Backend as Backend
from gradscale.core.ops import scale as scale
from gradscale.core.ops import select as select
from gradscale.core.ops import unscale as unscale
from gradscale.core.protocols import NOT_STEPPED as NOT_STEPPED
from gradscale.core.protocols import Collectives as Collectives
from gradscale.core.protocols import Group as Group
from gradscale.core.protocols import GroupBackend as GroupBackend
from gradscale.core.protocols import Optimizer as Optimizer
from gradscale.core.protocols import Policy as Policy
from gradscale.core.protocols import ScaleState as ScaleState
from gradscale.errors import BackendError as BackendError
from gradscale.errors import BackendNotAvailableError as BackendNotAvailableError
from gradscale.errors import CallOrderError as CallOrderError
from gradscale.errors import ClosureOverflowError as ClosureOverflowError
from gradscale.errors import CollectiveTimeoutError as CollectiveTimeoutError
from gradscale.errors import GradscaleError as GradscaleError
from gradscale.errors import InvalidTypeError as InvalidTypeError
from gradscale.errors import InvalidValueError as InvalidValueError
from gradscale.errors import LogWriteError as LogWriteError
from gradscale.errors import MissingExtraError as MissingExtraError
from gradscale.errors import ScaleDesyncError as ScaleDesyncError
from gradscale.errors import ScaleUnderflowError as ScaleUnderflowError
from gradscale.errors import SharedMemoryError as SharedMemoryError
from gradscale.errors import StateDictError as StateDictError
from gradscale.errors import TrainingStalledError as TrainingStalledError
from gradscale.errors import TrainingStalledWarning as TrainingStalledWarning
from gradscale.policies.dynamic import DynamicScale as DynamicScale
from gradscale.policies.dynamic import StaticScale as StaticScale
from gradscale.policies.spikes import SkipSpikes as SkipSpikes
from gradscale.scaler.diagnosis.report import OverflowReport as OverflowReport
from gradscale.scaler.diagnosis.report import ParameterReport as ParameterReport
from gradscale.scaler.group_agreement import GroupAgreement as GroupAgreement
from gradscale.scaler.reports import StepReport as StepReport
from gradscale.scaler.reports import UpdateReport as UpdateReport
from gradscale.scaler.scaler import GradScaler as GradScaler
from gradscale.scaler.scaler import ShardedGradScaler as ShardedGradScaler
from gradscale.scaler.scaler import StepGuard as StepGuard
from gradscale.version import __version__ as __version__

if typing.TYPE_CHECKING:
    from gradscale import callbacks as callbacks
    from gradscale import plot as plot
    from gradscale import presets as presets
    from gradscale import testing as testing
    from gradscale.tools.foreign import ForeignState as ForeignState
    from gradscale.tools.foreign import load_foreign_state as load_foreign_state
    from gradscale.tools.versions import show_versions as show_versions

# Loaded at their first use: training loops can do without them, and they would double the time of the import.
_LATER = dict.fromkeys(("ForeignState", "load_foreign_state"), "gradscale.tools.foreign")
_LATER |= {"show_versions": "gradscale.tools.versions"}
_LATER |= {name: f"gradscale.{name}" for name in ("callbacks", "plot", "presets", "testing")}

if not typing.TYPE_CHECKING:  # a type checker would take each name for one of gradscale's

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            msg = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)
        module = importlib.import_module(_LATER[name])
        value = module if module.__name__.endswith(f".{name}") else getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """Return the public names."""
    modules = ("registry", "tree")
    own = {name for name, value in globals().items() if name in modules or not isinstance(value, type(typing))}
    return sorted({"__version__", *_LATER, *(name for name in own if not name.startswith("_"))})
