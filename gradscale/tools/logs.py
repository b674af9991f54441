"""JSONLines: a callback that writes a row for each update; read_log reads them back."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from gradscale.core import validation
from gradscale.core.messages import shown
from gradscale.errors import GradscaleError, InvalidTypeError, InvalidValueError, LogWriteError
from gradscale.scaler.reports import REASONS, StepReport, UpdateReport

__all__ = ["JSONLines", "read_log", "row_of"]

_RANK = "{rank}"


def row_of(report: UpdateReport | StepReport) -> dict[str, Any]:
    """Return a report as a line of a log, of plain values; a StepReport has no rank and no ``new_scale``."""
    steps = report.steps if isinstance(report, UpdateReport) else (report,)
    diagnosed = [step.overflow for step in steps if step.overflow is not None]
    magnitudes = [entry.largest for overflow in diagnosed for entry in overflow.entries if entry.largest is not None]
    reasons = {step.reason for step in steps if step.skipped}
    worst = [entry.place for overflow in diagnosed for entry in (overflow.broken or overflow.nonfinite)[:1]]
    return {
        "iteration": report.iteration,
        "rank": getattr(report, "rank", None),
        "scale": report.scale,
        "new_scale": getattr(report, "new_scale", None),
        "skipped": report.skipped,
        "reason": next((reason for reason in REASONS.values() if reason in reasons), None),
        "nonfinite": max((step.nonfinite for step in steps), default=0),
        "retries": sum(step.retries for step in steps),
        "magnitude": max(magnitudes, default=None),
        "parameter": worst[0] if worst else None,
        "cause": diagnosed[0].cause if diagnosed else None,
        "counts": getattr(report, "counts", None),
    }


class JSONLines(contextlib.AbstractContextManager["JSONLines"]):
    """Write a JSON object on a line of its own for each update.

    Its keys are ``iteration``, ``rank``, ``scale``, ``new_scale``, ``skipped``, ``reason`` (the gravest of the skipped
    steps, null without any), ``nonfinite``, ``retries``, and those of a diagnosis, null without one: ``magnitude`` (the
    largest finite one among the unscaled gradients), ``parameter`` (the worst one, or the worst array of the weights
    and the state) and ``cause``. Each row is in the file when the call returns, so that ``tail -f`` shows it and a
    crash keeps it. Two scalers may share a file: rows stay whole, but do not say which scaler wrote them.

    Parameters
    ----------
    path : str or os.PathLike
        ``{rank}`` in it is replaced by this process's rank.
    append : bool, default True
        Keep what the file holds, as a resumed run wants; False empties it before the first row.
    every_rank : bool, default False
        Write on every rank, and not on rank 0 alone; ``path`` must have ``{rank}`` in it then.

    Raises
    ------
    LogWriteError
        At construction if the file or its folder cannot be written; in a call if the row cannot be (a full disk): the
        scaler's state is complete by then, and training can go on.
    InvalidValueError
        For ``every_rank`` without ``{rank}``, and for a file to append to that holds something else.

    Examples
    --------
    >>> import gradscale, pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, gradscale.callbacks.JSONLines(f"{folder}/scale.jsonl") as log:
    ...     log(gradscale.UpdateReport(iteration=1, scale=65536.0, skipped=False, rank=0, steps=()))
    ...     print(pathlib.Path(folder, "scale.jsonl").read_text()[:47])
    {"iteration": 1, "rank": 0, "scale": 65536.0, "
    """

    _file: BinaryIO | None = None

    def __init__(self, path: str | os.PathLike[str], *, append: bool = True, every_rank: bool = False) -> None:
        self.path = _as_text(path)
        self.every_rank = validation.boolean("every_rank", every_rank)
        self._append = validation.boolean("append", append)
        if self.every_rank and _RANK not in self.path:
            msg = f"path must have {_RANK} in it with every_rank=True, for a file of each rank, got {self.path!r}"
            raise InvalidValueError(msg)
        self._open(self.path)

    def __call__(self, report: UpdateReport | StepReport) -> None:
        """Write a report's row. A StepReport, from ``on_skip``, has no rank."""
        row = row_of(report)
        path = self.path if row["rank"] is None else self.path.replace(_RANK, str(row["rank"]))
        file = self._file or self._open(path)
        if file is None:
            msg = f"a log with {_RANK} in its path must be on_update=, as on_skip= has no rank, got {self.path!r}"
            raise InvalidTypeError(msg)
        line = json.dumps(row).encode() + b"\n"
        advice = ". The scaler's state is complete: catch this error, or take the log out of its callbacks, and go on"
        with _explained(LogWriteError, f"iteration {row['iteration']} cannot be written to {path!r}", advice):
            # Not at construction: every rank makes the object, and only those that call it may touch the file.
            if not self._append:
                file.truncate(0)
                self._append = True
            # A crash or a full disk may have cut the last row.
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else b"\n" + line
            while line:
                line = line[file.write(line) :]

    def close(self) -> None:
        """Close the file; it cannot be written to any more. Again is fine."""
        # One that no report has opened cannot be opened any more, either.
        self._file = self._file or io.BytesIO()
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    __del__ = close

    def _open(self, path: str) -> BinaryIO | None:
        """Open a file; without the rank that its path needs, see whether there can be one."""
        advice = ". Make its folder with mkdir -p, or give a path in one that can be written"
        with _explained(LogWriteError, f"the log cannot be written, got {path!r}", advice):
            if _RANK in path:
                tempfile.TemporaryFile(dir=Path(path.replace(_RANK, "0")).parent).close()
                return None
            # Unbuffered, so that a crash loses no row; opened to append, so that lines of several writers stay whole.
            self._file = file = open(path, "a+b", buffering=0)  # noqa: SIM115, PTH123
            file.seek(0)
            first = file.readline(4096).rstrip() if self._append else b""
        if first and not first.startswith(b"{"):
            self.close()
            msg = (
                f"the file to append to must be a JSON lines log, got {path!r}, which begins with "
                f"{first.decode(errors='replace')!r:.60}; give another path, or append=False to empty it"
            )
            raise InvalidValueError(msg)
        return file


@contextlib.contextmanager
def _explained(kind: type[GradscaleError], what: str, advice: str = "") -> Iterator[None]:
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
        msg = f"path must be a str or os.PathLike, got {shown(path)} of type {type(path).__name__}"
        raise InvalidTypeError(msg)
    return where


def read_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a log that JSONLines has written, or another file of JSON objects, one a line.

    Parameters
    ----------
    path : str or os.PathLike
        A text file; empty lines are left out.

    Returns
    -------
    list of dict
        The rows; each has its line number, from 1, as ``"line"``.

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
        text = Path(where).read_text(encoding="utf-8-sig")
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                rows.append({**json.loads(line), "line": number})
            except (ValueError, TypeError, RecursionError) as error:
                msg = f"line {number} of {where!r} must hold a JSON object, got {line!r:.60}"
                raise InvalidValueError(msg) from error
    if not rows:
        msg = f"the log must hold at least one row, got {where!r}, which is empty"
        raise InvalidValueError(msg)
    return rows
