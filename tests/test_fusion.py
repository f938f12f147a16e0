# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Bias, residual and activation in the call: values, derivatives, transforms, what is kept and what is computed."""

import ctypes
import functools
import itertools
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from grid import Case, integers
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from jaxprs import equations, primitive_counts, roles

import jax_deconv
from jax_deconv import activations
from jax_deconv.activations import clipped, elu, gelu, leaky_relu

# Each with jax.nn's function and the values where its slope jumps.
ALL = {
    "relu": (jax.nn.relu, [0]), "relu6": (jax.nn.relu6, [0, 6]), "tanh": (jnp.tanh, []),
    "leaky_relu": (jax.nn.leaky_relu, [0]), "elu": (jax.nn.elu, [0]), "sigmoid": (jax.nn.sigmoid, []),
    "silu": (jax.nn.silu, []), "gelu": (jax.nn.gelu, []),
    gelu(approximate=False): (functools.partial(jax.nn.gelu, approximate=False), []),
    leaky_relu(0.25): (functools.partial(jax.nn.leaky_relu, negative_slope=0.25), [0]),
    elu(0.5): (functools.partial(jax.nn.elu, alpha=0.5), [0]),
    clipped(-1, 2): (lambda v: lax.clamp(jnp.asarray(-1, v.dtype), v, jnp.asarray(2, v.dtype)), [-1, 2]),
}
EXACT = (None, "relu", "relu6", leaky_relu(0.25), clipped(-1, 2))  # but for rounding to the result's type
FROM_OUTPUT = [a for a in ALL if activations.resolve(a).from_output]
CASES = [
    Case((4,), (3,), (2,), "SAME", layout="first", groups=2),
    Case((3, 4), (3, 2), (2, 1), ((1, 0), (0, 1)), (1, 2), layout="mixed", consistent=True, output_padding=(1, 0)),
    Case((2, 3, 2), (2, 1, 3), (2, 3, 1), "VALID", inputs=2, transpose_kernel=True),
]
SMALL = CASES[0]


def activated(activation, values):
    """By the oracle."""
    activation = activations.resolve(activation)
    return oracle.ACTIVATIONS[activation.name](values, *activation.parameters) if activation else values


def channels(case):
    return case.groups * case.outputs


def result_shape(case):
    return oracle.conv_transpose(*case.operands(), *case.positional, **case.keywords).shape


def arrays(case, dtype=np.float32, scale=1, seed=0):
    """lhs, rhs, bias and residual."""
    shapes = (case.lhs_shape, case.rhs_shape, (channels(case),), result_shape(case))
    made = (integers(shape, np.float64 if scale != 1 else dtype, seed + i) for i, shape in enumerate(shapes))
    return [jnp.asarray(a * scale if scale != 1 else a, dtype) for a in made]


def fused(case, activation=None, **more):
    """As a function of up to four arrays."""
    def function(x, w, bias=None, residual=None):
        return jax_deconv.conv_transpose(x, w, *case.positional, bias=bias, residual=residual, activation=activation,
                                         **case.keywords, **more)
    return function


def reference(case, x, w, bias=None, residual=None):
    """The sum before the activation."""
    out = oracle.conv_transpose(x, w, *case.positional, bias=bias, **case.keywords)
    return out if residual is None else out + oracle.wide(residual)[0]


def given(values, bias, residual):
    """The arrays, without those that are not asked for."""
    x, w, b, r = values
    return x, w, b if bias else None, r if residual else None


def all_close(got, want, tolerance=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, want)


# ---- values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64], ids=lambda t: t.__name__)
@pytest.mark.parametrize("bias, residual", [(True, False), (False, True), (True, True), (False, False)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rank}d")
def test_values(case, bias, residual, dtype, x64):
    """Sums are exact, and 16-bit results are rounded once: those of piecewise linear functions are the oracle's."""
    values = given(arrays(case, dtype, 13 / 16), bias, residual)
    results = jax.jit(lambda *v: {str(a): fused(case, a)(*v) for a in (None, *ALL)})(*values)
    before = reference(case, *values)
    if dtype is jnp.bfloat16:
        assert np.any(before.astype(dtype) != before)  # else rounding would not be seen
    for activation in (None, *ALL):
        got, want = results[str(activation)], activated(activation, before)
        assert got.dtype == dtype
        if activation in EXACT:
            np.testing.assert_array_equal(got, want.astype(dtype), err_msg=str(activation))
        else:
            rounding = float(jnp.finfo(dtype).eps) * (1 if jnp.finfo(dtype).bits == 16 else 8)
            np.testing.assert_allclose(got.astype(np.float64), want, rtol=rounding, atol=rounding,
                                       err_msg=str(activation))


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("layout", ["first", "last", "mixed"])
def test_values_of_conv(rank, layout):
    case = Case((4, 5, 3)[:rank], (2, 3, 2)[:rank], (2, 1, 2)[:rank], layout=layout, groups=2)
    x, w = case.operands()
    bias = integers((4,), seed=5)
    want = oracle.conv(x, w, case.strides, "SAME", None, case.dimension_numbers, feature_group_count=2, bias=bias)
    residual = integers(want.shape, seed=6)
    got = jax_deconv.conv(x, w, case.strides, "SAME", dimension_numbers=case.dimension_numbers,
                          feature_group_count=2, bias=bias, residual=residual, activation="relu6")
    np.testing.assert_array_equal(got, np.clip(want + residual, 0, 6))


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.uint8, np.complex64], ids=lambda t: t.__name__)
def test_integers_and_complex_numbers(dtype):
    case = CASES[1]
    values = arrays(case, dtype)
    for activation in (None, "relu", "relu6", clipped(1, 3)):
        if activation is None or dtype is not np.complex64:
            got, want = fused(case, activation)(*values), reference(case, *values)
            assert got.dtype == dtype
            np.testing.assert_array_equal(got, activated(activation, want.astype(dtype)))


def test_where_nothing_is_convolved():
    """Zeros beside the bias and the residual: no channels in."""
    x, w, bias, residual = jnp.zeros((1, 2, 0)), jnp.zeros((3, 0, 4)), jnp.arange(4.0), -jnp.ones((1, 4, 4))
    got = jax_deconv.conv_transpose(x, w, (2,), "SAME", bias=bias, residual=residual, activation="relu")
    np.testing.assert_array_equal(got, np.broadcast_to([0, 0, 1, 2], (1, 4, 4)))


@pytest.mark.parametrize("policy", [None, jax_deconv.Policy(backward=jax_deconv.Policy())], ids=["", "backward_policy"])
def test_gradients_of_an_empty_batch(policy):
    values = jnp.zeros((0, 4, 2)), jnp.ones((3, 2, 4)), jnp.ones(4), jnp.zeros((0, 8, 4))
    f = lambda x, w, b, r: jax_deconv.conv_transpose(x, w, (2,), "SAME", bias=b, residual=r, activation="elu",
                                                     policy=policy)
    out, pull = jax.vjp(f, *values)
    assert out.shape == (0, 8, 4)
    jax.tree.map(np.testing.assert_array_equal, pull(out), jax.tree.map(jnp.zeros_like, values))


@pytest.mark.parametrize("wanted, types", [
    (jnp.bfloat16, (jnp.bfloat16, jnp.bfloat16)),
    *((jnp.float32, types) for types in itertools.product([jnp.bfloat16, jnp.float32], repeat=2)),
])
def test_preferred_element_type(wanted, types):
    """Addends in the operands' type or in the result's; each gradient in the type of its own."""
    x, w, bias, residual = arrays(SMALL, jnp.bfloat16, 1 / 8)
    values = x, w, bias.astype(types[0]), residual.astype(types[1])
    out, pull = jax.vjp(fused(SMALL, "relu", preferred_element_type=wanted), *values)
    assert out.dtype == wanted
    np.testing.assert_array_equal(out, np.maximum(reference(SMALL, *values), 0).astype(wanted))
    for value, gradient in zip(values, pull(jnp.ones_like(out))):
        assert gradient.dtype == value.dtype


def test_a_function_is_applied_to_the_result():
    """Whatever it makes of it, and with its own derivative."""
    x, w, bias, _ = arrays(SMALL)
    function = lambda v: jnp.sin(v)[..., None].astype(jnp.bfloat16)
    np.testing.assert_array_equal(fused(SMALL, function)(x, w, bias), function(fused(SMALL)(x, w, bias)))
    got, want = (jax.grad(lambda x: jnp.sum(f(x, w, bias)))(x)
                 for f in (fused(SMALL, jnp.sin), lambda *v: jnp.sin(fused(SMALL)(*v))))
    np.testing.assert_array_equal(got, want)


def test_what_is_not_asked_for_is_not_bound():
    x, w, bias, _ = arrays(SMALL)
    for activation in (None, jnp.tanh):
        counts = primitive_counts(fused(SMALL, activation), x, w)
        assert (counts["conv_x"], counts["conv_fused"]) == (1, 0)
    counts = primitive_counts(fused(SMALL, "tanh"), x, w, bias)
    assert (counts["conv_x"], counts["conv_fused"], counts["add"], counts["tanh"]) == (0, 1, 0, 0)


@pytest.mark.skipif(not shutil.which("c++"), reason="there is no compiler")
def test_the_expressions_for_kernels(tmp_path):
    """What CUDA kernels compile is what JAX computes, also of what is not a number."""
    names = [activations.resolve(a) for a in ALL]
    source = tmp_path / "all.cc"
    source.write_text("#include <cmath>\n" + "".join(
        f'extern "C" float f{i}(float v) {{ return {a.cuda}; }}\n' for i, a in enumerate(names)))
    subprocess.run(["c++", "-shared", "-fPIC", "-O1", source, "-o", tmp_path / "all.so"], check=True)
    library = ctypes.CDLL(str(tmp_path / "all.so"))
    values = np.array([-np.inf, -30, -2, -1, -0.5, -1e-6, 0, 1e-6, 0.7, 2, 5.9, 6, 30, np.inf, np.nan], np.float32)
    for i, activation in enumerate(names):
        function = getattr(library, f"f{i}")
        function.restype, function.argtypes = ctypes.c_float, [ctypes.c_float]
        np.testing.assert_allclose([function(v) for v in values], activation(values), rtol=2e-6, atol=2e-6,
                                   err_msg=str(activation))


# ---- derivatives ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [False, True], ids=["derivative", "backward_policy"])
@pytest.mark.parametrize("activation", ALL, ids=str)
def test_gradients_at_kinks_are_those_of_jax(activation, backward):
    """Through a convolution that changes nothing, up to the edge of each piece and beyond what is finite."""
    function, kinks = ALL[activation]
    tiny = np.float32(1e-6)
    values = [-np.inf, -30, -0.7, 0.3, 7, np.inf, np.nan, *(k + d for k in kinks for d in (-tiny, 0, tiny))]
    x, one, t = jnp.asarray(values, jnp.float32)[:, None], jnp.ones((1, 1)), jnp.full((len(values), 1), 3.0)
    policy = jax_deconv.Policy(backward=jax_deconv.Policy()) if backward else None
    ours = lambda x: jax_deconv.conv_transpose(x, one, (), [], activation=activation, policy=policy)
    (got, want) = (jax.vjp(f, x)[1](t)[0] for f in (ours, function))
    if activation in EXACT or activation == "leaky_relu":
        np.testing.assert_array_equal(got, want)
    else:
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
    if not backward:
        np.testing.assert_allclose(jax.jvp(ours, (x,), (t,))[1], got, rtol=2e-6)


@pytest.mark.parametrize("activation", [None, *(a for a in ALL if a not in ("leaky_relu", "elu"))], ids=str)
def test_derivatives_of_order_two(activation, x64):
    """Of all four arrays at once, in both modes, away from kinks."""
    case = Case((2,), (3,), (2,), "SAME", inputs=2, outputs=1, batch=1)
    values = [a + 0.1 for a in arrays(case, np.float64, 1 / 4)]
    before = reference(case, *values)
    for kink in ALL.get(activation, (None, []))[1]:
        assert np.abs(before - kink).min() > 1e-2
    check_grads(fused(case, activation), values, order=2, modes=("fwd", "rev"), eps=1e-4, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("activation", ["tanh", "gelu"])
@pytest.mark.parametrize("order", ["rrr", "frf"])
def test_third_derivatives(activation, order, x64):
    case = Case((2,), (2,), (2,), "SAME", inputs=1, outputs=1, batch=1)
    values = arrays(case, np.float64, 1 / 4)

    def nested(function):
        def loss(t):
            return jnp.sum(function(*(v * jnp.sin(t + i) for i, v in enumerate(values))))
        for mode in order:
            loss = {"r": jax.jacrev, "f": jax.jacfwd}[mode](loss)
        return jax.jit(loss)(0.5)

    np.testing.assert_allclose(nested(fused(case, activation)),
                               nested(lambda *v: ALL[activation][0](fused(case)(*v))), rtol=1e-10)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rank}d")
def test_gradients(case):
    """Of piecewise linear functions, by the oracle: exact."""
    values = arrays(case, scale=1 / 8)
    before = reference(case, *values)
    cotangent = integers(before.shape, seed=9)
    for activation, slope in (("relu", before > 0), (clipped(-1, 2), (before > -1) & (before < 2)),
                              (leaky_relu(0.25), np.where(before < 0, 0.25, 1))):
        inner = cotangent * slope
        out = jax.jit(lambda *v: jax.vjp(fused(case, activation), *v)[1](cotangent))(*values)  # noqa: B023
        x, w, bias, residual = values
        want = (oracle.gradient(lambda x: reference(case, x, w), x, inner),
                oracle.gradient(lambda w: reference(case, x, w), w, inner),
                np.moveaxis(inner, case.dimension_numbers[2].index("C"), -1).reshape(-1, bias.size).sum(0), inner)
        jax.tree.map(np.testing.assert_array_equal, out, want)


def test_narrow_cotangents_are_added_up_wide():
    """65,536 of them: in bfloat16 a sum of ones ends at 256."""
    x, w, bias = jnp.ones((1, 1 << 16, 1), jnp.bfloat16), jnp.ones((1, 1, 1), jnp.bfloat16), jnp.ones(1, jnp.bfloat16)
    for policy in (None, jax_deconv.Policy(backward=jax_deconv.Policy())):
        f = lambda b: jax_deconv.conv_transpose(x, w, (1,), "SAME", bias=b, activation="relu", policy=policy)  # noqa: B023
        out, pull = jax.vjp(f, bias)
        assert pull(jnp.ones_like(out))[0] == 1 << 16


# ---- what is kept and what is computed -----------------------------------------------------------------


def kept(function, *values):
    """The arrays that reverse mode keeps, and the result, as variables of a jaxpr."""
    def both(*values):
        out, pull = jax.vjp(function, *values)
        return out, jax.tree.leaves(pull)

    jaxpr = jax.make_jaxpr(both)(*values).jaxpr
    out, *residuals = jaxpr.outvars
    return out, {v for v in residuals if isinstance(v, jax.extend.core.Var)}


@pytest.mark.parametrize("policy", [None, jax_deconv.Policy(backward=jax_deconv.Policy())], ids=["", "backward_policy"])
@pytest.mark.parametrize("activation", [None, *ALL], ids=str)
def test_residuals(activation, policy):
    """The operands and one more: the result where that tells the slope, else what it is made of."""
    values = arrays(SMALL, jnp.bfloat16)
    out, residuals = kept(fused(SMALL, activation, policy=policy), *values)
    large = [v for v in residuals if v.aval.shape == out.aval.shape]
    assert len(residuals) == 2 + len(large) and len(large) == (activation is not None)
    assert all(v.aval.dtype == jnp.bfloat16 for v in residuals)
    assert (out in large) == (activation in FROM_OUTPUT)


@pytest.mark.parametrize("policy", [None, jax_deconv.Policy(backward=jax_deconv.Policy())], ids=["", "backward_policy"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_each_gradient_once(activation, policy):
    values = arrays(SMALL)
    step = jax.grad(lambda *v: jnp.sum(fused(SMALL, activation, policy=policy)(*v)), (0, 1, 2, 3))
    assert roles(step, *values) == "wxy"


def flops(function, *values):
    return jax.jit(function).lower(*values).compile().cost_analysis()["flops"]


@pytest.mark.parametrize("wanted, computed", [((0,), "xy"), ((1,), "wx"), ((2,), "x"), ((3,), "x"), ((0, 2), "xy")],
                         ids=str)
def test_a_gradient_that_is_not_asked_for_is_not_traced(wanted, computed):
    step = jax.grad(lambda *v: jnp.sum(fused(SMALL, "relu")(*v)), wanted)
    assert roles(step, *arrays(SMALL)) == computed


@pytest.mark.usefixtures("optimized")
def test_a_gradient_that_is_not_used_is_not_computed():
    """Asked for, dropped, and gone from the program: its cost is that of the other alone."""
    case = Case((16,), (4,), (2,), "SAME", inputs=8, outputs=8)
    x, w, bias, _ = arrays(case)
    f = fused(case)
    cotangent = jnp.ones(result_shape(case))
    pull = lambda x, w, ct: jax.vjp(f, x, w, bias)[1](ct)
    dx, dw, both = (flops(lambda *v: take(pull(*v)), x, w, cotangent)  # noqa: B023
                    for take in (lambda g: g[0], lambda g: g[1], lambda g: g[:2]))
    arguments = case.positional
    alone_dx = flops(lambda x, w, ct: jax_deconv.conv_transpose_data_gradient(ct, w, x.shape, *arguments),
                     x, w, cotangent)
    alone_dw = flops(lambda x, w, ct: jax_deconv.conv_transpose_filter_gradient(x, ct, w.shape, *arguments),
                     x, w, cotangent)
    assert (dx, dw) == (alone_dx, alone_dw)
    assert both > 1.5 * max(dx, dw)


# ---- transforms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mapped", list(itertools.product([False, True], repeat=4))[1:],
                         ids=lambda m: "".join(n for n, on in zip("xwbr", m) if on))
@pytest.mark.parametrize("function", ["conv", "conv_transpose"])
def test_vmap_over_any_arrays(function, mapped):
    """One convolution, fused where one letter absorbs all that is mapped; the value of a loop."""
    case = Case((4,), (3,), (2,), "SAME", layout="mixed", groups=2, inputs=2, outputs=2)
    if function == "conv":
        f = lambda x, w, b, r: jax_deconv.conv(x, w, (2,), "SAME", dimension_numbers=case.dimension_numbers, bias=b,
                                               feature_group_count=2, residual=r, activation="relu")
    else:
        f = fused(case, "relu")
    like = jax.eval_shape(lambda x, w: f(x, w, None, None), *case.operands()).shape
    axes = [axis if on else None for axis, on in zip((1, 3, 1, 0), mapped)]
    values = []
    for i, (shape, axis) in enumerate(zip((case.lhs_shape, case.rhs_shape, (4,), like), axes)):
        values.append(jnp.asarray(integers(shape if axis is None else (*shape[:axis], 3, *shape[axis:]), seed=i)))
    one = jax.jit(f)
    want = [one(*(v if axis is None else jnp.take(v, i, axis) for v, axis in zip(values, axes))) for i in range(3)]
    batched = jax.vmap(f, axes)
    np.testing.assert_array_equal(jax.jit(batched)(*values), np.stack(want))
    x, w, b, r = mapped
    counts = primitive_counts(batched, *values)
    assert len(roles(batched, *values)) == 1
    assert counts["conv_fused"] == ((x or w) and r and (w or not b))
    assert not {"scan", "while"} & set(counts)


@pytest.mark.parametrize("axes", [(0, None, None), (0, 0, None), (None, 0, 0), (0, 0, 0)], ids=str)
def test_vmap_stays_fused_without_a_residual(axes):
    x, w, bias, _ = arrays(SMALL)
    values = [v if axis is None else jnp.stack([v, v + 1]) for v, axis in zip((x, w, bias), axes)]
    f = fused(SMALL, "tanh")
    batched = jax.vmap(f, axes)
    assert primitive_counts(batched, *values)["conv_fused"] == 1
    want = [f(*(v if axis is None else v[i] for v, axis in zip(values, axes))) for i in range(2)]
    all_close(batched(*values), np.stack(want))
    assert jax.vmap(f, axes)(*(v if axis is None else v[:0] for v, axis in zip(values, axes))).shape[0] == 0


def test_vmap_of_grad_and_grad_of_vmap():
    values = [jnp.stack([v, 1 - v / 2]) for v in arrays(SMALL)]
    loss = lambda *v: jnp.sum(fused(SMALL, "tanh")(*v) ** 2)
    gradient = jax.grad(loss, (0, 1, 2, 3))
    want = jax.tree.map(lambda *rows: np.stack(rows), *(gradient(*(v[i] for v in values)) for i in range(2)))
    all_close(jax.jit(jax.vmap(gradient))(*values), want)
    all_close(jax.jit(jax.grad(lambda *v: jnp.sum(jax.vmap(loss)(*v)), (0, 1, 2, 3)))(*values), want)


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable], ids=["none", "dots"])
def test_remat(policy):
    values = arrays(SMALL)
    loss = lambda *v: jnp.sum(fused(SMALL, "gelu")(*v) ** 2)
    got, want = (jax.jit(jax.grad(f, (0, 1, 2, 3)))(*values) for f in (jax.checkpoint(loss, policy=policy), loss))
    all_close(got, want)


def test_scan_over_layers():
    """A stack of residual blocks, in which each keeps its output once for the activation."""
    case = Case((6,), (3,), (1,), "SAME", inputs=3, outputs=3, layout="first")
    x, w, bias, _ = arrays(case)
    kernels, biases = jnp.stack([w, w / 2, -w]) / 8, jnp.stack([bias, bias, 1 - bias])

    def scanned(x, kernels, biases):
        block = lambda x, layer: (fused(case, "relu")(x, *layer, x), None)
        return jnp.sum(jnp.sin(lax.scan(block, x, (kernels, biases))[0]))

    def unrolled(x, kernels, biases):
        for kernel, bias in zip(kernels, biases):
            x = jax.nn.relu(fused(case)(x, kernel) + bias[:, None] + x)
        return jnp.sum(jnp.sin(x))

    all_close(*(jax.jit(jax.value_and_grad(f, (0, 1, 2)))(x, kernels, biases) for f in (scanned, unrolled)))


def test_linear_transpose_with_a_bias():
    x, w, bias, residual = arrays(SMALL)
    cotangent = integers(residual.shape, seed=7)
    got = jax.linear_transpose(lambda x, b, r: fused(SMALL)(x, w, b, r), x, bias, residual)(cotangent)
    want = jax.vjp(lambda x, b, r: fused(SMALL)(x, w, b, r), x, bias, residual)[1](cotangent)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_export_with_a_symbolic_batch():
    f = fused(SMALL, "gelu")
    both = jax.jit(lambda x, w, b: (f(x, w, b), jax.grad(lambda *v: jnp.sum(f(*v)), (0, 1, 2))(x, w, b)))
    x, w, bias, _ = arrays(SMALL)
    batch = jax.export.symbolic_shape("b")[0]
    exported = jax.export.export(both)(jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype), w, bias)
    again = jax.export.deserialize(exported.serialize())
    for lhs in (x, x[:1]):
        all_close(again.call(lhs, w, bias), both(lhs, w, bias))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("policy", [None, jax_deconv.Policy(backward=jax_deconv.Policy())], ids=["", "backward_policy"])
def test_shard_map(check_vma, policy):
    case = Case((3,), (3,), (2,), "SAME", batch=16)
    values = arrays(case)
    f = fused(case, "tanh", policy=policy)
    mapped = jax.jit(jax.shard_map(f, mesh=jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,)),
                                   in_specs=(P("d"), P(), P(), P("d")), out_specs=P("d"), check_vma=check_vma))
    all_close(*(jax.value_and_grad(lambda *v: jnp.sum(g(*v) ** 2), (0, 1, 2, 3))(*values)  # noqa: B023
                for g in (mapped, f)))


# ---- sharding ------------------------------------------------------------------------------------------


def collectives(compiled) -> dict[str, int]:
    found = re.findall(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(",
                       compiled.as_text())
    return {name: found.count(name) for name in set(found)}


SPLITS = {  # lhs, rhs, result; whether the convolution sums over what is split
    "batch": (P("a"), P(), P("a"), False),
    "in": (P(None, None, "a"), P(None, "a"), P(), True),
    "out": (P(), P(None, None, "a"), P(None, None, "a"), False),
    "groups": (P(None, None, "a"), P(None, None, "a"), P(None, None, "a"), False),
}


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("function", ["conv", "conv_transpose"])
def test_sharding(function, split, types):
    """No communication but the sum of the convolution, before the activation."""
    lhs, rhs, out, summed = SPLITS[split]
    groups = 8 if split == "groups" else 1
    case = Case((5,), (3,), (2,), "SAME", groups=groups, batch=8, inputs=8, outputs=16)
    if function == "conv":
        f = lambda x, w, b, r: jax_deconv.conv(x, w, (2,), "SAME", dimension_numbers=case.dimension_numbers, bias=b,
                                               feature_group_count=groups, residual=r, activation="relu")
    else:
        f = fused(case, "relu")
    x, w, bias, _ = arrays(case)
    residual = jnp.asarray(integers(jax.eval_shape(lambda x, w: f(x, w, None, None), x, w).shape, seed=3))
    mesh = jax.make_mesh((8,), ("a",), axis_types=(types,))
    with jax.set_mesh(mesh):
        placed = [jax.device_put(v, NamedSharding(mesh, spec))
                  for v, spec in zip((x, w, bias, residual), (lhs, rhs, P(*out[2:]), out))]
        compiled = jax.jit(f).lower(*placed).compile()
        np.testing.assert_array_equal(compiled(*placed), f(x, w, bias, residual))
    assert collectives(compiled) == ({"all-reduce": 1} if summed else {})


def test_explicit_shardings_that_do_not_fit_are_refused():
    case = Case((5,), (3,), (2,), "SAME", batch=8, outputs=8)
    x, w, bias, residual = arrays(case)
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        put = lambda value, *spec: jax.device_put(value, NamedSharding(mesh, P(*spec)))
        x, w = put(x, "a"), put(w)
        whole = fused(case)(x, w, put(bias), put(residual))
        assert jax.typeof(whole).sharding.spec[0] == "a"
        for addends in ((put(bias, "a"), put(residual)), (put(bias), put(residual, None, None, "a"))):
            with pytest.raises(ValueError, match="bias and residual must be sharded.*reshard"):
                fused(case)(x, w, *addends)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("policy", [None, jax_deconv.Policy(backward=jax_deconv.Policy())], ids=["", "backward_policy"])
@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_training(types, policy):
    """Data parallel: the filter's gradient and the bias's are summed, and nothing else."""
    case = Case((5,), (3,), (2,), "SAME", batch=8)
    values = arrays(case)
    step = jax.grad(lambda *v: jnp.sum(fused(case, "relu", policy=policy)(*v) ** 2), (0, 1, 2, 3))
    mesh = jax.make_mesh((8,), ("a",), axis_types=(types,))
    with jax.set_mesh(mesh):
        placed = [jax.device_put(v, NamedSharding(mesh, spec)) for v, spec in zip(values, (P("a"), P(), P(), P("a")))]
        compiled = jax.jit(step).lower(*placed).compile()
        jax.tree.map(np.testing.assert_array_equal, compiled(*placed), step(*values))
    assert set(collectives(compiled)) == {"all-reduce"} and collectives(compiled)["all-reduce"] <= 2


# ---- a backward policy ---------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, "elu", "gelu", jnp.sin], ids=["none", "elu", "gelu", "sin"])
def test_backward_policy(activation):
    """The derivative, by convolutions that have the other policy; no forward mode."""
    backward = jax_deconv.Policy(precision="highest", deterministic=True)
    values = arrays(SMALL, scale=1 / 8)
    plain, other = (jax.grad(lambda *v: jnp.sum(f(*v) ** 2), (0, 1, 2, 3))  # noqa: B023
                    for f in (fused(SMALL, activation),
                              fused(SMALL, activation, policy=jax_deconv.Policy(backward=backward))))
    all_close(jax.jit(other)(*values), jax.jit(plain)(*values))
    policies = {e.primitive.name: e.params["policy"].deterministic for e in equations(jax.make_jaxpr(other)(*values))
                if e.primitive.name.startswith("conv_")}
    assert policies == {"conv_fused": False, "conv_w": True, "conv_y": True}
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(fused(SMALL, activation, policy=jax_deconv.Policy(backward=backward)), values, values)


# ---- gradients added to what is there ------------------------------------------------------------------


GRADIENTS = {
    "data": lambda case, x, w, ct, **kw: jax_deconv.conv_transpose_data_gradient(
        ct, w, x.shape, *case.positional, **case.keywords, **kw),
    "filter": lambda case, x, w, ct, **kw: jax_deconv.conv_transpose_filter_gradient(
        x, ct, w.shape, *case.positional, **case.keywords, **kw),
}


@pytest.mark.parametrize("into", [jnp.float32, jnp.bfloat16], ids=lambda t: t.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rank}d")
@pytest.mark.parametrize("which", GRADIENTS)
def test_accumulate_into(which, case, into):
    x, w, _, cotangent = arrays(case, jnp.bfloat16)
    alone = GRADIENTS[which](case, x, w, cotangent)
    there = jnp.asarray(integers(alone.shape, seed=8), into)
    got = GRADIENTS[which](case, x, w, cotangent, accumulate_into=there)
    assert got.dtype == into
    np.testing.assert_array_equal(got, there + alone.astype(into))


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("which", GRADIENTS)
def test_a_donated_accumulator_is_updated_in_place(which):
    """The program's last operation is the only one to read it, adds the gradient, and writes over it."""
    case = Case((8, 8), (4, 4), (2, 2), "SAME", inputs=16, outputs=8)
    x, w, _, cotangent = arrays(case)
    there = jnp.zeros_like(x if which == "data" else w)
    step = jax.jit(lambda acc, *v: GRADIENTS[which](case, *v, accumulate_into=acc), donate_argnums=0)
    compiled = step.lower(there, x, w, cotangent).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == there.nbytes
    entry = compiled.as_text().partition("\nENTRY")[2].splitlines()
    (name,) = (re.match(r"\s*(%\S+) =", line)[1] for line in entry if " parameter(0)" in line)
    (reader,) = (line for line in entry if re.search(rf"[(, ]{re.escape(name)}[,)]", line))
    assert re.match(r"\s*ROOT \S+ = \S+ fusion\(", reader) or " add(" in reader, reader
    pointer = there.unsafe_buffer_pointer()
    assert step(there, x, w, cotangent).unsafe_buffer_pointer() == pointer


@pytest.mark.parametrize("which", GRADIENTS)
def test_micro_batches(which):
    """Added up in a scan: the gradient of the whole batch, in float32 though the operands are bfloat16."""
    case = Case((5,), (3,), (2,), "SAME", batch=12, layout="first")
    x, w, _, cotangent = arrays(case, jnp.bfloat16)
    batches = [v.reshape(4, 3, *v.shape[1:]) for v in (x, cotangent)]

    def step(total, batch):
        x, cotangent = batch
        return GRADIENTS[which](case, x, w, cotangent, accumulate_into=total,
                                preferred_element_type=jnp.float32), None

    like = w if which == "filter" else batches[0][0]
    got, _ = jax.jit(lambda *b: lax.scan(step, jnp.zeros(like.shape), b))(*batches)
    parts = [GRADIENTS[which](case, a, w, ct, preferred_element_type=jnp.float32) for a, ct in zip(*batches)]
    np.testing.assert_array_equal(got, np.sum(parts, 0))
    if which == "filter":
        np.testing.assert_array_equal(got, GRADIENTS[which](case, x, w, cotangent, preferred_element_type=jnp.float32))


# ---- errors --------------------------------------------------------------------------------------------


def error(kind, message, case=SMALL, dtype=np.float32, **more):
    x, w = case.operands(dtype)
    with pytest.raises(kind, match=message):
        jax_deconv.conv_transpose(x, w, *case.positional, **case.keywords, **more)


def test_bad_addends():
    shape = result_shape(SMALL)
    error(ValueError, r"bias.*one number for each channel.*\(4,\); got \(3,\)", bias=jnp.ones(3))
    error(ValueError, r"residual.*shape of the result.*; got \(4,\)", residual=jnp.ones(4))
    error(ValueError, r"residual.*\(2, 4, 8\); got \(2, 8, 4\)", residual=jnp.ones((2, 8, 4)))
    error(TypeError, "residual.*float32.*int32", residual=jnp.ones(shape, jnp.int32))
    error(TypeError, "bias.*float32.*float16", bias=jnp.ones(4, jnp.float16))
    error(TypeError, "residual must be an array", residual=[[1.0]])


def test_bad_activations():
    error(ValueError, "activation.*leaky_relu.*clipped.*'swish'", activation="swish")
    error(ValueError, "clipped.*got 'clipped'", activation="clipped")
    error(TypeError, "activation.*got 3", activation=3)
    for activation in ("tanh", "gelu", "leaky_relu", "elu", clipped(0.5, 2), clipped(0, 200)):
        error(TypeError, rf"activation {re.escape(str(activations.resolve(activation)))}.*int8", activation=activation,
              dtype=np.int8)
    error(TypeError, "activation clipped.*uint8", activation=clipped(-1, 2), dtype=np.uint8)
    error(TypeError, "activation relu.*complex64", activation="relu", dtype=np.complex64)
    for make, message in ((lambda: leaky_relu(0), "negative_slope.*> 0; got 0"), (lambda: elu(-1.0), "alpha.*-1.0"),
                          (lambda: clipped(2, 1), "hi.*lo=2.*hi=1"), (lambda: clipped(0, np.inf), "hi.*finite.*inf"),
                          (lambda: clipped(np.nan, 1), "lo.*finite.*nan")):
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(TypeError, match="negative_slope.*'1'"):
        leaky_relu("1")


@pytest.mark.parametrize("which", GRADIENTS)
def test_bad_accumulators(which):
    x, w, _, cotangent = arrays(SMALL)
    like = x if which == "data" else w
    for there, kind, message in ((jnp.ones(3), ValueError, r"accumulate_into.*\(3,\)"),
                                 (like.astype(jnp.bfloat16), TypeError, "accumulate_into.*float32; got bfloat16"),
                                 (like.astype(jnp.int32), TypeError, "accumulate_into.*float32; got int32"),
                                 (1.0, TypeError, "accumulate_into must be an array")):
        with pytest.raises(kind, match=message):
            GRADIENTS[which](SMALL, x, w, cotangent, accumulate_into=there)
