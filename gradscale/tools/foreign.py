"""Saved scaler states of other systems, translated: load_foreign_state."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from gradscale.core import validation
from gradscale.core.messages import key_names, nearest, reading, shown
from gradscale.core.protocols import Policy
from gradscale.errors import InvalidTypeError, InvalidValueError, StateDictError
from gradscale.policies import presets
from gradscale.policies.dynamic import StaticScale
from gradscale.scaler import checkpoint

__all__ = ["ForeignState", "load_foreign_state"]

_Fields: TypeAlias = Mapping[object, object]

# The meaning of the keys, which is the same in all systems.
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
    preset: Callable[..., Policy]
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    fixed: Mapping[str, object] = dataclasses.field(default_factory=dict)  # settings that the system does not have
    assumed: Mapping[str, object] = dataclasses.field(default_factory=dict)  # for trackers that it does not save

    @property
    def vocabulary(self) -> set[str]:
        """Every key that it may have."""
        return {*self.required, *self.optional}

    @property
    def defaults(self) -> dict[str, Any]:
        """The settings of its preset, and their defaults."""
        parameters = inspect.signature(self.preset).parameters
        return {name: each.default for name, each in parameters.items() if name != "init_scale"}

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
_LAYOUTS = (
    _Layout("torch", presets.torch, _TORCH),
    _Layout("nemo", presets.apex_hysteresis, (*_TORCH, "_hysteresis_tracker")),
    _Layout("megatron", presets.megatron, ("scale", "growth_tracker", "hysteresis_tracker")),
    _Layout("deepspeed", presets.deepspeed, (*_ITERATIONS, "cur_hysteresis"), _ZERO),
    _Layout(
        "deepspeed",
        presets.deepspeed_stage0,
        ("dynamic_loss_scale", *_ITERATIONS, *_WINDOW),
        assumed={"system": _STAGE0_NOTE},
    ),
    _Layout("deepspeed", StaticScale, ("dynamic_loss_scale", "cur_scale", "cur_iter")),
    _Layout("deepspeed", StaticScale, ("dynamic", "cur_scale")),
    _Layout("apex", presets.apex, ("loss_scale", "unskipped"), assumed={"system": _AMP_NOTE}),
    _Layout("apex", presets.apex, (*_ITERATIONS, *_WINDOW), fixed={"min_scale": 1.0, "max_scale": None}),
    _Layout("fairseq", presets.fairseq, ("loss_scale",), assumed=_LOST),
    _Layout("keras", presets.keras, ("dynamic_scale", "step_counter"), ("dynamic_growth_steps",)),
    _Layout("flax", presets.flax, ("scale", "fin_steps"), (*_FACTORS, "minimum_scale")),
    _Layout("jmp", presets.jmp, ("loss_scale", "counter"), ("factor", "period", "min_loss_scale")),
)
_SYSTEMS = tuple(dict.fromkeys(layout.system for layout in _LAYOUTS))
_KNOWN_KEYS = frozenset(key for layout in _LAYOUTS for key in layout.vocabulary)
# The numbers of Keras' variables; 0 and 1 are the iteration and the learning rate, which every optimizer has.
_KERAS_POSITIONS = {"step_counter": "2", "dynamic_scale": "3"}


def _recognise(fields: _Fields, system: str | None) -> _Layout:
    """Return the layout of a mapping: the one that has its keys, all of them and no others that are known."""
    got = f"got the keys {key_names(fields)}"
    if not fields:
        msg = (
            "the state is empty, as a disabled scaler of torch and Megatron's constant one save it, and says no scale; "
            "construct GradScaler(enabled=False), or GradScaler(policy=StaticScale(...)) with Megatron's --loss-scale"
        )
        raise StateDictError(msg)
    if {"version", "_overflow_tracker"} <= fields.keys():
        msg = f"the state is gradscale's own, {got}; pass it to GradScaler.load_state_dict"
        raise StateDictError(msg)
    candidates = [layout for layout in _LAYOUTS if system in (None, layout.system)]
    found = [layout for layout in candidates if fields.keys() >= set(layout.required)]
    if system is None:
        # Other keys do not matter to somebody who names the format.
        found = [layout for layout in found if fields.keys() & _KNOWN_KEYS <= layout.vocabulary]
    if len(found) == 1 or (found and system):
        return max(found, key=lambda layout: len(layout.required))
    formats = "; ".join(f"{layout.system}: {', '.join(layout.required)}" for layout in candidates)
    if system is not None:
        msg = f"the {system} state is cut short, {got}; it must have these keys: {formats}"
        raise StateDictError(msg)
    msg = (
        f"the state is of {'several formats' if found else 'no known format'}, {got}; pass the part of a checkpoint "
        f"that is its scaler's, and name the format with format=; the formats have these keys: {formats}"
    )
    raise StateDictError(msg)


@dataclasses.dataclass(frozen=True)
class ForeignState:
    """The saved state of another system in gradscale's terms; ``print`` it to see what was assumed.

    Attributes
    ----------
    format : str
        The system that saved it.
    policy : Policy
        That system's rule, with the saved scale as ``init_scale``; a StaticScale for a scale that never changes.
    state_dict : dict
        For ``GradScaler.load_state_dict``; holds the policy, too.
    missing : tuple of str
        The settings and trackers that the saved state does not hold; "system" if another system saves the same keys.
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
    assumed: Mapping[str, object]

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


@reading("the state")
def load_foreign_state(
    state: object,
    format: str | None = None,  # noqa: A002
    *,
    loss_id: int | None = None,
    **settings: object,
) -> ForeignState:
    """Translate the saved scaler state of another system, so that the run goes on with the scales it would have had.

    Nothing is unpickled, and no class is imported: load ``state`` with the system's own loader. After
    ``scaler.load_state_dict(load_foreign_state(state).state_dict)`` the scale is the original's after every step, as
    long as the factors are powers of two (some originals hold others in float64). If an interval was made shorter than
    the run of clean steps, torch grows only after the next overflow, and gradscale on the next clean step.

    Parameters
    ----------
    state : mapping
        Of torch (``state_dict()``; NeMo's, too), Megatron (``state_dict()``), DeepSpeed (the optimizer's without ZeRO,
        or ``vars()`` of its loss scaler), apex (``amp.state_dict()``, FP16_Optimizer's, or ``vars()`` of its loss
        scaler), fairseq (the optimizer's), Keras (LossScaleOptimizer's variables by name, or by number as saved), flax
        (``to_state_dict``, or ``vars()``), or jmp (``vars()``). Values are Python numbers or arrays of one element,
        which are read from their device. Not modified.
    format : str, optional
        ``"torch"``, ``"nemo"``, ``"megatron"``, ``"deepspeed"``, ``"apex"``, ``"fairseq"``, ``"keras"``, ``"flax"`` or
        ``"jmp"``. Default: recognised by the keys, if they are those of one format.
    loss_id : int, optional
        The number of one of apex's loss scalers; needed if there are several. Load each into a scaler of its own.
    **settings
        Settings that the state does not hold, by the names of the system's function in ``gradscale.presets``, such as
        ``growth_interval=500``. Default: that function's.

    Raises
    ------
    StateDictError
        For a state that is empty, cut short, corrupted, or of no known format, such as a whole checkpoint.
    InvalidValueError
        For an unknown format or setting, with the nearest, and for a setting that the state holds.
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
        msg = f"format must be one of {', '.join(map(repr, _SYSTEMS))}, got {shown(format)}{nearest(format, _SYSTEMS)}"
        raise InvalidValueError(msg)
    if isinstance(state, (str, bytes, bytearray, memoryview, os.PathLike)) or hasattr(state, "read"):
        msg = (
            f"state must be what was loaded from a file, got {shown(state)}; load it without running what it may hold: "
            f"torch.load(path, weights_only=True), flax.serialization.msgpack_restore(data), "
            f"numpy.load(path, allow_pickle=False), or h5py.File(path), and pass the part that is the scaler's"
        )
        raise InvalidTypeError(msg)
    if not isinstance(state, Mapping):
        msg = (
            f"state must be a mapping, got {shown(state)} of type {type(state).__name__}; pass its state_dict(), or "
            f"vars() of it"
        )
        raise InvalidTypeError(msg)
    fields: _Fields = validation.mapping("state", state)
    # apex's amp numbers the scalers of its losses; Keras numbers its variables.
    system, names = format, [key for key in fields if isinstance(key, str)]
    if scalers := [name for name in names if re.fullmatch(r"loss_scaler\d+", name)]:
        system, fields = format or "apex", _scaler_of(fields, scalers, loss_id)
    elif loss_id is not None:
        which = "apex's 'loss_scaler0', 'loss_scaler1', ..."
        msg = f"loss_id= chooses among {which}, got {shown(loss_id)} and the keys {key_names(fields)}"
        raise InvalidValueError(msg)
    elif len(names) == len(fields) and all(map(str.isdecimal, names)) and "3" in names:
        fields = {name: fields.get(at) for name, at in _KERAS_POSITIONS.items()}
    return _translate(fields, _recognise(fields, system), settings)


def _scaler_of(fields: _Fields, names: list[str], loss_id: int | None) -> _Fields:
    """Return the state of one of apex's loss scalers."""
    if loss_id is not None:
        loss_id = validation.integer("loss_id", loss_id, 0, validation.LARGEST_INT32)
    name = names[0] if loss_id is None and len(names) == 1 else f"loss_scaler{loss_id}"
    if not isinstance(fields.get(name), Mapping):
        msg = (
            f"the apex state holds {len(names)} loss scalers, {', '.join(names)}, got loss_id={loss_id}; "
            f"load each into a scaler of its own, with loss_id= its number"
        )
        raise StateDictError(msg)
    return validation.mapping(name, fields[name])


def _translate(fields: _Fields, layout: _Layout, settings: dict[str, object]) -> ForeignState:
    """Return the result for a state of this layout, with the caller's settings for those that it does not hold."""
    # flax has None for no minimum.
    said = {name: key for name, keys in _SETTINGS.items() if (key := layout.key(keys)) and fields.get(key) is not None}
    missing = [name for name in layout.defaults if name not in (*said, *layout.fixed)]
    for name, value in settings.items():
        if name not in missing:
            wanted = f"the settings that can be given are {', '.join(missing)}" if missing else "leave it out"
            reason = f"says {name} itself" if name in said else f"has no setting {name!r}"
            msg = f"this {layout.system} state {reason}, got {name}={shown(value)}; {wanted}{nearest(name, missing)}"
            raise InvalidValueError(msg)
    try:
        return _read(fields, layout, said, missing, settings)
    except (InvalidTypeError, InvalidValueError) as error:
        msg = f"the {layout.system} state cannot be read: {error}"
        raise StateDictError(msg) from error


def _read(
    fields: _Fields, layout: _Layout, said: dict[str, str], missing: list[str], given: dict[str, object]
) -> ForeignState:
    """Return the result; ``said`` has the keys of the settings that the state holds."""
    fields = {key: _scalar(value) if key in layout.vocabulary else value for key, value in fields.items()}
    for flag in {"dynamic", "dynamic_loss_scale"} & {*layout.required}:
        if layout.preset is StaticScale and validation.boolean(flag, fields[flag]):
            msg = f"{flag} is True, and keys of a dynamic scale are missing, got the keys {key_names(fields)}"
            raise InvalidValueError(msg)
    assumed = {name: layout.defaults[name] for name in missing if name not in given}
    left_key, left = layout.key(_OVERFLOWS_LEFT), 0
    if left_key:
        # Systems other than DeepSpeed count on below 0 while every overflow backs off.
        least = 1 if layout.system == "deepspeed" else -validation.LARGEST_INT32
        left = validation.integer(left_key, fields[left_key], least, validation.LARGEST_INT32)
        if "hysteresis" in assumed:
            # The default may be below the number that is still tolerated.
            assumed["hysteresis"] = max(left, assumed["hysteresis"])
    saved = {name: _setting(name, key, fields[key]) for name, key in said.items()}
    chosen = {**layout.fixed, **saved, **given, **assumed}
    scale_key = layout.key(_SCALE)
    scale = validation.scale(scale_key, fields[scale_key])
    passed = {name: value for name, value in chosen.items() if name in layout.defaults}
    try:
        policy: Any = layout.preset(init_scale=scale, **passed)
    except InvalidValueError as error:
        remedy = f"; give those of {', '.join(missing)} that it was made with" if missing else ""
        msg = f"{scale_key} {scale!r} does not go with the settings: {error}{remedy}"
        raise InvalidValueError(msg) from error
    # Settings that the state holds and the preset has no parameter for.
    policy = dataclasses.replace(policy, **{name: chosen[name] for name in chosen.keys() - passed.keys()})
    if left_key and left > policy.hysteresis:
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
    """Return the element of an array of one, of any library or in a file, and any other value as it is."""
    shape = getattr(value, "shape", None)
    return value if shape is None or any(length != 1 for length in shape) else value[(0,) * len(shape)]


def _setting(name: str, key: str, value: object) -> float:
    """Return a saved setting as a Python number, or raise naming its key."""
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


def _clean_steps(fields: _Fields, layout: _Layout, policy: Any, is_interval_said: bool) -> int:
    """Return the growth tracker."""
    if "last_overflow_iter" in layout.required:
        done = validation.integer("cur_iter", fields["cur_iter"], 0, 2**63 - 1)
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
