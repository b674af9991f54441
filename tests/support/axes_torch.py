"""Torch and its scalers, for modules of tests that are about nothing else: they are left out where torch is missing."""

import importlib

from axes import require

__all__ = ["GradScaler", "ShardedGradScaler", "StepGuard", "TorchScaler", "gradscale_torch", "torch"]

torch = require("torch")
gradscale_torch = importlib.import_module("gradscale_torch")
GradScaler = gradscale_torch.GradScaler
ShardedGradScaler = gradscale_torch.ShardedGradScaler
StepGuard = gradscale_torch.StepGuard
TorchScaler = torch.amp.GradScaler
