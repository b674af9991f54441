"""GradScaler, ShardedGradScaler, StepGuard: the protocol READY -> UNSCALED -> STEPPED over a scaler's parts."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

from gradscale.core import registry, validation
from gradscale.core.arithmetic import NormOver
from gradscale.core.backend import Backend
from gradscale.core.gradients import UNSCALING, Request
from gradscale.core.protocols import Array, Collectives, Group, Namespace, Optimizer
from gradscale.core.snapshot import Snapshot
from gradscale.errors import (
    CallOrderError,
    GradscaleError,
    InvalidTypeError,
    InvalidValueError,
    ScaleUnderflowError,
    short_repr,
    unreadable,
)
from gradscale.policies.dynamic import StaticScale
from gradscale.scaler import checkpoint
from gradscale.scaler.agreement import Agreement
from gradscale.scaler.claim import PROGRAM_CALLS, Reason
from gradscale.scaler.collaborators import Collaborators
from gradscale.scaler.collection import clipping_request
from gradscale.scaler.diagnosis.diagnose import Diagnosis
from gradscale.scaler.diagnosis.look import DiagnosisOptions
from gradscale.scaler.diagnosis.report import OverflowReport
from gradscale.scaler.guard import Losses, checked_loss, guard_for, is_loss
from gradscale.scaler.inputs import Batch, checked_inputs, checked_value
from gradscale.scaler.iteration import Iteration
from gradscale.scaler.judge import MicroBatches
from gradscale.scaler.mistakes import Mistakes
from gradscale.scaler.options import (
    Clipping,
    CommonOptions,
    ScalerOptions,
    ShardedOptions,
    StepGuardOptions,
    check_arguments,
    checked_clipping,
    policy_of,
    with_options,
)
from gradscale.scaler.order import forbid_call, forbid_unscale
from gradscale.scaler.reports import Deferred, OnSkip, OnUpdate, Reports, StepReport, callbacks_of, step_report
from gradscale.scaler.scale import CurrentScale, checked_scale
from gradscale.scaler.stall import Tally, raise_or_warn
from gradscale.scaler.stepper import Step
from gradscale.scaler.update import Update, iteration_after_load

_Outputs = TypeVar("_Outputs")

_A_LOSS = "loss must be a number, a real floating array of one element, or False for none"
# The policy of guards, and of clipping without a scaler: a scale of 1 for good.
_ONE = StaticScale(1.0)


def collaborators_of(
    options: Mapping[str, object],
    backend: str | Backend | None,
    groups: Sequence[Collectives] | None = (),
    own_rank: Callable[[], int | None] | None = None,
) -> Collaborators:
    """Return the parts of a scaler with these options."""
    options = {**vars(CommonOptions()), **options}
    current = CurrentScale(policy_of(options), backend)
    reports, guard = Reports(options), guard_for(options["skip"])
    # Ranks act on these at the same time, so that they must have them in common.
    common = {name: options[name] for name in ("diagnose", "skip", "give_up_after")}
    common["hold"] = options["hold"] is not None
    clipping = checked_clipping(options["max_norm"], options["norm_over"])
    agreement = Agreement(groups, {**common, **clipping._asdict()}, own_rank)
    snapshots = _snapshots_of(options["hold"])
    return Collaborators(current, agreement, reports, Mistakes(), Tally(options), guard, clipping, snapshots)


def _snapshots_of(hold: object) -> list[Snapshot]:
    """Return the snapshots of the arrays of ``hold``, one for each library."""
    by_library: dict[Backend, list[object]] = {}
    for each in () if hold is None else hold if isinstance(hold, (list, tuple)) else [hold]:
        by_library.setdefault(registry.backend_for(each), []).append(each)
    return [backend.snapshot(wanted) for backend, wanted in by_library.items()]


class GradScaler:
    """Scale losses, unscale gradients, skip steps with non-finite gradients, and adapt the scale.

    Per iteration: ``scale(loss)`` and the backward pass; for each optimizer ``unscale_(optimizer)`` if its gradients
    are to be looked at or clipped, and ``step(optimizer)``; then ``update()``.

    Parameters
    ----------
    init_scale, growth_factor, backoff_factor, growth_interval : optional
        As in :class:`DynamicScale`.
    policy : DynamicScale, StaticScale or a Policy of your own, optional
        The rule that adapts the scale, instead of ``init_scale``, ``growth_factor``, ``backoff_factor`` and
        ``growth_interval``.
    enabled : bool, default True
        False makes every method pass through: nothing is scaled, checked or skipped.
    backend : str or Backend, optional
        An adapter or its registered name. Default: the one for the arrays' library.
    on_skip, on_update : callable or sequence of callables, optional
        Called on rank 0 with the StepReport of each skipped step, and with the UpdateReport of each iteration.
    diagnose : {"on_overflow"}, optional
        Find out for each skipped step which parameters overflowed, on every rank: ``last_step(optimizer).overflow``.
        From the third in a row on the weights and the state of an optimizer of torch's kind are searched, too.
    history_size : int, default 1024
        How many StepReports ``history`` keeps.
    max_norm : float, optional
        Clip each optimizer's gradients to this global 2-norm in ``step``, as torch's ``clip_grad_norm_`` does, or in
        ``unscale_`` if that is called. ``last_step(optimizer).norm`` is the norm before. A norm that is not finite is
        an overflow. A disabled scaler clips, too, but InvalidValueError for a closure.
    norm_over : {"rank", "group"}, optional
        With ``max_norm`` over a group, as in ``unscale_``.
    skip : SkipSpikes, optional
        Skip the steps whose loss or norm it calls a spike, too. The scale stays as it is.
    warn_after : int or None, default 50
        After so many steps of an optimizer in a row that were skipped, and again after ten times as many, a
        TrainingStalledWarning says why, and whether the weights hold inf or NaN. Those that the program has refused do
        not count. None for no warning.
    give_up_after : int, optional
        After so many ``update`` raises TrainingStalledError, on all ranks. Each step reads its verdict then.
    hold : module of torch, array, or list of these, optional
        What the forward pass writes in place: a module's persistent buffers, such as the running statistics of
        BatchNorm, or arrays. If a step of an iteration is skipped, ``update`` writes back what they were after the last
        iteration whose every step was made, or when the module last loaded a state dict. Takes their memory once more,
        one copy for each dtype in an iteration, and no host read, unless buffers were added or have another shape. Of a
        module's submodules as they are now. Copies and pickles of a scaler hold nothing.

    Raises
    ------
    InvalidValueError, InvalidTypeError
        For an argument out of range or of a wrong type, or for a policy together with one of the four.

    Notes
    -----
    Several optimizers share the scale: each is skipped on its own verdict, and any overflow backs the scale off once.
    The state is made on the library and device of the first floating array that comes along.

    Examples
    --------
    >>> import gradscale, numpy as np
    >>> class SGD:
    ...     def step(self): print("stepped")
    >>> optimizer, scaler = SGD(), gradscale.GradScaler(init_scale=1024.0)
    >>> optimizer.grads = scaler.scale(np.float32([1.0, np.inf]))  # the gradients of a scaled loss
    >>> scaler.step(optimizer)  # prints nothing: it is skipped
    >>> scaler.update()
    >>> (scaler.last_step(optimizer).reason, scaler.get_scale())
    ('overflow', 512.0)
    """

    # Also of a disabled scaler, which talks to nobody.
    _has_group = False

    @with_options(ScalerOptions)
    def __init__(self, **options: Any) -> None:
        own = ScalerOptions(**options)
        self._assemble(collaborators_of(options, own.backend), validation.boolean("enabled", own.enabled))

    def _assemble(self, parts: Collaborators, enabled: bool, number: int = 1, steps: int = 0, alone: int = 0) -> None:
        parts = parts._replace(is_guard=isinstance(self, StepGuard))
        self._parts, self._enabled = parts, enabled
        # Fast path: the (type, dtype) of losses that `scale` has checked once.
        self._checked_kinds: set[tuple[type, object]] = set()
        # Locked by the call that is under way; "with" leaves no place for Ctrl-C between the lock and the body.
        self._busy = threading.Lock()
        self._diagnosis = Diagnosis(parts, enabled=enabled)
        self._iteration = Iteration(number, parts, steps, alone)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(policy={self._parts.current.policy!r}, enabled={self._enabled})"

    # The iteration.

    def scale(self, outputs: _Outputs, *, loss: Array | float | Literal[False] | None = None) -> _Outputs:
        """Multiply a loss, or nested containers of arrays, by the scale.

        Parameters
        ----------
        outputs : array or nested containers of arrays
            Floating arrays of one library, on any devices; integers and ``None`` pass through. InvalidTypeError for
            another leaf, arrays of two libraries, and in a function that jax compiles.
        loss : array, number or False, optional
            A scaler with ``skip=`` judges it in place of these outputs: such as their mean over the ranks, or False for
            nothing. Default: the real arrays of one element among the outputs. Over several calls, their mean.

        Returns
        -------
        same as outputs
            New arrays of the same dtypes; a 0-d loss of half precision comes back as float32. The very same object when
            the scaler is disabled. No host read, no collective.
        """
        if not self._enabled:
            return outputs
        parts, iteration = self._parts, self._iteration
        if parts.agreement.standing.failure is not None:
            raise parts.agreement.standing.failure
        has_losses = parts.guard is not None and loss is None
        guard_loss = None if parts.guard is None or loss is None or loss is False else checked_loss(loss, _A_LOSS)
        try:
            kind = type(outputs), getattr(outputs, "dtype", None)
            is_checked = kind in self._checked_kinds
        except Exception as error:
            refusal = unreadable("outputs", error)
            raise refusal from error
        scaled: _Outputs
        if is_checked:
            (scaled,) = iteration.scale((outputs,))
            if has_losses or parts.reports.diagnoses:
                self._note_outputs((outputs,), has_losses=has_losses)
        else:
            multiply = functools.partial(self._multiplied, has_losses, outputs)
            scaled = parts.current.adapter.map_outputs(outputs, self._namespace_for, multiply)
        if guard_loss is not None:
            iteration.judge.add_losses([guard_loss])
        elif loss is False and (iteration.judge.losses.is_used or not iteration.judge.losses.number):
            iteration.judge.losses = Losses(is_used=True)
        return scaled

    @overload
    def unscale_(self, optimizer: Optimizer) -> None: ...
    @overload
    def unscale_(self, optimizer: Optimizer, *, max_norm: float | None, norm_over: NormOver | None = None) -> Array: ...
    @check_arguments
    def unscale_(
        self, optimizer: Optimizer, *, max_norm: float | None = None, norm_over: NormOver | None = None
    ) -> Array | None:
        """Divide an optimizer's gradients by the scale and judge them; at most once in an iteration.

        Gradients are overwritten in place where their library can, else assigned. Over a group this starts the
        agreement, which ``step`` finishes, so that gradient clipping overlaps with it.

        Parameters
        ----------
        optimizer : Optimizer
            Whose gradients to divide.
        max_norm : float, optional
            Clip them to this global 2-norm, as torch's ``clip_grad_norm_`` does; also when disabled. A norm that is
            not finite is an overflow. InvalidValueError if it is negative. Default: the scaler's own; a disabled one
            leaves that to ``step``.
        norm_over : {"rank", "group"}, optional
            Over a group: the norm of this rank's gradients, which all ranks hold, so that ``step`` raises
            ScaleDesyncError if their norms differ by more than a thousandth; or of the parts of all ranks. Default:
            "rank", but DTensors have the norm of their mesh.

        Returns
        -------
        array or None
            With ``max_norm`` the norm before clipping, 0-d float32; None from a disabled scaler without gradients. No
            host read; with ``norm_over="group"`` two, and for each 8 ranks one more and an all-reduce.

        Raises
        ------
        CallOrderError
            When it was called already, or after ``step``, or before any ``scale`` since the scaler was made or a state
            loaded. If ranks find that none has scaled, all raise it, and their gradients are divided already.
        InvalidTypeError
            When the object has no gradients, or something among them is no floating array.

        Warns
        -----
        UserWarning
            Once, when nothing was scaled in this iteration; ``step``, too, and over a group it alone: if no rank has.
        """
        if not self._enabled:
            return self._clip_unscaled(optimizer, checked_clipping(max_norm, norm_over))
        is_inside = self._iteration.scaling.is_inside_closure
        if self._busy.locked() and not is_inside:
            forbid_call("unscale_()")
        with contextlib.nullcontext() if is_inside else self._busy:
            # Another thread's update may have begun it while this one waited for the lock.
            iteration, clipping = self._iteration, self._parts.clipping
            if max_norm is not None or norm_over is not None:
                clipping = checked_clipping(max_norm, norm_over)
            request = UNSCALING
            if clipping.max_norm is not None:
                request = clipping_request(iteration.messages, optimizer, clipping)
            progress = iteration.progress_of(optimizer)
            if not progress.stage.is_ready:
                forbid_unscale(progress, iteration.number)
            return iteration.unscale(progress, optimizer, request)

    def step(
        self,
        optimizer: Optimizer,
        *args: object,
        loss: Array | float | None = None,
        norm: Array | float | None = None,
        batch: Batch = None,
        **kwargs: object,
    ) -> Any:
        """Step an optimizer unless one of its gradients, on any rank, is not finite.

        Parameters
        ----------
        optimizer : Optimizer
            Its ``step`` is called through the attribute, exactly when the step is really made.
        *args, **kwargs
            Passed on. A closure, first positional or ``closure=``, zeroes the gradients, computes the loss, scales it
            with ``scale`` and makes the backward pass; the scaler unscales after each evaluation, and evaluates again
            at a lower scale when a gradient is not finite. So are the next three, if its ``step`` names them.
        loss : number or array of one element, optional
            The loss of this step, judged by ``skip`` in place of those that ``scale`` was given. If it is not finite
            the step is skipped for a spike, also without a rule. InvalidValueError with a closure; and of a guard with
            ``skip`` in its first step, if it has nothing to judge, over a group on any rank.
        norm : number or array of one element, optional
            The 2-norm of the unscaled gradients, if the program has clipped them: it is judged, and the gradients are
            not looked at; -1 is DeepSpeed's for one that is not finite. Over a group that of the whole model, which
            may differ by a thousandth. A scaler needs ``unscale_`` before; InvalidValueError with a closure, or beside
            ``max_norm``.
        batch : int, str, or list of these, optional
            What the batch is called, for ``last_step(optimizer).batch`` and logs.

        Returns
        -------
        object
            The result of ``optimizer.step``; None for a skipped step. ``last_step`` tells the two apart. An optimizer
            that refuses by itself returns :data:`gradscale.NOT_STEPPED`, or a tuple that begins with False, as
            Megatron's: the step then counts as refused, and the scale stays as it is. It must do so on all ranks of a
            group, or the next message is a ScaleDesyncError.

        Raises
        ------
        CallOrderError
            When it was called already since the last ``update``, or inside of another call; when none of the
            optimizer's parameters has a gradient, on any rank; for an evaluation of a closure without ``scale``, and as
            for ``unscale_``.
        ScaleDesyncError, CollectiveTimeoutError
            Over a group: on every rank when the states differ; when some rank never comes.
        ClosureOverflowError
            When a closure overflows at every scale after its first evaluation was fine.

        Notes
        -----
        One host read, whatever the number of devices, dtypes and parameters; one for each evaluation of a closure.
        """
        has_inputs = loss is not None or norm is not None or batch is not None
        inputs = checked_inputs(optimizer, loss, norm, batch, kwargs) if has_inputs else None
        if not self._enabled:
            report = StepReport(False, 1.0, 0, "disabled", self._iteration.number, batch=inputs and inputs.batch)
            self._parts.reports.record(optimizer, report)
            self._iteration.judge.forget_micro_batches()
            if self._parts.clipping.max_norm is not None:
                if callable(kwargs.get("closure", next(iter(args), None))):
                    msg = "a disabled scaler clips before the step, got a closure: clip in the closure itself"
                    raise InvalidValueError(msg)
                self._clip_unscaled(optimizer, self._parts.clipping)
            return optimizer.step(*args, **kwargs)
        if self._busy.locked():
            forbid_call("step()")
        is_guard = self._parts.is_guard
        if is_guard:
            self._end_if_over()
        with self._busy, Step(self._iteration, optimizer, args, kwargs, self._record, inputs) as step:
            if step.calls_optimizer:
                step.returned = optimizer.step(*step.args, **step.kwargs)
        if is_guard:
            self._end_if_over()
        return step.returned

    def _end_if_over(self) -> None:
        """End a guard's iteration once no step of it is to come; Ctrl-C may have left it to the next step."""
        if self._iteration.progresses.are_over():
            GradScaler.update(self)

    def refuse(self, optimizer: Optimizer) -> None:
        """Skip the next step of an optimizer on all ranks.

        Still call ``unscale_`` and ``step`` on every rank: if that optimizer is never unscaled or stepped, ``update``
        raises CallOrderError. The step's report has the reason "refused", and the scale stays as it is, unless a
        gradient is not finite, too: then it is an overflow.

        Raises
        ------
        CallOrderError
            After its ``step`` or while that is under way, and over a group after its ``unscale_``, which tells the
            other ranks.
        InvalidValueError
            For a disabled scaler, which makes every step.
        """
        self._refuse(optimizer, Reason.REFUSED)

    def _refuse(self, optimizer: Optimizer, reason: Reason) -> None:
        call = PROGRAM_CALLS[reason]
        if not self._enabled:
            msg = (
                f"a disabled scaler makes every step, got {call}: use an enabled one, such as gradscale.StepGuard(), "
                "which skips steps and does nothing else"
            )
            raise InvalidValueError(msg)
        is_inside = self._iteration.scaling.is_inside_closure
        if self._busy.locked() and not is_inside:
            forbid_call(call)
        with contextlib.nullcontext() if is_inside else self._busy:
            self._iteration.refuse(optimizer, reason)

    def update(self, new_scale: float | Array | None = None) -> None:
        """Adapt the scale to this iteration's verdicts, and begin the next iteration.

        Parameters
        ----------
        new_scale : number or 1-element array, optional
            Set this scale instead; the trackers stay. An array is read by the host.

        Raises
        ------
        CallOrderError
            When no optimizer has been unscaled or stepped since the last ``update``: nothing was scaled, or the
            gradients are still scaled. A step that was left out after ``unscale_`` is fine, and so is ``new_scale``.
        ScaleUnderflowError
            When an overflow finds the scale at ``min_scale`` and the policy says so; the iteration is ended first, so
            the scaler can be saved or used on. What a callback has raised in the same call is its ``__context__``.
        TrainingStalledError
            With ``give_up_after``, once so many steps of an optimizer in a row were skipped; the iteration is ended
            first, too.
        InvalidValueError, InvalidTypeError
            For a new scale that is not finite and above zero, or outside the policy's bounds; nothing is changed.
        ScaleDesyncError, CollectiveTimeoutError
            For an agreement that no ``step`` has finished.
        """
        if not self._enabled:
            return
        if self._busy.locked():
            forbid_call("update()")
        with self._busy:
            parts, ended = self._parts, self._iteration
            update = Update(ended, new_scale)
            self._iteration, reports = update.next_iteration()
            micro_batches = ended.judge.micro_batches
            if micro_batches.dropped and not micro_batches.stepped:
                parts.tally.drop(micro_batches.dropped)
            for step, position in reports:
                parts.tally.note(step, position)
            stalled, gives_up = None, False
            if parts.tally.grown:
                stalled, gives_up = parts.tally.pop_stalled(is_alone=update.is_alone, gives_up=update.gives_up)
            try:
                if update.report is not None:
                    parts.reports.tell_update(update.report())
            except Exception as error:
                if update.underflow is None and not gives_up:
                    raise
                # A callback may fail on one rank, and all ranks raise these.
                try:
                    self._tell_of_end(ended, update.underflow, stalled, gives_up=gives_up)
                except GradscaleError as end:
                    end.add_note(f"A callback of on_update has failed, too: {short_repr(error)}")
                    raise
            if update.underflow is not None or stalled is not None:
                self._tell_of_end(ended, update.underflow, stalled, gives_up=gives_up)

    # Reports.

    def counts(self) -> dict[str, int]:
        """Return how many steps were made or skipped so far: ``taken``, ``overflow``, ``spike`` and ``refused``.

        ``update`` counts a step, and also one that was left out because every rank skips it. Steps that a fused
        optimizer has judged on a device are read now; those of a captured graph do not count.
        """
        self._iteration.messages.read_late(waits=True)
        return dict(self._parts.tally.counts)

    def last_step(self, optimizer: Optimizer) -> StepReport:
        """Return what happened in the last ``step`` of an optimizer; no host read beyond the one that step made.

        CallOrderError when it has not been stepped by this scaler.
        """
        return self._parts.reports.last(optimizer)

    def step_schedule(self, optimizer: Optimizer, schedule: Any, *args: object, **kwargs: object) -> None:
        """Step a learning-rate schedule unless the last ``step`` of its optimizer was skipped.

        Call it after each ``step``, before or after ``update``, for each schedule that counts the optimizer's steps.
        One that counts epochs is stepped by itself: ``schedule.step()``.

        Parameters
        ----------
        optimizer : Optimizer
            The one that the schedule belongs to; CallOrderError if it has not been stepped by this scaler.
        schedule : object
            A schedule, with ``step``; InvalidTypeError for another object, such as an optimizer.
        *args, **kwargs
            Passed on, such as the metric of a ``ReduceLROnPlateau``.

        Notes
        -----
        The host reads what ``last_step`` reads. Over a group the schedules of all ranks stay equal, since all skip
        together. A disabled scaler skips no step.
        """
        wrong = ""
        if hasattr(schedule, "param_groups"):
            wrong = f"has param_groups, so it is an optimizer, got {type(schedule).__name__}"
        elif isinstance(schedule, type) or not callable(getattr(schedule, "step", None)):
            wrong = f"must be a learning-rate schedule with step(), got {short_repr(schedule)}"
        if wrong:
            msg = f"schedule {wrong}: call step_schedule(optimizer, schedule)"
            raise InvalidTypeError(msg)
        if not self._parts.reports.last(optimizer, "step_schedule(optimizer, schedule)").skipped:
            schedule.step(*args, **kwargs)

    @property
    def history(self) -> list[StepReport]:
        """The reports of the last steps of all optimizers, oldest first; ``history_size`` of them at most.

        No host read beyond those that the steps made; steps that a fused optimizer has judged on a device are read
        now. Of the table of an overflow they keep the 20 worst rows, and ``last_step`` all. Copies and pickles of a
        scaler begin with none.
        """
        return self._parts.reports.history

    @property
    def on_skip(self) -> OnSkip | None:
        """The callbacks that ``step`` calls with the StepReport of a skipped step; None without any.

        On rank 0 only, but for callables with a true attribute ``every_rank``, such as
        :func:`gradscale.callbacks.every_rank` gives.
        """
        return self._parts.reports.on_skip or None

    @on_skip.setter
    def on_skip(self, callbacks: OnSkip | None) -> None:
        self._parts.reports.on_skip = callbacks_of("on_skip", callbacks)

    @property
    def on_update(self) -> OnUpdate | None:
        """The callbacks that ``update`` calls with the UpdateReport of an iteration, as for ``on_skip``."""
        return self._parts.reports.on_update or None

    @on_update.setter
    def on_update(self, callbacks: OnUpdate | None) -> None:
        self._parts.reports.on_update = callbacks_of("on_update", callbacks)

    def diagnose(
        self,
        optimizer: Optimizer,
        names: Mapping[str, Array] | Iterable[str | tuple[str, Array]] | None = None,
        *,
        loss: object = None,
        gather: bool = False,
        params: object = None,
        state: object = False,
    ) -> OverflowReport:
        """Report inf, NaN, zeros, subnormals and the largest magnitude of each gradient, and the cause.

        May be called at any time after the backward pass: before or after ``unscale_`` and ``step``, also a skipped
        one, and after ``update``. No gradient, state or stage is changed.

        Parameters
        ----------
        optimizer : Optimizer
            Its gradients are taken for scaled in an iteration that has called ``scale`` and not yet ``unscale_`` or
            ``step`` for it, and their magnitudes are divided by the scale; else for unscaled. Integer ones are left
            out.
        names : iterable, mapping or None
            Pairs of name and parameter, such as ``model.named_parameters()``, or a mapping; or a string for each
            parameter or leaf. Default: the optimizer's own names (torch's ``param_names``), else the expression that
            reaches the gradient.
        loss : array, float or nested containers of these, optional
            The unscaled loss. Where it is not finite, the model is at fault. Default: what ``scale`` was called with,
            if the scaler was made with ``diagnose="on_overflow"``.
        gather : bool, default False
            Report all ranks of the scaler's group. Every rank must call it then, and gets the same report: the 4096
            worst entries, or the 8 worst of each rank if that is more. Over several groups they are gathered in turn.
        params : arrays in nested containers, or module of torch, optional
            Weights to be searched for inf and NaN, too, of a module also its buffers: if these hold any, no lower scale
            will help. Default: with ``state``, the parameters in ``param_groups`` that are arrays.
        state : bool, or arrays in nested containers, default False
            The optimizer's state to be searched like that, such as its momentum; integers are left out. True takes
            ``optimizer.state``, a mapping as torch's optimizers have. Of an optimizer within another one pass the inner
            one's, such as ``optimizer.optim.state`` of torch's ``ZeroRedundancyOptimizer``.

        Returns
        -------
        OverflowReport
            ``print`` shows it as a table; ``broken`` lists the weights and the state. One host read, and one for
            each array of these that is of another library; with ``gather`` one more, and an all-reduce, for each 32
            bytes that the ranks of a group tell.

        Raises
        ------
        InvalidValueError
            For names that do not match the parameters.
        InvalidTypeError
            When the object has no gradients, or something among them is no array of one library; for ``params`` or
            ``state`` without arrays, and for ``state=True`` with another optimizer than of torch's kind.
        CollectiveTimeoutError, BackendError
            With ``gather``: when some rank does not come, or could not look at its gradients.
        """
        return self._diagnosis.diagnose(
            optimizer, self._iteration, DiagnosisOptions(names, loss, params, state), gather=gather
        )

    # Settings.

    def name(self, optimizer: Optimizer, name: str) -> None:
        """Give an optimizer a name, which the ranks of a group compare in each message about it.

        Without a name ranks compare the class and the number of ``param_groups`` of an optimizer. Of two of one kind,
        such as the generator's and the critic's, they know only the order in which they meet them: names tell these
        apart. And where ranks hold other parts of a model, classes and numbers may differ under one name.

        Copies of optimizers have no names. A scaler that was unpickled or copied with them raises CallOrderError for
        an optimizer without one until the names are given again.

        Parameters
        ----------
        optimizer : Optimizer
            The one that ``unscale_`` and ``step`` are called with.
        name : str
            The same on every rank. InvalidTypeError for anything but a string.
        """
        if not isinstance(name, str):
            msg = f"name must be a string, got {short_repr(name)}"
            raise InvalidTypeError(msg)
        self._parts.agreement.name(optimizer, name)

    def get_scale(self) -> float:
        """Return the scale as a float, 1.0 when disabled. One host read."""
        return self._parts.current.scale() if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Return whether the scaler is enabled."""
        return self._enabled

    def get_growth_factor(self) -> float:
        """Return the growth factor; 1.0 for a policy without one."""
        return float(getattr(self._parts.current.policy, "growth_factor", 1.0))

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor: above 1."""
        self._parts.current.set_policy_setting("growth_factor", new_factor)

    def get_backoff_factor(self) -> float:
        """Return the backoff factor; 1.0 for a policy without one."""
        return float(getattr(self._parts.current.policy, "backoff_factor", 1.0))

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor: between 0 and 1."""
        self._parts.current.set_policy_setting("backoff_factor", new_factor)

    def get_growth_interval(self) -> int:
        """Return the growth interval in clean steps; 1 for a policy without one."""
        return int(getattr(self._parts.current.policy, "growth_interval", 1))

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval, in clean steps; a run that is already as long grows at its next clean step."""
        self._parts.current.set_policy_setting("growth_interval", new_interval)

    # Saving and loading.

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain Python values; empty when disabled. One host read.

        Keys: torch's five (``scale``, ``growth_factor``, ``backoff_factor``, ``growth_interval``, ``_growth_tracker``),
        so that torch's scalers can load it; ``version``, ``iteration``, the other trackers, and ``policy`` with every
        setting; ``counts``, and ``steps``, which ranks compare in their next message, so that each may load a state of
        its own; with ``skip=`` also ``spikes``, its windows as text, two host reads for each optimizer; and with
        ``give_up_after=`` ``streaks`` as text, the skipped steps in a row of each. They are in the order in which
        optimizers were first judged and stepped, which must be the same after loading. Call it between
        iterations.
        """
        if not self._enabled:
            return {}
        current, guard = self._parts.current, self._parts.guard
        windows, streaks = None if guard is None else guard.numbers(), self._parts.tally.saved()
        # Counts are read first, and with them the verdicts that are late.
        iteration, counts = self._iteration, self.counts()
        if self._parts.is_guard:
            # The keys do not depend on how far a run has come.
            counts.setdefault("dropped", 0)
        # Not those made alone, which a rank that joins has not made, nor those of this iteration that are skipped,
        # which some ranks may leave out.
        steps = iteration.messages.steps - iteration.alone_before
        if not (self._parts.agreement.is_alone and not iteration.progresses.sent_messages()):
            steps += sum(progress.has_stepped for progress in iteration.progresses.all)
        saved = current.policy, current.numbers(), iteration.number, counts, steps, windows, streaks
        return checkpoint.build(checkpoint.Checkpoint(*saved))

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Take over a state dict of gradscale's or torch's scalers; does nothing when disabled.

        The policy's settings in it replace this scaler's; leave out the key ``policy`` to keep them (torch's three
        factors are taken over all the same). A scale outside of the bounds is moved to the nearer one.

        It begins an iteration anew, at any time, and is in force from the next ``scale`` on: after Ctrl-C make new
        gradients. Only those that were scaled before, and that no ``unscale_`` or ``step`` has met, can still be
        stepped: they are divided by the scale that made them.

        Raises
        ------
        StateDictError
            When it is empty, lacks one of torch's five keys, holds a bad value, or was written by a newer version;
            every value is checked first, and nothing is changed.
        CallOrderError
            Inside of ``step``.
        """
        if not self._enabled:
            return
        if self._busy.locked() and self._iteration.progresses.all:
            msg = f"load_state_dict() was called in step(), in iteration {self._iteration.number}: call it afterwards"
            raise CallOrderError(msg)
        loaded = checkpoint.parse(state_dict, self._parts.current.policy)
        current, agreement, reports = self._parts.current, self._parts.agreement, self._parts.reports
        self._iteration = iteration_after_load(self._iteration, loaded.iteration, loaded.steps)
        agreement.recover()
        # What is on its way to the CPU is about the state that is replaced.
        reports.under_way.clear()
        current.load(loaded.policy, loaded.numbers)
        self._parts.tally.restart(loaded.counts, loaded.streaks or ())
        if self._parts.guard is not None:
            self._parts.guard.load(loaded.windows or (), current.adapter.write_into)

    def __getstate__(self) -> dict[str, object]:
        """Return settings and numbers to pickle, and no arrays, groups or reports; CallOrderError in mid-iteration."""
        iteration = self._iteration
        iteration.require_boundary("pickling or copying a scaler")
        # Gradients of a state before a load are not.
        is_kept = (iteration.scaling.state is None or not iteration.current.use.is_fresh) and iteration.is_at_boundary
        scaled, losses = (iteration.scaling.has_scaled, iteration.judge.losses) if is_kept else (False, Losses())
        # Each part says by itself what of it is kept.
        parts = Collaborators._make(map(copy.copy, self._parts._replace(snapshots=())))
        if not is_kept:
            # The copy has no gradients of its own.
            parts.current.mark_unused()
        # The optimizers of a copy are others.
        losses = Losses() if losses.judged else losses._replace(total=float(losses.total))
        numbers = iteration.number, iteration.messages.steps, iteration.alone_before
        forgotten = dict.fromkeys(("_diagnosis", "_busy", "_checked_kinds"))
        return self.__dict__ | {"_parts": parts, "_iteration": (scaled, losses, *numbers)} | forgotten

    def __setstate__(self, kept: Mapping[str, Any]) -> None:
        self.__dict__.update(kept)
        scaled, losses, *numbers = kept["_iteration"]
        self._assemble(kept["_parts"], kept["_enabled"], *numbers)
        self._iteration.scaling.has_scaled, self._iteration.judge.losses = scaled, losses

    # Several parts at once.

    def _agree_over(self, groups: Sequence[Collectives]) -> None:
        """Agree over other groups from now on, and abandon an iteration whose agreement has failed."""
        parts, agreement, iteration = self._parts, self._parts.agreement, self._iteration
        steps, alone = iteration.messages.steps, iteration.alone_before
        if groups:
            # A policy that ranks cannot compare raises now, and not in the first step.
            agreement.settings_hash(parts.current.policy)
        if agreement.standing.failure is not None or agreement.standing.groups:
            # Some ranks may have divided their gradients already, so that all make new ones.
            self._iteration = Iteration(iteration.number, parts, steps, alone)
            parts.current.mark_unused()
        # Ranks that have trained alone may have had other numbers of steps.
        self._iteration.messages.steps, self._iteration.alone_before = steps - alone, 0
        if parts.guard is not None:
            # Some of its ranks may have had values, and others none.
            parts.guard.has_judged = False
        agreement.join(groups)

    def _multiplied(self, has_losses: bool, outputs: object, arrays: Sequence[Array]) -> Sequence[Array]:
        """Return arrays multiplied by the scale of the present iteration, in which an iterator may be consumed."""
        products = self._iteration.scale(arrays)
        self._note_outputs(arrays, has_losses=has_losses)
        if outputs is arrays[0]:
            self._checked_kinds.update((type(x), x.dtype) for x in arrays)
        return products

    def _note_outputs(self, arrays: Sequence[Array], *, has_losses: bool) -> None:
        """Note what a diagnosis and the rule for spikes want to know of arrays that were scaled."""
        iteration = self._iteration
        if self._parts.reports.diagnoses and (count := self._diagnosis.look.count_nonfinite(arrays)) is not None:
            iteration.scaling.loss_nonfinite += (count,)
        if has_losses:
            iteration.judge.add_losses(filter(is_loss, arrays))

    def _namespace_for(self, like: Array) -> Namespace:
        """Return the namespace of the state, a new one beside an array if there is none yet."""
        current = self._parts.current
        backend = current.backend_for(like)
        if backend.forbid_tracing is not None:
            backend.forbid_tracing("scale()")
        current.materialize(like)
        return current.xp

    def _clip_unscaled(self, optimizer: Optimizer, clipping: Clipping) -> Array | None:
        """Clip gradients that are not scaled, and return their norm; None without any."""
        if clipping.max_norm is None:
            return None
        if clipping.norm_over == "group":
            msg = (
                'a disabled scaler talks to no group, got norm_over="group": use an enabled one, such as '
                "gradscale.StepGuard(group=...), which skips steps and does nothing else"
            )
            raise InvalidValueError(msg)
        current = self._parts.current
        # It refuses gradients that have no norm.
        current.adapter.norm_groups(optimizer)
        gradients = current.adapter.collect(optimizer, Request(clipping.max_norm, are_scaled=False))
        like = gradients.like
        if like is None:
            return None
        one = CurrentScale(_ONE, current.backend_for(like))
        return gradients.unscale(one, one.materialize(like)).norm

    def _record(self, step: Step) -> None:
        iteration, reports, optimizer, progress = step.iteration, self._parts.reports, step.optimizer, step.progress
        if step.verdict is not None and step.verdict.reason is Reason.NO_GRADIENTS:
            return
        batch = None if progress.inputs is None else progress.inputs.batch
        position = self._parts.tally.position_of(optimizer)
        progress.end_step(step.verdict)
        if step.verdict is None:
            assert progress.pending is not None
            reports.record_later(optimizer, Deferred(progress.pending, iteration.number, position, batch))
            return
        overflow = None
        if step.verdict.nonfinite and reports.diagnoses:
            overflow = self._diagnosis.of_overflow(optimizer, iteration)
        rank = self._parts.agreement.rank
        report = step_report(step.verdict, iteration.number, rank, step.retries, overflow, batch)
        iteration.steps.append((report, position))
        reports.record(optimizer, report, rank)

    def _tell_of_end(
        self, ended: Iteration, underflow: ScaleUnderflowError | None, position: int | None, *, gives_up: bool
    ) -> None:
        """Raise what ends a run on all ranks, or warn of an optimizer whose every step is skipped, with the cause."""
        if underflow is not None:
            raise underflow
        if position is None:
            return
        tally, guard = self._parts.tally, self._parts.guard
        streak = tally.mark_warned(position)
        stalled = [optimizer for optimizer in ended.progresses.optimizers() if tally.streak_of(optimizer) is streak]
        texts = [streak.sentence(type(stalled[0]).__name__ if stalled else "an optimizer")]
        if "overflow" in streak.reasons:
            texts += [self._diagnosis.of_stall(optimizer, ended, streak.ranks) for optimizer in stalled]
        if "spike" in streak.reasons:
            rule = "" if guard is None else f"All is judged by skip={short_repr(guard.rule)}, which may be too strict. "
            texts.append(f"{rule}A loss that step() is given is a spike, too, if it is not finite")
        raise_or_warn(texts, gives_up=gives_up)


class ShardedGradScaler(GradScaler):
    """A GradScaler whose ranks skip together, back off together, and notice when they differ.

    For gradients that the ranks hold parts of: sharded weights or optimizer states, tensor, pipeline and expert
    parallelism. One collective of 84 bytes for each optimizer, iteration and group, on every rank, whatever it
    found and even when it holds no gradients. It carries a fingerprint of the state, so that a rank whose scale has
    drifted is an error on every rank instead of a silent divergence.

    Parameters
    ----------
    group : communicator, Collectives, or list of these
        An MPI communicator (duplicated, which is collective over it), one of NCCL, a torch ProcessGroup or DeviceMesh,
        an object with ``rank``, ``size`` and ``start_max``, or a list of these (data, tensor, pipeline, expert),
        agreed over in turn.
    timeout : float, default 1800.0
        Seconds to wait for the other ranks, ``math.inf`` for ever. Ignored by Collectives of your own.
    init_scale, growth_factor, backoff_factor, growth_interval, policy, enabled, backend : optional
        As in :class:`GradScaler`.
    on_skip, on_update, diagnose, history_size, max_norm, norm_over, skip, warn_after, give_up_after, hold : optional
        As in :class:`GradScaler`; ``hold`` on all ranks or on none.

    Raises
    ------
    InvalidTypeError
        For a group that no adapter serves.
    BackendNotAvailableError
        When the adapter for the group is not installed.
    CollectiveTimeoutError
        When some rank does not construct its scaler.

    Notes
    -----
    Construct it on every rank, with the same options but for ``on_skip``, ``on_update``, ``history_size``,
    ``warn_after``, ``backend`` and ``timeout``, and call ``unscale_``, ``step`` and ``update`` for the same optimizers
    in the same order on every rank. ``backend`` lets a rank that never has an array take part. Reports number the ranks
    of a list of groups row by row, the last group varying fastest: ``first.rank * second.size + second.rank``. A
    disabled scaler makes no collectives. Before the first message over a group, one of 16 bytes compares the ranks'
    versions of gradscale.

    Examples
    --------
    >>> import gradscale, numpy as np
    >>> class SGD:
    ...     def step(self): print("stepped")
    >>> def train(group):  # MPI.COMM_WORLD in place of these ranks, which are threads
    ...     optimizer, scaler = SGD(), gradscale.ShardedGradScaler(group=group)
    ...     optimizer.grads = scaler.scale(np.float32([1.0, np.inf if group.rank == 1 else 1.0]))
    ...     return scaler.step(optimizer), scaler.last_step(optimizer).reason
    >>> gradscale.testing.run_ranks(2, train)
    [(None, 'overflow'), (None, 'overflow')]
    """

    @with_options(ShardedOptions)
    def __init__(self, *, group: Group, timeout: float = ShardedOptions.timeout, **options: Any) -> None:
        super().__init__(**options)
        self._timeout = validation.timeout(timeout)
        self.set_group(group)

    def set_group(self, group: Group) -> None:
        """Agree over another group from now on; needed after unpickling, since communicators do not travel.

        Collective over it, as the constructor is. CallOrderError in the middle of an iteration, unless its agreement
        has failed: it is then abandoned. If the scaler leaves another group, gradients are to be made anew.
        """
        self._iteration.require_boundary("set_group()")
        if self._enabled:
            self._agree_over(registry.all_collectives_for(group, self._timeout))
        self._has_group = True


class StepGuard(ShardedGradScaler):
    """Skip bad steps, on all ranks together, and scale nothing: for bfloat16 and float32.

    ``step(optimizer, loss=loss)`` after the backward pass is all of it. It is a scaler whose scale is always 1, so that
    one loop serves both: ``scale`` returns the loss as it is, and ``update`` may follow each ``step``.

    Parameters
    ----------
    group : communicator, Collectives, or list of these, optional
        The ranks that skip together, as for :class:`ShardedGradScaler`. Default: none, so that this process decides
        alone.
    timeout, enabled, backend, on_skip, on_update, diagnose, history_size : optional
        As in :class:`ShardedGradScaler`.
    max_norm, norm_over, skip, warn_after, give_up_after, hold : optional
        As in :class:`ShardedGradScaler`. InvalidTypeError for a scale's settings, such as ``init_scale`` or ``policy``.

    Notes
    -----
    A step is skipped if a gradient is inf or NaN, if the loss or the norm is a spike by the rule ``skip``, if the loss
    that ``step`` is given is not finite, after ``refuse``, and if the optimizer itself returns
    :data:`gradscale.NOT_STEPPED`. A step without any gradient does nothing, and warns once.

    Each ``step`` does what ``update`` does for a scaler, and so raises its errors, unless an optimizer that was
    unscaled is still to be stepped. A loss that ``scale`` was given is then that of other optimizers, too.

    If ``optimizer.step`` itself raises, a ``step`` with the same ``loss``, ``norm`` and ``batch`` makes that step
    again, and any other is one of another batch: the gradients are judged anew, and if only some ranks do so, the
    ranks differ.

    Examples
    --------
    >>> import gradscale, numpy as np
    >>> class SGD:
    ...     def step(self): print("stepped")
    >>> optimizer, guard = SGD(), gradscale.StepGuard(give_up_after=100)
    >>> optimizer.grads = [np.float32([1.0, np.nan])]
    >>> guard.step(optimizer, loss=0.5)  # prints nothing: it is skipped
    >>> guard.last_step(optimizer).skipped
    True
    """

    @with_options(StepGuardOptions)
    def __init__(self, **kwargs: Any) -> None:
        options = vars(StepGuardOptions(**kwargs))
        group, self._timeout = options.pop("group"), validation.timeout(options.pop("timeout"))
        GradScaler.__init__(self, **options | {"policy": _ONE})
        if group is not None:
            self.set_group(group)

    def __repr__(self) -> str:
        guard = self._parts.guard
        return f"{type(self).__name__}(skip={None if guard is None else guard.rule!r}, enabled={self._enabled})"

    def keeps(self, loss: Array | float) -> bool:
        """Tell whether to make the backward pass of a micro-batch: not if its loss is not finite, on any rank.

        Over a group one message and one host read, for which every rank calls it as often, in one order. A loss that is
        kept is one of those whose mean the next step is judged by. If each of a step's is dropped, the step counts as
        refused. What ``hold`` names is put back for a dropped one. ``counts()`` has their number as
        "dropped", once there is one.

        Parameters
        ----------
        loss : number or array of one element
            That of the micro-batch on this rank; InvalidTypeError for another thing.

        Returns
        -------
        bool
            The same on all ranks; True if the guard is disabled.

        Raises
        ------
        ScaleDesyncError
            In ``step``, if ranks hold other gradients after one was dropped: if that one was to average them, as the
            last does under ``no_sync()`` of DDP, make a backward pass of zeros in its place.
        CallOrderError
            In ``step``, if gradients are DTensors, and the last micro-batch was dropped: whether it was the one that
            reduces them cannot be seen.

        Examples
        --------
        >>> import gradscale
        >>> guard = gradscale.StepGuard()
        >>> [guard.keeps(loss) for loss in (0.5, float("nan"), 0.75)], guard.kept
        ([True, False, True], 2)
        """
        value = checked_value("loss", loss)
        if not self._enabled:
            self._iteration.judge.micro_batches = MicroBatches(self.kept + 1)
            return True
        self._end_if_over()
        if self._busy.locked():
            forbid_call("keeps()")
        with self._busy:
            return self._iteration.keeps(self, value)

    @property
    def kept(self) -> int:
        """How many micro-batches were kept since the last step: what to divide the gradients by."""
        micro = self._iteration.judge.micro_batches
        return 0 if micro.stepped else micro.kept

    def update(self, new_scale: float | Array | None = None) -> None:
        """End an iteration that no ``step`` has ended; right after one it does nothing, so that a loop may call it.

        As :meth:`GradScaler.update`; InvalidValueError for another scale than 1.
        """
        if self._enabled and new_scale is not None and checked_scale(new_scale, _ONE) != 1.0:
            msg = (
                f"new_scale must be 1 for a guard, which multiplies nothing, got {short_repr(new_scale)}: call update()"
            )
            raise InvalidValueError(msg)
        iteration = self._iteration
        if new_scale is not None or iteration.scaling.has_scaled or not iteration.is_at_boundary:
            super().update(new_scale)

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Take over the iteration, the counts and the windows of any scaler's state dict; nothing is scaled as before.

        Otherwise as :meth:`GradScaler.load_state_dict`.
        """
        if self._enabled:
            # The scale and its settings are checked, and left out.
            loaded = checkpoint.parse(state_dict, _ONE)
            state_dict = checkpoint.build(loaded._replace(policy=_ONE, numbers={"scale": 1.0}))
        super().load_state_dict(state_dict)


def iteration_of(scaler: GradScaler) -> Iteration:
    """Return a scaler's present iteration, for adapters."""
    return scaler._iteration
