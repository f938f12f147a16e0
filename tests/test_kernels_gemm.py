# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""The matrix products of windows that do not overlap: what is taken, and the addresses that the macros mean."""

import dataclasses
import itertools
import math
import pathlib
import random
import re
import types

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax

from benchmarks.layers import layers
from jax_deconv.lowering import core
from jax_deconv.lowering.cuda import gemm
from jax_deconv.problem import Axis, ConvProblem, Role

POLICY = types.SimpleNamespace(precision=None, deterministic=True, workspace_limit=None)
SOURCE = pathlib.Path(gemm.__file__).with_name("gemm.cu").read_text()
TYPES = {name: jnp.dtype(name) for name in ("float32", "bfloat16", "float16")}


def problem(role=Role.X, dtype="bfloat16", out_dtype=None, **kw) -> ConvProblem:
    fields = dict(N=2, G=1, C=8, K=16, geometry=(Axis(8, 4, 2, 2),) * 2)
    return ConvProblem(role=Role(role), dtype=TYPES[dtype], out_dtype=TYPES[out_dtype or dtype], **{**fields, **kw})


def random_problem(seed: int) -> ConvProblem:
    """Any stride and size, x cropped at both ends or longer than its windows, odd channels, ranks 1 to 3."""
    rng = random.Random(seed)
    axes = []
    for _ in range(rng.choice([1, 2, 3])):
        stride, y_size = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 3, 5])
        pad_lo = rng.choice([0, rng.randrange(stride)])
        x_size = max(1, y_size * stride - pad_lo + rng.choice([0, rng.randrange(1 - stride, stride)]))
        axes.append(Axis(x_size, y_size, stride, stride, rng.choice([1, 2]) if stride == 1 else 1, pad_lo))
    dtype = rng.choice(list(TYPES))
    return problem(rng.choice([Role.X, Role.Y]), dtype, rng.choice([dtype, "float32"]), N=rng.choice([1, 3]),
                   C=rng.choice([1, 3, 5, 8, 12]), K=rng.choice([1, 2, 7, 16]), geometry=tuple(axes))


def macros(kernel) -> types.SimpleNamespace:
    return types.SimpleNamespace(**{name: int(value) if value.isdigit() else value for name, value in kernel.defines})


def by_addresses(given: ConvProblem, kernel, a, w) -> np.ndarray:
    """The result, computed as the source says: through flat memory, from the macros alone."""
    d = macros(kernel)
    y_shape = (given.N, *given.shape(Role.Y)[2:], given.K)
    x_shape = (given.N, *given.shape(Role.X)[2:], given.C)
    pixels, tap = (np.stack(np.unravel_index(np.arange(math.prod(shape)), shape)) for shape in
                   ((d.M // (d.P0 * d.P1 * d.P2), d.P0, d.P1, d.P2), (d.S0, d.S1, d.S2, d.RUN)))
    strides, pads, x_sizes, y_sizes = ([getattr(d, f"{name}{i}") for i in range(3)] for name in "SLXY")
    at = [pixels[1 + i][:, None] * strides[i] - pads[i] + tap[i][None, :] for i in range(3)]
    inside = np.logical_and.reduce([(0 <= p) & (p < size) for p, size in zip(at, x_sizes)])
    x_at = (((pixels[0][:, None] * d.X0 + at[0]) * d.X1 + at[1]) * d.X2 + at[2]) * d.RUN + tap[3][None, :]
    real = np.logical_and.reduce([pixels[1 + i] < y_sizes[i] for i in range(3)])
    y_at = ((pixels[0] * d.Y0 + pixels[1]) * d.Y1 + pixels[2]) * d.Y2 + pixels[3]
    # A kernel may leave out what the macros say it need not check.
    assert d.CROP or inside.all()
    assert d.TAIL or np.array_equal(y_at, np.arange(d.M))
    matrix = w.transpose(kernel.w_order).reshape(d.NN, d.KK)
    if d.ROLE_X:
        rows = np.where(real[:, None], a.reshape(-1, given.K)[np.where(real, y_at, 0)], 0)
        out = np.full(math.prod(x_shape), np.nan)
        out[x_at[inside]] = (rows @ matrix.T)[inside]
        return out.reshape(x_shape)
    rows = np.where(inside, a.reshape(-1)[np.where(inside, x_at, 0)], 0)
    return (rows @ matrix.T).reshape(y_shape)


@pytest.mark.parametrize("seed", range(60))
def test_addresses(seed):
    given = random_problem(seed)
    assert gemm.why_not(given, POLICY) is None
    first = Role.Y if given.role is Role.X else Role.X
    rng = np.random.default_rng(seed)
    a, w = rng.standard_normal(given.shape(first)), rng.standard_normal(given.shape(Role.W))
    expected = (oracle.conv_x if given.role is Role.X else oracle.conv_y)(a, w, given.geometry)
    got = by_addresses(given, gemm.kernels(given, POLICY)[0], np.moveaxis(a, 1, -1), w)
    np.testing.assert_allclose(np.moveaxis(got, -1, 1), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(60))
def test_kernels(seed):
    """Every variant covers the result, fits an H100, and copies no more at once than alignment allows."""
    given = random_problem(seed)
    kernels = gemm.kernels(given, POLICY)
    assert len({kernel.label for kernel in kernels}) == len(kernels) > 0
    assert any("HOPPER" not in dict(kernel.defines) for kernel in kernels)
    for kernel in kernels:
        d, (launch,) = macros(kernel), kernel.launches
        used = {name for text in re.findall(r"^//   ([A-Z0-9_., ]+?)  ", SOURCE, re.M) for name in text.split(", ")}
        asked = {f"{name[0]}{i}" for name in used if name.endswith("..") for i in range(3)}
        asked |= {name for name in used if not name.endswith("..")} - {"BIAS", "ACTIVATION"}
        hopper = "HOPPER" in dict(kernel.defines)
        assert set(dict(kernel.defines)) == asked - ({"WM", "WN"} if hopper else {"HOPPER", "TURNS", "PANELS"})
        tiles = -(-d.M // d.BM) * -(-d.NN // d.BN)
        assert launch.grid == ((min(tiles, 132) if hopper else tiles), 1, 1)
        assert launch.block == ((384, 1, 1) if hopper else (32 * d.WM * d.WN, 1, 1))
        declared = 8 * (2 * d.STAGES + d.PANELS) if hopper else 0  # barriers, by the source itself
        assert launch.shared + declared <= (227 if hopper else 163) * 1024
        assert sorted(kernel.w_order) == list(range(2 + given.rank))
        itemsize, run, made_x = given.dtype.itemsize, d.RUN, given.role is Role.X
        assert ((given.K if made_x else run) * itemsize) % d.A_BYTES == 0
        assert (d.KK * itemsize) % d.B_BYTES == 0
        assert (run if made_x else given.K) % d.VEC == 0
        assert d.VEC * given.out_dtype.itemsize <= 16
        if hopper:
            assert (d.A_BYTES, d.B_BYTES) == (16, 16)
            assert made_x or not d.CROP


def test_named_layers():
    """All of the kind are taken, whole rows of x at once, by Hopper's kernel too."""
    taken = [layer for layer in layers() if layer.klass == "k_eq_s"]
    assert len(taken) >= 8
    for layer, role, dtype in itertools.product(taken, (Role.X, Role.Y), ("bfloat16", "float32")):
        given = core.split(layer.problem(role, dtype)).problem
        assert gemm.why_not(given, POLICY) is None
        kernel = gemm.kernels(given, POLICY)[0]
        assert "HOPPER" in dict(kernel.defines)
        assert macros(kernel).RUN == layer.out_channels * layer.stride[-1]


@pytest.mark.parametrize("change, reason", [
    (dict(role=Role.W), "not w"),
    (dict(G=2), "one group"),
    (dict(geometry=()), "1 to 3"),
    (dict(geometry=(Axis(4, 4, 1),) * 4), "1 to 3"),
    (dict(dtype=np.dtype(np.float64)), "float32, bfloat16"),
    (dict(out_dtype=np.dtype(np.int8)), "float32, bfloat16"),
    (dict(geometry=(Axis(9, 4, 3, 2),)), "kernel == stride"),
    (dict(geometry=(Axis(7, 4, 1, 2),)), "kernel == stride"),
    (dict(geometry=(Axis(8, 4, 2, 2, 3),)), "kernel == stride"),
    (dict(geometry=(Axis(8, 4, 2, 2, 1, -1),)), "negative padding"),
    (dict(N=0), "nothing"),
    (dict(C=0), "nothing"),
    (dict(N=2**30), "2\\^31"),
])
def test_refuses(change, reason):
    assert re.search(reason, gemm.why_not(dataclasses.replace(problem(), **change), POLICY))


def test_float32_needs_leave_to_round():
    strict = types.SimpleNamespace(precision=lax.Precision.HIGHEST)
    assert "TF32" in gemm.why_not(problem(dtype="float32"), strict)
    assert gemm.why_not(problem(dtype="float32"), POLICY) is None
    assert gemm.why_not(problem(dtype="bfloat16", out_dtype="float32"), strict) is None
