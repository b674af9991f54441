"""Train a small float16 language model with FSDP2, FSDP1 or DDP, and gradscale, on any number of ranks.

    torchrun --nproc-per-node 2 examples/train_fsdp.py
    torchrun --nproc-per-node 2 examples/train_fsdp.py --fsdp1 --inject 60:1
    python examples/train_fsdp.py

Three runs from the same weights on the same batches: float32 with DDP; float16 without scaling; float16 with gradscale.
The text, 465 kB about the Python language, comes with Python. Runs on CPUs through gloo, or, where each rank has a
GPU, through NCCL.

Needs, from a clone of gradscale: python -m pip install '.[torch]' --group examples.
"""

from __future__ import annotations

import argparse
import math
import warnings
from typing import Any

from shared.program import program_needs

with program_needs("examples/train_fsdp.py", "torch", "matplotlib"):
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from torch.nn.parallel import DistributedDataParallel

    from gradscale_torch import GradScaler, ShardedGradScaler
    from shared.text import Block, Transformer, draw_windows, load_text, validation_loss
    from shared.text_runs import parse_options, report_runs
    from shared.torch_ranks import Ranks
    from shared.torch_runs import Run, count_zeros, digest, held_gradients

# Large models average their gradient over a million tokens or more, in micro-batches. So does this one, but for speed
# it computes only one of the 1024 in each step. With its share of the loss, 1/1024, many of its gradients fall below
# 6e-8, the smallest float16, although Adam, which divides by the gradient's own size, can learn from them in float32.
MICRO_BATCHES = 1024
LEARNING_RATE = 3e-3
EPSILON = 1e-12  # Adam adds it to the gradient's size; the usual 1e-8 is not far below those gradients
# Short, so that a few hundred steps show the scale grow until float16 overflows; 2000 is usual.
GROWTH_INTERVAL = 10

# FSDP1 says twice that there is nothing to shard on one rank.
warnings.filterwarnings("ignore", message=".*NO_SHARD")


def train(run: Run, options: argparse.Namespace, text: tuple[Tensor, Tensor, str], ranks: Ranks) -> None:
    """Train from the initial weights, and record what comes of it."""
    training, validation, alphabet = text
    torch.manual_seed(options.seed)
    model = shard(Transformer(len(alphabet)).to(ranks.device), run.method, run.dtype, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON)
    # The shards of FSDP2 are DTensors, over whose mesh GradScaler agrees; in DDP every rank holds the same gradients.
    # The shards of FSDP1 are plain tensors, which do not say who must agree.
    kind = ShardedGradScaler if run.method == "FSDP1" else GradScaler
    settings: dict[str, Any] = {"growth_interval": GROWTH_INTERVAL, "enabled": run.is_scaled}
    scaler = kind(ranks.device.type, history_size=options.steps, **settings)
    # FSDP casts the parameters itself; with DDP autocast does.
    is_cast = run.method == "DDP" and run.dtype == torch.float16
    autocast = torch.autocast(ranks.device.type, torch.float16, enabled=is_cast)
    batches = torch.Generator().manual_seed(options.seed)
    for step in run.steps(options, ranks):
        windows = draw_windows(training, batches, ranks)
        is_injected = run.is_scaled and (step, ranks.rank) in options.inject
        with autocast:
            loss = model(windows)
        # DDP averages the gradients before the scaler sees them: what overflows on one rank is seen by all.
        share = math.inf if is_injected and run.method == "DDP" else 1 / MICRO_BATCHES
        scaler.scale(loss * share).backward()
        gradients = held_gradients(model)
        if is_injected and run.method != "DDP":
            # What float16 stores for anything above 65504, in a shard that this rank alone owns.
            next(gradient for gradient in gradients if gradient.numel()).view(-1)[0] = math.inf
        zeros = count_zeros(gradients)
        # Unscales the gradients and steps, or, when any rank has found an overflow, skips on all of them.
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.record(step, scaler.last_step(optimizer), scaler.get_scale(), zeros, loss=loss.item())
    run.history = scaler.history
    with autocast:
        run.values["validation loss"] = [validation_loss(model, validation, batches, ranks)]
    run.is_verified = run.agrees(digest(model, optimizer, scaler))


def shard(model: Transformer, method: str, dtype: torch.dtype, ranks: Ranks) -> nn.Module:
    """Return the model as the method distributes it; the parameters that the optimizer sees stay in float32."""
    is_half = dtype != torch.float32
    if method == "DDP":
        return DistributedDataParallel(model)
    if method == "FSDP1":
        mixed = MixedPrecision(param_dtype=dtype, reduce_dtype=dtype) if is_half else None
        settings: dict[str, Any] = {"device_id": ranks.device, "use_orig_params": True, "mixed_precision": mixed}
        return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **settings)
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype) if is_half else MixedPrecisionPolicy()
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def main(ranks: Ranks) -> int:
    """Make the three runs, report and verify."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = parse_options(parser, ranks)
    ranks.join()
    text, method = load_text(), options.method
    runs = [
        Run("fp32 DDP", "DDP", torch.float32, is_scaled=False),
        Run(f"fp16 {method}, no scaling", method, torch.float16, is_scaled=False),
        Run(f"fp16 {method}, gradscale", method, torch.float16, is_scaled=True),
    ]
    ranks.announce()
    for run in runs:
        train(run, options, text, ranks)
    is_verified = all(run.is_verified for run in runs)
    if ranks.rank == 0:
        report_runs(runs, options, ranks)
        verdict = "verified: weights and scaler state are bit-identical"
        print(verdict if is_verified else "FAILED: weights or scaler state differ", f"on {ranks}", flush=True)
    dist.barrier()  # A rank that fails has torchrun end the others: not while rank 0 still reports.
    return 0 if is_verified else 1


if __name__ == "__main__":
    world = Ranks()
    world.run(main)
