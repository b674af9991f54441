"""Random legal and illegal calls on a scaler with two optimizers, against a small model of the protocol."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from optimizers import Tree
from tiers import examples

from gradscale import CallOrderError, GradScaler

# Some of the loops do not call scale().
pytestmark = [pytest.mark.numpy, pytest.mark.filterwarnings(r"ignore:scale\(\) was not called:UserWarning")]

INTERVAL = 3
LOWEST, HIGHEST = 2.0**-126, 2.0**127
optimizers = st.sampled_from([0, 1])


class Protocol(RuleBasedStateMachine):
    """The model: plain numbers, and for each optimizer a stage and whether its gradients were bad."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = GradScaler(init_scale=2.0**10, growth_interval=INTERVAL)
        self.optimizers = [Tree([np.zeros(1, np.float32)]) for _ in range(2)]
        self.scale_now, self.run, self.iteration = 2.0**10, 0, 1
        self.stages, self.bad = ["ready", "ready"], [False, False]
        self.gradients = [0.0, 0.0]
        self.scale_called, self.state_known = False, False

    def begin(self) -> None:
        """Begin the next iteration of the model."""
        self.iteration += 1
        self.scale_called = False
        self.stages, self.bad = ["ready", "ready"], [False, False]

    def refused(self, call: Callable[[], Any]) -> None:
        """Assert that a call is an error of order."""
        with pytest.raises(CallOrderError):
            call()

    def divide(self, index: int) -> None:
        """Unscale in the model, in float32: gradients that are unscaled again in a later iteration drift away."""
        with np.errstate(all="ignore"):
            self.gradients[index] = float(np.float32(self.gradients[index] / self.scale_now))
        self.bad[index] = not math.isfinite(self.gradients[index])
        self.stages[index] = "unscaled"

    @rule(values=st.tuples(*[st.sampled_from([1.0, -2.0, 0.25, math.inf, math.nan])] * 2))
    def scale_and_backward(self, values: tuple[float, float]) -> None:
        assert float(self.scaler.scale(np.float32(1.0))) == self.scale_now
        self.scale_called = self.state_known = True
        for index, value in enumerate(values):
            with np.errstate(all="ignore"):
                self.gradients[index] = float(np.float32(value * self.scale_now))
            self.optimizers[index].grads = [np.array([self.gradients[index]], np.float32)]

    @rule(index=optimizers)
    def unscale(self, index: int) -> None:
        if self.stages[index] != "ready" or not self.state_known:
            self.refused(lambda: self.scaler.unscale_(self.optimizers[index]))
            return
        self.scaler.unscale_(self.optimizers[index])
        self.divide(index)

    @rule(index=optimizers)
    def step(self, index: int) -> None:
        optimizer = self.optimizers[index]
        if self.stages[index] == "stepped" or not self.state_known:
            self.refused(lambda: self.scaler.step(optimizer))
            return
        if self.stages[index] == "ready":
            self.divide(index)
        before = optimizer.steps
        returned = self.scaler.step(optimizer)
        assert (returned, optimizer.steps) == ((None, before) if self.bad[index] else ("stepped", before + 1))
        self.stages[index] = "stepped"
        report = self.scaler.last_step(optimizer)
        expected = (self.bad[index], self.scale_now, int(self.bad[index]), self.iteration)
        assert (report.skipped, report.scale, report.nonfinite, report.iteration) == expected

    @rule()
    def update(self) -> None:
        judged = [index for index in range(2) if self.stages[index] != "ready"]
        if not judged:
            self.refused(self.scaler.update)
            return
        self.scaler.update()
        if any(self.bad[index] for index in judged):
            self.scale_now, self.run = max(self.scale_now / 2, LOWEST), 0
        elif judged:
            self.run += 1
            if self.run == INTERVAL:
                self.scale_now, self.run = min(self.scale_now * 2, HIGHEST), 0
        self.begin()

    @rule(exponent=st.integers(-126, 127), as_array=st.booleans())
    def update_with_a_new_scale(self, exponent: int, as_array: bool) -> None:
        self.scaler.update(np.array([2.0**exponent], np.float32) if as_array else 2.0**exponent)
        self.scale_now, self.state_known = 2.0**exponent, True
        self.begin()

    @rule(how=st.sampled_from(["pickle", "deepcopy", "same", "fresh"]))
    def copy_or_load(self, how: str) -> None:
        saved = json.loads(json.dumps(self.scaler.state_dict()))
        other = GradScaler(init_scale=3.0)
        roads: dict[str, Callable[[], Any]] = {
            "pickle": lambda: pickle.loads(pickle.dumps(self.scaler)),
            "deepcopy": lambda: copy.deepcopy(self.scaler),
            "same": lambda: self.scaler.load_state_dict(saved),
            "fresh": lambda: other.load_state_dict(saved),
        }
        if how != "fresh" and self.stages != ["ready", "ready"]:
            self.refused(roads[how])
            return
        made = roads[how]()
        self.scaler = {"same": self.scaler, "fresh": other}.get(how, made)
        # A loss that has been scaled since the last update is under way in a scaler that goes on, and not in a new one.
        self.scale_called = self.scale_called and how != "fresh"
        self.stages, self.bad = ["ready", "ready"], [False, False]
        self.state_known = self.state_known or how in ("same", "fresh")

    @invariant()
    def agrees(self) -> None:
        saved = self.scaler.state_dict()
        assert (saved["scale"], saved["_growth_tracker"]) == (self.scale_now, self.run)
        assert saved["iteration"] == self.iteration
        np.testing.assert_array_equal([optimizer.grads[0][0] for optimizer in self.optimizers], self.gradients)


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)
