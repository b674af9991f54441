"""Options that the examples share, looked at before anything is computed."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PICTURES = (".png", ".svg", ".pdf")


def add_options(
    parser: argparse.ArgumentParser,
    *,
    steps: int,
    output: str,
    example: str = "",
    where: str = "rank",
    flag: str = "--plot",
) -> None:
    """Add --steps, --seed, --inject if it has an example, and the plot's file: ``options.output`` under any flag."""

    def injection(text: str) -> tuple[int, int]:
        try:
            step, number = (int(part) for part in text.split(":"))
        except ValueError:
            msg = f"must be STEP:{where.upper()}, such as {example}, got {text!r}"
            raise argparse.ArgumentTypeError(msg) from None
        return step, number

    parser.add_argument("--steps", type=int, default=steps, help="training steps of each run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default: %(default)s)")
    if example:
        parser.add_argument(
            "--inject",
            type=injection,
            action="append",
            default=[],
            metavar=f"STEP:{where.upper()}",
            help=f"make a gradient of one {where} inf at one step, where gradscale is used; may be repeated",
        )
    parser.add_argument(
        flag, type=Path, default=output, metavar="FILE", dest="output", help="plot to write (default: %(default)s)"
    )


@contextlib.contextmanager
def said_once(rank: int) -> Iterator[None]:
    """Let rank 0 alone print help and errors, which are the same on all ranks."""
    out, err = (sys.stdout, sys.stderr) if rank == 0 else (io.StringIO(), io.StringIO())
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace, flag: str = "--plot") -> None:
    """Refuse options out of range, and a file that cannot be written."""
    if options.steps < 1 or options.seed < 0:
        parser.error(f"--steps must be at least 1 and --seed at least 0, got {options.steps} and {options.seed}")
    path = options.output
    if not path.parent.is_dir():
        parser.error(f"argument {flag}: there is no folder {path.parent}")
    if path.suffix.lower() not in PICTURES:
        parser.error(f"argument {flag}: must end in {', '.join(PICTURES)}, got {path}")
    try:
        with path.open("ab") if path.exists() else tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        parser.error(f"argument {flag}: cannot write {path}: {error.strerror}")


def check_injections(
    parser: argparse.ArgumentParser, options: argparse.Namespace, count: int, where: str = "rank"
) -> None:
    """Refuse overflows at a step or on a rank that there is not."""
    for step, number in options.inject:
        if not (1 <= step <= options.steps and 0 <= number < count):
            allowed = f"a step from 1 to {options.steps} and a {where} from 0 to {count - 1}"
            parser.error(f"argument --inject: must be {allowed}, got {step}:{number}")
