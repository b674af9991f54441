"""A training step under torch.compile: no more graph breaks than with torch's own scaler, and the same results."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from axes_torch import GradScaler, TorchScaler, torch
from small_torch import assert_same, optimizer_of

pytestmark = [
    pytest.mark.tier("all"),
    pytest.mark.torch,
    # The compiler looks at the gradient of a loss that it has been given.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    # What it imports on the way into torch's optimizers.
    pytest.mark.filterwarnings("ignore:.torch.jit.script.* is deprecated:DeprecationWarning"),
]

INPUTS = [1.0, math.inf, 2.0, 3.0, 4.0]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Forget what was compiled before and after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Run:
    """A model, its optimizer of some kind and a scaler, with one step of training."""

    def __init__(self, make_scaler: Any, kind: str) -> None:
        self.scaler = make_scaler("cpu", init_scale=2.0**10, growth_interval=2)
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        self.optimizer = optimizer_of(kind, self.model.parameters(), lr=0.1)

    def step(self, inputs: Any, explicit: bool) -> Any:
        """Make one iteration, with or without an explicit ``unscale_``."""
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self.model(inputs).float().square().mean()
        # An inf here makes the gradients infinite, and leaves the graph the same.
        self.scaler.scale(loss * inputs.abs().max()).backward()
        if explicit:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_value_(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def train(self, step: Callable[[Any, bool], Any], explicit: bool) -> list[Any]:
        """Make some iterations, one of which overflows, and return what is to be seen after each."""
        seen = []
        for value in INPUTS:
            step(torch.full((2, 3), value), explicit)
            parameters = [parameter.detach().clone() for parameter in self.model.parameters()]
            seen.append([self.scaler.get_scale(), self.scaler._get_growth_tracker(), parameters])
        return seen


def compiled(make_scaler: Any, kind: str, explicit: bool) -> tuple[list[Any], dict[str, int]]:
    """Train with a compiled step; return what was seen, and the graph breaks by their reasons."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    run = Run(make_scaler, kind)
    seen = run.train(torch.compile(run.step, backend="eager"), explicit)
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    return seen, dict(counters["graph_break"])


@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale-clip-step"])
@pytest.mark.parametrize("kind", ["SGD-foreach", "SGD-fused", "Adam-foreach", "Adam-fused"])
def test_a_compiled_step_gives_what_an_eager_one_gives_and_breaks_no_graph_that_torchs_does_not(
    kind: str, explicit: bool
) -> None:
    runs = [Run(make, kind) for make in (GradScaler, TorchScaler)]
    eager, theirs = (run.train(run.step, explicit) for run in runs)
    assert_same(eager, theirs)
    assert [scale for scale, *_ in eager] == [1024.0, 512.0, 512.0, 1024.0, 1024.0]
    seen, breaks = compiled(GradScaler, kind, explicit)
    _, their_breaks = compiled(TorchScaler, kind, explicit)
    assert 0 < sum(breaks.values()) <= sum(their_breaks.values()), (breaks, their_breaks)
    assert [each[:2] for each in seen] == [each[:2] for each in eager]
    for (*_, ours_of), (*_, expected) in zip(seen, eager, strict=True):
        # A compiled Adam computes its bias correction in another order.
        torch.testing.assert_close(ours_of, expected, rtol=1e-4, atol=1e-5)


def test_a_scaled_loss_in_a_compiled_function_is_the_eager_one() -> None:
    for make in (TorchScaler, GradScaler):
        scaler = make("cpu", init_scale=3.0)
        function = torch.compile(functools.partial(_scaled_square, scaler), backend="eager")
        for value in (1.0, 2.0):
            leaf = torch.tensor([value], requires_grad=True)
            scaled = function(leaf)
            scaled.backward()
            assert (scaled.item(), leaf.grad.item()) == (3.0 * value**2, 6.0 * value)


def _scaled_square(scaler: Any, leaf: Any) -> Any:
    return scaler.scale((leaf * leaf).sum())
