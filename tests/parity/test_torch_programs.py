"""Random programs, right and wrong ones, on torch's scaler and ours: the same values and the same kinds of errors."""

from __future__ import annotations

import collections
import copy
import functools
import io
import math
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from axes import is_torch_2_6
from axes_torch import GradScaler, TorchScaler, torch
from small_torch import assert_same
from tiers import examples, later
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedScaler

import gradscale

pytestmark = pytest.mark.torch

PROGRAMS = 3000
# torch's adds duplicates of float16 in float16, where it judges alone.
TWICE = ("SGD-sparse", "float16")
SAVED = {"scale": 64.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "_growth_tracker": 1}
# The built-in errors by which scripts that were written for torch's scaler may catch ours.
THEIRS = {
    gradscale.CallOrderError: (AssertionError, RuntimeError, AttributeError, TypeError),
    gradscale.StateDictError: (KeyError, RuntimeError),
    gradscale.InvalidTypeError: (TypeError, ValueError, AssertionError),
    gradscale.InvalidValueError: (ValueError,),
}

# The fused Adagrad of torch 2.6 raises an error with torch's scaler.
FUSED = ["SGD-fused", "Adam-fused", *([] if is_torch_2_6() else ["Adagrad-fused"])]
MAKERS: list[Callable[..., Any]] = [functools.partial(make, "cpu") for make in (GradScaler, TorchScaler)]

Call = tuple[str, *tuple[Any, ...]]


class Losses(list):  # type: ignore[type-arg]
    """A list of the user's."""


OTHER = torch.tensor(-2.0)
# What holds a loss, and for ``scale`` only, what is no loss.
CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda loss: loss,
    "list": lambda loss: [loss, OTHER],
    "tuple": lambda loss: (loss, OTHER),
    "nested": lambda loss: [(loss,), OTHER, []],
    "user's": lambda loss: Losses([loss, OTHER]),
    "empty": lambda _: (),
    "iterator": lambda loss: iter([loss, OTHER]),
    "set": lambda loss: {loss, OTHER},
}
WRONG: dict[str, Callable[[Any], Any]] = {
    "number": lambda _: 1.5,
    "none": lambda _: None,
    "function": lambda _: print,
    "number inside": lambda loss: [loss, 3],
}
DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "int32", "int64", "uint8", "bool")


class Plan(NamedTuple):
    """What a program runs with."""

    settings: dict[str, Any]
    enabled: bool
    kinds: list[str]
    dtypes: list[str]
    calls: list[Call]
    has_empty: bool = False


class Chance:
    """Draws programs of one to three optimizers: training loops, with calls in between and slips."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self._optimizers = range(self._random.randint(1, 3))

    def plan(self) -> Plan:
        draw, choice = self._random.random, self._random.choice
        kinds = ["SGD", "Adam", "AdamW-foreach", "SGD-foreach", "SGD-sparse", *FUSED]
        settings = {
            "init_scale": choice([2.0**-10, 0.375, 1.0, 2.0, 3.75, 1000.0, 65536.0, 2.0**24]),
            "growth_factor": choice([2.0, 1.7, 4.0]),
            "backoff_factor": choice([0.5, 0.3, 0.9]),
            "growth_interval": self._random.randint(1, 3),
        }
        # torch's scaler refuses float16 gradients.
        dtypes = ["float32"] * 14 + ["float64", "bfloat16", "float16"]
        is_enabled = draw() > 0.04
        return Plan(
            # Which a disabled one does not look at.
            settings if is_enabled else settings | {"init_scale": 0.0, "growth_interval": 0, "growth_factor": 0.5},
            is_enabled,
            [choice(kinds) for _ in self._optimizers],
            [choice(dtypes) for _ in self._optimizers],
            self._calls(),
            draw() < 0.2,
        )

    def loops(self) -> Plan:
        """Return a program without mistakes, as torch's ShardedGradScaler takes it.

        It neither unscales for fused optimizers nor can it be pickled.
        """
        is_fused = self._random.random() < 0.3
        kinds = [self._random.choice(FUSED if is_fused else ["SGD-sparse", "Adam-foreach"]) for _ in self._optimizers]
        left_out = {"judge", "pickle", *["unscale"] * is_fused}
        calls = [call for _ in range(6) for call in (self._scale(), *self._iteration()) if left_out.isdisjoint(call)]
        choice = self._random.choice
        factors = {"growth_factor": choice([2.0, 1.1]), "backoff_factor": choice([0.5, 0.9])}
        settings = {"init_scale": choice([2.0**12, 3000.125]), **factors, "growth_interval": 2}
        return Plan(settings, True, kinds, ["float32"] * len(kinds), calls)

    def scripts(self, shape: tuple[int, ...]) -> Plan:
        """Return a loop of a script that looks at what a scaler keeps of optimizers, and writes to it.

        As apex does, which judges by itself, mosaicml, which unscales twice, and hivemind, which steps later. torch's
        flags are of this shape.
        """
        calls: list[Call] = []
        for _ in range(5):
            calls += [("train", optimizer, self._bad()) for optimizer in self._optimizers]
            for optimizer in self._optimizers:
                calls += [("unscale", optimizer)] * (self._random.random() < 0.5)
                calls += [self._touch(optimizer, shape) for _ in range(self._random.randint(0, 2))]
            calls += [("step", optimizer) for optimizer in self._optimizers]
            calls += [("update",), *(("zero_grad", optimizer, True) for optimizer in self._optimizers)]
        # Fused kernels of torch's take flags without a dimension alone.
        kinds = ["SGD", "AdamW-foreach", *(FUSED if shape == () and len(self._optimizers) > 1 else [])]
        settings = {"init_scale": 2.0**10, "growth_interval": 2}
        chosen = [self._random.choice(kinds) for _ in self._optimizers]
        return Plan(settings, True, chosen, ["float32"] * len(chosen), calls)

    def _touch(self, optimizer: int, shape: tuple[int, ...]) -> Call:
        choice, found = self._random.choice, self._random.choice([0.0, 1.0])
        # torch's cannot add flags of several shapes.
        shapes = [(), (1,)] if len(self._optimizers) == 1 else [shape]
        return choice(
            [
                ("write", optimizer, found, choice(shapes), choice([True, False])),
                *(("refill", optimizer), ("overrule", optimizer, found), ("look", optimizer)),
                *(("begin_anew", optimizer, choice(list(ANEW))), ("replace_states",)),
                ("put_back", optimizer, choice(COPYING), True),
                ("put_back", optimizer, choice(list(COPIES)), False),
                ("put_scale", choice([2.0, 2.0**9]), choice([True, False])),
            ]
        )

    def _scale(self) -> Call:
        choice = self._random.choice
        return "scale", choice(list(CONTAINERS)), choice(DTYPES), choice([(), (1,), (2, 3), (0,)])

    def _bad(self) -> float | None:
        return self._random.choice([None] * 5 + [math.inf, -math.inf, math.nan])

    def _any_call(self) -> Call:
        choice = self._random.choice
        optimizer = choice(self._optimizers)
        number = ("new_scale", choice([512.0, 3000.1, 8.0]), choice(["float", "float32", "float64"]))
        return choice(
            [
                *(self._scale(), self._scale(), ("scale", choice(list(WRONG)), "float32", ())),
                *(("scale_later", choice(["iterator", "set"])), ("consume",)),
                ("regroup", optimizer, choice([0, 1]), choice([True, False])),
                *[("train", optimizer, self._bad())] * 2,
                *[("unscale", optimizer)] * 2,
                *[("step", optimizer)] * 3,
                *[("update",)] * 3,
                *(("zero_grad", optimizer, choice([True, False])), ("step_alone", optimizer), ("clip", optimizer)),
                *(number, ("get_scale",), ("state_dict",), ("pickle",), ("deepcopy",), ("restore",)),
                ("without", optimizer),
                ("load", choice(["saved", "incomplete", "empty"])),
                ("set_growth_factor", choice([2.0, 4.0])),
                ("set_backoff_factor", choice([0.5, 0.25])),
                ("set_growth_interval", choice([1, 2, 3, 4])),
                ("spoil", optimizer, choice([math.inf, math.nan, 7.0])),
                *(("judge", optimizer), ("found", optimizer), ("preset", optimizer), ("step_closure", optimizer)),
                ("train", optimizer, self._bad(), True),
                *(("make_state",), ("put_scale", choice([2.0, 2.0**9]), choice([True, False]))),
                ("assign", *choice(FIRST)),
            ]
        )

    def _calls(self) -> list[Call]:
        draw, calls = self._random.random, []
        for _ in range(self._random.randint(1, 6)):
            if draw() < 0.3:
                calls += [self._any_call() for _ in range(self._random.randint(1, 4))]
            calls += self._iteration()
            if draw() < 0.35:
                self._slip(calls)
        return calls

    def _iteration(self) -> Iterator[Call]:
        draw = self._random.random
        chosen = [optimizer for optimizer in self._optimizers if draw() < 0.9]
        for optimizer in chosen:
            # Some accumulate.
            yield from [("train", optimizer, self._bad())] * (1 if draw() < 0.8 else 2)
        for optimizer in chosen:
            if draw() < 0.05:
                yield "regroup", optimizer, self._random.choice([0, 1]), draw() < 0.5
            if draw() < 0.15:
                yield "judge", optimizer
            if draw() < 0.05:
                yield "preset", optimizer
            if draw() < 0.35:
                yield "unscale", optimizer
            if draw() < 0.1:
                yield "judge", optimizer
            if draw() < 0.3:
                yield "clip", optimizer
        for optimizer in chosen:
            if draw() < 0.9:
                yield "step", optimizer
        yield ("update",) if draw() < 0.93 else ("new_scale", 512.0, "float32")
        for optimizer in chosen:
            if draw() < 0.8:
                yield "zero_grad", optimizer, draw() < 0.6
        if draw() < 0.1:
            yield "exchange", self._random.choice(["state_dict", "pickle"]), draw() < 0.5

    def _slip(self, calls: list[Call]):
        """Leave a call out, make it twice, or exchange two."""
        one, other = (self._random.randrange(len(calls)) for _ in range(2))
        what = self._random.random()
        if what < 0.4:
            del calls[one]
        elif what < 0.7:
            calls.insert(one, calls[one])
        else:
            calls[one], calls[other] = calls[other], calls[one]


# Attributes of torch's, which need a scaler that has no tensors yet, or serve any.
FIRST = [("_init_scale", 8.0), ("_init_growth_tracker", 1), ("_growth_factor", 4.0), ("_backoff_factor", 0.25)]


def delete(states, key: int):
    del states[key]


# How a script lets an optimizer begin its turn again, and how it keeps a state.
ANEW: dict[str, Callable[[Any, int], Any]] = {
    "pop": lambda states, key: states.pop(key, None),
    "del": delete,
    "clear": lambda states, _: states.clear(),
    "fresh": lambda states, key: states.update({key: _refresh_per_optimizer_state()}),
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "method": lambda states: states.copy(),
    "dict": dict,
}
# Of all states: torch's makes no state in a plain dict.
COPYING = ["copy", "deepcopy", "method"]


def own_verdict(optimizer, scaler, is_ready: bool):
    """Unscale the gradients as apex does, and return whether they are bad."""
    gradients = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    if is_ready:
        for gradient in gradients:
            gradient.mul_(scaler._get_scale_async().double().reciprocal().float())
    return torch.logical_not(torch.isfinite(torch.nn.utils.get_total_norm(gradients))).float()


def asks(optimizer, scaler, state, is_ready: bool):
    found = (scaler._check_inf_per_device if is_ready else scaler._found_inf_per_device)(optimizer)
    assert all(flag is state["found_inf_per_device"][device] for device, flag in found.items())
    own_verdict(optimizer, scaler, is_ready)
    return found[torch.device("cpu")]


def has_it_unscaled(optimizer, scaler, state, is_ready: bool):
    if is_ready:
        scaler.unscale_(optimizer)
    assert state["stage"] is OptState.UNSCALED
    return scaler._found_inf_per_device(optimizer)[torch.device("cpu")]


def tells(optimizer, scaler, state, is_ready: bool):
    found = own_verdict(optimizer, scaler, is_ready)
    state["found_inf_per_device"] = {found.device: found}
    return found


def tells_by_device(optimizer, scaler, state, is_ready: bool):
    found = own_verdict(optimizer, scaler, is_ready)
    state["found_inf_per_device"][found.device] = found
    return found


# How optimizers judge that are passed the scaler, as those of apex, Transformer Engine and NeMo.
JUDGES = {"asks": asks, "unscales": has_it_unscaled, "tells": tells, "tells_by_device": tells_by_device}


def asking(base, judge: Callable[..., Any]):
    """Return a kind of optimizer that is passed the scaler."""

    class Asking(base):  # type: ignore[misc]
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):
            state = None if grad_scaler is None else grad_scaler._per_optimizer_states[id(self)]
            if state is not None and judge(self, grad_scaler, state, state["stage"] is OptState.READY).item():
                return "skipped"
            super().step(closure)
            return "stepped"

    return Asking


class Side:
    """A scaler, with a model of two or three parameters for each optimizer; and the other side, once there is one."""

    other: Side

    def __init__(self, make: Callable[..., Any], plan: Plan):
        self._make = functools.partial(make, enabled=plan.enabled)
        self.scaler = self._make(**plan.settings)
        self._generator = torch.Generator().manual_seed(1)
        self._saved: dict[str, Any] | None = None
        self._told: list[gradscale.UpdateReport] = []
        if isinstance(self.scaler, gradscale.GradScaler):
            self.scaler.on_update = self._told.append
        self._later, self._tensors = iter(()), (None, None)
        self.models, self.optimizers = [], []
        for kind, dtype in zip(plan.kinds, plan.dtypes, strict=True):
            shapes = [(3, 2), (2, 2), *[(0,)] * plan.has_empty]
            model = [torch.nn.Parameter(self._normal(shape).to(getattr(torch, dtype))) for shape in shapes]
            self.models.append(model)
            self.optimizers.append(self._optimizer(model, *kind.partition("-")[::2]))
        self._sparse = [kind.endswith("sparse") for kind in plan.kinds]

    def _optimizer(self, model: list[Any], name: str, variant: str):
        base = getattr(torch.optim, name)

        class Counting(base):  # type: ignore[misc]
            """Returns how often it has been called, and what it was given, which it overwrites."""

            calls = 0

            def step(self, closure=None):
                super().step(closure)
                self.calls += 1
                given = [getattr(self, name, None) for name in ("grad_scale", "found_inf")]
                told = [None if one is None else one.clone() for one in given]
                for one in given:
                    if one is not None:
                        one.fill_(7.0)
                return [self.calls, *told, None if closure is None else closure()]

        options = {"momentum": 0.9} if name == "SGD" else {}
        options |= {variant: True} if variant in ("fused", "foreach") else {"foreach": False}
        kind = Counting if variant not in JUDGES else asking(base, JUDGES[variant])
        optimizer = kind(model, lr=0.05, **options)
        if (name, variant) == ("SGD", "fused"):
            # When the first step is skipped in its kernel, its momentum stays uninitialised memory.
            for parameter in model:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    def _normal(self, shape):
        return torch.randn(shape, generator=self._generator)

    def call(self, name: str, *arguments):
        """Call a method of this side, or of its scaler."""
        return getattr(self if hasattr(self, name) else self.scaler, name)(*arguments)

    def scale(self, container: str, dtype: str, shape: tuple[int, ...]):
        make = (CONTAINERS | WRONG)[container]
        given = make(torch.full(shape, 5, dtype=getattr(torch, dtype)))
        scaled = self.scaler.scale(given)
        if scaled is given:
            return "itself"
        if container == "set":
            return sorted(one.sum().real.item() for one in scaled)
        return list(scaled) if container == "iterator" else scaled

    def scale_later(self, container: str):
        self._later = self.scaler.scale(CONTAINERS[container](torch.ones(())))
        return iter(self._later) is self._later

    def consume(self):
        return next(self._later, None)

    def regroup(self, index: int, place: int, is_new: bool):
        """Take a parameter out of its optimizer, perhaps by a list of its own, or put it back."""
        parameter, optimizer = self.models[index][place], self.optimizers[index]
        for group in optimizer.param_groups:
            if any(one is parameter for one in group["params"]):
                kept = [one for one in group["params"] if one is not parameter]
                group["params"][:] = kept
                group["params"] = kept if is_new else group["params"]
                return
        if is_new:
            optimizer.add_param_group({"params": [parameter]})
        else:
            optimizer.param_groups[0]["params"].append(parameter)

    def train(self, index: int, bad: float | None, by_hand: bool = False):
        first, *others = self.models[index]
        if self._sparse[index]:
            chosen = torch.randint(len(first), (4,), generator=self._generator)
            first = torch.nn.functional.embedding(chosen, first, sparse=True)
        losses = [(each.float() * self._normal(each.shape)).sum() for each in (first, *others)]
        is_known = by_hand and self.scaler.is_enabled() and self.scaler._scale is not None
        scaled = sum(losses) * self.scaler._scale if is_known else self.scaler.scale(sum(losses))
        scaled.backward()
        if bad is not None:
            self.models[index][1].grad[0, 1] = bad
        return scaled

    def unscale(self, index: int):
        return self.scaler.unscale_(self.optimizers[index])

    def step(self, index: int):
        return self.scaler.step(self.optimizers[index])

    def update(self):
        returned = self.scaler.update()
        # Until it is copied, ours tells of each update, also with the scale that a sharded one rounds as torch's.
        assert not self._told or self.scaler.on_update is None or self._told[-1].new_scale == self.scaler.get_scale()
        return returned

    def new_scale(self, value: float, kind: str):
        dtype = getattr(torch, kind)
        return self.scaler.update(value if kind == "float" else torch.full((), value, dtype=dtype))

    def zero_grad(self, index: int, set_to_none: bool):
        self.optimizers[index].zero_grad(set_to_none=set_to_none)

    def step_closure(self, index: int):
        return self.scaler.step(self.optimizers[index], closure=lambda: torch.full((), 7.0))

    def preset(self, index: int):
        # Others take none.
        if getattr(self.optimizers[index], "_step_supports_amp_scaling", False):
            self.optimizers[index].grad_scale = torch.tensor(2.0)

    def step_alone(self, index: int):
        return self.optimizers[index].step()

    def clip(self, index: int):
        chosen = [each for each in self.models[index][self._sparse[index] :] if each.grad is not None]
        return torch.nn.utils.clip_grad_norm_(chosen, 0.5) if chosen else None

    def state_dict(self):
        self._saved = self.scaler.state_dict()
        return self._saved

    def load(self, what: str):
        saved = {"saved": self._saved or SAVED, "incomplete": {"scale": 64.0}, "empty": {}}[what]
        return self.scaler.load_state_dict(dict(saved))

    def restore(self):
        state = self.scaler.state_dict()
        self.scaler = self._make()
        self.scaler.load_state_dict(state)

    def pickle(self):
        self.scaler = pickle.loads(pickle.dumps(self.scaler))

    def deepcopy(self):
        self.scaler = copy.deepcopy(self.scaler)

    def saved(self, how: str):
        """Return what torch's safe loading makes of a saved state, or what is pickled of one."""
        if how == "pickle":
            return pickle.loads(pickle.dumps(self.scaler.__getstate__()))
        file = io.BytesIO()
        torch.save(self.scaler.state_dict(), file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def exchange(self, how: str, is_new: bool):
        """Go on with what the other side has saved, in a new scaler or in this one."""
        kept = self.other.saved(how)
        if is_new:
            self.scaler = self._make() if how == "state_dict" else type(self.scaler).__new__(type(self.scaler))
        load = self.scaler.load_state_dict if how == "state_dict" else self.scaler.__setstate__
        load(kept)
        return kept if how == "state_dict" else self.scaler._device

    def spoil(self, index: int, value: float):
        gradient = self.models[index][0].grad
        if gradient is not None:
            (gradient._values() if gradient.is_sparse else gradient).view(-1)[0] = value

    def without(self, index: int):
        self.models[index][0].grad = None

    def judge(self, index: int, name: str = "_check_inf_per_device"):
        found = getattr(self.scaler, name)(self.optimizers[index])
        return {str(device): flag for device, flag in found.items()}

    def found(self, index: int):
        return self.judge(index, "_found_inf_per_device")

    # What scripts do with the states of optimizers.

    def _states(self, index: int):
        return self.scaler._per_optimizer_states, id(self.optimizers[index])

    def write(self, index: int, found: float, shape: tuple[int, ...], is_whole: bool):
        states, key = self._states(index)
        written = {"stage": OptState.UNSCALED, "found_inf_per_device": {torch.device("cpu"): torch.full(shape, found)}}
        if is_whole:
            states[key] = written
        else:
            states[key].update(written)

    def refill(self, index: int):
        states, key = self._states(index)
        states[key]["stage"] = OptState.READY
        for parameter in self.models[index]:
            parameter.grad = torch.ones_like(parameter) * self.scaler._scale

    def overrule(self, index: int, found: float):
        flags = self.scaler._found_inf_per_device(self.optimizers[index])
        for flag in flags.values():
            flag.fill_(found)
        return len(flags)

    def begin_anew(self, index: int, way: str):
        ANEW[way](*self._states(index))

    def replace_states(self):
        self.scaler._per_optimizer_states = collections.defaultdict(_refresh_per_optimizer_state)

    def put_back(self, index: int, how: str, is_all: bool):
        states, key = self._states(index)
        kept = COPIES[how](states) if is_all else COPIES[how](states[key])
        states.pop(key, None)
        if is_all:
            self.scaler._per_optimizer_states = kept
        else:
            states[key] = kept

    def look(self, index: int):
        states, key = self._states(index)
        # What was read can be set again.
        self.scaler._per_optimizer_states = states
        other = states.setdefault(1, _refresh_per_optimizer_state() | {"stage": OptState.STEPPED})
        told = [key in states, states.get(2), states.pop(2, 5), len(states), other["stage"], states.pop(1)["stage"]]
        return [*told, states[key]["stage"], states.get(key)["stage"], copy.deepcopy(states)[1]["stage"]]

    def make_state(self):
        if self.scaler._scale is None:
            self.scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))

    def assign(self, name: str, value: float):
        setattr(self.scaler, name, value)

    def put_scale(self, value: float, in_place: bool):
        if self.scaler._scale is None:
            self.scaler._scale, self.scaler._growth_tracker = torch.tensor(value), torch.tensor(0, dtype=torch.int32)
        elif in_place:
            self.scaler._scale.fill_(value)
        else:
            self.scaler._scale = torch.tensor(value)

    def seen(self):
        return {
            "scale": self.scaler.get_scale(),
            "tracker": self.scaler._get_growth_tracker(),
            "parameters": self.models,
            "gradients": [[parameter.grad for parameter in model] for model in self.models],
            "optimizers": [
                [dict(optimizer.state.get(parameter, {})) for parameter in model]
                for model, optimizer in zip(self.models, self.optimizers, strict=True)
            ],
            "attributes": [hasattr(each, name) for each in self.optimizers for name in ("grad_scale", "found_inf")],
            "private": self._private() if self.scaler.is_enabled() else None,
        }

    def _private(self):
        """Return the tensors of the state, and each optimizer's stage and verdicts, without making an entry."""
        tensors = self.scaler._scale, self.scaler._growth_tracker
        seen: list[Any] = [tensors]
        if not isinstance(self.scaler, TorchShardedScaler):
            # Frameworks and captured graphs hold them; torch's sharded scaler makes others.
            seen.append([one is before for one, before in zip(tensors, self._tensors, strict=True)])
        self._tensors = tensors
        for optimizer in self.optimizers:
            state = self.scaler._per_optimizer_states.get(id(optimizer))
            found = {} if state is None else state["found_inf_per_device"]
            told = {str(device): flag.item() for device, flag in found.items()}
            seen.append(("READY" if state is None else state["stage"].name, told))
        return seen

    def try_to(self, call: Call):
        try:
            return self.call(*call), None
        except Exception as error:
            return None, error


class Known:
    """What differs on purpose, and so is not called."""

    def __init__(self, plan: Plan, theirs: Side):
        self._plan, self._theirs = plan, theirs
        self._is_loaded = self._is_looked_at = self._is_under_way = False

    def differs(self, name: str, *arguments) -> bool:
        """Return whether a call is left out, and note one that is not."""
        scaler = self._theirs.scaler
        if self._plan.enabled and self._is_other(scaler, name, *arguments):
            return True
        if not self._plan.enabled:
            # Its private methods fail, and it has no settings.
            return name.startswith("set_") or name in ("assign", "put_scale", "make_state", "judge", "found")
        self._is_under_way = name in ("scale", "train") or (self._is_under_way and name not in ("update", "new_scale"))
        is_scaled = name == "train" and True not in arguments
        loads = ("load", "restore", "pickle", "deepcopy", "exchange", *(["assign"] if scaler._scale is None else []))
        self._is_loaded = name in loads or (self._is_loaded and not is_scaled)
        self._is_looked_at = name in ("judge", "found") or (self._is_looked_at and name not in ("update", "new_scale"))
        return False

    def _is_other(self, scaler, name: str, *arguments) -> bool:
        if name == "judge" and (self._plan.kinds[arguments[0]], self._plan.dtypes[arguments[0]]) == TWICE:
            return True
        # torch's does not grow before the next overflow if the run is as long already.
        if name == "set_growth_interval":
            return bool(arguments[0] <= scaler._get_growth_tracker())
        if name == "assign" and arguments[0] == "_init_growth_tracker":
            return bool(arguments[1] >= scaler.get_growth_interval())
        if (scaler._scale is None and name == "new_scale") or (
            self._is_loaded and name in ("unscale", "step", "judge")
        ):
            # Ours needs no loss to know a scale that was loaded or set, and knows no gradients of another one.
            return True
        if name in ("load", "restore", "exchange"):
            # Ours refuses it in the middle of an iteration, where torch's goes on with both scales.
            return self._is_under_way or len(scaler._per_optimizer_states) > 0
        is_sharded = isinstance(scaler, TorchShardedScaler)
        is_fused = name == "step" and self._plan.kinds[arguments[0]].partition("-")[2] in ("fused", *JUDGES)
        if is_fused or (is_sharded and name in ("step", "unscale")):
            # torch's steps a fused optimizer without gradients, and its sharded scaler any.
            groups = self._theirs.optimizers[arguments[0]].param_groups
            return all(parameter.grad is None for group in groups for parameter in group["params"])
        # torch's takes no closure.
        return (name in ("pickle", "deepcopy") and self._is_looked_at) or name == "step_closure"


def assert_same_errors(ours: Exception | None, theirs: Exception | None):
    """Assert that both raised nothing, or errors that one ``except`` catches."""
    assert (ours is None) == (theirs is None), f"ours {ours!r}, torch's {theirs!r}"
    if ours is None or type(ours) is type(theirs):
        return
    if "outputs must be" in str(theirs) or "for this optimizer" in str(theirs):
        assert str(theirs).rstrip(".") in str(ours)
    expected = next((THEIRS[kind] for kind in THEIRS if isinstance(ours, kind)), ())
    assert isinstance(theirs, (*expected, *type(ours).__bases__)), f"ours {ours!r}, torch's {theirs!r}"


def run_both(plan: Plan, makers: list[Callable[..., Any]]) -> bool:
    """Run a program on both, up to its first error, comparing all that can be seen; return whether there was one."""
    ours, theirs = (Side(make, plan) for make in makers)
    ours.other, theirs.other = theirs, ours
    known = Known(plan, theirs)
    for number, call in enumerate(plan.calls):
        if known.differs(*call):
            continue
        (one, error), (other, their_error) = ours.try_to(call), theirs.try_to(call)
        try:
            assert_same_errors(error, their_error)
            if error is not None:
                assert_same(ours.models, theirs.models)
                return True
            assert_same(one, other)
            assert_same(ours.seen(), theirs.seen())
        except AssertionError as difference:
            difference.add_note(f"call {number}, {call}, of {plan}")
            raise
        if plan.enabled and theirs.scaler.get_scale() < 2.0**-40:
            # Far below torch lets quotients overflow.
            return False
    return False


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("share", [0, *later("ranks", *range(1, 10))])
def test_random_programs_give_torchs_values_and_errors(share: int):
    failed = [run_both(Chance(seed).plan(), MAKERS) for seed in range(share, PROGRAMS, 10)]
    # Both kinds of programs are there.
    assert 0.1 < sum(failed) / len(failed) < 0.9


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("name", "shape"), [("GradScaler", ()), ("ShardedGradScaler", (1,))])
def test_random_scripts_that_touch_the_states_of_optimizers_do_what_they_do_with_torchs(
    classes, name: str, shape: tuple[int, ...]
):
    makers = [functools.partial(make, "cpu") for make in classes[name]]
    failed = [run_both(Chance(seed).scripts(shape), makers) for seed in range(examples(300))]
    assert sum(failed) / len(failed) < 0.9


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_random_loops_with_the_sharded_scaler_are_torchs(classes):
    makers = [functools.partial(make, "cpu") for make in classes["ShardedGradScaler"]]
    failed = [run_both(Chance(seed).loops(), makers) for seed in range(examples(300))]
    assert sum(failed) / len(failed) < 0.5


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_random_loops_of_optimizers_that_are_passed_the_scaler_are_torchs():
    for seed in range(examples(300)):
        plan = Chance(seed).loops()
        kinds = [f"SGD-{random.Random(seed + number).choice(list(JUDGES))}" for number in range(len(plan.kinds))]
        run_both(plan._replace(kinds=kinds), MAKERS)


class Inexact(TorchScaler):  # type: ignore[misc]
    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16: bool):
        return super()._unscale_grads_(optimizer, torch.nextafter(inv_scale, torch.ones(())), found_inf, allow_fp16)


class Silent(TorchScaler):  # type: ignore[misc]
    def step(self, optimizer, *args, **kwargs):
        super().step(optimizer, *args, **kwargs)


@pytest.mark.parametrize("wrong", [Inexact, Silent, functools.partial(GradScaler, backoff_factor=0.25)])
def test_a_difference_is_found(wrong):
    calls: list[Call] = [("train", 0, None), ("step", 0), ("update",), ("train", 0, math.inf), ("step", 0), ("update",)]
    plan = Plan({}, True, ["SGD"], ["float32"], calls)
    assert not run_both(plan, MAKERS)
    with pytest.raises(AssertionError, match="is not"):
        run_both(plan, [functools.partial(wrong, "cpu"), MAKERS[1]])


def test_a_different_error_is_found():
    with pytest.raises(AssertionError, match="KeyError"):
        assert_same_errors(gradscale.CallOrderError(""), KeyError())
    with pytest.raises(AssertionError, match="None"):
        assert_same_errors(gradscale.CallOrderError(""), None)
