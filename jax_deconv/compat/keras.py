# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Keras's conv_transpose.

Source of the convention: Keras 3.15, `keras.ops.conv_transpose`.
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
    inputs: jax.Array, kernel: jax.Array, strides: Sizes = 1, padding: str = "valid",
    output_padding: Sizes | None = None, data_format: str | None = None, dilation_rate: Sizes = 1, *,
    policy: Policy | None = None,
) -> jax.Array:
    """`keras.ops.conv_transpose`.

    Args:
      inputs: ``[N, *spatial, C_in]``, or with channels first ``[N, C_in, *spatial]``.
      kernel: ``[*kernel, C_out, C_in]``.
      strides: integers >= 1.
      padding: ``'valid'`` or ``'same'``.
      output_padding: None makes ``input * stride`` positions with ``'same'`` and ``(input - 1) * stride + max(extent,
        stride)`` with ``'valid'``, extent: of the dilated kernel.  Integers, each less than the stride, replace that:
        ``(input - 1) * stride + extent % 2 + output_padding`` and ``(input - 1) * stride + extent + output_padding``.
      data_format: ``'channels_last'`` or ``'channels_first'``; None is the former.
      dilation_rate: integers >= 1.  Unlike Keras's layers, it goes together with strides.
      policy: a `jax_deconv.Policy`.

    Returns:
      The result, with C_out channels, in the layout of `inputs`.

    Raises:
      ValueError, TypeError: an argument is of the wrong kind or does not fit the others, or nothing is left on a
        spatial axis.

    >>> import jax.numpy as jnp
    >>> x, w = jnp.ones((8, 5, 5, 6)), jnp.ones((3, 3, 4, 6))
    >>> conv_transpose(x, w, 2, "same").shape, conv_transpose(x, w, 2, "same", output_padding=0).shape
    ((8, 10, 10, 4), (8, 9, 9, 4))
    """
    api.check_arrays(inputs=inputs, kernel=kernel)
    placement = conventions.keras_conv_transpose(
        inputs.shape, kernel.shape, strides, padding, output_padding, data_format, dilation_rate)
    return api.forward(Role.X, placement, inputs, kernel, policy=resolve(policy))
