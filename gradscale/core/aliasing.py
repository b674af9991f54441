"""Memory that arrays share, by their addresses: they must not be written at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from gradscale.errors import SharedMemoryError

_Array = TypeVar("_Array")

Span = tuple[int, int]
"""The addresses of an array's first byte and of the byte after its last."""


def span(address: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Span:
    """Return the span of an array that has elements; strides are in bytes, and may be negative."""
    reaches = [(length - 1) * stride for length, stride in zip(shape, strides, strict=True)]
    first = address + sum(min(reach, 0) for reach in reaches)
    return first, first + sum(map(abs, reaches)) + itemsize


def overlaps_itself(shape: Sequence[int], strides: Sequence[int], itemsize: int = 1) -> bool:
    """Tell whether elements of an array share memory, as after broadcasting; strides in the unit of ``itemsize``."""
    if 0 in shape:
        return False
    lengths = zip(strides, shape, strict=True)
    axes = sorted(((abs(stride), length - 1) for stride, length in lengths if length > 1), reverse=True)
    # How far the axes behind each one reach.
    reaches = [sum(stride * most for stride, most in axes[position:]) for position in range(1, len(axes) + 1)]
    if axes and not axes[-1][0]:
        return True

    def meets(position: int, offset: int, is_other: bool) -> bool:
        """Tell whether steps along the axes that are left lead from this offset back to the same element."""
        if position == len(axes):
            return is_other
        stride, most = axes[position]
        slack = reaches[position] + itemsize - 1
        # A way back is one forward from the other element: the first step may as well be forward.
        lowest = max(-most if is_other else 0, -((slack + offset) // stride))
        highest = min(most, (slack - offset) // stride)
        return any(
            meets(position + 1, offset + steps * stride, is_other or steps != 0) for steps in range(lowest, highest + 1)
        )

    return meets(0, 0, False)


def overlap(
    index: int, shape: tuple[int, ...], strides: tuple[int, ...], copy: str = "grad.copy()"
) -> SharedMemoryError:
    """Return the error for a gradient whose elements share memory."""
    return SharedMemoryError(
        f"gradient {index}, shape {shape}, strides {strides}, overlaps itself and cannot be unscaled in place: assign "
        f"a copy ({copy})"
    )


def numbered(grads: Sequence[_Array], out: Sequence[_Array]) -> dict[int, _Array]:
    """Return the arrays to be written and the gradients written elsewhere, numbered as ``require_disjoint`` wants."""
    pairs = enumerate(zip(grads, out, strict=True), start=len(out))
    return dict(enumerate(out)) | {number: grad for number, (grad, target) in pairs if grad is not target}


def require_disjoint(spans: Iterable[tuple[Span, int]], share: Callable[[int, int], bool], count: int) -> None:
    """Raise unless arrays to be written share memory neither with each other nor with one that is only read.

    Numbers below ``count`` are arrays to be written. ``share`` compares elements, since columns overlap in span only.
    """
    open_spans: list[tuple[int, int]] = []
    for (start, stop), number in sorted(spans):
        open_spans = [(end, other) for end, other in open_spans if end > start]
        for _, other in open_spans:
            if min(number, other) < count and share(other, number):
                first, second = sorted((other % count, number % count))
                what = f"gradients {first} and {second}, or what they are written to,"
                if first == second:
                    what = f"gradient {first} and the array that it is written to"
                msg = f"{what} share memory, which would be divided twice: pass one of them, or a copy of it"
                raise SharedMemoryError(msg)
        open_spans.append((stop, number))
