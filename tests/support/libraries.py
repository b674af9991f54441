"""The array libraries that the tests run on: how to make arrays of each, and how to assert what came out."""

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from axes import require

import gradscale
from gradscale import registry, tree
from gradscale.core.backend import Backend

REALS = ("float32", "float64")


@dataclasses.dataclass(frozen=True)
class Library:
    """One row of the ``arrays`` fixture.

    Attributes
    ----------
    name : str
        The row's id.
    xp : module
        The array namespace.
    halves, reals : tuple of str
        Names of the half dtypes, and of all real floating dtypes that there are.
    readonly : bool
        Whether the arrays made here refuse to be written to.
    """

    name: str
    xp: Any
    halves: tuple[str, ...] = ()
    readonly: bool = False

    @property
    def writes(self) -> bool:
        """Return whether gradients are overwritten in place: the pure core does not know which can be."""
        return self.name in ("numpy", "torch")

    @property
    def is_slow(self) -> bool:
        """Return whether small operations take long: they are compiled for each shape and dtype, or planned."""
        return self.name.startswith("jax") or self.name == "dask"

    @property
    def flushes_subnormals(self) -> bool:
        """Return whether the library's compiler takes float32 numbers below 2**-126 for 0, as XLA does on a CPU."""
        return self.name.startswith("jax")

    @property
    def reals(self) -> tuple[str, ...]:
        """Return the names of all real floating dtypes."""
        return (*self.halves, *REALS)

    def dtype(self, name: str):
        """Return a dtype of this library by its name."""
        # dask computes in any dtype of NumPy, and its namespace names those of the standard alone.
        return np.dtype(name) if self.name == "dask" else getattr(self.xp, name)

    def asarray(self, values, dtype: str = "float32", **options):
        """Return an array of this library; read-only in that row."""
        x = self.xp.asarray(values, dtype=self.dtype(dtype), **options)
        if self.readonly:
            x.flags.writeable = False
        return x

    def to_numpy(self, x):
        """Return the values as a NumPy array; half precision of torch as float32, a lazy array computed."""
        if self.name == "dask":
            return np.array(x.compute())
        if self.name.startswith("jax"):
            return np.array(x.astype("float32") if x.dtype == "bfloat16" else x)
        if self.name.startswith("torch") and str(x.dtype) == "torch.bfloat16":
            x = x.float()
        return np.array(x) if self.name.startswith("numpy") else np.from_dlpack(x).copy()

    def item(self, x):
        """Return the value of a 0-d array as a Python number."""
        assert x.shape == (), x
        return self.to_numpy(x).item()

    def assert_is_mine(self, x):
        """Assert that an object is an array of this library, not a scalar and not of another one."""
        assert type(x) is type(self.xp.asarray(1.0)), f"{x!r} of type {type(x)} is no array of {self.name}"

    def assert_array(self, x, expected, dtype: str = "float32"):
        """Assert library, dtype, shape and every bit of the values; NaN equals NaN, and -0.0 is not 0.0."""
        self.assert_is_mine(x)
        assert x.dtype == self.dtype(dtype), f"{x.dtype} is not {dtype}"
        got = self.to_numpy(x)
        wanted = np.asarray(expected)
        assert got.shape == wanted.shape, f"{got.shape} is not {wanted.shape}"
        wanted = wanted.astype(got.dtype)
        np.testing.assert_array_equal(got, wanted, strict=True)
        if np.isrealobj(got):
            np.testing.assert_array_equal(np.signbit(got[~np.isnan(got)]), np.signbit(wanted[~np.isnan(wanted)]))

    def state(self, state) -> tuple[float, int, int, int]:
        """Return a ScaleState as Python numbers, after asserting its dtypes and shapes."""
        for field, dtype in zip(state, ("float32", "int32", "int32", "int32"), strict=True):
            self.assert_is_mine(field)
            assert field.dtype == self.dtype(dtype), f"{field!r} is not {dtype}"
        scale, *trackers = (self.item(field) for field in state)
        return (scale, *trackers)


def _numpy() -> Library:
    import array_api_compat.numpy as xp

    return Library("numpy", xp, halves=("float16",))


def _strict(version: str = "") -> Library:
    return Library(f"strict-{version}" if version else "strict", require("strict"))


def _torch() -> Library:
    require("torch").set_num_threads(1)
    import array_api_compat.torch as xp

    return Library("torch", xp, halves=("float16", "bfloat16"))


def _dask() -> Library:
    require("dask")
    import array_api_compat.dask.array as xp
    from dask.tokenize import normalize_token

    # It names a task by its function's pickle, which takes longer than the rest of these small graphs.
    normalize_token.register(types.FunctionType, lambda function: ("function", id(function)))
    return Library("dask", xp, halves=("float16",))


def _jax() -> Library:
    xp = require("jax").numpy
    return Library("jax", xp, halves=("float16", "bfloat16"))


# The pure functions as JAX's compiler sees them: traced, and computed from what was traced.


def traced(function: Callable[..., Any]):
    """Return a function that traces all JAX arrays in its arguments, and computes the program that comes out.

    What is no array is passed as it is. The program is run operation by operation: to compile one for each call of the
    tests would take minutes, and what a compiler makes of them is tested where whole steps are.
    """

    @functools.wraps(function)
    def call(*args, **kwargs):
        import jax

        leaves, rebuild = tree.flatten([list(args), kwargs])
        # An array in two places is one argument.
        arrays = {id(leaf): leaf for leaf in leaves if isinstance(leaf, jax.Array)}
        results: list[Any] = []

        def program(*values):
            by_id = dict(zip(arrays, values, strict=True))
            positional, named = rebuild(by_id.get(id(leaf), leaf) for leaf in leaves)
            returned, restore = tree.flatten([function(*positional, **named)])
            results[:] = [returned, restore]
            return [leaf for leaf in returned if isinstance(leaf, jax.Array)]

        closed = jax.make_jaxpr(program)(*arrays.values())
        computed = map(jax.numpy.asarray, jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *arrays.values()))
        returned, restore = results
        return restore(next(computed) if isinstance(leaf, jax.Array) else leaf for leaf in returned)[0]

    return call


def trace_pure_functions(patch: pytest.MonkeyPatch):
    """Replace the pure functions, as tests call them, by traced ones."""
    for name in ("scale", "unscale", "select"):
        patch.setattr(gradscale, name, traced(getattr(gradscale, name)))
    for name in ("update", "backoff", "at_min_scale"):
        patch.setattr(gradscale.DynamicScale, name, traced(getattr(gradscale.DynamicScale, name)))
    for name in ("judge", "learn"):
        patch.setattr(gradscale.SkipSpikes, name, traced(getattr(gradscale.SkipSpikes, name)))


_MAKERS = {
    "numpy": _numpy,
    "numpy-readonly": lambda: dataclasses.replace(_numpy(), name="numpy-readonly", readonly=True),
    "strict": _strict,
    **{f"strict-{version}": functools.partial(_strict, version) for version in ("2024.12", "2023.12")},
    "torch": _torch,
    "torch-core": lambda: dataclasses.replace(_torch(), name="torch-core"),
    "dask": _dask,
    "jax": _jax,
    "jax-jit": lambda: dataclasses.replace(_jax(), name="jax-jit"),
}

# A new library is a function above, and its row there; what has a mark of its own is run by it.
_MARKED = ("numpy", "torch", "jax")
ROWS: Sequence[Any] = [
    pytest.param(name, id=name, marks=[getattr(pytest.mark, mark) for mark in _MARKED if name.startswith(mark)])
    for name in _MAKERS
]


def made(name: str) -> Library:
    """Return a library as it is."""
    return _MAKERS[name]()


@contextmanager
def opened(name: str) -> Iterator[Library]:
    """Make a library ready, and yield it.

    - ``numpy`` and ``torch`` go through their adapters.
    - ``numpy-readonly`` and ``torch-core`` go through the pure core; the arrays of the first raise when they are
      written to.
    - ``strict`` goes through the pure core, with every optional part of the standard switched off. It has the newest
      version of the standard that array-api-strict knows, and ``strict-2023.12`` that one.
    - ``jax`` goes through its adapter, with float64; in ``jax-jit`` the pure functions are traced as a whole.
    - ``dask`` goes through the pure core, too, and computes in this thread, where and when a value is asked for.
    """
    library = made(name)
    with pytest.MonkeyPatch.context() as patch:
        if name in ("numpy-readonly", "torch-core"):
            generic = Backend()
            patch.setattr(registry, "backend_for", lambda _: generic)
        if name.startswith("strict"):
            flags = {"boolean_indexing": False, "data_dependent_shapes": False, "enabled_extensions": ()}
            if name != "strict":
                flags["api_version"] = name.removeprefix("strict-")
            with library.xp.ArrayAPIStrictFlags(**flags):
                yield library
        elif name.startswith("jax"):
            if name == "jax-jit":
                trace_pure_functions(patch)
            jax = require("jax")
            # For every thread, and not for this one alone.
            jax.config.update("jax_enable_x64", True)
            with jax.numpy_rank_promotion("raise"):
                yield library
            jax.config.update("jax_enable_x64", False)
        elif name == "dask":
            import dask

            # Its optimizer takes longer than these small graphs.
            with dask.config.set(scheduler="synchronous", array_optimize=None):
                yield library
        else:
            yield library
