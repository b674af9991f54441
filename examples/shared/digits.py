"""Handwritten digits, and a network of sigmoids that learns them; on arrays of NumPy and of CuPy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

# Of NumPy or CuPy: the methods and operators are the same, and np.exp of CuPy's arrays is computed by CuPy.
Array = Any

# Where the small gradients come from: the loss is a mean over 512 images and 10 outputs, and the derivative of each
# sigmoid, at most 1/4, multiplies the gradient on its way back through six layers. In the first layers it falls below
# 6e-8, the smallest float16, although Adam, which divides by the gradient's own size, can learn from it in float32.
LAYER_SIZES = (64, 64, 64, 64, 64, 64, 10)
TEST_IMAGES = 360


def load_images(seed: int) -> tuple[Array, Array, Array, Array]:
    """Return training images and labels, test images and labels, from the 1797 that come with scikit-learn."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng([seed, 0]).permutation(len(labels))
    images, labels = (pixels[order] / 8 - 1).astype(np.float32), labels[order]
    return images[TEST_IMAGES:], labels[TEST_IMAGES:], images[:TEST_IMAGES], labels[:TEST_IMAGES]


def initial_weights(seed: int) -> Array:
    """Return all weights as one float32 vector: normal with standard deviation 0.2, and biases of zero."""
    rng = np.random.default_rng([seed, 1])
    parts = []
    for inputs, outputs in itertools.pairwise(LAYER_SIZES):
        parts += [rng.normal(scale=0.2, size=inputs * outputs), np.zeros(outputs)]
    return np.concatenate(parts).astype(np.float32)


def split_layers(vector: Array) -> list[tuple[Array, Array]]:
    """Return the weight matrix and the bias of every layer, as views of the vector that holds them all."""
    layers = []
    start = 0
    for inputs, outputs in itertools.pairwise(LAYER_SIZES):
        bias = start + inputs * outputs
        layers.append((vector[start:bias].reshape(inputs, outputs), vector[bias : bias + outputs]))
        start = bias + outputs
    return layers


def in_float32(compute: Callable[..., Array]) -> Callable[..., Array]:
    """Return an operation that rounds once, to the dtype of its last argument, and is in float32 within, as on GPUs."""

    def operation(*arrays: Array) -> Array:
        # No warnings about overflow, which is what the scaler is there for.
        with np.errstate(over="ignore", invalid="ignore"):
            result = compute(*(array.astype(np.float32, copy=False) for array in arrays))
            return result.astype(arrays[-1].dtype, copy=False)

    return operation


linear = in_float32(lambda inputs, matrix, bias: inputs @ matrix + bias)
sigmoid = in_float32(lambda x: 1 / (1 + np.exp(-x)))
sigmoid_backward = in_float32(lambda gradient, outputs: gradient * outputs * (1 - outputs))
matmul = in_float32(lambda a, b: a @ b)
sum_rows = in_float32(lambda x: x.sum(axis=0))


def forward(weights: Array, images: Array) -> list[Array]:
    """Return the images and the activations of every layer, in the dtype of the weights; the last are the outputs."""
    activations = [images]
    for matrix, bias in split_layers(weights):
        activations.append(sigmoid(linear(activations[-1], matrix, bias)))
    return activations


def mean_squared_error(outputs: Array, wanted: Array, count: int) -> tuple[Any, Array]:
    """Return the part of these images in the mean over ``count`` images, and its float32 gradient."""
    error = outputs.astype(np.float32) - wanted
    divisor = np.float32(count * LAYER_SIZES[-1])
    return np.square(error).sum() / divisor, 2 * error / divisor


def backward(weights: Array, activations: list[Array], gradient: Array) -> Array:
    """Return the gradient of all weights as one vector, in their dtype, from the gradient of the outputs."""
    made = weights.copy()
    layers = zip(split_layers(weights), split_layers(made), activations[:-1], activations[1:], strict=True)
    for (matrix, _), (matrix_gradient, bias_gradient), inputs, outputs in reversed(list(layers)):
        gradient = sigmoid_backward(gradient, outputs)
        matrix_gradient[...], bias_gradient[...] = matmul(inputs.T, gradient), sum_rows(gradient)
        gradient = matmul(gradient, matrix.T)
    return made
