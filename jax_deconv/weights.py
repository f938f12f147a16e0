# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels of other frameworks as parameters of this package's modules and functions, and back.

A framework lays the kernel of a transposed convolution out as that of the convolution it transposes, so one
entry each serves both operations.
"""

from __future__ import annotations

from jax import lax

from jax_deconv import api
from jax_deconv.conventions import (
    KERNEL_ORDERS,
    MXNET_CHANNELS_LAST,
    Placement,
    axis_order,
    channels_first,
    group_count,
)
from jax_deconv.problem import Role

__all__ = ["export_kernel", "import_kernel"]

_MEANING = """
    Args:
      kernel: {kernel}
      convention: ``'torch'`` or ``'onnx'``: ``[O, I, *kernel]``; ``'mxnet'``: the same, or ``[O, *kernel, I]`` with a
        `layout` that has channels last; ``'keras'`` or ``'tensorflow'``: ``[*kernel, I, O]``.  O and I are those of the
        convolution: for a transposed one, O holds all input channels and I the output channels of a group.
      groups: the number of groups into which the channels fall.
      operation: what the kernel is for: ``'conv_transpose'`` or ``'conv'`` (`jax_deconv.conv`, Flax's Conv).
      transpose_kernel: of our `conv_transpose` or module.
      dimension_numbers: of our function; None is the order of Flax's modules, ``[*kernel, I, O]``.
      layout: MXNet's name for the order of the data's axes, such as ``'NHWC'``.

    Returns:
      {returns}

    Raises:
      ValueError, TypeError: an argument is of the wrong kind, or the groups do not divide the kernel's channels.
"""


def import_kernel(kernel, convention: str, *, groups: int = 1, operation: str = "conv_transpose",
                  transpose_kernel: bool = False, dimension_numbers=None, layout: str | None = None):
    theirs, ours = _placements(kernel, convention, groups, operation, transpose_kernel, dimension_numbers, layout)
    return _move(kernel, theirs, ours)


def export_kernel(kernel, convention: str, *, groups: int = 1, operation: str = "conv_transpose",
                  transpose_kernel: bool = False, dimension_numbers=None, layout: str | None = None):
    theirs, ours = _placements(kernel, convention, groups, operation, transpose_kernel, dimension_numbers, layout)
    return _move(kernel, ours, theirs)


import_kernel.__doc__ = "Another framework's kernel, as one of ours.\n" + _MEANING.format(
    kernel="an array in the framework's order.", returns="The array for our function or module.") + """
    >>> import jax.numpy as jnp
    >>> weight = jnp.ones((6, 2, 3, 5))        # torch.nn.ConvTranspose2d(6, 4, (3, 5), groups=2).weight
    >>> import_kernel(weight, "torch", groups=2).shape
    (3, 5, 3, 4)
    >>> import_kernel(weight, "torch", groups=2, transpose_kernel=True).shape
    (3, 5, 2, 6)
    """
export_kernel.__doc__ = "One of our kernels, as another framework's: the inverse of `import_kernel`.\n" + \
    _MEANING.format(kernel="an array of our function or module.", returns="The array in the framework's order.") + """
    >>> import jax.numpy as jnp
    >>> kernel = jnp.ones((3, 5, 3, 4))        # jax_deconv.linen.ConvTranspose(4, (3, 5), feature_group_count=2)
    >>> export_kernel(kernel, "keras", groups=2).shape
    (3, 5, 2, 6)
    """


def _placements(kernel, convention, groups, operation, transpose_kernel, dimension_numbers, layout):
    """How the framework's array and ours hold the canonical kernel."""
    api.check_array("kernel", kernel)
    rank = kernel.ndim - 2
    if rank < 0:
        raise ValueError(f"kernel must have at least 2 axes; got shape {kernel.shape}")
    groups = group_count(groups, "groups")
    if convention not in tuple(KERNEL_ORDERS):
        raise ValueError(f"convention must be one of {tuple(KERNEL_ORDERS)}; got {convention!r}")
    if layout is not None and convention != "mxnet":
        raise ValueError(f"layout must be None with convention={convention!r}; got {layout!r}")
    if operation not in ("conv_transpose", "conv"):
        raise ValueError(f"operation must be 'conv_transpose' or 'conv'; got {operation!r}")
    if operation == "conv" and transpose_kernel:
        raise ValueError(f"transpose_kernel must be False with operation='conv'; got {transpose_kernel!r}")
    last = layout is not None and not channels_first("layout", layout, rank)
    theirs = axis_order(MXNET_CHANNELS_LAST if last else KERNEL_ORDERS[convention], "OI", rank)
    ours = axis_order("*IO", "OI", rank)
    if dimension_numbers is not None:
        dn = lax.conv_dimension_numbers(kernel.shape, kernel.shape, dimension_numbers)
        # The framework's spatial axes stand as those of the input.
        ours = (*dn.rhs_spec[:2], *(k for _, k in sorted(zip(dn.lhs_spec[2:], dn.rhs_spec[2:]))))
    reversed = operation == "conv_transpose" and not transpose_kernel
    return tuple(Placement((), groups, x=(), w=w, y=(), reversed=r) for w, r in ((theirs, False), (ours, reversed)))


def _move(kernel, source: Placement, target: Placement):
    outer = kernel.shape[source.w[0]]
    if outer % source.groups:
        raise ValueError(f"groups must divide the {outer} channels of the kernel's whole channel axis; got "
                         f"{source.groups} with a kernel of shape {kernel.shape}")
    return target.restore(Role.W, source.canonical(Role.W, kernel))
