"""Ranks in one process, to test a training loop with, and the conformance suite for adapters and for libraries.

::

    def train(collectives):
        scaler = gradscale.ShardedGradScaler(group=collectives)
        ...
        return scaler.state_dict()

    states = gradscale.testing.run_ranks(3, train)      # threads; one result for each rank
    assert states[0] == states[1] == states[2]
"""

from gradscale.testing.conformance import check_backend, check_collectives, check_library
from gradscale.testing.ranks import RankFailedError, ThreadCollectives, run_ranks

__all__ = ["RankFailedError", "ThreadCollectives", "check_backend", "check_collectives", "check_library", "run_ranks"]
