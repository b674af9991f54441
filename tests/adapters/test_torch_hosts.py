"""accelerate with gradscale in the place of torch's scaler: the same steps, skips, schedules and bits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axes import require
from hosts import (
    OVERFLOWS,
    SCALES,
    SKIPS,
    STEPS,
    TRACKERS,
    Make,
    Row,
    batches,
    bits,
    check_weights_move,
    column,
    maker,
    network,
    optimizer_named,
    overflow,
    same_as_torch,
    warns_of_older_gradients,
)

pytestmark = [pytest.mark.torch, pytest.mark.tier("ranks")]

STEPPED = [not skipped for skipped in SKIPS]
BOTH = ["torch", "gradscale"]


@pytest.fixture(params=BOTH)
def make(request: pytest.FixtureRequest) -> Make:
    """Return what makes a scaler: torch's, which shows what the host expects, or ours."""
    return maker(request.param)


def test_a_run_that_differs_in_one_bit_is_not_the_same() -> None:
    def run(make: Make) -> list[Row]:
        model = network()
        if make is here:
            model[0].bias.data[0] *= 1 + 2.0**-23
        return [{"weights": bits(model)}]

    def here() -> None:
        """Stand for a scaler."""

    assert same_as_torch(run, lambda: None)
    with pytest.raises(AssertionError):
        same_as_torch(run, here)
    with pytest.raises(AssertionError):
        check_weights_move(["first", "second"], [False])
    with pytest.raises(AssertionError):
        check_weights_move(["first", "first"], [True])


@pytest.fixture
def accelerate() -> Iterator[Any]:
    """Return accelerate, and forget its global state afterwards."""
    module = require("accelerate")
    yield module
    module.state.AcceleratorState._reset_state(reset_partial_state=True)
    module.state.GradientState._reset_state()


def accelerator_with(scaler: Any, micro_batches: int = 1) -> Any:
    """Return an accelerator for float16 on the CPU, where accelerate makes no scaler by itself."""
    module = require("accelerate")
    module.state.GradientState._reset_state()
    accelerator = module.Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=micro_batches)
    accelerator.native_amp = True
    accelerator.scaler = scaler
    return accelerator


def accelerated(
    make: Make,
    optimizer: str,
    micro_batches: int = 1,
    *,
    clips: bool = True,
    steps: range = range(STEPS),
    folder: Path | None = None,
) -> list[Row]:
    """Train with accelerate, from and to a checkpoint if these are not all steps; return what is known after each."""
    torch = require("torch")
    scaler = make()
    accelerator = accelerator_with(scaler, micro_batches)
    model = network()
    raw = optimizer_named(optimizer, model)
    model, wrapped, schedule = accelerator.prepare(model, raw, torch.optim.lr_scheduler.StepLR(raw, 1, 0.5))
    if steps.start:
        accelerator.load_state(folder)
    rows: list[Row] = []
    for index, images in enumerate(batches(STEPS * micro_batches)):
        if index // micro_batches not in steps:
            continue
        norm = None
        with accelerator.accumulate(model):
            accelerator.backward(model(images).square().mean())
            # In the first micro-batch; the others add to it.
            if index % micro_batches == 0 and index // micro_batches + 1 in OVERFLOWS:
                overflow(model)
            if clips and accelerator.sync_gradients:
                norm = float(accelerator.clip_grad_norm_(model.parameters(), 0.1))
            wrapped.step()
            schedule.step()
            wrapped.zero_grad()
        if accelerator.sync_gradients:
            rows.append(
                {
                    "skipped": wrapped.step_was_skipped,
                    "rate": schedule.get_last_lr()[0],
                    "norm": norm,
                    "scale": scaler.get_scale(),
                    "tracker": scaler._get_growth_tracker(),
                    "weights": bits(model),
                }
            )
            if hasattr(scaler, "last_step"):
                assert scaler.last_step(raw).skipped == SKIPS[index // micro_batches]
    if steps.stop < STEPS:
        accelerator.save_state(folder)
    return rows


@pytest.mark.usefixtures("accelerate")
@pytest.mark.parametrize("micro_batches", [1, 2], ids=["", "accumulating"])
@pytest.mark.parametrize("clips", [True, False], ids=["clipping", ""])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adam-foreach", "Adagrad"])
def test_accelerate_sees_each_skip_and_holds_the_schedule(
    make: Make, optimizer: str, clips: bool, micro_batches: int
) -> None:
    rows = same_as_torch(lambda make: accelerated(make, optimizer, micro_batches, clips=clips), make)
    assert column(rows, "skipped") == SKIPS
    assert column(rows, "scale") == SCALES
    assert column(rows, "tracker") == TRACKERS
    taken = [sum(STEPPED[: step + 1]) for step in range(STEPS)]
    assert column(rows, "rate") == [0.1 * 0.5**steps for steps in taken]
    check_weights_move([bits(network()), *column(rows, "weights")], STEPPED)
    if clips:
        assert [not math.isfinite(norm) for norm in column(rows, "norm")] == SKIPS
        # Of unscaled gradients: scaled ones are hundreds of times larger.
        assert all(0 < norm < 10 for norm, stepped in zip(column(rows, "norm"), STEPPED, strict=True) if stepped)


@pytest.mark.usefixtures("accelerate")
@pytest.mark.parametrize("clips", [True, False], ids=["clipping", ""])
@pytest.mark.parametrize("optimizer", ["AdamW-fused", "SGD-fused"])
def test_accelerate_misses_the_skips_of_fused_optimizers_and_the_report_has_them(
    make: Make, optimizer: str, clips: bool
) -> None:
    # That last_step() tells them, `accelerated` has checked.
    rows = same_as_torch(lambda make: accelerated(make, optimizer, clips=clips), make)
    check_weights_move([bits(network()), *column(rows, "weights")], STEPPED)
    assert column(rows, "scale") == SCALES
    assert column(rows, "skipped") == [False] * STEPS
    assert column(rows, "rate") == [0.1 * 0.5**step for step in range(1, STEPS + 1)]


@pytest.mark.usefixtures("accelerate")
def test_each_of_two_optimizers_in_accelerate_is_an_iteration_of_its_own(make: Make) -> None:
    def run(make: Make) -> list[Row]:
        scaler = make()
        accelerator = accelerator_with(scaler)
        models = network(0), network(1)
        optimizers = [accelerator.prepare(optimizer_named("SGD", model)) for model in models]
        rows = []
        for step, images in enumerate(batches(), start=1):
            for model in models:
                accelerator.backward(model(images).square().mean())
            if step in OVERFLOWS:
                overflow(models[1])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            skipped = [optimizer.step_was_skipped for optimizer in optimizers]
            rows.append({"skipped": skipped, "scale": scaler.get_scale(), "weights": bits(*models)})
        return rows

    with warns_of_older_gradients(make):
        rows = same_as_torch(run, make)
    assert column(rows, "skipped") == [[False, skipped] for skipped in SKIPS]
    # Two updates in each step: it grows every one and a half steps.
    assert column(rows, "scale")[:3] == [1024.0, 2048.0, 1024.0]


@pytest.mark.usefixtures("accelerate")
@pytest.mark.parametrize("load", BOTH)
@pytest.mark.parametrize("save", BOTH)
def test_a_checkpoint_of_accelerate_serves_either_scaler(save: str, load: str, tmp_path: Path) -> None:
    torch = require("torch")
    begin = accelerated(maker(save), "AdamW", steps=range(5), folder=tmp_path)
    saved = torch.load(tmp_path / "scaler.pt", weights_only=True)
    assert saved == {
        "scale": 512.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 3,
        "_growth_tracker": 2,
    }
    end = accelerated(maker(load), "AdamW", steps=range(5, STEPS), folder=tmp_path)
    assert begin + end == accelerated(maker("torch"), "AdamW")


@pytest.mark.usefixtures("accelerate")
def test_a_loaded_scaler_is_made_ready_for_the_step_before_the_first_loss(make: Make) -> None:
    # accelerate loads a sharded optimizer's state by a step of it with gradients of zero, and has the scaler's tensors
    # made before.
    torch = require("torch")
    scaler = make()
    scaler.load_state_dict(make().state_dict() | {"scale": 32.0, "_growth_tracker": 1})
    scaler._lazy_init_scale_growth_tracker(scaler._device)
    for tensor, dtype, value in ((scaler._scale, torch.float32, 32.0), (scaler._growth_tracker, torch.int32, 1)):
        assert (tensor.dtype, tensor.shape, tensor.device.type, tensor.item()) == (dtype, (), "cpu", value)
    model = network()
    optimizer = accelerator_with(scaler).prepare(optimizer_named("AdamW", model))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert len(optimizer.state) == len(list(model.parameters()))
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (32.0, 2)
