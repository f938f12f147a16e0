# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""`ConvTranspose` for Flax NNX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

try:
    from flax import nnx
    from flax.nnx.nn.dtypes import promote_dtype
    from flax.nnx.nn.linear import default_bias_init, default_kernel_init
    from flax.typing import Dtype, Initializer, PaddingLike, PrecisionLike, PromoteDtypeFn
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("jax_deconv.nnx needs Flax: pip install flax", name=error.name) from error

from jax_deconv import _layer
from jax_deconv.float8 import Recipe
from jax_deconv.policy import Policy

__all__ = ["ConvTranspose", "OverwriteWithGradient"]


class OverwriteWithGradient(nnx.Variable):
    """What delayed scaling to float8 knows of a tensor: its gradient is its next value.

    >>> import jax.numpy as jnp, optax
    >>> from flax import nnx
    >>> from jax_deconv import float8
    >>> from jax_deconv.nnx import ConvTranspose, OverwriteWithGradient
    >>> layer = ConvTranspose(3, 2, (4,), strides=(2,), float8=float8.Recipe(), rngs=nnx.Rngs(0))
    >>> optimizer = nnx.Optimizer(layer, optax.sgd(0.1), wrt=nnx.Param)
    >>> def loss(layer, x):
    ...     return (layer(x) ** 2).mean()
    >>> wrt = nnx.DiffState(0, (nnx.Param, OverwriteWithGradient))
    >>> gradients = nnx.grad(loss, argnums=wrt)(layer, 2 * jnp.ones((1, 8, 3)))
    >>> gradients, scales = nnx.split_state(gradients, nnx.Param, OverwriteWithGradient)
    >>> _ = optimizer.update(layer, gradients)
    >>> nnx.update(layer, scales)
    >>> float(layer.input_amax_history[0])
    2.0
    """


class ConvTranspose(nnx.Module):
    """Transposed convolution; a drop-in for `flax.nnx.ConvTranspose`.

    The constructor, the parameters and the values are Flax's: the state of Flax's module loads into
    this one and gives the same output.  What is new comes last in the signature; it and everything else
    after `strides` is by keyword only.

    ``kernel`` has the shape ``(*kernel_size, in / groups, out)``, or with ``transpose_kernel=True``
    ``(*kernel_size, out / groups, in)``, which is the kernel of the `flax.nnx.Conv` that this layer
    transposes.  ``bias`` has the shape ``(out,)``.

    Args:
      in_features: number of input features.
      out_features: number of output features.
      kernel_size: an integer (one spatial axis) or one integer for each spatial axis.
      strides: an integer or one for each spatial axis; None is 1.
      padding: ``'SAME'`` (output size = input * stride), ``'VALID'``, an integer, or one integer or
        ``(low, high)`` pair for each spatial axis.  Numbers mean what they mean to
        `jax.lax.conv_transpose`: padding of the dilated input, so that more padding makes a larger
        output; see `use_consistent_padding`.  Two more modes, both with output size = input * stride:

        * ``'CIRCULAR'``: inputs are periodic, as in Flax.
        * ``'CAUSAL'``: the first ``input * stride`` outputs of ``'VALID'``, on every spatial axis.
          Output ``t`` depends on inputs ``i <= t / stride`` alone, so a longer input only appends
          outputs.  With stride 1 it is the CAUSAL of `flax.nnx.Conv`.  Flax's ConvTranspose fails there.
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
        layer the transpose of the `flax.nnx.Conv` that has the same kernel.
      promote_dtype: as in Flax, called with ``((inputs, kernel, bias), dtype=dtype)``.
      preferred_element_type: type of the convolution's result; see `jax.lax.conv_transpose`.
      rngs: a `flax.nnx.Rngs`; its stream ``params`` is used, first for the kernel, then for the bias.
      kernel_metadata: metadata of the kernel's `flax.nnx.Param`.
      bias_metadata: metadata of the bias's `flax.nnx.Param`.
      feature_group_count: number of groups that features are split into.
      output_padding: an integer >= 0 or one for each spatial axis: size that is added to the high end of
        the output.  CIRCULAR and CAUSAL, which fix the output size, refuse it.
      use_consistent_padding: True reads numbers in `padding` as the padding of the convolution that this
        layer transposes, as PyTorch does.
      activation: applied to the output, in one call with the convolution and the bias; what
        `jax_deconv.conv_transpose` takes.
      policy: a `jax_deconv.Policy`, or None.
      float8: a `jax_deconv.float8.Recipe`: inputs, kernel and the cotangent of the output are rounded to float8.
        Its delayed scaling is kept in variables of type `OverwriteWithGradient`.

    Raises:
      ValueError, TypeError: if the features are not divisible by the groups or `kernel_size` is not an
        integer or one for each spatial axis; when called, if the mask has another shape than the kernel,
        another setting is not an integer or one for each spatial axis, or whatever
        `jax_deconv.conv_transpose` refuses.

    Source of the convention: `flax.nnx.ConvTranspose` (Flax 0.12).

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jax_deconv.nnx import ConvTranspose
    >>> layer = ConvTranspose(6, 4, (4, 4), (2, 2), feature_group_count=2, rngs=nnx.Rngs(0))
    >>> layer.kernel.shape
    (4, 4, 3, 4)
    >>> layer(jnp.ones((8, 16, 16, 6))).shape
    (8, 32, 32, 4)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = None,
        *,
        padding: PaddingLike = "SAME",
        kernel_dilation: int | Sequence[int] | None = None,
        use_bias: bool = True,
        mask: jax.Array | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike | None = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        transpose_kernel: bool = False,
        promote_dtype: PromoteDtypeFn = promote_dtype,
        preferred_element_type: Dtype | None = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        feature_group_count: int = 1,
        output_padding: int | Sequence[int] | None = None,
        use_consistent_padding: bool = False,
        activation: str | Callable | None = None,
        policy: Policy | None = None,
        float8: Recipe | None = None,
    ):
        self.in_features = _layer.feature_count("in_features", in_features)
        self.out_features = _layer.feature_count("out_features", out_features)
        self.kernel_size = _layer.kernel_size(kernel_size)
        self.strides = strides
        self.padding = padding
        self.kernel_dilation = kernel_dilation
        self.use_bias = use_bias
        self.mask = mask
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.transpose_kernel = transpose_kernel
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type
        self.feature_group_count = feature_group_count
        self.output_padding = output_padding
        self.use_consistent_padding = use_consistent_padding
        self.activation = activation
        self.policy = policy
        self.float8 = float8

        self.kernel_shape = _layer.kernel_shape(self, self.in_features, self.out_features)
        init = _layer.kernel_init(self, kernel_init, default_kernel_init)
        self.kernel = nnx.Param(init(rngs.params(), self.kernel_shape, param_dtype), **kernel_metadata)
        self.bias = nnx.data(None)
        if use_bias:
            self.bias = nnx.Param(bias_init(rngs.params(), (self.out_features,), param_dtype), **bias_metadata)
        _layer.float8_state(self, lambda name, first: setattr(self, name, OverwriteWithGradient(first)))

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Applies the layer.

        Args:
          inputs: ``(*batch, *spatial, in_features)``, with any number of batch axes, also none.

        Returns:
          ``(*batch, *spatial_out, out_features)``.
        """
        flat = _layer.flatten(self, inputs)
        batch_shape = inputs.shape[:inputs.ndim - flat.ndim + 1]
        kernel = _layer.masked(self, self.kernel[...], self.kernel_shape)
        bias = None if self.bias is None else self.bias[...]
        flat, kernel, bias = self.promote_dtype((flat, kernel, bias), dtype=self.dtype)
        state = _layer.float8_state(self, lambda name, first: getattr(self, name)[...])
        return _layer.apply(self, flat, kernel, bias, batch_shape, state)
