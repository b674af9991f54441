"""ShardedGradScaler: a replacement of torch's scaler of this name, whose import takes torch a second."""

# torch's methods return less than ours.
# mypy: disable-error-code="misc"

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

# Looked up once: a framework may rebind torch's name to the class of this file.
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler

from gradscale.core.protocols import Collectives, Policy
from gradscale.errors import InvalidValueError, short_repr
from gradscale.scaler.options import CommonOptions, GroupOptions, with_options
from gradscale_torch.amp import Device, GradScaler
from gradscale_torch.groups import TorchCollectives


@dataclasses.dataclass
class ShardedReplacementOptions(CommonOptions, GroupOptions):
    """The arguments of torch's scaler, and the options of its replacement."""

    device: Device = "cuda"
    init_scale: float = 2.0**16
    backoff_factor: float = 0.5
    growth_factor: float = 2.0
    growth_interval: int = 2000
    enabled: bool = True
    process_group: object = None
    _: dataclasses.KW_ONLY
    allow_fp16_grads: bool = True
    policy: Policy | None = None


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
    timeout, policy, on_skip, on_update, diagnose, history_size, max_norm, norm_over, skip, warn_after, give_up_after
        As in :class:`GradScaler`.

    Notes
    -----
    ``scale`` keeps the dtype of a half-precision loss, as torch's does. Which options are the same on every rank, and
    what the ranks send each other, is as in :class:`gradscale.ShardedGradScaler`.

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

    @with_options(ShardedReplacementOptions)
    def __init__(self, **kwargs: Any) -> None:
        options = vars(ShardedReplacementOptions(**kwargs))
        self.process_group, group = options.pop("process_group"), options["group"]
        if self.process_group is not None and group is not None:
            got = f"{short_repr(self.process_group)} and {short_repr(group)}"
            msg = f"give process_group or group=, not both, got {got}"
            raise InvalidValueError(msg)
        super().__init__(**options | {"group": self.process_group if group is None else group})

    def _default_groups(self) -> Sequence[Collectives]:
        # The default group is looked up when it is needed: torch.distributed may not be initialized yet.
        return [TorchCollectives(None, self._timeout)]
