# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's convolutions and transposed convolutions.

Images are ``[N, C, *spatial]`` or, unbatched, ``[C, *spatial]``; kernels ``[C_out, C_in / groups, *kernel]``, and
of transposed convolutions ``[C_in, C_out / groups, *kernel]``.  An integer, or a sequence of one, stands for every
spatial axis.

Source of the conventions: PyTorch 2.13, `torch.nn.functional`, `torch.nn` and the operators ``aten::cudnn_*``.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jax_deconv import api, conventions
from jax_deconv.conventions import Placement
from jax_deconv.policy import Policy, resolve
from jax_deconv.problem import GIVEN, Role

__all__ = [
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution_backward",
    "cudnn_convolution", "cudnn_convolution_add_relu", "cudnn_convolution_backward",
    "cudnn_convolution_backward_input", "cudnn_convolution_backward_weight", "cudnn_convolution_relu",
    "cudnn_convolution_transpose", "cudnn_convolution_transpose_backward",
    "cudnn_convolution_transpose_backward_input", "cudnn_convolution_transpose_backward_weight", "cudnn_policy",
]

Sizes = int | Sequence[int]


def cudnn_policy(benchmark: bool | None = None, deterministic: bool | None = None, allow_tf32: bool | None = None
                 ) -> Policy:
    """The policy that ``torch.backends.cudnn``'s settings of these names ask for; None leaves one open.

    Args:
      benchmark: True times algorithms that the tuning store does not hold; False leaves the choice to heuristics.
      deterministic: True asks for bitwise repeatable results.
      allow_tf32: whether float32 operands may be rounded to TF32 on a GPU.

    Raises:
      TypeError: one is neither True, False nor None.

    >>> policy = cudnn_policy(benchmark=True, allow_tf32=False)
    >>> policy.autotune, policy.precision.name
    ('full', 'HIGHEST')
    """
    for name, value in (("benchmark", benchmark), ("deterministic", deterministic), ("allow_tf32", allow_tf32)):
        if not isinstance(value, bool | None):
            raise TypeError(f"{name} must be True, False or None; got {value!r}")
    return Policy(autotune={True: "full", False: "off", None: None}[benchmark], deterministic=deterministic,
                  precision={True: "default", False: "highest", None: None}[allow_tf32])


def _batched(name: str, input, weight, rank: int):
    """The input with a batch axis."""
    api.check_arrays(input=input, weight=weight)
    if input.ndim not in (rank + 1, rank + 2):
        raise ValueError(f"input of {name} must have {rank + 2} axes, or {rank + 1} without a batch; got shape "
                         f"{input.shape}")
    return input if input.ndim == rank + 2 else input[None]


def _make_conv_transpose(rank: int):
    name = f"conv_transpose{rank}d"

    def conv_transpose(
        input: jax.Array, weight: jax.Array, bias: jax.Array | None = None, stride: Sizes = 1, padding: Sizes = 0,
        output_padding: Sizes = 0, groups: int = 1, dilation: Sizes = 1, *, output_size: Sequence[int] | None = None,
        policy: Policy | None = None,
    ) -> jax.Array:
        batched = _batched(name, input, weight, rank)
        if output_size is not None and hasattr(output_size, "__len__"):
            if len(output_size) not in (rank, input.ndim):
                raise ValueError(f"output_size must have {rank} elements, or {input.ndim} with batch and channels; got "
                                 f"{output_size!r}")
            output_size = output_size[-rank:]
        placement = conventions.torch_conv_transpose(
            batched.shape, weight.shape, stride, padding, output_padding, groups, dilation, output_size)
        out = api.forward(Role.X, placement, batched, weight, bias=bias, policy=resolve(policy))
        return out if input.ndim == rank + 2 else out[0]

    conv_transpose.__name__ = conv_transpose.__qualname__ = name
    conv_transpose.__doc__ = f"""`torch.nn.functional.{name}`.

    Args:
      input: ``[N, C_in, *spatial]`` or ``[C_in, *spatial]``, {rank} spatial axes.
      weight: ``[C_in, C_out / groups, *kernel]``.
      bias: ``[C_out]`` or None.
      stride: integers >= 1.
      padding: integers >= 0, cut from both ends of the result: the padding of the convolution that is transposed.
      output_padding: integers >= 0 that extend the high end; each less than the stride or the dilation.
      groups: the number of groups into which the channels fall.
      dilation: integers >= 1, the distance of the kernel's taps.
      output_size: instead of `output_padding` the size of the result, as the call of `torch.nn.ConvTranspose{rank}d`
        takes it: its spatial axes, or all.
      policy: a `jax_deconv.Policy`, e.g. of `cudnn_policy`.

    Returns:
      ``[N, C_out, *spatial]``, without N if input had none; ``(size - 1) * stride + dilation * (kernel - 1) + 1 -
      2 * padding + output_padding`` long on each spatial axis.

    Raises:
      ValueError, TypeError: an argument is of the wrong kind or does not fit the others; `output_size` is not of the
        `stride` sizes that a convolution takes to the input's; a spatial axis is empty, or would be in the result.

    >>> import jax.numpy as jnp
    >>> x, w = jnp.ones((8, 6, {', '.join('5' * rank)})), jnp.ones((6, 4, {', '.join('3' * rank)}))
    >>> {name}(x, w, stride=2, padding=1, output_padding=1, groups=2).shape
    (8, 8, {', '.join(['10'] * rank)})
    """
    return conv_transpose


conv_transpose1d, conv_transpose2d, conv_transpose3d = map(_make_conv_transpose, (1, 2, 3))

# What torch.nn.Conv calls a padding mode is, to jax.numpy.pad, and how far beyond the input's size it may reach.
_PADDING_MODES = {"reflect": ("reflect", -1), "replicate": ("edge", None), "circular": ("wrap", 0)}


def _pad(input, pads, mode: str):
    if mode not in tuple(_PADDING_MODES):
        raise ValueError(f"padding_mode must be 'zeros', {', '.join(map(repr, _PADDING_MODES))}; got {mode!r}")
    numpy_mode, beyond = _PADDING_MODES[mode]
    if beyond is not None and any(isinstance(n, int) and max(p) > n + beyond for n, p in zip(input.shape[2:], pads)):
        raise ValueError(f"padding must be at most the input's size{' less 1' if beyond else ''} with padding_mode="
                         f"{mode!r}; got {pads} for input of shape {input.shape}")
    return jnp.pad(input, ((0, 0), (0, 0), *pads), mode=numpy_mode)


def _make_conv(rank: int):
    name = f"conv{rank}d"

    def conv(
        input: jax.Array, weight: jax.Array, bias: jax.Array | None = None, stride: Sizes = 1,
        padding: Sizes | str = 0, dilation: Sizes = 1, groups: int = 1, *, padding_mode: str = "zeros",
        policy: Policy | None = None,
    ) -> jax.Array:
        batched = _batched(name, input, weight, rank)
        # Checked as it is, whatever it is padded with.
        placement = conventions.torch_conv(batched.shape, weight.shape, stride, padding, dilation, groups)
        if padding_mode != "zeros":
            batched = _pad(batched, conventions.torch_padding(weight.shape, padding, stride, dilation), padding_mode)
            placement = conventions.torch_conv(batched.shape, weight.shape, stride, 0, dilation, groups)
        out = api.forward(Role.Y, placement, batched, weight, bias=bias, policy=resolve(policy))
        return out if input.ndim == rank + 2 else out[0]

    conv.__name__ = conv.__qualname__ = name
    conv.__doc__ = f"""`torch.nn.functional.{name}`, and the padding modes of `torch.nn.Conv{rank}d`.

    Args:
      input: ``[N, C_in, *spatial]`` or ``[C_in, *spatial]``, {rank} spatial axes.
      weight: ``[C_out, C_in / groups, *kernel]``.
      bias: ``[C_out]`` or None.
      stride: integers >= 1.
      padding: integers >= 0, put at both ends; ``'valid'`` for 0; or, with stride 1, ``'same'``, which keeps the
        size (an odd total has one more at the high end).
      dilation: integers >= 1, the distance of the kernel's taps.
      groups: the number of groups into which the channels fall.
      padding_mode: what is put there: ``'zeros'``, ``'reflect'``, ``'replicate'`` or ``'circular'``.
      policy: a `jax_deconv.Policy`, e.g. of `cudnn_policy`.

    Returns:
      ``[N, C_out, *spatial]``, without N if input had none.

    Raises:
      ValueError, TypeError: an argument is of the wrong kind or does not fit the others; the kernel reaches beyond
        the padded input; a spatial axis is empty.

    >>> import jax.numpy as jnp
    >>> x, w = jnp.ones((8, 6, {', '.join('5' * rank)})), jnp.ones((4, 3, {', '.join('3' * rank)}))
    >>> {name}(x, w, padding='same', groups=2).shape
    (8, 4, {', '.join('5' * rank)})
    """
    return conv


conv1d, conv2d, conv3d = map(_make_conv, (1, 2, 3))


# ---- the operators beneath -----------------------------------------------------------------------------


def cudnn_convolution(
    input: jax.Array, weight: jax.Array, padding: Sizes, stride: Sizes, dilation: Sizes, groups: int, benchmark: bool,
    deterministic: bool, allow_tf32: bool,
) -> jax.Array:
    """``aten::cudnn_convolution``: `conv2d` and the like for any number of spatial axes, without a bias.

    `benchmark`, `deterministic` and `allow_tf32` are those of `cudnn_policy`; the others, and what is refused, are as
    in `conv2d`, but there is always a batch.

    >>> import jax.numpy as jnp
    >>> x, w = jnp.ones((8, 6, 5, 5)), jnp.ones((4, 6, 3, 3))
    >>> cudnn_convolution(x, w, 1, 2, 1, 1, True, False, True).shape
    (8, 4, 3, 3)
    """
    api.check_arrays(input=input, weight=weight)
    placement = conventions.torch_conv(input.shape, weight.shape, stride, padding, dilation, groups)
    policy = cudnn_policy(benchmark, deterministic, allow_tf32)
    return api.forward(Role.Y, placement, input, weight, policy=resolve(policy))


def cudnn_convolution_transpose(
    input: jax.Array, weight: jax.Array, padding: Sizes, output_padding: Sizes, stride: Sizes, dilation: Sizes,
    groups: int, benchmark: bool, deterministic: bool, allow_tf32: bool,
) -> jax.Array:
    """``aten::cudnn_convolution_transpose``: as `cudnn_convolution`, of `conv_transpose2d` and the like.

    >>> import jax.numpy as jnp
    >>> x, w = jnp.ones((8, 4, 3, 3)), jnp.ones((4, 6, 3, 3))
    >>> cudnn_convolution_transpose(x, w, 1, 0, 2, 1, 1, False, True, False).shape
    (8, 6, 5, 5)
    """
    api.check_arrays(input=input, weight=weight)
    placement = conventions.torch_conv_transpose(input.shape, weight.shape, stride, padding, output_padding, groups,
                                                 dilation)
    policy = cudnn_policy(benchmark, deterministic, allow_tf32)
    return api.forward(Role.X, placement, input, weight, policy=resolve(policy))


def _gradient(target: Role, placement: Placement, operands: dict, shapes: dict, policy: Policy | None,
              name: str = "grad_output") -> jax.Array:
    return api.gradient(target, placement, operands, shapes, policy=resolve(policy), name=name)


def cudnn_convolution_backward_input(
    input_size: Sequence[int], grad_output: jax.Array, weight: jax.Array, padding: Sizes, stride: Sizes,
    dilation: Sizes, groups: int, benchmark: bool, deterministic: bool, allow_tf32: bool,
) -> jax.Array:
    """``cudnn_convolution_backward_input``: the gradient of `cudnn_convolution` in an input of shape `input_size`.

    Raises:
      ValueError: as `cudnn_convolution`, or `grad_output` has another shape than its result.

    >>> import jax.numpy as jnp
    >>> dy, w = jnp.ones((8, 4, 3, 3)), jnp.ones((4, 6, 3, 3))
    >>> cudnn_convolution_backward_input((8, 6, 6, 6), dy, w, 1, 2, 1, 1, False, False, True).shape
    (8, 6, 6, 6)
    """
    api.check_arrays(grad_output=grad_output, weight=weight)
    input_size = conventions.integers("input_size", input_size, weight.ndim, 0, symbolic=True)
    placement = conventions.torch_conv(input_size, weight.shape, stride, padding, dilation, groups)
    return _gradient(Role.X, placement, {Role.Y: grad_output, Role.W: weight},
                     {Role.X: input_size, Role.W: weight.shape},
                     cudnn_policy(benchmark, deterministic, allow_tf32))


def cudnn_convolution_backward_weight(
    weight_size: Sequence[int], grad_output: jax.Array, input: jax.Array, padding: Sizes, stride: Sizes,
    dilation: Sizes, groups: int, benchmark: bool, deterministic: bool, allow_tf32: bool,
) -> jax.Array:
    """``cudnn_convolution_backward_weight``: the gradient of `cudnn_convolution` in a weight of shape `weight_size`.

    Raises:
      ValueError: as `cudnn_convolution`, or `grad_output` has another shape than its result.

    >>> import jax.numpy as jnp
    >>> dy, x = jnp.ones((8, 4, 3, 3)), jnp.ones((8, 6, 6, 6))
    >>> cudnn_convolution_backward_weight((4, 6, 3, 3), dy, x, 1, 2, 1, 1, False, False, True).shape
    (4, 6, 3, 3)
    """
    api.check_arrays(grad_output=grad_output, input=input)
    weight_size = conventions.integers("weight_size", weight_size, input.ndim, 0, symbolic=True)
    placement = conventions.torch_conv(input.shape, weight_size, stride, padding, dilation, groups)
    return _gradient(Role.W, placement, {Role.X: input, Role.Y: grad_output},
                     {Role.X: input.shape, Role.W: weight_size},
                     cudnn_policy(benchmark, deterministic, allow_tf32))


def cudnn_convolution_transpose_backward_input(
    grad_output: jax.Array, weight: jax.Array, padding: Sizes, stride: Sizes, dilation: Sizes, groups: int,
    benchmark: bool, deterministic: bool, allow_tf32: bool,
) -> jax.Array:
    """``cudnn_convolution_transpose_backward_input``: the gradient of `cudnn_convolution_transpose` in its input.

    It is the convolution that was transposed; so the size needs no output_padding to be known.

    >>> import jax.numpy as jnp
    >>> dy, w = jnp.ones((8, 6, 6, 6)), jnp.ones((4, 6, 3, 3))
    >>> cudnn_convolution_transpose_backward_input(dy, w, 1, 2, 1, 1, False, False, True).shape
    (8, 4, 3, 3)
    """
    api.check_arrays(grad_output=grad_output, weight=weight)
    return cudnn_convolution(grad_output, weight, padding, stride, dilation, groups, benchmark, deterministic,
                             allow_tf32)


def cudnn_convolution_transpose_backward_weight(
    weight_size: Sequence[int], grad_output: jax.Array, input: jax.Array, padding: Sizes, stride: Sizes,
    dilation: Sizes, groups: int, benchmark: bool, deterministic: bool, allow_tf32: bool,
) -> jax.Array:
    """``cudnn_convolution_transpose_backward_weight``: the gradient of `cudnn_convolution_transpose` in its weight.

    It is the other filter gradient with the two arrays exchanged.

    >>> import jax.numpy as jnp
    >>> dy, x = jnp.ones((8, 6, 6, 6)), jnp.ones((8, 4, 3, 3))
    >>> cudnn_convolution_transpose_backward_weight((4, 6, 3, 3), dy, x, 1, 2, 1, 1, False, False, True).shape
    (4, 6, 3, 3)
    """
    api.check_arrays(grad_output=grad_output, input=input)
    weight_size = conventions.integers("weight_size", weight_size, input.ndim, 0, symbolic=True)
    placement = conventions.torch_conv(grad_output.shape, weight_size, stride, padding, dilation, groups)
    return _gradient(Role.W, placement, {Role.X: grad_output, Role.Y: input},
                     {Role.X: grad_output.shape, Role.W: weight_size},
                     cudnn_policy(benchmark, deterministic, allow_tf32), "input")


def _gradients(role: Role, placement: Placement, input, grad_output, weight, mask, policy: Policy) -> tuple:
    """The gradients in input and weight of the operation that makes `role`; None where `mask` is False."""
    arrays = {GIVEN[role][0]: input, Role.W: weight}
    shapes = {r: t.shape for r, t in arrays.items()}
    return tuple(
        _gradient(target, placement, {**{r: t for r, t in arrays.items() if r is not target}, role: grad_output},
                  shapes, policy) if wanted else None
        for target, wanted in zip(GIVEN[role], mask))


def _check_mask(mask, length: int):
    if not isinstance(mask, Sequence) or len(mask) != length or not all(isinstance(m, bool) for m in mask):
        raise ValueError(f"output_mask must be a sequence of {length} of True and False; got {mask!r}")
    return mask


def cudnn_convolution_backward(
    input: jax.Array, grad_output: jax.Array, weight: jax.Array, padding: Sizes, stride: Sizes, dilation: Sizes,
    groups: int, benchmark: bool, deterministic: bool, allow_tf32: bool, output_mask: Sequence[bool],
) -> tuple[jax.Array | None, jax.Array | None]:
    """``cudnn_convolution_backward``: the gradients of `cudnn_convolution` in input and weight.

    Args:
      output_mask: which of the two to compute; the other is None.

    Raises:
      ValueError: as `cudnn_convolution`, or `grad_output` has another shape than its result.

    >>> import jax.numpy as jnp
    >>> x, dy, w = jnp.ones((8, 6, 6, 6)), jnp.ones((8, 4, 3, 3)), jnp.ones((4, 6, 3, 3))
    >>> dx, dw = cudnn_convolution_backward(x, dy, w, 1, 2, 1, 1, False, False, True, (True, False))
    >>> dx.shape, dw
    ((8, 6, 6, 6), None)
    """
    api.check_arrays(input=input, grad_output=grad_output, weight=weight)
    placement = conventions.torch_conv(input.shape, weight.shape, stride, padding, dilation, groups)
    return _gradients(Role.Y, placement, input, grad_output, weight, _check_mask(output_mask, 2),
                      cudnn_policy(benchmark, deterministic, allow_tf32))


def cudnn_convolution_transpose_backward(
    input: jax.Array, grad_output: jax.Array, weight: jax.Array, padding: Sizes, output_padding: Sizes, stride: Sizes,
    dilation: Sizes, groups: int, benchmark: bool, deterministic: bool, allow_tf32: bool, output_mask: Sequence[bool],
) -> tuple[jax.Array | None, jax.Array | None]:
    """``cudnn_convolution_transpose_backward``: as `cudnn_convolution_backward`, of `cudnn_convolution_transpose`.

    >>> import jax.numpy as jnp
    >>> x, dy, w = jnp.ones((8, 4, 3, 3)), jnp.ones((8, 6, 6, 6)), jnp.ones((4, 6, 3, 3))
    >>> dx, dw = cudnn_convolution_transpose_backward(x, dy, w, 1, 1, 2, 1, 1, False, False, True, (False, True))
    >>> dx, dw.shape
    (None, (4, 6, 3, 3))
    """
    api.check_arrays(input=input, grad_output=grad_output, weight=weight)
    placement = conventions.torch_conv_transpose(input.shape, weight.shape, stride, padding, output_padding, groups,
                                                 dilation)
    return _gradients(Role.X, placement, input, grad_output, weight, _check_mask(output_mask, 2),
                      cudnn_policy(benchmark, deterministic, allow_tf32))


def convolution_backward(
    grad_output: jax.Array, input: jax.Array, weight: jax.Array, bias_sizes: Sequence[int] | None, stride: Sizes,
    padding: Sizes, dilation: Sizes, transposed: bool, output_padding: Sizes, groups: int,
    output_mask: Sequence[bool], *, policy: Policy | None = None,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """``aten::convolution_backward``: the gradients of a convolution or a transposed one in input, weight and bias.

    Args:
      bias_sizes: the shape of the bias, ``[C_out]``, or None.
      transposed: which of the two it is; `output_padding` counts for a transposed one alone.
      output_mask: which of the three to compute; the others are None.
      policy: a `jax_deconv.Policy`.

    Raises:
      ValueError, TypeError: as `conv2d` and `conv_transpose2d`; `grad_output` has another shape than the result, or
        `bias_sizes` than the bias.

    >>> import jax.numpy as jnp
    >>> x, dy, w = jnp.ones((8, 4, 3, 3)), jnp.ones((8, 6, 6, 6)), jnp.ones((4, 6, 3, 3))
    >>> *_, db = convolution_backward(dy, x, w, (6,), 2, 1, 1, True, 1, 1, (False, False, True))
    >>> db.shape
    (6,)
    """
    api.check_arrays(input=input, grad_output=grad_output, weight=weight)
    *pair, with_bias = _check_mask(output_mask, 3)
    if transposed:
        role, placement = Role.X, conventions.torch_conv_transpose(
            input.shape, weight.shape, stride, padding, output_padding, groups, dilation)
    else:
        role, placement = Role.Y, conventions.torch_conv(input.shape, weight.shape, stride, padding, dilation, groups)
    channels = placement.channels(role, weight.shape)
    if bias_sizes is not None and conventions.integers("bias_sizes", bias_sizes, 1, 0) != (channels,):
        raise ValueError(f"bias_sizes must be {(channels,)}, one for each channel of the result; got {bias_sizes!r}")
    api.check_cotangent(placement, grad_output, {GIVEN[role][0]: input.shape, Role.W: weight.shape}, "grad_output")
    gradients = _gradients(role, placement, input, grad_output, weight, pair, policy)
    return *gradients, jnp.sum(grad_output, (0, *range(2, grad_output.ndim))) if with_bias else None


def cudnn_convolution_relu(
    input: jax.Array, weight: jax.Array, bias: jax.Array | None, stride: Sizes, padding: Sizes, dilation: Sizes,
    groups: int,
) -> jax.Array:
    """``aten::cudnn_convolution_relu``: ``relu(convolution + bias)``, for any number of spatial axes.

    >>> import jax.numpy as jnp
    >>> x, w = jnp.ones((8, 6, 5, 5)), -jnp.ones((4, 6, 3, 3))
    >>> float(cudnn_convolution_relu(x, w, None, 1, 0, 1, 1).max())
    0.0
    """
    api.check_arrays(input=input, weight=weight)
    placement = conventions.torch_conv(input.shape, weight.shape, stride, padding, dilation, groups)
    return api.forward(Role.Y, placement, input, weight, bias=bias, activation="relu", policy=resolve(None))


def cudnn_convolution_add_relu(
    input: jax.Array, weight: jax.Array, z: jax.Array, alpha: float | None, bias: jax.Array | None, stride: Sizes,
    padding: Sizes, dilation: Sizes, groups: int,
) -> jax.Array:
    """``aten::cudnn_convolution_add_relu``: ``relu(convolution + alpha * z + bias)``; alpha None is 1.

    >>> import jax.numpy as jnp
    >>> x, w, z = jnp.ones((8, 6, 5, 5)), jnp.ones((4, 6, 3, 3)), jnp.ones((8, 4, 3, 3))
    >>> float(cudnn_convolution_add_relu(x, w, z, -4.0, None, 1, 0, 1, 1).min())    # 6 * 3 * 3 - 4
    50.0
    """
    api.check_arrays(input=input, weight=weight)
    api.check_arrays(input=input, z=z)
    placement = conventions.torch_conv(input.shape, weight.shape, stride, padding, dilation, groups)
    expected = placement.result_shape(Role.Y, {Role.X: input.shape, Role.W: weight.shape})
    if z.shape != expected:
        raise ValueError(f"z must have the shape of the result, {expected}; got {z.shape}")
    if alpha is not None:
        if not (isinstance(alpha, numbers.Number) or hasattr(alpha, "dtype")) or (
                jnp.issubdtype(z.dtype, jnp.integer) and not conventions.is_integer(alpha)):
            raise TypeError(f"alpha must be None or a number that z's type, {z.dtype}, can hold; got {alpha!r}")
        z = jnp.asarray(alpha, z.dtype) * z
    return api.forward(Role.Y, placement, input, weight, bias=bias, residual=z, activation="relu",
                       policy=resolve(None))
