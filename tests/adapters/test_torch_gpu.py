"""The torch adapter on a CUDA device: the kernels, torch's results, no sync before a step, captured graphs.

``test_torch_devices`` has the same on stand-ins, without a GPU.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axes import leave_out_gpu
from axes_torch import GradScaler, ShardedGradScaler, StepGuard, TorchScaler, torch
from small_torch import Small

import gradscale
from gradscale.scaler.scaler import iteration_of
from gradscale.testing import check_backend

pytestmark = [pytest.mark.torch, pytest.mark.gpu]


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    """Leave the tests out where there is no CUDA."""
    if not torch.cuda.is_available():
        leave_out_gpu("torch finds no CUDA device")
    yield
    torch.cuda.synchronize()


@pytest.fixture
def without_sync(_device: None) -> Iterator[None]:
    """Make every wait of the host for the device an error."""
    with warnings.catch_warnings():
        # torch calls this mode a prototype, once.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run_on(device: str, scaler: Any, optimizer: str = "AdamW-fused", home: str = "", **options: Any) -> Small:
    """Return a run of two parameters of ones on a device."""
    given = {"size": 5, "start": 1.0, "lr": 0.125, **options}
    return Small(scaler, optimizer, devices=[device] * 2, home=home or device, **given)


def stall(device: str = "cuda") -> None:
    """Keep the current stream of a device busy for some tenths of a second; the host goes on."""
    with torch.cuda.device(device):
        torch.cuda._sleep(1_000_000_000)  # cycles


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_the_adapter_conforms_on_the_device(dtype: str) -> None:
    like = torch.zeros(1, device="cuda")
    check_backend(gradscale.registry.backend_for(like), like, dtypes=[getattr(torch, dtype)])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_quotient_that_overflows_is_found_wherever_it_is(dtype: str) -> None:
    kind, size = getattr(torch, dtype), (1 << 20) + 3
    state = gradscale.StaticScale(0.25).init(torch.zeros((), device="cuda"))
    for place in (None, 0, 1 << 16, size - 1):
        grads = [torch.ones(count, dtype=kind, device="cuda") for count in (5, 0, size)]
        if place is not None:
            grads[2][place] = torch.finfo(kind).max
        _, nonfinite = gradscale.unscale(grads, state, out=grads)
        assert nonfinite.item() == (place is not None)
        assert int((grads[2] == 4.0).sum()) == size - nonfinite.item()


@pytest.mark.parametrize("variant", ["", "-fused"], ids=["foreach", "fused"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_a_run_is_torchs_bit_for_bit(name: str, variant: str) -> None:
    seen = []
    for make in (TorchScaler, GradScaler):
        run, states = run_on("cuda", make("cuda", growth_interval=2), name + variant), []
        for gradient in (1.0, math.inf, 2.0, -1.0, math.nan, 3.0):
            run.iterate(gradient)
            states.append((run.held, run.state))
        seen.append(states)
    assert seen[0] == seen[1]


@pytest.mark.usefixtures("without_sync")
@pytest.mark.parametrize("kind", ["scaler", "guard"])
def test_a_fused_iteration_scaling_unscaling_and_clipping_never_wait(kind: str) -> None:
    scaler, dtype = (GradScaler("cuda"), "float32") if kind == "scaler" else (StepGuard(), "bfloat16")
    run, plain = (run_on("cuda", scaler, name, dtypes=[dtype]) for name in ("AdamW-fused", "SGD"))
    weights = []
    for gradient in (1.0, math.inf, 1.0):
        run.give(gradient)
        run.step(max_norm=1.0)
        weights.append([one.detach().clone() for one in run.parameters])
    plain.put(1.0)
    norm = plain.scaler.unscale_(plain.optimizer, max_norm=1e-6)
    torch.cuda.set_sync_debug_mode("default")
    assert scaler.counts() == {"taken": 2, "overflow": 1, "spike": 0, "refused": 0}
    assert all(map(torch.equal, weights[0], weights[1]))
    assert not any(map(torch.equal, weights[1], weights[2]))
    assert norm.item() == pytest.approx(10**0.5 / scaler.get_scale())


@pytest.mark.parametrize("name", ["SGD", "SGD-fused", "AdamW-fused"])
@pytest.mark.parametrize("options", [{}, {"max_norm": 1.5}], ids=["unclipped", "clipped"])
def test_gradients_of_the_host_wait_for_a_scale_behind_a_stalled_stream(name: str, options: dict[str, float]) -> None:
    # As with FSDP2's CPU offload.
    seen = []
    for home in ("cpu", "cuda"):
        run, states = run_on("cpu", GradScaler(home, init_scale=8.0, growth_interval=2), name, home), []
        for gradient in (1.0, math.inf, -2.0, 0.5, math.nan, 3.0):
            run.give(gradient)
            # Not in the first two iterations, which load the kernels.
            if home == "cuda" and len(states) > 1:
                stall()
            run.step(**options)
            states.append((run.held, run.report.skipped, run.report.scale, run.scaler.get_scale()))
        seen.append(states)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("scale", [1.0, 0.75, 1024.0])
@pytest.mark.parametrize("options", [{}, {"max_norm": 1.5}], ids=["unclipped", "clipped"])
def test_bfloat16_is_unscaled_and_clipped_to_the_cpus_bits(scale: float, options: dict[str, float]) -> None:
    # torch has no kernel for it on CUDA. The squares have an exact sum, in whichever order they are added.
    values, held = torch.arange(128) / 16, []
    for device in ("cpu", "cuda"):
        scaler = GradScaler(device, policy=gradscale.StaticScale(scale))
        run = Small(scaler, devices=[device] * 3, dtypes=["bfloat16"], home=device, size=128)
        run.put(values.to(device, torch.bfloat16))
        run.step(explicit=True, **options)
        held.append([one.grad.float().cpu().tolist() for one in run.parameters])
    assert held[0] == held[1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_gradient_of_more_than_2_31_elements_is_judged_and_clipped_to_its_end(dtype: str) -> None:
    size, room = 2**31 + 17, 40e9
    if torch.cuda.mem_get_info()[0] < room:
        leave_out_gpu(f"less than {room:g} bytes of the device's memory are free")
    parameter = torch.nn.Parameter(torch.zeros(size, dtype=getattr(torch, dtype), device="cuda"))
    guard, optimizer = StepGuard(), torch.optim.SGD([parameter], lr=1.0)
    for last in (math.nan, 1.0):
        parameter.grad = torch.ones_like(parameter)
        parameter.grad[-1] = last
        norm = guard.unscale_(optimizer, max_norm=float(2**15))
        guard.step(optimizer)
        guard.update()
        assert guard.last_step(optimizer).skipped == math.isnan(last)
    assert float(norm) == pytest.approx(math.sqrt(size), rel=1e-3)
    first, last = parameter.detach()[:: size - 1].tolist()
    assert first == last == pytest.approx(-(2**15) / math.sqrt(size), rel=4e-3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("dtype", "value"), [("float16", 1000.0), ("bfloat16", 3e38)])
def test_a_quotient_that_is_stored_as_infinite_is_found_by_compiled_code(dtype: str, value: float) -> None:
    state = gradscale.DynamicScale(init_scale=2.0**-10).init(torch.zeros((), device="cuda"))
    compiled = torch.compile(lambda grads, state: gradscale.unscale(grads, state))
    for largest in (1.0, value, -value):
        grads = [torch.tensor([1.0, largest], dtype=getattr(torch, dtype), device="cuda")]
        (made,), nonfinite = compiled(grads, state)
        assert torch.isinf(made).any() == nonfinite == (largest != 1.0)


def captured_steps(scaler: Any) -> list[tuple[float, int, bool, float]]:
    """Return what each replay of a captured step leaves.

    For gradients of 1, 1, inf and 1: the scale, the growth tracker, and whether the step was skipped at which scale.
    """
    run = run_on("cuda", scaler, capturable=True)
    source = torch.ones(5, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def step() -> None:
        scale = scaler.scale(torch.ones((), device="cuda"))
        for parameter in run.parameters:
            parameter.grad.copy_(source * scale)
        run.step()

    with torch.cuda.stream(stream):
        run.iterate(1.0)
        # So that the verdict of the last step is still on its way.
        stall()
        step()
    torch.cuda.current_stream().wait_stream(stream)
    assert run.state == (8.0, 0)
    graph = torch.cuda.CUDAGraph()
    scaler.scale(source)
    assert iteration_of(scaler).reports.under_way
    with torch.cuda.graph(graph):
        step()
    seen = []
    for value in (1.0, 1.0, math.inf, 1.0):
        source.fill_(value)
        graph.replay()
        seen.append((*run.state, run.report.skipped, run.report.scale))
    return seen


@pytest.mark.parametrize("kind", [GradScaler, ShardedGradScaler], ids=["alone", "over-NCCL"])
def test_a_captured_graph_sees_the_scale_of_each_replay(kind: Any, tmp_path: Path) -> None:
    if not torch.distributed.is_nccl_available():
        pytest.skip("gpu: this build of torch has no NCCL")
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        assert captured_steps(kind("cuda", init_scale=4.0, growth_interval=2)) == [
            *((8.0, 1, False, 8.0), (16.0, 0, False, 8.0), (8.0, 0, True, 16.0), (8.0, 1, False, 8.0))
        ]
    finally:
        torch.cuda.synchronize()
        torch.distributed.destroy_process_group()
