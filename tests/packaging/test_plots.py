"""Plots: what is drawn of a history and of simulations, without touching a program's own backend."""

from pathlib import Path

import numpy as np
import pytest
from axes import require
from optimizers import Tree, iterate_plainly

from gradscale import DynamicScale, GradScaler, InvalidTypeError, InvalidValueError, StaticScale, plot
from gradscale.scaler.reports import UpdateReport
from gradscale.tools.callbacks import JSONLines
from gradscale.tools.simulation import simulate

REPORTS = [UpdateReport(i, 8.0 / i, i == 2, 0, ()) for i in (1, 2, 3)]


@pytest.fixture(autouse=True)
def library():
    """Skip where there is no matplotlib."""
    require("plot")


def test_a_run_its_reports_and_its_log_are_drawn_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    reports: list[UpdateReport] = []
    scaler, optimizer = GradScaler(on_update=[JSONLines("log.jsonl"), reports.append]), Tree()
    for gradient in (np.inf, 1.0, np.inf):
        iterate_plainly(scaler, optimizer, gradient)
    for history in (scaler, reports, Path("log.jsonl")):
        (axes,) = plot.history(history).axes
        assert axes.get_title(loc="left").startswith("2 of 3 steps skipped (66.7 %)"), history
        assert axes.collections[0].get_offsets().tolist() == [[1.0, 65536.0], [3.0, 32768.0]]
        # The line ends with what the last update has made of the scale.
        assert list(dict.fromkeys(axes.lines[0].get_ydata())) == [65536.0, 32768.0, 16384.0]
        assert list(axes.lines[0].get_xdata())[-1] == 4
        assert axes.get_ylim()[0] < 16384.0
    # Without a path nothing is written.
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]
    plot.history(reports, "plot.png")
    assert Path("plot.png").stat().st_size > 1000


@pytest.mark.parametrize(("again", "label"), [(4, "iteration"), (2, "row of the log")])
def test_a_resumed_run_that_made_iterations_twice_is_drawn_by_the_rows_of_its_log(again: int, label: str):
    (axes,) = plot.history([*REPORTS, UpdateReport(again, 1.0, True, 0, ())]).axes
    assert (axes.get_xlabel(), axes.collections[0].get_offsets()[-1].tolist()) == (label, [4.0, 1.0])


def test_a_scale_that_turns_more_often_than_a_picture_has_columns_is_drawn_by_few_points():
    run = simulate(DynamicScale(init_scale=1024.0, growth_interval=1), "CO" * 10_000 + "C" * 10_000, name="nervous")
    (line,) = plot.simulation(run).axes[0].lines
    drawn = list(zip(line.get_xdata().tolist(), line.get_ydata().tolist(), strict=True))
    assert len(drawn) < 6000
    for column in range(0, 20_000, 1000):
        assert {y for x, y in drawn if column < x <= column + 1000} == {1024.0, 2048.0}
    assert drawn[-1] == (30_001, run.scale[-1])
    assert plot.simulation(run).axes[0].get_title(loc="left").startswith("nervous: 10,000 of 30,000")


def test_each_ax_has_limits_for_its_own_runs():
    ax = plot.history(REPORTS).axes[0]
    plot.history([UpdateReport(4, 2.0**20, False, 0, ())], ax=ax)
    assert ax.get_ylim()[0] < 8.0 / 3.0 < 2.0**20 < ax.get_ylim()[1]
    assert ax.get_xlim()[0] <= 1 < 5 <= ax.get_xlim()[1]
    falling = simulate(DynamicScale(init_scale=2.0**100), "O" * 12, name="falling")
    first, second = plot.simulation([falling, simulate(StaticScale(1024.0), "C" * 12, name="static")]).axes
    assert first.get_ylim()[0] < min(falling.scale) < max(falling.scale) < first.get_ylim()[1] < 2.0**104
    assert second.get_ylim()[0] < 1024.0 < second.get_ylim()[1] < 2.0**14
    # A scale that does not move is drawn on an axis of several powers of two all the same.
    assert second.get_ylim()[1] / second.get_ylim()[0] > 2.0**6


LOG_ROWS = {
    '{"scale": 2.0, "magnitude": "x"}': "a magnitude that is a number from 0 on, or none, got 'x'",
    f'{{"scale": 1{"0" * 400}}}': "a scale above 0 that float32 can hold, got 1000",
    '{"scale": 2.0, "new_scale": 0}': "a new_scale above 0 that float32 can hold, got 0",
    '{"magnitude": 1.0}': "a scale above 0 that float32 can hold, got None",
}


def test_what_cannot_be_drawn_is_refused_and_what_is_not_finite_left_out(tmp_path: Path):
    log = tmp_path / "log.jsonl"
    for row, said in LOG_ROWS.items():
        log.write_text(f'{{"scale": 2.0}}\n{row}\n')
        with pytest.raises(InvalidValueError, match=f"line 2 of .*must have {said}"):
            plot.history(log)
    for bad in (None, 3, [3], []):
        for draw in (plot.history, plot.simulation):
            with pytest.raises(
                (InvalidTypeError, InvalidValueError), match=r"must (hold|be at least one)|at least one "
            ):
                draw(bad)
    with pytest.raises(InvalidValueError, match=r"plot\.xyz.*supported formats"):
        plot.history(REPORTS, tmp_path / "plot.xyz")
    values = ("NaN", "Infinity", "1e308", "1.0")
    log.write_text("".join(f'{{"scale": 2.0, "magnitude": {value}}}\n' for value in values))
    figure = plot.history(log, tmp_path / "plot.png")
    assert figure.axes[1].collections[-1].get_offsets().tolist() == [[4.0, 2.0]]
