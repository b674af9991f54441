"""Where GradScaler finds an optimizer's gradients, and how unscaled ones go back to it."""

from collections.abc import Iterator

import numpy as np
import pytest
from libraries import Library
from optimizers import Grouped, Parameter, Tree, scaled

import gradscale
from gradscale import GradScaler, InvalidTypeError


def test_gradients_that_properties_convert_are_given_back(arrays: Library):
    class Converting:
        stored = None

        @property
        def grad(self):
            return None if self.stored is None else arrays.asarray(self.stored)

        @grad.setter
        def grad(self, value):
            self.stored = float(value)

    class Holding(Converting):
        grads = Converting.grad

        def step(self):
            return "stepped"

    for is_tree in (True, False):
        scaler, one, empty = GradScaler(init_scale=4.0), Holding(), Holding()
        optimizer = one if is_tree else Grouped([])
        if not is_tree:
            optimizer.param_groups = [{"params": [one, empty]}]
        one.stored = 8.0
        scaler.scale(arrays.asarray(1.0))
        assert scaler.step(optimizer) == "stepped"
        assert (one.stored, empty.stored) == (2.0, None)


@pytest.mark.numpy
@pytest.mark.parametrize("kind", ["grads", "grad"])
def test_copies_that_are_made_when_gradients_are_read_and_cannot_be_given_back_are_an_error(kind: str):
    class Copying:
        stored = np.full(2, 8.0, np.float32)
        grads = property(lambda self: [self.stored.copy()])
        grad = property(lambda self: self.stored.copy())

        def step(self):
            return self.stored.tolist()

    given = Grouped([])
    given.param_groups = [{"params": [Copying()]}]
    optimizer, scaler = Copying() if kind == "grads" else given, GradScaler(init_scale=4.0)
    scaler.scale(np.ones(1, np.float32))
    with pytest.raises(InvalidTypeError, match=rf"{kind} of Copying must be assignable.*made when they are read"):
        scaler.step(optimizer)
    # A guard has nothing to give back.
    assert gradscale.StepGuard().step(Copying()) == [8.0, 8.0]


@pytest.mark.numpy
@pytest.mark.parametrize("is_outer", [False, True], ids=["params", "param_groups"])
def test_an_iterator_that_the_optimizer_would_find_empty_is_refused(is_outer: bool):
    scaler, optimizer = GradScaler(), Grouped([np.ones(1, np.float32)])
    (group,) = optimizer.param_groups
    optimizer.param_groups = iter([group]) if is_outer else [{"params": iter(group["params"])}]
    scaler.scale(np.ones(1, np.float32))
    with pytest.raises(InvalidTypeError, match=r"must be a list .*got <list_iterator"):
        scaler.step(optimizer)


class Unreadable:
    """An array, as far as its attributes tell."""

    def __array_namespace__(self, api_version: str | None = None):
        raise RuntimeError(api_version)


@pytest.mark.parametrize("kind", ["list", "array", "bools", "unreadable"])
@pytest.mark.parametrize("of", [Tree, Grouped])
def test_gradients_that_cannot_be_divided_are_refused_and_nothing_is_touched(arrays: Library, kind: str, of):
    scaler, good = GradScaler(init_scale=4.0), arrays.asarray([8.0])
    scaler.scale(arrays.asarray(1.0))
    bad = {"list": 65536, "array": arrays.asarray([65536, 2], "int32"), "bools": True, "unreadable": Unreadable()}[kind]
    optimizer = of([good, bad])
    message = "cannot be read, got AttributeError" if kind == "unreadable" else "1 must have a floating or complex"
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(InvalidTypeError, match=rf"gradient of {of.__name__}.* {message}"):
            call(optimizer)
    arrays.assert_array(good, [8.0])
    assert not optimizer.steps


def test_a_gradient_that_two_parameters_share_and_a_parameter_that_is_listed_twice_are_unscaled_once(arrays: Library):
    scaler = GradScaler()
    [grad] = scaled(arrays, scaler, 4.0)
    grouped, tree = Grouped([grad, grad]), Tree([scaled(arrays, scaler, 4.0)[0]] * 2)
    grouped.param_groups.append({"params": [grouped.parameters[0]]})
    for optimizer in (grouped, tree):
        scaler.step(optimizer)
        for shared in optimizer.gradients():
            arrays.assert_array(shared, [4.0])


class Listing:
    """Lists parameters, and has no length."""

    def __init__(self, *parameters: Parameter):
        self._parameters = parameters

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._parameters)


def test_parameters_are_looked_for_anew_in_each_iteration_however_they_are_listed(arrays: Library):
    scaler, optimizer = GradScaler(), Grouped()
    kept, without = Parameter(), Parameter()

    def listings():
        first = [kept, without]
        yield [first]
        # In place, too.
        first[0] = Parameter()
        yield [first]
        first.append(Parameter())
        yield [first]
        yield from ([first, (kept,)], [Listing(kept, Parameter())], [Listing(without, kept)])

    for params in listings():
        optimizer.param_groups = [{"params": each} for each in params]
        for parameter in optimizer.parameters:
            [parameter.grad] = scaled(arrays, scaler, 4.0) if parameter is not without else [None]
        scaler.step(optimizer)
        scaler.update()
        for parameter in optimizer.parameters:
            if parameter is not without:
                arrays.assert_array(parameter.grad, [4.0])
        assert without.grad is None
    # One bare parameter may stand for a list.
    kept.grad = scaled(arrays, scaler, 4.0)[0]
    optimizer.param_groups = [{"params": kept}]
    scaler.unscale_(optimizer)
    arrays.assert_array(kept.grad, [4.0])


@pytest.mark.parametrize(("own", "master"), [("float64", "float32"), ("float32", "float64")])
def test_master_dtype_gives_gradients_in_that_dtype(arrays: Library, own: str, master: str):
    scaler = GradScaler(init_scale=1024.0)
    optimizer = Grouped(scaled(arrays, scaler, 2.0, dtype=own))
    given = optimizer.gradients()[0]
    optimizer.master_dtype = arrays.dtype(master)  # type: ignore[attr-defined]
    scaler.step(optimizer)
    arrays.assert_array(optimizer.gradients()[0], [2.0], master)
    arrays.assert_array(given, [2048.0], own)


@pytest.mark.numpy
def test_gradients_that_cannot_be_assigned_in_a_master_dtype_are_an_error_that_says_so():
    class Fixed:
        master_dtype = np.float32
        grads = property(lambda self: self.held)

        def __init__(self, held):
            self.held = held

        def step(self):
            raise AssertionError

    scaler = GradScaler(init_scale=4.0)
    with pytest.raises(InvalidTypeError, match=r"grads of Fixed must be assignable.*master_dtype.*give it a setter"):
        scaler.step(Fixed(scaler.scale(np.ones(1, np.float16))))


def test_an_optimizer_must_have_gradients_or_groups_of_parameters(arrays: Library):
    scaler, optimizer = GradScaler(), Grouped()
    scaler.scale(arrays.asarray(1.0))
    for wrong in (object(), 3, "SGD", lambda: None):
        with pytest.raises(InvalidTypeError, match=r"param_groups .* or grads .*got"):
            scaler.unscale_(wrong)  # type: ignore[arg-type]
    for groups in ([3], [{"weights": []}], [[Parameter()]]):
        optimizer.param_groups = groups
        with pytest.raises(InvalidTypeError, match=r"param_groups\[0\] of Grouped must be a dict with 'params'"):
            scaler.step(optimizer)
    optimizer.param_groups = [{"params": [3]}]
    with pytest.raises(InvalidTypeError, match=r"a parameter of Grouped must have \.grad, got 3"):
        scaler.step(optimizer)
