"""Consoles, tables, JSON and error lines of the commands, and the check of a time."""

from __future__ import annotations

import json
import sys

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table

_WIDTH = 120  # columns, without a terminal to ask


def console(*, stderr: bool = False) -> Console:
    """Return a console: colours on a terminal, else plain text."""
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, highlight=False, markup=False, width=None if is_terminal else _WIDTH)


def table(*columns: str) -> Table:
    """Return an empty table with these headings, whose columns fold long text."""
    return Table(*(Column(name, overflow="fold") for name in columns), box=box.SIMPLE, pad_edge=False)


def error_line(text: str) -> None:
    """Print one line on stderr, after the program's name."""
    print(f"gradscale: {text}", file=sys.stderr, flush=True)


def seconds(value: float) -> float:
    """Return the seconds of an option, from 0.1 to 1000000; for ``callback=``."""
    if not 0.1 <= value <= 1e6:
        msg = f"must be from 0.1 to 1000000 seconds, got {value:g}"
        raise typer.BadParameter(msg)
    return value


def print_json(value: object) -> None:
    """Print a value as JSON on stdout."""
    print(json.dumps(value, indent=2), flush=True)
