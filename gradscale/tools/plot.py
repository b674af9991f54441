"""history, simulation: pictures of the scale, its skipped steps and the gradients' range; matplotlib draws them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

from gradscale.core import validation
from gradscale.core.messages import shown
from gradscale.errors import InvalidTypeError, InvalidValueError, LogWriteError
from gradscale.extras import needs
from gradscale.policies.plain import LARGEST_FLOAT16
from gradscale.scaler.reports import StepReport, UpdateReport
from gradscale.tools.logs import read_log, row_of
from gradscale.tools.simulation import Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["history", "simulation"]

# Okabe and Ito's blue and vermilion, which colour-blind people can tell apart.
_BLUE = "#0072B2"
_SKIPPED = "#D55E00"
_GREY = "#666666"

_SMALLEST_FLOAT16 = 2.0**-24
# Where a line is drawn across fp16's range, its text, and whether that stands above or below.
_LIMITS = (
    (LARGEST_FLOAT16, "65504, fp16's largest", "bottom"),
    (2.0**-14, "2⁻¹⁴, below it fp16 loses bits", "bottom"),
    (_SMALLEST_FLOAT16, "2⁻²⁴, fp16's smallest", "top"),
)
# From here on a float does not hold each integer.
_LARGEST_ITERATION = 2**53
# More than a picture has columns of pixels.
_COLUMNS = 2000
_LOWEST_SPAN = 2.0**6
# Reasons of skipped steps that leave the scale as it is.
_HELD: Mapping[str, Sequence[int]] = {"spike": (), "refused": ()}


class _Row(NamedTuple):
    x: int
    scale: float
    new_scale: float | None
    skipped: bool
    reason: str | None
    magnitude: float | None


class _Scaler(Protocol):
    """The members of a scaler that are drawn."""

    @property
    def history(self) -> list[StepReport]: ...

    def get_scale(self) -> float: ...


def history(
    history: _Scaler | Iterable[StepReport | UpdateReport] | str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
    *,
    ax: Axes | None = None,
) -> Figure:
    """Draw the scale of a run on a log2 axis, and mark the skipped steps.

    If magnitudes are known, from overflow reports or a log, a second panel shows the largest finite gradient times the
    scale against fp16's range.

    Parameters
    ----------
    history : scaler, iterable of StepReport or UpdateReport, str or os.PathLike
        A scaler, reports that were kept, or the path of a log of JSONLines. The line ends with the scale after the last
        update; StepReports alone, such as ``scaler.history``, do not hold that one.
    path : str or os.PathLike, optional
        A file to save to; its suffix gives the format.
    ax : matplotlib.axes.Axes, optional
        Draw the scale alone, in there.

    Returns
    -------
    Figure
        Not shown: no window is opened, and no backend chosen.

    Raises
    ------
    BackendNotAvailableError
        Without matplotlib; with the pip command.
    InvalidValueError, InvalidTypeError
        For an empty history, a malformed log, other objects, or a suffix of ``path`` that matplotlib does not know.
    LogWriteError
        If ``path`` cannot be written.

    Examples
    --------
    >>> import gradscale
    >>> reasons = ["stepped"] * 4 + ["overflow"] + ["stepped"] * 5
    >>> steps = [
    ...     gradscale.StepReport(i == 5, 2.0 ** (16 - (i > 5)), int(i == 5), reason, i)
    ...     for i, reason in enumerate(reasons, 1)
    ... ]
    >>> figure = gradscale.plot.history(steps)  # or a scaler's history, or a log; with a path it is saved
    >>> figure.axes[0].get_title(loc="left")
    '1 of 10 steps skipped (10 %)'
    """
    rows, x_label = _rows(history)
    magnitudes = [row for row in rows if row.magnitude]
    if ax is not None:
        figure: Any = ax.figure
        axes: Any = [ax]
    else:
        heights = [3, 2] if magnitudes else [1]
        figure = _figure(6.4 if magnitudes else 4.2)
        axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    if len(axes) > 1:
        _draw_range(axes[1], magnitudes)
    scales, last = [row.scale for row in rows], rows[-1].new_scale
    skipped = [index for index, row in enumerate(rows) if row.skipped]
    held = {name: [index for index in skipped if rows[index].reason == name] for name in _HELD}
    others = [index for index in skipped if rows[index].reason not in _HELD]
    _draw_scale(axes[0], [row.x for row in rows], scales, others, last, held)
    _style(axes[0], scales if last is None else [*scales, last])
    axes[0].set_title(_share(len(skipped), len(rows)), loc="left", fontsize=11)
    axes[0].set_ylabel("scale")
    axes[-1].set_xlabel(x_label)
    return _saved(figure, path)


def simulation(results: Simulation | Sequence[Simulation], path: str | os.PathLike[str] | None = None) -> Figure:
    """Draw the scales of simulated runs as :func:`history` does, each in a panel with an axis of its own.

    Parameters
    ----------
    results : Simulation or sequence of Simulation
        From :func:`gradscale.tools.simulation.simulate`.
    path : str or os.PathLike, optional
        A file to save to; its suffix gives the format.

    Returns
    -------
    Figure
        Not shown. The errors are those of :func:`history`.

    Examples
    --------
    >>> import gradscale
    >>> from gradscale.tools.simulation import recorded, simulate
    >>> run = simulate(gradscale.presets.torch(), recorded("CCOC"), name="torch")
    >>> gradscale.plot.simulation(run).axes[0].get_title(loc="left")
    'torch: 1 of 4 steps skipped (25 %)'
    """
    runs = list(results) if isinstance(results, Iterable) else [results]
    if not runs or not all(isinstance(run, Simulation) for run in runs):
        msg = (
            f"results must be at least one Simulation, as gradscale.tools.simulation.simulate() returns, "
            f"got {shown(results)}"
        )
        raise InvalidTypeError(msg)
    figure = _figure(3.6 if len(runs) == 1 else 1.0 + 1.7 * len(runs))
    axes = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    for ax, run in zip(axes, runs, strict=True):
        skipped = [index for index, is_skipped in enumerate(run.skipped) if is_skipped]
        high = max(run.scale)
        _draw_scale(ax, range(1, run.steps + 1), run.scale, skipped)
        # A scale that moves little must not look as if it moved much.
        _style(ax, [*run.scale, high / _LOWEST_SPAN])
        raised = "" if run.raised_at is None else f", stopped with an error in step {run.raised_at:,}"
        ax.set_title(f"{run.name}: {_share(len(skipped), run.steps)}{raised}", loc="left", fontsize=10)
        ax.set_ylabel("scale")
    axes[-1].set_xlabel("step")
    return _saved(figure, path)


def _rows(history: Any) -> tuple[list[_Row], str]:
    """Return the steps to draw, and the name of the x axis."""
    if isinstance(history, (str, os.PathLike)):
        found = read_log(history)
        for row in found:
            _check(row, f"line {row['line']} of {os.fspath(history)!r}")
    else:
        last = None
        if hasattr(history, "history") and hasattr(history, "get_scale"):
            history, last = history.history, history.get_scale()
        reports = list(history) if isinstance(history, Iterable) else [history]
        if not all(isinstance(report, (StepReport, UpdateReport)) for report in reports):
            msg = f"history must hold StepReports or UpdateReports, as scaler.history does, got {shown(reports[:3])}"
            raise InvalidTypeError(msg)
        found = [row_of(report) for report in reports]
        if found and last is not None:
            found[-1]["new_scale"] = last
    if not found:
        msg = "the history must hold at least one step, got an empty one"
        raise InvalidValueError(msg)
    iterations: list[Any] = [row.get("iteration") for row in found]
    # A resumed run may have made some iterations twice.
    are_numbers = all(type(x) is int and abs(x) < _LARGEST_ITERATION for x in iterations)
    is_in_order = are_numbers and all(x <= y for x, y in itertools.pairwise(iterations))
    rows = []
    for number, row in enumerate(found, 1):
        magnitude = row.get("magnitude")
        # NaN, inf and what is beyond any gradient are not drawn.
        is_drawable = magnitude is not None and magnitude <= validation.LARGEST_FLOAT32
        x = row["iteration"] if is_in_order else number
        is_skipped = row.get("skipped") is True
        drawn = magnitude if is_drawable else None
        rows.append(_Row(x, row["scale"], row.get("new_scale"), is_skipped, row.get("reason"), drawn))
    return rows, "iteration" if is_in_order else "row of the log"


def _check(row: dict[str, Any], where: str) -> None:
    """Raise if a row of a log cannot be drawn."""
    for name in ("scale", "new_scale"):
        scale = row.get(name)
        is_drawable = _is_number(scale) and validation.SMALLEST_NORMAL <= scale <= validation.LARGEST_FLOAT32
        if not is_drawable and (name == "scale" or scale is not None):
            msg = f"{where} must have a {name} above 0 that float32 can hold, got {scale!r:.60}"
            raise InvalidValueError(msg)
    magnitude = row.get("magnitude")
    if magnitude is not None and (not _is_number(magnitude) or magnitude < 0.0):
        msg = f"{where} must have a magnitude that is a number from 0 on, or none, got {magnitude!r:.60}"
        raise InvalidValueError(msg)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _share(skipped: int, total: int) -> str:
    return f"{skipped:,} of {total:,} steps skipped ({100.0 * skipped / total:.2g} %)"


def _figure(height: float) -> Figure:
    with needs("gradscale.plot", "plot"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    # Not pyplot's, which keeps its figures and may open windows.
    figure = Figure(figsize=(10.0, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _saved(figure: Figure, path: str | os.PathLike[str] | None) -> Figure:
    if path is not None:
        try:
            figure.savefig(path, dpi=150)
        except ValueError as error:
            msg = f"the plot must be a kind of file that matplotlib writes, got {os.fspath(path)!r}: {error}"
            raise InvalidValueError(msg) from error
        except OSError as error:
            msg = f"the plot cannot be written, got {os.fspath(path)!r}: {error.strerror or error}"
            raise LogWriteError(msg) from error
    return figure


def _draw_scale(
    ax: Axes,
    x: Sequence[int],
    scales: Sequence[float],
    skipped: Sequence[int],
    last: float | None = None,
    held: Mapping[str, Sequence[int]] = _HELD,
) -> None:
    """Draw a scale as a line, with crosses at the indices of skipped steps, and other marks at spikes."""
    turns = _visible([i for i in range(len(scales)) if i == 0 or scales[i] != scales[i - 1]], x, scales)
    # The last step is as wide as the others, and ends at the scale after its update.
    heights = [*(scales[i] for i in turns), scales[-1] if last is None else last]
    ax.plot([*(x[i] for i in turns), x[-1] + 1], heights, drawstyle="steps-post", color=_BLUE, label="scale")
    for label, marker, indices in (
        ("step skipped", "x", skipped),
        ("spike skipped", "^", held["spike"]),
        ("step refused", "s", held["refused"]),
    ):
        marks = _visible(indices, x, scales)
        at = [x[i] for i in marks], [scales[i] for i in marks]
        size = 34 if len(marks) < 100 else 14
        if marks:
            # Below the line, which many crosses would hide.
            ax.scatter(*at, size, color=_SKIPPED, marker=marker, linewidths=1.4, zorder=1.9, label=label)


def _visible(indices: Iterable[int], x: Sequence[int], scales: Sequence[float]) -> list[int]:
    """Return the last of those indices whose points share a column of pixels and a scale."""
    span = max(x[-1] - x[0], _COLUMNS)
    return sorted({((x[i] - x[0]) * _COLUMNS // span, scales[i]): i for i in indices}.values())


def _draw_range(ax: Axes, rows: Sequence[_Row]) -> None:
    """Draw the largest finite gradients times their scale, and fp16's limits."""
    scaled = [(row.magnitude or 0.0) * row.scale for row in rows]
    size = 16 if len(rows) < 300 else 5
    ax.scatter([row.x for row in rows], scaled, s=size, color=_BLUE, label="largest finite gradient")
    for value, text, side in _LIMITS:
        ax.axhline(value, color=_GREY, linewidth=0.9, linestyle=(0, (4, 2)))
        at, right = value * (2.0 if side == "bottom" else 0.5), ax.get_yaxis_transform()
        ax.text(0.995, at, text, transform=right, ha="right", va=side, fontsize=8, color=_GREY)
    _style(ax, [*scaled, LARGEST_FLOAT16 * 8.0, _SMALLEST_FLOAT16 / 8.0])
    ax.set_ylabel("gradient × scale")


def _style(ax: Axes, values: Sequence[float]) -> None:
    """Set a log2 axis that holds values, a light grid, whole numbers with separators below, and a legend above."""
    from matplotlib.ticker import LogLocator, MaxNLocator, StrMethodFormatter

    ax.set_yscale("log", base=2)
    low, high = min(values), max(values)
    # A constant would have an axis without ticks.
    ax.set_ylim(low / 2.0, high * 2.0)
    ax.yaxis.set_major_locator(LogLocator(base=2, numticks=9))
    ax.minorticks_off()
    ax.margins(x=0.01)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.grid(color="#E4E4E4", linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, fontsize=9, handlelength=3.0)
