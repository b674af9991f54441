"""ShardedGradScaler: a replacement of torch's scaler of this name, whose import takes torch a second."""

# torch's methods return less than ours.
# mypy: disable-error-code="misc"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Looked up once: a framework may put the class of this file in the place of torch's name.
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler

from gradscale.core.messages import shown
from gradscale.core.protocols import Collectives, Policy
from gradscale.errors import InvalidValueError
from gradscale.policies.spikes import SkipSpikes
from gradscale.scaler.reports import HISTORY_SIZE, Diagnose, OnSkip, OnUpdate
from gradscale.scaler.scaler import DEFAULT_TIMEOUT, checked_arguments
from gradscale_torch.amp import Device, GradScaler
from gradscale_torch.collectives import TorchCollectives

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(GradScaler, TorchShardedGradScaler):
    """A replacement of torch's ``torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler``.

    Parameters
    ----------
    device : str, default "cuda"
        As in :class:`GradScaler`.
    init_scale, backoff_factor, growth_factor, growth_interval, enabled
        As in torch, in whose order ``backoff_factor`` comes before ``growth_factor`` here.
    process_group : ProcessGroup, optional
        The ranks to agree with. Default: the default group, looked up when it is first needed.
    group : ProcessGroup, DeviceMesh, Collectives, or list of these, optional
        Instead of ``process_group``: data, tensor, pipeline and expert groups together.
    allow_fp16_grads : bool, default True
        Whether gradients may be float16; torch's ShardedGradScaler takes them.
    timeout : float, default 1800.0
        Seconds to wait for the other ranks.
    policy, on_skip, on_update, diagnose, history_size, skip
        As in :class:`GradScaler`.

    Notes
    -----
    ``policy``, ``diagnose`` and ``skip`` are the same on every rank. Each optimizer costs one all-reduce in an
    iteration, of 104 bytes (over gloo 16), on every rank, whatever it found and even if it holds no gradients.
    ``scale`` keeps the dtype of a half-precision loss, as torch's does.

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
    _is_sharded = True

    @checked_arguments
    def __init__(
        self,
        device: Device = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: object = None,
        *,
        group: object = None,
        allow_fp16_grads: bool = True,
        timeout: float = DEFAULT_TIMEOUT,
        policy: Policy | None = None,
        on_skip: OnSkip | None = None,
        on_update: OnUpdate | None = None,
        diagnose: Diagnose | None = None,
        history_size: int = HISTORY_SIZE,
        skip: SkipSpikes | None = None,
    ) -> None:
        if process_group is not None and group is not None:
            msg = f"give process_group or group=, not both, got {shown(process_group)} and {shown(group)}"
            raise InvalidValueError(msg)
        self.process_group = process_group
        super().__init__(
            device,
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            enabled,
            group=process_group if group is None else group,
            allow_fp16_grads=allow_fp16_grads,
            timeout=timeout,
            policy=policy,
            on_skip=on_skip,
            on_update=on_update,
            diagnose=diagnose,
            history_size=history_size,
            skip=skip,
        )

    def _default_groups(self, timeout: float) -> Sequence[Collectives]:
        # The default group is looked up when it is needed: torch.distributed may not be initialized yet.
        return [TorchCollectives(None, timeout)]
