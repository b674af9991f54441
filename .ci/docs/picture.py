"""A picture of lines over training steps, readable on a phone, whose colours follow the reader's scheme."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

EXAMPLES = Path(__file__).parents[2] / "examples"

# In units of the picture, which a phone shows at two thirds: text of 16 is 11 pixels high there.
WIDTH, HEIGHT, SIZE = 540, 270, 16
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 32, 26

# The colours of each scheme are still legible on the other's background, for pages that do not follow the reader's.
STYLE = """
text { font: 16px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #57606a }
path { fill: none; stroke-width: 2.5; stroke-linejoin: round }
.grid { stroke: #8888; stroke-width: 1 }
.best { stroke: #0072b2; stroke-width: 5; opacity: 0.55 }
.bad { stroke: #d1521f }
.half { stroke: #8a6d00; stroke-width: 2 }
.gradscale { stroke: #12825c; stroke-dasharray: 7 4 }
@media (prefers-color-scheme: dark) {
  text { fill: #a9b3be }
  .best { stroke: #4aa8e8 }
  .bad { stroke: #f0824f }
  .half { stroke: #d8b64a }
  .gradscale { stroke: #3fcf97 }
}
"""


class Line(NamedTuple):
    """A line of the picture, in the colour of a class of the style."""

    name: str
    kind: str
    points: Sequence[tuple[float, float]]


class Axes(NamedTuple):
    """The axes: marks of both, from the lowest, and how those of the values are written."""

    title: str
    steps: Sequence[int]
    marks: Sequence[float]
    form: str
    legend: tuple[float, float]
    """Where the legend begins, as shares of the width and the height."""
    event: tuple[int, str] | None = None
    """A step that is marked, and its name."""

    def across(self, step: float) -> float:
        """Return where a step is."""
        first, last = self.steps[0], self.steps[-1]
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / (last - first), 1)

    def up(self, value: float) -> float:
        """Return where a value is, at most a little above the highest mark."""
        low, high = self.marks[0], self.marks[-1]
        share = min((value - low) / (high - low), 1.03)
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share, 1)


def elements(axes: Axes, lines: Sequence[Line]) -> Iterator[str]:
    """Yield what is drawn."""
    yield f'<text x="{LEFT}" y="{SIZE}">{axes.title}</text>'
    for value in axes.marks:
        yield f'<path class="grid" d="M{LEFT} {axes.up(value)}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 8}" y="{axes.up(value) + 5}" text-anchor="end">{value:{axes.form}}</text>'
    for step in axes.steps:
        anchor = "end" if step == axes.steps[-1] else "middle"
        yield f'<text x="{axes.across(step)}" y="{HEIGHT - BOTTOM + 20}" text-anchor="{anchor}">{step}</text>'
    if axes.event is not None:
        step, name = axes.event
        yield f'<path class="grid" d="M{axes.across(step)} {TOP}V{HEIGHT - BOTTOM}"/>'
        yield f'<text x="{axes.across(step) - 6}" y="{TOP + SIZE + 6}" text-anchor="end">{name}</text>'
    left = round(LEFT + 12 + axes.legend[0] * (WIDTH - LEFT - RIGHT), 1)
    for number, line in enumerate(lines):
        points = "L".join(f"{axes.across(step)} {axes.up(value)}" for step, value in line.points)
        yield f'<path class="{line.kind}" d="M{points}"/>'
        height = round(TOP + axes.legend[1] * (HEIGHT - TOP - BOTTOM) + number * (SIZE + 8), 1)
        yield f'<path class="{line.kind}" d="M{left} {height}h36"/>'
        yield f'<text x="{left + 44}" y="{height + 5}">{line.name}</text>'


def write(name: str, axes: Axes, lines: Sequence[Line]) -> None:
    """Write a picture to the folder of the examples."""
    start = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"'
    text = [f'{start} viewBox="0 0 {WIDTH} {HEIGHT}">', f"<style>{STYLE}</style>", *elements(axes, lines), "</svg>"]
    (EXAMPLES / name).write_text("\n".join(text) + "\n")
