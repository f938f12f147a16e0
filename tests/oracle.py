# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""An independent reference in numpy: a loop over the kernel's taps, nothing else.

`conv_y`, `conv_x` and `conv_w` are the three roles on canonical arrays.  Their `geometry` is a
sequence of objects, one a spatial axis, with x_size, y_size, kernel, stride, dilation, pad_lo.

`conv_transpose` and `conv` speak the conventions of `jax.lax`, derived here from their definitions
and not from the package.

Everything is computed in float64, complex128 or int64.  Integer results are to be compared modulo
the width of their type (`.astype` wraps), which is what lax does.
"""

from __future__ import annotations

import itertools
import math

import numpy as np


def wide(*arrays):
    """The arrays in the widest type of their kind."""
    # bfloat16 and the like are of kind "V" for numpy: floats too.
    kinds = {np.asarray(a).dtype.kind for a in arrays}
    dtype = np.complex128 if "c" in kinds else np.int64 if kinds <= set("iub") else np.float64
    return [np.asarray(a).astype(dtype) for a in arrays]


def split(array, axis, groups):
    """The groups taken out of a channel axis, e.g. [N, G*C, *X] -> [N, G, C, *X]."""
    shape = array.shape
    return array.reshape(*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1:])


def merge(array, axis):
    """The inverse of `split`."""
    shape = array.shape
    return array.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2:])


def taps(geometry):
    """For every tap of the kernel: its index, the slices of x and those of y that it joins.

    Tap r joins y[i] and x[i * stride + r * dilation - pad_lo], for all i where both exist.
    """
    for tap in itertools.product(*(range(a.kernel) for a in geometry)):
        xs, ys = [], []
        for a, r in zip(geometry, tap):
            pairs = [(i, i * a.stride + r * a.dilation - a.pad_lo) for i in range(a.y_size)]
            pairs = [(i, j) for i, j in pairs if 0 <= j < a.x_size]
            (i0, j0), (i1, j1) = (pairs[0], pairs[-1]) if pairs else ((0, 0), (-1, -1))
            xs.append(slice(j0, j1 + 1, a.stride))
            ys.append(slice(i0, i1 + 1))
        yield tap, (..., *xs), (..., *ys)


def conv_y(x, w, geometry, groups=1):
    """x [N, G*C, *X], w [G*K, C, *R] -> y [N, G*K, *Y]: the convolution."""
    x, w = wide(x, w)
    x, w = split(x, 1, groups), split(w, 0, groups)
    y = np.zeros((x.shape[0], groups, w.shape[1], *(a.y_size for a in geometry)), x.dtype)
    for tap, xs, ys in taps(geometry):
        y[ys] += np.einsum("ngc...,gkc->ngk...", x[xs], w[(..., *tap)])
    return merge(y, 1)


def conv_x(y, w, geometry, groups=1):
    """y [N, G*K, *Y], w [G*K, C, *R] -> x [N, G*C, *X]: the transposed convolution."""
    y, w = wide(y, w)
    y, w = split(y, 1, groups), split(w, 0, groups)
    x = np.zeros((y.shape[0], groups, w.shape[2], *(a.x_size for a in geometry)), y.dtype)
    for tap, xs, ys in taps(geometry):
        x[xs] += np.einsum("ngk...,gkc->ngc...", y[ys], w[(..., *tap)])
    return merge(x, 1)


def conv_w(x, y, geometry, groups=1):
    """x [N, G*C, *X], y [N, G*K, *Y] -> w [G*K, C, *R]: the filter gradient."""
    x, y = wide(x, y)
    x, y = split(x, 1, groups), split(y, 1, groups)
    w = np.zeros((groups, y.shape[2], x.shape[2], *(a.kernel for a in geometry)), x.dtype)
    for tap, xs, ys in taps(geometry):
        products = np.einsum("ngc...,ngk...->gkc...", x[xs], y[ys])
        w[(..., *tap)] = products.sum(axis=tuple(range(3, products.ndim)))
    return merge(w, 0)


# The conventions of lax.  Arrays below are channels first (N, C, *spatial and O, I, *spatial);
# `to_canonical` and `from_canonical` read any other order off a triple of strings.


def orders(dimension_numbers):
    """Three permutations that bring lhs, rhs and out to NC..., OI..., NC...; space as rhs names it."""
    lhs, rhs, out = dimension_numbers
    space = [letter for letter in rhs if letter not in "OI"]
    return ([lhs.index(a) for a in ["N", "C", *space]], [rhs.index(a) for a in ["O", "I", *space]],
            [out.index(a) for a in ["N", "C", *space]])


def extent(kernel, dilation):
    return max(0, (kernel - 1) * dilation + 1)


def transposed_pads(padding, kernel, strides, dilation, consistent):
    """The zeros (low, high) around the strided input, as lax defines them for each axis."""
    pads = []
    for axis, (k, s, d) in enumerate(zip(kernel, strides, dilation)):
        reach = extent(k, d) - 1  # what a full transposed convolution pads with
        if padding == "SAME":  # out = in * stride
            total = reach + s - 1
            low = reach if s > reach else -(-total // 2)
            pads.append((low, total - low))
        elif padding == "VALID":  # out = in * stride + max(k - stride, 0)
            pads.append((reach, s - 1 + max(reach + 1 - s, 0)))
        elif consistent:  # those of the forward convolution
            pads.append((reach - padding[axis][0], reach - padding[axis][1]))
        else:
            pads.append(tuple(padding[axis]))
    return pads


def size_range(size, kernel, stride, dilation, padding, axis, consistent):
    """The output sizes that the forward convolution takes to `size`: lowest, highest."""
    reach = extent(kernel, dilation) - 1
    if padding == "SAME":  # ceil(out / stride) == size
        return (size - 1) * stride + 1, size * stride
    low, high = (0, 0) if padding == "VALID" else padding[axis]
    if padding != "VALID" and not consistent:
        low, high = reach - low, reach - high
    lowest = (size - 1) * stride + reach + 1 - low - high
    return lowest, lowest + stride - 1


def adjoint_pads(padding, size, output_shape, kernel, strides, dilation, consistent):
    """As `transposed_pads`, from the size that the forward convolution starts from."""
    pads = []
    for axis, (n, out, k, s, d) in enumerate(zip(size, output_shape, kernel, strides, dilation)):
        reach = extent(k, d) - 1
        if padding == "SAME":  # the forward padding: as even as can be, the odd one high
            low = reach - max((n - 1) * s + reach + 1 - out, 0) // 2
        elif padding == "VALID":
            low = reach
        else:
            low = reach - padding[axis][0] if consistent else padding[axis][0]
        pads.append((low, out + reach - ((n - 1) * s + 1) - low))
    return pads


def conv_transpose(lhs, rhs, strides, padding, rhs_dilation=None, dimension_numbers=None,
                   transpose_kernel=False, use_consistent_padding=False, *, feature_group_count=1,
                   output_padding=None, output_shape=None, bias=None):
    """What `jax_deconv.conv_transpose` is to return, in a wide type.

    Without transpose_kernel, out[n, o, i * s + low - k * d] += lhs[n, c, i] * rhs[o, c, k]; with it,
    the kernel is read as (O = input channels, I = output channels a group) and not mirrored.
    """
    lhs, rhs = wide(lhs, rhs)
    rank = lhs.ndim - 2
    if dimension_numbers is None:
        space = "HWD"[:rank]
        dimension_numbers = ("N" + space + "C", space + "IO", "N" + space + "C")
    lhs_order, rhs_order, out_order = orders(dimension_numbers)
    x, w = lhs.transpose(lhs_order), rhs.transpose(rhs_order)
    dilation = rhs_dilation or (1,) * rank
    size, kernel, groups = x.shape[2:], w.shape[2:], feature_group_count

    if output_shape is not None:
        pads = adjoint_pads(padding, size, output_shape, kernel, strides, dilation, use_consistent_padding)
    else:
        pads = transposed_pads(padding, kernel, strides, dilation, use_consistent_padding)
    extra = output_padding or (0,) * rank
    spread = [max(0, (n - 1) * s + 1) for n, s in zip(size, strides)]
    out_size = [max(0, m + low + high - extent(k, d) + 1) + e
                for m, (low, high), k, d, e in zip(spread, pads, kernel, dilation, extra)]

    x = split(x, 1, groups)
    w = split(w, 0, groups)  # G, O, I, *R; or G, I, O, *R with transpose_kernel
    if transpose_kernel:
        w = np.flip(w, axis=tuple(range(3, w.ndim))).swapaxes(1, 2)
    out = np.zeros((x.shape[0], groups, w.shape[1], *out_size), x.dtype)
    for tap in itertools.product(*map(range, kernel)):
        target, source = [], []
        for n, m, s, (low, _), k, d in zip(size, out_size, strides, pads, tap, dilation):
            reached = [i for i in range(n) if 0 <= i * s + low - k * d < m]
            first, last = (reached[0], reached[-1]) if reached else (0, -1)
            source.append(slice(first, last + 1))
            target.append(slice(first * s + low - k * d if reached else 0,
                                last * s + low - k * d + 1 if reached else 0, s))
        out[(..., *target)] += np.einsum("ngi...,goi->ngo...", x[(..., *source)], w[(..., *tap)])
    out = merge(out, 1)
    if bias is not None:
        out = out + wide(bias)[0].reshape(-1, *(1,) * rank)
    return out.transpose(np.argsort(out_order))


def conv(lhs, rhs, window_strides, padding, rhs_dilation=None, dimension_numbers=None, *,
         feature_group_count=1, bias=None):
    """What `jax_deconv.conv` is to return, in a wide type."""
    lhs, rhs = wide(lhs, rhs)
    rank = lhs.ndim - 2
    letters = "".join(chr(ord("a") + i) for i in range(rank))
    lhs_order, rhs_order, out_order = orders(
        dimension_numbers or ("NC" + letters, "OI" + letters, "NC" + letters))
    x, w = lhs.transpose(lhs_order), rhs.transpose(rhs_order)
    dilation = rhs_dilation or (1,) * rank

    pads = []
    for axis, (n, k, s, d) in enumerate(zip(x.shape[2:], w.shape[2:], window_strides, dilation)):
        total = max((-(-n // s) - 1) * s + extent(k, d) - n, 0)
        pads.append({"SAME": (total // 2, total - total // 2), "VALID": (0, 0),
                     "SAME_LOWER": (total - total // 2, total // 2)}[padding]
                    if isinstance(padding, str) else padding[axis])
    out_size = [max(0, (n + low + high - extent(k, d)) // s + 1)
                for n, (low, high), k, s, d in zip(x.shape[2:], pads, w.shape[2:], window_strides, dilation)]

    x, w = split(x, 1, feature_group_count), split(w, 0, feature_group_count)
    out = np.zeros((x.shape[0], feature_group_count, w.shape[1], *out_size), x.dtype)
    for place in np.ndindex(*out_size):
        for tap in np.ndindex(*w.shape[3:]):
            at = [p * s + t * d - low for p, s, t, d, (low, _)
                  in zip(place, window_strides, tap, dilation, pads)]
            if all(0 <= a < n for a, n in zip(at, x.shape[3:])):
                out[(..., *place)] += np.einsum("ngc,gkc->ngk", x[(..., *at)], w[(..., *tap)])
    out = merge(out, 1)
    if bias is not None:
        out = out + wide(bias)[0].reshape(-1, *(1,) * rank)
    return out.transpose(np.argsort(out_order))


def gradient(linear, like, cotangent):
    """The transpose of a linear function of an array shaped as `like`, entry by entry.

    No conjugation: the cotangent convention of `jax.vjp`.
    """
    result = np.zeros(np.shape(like), wide(cotangent)[0].dtype)
    for index in np.ndindex(*result.shape):
        unit = np.zeros(result.shape)
        unit[index] = 1
        result[index] = np.sum(wide(cotangent)[0] * linear(unit))
    return result


# The activations by their definitions, on float64 (the bounds of the first three also on integers).
ACTIVATIONS = {
    None: lambda v: v,
    "relu": lambda v: np.maximum(v, 0),
    "relu6": lambda v: np.clip(v, 0, 6),
    "clipped": lambda v, lo, hi: np.clip(v, lo, hi),
    "leaky_relu": lambda v, slope=0.01: np.where(v < 0, slope * v, v),
    "elu": lambda v, alpha=1.0: np.where(v > 0, v, alpha * np.expm1(np.minimum(v, 0))),
    "tanh": np.tanh,
    "sigmoid": lambda v: 1 / (1 + np.exp(-v)),
    "silu": lambda v: v / (1 + np.exp(-v)),
    "gelu": lambda v: v / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3))),
    "gelu_exact": lambda v: v / 2 * np.vectorize(math.erfc, otypes="d")(-v / np.sqrt(2)),
}
