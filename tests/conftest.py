"""The axis ``arrays`` of every test, the tiers, and what libraries read once when they are imported."""

import gc
import os
import signal
import tempfile
from collections.abc import Iterator

import pytest
from axes import VARIABLE, require, required
from hypothesis import HealthCheck, settings
from libraries import ROWS, Library, opened
from tiers import TIERS, choose, examples, is_in, repeats

# A shell's background jobs ignore Ctrl-C, and so would the programs that are to be interrupted by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# One thread a process: the machine's cores belong to the tests of other processes, and to their ranks.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

# Before JAX looks at its devices, which it does once: several on a machine that has one.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()

# What JAX compiles for one process serves the others, the ranks and examples among them: half of its tests' time.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _compiled = tempfile.TemporaryDirectory(prefix="gradscale-jax-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

_LARGEST_WORKERS = 4


@pytest.fixture(params=ROWS)
def arrays(request: pytest.FixtureRequest) -> Iterator[Library]:
    """Return an array library; each test runs once on each."""
    with opened(request.param) as library:
        yield library


@pytest.fixture
def cli():
    """Skip where the command line cannot run."""
    require("cli")


@pytest.fixture
def strict() -> Iterator[Library]:
    """Return array-api-strict alone, for what only its several devices can show."""
    with opened("strict") as library:
        yield library


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager):
    """Add the option that chooses the tier, and the setting of pytest-timeout where that is not installed."""
    parser.addoption("--tier", choices=TIERS, default=TIERS[0], help="which tests are run (default: %(default)s)")
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds that a test may take, which only pytest-timeout limits")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config):
    """Spread the tests over processes, as ``-n auto --dist loadfile`` does, where pytest-xdist is installed.

    The tests of a file stay in one process: they share what is slow to start, such as ranks.
    """
    if not config.pluginmanager.hasplugin("xdist") or hasattr(config, "workerinput"):
        return
    if config.option.numprocesses is None and not config.option.tx:
        config.option.numprocesses = "auto"
    if config.option.dist == "no":
        config.option.dist = "loadfile"


def pytest_configure(config: pytest.Config):
    """Tell the tier to the modules of tests, which are imported after this."""
    choose(config.getoption("--tier"))
    # Shared machines stall; and the fixtures here hold nothing that one example could spoil for the next.
    settings.register_profile(
        "gradscale",
        max_examples=examples(100),
        deadline=None,
        # A change passes or fails by what it is, and not by what is drawn; the last tier draws anew in each run.
        derandomize=config.getoption("--tier") != TIERS[-1],
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    settings.load_profile("gradscale")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return over how many processes ``-n auto`` spreads the tests: those that run ranks keep all cores busy."""
    # macOS has no affinity.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _LARGEST_WORKERS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]):
    """Leave out what a later tier runs, and rows that would repeat another one or take minutes.

    The row ``jax-jit`` is for modules that say ``TRACED = True``; elsewhere it is the row ``jax``. The row ``dask``,
    where each operation is planned, is not for those that say ``LONG = True``.
    """
    # Tests that are named by their ids are of any tier.
    tier = TIERS[-1] if any("::" in argument for argument in config.args) else config.getoption("--tier")
    left_out = {item for item in items if _is_left_out(item) or not is_in(tier, item)}
    if tier != TIERS[-1]:
        left_out |= repeats(item for item in items if item not in left_out)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_runtest_setup(item: pytest.Item):
    """Skip a test whose marks name a library that is missing; fail if that is required."""
    for name in ("torch", "jax", "mlx", "mpi"):
        if item.get_closest_marker(name) is not None:
            require(name)


def pytest_collection_finish():
    """Spare the garbage collector what the collection has made and the session keeps: thousands of tests."""
    gc.collect()
    gc.freeze()


def _is_left_out(item: pytest.Item) -> bool:
    module = getattr(item, "module", None)
    row = item.callspec.params.get("arrays") if hasattr(item, "callspec") else None
    takes = {"jax-jit": getattr(module, "TRACED", False), "dask": not getattr(module, "LONG", False)}
    return not takes.get(row, True)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Print what the tests run with."""
    return [
        f"tier: {config.getoption('--tier')}, of {', '.join(TIERS)}",
        f"{VARIABLE}: {', '.join(sorted(required())) or 'nothing'}",
    ]
