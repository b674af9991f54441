"""What the ranks do in tests of spikes and refused steps: functions of a group, run in every world."""

from __future__ import annotations

import numpy as np
from scenarios import Trainer, loss, raised, rank_and_size

import gradscale

RULE = gradscale.SkipSpikes(window=8, min_values=4, of="loss")
TIMEOUT = 60.0  # seconds


def trained(group, library: str, steps: int = 0, **settings) -> Trainer:
    """Return a trainer of one optimizer with a rule, after usual steps."""
    trainer = Trainer(group, library, 1, **{"timeout": TIMEOUT, "skip": RULE} | settings)
    for _ in range(steps):
        assert iterate(trainer, 1.0).reason == "stepped"
    return trainer


def iterate(
    trainer: Trainer, value: float | None, *, refuses: bool = False, gradient: float = 1.0, explicit: bool = False
):
    """Make one iteration with a loss, or with None on a rank without one; return the report."""
    scaler, (optimizer,), before = trainer.scaler, trainer.optimizers, trainer.steps
    if value is not None:
        scaler.scale(loss(trainer.library.split()[0], value))
    trainer.fill(gradient * scaler.get_scale())
    if refuses:
        scaler.refuse(optimizer)
    if explicit:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    report = scaler.last_step(optimizer)
    assert report.skipped == (trainer.steps == before)
    return report


def bad_on(group, bad_rank: int, reason: str, library: str, explicit: bool):
    """Let one rank see a spike or refuse a step, between usual ones, beside a lower rank that does so, too."""
    rank, size = rank_and_size(group)
    trainer = trained(group, library, 5, init_scale=4.0, growth_interval=1)
    scale = trainer.scaler.get_scale()
    # The last rank is bad as well, of which the lowest is told.
    is_bad = rank in (bad_rank, size - 1)
    value = 50.0 if is_bad and reason == "spike" else 1.0
    report = iterate(trainer, value, refuses=is_bad and reason == "refused", explicit=explicit)
    assert (report.reason, report.by, report.skipped) == (reason, bad_rank, True)
    assert trainer.scaler.get_scale() == scale
    assert iterate(trainer, 1.0).reason == "stepped"
    assert trainer.scaler.get_scale() == 2 * scale
    return trainer.scaler.state_dict()


def counted(group, bad_rank: int):
    """Let one rank have an overflow, see a spike and refuse a step."""
    rank, _ = rank_and_size(group)
    trainer = trained(group, "numpy", 5)
    iterate(trainer, 1.0, gradient=np.inf if rank == bad_rank else 1.0)
    iterate(trainer, 50.0 if rank == bad_rank else 1.0)
    iterate(trainer, 1.0, refuses=rank == bad_rank)
    assert trainer.scaler.counts() == {"taken": 5, "overflow": 1, "spike": 1, "refused": 1}


def without_a_loss(group, library: str):
    """Let the last rank alone have a loss, as in a pipeline."""
    rank, size = rank_and_size(group)
    is_last = rank == size - 1
    backend = {} if library == "torch" else {"backend": library}
    trainer = trained(group, library, policy=gradscale.StaticScale(1.0), **backend)
    for _ in range(5):
        iterate(trainer, 1.0 if is_last else None)
    report = iterate(trainer, 50.0 if is_last else None)
    assert (report.reason, report.by) == ("spike", size - 1)
    return report


OPTIONS = {
    "window=9": {"skip": gradscale.SkipSpikes(window=9)},
    "diagnose='on_overflow'": {"diagnose": "on_overflow"},
    "give_up_after=9": {"give_up_after": 9},
}


def another_option(group, odd_rank: int, said: str) -> str:
    """Give a scaler on one rank another option."""
    rank, _ = rank_and_size(group)
    given = OPTIONS[said] if rank == odd_rank else {}
    error = raised(gradscale.ScaleDesyncError, lambda: trained(group, "numpy", 1, **given), said)
    return str(error).partition("settings: ")[2]


def declined(group, bad_rank: int | None, library: str):
    """Let the optimizer of one rank, or of each, make no step of its own accord; one alone is named to all ranks."""
    rank, size = rank_and_size(group)
    trainer = trained(group, library, 2, init_scale=4.0, growth_interval=3, skip=None)
    scaler, (optimizer,) = trainer.scaler, trainer.optimizers
    trainer.refill(4.0)
    is_declined = bad_rank in (None, rank)
    if is_declined:
        optimizer.step = lambda: gradscale.NOT_STEPPED
    returned = scaler.step(optimizer)
    vars(optimizer).pop("step", None)
    scaler.update()
    report = scaler.last_step(optimizer)
    assert (returned is gradscale.NOT_STEPPED, report.skipped, trainer.steps) == (
        is_declined,
        is_declined,
        3 - is_declined,
    )
    if bad_rank is None:
        assert (report.reason, report.by, scaler.get_scale()) == ("refused", rank, 4.0)
        assert iterate(trainer, 1.0).reason == "stepped"
        assert scaler.get_scale() == 8.0
        return scaler.state_dict()
    error = raised(gradscale.ScaleDesyncError, lambda: iterate(trainer, 1.0), "or its optimizer alone has refused one")
    said = str(error).partition("steps made in the iterations before: ")[2].partition(" (so some")[0]
    others = ", ".join(str(one) for one in range(size) if one != bad_rank)
    assert sorted(said.split(" | ")) == sorted([f"2 on rank {bad_rank}", f"3 on rank {others}"])
    return said


def _guarded_parts(group, library: str, **settings):
    """Return a guard, an optimizer, what sets its gradient from a number, and what returns its weights as bytes."""
    import torch

    import gradscale_torch

    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=library == "torch fused")

    def give_tensor(value: float):
        weight.grad = weight.detach() * value

    # All ranks of torch.distributed, if it is that of this world.
    given = None if isinstance(group, torch.distributed.ProcessGroup) else group
    guard = gradscale_torch.StepGuard(group=given, timeout=TIMEOUT, **settings)
    return guard, optimizer, give_tensor, lambda: weight.detach().view(torch.int16).numpy().tobytes()


def guarded(group, bad_rank: int, bad: str, library: str):
    """Give one rank a bad batch: the weights are to the bit those of a run without it, and the guard can be resumed."""
    rank, size = rank_and_size(group)
    guard, optimizer, give, weights = _guarded_parts(group, library, skip=RULE, give_up_after=2)
    _, plain, give_plain, plain_weights = _guarded_parts(group, library)
    for number in range(12):
        is_bad = number == 7
        is_bad_here = is_bad and rank == bad_rank
        value = 0.1 * (number % 5 + rank + 1)
        guard.scale(loss(library.split()[0], 50.0 if is_bad_here and bad == "spike" else 1.0))
        give(float(bad) if is_bad_here and bad in ("nan", "inf") else value)
        if is_bad_here and bad == "refused":
            guard.refuse(optimizer)
        guard.step(optimizer)
        guard.update()
        if not is_bad:
            give_plain(value)
            plain.step()
        report = guard.last_step(optimizer)
        reason = {"nan": "overflow", "inf": "overflow"}.get(bad, bad)
        assert (report.skipped, report.reason) == ((True, reason) if is_bad else (False, "stepped"))
        assert report.by == (bad_rank if is_bad else None)
        assert weights() == plain_weights()
        # Of each rank the own one.
        guard.load_state_dict(guard.state_dict())
    assert guard.counts() == {"taken": 11, "overflow": 0, "spike": 0, "refused": 0} | {reason: 1}
    # All ranks give up together, whichever of them is to blame.
    for number in range(2):
        give(float("nan") if rank == bad_rank else 1.0)
        guard.scale(loss(library.split()[0], 1.0))
        guard.step(optimizer)
        if number == 1:
            raised(
                gradscale.TrainingStalledError, guard.update, f"first seen by rank {bad_rank}; no weight has changed"
            )
        else:
            guard.update()
    return guard.counts(), size
