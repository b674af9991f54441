"""State dicts: what a scaler saves, and the checks of what it loads; torch's five keys keep their names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gradscale.core import validation
from gradscale.core.protocols import Policy, ScaleState
from gradscale.errors import InvalidTypeError, InvalidValueError, StateDictError, key_names, reading, short_repr
from gradscale.policies.dynamic import DynamicScale, StaticScale
from gradscale.scaler.guard import SavedWindows, text_of_windows, windows_from
from gradscale.scaler.stall import SkipStreak, streaks_from, text_of

VERSION = 1
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (DynamicScale, StaticScale)}
# Our names of the trackers, by the keys they are saved under; torch knows only the first.
_TRACKERS = {f"_{name}": name for name in ScaleState._fields[1:]}
# What torch needs to keep a scale: it does not check that the growth factor is above 1.
_STATIC_FACTORS = {"growth_factor": 1.0, "backoff_factor": 1.0, "growth_interval": 1}


class Checkpoint(NamedTuple):
    """What a state dict holds."""

    policy: Policy
    numbers: Mapping[str, float]
    """The state, by the names of ScaleState's fields."""
    iteration: int = 1
    counts: Mapping[str, int] = {}
    """How many steps there were of each kind; empty in older states."""
    steps: int = 0
    """How many steps were over, which the ranks of a group compare."""
    windows: SavedWindows | None = None
    """Those of a scaler with ``skip=``."""
    streaks: Sequence[SkipStreak] | None = None
    """Those of a scaler with ``give_up_after=``."""


def build(checkpoint: Checkpoint) -> dict[str, object]:
    """Return a checkpoint as a state dict."""
    policy, numbers, iteration, counts, steps, windows, streaks = checkpoint
    saved: dict[str, object] = {"scale": numbers["scale"]}
    saved |= {name: getattr(policy, name, static) for name, static in _STATIC_FACTORS.items()}
    saved |= {key: numbers.get(name, 0) for key, name in _TRACKERS.items()}
    saved |= {"version": VERSION, "iteration": iteration}
    if type(policy) in _KINDS.values():
        saved["policy"] = {"kind": type(policy).__name__, **dataclasses.asdict(policy)}  # type: ignore[call-overload]
    if windows is not None:
        saved["spikes"] = text_of_windows(windows)
    if streaks is not None:
        saved["streaks"] = text_of(streaks)
    if counts:
        saved |= {"counts": counts, "steps": steps}
    return saved


def parse(saved: object, policy: Policy) -> Checkpoint:
    """Check a state dict of this library or of torch's scalers; ``policy`` is kept if it holds none.

    Unknown keys are ignored, as torch ignores ours. StateDictError names the key and the value.
    """
    try:
        with reading("a state dict"):
            return _parse(validation.mapping("a state dict", saved), policy)
    except (InvalidTypeError, InvalidValueError) as error:
        msg = f"the state dict cannot be loaded: {error}; nothing was changed"
        raise StateDictError(msg) from error


def _parse(saved: Mapping[str, object], policy: Policy) -> Checkpoint:
    if not saved:
        msg = "it is empty, as a disabled scaler saves it; construct this scaler with enabled=False, or load another"
        raise InvalidValueError(msg)
    version = validation.integer("version", saved.get("version", VERSION), 1, validation.LARGEST_INT32)
    if version > VERSION:
        msg = f"version {version} is newer than {VERSION}, the newest that this gradscale reads; upgrade it"
        raise InvalidValueError(msg)
    missing = [key for key in ("scale", *_STATIC_FACTORS, "_growth_tracker") if key not in saved]
    if missing:
        msg = (
            f"keys {missing} are missing, got {key_names(saved)} (gradscale.load_foreign_state translates the "
            f"states of other systems)"
        )
        raise InvalidValueError(msg)
    loaded_policy = _parse_policy(saved, policy)
    numbers: dict[str, float] = {"scale": loaded_policy.clamp(validation.scale("scale", saved["scale"]))}
    for key, name in _TRACKERS.items():
        numbers[name] = validation.integer(key, saved.get(key, 0), 0, validation.LARGEST_INT32)
    iteration = validation.count("iteration", saved.get("iteration", 1), 1)
    counts = {
        name: validation.count(f"counts[{short_repr(name)}]", count)
        for name, count in validation.mapping("counts", saved.get("counts", {})).items()
    }
    steps = validation.count("steps", saved.get("steps", 0))
    windows, streaks = windows_from(saved.get("spikes", "[]")), streaks_from(saved.get("streaks", "[]"))
    return Checkpoint(loaded_policy, numbers, iteration, counts, steps, windows, streaks)


def _parse_policy(saved: Mapping[str, Any], policy: Policy) -> Policy:
    """Return the saved policy, or the scaler's own if none is saved, with the factors of torch's format."""
    description = saved.get("policy")
    if description is not None:
        restored = _restore_policy(description)
        if type(policy) not in _KINDS.values():
            msg = (
                f"it holds a {type(restored).__name__}, and this scaler's policy is {short_repr(policy)}; leave out "
                f"the key 'policy' to keep this one"
            )
            raise InvalidValueError(msg)
        policy = restored
    factors = {name: saved[name] for name in _STATIC_FACTORS}
    if isinstance(policy, DynamicScale):
        return dataclasses.replace(policy, **factors)
    # A static scale, or a policy of the user's, has no such factors; they must be sane all the same.
    if any(validation.number(name, value) != _STATIC_FACTORS[name] for name, value in factors.items()):
        DynamicScale(**factors)
    return policy


def _restore_policy(description: object) -> Policy:
    kinds = tuple(sorted(_KINDS))
    settings = validation.mapping("policy", description, f"a mapping with a kind out of {list(kinds)}")
    kind = _KINDS[validation.choice("the kind of the policy", settings.pop("kind", None), kinds)]
    names = [field.name for field in dataclasses.fields(kind)]
    unknown = [name for name in settings if name not in names]
    if unknown:
        msg = (
            f"policy has settings that this gradscale does not know, got {key_names(unknown)}; a {kind.__name__} has "
            f"{names}"
        )
        raise InvalidValueError(msg)
    restored: Policy = kind(**settings)
    return restored
