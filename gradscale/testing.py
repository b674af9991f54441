"""Ranks in one process, to test a training loop with, and the conformance suite for adapters, libraries and groups."""

from gradscale.tools.testing.conformance import check_backend, check_collectives, check_library
from gradscale.tools.testing.ranks import RankFailedError, ThreadCollectives, run_ranks

__all__ = ["RankFailedError", "ThreadCollectives", "check_backend", "check_collectives", "check_library", "run_ranks"]
