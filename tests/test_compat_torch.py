# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""`jax_deconv.compat.torch` against the formulas of PyTorch's documentation and, where it is installed, PyTorch."""

import inspect
import itertools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from grid import integers
from jaxprs import equations, primitive_counts, roles

from jax_deconv import Policy
from jax_deconv.compat import torch as compat

TRANSPOSED = {1: compat.conv_transpose1d, 2: compat.conv_transpose2d, 3: compat.conv_transpose3d}
PLAIN = {1: compat.conv1d, 2: compat.conv2d, 3: compat.conv3d}


def each(value, rank):
    value = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return value * rank if len(value) == 1 else value


def axis(**sizes):
    return types.SimpleNamespace(**sizes)


def transposed_geometry(size, kernel, stride=1, padding=0, output_padding=0, dilation=1, **_):
    """H_out = (H_in - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1."""
    rank = len(size)
    rows = zip(size, kernel, *(each(v, rank) for v in (stride, padding, output_padding, dilation)))
    return [axis(x_size=(n - 1) * s - 2 * p + d * (k - 1) + e + 1, y_size=n, kernel=k, stride=s, dilation=d, pad_lo=p)
            for n, k, s, p, e, d in rows]


def plain_geometry(size, kernel, stride=1, padding=0, dilation=1, **_):
    """H_out = floor((H_in + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1); 'same' keeps the size."""
    rank = len(size)
    axes = []
    for i, (n, k, s, d) in enumerate(zip(size, kernel, each(stride, rank), each(dilation, rank))):
        if padding == "same":
            low, out = d * (k - 1) // 2, n
        else:
            low = 0 if padding == "valid" else each(padding, rank)[i]
            out = (n + 2 * low - d * (k - 1) - 1) // s + 1
        axes.append(axis(x_size=n, y_size=out, kernel=k, stride=s, dilation=d, pad_lo=low))
    return axes


# size, kernel, channels in and out of a group, arguments
TRANSPOSED_CASES = [
    ((5,), (3,), 2, 3, dict()),
    ((5,), (3,), 2, 3, dict(stride=2, padding=1, output_padding=1)),
    ((4,), (1,), 2, 3, dict(stride=3, output_padding=2)),
    ((4,), (4,), 3, 1, dict(stride=(2,), padding=(1,), groups=2)),
    ((4,), (2,), 1, 2, dict(stride=2, dilation=4, output_padding=3, padding=2)),
    ((3, 4), (3, 2), 2, 2, dict(stride=(2, 3), padding=(1, 0), output_padding=(1, 2), groups=3)),
    ((3, 4), (4, 4), 1, 1, dict(stride=2, padding=1, groups=4)),
    ((4, 3), (3, 3), 2, 2, dict(stride=(2, 1), output_padding=(1, 2), dilation=(1, 3))),
    ((4, 3), (3, 3), 2, 2, dict(stride=[2], padding=[3])),
    ((2, 3, 2), (2, 1, 3), 2, 1, dict(stride=(2, 3, 1), padding=(0, 0, 1), output_padding=(1, 2, 0), groups=2)),
]
PLAIN_CASES = [
    ((7,), (3,), 2, 3, dict()),
    ((7,), (3,), 2, 3, dict(stride=2, padding=1)),
    ((7,), (4,), 2, 3, dict(padding="same", dilation=2)),
    ((7,), (4,), 2, 1, dict(padding="valid", stride=3, groups=2)),
    ((6, 5), (3, 2), 2, 2, dict(stride=(2, 3), padding=(3, 0), dilation=(2, 1), groups=3)),
    ((6, 5), (2, 3), 2, 2, dict(padding="same")),
    ((6, 5), (3, 3), 1, 2, dict(stride=[2], groups=4)),
    ((3, 4, 3), (2, 1, 3), 2, 1, dict(stride=(1, 3, 2), padding=(0, 2, 1), groups=2)),
]


def operands(size, kernel, inputs, outputs, groups=1, transposed=True, batch=2):
    """Small integers: every sum is exact."""
    x = integers((batch, groups * inputs, *size))
    lead = (groups * inputs, outputs) if transposed else (groups * outputs, inputs)
    return x, integers((*lead, *kernel), seed=1), integers((groups * outputs,), seed=2)


def shaped(bias, rank):
    return bias.reshape(-1, *(1,) * rank)


@pytest.mark.parametrize("case", TRANSPOSED_CASES, ids=str)
def test_conv_transpose(case):
    size, kernel, inputs, outputs, kw = case
    x, w, b = operands(size, kernel, inputs, outputs, kw.get("groups", 1))
    want = oracle.conv_x(x, w, transposed_geometry(size, kernel, **kw), kw.get("groups", 1)) + shaped(b, len(size))
    function = jax.jit(lambda *arrays: TRANSPOSED[len(size)](*arrays, **kw))
    got = function(x, w, b)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(function(x[0], w, b), want[0])


@pytest.mark.parametrize("case", PLAIN_CASES, ids=str)
def test_conv(case):
    size, kernel, inputs, outputs, kw = case
    x, w, b = operands(size, kernel, inputs, outputs, kw.get("groups", 1), transposed=False)
    want = oracle.conv_y(x, w, plain_geometry(size, kernel, **kw), kw.get("groups", 1)) + shaped(b, len(size))
    function = jax.jit(lambda *arrays: PLAIN[len(size)](*arrays, **kw))
    np.testing.assert_array_equal(function(x, w, b), want)
    np.testing.assert_array_equal(function(x[0], w, b), want[0])


def test_values_by_hand():
    """Frozen, so that not even the reference is needed."""
    x, w = jnp.array([[[1.0, 2, 3]]]), jnp.array([[[1.0, 10, 100]]])
    np.testing.assert_array_equal(compat.conv_transpose1d(x, w, stride=2, padding=1, output_padding=1),
                                  [[[10, 102, 20, 203, 30, 300]]])
    np.testing.assert_array_equal(compat.conv_transpose1d(x, w, stride=2, output_size=(8,)),
                                  [[[1, 10, 102, 20, 203, 30, 300, 0]]])
    np.testing.assert_array_equal(compat.conv1d(x, w, padding="same"), [[[210, 321, 32]]])
    np.testing.assert_array_equal(compat.conv1d(x, w[..., :2], padding="same"), [[[21, 32, 3]]])


def test_arguments_are_torch_s_in_its_order():
    transposed = dict(input=inspect.Parameter.empty, weight=inspect.Parameter.empty, bias=None, stride=1, padding=0,
                      output_padding=0, groups=1, dilation=1)
    plain = dict(input=inspect.Parameter.empty, weight=inspect.Parameter.empty, bias=None, stride=1, padding=0,
                 dilation=1, groups=1)
    for functions, expected in ((TRANSPOSED, transposed), (PLAIN, plain)):
        for rank, function in functions.items():
            parameters = inspect.signature(function).parameters.values()
            assert {p.name: p.default for p in parameters if p.kind is not p.KEYWORD_ONLY} == expected
            assert list(expected) == [p.name for p in parameters][:len(expected)]
            assert function.__name__.endswith(f"{rank}d")
            assert f"torch.nn.functional.{function.__name__}" in function.__doc__


@pytest.mark.parametrize("size", [(7, 8), (8, 7), (7, 7), (8, 8)])
def test_output_size(size):
    """Each of the sizes that the convolution takes to 4: the output padding that makes it."""
    x, w, b = operands((4, 4), (3, 3), 2, 3)
    extra = tuple(n - 7 for n in size)
    want = compat.conv_transpose2d(x, w, b, 2, 1, extra)
    assert want.shape == (2, 3, *size)
    for spelled in (size, list(size), (2, 3, *size)):
        np.testing.assert_array_equal(compat.conv_transpose2d(x, w, b, 2, 1, output_size=spelled), want)
    for spelled in (size, (3, *size)):
        np.testing.assert_array_equal(compat.conv_transpose2d(x[0], w, b, 2, 1, output_size=spelled), want[0])


PADDED = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


@pytest.mark.parametrize("mode, padding, stride", [*itertools.product(PADDED, [2, (1, 3), "same", "valid"], [1, 2])])
def test_padding_modes(mode, padding, stride):
    if padding == "same" and stride == 2:
        pytest.skip("torch refuses it")
    x, w, b = operands((6, 5), (4, 3), 2, 2, groups=2, transposed=False)
    pads = {"same": [(1, 2), (1, 1)], "valid": [(0, 0)] * 2, 2: [(2, 2)] * 2, (1, 3): [(1, 1), (3, 3)]}[padding]
    padded = np.pad(x, [(0, 0), (0, 0), *pads], mode=PADDED[mode])
    want = oracle.conv_y(padded, w, plain_geometry(padded.shape[2:], w.shape[2:], stride), 2) + shaped(b, 2)
    np.testing.assert_array_equal(compat.conv2d(x, w, b, stride, padding, groups=2, padding_mode=mode), want)


# ---- what is refused -----------------------------------------------------------------------------------

X, W, V = jnp.ones((2, 4, 5, 5)), jnp.ones((4, 3, 3, 3)), jnp.ones((3, 4, 3, 3))

REFUSED = {
    "output_padding": (TRANSPOSED, dict(stride=2, output_padding=2), ["output_padding=(2, 2)", "stride=(2, 2)"]),
    "negative output_padding": (TRANSPOSED, dict(output_padding=-1), ["output_padding", "-1", ">= 0"]),
    "negative padding": (TRANSPOSED, dict(padding=-1), ["padding", "-1", ">= 0"]),
    "padding string": (TRANSPOSED, dict(padding="same"), ["padding", "'same'"]),
    "stride zero": (TRANSPOSED, dict(stride=0), ["stride", "0", ">= 1"]),
    "stride for three axes": (TRANSPOSED, dict(stride=(1, 2, 1)), ["stride", "(1, 2, 1)", "2 spatial axes"]),
    "dilation zero": (TRANSPOSED, dict(dilation=(1, 0)), ["dilation", "(1, 0)"]),
    "groups": (TRANSPOSED, dict(groups=3), ["groups", "3", "4 channels of input", "(4, 3, 3, 3)"]),
    "groups zero": (TRANSPOSED, dict(groups=0), ["groups", "0", ">= 1"]),
    "channels": (TRANSPOSED, dict(input=X[:, :2]), ["input has 2 channels", "(4, 3, 3, 3)", "takes 4"]),
    "no output": (TRANSPOSED, dict(padding=4), ["size >= 1", "-1", "input size 5", "kernel 3"]),
    "empty space": (TRANSPOSED, dict(input=X[:, :, :0]), ["input", "(2, 4, 0, 5)"]),
    "axes": (TRANSPOSED, dict(input=X[0, 0]), ["input", "(5, 5)", "4 axes"]),
    "kernel's axes": (TRANSPOSED, dict(weight=W[0]), ["weight", "(3, 3, 3)"]),
    "bias": (TRANSPOSED, dict(bias=jnp.ones(4)), ["bias", "(3,)", "(4,)"]),
    "types": (TRANSPOSED, dict(weight=W.astype(jnp.bfloat16)), ["input and weight", "float32", "bfloat16"]),
    "output_size small": (TRANSPOSED, dict(stride=2, output_size=(10, 11)), ["output_size[0]", "11..12", "10"]),
    "output_size large": (TRANSPOSED, dict(stride=2, output_size=(11, 13)), ["output_size[1]", "11..12", "13"]),
    "output_size of three": (TRANSPOSED, dict(output_size=(3, 7, 7)), ["output_size", "2 elements", "(3, 7, 7)"]),
    "output_size an integer": (TRANSPOSED, dict(output_size=7), ["output_size", "7"]),
    "output_size and padding": (TRANSPOSED, dict(stride=2, output_padding=1, output_size=(12, 12)), ["exclude"]),
    "same with a stride": (PLAIN, dict(padding="same", stride=2), ["padding='same'", "stride=2"]),
    "unknown padding": (PLAIN, dict(padding="SAME"), ["padding", "'SAME'", "'same'"]),
    "kernel too large": (PLAIN, dict(dilation=3), ["weight", "(7, 7)", "(5, 5)", "(3, 4, 3, 3)"]),
    "conv channels": (PLAIN, dict(input=X[:, :2]), ["input has 2 channels", "takes 4"]),
    "conv groups": (PLAIN, dict(groups=2), ["groups", "2", "3 of"]),
    "conv empty space": (PLAIN, dict(input=X[:, :, :0], padding=2), ["(2, 4, 0, 5)"]),
    "reflect": (PLAIN, dict(padding=5, padding_mode="reflect"), ["padding", "(5, 5)", "'reflect'", "less 1"]),
    "circular": (PLAIN, dict(padding=6, padding_mode="circular"), ["padding", "(6, 6)", "'circular'"]),
    "unknown mode": (PLAIN, dict(padding_mode="wrap"), ["padding_mode", "'wrap'", "'circular'"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    functions, change, parts = REFUSED[name]
    arguments = dict(input=X, weight=W if functions is TRANSPOSED else V) | change
    with pytest.raises((ValueError, TypeError)) as caught:
        functions[2](**arguments)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


@pytest.mark.parametrize("name", [name for name in REFUSED if name not in ("output_size and padding",)])
def test_torch_refuses_it_too(name):
    """But for an output_size beside an output_padding, which torch.nn.ConvTranspose2d ignores."""
    torch = pytest.importorskip("torch")
    functions, change, _ = REFUSED[name]
    change = dict(change)
    x, w = (change.pop(k, d) for k, d in (("input", X), ("weight", W if functions is TRANSPOSED else V)))
    change = {k: torch.tensor(np.asarray(v)) if isinstance(v, jax.Array) else v for k, v in change.items()}
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        theirs(torch, functions, 2, tensor(torch, x), tensor(torch, w), **change)


def tensor(torch, array):
    array = np.asarray(array)
    return torch.tensor(array.astype(np.float32)).to(torch.float32 if array.dtype == np.float32 else torch.bfloat16)


def theirs(torch, functions, rank, x, w, bias=None, output_size=None, padding_mode="zeros", **kw):
    """By function where there is one, else by module."""
    if output_size is None and padding_mode == "zeros":
        name = f"conv_transpose{rank}d" if functions is TRANSPOSED else f"conv{rank}d"
        return getattr(torch.nn.functional, name)(x, w, bias, **kw)
    groups = kw.get("groups", 1)
    if functions is TRANSPOSED:
        module = getattr(torch.nn, f"ConvTranspose{rank}d")(
            w.shape[0], w.shape[1] * groups, tuple(w.shape[2:]), bias=bias is not None, **kw)
        call = lambda: module(x, output_size)
    else:
        module = getattr(torch.nn, f"Conv{rank}d")(
            w.shape[1] * groups, w.shape[0], tuple(w.shape[2:]), bias=bias is not None, padding_mode=padding_mode, **kw)
        call = lambda: module(x)
    with torch.no_grad():
        module.weight.copy_(w)
        if bias is not None:
            module.bias.copy_(bias)
        return call()


# ---- PyTorch itself ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # an even kernel costs torch a copy
@pytest.mark.parametrize("functions, case", [(functions, case) for functions, cases in
                                             ((TRANSPOSED, TRANSPOSED_CASES), (PLAIN, PLAIN_CASES)) for case in cases],
                         ids=lambda v: "" if v is TRANSPOSED or v is PLAIN else str(v))
def test_equal_to_torch(functions, case):
    """Values and all three gradients; integers small enough that every sum is exact."""
    torch = pytest.importorskip("torch")
    size, kernel, inputs, outputs, kw = case
    arrays = operands(size, kernel, inputs, outputs, kw.get("groups", 1), functions is TRANSPOSED)
    tensors = [torch.tensor(a, requires_grad=True) for a in arrays]
    want = theirs(torch, functions, len(size), *tensors, **kw)
    cotangent = integers(tuple(want.shape), seed=3)
    want.backward(torch.tensor(cotangent))
    got, pull = jax.vjp(lambda *arrays: functions[len(size)](*arrays, **kw), *map(jnp.asarray, arrays))
    np.testing.assert_array_equal(got, want.detach().numpy())
    for a, t in zip(pull(jnp.asarray(cotangent)), tensors):
        np.testing.assert_array_equal(a, t.grad.numpy())


@pytest.mark.parametrize("mode, padding", [*itertools.product(PADDED, [2, (1, 3), "same"])])
def test_padding_modes_equal_torch_s(mode, padding):
    torch = pytest.importorskip("torch")
    x, w, b = operands((6, 5), (4, 3), 2, 2, groups=2, transposed=False)
    want = theirs(torch, PLAIN, 2, *map(torch.tensor, (x, w, b)), padding=padding, groups=2, padding_mode=mode)
    np.testing.assert_array_equal(compat.conv2d(x, w, b, padding=padding, groups=2, padding_mode=mode), want)


def test_output_size_equals_torch_s():
    torch = pytest.importorskip("torch")
    x, w, b = operands((4, 5), (3, 4), 2, 3, groups=2)
    for size in itertools.product((8, 9, 10), (12, 13)):
        want = theirs(torch, TRANSPOSED, 2, *map(torch.tensor, (x, w, b)), stride=(3, 2), padding=(2, 0), groups=2,
                      output_size=size)
        got = compat.conv_transpose2d(x, w, b, (3, 2), (2, 0), groups=2, output_size=size)
        np.testing.assert_array_equal(got, want)


# ---- empty arrays --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch, inputs, outputs", [(0, 2, 3), (2, 0, 3), (2, 2, 0)])
def test_empty(batch, inputs, outputs):
    """No batch, no input channels, no output channels: no values, or zeros."""
    for functions, geometry, transposed in ((TRANSPOSED, transposed_geometry, True), (PLAIN, plain_geometry, False)):
        x, w, _ = operands((5, 4), (3, 3), inputs, outputs, transposed=transposed, batch=batch)
        axes = geometry((5, 4), (3, 3), 2, 1)
        size = [a.x_size if transposed else a.y_size for a in axes]
        out, pull = jax.vjp(lambda x, w: functions[2](x, w, stride=2, padding=1), x, w)
        assert out.shape == (batch, outputs, *size) and not np.any(out)
        dx, dw = pull(jnp.ones_like(out))
        assert dx.shape == x.shape and dw.shape == w.shape
        assert not (batch == 0 and np.any(dw)) and not (outputs == 0 and np.any(dx))


# ---- the operators beneath -----------------------------------------------------------------------------

FLAGS = (True, True, False)


def operator_case(case, transposed):
    size, kernel, inputs, outputs, kw = case
    groups, rank = kw.get("groups", 1), len(size)
    if kw.get("padding") in ("same", "valid"):
        pytest.skip("operators know no padding by name")
    x, w, _ = operands(size, kernel, inputs, outputs, groups, transposed)
    geometry = (transposed_geometry if transposed else plain_geometry)(size, kernel, **kw)
    make = oracle.conv_x if transposed else oracle.conv_y
    y = make(x, w, geometry, groups)
    dy = integers(y.shape, seed=3)
    common = [each(kw.get(name, default), rank) for name, default in (("padding", 0), ("stride", 1), ("dilation", 1))]
    return x, w, y, dy, geometry, groups, common, each(kw.get("output_padding", 0), rank)


@pytest.mark.parametrize("case", PLAIN_CASES, ids=str)
def test_cudnn_convolution(case):
    x, w, y, dy, geometry, groups, common, _ = operator_case(case, False)
    np.testing.assert_array_equal(compat.cudnn_convolution(x, w, *common, groups, *FLAGS), y)
    dx, dw = oracle.conv_x(dy, w, geometry, groups), oracle.conv_w(x, dy, geometry, groups)
    np.testing.assert_array_equal(
        compat.cudnn_convolution_backward_input(list(x.shape), dy, w, *common, groups, *FLAGS), dx)
    np.testing.assert_array_equal(
        compat.cudnn_convolution_backward_weight(list(w.shape), dy, x, *common, groups, *FLAGS), dw)
    check_masks(lambda mask: compat.cudnn_convolution_backward(x, dy, w, *common, groups, *FLAGS, mask), (dx, dw), "xw")


@pytest.mark.parametrize("case", TRANSPOSED_CASES, ids=str)
def test_cudnn_convolution_transpose(case):
    x, w, y, dy, geometry, groups, (padding, *common), extra = operator_case(case, True)
    np.testing.assert_array_equal(
        compat.cudnn_convolution_transpose(x, w, padding, extra, *common, groups, *FLAGS), y)
    dx, dw = oracle.conv_y(dy, w, geometry, groups), oracle.conv_w(dy, x, geometry, groups)
    if all(e < s for e, s in zip(extra, common[0])):  # else dy is of a size that no convolution takes to x's
        np.testing.assert_array_equal(
            compat.cudnn_convolution_transpose_backward_input(dy, w, padding, *common, groups, *FLAGS), dx)
        np.testing.assert_array_equal(
            compat.cudnn_convolution_transpose_backward_weight(w.shape, dy, x, padding, *common, groups, *FLAGS), dw)
    check_masks(lambda mask: compat.cudnn_convolution_transpose_backward(
        x, dy, w, padding, extra, *common, groups, *FLAGS, mask), (dx, dw), "yw")


def check_masks(function, want, letters):
    """None where the mask is False, and nothing computed for it."""
    for mask in itertools.product((False, True), repeat=2):
        for got, expected, wanted in zip(jax.jit(lambda: function(mask))(), want, mask):
            assert got is None if not wanted else np.array_equal(got, expected)
        done = roles(lambda: function(mask))
        assert done == "".join(sorted(letter for letter, wanted in zip(letters, mask) if wanted))


def all_gradients(transposed):
    """The arguments of convolution_backward but the mask, and its values."""
    case = (TRANSPOSED_CASES if transposed else PLAIN_CASES)[5 if transposed else 4]
    x, w, _, dy, geometry, groups, (padding, stride, dilation), extra = operator_case(case, transposed)
    want = ((oracle.conv_y if transposed else oracle.conv_x)(dy, w, geometry, groups),
            oracle.conv_w(*((dy, x) if transposed else (x, dy)), geometry, groups), dy.sum((0, 2, 3)))
    return (dy, x, w), ((dy.shape[1],), stride, padding, dilation, transposed, extra, groups), want


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("mask", [*itertools.product((False, True), repeat=3)], ids=str)
def test_convolution_backward(transposed, mask):
    arrays, arguments, want = all_gradients(transposed)
    for a, b, wanted in zip(compat.convolution_backward(*arrays, *arguments, mask), want, mask):
        assert a is None if not wanted else np.array_equal(a, b)


@pytest.mark.parametrize("transposed", [False, True])
def test_convolution_backward_equals_torch_s(transposed):
    torch = pytest.importorskip("torch")
    arrays, arguments, _ = all_gradients(transposed)
    theirs = torch.ops.aten.convolution_backward(*map(torch.tensor, arrays), *arguments, (True,) * 3)
    for a, b in zip(compat.convolution_backward(*arrays, *arguments, (True,) * 3), theirs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_operators_refuse():
    x, w, dy = jnp.ones((2, 4, 6, 6)), jnp.ones((3, 4, 3, 3)), jnp.ones((2, 3, 3, 3))
    common = (1, 2, 1, 1, False, False, True)
    for call, part in [
        (lambda: compat.cudnn_convolution_backward(x, dy[..., :2], w, *common, (True, True)),
         r"grad_output.*\(2, 3, 3, 3\)"),
        (lambda: compat.cudnn_convolution_backward_input((2, 4, 8, 8), dy, w, *common), r"grad_output.*\(2, 3, 4, 4\)"),
        (lambda: compat.cudnn_convolution_backward_weight(w.shape, dy[:1], x, *common), "grad_output"),
        (lambda: compat.cudnn_convolution_transpose_backward_weight(w.shape, x, dy[:1], *common), "^input must have"),
        (lambda: compat.cudnn_convolution_backward(x, dy, w, *common, (True,)), "output_mask.*2"),
        (lambda: compat.cudnn_convolution_backward(x, dy, w, *common, (1, 0)), "output_mask"),
        (lambda: compat.convolution_backward(dy, x, w, (4,), 2, 1, 1, False, 0, 1, (True,) * 3), r"bias_sizes.*\(3,\)"),
        (lambda: compat.convolution_backward(dy[:1], x, w, None, 2, 1, 1, False, 0, 1, (False, False, True)),
         "grad_output"),
        (lambda: compat.convolution_backward(dy.astype(jnp.int32), x, w, None, 2, 1, 1, False, 0, 1, (True,) * 3),
         "input and grad_output and weight.*int32"),
        (lambda: compat.cudnn_convolution_add_relu(x, w, dy[0], None, None, 2, 1, 1, 1), r"z.*\(2, 3, 3, 3\)"),
        (lambda: compat.cudnn_convolution(x, w, 1, 2, 1, 1, "yes", False, True), "benchmark.*'yes'"),
    ]:
        with pytest.raises((ValueError, TypeError), match=part):
            call()


@pytest.mark.parametrize("alpha, bias", [*itertools.product([None, 1.0, -2.5], [False, True])])
def test_convolution_with_relu(alpha, bias):
    x, w, b = operands((6, 5), (3, 3), 2, 2, groups=2, transposed=False)
    b = b if bias else None
    y = oracle.conv_y(x, w, plain_geometry((6, 5), (3, 3), 2, 1), 2)
    z = integers(y.shape, seed=4)
    shift = 0 if b is None else shaped(b, 2)
    np.testing.assert_array_equal(compat.cudnn_convolution_relu(x, w, b, 2, 1, 1, 2), np.maximum(y + shift, 0))
    np.testing.assert_array_equal(compat.cudnn_convolution_add_relu(x, w, z, alpha, b, 2, 1, 1, 2),
                                  np.maximum(y + (1 if alpha is None else alpha) * z + shift, 0))
    counts = primitive_counts(lambda x: compat.cudnn_convolution_add_relu(x, w, z, None, b, 2, 1, 1, 2), x)
    assert counts["conv_fused"] == 1


# ---- policies ------------------------------------------------------------------------------------------


def policy_of(function):
    (policy,) = (e.params["policy"] for e in equations(jax.make_jaxpr(function)()) if "policy" in e.params)
    return policy


def test_settings_of_cudnn():
    x, w = jnp.ones((1, 2, 4)), jnp.ones((2, 2, 3))
    for benchmark, deterministic, tf32 in itertools.product((False, True), repeat=3):
        for call in (lambda: compat.cudnn_convolution(x, w, 0, 1, 1, 1, benchmark, deterministic, tf32),
                     lambda: compat.cudnn_convolution_transpose(x, w, 0, 0, 1, 1, 1, benchmark, deterministic, tf32),
                     lambda: compat.conv1d(x, w, policy=compat.cudnn_policy(benchmark, deterministic, tf32)),
                     lambda: compat.conv_transpose1d(x, w, policy=compat.cudnn_policy(benchmark, deterministic, tf32))):
            policy = policy_of(call)
            assert policy.autotune == ("full" if benchmark else "off")
            assert policy.deterministic is deterministic
            assert policy.precision.name == ("DEFAULT" if tf32 else "HIGHEST")
    assert compat.cudnn_policy() == Policy()


def test_bfloat16_and_transforms():
    x, w, b = (jnp.asarray(a, jnp.bfloat16) for a in operands((5,), (3,), 2, 3))
    f = lambda x, w, b: compat.conv_transpose1d(x, w, b, stride=2)
    want = f(x, w, b)
    assert want.dtype == jnp.bfloat16
    np.testing.assert_array_equal(jax.jit(f)(x, w, b), want)
    np.testing.assert_array_equal(jax.vmap(f, (0, None, None))(x, w, b), want)  # unbatched inputs
    assert roles(jax.grad(lambda x, w: f(x, w, b).astype(jnp.float32).sum(), (0, 1)), x, w) == "wxy"


def test_nothing_is_imported():
    import subprocess
    import sys
    code = ("import sys; from jax_deconv import compat, weights\n"
            "assert not {'torch', 'onnx', 'mxnet', 'keras', 'tensorflow'} & set(sys.modules), sys.modules.keys()")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_function_has_a_doctest():
    for name in compat.__all__:
        assert re.search(r">>> ", getattr(compat, name).__doc__), name
