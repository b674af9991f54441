"""Runs a task as one rank that a launcher has started: of MPI, whose group is COMM_WORLD, or of MLX's ring."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from scenarios import rank_and_size
from worlds import serve

if sys.argv[1] == "mpi":
    from mpi4py.MPI import COMM_WORLD as group  # noqa: N811
else:
    import mlx.core as mx

    group = mx.distributed.init(strict=True, backend="ring")
folder = Path(sys.argv[2])
serve(folder, group, *rank_and_size(group), (folder / "task").read_bytes())
