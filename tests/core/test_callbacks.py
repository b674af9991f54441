"""Callbacks: what they log and write, what a resumed run keeps, and what is refused before training."""

import contextlib
import copy
import dataclasses
import json
import logging
import math
import pickle
import resource
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from optimizers import Tree

import gradscale
from gradscale import GradScaler, InvalidTypeError, InvalidValueError, StepGuard
from gradscale.errors import LogWriteError
from gradscale.scaler.reports import StepReport, UpdateReport
from gradscale.testing import run_ranks
from gradscale.tools.callbacks import (
    BadBatches,
    JSONLines,
    LogUpdates,
    TensorBoard,
    every_rank,
    read_bad_batches,
    read_log,
)


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


ROW = '{"iteration": 2, "scale": 655, "skipped": false, "counts": {"taken": 2}, "batch": "a"}'


@pytest.mark.parametrize("length", range(1, len(ROW)))
def test_a_row_that_a_crash_has_cut_is_left_out_with_a_warning_and_does_not_spoil_the_next(length: int, tmp_path: Path):
    path = tmp_path / "log.jsonl"
    path.write_text(f'{{"iteration": 1, "rank": 0}}\n{ROW[:length]}')
    for later in ([], [3]):
        for iteration in later:
            with JSONLines(path) as log:
                log(update(iteration))
        with pytest.warns(UserWarning, match=r"log\.jsonl' is read without the rows that were cut, in line 2$"):
            assert [row["iteration"] for row in read_log(path)] == [1, *later]


@pytest.mark.parametrize("row", [ROW, ROW[:9]], ids=["whole", "cut"])
def test_zeros_that_a_file_system_has_filled_in_are_no_row(row: str, tmp_path: Path):
    path = tmp_path / "log.jsonl"
    path.write_text(row + "\0" * 40)
    with JSONLines(path) as log:
        log(update(3))
    with contextlib.nullcontext() if row == ROW else pytest.warns(UserWarning, match="without the rows that were cut"):
        rows = [read["iteration"] for read in read_log(path)]
    assert rows == ([json.loads(ROW)["iteration"]] if row == ROW else []) + [3]


BROKEN = ["[" * 100_000, "1" * 200_000, "{}\nmagnitude", '{"scale": oops}', '{"scale": 1 "skipped": true}']


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: text[-5:])
def test_a_line_that_the_parser_gives_up_on_is_named(text: str, tmp_path: Path):
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidValueError, match=r"line \d of .*must hold a JSON object, got '"):
        read_log(path)


@pytest.mark.parametrize("row", ["{}", '{"iteration": 1}', '{"iteration": 1, "rank": {}}'])
@pytest.mark.parametrize("batch", [1, {"a": 1}, [[1]]], ids=str)
def test_a_log_of_another_kind_holds_no_bad_batches(row: str, batch: object, tmp_path: Path):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(json.loads(row) | {"batch": batch}))
    with pytest.raises(InvalidValueError, match=r"line 1 must be a row of BadBatches, got \{"):
        read_bad_batches(path)


def test_each_rank_may_have_its_file_and_other_files_and_folders_that_are_not_there_are_refused(tmp_path: Path):
    path, no_path = tmp_path / "other.csv", r"path must be a str or os\.PathLike, got"
    path.write_text("a,b\n1,2\n")
    wrong: list[tuple[Callable[..., Any], Any, type[Exception], str]] = [
        (JSONLines, path, InvalidValueError, r"must be a JSON lines log, got .*, which begins with 'a,b'"),
        (JSONLines, tmp_path / "none" / "log.jsonl", LogWriteError, "No such file or directory"),
        (JSONLines, "a\0b", LogWriteError, "null"),
        (read_log, "a\0b", InvalidValueError, "null"),
        *((use, bad, InvalidTypeError, no_path) for use in (JSONLines, read_log) for bad in (None, 3, b"log.jsonl")),
    ]
    for use, given, error, said in wrong:
        with pytest.raises(error, match=said):
            use(given)
    assert path.read_text() == "a,b\n1,2\n"

    def train(group) -> None:
        log = JSONLines(tmp_path / f"log-{group.rank}.jsonl")
        scaler, optimizer = (
            gradscale.ShardedGradScaler(group=group, on_update=every_rank(log)),
            Tree([np.float32([1.0])]),
        )
        scaler.scale(np.float32(1.0))
        scaler.step(optimizer)
        scaler.update()

    run_ranks(2, train)
    assert [read_log(tmp_path / f"log-{rank}.jsonl")[0]["rank"] for rank in (0, 1)] == [0, 1]


@pytest.mark.parametrize("name", ["on_skip", "on_update"])
@pytest.mark.parametrize("wrong", ["log.jsonl", JSONLines, [LogUpdates], [print, 1]], ids=str)
def test_what_is_no_callback_is_refused_before_the_first_report(name: str, wrong: object):
    with pytest.raises(InvalidTypeError, match=rf"{name} must be a callable .* such as callbacks.JSONLines"):
        StepGuard(**{name: wrong})


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
    # The row that fitted in part.
    with pytest.warns(UserWarning, match="that were cut, in line 2"):
        assert [row["iteration"] for row in read_log(tmp_path / "log.jsonl")] == [2, 4]


NAME = "w\nWARNING:gradscale:iteration 99: \x1b[31m\u2028\ud800"


def test_names_are_written_as_text_on_one_line(caplog: pytest.LogCaptureFixture):
    """Names of parameters and classes, of this rank and another, in logs, reports and errors."""
    optimizer, scaler = Tree([np.float32([np.inf])]), GradScaler()
    scaler.scale(np.float32(1.0))
    named = gradscale.ParameterReport(NAME, dtype="float32", size=1, inf=1)
    report = dataclasses.replace(scaler.diagnose(optimizer), entries=(named,), broken=(named,))
    LogUpdates()(StepReport(True, 8.0, 1, "overflow", 1, overflow=report))
    texts = [*caplog.messages, *str(report).split("\n")]
    evil = type(NAME[:-1], (Tree,), {})

    def train(group) -> None:
        mine = (evil if group.rank else Tree)([np.float32([1.0])])
        scaler = gradscale.ShardedGradScaler(group=group)
        scaler.scale(np.float32(1.0))
        scaler.step(mine)

    for call in (lambda: scaler.step(evil([])), lambda: scaler.unscale_(evil)):
        with pytest.raises(gradscale.GradscaleError, match=r"w\\nWARNING") as caught:
            call()
        texts.append(str(caught.value))
    texts += map(str, run_ranks(2, train, return_exceptions=True))
    assert [text for text in texts if not text.isprintable()] == []
    assert sum("\\x1b[31m" in text for text in texts) >= 6


@pytest.mark.parametrize("length", [1900, 2100, 10**6])
def test_an_error_is_short_and_keeps_its_end(length: int):
    for error in (gradscale.GradscaleError, InvalidValueError, LogWriteError, gradscale.BackendNotAvailableError):
        text = str(error("a" * length + " is wrong: do this"))
        assert (len(text) <= 2000, text[:9], text[-8:]) == (True, "a" * 9, " do this"), error


@pytest.mark.numpy
def test_skips_and_scales_are_told_and_written_with_the_worst_parameters_and_the_cause_and_no_schedule_goes_on(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    caplog.set_level(logging.INFO)
    log, path, optimizer = LogUpdates(logging.root, summary_every=9), tmp_path / "log.jsonl", Tree()
    schedule = type("Schedule", (), {"steps": 0, "step": lambda self: setattr(self, "steps", self.steps + 1)})()
    rule = gradscale.SkipSpikes(window=8, min_values=4, of="loss")
    with JSONLines(path) as lines:
        scaler = GradScaler(growth_interval=4, skip=rule, on_skip=log, on_update=[log, lines], diagnose="on_overflow")
        plan = [*[("step", 1.0, "")] * 4, ("step", 9.0, ""), ("step", 1.0, "b"), ("step", 1.0, "abcd")]
        plan += [("step", np.nan, "bc"), ("refuse", 1.0, ""), ("unscale_", 1.0, "a"), ("load", 1.0, "")]
        for call, loss, bad in plan:
            if call == "load":
                scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0})
            scaler.scale(np.float32(loss))
            optimizer.grads = {name: np.full(3, np.inf if name in bad else 4.0, np.float32) for name in "abcd"}
            if call == "refuse":
                scaler.refuse(optimizer)
            (scaler.unscale_ if call == "unscale_" else scaler.step)(optimizer)
            scaler.update()
            if call != "unscale_":
                scaler.step_schedule(optimizer, schedule)
    # They have the words that watchers of clusters look for: non-finite grad, NaN, inf, skipped.
    skip = "iteration {}: step skipped at scale {}, {} (inf or NaN){}"
    seen = ", rank 0 saw a bad loss (here loss nan)"
    assert caplog.messages == [
        "iteration 4: scale grew, 65536 -> 131072",
        "iteration 5: step skipped: rank 0 saw a spike of its loss (here loss 9)",
        skip.format(6, 131072, "1 non-finite gradient", ": ['b']"),
        "iteration 6: scale backed off, 131072 -> 65536",
        skip.format(7, 65536, "4 non-finite gradients", ": ['a'], ['b'], ['c'] and 1 more"),
        "iteration 7: scale backed off, 65536 -> 32768",
        skip.format(8, 32768, "2 non-finite gradients", f"{seen}: ['b'], ['c']; the model is at fault, not the scale"),
        "iteration 8: scale backed off, 32768 -> 16384",
        "iteration 9: step skipped: rank 0 refused it",
        "iteration 9: 5 of the last 9 steps skipped (55.6 %), scale 16384; "
        "in all 4 taken, 3 overflow, 1 spike, 1 refused",
        # All ranks skip the step, which the loop has left out.
        "iteration 10: gradients to be skipped at scale 16384",
        "iteration 10: scale backed off, 16384 -> 8192",
        "iteration 11: scale was set, 8192 -> 2",
    ]
    keys = ("reason", "parameter", "cause", "nonfinite", "magnitude")
    assert [tuple(row[key] for key in keys) for row in read_log(path)][4:9] == [
        ("spike", None, None, 0, None),
        ("overflow", "['b']", "scale", 1, 2.0**-15),
        ("overflow", "['a']", "scale", 4, None),
        ("overflow", "['b']", "model", 2, 2.0**-13),
        ("refused", None, None, 0, None),
    ]
    assert read_log(path)[-1]["counts"] == {"taken": 5, "overflow": 4, "spike": 1, "refused": 1}
    assert schedule.steps == 5


def test_tensorboard_gets_scalars_by_iteration():
    scalars: dict[tuple[str, int], float] = {}
    writer = types.SimpleNamespace(add_scalar=lambda tag, value, step: scalars.update({(tag, step): value}))
    board = TensorBoard(writer, prefix="s/", window=2)
    for iteration in (1, 2, 3, 4):
        board(update(iteration, skipped=iteration == 2))
    assert (scalars["s/log2_scale", 1], scalars["s/nonfinite", 2]) == (3.0, 2)
    assert [scalars["s/skip_rate", i] for i in (1, 2, 3, 4)] == [0.0, 0.5, 0.5, 0.0]
    with pytest.raises(InvalidTypeError, match="add_scalar"):
        TensorBoard(object())


# Bad batches.


def trained(path: Path, bad: dict[int, dict[int, float]], kind=StepGuard, **options: Any) -> None:
    """Train on threads with a batch named 10 * rank + iteration; ``bad``: by iteration and rank, losses."""

    def rank(group) -> None:
        scaler, optimizer = kind(group=group, on_skip=BadBatches(path), **options), Tree()
        for iteration in range(1, 9):
            loss = bad.get(iteration, {}).get(group.rank, 1.0)
            scaler.scale(np.float32(1.0))
            # An average spreads what one rank has.
            spread = [value for value in bad.get(iteration, {}).values() if not math.isfinite(value)]
            optimizer.grads = [np.float32([spread[0] if spread else 1.0])]
            scaler.step(optimizer, loss=loss, batch=[10 * group.rank + iteration])
            scaler.update()

    run_ranks(3, rank)


@pytest.mark.parametrize("loss", [math.nan, math.inf, 50.0], ids=["nan", "inf", "spike"])
@pytest.mark.parametrize("odd", range(3))
def test_the_batch_of_the_rank_with_the_bad_loss_is_written(odd: int, loss: float, tmp_path: Path):
    path = tmp_path / "bad.jsonl"
    rule = gradscale.SkipSpikes(window=4, min_values=2, of="loss")
    trained(path, {5: {odd: loss}, 7: {odd: loss, (odd + 1) % 3: loss}}, skip=rule)
    # Of iteration 7 several ranks were bad.
    assert read_bad_batches(path) == [10 * odd + 5]
    assert sorted(row["batch"][0] for row in read_log(path) if row["rank"] is not None) == sorted(
        [10 * odd + 5, 10 * odd + 7, 10 * ((odd + 1) % 3) + 7]
    )
    assert read_bad_batches(path, times=2) == []
    # Another run meets the first of them again, on the same rank in the same iteration, and another rank is bad in 7.
    trained(path, {5: {odd: loss}, 7: {(odd + 2) % 3: loss}}, skip=rule)
    assert read_bad_batches(path, times=2) == [10 * odd + 5]
    assert read_bad_batches(path) == [10 * odd + 5, 10 * ((odd + 2) % 3) + 7]


def test_what_is_no_bad_data_is_not_written_or_not_read(tmp_path: Path):
    path = tmp_path / "bad.jsonl"
    # The scale is the likely cause.
    scaler, optimizer = gradscale.GradScaler(on_skip=BadBatches(path)), Tree([np.float32([np.inf])])
    scaler.scale(np.float32(1.0))
    scaler.step(optimizer, batch="a")
    scaler.update()
    guard = StepGuard(on_skip=BadBatches(path))
    guard.refuse(optimizer)
    optimizer.grads = [np.float32([1.0])]
    guard.step(optimizer, batch="b")
    assert [row["iteration"] for row in read_log(path)] == [0, 0]
    # A step without a name.
    guard.step(optimizer, loss=math.nan)
    assert read_bad_batches(path) == []
    guard.step(optimizer, loss=math.nan, batch=["c", 3])
    assert read_bad_batches(path) == ["c", 3]
    with pytest.raises(InvalidTypeError, match="BadBatches must be given as on_skip="):
        BadBatches(path)(UpdateReport(1, 1.0, False, 0, ()))  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="times must be"):
        read_bad_batches(path, times=0)


def test_the_log_of_all_steps_is_none_of_bad_batches(tmp_path: Path):
    path = tmp_path / "scale.jsonl"
    with JSONLines(path) as log:
        guard, optimizer = StepGuard(on_update=log), Tree([np.float32([1.0])])
        guard.step(optimizer, batch=4)
    with pytest.raises(InvalidValueError, match=r"line 1 must be a row of BadBatches, got \{"):
        read_bad_batches(path)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_copies_and_pickles_of_a_callback_go_on_with_its_file(copied: Callable[[Any], Any], tmp_path: Path):
    path = tmp_path / "bad.jsonl"
    guard, optimizer = StepGuard(on_skip=BadBatches(path)), Tree([np.float32([1.0])])
    guard.step(optimizer, loss=math.nan, batch=1)
    guard.on_skip = copied(every_rank(copied(guard.on_skip[0])))
    guard.step(optimizer, loss=math.nan, batch=2)
    with JSONLines(path) as log, copied(log) as other:
        assert other.path == log.path
    assert (read_bad_batches(path), [row["iteration"] for row in read_log(path)]) == ([1, 2], [0, 1, 2])


def test_two_optimizers_and_a_run_that_goes_back_hide_no_batch(tmp_path: Path):
    path = tmp_path / "bad.jsonl"
    one, two = Tree([np.float32([1.0])]), Tree([np.float32([1.0])])
    # Of one iteration the second step names none, and a name twice is met once.
    scaler = gradscale.GradScaler(init_scale=1.0, on_skip=BadBatches(path))
    scaler.scale(np.float32(1.0))
    scaler.step(one, loss=math.nan, batch=[7, 7, 8])
    scaler.step(two, loss=math.nan)
    scaler.update()
    assert (read_bad_batches(path), read_bad_batches(path, times=2)) == ([7, 8], [])

    def rank(group) -> None:
        guard, optimizer = StepGuard(group=group, on_skip=BadBatches(path)), Tree([np.float32([1.0])])
        saved = guard.state_dict()
        for odd in (0, 1):
            guard.load_state_dict(saved)
            guard.step(optimizer, loss=math.nan if group.rank == odd else 1.0, batch=f"{group.rank} {odd}")

    run_ranks(2, rank)
    assert read_bad_batches(path) == [7, 8, "0 0", "1 1"]


def test_a_rank_that_only_looks_at_a_spike_has_not_seen_the_bad_loss_of_another(tmp_path: Path):
    path = tmp_path / "bad.jsonl"
    rule = gradscale.SkipSpikes(of="loss", above=10.0, act=False)

    def rank(group) -> int | None:
        guard, optimizer = StepGuard(group=group, skip=rule, on_skip=BadBatches(path)), Tree([np.float32([np.nan])])
        guard.step(optimizer, loss=(20.0, math.nan)[group.rank], batch=group.rank)
        return guard.last_step(optimizer).rank

    assert run_ranks(2, rank) == [None, 1]
    assert read_bad_batches(path) == [1]
