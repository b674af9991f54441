"""Arithmetic of 0-d arrays in one launch: kernels written out of traces of policies, of the message and of clipping.

A trace's expressions, by :mod:`gradscale.policies.plain`, are C++ once ``a if b else c`` is ``b ? a : c``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import cupy
import numpy as np

from gradscale import ScaleState
from gradscale.core import arithmetic, validation, vector
from gradscale.core.identity import IdentityMap
from gradscale.core.protocols import Array, Policy
from gradscale.policies.plain import Symbol, Trace, statements, trace_of
from gradscale_cupy.launch import kernel_source

__all__ = ["Rule", "clip_factor", "rule_of"]

# Functions that the expressions call, as Python's helpers compute, and by which kernels read and write. They stand
# behind unscale.cu, whose instructions keep subnormal numbers.
_CALLED = """
#define True true
#define False false
#define inf __longlong_as_double(0x7FF0000000000000)
#define nan __longlong_as_double(0x7FF8000000000000)

namespace gradscale {

struct c_float {
    const double value;
    GRADSCALE_FUNCTION c_float(double x) : value(double_of(single_of(x))) {}
};
GRADSCALE_FUNCTION double divide(double x, double y) { return x / y; }
GRADSCALE_FUNCTION double root(double x) { return sqrt(x); }
GRADSCALE_FUNCTION bool is_finite(double x) { return !is_bad(x); }
GRADSCALE_FUNCTION long long truncated(double x) {
    return -2147483648.0 <= x && x <= 2147483647.0 ? (long long)x : -2147483648;
}
GRADSCALE_FUNCTION int bits_of(double x) { return (int)__float_as_uint(single_of(x)); }

GRADSCALE_FUNCTION double read(const float* x) { return double_of(*x); }
GRADSCALE_FUNCTION double read(const double* x) { return *x; }
GRADSCALE_FUNCTION double read(double x) { return x; }
GRADSCALE_FUNCTION long long read(const int* x) { return *x; }
GRADSCALE_FUNCTION long long read(int x) { return x; }

}  // namespace gradscale
"""
_CONDITIONAL = re.compile(r"(.+) if (.+) else (.+)")
_STORED = {"int32": "int", "float32": "float", "float64": "double"}
# A float32 is a double that was rounded, as in Python, and an int32 wraps around.
_COMPUTED = {"bool": "bool", "int32": "long long", "float32": "double", "float64": "double"}
_WORDS = {"int32": "(int)({})", "float32": "bits_of({})"}
# No product is contracted with a sum: every operation rounds, as it does alone.
_OPTIONS = ("-std=c++17", "-fmad=false", "-DGRADSCALE_ONLY=0")


def _kernel(name: str, arrays: Sequence[Symbol], numbers: Sequence[Symbol], results: Sequence[Symbol]) -> Any:
    """Return a kernel that is called with 0-d arrays, numbers, and a 1-d int32 array for the bits of its results."""
    parameters = [f"const {_STORED[x.dtype]}* {x.template}_at" for x in arrays]
    parameters += [f"{_STORED[x.dtype]} {x.template}_at" for x in numbers]
    lines = [_line(x.template, f"read({x.template}_at)", x.dtype) for x in (*arrays, *numbers)]
    computed, names = statements(results, lambda template: _CONDITIONAL.sub(r"\2 ? \1 : \3", template))
    lines += [_line(key, text, dtype) for key, (text, dtype) in computed.items()]
    words = enumerate(zip(names, results, strict=True))
    lines += [f"made[{index}] = {_WORDS[x.dtype].format(text)};" for index, (text, x) in words]
    body = "\n    ".join(["using namespace gradscale;", *lines])
    head = f'extern "C" __global__ void {name}({", ".join([*parameters, "int* made"])})'
    return _compiled(name, f"{head} {{\n    {body}\n}}\n")


def _line(name: str, text: str, dtype: str) -> str:
    return f"[[maybe_unused]] const {_COMPUTED[dtype]} {name} = {text};"


@functools.lru_cache(maxsize=1 << 8)
def _compiled(name: str, text: str) -> cupy.RawKernel:
    """Return a kernel, compiled for each device when it is first called there, and cached on disk by CuPy."""
    return cupy.RawKernel(kernel_source() + _CALLED + text, name, _OPTIONS)


def _launch(kernel: cupy.RawKernel, count: int, *arguments: Any) -> Array:
    """Launch a kernel on the current device and stream, and return its results as words."""
    made = cupy.empty(count, cupy.int32)
    kernel((1,), (1,), (*arguments, made))
    return made


class Rule(NamedTuple):
    """A policy's arithmetic on states of the current device."""

    updating: cupy.RawKernel
    packing: cupy.RawKernel

    def update(self, state: ScaleState, nonfinite: Array) -> ScaleState:
        """Do what the policy's ``update`` does."""
        made = _launch(self.updating, len(state), *state, nonfinite)
        return ScaleState(made[0].view(np.float32), made[1], made[2], made[3])

    def pack(
        self, state: ScaleState, nonfinite: Array, about: Sequence[int], *, has_gradients: bool, code: int
    ) -> Array:
        """Do what :meth:`gradscale.Backend.pack` does."""
        return _launch(self.packing, vector.LENGTH, *state, nonfinite, *map(np.int32, (has_gradients, code, *about)))


# None for a policy that is no fixed rule of arrays.
_rules: IdentityMap[Rule | None] = IdentityMap()


def rule_of(policy: Policy) -> Rule | None:
    """Return a policy's arithmetic; None for a policy that may change, or does more than the standard."""
    if policy not in _rules:
        trace = trace_of(policy)
        _rules.put(policy, None if trace is None else _rule(trace))
    return _rules[policy]


def _rule(trace: Trace) -> Rule:
    state, nonfinite, updated, at_min_scale = trace
    has_gradients, code, *about = (
        Symbol(name, (), "int32") for name in ("has_gradients", "code", *(f"about{k}" for k in range(vector.ABOUT)))
    )
    bits = Symbol("bits_of({})", (state.scale,), "int32")
    message = vector.laid_out([nonfinite, at_min_scale, has_gradients, code], [bits, *state[1:], *about])
    arrays = (*state, nonfinite)
    return Rule(_kernel("update", arrays, (), updated), _kernel("pack", arrays, (has_gradients, code, *about), message))


def clip_factor(squares: Array, max_norm: float) -> tuple[Array, Array, Array]:
    """Do what :func:`gradscale.core.arithmetic.clip_factor` does, for a 0-d float64 of the current device."""
    made = _launch(_clipping(), 3, squares, np.float64(min(max_norm, validation.LARGEST_FLOAT32)))
    return made[0].view(np.float32), made[1].view(np.float32), made[2]


@functools.cache
def _clipping() -> cupy.RawKernel:
    squares, bound = Symbol("squares", (), "float64"), Symbol("bound", (), "float64")
    return _kernel("clip_factor", (squares,), (bound,), arithmetic.clip_factor_within(squares, bound))
