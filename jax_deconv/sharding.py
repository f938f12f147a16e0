# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Partitioning, read off the letters in `problem.AXES`.

A mesh axis that splits an axis of a tensor splits one of that axis's letters, and so the same
letter in every tensor that holds it.  A letter that the result does not hold is summed over:
its parts are added across the mesh.  That is the only communication; spatial axes are not split.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
from jax import lax
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jax_deconv import _compat
from jax_deconv.lowering.epilogue import Epilogue
from jax_deconv.problem import AXES, GIVEN, ConvProblem, Role, letter_sizes, letters

# Mesh axes by letter, e.g. {"N": ("data",)}.
Split = dict[str, tuple[str, ...]]


# ---- letters and specs ---------------------------------------------------------------------------------


def _split(specs: Mapping[Role, PartitionSpec], sizes: Mapping[str, int], mesh_shape: Mapping[str, int]) -> Split:
    """The letters that the tensors' specs split; the first tensor to split a letter decides how.

    What no letter can take stays whole: an uneven part, the part of a second letter on an axis
    while the outer one is not used up, a mesh axis that splits two letters.
    """
    split: Split = {}
    taken = set()
    for role, spec in specs.items():
        for code, names in zip(AXES[role], spec):
            names = [] if names is None else [names] if isinstance(names, str) else list(names)
            for letter in code:
                parts, size = [], sizes[letter]
                while names and letter not in split and names[0] not in taken and size % mesh_shape[names[0]] == 0:
                    size //= mesh_shape[names[0]]
                    parts.append(names.pop(0))
                if parts:
                    split[letter] = tuple(parts)
                    taken.update(parts)
                if size > 1:
                    break  # What is left would cut across the parts of the outer letter.
    return split


def _spec(role: Role, split: Split, rank: int) -> PartitionSpec:
    axes = (sum((split.get(letter, ()) for letter in code), ()) for code in AXES[role])
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in axes), *[None] * rank)


def _rule(problem: ConvProblem, addends: Callable[[Sequence], list]) -> SdyShardingRule:
    """The same, as a Shardy rule: axes as factors, and which of those are summed or must stay whole."""
    sizes = problem.sizes

    def factors(role: Role):
        # Shardy wants no factor of size 1 beside another.
        leading = ([l for l in code if sizes[l] > 1] or [code[-1]] for code in AXES[role])
        return (*(l[0] if len(l) == 1 else CompoundFactor(*l) for l in leading),
                *(f"{role}{i}" for i in range(problem.rank)))

    operands, result = list(map(factors, GIVEN[problem.role])), factors(problem.role)
    operands += addends(result)
    axes = [axis if isinstance(axis, tuple) else (axis,) for mapping in (*operands, result) for axis in mapping]
    order = list(dict.fromkeys(factor for axis in axes for factor in axis))  # as Shardy wants special factors
    whole = {axis[0] for axis in axes if len(axis) == 1}
    return SdyShardingRule(
        tuple(ArrayMapping(*mapping) for mapping in operands), (ArrayMapping(*result),),
        reduction_factors=tuple(l for l in order if l in sizes and l not in letters(problem.role)),
        need_replication_factors=tuple(l for l in order if l not in sizes),
        **{l: sizes[l] for l in order if l not in whole})


# ---- types ---------------------------------------------------------------------------------------------


def same_varying_axes(*arrays):
    """Inside a shard_map: operands that all vary over every manual axis over which one of them does."""
    varying = [jax.typeof(a).manual_axis_type.varying for a in arrays]
    union = frozenset().union(*varying)
    return [lax.pcast(a, tuple(union - v), to="varying") if union - v else a for a, v in zip(arrays, varying)]


def of_result(role: Role, operands: Mapping[Role, jax.core.ShapedArray], groups: int):
    """The sharding in the result's type, under a mesh with explicit axes."""
    first, second = (t.sharding for t in operands.values())
    mesh = first.mesh if not first.mesh.empty else second.mesh
    if mesh.empty:
        return first
    for r, t in operands.items():
        if any(names is not None for names in t.sharding.spec[len(AXES[r]):]):
            raise ValueError(f"spatial axes cannot be sharded; got {r} of type {t.str_short()}: reshard it first")
    sizes = letter_sizes({r: t.shape for r, t in operands.items()}, groups)
    split = _split({r: t.sharding.spec for r, t in operands.items()}, sizes, mesh.shape)
    return NamedSharding(mesh, _spec(role, split, len(first.spec) - 2))


def check_addend(addend: jax.core.ShapedArray, result: jax.core.ShapedArray, spec: Sequence) -> None:
    """Refuses what cannot be added to the result part by part; `spec` is the result's for the addend's axes."""
    if any(names not in (None, of_result) for names, of_result in zip(addend.sharding.spec, spec)):
        raise ValueError(f"bias and residual must be sharded as the result is, {result.str_short()}, or not at all; "
                         f"got {addend.str_short()}: reshard it first")


def like(array, aval):
    """A cotangent with the sharding of what it is a cotangent of (explicit meshes)."""
    if jax.typeof(array).sharding == aval.sharding or aval.sharding.mesh.empty:
        return array
    return jax.sharding.reshard(array, aval.sharding)


# ---- partitioning --------------------------------------------------------------------------------------


def partitioned(compute: Callable[..., Callable], problem: ConvProblem, context,
                epilogue: Epilogue | None = None) -> Callable:
    """The function of the two operands, and of the epilogue's arrays, for all devices of the module being lowered.

    `compute(problem, may_time=..., epilogue=...)` gives the one for one device.
    """
    devices = getattr(context.axis_context, "num_devices", None) or context.axis_context.mesh.size
    # An exported module cannot hold the Python function that partitions it.
    alone, exported = devices == 1, context.lowering_parameters.for_export
    function = compute(problem, may_time=alone and not exported, epilogue=epilogue)
    if alone or exported:
        return function
    addends = (lambda result: []) if epilogue is None else epilogue.addends

    def partition(mesh, operands, result):
        tensors = dict(zip((*GIVEN[problem.role], problem.role), (*operands[:2], result)))
        specs = {r: _compat.spec_of(t.sharding, t.ndim, mesh) for r, t in tensors.items() if t.sharding is not None}
        # What no spec can say, as when part of a mesh axis splits the groups and the rest what they hold, stays whole.
        split = _split({r: spec for r, spec in specs.items() if spec is not None}, problem.sizes, mesh.shape)
        part = {letter: size // math.prod(mesh.shape[name] for name in split.get(letter, ()))
                for letter, size in problem.sizes.items()}
        summed = sum((names for letter, names in split.items() if letter not in letters(problem.role)), ())
        # What follows a convolution follows its sum.
        local = compute(dataclasses.replace(problem, **part), may_time=False, epilogue=None if summed else epilogue)

        def lower(*operands):
            # The body is one device's program; under an explicit mesh its types would name axes.
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                if not summed:
                    return local(*operands)
                out = lax.psum(local(*operands[:2]), summed)
                return epilogue.apply(out, *operands[2:], dtype=out.dtype) if epilogue else out

        spec = {role: _spec(role, split, problem.rank) for role in tensors}
        given = [*(spec[role] for role in GIVEN[problem.role]),
                 *(PartitionSpec(*names) for names in addends(tuple(spec[problem.role])))]
        return mesh, lower, NamedSharding(mesh, spec[problem.role]), tuple(NamedSharding(mesh, s) for s in given)

    def infer(mesh, operands, result):
        return partition(mesh, operands, result)[2]

    wrapped = custom_partitioning(lambda *operands: function(*operands))
    wrapped.def_partition(partition, infer_sharding_from_operands=infer, decode_shardings=False,
                          sharding_rule=_rule(problem, addends))
    return wrapped
