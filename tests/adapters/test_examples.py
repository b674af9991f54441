"""The examples as a user runs them: what they print and write, what they refuse, and how they end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from axes import require
from commands import ran
from worlds import mlx_command, mpi_command, mpi_environment

pytestmark = pytest.mark.tier("all")

EXAMPLES = Path(__file__).parents[2] / "examples"
# Machines with a GPU run nothing here on it. Copies of an example find what it shares with the others.
ENVIRONMENT = mpi_environment() | {
    "CUDA_VISIBLE_DEVICES": "",
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": os.pathsep.join(filter(None, (str(EXAMPLES), os.environ.get("PYTHONPATH")))),
}

# What Python runs to start ranks of torch; their number follows.
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def changed(folder: Path, program: Path, *changes: tuple[str, str]) -> Path:
    """Return a copy of a program with some of its text replaced."""
    source = program.read_text()
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    copy = folder / "changed.py"
    copy.write_text(source)
    return copy


def lines(completed: subprocess.CompletedProcess[str]) -> list[str]:
    """Return what was printed, without the progress bars."""
    printed = re.split(r"[\r\n]+", completed.stdout)
    return [line for line in printed if line.strip() and not re.search(r"it/s|s/it", line)]


def interrupted(command: Sequence[str], folder: Path, begun: str) -> tuple[int, str]:
    """Start a program, interrupt it once it has said that it has begun, and return its status and errors."""
    process = subprocess.Popen(
        command,
        env=ENVIRONMENT | {"PYTHONUNBUFFERED": "1"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # So that the signal goes, as from a terminal, to a launcher and its ranks, and not to this process.
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        assert any(begun in line for line in process.stdout)
        time.sleep(2)
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, errors


class Program(NamedTuple):
    """An example: its name, the libraries that it needs, the mark of one, and how several ranks of it are started."""

    name: str
    needs: str
    mark: Any = None
    start: Callable[..., list[str]] | None = None

    def command(self, size: int, *arguments: object) -> list[str]:
        """Return the command line for so many ranks."""
        alone = size == 1 or self.start is None
        return [sys.executable, *map(str, arguments)] if alone else self.start(size, *map(str, arguments))  # type: ignore[misc]


def torch_command(size: int, *arguments: str) -> list[str]:
    return [sys.executable, *TORCHRUN, str(size), *arguments]


DIGITS = Program("train_digits.py", "numpy examples", None, mpi_command)
FSDP = Program("train_fsdp.py", "torch examples", pytest.mark.torch, torch_command)
RL = Program("fp16_rl.py", "torch examples", pytest.mark.torch, torch_command)
SPIKES = Program("spikes.py", "torch examples", pytest.mark.torch, torch_command)
JAX = Program("train_jax.py", "jax examples", pytest.mark.jax)
LIGHTNING = Program("lightning_plugin.py", "torch lightning examples", pytest.mark.torch)
RECIPES = [
    Program("flax_linen.py", "jax examples flax optax", pytest.mark.jax),
    Program("flax_nnx.py", "jax examples flax optax orbax", pytest.mark.jax),
    Program("equinox_train.py", "jax examples equinox optax", pytest.mark.jax),
]
MLX = Program("train_mlx.py", "mlx", pytest.mark.mlx, mlx_command)


def case(program: Program, size: int, name: str, *values: object, tier: str | None = None):
    """Return a row of a table, with the marks of its program and its ranks."""
    is_mpi = size > 1 and program.start is mpi_command
    marks = [program.mark, pytest.mark.mpi if is_mpi else None, pytest.mark.tier(tier) if tier else None]
    ranks = f"-{'mpi' if is_mpi else 'ranks'}-{size}" if size > 1 else ""
    identity = f"{program.name.removesuffix('.py')}{ranks}-{name}"
    return pytest.param(program, size, *values, marks=list(filter(None, marks)), id=identity)


def need(program: Program, size: int):
    for name in program.needs.split():
        require(name)
    if size > 1 and program.start is mpi_command:
        require("mpi")


def launch(
    program: Program,
    folder: Path,
    size: int,
    arguments: str,
    *changes: tuple[str, str],
    environment: Mapping[str, str] = ENVIRONMENT,
) -> subprocess.CompletedProcess[str]:
    """Run an example, some of whose text may be replaced, on so many ranks."""
    need(program, size)
    path = changed(folder, EXAMPLES / program.name, *changes) if changes else EXAMPLES / program.name
    return ran(*program.command(size, path, *arguments.split()), folder=folder, seconds=240, **environment)


def printed(completed: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines of a run that has ended well, without a word on stderr."""
    assert (completed.returncode, completed.stderr) == (0, ""), completed.stdout + completed.stderr
    return lines(completed)


Table = dict[str, dict[str, float]]


def table(text: list[str]) -> Table:
    """Return the numbers of each run by the titles of their columns."""
    begin, end = (next(at for at, line in enumerate(text) if line.startswith(first)) for first in ("  ", "("))
    titles = re.split("  +", text[begin].strip())
    cells = [line.rsplit(maxsplit=len(titles)) for line in text[begin + 1 : end]]
    return {name: dict(zip(titles, (float(n.rstrip("%")) for n in row), strict=True)) for name, *row in cells}


def everybody(size: int) -> tuple[str, str]:
    return ("1 rank", "rank 0") if size == 1 else (f"{size} ranks", f"ranks {' '.join(map(str, range(size)))}")


def keeps_gradients(_: list[str], rows: Table):
    """Assert that scaling keeps the gradients that float16 loses."""
    fp32, unscaled, *scaled = (row["zero gradients"] for row in rows.values())
    assert unscaled > fp32 + 10
    assert all(abs(zeros - fp32) < 1 for zeros in scaled)


def compiles_once(_: list[str], rows: Table):
    assert all(1 <= row["compilations"] <= 2 for row in rows.values())


def rounds_finer_in_fp16(text: list[str], rows: Table):
    """Assert that the two passes differ by less in float16, which has three bits more."""
    found = [
        re.fullmatch(r"(?:bf16|fp16): median (\S+), mean (\S+), 99 % below \S+, largest \S+", line) for line in text
    ]
    bf16, fp16 = (list(map(float, match.groups())) for match in found if match)
    assert all(4 < coarse / fine < 16 for coarse, fine in zip(bf16, fp16, strict=True))
    assert 4 < rows["bf16"]["mismatch"] / rows["fp16, gradscale"]["mismatch"] < 16


def leaves_no_trace(_: list[str], rows: Table):
    """Assert that a bad batch spoils the run in which its step is made, and not the one that skips it."""
    _, bad, _, skipped = (row["beside the first"] for row in rows.values())
    assert bad > 5
    assert abs(skipped) < 1


SAME = "verified: weights and scaler state are bit-identical on {where}"
ONE = f"{SAME}, which skipped as one"
WITH_SCHEDULE = ONE.replace(" and", ", schedule and")


def run(program: Program, size: int, rank: int, steps: int, skip: str, names: str, last: str, also, more: str, **given):
    """Return a row of the table, of runs of so many steps of which the last one skips one step."""
    (where, ranks), (*clean, skipping) = everybody(size), names.split("; ")
    counts = {**dict.fromkeys(clean, (steps, 0)), skipping: (steps - 1, 1)}
    name = f"{given.pop('name', '')}rank-{rank}"
    shown = [skip.format(rank=rank, ranks=ranks)], counts, last.format(where=where), also
    return case(program, size, name, f"--steps {steps} {more.format(rank=rank)}", *shown, **given)


def fsdp(method: str, size: int, rank: int):
    # DDP has averaged the gradients by then; a shard's overflow is seen by its owner alone.
    # 65536 doubles after 10 clean steps.
    seen = "{ranks}" if method == "DDP" else "rank {rank}"
    skip = f"step 15: overflow injected on rank {{rank}}, seen by {seen}; {{ranks}} skipped; scale 2^17 -> 2^16"
    names = f"fp32 DDP; fp16 {method}, no scaling; fp16 {method}, gradscale"
    more = f"{'' if method == 'FSDP2' else f'--{method.lower()} '}--inject 15:{{rank}}"
    return run(FSDP, size, rank, 20, skip, names, SAME, keeps_gradients, more, name=f"{method}-")


# 65536 doubles after 25 clean steps, and the overflow halves it.
DIGITS_SKIP = "step 30: overflow seen by rank {rank} (injected); {ranks} skipped; scale 2^17 -> 2^16"
DIGITS_NAMES = "fp32; fp16, no scaling; fp16 with gradscale"
RL_SKIP = "step 2: overflow injected on rank {rank}, seen by rank {rank}; {ranks} skipped; scale 2^16 -> 2^15"
RL_NAMES, RL_MORE = "bf16; fp16, no scaling; fp16, gradscale", "--text-steps 10 --inject 2:{rank}"
# From the 65th step on losses are judged.
SPIKE = "step 70: spike injected on rank {rank}, seen by rank {rank}; {ranks} skipped"
SPIKE_NAMES = "no bad batch; bad batches; bad batches, clipped to 1; bad batches, SkipSpikes"
# The one device owns the shards of all four; 65536 doubles after 15 clean steps, and each overflow halves it.
ON_DEVICES = [
    f"step {16 + device}: overflow injected on device {device}, seen by device {device * is_owner}; "
    f"{devices} skipped; scale 2^{17 - device} -> 2^{16 - device}"
    for is_owner, devices in ((0, "device 0"), (1, "devices 0 1 2 3"))
    for device in range(4)
]
JAX_NAMES = ("fp32, 4 devices", "fp16, no scaling, 4 devices", "fp16 gradscale, 1 device", "fp16 gradscale, 4 devices")
RUNS = [
    *(
        run(DIGITS, size, rank, 60, DIGITS_SKIP, DIGITS_NAMES, SAME, keeps_gradients, "--inject 30:{rank}", tier=tier)
        for size, rank, tier in ((1, 0, None), (2, 0, "ranks"), (2, 1, None), (3, 2, None))
    ),
    *(fsdp(method, 2, rank) for method, rank in (("FSDP2", 0), ("FSDP2", 1), ("FSDP1", 1), ("DDP", 1))),
    fsdp("FSDP2", 1, 0),
    *(run(RL, n, n - 1, 3, RL_SKIP, RL_NAMES, WITH_SCHEDULE, rounds_finer_in_fp16, RL_MORE) for n in (1, 2)),
    run(SPIKES, 2, 1, 80, SPIKE, SPIKE_NAMES, ONE, leaves_no_trace, "--every 70"),
    case(
        *(JAX, 1, "each-device", "--steps 20 --inject 16:0 --inject 17:1 --inject 18:2 --inject 19:3", ON_DEVICES),
        dict(zip(JAX_NAMES, [(20, 0)] * 2 + [(16, 4)] * 2, strict=True)),
        "verified: skipped steps, scales and scaler state are bit-identical on 1 device and on each of 4",
        compiles_once,
    ),
]
SHOWN = ("program", "size", "arguments", "skips", "counts", "last", "also")


def run_and_check(folder: Path, program: Program, size: int, arguments: str, *shown: Any, **options: Any) -> str:
    """Run an example, and assert what it shows; return its first line."""
    skips, counts, last, also = shown
    text = printed(launch(program, folder, size, arguments, **options))
    assert [line for line in text if line.startswith("step ")] == skips
    assert text[-1] == last
    rows = table(text)
    assert {name: (row["steps taken"], row["skipped"]) for name, row in rows.items()} == counts
    also(text, rows)
    assert [path.name for path in folder.iterdir()] == [program.name.replace(".py", ".png")]
    return text[0]


@pytest.mark.parametrize(SHOWN, RUNS)
def test_all_skip_where_one_overflows(tmp_path: Path, program, size, arguments, skips, counts, last, also):
    first = run_and_check(tmp_path, program, size, arguments, skips, counts, last, also)
    if size == 1 and program in (FSDP, RL, SPIKES):
        assert "for more: torchrun --nproc-per-node 2 " in first


@pytest.mark.gpu
@pytest.mark.parametrize(SHOWN, [fsdp(method, 1, 0) for method in ("FSDP2", "FSDP1", "DDP")])
def test_one_process_trains_on_a_gpu(tmp_path: Path, program, size, arguments, skips, counts, last, also):
    if not require("torch").cuda.is_available():
        pytest.skip("torch sees no GPU")
    visible = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "0"}
    first = run_and_check(tmp_path, program, size, arguments, skips, counts, last, also, environment=visible)
    assert first.startswith("1 rank, nccl on cuda")


@pytest.mark.parametrize(("program", "size"), [case(DIGITS, 1, "learns"), case(JAX, 1, "learns")])
def test_only_float16_without_scaling_fails_to_learn(tmp_path: Path, program: Program, size: int):
    text = printed(launch(program, tmp_path, size, ""))
    rows = table(text)
    keeps_gradients(text, rows)
    fp32, unscaled, *scaled = (row["test accuracy"] for row in rows.values())
    assert min(fp32, *scaled) > 90
    assert unscaled < 50
    # On one device and on four.
    found = [{title: row[title] for title in list(row)[:5]} for name, row in rows.items() if "gradscale" in name]
    assert found == [found[0]] * len(found)


NO_MPI4PY = ("import sys\n", "import sys\n\nsys.modules['mpi4py'] = None\n")


def before(line: str, code: str) -> tuple[str, str]:
    """Return the change that puts a line of a function before another one."""
    return line, f"    {code}\n{line}"


FORGETTING = "content = torch.load(checkpoint); content.pop('MixedPrecision'); torch.save(content, checkpoint)"
STATES = "weights or scaler state differ on {size} ranks"
SKIPS = "weights, schedule, skips or scaler state differ on 2 ranks"
UNSEEN_BY_ONE = [("flags.reshape(", "(flags & (len(run.devices) > 1)).reshape(")]
COUNTED = [before("    # With the optimizer's count of steps", "optimizer.steps += ranks.rank")]
STEPPED = [before("    run.is_verified = ", "next(iter(optimizer.state.values()))['step'].add_(ranks.rank)")]
LOST = [before("    saved = stopped.precision_plugin", FORGETTING)]
ON_JAX, ON_RL = "--steps 3 --inject 2:1", "--steps 3 --text-steps 10 --inject 2:1"
ALONE = ("import ShardedGradScaler\n", "import GradScaler as ShardedGradScaler\n")
SPIKED_ALONE = "weights, skips or scaler state differ on 2 ranks"
AT_STEP, AUTOCAST = "        activations = forward(weights, images[mine])\n", "        with autocast:\n"
RAISING = "        if ranks.rank == 1:\n            raise ValueError('this rank fails')\n"
FAILS = "ValueError: this rank fails"
# What is changed in an example, and what is said for it.
WRONG = [
    case(DIGITS, 3, "raises", "--steps 5", [(AT_STEP, RAISING + AT_STEP)], FAILS),
    case(FSDP, 2, "raises", "--steps 5", [(AUTOCAST, RAISING + AUTOCAST)], FAILS),
    case(DIGITS, 2, "no-mpi4py", "", [NO_MPI4PY], "mpiexec started 2 processes, and mpi4py cannot be used"),
    case(DIGITS, 3, "state", "--steps 5", COUNTED, STATES),
    case(FSDP, 2, "steps", "--steps 1", STEPPED, STATES),
    case(RL, 2, "skips", ON_RL, [("view(-1)[0] = math.inf", "view(-1)[0] = 0.0")], SKIPS),
    case(SPIKES, 2, "alone", "--steps 80 --every 70", [ALONE], SPIKED_ALONE),
    case(JAX, 1, "skips", ON_JAX, UNSEEN_BY_ONE, "FAILED: these differ: skipped steps on 1 device and on 4"),
    case(LIGHTNING, 1, "state", "--epochs 2 --inject 3", LOST, "FAILED: the resumed run has come to another state"),
    case(MLX, 1, "trace", "--steps 6 --bad 2", [("nonfinite == 0", "nonfinite >= 0")], "leaves the weights"),
]


@pytest.mark.parametrize(("program", "size", "arguments", "changes", "said"), WRONG)
def test_a_run_that_goes_wrong_ends_on_all_ranks_says_why_and_is_not_verified(
    tmp_path: Path, program: Program, size: int, arguments: str, changes: list[tuple[str, str]], said: str
):
    completed = launch(program, tmp_path, size, arguments, *changes)
    assert completed.returncode != 0
    assert "verified" not in completed.stdout
    if said == FAILS or "mpi4py" in said:
        assert said in completed.stderr
        assert completed.stderr.count(FAILS) <= 1, completed.stderr
    else:
        assert completed.returncode == 1, completed.stderr
        # A launcher may have added something.
        (verdict,) = (line for line in lines(completed) if line.startswith("FAILED: "))
        assert said.format(size=size) in verdict


NO_FOLDER = "there is no folder missing"
REFUSED = [
    case(program, size, arguments.replace("/", "."), arguments, message)
    for program, size, arguments, message in [
        (DIGITS, 2, "--inject=5:2", "a step from 1 to 600 and a rank from 0 to 1, got 5:2"),
        (DIGITS, 1, "--inject 5", "must be STEP:RANK, such as 120:2, got '5'"),
        (DIGITS, 2, "--output missing/plot.png", NO_FOLDER),
        (FSDP, 2, "--inject=5:2", "a step from 1 to 200 and a rank from 0 to 1, got 5:2"),
        (RL, 1, "--plot plot.txt", "must end in .png, .svg, .pdf, got plot.txt"),
        (JAX, 1, "--devices 3", "must be one of [1, 2, 4, 8, 16], got 3"),
        (LIGHTNING, 1, "--inject 241", "argument --inject: must be a step from 1 to 240, got 241"),
    ]
]


@pytest.mark.parametrize(("program", "size", "arguments", "message"), REFUSED)
def test_bad_options_are_refused_once(tmp_path: Path, program: Program, size: int, arguments: str, message: str):
    completed = launch(program, tmp_path, size, arguments)
    is_torchrun = size > 1 and program.start is torch_command
    # torchrun ends with 1, and with a traceback of its own.
    assert completed.returncode == (1 if is_torchrun else 2)
    assert completed.stderr.count(message) == 1, completed.stderr
    assert is_torchrun or "Traceback" not in completed.stderr
    assert completed.stdout == ""
    assert list(tmp_path.iterdir()) == []


LIKE_ONE_RUN = "verified: weights, optimizer and scaler state of the resumed run are bit-identical to those of one run"


@pytest.mark.parametrize(
    ("program", "size"),
    [case(program, 1, "help") for program in (DIGITS, FSDP, RL, SPIKES, JAX, LIGHTNING, MLX, *RECIPES)],
)
def test_help_shows_how_to_run_it(tmp_path: Path, program: Program, size: int):
    text = printed(launch(program, tmp_path, size, "--help"))
    shown = re.findall(r"^    (?:python|torchrun|mpiexec) .*$", (EXAMPLES / program.name).read_text(), re.MULTILINE)
    assert shown
    assert set(shown) <= set(text)


@pytest.mark.parametrize(
    ("program", "size", "arguments", "begun", "status"),
    [
        # torchrun ends with 1, and with a traceback of its own, when it is interrupted.
        case(FSDP, 2, "steps", "--steps 100000", "gloo on cpu", 1),
        case(JAX, 1, "steps", "--steps 100000", "4 devices, cpu", 130),
        case(LIGHTNING, 1, "steps", "--epochs 1000", "overflow", 130),
    ],
)
def test_an_interrupted_run_ends_promptly(
    tmp_path: Path, program: Program, size: int, arguments: str, begun: str, status: int
):
    need(program, size)
    ended, errors = interrupted(program.command(size, EXAMPLES / program.name, *arguments.split()), tmp_path, begun)
    assert ended == status
    assert errors.count("interrupted\n") == 1, errors
    assert "KeyboardInterrupt" not in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.torch
def test_lightning_learns_and_resumes_bit_for_bit(tmp_path: Path):
    *_, accuracy, verified = printed(launch(LIGHTNING, tmp_path, 1, "--inject 100"))
    match = re.fullmatch(r"test accuracy (\d+\.\d)% after \d+ steps, and \d+ skipped", accuracy)
    assert match is not None
    assert float(match[1]) > 93
    assert verified == LIKE_ONE_RUN
    assert list(tmp_path.iterdir()) == []


@pytest.mark.torch
@pytest.mark.parametrize("steps", [(1, 13, 48), (24, 25)], ids=["first-and-last", "around-the-checkpoint"])
def test_lightning_skips_each_overflow_and_its_checkpoint_serves_torchs_scaler(tmp_path: Path, steps: tuple[int, ...]):
    torch = require("torch")
    injections = " ".join(f"--inject {step}" for step in steps)
    text = printed(launch(LIGHTNING, tmp_path, 1, f"--epochs 4 --checkpoint digits.ckpt {injections}"))
    halvings = [
        f"  step {step}: overflow in 1 gradient, skipped; scale 2^{16 - count} -> 2^{15 - count}"
        for count, step in enumerate(steps)
    ]
    early = [step for step in steps if step <= 24]
    scale, clean = 2.0 ** (16 - len(early)), 24 - early[-1]
    told = f"  saved: scale {scale:g}, {clean} clean steps of 40"
    # In one run, up to the checkpoint, and from there.
    parts = [*halvings, *halvings[: len(early)], told, *halvings[len(early) :]]
    assert [line for line in text if line.startswith("  ")] == parts
    assert text[-2].endswith(f" after {48 - len(steps)} steps, and {len(steps)} skipped")
    assert text[-1] == LIKE_ONE_RUN
    assert [path.name for path in tmp_path.iterdir()] == ["digits.ckpt"]
    saved = torch.load(tmp_path / "digits.ckpt", weights_only=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(saved["MixedPrecision"])
    assert scaler.state_dict() == saved["MixedPrecision"]
    assert (scaler.get_scale(), scaler._get_growth_tracker(), scaler.get_growth_interval()) == (scale, clean, 40)


@pytest.mark.parametrize(("program", "size"), [case(program, 1, "resumes") for program in RECIPES])
def test_a_recipe_learns_skips_and_resumes(tmp_path: Path, program: Program, size: int):
    text = "\n".join(printed(launch(program, tmp_path, size, "")))
    result = re.search(r"accuracy ([\d.]+)%, skipped (\d+) of 200 steps, final scale ([\d.e+]+)", text)
    assert result, text
    assert float(result[1]) > 93
    # 2**24 is too large by a few halvings, of one skipped step each; then it doubles again every 50 steps.
    assert 1 <= int(result[2]) <= 20
    assert 2.0**12 <= float(result[3]) < 2.0**24
    assert re.search(r"resumed with scale [\d.e+]+", text), text
    assert list(tmp_path.iterdir()) == []
    # What it computes is what it would have computed without having been saved and resumed.
    straight = printed(launch(program, tmp_path, size, "", ("if step == options.steps // 2:", "if step < 0:")))
    assert not any("resumed" in line for line in straight)
    assert text.splitlines()[-1] == straight[-1]


@pytest.mark.parametrize(
    ("program", "size", "bad"), [case(MLX, size, f"rank-{bad}", bad) for size in (1, 2) for bad in range(size)]
)
def test_a_bad_batch_leaves_no_trace_in_mlx(program: Program, size: int, bad: int, tmp_path: Path):
    clean, spoilt, guarded, compiled, last = printed(
        launch(program, tmp_path, size, f"--steps 30 --bad 20 --rank {bad}")
    )
    assert last == "verified: a skipped batch leaves the weights of a run without it"
    assert re.fullmatch(r"no bad batch +loss 0\.\d+ after 29 steps", clean)
    assert re.fullmatch(r"bad batch +loss nan after 30 steps", spoilt)
    assert {line.partition("loss")[2] for line in (guarded, compiled)} == {clean.partition("loss")[2]}
