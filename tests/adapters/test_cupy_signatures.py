"""The calls that the CuPy adapter makes, against the signatures of CuPy 13.5 and 14; and the table, against CuPy."""

from __future__ import annotations

import math
import operator
from typing import Any

import cupy_signatures
import fake_nccl
import numpy as np
import pytest
from axes import require
from cupy_signatures import SIGNATURES, VERSIONS, checked, checked_class, documented, parsed

from gradscale import BackendNotAvailableError, DynamicScale


@pytest.mark.numpy
def test_each_function_of_the_table_is_called_and_fits(cupy: Any, cupy_backend: Any) -> None:
    from gradscale_cupy import availability

    cupy_signatures.called.clear()
    state = DynamicScale(init_scale=4.0).init(cupy_backend.example())
    grads = [cupy.ones(3, dtype=np.float32)]
    with cupy.cuda.Device(1):
        grads.append(cupy.ones(3, dtype=np.float32))
    _, nonfinite, _ = cupy_backend.unscale_with_squares(grads, state, out=grads)
    made, _ = cupy_backend.unscale(grads, state)
    cupy_backend.multiply_in_place(made, state.scale)
    cupy_backend.bits(grads[0])
    finish = cupy_backend.start_read(cupy.stack([nonfinite]))
    assert finish.is_done()
    assert finish() == cupy_backend.read(cupy.stack([nonfinite])) == [0]
    availability.require_device()
    with pytest.raises(BackendNotAvailableError), availability.explained("it was asked for"):
        raise cupy.cuda.runtime.CUDARuntimeError(100)
    # An event of a device that has failed.
    cupy.cuda.runtime.eventQuery = checked("cupy.cuda.runtime.eventQuery", lambda _: 700)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="700"):
        availability.is_over(cupy.cuda.Event())
    with fake_nccl.installed() as fakes:
        world = fake_nccl.World(1)
        collectives = fakes.nccl.NCCLCollectives(world.communicators()[0], math.inf)
        assert collectives.start_max(fakes.cupy.asarray([3], dtype=np.int32))().tolist() == [3]
        assert collectives.start_max(np.array([3], np.int32))().tolist() == [3]
        world.async_status = 3
        with pytest.raises(Exception, match="internal error"):
            collectives.start_max(fakes.cupy.asarray([3], dtype=np.int32))()
    assert sorted(cupy_signatures.called) == sorted(SIGNATURES)


def called_by_the_adapter(call: Any, *args: Any, **options: Any) -> Any:
    """Call something as a function of gradscale_cupy does."""
    namespace = {"__name__": "gradscale_cupy.example"}
    exec("def run(call, args, options): return call(*args, **options)", namespace)
    return namespace["run"](call, args, options)  # type: ignore[operator]


@pytest.mark.numpy
def test_calls_that_cupy_refuses_are_refused_and_those_of_others_are_not() -> None:
    def anything(*_args: Any, **_options: Any) -> str:
        return "made"

    empty, pinned = checked("cupy.empty", anything), checked("cupy.cuda.alloc_pinned_memory", anything)
    assert called_by_the_adapter(empty, (), dtype=np.float32) == "made"
    assert called_by_the_adapter(pinned, np.int64(4)) == "made"
    for call, args, options, message in (
        (empty, (), {}, r"CuPy 13\.5 refuses cupy\.empty: missing a required argument"),
        (empty, (3,), {"device": 0}, "unexpected keyword argument 'device'"),
        (pinned, (4.0,), {}, "size is no int, got float"),
        (checked("cupy.asarray", anything), ([3],), {"copy": True}, r"CuPy 13\.5 refuses .* 'copy'"),
        (checked("cupy.sort", anything), ([3],), {}, r"gradscale_cupy calls cupy\.sort, which"),
    ):
        with pytest.raises(TypeError, match=message):
            called_by_the_adapter(call, *args, **options)
        assert call(*args, **options) == "made"

    @checked_class("cupy.cuda.Event")
    class Event:
        def __init__(self, **_: Any) -> None:
            pass

        def record(self, *_: Any) -> None:
            pass

    event = called_by_the_adapter(Event, disable_timing=True)
    called_by_the_adapter(event.record, None)
    with pytest.raises(TypeError, match="too many positional arguments"):
        called_by_the_adapter(event.record, None, None)
    with pytest.raises(TypeError, match="'timing'"):
        called_by_the_adapter(Event, timing=False)


@pytest.mark.cupy
def test_the_table_is_cupys() -> None:
    # No device is needed.
    cupy = require("cupy")
    from gradscale_cupy.availability import nccl_module

    versions = [tuple(map(int, version.split("."))) for version in VERSIONS]
    own = tuple(map(int, cupy.__version__.split(".")[:2]))
    column = max((k for k, version in enumerate(versions) if version <= own), default=0)
    # Without NCCL's library its part of CuPy is not there.
    names = [name for name in SIGNATURES if ".nccl." not in name or nccl_module().available]
    expected = {
        name: [(one.name, one.kind, one.default is not one.empty) for one in parsed(name)[column].parameters.values()]
        for name in names
    }
    assert {name: documented(operator.attrgetter(name.removeprefix("cupy."))(cupy)) for name in names} == expected
