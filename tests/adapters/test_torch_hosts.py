"""accelerate, and optimizers that are passed the scaler: the same skips, bits and warnings as with torch's."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from pathlib import Path

import hosts
import pytest
from axes import require
from axes_torch import GradScaler, TorchScaler, torch
from hosts import Make, Row, batches, column, loss_of, network, row
from small_torch import optimizer_of

pytestmark = [pytest.mark.torch, pytest.mark.tier("ranks")]


def made(name: str, model):
    """Return an optimizer by its name."""
    return optimizer_of(name, model.parameters(), lr=0.1)


# accelerate.


@pytest.fixture
def accelerator(reset_accelerate: None):  # noqa: ARG001
    """Return what makes an accelerator for float16 on the CPU, where accelerate makes no scaler by itself."""
    module = require("accelerate")

    def make(scaler, **options):
        module.state.GradientState._reset_state()
        accelerator = module.Accelerator(cpu=True, mixed_precision="fp16", **options)
        accelerator.native_amp = True
        accelerator.scaler = scaler
        return accelerator

    return make


ALL = range(hosts.STEPS)


def trained(accelerator, make: Make, folder: Path, name: str, clips: bool, steps: range = ALL) -> list[Row]:
    """Train with accelerate, two batches a step, from and to a checkpoint if these are not all steps."""
    scaler, model, rows = make(), network(), []
    host = accelerator(scaler, gradient_accumulation_steps=2)
    raw = made(name, model)
    model, wrapped, schedule = host.prepare(model, raw, torch.optim.lr_scheduler.StepLR(raw, 1, 0.5))
    if steps.start:
        host.load_state(folder)
    for step in steps:
        for index in (2 * step, 2 * step + 1):
            norm = None
            with host.accumulate(model):
                host.backward(loss_of(model, batches(2 * hosts.STEPS)[index]))
                # In the first batch; the other one adds to it.
                if index == 2 * step and hosts.SKIPS[step]:
                    hosts.overflow(model)
                if clips and host.sync_gradients:
                    norm = repr(float(host.clip_grad_norm_(model.parameters(), 0.1)))
                wrapped.step()
                schedule.step()
                wrapped.zero_grad()
        skipped, [rate] = wrapped.step_was_skipped, schedule.get_last_lr()
        rows.append(row(scaler, model, norm=norm, skipped=skipped, rate=rate))
    if steps.stop < hosts.STEPS:
        host.save_state(folder)
    return rows


@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adam-foreach", "Adagrad", "AdamW-fused", "SGD-fused"])
def test_accelerate_sees_each_skip_and_clips_what_is_unscaled(accelerator, optimizer: str, clip: bool, tmp_path: Path):
    rows = hosts.same_as_torchs(lambda make: trained(accelerator, make, tmp_path, optimizer, clip))
    hosts.check_run(rows)
    # It misses the skips of fused optimizers, whose kernels make them.
    seen = [False] * hosts.STEPS if "fused" in optimizer else hosts.SKIPS
    assert column(rows, "skipped") == seen
    assert column(rows, "rate") == [0.1 * 0.5**taken for taken in itertools.accumulate(not each for each in seen)]
    if clip:
        # Before clipping; those of scaled gradients are hundreds of times larger.
        norms = [float(norm) for norm in column(rows, "norm")]
        assert [not 0 < norm < 10.0 for norm in norms] == [not math.isfinite(norm) for norm in norms] == hosts.SKIPS


@pytest.mark.parametrize("load", [hosts.torchs, hosts.ours])
@pytest.mark.parametrize("save", [hosts.torchs, hosts.ours])
def test_a_checkpoint_of_accelerate_serves_either_scaler(accelerator, save: Make, load: Make, tmp_path: Path):
    train = functools.partial(trained, accelerator, folder=tmp_path, name="AdamW", clips=True)
    begin = train(save, steps=range(5))
    saved = torch.load(tmp_path / "scaler.pt")
    factors = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
    assert saved == {"scale": 512.0, **factors, "_growth_tracker": 2}
    assert begin + train(load, steps=range(5, hosts.STEPS)) == train(hosts.torchs)


@pytest.mark.parametrize("make", [hosts.torchs, hosts.ours])
def test_a_loaded_scaler_is_made_ready_for_the_step_before_the_first_loss(accelerator, make: Make):
    # accelerate loads a sharded optimizer's state by a step of it with gradients of zero, and has the scaler's tensors
    # made before.
    scaler, model = make(), network()
    assert scaler._scale is scaler._growth_tracker is scaler._get_scale_async() is None
    scaler.load_state_dict(make().state_dict() | {"scale": 32.0, "_growth_tracker": 1})
    scaler._lazy_init_scale_growth_tracker(scaler._device)
    assert scaler._get_scale_async() is scaler._scale
    for tensor, dtype, value in ((scaler._scale, torch.float32, 32.0), (scaler._growth_tracker, torch.int32, 1)):
        assert (tensor.dtype, tensor.shape, tensor.device.type, tensor.item()) == (dtype, (), "cpu", value)
    optimizer = accelerator(scaler).prepare(made("AdamW", model))
    assert scaler._found_inf_per_device(optimizer) == {}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert len(optimizer.state) == len(list(model.parameters()))
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (32.0, 2)


# Optimizers that take the scaler.


class TakesScaler(torch.optim.SGD):  # type: ignore[misc]
    """As random programs of tests/parity have them; it returns what it was given."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, *, grad_scaler=None):  # noqa: ARG002
        return grad_scaler


def test_an_optimizer_that_takes_an_enabled_scaler_is_warned_of():
    for make in (TorchScaler, GradScaler):
        scaler, model = make("cpu"), network()
        optimizer = TakesScaler(model.parameters())
        scaler.scale(loss_of(model, batches()[0])).backward()
        # torch warns, at the caller's line, of what it passes itself to; that of torch 2.6 warns of its own line.
        with pytest.warns(FutureWarning, match="grad_scaler|pass(ing)? itself") as warned:
            assert scaler.step(optimizer) is scaler
        own = {Path(inspect.getfile(TorchScaler))} if make is TorchScaler else set()
        assert {Path(each.filename) for each in warned} <= {Path(__file__), *own}
        assert make("cpu", enabled=False).step(optimizer) is None


def test_a_run_that_differs_in_one_bit_is_found():
    def run(make: Make) -> list[Row]:
        model = network()
        model[0].bias.data[0] *= 1 + 2.0**-23 * (make is hosts.ours)
        return [{"weights": hosts.bits(model)}]

    with pytest.raises(AssertionError):
        hosts.same_as_torchs(run)
