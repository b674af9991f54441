"""``python -m gradscale`` and the command ``gradscale``: check the installation or a group of ranks, simulate."""

from __future__ import annotations

import sys

__all__ = ["main"]

# What the command line is made with; the core does without.
_LIBRARIES = ("typer", "rich", "click")


def main() -> None:
    """Run the command line; exit with 3 and the pip command when what it is made with is not installed."""
    try:
        from gradscale.cli.app import run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _LIBRARIES:
            raise
        print(
            f"gradscale: the command line needs {error.name}, which is not installed. "
            f"Install it with: python -m pip install 'gradscale[cli]'",
            file=sys.stderr,
        )
        sys.exit(3)
    run()


if __name__ == "__main__":
    main()
