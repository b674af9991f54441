"""The JAX example as a user runs it: an overflow on each device in turn, devices that differ, bad options, Ctrl-C."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from axes import require
from programs import changed, interrupted, lines, png_size

PROGRAM = Path(__file__).parents[2] / "examples" / "train_jax.py"
STEPS = 20
# The devices are the host's processors, whatever accelerators there are.
# Copies of the example, with a line changed, find what it shares with the others.
PATHS = os.pathsep.join(filter(None, (str(PROGRAM.parent), os.environ.get("PYTHONPATH"))))
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": PATHS}

pytestmark = [pytest.mark.jax, pytest.mark.tier("all")]


@pytest.fixture(autouse=True)
def libraries() -> None:
    require("jax")
    require("examples")


def launch(folder: Path, *arguments: object, program: Path = PROGRAM) -> subprocess.CompletedProcess[str]:
    """Run the example."""
    command = [sys.executable, str(program), *map(str, arguments)]
    return subprocess.run(
        command, env=ENVIRONMENT, cwd=folder, capture_output=True, text=True, timeout=150, check=False
    )


def table(completed: subprocess.CompletedProcess[str]) -> dict[str, list[float]]:
    """Return the numbers of each run: accuracy, loss, steps taken, skipped, zero gradients, seconds, compilations."""
    pattern = r"(.*?devices?) +([\d.]+)% +([\d.]+) +(\d+) +(\d+) +([\d.]+)% +([\d.]+) +(\d+)"
    rows = [match for line in lines(completed) if (match := re.fullmatch(pattern, line))]
    return {row[1]: [float(number) for number in row.groups()[1:]] for row in rows}


def test_only_float16_without_scaling_fails_to_learn(tmp_path: Path) -> None:
    completed = launch(tmp_path)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert completed.stderr == ""
    fp32, unscaled, one, four = table(completed).values()
    assert fp32[0] > 90
    assert unscaled[0] < 50
    assert four[0] > 90
    assert one[:5] == four[:5]
    assert fp32[4] < 1
    assert unscaled[4] > 50
    assert four[4] < 1
    assert png_size(tmp_path / "train_jax.png") == (1080, 960)


def test_all_devices_skip_when_one_overflows(tmp_path: Path) -> None:
    injections = [option for device in range(4) for option in ("--inject", f"{16 + device}:{device}")]
    completed = launch(tmp_path, "--steps", STEPS, *injections, "--plot", "a.png")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert completed.stderr == ""
    # 65536 doubles after 15 clean steps, and each overflow halves it. The one device owns the shards of all four.
    changes = ["2^17 -> 2^16", "2^16 -> 2^15", "2^15 -> 2^14", "2^14 -> 2^13"]
    steps = [
        (f"step {16 + device}: overflow injected on device {device}, seen by device", device) for device in range(4)
    ]
    one = [f"{step} 0; device 0 skipped; scale {change}" for (step, _), change in zip(steps, changes, strict=True)]
    four = [
        f"{step} {device}; devices 0 1 2 3 skipped; scale {change}"
        for (step, device), change in zip(steps, changes, strict=True)
    ]
    assert [line for line in lines(completed) if "overflow" in line] == one + four
    assert lines(completed)[-1] == (
        "verified: skipped steps, scales and scaler state are bit-identical on 1 device and on each of 4"
    )
    results = table(completed)
    names = ["fp32, 4 devices", "fp16, no scaling, 4 devices", "fp16 gradscale, 1 device", "fp16 gradscale, 4 devices"]
    assert list(results) == names
    assert [(row[2], row[3]) for row in results.values()] == [(STEPS, 0), (STEPS, 0), (STEPS - 4, 4), (STEPS - 4, 4)]
    assert all(1 <= row[6] <= 2 for row in results.values())
    assert png_size(tmp_path / "a.png") == (1080, 960)


def test_one_device_needs_no_others(tmp_path: Path) -> None:
    completed = launch(tmp_path, "--steps", 3, "--devices", 1, "--inject", "2:0", "--inject", "3:0")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    overflows = [line for line in lines(completed) if "overflow" in line]
    assert [line.split("scale ")[1] for line in overflows] == ["2^16 -> 2^15", "2^15 -> 2^14"]
    assert lines(completed)[-1] == "verified: skipped steps, scales and scaler state are bit-identical on 1 device"


UNCHECKED = ("out_specs=(ADAM, REPLICATED, RECORD)", "out_specs=(ADAM, REPLICATED, RECORD), check_vma=False")
DTYPES = ("GROWTH_INTERVAL =", "DTYPES = (jnp.float32, jnp.float16, jnp.bfloat16)\nGROWTH_INTERVAL =")
SPOILED = [
    pytest.param(
        [UNCHECKED, ('axis_name="data", reduce', "reduce")], "devices of fp16 gradscale, 4 devices", id="no-agreement"
    ),
    pytest.param(
        [
            UNCHECKED,
            (
                "return adam, new_state,",
                'return adam, gradscale_jax.select(jax.lax.axis_index("data") == 1, '
                "new_state._replace(growth_tracker=new_state.growth_tracker + 1), new_state),",
            ),
        ],
        "devices of fp16 gradscale, 4 devices",
        id="state",
    ),
    pytest.param(
        [
            (
                "mean: jax.Array = ",
                "dtype = dtype if jax.lax.axis_size('data') == 1 else jnp.float32\n    mean: jax.Array = "
                "(3 - 2 * (jax.lax.axis_size('data') == 1)) * ",
            )
        ],
        "losses on 1 device and on 4",
        id="losses",
    ),
    pytest.param(
        [("flags.reshape(", "(flags & (len(run.devices) > 1)).reshape(")],
        "skipped steps on 1 device and on 4",
        id="skips",
    ),
    pytest.param(
        [("step(adam, state, *batch)", "step(adam, state, batch[0].astype(DTYPES[number % 3]), *batch[1:])"), DTYPES],
        "3 compilations of fp32, 4 devices",
        id="compilations",
    ),
]


@pytest.mark.parametrize(("changes", "difference"), SPOILED)
def test_runs_that_differ_are_not_verified(tmp_path: Path, changes: list[tuple[str, str]], difference: str) -> None:
    program = changed(tmp_path, PROGRAM, *changes)
    completed = launch(tmp_path, "--steps", 3, "--inject", "2:1", program=program)
    assert completed.returncode == 1, completed.stdout + completed.stderr
    assert lines(completed)[-1].startswith("FAILED: these differ: ")
    assert difference in lines(completed)[-1]
    assert "verified" not in completed.stdout


def test_an_agreement_left_out_is_refused_by_shard_map(tmp_path: Path) -> None:
    program = changed(tmp_path, PROGRAM, ('axis_name="data", reduce', "reduce"))
    completed = launch(tmp_path, "--steps", 3, program=program)
    assert completed.returncode == 1
    assert "out_specs" in completed.stderr
    assert "verified" not in completed.stdout


def test_help_names_every_option(tmp_path: Path) -> None:
    completed = launch(tmp_path, "--help")
    assert completed.returncode == 0, completed.stderr
    for option in ("--devices", "--steps", "--seed", "--inject STEP:DEVICE", "--plot FILE"):
        assert option in completed.stdout
    assert "python examples/train_jax.py" in completed.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--inject", "x:y"], "must be STEP:DEVICE, such as 120:2, got 'x:y'"),
        (["--inject", "21:0"], "must be a step from 1 to 20 and a device from 0 to 3, got 21:0"),
        (["--inject", "5:4"], "must be a step from 1 to 20 and a device from 0 to 3, got 5:4"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--devices", "3"], "must be one of [1, 2, 4, 8, 16], got 3"),
        (["--plot", "missing/plot.png"], "there is no folder missing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_are_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    completed = launch(tmp_path, "--steps", STEPS, *arguments)
    assert completed.returncode == 2
    assert message in completed.stderr
    assert "Traceback" not in completed.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_ends_promptly(tmp_path: Path) -> None:
    status, errors = interrupted([sys.executable, str(PROGRAM), "--steps", "100000"], ENVIRONMENT, tmp_path)
    assert status == 130
    assert errors.count("interrupted\n") == 1, errors
    assert "KeyboardInterrupt" not in errors
    assert list(tmp_path.iterdir()) == []
