"""MlxBackend: MLX's arrays, by the pure functions: lazy, with one evaluation for each verdict."""

from __future__ import annotations

import mlx.core as mx

from gradscale import Backend
from gradscale.errors import InvalidTypeError
from gradscale_mlx.groups import MlxCollectives

_WORDS = {mx.float16: mx.int16, mx.bfloat16: mx.int16, mx.float32: mx.int32, mx.float64: mx.int64}


class MlxBackend(Backend):
    """The adapter for MLX's arrays, which are float16, bfloat16, float32 or complex64, and for its groups.

    The pure functions serve the arrays as they are, eagerly and under ``mx.compile``. Nothing is evaluated before a
    verdict is read, and then all at once.

    Examples
    --------
    >>> import gradscale, gradscale_mlx, mlx.core as mx
    >>> state = gradscale.DynamicScale(init_scale=4.0).init(mx.zeros(()))
    >>> gradscale_mlx.MlxBackend().unscale([mx.array([2.0, 4.0])], state)
    ([array([0.5, 1], dtype=float32)], array(0, dtype=int32))
    """

    name = "mlx"

    def example(self) -> mx.array:
        """Return a 0-d float32 array."""
        return mx.zeros((), mx.float32)

    def bits(self, x: mx.array, /) -> mx.array | None:
        """Return the bits of real values as signed integers."""
        return mx.view(x, _WORDS[x.dtype]) if x.dtype in _WORDS else None

    def read(self, x: mx.array, /) -> list[int]:
        """Evaluate a 1-d int32 array and return it as Python ints; InvalidTypeError under compile and vmap."""
        try:
            mx.eval(x)
        except ValueError as error:
            msg = (
                f"a gradient scaler reads its verdict on the host, which a function that MLX transforms cannot do, "
                f"got: {error}; call the scaler outside of mx.compile and mx.vmap, or use the pure functions inside: "
                f"gradscale.scale, unscale, select and policy.update"
            )
            raise InvalidTypeError(msg) from error
        return [int(value) for value in x.tolist()]

    def collectives(self, group: mx.distributed.Group, /, *, timeout: float) -> MlxCollectives:
        """Wrap a group of ``mlx.core.distributed``; ``timeout`` in seconds. Nothing is sent."""
        return MlxCollectives(group, timeout)
