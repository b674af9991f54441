"""``python -m gradscale`` and the command ``gradscale``: check the installation, ranks or a loop, simulate, plot."""

from __future__ import annotations

import sys

from gradscale.errors import BackendNotAvailableError
from gradscale.extras import needs


def main() -> None:
    """Run the command line; exit with 3 and the pip command when what it is made with is not installed."""
    try:
        with needs("the command line", "cli"):
            from gradscale.tools.cli.app import run
    except BackendNotAvailableError as error:
        print(f"gradscale: {error}", file=sys.stderr)
        sys.exit(3)
    run()


if __name__ == "__main__":
    main()
