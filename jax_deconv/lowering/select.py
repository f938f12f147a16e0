# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Chooses, when a call is lowered, the way in which it is computed."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import jax.numpy as jnp

from jax_deconv import tuning
from jax_deconv.lowering import core, cudnn, xla
from jax_deconv.lowering.epilogue import Epilogue
from jax_deconv.policy import Policy
from jax_deconv.problem import ConvProblem, Role


def build(problem: ConvProblem, *, policy: Policy, platform: str | None, may_time: bool = False,
          epilogue: Epilogue | None = None) -> Callable:
    """A function of the two operands and of what the epilogue takes, for one device of the platform.

    Args:
      problem: what that device computes.
      policy: complete.
      platform: "cpu", "cuda" or None for any other.
      may_time: whether candidates may be run here and now to find the fastest.
      epilogue: what follows in the same call.
    """
    if epilogue is not None:
        linear = functools.partial(build, policy=policy, platform=platform, may_time=may_time)
        return epilogue.after(linear, problem, platform)
    empty = any(dim == 0 for role in Role for dim in problem.shape(role)) or core.split(problem) is None
    if not empty and policy.algorithm != "xla":
        reason = cudnn.why_not(problem, policy) if platform == "cuda" else "it needs an NVIDIA GPU"
        if reason is None:
            return cudnn.build(problem, policy, tuning.choose(problem, policy, may_time=may_time))
        if policy.algorithm == "cudnn":
            raise ValueError(f"algorithm='cudnn' cannot compute {tuning.describe(problem, policy)}: {reason}")
        if platform == "cuda":
            _fall_back(problem, policy, reason)
    return xla.build(problem, policy, platform)


def _fall_back(problem: ConvProblem, policy: Policy, reason: str) -> None:
    """XLA computes what a GPU library should take: never silently."""
    if not jnp.issubdtype(problem.dtype, jnp.floating) or problem.rank not in (1, 2, 3):
        return  # no GPU library takes these
    message = f"XLA computes {tuning.describe(problem, policy)}, because {reason}"
    if policy.strict:
        raise ValueError(f"strict=True forbids a fall-back: {message}")
    _warn_once(message)


@functools.lru_cache(maxsize=10_000)
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)
