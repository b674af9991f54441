"""Skip the steps that bad batches would spoil: a small language model in bfloat16, by DDP on any number of ranks.

    torchrun --nproc-per-node 2 examples/spikes.py
    torchrun --nproc-per-node 2 examples/spikes.py --seed 1 --every 150
    python examples/spikes.py

Every 200 steps (--every) the last rank makes a mistake: it sums the loss of its characters, where the others take the
mean. Four runs from the same weights on the same batches: without the mistake; with it; with it and gradients clipped
to a norm of 1; and with it and gradscale.SkipSpikes. The text comes with Python. Runs on CPUs through gloo, or, where
each rank has a GPU, through NCCL.

Needs, from a clone of gradscale: python -m pip install '.[torch]' --group examples.
"""

from __future__ import annotations

import argparse

from shared.program import program_needs

with program_needs("examples/spikes.py", "torch", "matplotlib"):
    import torch
    import torch.distributed as dist
    from torch import Tensor
    from torch.nn.parallel import DistributedDataParallel

    import gradscale
    from gradscale_torch import StepGuard
    from shared.spike_runs import WINDOWS, parse_options, report_runs
    from shared.text import CONTEXT, Transformer, draw_windows, load_text, validation_loss
    from shared.torch_ranks import Ranks
    from shared.torch_runs import Run, digest

LEARNING_RATE = 3e-3
MAX_NORM = 1.0


def train(run: Run, options: argparse.Namespace, text: tuple[Tensor, Tensor, str], ranks: Ranks) -> None:
    """Train from the initial weights, and record what comes of it."""
    training, validation, alphabet = text
    torch.manual_seed(options.seed)
    model = DistributedDataParallel(Transformer(len(alphabet)).to(ranks.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    # Each rank judges its own loss, and all skip together: over a group, although every rank holds all gradients.
    skip = gradscale.SkipSpikes() if run.method == "skip" else None
    guard = StepGuard(max_norm=MAX_NORM if run.method == "clip" else None, skip=skip, history_size=options.steps)
    autocast = torch.autocast(ranks.device.type, torch.bfloat16)
    batches = torch.Generator().manual_seed(options.seed)
    for step in run.steps(options, ranks):
        windows = draw_windows(training, batches, ranks, WINDOWS)
        with autocast:
            loss = model(windows)
        is_bad = run.method != "clean" and (step, ranks.rank) in options.inject
        loss_of_step = loss * len(windows) * CONTEXT if is_bad else loss
        loss_of_step.backward()
        # Steps, or, when the loss of any rank is a spike, skips on all of them.
        guard.step(optimizer, loss=loss_of_step)
        optimizer.zero_grad()
        run.record(step, guard.last_step(optimizer), guard.get_scale(), loss=loss.item())
    run.history = guard.history
    with autocast:
        run.values["validation loss"] = [validation_loss(model, validation, batches, ranks)]
    run.is_verified = run.agrees(digest(model, optimizer, guard))


def main(ranks: Ranks) -> int:
    """Make the four runs, report and verify."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = parse_options(parser, ranks)
    ranks.join()
    text = load_text()
    runs = [
        Run("no bad batch", "clean", torch.bfloat16, is_scaled=False),
        Run("bad batches", "bad", torch.bfloat16, is_scaled=False),
        Run("bad batches, clipped to 1", "clip", torch.bfloat16, is_scaled=False),
        Run("bad batches, SkipSpikes", "skip", torch.bfloat16, is_scaled=True),
    ]
    ranks.announce()
    for run in runs:
        train(run, options, text, ranks)
    is_verified = all(run.is_verified for run in runs)
    if ranks.rank == 0:
        report_runs(runs, options, ranks)
        verdict = f"verified: weights and scaler state are bit-identical on {ranks}, which skipped as one"
        print(verdict if is_verified else f"FAILED: weights, skips or scaler state differ on {ranks}", flush=True)
    dist.barrier()  # A rank that fails has torchrun end the others: not while rank 0 still reports.
    return 0 if is_verified else 1


if __name__ == "__main__":
    world = Ranks()
    world.run(main)
