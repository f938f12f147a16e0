# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Settings and properties that the tests of both Flax modules share."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest


def normal(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def wave(shape, dtype):
    """An array that is neither symmetric nor random, without a computation by JAX."""
    return np.cos(np.arange(np.prod(shape, dtype=int)).reshape(shape)).astype(dtype)


def fan_in(count):
    """The standard deviation that lecun_normal has for `count` summands."""
    return np.sqrt(1 / count)


@dataclasses.dataclass(frozen=True)
class Case:
    """Settings that Flax knows, too."""

    inputs: tuple
    settings: dict
    tolerance: float = 1e-5

    def __str__(self):
        return f"{self.inputs}-" + "-".join(f"{k}={v}" for k, v in self.settings.items() if k != "features")


def _grid():
    for padding, transpose_kernel in itertools.product(
            ["SAME", "VALID", "CIRCULAR", 1, (2,), ((0, 3),), ((-1, 2),)], [False, True]):
        for kernel, stride, dilation in [(4, 2, 1), (2, 3, 2)]:
            yield Case((2, 5, 3), dict(features=2, kernel_size=kernel, strides=stride, padding=padding,
                                       kernel_dilation=dilation, transpose_kernel=transpose_kernel))
    # Circular kernels that reach round an axis once and more.
    for kernel, size, transpose_kernel in itertools.product([4, 9], [1, 2], [False, True]):
        yield Case((1, size, 2), dict(features=3, kernel_size=(kernel,), strides=(2,), padding="CIRCULAR",
                                      transpose_kernel=transpose_kernel))
    for padding, transpose_kernel in itertools.product(
            ["SAME", "VALID", "CIRCULAR", ((1, 2), (0, 1))], [False, True]):
        yield Case((2, 4, 5, 3), dict(features=2, kernel_size=(4, 3), strides=(2, 3), padding=padding,
                                      transpose_kernel=transpose_kernel))
    for padding in ("SAME", "CIRCULAR"):
        yield Case((1, 3, 2, 4, 2), dict(features=2, kernel_size=(3, 2, 4), strides=(2, 1, 2),
                                         padding=padding))
        # no batch axis, and two of them
        yield Case((4, 4, 3), dict(features=2, kernel_size=(3, 3), strides=2, padding=padding))
        yield Case((2, 3, 4, 4, 3), dict(features=2, kernel_size=(3, 3), strides=2, padding=padding))
    yield Case((2, 4, 3), dict(features=2, kernel_size=(3,), use_bias=False))
    yield Case((2, 4, 3), dict(features=2, kernel_size=[3], strides=[2], precision="highest"))
    yield Case((2, 4, 3), dict(features=2, kernel_size=(3,), mask=np.tril(np.ones((3, 3, 2)))))
    yield Case((2, 4, 3), dict(features=2, kernel_size=(3,), dtype=jnp.bfloat16), tolerance=2e-2)


CASES = list(_grid())

GROUPED = [
    dict(kernel_size=kernel, strides=stride, padding=padding, transpose_kernel=transpose_kernel,
         feature_group_count=groups)
    for padding in ("SAME", "VALID", "CIRCULAR", "CAUSAL") for transpose_kernel in (False, True)
    for kernel, stride, groups in (((4,), 2, 2), ((3, 4), (2, 3), 3))
]

STREAMING = [
    dict(kernel_size=kernel, strides=stride, kernel_dilation=dilation, transpose_kernel=transpose_kernel)
    for transpose_kernel in (False, True)
    for kernel, stride, dilation in (((4,), (2,), 1), ((7,), (3,), 2), ((2,), (5,), 1), ((3, 4), (2, 1), 1))
]

# By name, and as a function.
ACTIVATIONS = [("leaky_relu", jax.nn.leaky_relu), ("gelu", jax.nn.gelu), (jnp.sin, jnp.sin)]

# One argument each, its value, and what its error says beside the two.
BAD_ARGUMENTS = [
    ("features", "6", "integer >= 0"), ("features", 6.0, "integer >= 0"), ("features", -1, "integer >= 0"),
    ("kernel_size", "33", "integer >= 1"), ("kernel_size", None, "integer >= 1"),
    ("kernel_size", 0, "integer >= 1"), ("kernel_size", (3, 0), "integer >= 1"),
    ("strides", 2.0, "integer >= 1"), ("strides", 0, "integer >= 1"), ("strides", (1, 2), "1 spatial axes"),
    ("strides", "2", "integer >= 1"), ("kernel_dilation", 0, "integer >= 1"),
    ("kernel_dilation", (1.5,), "integer >= 1"), ("output_padding", -1, "integer >= 0"),
    ("padding", None, "a string, an integer"), ("padding", 1.5, "a string, an integer"),
    ("padding", ("a",), "a string, an integer"), ("padding", ((1, 2, 3),), "(low, high) pair"),
    ("feature_group_count", 2.0, "integer >= 1"), ("activation", "nonsense", "leaky_relu"),
    ("activation", 2, "a name"), ("mask", 1, "(3, 3, 4)"), ("mask", (1,), "(3, 3, 4)"),
]

# Not typical, but of a meaning in Flax that is kept.
ODD_ARGUMENTS = [dict(padding=True), dict(strides=True, kernel_dilation=(True,)), dict(kernel_size=True),
                 dict(strides={2}), dict(features=0), dict(padding=((True, 2),))]


def check_error(name, value, expected, call):
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    assert re.match(rf"{name}\b", str(error.value)), str(error.value)
    assert repr(value) in str(error.value) and expected in str(error.value), str(error.value)


def loop_over_groups(groups, x, kernel, bias, layer):
    """The grouped layer, one group after the other."""
    # The kernel's axes are (.., in/groups, out) or (.., out/groups, in): groups are in the last one.
    parts = zip(*(jnp.split(array, groups, axis=-1) for array in (x, kernel, bias)), strict=True)
    return jnp.concatenate([layer(*of_group) for of_group in parts], axis=-1)


def causal(layer, valid, x, strides):
    """A longer input only appends outputs, and all of them are VALID's."""
    y = layer(x)
    assert y.shape[1:-1] == tuple(np.multiply(x.shape[1:-1], strides))
    inside = tuple(slice(0, n) for n in y.shape[1:-1])
    np.testing.assert_allclose(y, valid(x)[(slice(None), *inside)], rtol=1e-5, atol=1e-5)
    for axis, stride in enumerate(strides, start=1):
        for n in (1, 2, x.shape[1] - 1):
            prefix = layer(x.take(jnp.arange(n), axis=axis))
            expected = y.take(jnp.arange(n * stride), axis=axis)
            np.testing.assert_allclose(prefix, expected, rtol=1e-5, atol=1e-5)
