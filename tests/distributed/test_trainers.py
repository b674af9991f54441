"""check_trainer over threads, MPI and gloo, on 2 and 3 ranks, DDP and FSDP2: every rank has the same report."""

import copy
import functools
import math
from typing import Any

import numpy as np
import pytest
from axes import is_torch_2_6
from scenarios import rank_and_size
from trainers import FEATURES, Loop, gathered
from worlds import GlooWorld, MPIWorld, agree, each

import gradscale
from gradscale.testing import check_trainer


class Momentum:
    """An optimizer of NumPy."""

    def __init__(self):
        self.grads: Any = None
        self.weights, self.momentum = np.linspace(-1, 1, FEATURES, dtype=np.float32), np.zeros(FEATURES, np.float32)

    def step(self):
        self.momentum = np.float32(0.9) * self.momentum + self.grads[0]
        self.weights = self.weights - np.float32(0.05) * self.momentum


class Ours:
    """Our scaler, which judges the gradients of each rank before they are averaged."""

    def __init__(self, group, init_scale: float = 2.0**10):
        self.group, self.optimizer = group, Momentum()
        policy = gradscale.DynamicScale(init_scale=init_scale, growth_interval=3)
        self.scaler = gradscale.ShardedGradScaler(group=group, policy=policy, timeout=60.0)

    def step(self, index: int, fault: float):
        batch = np.random.default_rng((index, rank_and_size(self.group)[0])).normal(size=(8, FEATURES))
        scaled = self.scaler.scale(np.float32(fault))
        errors = batch @ self.optimizer.weights - batch.sum(axis=1)
        self.optimizer.grads = [scaled * (batch.T @ errors).astype(np.float32)]
        self.scaler.unscale_(self.optimizer)
        self.optimizer.grads = [gathered(self.group, self.optimizer.grads[0]).mean(axis=0)]
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def state(self):
        return {
            "weights": self.optimizer.weights,
            "momentum": self.optimizer.momentum,
            "scaler": self.scaler.state_dict(),
        }

    def save(self):
        return copy.deepcopy(self.state())

    def load(self, saved):
        self.optimizer.weights, self.optimizer.momentum = saved["weights"], saved["momentum"]
        self.scaler.load_state_dict(saved["scaler"])


class ScheduleCountsAlone(Loop):
    """On the rank that had the bad loss."""

    def train(self, index: int, faults: Any):
        super().train(index, faults)
        if not math.isfinite(faults[0]):
            self.lr *= 0.5


class ContinuesAlone(Loop):
    def step(self, index: int, fault: Any):
        if math.isfinite(fault):
            super().step(index, fault)


class OverTorch:
    """A model with a BatchNorm, spread over the ranks by DDP or FSDP2, with a guard or a scaler of ours, or torch's."""

    def __init__(self, group, method: str, scaler: str, init_scale: float = 2.0**10):
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        import gradscale_torch

        torch.manual_seed(0)
        self.torch, self.rank, self.is_guard = torch, group.rank(), scaler == "guard"
        # torch's scaler does not put the statistics back.
        norm = torch.nn.Identity() if scaler == "torch" else torch.nn.BatchNorm1d(4)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), norm, torch.nn.Linear(4, 1))
        if method == "DDP":
            self.called = torch.nn.parallel.DistributedDataParallel(self.model)
        else:
            self.called = fully_shard(self.model, mesh=init_device_mesh("cpu", (group.size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        if self.is_guard:
            self.scaler = gradscale_torch.StepGuard(max_norm=1.0, hold=self.model)
        elif scaler == "ours":
            self.scaler = gradscale_torch.GradScaler("cpu", init_scale=init_scale, growth_interval=3, hold=self.model)
        else:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=3)

    def step(self, index: int, fault: float):
        generator = self.torch.Generator().manual_seed(7 * index + self.rank)
        loss = self.called(self.torch.randn((8, 4), generator=generator)).square().mean() * fault
        self.scaler.scale(loss).backward()
        if self.is_guard:
            self.scaler.step(self.optimizer, loss=loss)
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()

    def state(self):
        return {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}

    def save(self):
        return copy.deepcopy({name: part.state_dict() for name, part in self.state().items()})

    def load(self, saved):
        for name, part in self.state().items():
            part.load_state_dict(saved[name])


def report_of(group, make, arguments: tuple[Any, ...], timeout: float, kinds: tuple[str, ...], rtol: float = 0.0):
    """Return the faults of a loop on one rank, and how many runs there were."""
    made = functools.partial(make, group, *arguments)
    options = {"raises": False, "rtol": rtol, "progress": lambda *_: None}
    report = check_trainer(made, group=group, timeout=timeout, kinds=kinds, **options)
    return [tuple(fault) for fault in report.faults], report.runs


@pytest.mark.tier("ranks")
def test_a_loop_that_is_right_has_no_fault(world):
    for case, results in each(world, report_of, [(make, (), 60.0, ("nan", "inf")) for make in (Loop, Ours)]):
        assert results == [([], 5 + 6 * world.size + 2 + 8)] * world.size, case


@pytest.mark.tier("ranks")
def test_a_fault_of_one_rank_is_in_the_report_of_all(world):
    ((_, results),) = each(world, report_of, [(ScheduleCountsAlone, (), 60.0, ("nan",))])
    assert all(result == results[0] for result in results)
    faults, _ = results[0]
    bad = [(rule, kind, rank, step, part) for rule, kind, rank, step, part, _ in faults]
    assert bad == [(1, "nan", rank, step, "lr") for step in (0, 4, 2) for rank in range(world.size)]


@pytest.mark.torch
@pytest.mark.tier("ranks")
def test_a_rank_that_hangs_is_named_on_all(gloo: GlooWorld):
    """After NeMo Automodel #2468."""
    ((_, results),) = each(gloo, report_of, [(ContinuesAlone, (), 2.0, ("nan",))])
    assert all(result == results[0] for result in results)
    ((rule, kind, rank, step, part, line),) = results[0][0]
    assert (rule, kind, rank, step, part) == (4, "nan", 1, 0, "")
    assert "rank 0 ends it; rank 1 hangs: no answer within 2 s" in line


def check_what_hangs(group):
    """Raise what the report on a loop says in which one rank leaves the others alone."""
    # What is loaded with the first step does not count.
    Loop(group).step(0, 1.0)
    make = functools.partial(ContinuesAlone, group)
    check_trainer(make, group=group, timeout=3.0, kinds=["nan"], bad_steps=[0], progress=lambda *_: None)


@pytest.mark.tier("ranks")
def test_ranks_that_hang_in_mpi_are_named_on_all(mpi: MPIWorld):
    # A rank that raises ends without MPI's own end, which what hangs in MPI would never reach.
    results = mpi.run(check_what_hangs)
    assert all(result == results[0] for result in results)
    head, line = results[0].message.splitlines()
    assert (results[0].kind, head) == ("AssertionError", "check_trainer: 2 runs, faults: 1")
    ends = ["rank 0 ends it", *(f"rank {rank} hangs: no answer within 3 s" for rank in range(1, mpi.size))]
    place = "rule 4: after the NaN of step 0 on rank 0, in step 0: "
    assert line == f"{place}{'; '.join(ends)} (does one rank alone skip, or return?)"


@pytest.mark.torch
@pytest.mark.tier("ranks")
def test_ddp_and_fsdp2_have_no_fault(gloo: GlooWorld):
    cases = [("DDP", "ours"), ("DDP", "guard"), ("DDP", "torch")]
    cases += [] if is_torch_2_6() else [("FSDP2", "ours"), ("FSDP2", "guard")]
    agree(gloo, no_fault_over_torch, [(case,) for case in cases])


def no_fault_over_torch(group, case: tuple[str, str]):
    """Check a loop of torch on one rank."""
    # After its first backward pass DDP lays its buckets anew: gloo sums over three ranks in another order then.
    rtol = 1e-4 if case[0] == "DDP" and group.size() > 2 else 0.0
    faults, runs = report_of(group, OverTorch, case, 60.0, ("nan",), rtol)
    assert faults == [], faults
    assert runs == 5 + 3 * group.size() + 2 + 8
