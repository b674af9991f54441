"""The pages' recipes for torch: each block runs against its host, skips, and leaves alone what a skip must leave."""

from __future__ import annotations

import collections
import functools
import importlib.util
import itertools
import math
import os
import sys
import types
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from axes import require
from axes_torch import GradScaler, StepGuard, TorchScaler, torch
from recipe_blocks import GUARD_PAGE, INTEROP, TORCH_PAGE, run_on
from recipe_optimizers import SAM, OptimizersContainer
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

nn, dist = torch.nn, torch.distributed
OVERFLOWS = (1, 3, 8)  # of 8 batches: the first and the last, too
# The first micro-batch of the second batch, and the last one of the fourth.
MICRO_OVERFLOWS = (5, 16)
FEATURES = 6
PARTS = 4  # of a pipeline, two on each of two ranks


def made_model(seed: int = 0):
    """Return a small network, the same for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, 1))


def made_loader(batches: int = 8):
    """Return the batches, of 8 examples each."""
    return list(torch.randn((batches, 8, FEATURES), generator=torch.Generator().manual_seed(1)))


def pairs():
    """Return the batches with targets of the same shape."""
    return [(batch, batch.flip(-1)) for batch in made_loader()]


def overflowing(calls: Collection[int]) -> Callable[[Any], None]:
    """Return a hook that makes a weight's gradient infinite where it is accumulated for these times, from 1."""
    counted = itertools.count(1)

    def hook(weight):
        if next(counted) in calls:
            weight.grad.fill_(torch.inf)

    return hook


class Losses:
    """The losses of a model, of which some, counted from 1, are multiplied: they are infinite or too large."""

    def __init__(self, overflows: Collection[int] = (), by: float = torch.inf, always: float = 1.0):
        self.overflows, self.by, self.always, self.calls = overflows, by, always, itertools.count(1)

    def __call__(self, model, batch):
        loss = self.always * model(batch).float().square().mean()
        return loss * self.by if next(self.calls) in self.overflows else loss


def granted(overflows: Collection[int] = OVERFLOWS, **others) -> dict[str, Any]:
    """Return what most pages take for granted; some losses are infinite."""
    model = made_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    names = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": made_loader()}
    return names | {"scaler": GradScaler("cpu"), "loss_of": Losses(overflows)} | others


def skipped(scaler) -> list[int]:
    """Return which steps were skipped, from 1: of a SAM, two in an iteration."""
    return [number for number, report in enumerate(scaler.history, start=1) if report.skipped]


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
    loader = torch.utils.data.DataLoader(given["loader"], batch_size=None)
    return {"loader": loader, "module": Module(), "options": options}


def for_transformers(given: dict[str, Any], folder: Path):
    """Return what the recipes of transformers' Trainer take for granted."""

    class Model(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self):
            super().__init__()
            self.inner = given["model"]

        def forward(self, inputs, labels):
            assert labels.shape == (8, 1)
            return {"loss": given["loss_of"](self.inner, inputs)}

    options = {"output_dir": str(folder), "use_cpu": True, "num_train_epochs": 1, "per_device_train_batch_size": 8}
    silent = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
    examples = [{"inputs": one, "labels": torch.zeros(1)} for batch in made_loader() for one in batch]
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
        assert targets.shape == (8, FEATURES)
        return given["loss_of"](nn.Identity(), outputs)

    return {"loss_fn": loss_fn, "pairs": pairs()}


def nothing(*_: object) -> dict[str, Any]:
    return {}


OF_TRANSFORMERS = ("trainer.accelerator.scaler", "trainer.lr_scheduler.last_epoch")
HALVINGS = "round(0.1 / optimizer.param_groups[0]['lr']).bit_length() - 1"
# The library, what its recipe takes for granted, its scaler, and what counts the steps that were made.
HOSTS: dict[str, tuple[str, Callable[..., Any], str, *tuple[str, ...]]] = {
    "schedule": ("torch", nothing, "scaler", "schedule.last_epoch"),
    "followers": ("torch", nothing, "scaler", "steps", "int(average.n_averaged)"),
    "accelerate": ("accelerate", nothing, "accelerator.scaler", "schedule.scheduler.last_epoch"),
    "trainer": ("lightning", for_lightning, "scaler", "schedule.last_epoch"),
    "trainer_bfloat16": ("lightning", for_lightning, "guard", "schedule.last_epoch"),
    "fabric_bfloat16": ("lightning", nothing, "guard", "schedule.last_epoch"),
    "accelerate_bfloat16": ("accelerate", nothing, "accelerator.scaler", "schedule.scheduler.last_epoch"),
    "fabric": ("lightning", lambda _, at: {"path": at / "fabric.ckpt"}, "precision.scaler", "schedule.last_epoch"),
    **dict.fromkeys(("transformers", "transformers_bfloat16"), ("transformers", for_transformers, *OF_TRANSFORMERS)),
    "timm": ("timm", for_timm, "loss_scaler._scaler", "updates", HALVINGS),
    "ignite": ("ignite", for_ignite, "scaler", "schedule.last_epoch"),
}


@pytest.mark.usefixtures("reset_accelerate")
@pytest.mark.parametrize("name", HOSTS)
def test_bad_steps_are_skipped_and_what_follows_the_optimizer_holds(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    library, given_by, own, *counts = HOSTS[name]
    if name == "timm":
        import_torchvision()
    require(library)
    given = granted()
    names = given | run_on(TORCH_PAGE, name, **given | given_by(given, tmp_path))
    scaler = eval(own, names)
    assert skipped(scaler) == list(OVERFLOWS)
    assert [eval(count, names) for count in counts] == [5] * len(counts)
    if name == "fabric":
        assert torch.load(names["path"], weights_only=True)["precision"] == scaler.state_dict()
    if name == "trainer":
        assert "StepReport(skipped=True" in capsys.readouterr().out
    if name == "schedule":
        # It is resumed with its schedule and its scale.
        resumed = run_on(TORCH_PAGE, "resume", **names | {"path": tmp_path / "run.pt"})
        assert resumed["scaler"] is not scaler
        assert resumed["scaler"].state_dict() == scaler.state_dict()
        assert resumed["schedule"].last_epoch == 5


# Problems.


def plainly(step: Callable[[Any, Any, Any], object], bad: Collection[int]):
    """Return the weights of a model after plain training in float32, by this step, without the bad batches."""
    given = granted()
    for number, batch in enumerate(made_loader(), start=1):
        if number not in bad:
            step(given["model"], given["optimizer"], batch)
    return list(given["model"].parameters())


CLIPPED: dict[str, Any] = {
    "clip_value": lambda weights: nn.utils.clip_grad_value_(weights, 0.5),
    "clip_each": lambda weights: [nn.utils.clip_grad_norm_(weight, 1.0) for weight in weights],
    "accumulate": lambda _: None,
    "penalty": lambda _: None,
}


@pytest.mark.parametrize("name", CLIPPED)
def test_a_problems_recipe_is_plain_training_in_float32_without_the_batches_that_overflow(name: str):
    # Its gradients are large enough to be clipped.
    loss_of = Losses(always=8.0)

    def step(model, optimizer, batch):
        loss = loss_of(model, batch)
        if name == "penalty":
            grads = torch.autograd.grad(loss, model.parameters(), create_graph=True)
            loss = loss + 0.01 * sum(grad.square().sum() for grad in grads)
        loss.backward()
        CLIPPED[name](list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()

    bad, overflows = ((2, 4), MICRO_OVERFLOWS) if name == "accumulate" else (OVERFLOWS, OVERFLOWS)
    given = granted(loss_of=Losses(overflows, always=8.0))
    scaler = run_on(TORCH_PAGE, name, **given)["scaler"]
    assert (skipped(scaler), scaler.get_scale()) == (list(bad), 2.0 ** (16 - len(bad)))
    # Norms and means are summed in another order.
    torch.testing.assert_close(list(given["model"].parameters()), plainly(step, bad), rtol=1e-4, atol=1e-6)


def counted(*optimizers):
    """Return how often each of some optimizers is stepped."""
    steps = collections.Counter[int]()
    for index, one in enumerate(optimizers):
        one.register_step_post_hook(lambda *_, index=index: steps.update([index]))
    return steps


def test_each_of_a_gans_optimizers_skips_by_itself_the_scale_falls_once_and_those_of_a_container_skip_together():
    critic, generator = made_model(1), nn.Linear(FEATURES, FEATURES)
    optimizer, critic_optimizer = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (generator, critic))
    # The critic's gradients overflow in its own pass of the second batch and of the fourth, and the generator's in the
    # third and the fourth. The critic's are accumulated twice in a batch.
    critic[0].weight.register_post_accumulate_grad_hook(overflowing({3, 7}))
    generator.weight.register_post_accumulate_grad_hook(overflowing({3, 4}))
    steps = counted(optimizer, critic_optimizer)
    given = granted(model=generator, optimizer=optimizer, critic=critic, critic_optimizer=critic_optimizer)
    scaler = run_on(TORCH_PAGE, "gan", **given)["scaler"]
    # Batches 2, 3 and 4, of which the last has two overflows.
    assert (steps, scaler.get_scale()) == ({0: 6, 1: 6}, 2.0**13)

    given = granted(())
    model = given["model"]
    # Of one optimizer's gradients alone.
    model[2].weight.register_post_accumulate_grad_hook(overflowing(OVERFLOWS))
    container = OptimizersContainer([model[0], model[2]], lr=0.1)
    steps = counted(*container.optimizers)
    scaler = run_on(TORCH_PAGE, "container", **given, container=container)["scaler"]
    assert (skipped(scaler), steps, scaler.get_scale()) == (list(OVERFLOWS), {0: 5, 1: 5}, 2.0**13)


@pytest.mark.parametrize("bad", [None, 3, 4], ids=["finite", "first-pass", "second-pass"])
def test_sam_in_two_steps_is_sam_in_float32_without_the_batches_that_overflow(bad: int | None):
    made = functools.cache(lambda model: SAM(model.parameters()))

    def step(model, _, batch):
        sam = made(model)
        Losses()(model, batch).backward()
        sam.first_step(zero_grad=True)
        Losses()(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for weight, kept in sam.state.items():
            weight.data = kept["old_p"]
        sam.base_optimizer.step()
        sam.zero_grad()

    given = granted([bad])
    names = run_on(TORCH_PAGE, "sam", **given, sam=SAM(given["model"].parameters()))
    assert skipped(names["scaler"]) == [bad] * (bad is not None)
    # Of the second batch; the norm is summed in another order than torch's.
    expected = plainly(step, [2] * (bad is not None))
    torch.testing.assert_close(list(given["model"].parameters()), expected, rtol=1e-5, atol=1e-7)


# Two ranks.


def in_torchtitan(group, steps: int, dtype, *groups: tuple[str, str, dict[str, Any]]):
    """Return a model in a low precision over the ranks, and torchtitan's containers for groups by their patterns."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

    model, mesh = made_model(), dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(group),))
    for module in (*model.children(), model):
        half = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        fully_shard(module, mesh=mesh, mp_policy=half)
    configs = [
        ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs={"lr": 0.01, **options})
        for pattern, name, options in groups
    ]
    optimizers = OptimizersContainer(OptimizersContainer.Config(param_groups=configs), model_parts=[model])
    schedules = LRSchedulersContainer.Config(warmup_steps=steps).build(optimizers=optimizers, training_steps=steps)
    return {"model": model, "optimizers": optimizers, "lr_schedulers": schedules}


def run_on_ranks(group, page: Path, name: str, count: int, bad: tuple[int, ...], bad_rank: int, by: float, to: str):
    """Run a block with so many batches, in which losses of one rank are bad; return what came of it."""
    given = granted(bad if dist.get_rank(group) == bad_rank else (), group=group, loader=made_loader(count))
    given["loss_of"].by, given["actor"], dtypes = by, given["model"], set()
    if name == "ddp":
        # Of its own.
        given["loader"] = [batch + dist.get_rank(group) for batch in given["loader"]]
    if name == "torchtitan" and math.isinf(by):
        groups = [("weight", "AdamW", {}), ("bias", "Adam", {"fused": False})]
        given |= in_torchtitan(group, 8, torch.float16, *groups)
    elif name == "torchtitan":
        scaler = StepGuard(skip=gradscale.SkipSpikes())
        given |= in_torchtitan(group, 100, torch.bfloat16, (".*", "AdamW", {})) | {"scaler": scaler}
    given["model"][0].register_forward_hook(lambda _module, _inputs, output: dtypes.add(str(output.dtype)))
    names = run_on(page, name, **given)
    if name == "actor":
        # It is saved, and loaded into another scaler.
        saved = {one: names[one] for one in ("actor", "optimizer", "scaler")}
        loaded = run_on(TORCH_PAGE, "checkpoint", folder=f"{to}/{bad_rank}", **saved)["scaler"]
        assert loaded is not names["scaler"]
        assert loaded.state_dict() == names["scaler"].state_dict()
    scaler, optimizers = names.get("guard") or names["scaler"], names.get("optimizers") or [names["optimizer"]]
    states = [state for one in optimizers for state in one.state.values()]
    weights = list(given["model"].parameters())
    return {
        "skipped": [(report.iteration, report.reason) for report in scaler.history if report.skipped],
        "scale": scaler.get_scale(),
        "steps": {float(state["step"]) for state in states if "step" in state},
        "dtypes": dtypes,
        "masters": {str(one.dtype) for one in (*weights, *(state.get("exp_avg", weights[0]) for state in states))},
        "advanced": names["schedule"].last_epoch,
        "averaged": int(names["average"].n_averaged) if "average" in names else None,
        "rates": list(names["lr_schedulers"].get_metrics().values()) if "lr_schedulers" in names else None,
        "weights": [(one.full_tensor() if hasattr(one, "full_tensor") else one).tolist() for one in weights],
    }


# The page, how many batches, which are bad on one rank and by what they are multiplied, and what both ranks have then.
TOGETHER: dict[str, tuple[Path, int, tuple[int, ...], float, dict[str, Any]]] = {
    "ddp": (TORCH_PAGE, 8, OVERFLOWS, math.inf, {"scale": 2.0**13, "steps": {5.0}, "advanced": 5}),
    "actor": (
        *(TORCH_PAGE, 8, MICRO_OVERFLOWS, math.inf),
        {"scale": 2.0**14, "dtypes": {"torch.float16"}, "masters": {"torch.float32"}},
    ),
    "torchtitan": (
        *(TORCH_PAGE, 8, OVERFLOWS, math.inf),
        # The warm-up's next step is the sixth of eight.
        {"scale": 2.0**13, "steps": {5.0}, "rates": pytest.approx([0.01 * 6 / 8] * 2)},
    ),
    # Of three overflows the first is tolerated.
    **{
        f"{name}.md": (INTEROP / f"{name}.md", 8, OVERFLOWS, math.inf, {"scale": 2.0**14, "advanced": 5})
        for name in ("deepspeed", "megatron")
    },
    # Guards that skip spikes in bfloat16.
    "torchtitan-guard": (TORCH_PAGE, 72, (70,), 1e6, {"steps": {71.0}, "rates": pytest.approx([0.01 * 72 / 100])}),
    "guard-ddp": (GUARD_PAGE, 72, (70,), 1e6, {"scale": 1.0, "steps": {71.0}, "advanced": 71, "averaged": 71}),
    "guard-fsdp2": (GUARD_PAGE, 72, (70,), 1e6, {"scale": 1.0, "steps": {71.0}}),
    # One micro-batch of the second batch, and all of the fourth.
    "guard-micro-batches": (GUARD_PAGE, 8, (6, 13, 14, 15, 16), math.inf, {"scale": 1.0, "steps": {7.0}}),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_both_ranks_skip_together_and_what_follows_the_optimizers_holds(name: str, tmp_path: Path):
    page, count, bad, by, expected = TOGETHER[name]
    block = "after" if page.parent == INTEROP else name.removesuffix("-guard")
    if block == "torchtitan":
        require("torchtitan")
    steps, reason = ((2, 4), "overflow") if name == "actor" else (bad, "overflow" if by == math.inf else "spike")
    steps, reason = ((4,), "refused") if name == "guard-micro-batches" else (steps, reason)
    expected |= {"skipped": [(step, reason) for step in steps], "masters": {"torch.float32"}}
    cases = [(page, block, count, bad, bad_rank, by, str(tmp_path)) for bad_rank in (0, 1)]
    for _, answers in each(GlooWorld(2), run_on_ranks, cases):
        assert answers[0] == answers[1]
        assert {key: answers[0][key] for key in expected} == expected


def test_the_guards_loop_of_one_process_skips_a_spike():
    given = granted(loader=made_loader(72), loss_of=Losses([70], 1e6))
    guard = run_on(GUARD_PAGE, "guard-torch", **given)["guard"]
    found = [(report.iteration, report.reason, report.by) for report in guard.history if report.skipped]
    assert found == [(70, "spike", 0)]


def accelerate_fsdp2(group, folder: str):
    """Train with accelerate and FSDP2, save, and load into an accelerator that has made no step."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType

    rank, size = str(dist.get_rank(group)), str(dist.get_world_size(group))
    # The group is there already; accelerate wants its address all the same.
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    options = {"fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT", "auto_wrap_policy": "no_wrap"}
    plugin = FullyShardedDataParallelPlugin(**options)

    def prepared():
        accelerator = Accelerator(mixed_precision="fp16", cpu=True)
        # Accelerate shards on GPUs alone, and its states take what they are from this one.
        plugin.set_mixed_precision("fp16")
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
        accelerator.native_amp = True
        accelerator.scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        model = made_model()
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    with mock.patch.dict(os.environ, environment):
        try:
            accelerator, model, optimizer = prepared()
            accelerator.backward(Losses()(model, made_loader()[0]))
            optimizer.step()
            accelerator.save_state(folder)
            saved = accelerator.scaler.state_dict()
            accelerator, model, optimizer = prepared()
            accelerator.load_state(folder)
            loaded = accelerator.scaler.state_dict()
            names = run_on(TORCH_PAGE, "accelerate_fsdp2", accelerator=prepared()[0], folder=folder)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
    return saved, loaded, names["accelerator"].scaler.state_dict()


def test_accelerates_checkpoint_of_fsdp2_leaves_the_scaler_as_it_was_if_it_is_loaded_last(tmp_path: Path):
    require("accelerate")
    ((_, answers),) = each(GlooWorld(2), accelerate_fsdp2, [(str(tmp_path / "state"),)])
    for saved, loaded, by_the_recipe in answers:
        assert (saved["scale"], saved["_growth_tracker"]) == (1024.0, 1)
        # Once it is not, the page need not say so.
        assert (loaded["scale"], loaded["_growth_tracker"]) == (2048.0, 0)
        assert by_the_recipe == saved


def made_parts():
    """Return the parts of a network, which follow one upon the other."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(PARTS)]


def pipeline(group, overflows: tuple[int, ...], bad_part: int):
    """Train parts of a network in a pipeline of the ranks; one part's gradient overflows in some micro-batches."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    parts = {index: part for index, part in enumerate(made_parts()) if index % size == rank}
    if bad_part in parts:
        parts[bad_part][0].weight.register_post_accumulate_grad_hook(overflowing(overflows))
    optimizers = OptimizersContainer(parts.values(), lr=0.1, momentum=0.9)
    given = {"parts": parts, "optimizers": optimizers, "pairs": pairs(), "loss_fn": nn.functional.mse_loss}
    scaler = run_on(TORCH_PAGE, "pipeline", **given)["scaler"]
    local = [report.iteration for report in scaler.history if report.local_nonfinite]
    weights = {index: [weight.tolist() for weight in part.parameters()] for index, part in parts.items()}
    return skipped(scaler), scaler.get_scale(), local, weights


def test_all_stages_of_a_pipeline_skip_when_one_part_of_one_overflows():
    cases = [(MICRO_OVERFLOWS, part) for part in range(PARTS)]
    for (overflows, bad_part), answers in each(GlooWorld(2), pipeline, [((), 0), *cases]):
        bad = [2, 4] if overflows else []
        for rank, (skips, scale, local, _) in enumerate(answers):
            assert (skips, scale) == (bad, 2.0 ** (16 - len(bad)))
            assert local == (bad if bad_part % 2 == rank else [])
        # As plain training in float32 but for the skipped batches.
        model = nn.Sequential(*made_parts())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for number, (inputs, targets) in enumerate(pairs(), start=1):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if number not in bad:
                optimizer.step()
        trained = answers[0][-1] | answers[1][-1]
        mine = [torch.tensor(weight) for index in range(PARTS) for weight in trained[index]]
        # The mean is of micro-batches, and the norm's sum in another order.
        torch.testing.assert_close(mine, [one.detach() for one in model.parameters()], rtol=1e-5, atol=1e-6)


@pytest.mark.tier("quick")
@pytest.mark.parametrize(("library", "call"), [("wandb", "log"), ("mlflow", "log_metrics")])
def test_each_update_is_logged_with_its_scale_and_whether_it_skipped(
    library: str, call: str, monkeypatch: pytest.MonkeyPatch
):
    logged = mock.Mock()
    monkeypatch.setitem(sys.modules, library, types.SimpleNamespace(**{call: logged}))
    scaler = run_on(TORCH_PAGE, library)["scaler"]
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for factor in (1.0, math.inf):
        scaler.scale(weight.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    rows = [{"scale": 65536.0, "skipped": False}, {"scale": 32768.0, "skipped": True}]
    options = [{"commit": False}] * 2 if library == "wandb" else [{"step": 1}, {"step": 2}]
    assert logged.mock_calls == [mock.call(row, **option) for row, option in zip(rows, options, strict=True)]


# The pages that lead here from other systems.


def test_from_torch_amp_every_bit_stays(capsys: pytest.CaptureFixture[str]):
    page = INTEROP / "torch_amp.md"
    before, after = (run_on(page, block, **granted()) for block in ("before", "after"))
    for theirs, ours in zip(before["model"].parameters(), after["model"].parameters(), strict=True):
        assert theirs.equal(ours)
    saved = before["scaler"].state_dict()
    assert saved.items() <= after["scaler"].state_dict().items()
    assert capsys.readouterr().out.count("skipped=True") == 3
    loaded = run_on(page, "state", saved=saved, GradScaler=GradScaler)["scaler"]
    assert saved.items() <= loaded.state_dict().items()
    TorchScaler("cpu").load_state_dict(after["scaler"].state_dict())


WINDOW = {"scale_factor": 2.0, "scale_window": 1000, "min_scale": 1, "dynamic": True, "delayed_shift": 2}
WINDOW |= {"consecutive_hysteresis": False, "raise_error_at_min_scale": True}
# What each system saves, and the scale, the clean steps and the overflows in a row in it.
STATES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "apex": ({"loss_scaler0": {"loss_scale": 512.0, "unskipped": 5}}, [512.0, 5, 0]),
    "deepspeed": (
        {"cur_scale": 512.0, "cur_iter": 9, "last_overflow_iter": 3, "cur_hysteresis": 1, **WINDOW},
        [512.0, 5, 1],
    ),
    "megatron": ({"scale": torch.tensor([512.0]), "growth_tracker": 5, "hysteresis_tracker": 1}, [512.0, 5, 1]),
}


@pytest.mark.parametrize("system", STATES)
def test_a_saved_state_of_another_system_is_gone_on_with(system: str, capsys: pytest.CaptureFixture[str]):
    saved, expected = STATES[system]
    if system == "apex":
        scaler = run_on(INTEROP / "other.md", "apex_after", **granted())["scaler"]
        assert (skipped(scaler), scaler.get_scale()) == (list(OVERFLOWS), 2.0**13)
    (alone,) = gradscale.testing.run_ranks(1, lambda group: group)
    page, block = ("other.md", "state_torch") if system == "apex" else (f"{system}.md", "state")
    state = run_on(INTEROP / page, block, saved=saved, group=alone)["scaler"].state_dict()
    assert [state[key] for key in ("scale", "_growth_tracker", "_overflow_tracker")] == expected
    assert ("growth_interval = 2000" if system == "apex" else f"{system} state") in capsys.readouterr().out
