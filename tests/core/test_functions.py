"""The pure functions: scale (and GradScaler's), unscale, with out= too, and select, of anything that can be drawn."""

import math
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from axes import require
from libraries import Library
from runs import start
from tiers import examples

import gradscale
from gradscale import DynamicScale, GradScaler, InvalidTypeError, InvalidValueError, SkipSpikes, StaticScale, presets

# See conftest.py.
PURE = TRACED = True

SMALLEST = 2.0**-126
LARGEST = float(np.finfo(np.float32).max)
# Powers of two up to the ends of float32, and scales whose reciprocals are rounded.
SCALES = [*(2.0**exponent for exponent in (-126, -115, -10, 0, 3, 17, 30, 126, 127)), LARGEST]
SCALES += [float(np.float32(scale)) for scale in (3.0, 0.1, 65535.0, 1e-37, 3e38, 1.0 + 2.0**-23)]
# Values before or after the multiplication; some round to inf in half precision, and some just do not.
VALUES = (0.0, -0.0, 1.0, -1.5, 3.0, 1.0 + 2.0**-23, 1.0 + 2.0**-50, 2.0**-17 + 2.0**-27, 2.0**-24, -8e6, 65519.0)
VALUES += (65520.0, 65520.0, -65520.0, 65535.9, -65535.9, -3.39e38, 3.3961775e38, 1e300, math.inf, -math.inf, math.nan)
SHAPES = ((), (2,), (0,), (3,), (1, 1), (2, 0, 3))
COMPLEX = ("complex64", "complex128")
OVERFLOWS = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")

# Containers of leaves, and how the leaves are had back; test_tree.py has every container.
FORMS: list[tuple[Callable[[list[Any]], Any], Callable[[Any], list[Any]]]] = [
    (list, lambda got: got),
    (lambda leaves: {"a": (leaves[0], [None, ()]), "b": tuple(leaves[1:])}, lambda got: [got["a"][0], *got["b"]]),
    # Walked once.
    (iter, lambda got: got if type(got) is list else []),
    (lambda leaves: leaves[0], lambda got: [got]),
]


class Leaf(NamedTuple):
    """A leaf; if it is an array to be multiplied, its values in NumPy and the name of its dtype."""

    given: Any
    values: Any = None
    dtype: str = ""


class Draw:
    """A scale and outputs or gradients, drawn at random, and what becomes of each leaf."""

    def __init__(self, arrays: Library, seed: int):
        self.arrays, self.chance = arrays, random.Random(seed)
        rounded = float(np.float32(math.ldexp(self.chance.uniform(1.0, 2.0), self.chance.randint(-126, 127))))
        self.scale = self.chance.choice([rounded, 2.0 ** self.chance.randint(-126, 127), *SCALES])
        self.state = start(arrays, DynamicScale(init_scale=self.scale))
        self.leaves = [self.leaf() for _ in range(self.chance.randint(1, 4))]
        # One array may be in two places.
        self.leaves += [self.chance.choice(self.leaves)] * self.chance.randint(0, 1)
        self.make, self.take = self.chance.choice(FORMS if self.leaves[0].dtype else FORMS[:-1])
        if self.make is FORMS[-1][0]:
            self.leaves = self.leaves[:1]

    def leaf(self) -> Leaf:
        integers = [("int32", [1, 2]), ("int64", 7), ("bool", True)]
        others = [None, 3, True, *(self.arrays.asarray(value, dtype) for dtype, value in integers)]
        dtype = self.chance.choice([*self.arrays.reals, *self.arrays.reals, *COMPLEX])
        return Leaf(self.chance.choice(others)) if self.chance.random() < 0.2 else self.array(dtype, self.shape())

    def shape(self) -> tuple[int, ...]:
        # For each other one, some libraries compile anew.
        return self.chance.choice(SHAPES[:3] if self.arrays.is_slow else SHAPES)

    def array(self, dtype: str, shape: tuple[int, ...]) -> Leaf:
        pool = VALUES if dtype in (*self.arrays.reals, *COMPLEX) else (0.0, 1.0)
        factor = self.chance.choice([1.0, 1.0 / self.scale, self.scale, self.scale]) if pool is VALUES else 1.0
        values = np.array([self.chance.choice(pool) * factor for _ in range(math.prod(shape))]).reshape(shape)
        given = self.arrays.asarray((values + 1j * np.flip(values) if dtype in COMPLEX else values).tolist(), dtype)
        given = self.arrays.xp.reshape(given, shape)
        return Leaf(given, self.arrays.to_numpy(given), dtype)

    def product(self, leaf: Leaf, factors: tuple[float, ...], dtype: str):
        """Return the products in float32, or in a wider type itself, as the library rounds them to a dtype."""
        wide = leaf.dtype if leaf.dtype in ("float64", *COMPLEX) else "float32"
        found = self.flushed(leaf.values.astype(wide))
        for factor in factors:
            found = self.flushed(np.asarray(found * np.float32(factor)))
        return self.arrays.to_numpy(self.arrays.xp.astype(self.arrays.asarray(found, wide), self.arrays.dtype(dtype)))

    def flushed(self, x):
        if not self.arrays.flushes_subnormals or x.dtype not in (np.float32, np.complex64):
            return x
        zero, both = np.float32(0.0), (x.real, x.imag)
        real, imag = (np.where(np.abs(part) < SMALLEST, np.copysign(zero, part), part) for part in both)
        return real + 1j * imag if x.dtype == np.complex64 else real

    def is_finite(self, leaf: Leaf, got: Any, factors: tuple[float, ...], dtype: str) -> bool:
        """Assert what a leaf has become, and tell whether that is finite; all but floating arrays pass through."""
        if not leaf.dtype:
            assert got is leaf.given
            return True
        wanted = self.product(leaf, factors, dtype)
        is_finite = bool(np.isfinite(wanted).all())
        if is_finite or dtype not in COMPLEX:
            self.arrays.assert_array(got, wanted, dtype)
        else:
            assert (got.shape, got.dtype) == (wanted.shape, self.arrays.dtype(dtype))
            assert not np.isfinite(self.arrays.to_numpy(got)).all()
        return is_finite

    def require_kept(self, leaves: list[Leaf]):
        for leaf in leaves:
            if leaf.dtype:
                self.arrays.assert_array(leaf.given, leaf.values, leaf.dtype)


def drawn(arrays: Library) -> Iterator[Draw]:
    for seed in range(examples(1000 if arrays.name == "numpy" else 60 if arrays.is_slow else 300)):
        yield Draw(arrays, seed)


@OVERFLOWS
def test_any_outputs_are_multiplied_in_their_dtypes_but_for_a_0d_loss_of_half_precision(arrays: Library):
    for draw in drawn(arrays):
        for scale in (lambda x, state=draw.state: gradscale.scale(x, state), GradScaler(init_scale=draw.scale).scale):
            scaled = draw.take(scale(draw.make([leaf.given for leaf in draw.leaves])))
            for leaf, got in zip(draw.leaves, scaled, strict=True):
                is_widened = leaf.dtype in arrays.halves and leaf.given.shape == ()
                draw.is_finite(leaf, got, (draw.scale,), "float32" if is_widened else leaf.dtype)
        draw.require_kept(draw.leaves)


@OVERFLOWS
def test_any_gradients_are_divided_and_counted_as_they_are_stored(arrays: Library):
    for draw in drawn(arrays):
        how = draw.chance.choice(["new", "dtype", "dtype", "out", "themselves"])
        draw.make = list if draw.make is iter and how in ("out", "themselves") else draw.make
        wanted, options = draw.chance.choice([arrays.reals[0], *arrays.reals]), {}
        leaves = targets = draw.leaves
        given = draw.make([leaf.given for leaf in leaves])
        if how == "dtype":
            options["dtype"] = arrays.dtype(wanted)
        elif how == "themselves":
            options["out"] = given
        elif how == "out":
            kinds = [draw.chance.choice(COMPLEX if leaf.dtype in COMPLEX else arrays.reals) for leaf in leaves]
            targets = [
                draw.array(kind, leaf.given.shape) if leaf.dtype else Leaf(draw.chance.choice([None, 7]))
                for leaf, kind in zip(leaves, kinds, strict=True)
            ]
            # One for a gradient that stands in two places.
            owned = dict(zip([id(leaf.given) for leaf in leaves], targets, strict=True))
            targets = [owned[id(leaf.given)] for leaf in leaves]
            options["out"] = draw.make([target.given for target in targets])
        unscaled, nonfinite = gradscale.unscale(given, draw.state, **options)
        # Above 2**126 the reciprocal is subnormal.
        is_split = arrays.flushes_subnormals and draw.scale > 2.0**126
        inverse = tuple(float(np.float32(1.0 / x)) for x in ((4.0, draw.scale / 4.0) if is_split else (draw.scale,)))
        bad = set()
        for leaf, target, got in zip(leaves, targets, draw.take(unscaled), strict=True):
            dtype = wanted if how == "dtype" and leaf.dtype not in ("", *COMPLEX) else target.dtype or leaf.dtype
            if not draw.is_finite(leaf, got, inverse, dtype):
                bad.add(id(leaf.given))
            if leaf.dtype and "out" in options:
                assert (got is target.given) is arrays.writes
        arrays.assert_array(nonfinite, len(bad), "int32")
        if how != "themselves" or not arrays.writes:
            draw.require_kept(leaves)
        if not arrays.writes:
            draw.require_kept(targets)


@OVERFLOWS
def test_a_quotient_halfway_between_the_largest_number_and_inf_is_an_overflow(arrays: Library):
    state = start(arrays, DynamicScale(init_scale=0.5))
    for dtype, tie in (("float16", 65520.0), ("bfloat16", 2.0**128 - 2.0**119)):
        for quotient, bad in ((tie, 1), (-tie, 1), (float(np.nextafter(np.float32(tie), np.float32(0.0))), 0)):
            grads = [arrays.asarray([quotient / 2.0], "float32")]
            if dtype in arrays.reals:
                arrays.assert_array(gradscale.unscale(grads, state, dtype=arrays.dtype(dtype))[1], bad, "int32")


@OVERFLOWS
def test_every_leaf_is_taken_from_the_tree_that_the_bool_chooses(arrays: Library):
    for draw in drawn(arrays):
        dtypes = [draw.chance.choice([*arrays.reals, *COMPLEX, "int32", "bool"]) for _ in draw.leaves]
        pairs = [[draw.array(dtype, shape) for _ in range(2)] for dtype in dtypes for shape in [draw.shape()]]
        pairs += [[Leaf(same)] * 2 for same in (None, 3, "adam")] * (draw.make is not FORMS[-1][0])
        pred = draw.chance.random() < 0.5
        trees = [draw.make([leaf.given for leaf in leaves]) for leaves in zip(*pairs, strict=True)]
        chosen = draw.take(gradscale.select(arrays.asarray(pred, "bool"), *trees))
        for pair, got in zip(pairs, chosen, strict=False):
            one = pair[0 if pred else 1]
            assert (got == one.given) if not one.dtype else got is not one.given
            draw.require_kept([*pair, one._replace(given=got)])


# What is refused, with its place; nothing is written then.

Refused = tuple[type[Exception], str, Callable[[], object]]


def refused(arrays: Library, strict: Library, target: Any) -> Iterator[Refused]:
    """Yield calls with the error of each."""
    x, y, one = arrays.asarray([8.0]), arrays.asarray([8.0, 8.0]), arrays.asarray(1.0)
    stranger = np.ones(2) if arrays.name.startswith("strict") else strict.asarray([1.0, 1.0])
    wide, jagged, integers = (arrays.asarray([1.0, 2.0], dtype) for dtype in ("float64", "complex64", "int32"))
    state = start(arrays, DynamicScale(init_scale=8.0))
    yes: Any = arrays.asarray(True, "bool")

    def unscale(grads, **options):
        return lambda: gradscale.unscale(grads, state, **options)

    def select(*given, pred=yes):
        return lambda: gradscale.select(pred, *given)

    other = "must be an array of the library .* use one"
    for wrong, message in (
        ({"loss": [None, 1.5]}, r" at \['loss'\]\[1\] must be an array .*got 1\.5"),
        *((kind, " must be an array") for kind in ("loss", 1j, {1.5})),
        (np.array([None], dtype=object), r" must .* dtype\('O'\)"),
        ({"x": [x, stranger]}, rf" at \['x'\]\[1\] {other}"),
    ):
        for scale in (GradScaler().scale, lambda outputs: gradscale.scale(outputs, state)):
            yield InvalidTypeError, f"output{message}", lambda scale=scale, wrong=wrong: scale(wrong)
        yield InvalidTypeError, f"gradient{message}", unscale(wrong)
    for dtype in (integers.dtype, jagged.dtype, "no dtype", 3, [1]):
        yield InvalidValueError, "dtype must be a real floating dtype .*got", unscale(x, dtype=dtype)
    yield InvalidValueError, "give dtype= or out=.*not both", unscale([x], out=[x], dtype=x.dtype)
    for out in ([x, x], {"w": x}, x, []):
        yield InvalidValueError, "trees must have one structure", unscale([x], out=out)
    for error, message, gradient, bad in (
        *((InvalidValueError, "out must hold an array of shape", y, shape) for shape in (one, None, 3)),
        (InvalidValueError, "out must hold a floating array for each gradient, each once", y, integers),
        (InvalidValueError, "out must be complex for a complex gradient", jagged, wide),
        (InvalidValueError, "out must be complex for a complex gradient", y, jagged),
        (InvalidValueError, "each once", arrays.asarray([16.0]), target),
        (InvalidValueError, "stands twice has one array", x, arrays.asarray([0.0])),
        (InvalidTypeError, "out 1 must be an array", y, 1.5),
        (InvalidTypeError, "out 1 must be an array of the library", y, stranger),
    ):
        yield error, message, unscale([x, gradient], out=[target, bad])
    yield InvalidTypeError, r"one dtype leaf by leaf, got .*32 and .*64; cast", select(y, wide)
    for error, message, *pairs in (
        (InvalidValueError, "one shape leaf by leaf", (x, y), (x, one)),
        (InvalidValueError, "one structure", ([1], [1, 2]), ({"a": 1}, {"b": 1}), ([[1]], [1])),
        (InvalidValueError, "no arrays must be equal", (3, 4), ("adam", "sgd"), (None, 3), (1, True), (1, 1.0), (x, 3)),
    ):
        for first, second in pairs:
            yield error, message, select([first], [second])
    message = "pred must be a 0-d bool array, such as nonfinite == 0, got"
    for pred in (arrays.asarray(1, "int32"), arrays.asarray([True], "bool"), True, None):
        yield InvalidTypeError, message, select([x], [x], pred=pred)


def test_what_is_wrong_is_refused_with_its_place_and_nothing_is_written(arrays: Library, strict: Library):
    target = arrays.asarray([0.0])
    for error, message, call in refused(arrays, strict, target):
        with pytest.raises(error, match=message):
            call()
    arrays.assert_array(target, [0.0])


# Devices, with and without values, and torch's graphs.


def test_arrays_and_states_stay_on_their_devices_and_are_judged_on_the_states_own(strict: Library):
    devices = [strict.xp.Device(name) for name in ("CPU_DEVICE", "device1", "device2", "no_float64")]

    def arrays(*values: float):
        return [strict.asarray([value], device=device) for value, device in zip(values, devices, strict=True)]

    def assert_arrays(got, *values: float):
        assert [x.device for x in got] == devices
        assert str([float(x[0]) for x in got]) == str(list(values))

    assert_arrays(GradScaler(init_scale=4.0).scale(arrays(0.0, 1.0, 2.0, 3.0)), 0.0, 4.0, 8.0, 12.0)
    for home in devices:
        policy = DynamicScale(init_scale=8.0, growth_interval=1, max_scale=2.0**20, at_min="raise")
        state = policy.init(strict.asarray(0.0, device=home))
        for bad in range(4):
            values = [math.nan if index == bad else 8.0 for index in range(4)]
            got, nonfinite = gradscale.unscale(arrays(*values), state)
            assert_arrays(got, *(value / 8.0 for value in values))
            assert (nonfinite.device, int(nonfinite)) == (home, 1)
        for verdict in (0, 1):
            # It may be on another device.
            moved = policy.update(state, nonfinite=strict.asarray(verdict, "int32", device=devices[2]))
            assert {x.device for x in (*moved, *policy.backoff(moved), policy.at_min_scale(moved))} == {home}
        *_, squares = gradscale.Backend().unscale_with_squares(arrays(8.0, 8.0, 16.0, 24.0), state)
        assert (squares.device, float(squares)) == (home, 15.0)
        pred = strict.asarray(False, "bool", device=home)
        assert_arrays(gradscale.select(pred, arrays(*[1.0] * 4), arrays(*[2.0] * 4)), *[2.0] * 4)


@pytest.mark.torch
def test_on_torch_everything_stays_in_its_graph():
    torch = require("torch")
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        parameter = torch.tensor([1.0, 2.0], dtype=dtype, requires_grad=True)
        GradScaler(init_scale=8.0).scale((parameter * parameter).sum()).backward()
        assert parameter.grad.tolist() == [16.0, 32.0]
    leaf = torch.tensor([2.0], requires_grad=True)
    [got], _ = gradscale.unscale([leaf * 24.0], DynamicScale(init_scale=8.0).init(leaf))
    gradscale.select(torch.tensor(True), got, torch.zeros(1)).sum().backward()
    assert leaf.grad.tolist() == [3.0]


@pytest.mark.torch
@pytest.mark.tier("ranks")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "complex64"])
def test_on_torchs_meta_device_they_give_tensors_of_the_cpus_dtypes_and_shapes(dtype: str):
    torch = require("torch")

    def forms(device: str):
        given = {"w": torch.ones((2, 3), dtype=getattr(torch, dtype), device=device), "n": None}
        made = []
        for policy in (DynamicScale(), StaticScale(8.0), *map(presets.named, presets.names())):
            state = policy.init(like=given["w"])
            scaled = gradscale.scale(given, state)
            unscaled, nonfinite = gradscale.unscale(scaled, state)
            masters, _ = gradscale.unscale(scaled, state, dtype=torch.float32)
            chosen = gradscale.select(nonfinite == 0, unscaled, given)
            made += [nonfinite, *policy.update(state, nonfinite=nonfinite)]
            made += [each["w"] for each in (scaled, unscaled, masters, chosen)]
        rule, loss = SkipSpikes(), torch.ones((), device=device)
        window = rule.init(like=loss)
        is_spike = rule.judge(window, loss)
        made += [is_spike, *rule.learn(window, loss, skipped=is_spike)]
        assert {x.device.type for x in made} == {device}
        return [(x.dtype, x.shape) for x in made]

    assert forms("meta") == forms("cpu")


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
def test_by_a_scale_of_zero_of_a_users_policy_no_gradient_is_finite(arrays: Library):
    state = gradscale.StaticScale(1.0).init(like=arrays.asarray(1.0))
    state = state._replace(scale=state.scale * 0)
    _, nonfinite = gradscale.unscale([arrays.asarray([1.0, 2.0]), arrays.asarray([[3.0]])], state)
    assert int(nonfinite) == 2
