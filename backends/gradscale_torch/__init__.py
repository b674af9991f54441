"""torch tensors, torch.distributed groups, and replacements of torch's scalers for gradscale."""

from gradscale.extras import needs

with needs("gradscale_torch", "torch"):
    from gradscale_torch.amp import GradScaler, ShardedGradScaler
    from gradscale_torch.arrays import TorchBackend

__all__ = ["GradScaler", "ShardedGradScaler", "TorchBackend", "backend"]

backend = TorchBackend()
