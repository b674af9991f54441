"""One of two ranks of MLX's ring, the second of which comes late, or is killed; the first prints what it is told."""

import os
import signal
import sys
import time
from pathlib import Path

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).parent))

import scenarios

import gradscale


def main(how: str):
    """Make an iteration on both ranks, and two more on the first."""
    group = mx.distributed.init(strict=True, backend="ring")
    timeout = 2.0 if how == "late" else 30.0
    trainer = scenarios.Trainer(group, "mlx", 1, timeout=timeout)
    trainer.iterate((0,))
    if group.rank() == 1:
        time.sleep(0.5)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    for one in (trainer, scenarios.Trainer(mx.distributed.init(), "mlx", 1, timeout=timeout)):
        try:
            one.iterate((0,))
        except gradscale.GradscaleError as error:
            print(f"{type(error).__name__}: {error}", flush=True)


main(sys.argv[1])
