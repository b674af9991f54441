"""What is read from the device: a state's bits and trackers, and believed only where a policy can have made it."""

import dataclasses
import math

import numpy as np
import pytest
from libraries import Library
from optimizers import Tree, iterate, iterate_plainly

from gradscale import BackendError, GradScaler, ScaleState, StaticScale
from gradscale.core.backend import Backend
from gradscale.core.validation import LARGEST_INT32, bits_of_float32

# What is read is believed only where a policy can have made it; else the library is named.

BITS = bits_of_float32(65536.0)


class Misplacing(Backend):
    """Reads a state whose pieces a wrong ``concat`` has put elsewhere, once it is told to."""

    values: list[int] | None = None

    def read(self, x) -> list[int]:
        values = super().read(x)
        if self.values is None:
            return values
        # A message holds others before the numbers of the state.
        before = values[:6] if len(values) > 4 else []
        return [*before, *self.values, *values[len(before) + 4 :]]


WRONG = {
    "bits in the growth tracker": [BITS, BITS, 0, 0],
    "bits in the overflow tracker": [BITS, 0, BITS, 0],
    "bits in the rescale tracker": [BITS, 0, 0, BITS],
    "zeros": [0, 0, 0, 0],
    "a negative scale": [bits_of_float32(-1.0), 0, 0, 0],
    "an infinite scale": [bits_of_float32(math.inf), 0, 0, 0],
    "nan": [bits_of_float32(math.nan), 0, 0, 0],
    "a negative tracker": [BITS, -1, 0, 0],
    "a tracker beyond its threshold": [BITS, 2001, 0, 0],
}


@pytest.mark.numpy
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("call", ["state_dict", "step"])
def test_a_read_that_no_policy_can_have_made_names_the_library(strict: Library, wrong: list[int], call: str):
    backend = Misplacing()
    scaler = GradScaler(backend=backend)
    optimizer = Tree()
    iterate(strict, scaler, optimizer)
    before = scaler.state_dict()
    backend.values = wrong
    with pytest.raises(BackendError, match="from array_api_strict that no policy makes, got scale=") as caught:
        scaler.state_dict() if call == "state_dict" else iterate(strict, scaler, optimizer)
    assert optimizer.steps == 1
    assert "growth_tracker 2000, overflow_tracker 0, rescale_tracker 0" in str(caught.value)
    backend.values = None
    if call == "state_dict":
        assert scaler.state_dict() == before
        iterate(strict, scaler, Tree())


@pytest.mark.numpy
def test_a_policy_that_does_not_say_may_use_all_of_int32():
    @dataclasses.dataclass(frozen=True)
    class Own(StaticScale):
        def update(self, state: ScaleState, *, nonfinite) -> ScaleState:  # type: ignore[override]  # noqa: ARG002
            return state._replace(growth_tracker=np.asarray(LARGEST_INT32, np.int32))

    scaler = GradScaler(policy=Own())
    iterate_plainly(scaler, Tree())
    assert scaler.state_dict()["_growth_tracker"] == LARGEST_INT32
