"""What the ranks do in the tests of GroupAgreement: training loops of pure functions, over any group."""

from __future__ import annotations

import time
from typing import Any

from scenarios import gradients, loss, rank_and_size
from worlds import Failure, alone

import gradscale
from gradscale import registry
from gradscale.core.arithmetic import fingerprint


def _on_host(state: gradscale.ScaleState) -> list[int]:
    return registry.backend_for(state.scale).read(fingerprint(state))


def pure_loop(group: Any, bad_rank: int, value: float, library: str) -> dict[str, Any]:
    """Train four steps; at the second one rank's gradients are not finite."""
    rank, _ = rank_and_size(group)
    policy = gradscale.DynamicScale(growth_interval=2)
    agree = gradscale.GroupAgreement(group, policy, timeout=20.0)
    state = policy.init(loss(library))
    counts, states = [], []
    for step in range(4):
        grads = gradients(library, value if (rank, step) == (bad_rank, 1) else 1.0)
        _, nonfinite = gradscale.unscale(grads, state)
        agreed = agree(nonfinite, state)
        if type(agreed) is not type(nonfinite) or agreed.shape != () or agreed.dtype != nonfinite.dtype:
            msg = f"the count must come back as it was given, got {agreed!r} for {nonfinite!r}"
            raise TypeError(msg)
        counts.append(int(agreed))
        state = policy.update(state, nonfinite=agreed)
        states.append(_on_host(state))
    return {"counts": counts, "states": states}


def differing(group: Any, drifting_rank: int, what: str) -> dict[str, Any]:
    """Let one rank hold another scale, have another policy, or leave out a call; then agree twice."""
    rank, _ = rank_and_size(group)
    is_drifting = rank == drifting_rank
    policy = gradscale.DynamicScale(growth_interval=7 if what == "policy" and is_drifting else 5)
    agree = gradscale.GroupAgreement(group, policy, timeout=20.0)
    like = loss("numpy")
    state = gradscale.DynamicScale(init_scale=2.0 if what == "scale" and is_drifting else 4.0).init(like)
    _, nonfinite = gradscale.unscale(gradients("numpy"), state)
    if what == "call" and is_drifting:
        # As if this rank had made one call more before.
        agree._calls += 1
    failures = []
    for _ in range(2):
        try:
            agree(nonfinite, state)
        except gradscale.GradscaleError as error:
            failures.append(Failure.of(error))
    return {"failures": failures}


@alone
def lateness(group: Any, absent_rank: int, settings: dict[str, float]) -> dict[str, Any]:
    """Let one rank come too late."""
    rank, _ = rank_and_size(group)
    policy = gradscale.DynamicScale()
    agree = gradscale.GroupAgreement(group, policy, timeout=settings["timeout"])
    state = policy.init(loss("numpy"))
    _, nonfinite = gradscale.unscale(gradients("numpy"), state)
    agree(nonfinite, state)
    if rank == absent_rank:
        time.sleep(3.0)
    begin = time.monotonic()
    try:
        agree(nonfinite, state)
    except gradscale.GradscaleError as error:
        return {"failure": Failure.of(error), "seconds": time.monotonic() - begin}
    return {"failure": None, "seconds": time.monotonic() - begin}


def exhaustion(group: Any, bad_rank: int) -> list[str]:
    """Overflow on one rank at a minimum that must be raised, and go on."""
    rank, _ = rank_and_size(group)
    policy = gradscale.DynamicScale(init_scale=1.0, min_scale=1.0, at_min="raise")
    agree = gradscale.GroupAgreement(group, policy, timeout=20.0)
    state = policy.init(loss("numpy"))
    raised = []
    for value in (float("nan"), 1.0):
        _, nonfinite = gradscale.unscale(gradients("numpy", value if rank == bad_rank else 1.0), state)
        try:
            agree(nonfinite, state)
            raised.append("")
        except gradscale.ScaleUnderflowError as error:
            raised.append(str(error))
    return raised
