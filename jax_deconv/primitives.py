# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""The three linear primitives, one per role, and their rules; all from the letters in `problem.AXES`.

Operands and results are canonical: channels-first, kernels [G*K, C, *R], geometry as integers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_deconv import _compat, sharding
from jax_deconv.lowering import select
from jax_deconv.policy import Policy
from jax_deconv.problem import AXES, GIVEN, ConvProblem, Geometry, Role, fold_letter, letter_sizes, shape, wider


def bind(role: Role, operands: Mapping[Role, jax.Array], *, geometry: Geometry, groups: int, dtype,
         policy: Policy) -> jax.Array:
    """Makes the tensor `role` from the two others, with elements of type `dtype`."""
    a, b = (operands[r] for r in GIVEN[role])
    common = wider(a.dtype, b.dtype)
    # A cast makes a weak type strong.
    a, b = sharding.same_varying_axes(*(t if t.dtype == common else t.astype(common) for t in (a, b)))
    return PRIMITIVES[role].bind(a, b, geometry=geometry, groups=groups, dtype=jnp.dtype(dtype), policy=policy)


def _abstract(role: Role, a, b, *, geometry, groups, dtype, policy):
    del policy
    operands = dict(zip(GIVEN[role], (a, b)))
    sizes = letter_sizes({r: t.shape for r, t in operands.items()}, groups)
    for r, t in operands.items():
        if t.shape != shape(r, sizes, geometry) or t.dtype != a.dtype:
            raise TypeError(f"conv_{role} takes {r} of shape {shape(r, sizes, geometry)} and type {a.dtype}; "
                            f"got {t.str_short()}")
    return a.update(shape=shape(role, sizes, geometry), dtype=dtype, weak_type=a.weak_type and b.weak_type,
                    sharding=sharding.of_result(role, operands, groups))


def _transpose(role: Role, operand: Role, cotangent, a, b, *, geometry, groups, policy, dtype):
    """Transposed in one operand, a role becomes the role that makes that operand."""
    del dtype
    given = dict(zip(GIVEN[role], (a, b)))
    target = given.pop(operand).aval
    out = bind(operand, {role: cotangent, **given}, geometry=geometry, groups=groups, dtype=target.dtype,
               policy=policy)
    return sharding.like(out, target)


def _batch(role: Role, args, dims, *, geometry, groups, dtype, policy):
    """Folds the mapped axis into the letter that the mapped tensors share."""
    mapped = {r: d for r, d in zip(GIVEN[role], dims) if d is not None}
    letter = fold_letter(frozenset({role, *mapped}))
    tensors = {r: jnp.moveaxis(t, mapped[r], 0) if r in mapped else t for r, t in zip(GIVEN[role], args)}
    size = next(tensors[r].shape[0] for r in mapped)
    sizes = letter_sizes({r: t.shape[r in mapped:] for r, t in tensors.items()}, groups)
    result = shape(role, sizes, geometry)
    if isinstance(size, int) and size == 0:
        return jnp.zeros((0, *result), dtype), 0
    operands = (_fold(r, t, letter, groups) if r in mapped else t for r, t in tensors.items())
    out = PRIMITIVES[role].bind(*operands, geometry=geometry, groups=groups * size if letter == "G" else groups,
                                dtype=dtype, policy=policy)
    return _unfold(role, out, (size, *result), letter, groups), 0


def _place(role: Role, letter: str, groups: int) -> tuple[int, int]:
    """The axis on which a letter stands and the extent of what stands outside it there."""
    axis = next(i for i, code in enumerate(AXES[role]) if letter in code)
    return axis, groups if AXES[role][axis].index(letter) else 1


def _fold(role: Role, tensor, letter: str, groups: int):
    """[B, ...] -> B becomes the outer part of the letter."""
    axis, outside = _place(role, letter, groups)
    size, *dims = tensor.shape
    # Axes of extent 1 are left out: reshapes of sharded arrays know fewer of them.
    outer = [] if outside == 1 else [outside]
    tensor = tensor.reshape(size, *dims[:axis], *outer, dims[axis] // outside, *dims[axis + 1:])
    tensor = jnp.moveaxis(tensor, 0, axis + len(outer))
    return tensor.reshape(*dims[:axis], size * dims[axis], *dims[axis + 1:])


def _unfold(role: Role, tensor, dims, letter: str, groups: int):
    """The inverse of `_fold`; `dims` is the shape to return to."""
    axis, outside = _place(role, letter, groups)
    size, *rest = dims
    outer = [] if outside == 1 else [outside]
    tensor = tensor.reshape(*rest[:axis], *outer, size, rest[axis] // outside, *rest[axis + 1:])
    return jnp.moveaxis(tensor, axis + len(outer), 0).reshape(dims)


def _lower(role: Role, platform: str | None, ctx, a, b, *, geometry, groups, dtype, policy):
    shapes = {r: aval.shape for r, aval in zip(GIVEN[role], ctx.avals_in)}
    problem = ConvProblem.of(role, shapes, groups, geometry, ctx.avals_in[0].dtype, dtype)
    compute = functools.partial(select.build, policy=policy, platform=platform)
    function = sharding.partitioned(compute, problem, ctx.module_context)
    # What a lowering computes is local: it carries neither varying axes nor shardings in its types.
    local = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
    return mlir.lower_fun(function, multiple_results=False)(ctx.replace(avals_in=local), a, b)


def _define(role: Role) -> Primitive:
    primitive = Primitive(f"conv_{role}")
    primitive.def_impl(functools.partial(_compat.apply_primitive, primitive))
    primitive.def_abstract_eval(functools.partial(_abstract, role))
    ad.defbilinear(primitive, *(functools.partial(_transpose, role, operand) for operand in GIVEN[role]))
    batching.primitive_batchers[primitive] = functools.partial(_batch, role)
    mlir.register_lowering(primitive, functools.partial(_lower, role, None))
    _compat.require_devices(primitive)
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(primitive, functools.partial(_lower, role, platform), platform=platform)
    return primitive


PRIMITIVES: Mapping[Role, Primitive] = {role: _define(role) for role in Role}
conv_x_p, conv_w_p, conv_y_p = (PRIMITIVES[role] for role in (Role.X, Role.W, Role.Y))
