"""The pure functions of gradscale as JAX's compiler sees them: traced, and computed from what was traced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

import gradscale
from gradscale import tree

__all__ = ["trace_pure_functions", "traced"]


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
