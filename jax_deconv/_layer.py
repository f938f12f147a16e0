# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""What the Flax modules share: everything but where parameters live.

`linen.ConvTranspose` and `nnx.ConvTranspose` name their settings alike, so the functions here take
the module itself and read the settings from it.
"""

from __future__ import annotations

import math
import operator

import jax
import jax.numpy as jnp
from jax.nn import initializers

from jax_deconv.api import conv_transpose

_INPUT_TIMES_STRIDE = ("CIRCULAR", "CAUSAL")


def _per_axis(name: str, value, rank: int) -> tuple[int, ...]:
    """`value` as one integer for each spatial axis; None means 1, as in Flax."""
    value = 1 if value is None else value
    values = (value,) * rank if _is_int(value) else tuple(value)
    if len(values) != rank:
        raise ValueError(f"{name} must be an integer or have one entry for each of the {rank} spatial "
                         f"axes of kernel_size; got {value!r}")
    return tuple(map(operator.index, values))


def _is_int(value) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__index__") and not getattr(value, "shape", ())


def kernel_size(size) -> tuple[int, ...]:
    """A module's kernel_size; an integer is that of one spatial axis, as in Flax."""
    return (operator.index(size),) if _is_int(size) else tuple(map(operator.index, size))


def kernel_shape(module, in_features: int, features: int) -> tuple[int, ...]:
    """``(*kernel_size, in/groups, out)``, or with transpose_kernel ``(*kernel_size, out/groups, in)``."""
    groups = module.feature_group_count
    if not _is_int(groups) or groups < 1:
        raise ValueError(f"feature_group_count must be a positive integer; got {groups!r}")
    for name, count in (("input", in_features), ("output", features)):
        if count % groups:
            raise ValueError(f"feature_group_count must divide the number of {name} features; "
                             f"got {groups} groups for {count} features")
    first, last = (features, in_features) if module.transpose_kernel else (in_features, features)
    return (*kernel_size(module.kernel_size), first // groups, last)


def kernel_init(module, init, default):
    """The user's initialiser as it is; in place of Flax's default, lecun_normal with the right fan-in.

    An output value is a sum over ``prod(kernel_size) * in_features / groups`` taps.  An initialiser
    sees nothing but a shape and reads its last two axes as (in, out), which for the kernel order of
    transpose_kernel, (out/groups, in), scales by the wrong channels.
    """
    if init is not default or not module.transpose_kernel:
        return init
    return initializers.variance_scaling(module.feature_group_count, "fan_in", "truncated_normal",
                                         in_axis=-1, out_axis=-2)


def masked(module, kernel, shape):
    if module.mask is None:
        return kernel
    if module.mask.shape != shape:
        raise ValueError(f"mask must have the shape of the kernel, {shape}; got {module.mask.shape}")
    return kernel * module.mask


def flatten(module, inputs):
    """All batch axes as one; none becomes one of size 1."""
    rank = len(kernel_size(module.kernel_size))
    if inputs.ndim < rank + 1:
        raise ValueError(f"inputs must have at least {rank + 1} axes (kernel_size {module.kernel_size} has "
                         f"{rank} spatial axes, features come last); got shape {inputs.shape}")
    split = inputs.ndim - rank - 1
    if split == 1:
        return inputs
    return jnp.reshape(inputs, (math.prod(inputs.shape[:split]), *inputs.shape[split:]))


def apply(module, inputs, kernel, bias, batch_shape) -> jax.Array:
    """The layer's output from flattened inputs and promoted parameters."""
    rank = len(kernel_size(module.kernel_size))
    strides = _per_axis("strides", module.strides, rank)
    dilation = _per_axis("kernel_dilation", module.kernel_dilation, rank)
    output_padding = module.output_padding
    if output_padding is not None:
        output_padding = _per_axis("output_padding", output_padding, rank)

    padding = _padding(module.padding, rank)
    if padding in _INPUT_TIMES_STRIDE:
        if output_padding is not None and any(output_padding):
            raise ValueError(f"output_padding must be left out with padding={padding!r}, which fixes the "
                             f"output size to input * stride; got {module.output_padding!r}")
        inputs, padding = _input_times_stride(module, inputs, strides, dilation)

    y = conv_transpose(
        inputs, kernel, strides, padding, rhs_dilation=dilation, transpose_kernel=module.transpose_kernel,
        precision=module.precision, preferred_element_type=module.preferred_element_type,
        use_consistent_padding=module.use_consistent_padding and module.padding not in _INPUT_TIMES_STRIDE,
        feature_group_count=module.feature_group_count, output_padding=output_padding, policy=module.policy)
    if bias is not None:
        y += bias  # outside the convolution, because the sum may be of a wider type than y, as in Flax
    return jnp.reshape(y, (*batch_shape, *y.shape[1:]))


def _padding(padding, rank: int):
    """A string, or a (low, high) pair for each spatial axis."""
    if isinstance(padding, str):
        return padding
    if _is_int(padding):
        return [(padding, padding)] * rank
    pairs = [(p, p) if _is_int(p) else tuple(p) for p in padding]
    if len(pairs) != rank or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"padding must be a string, an integer, or have an integer or a (low, high) pair "
                         f"for each of the {rank} spatial axes of kernel_size; got {padding!r}")
    return pairs


def _input_times_stride(module, inputs, strides, dilation):
    """Inputs and explicit padding of the two modes whose output has size input * stride.

    CAUSAL is VALID without its tail: output t sums inputs i <= t / stride only.  CIRCULAR is the
    transposed convolution of the inputs repeated without end, cut out so that the kernel sits in the
    middle; a repeated input is wrapped around only as far as the kernel reaches.  Both are said as
    padding of the dilated input; whole strides of it are where repeated inputs go.
    """
    circular = module.padding == "CIRCULAR"
    extents = [(k - 1) * d + 1 for k, d in zip(kernel_size(module.kernel_size), dilation, strict=True)]
    pads, wraps = [], []
    for size, extent, stride in zip(inputs.shape[1:-1], extents, strides, strict=True):
        # How an odd excess of the kernel is split between the two ends follows Flax.
        shift = (max(extent - stride, 0) + bool(module.transpose_kernel)) // 2 if circular else 0
        low, high = (extent - 1 - shift, stride - 1 + shift) if size else (0, 0)
        pads.append((low % stride, high % stride) if circular else (low, high))
        wraps.append((low // stride, high // stride) if circular else (0, 0))
    if any(map(any, wraps)):
        inputs = jnp.pad(inputs, [(0, 0), *wraps, (0, 0)], mode="wrap")
    return inputs, pads
