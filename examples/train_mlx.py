"""Adapt a frozen bfloat16 network by LoRA with MLX and gradscale, with a bad batch on the way.

    python examples/train_mlx.py
    mlx.launch -n 2 python examples/train_mlx.py

Four runs from the same weights: without the bad batch; with it; with it and a guard, which skips it; and with it in a
compiled step, which does so, too. In the bad batch one number of one rank is infinite. Under mlx.launch every rank
takes its part of each batch, and all ranks agree on each step.

Needs, from a clone of gradscale: python -m pip install '.[mlx]'.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import gradscale
from shared.program import program_needs

with program_needs("examples/train_mlx.py", "mlx", groups=""):
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim
    from mlx.utils import tree_flatten

    import gradscale_mlx

BATCH, WIDTH, RANK = 64, 32, 4


class LoRALinear(nn.Module):  # type: ignore[misc]  # where MLX is not installed, it is of any type
    """A frozen linear layer, and two small matrices that learn what is added to it."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.linear = linear.freeze()
        self.lora_a = mx.random.normal((WIDTH, RANK)) / math.sqrt(WIDTH)
        self.lora_b = mx.zeros((RANK, WIDTH))

    def __call__(self, x: Any) -> Any:
        return self.linear(x) + x @ self.lora_a @ self.lora_b


def make_model() -> Any:
    """Return the network, of which only the matrices of LoRA are trained."""
    mx.random.seed(0)
    layers = [LoRALinear(nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    model = nn.Sequential(layers[0], nn.gelu, layers[1])
    model.set_dtype(mx.bfloat16)
    return model


def batches(options: argparse.Namespace, group: Any, has_bad: bool) -> list[Any]:
    """Return this rank's part of each batch, inputs and targets; one is left out, or bad on the chosen rank."""
    mx.random.seed(1)
    wanted = mx.random.normal((WIDTH, WIDTH)) / math.sqrt(WIDTH)
    mine = slice(group.rank() * BATCH // group.size(), (group.rank() + 1) * BATCH // group.size())
    made = []
    for step in range(options.steps):
        x = mx.random.normal((BATCH, WIDTH))
        x, y = x[mine].astype(mx.bfloat16), (x @ wanted)[mine].astype(mx.bfloat16)
        if step == options.bad and has_bad and group.rank() == options.rank:
            x[0, 0] = math.inf
        if step != options.bad or has_bad:
            made.append((x, y))
    return made


def loss_of(model: Any, x: Any, y: Any) -> Any:
    return mx.mean(mx.square((model(x) - y).astype(mx.float32)))


def guarded(model: Any, optimizer: Any, guard: gradscale.StepGuard) -> Callable[..., Any]:
    """Return the step of a loop with a guard; one that is not enabled makes every step."""
    trained = gradscale_mlx.ModelAndOptimizer(model, optimizer)
    differentiate = nn.value_and_grad(model, lambda x, y: loss_of(model, x, y))

    def step(x: Any, y: Any) -> Any:
        loss, grads = differentiate(x, y)
        trained.grads = nn.average_gradients(grads)
        guard.step(trained, loss=loss)
        mx.eval(model.state, optimizer.state)
        return loss

    return step


def compiled(model: Any, optimizer: Any) -> Callable[..., Any]:
    """Return a step of pure functions, which is one graph; averaged gradients are the same on all ranks."""
    trained = gradscale_mlx.ModelAndOptimizer(model, optimizer)
    state, captured = gradscale.StaticScale(1.0).init(mx.zeros(())), [model.state, optimizer.state]

    @partial(mx.compile, inputs=captured, outputs=captured)
    def make(x: Any, y: Any) -> Any:
        loss, grads = nn.value_and_grad(model, lambda x, y: loss_of(model, x, y))(x, y)
        grads, nonfinite = gradscale.unscale(nn.average_gradients(grads), state)
        trained.step_if(nonfinite == 0, grads)
        return loss

    def step(x: Any, y: Any) -> Any:
        loss = make(x, y)
        mx.eval(captured)
        return loss

    return step


def main() -> int:
    """Make the four runs, and compare their weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of each run (default: 200)")
    parser.add_argument("--bad", type=int, default=100, help="the step of the bad batch (default: 100)")
    parser.add_argument("--rank", type=int, default=0, help="the rank that gets it (default: 0)")
    options, group = parser.parse_args(), mx.distributed.init()
    ended = {}
    for name in ("no bad batch", "bad batch", "bad batch, guard", "bad batch, compiled"):
        model, optimizer = make_model(), optim.AdamW(optim.cosine_decay(0.02, options.steps))
        guard = gradscale.StepGuard(group=group, enabled="guard" in name)
        step = compiled(model, optimizer) if "compiled" in name else guarded(model, optimizer, guard)
        for batch in batches(options, group, name != "no bad batch"):
            loss = step(*batch)
        ended[name] = [x.astype(mx.float32).tolist() for _, x in tree_flatten(model.parameters())]
        if group.rank() == 0:
            made = optimizer.state["step"].item()
            print(f"{name:20} loss {loss.item():.4f} after {made} steps", flush=True)
    is_same = ended["no bad batch"] == ended["bad batch, guard"] == ended["bad batch, compiled"]
    if group.rank() == 0:
        print(f"{'verified' if is_same else 'FAILED'}: a skipped batch leaves the weights of a run without it")
    return int(not is_same)


if __name__ == "__main__":
    sys.exit(main())
