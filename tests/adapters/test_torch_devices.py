"""The torch adapter on devices that are slower than the host: waits, captured graphs, and bad steps of any kind.

The devices are stand-ins (``host_cuda``): a value that the host uses before it has arrived is garbage, and what CUDA
refuses while a graph is captured is refused.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import pickle
import random
from collections.abc import Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from axes_torch import GradScaler, StepGuard, TorchScaler, torch
from host_cuda import installed, on_host
from scenarios import Alone
from small_torch import Small, groups_in_use
from tiers import examples, later
from torch.amp.grad_scaler import OptState

import gradscale
from gradscale.scaler import guard as guards
from gradscale.scaler.scaler import iteration_of
from gradscale_torch import gradients, groups

pytestmark = pytest.mark.torch

GRADIENTS = (1.0, -2.0, math.inf, 0.5, math.nan, 3.0)
NCCL = {"cuda": "nccl"}


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch):
    """Return the stand-in for two CUDA devices, and have its groups say what they carry."""
    monkeypatch.setattr(groups, "carriers", lambda group: getattr(group, "carriers", {"cpu": "lookalike"}))
    with installed() as cuda:
        yield cuda


class ProcessGroup:
    """What looks to the adapter like one of torch's groups, of one rank; NCCL's events cannot always be asked for."""

    bound_device_id = None

    def __init__(self, cuda, carriers: dict[str, str]):
        self.aborts, self.is_lost, self._cuda, self.carriers = 0, False, cuda, carriers
        self.rank, self.size = (lambda: 0), (lambda: 1)

    def abort(self):
        self.aborts += 1

    def allreduce(self, tensors, options):  # noqa: ARG002
        cuda, is_captured, is_lost = self._cuda, self._cuda.graph is not None, self.is_lost

        def is_completed() -> bool:
            cuda.refuse_capture()
            assert not is_captured, "an event of a graph is no event outside of it"
            return not is_lost

        # On a device the stream waits.
        return SimpleNamespace(wait=lambda timeout=None: None, is_completed=is_completed)  # noqa: ARG005


def run_on(scaler, optimizer: str, *devices: str, home: str | None = None, **options) -> Small:
    """Return a run with parameters of ones on some devices; the loss is on the first if no ``home`` is given."""
    given = {"size": 5, "start": 1.0, "lr": 0.125, **options}
    return Small(scaler, optimizer, devices=devices, home=home or devices[0], **given)


# Devices, whose kernel has no bfloat16.


@pytest.mark.parametrize(("scale", "options"), [(1.0, {}), (0.5, {"max_norm": 1.0})], ids=["plain", "clipped"])
def test_without_a_kernel_a_device_makes_a_few_operations_more_for_all_gradients_and_no_wait(
    cuda, scale: float, options: dict[str, float]
):
    devices, numbers = ("cuda:0", "cuda:1"), []
    for dtype in ("float32", "bfloat16"):
        run = run_on(GradScaler("cuda", policy=gradscale.StaticScale(scale)), "SGD", *devices, dtypes=[dtype], count=40)
        for gradient in (1.0, math.nan):
            run.give(gradient)
            cuda.waits.clear()
            before = cuda.launches
            run.scaler.unscale_(run.optimizer, **options)
            numbers.append(cuda.launches - before)
            assert not cuda.waits
            run.step()
            assert run.report.skipped is not math.isfinite(gradient)
    # One of them is the kernel's, which is refused.
    assert numbers[-1] - numbers[1] <= 9 * len(devices)


def test_a_scale_of_one_that_somebody_has_set_is_an_error_once_the_host_sees_it():
    scaler = GradScaler("cuda", policy=gradscale.StaticScale(1.0))
    run = run_on(scaler, "SGD", "cuda:0", dtypes=["bfloat16"])
    run.give(1.0)
    run.step()
    before = on_host(run.parameter).tolist()
    scaler._scale.fill_(4.0)
    run.give(1.0)
    with pytest.raises(
        gradscale.BackendError, match=r"that no policy makes, got scale=4\.0: something else has written"
    ):
        run.step()
    # A scale of 1 multiplies nothing, so that the gradients are what they are.
    assert (on_host(run.parameter).tolist(), on_host(run.parameter.grad).tolist()[0]) == (before, 1.0)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 1.0})
    run.give(1.0)
    run.step()
    assert not run.report.skipped


# Values that come to the host.


class FallsFast(gradscale.StaticScale):
    """Lower the scale further than the policies here."""

    def update(self, state, *, nonfinite):
        return state._replace(scale=state.scale / (1 + 15 * (nonfinite > 0)))


# A fused optimizer and others at one time would wait for the others' sake.
KINDS = [("SGD", {}), ("SGD", {"momentum": 0.5}), ("SGD-fused", {"momentum": 0.5}), ("AdamW-fused", {})]
EXACT = ("float32", "float64", "complex64")
DTYPES = (*EXACT, "bfloat16", "float16")
SKIPPING = [
    *(gradscale.SkipSpikes(window=4, min_values=2, deviations=1.5, of=of) for of in ("loss", ("loss", "norm"))),
    *(None, None, gradscale.SkipSpikes(of="loss", above=10.0), gradscale.SkipSpikes(of="norm", above=8.0)),
]


class Life:
    """A random run of one or two optimizers of a scaler, which is the same wherever its tensors are."""

    def __init__(self, seed: int, cuda, home: str, devices: Sequence[str]):
        self.chance, self.cuda, self.home = random.Random(seed), cuda, home
        choice = self.chance.choice
        scale, interval = choice([0.25, 1.0, 1.0, 3.0, 8.0, 2.0**20, 2.0**70]), choice([1, 2, 3])
        dynamic = functools.partial(gradscale.DynamicScale, init_scale=scale)
        of_factors = dynamic(growth_interval=interval)
        others = [dynamic(hysteresis=2, growth_after="interval_plus_one"), dynamic(min_scale=0.25)]
        self.policy = choice([of_factors, of_factors, *others, gradscale.StaticScale(scale), FallsFast(scale)])
        carriers = choice([NCCL, {"cpu": "gloo"}])
        carriers = {"cpu": "gloo"} if home == "cpu" else carriers
        makers = [Alone, lambda: ProcessGroup(cuda, carriers)]
        self.groups = [choice(makers)() for _ in range(self.chance.randrange(3))] or None
        # What is clipped is exact, so that it does not matter in which order squares are added.
        self.clips = self.groups is None and self.draws(0.4)
        watching = {"skip": choice(SKIPPING), "on_skip": choice([None, None, repr])}
        watching |= {"max_norm": 1.5} if self.clips and self.draws(0.5) else {}
        self.scaler = GradScaler(home, policy=self.policy, group=self.groups, allow_fp16_grads=True, **watching)
        self.runs, self.seen = [self.run(devices) for _ in range(self.chance.randint(1, 2))], []

    def run(self, devices: Sequence[str]) -> Small:
        name, options = self.chance.choice(self.chance.choice([KINDS[:2], KINDS[2:]]))
        dtype = self.chance.choice(EXACT if self.clips else DTYPES) if "fused" not in name else "float32"
        return run_on(self.scaler, name, *devices, home=self.home, dtypes=[dtype], **options)

    def draws(self, share: float) -> bool:
        return self.chance.random() < share

    def gradient(self) -> float:
        return self.chance.choice(GRADIENTS if self.clips else (*GRADIENTS, 0.3, 1.7))

    def give(self, run: Small, *, is_scaled: bool):
        """Make gradients: by the scale, without any, or as large as they may be."""
        values = [self.gradient() for _ in run.parameters]
        if not is_scaled:
            for parameter, value in zip(run.parameters, values, strict=True):
                parameter.grad = torch.full_like(parameter, value)
        elif self.draws(0.15):
            run.put(math.ldexp(0.5, math.frexp(torch.finfo(run.parameter.dtype).max)[1]))
        else:
            run.give(*values)

    def look(self, run: Small):
        """Look at a verdict as frameworks do, and write another one now and then."""
        flags = self.scaler._found_inf_per_device(run.optimizer)
        self.seen.append(max(flag.item() for flag in flags.values()))
        assert set(flags) >= {parameter.grad.device for parameter in run.parameters}
        if self.draws(0.3):
            is_finite = all(on_host(parameter.grad).isfinite().all() for parameter in run.parameters)
            verdict = self.chance.choice([0.0, 1.0]) if is_finite else 1.0
            for flag in flags.values():
                flag.fill_(verdict)

    def step(self, run: Small):
        scaler, optimizer = self.scaler, run.optimizer
        is_refused, is_clipped, before = self.draws(0.2), self.clips and self.draws(0.6), run.held
        # Alone it may be refused after it was unscaled, too.
        is_late = is_refused and self.groups is None and self.draws(0.5)
        if is_refused and not is_late:
            scaler.refuse(optimizer)
        if is_refused and self.groups is None and self.draws(0.3):
            # A framework that judges by itself, before or afterwards.
            state = scaler._per_optimizer_states[id(optimizer)]
            found = {torch.device(self.home): torch.zeros(1, device=self.home)}
            state["stage"], state["found_inf_per_device"] = OptState.UNSCALED, found
        elif is_clipped or is_late or self.draws(0.3):
            norm = scaler.unscale_(optimizer, **{"max_norm": 1.5} if is_clipped else {})
            self.seen.append(None if norm is None else norm.item())
            if self.draws(0.2):
                self.look(run)
        elif self.draws(0.1):
            value = self.chance.choice([1e30, 1.0])
            scaler.step(optimizer, lambda: run.give(value))
            return
        if is_late:
            scaler.refuse(optimizer)
        if self.draws(0.1):
            optimizer.step = lambda: gradscale.NOT_STEPPED
        scaler.step(optimizer)
        vars(optimizer).pop("step", None)
        assert not is_refused or run.held == before

    def iterate(self):
        scaler = self.scaler
        self.cuda.current = self.chance.randrange(2)
        # A rank of a pipeline may have no loss; where none has, the scale must be 1.
        is_scaled = self.groups is None or self.draws(0.5) or scaler.get_scale() != 1.0
        for run in self.runs:
            self.give(run, is_scaled=is_scaled)
            if is_scaled:
                loss = self.chance.choice([1.0, 1.0, 1.0, 99.0])
                told = torch.full((), loss, device=self.home) if self.draws(0.5) else loss
                scaler.scale(torch.ones((), device=self.home), loss=told)
        for run in self.runs:
            self.step(run)
            # Else a verdict may be read later.
            if self.draws(0.4):
                self.seen.append((run.report.reason, run.report.scale, run.report.norm, run.held))
            if self.draws(0.1):
                self.seen.append(scaler.diagnose(run.optimizer, state=True).to_dict())
        scaler.update(*[self.chance.choice([4.0, 0.25])] * self.draws(0.1))
        for index in range(2):
            self.cuda.finish(index, self.chance.choice([0, 0, 1, None]))
        self.go_between()

    def go_between(self):
        """Do what is done between iterations."""
        scaler = self.scaler
        if self.draws(0.3):
            # A verdict that comes later is counted later.
            self.seen.append(copy.deepcopy(scaler).state_dict() | {"counts": None})
        if self.draws(0.1):
            scaler.load_state_dict(pickle.loads(pickle.dumps(scaler.state_dict())))
        if self.draws(0.1):
            scaler.load_state_dict({**scaler.state_dict(), "scale": 0.25})
        if self.draws(0.1):
            scale, device = self.chance.choice([0.25, 16.0]), self.chance.choice(["cpu", self.home])
            scaler._scale = torch.full((), scale, device=device)
        if self.draws(0.1) and type(self.policy) is gradscale.DynamicScale and not self.clips:
            scaler.set_backoff_factor(self.chance.choice([0.125, 0.7]))
        if self.draws(0.1):
            given = [torch.full((), 2.0, device=device) for device in (self.home, "cpu")]
            scaled = scaler.scale(given)
            assert [one.device for one in scaled] == [one.device for one in given]
            self.seen.append([on_host(one).item() for one in scaled])

    def lived(self):
        """Return what was seen of some iterations, and what is left."""
        for _ in range(8):
            self.iterate()
            # Where the messages of ranks with a loss go from.
            assert self.scaler._scale.device.type == self.home.partition(":")[0]
        self.seen += [(report.iteration, report.reason, report.scale) for report in self.scaler.history]
        self.seen.append(self.scaler.state_dict())
        for run in self.runs:
            # Whose weights large gradients cannot spoil.
            assert type(run.optimizer) is torch.optim.SGD or all(map(math.isfinite, chain(*run.held)))
        return self.seen, [(run.held, run.state) for run in self.runs]


# As with FSDP2's CPU offload, and of several devices.
PLACES = [
    ("cuda:1", ("cpu", "cpu", "cpu")),
    ("cuda:0", ("cuda:1", "cuda:0", "cuda:0")),
    ("cuda:1", ("cpu", "cuda:0", "cuda:0")),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("share", [0, *later("ranks", 1, 2, 3), *later("all", 4, 5, 6, 7)])
def test_a_random_run_is_the_same_wherever_its_loss_and_its_gradients_are_and_whatever_the_defaults(cuda, share: int):
    for seed in range(share, examples(200), 8):
        expected = repr(Life(seed, cuda, "cpu", ("cpu", "cpu", "cpu")).lived())
        with contextlib.ExitStack() as defaults:
            if seed % 3 == 0:
                # None that anything here is made of.
                defaults.enter_context(torch.device("meta"))
                defaults.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(torch.float64)
            for place in PLACES:
                assert repr(Life(seed, cuda, *place).lived()) == expected, (seed, place)


@pytest.mark.parametrize(("scale", "bad"), [(4.0, 0), (0.25, 1)])
def test_the_functions_bring_a_scale_to_the_host_and_to_devices(scale: float, bad: int):
    state = gradscale.DynamicScale(init_scale=scale).init(torch.zeros((), device="cuda"))
    # The largest one overflows when it is divided by a scale below 1.
    grads = [torch.full((2,), value, device=on) for value, on in ((8.0, "cpu"), (3e38, "cuda:1"), (8.0, "cuda:0"))]
    _, nonfinite = gradscale.unscale(grads, state, out=grads)
    assert [grad.tolist() for grad in grads[::2]] == [[8.0 / scale] * 2] * 2
    assert (nonfinite.item(), str(nonfinite.device)) == (bad, "cuda:0")
    assert gradscale.scale(torch.ones(2), state).tolist() == [scale] * 2


# Waits.

SETTINGS: dict[str, dict[str, Any]] = {
    "torch's": {"policy": gradscale.DynamicScale(init_scale=4.0, growth_interval=2)},
    "hysteresis": {"policy": gradscale.DynamicScale(init_scale=4.0, hysteresis=2, growth_after="interval_plus_one")},
    "static": {"policy": gradscale.StaticScale(4.0)},
    "spikes": {"skip": gradscale.SkipSpikes(window=4, min_values=2, of="loss")},
}


@pytest.mark.parametrize(("settings", "groups"), list(zip(SETTINGS, (0, 2, 2, 0), strict=True)))
@pytest.mark.parametrize(("name", "waits"), [("AdamW-fused", 0), ("SGD", 1)])
def test_a_step_waits_once_and_that_of_a_fused_optimizer_for_nothing(
    cuda, settings: str, groups: int, name: str, waits: int
):
    run = run_on(GradScaler("cuda", group=groups_in_use(groups), **SETTINGS[settings]), name, "cuda:0", "cuda:1")
    # With a group there is no norm of plain tensors.
    clipped = {} if groups else {"max_norm": 1.0}
    for gradient, unscales in zip(GRADIENTS, (None, {}, clipped) * 2, strict=True):
        run.give(gradient)
        # Of another device than the one scaled before.
        run.scaler.scale(torch.ones((), device="cuda:0"), loss=torch.ones((), device="cuda:1"))
        if unscales is not None:
            run.scaler.unscale_(run.optimizer, **unscales)
        assert cuda.waits == []
        run.step()
        assert len(cuda.waits) == waits
        cuda.waits.clear()
    assert [report.skipped for report in run.scaler.history] == [not math.isfinite(gradient) for gradient in GRADIENTS]


@pytest.mark.filterwarnings("ignore:skip= judges norm:UserWarning")
def test_a_spike_of_one_of_two_late_steps_does_not_hold_the_scale():
    scaler = GradScaler("cuda", init_scale=4.0, growth_interval=1, skip=SKIPPING[-1])
    first, second = (run_on(scaler, "SGD-fused", "cuda") for _ in range(2))
    for run in (first, second):
        run.give(100.0)
    scaler.unscale_(first.optimizer, max_norm=1.0)
    scaler.step(first.optimizer)
    second.step()
    assert (scaler.get_scale(), first.report.reason, second.report.reason) == (8.0, "spike", "stepped")


@pytest.mark.parametrize("name", ["SGD", "SGD-fused"])
def test_schedules_follow_steps_that_were_made_and_one_read_serves_all(cuda, name: str):
    run = run_on(GradScaler("cuda"), name, "cuda")
    schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer, factor=0.5, patience=0, threshold=0.0)
    for gradient, metric in ((1.0, 1.0), (math.inf, 0.25), (1.0, 0.5)):
        cuda.waits.clear()
        run.iterate(gradient)
        run.scaler.step_schedule(run.optimizer, schedule)
        run.scaler.step_schedule(run.optimizer, plateau, metrics=metric)
        assert "), scale=<on cuda:0>, " in repr(run.scaler)
        assert len(cuda.waits) == 1
    assert (schedule.last_epoch, plateau.last_epoch, plateau.best) == (2, 2, 0.5)
    for wrong, said in ((None, "must be a learning-rate schedule.*got None"), (run.optimizer, "so it is .* got SGD")):
        with pytest.raises(gradscale.InvalidTypeError, match=rf"{said}: call step_schedule\(optimizer, schedule\)"):
            run.scaler.step_schedule(schedule, wrong)


# Ranks that never come.


@pytest.mark.parametrize(("optimizer", "before"), [("SGD", 0), ("SGD-fused", 1)], ids=["first-message", "second"])
def test_a_rank_that_never_comes_over_nccl_is_a_timeout_that_aborts_the_group(cuda, optimizer: str, before: int):
    group = ProcessGroup(cuda, NCCL)
    run = run_on(GradScaler("cuda", group=group, timeout=0.2), optimizer, "cuda")

    def skips():
        run.iterate(1.0)
        return run.report.skipped

    assert before == 0 or not skips()
    group.is_lost = True
    for error in (gradscale.CollectiveTimeoutError, (gradscale.CollectiveTimeoutError, gradscale.BackendError)):
        with pytest.raises(error, match=r"rank 0 of 1 waited 0\.2 s|given up"):
            skips()
    with pytest.raises(gradscale.BackendError, match="given up"):
        run.scaler.set_group(group)
    run.scaler.set_group(ProcessGroup(cuda, NCCL))
    assert not skips()
    assert group.aborts == 1


# Captured graphs.


def test_replays_of_a_loss_that_is_scaled_in_a_graph_are_not_warned_of(cuda):
    run = run_on(GradScaler("cuda", init_scale=4.0), "SGD", "cuda")
    run.give(1.0)
    source = torch.ones(5, device="cuda")
    with cuda.capture() as graph:
        run.parameter.grad.copy_(run.scaler.scale(source))
    for _ in range(2):
        graph.replay()
        run.step()
    assert run.held == [[0.75] * 5]


def test_a_backoff_factor_that_was_in_force_counts_for_the_scale_that_may_be_there():
    run = run_on(GradScaler("cuda", init_scale=4.0, backoff_factor=0.125), "AdamW-fused", "cuda")
    run.iterate(math.inf)
    run.scaler.set_backoff_factor(0.9)
    # Finite, until they are divided by the scale, which the host has not seen.
    run.put(3e38)
    run.step()
    assert (run.held, run.report.skipped, run.report.scale) == ([[1.0] * 5], True, 0.5)


@pytest.mark.parametrize("is_made", [False, True], ids=["before the state", "after"])
def test_a_backoff_factor_that_is_set_counts_for_the_scale_that_may_be_there(is_made: bool):
    run = run_on(GradScaler("cuda", init_scale=4.0, backoff_factor=0.9), "AdamW-fused", "cuda")
    if is_made:
        run.iterate(math.inf)
        run.scaler.update(4.0)
    run.scaler.set_backoff_factor(0.125)
    run.iterate(math.inf)
    run.put(3e38)
    run.step()
    assert (run.held, run.report.skipped, run.report.scale) == ([[1.0] * 5], True, 0.5)


@pytest.mark.parametrize("groups", [0, 2])
def test_a_scale_that_replays_alone_have_lowered_lets_no_gradient_overflow_that_is_divided_by_it(cuda, groups: int):
    policy = gradscale.DynamicScale(init_scale=4.0, min_scale=0.25)
    scaler, source = GradScaler("cuda", policy=policy, group=groups_in_use(groups)), torch.ones(5, device="cuda")
    run = run_on(scaler, "AdamW-fused", "cuda", capturable=True)
    run.iterate(1.0)
    scaler.scale(source)
    with cuda.capture() as graph:
        run.parameter.grad.copy_(source * scaler._scale)
        run.step()
    graph.replay()
    source.fill_(math.inf)
    for _ in range(5):
        graph.replay()
    # Finite, until they are divided by the scale, which the host has not seen.
    run.put(3e38)
    run.step()
    plain = run_on(GradScaler("cpu"), "AdamW-fused", "cpu", capturable=True)
    for _ in range(2):
        plain.iterate(1.0)
    assert (run.report.reason, run.report.scale, scaler.get_scale(), run.held) == ("overflow", 0.25, 0.25, plain.held)


def test_a_rank_without_gradients_sends_its_messages_from_the_device_of_its_parameters(cuda):
    # Over NCCL for the device and gloo for the CPU, the others would wait for it.
    collective = gradscale.registry.get("torch").collectives(ProcessGroup(cuda, NCCL), timeout=5.0)
    for make in (StepGuard, functools.partial(gradscale.StepGuard, backend="torch")):
        run = Small(make(group=collective), devices=["cuda"], home="cuda")
        run.parameter.grad = None
        with pytest.warns(UserWarning, match="none of whose parameters has a gradient"):
            run.scaler.step(run.optimizer)
        assert run.scaler.last_step(run.optimizer).reason == "no gradients"
        state = iteration_of(run.scaler).current.state
        assert state is not None
        assert state.scale.device.type == "cuda"


def test_nothing_is_asked_of_earlier_collectives_while_a_graph_is_captured(cuda):
    run = run_on(GradScaler("cuda", group=ProcessGroup(cuda, NCCL)), "AdamW-fused", "cuda", capturable=True)
    (collectives,) = iteration_of(run.scaler).agreement.usable_groups()

    def start_many():
        for _ in range(12):
            collectives.start_max(torch.zeros(22, dtype=torch.int32, device="cuda"))

    start_many()
    run.iterate(1.0)
    # For the greeting, which goes over a group once.
    cuda.waits.clear()
    with cuda.capture():
        run.step()
        start_many()
    # Nor of those in it afterwards.
    start_many()
    assert cuda.waits == []


# What is called in a graph, of which optimizer and over which group, and what is said.
IN_A_GRAPH: dict[str, tuple[Any, str, str, str]] = {
    "first-scale": (lambda run: run.scaler.scale(torch.ones((), device="cuda")), "AdamW", "", "is being captured"),
    "loss-of-the-host": (lambda run: run.scaler.scale(torch.ones(())), "AdamW", "", "is being captured"),
    "plain-step": (lambda run: run.scaler.step(run.optimizer), "AdamW", "", "is being captured"),
    "late-step": (lambda run: run.report, "AdamW-fused", "", "is being captured"),
    "first-message": (lambda run: run.scaler.step(run.optimizer), "AdamW-fused", "fresh", "before the capture"),
    "gloo": (lambda run: run.scaler.unscale_(run.optimizer), "AdamW", "gloo", "agree over a group of this device"),
}


@pytest.mark.parametrize("name", IN_A_GRAPH)
def test_what_needs_the_host_is_refused_in_a_graph(cuda, name: str):
    call, variant, kind, said = IN_A_GRAPH[name]
    groups = {"": [], "fresh": [Alone()], "gloo": groups_in_use(1, lambda: ProcessGroup(cuda, {"cpu": "gloo"}))}
    run = run_on(GradScaler("cuda", init_scale=4.0, group=groups[kind] or None), variant, "cuda")
    if name != "first-scale":
        run.give(1.0)
    if name == "late-step":
        run.step()
    with cuda.capture(), pytest.raises(gradscale.CallOrderError, match=said):
        call(run)
    if not kind and name != "late-step":
        # Nothing is lost.
        run.give(1.0)
        run.scaler.step(run.optimizer)
    assert kind or not run.report.skipped


# Scales that no policy makes.


@pytest.mark.parametrize("home", ["cpu", "cuda"])
@pytest.mark.parametrize("groups", [0, 1])
@pytest.mark.parametrize("variant", ["SGD", "SGD-fused"])
def test_a_scale_that_no_policy_makes_is_told_where_a_step_reads_it(cuda, home: str, groups: int, variant: str):
    run = run_on(GradScaler(home, init_scale=8.0, group=groups_in_use(groups)), variant, home)
    run.give(1.0)
    saved = run.scaler.state_dict()
    for scale in (math.inf, math.nan, 0.0, -4.0):
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


# Runs whose every step is skipped.


def test_a_stalled_run_is_told_once_the_late_verdicts_have_come_and_given_up_in_its_iteration(cuda):
    run = run_on(GradScaler("cuda", policy=gradscale.StaticScale(8.0), warn_after=5), "SGD-fused", "cuda:0")

    def train():
        for number in range(9):
            run.iterate(math.nan)
            if number % 2:
                cuda.finish(0)

    with pytest.warns(gradscale.TrainingStalledWarning, match="last 6 steps of SGD was skipped: 6 for non-finite"):
        train()
    run = run_on(GradScaler("cuda", policy=gradscale.StaticScale(8.0), give_up_after=5), "SGD-fused", "cuda:0")
    for gradient in (1.0, *[math.nan] * 4):
        run.iterate(gradient)
    with pytest.raises(gradscale.TrainingStalledError, match="each of the last 5 steps of SGD was skipped: 5 for"):
        run.iterate(math.nan)
    assert run.scaler.counts() == {"taken": 1, "overflow": 5, "spike": 0, "refused": 0}


# Spikes, guards, and optimizers in wrappers.

RULE = gradscale.SkipSpikes(window=4, min_values=2, of="norm")


def test_a_captured_graph_judges_spikes_and_learns_in_each_replay(cuda):
    # The scale grows at each clean step.
    scaler = GradScaler("cuda", init_scale=4.0, growth_interval=1, skip=RULE)
    run = run_on(scaler, "AdamW-fused", "cuda", size=2, capturable=True)
    for _ in range(2):
        run.give(1.0)
        run.step(max_norm=100.0)
    source = torch.ones(2, device="cuda")
    with cuda.capture() as graph:
        run.parameter.grad.copy_(scaler.scale(source))
        run.step(max_norm=100.0)
    for value, reason, scale in (
        *((1.0, "stepped", 32.0), (5.0, "spike", 32.0), (1.0, "stepped", 64.0)),
        *((math.inf, "overflow", 32.0), (1.0, "stepped", 64.0)),
    ):
        source.fill_(value)
        graph.replay()
        assert (run.report.reason, scaler.get_scale()) == (reason, scale)
    # The values of the two steps before, and of the replays that were made.
    window = json.loads(scaler.state_dict()["spikes"])[0]["norm"]
    assert window == {"values": [pytest.approx(2.0**0.5)] * 4, "skipped": 0}
    # Replays go on with what was loaded.
    scaler.load_state_dict(scaler.state_dict() | {"spikes": "[]"})
    source.fill_(5.0)
    graph.replay()
    assert run.report.reason == "stepped"


@pytest.mark.parametrize("name", ["SGD", "SGD-fused"])
def test_looks_at_gradients_keep_the_spike_of_their_norm_and_divide_what_is_unscaled_by_no_scale_below_one(name: str):
    rule = gradscale.SkipSpikes(of="norm", above=2.0**100)
    run = Small(GradScaler("cpu", init_scale=2.0**-100, skip=rule), name)
    for gradient, reason in ((2.0**126, "spike"), (2.0**30, "stepped")):
        run.give(gradient)
        if reason == "spike":
            run.scaler._check_inf_per_device(run.optimizer)
        run.scaler.unscale_(run.optimizer, max_norm=2.0**127)
        found = run.scaler._check_inf_per_device(run.optimizer)
        assert [value.item() for value in found.values()] == [float(reason == "spike")]
        run.step()
        assert (run.report.reason, run.scaler.get_scale()) == (reason, 2.0**-100)
    # The norm of a step by itself is not known, nor that of gradients which a framework judges.
    for is_judged in (False, True):
        run = Small(GradScaler("cpu", skip=rule), name)
        run.give(1.0)
        state = run.scaler._per_optimizer_states[id(run.optimizer)]
        if is_judged:
            state["stage"], state["found_inf_per_device"] = OptState.UNSCALED, {torch.device("cpu"): torch.zeros(1)}
        with pytest.warns(
            UserWarning, match="skip= judges norm, and found nothing in this step.* give step\\(\\) loss="
        ):
            run.step()
        assert run.report.reason == "stepped"


def test_windows_that_begin_in_inference_mode_go_on_outside_of_it():
    scaler = GradScaler("cpu", skip=gradscale.SkipSpikes(window=4, of="loss"))
    for _ in range(2):
        run = Small(scaler)
        run.give(1.0)
        with torch.inference_mode():
            scaler.unscale_(run.optimizer)
        run.step()
    assert [window["loss"]["values"] for window in json.loads(scaler.state_dict()["spikes"])] == [[1.0, 1.0]]


class Around:
    """A wrapper that has whatever its optimizer has, and a step of its own or that of the optimizer."""

    def __init__(self, optimizer, is_called: bool = False):
        self.inner = optimizer
        if is_called:
            self.step, self.optimizer = lambda: optimizer.step(), optimizer

    def __getattr__(self, name: str):
        return getattr(self.__dict__["inner"], name)


@pytest.mark.parametrize("wrap", [Around, lambda optimizer: Around(optimizer, is_called=True)])
@pytest.mark.parametrize("explicit", [False, True])
def test_a_fused_optimizer_in_a_wrapper_takes_unscaled_gradients_and_no_bad_step(wrap, explicit: bool):
    run = Small(GradScaler("cpu"), "SGD-fused", start=1.0, lr=0.5, momentum=0.5)
    wrapped = wrap(run.optimizer)
    for gradient, weight in ((1.0, 0.5), (math.nan, 0.5), (1.0, -0.25)):
        run.give(gradient)
        if explicit:
            run.scaler.unscale_(wrapped)
        run.scaler.step(wrapped)
        run.scaler.update()
        assert run.held == [[weight] * 2]


# A guard.


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_duplicates_whose_sum_overflows_and_bad_values_of_eight_bits_skip_the_step():
    for bad in (
        torch.sparse_coo_tensor([[1, 1]], torch.full((2,), 40000.0, dtype=torch.float16), (4,)),
        torch.full((4,), math.nan).to(torch.float8_e4m3fn),
    ):
        for scaler in (StepGuard(), gradscale.StepGuard(), GradScaler("cpu", init_scale=1.0, allow_fp16_grads=True)):
            run = Small(scaler, dtypes=[str(bad.dtype).removeprefix("torch.")], size=4)
            run.put(bad)
            run.step()
            assert run.report.reason == "overflow"


def test_a_guard_is_torchs_scaler_to_frameworks_and_leaves_losses_as_they_are():
    guard, loss = StepGuard(), torch.ones((), dtype=torch.float16)
    assert guard.scale(loss) is loss
    assert isinstance(guard, TorchScaler)


# Operations.


class Told(torch.optim.Optimizer):
    """Makes no step of its own, so that the scaler's operations alone are counted."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        """Do nothing."""


class ToldFused(Told):
    """Would divide and skip in its kernel."""

    _step_supports_amp_scaling = True


RULES = {of: gradscale.SkipSpikes(of=of.split(" and ")) for of in ("loss", "loss and norm")}  # type: ignore[arg-type]
SCALES = {"init_scale": 1024.0, "growth_interval": 10**6}
# Above any norm, and below it.
ABOVE, BELOW = {"max_norm": 1e9}, {"max_norm": 1e-9}
# The scaler, its options, whether the optimizer is fused, the gradients; most operations on the device, and waits.
MOST = {
    "torch's scaler": (TorchScaler, SCALES, False, "float32", 9, 1),
    "torch's scaler, fused": (TorchScaler, SCALES, True, "float32", 9, 0),
    "scaler": (GradScaler, SCALES, False, "float32", 7, 1),
    "scaler, fused": (GradScaler, SCALES, True, "float32", 8, 0),
    "scaler that clips": (GradScaler, SCALES | BELOW, False, "float32", 9, 1),
    "guard": (StepGuard, {}, False, "float32", 4, 1),
    "guard, bfloat16": (StepGuard, {}, False, "bfloat16", 6, 1),
    "guard, fused": (StepGuard, {}, True, "float32", 5, 0),
    "guard, norm is below": (StepGuard, ABOVE, False, "bfloat16", 5, 1),
    "guard that clips": (StepGuard, BELOW, False, "float32", 6, 1),
    "guard that clips bfloat16": (StepGuard, BELOW, False, "bfloat16", 6, 1),
    "guard that clips, fused": (StepGuard, BELOW, True, "float32", 11, 0),
    "guard, spikes of losses": (StepGuard, {"skip": RULES["loss"]}, False, "float32", 6, 1),
    "guard, spikes, clips": (StepGuard, {"skip": RULES["loss and norm"], **BELOW}, False, "bfloat16", 8, 1),
    "guard, spikes of losses, fused": (StepGuard, {"skip": RULES["loss"]}, True, "float32", 67, 0),
}


@pytest.mark.tier("ranks")
@pytest.mark.parametrize(("make", "options", "is_fused", "dtype", "most", "waits"), MOST.values(), ids=MOST)
def test_an_iteration_alone_makes_few_operations_and_as_many_waits_as_it_has_to(
    cuda, make, options: dict[str, Any], is_fused: bool, dtype: str, most: int, waits: int
):
    kept = {"dtype": getattr(torch, dtype), "device": "cuda:0"}
    parameters = [torch.nn.Parameter(torch.zeros(10, **kept)) for _ in range(30)]
    for parameter in parameters:
        parameter.grad = torch.full((10,), 1e-3, **kept)
    scaler = make(**({} if make is StepGuard else {"device": "cuda"}), **options)
    optimizer, loss = (ToldFused if is_fused else Told)(parameters), torch.ones((), device="cuda:0")
    for _ in range(3):
        before = cuda.launches
        cuda.waits.clear()
        scaler.scale(loss)
        scaler.step(optimizer)
        scaler.update()
    # The first iterations make what is kept.
    assert (cuda.launches - before <= most, len(cuda.waits)) == (True, waits), cuda.launches - before


# What a step that clips leaves.


@pytest.mark.parametrize("gradient", [1.0, math.inf], ids=["finite", "overflow"])
def test_frameworks_see_the_verdict_on_a_step_that_clips(gradient: float):
    run = run_on(GradScaler("cuda", init_scale=8.0, max_norm=1.0), "SGD", "cuda:0", "cuda:1")
    run.give(gradient)
    run.scaler.step(run.optimizer)
    flags = run.scaler._found_inf_per_device(run.optimizer)
    assert {str(device): flag.item() for device, flag in flags.items()} == dict.fromkeys(
        ("cuda:0", "cuda:1"), float(gradient != 1.0)
    )
    run.scaler.update()


@pytest.mark.parametrize("place", ["judge", "read"])
def test_a_spike_is_judged_once_more_after_ctrl_c(monkeypatch: pytest.MonkeyPatch, place: str):
    rule = gradscale.SkipSpikes(of=("loss", "norm"), above=5.0)
    run = run_on(StepGuard(max_norm=1.0, skip=rule), "SGD", "cuda:0")
    run.give(100.0)
    before = run.held
    run.scaler.scale(torch.ones((), device="cuda:0"))

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    target = (guards, "judge_number") if place == "judge" else (gradients.DeferredClip, "judge")
    with monkeypatch.context() as patch:
        patch.setattr(*target, interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.scaler.step(run.optimizer)
    run.scaler.step(run.optimizer)
    assert (run.report.reason, run.held) == ("spike", before)
    run.scaler.update()


def test_the_norm_of_a_captured_step_is_that_of_the_last_replay(cuda):
    run = run_on(GradScaler("cuda", init_scale=1.0, max_norm=100.0), "SGD-fused", "cuda:0")
    run.give(1.0)
    run.step()
    loss = torch.ones((), device="cuda:0")
    with cuda.capture() as graph:
        run.scaler.scale(loss)
        run.scaler.step(run.optimizer)
        run.scaler.update()
    norms = []
    for factor in (1.0, 2.0, 3.0):
        run.parameter.grad.fill_(factor)
        graph.replay()
        norms.append(run.report.norm)
    assert norms == pytest.approx([math.sqrt(run.parameter.numel()) * factor for factor in (1.0, 2.0, 3.0)])


# What is held.


@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "captured"])
def test_what_is_held_is_put_back_on_the_device_without_a_wait(cuda, is_captured: bool):
    held: list[Any] = [torch.zeros(3, device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")]
    # One of another library is written by the host, which reads the verdict.
    held += [] if is_captured else [torch.zeros(2), np.zeros(2)]
    run = run_on(GradScaler("cuda", init_scale=4.0, hold=held), "AdamW-fused", "cuda", size=2, capturable=True)
    run.give(1.0)
    run.step()
    written, source = torch.zeros((), device="cuda"), torch.ones(2, device="cuda")

    def iteration() -> None:
        for each in held:
            if isinstance(each, np.ndarray):
                each[...] = written.item()
            else:
                each.copy_(written)
        run.parameter.grad.copy_(run.scaler.scale(source))
        run.step()

    graph = None
    if is_captured:
        with cuda.capture() as graph:
            iteration()
    expected = 0.0
    for value, gradient in ((1.0, 1.0), (math.nan, math.inf), (2.0, math.nan), (3.0, 1.0), (4.0, math.inf)):
        written.fill_(value if math.isfinite(value) else 9.0)
        source.fill_(gradient)
        if graph is None:
            iteration()
        else:
            graph.replay()
        expected = value if math.isfinite(gradient) else expected
        values = [each if isinstance(each, np.ndarray) else on_host(each) for each in held]
        assert [set(each.reshape(-1).tolist()) for each in values] == [{expected}] * len(held)


class Replacing(torch.nn.Module):
    """Its forward pass replaces its buffers, by its input and perhaps by one of another shape, and adds some."""

    def __init__(self, *, reshapes: bool):
        super().__init__()
        self.register_buffer("last", torch.zeros(3, device="cuda"))
        self.reshapes = reshapes
        if reshapes:
            self.register_buffer("shaped", torch.zeros(1, device="cuda"))
            self.register_buffer("nothing", None)

    def forward(self, x: Any) -> None:
        self.last = x
        if self.reshapes:
            self.nothing = x * 2.0
            self.shaped = torch.cat([self.shaped, x[:1]])
            if "added" not in self._buffers:
                self.register_buffer("added", torch.zeros(3, device="cuda"))
            self.added = self.added + x


@pytest.mark.parametrize("reshapes", [False, True])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_buffers_that_are_replaced_before_a_late_verdict_are_held(cuda, reshapes: bool, bad: int):
    states = []
    for values in ([1.0, 2.0], [*[1.0, 2.0][:bad], math.nan, *[1.0, 2.0][bad:]]):
        model = Replacing(reshapes=reshapes)
        run = run_on(GradScaler("cuda", init_scale=4.0, hold=model), "AdamW-fused", "cuda", size=3, capturable=True)
        inputs = [torch.full((3,), value, device="cuda") for value in values]
        for value, x in zip(values, inputs, strict=True):
            model(x)
            run.give(value)
            cuda.waits.clear()
            run.scaler.step(run.optimizer)
            run.scaler.update()
            # A wait only for what the host has to know.
            assert reshapes or not cuda.waits
        states.append({name: on_host(buffer).tolist() for name, buffer in model._buffers.items() if buffer is not None})
        read = [on_host(x).tolist() for x in inputs]
        assert all(one == [value] * 3 or math.isnan(value) for one, value in zip(read, values, strict=True))
        assert math.isnan(sum(map(sum, read))) == (len(values) == 3)
    assert states[0] == states[1]


@pytest.mark.parametrize(("name", "most"), [("SGD", 2), ("SGD-fused", 10)], ids=["plain", "fused"])
def test_holding_costs_a_copy_for_each_dtype_and_no_wait(cuda, name: str, most: int):
    dtypes = [torch.float32, torch.int64]
    held = [torch.zeros(4, dtype=dtype, device="cuda:0") for dtype in dtypes for _ in range(9)]
    costs = []
    for hold in (None, held):
        run = run_on(StepGuard(hold=hold), name, "cuda:0")
        for value in (1.0, math.nan, 1.0):
            run.give(value)
            before = cuda.launches
            cuda.waits.clear()
            run.scaler.step(run.optimizer)
            made, waits = cuda.launches - before, len(cuda.waits)
        costs.append((made, waits))
    (plain, waits), (holding, more_waits) = costs
    assert (holding - plain <= most, more_waits) == (True, waits), costs


# One call: of the rows with loss= and norm=, most operations.
INPUTS = {"loss": ("loss", 5), "norm": ("norm", 2), "loss and norm": ("loss norm", 4)}


@pytest.mark.parametrize(("names", "most"), INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("rule", [None, gradscale.SkipSpikes()], ids=["no rule", "rule"])
def test_a_step_that_is_given_its_values_reads_them_with_the_verdict(cuda, rule, names: str, most: int):
    (parameter,) = parameters = [torch.nn.Parameter(torch.zeros(10, device="cuda:0"))]
    parameter.grad = torch.ones(10, device="cuda:0")
    guard, optimizer = StepGuard(skip=rule), Told(parameters)
    for value in (1.0, math.nan, 1.0):
        given = {name: torch.full((), value, device="cuda:0") for name in names.split()}
        before = cuda.launches
        cuda.waits.clear()
        guard.step(optimizer, **given)
        made, waits = cuda.launches - before, len(cuda.waits)
        report = guard.last_step(optimizer)
        assert report.reason == ("stepped" if value == 1.0 else "overflow" if "norm" in names else "spike")
    # The first iterations make what is kept.
    assert (made <= most, waits) == (True, 1), made


@pytest.mark.parametrize(
    ("name", "bad", "reason"), [("loss", math.nan, "spike"), ("norm", math.nan, "overflow"), ("norm", -1.0, "overflow")]
)
def test_a_fused_optimizer_skips_by_the_value_that_its_step_is_given_without_a_wait(cuda, name, bad, reason: str):
    run = run_on(StepGuard(), "SGD-fused", "cuda:0")
    for value, steps in ((1.0, 1), (bad, 1), (2.0, 2)):
        run.give(1.0)
        cuda.waits.clear()
        run.scaler.step(run.optimizer, **{name: torch.full((), value, device="cuda:0")})
        assert len(cuda.waits) == 0
        assert run.parameter.tolist() == [1.0 - 0.125 * steps] * 5
        assert run.scaler.last_step(run.optimizer).reason == ("stepped" if value > 0.0 else reason)
