"""Train an equinox network in float16 on handwritten digits, with gradients accumulated over micro-batches.

    python examples/equinox_train.py

gradscale needs nothing of equinox: ``eqx.partition`` parts the arrays, which are trained, from functions and other
leaves. ``gradscale_jax.scaled`` wraps the optax transformation, and holds the scale in its state. The micro-batches are
inside the loss, in a ``lax.scan`` that JAX differentiates: there is one verdict for all of them, and their float16
gradients are added up in float32, the dtype of the parameters.

Needs, from a clone of gradscale: python -m pip install '.[optax]' --group examples --group equinox.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from gradscale import DynamicScale
from shared.program import program_needs

with program_needs("examples/equinox_train.py", "optax", groups="examples equinox"):
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from sklearn.datasets import load_digits
    from tqdm import trange

    import gradscale_jax

MICRO_BATCHES = 4
BATCH_SIZE = 256
TEST_IMAGES = 360
# Far too large at first, so that some steps are skipped; it doubles after 50 clean steps, usually 2000.
OPTIMIZER = gradscale_jax.scaled(optax.adam(1e-3), DynamicScale(init_scale=2.0**24, growth_interval=50))


class Network(eqx.Module):
    """Two layers; one leaf is a function, and one field is static."""

    first: eqx.nn.Linear
    last: eqx.nn.Linear
    activation: Callable[[jax.Array], jax.Array]
    name: str = eqx.field(static=True)

    def __init__(self, key: jax.Array) -> None:
        first, last = jax.random.split(key)
        self.first, self.last = eqx.nn.Linear(64, 128, key=first), eqx.nn.Linear(128, 10, key=last)
        self.activation, self.name = jax.nn.relu, "digits"

    def __call__(self, image: jax.Array) -> jax.Array:
        """Return one logit for each digit."""
        logits: jax.Array = self.last(self.activation(self.first(image)))
        return logits


def loss(params: Any, others: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean float32 loss of all micro-batches, the first axis; computed in float16."""

    @jax.checkpoint  # keeps one micro-batch's activations at a time
    def add_micro_batch(total: jax.Array, batch: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        half = jax.tree.map(lambda x: x.astype(jnp.float16), params)
        logits = jax.vmap(eqx.combine(half, others))(batch[0].astype(jnp.float16))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch[1])
        return total + losses.mean() / MICRO_BATCHES, None

    total: jax.Array = jax.lax.scan(add_micro_batch, jnp.float32(0), (images, labels))[0]
    return total


@partial(jax.jit, static_argnums=0)
def train_step(others: Any, training: Any, images: jax.Array, labels: jax.Array) -> Any:
    """Return the parameters and the optimizer's state, with the scale in it, after the next step."""
    params, optimizer = training
    scale = gradscale_jax.scale_state(optimizer)
    grads = jax.grad(lambda params: gradscale_jax.scale(loss(params, others, images, labels), scale))(params)
    updates, optimizer = OPTIMIZER.update(grads, optimizer, params)
    return optax.apply_updates(params, updates), optimizer


def main() -> int:
    """Train, with all that a checkpoint holds saved and loaded half-way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: %(default)s)")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"argument --steps: must be at least 2, got {options.steps}")
    pixels, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(labels))
    images, labels = (pixels[order] / 8 - 1).astype(np.float32), labels[order].astype(np.int32)
    params, others = eqx.partition(Network(jax.random.key(0)), eqx.is_inexact_array)
    training = params, OPTIMIZER.init(params)
    for step in trange(options.steps, desc="equinox", disable=None):
        if step == options.steps // 2:
            file = io.BytesIO()
            eqx.tree_serialise_leaves(file, training)
            file.seek(0)
            training = eqx.tree_deserialise_leaves(file, jax.tree.map(jnp.zeros_like, training))
            print(f"saved after {step} steps, and resumed with scale {training[1].scale_state.scale:g}")
        chosen = rng.integers(TEST_IMAGES, len(images), (MICRO_BATCHES, BATCH_SIZE // MICRO_BATCHES))
        training = train_step(others, training, images[chosen], labels[chosen])
    network = eqx.combine(training[0], others)
    accuracy = np.mean(np.argmax(jax.vmap(network)(images[:TEST_IMAGES]), axis=1) == labels[:TEST_IMAGES])
    scale, skipped = training[1].scale_state.scale, training[1].skipped
    print(f"accuracy {accuracy:.1%}, skipped {skipped} of {options.steps} steps, final scale {scale:g}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
