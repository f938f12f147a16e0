# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""The public functions: check, canonicalise, bind, restore the caller's layout.

`forward` and `gradient` do so for any convention's placement; `compat` calls them, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_deconv import activations, conventions, primitives, sharding
from jax_deconv.activations import Activation, compute_dtype
from jax_deconv.conventions import Placement
from jax_deconv.policy import Policy, resolve
from jax_deconv.problem import GIVEN, Role, wider

Shape = Sequence[int]


def conv_transpose(
    lhs: jax.Array, rhs: jax.Array, strides: Sequence[int], padding, rhs_dilation: Sequence[int] | None = None,
    dimension_numbers=None, transpose_kernel: bool = False, precision=None, preferred_element_type=None,
    use_consistent_padding: bool = False, *, feature_group_count: int = 1,
    output_padding: Sequence[int] | None = None, output_shape: Sequence[int] | None = None,
    bias: jax.Array | None = None, residual: jax.Array | None = None, activation=None,
    policy: Policy | None = None,
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
      residual: an array of the result's shape and axis order, added to it.
      activation: what is applied to the sum: a name (``'relu'``, ``'leaky_relu'``, ``'elu'``, ``'gelu'``,
        ``'gelu_exact'``, ``'silu'``, ``'tanh'``, ``'sigmoid'``, ``'relu6'``), one with parameters from
        `jax_deconv.activations`, or any function of an array.  Of those in the set the backward pass
        keeps one array, the result itself where that tells the slope.
      policy: how the result and its gradients may be computed; see `Policy`.

    Returns:
      ``activation(convolution + bias + residual)``, with ``C_out`` channels, in the axis order that
      `dimension_numbers` names.  16-bit sums are added and activated in float32.

    Raises:
      ValueError, TypeError: an argument is of the wrong kind or does not fit the others; `output_shape`
        is not a size that the convolution takes back to that of `lhs`; the result's size is negative; or
        the activation is not defined for its type (integers have relu, relu6 and clipped; complex none).

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
    check_arrays(lhs=lhs, rhs=rhs)
    placement = conventions.lax_conv_transpose(
        lhs.shape, rhs.shape, strides, padding, rhs_dilation, dimension_numbers, transpose_kernel,
        use_consistent_padding, feature_group_count=feature_group_count, output_padding=output_padding,
        output_shape=output_shape)
    return forward(Role.X, placement, lhs, rhs, bias=bias, residual=residual, activation=activation,
                   preferred_element_type=preferred_element_type, policy=resolve(policy, precision))


def conv(
    lhs: jax.Array, rhs: jax.Array, window_strides: Sequence[int], padding,
    rhs_dilation: Sequence[int] | None = None, dimension_numbers=None, precision=None,
    preferred_element_type=None, *, feature_group_count: int = 1, bias: jax.Array | None = None,
    residual: jax.Array | None = None, activation=None, policy: Policy | None = None,
) -> jax.Array:
    """Convolution, as `jax.lax.conv_general_dilated` without a dilation of the input.

    The operation whose transpose `conv_transpose` is, with the same policies and algorithms.

    Args:
      lhs: input of rank ``n + 2``; by default channels-first, ``[N, C_in, *spatial]``.
      rhs: kernel of rank ``n + 2``; by default ``[C_out, C_in / groups, *kernel]``.
      window_strides: `n` integers >= 1.
      padding: ``'SAME'``, ``'SAME_LOWER'``, ``'VALID'`` or `n` (low, high) pairs; negative numbers crop.
      rhs_dilation, precision, preferred_element_type, feature_group_count, bias, residual, activation,
        policy: as in `conv_transpose`.
      dimension_numbers: default ``('NCHW', 'OIHW', 'NCHW')`` for n = 2.

    Returns:
      ``activation(convolution + bias + residual)``, with ``C_out`` channels.

    Raises:
      ValueError, TypeError: an argument is of the wrong kind or does not fit the others, or the activation
        is not defined for the type of the result.

    Example:

    >>> import jax.numpy as jnp, jax_deconv
    >>> x, w = jnp.ones((8, 32, 16, 16)), jnp.ones((64, 32, 3, 3))
    >>> jax_deconv.conv(x, w, (2, 2), "SAME").shape
    (8, 64, 8, 8)
    """
    check_arrays(lhs=lhs, rhs=rhs)
    placement = conventions.lax_conv(lhs.shape, rhs.shape, window_strides, padding, rhs_dilation,
                                     dimension_numbers, feature_group_count=feature_group_count)
    return forward(Role.Y, placement, lhs, rhs, bias=bias, residual=residual, activation=activation,
                   preferred_element_type=preferred_element_type, policy=resolve(policy, precision))


def conv_transpose_data_gradient(
    cotangent: jax.Array, rhs: jax.Array, lhs_shape: Shape, strides: Sequence[int], padding,
    rhs_dilation: Sequence[int] | None = None, dimension_numbers=None, transpose_kernel: bool = False,
    precision=None, preferred_element_type=None, use_consistent_padding: bool = False, *,
    feature_group_count: int = 1, output_padding: Sequence[int] | None = None,
    output_shape: Sequence[int] | None = None, accumulate_into: jax.Array | None = None,
    policy: Policy | None = None,
) -> jax.Array:
    """The gradient of `conv_transpose` in lhs: what `jax.vjp` gives for `cotangent`.

    Args:
      cotangent: of the shape of the result.
      lhs_shape: the shape of lhs.
      accumulate_into: an array of shape `lhs_shape` to add the gradient to, of the gradient's type or a
        wider one.  Donated to `jax.jit`, or carried through a loop, it is updated in place.
      rhs and the others: as in `conv_transpose`; `preferred_element_type` is the type of the gradient.

    Returns:
      An array of shape `lhs_shape`: the gradient, or ``accumulate_into + gradient``.

    Raises:
      ValueError, TypeError: as in `conv_transpose`; `cotangent` has another shape than the result, or
        `accumulate_into` another one than the gradient, or a type that does not hold it.

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
    return gradient(Role.Y, placement, {Role.X: cotangent, Role.W: rhs}, {Role.Y: lhs_shape, Role.W: rhs.shape},
                    preferred_element_type=preferred_element_type, accumulate_into=accumulate_into,
                    policy=resolve(policy, precision))


def conv_transpose_filter_gradient(
    lhs: jax.Array, cotangent: jax.Array, rhs_shape: Shape, strides: Sequence[int], padding,
    rhs_dilation: Sequence[int] | None = None, dimension_numbers=None, transpose_kernel: bool = False,
    precision=None, preferred_element_type=None, use_consistent_padding: bool = False, *,
    feature_group_count: int = 1, output_padding: Sequence[int] | None = None,
    output_shape: Sequence[int] | None = None, accumulate_into: jax.Array | None = None,
    policy: Policy | None = None,
) -> jax.Array:
    """The gradient of `conv_transpose` in rhs: what `jax.vjp` gives for `cotangent`.

    Args:
      cotangent: of the shape of the result.
      rhs_shape: the shape of rhs.
      accumulate_into: an array of shape `rhs_shape` to add the gradient to, of the gradient's type or a
        wider one.  Donated to `jax.jit`, or carried through a loop, it is updated in place.
      lhs and the others: as in `conv_transpose`; `preferred_element_type` is the type of the gradient.

    Returns:
      An array of shape `rhs_shape`: the gradient, or ``accumulate_into + gradient``.

    Raises:
      ValueError, TypeError: as in `conv_transpose`; `cotangent` has another shape than the result, or
        `accumulate_into` another one than the gradient, or a type that does not hold it.

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
    return gradient(Role.W, placement, {Role.X: cotangent, Role.Y: lhs}, {Role.Y: lhs.shape, Role.W: rhs_shape},
                    preferred_element_type=preferred_element_type, accumulate_into=accumulate_into,
                    policy=resolve(policy, precision))


def check_array(name: str, array):
    if not isinstance(array, jax.Array | np.ndarray) or jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        raise TypeError(f"{name} must be an array of numbers; got {array!r}")


def _check_addend(name: str, array, shape: Shape, meaning: str, types):
    check_array(name, array)
    if array.shape != shape:
        raise ValueError(f"{name} must have {meaning}, {shape}; got {array.shape}")
    if jax.dtypes.canonicalize_dtype(array.dtype) not in types:
        raise TypeError(f"{name} must have the type of lhs or of the result ({', '.join(map(str, types))}); "
                        f"got {array.dtype}")


def check_arrays(**arrays):
    for name, array in arrays.items():
        check_array(name, array)
    types = [jax.dtypes.canonicalize_dtype(array.dtype) for array in arrays.values()]
    if len(set(types)) > 1:
        raise TypeError(f"{' and '.join(arrays)} must have the same type of elements; got "
                        f"{' and '.join(map(str, types))}")


def _check_gradient(cotangent, name: str, operand, shape_name: str, shape) -> Shape:
    """Checks what a gradient is made of and returns the shape of what it is the gradient of."""
    check_array("cotangent", cotangent)
    check_array(name, operand)
    try:
        _result_type(operand.dtype, cotangent.dtype)
    except TypeError as error:
        raise TypeError(f"cotangent must have the type of {name}, {operand.dtype}, or one that it may be given as "
                        f"preferred_element_type; got {cotangent.dtype}") from error
    return conventions.integers(shape_name, shape, operand.ndim, 0, symbolic=True)


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


def forward(role: Role, placement: Placement, lhs, rhs, *, policy: Policy, bias=None, residual=None, activation=None,
            preferred_element_type=None, differentiable: Callable | None = None):
    """Makes `role` from the caller's arrays: activation(it + bias + residual).

    `differentiable` is called in place of `compute` where that has another derivative than its own.
    """
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    dtype = _result_type(lhs.dtype, preferred_element_type)
    types = tuple(dict.fromkeys((lhs.dtype, dtype)))
    if bias is not None:
        _check_addend("bias", bias, (placement.channels(role, rhs.shape),),
                      "one number for each channel of the result", types)
        bias = jnp.asarray(bias, dtype)
    if residual is not None:
        expected = placement.result_shape(role, dict(zip(GIVEN[role], (lhs.shape, rhs.shape))))
        _check_addend("residual", residual, expected, "the shape of the result", types)
        residual = jnp.asarray(residual, dtype)
    activation = activations.resolve(activation)
    function = None
    if isinstance(activation, Activation):
        activation.check(dtype)
    else:
        activation, function = None, activation
    operands = [lhs, rhs, bias, residual]
    if differentiable is None and policy.backward is not None:
        differentiable = _with_backward_policy
    if differentiable is None:
        out = compute(role, placement, dtype, policy, activation, *operands)
    else:
        # A custom_vjp's gradients vary over the axes that its operands vary over: cast before it.
        there = [i for i, t in enumerate(operands) if t is not None]
        for i, t in zip(there, sharding.same_varying_axes(*(operands[i] for i in there))):
            operands[i] = t
        out = differentiable(role, placement, dtype, policy, activation, *operands)
    return out if function is None else function(out)


def compute(role: Role, placement: Placement, dtype, policy: Policy, activation: Activation | None, a, b,
            bias=None, residual=None):
    """Makes `role` from the caller's operands, in the caller's layout."""
    operands = {r: placement.canonical(r, t) for r, t in zip(GIVEN[role], (a, b))}
    if residual is not None:
        residual = placement.canonical(role, residual)
    out = primitives.bind(role, operands, geometry=placement.geometry, groups=placement.groups, dtype=dtype,
                          policy=dataclasses.replace(policy, backward=None), bias=bias, residual=residual,
                          activation=activation)
    return placement.restore(role, out)


# Here and in float8.py alone is the backward pass meant to differ from the derivative of the forward computation.
_with_backward_policy = jax.custom_vjp(compute, nondiff_argnums=(0, 1, 2, 3, 4))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Types:
    """The types of a call's arrays, of some of which the backward pass needs nothing else."""

    lhs: jax.core.ShapedArray
    rhs: jax.core.ShapedArray
    bias: jax.core.ShapedArray | None
    residual: jax.core.ShapedArray | None

    @classmethod
    def of(cls, *arrays) -> Types:
        return cls(*(t if t is None else jax.typeof(t) for t in arrays))


def _backward_forward(role, placement, dtype, policy, activation, a, b, bias, residual):
    fused = activation is None or activation.from_output
    saved = compute(role, placement, dtype, policy, activation if fused else None, a, b, bias, residual)
    types = Types.of(a, b, bias, residual)
    return saved if fused else activation(saved), (a, b, None if activation is None else saved, types)


def _backward(role, placement, dtype, policy, activation, residuals, cotangent):
    *operands, saved, types = residuals
    wide, bias, residual = pull_epilogue(role, placement, dtype, activation, saved, types, cotangent)
    cotangent = wide.astype(dtype)

    def gradient(target: Role):
        given = dict(zip(GIVEN[role], operands))
        like = given.pop(target)
        given[role] = cotangent
        out = compute(target, placement, like.dtype, policy.backward, None, *(given[r] for r in GIVEN[target]))
        return sharding.like(out, jax.typeof(like))

    return *map(gradient, GIVEN[role]), bias, residual


def pull_epilogue(role: Role, placement: Placement, dtype, activation: Activation | None, saved, types: Types,
                  cotangent):
    """The cotangents of the convolution, in the compute type, of the bias and of the residual from the result's.

    `saved` is what `activation.push` takes; `dtype` is the result's.
    """
    wide = cotangent.astype(compute_dtype(dtype))
    if activation is not None:
        wide = activation.push(saved, wide)  # its own transpose
    bias = residual = None
    if types.bias is not None:
        positions = tuple(i for i in range(wide.ndim) if i != placement.perm(role)[1])
        bias = sharding.like(wide.sum(positions).astype(dtype), types.bias)
    if types.residual is not None:
        residual = sharding.like(wide.astype(dtype), types.residual)
    return wide, bias, residual


_with_backward_policy.defvjp(_backward_forward, _backward)


def check_cotangent(placement: Placement, cotangent, shapes, name: str = "cotangent"):
    """Checks the cotangent, called `name`, of the operation that takes arrays of `shapes`."""
    (made,) = set(Role) - set(shapes)
    expected = placement.result_shape(made, shapes)
    if cotangent.shape != expected:
        raise ValueError(f"{name} must have the shape of the result, {expected}; got {cotangent.shape}")


def gradient(role: Role, placement: Placement, operands, shapes, *, policy: Policy, preferred_element_type=None,
             accumulate_into=None, name: str = "cotangent"):
    """One of the two gradients of the operation that takes arrays of `shapes`; `operands` are one of them and the
    cotangent, which is called `name`."""
    (primal,), (made,) = set(operands) & set(shapes), set(operands) - set(shapes)
    check_cotangent(placement, operands[made], shapes, name)
    dtype = _result_type(operands[primal].dtype, preferred_element_type)
    if accumulate_into is not None:
        check_array("accumulate_into", accumulate_into)
        if accumulate_into.shape != tuple(shapes[role]):
            raise ValueError(f"accumulate_into must have the shape of the gradient, {tuple(shapes[role])}; "
                             f"got {accumulate_into.shape}")
        into = jax.dtypes.canonicalize_dtype(accumulate_into.dtype)
        if wider(dtype, into) != into:
            raise TypeError(f"accumulate_into must have a type that holds the gradient's, {dtype}; got {into}")
    out = compute(role, placement, dtype, policy.backward or policy, None,
                  *(jnp.asarray(operands[r]) for r in GIVEN[role]))
    return out if accumulate_into is None else jnp.asarray(accumulate_into) + out.astype(into)
