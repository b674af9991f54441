"""What the ranks do in the distributed tests: functions of a group, run in every world.

Everything that a scenario returns is plain Python, so that it can be compared between ranks and sent by pickle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from worlds import Failure

import gradscale
from gradscale import registry
from gradscale.testing import check_collectives

TIMEOUT = 20.0  # seconds
SHAPES = ((3,), (2, 5), ())


class SGD:
    """The smallest optimizer with a ``grads`` tree, and a count of the steps really made."""

    def __init__(self, grads: Any) -> None:
        self.grads = grads
        self.weights = np.ones(4, dtype=np.float32)
        self.steps = 0

    def step(self) -> str:
        """Move the weights by what is the same on every rank, and count."""
        self.weights -= np.float32(0.1)
        self.steps += 1
        return "moved"


def rank_and_size(group: Any) -> tuple[int, int]:
    """Return the rank and size of a communicator, of thread collectives or of a process group of torch."""
    if callable(group.rank):
        return group.rank(), group.size()
    return group.rank, group.size


def begun(group: Any, **settings: Any) -> tuple[int, Any, SGD]:
    """Return the rank, a scaler over the group, and an optimizer."""
    scaler = gradscale.ShardedGradScaler(group=group, timeout=TIMEOUT, **settings)
    return rank_and_size(group)[0], scaler, SGD(None)


def gradients(library: str, value: float = 1.0) -> list[Any]:
    """Return a few gradients of a library, scaled by the default scale."""
    if library == "numpy":
        return [np.full(shape, value * 65536.0, dtype=np.float32) for shape in SHAPES]
    if library == "torch":
        import torch

        return [torch.full(shape, value * 65536.0, dtype=torch.float32) for shape in SHAPES]
    if library == "jax":
        import jax.numpy as jnp

        return [jnp.full(shape, value * 65536.0, dtype=jnp.float32) for shape in SHAPES]
    import array_api_strict

    return [array_api_strict.full(shape, value * 65536.0, dtype=array_api_strict.float32) for shape in SHAPES]


def loss(library: str) -> Any:
    """Return a 0-d float32 of a library."""
    return gradients(library)[-1]


def iterate(scaler: Any, optimizer: SGD, grads: list[Any], library: str = "numpy") -> gradscale.StepReport:
    """Make one whole iteration."""
    scaler.scale(loss(library))
    optimizer.grads = grads
    scaler.step(optimizer)
    scaler.update()
    return scaler.last_step(optimizer)


def overflow_on(group: Any, bad_ranks: list[int], value: float, library: str, explicit: bool) -> dict[str, Any]:
    """Overflow on some ranks in the second of four iterations, with or without an explicit unscale_."""
    rank, scaler, optimizer = begun(group)
    reports = []
    seen_here = []
    for iteration in range(4):
        grads = gradients(library)
        if iteration == 1 and rank in bad_ranks:
            grads[1] = grads[1] * value
        scaler.scale(loss(library))
        optimizer.grads = grads
        if explicit:
            scaler.unscale_(optimizer)
        returned = scaler.step(optimizer)
        scaler.update()
        report = scaler.last_step(optimizer)
        reports.append((report.skipped, report.scale, returned, report.reason))
        seen_here.append(report.local_nonfinite)
    return {
        "seen here": seen_here,
        "reports": reports,
        "state": scaler.state_dict(),
        "weights": optimizer.weights.tobytes(),
        "steps": optimizer.steps,
    }


def empty_on(
    group: Any, empty_ranks: list[int], bad_ranks: list[int], kind: str, library: str = "numpy"
) -> dict[str, Any]:
    """Give some ranks no gradients in three iterations; others may overflow in the second.

    ``kind`` is what they have instead; on "no backend" they are told no library either.
    """
    rank, scaler, optimizer = begun(group, **({} if kind == "no backend" else {"backend": "numpy"}))
    nothing: Any = {"none": [None, None], "zero-size": [np.zeros((0, 3), dtype=np.float32)]}.get(kind, [])
    skipped = []
    for iteration in range(3):
        # A rank without gradients may never have a loss either (the inner stages of a pipeline).
        if rank not in empty_ranks:
            scaler.scale(loss(library))
        is_bad = rank in bad_ranks and iteration == 1
        optimizer.grads = nothing if rank in empty_ranks else gradients(library, np.inf if is_bad else 1.0)
        scaler.step(optimizer)
        scaler.update()
        skipped.append(scaler.last_step(optimizer).skipped)
    return {"skipped": skipped, "scale": scaler.get_scale(), "steps": optimizer.steps}


def drift(group: Any, drifting_rank: int, what: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Let one rank resume from another checkpoint, or be set up differently; then step."""
    rank, _ = rank_and_size(group)
    policy: Any = gradscale.DynamicScale(growth_interval=7 if what == "policy" and rank == drifting_rank else 5)
    if what == "call":
        policy = gradscale.StaticScale(65536.0)
    scaler = gradscale.ShardedGradScaler(group=group, policy=policy, timeout=settings["timeout"])
    saved = scaler.state_dict()
    if rank == drifting_rank:
        saved |= {"scale": {"scale": 32768.0}, "tracker": {"_growth_tracker": 3}}.get(what, {})
    scaler.load_state_dict(saved)
    optimizer = SGD(gradients("numpy"))
    failure = None
    try:
        if what == "call" and rank == drifting_rank:
            # This rank steps an optimizer that the others do not have.
            scaler.scale(np.float32(1.0))
            scaler.step(SGD(gradients("numpy")))
        elif what == "call":
            iterate(scaler, SGD(None), gradients("numpy"))
        scaler.scale(np.float32(1.0))
        scaler.step(optimizer)
    except gradscale.ScaleDesyncError as error:
        failure = Failure.of(error)
    return {"failure": failure, "steps": optimizer.steps}


class Evaluating:
    """An optimizer whose step evaluates a closure."""

    def __init__(self) -> None:
        self.grads: Any = None
        self.steps = 0

    def step(self, closure: Any) -> Any:
        """Evaluate, then count the step."""
        value = closure()
        self.steps += 1
        return value


def closure_overflow(group: Any, bad_rank: int) -> dict[str, Any]:
    """Overflow inside a closure on one rank until the scale has fallen twice."""
    rank, _ = rank_and_size(group)
    scaler = gradscale.ShardedGradScaler(group=group, timeout=20.0)
    optimizer = Evaluating()
    evaluations = []

    def closure() -> float:
        scaled = scaler.scale(np.float32(1.0))
        evaluations.append(float(scaled))
        overflows = rank == bad_rank and scaled > 16384.0
        optimizer.grads = [np.full(3, np.inf if overflows else scaled, dtype=np.float32)]
        return 1.0

    returned = scaler.step(optimizer, closure)
    gradient = optimizer.grads[0].tolist()
    scaler.update()
    report = scaler.last_step(optimizer)
    return {
        "evaluations": evaluations,
        "gradient": gradient,
        "returned": returned,
        "report": tuple(report),
        "scale": scaler.get_scale(),
        "steps": optimizer.steps,
    }


def collectives_conform(group: Any, library: str, repetitions: int) -> str:
    """Run the conformance suite on the group."""
    check_collectives(registry.collectives_for(group, 20.0), gradients(library)[0], repetitions=repetitions)
    return "conforms"


def underflow(group: Any, bad_rank: int) -> dict[str, Any]:
    """Overflow at the minimum scale on one rank: every rank raises, and can go on."""
    rank, _ = rank_and_size(group)
    policy = gradscale.DynamicScale(init_scale=2.0, min_scale=1.0, at_min="raise")
    scaler = gradscale.ShardedGradScaler(group=group, policy=policy, timeout=20.0)
    optimizer = SGD(None)
    raised = []
    for value in (np.nan, np.nan, 1.0):
        try:
            iterate(scaler, optimizer, gradients("numpy", value if rank == bad_rank else 1.0))
            raised.append("")
        except gradscale.ScaleUnderflowError as error:
            raised.append(str(error))
    return {"raised": raised, "state": scaler.state_dict(), "steps": optimizer.steps}


class Trainer:
    """A scaler over a group and its optimizers, of a library: "numpy", "torch", or "torch fused"."""

    def __init__(self, group: Any, library: str, count: int = 2, **settings: Any) -> None:
        settings = {"timeout": TIMEOUT} | settings
        self.library = library
        self._counted: list[Any] = []
        self.scaler: Any
        if library == "numpy":
            self.scaler = gradscale.ShardedGradScaler(group=group, **settings)
        else:
            import gradscale_torch

            self.scaler = gradscale_torch.ShardedGradScaler("cpu", group=group, **settings)
        self.optimizers = [self.optimizer() for _ in range(count)]
        self.refill()

    def optimizer(self) -> Any:
        """Return a new optimizer."""
        if self.library == "numpy":
            return SGD(None)
        import torch

        made = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1, fused=self.library == "torch fused")
        made.register_step_post_hook(lambda *_: self._counted.append(1))
        return made

    @property
    def steps(self) -> int:
        """How many steps the optimizers have really made."""
        return len(self._counted) + sum(getattr(optimizer, "steps", 0) for optimizer in self.optimizers)

    def refill(self, value: float = 1.0) -> None:
        """Call ``scale``, and give every optimizer gradients anew."""
        self.scaler.scale(loss(self.library.split()[0]))
        for optimizer in self.optimizers:
            if self.library == "numpy":
                optimizer.grads = [np.full(3, value, np.float32)]
            else:
                (parameter,) = optimizer.param_groups[0]["params"]
                parameter.grad = parameter.detach().new_full((3,), value)

    def iterate(self, order: tuple[int, ...] = (0, 1), unscales: bool = False, value: float = 1.0) -> None:
        """Make one iteration, with the optimizers in this order."""
        self.refill(value)
        if unscales:
            for index in order:
                self.scaler.unscale_(self.optimizers[index])
        for index in order:
            self.scaler.step(self.optimizers[index])
        self.scaler.update()


def failure_of(call: Callable[[], Any]) -> Failure | None:
    """Return what a call raises; None for nothing."""
    try:
        call()
    except Exception as error:
        return Failure.of(error)
    return None


class Members:
    """Collectives over some threads, each of which holds one of these for every group that it is in."""

    def __init__(self, shared: dict[tuple[Any, int], dict[int, Any]], key: Any, ranks: list[int], rank: int) -> None:
        self.rank, self.size = ranks.index(rank), len(ranks)
        self._shared, self._key, self._calls = shared, key, 0
        self._changed: threading.Condition = shared["changed"]  # type: ignore[index,assignment]

    def start_max(self, x: Any, /) -> Callable[[], Any]:
        """Begin a MAX over the members."""
        place = self._key, self._calls
        self._calls += 1
        with self._changed:
            received = self._shared.setdefault(place, {})
            received[self.rank] = np.array(x, copy=True)
            self._changed.notify_all()

        def finish() -> Any:
            with self._changed:
                assert self._changed.wait_for(lambda: len(received) == self.size, 20.0)
                return np.max(np.stack(list(received.values())), axis=0)

        return finish


def grid_of_threads() -> Callable[[int], list[Members]]:
    """Return what returns, for one of 4 ranks, its row and its column of a grid of 2 x 2 threads."""
    shared: dict[Any, Any] = {"changed": threading.Condition()}

    def groups(rank: int) -> list[Members]:
        row, column = divmod(rank, 2)
        return [
            Members(shared, ("row", row), [2 * row, 2 * row + 1], rank),
            Members(shared, ("column", column), [column, column + 2], rank),
        ]

    return groups
