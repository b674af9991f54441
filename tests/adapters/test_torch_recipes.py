"""The page of recipes for torch: each block runs against its host, skips, and leaves alone what a skip must leave."""

from __future__ import annotations

import collections
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from axes import require
from axes_torch import GradScaler, torch
from hosts import Loader
from recipe_blocks import TORCH_PAGE, blocks_on
from worlds import GlooWorld, each

pytestmark = [
    pytest.mark.torch,
    pytest.mark.tier("all"),
    # Lightning 2.6 itself uses what torch 2.13 has deprecated.
    pytest.mark.filterwarnings(r"ignore:.*isinstance\(treespec, LeafSpec\):FutureWarning"),
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


def run_common(name: str, scaler_of: str = "", **more):
    """Run a recipe with what most take for granted: the scaler skips, and the schedule holds."""
    names: dict[str, Any] = recipes.run_block(name, **common() | more)
    scaler = names["scaler"] if not scaler_of else names[scaler_of].scaler
    assert skips(scaler) == SKIPS
    assert getattr(names["schedule"], "last_epoch", 5) == 5
    return names | {"scaler": scaler}


def test_every_block_is_known():
    assert set(blocks_on(TORCH_PAGE)) == NAMES


@pytest.mark.parametrize(
    ("name", "scaler_of", "library"), [("schedule", "", "torch"), ("accelerate", "accelerator", "accelerate")]
)
@pytest.mark.usefixtures("reset_accelerate")
def test_a_schedule_holds(name: str, scaler_of: str, library: str):
    require(library)
    run_common(name, scaler_of)


def test_what_follows_the_optimizer_holds():
    # The block leaves the schedule alone.
    names = recipes.run_block("followers", **common())
    assert skips(names["scaler"]) == SKIPS
    assert names["steps"] == int(names["average"].n_averaged) == 5


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


def test_each_of_a_gans_optimizers_skips_by_itself_and_the_scale_falls_once():
    given = common(())
    critic = recipes.made_model(1)
    generator = torch.nn.Linear(recipes.FEATURES, recipes.FEATURES)
    optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    # The critic's gradients overflow in its own pass of the second batch and of the fourth, and the generator's in the
    # third and the fourth. The critic's are accumulated twice in a batch.
    critic[0].weight.register_post_accumulate_grad_hook(recipes.overflowing({3, 7}))
    generator.weight.register_post_accumulate_grad_hook(recipes.overflowing({3, 4}))
    steps = collections.Counter[str]()
    for name, one in (("generator", optimizer), ("critic", critic_optimizer)):
        one.register_step_post_hook(lambda *_, name=name: steps.update([name]))
    names = given | {"model": generator, "optimizer": optimizer, "critic": critic}
    names = recipes.run_block("gan", **names | {"critic_optimizer": critic_optimizer})
    assert steps == {"critic": 6, "generator": 6}
    # Batches 2, 3 and 4, of which the last has two overflows.
    assert names["scaler"].get_scale() == 2.0**13


def test_a_run_is_resumed_with_its_schedule_and_its_scale(tmp_path: Path):
    trained = run_common("schedule")
    kept = trained["scaler"].state_dict()
    names = recipes.run_block("resume", **trained | {"path": tmp_path / "run.pt"})
    assert names["scaler"] is not trained["scaler"]
    assert names["scaler"].state_dict() == kept
    assert names["schedule"].last_epoch == 5


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


def on_two_ranks(scenario, *cases: tuple[Any, ...]):
    """Yield what both ranks say, the same, of each case; the one with the overflow comes last."""
    for case, answers in each(GlooWorld(2), scenario, [(*case, bad_rank) for case in cases for bad_rank in (0, 1)]):
        assert answers[0] == answers[1], case
        yield answers[0]


def test_replicas_skip_together_and_the_schedule_advances_with_steps_that_were_made():
    for answer in on_two_ranks(recipes.ddp, (OVERFLOWS,)):
        assert (answer["skipped"], answer["scale"]) == (list(OVERFLOWS), 2.0**13)
        assert (answer["steps"], answer["advanced"]) == ({5.0}, 5)


def test_the_actor_skips_on_both_ranks_whole_batches():
    for answer in on_two_ranks(recipes.actor, (MICRO_OVERFLOWS,)):
        assert (answer["skipped"], answer["scale"]) == ([2, 4], 2.0**14)
        assert answer["dtypes"] == {"torch.float16"}
        assert answer["masters"] == answer["moments"] == {"torch.float32"}


def test_dcp_saves_and_loads_the_scaler(tmp_path: Path):
    ((_, answers),) = each(GlooWorld(2), recipes.checkpoint, [(str(tmp_path / "dcp"),)])
    for answer in answers:
        assert answer["before"] == answer["after"]
        assert (answer["after"]["scale"], answer["after"]["growth_interval"]) == (2.0**15, 400)


def test_the_trainer_skips_and_holds_the_schedule(capsys: pytest.CaptureFixture[str]):
    lightning = require("lightning")
    given = common()

    class Module(lightning.LightningModule):  # type: ignore[misc]
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
    names = run_common("trainer", **given | {"loader": Loader(given["loader"])}, module=Module(), options=options)
    assert names["schedule"].last_epoch == 5
    assert "StepReport(skipped=True" in capsys.readouterr().out


def test_fabric_skips_holds_the_schedule_and_saves(tmp_path: Path):
    require("lightning")
    names = run_common("fabric", "precision", path=tmp_path / "fabric.ckpt")
    saved = torch.load(tmp_path / "fabric.ckpt", weights_only=True)
    assert saved["precision"] == names["scaler"].state_dict()


def test_accelerates_checkpoint_of_fsdp2_leaves_the_scaler_as_it_was_if_it_is_loaded_last(tmp_path: Path):
    require("accelerate")
    ((_, answers),) = each(GlooWorld(2), recipes.accelerate_fsdp2, [(str(tmp_path / "state"),)])
    for answer in answers:
        assert (answer["saved"]["scale"], answer["saved"]["_growth_tracker"]) == (1024.0, 1)
        # Once it is not, the page need not say so.
        assert (answer["loaded"]["scale"], answer["loaded"]["_growth_tracker"]) == (2048.0, 0)
        assert answer["by the recipe"] == answer["saved"]


@pytest.mark.usefixtures("reset_accelerate")
@pytest.mark.parametrize("name", ["transformers", "transformers_bfloat16"])
def test_the_trainer_of_transformers_skips_and_holds_the_schedule(tmp_path: Path, name: str):
    require("transformers")
    given = common()

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self):
            super().__init__()
            self.inner = given["model"]

        def forward(self, inputs, labels):
            assert labels.shape == (8, 1)
            return {"loss": given["loss_of"](self.inner, inputs)}

    options = {"output_dir": str(tmp_path), "use_cpu": True, "num_train_epochs": 1, "per_device_train_batch_size": 8}
    silent = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
    examples = [{"inputs": one, "labels": torch.zeros(1)} for batch in recipes.made_loader() for one in batch]
    names = recipes.run_block(name, model=Model(), examples=examples, options=options | silent)
    assert skips(names["trainer"].accelerator.scaler) == SKIPS
    assert names["trainer"].lr_scheduler.last_epoch == 5


@pytest.fixture
def timm():
    """Return timm, also where torchvision is one for CUDA and torch one for the CPU."""
    if importlib.util.find_spec("torchvision") is not None:
        try:
            importlib.import_module("torchvision")
        except RuntimeError:
            # It finds none of its operators, two of which it takes for granted. Nothing here calls them.
            for name in ("nms", "qnms"):
                torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou) -> Tensor")
    return require("timm")


@pytest.mark.usefixtures("timm")
def test_timm_skips_and_holds_the_schedule():
    from timm.scheduler import StepLRScheduler

    given = common()
    optimizer = given["optimizer"]
    given["schedule"] = StepLRScheduler(optimizer, decay_t=1, decay_rate=0.5, t_in_epochs=False)
    names = recipes.run_block("timm", **given)
    assert skips(names["loss_scaler"]._scaler) == SKIPS
    assert names["updates"] == 5
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**5


# ignite 0.5 itself uses what torch 2.13 has deprecated.
@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:CUDA is not available or torch_xla is imported:UserWarning")
def test_ignite_skips_and_holds_the_schedule():
    require("ignite")
    given = common()
    losses = given["loss_of"]

    def loss_fn(outputs, targets):
        assert targets.shape == (8, recipes.FEATURES)
        return losses(torch.nn.Identity(), outputs)

    names = recipes.run_block("ignite", **given, loss_fn=loss_fn, pairs=recipes.pairs())
    scaler, trainer = names["scaler"], names["trainer"]
    assert trainer.state.iteration == recipes.BATCHES
    assert skips(scaler) == SKIPS
    assert given["schedule"].last_epoch == 5


def test_the_optimizers_of_a_container_skip_together():
    given = common(())
    model = given["model"]
    # Of one optimizer's gradients alone.
    model[2].weight.register_post_accumulate_grad_hook(recipes.overflowing(OVERFLOWS))
    container = recipes.OptimizersContainer([model[0], model[2]], lr=0.1)
    steps = collections.Counter[int]()
    for index, optimizer in enumerate(container.optimizers):
        optimizer.register_step_post_hook(lambda *_, index=index: steps.update([index]))
    names = recipes.run_block("container", **given | {"container": container})
    assert skips(names["scaler"]) == SKIPS
    assert steps == {0: 5, 1: 5}
    assert names["scaler"].get_scale() == 2.0**13


def test_torchtitans_optimizers_skip_together_on_both_ranks_and_its_schedules_hold():
    require("torchtitan")
    for answer in on_two_ranks(recipes.torchtitan, (OVERFLOWS,)):
        assert (answer["skipped"], answer["scale"]) == (list(OVERFLOWS), 2.0**13)
        assert (answer["fused"], answer["steps"]) == ([True, False], {5.0})
        # The warm-up's next step is the sixth of eight.
        assert answer["rates"] == pytest.approx([0.01 * 6 / 8] * 2)


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
