# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""What bad input gets: ValueError or TypeError with the argument's name, its value and what was expected."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_deconv

X, W = jnp.ones((2, 5, 4)), jnp.ones((3, 4, 6))  # NHC and HIO
GROUPED = jnp.ones((3, 2, 6))  # HIO for two groups


def call(lhs=X, rhs=W, strides=(2,), padding="SAME", **keywords):
    return jax_deconv.conv_transpose(lhs, rhs, strides, padding, **keywords)


# What is changed in a good call; what the message must hold, besides the argument's name.
BAD = {
    "strides an integer": (dict(strides=2), "strides", ["2", "1 integer"]),
    "strides a string": (dict(strides="2"), "strides", ["'2'"]),
    "strides none": (dict(strides=None), "strides", ["None"]),
    "strides of floats": (dict(strides=(2.0,)), "strides", ["2.0"]),
    "strides zero": (dict(strides=(0,)), "strides", ["0", ">= 1"]),
    "strides negative": (dict(strides=(-3,)), "strides", ["-3", ">= 1"]),
    "strides too many": (dict(strides=(2, 3)), "strides", [r"\(2, 3\)", "1 integer"]),
    "strides too few": (dict(strides=()), "strides", [r"\(\)"]),
    "rhs_dilation an integer": (dict(rhs_dilation=2), "rhs_dilation", ["2"]),
    "rhs_dilation zero": (dict(rhs_dilation=(0,)), "rhs_dilation", ["0", ">= 1"]),
    "rhs_dilation negative": (dict(rhs_dilation=(-1,)), "rhs_dilation", ["-1"]),
    "rhs_dilation too many": (dict(rhs_dilation=(1, 1)), "rhs_dilation", [r"\(1, 1\)"]),
    "padding same": (dict(padding="same"), "padding", ["'same'", "'SAME'"]),
    "padding SAME_LOWER": (dict(padding="SAME_LOWER"), "padding", ["'SAME_LOWER'", "'SAME'"]),
    "padding CIRCULAR": (dict(padding="CIRCULAR"), "padding", ["'CIRCULAR'"]),
    "padding an integer": (dict(padding=1), "padding", ["1", "pairs"]),
    "padding none": (dict(padding=None), "padding", ["None"]),
    "padding flat": (dict(padding=(1, 1)), "padding", [r"\(1, 1\)", "pairs"]),
    "padding of floats": (dict(padding=[(1.5, 0)]), "padding", ["1.5"]),
    "padding of triples": (dict(padding=[(1, 2, 3)]), "padding", [r"\(1, 2, 3\)"]),
    "padding too many": (dict(padding=[(1, 1), (2, 2)]), "padding", [r"\(2, 2\)"]),
    "padding beyond the result": (
        dict(padding=[(9, 9)], use_consistent_padding=True),
        "padding",
        [r"\(9, 9\)", "5", "3", "2"],
    ),
    "padding below the input": (dict(padding=[(-9, -9)]), "padding", [r"\(-9, -9\)", "5"]),
    "dimension_numbers two": (dict(dimension_numbers=("NHC", "HIO")), "dimension_numbers", []),
    "dimension_numbers a string": (dict(dimension_numbers="NHC"), "dimension_numbers", []),
    "dimension_numbers of another rank": (
        dict(dimension_numbers=("NHWC", "HWIO", "NHWC")),
        "dimension_numbers",
        [],
    ),
    "dimension_numbers without C": (dict(dimension_numbers=("NHX", "HIO", "NHC")), "dimension_numbers", []),
    "dimension_numbers repeated": (dict(dimension_numbers=("NCC", "HIO", "NHC")), "dimension_numbers", []),
    "feature_group_count zero": (dict(feature_group_count=0), "feature_group_count", ["0", ">= 1"]),
    "feature_group_count negative": (dict(feature_group_count=-2), "feature_group_count", ["-2"]),
    "feature_group_count a float": (dict(feature_group_count=2.0), "feature_group_count", ["2.0"]),
    "feature_group_count no divisor": (
        dict(feature_group_count=3),
        "feature_group_count",
        ["3", "4", r"\(3, 4, 6\)"],
    ),
    "feature_group_count no divisor of outputs": (
        dict(rhs=jnp.ones((3, 2, 5)), feature_group_count=2),
        "feature_group_count",
        ["2", "5"],
    ),
    "feature_group_count and whole kernel": (
        dict(feature_group_count=2),
        "feature_group_count",
        ["2", "4", r"\(3, 4, 6\)"],
    ),
    "channels of the kernel": (dict(rhs=jnp.ones((3, 3, 6))), "lhs", ["4", "3", r"\(3, 3, 6\)"]),
    "channels of the transposed kernel": (dict(transpose_kernel=True), "lhs", ["4", "6"]),
    "output_padding an integer": (dict(output_padding=1), "output_padding", ["1"]),
    "output_padding negative": (dict(output_padding=(-1,)), "output_padding", ["-1", ">= 0"]),
    "output_padding too many": (dict(output_padding=(1, 1)), "output_padding", [r"\(1, 1\)"]),
    "output_padding a float": (dict(output_padding=(0.5,)), "output_padding", ["0.5"]),
    "output_shape an integer": (dict(output_shape=10), "output_shape", ["10"]),
    "output_shape too small": (dict(output_shape=(8,)), "output_shape", ["8", "9", "10"]),
    "output_shape too large": (dict(output_shape=(11,)), "output_shape", ["11", "9", "10"]),
    "output_shape of the whole result": (dict(output_shape=(2, 10, 6)), "output_shape", [r"\(2, 10, 6\)"]),
    "output_shape negative": (dict(output_shape=(-1,)), "output_shape", ["-1"]),
    "bias of the input's channels": (dict(bias=jnp.ones(4)), "bias", ["6", "4"]),
    "bias a scalar": (dict(bias=jnp.ones(())), "bias", ["6"]),
    "bias of the result's rank": (dict(bias=jnp.ones((1, 1, 6))), "bias", ["6"]),
    "bias of another type": (dict(bias=jnp.ones(6, jnp.int32)), "bias", ["int32", "float32"]),
    "bias a number": (dict(bias=1.0), "bias", ["1.0"]),
    "types differ": (dict(lhs=X.astype(jnp.float16)), "lhs", ["float16", "float32"]),
    "ranks differ": (dict(rhs=jnp.ones((3, 3, 4, 6))), "rhs", [r"\(2, 5, 4\)", r"\(3, 3, 4, 6\)"]),
    "rank one": (dict(lhs=jnp.ones(4), rhs=jnp.ones(4)), "lhs", [r"\(4,\)"]),
    "lhs a list": (dict(lhs=[[[1.0]]]), "lhs", []),
    "rhs none": (dict(rhs=None), "rhs", ["None"]),
    "no default order": (
        dict(lhs=jnp.ones((1,) * 6), rhs=jnp.ones((1,) * 6), strides=(1,) * 4),
        "dimension_numbers",
        ["4"],
    ),
    "precision unknown": (dict(precision="exact"), "precision", ["'exact'"]),
    "preferred_element_type narrower": (
        dict(preferred_element_type=jnp.float16),
        "preferred_element_type",
        ["float16", "float32"],
    ),
    "preferred_element_type of another kind": (
        dict(preferred_element_type=jnp.int32),
        "preferred_element_type",
        ["int32", "float32"],
    ),
    "policy a string": (dict(policy="fast"), "policy", ["'fast'"]),
}


def message(function):
    with pytest.raises((ValueError, TypeError)) as caught:
        function()
    return str(caught.value)


@pytest.mark.parametrize("name", BAD)
def test_bad_argument(name):
    """The same message for a direct call and while tracing under jit."""
    change, argument, parts = BAD[name]
    text = message(lambda: call(**change))
    assert argument in text
    for part in parts:
        assert re.search(part, text), f"{part} is not in: {text}"
    arrays = {k: v for k, v in change.items() if k in ("lhs", "rhs", "bias") and isinstance(v, jax.Array)}
    rest = {k: v for k, v in change.items() if k not in arrays}
    assert message(lambda: jax.jit(lambda arrays: call(**arrays, **rest))(arrays)) == text


def test_nothing_is_computed_before_the_error():
    """Raised while the arguments are looked at: abstract values are enough."""
    x, w = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (X, W))
    for change, _, _ in BAD.values():
        if not {"lhs", "rhs", "bias"} & set(change):
            message(lambda change=change: jax.eval_shape(lambda x, w: call(x, w, **change), x, w))


def test_keyword_only_arguments_are_keyword_only():
    """So that lax may add a positional argument of its own."""
    positional = (X, W, (2,), "SAME", None, None, False, None, None, False)
    call_it = jax_deconv.conv_transpose
    call_it(*positional)
    with pytest.raises(TypeError, match="positional"):
        call_it(*positional, 1)


@pytest.mark.parametrize(
    "name",
    [
        "strides zero",
        "padding same",
        "feature_group_count zero",
        "output_padding negative",
        "output_shape too large",
        "channels of the kernel",
        "rhs_dilation zero",
    ],
)
def test_gradients_say_the_same(name):
    change, argument, parts = BAD[name]
    good = call()
    keywords = {"strides": (2,), "padding": "SAME"} | {
        k: v for k, v in change.items() if k not in ("lhs", "rhs")
    }
    rhs = change.get("rhs", W)
    for function in (lambda: jax_deconv.conv_transpose_data_gradient(good, rhs, X.shape, **keywords),
                     lambda: jax_deconv.conv_transpose_filter_gradient(X, good, rhs.shape, **keywords)):
        text = message(function)
        assert argument in text and all(re.search(part, text) for part in parts), text


CONV_BAD = {
    "window_strides an integer": (dict(window_strides=2), "window_strides", ["2"]),
    "window_strides zero": (dict(window_strides=(0,)), "window_strides", ["0"]),
    "padding unknown": (dict(padding="CAUSAL"), "padding", ["'CAUSAL'", "SAME"]),
    "padding too many": (dict(padding=[(0, 0), (0, 0)]), "padding", [r"\(0, 0\)"]),
    "padding crops everything": (dict(padding=[(-3, -3)]), "padding", ["-3", "5"]),
    "feature_group_count no divisor": (dict(feature_group_count=3), "feature_group_count", ["3", "4"]),
    "channels of the kernel": (dict(rhs=jnp.ones((6, 3, 3))), "lhs", ["4", "3"]),
    "rhs_dilation zero": (dict(rhs_dilation=(0,)), "rhs_dilation", ["0"]),
    "bias too long": (dict(bias=jnp.ones(7)), "bias", ["6", "7"]),
    "types differ": (dict(rhs=jnp.ones((6, 4, 3), jnp.bfloat16)), "lhs", ["float32", "bfloat16"]),
    "preferred_element_type narrower": (dict(preferred_element_type=jnp.bfloat16), "preferred_element_type",
                                        ["bfloat16"]),
}


@pytest.mark.parametrize("name", CONV_BAD)
def test_bad_argument_of_conv(name):
    change, argument, parts = CONV_BAD[name]
    arguments = (
        dict(lhs=jnp.ones((2, 4, 5)), rhs=jnp.ones((6, 4, 3)), window_strides=(2,), padding="SAME") | change
    )
    text = message(lambda: jax_deconv.conv(**arguments))
    assert argument in text and all(re.search(part, text) for part in parts), text


@pytest.mark.parametrize(
    "name",
    [
        n
        for n, (change, _, _) in BAD.items()
        if not {"output_padding", "output_shape", "bias", "feature_group_count", "policy"} & set(change)
    ],
)
def test_lax_refuses_it_too(name):
    """None of the above is a restriction of ours: lax takes none of them either, one way or another."""
    change, _, _ = BAD[name]
    arguments = dict(lhs=X, rhs=W, strides=(2,), padding="SAME") | change
    with pytest.raises(Exception):  # noqa: B017  lax raises whatever it stumbles over
        jax.block_until_ready(lax.conv_transpose(**arguments))


def test_operands_that_are_not_numbers():
    with pytest.raises((ValueError, TypeError)):
        call(lhs=np.array([[["a"] * 4] * 5] * 2))
