# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Ways to write a role in XLA's operations.  Every one is right for every problem.

A form is a function ``form(problem, precision, a, b)``.  Its arrays are channels last,

    x [N, *X, G*C]      w [*R, G*K, C]      y [N, *Y, G*K],

so that the transposes from and to channels-last user code cancel; its geometry is a core (see
`core.split`): the padding lies in [0, extent).

The stride can be taken out first (`split`).  Cut x into blocks of `stride` positions and count the
place within a block, the phase, as one more channel: then kernel and y meet at stride 1,

    x [N, *B, S, G, C]      w [*M, S, G, K, C]      M = ceil(R / stride), B = Y + M - 1,

where S counts all phases.  A kernel that is no multiple of the stride is padded with zeros to
M * stride, which wastes their products.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_deconv.problem import GIVEN, Axis, ConvProblem, Role

# Products written out one by one; a larger kernel becomes a loop, to bound the size of the program.
UNROLL = 32

# So few columns waste most of a product's registers.
NARROW = 8

# Elements of the windows that are copied at a time: they stay in the cache, and memory is bounded.
BLOCK = 2 ** 20

_LETTERS = "abdefhijlmopqrtuvwxyz"  # spatial axes in einsum: all but n, s, g, k, c


def _pad(array, pads):
    """Zeros around the leading axes; negative numbers crop."""
    pads = [(*pad, 0) if len(pad) == 2 else pad for pad in pads]
    pads += [(0, 0, 0)] * (array.ndim - len(pads))
    return lax.pad(array, jnp.zeros((), array.dtype), pads) if any(map(any, pads)) else array


def _accumulator(dtype):
    """The type to add up taps in: the caller rounds narrow floats once."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype


# --- Taking the stride out -------------------------------------------------------------------


def split_axis(axis: Axis) -> Axis:
    """The axis in blocks of `stride` positions."""
    taps = -(-axis.kernel // axis.stride)
    return Axis(x_size=axis.y_size + taps - 1, y_size=axis.y_size, kernel=taps)


def can_split(problem: ConvProblem) -> bool:
    return all(a.stride == 1 or a.dilation == 1 for a in problem.geometry)


def _blocks(problem):
    """For each axis: blocks of x, taps in blocks, phases."""
    parts = [(split_axis(a), a.stride) if a.stride > 1 else (a, 1) for a in problem.geometry]
    return [p.x_size for p, _ in parts], [p.kernel for p, _ in parts], [s for _, s in parts]


def _interleaved(rank, first):
    """The permutation from [B, S, B, S, ...] to [B, B, ..., S, S, ...], `first` axes before them."""
    return [*range(first), *range(first, first + 2 * rank, 2), *range(first + 1, first + 2 * rank, 2)]


def split_x(p: ConvProblem, x):
    B, _, S = _blocks(p)
    x = _pad(x, [(0, 0)] + [(a.pad_lo, b * s - a.pad_lo - a.x_size) if s > 1 else (0, 0)
                            for a, b, s in zip(p.geometry, B, S)])
    x = x.reshape(x.shape[0], *itertools.chain(*zip(B, S)), p.G, p.C)
    x = x.transpose(*_interleaved(p.rank, 1), x.ndim - 2, x.ndim - 1)
    return x.reshape(*x.shape[:1 + p.rank], math.prod(S), p.G, p.C)


def join_x(p: ConvProblem, x):
    """The transpose of `split_x`."""
    B, _, S = _blocks(p)
    x = x.reshape(*x.shape[:1 + p.rank], *S, p.G * p.C)
    x = x.transpose(*np.argsort(_interleaved(p.rank, 1)), x.ndim - 1)
    x = x.reshape(x.shape[0], *(b * s for b, s in zip(B, S)), p.G * p.C)
    return _pad(x, [(0, 0)] + [(-a.pad_lo, a.pad_lo + a.x_size - b * s) if s > 1 else (0, 0)
                               for a, b, s in zip(p.geometry, B, S)])


def split_w(p: ConvProblem, w):
    _, M, S = _blocks(p)
    w = _pad(w, [(0, m * s - a.kernel) for a, m, s in zip(p.geometry, M, S)])
    w = w.reshape(*itertools.chain(*zip(M, S)), p.G, p.K, p.C)
    w = w.transpose(*_interleaved(p.rank, 0), *range(w.ndim - 3, w.ndim))
    return w.reshape(*M, math.prod(S), p.G, p.K, p.C)


def join_w(p: ConvProblem, w):
    """The transpose of `split_w`."""
    _, M, S = _blocks(p)
    w = w.reshape(*M, *S, p.G * p.K, p.C)
    w = w.transpose(*np.argsort(_interleaved(p.rank, 0)), w.ndim - 2, w.ndim - 1)
    w = w.reshape(*(m * s for m, s in zip(M, S)), p.G * p.K, p.C)
    return _pad(w, [(0, a.kernel - m * s) for a, m, s in zip(p.geometry, M, S)])


def without_stride(p: ConvProblem) -> ConvProblem:
    """The problem in blocks, its phases counted in C."""
    geometry = tuple(split_axis(a) if a.stride > 1 else a for a in p.geometry)
    return dataclasses.replace(p, geometry=geometry, C=p.C * math.prod(a.stride for a in p.geometry))


# --- The forms -------------------------------------------------------------------------------


def conv(p: ConvProblem, precision, a, b):
    """XLA's convolution: strided (y), with its input dilated (x), with its window dilated (w).

    The second and third are spelled as lax spells the linear transposes of the first; XLA:GPU
    recognises these spellings as cuDNN's backward convolutions.
    """
    n, g = p.rank, p.geometry
    stride, dilation = [v.stride for v in g], [v.dilation for v in g]
    first, last = tuple(range(1, n + 1)), tuple(range(n))
    image = (0, n + 1, *first)
    call = functools.partial(lax.conv_general_dilated, precision=precision, preferred_element_type=a.dtype)
    if p.role is Role.Y:
        numbers = lax.ConvDimensionNumbers(image, (n, n + 1, *last), image)
        return call(a, b, stride, [(v.pad_lo, v.pad_hi) for v in g], rhs_dilation=dilation,
                    dimension_numbers=numbers, feature_group_count=p.G)
    if p.role is Role.X:
        # Reversed in canonical order, where the reversal of a user's kernel meets this one and cancels.
        w, spatial = jnp.moveaxis(b, (-2, -1), (0, 1)), tuple(range(2, n + 2))
        if p.G > 1:  # the groups go to the outputs
            w = w.reshape(p.G, p.K, p.C, *w.shape[2:]).swapaxes(0, 1).reshape(p.K, p.G * p.C, *w.shape[2:])
        w = lax.rev(w, spatial)
        numbers = lax.ConvDimensionNumbers(image, (1, 0, *spatial), image)
        return call(a, w, [1] * n, [(v.extent - 1 - v.pad_lo, v.extent - 1 - v.pad_hi) for v in g],
                    lhs_dilation=stride, rhs_dilation=dilation, dimension_numbers=numbers,
                    feature_group_count=p.G)
    numbers = lax.ConvDimensionNumbers((n + 1, 0, *first), (n + 1, 0, *first), (n + 1, n, *last))
    return call(a, b, dilation, [(v.pad_lo, v.pad_hi) for v in g], rhs_dilation=stride,
                dimension_numbers=numbers, batch_group_count=p.G)


def split_conv(p: ConvProblem, precision, a, b, conv=conv):
    """`conv`, or another form, at stride 1."""
    q = without_stride(p)

    def merge(role, array):
        if role is Role.Y:
            return array
        array = split_x(p, array) if role is Role.X else split_w(p, array)  # [..., S, G, *, C]
        if role is Role.X:
            return array.swapaxes(-3, -2).reshape(*array.shape[:-3], q.G * q.C)
        return jnp.moveaxis(array, -4, -2).reshape(*array.shape[:-4], q.G * q.K, q.C)

    out = conv(q, precision, *(merge(r, t) for r, t in zip(GIVEN[p.role], (a, b))))
    S = q.C // p.C
    if p.role is Role.X:
        return join_x(p, out.reshape(*out.shape[:-1], p.G, S, p.C).swapaxes(-3, -2))
    if p.role is Role.W:
        return join_w(p, jnp.moveaxis(out.reshape(*out.shape[:-2], p.G, p.K, S, p.C), -2, -4))
    return out


def _starts(geometry, tap):
    """Where the slice of the padded x begins that a tap, counted in one number, joins with y."""
    unravel = np.unravel_index if isinstance(tap, int) else jnp.unravel_index
    places = unravel(tap, [v.kernel for v in geometry]) if geometry else ()
    places = map(int, places) if isinstance(tap, int) else places
    return [r * v.dilation for r, v in zip(places, geometry)]


def _window(geometry, x, tap):
    """That slice of x [N, *X, ...]; `tap` may be traced."""
    spans = [(v.y_size - 1) * v.stride + 1 for v in geometry]
    starts = _starts(geometry, tap)
    if isinstance(tap, int):
        return x[(slice(None), *(slice(r, r + n, v.stride) for r, n, v in zip(starts, spans, geometry)))]
    rest = x.shape[1 + len(geometry):]
    x = lax.dynamic_slice(x, [0, *starts, *(0 for _ in rest)], [x.shape[0], *spans, *rest])
    return x[(slice(None), *(slice(None, None, v.stride) for v in geometry))]


def _taps(p: ConvProblem, precision, a, b, *, split: bool):
    """One product for every tap of the kernel, over the slice of x that it joins with y."""
    n = p.rank
    q = without_stride(p) if split else p
    S = q.C // p.C
    wide = _accumulator(a.dtype)
    given = dict(zip(GIVEN[p.role], (a, b)))
    x, w, y = given.get(Role.X), given.get(Role.W), given.get(Role.Y)
    if x is not None:
        x = split_x(p, x) if split else x.reshape(*x.shape[:-1], 1, p.G, p.C)
        x = _pad(x, [(0, 0)] + [(v.pad_lo, v.pad_hi) for v in q.geometry])
    if w is not None:
        w = split_w(p, w) if split else w.reshape(*w.shape[:-2], 1, p.G, p.K, p.C)
        w = w.reshape(-1, *w.shape[n:])
    if y is not None:
        y = y.reshape(*y.shape[:-1], p.G, p.K)

    space = _LETTERS[:n]
    large, small, kernel = f"n{space}sgc", f"n{space}gk", "sgkc"

    # Axes of one element would only hide from XLA that the others lie side by side.
    ones = [letter for letter, size in (("s", S), ("g", p.G)) if size == 1]

    def places(term):
        return [i for i, letter in enumerate(term) if letter in ones]

    def product(first, second, result, u, v):
        if p.C == p.K == 1 and p.role is not Role.W:  # nothing to contract, so no dot
            u, v = u.astype(wide), v[..., 0].astype(wide)
            return u[..., None, :, :] * v if p.role is Role.X else (u * v).sum(-3)
        terms = ["".join(letter for letter in term if letter not in ones) for term in (first, second, result)]
        u, v = lax.squeeze(u, places(first)), lax.squeeze(v, places(second))
        out = jnp.einsum("{},{}->{}".format(*terms), u, v, precision=precision, preferred_element_type=wide)
        return lax.expand_dims(out, places(result))

    padded = [v.x_size + v.pad_lo + v.pad_hi for v in q.geometry]
    window = functools.partial(_window, q.geometry)

    def at(tap):
        return w[tap] if isinstance(tap, int) else lax.dynamic_index_in_dim(w, tap, keepdims=False)

    def add(total, part, tap):
        """Adds the products of a tap where they belong: the transpose of `window`."""
        starts = _starts(q.geometry, tap)
        part = _pad(part, [(0, 0)] + [(0, 0, v.stride - 1) for v in q.geometry])
        if isinstance(tap, int):
            part = _pad(part, [(0, 0)] + [(lo, size - lo - span)
                                          for lo, size, span in zip(starts, padded, part.shape[1:])])
            return part if total is None else total + part
        begin = [0, *starts, 0, 0, 0]
        part = part + lax.dynamic_slice(total, begin, part.shape)
        return lax.dynamic_update_slice(total, part, begin)

    taps = math.prod(v.kernel for v in q.geometry)
    if p.role is Role.W:
        one = lambda tap: product(large, small, kernel, window(x, tap), y)
        out = jnp.stack([one(t) for t in range(taps)]) if taps <= UNROLL else lax.map(one, jnp.arange(taps))
    else:
        def step(tap, total):
            if p.role is Role.X:
                return add(total, product(small, kernel, large, y, at(tap)), tap)
            part = product(large, kernel, small, window(x, tap), at(tap))
            return part if total is None else total + part

        # The loop starts from the first product, whose type is that of all.
        if p.role is Role.X and q.G == 1 and isinstance(q.C, int) and q.C <= NARROW and taps <= UNROLL:
            # One product has enough columns for a matrix unit only with all taps side by side.
            columns = w.transpose(3, 0, 1, 2, 4).reshape(p.K, -1)
            parts = jnp.matmul(y.reshape(-1, p.K), columns, precision=precision, preferred_element_type=wide)
            parts = parts.reshape(*y.shape[:-2], *w.shape[:3], p.C)
            out = functools.reduce(lambda total, tap: add(total, parts[..., tap, :, :, :], tap), range(taps), None)
        elif taps <= UNROLL:
            out = step(0, None)
            for tap in range(1, taps):
                out = step(tap, out)
        else:
            out = lax.fori_loop(1, taps, step, step(0, None))

    if p.role is Role.W:
        out = out.reshape(*(v.kernel for v in q.geometry), *out.shape[1:])
        return join_w(p, out) if split else out.reshape(*out.shape[:n], p.G * p.K, p.C)
    if p.role is Role.Y:
        return out.reshape(*out.shape[:-2], p.G * p.K)
    out = _pad(out, [(0, 0)] + [(-v.pad_lo, -v.pad_hi) for v in q.geometry])
    return join_x(p, out) if split else out.reshape(*out.shape[:-3], p.G * p.C)


taps = functools.partial(_taps, split=False)
split_taps = functools.partial(_taps, split=True)


def _mirrored(p: ConvProblem) -> ConvProblem:
    """Role x without stride as role y: x and y trade places where the kernel is reversed."""
    geometry = tuple(Axis(x_size=v.y_size, y_size=v.x_size, kernel=v.kernel, dilation=v.dilation,
                          pad_lo=v.extent - 1 - v.pad_lo) for v in p.geometry)
    return dataclasses.replace(p, role=Role.Y, C=p.K, K=p.C, geometry=geometry)


def windows(p: ConvProblem, precision, a, b):
    """One product for all taps: each window of x is copied to a row of a matrix, block after block.

    A gather of whole runs of memory copies fast where its source is an array: the padding must not be
    fused into it.  The loop over blocks sees to that, and there are two at least.
    """
    flat_size = p.N * math.prod(v.x_size + v.pad_lo + v.pad_hi for v in p.geometry) * p.C
    if p.G > 1 or not isinstance(flat_size, int) or flat_size >= 2 ** 31:
        return taps(p, precision, a, b)
    if p.role is Role.X:
        if not can_split(p):
            return taps(p, precision, a, b)
        if any(v.stride > 1 for v in p.geometry):
            return split_conv(p, precision, a, b, windows)
        return windows(_mirrored(p), precision, a, lax.rev(b, range(p.rank)).swapaxes(-1, -2))

    wide = _accumulator(a.dtype)
    dot = functools.partial(jnp.einsum, precision=precision, preferred_element_type=wide)
    x = _pad(a, [(0, 0)] + [(v.pad_lo, v.pad_hi) for v in p.geometry])
    steps = [math.prod(x.shape[i + 1:]) for i in range(1 + p.rank)]  # of N and X, in elements
    kernel = [v.kernel for v in p.geometry]
    outer, run = p.geometry, p.C
    if outer and outer[-1].dilation == 1:  # the last axis of a window is one run with its channels
        outer, run = outer[:-1], outer[-1].kernel * run
    runs = jnp.zeros(1, jnp.int32)  # where they begin in a window
    for v, step in zip(outer, steps[1:]):
        runs = (runs[:, None] + jnp.arange(v.kernel, dtype=jnp.int32) * (v.dilation * step)).reshape(-1)

    places = [p.N, *(v.y_size for v in p.geometry)]
    total, width = math.prod(places), math.prod(kernel) * p.C
    block = -(-total // max(2, -(-total * width // BLOCK)))
    blocks = -(-total // block)
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(), start_index_map=(0,))

    def rows(first):
        place = jnp.unravel_index(first + jnp.arange(block, dtype=jnp.int32), places)
        start = sum(i * step * v for i, step, v in zip(place, steps, [1, *(v.stride for v in p.geometry)]))
        out = lax.gather(x.reshape(-1), (start[:, None] + runs).reshape(-1, 1), numbers, (run,),
                         mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)
        return out.reshape(block, width)

    def begin(i):
        return jnp.minimum(i * block, total - block)  # the last block may overlap the one before

    if p.role is Role.Y:
        w = b.swapaxes(-1, -2).reshape(width, p.K)

        def make(i, out):
            return lax.dynamic_update_slice_in_dim(out, dot("pt,tk->pk", rows(begin(i)), w), begin(i), 0)

        return lax.fori_loop(0, blocks, make, jnp.zeros((total, p.K), wide)).reshape(*places, p.K)

    y = b.reshape(total, p.K)
    shape, term = ((width, p.K), "pt,pk->tk") if p.K >= width else ((p.K, width), "pt,pk->kt")  # the longer axis last

    def add(i, out):
        pair = rows(begin(i)), lax.dynamic_slice_in_dim(y, begin(i), block)
        if total % block:  # what the block before has added
            fresh = begin(i) + jnp.arange(block)[:, None] >= i * block
            pair = (jnp.where(fresh, t, 0) for t in pair)
        return out + dot(term, *pair)

    out = lax.fori_loop(0, blocks, add, jnp.zeros(shape, wide))
    out = out.T if p.K >= width else out
    return jnp.moveaxis(out.reshape(p.K, *kernel, p.C), 0, -2)


def depthwise(p: ConvProblem, precision, a, b):
    """`taps` where C = K = 1: elementwise, and in one pass over the data."""
    count = math.prod(v.kernel for v in p.geometry)
    wide = _accumulator(a.dtype)
    pads = [(0, 0), *((v.pad_lo, v.pad_hi) for v in p.geometry)]
    window = functools.partial(_window, p.geometry)

    if p.role is Role.W and isinstance(p.N, int):
        def image(xy):  # stays in the cache from tap to tap
            x, y = _pad(xy[0][None].astype(wide), pads), xy[1][None].astype(wide)
            return lax.map(lambda tap: (window(x, tap) * y).sum(range(p.rank + 1)), jnp.arange(count))

        return lax.map(image, (a, b)).sum(0).reshape(*(v.kernel for v in p.geometry), p.G, 1)

    if p.role is Role.Y and count <= 2 * UNROLL:
        # XLA would leave the kernel as the user's order has it, and gather its channels for every product.
        w = lax.optimization_barrier(b.reshape(count, p.G).astype(wide))
        if all(v.stride == 1 for v in p.geometry):
            x = _pad(a.astype(wide), pads)
            parts = (window(x, tap) * w[tap] for tap in range(count))
            return functools.reduce(jnp.add, parts)
        return _bordered(p.geometry, a.astype(wide), w)

    return (split_taps if p.role is Role.X and can_split(p) else taps)(p, precision, a, b)


def _bordered(geometry, x, w):
    """The depthwise y: what windows reach beyond x is computed apart, for no element else is a padding to be weighed.

    The padded copy of a large x would cost more than to pad the products of its border.
    """
    def part(spans):
        g = [dataclasses.replace(v, y_size=stop - first, pad_lo=v.pad_lo - first * v.stride)
             for v, (first, stop) in zip(geometry, spans)]
        return functools.reduce(jnp.add, (_pad(piece * w[tap], ends) for tap in range(len(w))
                                          for piece, ends in [_inside(g, x, tap)]))

    whole = [(0, v.y_size) for v in geometry]
    # Where the first tap has begun to meet x, and the last one has not ceased to.
    inner = [(_meets(v, -v.pad_lo)[0], _meets(v, v.extent - 1 - v.pad_lo)[1]) for v in geometry]
    if any(first >= stop for first, stop in inner):
        return part(whole)
    out = _pad(part(inner), [(0, 0)] + [(first, v.y_size - stop) for v, (first, stop) in zip(geometry, inner)])
    for i, (v, (first, stop)) in enumerate(zip(geometry, inner)):
        for span in ((0, first), (stop, v.y_size)):
            if span[0] < span[1]:
                starts = [0] * out.ndim
                starts[1 + i] = span[0]
                # One thread would compute what is fused into an update.
                strip = lax.optimization_barrier(part([*whole[:i], span, *whole[i + 1:]]))
                out = lax.dynamic_update_slice(out, strip, starts)
    return out


def _meets(v, shift):
    """The span of y in which y[i] meets an x[i * stride + shift] that is there."""
    first = min(max(0, -(shift // v.stride)), v.y_size)
    return first, max(min(v.y_size, (v.x_size - 1 - shift) // v.stride + 1), first)


def _inside(geometry, x, tap):
    """`_window` of x without its padding, and the zeros around it that make it as large as y."""
    cut, ends = [slice(None)], [(0, 0)]
    for v, start in zip(geometry, _starts(geometry, tap)):
        shift = start - v.pad_lo
        first, stop = _meets(v, shift)
        begin = first * v.stride + shift
        cut.append(slice(begin, begin + (stop - first) * v.stride, v.stride) if stop > first else slice(0, 0))
        ends.append((first, v.y_size - stop))
    return x[tuple(cut)], ends
