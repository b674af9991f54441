"""The checks of the project: ``nox -l`` lists them, ``nox`` runs those of each change, ``nox -s lint types`` two.

What follows ``--`` goes to pytest: ``nox -s core -- -k spikes``. ``.ci/run`` takes the same names, and makes all
environments anew. TIER is the tier of tests and examples: ranks by default, quick or all. GRADSCALE_TORCH is the torch
to test, such as ==2.15.*, and GRADSCALE_NUMPY core's NumPy. Other variables stand at the sessions that they are for.
"""

import os
import re
import runpy
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import nox
from packaging.requirements import Requirement

PYTHONS = os.environ.get("PYTHONS", "").split()
nox.needs_version = ">=2025.10.14"
nox.options.default_venv_backend = "virtualenv"
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = bool(PYTHONS)
# With the newest CuPy alone; the workflows test the oldest, too.
nox.options.sessions = ["lint", "types", "docs", "tests", "cupy(14.2.0)", "example", "wheel"]

ROOT = Path(__file__).parent
PROJECT = nox.project.load_toml("pyproject.toml")
TIER = os.environ.get("TIER") or "ranks"
TEST = "--group=test"
# What tests need, and which they are.
HOST = "numpy,strict,ml_dtypes"
CORE = "not mpi and not torch and not jax"
ON_HOST = "not torch and not jax and not gpu"
ON_TORCH = "torch and not jax and not gpu"
ON_JAX = "jax and not torch and not gpu"
ON_MLX = "mlx and not torch and not jax and not gpu"


def pinned(*names: str) -> list[str]:
    """Return what the dependency group all says of some packages, for any Python."""
    said = nox.project.dependency_groups(PROJECT, "all")
    return [each.partition(";")[0] for each in said if Requirement(each).name in names]


def lowest(*names: str) -> list[str]:
    """Return the oldest versions that extras and dependency groups allow, as pins."""
    named = PROJECT["project"]["optional-dependencies"] | PROJECT["dependency-groups"]
    needed = [each for name in names for each in named[name] if not each.startswith("gradscale[")]
    return [each.replace(">=", "==") for each in needed]


# The versions that are tested: of NumPy, torch and JAX, and of what trains with these.
NUMPY = "numpy" + os.environ.get("GRADSCALE_NUMPY", "")
TORCH = ["torch" + os.environ["GRADSCALE_TORCH"]] if os.environ.get("GRADSCALE_TORCH") else pinned("torch")
TORCH_HOSTS = [*TORCH, *pinned("lightning", "accelerate", "transformers", "pytorch-ignite", "tensorboard")]
JAX_HOSTS = pinned("jax", "optax", "flax", "orbax-checkpoint", "equinox", "jmp", "keras")
# array-api-strict needs a newer NumPy than the oldest.
OLDEST_TEST = [each for each in PROJECT["dependency-groups"]["test"] if not each.startswith("array-api-strict")]


def tools_of(session: nox.Session) -> Path:
    """Return the folder of the programs that the session tools has installed."""
    return session.env_dir.parent.resolve() / "tools" / "bin"


def run_tests(session: nox.Session, required: str, *arguments: str | Path) -> None:
    """Run the tests of a tier that arguments select; of the required libraries none may be missing."""
    command = ["python", "-m", "pytest", "-q", "--tier", TIER, *arguments, *session.posargs]
    session.run(*command, env={"GRADSCALE_TEST_REQUIRE": required})


@nox.session(reuse_venv=True)
def tools(session: nox.Session) -> None:
    """Make the environment that lint, types, docs, example, wheel and bench share."""
    groups = ("test", "examples", "flax", "equinox", "lint", "docs", "release")
    session.install("-e", ".[mpich,fast,cli,lightning,optax,mlx]", *TORCH, *(f"--group={name}" for name in groups))


@nox.session(venv_backend="none", requires=["tools"])
def lint(session: nox.Session) -> None:
    """Check style, format and imports, with ruff and import-linter."""
    session.run(tools_of(session) / "ruff", "check", ".")
    session.run(tools_of(session) / "ruff", "format", "--check", ".")
    session.run(tools_of(session) / "lint-imports")


@nox.session(venv_backend="none", requires=["tools"])
def types(session: nox.Session) -> None:
    """Check types, with mypy."""
    session.run(tools_of(session) / "mypy")


@nox.session(venv_backend="none", requires=["tools"])
def docs(session: nox.Session) -> None:
    """Run the examples in the docstrings, and build the site, in the folder site; more in .ci/docs/conf.py."""
    python = tools_of(session) / "python"
    session.env["JAX_PLATFORMS"] = "cpu"
    # gradscale_cupy cannot be imported without CuPy, and Keras has one backend in a process: its tests run them.
    packages = ["gradscale", *(f"backends/gradscale_{name}" for name in ("numpy", "torch", "jax", "mlx"))]
    # Two modules say the name of an adapter, and nothing else.
    ignored = [f"--ignore-glob={one}" for one in ("*/keras_optimizer.py", "gradscale/torch.py", "gradscale/jax.py")]
    doctests = ["--doctest-modules", *ignored, *packages]
    session.run(python, "-m", "pytest", "-q", "-n", "0", *doctests)
    shutil.rmtree("site", ignore_errors=True)
    with tempfile.TemporaryDirectory() as pages:
        options = ["-q", "-n", "-W", "--keep-going", "-c", ".ci/docs", "-d", f"{pages}/doctrees"]
        session.run(python, "-m", "sphinx", *options, pages, "site")


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run the README's test command in a fresh clone; in TIER=all also the benchmarks, timm and torchtitan."""
    _, _, command = Path("README.md").read_text().partition("<!-- command: tests -->\n```sh\n")
    command = command.partition("\n")[0] + " " + shlex.join(["--tier", TIER, "--durations", "20", *session.posargs])
    required = "numpy,strict,torch,mpi,fast,ml_dtypes,examples,lightning,accelerate,transformers,ignite,jax,optax,flax"
    required += ",orbax,equinox,jmp,keras,dask,ndonnx,nccl4py,cli,plot,tensorboard,mypy,pyright,hatchling"
    # MLX has wheels for Linux on these, and the dependency group asks for it there alone.
    if (os.uname().sysname, os.uname().machine) == ("Linux", "x86_64"):
        required += ",mlx"
    # It compiles the kernels of gradscale_cupy.
    required += ",nvcc" if shutil.which("nvcc") else ""
    clone = session.env_dir.resolve()
    shutil.rmtree(clone, ignore_errors=True)
    session.run("git", "clone", "--quiet", ROOT, clone)
    with session.chdir(clone):
        session.run("bash", "-euo", "pipefail", "-c", command, env={"GRADSCALE_TEST_REQUIRE": required})
        if TIER == "all":
            # That each benchmark runs; the numbers of a shared machine are not held against their targets.
            session.run(".venv/bin/python", "-m", "benchmarks", "--quick", env={"PYTHONPATH": "tests"})
            session.notify("timm")
            session.notify("torchtitan")


@nox.session
def timm(session: nox.Session) -> None:
    """Run the recipe for timm, whose torchvision fails in Lightning and transformers if torch is of another index."""
    session.install("-e", ".[torch]", TEST, *TORCH, "torchvision==0.28.0", "timm==1.0.31")
    run_tests(session, "torch,timm", "-n", "0", "--tier", "all", "tests/adapters/test_torch_recipes.py", "-k", "timm")


@nox.session
def torchtitan(session: nox.Session) -> None:
    """Run the recipes for torchtitan."""
    session.install("-e", ".[torch]", TEST, *TORCH, "tyro==1.*")
    # It asks for data sets and loggers, too, none of which its optimizers need.
    session.install("--no-deps", "torchtitan==0.3.0", "spmd_types==0.2.3")
    file = "tests/adapters/test_torch_recipes.py"
    run_tests(session, "torch,torchtitan", "-n", "0", "--tier", "all", file, "-k", "torchtitan")


# For each session of one library: what is installed, which tests run, and what may not be missing.
ALONE = {
    "core": ([".[fast,cli,plot]", TEST, NUMPY], CORE, f"{HOST},fast,cli,plot"),
    "torch": (
        [".[torch]", TEST, *TORCH_HOSTS],
        ON_TORCH,
        f"{HOST},torch,lightning,accelerate,transformers,ignite,tensorboard",
    ),
    "jax": ([".[jax]", TEST, *JAX_HOSTS], ON_JAX, f"{HOST},jax,optax,flax,orbax,equinox,jmp,keras"),
    "mlx": ([".[mlx]", TEST, *pinned("mlx")], ON_MLX, f"{HOST},mlx"),
    "oldest": ([".", *OLDEST_TEST, "numpy==1.26.*", "array-api-compat==1.11.*"], CORE, "numpy,ml_dtypes"),
    "oldest-host": ([".", TEST, "mpich", *lowest("fast", "mpi")], ON_HOST, f"{HOST},fast,mpi"),
    "oldest-torch": ([".", TEST, *lowest("torch", "lightning")], ON_TORCH, f"{HOST},torch,lightning"),
    "oldest-jax": ([".", TEST, *lowest("jax", "optax", "equinox")], ON_JAX, f"{HOST},jax,optax,equinox"),
    "oldest-mlx": ([".", TEST, *lowest("mlx")], ON_MLX, f"{HOST},mlx"),
}


def alone(session: nox.Session) -> None:
    """Run the tests of one library (core: NumPy), with that alone; oldest with the oldest versions that are allowed."""
    packages, markers, required = ALONE[session.name]
    session.install("-e", *packages)
    run_tests(session, required, "-m", markers)


for name in ALONE:
    nox.session(name=name)(alone)


@nox.session(venv_backend="none", requires=[name for name in ALONE if name.startswith("oldest")])
def minimums(session: nox.Session) -> None:
    """Run all sessions whose names begin with oldest."""


@nox.session(python=PYTHONS or nox.project.python_versions(PROJECT))
def pythons(session: nox.Session) -> None:
    """Run core's tests on other Pythons, of those that are here, or that PYTHONS="3.12 3.13" names."""
    if session.python == f"3.{sys.version_info.minor}":
        session.skip("the other sessions run on this Python")
    session.install("-e", ".[fast]", TEST)
    run_tests(session, f"{HOST},fast", "-m", CORE)


def on_mpi(session: nox.Session) -> None:
    """Run the MPI tests and the example; mpi is MPICH in TIER, the others all. RANKS=2 or 3 leaves the other out."""
    # Open MPI refuses root, and more ranks than cores, unless it is told that they are meant.
    session.env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    session.env["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    package, tier = ("mpich", TIER) if session.name == "mpi" else (session.name, "all")
    session.install("-e", ".[mpi,cli]", TEST, "--group=examples", package)
    ranks = ["-k", f"not mpi-{5 - int(os.environ['RANKS'])}"] if os.environ.get("RANKS") else []
    run_tests(session, f"{HOST},mpi,cli,examples", "--tier", tier, "-m", "mpi and not torch and not jax", *ranks)
    run_examples(session, Path(session.bin), "mpi")


for name in ("mpi", "mpich", "openmpi"):
    nox.session(name=name)(on_mpi)


# The examples of each library, each with arguments that make it short; in TIER=all it runs as the README has it.
EXAMPLES = {
    "mpi": {"mpiexec -n 2 python examples/train_digits.py --inject 60:1": "--steps 90"},
    "torch": {
        "torchrun --nproc-per-node 2 examples/train_fsdp.py --inject 30:1": "--steps 40",
        "python examples/lightning_plugin.py --inject 100": "--epochs 10",
    },
    "jax": {
        "python examples/train_jax.py --inject 120:2": "--steps 150",
        **{f"python examples/{name}.py": "" for name in ("flax_linen", "flax_nnx", "equinox_train")},
    },
    "mlx": {"mlx.launch -n 2 python examples/train_mlx.py": ""},
}
if TIER == "all":
    EXAMPLES["torch"]["torchrun --nproc-per-node 2 examples/fp16_rl.py --inject 10:1"] = ""
NEEDED = {
    "mpi": [".[mpich]", "--group=examples"],
    "torch": [".[torch,lightning]", "--group=examples", *TORCH],
    "jax": [".[optax]", "--group=examples", "--group=flax", "--group=equinox"],
    "mlx": [".[mlx]"],
}


def run_examples(session: nox.Session, programs: Path, library: str) -> None:
    """Run the examples of a library in a copy of them, with the programs of an environment."""
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as work, session.chdir(work):
        shutil.copytree(ROOT / "examples", "examples")
        for command, short in EXAMPLES[library].items():
            line = command if TIER == "all" else f"{command} {short}"
            if command.startswith("mlx.launch"):
                # It ends with 0 also if its ranks have failed.
                line = f"{line} | tee /dev/stderr | grep ^verified"
            session.run("bash", "-c", line, env={"PATH": path}, external=True)


@nox.session(venv_backend="virtualenv" if TIER == "all" else "none", requires=[] if TIER == "all" else ["tools"])
@nox.parametrize("library", list(EXAMPLES), ids=list(EXAMPLES))
def example(session: nox.Session, library: str) -> None:
    """Run the examples of a library; in TIER=all in an environment with what they need alone."""
    if TIER == "all":
        session.install("-e", *NEEDED[library])
    run_examples(session, Path(session.bin) if TIER == "all" else tools_of(session), library)


@nox.session(requires=["tools"])
def wheel(session: nox.Session) -> None:
    """Build the wheel, in the folder dist, check its contents, and run the quick tests against it as installed."""
    programs = tools_of(session)
    shutil.rmtree("dist", ignore_errors=True)
    session.run(programs / "python", "-m", "build", external=True, silent=True)
    (built,) = ROOT.glob("dist/*.whl")
    session.run(programs / "check-wheel-contents", built, external=True)
    session.run(programs / "twine", "check", "--strict", *ROOT.glob("dist/*"), external=True)
    session.install(f"{built}[cli,plot]", TEST)
    session.env["GRADSCALE_TEST_INSTALLED"] = "1"
    copied = ["tests", "examples", ".ci", "pyproject.toml", "README.md", "CHANGELOG.md", "CITATION.cff"]
    copied += [str(path) for folder in (".github", "gradscale", "backends") for path in Path(folder).rglob("*.md")]
    folders = [f"tests/{name}" for name in ("core", "adapters", "packaging", "distributed")]
    tier = TIER.replace("ranks", "quick")
    # Away from the clone, so that nothing but the wheel can be imported.
    with tempfile.TemporaryDirectory() as work:
        session.run("cp", "-r", "--parents", *copied, work, external=True)
        with session.chdir(work):
            run_tests(session, f"{HOST},cli,plot", "--tier", tier, *folders, "-m", CORE)


@nox.session(venv_backend="none", requires=["tools"])
def release(session: nox.Session) -> None:
    """Look whether this is the release TAG, such as v0.1.0; then wheel puts what to upload into the folder dist."""
    version = runpy.run_path("gradscale/version.py")["__version__"]
    if os.environ.get("TAG") != f"v{version}":
        session.error(f"TAG must be v{version}, as gradscale/version.py says, got {os.environ.get('TAG')!r}")
    if not re.search(rf"^## {version} \(\d{{4}}-\d\d-\d\d\)$", Path("CHANGELOG.md").read_text(), re.MULTILINE):
        session.error(f"CHANGELOG.md must date its section: ## {version} (YYYY-MM-DD)")
    # In a workflow: the pages of the index link to this repository.
    here = f"{os.environ.get('GITHUB_SERVER_URL')}/{os.environ.get('GITHUB_REPOSITORY')}"
    if "GITHUB_REPOSITORY" in os.environ and PROJECT["project"]["urls"]["Source"] != here:
        session.error(f"pyproject.toml must name {here} as Source and in its links")
    session.notify("wheel")


# The oldest CuPy that the extra allows, and the newest: its package, what it is built by, and headers of its CUDA.
CUPY = {
    "13.5.1": ("cupy-cuda12x", "Cython==3.1.*", "nvcc", "-cu12==12.9.*"),
    "14.2.0": ("cupy-cuda13x", "Cython==3.2.*", "crt", "==13.0.*"),
}


@nox.session
@nox.parametrize("version", list(CUPY), ids=list(CUPY))
def cupy(session: nox.Session, version: str) -> None:
    """Run the tests of CuPy and nccl4py themselves, over a driver and an NCCL that run on the host."""
    package, cython, compiler, cuda = CUPY[version]
    bindings = f"cuda-bindings=={cuda.rpartition('==')[2]}"
    headers = [f"nvidia-cuda-{name}{cuda}" for name in ("runtime", compiler, "cccl", "profiler-api")]
    extras = ["-e", ".[mpich,cli]", TEST, "--group=examples", *pinned("nccl4py", "jax")]
    session.install(*extras, f"{package}=={version}", bindings, "setuptools>=77", cython, *headers)
    made = session.env_dir.resolve() / "host_device"
    download = ["download", "--no-deps", "--no-binary", "cupy", "-d", str(made), f"cupy=={version}"]
    session.run("python", "-m", "pip", *download, env={"CUPY_INSTALL_USE_STUB": "1"})
    session.run("python", "tests/support/host_device/build.py", *made.glob("cupy-*.tar.gz"), made / "device")
    # A shell could read them: lines of export NAME=VALUE.
    for variable in shlex.split((made / "device" / "environment").read_text().replace("export ", "")):
        key, _, value = variable.partition("=")
        session.env[key] = value
    session.env["HOST_DEVICES"] = "3"
    files = [*ROOT.glob("tests/*/test_*cupy*.py"), "tests/packaging/test_pages.py"]
    required = "gpu,numpy,cupy,nccl4py,jax,mpi,cli,examples"
    run_tests(session, required, "-n", "2", "--timeout", "900", "-m", "cupy", *files)
    # That they run; the times are those of no device.
    session.run("python", "-m", "benchmarks", "--only", "cupy-", "--quick", env={"PYTHONPATH": "tests"})


@nox.session(venv_backend="none", requires=["tools"])
def bench(session: nox.Session) -> None:
    """Run the benchmarks; the numbers go to benchmarks.json."""
    python = tools_of(session) / "python"
    session.run(python, "-m", "benchmarks", "--json", "benchmarks.json", env={"PYTHONPATH": "tests"})


@nox.session
def mutants(session: nox.Session) -> None:
    """Run the tests against MUTANTS (400) small changes of the code; hours. Results go to mutants.json."""
    session.install("-e", ".[mpich,fast,cli]", "--group=all", "cosmic-ray==8.7.*", "pytest-testmon==2.2.*")
    session.run("python", ".ci/mutants.py", "--tier", TIER, "--count", os.environ.get("MUTANTS") or "400")


@nox.session
def gpu(session: nox.Session) -> None:
    """Run what needs a GPU; results go to the folder gpu-report. Without an index .ci/run gpu does, more in .ci/gpu."""
    said = session.run("nvidia-smi", silent=True, external=True)
    cuda = min(13, int(re.findall(r"CUDA.*? Version: *(\d+)", str(said))[0]))
    # From 2.11 on, pip finds a torch for CUDA 13.
    torch = TORCH if cuda == 13 else ["torch>=2.6,<2.11"]
    others = [f"jax[cuda{cuda}]", f"cupy-cuda{cuda}x[ctk]>=14", f"nvidia-nccl-cu{cuda}", f"cuda-bindings=={cuda}.*"]
    session.install("-e", ".[mpich,cli,optax,nccl4py]", TEST, "--group=examples", *torch, *others)
    session.run(".ci/gpu", env={"GPU_PYTHON": f"{session.bin}/python"}, external=True)
