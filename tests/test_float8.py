# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""float8: operands of these types, and operands that are rounded to them with a scale each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_deconv
from jax_deconv import Policy, float8
from jax_deconv.float8 import Recipe, Scale, State

RECIPE = Recipe(amax_history_length=3)


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), dtype)


X, W, DY = normal(2, 6, 5, 8), normal(4, 3, 8, 6), normal(2, 12, 10, 6)


def conv_transpose(x, w, **settings):
    return float8.conv_transpose(x, w, (2, 2), "SAME", **settings)


def loss(w, state, x=X):
    return (conv_transpose(x, w, state=state) ** 2).sum()


def close(got, want, tolerance=1e-6):
    got, want = (np.asarray(t, np.float64) for t in (got, want))
    assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)


# ---- operands of float8 --------------------------------------------------------------------------------


@pytest.mark.parametrize("result", [None, "bfloat16", "float16", "float32", "float8_e5m2"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_operands_of_float8(dtype, result):
    """As lax: the sums of exact products, rounded once."""
    x, w = X.astype(dtype), W.astype(dtype)
    got, want = (f(x, w, (2, 2), "SAME", preferred_element_type=result)
                 for f in (jax_deconv.conv_transpose, lax.conv_transpose))
    assert got.dtype == want.dtype == (result or dtype)
    exact = lax.conv_transpose(x.astype("float32"), w.astype("float32"), (2, 2), "SAME", precision="highest")
    rounding = float(jnp.finfo(got.dtype).eps)
    close(got, exact, max(rounding, 1e-6))
    fused = jax_deconv.conv_transpose(x, w, (2, 2), "SAME", preferred_element_type=result, activation="relu",
                                      bias=jnp.zeros(6, got.dtype))
    np.testing.assert_array_equal(*(np.asarray(t, np.float32) for t in (fused, jax.nn.relu(got))))


def test_operands_of_two_float8_types():
    """A cotangent in e5m2 meets operands in e4m3."""
    x, w, dy = X.astype("float8_e4m3fn"), W.astype("float8_e4m3fn"), DY.astype("float8_e5m2")
    wide = [t.astype(jnp.float32) for t in (x, w, dy)]
    data, kernel = jax_deconv.conv_transpose_data_gradient, jax_deconv.conv_transpose_filter_gradient
    for dtype in (jnp.bfloat16, jnp.float32):
        close(data(dy, w, X.shape, (2, 2), "SAME", preferred_element_type=dtype),
              data(wide[2], wide[1], X.shape, (2, 2), "SAME"), jnp.finfo(dtype).eps)
        close(kernel(x, dy, W.shape, (2, 2), "SAME", preferred_element_type=dtype),
              kernel(wide[0], wide[2], W.shape, (2, 2), "SAME"), jnp.finfo(dtype).eps)
    with pytest.raises(TypeError, match="must have the same type of elements; got float8_e4m3fn and float8_e5m2"):
        jax_deconv.conv_transpose(x, W.astype("float8_e5m2"), (2, 2), "SAME")


# ---- scales --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 1e5, 1e38])
def test_quantize(dtype, magnitude):
    array = magnitude * X
    values, scale, after = float8.quantize(array, dtype)
    assert values.dtype == dtype and values.shape == X.shape and scale.shape == () and after is None
    assert float(jnp.abs(values.astype(jnp.float32)).max()) == jnp.finfo(dtype).max
    close(np.asarray(values, np.float64) * np.float64(scale), array, float(jnp.finfo(dtype).eps) / 2)


def test_quantize_what_is_odd():
    for array in (jnp.zeros(3), jnp.zeros(0)):
        values, scale, _ = float8.quantize(array, jnp.float8_e4m3fn)
        assert values.shape == array.shape and not values.astype(bool).any() and scale == 1
    known = Scale(jnp.full(1, 0.5), jnp.zeros(2))
    values, scale, after = float8.quantize(jnp.array([jnp.nan, jnp.inf, -1e9, 3]), jnp.float8_e4m3fn, known)
    np.testing.assert_array_equal(values.astype(np.float32), [np.nan, 448, -448, 6])
    assert scale == 0.5 and after.amax_history.tolist() == [0, 0]  # a step that overflowed leaves no trace
    assert float8.quantize(jnp.full(2, 1e-45), jnp.float8_e4m3fn)[0].astype(jnp.float32).tolist() == [0, 0]


def test_scales_are_flax_s():
    fp8_ops = pytest.importorskip("flax.linen.fp8_ops")
    ours, theirs = (RECIPE.state().input for _ in range(2))
    for step in range(6):
        array = normal(7, 3) * [1, 20, 0, 5, 0.1, 0.3][step]
        values, scale, ours = float8.quantize(array, jnp.float8_e4m3fn, ours)
        theirs = Scale(*fp8_ops.update_fp8_meta(array, jnp.float8_e4m3fn, *theirs))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), ours, theirs)
        np.testing.assert_array_equal(values, fp8_ops.quantize(array, jnp.float8_e4m3fn, scale, jnp.float32))


# ---- convolutions --------------------------------------------------------------------------------------


def rounded(array, dtype):
    values, scale, _ = float8.quantize(array, dtype)
    return values.astype(jnp.float32) * scale


@pytest.mark.parametrize("policy", [None, Policy(backward=Policy(precision="highest"))], ids=["", "backward policy"])
@pytest.mark.parametrize("activation", [None, "relu", "tanh", "silu", jnp.sin])
def test_values_and_gradients(activation, policy):
    """Those of the rounded tensors."""
    bias, residual = normal(6), normal(*DY.shape)
    settings = dict(strides=(2, 2), padding="SAME", policy=policy)

    def plain(x, w, bias, residual, activation):
        return jax_deconv.conv_transpose(x, w, bias=bias, residual=residual, activation=activation, **settings)

    def ours(x, w, bias, residual):
        return float8.conv_transpose(x, w, bias=bias, residual=residual, activation=activation, **settings)

    out, pull = jax.vjp(ours, X, W, bias, residual)
    x, w = (rounded(t, jnp.float8_e4m3fn) for t in (X, W))
    close(out, plain(x, w, bias, residual, activation))
    # The cotangent of the sum before the activation is what is rounded.
    function = {None: lambda t: t, "relu": jax.nn.relu, "tanh": jnp.tanh, "silu": jax.nn.silu, jnp.sin: jnp.sin}[
        activation]
    before, linear = jax.vjp(lambda *operands: plain(*operands, None), x, w, bias, residual)
    (wide,) = jax.vjp(function, before)[1](DY)
    dx, dw, *_ = linear(rounded(wide, jnp.float8_e5m2))
    for got, want in zip(pull(DY), (dx, dw, wide.sum((0, 1, 2)), wide)):
        close(got, want, 3e-3 if activation == "tanh" else 1e-5)  # its slope is rounded, where a rounding may tip over


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_types(dtype):
    """Large sums: float16 holds the result, but not the sums of float8 values that it is made of."""
    x, w, bias = jnp.ones((1, 4, 4, 64), dtype), jnp.ones((3, 3, 64, 8), dtype), jnp.ones(8, dtype)
    out, pull = jax.vjp(lambda *operands: float8.conv(*operands[:2], (1, 1), "VALID", bias=operands[2],
                                                      dimension_numbers=("NHWC", "HWIO", "NHWC")), x, w, bias)
    assert out.dtype == dtype
    close(out, np.full(out.shape, 9 * 64 + 1), jnp.finfo(dtype).eps)
    assert all(t.dtype == dtype for t in pull(out))
    wide = float8.conv_transpose(x, w, (1, 1), "SAME", preferred_element_type=jnp.float32)
    assert wide.dtype == jnp.float32


def test_conv_and_groups():
    x, w = normal(2, 8, 9), normal(4, 4, 3)
    got = float8.conv(x, w, (2,), "SAME", feature_group_count=2)
    close(got, jax_deconv.conv(*(rounded(t, jnp.float8_e4m3fn) for t in (x, w)), (2,), "SAME", feature_group_count=2))
    got = float8.conv_transpose(got, w, (2,), "SAME", dimension_numbers=("NCH", "OIH", "NCH"), transpose_kernel=True,
                                feature_group_count=2, output_padding=(1,))
    assert got.shape == (2, 8, 11)


@pytest.mark.parametrize("state", [None, RECIPE.state()], ids=["current", "delayed"])
def test_what_the_backward_pass_keeps(state):
    """The operands in float8, the result, and scales."""
    call = functools.partial(conv_transpose, state=state, activation="relu")
    pull = jax.eval_shape(lambda x, w: jax.vjp(call, x, w)[1], *(t.astype(jnp.bfloat16) for t in (X, W)))
    kept = sorted((leaf.dtype.name, leaf.size) for leaf in jax.tree.leaves(pull) if leaf.size > 3)
    assert kept == sorted([("float8_e4m3fn", X.size), ("float8_e4m3fn", W.size), ("bfloat16", DY.size)])


# ---- delayed scaling and transforms --------------------------------------------------------------------


def test_the_gradient_of_a_state_is_the_next_one():
    state = RECIPE.state()
    out = conv_transpose(X, W, state=state)
    for step in range(3):
        dw, state = jax.grad(loss, (0, 1))(W, state)
        assert sorted(state.input.amax_history.tolist()) == [0] * (2 - step) + [float(abs(X).max())] * (step + 1)
    assert float(state.kernel.scale[0]) == pytest.approx(float(abs(W).max()) / 448)
    assert float(state.output_grad.scale[0]) == pytest.approx(2 * float(abs(out).max()) / 57344, rel=0.1)
    # By now all scales are those of the present tensors, but for the rounding that the cotangent had when it was seen.
    close(dw, jax.grad(loss)(W, None), 0.05)


def plainly(state):
    return jax.grad(loss, 1)(W, state)


def in_vmap(state):
    return jax.grad(lambda state: jax.vmap(lambda x: loss(W, state, x[None]))(X).sum())(state)


def with_remat(state):
    return jax.grad(jax.checkpoint(loss), 1)(W, state)


def in_shard_map(state):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    part = jax.shard_map(lambda state, x: lax.psum(loss(W, state, x), "data"), mesh=mesh, in_specs=(P(), P("data")),
                         out_specs=P())
    return jax.grad(part)(state, X)


def sharded(state):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(X, jax.NamedSharding(mesh, P("data")))
    return jax.jit(jax.grad(lambda state, x: loss(W, state, x)))(state, x)


def in_scan(state):
    """One state for several calls: with the type that adds up by maximum, as in Flax."""
    fm32 = pytest.importorskip("flax.linen.fp8_ops").fm32

    def total(state):
        state = jax.tree.map(lambda t: lax.convert_element_type(t, fm32), state)
        return lax.scan(lambda total, x: (total + loss(W, state, x[None]), None), 0.0, X)[0]
    return jax.grad(total)(state)


@pytest.mark.parametrize("how", [in_vmap, with_remat, in_shard_map, sharded, in_scan])
def test_states_under_transforms(how):
    """As if all were one call."""
    state = plainly(RECIPE.state())
    for step in (how, jax.jit(how)):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), step(state), plainly(state))


def test_vmap_without_a_state_is_a_loop():
    got = jax.vmap(lambda x: conv_transpose(x, W))(X[:, None])
    close(got, jnp.stack([conv_transpose(x, W) for x in X[:, None]]))
    states = jax.tree.map(lambda t: jnp.stack([t, 2 * t]), plainly(RECIPE.state()))
    each = jax.vmap(lambda state: plainly(state))(states)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), jax.tree.map(lambda t: t[1], each),
                 plainly(jax.tree.map(lambda t: t[1], states)))


# ---- refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings, message", [
    (dict(forward="int8"), "forward must be one of float8_e4m3fn, .*; got 'int8'"),
    (dict(backward="float9"), "backward must be one of float8_e4m3fn, .*; got 'float9'"),
    (dict(amax_history_length=-1), "amax_history_length must be an integer >= 0; got -1"),
])
def test_bad_recipes(settings, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**settings)


SCALE = RECIPE.state().input


@pytest.mark.parametrize("settings, message", [
    (dict(recipe="hybrid"), "recipe must be a jax_deconv.float8.Recipe; got 'hybrid'"),
    (dict(state=SCALE), "state must be None or a jax_deconv.float8.State of three Scales; got Scale"),
    (dict(state=State(SCALE, SCALE, None)), "state must be None or .* three Scales"),
    (dict(state=State(SCALE, SCALE._replace(scale=jnp.ones(2)), SCALE)),
     r"state.kernel.scale must be an array of float32 with one element; got .*1., 1."),
    (dict(state=State(SCALE, SCALE, SCALE._replace(amax_history=jnp.zeros(0)))),
     "state.output_grad.amax_history must be an array of float32 with one axis"),
    (dict(state=State(SCALE._replace(scale=jnp.ones(1, jnp.bfloat16)), SCALE, SCALE)),
     "state.input.scale must be an array of float32"),
    (dict(lhs=X.astype("float8_e4m3fn"), rhs=W.astype("float8_e4m3fn")),
     "lhs and rhs must have a float type of 16 bits or more, to be rounded here; got float8_e4m3fn"),
    (dict(lhs=X.astype(int), rhs=W.astype(int)), "lhs and rhs must have a float type of 16 bits or more"),
])
def test_refused(settings, message):
    arguments = dict(lhs=X, rhs=W, strides=(2, 2), padding="SAME") | settings
    with pytest.raises(TypeError, match=message):
        float8.conv_transpose(**arguments)


# ---- Flax ----------------------------------------------------------------------------------------------


def test_linen():
    nn = pytest.importorskip("flax.linen")
    from flax.linen.fp8_ops import Fp8DirectDotGeneralOp

    from jax_deconv.linen import ConvTranspose

    layer = ConvTranspose(6, (4, 3), (2, 2), float8=RECIPE, use_bias=False, dtype=jnp.bfloat16)
    variables = layer.init(jax.random.key(0), X)
    scaling = variables["_overwrite_with_gradient"]
    dense = nn.Dense(6, dot_general_cls=functools.partial(Fp8DirectDotGeneralOp, amax_history_length=3))
    (theirs,) = dense.init(jax.random.key(0), X)["_overwrite_with_gradient"].values()
    assert jax.tree.map(jnp.shape, scaling) == jax.tree.map(jnp.shape, theirs)
    assert jax.tree.map(jnp.shape, variables["params"]) == {"kernel": (4, 3, 8, 6)}
    kernel = variables["params"]["kernel"]
    state = State(*(Scale(scaling[f"{name}_scale"], scaling[f"{name}_amax_history"]) for name in State._fields))
    np.testing.assert_array_equal(layer.apply(variables, X), conv_transpose(
        X.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16), state=state))
    after = jax.grad(lambda variables: layer.apply(variables, X).astype(jnp.float32).sum())(variables)
    assert after["_overwrite_with_gradient"]["input_amax_history"][0] == abs(X).astype(jnp.bfloat16).max()

    current = ConvTranspose(6, (4, 3), (2, 2), float8=Recipe(amax_history_length=0))
    assert list(current.init(jax.random.key(0), X)) == ["params"]
    with pytest.raises(TypeError, match="float8 must be None or a jax_deconv.float8.Recipe; got True"):
        ConvTranspose(6, (4, 3), (2, 2), float8=True).init(jax.random.key(0), X)


def test_nnx():
    nnx = pytest.importorskip("flax.nnx")
    from jax_deconv.nnx import ConvTranspose, OverwriteWithGradient

    layer = ConvTranspose(8, 6, (4, 3), (2, 2), float8=RECIPE, use_bias=False, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer(X), conv_transpose(X, layer.kernel[...], state=RECIPE.state()))
    scales = nnx.to_pure_dict(nnx.state(layer, OverwriteWithGradient))
    assert sorted(scales) == sorted(f"{name}_{part}" for name in State._fields for part in Scale._fields)


def test_training_reaches_the_loss_of_bfloat16():
    """A decoder that is taught eight pictures under noise: with float8 in all its layers, and without."""
    nn, optax = pytest.importorskip("flax.linen"), pytest.importorskip("optax")
    from flax.training.train_state import TrainState

    from jax_deconv.linen import ConvTranspose

    class Decoder(nn.Module):
        recipe: Recipe | None

        @nn.compact
        def __call__(self, codes):
            settings = dict(kernel_size=(4, 4), strides=(2, 2), dtype=jnp.bfloat16, float8=self.recipe)
            for features, activation in ((16, "silu"), (16, "relu"), (1, None)):
                codes = ConvTranspose(features, activation=activation, **settings)(codes)
            return codes

    codes, noise = normal(8, 2, 2, 4), 0.2
    waves = jnp.linspace(1, 3, 8)[:, None] * jnp.linspace(0, 2, 16)
    pictures = jnp.sin(2 * waves)[:, :, None, None] * jnp.cos(waves)[:, None, :, None]

    def train(recipe):
        model = Decoder(recipe)

        def loss(variables, key):
            target = pictures + noise * jax.random.normal(key, pictures.shape)
            return ((model.apply(variables, codes).astype(jnp.float32) - target) ** 2).mean()

        def step(state, key):
            value, gradients = jax.value_and_grad(loss)(state.params, key)
            return state.apply_gradients(grads=gradients), value

        # Flax's TrainState tells what to overwrite from what to optimise, where there is something to overwrite.
        start = model.init(jax.random.key(0), codes)
        state = TrainState.create(apply_fn=model.apply, params=start, tx=optax.adam(1e-2))
        keys = jax.random.split(jax.random.key(1), 180)
        losses = jax.jit(lambda state: lax.scan(step, state, keys)[1])(state)
        return float(losses[-20:].mean())

    plain = train(None)
    assert noise**2 < plain < 1.2 * noise**2  # what is left is the noise
    assert train(Recipe(amax_history_length=16)) < 1.05 * plain
