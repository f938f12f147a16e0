# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Derivatives of every order, in both modes, in every operand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from grid import EDGES, EMPTY, Case, integers, sample
from jax import lax
from jax.test_util import check_grads
from jaxprs import roles

import jax_deconv


def bind(case: Case):
    return lambda x, w: jax_deconv.conv_transpose(x, w, *case.positional, **case.keywords)


def reference(case: Case):
    return lambda x, w: oracle.conv_transpose(x, w, *case.positional, **case.keywords)


def pullback(f, x, w, cotangent):
    return jax.vjp(f, x, w)[1](cotangent)


# ---- first order, by the oracle ------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*EDGES.values(), *sample(2, 6, 8, groups=2), *sample(1, 6, 9, groups=3)],
                         ids=[*EDGES, *map(str, sample(2, 6, 8, groups=2) + sample(1, 6, 9, groups=3))])
def test_gradients(case):
    x, w = case.operands()
    f = reference(case)
    cotangent = integers(f(x, w).shape, seed=2)
    dx, dw = jax.jit(functools.partial(pullback, bind(case)))(x, w, cotangent)
    np.testing.assert_array_equal(dx, oracle.gradient(lambda a: f(a, w), x, cotangent))
    np.testing.assert_array_equal(dw, oracle.gradient(lambda a: f(x, a), w, cotangent))


@pytest.mark.parametrize("case", EMPTY.values(), ids=EMPTY)
def test_gradients_of_nothing_are_zero(case):
    x, w = case.operands()
    out, pull = jax.vjp(bind(case), x, w)
    for operand, gradient in zip((x, w), pull(jnp.ones_like(out))):
        assert gradient.dtype == operand.dtype
        np.testing.assert_array_equal(gradient, np.zeros_like(operand))
    np.testing.assert_array_equal(jax.jvp(bind(case), (x, w), (x, w))[1], np.zeros(out.shape))


@pytest.mark.parametrize("edge", ["lopsided", "grouped_transposed", "output_padding"])
def test_complex_gradients(edge):
    """As for every bilinear operation of JAX: transposed, not conjugated."""
    case = EDGES[edge]
    x, w = case.operands(np.complex64)
    f = reference(case)
    cotangent = integers(f(x, w).shape, np.complex64, 2)
    dx, dw = jax.jit(functools.partial(pullback, bind(case)))(x, w, cotangent)
    np.testing.assert_array_equal(dx, oracle.gradient(lambda a: f(a, w), x, cotangent))
    np.testing.assert_array_equal(dw, oracle.gradient(lambda a: f(x, a), w, cotangent))


def test_holomorphic_gradient():
    case = EDGES["one_sample_one_channel"]
    x, w = map(jnp.asarray, case.operands(np.complex64))
    ours, theirs = (jax.grad(lambda x: jnp.sum(f(x, w, *case.positional) ** 2), holomorphic=True)(x)
                    for f in (jax_deconv.conv_transpose, lax.conv_transpose))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("edge", ["doubling", "grouped", "output_padding_beyond_stride", "no_space"])
def test_jvp_is_bilinear(edge):
    case = EDGES[edge]
    (x, w), (dx, dw) = case.operands(), case.operands(seed=4)
    out, tangent = jax.jit(functools.partial(jax.jvp, bind(case)))((x, w), (dx, dw))
    f = reference(case)
    np.testing.assert_array_equal(out, f(x, w))
    np.testing.assert_array_equal(tangent, f(dx, w) + f(x, dw))


def test_an_operand_without_a_tangent_costs_nothing():
    case = EDGES["grouped"]
    x, w = case.operands()
    f = bind(case)
    assert roles(lambda x, w: jax.jvp(lambda x: f(x, w), (x,), (x,)), x, w) == "xx"
    assert roles(lambda x, w: jax.jvp(f, (x, w), (x, w)), x, w) == "xxx"
    cotangent = jnp.ones(reference(case)(x, w).shape)
    assert roles(lambda x, w: jax.linear_transpose(lambda x: f(x, w), x)(cotangent), x, w) == "y"
    assert roles(lambda x, w: jax.linear_transpose(lambda w: f(x, w), w)(cotangent), x, w) == "w"


# ---- the family is closed ------------------------------------------------------------------------------


GROUPED = Case((3, 4), (3, 2), (2, 1), ((1, 0), (0, 1)), groups=2, layout="first", consistent=True,
               transpose_kernel=True, output_padding=(1, 0))


def family(case):
    """The three roles as functions of their two operands, and operands for them: y, w and x."""
    y, w = case.operands()
    x = integers(reference(case)(y, w).shape, seed=2)
    arguments = (*case.positional,)
    return {
        "x": (lambda y, w: jax_deconv.conv_transpose(y, w, *arguments, **case.keywords), "yw"),
        "y": (
            lambda x, w: jax_deconv.conv_transpose_data_gradient(x, w, y.shape, *arguments, **case.keywords),
            "xw",
        ),
        "w": (
            lambda y, x: jax_deconv.conv_transpose_filter_gradient(
                y, x, w.shape, *arguments, **case.keywords
            ),
            "yx",
        ),
    }, {"x": x, "w": w, "y": y}


@pytest.mark.parametrize("case", [GROUPED, EDGES["lopsided"], EDGES["zeros_around"]], ids=str)
@pytest.mark.parametrize("role", "xyw")
def test_the_transpose_of_a_role_is_another_role(role, case):
    functions, tensors = family(case)
    function, names = functions[role]
    a, b = (tensors[n] for n in names)
    for position, operand in enumerate(names):
        def linear(value, position=position):
            return function(value, b) if position == 0 else function(a, value)

        transpose = jax.linear_transpose(linear, tensors[operand])
        assert roles(transpose, tensors[role]) == operand
        # <out, f(a, b)> is one trilinear form, whichever tensor is made of the other two.
        made = transpose(tensors[role])[0]
        assert np.vdot(made, tensors[operand]) == np.vdot(tensors[role], linear(tensors[operand]))
        other, order = functions[operand]
        np.testing.assert_array_equal(made, other(*(tensors[n] for n in order)))


@pytest.mark.parametrize("role", "xyw")
def test_derivatives_of_a_gradient(role):
    """Each role is bilinear: one operand at a time, order 2, both modes, differences exact at eps=1."""
    functions, tensors = family(GROUPED)
    function, names = functions[role]
    a, b = (jnp.asarray(tensors[n]) for n in names)
    check_grads(lambda a: function(a, b), (a,), order=2, modes=("fwd", "rev"), eps=1.0)
    check_grads(lambda b: function(a, b), (b,), order=2, modes=("fwd", "rev"), eps=1.0)


@pytest.mark.parametrize("edge", ["kernel_below_stride", "deep_crop", "dilated", "space_3d", "depthwise",
                                  "grouped_transposed", "output_padding_beyond_stride", "output_shape_same"])
def test_order_two(edge):
    case = EDGES[edge]
    f = bind(case)
    x, w = map(jnp.asarray, case.operands())
    check_grads(lambda x: f(x, w), (x,), order=2, modes=("fwd", "rev"), eps=1.0)
    check_grads(lambda w: f(x, w), (w,), order=2, modes=("fwd", "rev"), eps=1.0)


@pytest.mark.parametrize(
    "case",
    [
        Case((3,), (3,), (2,), inputs=2, groups=2),
        Case((2,), (2,), (3,), "VALID", output_padding=(4,), transpose_kernel=True),
    ],
    ids=str,
)
def test_order_three(case, x64):
    """One operand at a time; then in both together, where the function is no longer linear."""
    f = bind(case)
    x, w = map(jnp.asarray, case.operands(np.float64))
    check_grads(lambda x: f(x, w), (x,), order=3, modes=("fwd", "rev"), eps=1.0)
    check_grads(lambda w: f(x, w), (w,), order=3, modes=("fwd", "rev"), eps=1.0)
    check_grads(f, (x, w), order=3, modes=("fwd",), eps=1e-4, atol=1e-4, rtol=1e-4)
    check_grads(f, (x, w), order=2, modes=("rev",), eps=1e-4, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", [Case((2,), (2,), (2,), inputs=1, outputs=2, batch=1),
                                  Case((2,), (3,), (1,), "SAME", inputs=2, outputs=1, batch=1,
                                       transpose_kernel=True)], ids=str)
def test_hessian_is_that_of_lax(case):
    x, w = map(jnp.asarray, case.operands())
    ours, theirs = (jax.jit(jax.hessian(lambda xw: jnp.sum(f(*xw, *case.positional) ** 3)))((x, w))
                    for f in (jax_deconv.conv_transpose, lax.conv_transpose))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert jax.tree.reduce(max, jax.tree.map(lambda a: jnp.abs(a).max(), ours)) > 0


@pytest.mark.parametrize("order", ["rrr", "rrf", "frf", "fff"])
def test_third_derivatives_are_those_of_lax(order):
    """Reverse and forward mode nested in any order, in a mixture of both operands."""
    case = Case((3,), (3,), (2,), "SAME", inputs=2, batch=1)
    x, w = map(jnp.asarray, case.operands())

    def nested(function):
        def loss(t):
            return jnp.sum(function(x * t, w * jnp.sin(t), *case.positional) ** 2)

        for mode in order:
            loss = {"r": jax.jacrev, "f": jax.jacfwd}[mode](loss)
        return jax.jit(loss)(jnp.float32(0.5))

    np.testing.assert_allclose(nested(jax_deconv.conv_transpose), nested(lax.conv_transpose), rtol=1e-5)


def test_linearize_and_the_two_jacobians():
    case = EDGES["one_sample_one_channel"]
    x, w = map(jnp.asarray, case.operands())
    f = bind(case)
    out, push = jax.linearize(f, x, w)
    np.testing.assert_array_equal(push(x, w), 2 * out)
    forward, reverse = (jax.jit(jacobian(f, argnums=(0, 1)))(x, w) for jacobian in (jax.jacfwd, jax.jacrev))
    for a, b in zip(forward, reverse):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16], ids=lambda t: t.__name__)
def test_second_order_under_preferred_element_type(wanted):
    """Tangents and cotangents of bfloat16 operands stay bfloat16 at every order."""
    case = Case((3,), (2,), (2,), "SAME", inputs=2)
    x, w = (jnp.asarray(a, jnp.bfloat16) for a in case.operands())

    def derivatives(function):
        def f(x, w):
            return function(x, w, *case.positional, preferred_element_type=wanted)

        def first(x, w):
            out, pull = jax.vjp(f, x, w)
            return pull(jnp.ones_like(out))

        return jax.jvp(f, (x, w), (x, w)), first(x, w), jax.jvp(first, (x, w), (x, w))[1]

    ours, theirs = derivatives(jax_deconv.conv_transpose), derivatives(lax.conv_transpose)
    for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_gradient_of_everything_at_once(x64):
    """Groups, bias, output_padding and a layout in one loss; each operand by finite differences."""
    case = Case(
        (3, 2), (3, 2), (2, 3), ((1, 0), (2, 1)), (1, 2), groups=2, layout="mixed",
        output_padding=(0, 2), consistent=True,
    )
    x, w = map(jnp.asarray, case.operands(np.float64))
    bias = jnp.asarray(integers((4,), np.float64, 5))
    check_grads(
        lambda x, w, b: jnp.sin(jax_deconv.conv_transpose(x, w, *case.positional, bias=b, **case.keywords)),
        (x, w, bias),
        order=1,
        modes=("fwd", "rev"),
        eps=1e-5,
    )
