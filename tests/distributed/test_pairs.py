"""Two ranks whose programs differ in one call: an error on both, or equal states."""

import contextlib
import copy
import functools
import importlib
import math
import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
from axes import require
from scenarios import SGD
from tiers import examples

import gradscale
from gradscale.testing import ThreadCollectives, run_ranks

# What the gradients are, unscaled.
TRUE = {"A": 1.0, "B": 2.0, "C": 4.0}

pytestmark = pytest.mark.tier("ranks")

RULE = gradscale.SkipSpikes(window=2, of="loss", above=10.0)
Call = tuple[str, *tuple[Any, ...]]
Program = tuple[Call, ...]

STEP = "step"
ITERATION: Program = (("scale",), (STEP, "A"), (STEP, "B"), ("update",))
UNSCALED: Program = (("scale",), ("unscale", "A"), ("unscale", "B"), (STEP, "A"), (STEP, "B"), ("update",))
PROGRAMS: dict[str, Program] = {
    "plain": ITERATION * 2,
    "unscaled": UNSCALED * 2,
    "skips and restarts": (
        *ITERATION,
        *(("overflow", "A"), ("unscale", "A"), (STEP, "A"), (STEP, "B"), ("update",), ("save",)),
        *(("scale",), (STEP, "B"), ("update",), ("load",)),
    ),
    "optimizers of two classes": (
        *(("scale",), (STEP, "A"), (STEP, "C"), ("update",)),
        *(("scale",), ("unscale", "C"), (STEP, "A"), (STEP, "C"), ("update",)),
    ),
    "settings": (
        *(*ITERATION, ("set_growth_interval", 3), ("scale",), (STEP, "A"), ("update", 64.0), ("get_scale",)),
        *ITERATION,
    ),
    "a diagnosis": (*ITERATION, ("diagnose", "A", True), *ITERATION),
    "accumulated": (("scale",), ("scale",), (STEP, "A"), ("update",), ("scale",), ("unscale", "A"), ("update",)),
    "clipped": (("scale",), ("clip", "A", 1.0), (STEP, "A"), ("unscale", "B"), ("update",), *ITERATION),
    "refused": (("refuse", "A"), *ITERATION, ("scale",), ("refuse", "B"), ("unscale", "B"), *ITERATION[1:]),
    "spikes": (*ITERATION, ("spike",), *ITERATION[1:], *ITERATION),
}
CALLS: Program = (
    *((call, optimizer) for call in ("unscale", STEP) for optimizer in TRUE),
    *((call, optimizer) for call in ("overflow", "name", "without_gradients", "refuse") for optimizer in "AB"),
    *((call, "A") for call in ("step_alone", "decline", "last_step", "step_schedule")),
    *(("diagnose", *arguments) for arguments in (("A", False), ("A", True), ("B", True))),
    *(("update", *arguments) for arguments in ((), (4.0,), (65536.0,))),
    *(("set_growth_interval", 2), ("set_growth_interval", 5), ("set_growth_factor", 4.0)),
    *((call,) for call in ("scale", "spike", "get_scale", "save", "load", "copy", "pickle", "join", "construct")),
    *(("clip", optimizer, norm) for optimizer, norm in (("A", 1.0), ("A", 2.0), ("B", 1.0))),
)


class Other(SGD):
    """Of another class."""


def optimizers_of(library: str):
    """Return optimizers that count their steps, the last of another class."""
    if library == "numpy":
        return {"A": SGD(None), "B": SGD(None), "C": Other(None)}
    torch = require("torch")
    kinds = {"A": torch.optim.SGD, "B": torch.optim.SGD, "C": torch.optim.Adagrad}
    made = {name: kind([torch.nn.Parameter(torch.ones(3))], lr=0.1) for name, kind in kinds.items()}
    for optimizer in made.values():
        optimizer.steps = 0
        optimizer.register_step_post_hook(lambda one, *_: setattr(one, "steps", one.steps + 1))
    return made


class Rank:
    """One rank that makes the calls of a program."""

    def __init__(self, group: ThreadCollectives, library: str):
        self.is_torch = library == "torch"
        self.group, self.optimizers = group, optimizers_of(library)
        kind = gradscale.ShardedGradScaler
        if self.is_torch:
            kind = functools.partial(importlib.import_module("gradscale_torch").ShardedGradScaler, "cpu")
        self._xp: Any = require(library)
        self._make = lambda: kind(group=group, growth_interval=2, skip=RULE)
        self.scaler: Any = self._make()
        self.save()

    def _array(self, value: float, *shape: int):
        return self._xp.full(shape, value, dtype=self._xp.float32)

    def call(self, name: str, *arguments):
        """Make one call, of a method here or of the scaler."""
        chosen = [self.optimizers.get(argument, argument) for argument in arguments]
        getattr(self if hasattr(self, name) else self.scaler, name)(*chosen)

    def scale(self, overflow=None):
        factor = float(self.scaler.scale(self._array(1.0)))
        for name, optimizer in self.optimizers.items():
            value = math.inf if optimizer is overflow else TRUE[name] * factor
            self._put(optimizer, [self._array(value, 3)])

    def spike(self):
        self.scaler.scale(self._array(1.0), loss=100.0)

    def _put(self, optimizer, gradients: list[Any]):
        if self.is_torch:
            optimizer.param_groups[0]["params"][0].grad = gradients[0] if gradients else None
        else:
            optimizer.grads = gradients

    def overflow(self, optimizer):
        # The rank that makes the usual calls has it, too, but a good gradient.
        self.scale(optimizer if self.group.rank == 1 else None)

    def without_gradients(self, optimizer):
        self._put(optimizer, [])

    def unscale(self, optimizer):
        self.scaler.unscale_(optimizer)

    def clip(self, optimizer, max_norm: float):
        self.scaler.unscale_(optimizer, max_norm=max_norm, **({} if self.is_torch else {"norm_over": "rank"}))

    def step_alone(self, optimizer):
        optimizer.step()

    def decline(self, optimizer):
        with mock.patch.object(optimizer, "step", return_value=gradscale.NOT_STEPPED):
            self.scaler.step(optimizer)

    def step_schedule(self, optimizer):
        class Schedule:
            def step(self):
                pass

        self.scaler.step_schedule(optimizer, Schedule())

    def diagnose(self, optimizer, gather: bool):
        self.scaler.diagnose(optimizer, gather=gather)

    def name(self, optimizer):
        self.scaler.name(optimizer, "x")

    def save(self):
        self._saved = self.scaler.state_dict(), {name: optimizer.steps for name, optimizer in self.optimizers.items()}

    def load(self):
        # A checkpoint holds the weights, too: what ranks have done differently since it was saved is undone.
        state, steps = self._saved
        self.scaler.load_state_dict(state)
        for name, count in steps.items():
            self.optimizers[name].steps = count

    def copy(self):
        self.scaler = copy.deepcopy(self.scaler)

    def pickle(self):
        self.scaler = pickle.loads(pickle.dumps(self.scaler))
        self.join()

    def join(self):
        self.scaler.set_group(self.group)

    def construct(self):
        self._make()


class Outcome(NamedTuple):
    """How a program ended on one rank."""

    error: BaseException | None
    state: Any
    steps: dict[str, int]
    """By optimizer."""


def outcomes(programs: tuple[Program, Program], library: str) -> list[Outcome]:
    """Return how two programs end, of which each is followed by two usual iterations."""
    ended: dict[int, Outcome] = {}

    def work(group: ThreadCollectives):
        try:
            rank = Rank(group, library)
            for call in (*programs[group.rank], *ITERATION, *ITERATION):
                rank.call(*call)
        except BaseException as error:
            ended[group.rank] = Outcome(error, None, {})
            raise
        steps = {name: optimizer.steps for name, optimizer in rank.optimizers.items()}
        # Each rank's window holds its own losses.
        state = {name: value for name, value in rank.scaler.state_dict().items() if name != "spikes"}
        ended[group.rank] = Outcome(None, state, steps)

    with contextlib.suppress(Exception):
        run_ranks(2, work)
    return [ended[rank] for rank in range(2)]


def variants(program: Program) -> Iterator[tuple[str, Program]]:
    """Yield each program that differs in one call: dropped, exchanged with the next, added or replaced."""
    for place, usual in enumerate(program):
        before, after = program[:place], program[place + 1 :]
        yield f"{place}: without {usual}", before + after
        if after:
            yield f"{place}: {usual} after {after[0]}", (*before, after[0], usual, *after[1:])
        for call in CALLS:
            yield f"{place}: {call} before {usual}", (*before, call, usual, *after)
            if call != usual:
                yield f"{place}: {call} for {usual}", (*before, call, *after)
    for call in CALLS:
        yield f"{call} at the end", (*program, call)


def is_safe(ended: list[Outcome], own_gradients: bool) -> bool:
    """Tell whether both ranks have failed with an error of gradscale, or both are in one state after the same steps."""
    if all(one.error is not None for one in ended):
        return all(isinstance(one.error, gradscale.GradscaleError) for one in ended)
    if any(one.error is not None for one in ended) or ended[0].state != ended[1].state:
        return False
    return own_gradients or ended[0].steps == ended[1].steps


def cases():
    """Return every program on NumPy, and on torch those that it has: it clips sharded gradients alone over a group."""
    of_torch = [pytest.mark.torch, pytest.mark.tier("all")]
    return [
        pytest.param(library, name, marks=of_torch if library == "torch" else ())
        for library in ("numpy", "torch")
        for name in PROGRAMS
        if (library, name) != ("torch", "clipped")
    ]


# Parts, since all pairs of a program take minutes.
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(("library", "name"), cases())
def test_ranks_that_differ_in_one_call_fail_together_or_stay_equal(library: str, name: str, odd: int, part: int):
    usual = PROGRAMS[name]
    for one in outcomes((usual, usual), library):
        assert one.error is None
    pairs = list(variants(usual))[part::4]
    wrong = []
    # A tenth before the last tier, others for each rank.
    step = 1 if examples(10) == 10 else 10
    for what, program in pairs[odd % step :: step]:
        ended = outcomes((program, usual) if odd == 0 else (usual, program), library)
        # A rank may step an optimizer by itself, without the scaler.
        if not is_safe(ended, "step_alone" in what):
            wrong.append((what, ended))
    assert not wrong


def test_ranks_that_end_apart_are_found():
    ended, failed = Outcome(None, {"scale": 4.0}, {"A": 1}), Outcome(gradscale.ScaleDesyncError(""), None, {})
    assert is_safe([ended, ended], False)
    assert is_safe([failed, failed], False)
    for other in (failed, ended._replace(state={"scale": 2.0}), ended._replace(steps={"A": 0})):
        assert not is_safe([ended, other], False)
    assert not is_safe([failed, failed._replace(error=RuntimeError())], False)
