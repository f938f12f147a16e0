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


def choose(problem: ConvProblem, platform: str | None) -> Callable:
    taps = math.prod(v.kernel for v in problem.geometry)
    if platform == "cpu":
        return forms.taps if taps <= 64 and problem.role is Role.W else forms.conv
    # XLA:GPU has no convolution of integers.
    return forms.conv if jnp.issubdtype(problem.dtype, jnp.inexact) else forms.taps


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
    form = form or choose(part.problem, platform)

    def function(*operands):
        operands = (_channels_last(role, t.astype(dtype)) for role, t in zip(GIVEN[problem.role], operands))
        out = form(part.problem, policy.precision, *operands)
        return _canonical(problem.role, out.astype(problem.out_dtype))

    return part.wrap(function)
