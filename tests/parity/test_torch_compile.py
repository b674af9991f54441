"""A training step under torch.compile: no more graph breaks than with torch's own scaler, and the same results."""

from __future__ import annotations

import math

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


def trained(make_scaler, kind: str, explicit: bool, compiles: bool = False):
    """Train with a step that is compiled or not; return what is to be seen after each, and how often a graph broke."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    scaler = make_scaler("cpu", init_scale=2.0**10, growth_interval=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    optimizer = optimizer_of(kind, model.parameters(), lr=0.1)

    def step(inputs):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(inputs).float().square().mean()
        # An inf here makes the gradients infinite, and leaves the graph the same.
        scaler.scale(loss * inputs.abs().max()).backward()
        if explicit:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()

    run, seen = torch.compile(step, backend="eager") if compiles else step, []
    for value in (1.0, math.inf, 2.0, 3.0, 4.0):
        run(torch.full((2, 3), value))
        parameters = [parameter.detach().clone() for parameter in model.parameters()]
        seen.append([scaler.get_scale(), scaler._get_growth_tracker(), parameters])
    torch._dynamo.reset()
    assert not compiles or counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    return seen, sum(counters["graph_break"].values())


@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale-clip-step"])
@pytest.mark.parametrize("kind", ["SGD-foreach", "SGD-fused", "Adam-foreach", "Adam-fused"])
def test_a_compiled_step_gives_what_an_eager_one_gives_and_breaks_no_graph_that_torchs_does_not(
    kind: str, explicit: bool
):
    eager, _ = trained(GradScaler, kind, explicit)
    assert_same(eager, trained(TorchScaler, kind, explicit)[0])
    assert [scale for scale, *_ in eager] == [1024.0, 512.0, 512.0, 1024.0, 1024.0]
    seen, breaks = trained(GradScaler, kind, explicit, compiles=True)
    assert 0 < breaks <= trained(TorchScaler, kind, explicit, compiles=True)[1]
    assert [each[:2] for each in seen] == [each[:2] for each in eager]
    # A compiled Adam computes its bias correction in another order.
    torch.testing.assert_close([each[2] for each in seen], [each[2] for each in eager], rtol=1e-4, atol=1e-5)
