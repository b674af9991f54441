"""What the ranks do in the distributed tests: functions of a group, run in every world.

A scenario asserts what its own rank must see, and returns what must be the same on all: plain Python, which can be sent
by pickle.
"""

import importlib
import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import gradscale
from gradscale import registry
from gradscale.core.arithmetic import fingerprint
from gradscale.testing import ThreadCollectives, check_collectives, run_ranks

TIMEOUT = 20.0  # seconds
SHAPES = ((3,), (2, 5), ())
# Libraries that gradscale's own scaler serves.
PLAIN = ("numpy", "mlx", "strict", "jax", "torch plain")


# The nouns, which no text of a guard has; the names of methods are those of a scaler.
OF_A_SCALE = re.compile(r"\b(scale|scales|scaled)\b(?!\()|overflow", re.IGNORECASE)


class SGD:
    """The smallest optimizer with a ``grads`` tree, and a count of the steps really made."""

    def __init__(self, grads):
        self.grads = grads
        self.weights = np.ones(4, dtype=np.float32)
        self.steps = 0

    def step(self, closure=None):
        """Evaluate the closure, if there is one, move the weights by what is the same on every rank, and count."""
        value = "moved" if closure is None else closure()
        self.weights -= np.float32(0.1)
        self.steps += 1
        return value


class Other(SGD):
    """Of another class."""


def rank_and_size(group) -> tuple[int, int]:
    """Return the rank and size of a communicator, of thread collectives or of a process group of torch."""
    if callable(group.rank):
        return group.rank(), group.size()
    return group.rank, group.size


def play(group, scenario: Callable[..., Any], *args):
    """Play another scenario, so that several share the ranks that are started for them."""
    return scenario(group, *args)


def is_mpi(group) -> bool:
    """Tell whether a group is MPI's, and not torch's."""
    return hasattr(group, "Get_name")


def fresh(group):
    """Return another group of the same ranks."""
    return group.Dup() if is_mpi(group) else importlib.import_module("torch.distributed").new_group()


def begun(group, **settings):
    """Return the rank, a scaler over the group, and an optimizer."""
    scaler = gradscale.ShardedGradScaler(group=group, timeout=TIMEOUT, **settings)
    return rank_and_size(group)[0], scaler, SGD(None)


def gradients(library: str, value: float = 1.0):
    """Return a few gradients of a library, scaled by the default scale."""
    xp = importlib.import_module(
        {"strict": "array_api_strict", "jax": "jax.numpy", "mlx": "mlx.core"}.get(library, library.split()[0])
    )
    return [xp.full(shape, value * 65536.0, dtype=xp.float32) for shape in SHAPES]


def loss(library: str, value: float = 65536.0):
    """Return a 0-d float32 of a library."""
    return gradients(library, value / 65536.0)[-1]


def iterate(scaler, optimizer: SGD, grads: list[Any]) -> gradscale.StepReport:
    """Make one whole iteration."""
    scaler.scale(np.float32(1.0))
    optimizer.grads = grads
    scaler.step(optimizer)
    scaler.update()
    return scaler.last_step(optimizer)


def raised(kind: type[Exception], call: Callable[[], Any], *said: str) -> Exception:
    """Return what a call raises, after asserting that it is of this kind and says these texts."""
    found = None
    try:
        call()
    except kind as error:
        found = error
    assert found is not None, f"nothing was raised, where {kind.__name__} should say {said}"
    missing = [text for text in said if text not in str(found)]
    assert not missing, f"{found}\ndoes not say {missing}"
    return found


def behaving(group, how: str):
    """Do well, or as a rank of a test that has to fail."""
    rank, _ = rank_and_size(group)
    if how == "dies" and rank == 1:
        os._exit(0)
    assert how != "raises everywhere"
    assert (how, rank) != ("raises", 1)
    return rank if how == "differs" else 0


# What ranks tell each other beside the group that is tested: files in a folder that they share, whatever they are.


def tell(folder: str, event: str, rank: int):
    """Say that something has happened on a rank."""
    Path(folder, f"{event}-{rank}").touch()


def wait_for(folder: str, event: str, ranks: int):
    """Wait until something has happened on so many ranks."""
    begin = time.monotonic()
    while len(list(Path(folder).glob(f"{event}-*"))) < ranks:
        if time.monotonic() - begin > 60.0:
            msg = f"{ranks} ranks should have said {event!r} within {60.0:g} s, got {sorted(Path(folder).iterdir())}"
            raise AssertionError(msg)
        time.sleep(0.01)


# Steps.


def overflow_on(group, bad_ranks: list[int], value: float, library: str, explicit: bool):
    """Overflow on some ranks in the second of four iterations, with or without an explicit unscale_."""
    rank, _ = rank_and_size(group)
    trainer = Trainer(group, library, 1)
    scaler, (optimizer,) = trainer.scaler, trainer.optimizers
    reasons = []
    for iteration in range(4):
        before, is_bad = trainer.held, iteration == 1
        trainer.refill(value if is_bad and rank in bad_ranks else scaler.get_scale())
        if explicit:
            scaler.unscale_(optimizer)
        returned = scaler.step(optimizer)
        scaler.update()
        report = scaler.last_step(optimizer)
        assert (returned, report.skipped) == ("moved" if library in PLAIN and not is_bad else None, is_bad)
        assert (trainer.held == before) == is_bad
        assert (report.scale, report.local_nonfinite) == (2.0**16 / (1 + (iteration > 1)), is_bad and rank in bad_ranks)
        reasons.append(report.reason)
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (2.0**15, 2)
    return reasons, scaler.state_dict(), trainer.held


def empty_on(group, empty_rank: int, bad_rank: int | None, kind: str, library: str = "numpy"):
    """Give a rank no gradients in three iterations; another one may overflow in the second.

    ``kind`` is what it has instead; on "no backend" it is told no library either.
    """
    rank, scaler, optimizer = begun(group, **({} if kind == "no backend" else {"backend": "numpy"}))
    nothing = {"none": [None, None], "zero-size": [np.zeros((0, 3), dtype=np.float32)]}.get(kind, [])
    counts = []
    for iteration in range(3):
        # A rank without gradients may never have a loss either (the inner stages of a pipeline).
        if rank != empty_rank:
            scaler.scale(loss(library))
        is_bad = rank == bad_rank and iteration == 1
        optimizer.grads = nothing if rank == empty_rank else gradients(library, np.inf if is_bad else 1.0)
        scaler.step(optimizer)
        scaler.update()
        counts.append(scaler.last_step(optimizer).nonfinite)
    has_overflown = bad_rank is not None
    assert counts == [0, 3 * has_overflown, 0]
    assert (scaler.get_scale(), optimizer.steps) == ((2.0**15, 2) if has_overflown else (2.0**16, 3))


def collectives_conform(group, library: str, repetitions: int):
    """Run the conformance suite on the group."""
    check_collectives(registry.collectives_for(group, 20.0), gradients(library)[0], repetitions=repetitions)


# Callbacks.


class Alone:
    """A group of one rank."""

    rank, size = 0, 1

    def start_max(self, x, /):
        """Agree with oneself."""
        return lambda: x


class Around:
    """A group of somebody's own around another one, whose waits have no end."""

    def __init__(self, inner):
        self.rank, self.size, self.inner = inner.rank, inner.size, inner

    def start_max(self, x, /):
        """Send a message."""
        return self.inner.start_max(x)


class Counting(Around):
    """A group that keeps its messages."""

    def __init__(self, group):
        super().__init__(*registry.all_collectives_for(group, TIMEOUT))
        self.sent: list[Any] = []

    def start_max(self, x, /):
        """Send a message."""
        self.sent.append(x)
        return super().start_max(x)


def callbacks_without_a_group(group):
    """Run replicated ranks (DDP) with torch's replacement, which decides alone: what is told is told once."""
    from small_torch import Small

    import gradscale_torch

    rank, _ = rank_and_size(group)
    updates: list[Any] = []
    seen: list[Any] = []
    callbacks = [updates.append, gradscale.callbacks.every_rank(seen.append)]
    run = Small(gradscale_torch.GradScaler("cpu", on_update=callbacks))
    for value in (1.0, math.inf):
        run.iterate(value)
    assert [(report.rank, report.skipped) for report in seen] == [(rank, False), (rank, True)]
    assert len(updates) == 2 * (rank == 0)


# GroupAgreement.


def agreement(group, policy) -> gradscale.GroupAgreement:
    """Return what loops of pure functions agree by."""
    return gradscale.GroupAgreement(group, policy, timeout=TIMEOUT)


def pure_loop(group, bad_rank: int, value: float, library: str):
    """Train eight steps; one rank overflows in the second, and sees spikes in the sixth and the seventh.

    In the seventh the next rank overflows.
    """
    rank, size = rank_and_size(group)
    policy, rule = gradscale.DynamicScale(growth_interval=2), gradscale.SkipSpikes(window=4)
    agree, state, window = agreement(group, policy), policy.init(loss(library)), rule.init(loss(library))
    told, states = [], []
    for step in range(8):
        own_loss = loss(library) * (100.0 if rank == bad_rank and step in (5, 6) else 1.0 + (step in (2, 4)))
        overflows = (rank, step) in ((bad_rank, 1), ((bad_rank + 1) % size, 6))
        _, nonfinite = gradscale.unscale(gradients(library, value if overflows else 1.0), state)
        own = rule.judge(window, own_loss)
        # Whoever judges no spikes is told of none.
        agreed, spike = agree(nonfinite, state, own) if step > 2 else (agree(nonfinite, state), own)
        for got, given in ((agreed, nonfinite), (spike, own)):
            assert (type(got), got.shape, got.dtype) == (type(given), (), given.dtype)
        told.append((int(agreed), bool(spike)))
        state = gradscale.select(spike, state, policy.update(state, nonfinite=agreed))
        window = rule.learn(window, gradscale.select(agreed == 0, own_loss, own_loss * math.nan), skipped=spike)
        states.append(registry.backend_for(state.scale).read(fingerprint(state)))
    # Three gradients are bad at once; the scale grows after two clean steps, and stays as it is at a spike.
    assert told == [(0, False), (3, False), *[(0, False)] * 3, (0, True), (3, False), (0, False)]
    assert [numbers[0] >> 23 for numbers in states] == [127 + x for x in (16, 15, 15, 16, 16, 16, 15, 15)]
    assert int(window.count) == 4
    return states


def differing(group, drifting_rank: int, what: str):
    """Let one rank hold another scale, have another policy, leave out a call or judge no spikes; then agree twice."""
    rank, size = rank_and_size(group)
    drifts = rank == drifting_rank
    agree = agreement(group, gradscale.DynamicScale(growth_interval=7 if what == "policy" and drifts else 5))
    state = gradscale.DynamicScale(init_scale=2.0 if what == "scale" and drifts else 4.0).init(loss("numpy"))
    _, nonfinite = gradscale.unscale(gradients("numpy"), state)
    if what == "call" and drifts:
        # As if this rank had made one call more before.
        agree._calls += 1
    spike = np.zeros((), bool) if what == "spike" and not drifts else None
    # Those who judge no spikes would train on alone.
    said = {"scale": "scale: ", "call": "iteration: ", "policy": "settings: ", "spike": "a GroupAgreement with spike="}
    where = f"rank {rank} of {size}", f" on rank {drifting_rank}"
    raised(gradscale.ScaleDesyncError, lambda: agree(nonfinite, state, spike), said[what], *where)
    raised(gradscale.BackendError, lambda: agree(nonfinite, state, spike), "construct a new GroupAgreement")


def exhaustion(group, bad_rank: int):
    """Overflow on one rank at a minimum that must be raised, and go on."""
    rank, size = rank_and_size(group)
    policy = gradscale.DynamicScale(init_scale=1.0, min_scale=1.0, at_min="raise")
    agree, state = agreement(group, policy), policy.init(loss("numpy"))
    _, bad = gradscale.unscale(gradients("numpy", math.nan if rank == bad_rank else 1.0), state)
    # The number that an error of ranks that differ would name.
    said = "minimum, 1.0", f"rank {rank} of {size} in iteration 0"
    raised(gradscale.ScaleUnderflowError, lambda: agree(bad, state), *said)
    agree(np.zeros((), np.int32), state)


# What other scenarios are made of.


class Trainer:
    """A scaler over a group and its optimizers, of a library: one of ``PLAIN``, "torch", or "torch fused"."""

    def __init__(self, group, library: str, count: int = 2, **settings):
        settings = {"timeout": TIMEOUT} | settings
        self.group, self.library = group, library
        self.scaler: Any
        if library in PLAIN:
            self.scaler = gradscale.ShardedGradScaler(group=group, **settings)
        else:
            import gradscale_torch

            self.scaler = gradscale_torch.ShardedGradScaler("cpu", group=group, **settings)
        self.optimizers = [self.optimizer() for _ in range(count)]

    def optimizer(self, is_other: bool = False) -> Any:
        """Return a new optimizer, perhaps of another class, which counts its steps."""
        if self.library in PLAIN:
            return Other(None) if is_other else SGD(None)
        import torch

        kind = torch.optim.Adagrad if is_other else torch.optim.SGD
        made: Any = kind([torch.nn.Parameter(torch.ones(3))], lr=0.1, fused=self.library == "torch fused")
        made.steps = 0
        made.register_step_post_hook(lambda *_: setattr(made, "steps", made.steps + 1))
        return made

    @property
    def steps(self) -> int:
        """How many steps the optimizers have really made."""
        return sum(optimizer.steps for optimizer in self.optimizers)

    @property
    def held(self) -> list[bytes]:
        """The bits of each optimizer's weights."""
        if self.library in PLAIN:
            return [optimizer.weights.tobytes() for optimizer in self.optimizers]
        weights = [optimizer.param_groups[0]["params"][0].detach() for optimizer in self.optimizers]
        return [weight.numpy().tobytes() for weight in weights]

    def refill(self, value: float = 1.0):
        """Call ``scale``, and give every optimizer gradients anew."""
        self.scaler.scale(loss(self.library.split()[0]))
        self.fill(value)

    def fill(self, value: float):
        """Give every optimizer gradients anew."""
        for optimizer in self.optimizers:
            self.give(optimizer, value)

    def give(self, optimizer, value: float | None):
        """Give an optimizer a gradient, or none."""
        if self.library in PLAIN:
            optimizer.grads = [None if value is None else gradients(self.library, value / 65536.0)[0]]
        else:
            (parameter,) = optimizer.param_groups[0]["params"]
            parameter.grad = None if value is None else parameter.detach().new_full((3,), value)

    def iterate(self, order: tuple[int, ...] = (0, 1), unscales: bool = False, value: float = 1.0):
        """Make one iteration, with the optimizers in this order."""
        self.refill(value)
        if unscales:
            for index in order:
                self.scaler.unscale_(self.optimizers[index])
        for index in order:
            self.scaler.step(self.optimizers[index])
        self.scaler.update()


def grid_of_threads() -> Callable[[int], list[ThreadCollectives]]:
    """Return what returns, for one of 4 ranks, its row and its column of a grid of 2 x 2 threads."""
    made = [run_ranks(2, lambda group: group, timeout=60.0) for _ in range(4)]
    return lambda rank: [made[rank // 2][rank % 2], made[2 + rank % 2][rank // 2]]


WAYS_IN_A_GRID = ["refuse a", "refuse b", "b first", "no loss", "no loss, b first", "closure", "two scalers", "lists"]


def alone_in_a_grid(groups, rank: int, odd_rank: int, way: str):
    """Step two optimizers over two groups, of which one rank refuses a step or has no loss; return whose it was."""
    is_odd, has_loss = rank == odd_rank, "no loss" not in way
    first = gradscale.ShardedGradScaler(group=groups, timeout=TIMEOUT, backend="numpy")
    second = first
    if way in ("two scalers", "lists"):
        over = groups[::-1] if way == "lists" else groups
        second = gradscale.ShardedGradScaler(group=over, timeout=TIMEOUT, backend="numpy")
    a, b = (first, SGD(None)), (second, SGD(None))

    def backward(scaler, optimizer):
        if has_loss or not is_odd:
            scaler.scale(np.float32(1.0))
        optimizer.grads = gradients("numpy")

    for iteration in range(4):
        for scaler, optimizer in (a, b):
            backward(scaler, optimizer)
        if is_odd and has_loss and iteration == 2:
            scaler, optimizer = a if way == "refuse a" else b
            scaler.refuse(optimizer)
        for scaler, optimizer in (a, b)[: 1 if way == "closure" else 2]:
            scaler.unscale_(optimizer)
        for scaler, optimizer in (b, a) if "b first" in way else (a, b):
            closure = (lambda: backward(*b)) if way == "closure" and optimizer is b[1] else None
            scaler.step(optimizer, *[closure] * (closure is not None))
        for scaler in {first, second}:
            scaler.update()
    refused = None if not has_loss else a if way == "refuse a" else b
    for each in (a, b):
        assert each[1].steps == (3 if each is refused else 4)
    return first.counts(), second.counts()
