"""The options of a scaler, their defaults, and the error for any others."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypedDict, TypeVar

from gradscale.core import validation
from gradscale.core.arithmetic import NormOver
from gradscale.core.backend import Backend
from gradscale.core.protocols import Policy
from gradscale.core.registry import A_GROUP
from gradscale.errors import InvalidTypeError, InvalidValueError, nearest, short_repr
from gradscale.policies.dynamic import DynamicScale
from gradscale.policies.spikes import SkipSpikes
from gradscale.scaler.reports import HISTORY_SIZE, Diagnose, OnSkip, OnUpdate
from gradscale.scaler.stall import WARN_AFTER

_Arguments = ParamSpec("_Arguments")
_Returned = TypeVar("_Returned")

DEFAULT_TIMEOUT = 1800.0
"""Seconds to wait for the other ranks."""


class CommonOptions(TypedDict, total=False):
    """The options of every scaler and guard."""

    on_skip: OnSkip | None
    on_update: OnUpdate | None
    diagnose: Diagnose | None
    history_size: int
    max_norm: float | None
    norm_over: NormOver | None
    skip: SkipSpikes | None
    warn_after: int | None
    give_up_after: int | None
    hold: object


class ReplacementOptions(CommonOptions, total=False):
    """The options of every scaler, torch's replacements among them."""

    policy: Policy | None


class GuardOptions(CommonOptions, total=False):
    """The options of a guard."""

    enabled: bool


class Options(GuardOptions, ReplacementOptions, total=False):
    """The options of gradscale's own scalers."""

    init_scale: float | None
    growth_factor: float | None
    backoff_factor: float | None
    growth_interval: int | None
    backend: str | Backend | None


FACTORS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
DEFAULTS: dict[str, Any] = {
    **{name: getattr(DynamicScale, name) for name in FACTORS},
    "enabled": True,
    "history_size": HISTORY_SIZE,
    "warn_after": WARN_AFTER,
}
"""The options whose default is not None."""

_SETTINGS = {field.name for field in dataclasses.fields(DynamicScale)}
_POLICY_MEMBERS = ("init_scale", "init", "update", "backoff", "clamp", "at_min_scale")
_OF_TORCH = "; torch's arguments are taken by gradscale_torch.GradScaler and gradscale_torch.ShardedGradScaler"


def with_options(
    kind: type | None = None,
) -> Callable[[Callable[_Arguments, _Returned]], Callable[_Arguments, _Returned]]:
    """Add a TypedDict's options to those of a constructor or method, and to its signature; others: InvalidTypeError."""

    def decorate(function: Callable[_Arguments, _Returned]) -> Callable[_Arguments, _Returned]:
        own = [one for one in inspect.signature(function).parameters.values() if one.kind is not one.VAR_KEYWORD]
        make = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
        annotations = {} if kind is None else kind.__annotations__
        # The factors come first, as torch has them.
        names = sorted(annotations, key=lambda name: name not in FACTORS)
        fields = [make(x, default=DEFAULTS.get(x), annotation=annotations[x].__forward_arg__) for x in names]
        signature = inspect.Signature([*own, *fields])
        by_position = sum(one.kind is not one.KEYWORD_ONLY for one in own)

        @functools.wraps(function)
        def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Returned:
            # It takes longer than Python's own call.
            if annotations or kwargs or len(args) != by_position:
                try:
                    signature.bind(*args, **kwargs)
                except TypeError as error:
                    raise _mistake(function.__name__, signature, args, kwargs, str(error)) from None
            return function(*args, **kwargs)

        vars(call)["__signature__"] = signature
        return call

    return decorate


def _mistake(
    name: str, signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object], what: str
) -> InvalidTypeError:
    """Return the error for arguments that a function does not take; ``what`` is Python's own text."""
    parameters = [one for one in signature.parameters.values() if one.name not in ("self", "optimizer")]
    named = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    unknown = [name for name in kwargs if name not in signature.parameters]
    unnamed = args[len(signature.parameters) - len(named) :]
    owner, options = "a scaler" if name == "__init__" else f"{name}()", [one.name for one in parameters]
    if unknown:
        what = f"unexpected keyword arguments {unknown}"
    elif unnamed:
        what = f"{owner} takes its options by name, such as {named[0]}=, got {short_repr(unnamed)}"
    elif what.endswith(": 'group'"):
        return InvalidTypeError(f"{what}, which must be {A_GROUP}")
    hint = _OF_TORCH if unnamed and "policy" in options else _hint(options, kwargs, unknown)
    return InvalidTypeError(f"{what}; the options of {owner} are {options}{hint}")


def _hint(options: Sequence[str], kwargs: Mapping[str, object], unknown: Sequence[str]) -> str:
    """Return where options belong that are not among those of a function."""
    if "policy" in options and not _SETTINGS.isdisjoint(unknown):
        arguments = ", ".join(f"{name}={short_repr(value)}" for name, value in kwargs.items() if name in _SETTINGS)
        return f"; for settings of the policy write policy=gradscale.DynamicScale({arguments})"
    if "policy" not in options and "skip" in options and not {"policy", "device", *_SETTINGS}.isdisjoint(unknown):
        return "; a StepGuard multiplies nothing: settings of a scale are taken by GradScaler"
    if "policy" in options and not {"device", "process_group", "allow_fp16_grads"}.isdisjoint(unknown):
        return _OF_TORCH
    if "group" in unknown:
        return "; group= is taken by gradscale.ShardedGradScaler"
    return nearest(unknown[0], options) if unknown else ""


def policy_of(options: Mapping[str, Any]) -> Policy:
    """Return the policy among some options, or a DynamicScale of the factors."""
    policy = options.get("policy")
    factors = {name: options[name] for name in FACTORS if options.get(name) is not None}
    if policy is None:
        return DynamicScale(**factors)
    if factors:
        either = f"policy= or {', '.join(f'{name}=' for name in factors)}"
        msg = f"give {either}, not both, got {short_repr(policy)} and {short_repr(factors)}"
        raise InvalidValueError(msg)
    return validation.policy(policy, _POLICY_MEMBERS)
