"""Lightning and accelerate, and optimizers that are passed the scaler: with ours the skips and bits are torch's.

With the plugins for Lightning schedules hold on skipped steps, too.
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
from axes_torch import GradScaler, ShardedGradScaler, TorchScaler, torch
from small_torch import optimizer_of

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

# Scales after each of ten steps from 1024, growing after three clean ones, of which the third and the sixth overflow.
STEPS = 10
OVERFLOWS = (3, 6)
SCALES = [1024.0, 1024.0, 512.0, 512.0, 512.0, 256.0, 256.0, 256.0, 512.0, 512.0]
TRACKERS = [1, 2, 0, 1, 2, 0, 1, 2, 0, 1]
SKIPS = [step in OVERFLOWS for step in range(1, STEPS + 1)]
SETTINGS = {"init_scale": 1024.0, "growth_interval": 3}

Make = Callable[[], Any]
Row = dict[str, Any]


def torchs():
    """Return torch's scaler for the CPU."""
    return TorchScaler("cpu", **SETTINGS)


def ours():
    """Return ours."""
    return GradScaler("cpu", **SETTINGS)


def network(seed: int = 0):
    """Return a small network, with the same weights for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def batches(count: int = STEPS):
    """Return ``count`` inputs of the network, of shape ``(4, 8)``."""
    return list(torch.randn((count, 4, 8), generator=torch.Generator().manual_seed(1)))


def loss_of(model, batch):
    """Return the loss of a batch."""
    return model(batch).square().mean()


def trainer_with(precision, **options):
    """Return Lightning's Trainer for the CPU, which writes nothing."""
    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    given = {"max_epochs": 1, **dict.fromkeys(silent, False), **options}
    return require("lightning").pytorch.Trainer(accelerator="cpu", devices=1, plugins=precision, **given)


def overflow(model):
    """Put an inf into one gradient."""
    next(model.parameters()).grad.view(-1)[0] = math.inf


def bits(*models) -> str:
    """Return every bit of the weights."""
    return "".join(parameter.detach().numpy().tobytes().hex() for model in models for parameter in model.parameters())


def row(scaler, *models, **more) -> Row:
    """Return what is known after a step."""
    return {"scale": scaler.get_scale(), "tracker": scaler._get_growth_tracker(), "weights": bits(*models), **more}


def column(rows: list[Row], name: str):
    """Return one column."""
    return [row[name] for row in rows]


def same_as_torchs(run: Callable[[Make], list[Row]]) -> list[Row]:
    """Return the rows of a run with our scaler, which must be those of the same run with torch's."""
    rows = run(ours)
    assert rows
    assert rows == run(torchs)
    return rows


def check_run(rows: list[Row]):
    """Check the scales, the trackers, and that the weights stay exactly where a step is skipped."""
    assert column(rows, "scale") == SCALES
    assert column(rows, "tracker") == TRACKERS
    weights = [bits(network()), *column(rows, "weights")]
    assert [old == new for old, new in itertools.pairwise(weights)] == SKIPS


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


ALL = range(STEPS)


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
                host.backward(loss_of(model, batches(2 * STEPS)[index]))
                # In the first batch; the other one adds to it.
                if index == 2 * step and SKIPS[step]:
                    overflow(model)
                if clips and host.sync_gradients:
                    norm = repr(float(host.clip_grad_norm_(model.parameters(), 0.1)))
                wrapped.step()
                schedule.step()
                wrapped.zero_grad()
        skipped, [rate] = wrapped.step_was_skipped, schedule.get_last_lr()
        rows.append(row(scaler, model, norm=norm, skipped=skipped, rate=rate))
    if steps.stop < STEPS:
        host.save_state(folder)
    return rows


@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adam-foreach", "Adagrad", "AdamW-fused", "SGD-fused"])
def test_accelerate_sees_each_skip_and_clips_what_is_unscaled(accelerator, optimizer: str, clip: bool, tmp_path: Path):
    rows = same_as_torchs(lambda make: trained(accelerator, make, tmp_path, optimizer, clip))
    check_run(rows)
    # It misses the skips of fused optimizers, whose kernels make them.
    seen = [False] * STEPS if "fused" in optimizer else SKIPS
    assert column(rows, "skipped") == seen
    assert column(rows, "rate") == [0.1 * 0.5**taken for taken in itertools.accumulate(not each for each in seen)]
    if clip:
        # Before clipping; those of scaled gradients are hundreds of times larger.
        norms = [float(norm) for norm in column(rows, "norm")]
        assert [not 0 < norm < 10.0 for norm in norms] == [not math.isfinite(norm) for norm in norms] == SKIPS


@pytest.mark.parametrize("load", [torchs, ours])
@pytest.mark.parametrize("save", [torchs, ours])
def test_a_checkpoint_of_accelerate_serves_either_scaler(accelerator, save: Make, load: Make, tmp_path: Path):
    train = functools.partial(trained, accelerator, folder=tmp_path, name="AdamW", clips=True)
    begin = train(save, steps=range(5))
    saved = torch.load(tmp_path / "scaler.pt")
    factors = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
    assert saved == {"scale": 512.0, **factors, "_growth_tracker": 2}
    assert begin + train(load, steps=range(5, STEPS)) == train(torchs)


@pytest.mark.parametrize("make", [torchs, ours])
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


class Judging(TakesScaler):
    """As NeMo's: it unscales and judges by itself, and says so."""

    def step(self, closure=None, *, grad_scaler=None):  # noqa: ARG002
        (parameter,) = self.param_groups[0]["params"]
        parameter.grad.mul_(1 / grad_scaler._scale)
        grad_scaler._per_optimizer_states[id(self)]["found_inf_per_device"] = {torch.device("cpu"): torch.zeros(())}
        parameter.data.sub_(parameter.grad)


@pytest.mark.filterwarnings("ignore:.*takes grad_scaler=.*:FutureWarning")
def test_a_refused_step_of_an_optimizer_that_judges_by_itself_is_not_made_and_over_a_group_an_error():
    def refused(group=None) -> tuple[list[float], str]:
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer, scaler = Judging([parameter]), GradScaler("cpu", init_scale=4.0, group=group)
        scaler.scale(parameter.sum()).backward()
        scaler.refuse(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.counts()["refused"] == 1
        return parameter.tolist(), scaler.last_step(optimizer).reason

    assert refused() == ([0.0], "refused")
    with pytest.raises(gradscale.CallOrderError, match="let the framework's own flags skip the step"):
        gradscale.testing.run_ranks(2, refused)


def test_a_run_that_differs_in_one_bit_is_found():
    def run(make: Make) -> list[Row]:
        model = network()
        model[0].bias.data[0] *= 1 + 2.0**-23 * (make is ours)
        return [{"weights": bits(model)}]

    with pytest.raises(AssertionError):
        same_as_torchs(run)


# Lightning.

MANY = 12
BAD_STEPS = frozenset({1, 2, 4, 5, 6, 8, 9, 12})  # the first and the last, too
FACTOR = 0.5
TAKEN = [sum(taken not in BAD_STEPS for taken in range(1, step + 1)) for step in range(1, MANY + 1)]


def rates_of(taken: list[int]) -> list[float]:
    """Return the learning rates after so many steps of a schedule."""
    return [0.1 * FACTOR**number for number in taken]


def plugins():
    """Return the module of the plugins."""
    require("lightning")
    return importlib.import_module("gradscale_torch.plugins")


def decaying(optimizer):
    """Return a schedule whose rate tells how often it has been stepped."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, FACTOR)


def plateau(optimizer):
    """Return a schedule that decays whenever its metric is no better."""
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=FACTOR, patience=0, threshold=0.0)


def plugin(kind: str = "MixedPrecision", scaler=None):
    """Return a plugin of ours for the CPU."""
    return getattr(plugins(), kind)("16-mixed", "cpu", scaler or ours())


def lightnings(make: Make = torchs):
    """Return Lightning's own plugin, with torch's scaler or another one."""
    return require("lightning").pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler=make())


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
            gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
            # What is left in the gradients of a fused optimizer is no result.
            norm = None if "fused" in self.optimizer else repr(torch.nn.utils.get_total_norm(gradients).item())
            rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            self.rows.append(row(self.trainer.precision_plugin.scaler, self, norm=norm, rate=rate))

        def configure_optimizers(self):
            made = [optimizer_of(self.optimizer, one.parameters(), lr=0.1) for one in self.networks]
            # In another order than the optimizers.
            schedules = [
                {"scheduler": self.make_schedule(one)} | self.schedule for one in reversed(made) if self.schedule
            ]
            return made, schedules

    return Module


def fit(precision, module, count: int = MANY, *, resume: Path | None = None, **options):
    """Train a module, and return the Trainer and its schedule, if there is one."""
    trainer = trainer_with(precision, **options)
    trainer.fit(module, torch.utils.data.DataLoader(batches(count), batch_size=None), ckpt_path=resume)
    return trainer, next((config.scheduler for config in trainer.lr_scheduler_configs), None)


CASES = [
    ("SGD", "norm", 1),
    ("AdamW", "norm", 2),
    ("AdamW", "value", 1),
    ("AdamW-fused", None, 1),
    ("SGD-fused", None, 1),
]


@pytest.mark.parametrize("precision", [lambda: lightnings(ours), plugin], ids=["lightnings", "ours"])
@pytest.mark.parametrize(("optimizer", "clip", "micro"), CASES)
def test_the_trainer_clips_skips_and_steps_as_with_torchs_scaler(
    precision: Callable[[], Any], optimizer: str, clip: str | None, micro: int
):
    seen = []
    for make in (precision, lightnings):
        module = module_class()(optimizer, schedule=None, overflows=OVERFLOWS)
        options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": clip} if clip else {}
        fit(make(), module, STEPS * micro, accumulate_grad_batches=micro, **options)
        seen.append(module.rows[micro - 1 :: micro])
    assert seen[0] == seen[1]
    check_run(seen[0])
    if clip == "norm":
        # Scaled gradients are hundreds of times larger.
        norms = [float(norm) for norm in column(seen[0], "norm")]
        assert [not 0 < norm <= 0.0101 for norm in norms] == [not math.isfinite(norm) for norm in norms] == SKIPS


# Clipped by hand.


@pytest.mark.parametrize("place", ["loop", "closure"])
@pytest.mark.parametrize("clip", ["norm", "value"])
def test_gradients_that_are_clipped_by_hand_are_unscaled_before(clip: str, place: str):
    def loop(module, batch, _: int):
        optimizer = module.optimizers()

        def closure():
            optimizer.zero_grad()
            module.manual_backward(loss_of(module.networks[0], batch))
            if module.trainer.global_step + 1 in module.overflows:
                overflow(module)
            module.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm=clip)

        if place == "loop":
            closure()
        optimizer.step(*[closure] * (place == "closure"))

    by_hand, automatic = (module_class()(loop=one, schedule=None) for one in (loop, None))
    fit(plugin(), by_hand)
    fit(plugin(), automatic, gradient_clip_val=0.01, gradient_clip_algorithm=clip)
    for step in BAD_STEPS if clip == "value" else ():
        # Clipped by hand they are NaN then, and the step is skipped.
        assert by_hand.rows[step - 1].pop("norm") == "nan" != automatic.rows[step - 1].pop("norm")
    assert by_hand.rows == automatic.rows
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(plugin(), module_class()("SGD-fused", loop, schedule=None))


# What a loop does with a network and its optimizer.
CALLS: dict[str, Callable[[Any, Any, Any, Any, int], object]] = {
    "refuse": lambda module, _model, optimizer, *_: scaler_of(module).refuse(optimizer.optimizer),
    "backward": lambda module, model, _, batch, _index: module.manual_backward(loss_of(model, batch)),
    "overflow": lambda module, model, _, _batch, index: overflow(model) if index in module.overflows else None,
    "overflow-last": lambda module, model, *others: (
        CALLS["overflow"](module, model, *others) if model is module.networks[-1] else None
    ),
    "clip": lambda module, _model, optimizer, *_: module.clip_gradients(optimizer, 0.1, module.clip),
    "step": lambda _module, _model, optimizer, *_: (optimizer.step(), optimizer.zero_grad()),
    "every-second-step": lambda *given: CALLS["step"](*given) if given[-1] % 2 else None,
}


def scaler_of(module):
    return module.trainer.precision_plugin.scaler


def by_hand(calls: str, scale: float = 1024.0, count: int = 6, **settings):
    """Return a module of two networks that is trained by these calls, of each up to a bar, and its Trainer."""

    def loop(module, batch, index: int):
        for part in calls.split("|"):
            for model, optimizer in zip(module.networks, module.optimizers(), strict=True):
                for call in part.split():
                    CALLS[call](module, model, optimizer, batch, index)
        for schedule in module.lr_schedulers() or ():
            schedule.step()

    module = module_class()(loop=loop, networks=2, **{"schedule": None, "overflows": (), **settings})
    return module, fit(plugin(scaler=GradScaler("cpu", init_scale=scale)), module, count)[0]


@pytest.mark.filterwarnings("ignore:scale.. was not called in iteration:UserWarning")
@pytest.mark.parametrize(
    # The first has no gradients to clip yet.
    "calls",
    ["clip backward step", "backward clip | step", "backward clip every-second-step"],
)
def test_the_scale_changes_nothing_of_what_is_clipped_by_hand(calls: str):
    (scaled, _), (plain, _) = (by_hand(calls, scale) for scale in (1024.0, 1.0))
    for one, other in zip(scaled.parameters(), plain.parameters(), strict=True):
        # A step moves the weights by 0.01, and float16 rounds.
        torch.testing.assert_close(one, other, rtol=0.0, atol=3e-4)


@pytest.mark.parametrize(
    ("calls", "clip", "reason", "scale"),
    [
        *(("backward overflow clip every-second-step", clip, "overflow", 256.0) for clip in ("norm", "value")),
        ("refuse backward clip step", "norm", "refused", 1024.0),
    ],
)
def test_a_bad_step_that_is_clipped_by_hand_is_not_made_of_all_that_is_accumulated(
    calls: str, clip: str, reason: str, scale: float
):
    module, trainer = by_hand(calls, count=2 if reason == "overflow" else 1, overflows={0}, clip=clip)
    assert [scaler_of(module).last_step(one).reason for one in trainer.optimizers] == [reason] * 2
    assert (bits(*module.networks), scaler_of(module).get_scale()) == (bits(network(), network(1)), scale)


# Schedules.

MONITORED = {"interval": "step", "monitor": "loss", "reduce_on_plateau": True}
# The first of its metrics is the best, and none of the others is better; it is stepped after the batch is noted.
MISSED = [0, *(max(0, number - 1) for number in TAKEN[:-1])]
# The module, the Trainer's options, how many batches, and how often the schedule has been stepped after each of them.
SCHEDULES: dict[str, tuple[dict[str, Any], dict[str, Any], int, list[int]]] = {
    **{name: ({"optimizer": name}, {}, MANY, TAKEN) for name in ("SGD", "AdamW", "SGD-fused", "AdamW-fused")},
    "accumulated": ({}, {"accumulate_grad_batches": 2}, 2 * MANY, TAKEN),
    "no-first-loss": ({"overflows": (), "missing": 0}, {}, 5, [0, 1, 2, 3, 4]),
    "no-loss": ({"overflows": (), "missing": 3}, {}, 5, [1, 2, 3, 3, 4]),
    "plateau": (
        {"schedule": MONITORED, "make_schedule": plateau},
        {},
        MANY,
        MISSED,
    ),
    # The last step of the first of two epochs is skipped, and all of the second are taken.
    "epochs": ({"schedule": {"interval": "epoch"}}, {"max_epochs": 2}, MANY, [0] * 11 + [1] * 12 + [2]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_follows_the_steps_that_were_made(name: str):
    settings, options, count, taken = SCHEDULES[name]
    precision = plugin()
    # One plugin serves one fit after the other.
    for _ in range(2):
        module = module_class()(**settings)
        _, schedule = fit(precision, module, count, **options)
        step = count // MANY or 1
        assert column(module.rows, "rate")[step - 1 :: step] == rates_of(taken)
        assert isinstance(schedule, torch.optim.lr_scheduler.LRScheduler)
        assert schedule.last_epoch == taken[-1] + (name == "plateau")
    if taken is TAKEN:
        assert precision.scaler.get_scale() == SETTINGS["init_scale"] / 2**16
        # Lightning's own steps it always.
        assert fit(lightnings(), module_class()(**settings), count, **options)[1].last_epoch == MANY


def test_two_optimizers_that_are_stepped_by_hand_hold_their_own_schedules_and_a_disabled_scaler_none():
    overflows = {step - 1 for step in BAD_STEPS}
    calls, config = "backward overflow-last step", {"interval": "step"}
    _, trainer = by_hand(calls, count=MANY, overflows=overflows, schedule=config)
    assert [config.scheduler.last_epoch for config in trainer.lr_scheduler_configs] == [4, 12]
    module = module_class()(overflows=())
    _, schedule = fit(plugin(scaler=GradScaler("cpu", enabled=False)), module, 4)
    assert (schedule.last_epoch, column(module.rows, "rate")) == (4, rates_of([1, 2, 3, 4]))


@pytest.mark.parametrize("load", [plugin, lightnings])
@pytest.mark.parametrize("save", [plugin, lightnings])
def test_a_checkpoint_serves_either_plugin(save, load, tmp_path: Path):
    checkpoint = tmp_path / "half.ckpt"
    trainer, _ = fit(save(), module_class()("AdamW"), MANY // 2)
    trainer.save_checkpoint(checkpoint)
    saved = torch.load(checkpoint, weights_only=True)
    scale = SETTINGS["init_scale"] / 2**5
    assert saved["MixedPrecision"]["scale"] == scale
    assert saved["lr_schedulers"][0]["last_epoch"] == (1 if save is plugin else MANY // 2)

    resumed = module_class()("AdamW")
    trainer, _ = fit(load(), resumed, MANY // 2, resume=checkpoint, max_epochs=2)
    skipped = sum(step > MANY // 2 for step in BAD_STEPS)
    assert trainer.precision_plugin.state_dict()["scale"] == scale / 2**skipped
    if save == load:
        through = module_class()("AdamW")
        fit(load(), through, MANY // 2, max_epochs=2)
        assert through.rows[MANY // 2 :] == resumed.rows


def held_schedule():
    """Return a schedule that holds, its scaler, and a function that makes a step of its optimizer and its own."""
    scaler, optimizer = ours(), torch.optim.SGD(network().parameters(), lr=0.1)
    held = plugins().HeldSchedule(scaler, optimizer, decaying(optimizer))

    def step():
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        held.step()

    return held, scaler, step


def test_what_holds_is_a_schedule_in_all_else_and_an_older_state_of_the_scaler_leaves_no_step_out():
    held, scaler, step = held_schedule()
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
    # Nor has one that is not made yet.
    for made, name in ((held, "no_such_name"), (type(held).__new__(type(held)), "last_epoch")):
        assert not hasattr(made, name)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda held: pickle.loads(pickle.dumps(held)),
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_what_holds_holds_too(how: str):
    held, _, step = held_schedule()
    step()
    copied = COPIES[how](held)
    assert type(copied) is type(held) is not copied.__class__
    # Whose optimizer has made no step since.
    copied.step()
    assert (copied.last_epoch, held.last_epoch) == (1, 1)
    step()
    assert (copied.last_epoch, held.last_epoch) == (2 if how == "copy" else 1, 2)


@pytest.mark.parametrize("kind", ["MixedPrecision", "FabricMixedPrecision"])
def test_a_scaler_is_made_where_none_is_given_and_torchs_is_refused(kind: str):
    make = getattr(plugins(), kind)
    assert type(make(device="cpu").scaler) is GradScaler
    assert make("bf16-mixed", "cpu").scaler is None
    sharded = ShardedGradScaler("cpu")
    assert make("16-mixed", "cpu", sharded).scaler is sharded
    with pytest.raises(gradscale.InvalidTypeError, match=r"of gradscale_torch, got <torch\.amp"):
        make("16-mixed", "cpu", TorchScaler("cpu"))


# Fabric.


def fabric_with(precision):
    """Return Fabric for the CPU."""
    return require("lightning").fabric.Fabric(accelerator="cpu", devices=1, plugins=precision)


@pytest.mark.parametrize("wraps", [False, True], ids=["raw-optimizer", "fabrics-optimizer"])
def test_fabric_holds_a_schedule_and_saves_the_scaler(wraps: bool, tmp_path: Path):
    def train(steps: range, resume: bool = False):
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
        for index in steps:
            fabric.backward(loss_of(model, batches(MANY)[index]))
            if index + 1 in BAD_STEPS:
                overflow(raw)
            fabric.clip_gradients(model, optimizer, max_norm=0.01, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
            precision.step_schedule(optimizer if wraps else plain, schedule)
            rates.append(plain.param_groups[0]["lr"])
        if steps.stop < MANY:
            fabric.save(tmp_path / "half.ckpt", state)
        return rates, bits(raw), precision.scaler.state_dict()

    through = train(range(MANY))
    assert through[0] == rates_of(TAKEN)
    first = train(range(5))
    second = train(range(5, MANY), resume=True)
    assert first[0] + second[0] == rates_of(TAKEN)
    assert second[1:] == through[1:]


@pytest.mark.parametrize("wraps", [False, True], ids=["raw-optimizer", "fabrics-optimizer"])
def test_fabric_takes_an_optimizer_that_holds_another_for_what_it_is(wraps: bool):
    class Lookahead(torch.optim.Optimizer):  # type: ignore[misc]
        def __init__(self, optimizer):
            super().__init__(optimizer.param_groups, {})
            self.optimizer = optimizer

        def step(self, closure=None):
            return self.optimizer.step(closure)

    precision, raw = plugin("FabricMixedPrecision"), network()
    fabric = fabric_with(precision)
    plain = Lookahead(torch.optim.SGD(raw.parameters(), lr=0.1))
    schedule = decaying(plain.optimizer)
    model, optimizer = fabric.setup(raw, plain)
    fabric.backward(loss_of(model, batches(1)[0]))
    optimizer.step()
    precision.step_schedule(optimizer if wraps else plain, schedule)
    assert schedule.last_epoch == 1


def test_fabric_without_a_scaler_steps_a_schedule_always():
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    schedule = decaying(optimizer)
    optimizer.step()
    plugins().FabricMixedPrecision("bf16-mixed", "cpu").step_schedule(optimizer, schedule)
    assert optimizer.param_groups[0]["lr"] == 0.05
