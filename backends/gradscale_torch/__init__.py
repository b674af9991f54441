"""torch tensors, torch.distributed groups, and replacements of torch's scalers for gradscale."""

from typing import TYPE_CHECKING

from gradscale.extras import needs

with needs("gradscale_torch", "torch"):
    from gradscale_torch.amp import GradScaler, StepGuard
    from gradscale_torch.backend import TorchBackend

if TYPE_CHECKING:
    from gradscale_torch.sharded import ShardedGradScaler

__all__ = ["GradScaler", "ShardedGradScaler", "StepGuard", "TorchBackend", "backend"]
__dir__ = __all__.copy

backend = TorchBackend()


def __getattr__(name: str) -> type:
    # torch's class of this name, which it derives from, takes a second to import.
    if name == "ShardedGradScaler":
        from gradscale_torch.sharded import ShardedGradScaler

        return ShardedGradScaler
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
