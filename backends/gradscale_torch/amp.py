"""GradScaler and ShardedGradScaler: replacements of torch's scalers of these names, argument by argument."""

# torch's attributes are properties here, and what its methods return is more.
# mypy: disable-error-code="override"

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, Unpack, cast, overload

import torch

# Looked up once: a host may put the classes of this file in the place of torch's names.
from torch.amp import GradScaler as TorchGradScaler

import gradscale
from gradscale import registry
from gradscale.core import validation
from gradscale.core.clipping import checked_norm
from gradscale.core.identity import IdentityMap
from gradscale.core.messages import reading, shown
from gradscale.core.protocols import Collectives
from gradscale.core.vector import Purpose, Verdict
from gradscale.errors import InvalidTypeError, InvalidValueError
from gradscale.reports.overflow import OverflowReport
from gradscale.reports.recorder import OnSkip, OnUpdate
from gradscale.reports.steps import StepReport
from gradscale.scaler.exchange import Exchange
from gradscale.scaler.iteration import Turn
from gradscale.scaler.options import DEFAULT_TIMEOUT, CommonOptions, with_options
from gradscale.scaler.stepper import find_closure
from gradscale_torch.checkpoint import as_torchs_pickle, as_torchs_state_dict, state_dict_of_pickle
from gradscale_torch.compiling import untraced, untraced_but_for_calls, warn_caller
from gradscale_torch.fused import steps_by_itself
from gradscale_torch.groups import is_lookalike
from gradscale_torch.kernels import Found
from gradscale_torch.optimizer_states import OptimizerStates, found_by_device
from gradscale_torch.scaler import made_scaler
from gradscale_torch.state import TensorState
from gradscale_torch.unscaler import Request
from gradscale_torch.verdicts import NO_READS, TensorVerdict

__all__ = ["GradScaler", "ShardedGradScaler"]

Tensor = torch.Tensor
Device: TypeAlias = str | torch.device | int | None

_DEFAULTS = {"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}


@with_options(CommonOptions)
class GradScaler(TorchGradScaler):
    """A replacement of :class:`torch.amp.GradScaler`; over a mesh too, where the parameters are DTensors (FSDP2).

    Parameters
    ----------
    device : str, torch.device or int, default "cuda"
        The device that is trained on. ``"cuda"`` without CUDA warns and disables the scaler, as torch does.
    init_scale, growth_factor, backoff_factor, growth_interval : optional
        As in torch: default 65536.0, 2.0, 0.5, 2000.
    enabled : object, default True
        What is not true makes every method pass through.
    group : ProcessGroup, DeviceMesh, Collectives, or list of these, optional
        What to agree over. Default: the mesh of the optimizer's parameters if they are DTensors, else nothing: this
        process decides alone, which is right where every rank holds all gradients (DDP).
    allow_fp16_grads : bool, default False
        Whether gradients may be float16; torch refuses them.
    timeout : float, default 1800.0
        Seconds to wait for the other ranks.
    **options

    Raises
    ------
    InvalidValueError, InvalidTypeError
        For an argument out of range or of a wrong type, and for a device that does not exist; for a subclass that
        overrides ``_unscale_grads_`` or ``_maybe_opt_step``, which are not called here.

    Notes
    -----
    The methods are torch's. Beyond them there are ``last_step(optimizer)``, ``step_schedule(optimizer, schedule)``,
    closures, and ``unscale_(optimizer, max_norm=)``, which clips in the pass that unscales. One host read in each
    ``step``, none with a fused optimizer on a device, and none elsewhere, but of the scale where gradients are the
    host's and the loss is on a device (CPU offload). ``on_skip``, ``on_update`` and ``diagnose`` have the host read the
    verdict of a fused optimizer on a device in each step, too. Rank 0 is that of ``torch.distributed`` where it is
    initialized.

    In a captured CUDA graph, ``scale``, ``unscale_``, the ``step`` of a fused optimizer and ``update`` do in each
    replay what they do otherwise. What would need the host is a CallOrderError there, the first ``scale`` among it.

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

    def __init__(
        self,
        device: Device = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        group: Any = None,
        allow_fp16_grads: bool = False,
        timeout: float = DEFAULT_TIMEOUT,
        **options: Unpack[CommonOptions],
    ) -> None:
        _require_no_overrides(type(self))
        enabled = _available(device, enabled)
        self._device = device  # type: ignore[assignment]
        self._timeout = validation.timeout(timeout)
        self._scaler = made_scaler(
            device,
            _factors(options, enabled, init_scale, growth_factor, backoff_factor, growth_interval),
            options,
            enabled=enabled,
            keeps_dtype=False,
            allows_fp16=allow_fp16_grads,
            timeout=self._timeout,
        )
        self.set_group(group)

    def __repr__(self: Replacement) -> str:
        return f"{type(self).__name__}(policy={self._scaler.parts.live.policy!r}, enabled={self.is_enabled()})"

    # The iteration.

    @overload
    def scale(self: Replacement, outputs: Tensor) -> Tensor: ...

    @overload
    def scale(self: Replacement, outputs: list[Tensor]) -> list[Tensor]: ...

    @overload
    def scale(self: Replacement, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]: ...

    @overload
    def scale(self: Replacement, outputs: Any) -> Any: ...

    @untraced
    def scale(self: Replacement, outputs: Any) -> Any:
        """Multiply a loss, or containers of tensors, by the scale.

        Parameters
        ----------
        outputs : tensor, mapping or iterable of tensors
            On any devices; part of their autograd graph.

        Returns
        -------
        same as outputs
            New tensors, with torch's promotion: a 0-d half loss becomes float32 (ShardedGradScaler keeps its dtype).
            Iterables that are no containers come back as iterators. The very same object when the scaler is disabled.
            No host read, no collective.

        Raises
        ------
        InvalidValueError
            For anything that is neither.
        """
        return self._scaler.scale(outputs)

    @untraced
    def unscale_(
        self: Replacement, optimizer: torch.optim.Optimizer, *, max_norm: float | None = None
    ) -> Tensor | None:
        """Divide an optimizer's gradients by the scale and judge them; at most once in an iteration.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
            Its gradients are overwritten. Sparse float16 ones are coalesced first, which replaces ``.grad``.
        max_norm : float, optional
            Clip them to this global 2-norm in the same pass, as ``torch.nn.utils.clip_grad_norm_`` does afterwards.

        Returns
        -------
        tensor or None
            With ``max_norm`` the norm before clipping, 0-d float32. No host read. Over a group the agreement is
            started, which ``step`` finishes; the norm of DTensors costs an all-reduce of its own, and on the CPU one
            more that announces it.

        Raises
        ------
        CallOrderError
            When it was called already, or after ``step``, or before any ``scale``.
        InvalidValueError
            For float16 gradients that are not allowed, gradients whose elements share memory, DTensors of two meshes,
            and ``max_norm`` for plain tensors over a group.
        InvalidTypeError
            When a parameter is no tensor.
        """
        largest = None if max_norm is None else checked_norm(max_norm)
        scaler = self._scaler
        norm: Tensor | None = None
        if scaler.is_enabled():
            is_shared = not scaler.parts.agreement.is_alone
            iteration = scaler.iteration
            turn = iteration.begin_unscale(optimizer)
            request = None
            if largest is not None:
                def announce(mesh: Collectives, like: Tensor) -> None:
                    Exchange(iteration, mesh, Purpose.NORM, optimizer, max_norm=largest).announce(like)

                request = Request(max_norm=largest, is_shared=is_shared, announce=announce)
            norm = iteration.unscale(turn, optimizer, request)
        elif largest is not None:
            norm = scaler.parts.unscaler.clip_unscaled(optimizer, largest, scaler.parts.live)
        return norm

    @untraced_but_for_calls
    def step(self: Replacement, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer unless one of its gradients, on any rank, is not finite.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
            Its ``step`` is called through the attribute exactly when the step is really made. One with ``fused=True``
            is called always, and skips in its kernel, by its attributes ``found_inf`` and ``grad_scale``.
        *args, **kwargs
            Passed on; a closure as in :meth:`gradscale.GradScaler.step`.

        Returns
        -------
        object
            What ``optimizer.step`` returned; None for a step that was left out. ``last_step`` tells the two apart.

        Raises
        ------
        CallOrderError
            When it was called already since the last ``update``.
        ScaleDesyncError, CollectiveTimeoutError
            Over a group: on every rank when the states differ; when some rank never comes.

        Notes
        -----
        One host read; none for a fused optimizer on a device, whose desync is then raised in one of the next calls,
        and until then no rank steps.

        What is read tells of a scale that is not finite and above 0, which something has written to the scaler's
        tensors: a BackendError, from which ``load_state_dict`` leads on.
        """
        begun = _begin_plain_step(self._scaler, optimizer, args, kwargs)
        if begun is None:
            return _step_untraced(self, optimizer, args, kwargs)
        turn, verdict = begun
        # Called from a frame that the compiler has not left, so that it compiles the optimizer.
        returned = None if verdict.nonfinite else optimizer.step(*args, **kwargs)
        _end_step(self._scaler, optimizer, turn, verdict)
        return returned

    @untraced
    def update(self: Replacement, new_scale: Any = None) -> None:
        """Adapt the scale, in place, to this iteration's verdicts, and begin the next iteration.

        Parameters
        ----------
        new_scale : number or 1-element tensor, optional
            Set this scale instead; the tracker stays. A tensor is read by the host.

        Raises
        ------
        CallOrderError
            When nothing has been scaled or unscaled since the last ``update``.
        ScaleUnderflowError, InvalidValueError, InvalidTypeError, ScaleDesyncError, CollectiveTimeoutError
            As :meth:`gradscale.GradScaler.update`.
        """
        self._scaler.update(new_scale)

    # What is told.

    def last_step(self: Replacement, optimizer: torch.optim.Optimizer) -> StepReport:
        """Return what happened in the last ``step`` of an optimizer.

        With a fused optimizer on a device, which skips by itself, the first call reads the verdict from the device; of
        a step in a captured graph each call reads what the last replay has found. Else there is no host read beyond
        the one that ``step`` made.

        Raises
        ------
        CallOrderError
            When it has not been stepped by this scaler.
        """
        return self._scaler.last_step(optimizer)

    @untraced
    def step_schedule(
        self: Replacement, optimizer: torch.optim.Optimizer, schedule: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Step a learning-rate schedule unless the last ``step`` of its optimizer was skipped.

        As :meth:`gradscale.GradScaler.step_schedule`. No host read, but for a fused optimizer on a device, whose
        verdict is read as ``last_step`` reads it.
        """
        self._scaler.step_schedule(optimizer, schedule, *args, **kwargs)

    def diagnose(
        self: Replacement, optimizer: Any, names: Any = None, *, loss: Any = None, gather: bool = False
    ) -> OverflowReport:
        """Report inf, NaN, zeros, subnormals and the largest magnitude of each gradient, and what is the cause.

        As :meth:`gradscale.GradScaler.diagnose`: of sparse gradients the stored values, of a DTensor this rank's part.
        The gradients of a fused optimizer that has skipped its step are still scaled, which is allowed for.
        """
        return self._scaler.diagnose(optimizer, names, loss=loss, gather=gather)

    @property
    def history(self: Replacement) -> list[StepReport]:
        """The reports of the last steps of all optimizers, oldest first; ``history_size`` of them at most.

        Steps that a fused optimizer has judged on a device are read from it now. Copies and pickles begin with none.
        """
        return self._scaler.history

    @property
    def on_skip(self: Replacement) -> OnSkip | None:
        """What is called with the StepReport of a skipped step; as of :class:`gradscale.GradScaler`."""
        return self._scaler.on_skip

    @on_skip.setter
    def on_skip(self: Replacement, callbacks: OnSkip | None) -> None:
        self._scaler.on_skip = callbacks

    @property
    def on_update(self: Replacement) -> OnUpdate | None:
        """What is called with the UpdateReport of an iteration; as of :class:`gradscale.GradScaler`."""
        return self._scaler.on_update

    @on_update.setter
    def on_update(self: Replacement, callbacks: OnUpdate | None) -> None:
        self._scaler.on_update = callbacks

    # Settings.

    def get_scale(self: Replacement) -> float:
        """Return the scale as a float, 1.0 when disabled. One host read."""
        return self._scaler.get_scale()

    def is_enabled(self: Replacement) -> bool:
        """Return whether the scaler is enabled."""
        return self._scaler.is_enabled()

    def get_growth_factor(self: Replacement) -> float:
        """Return the growth factor; 1.0 for a policy without one."""
        return self._scaler.get_growth_factor()

    def set_growth_factor(self: Replacement, new_factor: float) -> None:
        """Set the growth factor: above 1."""
        self._scaler.set_growth_factor(new_factor)

    def get_backoff_factor(self: Replacement) -> float:
        """Return the backoff factor; 1.0 for a policy without one."""
        return self._scaler.get_backoff_factor()

    def set_backoff_factor(self: Replacement, new_factor: float) -> None:
        """Set the backoff factor: between 0 and 1."""
        self._scaler.set_backoff_factor(new_factor)

    def get_growth_interval(self: Replacement) -> int:
        """Return the growth interval in clean steps; 1 for a policy without one."""
        return self._scaler.get_growth_interval()

    def set_growth_interval(self: Replacement, new_interval: int) -> None:
        """Set the growth interval, in clean steps; a run that is already as long grows at its next clean step."""
        self._scaler.set_growth_interval(new_interval)

    def set_group(self: Replacement, group: Any) -> None:
        """Agree over another group from now on; None for what the scaler agrees over by default.

        Raises
        ------
        CallOrderError
            In the middle of an iteration, unless its agreement has failed: it is then abandoned.
        """
        scaler = self._scaler
        scaler.iteration.require_boundary("set_group()")
        self._rejoins = group is None
        if group is None:
            scaler.agree_over(self._default_groups())
        elif scaler.is_enabled():
            asked = group if isinstance(group, (list, tuple)) else [group]
            wrapped = [_wrapped(one, self._timeout) for one in asked]
            scaler.agree_over(registry.all_collectives_for(wrapped, self._timeout))

    # Saving and loading.

    def state_dict(self: Replacement) -> dict[str, Any]:
        """Return the whole state as plain Python values; empty when disabled. One host read.

        Torch's five keys; for a policy that they do not describe, also what :meth:`gradscale.GradScaler.state_dict`
        adds to them.
        """
        return as_torchs_state_dict(self._scaler.state_dict(), self._scaler.parts.live.policy)

    def load_state_dict(self: Replacement, state_dict: dict[str, Any]) -> None:
        """Take over a state dict of torch's scalers or of gradscale's; does nothing when disabled.

        The scale's tensor stays the same one, so that captured CUDA graphs see the new value, unless gradients are
        under way that were scaled with the old.

        Raises
        ------
        StateDictError
            When it is empty, lacks one of torch's five keys or holds a bad value; nothing is changed.
        CallOrderError
            In the middle of an iteration.
        """
        self._scaler.load_state_dict(state_dict)

    def __getstate__(self: Replacement) -> dict[str, Any]:
        """Return what is pickled: what torch's scalers pickle, and under one more key the rest, without tensors."""
        kept = {name: value for name, value in self.__dict__.items() if name != "process_group"}
        kept["_scaler"] = copy.copy(self._scaler)
        return as_torchs_pickle(self._scaler, self._device) | {"gradscale": kept}

    def __setstate__(self: Replacement, state: dict[str, Any]) -> None:
        """Restore what was pickled, by one of these or by torch's."""
        if "gradscale" in state:
            self.__dict__.update(state["gradscale"])
            if self._rejoins and self._scaler.parts.agreement.is_unjoined:
                self._scaler.agree_over(self._default_groups())
            return
        self.__dict__.update(type(self)(state["_device"], enabled=state["_enabled"]).__dict__)
        if state["_enabled"]:
            self.load_state_dict(state_dict_of_pickle(state))

    # What optimizers and training frameworks read beyond torch's public methods: apex, NeMo, accelerate, Composer and
    # torch's own fused optimizers do.

    @property
    def _enabled(self: Replacement) -> bool:
        return self._scaler.is_enabled()

    @property
    def _scale(self: Replacement) -> Tensor | None:
        """The scale, 0-d float32; None before the first ``scale``. Kept by identity through ``update``."""
        state = _live(self).tensors()
        return None if state is None else state.scale

    @_scale.setter
    def _scale(self: Replacement, value: Tensor) -> None:
        _live(self).replace_field("scale", value)

    @property
    def _growth_tracker(self: Replacement) -> Tensor | None:
        """The number of clean steps in a row, 0-d int32; None before the first ``scale``."""
        state = _live(self).tensors()
        return None if state is None else state.growth_tracker

    @_growth_tracker.setter
    def _growth_tracker(self: Replacement, value: Tensor) -> None:
        _live(self).replace_field("growth_tracker", value)

    @property
    def _per_optimizer_states(self: Replacement) -> OptimizerStates:
        return OptimizerStates(self._scaler)

    @_per_optimizer_states.setter
    def _per_optimizer_states(self: Replacement, states: Mapping[int, Any]) -> None:
        """Take an empty mapping, which begins the iteration anew, or what was read here."""
        if isinstance(states, OptimizerStates) and states.scaler is self._scaler:
            return
        if len(states) > 0:
            msg = (
                f"_per_optimizer_states can be set to an empty mapping, which begins the iteration anew, got "
                f"{shown(states)}"
            )
            raise InvalidValueError(msg)
        self._scaler.iteration.forget_turns()

    @property
    def _init_scale(self: Replacement) -> float:
        return float(_live(self).first["scale"])

    @_init_scale.setter
    def _init_scale(self: Replacement, value: float) -> None:
        _live(self).replace_first("scale", validation.scale("_init_scale", value))

    @property
    def _init_growth_tracker(self: Replacement) -> int:
        return int(_live(self).first["growth_tracker"])

    @_init_growth_tracker.setter
    def _init_growth_tracker(self: Replacement, value: int) -> None:
        tracker = validation.integer("_init_growth_tracker", value, 0, validation.LARGEST_INT32)
        _live(self).replace_first("growth_tracker", tracker)

    @property
    def _growth_factor(self: Replacement) -> float:
        return self.get_growth_factor()

    @_growth_factor.setter
    def _growth_factor(self: Replacement, value: float) -> None:
        self.set_growth_factor(value)

    @property
    def _backoff_factor(self: Replacement) -> float:
        return self.get_backoff_factor()

    @_backoff_factor.setter
    def _backoff_factor(self: Replacement, value: float) -> None:
        self.set_backoff_factor(value)

    @property
    def _growth_interval(self: Replacement) -> int:
        return self.get_growth_interval()

    @_growth_interval.setter
    def _growth_interval(self: Replacement, value: int) -> None:
        self.set_growth_interval(value)

    @property
    def _unscale_grads_(self: Replacement) -> Callable[..., Any]:
        """Torch's function, which is not called here: it unscales whatever it is given, and judges it for no step."""
        takes_fp16 = isinstance(self, ShardedGradScaler)

        def unscale(optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = takes_fp16) -> Any:
            return TorchGradScaler._unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16)

        return unscale

    @_unscale_grads_.setter
    def _unscale_grads_(self: Replacement, value: object) -> None:
        raise InvalidValueError(_not_called("_unscale_grads_", f"got {shown(value)}"))

    @property
    def _maybe_opt_step(self: Replacement) -> Callable[..., Any]:
        """Torch's function, which is not called here."""
        return functools.partial(TorchGradScaler._maybe_opt_step, self)

    @_maybe_opt_step.setter
    def _maybe_opt_step(self: Replacement, value: object) -> None:
        raise InvalidValueError(_not_called("_maybe_opt_step", f"got {shown(value)}"))

    def _lazy_init_scale_growth_tracker(self: Replacement, dev: torch.device | str) -> None:
        """Make the state on a device, where it is not made yet."""
        _live(self).current(torch.empty((), device=dev))

    def _check_inf_per_device(self: Replacement, optimizer: Any) -> Found:
        """Judge gradients and leave them scaled; the stage stays. Over a group, this is the group's verdict."""
        iteration = self._scaler.iteration
        turn = iteration.turn_of(optimizer)
        stage = turn.stage
        iteration.unscale(turn, optimizer, Request(unscales=False, takes_fp16=True))
        turn.stage = stage
        return found_by_device(iteration, turn)

    def _found_inf_per_device(self: Replacement, optimizer: Any) -> Found:
        """Return the verdict on each device of an optimizer's gradients, as the group has agreed."""
        iteration = self._scaler.iteration
        return found_by_device(iteration, iteration.turn_of(optimizer))

    def _get_scale_async(self: Replacement) -> Tensor | None:
        return self._scale

    def _get_growth_tracker(self: Replacement) -> int:
        """Return the number of clean steps in a row. One host read."""
        if not self._enabled:
            return 0
        return self._init_growth_tracker if self._growth_tracker is None else int(self._growth_tracker.item())

    def _default_groups(self) -> Sequence[Collectives]:
        return ()


@with_options(CommonOptions)
class ShardedGradScaler(TorchGradScaler):
    """A replacement of torch's ``torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler``.

    Parameters
    ----------
    device : str, default "cuda"
        As in :class:`GradScaler`.
    init_scale, backoff_factor, growth_factor, growth_interval, enabled
        As in torch, in whose order ``backoff_factor`` comes before ``growth_factor`` here.
    process_group : ProcessGroup, optional
        What to agree over. Default: the default group, looked up when it is first needed.
    group : ProcessGroup, DeviceMesh, Collectives, or list of these, optional
        Instead of ``process_group``: data, tensor, pipeline and expert groups together.
    allow_fp16_grads : bool, default True
        Whether gradients may be float16; torch's ShardedGradScaler takes them.
    timeout : float, default 1800.0
        Seconds to wait for the other ranks.
    **options

    Notes
    -----
    ``policy`` and ``diagnose`` are the same on every rank. Each optimizer costs one all-reduce of 88 bytes (over gloo
    of 8 for 2 ranks, and of 16 for more) in an iteration, on every rank, whatever it found and even when it holds no
    gradients. ``scale`` keeps the dtype of a half-precision loss, as torch's does.

    Examples
    --------
    >>> import gradscale, gradscale_torch, torch
    >>> def train(group):  # a process group in place of these ranks, which are threads
    ...     weight = torch.ones(2, requires_grad=True)
    ...     optimizer, scaler = torch.optim.SGD([weight]), gradscale_torch.ShardedGradScaler("cpu", group=group)
    ...     scaler.scale(weight.sum() * (torch.inf if group.rank == 1 else 1.0)).backward()
    ...     scaler.step(optimizer)
    ...     return scaler.last_step(optimizer).skipped
    >>> gradscale.testing.run_ranks(2, train)
    [True, True]
    """

    process_group: Any = None
    _rejoins: bool

    def __init__(
        self,
        device: Device = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
        *,
        group: Any = None,
        allow_fp16_grads: bool = True,
        timeout: float = DEFAULT_TIMEOUT,
        **options: Unpack[CommonOptions],
    ) -> None:
        if process_group is not None and group is not None:
            msg = f"give process_group or group=, not both, got {shown(process_group)} and {shown(group)}"
            raise InvalidValueError(msg)
        _require_no_overrides(type(self))
        enabled = _available(device, enabled)
        self.process_group = process_group
        self._device = device  # type: ignore[assignment]
        self._timeout = validation.timeout(timeout)
        self._scaler = made_scaler(
            device,
            _factors(options, enabled, init_scale, growth_factor, backoff_factor, growth_interval),
            options,
            enabled=enabled,
            keeps_dtype=True,
            allows_fp16=allow_fp16_grads,
            timeout=self._timeout,
        )
        self.set_group(process_group if group is None else group)

    def _default_groups(self) -> Sequence[Collectives]:
        from gradscale_torch.collectives import TorchCollectives

        # The default group is looked up when it is needed: torch.distributed may not be initialized yet.
        return [TorchCollectives(None, self._timeout)]

    # All else is as in GradScaler, which this is none of: torch's two are siblings, too.

    __repr__ = GradScaler.__repr__
    scale = GradScaler.scale
    unscale_ = GradScaler.unscale_  # type: ignore[assignment]
    step = GradScaler.step
    update = GradScaler.update
    last_step = GradScaler.last_step
    step_schedule = GradScaler.step_schedule
    diagnose = GradScaler.diagnose
    history: list[StepReport] = vars(GradScaler)["history"]
    on_skip: OnSkip | None = vars(GradScaler)["on_skip"]
    on_update: OnUpdate | None = vars(GradScaler)["on_update"]
    get_scale = GradScaler.get_scale
    is_enabled = GradScaler.is_enabled
    get_growth_factor = GradScaler.get_growth_factor
    set_growth_factor = GradScaler.set_growth_factor
    get_backoff_factor = GradScaler.get_backoff_factor
    set_backoff_factor = GradScaler.set_backoff_factor
    get_growth_interval = GradScaler.get_growth_interval
    set_growth_interval = GradScaler.set_growth_interval
    set_group = GradScaler.set_group
    state_dict = GradScaler.state_dict
    load_state_dict = GradScaler.load_state_dict
    __getstate__ = GradScaler.__getstate__
    __setstate__ = GradScaler.__setstate__
    _enabled: bool = vars(GradScaler)["_enabled"]
    _scale: Tensor | None = vars(GradScaler)["_scale"]
    _growth_tracker: Tensor | None = vars(GradScaler)["_growth_tracker"]
    _per_optimizer_states: OptimizerStates = vars(GradScaler)["_per_optimizer_states"]  # type: ignore[assignment]
    _init_scale: float = vars(GradScaler)["_init_scale"]
    _init_growth_tracker: int = vars(GradScaler)["_init_growth_tracker"]
    _growth_factor: float = vars(GradScaler)["_growth_factor"]
    _backoff_factor: float = vars(GradScaler)["_backoff_factor"]
    _growth_interval: int = vars(GradScaler)["_growth_interval"]
    _unscale_grads_: Callable[..., Any] = vars(GradScaler)["_unscale_grads_"]
    _maybe_opt_step: Callable[..., Any] = vars(GradScaler)["_maybe_opt_step"]
    _lazy_init_scale_growth_tracker = GradScaler._lazy_init_scale_growth_tracker
    _check_inf_per_device = GradScaler._check_inf_per_device  # type: ignore[assignment]
    _found_inf_per_device = GradScaler._found_inf_per_device  # type: ignore[assignment]
    _get_scale_async = GradScaler._get_scale_async
    _get_growth_tracker = GradScaler._get_growth_tracker


Replacement: TypeAlias = GradScaler | ShardedGradScaler


def _factors(
    options: CommonOptions,
    enabled: bool,
    init_scale: float,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> dict[str, Any]:
    """Return the factors for a DynamicScale: those that a policy must not contradict, and none where disabled."""
    if not enabled:
        # A disabled scaler of torch's takes any.
        return {}
    factors = {
        "init_scale": init_scale,
        "growth_factor": growth_factor,
        "backoff_factor": backoff_factor,
        "growth_interval": growth_interval,
    }
    if options.get("policy") is None:
        return factors
    with reading("a factor"):
        return {name: value for name, value in factors.items() if value != _DEFAULTS[name]}


_NOT_CALLED = {
    "_unscale_grads_": "construct it with allow_fp16_grads=True to take float16 gradients",
    "_maybe_opt_step": "construct it with group= to agree on each step with other ranks",
}


def _require_no_overrides(kind: type[Replacement]) -> None:
    """Refuse a class whose own way to unscale or to step would be passed by."""
    for name in _NOT_CALLED:
        if inspect.getattr_static(kind, name) is not vars(GradScaler)[name]:
            raise InvalidTypeError(_not_called(name, f"got {kind.__qualname__}, which overrides it"))


def _not_called(name: str, got: str) -> str:
    return (
        f"{name} must stay as it is, since this scaler does not call it, {got}: {_NOT_CALLED[name]}, or override "
        f"unscale_() or step()"
    )


def _available(device: Any, enabled: object) -> bool:
    """Check the device, and tell whether to be enabled: as torch has it, not on cuda where there is none."""
    is_wanted = validation.truth("enabled", enabled)
    # The number of an accelerator, or torch's default device: torch looks at neither.
    kind = "" if device is None or type(device) is int else _type_of(device)
    if is_wanted and kind == "cuda" and torch.cuda.amp.common.amp_definitely_not_available():  # type: ignore[no-untyped-call]
        warnings.warn("torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.", stacklevel=3)
        return False
    return is_wanted


def _type_of(device: Any) -> str:
    try:
        return torch.device(device).type
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        msg = f'device must be a device or its type, such as "cuda" or "cpu", got {shown(device)}: {reason}'
        raise InvalidValueError(msg) from error


def _wrapped(group: Any, timeout: float) -> Any:
    """Wrap what only torch takes for a group."""
    # An int is what new_group() gives to ranks that are not in it.
    is_torchs = isinstance(group, int) or is_lookalike(group)
    return registry.get("torch").collectives(group, timeout=timeout) if is_torchs else group


def _live(replacement: Replacement) -> TensorState:
    return cast(TensorState, replacement._scaler.parts.live)


@untraced
def _begin_plain_step(
    scaler: gradscale.GradScaler, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Turn, Verdict] | None:
    """Unscale and judge for a plain step; None for a fused optimizer, a closure or a disabled scaler."""
    if not scaler.is_enabled() or steps_by_itself(optimizer):
        return None
    if (args or kwargs) and find_closure(args, kwargs) is not None:
        return None
    cast(TensorState, scaler.parts.live).refuse_capture(NO_READS)
    turn = scaler.iteration.begin_step(optimizer)
    return turn, scaler.iteration.verdict_for_step(turn, optimizer)


@untraced
def _end_step(scaler: gradscale.GradScaler, optimizer: Any, turn: Turn, verdict: Verdict) -> None:
    scaler.end_step(optimizer, turn, verdict)


@untraced
def _step_untraced(replacement: Replacement, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    scaler = replacement._scaler
    is_fused = scaler.is_enabled() and steps_by_itself(optimizer)
    if is_fused and find_closure(args, kwargs) is None and _takes_the_scaler(optimizer):
        return _step_with_the_scaler(replacement, optimizer, args, kwargs)
    return scaler.step(optimizer, *args, **kwargs)


# Whether an optimizer's step takes grad_scaler=.
_asking: IdentityMap[bool] = IdentityMap()


def _takes_the_scaler(optimizer: Any) -> bool:
    if optimizer not in _asking:
        _asking.put(optimizer, "grad_scaler" in inspect.signature(optimizer.step).parameters)
    return _asking[optimizer]


def _step_with_the_scaler(
    replacement: Replacement, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Pass the scaler on to an optimizer that judges and unscales by asking it."""
    scaler = replacement._scaler
    turn = scaler.iteration.begin_step(optimizer)
    warn_caller(
        f"{type(optimizer).__name__}.step takes grad_scaler=, which torch has deprecated: have it read the "
        f"attributes grad_scale and found_inf, which scalers set, instead",
        FutureWarning,
    )
    returned = optimizer.step(*args, **kwargs, grad_scaler=replacement)
    if turn.pending is not None:
        # It may have told its own verdict.
        cast(TensorVerdict, turn.pending).accept()
    verdict = scaler.iteration.verdict(turn) if turn.is_judged else Verdict(0, 0, False, scaler.get_scale())
    scaler.end_step(optimizer, turn, verdict)
    return returned
