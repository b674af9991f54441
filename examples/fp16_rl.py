"""Reinforcement learning with an actor in bfloat16, in float16, and in float16 with gradscale, by FSDP2 on any ranks.

    torchrun --nproc-per-node 2 examples/fp16_rl.py
    torchrun --nproc-per-node 2 examples/fp16_rl.py --inject 60:1
    python examples/fp16_rl.py

The policy is sampled by one pass and trained by another, and in half precision the two do not agree on the probability
of what was drawn: by how much, in either dtype, is the first thing that is printed and drawn (arXiv 2510.26788). Then a
small language model learns, by policy gradients, to write many vowels. The text comes with Python. Runs on CPUs through
gloo, or, where each rank has a GPU, through NCCL.

Needs, from a clone of gradscale: python -m pip install '.[torch]' --group examples.
"""

from __future__ import annotations

import argparse
import math

from shared.program import program_needs

with program_needs("examples/fp16_rl.py", "torch", "matplotlib"):
    import torch
    import torch.distributed as dist
    from torch import Tensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from gradscale_torch import ShardedGradScaler
    from shared.policy import Sampler, advantages_of, draw_prompts, learn_text, log_probabilities, share_of_vowels
    from shared.rl_runs import describe, parse_options, report_runs
    from shared.text import Transformer, load_text
    from shared.torch_ranks import Ranks
    from shared.torch_runs import Run, count_zeros, digest, held_gradients

MICRO_BATCHES = 2
LEARNING_RATE = 3e-4
EPSILON = 1e-12  # Adam adds it to the gradient's size; the usual 1e-8 is not far below those of a large batch
MAX_NORM = 1.0
# Short, so that a few hundred steps show the scale grow until float16 overflows; 400 is usual in this field.
GROWTH_INTERVAL = 20
BATCHES_COMPARED = 8  # of which the distribution is shown

Text = tuple[Tensor, Tensor, str]


def train(run: Run, weights: dict[str, Tensor], options: argparse.Namespace, text: Text, ranks: Ranks) -> None:
    """Train from the language model's weights, and record what comes of it."""
    alphabet = text[2]
    actor, sampler = shard(weights, alphabet, run.dtype, ranks), Sampler(alphabet, run.dtype, options.seed, ranks)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=LEARNING_RATE, eps=EPSILON)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=options.steps)
    settings = {"growth_interval": GROWTH_INTERVAL, "history_size": options.steps}
    scaler = ShardedGradScaler(ranks.device.type, enabled=run.is_scaled, **settings)
    batches = torch.Generator().manual_seed(options.seed)
    for step in run.steps(options, ranks):
        sampler.load(actor)
        windows, sampled = sampler.continue_(draw_prompts(text, batches, ranks))
        rewards = share_of_vowels(windows, alphabet)
        advantages = advantages_of(rewards)
        mismatch = 0.0
        parts = zip(*(whole.chunk(MICRO_BATCHES) for whole in (windows, sampled, advantages)), strict=True)
        for some_windows, some_sampled, some_advantages in parts:
            log_p = log_probabilities(actor, some_windows)
            loss = -(some_advantages[:, None] * log_p).mean() / MICRO_BATCHES / options.accumulate
            scaler.scale(loss).backward()
            mismatch += (log_p.detach() - some_sampled).abs().mean().item() / MICRO_BATCHES
        gradients = held_gradients(actor)
        if run.is_scaled and (step, ranks.rank) in options.inject:
            # What float16 stores for anything above 65504, in a shard that this rank alone owns.
            next(gradient for gradient in gradients if gradient.numel()).view(-1)[0] = math.inf
        zeros = count_zeros(gradients)
        scaler.unscale_(optimizer, max_norm=MAX_NORM)  # of all shards; clips without a scale, too
        # Steps, or, when any rank has found an overflow, skips on all of them, and with it the schedule.
        scaler.step(optimizer)
        scaler.step_schedule(optimizer, schedule)
        scaler.update()
        optimizer.zero_grad()
        values = {"reward": rewards.mean().item(), "mismatch": mismatch}
        run.record(step, scaler.last_step(optimizer), scaler.get_scale(), zeros, **values)
    run.history = scaler.history
    has_held = schedule.last_epoch == options.steps - sum(report.skipped for report in run.history)
    run.is_verified = run.agrees(digest(actor, optimizer, scaler, schedule=schedule.last_epoch)) and has_held


@torch.no_grad()
def compare(dtype: torch.dtype, weights: dict[str, Tensor], seed: int, text: Text, ranks: Ranks) -> Tensor:
    """Return |log p(train) - log p(inference)| of characters that the language model writes, of all ranks."""
    alphabet = text[2]
    actor, sampler = shard(weights, alphabet, dtype, ranks), Sampler(alphabet, dtype, seed, ranks)
    sampler.load(actor)
    batches = torch.Generator().manual_seed(seed)
    differences = []
    for _ in range(BATCHES_COMPARED):
        windows, sampled = sampler.continue_(draw_prompts(text, batches, ranks))
        differences.append((log_probabilities(actor, windows) - sampled).abs().flatten().cpu())
    return torch.cat(ranks.all_gather_objects(torch.cat(differences)))


def shard(weights: dict[str, Tensor], alphabet: str, dtype: torch.dtype, ranks: Ranks) -> Transformer:
    """Return the actor: float32 weights in shards, which compute in half precision, and reduce gradients in float32."""
    actor = Transformer(len(alphabet)).to(ranks.device)
    actor.load_state_dict(weights)
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in [*actor.blocks, actor]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return actor


def main(ranks: Ranks) -> int:
    """Compare the passes, make the three runs, report and verify."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = parse_options(parser, ranks)
    ranks.join()
    text = load_text()
    runs = [
        Run("bf16", "FSDP2", torch.bfloat16, is_scaled=False),
        Run("fp16, no scaling", "FSDP2", torch.float16, is_scaled=False),
        Run("fp16, gradscale", "FSDP2", torch.float16, is_scaled=True),
    ]
    ranks.announce()
    weights = learn_text(text, options.text_steps, options.seed, ranks)
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    differences = {name: compare(dtype, weights, options.seed, text, ranks) for name, dtype in dtypes.items()}
    if ranks.rank == 0:
        print("|log p(train) - log p(inference)| of the characters that are drawn, before the first step:")
        for name, found in differences.items():
            print(f"{name}: {describe(found)}", flush=True)
    for run in runs:
        train(run, weights, options, text, ranks)
    is_verified = all(run.is_verified for run in runs)
    if ranks.rank == 0:
        report_runs(runs, differences, options, ranks)
        verdict = f"verified: weights, schedule and scaler state are bit-identical on {ranks}, which skipped as one"
        failed = f"FAILED: weights, schedule, skips or scaler state differ on {ranks}"
        print(verdict if is_verified else failed, flush=True)
    dist.barrier()  # A rank that fails has torchrun end the others: not while rank 0 still reports.
    return 0 if is_verified else 1


if __name__ == "__main__":
    world = Ranks()
    world.run(main)
