"""GradScaler and ShardedGradScaler: the per-iteration protocol READY -> UNSCALED -> STEPPED over a scaler's parts."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from gradscale.core import registry, validation
from gradscale.core.arithmetic import NormOver, checked_norm
from gradscale.core.backend import Backend
from gradscale.core.messages import nearest, shown
from gradscale.core.protocols import Array, Collectives, Optimizer, Policy, ScaleState
from gradscale.core.vector import Purpose, Verdict
from gradscale.errors import CallOrderError, InvalidTypeError, InvalidValueError, ScaleUnderflowError
from gradscale.policies.dynamic import DynamicScale
from gradscale.policies.plain import plain_rule
from gradscale.policies.spikes import SkipSpikes, SpikeState
from gradscale.scaler import checkpoint, stepper
from gradscale.scaler.agreement import Agreement
from gradscale.scaler.diagnosis import Asked, Diagnosis
from gradscale.scaler.exchange import Exchange
from gradscale.scaler.iteration import Iteration, Parts, Stage, Turn
from gradscale.scaler.live_state import ArrayState, checked_scale, numbers_of
from gradscale.scaler.overflow import OverflowReport
from gradscale.scaler.parts import LiveState, Pending
from gradscale.scaler.reports import (
    HISTORY_SIZE,
    Diagnose,
    OnSkip,
    OnUpdate,
    Reports,
    StepReport,
    UpdateReport,
    step_report,
)
from gradscale.scaler.scaling import ArrayScaling
from gradscale.scaler.spikes import Spikes, checked_loss, is_loss
from gradscale.scaler.unscaler import ArrayUnscaler, Clip
from gradscale.scaler.verdict import PendingVerdict

__all__ = [
    "DEFAULT_TIMEOUT",
    "GradScaler",
    "ShardedGradScaler",
    "agree_over",
    "call_of",
    "checked_arguments",
    "chosen_policy",
    "end_step",
    "iteration_of",
    "scaler_of",
    "watching",
]

_Outputs = TypeVar("_Outputs")
_Arguments = ParamSpec("_Arguments")
_Returned = TypeVar("_Returned")

DEFAULT_TIMEOUT = 1800.0

# Arguments of torch's scalers alone.
_OF_TORCH = {"device", "process_group", "allow_fp16_grads"}
_SETTINGS = {field.name for field in dataclasses.fields(DynamicScale)}
_POLICY_MEMBERS = ("init_scale", "init", "update", "backoff", "clamp", "at_min_scale")


def checked_arguments(function: Callable[_Arguments, _Returned]) -> Callable[_Arguments, _Returned]:
    """Let a constructor or method refuse arguments that it does not take with an InvalidTypeError of its options."""
    signature = inspect.signature(function)
    parameters = [one for one in signature.parameters.values() if one.name not in ("self", "optimizer")]
    options = [one.name for one in parameters]
    named = [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
    by_position = len(signature.parameters) - len(named)
    owner = "a scaler" if function.__name__ == "__init__" else f"{function.__name__}()"

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Returned:
        try:
            return function(*args, **kwargs)
        except TypeError:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                what = str(error)
            else:
                raise
        unknown = [name for name in kwargs if name not in signature.parameters]
        unnamed = args[by_position:]
        if unknown:
            what = f"unexpected keyword arguments {unknown}"
        elif unnamed:
            what = f"{owner} takes its options by name, such as {named[0]}=, got {shown(unnamed)}"
        settings = {name: value for name, value in kwargs.items() if name in _SETTINGS}
        msg = f"{what}; the options of {owner} are {options}"
        if "policy" in options and not settings.keys().isdisjoint(unknown):
            given = ", ".join(f"{name}={shown(value)}" for name, value in settings.items())
            msg += f"; for settings of the policy write policy=gradscale.DynamicScale({given})"
        elif by_position == 1 and "group" in unknown:
            msg += "; group= is taken by gradscale.ShardedGradScaler"
        elif unknown:
            msg += nearest(unknown[0], options)
        if by_position == 1 and (unnamed or not _OF_TORCH.isdisjoint(unknown)):
            msg += "; torch's arguments are taken by gradscale_torch.GradScaler and gradscale_torch.ShardedGradScaler"
        raise InvalidTypeError(msg) from None

    return call


def watching(skip: object, replace: Callable[[SpikeState, SpikeState], SpikeState] | None = None) -> Spikes | None:
    """Return the windows of a rule; None without a rule."""
    if skip is None:
        return None
    if not isinstance(skip, SkipSpikes):
        msg = f"skip must be a SkipSpikes, such as gradscale.SkipSpikes(deviations=6.0), got {shown(skip)}"
        raise InvalidTypeError(msg)
    return Spikes(skip) if replace is None else Spikes(skip, replace)


def chosen_policy(policy: Policy | None, factors: Mapping[str, float | None]) -> Policy:
    """Return a policy, or a DynamicScale of the factors that are given.

    Raises
    ------
    InvalidValueError, InvalidTypeError
        For a policy together with a factor, what is no policy, or a factor that is out of range.
    """
    given = {name: value for name, value in factors.items() if value is not None}
    if policy is None:
        return DynamicScale(**given)  # type: ignore[arg-type]
    if given:
        either = f"policy= or {', '.join(f'{name}=' for name in given)}"
        msg = f"give {either}, not both, got {shown(policy)} and {shown(given)}"
        raise InvalidValueError(msg)
    found: Policy = validation.policy(policy, _POLICY_MEMBERS)
    return found


class GradScaler:
    """Scale losses, unscale gradients, skip steps with non-finite gradients, and adapt the scale.

    Per iteration: ``scale(loss)`` and the backward pass; for each optimizer ``unscale_(optimizer)`` if its gradients
    are to be looked at or clipped, and ``step(optimizer)``; then ``update()``.

    Parameters
    ----------
    init_scale, growth_factor, backoff_factor, growth_interval : optional
        As in :class:`DynamicScale`; default 65536.0, 2.0, 0.5, 2000.
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
    skip : SkipSpikes, optional
        Skip the steps whose loss or norm it calls a spike, too. The scale stays as it is.

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

    @checked_arguments
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
        skip: SkipSpikes | None = None,
    ) -> None:
        factors = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
        }
        live = ArrayState(chosen_policy(policy, factors), backend)
        is_enabled = validation.boolean("enabled", enabled)
        reports: Reports[Pending] = Reports(on_skip, on_update, diagnose=diagnose, history_size=history_size)
        agreement = Agreement(diagnoses=reports.diagnoses, skip=skip)
        spikes = watching(skip)
        parts = Parts(live, ArrayScaling(), ArrayUnscaler(), agreement, reports, PendingVerdict, spikes)
        self._assemble(parts, is_enabled)

    def _assemble(self, parts: Parts, enabled: bool) -> None:
        self._parts, self._enabled = parts, enabled
        # Held by the call that is under way.
        self._busy = threading.Lock()
        self._diagnosis = Diagnosis(parts, enabled=enabled)
        self._iteration = Iteration(1, parts)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(policy={self._parts.live.policy!r}, enabled={self._enabled})"

    # The iteration.

    def scale(self, outputs: _Outputs, *, loss: Array | float | None = None) -> _Outputs:
        """Multiply a loss, or nested containers of arrays, by the scale.

        Parameters
        ----------
        outputs : array or nested containers of arrays
            Floating arrays of one library, on any devices; integers and ``None`` pass through.
        loss : array, number or False, optional
            What a scaler with ``skip=`` judges in place of these outputs, such as their mean over the ranks; False for
            nothing. Default: the real arrays of one element among the outputs. Over several calls, their mean.

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
        parts = self._parts
        self._iteration.require_sound()
        spikes = parts.spikes
        given = None if spikes is None or loss is None or loss is False else checked_loss(loss)
        look = self._count_nonfinite if parts.reports.diagnoses else None
        if spikes is not None and loss is None:
            look = self._look
        scaled: _Outputs = parts.scaling.scale(outputs, lambda: self._iteration, look)
        if given is not None:
            self._note_loss(given)
        elif loss is False and not self._iteration.losses.number:
            self._iteration.losses = self._iteration.losses._replace(is_judged=True)
        return scaled

    @checked_arguments
    def unscale_(
        self, optimizer: Optimizer, *, max_norm: float | None = None, norm_over: NormOver | None = None
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
            When the object has no gradients, or something among them is no floating array.
        InvalidValueError
            For a ``max_norm`` that is negative, or over a group without ``norm_over``.

        Warns
        -----
        UserWarning
            Once for a scaler without a group, when nothing was scaled in this iteration; ``step``, too.
        """
        clip = None
        if max_norm is not None or norm_over is not None:
            clip = self._checked_clip(optimizer, max_norm, norm_over)
        if not self._enabled:
            parts = self._parts
            return None if clip is None else parts.unscaler.clip_unscaled(optimizer, clip.max_norm, parts.live)
        iteration = self._iteration
        with contextlib.nullcontext() if iteration.is_inside_closure else call_of(self, "unscale_()"):
            return iteration.unscale(iteration.begin_unscale(optimizer), optimizer, clip)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
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
            When it was called already since the last ``update``, or inside of another call; when none of the
            optimizer's parameters has a gradient, on any rank.
        ScaleDesyncError, CollectiveTimeoutError
            Over a group: on every rank when the states differ; when some rank never comes.
        ClosureOverflowError
            When a closure overflows at every scale after its first evaluation was fine.

        Notes
        -----
        One host read, whatever the number of devices, dtypes and parameters; one for each evaluation of a closure.
        """
        if not self._enabled:
            end_step(self, optimizer)
            return optimizer.step(*args, **kwargs)
        with call_of(self, "step()"):
            iteration = self._iteration
            turn = iteration.begin_step(optimizer)
            returned, verdict, retries = stepper.step(iteration, turn, optimizer, args, kwargs)
            end_step(self, optimizer, turn, verdict, retries)
        return returned

    def refuse(self, optimizer: Optimizer) -> None:
        """Skip the next step of an optimizer on all ranks.

        Still call ``unscale_`` and ``step`` on every rank: if that optimizer is never unscaled or stepped, ``update``
        raises CallOrderError. The step's report has the reason "refused", and the scale stays as it is.

        Parameters
        ----------
        optimizer : Optimizer
            Whose step.

        Raises
        ------
        CallOrderError
            After its ``step``, and over a group after its ``unscale_``, which tells the other ranks.
        InvalidValueError
            For a disabled scaler, which makes every step.
        """
        if not self._enabled:
            msg = (
                "a disabled scaler makes every step, got refuse(): use StaticScale(1.0) as its policy to train without "
                "scaling with a scaler that skips"
            )
            raise InvalidValueError(msg)
        self._iteration.refuse(optimizer)

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
        InvalidValueError, InvalidTypeError
            For a new scale that is not finite and above zero, or outside the policy's bounds; nothing is changed.
        ScaleDesyncError, CollectiveTimeoutError
            For an agreement that no ``step`` has finished.
        """
        if not self._enabled:
            return
        with call_of(self, "update()"):
            live, agreement, reports = self._parts.live, self._parts.agreement, self._parts.reports
            ended = self._iteration
            ended.require_sound()
            if new_scale is None:
                ended.require_made_steps()
            wanted = None if new_scale is None else checked_scale(new_scale, live.policy)
            pending, verdicts = ended.judged()
            if wanted is None and ended.lowered is None and not pending:
                ended.refuse_update()
            steps = tuple(ended.steps)
            if reports.wants_updates:
                # Somebody wants them since a step whose verdict was to be read later.
                with agreement.failing():
                    steps += tuple(step_report(one.verdict(), ended.number) for one in pending if one.is_read_later)
            judged: list[StepReport | Verdict] = [*steps, *verdicts]
            before = None
            if reports.wants_updates:
                # Without a verdict it has to be read.
                before = judged[0].scale if judged else live.scale()
            # An update that is interrupted can be made again: it learns once, and counts in its last call.
            following = Iteration(ended.number + 1, self._parts)
            ended.learn()
            if wanted is not None:
                live.replace_scale(wanted)
            elif ended.lowered is not None:
                live.take(ended.lowered)
            else:
                counts = [count for one in pending if (count := one.count()) is not None]
                # On a device a step may be neither clean nor an overflow without the CPU's knowledge.
                held = () if len(verdicts) == len(pending) else ended.held()
                ended.catch_up()
                if counts:
                    live.advance(counts, held if len(held) == len(counts) else ())
            self._iteration = following
            underflow = None
            at_minimum = [verdict.scale for verdict in verdicts if verdict.at_min_scale and verdict.nonfinite]
            if wanted is None and at_minimum:
                underflow = ScaleUnderflowError(
                    f"gradients overflow although the scale is at its minimum, {at_minimum[0]!r}: the cause is not "
                    f"the scale. Look for inf or NaN in the unscaled loss, the data or the weights, which "
                    f"diagnose(optimizer, loss=loss, state=True) searches; lower the learning "
                    f'rate, or allow a smaller min_scale; at_min="clamp" skips such steps instead. Got '
                    f"{shown(live.policy)}"
                )
            try:
                if before is not None:
                    after = self._scale_after(ended, pending, verdicts, before, wanted)
                    skipped = any(one.skipped if isinstance(one, StepReport) else one.is_skipped for one in judged)
                    reports.tell_update(UpdateReport(ended.number, before, skipped, agreement.rank(), steps, after))
            except Exception as error:
                if underflow is not None:
                    # All ranks raise it; a callback may fail on one of them.
                    underflow.add_note(f"A callback of on_update has failed, too: {shown(error)}")
                    raise underflow  # noqa: B904 (the callback's is its context, not its cause)
                raise
            if underflow is not None:
                raise underflow

    def _scale_after(
        self,
        ended: Iteration,
        pending: Sequence[Pending],
        verdicts: Sequence[Verdict],
        before: float,
        wanted: float | None,
    ) -> float:
        """Return the scale that an update has left, computed from what was read if that spares a read."""
        live = self._parts.live
        if wanted is not None:
            return wanted
        if ended.is_of_replaced_state:
            return live.scale()
        if ended.lowered is None and all(verdict.is_held for verdict in verdicts) and len(verdicts) == len(pending):
            return before
        # A closure that overflows at every scale reads its verdict at a lower scale than the update starts from.
        is_plain = ended.lowered is None and not any(step.retries for step in ended.steps)
        known = pending[-1].numbers if pending and is_plain else None
        rule = None if known is None or len(verdicts) < len(pending) else plain_rule(live.policy)
        if known is None or rule is None:
            return live.scale()
        after: float = rule.update(known, max(verdict.nonfinite for verdict in verdicts)).scale
        return after

    # Reports.

    def last_step(self, optimizer: Optimizer) -> StepReport:
        """Return what happened in the last ``step`` of an optimizer; no host read beyond the one that step made.

        Raises
        ------
        CallOrderError
            When it has not been stepped by this scaler.
        """
        return self._parts.reports.last(optimizer)

    def step_schedule(self, optimizer: Optimizer, schedule: Any, *args: Any, **kwargs: Any) -> None:
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
        wrong = ""
        if hasattr(schedule, "param_groups"):
            wrong = f"has param_groups, so it is an optimizer, got {type(schedule).__name__}"
        elif not callable(getattr(schedule, "step", None)):
            wrong = f"must be a learning-rate schedule with step(), got {shown(schedule)}"
        if wrong:
            msg = f"schedule {wrong}: call step_schedule(optimizer, schedule)"
            raise InvalidTypeError(msg)
        if not self.last_step(optimizer).skipped:
            schedule.step(*args, **kwargs)

    @property
    def history(self) -> list[StepReport]:
        """The reports of the last steps of all optimizers, oldest first; ``history_size`` of them at most.

        No host read beyond those that the steps made; steps that a fused optimizer has judged on a device are read
        now. Copies and pickles of a scaler begin with none.
        """
        return self._parts.reports.history

    @property
    def on_skip(self) -> OnSkip | None:
        """What is called with the StepReport of a skipped step, in ``step``; None for nothing.

        On rank 0 only, but for callables with a true attribute ``every_rank``, such as
        :func:`gradscale.callbacks.every_rank` gives.
        """
        return self._parts.reports.on_skip

    @on_skip.setter
    def on_skip(self, callbacks: OnSkip | None) -> None:
        self._parts.reports.on_skip = callbacks

    @property
    def on_update(self) -> OnUpdate | None:
        """What is called with the UpdateReport of an iteration, in ``update``; None for nothing. As for ``on_skip``."""
        return self._parts.reports.on_update

    @on_update.setter
    def on_update(self, callbacks: OnUpdate | None) -> None:
        self._parts.reports.on_update = callbacks

    def diagnose(
        self,
        optimizer: Optimizer,
        names: object = None,
        *,
        loss: object = None,
        gather: bool = False,
        params: object = None,
        state: object = False,
    ) -> OverflowReport:
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
        params : arrays in nested containers, optional
            Weights to be searched for inf and NaN, too: if these hold any, no lower scale will help. Default: with
            ``state``, the parameters in ``param_groups`` that are arrays.
        state : bool, or arrays in nested containers, default False
            The optimizer's state to be searched like that, such as its momentum; integers are left out. True takes
            ``optimizer.state``, a mapping as torch's optimizers have. Of an optimizer within another one pass the inner
            one's, such as ``optimizer.optim.state`` of torch's ``ZeroRedundancyOptimizer``.

        Returns
        -------
        OverflowReport
            ``print`` shows it as a table; ``broken`` is what the weights and the state hold. One host read, and one for
            each array of these that is of another library; with ``gather`` three more for each group, and as many
            all-reduces.

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
        return self._diagnosis.diagnose(optimizer, self._iteration, Asked(names, loss, params, state), gather=gather)

    # Settings.

    def name(self, optimizer: Optimizer, name: str) -> None:
        """Give an optimizer a name, which the ranks of a group compare in each message about it.

        Without a name ranks compare the class and the number of ``param_groups`` of an optimizer. Of two of one kind,
        such as the generator's and the critic's, they know only the order in which they meet them: names tell these
        apart. And where ranks hold other parts of a model, classes and numbers may differ under one name.

        Parameters
        ----------
        optimizer : Optimizer
            Which ``unscale_`` and ``step`` are called with.
        name : str
            The same on every rank.

        Raises
        ------
        InvalidTypeError
            For what is no string.
        """
        if not isinstance(name, str):
            msg = f"name must be a string, got {shown(name)}"
            raise InvalidTypeError(msg)
        self._parts.agreement.name(optimizer, name)

    def get_scale(self) -> float:
        """Return the scale as a float, 1.0 when disabled. One host read."""
        return self._parts.live.scale() if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Return whether the scaler is enabled."""
        return self._enabled

    def get_growth_factor(self) -> float:
        """Return the growth factor; 1.0 for a policy without one."""
        return float(getattr(self._parts.live.policy, "growth_factor", 1.0))

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor: above 1."""
        self._parts.live.replace_setting("growth_factor", new_factor)

    def get_backoff_factor(self) -> float:
        """Return the backoff factor; 1.0 for a policy without one."""
        return float(getattr(self._parts.live.policy, "backoff_factor", 1.0))

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor: between 0 and 1."""
        self._parts.live.replace_setting("backoff_factor", new_factor)

    def get_growth_interval(self) -> int:
        """Return the growth interval in clean steps; 1 for a policy without one."""
        return int(getattr(self._parts.live.policy, "growth_interval", 1))

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval, in clean steps; a run that is already as long grows at its next clean step."""
        self._parts.live.replace_setting("growth_interval", new_interval)

    # Saving and loading.

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain Python values; empty when disabled. One host read.

        Keys: torch's five (``scale``, ``growth_factor``, ``backoff_factor``, ``growth_interval``, ``_growth_tracker``),
        so that torch's scalers can load it; ``version``, ``iteration``, the other trackers, and ``policy`` with every
        setting; with ``skip=`` also ``spikes``, the values of its windows, two host reads for each optimizer. They are
        in the order in which optimizers were first judged, which must be the same after loading. Call it between
        iterations.
        """
        if not self._enabled:
            return {}
        live, spikes = self._parts.live, self._parts.spikes
        windows = None if spikes is None else spikes.numbers()
        return checkpoint.build(live.policy, live.numbers(), self._iteration.number, windows)

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
        self._iteration.require_boundary("load_state_dict()", abandons=True)
        loaded = checkpoint.parse(state_dict, self._parts.live.policy)
        live, agreement, reports = self._parts.live, self._parts.agreement, self._parts.reports
        before, self._iteration = self._iteration, Iteration(loaded.iteration, self._parts)
        is_under_way = before.scaled and agreement.failure is None and not before.is_incomplete
        if is_under_way:
            # These gradients are unscaled by what they were scaled with.
            self._iteration.scaled = self._iteration.is_of_replaced_state = True
            self._iteration.state = before.state
            self._iteration.losses = before.losses
        agreement.recover()
        # What is on its way to the CPU is about the state that is replaced.
        reports.under_way.clear()
        live.load(loaded.policy, loaded.snapshot, keep=is_under_way)
        if self._parts.spikes is not None:
            self._parts.spikes.load(loaded.spikes)

    def __getstate__(self) -> dict[str, object]:
        """Return the state to pickle: settings and numbers, without arrays, groups, callbacks and reports.

        Raises
        ------
        CallOrderError
            In the middle of an iteration; with gradients under way that were scaled before ``load_state_dict``.
        """
        iteration, live = self._iteration, self._parts.live
        iteration.require_boundary("pickling or copying a scaler")
        before = iteration.state
        if before is not None and before.scale is not live.current().scale and _scale_of(before, live) != live.scale():
            iteration.wrong_order(
                "a scaler is to be pickled or copied between load_state_dict() and unscale_() or step() of gradients "
                "that were scaled before: the copy would divide them by the loaded scale. Copy it before "
                "load_state_dict() or after update()"
            )
        # Each part says by itself what of it is kept.
        parts = Parts._make(map(copy.copy, self._parts))
        position = iteration.number, iteration.scaled, iteration.losses.as_numbers()
        return self.__dict__ | {"_parts": parts, "_iteration": position, "_diagnosis": None, "_busy": None}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__dict__.update(kept)
        number, scaled, losses = kept["_iteration"]
        self._assemble(kept["_parts"], kept["_enabled"])
        self._iteration = Iteration(number, self._parts)
        self._iteration.scaled, self._iteration.losses = scaled, losses

    # The parts put together.

    def _look(self, outputs: Sequence[object]) -> None:
        """Look at what is scaled, for a diagnosis and for spikes."""
        if self._parts.reports.diagnoses:
            self._count_nonfinite(outputs)
        for loss in filter(is_loss, outputs):
            self._note_loss(loss)

    def _note_loss(self, loss: Array | float) -> None:
        value = loss if isinstance(loss, float) else self._parts.unscaler.values_of(loss)
        if value is not None:
            self._iteration.losses = self._iteration.losses.plus(value)

    def _count_nonfinite(self, outputs: Sequence[object]) -> None:
        count = self._diagnosis.count_nonfinite(outputs)
        if count is not None:
            self._iteration.loss_nonfinite += (count,)

    def _checked_clip(self, optimizer: Optimizer, max_norm: object, norm_over: object) -> Clip | None:
        """Check the arguments before anything is modified, and return the norm to clip to.

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
        groups = self._parts.unscaler.groups_for(optimizer, self._parts.agreement.usable_groups())
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


class ShardedGradScaler(GradScaler):
    """A GradScaler whose ranks skip together, back off together, and notice when they differ.

    For gradients that the ranks hold parts of: sharded weights or optimizer states, tensor, pipeline and expert
    parallelism. One collective of at most 104 bytes for each optimizer, iteration and group, on every rank, whatever it
    found and even when it holds no gradients. It carries a fingerprint of the state, so that a rank whose scale has
    drifted is an error on every rank instead of a silent divergence.

    Parameters
    ----------
    group : communicator, Collectives, or list of these
        What to agree over: an MPI communicator (duplicated, which is collective over it), an object with ``rank``,
        ``size`` and ``start_max``, or a list of them (data, tensor, pipeline, expert), agreed over in turn.
    timeout : float, default 1800.0
        Seconds to wait for the other ranks, ``math.inf`` for ever. Ignored by Collectives of your own.
    init_scale, growth_factor, backoff_factor, growth_interval, policy, enabled, backend : optional
        As in :class:`GradScaler`.
    on_skip, on_update, diagnose, history_size, skip : optional
        As in :class:`GradScaler`.

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
    collectives. Before the first message over a group, one of 16 bytes compares the ranks' versions of gradscale.

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

    @checked_arguments
    def __init__(
        self,
        *,
        group: object,
        timeout: float = DEFAULT_TIMEOUT,
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
        skip: SkipSpikes | None = None,
    ) -> None:
        super().__init__(
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            policy=policy,
            enabled=enabled,
            backend=backend,
            on_skip=on_skip,
            on_update=on_update,
            diagnose=diagnose,
            history_size=history_size,
            skip=skip,
        )
        self._timeout = validation.timeout(timeout)
        self.set_group(group)

    def set_group(self, group: object) -> None:
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
            agree_over(self, registry.all_collectives_for(group, self._timeout))


# For adapters, whose scalers hold one of these: functions, so that a user's scaler does not show them.


def scaler_of(parts: Parts, *, enabled: bool = True) -> GradScaler:
    """Return a scaler made of the parts that an adapter brings."""
    made = GradScaler.__new__(GradScaler)
    made._assemble(parts, enabled)
    return made


def call_of(scaler: GradScaler, call: str) -> contextlib.AbstractContextManager[object]:
    """Return the lock to hold during a call of a scaler; CallOrderError if another call is under way."""
    if scaler._busy.locked():
        msg = (
            f"{call} was called while another call of this scaler is under way: inside optimizer.step(), in a "
            f"callback, a signal handler or another thread. Nothing was changed; call it once that one has returned"
        )
        raise CallOrderError(msg)
    # A with statement of it leaves no place for Ctrl-C between taking the lock and its body.
    return scaler._busy


def iteration_of(scaler: GradScaler) -> Iteration:
    """Return a scaler's present iteration."""
    return scaler._iteration


def end_step(
    scaler: GradScaler,
    optimizer: Optimizer,
    turn: Turn | None = None,
    verdict: Verdict | None = None,
    retries: int = 0,
) -> None:
    """Record a step: with its verdict, without one that is read later, or without a turn for a disabled scaler."""
    iteration, reports = scaler._iteration, scaler._parts.reports
    if turn is None:
        reports.record(optimizer, StepReport(False, 1.0, 0, "disabled", iteration.number))
        return
    turn.stage, turn.verdict = Stage.STEPPED, verdict
    agreement, pending = scaler._parts.agreement, turn.pending
    agreement.steps += 1
    if pending is not None and pending.is_scaled:
        scaler._parts.unscaler.remember_left_scaled(optimizer)
    if verdict is None:
        assert pending is not None
        reports.record_later(optimizer, iteration.number, pending)
        return
    overflow = None
    if verdict.nonfinite and reports.diagnoses:
        overflow = scaler._diagnosis.of_overflow(optimizer, iteration)
    report = step_report(verdict, iteration.number, retries, overflow)
    iteration.steps.append(report)
    reports.record(optimizer, report, agreement.rank)


def _scale_of(state: ScaleState, live: LiveState) -> float:
    """Return the scale of a state as a number: one host read of arrays."""
    scale: float | Array = state.scale
    return scale if isinstance(scale, float) else numbers_of(state, live.backend_for(scale))["scale"]


def agree_over(scaler: GradScaler, groups: Sequence[Collectives]) -> None:
    """Agree over other groups from now on, and abandon an iteration whose agreement has failed."""
    agreement = scaler._parts.agreement
    if groups:
        # A policy that ranks cannot compare is refused now, and not in the first step.
        agreement.identify(scaler._parts.live.policy)
    if agreement.failure is not None:
        scaler._iteration = Iteration(scaler._iteration.number, scaler._parts)
    agreement.join(groups)
