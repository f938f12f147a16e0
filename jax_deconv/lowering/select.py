# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Chooses, when a call is lowered, the way in which it is computed."""

from __future__ import annotations

import contextvars
import functools
import warnings
from collections.abc import Callable

import jax.numpy as jnp

from jax_deconv import tuning
from jax_deconv.lowering import core, cudnn, kernels, xla
from jax_deconv.lowering.epilogue import Epilogue
from jax_deconv.lowering.plan import Plan
from jax_deconv.policy import Policy
from jax_deconv.problem import ConvProblem


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
    choice = choose(problem, policy, platform=platform, may_time=may_time)
    plan = choice.plan
    if epilogue is not None and not (plan.algorithm in kernels.FAMILIES and kernels.fuses(problem, epilogue)):
        linear = functools.partial(build, policy=policy, platform=platform, may_time=may_time)
        return epilogue.after(linear, problem, platform)
    if (watcher := watch.get()) is not None:
        watcher(problem=problem, policy=policy, platform=platform, epilogue=epilogue, choice=choice)
    if epilogue is not None:
        return kernels.build(problem, policy, plan, epilogue)
    return xla.build(problem, policy, platform) if plan.algorithm == "xla" else _planned(problem, policy, plan)


#: Called with problem, policy, platform, epilogue and choice, by name, for every call that is lowered.
watch: contextvars.ContextVar[Callable | None] = contextvars.ContextVar("watch", default=None)


def choose(problem: ConvProblem, policy: Policy, *, platform: str | None, may_time: bool) -> tuning.Choice:
    """The way of computing a problem, and why."""
    def xla_because(reason: str, form: str) -> tuning.Choice:
        return tuning.Choice(Plan("xla", variant=form), f"XLA, because {reason}")

    if core.is_empty(problem):
        return xla_because("there is nothing to compute", form="")
    form = xla.form_name(problem, platform)
    if policy.algorithm == "xla":
        return xla_because("the policy says so", form)
    names = tuning.UNASKED if policy.algorithm is None else (policy.algorithm,)
    elsewhere = f"the program is for {platform or 'another platform'}, not for cuda"
    reasons = {name: tuning.why_not(name, problem, policy) if platform == "cuda" else elsewhere for name in names}
    if able := [name for name, reason in reasons.items() if reason is None]:
        return tuning.choose(problem, policy, may_time=may_time, algorithms=able)
    if policy.algorithm is not None:
        raise ValueError(f"algorithm={policy.algorithm!r} cannot compute {tuning.describe(problem, policy)}: "
                         f"{reasons[policy.algorithm]}")
    if platform == "cuda":
        _fall_back(problem, policy, reasons["cudnn"])
    return xla_because(reasons["cudnn"], form)


def _planned(problem: ConvProblem, policy: Policy, plan: Plan) -> Callable:
    if plan.algorithm in kernels.FAMILIES:
        return kernels.build(problem, policy, plan)
    call = functools.partial(cudnn.build, policy=policy, plan=plan)
    if plan.algorithm in tuning.TRANSFORMS:
        return tuning.TRANSFORMS[plan.algorithm].build(problem, policy, plan, call)
    return call(problem)


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
