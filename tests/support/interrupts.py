"""Ctrl-C at each place of a call where Python looks for signals."""

import gc
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

_Run = TypeVar("_Run")


def interrupted_anywhere(part: str, begin: Callable[[], tuple[_Run, Callable[[], object]]]) -> Iterator[_Run]:
    """Interrupt a call at one place after the other in files whose path has this part.

    ``begin`` returns something new and the call; what it returns first is yielded while the interrupt is handled.
    """
    left = 0

    def interrupt(frame, event: str, _):
        # Python looks for signals when a function begins, and after a call of a C function.
        nonlocal left
        if event in ("call", "c_return") and part in frame.f_code.co_filename:
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    for place in range(1, 1000):
        run, call = begin()
        left = place
        # An interrupt in a callback of the collector, of what earlier calls have left, would be ignored.
        gc.disable()
        sys.setprofile(interrupt)
        try:
            call()
        except KeyboardInterrupt:
            yield run
        finally:
            sys.setprofile(None)
            gc.enable()
        if left > 0:
            break
    assert place > 10
