# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""The three roles in XLA's own operations: the platform default and the oracle of the others."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp

from jax_deconv.lowering import core, forms
from jax_deconv.problem import GIVEN, ConvProblem, Role


def why_not(problem: ConvProblem, policy) -> str | None:
    """XLA takes every problem."""
    del problem, policy
    return None


def choose(problem: ConvProblem, dtype, platform: str | None) -> Callable:
    """The form to compute a core problem in; `dtype` is the type that it multiplies."""
    can_split = forms.can_split(problem)
    if platform != "cpu":
        # No platform but the CPU convolves integers; XLA:GPU maps `conv` to cuDNN.
        return forms.conv if jnp.issubdtype(dtype, jnp.inexact) else _dots(problem)
    return _choose_cpu(problem, dtype) if can_split else _dots(problem)


def _dots(problem):
    return forms.split_taps if forms.can_split(problem) else forms.taps


def _choose_cpu(p: ConvProblem, dtype) -> Callable:
    """Measured on the layers of benchmarks/cpu.py.  What the rules follow from:

    * XLA:CPU convolves float32 fast in 1D and 2D and without groups, where it also has a transposed
      convolution of its own (product, then overlap-add).  Other types, groups and the 3D transposed
      convolution run in naive loops.
    * Taking the stride out makes fewer and larger products, unless padding the kernel wastes many.
    * `conv` copies the kernel into its own order; with few positions that costs more than the products.
    """
    kernel, stride = (math.prod(getattr(v, name) for v in p.geometry) for name in ("kernel", "stride"))
    padded = math.prod(-(-v.kernel // v.stride) * v.stride for v in p.geometry)
    exact = padded == kernel  # nothing is wasted by taking the stride out
    if p.C == p.K == 1 and p.G > 1:
        return forms.depthwise
    if p.role is Role.W:
        if exact or kernel > forms.UNROLL and 2 * padded < 3 * kernel:
            return forms.split_taps
        return forms.taps if kernel <= forms.UNROLL or dtype != jnp.float32 else forms.conv
    if dtype != jnp.float32 or p.rank not in (1, 2, 3):
        return _dots(p)
    if p.G > 1:
        return forms.taps if kernel <= forms.UNROLL else forms.split_taps
    if p.role is Role.X:
        if p.rank == 3 and not exact:
            return forms.split_taps
        many = stride < kernel and p.C * stride > 8  # k == s is one product either way
        return forms.split_conv if p.rank == 3 or exact and many else forms.conv
    positions = p.N * math.prod(v.y_size for v in p.geometry) if isinstance(p.N, int) else math.inf
    if kernel <= forms.UNROLL and (positions <= 128 or p.rank == 3 and not exact):
        return forms.taps
    return forms.split_conv if exact and (p.rank == 3 or kernel > 512) else forms.conv


def _compute_dtype(problem: ConvProblem, platform: str | None):
    """The type to multiply in, such that nothing but the result is rounded to less."""
    wide = jnp.promote_types(problem.dtype, problem.out_dtype)
    if wide.itemsize < 4 and jnp.issubdtype(wide, jnp.floating):
        # An accelerator accumulates 16-bit floats in float32 by itself; the CPU has to be told.
        return wide if wide.itemsize == 2 and platform != "cpu" else jnp.dtype(jnp.float32)
    if jnp.issubdtype(wide, jnp.inexact):
        return wide
    # Integers wrap around, so that any type wide enough gives the same bits.  (Booleans: any sum > 0.)
    return jnp.dtype(jnp.int64 if wide.itemsize == 8 else jnp.int32)


def _channels_last(role: Role, array):
    return jnp.moveaxis(array, (0, 1), (-2, -1)) if role is Role.W else jnp.moveaxis(array, 1, -1)


def _canonical(role: Role, array):
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
        operands = (_channels_last(role, t.astype(dtype)) for role, t in zip(GIVEN[problem.role], operands))
        out = form(part.problem, policy.precision, *operands)
        return _canonical(problem.role, out.astype(problem.out_dtype))

    return part.wrap(function)
