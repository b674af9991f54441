"""Installing from a clone: an editable install serves scripts and type checkers anywhere."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from axes import require
from commands import ran

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    "GRADSCALE_TEST_INSTALLED" in os.environ, reason="GRADSCALE_TEST_INSTALLED is set: this is a wheel and no clone"
)

SCRIPT = """
from typing import assert_type
import gradscale
import gradscale_numpy.arrays

print(gradscale.__file__)
assert_type(gradscale.GradScaler(init_scale=2.0**16).get_scale(), float)
assert_type(gradscale_numpy.arrays.NumpyBackend(), gradscale_numpy.arrays.NumpyBackend)
"""


def run(folder: Path, *command: object) -> subprocess.CompletedProcess[str]:
    return ran(*command, folder=folder, PYTHONPATH="", MYPYPATH="")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a folder that holds a clone called gradscale, and a Python with an editable install of it."""
    require("hatchling")
    folder = tmp_path_factory.mktemp("beside")
    (folder / "gradscale").symlink_to(ROOT)
    made = run(folder, sys.executable, "-m", "venv", "--without-pip", "venv")
    assert made.returncode == 0, made.stderr
    python = folder / "venv" / "bin" / "python"
    # The libraries of this Python, but not what its own .pth files name, such as another editable install.
    packages = Path(run(folder, python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps"]
    done = run(folder, *pip, "--no-build-isolation", "--ignore-installed", "-e", folder / "gradscale")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, python


@pytest.mark.tier("all")
@pytest.mark.parametrize("place", [".", "elsewhere", "gradscale/examples"])
def test_an_editable_install_serves_scripts_and_type_checkers(installed: tuple[Path, Path], tmp_path: Path, place: str):
    folder, python = installed
    (folder / "elsewhere").mkdir(exist_ok=True)
    # Beside the clone, the script's own folder comes first on its path, and the working directory for -c.
    script = (tmp_path if place.startswith("gradscale") else folder / place) / "script.py"
    script.write_text(SCRIPT)
    for command in ([script], ["-c", SCRIPT]):
        completed = run(folder / place, python, *command)
        assert completed.returncode == 0, completed.stderr
        assert Path(completed.stdout.strip()).resolve() == ROOT / "gradscale" / "__init__.py"
    require("mypy")
    checker = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--python-executable", python]
    completed = run(script.parent, *checker, script)
    assert completed.returncode == 0, completed.stdout + completed.stderr


TYPED = """
from typing import assert_type
import torch
from gradscale_torch import GradScaler, ShardedGradScaler, StepGuard

optimizer = torch.optim.LBFGS([torch.ones(1, requires_grad=True)])
largest: float | None = 1.0
for scaler in (GradScaler("cpu"), ShardedGradScaler("cpu")):
    assert_type(scaler.scale(torch.ones(())), torch.Tensor)
    assert_type(scaler.scale([torch.ones(())]), list[torch.Tensor])
    scaler.unscale_(optimizer)
    assert_type(scaler.unscale_(optimizer, max_norm=1.0), torch.Tensor)
    assert_type(scaler.unscale_(optimizer, max_norm=largest), torch.Tensor | None)
    assert_type(scaler.step(optimizer), float | None)
    assert_type(scaler.step(optimizer, lambda: torch.ones(())), float | None)
ShardedGradScaler("cpu", 2.0**10, 0.5, 2.0, 1000, True, process_group=None, hold=None)
StepGuard(max_norm=1.0, init_scale=1.0)  # type: ignore[call-arg]
"""

# Each call of torch's pages and of frameworks, with what they take it to return.
TORCHS = """
from collections.abc import Callable, Iterable
from typing import Any
import torch
from torch.amp import GradScaler

Losses = tuple[torch.Tensor, ...]
Optimizer = torch.optim.Optimizer
kind: type[torch.amp.GradScaler] = GradScaler


def train(optimizer: Optimizer, losses: Losses, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    scaler = GradScaler(device="cpu", init_scale=2.0**14, growth_interval=100, enabled=True) if losses else None
    if scaler is None or not scaler.is_enabled():
        return
    scaler.load_state_dict(state)
    scaler.set_growth_factor(scaler.get_growth_factor())
    scaler.set_growth_interval(scaler.get_growth_interval())
    scaled: torch.Tensor = scaler.scale(losses[0])
    torch.autograd.backward(scaled)
    torch.autograd.backward(scaler.scale(list(losses)))
    pair: Losses = scaler.scale((losses[0], losses[1]))
    several: Iterable[torch.Tensor] = scaler.scale(loss for loss in pair)
    unscale: Callable[[Optimizer], None] = scaler.unscale_
    unscale(optimizer)
    scaler.unscale_(optimizer)
    returned: float | None = scaler.step(optimizer, *args, closure=lambda: 0.0)
    returned = scaler.step(optimizer, *args, **kwargs)
    before: float = scaler.get_scale()
    scaler.update()
    skipped: bool = scaler.get_scale() < before
    scaler.update(torch.stack([*several]).sum() / scaler.get_scale())
    scaler.update(new_scale=2.0**10)
    saved: dict[str, Any] = scaler.state_dict()
    print(returned or 0.0, skipped, saved)
"""

NUMPYS = """
from typing import Any, assert_type
import gradscale
import numpy as np


class SGD:
    grads: object = [np.ones(3, np.float32)]

    def step(self) -> None: ...


scaler = gradscale.GradScaler()
assert_type(scaler.unscale_(SGD(), max_norm=1.0), Any)
assert_type(scaler.unscale_(SGD()), None)
scaler.unscale_(SGD(), norm_over="group")  # type: ignore[call-overload]
gradscale.GradScaler(warn_after="50")  # type: ignore[arg-type]
gradscale.StepGuard(init_scale=1.0)  # type: ignore[call-arg]
gradscale.ShardedGradScaler(init_scale=1.0)  # type: ignore[call-arg]
"""

JAXS = """
from typing import Any, assert_type
import gradscale
import gradscale_jax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from gradscale_jax import GuardedState, ScaledOptimizerState

params = {"w": jnp.ones(2)}
for tx in (gradscale_jax.guarded(optax.sgd(0.1), give_up_after=9), gradscale_jax.scaled(optax.sgd(0.1))):
    assert_type(tx.init(params), ScaledOptimizerState)
    assert_type(tx.update(params, tx.init(params))[1].skipped, jax.Array)
state = gradscale.presets.keras().init(like=jnp.ones(()))
assert_type(gradscale.unscale(params, state), tuple[dict[str, jax.Array], jax.Array])
assert_type(gradscale.unscale(params, state, dtype=np.float32), tuple[Any, jax.Array])
assert_type(gradscale.unscale([jnp.ones(2)], state, out=params), tuple[dict[str, jax.Array], jax.Array])
gradscale_jax.guarded(optax.sgd(0.1), policy=gradscale.DynamicScale())  # type: ignore[call-arg]
plain = gradscale_jax.value_and_grad(jnp.sum, gradscale.DynamicScale())
counting = gradscale_jax.value_and_grad(jnp.sum, gradscale.DynamicScale(), give_up_after=20)
assert_type(plain.init(params), gradscale.ScaleState[jax.Array])
assert_type(plain(plain.init(params), jnp.ones(2)).state, gradscale.ScaleState[jax.Array])
# Without any limit at run time the state is another.
assert_type(counting.init(params), GuardedState | Any)
"""

PROGRAMS = {
    "results_torch": TYPED,
    "results_arrays": NUMPYS,
    "program_of_torchs": TORCHS,
    "program_replaced": TORCHS.replace("from torch.amp import", "from gradscale_torch import"),
}


@pytest.mark.torch
@pytest.mark.tier("all")
def test_type_checkers_accept_a_program_of_torchs_class_and_what_methods_return(tmp_path: Path):
    require("mypy")
    # In one run: to read torch takes a minute.
    for name, program in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(program)
    files = [f"{name}.py" for name in PROGRAMS]
    completed = run(tmp_path, sys.executable, "-m", "mypy", "--strict", "--config-file=", *files)
    assert completed.returncode == 0, completed.stdout


@pytest.mark.jax
@pytest.mark.tier("all")
def test_type_checkers_know_what_functions_of_jax_return(tmp_path: Path):
    for library in ("mypy", "optax"):
        require(library)
    (tmp_path / "results_jax.py").write_text(JAXS)
    # optax says no types.
    options = ["--strict", "--config-file=", "--ignore-missing-imports"]
    completed = run(tmp_path, sys.executable, "-m", "mypy", *options, "results_jax.py")
    assert completed.returncode == 0, completed.stdout
