"""Handwritten digits for JAX: images, a network of sigmoids whose weights are sharded over devices, and Adam."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import shared.digits

# Where the small gradients come from: the loss is a mean over 512 images and 16 outputs, and the derivative of each
# sigmoid, at most 1/4, multiplies the gradient on its way back through five layers. In the first layers it falls below
# 6e-8, the smallest float16, although Adam, which divides by the gradient's own size, can learn from it in float32.
# All are multiples of 16, so that each of up to 16 devices owns an equal shard; six of the outputs mean nothing.
LAYER_SIZES = (64, 64, 64, 64, 64, 16)
LEARNING_RATE = 0.01

Weights = list[tuple[jax.Array, jax.Array]]
REPLICATED, SHARDED = PartitionSpec(), PartitionSpec("data")


def load_images(seed: int) -> tuple[Any, Any, Any, Any]:
    """Return training images and labels, test images and labels."""
    images, labels, test_images, test_labels = shared.digits.load_images(seed)
    return images, labels.astype(np.int32), test_images, test_labels.astype(np.int32)


def initial_weights(seed: int) -> Weights:
    """Return the matrix and the bias of each layer: normal with standard deviation 0.2, and zero."""
    rng = np.random.default_rng([seed, 1])
    sizes = itertools.pairwise(LAYER_SIZES)
    return [(jnp.float32(rng.normal(scale=0.2, size=size)), jnp.zeros(size[1], jnp.float32)) for size in sizes]


def forward(weights: Weights, images: jax.Array) -> jax.Array:
    """Return the outputs, in the dtype of the weights."""
    activations: jax.Array = images.astype(weights[0][0].dtype)
    for matrix, bias in weights:
        activations = jax.nn.sigmoid(activations @ matrix + bias)
    return activations


def mean_squared_error(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the float32 mean over images and outputs."""
    return jnp.mean(jnp.square(outputs.astype(jnp.float32) - jax.nn.one_hot(labels, LAYER_SIZES[-1])))


class Adam(NamedTuple):
    """Float32 master weights, and what Adam remembers of their gradients."""

    weights: Weights
    mean: Weights
    mean_square: Weights
    steps: jax.Array

    def step(self, grads: Weights) -> Adam:
        """Return what follows from one more gradient."""
        steps = self.steps + 1
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, self.mean, grads)
        mean_square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * jnp.square(g), self.mean_square, grads)
        rate = LEARNING_RATE * jnp.sqrt(1 - 0.999**steps) / (1 - 0.9**steps)
        weights = jax.tree.map(lambda w, m, s: w - rate * m / (jnp.sqrt(s) + 1e-8), self.weights, mean, mean_square)
        return Adam(weights, mean, mean_square, steps)


@partial(jax.jit, static_argnums=0)
def evaluate(dtype: Any, masters: Weights, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return accuracy and loss, of weights that may be sharded."""
    outputs = forward(jax.tree.map(lambda master: master.astype(dtype), masters), images)
    return jnp.mean(jnp.argmax(outputs, axis=1) == labels), mean_squared_error(outputs, labels)
