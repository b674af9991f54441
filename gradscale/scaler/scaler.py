"""GradScaler: the per-iteration protocol READY -> UNSCALED -> STEPPED, a thin stateful shell around the pure core."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from array_api_compat import array_namespace

from gradscale.core import ops, tree, vector
from gradscale.core.backend import Backend
from gradscale.core.clipping import Clip, NormOver
from gradscale.core.gradients import collect_gradients
from gradscale.core.protocols import Array, Policy, ScaleState
from gradscale.core.vector import Verdict
from gradscale.errors import (
    BackendError,
    CollectiveTimeoutError,
    InvalidTypeError,
    InvalidValueError,
    ScaleDesyncError,
    ScaleUnderflowError,
)
from gradscale.reports.steps import StepReport
from gradscale.scaler.clipping import Clipping
from gradscale.scaler.closure import find_closure, step_with_closure
from gradscale.scaler.iteration import Iteration, Progress, Stage
from gradscale.scaler.reporting import HISTORY_SIZE, Diagnose, OnSkip, OnUpdate, step_report

__all__ = ["GradScaler"]


class GradScaler(Clipping):
    """Scale losses, unscale gradients, skip steps with non-finite gradients, and adapt the scale.

    Per iteration: ``scale(loss)`` and the backward pass; for each optimizer ``unscale_(optimizer)`` if its gradients
    are to be looked at or clipped, and ``step(optimizer)``; then ``update()``.

    Parameters
    ----------
    init_scale, growth_factor, backoff_factor, growth_interval : optional
        As in :class:`DynamicScale`; default 65536.0, 2.0, 0.5, 2000.
    policy : DynamicScale, StaticScale or a Policy of your own, optional
        Instead of the four above.
    enabled : bool, default True
        False makes every method pass through: nothing is scaled, checked or skipped.
    backend : str or Backend, optional
        An adapter or its registered name. Default: the one for the arrays' library.
    on_skip, on_update : callable or sequence of callables, optional
        Called on rank 0 with the StepReport of each skipped step, and with the UpdateReport of each iteration.
    diagnose : {"on_overflow"}, optional
        Find out for each skipped step which parameters overflowed, on every rank: ``last_step(optimizer).overflow``.
    history_size : int, default 1024
        How many StepReports ``history`` keeps.

    Raises
    ------
    InvalidValueError, InvalidTypeError
        For an argument out of range or of a wrong type, or for a policy together with one of the four.

    Notes
    -----
    Several optimizers share the scale: each is skipped on its own verdict, and any overflow backs the scale off once.
    The state is made on the library and device of the first floating array that comes along.
    """

    def __init__(
        self,
        *,
        init_scale: float | None = None,
        growth_factor: float | None = None,
        backoff_factor: float | None = None,
        growth_interval: int | None = None,
        policy: Policy | None = None,
        enabled: bool = True,
        backend: str | Backend | None = None,
        on_skip: OnSkip | None = None,
        on_update: OnUpdate | None = None,
        diagnose: Diagnose | None = None,
        history_size: int = HISTORY_SIZE,
    ) -> None:
        factors = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
        }
        super().__init__(
            policy,
            factors,
            enabled,
            backend,
            on_skip=on_skip,
            on_update=on_update,
            diagnose=diagnose,
            history_size=history_size,
        )
        self._closure_state: ScaleState | None = None

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or nested containers of arrays, by the scale.

        Parameters
        ----------
        outputs : array or nested containers of arrays
            Floating arrays of one library, on any devices; integers and ``None`` pass through.

        Returns
        -------
        same as outputs
            New arrays of the same dtypes; a 0-d loss of half precision comes back as float32. The very same object when
            the scaler is disabled. No host read, no collective.

        Raises
        ------
        InvalidTypeError
            For a leaf that is no array, arrays of two libraries, or in a function that jax compiles.
        """
        if not self._enabled:
            return outputs
        self._iteration.require_sound()
        if isinstance(outputs, int):
            msg = f"outputs must be an array or nested containers of arrays, got {outputs!r}"
            raise InvalidTypeError(msg)
        leaves, rebuild = tree.flatten(outputs)
        like = ops.first_floating(leaves)
        if like is None:
            ops.require_arrays(leaves, what="output", rebuild=rebuild)
            return rebuild(leaves)
        self._refuse_tracing(like, "scale()")
        state = self._in_force(like)
        scaled = ops.scale(rebuild(leaves), state)
        if self._closure_state is None:
            self._iteration.state = state
        self._iteration.scaled = True
        if self._diagnoses:
            self._remember_loss(leaves)
        return scaled

    def unscale_(
        self, optimizer: Any, *, max_norm: float | None = None, norm_over: NormOver | None = None
    ) -> Array | None:
        """Divide an optimizer's gradients by the scale and judge them; at most once in an iteration.

        Gradients are overwritten in place where their library can, else assigned. Over a group this starts the
        agreement, which ``step`` finishes, so that gradient clipping overlaps with it.

        Parameters
        ----------
        optimizer : Optimizer
            Whose gradients.
        max_norm : float, optional
            Clip them to this global 2-norm, as torch's ``clip_grad_norm_`` does; also when disabled. A norm that is
            not finite is an overflow.
        norm_over : {"rank", "group"}, optional
            Over a group: the norm of this rank's gradients, which all ranks hold; or of the parts of all ranks.

        Returns
        -------
        array or None
            With ``max_norm`` the norm before clipping, 0-d float32; None from a disabled scaler without gradients. No
            host read; two, and one all-reduce more, with ``norm_over="group"``.

        Raises
        ------
        CallOrderError
            When it was called already, or after ``step``, or before any ``scale``.
        InvalidTypeError
            When the object has no gradients, or something among them is no array.
        InvalidValueError
            For a ``max_norm`` that is negative, or over a group without ``norm_over``.
        """
        clip = self._checked_clip(optimizer, max_norm, norm_over)
        if not self._enabled:
            return None if clip is None else self._clip_unscaled(optimizer, clip)
        self._iteration.require_sound()
        progress = self._iteration.of(optimizer)
        if progress.stage is Stage.UNSCALED:
            self._iteration.wrong_order("unscale_() has already been called on this optimizer since the last update()")
        if progress.stage is Stage.STEPPED:
            self._iteration.wrong_order("unscale_() is being called after step() on this optimizer")
        return self._unscale(optimizer, progress, clip)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer unless one of its gradients, on any rank, is not finite.

        Parameters
        ----------
        optimizer : Optimizer
            Its ``step`` is called through the attribute, exactly when the step is really made.
        *args, **kwargs
            Passed on. A closure, first positional or ``closure=``, zeroes the gradients, computes the loss, scales it
            with ``scale`` and makes the backward pass; the scaler unscales after each evaluation, and evaluates again
            at a lower scale when a gradient is not finite.

        Returns
        -------
        object
            What ``optimizer.step`` returned; None for a skipped step. ``last_step`` tells the two apart.

        Raises
        ------
        CallOrderError
            When it was called already since the last ``update``.
        ScaleDesyncError, CollectiveTimeoutError
            Over a group: on every rank when the states differ; when some rank never comes.
        ClosureOverflowError
            When a closure overflows at every scale after its first evaluation was fine.

        Notes
        -----
        One host read, whatever the number of devices, dtypes and parameters; one for each evaluation of a closure.
        """
        if not self._enabled:
            self._reports[optimizer] = StepReport(False, 1.0, 0, "disabled", self._iteration.number)
            return optimizer.step(*args, **kwargs)
        progress = self._enter_step(optimizer)
        closure = find_closure(args, kwargs)
        if closure is not None:
            if progress.stage is Stage.UNSCALED and not progress.by_closure:
                self._iteration.wrong_order(
                    "step() with a closure unscales by itself, and unscale_() was called before"
                )
            return step_with_closure(self, optimizer, progress, closure, args, kwargs)
        verdict = self._judge_for_step(optimizer, progress)
        returned = None if verdict.nonfinite else optimizer.step(*args, **kwargs)
        self._conclude(optimizer, progress, verdict)
        return returned

    def update(self, new_scale: Any = None) -> None:
        """Adapt the scale to this iteration's verdicts, and begin the next iteration.

        Parameters
        ----------
        new_scale : number or 1-element array, optional
            Set this scale instead; the trackers stay. An array is read by the host.

        Raises
        ------
        CallOrderError
            When nothing has been scaled or unscaled since the last ``update``. A step that was left out on purpose is
            fine, before or after ``unscale_``.
        ScaleUnderflowError
            When an overflow finds the scale at ``min_scale`` and the policy says so; the iteration is ended first, so
            the scaler can be saved or used on.
        InvalidValueError, InvalidTypeError
            For a new scale that is not finite and above zero, or outside the policy's bounds; nothing is changed.
        ScaleDesyncError, CollectiveTimeoutError
            For an agreement that no ``step`` has finished.
        """
        if not self._enabled:
            return
        self._iteration.require_sound()
        wanted = None if new_scale is None else self._checked_scale(new_scale)
        judged = self._iteration.judged()
        verdicts = [self._judge(progress) for progress in judged if self._is_judged_by_host(progress)]
        if wanted is not None:
            self._set_scale(wanted)
        elif self._iteration.lowered is not None:
            self._state = self._iteration.lowered
        elif judged:
            self._state = self._advance(judged)
        elif not self._iteration.scaled and not self._may_unscale_unscaled():
            self._iteration.wrong_order(
                "update() was called, and nothing was scaled or unscaled since the last update()"
            )
        ended, self._iteration = self._iteration, Iteration(self._iteration.number + 1)
        if self._on_update:
            self._tell_update(ended, verdicts)
        if wanted is None and any(verdict.nonfinite and verdict.exhausted for verdict in verdicts):
            msg = (
                f"gradients overflow although the scale is at its minimum, {verdicts[0].scale!r}: the cause is not the "
                f"scale. Look for inf or NaN in the unscaled loss, the data or the weights; lower the learning rate, "
                f'or allow a smaller min_scale; at_min="clamp" skips such steps instead. Got {self._policy!r}'
            )
            raise ScaleUnderflowError(msg)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_closure_state": None}

    # What a scaler over a group replaces.

    def _start(self, progress: Progress) -> Callable[[], Array]:
        """Begin the agreement on what is to be sent, and return what finishes it; one process agrees with itself."""
        return lambda: progress.sent

    def _whereabouts(self, progress: Progress) -> str:  # noqa: ARG002
        """Say which process this is, and in which iteration, for error messages."""
        return f"this process in iteration {self._iteration.number}"

    def _is_judged_by_host(self, progress: Progress) -> bool:  # noqa: ARG002
        """Tell whether the host needs the verdict; not where the optimizer skips on the device."""
        return True

    def _advance(self, judged: Sequence[Progress]) -> ScaleState:
        """Return the state after an iteration with these verdicts: any overflow backs the scale off once."""
        state = self._current(None)
        maximum = array_namespace(state.scale).maximum
        nonfinite = [progress.agreed[0] for progress in judged if progress.agreed is not None]
        return self._policy.update(state, nonfinite=functools.reduce(maximum, nonfinite))

    def _like_nothing(self) -> Array | None:
        """Return an array for a process that has none; None where it need not take part."""
        return None

    # The steps inside; the closure module calls them, too.

    def _enter_step(self, optimizer: Any) -> Progress:
        """Return an optimizer's progress, having checked that it may be stepped."""
        self._iteration.require_sound()
        progress = self._iteration.of(optimizer)
        if progress.stage is Stage.STEPPED:
            self._iteration.wrong_order("step() has already been called on this optimizer since the last update()")
        return progress

    def _judge_for_step(self, optimizer: Any, progress: Progress) -> Verdict:
        """Return the verdict on an optimizer's gradients, unscaled now if they are not yet."""
        if progress.stage is Stage.READY:
            self._unscale(optimizer, progress)
        return self._judge(progress)

    def _in_force(self, like: Array | None) -> ScaleState:
        """Return the state that gradients are scaled and unscaled with, made where ``like`` is if there is none yet."""
        return self._closure_state or self._iteration.state or self._current(like)

    def _unscale(self, optimizer: Any, progress: Progress, clip: Clip | None = None) -> Array | None:
        """Unscale the gradients in place, clip them, start the agreement on them, and return their norm."""
        self._require_group()
        found, assign = collect_gradients(optimizer)
        what = f"gradient of {type(optimizer).__name__}"
        like = ops.first_floating(found)
        if self._state is None and not self._restored and not self._may_unscale_unscaled():
            self._iteration.wrong_order("gradients are to be unscaled, and scale() has never been called")
        if like is None and self._state is None:
            like = self._like_nothing()
        state = self._in_force(like)
        self._refuse_tracing(state.scale, "unscale_()")
        backend = self._backend_for(state.scale)
        chosen = ops.floating_leaves(found, state, what=what)
        master_dtype = getattr(optimizer, "master_dtype", None)
        out = chosen if master_dtype is None else None
        # Whatever fails from here on may have unscaled some gradients, but for a refusal of their kind.
        progress.stage = Stage.UNSCALED
        progress.verdict = progress.finish = norm = None
        try:
            if clip is None:
                unscaled, nonfinite = backend.unscale(chosen, state, dtype=master_dtype, out=out)
            else:
                wanted = {"dtype": master_dtype, "out": out}
                unscaled, nonfinite, squares = backend.unscale_with_squares(chosen, state, **wanted)
        except (InvalidTypeError, InvalidValueError):
            progress.stage = Stage.READY
            raise
        if clip is not None:
            unscaled, nonfinite, norm = self._clip(backend, unscaled, nonfinite, squares, clip)
        if unscaled is not chosen:
            assign({id(old): new for old, new in zip(chosen, unscaled, strict=True)})
        self._agree(progress, backend, state, nonfinite)
        return norm

    def _agree(self, progress: Progress, backend: Backend, state: ScaleState, nonfinite: Array) -> None:
        """Start the agreement on a local verdict."""
        position = self._iteration.number, self._iteration.calls
        progress.sent = self._packer.pack(backend, self._policy, state, nonfinite, position)
        self._iteration.calls += 1
        progress.finish = self._start(progress)

    def _may_unscale_unscaled(self) -> bool:
        """Tell whether gradients may come scaled from elsewhere, though this process never called scale()."""
        return False

    def _require_group(self) -> None:
        """Raise while there is nobody to agree with, before any gradient is touched."""

    def _judge(self, progress: Progress) -> Verdict:
        """Finish the agreement and read its verdict: the one host read of a step."""
        self._iteration.require_sound()
        if progress.verdict is None:
            try:
                progress.verdict = self._read_verdict(progress)
            except (BackendError, CollectiveTimeoutError, ScaleDesyncError) as error:
                self._iteration.failure = error
                raise
        return progress.verdict

    def _read_verdict(self, progress: Progress) -> Verdict:
        if progress.finish is None:
            self._iteration.wrong_order("the gradients of this optimizer could not be unscaled completely before")
        progress.agreed = progress.finish()
        backend = self._backend_for(progress.agreed)
        agreed, sent = vector.read_both(backend, progress.agreed, progress.sent)
        self._settle(progress, agreed)
        return vector.read_verdict(agreed, sent, self._policy, lambda: self._whereabouts(progress))

    def _conclude(self, optimizer: Any, progress: Progress, verdict: Verdict, retries: int = 0) -> None:
        """Record the end of a step."""
        progress.stage = Stage.STEPPED
        overflow = self._diagnose_overflow(optimizer, progress) if verdict.nonfinite and self._diagnoses else None
        report = step_report(verdict, self._iteration.number, retries, overflow)
        self._record(optimizer, report)
