"""Collaborators: the parts of a scaler, which last for all of its iterations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gradscale.core.snapshot import Snapshot
from gradscale.scaler.agreement import Agreement
from gradscale.scaler.guard import Guard
from gradscale.scaler.mistakes import Mistakes
from gradscale.scaler.options import Clipping
from gradscale.scaler.reports import Reports
from gradscale.scaler.scale import CurrentScale
from gradscale.scaler.stall import Tally


class Collaborators(NamedTuple):
    """The parts of a scaler."""

    current: CurrentScale
    agreement: Agreement
    reports: Reports

    mistakes: Mistakes
    """Warns of loops that are probably wrong."""
    tally: Tally
    """Counts steps."""
    guard: Guard | None = None
    """Judges losses and norms; None if nothing does."""
    clipping: Clipping = Clipping()
    """How ``unscale_`` and ``step`` clip by default."""
    snapshots: Sequence[Snapshot] = ()
    """Of what ``hold`` names."""
    is_guard: bool = False
    """Whether a step ends its iteration, and an optimizer without gradients is no error."""
