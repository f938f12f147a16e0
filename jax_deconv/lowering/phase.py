# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""The stride taken out: a problem of stride 1 for cuDNN, between passes of XLA's that take x apart or join it.

It wins where cuDNN's strided kernels are far from the floor: large strides, and few channels, since the
phases of the stride are channels here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from jax_deconv.lowering import core, cost, cudnn, forms, xla
from jax_deconv.problem import GIVEN, ConvProblem, Role


def why_not(problem: ConvProblem, policy) -> str | None:
    part = core.split(problem)
    if part is None:
        return "there is nothing to compute"
    if not forms.can_split(part.problem):
        return "an axis has both a stride and a dilation"
    if all(axis.stride == 1 for axis in part.problem.geometry):
        return "there is no stride"
    return cudnn.why_not(inner(problem), policy)


def inner(problem: ConvProblem, variant: str = "") -> ConvProblem:
    """What cuDNN computes."""
    del variant
    return forms.without_stride(core.split(problem).problem)


def variants(problem: ConvProblem) -> list[str]:
    del problem
    return [""]


def overhead(problem: ConvProblem, variant: str = "") -> float:
    """Microseconds around cuDNN's call: the kernel is read and written once more, and so is x unless its blocks lie in
    memory as they are.
    """
    axes, transformed = core.split(problem).problem.geometry, inner(problem, variant)
    in_place = all(axis.stride == 1 for axis in axes[:-1]) and all(
        axis.pad_lo == 0 and axis.x_size == block.x_size * axis.stride
        for axis, block in zip(axes[-1:], transformed.geometry[-1:]))
    moved = (Role.W,) if in_place else (Role.X, Role.W)
    return sum(cost.relayout(2 * math.prod(transformed.shape(role)) * problem.dtype.itemsize) for role in moved)


def build(problem: ConvProblem, policy, plan, calls: Callable) -> Callable:
    """A traceable function of the operands; `calls(problem)` computes the inner problem."""
    del plan
    part = core.split(problem)

    def conv(q, precision, a, b):
        del precision
        operands = (xla.canonical(role, t) for role, t in zip(GIVEN[q.role], (a, b)))
        return xla.channels_last(q.role, calls(q)(*operands))

    def function(*operands):
        operands = (xla.channels_last(role, t) for role, t in zip(GIVEN[problem.role], operands))
        return xla.canonical(problem.role, forms.split_conv(part.problem, policy.precision, *operands, conv=conv))

    return part.wrap(function)
