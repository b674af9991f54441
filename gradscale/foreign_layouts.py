"""The layouts in which other systems save a scaler's state, and how one is recognised by its keys."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gradscale import validation
from gradscale.errors import StateDictError

__all__ = [
    "KERAS_POSITIONS",
    "LAYOUTS",
    "OF_SEVERAL",
    "SYMMETRIC",
    "SYSTEMS",
    "Layout",
    "is_numbered",
    "layout_of",
    "listed",
    "nearest",
    "recognise",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The keys under which a system saves what; without a preset it is a static scale."""

    system: str
    preset: str = ""
    scale: str
    required: tuple[str, ...]
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)  # the keys, by the preset's names
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    growth: str | None = None  # clean steps, or last_overflow_iter, from which they are counted
    remaining: str | None = None  # overflows that are still tolerated
    least_remaining: int = 1
    lost: tuple[str, ...] = ()  # trackers that the system has and does not save
    also: tuple[str, ...] = ()
    note: str = ""
    is_distinct: bool = True  # recognised by its keys

    @property
    def vocabulary(self) -> frozenset[str]:
        """Every key that it may have."""
        return frozenset((*self.required, *self.settings.values(), *self.also))


_FACTORS = {"growth_factor": "growth_factor", "backoff_factor": "backoff_factor", "growth_interval": "growth_interval"}
_TORCH = ("scale", *_FACTORS, "_growth_tracker")
# One factor that the scale is multiplied by and divided by.
SYMMETRIC = ("scale_factor", "factor")
_WINDOW = {"growth_factor": "scale_factor", "backoff_factor": "scale_factor", "growth_interval": "scale_window"}
_WINDOWED = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
LAYOUTS = (
    Layout(system="torch", preset="torch", scale="scale", required=_TORCH, settings=_FACTORS, growth="_growth_tracker"),
    Layout(
        system="nemo",
        preset="apex_hysteresis",
        scale="scale",
        required=(*_TORCH, "_hysteresis_tracker"),
        settings=_FACTORS,
        growth="_growth_tracker",
        remaining="_hysteresis_tracker",
        least_remaining=-validation.LARGEST_INT32,
    ),
    Layout(
        system="megatron",
        preset="megatron",
        scale="scale",
        required=("scale", "growth_tracker", "hysteresis_tracker"),
        growth="growth_tracker",
        remaining="hysteresis_tracker",
        # It goes on counting down where every overflow backs off.
        least_remaining=-validation.LARGEST_INT32,
    ),
    Layout(
        system="deepspeed",
        preset="deepspeed",
        scale="cur_scale",
        required=("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"),
        settings=_WINDOW
        | {"hysteresis": "delayed_shift", "min_scale": "min_scale"}
        | {"consecutive_hysteresis": "consecutive_hysteresis", "raise_at_min": "raise_error_at_min_scale"},
        growth="last_overflow_iter",
        remaining="cur_hysteresis",
        also=("dynamic",),
    ),
    Layout(
        system="deepspeed",
        preset="deepspeed_stage0",
        scale="cur_scale",
        required=("dynamic_loss_scale", *_WINDOWED),
        settings=_WINDOW,
        growth="last_overflow_iter",
        note="DeepSpeed's without ZeRO; apex's FP16_Optimizer saves the same keys: format='apex'",
    ),
    Layout(system="deepspeed", scale="cur_scale", required=("dynamic_loss_scale", "cur_scale", "cur_iter")),
    Layout(system="deepspeed", scale="cur_scale", required=("dynamic", "cur_scale")),
    Layout(
        system="apex",
        preset="apex",
        scale="loss_scale",
        required=("loss_scale", "unskipped"),
        growth="unskipped",
        note="amp's dynamic scaler; a static one saves the same keys: gradscale.StaticScale",
    ),
    Layout(
        system="apex",
        preset="apex",
        scale="cur_scale",
        required=_WINDOWED,
        settings=_WINDOW,
        fixed={"min_scale": 1.0, "max_scale": None},
        growth="last_overflow_iter",
    ),
    Layout(
        system="fairseq",
        preset="fairseq",
        scale="loss_scale",
        required=("loss_scale",),
        lost=("growth_tracker", "overflow_tracker", "rescale_tracker"),
    ),
    Layout(
        system="keras",
        preset="keras",
        scale="dynamic_scale",
        required=("dynamic_scale", "step_counter"),
        settings={"growth_interval": "dynamic_growth_steps"},
        growth="step_counter",
    ),
    Layout(
        system="flax",
        preset="flax",
        scale="scale",
        required=("scale", "fin_steps"),
        settings=_FACTORS | {"min_scale": "minimum_scale"},
        growth="fin_steps",
    ),
    Layout(
        system="jmp",
        preset="jmp",
        scale="loss_scale",
        required=("loss_scale", "counter"),
        settings={"growth_factor": "factor", "backoff_factor": "factor", "growth_interval": "period"}
        | {"min_scale": "min_loss_scale"},
        growth="counter",
    ),
    # Told by the class of its object: as a mapping it could be fairseq's.
    Layout(system="jmp", scale="loss_scale", required=("loss_scale",), is_distinct=False),
)
SYSTEMS = tuple(dict.fromkeys(layout.system for layout in LAYOUTS))
# apex's amp numbers the scalers of its losses.
OF_SEVERAL = re.compile(r"loss_scaler(\d+)")
# Behind the iteration and the learning rate that every optimizer of Keras has.
KERAS_POSITIONS = {"step_counter": "2", "dynamic_scale": "3"}
_KNOWN_KEYS = frozenset(key for layout in LAYOUTS for key in layout.vocabulary)
_DEEPEST = 5
_SHOWN = 12


def layout_of(system: str, *, is_static: bool = False) -> Layout:
    """Return the layout of a system's object, of whichever class."""
    return next(x for x in reversed(LAYOUTS) if x.system == system and (not x.preset) == is_static)


def nearest(name: Any, names: Iterable[str]) -> str:
    """Return a question for the nearest of some names, or an empty string."""
    close = difflib.get_close_matches(f"{name}".lower(), sorted(names), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def listed(fields: Mapping[Any, Any]) -> str:
    """Return the keys of a mapping as text, the first of many."""
    names = sorted(map(str, fields))
    return f"the keys {names[:_SHOWN]}{' ...' if len(names) > _SHOWN else ''}"


def is_numbered(fields: Mapping[Any, Any]) -> bool:
    """Tell whether these are the variables that Keras' LossScaleOptimizer saves under numbers."""
    names = list(fields)
    is_counted = len(names) > 0 and all(isinstance(name, str) and name.isdecimal() for name in names)
    return is_counted and all(getattr(fields.get(at), "shape", None) == () for at in KERAS_POSITIONS.values())


def recognise(fields: Mapping[Any, Any], system: str | None) -> Layout:
    """Return the layout that a mapping is of, or raise saying what it looks like."""
    if not fields:
        msg = (
            "the state is empty, as a disabled scaler of torch and Megatron's constant one save it, and says no scale; "
            "construct GradScaler(enabled=False), or GradScaler(policy=StaticScale(...)) with Megatron's --loss-scale"
        )
        raise StateDictError(msg)
    if {"version", "_overflow_tracker"} <= fields.keys():
        msg = f"the state is gradscale's own, got {listed(fields)}; pass it to GradScaler.load_state_dict"
        raise StateDictError(msg)
    found = _matches(fields, system)
    if len(found) == 1:
        return found[0]
    nested = sorted(_nested(fields, system, "state", 1), key=lambda found: -found[0])
    if nested:
        paths = [path for likeness, path in nested if likeness == nested[0][0]]
        msg = f"the state holds a scaler's state inside, got {listed(fields)}; pass {' or '.join(paths[:_SHOWN])}"
        raise StateDictError(msg)
    near = max(_candidates(system), key=lambda layout: _likeness(layout, fields))
    missing = [key for key in near.required if key not in fields]
    # One shared key, such as scale, tells nothing.
    if missing and (system or _likeness(near, fields)[0] > 1):
        close = "".join(nearest(key, missing) for key in fields.keys() - _KNOWN_KEYS)
        msg = f"the {near.system} state is cut short: keys {missing} are missing, got {listed(fields)}{close}"
        raise StateDictError(msg)
    formats = "; ".join(f"{layout.system}: {', '.join(layout.required)}" for layout in _candidates(system))
    close = next(filter(None, (nearest(key, _KNOWN_KEYS) for key in fields.keys() - _KNOWN_KEYS)), "")
    several = "several formats" if found else "no known format"
    msg = (
        f"the state is of {several}, got {listed(fields)}{close}; the formats have these keys, and one can be named "
        f"with format=: {formats}"
    )
    raise StateDictError(msg)


def _candidates(system: str | None) -> list[Layout]:
    return [layout for layout in LAYOUTS if layout.is_distinct and system in (None, layout.system)]


def _matches(fields: Mapping[Any, Any], system: str | None) -> list[Layout]:
    """Return the layouts whose keys are all there; where the format is not named, with no key of another."""
    keys = fields.keys()
    whole = [layout for layout in _candidates(system) if keys >= set(layout.required)]
    if system is None:
        return [layout for layout in whole if keys & _KNOWN_KEYS <= layout.vocabulary]
    return sorted(whole, key=lambda layout: len(layout.required))[-1:]


def _likeness(layout: Layout, fields: Mapping[Any, Any]) -> tuple[int, int, int]:
    required = len(fields.keys() & set(layout.required))
    return len(fields.keys() & layout.vocabulary), required, required - len(layout.required)


def _nested(holder: Any, system: str | None, where: str, depth: int) -> Iterator[tuple[int, str]]:
    """Yield how much what lies deeper looks like a scaler's state, and the expression for it."""
    for key, value in holder.items() if isinstance(holder, Mapping) else enumerate(holder):
        inside = f"{where}[{key!r}]"
        found = _matches(value, system) if isinstance(value, Mapping) else []
        if len(found) == 1:
            yield len(found[0].required), inside
        elif isinstance(value, Mapping) and _is_apart(value):
            yield len(KERAS_POSITIONS), inside
        elif isinstance(value, (Mapping, list, tuple)):
            if depth < _DEEPEST:
                yield from _nested(value, system, inside, depth + 1)
        elif hasattr(value, "cur_scale"):
            yield 1, f"vars({inside})"


def _is_apart(fields: Mapping[Any, Any]) -> bool:
    """Tell whether these are keys that are looked up before all others."""
    return is_numbered(fields) or any(OF_SEVERAL.fullmatch(f"{name}") for name in fields)
