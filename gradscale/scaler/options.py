"""The options of a scaler, their defaults, and the error for any others."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from gradscale.core import validation
from gradscale.core.arithmetic import NormOver, checked_norm
from gradscale.core.backend import Backend
from gradscale.core.protocols import Group, Policy
from gradscale.core.registry import A_GROUP
from gradscale.errors import InvalidTypeError, InvalidValueError, nearest, short_repr
from gradscale.policies.dynamic import DynamicScale
from gradscale.policies.spikes import SkipSpikes
from gradscale.scaler.reports import Diagnose, OnSkip, OnUpdate

_Arguments = ParamSpec("_Arguments")
_Options = ParamSpec("_Options")
_Owner = TypeVar("_Owner")
_Returned = TypeVar("_Returned")


# Editors show the names, types and defaults of a dataclass for the constructors that take its fields. The fields of the
# last base come first.


@dataclasses.dataclass(kw_only=True)
class Factors:
    """The settings of a :class:`DynamicScale` that a scaler takes in place of a policy."""

    init_scale: float | None = 2.0**16
    growth_factor: float | None = 2.0
    backoff_factor: float | None = 0.5
    growth_interval: int | None = 2000


@dataclasses.dataclass(kw_only=True)
class GroupOptions:
    """The ranks that agree, and the seconds to wait for them."""

    group: Group | None = None
    timeout: float = 1800.0


@dataclasses.dataclass(kw_only=True)
class CommonOptions:
    """The options of every scaler and guard."""

    on_skip: OnSkip | None = None
    on_update: OnUpdate | None = None
    diagnose: Diagnose | None = None
    history_size: int = 1024
    max_norm: float | None = None
    norm_over: NormOver | None = None
    skip: SkipSpikes | None = None
    warn_after: int | None = 50
    give_up_after: int | None = None
    hold: object = None


@dataclasses.dataclass(kw_only=True)
class ScalerOptions(CommonOptions, Factors):
    """The options of a GradScaler."""

    policy: Policy | None = None
    enabled: bool = True
    backend: str | Backend | None = None


@dataclasses.dataclass(kw_only=True)
class ShardedOptions(ScalerOptions, GroupOptions):
    """The options of a ShardedGradScaler."""

    group: Group = dataclasses.field()


@dataclasses.dataclass(kw_only=True)
class GuardOptions(CommonOptions, GroupOptions):
    """The options of a guard on torch."""

    enabled: bool = True


@dataclasses.dataclass(kw_only=True)
class StepGuardOptions(GuardOptions):
    """The options of a StepGuard."""

    backend: str | Backend | None = None


FACTORS = tuple(field.name for field in dataclasses.fields(Factors))
_SETTINGS = {field.name for field in dataclasses.fields(DynamicScale)}
_POLICY_MEMBERS = ("init_scale", "init", "update", "backoff", "clamp", "at_min_scale")
_OF_TORCH = "; torch's arguments are taken by gradscale_torch.GradScaler and gradscale_torch.ShardedGradScaler"


def with_options(
    kind: Callable[_Options, object],
) -> Callable[[Callable[Concatenate[_Owner, ...], None]], Callable[Concatenate[_Owner, _Options], None]]:
    """Give a constructor, by their names, the fields of a dataclass, and show these; others: InvalidTypeError."""

    def decorate(function: Callable[Concatenate[_Owner, ...], None]) -> Callable[Concatenate[_Owner, _Options], None]:
        own, options = inspect.signature(function).parameters["self"], inspect.signature(kind)

        @functools.wraps(function)
        def construct(self: _Owner, /, *args: _Options.args, **kwargs: _Options.kwargs) -> None:
            function(self, **_arguments("__init__", options, args, kwargs))

        vars(construct)["__signature__"] = inspect.Signature([own, *options.parameters.values()])
        return construct

    return decorate


def check_arguments(function: Callable[_Arguments, _Returned]) -> Callable[_Arguments, _Returned]:
    """Raise InvalidTypeError for arguments that a function does not take."""
    signature = inspect.signature(function)
    by_position = sum(one.kind is not one.KEYWORD_ONLY for one in signature.parameters.values())

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Returned:
        # To bind arguments takes longer than Python's own call.
        if kwargs or len(args) != by_position:
            _arguments(function.__name__, signature, args, kwargs)
        return function(*args, **kwargs)

    return call


def _arguments(
    name: str, signature: inspect.Signature, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> dict[str, Any]:
    """Return the arguments of a call by their names; InvalidTypeError for others than a signature has."""
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise _mistake(name, signature, args, kwargs, str(error)) from None


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


class Clipping(NamedTuple):
    """To what norm gradients are clipped, and over which ranks the norm is."""

    max_norm: float | None = None
    """None if nothing is clipped."""
    norm_over: NormOver | None = None
    """None for what the optimizer's gradients say: "group" for DTensors, else "rank"."""


def checked_clipping(max_norm: object, norm_over: object) -> Clipping:
    """Return the two arguments of a scaler or of ``unscale_``, checked."""
    if norm_over not in (None, "rank", "group"):
        msg = f'norm_over must be "rank" or "group", got {short_repr(norm_over)}'
        raise InvalidValueError(msg)
    if max_norm is None and norm_over is not None:
        msg = f"norm_over={norm_over!r} says over what the norm is taken for max_norm=, got no max_norm"
        raise InvalidValueError(msg)
    return Clipping(None if max_norm is None else checked_norm(max_norm), norm_over)


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
