"""Calls of a scaler that are refused at any time, and change nothing.

A row has the error and what it says, the call, and the values that it is made with: of a scaler, an optimizer, the
namespace of its arrays, and a value.
"""

import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np

from gradscale import InvalidTypeError, InvalidValueError, StateDictError

Row = tuple[type[Exception], str, Callable[[Any, Any, Any, Any], object], Iterable[Any]]

TORCHS = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.25, "growth_interval": 7, "_growth_tracker": 5}
TRACKERS = ("_growth_tracker", "_overflow_tracker", "_rescale_tracker", "iteration")
SCALES = (0, 0.0, -1.0, math.inf, math.nan, 1e39, 1e-40, np.float32("nan"))
NO_SCALES = ("128", True, 1j, [128.0], object(), np.array([1.0, 2.0]), np.array([]), np.array(True), np.array("128"))
NO_CALLBACKS = ("print", 3, [print, None], {"a": print})
SEVERAL: tuple[Callable[[Any], Any], ...] = (lambda o: [o], lambda o: (o, o), lambda o: {"one": o})


class Classy:
    """Given as a class in place of an optimizer."""

    def step(self):
        """Do nothing."""


def loads(said: str, *states) -> Row:
    """Return a row of state dicts."""
    return StateDictError, f"{said}.*; nothing was changed", lambda s, _o, _xp, given: s.load_state_dict(given), states


def edited(said: str, key: str, *values) -> Row:
    """Return a row of state dicts with a value of a key."""
    return loads(said, *({**TORCHS, key: value} for value in values))


def for_no_optimizer(name: str) -> list[Row]:
    """Return the rows of a call with several optimizers or a class in place of one."""
    told = r"an optimizer must have .*, got a (list|tuple|dict) of [12]: .* for each optimizer$"
    classy = r"must be an instance, got .*: call it, Classy\(\.\.\.\)$"
    return [
        (InvalidTypeError, told, lambda s, o, _, several: getattr(s, name)(several(o)), SEVERAL),
        (InvalidTypeError, classy, lambda s, _o, _xp, kind: getattr(s, name)(kind), [Classy]),
    ]


NEW_SCALE, NO_STEP = r"new_scale must be .*got", r"must have step\(\), got .* of type SimpleNamespace"
OF_SCALERS: list[Row] = [
    (InvalidValueError, NEW_SCALE, lambda s, _o, _xp, x: s.update(x), SCALES),
    (InvalidValueError, NEW_SCALE, lambda s, _o, xp, x: s.update(xp.asarray(float(x), dtype=xp.float64)), SCALES),
    (InvalidValueError, NEW_SCALE, lambda s, _o, xp, x: s.update(xp.asarray([float(x)], dtype=xp.float64)), SCALES),
    (InvalidTypeError, NEW_SCALE, lambda s, _o, _xp, x: s.update(x), NO_SCALES),
    (InvalidTypeError, NEW_SCALE, lambda s, _o, xp, shape: s.update(xp.ones(shape)), [2, 0]),
    (InvalidTypeError, NEW_SCALE, lambda s, _o, xp, x: s.update(xp.asarray(x, dtype=xp.complex64)), [1.0]),
    (InvalidTypeError, "on_skip", lambda s, _o, _xp, x: setattr(s, "on_skip", x), NO_CALLBACKS),
    (InvalidTypeError, "on_update", lambda s, _o, _xp, x: setattr(s, "on_update", x), NO_CALLBACKS),
    (InvalidTypeError, r"an optimizer must have step\(\)", lambda s, _o, _xp, x: s.refuse(x), ["adam", object()]),
    (InvalidTypeError, NO_STEP, lambda s, o, _, args: s.step(SimpleNamespace(grads=o.grads), *args), [(), (print,)]),
    *for_no_optimizer("step"),
    *for_no_optimizer("refuse"),
    *for_no_optimizer("diagnose"),
    loads("", [("scale", 1.0)], None, {**TORCHS, "scale": -1.0, "policy": {"kind": "StaticScale", "init_scale": 1.0}}),
    loads("empty, as a disabled scaler saves it; .* enabled=False", {}),
    loads(r"keys \['growth_factor', .* are missing, got \['scale'\] .*load_foreign_state", {"scale": 1.0}),
    edited("version 2 is newer than 1, .* upgrade it", "version", 2),
    edited("", "version", 0, "1"),
    edited("", "iteration", 0),
    edited(r"counts\['taken'\]", "counts", {"taken": -1}),
    edited("scale .*got an integer of 16610 bits", "scale", 10**5000),
    edited("scale must be", "scale", 0.0, 1e-40, 1e39),
    edited("", "policy", "DynamicScale", {}, {"kind": "Other"}, {"kind": []}, {"kind": "DynamicScale", 3: 3}),
    edited("the kind of the policy must be one of .*got array", "policy", {"kind": np.array(["a", "b"])}),
    edited(r"not know, got \['margin'\]; a DynamicScale has", "policy", {"kind": "DynamicScale", "margin": 3}),
    edited("hysteresis", "policy", {"kind": "DynamicScale", "hysteresis": 0}),
    edited("spikes must be a list", "spikes", {"loss": 1}),
    edited(r"spikes\[0\] must be a mapping", "spikes", [3]),
    edited(r"spikes\[0\]\['loss'\] must be a mapping", "spikes", [{"loss": [1.0]}]),
    edited(r"'values'\] must be a list", "spikes", [{"loss": {"values": "1", "skipped": 0}}]),
    *(edited(r"'values'\] must be", "spikes", [{"loss": {"values": [x], "skipped": 0}}]) for x in (math.nan, 1e39)),
    *(edited(r"'skipped'\] must be", "spikes", [{"loss": {"values": [1.0]} | x}]) for x in ({}, {"skipped": -1})),
    *(
        edited(f"{key} must be", key, *values)
        for keys, values in (
            (TORCHS, (None, "1", math.nan, math.inf, -1, [1.0], True, 10**400, np.array([1.0, 2.0]))),
            (TRACKERS, (-1, 1.5, 2**63, "0", None)),
        )
        for key in keys
    ),
]
# Of scalers that can be told over what a norm is.
NO_OVER = 'norm_over must be "rank" or "group", got \'world\''
WHICH_OVER = '"group" where each rank holds a part of the gradients, "rank" where each holds all of them'
OF_NORMS: list[Row] = [
    (InvalidValueError, NO_OVER, lambda s, o, _, x: s.unscale_(o, max_norm=1.0, norm_over=x), ["world"]),
    (InvalidValueError, "got no max_norm", lambda s, o, _, x: s.unscale_(o, norm_over=x), ["rank"]),
]
OF_GROUPS: list[Row] = [(InvalidValueError, WHICH_OVER, lambda s, o, _, x: s.unscale_(o, max_norm=x), [1.0])]
OF_GRIDS: list[Row] = [
    (InvalidValueError, "one group, got 2", lambda s, o, _, x: s.unscale_(o, max_norm=1.0, norm_over=x), ["group"])
]
# Of one process alone: the others would wait for the message of this one.
OF_ONES = for_no_optimizer("unscale_")
NO_LOSSES = ("1.0", True, np.ones(2, np.float32), np.int32(1), 1j, [1.0])
OF_RULES: list[Row] = [
    (InvalidTypeError, "loss must be a number", lambda s, _, xp, x: s.scale(xp.ones(()), loss=x), NO_LOSSES)
]
