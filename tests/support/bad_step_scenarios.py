"""What the ranks do in tests of spikes and refused steps: functions of a group, run in every world."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from scenarios import SGD, raised, rank_and_size

import gradscale
from gradscale import registry

RULE = gradscale.SkipSpikes(window=8, min_values=4, of="loss")
TIMEOUT = 60.0  # seconds


class Counting:
    """A group that counts its messages."""

    def __init__(self, group: Any) -> None:
        (self._group,) = registry.all_collectives_for(group, TIMEOUT)
        self.rank, self.size = self._group.rank, self._group.size
        self.messages = 0

    def start_max(self, x: Any, /) -> Any:
        self.messages += 1
        return self._group.start_max(x)


class Trained:
    """One rank with a scaler of a library, and an optimizer whose scaled gradients are all finite."""

    def __init__(self, group: Any, library: str, **settings: Any) -> None:
        self.library = library
        if library == "torch":
            torch = importlib.import_module("torch")
            parameter = torch.nn.Parameter(torch.zeros(3))
            self.optimizer: Any = torch.optim.SGD([parameter], lr=1.0)
            kind = importlib.import_module("gradscale_torch").ShardedGradScaler
            self.scaler: Any = kind("cpu", group=group, timeout=TIMEOUT, **settings)
        else:
            self.optimizer = SGD(None)
            self.scaler = gradscale.ShardedGradScaler(group=group, timeout=TIMEOUT, **settings)

    def weights(self) -> float:
        """Return what each step moves."""
        if self.library == "torch":
            return float(self.optimizer.param_groups[0]["params"][0].detach()[0])
        return float(self.optimizer.steps)

    def iterate(self, loss: float | None, *, refuses: bool = False, value: float = 1.0, explicit: bool = False) -> Any:
        """Make one iteration, and return the report and whether the weights moved; None for a rank without a loss."""
        before = self.weights()
        if loss is not None:
            array = np.float32(loss)
            self.scaler.scale(array if self.library != "torch" else importlib.import_module("torch").tensor(array))
        gradients = np.full(3, value * self.scaler.get_scale(), np.float32)
        if self.library == "torch":
            parameter = self.optimizer.param_groups[0]["params"][0]
            parameter.grad = importlib.import_module("torch").from_numpy(gradients)
        else:
            self.optimizer.grads = [gradients]
        if refuses:
            self.scaler.refuse(self.optimizer)
        if explicit:
            self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        report = self.scaler.last_step(self.optimizer)
        assert report.skipped == (self.weights() == before)
        return report


def bad_on(group: Any, bad_rank: int, reason: str, library: str, explicit: bool) -> Any:
    """Let one rank see a spike or refuse a step, between usual ones, beside a lower rank that does so, too."""
    rank, size = rank_and_size(group)
    trained = Trained(group, library, skip=RULE, init_scale=4.0, growth_interval=1, policy=None)
    for _ in range(5):
        assert trained.iterate(1.0).reason == "stepped"
    scale = trained.scaler.get_scale()
    # The last rank is bad as well, of which the lowest is told.
    is_bad = rank in (bad_rank, size - 1)
    loss = 50.0 if is_bad and reason == "spike" else 1.0
    report = trained.iterate(loss, refuses=is_bad and reason == "refused", explicit=explicit)
    assert (report.reason, report.by, report.skipped) == (reason, bad_rank, True)
    assert trained.scaler.get_scale() == scale
    assert trained.iterate(1.0).reason == "stepped"
    assert trained.scaler.get_scale() == 2 * scale
    return trained.scaler.state_dict()


def gravest(group: Any, library: str) -> Any:
    """Let the first rank see a spike, the second refuse the step and then the last have an overflow."""
    rank, size = rank_and_size(group)
    trained = Trained(group, library, skip=RULE, init_scale=4.0)
    for _ in range(5):
        trained.iterate(1.0)
    refused = trained.iterate(50.0 if rank == 0 else 1.0, refuses=rank == 1)
    value = np.inf if rank == size - 1 else 1.0
    overflow = trained.iterate(50.0 if rank == 0 else 1.0, refuses=rank == 0, value=value)
    assert (refused.reason, refused.by, overflow.reason, overflow.by) == ("refused", 1, "overflow", size - 1)
    assert trained.scaler.get_scale() == 2.0
    return trained.scaler.state_dict()


def without_a_loss(group: Any, library: str) -> Any:
    """Let the last rank alone have a loss, as in a pipeline."""
    rank, size = rank_and_size(group)
    is_last = rank == size - 1
    trained = Trained(group, library, skip=RULE, policy=gradscale.StaticScale(1.0), **_backend(library))
    for _ in range(5):
        trained.iterate(1.0 if is_last else None)
    report = trained.iterate(50.0 if is_last else None)
    assert (report.reason, report.by) == ("spike", size - 1)
    return report


def _backend(library: str) -> dict[str, Any]:
    return {} if library == "torch" else {"backend": library}


def another_rule(group: Any, odd_rank: int) -> str:
    """Let one rank hold another rule."""
    rank, _ = rank_and_size(group)
    rule = gradscale.SkipSpikes(window=9) if rank == odd_rank else RULE
    error = raised(gradscale.ScaleDesyncError, lambda: Trained(group, "numpy", skip=rule).iterate(1.0))
    return str(error)[str(error).index("diagnose=") :].partition(".")[0]


def refused_too_late(group: Any) -> None:
    """Refuse a step of which the other ranks have heard, which is then made."""
    trained = Trained(group, "numpy")
    trained.iterate(1.0)
    trained.scaler.scale(np.float32(1.0))
    trained.optimizer.grads = [np.ones(3, np.float32)]
    trained.scaler.unscale_(trained.optimizer)
    raised(gradscale.CallOrderError, lambda: trained.scaler.refuse(trained.optimizer), "has told the other ranks")
    trained.scaler.step(trained.optimizer)
    assert trained.scaler.last_step(trained.optimizer).reason == "stepped"


def losses_of(rank: int, steps: int) -> Iterator[float]:
    """Return the losses of a rank: noise around levels that jump, equal ones for a while, and rare spikes."""
    generator = np.random.default_rng(rank)
    level = 2.0
    for step in range(steps):
        if generator.random() < 0.002:
            level = float(generator.uniform(0.5, 20.0))
        noise = 0.0 if step % 500 > 400 else generator.normal() * 0.05
        yield float(np.float32(level + noise + (30.0 if generator.random() < 0.01 else 0.0)))


def decisions(group: Any, library: str, steps: int) -> list[tuple[str, int | None]]:
    """Return how each of many steps with other losses on each rank ended; one message each."""
    counting = Counting(group)
    trained = Trained(counting, library, skip=RULE, policy=gradscale.StaticScale(1.0))
    reports = [trained.iterate(loss) for loss in losses_of(counting.rank, steps)]
    # One more compares the versions, unless another scaler has done so.
    assert counting.messages in (steps, steps + 1)
    return [(report.reason, report.by) for report in reports]


def expected(size: int, steps: int) -> list[tuple[str, int | None]]:
    """Return the same from the pure rule, for all ranks in one process."""
    states = [RULE.init(like=np.float32(0.0)) for _ in range(size)]
    found: list[tuple[str, int | None]] = []
    for losses in zip(*(losses_of(rank, steps) for rank in range(size)), strict=True):
        arrays = [np.asarray(loss, np.float32) for loss in losses]
        seen = [rank for rank in range(size) if RULE.judge(states[rank], arrays[rank])]
        skipped = np.asarray(len(seen) > 0)
        states = [RULE.learn(state, loss, skipped=skipped) for state, loss in zip(states, arrays, strict=True)]
        found.append(("spike", seen[0]) if seen else ("stepped", None))
    return found
