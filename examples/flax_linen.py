"""Train a float16 flax.linen network with batch normalisation on handwritten digits; save everything, and resume.

    python examples/flax_linen.py

gradscale needs nothing of flax: ``value_and_grad`` where ``jax.value_and_grad`` would be, and ``select`` for what a
skipped step must leave alone: parameters, optimizer state, and the running statistics of batch normalisation. The
scaler's state is a field of the TrainState, and flax.serialization saves it with the rest.

Needs, from a clone of gradscale: python -m pip install '.[optax]' --group examples --group flax.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from gradscale import DynamicScale, ScaleState
from shared.program import program_needs

with program_needs("examples/flax_linen.py", "optax", groups="examples flax"):
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import linen as nn
    from flax import serialization
    from flax.training import train_state
    from sklearn.datasets import load_digits
    from tqdm import trange

    import gradscale_jax

BATCH_SIZE = 256
TEST_IMAGES = 360
# Far too large at first, so that some steps are skipped; it doubles after 50 clean steps, usually 2000.
POLICY = DynamicScale(init_scale=2.0**24, growth_interval=50)


class Network(nn.Module):
    """Computes in float16; its parameters and statistics stay in float32."""

    @nn.compact
    def __call__(self, images: jax.Array, is_training: bool) -> jax.Array:
        """Return one logit for each digit."""
        x = nn.Dense(128, use_bias=False, dtype=jnp.float16)(images)
        x = nn.relu(nn.BatchNorm(use_running_average=not is_training, momentum=0.9, dtype=jnp.float16)(x))
        return nn.Dense(10, dtype=jnp.float16)(x)


class TrainState(train_state.TrainState):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """What flax keeps, and two fields more."""

    batch_stats: Any
    scale: ScaleState


@jax.jit
def train_step(state: TrainState, images: jax.Array, labels: jax.Array) -> tuple[TrainState, jax.Array]:
    """Return the next state, and whether the step was skipped."""

    def loss(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updates = state.apply_fn(variables, images, is_training=True, mutable=["batch_stats"])
        # A float16 loss could not be scaled by more than 32768.
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
        return losses.mean(), updates["batch_stats"]

    differentiate = gradscale_jax.value_and_grad(loss, POLICY, has_aux=True)
    (_, batch_stats), grads, verdict, scale = differentiate(state.scale, state.params)
    stepped = state.apply_gradients(grads=grads, batch_stats=batch_stats)  # type: ignore[no-untyped-call, unused-ignore]
    # The step is taken or it is not: nothing of a skipped one is kept, but the scale adapts.
    new_state: TrainState = gradscale_jax.select(verdict.finite, stepped, state)
    return new_state.replace(scale=scale), ~verdict.finite


def create_state(seed: int) -> TrainState:
    """Return a state before the first step."""
    network = Network()
    variables = network.init(jax.random.key(seed), jnp.zeros((1, 64)), is_training=False)
    return TrainState.create(  # type: ignore[no-any-return, no-untyped-call, unused-ignore]
        apply_fn=network.apply, tx=optax.adam(1e-3), scale=POLICY.init(jnp.zeros(())), **variables
    )


def main() -> int:
    """Train half of the steps, save, restore into a fresh state, and train the rest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: %(default)s)")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"argument --steps: must be at least 2, got {options.steps}")
    pixels, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(labels))
    images, labels = (pixels[order] / 8 - 1).astype(np.float32), labels[order].astype(np.int32)

    state, skipped = create_state(seed=0), jnp.int32(0)
    for step in trange(options.steps, desc="flax.linen", disable=None):
        if step == options.steps // 2:
            saved = serialization.to_bytes(state)
            state = serialization.from_bytes(create_state(seed=1), saved)
            print(f"saved {len(saved)} bytes after {step} steps, and resumed with scale {state.scale.scale:g}")
        chosen = rng.integers(TEST_IMAGES, len(images), BATCH_SIZE)
        state, is_skipped = train_step(state, images[chosen], labels[chosen])
        skipped += is_skipped
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, images[:TEST_IMAGES], is_training=False)
    accuracy = np.mean(np.argmax(logits, axis=1) == labels[:TEST_IMAGES])
    print(f"accuracy {accuracy:.1%}, skipped {skipped} of {options.steps} steps, final scale {state.scale.scale:g}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
