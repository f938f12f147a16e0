# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""The three roles in XLA's own operations: the platform default and the oracle of the others."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp

from jax_deconv.lowering import core, forms
from jax_deconv.problem import GIVEN, ConvProblem, Role, wider


def choose(problem: ConvProblem, dtype, platform: str | None) -> Callable:
    """The form to compute a core problem in; `dtype` is the type that it multiplies."""
    if platform == "cpu":
        return _choose_cpu(problem, dtype)
    # XLA:GPU maps `conv` to cuDNN, but has no convolution of integers.
    return forms.conv if jnp.issubdtype(dtype, jnp.inexact) else _dots(problem, math.inf)


def form_name(problem: ConvProblem, platform: str | None) -> str:
    """The name of the form that `build` takes, where there is something to compute."""
    form = choose(core.split(problem).problem, _compute_dtype(problem, platform), platform)
    return next(name for name, value in vars(forms).items() if value is form)


def _waste(p: ConvProblem) -> float:
    """How many times the products grow when the stride is taken out."""
    return math.prod(-(-v.kernel // v.stride) * v.stride / v.kernel for v in p.geometry)


def _dots(p: ConvProblem, positions) -> Callable:
    """Taking the stride out makes fewer and larger products.

    Not where padding the kernel wastes many, nor where it is so large beside y that its copy in
    another order costs as much as they do.
    """
    few = math.prod(v.kernel for v in p.geometry) <= forms.UNROLL
    if not forms.can_split(p) or few and (_waste(p) > 1.25 or positions <= 32 and p.role is not Role.W):
        return forms.taps
    return forms.split_taps


def _choose_cpu(p: ConvProblem, dtype) -> Callable:
    """Rules from the measurements of benchmarks/cpu.py.

    Products as dots are the rule.  XLA:CPU's convolution is as fast for float32 without groups (other
    types, groups, and any convolution with a dilated input in 3D run in naive loops).  It wins where a
    dot's operands or results, one for each tap, take longer to move than to multiply.
    """
    kernel, stride = (math.prod(getattr(v, name) for v in p.geometry) for name in ("kernel", "stride"))
    if any(map(core.is_symbolic, p.geometry)):
        return forms.conv  # dots have reshapes that JAX cannot prove
    positions = p.N * math.prod(v.y_size for v in p.geometry) if isinstance(p.N, int) else math.inf
    if not (isinstance(p.C, int) and isinstance(p.K, int)):
        return _dots(p, positions)  # symbolic: nothing to weigh
    if p.C == p.K == 1 and p.G > 1:
        return forms.depthwise
    dots = _dots(p, positions)
    if dtype != jnp.float32 or p.G > 1 or not 1 <= p.rank <= 3:
        return dots
    overlap = kernel > stride and forms.can_split(p)
    if p.role is Role.W:
        # Few columns for each tap, or many zeros where the stride is taken out: all taps in one product.
        wide = p.C * stride <= 64 or positions >= 256 and _waste(p) > 1.25
        return forms.windows if overlap and wide else dots
    if p.role is Role.X:
        narrow = p.C * stride <= 8  # products of a few columns each
        if overlap and not narrow and p.K < 128 and _waste(p) < 1.5:
            # Few channels to sum over: adding what overlaps outweighs the products.
            return forms.windows if p.rank == 3 else forms.split_conv
        alike = p.rank == 2 and kernel <= forms.UNROLL and (positions < 128 or _waste(p) > 1.25)
        # Where dots gain little, `conv`: it reads the kernel as the user stored it, and they copy it.
        return forms.conv if alike and not narrow else dots
    # Both copy the kernel here, and dots less of it at a time; but in 1D the stride is taken out by a reshape.
    if positions < 256 and (kernel <= forms.UNROLL or p.rank > 1):
        return forms.taps if kernel <= forms.UNROLL else dots
    if overlap and p.rank > 1 and p.C * p.geometry[-1].kernel >= 16:
        return forms.windows  # it copies runs of at least so many floats, which `conv` does no faster
    if p.rank == 3 or not overlap:
        return dots
    return forms.split_conv if kernel > 512 else forms.conv


def _compute_dtype(problem: ConvProblem, platform: str | None):
    """The type to multiply in, such that nothing but the result is rounded to less."""
    wide = wider(problem.dtype, problem.out_dtype)
    if wide.itemsize < 4 and jnp.issubdtype(wide, jnp.floating):
        # An accelerator accumulates 16-bit floats in float32 by itself; the CPU has to be told.
        return wide if wide.itemsize == 2 and platform != "cpu" else jnp.dtype(jnp.float32)
    if jnp.issubdtype(wide, jnp.inexact):
        return wide
    # Integers wrap around, so that any type wide enough gives the same bits.  (Booleans: any sum > 0.)
    return jnp.dtype(jnp.int64 if wide.itemsize == 8 else jnp.int32)


def channels_last(role: Role, array):
    return jnp.moveaxis(array, (0, 1), (-2, -1)) if role is Role.W else jnp.moveaxis(array, 1, -1)


def canonical(role: Role, array):
    return jnp.moveaxis(array, (-2, -1), (0, 1)) if role is Role.W else jnp.moveaxis(array, -1, 1)


def build(problem: ConvProblem, policy, platform: str | None, form: Callable | None = None) -> Callable:
    """A traceable function of the role's operands, in the order of `GIVEN`; `form` overrides the choice."""
    part = core.split(problem)
    if part is None or any(isinstance(size, int) and size == 0 for size in problem.sizes.values()):
        def zeros(a, b):
            if problem.role is Role.W:
                return jnp.zeros(problem.shape(), problem.out_dtype)
            # The batch may be symbolic: read it off an operand.
            return jnp.zeros((a.shape[0], *problem.shape()[1:]), problem.out_dtype)
        return zeros

    dtype = _compute_dtype(problem, platform)
    form = form or choose(part.problem, dtype, platform)

    def function(*operands):
        operands = (channels_last(role, t.astype(dtype)) for role, t in zip(GIVEN[problem.role], operands))
        out = form(part.problem, policy.precision, *operands)
        return canonical(problem.role, out.astype(problem.out_dtype))

    return part.wrap(function)
