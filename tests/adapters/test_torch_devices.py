"""The torch adapter on devices that are slower than the host: when it waits, for which device, and captured graphs.

The devices are stand-ins (``host_cuda``): a value that the host uses before it has arrived is garbage, and what CUDA
refuses while a graph is captured is refused.
"""

from __future__ import annotations

import copy
import math
import pickle
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from axes_torch import GradScaler, torch
from host_cuda import installed, on_host
from small_torch import Count, Group, Small, groups_in_use, without_kernel
from tiers import examples

import gradscale
from gradscale.scaler.scaler import iteration_of
from gradscale_torch import groups

pytestmark = pytest.mark.torch

GRADIENTS = (1.0, -2.0, math.inf, 0.5, math.nan, 3.0)
SKIPS = [not math.isfinite(gradient) for gradient in GRADIENTS]


@pytest.fixture(autouse=True)
def cuda():
    """Return the stand-in for two CUDA devices."""
    with installed() as cuda:
        yield cuda


class ProcessGroup:
    """What looks to the adapter like one of torch's groups, of one rank; NCCL's events cannot always be asked for."""

    bound_device_id = None

    def __init__(self, cuda):
        self.works = self.aborts = 0
        self.is_lost = False
        self._cuda = cuda

    def abort(self):
        self.aborts += 1

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def allreduce(self, tensors, options):  # noqa: ARG002
        cuda = self._cuda
        self.works += 1
        is_captured, is_lost = cuda.graph is not None, self.is_lost

        class Work:
            def wait(self, timeout=None):
                """Do nothing: on a device, the stream waits."""

            def is_completed(self) -> bool:
                cuda.refuse_capture()
                assert not is_captured, "an event of a graph is no event outside of it"
                return not is_lost

        return Work()


class Run(Small):
    """Parameters of ones on some devices, of which the first is the loss's if ``home`` is not given."""

    def __init__(self, scaler, optimizer: str, *devices: str, home: str | None = None, **options):
        given = {"size": 5, "start": 1.0, "lr": 0.125, **options}
        super().__init__(scaler, optimizer, devices=devices, home=home or devices[0], **given)

    @property
    def held(self):
        return [on_host(parameter).tolist() for parameter in self.parameters]

    def iterate_all(self, gradients: Sequence[float] = GRADIENTS):
        """Make an iteration with each of the gradients."""
        for gradient in gradients:
            self.iterate(gradient)


# Devices without a kernel for bfloat16, and with one that takes float64 for float32.


@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscaled"])
@pytest.mark.parametrize("name", ["SGD", "SGD-fused"])
@pytest.mark.parametrize("scale", [0.25, 1.0, 4.0])
def test_float64_that_float32_cannot_hold_is_finite(
    monkeypatch: pytest.MonkeyPatch, scale: float, name: str, explicit: bool
):
    kernel = torch._amp_foreach_non_finite_check_and_unscale_

    def as_float32(tensors: Sequence[Any], flag, by):
        kernel([one.float() for one in tensors], flag, by)
        kernel(tensors, flag, by)

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", as_float32)
    run = held_to(scale, "cuda", dtype="float64", name=name)
    # The largest number overflows if it is divided by 0.25.
    for value, is_bad in ((1e300, False), (torch.finfo(torch.float64).max, scale < 1.0), (math.inf, True)):
        run.put(value)
        run.step(explicit=explicit)
        assert run.report.skipped == is_bad


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch):
    """Take torch's kernel for bfloat16 away, as CUDA has none."""
    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", without_kernel("bfloat16"))


def held_to(scale: float, *devices: str, dtype: str = "bfloat16", count: int = 1, name: str = "SGD") -> Run:
    """Return parameters of a dtype on some devices, and a scaler that keeps a scale."""
    scaler = GradScaler("cuda", policy=gradscale.StaticScale(scale))
    return Run(scaler, name, *devices, dtypes=[dtype], count=count)


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}], ids=["plain", "clipped"])
@pytest.mark.parametrize("scale", [1.0, 3.0, 0.5])
@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0", "cuda:1"]], ids=["one", "two"])
def test_without_a_kernel_a_device_makes_a_few_operations_more_for_all_gradients_and_no_wait(
    cuda, devices: list[str], scale: float, options: dict[str, float]
):
    numbers = []
    for dtype in ("float32", "bfloat16"):
        run = held_to(scale, *devices, dtype=dtype, count=300)
        for gradient in (1.0, math.nan, 2.0):
            run.give(gradient)
            cuda.waits.clear()
            with Count() as count:
                run.scaler.unscale_(run.optimizer, **options)
            assert not cuda.waits
            run.scaler.step(run.optimizer)
            run.scaler.update()
            assert run.report.skipped is not math.isfinite(gradient)
        numbers.append(count.number)
    assert numbers[1] - numbers[0] <= 8 * len(devices)


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize("scale", [3.0, 10.0**30])
def test_every_bfloat16_of_a_device_is_divided_without_a_kernel_by_a_factor_in_float32(scale: float):
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    run = held_to(scale, "cuda:0", count=2)
    run.put(values.to("cuda:0"), values[5].to("cuda:0"))
    gradients = [parameter.grad for parameter in run.parameters]
    run.scaler.unscale_(run.optimizer)
    inverse = torch.tensor(1.0 / scale, dtype=torch.float32)
    for gradient, before in zip(gradients, (values, values[5]), strict=True):
        expected = (before.float() * inverse).to(torch.bfloat16)
        assert torch.equal(on_host(gradient).nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


@pytest.mark.usefixtures("no_kernel")
def test_a_step_is_skipped_whose_scale_somebody_has_set_where_the_host_does_not_see_it():
    run = held_to(1.0, "cuda:0")
    seen = []
    for number in range(4):
        run.give(1.0)
        if number == 1:
            run.scaler._scale.fill_(4.0)
            run.give(1.0)
        run.step()
        seen.append((run.report.skipped, on_host(run.parameter.grad).tolist()[0]))
    # A scale of 1 multiplies nothing, so that the gradients are what they are.
    assert seen == [(False, 1.0), (True, 1.0), (False, 1.0), (False, 1.0)]


# Values that come to the host.


KINDS = [("SGD", {}), ("SGD", {"momentum": 0.5}), ("SGD-fused", {"momentum": 0.5}), ("AdamW-fused", {})]
DTYPES = ("float32", "float64", "bfloat16", "float16", "complex64")
DRAWN = {
    "init_scale": [0.5, 4.0, 8.0, 2.0**20],
    "growth_interval": [1, 2, 3],
    "skip": [None, gradscale.SkipSpikes(of="loss", above=10.0), gradscale.SkipSpikes(of="norm", above=8.0)],
    "on_skip": [None, None, lambda _: None],
}


class Life:
    """A random run of one or two optimizers of a scaler, which is the same wherever its tensors are."""

    def __init__(self, seed: int, home: str, devices: Sequence[str]):
        self.chance, self.home = random.Random(seed), home
        settings = {name: self.chance.choice(values) for name, values in DRAWN.items()}
        self.groups = [Group() for _ in range(self.chance.randrange(3))] or None
        self.scaler = GradScaler(home, group=self.groups, allow_fp16_grads=True, **settings)
        self.runs, self.seen = [self.run(devices) for _ in range(self.chance.randint(1, 2))], []

    def run(self, devices: Sequence[str]) -> Run:
        name, options = self.chance.choice(self.chance.choice([KINDS[:2], KINDS[2:]]))
        dtype = self.chance.choice(DTYPES) if "fused" not in name else "float32"
        return Run(self.scaler, name, *devices, home=self.home, dtypes=[dtype], **options)

    def draws(self, share: float) -> bool:
        return self.chance.random() < share

    def step(self, run: Run):
        scaler, optimizer = self.scaler, run.optimizer
        is_refused, is_clipped = self.draws(0.2), self.draws(0.3) and self.groups is None
        # Alone it may be refused after it was unscaled, too.
        is_late = is_refused and self.groups is None and self.draws(0.5)
        if is_refused and not is_late:
            scaler.refuse(optimizer)
        if is_clipped or is_late or self.draws(0.3):
            norm = scaler.unscale_(optimizer, **{"max_norm": 1.5} if is_clipped else {})
            self.seen.append(None if norm is None else norm.item())
        if is_late:
            scaler.refuse(optimizer)
        if self.draws(0.1):
            optimizer.step = lambda: gradscale.NOT_STEPPED
        scaler.step(optimizer)
        vars(optimizer).pop("step", None)
        # Else a verdict may be read later.
        if is_refused or self.draws(0.4):
            assert not is_refused or run.report.reason in ("refused", "overflow")
            self.seen.append((run.report.reason, run.report.scale, run.held))

    def iterate(self):
        scaler = self.scaler
        for run in self.runs:
            run.give(self.chance.choice(GRADIENTS))
            scaler.scale(torch.ones((), device=self.home), loss=self.chance.choice([1.0, 1.0, 1.0, 99.0]))
        for run in self.runs:
            self.step(run)
        scaler.update(*[4.0] * self.draws(0.1))
        if self.draws(0.3):
            # A verdict that comes later is counted later.
            self.seen.append(copy.deepcopy(scaler).state_dict() | {"counts": None})
        if self.draws(0.1):
            scaler.load_state_dict(pickle.loads(pickle.dumps(scaler.state_dict())))

    def lived(self):
        """Return what was seen of some iterations, and what is left."""
        for _ in range(8):
            self.iterate()
        told = [(report.iteration, report.reason, report.scale) for report in self.scaler.history]
        return self.seen, told, [run.held for run in self.runs], self.scaler.state_dict()


# As with FSDP2's CPU offload, and of several devices.
PLACES = [("cuda:1", ("cpu", "cpu")), ("cuda:0", ("cuda:1", "cuda:0")), ("cuda:1", ("cpu", "cuda:0"))]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("place", PLACES, ids=["host", "devices", "both"])
def test_a_random_run_is_the_same_wherever_its_loss_and_its_gradients_are(place: tuple[str, Any]):
    for seed in range(examples(100)):
        assert repr(Life(seed, *place).lived()) == repr(Life(seed, "cpu", ("cpu", "cpu")).lived()), seed


@pytest.mark.parametrize("name", ["SGD", "AdamW-fused"])
def test_a_closure_is_evaluated_again_on_devices_as_on_the_host(name: str):
    seen = []
    for home, devices in (*PLACES, ("cpu", ("cpu", "cpu"))):
        run = Run(GradScaler(home, init_scale=2.0**20), name, *devices, home=home)
        for _ in range(2):
            run.scaler.step(run.optimizer, lambda run=run: run.give(1e34))
            run.scaler.update()
        seen.append((run.held, run.report, run.scaler.state_dict()))
    assert all(one == seen[-1] for one in seen)


def test_a_loss_of_the_host_is_multiplied_by_the_scale_of_a_device():
    scaler = GradScaler("cuda", init_scale=8.0)
    losses = scaler.scale([torch.ones((), device=device) for device in ("cuda:1", "cpu", "cuda:0")])
    assert [str(loss.device) for loss in losses] == ["cuda:1", "cpu", "cuda:0"]
    assert [loss.item() for loss in losses] == [8.0] * 3


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_gradients_on_several_devices_make_one_verdict_that_frameworks_may_look_at(bad: int):
    run = Run(GradScaler("cuda", init_scale=8.0, group=Group()), "SGD", "cuda:0", "cpu", "cuda:1")
    run.give(*[math.nan if index == bad else 1.0 for index in range(3)])
    run.scaler.unscale_(run.optimizer)
    shown = run.scaler._found_inf_per_device(run.optimizer)
    assert {str(device): flag.item() for device, flag in shown.items()} == {"cuda:0": 1, "cpu": 1, "cuda:1": 1}
    run.step()
    assert run.held == [[1.0] * 5] * 3


def test_gradients_that_are_not_scaled_are_clipped_on_all_devices():
    run = Run(GradScaler("cuda", enabled=False), "SGD", "cpu", "cuda:1")
    run.put(4.0)
    assert run.scaler.unscale_(run.optimizer, max_norm=1.0).item() == pytest.approx(160**0.5)
    for parameter in run.parameters:
        assert parameter.grad.tolist() == pytest.approx([160**-0.5 * 4.0] * 5, rel=1e-5)


def test_large_gradients_of_the_host_have_a_norm_on_a_device():
    run = Run(GradScaler("cuda", init_scale=2.0**70), "SGD", "cpu", "cpu", home="cuda")
    run.give(1.0)
    # The squares of what is scaled are beyond float32.
    assert run.scaler.unscale_(run.optimizer, max_norm=1.0).item() == pytest.approx(10**0.5)
    run.step()
    assert not run.report.skipped


def test_the_functions_bring_a_scale_to_the_host_and_to_devices():
    state = gradscale.DynamicScale(init_scale=4.0).init(torch.zeros((), device="cuda"))
    grads = [torch.full((2,), 8.0, device=device) for device in ("cpu", "cuda:1", "cuda:0")]
    _, nonfinite = gradscale.unscale(grads, state, out=grads)
    assert [grad.tolist() for grad in grads] == [[2.0, 2.0]] * 3
    assert (nonfinite.item(), str(nonfinite.device)) == (0, "cuda:0")
    assert gradscale.scale(torch.ones(2), state).tolist() == [4.0, 4.0]


def test_a_rank_without_a_loss_has_its_state_where_the_others_have_theirs():
    # Such as a stage of a pipeline, with FSDP2's CPU offload: its messages must go over NCCL, too.
    run = Run(GradScaler("cuda", init_scale=1.0, group=Group()), "SGD", "cpu")
    run.parameter.grad = torch.full((5,), 1.0)
    run.step()
    assert run.held == [[0.875] * 5]
    assert str(run.scaler._scale.device) == "cuda:0"


@pytest.mark.parametrize("dtype", ["float64", pytest.param("bfloat16", marks=pytest.mark.tier("ranks"))])
@pytest.mark.parametrize("form", ["numbers", "tensors", "device"])
@pytest.mark.parametrize("name", ["SGD", "AdamW-fused"])
def test_the_users_default_device_and_dtype_are_not_the_scalers(
    cuda, monkeypatch: pytest.MonkeyPatch, dtype: str, form: str, name: str
):
    monkeypatch.setattr(groups, "carriers", lambda _: {"cpu": "gloo"})
    home = "cuda" if form == "device" else "cpu"
    usual, seen = torch.get_default_dtype(), []
    for chosen in (usual, getattr(torch, dtype)):
        scaler = GradScaler(home, init_scale=0.5, growth_interval=2, group=ProcessGroup(cuda))
        run, loss = Run(scaler, name, home, "cpu"), torch.ones((), device=home)
        for gradient in GRADIENTS:
            for parameter in run.parameters:
                parameter.grad = torch.full((5,), gradient, device=parameter.device)
            try:
                torch.set_default_dtype(chosen)
                with torch.device("cpu" if chosen is usual else "meta"):
                    scaler.scale(loss)
                    assert form != "tensors" or scaler._scale.dtype == torch.float32
                    run.step()
                    told = run.report, scaler.get_scale(), scaler.diagnose(run.optimizer)
            finally:
                torch.set_default_dtype(usual)
            seen.append((told, run.held))
    assert seen[: len(GRADIENTS)] == seen[len(GRADIENTS) :]


# Waits.

POLICIES = [
    gradscale.DynamicScale(init_scale=4.0, growth_interval=2),
    gradscale.DynamicScale(init_scale=4.0, hysteresis=2, growth_after="interval_plus_one"),
    gradscale.StaticScale(4.0),
]


@pytest.mark.parametrize("policy", POLICIES, ids=["torch's", "hysteresis", "static"])
@pytest.mark.parametrize(("unscales", "groups"), [(None, 0), (None, 1), (None, 2), ({}, 1), ({"max_norm": 1.0}, 0)])
@pytest.mark.parametrize(("name", "waits"), [("AdamW-fused", 0), ("SGD", 1)])
def test_a_step_waits_once_and_that_of_a_fused_optimizer_for_nothing(
    cuda, policy, unscales: dict[str, Any] | None, groups: int, name: str, waits: int
):
    run = Run(GradScaler("cuda", policy=policy, group=groups_in_use(groups)), name, "cuda:0", "cuda:1")
    for gradient in GRADIENTS:
        run.give(gradient)
        if unscales is not None:
            run.scaler.unscale_(run.optimizer, **unscales)
        assert cuda.waits == []
        run.step()
        assert len(cuda.waits) == waits
        cuda.waits.clear()
    assert [report.skipped for report in run.scaler.history] == SKIPS


@pytest.mark.parametrize("name", ["SGD", "SGD-fused"])
def test_the_verdict_is_read_once_for_all_schedules(cuda, name: str):
    run = Run(GradScaler("cuda"), name, "cuda")
    schedules = [torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.5) for _ in range(2)]
    assert "), scale=65536.0, " in repr(run.scaler)
    run.iterate(math.inf)
    for schedule in schedules:
        run.scaler.step_schedule(run.optimizer, schedule)
    assert "), scale=<on cuda:0>, " in repr(run.scaler)
    assert len(cuda.waits) == 1
    assert [schedule.last_epoch for schedule in schedules] == [0, 0]


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("home", ["cuda:0", "cuda:1"])
def test_a_late_verdict_is_waited_for_on_its_own_device(cuda, current: int, home: str):
    cuda.current = current
    run = Run(GradScaler(home, init_scale=8.0), "AdamW-fused", home)
    # The update looks for verdicts that have arrived. On another current device, nothing was done that is to be waited
    # for.
    run.iterate_all()
    assert [report.skipped for report in run.scaler.history] == SKIPS
    assert [report.scale for report in run.scaler.history] == [8.0, 8.0, 8.0, 4.0, 4.0, 2.0]


def test_what_a_host_assigns_as_the_scale_goes_where_the_state_is():
    run = Run(GradScaler("cuda"), "SGD", "cuda")
    run.iterate(1.0)
    run.scaler._scale = torch.tensor(16.0)
    run.iterate(1.0)
    assert (run.held, run.scaler.get_scale()) == ([[0.75] * 5], 16.0)
    run.scaler._scale = mine = torch.full((), 2.0, device="cuda")
    assert run.scaler._scale is mine


# Ranks that never come.


@pytest.mark.parametrize("optimizer", ["SGD", "SGD-fused"])
@pytest.mark.parametrize("before", [0, 1], ids=["first-message", "second"])
def test_a_rank_that_never_comes_over_nccl_is_a_timeout_that_aborts_the_group(
    cuda, monkeypatch: pytest.MonkeyPatch, optimizer: str, before: int
):
    monkeypatch.setattr(groups, "carriers", lambda _: {"cuda": "nccl"})
    group = ProcessGroup(cuda)
    run = Run(GradScaler("cuda", group=group, timeout=0.2), optimizer, "cuda")

    def iterate():
        run.iterate(1.0)
        assert not run.report.skipped

    for _ in range(before):
        iterate()
    group.is_lost = True
    for error in (gradscale.CollectiveTimeoutError, (gradscale.CollectiveTimeoutError, gradscale.BackendError)):
        with pytest.raises(error, match=r"rank 0 of 1 waited 0\.2 s|given up"):
            iterate()
    with pytest.raises(gradscale.BackendError, match="given up"):
        run.scaler.set_group(group)
    run.scaler.set_group(ProcessGroup(cuda))
    iterate()
    assert group.aborts == 1


def fail():
    msg = "no such communicator"
    raise RuntimeError(msg)


@pytest.mark.parametrize(
    ("abort", "note"),
    [(lambda: time.sleep(1.0), "not aborted within 0.05 s"), (fail, "no such communicator")],
    ids=["hangs", "fails"],
)
def test_an_abort_that_hangs_or_fails_does_not_hide_the_timeout(
    cuda, monkeypatch: pytest.MonkeyPatch, abort, note: str
):
    monkeypatch.setattr(groups, "carriers", lambda _: {"cuda": "nccl"})
    monkeypatch.setattr("gradscale.waiting._ABORTING", 0.05)
    group = ProcessGroup(cuda)
    group.is_lost, group.abort = True, abort
    with pytest.raises(gradscale.CollectiveTimeoutError) as raised:
        Run(GradScaler("cuda", group=group, timeout=0.2), "SGD", "cuda").iterate(1.0)
    assert note in raised.value.__notes__[0]


# Captured graphs.


def capturable(**settings) -> Run:
    """Return a run of which a step can be captured."""
    return Run(GradScaler("cuda", **settings), "AdamW-fused", "cuda", capturable=True)


def captured(cuda, run: Run):
    """Return a graph of a step and an update, and the tensor that its gradients are made from."""
    source = torch.ones(5, device="cuda")
    run.scaler.scale(source)
    with cuda.capture() as graph:
        for parameter in run.parameters:
            parameter.grad.copy_(source * run.scaler._scale)
        run.step()
    return graph, source


@pytest.mark.parametrize("groups", [0, 1, 2])
def test_a_graph_is_captured_while_verdicts_are_on_their_way(cuda, groups: int):
    run = capturable(init_scale=4.0, growth_interval=2, group=[Group() for _ in range(groups)] or None)
    run.iterate_all([1.0, math.inf, 1.0, 1.0])
    assert cuda.under_way(0) == 4
    graph, source = captured(cuda, run)
    assert run.state == (4.0, 0)
    seen = []
    for value in (1.0, 1.0, math.inf, 1.0):
        source.fill_(value)
        graph.replay()
        seen.append((*run.state, run.report.skipped, run.report.scale))
    assert seen == [(4.0, 1, False, 4.0), (8.0, 0, False, 4.0), (4.0, 0, True, 8.0), (4.0, 1, False, 4.0)]
    # Those before the capture are all there.
    assert [report.skipped for report in run.scaler.history] == [False, True, False, False]


def test_replays_of_a_loss_that_is_scaled_in_a_graph_are_not_warned_of(cuda):
    run = Run(GradScaler("cuda", init_scale=4.0), "SGD", "cuda")
    run.give(1.0)
    source = torch.ones(5, device="cuda")
    with cuda.capture() as graph:
        run.parameter.grad.copy_(run.scaler.scale(source))
    for _ in range(2):
        graph.replay()
        run.step()
    assert run.held == [[0.75] * 5]


class FallsFast(gradscale.StaticScale):
    """Lower the scale further than the policies here."""

    def update(self, state, *, nonfinite):
        return state._replace(scale=state.scale / (1 + 15 * (nonfinite > 0)))


def lowered_by_replays(cuda, run: Run):
    run.iterate(1.0)
    graph, source = captured(cuda, run)
    source.fill_(math.inf)
    for _ in range(3):
        graph.replay()


def lowered_by_a_closure(cuda, run: Run):  # noqa: ARG001
    run.give(1.0)
    kept = run.scaler._scale
    gradients = iter([*[math.inf] * 4, 1.0])
    run.scaler.step(run.optimizer, lambda: run.give(next(gradients)))
    run.scaler.update()
    # A captured graph holds it.
    assert run.scaler._scale is kept


def put_in_place(cuda, run: Run):
    run.iterate(1.0)
    run.scaler._scale = torch.full((), 0.25, device="cuda")
    cuda.finish(0)


# Verdicts that come late say nothing of a scale that was set since.


def set_by_update(cuda, run: Run):
    run.give(1.0)
    run.scaler.step(run.optimizer)
    run.scaler.update(0.25)
    cuda.finish(0)


def loaded(cuda, run: Run):
    run.iterate(1.0)
    run.scaler.load_state_dict({**run.scaler.state_dict(), "scale": 0.25})
    cuda.finish(0)


def backed_off(cuda, run: Run):
    run.iterate(1.0)
    cuda.finish(0)
    # It tells of the first verdict; what came after that is not known.
    run.iterate_all([1.0, *[math.inf] * 3, 1.0])


OWN = pytest.param(backed_off, {"policy": FallsFast(1024.0)}, id="own-policy")
WAYS = [lowered_by_replays, lowered_by_a_closure, put_in_place, set_by_update, loaded, backed_off]


@pytest.mark.parametrize(("lower", "settings"), [*[(way, {"init_scale": 4.0}) for way in WAYS], OWN])
def test_a_scale_that_may_be_below_one_is_divided_out_before_a_fused_step(
    cuda, lower: Callable[[Any, Run], None], settings: dict[str, Any]
):
    run = capturable(**settings)
    lower(cuda, run)
    before = run.held
    # Finite, until they are divided by the scale.
    run.put(3e38)
    run.step()
    assert (run.held, run.report.skipped) == (before, True)
    assert run.report.scale < 1.0


@pytest.mark.parametrize(
    ("policy", "unread", "passes"),
    [
        (gradscale.DynamicScale(init_scale=4.0), 2, 1),
        (gradscale.DynamicScale(init_scale=4.0), 3, 2),
        (gradscale.StaticScale(4.0), 5, 1),
        (FallsFast(4.0), 1, 2),
    ],
    ids=["two-steps", "three-steps", "static", "own-policy"],
)
def test_gradients_are_read_twice_only_where_steps_since_a_verdict_may_have_lowered_the_scale_below_one(
    monkeypatch: pytest.MonkeyPatch, policy, unread: int, passes: int
):
    run = Run(GradScaler("cuda", policy=policy), "AdamW-fused", "cuda")
    run.iterate_all([1.0] * unread)
    kernel, calls = torch._amp_foreach_non_finite_check_and_unscale_, []
    name = "_amp_foreach_non_finite_check_and_unscale_"
    monkeypatch.setattr(torch, name, lambda *args: (calls.append(1), kernel(*args)))
    run.iterate(1.0)
    assert len(calls) == passes


def test_a_backoff_factor_that_was_in_force_counts_for_the_scale_that_may_be_there():
    run = Run(GradScaler("cuda", init_scale=4.0, backoff_factor=0.125), "AdamW-fused", "cuda")
    run.iterate(math.inf)
    run.scaler.set_backoff_factor(0.9)
    # Finite, until they are divided by the scale, which the host has not seen.
    run.put(3e38)
    run.step()
    assert (run.held, run.report.skipped, run.report.scale) == ([[1.0] * 5], True, 0.5)


def unscaled_by_functions(_, run: Run):
    grads, state = [parameter.grad for parameter in run.parameters], run.scaler._scale
    return gradscale.unscale(grads, gradscale.StaticScale(0.25).init(state), out=grads)[1]


def unscaled_by_a_scaler(_, run: Run):
    run.scaler.unscale_(run.optimizer)
    return run.scaler._found_inf_per_device(run.optimizer)[torch.device("cuda:0")]


def unscaled_in_a_graph(cuda, run: Run):
    with cuda.capture() as graph:
        found = unscaled_by_a_scaler(cuda, run)
    graph.replay()
    return found


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("unscaled", [unscaled_by_functions, unscaled_by_a_scaler, unscaled_in_a_graph])
def test_gradients_whose_quotients_have_to_be_judged_are_written_once(
    cuda, monkeypatch: pytest.MonkeyPatch, unscaled: Callable[[Any, Run], Any], dtype: str
):
    kernel, written = torch._amp_foreach_non_finite_check_and_unscale_, []

    def noted(tensors: Sequence[Any], *others):
        written.extend(on_host(tensor).untyped_storage().data_ptr() for tensor in tensors)
        kernel(tensors, *others)

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", noted)
    largest = torch.finfo(getattr(torch, dtype)).max
    for spoilt, is_bad in (("none", False), ("first", True), ("last", True)):
        # Of a policy that the host does not know.
        scaler = GradScaler("cuda", policy=FallsFast(0.25), allow_fp16_grads=True)
        run = Run(scaler, "SGD", "cuda", "cuda", "cuda", dtypes=[dtype])
        run.parameters.append(torch.nn.Parameter(torch.zeros(0, dtype=getattr(torch, dtype), device="cuda")))
        run.optimizer.add_param_group({"params": run.parameters[3:]})
        run.put(1.0)
        # Finite, until they are divided by the scale.
        if is_bad:
            on_host(run.parameters[0 if spoilt == "first" else 2].grad)[3] = largest
        places = [on_host(parameter.grad).untyped_storage().data_ptr() for parameter in run.parameters[:3]]
        written.clear()
        assert unscaled(cuda, run).item() == is_bad
        assert [written.count(place) for place in places] == [1] * 3
        assert on_host(run.parameters[1].grad).tolist() == [4.0] * 5


def test_nothing_is_asked_of_earlier_collectives_while_a_graph_is_captured(cuda, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(groups, "carriers", lambda _: {"cuda": "nccl"})
    group = ProcessGroup(cuda)
    run = capturable(init_scale=4.0, growth_interval=2, group=group)
    (collectives,) = iteration_of(run.scaler).agreement.groups

    def start_many():
        for _ in range(12):
            collectives.start_max(torch.zeros(22, dtype=torch.int32, device="cuda"))

    start_many()
    run.iterate(1.0)
    # For the greeting, which goes over a group once.
    cuda.waits.clear()
    graph, source = captured(cuda, run)
    # Nor of those in it afterwards.
    start_many()
    assert group.works == 27
    assert cuda.waits == []
    for value, scale in ((1.0, 8.0), (math.inf, 4.0)):
        source.fill_(value)
        graph.replay()
        assert run.scaler.get_scale() == scale


@pytest.mark.parametrize(
    "name", ["first-scale", "loss-of-the-host", "plain-step", "late-step", "first-message", "gloo"]
)
def test_what_needs_the_host_is_refused_in_a_graph(cuda, monkeypatch: pytest.MonkeyPatch, name: str):
    group = Group() if name == "first-message" else None
    if name == "gloo":
        monkeypatch.setattr(groups, "carriers", lambda _: {"cpu": "gloo"})
        group = groups_in_use(1, lambda: ProcessGroup(cuda))
    variant = "AdamW-fused" if name in ("late-step", "first-message") else "AdamW"
    run = Run(GradScaler("cuda", init_scale=4.0, group=group), variant, "cuda")
    scaler, optimizer = run.scaler, run.optimizer
    if name != "first-scale":
        run.give(1.0)
    if name == "late-step":
        scaler.step(optimizer)
    call, match = {
        "first-scale": (lambda: scaler.scale(torch.ones((), device="cuda")), "graph of cuda:0 is being captured"),
        "loss-of-the-host": (lambda: scaler.scale(torch.ones(())), "graph of cuda:0 is being captured"),
        "plain-step": (lambda: scaler.step(optimizer), "graph of cuda:0 is being captured"),
        "late-step": (lambda: run.report, "graph of cuda:0 is being captured"),
        "first-message": (lambda: scaler.step(optimizer), "step once before the capture"),
        "gloo": (lambda: scaler.unscale_(optimizer), "agree over a group of this device"),
    }[name]
    with cuda.capture(), pytest.raises(gradscale.CallOrderError, match=match):
        call()
    # Nothing is lost.
    if name == "first-scale":
        run.give(1.0)
    if group is None:
        if name != "late-step":
            scaler.step(optimizer)
        assert not run.report.skipped


# Scales that no policy makes.


@pytest.mark.parametrize("scale", [math.inf, math.nan, 0.0, -4.0])
@pytest.mark.parametrize("home", ["cpu", "cuda"])
@pytest.mark.parametrize("groups", [0, 1])
@pytest.mark.parametrize("variant", ["SGD", "SGD-fused"])
def test_a_scale_that_no_policy_makes_is_told_where_a_step_reads_it(
    cuda, scale: float, home: str, groups: int, variant: str
):
    run = Run(GradScaler(home, init_scale=8.0, group=groups_in_use(groups)), variant, home)
    run.give(1.0)
    saved = run.scaler.state_dict()
    run.scaler._scale.fill_(scale)
    cuda.waits.clear()
    reads = run.scaler.step
    if "fused" in variant and home == "cuda":
        # What a device judges is read when somebody asks.
        run.step()
        reads = run.scaler.last_step
    with pytest.raises(gradscale.BackendError, match=r"scale that no policy makes, got scale=.*load_state_dict"):
        reads(run.optimizer)
    assert len(cuda.waits) <= 1
    run.scaler.load_state_dict(saved)
    run.give(1.0)
    run.scaler.step(run.optimizer)
    assert (run.report.skipped, run.report.scale) == (False, 8.0)


@pytest.mark.parametrize("name", ["Adam", "AdamW-fused"])
@pytest.mark.parametrize("devices", [("cuda:0",), ("cuda:1", "cuda:0"), ("cpu", "cuda:0")], ids="-".join)
def test_a_search_of_weights_and_state_waits_no_more_than_one_of_gradients(cuda, name: str, devices: tuple[str, ...]):
    run = Run(GradScaler("cuda"), name, *devices)
    run.iterate_all((1.0, math.inf, 2.0))
    # The counters of Adam are on the CPU.
    state = run.optimizer.state[run.parameters[-1]]
    assert state["step"].device.type == ("cpu" if name == "Adam" else run.parameters[-1].device.type)
    assert state["exp_avg"].device == run.parameters[-1].device
    run.give(1.0)

    def look(**options):
        cuda.waits.clear()
        return run.scaler.diagnose(run.optimizer, **options), len(cuda.waits)

    # The first one reads a verdict that has not come yet.
    look()
    _, waits = look()
    report, more = look(state=True)
    assert (report.cause, report.broken, more) == ("none", (), waits)
    place = f"param_groups[0]['params'][{len(devices) - 1}]"
    for key in ("exp_avg", "step"):
        state[key].fill_(math.nan)
        report, _ = look(state=True)
        assert report.cause == "optimizer state"
        assert (place, key) in [(entry.name, entry.key) for entry in report.broken]
    assert len(report.broken) == 2


# Runs whose every step is skipped.


@pytest.mark.parametrize("optimizer", ["SGD", "SGD-fused"])
def test_a_stalled_run_is_told_once_the_late_verdicts_have_come_and_given_up_in_its_iteration(cuda, optimizer: str):
    run = Run(GradScaler("cuda", policy=gradscale.StaticScale(8.0), warn_after=5), optimizer, "cuda:0")

    def train():
        for number in range(9):
            run.iterate(math.nan)
            if number % 2:
                cuda.finish(0)

    words = "each step of the last [56] iterations was skipped: [56] for non-finite"
    with pytest.warns(gradscale.TrainingStalledWarning, match=words):
        train()
    assert run.scaler.counts() == {"taken": 0, "overflow": 9, "spike": 0, "refused": 0}
    assert run.held == [[1.0] * 5]
    run = Run(GradScaler("cuda", policy=gradscale.StaticScale(8.0), give_up_after=5), optimizer, "cuda:0")
    run.iterate_all([1.0, *[math.nan] * 4])
    with pytest.raises(gradscale.TrainingStalledError, match="each step of the last 5 iterations was skipped: 5 for"):
        run.iterate(math.nan)
    assert run.scaler.state_dict()["counts"] == {"taken": 1, "overflow": 5, "spike": 0, "refused": 0}
