"""Consoles, tables and error lines of the commands, and the option that they share."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table

from gradscale.errors import one_line

AsJSON = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON, and nothing else, on stdout.")]
"""An option of commands that print a table."""


def console(*, stderr: bool = False) -> Console:
    """Return a console: colours on a terminal, else plain text."""
    return Console(stderr=stderr, highlight=False, markup=False)


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> Table:
    """Return a table of rows, each in a style if there are any; columns fold long text, and empty ones are left out."""
    kept = [place for place in range(len(titles)) if any(row[place] for row in rows)]
    grid = Table(*(Column(titles[place], overflow="fold") for place in kept), box=box.SIMPLE, pad_edge=False)
    for row, style in zip(rows, styles or [""] * len(rows), strict=True):
        grid.add_row(*(one_line(row[place]) for place in kept), style=style)
    return grid


def error_line(text: str) -> None:
    """Print one line on stderr, after the program's name."""
    print(f"gradscale: {one_line(text)}", file=sys.stderr, flush=True)
