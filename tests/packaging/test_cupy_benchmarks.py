"""The benchmark of the CuPy adapter: its rows and targets on a stand-in for CuPy, and what is not run without a device.

The numbers themselves are the stand-in's, and mean nothing.
"""

from __future__ import annotations

import importlib.metadata
import math
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from host_cupy import installed
from host_events import HostStream, with_events

from benchmarks import cupy_unscaling
from benchmarks.cases import Outcome, case_names, report, run_cases
from benchmarks.measure import Row

pytestmark = [pytest.mark.numpy, pytest.mark.tier("ranks")]

CASES = ["cupy-copy", "cupy-masters", "cupy-torch", "cupy-plan", "cupy-peak", "cupy-waits"]


class FakeTorch(SimpleNamespace):
    """What is called of torch; its kernel does the same as NumPy."""

    def __init__(self, queue: HostStream, *, has_cuda: bool = True) -> None:
        super().__init__(__spec__=None, calls=[], from_dlpack=lambda x: x)
        stream = SimpleNamespace(cuda_stream=0)
        self.cuda = SimpleNamespace(is_available=lambda: has_cuda, current_stream=lambda: stream)
        self.queue = queue

    def zeros(self, size: int, device: str) -> list[float]:
        assert device == "cuda"
        return [0.0] * size

    def ones(self, size: int, device: str) -> list[float]:
        assert device == "cuda"
        return [1.0] * size

    def _amp_foreach_non_finite_check_and_unscale_(self, tensors: Any, found: Any, inverse: Any) -> None:
        assert (found, inverse) == ([0.0], [1.0])
        self.calls.append(len(tensors))
        self.queue.occupy(1e-4)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostStream]:
    """Return the stream of the stand-in, with small arrays to be measured, and a torch."""
    for name in ("_QUICK", "_FULL"):
        monkeypatch.setattr(cupy_unscaling, name, cupy_unscaling._Sizes((20, 1 << 10), (30, 100), 3))
    with installed() as module, with_events(module) as queue:
        monkeypatch.setitem(sys.modules, "torch", FakeTorch(queue))
        yield queue


def outcomes() -> dict[str, Outcome]:
    return {outcome.name: outcome for outcome in run_cases("cupy-", quick=True)}


def rows_of(name: str) -> list[Row]:
    outcome = next(run_cases(name, quick=True))
    assert outcome.reason == ""
    return outcome.rows


@pytest.mark.usefixtures("queue")
def test_every_case_gives_rows_with_numbers_and_the_targets() -> None:
    found = outcomes()
    assert {name: outcome.reason for name, outcome in found.items()} == dict.fromkeys(CASES, "")
    targets = {name: [row.target for row in outcome.rows] for name, outcome in found.items()}
    assert targets == {
        "cupy-copy": [1 / 0.9],
        "cupy-masters": [1 / 0.85],
        "cupy-torch": [1.0, None, 0.7, None],
        "cupy-plan": [1.0],
        "cupy-peak": [None],
        "cupy-waits": [0.0, None],
    }
    rows = [row for outcome in found.values() for row in outcome.rows]
    for row in rows:
        assert "device 0" in row.case
        assert math.isfinite(row.ours)
        assert row.ours >= 0 if row.target == 0 else row.ours > 0, row
        assert row.other > 0
        assert row.unit == ("" if "waits" in row.case else "MiB" if "memory" in row.case else "s")


def test_the_full_sizes_are_those_of_the_claims() -> None:
    (arrays, elements), small, _ = cupy_unscaling._FULL
    assert (arrays, arrays * elements * 4 >= 4 << 30, elements * 4 % 64) == (1000, True, 0)
    assert small == (3000, 1000)


@pytest.mark.usefixtures("queue")
def test_a_copy_moves_as_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    copy = cupy_unscaling._copy
    monkeypatch.setattr(cupy_unscaling, "_copy", lambda cupy, size: copied.append(size) or copy(cupy, size))
    rows_of("cupy-copy")
    rows_of("cupy-masters")
    # Of 20 arrays of 1,024: 4 bytes are read and written in place; 2 are read and 4 written, which is a copy of 3.
    assert copied == [4 * 20 * 1024, 3 * 20 * 1024]


def test_time_of_the_host_is_not_in_that_of_the_device(queue: HostStream) -> None:
    import cupy

    def run() -> None:
        # Longer than the first stall.
        time.sleep(0.03)
        queue.occupy(1e-3)

    assert cupy_unscaling._DeviceClock(cupy)(run) == pytest.approx(1e-3, abs=1e-4)


def test_a_call_that_waits_for_the_device_is_not_timed(queue: HostStream, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    monkeypatch.setattr(cupy_unscaling, "_LONGEST_STALL", 0.03)
    with pytest.raises(RuntimeError, match="the host waits for the device"):
        cupy_unscaling._DeviceClock(cupy)(queue.synchronize)


@pytest.mark.usefixtures("queue")
def test_a_wait_of_the_host_before_step_misses_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    between, within = rows_of("cupy-waits")
    assert (between.ours, between.met, within.ours) == (0, True, 5)
    from gradscale_cupy.arrays import CupyBackend

    unscale = CupyBackend.unscale

    def reading(self: Any, grads: Any, *args: Any, **options: Any) -> Any:
        grads[0].get()
        return unscale(self, grads, *args, **options)

    monkeypatch.setattr(CupyBackend, "unscale", reading)
    between, _ = rows_of("cupy-waits")
    assert (between.ours, between.met) == (5, False)


@pytest.mark.usefixtures("queue")
def test_waits_that_cannot_be_seen_are_a_failure_and_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    monkeypatch.setattr(cupy.cuda.Event, "done", property(lambda _: False))
    outcome = next(run_cases("cupy-waits", quick=True))
    assert outcome.failed
    assert "waits are not seen" in outcome.reason


@pytest.mark.usefixtures("queue")
def test_extra_memory_counts_the_tables() -> None:
    (row,) = rows_of("cupy-peak")
    # 20 rows of the table, where their chunks begin, sums, verdict and count; each rounded up to 512 bytes.
    assert 20 * 24 <= row.ours * 2**20 <= 6 * 512


@pytest.mark.usefixtures("queue")
def test_each_round_plans_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradscale_cupy import launch

    planned: list[int] = []
    plan = launch.plan
    monkeypatch.setattr(launch, "plan", lambda *given: planned.append(len(given[0].addresses)) or plan(*given))
    (row,) = rows_of("cupy-plan")
    # Three rounds, and one before.
    assert (planned, row.other) == ([30] * 4, 5e-3)


def test_without_cuda_in_torch_only_its_case_is_not_run(queue: HostStream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", FakeTorch(queue, has_cuda=False))
    outcome = next(run_cases("cupy-torch", quick=True))
    assert outcome.reason.startswith("torch finds no CUDA device")
    assert not outcome.failed
    assert rows_of("cupy-copy")


def test_torch_on_another_stream_is_a_failure(queue: HostStream, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = FakeTorch(queue)
    torch.cuda.current_stream = lambda: SimpleNamespace(cuda_stream=7)
    monkeypatch.setitem(sys.modules, "torch", torch)
    outcome = next(run_cases("cupy-torch", quick=True))
    assert outcome.failed
    assert "must work on one stream, got 0 and 7" in outcome.reason


@pytest.mark.usefixtures("queue")
def test_without_a_device_nothing_is_run_and_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for outcome in outcomes().values():
        assert (outcome.rows, outcome.failed, outcome.met) == ([], False, False)
        assert outcome.reason.startswith("CUDA finds no device (driver of CUDA 12.2, CuPy for CUDA 12.9)")


def test_without_cupy_nothing_is_run_and_the_command_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    for outcome in outcomes().values():
        assert not outcome.failed
        assert "from a clone of gradscale: python -m pip install '.[cupy]'" in outcome.reason


@pytest.mark.parametrize("distribution", ["cupy", "cupy-cuda13x"])
def test_the_version_of_cupy_is_that_of_whichever_is_installed(
    distribution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name != distribution:
            raise importlib.metadata.PackageNotFoundError(name)
        return "14.2.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    versions = report([])["versions"]
    assert (versions["cupy"], versions["torch"]) == ("14.2.0", "missing")


def test_the_cases_are_listed() -> None:
    assert [name for name in case_names() if name.startswith("cupy-")] == CASES
