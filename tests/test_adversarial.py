# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""What an attack on the package once broke."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_deconv
from jax_deconv.policy import Policy, resolve

LHS, RHS = jnp.ones((2, 4, 3)), jnp.ones((3, 3, 5))


def conv_transpose(lhs, rhs, **kw):
    return jax_deconv.conv_transpose(lhs, rhs, (2,), "SAME", **kw)


def test_disable_jit():
    with jax.disable_jit():
        assert conv_transpose(LHS, RHS).shape == (2, 8, 5)
        assert jax.grad(lambda w: conv_transpose(LHS, w).sum())(RHS).shape == RHS.shape


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.grad], ids=["eager", "jit", "grad"])
def test_debug_nans_finds_a_nan_of_ours(wrap):
    function = wrap(lambda w: conv_transpose(jnp.full(LHS.shape, jnp.inf), w).sum())
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        function(jnp.zeros(RHS.shape))


@pytest.mark.parametrize("dtype, wide", [("bfloat16", "float32"), ("float16", "float32"), ("int8", "int32"),
                                         ("float8_e4m3fn", "float32")])
def test_preferred_types_need_no_implicit_promotion(dtype, wide):
    with jax.numpy_dtype_promotion("strict"):
        out = conv_transpose(LHS.astype(dtype), RHS.astype(dtype), preferred_element_type=wide)
    assert out.dtype == wide
    np.testing.assert_array_equal(out, conv_transpose(LHS, RHS).astype(wide))


def test_integers_of_other_signedness(x64):
    big = jnp.full((1, 1, 1), 2**60 + 1, jnp.uint64)
    out = jax_deconv.conv_transpose(big, jnp.ones_like(big), (1,), "SAME", preferred_element_type="int64")
    assert int(out[0, 0, 0]) == 2**60 + 1


@pytest.mark.parametrize("channels, groups", [(8, 4), (8, 2), (32, 4)])
def test_a_mesh_axis_larger_than_the_groups(channels, groups):
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    lhs = jnp.arange(8.0 * channels).reshape(2, 4, channels) % 7
    rhs = jnp.arange(3.0 * channels * channels // groups).reshape(3, -1, channels) % 5
    function = lambda lhs, rhs: conv_transpose(lhs, rhs, feature_group_count=groups)
    split = NamedSharding(mesh, P(None, None, "a"))
    out = jax.jit(function)(jax.device_put(lhs, split), jax.device_put(rhs, split))
    np.testing.assert_array_equal(out, function(lhs, rhs))


def test_explicit_meshes_take_backward_policies_and_mapped_axes():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    policy = Policy(backward=Policy(precision="highest"))
    with jax.set_mesh(mesh):
        whole = jax.device_put(RHS[:, :, :4], NamedSharding(mesh, P()))
        lhs = jax.device_put(jnp.ones((2, 4, 4)), NamedSharding(mesh, P(None, None, "b")))
        kernel = jax.device_put(jnp.ones((3, 4, 5)), NamedSharding(mesh, P()))
        assert jax.grad(lambda w: conv_transpose(lhs, w, policy=policy).sum())(kernel).shape == kernel.shape
        mapped = jax.device_put(jnp.ones((8, 2, 4, 3)), NamedSharding(mesh, P("b")))
        assert jax.typeof(jax.vmap(conv_transpose, (0, None))(mapped, whole)).sharding.spec[0] == "b"


def test_policies_nest_where_they_are_entered():
    made_outside = jax_deconv.use_policy(Policy(precision="highest"))
    with jax_deconv.use_policy(Policy(deterministic=True, backward=Policy(deterministic=False))):
        with made_outside:
            assert resolve(None).deterministic and resolve(None).precision is jax.lax.Precision.HIGHEST
        with jax_deconv.use_policy(Policy(backward=Policy(precision="high"))):
            assert resolve(None).backward.deterministic is False

    @jax_deconv.use_policy(Policy(strict=True))
    def decorated():
        return resolve(None).strict

    assert decorated() and decorated() and not resolve(None).strict


@pytest.mark.parametrize("lhs, rhs", [((2, 4, "s"), (3, "s", 5)), ((2, 4, 3), (3, 3, "s")), (("s", 4, 3), (3, 3, 5))])
def test_export_with_symbolic_sizes(lhs, rhs):
    scope, = jax.export.symbolic_shape("s")
    structs = [jax.ShapeDtypeStruct([scope if n == "s" else n for n in shape], jnp.float32) for shape in (lhs, rhs)]
    exported = jax.export.export(jax.jit(conv_transpose))(*structs)
    np.testing.assert_array_equal(exported.call(LHS, RHS), conv_transpose(LHS, RHS))


@pytest.mark.parametrize("shape", [None, 5, "abc", (2, 4, 3.0), (2, -4, 3), (2, 4)])
def test_shapes_that_are_none(shape):
    with pytest.raises((TypeError, ValueError), match="lhs_shape must be a sequence of 3 integers"):
        jax_deconv.conv_transpose_data_gradient(jnp.ones((2, 8, 5)), RHS, shape, (2,), "SAME")


def test_gradients_take_the_cotangent_of_a_wider_result():
    lhs, rhs = LHS.astype(jnp.bfloat16), RHS.astype(jnp.bfloat16)
    out, vjp = jax.vjp(lambda a, b: conv_transpose(a, b, preferred_element_type=jnp.float32), lhs, rhs)
    dlhs = jax_deconv.conv_transpose_data_gradient(out, rhs, lhs.shape, (2,), "SAME")
    drhs = jax_deconv.conv_transpose_filter_gradient(lhs, out, rhs.shape, (2,), "SAME")
    for got, want in zip((dlhs, drhs), vjp(out)):
        assert got.dtype == want.dtype == jnp.bfloat16
        np.testing.assert_array_equal(got, want)
    with pytest.raises(TypeError, match="cotangent must have the type of rhs, float32.*bfloat16"):
        jax_deconv.conv_transpose_data_gradient(out.astype(jnp.bfloat16), RHS, lhs.shape, (2,), "SAME")


@pytest.mark.parametrize("bad", [jax.ShapeDtypeStruct((2, 4, 3), jnp.float32), [[[1.0]]], None])
def test_operands_that_are_no_arrays(bad):
    with pytest.raises(TypeError, match="lhs must be an array of numbers"):
        conv_transpose(bad, RHS)


@pytest.mark.parametrize("name, text", [("DETERMINISTIC", "maybe"), ("WORKSPACE_LIMIT", "abc"), ("AUTOTUNE", "x")])
def test_environment_variables_are_named(monkeypatch, name, text):
    monkeypatch.setenv(f"JAX_DECONV_{name}", text)
    with pytest.raises(ValueError, match=f"JAX_DECONV_{name}='{text}'"):
        conv_transpose(LHS, RHS)
