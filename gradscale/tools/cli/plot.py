"""``gradscale plot``: draw the scale of a run from its log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradscale.tools import plot as plots


def plot(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="A log of callbacks.JSONLines.")],
    to: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help=".png, .svg or .pdf. Default: LOG as .png.")
    ] = None,
) -> None:
    """Draw the scale of a run and its skipped steps, from its log."""
    path = to or log.with_suffix(".png")
    plots.history(log, path)
    print(path)
