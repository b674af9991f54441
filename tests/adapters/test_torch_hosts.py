"""accelerate, Lightning's Trainer and Fabric with gradscale in the place of torch's scaler: the same skips and bits."""

from __future__ import annotations

import functools
import itertools
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hosts
import pytest
from axes import require
from axes_torch import TorchScaler, torch
from hosts import Make, Row, batches, column, loss_of, network, row
from tiers import later

pytestmark = [
    pytest.mark.torch,
    pytest.mark.tier("ranks"),
    # Lightning 2.6 itself uses what torch 2.13 has deprecated.
    pytest.mark.filterwarnings(r"ignore:.*isinstance\(treespec, LeafSpec\):FutureWarning"),
]


def test_a_run_that_differs_in_one_bit_is_not_the_same() -> None:
    def run(make: Make) -> list[Row]:
        model = network()
        if make() is None:
            model[0].bias.data[0] *= 1 + 2.0**-23
        return [{"weights": hosts.bits(model)}]

    assert hosts.same_as_torch(run, lambda: 0)
    with pytest.raises(AssertionError):
        hosts.same_as_torch(run, lambda: None)
    for weights, moves in ((["first", "second"], [False]), (["first", "first"], [True])):
        with pytest.raises(AssertionError):
            hosts.check_weights_move(weights, moves)


# Each host trains with a scaler that it makes, from and to a checkpoint if these are not all steps.


def accelerator_with(scaler: Any, micro_batches: int = 1) -> Any:
    """Return an accelerator for float16 on the CPU, where accelerate makes no scaler by itself."""
    module = require("accelerate")
    module.state.GradientState._reset_state()
    accelerator = module.Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=micro_batches)
    accelerator.native_amp = True
    accelerator.scaler = scaler
    return accelerator


def by_accelerate(make: Make, optimizer: str, clip: str | None, micro: int, steps: range, file: Path) -> list[Row]:
    scaler, model, rows = make(), network(), []
    accelerator = accelerator_with(scaler, micro)
    raw = hosts.optimizer_named(optimizer, model)
    model, wrapped, schedule = accelerator.prepare(model, raw, torch.optim.lr_scheduler.StepLR(raw, 1, 0.5))
    if steps.start:
        accelerator.load_state(file)
    for index in range(micro * steps.start, micro * steps.stop):
        norm = None
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batches(hosts.STEPS * micro)[index]))
            # In the first micro-batch; the others add to it.
            if index % micro == 0 and index // micro + 1 in hosts.OVERFLOWS:
                hosts.overflow(model)
            if clip and accelerator.sync_gradients:
                norm = repr(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
            wrapped.step()
            schedule.step()
            wrapped.zero_grad()
        if accelerator.sync_gradients:
            skipped, [rate] = wrapped.step_was_skipped, schedule.get_last_lr()
            rows.append(row(scaler, model, norm=norm, skipped=skipped, rate=rate))
    if steps.stop < hosts.STEPS:
        accelerator.save_state(file)
    return rows


@functools.cache
def module_class() -> Any:
    """Return Lightning's module with a network for each optimizer."""

    class Module(require("lightning").LightningModule):  # type: ignore[misc]
        def __init__(self, *optimizers: str) -> None:
            super().__init__()
            self.names = optimizers
            self.networks = torch.nn.ModuleList(network(seed) for seed in range(len(optimizers)))
            self.rows: list[Row] = []

        def training_step(self, batch: Any) -> Any:
            return loss_of(self.networks[0], batch)

        def on_after_backward(self) -> None:
            if self.automatic_optimization and self.trainer.global_step + 1 in hosts.OVERFLOWS:
                hosts.overflow(self.networks[0])

        def on_train_batch_end(self, *_: Any) -> None:
            gradients = [parameter.grad for parameter in self.networks.parameters() if parameter.grad is not None]
            # What is left in the gradients of a fused optimizer is no result.
            norm = None if "fused" in self.names[0] else repr(torch.nn.utils.get_total_norm(gradients).item())
            self.rows.append(row(self.trainer.precision_plugin.scaler, *self.networks, norm=norm))

        def configure_optimizers(self) -> Any:
            return [hosts.optimizer_named(name, model) for name, model in zip(self.names, self.networks, strict=True)]

    return Module


def fit(make: Make, module: Any, given: list[Any] | None = None, *, resume: Path | None = None, **options: Any) -> Any:
    """Train a module in float16 with Lightning's own plugin, and return the Trainer."""
    plugin = require("lightning").pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler=make())
    trainer = hosts.trainer_with(plugin, **options)
    trainer.fit(module, hosts.Loader(batches() if given is None else given), ckpt_path=resume)
    return trainer


def by_trainer(make: Make, optimizer: str, clip: str | None, micro: int, steps: range, file: Path) -> list[Row]:
    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": clip} if clip else {}
    module = module_class()(optimizer)
    given = batches(hosts.STEPS * micro)[micro * steps.start : micro * steps.stop]
    # What is resumed is the second epoch.
    more = {"resume": file, "max_epochs": 2} if steps.start else {}
    trainer = fit(make, module, given, accumulate_grad_batches=micro, **options, **more)
    if steps.stop < hosts.STEPS:
        trainer.save_checkpoint(file)
    rows: list[Row] = module.rows[micro - 1 :: micro]
    return rows


def by_fabric(make: Make, optimizer: str, clip: str | None, micro: int, steps: range, file: Path) -> list[Row]:  # noqa: ARG001
    scaler, raw, rows = make(), network(), []
    fabric = hosts.fabric_with(require("lightning").fabric.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler))
    model, wrapped = fabric.setup(raw, hosts.optimizer_named(optimizer, raw))
    options = {"norm": {"max_norm": 0.01}, "value": {"clip_val": 0.01}}
    for step, batch in enumerate(batches(), start=1):
        fabric.backward(loss_of(model, batch))
        if step in hosts.OVERFLOWS:
            hosts.overflow(raw)
        if clip:
            fabric.clip_gradients(model, wrapped, error_if_nonfinite=False, **options[clip])
        norm = repr(torch.nn.utils.get_total_norm([parameter.grad for parameter in raw.parameters()]).item())
        wrapped.step()
        wrapped.zero_grad()
        rows.append(row(scaler, raw, norm=norm if clip == "norm" else None))
    return rows


HOSTS = {"accelerate": by_accelerate, "trainer": by_trainer, "fabric": by_fabric}
ALL = range(hosts.STEPS)
PLAIN, FUSED = ["SGD", "AdamW", "Adam-foreach", "Adagrad"], ["AdamW-fused", "SGD-fused"]
CASES = [
    *itertools.product(["accelerate"], [*PLAIN, *FUSED], ["norm", None], [1, 2]),
    *itertools.product(["trainer"], ["SGD", "AdamW"], ["norm", "value"], [1]),
    ("trainer", "AdamW", "norm", 2),
    *itertools.product(["trainer"], FUSED, [None], [1]),
    *later("all", ("trainer", "Adam-foreach", None, 1), ("trainer", "SGD", None, 1)),
    *itertools.product(["fabric"], ["AdamW"], ["norm", "value", None], [1]),
]


@pytest.mark.usefixtures("reset_accelerate")
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_host_sees_each_skip_and_clips_what_is_unscaled(make: Make, case: tuple[Any, ...], tmp_path: Path) -> None:
    host, optimizer, clip, micro = case
    rows = hosts.same_as_torch(lambda make: HOSTS[host](make, optimizer, clip, micro, ALL, tmp_path), make)
    hosts.check_run(rows)
    norms = column(rows, "norm")
    # accelerate returns the norm before clipping; scaled gradients are hundreds of times larger.
    limit = 10.0 if host == "accelerate" or clip != "norm" else 0.0101
    assert all(0 < float(norm) <= limit for norm, stepped in zip(norms, hosts.STEPPED, strict=True) if stepped and norm)
    if host == "accelerate":
        # It misses the skips of fused optimizers, whose kernels make them.
        seen = [False] * hosts.STEPS if "fused" in optimizer else hosts.SKIPS
        assert column(rows, "skipped") == seen
        assert column(rows, "rate") == [0.1 * 0.5**taken for taken in itertools.accumulate(not each for each in seen)]
        assert not clip or [not math.isfinite(float(norm)) for norm in norms] == hosts.SKIPS


@pytest.mark.usefixtures("reset_accelerate")
@pytest.mark.parametrize("load", hosts.BOTH)
@pytest.mark.parametrize("save", hosts.BOTH)
@pytest.mark.parametrize("host", ["accelerate", "trainer"])
def test_a_checkpoint_serves_either_scaler(host: str, save: str, load: str, tmp_path: Path) -> None:
    train = functools.partial(HOSTS[host], optimizer="AdamW", clip="norm", micro=1, file=tmp_path / "half")
    begin = train(hosts.maker(save), steps=range(5))
    saved = torch.load(tmp_path / "half" / "scaler.pt" if host == "accelerate" else tmp_path / "half")
    factors = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
    assert saved.get("MixedPrecision", saved) == {"scale": 512.0, **factors, "_growth_tracker": 2}
    end = train(hosts.maker(load), steps=range(5, hosts.STEPS))
    assert begin + end == train(hosts.maker("torch"), steps=ALL)


@pytest.mark.usefixtures("reset_accelerate")
def test_each_of_two_optimizers_in_accelerate_is_an_iteration_of_its_own(make: Make) -> None:
    def run(make: Make) -> list[Row]:
        scaler, models, rows = make(), (network(0), network(1)), []
        accelerator = accelerator_with(scaler)
        optimizers = [accelerator.prepare(hosts.optimizer_named("SGD", model)) for model in models]
        for step, batch in enumerate(batches(), start=1):
            for model in models:
                accelerator.backward(loss_of(model, batch))
            if step in hosts.OVERFLOWS:
                hosts.overflow(models[1])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            rows.append(row(scaler, *models, skipped=[optimizer.step_was_skipped for optimizer in optimizers]))
        return rows

    with hosts.warns_of_older_gradients(make):
        rows = hosts.same_as_torch(run, make, [each for skipped in hosts.SKIPS for each in (False, skipped)])
    assert column(rows, "skipped") == [[False, skipped] for skipped in hosts.SKIPS]
    # Two updates in each step: it grows every one and a half steps.
    assert column(rows, "scale")[:3] == [1024.0, 2048.0, 1024.0]


@pytest.mark.usefixtures("reset_accelerate")
def test_a_loaded_scaler_is_made_ready_for_the_step_before_the_first_loss(make: Make) -> None:
    # accelerate loads a sharded optimizer's state by a step of it with gradients of zero, and has the scaler's tensors
    # made before.
    scaler, model = make(), network()
    scaler.load_state_dict(make().state_dict() | {"scale": 32.0, "_growth_tracker": 1})
    scaler._lazy_init_scale_growth_tracker(scaler._device)
    for tensor, dtype, value in ((scaler._scale, torch.float32, 32.0), (scaler._growth_tracker, torch.int32, 1)):
        assert (tensor.dtype, tensor.shape, tensor.device.type, tensor.item()) == (dtype, (), "cpu", value)
    optimizer = accelerator_with(scaler).prepare(hosts.optimizer_named("AdamW", model))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert len(optimizer.state) == len(list(model.parameters()))
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (32.0, 2)


# Lightning.


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
def test_a_batch_without_a_loss_leaves_everything_as_it_is(make: Make) -> None:
    class Module(module_class()):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx in (4, 7) else super().training_step(batch)

    def run(make: Make) -> list[Row]:
        module = Module("AdamW")
        fit(make, module, batches(hosts.STEPS + 2), gradient_clip_val=0.1)
        return list(module.rows)

    rows = hosts.same_as_torch(run, make, [step in (2, 4) for step in range(hosts.STEPS)])
    # Lightning's count of steps, which the overflows follow, goes on at these batches.
    assert column(rows, "tracker") == [1, 2, 0, 1, 1, 0, 1, 1, 2, 0, 1, 2]
    assert column(rows, "scale") == [1024.0] * 2 + [512.0] * 3 + [256.0] * 4 + [512.0] * 3
    for index in (4, 7):
        assert rows[index]["weights"] == rows[index - 1]["weights"]


@pytest.mark.parametrize("order", ["one-after-the-other", "both-losses-first"])
def test_two_optimizers_are_stepped_by_hand(make: Make, order: str) -> None:
    class Module(module_class()):  # type: ignore[misc]
        automatic_optimization = False

        def backward_by_hand(self, which: int, batch: Any, batch_idx: int) -> None:
            self.manual_backward(loss_of(self.networks[which], batch))
            if which == 1 and batch_idx + 1 in hosts.OVERFLOWS:
                hosts.overflow(self.networks[which])

        def training_step(self, batch: Any, batch_idx: int) -> None:
            if order == "both-losses-first":
                for which in range(2):
                    self.backward_by_hand(which, batch, batch_idx)
            for which, optimizer in enumerate(self.optimizers()):
                if order != "both-losses-first":
                    self.backward_by_hand(which, batch, batch_idx)
                optimizer.step()
                optimizer.zero_grad()

        def on_train_batch_end(self, *_: Any) -> None:
            scaler = self.trainer.precision_plugin.scaler
            self.rows.append({"scale": scaler.get_scale(), "weights": [hosts.bits(model) for model in self.networks]})

    def run(make: Make) -> list[Row]:
        module = Module("SGD", "AdamW")
        fit(make, module)
        return list(module.rows)

    with hosts.warns_of_older_gradients(make) if order == "both-losses-first" else nullcontext():
        rows = hosts.same_as_torch(run, make, [each for skipped in hosts.SKIPS for each in (False, skipped)])
    # Lightning updates the scale with each optimizer: it grows every one and a half batches.
    assert column(rows, "scale")[:3] == [1024.0, 2048.0, 1024.0]
    for which, moves in enumerate(([True] * hosts.STEPS, hosts.STEPPED)):
        hosts.check_weights_move([hosts.bits(network(which)), *(row["weights"][which] for row in rows)], moves)


@pytest.mark.parametrize("optimizer", FUSED)
def test_the_trainer_refuses_to_clip_for_a_fused_optimizer(make: Make, optimizer: str) -> None:
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(make, module_class()(optimizer), gradient_clip_val=0.1)


def fabrics_step(scaler: Any, overflows: int, closes: bool) -> tuple[Any, list[Any], Any, Any]:
    """Make a step of Fabric's with or without a closure; return its result, the losses, the network and the report."""
    fabric = hosts.fabric_with(require("lightning").fabric.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler))
    raw, losses = network(), []
    model, optimizer = fabric.setup(raw, hosts.optimizer_named("SGD", raw))

    def closure() -> Any:
        optimizer.zero_grad()
        losses.append(loss_of(model, batches(1)[0]))
        fabric.backward(losses[-1])
        if len(losses) <= overflows:
            hosts.overflow(raw)
        return losses[-1]

    if not closes:
        closure()
    returned = optimizer.step(closure) if closes else optimizer.step()
    return returned, losses, raw, optimizer.optimizer


def test_fabric_passes_a_closure_which_torch_refuses() -> None:
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        fabrics_step(hosts.maker("torch")(), 0, closes=True)


@pytest.mark.parametrize("overflows", [0, 1, 2])
def test_fabric_passes_a_closure_which_is_retried_at_a_lower_scale(overflows: int) -> None:
    scaler, scale = hosts.maker("gradscale")(), 1024.0 / 2**overflows
    returned, losses, raw, optimizer = fabrics_step(scaler, overflows, closes=True)
    assert returned is losses[-1]
    assert len(losses) == overflows + 1
    report = scaler.last_step(optimizer)
    assert (report.skipped, report.retries, report.scale, scaler.get_scale()) == (False, overflows, scale, scale)
    # The same step of torch's, at the scale that served.
    *_, theirs, _ = fabrics_step(TorchScaler("cpu", init_scale=scale), 0, closes=False)
    assert hosts.bits(raw) == hosts.bits(theirs) != hosts.bits(network())
