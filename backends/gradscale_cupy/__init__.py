"""gradscale's adapter for CuPy: arrays, and NCCL communicators."""

from gradscale.extras import needs

with needs("gradscale_cupy", "cupy"):
    from gradscale_cupy.arrays import CupyBackend, backend
    from gradscale_cupy.nccl import NCCLGroupBackend

__all__ = ["CupyBackend", "NCCLGroupBackend", "backend"]
__dir__ = __all__.copy
