"""NumPy arrays and MPI communicators for gradscale."""

from gradscale_numpy.arrays import NumpyBackend

__all__ = ["NumpyBackend", "backend"]

backend = NumpyBackend()
