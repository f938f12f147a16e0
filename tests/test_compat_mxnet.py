# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""`jax_deconv.compat.mxnet` against the formulas of MXNet's documentation and of its InferPad.

MXNet itself installs on no Python that this package supports.
"""

import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from grid import integers
from jax.interpreters import partial_eval
from jaxprs import equations

from jax_deconv import Policy
from jax_deconv.compat.mxnet import deconvolution, tuning_policy

LAYOUTS = ["NCW", "NWC", "NCHW", "NHWC", "NCDHW", "NDHWC"]


def reference(data, weight, kernel, stride=None, dilate=None, pad=None, adj=None, target_shape=None, num_group=1):
    """Channels first: out = stride * (in - 1) + extent - 2 * pad + adj; with a target, pad and adj follow from it."""
    rank = len(kernel)
    stride, dilate = stride or (1,) * rank, dilate or (1,) * rank
    pad, adj = list(pad or (0,) * rank), list(adj or (0,) * rank)
    geometry = []
    for i, (n, k, s, d) in enumerate(zip(data.shape[2:], kernel, stride, dilate)):
        whole = s * (n - 1) + 1 + (k - 1) * d
        if target_shape is not None and any(target_shape):
            excess = whole - target_shape[i]
            pad[i], adj[i] = (excess + 1) // 2, excess % 2
        geometry.append(types.SimpleNamespace(x_size=whole - 2 * pad[i] + adj[i], y_size=n, kernel=k, stride=s,
                                              dilation=d, pad_lo=pad[i]))
    return oracle.conv_x(data, weight, geometry, num_group)


def to_layout(array, layout):
    """From [A, B, *space] to where N, C and space stand in the layout."""
    space = [a for a in layout if a not in "NC"]
    return array.transpose([{"N": 0, "C": 1}.get(a, 2 + (space.index(a) if a in space else 0)) for a in layout])


CASES = {
    1: [dict(), dict(stride=(3,), pad=(1,), adj=(2,)), dict(dilate=(2,), num_group=2),
        dict(stride=(3,), target_shape=(9,)), dict(stride=(3,), target_shape=(10,), pad=(7,), adj=(5,))],
    2: [dict(stride=(2, 3), pad=(1, 0), adj=(0, 2)), dict(stride=(2, 2), pad=(1, 1), num_group=4),
        dict(stride=(2, 3), dilate=(2, 1), num_group=2, target_shape=(7, 8)),
        dict(stride=(2, 3), target_shape=(1, 10)), dict(stride=(2, 2), target_shape=(0, 0), pad=(1, 1))],
    3: [dict(stride=(2, 1, 3), pad=(0, 1, 1), adj=(1, 0, 2), num_group=2), dict(dilate=(1, 2, 2)),
        dict(stride=(2, 2, 2), target_shape=(4, 3, 5))],
}
KERNELS = {1: (4,), 2: (3, 4), 3: (2, 3, 4)}


@pytest.mark.parametrize("layout, kw", [(layout, kw) for layout in LAYOUTS for kw in CASES[len(layout) - 2]], ids=str)
def test_every_layout(layout, kw):
    kernel, groups = KERNELS[len(layout) - 2], kw.get("num_group", 1)
    data = integers((2, 2 * groups, *(4, 3, 2)[:len(kernel)]))
    weight, bias = integers((2 * groups, 3, *kernel), seed=1), integers((3 * groups,), seed=2)
    want = reference(data, weight, kernel, **kw) + bias.reshape(-1, *(1,) * len(kernel))
    got = jax.jit(lambda data, weight, bias: deconvolution(
        data, weight, bias, kernel, num_filter=3 * groups, no_bias=False, layout=layout, **kw))(
            to_layout(data, layout), to_layout(weight, layout), bias)
    np.testing.assert_array_equal(got, to_layout(want, layout))
    if layout[1] == "C":  # the default
        got = jax.jit(lambda data, weight: deconvolution(
            data, weight, kernel=kernel, num_filter=3 * groups, **kw))(data, weight)
        np.testing.assert_array_equal(got + bias.reshape(-1, *(1,) * len(kernel)), want)


def test_values_by_hand():
    data, weight = jnp.array([[[1.0, 2, 3]]]), jnp.array([[[1.0, 10, 100]]])
    whole = [1, 10, 102, 20, 203, 30, 300]
    for kw, want in [(dict(), whole), (dict(pad=(1,), adj=(1,)), whole[1:]), (dict(target_shape=(6,)), whole[1:]),
                     (dict(target_shape=(4,)), whole[2:6]), (dict(target_shape=(3,)), whole[2:5])]:
        got = deconvolution(data, weight, kernel=(3,), stride=(2,), num_filter=1, **kw)
        np.testing.assert_array_equal(got[0, 0], want, err_msg=str(kw))


def test_an_odd_target_without_a_stride():
    """The crop is defined, although MXNet refuses the adj of 1 that it infers."""
    data, weight = integers((1, 1, 4)), integers((1, 1, 3), seed=1)
    got = deconvolution(data, weight, kernel=3, target_shape=5, num_filter=1)
    np.testing.assert_array_equal(got, reference(data, weight, (3,), target_shape=(5,)))


def test_arguments_are_mxnet_s_in_its_order():
    names = [p.name for p in inspect.signature(deconvolution).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    assert names == ["data", "weight", "bias", "kernel", "stride", "dilate", "pad", "adj", "target_shape", "num_filter",
                     "num_group", "workspace", "no_bias", "cudnn_tune", "cudnn_off", "layout"]


def policy_of(**kw):
    jaxpr = jax.make_jaxpr(lambda: deconvolution(
        jnp.ones((1, 1, 3)), jnp.ones((1, 1, 2)), kernel=(2,), num_filter=1, **kw))()
    (policy,) = (e.params["policy"] for e in equations(jaxpr) if "policy" in e.params)
    return policy


def test_tuning():
    assert policy_of(cudnn_tune="off").autotune == "off"
    limited = policy_of(cudnn_tune="limited_workspace", workspace=64)
    assert (limited.autotune, limited.workspace_limit) == ("full", 64)
    fastest = policy_of(cudnn_tune="fastest", workspace=64)
    assert (fastest.autotune, fastest.workspace_limit) == ("full", None)
    assert policy_of(cudnn_off=True).algorithm == "xla"
    mixed = policy_of(cudnn_tune="limited_workspace", policy=Policy(autotune="cached", precision="highest"))
    assert (mixed.autotune, mixed.workspace_limit, mixed.precision.name) == ("cached", 512, "HIGHEST")
    assert tuning_policy() == Policy()


def test_what_is_skipped_is_not_computed():
    """MXNet's 'null' request for a gradient: nothing of it is in the program."""
    data, weight, bias = jnp.ones((2, 2, 4)), jnp.ones((2, 3, 3)), jnp.ones(3)

    def loss(data, weight, bias):
        return deconvolution(data, weight, bias, (3,), (2,), num_filter=3, no_bias=False).sum()

    for argnums, expected in ((0, "y"), (1, "w"), ((0, 1), "wy"), (2, "")):
        jaxpr = jax.make_jaxpr(jax.grad(loss, argnums))(data, weight, bias)
        kept, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))
        names = sorted(e.primitive.name.removeprefix("conv_") for e in equations(kept)
                       if e.primitive.name in ("conv_x", "conv_y", "conv_w"))
        assert "".join(names) == expected


DATA, WEIGHT = jnp.ones((2, 4, 5, 5)), jnp.ones((4, 3, 3, 3))


@pytest.mark.parametrize("change, parts", [
    (dict(kernel=()), ["kernel", "()", "2 spatial axes"]),
    (dict(kernel=(3, 2)), ["kernel", "(3, 3)", "(3, 2)"]),
    (dict(num_filter=0), ["num_filter", "3", "0"]),
    (dict(num_filter=4), ["num_filter", "3", "4"]),
    (dict(num_group=2), ["num_filter", "6", "3"]),
    (dict(num_group=3, num_filter=9), ["num_group", "4 channels of data"]),
    (dict(adj=(1, 1)), ["adj", "stride", "(1, 1)"]),
    (dict(adj=(-1, 0), stride=2), ["adj", ">= 0", "-1"]),
    (dict(pad=(-1, 0)), ["pad", ">= 0", "-1"]),
    (dict(pad=(4, 4)), ["size >= 1", "-1"]),
    (dict(stride=(0, 1)), ["stride", ">= 1"]),
    (dict(dilate=(1, 1, 1)), ["dilate", "(1, 1, 1)"]),
    (dict(target_shape=(8, 7)), ["target_shape[0]", "1..7", "8"]),
    (dict(target_shape=(7, 0)), ["target_shape[1]", "1..7", "0"]),
    (dict(layout="NHCW"), ["layout", "NHWC", "'NHCW'"]),
    (dict(layout="NCW"), ["layout", "NCHW", "'NCW'"]),
    (dict(layout="NHWC", data=jnp.ones((2, 5, 5, 4)), weight=jnp.ones((4, 2, 3, 3))), ["kernel", "(2, 3)", "(3, 3)"]),
    (dict(no_bias=False), ["bias", "no_bias=False"]),
    (dict(bias=jnp.ones(3)), ["bias", "no_bias=True"]),
    (dict(bias=jnp.ones(4), no_bias=False), ["bias", "(3,)", "(4,)"]),
    (dict(cudnn_tune="on"), ["cudnn_tune", "'on'", "limited_workspace"]),
    (dict(cudnn_tune="limited_workspace", workspace=-1), ["workspace_limit", "-1"]),
    (dict(weight=WEIGHT.astype(jnp.float16)), ["data and weight", "float16"]),
], ids=lambda v: str(v)[:60])
def test_refused(change, parts):
    arguments = dict(data=DATA, weight=WEIGHT, kernel=(3, 3), num_filter=3) | change
    with pytest.raises((ValueError, TypeError)) as caught:
        deconvolution(**arguments)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
