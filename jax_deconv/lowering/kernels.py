# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Hand-written CUDA kernels, compiled for the problem when a program that uses them is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

import jax
import jax.numpy as jnp

from jax_deconv import _cache, _ffi
from jax_deconv.lowering import core, trials
from jax_deconv.lowering.cuda import Kernel, depthwise, gemm, thin
from jax_deconv.lowering.epilogue import Epilogue
from jax_deconv.lowering.plan import Plan
from jax_deconv.problem import GIVEN, ConvProblem, Role

FAMILIES: Mapping[str, ModuleType] = {"depthwise": depthwise, "gemm": gemm, "thin": thin}


def why_not(family: str, problem: ConvProblem, policy) -> str | None:
    """Why a family does not compute this problem; None if it does."""
    if (reason := _ffi.available(compiler=True)) is not None:
        return reason
    if core.is_symbolic(problem):
        return "its sizes are symbolic"
    if core.is_empty(problem):
        return "there is nothing to compute"
    return FAMILIES[family].why_not(core.split(problem).problem, policy)


def plans(family: str, problem: ConvProblem, policy, device: jax.Device | None = None) -> list[Plan]:
    """The family's ways to compute a problem that it takes on a device, most promising first."""
    # Hopper's own instructions exist nowhere else, nor are they sure to where the device is not known.
    hopper = device is not None and device.compute_capability == "9.0"
    return [Plan(family, variant=kernel.label, workspace=kernel.workspace)
            for kernel in FAMILIES[family].kernels(core.split(problem).problem, policy)
            if hopper or "HOPPER" not in dict(kernel.defines)]


def measure(problem: ConvProblem, policy, plans: Sequence[Plan], **options) -> list[tuple[float, float]]:
    """The time and the error of plans of one family, see `trials.measure`."""
    part = core.split(problem)
    kernels = [_kernel(part.problem, policy, plan) for plan in plans]
    orders = {kernel.w_order for kernel in kernels}
    assert len(orders) == 1, orders
    specs = [(specification(kernel), kernel.workspace) for kernel in kernels]
    return trials.measure(part, trials.attributes(problem, part, policy), kernels=specs, w_order=orders.pop(),
                          **options)


def load(problem: ConvProblem, policy, plan: Plan, device: int) -> None:
    """Compiles a plan for a device that is there; an error if that fails."""
    _keep_code()
    _ffi.native.load_kernel(specification(_kernel(core.split(problem).problem, policy, plan)), device)


def _keep_code() -> None:
    """Compiled code is kept beside the plans."""
    try:
        where = _cache.directory() / "kernels"
        where.mkdir(parents=True, exist_ok=True)
        _ffi.native.set_kernel_cache(str(where))
    except OSError:
        _ffi.native.set_kernel_cache("")


def build(problem: ConvProblem, policy, plan: Plan, epilogue: Epilogue | None = None) -> Callable:
    """A traceable function of the role's operands, in the order of `GIVEN`, and of the bias if there is an epilogue
    that takes one (see `fuses`).
    """
    _keep_code()
    part = core.split(problem)
    kernel = _kernel(part.problem, policy, plan)
    defines = ()
    if epilogue is not None:
        defines = (("BIAS", int(epilogue.bias)),)
        if epilogue.activation is not None:
            defines += (("ACTIVATION(v)", epilogue.activation.cuda),)
    last = trials.layout(problem.rank + 2)
    order = {Role.X: last, Role.W: kernel.w_order, Role.Y: last}
    results = (jax.ShapeDtypeStruct(part.problem.shape(), problem.out_dtype),
               jax.ShapeDtypeStruct((kernel.workspace,), jnp.uint8))
    call = jax.ffi.ffi_call(
        "jax_deconv_kernel", results, output_layouts=[order[problem.role], (0,)],
        input_layouts=[*(order[role] for role in GIVEN[problem.role]), *([(0,)] if epilogue and epilogue.bias else [])])

    def with_bias(*bias):
        return part.wrap(lambda a, b: call(a, b, *bias, spec=specification(kernel, defines))[0])

    return lambda a, b, *bias: with_bias(*(t.astype(problem.out_dtype) for t in bias))(a, b)


def fuses(problem: ConvProblem, epilogue: Epilogue) -> bool:
    """Whether kernels compute an epilogue: no residual, and nothing of the result that a kernel does not write."""
    cuts = core.split(problem).cuts.get(problem.role, ())
    return problem.role is not Role.W and not epilogue.residual and not any(map(any, cuts))


def _kernel(problem: ConvProblem, policy, plan: Plan) -> Kernel:
    for kernel in FAMILIES[plan.algorithm].kernels(problem, policy):
        if kernel.label == plan.variant:
            return kernel
    raise ValueError(f"{plan.algorithm} has no variant {plan.variant!r} for this problem")


def specification(kernel: Kernel, defines: Sequence[tuple[str, object]] = ()) -> str:
    """A kernel as text, which the native module reads (ffi/kernel.h)."""
    macros = " ".join(f"-D{name}={value}".replace(" ", "") for name, value in (*kernel.defines, *defines))
    launches = (" ".join(map(str, (launch.name, *launch.grid, *launch.block, launch.shared)))
                for launch in kernel.launches)
    return "\n".join((_ffi.SOURCES[kernel.source], macros, *launches))
