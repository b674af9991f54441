"""Options of spikes that differ on one rank, and guards of torch's optimizers; lives.py has what steps are skipped."""

import itertools
import math

import pytest
from scenarios import Trainer, loss, raised, rank_and_size
from worlds import agree

import gradscale

RULE = gradscale.SkipSpikes(window=8, min_values=4, of="loss")


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


def guarded(group, bad_rank: int, bad: str, fused: bool):
    """Give one rank a bad batch: the weights are to the bit those of a run without it, and the guard can be resumed."""
    import torch

    import gradscale_torch

    rank, _ = rank_and_size(group)
    # All ranks of torch.distributed, if it is that of this world.
    given = None if isinstance(group, torch.distributed.ProcessGroup) else group
    guard = gradscale_torch.StepGuard(group=given, timeout=60.0, skip=RULE)
    weights = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer, plain = (torch.optim.AdamW([weight], lr=0.1, fused=fused) for weight in weights)
    reason = {"nan": "overflow", "inf": "overflow", "loss": "spike", "norm": "overflow"}.get(bad, bad)
    for number in range(12):
        is_bad = number == 7
        is_bad_here = is_bad and rank == bad_rank
        value = loss("torch", {"spike": 50.0, "loss": math.nan}.get(bad, 1.0) if is_bad_here else 1.0)
        inputs = {"loss": value, "batch": number}
        if number % 2 == 0:
            # As a scaler is called.
            del inputs["loss"]
            guard.scale(value)
        if bad == "norm":
            inputs["norm"] = torch.tensor(math.inf if is_bad_here else 1.0)
        for weight in weights:
            weight.grad = weight.detach() * (0.1 * (number % 5 + rank + 1))
        if is_bad_here and bad in ("nan", "inf"):
            weights[0].grad = weights[0].detach() * float(bad)
        if is_bad_here and bad == "refused":
            guard.refuse(optimizer)
        guard.step(optimizer, **inputs)
        if number % 2 == 0:
            guard.update()
        if not is_bad:
            plain.step()
        report = guard.last_step(optimizer)
        assert (report.iteration, report.batch) == (number + 1, number)
        assert (report.reason, report.by) == ((reason, bad_rank) if is_bad else ("stepped", None))
        assert torch.equal(*(weight.detach().view(torch.int16) for weight in weights))
        # Of each rank the own one.
        guard.load_state_dict(guard.state_dict())
    assert guard.counts() == {"taken": 11, "overflow": 0, "spike": 0, "refused": 0} | {reason: 1}
    return guard.counts()


def test_another_option_on_one_rank_is_named_on_all(world):
    agree(world, another_option, [(rank, said) for rank in range(world.size) for said in OPTIONS])


@pytest.mark.torch
@pytest.mark.tier("ranks")
def test_a_guarded_run_is_to_the_bit_the_run_without_the_bad_batch_of_any_rank(world):
    bad = ["nan", "inf", "spike", "refused", "loss", "norm"]
    agree(world, guarded, itertools.product(range(world.size), bad, [False, True]))
