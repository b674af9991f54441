"""gradscale's adapter for CuPy: arrays (:mod:`gradscale_cupy.arrays`) and NCCL communicators."""

from gradscale.extras import needs

with needs("gradscale_cupy", "cupy"):
    import cupy  # noqa: F401
