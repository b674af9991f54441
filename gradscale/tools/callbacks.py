"""Callbacks for GradScaler's on_skip and on_update: LogUpdates, TensorBoard, JSONLines, BadBatches, and every_rank.

A scaler calls them on rank 0, and on every rank those whose attribute ``every_rank`` is true::

    scaler = gradscale.GradScaler(on_update=[callbacks.LogUpdates(), callbacks.JSONLines("scale.jsonl")])
"""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias, TypeVar

from gradscale.core import validation
from gradscale.errors import InvalidTypeError, InvalidValueError, LogWriteError, at_scale, short_repr, warn_caller
from gradscale.scaler.diagnosis.report import OverflowReport
from gradscale.scaler.reports import REASONS, StepReport, UpdateReport

__all__ = ["BadBatches", "JSONLines", "LogUpdates", "TensorBoard", "every_rank", "read_bad_batches", "read_log"]
__dir__ = __all__.copy

LogRow: TypeAlias = dict[str, Any]
"""A line of a log: plain values by name."""

_Report = TypeVar("_Report")


class SummaryWriter(Protocol):
    """A writer for TensorBoard, such as torch.utils.tensorboard.SummaryWriter or tensorboardX.SummaryWriter."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> object:
        """Write a number."""


def every_rank(callback: Callable[[_Report], object]) -> Callable[[_Report], object]:
    """Return a callback that is called on every rank, and not on rank 0 alone; InvalidTypeError if it is no callable.

    Examples
    --------
    >>> import gradscale
    >>> callback = gradscale.callbacks.every_rank(print)
    >>> scaler = gradscale.GradScaler(on_skip=callback)
    >>> callback.every_rank
    True
    """
    if not callable(callback):
        raise validation.wrong_type(callback, "callback", "a callable that takes a report")
    call = functools.partial(callback)
    call.every_rank = True  # type: ignore[attr-defined]
    return call


class LogUpdates:
    """Log a line for each skipped step, and one with the scale before and after each update that changed it.

    As ``on_update`` it logs both, as ``on_skip`` skipped steps alone, and as both each step once. One for each scaler.

    Parameters
    ----------
    logger : logging.Logger, optional
        Default: the one named "gradscale".
    level : int, default logging.INFO
        For changes of the scale, and for summaries.
    skip_level : int, default logging.WARNING
        For skipped steps.
    summary_every : int, default 0
        After how many updates a line says how many of them were skipped; 0 for no such line.

    Examples
    --------
    >>> import gradscale, logging
    >>> log = gradscale.callbacks.LogUpdates(logging.getLogger("train"), summary_every=1000)
    >>> scaler = gradscale.GradScaler(on_update=log)
    """

    def __init__(
        self,
        logger: logging.Logger | None = None,
        level: int = logging.INFO,
        *,
        skip_level: int = logging.WARNING,
        summary_every: int = 0,
    ) -> None:
        if logger is not None and not isinstance(logger, (logging.Logger, logging.LoggerAdapter)):
            raise validation.wrong_type(logger, "logger", "a logging.Logger, such as logging.getLogger(__name__)")
        self._logger = logger or logging.getLogger("gradscale")
        self._level = validation.integer("level", level, 0, validation.LARGEST_INT32)
        self._skip_level = validation.integer("skip_level", skip_level, 0, validation.LARGEST_INT32)
        self._summary_every = validation.integer("summary_every", summary_every, 0, validation.LARGEST_INT32)
        self._scale: float | None = None
        # The iteration whose skipped steps were logged by on_skip.
        self._logged_iteration: int | None = None
        # How many updates since the last summary were skipped, and how many were not.
        self._counts = collections.Counter[bool]()

    def __call__(self, report: UpdateReport | StepReport) -> None:
        """Log a report's lines, if it has any."""
        if isinstance(report, StepReport):
            self._log_skip(report)
            self._logged_iteration = report.iteration
            return
        at = f"iteration {report.iteration}:"
        if self._scale not in (None, report.scale):
            # Between two updates, such as by load_state_dict.
            self._logger.log(self._level, f"{at} scale was set, {self._scale:g} -> {report.scale:g}")
        self._scale = report.scale if report.new_scale is None else report.new_scale
        for step in report.steps if self._logged_iteration != report.iteration else ():
            self._log_skip(step)
        if report.skipped and not any(step.skipped for step in report.steps):
            # The gradients were unscaled, and the loop did not call step().
            self._logger.log(self._skip_level, f"{at} gradients to be skipped{at_scale(report.scale)}")
        self._logged_iteration = None
        if self._scale != report.scale:
            change = "grew" if self._scale > report.scale else "backed off"
            self._logger.log(self._level, f"{at} scale {change}, {report.scale:g} -> {self._scale:g}")
        self._counts[report.skipped] += 1
        if self._counts.total() == self._summary_every:
            self._logger.log(self._level, f"{at} {_summary(self._counts[True], self._summary_every, report)}")
            self._counts.clear()

    def _log_skip(self, step: StepReport) -> None:
        if not step.skipped and step.by is not None:
            line = f"iteration {step.iteration}: rank {step.by} saw a spike{_data(step)}; the rule has act=False"
            self._logger.log(self._level, line)
        text = f"iteration {step.iteration}: step skipped"
        if step.skipped and step.reason != "overflow":
            why = next((words.deed for words in REASONS.values() if words.name == step.reason), "") or step.reason
            who = "some rank" if step.by is None else f"rank {step.by}"
            self._logger.log(self._skip_level, f"{text}: {who} {why}{_data(step)}")
        elif step.skipped:
            count = f"{step.nonfinite} non-finite gradient{'s' * (step.nonfinite != 1)} (inf or NaN)"
            text += f"{at_scale(step.scale)}, {count}{_data(step)}{_worst(step.overflow)}"
            self._logger.log(self._skip_level, text)


def _summary(skipped: int, updates: int, report: UpdateReport) -> str:
    """Say how many of the last updates were skipped, the scale after this one, and the steps of the whole run."""
    scale = report.scale if report.new_scale is None else report.new_scale
    total = ", ".join(f"{count} {name}" for name, count in (report.counts or {}).items())
    if scale == 1.0:
        total = total.replace("overflow", "non-finite")
    share = f"{skipped} of the last {updates} steps skipped ({100.0 * skipped / updates:.3g} %)"
    return share + f", scale {scale:g}" * (scale != 1.0) + f"; in all {total}" * bool(total)


def _data(step: StepReport) -> str:
    """Say whose loss it was, and this rank's own loss and batch."""
    whose = " of its loss" if step.reason in ("spike", "stepped") else f", rank {step.by} saw a bad loss"
    own = [f"loss {step.loss:g}"] if step.by_loss and step.loss is not None else []
    own += [f"batch {short_repr(step.batch)}"] * (step.batch is not None)
    return whose * step.by_loss + f" (here {', '.join(own)})" * bool(own)


def _worst(overflow: OverflowReport | None) -> str:
    """Return the end of a line: the names of the worst parameters, and whether the model is at fault."""
    if overflow is None:
        return ""
    names = list(dict.fromkeys(entry.place for entry in overflow.nonfinite if entry.place))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    scale = ", not the scale" * (overflow.scale != 1.0)
    cause = f"; the model is at fault{scale}" if overflow.cause == "model" else ""
    return f"{': ' if names else ''}{', '.join(names[:3])}{more}{cause}"


class TensorBoard:
    """Write scalars for each update to a TensorBoard writer.

    ``scale``, ``log2_scale``, ``skipped`` (1 or 0), ``nonfinite`` (gradients with inf or NaN), ``spike`` (1 or 0) and
    ``skip_rate`` (over the last ``window`` updates), by the scaler's iteration. For ``on_update``; InvalidTypeError as
    ``on_skip``, and for a writer without ``add_scalar``.

    Parameters
    ----------
    writer : object with add_scalar(tag, value, step)
        torch.utils.tensorboard.SummaryWriter, tensorboardX.SummaryWriter, ...; close it yourself.
    prefix : str, default "gradscale/"
        Before each tag.
    window : int, default 1000
        How many updates ``skip_rate`` counts.

    Examples
    --------
    >>> import gradscale
    >>> class Writer:  # torch.utils.tensorboard.SummaryWriter() in its place
    ...     def add_scalar(self, tag, value, step):
    ...         if tag == "amp/scale": print(step, tag, value)
    >>> callback = gradscale.callbacks.TensorBoard(Writer(), prefix="amp/")  # for GradScaler(on_update=callback)
    >>> callback(gradscale.UpdateReport(iteration=1, scale=65536.0, skipped=False, rank=0, steps=()))
    1 amp/scale 65536.0
    """

    def __init__(self, writer: SummaryWriter, prefix: str = "gradscale/", *, window: int = 1000) -> None:
        if not callable(getattr(writer, "add_scalar", None)):
            expected = "an object with add_scalar(tag, value, step), such as torch's SummaryWriter()"
            raise validation.wrong_type(writer, "writer", expected)
        self._writer = writer
        self._prefix = prefix
        self._recent = collections.deque[bool](maxlen=validation.integer("window", window, 1, validation.LARGEST_INT32))

    def __call__(self, report: UpdateReport) -> None:
        """Write an update's scalars."""
        if not isinstance(report, UpdateReport):
            msg = f"TensorBoard must be given as on_update=, got a {type(report).__name__}"
            raise InvalidTypeError(msg)
        self._recent.append(report.skipped)
        scalars = {
            "scale": report.scale,
            "log2_scale": math.log2(report.scale),
            "skipped": int(report.skipped),
            "nonfinite": max((step.nonfinite for step in report.steps), default=0),
            "spike": int(any(step.reason == "spike" for step in report.steps)),
            "skip_rate": sum(self._recent) / len(self._recent),
        }
        for name, value in scalars.items():
            self._writer.add_scalar(f"{self._prefix}{name}", value, report.iteration)


def row_of(report: UpdateReport | StepReport) -> LogRow:
    """Return a report as a line of a log, of plain values; a StepReport has no rank and no ``new_scale``."""
    steps = report.steps if isinstance(report, UpdateReport) else (report,)
    reasons = {step.reason for step in steps if step.skipped}
    return {
        "iteration": report.iteration,
        "rank": getattr(report, "rank", None),
        "scale": report.scale,
        "new_scale": getattr(report, "new_scale", None),
        "skipped": report.skipped,
        "reason": next((words.name for words in REASONS.values() if words.name in reasons), None),
        "nonfinite": max((step.nonfinite for step in steps), default=0),
        "retries": sum(step.retries for step in steps),
        **_diagnosis([step.overflow for step in steps if step.overflow is not None]),
        "counts": getattr(report, "counts", None),
        "batch": next((step.batch for step in steps if step.skipped or not reasons), None),
    }


def _diagnosis(reports: list[OverflowReport]) -> LogRow:
    """Return what a row of a log says of the diagnoses of its steps."""
    magnitudes = [entry.largest for report in reports for entry in report.entries if entry.largest is not None]
    worst = [entry.place for report in reports for entry in (report.broken or report.nonfinite)[:1]]
    cause = next((report.cause for report in reports), None)
    return {"magnitude": max(magnitudes, default=None), "parameter": next(iter(worst), None), "cause": cause}


class JSONLines(contextlib.AbstractContextManager["JSONLines"]):
    """Write a JSON object on a line of its own for each update, behind what the file holds.

    Its keys are ``iteration``, ``rank``, ``scale``, ``new_scale``, ``skipped``, ``reason`` (the gravest of the skipped
    steps, null without any), ``nonfinite``, ``retries``, and those of a diagnosis, null without one: ``magnitude`` (the
    largest finite one among the unscaled gradients), ``parameter`` (the worst one, or the worst array of the weights
    and the state) and ``cause``. Each row is in the file when the call returns, so that ``tail -f`` shows it and a
    crash keeps it. Two scalers may share a file: rows stay whole, but do not say which scaler wrote them. For a log of
    each rank give each a path of its own, and wrap it in :func:`gradscale.callbacks.every_rank`.

    Parameters
    ----------
    path : str or os.PathLike
        Delete the file, or give another path, to begin anew.

    Raises
    ------
    LogWriteError
        At construction if the file or its folder cannot be written; in a call if the row cannot be (a full disk): the
        scaler's state is complete by then, and training can go on.
    InvalidValueError
        For a file that holds something else.

    Examples
    --------
    >>> import gradscale, pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, gradscale.callbacks.JSONLines(f"{folder}/scale.jsonl") as log:
    ...     log(gradscale.UpdateReport(iteration=1, scale=65536.0, skipped=False, rank=0, steps=()))
    ...     print(pathlib.Path(folder, "scale.jsonl").read_text()[:47])
    {"iteration": 1, "rank": 0, "scale": 65536.0, "
    """

    _file: BinaryIO = io.BytesIO()

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = _as_text(path)
        advice = ". Make its folder with mkdir -p, or give a path in one that can be written"
        with _explained(LogWriteError, f"the log cannot be written, got {self.path!r}", advice):
            # Unbuffered, so that a crash loses no row; opened to append, so that lines of several writers stay whole.
            self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115, PTH123
            self._file.seek(0)
            first = self._file.readline(4096).rstrip()
        if first and not first.startswith(b"{"):
            self.close()
            msg = (
                f"the file to append to must be a JSON lines log, got {self.path!r}, which begins with "
                f"{first.decode(errors='replace')!r:.60}; give another path, or delete it"
            )
            raise InvalidValueError(msg)

    def __call__(self, report: UpdateReport | StepReport) -> None:
        """Write a report's row. A StepReport, from ``on_skip``, has no ``new_scale``."""
        self.write(row_of(report))

    def write(self, row: LogRow) -> None:
        """Write a row of plain values, with the iteration."""
        line = json.dumps(row).encode() + b"\n"
        advice = ". The scaler's state is complete: catch this error, or take the log out of its callbacks, and go on"
        with _explained(LogWriteError, f"iteration {row['iteration']} cannot be written to {self.path!r}", advice):
            # A crash or a full disk may have cut the last row.
            if self._file.seek(0, os.SEEK_END):
                self._file.seek(-1, os.SEEK_END)
                line = line if self._file.read(1) == b"\n" else b"\n" + line
            while line:
                line = line[self._file.write(line) :]

    def close(self) -> None:
        """Close the file; it cannot be written to any more. Again is fine."""
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[type[JSONLines], tuple[str]]:
        """Have copies and pickles append to the same file."""
        return type(self), (self.path,)

    __del__ = close


@contextlib.contextmanager
def _explained(kind: type[Exception], what: str, advice: str = "") -> Iterator[None]:
    """Raise an error of ours for an OSError or ValueError: what cannot be done, why, and advice."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = str(getattr(error, "strerror", None) or error).rstrip(".")
        msg = f"{what}: {reason}{advice}"
        raise kind(msg) from error


def _as_text(path: object) -> str:
    where = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(where, str):
        raise validation.wrong_type(path, "path", "a str or os.PathLike")
    return where


def read_log(path: str | os.PathLike[str]) -> list[LogRow]:
    """Read a log that JSONLines has written, or another file of JSON objects, one a line.

    A row that a crash or a full disk has cut is left out, with a warning.

    Returns
    -------
    list of dict
        The rows; each has its line number, from 1, as ``"line"``. Empty lines are left out, too.

    Raises
    ------
    InvalidValueError, InvalidTypeError
        For a line that is malformed, with the file, the line's number and what is there; for a file that cannot be
        read or holds no row; for a path of another type.

    Examples
    --------
    >>> import gradscale, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, gradscale.callbacks.JSONLines(f"{folder}/scale.jsonl") as log:
    ...     log(gradscale.UpdateReport(iteration=1, scale=65536.0, skipped=True, rank=0, steps=()))
    ...     print([(row["scale"], row["skipped"]) for row in gradscale.callbacks.read_log(f"{folder}/scale.jsonl")])
    [(65536.0, True)]
    """
    where = _as_text(path)
    with _explained(InvalidValueError, f"the log must be a text file that can be read, got {where!r}"):
        # With NUL some file systems fill up what a crash has cut.
        text = Path(where).read_text(encoding="utf-8-sig").replace("\0", "")
    rows, cut = [], []
    for number, line in enumerate(map(str.strip, text.split("\n")), 1):
        try:
            rows += [{**json.loads(line), "line": number}] if line else []
        except (ValueError, TypeError, RecursionError) as error:
            # A row that has its end is not cut, unless that is the end of an object in it.
            is_cut = getattr(error, "pos", 0) >= len(line) or "Unterminated" in str(error)
            if not line.startswith("{") or (line.endswith("}") and not is_cut):
                msg = f"line {number} of {where!r} must hold a JSON object, got {line!r:.60}"
                raise InvalidValueError(msg) from error
            cut.append(number)
    if not rows:
        msg = f"the log must hold at least one row, got {where!r}, which has none"
        raise InvalidValueError(msg)
    if cut:
        warn_caller(f"{where!r} is read without the rows that were cut, in line {', '.join(map(str, cut))}")
    return rows


def was_skipped(row: LogRow) -> bool | None:
    """Return whether the step of a row of a log was skipped; None if it does not say so."""
    skipped, name = row.get("skipped", row.get("overflow")), f"'skipped' or 'overflow' in line {row.get('line')}"
    return None if skipped is None else validation.boolean(name, skipped)


class BadBatches:
    """Write the batches of steps that were skipped for bad data, on the ranks that saw it, to one file of JSON lines.

    For ``on_skip``, of a guard whose steps are given ``batch=``. Not written are refusals, and gradients that are not
    finite at another scale than 1, if no loss was bad: the scale is the likely cause.

    Parameters
    ----------
    path : str or os.PathLike
        One for all ranks and runs; rows are appended whole. Errors are those of :class:`gradscale.callbacks.JSONLines`.

    Examples
    --------
    >>> import gradscale, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     guard = gradscale.StepGuard(on_skip=gradscale.callbacks.BadBatches(f"{folder}/bad.jsonl"))
    ...     gradscale.callbacks.read_bad_batches(f"{folder}/bad.jsonl")  # to be left out of the next run
    []
    """

    every_rank = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._log = JSONLines(path)
        # Begins a run: its iterations may be those of another one.
        self._log.write({"iteration": 0, "rank": None})

    def __call__(self, report: StepReport) -> None:
        """Write a skipped step's batch."""
        if not isinstance(report, StepReport):
            msg = f"BadBatches must be given as on_skip=, got a {type(report).__name__}"
            raise InvalidTypeError(msg)
        is_data = report.reason == "spike" or (report.reason == "overflow" and (report.by_loss or report.scale == 1.0))
        if is_data and report.rank is not None:
            kept = {name: getattr(report, name) for name in ("iteration", "rank", "by", "batch", "reason", "by_loss")}
            self._log.write(kept)


def read_bad_batches(path: str | os.PathLike[str], *, times: int = 1) -> list[int | str]:
    """Return the batches in a file of ``BadBatches`` that are to be left out, in the order of their steps.

    As Megatron-LM has it, those of an iteration in which several ranks were bad at once are none of them, since the
    data is not the cause then.

    Parameters
    ----------
    path : str or os.PathLike
        The file; errors are those of ``read_log``.
    times : int, default 1
        2 for only those that were bad twice on the same rank, in other iterations or runs.

    Returns
    -------
    list of int and str
        The arguments of ``step(batch=)``; of lists each item.

    Examples
    --------
    >>> import gradscale, numpy as np, tempfile
    >>> class SGD:
    ...     def step(self): print("stepped")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     guard = gradscale.StepGuard(on_skip=gradscale.callbacks.BadBatches(f"{folder}/bad.jsonl"))
    ...     optimizer = SGD()
    ...     optimizer.grads = [np.float32([np.nan])]
    ...     guard.step(optimizer, loss=np.nan, batch=20411)
    ...     gradscale.callbacks.read_bad_batches(f"{folder}/bad.jsonl")
    [20411]
    """
    times = validation.integer("times", times, 1, validation.LARGEST_INT32)
    run, iterations = 0, collections.defaultdict[tuple[Any, ...], dict[int, dict[int | str, None]]](dict)
    for row in read_log(path):
        batch = row.get("batch")
        try:
            run += row["iteration"] == 0
            # A run that goes back to a checkpoint has an iteration again, and perhaps for another rank.
            by = row["by"] if row["iteration"] != 0 else None
            batches = iterations[run, row["iteration"], by].setdefault(row["rank"], {})
            batches |= dict.fromkeys(one for one in (batch if isinstance(batch, list) else [batch]) if one is not None)
        except (KeyError, TypeError) as error:
            raise validation.wrong_value(row, f"line {row['line']}", "a row of BadBatches") from error
    counts = collections.Counter[tuple[int, int | str]]()
    for ranks in iterations.values():
        for rank, batches in ranks.items() if len(ranks) == 1 else ():
            counts.update((rank, one) for one in batches)
    return list(dict.fromkeys(batch for (_, batch), count in counts.items() if count >= times))
