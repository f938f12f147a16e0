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
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import export, lax

from jax_deconv.problem import AXES, GIVEN, Axis, Geometry, Role, letter_sizes, shape


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


class Names(NamedTuple):
    """What a convention calls its operands and its groups; for messages."""

    lhs: str = "lhs"
    rhs: str = "rhs"
    groups: str = "feature_group_count (groups)"


def integers(name: str, value, length: int, least: int, symbolic: bool = False) -> tuple[int, ...]:
    """A sequence of `length` integers, each at least `least`; of a whole shape some may be `symbolic`."""
    expected = f"a sequence of {length} integers >= {least}"
    if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
        raise TypeError(f"{name} must be {expected}; got {value!r}")
    try:
        result = tuple(v if symbolic and export.is_symbolic_dim(v) else operator.index(v) for v in value)
    except TypeError as error:
        raise TypeError(f"{name} must be {expected}; got {value!r}") from error
    if len(result) != length or any(isinstance(v, int) and v < least for v in result):
        raise ValueError(f"{name} must be {expected}; got {value!r}")
    return result


def is_integer(value) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def per_axis(name: str, value, rank: int, least: int = 1) -> tuple[int, ...]:
    """One integer for all spatial axes, or one for each."""
    try:
        return integers(name, (value,) * rank if is_integer(value) else tuple(value), rank, least)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} must be an integer >= {least} or have one for each of the {rank} spatial axes; "
                          f"got {value!r}") from None


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


def group_count(value, name: str = "feature_group_count") -> int:
    try:
        groups = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be an integer >= 1; got {value!r}") from error
    if groups < 1:
        raise ValueError(f"{name} must be an integer >= 1; got {value!r}")
    return groups


def axis_order(order: str, leading: str, rank: int) -> tuple[int, ...]:
    """Where the `leading` letters and then the spatial axes stand in arrays of an order such as ``"N*C"``."""
    space = "".join(map(str, range(rank)))
    axes = order.replace("*", space)
    return tuple(axes.index(letter) for letter in leading + space)


def _take(shape: Sequence[int], perm: Sequence[int]) -> tuple[int, ...]:
    return tuple(shape[i] for i in perm)


def _ranks(names: Names, lhs_shape, rhs_shape) -> int:
    """The number of spatial axes."""
    if len(lhs_shape) != len(rhs_shape) or len(lhs_shape) < 2:
        raise ValueError(f"{names.lhs} and {names.rhs} must have the same number of axes, at least 2; got shapes "
                         f"{tuple(lhs_shape)} and {tuple(rhs_shape)}")
    return len(lhs_shape) - 2


def _check_channels(names: Names, channels: int, groups: int, rhs_spec: str, inner: int, rhs_shape, whole: int):
    """`channels` of the input meet `inner` channels of the kernel in each group."""
    if channels % groups or whole % groups:
        raise ValueError(
            f"{names.groups} must divide the {channels} channels of {names.lhs} and the {whole} of the "
            f"kernel's whole channel axis; got {groups} with {names.rhs} of shape {tuple(rhs_shape)}")
    if channels != inner:
        raise ValueError(
            f"{names.lhs} has {channels} channels, but {names.rhs} of shape {tuple(rhs_shape)} with {names.groups} "
            f"= {groups} takes {inner} ({rhs_spec})")


class _Axes(NamedTuple):
    """As in `Placement`: the axes of the three arrays in canonical order."""

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    out: tuple[int, ...]

    @classmethod
    def of(cls, rank: int, lhs: str, rhs: str) -> _Axes:
        """From the orders of images and kernels."""
        images = axis_order(lhs, "NC", rank)
        return cls(images, axis_order(rhs, "OI", rank), images)


class _Arguments(NamedTuple):
    """What every convolution has, checked."""

    names: Names
    lhs_shape: Sequence[int]
    rhs_shape: Sequence[int]
    axes: _Axes
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def spatial(self, role: Role) -> list[Axis]:
        """The spatial axes, lhs being the tensor `role`; the size of the result's is left open."""
        sizes, taps = _take(self.lhs_shape, self.axes.lhs)[2:], _take(self.rhs_shape, self.axes.rhs)[2:]
        return [Axis(**{"x_size": 0, "y_size": 0, f"{role}_size": n}, kernel=k, stride=s, dilation=d)
                for n, k, s, d in zip(sizes, taps, self.strides, self.dilation)]

    def placement(self, role: Role, place: Callable[[int, Axis], Axis], reversed: bool = False) -> Placement:
        """The operation that makes `role`, x (transposed) or y; `place` gives an axis what the arguments leave open."""
        outer, inner, *_ = _take(self.rhs_shape, self.axes.rhs)
        if role is Role.X and not reversed:
            meets = "its O axis: the input channels of a transposed convolution", outer
        else:
            meets = "its I axis times the groups", inner * self.groups
        _check_channels(self.names, self.lhs_shape[self.axes.lhs[1]], self.groups, *meets, self.rhs_shape, outer)
        operand = GIVEN[role][0]
        geometry = tuple(place(i, axis) for i, axis in enumerate(self.spatial(operand)))
        return Placement(geometry, self.groups, w=self.axes.rhs, reversed=reversed,
                         **{operand.value: self.axes.lhs, role.value: self.axes.out})


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
    rank = _ranks(Names(), lhs_shape, rhs_shape)
    if dimension_numbers is None:
        if rank not in _DEFAULT_TRANSPOSE_SPECS:
            raise ValueError(f"dimension_numbers must be given for {rank} spatial axes; got None, whose default "
                             "exists for at most 3")
        dimension_numbers = _DEFAULT_TRANSPOSE_SPECS[rank]
    given = _lax_arguments(lhs_shape, rhs_shape, "strides", strides, rhs_dilation, dimension_numbers,
                           feature_group_count)
    if output_shape is not None and output_padding is not None:
        raise ValueError(f"output_shape and output_padding exclude each other; got output_shape={output_shape!r} "
                         f"and output_padding={output_padding!r}")
    extra = integers("output_padding", output_padding, rank, 0) if output_padding is not None else (0,) * rank
    wanted = (None,) * rank if output_shape is None else integers("output_shape", output_shape, rank, 0)
    spatial = given.spatial(Role.Y)
    padding = _transposed_padding(padding, [a.y_size for a in spatial], [a.extent for a in spatial], given.strides,
                                  use_consistent_padding)

    def place(i: int, axis: Axis) -> Axis:
        if wanted[i] is None:
            return _transposed_axis(axis, padding[i], extra[i], use_consistent_padding)
        return _axis_of_size(axis, padding[i], wanted[i], use_consistent_padding, f"output_shape[{i}]")

    return given.placement(Role.X, place, reversed=not transpose_kernel)


def _lax_arguments(lhs_shape, rhs_shape, name, strides, rhs_dilation, dimension_numbers, groups) -> _Arguments:
    dn = lax.conv_dimension_numbers(lhs_shape, rhs_shape, dimension_numbers)
    rank = len(lhs_shape) - 2
    return _Arguments(
        Names(), lhs_shape, rhs_shape, _Axes(tuple(dn.lhs_spec), tuple(dn.rhs_spec), tuple(dn.out_spec)),
        integers(name, strides, rank, 1),
        integers("rhs_dilation", rhs_dilation, rank, 1) if rhs_dilation is not None else (1,) * rank,
        group_count(groups))


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


def _axis_of_size(axis: Axis, padding, x_size: int, consistent: bool, name: str) -> Axis:
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
            f"{name} must be in {max(least, 0)}..{most}, the sizes that a convolution takes to "
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
    rank = _ranks(Names(), lhs_shape, rhs_shape)
    given = _lax_arguments(lhs_shape, rhs_shape, "window_strides", window_strides, rhs_dilation, dimension_numbers,
                           feature_group_count)
    if isinstance(padding, str) and padding.upper() not in _FORWARD_PADDING:
        raise ValueError(f"padding must be one of {_FORWARD_PADDING} or a sequence of {rank} (low, high) pairs; "
                         f"got {padding!r}")
    if isinstance(padding, str):
        pads = [forward_padding(padding, axis.x_size, axis.extent, axis.stride) for axis in given.spatial(Role.X)]
    else:
        pads = pairs(padding, rank)
    return given.placement(Role.Y, lambda i, axis: _padded_axis(axis, pads[i], i))


def _padded_axis(axis: Axis, padding: tuple[int, int], index: int) -> Axis:
    """The axis of a convolution, its size computed from the padding."""
    padded = axis.x_size + sum(padding)
    if isinstance(padded, int) and padded < 0:
        raise ValueError(f"padding[{index}]={padding} crops more than the input's size {axis.x_size}; kernel "
                         f"{axis.kernel}, stride {axis.stride}, dilation {axis.dilation}")
    y_size = (padded - axis.extent) // axis.stride + 1
    return dataclasses.replace(axis, y_size=max(y_size, 0), pad_lo=padding[0])


# ---- other frameworks ----------------------------------------------------------------------------------

# The axes of a kernel.  For a transposed convolution each of them means the kernel of the convolution
# that is transposed, so O holds the input's channels, and nothing is reversed.
KERNEL_ORDERS: Mapping[str, str] = {"torch": "OI*", "onnx": "OI*", "mxnet": "OI*", "keras": "*IO", "tensorflow": "*IO"}
MXNET_CHANNELS_LAST = "O*I"  # the kernel of MXNet's NWC, NHWC and NDHWC

_LAYOUTS = {1: ("NCW", "NWC"), 2: ("NCHW", "NHWC"), 3: ("NCDHW", "NDHWC")}


def channels_first(name: str, layout: str, rank: int) -> bool:
    """Whether a layout by name, such as ``"NHWC"``, has the channels before space."""
    known = _LAYOUTS.get(rank, ())
    if layout not in known:
        raise ValueError(f"{name} must be one of {known} for {rank} spatial axes; got {layout!r}")
    return layout == known[0]


def _full(axis: Axis) -> int:
    """The size of the transposed convolution's result before anything is cut from it."""
    return (axis.y_size - 1) * axis.stride + axis.extent


def _crop(axis: Axis, low: int, high: int) -> Axis:
    """The full result without its first `low` and last `high` positions; negative numbers add zeros."""
    size = _full(axis) - low - high
    if axis.y_size == 0 or isinstance(size, int) and size < 1:
        raise ValueError(f"padding must leave an output of size >= 1 on each spatial axis; got {size} from input size "
                         f"{axis.y_size}, kernel {axis.kernel}, stride {axis.stride}, dilation {axis.dilation} and a "
                         f"crop of {(low, high)}")
    return dataclasses.replace(axis, x_size=size, pad_lo=low)


def _same_kernel(name: str, kernel, rank: int, w_shape: Sequence[int], w_name: str):
    """Checks a kernel size that is said beside the kernel."""
    if per_axis(name, kernel, rank) != tuple(w_shape):
        raise ValueError(f"{name} must be the spatial shape of {w_name}, {tuple(w_shape)}; got {kernel!r}")


def _check_extra(name: str, extra: Sequence[int], **limits: Sequence[int]):
    """What extends the result must be less than one of the limits of its axis."""
    if any(e >= max(of_axis) for e, *of_axis in zip(extra, *limits.values())):
        said = ", ".join(f"{k}={v}" for k, v in {name: extra, **limits}.items())
        raise ValueError(f"{name} must be less than {' or '.join(limits)} on each spatial axis; got {said}")


# PyTorch: torch.nn.functional.conv{1,2,3}d, conv_transpose{1,2,3}d; output_size as torch.nn.ConvTranspose has it.


def _torch_each(name: str, value, rank: int, least: int = 1) -> tuple[int, ...]:
    """A sequence of one integer means what the integer does."""
    single = not is_integer(value) and hasattr(value, "__len__") and len(value) == 1
    return per_axis(name, value[0] if single else value, rank, least)


def _torch_arguments(input_shape, weight_shape, stride, dilation, groups) -> _Arguments:
    names = Names("input", "weight", "groups")
    rank = _ranks(names, input_shape, weight_shape)
    if 0 in input_shape[2:]:
        raise ValueError("input must have spatial axes of size >= 1 (batch and channels may be empty); got shape "
                         f"{tuple(input_shape)}")
    return _Arguments(names, input_shape, weight_shape, _Axes.of(rank, "NC*", KERNEL_ORDERS["torch"]),
                      _torch_each("stride", stride, rank), _torch_each("dilation", dilation, rank),
                      group_count(groups, "groups"))


def torch_conv_transpose(input_shape, weight_shape, stride=1, padding=0, output_padding=0, groups=1, dilation=1,
                         output_size=None) -> Placement:
    """``(size - 1) * stride + extent - 2 * padding + output_padding`` positions, `padding` cut from the low end."""
    given = _torch_arguments(input_shape, weight_shape, stride, dilation, groups)
    rank = len(given.strides)
    pads = _torch_each("padding", padding, rank, 0)
    extra = _torch_each("output_padding", output_padding, rank, 0)
    _check_extra("output_padding", extra, stride=given.strides, dilation=given.dilation)
    if output_size is None:
        return given.placement(Role.X, lambda i, axis: _crop(axis, pads[i], pads[i] - extra[i]))
    if any(extra):
        raise ValueError(f"output_size and output_padding exclude each other; got output_size={output_size!r} and "
                         f"output_padding={output_padding!r}")
    wanted = integers("output_size", output_size, rank, 1)
    return given.placement(
        Role.X, lambda i, axis: _axis_of_size(axis, (pads[i], pads[i]), wanted[i], True, f"output_size[{i}]"))


def torch_conv(input_shape, weight_shape, stride=1, padding=0, dilation=1, groups=1) -> Placement:
    """The operation that `torch_conv_transpose` transposes; the kernel must fit in the padded input."""
    given = _torch_arguments(input_shape, weight_shape, stride, dilation, groups)
    pads = torch_padding(weight_shape, padding, stride, dilation)
    padded = [n + sum(p) for n, p in zip(input_shape[2:], pads)]
    extents = [axis.extent for axis in given.spatial(Role.X)]
    if any(isinstance(n, int) and n < e for n, e in zip(padded, extents)):
        raise ValueError(f"weight must not reach beyond the padded input: it spans {tuple(extents)} positions and the "
                         f"padded input {tuple(padded)}; got weight of shape {tuple(weight_shape)} and input of shape "
                         f"{tuple(input_shape)}")
    return given.placement(Role.Y, lambda i, axis: _padded_axis(axis, pads[i], i))


def torch_padding(weight_shape, padding, stride=1, dilation=1) -> tuple[tuple[int, int], ...]:
    """The (low, high) padding of each axis of a convolution; of an odd total the high side has more."""
    kernel = weight_shape[2:]
    rank = len(kernel)
    if isinstance(padding, str) and padding == "valid":
        padding = 0
    elif isinstance(padding, str) and padding == "same":
        strides = _torch_each("stride", stride, rank)
        if any(s != 1 for s in strides):
            raise ValueError(f"padding='same' needs stride 1; got stride={stride!r}")
        totals = [d * (k - 1) for k, d in zip(kernel, _torch_each("dilation", dilation, rank))]
        return tuple((total // 2, total - total // 2) for total in totals)
    elif isinstance(padding, str):
        raise ValueError(f"padding must be 'valid', 'same', an integer >= 0 or one for each spatial axis; "
                         f"got {padding!r}")
    return tuple((p, p) for p in _torch_each("padding", padding, rank, 0))


# ONNX: ConvTranspose.


def onnx_conv_transpose(x_shape, w_shape, auto_pad="NOTSET", dilations=None, group=1, kernel_shape=None,
                        output_padding=None, output_shape=None, pads=None, strides=None, opset=22) -> Placement:
    """The crop that a given size leaves open is split in halves: of an odd one the high side has more with
    SAME_UPPER and the low side without; before opset 11 it was the other way round."""
    names = Names("X", "W", "group")
    rank = _ranks(names, x_shape, w_shape)
    given = _Arguments(names, x_shape, w_shape, _Axes.of(rank, "NC*", KERNEL_ORDERS["onnx"]),
                       integers("strides", (1,) * rank if strides is None else strides, rank, 1),
                       integers("dilations", (1,) * rank if dilations is None else dilations, rank, 1),
                       group_count(group, "group"))
    if kernel_shape is not None:
        _same_kernel("kernel_shape", kernel_shape, rank, w_shape[2:], "W")
    extra = integers("output_padding", (0,) * rank if output_padding is None else output_padding, rank, 0)
    _check_extra("output_padding", extra, strides=given.strides, dilations=given.dilation)
    if not isinstance(auto_pad, str) or auto_pad not in ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"):
        raise ValueError(f"auto_pad must be 'NOTSET', 'SAME_UPPER', 'SAME_LOWER' or 'VALID'; got {auto_pad!r}")
    if pads is not None and auto_pad != "NOTSET":
        raise ValueError(f"pads and auto_pad exclude each other; got pads={pads!r} and auto_pad={auto_pad!r}")
    if not is_integer(opset) or opset < 1:
        raise ValueError(f"opset must be an integer >= 1; got {opset!r}")
    explicit = integers("pads", (0,) * 2 * rank if pads is None else pads, 2 * rank, 0)
    if output_shape is not None:
        wanted = integers("output_shape", output_shape, rank, 1)
    elif auto_pad.startswith("SAME"):
        wanted = tuple(n * s for n, s in zip(x_shape[2:], given.strides))
    else:
        return given.placement(Role.X, lambda i, axis: _crop(axis, explicit[i], explicit[rank + i] - extra[i]))
    less_low = (auto_pad == "SAME_UPPER") == (opset >= 11)

    def place(i: int, axis: Axis) -> Axis:
        total = max(_full(axis) + extra[i] - wanted[i], 0)
        low = total // 2 if less_low else total - total // 2
        return _crop(axis, low, _full(axis) - low - wanted[i])

    return given.placement(Role.X, place)


# MXNet: Deconvolution.


def mxnet_deconvolution(data_shape, weight_shape, kernel, stride=None, dilate=None, pad=None, adj=None,
                        target_shape=None, num_filter=None, num_group=1, layout=None) -> Placement:
    """`target_shape` decides the crop alone; of an odd one the low side has more."""
    names = Names("data", "weight", "num_group")
    rank = _ranks(names, data_shape, weight_shape)
    first = layout is None or channels_first("layout", layout, rank)
    axes = _Axes.of(rank, *(("NC*", KERNEL_ORDERS["mxnet"]) if first else ("N*C", MXNET_CHANNELS_LAST)))

    def each(name, value, default):
        empty = value is None or hasattr(value, "__len__") and len(value) == 0
        return per_axis(name, default if empty else value, rank, default)

    given = _Arguments(names, data_shape, weight_shape, axes, each("stride", stride, 1), each("dilate", dilate, 1),
                       group_count(num_group, "num_group"))
    _, filters, *taps = _take(weight_shape, axes.rhs)
    _same_kernel("kernel", kernel, rank, taps, "weight")
    if num_filter != filters * given.groups:
        raise ValueError(f"num_filter must be what weight of shape {tuple(weight_shape)} with {given.groups} groups "
                         f"makes, {filters * given.groups}; got {num_filter!r}")
    target = each("target_shape", target_shape, 0)
    if not any(target):
        pads, extra = each("pad", pad, 0), each("adj", adj, 0)
        _check_extra("adj", extra, stride=given.strides)
        return given.placement(Role.X, lambda i, axis: _crop(axis, pads[i], pads[i] - extra[i]))

    def place(i: int, axis: Axis) -> Axis:
        total = _full(axis) - target[i]
        if not target[i] or total < 0:
            raise ValueError(f"target_shape[{i}] must be in 1..{_full(axis)}, at most the size of the whole result; "
                             f"got {target[i]}")
        return _crop(axis, total - total // 2, total // 2)

    return given.placement(Role.X, place)


# Keras: keras.ops.conv_transpose.


def keras_conv_transpose(inputs_shape, kernel_shape, strides=1, padding="valid", output_padding=None,
                         data_format=None, dilation_rate=1) -> Placement:
    """Without `output_padding`, 'same' makes ``input * stride`` and 'valid' ``(input - 1) * stride + max(kernel,
    stride)`` positions.  With it, it adds to ``(input - 1) * stride`` and, for 'valid', the kernel; for 'same', the
    kernel's remainder modulo 2.  'same' cuts the low half of what is too much."""
    names = Names("inputs", "kernel", "groups")
    rank = _ranks(names, inputs_shape, kernel_shape)
    if data_format not in (None, "channels_last", "channels_first"):
        raise ValueError(f"data_format must be None, 'channels_last' or 'channels_first'; got {data_format!r}")
    if not isinstance(padding, str) or padding.lower() not in ("same", "valid"):
        raise ValueError(f"padding must be 'same' or 'valid'; got {padding!r}")
    same = padding.lower() == "same"
    images = "NC*" if data_format == "channels_first" else "N*C"
    given = _Arguments(names, inputs_shape, kernel_shape, _Axes.of(rank, images, KERNEL_ORDERS["keras"]),
                       per_axis("strides", strides, rank), per_axis("dilation_rate", dilation_rate, rank), 1)
    extra = None if output_padding is None else per_axis("output_padding", output_padding, rank, 0)
    if extra is not None:
        _check_extra("output_padding", extra, strides=given.strides)

    def place(i: int, axis: Axis) -> Axis:
        k, s = axis.extent, axis.stride
        if extra is None:
            beyond = s if same else max(k, s)
        else:
            beyond = extra[i] + (k % 2 if same else k)
        cut = k - beyond
        low = max(cut // 2, 0) if same else 0
        return _crop(axis, low, cut - low)

    return given.placement(Role.X, place)


# TensorFlow: tf.nn.conv_transpose.


def tensorflow_conv_transpose(input_shape, filters_shape, output_shape, strides, padding="SAME", data_format=None,
                              dilations=None) -> Placement:
    """The transpose of the convolution that takes `output_shape` to the input's size."""
    names = Names("input", "filters", "groups")
    rank = _ranks(names, input_shape, filters_shape)
    images = "NC*" if data_format is not None and channels_first("data_format", data_format, rank) else "N*C"
    axes = _Axes.of(rank, images, KERNEL_ORDERS["tensorflow"])

    def each(name, value):
        if not is_integer(value) and hasattr(value, "__len__") and len(value) == rank + 2:
            batch, channels, *value = _take(value, axes.lhs)
            if (batch, channels) != (1, 1):
                raise ValueError(f"{name} must be 1 for batch and channels; got {(batch, channels)}")
        return _torch_each(name, value, rank)

    given = _Arguments(names, input_shape, filters_shape, axes, each("strides", strides),
                       each("dilations", 1 if dilations is None else dilations), 1)
    batch, channels, *wanted = _take(integers("output_shape", output_shape, rank + 2, 0, symbolic=True), axes.out)
    expected = input_shape[axes.lhs[0]], filters_shape[axes.rhs[1]]
    if (batch, channels) != expected:
        raise ValueError(f"output_shape must have the input's batch and the filters' output channels, {expected}; got "
                         f"{(batch, channels)}")
    if isinstance(padding, str):
        if padding not in ("SAME", "VALID"):
            raise ValueError(f"padding must be 'SAME', 'VALID' or a (low, high) pair for each axis; got {padding!r}")
        pads = (padding,) * rank
    else:
        outer, inner, *pads = _take(pairs(padding, rank + 2), axes.lhs)
        if any(outer) or any(inner):
            raise ValueError(f"padding must be (0, 0) for batch and channels; got {outer} and {inner}")
    return given.placement(Role.X, lambda i, axis: _axis_of_size(axis, pads[i], wanted[i], True, f"output_shape[{i}]"))
