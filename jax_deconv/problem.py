# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""The algebra: three tensors, three roles, and the letters on their axes.

A strided convolution is one trilinear form over three tensors,

    x [N, G*C, *X]   the large side
    w [G*K, C, *R]   the kernel
    y [N, G*K, *Y]   the small side

    y[n, (g k), i] = sum_{c, r}  x[n, (g c), i * stride + r * dilation - pad_lo] * w[(g k), c, r]

where positions outside x read as zero.  Each role takes two of the tensors and makes the
third, always by pairing the same index triples, so that role `y` is the convolution, role
`x` its transpose in x (the transposed convolution) and role `w` its transpose in w (the
filter gradient).  Transposing any role in any operand gives another role: the family is
closed, which is all that differentiation to any order needs.

`AXES` says which letters stand on the two leading axes of each tensor.  Everything else
follows from it:

* shapes: the size of an axis is the product of its letters' sizes;
* contraction: a letter that is absent from the tensor being made is summed over;
* batching (vmap): the tensors that carry a new axis (operands that are mapped, and the
  result) are exactly the tensors that hold one of the letters (x and y: N, x and w: C,
  w and y: K, all three: G), so the new axis folds into that letter;
* sharding: an axis of the mesh may split any letter; if that letter is summed over, the
  partial results are added.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np


class Role(enum.StrEnum):
    """The tensor that an operation makes."""

    X = "x"
    W = "w"
    Y = "y"

    # So that a role prints as its letter in parameters, too.
    __repr__ = enum.StrEnum.__str__


# The letters of the two leading axes, outermost first.
AXES: Mapping[Role, tuple[str, str]] = {
    Role.X: ("N", "GC"),
    Role.W: ("GK", "C"),
    Role.Y: ("N", "GK"),
}

# The operands of each role, in the order in which they are passed.
GIVEN: Mapping[Role, tuple[Role, Role]] = {
    Role.X: (Role.Y, Role.W),
    Role.Y: (Role.X, Role.W),
    Role.W: (Role.X, Role.Y),
}


def wider(a, b) -> np.dtype:
    """Of two types that meet in a convolution, the one that loses nothing; if neither is, the least that does so.

    JAX's promotion would widen integers to floats, and know no way from float8 to float32.
    """
    a, b = np.dtype(a), np.dtype(b)
    kinds = [jnp.issubdtype(t, jnp.inexact) for t in (a, b)]
    if a == b or kinds[0] > kinds[1]:
        return a
    if kinds[0] < kinds[1]:
        return b
    if a.itemsize != b.itemsize:
        return a if a.itemsize > b.itemsize else b
    if not kinds[0]:
        return a
    return np.dtype(np.float32 if a.itemsize > 1 else jnp.bfloat16)


def is_storage(dtype) -> bool:
    """Whether it is a float of at most 8 bits: nothing to compute in, and every value is one of bfloat16."""
    return jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize == 1


def letters(role: Role) -> str:
    """All letters of a tensor, e.g. ``"NGC"`` for x."""
    return "".join(AXES[role])


def fold_letter(batched: frozenset[Role]) -> str:
    """The letter that stands in exactly the tensors of `batched`."""
    (letter,) = (l for l in "NCKG" if {r for r in Role if l in letters(r)} == batched)
    return letter


@dataclasses.dataclass(frozen=True)
class Axis:
    """The geometry of one spatial axis, as integers.

    `pad_lo` counts the zeros before x (negative: x is cropped).  The padding after x is
    derived: every value that leaves `y_size` unchanged means the same.
    """

    x_size: int
    y_size: int
    kernel: int
    stride: int = 1
    dilation: int = 1
    pad_lo: int = 0

    @property
    def extent(self) -> int:
        """Positions spanned by the dilated kernel."""
        return (self.kernel - 1) * self.dilation + 1 if self.kernel else 0

    @property
    def pad_hi(self) -> int:
        """The padding after x that the last tap of the last window just reaches."""
        return (self.y_size - 1) * self.stride + self.extent - self.x_size - self.pad_lo

    def size(self, role: Role) -> int:
        return {Role.X: self.x_size, Role.W: self.kernel, Role.Y: self.y_size}[role]


Geometry = tuple[Axis, ...]


def shape(role: Role, sizes: Mapping[str, int], geometry: Geometry) -> tuple[int, ...]:
    """The shape of a tensor from the sizes of its letters and the geometry."""
    lead = (math.prod(sizes[l] for l in axis) for axis in AXES[role])
    return (*lead, *(axis.size(role) for axis in geometry))


def letter_sizes(shapes: Mapping[Role, Sequence[int]], groups: int) -> dict[str, int]:
    """The size of every letter, read off the shapes of any two tensors."""
    sizes = {"G": groups}
    for role, dims in shapes.items():
        for axis, dim in zip(AXES[role], dims):
            sizes[axis[-1]] = dim // groups if axis[0] == "G" else dim
    return sizes


@dataclasses.dataclass(frozen=True)
class ConvProblem:
    """One call, described completely: what a lowering and a tuning store need to know."""

    role: Role
    N: int
    G: int
    C: int
    K: int
    geometry: Geometry
    dtype: np.dtype  # of both operands
    out_dtype: np.dtype

    @classmethod
    def of(cls, role: Role, shapes: Mapping[Role, Sequence[int]], groups: int,
           geometry: Geometry, dtype, out_dtype) -> ConvProblem:
        return cls(role=role, geometry=geometry, dtype=np.dtype(dtype),
                   out_dtype=np.dtype(out_dtype), **letter_sizes(shapes, groups))

    @property
    def sizes(self) -> dict[str, int]:
        return {letter: getattr(self, letter) for letter in "NGCK"}

    @property
    def rank(self) -> int:
        """The number of spatial axes."""
        return len(self.geometry)

    def shape(self, role: Role | None = None) -> tuple[int, ...]:
        """The shape of a tensor; by default of the one that is made."""
        return shape(role or self.role, self.sizes, self.geometry)

    @property
    def macs(self) -> int:
        """Multiply-adds, counting every tap of every window (also those that read padding)."""
        return math.prod(self.sizes.values()) * math.prod(a.y_size * a.kernel for a in self.geometry)

    @property
    def least_bytes(self) -> int:
        """Bytes that any algorithm moves: each operand read once, the result written once."""
        return sum(math.prod(self.shape(r)) * (self.out_dtype if r is self.role else self.dtype).itemsize
                   for r in Role)
