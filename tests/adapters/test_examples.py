"""The examples as a user runs them: what they print and write, what they refuse, and how they end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
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
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), *arguments]


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
    program: Program, folder: Path, size: int, arguments: str, *changes: tuple[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run an example, some of whose text may be replaced, on so many ranks."""
    need(program, size)
    path = changed(folder, EXAMPLES / program.name, *changes) if changes else EXAMPLES / program.name
    return ran(*program.command(size, path, *arguments.split()), folder=folder, seconds=240, **ENVIRONMENT)


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


def keeps_gradients(rows: Table):
    """Assert that scaling keeps the gradients that float16 loses."""
    fp32, unscaled, *scaled = (row["zero gradients"] for row in rows.values())
    assert unscaled > fp32 + 10
    assert all(abs(zeros - fp32) < 1 for zeros in scaled)


SAME = "verified: weights and scaler state are bit-identical on {where}"
ONE = f"{SAME}, which skipped as one"
WITH_SCHEDULE = ONE.replace(" and", ", schedule and")
SEEN, SKIPPED = "seen by {seen}", "{ranks} skipped"
INJECTED = f"injected on rank {{rank}}, {SEEN}; {SKIPPED}"
# The arguments of a run, its steps, which one is skipped as what, and what is said at the end. A scale of 65536 doubles
# after 25 clean steps of the digits, and after 10 of FSDP; from the 65th step on losses are judged.
TOLD = {
    DIGITS.name: (
        "--inject 30:{rank}",
        60,
        f"step 30: overflow {SEEN} (injected); {SKIPPED}; scale 2^17 -> 2^16",
        SAME,
    ),
    FSDP.name: ("--inject 15:{rank}", 20, f"step 15: overflow {INJECTED}; scale 2^17 -> 2^16", SAME),
    RL.name: (
        "--text-steps 10 --inject 2:{rank}",
        3,
        f"step 2: overflow {INJECTED}; scale 2^16 -> 2^15",
        WITH_SCHEDULE,
    ),
    SPIKES.name: ("--every 70", 80, f"step 70: spike {INJECTED}", ONE),
}


def check(text: list[str], folder: Path, program: Program, steps: int, skips: list[str], last: str):
    """Assert that an example shows these steps as skipped in its runs with a scaler or a guard, and draws its plot."""
    assert [line for line in text if line.startswith("step ")] == skips
    assert text[-1] == last
    rows = table(text)
    skipping = [name for name in rows if "gradscale" in name or "SkipSpikes" in name]
    for name, row in rows.items():
        skipped = len(skips) // len(skipping) if name in skipping else 0
        assert (name, row["steps taken"], row["skipped"]) == (name, steps - skipped, skipped)
    if program in (DIGITS, FSDP):
        keeps_gradients(rows)
    assert [path.name for path in folder.iterdir()] == [program.name.replace(".py", ".png")]


def run_and_check(folder: Path, program: Program, size: int, rank: int, more: str) -> str:
    """Run an example with a bad step on a rank, and assert what it shows; return its first line."""
    arguments, steps, skip, last = TOLD[program.name]
    ranks = "rank 0" if size == 1 else f"ranks {' '.join(map(str, range(size)))}"
    text = printed(launch(program, folder, size, f"{arguments.format(rank=rank)} --steps {steps} {more}".rstrip()))
    # DDP has averaged the gradients by then; a shard's overflow is seen by its owner alone.
    skip = skip.format(rank=rank, ranks=ranks, seen=ranks if more == "--ddp" else f"rank {rank}")
    check(text, folder, program, steps, [skip], last.format(where="1 rank" if size == 1 else f"{size} ranks"))
    return text[0]


def run(program: Program, size: int, rank: int, more: str = "", tier: str | None = None):
    return case(program, size, f"{more.strip('-')}rank-{rank}", rank, more, tier=tier)


@pytest.mark.parametrize(
    ("program", "size", "rank", "more"),
    [
        *(run(DIGITS, size, rank, tier=tier) for size, rank, tier in ((1, 0, None), (2, 0, "ranks"), (3, 2, None))),
        *(run(FSDP, 2, rank, more) for rank, more in ((0, ""), (1, ""), (1, "--fsdp1"), (1, "--ddp"))),
        *(run(program, 1, 0) for program in (FSDP, RL)),
        *(run(program, 2, 1) for program in (RL, SPIKES)),
    ],
)
def test_all_skip_where_one_overflows(tmp_path: Path, program: Program, size: int, rank: int, more: str):
    first = run_and_check(tmp_path, program, size, rank, more)
    assert size > 1 or program is DIGITS or "for more: torchrun --nproc-per-node 2 " in first


@pytest.mark.jax
def test_all_devices_skip_where_one_overflows(tmp_path: Path):
    # The one device owns the shards of all four; 65536 doubles after 15 clean steps, and each overflow halves it.
    skips = [
        f"step {16 + device}: overflow injected on device {device}, seen by device {device * is_owner}; "
        f"{devices} skipped; scale 2^{17 - device} -> 2^{16 - device}"
        for is_owner, devices in ((0, "device 0"), (1, "devices 0 1 2 3"))
        for device in range(4)
    ]
    text = printed(launch(JAX, tmp_path, 1, "--steps 20 --inject 16:0 --inject 17:1 --inject 18:2 --inject 19:3"))
    last = "verified: skipped steps, scales and scaler state are bit-identical on 1 device and on each of 4"
    check(text, tmp_path, JAX, 20, skips, last)


@pytest.mark.gpu
@pytest.mark.torch
@pytest.mark.parametrize("more", ["", "--fsdp1", "--ddp"])
def test_one_process_trains_on_a_gpu(tmp_path: Path, more: str, monkeypatch: pytest.MonkeyPatch):
    if not require("torch").cuda.is_available():
        pytest.skip("torch sees no GPU")
    monkeypatch.setitem(ENVIRONMENT, "CUDA_VISIBLE_DEVICES", "0")
    assert run_and_check(tmp_path, FSDP, 1, 0, more).startswith("1 rank, nccl on cuda")


@pytest.mark.parametrize(("program", "size"), [case(DIGITS, 1, "learns"), case(JAX, 1, "learns")])
def test_only_float16_without_scaling_fails_to_learn(tmp_path: Path, program: Program, size: int):
    text = printed(launch(program, tmp_path, size, ""))
    rows = table(text)
    keeps_gradients(rows)
    fp32, unscaled, *scaled = (row["test accuracy"] for row in rows.values())
    assert min(fp32, *scaled) > 90
    assert unscaled < 50
    # On one device and on four.
    found = [{title: row[title] for title in list(row)[:5]} for name, row in rows.items() if "gradscale" in name]
    assert found == [found[0]] * len(found)


FORGETS = "    content = torch.load(checkpoint); content.pop('MixedPrecision'); torch.save(content, checkpoint)\n"
FAILS = "ValueError: this rank fails"
RAISING = "        if ranks.rank == 1:\n            raise ValueError('this rank fails')\n"
COUNTED, DIFFER = "    optimizer.steps += ranks.rank\n", "weights or scaler state differ on"
STEPPED = "    next(iter(optimizer.state.values()))['step'].add_(ranks.rank)\n"
UNSEEN, ON_JAX = "(flags & (len(run.devices) > 1)).reshape(", "--steps 3 --inject 2:1"
ALONE, ON_ONE = "mpiexec started 2 processes, and mpi4py cannot be used", "skipped steps on 1 device and on 4"
# What is put before a line of an example, or in the place of a part of one, and what is said for it.
WRONG = [
    case(DIGITS, 3, "raises", "--steps 5", "        activations = forward(weights, images[mine])\n", RAISING, FAILS),
    case(FSDP, 2, "raises", "--steps 5", "        with autocast:\n", RAISING, FAILS),
    case(DIGITS, 2, "no-mpi4py", "", "import sys\n", "import sys\n\nsys.modules['mpi4py'] = None\n", ALONE),
    case(DIGITS, 3, "state", "--steps 5", "    # With the optimizer's count of steps", COUNTED, f"{DIFFER} 3 ranks"),
    case(FSDP, 2, "steps", "--steps 1", "    run.is_verified = ", STEPPED, f"{DIFFER} 2 ranks"),
    case(JAX, 1, "skips", ON_JAX, "flags.reshape(", UNSEEN, f"FAILED: these differ: {ON_ONE}"),
    case(LIGHTNING, 1, "state", "--epochs 2 --inject 3", "    saved = stopped.", FORGETS, "another state"),
    case(MLX, 1, "trace", "--steps 6 --bad 2", "nonfinite == 0", "nonfinite >= 0", "leaves the weights"),
]


@pytest.mark.parametrize(("program", "size", "arguments", "old", "new", "said"), WRONG)
def test_a_run_that_goes_wrong_ends_on_all_ranks_says_why_and_is_not_verified(
    tmp_path: Path, program: Program, size: int, arguments: str, old: str, new: str, said: str
):
    completed = launch(program, tmp_path, size, arguments, (old, new + old if new.startswith("    ") else new))
    assert completed.returncode != 0
    assert "verified" not in completed.stdout
    if said == FAILS or "mpi4py" in said:
        assert said in completed.stderr
        assert completed.stderr.count(FAILS) <= 1, completed.stderr
    else:
        assert completed.returncode == 1, completed.stderr
        # A launcher may have added something.
        (verdict,) = (line for line in lines(completed) if line.startswith("FAILED: "))
        assert said in verdict


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
    command = program.command(size, EXAMPLES / program.name, *arguments.split())
    environment, piped = ENVIRONMENT | {"PYTHONUNBUFFERED": "1"}, {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # In a session of its own the signal goes, as from a terminal, to a launcher and its ranks, and not to this process.
    process = subprocess.Popen(command, env=environment, cwd=tmp_path, text=True, start_new_session=True, **piped)
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
    assert process.returncode == status
    assert errors.count("interrupted\n") == 1, errors
    assert "KeyboardInterrupt" not in errors
    assert list(tmp_path.iterdir()) == []


LIKE_ONE_RUN = "verified: weights, optimizer and scaler state of the resumed run are bit-identical to those of one run"


@pytest.mark.torch
def test_lightning_learns_skips_each_overflow_and_resumes_bit_for_bit(tmp_path: Path):
    # The last of the first half, and the first of the second one, which begins at a checkpoint.
    steps = (1, 13, 120, 121, 240)
    injections = " ".join(f"--inject {step}" for step in steps)
    text = printed(launch(LIGHTNING, tmp_path, 1, f"--checkpoint digits.ckpt {injections}"))
    skipped = [line for line in text if re.match(r"  step \d+: overflow in \d+ gradients?, skipped; scale ", line)]
    found = [int(re.findall(r"\d+", line)[0]) for line in skipped]
    # In one run, up to the checkpoint, and from there.
    assert found == sorted(steps) + sorted(step for step in steps if step <= 120) + [121, 240]
    assert sum(line.startswith("  saved: scale ") and line.endswith(", 0 clean steps of 40") for line in text) == 1
    match = re.fullmatch(r"test accuracy (\d+\.\d)% after 235 steps, and 5 skipped", text[-2])
    assert match is not None
    assert float(match[1]) > 93
    assert text[-1] == LIKE_ONE_RUN
    assert [path.name for path in tmp_path.iterdir()] == ["digits.ckpt"]


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
