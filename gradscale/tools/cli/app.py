"""The command line: one typer application with the commands doctor, check, check-trainer, simulate and plot."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import gradscale
from gradscale.errors import GradscaleError
from gradscale.tools.cli.check import check
from gradscale.tools.cli.check_rank import LAUNCHERS
from gradscale.tools.cli.check_trainer import check_trainer
from gradscale.tools.cli.doctor import doctor
from gradscale.tools.cli.output import error_line
from gradscale.tools.cli.plot import plot
from gradscale.tools.cli.simulate import simulate

app = typer.Typer(
    help="Dynamic gradient scaling: check the installation, ranks or a training loop, simulate policies, plot logs.",
    epilog="Examples: gradscale doctor · mpiexec -n 4 python -m gradscale check --group mpi · gradscale simulate CCOC",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_set: bool) -> None:
    if is_set:
        print(f"gradscale {gradscale.__version__}")
        raise typer.Exit


_VERSION = typer.Option("--version", metavar="", help="Print the version and exit.", callback=_print_version)


@app.callback()
def _main(version: Annotated[bool, _VERSION] = False) -> None:
    """Take the options that come before a command."""


for _command, _examples in (
    (doctor, "gradscale doctor · gradscale doctor numpy,mpi · gradscale doctor --require numpy,mpi"),
    (check, " · ".join(LAUNCHERS.values())),
    (check_trainer, "gradscale check-trainer tests.loop:Mine · gradscale check-trainer loop:Mine --rtol 1e-5"),
    (simulate, "gradscale simulate CCOC -p torch -p megatron · gradscale simulate scale.jsonl --plot scales.png"),
    (plot, "gradscale plot scale.jsonl · gradscale plot scale.jsonl scale.svg"),
):
    app.command(epilog=f"Examples: {_examples}")(_command)


def run(arguments: list[str] | None = None) -> None:
    """Run the command line, with these arguments in place of those of the process, and exit."""
    try:
        app(args=arguments, prog_name="gradscale")
    except GradscaleError as error:
        error_line(str(error))
        sys.exit(1)
