# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Chooses, when a call is lowered, the way in which it is computed."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp

from jax_deconv.lowering import xla
from jax_deconv.policy import Policy
from jax_deconv.problem import ConvProblem, Role


def build(problem: ConvProblem, *, policy: Policy, platform: str | None) -> Callable:
    """A function of the two operands, for one device."""
    if any(dim == 0 for role in Role for dim in problem.shape(role)):
        # An empty result, or a sum of no terms.
        return lambda a, b: jnp.zeros(problem.shape(), problem.out_dtype)
    return xla.build(problem, policy, platform)
