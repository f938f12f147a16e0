# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""On a CUDA device: cuDNN and kernels of ours compute, with the right values.  `benchmarks/gpu_claims.py` shows the
rest.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_deconv

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("optimized")]

STRICT = jax_deconv.Policy(strict=True, autotune="off")
# Of the norm of the error to that of the result: rounding of the result and of TF32's operands, which Hopper truncates.
TOLERANCE = {"float32": 1e-3, "bfloat16": 4e-3, "float16": 8e-4}


def error(got, want):
    got = np.asarray(got.astype(jnp.float32), np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def operands(lhs_shape, rhs_shape, dtype):
    keys = jax.random.split(jax.random.key(0))
    return tuple(jax.random.normal(k, s, jnp.float32).astype(dtype) for k, s in zip(keys, (lhs_shape, rhs_shape)))


def all_roles(lhs, rhs, policy=STRICT, **kw):
    out, vjp = jax.vjp(lambda a, b: jax_deconv.conv_transpose(a, b, policy=policy, **kw), lhs, rhs)
    return out, *vjp(out)


def check_roles(lhs, rhs, out, dlhs, drhs, tolerance, **kw):
    """The gradients are those of a cotangent that is the result."""
    want = oracle.conv_transpose(np.asarray(lhs.astype(jnp.float32)), np.asarray(rhs.astype(jnp.float32)), **kw)
    assert error(out, want) < tolerance
    # <f(a, b), f(a, b)> is <a, da> and <b, db>.
    square = float(np.vdot(np.asarray(out, np.float64), np.asarray(out, np.float64)))
    for value, gradient in ((lhs, dlhs), (rhs, drhs)):
        inner = float(np.vdot(np.asarray(value, np.float64), np.asarray(gradient, np.float64)))
        assert abs(inner - square) < 1e-2 * square


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_our_targets_serve_every_role(rank, dtype):
    lhs, rhs = operands((2, *(5, 6, 7)[:rank], 8), (*(3, 4, 3)[:rank], 8, 16), dtype)
    kw = dict(strides=(2,) * rank, padding="SAME")
    policy = dataclasses.replace(STRICT, algorithm="cudnn")
    program = jax.jit(lambda a, b: all_roles(a, b, policy, **kw)).lower(lhs, rhs).compile()
    text = program.as_text()
    assert all(f'custom_call_target="jax_deconv_{role}"' in text for role in "xyw")
    assert not re.search(r"__cudnn\$conv| convolution\(", text)
    check_roles(lhs, rhs, *program(lhs, rhs), TOLERANCE[dtype], **kw)


def test_a_window_that_ends_beyond_the_result():
    """cuDNN's heuristics die of such filter gradients of groups in 16 bits where they are asked (ffi/plan.cc)."""
    kw = dict(strides=(2, 2), padding=[(1, 1), (4, 2)], feature_group_count=64)
    lhs, rhs = operands((1, 5, 1, 64), (2, 5, 1, 64), "bfloat16")
    policy = dataclasses.replace(STRICT, algorithm="cudnn")
    check_roles(lhs, rhs, *all_roles(lhs, rhs, policy, **kw), TOLERANCE["bfloat16"], **kw)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("algorithm, lhs_shape, rhs_shape, kw", [
    ("phase", (2, 9, 8, 16), (4, 3, 16, 8), dict(strides=(2, 3), padding="SAME")),
    ("dense", (2, 9, 8, 16), (3, 3, 4, 8), dict(strides=(2, 2), padding="SAME", feature_group_count=4)),
    ("depthwise", (2, 9, 8, 24), (4, 4, 1, 24), dict(strides=(2, 2), padding="SAME", feature_group_count=24)),
    ("thin", (2, 9, 8, 24), (4, 4, 24, 3), dict(strides=(2, 2), padding="SAME")),
    ("thin", (2, 65, 40), (16, 40, 1), dict(strides=(8,), padding="SAME")),
    ("thin", (1, 128, 5, 48), (8, 1, 48, 16), dict(strides=(4, 1), padding="VALID")),  # a window of one chunk
    ("gemm", (2, 9, 8, 24), (2, 2, 24, 16), dict(strides=(2, 2), padding="VALID")),
], ids=lambda value: value if isinstance(value, str) else "")
def test_every_algorithm(algorithm, lhs_shape, rhs_shape, kw, dtype):
    lhs, rhs = operands(lhs_shape, rhs_shape, dtype)
    policy = dataclasses.replace(STRICT, algorithm=algorithm)
    if algorithm == "gemm":  # which has no filter gradient
        policy = dataclasses.replace(policy, backward=dataclasses.replace(STRICT, algorithm="cudnn"))
    program = jax.jit(lambda a, b: all_roles(a, b, policy, **kw)).lower(lhs, rhs).compile()
    assert ("jax_deconv_kernel" in program.as_text()) == (algorithm in ("depthwise", "gemm", "thin"))
    check_roles(lhs, rhs, *program(lhs, rhs), TOLERANCE[dtype], **kw)


@pytest.mark.parametrize("name, lhs_shape, rhs_shape, kw", [
    ("groups", (2, 9, 8, 16), (3, 3, 4, 8), dict(strides=(2, 2), padding="SAME", feature_group_count=4)),
    ("depthwise", (2, 9, 8, 21), (4, 4, 1, 21), dict(strides=(2, 2), padding="SAME", feature_group_count=21)),
    ("dilated", (2, 9, 8, 8), (3, 3, 8, 8), dict(strides=(2, 1), padding="VALID", rhs_dilation=(2, 3))),
    ("asymmetric", (2, 9, 8, 8), (4, 3, 8, 8), dict(strides=(2, 2), padding=[(0, 3), (2, 1)])),
    ("cropped", (2, 9, 8, 8), (3, 3, 8, 8), dict(strides=(2, 2), padding=[(-2, 1), (0, -1)])),
    ("output_padding", (2, 9, 8, 3), (3, 3, 3, 1), dict(strides=(2, 2), padding="SAME", output_padding=(2, 5))),
], ids=lambda value: value if isinstance(value, str) else "")
def test_odd_geometries(name, lhs_shape, rhs_shape, kw):
    lhs, rhs = operands(lhs_shape, rhs_shape, "float32")
    out = jax.jit(lambda a, b: jax_deconv.conv_transpose(a, b, policy=STRICT, **kw))(lhs, rhs)
    assert error(out, oracle.conv_transpose(np.asarray(lhs), np.asarray(rhs), **kw)) < TOLERANCE["float32"]


def test_types_that_no_gpu_library_takes():
    lhs, rhs = jnp.arange(2 * 5 * 3).reshape(2, 5, 3), jnp.arange(3 * 3 * 4).reshape(3, 3, 4)
    for dtype in (jnp.int32, jnp.complex64):
        a, b = lhs.astype(dtype), rhs.astype(dtype)
        want = oracle.conv_transpose(np.asarray(a), np.asarray(b), (2,), "SAME")
        np.testing.assert_array_equal(jax_deconv.conv_transpose(a, b, (2,), "SAME"), want)


def test_zero_sizes():
    lhs, rhs = jnp.zeros((0, 4, 3)), jnp.ones((3, 3, 5))
    out, dlhs, drhs = all_roles(lhs, rhs, strides=(2,), padding="SAME")
    assert out.shape == (0, 8, 5) and dlhs.shape == lhs.shape and not drhs.any()


def test_vmap_and_second_order():
    lhs, rhs = operands((3, 2, 6, 8), (3, 4, 8, 8), "float32")
    function = jax.vmap(lambda a, b: jax_deconv.conv_transpose(a, b, (2,), "SAME", precision="highest"))
    want = np.stack([oracle.conv_transpose(np.asarray(a), np.asarray(b), (2,), "SAME") for a, b in zip(lhs, rhs)])
    assert error(jax.jit(function)(lhs, rhs), want) < 1e-5
    hessian = jax.jit(jax.grad(lambda b: jnp.sum(jax.grad(lambda b: jnp.sum(function(lhs, b) ** 2))(b) ** 2)))(rhs)
    assert jnp.isfinite(hessian).all() and hessian.any()
