"""Lightning, and what frameworks ask of the scaler: with ours the skips and the bits are torch's.

With the plugins schedules hold on skipped steps, too.
"""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from axes import require
from axes_torch import GradScaler, ShardedGradScaler, StepGuard, TorchScaler, torch
from small_torch import Small, optimizer_of

import gradscale

pytestmark = [
    pytest.mark.torch,
    pytest.mark.tier("ranks"),
    # Lightning 2.6 itself uses what torch 2.13 has deprecated, and wants batches to be loaded by many processes.
    pytest.mark.filterwarnings(r"ignore:.*isinstance\(treespec, LeafSpec\):FutureWarning"),
    pytest.mark.filterwarnings("ignore:.* does not have many workers:UserWarning"),
    # Of schedules that hold not.
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning"),
]

STEPS = 12
BAD_STEPS = frozenset({1, 2, 4, 8, 12})  # the first and the last, too
SKIPS = [step in BAD_STEPS for step in range(1, STEPS + 1)]
# From 1024 on, growing after three clean steps.
SETTINGS = {"init_scale": 1024.0, "growth_interval": 3}
SCALES = [512.0, 256.0, 256.0, 128.0, 128.0, 128.0, 256.0, 128.0, 128.0, 128.0, 256.0, 128.0]
TRACKERS = [0, 0, 1, 0, 1, 2, 0, 0, 1, 2, 0, 0]
FACTOR = 0.5
# How many steps have been made after each one.
TAKEN = list(itertools.accumulate(not skipped for skipped in SKIPS))
ALL, HALF = range(STEPS), STEPS // 2

Row = dict[str, Any]


def ours():
    return GradScaler("cpu", **SETTINGS)


def network(seed: int = 0):
    """Return a small network, with the same weights for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def batches(count: int):
    """Return ``count`` inputs of the network, of shape ``(4, 8)``."""
    return list(torch.randn((count, 4, 8), generator=torch.Generator().manual_seed(1)))


def loss_of(model, batch):
    return model(batch).square().mean()


def overflow(model):
    """Put an inf into one gradient."""
    next(model.parameters()).grad.view(-1)[0] = math.inf


def bits(*models) -> str:
    """Return every bit of the weights."""
    return "".join(parameter.detach().numpy().tobytes().hex() for model in models for parameter in model.parameters())


def column(rows: list[Row], name: str):
    return [row[name] for row in rows]


def rates_of(taken: list[int]) -> list[float]:
    """Return the learning rates after so many steps of a schedule."""
    return [0.1 * FACTOR**number for number in taken]


def decaying(optimizer):
    """Return a schedule whose rate tells how often it has been stepped."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, FACTOR)


def plugins():
    """Return the module of the plugins."""
    require("lightning")
    return importlib.import_module("gradscale_torch.plugins")


def plugin(kind: str = "MixedPrecision", scaler=None):
    """Return a plugin of ours for the CPU."""
    return getattr(plugins(), kind)("16-mixed", "cpu", scaler or ours())


def precision_of(kind: str):
    """Return Lightning's own plugin with torch's scaler or ours, or the plugin of ours."""
    if kind == "plugin":
        return plugin()
    scaler = TorchScaler("cpu", **SETTINGS) if kind == "torchs" else ours()
    return require("lightning").pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)


@functools.cache
def module_class():
    """Return a module whose gradients overflow at the given steps, and which notes what is left of each batch.

    It has some networks, with an optimizer of each; with a ``loop`` it is optimized by hand.
    """

    class Module(require("lightning").LightningModule):  # type: ignore[misc]
        schedule: Any = {"interval": "step"}  # noqa: RUF012
        make_schedule = staticmethod(decaying)
        overflows = BAD_STEPS
        missing: int | None = None
        clip = "norm"

        def __init__(self, optimizer: str = "SGD", loop=None, networks: int = 1, **settings):
            super().__init__()
            self.networks = torch.nn.ModuleList(map(network, range(networks)))
            self.optimizer, self.loop, self.automatic_optimization = optimizer, loop, loop is None
            self.rows: list[Row] = []
            vars(self).update(settings)

        def training_step(self, batch, batch_idx: int):
            if self.loop is not None:
                return self.loop(self, batch, batch_idx)
            self.log("loss", 1.0)
            return None if batch_idx == self.missing else loss_of(self.networks[0], batch)

        def on_after_backward(self):
            if self.automatic_optimization and self.trainer.global_step + 1 in self.overflows:
                overflow(self)

        def on_train_batch_end(self, *_):
            scaler, (optimizer, *_others) = self.trainer.precision_plugin.scaler, self.trainer.optimizers
            gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
            # What is left in the gradients of a fused optimizer is no result.
            norm = None if "fused" in self.optimizer else repr(torch.nn.utils.get_total_norm(gradients).item())
            known = {"scale": scaler.get_scale(), "tracker": scaler._get_growth_tracker(), "weights": bits(self)}
            self.rows.append(known | {"norm": norm, "rate": optimizer.param_groups[0]["lr"]})

        def configure_optimizers(self):
            made = [optimizer_of(self.optimizer, one.parameters(), lr=0.1) for one in self.networks]
            # In another order than the optimizers.
            schedules = [
                {"scheduler": self.make_schedule(one)} | self.schedule for one in reversed(made) if self.schedule
            ]
            return made, schedules

    return Module


def fit(precision, module, count: int = STEPS, *, resume: Path | None = None, **options):
    """Train a module by Lightning's Trainer; return this and its schedule, if there is one."""
    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    given = {"max_epochs": 1, **dict.fromkeys(silent, False), **options}
    trainer = require("lightning").pytorch.Trainer(accelerator="cpu", devices=1, plugins=precision, **given)
    trainer.fit(module, torch.utils.data.DataLoader(batches(count), batch_size=None), ckpt_path=resume)
    return trainer, next((config.scheduler for config in trainer.lr_scheduler_configs), None)


def trained(kind: str, name: str, clip: str | None, steps: range = ALL, folder: Path = Path(), **settings) -> list[Row]:
    """Train in two epochs, two batches a step, of which the first may overflow.

    It goes on from a checkpoint in the folder if the first steps are not its own, and leaves one if the last are not.
    """
    module = module_class()(name, **settings)
    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": clip} if clip else {}
    options |= {"max_epochs": 2 if steps.stop == STEPS else 1, "accumulate_grad_batches": 2}
    trainer, _ = fit(precision_of(kind), module, resume=folder / "half" if steps.start else None, **options)
    if steps.stop < STEPS:
        trainer.save_checkpoint(folder / "half")
    return module.rows[1::2]


CASES = [("SGD", "norm"), ("AdamW", "norm"), ("AdamW", "value"), ("AdamW-fused", None), ("SGD-fused", None)]


@pytest.mark.parametrize(("optimizer", "clip"), CASES)
@pytest.mark.parametrize("kind", ["ours", "plugin"])
def test_the_trainer_clips_skips_and_steps_as_with_torchs_scaler(kind: str, optimizer: str, clip: str | None):
    rows, theirs = (trained(one, optimizer, clip, schedule=None) for one in (kind, "torchs"))
    assert rows == theirs
    assert (column(rows, "scale"), column(rows, "tracker")) == (SCALES, TRACKERS)
    # The weights stay exactly where a step is skipped.
    weights = [bits(network()), *column(rows, "weights")]
    assert [old == new for old, new in itertools.pairwise(weights)] == SKIPS
    if clip == "norm":
        # Scaled gradients are hundreds of times larger.
        norms = [float(norm) for norm in column(rows, "norm")]
        assert [not 0 < norm <= 0.0101 for norm in norms] == [not math.isfinite(norm) for norm in norms] == SKIPS


@pytest.mark.parametrize("load", ["plugin", "torchs"])
@pytest.mark.parametrize("save", ["plugin", "torchs"])
def test_a_checkpoint_serves_either_plugin_and_schedules_that_hold(save: str, load: str, tmp_path: Path):
    # Those of Lightning's own plugin do not hold.
    holds = save == load == "plugin"
    settings = {} if holds else {"schedule": None}
    train = functools.partial(trained, name="AdamW", clip="norm", folder=tmp_path, **settings)
    rows = train(save, steps=range(HALF)) + train(load, steps=range(HALF, STEPS))
    assert rows == train(save if holds else "torchs")
    assert not holds or column(rows, "rate") == rates_of(TAKEN)


def test_a_run_that_differs_in_one_bit_is_found():
    other = network()
    other[0].bias.data[0] *= 1 + 2.0**-23
    assert bits(network()) != bits(other)


def test_a_loaded_scaler_is_made_ready_for_the_step_before_the_first_loss():
    # accelerate loads a sharded optimizer's state by a step of it with gradients of zero, and has the scaler's tensors
    # made before.
    run = Small(ours(), "AdamW")
    run.scaler.load_state_dict(ours().state_dict() | {"scale": 32.0, "_growth_tracker": 1})
    run.scaler._lazy_init_scale_growth_tracker(run.scaler._device)
    run.parameter.grad = torch.zeros_like(run.parameter)
    run.step()
    assert run.state == (32.0, 2)


# What Lightning's users do by hand.


def by_hand(calls: str, scale: float = 1024.0, count: int = 6, **settings):
    """Return a module of two networks that is trained by these calls, of each up to a bar, and its Trainer."""

    def make(calls: str, module, model, optimizer, batch, index: int):
        for call in calls.split():
            if call == "refuse":
                scaler_of(module).refuse(optimizer.optimizer)
            elif call == "backward":
                module.manual_backward(loss_of(model, batch))
            elif call == "overflow" or (call == "overflow-last" and model is module.networks[-1]):
                if index + 1 in module.overflows:
                    overflow(model)
            elif call == "clip":
                module.clip_gradients(optimizer, 0.1, module.clip)
            elif call == "step" or (call == "every-second-step" and index % 2):
                optimizer.step()
                optimizer.zero_grad()

    def loop(module, batch, index: int):
        for part in calls.split("|"):
            for model, optimizer in zip(module.networks, module.optimizers(), strict=True):
                given = part, module, model, optimizer, batch, index
                if part.startswith("minimise "):
                    optimizer.step(lambda given=given: (given[3].zero_grad(), make(*given)))
                else:
                    make(*given)
        for schedule in module.lr_schedulers() or ():
            schedule.step()

    module = module_class()(loop=loop, networks=2, **{"schedule": None, "overflows": (), **settings})
    return module, fit(plugin(scaler=GradScaler("cpu", init_scale=scale)), module, count)[0]


def scaler_of(module):
    return module.trainer.precision_plugin.scaler


# The loop, how it clips, of how many batches the first one overflows, and what becomes of the last steps; some have no
# gradients to clip yet.
BY_HAND = [
    *((calls, "norm", 6, "stepped") for calls in ("clip backward step", "backward clip | step")),
    *((calls, "value", 6, "stepped") for calls in ("backward clip every-second-step", "minimise backward clip")),
    *(("backward overflow clip every-second-step", clip, 2, "overflow") for clip in ("norm", "value")),
    ("minimise backward overflow clip", "norm", 1, "overflow"),
    ("refuse backward clip step", "norm", 1, "refused"),
]


@pytest.mark.filterwarnings("ignore:scale.. was not called in iteration:UserWarning")
@pytest.mark.parametrize(("calls", "clip", "count", "reason"), BY_HAND)
def test_what_is_clipped_by_hand_does_not_depend_on_the_scale_nor_step_with_a_part_of_what_is_accumulated(
    calls: str, clip: str, count: int, reason: str
):
    (scaled, trainer), (plain, _) = (by_hand(calls, scale, count, overflows={1}, clip=clip) for scale in (1024.0, 1.0))
    assert [scaler_of(scaled).last_step(one).reason for one in trainer.optimizers] == [reason] * 2
    assert scaler_of(scaled).get_scale() == (256.0 if reason == "overflow" else 1024.0)
    for one, other in zip(scaled.parameters(), plain.parameters(), strict=True):
        # A step moves the weights by 0.01, and float16 rounds.
        torch.testing.assert_close(one, other, rtol=0.0, atol=3e-4)
    assert (bits(*scaled.networks) == bits(network(), network(1))) == (reason != "stepped")


# Schedules.

# A schedule that decays whenever its metric is no better.
PLATEAU = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, factor=FACTOR, patience=0, threshold=0.0)
MONITORED = {"interval": "step", "monitor": "loss", "reduce_on_plateau": True}
# The first of its metrics is the best, and none of the others is better; it is stepped after the batch is noted.
MISSED = [0, *(max(0, number - 1) for number in TAKEN[:-1])]
# The module, the Trainer's options, and how often the schedule has been stepped after each batch or second one.
SCHEDULES: dict[str, tuple[dict[str, Any], dict[str, Any], list[int]]] = {
    "fused": ({"optimizer": "SGD-fused"}, {}, TAKEN),
    "accumulated": ({"optimizer": "AdamW"}, {"accumulate_grad_batches": 2}, TAKEN),
    "no-loss": ({"overflows": (), "missing": 3}, {}, [1, 2, 3, 3, 4]),
    "plateau": ({"schedule": MONITORED, "make_schedule": PLATEAU}, {}, MISSED),
    # The last step of the first of two epochs is skipped, and all of the second are taken.
    "epochs": ({"schedule": {"interval": "epoch"}}, {"max_epochs": 2}, [0] * 11 + [1] * 12 + [2]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_follows_the_steps_that_were_made(name: str):
    settings, options, taken = SCHEDULES[name]
    precision, micro = plugin(), options.get("accumulate_grad_batches", 1)
    count = len(taken) * micro // options.get("max_epochs", 1)
    # One plugin serves one fit after the other.
    for _ in range(2):
        module = module_class()(**settings)
        _, schedule = fit(precision, module, count, **options)
        assert column(module.rows, "rate")[micro - 1 :: micro] == rates_of(taken)
        assert schedule.last_epoch == taken[-1] + (name == "plateau")
    if taken is TAKEN:
        # Lightning's own steps it always.
        theirs = precision_of("torchs")
        assert fit(theirs, module_class()(**settings), count, **options)[1].last_epoch == STEPS


def test_two_optimizers_that_are_stepped_by_hand_hold_their_own_schedules_and_a_disabled_scaler_none():
    _, trainer = by_hand("backward overflow-last step", count=STEPS, overflows=BAD_STEPS, schedule={"interval": "step"})
    assert [config.scheduler.last_epoch for config in trainer.lr_scheduler_configs] == [TAKEN[-1], STEPS]
    module = module_class()(overflows=())
    _, schedule = fit(plugin(scaler=GradScaler("cpu", enabled=False)), module, 4)
    assert (schedule.last_epoch, column(module.rows, "rate")) == (4, rates_of([1, 2, 3, 4]))


def held_schedule():
    """Return a schedule that holds, its scaler, and a function that makes a step of its optimizer and its own."""
    run = Small(ours())
    held = plugins().GatedSchedule(run.scaler, run.optimizer, decaying(run.optimizer))

    def step():
        run.iterate(1.0)
        held.step()

    return held, run.scaler, step


def test_what_holds_is_a_schedule_in_all_else_and_an_older_state_of_the_scaler_leaves_no_step_out():
    held, scaler, step = held_schedule()
    assert isinstance(held, torch.optim.lr_scheduler.LRScheduler)
    held.gamma = 0.25
    assert held.state_dict()["gamma"] == held.gamma == 0.25
    older = scaler.state_dict()
    step()
    scaler.load_state_dict(older)
    step()
    assert held.last_epoch == 2
    held.load_state_dict(held.state_dict() | {"last_epoch": 7})
    # Its optimizer has made no step since, and so it makes none.
    held.step()
    assert held.last_epoch == 7
    assert not hasattr(held, "no_such_name")


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda held: pickle.loads(pickle.dumps(held))])
def test_a_copy_of_what_holds_holds_too(how: Callable[[Any], Any]):
    held, _, step = held_schedule()
    step()
    copied = how(held)
    assert type(copied) is type(held) is not copied.__class__
    # Whose optimizer has made no step since.
    copied.step()
    assert (copied.last_epoch, held.last_epoch) == (1, 1)
    step()
    assert (copied.last_epoch, held.last_epoch) == (2 if how is copy.copy else 1, 2)


@pytest.mark.parametrize("kind", ["MixedPrecision", "FabricMixedPrecision"])
def test_a_scaler_is_made_where_none_is_given_and_torchs_is_refused(kind: str):
    make = getattr(plugins(), kind)
    assert type(make(device="cpu").scaler) is GradScaler
    assert make("bf16-mixed", "cpu").scaler is None
    sharded = ShardedGradScaler("cpu")
    assert make("16-mixed", "cpu", sharded).scaler is sharded
    with pytest.raises(gradscale.InvalidTypeError, match=r"of gradscale_torch for '16-mixed', got <torch\.amp"):
        make("16-mixed", "cpu", TorchScaler("cpu"))
    for precision in ("bf16-mixed", "32-true"):
        guard = StepGuard()
        made = make(precision, "cpu", guard)
        assert (made.precision, made.scaler) == (precision, guard)
        assert torch.is_autocast_enabled("cpu") is False
        with made.forward_context():
            assert torch.is_autocast_enabled("cpu") is (precision == "bf16-mixed")
        with pytest.raises(gradscale.InvalidTypeError, match=f"scaler must be a StepGuard .* for {precision!r}, got"):
            make(precision, "cpu", sharded)
    with pytest.raises(Exception, match="Precision must be"):
        make("64-true", "cpu")


@pytest.mark.parametrize("wraps", [False, True], ids=["raw-optimizer", "fabrics-optimizer"])
def test_fabric_steps_a_schedule_with_its_optimizer_or_the_one_inside_and_without_a_scaler_always(wraps: bool):
    raw, kind = network(), "FabricMixedPrecision"
    plain = torch.optim.SGD(raw.parameters(), lr=0.1)
    schedule = decaying(plain)
    for taken, precision in enumerate((plugin(kind), getattr(plugins(), kind)("bf16-mixed", "cpu")), start=1):
        fabric = require("lightning").fabric.Fabric(accelerator="cpu", devices=1, plugins=precision)
        model, optimizer = fabric.setup(raw, plain)
        fabric.backward(loss_of(model, batches(1)[0]))
        optimizer.step()
        precision.step_schedule(optimizer if wraps else plain, schedule)
        assert schedule.last_epoch == taken
