# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels for few channels in x: which problems they take, and that their plans fit.

What they compute needs a GPU.  Here the parts that Python decides are held against the algebra.
"""

import dataclasses
import itertools
import math
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest

from jax_deconv.lowering.cuda import thin
from jax_deconv.policy import Policy
from jax_deconv.problem import Axis, ConvProblem, Role

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
        assert len(dict(kernel.defines)) == len(kernel.defines)
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
def test_every_macro_of_the_source_is_defined(problem, policy):
    """Every name in capitals in the part for this role is a macro, a constant or a template's parameter."""
    text = re.sub(r"//.*", "", SOURCE)
    head, x, windows = re.split(r"#if ROLE_X\n|#else\n(?=\n*constexpr int WINDOW0)", text)
    y, w = windows.split("#else", 1)
    part = head + {Role.X: x, Role.Y: y, Role.W: y.split("#if ROLE_Y")[0] + w}[problem.role]
    used = set(re.findall(r"(?<![\w.])[A-Z][A-Z0-9_]*\b", part))
    own = set(re.findall(r"(?:constexpr (?:int|bool|unsigned|long long)|[,;]) ([A-Z][A-Z0-9_]*) =", part))
    own |= set(re.findall(r"(?:int|bool|unsigned|, ) ?([A-Z][A-Z0-9_]*)(?=[,>= ])", " ".join(
        re.findall(r"template <[^>]*>", part))))
    defined = {name for name, _ in thin.kernels(problem, policy)[0].defines}
    assert used - own - defined <= {"BIAS", "ACTIVATION", "ROLE_X", "ROLE_Y", "ROLE_W", "LIVE"}


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
            assert windows.run <= windows.run_padded <= windows.run + 1
            assert windows.window % windows.shape.step == 0
            if windows.pairs:
                assert dtype.itemsize == 2 and windows.run_padded % 2 == 0 and windows.advance % 2 == 0


def test_copies_of_x_are_aligned():
    for _, c, k, geometry in GEOMETRIES.values():
        for dtype, role in itertools.product(("bfloat16", "float32"), (Role.Y, Role.W)):
            dtype = np.dtype(jnp.dtype(dtype))
            windows = thin._Windows(thin._Shape(ConvProblem(role, 2, 1, c, k, geometry, dtype, dtype), False))
            last = windows.shape.axes[2]
            for tile in thin._tiles(windows.extents, 64):
                unit, skew = windows.unit_and_skew(tile)
                starts = {t * tile[3] * last.stride * c - last.pad_lo * c for t in range(3)}
                assert all(start % unit == 0 for start in (*starts, last.x_size * c, 16 // dtype.itemsize))
                if skew:
                    assert windows.advance % unit == 0 and (windows.advance + skew) % unit == 0
                if windows.matrices:
                    assert (windows.advance + skew) * dtype.itemsize % 16 == 0


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
