# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels of other frameworks in our modules and functions: the same output, and back to the same array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import integers

import jax_deconv
from jax_deconv import compat
from jax_deconv.weights import export_kernel, import_kernel

SPACE = {1: (3,), 2: (3, 4), 3: (2, 3, 2)}
STRIDES = {1: (2,), 2: (2, 3), 3: (1, 2, 3)}


def foreign(convention, rank, groups, layout=None):
    """A transposed convolution's kernel as the framework has it: 2 channels in and 3 out for each group."""
    outer, inner, space = groups * 2, 3, SPACE[rank]
    if convention in ("keras", "tensorflow"):
        return integers((*space, inner, outer))
    return integers((outer, *space, inner) if layout and layout[-1] == "C" else (outer, inner, *space))


def theirs(convention, x, kernel, rank, groups, layout=None):
    """The framework's function on channels-last `x`, without padding; channels-last again."""
    first = jnp.moveaxis(x, -1, 1)
    strides = STRIDES[rank]
    if convention == "torch":
        function = getattr(compat.torch, f"conv_transpose{rank}d")
        out = function(first, kernel, stride=strides, groups=groups)
    elif convention == "onnx":
        out = compat.onnx.conv_transpose(first, kernel, strides=strides, group=groups)
    elif convention == "mxnet":
        last = layout is not None and layout[-1] == "C"
        out = compat.mxnet.deconvolution(x if last else first, kernel, kernel=SPACE[rank], stride=strides,
                                         num_filter=3 * groups, num_group=groups, layout=layout)
        if last:
            return out
    elif convention == "keras":
        return compat.keras.conv_transpose(x, kernel, strides, output_padding=(0,) * rank)
    else:
        sizes = [(n - 1) * s + k for n, s, k in zip(x.shape[1:-1], strides, SPACE[rank])]
        return compat.tensorflow.conv_transpose(x, kernel, (len(x), *sizes, 3), strides, "VALID")
    return jnp.moveaxis(out, 1, -1)


CASES = [("torch", 1, 1, None), ("torch", 2, 3, None), ("torch", 3, 2, None), ("onnx", 2, 2, None),
         ("keras", 1, 1, None), ("keras", 2, 1, None), ("tensorflow", 3, 1, None), ("mxnet", 2, 2, None),
         ("mxnet", 1, 2, "NWC"), ("mxnet", 2, 3, "NHWC"), ("mxnet", 3, 1, "NDHWC"), ("mxnet", 2, 2, "NCHW")]


@pytest.mark.parametrize("transpose_kernel", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_function_with_an_imported_kernel(case, transpose_kernel):
    convention, rank, groups, layout = case
    x = integers((2, *(3, 4, 2)[:rank], groups * 2), seed=1)
    kernel = foreign(*case)
    want = theirs(convention, x, kernel, rank, groups, layout)
    ours = import_kernel(kernel, convention, groups=groups, transpose_kernel=transpose_kernel, layout=layout)
    space = "DHW"[:rank]
    got = jax_deconv.conv_transpose(
        x, ours, STRIDES[rank], [(0, 0)] * rank, transpose_kernel=transpose_kernel, use_consistent_padding=True,
        feature_group_count=groups, dimension_numbers=(f"N{space}C", f"{space}IO", f"N{space}C"))
    np.testing.assert_array_equal(got, want)


ORDERS = [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("NHWC", "WIHO", "CHNW"), ("CWHN", "HOWI", "NHWC")]


@pytest.mark.parametrize("transpose_kernel", [False, True])
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("convention", ["torch", "keras"])
def test_dimension_numbers(convention, order, transpose_kernel):
    """Letters say which axis is which: the framework's first spatial axis is the input's first."""
    lhs, _, out = order
    groups = 1 if convention == "keras" else 2
    kernel = foreign(convention, 2, groups)
    first, second = (a for a in lhs if a in "HW")
    image = integers((2, 3, 5, groups * 2), seed=1)  # N, first spatial axis, second, C
    want = theirs(convention, image, kernel, 2, groups)
    spelled = ["N", first, second, "C"]
    x = image.transpose([spelled.index(a) for a in lhs])
    ours = import_kernel(kernel, convention, groups=groups, transpose_kernel=transpose_kernel, dimension_numbers=order)
    # lax counts spatial axes in the kernel's order.
    strides = dict(zip((first, second), STRIDES[2]))
    got = jax_deconv.conv_transpose(
        x, ours, [strides[a] for a in order[1] if a in "HW"], [(0, 0)] * 2, transpose_kernel=transpose_kernel,
        use_consistent_padding=True, feature_group_count=groups, dimension_numbers=order)
    np.testing.assert_array_equal(got, want.transpose([spelled.index(a) for a in out]))
    np.testing.assert_array_equal(export_kernel(ours, convention, groups=groups, transpose_kernel=transpose_kernel,
                                                dimension_numbers=order), kernel)


@pytest.mark.parametrize("transpose_kernel", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_modules_with_an_imported_kernel(case, transpose_kernel):
    pytest.importorskip("flax")
    from flax import nnx

    import jax_deconv.linen
    import jax_deconv.nnx

    convention, rank, groups, layout = case
    x = jnp.asarray(integers((2, *(3, 4, 2)[:rank], groups * 2), seed=1))
    want = theirs(convention, x, foreign(*case), rank, groups, layout)
    kernel = import_kernel(foreign(*case), convention, groups=groups, transpose_kernel=transpose_kernel, layout=layout)
    bias = jnp.asarray(integers((3 * groups,), seed=2))
    settings = dict(kernel_size=SPACE[rank], strides=STRIDES[rank], padding=0, use_consistent_padding=True,
                    transpose_kernel=transpose_kernel, feature_group_count=groups)
    layer = jax_deconv.linen.ConvTranspose(features=3 * groups, **settings)
    fresh = jax.eval_shape(layer.init, jax.random.key(0), x)["params"]
    assert kernel.shape == fresh["kernel"].shape and kernel.dtype == fresh["kernel"].dtype
    np.testing.assert_array_equal(layer.apply({"params": {"kernel": kernel, "bias": bias}}, x), want + bias)
    module = jax_deconv.nnx.ConvTranspose(2 * groups, 3 * groups, **settings, rngs=nnx.Rngs(0))
    module.kernel[...], module.bias[...] = kernel, bias
    np.testing.assert_array_equal(module(x), want + bias)


@pytest.mark.parametrize("operation, transpose_kernel",
                         [("conv_transpose", False), ("conv_transpose", True), ("conv", False)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_round_trip(case, operation, transpose_kernel):
    convention, rank, groups, layout = case
    kernel = foreign(*case)
    kw = dict(groups=groups, operation=operation, transpose_kernel=transpose_kernel, layout=layout)
    ours = import_kernel(kernel, convention, **kw)
    assert isinstance(ours, jax.Array) and ours.dtype == kernel.dtype
    np.testing.assert_array_equal(export_kernel(ours, convention, **kw), kernel)
    # And the other way, from a kernel of ours.
    np.testing.assert_array_equal(import_kernel(export_kernel(ours, convention, **kw), convention, **kw), ours)


def test_from_one_framework_to_another():
    weight = foreign("torch", 2, 1)
    kernel = export_kernel(import_kernel(weight, "torch"), "keras")
    np.testing.assert_array_equal(kernel, weight.transpose(2, 3, 1, 0))


@pytest.mark.parametrize("groups", [1, 2])
def test_kernels_of_convolutions(groups):
    """PyTorch's, MXNet's and ONNX's [O, I, *kernel], Keras's [*kernel, I, O]: for `conv` and Flax's Conv."""
    x = integers((2, groups * 2, 6, 5), seed=1)
    weight = integers((groups * 3, 2, 3, 2))
    want = compat.torch.conv2d(x, weight, stride=(2, 1), padding=1, groups=groups)
    for convention, array in (("torch", weight), ("onnx", weight), ("mxnet", weight),
                              ("keras", weight.transpose(2, 3, 1, 0)), ("tensorflow", weight.transpose(2, 3, 1, 0))):
        for numbers in ((("NCHW", "OIHW", "NCHW")), ("NHWC", "HWIO", "NHWC")):
            kernel = import_kernel(array, convention, groups=groups, operation="conv", dimension_numbers=numbers)
            images = x if numbers[0] == "NCHW" else np.moveaxis(x, 1, -1)
            got = jax_deconv.conv(images, kernel, (2, 1), [(1, 1)] * 2, dimension_numbers=numbers,
                                  feature_group_count=groups)
            np.testing.assert_array_equal(got if numbers[0] == "NCHW" else jnp.moveaxis(got, -1, 1), want)
    flax = pytest.importorskip("flax.linen")
    kernel = import_kernel(weight, "torch", groups=groups, operation="conv")
    layer = flax.Conv(groups * 3, (3, 2), (2, 1), padding=1, use_bias=False, feature_group_count=groups)
    got = layer.apply({"params": {"kernel": kernel}}, np.moveaxis(x, 1, -1))
    np.testing.assert_allclose(np.moveaxis(got, -1, 1), want, rtol=1e-6)


def test_kernels_of_torch_modules():
    """Right out of torch's modules."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("flax")
    from jax_deconv.linen import ConvTranspose

    module = torch.nn.ConvTranspose2d(4, 6, (3, 4), (2, 3), padding=(1, 0), output_padding=(1, 2), groups=2)
    x = torch.randn(2, 4, 5, 3)
    for transpose_kernel in (False, True):
        kernel = import_kernel(module.weight.detach().numpy(), "torch", groups=2, transpose_kernel=transpose_kernel)
        layer = ConvTranspose(6, (3, 4), (2, 3), padding=(1, 0), output_padding=(1, 2), use_consistent_padding=True,
                              feature_group_count=2, transpose_kernel=transpose_kernel)
        variables = {"params": {"kernel": kernel, "bias": module.bias.detach().numpy()}}
        got = layer.apply(variables, x.permute(0, 2, 3, 1).numpy())
        np.testing.assert_allclose(got, module(x).detach().permute(0, 2, 3, 1), rtol=1e-5, atol=1e-5)


def test_under_jit_and_grad():
    kernel = integers((4, 3, 3, 2))
    f = lambda k: import_kernel(k, "torch", groups=2)
    np.testing.assert_array_equal(jax.jit(f)(kernel), f(kernel))
    weights = integers(f(kernel).shape, seed=1)
    # It only moves numbers: its transpose is the export.
    np.testing.assert_array_equal(jax.grad(lambda k: jnp.vdot(f(k), weights))(jnp.asarray(kernel)),
                                  export_kernel(weights, "torch", groups=2))


KERNEL = np.ones((4, 3, 3, 2), np.float32)


@pytest.mark.parametrize("kernel, convention, kw, parts", [
    (KERNEL, "jax", {}, ["convention", "'jax'", "torch"]),
    (KERNEL, "torch", dict(groups=0), ["groups", "0"]),
    (KERNEL, "torch", dict(groups=3), ["groups", "3", "4 channels", "(4, 3, 3, 2)"]),
    (KERNEL, "torch", dict(operation="deconv"), ["operation", "'deconv'", "'conv'"]),
    (KERNEL, "torch", dict(operation="conv", transpose_kernel=True), ["transpose_kernel", "'conv'"]),
    (KERNEL, "torch", dict(layout="NHWC"), ["layout", "'NHWC'", "'torch'"]),
    (KERNEL, "mxnet", dict(layout="NWC"), ["layout", "'NWC'", "NHWC"]),
    (KERNEL, "torch", dict(dimension_numbers=("NWC", "WIO", "NWC")), ["dimension_numbers"]),
    (KERNEL[0, 0, 0], "torch", {}, ["kernel", "(2,)"]),
    ([[[1.0]]], "torch", {}, ["kernel", "array"]),
], ids=lambda v: str(v)[:40])
def test_refused(kernel, convention, kw, parts):
    for function in (import_kernel, export_kernel):
        if function is export_kernel and kw.get("groups") == 3:
            continue  # its whole axis is another one
        with pytest.raises((ValueError, TypeError)) as caught:
            function(kernel, convention, **kw)
        assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_every_convention_is_tested():
    from jax_deconv.conventions import KERNEL_ORDERS

    assert {case[0] for case in CASES} == set(KERNEL_ORDERS)
