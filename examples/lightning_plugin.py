"""Train a network on real handwritten digits in float16 with Lightning, and let gradscale scale the loss.

    python examples/lightning_plugin.py --inject 100

One line does it: ``Trainer(plugins=MixedPrecision("16-mixed", "cpu"))``, with the plugin of ``gradscale_torch`` in the
place of Lightning's. Lightning then scales, unscales, clips, skips, holds the learning-rate schedule on skipped steps,
and saves the scaler's state in its checkpoints by itself. The example trains twice: once through, and once stopped
halfway and resumed from the checkpoint, which must end in the very same bits.

Needs, from a clone of gradscale: python -m pip install '.[lightning]' --group examples.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from gradscale import UpdateReport
from shared.program import program_needs

with program_needs("examples/lightning_plugin.py", "lightning", "sklearn"):
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.utilities.types import OptimizerLRScheduler
    from torch import Tensor, nn

    from gradscale_torch import GradScaler
    from gradscale_torch.plugins import MixedPrecision
    from shared import lightning_runs as runs
    from shared.report import say

DEVICE = "cpu"  # or "cuda"
# Short, so that a few hundred steps show the scale grow until float16 overflows; 2000 is usual.
GROWTH_INTERVAL = 40
LARGEST_NORM = 0.5


def train(
    options: argparse.Namespace, epochs: int, seed: int, checkpoint: Path | None = None
) -> tuple[Trainer, list[int]]:
    """Train from weights made with a seed or from a checkpoint; return the trainer, and which steps were skipped."""
    torch.manual_seed(seed)
    scaler, skipped = GradScaler(DEVICE, growth_interval=GROWTH_INTERVAL), []
    trainer = Trainer(
        # Nothing else differs from training with torch's scaler.
        plugins=MixedPrecision("16-mixed", DEVICE, scaler),
        accelerator=DEVICE,
        devices=1,
        max_epochs=epochs,
        gradient_clip_val=LARGEST_NORM,
        reload_dataloaders_every_n_epochs=1,
        callbacks=[runs.Injection(options.inject)],
        # Nothing is written but the one checkpoint.
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )

    def tell(report: UpdateReport) -> None:
        if report.skipped:
            skipped.append(trainer.global_step + 1)
            say(f"  step {skipped[-1]}: {runs.described(report)}")

    scaler.on_update = tell
    trainer.fit(Digits(options.seed), ckpt_path=checkpoint)
    return trainer, skipped


class Digits(LightningModule):
    """A network of three layers. Nothing in it knows of mixed precision."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.data = runs.images(seed)
        self.network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss; Lightning has it scaled before the backward pass."""
        pixels, labels = batch
        return nn.functional.cross_entropy(self.network(pixels), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Log the accuracy."""
        pixels, labels = batch
        self.log("accuracy", (self.network(pixels).argmax(dim=1) == labels).float().mean())

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return Adam, not ``fused=True``, for whose gradients Lightning refuses to clip; and a schedule that holds."""
        optimizer = torch.optim.Adam(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.997)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> runs.Batches:
        """Return this epoch's batches, in an order that depends on the seed and the epoch alone."""
        pixels, labels, *_ = self.data
        generator = torch.Generator().manual_seed(1000 * self.seed + self.current_epoch)
        return runs.Batches(pixels, labels, torch.randperm(len(labels), generator=generator), runs.BATCH_SIZE)

    def val_dataloader(self) -> runs.Batches:
        """Return the test images as one batch."""
        *_, pixels, labels = self.data
        return runs.Batches(pixels, labels, torch.arange(len(labels)), len(labels))


def run(options: argparse.Namespace, checkpoint: Path) -> int:
    """Train twice, report and verify."""
    print(f"{options.epochs} epochs in one run")
    through, skipped = train(options, options.epochs, options.seed)
    half = options.epochs // 2
    print(f"{half} epochs, and a checkpoint")
    stopped, _ = train(options, half, options.seed)
    stopped.save_checkpoint(checkpoint)
    saved = stopped.precision_plugin.state_dict()
    print(f"  saved: scale {saved['scale']:g}, {saved['_growth_tracker']} clean steps of {GROWTH_INTERVAL}")
    print(f"{options.epochs - half} more epochs, from the checkpoint")
    # From other weights and a new scaler: everything has to come from the checkpoint.
    resumed, _ = train(options, options.epochs, options.seed + 1, checkpoint)
    accuracy, taken = through.callback_metrics["accuracy"], through.global_step - len(skipped)
    print(f"test accuracy {accuracy:.1%} after {taken} steps, and {len(skipped)} skipped")
    if not set(options.inject) <= set(skipped):
        print(f"FAILED: overflow was injected at {options.inject}, and skipped were {skipped}")
        return 1
    if not runs.is_same(runs.state_of(through), runs.state_of(resumed)):
        print("FAILED: the resumed run has come to another state")
        return 1
    print("verified: weights, optimizer and scaler state of the resumed run are bit-identical to those of one run")
    return 0


def main() -> int:
    """Run with the checkpoint where it is wanted."""
    options = runs.parse_options(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        return run(options, options.checkpoint or Path(folder) / "digits.ckpt")


if __name__ == "__main__":
    sys.exit(runs.ends_well(main))
