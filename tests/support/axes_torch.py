"""Torch and its scalers, for modules of tests that are about nothing else: they are left out where torch is missing."""

from __future__ import annotations

import importlib
from typing import Any

from axes import require

__all__ = ["GradScaler", "ShardedGradScaler", "StepGuard", "TorchScaler", "gradscale_torch", "torch"]

torch: Any = require("torch")
gradscale_torch: Any = importlib.import_module("gradscale_torch")
GradScaler: Any = gradscale_torch.GradScaler
ShardedGradScaler: Any = gradscale_torch.ShardedGradScaler
StepGuard: Any = gradscale_torch.StepGuard
TorchScaler: Any = torch.amp.GradScaler
