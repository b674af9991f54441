"""Callbacks for GradScaler's on_skip and on_update: LogUpdates, TensorBoard, JSONLines, and every_rank.

A scaler calls them on rank 0, and on every rank those whose attribute ``every_rank`` is true::

    scaler = gradscale.GradScaler(on_update=[callbacks.LogUpdates(), callbacks.JSONLines("scale.jsonl")])
"""

from __future__ import annotations

import collections
import functools
import logging
import math
from collections.abc import Callable
from typing import Protocol, TypeVar

from gradscale.core import validation
from gradscale.errors import InvalidTypeError
from gradscale.scaler.overflow import OverflowReport
from gradscale.scaler.reports import StepReport, UpdateReport
from gradscale.tools.logs import JSONLines, read_log

__all__ = ["JSONLines", "LogUpdates", "TensorBoard", "every_rank", "read_log"]

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
        msg = f"callback must be a callable that takes a report, got {callback!r}"
        raise InvalidTypeError(msg)
    call = functools.partial(callback)
    call.every_rank = True  # type: ignore[attr-defined]
    return call


class LogUpdates:
    """Log a line for each skipped step, and one with the scale before and after each update that changed it.

    As ``on_update`` it logs both, as ``on_skip`` skipped steps alone, and as both each step once.

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
            msg = f"logger must be a logging.Logger, such as logging.getLogger(__name__), got {logger!r}"
            raise InvalidTypeError(msg)
        self._logger = logger or logging.getLogger("gradscale")
        self._level = validation.integer("level", level, 0, validation.LARGEST_INT32)
        self._skip_level = validation.integer("skip_level", skip_level, 0, validation.LARGEST_INT32)
        self._summary_every = validation.integer("summary_every", summary_every, 0, validation.LARGEST_INT32)
        self._scale: float | None = None
        # The iteration whose skipped steps it has logged as on_skip.
        self._told: int | None = None
        # How many updates since the last summary were skipped, and how many were not.
        self._counts = collections.Counter[bool]()

    def __call__(self, report: UpdateReport | StepReport) -> None:
        """Log a report's lines, if it has any."""
        if isinstance(report, StepReport):
            self._tell_skip(report)
            self._told = report.iteration
            return
        at = f"iteration {report.iteration}:"
        if self._scale not in (None, report.scale):
            # Between two updates, such as by load_state_dict.
            self._logger.log(self._level, f"{at} scale was set, {self._scale:g} -> {report.scale:g}")
        self._scale = report.scale if report.new_scale is None else report.new_scale
        for step in report.steps if self._told != report.iteration else ():
            self._tell_skip(step)
        if report.skipped and not any(step.skipped for step in report.steps):
            # The gradients were unscaled, and the loop did not call step().
            self._logger.log(self._skip_level, f"{at} gradients to be skipped at scale {report.scale:g}")
        self._told = None
        if self._scale != report.scale:
            change = "grew" if self._scale > report.scale else "backed off"
            self._logger.log(self._level, f"{at} scale {change}, {report.scale:g} -> {self._scale:g}")
        self._counts[report.skipped] += 1
        skipped, updates = self._counts[True], self._counts.total()
        if updates == self._summary_every:
            share = f"{skipped} of the last {updates} steps skipped ({100.0 * skipped / updates:.3g} %)"
            total = ", ".join(f"{count} {name}" for name, count in (report.counts or {}).items())
            self._logger.log(self._level, f"{at} {share}, scale {self._scale:g}{'; in all ' * bool(total)}{total}")
            self._counts.clear()

    def _tell_skip(self, step: StepReport) -> None:
        text = f"iteration {step.iteration}: step skipped"
        if step.skipped and step.reason != "overflow":
            why = {"spike": "saw a spike", "refused": "refused it"}.get(step.reason, step.reason)
            self._logger.log(self._skip_level, f"{text}: rank {step.by} {why}")
        elif step.skipped:
            count = f"{step.nonfinite} non-finite gradient{'s' * (step.nonfinite != 1)} (inf or NaN)"
            self._logger.log(self._skip_level, f"{text} at scale {step.scale:g}, {count}{_worst(step.overflow)}")


def _worst(overflow: OverflowReport | None) -> str:
    """Return the end of a line: the names of the worst parameters, and whether the model is at fault."""
    if overflow is None:
        return ""
    names = list(dict.fromkeys(entry.name for entry in overflow.nonfinite))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    cause = "; the model is at fault, not the scale" if overflow.cause == "model" else ""
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
            msg = f"writer must have add_scalar(tag, value, step), as torch's SummaryWriter() has, got {writer!r}"
            raise InvalidTypeError(msg)
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
