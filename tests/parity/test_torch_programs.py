"""Random programs, right and wrong ones, on torch's scaler and ours: the same values and the same kinds of errors."""

from __future__ import annotations

import collections
import copy
import functools
import io
import math
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
from axes import is_torch_2_6
from axes_torch import GradScaler, ShardedGradScaler, TorchScaler, torch
from small_torch import assert_same
from tiers import later
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedScaler

import gradscale

pytestmark = pytest.mark.torch

SAVED = {"scale": 64.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "_growth_tracker": 1}
# The built-in errors by which scripts that were written for torch's scaler may catch ours.
THEIRS = {
    gradscale.CallOrderError: (AssertionError, RuntimeError, AttributeError, TypeError),
    gradscale.StateDictError: (KeyError, RuntimeError),
    gradscale.InvalidTypeError: (TypeError, ValueError, AssertionError),
    gradscale.InvalidValueError: (ValueError,),
}
CPU = torch.device("cpu")
Makers = list[Callable[..., Any]]
MAKERS: Makers = [functools.partial(make, "cpu") for make in (GradScaler, TorchScaler)]
SHARDED: Makers = [functools.partial(make, "cpu") for make in (ShardedGradScaler, TorchShardedScaler)]
# The fused Adagrad of torch 2.6 raises an error with torch's scaler.
FUSED = ["SGD-fused", "Adam-fused", *([] if is_torch_2_6() else ["Adagrad-fused"])]


class Losses(list):  # type: ignore[type-arg]
    """A list of the user's."""


OTHER = torch.tensor(-2.0)
# What holds a loss, and what is no loss.
CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda loss: loss,
    "list": lambda loss: [loss, OTHER],
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
# How a script lets an optimizer begin its turn again.
ANEW: dict[str, Callable[[Any, int], Any]] = {
    "pop": lambda states, key: states.pop(key, None),
    "del": lambda states, key: states.__delitem__(key),
    "clear": lambda states, _: states.clear(),
    "fresh": lambda states, key: states.update({key: _refresh_per_optimizer_state()}),
}
Call = tuple[str, *tuple[Any, ...]]
Choices = dict[str, list[Sequence[Any]]]
BOTH, FLAGS, BAD = [True, False], [0.0, 1.0], [None] * 5 + [math.inf, -math.inf, math.nan]
SCALES = [[2.0, 2.0**9], BOTH]
# What may be called of one optimizer, and what its further arguments are drawn from.
OF_ONE: Choices = {
    "regroup": [[0, 1], BOTH],
    "train": [BAD, [False, False, True]],
    "zero_grad": [BOTH],
    "spoil": [[math.inf, math.nan, 7.0]],
    **{name: [] for name in ("unscale_", "step", "step_alone", "clip", "without")},
    **{name: [] for name in ("_check_inf_per_device", "_found_inf_per_device")},
}
OF_ALL: Choices = {
    "scale": [
        [*CONTAINERS, *CONTAINERS, *WRONG],
        ("float16", "bfloat16", "float32", "float64", "complex64", "int32", "int64", "uint8", "bool"),
        [(), (1,), (2, 3), (0,)],
    ],
    "new_scale": [[512.0, 3000.1, 8.0], ["float", "float32", "float64"]],
    "exchange": [["state_dict", "pickle"], BOTH, BOTH],
    "load": [["saved", "incomplete", "empty"]],
    "set_growth_factor": [[2.0, 4.0]],
    "set_backoff_factor": [[0.5, 0.25]],
    "set_growth_interval": [[1, 2, 3, 4]],
    "put_scale": SCALES,
    # Attributes of torch's, which need a scaler that has no tensors yet, or serve any.
    "assign": [[("_init_scale", 8.0), ("_growth_factor", 4.0), ("_backoff_factor", 0.25)]],
    **{name: [] for name in ("consume", "update", "get_scale", "state_dict", "make_state")},
}
OFTEN = ["scale", "scale", "consume", "train", "train", "unscale_", "step", "step", "update", "update"]
# What scripts do with the states of optimizers.
TOUCHES: Choices = {
    "write": [FLAGS, [()], BOTH],
    "overrule": [FLAGS],
    "begin_anew": [[*ANEW]],
    "put_back": [["copy", "deepcopy"], BOTH],
    **{name: [] for name in ("refill", "look", "replace_states")},
}


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

    def _several(self, choices: list[str]) -> list[str]:
        return [self._random.choice(choices) for _ in self._optimizers]

    def plan(self) -> Plan:
        draw, choice = self._random.random, self._random.choice
        settings = {
            "init_scale": choice([2.0**-10, 0.375, 1.0, 2.0, 3.75, 1000.0, 65536.0, 2.0**24]),
            "growth_factor": choice([2.0, 1.7, 4.0]),
            "backoff_factor": choice([0.5, 0.3, 0.9]),
            "growth_interval": self._random.randint(1, 3),
        }
        is_enabled = draw() > 0.04
        if not is_enabled:
            # It does not look at them.
            settings |= {"init_scale": 0.0, "growth_interval": 0, "growth_factor": 0.5}
        kinds = self._several(["SGD", "Adam", "AdamW-foreach", "SGD-foreach", "SGD-sparse", *FUSED])
        # torch's scaler refuses float16 gradients.
        dtypes = self._several(["float32"] * 14 + ["float64", "bfloat16", "float16"])
        return Plan(settings, is_enabled, kinds, dtypes, self._calls(), draw() < 0.2)

    def scripts(self, *shape: int) -> Plan:
        """Return a loop of a script that looks at what a scaler keeps of optimizers, and writes to it.

        As apex does, which judges by itself, mosaicml, which unscales twice, and hivemind, which steps later. torch's
        flags are of this shape.
        """
        choice = self._random.choice
        # torch's cannot add flags of several shapes.
        touches = TOUCHES | {"write": [FLAGS, [(), (1,)] if len(self._optimizers) == 1 else [shape], BOTH]}
        calls: list[Call] = []
        for _ in range(5):
            calls += [("train", optimizer, choice(BAD)) for optimizer in self._optimizers]
            for optimizer in self._optimizers:
                calls += [("unscale_", optimizer)] * (self._random.random() < 0.5)
                for _ in range(self._random.randint(0, 2)):
                    name = choice([*touches, "put_scale", "scale", "set_growth_factor"])
                    calls.append(self._drawn(name, optimizer, touches | OF_ALL))
            calls += [("step", optimizer) for optimizer in self._optimizers]
            calls += [("update",), *(("zero_grad", optimizer, True) for optimizer in self._optimizers)]
        # Fused kernels of torch's take flags without a dimension alone.
        kinds = self._several(["SGD", "AdamW-foreach", *(FUSED if not shape and len(self._optimizers) > 1 else [])])
        settings = {
            "init_scale": choice([2.0**12, 3000.125]),
            "growth_interval": 2,
            "growth_factor": choice([2.0, 1.1]),
        }
        calls = [call for call in calls if call[0] != "scale" or call[1] in CONTAINERS]
        return Plan(settings, True, kinds, ["float32"] * len(kinds), calls)

    def _drawn(self, name: str, optimizer: int | None = None, choices: Choices = OF_ONE | OF_ALL) -> Call:
        arguments = [self._random.choice(each) for each in choices[name]]
        chosen = self._random.choice(self._optimizers) if optimizer is None else optimizer
        return (name, *arguments) if name in OF_ALL else (name, chosen, *arguments)

    def _calls(self) -> list[Call]:
        draw, calls = self._random.random, []
        for _ in range(self._random.randint(1, 6)):
            if draw() < 0.3:
                names = [self._random.choice([*OF_ONE, *OF_ALL, *OFTEN]) for _ in range(self._random.randint(1, 4))]
                calls += map(self._drawn, names)
            calls += self._iteration()
            # A slip: a call is left out or made twice, or two are exchanged.
            one, other, what = self._random.randrange(len(calls)), self._random.randrange(len(calls)), draw()
            if what < 0.14:
                del calls[one]
            elif what < 0.25:
                calls.insert(one, calls[one])
            elif what < 0.35:
                calls[one], calls[other] = calls[other], calls[one]
        return calls

    def _iteration(self) -> Iterator[Call]:
        draw = self._random.random
        chosen = [optimizer for optimizer in self._optimizers if draw() < 0.9]
        for optimizer in chosen:
            # Some accumulate.
            yield from [("train", optimizer, self._random.choice(BAD))] * (1 if draw() < 0.8 else 2)
        look = "_check_inf_per_device"
        between = [("regroup", 0.05), (look, 0.15), ("unscale_", 0.35), (look, 0.1), ("clip", 0.3)]
        for optimizer in chosen:
            yield from [self._drawn(name, optimizer) for name, share in between if draw() < share]
        yield from [("step", optimizer) for optimizer in chosen if draw() < 0.9]
        yield ("update",) if draw() < 0.93 else ("new_scale", 512.0, "float32")
        yield from [("zero_grad", optimizer, draw() < 0.6) for optimizer in chosen if draw() < 0.8]
        if draw() < 0.1:
            yield "exchange", self._random.choice(["state_dict", "pickle"]), draw() < 0.5, True


def counting(base):
    """Return a class of optimizers that tell what they were given."""

    class Counting(base):  # type: ignore[misc]
        """Returns how often it has been called, and what it was given, which it overwrites."""

        calls = 0

        def step(self):
            super().step()
            self.calls += 1
            given = [getattr(self, name, None) for name in ("grad_scale", "found_inf")]
            told = [None if one is None else one.clone() for one in given]
            for one in given:
                if one is not None:
                    one.fill_(7.0)
            return [self.calls, *told]

    return Counting


class Side:
    """A scaler, with a model of two or three parameters for each optimizer; and the other side, once there is one."""

    other: Side
    before: dict[str, Any]

    def __init__(self, make: Callable[..., Any], plan: Plan):
        self._make = functools.partial(make, enabled=plan.enabled)
        self.scaler = self._make(**plan.settings)
        self._generator = torch.Generator().manual_seed(1)
        self._saved, self._later, self._tensors = SAVED, iter(()), (None, None)
        self._sparse = [kind.endswith("sparse") for kind in plan.kinds]
        shapes = [(3, 2), (2, 2), *[(0,)] * plan.has_empty]
        self.models = [
            [torch.nn.Parameter(self._normal(shape).to(getattr(torch, dtype))) for shape in shapes]
            for dtype in plan.dtypes
        ]
        self.optimizers = list(map(self._optimizer, self.models, plan.kinds))

    def _optimizer(self, model: list[Any], kind: str):
        name, _, variant = kind.partition("-")
        options: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
        options |= {variant: True} if variant in ("fused", "foreach") else {"foreach": False}
        optimizer = counting(getattr(torch.optim, name))(model, lr=0.05, **options)
        if kind == "SGD-fused":
            # When the first step is skipped in its kernel, its momentum stays uninitialised memory.
            for parameter in model:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    def _normal(self, shape):
        return torch.randn(shape, generator=self._generator)

    def call(self, name: str, *arguments):
        """Call a method of this side, or of its scaler or an optimizer."""
        if hasattr(self, name):
            return getattr(self, name)(*arguments)
        if name in OF_ALL:
            return getattr(self.scaler, name)(*arguments)
        optimizer = self.optimizers[arguments[0]]
        if not hasattr(self.scaler, name):
            return getattr(optimizer, name)(*arguments[1:])
        returned = getattr(self.scaler, name)(optimizer)
        return dict(returned) if isinstance(returned, Mapping) else returned

    def scale(self, container: str, dtype: str, shape: tuple[int, ...]):
        given = (CONTAINERS | WRONG)[container](torch.full(shape, 5, dtype=getattr(torch, dtype)))
        scaled = self.scaler.scale(given)
        if scaled is given:
            return "itself"
        if container == "iterator":
            # It is scaled when it is asked for.
            self._later = scaled
            return iter(scaled) is scaled
        return sorted(one.sum().real.item() for one in scaled) if container == "set" else scaled

    def consume(self):
        return [*self._later]

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
        loss = sum((each.float() * self._normal(each.shape)).sum() for each in (first, *others))
        is_known = by_hand and self.scaler.is_enabled() and self.scaler._scale is not None
        scaled = loss * self.scaler._scale if is_known else self.scaler.scale(loss)
        scaled.backward()
        if bad is not None:
            self.models[index][1].grad[0, 1] = bad
        return scaled

    def new_scale(self, value: float, kind: str):
        return self.scaler.update(value if kind == "float" else torch.full((), value, dtype=getattr(torch, kind)))

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

    def saved(self, how: str):
        """Return what torch's safe loading makes of a saved state, or what is pickled of one."""
        if how == "pickle":
            return pickle.loads(pickle.dumps(self.scaler.__getstate__()))
        file = io.BytesIO()
        torch.save(self.scaler.state_dict(), file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def exchange(self, how: str, is_new: bool, is_others: bool):
        """Go on with what this or the other side has saved, in a new scaler or in this one."""
        kept = (self.other if is_others else self).before
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

    def make_state(self):
        if self.scaler._scale is None:
            self.scaler._lazy_init_scale_growth_tracker(CPU)

    def assign(self, attribute: tuple[str, float]):
        setattr(self.scaler, *attribute)

    def put_scale(self, value: float, in_place: bool):
        if self.scaler._scale is None:
            self.scaler._scale, self.scaler._growth_tracker = torch.tensor(value), torch.tensor(0, dtype=torch.int32)
        elif in_place:
            self.scaler._scale.fill_(value)
        else:
            self.scaler._scale = torch.tensor(value)

    # What scripts do with the states of optimizers.

    def _states(self, index: int):
        return self.scaler._per_optimizer_states, id(self.optimizers[index])

    def write(self, index: int, found: float, shape: tuple[int, ...], is_whole: bool):
        states, key = self._states(index)
        written = {"stage": OptState.UNSCALED, "found_inf_per_device": {CPU: torch.full(shape, found)}}
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

    def replace_states(self, _: int):
        self.scaler._per_optimizer_states = collections.defaultdict(_refresh_per_optimizer_state)

    def put_back(self, index: int, how: str, is_all: bool):
        states, key = self._states(index)
        kept = getattr(copy, how)(states if is_all else states[key])
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

    def seen(self):
        parameters = [(one, each) for one, model in zip(self.optimizers, self.models, strict=True) for each in model]
        return {
            "scale": self.scaler.get_scale(),
            "tracker": self.scaler._get_growth_tracker(),
            "models": [[each, each.grad, dict(optimizer.state.get(each, {}))] for optimizer, each in parameters],
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
        self._is_loaded = self._is_under_way = False

    def differs(self, name: str, *arguments) -> bool:
        """Return whether a call is left out, and note one that is not."""
        if not self._plan.enabled:
            # Its private methods fail, and it has no settings.
            return name.startswith(("set_", "_")) or name in ("assign", "put_scale", "make_state")
        scaler = self._theirs.scaler
        if self._is_other(scaler, name, *arguments):
            return True
        is_end = name in ("update", "new_scale")
        self._is_under_way = name in ("scale", "train") or (self._is_under_way and not is_end)
        loads = name in ("load", "exchange") or (name == "assign" and scaler._scale is None)
        self._is_loaded = loads or (self._is_loaded and not (name == "train" and arguments[2:] != (True,)))
        return False

    def _is_other(self, scaler, name: str, *arguments) -> bool:
        kind, dtype = (each[arguments[0]] if name in OF_ONE else "" for each in (self._plan.kinds, self._plan.dtypes))
        # torch's adds duplicates of float16 in float16, where it judges alone.
        if (name, kind, dtype) == ("_check_inf_per_device", "SGD-sparse", "float16"):
            return True
        # torch's does not grow before the next overflow if the run is as long already.
        if name == "set_growth_interval":
            return bool(arguments[0] <= scaler._get_growth_tracker())
        if (scaler._scale is None and name == "new_scale") or (
            self._is_loaded and name in ("unscale_", "step", "_check_inf_per_device")
        ):
            # Ours needs no loss to know a scale that was loaded or set, and knows no gradients of another one.
            return True
        if name in ("load", "exchange"):
            # Ours refuses it in the middle of an iteration, where torch's goes on with both scales.
            return self._is_under_way or len(scaler._per_optimizer_states) > 0
        is_sharded = isinstance(scaler, TorchShardedScaler)
        is_fused = name == "step" and kind.endswith("fused")
        if is_fused or (is_sharded and name in ("step", "unscale_")):
            # torch's steps a fused optimizer without gradients, and its sharded scaler any.
            groups = self._theirs.optimizers[arguments[0]].param_groups
            return all(parameter.grad is None for group in groups for parameter in group["params"])
        return False


def assert_same_errors(ours: Exception | None, theirs: Exception | None):
    """Assert that both raised nothing, or errors that one ``except`` catches."""
    assert (ours is None) == (theirs is None), f"ours {ours!r}, torch's {theirs!r}"
    if ours is None or type(ours) is type(theirs):
        return
    if "outputs must be" in str(theirs) or "for this optimizer" in str(theirs):
        assert str(theirs).rstrip(".") in str(ours)
    expected = next((THEIRS[kind] for kind in THEIRS if isinstance(ours, kind)), ())
    assert isinstance(theirs, (*expected, *type(ours).__bases__)), f"ours {ours!r}, torch's {theirs!r}"


def run_both(plan: Plan, makers: Makers) -> bool:
    """Run a program on both, up to its first error, comparing all that can be seen; return whether there was one."""
    ours, theirs = (Side(make, plan) for make in makers)
    ours.other, theirs.other = theirs, ours
    known = Known(plan, theirs)
    for number, call in enumerate(plan.calls):
        if known.differs(*call):
            continue
        if call[0] == "exchange":
            ours.before, theirs.before = ours.saved(call[1]), theirs.saved(call[1])
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


# How programs are drawn, of which of torch's scalers, how many each time, and how often one may end with an error.
PROGRAMS: dict[str, tuple[Callable[[Chance], Plan], Makers, int, tuple[float, float]]] = {
    "right and wrong": (Chance.plan, MAKERS, 120, (0.1, 0.9)),
    "scripts": (Chance.scripts, MAKERS, 30, (0.0, 0.9)),
    "sharded scripts": (lambda chance: chance.scripts(1), SHARDED, 30, (0.0, 0.9)),
}


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("share", [0, *later("ranks", *range(1, 5)), *later("all", *range(5, 10))])
@pytest.mark.parametrize("kind", PROGRAMS)
def test_random_programs_give_torchs_values_and_errors(kind: str, share: int):
    draw, makers, number, (fewest, most) = PROGRAMS[kind]
    failed = [run_both(draw(Chance(seed)), makers) for seed in range(share * number, (share + 1) * number)]
    assert fewest <= sum(failed) / number <= most


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
