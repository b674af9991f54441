"""What the ranks do in tests of spikes and refused steps: functions of a group, run in every world."""

import numpy as np
from scenarios import Trainer, loss, raised, rank_and_size

import gradscale

RULE = gradscale.SkipSpikes(window=8, min_values=4, of="loss")
TIMEOUT = 60.0  # seconds


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


def counted(group, bad_rank: int, library: str = "numpy", explicit: bool = False):
    """Let one rank and the last have an overflow, see a spike and refuse a step; the lower is told of."""
    rank, size = rank_and_size(group)
    is_bad, trainer = rank in (bad_rank, size - 1), Trainer(group, library, 1, timeout=TIMEOUT, skip=RULE)
    assert [iterate(trainer, 1.0).reason for _ in range(5)] == ["stepped"] * 5
    iterate(trainer, 1.0, gradient=np.inf if is_bad else 1.0, explicit=explicit)
    spike = iterate(trainer, 50.0 if is_bad else 1.0, explicit=explicit)
    refusal = iterate(trainer, 1.0, refuses=is_bad, explicit=explicit)
    assert [(one.reason, one.by) for one in (spike, refusal)] == [("spike", bad_rank), ("refused", bad_rank)]
    # Neither moves the scale.
    assert trainer.scaler.get_scale() == 2.0**15
    assert trainer.scaler.counts() == {"taken": 5, "overflow": 1, "spike": 1, "refused": 1}


OPTIONS = {
    "window=9": {"skip": gradscale.SkipSpikes(window=9)},
    "diagnose='on_overflow'": {"diagnose": "on_overflow"},
    "give_up_after=9": {"give_up_after": 9},
}


def another_option(group, odd_rank: int, said: str) -> str:
    """Give a scaler on one rank another option."""
    rank, _ = rank_and_size(group)
    trainer = Trainer(group, "numpy", 1, **{"skip": RULE} | (OPTIONS[said] if rank == odd_rank else {}))
    error = raised(gradscale.ScaleDesyncError, lambda: trainer.iterate((0,)), said)
    return str(error).partition("settings: ")[2]


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
    rank, _ = rank_and_size(group)
    guard, optimizer, give, weights = _guarded_parts(group, library, skip=RULE)
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
    return guard.counts()
