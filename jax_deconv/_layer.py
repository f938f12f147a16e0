# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""What the Flax modules share: everything but where parameters live.

`linen.ConvTranspose` and `nnx.ConvTranspose` name their settings alike, so the functions here take
the module itself and read the settings from it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.nn import initializers

from jax_deconv import activations, float8
from jax_deconv.api import conv_transpose
from jax_deconv.conventions import group_count, integers, is_integer, pairs, per_axis

_INPUT_TIMES_STRIDE = ("CIRCULAR", "CAUSAL")


def kernel_size(size) -> tuple[int, ...]:
    """A module's kernel_size; an integer is that of one spatial axis, as in Flax."""
    try:
        sizes = (size,) if is_integer(size) else tuple(size)
        return integers("kernel_size", sizes, len(sizes), 1)
    except (TypeError, ValueError) as error:
        raise type(error)(f"kernel_size must be an integer >= 1 or have one for each spatial axis; got {size!r}"
                          ) from None


def feature_count(name: str, value) -> int:
    if not is_integer(value) or operator.index(value) < 0:
        raise ValueError(f"{name} must be an integer >= 0; got {value!r}")
    return operator.index(value)


def kernel_shape(module, in_features: int, features: int) -> tuple[int, ...]:
    """``(*kernel_size, in/groups, out)``, or with transpose_kernel ``(*kernel_size, out/groups, in)``."""
    groups = group_count(module.feature_group_count)
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
    given = getattr(module.mask, "shape", module.mask)
    if not hasattr(module.mask, "shape") or given != shape:
        raise ValueError(f"mask must be an array of the kernel's shape, {shape}; got {given!r}")
    return kernel * module.mask


def flatten(module, inputs):
    """All batch axes as one; none becomes one of size 1."""
    rank = len(kernel_size(module.kernel_size))
    if getattr(inputs, "ndim", 0) < rank + 1:
        raise ValueError(f"inputs must be an array of at least {rank + 1} axes (kernel_size {module.kernel_size!r} "
                         f"has {rank} spatial axes, features come last); got {getattr(inputs, 'shape', inputs)!r}")
    split = inputs.ndim - rank - 1
    if split == 1:
        return inputs
    return jnp.reshape(inputs, (math.prod(inputs.shape[:split]), *inputs.shape[split:]))


def float8_state(module, variable: Callable[[str, jax.Array], jax.Array]) -> float8.State | None:
    """The state of delayed scaling; `variable` gives what a name stands for, and takes what it is at first."""
    if not isinstance(module.float8, float8.Recipe | None):
        raise TypeError(f"float8 must be None or a jax_deconv.float8.Recipe; got {module.float8!r}")
    fresh = None if module.float8 is None else module.float8.state()
    if fresh is None:
        return None
    return float8.State(*(float8.Scale(*(variable(f"{tensor}_{name}", first) for name, first in each._asdict().items()))
                          for tensor, each in fresh._asdict().items()))


def apply(module, inputs, kernel, bias, batch_shape, state: float8.State | None = None) -> jax.Array:
    """The layer's output from flattened inputs and promoted parameters."""
    rank = len(kernel_size(module.kernel_size))
    # None means 1, as in Flax.
    strides = per_axis("strides", 1 if module.strides is None else module.strides, rank)
    dilation = per_axis("kernel_dilation", 1 if module.kernel_dilation is None else module.kernel_dilation, rank)
    output_padding = module.output_padding
    if output_padding is not None:
        output_padding = per_axis("output_padding", output_padding, rank, least=0)

    padding = _padding(module.padding, rank)
    consistent = module.use_consistent_padding
    if padding in _INPUT_TIMES_STRIDE:
        if output_padding is not None and any(output_padding):
            raise ValueError(f"output_padding must be left out with padding={padding!r}, which fixes the "
                             f"output size to input * stride; got {module.output_padding!r}")
        consistent = False
        inputs, padding = _input_times_stride(module, inputs, strides, dilation)

    # A bias of a wider type than the convolution makes a sum of that type, as in Flax.
    dtype = module.preferred_element_type or inputs.dtype
    fits = bias is None or jnp.promote_types(dtype, bias.dtype) == dtype
    if fits and bias is not None:
        bias = bias.astype(dtype)
    convolve = conv_transpose
    if module.float8 is not None:
        convolve = functools.partial(float8.conv_transpose, recipe=module.float8, state=state)
    y = convolve(
        inputs, kernel, strides, padding, rhs_dilation=dilation, transpose_kernel=module.transpose_kernel,
        precision=module.precision, preferred_element_type=module.preferred_element_type,
        use_consistent_padding=consistent,
        feature_group_count=module.feature_group_count, output_padding=output_padding,
        bias=bias if fits else None, activation=module.activation if fits else None, policy=module.policy)
    if not fits:
        y = (activations.resolve(module.activation) or (lambda y: y))(y + bias)
    return jnp.reshape(y, (*batch_shape, *y.shape[1:]))


def _padding(padding, rank: int):
    """A string, or a (low, high) pair for each spatial axis."""
    if isinstance(padding, str):
        return padding
    try:
        each = (padding,) * rank if is_integer(padding) else padding
        return pairs([(p, p) if is_integer(p) else p for p in each], rank)
    except (TypeError, ValueError):
        raise ValueError(f"padding must be a string, an integer, or have an integer or a (low, high) pair "
                         f"for each of the {rank} spatial axes of kernel_size; got {padding!r}") from None


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
