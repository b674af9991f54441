"""``gradscale check`` with a fault on one rank: ``python faulty_check.py KIND:RANK OPTIONS OF CHECK``."""

import json
import os
import signal
import sys
import time

from gradscale.tools.cli import app, check, check_rank

FOR_EVER = 1e6
IS_RANK = "--rank"


def put_in(kind: str, faulty: int):
    """Make the rank of this process fail if it is the one."""

    class Rank(check_rank.Rank):
        def has(self, other: str) -> bool:
            return (other, self.world.rank) == (kind, faulty)

        def report_in(self):
            if self.has("late"):
                time.sleep(FOR_EVER)
            return super().report_in()

        def overflow(self, bad: int, value: float, *, delay: float = 0.0):
            if bad == 0 and self.has("hang"):
                time.sleep(FOR_EVER)
            if bad == 0 and self.has("die"):
                os.kill(os.getpid(), signal.SIGKILL)
            return super().overflow(bad, value, delay=delay)

    vars(check_rank).update(Rank=Rank)


if __name__ == "__main__":
    if sys.argv[1] == IS_RANK:
        kind, _, rank = sys.argv[2].partition(":")
        put_in(kind, int(rank))
        check_rank.main(*json.loads(sys.argv[3]))
    else:
        check.RANK_PROGRAM = (__file__, IS_RANK, sys.argv[1])
        app.run(["check", *sys.argv[2:]])
