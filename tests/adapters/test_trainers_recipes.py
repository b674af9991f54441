"""The recipes of the pages for torch keep the rules of check_trainer."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
from axes import require
from axes_torch import GradScaler, torch
from recipe_blocks import FRONT_PAGE, GUARD_PAGE, INTEROP, TORCH_PAGE
from recipe_optimizers import SAM, OptimizersContainer
from scenarios import rank_and_size
from waiting_trainers import RecipeTrainer, set_scale
from worlds import GlooWorld, each

from gradscale.testing import check_trainer

pytestmark = [pytest.mark.torch, pytest.mark.tier("all")]

nn = torch.nn
FEATURES, STEPS = 6, 6
BATCHES = list(torch.randn((STEPS, 8, FEATURES), generator=torch.Generator().manual_seed(1)))


WITH_SCHEDULE = ("schedule", "accelerate", "accelerate_bfloat16", "fabric", "fabric_bfloat16", "trainer", "after")
WITH_SCHEDULE += ("trainer_bfloat16",)


def loss_of(model, batch):
    return model(batch).float().square().mean()


def made(page, name: str, init_scale: float = 2.0**10, batches=BATCHES, **others) -> RecipeTrainer:
    """Return a recipe with what it takes for granted."""
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, 1))
    names: dict[str, Any] = {"model": model, "actor": model, "loss_of": loss_of}
    names["loss_fn"] = nn.functional.mse_loss
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if name in WITH_SCHEDULE:
        names["schedule"] = torch.optim.lr_scheduler.ExponentialLR(names["optimizer"], 0.9)
    names["scaler"] = GradScaler("cpu", growth_interval=3)
    if name.endswith("-first"):
        # It has a model of its own.
        batches = [batch[:, :4] for batch in batches]
    trainer = RecipeTrainer(page, name, batches, names | others)
    # The recipe's own scaler begins with one at which float16 overflows.
    set_scale(trainer.names["scaler"], init_scale)
    return trainer


PLAIN = [
    *((TORCH_PAGE, name) for name in ("schedule", "followers", "accumulate", "clip_value")),
    *((TORCH_PAGE, name) for name in ("clip_each", "penalty")),
    (INTEROP / "other.md", "apex_after"),
    (INTEROP / "torch_amp.md", "after"),
    (TORCH_PAGE.with_name("README.md"), "torch-first"),
]


@pytest.mark.parametrize(("page", "name"), PLAIN, ids=[name for _, name in PLAIN])
def test_a_recipe_of_one_process_has_no_fault(page, name: str):
    report = check_trainer(functools.partial(made, page, name), steps=STEPS)
    assert report.faults == []
    assert report.runs == 5 + 6 + 2 + STEPS


def gan(init_scale: float = 2.0**10) -> RecipeTrainer:
    """Return the recipe of a GAN, whose critic's outputs, and so both losses, are times ``fault``."""
    generator, critic = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.05) for one in (generator, critic)]
    names = {"model": generator, "critic": critic, "optimizer": optimizers[0], "critic_optimizer": optimizers[1]}
    trainer = made(TORCH_PAGE, "gan", init_scale, **names)
    critic.register_forward_hook(lambda _module, _inputs, outputs: outputs * trainer.fault)
    return trainer


def sam(init_scale: float = 2.0**10) -> RecipeTrainer:
    """Return the recipe of SAM, whose base optimizer is what a step changes."""
    model = nn.Linear(FEATURES, 1)
    climbing = SAM(model.parameters())
    return made(TORCH_PAGE, "sam", init_scale, model=model, sam=climbing, optimizer=climbing.base_optimizer)


def container(init_scale: float = 2.0**10) -> RecipeTrainer:
    """Return the recipe of a container of two optimizers."""
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1))
    inside = OptimizersContainer(model, lr=0.1, momentum=0.9)
    parts = dict(zip(("optimizer", "critic_optimizer"), inside.optimizers, strict=True))
    return made(TORCH_PAGE, "container", init_scale, model=model, container=inside, **parts)


@pytest.mark.parametrize("make", [gan, sam, container])
def test_a_recipe_of_several_optimizers_has_no_fault(make):
    assert check_trainer(make, steps=STEPS).faults == []


@pytest.mark.parametrize("name", ["fabric", "fabric_bfloat16"])
def test_fabrics_recipes_have_no_fault(name: str):
    require("lightning")
    assert check_trainer(lambda: made(TORCH_PAGE, name), steps=STEPS).faults == []


class WaitingForward(nn.Module):
    """A model whose forward pass waits for the next batch, and takes it: loops of hosts ask for theirs ahead."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(FEATURES, 1)

    def forward(self, inputs, labels=None):  # noqa: ARG002
        trainer = RecipeTrainer.running
        return {"loss": trainer.names["loss_of"](self.inner, next(trainer.loader))}


def in_lightning(name: str, init_scale: float = 2.0**10) -> RecipeTrainer:
    """Return a recipe of Lightning's Trainer."""
    model = WaitingForward()

    class Module(require("lightning").LightningModule):  # type: ignore[misc]
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch):
            return self.model(batch)

        def configure_optimizers(self):
            given = RecipeTrainer.running.names
            return [given["optimizer"]], [{"scheduler": given["schedule"], "interval": "step"}]

    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, **dict.fromkeys(silent, False)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    names = {"model": model, "module": Module(), "options": options, "optimizer": optimizer, "schedule": schedule}
    return made(TORCH_PAGE, name, init_scale, **names, loader=itertools.repeat(BATCHES[0]))


@pytest.mark.filterwarnings(r"ignore:.*isinstance\(treespec, LeafSpec\):FutureWarning")
@pytest.mark.parametrize("name", ["trainer", "trainer_bfloat16"])
def test_the_recipes_of_lightnings_trainer_have_no_fault(name: str):
    require("lightning")
    assert check_trainer(functools.partial(in_lightning, name), steps=STEPS).faults == []


def in_transformers(name: str, folder: str, init_scale: float = 2.0**10) -> RecipeTrainer:
    """Return a recipe of transformers' Trainer."""
    options = {"output_dir": folder, "use_cpu": True, "max_steps": 10**6, "per_device_train_batch_size": 8}
    options |= {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
    examples = [{"inputs": one, "labels": torch.zeros(1)} for one in BATCHES[0]]
    trainer = made(TORCH_PAGE, name, model=WaitingForward(), examples=examples, options=options)
    host = trainer.names["trainer"]
    parts = {"optimizer": host.optimizer, "schedule": host.lr_scheduler, "scaler": host.accelerator.scaler}
    trainer.names |= parts
    if name == "transformers":
        set_scale(host.accelerator.scaler, init_scale)
    return trainer


@pytest.mark.parametrize("name", ["transformers", "transformers_bfloat16"])
@pytest.mark.usefixtures("reset_accelerate")
def test_the_recipes_of_transformers_trainer_have_no_fault(name: str, tmp_path):
    require("transformers")
    assert check_trainer(functools.partial(in_transformers, name, str(tmp_path)), steps=STEPS).faults == []


@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:CUDA is not available or torch_xla is imported:UserWarning")
def test_ignites_recipe_has_no_fault():
    require("ignite")

    def make():
        model = nn.Linear(FEATURES, FEATURES)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return made(TORCH_PAGE, "ignite", model=model, optimizer=optimizer, schedule=schedule)

    assert check_trainer(make, steps=STEPS).faults == []


class MovesAllSchedules(GradScaler):
    def step_schedule(self, _, schedule):
        schedule.step()


def test_a_recipe_with_a_fault_is_found():
    def make():
        return made(TORCH_PAGE, "schedule", scaler=MovesAllSchedules("cpu"))

    # Not the first step: torch itself warns of a schedule that is moved before the optimizer.
    report = check_trainer(make, steps=STEPS, kinds=["inf"], bad_steps=[1, 3, (1, 2)], raises=False)
    assert [fault.part for fault in report.faults] == ["optimizer.param_groups[0].lr"] * 3, str(report)


@pytest.mark.parametrize("name", ["accelerate", "accelerate_bfloat16"])
@pytest.mark.usefixtures("reset_accelerate")
def test_accelerates_recipes_have_no_fault(name: str):
    require("accelerate")
    from accelerate.state import AcceleratorState

    def make():
        AcceleratorState._reset_state(reset_partial_state=True)
        return made(TORCH_PAGE, name)

    assert check_trainer(make, steps=STEPS).faults == []


def test_the_guards_recipe_has_no_fault():
    for page, name in ((GUARD_PAGE, "guard-torch"), (FRONT_PAGE, "guard-first")):
        assert check_trainer(functools.partial(made, page, name), steps=STEPS).faults == [], name


def faults_on_ranks(group, page, name: str):
    """Return the text of each fault of a recipe on one rank."""
    batches = [batch + rank_and_size(group)[0] for batch in BATCHES]

    def make(init_scale: float = 2.0**10):
        return made(page, name, init_scale, batches=batches, group=group)

    report = check_trainer(make, group=group, raises=False, steps=STEPS, kinds=["nan"])
    return [str(fault) for fault in report.faults]


OF_RANKS = [
    *((TORCH_PAGE, name) for name in ("ddp", "actor")),
    *((GUARD_PAGE, name) for name in ("guard-ddp", "guard-fsdp2")),
    *((INTEROP / f"{system}.md", "after") for system in ("deepspeed", "megatron")),
]


@pytest.mark.parametrize(("page", "name"), OF_RANKS, ids=[f"{page.stem}-{name}" for page, name in OF_RANKS])
def test_a_recipe_of_two_ranks_has_no_fault(page, name: str):
    ((_, faults),) = each(GlooWorld(2), faults_on_ranks, [(page, name)])
    assert faults == [[], []]


def pipeline(group, init_scale: float = 2.0**10) -> RecipeTrainer:
    """Return the recipe of a pipeline on one of two ranks, the outputs of whose stages are times ``fault``."""
    rank = rank_and_size(group)[0]
    parts = {index: nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for index in (rank, rank + 2)}
    optimizers = OptimizersContainer(parts.values(), lr=0.1, momentum=0.9)
    names = {"parts": parts, "optimizers": optimizers, "model": nn.ModuleList(parts.values())}
    names |= dict(zip(("optimizer", "critic_optimizer"), optimizers.optimizers, strict=True))
    trainer = made(TORCH_PAGE, "pipeline", init_scale, **names)
    for part in parts.values():
        part.register_forward_hook(lambda _module, _inputs, outputs: outputs * trainer.fault)
    return trainer


def faults_of_pipeline(group):
    """Return the text of each fault of the recipe on one rank."""
    report = check_trainer(functools.partial(pipeline, group), group=group, raises=False, steps=STEPS, kinds=["nan"])
    return [str(fault) for fault in report.faults]


def test_a_pipelines_recipe_has_no_fault():
    ((_, faults),) = each(GlooWorld(2), faults_of_pipeline, [()])
    assert faults == [[], []]


def faults_of_micro_batches(group):
    """Return the text of each fault of the recipe that leaves bad micro-batches out, on one rank."""
    batches = [batch + rank_and_size(group)[0] for batch in BATCHES]

    def make():
        return made(GUARD_PAGE, "guard-micro-batches", batches=batches)

    options = {"steps": 3, "bad_steps": [1], "kinds": ["nan"], "micro_batches": 4}
    return [str(fault) for fault in check_trainer(make, group=group, raises=False, **options).faults]


def test_the_recipe_of_bad_micro_batches_has_no_fault():
    ((_, faults),) = each(GlooWorld(2), faults_of_micro_batches, [()])
    assert faults == [[], []]
