"""Lightning's Trainer and Fabric with gradscale in the place of torch's scaler: the same steps, skips and bits."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import nullcontext
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
from tiers import later

pytestmark = [
    pytest.mark.tier("ranks"),
    pytest.mark.torch,
    # Lightning 2.6 itself uses what torch 2.13 has deprecated.
    pytest.mark.filterwarnings(r"ignore:.*isinstance\(treespec, LeafSpec\):FutureWarning"),
]

STEPPED = [not skipped for skipped in SKIPS]
BOTH = ["torch", "gradscale"]


@pytest.fixture(autouse=True)
def lightning() -> Any:
    """Return Lightning."""
    return require("lightning")


@pytest.fixture(params=BOTH)
def make(request: pytest.FixtureRequest) -> Make:
    """Return what makes a scaler: torch's, which shows what the host expects, or ours."""
    return maker(request.param)


class Loader:
    """Some of the batches, as often as they are asked for."""

    def __init__(self, count: int) -> None:
        self.batches = batches(count)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


@functools.cache
def module_class() -> Any:
    """Return a module with a network for each optimizer."""

    class Module(require("lightning").LightningModule):  # type: ignore[misc]
        def __init__(self, *optimizers: str) -> None:
            super().__init__()
            self.names = optimizers
            self.networks = require("torch").nn.ModuleList(network(seed) for seed in range(len(optimizers)))
            self.first = bits(*self.networks)
            self.rows: list[Row] = []
            self.skipped: list[list[bool]] = []

        def loss(self, batch: Any, which: int = 0) -> Any:
            return self.networks[which](batch).square().mean()

        def training_step(self, batch: Any) -> Any:
            return self.loss(batch)

        def on_after_backward(self) -> None:
            if self.automatic_optimization and self.trainer.global_step + 1 in OVERFLOWS:
                overflow(self.networks[0])

        def on_train_batch_end(self, *_: Any) -> None:
            scaler = self.trainer.precision_plugin.scaler
            gradients = [parameter.grad for parameter in self.networks.parameters() if parameter.grad is not None]
            norm = require("torch").nn.utils.get_total_norm(gradients)
            self.rows.append(
                {
                    "scale": scaler.get_scale(),
                    "tracker": scaler._get_growth_tracker(),
                    "weights": bits(*self.networks),
                    "norm": repr(norm.item()),
                }
            )
            if hasattr(scaler, "last_step") and self.trainer.global_step == len(self.skipped) + 1:
                self.skipped.append([scaler.last_step(optimizer).skipped for optimizer in self.trainer.optimizers])

        def configure_optimizers(self) -> Any:
            return [optimizer_named(name, model) for name, model in zip(self.names, self.networks, strict=True)]

    return Module


def fit(make: Make, module: Any, count: int = STEPS, *, resume: Path | None = None, **options: Any) -> Any:
    """Train a module in float16 with Lightning's Trainer, and return the Trainer."""
    pytorch = require("lightning").pytorch
    trainer = pytorch.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler=make()),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"max_epochs": 1} | options),
    )
    trainer.fit(module, Loader(count), ckpt_path=resume)
    return trainer


def trained(make: Make, module: Any, count: int = STEPS, **options: Any) -> list[Row]:
    """Train a module and return its rows."""
    fit(make, module, count, **options)
    return list(module.rows)


def check_reports(module: Any, skipped: list[list[bool]]) -> None:
    """Check what the scaler reported of each step, for each optimizer; torch's has no reports."""
    has_reports = hasattr(module.trainer.precision_plugin.scaler, "last_step")
    assert module.skipped == (skipped if has_reports else [])


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", *later("all", "Adam-foreach")])
@pytest.mark.parametrize("algorithm", ["norm", "value", *later("all", None)])
def test_the_trainer_clips_and_skips(make: Make, optimizer: str, algorithm: str | None) -> None:
    options = {} if algorithm is None else {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
    modules = []

    def run(make: Make) -> list[Row]:
        modules.append(module_class()(optimizer))
        return trained(make, modules[-1], **options)

    rows = same_as_torch(run, make)
    assert column(rows, "scale") == SCALES
    assert column(rows, "tracker") == TRACKERS
    check_weights_move([modules[0].first, *column(rows, "weights")], STEPPED)
    norms = [float(norm) for norm, stepped in zip(column(rows, "norm"), STEPPED, strict=True) if stepped]
    assert all(0 < norm <= (0.0101 if algorithm == "norm" else 10) for norm in norms)
    check_reports(modules[0], [[skipped] for skipped in SKIPS])


def test_the_trainer_accumulates(make: Make) -> None:
    modules = []

    def run(make: Make) -> list[Row]:
        modules.append(module_class()("AdamW"))
        return trained(make, modules[-1], 2 * STEPS, accumulate_grad_batches=2, gradient_clip_val=0.1)

    rows = same_as_torch(run, make)
    # The scale, the tracker and the weights move with every second batch only.
    assert column(rows, "scale")[1::2] == SCALES
    assert column(rows, "tracker")[1::2] == TRACKERS
    check_reports(modules[0], [[skipped] for skipped in SKIPS])
    weights = [modules[0].first, *column(rows, "weights")]
    check_weights_move(weights, [moves for stepped in STEPPED for moves in (False, stepped)])


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
def test_a_batch_without_a_loss_leaves_everything_as_it_is(make: Make) -> None:
    class Module(module_class()):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx in (4, 7) else self.loss(batch)

    rows = same_as_torch(lambda make: trained(make, Module("AdamW"), STEPS + 2, gradient_clip_val=0.1), make)
    # Lightning's count of steps, which the overflows follow, goes on at these batches.
    assert column(rows, "tracker") == [1, 2, 0, 1, 1, 0, 1, 1, 2, 0, 1, 2]
    assert column(rows, "scale") == [1024.0] * 2 + [512.0] * 3 + [256.0] * 4 + [512.0] * 3
    for index in (4, 7):
        assert {key: rows[index][key] for key in ("scale", "tracker", "weights")} == {
            key: rows[index - 1][key] for key in ("scale", "tracker", "weights")
        }


@pytest.mark.parametrize("order", ["one-after-the-other", "both-losses-first"])
def test_two_optimizers_are_stepped_by_hand(make: Make, order: str) -> None:
    modules = []

    class Module(module_class()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__("SGD", "AdamW")
            self.automatic_optimization = False

        def backward_by_hand(self, which: int, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch, which))
            if which == 1 and batch_idx + 1 in OVERFLOWS:
                overflow(self.networks[which])

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizers = self.optimizers()
            if order == "both-losses-first":
                for which in range(2):
                    self.backward_by_hand(which, batch, batch_idx)
            for which, optimizer in enumerate(optimizers):
                if order != "both-losses-first":
                    self.backward_by_hand(which, batch, batch_idx)
                optimizer.step()
                optimizer.zero_grad()

        def on_train_batch_end(self, *_: Any) -> None:
            scaler = self.trainer.precision_plugin.scaler
            self.rows.append({"scale": scaler.get_scale(), "weights": [bits(model) for model in self.networks]})
            if hasattr(scaler, "last_step"):
                self.skipped.append([scaler.last_step(optimizer).skipped for optimizer in self.trainer.optimizers])

    def run(make: Make) -> list[Row]:
        modules.append(Module())
        return trained(make, modules[-1])

    with warns_of_older_gradients(make) if order == "both-losses-first" else nullcontext():
        rows = same_as_torch(run, make)
    # Lightning updates the scale with each optimizer: it grows every one and a half batches.
    assert column(rows, "scale")[:3] == [1024.0, 2048.0, 1024.0]
    check_reports(modules[0], [[False, skipped] for skipped in SKIPS])
    for which, moves in enumerate(([True] * STEPS, STEPPED)):
        weights = [bits(network(which)), *(row["weights"][which] for row in rows)]
        check_weights_move(weights, moves)


@pytest.mark.parametrize("load", BOTH)
@pytest.mark.parametrize("save", BOTH)
def test_a_checkpoint_of_the_trainer_serves_either_scaler(save: str, load: str, tmp_path: Path) -> None:
    torch = require("torch")
    checkpoint = tmp_path / "half.ckpt"
    begin = module_class()("AdamW")
    fit(maker(save), begin, STEPS // 2).save_checkpoint(checkpoint)
    saved = torch.load(checkpoint, weights_only=True)["MixedPrecision"]
    assert saved == {
        "scale": 512.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 3,
        "_growth_tracker": 2,
    }
    end = module_class()("AdamW")
    fit(maker(load), end, STEPS // 2, resume=checkpoint, max_epochs=2)
    through = module_class()("AdamW")
    assert begin.rows + end.rows == trained(maker("torch"), through, STEPS // 2, max_epochs=2)
    assert column(through.rows, "scale") == SCALES


@pytest.mark.parametrize("optimizer", ["AdamW-fused", "SGD-fused"])
def test_the_skips_of_a_fused_optimizer_are_reported_and_clipping_is_refused(make: Make, optimizer: str) -> None:
    modules = []

    def run(make: Make) -> list[Row]:
        modules.append(module_class()(optimizer))
        # What is left in the gradients of a fused optimizer is no result.
        return [{name: row[name] for name in ("scale", "tracker", "weights")} for row in trained(make, modules[-1])]

    rows = same_as_torch(run, make)
    assert column(rows, "scale") == SCALES
    check_weights_move([modules[0].first, *column(rows, "weights")], STEPPED)
    check_reports(modules[0], [[skipped] for skipped in SKIPS])
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        trained(make, module_class()(optimizer), gradient_clip_val=0.1)


def fabric_with(scaler: Any) -> Any:
    """Return a Fabric that trains in float16 on the CPU."""
    fabric = require("lightning").fabric
    plugin = fabric.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)
    return fabric.Fabric(accelerator="cpu", devices=1, plugins=plugin)


@pytest.mark.parametrize("clipping", [{"max_norm": 0.01}, {"clip_val": 0.01}, {}], ids=lambda value: "".join(value))
def test_fabric_clips_and_skips(make: Make, clipping: dict[str, float]) -> None:
    def run(make: Make) -> list[Row]:
        scaler = make()
        fabric = fabric_with(scaler)
        raw = network()
        model, optimizer = fabric.setup(raw, optimizer_named("AdamW", raw))
        rows = []
        for step, batch in enumerate(batches(), start=1):
            fabric.backward(model(batch).square().mean())
            if step in OVERFLOWS:
                overflow(raw)
            norm = fabric.clip_gradients(model, optimizer, error_if_nonfinite=False, **clipping) if clipping else None
            optimizer.step()
            optimizer.zero_grad()
            tracker = scaler._get_growth_tracker()
            rows.append({"scale": scaler.get_scale(), "tracker": tracker, "weights": bits(raw), "norm": repr(norm)})
            if hasattr(scaler, "last_step"):
                assert scaler.last_step(optimizer.optimizer).skipped == SKIPS[step - 1]
        return rows

    rows = same_as_torch(run, make)
    assert column(rows, "scale") == SCALES
    assert column(rows, "tracker") == TRACKERS
    check_weights_move([bits(network()), *column(rows, "weights")], STEPPED)


def test_fabric_passes_a_closure_which_torch_refuses() -> None:
    fabric = fabric_with(maker("torch")())
    raw = network()
    model, optimizer = fabric.setup(raw, optimizer_named("SGD", raw))
    fabric.backward(model(batches(1)[0]).square().mean())
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        optimizer.step(lambda: None)


@pytest.mark.parametrize("overflows", [0, 1, 2])
def test_fabric_passes_a_closure_which_is_retried_at_a_lower_scale(overflows: int) -> None:
    scaler = maker("gradscale")()
    fabric = fabric_with(scaler)
    raw = network()
    model, optimizer = fabric.setup(raw, optimizer_named("SGD", raw))
    losses = []

    def closure() -> Any:
        optimizer.zero_grad()
        losses.append(model(batches(1)[0]).square().mean())
        fabric.backward(losses[-1])
        if len(losses) <= overflows:
            overflow(raw)
        return losses[-1]

    assert optimizer.step(closure) is losses[-1]
    assert len(losses) == overflows + 1
    scale = 1024.0 / 2**overflows
    report = scaler.last_step(optimizer.optimizer)
    assert (report.skipped, report.retries, report.scale, scaler.get_scale()) == (False, overflows, scale, scale)

    # The same step of torch's, at the scale that served.
    fabric = fabric_with(require("torch").amp.GradScaler("cpu", init_scale=scale))
    theirs = network()
    model, optimizer = fabric.setup(theirs, optimizer_named("SGD", theirs))
    fabric.backward(model(batches(1)[0]).square().mean())
    optimizer.step()
    assert bits(raw) == bits(theirs) != bits(network())
