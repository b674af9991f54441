"""program_needs: a program that misses a library ends with one line, which says what to install."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gradscale import BackendNotAvailableError
from gradscale.extras import needs

__all__ = ["program_needs"]


@contextlib.contextmanager
def program_needs(program: str, extras: str, *modules: str, groups: str = "examples") -> Iterator[None]:
    """End a program with one line if an import inside this block fails, and quietly if Ctrl-C interrupts it."""
    try:
        with needs(program, extras, *modules, groups=groups):
            yield
    except BackendNotAvailableError as error:
        raise SystemExit(str(error)) from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
