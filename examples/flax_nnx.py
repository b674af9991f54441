"""Train a float16 flax.nnx network on handwritten digits, as pure functions; checkpoint with orbax, and resume.

    python examples/flax_nnx.py

gradscale needs nothing of flax: ``nnx.split`` gives the parameters as a pytree, and what changes beside them (here the
running statistics of batch normalisation) as another. Both are selected on the verdict.

Needs, from a clone of gradscale: python -m pip install '.[optax]' --group examples --group flax.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gradscale import DynamicScale, ScaleState
from shared.program import program_needs

with program_needs("examples/flax_nnx.py", "optax", groups="examples flax"):
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import orbax.checkpoint as ocp
    from flax import nnx
    from sklearn.datasets import load_digits
    from tqdm import trange

    import gradscale_jax

BATCH_SIZE = 256
TEST_IMAGES = 360
OPTIMIZER = optax.adam(1e-3)
# Far too large at first, so that some steps are skipped; it doubles after 50 clean steps, usually 2000.
POLICY = DynamicScale(init_scale=2.0**24, growth_interval=50)


class Network(nnx.Module):
    """Computes in float16; its parameters and statistics stay in float32."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(64, 128, use_bias=False, dtype=jnp.float16, rngs=rngs)
        self.norm = nnx.BatchNorm(128, momentum=0.9, dtype=jnp.float16, rngs=rngs)
        self.last = nnx.Linear(128, 10, dtype=jnp.float16, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Return one logit for each digit."""
        return self.last(nnx.relu(self.norm(self.first(images))))


class Training(NamedTuple):
    """All that a checkpoint must hold."""

    params: Any
    others: Any
    optimizer: Any
    scale: ScaleState


def loss(params: Any, structure: Any, others: Any, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
    """Return the mean loss, and what else the forward pass has changed."""
    # Copied, since the statistics of another trace cannot be updated in this one.
    network = nnx.merge(structure, params, *others, copy=True)
    # A float16 loss could not be scaled by more than 32768.
    logits = network(images).astype(jnp.float32)
    # The forward pass has updated the network's statistics.
    _, _, *new_others = nnx.split(network, nnx.Param, ...)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new_others


@partial(jax.jit, static_argnums=0)
def train_step(structure: Any, old: Training, images: jax.Array, labels: jax.Array) -> tuple[Training, jax.Array]:
    """Return the next state, and whether the step was skipped."""
    differentiate = gradscale_jax.value_and_grad(loss, POLICY, has_aux=True)
    (_, others), grads, verdict, scale = differentiate(old.scale, old.params, structure, old.others, images, labels)
    updates, optimizer = OPTIMIZER.update(grads, old.optimizer, old.params)
    stepped = Training(optax.apply_updates(old.params, updates), others, optimizer, old.scale)
    # The step is taken or it is not: nothing of a skipped one is kept, but the scale adapts.
    new: Training = gradscale_jax.select(verdict.finite, stepped, old)
    return new._replace(scale=scale), ~verdict.finite


def create(seed: int) -> tuple[Any, Training]:
    """Return the structure of the network, and the state before the first step."""
    structure, params, *others = nnx.split(Network(nnx.Rngs(seed)), nnx.Param, ...)
    return structure, Training(params, others, OPTIMIZER.init(params), POLICY.init(jnp.zeros(())))


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
    structure, training = create(seed=0)
    skipped = jnp.int32(0)
    for step in trange(options.steps, desc="flax.nnx", disable=None):
        if step == options.steps // 2:
            training = save_and_restore(training)
            print(f"saved after {step} steps, and resumed with scale {training.scale.scale:g}")
        chosen = rng.integers(TEST_IMAGES, len(images), BATCH_SIZE)
        training, is_skipped = train_step(structure, training, images[chosen], labels[chosen])
        skipped += is_skipped
    network = nnx.merge(structure, training.params, *training.others)
    network.eval()
    accuracy = np.mean(np.argmax(network(images[:TEST_IMAGES]), axis=1) == labels[:TEST_IMAGES])
    print(f"accuracy {accuracy:.1%}, skipped {skipped} of {options.steps} steps, final scale {training.scale.scale:g}")
    return 0


def save_and_restore(training: Training) -> Training:
    """Return what orbax restores, in the structure of a fresh state, from what it has saved."""
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        path = Path(folder) / "checkpoint"
        checkpointer.save(path, training)
        checkpointer.wait_until_finished()
        _, fresh = create(seed=1)
        restored: Training = checkpointer.restore(path, fresh)
        return restored


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
