# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Partitioning rules, read off the letters in `problem.AXES`."""

from __future__ import annotations

import jax
from jax import lax


def same_varying_axes(*arrays):
    """Inside a shard_map: operands that all vary over every manual axis over which one of them does."""
    varying = [jax.typeof(a).manual_axis_type.varying for a in arrays]
    union = frozenset().union(*varying)
    return [lax.pcast(a, tuple(union - v), to="varying") if union - v else a for a, v in zip(arrays, varying)]


def of_result(role, operands, groups):
    return operands[next(iter(operands))].sharding


def partitioned(compute, problem, context):
    return compute(problem)
