"""The options of a scaler, declared once: their names, types, defaults, and what is said of each."""

import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, TypeVar

from gradscale.core import validation
from gradscale.core.backend import Backend
from gradscale.core.messages import shown
from gradscale.core.protocols import Policy
from gradscale.errors import InvalidTypeError, InvalidValueError
from gradscale.policies.dynamic import DynamicScale
from gradscale.reports.recorder import HISTORY_SIZE, Diagnose, OnSkip, OnUpdate, Reports

__all__ = [
    "DEFAULT_TIMEOUT",
    "TORCHS_SCALERS",
    "CommonOptions",
    "ScalerOptions",
    "chosen_policy",
    "completed",
    "made_reports",
    "with_options",
]

DEFAULT_TIMEOUT = 1800.0

TORCHS_SCALERS = "torch's arguments are taken by gradscale_torch.GradScaler and gradscale_torch.ShardedGradScaler"
"""What is said to those who give torch's arguments to gradscale's own scalers."""

_POLICY_MEMBERS = ("init_scale", "init", "update", "backoff", "clamp", "at_min_scale")

_Class = TypeVar("_Class", bound=type)


class CommonOptions(TypedDict, total=False):
    """What every scaler takes by name, an adapter's too.

    Parameters
    ----------
    policy : DynamicScale, StaticScale or a Policy of your own, optional
        The rule that adapts the scale, instead of ``init_scale``, ``growth_factor``, ``backoff_factor`` and
        ``growth_interval``.
    on_skip, on_update : callable or sequence of callables, optional
        Called on rank 0 with the StepReport of each skipped step, and with the UpdateReport of each iteration.
    diagnose : {"on_overflow"}, optional
        Find out for each skipped step which parameters overflowed, on every rank: ``last_step(optimizer).overflow``.
    history_size : int, default 1024
        How many StepReports ``history`` keeps.
    """

    policy: Policy | None
    on_skip: OnSkip | None
    on_update: OnUpdate | None
    diagnose: Diagnose | None
    history_size: int


class ScalerOptions(CommonOptions, total=False):
    """What gradscale's own scalers take by name.

    Parameters
    ----------
    init_scale, growth_factor, backoff_factor, growth_interval : optional
        As in :class:`DynamicScale`; default 65536.0, 2.0, 0.5, 2000.
    enabled : bool, default True
        False makes every method pass through: nothing is scaled, checked or skipped.
    backend : str or Backend, optional
        An adapter or its registered name. Default: the one for the arrays' library.
    """

    init_scale: float | None
    growth_factor: float | None
    backoff_factor: float | None
    growth_interval: int | None
    enabled: bool
    backend: str | Backend | None


_DEFAULTS: ScalerOptions = {
    "init_scale": None,
    "growth_factor": None,
    "backoff_factor": None,
    "growth_interval": None,
    "policy": None,
    "enabled": True,
    "backend": None,
    "on_skip": None,
    "on_update": None,
    "diagnose": None,
    "history_size": HISTORY_SIZE,
}
# What torch's scalers take besides.
_OF_TORCH = {"device", "process_group"}
# What stands in a docstring in the place of the options.
_PLACE = "**options\n"


def completed(options: Mapping[str, Any]) -> ScalerOptions:
    """Return options with the defaults of those that are not given.

    Raises
    ------
    InvalidTypeError
        For a name that is no option.
    """
    unknown = [name for name in options if name not in _DEFAULTS]
    if unknown:
        msg = f"unexpected keyword arguments {unknown}; the options of a scaler are {list(_DEFAULTS)}"
        if not _OF_TORCH.isdisjoint(unknown):
            msg += f"; {TORCHS_SCALERS}"
        raise InvalidTypeError(msg)
    whole: ScalerOptions = {**_DEFAULTS, **options}  # type: ignore[typeddict-item]
    return whole


def chosen_policy(policy: Policy | None, factors: Mapping[str, Any]) -> Policy:
    """Return a policy, or a DynamicScale of the factors that are given.

    Raises
    ------
    InvalidValueError, InvalidTypeError
        For a policy together with a factor, what is no policy, or a factor that is out of range.
    """
    given = {name: value for name, value in factors.items() if value is not None}
    if policy is None:
        return DynamicScale(**given)
    if given:
        either = f"policy= or {', '.join(f'{name}=' for name in given)}"
        msg = f"give {either}, not both, got {shown(policy)} and {shown(given)}"
        raise InvalidValueError(msg)
    found: Policy = validation.policy(policy, _POLICY_MEMBERS)
    return found


def made_reports(options: ScalerOptions) -> Reports[Any]:
    """Return the reports that completed options ask for.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        For what cannot be called, another ``diagnose`` or a size out of range.
    """
    wanted = options["diagnose"]
    if wanted is not None:
        validation.choice("diagnose", wanted, ("on_overflow",))
    callbacks = options["on_skip"], options["on_update"]
    return Reports(*callbacks, diagnoses=wanted is not None, history_size=options["history_size"])


def with_options(*kinds: Any) -> Callable[[_Class], _Class]:
    """Show the options that a class takes as ``**options`` in the signature and the docstring of its constructor.

    Parameters
    ----------
    *kinds : ScalerOptions, CommonOptions
        Each with what it adds to the docstring, in the place of the line ``**options``.
    """

    def show(kind: _Class) -> _Class:
        constructor: Any = kind.__init__  # type: ignore[misc]
        parameters = inspect.signature(constructor).parameters.values()
        own = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        taken = kinds[0].__annotations__
        by_name = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=taken[name])
            for name, default in _DEFAULTS.items()
            if name in taken
        ]
        constructor.__signature__ = inspect.Signature([*own, *by_name], return_annotation=None)
        if kind.__doc__ is not None:
            # From Python 3.13 on it comes without its indentation.
            kind.__doc__ = inspect.cleandoc(kind.__doc__).replace(_PLACE, "".join(map(_described, kinds)))
        return kind

    return show


@functools.cache
def _described(kind: Any) -> str:
    """Return what the docstring of a kind of options says of each; nothing where Python drops docstrings."""
    lines = textwrap.dedent((kind.__doc__ or "").partition("----------\n")[2])
    return lines.rstrip() + "\n" if lines else ""
