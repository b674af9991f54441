"""The examples keep the rules of check_trainer: the training function of each, or its step where it has one."""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from axes import require
from scenarios import rank_and_size
from waiting_trainers import (
    EXAMPLES,
    OPTIONS,
    DigitsTrainer,
    ExampleTrainer,
    WaitingTrainer,
    faults_of_example,
    images_and_labels,
)
from worlds import GlooWorld, MPIWorld, World, each

import gradscale
from gradscale.testing import check_trainer

pytestmark = pytest.mark.tier("all")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    """Return what imports a program of the examples."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


def with_large_scale(make: Callable[[float], Any]):
    """Return what makes a trainer in float16 with 64 times its scale: small gradients are rounded more coarsely."""

    def made(init_scale: float = 2.0**10):
        return make(init_scale * 64.0)

    return made


class OfJax:
    """A compiled step of an example, whose state is ``self.saved``; its bad batches have bad images."""

    shape: tuple[int, ...] = (256,)
    bad: Any = ...

    def step(self, index: int, fault: float):
        images, labels = images_and_labels()
        chosen = np.random.default_rng(index).integers(0, len(images), self.shape)
        batch = images[chosen]
        if fault != 1.0:
            batch[self.bad] = fault
        self.saved = self.after(batch, labels[chosen])

    def state(self):
        return {"training": self.saved}

    def save(self):
        return self.saved

    def load(self, saved: Any):
        self.saved = saved


@functools.cache
def linen_at_first(program: Any):
    """Return the state of flax_linen.py, which is made once: a state with other functions is compiled anew."""
    return program.create_state(seed=0)


class OfLinen(OfJax):
    def __init__(self, program: Any, scale: float):
        first = linen_at_first(program)
        self.program, self.saved = program, first.replace(scale=first.scale._replace(scale=np.float32(scale)))

    def after(self, images: Any, labels: Any):
        return self.program.train_step(self.saved, images, labels)[0]


class OfNnx(OfJax):
    def __init__(self, program: Any, scale: float):
        self.structure, first = program.create(seed=0)
        self.program, self.saved = program, first._replace(scale=first.scale._replace(scale=np.float32(scale)))

    def after(self, images: Any, labels: Any):
        return self.program.train_step(self.structure, self.saved, images, labels)[0]


class OfEquinox(OfJax):
    shape = (4, 64)

    def __init__(self, program: Any, scale: float):
        network = program.Network(program.jax.random.key(0))
        params, self.others = program.eqx.partition(network, program.eqx.is_inexact_array)
        first = program.OPTIMIZER.init(params)
        scaled = first.scale_state._replace(scale=np.float32(scale))
        self.program, self.saved = program, (params, first._replace(scale_state=scaled))

    def after(self, images: Any, labels: Any):
        return self.program.train_step(self.others, self.saved, images, labels)


@functools.cache
def step_on_devices(program: Any):
    """Return the policy and the step of train_jax.py over all devices, in float32: see below."""
    policy = gradscale.DynamicScale(growth_interval=3)
    mesh = program.Mesh(np.array(program.jax.devices()), ("data",))
    return policy, program.make_step(policy, np.float32, mesh)


class OfShardMap(OfJax):
    """Of the devices the first alone has the bad images."""

    bad = 0

    def __init__(self, program: Any, scale: float):
        policy, self.compiled = step_on_devices(program)
        self.jax, self.jnp, self.shape = program.jax, program.jnp, (len(program.jax.devices()), 64)
        weights = program.initial_weights(seed=0)
        zeros, zero = self.jax.tree.map(self.jnp.zeros_like, weights), self.jnp.float32(0)
        adam = program.Adam(weights, zeros, zeros, self.jnp.int32(0))
        self.saved = adam, policy.init(zero)._replace(scale=zero + scale)

    def after(self, images: Any, labels: Any):
        # The step overwrites what it is given.
        given = self.jax.tree.map(self.jnp.copy, self.saved)
        return self.compiled(*given, images, labels, np.zeros(len(images), bool))[:2]


OF_JAX = [
    (OfShardMap, "train_jax", "jax", ("training[1]",)),
    # A BatchNorm has a scale of its own.
    (OfLinen, "flax_linen", "flax optax", ("training.scale",)),
    (OfNnx, "flax_nnx", "flax optax orbax", ("training.scale",)),
    (OfEquinox, "equinox_train", "equinox optax", ("scale",)),
]


@pytest.mark.jax
@pytest.mark.parametrize(("make", "name", "needs", "exempt"), OF_JAX, ids=[row[1] for row in OF_JAX])
def test_a_step_of_jax_has_no_fault(example, make: type[OfJax], name: str, needs: str, exempt: tuple[str, ...]):
    for library in ("examples", *needs.split()):
        require(library)
    made = with_large_scale(functools.partial(make, example(name)))
    assert check_trainer(made, steps=4, exempt=exempt).faults == []


class OfLightning(WaitingTrainer):
    """The Trainer of lightning_plugin.py, which saves and restores itself."""

    def __init__(self, program: Any, folder: Path, scale: float):
        self.program, self.folder = program, folder
        self.fit()
        self.parts["scaler"].load_state_dict(self.parts["scaler"].state_dict() | {"scale": scale})

    def fit(self, *checkpoint: Path):
        """Train from the first weights or from a checkpoint, up to the next step."""
        waiting, torch, digits = self, self.program.torch, self.program.Digits

        class Batches:
            def __len__(self):
                return 10**6

            def __iter__(self):
                for index in waiting.steps():
                    yield [torch.from_numpy(part[32 * index : 32 * index + 32]) for part in images_and_labels()]

        class Digits(digits):
            def train_dataloader(self):
                waiting.module = self
                return Batches()

            def training_step(self, batch):
                return super().training_step(batch) * waiting.fault

        with mock.patch.object(self.program, "Digits", Digits):
            self.begin(self.program.train, OPTIONS, 1, 0, *checkpoint)
        trainer = self.module.trainer
        schedule, scaler = trainer.lr_scheduler_configs[0].scheduler, trainer.precision_plugin.scaler
        parts = {"model": self.module, "optimizer": trainer.optimizers[0], "schedule": schedule, "scaler": scaler}
        self.parts: dict[str, Any] = parts

    def state(self):
        return self.parts

    def save(self):
        checkpoint = self.folder / "digits.ckpt"
        self.module.trainer.save_checkpoint(checkpoint)
        return checkpoint

    def load(self, saved: Path):
        self.fit(saved)


@pytest.mark.torch
@pytest.mark.filterwarnings(r"ignore:.*isinstance\(treespec, LeafSpec\):FutureWarning")
# Its batches are asked for by number, also after a checkpoint within the epoch.
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_the_trainer_of_lightning_has_no_fault(example, tmp_path: Path):
    require("lightning")
    require("examples")
    made = with_large_scale(functools.partial(OfLightning, example("lightning_plugin"), tmp_path))
    assert check_trainer(made, steps=4).faults == []


class OfMlx:
    """A step of train_mlx.py."""

    def __init__(self, program: Any, is_compiled: bool):
        mx, optim = importlib.import_module("mlx.core"), importlib.import_module("mlx.optimizers")
        self.mx, self.model = mx, program.make_model()
        self.optimizer = optim.AdamW(optim.cosine_decay(0.02, 8))
        self.guard = gradscale.StepGuard(group=mx.distributed.init())
        make = program.compiled if is_compiled else functools.partial(program.guarded, guard=self.guard)
        self.make_step = make(self.model, self.optimizer)
        options = argparse.Namespace(steps=8, bad=-1, rank=0)
        self.batches = program.batches(options, mx.distributed.init(), False)

    def step(self, index: int, fault: float):
        x, y = self.batches[index]
        self.make_step(x, y * fault)

    def state(self):
        return {"model": self.model.parameters(), "optimizer": self.optimizer.state, "scaler": self.guard.state_dict()}

    def save(self):
        tree_map = importlib.import_module("mlx.utils").tree_map
        return tree_map(lambda x: x + 0 if isinstance(x, self.mx.array) else x, self.state())

    def load(self, saved: Any):
        self.model.update(saved["model"])
        self.optimizer.state.update(saved["optimizer"])
        self.guard.load_state_dict(saved["scaler"])


class OfTorch(ExampleTrainer):
    """The loop of an example of torch, with the losses of a rank times ``fault``."""

    def __init__(self, group: Any, name: str, method: str, is_scaled: bool, init_scale: float = 2.0**10):
        program, text = importlib.import_module(name), importlib.import_module("shared.text")
        data, ranks = text.load_text(), program.Ranks()
        ranks.rank, ranks.size = rank_and_size(group)

        def train(run, *others: Any):
            program.torch.manual_seed(0)
            # An actor begins with what a language model has learnt.
            weights = [text.Transformer(len(data[2])).state_dict()] if name == "fp16_rl" else []
            program.train(run, *weights, *others)

        run = program.Run("checked", method, program.torch.float32, is_scaled)
        super().__init__(train, run, OPTIONS, data, ranks, init_scale)
        self.model = self.names.get("actor") or self.names["model"]
        self.model.register_forward_hook(lambda _module, _inputs, losses: losses * self.fault)

    def draw(self, index: int):
        super().draw(index)
        if "sampler" in self.names:
            self.names["sampler"].dice.manual_seed(index)

    def parts(self):
        names = ("optimizer", "schedule", "scaler", "guard")
        return {name: self.names[name] for name in names if name in self.names}

    def state(self):
        own = {"scaler" if name == "guard" else name: part.state_dict() for name, part in self.parts().items()}
        # Of each rank the part that it holds.
        return {"weights": [weight.detach() for weight in self.model.parameters()]} | own

    def load(self, saved: Any):
        for weight, value in zip(self.model.parameters(), saved["weights"], strict=True):
            weight.detach().copy_(value)
        for name, part in self.parts().items():
            part.load_state_dict(saved["scaler" if name == "guard" else name])


# In float32: what float16 makes of a small gradient depends on the scale, and Adam moves by its sign.
@pytest.mark.parametrize("world", [MPIWorld(1), MPIWorld(2)], ids=["mpi-1", "mpi-2"])
@pytest.mark.mpi
def test_the_loop_of_numpy_over_mpi_has_no_fault(world: World):
    require("examples")
    ((_, faults),) = each(world, faults_of_example, [(DigitsTrainer, "train_digits", "Ranks")])
    assert faults == [[]] * world.size


OF_TORCH = [*(("train_fsdp", method) for method in ("FSDP2", "FSDP1", "DDP")), ("spikes", "skip"), ("fp16_rl", "FSDP2")]


@pytest.mark.torch
@pytest.mark.parametrize(("name", "method"), OF_TORCH, ids=map("-".join, OF_TORCH))
def test_a_loop_of_torch_has_no_fault(name: str, method: str):
    require("examples")
    ((_, faults),) = each(GlooWorld(2), faults_of_example, [(OfTorch, name, method, True)])
    assert faults == [[], []]


@pytest.mark.torch
def test_a_loop_of_torch_without_a_scaler_has_faults():
    require("examples")
    ((_, faults),) = each(GlooWorld(2), faults_of_example, [(OfTorch, "train_fsdp", "DDP", False)])
    assert faults == [[(1, "weights[0]")] * 6] * 2


@pytest.mark.mlx
@pytest.mark.parametrize("is_compiled", [False, True], ids=["guarded", "compiled"])
def test_a_step_of_mlx_has_no_fault(example, is_compiled: bool):
    program = example("train_mlx")
    assert check_trainer(lambda: OfMlx(program, is_compiled)).faults == []
