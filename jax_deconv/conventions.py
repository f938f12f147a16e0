# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""What callers write, turned into the canonical form of `problem`; nothing below knows a convention.

A convention says how padding is meant, how large the result is, in which order the axes of the
arrays stand, and which way the kernel is read.  Here that becomes a `Placement`: canonical
geometry, and for each of the three tensors the way between the caller's array and the canonical one.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jax import lax

from jax_deconv.problem import AXES, Axis, Geometry, Role, letter_sizes, shape


@dataclasses.dataclass(frozen=True)
class Placement:
    """How the caller's arrays hold the canonical tensors.

    `x`, `w` and `y` list, in canonical order, the axes of the caller's arrays.  A kernel that is
    `reversed` has its spatial axes flipped and its leading axes as [G*C, K] instead of [G*K, C].
    """

    geometry: Geometry
    groups: int
    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    reversed: bool

    def perm(self, role: Role) -> tuple[int, ...]:
        return getattr(self, role)

    def canonical(self, role: Role, array):
        array = jnp.transpose(array, self.perm(role))
        return self._turn(array) if role is Role.W and self.reversed else array

    def restore(self, role: Role, array):
        array = self._turn(array) if role is Role.W and self.reversed else array
        perm = self.perm(role)
        return jnp.transpose(array, sorted(range(len(perm)), key=perm.__getitem__))

    def channels(self, role: Role, rhs_shape) -> int:
        """The channels of x or y, from the shape of the caller's kernel."""
        return self._letters({Role.W: rhs_shape})[AXES[role][1][1]] * self.groups

    def result_shape(self, role: Role, shapes: Mapping[Role, Sequence[int]]) -> tuple[int, ...]:
        """The shape of the caller's array for `role`, from the shapes of his two others."""
        dims = shape(role, self._letters(shapes), self.geometry)
        perm = self.perm(role)
        return tuple(dims[perm.index(i)] for i in range(len(perm)))

    def _letters(self, shapes) -> dict[str, int]:
        canonical = {}
        for role, dims in shapes.items():
            outer, inner, *spatial = (dims[i] for i in self.perm(role))
            if role is Role.W and self.reversed:
                outer, inner = inner * self.groups, outer // self.groups
            canonical[role] = (outer, inner, *spatial)
        return letter_sizes(canonical, self.groups)

    def _turn(self, kernel):
        """[G*C, K, *R] <-> [G*K, C, *reversed R]; its own inverse."""
        outer, inner, *spatial = kernel.shape
        kernel = kernel.reshape(self.groups, outer // self.groups, inner, *spatial)
        kernel = jnp.swapaxes(kernel, 1, 2).reshape(self.groups * inner, outer // self.groups, *spatial)
        return lax.rev(kernel, range(2, kernel.ndim))


# ---- arguments that every convention shares -------------------------------------------------------------


def integers(name: str, value, length: int, least: int) -> tuple[int, ...]:
    """A sequence of `length` integers, each at least `least`."""
    expected = f"a sequence of {length} integers >= {least}"
    if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
        raise TypeError(f"{name} must be {expected}; got {value!r}")
    try:
        result = tuple(map(operator.index, value))
    except TypeError as error:
        raise TypeError(f"{name} must be {expected}; got {value!r}") from error
    if len(result) != length or any(v < least for v in result):
        raise ValueError(f"{name} must be {expected}; got {value!r}")
    return result


def pairs(padding, length: int) -> tuple[tuple[int, int], ...]:
    """Explicit padding: one (low, high) pair for each spatial axis; negative numbers crop."""
    expected = f"a string or a sequence of {length} (low, high) pairs of integers"
    try:
        result = tuple((operator.index(lo), operator.index(hi)) for lo, hi in padding)
    except (TypeError, ValueError) as error:
        raise ValueError(f"padding must be {expected}; got {padding!r}") from error
    if len(result) != length:
        raise TypeError(f"padding must be {expected}; got {padding!r}")
    return result


def group_count(value) -> int:
    try:
        groups = operator.index(value)
    except TypeError as error:
        raise TypeError(f"feature_group_count must be an integer >= 1; got {value!r}") from error
    if groups < 1:
        raise ValueError(f"feature_group_count (groups) must be an integer >= 1; got {value!r}")
    return groups


def _take(shape: Sequence[int], perm: Sequence[int]) -> tuple[int, ...]:
    return tuple(shape[i] for i in perm)


def _ranks(names: tuple[str, str], lhs_shape, rhs_shape) -> int:
    """The number of spatial axes."""
    if len(lhs_shape) != len(rhs_shape) or len(lhs_shape) < 2:
        raise ValueError(f"{names[0]} and {names[1]} must have the same number of axes, at least 2; got shapes "
                         f"{tuple(lhs_shape)} and {tuple(rhs_shape)}")
    return len(lhs_shape) - 2


def _check_channels(what: str, channels: int, groups: int, rhs_spec: str, inner: int, rhs_shape, whole: int):
    """`channels` of the input meet `inner` channels of the kernel in each group."""
    if channels % groups or whole % groups:
        raise ValueError(
            f"feature_group_count (groups) must divide the {channels} channels of {what} and the {whole} of the "
            f"kernel's whole channel axis; got {groups} with rhs of shape {tuple(rhs_shape)}")
    if channels != inner:
        raise ValueError(
            f"{what} has {channels} channels, but rhs of shape {tuple(rhs_shape)} with feature_group_count "
            f"(groups) = {groups} takes {inner} ({rhs_spec})")


# ---- jax.lax -------------------------------------------------------------------------------------------

_DEFAULT_TRANSPOSE_SPECS = {
    0: ("NC", "IO", "NC"), 1: ("NHC", "HIO", "NHC"), 2: ("NHWC", "HWIO", "NHWC"),
    3: ("NHWDC", "HWDIO", "NHWDC"),
}


def lax_conv_transpose(
    lhs_shape, rhs_shape, strides, padding, rhs_dilation=None, dimension_numbers=None,
    transpose_kernel=False, use_consistent_padding=False, *, feature_group_count=1,
    output_padding=None, output_shape=None,
) -> Placement:
    """`jax.lax.conv_transpose`'s conventions and our extensions of them.

    'SAME' and 'VALID' are the padding of the forward convolution, and make the output
    ``input * stride`` and ``input * stride + max(kernel - stride, 0)`` long (kernel: its dilated
    extent); where a stride exceeds the kernel, the zeros that no tap reaches come last.  Pairs pad
    the dilated input; with `use_consistent_padding` they too are the forward convolution's.
    """
    rank = _ranks(("lhs", "rhs"), lhs_shape, rhs_shape)
    if dimension_numbers is None:
        if rank not in _DEFAULT_TRANSPOSE_SPECS:
            raise ValueError(f"dimension_numbers must be given for {rank} spatial axes; got None, whose default "
                             "exists for at most 3")
        dimension_numbers = _DEFAULT_TRANSPOSE_SPECS[rank]
    dn = lax.conv_dimension_numbers(lhs_shape, rhs_shape, dimension_numbers)
    groups = group_count(feature_group_count)
    outer, inner, *kernel = _take(rhs_shape, dn.rhs_spec)
    channels = lhs_shape[dn.lhs_spec[1]]
    if transpose_kernel:
        _check_channels("lhs", channels, groups, "its O axis: transpose_kernel", outer, rhs_shape, outer)
    else:
        _check_channels("lhs", channels, groups, "its I axis times the groups", inner * groups, rhs_shape, outer)

    strides = integers("strides", strides, rank, 1)
    dilation = integers("rhs_dilation", rhs_dilation, rank, 1) if rhs_dilation is not None else (1,) * rank
    if output_shape is not None and output_padding is not None:
        raise ValueError(f"output_shape and output_padding exclude each other; got output_shape={output_shape!r} "
                         f"and output_padding={output_padding!r}")
    extra = integers("output_padding", output_padding, rank, 0) if output_padding is not None else (0,) * rank
    sizes, extents = _take(lhs_shape, dn.lhs_spec)[2:], [(k - 1) * d + 1 for k, d in zip(kernel, dilation)]
    padding = _transposed_padding(padding, sizes, extents, strides, use_consistent_padding)
    wanted = (None,) * rank if output_shape is None else integers("output_shape", output_shape, rank, 0)

    axes = []
    for i, y in enumerate(sizes):
        axis = Axis(0, y, kernel[i], strides[i], dilation[i])
        if wanted[i] is None:
            axis = _transposed_axis(axis, padding[i], extra[i], use_consistent_padding)
        else:
            axis = _axis_of_size(axis, padding[i], wanted[i], use_consistent_padding, i)
        axes.append(axis)
    return Placement(tuple(axes), groups, y=tuple(dn.lhs_spec), w=tuple(dn.rhs_spec), x=tuple(dn.out_spec),
                     reversed=not transpose_kernel)


def _transposed_padding(padding, sizes, extents, strides, consistent: bool) -> tuple:
    """The padding of each axis: 'SAME', 'VALID' or a (low, high) pair."""
    rank = len(sizes)
    if isinstance(padding, str):
        if padding in ("SAME", "VALID"):
            return (padding,) * rank
        if not consistent and set(strides) <= {1} and padding.upper() in _FORWARD_PADDING:
            # Without a stride lax reads every other spelling as conv_general_dilated does, of the input.
            return tuple(forward_padding(padding, size, extent, 1) for size, extent in zip(sizes, extents))
    elif not (consistent and hasattr(padding, "__iter__") and any(isinstance(p, str) for p in padding)):
        return pairs(padding, rank)
    elif len(padding) == rank and all(p in ("SAME", "VALID") for p in padding if isinstance(p, str)):
        return tuple(p if isinstance(p, str) else pairs((p,), 1)[0] for p in padding)
    raise ValueError(f"padding must be 'SAME', 'VALID' or a sequence of {rank} (low, high) pairs of integers; "
                     f"got {padding!r}")


def _dilated(size: int, stride: int) -> int:
    return 0 if isinstance(size, int) and size == 0 else (size - 1) * stride + 1


def _transposed_axis(axis: Axis, padding, extra: int, consistent: bool) -> Axis:
    """The axis of a transposed convolution, its size computed from the padding."""
    k, s = axis.extent, axis.stride
    # `lo` and `hi` pad the dilated input, whose correlation with the (reversed) kernel is the result.
    if isinstance(padding, str):
        if padding == "VALID":
            lo, total = k - 1, k + s - 2 + max(k - s, 0)
        else:
            total = k + s - 2
            lo = k - 1 if s > k - 1 else -(-total // 2)
        hi = total - lo
    elif consistent:
        lo, hi = (k - 1 - p for p in padding)
    else:
        lo, hi = padding
    padded = _dilated(axis.y_size, s) + lo + hi
    x_size = padded - k + 1
    # lax's rule: an output shorter than nothing is empty, unless the crop exceeds the input.
    if isinstance(x_size, int) and x_size < 0:
        if padded < 0:
            raise ValueError(
                f"padding={padding!r} leaves an output of size {x_size + extra}, less than zero: input size "
                f"{axis.y_size}, kernel {axis.kernel}, stride {s}, dilation {axis.dilation}, "
                f"output_padding {extra}")
        x_size = 0
    return dataclasses.replace(axis, x_size=x_size + extra, pad_lo=k - 1 - lo)


def _axis_of_size(axis: Axis, padding, x_size: int, consistent: bool, index: int) -> Axis:
    """The axis of a transposed convolution whose result has the size `x_size`.

    With a string it is the adjoint of the convolution from that size with that padding; with
    pairs the low side stays and the high side follows.
    """
    if isinstance(padding, str):
        pad_lo = forward_padding(padding, x_size, axis.extent, axis.stride)[0]
        least = (axis.y_size - 1) * axis.stride + (axis.extent if padding == "VALID" else 1)
    else:
        base = _transposed_axis(axis, padding, 0, consistent)
        pad_lo, least = base.pad_lo, base.x_size
    most = least + axis.stride - 1
    if not max(least, 0) <= x_size <= most:
        raise ValueError(
            f"output_shape[{index}] must be in {max(least, 0)}..{most}, the sizes that a convolution takes to "
            f"{axis.y_size} with kernel {axis.kernel}, stride {axis.stride}, dilation {axis.dilation} and "
            f"padding {padding!r}; got {x_size}")
    return dataclasses.replace(axis, x_size=x_size, pad_lo=pad_lo)


_FORWARD_PADDING = ("SAME", "SAME_LOWER", "VALID")


def forward_padding(mode: str, size: int, extent: int, stride: int) -> tuple[int, int]:
    """The (low, high) padding that a convolution's padding string means for an input of `size`."""
    if mode.upper() == "VALID":
        return 0, 0
    total = max((-(-size // stride) - 1) * stride + extent - size, 0)
    lo = total // 2 if mode.upper() == "SAME" else total - total // 2
    return lo, total - lo


def lax_conv(
    lhs_shape, rhs_shape, window_strides, padding, rhs_dilation=None, dimension_numbers=None, *,
    feature_group_count=1,
) -> Placement:
    """`jax.lax.conv_general_dilated`'s conventions, without a dilation of lhs."""
    rank = _ranks(("lhs", "rhs"), lhs_shape, rhs_shape)
    dn = lax.conv_dimension_numbers(lhs_shape, rhs_shape, dimension_numbers)
    groups = group_count(feature_group_count)
    outer, inner, *kernel = _take(rhs_shape, dn.rhs_spec)
    _check_channels("lhs", lhs_shape[dn.lhs_spec[1]], groups, "its I axis times the groups", inner * groups,
                    rhs_shape, outer)
    strides = integers("window_strides", window_strides, rank, 1)
    dilation = integers("rhs_dilation", rhs_dilation, rank, 1) if rhs_dilation is not None else (1,) * rank
    if isinstance(padding, str) and padding.upper() not in _FORWARD_PADDING:
        raise ValueError(f"padding must be one of {_FORWARD_PADDING} or a sequence of {rank} (low, high) pairs; "
                         f"got {padding!r}")
    explicit = None if isinstance(padding, str) else pairs(padding, rank)
    axes = []
    for i, x in enumerate(_take(lhs_shape, dn.lhs_spec)[2:]):
        axis = Axis(x, 0, kernel[i], strides[i], dilation[i])
        lo, hi = explicit[i] if explicit else forward_padding(padding, x, axis.extent, axis.stride)
        padded = x + lo + hi
        if isinstance(padded, int) and padded < 0:
            raise ValueError(f"padding[{i}]={(lo, hi)} crops more than the input's size {x}; kernel {axis.kernel}, "
                             f"stride {axis.stride}, dilation {axis.dilation}")
        y_size = (padded - axis.extent) // axis.stride + 1
        axes.append(dataclasses.replace(axis, y_size=max(y_size, 0), pad_lo=lo))
    return Placement(tuple(axes), groups, x=tuple(dn.lhs_spec), w=tuple(dn.rhs_spec), y=tuple(dn.out_spec),
                     reversed=False)
