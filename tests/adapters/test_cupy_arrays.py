"""The CuPy adapter over a stand-in for CuPy: its answers, its launches, and that the host waits for nothing.

The kernels are those of unscale.cu, compiled for the host. Nothing here runs on a device.
"""

from __future__ import annotations

import math
import weakref
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from host_cupy import HostCupy
from tiers import later

import gradscale
import gradscale.testing
from gradscale import (
    BackendError,
    BackendNotAvailableError,
    CallOrderError,
    DynamicScale,
    GradScaler,
    InvalidValueError,
)

pytestmark = pytest.mark.numpy


def launches(cupy: Any) -> list[Any]:
    return [entry[1:] for entry in cupy.log if entry[0] == "launch"]


def state_of(cupy: Any, scale: float = 4.0) -> Any:
    return DynamicScale(init_scale=scale).init(cupy.zeros((), dtype=np.float32))


def as_host(x: Any) -> Any:
    return x.get()


@pytest.mark.tier("ranks")
@pytest.mark.parametrize(
    "names",
    [("float16", "bfloat16", "float32"), *later("all", ("float64", "complex64", "complex128", "float16", "float32"))],
    ids="-".join,
)
def test_it_gives_the_pure_cores_bits(cupy: Any, cupy_backend: Any, names: tuple[str, ...]) -> None:
    dtypes = [np.dtype(getattr(ml_dtypes, name, name)) for name in names]
    gradscale.testing.check_backend(cupy_backend, cupy.zeros((), dtype=np.float32), dtypes=dtypes)


def test_many_arrays_are_one_launch_for_each_pair_of_dtypes_and_no_read(cupy: Any, cupy_backend: Any) -> None:
    singles = [cupy.ones(k % 40, dtype=np.float32) for k in range(500)]
    halves = [cupy.ones((4, 5), dtype=np.float16) for _ in range(20)]
    state = state_of(cupy)
    cupy.log.clear()
    made, nonfinite = cupy_backend.unscale([*singles, *halves], state, out=[*singles, *halves])
    assert launches(cupy) == [("unscale_float32_float32", 0, 487), ("unscale_float16_float16", 0, 20)]
    assert not [entry for entry in cupy.log if entry[0] == "read"]
    assert all(x is y for x, y in zip(made, [*singles, *halves], strict=True))
    assert as_host(made[1]).tolist() == [0.25]
    assert as_host(nonfinite) == 0


def test_half_gradients_become_float32_masters(cupy: Any, cupy_backend: Any) -> None:
    grads = [cupy.ones((2, 3), dtype=np.float16)]
    masters = [cupy.zeros((2, 3), dtype=np.float32)]
    made, _ = cupy_backend.unscale(grads, state_of(cupy), out=masters)
    assert made[0] is masters[0]
    assert as_host(masters[0]).tolist() == [[0.25] * 3] * 2
    new, _ = cupy_backend.unscale(grads, state_of(cupy), dtype=np.float32)
    assert (new[0].dtype, as_host(grads[0])[0, 0]) == (np.float32, 1.0)
    assert launches(cupy) == [("unscale_float16_float32", 0, 1)] * 2


def test_an_address_that_another_device_had_before_is_planned_anew(cupy: Any, cupy_backend: Any) -> None:
    memory = np.ones(8, np.float32)
    for number in (0, 1, 0):
        device = cupy.cuda.Device(number)
        with device:
            grad = cupy.ndarray(memory, device)
            cupy_backend.unscale([grad], state_of(cupy), out=[grad])
    assert launches(cupy) == [("unscale_float32_float32", number, 1) for number in (0, 1, 0)]
    assert memory.tolist() == [0.25**3] * 8


@pytest.mark.parametrize("place", range(3))
def test_arrays_on_two_devices_have_one_verdict_on_the_states(cupy: Any, cupy_backend: Any, place: int) -> None:
    for home in (0, 1):
        with cupy.cuda.Device(home):
            state = state_of(cupy)
        grads = []
        for index, number in enumerate((0, 1, 1)):
            with cupy.cuda.Device(number):
                grads.append(cupy.array([1.0, math.nan if index == place else 8.0], dtype=np.float32))
        cupy.log.clear()
        made, nonfinite = cupy_backend.unscale(grads, state, out=grads)
        assert nonfinite.device == cupy.cuda.Device(home)
        assert as_host(nonfinite) == 1
        assert [x.device.id for x in made] == [0, 1, 1]
        assert all(as_host(x)[0] == 0.25 for x in made)
        assert sorted(launches(cupy)) == [("unscale_float32_float32", 0, 1), ("unscale_float32_float32", 1, 2)]
        away = 1 - home
        # The scale goes there and the verdict comes back, and neither's memory is reused before it was read.
        waits = [entry[1:] for entry in cupy.log if entry[0] == "wait" and entry[1] != entry[2]]
        assert waits == [(away, home), (home, away), (home, away), (away, home)]


def test_dtypes_without_a_kernel_take_the_pure_core(cupy: Any, cupy_backend: Any) -> None:
    grads = [cupy.array([1.0, math.inf], dtype=np.float64), cupy.array([2.0], dtype=np.float32)]
    out = [cupy.zeros(2, dtype=np.float16), cupy.zeros(1, dtype=np.float32)]
    made, nonfinite = cupy_backend.unscale(grads, state_of(cupy), out=out)
    assert as_host(made[0]).tolist() == [0.25, math.inf]
    assert as_host(made[1]).tolist() == [0.5]
    assert as_host(nonfinite) == 1
    assert launches(cupy) == [("unscale_float32_float32", 0, 1)]


def test_no_arrays_are_finite(cupy: Any, cupy_backend: Any) -> None:
    made, nonfinite = cupy_backend.unscale([], state_of(cupy))
    assert (list(made), as_host(nonfinite), nonfinite.dtype) == ([], 0, np.int32)


def test_shared_memory_is_refused_and_nothing_is_modified(cupy: Any, cupy_backend: Any) -> None:
    x = cupy.ones(6, dtype=np.float32)
    for grads in ([x, x], [x, x[4:]], [x, x[::2]]):
        with pytest.raises(InvalidValueError, match="share memory"):
            cupy_backend.unscale(grads, state_of(cupy), out=grads)
    assert as_host(x).tolist() == [1.0] * 6
    cupy_backend.unscale([x[::2], x[1::2]], state_of(cupy), out=[x[::2], x[1::2]])
    assert as_host(x).tolist() == [0.25] * 6


def test_an_array_on_another_device_is_not_written_to(cupy: Any, cupy_backend: Any) -> None:
    with cupy.cuda.Device(1):
        away = cupy.zeros(2, dtype=np.float32)
    with pytest.raises(InvalidValueError, match=r"got one of shape \(2,\) on <CUDA Device 0> for an array on .* 1>"):
        cupy_backend.unscale([cupy.ones(2, dtype=np.float32)], state_of(cupy), out=[away])
    assert as_host(away).tolist() == [0.0, 0.0]


def test_a_wrong_dtype_is_refused(cupy: Any, cupy_backend: Any) -> None:
    with pytest.raises(InvalidValueError, match="real floating dtype"):
        cupy_backend.unscale([cupy.ones(2, dtype=np.float32)], state_of(cupy), dtype=np.int32)


def test_a_graph_captures_the_pure_core_which_reads_no_tables(cupy: Any, cupy_backend: Any) -> None:
    grads = [cupy.ones(3, dtype=np.float32), cupy.array([8.0, math.inf], dtype=np.float16)]
    state = state_of(cupy)
    HostCupy.capturing = {0}
    cupy.log.clear()
    made, nonfinite = cupy_backend.unscale(grads, state, out=grads)
    assert cupy.log == []
    HostCupy.capturing = set()
    assert all(x is y for x, y in zip(made, grads, strict=True))
    assert [as_host(x).tolist() for x in (*grads, nonfinite)] == [[0.25] * 3, [2.0, math.inf], 1]
    x = grads[0]
    HostCupy.capturing = {0}
    with pytest.raises(InvalidValueError, match="share memory"):
        cupy_backend.unscale([x, x], state, out=[x, x])


def test_tables_are_not_kept(cupy: Any, cupy_backend: Any) -> None:
    from gradscale_cupy import launch

    rows: list[Any] = []
    grads = [cupy.ones(3, dtype=np.float32)]
    with pytest.MonkeyPatch.context() as patch:
        prepare = launch.prepare

        def watched(*args: Any, **options: Any) -> Any:
            prepared = prepare(*args, **options)
            rows.append(weakref.ref(prepared.tables[0].rows))
            return prepared

        patch.setattr(launch, "prepare", watched)
        cupy_backend.unscale(grads, state_of(cupy), out=grads)
        cupy_backend.multiply_in_place(grads, state_of(cupy).scale)
    assert [row() for row in rows] == [None, None]


def test_arrays_with_gaps_take_the_pure_core(cupy: Any, cupy_backend: Any) -> None:
    whole = cupy.ones((4, 6), dtype=np.float32)
    grads = [whole[:, ::2], whole.T[1::2]]
    cupy.log.clear()
    _, nonfinite = cupy_backend.unscale(grads, state_of(cupy), out=grads)
    assert launches(cupy) == []
    assert (as_host(whole).tolist(), as_host(nonfinite)) == ([[0.25] * 6] * 4, 0)


class CUDADriverError(RuntimeError):
    """As CuPy's: a status, and the text of CUDA."""

    __module__ = "cupy_backends.cuda.api.driver"

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def test_errors_of_cuda_say_what_was_done_and_what_is_missing(
    cupy: Any, cupy_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    grads, state = [cupy.ones(3, dtype=np.float32)], state_of(cupy)
    cupy_backend.unscale(grads, state, out=grads)
    cupy.cuda.runtime.driverGetVersion, cupy.cuda.runtime.runtimeGetVersion = (lambda: 12020), (lambda: 12090)
    failure = [CUDADriverError(700, "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")]

    def fail(*_: Any, **_options: Any) -> Any:
        raise failure[0]

    monkeypatch.setattr(cupy.RawKernel, "__call__", fail)
    for name, call in {
        "gradients were unscaled": lambda: cupy_backend.unscale(grads, state, out=grads),
        "gradients were clipped": lambda: cupy_backend.multiply_in_place(grads, state.scale),
    }.items():
        with pytest.raises(BackendError, match=rf"CUDA failed while {name}: CUDA_ERROR_ILLEGAL_ADDRESS: .*illegal"):
            call()
    monkeypatch.setattr(cupy, "zeros", fail, raising=False)
    failure[0] = CUDADriverError(100, "cudaErrorNoDevice: no CUDA-capable device is detected")
    with pytest.raises(BackendNotAvailableError, match=r"nvidia-smi -L.*\(cudaErrorNoDevice"):
        cupy_backend.example()


class SGD:
    """An optimizer of CuPy arrays."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = parameters
        self.grads: list[Any] = []
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            parameter[...] = parameter - grad


def test_a_scaler_knows_its_arrays_skips_an_overflow_and_reads_once_in_each_step(cupy: Any) -> None:
    scaler = GradScaler(init_scale=8.0, growth_interval=2)
    optimizer = SGD([cupy.zeros(2, dtype=np.float32)])
    scales = []
    for bad in (False, True, False, False):
        scale = as_host(scaler.scale(cupy.ones((), dtype=np.float32)))
        optimizer.grads = [cupy.array([1.0, math.inf if bad else 1.0], dtype=np.float32) * cupy.asarray(scale)]
        cupy.log.clear()
        scaler.unscale_(optimizer)
        assert not [entry for entry in cupy.log if entry[0] == "read"]
        scaler.step(optimizer)
        assert [entry for entry in cupy.log if entry[0] == "read"] == [("read", 0)]
        scaler.update()
        scales.append(float(scale))
    assert scales == [8.0, 8.0, 4.0, 4.0]
    assert scaler.get_scale() == 8.0
    assert optimizer.steps == 3
    assert as_host(optimizer.parameters[0]).tolist() == [-3.0, -3.0]


def test_a_copy_to_the_host_begins_without_a_wait_and_outlives_its_array(cupy: Any, cupy_backend: Any) -> None:
    with cupy.cuda.Device(1):
        x = cupy.array([3, -7, 2**31 - 1, 5], dtype=np.int32)
    cupy.log.clear()
    finish = cupy_backend.start_read(x[::2])
    del x
    assert cupy.log == []
    assert finish() == [3, 2**31 - 1]
    assert cupy.log == [("read", 1)]


def test_a_copy_to_the_host_is_refused_while_a_graph_is_captured(cupy: Any, cupy_backend: Any) -> None:
    x = cupy.array([3], dtype=np.int32)
    HostCupy.capturing = {0}
    with pytest.raises(CallOrderError, match="a copy to the host cannot be part of a CUDA graph"):
        cupy_backend.start_read(x)


def test_the_stand_in_sees_a_host_read_and_a_mix_of_devices(cupy: Any) -> None:
    x = cupy.ones(2, dtype=np.float32)
    for read in (bool, float, int, np.asarray):
        with pytest.raises((TypeError, AttributeError)):
            read(x[0])
    with cupy.cuda.Device(1):
        y = cupy.ones(2, dtype=np.float32)
    with pytest.raises(AssertionError, match="of arrays on"):
        x + y
    with pytest.raises(AssertionError):
        SimpleNamespace(f=x.__setitem__).f(slice(None), y)
