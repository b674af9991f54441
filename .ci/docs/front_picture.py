"""Draw the picture of the front page: the loss of a run with one bad batch: stepped, clipped, skipped, and without it.

    .venv/bin/python .ci/docs/front_picture.py

It trains examples/spikes.py's model four times in one process, and writes examples/spikes.svg.
"""

import sys
from argparse import Namespace

import torch
from picture import EXAMPLES, Axes, Line, write

sys.path.insert(0, str(EXAMPLES))

import spikes
from shared.text import load_text
from shared.torch_ranks import Ranks
from shared.torch_runs import Run, smooth

OPTIONS = Namespace(steps=400, seed=0, inject=[(200, 0)], every=200)
METHODS = {
    "clean": ("no bad batch", "best"),
    "bad": ("stepped", "bad"),
    "clip": ("clipped", "half"),
    "skip": ("skipped", "gradscale"),
}


def main(ranks: Ranks) -> int:
    """Train, and write the picture."""
    ranks.join()
    text, lines = load_text(), []
    for method, (name, kind) in METHODS.items():
        run = Run(name, method, torch.bfloat16, is_scaled=method == "skip")
        spikes.train(run, OPTIONS, text, ranks)
        lines.append(Line(name, kind, [*enumerate(smooth(run.values["loss"]), 1)][100:]))
        print(name, run.values["validation loss"])
    title = "training loss of a small language model, by step"
    axes = Axes(title, (100, 200, 300, 400), (2.4, 2.8, 3.2), ".1f", (0.6, 0.06), event=(200, "bad batch"))
    write("spikes.svg", axes, lines)
    return 0


if __name__ == "__main__":
    world = Ranks()
    world.run(main)
