"""NumpyBackend and memory that arrays share: what is refused, and what only looks as if it were shared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gradscale import DynamicScale, InvalidValueError
from gradscale_numpy import NumpyBackend

pytestmark = pytest.mark.numpy

Array = NDArray[Any]
STATE = DynamicScale(init_scale=8.0).init(np.zeros(()))
SIZE = 12
VIEWS = st.builds(slice, st.integers(0, SIZE), st.integers(0, SIZE), st.sampled_from([1, 1, 2, 3, -1, -2]))


def require_refused(backend: NumpyBackend, grads: list[Array], out: list[Array]):
    before = [grad.copy() for grad in (*grads, *out)]
    with pytest.raises(
        InvalidValueError, match=r"gradients? \d and (\d|the array that it is written to).* share memory"
    ):
        backend.unscale(grads, STATE, out=out)
    for grad, old in zip((*grads, *out), before, strict=True):
        np.testing.assert_array_equal(grad, old)


@given(st.lists(st.tuples(VIEWS, st.none() | st.none() | st.integers(0, SIZE)), max_size=4))
def test_views_of_one_buffer_are_refused_where_they_share_an_element(
    backend: NumpyBackend, pairs: list[tuple[slice, int | None]]
):
    """Each is unscaled in place, or into a master that begins somewhere."""
    room = np.full(2 * SIZE, 8.0, np.float32)
    read = [range(SIZE)[view] for view, _ in pairs]
    grads = [room[:SIZE][view] for view, _ in pairs]
    starts = [start for _, start in pairs]
    written = [a if start is None else range(start, start + len(a)) for a, start in zip(read, starts, strict=True)]
    out = [x if start is None else room[start : start + len(x)] for x, start in zip(grads, starts, strict=True)]
    places = [k for one in written for k in one]
    elsewhere = [k for one, start in zip(read, starts, strict=True) if start is not None for k in one]
    if len(set(places)) < len(places) or set(places) & set(elsewhere):
        require_refused(backend, grads, out)
    else:
        backend.unscale(grads, STATE, out=out)
        assert room.tolist() == [1.0 if k in places else 8.0 for k in range(2 * SIZE)]


@pytest.mark.parametrize("shape", [(6000,), (300, 300)], ids=str)
def test_large_views_are_refused_and_their_parts_are_not(backend: NumpyBackend, shape: tuple[int, ...]):
    whole = np.full(shape, 8.0, np.float32)
    for grads in ([whole, whole.T], [whole, np.ones(3, np.float32), whole[shape[0] // 2 :]], [whole, whole]):
        require_refused(backend, grads, grads)
        new, _ = backend.unscale(grads, STATE)
        assert (new[0] == 1.0).all()
    for grads in (list(np.split(whole, 10)), list(whole.reshape(-1, 3).T)):
        grads[0][...] = 8.0
        backend.unscale(grads, STATE, out=grads)
        assert (grads[0] == 1.0).all()
