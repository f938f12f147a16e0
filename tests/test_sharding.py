# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Sharded arrays in jit: the right values, and no communication but the sums that the algebra has."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_deconv

pytestmark = pytest.mark.usefixtures("optimized")

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def collectives(compiled) -> dict[str, int]:
    text = compiled.as_text()
    counts = {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in COLLECTIVES}
    return {name: count for name, count in counts.items() if count}


def mesh_of(shape, types=AxisType.Auto):
    return jax.make_mesh(shape, ("a", "b")[:len(shape)], axis_types=(types,) * len(shape))


def operands(groups):
    keys = jax.random.split(jax.random.key(0), 3)
    draw = lambda key, shape: jax.random.randint(key, shape, -4, 5).astype(jnp.float32)
    # Lengths that nothing divides, channels and batch that 8 does.
    return draw(keys[0], (8, 5, 8 * groups)), draw(keys[1], (3, 8, 16 * groups)), draw(keys[2], (8, 11, 16 * groups))


def functions(groups):
    kw = dict(strides=(2,), padding=[(0, 0)], use_consistent_padding=True, feature_group_count=groups)
    return {
        "x": lambda lhs, rhs, out: jax_deconv.conv_transpose(lhs, rhs, **kw),
        "y": lambda lhs, rhs, out: jax_deconv.conv_transpose_data_gradient(out, rhs, lhs.shape, **kw),
        "w": lambda lhs, rhs, out: jax_deconv.conv_transpose_filter_gradient(lhs, out, rhs.shape, **kw),
    }


# Which letter a mesh axis splits: the specs of lhs, rhs and out, and the role whose result sums over it.
SPLITS = {
    "batch": (P("a"), P(), P("a"), "w"),
    "in": (P(None, None, "a"), P(None, "a"), P(), "x"),
    "out": (P(), P(None, None, "a"), P(None, None, "a"), "y"),
}
GROUP_SPLIT = (P(None, None, "a"), P(None, None, "a"), P(None, None, "a"), "")
SPEC_OF = {"x": 2, "y": 0, "w": 1}  # where a role's own tensor stands in a row of SPLITS


def check(role, groups, mesh, split):
    values = operands(groups)
    function = functions(groups)[role]
    with jax.set_mesh(mesh):
        placed = [jax.device_put(v, NamedSharding(mesh, spec)) for v, spec in zip(values, split)]
        compiled = jax.jit(function).lower(*placed).compile()
        out = compiled(*placed)
    np.testing.assert_array_equal(out, function(*values))
    assert collectives(compiled) == ({"all-reduce": 1} if role in split[3] else {})
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, split[SPEC_OF[role]]), out.ndim)


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("role", "xyw")
def test_one_letter(role, name, types):
    check(role, 1, mesh_of((8,), types), SPLITS[name])


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("role", "xyw")
def test_groups(role, types):
    check(role, 8, mesh_of((8,), types), GROUP_SPLIT)


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("role", "xyw")
def test_batch_and_channels_on_two_mesh_axes(role, types):
    split = (P("a"), P(None, None, "b"), P("a", None, "b"), "yw")
    check(role, 1, mesh_of((4, 2), types), split)


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_gradients_of_data_parallel_training(types):
    """One all-reduce in the whole step, for the filter gradient."""
    lhs, rhs, _ = operands(1)
    mesh = mesh_of((8,), types)
    grad = jax.grad(lambda lhs, rhs: (jax_deconv.conv_transpose(lhs, rhs, (2,), "SAME") ** 2).sum(), (0, 1))
    with jax.set_mesh(mesh):
        placed = jax.device_put(lhs, NamedSharding(mesh, P("a"))), jax.device_put(rhs, NamedSharding(mesh, P()))
        compiled = jax.jit(grad).lower(*placed).compile()
        for got, want in zip(compiled(*placed), grad(lhs, rhs)):
            np.testing.assert_array_equal(got, want)
    assert collectives(compiled) == {"all-reduce": 1}


def test_without_a_context_mesh():
    lhs, rhs, _ = operands(1)
    mesh = mesh_of((8,))
    placed = jax.device_put(lhs, NamedSharding(mesh, P("a"))), jax.device_put(rhs, NamedSharding(mesh, P()))
    function = jax.jit(lambda lhs, rhs: jax_deconv.conv_transpose(lhs, rhs, (2,), "SAME"))
    compiled = function.lower(*placed).compile()
    np.testing.assert_array_equal(compiled(*placed), jax_deconv.conv_transpose(lhs, rhs, (2,), "SAME"))
    assert collectives(compiled) == {}


def test_batched_and_sharded():
    """A mapped axis folds into a letter and the sharding of the letter survives."""
    lhs, rhs, _ = operands(1)
    many = jnp.stack([rhs, 2 * rhs])
    mesh = mesh_of((8,))
    function = jax.vmap(lambda lhs, rhs: jax_deconv.conv_transpose(lhs, rhs, (2,), "SAME"), (None, 0))
    with jax.set_mesh(mesh):
        placed = jax.device_put(lhs, NamedSharding(mesh, P("a"))), jax.device_put(many, NamedSharding(mesh, P()))
        compiled = jax.jit(function).lower(*placed).compile()
        np.testing.assert_array_equal(compiled(*placed), function(lhs, many))
    assert collectives(compiled) == {}


def test_spatial_sharding_is_right_though_gathered():
    lhs, rhs, _ = operands(1)
    lhs = jnp.concatenate([lhs, lhs], 1)[:, :8]
    mesh = mesh_of((8,))
    function = lambda lhs, rhs: jax_deconv.conv_transpose(lhs, rhs, (2,), "SAME")
    placed = jax.device_put(lhs, NamedSharding(mesh, P(None, "a"))), jax.device_put(rhs, NamedSharding(mesh, P()))
    np.testing.assert_array_equal(jax.jit(function)(*placed), function(lhs, rhs))


def test_explicit_spatial_sharding_is_refused():
    lhs, rhs, _ = operands(1)
    lhs = jnp.concatenate([lhs, lhs], 1)[:, :8]
    mesh = mesh_of((8,), AxisType.Explicit)
    with jax.set_mesh(mesh):
        placed = jax.device_put(lhs, NamedSharding(mesh, P(None, "a"))), jax.device_put(rhs, NamedSharding(mesh, P()))
        with pytest.raises(ValueError, match="spatial axes cannot be sharded.*reshard"):
            jax_deconv.conv_transpose(*placed, (2,), "SAME")


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("role", "xyw")
def test_partly_manual_shard_map(role, check_vma):
    """One mesh axis in the caller's hands, the other in the partitioner's."""
    values = operands(1)
    function = functions(1)[role]
    mesh = mesh_of((4, 2))
    out_spec = {"x": P("a"), "y": P("a"), "w": P()}[role]

    def local(lhs, rhs, out):
        result = function(lhs, rhs, out)
        return jax.lax.psum(result, "a") if role == "w" else result

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P("a"), P(), P("a")), out_specs=out_spec,
                           axis_names={"a"}, check_vma=check_vma)
    np.testing.assert_array_equal(jax.jit(mapped)(*values), function(*values))
