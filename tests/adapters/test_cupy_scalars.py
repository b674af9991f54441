"""What the CuPy adapter writes as kernels out of traces: its bits over a stand-in for CuPy, its launches, its source.

The kernels are compiled for the host. Nothing here runs on a device.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import array_api_compat
import numpy as np
import pytest
from array_api_compat import array_namespace
from axes import require_program
from optimizers import Tree
from tiers import later
from written_rules import assert_clipping_is_written, assert_rule_is_written

from gradscale import DynamicScale, GradScaler, ScaleState, StaticScale, presets
from gradscale.core import vector

pytestmark = pytest.mark.numpy

QUICK = ("chainer", "deepspeed", "fairseq")


@pytest.mark.parametrize("name", [*QUICK, *later("all", *(name for name in presets.names() if name not in QUICK))])
def test_each_preset_is_one_kernel_with_the_bits_of_its_rule(cupy: Any, cupy_backend: Any, name: str) -> None:
    assert_rule_is_written(cupy, cupy_backend, presets.named(name))
    assert {entry[1] for entry in cupy.log if entry[0] == "launch"} == {"update", "pack"}


SETTINGS: dict[str, Any] = {
    "static": StaticScale(8.0),
    "hold": DynamicScale(init_scale=300.0, backoff_factor=0.3, min_scale=100.0, at_min="hold"),
    "tolerance": DynamicScale(tolerance=0.3, growth_factor=3.7, max_scale=1e30, at_min="raise"),
}


@pytest.mark.parametrize("name", later("all", *SETTINGS))
def test_other_settings_are_kernels_with_the_bits_of_the_rule(cupy: Any, cupy_backend: Any, name: str) -> None:
    assert_rule_is_written(cupy, cupy_backend, SETTINGS[name])


def ruled(update: Callable[[Any, ScaleState, Any], ScaleState]) -> Any:
    """Return a frozen policy whose update is a function of the namespace, the state and the count."""

    def method(_: Any, state: ScaleState, *, nonfinite: Any) -> Any:
        return update(array_namespace(state.scale), state, nonfinite)

    made: Any = type("Ruled", (StaticScale,), {"update": method})
    return dataclasses.dataclass(frozen=True)(made)(8.0)


def of_whole_numbers(xp: Any, state: ScaleState, nonfinite: Any) -> ScaleState:
    _, a, b, c = state
    wrapped = a * b - c + nonfinite
    chosen = xp.where((wrapped < 0) | ~(a == b) & (b != c), -wrapped, 7 - wrapped)
    bits = ~a & b | c
    return ScaleState(
        state.scale, xp.asarray(chosen), xp.asarray(bits), xp.asarray(xp.minimum(chosen, a) + xp.maximum(bits, b))
    )


def of_reals(xp: Any, state: ScaleState, nonfinite: Any) -> ScaleState:
    scale, a, b, c = state
    # Divides 0 by 0, overflows, and comes below the smallest normal number.
    quotient = xp.astype(a, xp.float32) / xp.astype(b - 1, xp.float32)
    wide = xp.astype(scale, xp.float64) * 1.1 + 1.0 / xp.astype(c + 3, xp.float64)
    tiny = xp.sqrt(scale) * 2.0**-100 * 2.0**-40
    found = xp.logical_and(xp.isfinite(quotient), xp.logical_not(quotient > 5.0))
    mixed = xp.where(found, xp.maximum(quotient, tiny), xp.astype(wide, xp.float32) - scale * scale)
    return ScaleState(
        xp.asarray(mixed),
        xp.asarray(xp.astype(quotient <= 2.0, xp.int32)),
        xp.asarray(xp.astype(xp.minimum(quotient, 1e30), xp.int32)),
        xp.asarray(xp.astype(xp.astype(nonfinite, xp.bool), xp.int32) + xp.astype(tiny * 2.0**100, xp.int32)),
    )


@pytest.mark.skipif(
    np.__version__ < "2", reason="NumPy 1 is no oracle: with Python's numbers it makes 0-d arrays wider"
)
@pytest.mark.parametrize("update", [of_whole_numbers, of_reals])
def test_each_operation_has_numpys_bits(cupy: Any, cupy_backend: Any, update: Any) -> None:
    assert_rule_is_written(cupy, cupy_backend, ruled(update))
    assert {entry[1] for entry in cupy.log if entry[0] == "launch"} == {"update", "pack"}


def test_clipping_is_one_kernel_with_the_bits_of_the_pure_core(cupy: Any, cupy_backend: Any) -> None:
    assert_clipping_is_written(cupy, cupy_backend)
    assert {entry[1] for entry in cupy.log if entry[0] == "launch"} == {"clip_factor"}


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("value", [1.0, np.inf])
def test_an_iteration_is_few_launches(cupy: Any, max_norm: float | None, value: float) -> None:
    scaler, optimizer = GradScaler(init_scale=8.0), Tree()
    for _ in range(2):
        cupy.log.clear()
        scale = scaler.scale(cupy.ones((), dtype=np.float32))
        optimizer.grads = [cupy.asarray([2.0, value], dtype=np.float32) * scale]
        if max_norm is not None:
            scaler.unscale_(optimizer, max_norm=max_norm)
        scaler.step(optimizer)
        scaler.update()
    unscaling = ["unscale_float32_float32"]
    if max_norm is not None:
        unscaling = ["square_float32_float32", "add_squares", "clip_factor", "clip_float32"]
    assert [entry[1] for entry in cupy.log if entry[0] == "launch"] == [*unscaling, "pack", "update"]


@pytest.mark.skipif(
    array_api_compat.__version__.startswith("1.11."), reason="array-api-compat 1.11 copies by modules of CuPy's own"
)
def test_a_count_of_another_device_has_no_kernel(cupy: Any, cupy_backend: Any) -> None:
    policy = DynamicScale(init_scale=8.0)
    state = policy.init(cupy.zeros((), dtype=np.float32))
    with cupy.cuda.Device(1):
        away = cupy.asarray(1, dtype=np.int32)
    assert cupy_backend.update(policy, state, away).scale.get() == 4.0
    assert [entry for entry in cupy.log if entry[0] == "launch"] == []


@dataclasses.dataclass
class Mutable:
    """A policy whose settings may be changed from one update to the next."""

    init_scale: float = 8.0
    factor: float = 0.5

    init = staticmethod(StaticScale(8.0).init)
    at_min_scale = staticmethod(StaticScale(8.0).at_min_scale)

    def update(self, state: ScaleState, *, nonfinite: Any) -> ScaleState:  # noqa: ARG002
        return state._replace(scale=state.scale * self.factor)


def test_what_has_no_kernel_takes_the_pure_core(cupy: Any, cupy_backend: Any) -> None:
    policy, mutable, about = DynamicScale(init_scale=8.0), Mutable(), [5] * vector.ABOUT
    state, count = policy.init(cupy.zeros((), dtype=np.float32)), cupy.asarray(1, dtype=np.int32)
    for factor in (0.5, 0.25):
        mutable.factor = factor
        assert cupy_backend.update(mutable, state, count).scale.get() == 8.0 * factor
    assert cupy_backend.update(policy, state, count != 0).scale.get() == 4.0
    spike = cupy_backend.pack(policy, state, count, about, code=cupy.asarray(3, dtype=np.int32))
    assert cupy_backend.read(spike)[:4] == [1, 0, 1, 3]
    assert [entry for entry in cupy.log if entry[0] == "launch"] == []


def test_nvcc_compiles_them_without_a_warning_and_contracts_and_flushes_nothing(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvcc = require_program("nvcc")
    from gradscale_cupy import scalars

    written: list[tuple[str, str, tuple[str, ...]]] = []
    monkeypatch.setattr(cupy, "RawKernel", lambda code, name, options: written.append((code, name, options)))
    # Nothing that was written before is taken from a cache.
    assert scalars.rule_of(presets.named("chainer", growth_interval=997)) is not None
    assert scalars.rule_of(ruled(of_reals)) is not None
    assert [name for _, name, _ in written] == ["update", "pack", "update"]
    for code, name, options in written:
        source, made = tmp_path / "scalars.cu", tmp_path / "scalars.ptx"
        source.write_text(code, encoding="utf-8")
        # As CuPy does, which asks for subnormal numbers to be flushed.
        asked = "-arch=sm_90", "-ftz=true", "-Werror", "all-warnings", *options
        subprocess.run([nvcc, *asked, "-ptx", source, "-o", made], check=True)
        instructions = made.read_text()
        assert re.findall(r"\.entry (\w+)", instructions) == [name]
        assert re.findall(r"\b(?:fma\.|\w+\.[\w.]*ftz).*", instructions) == []
