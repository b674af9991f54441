"""What the examples share: the digits, ranks of MPI, options, and what is shown of the runs."""

import os

# Ranks share the cores; threads of their own would only be in each other's way. Before NumPy and torch are imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
