# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""The depthwise kernels: what they take, how they are launched, and their values, computed on the CPU."""

import ctypes
import dataclasses
import math
import pathlib
import random
import shutil
import subprocess
import types

import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from benchmarks.layers import layers
from jax_deconv.lowering.cuda import depthwise
from jax_deconv.problem import GIVEN, Axis, ConvProblem, Role

POLICY = types.SimpleNamespace(precision=None, deterministic=True, workspace_limit=None)
SOURCES = pathlib.Path(depthwise.__file__).parent
SHIM = pathlib.Path(__file__).with_name("cuda_on_cpu.h")
TYPES = {name: jnp.dtype(name) for name in ("float32", "bfloat16", "float16")}
TOLERANCE = {"float32": 1e-5, "bfloat16": 8e-3, "float16": 1e-3}
compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def problem(role=Role.X, dtype="float32", out_dtype=None, **kw) -> ConvProblem:
    fields = dict(N=2, G=6, C=1, K=1, geometry=(Axis(8, 4, 4, 2, 1, 1),) * 2)
    return ConvProblem(role=Role(role), dtype=TYPES[dtype], out_dtype=TYPES[out_dtype or dtype], **{**fields, **kw})


def random_problem(seed: int) -> ConvProblem:
    """Small sizes, odd channels, any stride, dilation and padding (negative too), ranks 1 to 3."""
    rng = random.Random(seed)
    rank = rng.choice([1, 2, 2, 3])
    while True:
        axes = []
        for _ in range(rank):
            kernel, stride = rng.choice([1, 2, 3, 4, 5, 12 if rank == 1 else 3]), rng.choice([1, 2, 3, 4])
            axis = Axis(1, rng.choice([1, 3, 5, 7, 13]), kernel, stride, rng.choice([1, 1, 2, 3, 6]))
            pad_lo = rng.randint(-2, axis.extent - 1)
            pad_hi = rng.randint(-3, axis.extent - 1)
            x_size = (axis.y_size - 1) * stride + axis.extent - pad_lo - pad_hi
            axes.append(dataclasses.replace(axis, x_size=x_size, pad_lo=pad_lo))
        if all(a.x_size > 0 for a in axes) and math.prod(a.x_size for a in axes) < 2000:
            break
    dtype = rng.choice(list(TYPES))
    channels, multiplier = rng.choice([(1, 1)] * 4 + [(1, 2), (3, 1), (3, 2), (4, 4)])
    return problem(rng.choice(list(Role)), dtype, rng.choice([dtype, "float32"]), N=rng.choice([1, 3]),
                   G=rng.choice([2, 3, 8, 21, 24]), C=channels, K=multiplier, geometry=tuple(axes))


def physical(role, array, kernel) -> np.ndarray:
    """The axes in the order in which the kernel has them."""
    order = kernel.w_order if role is Role.W else (0, *range(2, array.ndim), 1)
    return np.ascontiguousarray(array.transpose(order))


def compute(kernel, a, b, out, tmp_path, bias=None):
    """Runs a kernel's launches on the CPU."""
    code = f'#include "{SHIM}"\n' + (SOURCES / kernel.source).read_text()
    library = tmp_path / f"{abs(hash(kernel))}.so"
    subprocess.run(["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-x", "c++", "-", "-o", library,
                    *(f"-D{name}={value}" for name, value in kernel.defines)], input=code, text=True, check=True)
    module = ctypes.CDLL(str(library))
    workspace = np.full(kernel.workspace // 4 + 1, np.nan, np.float32)
    for launch in kernel.launches:
        assert launch.grid[1:] == launch.block[1:] == (1, 1) and launch.block[0] <= 1024
        module.launch(getattr(module, launch.name), *map(ctypes.c_uint, (launch.grid[0], launch.block[0])),
                      *(array if array is None else ctypes.c_void_p(array.ctypes.data)
                        for array in (a, b, bias, out, workspace)))
    assert np.isnan(workspace[-1])


def check(case: ConvProblem, tmp_path, most: int = 1, wide: bool = False):
    """The values of the problem's first kernels against the oracle, from an output that starts as NaN.

    `wide` gives them the offsets of large tensors.
    """
    assert depthwise.why_not(case, POLICY) is None
    rng = np.random.default_rng(0)
    operands = [rng.standard_normal(case.shape(role)).astype(case.dtype) for role in GIVEN[case.role]]
    want = getattr(oracle, f"conv_{case.role}")(*operands, case.geometry, case.G)
    for kernel in depthwise.kernels(case, POLICY)[:most]:
        if wide:
            kernel = dataclasses.replace(kernel, defines=tuple({**dict(kernel.defines), "INDEX_BITS": "64"}.items()))
        expected = physical(case.role, want, kernel)
        out = np.full(expected.shape, np.nan, np.float32).astype(case.out_dtype)
        compute(kernel, *(physical(role, array, kernel) for role, array in zip(GIVEN[case.role], operands)), out,
                tmp_path)
        error = np.linalg.norm(out.astype(np.float64) - expected)
        assert error <= TOLERANCE[case.out_dtype.name] * np.linalg.norm(expected), (kernel.label, error)


@compiler
@pytest.mark.parametrize("seed", range(14))
def test_values_of_random_problems(seed, tmp_path):
    check(random_problem(seed), tmp_path, wide=seed % 2 == 1)


@compiler
@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("case", [
    dict(geometry=(Axis(21, 6, 12, 2, 1, 1),), G=16),  # every kernel of a common layer
    dict(geometry=(Axis(40, 3, 20, 1, 1, -1),), G=2),  # more taps than a thread keeps
    dict(geometry=(Axis(70, 3, 17, 16, 1, 2),), G=3),  # a long stride, ragged
    dict(geometry=(Axis(9, 9, 3, 1, 6, 6), Axis(1, 1, 1)), G=5),  # dilation beyond the size; an axis that does nothing
    dict(geometry=(Axis(9, 3, 1, 4, 10**6, 0), Axis(5, 1, 3, 10**6, 1, 0)), G=2),  # sizes that mean nothing here
    dict(geometry=(Axis(15, 5, 3, 4, 6, 3),), G=4),  # stride and dilation share a factor
], ids=str)
def test_values_of_every_kernel(role, case, tmp_path):
    check(problem(role, "bfloat16", **case), tmp_path, most=9)


@compiler
def test_no_operation_beyond_a_ragged_last_tap(tmp_path):
    """A tap that a phase lacks has no part in the sum: an infinity stays where it belongs."""
    case = problem(Role.X, geometry=(Axis(7, 3, 3, 2, 1, 0),), N=1, G=2)
    (kernel, *_) = depthwise.kernels(case, POLICY)
    out = np.full((1, 7, 2), np.nan, np.float32)
    y = np.ones((1, 3, 2), np.float32)
    y[0, 1] = np.inf
    compute(kernel, y, np.ones((3, 2, 1), np.float32), out, tmp_path)
    np.testing.assert_array_equal(out[0, :, 0], [1, 1, np.inf, np.inf, np.inf, 1, 1])


@compiler
@pytest.mark.parametrize("role", [Role.X, Role.Y])
def test_bias_and_activation(role, tmp_path):
    case = problem(role, C=2, geometry=(Axis(9, 4, 3, 2, 1, 0),))
    (kernel, *_) = depthwise.kernels(case, POLICY)
    kernel = dataclasses.replace(kernel, defines=(*kernel.defines, ("BIAS", "1"), ("ACTIVATION(v)", "(v > 0 ? v : 0)")))
    rng = np.random.default_rng(0)
    operands = [rng.standard_normal(case.shape(each)).astype(np.float32) for each in GIVEN[role]]
    want = physical(role, getattr(oracle, f"conv_{role}")(*operands, case.geometry, case.G), kernel)
    bias = rng.standard_normal(want.shape[-1]).astype(np.float32)
    out = np.full(want.shape, np.nan, np.float32)
    compute(kernel, *(physical(each, array, kernel) for each, array in zip(GIVEN[role], operands)), out, tmp_path, bias)
    np.testing.assert_allclose(out, np.maximum(want + bias, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("changed", "reason"), [
    (dict(G=1), "1 groups"),
    (dict(C=5), "5 and 1 channels"),
    (dict(geometry=()), "0 spatial axes"),
    (dict(geometry=(Axis(8, 8, 1),) * 4), "4 spatial axes"),
    (dict(N=0), "empty"),
    (dict(geometry=(Axis(2**30, 2**29, 4, 2),)), "too long"),
    (dict(geometry=(Axis(10000, 2, 4, 5000),)), "stride beyond"),
], ids=str)
def test_why_not(changed, reason):
    assert reason in depthwise.why_not(problem(**changed), POLICY)


def test_why_not_by_type_and_workspace():
    case = problem(Role.W)
    assert "float64" in depthwise.why_not(dataclasses.replace(case, out_dtype=np.dtype(np.float64)), POLICY)
    none = types.SimpleNamespace(workspace_limit=0)
    assert "workspace" in depthwise.why_not(case, none)
    assert depthwise.why_not(problem(Role.X), none) is None


def test_the_workspace_limit_holds():
    case = problem(Role.W, "bfloat16", N=64, G=512, geometry=(Axis(66, 64, 3),) * 2)
    for limit in (1, 4, None):
        policy = types.SimpleNamespace(workspace_limit=limit)
        for kernel in depthwise.kernels(case, policy):
            assert kernel.workspace % (4 * 512 * 9) == 0
            assert limit is None or 0 < kernel.workspace <= limit * 2**20


@pytest.mark.parametrize("role", list(Role))
def test_the_layers_of_the_benchmark(role):
    """Depthwise ones are taken, each kernel has a label of its own, and blocks are of a launchable size."""
    taken = {layer.id for layer in layers() if depthwise.why_not(layer.problem(role, "float32"), POLICY) is None}
    assert {"bigvgan_aa_768", "dla_ida_f2", "gtcrn_dw_d5"} <= taken
    for layer in layers():
        if layer.id in taken:
            kernels = depthwise.kernels(layer.problem(role, "float16"), POLICY)
            assert len({kernel.label for kernel in kernels}) == len(kernels)
            for launch in (launch for kernel in kernels for launch in kernel.launches):
                assert launch.block[0] <= 512 and launch.grid[0] > 0


def test_offsets_are_wide_where_tensors_are():
    small, large = problem(N=4, G=64), problem(N=2**21, G=64)
    index = [dict(depthwise.kernels(case, POLICY)[0].defines)["INDEX_BITS"] for case in (small, large)]
    assert index == ["32", "64"]
