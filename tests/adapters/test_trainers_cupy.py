"""The loops on the pages for CuPy keep the rules of check_trainer; that of two GPUs on two threads, over NCCL."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from cupy_devices import require_cupy, require_device_count
from recipe_blocks import CUPY_PAGE, GUARD_PAGE, blocks_on
from waiting_trainers import PageTrainer, WaitingTrainer, set_scale

from gradscale.testing import check_trainer, run_ranks

pytestmark = [pytest.mark.cupy, pytest.mark.gpu, pytest.mark.tier("all")]

STEPS = 4


class OfScaler(PageTrainer):
    """The loop has no batches: what it scales is times ``fault``."""

    page, block = CUPY_PAGE, "cupy"

    def __init__(self, init_scale: float = 2.0**10):
        super().__init__()
        scaler = self.names["scaler"]
        set_scale(scaler, init_scale)
        scale = scaler.scale
        scaler.scale = lambda loss: scale(loss * np.float32(self.fault))

    def state(self):
        return {"weights": self.names["optimizer"].weights, "scaler": self.names["scaler"].state_dict()}

    def load(self, saved: Any):
        self.names["optimizer"].weights = saved["weights"]
        self.names["scaler"].load_state_dict(saved["scaler"])


def test_the_loop_of_a_scaler_has_no_fault():
    require_cupy()
    assert check_trainer(OfScaler, steps=STEPS).faults == []


class OfGuard(WaitingTrainer):
    """The function of one rank, whose batches are those of ``map``."""

    def __init__(self, rank: int, unique_ids: Iterator[Any]):
        code, has_threads, _ = blocks_on(GUARD_PAGE)["guard-cupy"].partition("with ThreadPoolExecutor")
        assert has_threads
        names: dict[str, Any] = {"map": self.batches}
        exec(compile(code, "guard-cupy", "exec"), names)
        self.rank, self.cupy, names["name"] = rank, names["cp"], next(unique_ids)
        # Of the thread in which the trainer is called; the loop sets that of its own.
        self.cupy.cuda.Device(rank).use()
        self.begin(names["train"], rank)

    def batches(self, as_array: Callable[[Any], Any], _: Iterable[Any]) -> Iterator[Any]:
        frame = inspect.currentframe()
        assert frame is not None
        self.frame: Any = frame.f_back
        for index in self.steps():
            numbers = np.random.default_rng((index, self.rank)).normal(size=(16, 4)).astype(np.float32)
            yield as_array(numbers * np.float32(self.fault))

    @property
    def parts(self):
        return self.frame.f_locals["optimizer"], self.frame.f_locals["guard"]

    def state(self):
        optimizer, guard = self.parts
        return {"weights": optimizer.weights.get(), "scaler": guard.state_dict()}

    save = state

    def load(self, saved: Any):
        optimizer, guard = self.parts
        optimizer.weights = self.cupy.asarray(saved["weights"])
        guard.load_state_dict(saved["scaler"])


def test_the_loop_of_a_guard_on_two_gpus_has_no_fault():
    cupy = require_cupy()
    require_device_count(cupy, 2)
    # The trainers of both ranks are made in one order.
    unique_ids = [cupy.cuda.nccl.get_unique_id() for _ in range(60)]

    def faults_of(group: Any):
        made = functools.partial(type("OfGuardOfRank", (OfGuard,), {}), group.rank, iter(unique_ids))
        report = check_trainer(made, group=group, steps=STEPS, kinds=["nan"], raises=False)
        return [str(fault) for fault in report.faults]

    assert run_ranks(2, faults_of, timeout=280.0) == [[], []]
