"""JSONLines and CSV: callbacks that write a row for each update; read_log reads them back."""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

from gradscale.core import validation
from gradscale.core.messages import shown
from gradscale.errors import InvalidTypeError, InvalidValueError, LogWriteError
from gradscale.reports.steps import StepReport, UpdateReport

__all__ = ["COLUMNS", "CSV", "JSONLines", "read_log", "row_of"]

COLUMNS = (
    "iteration",
    "rank",
    "scale",
    "new_scale",
    "skipped",
    "nonfinite",
    "retries",
    "magnitude",
    "parameter",
    "cause",
)

_TEXT = ("parameter", "cause")
_RANK = "{rank}"
_LONGEST_SHOWN = 60


def row_of(report: UpdateReport | StepReport) -> dict[str, Any]:
    """Return a report as a flat row of plain values, with ``COLUMNS`` as its keys.

    ``scale`` is the one before the iteration's update, ``new_scale`` the one after it, None for a StepReport.
    ``magnitude`` is the largest finite unscaled magnitude among the gradients, ``parameter`` the worst one's name and
    ``cause`` what is at fault, where an OverflowReport was made; else None.
    """
    steps = report.steps if isinstance(report, UpdateReport) else (report,)
    diagnosed = [step.overflow for step in steps if step.overflow is not None]
    magnitudes = [entry.largest for overflow in diagnosed for entry in overflow.entries if entry.largest is not None]
    worst = [overflow.nonfinite[0].name for overflow in diagnosed if overflow.nonfinite]
    return {
        "iteration": report.iteration,
        "rank": getattr(report, "rank", None),
        "scale": report.scale,
        "new_scale": getattr(report, "new_scale", None),
        "skipped": report.skipped,
        "nonfinite": max((step.nonfinite for step in steps), default=0),
        "retries": sum(step.retries for step in steps),
        "magnitude": max(magnitudes, default=None),
        "parameter": worst[0] if worst else None,
        "cause": diagnosed[0].cause if diagnosed else None,
    }


class _Format(NamedTuple):
    """How rows are written, and which files can be appended to."""

    header: bytes
    line: Callable[[dict[str, Any]], bytes]
    wanted: str
    fits: Callable[[bytes], bool]


def _csv_line(cells: Iterable[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def _csv_row(row: dict[str, Any]) -> bytes:
    return _csv_line(
        "" if value is None else value if name in _TEXT else json.dumps(value) for name, value in row.items()
    )


class _RowFile:
    """A file that gets a row for each report, written at once and in one piece."""

    _file: BinaryIO | None = None
    _has_rows = False
    _is_closed = False

    def __init__(self, format: _Format, path: str | os.PathLike[str], *, append: bool, every_rank: bool) -> None:  # noqa: A002
        self._format = format
        self.path = _as_text(path)
        self.every_rank = validation.boolean("every_rank", every_rank)
        self._append = validation.boolean("append", append)
        if self.every_rank and _RANK not in self.path:
            msg = (
                f"path must have {_RANK} in it with every_rank=True, so that each rank has its file, got {self.path!r}"
            )
            raise InvalidValueError(msg)
        if _RANK not in self.path:
            self._open(Path(self.path))
            return
        # The rank comes with the first report.
        folder = Path(self.path.replace(_RANK, "0")).parent
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except (OSError, ValueError) as error:
            raise _cannot_open(folder, error) from error

    def write(self, row: dict[str, Any]) -> None:
        """Write a row; the first one says of which rank the file is."""
        if self._is_closed:
            msg = f"the log is closed, got {self.path!r}: take it out of the scaler's callbacks before close()"
            raise LogWriteError(msg)
        file = self._file
        if file is None:
            if row["rank"] is None:
                msg = (
                    f"a log whose path has {_RANK} in it must be on_update=, as on_skip= has no rank, got {self.path!r}"
                )
                raise InvalidTypeError(msg)
            file = self._open(Path(self.path.replace(_RANK, str(row["rank"]))))
        line = self._format.line(row)
        try:
            if not self._has_rows:
                line = self._beginning(file) + line
            written = file.write(line)
            if written != len(line):
                msg = f"only {written} of {len(line)} bytes were written"
                raise OSError(msg)
            self._has_rows = True
        except OSError as error:
            # What was written of the row gets its line end before the next one.
            self._has_rows = False
            msg = (
                f"iteration {row['iteration']} cannot be written to {file.name!r}: {error.strerror or error}. The "
                f"scaler's state is complete: catch this error, or take the log out of its callbacks, and go on."
            )
            raise LogWriteError(msg) from error

    def close(self) -> None:
        """Close the file; it cannot be written to any more. Again is fine."""
        self._is_closed = True
        if self._file is not None:
            self._file.close()

    def __del__(self) -> None:
        self.close()

    def _open(self, path: Path) -> BinaryIO:
        try:
            # Unbuffered, so that a crash loses no row; opened to append, so that lines of several writers stay whole.
            file: BinaryIO = open(path, "a+b", buffering=0)  # noqa: SIM115, PTH123
            self._file = file
            file.seek(0)
            first = file.read(4096).partition(b"\n")[0] if self._append else b""
        except (OSError, ValueError) as error:
            raise _cannot_open(path, error) from error
        if first and not self._format.fits(first):
            self.close()
            msg = (
                f"the file to append to must {self._format.wanted}, got {str(path)!r}, which begins with "
                f"{_shown(first.decode(errors='replace'))}; give another path, or append=False to begin anew"
            )
            raise InvalidValueError(msg)
        return file

    def _beginning(self, file: BinaryIO) -> bytes:
        """Return what comes before the first row: a header, or the line end of a row that a crash has cut."""
        # Not at construction: every rank makes the object, and only those that call it may touch the file.
        if not self._append:
            file.truncate(0)
            self._append = True
        if file.seek(0, os.SEEK_END) == 0:
            return self._format.header
        file.seek(-1, os.SEEK_END)
        return b"" if file.read(1) == b"\n" else b"\n"


_JSON_LINES = _Format(
    header=b"",
    line=lambda row: json.dumps(row).encode() + b"\n",
    wanted="be a JSON lines log",
    fits=lambda first: first.startswith(b"{"),
)


class JSONLines:
    """Write a JSON object on a line of its own for each update, with ``COLUMNS`` as its keys.

    Each row is in the file when the call returns, so that ``tail -f`` shows it and a crash keeps it. Two scalers may
    share a file: rows stay whole, but nothing tells which one wrote them; better give each its own.

    Parameters
    ----------
    path : str or os.PathLike
        ``{rank}`` in it is replaced by this process's rank.
    append : bool, default True
        Keep what the file holds, as a resumed run wants; False begins anew with the first row.
    every_rank : bool, default False
        Write on every rank, and not on rank 0 alone; ``path`` must have ``{rank}`` in it then.

    Raises
    ------
    LogWriteError
        At construction when the file or its folder cannot be written; in a call when the row cannot be (a full disk):
        the scaler's state is complete by then, and training can go on.
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

    def __init__(self, path: str | os.PathLike[str], *, append: bool = True, every_rank: bool = False) -> None:
        self._rows = _RowFile(_JSON_LINES, path, append=append, every_rank=every_rank)
        self.path, self.every_rank = self._rows.path, self._rows.every_rank

    def __call__(self, report: UpdateReport | StepReport) -> None:
        """Write a report's row. A StepReport, from ``on_skip``, has no rank."""
        self._rows.write(row_of(report))

    def close(self) -> None:
        """Close the file; it cannot be written to any more. Again is fine."""
        self._rows.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_CSV = _Format(
    header=_csv_line(COLUMNS),
    line=_csv_row,
    wanted=f"have the columns {','.join(COLUMNS)}",
    fits=lambda first: first.rstrip(b"\r") == _csv_line(COLUMNS).rstrip(),
)


class CSV:
    """Write a line of comma-separated values for each update, below a first one with ``COLUMNS``.

    Parameters, errors and guarantees are those of :class:`JSONLines`; a file to append to must have the same columns,
    and keeps its one first line.

    Examples
    --------
    >>> import gradscale, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, gradscale.callbacks.CSV(f"{folder}/scale.csv") as log:
    ...     log(gradscale.UpdateReport(iteration=1, scale=65536.0, skipped=False, rank=0, steps=()))
    ...     print(gradscale.callbacks.read_log(f"{folder}/scale.csv")[0]["scale"])
    65536.0
    """

    def __init__(self, path: str | os.PathLike[str], *, append: bool = True, every_rank: bool = False) -> None:
        self._rows = _RowFile(_CSV, path, append=append, every_rank=every_rank)
        self.path, self.every_rank = self._rows.path, self._rows.every_rank

    def __call__(self, report: UpdateReport | StepReport) -> None:
        """Write a report's row. A StepReport, from ``on_skip``, has no rank."""
        self._rows.write(row_of(report))

    def close(self) -> None:
        """Close the file; it cannot be written to any more. Again is fine."""
        self._rows.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _as_text(path: Any) -> str:
    where = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(where, str):
        msg = f"path must be a str or os.PathLike, got {shown(path)} of type {type(path).__name__}"
        raise InvalidTypeError(msg)
    return where


def _cannot_open(path: Path, error: Exception) -> LogWriteError:
    msg = (
        f"the log cannot be written, got {str(path)!r}: {getattr(error, 'strerror', None) or error}. "
        f"Make its folder with mkdir -p, or give a path in one that can be written"
    )
    return LogWriteError(msg)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}...")


def read_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a log that JSONLines or CSV has written, or another file of JSON objects, one a line.

    Parameters
    ----------
    path : str or os.PathLike
        A name that ends in ``.csv`` is read as CSV; everything else as JSON lines. Empty lines are left out.

    Returns
    -------
    list of dict
        The rows; each has its line number, from 1, as ``"line"``.

    Raises
    ------
    InvalidValueError
        For a line that is malformed, with the file, the line's number and what is there; for a file that cannot be
        read or holds no row.
    InvalidTypeError
        For a path of another type.

    Examples
    --------
    >>> import gradscale, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, gradscale.callbacks.JSONLines(f"{folder}/scale.jsonl") as log:
    ...     log(gradscale.UpdateReport(iteration=1, scale=65536.0, skipped=True, rank=0, steps=()))
    ...     print([(row["scale"], row["skipped"]) for row in gradscale.callbacks.read_log(f"{folder}/scale.jsonl")])
    [(65536.0, True)]
    """
    where = _as_text(path)
    try:
        text = Path(where).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        msg = (
            f"the log must be a text file that can be read, got {where!r}: {getattr(error, 'strerror', None) or error}"
        )
        raise InvalidValueError(msg) from error
    rows = _rows_of_csv(where, text) if where.lower().endswith(".csv") else _rows_of_json(where, text)
    if not rows:
        msg = f"the log must hold at least one row, got {where!r}, which is empty"
        raise InvalidValueError(msg)
    return rows


def _rows_of_json(where: str, text: str) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            row = _parsed(where, number, "a JSON object", line)
            if not isinstance(row, dict):
                raise _malformed(where, number, "a JSON object", line)
            rows.append(row | {"line": number})
    return rows


def _rows_of_csv(where: str, text: str) -> list[dict[str, Any]]:
    rows = []
    reader = csv.reader(io.StringIO(text))
    try:
        header = next(reader, [])
        for cells in filter(None, reader):
            number = reader.line_num
            if len(cells) != len(header):
                raise _malformed(where, number, f"{len(header)} values", ",".join(cells))
            row: dict[str, Any] = {"line": number}
            for name, cell in zip(header, cells, strict=True):
                # Numbers and booleans are written as in JSON; the rest is text.
                is_text = name in _TEXT or not cell
                wanted = f"a number or true or false as {name}"
                row[name] = (cell or None) if is_text else _parsed(where, number, wanted, cell)
            rows.append(row)
    except csv.Error as error:
        raise _malformed(where, reader.line_num, "comma-separated values", f"{error}") from error
    return rows


def _parsed(where: str, line: int, wanted: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _malformed(where, line, wanted, text) from error


def _malformed(where: str, line: int, wanted: str, got: str) -> InvalidValueError:
    msg = f"line {line} of {where!r} must hold {wanted}, got {_shown(got)}"
    return InvalidValueError(msg)
