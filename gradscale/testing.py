"""Tests of a training loop: four rules, and ranks in one process; and the conformance suite for adapters and groups."""

from gradscale.tools.testing.conformance import check_backend, check_collectives, check_library
from gradscale.tools.testing.ranks import RankFailedError, ThreadCollectives, run_ranks
from gradscale.tools.testing.trainer_rules import TrainerFault, TrainerReport, check_trainer

__all__ = [
    "RankFailedError",
    "ThreadCollectives",
    "TrainerFault",
    "TrainerReport",
    "check_backend",
    "check_collectives",
    "check_library",
    "check_trainer",
    "run_ranks",
]
