"""The rules of loss scalers that cannot be installed, with the states that they save, to go on from.

Each starts at a scale of 256 and grows after 4 steps, as the recorded traces do; ``update`` takes a step and raises
RuntimeError where the original raises, and ``load`` is load_foreign_state of what the original would save.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from libraries import opened
from optimizers import Tree, iterate

from gradscale import GradScaler, ScaleUnderflowError
from gradscale.interop.foreign import ForeignState, load_foreign_state

__all__ = ["RULES", "ApexAmp", "ApexWindow", "DeepSpeed", "Fairseq", "Megatron", "ours"]


def ours(loaded: ForeignState, steps: str) -> list[Any]:
    """Return the scale after each step of a scaler that goes on from a saved state."""
    with opened("numpy") as library:
        scaler, optimizer = GradScaler(), Tree()
        scaler.load_state_dict(loaded.state_dict)
        got: list[Any] = []
        for step in steps:
            try:
                iterate(library, scaler, optimizer, [float("nan") if step == "O" else 1.0])
            except ScaleUnderflowError:
                return [*got, "raised"]
            got.append(scaler.get_scale())
        return got


class Megatron:
    """Also the rule of apex's kernel, and of NeMo, which refill on every clean step and have no minimum."""

    def __init__(self, hysteresis: int, is_nemo: bool = False) -> None:
        self.scale, self.growth, self.left = 256.0, 0, hysteresis
        self.hysteresis, self.is_nemo = hysteresis, is_nemo

    def update(self, overflow: bool) -> None:
        if overflow:
            self.growth = 0
            self.left -= 1
            if self.left <= 0:
                self.scale = self.scale / 2 if self.is_nemo else max(self.scale / 2, 1.0)
            return
        self.growth += 1
        if self.is_nemo:
            self.left = self.hysteresis
        if self.growth == 4:
            self.growth, self.left, self.scale = 0, self.hysteresis, self.scale * 2

    def load(self) -> ForeignState:
        if self.is_nemo:
            saved = {"scale": self.scale, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 4}
            saved |= {"_growth_tracker": self.growth, "_hysteresis_tracker": self.left}
            return load_foreign_state(saved, hysteresis=self.hysteresis)
        scale = np.asarray([self.scale], np.float32)
        saved = {"scale": scale, "growth_tracker": self.growth, "hysteresis_tracker": self.left}
        return load_foreign_state(saved, growth_interval=4, hysteresis=self.hysteresis)


class DeepSpeed:
    """The DynamicLossScaler, or the rule without ZeRO."""

    def __init__(self, hysteresis: int, consecutive: bool, raises: bool, is_stage0: bool = False) -> None:
        self.cur_scale, self.cur_iter, self.last_overflow_iter = 256.0, 0, -1
        self.scale_factor, self.scale_window, self.min_scale = 2.0, 4, 1
        self.delayed_shift = self.cur_hysteresis = hysteresis
        self.consecutive_hysteresis, self.raise_error_at_min_scale = consecutive, raises
        self._is_stage0 = is_stage0

    def update(self, overflow: bool) -> None:
        if overflow:
            if self.cur_hysteresis == 1:
                if self.cur_scale == self.min_scale and self.raise_error_at_min_scale:
                    raise RuntimeError
                self.cur_scale = max(self.cur_scale / 2, self.min_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            stable = self.cur_iter - self.last_overflow_iter - 1
            if stable > 0 and stable % self.scale_window == 0:
                if not self.consecutive_hysteresis:
                    self.cur_hysteresis = self.delayed_shift
                self.cur_scale *= 2
        self.cur_iter += 1

    @property
    def scale(self) -> float:
        return self.cur_scale

    def load(self) -> ForeignState:
        if not self._is_stage0:
            return load_foreign_state({name: value for name, value in vars(self).items() if name[0] != "_"})
        names = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
        return load_foreign_state({name: getattr(self, name) for name in names} | {"dynamic_loss_scale": True})


class ApexAmp:
    """The amp package's."""

    def __init__(self, smallest: float | None) -> None:
        self.scale, self.unskipped, self.smallest = 256.0, 0, smallest

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale = max(self.scale / 2, self.smallest or 0.0)
            self.unskipped = 0
            return
        self.unskipped += 1
        if self.unskipped == 4:
            self.scale, self.unskipped = min(self.scale * 2, 4096.0), 0

    def load(self) -> ForeignState:
        saved = {"loss_scaler0": {"loss_scale": self.scale, "unskipped": self.unskipped}}
        given = {"growth_interval": 4, "max_scale": 4096.0} | ({"min_scale": self.smallest} if self.smallest else {})
        return load_foreign_state(saved, **given)


class ApexWindow:
    """The older one of fp16_utils, and contrib's FP16_Optimizer."""

    def __init__(self, is_contrib: bool) -> None:
        self.scale, self.done, self.last, self.is_contrib = 256.0, 0, -1, is_contrib

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale, self.last = max(self.scale / 2, 1.0), self.done
        elif (self.done - self.last) % 4 == 0:
            self.scale *= 2
        self.done += 1

    def load(self) -> ForeignState:
        saved = {"cur_scale": self.scale, "cur_iter": self.done, "last_overflow_iter": self.last}
        saved |= {"scale_factor": 2.0, "scale_window": 4}
        if self.is_contrib:
            return load_foreign_state(saved | {"dynamic_loss_scale": True}, format="apex")
        return load_foreign_state(saved)


class Fairseq:
    """Saves its scale alone, so that it goes on from there with fresh trackers itself."""

    def __init__(self, tolerance: float, threshold: float | None, smallest: float) -> None:
        self.scale, self.tolerance, self.threshold, self.smallest = 256.0, tolerance, threshold, smallest
        self.forget()

    def forget(self) -> None:
        self.done, self.last_overflow, self.last_rescale, self.overflows = 0, -1, -1, 0

    def update(self, overflow: bool) -> None:
        if overflow:
            self.last_overflow = self.done
            self.overflows += 1
            if self.overflows / (self.done - self.last_rescale) >= self.tolerance:
                self.scale = max(self.scale / 2, self.threshold or 0.0)
                self.last_rescale, self.overflows = self.done, 0
            if self.scale <= self.smallest:
                raise RuntimeError
        elif (self.done - self.last_overflow) % 4 == 0:
            self.scale *= 2
            self.last_rescale = self.done
        self.done += 1

    def load(self) -> ForeignState:
        self.forget()
        given = {"tolerance": self.tolerance, "threshold": self.threshold, "min_scale": self.smallest}
        return load_foreign_state({"loss_scale": self.scale}, growth_interval=4, **given)


RULES: dict[str, Any] = {
    "apex.amp.LossScaler(min=None)": ApexAmp(None),
    "apex.amp.LossScaler(min=1.0)": ApexAmp(1.0),
    "apex.fp16_utils.DynamicLossScaler": ApexWindow(is_contrib=False),
    "apex.contrib.FP16_Optimizer": ApexWindow(is_contrib=True),
    "deepspeed.FP16_Optimizer(stage0)": DeepSpeed(1, consecutive=False, raises=False, is_stage0=True),
}
for _h in (1, 2, 3):
    RULES[f"megatron.DynamicGradScaler(h={_h})"] = Megatron(_h)
    RULES[f"apex.amp_C.update_scale_hysteresis(h={_h})"] = Megatron(_h, is_nemo=True)
    for _consecutive in (False, True):
        for _raises in (False, True):
            _name = f"deepspeed.DynamicLossScaler(h={_h},consecutive={_consecutive},raise={_raises})"
            RULES[_name] = DeepSpeed(_h, _consecutive, _raises)
for _tolerance, _threshold, _smallest in [
    (0.0, None, 0.0001),
    (0.3, None, 0.0001),
    (0.0, 8.0, 0.0001),
    (0.0, None, 1.0),
]:
    _name = f"fairseq.DynamicLossScaler(tol={_tolerance},threshold={_threshold},min={_smallest})"
    RULES[_name] = Fairseq(_tolerance, _threshold, _smallest)
