"""``gradscale check-trainer``: hold a training loop of the user's to the rules of bad steps."""

from __future__ import annotations

import pkgutil
import sys
from typing import Annotated

import typer
from rich import print_json

from gradscale import testing
from gradscale.errors import GradscaleError
from gradscale.tools.cli.output import AsJSON, console


def check_trainer(
    trainer: Annotated[
        str, typer.Argument(metavar="MODULE:CLASS", help="The class around a training loop, such as tests.loop:Mine.")
    ],
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, max=1e6, help="How long a step may take.")
    ] = 60.0,
    rtol: Annotated[
        float,
        typer.Option(metavar="RATIO", min=0.0, max=1.0, help="How much values may differ. Default: not in a bit."),
    ] = 0.0,
    as_json: AsJSON = False,
) -> None:
    """Check that a training loop keeps four rules of bad steps.

    A bad step leaves no trace, the scale is invisible, saving and loading change nothing, and no step hangs. What the
    class needs: gradscale.testing.check_trainer. The exit code is 1 if the loop breaks a rule, and 2 for a class that
    cannot be checked.
    """
    with console(stderr=True).status("") as status:

        def tell(done: int, total: int) -> None:
            status.update(f"{done} of {total} runs")
            if done == 0:
                status.console.print(f"{total} runs")

        # As `python -m` does, and the command `gradscale` does not.
        sys.path.insert(0, "")
        try:
            make = pkgutil.resolve_name(trainer)
            report = testing.check_trainer(make, timeout=timeout, raises=False, rtol=rtol, progress=tell)
        except (ImportError, AttributeError, ValueError, GradscaleError) as error:
            msg = f"{trainer}: {type(error).__name__}: {error}"
            raise typer.BadParameter(msg) from error
    if as_json:
        print_json(data={"ok": not report.faults, "runs": report.runs, "faults": [x._asdict() for x in report.faults]})
    else:
        head, *lines = str(report).splitlines()
        console().print(head, style="bold red" if lines else "bold green")
        for line in lines:
            console().print(line, style="red", soft_wrap=True)
    raise typer.Exit(int(bool(report.faults)))
