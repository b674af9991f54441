"""What the commands print with: tables on stdout, one line for each error on stderr."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

__all__ = ["console", "error_line", "print_json", "table"]

_WIDTH = 120  # columns, where there is no terminal to ask


def console(*, stderr: bool = False) -> Console:
    """Return a console, on stderr for what must not be mixed with results: colours on a terminal, else plain text."""
    made = Console(stderr=stderr, highlight=False, markup=False)
    return made if made.is_terminal else Console(stderr=stderr, highlight=False, markup=False, width=_WIDTH)


def table(*columns: str) -> Table:
    """Return an empty table with these headings; text that is too long for its column goes on in the next line."""
    made = Table(box=box.SIMPLE, pad_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def error_line(text: str) -> None:
    """Print one line on stderr, with the program's name before it."""
    print(f"gradscale: {text}", file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print JSON, and nothing else, on stdout."""
    print(json.dumps(value, indent=2), flush=True)
