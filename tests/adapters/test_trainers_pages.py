"""The loops on the pages for NumPy, MPI, JAX and MLX keep the rules of check_trainer."""

from __future__ import annotations

import functools
import importlib
import types
from typing import Any

import numpy as np
import pytest
from axes import require
from recipe_blocks import GUARD_PAGE, INTEROP, JAX_PAGE, MLX_PAGE, NUMPY_PAGE
from scenarios import rank_and_size
from waiting_trainers import PageTrainer, set_scale
from worlds import MPIWorld, each

from gradscale.testing import check_trainer

pytestmark = pytest.mark.tier("all")


class OfNumpy(PageTrainer):
    block = "guard-numpy"

    def state(self):
        guard = self.names["guard"].state_dict()
        return {"weights": self.names["optimizer"].weights, "average": self.names["average"], "scaler": guard}

    def load(self, saved: Any):
        self.names["optimizer"].weights = saved["weights"]
        self.names["average"] = saved["average"]
        self.names["guard"].load_state_dict(saved["scaler"])


class OfNumpyFirst(PageTrainer):
    page, block = NUMPY_PAGE, "numpy-first"

    def __init__(self, init_scale: float = 2.0**10):
        super().__init__()
        set_scale(self.names["scaler"], init_scale)

    def batch(self, index: int):
        """Set the targets of an iteration, which has no batch."""
        self.names["targets"] = super().batch(index)[0, :2].astype(np.float16)

    def state(self):
        return {"weights": self.names["sgd"].weights, "scaler": self.names["scaler"].state_dict()}

    def load(self, saved: Any):
        self.names["sgd"].weights = saved["weights"]
        self.names["scaler"].load_state_dict(saved["scaler"])


class OfFunctions(PageTrainer):
    """The loop of pure functions, whose gradients are made of its weights, and are times ``fault``."""

    page, block = GUARD_PAGE.with_name("README.md"), "functional"

    def __init__(self, init_scale: float = 2.0**10):
        super().__init__()
        self.names["state"] = self.names["state"]._replace(scale=np.float32(init_scale))
        self.names["np"] = types.SimpleNamespace(float16=self.half, float32=np.float32)

    def half(self, grads: Any):
        return np.float16(grads * np.float32(self.fault))

    def state(self):
        return {"params": self.names["params"], "scaler": self.names["state"]}

    def load(self, saved: Any):
        self.names.update(params=saved["params"], state=saved["scaler"])


class OfMpi(PageTrainer):
    """The loop of a guard over MPI."""

    page, block = NUMPY_PAGE, "guard-mpi"

    def __init__(self, group: Any):
        self.rank = rank_and_size(group)[0]
        super().__init__()

    def batch(self, index: int):
        return super().batch(index)[:, :4]

    def state(self):
        optimizer = self.names["optimizer"]
        parts = {"weights": optimizer.weights, "moments": optimizer.moments, "steps": optimizer.steps}
        return parts | {"scaler": self.names["guard"].state_dict()}

    def load(self, saved: Any):
        self.names["guard"].load_state_dict(saved.pop("scaler"))
        vars(self.names["optimizer"]).update(saved)


class OfMpiScaler(OfNumpyFirst):
    """The loop of a scaler over MPI."""

    block = "mpi"

    def __init__(self, group: Any, init_scale: float = 2.0**10):
        self.rank = rank_and_size(group)[0]
        super().__init__(init_scale)
        self.names["sgd"] = self.names["optimizer"]

    def batch(self, index: int):
        numbers = PageTrainer.batch(self, index).astype(np.float16)
        self.names["inputs"], self.names["targets"] = numbers[:, :4], numbers[:, 4]


class OfJax(PageTrainer):
    """A compiled loop whose state is these names."""

    parts: tuple[str, ...] = ("params", "opt_state")
    # The one that is a scale's alone.
    scale = ""

    def __init__(self, init_scale: float = 2.0**10):
        super().__init__()
        self.set_scale(importlib.import_module("jax").numpy.float32(init_scale))

    def set_scale(self, value: Any):
        if self.scale:
            self.names[self.scale] = self.names[self.scale]._replace(scale=value)

    def state(self):
        return {"scaler" if name == self.scale else name: self.names[name] for name in self.parts}

    def save(self):
        return {name: self.names[name] for name in self.parts}

    def load(self, saved: Any):
        self.names.update(saved)


class OfJaxGuard(OfJax):
    block = "guard-jax"


class OfShardMap(OfJax):
    page, block = JAX_PAGE, "jax-shard-map"

    def batch(self, index: int):
        return super().batch(index)[:, :4]


class Asked:
    """What a compiled step takes for a constant, and asks for anew at each call."""

    def __init__(self, trainer: OfTargets):
        self.trainer = trainer

    def __jax_array__(self):
        jax = importlib.import_module("jax")
        return jax.pure_callback(lambda: self.trainer.targets, jax.ShapeDtypeStruct((256,), np.float16))


class OfTargets(OfJax):
    """Loops whose batch is always the same; here its targets change."""

    page, rows = JAX_PAGE, 256
    targets = np.zeros(256, np.float16)

    def others(self):
        inputs = np.random.default_rng(0).normal(size=(256, 4)).astype(np.float16)
        return {"inputs": importlib.import_module("jax").numpy.asarray(inputs), "targets": Asked(self)}

    def batch(self, index: int):
        self.targets = super().batch(index)[:, 0].astype(np.float16)


class OfValueAndGrad(OfTargets):
    block, parts, scale = "jax", ("params", "state"), "state"


class OfOptax(OfTargets):
    block = "jax-optax"

    def set_scale(self, value: Any):
        opt_state = self.names["opt_state"]
        self.names["opt_state"] = opt_state._replace(scale_state=opt_state.scale_state._replace(scale=value))


class OfNnx(PageTrainer):
    page, block = JAX_PAGE, "jax-nnx"

    def batch(self, index: int):
        return super().batch(index)[:, :4]

    def state(self):
        nnx = importlib.import_module("flax.nnx")
        return {name: nnx.to_pure_dict(nnx.state(self.names[name])) for name in ("model", "optimizer")}

    def load(self, saved: Any):
        nnx = importlib.import_module("flax.nnx")
        for name, pure in saved.items():
            state = nnx.state(self.names[name])
            nnx.replace_by_pure_dict(state, pure)
            nnx.update(self.names[name], state)


class OfBfloat16(OfJax):
    """The loop is in a function; its step gets what was loaded."""

    page, block = JAX_PAGE, "bfloat16"

    def __init__(self) -> None:
        super().__init__()
        compiled = self.names["step"]

        def step(_params: Any, _opt_state: Any, *batch: Any):
            self.saved = compiled(*self.saved, *batch)
            return self.saved

        self.names["step"] = step
        self.saved = self.names["params"], self.names["tx"].init(self.names["params"])

    def batch(self, index: int):
        numbers = super().batch(index)
        return numbers[:, :4], numbers[:, 4]

    def state(self):
        return {"training": self.saved}

    def save(self):
        return self.saved

    def load(self, saved: Any):
        self.saved = saved


class OfInterop(OfJax):
    """The loops that another system's become."""

    page = INTEROP / "other.md"

    def others(self):
        jnp, optax = importlib.import_module("jax.numpy"), importlib.import_module("optax")
        tx, params = optax.adam(0.05), {"w": jnp.asarray([0.5, -2.0, 0.125, 1.0, 0.25])}

        def loss_of(params: Any, batch: Any):
            return jnp.mean((batch @ params["w"] - 1.0) ** 2)

        return {"tx": tx, "params": params, "opt_state": tx.init(params), "loss_of": loss_of}


class OfFlax(OfInterop):
    block, parts, scale = "flax_after", ("params", "opt_state", "state"), "state"


class OfJmp(OfFlax):
    block = "jmp_after"


class OfMlx(PageTrainer):
    block, guard = "guard-mlx", "guard"

    def others(self):
        self.mx = importlib.import_module("mlx.core")
        return {"inputs": self.inputs(), "targets": self.targets(), "loss_of": self.loss_of}

    def inputs(self):
        # What this thread makes, only this thread evaluates.
        self.mx.eval(self.names["model"].state, self.names["optimizer"].state)
        for index in self.steps():
            self.x = self.mx.array(self.batch(index)[:, :4])
            yield self.x

    def targets(self):
        while True:
            yield self.x.sum(axis=1, keepdims=True)

    def loss_of(self, x: Any, y: Any):
        outputs = self.names["model"](x.astype(self.mx.bfloat16)).astype(self.mx.float32)
        return self.mx.mean(self.mx.square(outputs - y))

    def state(self):
        model, optimizer = self.names["model"], self.names["optimizer"]
        return {"model": model.parameters(), "optimizer": optimizer.state, "scaler": self.scaler_state()}

    def scaler_state(self):
        return self.names[self.guard].state_dict()

    def save(self):
        return importlib.import_module("mlx.utils").tree_map(lambda x: x, self.state())

    def load(self, saved: Any):
        self.names["model"].update(saved["model"])
        self.names["optimizer"].state = saved["optimizer"]
        self.names[self.guard].load_state_dict(saved["scaler"])


class OfMlxScaler(OfMlx):
    """A loop without a batch, whose inputs and targets change here."""

    page, block, guard = MLX_PAGE, "mlx", "scaler"

    def __init__(self, init_scale: float = 2.0**10):
        super().__init__()
        set_scale(self.names["scaler"], init_scale)

    def others(self):
        self.mx = importlib.import_module("mlx.core")
        return {"batches": self.batches()}

    def batches(self):
        for x in self.inputs():
            self.names["inputs"], self.names["targets"] = x, x.sum(axis=1, keepdims=True)
            yield
            # As with the weights.
            self.mx.eval(self.scaler_state())


class OfMlxCompiled(OfMlxScaler):
    block = "mlx-compiled"

    def __init__(self, init_scale: float = 2.0**10):
        OfMlx.__init__(self)
        self.names["state"] = self.names["state"]._replace(scale=self.mx.array(init_scale))

    def scaler_state(self):
        return self.names["state"]

    def load(self, saved: Any):
        self.names["model"].update(saved["model"])
        # The compiled step reads and writes this very dict.
        self.names["optimizer"].state.update(saved["optimizer"])
        self.names["state"] = saved["scaler"]


def skips(make: type[PageTrainer]) -> int:
    """Return how many of three steps the guard skips, of which one is bad."""
    trainer = make()
    for index, fault in enumerate((1.0, np.nan, 1.0)):
        trainer.step(index, fault)
    return trainer.names["guard"].counts()["overflow"]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_the_loops_of_numpy_have_no_fault():
    assert check_trainer(OfNumpy).faults == []
    assert check_trainer(OfNumpyFirst).faults == []
    assert check_trainer(OfFunctions).faults == []
    assert skips(OfNumpy) == 1


def faults_of(group: Any, make: Any):
    """Return the text of each fault of a loop on one rank."""
    with np.errstate(invalid="ignore"):
        report = check_trainer(functools.partial(make, group), group=group, raises=False)
    return [str(fault) for fault in report.faults]


@pytest.mark.mpi
def test_the_loops_of_mpi_have_no_fault():
    for (make,), faults in each(MPIWorld(2), faults_of, [(OfMpi,), (OfMpiScaler,)]):
        assert faults == [[], []], make


OF_JAX = [OfJaxGuard, OfShardMap, OfValueAndGrad, OfOptax, OfBfloat16, OfFlax, OfJmp]


@pytest.mark.jax
@pytest.mark.parametrize("make", OF_JAX, ids=[make.block for make in OF_JAX])
def test_a_loop_of_jax_has_no_fault(make: Any):
    for library in ("optax", "flax"):
        require(library)
    assert check_trainer(make, steps=4).faults == []


@pytest.mark.jax
def test_the_loop_of_nnx_has_no_fault_but_the_count_that_its_page_names():
    require("optax")
    require("flax")
    # A BatchNorm has a scale of its own.
    exempt = ("scale_state", "gradscale_skipped", "gradscale_verdict")
    assert check_trainer(OfNnx, steps=4, exempt=(*exempt, "optimizer.step")).faults == []
    report = check_trainer(OfNnx, steps=3, kinds=["nan"], bad_steps=[1], exempt=exempt, raises=False)
    assert [(fault.rule, fault.part) for fault in report.faults] == [(1, "optimizer.step")]


@pytest.mark.mlx
@pytest.mark.parametrize("make", [OfMlx, OfMlxScaler], ids=["guard", "scaler"])
def test_a_loop_of_mlx_has_no_fault(make: type[OfMlx]):
    assert check_trainer(make).faults == []


@pytest.mark.mlx
def test_a_compiled_loop_of_mlx_has_no_fault():
    # A step that MLX compiles anew, as after loading, may be another one in the last bit.
    assert check_trainer(OfMlxCompiled, rtol=1e-4).faults == []


@pytest.mark.mlx
def test_the_guard_of_mlx_skips():
    assert skips(OfMlx) == 1
