"""GradScaler and ShardedGradScaler: replacements of torch's scalers of these names, argument by argument."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from gradscale.core.protocols import Collectives, Policy
from gradscale.errors import InvalidValueError
from gradscale.scaler.reporting import HISTORY_SIZE, Diagnose, OnSkip, OnUpdate
from gradscale.scaler.sharded import DEFAULT_TIMEOUT
from gradscale_torch.scaler import TorchScaler

__all__ = ["GradScaler", "ShardedGradScaler"]

_DEFAULTS = {"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}


class GradScaler(TorchScaler):
    """A replacement of :class:`torch.amp.GradScaler`; over a mesh too, where the parameters are DTensors (FSDP2).

    Parameters
    ----------
    device : str, default "cuda"
        Type of the device that is trained on. ``"cuda"`` without CUDA warns and disables the scaler, as torch does.
    init_scale, growth_factor, backoff_factor, growth_interval : optional
        As in torch: default 65536.0, 2.0, 0.5, 2000.
    enabled : bool, default True
        False makes every method pass through.
    policy : Policy, optional
        Instead of the four factors; such as :class:`gradscale.DynamicScale` with hysteresis and bounds.
    group : ProcessGroup, DeviceMesh, Collectives, or list of these, optional
        What to agree over. Default: the mesh of the optimizer's parameters if they are DTensors, else nothing: this
        process decides alone, which is right where every rank holds all gradients (DDP).
    allow_fp16_grads : bool, default False
        Whether gradients may be float16; torch refuses them.
    timeout : float, default 1800.0
        Seconds to wait for the other ranks.
    on_skip, on_update, diagnose, history_size : optional
        As in :class:`gradscale.GradScaler`. The first three have the host read the verdict of a fused optimizer on a
        device in each step. Rank 0 is that of ``torch.distributed`` where it is initialized.

    Raises
    ------
    InvalidValueError, InvalidTypeError
        For an argument out of range or of a wrong type, and for a device that does not exist.

    Notes
    -----
    The methods are torch's. Beyond them there are ``last_step(optimizer)``, closures, and
    ``unscale_(optimizer, max_norm=)``, which clips in the pass that unscales. One host read in each ``step``, none
    with a fused optimizer on a device, and none elsewhere.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        policy: Policy | None = None,
        group: Any = None,
        allow_fp16_grads: bool = False,
        timeout: float = DEFAULT_TIMEOUT,
        on_skip: OnSkip | None = None,
        on_update: OnUpdate | None = None,
        diagnose: Diagnose | None = None,
        history_size: int = HISTORY_SIZE,
    ) -> None:
        super().__init__(
            device,
            factors=_chosen(policy, init_scale, growth_factor, backoff_factor, growth_interval),
            enabled=_available(device, enabled),
            policy=policy,
            group=group,
            allow_fp16_grads=allow_fp16_grads,
            timeout=timeout,
            reporting=_reporting(on_skip, on_update, diagnose, history_size),
        )


class ShardedGradScaler(TorchScaler):
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
    policy, timeout, on_skip, on_update, diagnose, history_size
        As in :class:`GradScaler`; policy and diagnose are the same on every rank.
    allow_fp16_grads : bool, default True
        Whether gradients may be float16; torch's ShardedGradScaler takes them.

    Notes
    -----
    Each optimizer costs one all-reduce of 64 bytes (over gloo of 8 for 2 ranks, and of 16 for more) in an iteration, on
    every rank, whatever it found and even when it holds no gradients. ``scale`` keeps the dtype of a half-precision
    loss, as torch's does.
    """

    _keeps_dtype = True
    process_group: Any = None

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
        *,
        policy: Policy | None = None,
        group: Any = None,
        allow_fp16_grads: bool = True,
        timeout: float = DEFAULT_TIMEOUT,
        on_skip: OnSkip | None = None,
        on_update: OnUpdate | None = None,
        diagnose: Diagnose | None = None,
        history_size: int = HISTORY_SIZE,
    ) -> None:
        if process_group is not None and group is not None:
            msg = f"give process_group or group=, not both, got {process_group!r} and {group!r}"
            raise InvalidValueError(msg)
        self.process_group = process_group
        super().__init__(
            device,
            factors=_chosen(policy, init_scale, growth_factor, backoff_factor, growth_interval),
            enabled=_available(device, enabled),
            policy=policy,
            group=process_group if group is None else group,
            allow_fp16_grads=allow_fp16_grads,
            timeout=timeout,
            reporting=_reporting(on_skip, on_update, diagnose, history_size),
        )

    def _default_groups(self) -> Sequence[Collectives]:
        from gradscale_torch.distributed import TorchCollectives

        # The default group is looked up when it is needed: torch.distributed may not be initialized yet.
        return [TorchCollectives(None, self._timeout)]


def _chosen(
    policy: Policy | None, init_scale: float, growth_factor: float, backoff_factor: float, growth_interval: int
) -> dict[str, Any]:
    """Return the factors for a DynamicScale; none with a policy, which must not be contradicted."""
    factors = {
        "init_scale": init_scale,
        "growth_factor": growth_factor,
        "backoff_factor": backoff_factor,
        "growth_interval": growth_interval,
    }
    return factors if policy is None else {name: value for name, value in factors.items() if value != _DEFAULTS[name]}


def _reporting(
    on_skip: OnSkip | None, on_update: OnUpdate | None, diagnose: Diagnose | None, history_size: int
) -> dict[str, Any]:
    return {"on_skip": on_skip, "on_update": on_update, "diagnose": diagnose, "history_size": history_size}


def _available(device: Any, enabled: bool) -> bool:
    """Check the device's name, and tell whether to be enabled: as torch has it, not on cuda where there is none."""
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        msg = f'device must be the type of a device, such as "cuda" or "cpu", got {device!r}: {reason}'
        raise InvalidValueError(msg) from error
    if enabled and kind == "cuda" and torch.cuda.amp.common.amp_definitely_not_available():  # type: ignore[no-untyped-call]
        warnings.warn("torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.", stacklevel=3)
        return False
    return enabled
