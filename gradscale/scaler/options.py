"""The options that scalers have in common: their defaults, and what is made of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import ParamSpec

from gradscale.core import validation
from gradscale.core.messages import shown
from gradscale.core.protocols import Policy
from gradscale.errors import InvalidTypeError, InvalidValueError
from gradscale.policies.dynamic import DynamicScale
from gradscale.reports.recorder import Diagnose, OnSkip, OnUpdate, Reports
from gradscale.scaler.parts import Pending

__all__ = ["DEFAULT_TIMEOUT", "checked_arguments", "chosen_policy", "made_reports"]

DEFAULT_TIMEOUT = 1800.0

# What torch's scalers take besides.
_OF_TORCH = {"device", "process_group"}
_Arguments = ParamSpec("_Arguments")
_POLICY_MEMBERS = ("init_scale", "init", "update", "backoff", "clamp", "at_min_scale")


def checked_arguments(constructor: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    """Let a constructor refuse arguments that it does not take with an InvalidTypeError that names its options."""
    signature = inspect.signature(constructor)
    options = [name for name in signature.parameters if name != "self"]

    @functools.wraps(constructor)
    def construct(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            unknown = [name for name in kwargs if name not in options]
            is_ours = "device" not in options
            what = f"unexpected keyword arguments {unknown}" if unknown else f"{error}, got {shown(args[1:])}"
            if is_ours and len(args) > 1:
                what = f"a scaler of gradscale takes its options by name, got {shown(args[1:])}"
            msg = f"{what}; the options of a scaler are {options}"
            if is_ours and (len(args) > 1 or not _OF_TORCH.isdisjoint(unknown)):
                msg += (
                    "; torch's arguments are taken by gradscale_torch.GradScaler and gradscale_torch.ShardedGradScaler"
                )
            raise InvalidTypeError(msg) from None
        constructor(*args, **kwargs)

    return construct


def chosen_policy(policy: Policy | None, factors: Mapping[str, float | None]) -> Policy:
    """Return a policy, or a DynamicScale of the factors that are given.

    Raises
    ------
    InvalidValueError, InvalidTypeError
        For a policy together with a factor, what is no policy, or a factor that is out of range.
    """
    given = {name: value for name, value in factors.items() if value is not None}
    if policy is None:
        return DynamicScale(**given)  # type: ignore[arg-type]
    if given:
        either = f"policy= or {', '.join(f'{name}=' for name in given)}"
        msg = f"give {either}, not both, got {shown(policy)} and {shown(given)}"
        raise InvalidValueError(msg)
    found: Policy = validation.policy(policy, _POLICY_MEMBERS)
    return found


def made_reports(
    on_skip: OnSkip | None, on_update: OnUpdate | None, diagnose: Diagnose | None, history_size: int
) -> Reports[Pending]:
    """Return the reports that a scaler's options ask for.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        For what cannot be called, another ``diagnose`` or a size out of range.
    """
    if diagnose is not None:
        validation.choice("diagnose", diagnose, ("on_overflow",))
    return Reports(on_skip, on_update, diagnoses=diagnose is not None, history_size=history_size)
