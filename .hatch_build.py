"""Refuse a Python that is too old by gradscale's own name; run by whatever installs or builds from a clone.

pip looks at ``requires-python`` of what it builds last. Before that it looks for versions of all dependencies that an
old Python has, for minutes, and may end with the name of one of them.
"""

import platform
import sys

from hatchling.metadata.plugin.interface import MetadataHookInterface


class RequirePython(MetadataHookInterface):
    """Compares the running Python with ``requires-python``."""

    def update(self, metadata: dict) -> None:
        """Exit with one line where the Python is older; change nothing."""
        oldest = metadata["requires-python"].lstrip(">=")
        if sys.version_info < tuple(map(int, oldest.split("."))):
            sys.exit(
                f"gradscale requires Python {oldest} or newer, got {platform.python_version()} ({sys.executable}): "
                f"make the virtual environment with a newer one, as in: python{oldest} -m venv .venv"
            )
