# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""The three roles in XLA's own operations: the platform default and the oracle of the others."""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_deconv.problem import GIVEN, Axis, ConvProblem, Role


def why_not(problem: ConvProblem, policy) -> str | None:
    """XLA takes every problem."""
    del problem, policy
    return None


# --- The core of a geometry ------------------------------------------------------------------


def trim(axis: Axis) -> tuple[Axis, tuple[int, int], tuple[int, int]] | None:
    """The part of an axis that computes anything: a core, and the ranges of x and of y that it is.

    In the core every window touches x, and x has no border that no window reads, so that both
    paddings lie in [0, extent).  The rest of x and y is zero where it is made and does not
    matter where it is given.  None where no window touches x.
    """
    first = max(0, -((axis.extent - 1 - axis.pad_lo) // axis.stride))
    last = min(axis.y_size - 1, (axis.x_size - 1 + axis.pad_lo) // axis.stride)
    if axis.kernel == 0 or axis.x_size == 0 or last < first:
        return None
    begin = first * axis.stride - axis.pad_lo
    end = last * axis.stride - axis.pad_lo + axis.extent
    lo, hi = max(0, begin), min(axis.x_size, end)
    core = dataclasses.replace(axis, x_size=hi - lo, y_size=last - first + 1, pad_lo=lo - begin)
    return core, (lo, hi), (first, last + 1)


def _cut(array, ranges):
    for i, (lo, hi) in enumerate(ranges):
        array = lax.slice_in_dim(array, lo, hi, axis=2 + i) if (lo, hi) != (0, array.shape[2 + i]) else array
    return array


def _uncut(array, ranges, sizes):
    pads = [(lo, size - hi, 0) for (lo, hi), size in zip(ranges, sizes)]
    if not any(map(any, pads)):
        return array
    return lax.pad(array, jnp.zeros((), array.dtype), [(0, 0, 0)] * 2 + pads)


# --- Types -----------------------------------------------------------------------------------


def _compute_dtype(problem: ConvProblem, platform: str):
    """The type to multiply in.  One rounding at the end: narrow floats accumulate in float32."""
    wide = jnp.promote_types(problem.dtype, problem.out_dtype)
    if jnp.issubdtype(wide, jnp.floating) and wide.itemsize < 4:
        # cuDNN accumulates in float32 by itself; elsewhere say so.
        return wide if platform in ("gpu", "cuda") and wide.itemsize == 2 else jnp.dtype(jnp.float32)
    return wide


# --- Forms -----------------------------------------------------------------------------------


def _conv(problem, precision, a, b):
    """XLA's convolution: strided, dilated in its input, or in its window."""
    g, spatial = problem.geometry, tuple(range(2, 2 + problem.rank))
    s, d = [v.stride for v in g], [v.dilation for v in g]
    G = problem.G
    kw = dict(precision=precision, preferred_element_type=a.dtype)
    if problem.role is Role.Y:
        return lax.conv_general_dilated(a, b, s, [(v.pad_lo, v.pad_hi) for v in g], rhs_dilation=d,
                                        feature_group_count=G, **kw)
    if problem.role is Role.X:
        w = b.reshape(G, problem.K, problem.C, *b.shape[2:]).swapaxes(1, 2)
        w = lax.rev(w.reshape(G * problem.C, problem.K, *b.shape[2:]), spatial)
        return lax.conv_general_dilated(
            a, w, [1] * len(g), [(v.extent - 1 - v.pad_lo, v.extent - 1 - v.pad_hi) for v in g],
            lhs_dilation=s, rhs_dilation=d, feature_group_count=G, **kw)
    # x with N as its features, y as the window, dilated by the stride: out [G*K, C, *R].
    # A window that ends before x does gives more taps than the kernel has: cropped by the padding.
    numbers = (lax.ConvDimensionNumbers((1, 0, *spatial), (1, 0, *spatial), (1, 0, *spatial)))
    out = lax.conv_general_dilated(
        a, b, d, [(v.pad_lo, v.pad_hi) for v in g], rhs_dilation=s, dimension_numbers=numbers,
        batch_group_count=G, **kw)
    return out


def _taps(problem, precision, a, b):
    """One product a tap of the kernel, over slices of x and y."""
    p, g = problem, problem.geometry
    space = "abdefhij"[:p.rank]
    split = lambda t, axis: t.reshape(*t.shape[:axis], p.G, -1 if axis else t.shape[0] // p.G,
                                      *t.shape[axis + 1:])
    dot = lambda eq, u, v: jnp.einsum(eq, u, v, precision=precision)
    x, w, y = ({**dict(zip(GIVEN[p.role], (a, b)))}.get(r) for r in (Role.X, Role.W, Role.Y))
    if x is not None:
        x = x.reshape(x.shape[0], p.G, p.C, *x.shape[2:])
        x = jnp.pad(x, [(0, 0)] * 3 + [(v.pad_lo, v.pad_hi) for v in g])
    if y is not None:
        y = y.reshape(y.shape[0], p.G, p.K, *y.shape[2:])
    if w is not None:
        w = w.reshape(p.G, p.K, p.C, *w.shape[2:])
    out = None
    parts = []
    for tap in itertools.product(*(range(v.kernel) for v in g)):
        at = tuple(slice(r * v.dilation, r * v.dilation + (v.y_size - 1) * v.stride + 1, v.stride)
                   for r, v in zip(tap, g))
        if p.role is Role.W:
            parts.append(dot(f"ngc{space},ngk{space}->gkc", x[(..., *at)], y))
        elif p.role is Role.Y:
            part = dot(f"ngc{space},gkc->ngk{space}", x[(..., *at)], w[(..., *tap)])
            out = part if out is None else out + part
        else:
            part = dot(f"ngk{space},gkc->ngc{space}", y, w[(..., *tap)])
            whole = [(s.start, v.x_size + v.pad_lo + v.pad_hi - s.stop, v.stride - 1)
                     for s, v in zip(at, g)]
            part = lax.pad(part, jnp.zeros((), part.dtype), [(0, 0, 0)] * 3 + whole)
            out = part if out is None else out + part
    if p.role is Role.W:
        out = jnp.stack(parts, -1).reshape(p.G, p.K, p.C, *(v.kernel for v in g))
        return out.reshape(p.G * p.K, *out.shape[2:])
    if p.role is Role.X:
        out = out[(..., *(slice(v.pad_lo, v.pad_lo + v.x_size) for v in g))]
    return out.reshape(out.shape[0], -1, *out.shape[3:])


# --- The choice ------------------------------------------------------------------------------


def choose(problem: ConvProblem, platform: str):
    taps = math.prod(v.kernel for v in problem.geometry)
    if platform == "cpu":
        return _taps if taps <= 64 and problem.role is Role.W else _conv
    # XLA:GPU has no convolution of integers.
    return _conv if jnp.issubdtype(problem.dtype, jnp.inexact) else _taps


def build(problem: ConvProblem, policy, platform: str):
    """A traceable function of the role's operands, in the order of `GIVEN`."""
    trims = [trim(axis) for axis in problem.geometry]
    first, second = GIVEN[problem.role]
    sizes = [v for v in problem.sizes.values() if isinstance(v, int)]
    empty = None in trims or 0 in sizes
    cores, xs, ys = zip(*trims) if trims and not empty else ((), (), ())
    ranges = {Role.X: xs, Role.Y: ys, Role.W: ()}
    core = dataclasses.replace(problem, geometry=cores)
    dtype = _compute_dtype(problem, platform)
    form = None if empty else choose(core, platform)

    def function(a, b):
        if empty:
            n = {Role.X: a, Role.Y: a, Role.W: b}[problem.role].shape[0]
            lead = problem.shape()[:1] if problem.role is Role.W else (n,)
            return jnp.zeros((*lead, *problem.shape()[1:]), problem.out_dtype)
        a = _cut(a, ranges[first]).astype(dtype)
        b = _cut(b, ranges[second]).astype(dtype)
        out = form(core, policy.precision, a, b)
        out = out.astype(problem.out_dtype)
        return _uncut(out, ranges[problem.role], [v.size(problem.role) for v in problem.geometry])

    return function
