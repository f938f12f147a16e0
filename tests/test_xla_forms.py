# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Every form of the XLA lowering, forced, against the numpy oracle on whatever problem comes."""

from __future__ import annotations

import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_deconv.lowering import forms, xla
from jax_deconv.policy import Policy
from jax_deconv.problem import GIVEN, Axis, ConvProblem, Role

FORMS = {"chosen": None, "conv": forms.conv, "split_conv": forms.split_conv, "taps": forms.taps,
         "split_taps": forms.split_taps, "windows": forms.windows, "depthwise": forms.depthwise}
TOLERANCE = {"float32": 1e-5, "complex64": 1e-5, "float16": 2e-3, "bfloat16": 1e-2, "float8_e4m3fn": 0.1}


def check(role, geometry, form=None, N=2, G=1, C=2, K=3, dtype="float32", platform="cpu"):
    """Computes one problem and compares; skips where the form does not apply."""
    problem = ConvProblem(role, N, G, C, K, tuple(geometry), jnp.dtype(dtype), jnp.dtype(dtype))
    if form in (forms.split_conv, forms.split_taps) and not forms.can_split(problem):
        pytest.skip("a stride and a dilation on one axis")
    rng = np.random.default_rng(0)
    low, high = {"i": (-100, 100), "u": (0, 200), "b": (0, 2)}.get(jnp.dtype(dtype).kind, (-3, 4))
    operands = [jnp.asarray(rng.integers(low, high, problem.shape(r)), dtype) for r in GIVEN[role]]
    out = jax.jit(xla.build(problem, Policy(), platform, form))(*operands)
    reference = {Role.X: oracle.conv_x, Role.Y: oracle.conv_y, Role.W: oracle.conv_w}[role]
    want = reference(*map(np.asarray, operands), problem.geometry, G)
    assert out.shape == want.shape == problem.shape() and out.dtype == jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        tolerance = TOLERANCE[dtype]
        np.testing.assert_allclose(np.asarray(out).astype(want.dtype), want, rtol=tolerance,
                                   atol=tolerance * np.abs(want).max(initial=1))
    else:
        np.testing.assert_array_equal(out, want.astype(dtype))


def geometries(seed, count):
    pick = random.Random(seed)
    for rank in [0] + [pick.choice([1, 1, 2, 2, 3]) for _ in range(count - 1)]:
        yield [Axis(x_size=pick.randint(1, 9), y_size=pick.randint(1, 5), kernel=pick.randint(1, 4),
                    stride=pick.randint(1, 4), dilation=pick.choice([1, 1, 2, 3]), pad_lo=pick.randint(-3, 4))
               for _ in range(rank)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("role", Role, ids=str)
@pytest.mark.parametrize("case", range(8))
def test_any_geometry(role, form, case):
    geometry = list(geometries(1, 8))[case]
    G, C, K = [(1, 2, 3), (2, 2, 1), (3, 1, 1), (2, 1, 2)][case % 4]
    if form == "depthwise":
        G, C, K = 3, 1, 1
    check(role, geometry, FORMS[form], G=G, C=C, K=K)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "complex64", "int8", "uint8", "int32", "bool",
                                   "float8_e4m3fn"])
@pytest.mark.parametrize("role", Role, ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_types(role, dtype, groups):
    check(role, [Axis(9, 5, 3, 2, 1, 1), Axis(7, 4, 4, 2, 1, 1)], G=groups, dtype=dtype)


@pytest.mark.parametrize("dtype", ["int32", "uint8"])
@pytest.mark.parametrize("role", Role, ids=str)
def test_integers_without_a_convolution(role, dtype):
    """The way of a platform that has no convolution of integers."""
    check(role, [Axis(9, 5, 3, 2, 1, 1), Axis(7, 4, 4, 2, 1, 1)], dtype=dtype, platform="cuda")


@pytest.mark.parametrize("role", Role, ids=str)
def test_nothing_to_compute(role):
    check(role, [Axis(5, 3, 2, 1, 1, -9)])  # no window touches x
    check(role, [Axis(5, 3, 0, 1)])
    check(role, [Axis(5, 0, 2, 1)])
    for letter in "NCK":
        check(role, [Axis(5, 4, 2, 1)], **{letter: 0})


@pytest.mark.parametrize("role", Role, ids=str)
@pytest.mark.parametrize("form", ["chosen", "taps", "depthwise"])
def test_large_kernels_do_not_unroll(role, form):
    geometry = [Axis(600, 150, 300, 2, 1, 10)]
    groups = dict(G=2, C=1, K=1) if form == "depthwise" else {}
    check(role, geometry, FORMS[form], **groups)
    problem = ConvProblem(role, 2, 2, 1, 1, tuple(geometry), jnp.dtype("float32"), jnp.dtype("float32"))
    jaxpr = jax.make_jaxpr(xla.build(problem, Policy(), "cpu", FORMS[form]))(
        *(jnp.zeros(problem.shape(r)) for r in GIVEN[role]))
    assert len(str(jaxpr).splitlines()) < 400


@pytest.mark.parametrize("role", Role, ids=str)
def test_windows_in_many_blocks(role, monkeypatch):
    """More blocks than the two there are at least, the last one overlapping the one before."""
    monkeypatch.setattr(forms, "BLOCK", 100)
    check(role, [Axis(9, 5, 3, 2, 1, 1), Axis(7, 7, 3, 1, 1, 1)], forms.windows)
    check(role, [Axis(9, 5, 3, 2, 1, 1), Axis(11, 7, 3, 1, 2, 1)], forms.windows)


def test_rounds_once():
    """Ones in bfloat16: counts up to 2**8 are exact, larger ones only if they are accumulated wider."""
    axis = Axis(x_size=600, y_size=300, kernel=301)
    for role in Role:
        problem = ConvProblem(role, 1, 1, 4, 4, (axis,), jnp.dtype("bfloat16"), jnp.dtype("bfloat16"))
        ones = [jnp.ones(problem.shape(r), "bfloat16") for r in GIVEN[role]]
        out = xla.build(problem, Policy(), "cpu")(*ones)
        wide = [np.ones(problem.shape(r)) for r in GIVEN[role]]
        want = {Role.X: oracle.conv_x, Role.Y: oracle.conv_y, Role.W: oracle.conv_w}[role](*wide, (axis,))
        np.testing.assert_array_equal(out, want.astype(jnp.bfloat16))


@pytest.mark.parametrize("role", [Role.X, Role.Y], ids=str)
def test_channels_last_code_is_not_transposed(role, optimized):
    """The transposes between user code and the canonical layout cancel."""
    problem = ConvProblem(role, 2, 1, 16, 24, (Axis(32, 16, 4, 2, 1, 1),) * 2, jnp.dtype("float32"),
                          jnp.dtype("float32"))
    build = xla.build(problem, Policy(), "cpu", forms.conv)

    def channels_last(image, kernel):
        out = build(jnp.moveaxis(image, -1, 1), jnp.moveaxis(kernel, (-2, -1), (0, 1)))
        return jnp.moveaxis(out, 1, -1)

    image, kernel = ((s[0], *s[2:], s[1]) if r is not Role.W else (*s[2:], *s[:2])
                     for r in GIVEN[role] for s in [problem.shape(r)])
    text = jax.jit(channels_last).lower(jnp.zeros(image), jnp.zeros(kernel)).compile().as_text()
    elements = [np.prod([int(n) for n in dims.split(",")])
                for dims in re.findall(r"f32\[([\d,]+)\]\S* (?:transpose|copy)\(", text)]
    assert max(elements, default=0) <= np.prod(kernel)
