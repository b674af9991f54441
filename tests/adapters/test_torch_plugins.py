"""The plugins for Lightning's Trainer and for Fabric: schedules hold on skipped steps, also from a checkpoint on."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axes import require
from hosts import SETTINGS, batches, bits, network, overflow

import gradscale

pytestmark = [
    pytest.mark.tier("ranks"),
    pytest.mark.torch,
    # Lightning 2.6 itself uses what torch 2.13 has deprecated.
    pytest.mark.filterwarnings(r"ignore:.*isinstance\(treespec, LeafSpec\):FutureWarning"),
]

STEPS = 12
OVERFLOWS = frozenset({1, 2, 4, 5, 6, 8, 9, 12})  # the first and the last, too
FACTOR = 0.5
RATES = [0.1 * FACTOR ** sum(taken not in OVERFLOWS for taken in range(1, step + 1)) for step in range(1, STEPS + 1)]


@pytest.fixture(autouse=True)
def lightning() -> Any:
    """Return Lightning."""
    return require("lightning")


class Loader:
    """Some batches, as often as they are asked for."""

    def __init__(self, count: int) -> None:
        self.batches = batches(count)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def decaying(optimizer: Any) -> Any:
    """Return a schedule whose rate tells how often it has been stepped."""
    return require("torch").optim.lr_scheduler.StepLR(optimizer, 1, FACTOR)


def plugin(kind: str = "MixedPrecision") -> Any:
    """Return a plugin of ours for the CPU."""
    from gradscale_torch import GradScaler, plugins

    return getattr(plugins, kind)("16-mixed", "cpu", GradScaler("cpu", **SETTINGS))


def lightnings_own() -> Any:
    """Return Lightning's plugin with torch's scaler."""
    scaler = require("torch").amp.GradScaler("cpu", **SETTINGS)
    return require("lightning").pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)


@functools.cache
def module_class() -> Any:
    """Return a module whose gradients overflow at the given steps, and which notes the rate after each batch."""

    class Module(require("lightning").LightningModule):  # type: ignore[misc]
        schedule: Any = {"interval": "step"}  # noqa: RUF012

        def __init__(self, optimizer: str = "SGD", **options: Any) -> None:
            super().__init__()
            self.network = network()
            self.optimizer, self.options = optimizer, options
            self.rates: list[float] = []
            self.weights: list[str] = []

        def training_step(self, batch: Any) -> Any:
            loss = self.network(batch).square().mean()
            self.log("loss", 1.0)
            return loss

        def on_after_backward(self) -> None:
            if self.trainer.global_step + 1 in OVERFLOWS:
                overflow(self.network)

        def on_train_batch_end(self, *_: Any) -> None:
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            self.weights.append(bits(self.network))

        def made_schedule(self, optimizer: Any) -> Any:
            return decaying(optimizer)

        def configure_optimizers(self) -> Any:
            kind = getattr(require("torch").optim, self.optimizer)
            optimizer = kind(self.network.parameters(), lr=0.1, **self.options)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": self.made_schedule(optimizer)} | self.schedule,
            }

    return Module


def trainer_with(precision: Any, **options: Any) -> Any:
    """Return a Trainer for the CPU that writes nothing."""
    return require("lightning").pytorch.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"max_epochs": 1} | options),
    )


def fit(precision: Any, module: Any, count: int = STEPS, *, resume: Path | None = None, **options: Any) -> Any:
    """Train a module, and return the Trainer."""
    trainer = trainer_with(precision, **options)
    trainer.fit(module, Loader(count), ckpt_path=resume)
    return trainer


def schedule_of(trainer: Any) -> Any:
    """Return the one schedule of a Trainer."""
    (config,) = trainer.lr_scheduler_configs
    return config.scheduler


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_twelve_steps_of_which_eight_are_skipped_are_four_of_the_schedule(
    optimizer: str, options: dict[str, bool]
) -> None:
    module = module_class()(optimizer, **options)
    trainer = fit(plugin(), module)
    assert module.rates == RATES
    assert schedule_of(trainer).last_epoch == 4
    assert trainer.precision_plugin.scaler.get_scale() == SETTINGS["init_scale"] / 2**8


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_lightnings_own_plugin_steps_the_schedule_always() -> None:
    module = module_class()()
    assert schedule_of(fit(lightnings_own(), module)).last_epoch == 12
    assert module.rates == [0.1 * FACTOR**step for step in range(1, STEPS + 1)]


def test_what_is_accumulated_is_one_step() -> None:
    module = module_class()()
    trainer = fit(plugin(), module, 2 * STEPS, accumulate_grad_batches=2)
    assert module.rates[1::2] == RATES
    assert schedule_of(trainer).last_epoch == 4


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
@pytest.mark.parametrize("missing", [0, 3])
def test_a_batch_without_a_loss_is_no_step(missing: int) -> None:
    class Module(module_class()):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == missing else super().training_step(batch)

        def on_after_backward(self) -> None:
            """Never overflow."""

    module = Module()
    assert schedule_of(fit(plugin(), module, 5)).last_epoch == 4
    assert module.rates[missing] == (module.rates[missing - 1] if missing else 0.1)


def test_a_plateau_is_given_its_metric() -> None:
    class Module(module_class()):  # type: ignore[misc]
        schedule = {"interval": "step", "monitor": "loss", "reduce_on_plateau": True}  # noqa: RUF012

        def made_schedule(self, optimizer: Any) -> Any:
            kind = require("torch").optim.lr_scheduler.ReduceLROnPlateau
            return kind(optimizer, factor=FACTOR, patience=0, threshold=0.0)

    module = Module()
    schedule = schedule_of(fit(plugin(), module))
    # The first of four metrics is the best, and none of the others is better.
    assert (schedule.last_epoch, schedule.best, module.rates[-1]) == (4, 1.0, 0.1 * FACTOR**3)
    assert isinstance(schedule, require("torch").optim.lr_scheduler.ReduceLROnPlateau)


def test_a_schedule_of_epochs_is_left_alone() -> None:
    class Module(module_class()):  # type: ignore[misc]
        schedule = {"interval": "epoch"}  # noqa: RUF012

    # The last step of the first of two epochs is skipped, and all of the second are taken.
    trainer = fit(plugin(), Module(), max_epochs=2)
    assert schedule_of(trainer).last_epoch == 2


def test_a_hook_of_the_module_steps_what_holds() -> None:
    class Module(module_class()):  # type: ignore[misc]
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            assert metric is None
            scheduler.step()

    module = Module()
    assert schedule_of(fit(plugin(), module)).last_epoch == 4
    assert module.rates == RATES


def test_two_optimizers_that_are_stepped_by_hand_hold_their_own_schedules() -> None:
    torch = require("torch")

    class Module(module_class()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.networks = torch.nn.ModuleList([self.network, network(1)])

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for which, optimizer in enumerate(self.optimizers()):
                self.manual_backward(self.networks[which](batch).square().mean())
                if which == 1 and batch_idx + 1 in OVERFLOWS:
                    overflow(self.networks[1])
                optimizer.step()
                optimizer.zero_grad()
            for schedule in self.lr_schedulers():
                schedule.step()

        def on_after_backward(self) -> None:
            """Overflow by hand."""

        def configure_optimizers(self) -> Any:
            made = [torch.optim.SGD(one.parameters(), lr=0.1) for one in self.networks]
            # In another order than the optimizers.
            schedules = [{"scheduler": decaying(optimizer), "interval": "step"} for optimizer in reversed(made)]
            return made, schedules

    trainer = fit(plugin(), Module())
    assert [config.scheduler.last_epoch for config in trainer.lr_scheduler_configs] == [4, 12]


def test_a_plugin_serves_one_fit_after_the_other() -> None:
    precision = plugin()
    for _ in range(2):
        module = module_class()()
        trainer = fit(precision, module)
        assert module.rates == RATES
        assert schedule_of(trainer).last_epoch == 4


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("load", ["ours", "lightnings"])
@pytest.mark.parametrize("save", ["ours", "lightnings"])
def test_a_checkpoint_serves_either_plugin(save: str, load: str, tmp_path: Path) -> None:
    torch = require("torch")
    make = {"ours": plugin, "lightnings": lightnings_own}
    checkpoint = tmp_path / "half.ckpt"
    trainer = fit(make[save](), module_class()("AdamW"), STEPS // 2)
    trainer.save_checkpoint(checkpoint)
    saved = torch.load(checkpoint, weights_only=True)
    scale = SETTINGS["init_scale"] / 2**5
    assert saved["MixedPrecision"]["scale"] == scale
    assert saved["lr_schedulers"][0]["last_epoch"] == (1 if save == "ours" else STEPS // 2)

    resumed = module_class()("AdamW")
    trainer = fit(make[load](), resumed, STEPS // 2, resume=checkpoint, max_epochs=2)
    skipped = sum(step > STEPS // 2 for step in OVERFLOWS)
    assert trainer.precision_plugin.state_dict()["scale"] == scale / 2**skipped
    if save == load:
        through = module_class()("AdamW")
        fit(make[load](), through, STEPS // 2, max_epochs=2)
        assert through.rates[STEPS // 2 :] == resumed.rates
        assert through.weights[STEPS // 2 :] == resumed.weights


def test_what_holds_is_a_schedule_in_all_else() -> None:
    torch = require("torch")
    trainer = fit(plugin(), module_class()())
    held = schedule_of(trainer)
    assert isinstance(held, torch.optim.lr_scheduler.StepLR)
    assert held.gamma == FACTOR
    held.gamma = 0.25
    assert held.state_dict()["gamma"] == 0.25
    held.load_state_dict(held.state_dict() | {"last_epoch": 7})
    assert held.last_epoch == 7
    # Its optimizer has made no step since, and so it makes none.
    held.step()
    assert held.last_epoch == 7
    with pytest.raises(AttributeError, match="no_such_name"):
        held.no_such_name  # noqa: B018


@pytest.mark.parametrize("kind", ["MixedPrecision", "FabricMixedPrecision"])
def test_a_scaler_is_made_where_none_is_given_and_torchs_is_refused(kind: str) -> None:
    from gradscale_torch import GradScaler, ShardedGradScaler, plugins

    make = getattr(plugins, kind)
    assert type(make(device="cpu").scaler) is GradScaler
    assert make("bf16-mixed", "cpu").scaler is None
    sharded = ShardedGradScaler("cpu")
    assert make("16-mixed", "cpu", sharded).scaler is sharded
    with pytest.raises(gradscale.InvalidTypeError, match=r"of gradscale_torch, got <torch\.amp"):
        make("16-mixed", "cpu", require("torch").amp.GradScaler("cpu"))


def fabric_with(precision: Any) -> Any:
    """Return a Fabric for the CPU."""
    return require("lightning").fabric.Fabric(accelerator="cpu", devices=1, plugins=precision)


@pytest.mark.parametrize("wraps", [False, True], ids=["raw-optimizer", "fabrics-optimizer"])
def test_fabric_holds_a_schedule_and_saves_the_scaler(wraps: bool, tmp_path: Path) -> None:
    torch = require("torch")

    def train(steps: range, resume: bool = False) -> tuple[list[float], Any, Any]:
        precision = plugin("FabricMixedPrecision")
        fabric = fabric_with(precision)
        raw = network()
        plain = torch.optim.AdamW(raw.parameters(), lr=0.1)
        schedule = decaying(plain)
        model, optimizer = fabric.setup(raw, plain)
        state = {"model": model, "optimizer": optimizer, "precision": precision, "schedule": schedule}
        if resume:
            fabric.load(tmp_path / "half.ckpt", state)
        rates = []
        for index, batch in enumerate(batches(STEPS)):
            if index not in steps:
                continue
            fabric.backward(model(batch).square().mean())
            if index + 1 in OVERFLOWS:
                overflow(raw)
            optimizer.step()
            optimizer.zero_grad()
            precision.step_schedule(optimizer if wraps else plain, schedule)
            rates.append(plain.param_groups[0]["lr"])
        if steps.stop < STEPS:
            fabric.save(tmp_path / "half.ckpt", state)
        return rates, bits(raw), precision.scaler.state_dict()

    through = train(range(STEPS))
    assert through[0] == RATES
    first = train(range(5))
    second = train(range(5, STEPS), resume=True)
    assert first[0] + second[0] == RATES
    assert second[1:] == through[1:]


def test_fabric_without_a_scaler_steps_a_schedule_always() -> None:
    from gradscale_torch.plugins import FabricMixedPrecision

    torch = require("torch")
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    schedule = decaying(optimizer)
    optimizer.step()
    FabricMixedPrecision("bf16-mixed", "cpu").step_schedule(optimizer, schedule)
    assert math.isclose(optimizer.param_groups[0]["lr"], 0.05)
