"""history, simulation: pictures of the scale, its skipped steps and the gradients' range; matplotlib draws them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gradscale.core import validation
from gradscale.errors import InvalidTypeError, InvalidValueError, LogWriteError, short_repr
from gradscale.extras import needs
from gradscale.scaler.reports import StepReport, UpdateReport
from gradscale.tools.callbacks import LogRow, read_log, row_of, was_skipped
from gradscale.tools.simulation import Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gradscale.scaler.scaler import GradScaler

__all__ = ["history", "simulation"]
__dir__ = __all__.copy

# Okabe and Ito's blue and vermilion, which colour-blind people can tell apart.
_BLUE = "#0072B2"
_SKIPPED = "#D55E00"
_GREY = "#666666"

# The mark of a skipped step by its reason, of which others than these have a cross; what each mark says.
_MARKS = {"spike": "^", "refused": "s"}
_LABELS = {"x": "step skipped", "^": "spike skipped", "s": "step refused"}
# Where a line is drawn across fp16's range, its text, and whether that stands above or below.
_LIMITS = (
    (validation.LARGEST_FLOAT16, "65504, fp16's largest", "bottom"),
    (2.0**-14, "2⁻¹⁴, below it fp16 loses bits", "bottom"),
    (2.0**-24, "2⁻²⁴, fp16's smallest", "top"),
)
# More than a picture has columns of pixels.
_COLUMNS = 2000


def history(
    history: GradScaler | Iterable[StepReport | UpdateReport] | str | os.PathLike[str],
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
    >>> reports = [gradscale.UpdateReport(i, 2.0 ** (16 - (i > 5)), i == 5, 0, ()) for i in range(1, 11)]
    >>> figure = gradscale.plot.history(reports)  # or a scaler, or a log; with a path it is saved
    >>> figure.axes[0].get_title(loc="left")
    '1 of 10 steps skipped (10 %)'
    """
    rows = _rows(history)
    x, x_name = _horizontal(rows)
    # NaN, inf and what is beyond any gradient are not drawn.
    measured = [i for i, row in enumerate(rows) if 0.0 < (row.get("magnitude") or 0.0) <= validation.LARGEST_FLOAT32]
    heights = [3, 2] if measured else [1]
    figure, axes = _panels(heights, 6.4 if measured else 4.2) if ax is None else (ax.figure.figure, [ax])
    marks = [_MARKS.get(str(row.get("reason")), "x") if was_skipped(row) else "" for row in rows]
    share = _draw_scale(axes[0], x, [row["scale"] for row in rows], marks, rows[-1].get("new_scale"))
    axes[0].set_title(share, loc="left", fontsize=11)
    if len(axes) > 1:
        _draw_range(axes[1], [x[i] for i in measured], [rows[i]["magnitude"] * rows[i]["scale"] for i in measured])
    axes[-1].set_xlabel(x_name)
    return _saved(figure, path)


def _horizontal(rows: list[LogRow]) -> tuple[Sequence[int], str]:
    """Return where each row is drawn, and what that is."""
    x = [row.get("iteration") for row in rows]
    # A resumed run may have made some iterations twice. From 2^53 on a float does not hold each integer.
    iterations = [i for i in x if type(i) is int and abs(i) < 2**53]
    return (iterations, "iteration") if x == sorted(iterations) else (range(1, len(x) + 1), "row of the log")


def simulation(results: Simulation | Sequence[Simulation], path: str | os.PathLike[str] | None = None) -> Figure:
    """Draw the scales of simulated runs as :func:`history` does, each in a panel with an axis of its own.

    Parameters
    ----------
    results : Simulation or sequence of Simulation
        From :func:`gradscale.tools.simulation.simulate`.
    path : str or os.PathLike, optional
        As for :func:`history`, and so are the figure that is returned and the errors.

    Examples
    --------
    >>> import gradscale
    >>> from gradscale.tools.simulation import simulate
    >>> run = simulate(gradscale.presets.torch(), "CCOC", name="torch")
    >>> gradscale.plot.simulation(run).axes[0].get_title(loc="left")
    'torch: 1 of 4 steps skipped (25 %)'
    """
    runs = list(results) if isinstance(results, Iterable) else [results]
    if not runs or not all(isinstance(run, Simulation) for run in runs):
        raise validation.wrong_type(results, "results", "at least one Simulation, as simulate() returns")
    figure, axes = _panels([1] * len(runs), 3.6 if len(runs) == 1 else 1.0 + 1.7 * len(runs))
    for ax, run in zip(axes, runs, strict=True):
        share = _draw_scale(ax, range(1, run.steps + 1), run.scale, ["x" if skipped else "" for skipped in run.skipped])
        raised = "" if run.raised_at is None else f", stopped with an error in step {run.raised_at:,}"
        ax.set_title(f"{run.name}: {share}{raised}", loc="left", fontsize=10)
    axes[-1].set_xlabel("step")
    return _saved(figure, path)


def _rows(history: Any) -> list[LogRow]:
    """Return the steps to draw, as rows of a log."""
    if isinstance(history, (str, os.PathLike)):
        rows = read_log(history)
        for row in rows:
            _check(row, f"line {row['line']} of {os.fspath(history)!r}")
        return rows
    last = None
    if hasattr(history, "history") and hasattr(history, "get_scale"):
        history, last = history.history, history.get_scale()
    reports = list(history) if isinstance(history, Iterable) else [history]
    if not all(isinstance(report, (StepReport, UpdateReport)) for report in reports):
        msg = f"history must hold StepReports or UpdateReports, as scaler.history does, got {short_repr(reports[:3])}"
        raise InvalidTypeError(msg)
    if not reports:
        msg = "the history must hold at least one step, got an empty one"
        raise InvalidValueError(msg)
    rows = [row_of(report) for report in reports]
    if last is not None:
        rows[-1]["new_scale"] = last
    return rows


def _check(row: LogRow, where: str) -> None:
    was_skipped(row)
    for name in ("scale", "new_scale"):
        scale: Any = row.get(name)
        is_drawable = type(scale) in (int, float) and validation.SMALLEST_NORMAL <= scale <= validation.LARGEST_FLOAT32
        if not is_drawable and (name == "scale" or scale is not None):
            msg = f"{where} must have a {name} above 0 that float32 can hold, got {scale!r:.60}"
            raise InvalidValueError(msg)
    magnitude = row.get("magnitude")
    if magnitude is not None and (type(magnitude) not in (int, float) or magnitude < 0.0):
        msg = f"{where} must have a magnitude that is a number from 0 on, or none, got {magnitude!r:.60}"
        raise InvalidValueError(msg)


def _panels(heights: Sequence[int], inches: float) -> tuple[Figure, Sequence[Axes]]:
    with needs("gradscale.plot", "plot"):
        # Not pyplot's, which keeps its figures and may open windows.
        from matplotlib.figure import Figure
    figure = Figure(figsize=(10.0, inches), layout="constrained")
    figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    return figure, figure.axes


def _saved(figure: Figure, path: str | os.PathLike[str] | None) -> Figure:
    if path is not None:
        try:
            figure.savefig(path, dpi=150)
        except ValueError as error:
            msg = f"the plot must be a kind of file that matplotlib writes, got {str(path)!r}: {error}"
            raise InvalidValueError(msg) from error
        except OSError as error:
            msg = f"the plot cannot be written, got {str(path)!r}: {error.strerror or error}"
            raise LogWriteError(msg) from error
    return figure


def _draw_scale(
    ax: Axes, x: Sequence[int], scales: Sequence[float], marks: Sequence[str], last: float | None = None
) -> str:
    """Draw a scale as a line, and the marks of skipped steps; return how many of the steps were skipped."""
    turns = _visible([i for i in range(len(scales)) if i == 0 or scales[i] != scales[i - 1]], x, scales)
    # The last step is as wide as the others, and ends at the scale after its update.
    heights = [*(scales[i] for i in turns), scales[-1] if last is None else last]
    ax.step([*(x[i] for i in turns), x[-1] + 1], heights, where="post", color=_BLUE, label="scale")
    for marker, label in _LABELS.items():
        if drawn := _visible([i for i, mark in enumerate(marks) if mark == marker], x, scales):
            at, size = ([x[i] for i in drawn], [scales[i] for i in drawn]), 34 if len(drawn) < 100 else 14
            # Below the line, which many crosses would hide.
            ax.scatter(*at, size, color=_SKIPPED, marker=marker, linewidths=1.4, zorder=1.9, label=label)
    # A scale that moves little must not look as if it moved much.
    ax.update_datalim([(x[0], max(scales) / 2.0**6)], updatex=False)
    _style(ax, "scale")
    skipped = len(marks) - marks.count("")
    return f"{skipped:,} of {len(marks):,} steps skipped ({100.0 * skipped / len(marks):.3g} %)"


def _visible(indices: Iterable[int], x: Sequence[int], scales: Sequence[float]) -> list[int]:
    """Return the last of those indices whose points share a column of pixels and a scale."""
    span = max(x[-1] - x[0], _COLUMNS)
    return sorted({((x[i] - x[0]) * _COLUMNS // span, scales[i]): i for i in indices}.values())


def _draw_range(ax: Axes, x: Sequence[int], scaled: Sequence[float]) -> None:
    """Draw the largest finite gradients times their scale, and fp16's limits."""
    size = 16 if len(x) < 300 else 5
    ax.scatter(x, scaled, size, color=_BLUE, zorder=2.0, label="largest finite gradient")
    for value, text, side in _LIMITS:
        ax.axhline(value, color=_GREY, linewidth=0.9, linestyle=(0, (4, 2)))
        at, right = value * (2.0 if side == "bottom" else 0.5), ax.get_yaxis_transform()
        ax.text(0.995, at, text, transform=right, ha="right", va=side, fontsize=8, color=_GREY)
    _style(ax, "gradient × scale")


def _style(ax: Axes, name: str) -> None:
    """Set a named log2 axis, a light grid, whole numbers with separators below, and a legend above."""
    from matplotlib.ticker import MaxNLocator

    ax.set_yscale("log", base=2)
    ax.set_ylabel(name)
    ax.margins(0.01, 0.1)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.grid(color="#E4E4E4", linewidth=0.8)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, fontsize=9, handlelength=3.0)
