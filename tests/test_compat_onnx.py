# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""`jax_deconv.compat.onnx` against the node tests of the onnx package and the specification's equations."""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from grid import integers

from jax_deconv.compat.onnx import conv_transpose


def attributes(node):
    from onnx import helper

    values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return {name: v.decode() if isinstance(v, bytes) else v for name, v in values.items()}


def node_tests():
    """The cases of the package's own backend test: (name, attributes, inputs, output)."""
    pytest.importorskip("onnx")
    import pathlib

    import onnx
    from onnx import numpy_helper

    data = pathlib.Path(onnx.__file__).parent / "backend/test/data/node"
    found = {}
    for folder in sorted(data.glob("test_convtranspose*")):  # up to onnx 1.19
        model = onnx.load(folder / "model.onnx")
        files = sorted((folder / "test_data_set_0").glob("input_*.pb")) + [folder / "test_data_set_0/output_0.pb"]
        *inputs, output = (numpy_helper.to_array(onnx.load_tensor(str(f))) for f in files)
        found[folder.name] = attributes(model.graph.node[0]), inputs, output
    if not found:
        import warnings

        with warnings.catch_warnings():  # it makes the cases of all operators
            warnings.simplefilter("ignore")
            from onnx.backend.test.case.node import collect_testcases
            cases = collect_testcases("ConvTranspose")
        for case in cases:
            ((inputs, (output,)),) = case.data_sets
            found[case.name] = attributes(case.model.graph.node[0]), inputs, output
    return found


def test_node_tests():
    cases = node_tests()
    assert len(cases) >= 9 and {"test_convtranspose", "test_convtranspose_autopad_same"} <= set(cases)
    for name, (kw, inputs, want) in cases.items():
        got = conv_transpose(*inputs, **kw)
        assert got.shape == want.shape and got.dtype == want.dtype, name
        np.testing.assert_array_equal(got, want, err_msg=name)


# ---- the specification ---------------------------------------------------------------------------------


def reference(X, W, auto_pad="NOTSET", dilations=None, group=1, output_padding=None, output_shape=None, pads=None,
              strides=None, opset=22, **_):
    """The operator's equations; what a size beyond the whole result adds is zeros at the high end."""
    rank = X.ndim - 2
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    extra, pads = output_padding or [0] * rank, pads or [0] * 2 * rank
    if auto_pad.startswith("SAME") and output_shape is None:
        output_shape = [n * s for n, s in zip(X.shape[2:], strides)]
    geometry = []
    for i, (n, k, s, d) in enumerate(zip(X.shape[2:], W.shape[2:], strides, dilations)):
        whole = s * (n - 1) + extra[i] + (k - 1) * d + 1
        if output_shape is None:
            start, size = pads[i], whole - pads[i] - pads[rank + i]
        else:
            size = output_shape[i]
            total = max(whole - size, 0)
            upper = {True: total // 2, False: total - total // 2}
            start = upper[(auto_pad == "SAME_UPPER") is (opset >= 11)]
        geometry.append(types.SimpleNamespace(x_size=size, y_size=n, kernel=k, stride=s, dilation=d, pad_lo=start))
    return oracle.conv_x(X, W, geometry, group)


CASES = [
    dict(),
    dict(auto_pad="VALID", strides=[2, 3]),
    dict(pads=[1, 0, 0, 2], strides=[2, 3]),
    dict(pads=[1, 0, 0, 2], strides=[2, 3], output_padding=[1, 2], dilations=[2, 1]),
    dict(output_padding=[1, 0], dilations=[2, 1]),
    dict(group=2, strides=[3, 2], kernel_shape=[3, 4]),
    *(dict(auto_pad=mode, strides=strides, dilations=dilations, output_padding=extra, opset=opset)
      for mode, opset in itertools.product(["SAME_UPPER", "SAME_LOWER"], [1, 11])
      for strides, dilations, extra in [([2, 3], [1, 1], None), ([1, 2], [2, 1], None), ([4, 5], [1, 1], None),
                                        ([2, 2], [2, 1], [1, 1])]),
    *(dict(output_shape=shape, strides=[3, 2], auto_pad=mode, opset=opset, output_padding=extra)
      for mode, opset in itertools.product(["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"], [1, 22])
      for shape, extra in [([10, 10], None), ([9, 7], None), ([15, 15], None), ([10, 7], [2, 1])]),
    dict(output_shape=[10, 7], pads=[9, 9, 9, 9], strides=[3, 2]),  # which are ignored
]


@pytest.mark.parametrize("kw", CASES, ids=str)
def test_equations(kw):
    group = kw.get("group", 1)
    X, W, B = integers((2, 2 * group, 4, 3)), integers((2 * group, 3, 3, 4), seed=1), integers((3 * group,), seed=2)
    want = reference(X, W, **kw) + B[:, None, None]
    np.testing.assert_array_equal(conv_transpose(X, W, B, **kw), want)


@pytest.mark.parametrize("rank", [1, 3])
def test_other_ranks(rank):
    X, W = integers((2, 2, *(3,) * rank)), integers((2, 3, *(2,) * rank), seed=1)
    kw = dict(strides=[2] * rank, pads=[0] * rank + [1] * rank)
    np.testing.assert_array_equal(conv_transpose(X, W, **kw), reference(X, W, **kw))


def test_reference_evaluator():
    """The package's own implementation, as far as it goes: one group, no negative crop, no large output_padding."""
    pytest.importorskip("onnx")
    from onnx.reference.ops.op_conv_transpose import ConvTranspose

    X, W, B = integers((2, 2, 4, 3)), integers((2, 3, 3, 4), seed=1), integers((3,), seed=2)
    count = 0
    for kw in CASES:
        large = any(e >= s for e, s in zip(kw.get("output_padding") or (), kw.get("strides", [1, 1])))
        if large or "output_shape" in kw or kw.get("group") or kw.get("opset", 22) < 11 or kw.get("strides") == [4, 5]:
            continue
        given = dict.fromkeys(("dilations", "kernel_shape", "output_padding", "output_shape", "pads", "strides"))
        given |= {k: v for k, v in kw.items() if k != "opset"} | {"group": 1}
        if given.get("auto_pad") == "VALID":
            given["pads"] = [0, 0, 0, 0]
        (want,) = ConvTranspose._run(None, X, W, B, **{"auto_pad": "NOTSET", **given})
        np.testing.assert_array_equal(conv_transpose(X, W, B, **kw), want, err_msg=str(kw))
        count += 1
    assert count >= 8


def test_values_by_hand():
    X, W = jnp.array([[[1.0, 2, 3]]]), jnp.array([[[1.0, 10, 100]]])
    whole = [1, 10, 102, 20, 203, 30, 300]
    for kw, want in [
        (dict(), whole),
        (dict(auto_pad="SAME_UPPER"), whole[:6]),
        (dict(auto_pad="SAME_LOWER"), whole[1:]),
        (dict(auto_pad="SAME_UPPER", opset=10), whole[1:]),
        (dict(output_shape=[4]), whole[2:6]),
        (dict(output_shape=[4], auto_pad="SAME_UPPER"), whole[1:5]),
        (dict(output_shape=[9]), [*whole, 0, 0]),
    ]:
        np.testing.assert_array_equal(conv_transpose(X, W, strides=[2], **kw)[0, 0], want, err_msg=str(kw))


X, W = jnp.ones((2, 4, 5, 5)), jnp.ones((4, 3, 3, 3))


@pytest.mark.parametrize("change, parts", [
    (dict(auto_pad="SAME"), ["auto_pad", "'SAME'", "SAME_UPPER"]),
    (dict(auto_pad="SAME_UPPER", pads=[0] * 4), ["pads", "auto_pad", "SAME_UPPER"]),
    (dict(pads=[1, 1]), ["pads", "4 integers", "[1, 1]"]),
    (dict(pads=[-1, 0, 0, 0]), ["pads", ">= 0", "-1"]),
    (dict(pads=[4, 4, 4, 4]), ["size >= 1", "-1", "input size 5"]),
    (dict(strides=2), ["strides", "2 integers", "2"]),
    (dict(strides=[0, 1]), ["strides", ">= 1", "[0, 1]"]),
    (dict(dilations=[1]), ["dilations", "[1]"]),
    (dict(group=3), ["group", "4 channels of X", "(4, 3, 3, 3)"]),
    (dict(kernel_shape=[3, 2]), ["kernel_shape", "(3, 3)", "[3, 2]"]),
    (dict(output_padding=[1, 1]), ["output_padding=(1, 1)", "strides=(1, 1)", "dilations=(1, 1)"]),
    (dict(output_shape=[2, 3, 7, 7]), ["output_shape", "2 integers", "[2, 3, 7, 7]"]),
    (dict(output_shape=[0, 7]), ["output_shape", ">= 1", "[0, 7]"]),
    (dict(B=jnp.ones(4)), ["bias", "(3,)", "(4,)"]),
    (dict(X=X[:, :3]), ["X has 3 channels", "takes 4"]),
    (dict(X=X[0]), ["X and W", "(4, 5, 5)"]),
    (dict(W=W.astype(jnp.float16)), ["X and W", "float32", "float16"]),
], ids=lambda v: str(v)[:60])
def test_refused(change, parts):
    with pytest.raises((ValueError, TypeError)) as caught:
        conv_transpose(**(dict(X=X, W=W) | change))
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_gradients_under_jit():
    f = jax.jit(lambda X, W: conv_transpose(X, W, strides=[2, 2], auto_pad="SAME_LOWER").sum())
    dX, dW = jax.grad(f, (0, 1))(X, W)
    assert dX.shape == X.shape and dW.shape == W.shape
    # By hand: an input in the middle meets 3 output channels at 9 taps each.
    assert dX[0, 0, 2, 2] == 27
