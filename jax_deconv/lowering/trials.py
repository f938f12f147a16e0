# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Times candidates on a device, and checks their values: what the native module's timer is asked."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_deconv import _ffi
from jax_deconv.lowering import core
from jax_deconv.lowering.plan import Plan
from jax_deconv.problem import GIVEN, ConvProblem, Role

ROLES = (Role.X, Role.Y, Role.W)  # as the native module numbers them
CHANNELS_LAST = 1  # as the native module numbers layouts


def attributes(problem: ConvProblem, part: core.Core, policy) -> dict:
    """What the native module is told of a problem beside its shapes."""
    axes = part.problem.geometry
    return dict(
        stride=[axis.stride for axis in axes],
        dilation=[axis.dilation for axis in axes],
        pad_lo=[axis.pad_lo for axis in axes],
        pad_hi=list(part.pad_hi),
        groups=part.problem.G,
        layout=CHANNELS_LAST,
        # TF32 holds 16-bit operands exactly.
        tf32=policy.precision is not lax.Precision.HIGHEST or problem.dtype.itemsize == 2,
        deterministic=bool(policy.deterministic),
    )


def encode(attributes: dict) -> dict:
    """The attributes as FFI knows them."""
    types = {bool: np.bool_, int: np.int64, float: np.float64}
    return {name: value if isinstance(value, str) else
            types[type(value)](value) if type(value) in types else np.array(value, np.int64)
            for name, value in (attributes | {"plan_version": _ffi.PLAN_VERSION}).items()}


def layout(ndim: int, layout: int = CHANNELS_LAST) -> tuple[int, ...]:
    """The physical order of the axes, outermost first."""
    return (0, *range(2, ndim), 1) if layout == CHANNELS_LAST else tuple(range(ndim))


def measure(part: core.Core, attributes: dict, *, plans: Sequence[Plan] = (), kernels: Sequence = (),
            w_order: Sequence[int] | None = None, budget: float = 0.5, patience: float = 1.5,
            device: jax.Device | None = None, seed: int = 0) -> list[tuple[float, float]]:
    """The time of each of cuDNN's plans and of each kernel's specification in microseconds, and its relative
    error against float64 sums.

    Candidates are tried in order, none after `budget` seconds; NaN stands where one was not tried or
    failed.  One that takes more than `patience` times as long as the best so far is not looked at: its error is
    NaN.  Values are compared at sampled positions; operands hold few enough bits that TF32 and
    bfloat16 represent them exactly.  `kernels` are pairs of a specification and its bytes of workspace, for w
    in the order `w_order`.
    """
    problem = part.problem
    tensors = (*GIVEN[problem.role], problem.role)
    buffers = [jax.ShapeDtypeStruct(problem.shape(role), problem.out_dtype if role is problem.role else problem.dtype)
               for role in tensors]
    workspaces = [*(plan.workspace for plan in plans), *(size for _, size in kernels)]
    # XLA allocates everything: what is timed are its results.
    results = [*buffers, jax.ShapeDtypeStruct((max(*workspaces, _ffi.native.TIMING_WORKSPACE),), jnp.uint8),
               jax.ShapeDtypeStruct((len(workspaces), 2), jnp.float32)]
    last = layout(problem.rank + 2)
    w_order = tuple(w_order or last)
    encoded = encode(dict(
        attributes, role=ROLES.index(problem.role),
        engines=[plan.engine for plan in plans],
        knobs=[value for plan in plans for value in plan.knobs],
        knob_counts=[len(plan.knobs) for plan in plans], workspaces=workspaces,
        kernels="\n\n".join(spec for spec, _ in kernels), w_order=w_order,
        budget_us=budget * 1e6, patience=patience, seed=seed))
    layouts = [w_order if role is Role.W else last for role in tensors]

    def run():
        def timing():
            call = jax.ffi.ffi_call("jax_deconv_time", results, output_layouts=[*layouts, (0,), (0, 1)],
                                    has_side_effect=True)
            return call(**encoded)[-1]

        with jax.default_device(device):
            return np.asarray(jax.jit(timing)()).tolist()

    # Callers are amid lowering: a thread of its own has none of their contexts (meshes, traces).
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return list(map(tuple, executor.submit(run).result()))
