"""Policies that behave like each known system's loss scaler, step by step: torch(), megatron(), deepspeed(), ...

Each takes, by keyword, what its system has, under the names and with the meaning of :class:`gradscale.DynamicScale`,
with that system's defaults, and returns a policy for ``GradScaler(policy=...)`` or for pure functions. A wrong value
raises InvalidValueError or InvalidTypeError, which names it; an unknown argument a TypeError. "Not reproduced" lists
bugs of the original that this preset does not copy.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from gradscale.core import validation
from gradscale.errors import InvalidValueError, nearest, short_repr
from gradscale.policies.dynamic import DynamicScale

# Without stars, which mypy does not read.
__all__ = ["apex", "apex_hysteresis", "colossalai", "deepspeed", "deepspeed_stage0", "fairseq", "flax", "jmp", "keras"]
__all__ += ["megatron", "mindspore", "mpx", "named", "names", "paddle", "paddle_static", "torch"]
__dir__ = __all__.copy


def _float32(settings: dict[str, Any], **fixed: Any) -> DynamicScale:
    """Return the rule of a system whose factors are float32 numbers, or which has one such number for both."""
    rule = DynamicScale(**settings, **fixed)
    growth_factor, backoff_factor = map(validation.round_to_float32, (rule.growth_factor, rule.backoff_factor))
    backoff_factor = backoff_factor if "backoff_factor" in settings else 1.0 / growth_factor
    return dataclasses.replace(rule, growth_factor=growth_factor, backoff_factor=backoff_factor)


def torch(
    *, init_scale: float = 2.0**16, growth_factor: float = 2.0, backoff_factor: float = 0.5, growth_interval: int = 2000
) -> DynamicScale:
    """Return the rule of torch.amp.GradScaler (torch 2.13, ``torch._amp_update_scale_``).

    The scale doubles after 2000 clean steps in a row and halves on each overflow.

    Not reproduced: a scale that reaches 0 after many overflows, and one that inf keeps.
    """
    return DynamicScale(**locals())


def apex(
    *,
    init_scale: float = 2.0**16,
    growth_interval: int = 2000,
    min_scale: float = validation.SMALLEST_NORMAL,
    max_scale: float | None = 2.0**24,
) -> DynamicScale:
    """Return the rule of apex.amp (``apex/amp/scaler.py``), fp16_utils and contrib's FP16_Optimizer.

    Torch's, with a maximum, and perhaps a minimum. fp16_utils and contrib have a minimum of 1 and no maximum.

    Not reproduced: without a minimum the scale went to 0, and its reciprocal raised ZeroDivisionError.
    """
    return DynamicScale(**locals())


def apex_hysteresis(
    *,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    hysteresis: int = 1,
) -> DynamicScale:
    """Return the rule of apex's kernel ``update_scale_hysteresis`` (``csrc``), which NeMo's GradScaler has, too.

    Torch's rule, but only the ``hysteresis``-th of consecutive overflows and each after it back off. NeMo's defaults.

    Not reproduced: the scale may reach 0; NeMo loses the count of overflows in a checkpoint by a misspelt key.
    """
    return DynamicScale(**locals(), hysteresis_refill=("clean_step",))


def megatron(
    *,
    init_scale: float = 2.0**32,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
    min_scale: float = 1.0,
) -> DynamicScale:
    """Return the rule of Megatron-core's DynamicGradScaler (``megatron/core/optimizer/grad_scaler.py``).

    Growth after 1000 clean steps in a row; the ``hysteresis``-th overflow since the last growth, and each after it,
    backs off, down to ``min_scale``. Overflows need not be consecutive, whatever Megatron's documentation says.

    Not reproduced: growth to inf, which nothing there stops.
    """
    return _float32(locals(), hysteresis_refill=("growth",))


def deepspeed(
    *,
    init_scale: float = 2.0**16,
    growth_interval: int = 1000,
    hysteresis: int = 2,
    min_scale: float = 1.0,
    consecutive_hysteresis: bool = False,
    raise_at_min: bool = True,
) -> DynamicScale:
    """Return the rule of DeepSpeed's DynamicLossScaler, which ZeRO uses (``deepspeed/runtime/fp16/loss_scaler.py``).

    The scale doubles after 1001 clean steps, and then after each 1000; overflows are tolerated as Megatron does it, or
    with ``consecutive_hysteresis`` as apex's kernel does. The defaults are those of the ``fp16`` section of its JSON.
    With ``raise_at_min`` the scaler raises ScaleUnderflowError where DeepSpeed raises a bare Exception.

    Not reproduced: gradients divided by the scale after the update, halved on each growth step; growth to inf.
    """
    settings = dict(locals())
    del settings["consecutive_hysteresis"], settings["raise_at_min"]
    consecutive = validation.boolean("consecutive_hysteresis", consecutive_hysteresis)
    return DynamicScale(
        **settings,
        growth_after="first_interval_plus_one",
        hysteresis_refill=("clean_step",) if consecutive else ("growth",),
        at_min="raise" if validation.boolean("raise_at_min", raise_at_min) else "clamp",
    )


def deepspeed_stage0(
    *, init_scale: float = 2.0**16, growth_interval: int = 1000, min_scale: float = 1.0
) -> DynamicScale:
    """Return the rule of DeepSpeed without ZeRO (``FP16_Optimizer`` and ``FP16_UnfusedOptimizer``).

    Growth, and what is not reproduced, as in :func:`deepspeed`; each overflow halves the scale, down to ``min_scale``,
    and none raises. With no setting in its JSON the fused optimizer starts at 2**32.
    """
    return DynamicScale(**locals(), growth_after="first_interval_plus_one")


def fairseq(
    *,
    init_scale: float = 2.0**15,
    growth_factor: float = 2.0,
    growth_interval: int = 2000,
    tolerance: float = 0.0,
    min_scale: float = 1e-4,
    threshold: float | None = None,
) -> DynamicScale:
    """Return the rule of fairseq's DynamicLossScaler (``fairseq/optim/dynamic_loss_scaler.py``).

    Growth after 2000 clean steps in a row; an overflow backs off when the overflows are at least ``tolerance`` of the
    steps since the scale last changed. A scale that would come down to ``min_scale`` raises ScaleUnderflowError
    instead, FloatingPointError in fairseq; a ``threshold`` above it is where the scale stays. The defaults are those of
    the class; its command line starts at 128, with an interval that depends on the number of workers.

    Not reproduced: a checkpoint that holds the scale alone; growth to inf.
    """
    settings = dict(locals())
    del settings["min_scale"], settings["threshold"]
    smallest = validation.number("min_scale", min_scale, at_least=0.0)
    if threshold is not None and validation.scale("threshold", threshold) > smallest:
        return _float32(settings, min_scale=threshold)
    rule = _float32(settings)
    smallest = validation.last_above(smallest, rule.init_scale, rule.backoff_factor)
    return dataclasses.replace(rule, min_scale=smallest, at_min="raise")


def colossalai(
    *,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
    min_scale: float = validation.SMALLEST_NORMAL,
    max_scale: float | None = None,
) -> DynamicScale:
    """Return the rule of ColossalAI's DynamicGradScaler (``colossalai/amp/naive_amp/grad_scaler``).

    Megatron's, with a maximum; a ``hysteresis`` of 0 is one of 1. The defaults are those of the class.

    Not reproduced: gradients divided by the scale after the update; a checkpoint without trackers, interval and bounds.
    """
    hysteresis = max(validation.integer("hysteresis", hysteresis, 0, validation.LARGEST_INT32), 1)
    return _float32(locals(), hysteresis_refill=("growth",))


def paddle(
    *,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    hysteresis: int = 1,
) -> DynamicScale:
    """Return the rule of paddle.amp.GradScaler (Paddle 3.3, ``python/paddle/amp/grad_scaler.py``).

    Growth after 2000 clean steps in a row; the ``hysteresis``-th of consecutive overflows backs off, and the count
    begins again after each backoff. It is ``decr_every_n_nan_or_inf`` there.

    Not reproduced: a scale that reaches 0 or inf; with several optimizers, the last one's verdict alone.
    """
    return _float32(locals(), hysteresis_refill=("clean_step", "backoff"))


def paddle_static(
    *,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    hysteresis: int = 1,
) -> DynamicScale:
    """Return the rule of Paddle's kernel ``update_loss_scaling`` (Paddle 3.3, ``paddle.static.amp``).

    As :func:`paddle`, with a minimum of 1. The defaults are those of ``decorate(level=...)``; without
    ``level=`` they are 2**15, 0.8 as the backoff factor, 1000 and a hysteresis of 2.
    """
    return _float32(locals(), hysteresis_refill=("clean_step", "backoff"), min_scale=1.0)


def mindspore(*, init_scale: float = 2.0**24, growth_factor: float = 2.0, growth_interval: int = 2000) -> DynamicScale:
    """Return the rule of MindSpore's DynamicLossScaleManager (MindSpore 2.10).

    Growth after 2000 clean steps in a row; each overflow backs off, down to 1.

    Not reproduced: RuntimeError after 1000 consecutive overflows, at which the scale has long been 1; growth to inf.
    """
    return _float32(locals(), min_scale=1.0)


def jmp(
    *, init_scale: float = 2.0**15, growth_factor: float = 2.0, growth_interval: int = 2000, min_scale: float = 1.0
) -> DynamicScale:
    """Return the rule of jmp.DynamicLossScale (jmp 0.0.4), which has no default scale; 2**15 is its documentation's.

    Growth after 2000 clean steps in a row; each overflow divides by ``growth_factor``, down to ``min_scale``. As jmp
    takes them, a ``min_scale`` of 0 is one of float32's smallest normal number, and the interval may be a float.

    Not reproduced: the minimum is lost, and 1 again, after any jit or tree_map.
    """
    settings = dict(locals())
    interval = settings["growth_interval"]
    if isinstance(interval, float) and interval.is_integer():
        settings["growth_interval"] = int(interval)
    settings["min_scale"] = validation.number("min_scale", min_scale, at_least=0.0) or validation.SMALLEST_NORMAL
    return _float32(settings)


def flax(
    *,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_scale: float = validation.SMALLEST_NORMAL,
) -> DynamicScale:
    """Return the rule of flax.training.dynamic_scale.DynamicScale (flax 0.12).

    Growth on the 2001st clean step of each run, up to float32's largest number; each overflow backs off, down to
    ``min_scale``.

    Not reproduced: a scaled half-precision loss that is inf at the first scale of 65536; here it becomes float32.
    """
    return _float32(locals(), growth_after="interval_plus_one", max_scale=validation.LARGEST_FLOAT32)


def mpx(
    *,
    init_scale: float = 2.0**15,
    growth_factor: float = 2.0,
    growth_interval: int = 2000,
    min_scale: float = 1.0,
    max_scale: float | None = 65504.0,
) -> DynamicScale:
    """Return the rule of mpx.DynamicLossScaling: jmp's, with a maximum of 65504.

    It has no default scale; 2**15 is its documentation's. The maximum is no power of two, and so is no scale after it.

    Not reproduced: loss and gradients divided by the scale after the update, halved on each growth step.
    """
    return _float32(locals())


def keras(*, init_scale: float = 2.0**15, growth_interval: int = 2000) -> DynamicScale:
    """Return the rule of keras.optimizers.LossScaleOptimizer (Keras 3.15), which is torch's from a scale of 2**15 on.

    Not reproduced: a scale that reaches 0, or inf, which halving leaves as it is.
    """
    return DynamicScale(**locals())


_PRESETS: dict[str, Callable[..., DynamicScale]]
_PRESETS = {name: globals()[name] for name in __all__ if name not in ("named", "names")}


if not TYPE_CHECKING:  # a type checker would take each name for a preset

    def __getattr__(name: str) -> NoReturn:
        """Raise AttributeError for a name that this module does not have, naming the nearest preset."""
        raise AttributeError(_unknown(name))


def _unknown(name: str) -> str:
    return f"no preset has this name, got {short_repr(name)}{nearest(name, _PRESETS)} (there are {', '.join(names())})"


def names() -> list[str]:
    """Return the names of all presets, sorted.

    Examples
    --------
    >>> from gradscale import presets
    >>> len(presets.names())
    15
    >>> presets.names()[:3]
    ['apex', 'apex_hysteresis', 'colossalai']
    """
    return sorted(_PRESETS)


def named(name: str, /, **settings: object) -> DynamicScale:
    """Return the preset of a name, with settings in place of its defaults.

    Raises
    ------
    InvalidValueError, InvalidTypeError
        For an unknown name, naming the nearest one; for a setting that the preset does not have, or out of range.

    Examples
    --------
    >>> from gradscale import presets
    >>> policy = presets.named("megatron", hysteresis=3)
    >>> (policy.hysteresis, policy.min_scale)
    (3, 1.0)
    """
    if not isinstance(name, str):
        raise validation.wrong_type(name, "the name of a preset", "a str")
    if name not in _PRESETS:
        raise InvalidValueError(_unknown(name))
    parameters = inspect.signature(_PRESETS[name]).parameters
    if unknown := [setting for setting in settings if setting not in parameters]:
        got = f"no setting {', '.join(unknown)}, got {short_repr(settings)}"
        msg = f"preset {name!r} has {got}; it has {', '.join(parameters)}"
        raise InvalidValueError(msg)
    return _PRESETS[name](**settings)
