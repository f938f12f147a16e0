# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""vmap over every operand and axis: the value of a Python loop, in one convolution and no loop."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import Case, integers
from jaxprs import primitive_counts, roles

import jax_deconv

# One with groups and an order of axes that is not canonical, one without groups.
CASES = {
    "grouped": Case(
        (3,), (3,), (2,), ((1, 0),), groups=2, inputs=2, outputs=1, layout="mixed", consistent=True,
        output_padding=(1,),
    ),
    "dense": Case((2, 3), (2, 1), (2, 1), "SAME", inputs=2, outputs=3, layout="first", transpose_kernel=True),
}


def family(case):
    """The three roles as functions of two operands, and the operands' shapes."""
    lhs, rhs = case.lhs_shape, case.rhs_shape
    arguments, keywords = case.positional, case.keywords
    out = jax.eval_shape(lambda a, b: jax_deconv.conv_transpose(a, b, *arguments, **keywords),
                         jnp.zeros(lhs), jnp.zeros(rhs)).shape
    return {
        "x": (lambda y, w: jax_deconv.conv_transpose(y, w, *arguments, **keywords), lhs, rhs),
        "y": (
            lambda x, w: jax_deconv.conv_transpose_data_gradient(x, w, lhs, *arguments, **keywords),
            out,
            rhs,
        ),
        "w": (
            lambda y, x: jax_deconv.conv_transpose_filter_gradient(y, x, rhs, *arguments, **keywords),
            lhs,
            out,
        ),
    }


def mapped(shape, axis, size, seed=0):
    return integers(shape if axis is None else (*shape[:axis], size, *shape[axis:]), seed=seed)


def example(i, axes, *operands):
    """The i-th of each operand that is mapped."""
    return [a if axis is None else np.take(a, i, axis) for a, axis in zip(operands, axes)]


def loop(function, axes, size, *operands):
    return np.stack([function(*example(i, axes, *operands)) for i in range(size)])


def one_convolution(function, role, *operands):
    """Exactly one primitive of this role, and nothing that works example by example."""
    assert roles(function, *operands) == role
    assert not {"scan", "while", "concatenate", "cond"} & set(primitive_counts(function, *operands))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("role", "xyw")
def test_every_axis_of_every_operand(name, role):
    """First, inner and last axes, one operand or both, in all three roles."""
    function, first, second = family(CASES[name])[role]
    function = jax.jit(function)
    axes_of = [(None, *range(len(shape) + 1)) for shape in (first, second)]
    for axes in itertools.product(*axes_of):
        if axes == (None, None):
            continue
        a, b = mapped(first, axes[0], 3), mapped(second, axes[1], 3, 1)
        batched = jax.vmap(function, axes)
        one_convolution(batched, role, a, b)
        # One corner a pair of kinds is enough to execute: the others differ by the axis moved alone.
        if axes[0] in (None, 0, 2) and axes[1] in (None, 1, len(second)):
            np.testing.assert_array_equal(batched(a, b), loop(function, axes, 3, a, b), err_msg=str(axes))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("role", "xyw")
@pytest.mark.parametrize("size", [0, 1])
def test_batches_of_none_and_one(name, role, size):
    function, first, second = family(CASES[name])[role]
    for axes in ((0, None), (None, 1), (1, 0)):
        a, b = mapped(first, axes[0], size), mapped(second, axes[1], size, 1)
        got = jax.vmap(function, axes)(a, b)
        single = function(*(integers(s) for s in (first, second)))
        assert got.shape == (size, *single.shape) and got.dtype == single.dtype
        if size:
            np.testing.assert_array_equal(got, loop(function, axes, 1, a, b))


@pytest.mark.parametrize("name", CASES)
def test_out_axes(name):
    function, first, second = family(CASES[name])["x"]
    a, b = mapped(first, 0, 3), integers(second, seed=1)
    want = loop(function, (0, None), 3, a, b)
    for axis in range(want.ndim):
        np.testing.assert_array_equal(jax.vmap(function, (0, None), axis)(a, b), np.moveaxis(want, 0, axis))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("outer, inner", [((0, None), (None, 0)), ((None, 0), (0, None)), ((0, 0), (0, 0)),
                                          ((None, 0), (0, 0)), ((0, 0), (None, 0)), ((0, None), (0, None)),
                                          ((None, 0), (None, 0))], ids=str)
def test_nested(name, outer, inner):
    function, first, second = family(CASES[name])["x"]

    def stacked(shape, *axes, seed):
        sizes = [n for n, axis in zip((2, 3), axes) if axis is not None]
        return integers((*sizes, *shape), seed=seed)

    a = stacked(first, outer[0], inner[0], seed=0)
    b = stacked(second, outer[1], inner[1], seed=1)
    batched = jax.vmap(jax.vmap(function, inner), outer)
    one_convolution(batched, "x", a, b)
    want = loop(lambda a, b: loop(function, inner, 3, a, b), outer, 2, a, b)
    np.testing.assert_array_equal(batched(a, b), want)


def test_three_deep():
    function, first, second = family(CASES["grouped"])["x"]
    a, b = integers((2, 2, *first)), integers((2, 2, *second), seed=1)
    batched = jax.vmap(jax.vmap(jax.vmap(function, (0, 0)), (0, None)), (None, 0))
    one_convolution(batched, "x", a, b)
    want = np.stack([np.stack([np.stack([function(a[j, k], b[i, k]) for k in range(2)]) for j in range(2)])
                     for i in range(2)])
    np.testing.assert_array_equal(batched(a, b), want)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_vmap_of_grad(name, axes):
    """Per-example gradients: one convolution of each role, however the operands are mapped."""
    function, first, second = family(CASES[name])["x"]
    a, b = mapped(first, axes[0], 3), mapped(second, axes[1], 3, 1)
    cotangent = integers((3, *function(integers(first), integers(second)).shape), seed=2)

    def pullback(a, b, cotangent):
        return jax.vjp(function, a, b)[1](cotangent)

    batched = jax.vmap(pullback, (*axes, 0))
    assert roles(batched, a, b, cotangent).replace("x", "", 1) == "wy"  # beside the forward pass
    single = jax.jit(pullback)
    rows = [single(*example(i, axes, a, b), cotangent[i]) for i in range(3)]
    for got, want in zip(jax.jit(batched)(a, b, cotangent), zip(*rows)):
        np.testing.assert_array_equal(got, np.stack(want))


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_grad_of_vmap(name, axes):
    """An operand that is not mapped gathers the gradients of all examples."""
    function, first, second = family(CASES[name])["x"]
    a, b = mapped(first, axes[0], 3), mapped(second, axes[1], 3, 1)
    out, pull = jax.vjp(jax.vmap(function, axes), a, b)
    cotangent = integers(out.shape, seed=2)
    got = pull(cotangent)
    assert sorted(roles(pull, cotangent)) == ["w", "y"]

    def pullback(a, b, cotangent):
        return jax.vjp(function, a, b)[1](cotangent)

    single = jax.jit(pullback)
    rows = [single(*example(i, axes, a, b), cotangent[i]) for i in range(3)]
    for value, want, axis in zip(got, zip(*rows), axes):
        np.testing.assert_array_equal(value, np.sum(want, 0) if axis is None else np.stack(want))


def test_vmap_of_jvp_and_hessian():
    """Second order through a batch: a Python loop over the examples."""
    case = Case((2,), (2,), (2,), inputs=1, outputs=1, batch=1)
    function, first, second = family(case)["x"]
    a, b = integers((3, *first)), integers((3, *second), seed=1)
    hessian = jax.jit(jax.hessian(lambda a, b: jnp.sum(function(a, b) ** 3), argnums=(0, 1)))
    got = jax.vmap(hessian)(a, b)
    want = [hessian(a[i], b[i]) for i in range(3)]
    jax.tree.map(lambda value, *rows: np.testing.assert_array_equal(value, np.stack(rows)), got, *want)


def test_bias_and_everything_else_mapped():
    case = CASES["grouped"]
    a, b = integers((3, *case.lhs_shape)), integers((3, *case.rhs_shape), seed=1)
    bias = integers((3, case.groups * case.outputs), seed=2)
    function = functools.partial(lambda a, b, bias: jax_deconv.conv_transpose(
        a, b, *case.positional, bias=bias, **case.keywords))
    np.testing.assert_array_equal(jax.vmap(function)(a, b, bias), loop(function, (0, 0, 0), 3, a, b, bias))


def test_the_batch_multiplies_no_work():
    """Folding is exact: as many multiply-adds as the loop (a block-diagonal kernel would need more)."""
    function, first, second = family(CASES["grouped"])["x"]
    flops = jax.jit(function).lower(*(jnp.zeros(s) for s in (first, second))).cost_analysis()["flops"]
    for axes in ((0, None), (None, 0), (0, 0)):
        a, b = mapped(first, axes[0], 4), mapped(second, axes[1], 4)
        batched = jax.jit(jax.vmap(function, axes)).lower(a, b).cost_analysis()["flops"]
        assert batched <= 4.5 * flops, axes
