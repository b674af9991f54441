"""Random programs, right and wrong ones, on torch's scaler and ours: the same values and the same kinds of errors."""

from __future__ import annotations

import copy
import functools
import math
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from axes_torch import GradScaler, TorchScaler, torch
from tiers import examples
from torch_runs import assert_same

import gradscale

pytestmark = pytest.mark.torch

PROGRAMS = 4500
SAVED = {"scale": 64.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "_growth_tracker": 1}
# The built-in errors by which scripts that were written for torch's scaler may catch ours.
THEIRS = {
    gradscale.CallOrderError: (AssertionError, RuntimeError, AttributeError, TypeError),
    gradscale.StateDictError: (KeyError, RuntimeError),
    gradscale.InvalidTypeError: (TypeError, ValueError, AssertionError),
    gradscale.InvalidValueError: (ValueError,),
}

MAKERS: list[Callable[..., Any]] = [functools.partial(make, "cpu") for make in (GradScaler, TorchScaler)]

Call = tuple[str, *tuple[Any, ...]]


class Plan(NamedTuple):
    """What a program runs with."""

    settings: dict[str, Any]
    enabled: bool
    kinds: list[str]
    dtypes: list[str]
    calls: list[Call]


class Chance:
    """Draws programs of one to three optimizers: training loops, with calls in between and slips."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._optimizers = range(self._random.randint(1, 3))

    def plan(self) -> Plan:
        draw, choice = self._random.random, self._random.choice
        kinds = ["SGD", "Adam", "SGD-fused", "Adam-fused", "AdamW", "Adagrad-fused"]
        settings = {
            "init_scale": choice([1.0, 2.0, 3.75, 1000.0, 65536.0, 2.0**24]),
            "growth_factor": choice([2.0, 1.7, 4.0]),
            "backoff_factor": choice([0.5, 0.3, 0.9]),
            "growth_interval": self._random.randint(1, 3),
        }
        # torch's scaler refuses float16 gradients.
        dtypes = ["float32"] * 14 + ["float64", "bfloat16", "float16"]
        return Plan(
            settings,
            draw() > 0.04,
            [choice(kinds) for _ in self._optimizers],
            [choice(dtypes) for _ in self._optimizers],
            self._calls(),
        )

    def _bad(self) -> float | None:
        return self._random.choice([None] * 5 + [math.inf, -math.inf, math.nan])

    def _any_call(self) -> Call:
        choice = self._random.choice
        optimizer = choice(self._optimizers)
        number = ("new_scale", choice([512.0, 3000.1, 8.0]), choice(["float", "float32", "float64"]))
        return choice(
            [
                ("scale", choice(["loss", "list", "nested", "half", "bfloat16", "generator", "number", "None"])),
                *[("train", optimizer, self._bad())] * 2,
                *[("unscale", optimizer)] * 2,
                *[("step", optimizer)] * 3,
                *[("update",)] * 3,
                *(("zero_grad", optimizer, choice([True, False])), ("step_alone", optimizer), ("clip", optimizer)),
                *(number, ("get_scale",), ("state_dict",), ("pickle",), ("deepcopy",), ("without", optimizer)),
                ("load", choice(["saved", "incomplete", "empty"])),
                ("set", "growth_factor", choice([2.0, 4.0])),
                ("set", "backoff_factor", choice([0.5, 0.25])),
                ("set", "growth_interval", choice([1, 2, 3, 4])),
                ("spoil", optimizer, choice([math.inf, math.nan, 7.0])),
                *(("judge", optimizer), ("found", optimizer)),
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
            if draw() < 0.35:
                yield "unscale", optimizer
            if draw() < 0.3:
                yield "clip", optimizer
        for optimizer in chosen:
            if draw() < 0.9:
                yield "step", optimizer
        yield ("update",) if draw() < 0.93 else ("new_scale", 512.0, "float")
        for optimizer in chosen:
            if draw() < 0.8:
                yield "zero_grad", optimizer, draw() < 0.6

    def _slip(self, calls: list[Call]) -> None:
        """Leave a call out, make it twice, or exchange two."""
        one, other = (self._random.randrange(len(calls)) for _ in range(2))
        what = self._random.random()
        if what < 0.4:
            del calls[one]
        elif what < 0.7:
            calls.insert(one, calls[one])
        else:
            calls[one], calls[other] = calls[other], calls[one]


class Side:
    """A scaler, with a model of two parameters for each optimizer."""

    def __init__(self, make: Callable[..., Any], plan: Plan) -> None:
        self.scaler = make(enabled=plan.enabled, **plan.settings)
        self._generator = torch.Generator().manual_seed(1)
        self._saved: dict[str, Any] | None = None
        self.models, self.optimizers = [], []
        for kind, dtype in zip(plan.kinds, plan.dtypes, strict=True):
            shapes = (3,), (2, 2)
            model = [torch.nn.Parameter(self._normal(shape).to(getattr(torch, dtype))) for shape in shapes]
            name, _, fused = kind.partition("-")
            options = {"momentum": 0.9} if name == "SGD" else {}
            options |= {"fused": True} if fused else {"foreach": False}
            optimizer = getattr(torch.optim, name)(model, lr=0.05, **options)
            if kind == "SGD-fused":
                # When the first step is skipped in its kernel, its momentum stays uninitialised memory.
                for parameter in model:
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                optimizer.zero_grad()
            self.models.append(model)
            self.optimizers.append(optimizer)

    def _normal(self, shape: Any) -> Any:
        return torch.randn(shape, generator=self._generator)

    def call(self, name: str, *arguments: Any) -> Any:
        return getattr(self, name)(*arguments)

    def scale(self, what: str) -> Any:
        one, other = torch.tensor(1.5), torch.tensor(-2.0)
        outputs = {
            "loss": one,
            "list": [one, other],
            "nested": [(one,), other],
            "half": torch.tensor([1.5], dtype=torch.float16),
            "bfloat16": torch.tensor(1.5, dtype=torch.bfloat16),
            "generator": (each for each in (one, other)),
            "number": 1.5,
            "None": None,
        }[what]
        scaled = self.scaler.scale(outputs)
        return list(scaled) if what == "generator" else scaled

    def train(self, index: int, bad: float | None) -> Any:
        losses = [(parameter.float() * self._normal(parameter.shape)).sum() for parameter in self.models[index]]
        scaled = self.scaler.scale(sum(losses))
        scaled.backward()
        if bad is not None:
            self.models[index][1].grad[0, 1] = bad
        return scaled

    def unscale(self, index: int) -> Any:
        return self.scaler.unscale_(self.optimizers[index])

    def step(self, index: int) -> Any:
        return self.scaler.step(self.optimizers[index])

    def update(self) -> Any:
        return self.scaler.update()

    def new_scale(self, value: float, kind: str) -> Any:
        dtype = getattr(self.torch, kind)
        return self.scaler.update(value if kind == "float" else torch.full((), value, dtype=dtype))

    def zero_grad(self, index: int, set_to_none: bool) -> None:
        self.optimizers[index].zero_grad(set_to_none=set_to_none)

    def step_alone(self, index: int) -> Any:
        return self.optimizers[index].step()

    def clip(self, index: int) -> Any:
        chosen = [parameter for parameter in self.models[index] if parameter.grad is not None]
        return torch.nn.utils.clip_grad_norm_(chosen, 0.5) if chosen else None

    def get_scale(self) -> Any:
        return self.scaler.get_scale()

    def state_dict(self) -> Any:
        self._saved = self.scaler.state_dict()
        return {name: self._saved[name] for name in SAVED if name in self._saved}

    def load(self, what: str) -> Any:
        saved = {"saved": self._saved or SAVED, "incomplete": {"scale": 64.0}, "empty": {}}[what]
        return self.scaler.load_state_dict(dict(saved))

    def pickle(self) -> None:
        self.scaler = pickle.loads(pickle.dumps(self.scaler))

    def deepcopy(self) -> None:
        self.scaler = copy.deepcopy(self.scaler)

    def set(self, name: str, value: float) -> Any:
        return getattr(self.scaler, f"set_{name}")(value)

    def spoil(self, index: int, value: float) -> None:
        gradient = self.models[index][0].grad
        if gradient is not None:
            gradient[0] = value

    def without(self, index: int) -> None:
        self.models[index][0].grad = None

    def judge(self, index: int) -> Any:
        return {str(device): flag for device, flag in self.scaler._check_inf_per_device(self.optimizers[index]).items()}

    def found(self, index: int) -> Any:
        return {str(device): flag for device, flag in self.scaler._found_inf_per_device(self.optimizers[index]).items()}

    def seen(self) -> dict[str, Any]:
        return {
            "scale": self.scaler.get_scale(),
            "tracker": self.scaler._get_growth_tracker(),
            "parameters": self.models,
            "gradients": [[parameter.grad for parameter in model] for model in self.models],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def try_to(self, call: Call) -> tuple[Any, Exception | None]:
        try:
            return self.call(*call), None
        except Exception as error:
            return None, error


class Known:
    """What differs on purpose, and so is not called."""

    def __init__(self, plan: Plan, theirs: Side) -> None:
        self._plan, self._theirs = plan, theirs
        self._is_loaded = self._is_looked_at = self._is_under_way = False

    def differs(self, name: str, *arguments: Any) -> bool:
        """Return whether a call is left out, and note one that is not."""
        scaler = self._theirs.scaler
        if self._plan.enabled and self._is_other(scaler, name, *arguments):
            return True
        if not self._plan.enabled:
            # Its private methods fail, and it has no settings.
            return name in ("set", "judge", "found")
        self._is_under_way = name in ("scale", "train") or (self._is_under_way and name not in ("update", "new_scale"))
        self._is_loaded |= name in ("load", "pickle", "deepcopy")
        self._is_looked_at = name in ("judge", "found") or (self._is_looked_at and name not in ("update", "new_scale"))
        return False

    def _is_other(self, scaler: Any, name: str, *arguments: Any) -> bool:
        if name == "set" and arguments[0] == "growth_interval":
            # torch's does not grow before the next overflow if the run is as long already.
            return bool(arguments[1] <= scaler._get_growth_tracker())
        if scaler._scale is None and (
            name == "new_scale" or (self._is_loaded and name in ("unscale", "step", "judge"))
        ):
            # Ours needs no loss to know a scale that was loaded or set.
            return True
        if name == "load":
            # Ours refuses it in the middle of an iteration, where torch's goes on with both scales.
            return self._is_under_way or len(scaler._per_optimizer_states) > 0
        if name == "step" and "fused" in self._plan.kinds[arguments[0]]:
            # torch's steps a fused optimizer without gradients.
            return all(parameter.grad is None for parameter in self._theirs.models[arguments[0]])
        return name in ("pickle", "deepcopy") and self._is_looked_at


def assert_same_errors(ours: Exception | None, theirs: Exception | None) -> None:
    """Assert that both raised nothing, or errors that one ``except`` catches."""
    assert (ours is None) == (theirs is None), f"ours {ours!r}, torch's {theirs!r}"
    if ours is None or type(ours) is type(theirs):
        return
    expected = next((THEIRS[kind] for kind in THEIRS if isinstance(ours, kind)), ())
    assert isinstance(theirs, (*expected, *type(ours).__bases__)), f"ours {ours!r}, torch's {theirs!r}"


def run_both(plan: Plan, makers: list[Callable[..., Any]]) -> bool:
    """Run a program on both, up to its first error, comparing all that can be seen; return whether there was one."""
    ours, theirs = (Side(make, plan) for make in makers)
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
        if plan.enabled and theirs.scaler.get_scale() < 1.0:
            # There torch lets quotients overflow.
            return False
    return False


@pytest.mark.tier("ranks")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("share", range(10))
def test_random_programs_give_torchs_values_and_errors(share: int) -> None:
    failed = [run_both(Chance(seed).plan(), MAKERS) for seed in range(share, examples(PROGRAMS), 10)]
    # Both kinds of programs are there.
    assert 0.1 < sum(failed) / len(failed) < 0.9


def test_a_difference_is_found() -> None:
    ours, theirs = MAKERS
    calls: list[Call] = [("train", 0, math.inf), ("step", 0), ("update",)]
    plan = Plan({}, True, ["SGD"], ["float32"], calls)
    assert not run_both(plan, MAKERS)
    with pytest.raises(AssertionError):
        run_both(plan, [functools.partial(ours, backoff_factor=0.25), theirs])
    with pytest.raises(AssertionError, match="KeyError"):
        assert_same_errors(gradscale.CallOrderError(""), KeyError())
    with pytest.raises(AssertionError, match="None"):
        assert_same_errors(gradscale.CallOrderError(""), None)
