"""Callbacks: what they log and write, what a resumed run keeps, and what is refused before training."""

import json
import logging
import resource
from pathlib import Path

import numpy as np
import pytest
from optimizers import Tree

import gradscale
from gradscale import InvalidTypeError, InvalidValueError
from gradscale.errors import LogWriteError
from gradscale.scaler.overflow import OverflowReport, ParameterReport
from gradscale.scaler.reports import StepReport, UpdateReport
from gradscale.tools.callbacks import JSONLines, LogUpdates, TensorBoard, read_log


def update(
    iteration: int, scale: float = 8.0, new_scale: float | None = None, *, skipped: bool = False, rank: int = 0
) -> UpdateReport:
    step = StepReport(skipped, scale, 2 * skipped, "overflow" if skipped else "stepped", iteration)
    return UpdateReport(iteration, scale, skipped, rank, (step,), scale if new_scale is None else new_scale)


def test_a_resumed_run_appends_its_rows_and_each_is_there_at_once(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    for first in (1, 3):
        with JSONLines(path) as log:
            for iteration in (first, first + 1):
                log(update(iteration, skipped=iteration == 3))
                assert [row["iteration"] for row in read_log(path)] == list(range(1, iteration + 1))
    with JSONLines(path) as log:
        # It has the retries of all closures.
        log(update(5)._replace(steps=tuple(StepReport(False, 8.0, 0, "stepped", 5, retries) for retries in (2, 3))))
    assert [row["skipped"] for row in read_log(path)] == [False, False, True, False, False]
    assert (read_log(path)[-1]["retries"], path.read_text().count("iteration")) == (5, 5)


def test_a_row_that_a_crash_has_cut_does_not_spoil_the_next_and_beginning_anew_waits_for_it(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"iteration": 1, "sca')
    with JSONLines(path) as log:
        log(update(2))
    assert json.loads(path.read_text().splitlines()[1])["iteration"] == 2
    with JSONLines(path, append=False) as log:
        assert path.read_text().startswith('{"iteration": 1, "sca')
        log(update(7))
        log(update(8))
    assert [row["iteration"] for row in read_log(path)] == [7, 8]


@pytest.mark.parametrize("text", ['{"cut', "[" * 100_000, "1" * 200_000, "{}\nmagnitude"], ids=lambda text: text[-3:])
def test_a_line_that_the_parser_gives_up_on_is_named(text: str, tmp_path: Path):
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidValueError, match=r"line \d of .*must hold a JSON object, got '"):
        read_log(path)


def test_each_rank_has_its_file_and_other_files_and_folders_that_are_not_there_are_refused(tmp_path: Path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InvalidValueError, match=r"must be a JSON lines log, got .*, which begins with 'a,b'"):
        JSONLines(path)
    assert path.read_text() == "a,b\n1,2\n"
    for name in ("none/log.jsonl", "none/log-{rank}.jsonl"):
        with pytest.raises(LogWriteError, match="No such file or directory"):
            JSONLines(tmp_path / name)
    with pytest.raises(InvalidValueError, match="every_rank=True"):
        JSONLines(tmp_path / "log.jsonl", every_rank=True)
    for rank in (0, 1):
        with JSONLines(tmp_path / "log-{rank}.jsonl", every_rank=True) as log:
            log(update(1, rank=rank))
        assert read_log(tmp_path / f"log-{rank}.jsonl")[0]["rank"] == rank
    for bad in (None, 3, b"log.jsonl"):
        for use in (JSONLines, read_log):
            with pytest.raises(InvalidTypeError, match=r"path must be a str or os\.PathLike, got"):
                use(bad)  # type: ignore[arg-type]
    with pytest.raises(LogWriteError, match="null"):
        JSONLines("a\0b")
    with pytest.raises(InvalidValueError, match="null"):
        read_log("a\0b")


def test_a_full_disk_says_that_training_can_go_on(tmp_path: Path):
    with JSONLines(tmp_path / "log.jsonl") as log:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        # No file of this process can grow; then a row fits in part.
        for iteration, room in ((1, 0), (3, 20)):
            largest = (tmp_path / "log.jsonl").stat().st_size + room
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, before[1]))
            try:
                with pytest.raises(LogWriteError, match=rf"iteration {iteration} .*File too large.*complete"):
                    log(update(iteration))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
            log(update(iteration + 1))
    assert [row["iteration"] for row in read_log(tmp_path / "log.jsonl")] == [2, 4]


def test_logging_tells_of_skips_and_changes_of_the_scale_and_nothing_else(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    log = LogUpdates(summary_every=2)
    skipped = update(2, 8.0, 4.0, skipped=True)
    log(update(1))
    log(skipped.steps[0])
    log(skipped)
    log(update(3, 4.0))
    log(update(4, 4.0, 16.0))
    log(update(5, 2.0, 2.0))
    # All ranks skip the step, which the loop has left out.
    log(update(6, 2.0, skipped=True)._replace(steps=()))
    assert caplog.messages == [
        "iteration 2: step skipped at scale 8, 2 non-finite gradients (inf or NaN)",
        "iteration 2: scale backed off, 8 -> 4",
        "iteration 2: 1 of the last 2 steps skipped (50 %), scale 4",
        "iteration 4: scale grew, 4 -> 16",
        "iteration 4: 0 of the last 2 steps skipped (0 %), scale 16",
        "iteration 5: scale was set, 16 -> 2",
        "iteration 6: gradients to be skipped at scale 2",
        "iteration 6: 1 of the last 2 steps skipped (50 %), scale 2",
    ]


def test_a_parameter_that_several_ranks_have_is_named_once(caplog: pytest.LogCaptureFixture):
    entries = tuple(ParameterReport("w", (rank,), inf=1) for rank in range(5))
    overflow = OverflowReport(entries, 8.0, 1, "scale", "")
    LogUpdates()(StepReport(True, 8.0, 1, "overflow", 1, overflow=overflow))
    assert caplog.messages == ["iteration 1: step skipped at scale 8, 1 non-finite gradient (inf or NaN): w"]


@pytest.mark.numpy
def test_skips_of_each_reason_are_told_and_written_with_the_worst_parameters_and_the_cause_and_no_schedule_goes_on(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    caplog.set_level(logging.INFO)
    log, path, optimizer = LogUpdates(summary_every=9), tmp_path / "log.jsonl", Tree()
    schedule = type("Schedule", (), {"steps": 0, "step": lambda self: setattr(self, "steps", self.steps + 1)})()
    rule = gradscale.SkipSpikes(window=8, min_values=4, of="loss")
    with JSONLines(path) as lines:
        scaler = gradscale.GradScaler(skip=rule, on_skip=log, on_update=[log, lines], diagnose="on_overflow")
        for loss, bad in (*[(1.0, "")] * 4, (9.0, ""), (1.0, "b"), (1.0, "abcd"), (np.nan, "bc"), (1.0, "refused")):
            scaler.scale(np.float32(loss))
            optimizer.grads = {name: np.full(3, np.inf if name in bad[:4] else 4.0, np.float32) for name in "abcd"}
            if bad == "refused":
                scaler.refuse(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scaler.step_schedule(optimizer, schedule)
    # They have the words that watchers of clusters look for: non-finite grad, NaN, inf, skipped.
    skip = "iteration {}: step skipped at scale {}, {} (inf or NaN): {}"
    assert caplog.messages == [
        "iteration 5: step skipped: rank 0 saw a spike",
        skip.format(6, 65536, "1 non-finite gradient", "['b']"),
        "iteration 6: scale backed off, 65536 -> 32768",
        skip.format(7, 32768, "4 non-finite gradients", "['a'], ['b'], ['c'] and 1 more"),
        "iteration 7: scale backed off, 32768 -> 16384",
        skip.format(8, 16384, "2 non-finite gradients", "['b'], ['c']; the model is at fault, not the scale"),
        "iteration 8: scale backed off, 16384 -> 8192",
        "iteration 9: step skipped: rank 0 refused it",
        "iteration 9: 5 of the last 9 steps skipped (55.6 %), scale 8192; "
        "in all 4 taken, 3 overflow, 1 spike, 1 refused",
    ]
    keys = ("reason", "parameter", "cause", "nonfinite", "magnitude")
    assert [tuple(row[key] for key in keys) for row in read_log(path)][4:] == [
        ("spike", None, None, 0, None),
        ("overflow", "['b']", "scale", 1, 2.0**-14),
        ("overflow", "['a']", "scale", 4, None),
        ("overflow", "['b']", "model", 2, 2.0**-12),
        ("refused", None, None, 0, None),
    ]
    assert read_log(path)[-1]["counts"] == {"taken": 4, "overflow": 3, "spike": 1, "refused": 1}
    assert schedule.steps == 4


def test_tensorboard_gets_scalars_by_iteration():
    class Writer:
        def __init__(self):
            self.scalars: dict[tuple[str, int], float] = {}

        def add_scalar(self, tag: str, value: float, step: int):
            self.scalars[tag, step] = value

    writer = Writer()
    board = TensorBoard(writer, prefix="s/", window=2)
    for iteration in (1, 2, 3, 4):
        board(update(iteration, skipped=iteration == 2))
    assert writer.scalars["s/log2_scale", 1] == 3.0
    assert [writer.scalars["s/skip_rate", i] for i in (1, 2, 3, 4)] == [0.0, 0.5, 0.5, 0.0]
    assert writer.scalars["s/nonfinite", 2] == 2
    with pytest.raises(InvalidTypeError, match="add_scalar"):
        TensorBoard(object())
