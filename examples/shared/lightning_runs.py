"""What the Lightning example needs beside its loop: batches, injected overflows, its options, and what is compared."""

from __future__ import annotations

import argparse
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from gradscale import UpdateReport
from shared.digits import TEST_IMAGES, load_images
from shared.report import change

BATCH_SIZE = 128
IMAGES = 1797


def images(seed: int) -> list[Tensor]:
    """Return training images and labels, test images and labels."""
    return [torch.from_numpy(part) for part in load_images(seed)]


class Batches:
    """Batches of images that lie in memory already, so that a DataLoader with its workers has nothing to load."""

    def __init__(self, images: Tensor, labels: Tensor, order: Tensor, size: int) -> None:
        self.images, self.labels = images, labels
        self.parts = torch.split(order, size)

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for part in self.parts:
            yield self.images[part], self.labels[part]


class Injection(Callback):
    """Make gradients overflow at given steps."""

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write an inf into one gradient, which is still scaled."""
        gradient = next(pl_module.parameters()).grad
        if gradient is not None and trainer.global_step + 1 in self.steps:
            gradient.view(-1)[0] = torch.inf


def described(report: UpdateReport) -> str:
    """Say what a skipped step has met, and what became of the scale."""
    count = report.steps[0].nonfinite
    gradients = "1 gradient" if count == 1 else f"{count} gradients"
    return f"overflow in {gradients}, skipped; {change(report.scale, report.new_scale or report.scale)}"


def state_of(trainer: Trainer) -> list[Any]:
    """Return weights, optimizer state and scaler state."""
    (optimizer,) = trainer.optimizers
    moments = [tensor for state in optimizer.state.values() for tensor in state.values()]
    return [*trainer.lightning_module.state_dict().values(), *moments, trainer.precision_plugin.state_dict()]


def is_same(one: list[Any], other: list[Any]) -> bool:
    """Tell whether two states are the same in every bit."""
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(one, other, strict=True)
    )


def parse_options(description: str | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="of 12 steps each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default: %(default)s)")
    inject_help = "make gradients overflow at this step, counted from 1; may be repeated"
    parser.add_argument("--inject", type=int, action="append", default=[], metavar="STEP", help=inject_help)
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FILE", help="keep the checkpoint (default: a temporary file)"
    )
    options = parser.parse_args()
    if options.epochs < 2 or options.seed < 0:
        parser.error(f"--epochs must be at least 2 and --seed at least 0, got {options.epochs} and {options.seed}")
    last = options.epochs * math.ceil((IMAGES - TEST_IMAGES) / BATCH_SIZE)
    for step in options.inject:
        if not 1 <= step <= last:
            parser.error(f"argument --inject: must be a step from 1 to {last}, got {step}")
    if options.checkpoint and (options.checkpoint.is_dir() or not options.checkpoint.parent.is_dir()):
        parser.error(f"argument --checkpoint: must be a file in a folder that exists, got {options.checkpoint}")
    return options


def ends_well(main: Callable[[], int]) -> int:
    """Run a program, without Lightning's lines of information, and return its exit status: 130 after Ctrl-C."""
    # A small network is slower on several threads.
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    # Lightning 2.6 itself uses what torch 2.13 has deprecated.
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)", module="lightning")
    try:
        return main()
    except KeyboardInterrupt:
        pass
    except SystemExit as end:
        # Lightning shuts down on Ctrl-C and then exits with 1.
        if not isinstance(end.__context__, KeyboardInterrupt):
            raise
    print("\ninterrupted", file=sys.stderr)
    return 130
