"""Consoles, tables and error lines of the commands."""

from __future__ import annotations

import sys

from rich import box
from rich.console import Console
from rich.table import Column, Table


def console(*, stderr: bool = False) -> Console:
    """Return a console: colours on a terminal, else plain text."""
    return Console(stderr=stderr, highlight=False, markup=False)


def table(*columns: str) -> Table:
    """Return an empty table with these headings, whose columns fold long text."""
    return Table(*(Column(name, overflow="fold") for name in columns), box=box.SIMPLE, pad_edge=False)


def error_line(text: str) -> None:
    """Print one line on stderr, after the program's name."""
    print(f"gradscale: {text}", file=sys.stderr, flush=True)
