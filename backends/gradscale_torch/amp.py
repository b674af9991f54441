"""GradScaler: a replacement of torch's scaler of this name, argument by argument; StepGuard, which scales nothing."""

# torch's attributes are properties here, and its methods return less than ours.
# mypy: disable-error-code="override,misc"

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar, overload

import torch

# Looked up once: a framework may rebind torch's names to the classes of this file.
from torch.amp import GradScaler as TorchGradScaler

import gradscale
from gradscale import registry
from gradscale.core import validation
from gradscale.core.arithmetic import NormOver
from gradscale.core.gradients import Request
from gradscale.core.protocols import Collectives, Group, Policy
from gradscale.errors import InvalidTypeError, InvalidValueError, reading, short_repr, warn_caller
from gradscale.scaler.inputs import Batch, checked_inputs
from gradscale.scaler.options import FACTORS, CommonOptions, GroupOptions, GuardOptions, check_arguments, with_options
from gradscale.scaler.order import forbid_call
from gradscale.scaler.scale import CurrentScale
from gradscale.scaler.scaler import collaborators_of, iteration_of
from gradscale.scaler.stepper import Step
from gradscale_torch import devices, hosts
from gradscale_torch.backend import ScalerBackend
from gradscale_torch.devices import to_device
from gradscale_torch.gradients import Settings
from gradscale_torch.groups import TorchCollectives, default_group, is_lookalike

Tensor = torch.Tensor
Device: TypeAlias = str | torch.device | int | None
Optimizer = torch.optim.Optimizer
_Outputs = TypeVar("_Outputs")


_NOT_CALLED = {
    "_unscale_grads_": "construct it with allow_fp16_grads=True to take float16 gradients",
    "_maybe_opt_step": "construct it with group= to agree on each step with other ranks",
    "_check_inf_per_device": "construct it with group= to agree on each step with other ranks",
    "_get_scale_async": "construct it with policy= for a scale of your own",
    "_lazy_init_scale_growth_tracker": "construct it with init_scale= or policy= for a state of your own",
    "_check_scale_growth_tracker": "construct it with init_scale= or policy= for a state of your own",
    "_amp_update_scale_cpu_": "construct it with policy= for a rule of your own",
}


def _not_called(name: str, ours: Callable[..., object] | None = None) -> property:
    """Return a property for torch's method of this name, or ours, that cannot be set."""

    def get(scaler: GradScaler) -> object:
        return getattr(super(GradScaler, scaler), name) if ours is None else functools.partial(ours, scaler)

    def forbid(_: GradScaler, value: object) -> None:
        raise InvalidValueError(_must_stay(name, f"got {short_repr(value)}"))

    return property(get, forbid)


def _must_stay(name: str, got: str) -> str:
    return (
        f"{name} must stay as it is, since the steps of this scaler do not call it, {got}: {_NOT_CALLED[name]}, or "
        f"override unscale_() or step()"
    )


def _field(name: str) -> property:
    """Return a property for a field of the state, 0-d, the same tensor after ``update``; None before ``scale``."""

    def get(scaler: GradScaler) -> Tensor | None:
        state = _current(scaler).state
        return None if state is None else getattr(state, name)

    def replace(scaler: GradScaler, value: Tensor) -> None:
        if not isinstance(value, Tensor):
            msg = (
                f"_{name} must be a tensor, got {short_repr(value)}: to begin anew, load a state dict or make a new "
                f"scaler"
            )
            raise InvalidTypeError(msg)
        iteration, current = iteration_of(scaler), _current(scaler)
        field: Tensor = getattr(current.materialize(value), name)
        tensor = to_device(value, field.device, dtype=field.dtype)
        current.set_field(name, tensor.reshape(()) if tensor.shape else tensor)
        # The gradients of this iteration are unscaled with it, as by torch's scalers.
        if iteration.scaling.state is not None:
            iteration.scaling.state = current.state

    return property(get, replace)


@dataclasses.dataclass
class ReplacementOptions(CommonOptions, GroupOptions):
    """The arguments of torch's scaler, and the options of its replacement."""

    device: Device = "cuda"
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True
    _: dataclasses.KW_ONLY
    allow_fp16_grads: bool = False
    policy: Policy | None = None


class GradScaler(gradscale.GradScaler, TorchGradScaler):
    """A replacement of ``torch.amp.GradScaler``; over a mesh, too, if the parameters are DTensors (FSDP2).

    Parameters
    ----------
    device : str, torch.device or int, default "cuda"
        The device that is trained on. ``"cuda"`` without CUDA warns and disables the scaler, as torch does.
    init_scale, growth_factor, backoff_factor, growth_interval : optional
        As in torch.
    enabled : object, default True
        Every method of a disabled scaler passes through.
    group : ProcessGroup, DeviceMesh, Collectives, or list of these, optional
        The ranks to agree with. Default: all ranks if ``skip`` judges losses, since each rank has one of its own; else
        the meshes of the optimizer's parameters if they are DTensors, else none: this process decides alone, which is
        right if every rank holds all gradients (DDP). It replaces the meshes: name these, too, if there are DTensors.
    allow_fp16_grads : bool, default False
        Whether gradients may be float16, for which torch's scaler raises ValueError.
    timeout : float, default 1800.0
        Seconds to wait for the other ranks.
    policy, on_skip, on_update, diagnose, history_size, skip, warn_after, give_up_after : optional
        As in :class:`gradscale.GradScaler`.
    max_norm, norm_over, hold : optional
        As in :class:`gradscale.GradScaler`.

    Raises
    ------
    InvalidValueError, InvalidTypeError
        For an argument out of range or of a wrong type, and for a device that does not exist; for a subclass that
        overrides a private method of torch's, such as ``_unscale_grads_``, ``_maybe_opt_step`` or
        ``_check_inf_per_device``, which the steps of this one do not call; they call ``unscale_``.

    Notes
    -----
    The methods are torch's. Beyond them there are those of :class:`gradscale.GradScaler`, closures, and ``max_norm``.
    With it a fused optimizer divides by a factor that clips, too, and any other has its gradients multiplied once, if
    their norm is above; if such a step is skipped, they stay scaled. One host read in each
    ``step``, none with a fused optimizer on a device, and none elsewhere, but of the scale if gradients are on the CPU
    and the loss is on a device (CPU offload). With ``on_skip``, ``on_update`` or ``diagnose`` the verdict of a fused
    optimizer on a device is read in each step, too; else by the first ``last_step``, ``step_schedule`` or ``history``
    that asks for it. Rank 0 is that of ``torch.distributed`` if it is initialized.

    ``state_dict`` has torch's five keys; for a policy that they do not describe, and over a group between ``step`` and
    ``update``, also those that gradscale's adds to them. ``load_state_dict`` keeps the scale's tensor, so that captured
    CUDA graphs see the new value. After it, scale anew a loss that was scaled before: autograd raises in a backward
    pass through it, as with torch's scaler.
    ``diagnose`` looks at the stored values of sparse gradients, at this rank's part of a DTensor, and at the unscaled
    values of gradients that a fused optimizer has left scaled.

    In a captured CUDA graph, ``scale``, ``unscale_``, the ``step`` of a fused optimizer and ``update`` work in each
    replay as they do otherwise, and each ``last_step`` reads the verdict of the last replay. All that needs a host
    read, and the first ``scale``, is a CallOrderError there.

    Examples
    --------
    >>> import torch
    >>> from gradscale_torch import GradScaler
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu")
    >>> scaler.scale(model(torch.ones(4, 2)).sum() * torch.inf).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> (scaler.last_step(optimizer).skipped, scaler.get_scale())
    (True, 32768.0)
    """

    _rejoins: bool
    # As torch's ShardedGradScaler: the default group is joined, a loss keeps its dtype, torch's function takes float16.
    _is_sharded = False

    @with_options(ReplacementOptions)
    def __init__(self, **kwargs: Any) -> None:
        options = ReplacementOptions(**kwargs)
        _require_no_overrides(type(self))
        is_enabled = _available(options.device, options.enabled)
        self._device = options.device  # type: ignore[assignment]
        self._timeout = validation.timeout(options.timeout)
        backend = ScalerBackend(Settings(options.device, options.allow_fp16_grads, self._is_sharded, self._timeout))
        chosen = vars(options) | _factors(options, enabled=is_enabled)
        self._assemble(collaborators_of(chosen, backend, None, _own_rank), is_enabled)
        self.set_group(options.group)

    def __repr__(self) -> str:
        current = _current(self)
        # A device is not waited for.
        tensor = None if current.state is None else current.state.scale
        scale = current.scale() if tensor is None or devices.is_on_cpu(tensor) else f"<on {tensor.device}>"
        return f"{type(self).__name__}(policy={current.policy!r}, scale={scale}, enabled={self._enabled})"

    # The iteration.

    @hosts.untraced
    def scale(self, outputs: _Outputs, *, loss: Tensor | float | None = None) -> _Outputs:
        """Multiply a loss, or containers of tensors, by the scale.

        Parameters
        ----------
        outputs : tensor, mapping or iterable of tensors
            On any devices; part of their autograd graph. InvalidValueError for any other object.
        loss : tensor, number or False, optional
            As in :meth:`gradscale.GradScaler.scale`.

        Returns
        -------
        same as outputs
            New tensors, with torch's promotion: a 0-d half loss becomes float32 (ShardedGradScaler keeps its dtype).
            Iterables that are no containers come back as iterators. The very same object if the scaler is disabled.
            No host read, no collective.
        """
        return super().scale(outputs, loss=loss)

    @overload
    def unscale_(self, optimizer: Optimizer) -> None: ...
    @overload
    def unscale_(self, optimizer: Optimizer, *, max_norm: float, norm_over: NormOver | None = None) -> Tensor: ...
    @overload
    def unscale_(
        self, optimizer: Optimizer, *, max_norm: float | None, norm_over: NormOver | None = None
    ) -> Tensor | None: ...
    @hosts.untraced
    @check_arguments
    def unscale_(
        self, optimizer: Optimizer, *, max_norm: float | None = None, norm_over: NormOver | None = None
    ) -> Tensor | None:
        """Divide an optimizer's gradients by the scale and judge them; at most once in an iteration.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
            Its gradients are overwritten. Sparse ones of float16, and all with ``max_norm``, are coalesced first,
            which replaces ``.grad``.
        max_norm : float, optional
            Clip them to this global 2-norm in the same pass, as ``torch.nn.utils.clip_grad_norm_`` does afterwards:
            that of DTensors over their mesh, whatever the group is. Default: the constructor's.
        norm_over : {"rank", "group"}, optional
            For plain tensors over a group, as in :meth:`gradscale.GradScaler.unscale_`.

        Returns
        -------
        tensor or None
            With ``max_norm`` the norm before clipping, 0-d float32. No host read, but a wait for the device if its
            gradients are agreed on over a group of the CPU, as gloo's. Over a group this starts the agreement, which
            ``step`` finishes; the norm of DTensors costs an all-reduce of its own. On the CPU one more announces it;
            elsewhere ranks of which some ask for no norm wait until the time is over.

        Raises
        ------
        InvalidValueError
            For float16 gradients that are not allowed, and ``max_norm`` for DTensors of meshes over different ranks.
        SharedMemoryError
            For a gradient that is expanded, or whose elements overlap when the optimizer's parameters are met first.
        InvalidTypeError
            When a parameter is no tensor, or a gradient is one of integers.
        CallOrderError
            As in :meth:`gradscale.GradScaler.unscale_`, and so is the warning.
        """
        if self._rejoins:
            self._join()
        norm: Tensor | None = super().unscale_(optimizer, max_norm=max_norm, norm_over=norm_over)
        return norm

    @functools.partial(hosts.untraced, recursive=False)
    def step(
        self,
        optimizer: Optimizer,
        *args: Any,
        loss: Tensor | float | None = None,
        norm: Tensor | float | None = None,
        batch: Batch = None,
        **kwargs: Any,
    ) -> float | None:
        """Step an optimizer unless one of its gradients, on any rank, is not finite.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
            Its ``step`` is called through the attribute, exactly when the step is really made. One with ``fused=True``
            is always called, and skips in its kernel, by its attributes ``found_inf`` and ``grad_scale``.
        *args, **kwargs
            Passed on; a closure as in :meth:`gradscale.GradScaler.step`.
        loss, norm, batch : optional
            As in :meth:`gradscale.GradScaler.step`; ``norm`` as ``torch.nn.utils.clip_grad_norm_`` returns it, also a
            DTensor.

        Returns
        -------
        float or None
            The result of ``optimizer.step``, also one that is no number; None for a skipped step. The errors are those
            of :meth:`gradscale.GradScaler.step`.

        Notes
        -----
        One host read. None for a fused optimizer on a device, but a wait for the device over a group of the CPU, as
        gloo's; its desync is raised in one of the next calls of each rank, and until then no rank steps. A rank that
        already waits for one that has ended raises CollectiveTimeoutError or BackendError.

        A scale that is read and is not finite or not above 0, since something has written to the scaler's tensors, is a
        BackendError; ``load_state_dict`` begins the iteration again.
        """
        if not self._enabled:
            return super().step(optimizer, *args, loss=loss, norm=norm, batch=batch, **kwargs)  # type: ignore[no-any-return]
        has_inputs = loss is not None or norm is not None or batch is not None
        inputs = checked_inputs(optimizer, loss, norm, batch, kwargs) if has_inputs else None
        if self._rejoins:
            self._join()
        if (
            loss is not None
            and iteration_of(self).agreement.is_alone
            and not self._has_group
            and _all_ranks(self._timeout)
        ):
            msg = (
                f"step(loss=) of {type(self).__name__} would skip on this rank alone, since it agrees with no other: "
                f"give it group=torch.distributed.group.WORLD, or take a StepGuard"
            )
            raise InvalidValueError(msg)
        # An override, by a subclass or a framework, is called.
        unscale: Any = self.unscale_
        if getattr(unscale, "__func__", None) is GradScaler.unscale_:
            unscale = None
        if self._busy.locked():
            forbid_call("step()")
        is_guard = isinstance(self, StepGuard)
        if is_guard:
            self._end_if_over()
        with self._busy:
            step = Step(iteration_of(self), optimizer, args, kwargs, self._record, inputs, self, unscale)
            try:
                with _Untraced(step):
                    if step.calls_optimizer:
                        # From a frame that the compiler has not left, so that it compiles the optimizer.
                        step.returned = optimizer.step(*step.args, **step.kwargs)
            finally:
                # Closed even if Ctrl-C came before the first line of the step's exit.
                step.around = None
        if is_guard:
            self._end_if_over()
        return step.returned  # type: ignore[no-any-return]

    update = hosts.untraced(gradscale.GradScaler.update)
    _end_if_over = hosts.untraced(gradscale.GradScaler._end_if_over)
    refuse = hosts.untraced(gradscale.GradScaler.refuse)
    step_schedule = hosts.untraced(gradscale.GradScaler.step_schedule)

    def set_group(self, group: Group | None) -> None:
        """Agree over another group, as in :class:`gradscale.ShardedGradScaler`; None for the constructor's default."""
        iteration_of(self).require_boundary("set_group()")
        self._rejoins = group is None and (self._is_sharded or self._judges_losses)
        self._has_group = group is not None
        if group is None:
            self._agree_over(self._default_groups())
        elif self._enabled:
            groups = group if isinstance(group, (list, tuple)) else [group]
            adapters = [_wrap(one, self._timeout) for one in groups]
            self._agree_over(registry.all_collectives_for(adapters, self._timeout))

    # Saving and loading.

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain Python values; empty when disabled. One host read."""
        saved = super().state_dict()
        for progress in iteration_of(self).progresses.all:
            if progress.stage.is_over and progress.pending is not None and progress.pending.groups:
                # Torch's keys do not say that the weights are newer than the scale, which ranks have to compare.
                return saved
        return hosts.as_torchs_state_dict(saved, _current(self).policy)

    def __getstate__(self) -> dict[str, object]:
        """Return the attributes that torch's scalers pickle, and under one more key the rest, without tensors."""
        attributes = super().__getstate__()
        attributes.pop("process_group", None)
        return hosts.as_torchs_pickle(self, self._device) | {"gradscale": attributes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "gradscale" in state:
            super().__setstate__(state["gradscale"])
            own = hosts.as_torchs_pickle(self, self._device)
            # One of torch's that was restored from ours, and trained on, has the key as it was.
            if own == {name: state.get(name) for name in own}:
                return
        else:
            self.__dict__.update(type(self)(state["_device"], enabled=state["_enabled"]).__dict__)
        if state["_enabled"]:
            self.load_state_dict(hosts.state_dict_of_pickle(state))

    # Read by apex, NeMo, accelerate, Composer and torch's own fused optimizers, beyond torch's public methods.

    @property
    def _per_optimizer_states(self) -> hosts.OptimizerStates:
        return hosts.OptimizerStates(self)

    @_per_optimizer_states.setter
    def _per_optimizer_states(self, states: Mapping[int, object]) -> None:
        """Replace all states, by none to begin the iteration again; the mapping that was read here changes nothing."""
        if isinstance(states, hosts.OptimizerStates) and states.scaler is self:
            return
        entries = validation.mapping("_per_optimizer_states", states)
        self._per_optimizer_states.clear()
        self._per_optimizer_states.update(entries)

    @property
    def _init_scale(self) -> float:
        return float(_current(self).first["scale"])

    @_init_scale.setter
    def _init_scale(self, value: float) -> None:
        _current(self).set_initial("scale", validation.scale("_init_scale", value))

    @property
    def _init_growth_tracker(self) -> int:
        return int(_current(self).first.get("growth_tracker", 0))

    @_init_growth_tracker.setter
    def _init_growth_tracker(self, value: int) -> None:
        tracker = validation.integer("_init_growth_tracker", value, 0, validation.LARGEST_INT32)
        _current(self).set_initial("growth_tracker", tracker)

    _scale = _field("scale")
    _growth_tracker = _field("growth_tracker")
    _growth_factor = property(gradscale.GradScaler.get_growth_factor, gradscale.GradScaler.set_growth_factor)
    _backoff_factor = property(gradscale.GradScaler.get_backoff_factor, gradscale.GradScaler.set_backoff_factor)
    _growth_interval = property(gradscale.GradScaler.get_growth_interval, gradscale.GradScaler.set_growth_interval)
    _unscale_grads_ = _not_called("_unscale_grads_")
    _maybe_opt_step = _not_called("_maybe_opt_step")
    _get_scale_async = _not_called("_get_scale_async")
    _check_scale_growth_tracker = _not_called("_check_scale_growth_tracker")
    # Of torch's ShardedGradScaler alone.
    _amp_update_scale_cpu_ = _not_called("_amp_update_scale_cpu_")

    def _make_state(self, dev: torch.device | str) -> None:
        """Make the state on a device, if there is none, as a framework does that steps before the first loss."""
        current = _current(self)
        current.materialize(torch.empty((), device=dev))
        current.mark_adapted()
        iteration_of(self).parts.mistakes.allow_unscaled_loss()

    _lazy_init_scale_growth_tracker = _not_called("_lazy_init_scale_growth_tracker", _make_state)

    def _judge_gradients(self, optimizer: Optimizer) -> Mapping[torch.device, Tensor]:
        """Judge gradients and leave them scaled; the stage stays. Over a group, this is the group's verdict."""
        iteration = iteration_of(self)
        progress = iteration.progress_of(optimizer)
        if progress.is_incomplete:
            # Reading the verdict raises, since some gradients may be divided already.
            iteration.verdict(progress)
        request = Request(divides=False, are_scaled=progress.stage.is_ready)
        is_check = not iteration.scaling.is_inside_closure
        # The new verdict replaces the one that the optimizer was stepped by, as in torch.
        iteration.unscale(progress, optimizer, request, is_framework_check=is_check, then=progress.stage)
        return hosts.flags_by_device(iteration, progress)

    _check_inf_per_device = _not_called("_check_inf_per_device", _judge_gradients)

    def _found_inf_per_device(self, optimizer: Optimizer) -> Mapping[torch.device, Tensor]:
        """Return the verdict on each device of an optimizer's gradients, as the group has agreed."""
        iteration = iteration_of(self)
        return hosts.flags_by_device(iteration, iteration.progress_of(optimizer))

    def _default_groups(self) -> Sequence[Collectives]:
        # Each rank has a loss of its own, also where all hold the same gradients.
        return _all_ranks(self._timeout) if self._judges_losses else ()

    @property
    def _judges_losses(self) -> bool:
        guard = iteration_of(self).parts.guard
        return guard is not None and "loss" in guard.rule.of

    def _join(self) -> None:
        """Agree over the default groups once they are there, which may be later than the scaler."""
        joined = iteration_of(self).parts.agreement.standing.groups
        if not joined:
            groups = self._default_groups()
            if groups or (joined is None and default_group() is not None):
                self._agree_over(groups)


class StepGuard(GradScaler, gradscale.StepGuard):
    """Skip bad steps, on all ranks together, and scale nothing: for bfloat16 and float32, in place of a scaler.

    Parameters
    ----------
    group : ProcessGroup, DeviceMesh, Collectives, or list of these, optional
        The ranks that skip together. Default: all ranks once torch.distributed is initialized and there are several,
        with DDP, too, since each rank has a loss of its own.
    timeout, enabled, on_skip, on_update, diagnose, history_size : optional
        As in :class:`gradscale.StepGuard`.
    max_norm, norm_over, skip, warn_after, give_up_after, hold : optional
        As in :class:`gradscale.StepGuard`. InvalidTypeError for settings of a scale, and for ``device``.

    Notes
    -----
    It is a scaler of :class:`gradscale_torch.GradScaler`'s kind, and so of torch's, whose scale is always 1: frameworks
    that take a scaler take it. Each ``step`` ends its iteration, as in :class:`gradscale.StepGuard`. Gradients may be
    of any dtype, on any device.

    Examples
    --------
    >>> import gradscale, gradscale_torch, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer, guard = torch.optim.SGD(model.parameters()), gradscale_torch.StepGuard(skip=gradscale.SkipSpikes())
    >>> loss = model(torch.ones(4, 2)).sum() * torch.nan
    >>> loss.backward()
    >>> guard.step(optimizer, loss=loss)
    >>> (guard.last_step(optimizer).skipped, guard.counts()["taken"])
    (True, 0)
    """

    _is_sharded = True

    @with_options(GuardOptions)
    def __init__(self, **kwargs: Any) -> None:
        options = vars(GuardOptions(**kwargs))
        super().__init__(None, **options | {"allow_fp16_grads": True, "policy": gradscale.StaticScale(1.0)})

    __repr__ = gradscale.StepGuard.__repr__
    update = hosts.untraced(gradscale.StepGuard.update)

    @hosts.untraced
    def keeps(self, loss: Tensor | float) -> bool:
        """Tell whether to make the backward pass of a micro-batch, as :meth:`gradscale.StepGuard.keeps`."""
        if self._rejoins:
            self._join()
        return gradscale.StepGuard.keeps(self, loss)

    def _default_groups(self) -> Sequence[Collectives]:
        return _all_ranks(self._timeout)


def _all_ranks(timeout: float) -> Sequence[Collectives]:
    """Return the default group; nothing if it is this rank alone."""
    world = default_group()
    return () if world is None or world.size() == 1 else [TorchCollectives(None, timeout)]


def _factors(options: ReplacementOptions, *, enabled: bool) -> dict[str, float | None]:
    """Return the factors for a DynamicScale: those that a policy must not contradict, and none if disabled."""
    if not enabled:
        # A disabled scaler of torch's accepts any.
        return dict.fromkeys(FACTORS)
    if options.policy is None:
        return {}
    with reading("a factor"):
        return {x: None for x in FACTORS if getattr(options, x) == getattr(ReplacementOptions, x)}


def _own_rank() -> int | None:
    # Also if every rank decides alone, as under DDP.
    world = default_group()
    return None if world is None else world.rank()


def _require_no_overrides(kind: type[GradScaler]) -> None:
    """Raise InvalidTypeError for a class that overrides a method that is not called here."""
    for name in _NOT_CALLED:
        if inspect.getattr_static(kind, name) is not vars(GradScaler)[name]:
            raise InvalidTypeError(_must_stay(name, f"got {kind.__qualname__}, which overrides it"))


def _available(device: Device, enabled: object) -> bool:
    """Check the device, and tell whether to be enabled: as in torch, not on cuda without CUDA."""
    is_wanted = validation.truth("enabled", enabled)
    # The number of an accelerator, of which torch has 128, or torch's default device: torch looks at neither.
    if device is None or (type(device) is int and device < 128):
        return is_wanted
    if isinstance(device, float) or type(device) is int:
        msg = f"device comes first, and then the scale, got {short_repr(device)}: write init_scale={short_repr(device)}"
        raise InvalidTypeError(msg)
    try:
        kind = torch.device(device).type
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        msg = f'device must be a device or its type, such as "cuda" or "cpu", got {short_repr(device)}: {reason}'
        raise InvalidValueError(msg) from error
    if is_wanted and kind == "cuda" and torch.cuda.amp.common.amp_definitely_not_available():  # type: ignore[no-untyped-call]
        warn_caller("torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.", UserWarning)
        return False
    return is_wanted


def _wrap(group: object, timeout: float) -> object:
    """Wrap an object that only torch takes for a group."""
    # An int is what new_group() gives to ranks that are not in it.
    is_torchs = isinstance(group, int) or is_lookalike(group)
    return registry.get("torch").collectives(group, timeout=timeout) if is_torchs else group


def _current(replacement: GradScaler) -> CurrentScale:
    return iteration_of(replacement).current


class _Untraced(NamedTuple):
    """A step whose two halves the compiler does not trace."""

    step: Step

    @hosts.untraced
    def __enter__(self) -> None:
        self.step.__enter__()

    @hosts.untraced
    def __exit__(self, *error: Any) -> bool:
        return self.step.__exit__(*error)
