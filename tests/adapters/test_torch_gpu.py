"""The torch adapter on a CUDA device: the kernels, torch's results, no sync before a step, captured graphs.

``test_torch_devices`` has the same on stand-ins, without a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from axes import leave_out_gpu, require

import gradscale
from gradscale.scaler.scaler import iteration_of
from gradscale.testing import check_backend

pytestmark = [pytest.mark.torch, pytest.mark.gpu]


@pytest.fixture
def torch() -> Iterator[Any]:
    """Return torch, on a machine with CUDA."""
    torch = require("torch")
    if not torch.cuda.is_available():
        leave_out_gpu("torch finds no CUDA device")
    yield torch
    torch.cuda.synchronize()


@pytest.fixture
def without_sync(torch: Any) -> Iterator[None]:
    """Make every wait of the host for the device an error."""
    with warnings.catch_warnings():
        # torch calls this mode a prototype, once.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def optimizer_on(torch: Any, name: str, device: str = "cuda", **options: Any) -> Any:
    """Return an optimizer of two parameters of ones on a device."""
    parameters = [torch.nn.Parameter(torch.ones(5, device=device)) for _ in range(2)]
    return getattr(torch.optim, name)(parameters, lr=0.125, **options)


def give(torch: Any, scaler: Any, optimizer: Any, gradient: float, device: str = "cuda") -> None:
    """Scale a loss on a device, and set every gradient to a value times the scale."""
    scaler.scale(torch.ones((), device=device))
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.full((5,), gradient, device=parameter.device) * scaler._scale.to(parameter.device)


def iterate(torch: Any, scaler: Any, optimizer: Any, gradient: float, device: str = "cuda") -> None:
    """Make one iteration."""
    give(torch, scaler, optimizer, gradient, device)
    scaler.step(optimizer)
    scaler.update()


def stall(torch: Any, device: str = "cuda") -> None:
    """Keep the current stream of a device busy for some tenths of a second; the host goes on."""
    with torch.cuda.device(device):
        torch.cuda._sleep(1_000_000_000)  # cycles


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_the_adapter_conforms_on_the_device(torch: Any, dtype: str) -> None:
    like = torch.zeros(1, device="cuda")
    check_backend(gradscale.registry.backend_for(like), like, dtypes=[getattr(torch, dtype)])


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_a_run_is_torchs_bit_for_bit(torch: Any, name: str, fused: bool) -> None:
    from gradscale_torch import GradScaler

    seen = []
    for make in (torch.amp.GradScaler, GradScaler):
        scaler, optimizer = make("cuda", growth_interval=2), optimizer_on(torch, name, fused=fused)
        states = []
        for gradient in (1.0, float("inf"), 2.0, -1.0, float("nan"), 3.0):
            iterate(torch, scaler, optimizer, gradient)
            parameters = [parameter.tolist() for parameter in optimizer.param_groups[0]["params"]]
            states.append((parameters, scaler.get_scale(), scaler._get_growth_tracker()))
        seen.append(states)
    assert seen[0] == seen[1]


@pytest.mark.usefixtures("without_sync")
def test_a_fused_iteration_never_waits_and_the_report_is_right_when_asked_for(torch: Any) -> None:
    from gradscale_torch import GradScaler

    scaler, optimizer = GradScaler("cuda"), optimizer_on(torch, "AdamW", fused=True)
    for gradient in (1.0, float("inf"), 1.0):
        iterate(torch, scaler, optimizer, gradient)
        if gradient != 1.0:
            torch.cuda.set_sync_debug_mode("default")
            assert scaler.last_step(optimizer).skipped
            torch.cuda.set_sync_debug_mode("error")


def test_a_fused_iteration_is_launched_while_the_device_is_busy(torch: Any) -> None:
    from gradscale_torch import GradScaler

    scaler, optimizer = GradScaler("cuda"), optimizer_on(torch, "AdamW", fused=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # Kernels are loaded, and memory is allocated, before the stream is kept busy.
        torch.cuda._sleep(1)
        for _ in range(3):
            iterate(torch, scaler, optimizer, 1.0)
        stream.synchronize()
        stall(torch)
        iterate(torch, scaler, optimizer, float("inf"))
        # A host that had waited would find the stream done.
        assert not stream.query()
        assert scaler.last_step(optimizer).skipped


@pytest.mark.parametrize(
    ("name", "options"),
    [("SGD", {}), ("SGD", {"fused": True, "momentum": 0.5}), ("AdamW", {"fused": True})],
    ids=["SGD", "fused-SGD", "fused-AdamW"],
)
@pytest.mark.parametrize("max_norm", [None, 1.5], ids=["unclipped", "clipped"])
def test_gradients_of_the_host_wait_for_a_scale_behind_a_stalled_stream(
    torch: Any, name: str, options: dict[str, Any], max_norm: float | None
) -> None:
    # As with FSDP2's CPU offload.
    from gradscale_torch import GradScaler

    seen = []
    for home in ("cpu", "cuda"):
        scaler = GradScaler(home, init_scale=8.0, growth_interval=2)
        optimizer = optimizer_on(torch, name, "cpu", **options)
        states = []
        for gradient in (1.0, float("inf"), -2.0, 0.5, float("nan"), 3.0):
            give(torch, scaler, optimizer, gradient, home)
            # Not in the first two iterations, which load the kernels.
            if home == "cuda" and len(states) > 1:
                stall(torch)
            if max_norm is not None:
                scaler.unscale_(optimizer, max_norm=max_norm)
            scaler.step(optimizer)
            scaler.update()
            parameters = [parameter.tolist() for parameter in optimizer.param_groups[0]["params"]]
            report = scaler.last_step(optimizer)
            states.append((parameters, report.skipped, report.scale, scaler.get_scale()))
        seen.append(states)
    assert seen[0] == seen[1]


def test_a_late_verdict_is_waited_for_on_its_own_device(torch: Any) -> None:
    from gradscale_torch import GradScaler

    if torch.cuda.device_count() < 2:
        pytest.skip(f"gpu: torch finds {torch.cuda.device_count()} CUDA device, and 2 are needed")
    # The current device is the other one.
    scaler, optimizer = GradScaler("cuda:1", init_scale=8.0), optimizer_on(torch, "AdamW", "cuda:1", fused=True)
    iterate(torch, scaler, optimizer, 1.0, "cuda:1")
    torch.cuda.synchronize("cuda:1")
    for gradient in (float("inf"), 1.0, float("nan")):
        stall(torch, "cuda:1")
        # The update looks for verdicts that have arrived.
        iterate(torch, scaler, optimizer, gradient, "cuda:1")
    assert [(report.skipped, report.scale) for report in scaler.history] == [
        *((False, 8.0), (True, 8.0), (False, 4.0), (True, 4.0))
    ]


@pytest.mark.usefixtures("without_sync")
def test_scaling_unscaling_and_clipping_never_wait(torch: Any) -> None:
    from gradscale_torch import GradScaler

    scaler, optimizer = GradScaler("cuda"), optimizer_on(torch, "SGD")
    scaler.scale(torch.ones((), device="cuda"))
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones(5, device="cuda")
    norm = scaler.unscale_(optimizer, max_norm=1e-6)
    torch.cuda.set_sync_debug_mode("default")
    assert norm.item() == pytest.approx(10**0.5 / 65536)


def test_gradients_of_the_host_and_of_the_device_make_one_verdict(torch: Any) -> None:
    from gradscale_torch import GradScaler

    for bad in range(2):
        parameters = [torch.nn.Parameter(torch.ones(3, device=device)) for device in ("cuda", "cpu")]
        optimizer, scaler = torch.optim.SGD(parameters), GradScaler("cuda")
        scaler.scale(torch.ones((), device="cuda"))
        for index, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, float("inf") if index == bad else 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step(optimizer).skipped
        assert scaler.get_scale() == 32768.0


def captured_steps(
    torch: Any, scaler: Any, before: Callable[[], object] = lambda: None
) -> list[tuple[float, int, bool, float]]:
    """Return what each replay of a captured step leaves; ``before`` is called just before the capture.

    For gradients of 1, 1, inf and 1: the scale, the growth tracker, and whether the step was skipped at which scale.
    """
    optimizer = optimizer_on(torch, "AdamW", fused=True, capturable=True)
    source = torch.ones(5, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def step() -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.copy_(source * scaler._scale)
        scaler.step(optimizer)
        scaler.update()

    with torch.cuda.stream(stream):
        iterate(torch, scaler, optimizer, 1.0)
        # So that the verdict of the last step is still on its way.
        stall(torch)
        step()
    torch.cuda.current_stream().wait_stream(stream)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (8.0, 0)
    graph = torch.cuda.CUDAGraph()
    scaler.scale(source)
    assert iteration_of(scaler._scaler).reports.under_way
    before()
    with torch.cuda.graph(graph):
        step()
    seen = []
    for value in (1.0, 1.0, float("inf"), 1.0):
        source.fill_(value)
        graph.replay()
        report = scaler.last_step(optimizer)
        seen.append((scaler.get_scale(), scaler._get_growth_tracker(), report.skipped, report.scale))
    return seen


CAPTURED = [(8.0, 1, False, 8.0), (16.0, 0, False, 8.0), (8.0, 0, True, 16.0), (8.0, 1, False, 8.0)]


def test_a_captured_graph_sees_the_scale_of_each_replay(torch: Any) -> None:
    from gradscale_torch import GradScaler

    assert captured_steps(torch, GradScaler("cuda", init_scale=4.0, growth_interval=2)) == CAPTURED


def test_a_captured_graph_agrees_over_nccl(torch: Any, tmp_path: Path) -> None:
    from gradscale_torch import ShardedGradScaler

    if not torch.distributed.is_nccl_available():
        pytest.skip("gpu: this build of torch has no NCCL")
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        scaler = ShardedGradScaler("cuda", init_scale=4.0, growth_interval=2)
        scaler.scale(torch.ones((), device="cuda"))
        (collectives,) = iteration_of(scaler._scaler).agreement.groups
        pending = []

        def begin_many() -> None:
            # More than are kept without a question whether they are done.
            x = torch.zeros(22, dtype=torch.int32, device="cuda")
            stall(torch)
            pending.extend(collectives.start_max(x) for _ in range(12))

        assert captured_steps(torch, scaler, begin_many) == CAPTURED
        assert [one().sum().item() for one in pending] == [0] * 12
    finally:
        torch.cuda.synchronize()
        torch.distributed.destroy_process_group()


def test_a_step_that_the_host_has_to_read_is_refused_in_a_graph(torch: Any) -> None:
    from gradscale_torch import GradScaler

    scaler, optimizer = GradScaler("cuda", init_scale=4.0), optimizer_on(torch, "AdamW", capturable=True)
    iterate(torch, scaler, optimizer, 1.0)
    give(torch, scaler, optimizer, 1.0)
    counter = torch.zeros((), device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        counter.add_(1)
        with pytest.raises(gradscale.CallOrderError, match="being captured"):
            scaler.step(optimizer)
    scaler.step(optimizer)
    assert not scaler.last_step(optimizer).skipped
