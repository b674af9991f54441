"""Draw the scale of a short run in float16, with the plot of gradscale itself, for the guide.

It writes examples/scale.svg: ``python .ci/docs/scale_picture.py``.
"""

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from picture import EXAMPLES, HEIGHT, WIDTH

import gradscale
from gradscale import plot

STEPS = 400
# As the other pictures: legible on a phone, without a ground of its own, in the colours of the reader's scheme.
SIZES = {"svg.hashsalt": "gradscale", "svg.fonttype": "none", "font.size": 11}
COLOURS = {"#000000": "currentColor", "#e4e4e4": "#8884", "fill: #ffffff": "fill: none"}
STYLE = """
svg { color: #57606a; fill: currentColor }
@media (prefers-color-scheme: dark) { svg { color: #a9b3be } }
"""


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
    with mpl.rc_context(SIZES):
        figure = Figure(figsize=(WIDTH / 96, HEIGHT / 96), layout="constrained")
        axes = figure.subplots()
        plot.history(scaler, ax=axes)
        # As wide as in a wider plot it would touch the title.
        narrow = {"handlelength": 1.3, "columnspacing": 1.0, "handletextpad": 0.4, "borderaxespad": 0.2}
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, fontsize=9, **narrow)
        figure.savefig(EXAMPLES / "scale.svg", metadata={"Date": None})
    text = (EXAMPLES / "scale.svg").read_text()
    for colour, other in COLOURS.items():
        text = text.replace(colour, other)
    (EXAMPLES / "scale.svg").write_text(text.replace("<defs>", f"<style>{STYLE}</style>\n <defs>", 1))


if __name__ == "__main__":
    main()
