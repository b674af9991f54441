"""The torch adapter on devices that are slower than the host: when it waits, for which device, and captured graphs.

The devices are stand-ins (``host_cuda``): a value that the host uses before it has arrived is garbage, and what CUDA
refuses while a graph is captured is refused.
"""

from __future__ import annotations

import copy
import math
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from axes import require

import gradscale
from gradscale.scaler.scaler import iteration_of

pytestmark = pytest.mark.torch

GRADIENTS = (1.0, -2.0, math.inf, 0.5, math.nan, 3.0)


@pytest.fixture
def cuda() -> Iterator[Any]:
    """Return the stand-in for two CUDA devices."""
    require("torch")
    from host_cuda import installed

    with installed() as cuda:
        yield cuda


@pytest.fixture
def torch(cuda: Any) -> Any:  # noqa: ARG001
    """Return torch, with these devices."""
    return require("torch")


class Group:
    """A group of one rank whose collectives stay on the device; its stream orders them."""

    rank, size = 0, 1

    def start_max(self, x: Any) -> Callable[[], Any]:
        return lambda: x.clone()


def groups_in_use(torch: Any, count: int, kind: Callable[[], Any] = Group) -> list[Any] | None:
    """Return groups over which there was a message before, or None for none: the first one makes the host wait."""
    from gradscale_torch import GradScaler

    groups = [kind() for _ in range(count)]
    if groups:
        scaler, optimizer = GradScaler("cpu", group=groups), optimizer_on(torch, "SGD", "cpu")
        give(torch, scaler, optimizer, 1.0, "cpu")
        scaler.step(optimizer)
    return groups or None


class ProcessGroup:
    """What looks to the adapter like one of torch's groups, of one rank; NCCL's events cannot always be asked for."""

    bound_device_id = None

    def __init__(self, cuda: Any) -> None:
        self.works = self.aborts = 0
        self.is_lost = False
        self._cuda = cuda

    def abort(self) -> None:
        self.aborts += 1

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def allreduce(self, tensors: Any, options: Any) -> Any:  # noqa: ARG002
        cuda = self._cuda
        self.works += 1
        is_captured, is_lost = cuda.graph is not None, self.is_lost

        class Work:
            def wait(self, timeout: Any = None) -> None:
                """Do nothing: on a device, the stream waits."""

            def is_completed(self) -> bool:
                cuda.refuse_capture()
                assert not is_captured, "an event of a graph is no event outside of it"
                return not is_lost

        return Work()


def optimizer_on(torch: Any, name: str, *devices: str, dtype: str = "float32", **options: Any) -> Any:
    """Return an optimizer of a parameter of ones on each of some devices."""
    ones = [torch.ones(5, dtype=getattr(torch, dtype), device=device) for device in devices]
    parameters = [torch.nn.Parameter(values, requires_grad=False) for values in ones]
    return getattr(torch.optim, name)(parameters, lr=0.125, **options)


def give(torch: Any, scaler: Any, optimizer: Any, gradient: float, device: str) -> None:
    """Scale a loss on a device, and set all gradients to a value times the scale, or to one that is not finite."""
    scaler.scale(torch.ones((), device=device))
    for parameter in optimizer.param_groups[0]["params"]:
        scale = scaler._scale.to(parameter.device)
        parameter.grad = (torch.full((5,), gradient, device=parameter.device) * scale).to(parameter.dtype)


def held(optimizer: Any) -> list[list[float]]:
    """Return what the parameters hold."""
    from host_cuda import on_host

    return [on_host(parameter).tolist() for parameter in optimizer.param_groups[0]["params"]]


# Values that come to the host.

OPTIMIZERS = {
    "SGD": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.5}),
    "fused-momentum": ("SGD", {"momentum": 0.5, "fused": True}),
    "fused-AdamW": ("AdamW", {"fused": True}),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scale", [8.0, pytest.param(0.5, marks=pytest.mark.tier("ranks"))])
@pytest.mark.parametrize(("way", "groups"), [("step", 0), ("step", 1), ("unscale_", 0), ("unscale_", 1), ("clip", 0)])
def test_gradients_of_the_host_follow_a_loss_on_a_device(
    torch: Any, optimizer: str, scale: float, way: str, groups: int
) -> None:
    # As with FSDP2's CPU offload.
    from gradscale_torch import GradScaler

    name, options = OPTIMIZERS[optimizer]
    seen = []
    for home in ("cpu", "cuda"):
        scaler = GradScaler(home, init_scale=scale, growth_interval=2, group=[Group() for _ in range(groups)] or None)
        stepped = optimizer_on(torch, name, "cpu", "cpu", **options)
        states = []
        # The first step of an optimizer with momentum is a skipped one, too.
        for gradient in (math.inf, *GRADIENTS):
            give(torch, scaler, stepped, gradient, home)
            if way != "step":
                norm = scaler.unscale_(stepped, max_norm=1.5 if way == "clip" else None)
                states.append(str(norm.item()) if norm is not None else None)
            scaler.step(stepped)
            scaler.update()
            report = scaler.last_step(stepped)
            states.append((held(stepped), report.skipped, report.scale, scaler.get_scale()))
        seen.append(states)
    assert seen[0] == seen[1]


def told(scaler: Any, optimizer: Any) -> tuple[Any, ...]:
    """Return what a step has left."""
    report = scaler.last_step(optimizer)
    return held(optimizer), report.skipped, report.scale, scaler.get_scale(), scaler.state_dict()


def run_of(dtype: str, name: str, options: dict[str, Any], settings: dict[str, Any]) -> Callable[..., list[Any]]:
    """Return a run whose gradients are of a dtype, of an optimizer, of a scaler with some settings."""

    def run(torch: Any, home: str, devices: tuple[str, str]) -> list[Any]:
        from gradscale_torch import GradScaler

        scaler = GradScaler(home, **settings)
        optimizer = optimizer_on(torch, name, *devices, dtype=dtype, **options)
        seen = []
        for gradient in GRADIENTS:
            give(torch, scaler, optimizer, gradient, home)
            scaler.step(optimizer)
            scaler.update()
            seen.append(told(scaler, optimizer))
        return [*seen, copy.deepcopy(scaler).state_dict(), pickle.loads(pickle.dumps(scaler)).state_dict()]

    return run


def run_of_two(torch: Any, home: str, devices: tuple[str, str]) -> list[Any]:
    from gradscale_torch import GradScaler

    scaler, seen = GradScaler(home, init_scale=8.0), []
    plain, fused = optimizer_on(torch, "SGD", *devices), optimizer_on(torch, "AdamW", *devices, fused=True)
    for gradient in GRADIENTS:
        give(torch, scaler, plain, 1.0, home)
        give(torch, scaler, fused, gradient, home)
        scaler.unscale_(plain)
        scaler.step(fused)
        scaler.step(plain)
        scaler.update()
        seen.append((told(scaler, plain), told(scaler, fused)))
    return seen


def run_of_a_closure(torch: Any, home: str, devices: tuple[str, str]) -> list[Any]:
    from gradscale_torch import GradScaler

    scaler, optimizer = GradScaler(home, init_scale=2.0**20), optimizer_on(torch, "SGD", *devices)

    def closure() -> Any:
        loss = scaler.scale(torch.full((), 1e34, device=home))
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.full((5,), 1.0, device=parameter.device) * loss.to(parameter.device)
        return loss

    scaler.step(optimizer, closure)
    scaler.update()
    return [told(scaler, optimizer), scaler.last_step(optimizer).retries]


def run_that_is_told(torch: Any, home: str, devices: tuple[str, str]) -> list[Any]:
    from gradscale_torch import GradScaler

    updates: list[Any] = []
    skips: list[Any] = []
    scaler = GradScaler(home, init_scale=8.0, on_skip=skips.append, on_update=updates.append, diagnose="on_overflow")
    optimizer = optimizer_on(torch, "AdamW", *devices, fused=True)
    for gradient in GRADIENTS:
        give(torch, scaler, optimizer, gradient, home)
        scaler.step(optimizer)
        scaler.update()
    numbers = [(update.iteration, update.scale, update.skipped, update.new_scale) for update in updates]
    return [numbers, [(skip.scale, skip.overflow) for skip in skips], scaler.diagnose(optimizer)]


RUNS = {
    "float64": run_of("float64", "SGD", {}, {}),
    "bfloat16": run_of("bfloat16", "SGD", {}, {}),
    "float16": run_of("float16", "SGD", {}, {"allow_fp16_grads": True, "init_scale": 4.0}),
    "complex64": run_of("complex64", "SGD", {}, {}),
    "tolerance": run_of("float32", "SGD", {}, {"policy": gradscale.DynamicScale(init_scale=8.0, tolerance=0.3)}),
    "static": run_of("float32", "AdamW", {"fused": True}, {"policy": gradscale.StaticScale(8.0)}),
    "two": run_of_two,
    "closure": run_of_a_closure,
    "told": run_that_is_told,
}


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("home", "devices"),
    [("cuda:0", ("cuda:1", "cuda:0")), ("cuda:1", ("cpu", "cuda:0")), ("cuda:1", ("cpu", "cpu"))],
    ids=["other-devices", "host-and-device", "host"],
)
def test_a_run_is_the_same_wherever_its_loss_and_its_gradients_are(
    torch: Any, run: str, home: str, devices: tuple[str, str]
) -> None:
    assert repr(RUNS[run](torch, home, devices)) == repr(RUNS[run](torch, "cpu", ("cpu", "cpu")))


def test_a_loss_of_the_host_is_multiplied_by_the_scale_of_a_device(torch: Any) -> None:
    from gradscale_torch import GradScaler

    scaler = GradScaler("cuda", init_scale=8.0)
    losses = scaler.scale([torch.ones((), device=device) for device in ("cuda:1", "cpu", "cuda:0")])
    assert [str(loss.device) for loss in losses] == ["cuda:1", "cpu", "cuda:0"]
    assert [loss.item() for loss in losses] == [8.0] * 3


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_gradients_on_several_devices_make_one_verdict_that_frameworks_may_look_at(torch: Any, bad: int) -> None:
    from gradscale_torch import GradScaler

    scaler, optimizer = (
        GradScaler("cuda", init_scale=8.0, group=Group()),
        optimizer_on(torch, "SGD", "cuda:0", "cpu", "cuda:1"),
    )
    give(torch, scaler, optimizer, 1.0, "cuda:0")
    optimizer.param_groups[0]["params"][bad].grad.fill_(math.nan)
    scaler.unscale_(optimizer)
    shown = scaler._found_inf_per_device(optimizer)
    assert {str(device): flag.item() for device, flag in shown.items()} == {"cuda:0": 1, "cpu": 1, "cuda:1": 1}
    scaler.step(optimizer)
    assert held(optimizer) == [[1.0] * 5] * 3


def test_gradients_that_are_not_scaled_are_clipped_on_all_devices(torch: Any) -> None:
    from gradscale_torch import GradScaler

    for devices in (("cuda:0", "cpu"), ("cpu", "cuda:1")):
        optimizer = optimizer_on(torch, "SGD", *devices)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.full((5,), 4.0, device=parameter.device)
        norm = GradScaler("cuda", enabled=False).unscale_(optimizer, max_norm=1.0)
        assert norm.item() == pytest.approx(160**0.5)
        for parameter in optimizer.param_groups[0]["params"]:
            assert parameter.grad.tolist() == pytest.approx([160**-0.5 * 4.0] * 5, rel=1e-5)


def test_large_gradients_of_the_host_have_a_norm_on_a_device(torch: Any) -> None:
    from gradscale_torch import GradScaler

    scaler, optimizer = GradScaler("cuda", init_scale=2.0**70), optimizer_on(torch, "SGD", "cpu", "cpu")
    give(torch, scaler, optimizer, 1.0, "cuda")
    # The squares of what is scaled are beyond float32.
    assert scaler.unscale_(optimizer, max_norm=1.0).item() == pytest.approx(10**0.5)
    scaler.step(optimizer)
    assert not scaler.last_step(optimizer).skipped


def test_the_functions_bring_a_scale_to_the_host_and_to_devices(torch: Any) -> None:
    state = gradscale.DynamicScale(init_scale=4.0).init(torch.zeros((), device="cuda"))
    grads = [torch.full((2,), 8.0, device=device) for device in ("cpu", "cuda:1", "cuda:0")]
    _, nonfinite = gradscale.unscale(grads, state, out=grads)
    assert [grad.tolist() for grad in grads] == [[2.0, 2.0]] * 3
    assert (nonfinite.item(), str(nonfinite.device)) == (0, "cuda:0")
    assert gradscale.scale(torch.ones(2), state).tolist() == [4.0, 4.0]


def test_a_rank_without_a_loss_has_its_state_where_the_others_have_theirs(torch: Any) -> None:
    # Such as a stage of a pipeline, with FSDP2's CPU offload: its messages must go over NCCL, too.
    from gradscale_torch import GradScaler

    scaler, optimizer = GradScaler("cuda", init_scale=8.0, group=Group()), optimizer_on(torch, "SGD", "cpu")
    optimizer.param_groups[0]["params"][0].grad = torch.full((5,), 8.0)
    scaler.step(optimizer)
    scaler.update()
    assert held(optimizer) == [[0.875] * 5]
    assert str(scaler._scale.device) == "cuda:0"


@pytest.mark.parametrize("dtype", ["float64", pytest.param("bfloat16", marks=pytest.mark.tier("ranks"))])
@pytest.mark.parametrize("form", ["numbers", "tensors", "device"])
@pytest.mark.parametrize(("name", "options"), [("SGD", {}), ("AdamW", {"fused": True})], ids=["SGD", "fused-AdamW"])
def test_the_users_default_device_and_dtype_are_not_the_scalers(
    torch: Any, cuda: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, form: str, name: str, options: dict[str, Any]
) -> None:
    from gradscale_torch import GradScaler, groups

    monkeypatch.setattr(groups, "carriers", lambda _: {"cpu": "gloo"})
    home = "cuda" if form == "device" else "cpu"
    seen = []
    before = torch.get_default_dtype()
    for chosen in (before, getattr(torch, dtype)):
        scaler = GradScaler(home, init_scale=0.5, growth_interval=2, group=ProcessGroup(cuda))
        optimizer = optimizer_on(torch, name, home, "cpu", **options)
        loss, states = torch.ones((), device=home), []
        for gradient in GRADIENTS:
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = torch.full((5,), gradient, device=parameter.device)
            try:
                torch.set_default_dtype(chosen)
                with torch.device("cpu" if chosen is before else "meta"):
                    scaler.scale(loss)
                    if form == "tensors":
                        assert scaler._scale.dtype == torch.float32
                    scaler.step(optimizer)
                    scaler.update()
                    states.append((scaler.last_step(optimizer), scaler.get_scale(), scaler.diagnose(optimizer)))
            finally:
                torch.set_default_dtype(before)
            states.append(held(optimizer))
        seen.append(states)
    assert seen[0] == seen[1]


# Waits.

POLICIES = [
    gradscale.DynamicScale(init_scale=4.0, growth_interval=2),
    gradscale.DynamicScale(init_scale=4.0, hysteresis=2, growth_after="interval_plus_one"),
    gradscale.StaticScale(4.0),
]


@pytest.mark.parametrize("policy", POLICIES, ids=["torch's", "hysteresis", "static"])
@pytest.mark.parametrize(("way", "groups"), [("step", 0), ("step", 1), ("step", 2), ("unscale_", 1), ("clip", 0)])
def test_an_iteration_with_a_fused_optimizer_waits_for_nothing(
    torch: Any, cuda: Any, policy: Any, groups: int, way: str
) -> None:
    from gradscale_torch import GradScaler

    scaler = GradScaler("cuda", policy=policy, group=groups_in_use(torch, groups))
    optimizer = optimizer_on(torch, "AdamW", "cuda:0", "cuda:1", fused=True)
    for gradient in GRADIENTS:
        give(torch, scaler, optimizer, gradient, "cuda")
        if way != "step":
            scaler.unscale_(optimizer, max_norm=1.0 if way == "clip" else None)
        scaler.step(optimizer)
        scaler.update()
    assert cuda.waits == []
    assert [report.skipped for report in scaler.history] == [not math.isfinite(gradient) for gradient in GRADIENTS]


@pytest.mark.parametrize("groups", [0, 1, 2])
def test_a_step_waits_once(torch: Any, cuda: Any, groups: int) -> None:
    from gradscale_torch import GradScaler

    scaler = GradScaler("cuda", group=groups_in_use(torch, groups))
    optimizer = optimizer_on(torch, "SGD", "cuda:0", "cuda:1")
    for gradient in GRADIENTS:
        give(torch, scaler, optimizer, gradient, "cuda")
        scaler.unscale_(optimizer)
        assert cuda.waits == []
        scaler.step(optimizer)
        assert len(cuda.waits) == 1
        scaler.update()
        assert len(cuda.waits) == 1
        cuda.waits.clear()


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("home", [0, 1])
def test_a_late_verdict_is_waited_for_on_its_own_device(torch: Any, cuda: Any, current: int, home: int) -> None:
    from gradscale_torch import GradScaler

    cuda.current = current
    device = f"cuda:{home}"
    scaler, optimizer = GradScaler(device, init_scale=8.0), optimizer_on(torch, "AdamW", device, fused=True)
    for gradient in GRADIENTS:
        give(torch, scaler, optimizer, gradient, device)
        scaler.step(optimizer)
        # Looks for verdicts that have arrived. On another current device, nothing was done that is to be waited for.
        scaler.update()
    assert [report.skipped for report in scaler.history] == [not math.isfinite(gradient) for gradient in GRADIENTS]
    assert [report.scale for report in scaler.history] == [8.0, 8.0, 8.0, 4.0, 4.0, 2.0]


def test_what_a_host_assigns_as_the_scale_goes_where_the_state_is(torch: Any) -> None:
    from gradscale_torch import GradScaler

    scaler, optimizer = GradScaler("cuda", growth_interval=1), optimizer_on(torch, "SGD", "cuda")
    for scale in (65536.0, 16.0):
        give(torch, scaler, optimizer, 1.0, "cuda")
        assert scaler._scale.item() == scale
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0 * scale
        scaler._scale = torch.tensor(16.0)
    assert held(optimizer) == [[0.75] * 5]
    mine = torch.full((), 2.0, device="cuda")
    scaler._scale = mine
    assert scaler._scale is mine


# Ranks that never come.


def plain(torch: Any, group: Any) -> tuple[Any, Callable[[], Any]]:
    from gradscale_torch import GradScaler

    scaler, optimizer = GradScaler("cuda", group=group, timeout=0.2), optimizer_on(torch, "SGD", "cuda")

    def iterate() -> None:
        give(torch, scaler, optimizer, 1.0, "cuda")
        scaler.step(optimizer)
        scaler.update()

    return scaler, iterate


def fused(torch: Any, group: Any) -> tuple[Any, Callable[[], Any]]:
    from gradscale_torch import GradScaler

    scaler, optimizer = GradScaler("cuda", group=group, timeout=0.2), optimizer_on(torch, "SGD", "cuda", fused=True)

    def iterate() -> Any:
        give(torch, scaler, optimizer, 1.0, "cuda")
        scaler.step(optimizer)
        scaler.update()
        return scaler.last_step(optimizer).skipped

    return scaler, iterate


@pytest.mark.parametrize("calls", [plain, fused], ids=["plain", "fused"])
@pytest.mark.parametrize("before", [0, 1], ids=["first-message", "second"])
def test_a_rank_that_never_comes_over_nccl_is_a_timeout_that_aborts_the_group(
    torch: Any, cuda: Any, monkeypatch: pytest.MonkeyPatch, calls: Callable[..., Any], before: int
) -> None:
    from gradscale_torch import groups

    monkeypatch.setattr(groups, "carriers", lambda _: {"cuda": "nccl"})
    group = ProcessGroup(cuda)
    scaler, iterate = calls(torch, group)
    for _ in range(before):
        assert not iterate()
    group.is_lost = True
    with pytest.raises(gradscale.CollectiveTimeoutError, match=r"rank 0 of 1 waited 0\.2 s"):
        iterate()
    assert group.aborts == 1
    with pytest.raises((gradscale.CollectiveTimeoutError, gradscale.BackendError)):
        iterate()
    with pytest.raises(gradscale.BackendError, match="given up"):
        scaler.set_group(group)
    scaler.set_group(ProcessGroup(cuda))
    assert not iterate()
    assert group.aborts == 1


def test_an_abort_that_hangs_or_fails_does_not_hide_the_timeout(
    torch: Any, cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradscale_torch import collectives, groups

    def fail() -> None:
        msg = "no such communicator"
        raise RuntimeError(msg)

    monkeypatch.setattr(groups, "carriers", lambda _: {"cuda": "nccl"})
    monkeypatch.setattr(collectives, "_ABORTING", 0.05)
    for abort, note in ((lambda: time.sleep(1.0), "not aborted within 0.05 s"), (fail, "no such communicator")):
        group = ProcessGroup(cuda)
        group.is_lost, group.abort = True, abort
        with pytest.raises(gradscale.CollectiveTimeoutError) as raised:
            plain(torch, group)[1]()
        assert note in raised.value.__notes__[0]


# Captured graphs.


def captured(torch: Any, cuda: Any, scaler: Any, optimizer: Any) -> tuple[Any, Any]:
    """Return a graph of a step and an update, and the tensor that its gradients are made from."""
    source = torch.ones(5, device="cuda")
    scaler.scale(source)
    with cuda.capture() as graph:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.copy_(source * scaler._scale)
        scaler.step(optimizer)
        scaler.update()
    return graph, source


@pytest.mark.parametrize("groups", [0, 1, 2])
def test_a_graph_is_captured_while_verdicts_are_on_their_way(torch: Any, cuda: Any, groups: int) -> None:
    from gradscale_torch import GradScaler

    scaler = GradScaler("cuda", init_scale=4.0, growth_interval=2, group=[Group() for _ in range(groups)] or None)
    optimizer = optimizer_on(torch, "AdamW", "cuda", fused=True, capturable=True)
    for gradient in (1.0, math.inf, 1.0, 1.0):
        give(torch, scaler, optimizer, gradient, "cuda")
        scaler.step(optimizer)
        scaler.update()
    assert cuda.under_way(0) == 4
    graph, source = captured(torch, cuda, scaler, optimizer)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (4.0, 0)
    seen = []
    for value in (1.0, 1.0, math.inf, 1.0):
        source.fill_(value)
        graph.replay()
        report = scaler.last_step(optimizer)
        seen.append((scaler.get_scale(), scaler._get_growth_tracker(), report.skipped, report.scale))
    assert seen == [(4.0, 1, False, 4.0), (8.0, 0, False, 4.0), (4.0, 0, True, 8.0), (4.0, 1, False, 4.0)]
    # Those before the capture are all there.
    assert [report.skipped for report in scaler.history] == [False, True, False, False]


def test_replays_of_a_loss_that_is_scaled_in_a_graph_are_not_warned_of(torch: Any, cuda: Any) -> None:
    from gradscale_torch import GradScaler

    scaler, optimizer = GradScaler("cuda", init_scale=4.0), optimizer_on(torch, "SGD", "cuda")
    give(torch, scaler, optimizer, 1.0, "cuda")
    source, (parameter,) = torch.ones(5, device="cuda"), optimizer.param_groups[0]["params"]
    with cuda.capture() as graph:
        parameter.grad.copy_(scaler.scale(source))
    for _ in range(2):
        graph.replay()
        scaler.step(optimizer)
        scaler.update()
    assert held(optimizer) == [[0.75] * 5]


def test_after_replays_the_scale_may_be_below_one(torch: Any, cuda: Any) -> None:
    from gradscale_torch import GradScaler

    scaler = GradScaler("cuda", init_scale=4.0, backoff_factor=0.25)
    optimizer = optimizer_on(torch, "AdamW", "cuda", fused=True, capturable=True)
    give(torch, scaler, optimizer, 1.0, "cuda")
    scaler.step(optimizer)
    scaler.update()
    graph, source = captured(torch, cuda, scaler, optimizer)
    source.fill_(math.inf)
    for _ in range(2):
        graph.replay()
    assert scaler.get_scale() == 0.25
    before = held(optimizer)
    scaler.scale(source)
    # Finite, until they are divided by the scale.
    optimizer.param_groups[0]["params"][0].grad = torch.full((5,), 2e38, device="cuda")
    scaler.step(optimizer)
    scaler.update()
    assert held(optimizer) == before
    assert (scaler.last_step(optimizer).skipped, scaler.get_scale()) == (True, 0.0625)


def test_repr_waits_for_no_device(torch: Any, cuda: Any) -> None:
    from gradscale_torch import GradScaler

    scaler = GradScaler("cuda")
    assert "), scale=65536.0, " in repr(scaler)
    scaler.scale(torch.ones((), device="cuda"))
    assert "), scale=<on cuda:0>, " in repr(scaler)
    assert cuda.waits == []


@pytest.mark.parametrize("way", ["take", "field"])
def test_a_scale_that_was_replaced_may_be_below_one(torch: Any, cuda: Any, way: str) -> None:
    from gradscale_torch import GradScaler

    scaler, optimizer = GradScaler("cuda", init_scale=2.0), optimizer_on(torch, "AdamW", "cuda", fused=True)
    give(torch, scaler, optimizer, 1.0, "cuda")
    if way == "field":
        scaler.step(optimizer)
        scaler.update()
        scaler._scale = torch.full((), 0.25, device="cuda")
    else:
        kept = scaler._scale

        # It overflows at scales of 2, 1 and 0.5.
        gradients = iter([math.inf, math.inf, math.inf, 1.0])
        scaler.step(optimizer, lambda: give(torch, scaler, optimizer, next(gradients), "cuda"))
        scaler.update()
        # A captured graph holds it.
        assert scaler._scale is kept
    assert scaler.get_scale() == 0.25
    cuda.finish(0)
    before = held(optimizer)
    scaler.scale(torch.ones((), device="cuda"))
    # Finite, until they are divided by the scale.
    optimizer.param_groups[0]["params"][0].grad = torch.full((5,), 3e38, device="cuda")
    scaler.step(optimizer)
    scaler.update()
    assert (held(optimizer), scaler.last_step(optimizer).skipped) == (before, True)


@pytest.mark.parametrize("way", ["update", "load_state_dict"])
def test_a_verdict_that_comes_late_says_nothing_of_a_scale_that_was_set_since(torch: Any, cuda: Any, way: str) -> None:
    from gradscale_torch import GradScaler

    scaler, optimizer = GradScaler("cuda"), optimizer_on(torch, "AdamW", "cuda", fused=True)
    give(torch, scaler, optimizer, 1.0, "cuda")
    scaler.step(optimizer)
    if way == "update":
        scaler.update(0.25)
    else:
        scaler.update()
        scaler.load_state_dict({**scaler.state_dict(), "scale": 0.25})
    cuda.finish(0)
    before = held(optimizer)
    scaler.scale(torch.ones((), device="cuda"))
    # Finite, until they are divided by the scale.
    optimizer.param_groups[0]["params"][0].grad = torch.full((5,), 2e38, device="cuda")
    scaler.step(optimizer)
    scaler.update()
    assert (held(optimizer), scaler.last_step(optimizer).skipped) == (before, True)


def test_nothing_is_asked_of_earlier_collectives_while_a_graph_is_captured(
    torch: Any, cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradscale_torch import GradScaler, groups

    monkeypatch.setattr(groups, "carriers", lambda _: {"cuda": "nccl"})
    group = ProcessGroup(cuda)
    scaler = GradScaler("cuda", init_scale=4.0, growth_interval=2, group=group)
    (collectives,) = iteration_of(scaler._scaler).agreement.groups
    for _ in range(12):
        collectives.start_max(torch.zeros(22, dtype=torch.int32, device="cuda"))
    optimizer = optimizer_on(torch, "AdamW", "cuda", fused=True, capturable=True)
    give(torch, scaler, optimizer, 1.0, "cuda")
    scaler.step(optimizer)
    scaler.update()
    # For the greeting, which goes over a group once.
    cuda.waits.clear()
    graph, source = captured(torch, cuda, scaler, optimizer)
    # Nor of those in it afterwards.
    for _ in range(12):
        collectives.start_max(torch.zeros(22, dtype=torch.int32, device="cuda"))
    assert group.works == 27
    assert cuda.waits == []
    for value, scale in ((1.0, 8.0), (math.inf, 4.0)):
        source.fill_(value)
        graph.replay()
        assert scaler.get_scale() == scale


def first_scale(torch: Any, scaler: Any, optimizer: Any) -> None:  # noqa: ARG001
    scaler.scale(torch.ones((), device="cuda"))


def loss_of_the_host(torch: Any, scaler: Any, optimizer: Any) -> None:  # noqa: ARG001
    scaler.scale(torch.ones(()))


def plain_step(torch: Any, scaler: Any, optimizer: Any) -> None:  # noqa: ARG001
    scaler.step(optimizer)


def late_step(torch: Any, scaler: Any, optimizer: Any) -> None:  # noqa: ARG001
    scaler.last_step(optimizer)


@pytest.mark.parametrize("what", [first_scale, loss_of_the_host, plain_step, late_step])
def test_what_needs_the_host_is_refused_in_a_graph(torch: Any, cuda: Any, what: Callable[..., None]) -> None:
    from gradscale_torch import GradScaler

    scaler = GradScaler("cuda", init_scale=4.0)
    optimizer = optimizer_on(torch, "AdamW", "cuda", fused=what is late_step)
    if what is not first_scale:
        give(torch, scaler, optimizer, 1.0, "cuda")
    if what is late_step:
        scaler.step(optimizer)
    with cuda.capture(), pytest.raises(gradscale.CallOrderError, match="graph of cuda:0 is being captured"):
        what(torch, scaler, optimizer)
    # Nothing is lost.
    if what is first_scale:
        give(torch, scaler, optimizer, 1.0, "cuda")
    if what is not late_step:
        scaler.step(optimizer)
    assert not scaler.last_step(optimizer).skipped


def test_the_first_message_over_a_group_is_refused_in_a_graph(torch: Any, cuda: Any) -> None:
    from gradscale_torch import GradScaler

    scaler = GradScaler("cuda", group=Group())
    optimizer = optimizer_on(torch, "AdamW", "cuda", fused=True, capturable=True)
    give(torch, scaler, optimizer, 1.0, "cuda")
    with cuda.capture(), pytest.raises(gradscale.CallOrderError, match="step once before the capture"):
        scaler.step(optimizer)


def test_a_group_of_the_host_is_refused_in_a_graph(torch: Any, cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradscale_torch import GradScaler, groups

    monkeypatch.setattr(groups, "carriers", lambda _: {"cpu": "gloo"})
    group = groups_in_use(torch, 1, lambda: ProcessGroup(cuda))
    scaler, optimizer = GradScaler("cuda", group=group), optimizer_on(torch, "SGD", "cuda")
    give(torch, scaler, optimizer, 1.0, "cuda")
    with cuda.capture(), pytest.raises(gradscale.CallOrderError, match="agree over a group of this device"):
        scaler.unscale_(optimizer)


# Scales that no policy makes.


@pytest.mark.parametrize("scale", [math.inf, math.nan, 0.0, -4.0])
@pytest.mark.parametrize("home", ["cpu", "cuda"])
@pytest.mark.parametrize("groups", [0, 1])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_scale_that_no_policy_makes_is_told_where_a_step_reads_it(
    torch: Any, cuda: Any, scale: float, home: str, groups: int, fused: bool
) -> None:
    from gradscale_torch import GradScaler

    scaler = GradScaler(home, init_scale=8.0, group=groups_in_use(torch, groups))
    optimizer = optimizer_on(torch, "SGD", home, fused=fused)
    give(torch, scaler, optimizer, 1.0, home)
    saved = scaler.state_dict()
    scaler._scale.fill_(scale)
    cuda.waits.clear()
    reads = scaler.step
    if fused and home == "cuda":
        # What a device judges is read when somebody asks.
        scaler.step(optimizer)
        scaler.update()
        reads = scaler.last_step
    with pytest.raises(gradscale.BackendError, match=r"scale that no policy makes, got scale=.*load_state_dict"):
        reads(optimizer)
    assert len(cuda.waits) <= 1
    scaler.load_state_dict(saved)
    give(torch, scaler, optimizer, 1.0, home)
    scaler.step(optimizer)
    assert (scaler.last_step(optimizer).skipped, scaler.last_step(optimizer).scale) == (False, 8.0)
