"""The pages' recipes for torch: each block runs against its host, skips, and leaves alone what a skip must leave."""

from __future__ import annotations

import collections
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from axes import require
from axes_torch import GradScaler, gradscale_torch, torch
from recipe_blocks import GUARD_PAGE, TORCH_PAGE, blocks_on, run_on
from worlds import GlooWorld, each

import gradscale

pytestmark = [
    pytest.mark.torch,
    pytest.mark.tier("all"),
    # Lightning 2.6 itself uses what torch 2.13 has deprecated, and so does ignite 0.5.
    pytest.mark.filterwarnings(r"ignore:.*isinstance\(treespec, LeafSpec\):FutureWarning"),
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.* does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:CUDA is not available or torch_xla is imported:UserWarning"),
]

recipes = importlib.import_module("recipe_scenarios")
OVERFLOWS = (1, 3, 8)  # of 8 batches: the first and the last, too
SKIPS = [batch in OVERFLOWS for batch in range(1, 9)]
NAMES = {
    *("accumulate", "clip_norm", "clip_value", "clip_each", "gan", "penalty", "resume"),
    *("ddp", "schedule", "followers", "sam", "actor", "checkpoint", "torchtitan", "container", "pipeline"),
    *("trainer", "fabric", "accelerate", "accelerate_fsdp2", "transformers", "transformers_bfloat16"),
    *("timm", "ignite", "keras"),
}
# The first micro-batch of the second batch, and the last one of the fourth.
MICRO_OVERFLOWS = (5, 16)
PARTS = range(4)  # of the pipeline, two on each of two ranks


def common(overflows: tuple[int, ...] = OVERFLOWS):
    """Return what most recipes take for granted."""
    names: dict[str, Any] = recipes.granted(overflows)
    return names | {"scaler": GradScaler("cpu")}


def skips(scaler) -> list[bool]:
    """Return whether each step was skipped."""
    return [report.skipped for report in scaler.history]


def test_every_block_is_known():
    assert set(blocks_on(TORCH_PAGE)) == NAMES


# Hosts of one process.


def for_lightning(given: dict[str, Any], _: Path):
    """Return what the recipe of Lightning's Trainer takes for granted."""

    class Module(require("lightning").LightningModule):  # type: ignore[misc]
        def __init__(self):
            super().__init__()
            self.model = given["model"]

        def training_step(self, batch):
            return given["loss_of"](self.model, batch)

        def configure_optimizers(self):
            schedule = {"scheduler": given["schedule"], "interval": "step"}
            return {"optimizer": given["optimizer"], "lr_scheduler": schedule}

    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, **dict.fromkeys(silent, False)}
    return {
        "loader": torch.utils.data.DataLoader(given["loader"], batch_size=None),
        "module": Module(),
        "options": options,
    }


def for_transformers(given: dict[str, Any], folder: Path):
    """Return what the recipes of transformers' Trainer take for granted."""

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self):
            super().__init__()
            self.inner = given["model"]

        def forward(self, inputs, labels):
            assert labels.shape == (8, 1)
            return {"loss": given["loss_of"](self.inner, inputs)}

    options = {"output_dir": str(folder), "use_cpu": True, "num_train_epochs": 1, "per_device_train_batch_size": 8}
    silent = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
    examples = [{"inputs": one, "labels": torch.zeros(1)} for batch in recipes.made_loader() for one in batch]
    return {"model": Model(), "examples": examples, "options": options | silent}


def import_torchvision():
    """Import it also where it is one for CUDA and torch one for the CPU, as timm does."""
    if importlib.util.find_spec("torchvision") is not None:
        try:
            importlib.import_module("torchvision")
        except RuntimeError:
            # It finds none of its operators, two of which it takes for granted. Nothing here calls them.
            for name in ("nms", "qnms"):
                torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou) -> Tensor")


def for_timm(given: dict[str, Any], _: Path):
    """Return a schedule of timm's."""
    from timm.scheduler import StepLRScheduler

    return {"schedule": StepLRScheduler(given["optimizer"], decay_t=1, decay_rate=0.5, t_in_epochs=False)}


def for_ignite(given: dict[str, Any], _: Path):
    """Return what the recipe of ignite takes for granted."""

    def loss_fn(outputs, targets):
        assert targets.shape == (8, recipes.FEATURES)
        return given["loss_of"](torch.nn.Identity(), outputs)

    return {"loss_fn": loss_fn, "pairs": recipes.pairs()}


def saved_by_fabric(names: dict[str, Any]) -> int:
    assert torch.load(names["path"], weights_only=True)["precision"] == names["precision"].scaler.state_dict()
    return names["schedule"].last_epoch


TRANSFORMERS: tuple[Any, ...] = (
    for_transformers,
    lambda names: names["trainer"].accelerator.scaler,
    [lambda names: names["trainer"].lr_scheduler.last_epoch],
)
ADVANCED = [lambda names: names["schedule"].last_epoch]
# The library, what its recipe takes for granted, its scaler, and what counts the steps that were made.
HOSTS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any], list[Callable[..., int]]]] = {
    "schedule": ("torch", lambda *_: {}, lambda names: names["scaler"], ADVANCED),
    "followers": (
        "torch",
        lambda *_: {},
        lambda names: names["scaler"],
        [lambda names: names["steps"], lambda names: int(names["average"].n_averaged)],
    ),
    "accelerate": (
        "accelerate",
        lambda *_: {},
        lambda names: names["accelerator"].scaler,
        [lambda names: names["schedule"].scheduler.last_epoch],
    ),
    "trainer": ("lightning", for_lightning, lambda names: names["scaler"], ADVANCED),
    "fabric": (
        "lightning",
        lambda _, folder: {"path": folder / "fabric.ckpt"},
        lambda names: names["precision"].scaler,
        [saved_by_fabric],
    ),
    "transformers": ("transformers", *TRANSFORMERS),
    "transformers_bfloat16": ("transformers", *TRANSFORMERS),
    "timm": (
        "timm",
        for_timm,
        lambda names: names["loss_scaler"]._scaler,
        [
            lambda names: names["updates"],
            lambda names: round(math.log2(0.1 / names["optimizer"].param_groups[0]["lr"])),
        ],
    ),
    "ignite": ("ignite", for_ignite, lambda names: names["scaler"], ADVANCED),
}


@pytest.mark.usefixtures("reset_accelerate")
@pytest.mark.parametrize("name", HOSTS)
def test_bad_steps_are_skipped_and_what_follows_the_optimizer_holds(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    library, granted, scaler_of, steps = HOSTS[name]
    if name == "timm":
        import_torchvision()
    require(library)
    given = common()
    names = given | recipes.run_block(name, **given | granted(given, tmp_path))
    assert skips(scaler_of(names)) == SKIPS
    assert [count(names) for count in steps] == [5] * len(steps)
    if name == "trainer":
        assert "StepReport(skipped=True" in capsys.readouterr().out
    if name == "schedule":
        # It is resumed with its schedule and its scale.
        resumed = recipes.run_block("resume", **names | {"path": tmp_path / "run.pt"})
        assert resumed["scaler"] is not names["scaler"]
        assert resumed["scaler"].state_dict() == names["scaler"].state_dict()
        assert resumed["schedule"].last_epoch == 5


# Problems.


CLIPPED: dict[str, Any] = {
    "clip_norm": lambda weights: torch.nn.utils.clip_grad_norm_(weights, 1.0),
    "clip_value": lambda weights: torch.nn.utils.clip_grad_value_(weights, 0.5),
    "clip_each": lambda weights: [torch.nn.utils.clip_grad_norm_(weight, 1.0) for weight in weights],
    "accumulate": lambda _: None,
    "penalty": lambda _: None,
}


@pytest.mark.parametrize("name", CLIPPED)
def test_a_problems_recipe_is_plain_training_in_float32_without_the_batches_that_overflow(name: str):
    skipped = (2, 4) if name == "accumulate" else OVERFLOWS
    # Of four micro-batches a batch, the first one of the second batch and the last one of the fourth.
    given = common(MICRO_OVERFLOWS if name == "accumulate" else OVERFLOWS)
    given["loss_of"] = Steep(given["loss_of"].overflows)
    names = recipes.run_block(name, **given)
    assert [report.iteration for report in names["scaler"].history if report.skipped] == list(skipped)
    assert names["scaler"].get_scale() == 2.0 ** (16 - len(skipped))

    plain = common(())
    model, optimizer, loss_of = plain["model"], plain["optimizer"], Steep()
    is_clipped = False
    for number, batch in enumerate(recipes.made_loader(), start=1):
        if number in skipped:
            continue
        loss = loss_of(model, batch)
        if name == "penalty":
            grads = torch.autograd.grad(loss, model.parameters(), create_graph=True)
            loss = loss + 0.01 * sum(grad.square().sum() for grad in grads)
        loss.backward()
        before = [weight.grad.clone() for weight in model.parameters()]
        CLIPPED[name](list(model.parameters()))
        is_clipped |= any(not weight.grad.equal(grad) for weight, grad in zip(model.parameters(), before, strict=True))
        optimizer.step()
        optimizer.zero_grad()
    assert is_clipped == name.startswith("clip")
    # Norms and means are summed in another order.
    torch.testing.assert_close(list(given["model"].parameters()), list(model.parameters()), rtol=1e-4, atol=1e-6)


class Steep(recipes.Losses):  # type: ignore[misc]
    """Losses whose gradients are large enough to be clipped."""

    def __call__(self, model, batch):
        return 8.0 * super().__call__(model, batch)


def counted(*optimizers):
    """Return how often each of some optimizers is stepped."""
    steps = collections.Counter[int]()
    for index, one in enumerate(optimizers):
        one.register_step_post_hook(lambda *_, index=index: steps.update([index]))
    return steps


def test_each_of_a_gans_optimizers_skips_by_itself_and_the_scale_falls_once():
    given = common(())
    critic = recipes.made_model(1)
    generator = torch.nn.Linear(recipes.FEATURES, recipes.FEATURES)
    optimizer, critic_optimizer = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (generator, critic))
    # The critic's gradients overflow in its own pass of the second batch and of the fourth, and the generator's in the
    # third and the fourth. The critic's are accumulated twice in a batch.
    critic[0].weight.register_post_accumulate_grad_hook(recipes.overflowing({3, 7}))
    generator.weight.register_post_accumulate_grad_hook(recipes.overflowing({3, 4}))
    steps = counted(optimizer, critic_optimizer)
    names = given | {"model": generator, "optimizer": optimizer, "critic": critic}
    names = recipes.run_block("gan", **names | {"critic_optimizer": critic_optimizer})
    assert steps == {0: 6, 1: 6}
    # Batches 2, 3 and 4, of which the last has two overflows.
    assert names["scaler"].get_scale() == 2.0**13


def test_the_optimizers_of_a_container_skip_together():
    given = common(())
    model = given["model"]
    # Of one optimizer's gradients alone.
    model[2].weight.register_post_accumulate_grad_hook(recipes.overflowing(OVERFLOWS))
    container = recipes.OptimizersContainer([model[0], model[2]], lr=0.1)
    steps = counted(*container.optimizers)
    names = recipes.run_block("container", **given | {"container": container})
    assert (skips(names["scaler"]), steps, names["scaler"].get_scale()) == (SKIPS, {0: 5, 1: 5}, 2.0**13)


class SAM:
    """Sharpness-aware minimisation with the interface of davda54/sam, of weights that all have gradients."""

    def __init__(self, parameters):
        self.base_optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups
        self.zero_grad = self.base_optimizer.zero_grad
        self.state: dict[Any, Any] = collections.defaultdict(dict)

    def first_step(self, zero_grad: bool = False):
        """Climb, and remember where from."""
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in self.param_groups[0]["params"]])
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["old_p"] = weight.data.clone()
            weight.data.add_(weight.grad * (0.05 / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    def second_step(self):
        """Go back, and step."""
        for weight, kept in self.state.items():
            weight.data = kept["old_p"]
        self.base_optimizer.step()


@pytest.mark.parametrize("bad", [None, 3, 4], ids=["finite", "first-pass", "second-pass"])
def test_sam_in_two_steps_is_sam_in_float32_without_the_batches_that_overflow(bad: int | None):
    # Of the second batch.
    given = common(() if bad is None else (bad,))
    names = recipes.run_block("sam", **given | {"sam": SAM(given["model"].parameters())})
    assert [index + 1 for index, skipped in enumerate(skips(names["scaler"])) if skipped] == [bad] * (bad is not None)
    model = recipes.made_model()
    sam, loss_of = SAM(model.parameters()), recipes.Losses()
    for number, batch in enumerate(recipes.made_loader(), start=1):
        if number == 2 and bad is not None:
            continue
        sam.zero_grad()
        loss_of(model, batch).backward()
        sam.first_step(zero_grad=True)
        loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        sam.second_step()
    # The norm is summed in another order than torch's.
    torch.testing.assert_close(list(given["model"].parameters()), list(model.parameters()), rtol=1e-5, atol=1e-7)


# Two ranks.

# The scenario, in which batches one rank overflows, and what both ranks have then.
TOGETHER: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "ddp": (OVERFLOWS, {"skipped": [*OVERFLOWS], "scale": 2.0**13, "steps": {5.0}, "advanced": 5}),
    "actor": (
        MICRO_OVERFLOWS,
        {"skipped": [2, 4], "scale": 2.0**14, "dtypes": {"torch.float16"}}
        | {"masters": {"torch.float32"}, "moments": {"torch.float32"}},
    ),
    "torchtitan": (
        OVERFLOWS,
        {"skipped": [*OVERFLOWS], "scale": 2.0**13, "steps": {5.0}, "fused": [True, False]}
        # The warm-up's next step is the sixth of eight.
        | {"rates": pytest.approx([0.01 * 6 / 8] * 2)},
    ),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_both_ranks_skip_together_and_what_follows_the_optimizers_holds(name: str):
    if name == "torchtitan":
        require("torchtitan")
    overflows, expected = TOGETHER[name]
    for _, answers in each(GlooWorld(2), getattr(recipes, name), [(overflows, bad_rank) for bad_rank in (0, 1)]):
        assert answers[0] == answers[1]
        assert {key: answers[0][key] for key in expected} == expected


def test_dcp_saves_and_loads_the_scaler(tmp_path: Path):
    ((_, answers),) = each(GlooWorld(2), recipes.checkpoint, [(str(tmp_path / "dcp"),)])
    for answer in answers:
        assert answer["before"] == answer["after"]
        assert (answer["after"]["scale"], answer["after"]["growth_interval"]) == (2.0**15, 400)


def test_accelerates_checkpoint_of_fsdp2_leaves_the_scaler_as_it_was_if_it_is_loaded_last(tmp_path: Path):
    require("accelerate")
    ((_, answers),) = each(GlooWorld(2), recipes.accelerate_fsdp2, [(str(tmp_path / "state"),)])
    for answer in answers:
        assert (answer["saved"]["scale"], answer["saved"]["_growth_tracker"]) == (1024.0, 1)
        # Once it is not, the page need not say so.
        assert (answer["loaded"]["scale"], answer["loaded"]["_growth_tracker"]) == (2048.0, 0)
        assert answer["by the recipe"] == answer["saved"]


@pytest.mark.parametrize("bad_part", [None, *PARTS])
def test_all_stages_of_a_pipeline_skip_when_one_part_of_one_overflows(bad_part: int | None):
    skipped = [] if bad_part is None else [2, 4]
    ((_, answers),) = each(GlooWorld(2), recipes.pipeline, [(MICRO_OVERFLOWS if skipped else (), bad_part or 0)])
    assert [answer["skipped"] for answer in answers] == [skipped] * 2
    for rank, answer in enumerate(answers):
        assert answer["local"] == (skipped if (bad_part or 0) % 2 == rank else [])
    assert [answer["scale"] for answer in answers] == [2.0**14 if skipped else 2.0**16] * 2
    # As plain training in float32 but for the skipped batches.
    model = torch.nn.Sequential(*recipes.made_parts())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, (inputs, targets) in enumerate(recipes.pairs(), start=1):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if number not in skipped:
            optimizer.step()
    trained = {index: part for answer in answers for index, part in answer["weights"].items()}
    mine = [torch.tensor(weight) for index in PARTS for weight in trained[index]]
    # The mean is of micro-batches, and the norm's sum in another order.
    torch.testing.assert_close(mine, [*map(torch.Tensor.detach, model.parameters())], rtol=1e-5, atol=1e-6)


# Guards that skip spikes in bfloat16.

SPIKE = 70  # of 72 batches


def test_the_loop_of_one_process_skips_a_spike():
    model = recipes.made_model()
    given: dict[str, Any] = {"gradscale": gradscale, "gradscale_torch": gradscale_torch, "model": model}
    given["optimizer"] = torch.optim.AdamW(model.parameters(), lr=0.01)
    given |= {"loader": recipes.made_loader(72), "loss_of": recipes.Losses((SPIKE,), 1e6)}
    guard = run_on(GUARD_PAGE, "spikes", **given)["guard"]
    skipped = [(report.iteration, report.reason, report.by) for report in guard.history if report.skipped]
    assert skipped == [(SPIKE, "spike", 0)]


@pytest.mark.parametrize("name", ["guard_ddp", "guard_fsdp2", "torchtitan"])
def test_no_rank_makes_the_step_of_a_batch_that_is_a_spike_on_one(name: str):
    if name == "torchtitan":
        require("torchtitan")
    cases = [(name, (SPIKE,), 0), (name, (SPIKE,), 1), *[(name, (), 0)] * (name != "torchtitan")]
    for (_, spikes, _), answers in each(GlooWorld(2), recipes.guarded, cases):
        answer, steps = answers[0], 72 - len(spikes)
        assert answer == answers[1]
        assert (answer["skipped"], answer["steps"]) == ([(SPIKE, "spike")] * len(spikes), {float(steps)})
        assert (answer["scale"], answer["counts"]["spike"]) == (1.0, len(spikes))
        if name == "guard_ddp":
            assert answer["followed"] == (steps, steps)
        if name == "torchtitan":
            # The warm-up's next step is the 72nd of a hundred.
            assert answer["rates"] == pytest.approx([0.01 * 72 / 100])
