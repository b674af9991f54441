"""Train a network on real handwritten digits in float16 with Lightning, and let gradscale scale the loss.

    python examples/lightning_plugin.py --inject 100

One line does it: ``Trainer(plugins=MixedPrecision("16-mixed", "cpu"))``, with the plugin of ``gradscale_torch`` in the
place of Lightning's. Lightning then scales, unscales, clips, skips, holds the learning-rate schedule on skipped steps,
and saves the scaler's state in its checkpoints by itself. The example trains twice: once through, and once stopped
halfway and resumed from the checkpoint, which must end in the very same bits.

Needs, from a clone of gradscale: python -m pip install '.[lightning,examples]'.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradscale.extras import program_needs

with program_needs("examples/lightning_plugin.py", "lightning,examples", "sklearn"):
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities.types import OptimizerLRScheduler
    from torch import Tensor, nn

    from gradscale_torch import GradScaler
    from gradscale_torch.plugins import MixedPrecision

DEVICE = "cpu"  # or "cuda"
BATCH_SIZE = 128
TEST_IMAGES = 360
# Short, so that a few hundred steps show the scale grow until float16 overflows; 2000 is usual.
GROWTH_INTERVAL = 40
LARGEST_NORM = 0.5


def load_images(seed: int) -> tuple[Tensor, Tensor]:
    """Return the 1797 images and labels that come with scikit-learn, shuffled."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return torch.from_numpy(pixels).float()[order] / 8 - 1, torch.from_numpy(labels)[order]


class Batches:
    """Batches of images that lie in memory already, so that a DataLoader with its workers has nothing to load."""

    def __init__(self, images: Tensor, labels: Tensor, order: Tensor, size: int) -> None:
        self.images, self.labels = images, labels
        self.parts = [order[start : start + size] for start in range(0, len(order), size)]

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for part in self.parts:
            yield self.images[part], self.labels[part]


class Digits(LightningModule):
    """A network of three layers. Nothing in it knows of mixed precision."""

    def __init__(self, images: Tensor, labels: Tensor, seed: int) -> None:
        super().__init__()
        self.data = images, labels
        self.seed = seed
        self.network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def train_dataloader(self) -> Batches:
        """Return this epoch's batches, in an order that depends on the seed and the epoch alone."""
        images, labels = (part[TEST_IMAGES:] for part in self.data)
        generator = torch.Generator().manual_seed(1000 * self.seed + self.current_epoch)
        return Batches(images, labels, torch.randperm(len(labels), generator=generator), BATCH_SIZE)

    def val_dataloader(self) -> Batches:
        """Return the test images as one batch."""
        images, labels = (part[:TEST_IMAGES] for part in self.data)
        return Batches(images, labels, torch.arange(len(labels)), len(labels))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss; Lightning has it scaled before the backward pass."""
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Log the accuracy."""
        images, labels = batch
        self.log("accuracy", (self.network(images).argmax(dim=1) == labels).float().mean())

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return Adam, not ``fused=True``, for whose gradients Lightning refuses to clip; and a schedule that holds."""
        optimizer = torch.optim.Adam(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.997)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ScaleMonitor(Callback):
    """Log the scale and the number of skipped steps, and print each skip."""

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler
        self.step = 0
        self.skipped: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Ask the scaler what became of the step; it knows without reading from the device again."""
        if trainer.global_step == self.step:
            return  # The gradients of this batch are to be added to those of the next.
        self.step = trainer.global_step
        report = self.scaler.last_step(trainer.optimizers[0])
        if report.skipped:
            self.skipped.append(trainer.global_step)
            change = f"{power(report.scale)} -> {power(self.scaler.get_scale())}"
            print(f"  step {trainer.global_step}: overflow in {arrays(report.nonfinite)}, skipped; scale {change}")
        # For whatever logger the Trainer has; here there is none.
        pl_module.log_dict({"scale": report.scale, "skipped_steps": float(len(self.skipped))})


class Injection(Callback):
    """Make gradients overflow at given steps."""

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write an inf into one gradient, which is still scaled."""
        if trainer.global_step + 1 in self.steps:
            gradient = next(pl_module.parameters()).grad
            assert gradient is not None
            gradient.view(-1)[0] = torch.inf


def power(scale: float) -> str:
    """Return a scale as a power of two."""
    return f"2^{math.log2(scale):g}"


def arrays(count: int) -> str:
    """Return a number of gradients in words."""
    return "1 gradient" if count == 1 else f"{count} gradients"


def train(
    options: argparse.Namespace, epochs: int, seed: int, checkpoint: Path | None = None
) -> tuple[Trainer, Digits, ScaleMonitor]:
    """Train with a scaler of its own, from weights made with a seed or, if there is one, from a checkpoint."""
    torch.manual_seed(seed)
    module = Digits(*load_images(options.seed), options.seed)
    scaler = GradScaler(DEVICE, growth_interval=GROWTH_INTERVAL)
    monitor = ScaleMonitor(scaler)
    trainer = Trainer(
        # Nothing else differs from training with torch's scaler.
        plugins=MixedPrecision("16-mixed", DEVICE, scaler),
        accelerator=DEVICE,
        devices=1,
        max_epochs=epochs,
        gradient_clip_val=LARGEST_NORM,
        reload_dataloaders_every_n_epochs=1,
        callbacks=[monitor, Injection(options.inject)],
        # Nothing is written but the one checkpoint.
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, ckpt_path=checkpoint)
    return trainer, module, monitor


def state_of(trainer: Trainer, module: Digits) -> list[Any]:
    """Return weights, optimizer state and scaler state."""
    (optimizer,) = trainer.optimizers
    moments = [tensor for state in optimizer.state.values() for tensor in state.values()]
    return [*module.state_dict().values(), *moments, trainer.precision_plugin.state_dict()]


def are_identical(one: list[Any], other: list[Any]) -> bool:
    """Tell whether two states are the same in every bit."""
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(one, other, strict=True)
    )


def parse_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    last = options.epochs * math.ceil((1797 - TEST_IMAGES) / BATCH_SIZE)
    for step in options.inject:
        if not 1 <= step <= last:
            parser.error(f"argument --inject: must be a step from 1 to {last}, got {step}")
    if options.checkpoint and (options.checkpoint.is_dir() or not options.checkpoint.parent.is_dir()):
        parser.error(f"argument --checkpoint: must be a file in a folder that exists, got {options.checkpoint}")
    return options


def run(options: argparse.Namespace, checkpoint: Path) -> int:
    """Train twice, report and verify."""
    print(f"{options.epochs} epochs in one run")
    through, module, monitor = train(options, options.epochs, options.seed)
    half = options.epochs // 2
    print(f"{half} epochs, and a checkpoint")
    stopped, _, _ = train(options, half, options.seed)
    stopped.save_checkpoint(checkpoint)
    saved = stopped.precision_plugin.state_dict()
    print(f"  saved: {power(saved['scale'])}, {saved['_growth_tracker']} clean steps of {GROWTH_INTERVAL}")
    print(f"{options.epochs - half} more epochs, from the checkpoint")
    # From other weights and a new scaler: everything has to come from the checkpoint.
    resumed, resumed_module, _ = train(options, options.epochs, options.seed + 1, checkpoint)
    taken = through.global_step - len(monitor.skipped)
    accuracy = through.callback_metrics["accuracy"]
    print(f"test accuracy {accuracy:.1%} after {taken} steps, and {len(monitor.skipped)} skipped")
    if not set(options.inject) <= set(monitor.skipped):
        print(f"FAILED: overflow was injected at {options.inject}, and skipped were {monitor.skipped}")
        return 1
    if not are_identical(state_of(through, module), state_of(resumed, resumed_module)):
        print("FAILED: the resumed run has come to another state")
        return 1
    print("verified: weights, optimizer and scaler state of the resumed run are bit-identical to those of one run")
    return 0


def main() -> int:
    """Run with the checkpoint where it is wanted."""
    options = parse_options()
    # A small network is slower on several threads.
    torch.set_num_threads(1)
    # Without its lines of information, such as the list of devices, but with its warnings.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    # Lightning 2.6 itself uses what torch 2.13 has deprecated.
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)", module="lightning")
    with tempfile.TemporaryDirectory() as folder:
        return run(options, options.checkpoint or Path(folder) / "digits.ckpt")


if __name__ == "__main__":
    try:
        status = main()
    except KeyboardInterrupt:
        status = 130
    except SystemExit as end:
        # Lightning shuts down on Ctrl-C and then exits with 1.
        if not isinstance(end.__context__, KeyboardInterrupt):
            raise
        status = 130
    if status == 130:
        print("\ninterrupted", file=sys.stderr)
    sys.exit(status)
