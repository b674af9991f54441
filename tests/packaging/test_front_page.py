"""The front page's table: what it says of gradscale is so."""

import re
from pathlib import Path

import numpy as np
import pytest
from axes import require

import gradscale
from gradscale.testing import run_ranks

TABLE = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (Path(__file__).parents[2] / "README.md").read_text().splitlines()
    if re.match(r"\| .* \| (yes|no|partly) \|", line)
]


class Optimizer:
    """Steps are counted."""

    steps = 0

    def __init__(self, *grads: np.ndarray):
        self.grads = list(grads)

    def step(self):
        self.steps += 1


def guarded(*grads: np.ndarray, loss: float = 1.0, **options) -> tuple[Optimizer, gradscale.StepReport]:
    """Return an optimizer after a step under a guard, and the step's report."""
    optimizer, guard = Optimizer(*grads), gradscale.StepGuard(**options)
    guard.step(optimizer, loss=loss)
    return optimizer, guard.last_step(optimizer)


def is_skipped_in(dtype: object) -> bool:
    """Tell whether inf and NaN are skipped in a dtype, and finite gradients are not."""
    steps = [guarded(np.asarray([1, value], np.float32).astype(dtype))[0].steps for value in (1.0, np.inf, np.nan)]
    return steps == [1, 0, 0]


def skips_on_all_ranks() -> bool:
    """Tell whether a NaN on either rank is skipped on both."""

    def steps(group, bad: int) -> int:
        gradient = np.float32([np.nan if group.rank == bad else 1.0])
        return guarded(gradient, group=group)[0].steps

    return all(run_ranks(2, lambda group, bad=bad: steps(group, bad)) == [0, 0] for bad in (0, 1))


def skips_spikes(resumes: bool = False) -> bool:
    """Tell whether a loss far above the last ones is skipped; also by a guard that has loaded the other's state."""
    optimizer, guard = Optimizer(np.float32([1.0])), gradscale.StepGuard(skip=gradscale.SkipSpikes())
    for loss in np.linspace(1.0, 1.1, 100):
        guard.step(optimizer, loss=float(loss))
    if resumes:
        saved, guard = guard.state_dict(), gradscale.StepGuard(skip=gradscale.SkipSpikes())
        guard.load_state_dict(saved)
    guard.step(optimizer, loss=1000.0)
    return optimizer.steps == 100 and guard.last_step(optimizer).reason == "spike"


def leaves_no_trace() -> bool:
    """Tell whether a buffer that the forward pass of a bad batch has written is put back."""
    statistics = np.zeros(2)
    optimizer, guard = Optimizer(np.float32([np.nan])), gradscale.StepGuard(hold=statistics)
    statistics[:] = np.nan
    guard.step(optimizer, loss=1.0)
    return not statistics.any()


def clips() -> bool:
    """Tell whether the step itself clips."""
    optimizer, report = guarded(np.float32([3.0, 4.0]), max_norm=1.0)
    return report.norm == 5.0 and np.allclose(optimizer.grads[0], [0.6, 0.8])


def warns_of_a_dead_run() -> bool:
    """Tell whether a run whose every step is skipped is told of."""
    optimizer, guard = Optimizer(np.float32([np.nan])), gradscale.StepGuard(warn_after=3)
    guard.step(optimizer, loss=1.0)
    guard.step(optimizer, loss=1.0)
    with pytest.warns(gradscale.TrainingStalledWarning):
        guard.step(optimizer, loss=1.0)
    return optimizer.steps == 0


def names_the_parameter_and_the_rank() -> bool:
    """Tell whether the report of an overflow says where it is."""

    def worst(group) -> tuple[str, tuple[int, ...]]:
        last = np.float32([np.nan if group.rank == 1 else 1.0])
        _, report = guarded(np.float32([1.0]), last, group=group, diagnose="on_overflow")
        entry = report.overflow.entries[0]
        return entry.name, entry.rank

    return run_ranks(2, worst) == [("[1]", (1,))] * 2


PROOFS = {
    "skips inf and NaN in float16": lambda: is_skipped_in(np.float16),
    "in bfloat16, too": lambda: is_skipped_in(require("ml_dtypes").bfloat16),
    "on all ranks together": skips_on_all_ranks,
    "skips spikes": skips_spikes,
    "leaves no trace in buffers": leaves_no_trace,
    "clips in the same pass": clips,
    "says when every step is skipped": warns_of_a_dead_run,
    "names the parameter and the rank": names_the_parameter_and_the_rank,
    "resumes with its state": lambda: skips_spikes(resumes=True),
    "takes any array library": lambda: guarded(require("strict").asarray([float("inf")]))[0].steps == 0,
}


def test_the_table_has_a_proof_for_each_of_its_rows():
    assert [row[0] for row in TABLE] == list(PROOFS)
    assert {len(row) for row in TABLE} == {9}


@pytest.mark.parametrize("row", PROOFS)
def test_what_the_table_says_of_gradscale_is_so(row: str):
    assert dict(map(lambda cells: cells[:2], TABLE))[row] == "yes"
    assert PROOFS[row]()
