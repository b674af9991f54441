"""Saved scaler states of other systems, translated: load_foreign_state."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from gradscale.core import validation
from gradscale.core.protocols import Policy
from gradscale.errors import GradscaleError, InvalidValueError, StateDictError, key_names, nearest, reading, short_repr
from gradscale.policies import presets
from gradscale.policies.dynamic import StaticScale
from gradscale.scaler import checkpoint

_Fields: TypeAlias = Mapping[object, object]


_growth_factor = partial(validation.number, above=1.0, at_most=validation.LARGEST_FLOAT32)
_positive = partial(validation.integer, at_least=1, at_most=validation.LARGEST_INT32)
_count = partial(validation.integer, at_least=0, at_most=validation.LARGEST_INT32)
# Systems count on below 0 while every overflow backs off.
_left = partial(validation.integer, at_least=-validation.LARGEST_INT32, at_most=validation.LARGEST_INT32)
_iterations = partial(validation.integer, at_most=2**63 - 1)
# Each number's check and its keys, which mean the same in all systems; "2" and "3" are Keras' variables as saved.
_MEANINGS: dict[str, tuple[Callable[[str, object], float], str]] = {
    "scale": (validation.scale, "scale cur_scale loss_scale dynamic_scale 3"),
    "growth_factor": (_growth_factor, "growth_factor scale_factor factor"),
    "backoff_factor": (partial(validation.number, above=0.0, below=1.0), "backoff_factor"),
    "growth_interval": (_positive, "growth_interval scale_window period dynamic_growth_steps"),
    "hysteresis": (_positive, "delayed_shift"),
    "min_scale": (validation.scale, "min_scale minimum_scale min_loss_scale"),
    "consecutive_hysteresis": (validation.boolean, "consecutive_hysteresis"),
    "raise_at_min": (validation.boolean, "raise_error_at_min_scale"),
    "is_dynamic": (validation.boolean, "dynamic dynamic_loss_scale"),
    "clean_steps": (_count, "_growth_tracker growth_tracker unskipped step_counter fin_steps counter 2"),
    "overflows_left": (_left, "_hysteresis_tracker hysteresis_tracker cur_hysteresis"),
    "steps": (partial(_iterations, at_least=0), "cur_iter"),
    "last_overflow": (partial(_iterations, at_least=-1), "last_overflow_iter"),
}


def _fp16_optimizer(*, init_scale: float, growth_interval: int) -> Policy:
    return presets.apex(init_scale=init_scale, growth_interval=growth_interval, min_scale=1.0, max_scale=None)


class _Layout(NamedTuple):
    """The keys under which a system saves its state."""

    system: str
    preset: Callable[..., Policy]
    required: str
    optional: str = ""
    note: str = ""  # of another system with the same keys

    @property
    def keys(self) -> list[str]:
        return f"{self.required} {self.optional}".split()

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of its preset, and their defaults."""
        parameters = inspect.signature(self.preset).parameters
        return {name: each.default for name, each in parameters.items() if name != "init_scale"}


_TORCH = "scale growth_factor backoff_factor growth_interval _growth_tracker"
_ITERATIONS = "cur_scale cur_iter last_overflow_iter"
_WINDOW = "scale_factor scale_window"
_ZERO = f"{_WINDOW} min_scale delayed_shift consecutive_hysteresis raise_error_at_min_scale dynamic"
_STAGE0_NOTE = "DeepSpeed's without ZeRO; apex's FP16_Optimizer saves the same keys: format='apex'"
_AMP_NOTE = "amp's dynamic scaler; a static one saves the same keys: gradscale.StaticScale"
_LAYOUTS = (
    _Layout("torch", presets.torch, _TORCH),
    _Layout("nemo", presets.apex_hysteresis, f"{_TORCH} _hysteresis_tracker"),
    _Layout("megatron", presets.megatron, "scale growth_tracker hysteresis_tracker"),
    _Layout("deepspeed", presets.deepspeed, f"{_ITERATIONS} cur_hysteresis", _ZERO),
    _Layout("deepspeed", presets.deepspeed_stage0, f"dynamic_loss_scale {_ITERATIONS} {_WINDOW}", note=_STAGE0_NOTE),
    _Layout("deepspeed", StaticScale, "dynamic_loss_scale cur_scale cur_iter"),
    _Layout("deepspeed", StaticScale, "dynamic cur_scale"),
    _Layout("apex", presets.apex, "loss_scale unskipped", note=_AMP_NOTE),
    _Layout("apex", _fp16_optimizer, f"{_ITERATIONS} {_WINDOW}"),
    _Layout("keras", presets.keras, "dynamic_scale step_counter", "dynamic_growth_steps"),
    _Layout("keras", presets.keras, "3 2"),
    _Layout("flax", presets.flax, "scale fin_steps", "growth_factor backoff_factor growth_interval minimum_scale"),
    _Layout("jmp", presets.jmp, "loss_scale counter", "factor period min_loss_scale"),
)
_A_STATE = (
    "a mapping (its state_dict(), or vars() of it; of a file the part that is the scaler's of what "
    "torch.load(path, weights_only=True), numpy.load(path, allow_pickle=False), h5py.File(path) or "
    "flax.serialization.msgpack_restore(data) has loaded, which run nothing that it may hold)"
)
_SYSTEMS = tuple(dict.fromkeys(layout.system for layout in _LAYOUTS))
_ALL_KEYS = {key for layout in _LAYOUTS for key in layout.keys}


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
        The value assumed for each of these that the caller did not give.

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
    state_dict: dict[str, object]
    missing: tuple[str, ...]
    assumed: Mapping[str, object]

    def __str__(self) -> str:
        trackers = ", ".join(f"{key[1:]} {self.state_dict[key]}" for key in self.state_dict if key.endswith("_tracker"))
        lines = [f"{self.format} state: scale {self.state_dict['scale']!r}, {trackers}", f"policy: {self.policy}"]
        lines += [f"not in the saved state, and assumed: {name} = {value}" for name, value in self.assumed.items()]
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
        Of torch (``state_dict()``; NeMo's, too), Megatron (``state_dict()``), DeepSpeed (the optimizer's, or
        ``vars()`` of its loss scaler), apex (``amp.state_dict()``, FP16_Optimizer's, or ``vars()`` of its loss
        scaler), Keras (LossScaleOptimizer's variables by name, or by number as saved), flax (``to_state_dict``, or
        ``vars()``), or jmp (``vars()``). Values are Python numbers or arrays of one element, which are read from their
        device. Not modified.
    format : str, optional
        ``"torch"``, ``"nemo"``, ``"megatron"``, ``"deepspeed"``, ``"apex"``, ``"keras"``, ``"flax"`` or ``"jmp"``.
        Default: recognised by the keys, if they are those of one format.
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
        For an unknown format, with those that there are, and for a setting that the state does not leave out.
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
    system = None if format is None else validation.choice("format", format, _SYSTEMS)
    fields: _Fields = validation.mapping("state", state, _A_STATE)
    if "loss_scaler" in fields:
        # ZeRO's optimizers save their scaler as an object.
        fields = validation.mapping("loss_scaler", getattr(fields["loss_scaler"], "__dict__", fields["loss_scaler"]))
    # apex's amp numbers the scalers of its losses.
    scalers = [key for key in fields if isinstance(key, str) and re.fullmatch(r"loss_scaler\d+", key)]
    if scalers or loss_id is not None:
        name = scalers[0] if loss_id is None and len(scalers) == 1 else f"loss_scaler{loss_id}"
        if name not in scalers:
            msg = (
                f"loss_id= must be the number of one of apex's loss scalers, got {short_repr(loss_id)} and "
                f"{', '.join(scalers) or 'a state without any'}; load each into a scaler of its own"
            )
            raise StateDictError(msg)
        system, fields = system or "apex", validation.mapping(name, fields[name])
    return _translate(fields, _recognise(fields, system), settings)


def _recognise(fields: _Fields, system: str | None) -> _Layout:
    """Return the layout whose required keys a mapping has, without the keys of others."""
    got = f"got the keys {key_names(fields)}"
    if {"version", "_overflow_tracker"} <= fields.keys():
        msg = f"the state is gradscale's own, {got}; pass it to GradScaler.load_state_dict"
        raise StateDictError(msg)
    candidates = [layout for layout in _LAYOUTS if system in (None, layout.system)]
    # Other keys do not matter to somebody who names the format.
    own_keys = set() if system else fields.keys() & _ALL_KEYS
    matches = [each for each in candidates if {*each.required.split()} <= fields.keys() and own_keys <= {*each.keys}]
    if matches:
        return max(matches, key=lambda layout: len(layout.required))
    formats = "; ".join(f"{layout.system}: {layout.required.replace(' ', ', ')}" for layout in candidates)
    what = f"the {system} state is cut short" if system else "the state is of no known format"
    msg = (
        f"{what}, {got}; pass the part of a checkpoint that is its scaler's, and name the format with format=; the "
        f"formats have these keys: {formats}"
    )
    raise StateDictError(msg)


def _translate(fields: _Fields, layout: _Layout, extra: dict[str, object]) -> ForeignState:
    # flax has None for no minimum.
    present = [key for key in layout.keys if key in layout.required.split() or fields.get(key) is not None]
    keys = {name: key for name, (_, names) in _MEANINGS.items() for key in names.split() if key in present}
    missing = {name: default for name, default in layout.settings.items() if name not in keys}
    for name, value in extra.items():
        if name not in missing:
            left_out = ", ".join(missing) or "no setting"
            msg = f"this {layout.system} state leaves out {left_out}, got {name}={short_repr(value)}"
            raise InvalidValueError(msg + nearest(name, missing))
    try:
        saved = {name: _MEANINGS[name][0](key, _element(fields[key])) for name, key in keys.items()}
        return _read(layout, keys, saved, missing, extra)
    except GradscaleError as error:
        msg = f"the {layout.system} state cannot be read: {error}"
        raise StateDictError(msg) from error


def _element(value: Any) -> object:
    """Return the element of an array of one, of any library or in a file, and any other value as it is."""
    shape = getattr(value, "shape", None)
    return value if shape is None or any(length != 1 for length in shape) else value[(0,) * len(shape)]


def _read(
    layout: _Layout, keys: dict[str, str], saved: dict[str, Any], missing: dict[str, object], extra: dict[str, object]
) -> ForeignState:
    """Return the result for the saved numbers under these keys; ``missing`` has the defaults of the other settings."""
    if layout.preset is StaticScale and saved["is_dynamic"]:
        msg = f"{keys['is_dynamic']} is True, and keys of a dynamic scale are missing"
        raise InvalidValueError(msg)
    assumed = {name: default for name, default in missing.items() if name not in extra}
    left = saved.get("overflows_left", 0)
    if "hysteresis" in assumed:
        # The default may be below the number that is still tolerated.
        assumed["hysteresis"] = max(left, assumed["hysteresis"])
    settings = {name: saved[name] for name in layout.settings if name in saved} | extra | assumed
    policy: Any = layout.preset(init_scale=saved["scale"], **settings)
    if "growth_factor" in saved and "growth_factor" not in settings:
        # One factor, for which the system's preset has no parameter.
        factor = saved["growth_factor"]
        policy = dataclasses.replace(policy, growth_factor=factor, backoff_factor=1.0 / factor)
    overflows = 0
    if "overflows_left" in saved:
        validation.number(keys["overflows_left"], left, at_most=policy.hysteresis)
        overflows = policy.hysteresis - max(left, 0) if policy.hysteresis > 1 else 0
    growth = _clean_steps(keys, saved, policy)
    note = {"system": layout.note} if layout.note else {}
    snapshot = {"scale": policy.init_scale, "growth_tracker": growth, "overflow_tracker": overflows}
    return ForeignState(
        format=layout.system,
        policy=policy,
        state_dict=checkpoint.build(checkpoint.Checkpoint(policy, snapshot)),
        missing=(*missing, *note),
        assumed=MappingProxyType(assumed | note),
    )


def _clean_steps(keys: dict[str, str], saved: dict[str, Any], policy: Any) -> int:
    if "last_overflow" in saved:
        # An overflow is of an iteration before the next one.
        last = validation.integer(keys["last_overflow"], saved["last_overflow"], -1, saved["steps"] - 1)
        run: int = saved["steps"] - 1 - last
        # DeepSpeed's first growth of a run comes after one step more, with which the next interval begins.
        is_later = run > 0 and policy.growth_after != "interval"
        interval: int = policy.growth_interval
        return (run - 1) % interval + 1 if is_later else run % interval
    count: int = saved.get("clean_steps", 0)
    is_assumed = count > 0 and "growth_interval" not in saved
    if is_assumed and count >= policy.growth_interval + (policy.growth_after != "interval"):
        interval = policy.growth_interval
        msg = f"{keys['clean_steps']} must be below the interval, got {count} and {interval}; give growth_interval="
        raise InvalidValueError(msg)
    return count
