"""A scaler's random life, held to a plain model in each of its calls: alone, or on every rank of a group.

Legal and illegal calls on several optimizers: overflows on one rank, steps that are left out or come twice, clipping,
scales and settings that are set, state dicts that are loaded, pickles and copies. All ranks draw the same life, and a
fault is one rank's.
"""

from __future__ import annotations

import collections
import copy
import json
import math
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
from scenarios import SGD, rank_and_size

import gradscale

__all__ = ["Model", "live"]

OPTIMIZERS = 3
VALUES = (1.0, -2.0, 0.25)
BAD = (math.inf, -math.inf, math.nan)
MAX_NORM = 0.5
LOWEST, HIGHEST = 2.0**-126, 2.0**127
# How often each call is drawn.
CALLS = {"backward": 4, "unscale": 5, "step": 8, "update": 5, "set_scale": 0.1, "resume": 0.5, "change_setting": 0.2}


class Model:
    """What a scaler does, as plainly as it can be said."""

    def __init__(self, size: int, has_group: bool):
        self.scale, self.run, self.iteration = 2.0**16, 0, 1
        self.growth, self.backoff, self.interval = 2.0, 0.5, 5
        # Whether another rank may have scaled; whether nothing ever was, or since a load; and in this iteration.
        self.has_group, self.is_new, self.is_unused, self.is_fresh, self.is_scaled = has_group, True, True, True, False
        # By optimizer: the gradient on each rank, how far it is in its iteration, and whether one is bad.
        self.gradients = [[0.0] * size for _ in range(OPTIMIZERS)]
        self.begin()

    def begin(self):
        """Begin an iteration."""
        self.stages = ["ready"] * OPTIMIZERS
        self.bad, self.idle = [False] * OPTIMIZERS, [False] * OPTIMIZERS

    def may_unscale(self, k: int) -> bool:
        """Tell whether gradients may be unscaled: after a load zeros alone, or those of a loss that was scaled."""
        if self.is_scaled or not self.is_fresh:
            return True
        if self.scale == 1.0 and (self.has_group or not self.is_new):
            return True
        self.idle[k] = not any(self.gradients[k]) and not self.is_new
        return self.idle[k] or not self.is_unused

    def divided(self, k: int) -> list[float]:
        """Return the gradients of all ranks, unscaled."""
        with np.errstate(all="ignore"):
            return [float(np.float32(value / self.scale)) for value in self.gradients[k]]

    def divide(self, k: int):
        """Unscale in float32: gradients that are unscaled again in a later iteration drift away."""
        self.gradients[k] = self.divided(k)
        self.bad[k] = not all(map(math.isfinite, self.gradients[k]))
        self.stages[k] = "unscaled"

    def update(self):
        """End an iteration in which optimizers have been judged."""
        judged = [k for k in range(OPTIMIZERS) if self.stages[k] != "ready" and not self.idle[k]]
        self.is_fresh = self.is_fresh and not judged
        if not judged:
            pass
        elif any(self.bad):
            self.scale, self.run = max(self.scale * self.backoff, LOWEST), 0
        else:
            self.run += 1
            if self.run >= self.interval:
                grown = self.scale * self.growth
                self.scale, self.run = grown if grown <= HIGHEST else self.scale, 0
        self.iteration += 1
        self.is_scaled = False
        self.begin()

    def state(self):
        """Return what a state dict must say."""
        return {
            "scale": self.scale,
            "_growth_tracker": self.run,
            "iteration": self.iteration,
            "growth_factor": self.growth,
            "backoff_factor": self.backoff,
            "growth_interval": self.interval,
        }


def live(group, calls: int, seed: int):
    """Make so many calls on one rank, comparing each with the model; return what all ranks must have alike.

    Raises
    ------
    AssertionError
        At the first difference, with the last calls.
    """
    life = _Life(group, seed)
    for number in range(calls):
        life.call(compares=number % 10 == 0 or number == calls - 1)
    if life.model.stages != ["ready"] * OPTIMIZERS:
        life.update()
    return {"state": life.scaler.state_dict(), "counts": dict(life.counts)}


class _Life:
    def __init__(self, group, seed: int):
        self.group, self.chance = group, random.Random(seed)
        self.rank, self.size = (0, 1) if group is None else rank_and_size(group)
        self.scaler = self.make()
        self.optimizers = [SGD([np.zeros(1, np.float32)]) for _ in range(OPTIMIZERS)]
        self.model = Model(self.size, has_group=group is not None)
        self.counts: collections.Counter[str] = collections.Counter()
        self.story: collections.deque[str] = collections.deque(maxlen=20)
        # The steps that this rank has left out: iteration and optimizer.
        self.left_out: set[tuple[int, int]] = set()
        if group is not None:
            self.backward()

    def make(self, **settings):
        settings = {"growth_interval": 5} | settings
        if self.group is None:
            return gradscale.GradScaler(**settings)
        return gradscale.ShardedGradScaler(group=self.group, timeout=60.0, **settings)

    def call(self, compares: bool):
        (name,) = self.chance.choices(list(CALLS), list(CALLS.values()))
        self.story.append(name)
        self.counts[name] += 1
        getattr(self, name)()
        if compares:
            saved = self.scaler.state_dict()
            self.require({key: saved[key] for key in self.model.state()}, self.model.state())
        for k, optimizer in enumerate(self.optimizers):
            expected, found = self.model.gradients[k][self.rank], float(optimizer.grads[0][0])
            is_close = math.isclose(found, expected, rel_tol=2e-6, abs_tol=1e-37)
            assert is_close or (math.isnan(found) and math.isnan(expected)), (found, expected, *self.story)

    def require(self, found, expected):
        assert found == expected, (found, expected, f"rank {self.rank} of {self.size}", *self.story)

    def refused(self, call: Callable[[], Any], said: str = ""):
        """Assert that a call is an error of order."""
        self.counts[f"{self.story[-1]} refused"] += 1
        told = "accepted"
        try:
            call()
        except gradscale.CallOrderError as error:
            told = str(error)
        assert told != "accepted", self.story
        assert said in told

    def backward(self):
        model = self.model
        self.require(float(self.scaler.scale(np.float32(1.0))), model.scale)
        model.is_new, model.is_unused, model.is_fresh, model.is_scaled = False, False, False, True
        for k, optimizer in enumerate(self.optimizers):
            values = [self.chance.choice(VALUES) for _ in range(self.size)]
            if self.chance.random() < 0.1:
                values[self.chance.randrange(self.size)] = self.chance.choice(BAD)
            with np.errstate(all="ignore"):
                # At the largest scales gradients overflow by themselves, on every rank.
                model.gradients[k] = [float(np.float32(value * model.scale)) for value in values]
            optimizer.grads = [np.array([model.gradients[k][self.rank]], np.float32)]

    def unscale(self):
        k, how = self.chance.randrange(OPTIMIZERS), self.chance.choice(["plain", "plain", "rank", "group"])
        if self.model.stages[k] != "ready":
            self.refused(lambda: self.scaler.unscale_(self.optimizers[k]))
            return
        if not self.model.may_unscale(k):
            self.refuse_unscaled(k, self.scaler.unscale_)
            return
        self.model.divide(k)
        clip: dict[str, Any] = {}
        if how == "rank" and len({abs(value) for value in self.model.gradients[k]}) > 1:
            # The ranks do not hold the same gradients.
            how = "group"
        # Squares of gradients that have drifted away might overflow.
        if how != "plain" and not any(4.0 < abs(value) < math.inf for value in self.model.gradients[k]):
            clip = {"max_norm": MAX_NORM} | ({} if self.group is None else {"norm_over": how})
        returned = self.scaler.unscale_(self.optimizers[k], **clip)
        if clip and self.model.bad[k]:
            # What becomes of gradients that nobody steps with is not said.
            self.model.gradients[k][self.rank] = float(self.optimizers[k].grads[0][0])
        elif clip:
            values = self.model.gradients[k]
            whole = math.sqrt(sum(value**2 for value in values))
            norms = [whole if how == "group" else abs(value) for value in values]
            assert math.isclose(float(returned), norms[self.rank], rel_tol=2e-6, abs_tol=1e-18), self.story
            pairs = zip(values, norms, strict=True)
            self.model.gradients[k] = [value * min(MAX_NORM / (norm + 1e-6), 1.0) for value, norm in pairs]

    def step(self):
        k = self.chance.randrange(OPTIMIZERS)
        optimizer, model = self.optimizers[k], self.model
        if model.stages[k] == "stepped" and (model.iteration, k) not in self.left_out:
            self.refused(lambda: self.scaler.step(optimizer))
            return
        if model.stages[k] == "stepped":
            self.counts["step refused"] += 1
            return
        if model.stages[k] == "unscaled" and model.bad[k] and self.chance.random() < 0.5:
            # One rank alone may leave out a step that all skip.
            self.counts["left out"] += 1
            if self.rank == self.chance.randrange(self.size):
                model.stages[k] = "stepped"
                self.left_out.add((model.iteration, k))
                self.counts["skipped"] += 1
                return
        if model.stages[k] == "ready":
            if not model.may_unscale(k):
                self.refuse_unscaled(k, self.scaler.step)
                return
            model.divide(k)
        before, bad = optimizer.steps, model.bad[k]
        returned = self.scaler.step(optimizer)
        self.require((returned, optimizer.steps), (None, before) if bad else ("moved", before + 1))
        model.stages[k] = "stepped"
        self.counts["skipped" if bad else "stepped"] += 1
        report = self.scaler.last_step(optimizer)
        expected = (bad, model.scale, model.iteration, bad)
        self.require((report.skipped, report.scale, report.iteration, report.nonfinite > 0), expected)
        # The model is never broken, whatever its gradients are.
        diagnosis = self.scaler.diagnose(optimizer, params=optimizer.weights, state={"past": optimizer.weights})
        self.require((diagnosis.broken, diagnosis.cause in ("weights", "optimizer state")), ((), False))

    def refuse_unscaled(self, k: int, call: Callable[[Any], Any]):
        """Assert that gradients of a loss that no rank has scaled are an error; over a group they are divided."""
        self.refused(lambda: call(self.optimizers[k]), r"scale() has never been called")
        if self.group is not None:
            self.model.divide(k)
            self.model.stages[k], self.model.bad[k] = "ready", False

    def update(self):
        # A step that is left out after unscale_ counts all the same.
        if self.model.stages == ["ready"] * OPTIMIZERS:
            self.refused(self.scaler.update)
            return
        self.scaler.update()
        self.model.update()

    def set_scale(self):
        wanted = 2.0 ** self.chance.randint(-126, 127)
        self.scaler.update(np.array([wanted], np.float32) if self.chance.random() < 0.5 else wanted)
        self.model.scale, self.model.is_scaled, self.model.is_new = wanted, False, False
        self.model.iteration += 1
        self.model.begin()

    def resume(self):
        """Go on with a copy, or with a state dict that is loaded."""
        how = self.chance.choice(["pickle", "deepcopy", "same", "fresh"])
        saved = json.loads(json.dumps(self.scaler.state_dict()))
        other = self.make(init_scale=3.0)
        roads: dict[str, Callable[[], Any]] = {
            "pickle": lambda: pickle.loads(pickle.dumps(self.scaler)),
            "deepcopy": lambda: copy.deepcopy(self.scaler),
            "same": lambda: self.scaler.load_state_dict(saved),
            "fresh": lambda: other.load_state_dict(saved),
        }
        if how in ("pickle", "deepcopy") and self.model.stages != ["ready"] * OPTIMIZERS:
            self.refused(roads[how])
            return
        made = roads[how]()
        self.scaler = {"same": self.scaler, "fresh": other}.get(how, made)
        if how == "pickle" and self.group is not None:
            self.refused(lambda: copy.copy(made).step(self.optimizers[0]), "set_group")
            self.scaler.set_group(self.group)
        if how in ("same", "fresh"):
            is_kept = how == "same" and self.model.stages == ["ready"] * OPTIMIZERS
            self.model.is_new, self.model.is_fresh = False, True
            self.model.is_scaled &= is_kept
            self.model.is_unused |= not is_kept
        elif self.model.is_fresh and self.model.is_scaled:
            # The gradients of a loss that was scaled before a load are the original's.
            self.model.is_scaled, self.model.is_unused = False, True
        self.model.begin()

    def change_setting(self):
        if self.model.stages != ["ready"] * OPTIMIZERS:
            return
        name = self.chance.choice(["growth_interval", "growth_factor", "backoff_factor"])
        value = self.chance.choice({"growth_interval": [1, 4, 9], "growth_factor": [2.0, 4.0]}.get(name, [0.5, 0.25]))
        getattr(self.scaler, f"set_{name}")(value)
        setattr(self.model, {"growth_interval": "interval"}.get(name, name.partition("_")[0]), value)
