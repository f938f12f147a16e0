# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""What a problem takes on a GPU, without running it: the floor, and a model of each algorithm.

The rates are those of one H200, measured: other GPUs have others, but choose alike as long as the
ratio of arithmetic to bandwidth is alike.  Times are in microseconds.
"""

from __future__ import annotations

import math

from jax import lax

from jax_deconv.problem import ConvProblem

BANDWIDTH = 4.3e6  # bytes read and written by a large copy
_PEAK = {2: 790e6, 4: 395e6, 8: 60e6}  # operations, by size of the operands: bfloat16, TF32, float64
#: Those whose rates are known.
TYPES = ("float16", "bfloat16", "float32", "float64")
_PEAK_STRICT = 60e6  # float32 that is not rounded to TF32, by datasheet

# What libraries reach of these rates where the problem suits them, and what a launch costs.
_EFFICIENCY = 0.6
_LAUNCH = 3.0
# Tensor-core kernels compute whole tiles of channels, used or not.
_TILE = 32


def _peak(problem: ConvProblem, policy) -> float:
    if problem.dtype.name == "float32" and policy.precision is lax.Precision.HIGHEST:
        return _PEAK_STRICT
    return _PEAK[problem.dtype.itemsize]


def floor(problem: ConvProblem, policy) -> float:
    """The least time: every operation at the measured peak of its type, every byte moved once."""
    return max(2 * problem.macs / _peak(problem, policy), problem.least_bytes / BANDWIDTH)


def cudnn(problem: ConvProblem, policy) -> float:
    """cuDNN's time, of its best plan."""
    used = math.prod(size / (-(-size // _TILE) * _TILE) for size in (problem.C, problem.K))
    operations = 2 * problem.macs / used / (_EFFICIENCY * _peak(problem, policy))
    return _LAUNCH + max(operations, problem.least_bytes / (_EFFICIENCY * BANDWIDTH))


def relayout(bytes_moved: int) -> float:
    """The time of passes of XLA's that move so many bytes, read and written."""
    return _LAUNCH + bytes_moved / (_EFFICIENCY * BANDWIDTH)


def kernel(problem: ConvProblem, policy) -> float:
    """The time of a hand-written kernel: each applies where memory is what bounds it."""
    return _LAUNCH + floor(problem, policy) / _EFFICIENCY
