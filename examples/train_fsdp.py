"""Train a small float16 language model with FSDP2, FSDP1 or DDP, and gradscale, on any number of ranks.

    torchrun --nproc-per-node 2 examples/train_fsdp.py
    torchrun --nproc-per-node 2 examples/train_fsdp.py --fsdp1 --inject 60:1
    python examples/train_fsdp.py

Three runs from the same weights on the same batches: float32 with DDP; float16 without scaling; float16 with gradscale.
The text, 465 kB about the Python language, comes with Python. Runs on CPUs through gloo, or, where each rank has a
GPU, through NCCL.

Needs, from a clone of gradscale: python -m pip install '.[torch,examples]'.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import io
import json
import math
import os
import pydoc_data.topics
import sys
import time
import traceback
import warnings
from collections.abc import Iterable
from itertools import compress, count
from pathlib import Path
from typing import Any, NoReturn

# Ranks share the cores; threads of their own would only be in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from gradscale.extras import program_needs

with program_needs("examples/train_fsdp.py", "torch,examples", "matplotlib"):
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from torch.distributed.tensor import DTensor
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel
    from tqdm import tqdm

    from gradscale_torch import GradScaler, ShardedGradScaler

WIDTH, HEADS, LAYERS, CONTEXT = 32, 4, 2, 64
WINDOWS = 16  # of CONTEXT characters each, in the batch of all ranks: 1024 characters
# Large models average their gradient over a million tokens or more, in micro-batches. So does this one, but for speed
# it computes only one of the 1024 in each step. With its share of the loss, 1/1024, many of its gradients fall below
# 6e-8, the smallest float16, although Adam, which divides by the gradient's own size, can learn from them in float32.
MICRO_BATCHES = 1024
LEARNING_RATE = 3e-3
EPSILON = 1e-12  # Adam adds it to the gradient's size; the usual 1e-8 is not far below those gradients
# Short, so that a few hundred steps show the scale grow until float16 overflows; 2000 is usual.
GROWTH_INTERVAL = 10
VALIDATION_BATCHES = 8

# FSDP1 says twice that there is nothing to shard on one rank.
warnings.filterwarnings("ignore", message=".*NO_SHARD")


def load_text() -> tuple[Tensor, Tensor, int]:
    """Return characters to train on, characters to validate on, and how many different ones there are."""
    manual = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    numbers = {character: number for number, character in enumerate(sorted(set(manual)))}
    characters = torch.tensor([numbers[character] for character in manual])
    cut = len(characters) * 9 // 10
    return characters[:cut], characters[cut:], len(numbers)


class Block(nn.Module):
    """Causal self-attention, then a perceptron, each on the normalised input and added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inputs, self.outputs = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the next block works on, in the shape of ``x``: windows, characters, width."""
        parts = self.inputs(self.attention_norm(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.outputs(attended.transpose(1, 2).flatten(2))
        added: Tensor = self.down(functional.gelu(self.up(self.norm(x))))
        return x + added


class Transformer(nn.Module):
    """A language model of characters, started as GPT-2 is: weights of standard deviation 0.02, biases of zero."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, windows: Tensor) -> Tensor:
        """Return the mean float32 loss, in nats, of every character of the windows but the first."""
        x = self.characters(windows[:, :-1]) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.output(self.norm(x)).float().flatten(0, 1), windows[:, 1:].flatten())


class Ranks:
    """The processes that torchrun has started, or this one alone."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.device = torch.device("cpu")
        if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))

    def __str__(self) -> str:
        return "1 rank" if self.size == 1 else f"{self.size} ranks"

    def join(self) -> None:
        """Make the group of all processes."""
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        settings: dict[str, Any] = {"backend": "gloo"}
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            settings = {"backend": "nccl", "device_id": self.device}
        if "RANK" not in os.environ:
            settings |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
        dist.init_process_group(**settings)

    def all_gather_objects(self, something: Any) -> list[Any]:
        """Return what every rank has passed, in the order of the ranks."""
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, something)
        return gathered

    def stop(self, status: int) -> NoReturn:
        """End this process at once: after a failure torchrun ends the others, which may wait for it."""
        sys.stdout.flush()
        os._exit(status)


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


@dataclasses.dataclass
class Run:
    """One of the three runs: its settings, and what came of it."""

    name: str
    method: str
    dtype: torch.dtype
    is_scaled: bool
    scales: list[float] = dataclasses.field(default_factory=list)
    skipped: list[int] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    zeros: list[float] = dataclasses.field(default_factory=list)
    validation_loss: float = math.nan
    seconds: float = math.nan
    is_verified: bool = False


def train(run: Run, options: argparse.Namespace, text: tuple[Tensor, Tensor, int], ranks: Ranks) -> None:
    """Train from the initial weights, and fill in what came of it."""
    training, validation, characters = text
    torch.manual_seed(options.seed)
    model = shard(Transformer(characters).to(ranks.device), run.method, run.dtype, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON)
    # The shards of FSDP2 are DTensors, over whose mesh GradScaler agrees; in DDP every rank holds the same gradients.
    # The shards of FSDP1 are plain tensors, which do not say who must agree.
    kind = ShardedGradScaler if run.method == "FSDP1" else GradScaler
    scaler = kind(ranks.device.type, growth_interval=GROWTH_INTERVAL, enabled=run.is_scaled)
    injections = options.inject if run.is_scaled else []
    # FSDP casts the parameters itself; with DDP autocast does.
    is_cast = run.method == "DDP" and run.dtype == torch.float16
    autocast = torch.autocast(ranks.device.type, torch.float16, enabled=is_cast)
    batches = torch.Generator().manual_seed(options.seed)
    begin = time.perf_counter()
    progress = tqdm(total=options.steps, desc=f"{run.name:22}", file=sys.stdout, ncols=100, disable=ranks.rank != 0)
    for step in range(1, options.steps + 1):
        windows = draw_windows(training, batches, ranks)
        is_injected = (step, ranks.rank) in injections
        with autocast:
            loss = model(windows)
        # DDP averages the gradients before the scaler sees them: what overflows on one rank is seen by all.
        share = math.inf if is_injected and run.method == "DDP" else 1 / MICRO_BATCHES
        scaler.scale(loss * share).backward()
        # What this rank holds: its shards, or in DDP all gradients.
        held = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        gradients = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in held]
        if is_injected and run.method != "DDP":
            # What float16 stores for anything above 65504, in a shard that this rank alone owns.
            next(gradient for gradient in gradients if gradient.numel()).view(-1)[0] = math.inf
        counts = sum(int((part == 0).sum()) for part in gradients), sum(part.numel() for part in gradients)
        # Unscales the gradients and steps, or, when any rank has found an overflow, skips on all of them.
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        report = scaler.last_step(optimizer)
        outcomes = ranks.all_gather_objects((loss.item(), counts, report.local_nonfinite > 0, report.skipped))
        losses, all_counts, saw, skipped = zip(*outcomes, strict=True)
        run.losses.append(sum(losses) / ranks.size)
        run.zeros.append(sum(zeros for zeros, _ in all_counts) / sum(total for _, total in all_counts))
        run.scales.append(report.scale)
        if any(skipped):
            run.skipped.append(step)
            change = f"2^{math.log2(report.scale):g} -> 2^{math.log2(scaler.get_scale()):g}"
            if ranks.rank == 0:
                tqdm.write(skip_line(step, [rank for at, rank in injections if at == step], saw, skipped, change))
        progress.set_postfix_str(f"loss {run.losses[-1]:.3f}", refresh=False)
        progress.update()
    progress.close()
    run.seconds = time.perf_counter() - begin
    with torch.no_grad(), autocast:
        loss = sum(model(draw_windows(validation, batches, ranks)).item() for _ in range(VALIDATION_BATCHES))
    run.validation_loss = sum(ranks.all_gather_objects(loss)) / (ranks.size * VALIDATION_BATCHES)
    run.is_verified = len(set(ranks.all_gather_objects(digest(model, optimizer, scaler)))) == 1


def draw_windows(text: Tensor, batches: torch.Generator, ranks: Ranks) -> Tensor:
    """Return this rank's part of a batch, which every rank draws alike: windows, characters."""
    starts = torch.randint(len(text) - CONTEXT, (WINDOWS,), generator=batches)
    mine = starts[ranks.rank :: ranks.size][: WINDOWS // ranks.size]
    return text[mine[:, None] + torch.arange(CONTEXT + 1)].to(ranks.device)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler | ShardedGradScaler) -> str:
    """Return a hash of the weights, gathered from all shards, of the scaler's state and of the optimizer's steps.

    The latter because a rank that skipped alone would gather the same weights as the others.
    """
    weights: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    values = b"".join(weight.cpu().numpy().tobytes() for _, weight in sorted(weights.items()))
    steps = sorted({float(state["step"]) for state in optimizer.state.values()})
    return hashlib.sha256(values + json.dumps([scaler.state_dict(), steps], sort_keys=True).encode()).hexdigest()


def skip_line(step: int, injected: list[int], saw: tuple[bool, ...], skipped: tuple[bool, ...], change: str) -> str:
    """Say where an overflow was injected, which ranks saw it, which skipped, and what became of the scale."""

    def name(ranks: Iterable[int]) -> str:
        numbers = [str(rank) for rank in ranks]
        return f"{'rank' if len(numbers) == 1 else 'ranks'} {' '.join(numbers)}"

    source = f" injected on {name(injected)}," if injected else ""
    seen, left_out = name(compress(count(), saw)), name(compress(count(), skipped))
    return f"step {step}: overflow{source} seen by {seen}; {left_out} skipped; scale {change}"


def print_table(runs: list[Run]) -> None:
    """Print what came of the runs, and how far float16 with gradscale is from float32."""
    print(f"\n{'':22}  validation loss  training loss  steps taken  skipped  zero gradients  seconds")
    for run in runs:
        taken, zeros = len(run.losses) - len(run.skipped), sum(run.zeros) / len(run.zeros)
        losses = f"{run.validation_loss:16.4f} {smooth(run.losses)[-1]:14.4f}"
        print(f"{run.name:22} {losses} {taken:12} {len(run.skipped):8} {zeros:15.1%} {run.seconds:8.1f}")
    print("(Training loss: the mean of the last 10 steps. Characters that a batch does not hold have zero gradients in")
    print("float32, too. CPUs may compute float16 in software: the seconds say nothing about accelerators.)\n")
    for run in runs[1:]:
        gap = max(abs(a - b) for a, b in zip(smooth(run.losses), smooth(runs[0].losses), strict=True))
        print(f"{run.name}: training loss is always within {gap:.4f} of {runs[0].name}")


def smooth(losses: list[float]) -> list[float]:
    """Return the mean of each loss and the nine before."""
    return [sum(losses[max(0, end - 10) : end]) / min(10, end) for end in range(1, len(losses) + 1)]


def write_plot(runs: list[Run], options: argparse.Namespace, ranks: Ranks) -> None:
    """Write loss, zero gradients and scale by step as a PNG."""
    from matplotlib.figure import Figure

    scaled, steps = runs[-1], range(1, options.steps + 1)
    figure = Figure(figsize=(9, 8), layout="constrained")
    top, middle, bottom = figure.subplots(3, sharex=True, height_ratios=[3, 2, 2.5])
    figure.suptitle(f"Text learnt in float16 with {scaled.method} on {ranks}")
    for run, style in zip(runs, ["-", "-", "--"], strict=True):
        top.plot(steps, smooth(run.losses), style, label=run.name)
        middle.plot(steps, run.zeros, style, label=run.name)
    top.set_ylabel("training loss\n(nats per character)")
    top.legend(loc="upper right")
    middle.set(ylabel="zero gradients", ylim=(0, 1))
    middle.yaxis.set_major_formatter("{x:.0%}")
    bottom.step(steps, scaled.scales, where="post", color="tab:green")
    bottom.set_yscale("log", base=2)
    bottom.set(xlabel="step", ylabel="scale")
    injected = {step for step, _ in options.inject}
    for is_injected, marker, color in [(False, "o", "black"), (True, "X", "tab:red")]:
        where = [step for step in scaled.skipped if (step in injected) is is_injected]
        label = "skipped: injected overflow" if is_injected else "skipped: scale too large for float16"
        if where:
            bottom.plot(where, [scaled.scales[step - 1] for step in where], marker, color=color, label=label)
    if scaled.skipped:
        bottom.legend(loc="lower right")
    figure.savefig(options.plot, dpi=120)


def injection(text: str) -> tuple[int, int]:
    """Parse STEP:RANK."""
    try:
        step, rank = (int(part) for part in text.split(":"))
    except ValueError:
        msg = f"must be STEP:RANK, such as 60:1, got {text!r}"
        raise argparse.ArgumentTypeError(msg) from None
    return step, rank


def parse_options(ranks: Ranks) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    methods = parser.add_mutually_exclusive_group()
    for method, module in [("FSDP1", "FullyShardedDataParallel"), ("DDP", "DistributedDataParallel and autocast")]:
        settings: dict[str, Any] = {"dest": "method", "action": "store_const", "const": method, "default": "FSDP2"}
        methods.add_argument(f"--{method.lower()}", help=f"float16 with {module} instead of fully_shard", **settings)
    parser.add_argument("--steps", type=int, default=200, help="training steps of each run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default: %(default)s)")
    inject_help = "make a gradient of one rank inf at one step of the run with gradscale; may be repeated"
    parser.add_argument("--inject", type=injection, action="append", default=[], metavar="STEP:RANK", help=inject_help)
    plot_help = "plot to write (default: %(default)s)"
    parser.add_argument("--plot", type=Path, default="train_fsdp.png", metavar="FILE", help=plot_help)
    # Help and errors are the same on all ranks, and one of them says it.
    out, err = (sys.stdout, sys.stderr) if ranks.rank == 0 else (io.StringIO(), io.StringIO())
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        options = parser.parse_args()
        if options.steps < 1 or options.seed < 0:
            parser.error(f"--steps must be at least 1 and --seed at least 0, got {options.steps} and {options.seed}")
        for step, rank in options.inject:
            if not (1 <= step <= options.steps and 0 <= rank < ranks.size):
                allowed = f"a step from 1 to {options.steps} and a rank from 0 to {ranks.size - 1}"
                parser.error(f"argument --inject: must be {allowed}, got {step}:{rank}")
        if not options.plot.parent.is_dir():
            parser.error(f"argument --plot: there is no folder {options.plot.parent}")
        if ranks.size > WINDOWS:
            parser.error(f"there is one window of text for each of {WINDOWS} ranks at most, got {ranks.size} ranks")
    return options


def main(ranks: Ranks) -> int:
    """Make the three runs, report and verify."""
    options = parse_options(ranks)
    ranks.join()
    text, method = load_text(), options.method
    runs = [
        Run("fp32 DDP", "DDP", torch.float32, is_scaled=False),
        Run(f"fp16 {method}, no scaling", method, torch.float16, is_scaled=False),
        Run(f"fp16 {method}, gradscale", method, torch.float16, is_scaled=True),
    ]
    if ranks.rank == 0:
        hint = "; for more: torchrun --nproc-per-node 2 " + sys.argv[0] if ranks.size == 1 else ""
        print(f"{ranks}, {dist.get_backend()} on {ranks.device.type}{hint}", flush=True)
    for run in runs:
        train(run, options, text, ranks)
    is_verified = all(run.is_verified for run in runs)
    if ranks.rank == 0:
        print_table(runs)
        write_plot(runs, options, ranks)
        verdict = "verified: weights and scaler state are bit-identical"
        print(f"wrote {options.plot}")
        print(verdict if is_verified else "FAILED: weights or scaler state differ", f"on {ranks}", flush=True)
    dist.barrier()  # A rank that fails has torchrun end the others: not while rank 0 still reports.
    return 0 if is_verified else 1


if __name__ == "__main__":
    world = Ranks()
    try:
        status = main(world)
    except KeyboardInterrupt:
        if world.rank == 0:
            print("\ninterrupted", file=sys.stderr)
        world.stop(130)
    except Exception:
        traceback.print_exc()
        world.stop(1)
    dist.destroy_process_group()
    # Not through Python's clean-up: some 3 % of runs on gloo (torch 2.13) abort there, although all is done.
    world.stop(status)
