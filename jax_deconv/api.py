# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""The public functions: check, canonicalise, bind, restore the caller's layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_deconv import conventions, primitives, sharding
from jax_deconv.conventions import Placement
from jax_deconv.policy import Policy, resolve
from jax_deconv.problem import GIVEN, Role

Shape = Sequence[int]


def conv_transpose(
    lhs: jax.Array, rhs: jax.Array, strides: Sequence[int], padding, rhs_dilation: Sequence[int] | None = None,
    dimension_numbers=None, transpose_kernel: bool = False, precision=None, preferred_element_type=None,
    use_consistent_padding: bool = False, *, feature_group_count: int = 1,
    output_padding: Sequence[int] | None = None, output_shape: Sequence[int] | None = None,
    bias: jax.Array | None = None, policy: Policy | None = None,
) -> jax.Array:
    """Transposed convolution, a drop-in for `jax.lax.conv_transpose`.

    The arguments up to `use_consistent_padding` are lax's, and what lax accepts has lax's value.

    Args:
      lhs: input of rank ``n + 2``; by default channels-last, ``[N, *spatial, C_in]``.
      rhs: kernel of rank ``n + 2``; by default ``[*kernel, C_in / groups, C_out]``, and with
        `transpose_kernel` ``[*kernel, C_out / groups, C_in]``.
      strides: `n` integers >= 1.
      padding: ``'SAME'`` or ``'VALID'``, the padding of the convolution whose transpose this is; or `n`
        (low, high) pairs.  Pairs pad the input dilated by the strides or, with `use_consistent_padding`,
        are the padding of that convolution (they crop the result), as in PyTorch.  Negative numbers do
        the opposite.
      rhs_dilation: `n` integers >= 1, the distance of the kernel's taps; default 1.
      dimension_numbers: the order of the axes of lhs, rhs and the result, as in
        `jax.lax.conv_general_dilated`.  Default ``('NHWC', 'HWIO', 'NHWC')`` for n = 2.
      transpose_kernel: read `rhs` as the kernel of the convolution whose transpose this is: its spatial
        axes are not reversed, and its O axis holds the channels of lhs (Keras, PyTorch).
      precision: as in `jax.lax`; overrides that of `policy`.
      preferred_element_type: the type of the result, and at least that of the accumulation.
      use_consistent_padding: see `padding`.
      feature_group_count: the number of groups into which the channels fall, as in
        `jax.lax.conv_general_dilated`.
      output_padding: `n` integers >= 0 that extend the result at the high end of each spatial axis
        (PyTorch's output_padding, MXNet's adj).  Any value is defined: positions that no tap reaches are
        zero.
      output_shape: the spatial sizes of the result instead.  With ``'SAME'`` or ``'VALID'`` the result
        is the transpose of the convolution from that size with that padding; with pairs the low side
        stays and the high side follows.
      bias: ``[C_out]``, added to the result.
      policy: how the result and its gradients may be computed; see `Policy`.

    Returns:
      The result, with ``C_out`` channels, in the axis order that `dimension_numbers` names.

    Raises:
      ValueError, TypeError: an argument is of the wrong kind or does not fit the others; `output_shape`
        is not a size that the convolution takes back to that of `lhs`; or the result's size is negative.

    Example:

    >>> import jax, jax.numpy as jnp, jax_deconv
    >>> x = jnp.ones((8, 16, 16, 64))      # N, H, W, C_in
    >>> w = jnp.ones((4, 4, 64, 32))       # H, W, C_in, C_out
    >>> jax_deconv.conv_transpose(x, w, strides=(2, 2), padding="SAME").shape
    (8, 32, 32, 32)
    >>> depthwise = jnp.ones((3, 3, 1, 64))
    >>> jax_deconv.conv_transpose(x, depthwise, (2, 2), [(1, 1), (1, 1)], use_consistent_padding=True,
    ...                           feature_group_count=64, output_padding=(1, 1)).shape
    (8, 32, 32, 64)
    """
    _check_arrays(lhs=lhs, rhs=rhs)
    placement = conventions.lax_conv_transpose(
        lhs.shape, rhs.shape, strides, padding, rhs_dilation, dimension_numbers, transpose_kernel,
        use_consistent_padding, feature_group_count=feature_group_count, output_padding=output_padding,
        output_shape=output_shape)
    return _forward(Role.X, placement, lhs, rhs, bias, preferred_element_type, resolve(policy, precision))


def conv(
    lhs: jax.Array, rhs: jax.Array, window_strides: Sequence[int], padding,
    rhs_dilation: Sequence[int] | None = None, dimension_numbers=None, precision=None,
    preferred_element_type=None, *, feature_group_count: int = 1, bias: jax.Array | None = None,
    policy: Policy | None = None,
) -> jax.Array:
    """Convolution, as `jax.lax.conv_general_dilated` without a dilation of the input.

    The operation whose transpose `conv_transpose` is, with the same policies and algorithms.

    Args:
      lhs: input of rank ``n + 2``; by default channels-first, ``[N, C_in, *spatial]``.
      rhs: kernel of rank ``n + 2``; by default ``[C_out, C_in / groups, *kernel]``.
      window_strides: `n` integers >= 1.
      padding: ``'SAME'``, ``'SAME_LOWER'``, ``'VALID'`` or `n` (low, high) pairs; negative numbers crop.
      rhs_dilation, precision, preferred_element_type, feature_group_count, bias, policy: as in
        `conv_transpose`.
      dimension_numbers: default ``('NCHW', 'OIHW', 'NCHW')`` for n = 2.

    Returns:
      The result, with ``C_out`` channels.

    Raises:
      ValueError, TypeError: an argument is of the wrong kind or does not fit the others.

    Example:

    >>> import jax.numpy as jnp, jax_deconv
    >>> x, w = jnp.ones((8, 32, 16, 16)), jnp.ones((64, 32, 3, 3))
    >>> jax_deconv.conv(x, w, (2, 2), "SAME").shape
    (8, 64, 8, 8)
    """
    _check_arrays(lhs=lhs, rhs=rhs)
    placement = conventions.lax_conv(lhs.shape, rhs.shape, window_strides, padding, rhs_dilation,
                                     dimension_numbers, feature_group_count=feature_group_count)
    return _forward(Role.Y, placement, lhs, rhs, bias, preferred_element_type, resolve(policy, precision))


def conv_transpose_data_gradient(
    cotangent: jax.Array, rhs: jax.Array, lhs_shape: Shape, strides: Sequence[int], padding,
    rhs_dilation: Sequence[int] | None = None, dimension_numbers=None, transpose_kernel: bool = False,
    precision=None, preferred_element_type=None, use_consistent_padding: bool = False, *,
    feature_group_count: int = 1, output_padding: Sequence[int] | None = None,
    output_shape: Sequence[int] | None = None, policy: Policy | None = None,
) -> jax.Array:
    """The gradient of `conv_transpose` in lhs: what `jax.vjp` gives for `cotangent`.

    Args:
      cotangent: of the shape of the result.
      lhs_shape: the shape of lhs.
      rhs and the others: as in `conv_transpose`; `preferred_element_type` is the type of the gradient.

    Returns:
      An array of shape `lhs_shape`.

    Raises:
      ValueError, TypeError: as in `conv_transpose`, or `cotangent` has another shape than the result.

    Example:

    >>> import jax.numpy as jnp, jax_deconv
    >>> w, dy = jnp.ones((4, 4, 64, 32)), jnp.ones((8, 32, 32, 32))
    >>> jax_deconv.conv_transpose_data_gradient(dy, w, (8, 16, 16, 64), (2, 2), "SAME").shape
    (8, 16, 16, 64)
    """
    lhs_shape = _check_gradient(cotangent, "rhs", rhs, "lhs_shape", lhs_shape)
    placement = conventions.lax_conv_transpose(
        lhs_shape, rhs.shape, strides, padding, rhs_dilation, dimension_numbers, transpose_kernel,
        use_consistent_padding, feature_group_count=feature_group_count, output_padding=output_padding,
        output_shape=output_shape)
    return _gradient(Role.Y, placement, {Role.X: cotangent, Role.W: rhs}, {Role.Y: lhs_shape, Role.W: rhs.shape},
                     preferred_element_type, resolve(policy, precision))


def conv_transpose_filter_gradient(
    lhs: jax.Array, cotangent: jax.Array, rhs_shape: Shape, strides: Sequence[int], padding,
    rhs_dilation: Sequence[int] | None = None, dimension_numbers=None, transpose_kernel: bool = False,
    precision=None, preferred_element_type=None, use_consistent_padding: bool = False, *,
    feature_group_count: int = 1, output_padding: Sequence[int] | None = None,
    output_shape: Sequence[int] | None = None, policy: Policy | None = None,
) -> jax.Array:
    """The gradient of `conv_transpose` in rhs: what `jax.vjp` gives for `cotangent`.

    Args:
      cotangent: of the shape of the result.
      rhs_shape: the shape of rhs.
      lhs and the others: as in `conv_transpose`; `preferred_element_type` is the type of the gradient.

    Returns:
      An array of shape `rhs_shape`.

    Raises:
      ValueError, TypeError: as in `conv_transpose`, or `cotangent` has another shape than the result.

    Example:

    >>> import jax.numpy as jnp, jax_deconv
    >>> x, dy = jnp.ones((8, 16, 16, 64)), jnp.ones((8, 32, 32, 32))
    >>> jax_deconv.conv_transpose_filter_gradient(x, dy, (4, 4, 64, 32), (2, 2), "SAME").shape
    (4, 4, 64, 32)
    """
    rhs_shape = _check_gradient(cotangent, "lhs", lhs, "rhs_shape", rhs_shape)
    placement = conventions.lax_conv_transpose(
        lhs.shape, rhs_shape, strides, padding, rhs_dilation, dimension_numbers, transpose_kernel,
        use_consistent_padding, feature_group_count=feature_group_count, output_padding=output_padding,
        output_shape=output_shape)
    return _gradient(Role.W, placement, {Role.X: cotangent, Role.Y: lhs}, {Role.Y: lhs.shape, Role.W: rhs_shape},
                     preferred_element_type, resolve(policy, precision))


def _check_array(name: str, array):
    if not isinstance(array, jax.Array | np.ndarray) or jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        raise TypeError(f"{name} must be an array of numbers; got {array!r}")


def _check_bias(bias, channels: int, types):
    _check_array("bias", bias)
    if bias.shape != (channels,):
        raise ValueError(f"bias must have shape {(channels,)}, one for each channel of the result; got {bias.shape}")
    if jax.dtypes.canonicalize_dtype(bias.dtype) not in types:
        raise TypeError(f"bias must have the type of lhs or of the result ({', '.join(map(str, types))}); "
                        f"got {bias.dtype}")


def _check_arrays(**arrays):
    for name, array in arrays.items():
        _check_array(name, array)
    (a, b), types = arrays, [jax.dtypes.canonicalize_dtype(array.dtype) for array in arrays.values()]
    if types[0] != types[1]:
        raise TypeError(f"{a} and {b} must have the same type of elements; got {types[0]} and {types[1]}")


def _check_gradient(cotangent, name: str, operand, shape_name: str, shape) -> Shape:
    """Checks what a gradient is made of and returns the shape of what it is the gradient of."""
    _check_array("cotangent", cotangent)
    _check_array(name, operand)
    try:
        _result_type(operand.dtype, cotangent.dtype)
    except TypeError as error:
        raise TypeError(f"cotangent must have the type of {name}, {operand.dtype}, or one that it may be given as "
                        f"preferred_element_type; got {cotangent.dtype}") from error
    return conventions.integers(shape_name, shape, operand.ndim, 0)


def _result_type(dtype, preferred_element_type):
    """lax's rule for the type of a result, and its refusals."""
    if preferred_element_type is None:
        return jnp.dtype(dtype)
    unit = jax.ShapeDtypeStruct((1, 1), dtype)
    try:
        return jax.eval_shape(lambda a: lax.conv_general_dilated(
            a, a, (), [], preferred_element_type=preferred_element_type), unit).dtype
    except TypeError as error:
        raise TypeError(f"preferred_element_type={preferred_element_type!r} for operands of type {dtype}: "
                        f"{error}") from error


def _forward(role: Role, placement: Placement, lhs, rhs, bias, preferred_element_type, policy: Policy):
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    dtype = _result_type(lhs.dtype, preferred_element_type)
    channels = placement.channels(role, rhs.shape)
    if bias is not None:
        _check_bias(bias, channels, (lhs.dtype, dtype))
    if policy.backward is None:
        out = _compute(role, placement, dtype, policy, lhs, rhs)
    else:
        # A custom_vjp's gradients vary over the axes that its operands vary over: cast before it.
        out = _with_backward_policy(role, placement, dtype, policy, *sharding.same_varying_axes(lhs, rhs))
    if bias is None:
        return out
    axis = placement.perm(role)[1]
    return out + bias.astype(dtype).reshape([channels if i == axis else 1 for i in range(out.ndim)])


def _compute(role: Role, placement: Placement, dtype, policy: Policy, a, b):
    """Makes `role` from the caller's two operands, in the caller's layout."""
    operands = {r: placement.canonical(r, t) for r, t in zip(GIVEN[role], (a, b))}
    out = primitives.bind(role, operands, geometry=placement.geometry, groups=placement.groups, dtype=dtype,
                          policy=dataclasses.replace(policy, backward=None))
    return placement.restore(role, out)


# The one place where the backward pass is meant to differ from the derivative of the forward computation.
_with_backward_policy = jax.custom_vjp(_compute, nondiff_argnums=(0, 1, 2, 3))


def _backward_forward(role, placement, dtype, policy, a, b):
    return _compute(role, placement, dtype, policy, a, b), (a, b)


def _backward(role, placement, dtype, policy, residuals, cotangent):
    def gradient(target: Role):
        given = dict(zip(GIVEN[role], residuals))
        like = given.pop(target)
        given[role] = cotangent
        out = _compute(target, placement, like.dtype, policy.backward, *(given[r] for r in GIVEN[target]))
        return sharding.like(out, jax.typeof(like))

    return tuple(map(gradient, GIVEN[role]))


_with_backward_policy.defvjp(_backward_forward, _backward)


def _gradient(role: Role, placement: Placement, operands, shapes, preferred_element_type, policy: Policy):
    """One of the two gradients of the transposed convolution that takes `shapes` to the cotangent."""
    expected = placement.result_shape(Role.X, shapes)
    if operands[Role.X].shape != expected:
        raise ValueError(f"cotangent must have the shape of the result, {expected}; got {operands[Role.X].shape}")
    primal = Role.W if role is Role.Y else Role.Y
    dtype = _result_type(operands[primal].dtype, preferred_element_type)
    return _compute(role, placement, dtype, policy.backward or policy, *(jnp.asarray(operands[r]) for r in GIVEN[role]))
