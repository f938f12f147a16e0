# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""The three roles as one cuDNN call each, through XLA FFI."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_deconv import _ffi
from jax_deconv.lowering import core, trials
from jax_deconv.lowering.plan import Plan
from jax_deconv.policy import workspace_bytes
from jax_deconv.problem import GIVEN, ConvProblem, Role, wider

#: The workspace of calls whose plan is chosen when they run, in bytes.
DEFAULT_WORKSPACE = 64 << 20

_TYPES = ("float16", "bfloat16", "float32", "float64")


def why_not(problem: ConvProblem, policy) -> str | None:
    """Why cuDNN does not compute this problem; None if it does."""
    del policy
    if (reason := _ffi.available()) is not None:
        return reason
    if core.is_symbolic(problem):
        return "its sizes are symbolic"
    for dtype in (problem.dtype, problem.out_dtype):
        if dtype.name not in _TYPES:
            return f"cuDNN does not convolve {dtype.name}"
    if not 1 <= problem.rank <= 3:
        return f"cuDNN convolves over one to three spatial axes, not {problem.rank}"
    if core.is_empty(problem):
        return "there is nothing to compute"
    return None


def build(problem: ConvProblem, policy, plan: Plan | None = None) -> Callable:
    """A traceable function of the role's operands, in the order of `GIVEN`."""
    part, chunks = _part(problem)
    plan = plan or default_plan(policy)
    call = _call(problem.role, part.problem.shape(), part.problem.dtype, engine=plan.engine, knobs=plan.knobs,
                 workspace=plan.workspace, **trials.attributes(problem, part, policy))
    wide = part.problem.dtype

    def summed(a, b):
        pairs = zip(jnp.split(a, chunks), jnp.split(b, chunks))
        return functools.reduce(jnp.add, (call(*pair).astype(wider(wide, jnp.float32)) for pair in pairs))

    inner = part.wrap(summed if chunks > 1 else call)
    return lambda a, b: inner(a.astype(wide), b.astype(wide)).astype(problem.out_dtype)


def _part(problem: ConvProblem) -> tuple[core.Core, int]:
    """The problem that one call computes, and how many calls there are.

    cuDNN's tensors have one type here, the wider one: of 16-bit operands it makes float32 with a single
    engine, and no data gradient.  For filter gradients of more than 2**31 elements it has an engine that
    takes 500 times too long: they are sums over parts of the batch.
    """
    wide = wider(problem.dtype, problem.out_dtype)
    chunks = 1
    part = core.split(dataclasses.replace(problem, dtype=wide, out_dtype=wide))
    if problem.role is Role.W:
        largest = max(math.prod(part.problem.shape(role)) for role in GIVEN[Role.W])
        divisors = [n for n in range(1, problem.N + 1) if problem.N % n == 0]
        chunks = next((n for n in divisors if largest // n < 2**31), problem.N)
        part = dataclasses.replace(part, problem=dataclasses.replace(part.problem, N=problem.N // chunks))
    return part, chunks


def default_plan(policy) -> Plan:
    """The plan of calls that nothing is known about: the best that fits, found when they first run."""
    return Plan("cudnn", workspace=min(DEFAULT_WORKSPACE, workspace_bytes(policy)))


def candidates(problem: ConvProblem, policy, device: int = 0) -> list[tuple[Plan, bool]]:
    """The plans that cuDNN proposes for this device and the policy allows, most promising first.

    With each goes whether its kernel is compiled when the plan is built, which takes up to seconds.
    """
    part, _ = _part(problem)
    attributes = trials.attributes(problem, part, policy)
    del attributes["groups"]  # read off the shapes
    shapes = {str(role): part.problem.shape(role) for role in Role}
    name = part.problem.dtype.name
    found = _ffi.native.candidates(trials.ROLES.index(problem.role), dtype=name, out_dtype=name, device=device,
                                   **shapes, **attributes)
    return [(Plan("cudnn", engine=engine, knobs=tuple(knobs), workspace=workspace), compiles)
            for engine, knobs, workspace, compiles in found if workspace <= workspace_bytes(policy)]


def measure(problem: ConvProblem, policy, plans: Sequence[Plan], **options) -> list[tuple[float, float]]:
    """The time and the error of each plan, see `trials.measure`."""
    part, _ = _part(problem)
    return trials.measure(part, trials.attributes(problem, part, policy), plans=plans, **options)


def reproduce(*, role: str, dtype: str, out_dtype: str, x, w, y, layout: int, **attributes):
    """Runs one custom call on noise: what the errors of the native module ask for."""
    shapes = {Role.X: tuple(x), Role.W: tuple(w), Role.Y: tuple(y)}
    role = Role(role)
    rng = np.random.default_rng(0)
    operands = [jnp.asarray(rng.uniform(-1, 1, shapes[r]), dtype) for r in GIVEN[role]]
    groups = shapes[Role.X][1] // shapes[Role.W][1]
    call = _call(role, shapes[role], np.dtype(out_dtype), groups=groups, layout=layout, **attributes)
    return jax.block_until_ready(jax.jit(call)(*operands))


def _call(role: Role, shape: tuple[int, ...], dtype, *, workspace: int, layout: int,
          **attributes) -> Callable:
    """The custom call, less its workspace: a result that nobody reads, so that XLA allocates it."""
    order = trials.layout(len(shape), layout)
    results = (jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((workspace,), jnp.uint8))
    call = jax.ffi.ffi_call(f"jax_deconv_{role}", results, input_layouts=[order, order],
                            output_layouts=[order, (0,)])
    call = functools.partial(call, **trials.encode(attributes | {"layout": layout}))
    return lambda a, b: call(a, b)[0]
