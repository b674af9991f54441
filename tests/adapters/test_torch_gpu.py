"""The torch adapter on a CUDA device: the kernels, torch's results, no sync before a step, captured graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from axes import leave_out_gpu, require

import gradscale
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
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def optimizer_on(torch: Any, name: str, **options: Any) -> Any:
    """Return an optimizer of two parameters of ones on the device."""
    parameters = [torch.nn.Parameter(torch.ones(5, device="cuda")) for _ in range(2)]
    return getattr(torch.optim, name)(parameters, lr=0.125, **options)


def iterate(torch: Any, scaler: Any, optimizer: Any, gradient: float) -> None:
    """Make one iteration with every gradient set to a value times the scale."""
    scaler.scale(torch.ones((), device="cuda"))
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.full((5,), gradient, device="cuda") * scaler._scale
    scaler.step(optimizer)
    scaler.update()


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


def test_a_captured_graph_sees_the_scale_of_each_replay(torch: Any) -> None:
    from gradscale_torch import GradScaler

    scaler = GradScaler("cuda", init_scale=4.0, growth_interval=2)
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
        step()
    torch.cuda.current_stream().wait_stream(stream)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (8.0, 0)
    graph = torch.cuda.CUDAGraph()
    scaler.scale(source)
    with torch.cuda.graph(graph):
        step()
    scales = []
    for value in (1.0, 1.0, float("inf"), 1.0):
        source.fill_(value)
        graph.replay()
        scales.append((scaler.get_scale(), scaler._get_growth_tracker()))
    assert scales == [(8.0, 1), (16.0, 0), (8.0, 0), (8.0, 1)]
