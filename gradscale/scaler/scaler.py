"""GradScaler and ShardedGradScaler: the per-iteration protocol READY -> UNSCALED -> STEPPED over a scaler's parts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple, Never, Self, Unpack

from gradscale.core import registry, validation
from gradscale.core.clipping import NormOver, checked_norm
from gradscale.core.messages import shown
from gradscale.core.protocols import Array, Collectives
from gradscale.core.vector import Purpose, Verdict, identify
from gradscale.errors import InvalidTypeError, InvalidValueError, ScaleUnderflowError
from gradscale.policies.plain import plain_rule
from gradscale.reports.overflow import OverflowReport
from gradscale.reports.recorder import OnSkip, OnUpdate, Reports, step_report
from gradscale.reports.steps import StepReport, UpdateReport
from gradscale.scaler import checkpoint
from gradscale.scaler.agreement import Agreement
from gradscale.scaler.diagnosis import Diagnosis
from gradscale.scaler.exchange import Exchange
from gradscale.scaler.iteration import Iteration, Stage, Turn
from gradscale.scaler.live_state import ArrayState, checked_scale
from gradscale.scaler.options import (
    DEFAULT_TIMEOUT,
    TORCHS_SCALERS,
    CommonOptions,
    ScalerOptions,
    chosen_policy,
    completed,
    made_reports,
    with_options,
)
from gradscale.scaler.parts import LiveState, Pending, Scaling, Unscaler
from gradscale.scaler.scaling import ArrayScaling
from gradscale.scaler.stepper import ClosureStepper, PlainStepper, Stepper
from gradscale.scaler.unscaler import ArrayUnscaler, Clip
from gradscale.scaler.verdict import PendingVerdict

__all__ = ["GradScaler", "Parts", "ShardedGradScaler"]

# What is made anew of the parts of a copy.
_SPREAD = ("_live", "_scaling", "_unscaler", "_steppers", "_agreement", "_reports", "_diagnosis")


class Parts(NamedTuple):
    """What a scaler is made of.

    Attributes
    ----------
    live : LiveState
        Where the state lives.
    scaling : Scaling
        The way of outputs through ``scale``.
    unscaler : Unscaler
        Collects gradients; unscales, clips and judges them.
    steppers : sequence of Stepper
        How optimizers are stepped; the first that takes an optimizer steps it.
    agreement : Agreement
        With the other ranks.
    reports : Reports
        What is told of the steps.
    """

    live: LiveState
    scaling: Scaling
    unscaler: Unscaler
    steppers: Sequence[Stepper]
    agreement: Agreement
    reports: Reports[Pending]


@with_options(ScalerOptions, CommonOptions)
class GradScaler:
    """Scale losses, unscale gradients, skip steps with non-finite gradients, and adapt the scale.

    Per iteration: ``scale(loss)`` and the backward pass; for each optimizer ``unscale_(optimizer)`` if its gradients
    are to be looked at or clipped, and ``step(optimizer)``; then ``update()``.

    Parameters
    ----------
    **options

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

    def __init__(self, *positional: Never, **options: Unpack[ScalerOptions]) -> None:
        if positional:
            msg = f"a scaler of gradscale takes its options by name, got {shown(positional)}; {TORCHS_SCALERS}"
            raise InvalidTypeError(msg)
        given = completed(options)
        factors = {name: given[name] for name in ("init_scale", "growth_factor", "backoff_factor", "growth_interval")}
        live = ArrayState(chosen_policy(given["policy"], factors), given["backend"])
        enabled = validation.boolean("enabled", given["enabled"])
        reports = made_reports(given)
        parts = Parts(
            live=live,
            scaling=ArrayScaling(),
            unscaler=ArrayUnscaler(),
            steppers=(ClosureStepper(), PlainStepper()),
            agreement=Agreement(diagnoses=reports.diagnoses, pending=PendingVerdict),
            reports=reports,
        )
        self._assemble(parts, enabled)

    @classmethod
    def of(cls, parts: Parts, *, enabled: bool = True) -> Self:
        """Return a scaler made of the parts that an adapter brings."""
        made = cls.__new__(cls)
        made._assemble(parts, enabled)
        return made

    def _assemble(self, parts: Parts, enabled: bool) -> None:
        self._parts = parts
        self._enabled = enabled
        self._spread()
        self._iteration = self._numbered(1)

    def _spread(self) -> None:
        """Give the parts names, and put those together that work together."""
        self._live, self._scaling, self._unscaler, self._steppers, self._agreement, self._reports = self._parts
        self._diagnosis = Diagnosis(self._live, self._agreement, self._unscaler, self._reports, enabled=self._enabled)

    def _numbered(self, number: int) -> Iteration:
        return Iteration(number, self._live, self._unscaler, self._agreement, self._reports)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(policy={self._live.policy!r}, enabled={self._enabled})"

    # The iteration.

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
        look = self._count_nonfinite if self._reports.diagnoses else None
        return self._scaling.scale(outputs, self._iteration, look)

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
            host read; three, and two all-reduces more, with ``norm_over="group"``.

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
            return None if clip is None else self._unscaler.clip_unscaled(optimizer, clip.max_norm, self._live)
        iteration = self._iteration
        return iteration.unscale(iteration.begin_unscale(optimizer), optimizer, clip)

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
            self.end_step(optimizer)
            return optimizer.step(*args, **kwargs)
        iteration = self._iteration
        turn = iteration.begin_step(optimizer)
        for stepper in self._steppers:
            if stepper.takes(optimizer, args, kwargs):
                break
        returned, verdict, retries = stepper.step(iteration, turn, optimizer, args, kwargs)
        self.end_step(optimizer, turn, verdict, retries)
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
            the scaler can be saved or used on. What a callback has raised in the same call is its ``__context__``.
        InvalidValueError, InvalidTypeError
            For a new scale that is not finite and above zero, or outside the policy's bounds; nothing is changed.
        ScaleDesyncError, CollectiveTimeoutError
            For an agreement that no ``step`` has finished.
        """
        if not self._enabled:
            return
        live, ended = self._live, self._iteration
        ended.require_sound()
        wanted = None if new_scale is None else checked_scale(new_scale, live.policy)
        pending, verdicts = [], []
        found_at_min_scale = False
        for turn in ended.turns:
            one = turn.pending
            if one is not None and one.is_begun:
                pending.append(one)
                if not one.is_read_later:
                    verdict = ended.verdict(turn)
                    verdicts.append(verdict)
                    found_at_min_scale = found_at_min_scale or (verdict.at_min_scale and verdict.nonfinite > 0)
        before = None
        if self._reports.wants_updates:
            judged: list[StepReport | Verdict] = [*ended.reports, *verdicts]
            # Without a verdict it has to be read, which is free of charge where the state is one of numbers.
            before = judged[0].scale if judged else live.scale()
        if wanted is not None:
            live.replace_scale(wanted)
        elif ended.lowered is not None:
            live.take(ended.lowered)
        elif pending:
            counts = [one.count() for one in pending]
            ended.catch_up()
            live.advance(counts)
        elif not ended.scaled and self._agreement.is_alone:
            ended.wrong_order("update() was called, and nothing was scaled or unscaled since the last update()")
        self._iteration = self._numbered(ended.number + 1)
        underflow = None
        if wanted is None and found_at_min_scale:
            underflow = ScaleUnderflowError(
                f"gradients overflow although the scale is at its minimum, {verdicts[0].scale!r}: the cause is not the "
                f"scale. Look for inf or NaN in the unscaled loss, the data or the weights; lower the learning rate, "
                f'or allow a smaller min_scale; at_min="clamp" skips such steps instead. Got {shown(live.policy)}'
            )
        if before is not None:
            after = before
            if wanted is not None:
                after = wanted
            elif pending or ended.lowered is not None:
                after = self._updated_scale(ended, pending, verdicts)
            try:
                self._tell_update(ended, verdicts, before, after)
            except Exception as error:
                if underflow is not None:
                    # All ranks raise it; a callback may fail on one of them.
                    underflow.add_note(f"A callback of on_update has failed, too: {shown(error)}")
                    raise underflow  # noqa: B904 (the callback's is its context, not its cause)
                raise
        if underflow is not None:
            raise underflow

    # What is told.

    def last_step(self, optimizer: Any) -> StepReport:
        """Return what happened in the last ``step`` of an optimizer; no host read beyond the one that step made.

        Raises
        ------
        CallOrderError
            When it has not been stepped by this scaler.
        """
        return self._reports.last(optimizer)

    def step_schedule(self, optimizer: Any, schedule: Any, *args: Any, **kwargs: Any) -> None:
        """Step a learning-rate schedule unless the last ``step`` of its optimizer was skipped.

        Call it after each ``step``, before or after ``update``, for each schedule that counts the optimizer's steps.
        One that counts epochs is stepped by itself: ``schedule.step()``.

        Parameters
        ----------
        optimizer : Optimizer
            Which was stepped.
        schedule : object
            Whose ``step`` is called.
        *args, **kwargs
            Passed on, such as the metric of a ``ReduceLROnPlateau``.

        Raises
        ------
        CallOrderError
            When the optimizer has not been stepped by this scaler.
        InvalidTypeError
            For a schedule without ``step``, or an optimizer in its place.

        Notes
        -----
        The host reads what ``last_step`` reads. Over a group the schedules of all ranks stay equal, since all skip
        together. A disabled scaler skips no step.
        """
        if not callable(getattr(schedule, "step", None)) or hasattr(schedule, "param_groups"):
            msg = (
                f"schedule must be a learning-rate schedule with step(), got {shown(schedule)}: call "
                f"step_schedule(optimizer, schedule)"
            )
            raise InvalidTypeError(msg)
        if not self.last_step(optimizer).skipped:
            schedule.step(*args, **kwargs)

    @property
    def history(self) -> list[StepReport]:
        """The reports of the last steps of all optimizers, oldest first; ``history_size`` of them at most.

        No host read beyond those that the steps made; steps that a fused optimizer has judged on a device are read
        now. Copies and pickles of a scaler begin with none.
        """
        return self._reports.history

    @property
    def on_skip(self) -> OnSkip | None:
        """What is called with the StepReport of a skipped step, in ``step``; None for nothing.

        On rank 0 only, but for callables with a true attribute ``every_rank``, such as
        :func:`gradscale.callbacks.every_rank` gives.
        """
        return self._reports.on_skip

    @on_skip.setter
    def on_skip(self, callbacks: OnSkip | None) -> None:
        self._reports.on_skip = callbacks

    @property
    def on_update(self) -> OnUpdate | None:
        """What is called with the UpdateReport of an iteration, in ``update``; None for nothing. As for ``on_skip``."""
        return self._reports.on_update

    @on_update.setter
    def on_update(self, callbacks: OnUpdate | None) -> None:
        self._reports.on_update = callbacks

    def diagnose(self, optimizer: Any, names: Any = None, *, loss: Any = None, gather: bool = False) -> OverflowReport:
        """Report inf, NaN, zeros, subnormals and the largest magnitude of each gradient, and what is the cause.

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

        Returns
        -------
        OverflowReport
            ``print`` shows it as a table. One host read; with ``gather`` three more for each group, and as many
            all-reduces.

        Raises
        ------
        InvalidValueError
            For names that do not match the parameters.
        InvalidTypeError
            When the object has no gradients, or something among them is no array of one library.
        CollectiveTimeoutError, BackendError
            With ``gather``: when some rank does not come, or could not look at its gradients.
        """
        return self._diagnosis.diagnose(optimizer, self._iteration, names, loss, gather=gather)

    # Settings.

    def get_scale(self) -> float:
        """Return the scale as a float, 1.0 when disabled. One host read."""
        return self._live.scale() if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Return whether the scaler is enabled."""
        return self._enabled

    def get_growth_factor(self) -> float:
        """Return the growth factor; 1.0 for a policy without one."""
        return float(getattr(self._live.policy, "growth_factor", 1.0))

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor: above 1."""
        self._live.replace_setting("growth_factor", new_factor)

    def get_backoff_factor(self) -> float:
        """Return the backoff factor; 1.0 for a policy without one."""
        return float(getattr(self._live.policy, "backoff_factor", 1.0))

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor: between 0 and 1."""
        self._live.replace_setting("backoff_factor", new_factor)

    def get_growth_interval(self) -> int:
        """Return the growth interval in clean steps; 1 for a policy without one."""
        return int(getattr(self._live.policy, "growth_interval", 1))

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval, in clean steps; a run that is already as long grows at its next clean step."""
        self._live.replace_setting("growth_interval", new_interval)

    # Saving and loading.

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain Python values; empty when disabled. One host read.

        Keys: torch's five (``scale``, ``growth_factor``, ``backoff_factor``, ``growth_interval``, ``_growth_tracker``),
        so that torch's scalers can load it; ``version``, ``iteration``, the other trackers, and ``policy`` with every
        setting. Call it between iterations.
        """
        if not self._enabled:
            return {}
        return checkpoint.build(self._live.policy, self._live.numbers(), self._iteration.number)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict of gradscale's or torch's scalers; does nothing when disabled.

        The policy's settings in it replace this scaler's; leave out the key ``policy`` to keep them (torch's three
        factors are taken over all the same). A scale outside of the bounds is moved to the nearer one.

        Raises
        ------
        StateDictError
            When it is empty, lacks one of torch's five keys, holds a bad value, or was written by a newer version;
            every value is checked first, and nothing is changed.
        CallOrderError
            In the middle of an iteration.
        """
        if not self._enabled:
            return
        self._iteration.require_boundary("load_state_dict()")
        loaded = checkpoint.parse(state_dict, self._live.policy)
        before, self._iteration = self._iteration, self._numbered(loaded.iteration)
        if before.failure is None:
            # Gradients under way are unscaled by what they were scaled with.
            self._iteration.scaled, self._iteration.state = before.scaled, before.state
        # What is on its way to the host is about the state that is replaced.
        self._reports.under_way.clear()
        self._live.load(loaded.policy, loaded.snapshot, keep=before.scaled)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: settings and numbers, without arrays, groups, callbacks and reports.

        Raises
        ------
        CallOrderError
            In the middle of an iteration.
        """
        self._iteration.require_boundary("pickling or copying a scaler")
        kept = {name: value for name, value in self.__dict__.items() if name not in _SPREAD}
        # Each part says by itself what of it is kept.
        parts = self._parts._replace(steppers=tuple(map(copy.copy, self._parts.steppers)))
        single = {name: copy.copy(part) for name, part in parts._asdict().items() if name != "steppers"}
        position = self._iteration.number, self._iteration.scaled
        return kept | {"_parts": parts._replace(**single), "_iteration": position}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__dict__.update(kept)
        self._spread()
        number, scaled = kept["_iteration"]
        self._iteration = self._numbered(number)
        self._iteration.scaled = scaled

    # For adapters, whose scalers hold one of these.

    @property
    def parts(self) -> Parts:
        """What the scaler is made of."""
        return self._parts

    @property
    def iteration(self) -> Iteration:
        """The present iteration."""
        return self._iteration

    def end_step(
        self, optimizer: Any, turn: Turn | None = None, verdict: Verdict | None = None, retries: int = 0
    ) -> None:
        """Record what has become of a step, under a verdict or one that is read later: the second half of ``step``.

        Without a turn, the scaler is disabled.
        """
        if turn is None:
            self._reports.record(optimizer, StepReport(False, 1.0, 0, "disabled", self._iteration.number))
            return
        turn.stage = Stage.STEPPED
        agreement, reports, pending, iteration = self._agreement, self._reports, turn.pending, self._iteration
        agreement.steps += 1
        if pending is not None and pending.is_scaled:
            self._unscaler.remember_left_scaled(optimizer)
        if verdict is None:
            assert pending is not None
            reports.record_later(optimizer, iteration.number, pending)
            return
        overflow = None
        if verdict.nonfinite and reports.diagnoses:
            overflow = self._diagnosis.diagnose(optimizer, iteration, gather=True)
        report = step_report(verdict, iteration.number, retries, overflow)
        iteration.reports.append(report)
        reports.record(optimizer, report, agreement.rank)

    def agree_over(self, groups: Sequence[Collectives]) -> None:
        """Agree over other groups from now on, and abandon an iteration whose agreement has failed."""
        if groups:
            # A policy that ranks cannot compare is refused now, and not in the first step.
            identify(self._live.policy)
        if self._iteration.failure is not None:
            self._iteration = self._numbered(self._iteration.number)
        self._agreement.join(groups)

    # The parts put together.

    def _count_nonfinite(self, outputs: Sequence[Any]) -> None:
        count = self._diagnosis.count_nonfinite(outputs)
        if count is not None:
            self._iteration.loss_nonfinite += (count,)

    def _checked_clip(self, optimizer: Any, max_norm: Any, norm_over: Any) -> Clip | None:
        """Return what to clip to, having looked at the arguments before anything is modified.

        Raises
        ------
        InvalidValueError, InvalidTypeError
            For a norm that is no number or negative, another ``norm_over`` or none over a group, or several groups.
        """
        if norm_over is not None and not (isinstance(norm_over, str) and norm_over in ("rank", "group")):
            msg = f'norm_over must be "rank" or "group", got {shown(norm_over)}'
            raise InvalidValueError(msg)
        if max_norm is None:
            if norm_over is not None:
                msg = f"norm_over={norm_over!r} says over what the norm is taken for max_norm=, got no max_norm"
                raise InvalidValueError(msg)
            return None
        largest = checked_norm(max_norm)
        if not self._enabled and norm_over == "group":
            msg = (
                'a disabled scaler talks to no group, got norm_over="group": use StaticScale(1.0) as its policy to '
                "train in float32 with a scaler that does"
            )
            raise InvalidValueError(msg)
        if not self._enabled:
            return Clip(largest)
        groups = self._unscaler.groups_for(optimizer, self._agreement.usable_groups())
        if not groups or norm_over == "rank":
            return Clip(largest)
        if norm_over is None:
            msg = (
                'max_norm= over a group needs norm_over=, since gradients may be parts or copies: "group" where each '
                'rank holds a part of the gradients, "rank" where each holds all of them, the same ones'
            )
            raise InvalidValueError(msg)
        if len(groups) > 1:
            msg = (
                f'norm_over="group" needs one group, got {len(groups)}, of which it is not known which hold parts: '
                f"call unscale_(optimizer), and clip the gradients by a norm of your own"
            )
            raise InvalidValueError(msg)
        return Clip(largest, Exchange(self._iteration, groups[0], Purpose.NORM, optimizer, max_norm=largest))

    def _tell_update(self, ended: Iteration, verdicts: Sequence[Verdict], before: float, after: float) -> None:
        """Tell of an iteration that the update has ended, with the verdicts on what was unscaled in it."""
        steps = tuple(ended.reports)
        judged: list[StepReport | Verdict] = [*steps, *verdicts]
        skipped = any(one.nonfinite > 0 for one in judged)
        number, rank = ended.number, self._agreement.rank()
        self._reports.tell_update(UpdateReport(number, before, skipped, rank, steps, after))

    def _updated_scale(self, ended: Iteration, pending: Sequence[Pending], verdicts: Sequence[Verdict]) -> float:
        """Return the scale that an update has left, computed anew from what was read, where that spares a read."""
        live = self._live
        before = pending[-1].numbers if pending and ended.lowered is None else None
        if before is None or len(verdicts) < len(pending) or isinstance(live.current().scale, float):
            return live.scale()
        rule = plain_rule(live.policy)
        if rule is None:
            return live.scale()
        after: float = rule.update(before, max(verdict.nonfinite for verdict in verdicts)).scale
        return after


@with_options(ScalerOptions, CommonOptions)
class ShardedGradScaler(GradScaler):
    """A GradScaler whose ranks skip together, back off together, and notice when they differ.

    For gradients that the ranks hold parts of: sharded weights or optimizer states, tensor, pipeline and expert
    parallelism. One collective of 88 bytes for each optimizer, iteration and group, on every rank, whatever it found
    and even when it holds no gradients. It carries a fingerprint of the state, so that a rank whose scale has drifted
    is an error on every rank instead of a silent divergence.

    Parameters
    ----------
    group : communicator, Collectives, or list of these
        What to agree over: an MPI communicator (duplicated, which is collective over it), an object with ``rank``,
        ``size`` and ``start_max``, or a list of them (data, tensor, pipeline, expert), agreed over in turn.
    timeout : float, default 1800.0
        Seconds to wait for the other ranks, ``math.inf`` for ever. Ignored by Collectives of your own.
    **options

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
    Construct it on every rank, with the same options but for ``on_skip``, ``on_update`` and ``history_size``, and call
    ``unscale_``, ``step`` and ``update`` for the same optimizers in the same order on every rank. ``backend`` lets a
    rank that never has an array take part. Rank 0 is the one that is rank 0 of every group. A disabled scaler makes no
    collectives.

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

    def __init__(
        self, *positional: Never, group: Any, timeout: float = DEFAULT_TIMEOUT, **options: Unpack[ScalerOptions]
    ) -> None:
        super().__init__(*positional, **options)
        self._timeout = validation.timeout(timeout)
        self._agreement.leave()
        self.set_group(group)

    def set_group(self, group: Any) -> None:
        """Agree over another group from now on; needed after unpickling, since communicators do not travel.

        Parameters
        ----------
        group : communicator, Collectives, or list of these
            As for the constructor. Collective over it.

        Raises
        ------
        CallOrderError
            In the middle of an iteration, unless its agreement has failed: it is then abandoned.
        """
        self._iteration.require_boundary("set_group()")
        if self._enabled:
            self.agree_over(registry.all_collectives_for(group, self._timeout))
