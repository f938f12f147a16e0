# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Groups merged into fewer and wider ones, whose kernel is zero off the diagonal.

cuDNN's tensor-core kernels compute whole tiles of channels: several narrow groups in a tile cost what
one does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp

from jax_deconv.lowering import cost, cudnn
from jax_deconv.problem import GIVEN, ConvProblem, Role

_WIDTHS = (32, 64, 128)  # channels of a merged group, of its narrower side


def why_not(problem: ConvProblem, policy) -> str | None:
    if problem.G == 1:
        return "there are no groups"
    if not variants(problem):
        return "its groups are wide"
    return cudnn.why_not(problem, policy)


def variants(problem: ConvProblem) -> list[str]:
    """How many groups become one."""
    narrow = min(problem.C, problem.K)
    divisors = [n for n in range(2, problem.G + 1) if problem.G % n == 0]
    merged = {min((n for n in divisors if n * narrow >= width), default=problem.G)
              for width in _WIDTHS if narrow < width}
    return [str(n) for n in sorted(merged)]


def inner(problem: ConvProblem, variant: str) -> ConvProblem:
    """What cuDNN computes."""
    n = int(variant)
    return dataclasses.replace(problem, G=problem.G // n, C=problem.C * n, K=problem.K * n)


def overhead(problem: ConvProblem, variant: str) -> float:
    """Microseconds around cuDNN's call: the wide kernel is written, or read."""
    return cost.relayout(math.prod(inner(problem, variant).shape(Role.W)) * problem.dtype.itemsize)


def build(problem: ConvProblem, policy, plan, calls: Callable) -> Callable:
    """A traceable function of the operands; `calls(problem)` computes the inner problem."""
    del policy
    n = int(plan.variant)
    wide = inner(problem, plan.variant)
    compute = calls(wide)
    space = problem.shape(Role.W)[2:]
    diagonal = jnp.eye(n, dtype=bool)[:, None, :, None].reshape(n, 1, n, 1, *(1 for _ in space))

    def widen(w):
        w = w.reshape(wide.G, n, problem.K, 1, problem.C, *space)
        return jnp.where(diagonal, w, jnp.zeros((), w.dtype)).reshape(wide.shape(Role.W))

    def narrow(w):
        w = w.reshape(wide.G, n, problem.K, n, problem.C, *space)
        # Summed over all but one zero: nothing is rounded.
        return jnp.where(diagonal, w, jnp.zeros((), w.dtype)).sum(3).reshape(problem.shape(Role.W))

    def function(*operands):
        out = compute(*(widen(t) if role is Role.W else t for role, t in zip(GIVEN[problem.role], operands)))
        return narrow(out) if problem.role is Role.W else out

    return function
