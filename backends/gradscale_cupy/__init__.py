"""gradscale's adapter for CuPy: arrays (:mod:`gradscale_cupy.arrays`) and NCCL communicators."""
