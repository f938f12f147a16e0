# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""What `conv_transpose` adds to lax's: groups, output_padding, output_shape, bias; and `conv`'s bias."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from grid import EDGES, EMPTY, Case, integers, replace, sample
from jax import lax

import jax_deconv

CORNERS = {**EDGES, **{f"no_{name}": case for name, case in EMPTY.items()}}


def check(case: Case, dtype=jnp.float32, bias=None):
    x, w = case.operands(dtype)
    # One compilation, where eager execution has one for every step around the convolution.
    got = jax.jit(
        lambda x, w, bias: jax_deconv.conv_transpose(x, w, *case.positional, bias=bias, **case.keywords)
    )(x, w, bias)
    want = oracle.conv_transpose(x, w, *case.positional, bias=bias, **case.keywords)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, want)
    return got


@pytest.mark.parametrize("case", CORNERS.values(), ids=CORNERS)
def test_edge(case):
    check(case)


@pytest.mark.parametrize("padding", ["VALID", ((2, 1),)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_kernel_without_taps(padding, transposed):
    """A spatial axis of size zero like any other: zeros, of the size that lax computes."""
    x, w = jnp.ones((2, 3, 4)), jnp.ones((0, 4, 4))
    f, theirs = (lambda x, w, g=g: g(x, w, (2,), padding, transpose_kernel=transposed)
                 for g in (jax_deconv.conv_transpose, lax.conv_transpose))
    out, pull = jax.vjp(f, x, w)
    np.testing.assert_array_equal(out, np.zeros(jax.eval_shape(theirs, x, w).shape))
    np.testing.assert_array_equal(pull(out + 1)[0], np.zeros(x.shape))
    assert pull(out + 1)[1].shape == w.shape


# ---- groups --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        *sample(1, 8, 2, groups=2),
        *sample(2, 8, 3, groups=3),
        *sample(3, 3, 4, groups=2),
        *sample(2, 5, 5, groups=4, inputs=1, outputs=1),
        *sample(1, 5, 6, groups=5, inputs=1, outputs=2),
    ],
    ids=str,
)
def test_groups(case):
    check(case)


@pytest.mark.parametrize("transposed", [False, True])
def test_groups_are_separate_convolutions(transposed):
    """Group by group through lax, which has none."""
    case = Case((3, 4), (3, 2), (2, 2), "SAME", groups=3, transpose_kernel=transposed)
    x, w = case.operands()
    parts = [lax.conv_transpose(a, b, *case.positional) for a, b in
             zip(np.split(x, 3, -1), np.split(w, 3, -1))]
    np.testing.assert_array_equal(jax_deconv.conv_transpose(x, w, *case.positional, **case.keywords),
                                  np.concatenate(parts, -1))


@pytest.mark.parametrize(
    "dtype", [jnp.int32, jnp.bfloat16, jnp.float16, jnp.complex64], ids=lambda t: t.__name__
)
@pytest.mark.parametrize("edge", ["grouped", "depthwise"])
def test_groups_in_other_types(dtype, edge):
    check(EDGES[edge], dtype)


# ---- output_padding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel, stride, dilation", [(3, 2, 1), (2, 3, 1), (3, 1, 2), (1, 4, 1)])
@pytest.mark.parametrize("padding", ["SAME", "VALID", ((1, 1),), ((0, 2),)], ids=str)
def test_output_padding_of_any_size(kernel, stride, dilation, padding):
    """The window on the full result grows at its high end: what is there, then zeros."""
    for consistent, extra in itertools.product((False, True), (0, 1, stride, 2 * stride + 7)):
        case = Case(
            (3,), (kernel,), (stride,), padding, (dilation,), batch=1, inputs=2, output_padding=(extra,),
            consistent=consistent,
        )
        got = check(case)
        plain = jax_deconv.conv_transpose(
            *case.operands(), *case.positional, use_consistent_padding=consistent
        )
        assert got.shape[1] == plain.shape[1] + extra
        np.testing.assert_array_equal(got[:, :plain.shape[1]], plain)


def test_output_padding_holds_what_the_taps_bring():
    """Padding cropped the last taps; output_padding brings them back before it brings zeros."""
    x, w = jnp.ones((1, 2, 1)), jnp.ones((4, 1, 1))
    got = jax_deconv.conv_transpose(x, w, (2,), [(0, 2)], use_consistent_padding=True, output_padding=(4,))
    np.testing.assert_array_equal(got[0, :, 0], [1, 1, 2, 2, 1, 1, 0, 0])


def test_output_padding_an_axis_at_a_time():
    for extra in itertools.product((0, 1, 3), repeat=2):
        check(
            Case(
                (2, 3), (3, 2), (2, 1), ((1, 1), (0, 1)), consistent=True, output_padding=extra,
                layout="mixed",
            )
        )


# ---- output_shape --------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["SAME", "VALID", ((1, 2),)], ids=str)
@pytest.mark.parametrize(
    "kernel, stride, dilation", [(3, 2, 1), (4, 3, 1), (2, 3, 2), (1, 2, 1), (3, 1, 1), (2, 4, 1)]
)
def test_every_possible_output_shape(padding, kernel, stride, dilation):
    """All sizes that the forward convolution takes to that of lhs; the next ones on both sides are errors."""
    for consistent, transposed in itertools.product((False, True), repeat=2):
        case = Case(
            (3,), (kernel,), (stride,), padding, (dilation,), batch=1, inputs=2, consistent=consistent,
            transpose_kernel=transposed,
        )
        lowest, highest = oracle.size_range(3, kernel, stride, dilation, padding, 0, consistent)
        for size in range(max(lowest, 0), highest + 1):
            assert check(replace(case, output_shape=(size,))).shape[1] == size
        for size in (lowest - 1, highest + 1):
            if size < 0:
                continue
            with pytest.raises(ValueError, match=rf"output_shape.*{max(lowest, 0)}\D+{highest}.*{size}"):
                check(replace(case, output_shape=(size,)))


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("size, kernel, strides, dilation", [
    ((7, 10), (3, 4), (2, 3), (1, 1)), ((6, 9), (2, 2), (4, 2), (1, 3)), ((5, 5), (5, 1), (1, 2), (1, 1)),
])
def test_output_shape_is_the_adjoint_from_that_size(padding, size, kernel, strides, dilation):
    """<conv(z), y> = <z, conv_transpose(y)> for every z of that size, by lax's own convolution."""
    numbers = ("NCHW", "OIHW", "NCHW")
    z, w = integers((2, 3, *size)), integers((4, 3, *kernel), seed=1)
    forward, pull = jax.vjp(
        lambda z: lax.conv_general_dilated(z, w, strides, padding, rhs_dilation=dilation), z
    )
    y = integers(forward.shape, seed=2)
    got = jax_deconv.conv_transpose(y, w, strides, padding, dilation, numbers, transpose_kernel=True,
                                    output_shape=size)
    np.testing.assert_array_equal(got, pull(y)[0])
    assert np.vdot(forward, y) == np.vdot(z, got)


def test_output_shape_with_pairs_keeps_the_low_side():
    x, w = integers((1, 3, 1)), integers((3, 1, 1), seed=1)
    full = jax_deconv.conv_transpose(x, w, (3,), [(1, 0)], use_consistent_padding=True, output_shape=(10,))
    short = jax_deconv.conv_transpose(x, w, (3,), [(1, 0)], use_consistent_padding=True, output_shape=(8,))
    np.testing.assert_array_equal(full[:, :8], short)


def test_output_shape_with_groups_and_layout():
    check(Case((3, 2), (3, 2), (2, 3), "SAME", groups=2, layout="mixed", output_shape=(5, 6)))


def test_output_shape_may_be_a_list_or_an_array():
    case = Case((3,), (3,), (2,))
    x, w = case.operands()
    for form in ([5], np.array([5]), (np.int64(5),)):
        assert jax_deconv.conv_transpose(x, w, (2,), "SAME", output_shape=form).shape == (2, 5, 2)


# ---- bias ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CORNERS.values(), ids=CORNERS)
def test_bias(case):
    check(case, bias=integers((case.groups * case.outputs,), seed=5))


@pytest.mark.parametrize(
    "edge", ["lopsided", "grouped_transposed", "output_padding_beyond_stride", "no_space"]
)
def test_bias_gradient_is_the_sum_over_batch_and_space(edge):
    """Also over the positions that output_padding adds."""
    case = EDGES[edge]
    x, w = case.operands()
    bias = jnp.asarray(integers((case.groups * case.outputs,), seed=5))
    out, pull = jax.vjp(
        lambda b: jax_deconv.conv_transpose(x, w, *case.positional, bias=b, **case.keywords), bias
    )
    cotangent = integers(out.shape, seed=6)
    channels_last = np.moveaxis(cotangent, case.dimension_numbers[2].index("C"), -1)
    np.testing.assert_array_equal(pull(cotangent)[0], channels_last.reshape(-1, bias.size).sum(0))


@pytest.mark.parametrize("bias_dtype", [jnp.bfloat16, jnp.float32], ids=lambda t: t.__name__)
def test_bias_beside_a_preferred_element_type(bias_dtype):
    """In the operands' type or in the result's; its gradient in its own."""
    x, w = jnp.ones((1, 2, 2), jnp.bfloat16), jnp.ones((2, 2, 3), jnp.bfloat16)
    bias = jnp.asarray([1, 2, 3], bias_dtype)
    out, pull = jax.vjp(lambda b: jax_deconv.conv_transpose(x, w, (2,), "SAME", bias=b,
                                                            preferred_element_type=jnp.float32), bias)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out[0], np.array([[3, 4, 5]] * 4))
    (gradient,) = pull(jnp.ones_like(out))
    assert gradient.dtype == bias_dtype
    np.testing.assert_array_equal(gradient.astype(jnp.float32), [4, 4, 4])


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("layout", ["first", "last", "mixed"])
def test_bias_of_conv(rank, layout):
    case = Case((4, 5, 3)[:rank], (2, 3, 2)[:rank], (2, 1, 2)[:rank], layout=layout, groups=2)
    x, w = case.operands()
    bias = integers((4,), seed=5)
    got = jax_deconv.conv(x, w, case.strides, "SAME", dimension_numbers=case.dimension_numbers,
                          feature_group_count=2, bias=bias)
    np.testing.assert_array_equal(got, oracle.conv(x, w, case.strides, "SAME", None, case.dimension_numbers,
                                                   feature_group_count=2, bias=bias))


# ---- the oracle itself ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", sample(2, 6, 7), ids=str)
def test_the_oracle_agrees_with_lax(case):
    """An oracle that is wrong in the same way as the package would prove nothing."""
    x, w = case.operands()
    np.testing.assert_array_equal(oracle.conv_transpose(x, w, *case.positional, **case.keywords),
                                  lax.conv_transpose(x, w, *case.positional, **case.keywords))
