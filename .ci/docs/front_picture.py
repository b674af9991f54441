"""Draw the picture of the front page: what three runs of examples/train_digits.py have learnt, by step.

    .venv/bin/mpiexec -n 4 .venv/bin/python .ci/docs/front_picture.py

It writes examples/train_digits.svg, whose text stays readable on a phone, and whose colours follow the reader's scheme.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import numpy as np

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_digits  # noqa: E402
from shared.digits import LAYER_SIZES, load_images  # noqa: E402
from shared.ranks import Ranks  # noqa: E402
from shared.runs import KINDS, Run  # noqa: E402

OPTIONS = Namespace(steps=600, seed=0, inject=[(120, 2)])

# In units of the picture, which a phone shows at two thirds: text of 16 is 11 pixels high there.
WIDTH, HEIGHT, SIZE = 540, 270, 16
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 32, 26

# The colours of each scheme are still legible on the other's background, for pages that do not follow the reader's.
STYLE = """
text { font: 16px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #57606a }
path { fill: none; stroke-width: 2.5; stroke-linejoin: round }
.grid { stroke: #8888; stroke-width: 1 }
.fp32 { stroke: #0072b2 }
.none { stroke: #d1521f }
.gradscale { stroke: #12825c; stroke-dasharray: 7 4 }
@media (prefers-color-scheme: dark) {
  text { fill: #a9b3be }
  .fp32 { stroke: #4aa8e8 }
  .none { stroke: #f0824f }
  .gradscale { stroke: #3fcf97 }
}
"""
CLASSES = ("fp32", "none", "gradscale")


def learnt(ranks: Ranks) -> list[Run]:
    """Return the three runs from the same weights on the same batches."""
    images, labels, *test = ranks.broadcast(load_images(OPTIONS.seed) if ranks.rank == 0 else None)
    data = images, np.eye(LAYER_SIZES[-1], dtype=np.float32)[labels], *test
    runs = [Run(name, dtype, is_scaled) for name, dtype, is_scaled in KINDS]
    for run in runs:
        train_digits.train(run, OPTIONS, data, ranks)
    return runs


def across(step: float) -> float:
    """Return where a step is."""
    return round(LEFT + (WIDTH - LEFT - RIGHT) * step / OPTIONS.steps, 1)


def up(share: float) -> float:
    """Return where an accuracy is."""
    return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share, 1)


def elements(runs: list[Run]) -> Iterator[str]:
    """Yield what is drawn."""
    yield f'<text x="{LEFT}" y="{SIZE}">test accuracy of a small network, by training step</text>'
    for share in (0.0, 0.5, 1.0):
        yield f'<path class="grid" d="M{LEFT} {up(share)}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 8}" y="{up(share) + 5}" text-anchor="end">{share:.0%}</text>'
    for step in range(0, OPTIONS.steps + 1, 200):
        anchor = "end" if step == OPTIONS.steps else "middle"
        yield f'<text x="{across(step)}" y="{up(0) + 20}" text-anchor="{anchor}">{step}</text>'
    for number, (run, name) in enumerate(zip(runs, CLASSES, strict=True)):
        line = "L".join(f"{across(step)} {up(accuracy)}" for step, accuracy in run.accuracies)
        yield f'<path class="{name}" d="M{line}"/>'
        height = up(0.92) + number * (SIZE + 8)
        yield f'<path class="{name}" d="M{LEFT + 12} {height}h36"/>'
        yield f'<text x="{LEFT + 56}" y="{height + 5}">{run.name}</text>'


def main() -> None:
    """Train, and write the picture on rank 0."""
    with Ranks() as ranks:
        runs = learnt(ranks)
        if ranks.rank == 0:
            start = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"'
            lines = [f'{start} viewBox="0 0 {WIDTH} {HEIGHT}">', f"<style>{STYLE}</style>", *elements(runs), "</svg>"]
            (EXAMPLES / "train_digits.svg").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
