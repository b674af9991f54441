"""NumpyBackend and memory that arrays share: what is refused, and what only looks as if it were shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gradscale import DynamicScale, InvalidValueError, ScaleState
from gradscale_numpy import NumpyBackend

pytestmark = pytest.mark.numpy

Array = NDArray[Any]


def state_of() -> ScaleState:
    """Return a state."""
    return DynamicScale(init_scale=8.0).init(np.zeros(()))


def flat_and(view: Callable[[Array], Array], shape: tuple[int, ...]) -> list[Array]:
    whole = np.full(shape, 8.0, np.float32)
    return [whole, view(whole)]


SHARING: dict[str, Callable[[], list[Array]]] = {
    "a part of a small array": lambda: flat_and(lambda x: x[:5], (10,)),
    "a part of a large array": lambda: flat_and(lambda x: x[3000:], (6000,)),
    "a transpose": lambda: flat_and(lambda x: x.T, (300, 300)),
    "itself": lambda: flat_and(lambda x: x, (4,)),
    "a second view": lambda: flat_and(lambda x: x[:], (4,)),
    "parts that overlap": lambda: [(x := np.full(10, 8.0, np.float32))[:6], x[5:]],
    "other arrays between": lambda: [(x := np.full(10, 8.0, np.float32))[:], np.full(3, 8.0, np.float32), x[9:]],
    "one inside of interleaved ones": lambda: [(x := np.full(12, 8.0, np.float32))[::2], x[1::2], x[3:4]],
}


@pytest.mark.parametrize("case", SHARING)
def test_arrays_that_share_memory_are_refused_in_place(backend: NumpyBackend, case: str) -> None:
    grads = SHARING[case]()
    before = [grad.copy() for grad in grads]
    with pytest.raises(InvalidValueError, match=r"gradients \d and \d, .* share memory"):
        backend.unscale(grads, state_of(), out=grads)
    for grad, old in zip(grads, before, strict=True):
        np.testing.assert_array_equal(grad, old)
    new, _ = backend.unscale(grads, state_of())
    assert all((one == 1.0).all() for one in new)


DISJOINT: dict[str, Callable[[], list[Array]]] = {
    "pieces of a flat buffer": lambda: list(np.split(np.full(1000, 8.0, np.float32), 10)),
    "interleaved views": lambda: [(x := np.full(11, 8.0, np.float32))[::2], x[1::2]],
    "columns": lambda: list(np.full((4, 3), 8.0, np.float32).T),
    "an empty view": lambda: [(x := np.full(4, 8.0, np.float32)), x[4:]],
    "from both ends": lambda: [(x := np.full(6, 8.0, np.float32))[2::-1], x[:2:-1]],
}


@pytest.mark.parametrize("case", DISJOINT)
def test_views_that_share_no_element_are_divided_once(backend: NumpyBackend, case: str) -> None:
    grads = DISJOINT[case]()
    backend.unscale(grads, state_of(), out=grads)
    assert all((grad == 1.0).all() for grad in grads)


def test_masters_that_are_other_gradients_are_refused(backend: NumpyBackend) -> None:
    first, second = np.full(3, 8.0, np.float32), np.full(3, 16.0, np.float32)
    with pytest.raises(InvalidValueError, match="share memory"):
        backend.unscale([first, second], state_of(), out=[second, first])
    assert (first[0], second[0]) == (8.0, 16.0)
    room = np.full(4, 8.0, np.float32)
    with pytest.raises(InvalidValueError, match="gradient 0 and the array that it is written to share memory"):
        backend.unscale([room[:3]], state_of(), out=[room[1:]])
    assert room.tolist() == [8.0] * 4


def test_a_gradient_may_be_written_to_two_masters(backend: NumpyBackend) -> None:
    grad, masters = np.full(3, 8.0, np.float32), [np.zeros(3, np.float32) for _ in range(2)]
    backend.unscale([grad, grad], state_of(), out=masters)
    assert [x.tolist() for x in masters] == [[1.0] * 3] * 2
