# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""The part of a problem that computes anything: what libraries take.

Libraries want paddings that are not negative and not longer than the kernel.  A geometry may
have others: rows of x that no window reaches, windows that lie in the padding whole.  `split`
cuts both off.  Where they are given they do not matter; where they are made they are zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from jax_deconv.problem import GIVEN, Axis, ConvProblem, Role

#: What is cut off at either end of each spatial axis.
Cuts = tuple[tuple[int, int], ...]


def split_axis(axis: Axis) -> tuple[Axis, int, tuple[int, int], tuple[int, int]] | None:
    """The core of an axis, its padding after x, and the cuts off x and off y.

    In the core both paddings lie in [0, extent), and the one after x is the one before it where
    `y_size` leaves the choice.  None where no window touches x.  A symbolic axis has no padding left.

    >>> split_axis(Axis(x_size=10, y_size=3, kernel=3, stride=2, pad_lo=-2))
    (Axis(x_size=8, y_size=3, kernel=3, stride=2, dilation=1, pad_lo=0), 0, (2, 0), (0, 0))
    """
    if is_symbolic(axis):
        # What cannot be compared is made even: x grows by its padding, or shrinks where that is negative.
        core = dataclasses.replace(axis, x_size=axis.x_size + axis.pad_lo + axis.pad_hi, pad_lo=0)
        return core, 0, (-axis.pad_lo, -axis.pad_hi), (0, 0)
    # The windows [first, last] touch x: the first ends in or after it, the last starts in or before it.
    first = max(0, -((axis.extent - 1 - axis.pad_lo) // axis.stride))
    last = min(axis.y_size - 1, (axis.x_size - 1 + axis.pad_lo) // axis.stride)
    if axis.kernel == 0 or axis.x_size == 0 or last < first:
        return None
    pad_lo = axis.pad_lo - first * axis.stride
    x_lo = max(0, -pad_lo)
    core = dataclasses.replace(axis, x_size=axis.x_size - x_lo, y_size=last - first + 1,
                               pad_lo=max(0, pad_lo))
    x_hi = 0
    if core.pad_hi <= -core.stride:  # so many rows after the last window that another one would fit
        x_hi = -core.pad_hi
        core = dataclasses.replace(core, x_size=core.x_size - x_hi)
    # Up to stride - 1 more give no further window.
    pad_hi = min(max(core.pad_lo, core.pad_hi, 0), core.pad_hi + core.stride - 1)
    return core, pad_hi, (x_lo, x_hi), (first, axis.y_size - 1 - last)


@dataclasses.dataclass(frozen=True)
class Core:
    """A problem that a library takes, and how the full one is made of it."""

    problem: ConvProblem
    pad_hi: tuple[int, ...]
    cuts: dict[Role, Cuts]

    def wrap(self, function: Callable) -> Callable:
        """A function of the full operands from one of the core's operands, both in the order of `GIVEN`."""
        first, second = GIVEN[self.problem.role]

        def wrapped(a, b):
            out = function(_pad(a, self.cuts.get(first), -1), _pad(b, self.cuts.get(second), -1))
            return _pad(out, self.cuts.get(self.problem.role), 1)

        return wrapped


def _pad(array, cuts: Cuts | None, sign: int):
    """Puts zeros where the cuts were (`sign` 1) or cuts them off (-1)."""
    if not any(map(any, cuts or ())):
        return array
    return lax.pad(array, jnp.zeros((), array.dtype),
                   [(0, 0, 0)] * 2 + [(sign * lo, sign * hi, 0) for lo, hi in cuts])


def split(problem: ConvProblem) -> Core | None:
    """The core of a problem; None where the result is zero, because no window touches x."""
    parts = [split_axis(axis) for axis in problem.geometry]
    if None in parts:
        return None
    axes, pad_hi, x_cuts, y_cuts = zip(*parts) if parts else ((), (), (), ())
    return Core(dataclasses.replace(problem, geometry=axes), pad_hi, {Role.X: x_cuts, Role.Y: y_cuts})


def is_symbolic(of: ConvProblem | Axis) -> bool:
    """Whether a size is known only when the program runs."""
    if isinstance(of, Axis):
        return not (isinstance(of.x_size, int) and isinstance(of.y_size, int))
    return any(map(is_symbolic, of.geometry)) or not all(isinstance(size, int) for size in of.sizes.values())


def is_empty(problem: ConvProblem) -> bool:
    """Whether there is nothing to compute: a tensor has no elements, or no window touches x."""
    return any(dim == 0 for role in Role for dim in problem.shape(role)) or split(problem) is None
