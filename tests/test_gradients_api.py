# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""The two gradients as functions, and `conv`'s derivatives, against the canonical oracle."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from grid import EDGES, EMPTY, Case, integers, sample
from jaxprs import roles

import jax_deconv

CASES = {
    **EDGES,
    **{f"no_{k}": v for k, v in EMPTY.items()},
    **{str(c): c for c in sample(2, 8, 11, groups=2)},
}


def everything(case, dtype=np.float32):
    x, w = map(jnp.asarray, case.operands(dtype))
    out, pull = jax.vjp(lambda x, w: jax_deconv.conv_transpose(x, w, *case.positional, **case.keywords), x, w)
    cotangent = jnp.asarray(integers(out.shape, dtype, 2))
    return x, w, cotangent, *pull(cotangent)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equal_to_vjp(case):
    x, w, cotangent, dx, dw = everything(case)
    got_dx = jax_deconv.conv_transpose_data_gradient(cotangent, w, x.shape, *case.positional, **case.keywords)
    got_dw = jax_deconv.conv_transpose_filter_gradient(
        x, cotangent, w.shape, *case.positional, **case.keywords
    )
    for got, want in ((got_dx, dx), (got_dw, dw)):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.complex64], ids=lambda t: t.__name__)
def test_in_other_types(dtype):
    case = EDGES["grouped"]
    x, w, cotangent, dx, dw = everything(case, dtype)
    np.testing.assert_array_equal(
        jax_deconv.conv_transpose_data_gradient(cotangent, w, x.shape, *case.positional, **case.keywords), dx)
    np.testing.assert_array_equal(
        jax_deconv.conv_transpose_filter_gradient(x, cotangent, w.shape, *case.positional, **case.keywords),
        dw,
    )


def test_integers_have_these_functions_too():
    """There is no vjp of integers; the functions are exact all the same."""
    case = EDGES["grouped_transposed"]
    *_, want_dx, want_dw = everything(case)
    x, w = case.operands(np.int32)
    cotangent = integers(jax.eval_shape(lambda x, w: jax_deconv.conv_transpose(
        x, w, *case.positional, **case.keywords), x, w).shape, np.int32, 2)
    dx = jax_deconv.conv_transpose_data_gradient(cotangent, w, x.shape, *case.positional, **case.keywords)
    dw = jax_deconv.conv_transpose_filter_gradient(x, cotangent, w.shape, *case.positional, **case.keywords)
    assert dx.dtype == dw.dtype == jnp.int32
    np.testing.assert_array_equal(dx, want_dx)
    np.testing.assert_array_equal(dw, want_dw)


@pytest.mark.parametrize("dtype, wanted", [(jnp.bfloat16, jnp.float32), (jnp.int8, jnp.int32)],
                         ids=lambda t: t.__name__)
def test_preferred_element_type_is_that_of_the_gradient(dtype, wanted):
    """With sums that the narrow type could not hold."""
    x, w = jnp.full((4, 64, 8), 3, dtype), jnp.ones((1, 8, 8), dtype)
    cotangent = jnp.full((4, 64, 8), 5, dtype)
    dw = jax_deconv.conv_transpose_filter_gradient(
        x, cotangent, w.shape, (1,), "VALID", preferred_element_type=wanted
    )
    assert dw.dtype == wanted
    np.testing.assert_array_equal(dw, np.full(w.shape, 3 * 5 * 256))
    dx = jax_deconv.conv_transpose_data_gradient(cotangent * 6, w * 3, x.shape, (1,), "VALID",
                                                 preferred_element_type=wanted)
    assert dx.dtype == wanted
    np.testing.assert_array_equal(dx, np.full(x.shape, 5 * 6 * 3 * 8))


def test_one_convolution_each():
    case = EDGES["grouped"]
    x, w, cotangent, *_ = everything(case)
    assert roles(lambda dy, w: jax_deconv.conv_transpose_data_gradient(
        dy, w, x.shape, *case.positional, **case.keywords), cotangent, w) == "y"
    assert roles(lambda x, dy: jax_deconv.conv_transpose_filter_gradient(
        x, dy, w.shape, *case.positional, **case.keywords), x, cotangent) == "w"


def test_lists_as_shapes():
    case = EDGES["doubling"]
    x, w, cotangent, dx, dw = everything(case)
    np.testing.assert_array_equal(jax_deconv.conv_transpose_data_gradient(
        cotangent, w, list(x.shape), *case.positional, **case.keywords), dx)
    np.testing.assert_array_equal(jax_deconv.conv_transpose_filter_gradient(
        x, cotangent, list(w.shape), *case.positional, **case.keywords), dw)


@pytest.mark.parametrize("change", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)], ids=str)
def test_a_cotangent_of_another_shape_is_refused(change):
    case = EDGES["doubling"]
    x, w, cotangent, *_ = everything(case)
    wrong = jnp.zeros(np.add(cotangent.shape, change))
    with pytest.raises(ValueError, match="cotangent"):
        jax_deconv.conv_transpose_data_gradient(wrong, w, x.shape, *case.positional, **case.keywords)
    with pytest.raises(ValueError, match="cotangent"):
        jax_deconv.conv_transpose_filter_gradient(x, wrong, w.shape, *case.positional, **case.keywords)


# ---- the roles on canonical arrays ---------------------------------------------------------------------


def axis(x_size, kernel, stride, dilation, low, high):
    """An axis of the oracle's geometry from a convolution's arguments."""
    return types.SimpleNamespace(x_size=x_size, kernel=kernel, stride=stride, dilation=dilation, pad_lo=low,
                                 y_size=(x_size + low + high - (kernel - 1) * dilation - 1) // stride + 1)


GEOMETRIES = {
    "strided": [axis(7, 3, 2, 1, 1, 0), axis(6, 2, 3, 1, 0, 1)],
    "tail": [axis(8, 3, 3, 1, 0, 1), axis(5, 1, 2, 1, 0, 0)],  # rows that no window reaches
    "dilated": [axis(9, 3, 2, 3, 2, 3), axis(6, 2, 1, 4, -1, 2)],
    "cropped": [axis(9, 2, 2, 1, -3, -2)],
    "wide": [axis(3, 4, 1, 1, 5, 6)],  # windows that see padding alone
    "no_space": [],
    "space_3d": [axis(3, 2, 1, 1, 1, 0), axis(4, 3, 2, 1, 1, 1), axis(3, 1, 3, 1, 0, 0)],
}


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("groups, inputs, outputs", [(1, 2, 3), (2, 3, 1), (4, 1, 1)])
def test_conv_and_its_gradients(name, groups, inputs, outputs):
    geometry = GEOMETRIES[name]
    x = integers((2, groups * inputs, *(a.x_size for a in geometry)))
    w = integers((groups * outputs, inputs, *(a.kernel for a in geometry)), seed=1)
    pads = [(a.pad_lo, (a.y_size - 1) * a.stride + (a.kernel - 1) * a.dilation + 1 - a.x_size - a.pad_lo)
            for a in geometry]

    def conv(x, w):
        return jax_deconv.conv(x, w, [a.stride for a in geometry], pads, [a.dilation for a in geometry],
                               feature_group_count=groups)

    y, pull = jax.vjp(conv, x, w)
    np.testing.assert_array_equal(y, oracle.conv_y(x, w, geometry, groups))
    cotangent = integers(y.shape, seed=2)
    dx, dw = pull(cotangent)
    np.testing.assert_array_equal(dx, oracle.conv_x(cotangent, w, geometry, groups))
    np.testing.assert_array_equal(dw, oracle.conv_w(x, cotangent, geometry, groups))
    assert roles(pull, cotangent) == "wx"


def test_conv_transpose_is_the_transpose_of_conv():
    """The same arguments name one pair of operations, each the other's transpose."""
    case = Case((4, 3), (3, 2), (2, 2), "VALID", layout="first", transpose_kernel=True, groups=2)
    y, w = case.operands()
    out = jax_deconv.conv_transpose(y, w, *case.positional, **case.keywords)
    x = integers(out.shape, seed=3)
    back = jax_deconv.conv(x, w, case.strides, "VALID", dimension_numbers=case.dimension_numbers,
                           feature_group_count=2)
    assert back.shape == y.shape and np.vdot(back, y) == np.vdot(x, out)
