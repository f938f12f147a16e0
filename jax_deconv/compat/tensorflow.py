# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's conv_transpose.

Source of the convention: TensorFlow 2.15, `tf.nn.conv_transpose`, and for the order of the filters' axes
`tf.nn.conv2d_transpose`.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jax_deconv import api, conventions
from jax_deconv.policy import Policy, resolve
from jax_deconv.problem import Role

__all__ = ["conv_transpose"]

Sizes = int | Sequence[int]


def conv_transpose(
    input: jax.Array, filters: jax.Array, output_shape: Sequence[int], strides: Sizes, padding="SAME",
    data_format: str | None = None, dilations: Sizes | None = None, *, policy: Policy | None = None,
) -> jax.Array:
    """`tf.nn.conv_transpose`: the transpose of the convolution that takes `output_shape` to the input's size.

    Args:
      input: ``[N, *spatial, C_in]``, or as `data_format` says; n spatial axes.
      filters: ``[*kernel, C_out, C_in]``.
      output_shape: the whole shape of the result, in the layout of `input`.
      strides: an integer >= 1, or n, or n + 2 with 1 for batch and channels.
      padding: ``'SAME'``, ``'VALID'``, or a (low, high) pair for each of the n + 2 axes: that of the convolution.
      data_format: ``'NWC'``, ``'NCW'``, ``'NHWC'``, ``'NCHW'``, ``'NDHWC'``, ``'NCDHW'``; None has channels last.
      dilations: as `strides`; default 1.
      policy: a `jax_deconv.Policy`.

    Returns:
      An array of shape `output_shape`.

    Raises:
      ValueError, TypeError: an argument is of the wrong kind or does not fit the others, or the convolution takes
        `output_shape` to another size than the input's.

    >>> import jax.numpy as jnp
    >>> x, w = jnp.ones((8, 5, 5, 6)), jnp.ones((3, 3, 4, 6))
    >>> conv_transpose(x, w, (8, 9, 10, 4), 2).shape
    (8, 9, 10, 4)
    """
    api.check_arrays(input=input, filters=filters)
    placement = conventions.tensorflow_conv_transpose(
        input.shape, filters.shape, output_shape, strides, padding, data_format, dilations)
    return api.forward(Role.X, placement, input, filters, policy=resolve(policy))
