# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""`ConvTranspose` for Flax Linen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

try:
    from flax import linen as nn
    from flax.linen.dtypes import promote_dtype
    from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
    from flax.linen.linear import default_kernel_init
    from flax.typing import Dtype, Initializer, PaddingLike, PrecisionLike, PromoteDtypeFn
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("jax_deconv.linen needs Flax: pip install flax", name=error.name) from error

from jax_deconv import _layer
from jax_deconv.float8 import Recipe
from jax_deconv.policy import Policy

__all__ = ["ConvTranspose"]


class ConvTranspose(nn.Module):
    """Transposed convolution; a drop-in for `flax.linen.ConvTranspose`.

    The constructor, the parameters and the values are Flax's: a checkpoint written with Flax's module
    loads into this one and gives the same output.  What is new comes last and by keyword only.

    Kernels have the shape ``(*kernel_size, in / groups, out)``, or with ``transpose_kernel=True``
    ``(*kernel_size, out / groups, in)``, which is the kernel of the `flax.linen.Conv` that this layer
    transposes.  ``bias`` has the shape ``(out,)``.

    Args:
      features: number of output features.
      kernel_size: an integer (one spatial axis) or one integer for each spatial axis.
      strides: an integer or one for each spatial axis; None is 1.
      padding: ``'SAME'`` (output size = input * stride), ``'VALID'``, an integer, or one integer or
        ``(low, high)`` pair for each spatial axis.  Numbers mean what they mean to
        `jax.lax.conv_transpose`: padding of the dilated input, so that more padding makes a larger
        output; see `use_consistent_padding`.  Two more modes, both with output size = input * stride:

        * ``'CIRCULAR'``: inputs are periodic, as in Flax.
        * ``'CAUSAL'``: the first ``input * stride`` outputs of ``'VALID'``, on every spatial axis.
          Output ``t`` depends on inputs ``i <= t / stride`` alone, so a longer input only appends
          outputs.  With stride 1 it is the CAUSAL of `flax.linen.Conv`.  Flax's ConvTranspose has no
          such mode.
      kernel_dilation: an integer or one for each spatial axis; None is 1.
      use_bias: whether to add a bias.
      mask: an array of the kernel's shape that is multiplied into it, or None.
      dtype: type to compute in; None infers it from inputs and parameters.
      param_dtype: type of new parameters.
      precision: see `jax.lax.Precision`.
      kernel_init: initialiser of the kernel.  Left at its default (lecun_normal), it is scaled by the
        layer's true fan-in, ``prod(kernel_size) * in / groups``, for both kernel orders.  Flax's reads
        the axes of a ``transpose_kernel=True`` kernel the wrong way round, so there a *fresh*
        initialisation differs from Flax's.  An initialiser that you pass is called as Flax calls it.
      bias_init: initialiser of the bias.
      transpose_kernel: True flips the kernel's spatial axes and swaps its channel axes, which makes the
        layer the transpose of the `flax.linen.Conv` that has the same kernel.
      promote_dtype: as in Flax, called with ``(inputs, kernel, bias, dtype=dtype)``.
      preferred_element_type: type of the convolution's result; see `jax.lax.conv_transpose`.
      feature_group_count: number of groups that features are split into; keyword only.
      output_padding: an integer >= 0 or one for each spatial axis: size that is added to the high end of
        the output.  No padding mode fixes the output size but CIRCULAR and CAUSAL, which refuse it;
        keyword only.
      use_consistent_padding: True reads numbers in `padding` as the padding of the convolution that this
        layer transposes, as PyTorch does; keyword only.
      activation: applied to the output, in one call with the convolution and the bias; what
        `jax_deconv.conv_transpose` takes; keyword only.
      policy: a `jax_deconv.Policy`, or None; keyword only.
      float8: a `jax_deconv.float8.Recipe`: inputs, kernel and the cotangent of the output are rounded to float8.
        The variables of its delayed scaling are in the collection ``_overwrite_with_gradient``, named and used as those
        of Flax's own float8 layers; keyword only.

    Raises:
      ValueError, TypeError: when called, if the features are not divisible by the groups, the mask has
        another shape than the kernel, a setting is not an integer or one for each spatial axis, or
        whatever `jax_deconv.conv_transpose` refuses.

    Source of the convention: `flax.linen.ConvTranspose` (Flax 0.12).

    >>> import jax, jax.numpy as jnp
    >>> from jax_deconv.linen import ConvTranspose
    >>> layer = ConvTranspose(features=4, kernel_size=(4, 4), strides=(2, 2), feature_group_count=2)
    >>> images = jnp.ones((8, 16, 16, 6))
    >>> variables = layer.init(jax.random.key(0), images)
    >>> jax.tree.map(jnp.shape, variables)
    {'params': {'bias': (4,), 'kernel': (4, 4, 3, 4)}}
    >>> layer.apply(variables, images).shape
    (8, 32, 32, 4)
    """

    features: int
    kernel_size: int | Sequence[int]
    strides: int | Sequence[int] | None = None
    padding: PaddingLike = "SAME"
    kernel_dilation: int | Sequence[int] | None = None
    use_bias: bool = True
    mask: jax.Array | None = None
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = nn.initializers.zeros_init()
    transpose_kernel: bool = False
    promote_dtype: PromoteDtypeFn = promote_dtype
    preferred_element_type: Dtype | None = None
    feature_group_count: int = dataclasses.field(default=1, kw_only=True)
    output_padding: int | Sequence[int] | None = dataclasses.field(default=None, kw_only=True)
    use_consistent_padding: bool = dataclasses.field(default=False, kw_only=True)
    activation: str | Callable | None = dataclasses.field(default=None, kw_only=True)
    policy: Policy | None = dataclasses.field(default=None, kw_only=True)
    float8: Recipe | None = dataclasses.field(default=None, kw_only=True)

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Applies the layer.

        Args:
          inputs: ``(*batch, *spatial, in)``, with any number of batch axes, also none.

        Returns:
          ``(*batch, *spatial_out, features)``.
        """
        flat = _layer.flatten(self, inputs)
        batch_shape = inputs.shape[:inputs.ndim - flat.ndim + 1]
        features = _layer.feature_count("features", self.features)
        shape = _layer.kernel_shape(self, inputs.shape[-1], features)
        init = _layer.kernel_init(self, self.kernel_init, default_kernel_init)
        kernel = self.param("kernel", init, shape, self.param_dtype)
        kernel = _layer.masked(self, kernel, shape)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (features,), self.param_dtype)
        flat, kernel, bias = self.promote_dtype(flat, kernel, bias, dtype=self.dtype)
        state = _layer.float8_state(
            self, lambda name, first: self.variable(OVERWRITE_WITH_GRADIENT, name, lambda: first).value)
        return _layer.apply(self, flat, kernel, bias, batch_shape, state)
