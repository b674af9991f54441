"""Where GradScaler finds an optimizer's gradients, and how unscaled ones go back to it."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from libraries import Library
from optimizers import Grouped, Parameter, Tree, scaled, with_groups

import gradscale
from gradscale import GradScaler, InvalidTypeError


class Converting:
    """Converts a gradient when it is read and assigned; an optimizer of one, and a parameter."""

    def __init__(self, arrays: Library, stored: float | None):
        self.arrays, self.stored = arrays, stored

    @property
    def grad(self):
        return None if self.stored is None else self.arrays.asarray(self.stored)

    @grad.setter
    def grad(self, value):
        self.stored = float(value)

    grads = grad

    def step(self):
        return "stepped"


class Copying:
    """Copies gradients when they are read, and takes none back."""

    stored = np.full(2, 8.0, np.float32)
    grads = property(lambda self: [self.stored.copy()])
    grad = property(lambda self: self.stored.copy())

    def step(self):
        return self.stored.tolist()


class Fixed:
    """Has gradients of half precision that nobody can assign, and wants others."""

    master_dtype = np.float32
    grads = property(lambda _: np.ones(1, np.float16))

    def step(self):
        raise AssertionError


def test_gradients_that_properties_convert_are_given_back(arrays: Library):
    for is_tree in (True, False):
        scaler, one, empty = GradScaler(init_scale=4.0), Converting(arrays, 8.0), Converting(arrays, None)
        scaler.scale(arrays.asarray(1.0))
        assert scaler.step(one if is_tree else with_groups([{"params": [one, empty]}])) == "stepped"
        assert (one.stored, empty.stored) == (2.0, None)


NO_OPTIMIZER, NO_GROUP = r"param_groups .* or grads .*got", r"param_groups\[0\] of Grouped must be a dict with 'params'"
MADE, EMPTY = "of Copying must be assignable.*made when they are read", r"must be a list .*got <list_iterator"
UNASSIGNED = r"grads of Fixed must be assignable.*master_dtype.*give it a setter"
REFUSED: list[tuple[str, Any]] = [
    *((NO_OPTIMIZER, wrong) for wrong in (object(), 3, "SGD", lambda: None)),
    *((NO_GROUP, with_groups([group])) for group in (3, {"weights": []}, [Parameter()])),
    (r"a parameter of Grouped must have \.grad, got 3", with_groups([{"params": [3]}])),
    (f"grads {MADE}", Copying()),
    (f"grad {MADE}", with_groups([{"params": [Copying()]}])),
    # The optimizer would find it empty.
    (EMPTY, with_groups([{"params": iter([Parameter(np.ones(1, np.float32))])}])),
    (EMPTY, with_groups(iter([{"params": [Parameter()]}]))),
    (UNASSIGNED, Fixed()),
]


@pytest.mark.numpy
@pytest.mark.parametrize(("said", "optimizer"), REFUSED)
def test_an_optimizer_whose_gradients_cannot_be_found_or_given_back_is_an_error_that_says_so(said: str, optimizer):
    scaler = GradScaler(init_scale=4.0)
    scaler.scale(np.ones(1, np.float32))
    with pytest.raises(InvalidTypeError, match=said):
        scaler.unscale_(optimizer)


@pytest.mark.numpy
def test_a_guard_has_nothing_to_give_back():
    assert gradscale.StepGuard().step(Copying()) == [8.0, 8.0]


@pytest.mark.parametrize("of", [Tree, Grouped])
def test_gradients_that_cannot_be_divided_are_refused_and_nothing_is_touched(arrays: Library, of):
    scaler, good = GradScaler(init_scale=4.0), arrays.asarray([8.0])
    scaler.scale(arrays.asarray(1.0))
    for bad in (65536, True, arrays.asarray([65536, 2], "int32")):
        optimizer = of([good, bad])
        for call in (scaler.unscale_, scaler.step):
            with pytest.raises(InvalidTypeError, match=rf"gradient of {of.__name__}.* 1 must have a floating"):
                call(optimizer)
        arrays.assert_array(good, [8.0])
        assert not optimizer.steps


class Listing:
    """Lists parameters, and has no length."""

    def __init__(self, *parameters: Parameter):
        self._parameters = parameters

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._parameters)


def test_parameters_are_looked_for_anew_in_each_iteration_however_they_are_listed_and_unscaled_once(arrays: Library):
    scaler, optimizer = GradScaler(), Grouped()
    kept, without, one, other = (Parameter() for _ in range(4))

    def listings() -> Iterator[list[Any]]:
        first = [kept, without]
        yield [first]
        # In place, too.
        first[0] = Parameter()
        yield [first]
        first.append(Parameter())
        yield [first]
        # One bare parameter may stand for a list, and one be listed twice.
        yield from ([first, (kept,)], [Listing(kept, Parameter())], [Listing(without, kept)], [kept])
        yield [[one, other], [one]]

    for params in listings():
        optimizer.param_groups = [{"params": each} for each in params]
        found = {parameter for each in params for parameter in ([each] if each is kept else each)} - {without}
        for parameter in found:
            [parameter.grad] = scaled(arrays, scaler, 4.0)
        # Two share a gradient.
        one.grad = other.grad
        scaler.unscale_(optimizer)
        scaler.update()
        for parameter in found:
            arrays.assert_array(parameter.grad, [4.0])
        assert without.grad is None
    tree = Tree(scaled(arrays, scaler, 4.0) * 2)
    scaler.step(tree)
    for grad in tree.grads:
        arrays.assert_array(grad, [4.0])


@pytest.mark.parametrize(("own", "master"), [("float64", "float32"), ("float32", "float64")])
def test_master_dtype_gives_gradients_in_that_dtype(arrays: Library, own: str, master: str):
    scaler = GradScaler(init_scale=1024.0)
    optimizer = Grouped(scaled(arrays, scaler, 2.0, dtype=own))
    given = optimizer.gradients()[0]
    optimizer.master_dtype = arrays.dtype(master)  # type: ignore[attr-defined]
    scaler.step(optimizer)
    arrays.assert_array(optimizer.gradients()[0], [2.0], master)
    arrays.assert_array(given, [2048.0], own)
