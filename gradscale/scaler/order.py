"""The order of the calls of an iteration: what a call in the wrong place is told, and the right order."""

from __future__ import annotations

from typing import NoReturn

from gradscale.core.gradients import no_optimizer
from gradscale.errors import CallOrderError, InvalidValueError
from gradscale.scaler.claim import PROGRAM_CALLS, Reason
from gradscale.scaler.collaborators import Collaborators
from gradscale.scaler.diagnosis.cause import NO_GRADIENTS
from gradscale.scaler.inputs import StepInputs
from gradscale.scaler.progress import Progress

_ORDER = "The right order: scale(loss), backward pass, unscale_(optimizer) if wanted, step(optimizer), update()"

_SINCE_UPDATE = (
    "on this optimizer since the last update(): most often the iteration before ended without update(), which each one "
    "needs; to skip a step call refuse(optimizer), then step(optimizer) and update() as always"
)
INCOMPLETE = (
    "the gradients of an optimizer could not be unscaled completely before: end the iteration with "
    "update(get_scale()), or load a state dict, and make new gradients"
)
INTERRUPTED = "update() was interrupted, and may have adapted the state: call it again first"
FAILED_CLOSURE = (
    "a closure of this optimizer has failed, so that its gradients cannot be used: call step() with a closure again, "
    "or end the iteration with update(get_scale()) and make new gradients"
)
DROPPED_DTENSORS = (
    "keeps() has dropped the last micro-batch of DTensor gradients, and whether it was the one that reduces them "
    "cannot be seen: guard such a loop without keeps()"
)


def wrong_order(what: str, iteration: int) -> NoReturn:
    """Raise CallOrderError with what was wrong in an iteration, and the right order."""
    msg = f"{what} (iteration {iteration}). {_ORDER}"
    raise CallOrderError(msg)


def forbid_call(call: str) -> NoReturn:
    """Raise CallOrderError for a call during another call of a scaler."""
    msg = (
        f"{call} was called while another call of this scaler is under way: inside optimizer.step(), in a "
        f"callback, a signal handler or another thread. Nothing was changed; call it once that one has returned"
    )
    raise CallOrderError(msg)


def require_step(optimizer: object) -> None:
    """Raise InvalidTypeError for an object that cannot be stepped."""
    if isinstance(optimizer, type) or not callable(getattr(optimizer, "step", None)):
        raise no_optimizer(optimizer, "step()")


def forbid_unscale(progress: Progress, iteration: int) -> NoReturn:
    """Raise CallOrderError for an optimizer that was unscaled or stepped already."""
    if progress.stage.has_ended:
        wrong_order(f"unscale_() is being called after step() {_SINCE_UPDATE}", iteration)
    wrong_order(
        INCOMPLETE if progress.is_incomplete else f"unscale_() has already been called {_SINCE_UPDATE}", iteration
    )


def forbid_step(progress: Progress, iteration: int) -> NoReturn:
    """Raise CallOrderError for an optimizer that was stepped already, or whose gradients nothing would divide."""
    if progress.stage.has_ended:
        wrong_order(f"step() has already been called {_SINCE_UPDATE}", iteration)
    wrong_order(
        "step() of this optimizer has failed, and a loss was scaled since, whose gradients nothing would divide: "
        "end the iteration with update(get_scale()), or load a state dict, and make new gradients",
        iteration,
    )


def check_refusal(progress: Progress, reason: Reason, iteration: int) -> None:
    """Raise CallOrderError for a refusal that comes after the step, or after the other ranks were told what comes."""
    call = f"{PROGRAM_CALLS[reason]} is being called after"
    if progress.stage.has_ended:
        wrong_order(f"{call} step() {_SINCE_UPDATE}", iteration)
    if progress.stage.is_unscaled and progress.pending is not None and progress.pending.groups:
        wrong_order(f"{call} unscale_(), which has told the other ranks what comes", iteration)


def check_inputs(
    progress: Progress, inputs: StepInputs, parts: Collaborators, iteration: int, *, has_closure: bool
) -> None:
    """Raise for a loss or a norm that a step cannot be given."""
    loss, norm, _ = inputs
    if has_closure and (loss is not None or norm is not None):
        msg = "step() with a closure takes no loss= and no norm=: scale() is given the loss of each evaluation"
        raise InvalidValueError(msg)
    if norm is not None and parts.clipping.max_norm is not None:
        msg = "norm= is the norm of gradients that the program has clipped, got a scaler that clips by max_norm="
        raise InvalidValueError(msg)
    is_unscaled = progress.stage.is_unscaled
    if norm is not None and not is_unscaled and not parts.current.never_scales:
        wrong_order(
            "step(norm=) needs the norm of unscaled gradients: call unscale_() before they are clipped", iteration
        )
    if is_unscaled and progress.inputs is None and norm is None and loss is not None:
        wrong_order("step(loss=) was called after unscale_(), which has judged the step: give scale() loss=", iteration)


def not_at_boundary(what: str, iteration: int) -> CallOrderError:
    """Return the error of a call that is possible only between two iterations."""
    return CallOrderError(
        f"{what} is possible only at the beginning of an iteration, before refuse(), unscale_() and step(), or at its "
        f"end, after update(); this is the middle of iteration {iteration}, which load_state_dict() begins anew"
    )


def step_without_gradients(kind: str, *, is_alone: bool) -> str:
    """Return the text for the step of an optimizer without any gradient."""
    ranks = "" if is_alone else " on any rank"
    return f"step() of {kind}, none of whose parameters has a gradient{ranks}: {NO_GRADIENTS}. Nothing was stepped"
