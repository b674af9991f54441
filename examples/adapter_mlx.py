"""An adapter for MLX: what its library lacks of the standard, a backend, and the suite.

    python examples/adapter_mlx.py

MLX follows the array API standard but for devices, of which its arrays and constructors know nothing, as
``gradscale.testing.check_library(mx.zeros(1))`` says, and for ``sum(dtype=)``. This adds them; an adapter of a library
that has all of the standard is ``MlxBackend`` alone. README_ADAPTER.md beside this file says what is needed.

Needs, from a clone of gradscale: python -m pip install '.[numpy]' --group mlx.
"""

from __future__ import annotations

from typing import Any

from shared.program import program_needs

with program_needs("examples/adapter_mlx.py", "numpy", groups="mlx"):
    import mlx.core as mx

import gradscale
from gradscale.testing import check_backend, check_library


class Namespace:
    """The functions of mlx.core, of which some take what the standard says they take."""

    __name__ = "mlx.core"

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)

    def sum(self, x: Any, /, *, dtype: Any = None, **options: Any) -> Any:
        """Return the sum of elements, in another dtype if it is given."""
        return mx.sum(x if dtype is None else x.astype(dtype), **options)

    def signbit(self, x: Any, /) -> Any:
        """Return where numbers are negative, -0.0 among them: the suite compares signs."""
        return mx.logical_or(x < 0, mx.logical_and(x == 0, 1 / x < 0))


def _without_device(make: Any) -> Any:
    """Return a function that makes arrays, and takes ``device=``: memory is one, and streams are no devices."""

    def made(*args: Any, device: Any = None, **options: Any) -> Any:  # noqa: ARG001
        return make(*args, **options)

    return made


def complete() -> None:
    """Give MLX's arrays the members that they lack, for this process."""
    namespace = Namespace()
    for name in ("arange", "asarray", "full", "ones", "zeros"):
        setattr(namespace, name, _without_device(getattr(mx, name)))
    mx.array.device = property(lambda _: mx.default_device())
    mx.array.to_device = lambda x, device, /, *, stream=None: x  # noqa: ARG005
    mx.array.__array_namespace__ = lambda _, api_version=None: namespace  # noqa: ARG005


class MlxBackend(gradscale.Backend):
    """MLX's arrays: the pure functions, and bits by a cast instead of by arithmetic."""

    name = "mlx"
    _words = ((mx.float16, mx.int16), (mx.bfloat16, mx.int16), (mx.float32, mx.int32))

    def example(self) -> mx.array:
        """Return a 0-d float32 array."""
        return mx.zeros((), mx.float32)

    def bits(self, x: mx.array, /) -> mx.array | None:
        """Return the bits of real values as signed integers."""
        return next((x.view(word) for dtype, word in self._words if x.dtype == dtype), None)


complete()
backend = MlxBackend()
"""What pyproject.toml registers: ``[project.entry-points."gradscale.backends"]  mlx = "adapter_mlx:backend"``."""


class Descent:
    """Gradient descent on float32 weights, with gradients that come in float16."""

    def __init__(self, weights: Any) -> None:
        self.weights = weights
        self.grads: list[Any] = []
        # What gradients are unscaled into.
        self.master_dtype = mx.float32

    def step(self) -> None:
        """Take one step."""
        self.weights = self.weights - 0.5 * self.grads[0]


def main() -> None:
    """Hold the library and the adapter to the suite, and fit 3 weights to ones, with an overflow on the way."""
    check_library(mx.zeros(1))
    check_backend(backend, mx.zeros(1), dtypes=[mx.float16, mx.bfloat16, mx.float32])
    print("MLX and its adapter pass the suite")
    scaler = gradscale.GradScaler(init_scale=2.0**10, backend=backend)
    descent, wanted = Descent(mx.zeros(3)), mx.ones(3)
    for step in range(40):
        # A loss whose gradients float16 does not hold, in the third step.
        factor = 1e6 if step == 2 else 1.0

        def loss(weights: Any, factor: float = factor) -> Any:
            return scaler.scale(mx.mean(mx.square(weights - wanted) * factor))

        descent.grads = [mx.grad(loss)(descent.weights).astype(mx.float16)]
        norm: Any = scaler.unscale_(descent, max_norm=10.0)
        scaler.step(descent)
        if scaler.last_step(descent).skipped:
            print(f"step {step}: skipped, norm {norm.item()}")
        scaler.update()
    print(f"weights {[round(value, 2) for value in descent.weights.tolist()]}, scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main()
