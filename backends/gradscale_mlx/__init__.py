"""MLX's arrays and process groups for gradscale."""

from gradscale.extras import needs

with needs("gradscale_mlx", "mlx"):
    from gradscale_mlx.arrays import MlxBackend
    from gradscale_mlx.groups import MlxCollectives
    from gradscale_mlx.training import ModelAndOptimizer

__all__ = ["MlxBackend", "MlxCollectives", "ModelAndOptimizer", "backend"]
__dir__ = __all__.copy

backend = MlxBackend()
"""The adapter that the entry point ``mlx`` names, for arrays and for groups."""
