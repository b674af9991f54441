"""Saved scaler states of other systems, translated: load_foreign_state."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from gradscale.core import validation
from gradscale.core.messages import key_names, reading, shown
from gradscale.core.protocols import Policy
from gradscale.errors import InvalidTypeError, InvalidValueError, StateDictError
from gradscale.policies import presets
from gradscale.policies.dynamic import StaticScale
from gradscale.scaler import checkpoint

__all__ = ["ForeignState", "load_foreign_state"]


# What the keys mean, whichever system has them.
_SCALE = ("scale", "cur_scale", "loss_scale", "dynamic_scale")
_CLEAN_STEPS = ("_growth_tracker", "growth_tracker", "unskipped", "step_counter", "fin_steps", "counter")
_OVERFLOWS_LEFT = ("_hysteresis_tracker", "hysteresis_tracker", "cur_hysteresis")
_SETTINGS = {
    "growth_factor": ("growth_factor", "scale_factor", "factor"),
    "backoff_factor": ("backoff_factor", "scale_factor", "factor"),
    "growth_interval": ("growth_interval", "scale_window", "period", "dynamic_growth_steps"),
    "hysteresis": ("delayed_shift",),
    "min_scale": ("min_scale", "minimum_scale", "min_loss_scale"),
    "consecutive_hysteresis": ("consecutive_hysteresis",),
    "raise_at_min": ("raise_error_at_min_scale",),
}


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The keys under which a system saves its state."""

    system: str
    preset: str  # "" for a static scale
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # settings that the system does not have
    assumed: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what it does not save, beside settings

    @property
    def vocabulary(self) -> set[str]:
        """Every key that it may have."""
        return {*self.required, *self.optional}

    def key(self, names: tuple[str, ...]) -> str:
        """Return the one of some keys that it has, or an empty string."""
        return next((name for name in names if name in self.vocabulary), "")


_FACTORS = ("growth_factor", "backoff_factor", "growth_interval")
_TORCH = ("scale", *_FACTORS, "_growth_tracker")
_ITERATIONS = ("cur_scale", "cur_iter", "last_overflow_iter")
_WINDOW = ("scale_factor", "scale_window")
_ZERO = (*_WINDOW, "min_scale", "delayed_shift", "consecutive_hysteresis", "raise_error_at_min_scale", "dynamic")
_STAGE0_NOTE = "DeepSpeed's without ZeRO; apex's FP16_Optimizer saves the same keys: format='apex'"
_AMP_NOTE = "amp's dynamic scaler; a static one saves the same keys: gradscale.StaticScale"
_LOST = dict.fromkeys(("growth_tracker", "overflow_tracker", "rescale_tracker"), 0)
_FLAX = _Layout("flax", "flax", ("scale", "fin_steps"), (*_FACTORS, "minimum_scale"))
_JMP = _Layout("jmp", "jmp", ("loss_scale", "counter"), ("factor", "period", "min_loss_scale"))
_LAYOUTS = (
    _Layout("torch", "torch", _TORCH),
    _Layout("nemo", "apex_hysteresis", (*_TORCH, "_hysteresis_tracker")),
    _Layout("megatron", "megatron", ("scale", "growth_tracker", "hysteresis_tracker")),
    _Layout("deepspeed", "deepspeed", (*_ITERATIONS, "cur_hysteresis"), _ZERO),
    _Layout(
        "deepspeed",
        "deepspeed_stage0",
        ("dynamic_loss_scale", *_ITERATIONS, *_WINDOW),
        assumed={"system": _STAGE0_NOTE},
    ),
    _Layout("deepspeed", "", ("dynamic_loss_scale", "cur_scale", "cur_iter")),
    _Layout("deepspeed", "", ("dynamic", "cur_scale")),
    _Layout("apex", "apex", ("loss_scale", "unskipped"), assumed={"system": _AMP_NOTE}),
    _Layout("apex", "apex", (*_ITERATIONS, *_WINDOW), fixed={"min_scale": 1.0, "max_scale": None}),
    _Layout("fairseq", "fairseq", ("loss_scale",), assumed=_LOST),
    _Layout("keras", "keras", ("dynamic_scale", "step_counter"), ("dynamic_growth_steps",)),
    _FLAX,
    _JMP,
)
# Told by its class alone: as a mapping it could be fairseq's.
_JMP_STATIC = _Layout("jmp", "", ("loss_scale",))
_OBJECTS = {
    ("flax", "DynamicScale"): _FLAX,
    ("jmp", "DynamicLossScale"): _JMP,
    ("jmp", "StaticLossScale"): _JMP_STATIC,
    ("jmp", "NoOpLossScale"): _JMP_STATIC,
}
_SYSTEMS = tuple(dict.fromkeys(layout.system for layout in _LAYOUTS))
_KNOWN_KEYS = frozenset(key for layout in _LAYOUTS for key in layout.vocabulary)
# apex's amp numbers the scalers of its losses.
_OF_SEVERAL = re.compile(r"loss_scaler(\d+)")
# Behind the iteration and the learning rate that every optimizer of Keras has.
_KERAS_POSITIONS = {"step_counter": "2", "dynamic_scale": "3"}
_LARGEST_COUNT = 2**63 - 1
_DEEPEST = 5
_SHOWN = 12


def _nearest(name: Any, names: Iterable[str]) -> str:
    """Return a question for the nearest of some names, or an empty string."""
    close = difflib.get_close_matches(name.lower(), sorted(names), 1) if isinstance(name, str) else []
    return f"; did you mean {close[0]!r}?" if close else ""


def _listed(fields: Mapping[Any, Any]) -> str:
    """Return the keys of a mapping as text, the first of many."""
    return f"the keys {key_names(fields)}"


def _is_numbered(fields: Mapping[Any, Any]) -> bool:
    """Tell whether these are the variables that Keras' LossScaleOptimizer saves under numbers."""
    is_counted = all(isinstance(name, str) and name.isdecimal() for name in fields)
    return is_counted and all(getattr(fields.get(at), "shape", None) == () for at in _KERAS_POSITIONS.values())


def _recognise(fields: Mapping[Any, Any], system: str | None) -> _Layout:
    """Return the layout that a mapping is of, or raise saying what it looks like."""
    if not fields:
        msg = (
            "the state is empty, as a disabled scaler of torch and Megatron's constant one save it, and says no scale; "
            "construct GradScaler(enabled=False), or GradScaler(policy=StaticScale(...)) with Megatron's --loss-scale"
        )
        raise StateDictError(msg)
    if {"version", "_overflow_tracker"} <= fields.keys():
        msg = f"the state is gradscale's own, got {_listed(fields)}; pass it to GradScaler.load_state_dict"
        raise StateDictError(msg)
    found = _matches(fields, system)
    if len(found) == 1:
        return found[0]
    nested = sorted(_nested(fields, system, "state", 1), key=lambda found: -found[0])
    if nested:
        paths = [path for likeness, path in nested if likeness == nested[0][0]]
        msg = f"the state holds a scaler's state inside, got {_listed(fields)}; pass {' or '.join(paths[:_SHOWN])}"
        raise StateDictError(msg)
    near = max(_candidates(system), key=lambda layout: _likeness(layout, fields))
    # One shared key, such as scale, tells nothing.
    if not fields.keys() >= set(near.required) and (system or _likeness(near, fields)[0] > 1):
        raise _cut_short(near, fields)
    formats = "; ".join(f"{layout.system}: {', '.join(layout.required)}" for layout in _candidates(system))
    close = next(filter(None, (_nearest(key, _KNOWN_KEYS) for key in fields.keys() - _KNOWN_KEYS)), "")
    several = "several formats" if found else "no known format"
    msg = (
        f"the state is of {several}, got {_listed(fields)}{close}; the formats have these keys, and one can be named "
        f"with format=: {formats}"
    )
    raise StateDictError(msg)


def _cut_short(layout: _Layout, fields: Mapping[Any, Any]) -> StateDictError:
    missing = [key for key in layout.required if key not in fields]
    close = "".join(_nearest(key, missing) for key in fields.keys() - _KNOWN_KEYS)
    msg = f"the {layout.system} state is cut short: keys {missing} are missing, got {_listed(fields)}{close}"
    return StateDictError(msg)


def _candidates(system: str | None) -> list[_Layout]:
    return [layout for layout in _LAYOUTS if system in (None, layout.system)]


def _matches(fields: Mapping[Any, Any], system: str | None) -> list[_Layout]:
    """Return the layouts whose keys are all there; where the format is not named, with no key of another."""
    keys = fields.keys()
    whole = [layout for layout in _candidates(system) if keys >= set(layout.required)]
    if system is None:
        return [layout for layout in whole if keys & _KNOWN_KEYS <= layout.vocabulary]
    return sorted(whole, key=lambda layout: len(layout.required))[-1:]


def _likeness(layout: _Layout, fields: Mapping[Any, Any]) -> tuple[int, int, int]:
    required = len(fields.keys() & set(layout.required))
    return len(fields.keys() & layout.vocabulary), required, required - len(layout.required)


def _nested(holder: Any, system: str | None, where: str, depth: int) -> Iterator[tuple[int, str]]:
    """Yield how much what lies deeper looks like a scaler's state, and the expression for it."""
    for key, value in holder.items() if isinstance(holder, Mapping) else enumerate(holder):
        inside = f"{where}[{shown(key)}]"
        found = _matches(value, system) if isinstance(value, Mapping) else []
        if len(found) == 1:
            yield len(found[0].required), inside
        elif isinstance(value, Mapping) and (_is_numbered(value) or _several(value)):
            yield len(_KERAS_POSITIONS), inside
        elif isinstance(value, (Mapping, list, tuple)):
            if depth < _DEEPEST:
                yield from _nested(value, system, inside, depth + 1)
        elif hasattr(value, "cur_scale"):
            yield 1, f"vars({inside})"


@dataclasses.dataclass(frozen=True)
class ForeignState:
    """What a saved state of another system says, in gradscale's terms; ``print`` it to see what was assumed.

    Attributes
    ----------
    format : str
        The system that it is of.
    policy : Policy
        That system's rule, its ``init_scale`` being the saved scale; a StaticScale for a scale that never changes.
    state_dict : dict
        For ``GradScaler.load_state_dict``; holds the policy, too.
    missing : tuple of str
        The settings and trackers that the saved state does not say.
    assumed : mapping of str to object
        The value taken for each of these that the caller did not give.

    Examples
    --------
    >>> import gradscale
    >>> foreign = gradscale.load_foreign_state({"loss_scale": 1024.0, "unskipped": 5}, growth_interval=1000)
    >>> (foreign.format, foreign.missing)
    ('apex', ('growth_interval', 'min_scale', 'max_scale', 'system'))
    >>> foreign.assumed["max_scale"]
    16777216.0
    """

    format: str
    policy: Policy
    state_dict: dict[str, Any]
    missing: tuple[str, ...]
    assumed: Mapping[str, Any]

    def __str__(self) -> str:
        trackers = ", ".join(f"{key[1:]} {self.state_dict[key]}" for key in self.state_dict if key.endswith("_tracker"))
        lines = [f"{self.format} state: scale {self.state_dict['scale']!r}, {trackers}", f"policy: {self.policy}"]
        if self.assumed:
            lines.append("not in the saved state, and assumed:")
            lines += [f"    {name} = {value}" for name, value in self.assumed.items()]
        given = [name for name in self.missing if name not in self.assumed]
        if given:
            lines.append(f"not in the saved state, and given by the caller: {', '.join(given)}")
        if not self.missing:
            lines.append("the saved state says everything; nothing was assumed")
        return "\n".join(lines)


def load_foreign_state(
    state: Any,
    format: str | None = None,  # noqa: A002
    *,
    loss_id: int | None = None,
    **settings: Any,
) -> ForeignState:
    """Translate the saved scaler state of another system, so that the run goes on with the scales it would have had.

    Nothing is unpickled, and no class is imported: ``state`` is what the system's own loader gave. Continued with
    ``scaler.load_state_dict(load_foreign_state(state).state_dict)`` the scale is the original's after every step, as
    long as the factors are powers of two (some originals hold others in float64). Where an interval was made shorter
    than the run of clean steps, torch grows only after the next overflow, and gradscale on the next clean step.

    Parameters
    ----------
    state : mapping, or a flax DynamicScale, or a jmp LossScale
        Of torch (``state_dict()``; NeMo's, too), Megatron (``state_dict()``), DeepSpeed (the optimizer's without ZeRO,
        or ``vars()`` of its loss scaler), apex (``amp.state_dict()``, FP16_Optimizer's, or ``vars()`` of its loss
        scaler), fairseq (the optimizer's), Keras (LossScaleOptimizer's variables by name, or by number as saved), flax
        (``to_state_dict``), or jmp (``vars()``). Values are Python numbers or arrays of one element, which are read
        from their device. Not modified.
    format : str, optional
        ``"torch"``, ``"nemo"``, ``"megatron"``, ``"deepspeed"``, ``"apex"``, ``"fairseq"``, ``"keras"``, ``"flax"`` or
        ``"jmp"``. Default: recognised by the keys.
    loss_id : int, optional
        Which of apex's loss scalers; needed when there are several: one gradscale scaler goes on for each.
    **settings
        Settings that the state does not say, by the names of the system's function in ``gradscale.presets``, such as
        ``growth_interval=500``. Default: that function's.

    Raises
    ------
    StateDictError
        For a state that is empty, cut short, corrupted, nested in something else, or of no known format.
    InvalidValueError
        For an unknown format or setting, with the nearest, and for a setting that the state does say.
    InvalidTypeError
        For a path, bytes or another object, with how to load it.

    Examples
    --------
    >>> import gradscale
    >>> saved = {"scale": 4096.0, "growth_tracker": 17, "hysteresis_tracker": 1}  # Megatron's
    >>> foreign = gradscale.load_foreign_state(saved)
    >>> scaler = gradscale.GradScaler(policy=foreign.policy)
    >>> scaler.load_state_dict(foreign.state_dict)
    >>> (foreign.format, scaler.get_scale())
    ('megatron', 4096.0)
    """
    if format is not None and not (isinstance(format, str) and format in _SYSTEMS):
        msg = f"format must be one of {', '.join(map(repr, _SYSTEMS))}, got {shown(format)}{_nearest(format, _SYSTEMS)}"
        raise InvalidValueError(msg)
    with reading("the state"):
        return _loaded(state, format, loss_id, settings)


def _loaded(state: Any, system: str | None, loss_id: int | None, settings: dict[str, Any]) -> ForeignState:
    """Return what ``load_foreign_state`` does for a known system or None."""
    fields, layout = _fields(state)
    if layout is None:
        # One of several is apex's, however little is left of it.
        system = system or ("apex" if _several(fields) else None)
        fields = _chosen(fields, loss_id)
        layout = _recognise(fields, system)
    elif system not in (None, layout.system):
        msg = f"the state is {layout.system}'s, got format={system!r}; leave it out"
        raise InvalidValueError(msg)
    return _translate(fields, layout, settings)


def _fields(state: Any) -> tuple[Mapping[Any, Any], _Layout | None]:
    """Return the state as a mapping, and its layout where an object's class tells it."""
    if isinstance(state, Mapping):
        return validation.mapping("state", state), None
    kind = type(state)
    layout = _OBJECTS.get((kind.__module__.partition(".")[0], kind.__name__))
    if layout is not None:
        return {key: getattr(state, key, None) for key in layout.vocabulary}, layout
    if isinstance(state, (str, bytes, bytearray, memoryview, os.PathLike)) or hasattr(state, "read"):
        msg = (
            f"state must be what was loaded from a file, got {shown(state)}; load it without running what it may hold: "
            f"torch.load(path, weights_only=True), flax.serialization.msgpack_restore(data), "
            f"numpy.load(path, allow_pickle=False), or h5py.File(path), and pass the part that is the scaler's"
        )
    else:
        msg = (
            f"state must be a mapping, or a DynamicScale of flax or a loss scale of jmp, got {shown(state)} of type "
            f"{kind.__name__}; pass its state_dict(), or vars() of it"
        )
    raise InvalidTypeError(msg)


def _chosen(fields: Mapping[Any, Any], loss_id: int | None) -> Mapping[Any, Any]:
    """Return one of apex's loss scalers where there are some, and Keras' numbered variables by their names."""
    scalers = _several(fields)
    if scalers:
        choice = next(iter(scalers)) if loss_id is None and len(scalers) == 1 else _number_of(loss_id)
        if choice not in scalers or not isinstance(scalers[choice], Mapping):
            msg = (
                f"the apex state holds {len(scalers)} loss scalers, {', '.join(f'loss_scaler{i}' for i in scalers)}, "
                f"got loss_id={shown(loss_id)}; load each into a scaler of its own, with loss_id= its number"
            )
            raise StateDictError(msg)
        return validation.mapping(f"loss_scaler{choice}", scalers[choice])
    if loss_id is not None:
        which = "apex's 'loss_scaler0', 'loss_scaler1', ..."
        msg = f"loss_id= chooses among {which}, got {shown(loss_id)} and {_listed(fields)}"
        raise InvalidValueError(msg)
    if _is_numbered(fields):
        return {name: fields[at] for name, at in _KERAS_POSITIONS.items()}
    return fields


def _number_of(loss_id: Any) -> str:
    """Return the number of a loss as it stands in the key of its scaler; an empty string for none."""
    if loss_id is None or isinstance(loss_id, str):
        return loss_id or ""
    return f"{validation.integer('loss_id', loss_id, -validation.LARGEST_INT32, validation.LARGEST_INT32)}"


def _several(fields: Mapping[Any, Any]) -> dict[str, Any]:
    """Return apex's loss scalers by their numbers."""
    names = [key for key in fields if isinstance(key, str)]
    return {match[1]: fields[name] for name in names if (match := _OF_SEVERAL.fullmatch(name))}


def _translate(fields: Mapping[Any, Any], layout: _Layout, settings: dict[str, Any]) -> ForeignState:
    """Return what a state of this layout says, with the caller's settings for what it does not say."""
    parameters = inspect.signature(getattr(presets, layout.preset)).parameters if layout.preset else {}
    defaults = {name: each.default for name, each in parameters.items() if name != "init_scale"}
    # flax has None for no minimum.
    said = {name: key for name, keys in _SETTINGS.items() if (key := layout.key(keys)) and fields.get(key) is not None}
    missing = [name for name in defaults if name not in (*said, *layout.fixed)]
    for name, value in settings.items():
        if name not in missing:
            wanted = f"the settings that can be given are {', '.join(missing)}" if missing else "leave it out"
            reason = f"says {name} itself" if name in said else f"has no setting {name!r}"
            msg = f"this {layout.system} state {reason}, got {name}={shown(value)}; {wanted}{_nearest(name, missing)}"
            raise InvalidValueError(msg)
    try:
        fields = {key: _scalar(value) if key in layout.vocabulary else value for key, value in fields.items()}
        if not layout.preset:
            return _translate_static(fields, layout)
        return _translate_dynamic(fields, layout, defaults, said, missing, settings)
    except StateDictError:
        raise
    except (InvalidTypeError, InvalidValueError) as error:
        msg = f"the {layout.system} state cannot be read: {error}"
        raise StateDictError(msg) from error


def _translate_static(fields: Mapping[Any, Any], layout: _Layout) -> ForeignState:
    for flag in ("dynamic", "dynamic_loss_scale"):
        if flag in layout.required and validation.boolean(flag, fields[flag]):
            raise _cut_short(next(other for other in _LAYOUTS if flag in other.vocabulary), fields)
    scale_key = layout.key(_SCALE)
    policy = StaticScale(validation.scale(scale_key, fields[scale_key]))
    saved = checkpoint.build(policy, {"scale": policy.init_scale}, 1)
    return ForeignState(layout.system, policy, saved, (), MappingProxyType({}))


def _translate_dynamic(
    fields: Mapping[Any, Any],
    layout: _Layout,
    defaults: dict[str, Any],
    said: dict[str, str],
    missing: list[str],
    given: dict[str, Any],
) -> ForeignState:
    assumed = {name: defaults[name] for name in missing if name not in given}
    left_key, left = layout.key(_OVERFLOWS_LEFT), 0
    if left_key:
        # Systems other than DeepSpeed go on counting down where every overflow backs off.
        least = 1 if layout.system == "deepspeed" else -validation.LARGEST_INT32
        left = validation.integer(left_key, fields[left_key], least, validation.LARGEST_INT32)
        if "hysteresis" in assumed:
            # More are still tolerated than there are by default: there must have been as many.
            assumed["hysteresis"] = max(left, assumed["hysteresis"])
    saved = {name: _setting(name, key, fields[key]) for name, key in said.items()}
    chosen = {**layout.fixed, **saved, **given, **assumed}
    scale_key = layout.key(_SCALE)
    scale = validation.scale(scale_key, fields[scale_key])
    preset = getattr(presets, layout.preset)
    try:
        policy = preset(init_scale=scale, **{name: value for name, value in chosen.items() if name in defaults})
    except InvalidValueError as error:
        remedy = f"; give those of {', '.join(missing)} that it was made with" if missing else ""
        msg = f"{scale_key} {scale!r} does not go with the settings: {error}{remedy}"
        raise InvalidValueError(msg) from error
    # What the system's own settings do not reach, and its state says all the same.
    policy = dataclasses.replace(policy, **{name: value for name, value in chosen.items() if name not in defaults})
    if left > policy.hysteresis:
        msg = f"{left_key} must be at most the hysteresis, got {left!r} and {policy.hysteresis!r}"
        raise InvalidValueError(msg)
    overflows = policy.hysteresis - max(left, 0) if left_key and policy.hysteresis > 1 else 0
    growth = _clean_steps(fields, layout, policy, "growth_interval" in said)
    snapshot = {"scale": scale, "growth_tracker": growth, "overflow_tracker": overflows}
    return ForeignState(
        format=layout.system,
        policy=policy,
        state_dict=checkpoint.build(policy, snapshot, 1),
        missing=(*missing, *layout.assumed),
        assumed=MappingProxyType({**assumed, **layout.assumed}),
    )


def _scalar(value: Any) -> Any:
    """Return the element of an array of one, in an array library or a file; what else it is, is checked later."""
    shape = getattr(value, "shape", None)
    return value if shape is None or any(length != 1 for length in shape) else value[(0,) * len(shape)]


def _setting(name: str, key: str, value: Any) -> Any:
    """Return a saved setting as a plain number of the policy's, or raise naming its key."""
    if name in ("growth_interval", "hysteresis"):
        return validation.integer(key, value, 1, validation.LARGEST_INT32)
    if name in ("consecutive_hysteresis", "raise_at_min"):
        return validation.boolean(key, value)
    if name == "min_scale":
        return validation.scale(key, value)
    if key == "backoff_factor":
        return validation.number(key, value, above=0.0, below=1.0)
    factor = validation.number(key, value, above=1.0, at_most=validation.LARGEST_FLOAT32)
    # One factor may serve both.
    return 1.0 / factor if name == "backoff_factor" else factor


def _clean_steps(fields: Mapping[Any, Any], layout: _Layout, policy: Any, is_interval_said: bool) -> int:
    """Return the growth tracker."""
    if "last_overflow_iter" in layout.required:
        done = validation.integer("cur_iter", fields["cur_iter"], 0, _LARGEST_COUNT)
        run = done - 1 - validation.integer("last_overflow_iter", fields["last_overflow_iter"], -1, done - 1)
        interval: int = policy.growth_interval
        # DeepSpeed's first growth of a run comes after one step more, with which the next interval begins.
        return (run - 1) % interval + 1 if run and policy.growth_after != "interval" else run % interval
    key = layout.key(_CLEAN_STEPS)
    if not key:
        return 0
    count = validation.integer(key, fields[key], 0, validation.LARGEST_INT32)
    if not is_interval_said and count >= policy.growth_interval + (policy.growth_after != "interval"):
        msg = (
            f"{key} must be below the interval after which the scale grows, got {count!r} and "
            f"{policy.growth_interval!r}, which the state does not say; give growth_interval="
        )
        raise InvalidValueError(msg)
    return count
