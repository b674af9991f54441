"""The pages: their code runs as it stands, their commands are the ones that are tested."""

import importlib.util
import json
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest
from axes import require
from commands import ran
from cupy_devices import require_cupy, require_device_count
from recipe_blocks import names_given
from worlds import mpi_command, mpi_environment

ROOT = Path(__file__).parents[2]
FOLDERS = ("", ".github", "gradscale", "gradscale/interop", "examples", "tests", "tests/benchmarks")
FOLDERS += ("backends/gradscale_numpy", "backends/gradscale_torch", "backends/gradscale_jax", "backends/gradscale_cupy")
FOLDERS += ("backends/gradscale_nccl", "backends/gradscale_mlx")
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for name in FOLDERS for path in (ROOT / name).glob("*.md")}
COMMAND = re.compile(r"<!-- command: (\w+) -->\n```sh\n(.*?)```", flags=re.DOTALL)
COMMANDS = {name: (page, line) for page, text in PAGES.items() for name, line in COMMAND.findall(text)}
BLOCK = re.compile(r"<!-- run: ([\w-]+) -->\n```python\n(.*?)```", flags=re.DOTALL)
BLOCKS = [block for text in PAGES.values() for block in BLOCK.findall(text)]
# These take names for granted, and are run by the tests of the adapter that they are for.
RECIPE = re.compile(r"<!-- recipe: \w+ -->\n```python\n(.*?)```", flags=re.DOTALL)
LIBRARIES = "torch|jax|optax|mlx|flax|lightning|accelerate|transformers|mpi4py|array_api_strict"
LIBRARY = re.compile(rf"^(?:import|from) (?:gradscale_)?({LIBRARIES})\b", re.MULTILINE)

ON_GPUS = [pytest.mark.tier("all"), pytest.mark.cupy, pytest.mark.gpu]
MARKS = {"numpy-first": pytest.mark.tier("quick"), "cupy": ON_GPUS, "guard-cupy": ON_GPUS}
TORCHRUN = ("trainers-torchrun", "guard-ddp", "guard-fsdp2", "guard-micro-batches")

# What blocks do not say of themselves: that they have learnt.
LEARNT = {
    "guard-first": "assert loss.item() < 0.1 and guard.counts()['overflow'] == 1\n",
    "guard-numpy": "assert guard.counts() == {'taken': 198, 'overflow': 1, 'spike': 1, 'refused': 0}\n"
    "assert abs(optimizer.weights - 1).max() < 0.3 and resumed.counts() == guard.counts()\n",
    "numpy-first": "assert abs(sgd.weights - np.float32([1, -2])).max() < 0.01 and scaler.get_scale() < 65536\n",
    "guard-cupy": "assert [counts['overflow'] for counts, _ in results] == [1, 1]\n"
    "assert results[0][1].tolist() == results[1][1].tolist() and abs(results[0][1] - 1).max() < 0.3\n",
    "guard-torch": "assert guard.counts()['taken'] > 150 and loss.isfinite()\n",
    "guard-ddp": "assert guard.counts()['taken'] == average.n_averaged == schedule.last_epoch > 150\n",
    "guard-fsdp2": "assert guard.counts()['taken'] > 150 and loss.isfinite()\n",
    "guard-micro-batches": "assert guard.counts()['taken'] > 150 and guard.counts()['refused'] == 0\n",
    "guard-bad-batches": "assert callbacks.read_bad_batches('bad_batches.jsonl') == [2]\n",
    "guard-jax": "assert verdict.counts()['spike'] == verdict.counts()['overflow'] == 1\n"
    "assert abs(params['w'] - 1).max() < 0.2\n",
    "guard-mlx": "assert guard.counts() == {'taken': 198, 'overflow': 1, 'spike': 1, 'refused': 0}\n"
    "assert mx.abs(model.weight - 1).max().item() < 0.2\n",
    "cupy": "assert [report.skipped for report in scaler.history] == [True, False, False]\n"
    "assert optimizer.weights[0].get().tolist() == [0.25] * 3\n",
    "mpi": "assert comm.size == 2 and abs(optimizer.weights - np.float32([1, -2, 3, -4])).max() < 0.01\n",
    "guard-mpi": "assert comm.size == 2 and max(abs(each - 1).max() for each in optimizer.weights) < 0.01\n"
    "assert guard.counts() == {'taken': 198, 'overflow': 1, 'spike': 1, 'refused': 0}\n",
    "jax-shard-map": "assert mesh.size == 2 and gradscale_jax.verdict_of(opt_state).counts()['overflow'] == 1\n"
    "assert abs(params['w'] - 1).max() < 0.2\n",
    "jax-nnx": "assert gradscale_jax.verdict_of(optimizer.opt_state).counts()['overflow'] == 1\n"
    "assert abs(model.linear.kernel[...][:, 0] * model.norm.scale[...] - 1).max() < 0.3\n"
    "assert jnp.isfinite(model.norm.mean[...]).all()\n",
    "jax-optax": "assert abs(params['w'] - jnp.asarray([1, -2, 3, -4])).max() < 0.1 and opt_state.skipped > 0\n",
    "mlx": "assert loss.item() < 0.01 and scaler.last_step(trained).reason == 'stepped'\n",
    "mlx-compiled": "assert loss.item() < 0.01 and optimizer.step.item() == 200\n",
    "torch-first": "assert loss.item() < 0.1 and scaler.get_scale() <= 65536\n",
}


def test_every_block_of_python_is_run_and_every_command_known():
    assert set(COMMANDS) == {"digits", "tests", "fsdp", "spikes", "rl", "lightning", "jax"}
    names = [name for name, _ in BLOCKS]
    assert len(set(names)) == len(names)
    recipes = sum(len(RECIPE.findall(text)) for text in PAGES.values())
    assert sum(len(re.findall(r"```python", text)) for text in PAGES.values()) == len(BLOCKS) + recipes > recipes > 0


@pytest.mark.parametrize(
    ("name", "code"),
    [pytest.param(name, code, marks=MARKS.get(name, pytest.mark.tier("all")), id=name) for name, code in BLOCKS],
)
def test_a_block_runs(name: str, code: str, tmp_path: Path):
    # Not by the name of the library that it imports.
    program = tmp_path / f"block_{name}.py"
    program.write_text(code + LEARNT.get(name, ""))
    for library in LIBRARY.findall(code):
        require({"array_api_strict": "strict", "mpi4py": "mpi"}.get(library, library))
    if name in ("cupy", "guard-cupy"):
        require_device_count(require_cupy(), 2 if name == "guard-cupy" else 1)
    command = [sys.executable, program]
    if name in ("mpi", "guard-mpi", "resume", "trainers-mpi"):
        command = mpi_command(2, program)
    elif name in TORCHRUN:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"} if name == "jax-shard-map" else {}
    # Some of these make hundreds of a host's loops.
    completed = ran(*command, folder=tmp_path, seconds=280, **(mpi_environment() | devices))
    assert completed.returncode == 0, completed.stderr
    if name.startswith("trainers-"):
        assert re.search(r"^check_trainer: (15|19|2\d) runs$", completed.stderr, re.MULTILINE), completed.stderr
    if name.endswith("-first"):
        assert completed.stdout.splitlines() == re.findall(r"^print\(.*\)  # (.*)$", code, flags=re.MULTILINE)


# A page's own functions say no types, and torch re-exports some of its names in another way than checkers ask for.
PLAIN = ["--allow-untyped-defs", "--allow-untyped-calls", "--implicit-reexport", "--ignore-missing-imports"]
PYRIGHT = {"extraPaths": [str(ROOT), str(ROOT / "backends")], "reportPrivateImportUsage": False}
PYRIGHT |= dict.fromkeys(("reportMissingImports", "reportPossiblyUnboundVariable"), False)
CHECKERS = {
    "mypy": ["--config-file", ROOT / "pyproject.toml", "--cache-dir", "cache", *PLAIN, "."],
    "pyright": ["--pythonpath", sys.executable, "-p", "pyrightconfig.json"],
}
WRONG = "import gradscale\n\ngradscale.GradScaler(init_scale='x').steps\ngradscale.presets.megatrom()\n"
WRONG += "gradscale.StepGuard(init_scale=2.0)\nreveal_type(gradscale.StepGuard.__init__)\n"
# What a state's fields are beside an array. NumPy's types say a dtype, which no state beside one has: those are of Any.
STATES = """
from typing import Any, assert_type
import gradscale
import gradscale_jax
import jax
import jax.numpy as jnp
import numpy as np
import torch
from gradscale import ScaleState

policy, fixed = gradscale.DynamicScale(), gradscale.StaticScale(2.0)
for tensor in (torch.ones(()), torch.nn.Parameter(torch.ones(2))):
    state = policy.init(like=tensor)
    assert_type(state, ScaleState[torch.Tensor])
    assert_type(state.scale, torch.Tensor)
    assert_type(state.growth_tracker, torch.Tensor)
    assert_type(state._replace(scale=torch.ones(())).overflow_tracker, torch.Tensor)
    grads, nonfinite = gradscale.unscale([tensor], state)
    assert_type(nonfinite, torch.Tensor)
    assert_type(policy.update(state, nonfinite=nonfinite).rescale_tracker, torch.Tensor)
    assert_type(policy.backoff(state), ScaleState[torch.Tensor])
assert_type(fixed.update(fixed.init(jnp.ones(2)), nonfinite=jnp.int32(0)), ScaleState[jax.Array])
assert_type(jnp.log2(policy.init(jnp.ones(2)).scale), jax.Array)
rule = gradscale.SkipSpikes()
window = rule.init(like=torch.ones(()))
assert_type(rule.judge(window, torch.ones(())), torch.Tensor)
assert_type(rule.learn(window, torch.ones(()), skipped=False).values, torch.Tensor)
assert_type(rule.init(np.float32(0)).count, Any)
assert_type(gradscale.unscale({"w": jnp.ones(2)}, fixed.init(jnp.ones(2))), tuple[dict[str, jax.Array], jax.Array])
assert_type(gradscale_jax.value_and_grad(jnp.sum, policy).init(jnp.ones(2)).scale, jax.Array)
assert_type(policy.init(np.ones(2, np.float16)).scale, Any)
assert_type(policy.init(np.float32(0)), ScaleState[Any])
assert_type(gradscale.unscale([np.ones(2, np.float16)], policy.init(np.float32(0)))[1], Any)


def agreed(group: gradscale.Group, mine: torch.Tensor, state: ScaleState[torch.Tensor]) -> None:
    agree = gradscale.GroupAgreement(group, policy)
    assert_type(agree(mine, state), torch.Tensor)
    assert_type(agree(mine, state, mine > 0), tuple[torch.Tensor, torch.Tensor])


def of_any_library(state: ScaleState) -> Any:
    return assert_type(state.scale, Any)


class OwnPolicy:  # of one library, and without a word on arrays
    init_scale = 1.0

    def init(self, like: torch.Tensor) -> ScaleState[torch.Tensor]:
        return policy.init(like)

    def update(self, state: ScaleState, *, nonfinite: torch.Tensor) -> ScaleState:
        return state

    def backoff(self, state: ScaleState[torch.Tensor]) -> ScaleState[torch.Tensor]:
        return state

    def clamp(self, scale: float) -> float:
        return scale

    def at_min_scale(self, state: ScaleState) -> None: ...


of_any_library(gradscale.ScaleState(1.0, 0, 0, 0))
scaler = gradscale.GradScaler(policy=OwnPolicy())
"""
# mypy says which options have a default, and not what it is.
SHOWN = {"mypy": "warn_after: int | None =, ", "pyright": "warn_after: int | None = 50, "}


@pytest.mark.tier("all")
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    "GRADSCALE_TEST_INSTALLED" in os.environ, reason="GRADSCALE_TEST_INSTALLED is set: this is no clone"
)
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_strict_type_checker_accepts_every_block(checker: str, tmp_path: Path):
    require(checker)
    blocks = [*dict(BLOCKS).values(), *(code for text in PAGES.values() for code in RECIPE.findall(text))]
    assert len(blocks) > 60
    for number, code in enumerate(blocks):
        given = "".join(f"from given import {name}\n" for name in sorted(names_given(code)))
        (tmp_path / f"block_{number}.py").write_text(given + code)
    (tmp_path / "given.py").write_text("from typing import Any\n\n\ndef __getattr__(name: str) -> Any: ...\n")
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "states.py").write_text(STATES)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(PYRIGHT))
    completed = ran(sys.executable, "-m", checker, *CHECKERS[checker], folder=tmp_path, seconds=500)
    errors = [line for line in completed.stdout.splitlines() if " error: " in line or " - error" in line]
    assert [line for line in errors if "wrong.py" not in line] == [], completed.stdout + completed.stderr
    assert len(errors) == 4, completed.stdout + completed.stderr
    assert SHOWN[checker] in completed.stdout


@pytest.mark.tier("all")
def test_the_table_of_what_is_tested_is_that_of_the_tests():
    for name in ("strict", "torch", "jax", "dask"):
        require(name)
    completed = ran(sys.executable, ROOT / ".ci" / "docs" / "tested.py", "--check")
    assert completed.returncode == 0, completed.stderr


def test_the_documents_tell_nothing_of_the_machine_they_were_written_on():
    texts = {**PAGES, **{path.name: path.read_text() for path in ROOT.glob("examples/**/*.py")}}
    for name, text in texts.items():
        assert not re.search(r"/(root|work|home|tmp|opt)/", text), name


def test_the_front_page_installs_from_the_address_of_the_project():
    source = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    text = (ROOT / "README.md").read_text()
    assert f"pip install 'gradscale[torch] @ git+{source}'" in text
    assert f"git clone {source}`" in text


def test_the_map_of_an_iteration_names_what_is_there():
    text = PAGES[".github/CONTRIBUTING.md"]
    packages = [importlib.util.find_spec(name) for name in ("gradscale", "gradscale_torch")]
    files = [path for package in packages for path in Path(package.origin).parent.rglob("*.py")]
    code = "".join(path.read_text() for path in files)
    there = {*re.findall(r"(?:def|class) (\w+)", code), *re.findall(r"^    (\w+): ", code, re.MULTILINE)}
    called = re.findall(r"^ *(?:scaler|iteration|backend|current|guard|mistakes)\.(?!py\b)(\w+)", text, re.MULTILINE)
    rows = re.findall(r"^\| .*\? \| (.*) \|$", text, re.MULTILINE)
    named = [part for row in rows for name in re.findall(r"`([\w.]+)`", row) for part in name.split(".")]
    assert min(len(called), len(named)) > 12
    assert {*called, *named} - there == set()
