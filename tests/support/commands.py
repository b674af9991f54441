"""Programs that tests start and wait for, but not for ever; what they print is kept."""

import os
import subprocess
import sys
from pathlib import Path

_LIMIT = 120  # seconds


def ran(
    *command: object, folder: Path | None = None, seconds: float = _LIMIT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, for so many seconds at most, with variables besides those of the environment."""
    words, environment = [str(word) for word in command], os.environ | variables
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )


def python(*arguments: object, **options) -> subprocess.CompletedProcess[str]:
    """Run this Python, as ``ran`` does."""
    return ran(sys.executable, *arguments, **options)
