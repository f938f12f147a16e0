# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""`jax_deconv.compat.keras` and `.tensorflow` against their documentation and, where it is installed, Keras.

The reference knows one thing of TensorFlow: its SAME and VALID are defined for the convolution, of which this
is the transpose.
"""

import itertools
import os
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from grid import integers

from jax_deconv.compat.keras import conv_transpose
from jax_deconv.compat.tensorflow import conv_transpose as tf_conv_transpose

os.environ.setdefault("KERAS_BACKEND", "jax")  # read when Keras is imported, also by TensorFlow


def adjoint(x, w, sizes, pads, strides, dilations):
    """x [N, *Y, C_in], w [*R, C_out, C_in]: the transpose of the convolution from `sizes` that is padded by `pads`."""
    geometry = [types.SimpleNamespace(x_size=n, y_size=y, kernel=k, stride=s, dilation=d, pad_lo=p)
                for n, y, k, s, d, p in zip(sizes, x.shape[1:-1], w.shape, strides, dilations, pads)]
    out = oracle.conv_x(np.moveaxis(x, -1, 1), np.moveaxis(w, (-1, -2), (0, 1)), geometry)
    return np.moveaxis(out, 1, -1)


def same_low(size, kernel, stride, dilation):
    """TensorFlow's SAME: ceil(size / stride) outputs, and the smaller half of the padding first."""
    total = (-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size
    return max(total, 0) // 2


# Kernels and strides of every relation to each other; dilation where it makes a difference.
AXES = [(k, s, d) for k, s, d in itertools.product((1, 2, 3, 6), (1, 2, 5), (1, 2)) if d == 1 or k == 3]


def operands(size, kernel):
    return integers((2, *size, 3)), integers((*kernel, 2, 3), seed=1)


# ---- TensorFlow ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("kernel, stride, dilation", AXES)
def test_tensorflow_same_and_valid(kernel, stride, dilation, padding):
    """Every size that the convolution takes to 4, and no other; the values of the first and the last of them."""
    x, w = operands((4,), (kernel,))
    extent = (kernel - 1) * dilation + 1
    fits = [size for size in range(40) if (-(-size // stride) == 4 if padding == "SAME" else
                                           size >= extent and (size - extent) // stride + 1 == 4)]
    assert len(fits) == stride
    for size in range(40):
        call = lambda x, w: tf_conv_transpose(x, w, (2, size, 2), stride, padding, dilations=dilation)
        if size not in fits:
            with pytest.raises(ValueError, match=rf"output_shape\[0\] must be in \d+..\d+.*got {size}"):
                jax.eval_shape(call, x, w)
        elif size in (fits[0], fits[-1]):
            low = same_low(size, kernel, stride, dilation) if padding == "SAME" else 0
            np.testing.assert_array_equal(jax.jit(call)(x, w),
                                          adjoint(x, w, (size,), (low,), (stride,), (dilation,)))
        else:
            assert jax.eval_shape(call, x, w).shape == (2, size, 2)


@pytest.mark.parametrize("format, rank", [("NWC", 1), ("NCW", 1), ("NHWC", 2), ("NCHW", 2), ("NDHWC", 3), ("NCDHW", 3)])
def test_tensorflow_layouts_and_pairs(format, rank):
    x, w = operands((3, 2, 4)[:rank], (3, 4, 2)[:rank])
    strides, pads = (2, 3, 1)[:rank], ((1, 0), (2, 1), (0, 1))[:rank]
    # One more than the least size: the convolution's remainder.
    sizes = [(n - 1) * s + k - sum(p) + (s > 1) for n, s, k, p in zip(x.shape[1:-1], strides, w.shape, pads)]
    want = adjoint(x, w, sizes, [p[0] for p in pads], strides, (1,) * rank)
    first = format[1] == "C"
    place = (lambda batch, space, channels: (batch, channels, *space)) if first else (
        lambda batch, space, channels: (batch, *space, channels))
    turn = (lambda a: np.moveaxis(a, -1, 1)) if first else (lambda a: a)
    for said in (strides, list(place(1, strides, 1))):
        got = tf_conv_transpose(turn(x), w, place(2, sizes, 2), said, list(place((0, 0), pads, (0, 0))), format)
        np.testing.assert_array_equal(got, turn(want))


def test_tensorflow_by_hand():
    x, w = jnp.array([[[1.0], [2], [3]]]), jnp.array([1.0, 10, 100]).reshape(3, 1, 1)
    whole = [1, 10, 102, 20, 203, 30, 300]
    for size, padding, want in [(7, "VALID", whole), (8, "VALID", [*whole, 0]), (6, "SAME", whole[:6]),
                                (5, "SAME", whole[1:6])]:
        np.testing.assert_array_equal(tf_conv_transpose(x, w, (1, size, 1), 2, padding)[0, :, 0], want)


def test_equal_to_tensorflow():
    """TensorFlow itself, also with pairs, which it takes in two dimensions alone."""
    nn = pytest.importorskip("tensorflow").nn
    count = 0
    for kernel, stride in itertools.product((1, 2, 3, 4), (1, 2, 3)):
        x, w = operands((4, 3), (kernel, 2))
        for padding in ("SAME", "VALID", [(0, 0), (1, 0), (0, 1), (0, 0)]):
            for size in itertools.product(range(3, 17), (5, 6)):
                shape = (2, *size, 2)
                try:
                    got = tf_conv_transpose(x, w, shape, (stride, 2), padding)
                except ValueError:
                    continue
                count += 1
                np.testing.assert_array_equal(got, nn.conv2d_transpose(x, w, shape, (stride, 2), padding),
                                              err_msg=str((kernel, stride, padding, size)))
    assert count > 60


X, W = jnp.ones((2, 5, 5, 3)), jnp.ones((3, 3, 4, 3))


@pytest.mark.parametrize("change, parts", [
    (dict(output_shape=(2, 10, 10)), ["output_shape", "4 integers", "(2, 10, 10)"]),
    (dict(output_shape=(1, 10, 10, 4)), ["output_shape", "(2, 4)", "(1, 4)"]),
    (dict(output_shape=(2, 10, 10, 3)), ["output_shape", "(2, 4)", "(2, 3)"]),
    (dict(output_shape=(2, 8, 10, 4)), ["output_shape[0]", "9..10", "8"]),
    (dict(strides=(2, 2, 2, 1)), ["strides", "(2, 1)", "batch and channels"]),
    (dict(strides=0), ["strides", ">= 1"]),
    (dict(strides=(2, 2, 2)), ["strides", "(2, 2, 2)"]),
    (dict(padding="same"), ["padding", "'same'", "'SAME'"]),
    (dict(padding=[(1, 1), (1, 1)]), ["padding", "4"]),
    (dict(padding=[(1, 1), (1, 1), (1, 1), (0, 0)]), ["padding", "batch and channels", "(1, 1)"]),
    (dict(data_format="NWHC"), ["data_format", "'NWHC'", "NHWC"]),
    (dict(dilations=(1, 1, 2)), ["dilations", "(1, 1, 2)"]),
    (dict(filters=W[..., :2]), ["input has 3 channels", "takes 2"]),
    (dict(filters=W[0]), ["input and filters", "(3, 4, 3)"]),
], ids=lambda v: str(v)[:60])
def test_tensorflow_refuses(change, parts):
    with pytest.raises((ValueError, TypeError)) as caught:
        tf_conv_transpose(**(dict(input=X, filters=W, output_shape=(2, 10, 10, 4), strides=2) | change))
    assert all(part in str(caught.value) for part in parts), str(caught.value)


# ---- Keras ---------------------------------------------------------------------------------------------


def keras_sizes(n, kernel, stride, dilation, padding, extra):
    """The documented size, and where the result begins in the whole one."""
    extent = (kernel - 1) * dilation + 1
    if padding == "valid":
        return (n - 1) * stride + (max(extent, stride) if extra is None else extent + extra), 0
    size = n * stride if extra is None else (n - 1) * stride + extent % 2 + extra
    # What is cut of the whole result; the smaller half at the low end.
    return size, max((n - 1) * stride + extent - size, 0) // 2




@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("kernel, stride, dilation", AXES)
def test_keras(kernel, stride, dilation, padding):
    x, w = operands((4,), (kernel,))
    for extra in sorted({None, 0, stride // 2, stride - 1}, key=str):
        size, low = keras_sizes(4, kernel, stride, dilation, padding, extra)
        got = jax.jit(lambda x, w: conv_transpose(x, w, stride, padding, extra, dilation_rate=dilation))(x, w)
        np.testing.assert_array_equal(got, adjoint(x, w, (size,), (low,), (stride,), (dilation,)), err_msg=str(extra))


@pytest.mark.parametrize("kernel, stride", [*itertools.product((1, 2, 3, 6), (1, 2, 5))])
def test_keras_without_output_padding_is_tensorflow(kernel, stride):
    """Keras's default sizes are ones that TensorFlow's convolution takes to the input's; then both agree."""
    x, w = operands((4, 3), (kernel, 2))
    for padding in ("SAME", "valid"):
        got = jax.jit(lambda x, w: conv_transpose(x, w, (stride, 2), padding))(x, w)
        want = jax.jit(lambda x, w: tf_conv_transpose(x, w, got.shape, (stride, 2), padding.upper()))(x, w)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_keras_layouts(rank):
    x, w = operands((3, 2, 4)[:rank], (3, 4, 2)[:rank])
    kw = dict(strides=(2, 3, 1)[:rank], padding="same", output_padding=(1, 2, 0)[:rank])
    want = conv_transpose(x, w, **kw)
    got = conv_transpose(np.moveaxis(x, -1, 1), w, data_format="channels_first", **kw)
    np.testing.assert_array_equal(np.moveaxis(got, 1, -1), want)
    np.testing.assert_array_equal(conv_transpose(x, w, data_format="channels_last", **kw), want)


def test_keras_by_hand():
    x, w = jnp.array([[[1.0], [2], [3]]]), jnp.array([1.0, 10, 100]).reshape(3, 1, 1)
    whole = [1, 10, 102, 20, 203, 30, 300]
    for padding, extra, want in [("valid", None, whole), ("valid", 0, whole), ("valid", 1, [*whole, 0]),
                                 ("same", None, whole[:6]), ("same", 0, whole[1:6]), ("same", 1, whole[:6])]:
        got = conv_transpose(x, w, 2, padding, extra)
        np.testing.assert_array_equal(got[0, :, 0], want, err_msg=f"{padding} {extra}")


@pytest.mark.parametrize("change, parts", [
    (dict(padding="causal"), ["padding", "'causal'", "'same'"]),
    (dict(padding=1), ["padding", "1"]),
    (dict(strides=0), ["strides", ">= 1", "0"]),
    (dict(strides=(2, 2, 2)), ["strides", "(2, 2, 2)", "2 spatial axes"]),
    (dict(output_padding=2), ["output_padding", "strides", "2"]),
    (dict(output_padding=-1), ["output_padding", ">= 0", "-1"]),
    (dict(dilation_rate=(1, 0)), ["dilation_rate", "(1, 0)"]),
    (dict(data_format="NHWC"), ["data_format", "'NHWC'", "channels_last"]),
    (dict(kernel=W[..., :2]), ["inputs has 3 channels", "takes 2"]),
    (dict(kernel=W[0]), ["inputs and kernel", "(3, 4, 3)"]),
    (dict(kernel=W.astype(jnp.float16)), ["inputs and kernel", "float16"]),
    (dict(inputs=X[:, :0]), ["size >= 1", "input size 0"]),
], ids=lambda v: str(v)[:60])
def test_keras_refuses(change, parts):
    with pytest.raises((ValueError, TypeError)) as caught:
        conv_transpose(**(dict(inputs=X, kernel=W, strides=2) | change))
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_equal_to_keras():
    """Keras itself, on JAX: the whole grid of one axis."""
    ops = pytest.importorskip("keras").ops
    for kernel, stride, dilation, padding in itertools.product((1, 2, 3, 4), (1, 2, 3), (1, 2), ("same", "valid")):
        x, w = operands((4,), (kernel,))
        for extra in (None, *range(stride)):
            want = ops.conv_transpose(x, w, stride, padding, extra, "channels_last", dilation)
            got = conv_transpose(x, w, stride, padding, extra, "channels_last", dilation)
            np.testing.assert_array_equal(got, want, err_msg=str((kernel, stride, dilation, padding, extra)))
