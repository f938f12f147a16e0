# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels for few channels in x: what they take, that plans fit, and their values, computed on the CPU."""

import ctypes
import dataclasses
import itertools
import math
import pathlib
import random
import re
import shutil
import subprocess

import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_deconv.lowering.cuda import thin
from jax_deconv.policy import Policy
from jax_deconv.problem import GIVEN, Axis, ConvProblem, Role

SOURCE = pathlib.Path(thin.__file__).with_name("thin.cu").read_text()
STRICT = Policy(precision="highest")

GEOMETRIES = {
    "1D, long kernel": (16, 1, 1026, (Axis(16896, 63, 1024, 256),)),
    "1D, cut at both ends": (3, 1, 512, (Axis(123, 17, 16, 8, pad_lo=8),)),
    "2D": (4, 3, 128, (Axis(64, 32, 4, 2, pad_lo=1),) * 2),
    "2D, asymmetric, odd": (2, 5, 21, (Axis(29, 14, 5, 2, pad_lo=3), Axis(7, 7, 3, 1, pad_lo=1))),
    "2D, dilated": (1, 2, 40, (Axis(40, 13, 3, 3, dilation=2, pad_lo=2), Axis(13, 13, 3, 1, dilation=5, pad_lo=5))),
    "2D, gaps between windows": (2, 4, 16, (Axis(41, 11, 1, 4), Axis(33, 11, 2, 3))),
    "3D, no overlap": (1, 5, 384, (Axis(4, 2, 2, 2), Axis(24, 6, 4, 4), Axis(40, 10, 4, 4))),
    "3D": (1, 8, 16, (Axis(16, 8, 4, 2, pad_lo=1),) * 3),
}


def problems():
    for (name, (n, c, k, geometry)), role, (dtype, policy) in itertools.product(
            GEOMETRIES.items(), Role, (("bfloat16", Policy()), ("float32", Policy()), ("float32", STRICT))):
        dtype = np.dtype(jnp.dtype(dtype))
        yield pytest.param(ConvProblem(role, n, 1, c, k, geometry, dtype, dtype), policy,
                           id=f"{name}-{role}-{dtype}-{policy.precision}")


every_problem = pytest.mark.parametrize("problem, policy", list(problems()))


def macros(kernel):
    return {name: int(value) for name, value in kernel.defines if re.fullmatch(r"-?\d+", value)}


@every_problem
def test_plans_fit(problem, policy):
    assert thin.why_not(problem, policy) is None
    kernels = thin.kernels(problem, policy)
    assert kernels and len({k.label for k in kernels}) == len(kernels)
    for kernel in kernels:
        m = macros(kernel)
        assert kernel.w_order == (*range(2, 2 + problem.rank), 1, 0)
        main = kernel.launches[0]
        assert main.block == (32 * m["WM"] * m["WN"] * m["WK"], 1, 1) and main.block[0] <= 1024
        assert 0 < main.shared <= 163 * 1024
        assert m["NF"] % m["GROUP"] == 0
        # Every block has a slice of the columns, and no more blocks than tiles.
        slices = m["SLICES"] * m.get("ROW_SLICES", 1)
        assert main.grid[0] % slices == 0
        rows = [math.ceil(a.x_size / (a.stride * (m["M2"] if i == 2 else 1))) if problem.role is Role.X else a.y_size
                for i, a in enumerate(thin._Shape(problem, False).axes)]
        tiles = math.prod(math.ceil(extent / m[t]) for extent, t in zip((problem.N, *rows), ("TN", "T0", "T1", "T2")))
        assert main.grid[0] // slices <= tiles
        if problem.role is not Role.W:
            assert m["TN"] * m["T0"] * m["T1"] * m["T2"] <= 16 * m["MF"] * m["WM"]


@every_problem
def test_macros_are_those_of_the_source(problem, policy):
    names = [name for name, _ in thin.kernels(problem, policy)[0].defines]
    assert len(set(names)) == len(names)
    assert set(names) <= set(re.findall(r"\w+", SOURCE))
    # One role's plans define the same names, whatever the problem.
    _, *others = thin.kernels(problem, policy)
    assert all({name for name, _ in kernel.defines} == set(names) for kernel in others)


def test_distances_are_the_taps_of_the_phases():
    """At distance v a phase p takes the tap r with r * dilation = p + pad_lo - v * stride."""
    for axis, m in itertools.product(
            [a for _, _, _, geometry in GEOMETRIES.values() for a in geometry if a.kernel < 100], (1, 2, 4)):
        first, number, takes = thin._distances(axis, m * axis.stride)
        want = {(first + v, p) for v, phases in enumerate(takes) for p, one in enumerate(phases) if one}
        have = set()
        # Windows around the origin, so that every one that can reach a phase is there.
        for i, r in itertools.product(range(-200, 200), range(axis.kernel)):
            p = i * axis.stride + r * axis.dilation - axis.pad_lo
            if 0 <= p < m * axis.stride:
                have.add((i, p))
        assert want == have
        assert (first, first + number - 1) == (min(have)[0], max(have)[0])


def test_windows_cover_w():
    for _, c, k, geometry in GEOMETRIES.values():
        for dtype in ("bfloat16", "float32"):
            dtype = np.dtype(jnp.dtype(dtype))
            windows = thin._Windows(thin._Shape(ConvProblem(Role.Y, 1, 1, c, k, geometry, dtype, dtype), False))
            assert windows.runs * windows.run == windows.rows == c * math.prod(a.kernel for a in geometry)
            assert windows.run + windows.lead <= windows.run_padded <= windows.run + windows.lead + 1
            assert windows.window % windows.shape.step == 0
            if windows.pairs:
                assert dtype.itemsize == 2 and windows.run_padded % 2 == 0 and windows.advance % 2 == 0


def test_copies_of_x_are_aligned():
    for _, c, k, geometry in GEOMETRIES.values():
        for dtype, role in itertools.product(("bfloat16", "float32"), (Role.Y, Role.W)):
            dtype = np.dtype(jnp.dtype(dtype))
            windows = thin._Windows(thin._Shape(ConvProblem(role, 2, 1, c, k, geometry, dtype, dtype), False))
            last = windows.shape.axes[2]
            for tile in thin._tiles(windows.extents, 64)[:20]:
                t = windows.tiling(tile)
                starts = {i * tile[3] * last.stride * c - last.pad_lo * c - windows.lead for i in range(3)}
                assert all(n % t.unit == 0 for n in (*starts, last.x_size * c, 16 // dtype.itemsize, t.pitch))
                assert t.pitch * dtype.itemsize % 16 == 0
                if t.skew:
                    assert windows.advance % t.unit == 0 and (windows.advance + t.skew) % t.unit == 0
                if windows.pairs:
                    assert (windows.advance + t.skew) % 2 == 0
                if windows.matrices:
                    assert (windows.advance + t.skew) * dtype.itemsize % 16 == 0


@pytest.mark.parametrize("change, reason", [
    ({"G": 2}, "2 groups"),
    ({"C": 17}, "17 channels"),
    ({"dtype": np.dtype(np.float64)}, "float64"),
    ({"out_dtype": np.dtype(np.int32)}, "int32"),
    ({"geometry": ()}, "0 spatial axes"),
    ({"geometry": (Axis(4, 2, 2, 2),) * 4}, "4 spatial axes"),
    ({"N": 0}, "empty"),
    ({"N": 2**24}, "2\\*\\*31 positions"),
    ({"geometry": (Axis(10000, 2, 9000, 1000),)}, "shared memory"),
])
@pytest.mark.parametrize("role", Role)
def test_refusals_say_why(change, reason, role):
    n, c, k, geometry = GEOMETRIES["2D"]
    problem = ConvProblem(role, n, 1, c, k, geometry, np.dtype(np.float32), np.dtype(np.float32))
    assert thin.why_not(problem, Policy()) is None
    assert re.search(reason, thin.why_not(dataclasses.replace(problem, **change), Policy()))


def test_tensor_cores_only_where_the_policy_lets_them():
    n, c, k, geometry = GEOMETRIES["2D"]
    for dtype, policy, strict in (("float32", STRICT, 1), ("float32", Policy(), 0), ("bfloat16", STRICT, 0)):
        dtype = np.dtype(jnp.dtype(dtype))
        problem = ConvProblem(Role.Y, n, 1, c, k, geometry, dtype, dtype)
        assert macros(thin.kernels(problem, policy)[0])["STRICT"] == strict


def test_filter_gradient_is_repeatable():
    """Parts are added by a second kernel, not by atomic additions."""
    n, c, k, geometry = GEOMETRIES["2D"]
    kernel = thin.kernels(ConvProblem(Role.W, 64, 1, c, k, geometry, np.dtype(np.float32), np.dtype(np.float32)),
                          Policy(deterministic=True))[0]
    splits, size = macros(kernel)["SPLITS"], 16 * c * k
    assert splits > 1 and kernel.workspace == 4 * splits * size
    assert kernel.launches[1].grid[0] * 32 >= size
    assert "atomicAdd" not in SOURCE


# -- Values -------------------------------------------------------------------------------------------

SHIM = pathlib.Path(__file__).with_name("cuda_warps_on_cpu.h")
TOLERANCE = {"bfloat16": 8e-3, "float16": 1e-3, "float32": 1e-3}  # of TF32
compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def aligned(array):
    """A copy that starts where a GPU's allocations would: at a multiple of 16 bytes."""
    memory = np.empty(array.nbytes + 16, np.uint8)
    copy = memory[-memory.ctypes.data % 16:][:array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def physical(role, array, kernel):
    return aligned(array.transpose(kernel.w_order if role is Role.W else (0, *range(2, array.ndim), 1)))


def compute(kernel, a, b, out, tmp_path, bias=None):
    """Runs a kernel's launches on the CPU."""
    code = f'#include "{SHIM}"\n' + SOURCE.replace(
        "extern __shared__ __align__(16) char memory[];", "char* const memory = shared_memory;")
    library = tmp_path / "kernel.so"
    subprocess.run(["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-x", "c++", "-", "-o", library,
                    *(f"-D{name}={value}" for name, value in kernel.defines)], input=code, text=True, check=True)
    module = ctypes.CDLL(str(library))
    workspace = np.full(kernel.workspace // 4 + 1, np.nan, np.float32)
    for launch in kernel.launches:
        assert launch.grid[1:] == launch.block[1:] == (1, 1)
        module.launch_warps(getattr(module, launch.name),
                            *map(ctypes.c_uint, (launch.grid[0], launch.block[0], launch.shared)),
                            *(array if array is None else ctypes.c_void_p(array.ctypes.data)
                              for array in (a, b, bias, out, workspace)))
    assert np.isnan(workspace[-1])


def check(problem, kernel, tolerance, tmp_path, bias=None):
    """A kernel's values against the oracle, from an output that starts as NaN."""
    rng = np.random.default_rng(0)
    operands = [rng.standard_normal(problem.shape(role)).astype(problem.dtype) for role in GIVEN[problem.role]]
    want = physical(problem.role, getattr(oracle, f"conv_{problem.role}")(*operands, problem.geometry), kernel)
    if bias is not None:
        want = np.maximum(want + bias.astype(want.dtype), 0)
    out = aligned(np.full(want.shape, np.nan, np.float32).astype(problem.out_dtype))
    compute(kernel, *(physical(role, array, kernel) for role, array in zip(GIVEN[problem.role], operands)), out,
            tmp_path, bias)
    error = np.linalg.norm(out.astype(np.float64) - want)
    assert error <= tolerance * np.linalg.norm(want), (kernel.label, error / np.linalg.norm(want))


def random_problem(seed):
    """Small sizes, odd channels, any stride, dilation and padding, ranks 1 to 3, any plan."""
    rng = random.Random(seed)
    rank = rng.choice([1, 2, 2, 3])
    while True:
        axes = []
        for _ in range(rank):
            axis = Axis(1, rng.choice([1, 2, 5, 7, 11] if rank > 1 else [1, 5, 17, 67]),
                        rng.choice([1, 2, 3, 4, 5, 7] if rank > 1 else [1, 3, 9, 16, 37]),
                        rng.choice([1, 2, 2, 3, 4] if rank > 1 else [1, 2, 5, 8, 11]), rng.choice([1, 1, 1, 2, 3]))
            pad_lo, pad_hi = rng.randrange(-1, axis.extent), rng.randrange(-2, axis.extent)
            x_size = (axis.y_size - 1) * axis.stride + axis.extent - pad_lo - pad_hi
            axes.append(dataclasses.replace(axis, x_size=x_size, pad_lo=pad_lo))
        n, c, k = rng.choice([1, 2, 9]), rng.choice([1, 2, 3, 4, 5, 8, 16]), rng.choice([1, 5, 8, 21, 32, 40, 66])
        cost = n * c * k * math.prod(a.y_size * a.kernel for a in axes)
        if all(a.x_size > 0 for a in axes) and cost < 1e6:
            break
    dtype, policy = rng.choice([("bfloat16", Policy()), ("float16", Policy()), ("float32", Policy()),
                                ("float32", STRICT)])
    out = rng.choice([dtype, "float32"])
    problem = ConvProblem(rng.choice(list(Role)), n, 1, c, k, tuple(axes), np.dtype(jnp.dtype(dtype)),
                          np.dtype(jnp.dtype(out)))
    return problem, policy, max(TOLERANCE[dtype], TOLERANCE[out]) if policy is not STRICT else 1e-5


@compiler
@pytest.mark.parametrize("seed", range(16))
def test_values_of_random_problems(seed, tmp_path):
    problem, policy, tolerance = random_problem(seed)
    assert thin.why_not(problem, policy) is None
    plans = list(thin._PLANS[problem.role](thin._Shape(problem, thin._strict(problem, policy))))
    kernel = random.Random(seed).choice(plans)[1]() if seed % 2 else thin.kernels(problem, policy)[0]
    check(problem, kernel, tolerance, tmp_path)


@compiler
@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("n, c, k, geometry", [
    (1, 3, 40, (Axis(16, 8, 4, 2, pad_lo=1),) * 2),  # windows that begin at odd elements
    (1, 8, 16, (Axis(8, 4, 4, 2, pad_lo=1), Axis(20, 10, 4, 2, pad_lo=1))),  # windows that are rows of matrices
    (2, 1, 66, (Axis(16 * 12 + 64, 13, 64, 16),)),  # many taps; rows of y that begin anywhere
    (1, 1, 24, (Axis(22, 11, 9, 2, pad_lo=4), Axis(26, 13, 9, 2, pad_lo=4))),
], ids=str)
def test_values_of_bfloat16(role, n, c, k, geometry, tmp_path):
    dtype = np.dtype(jnp.dtype("bfloat16"))
    problem = ConvProblem(role, n, 1, c, k, geometry, dtype, dtype)
    check(problem, thin.kernels(problem, Policy())[0], TOLERANCE["bfloat16"], tmp_path)


@compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kernel", [4, 8])
def test_windows_of_one_chunk(kernel, dtype, tmp_path):
    """A stage is a tile then, and what is loaded first must not be two."""
    dtype = np.dtype(jnp.dtype(dtype))
    problem = ConvProblem(Role.Y, 1, 1, 16, 48, (Axis(4 * 31 + kernel, 32, kernel, 4), Axis(5, 5, 1)), dtype, dtype)
    plans = [plan() for _, plan in thin._PLANS[Role.Y](thin._Shape(problem, False))]
    assert all(macros(plan)["STAGES"] == 2 for plan in plans if macros(plan)["CHUNK"] >= 16 * kernel)
    plan = next(plan for plan in plans if macros(plan)["X_TILES"] == 2 and macros(plan)["CHUNK"] == 16 * kernel)
    one_block = dataclasses.replace(plan.launches[0], grid=(macros(plan)["SLICES"], 1, 1))  # of several tiles
    check(problem, dataclasses.replace(plan, launches=(one_block,)), TOLERANCE[dtype.name], tmp_path)


@compiler
@pytest.mark.parametrize("role", [Role.X, Role.Y])
def test_bias_and_activation(role, tmp_path):
    problem = ConvProblem(role, 2, 1, 3, 21, (Axis(9, 4, 3, 2),), np.dtype(np.float32), np.dtype(np.float32))
    kernel = thin.kernels(problem, STRICT)[0]
    kernel = dataclasses.replace(kernel, defines=(*kernel.defines, ("BIAS", "1"), ("ACTIVATION(v)", "(v > 0 ? v : 0)")))
    bias = np.random.default_rng(1).standard_normal(3 if role is Role.X else 21).astype(np.float32)
    check(problem, kernel, 1e-5, tmp_path, bias)
