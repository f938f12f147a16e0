# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""The three linear primitives, one per role, the fused one, and their rules; all from the letters in `problem.AXES`.

Operands and results are canonical: channels-first, kernels [G*K, C, *R], geometry as integers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_deconv import _compat, sharding
from jax_deconv.activations import Activation, compute_dtype
from jax_deconv.lowering import select
from jax_deconv.lowering.epilogue import Epilogue, add
from jax_deconv.policy import Policy
from jax_deconv.problem import (
    AXES,
    GIVEN,
    ConvProblem,
    Geometry,
    Role,
    fold_letter,
    is_storage,
    letter_sizes,
    shape,
    wider,
)


def bind(role: Role, operands: Mapping[Role, jax.Array], *, geometry: Geometry, groups: int, dtype, policy: Policy,
         bias: jax.Array | None = None, residual: jax.Array | None = None,
         activation: Activation | None = None) -> jax.Array:
    """Makes the tensor `role` from the two others, with elements of type `dtype`: activation(it + bias + residual).

    `bias` has one number for each channel of that tensor, `residual` its shape; both are of type `dtype`.
    """
    a, b = (operands[r] for r in GIVEN[role])
    common = wider(a.dtype, b.dtype)
    operands = (_widen(t, common) for t in (a, b))
    arrays = (t for t in (bias, residual) if t is not None)
    return _bind(role, Epilogue(bias is not None, residual is not None, activation),
                 *sharding.same_varying_axes(*operands, *arrays),
                 geometry=geometry, groups=groups, dtype=jnp.dtype(dtype), policy=policy)


def _widen(operand, dtype):
    if operand.dtype == dtype:
        return operand  # a cast would make a weak type strong
    # XLA drops a rounding to float8 that is followed by a widening, unless something stands between the two.
    return (lax.optimization_barrier(operand) if is_storage(operand.dtype) else operand).astype(dtype)


def _bind(role: Role, epilogue: Epilogue | None, *operands, **params):
    if epilogue in (None, Epilogue()):
        return PRIMITIVES[role].bind(*operands, **params)
    return conv_fused_p.bind(*operands, role=role, epilogue=epilogue, **params)


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


def _batch(role: Role, args, dims, *, geometry, groups, dtype, policy, arrays=(), epilogue=None):
    """Folds the mapped axis into the letter that the mapped tensors share; `arrays` of an epilogue have it folded."""
    mapped = {r: d for r, d in zip(GIVEN[role], dims) if d is not None}
    letter = fold_letter(frozenset({role, *mapped}))
    tensors = {r: jnp.moveaxis(t, mapped[r], 0) if r in mapped else t for r, t in zip(GIVEN[role], args)}
    size = next(tensors[r].shape[0] for r in mapped)
    sizes = letter_sizes({r: t.shape[r in mapped:] for r, t in tensors.items()}, groups)
    result = shape(role, sizes, geometry)
    if isinstance(size, int) and size == 0:
        return jnp.zeros((0, *result), dtype), 0
    operands = (_fold(r, t, letter, groups) if r in mapped else t for r, t in tensors.items())
    out = _bind(role, epilogue, *operands, *arrays, geometry=geometry, dtype=dtype, policy=policy,
                groups=groups * size if letter == "G" else groups)
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


def _lower(role: Role, platform: str | None, ctx, *operands, geometry, groups, dtype, policy, epilogue=None):
    shapes = {r: aval.shape for r, aval in zip(GIVEN[role], ctx.avals_in)}
    # Libraries and kernels have algorithms for bfloat16 that they lack for float8.  A product of two float8 is the same
    # in both, and the sum stays in float32 until it is rounded to float8, once.
    given = jnp.dtype(jnp.bfloat16) if is_storage(ctx.avals_in[0].dtype) else ctx.avals_in[0].dtype
    made = jnp.dtype(jnp.float32) if is_storage(dtype) else dtype
    problem = ConvProblem.of(role, shapes, groups, geometry, given, made)
    compute = functools.partial(select.build, policy=policy, platform=platform)
    partitioned = sharding.partitioned(compute, problem, ctx.module_context, epilogue)

    def function(a, b, *arrays):
        return partitioned(_widen(a, given), _widen(b, given), *(t.astype(made) for t in arrays)).astype(dtype)

    # What a lowering computes is local: it carries neither varying axes nor shardings in its types.
    local = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
    return mlir.lower_fun(function, multiple_results=False)(ctx.replace(avals_in=local), *operands)


def _define(name: str, abstract, batch, lower) -> Primitive:
    """A primitive with all rules but derivatives; `lower(platform, ...)` takes the platform first."""
    primitive = Primitive(name)
    primitive.def_impl(functools.partial(_compat.apply_primitive, primitive))
    primitive.def_abstract_eval(abstract)
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, functools.partial(lower, None))
    _compat.require_devices(primitive)
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(primitive, functools.partial(lower, platform), platform=platform)
    return primitive


def _define_linear(role: Role) -> Primitive:
    primitive = _define(f"conv_{role}", *(functools.partial(rule, role) for rule in (_abstract, _batch, _lower)))
    ad.defbilinear(primitive, *(functools.partial(_transpose, role, operand) for operand in GIVEN[role]))
    return primitive


PRIMITIVES: Mapping[Role, Primitive] = {role: _define_linear(role) for role in Role}
conv_x_p, conv_w_p, conv_y_p = (PRIMITIVES[role] for role in (Role.X, Role.W, Role.Y))


# ---- the fused primitive -------------------------------------------------------------------------------
#
# activation(conv + bias + residual) for the roles x and y.  Its derivative is made of the linear primitives.


def _unfused(*operands, role: Role, epilogue: Epilogue, dtype, **params):
    a, b, *arrays = operands
    return epilogue.apply(_bind(role, None, a, b, dtype=dtype, **params), *arrays, dtype=dtype)


def _fused_abstract(a, b, *arrays, role: Role, epilogue: Epilogue, **params):
    out = _abstract(role, a, b, **params)
    expected = epilogue.addends(out.shape)
    if [(t.shape, t.dtype) for t in arrays] != [(shape, out.dtype) for shape in expected]:
        raise TypeError(f"conv_fused takes a bias and a residual of type {out.dtype} and shapes {expected} of those "
                        f"that {epilogue} names; got {[t.str_short() for t in arrays]}")
    for array, spec in zip(arrays, epilogue.addends(tuple(out.sharding.spec))):
        sharding.check_addend(array, out, spec)
    return out.update(weak_type=False)


def _fused_batch(args, dims, *, role: Role, epilogue: Epilogue, groups, **params):
    """As its convolution, where the letter of that absorbs the arrays too; else unfused, and mapped part by part."""
    mapped = frozenset(r for r, d in zip(GIVEN[role], dims) if d is not None)
    letter = fold_letter(mapped | {role}) if mapped else ""
    bias, residual = epilogue.split(args[2:])
    bias_dim, residual_dim = epilogue.split(dims[2:])
    if not mapped or letter == "N" and bias_dim is not None or residual is not None and residual_dim is None:
        unfused = functools.partial(_unfused, role=role, epilogue=epilogue, groups=groups, **params)
        return jax.vmap(unfused, dims)(*args), 0
    arrays = []
    if bias is not None:
        if letter != "N":  # folded as the result's channels, which are those of every example where it is not mapped
            size = next(t.shape[d] for t, d in zip(args, dims) if d is not None)
            bias = (jnp.broadcast_to(bias, (size, *bias.shape)) if bias_dim is None else
                    jnp.moveaxis(bias, bias_dim, 0))
            bias = _fold(role, bias[:, None], letter, groups)[0]
        arrays.append(bias)
    if residual is not None:
        arrays.append(_fold(role, jnp.moveaxis(residual, residual_dim, 0), letter, groups))
    return _batch(role, args[:2], dims[:2], groups=groups, arrays=arrays, epilogue=epilogue, **params)


def _fused_jvp(primals, tangents, *, role: Role, epilogue: Epilogue, **params):
    activation = epilogue.activation
    if activation is None or activation.from_output:
        out = saved = _bind(role, epilogue, *primals, **params)
    else:
        saved = _bind(role, dataclasses.replace(epilogue, activation=None), *primals, **params)
        out = activation(saved)
    (a, b, *_), (da, db, *added) = primals, tangents
    terms = [_bind(role, None, *pair, **params) for pair, tangent in (((da, b), da), ((a, db), db))
             if not isinstance(tangent, ad.Zero)]
    bias, residual = (None if isinstance(t, ad.Zero) else t for t in epilogue.split(added))
    if not terms and bias is None and residual is None:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    # All in the compute type, so that a cotangent is rounded once, where a linear primitive takes it.
    terms = [t.astype(compute_dtype(t.dtype)) for t in terms or [jnp.zeros_like(out)]]
    tangent = add(functools.reduce(jnp.add, terms), bias, residual)
    if activation is not None:
        tangent = activation.push(saved, tangent)
    return out, tangent.astype(out.dtype)


def _fused_transpose(cotangent, *args, epilogue: Epilogue, **params):
    """Without an activation it is linear in one operand of the convolution and its addends."""
    linear = [i for i, t in enumerate(args) if ad.is_undefined_primal(t)]

    def function(*values):
        values = dict(zip(linear, values))
        return _unfused(*(values.get(i, t) for i, t in enumerate(args)), epilogue=epilogue, **params)

    transpose = jax.linear_transpose(function, *(args[i].aval for i in linear))
    made = dict(zip(linear, transpose(cotangent)))
    return [made.get(i) for i in range(len(args))]


def _fused_lower(platform: str | None, ctx, *operands, role: Role, **params):
    return _lower(role, platform, ctx, *operands, **params)


conv_fused_p = _define("conv_fused", _fused_abstract, _fused_batch, _fused_lower)
ad.primitive_jvps[conv_fused_p] = _fused_jvp
ad.primitive_transposes[conv_fused_p] = _fused_transpose
