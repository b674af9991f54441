"""Draw the scale of a short run in float16, with the plot of gradscale itself, for the guide.

It writes examples/scale.svg: ``python .ci/docs/scale_picture.py``.
"""

from pathlib import Path

import matplotlib as mpl
import numpy as np

import gradscale
from gradscale import plot

PICTURE = Path(__file__).parents[2] / "examples" / "scale.svg"
STEPS = 400


class SGD:
    """Weights of a linear regression."""

    weights = np.zeros(4, np.float32)
    grads: np.ndarray = weights

    def step(self) -> None:
        """Step."""
        self.weights = self.weights - np.float32(0.05) * self.grads


def main() -> None:
    """Train with a growth interval of 60 steps, usually 2000, so that the scale is seen to grow."""
    batches, optimizer = np.random.default_rng(0), SGD()
    scaler = gradscale.GradScaler(growth_interval=60, history_size=STEPS)
    for iteration in range(STEPS):
        inputs = batches.normal(size=(64, 4)).astype(np.float32)
        inputs[0] *= 30 if iteration == 250 else 1
        errors = inputs @ (optimizer.weights - np.float32([1, -2, 3, -4]))
        errors += batches.normal(size=64).astype(np.float32)
        scale = scaler.scale(np.float32(1 / 4))
        with np.errstate(over="ignore", invalid="ignore"):
            half = (inputs * errors[:, None] * scale).astype(np.float16)
        optimizer.grads = half.astype(np.float32).mean(axis=0) * 4
        scaler.step(optimizer)
        scaler.update()
    with mpl.rc_context({"svg.hashsalt": "gradscale", "svg.fonttype": "none"}):
        plot.history(scaler).savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
