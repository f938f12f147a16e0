# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Transposed convolutions as other frameworks spell them; none of the frameworks is needed.

Arguments, their order, defaults and meaning are the framework's, and so are its refusals.  Arrays are JAX's,
and what comes back has every transform.  `jax_deconv.weights` turns kernels from one order into another.

>>> import jax.numpy as jnp
>>> from jax_deconv import compat
>>> compat.torch.conv_transpose1d(jnp.ones((8, 6, 10)), jnp.ones((6, 4, 3)), stride=2, padding=1).shape
(8, 4, 19)
"""

from jax_deconv.compat import keras, mxnet, onnx, tensorflow, torch

__all__ = ["keras", "mxnet", "onnx", "tensorflow", "torch"]
