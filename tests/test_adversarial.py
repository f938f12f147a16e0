# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""What an attack on the package once broke."""

import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_deconv
from jax_deconv import activations, compat, tuning, weights
from jax_deconv.lowering.plan import Plan
from jax_deconv.policy import Policy, resolve
from jax_deconv.problem import Axis, ConvProblem, Role

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


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("padding", ["SAME", "VALID", ((-1, 0), (5, 4))], ids=str)
@pytest.mark.parametrize("function", [jax_deconv.conv, jax_deconv.conv_transpose])
def test_export_with_symbolic_space(function, padding, stride, groups):
    def with_gradients(lhs, rhs):
        call = functools.partial(function, dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups)
        out, vjp = jax.vjp(lambda a, b: call(a, b, (stride, stride), padding), lhs, rhs)
        return out, *vjp(out)

    lhs, rhs = (np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
                for shape in ((2, 9, 12, 4), (3, 4, 4 // groups, 4)))
    height, width = jax.export.symbolic_shape("h, w", constraints=["h >= 8", "w >= 8"])
    exported = jax.export.export(jax.jit(with_gradients))(jax.ShapeDtypeStruct((2, height, width, 4), jnp.float32), rhs)
    for got, want in zip(exported.call(lhs, rhs), with_gradients(lhs, rhs)):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("function", [
    lambda y, dy: jax_deconv.conv_transpose_data_gradient(dy, RHS, y.shape, (2,), "SAME", accumulate_into=y),
    lambda y, dy: compat.tensorflow.conv_transpose(y, RHS.swapaxes(1, 2), dy.shape, 2),
    lambda y, dy: compat.torch.cudnn_convolution_backward_input(
        dy.swapaxes(1, 2).shape, y.swapaxes(1, 2), RHS.transpose(1, 2, 0), 1, 2, 1, 1, True, False, True),
], ids=["gradient", "tensorflow", "torch"])
def test_shapes_may_have_symbolic_sizes(function):
    scope, = jax.export.symbolic_shape("s")
    arrays = LHS, jnp.ones((2, 8, 5))
    exported = jax.export.export(jax.jit(function))(
        *(jax.ShapeDtypeStruct((scope, *a.shape[1:]), a.dtype) for a in arrays))
    np.testing.assert_allclose(exported.call(*arrays), function(*arrays), rtol=1e-6)


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


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("policy", [None, Policy(backward=Policy())], ids=["", "backward_policy"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_is_clipped_at_a_bound_that_its_type_rounds_has_no_gradient(dtype, policy, wrap):
    values, one = jnp.asarray([[-5.0], [0.0], [5.0]], dtype), jnp.ones((1, 1), dtype)
    for lo, hi in ((-0.3, 0.3), (-0.7, 0.7), (-0.1, 0.9)):
        function = lambda v: jax_deconv.conv_transpose(  # noqa: B023
            v, one, (), [], activation=activations.clipped(lo, hi), policy=policy).astype(jnp.float32).sum()  # noqa: B023
        shifted = lambda v: jax_deconv.conv_transpose(  # noqa: B023
            v, one, (), [], activation=activations.clipped(1 + lo, 1 + hi), policy=policy,  # noqa: B023
            bias=jnp.ones(1, dtype)).astype(jnp.float32).sum()
        for f in (function, shifted):
            _, gradient = wrap(jax.value_and_grad(f))(values)
            np.testing.assert_array_equal(gradient.ravel(), [0, 1, 0])


def test_activations_that_there_are_not():
    with pytest.raises(ValueError, match="name must be one of relu, .*'swish'"):
        activations.Activation("swish")
    with pytest.raises(TypeError, match="clipped.*must have parameters that float32 can hold"):
        conv_transpose(LHS, RHS, activation=activations.clipped(-1e300, 1e300))


SMALL_IMAGE, SMALL_KERNEL = np.ones((2, 4, 6, 6), np.float32), np.ones((4, 3, 3, 3), np.float32)


def test_sizes_may_be_numpy_arrays():
    """Also where a string or nothing may stand."""
    two, one = np.array([2, 2]), np.array([1, 1])
    assert compat.torch.conv2d(SMALL_IMAGE, np.ones((3, 4, 3, 3), np.float32), None, two, one).shape == (2, 3, 3, 3)
    assert compat.mxnet.deconvolution(SMALL_IMAGE, SMALL_KERNEL, kernel=np.array([3, 3]), stride=two, pad=one, adj=[],
                                      num_filter=3, no_bias=1).shape == (2, 3, 11, 11)
    assert compat.torch.cudnn_convolution_backward_input(
        np.array([2, 4, 6, 6]), np.ones((2, 3, 4, 4), np.float32), np.ones((3, 4, 3, 3), np.float32),
        0, 1, 1, 1, True, False, True).shape == (2, 4, 6, 6)


_CONV = np.ones((3, 4, 3, 3), np.float32)
_CUDNN = (0, 1, 1, 1, True, False, True)


@pytest.mark.parametrize("name, call", [
    ("convention", lambda: weights.import_kernel(SMALL_KERNEL, [])),
    ("cudnn_tune", lambda: compat.mxnet.tuning_policy([])),
    ("padding_mode", lambda: compat.torch.conv2d(SMALL_IMAGE, _CONV, padding=1, padding_mode=["reflect"])),
    ("auto_pad", lambda: compat.onnx.conv_transpose(SMALL_IMAGE, SMALL_KERNEL, auto_pad=np.array([1, 2]))),
    ("opset", lambda: compat.onnx.conv_transpose(SMALL_IMAGE, SMALL_KERNEL, auto_pad="SAME_UPPER", opset=None)),
    ("input_size", lambda: compat.torch.cudnn_convolution_backward_input(5, SMALL_IMAGE, _CONV, *_CUDNN)),
    ("input_size", lambda: compat.torch.cudnn_convolution_backward_input(
        (2, 4, 6.0, 6.0), SMALL_IMAGE, _CONV, *_CUDNN)),
    ("weight_size", lambda: compat.torch.cudnn_convolution_backward_weight(None, SMALL_IMAGE, SMALL_IMAGE, *_CUDNN)),
    ("weight_size", lambda: compat.torch.cudnn_convolution_transpose_backward_weight(
        (4, 3, -3, 3), SMALL_IMAGE, SMALL_IMAGE, *_CUDNN)),
    ("bias_sizes", lambda: compat.torch.convolution_backward(
        np.ones((2, 3, 8, 8), np.float32), SMALL_IMAGE, SMALL_KERNEL, 3, 1, 0, 1, True, 0, 1, (True,) * 3)),
    ("alpha", lambda: compat.torch.cudnn_convolution_add_relu(
        SMALL_IMAGE, _CONV, np.ones((2, 3, 4, 4), np.float32), "two", None, 1, 0, 1, 1)),
    ("alpha", lambda: compat.torch.cudnn_convolution_add_relu(
        SMALL_IMAGE.astype(int), _CONV.astype(int), np.ones((2, 3, 4, 4), int), 0.5, None, 1, 0, 1, 1)),
    ("input and z", lambda: compat.torch.cudnn_convolution_add_relu(
        SMALL_IMAGE, _CONV, np.ones((2, 3, 4, 4), np.float16), None, None, 1, 0, 1, 1)),
])
def test_arguments_of_compat_are_named(name, call):
    with pytest.raises((TypeError, ValueError), match=f"^{name} must"):
        call()


def test_an_alpha_does_not_widen():
    image, kernel, z = (jnp.ones(s, jnp.bfloat16) for s in ((2, 4, 6, 6), (3, 4, 3, 3), (2, 3, 4, 4)))
    out = compat.torch.cudnn_convolution_add_relu(image, kernel, z, np.float32(-4), None, 1, 0, 1, 1)
    assert out.dtype == jnp.bfloat16 and (out == 32).all()


def test_what_was_explained_is_explained_again():
    explained = jax_deconv.explain(jax.jit(conv_transpose), platform="cpu")
    assert [len(explained(LHS, RHS)) for _ in range(3)] == [1, 1, 1]
    with pytest.raises(TypeError, match="function must be callable; got 5"):
        jax_deconv.explain(5)


_PLAN = {"algorithm": "cudnn", "engine": 1, "knobs": [], "workspace": 0}


@pytest.mark.parametrize("content", [
    "[", "[" * 100_000, "5", "\0\xff", {"plans": []}, {"plans": None}, {"plans": 5}, {}, {"plans": {"k": 5}},
    {"plans": {"k": _PLAN | {"knobs": 5}}}, {"plans": {"k": _PLAN | {"engine": float("inf")}}}],
    ids=lambda content: repr(content)[:50])
def test_a_store_that_is_no_store(tmp_path, content):
    path = tmp_path / "store.json"
    text = content if isinstance(content, str) else json.dumps({"format": tuning.FORMAT} | content)
    path.write_bytes(text.encode("latin1"))
    store, choice = tuning.Store(path, {"format": tuning.FORMAT}), tuning.Choice(Plan(), "timed", 2.0)
    assert store.get("k") is None
    store.put("new", choice)
    assert tuning.Store(path, {}).get("new").plan == choice.plan
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".lock"}


def test_a_store_that_can_be_neither_read_nor_written(tmp_path):
    store = tuning.Store(tmp_path, {"format": tuning.FORMAT})  # a folder
    store.put("new", tuning.Choice(Plan(), "timed", 2.0))
    assert store.get("new").plan == Plan()


@pytest.mark.parametrize("plan", [Plan("gemm", "a variant of old"), Plan("dense", "5"), Plan("dense", "x"),
                                  Plan("phase", "x"), Plan("winograd")], ids=str)
def test_plans_that_are_no_more(monkeypatch, tmp_path, plan):
    """A store that another version wrote: they count as not there."""
    axis = Axis(x_size=8, y_size=4, kernel=2, stride=2)
    problem = ConvProblem(Role.X, 2, 4, 8, 8, (axis,), np.dtype("float32"), np.dtype("float32"))
    store = tuning.Store(tmp_path / "store.json", {"format": tuning.FORMAT})
    device = types.SimpleNamespace(compute_capability="9.0", local_hardware_id=0)
    monkeypatch.setattr(tuning.Store, "of", lambda device: store)
    monkeypatch.setattr(tuning, "local_device", lambda: device)
    monkeypatch.setattr(tuning, "_heuristic", lambda *_: None)
    policy = resolve(Policy(autotune="cached"))
    choose = lambda: tuning.choose(problem, policy, may_time=False, algorithms=tuning.ALGORITHMS)
    store.put(tuning.describe(problem, policy), tuning.Choice(Plan("dense", "4"), "timed", 2.0))
    assert choose().reason == "stored"
    store.put(tuning.describe(problem, policy), tuning.Choice(plan, "timed", 2.0))
    assert choose().reason == "modelled"
