"""Draw what three runs of examples/train_digits.py have learnt, by step.

    .venv/bin/mpiexec -n 4 .venv/bin/python .ci/docs/digits_picture.py

It writes examples/train_digits.svg.
"""

import sys
from argparse import Namespace

import numpy as np
from picture import EXAMPLES, Axes, Line, write

sys.path.insert(0, str(EXAMPLES))

import train_digits
from shared.digits import LAYER_SIZES, load_images
from shared.ranks import Ranks
from shared.runs import KINDS, Run

OPTIONS = Namespace(steps=600, seed=0, inject=[(120, 2)])
COLOURS = ("best", "bad", "gradscale")


def main() -> None:
    """Train from the same weights on the same batches, and write the picture on rank 0."""
    with Ranks() as ranks:
        images, labels, *test = ranks.broadcast(load_images(OPTIONS.seed) if ranks.rank == 0 else None)
        data = images, np.eye(LAYER_SIZES[-1], dtype=np.float32)[labels], *test
        runs = [Run(name, dtype, is_scaled) for name, dtype, is_scaled in KINDS]
        for run in runs:
            train_digits.train(run, OPTIONS, data, ranks)
        if ranks.rank == 0:
            title = "test accuracy of a small network, by training step"
            axes = Axes(title, range(0, OPTIONS.steps + 1, 200), (0.0, 0.5, 1.0), ".0%", (0.0, 0.08))
            lines = [Line(run.name, kind, run.accuracies) for run, kind in zip(runs, COLOURS, strict=True)]
            write("train_digits.svg", axes, lines)


if __name__ == "__main__":
    main()
