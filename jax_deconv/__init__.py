# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Transposed convolution for JAX: every transform, groups, output sizes, and cuDNN through XLA FFI."""

from jax_deconv import activations
from jax_deconv.api import (
    conv,
    conv_transpose,
    conv_transpose_data_gradient,
    conv_transpose_filter_gradient,
)
from jax_deconv.explain import explain
from jax_deconv.policy import Policy, use_policy

__version__ = "0.1.0"

__all__ = [
    "Policy",
    "activations",
    "conv",
    "conv_transpose",
    "conv_transpose_data_gradient",
    "conv_transpose_filter_gradient",
    "explain",
    "use_policy",
]
