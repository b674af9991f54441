"""Mistakes: warnings of loops that are probably wrong. It only looks: a scaler does the same without it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from gradscale.errors import warn_caller
from gradscale.scaler.diagnosis.cause import NO_GRADIENTS


class Mistakes:
    """Warns of what a loop has probably left out, of each but missing gradients once, also if that is an error."""

    _warned: frozenset[str] = frozenset()

    def _warn_once(self, of: str, text: str) -> None:
        if of not in self._warned:
            # Before the warning, which may be an error; copies have told the same.
            self._warned |= {of}
            warn_caller(text)

    def allow_unscaled_loss(self) -> None:
        """Warn of no iteration without ``scale``: a framework has multiplied the loss itself."""
        self._warned |= {"scale"}

    def tell_of_no_scale(self, iteration: int, of: str) -> None:
        """Warn of gradients of an optimizer, or of all ranks, that are divided in an iteration without ``scale``."""
        self._warn_once(
            "scale",
            f"scale() was not called in iteration {iteration}, and the gradients of {of} "
            f"are divided by the scale. If you forgot it, make the gradients of scaler.scale(loss). If they are "
            f"from before update(), which may have changed the scale, call step() before update(). If you have "
            f"multiplied the loss by get_scale(), all is well. (Said once.)",
        )

    def warn_of_half(self, of: str, dtypes: str) -> None:
        """Warn of gradients of an optimizer that are divided in half precision."""
        self._warn_once(
            "half",
            f"gradients of {of} are divided by the scale in {dtypes}, where the small ones that the scale has "
            f"saved are 0 again: give the optimizer an attribute master_dtype, such as np.float32, in which it "
            f"gets them; a master_dtype of {dtypes} keeps them as they are. (Said once.)",
        )

    def warn_of_no_values(self, of: Sequence[str]) -> None:
        """Warn of a step in which a rule for spikes has nothing to judge."""
        self._warn_once("values", no_values(of))

    def warn_of_ranks_without_group(self) -> None:
        """Warn of a loss that one of several ranks of MPI judges alone."""
        mpi: Any = None if "ranks" in self._warned else sys.modules.get("mpi4py.MPI")
        size = mpi.COMM_WORLD.size if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else 1
        if size > 1:
            self._warn_once(
                "ranks",
                f"a loss is judged on this rank alone, and MPI runs {size}: if one skips a step that the others make, "
                f"their weights part. Give a StepGuard or ShardedGradScaler group=MPI.COMM_WORLD; if each rank trains "
                f"by itself, group=MPI.COMM_SELF. (Said once.)",
            )

    def warn_of_no_gradients(self, what: str) -> None:
        """Warn of a guard's step without gradients, which does nothing, as that of a bare optimizer."""
        self._warn_once("gradients", f"{what}. (Said once.)")

    def tell_of_no_gradients(self) -> None:
        """Warn of a late verdict: each rank would raise an error at another call, and the others would wait."""
        warn_caller(f"a step before, whose verdict has now arrived, found no gradient on any rank: {NO_GRADIENTS}")


def no_values(of: Sequence[str]) -> str:
    """Return what is wrong if a rule has nothing to judge, and what to do."""
    return (
        f"skip= judges {' and '.join(of)}, and found nothing in this step: give step() loss=, or scale() an array of "
        f"one element; for the norm give the scaler max_norm=, or step() norm="
    )
