# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""ONNX's ConvTranspose.

Source of the convention: the operator's specification, opsets 1, 11 and 22.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jax_deconv import api, conventions
from jax_deconv.policy import Policy, resolve
from jax_deconv.problem import Role

__all__ = ["conv_transpose"]

Sizes = Sequence[int] | None


def conv_transpose(
    X: jax.Array, W: jax.Array, B: jax.Array | None = None, *, auto_pad: str = "NOTSET", dilations: Sizes = None,
    group: int = 1, kernel_shape: Sizes = None, output_padding: Sizes = None, output_shape: Sizes = None,
    pads: Sizes = None, strides: Sizes = None, opset: int = 22, policy: Policy | None = None,
) -> jax.Array:
    """ONNX's ConvTranspose; inputs first, attributes by keyword.

    Args:
      X: ``[N, C, *spatial]``, n spatial axes.
      W: ``[C, M / group, *kernel]``.
      B: ``[M]`` or None.
      auto_pad: ``'NOTSET'``: `pads`; ``'VALID'``: none; ``'SAME_UPPER'`` and ``'SAME_LOWER'``: such that the result's
        size is input * stride.
      dilations, strides: n integers >= 1; default 1.
      group: the number of groups into which the channels fall.
      kernel_shape: the spatial shape of W, if said.
      output_padding: n integers >= 0 that extend the high end, each less than the stride or the dilation.
      output_shape: the result's spatial sizes; `pads` are then ignored.
      pads: ``[*lows, *highs]``, integers >= 0, cut from the result.
      opset: of the model.  How an odd crop is split changed: since opset 11 ``'SAME_UPPER'`` cuts more at the high
        end and every other mode at the low end; before, it was the other way round.
      policy: a `jax_deconv.Policy`.

    A size given by `output_shape` or ``'SAME_*'`` that is larger than the whole result adds zeros at the high end.

    Returns:
      ``[N, M, *spatial]``.

    Raises:
      ValueError, TypeError: an argument is of the wrong kind or does not fit the others, `pads` meets `auto_pad`, or
        nothing is left on a spatial axis.

    >>> import jax.numpy as jnp
    >>> X, W = jnp.ones((1, 1, 3, 3)), jnp.ones((1, 2, 3, 3))
    >>> conv_transpose(X, W, strides=[3, 2], output_shape=[10, 8]).shape
    (1, 2, 10, 8)
    """
    api.check_arrays(X=X, W=W)
    placement = conventions.onnx_conv_transpose(
        X.shape, W.shape, auto_pad, dilations, group, kernel_shape, output_padding, output_shape, pads, strides, opset)
    return api.forward(Role.X, placement, X, W, bias=B, policy=resolve(policy))
