"""NumPy arrays and MPI communicators for gradscale."""

from gradscale.extras import needs

with needs("gradscale_numpy", "numpy"):
    from gradscale_numpy.arrays import NumpyBackend

__all__ = ["NumpyBackend", "backend"]
__dir__ = __all__.copy

backend = NumpyBackend()
