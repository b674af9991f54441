"""What history and callbacks cost where nobody uses them: whole iterations, against a scaler that keeps no reports."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

import gradscale
from benchmarks.measure import Call, Row, interleaved
from gradscale.reports.recorder import Reports
from gradscale.reports.steps import StepReport
from gradscale.scaler.scaler import iteration_of, scaler_of

__all__ = ["CASES"]


class _LastReports(Reports[Any]):
    """Keeps the last report of each optimizer, and does nothing else about reports."""

    def record(self, optimizer: Any, report: StepReport, rank: Callable[[], int] | None = None) -> None:  # noqa: ARG002
        self._last.put(optimizer, report)


def _without_reports(scaler: gradscale.GradScaler) -> gradscale.GradScaler:
    return scaler_of(iteration_of(scaler).parts._replace(reports=_LastReports()))


def unused_reports(quick: bool) -> list[Row]:
    """Run iterations with 300 small gradients, with the default history and without any."""
    rng = np.random.default_rng(0)
    gradients = [rng.standard_normal(10, np.float32) for _ in range(300)]
    loss = np.ones((), np.float32)

    def iterations(made: Callable[[gradscale.GradScaler], gradscale.GradScaler]) -> Call:
        parameters = [SimpleNamespace(grad=gradient.copy()) for gradient in gradients]
        optimizer = SimpleNamespace(param_groups=[{"params": parameters}], step=lambda: None)
        scaler = made(gradscale.GradScaler(init_scale=1.0, growth_interval=1 << 30))

        def iterate() -> None:
            scaler.scale(loss)
            scaler.step(optimizer)
            scaler.update()

        return Call(iterate)

    calls = {"ours": iterations(lambda scaler: scaler), "other": iterations(_without_reports)}
    times = interleaved(calls, 501 if quick else 5001)
    case = "an iteration, 300 float32 gradients of 10 elements, nobody asks for reports / without any"
    return [Row(case, times["ours"], times["other"], "s", 1.01)]


CASES = {"reports": unused_reports}
"""By name, what measures some rows of the table; called with whether to be quick."""
