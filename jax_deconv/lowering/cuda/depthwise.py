# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Depthwise convolutions, and groups of few channels: kernels that memory bounds."""

from __future__ import annotations

import dataclasses
import math

from jax_deconv.lowering.cuda import TYPES, Kernel, Launch
from jax_deconv.policy import Policy, workspace_bytes
from jax_deconv.problem import Axis, ConvProblem, Role

_MOST_CHANNELS = 4  # of a group; beyond, products bound it and tensor cores pay
_MOST_INDEX = 2**30
_MOST_STRIDE = 2**12  # the source multiplies numbers below it, and searches them

_THREADS = 128  # of a block at most
_RESIDENT = 4  # blocks on a multiprocessor, which leaves 128 registers to a thread
_MULTIPROCESSORS = 132  # of the GPUs that this was tuned on
_LINE = 128  # bytes

# What a thread keeps in registers, as 32-bit values.
_TAP_SUMS = 64  # role w's sums
_WEIGHTS = 32  # roles x and y: of the taps at work
_WINDOWS = 40  # role w's loads in flight
_SHARED = 32 * 1024  # bytes in which a block of role w adds its threads' sums


def why_not(problem: ConvProblem, policy: Policy) -> str | None:
    """The reason why this family does not compute a problem, or None."""
    if not 1 <= problem.rank <= 3:
        return f"{problem.rank} spatial axes, not 1 to 3"
    for dtype in (problem.dtype, problem.out_dtype):
        if dtype.name not in TYPES:
            return f"{dtype.name} is not one of {', '.join(TYPES)}"
    if problem.G == 1 or max(problem.C, problem.K) > _MOST_CHANNELS:
        return f"{problem.G} groups of {problem.C} and {problem.K} channels, not several of at most {_MOST_CHANNELS}"
    if not all(math.prod(problem.shape(role)) for role in Role):
        return "an empty tensor"
    if max(axis.x_size + axis.y_size * axis.stride + axis.extent + abs(axis.pad_lo)
           for axis in problem.geometry) > _MOST_INDEX:
        return "an axis too long for 32-bit positions"
    if max(axis.stride for axis in _axes(problem)) > _MOST_STRIDE:
        return f"a stride beyond {_MOST_STRIDE}"
    if problem.role is Role.W and _most_slabs(problem, policy) < 1:
        return f"the partial sums exceed the workspace limit of {workspace_bytes(policy) >> 20} MiB"
    return None


def kernels(problem: ConvProblem, policy: Policy) -> list[Kernel]:
    """The ways to compute a problem that `why_not` has nothing against, most promising first."""
    if problem.role is Role.W:
        variants = [(2, 8), (2, 16)]
    elif problem.dtype.itemsize == 4:
        variants = [(4, 4), (2, 8), (2, 16)]
    else:
        variants = [(4, 8), (2, 8), (2, 16)]
    # Variants coincide where channels are odd or axes short.
    return list(dict.fromkeys(_kernel(problem, policy, channels, tile) for channels, tile in variants))


def _most_slabs(problem: ConvProblem, policy: Policy) -> int:
    """How many times w fits into the workspace, in float32."""
    return workspace_bytes(policy) // (4 * math.prod(problem.shape(Role.W)))


def _axes(problem: ConvProblem) -> list[Axis]:
    """Three axes, simplified: those that do nothing dropped, others of that kind put in front."""
    nothing = Axis(1, 1, 1)
    axes = [dataclasses.replace(axis, stride=axis.stride if axis.y_size > 1 else 1,
                                dilation=axis.dilation if axis.kernel > 1 else 1) for axis in problem.geometry]
    axes = [axis for axis in axes if axis != nothing]
    return [nothing] * (3 - len(axes)) + axes


def _even(count: int, most: int) -> int:
    """Of the sizes that cover `count` in as few parts as `most` does, the smallest."""
    return -(-count // -(-count // most))


def _kernel(problem: ConvProblem, policy: Policy, channels: int, tile: int) -> Kernel:
    """The kernel whose threads take vectors of so many channels, if G allows, and `tile` positions.

    The names are those of the source's macros, which it explains.
    """
    role, axes, last = problem.role, _axes(problem), _axes(problem)[2]
    groups = math.gcd(problem.G, max(1, channels // max(problem.C, problem.K)))
    phases = last.stride // math.gcd(last.stride, last.dilation)

    # Segments of positions along the last axis of the tensor that is made, or of y.
    sizes = [axis.size(Role.X if role is Role.X else Role.Y) for axis in axes]
    step = math.lcm(last.stride, last.dilation) // (1 if role is Role.X else last.stride)
    tile = _even(-(-sizes[2] // step), tile)
    segments = min(step, sizes[2]) * -(-sizes[2] // (step * tile))
    rows = problem.N * sizes[0] * sizes[1]

    # Rows of taps.
    products = groups * problem.C * problem.K
    per_phase = -(-last.kernel // phases)
    taps = _even(per_phase, max(1, min(8, _WEIGHTS // products)))
    tap_rows = axes[0].kernel * axes[1].kernel * phases * -(-per_phase // taps)
    part_rows = _even(tap_rows, max(1, _TAP_SUMS // (products * taps)))

    # A block: lines of memory, times parts of the taps, times a tile of segments and rows.
    vectors = problem.G // groups
    vector_bytes = groups * max(problem.C, problem.K) * problem.dtype.itemsize
    # Where positions begin anywhere in a line, parts of lines cost more than tall tiles gain.
    line = _LINE if role is Role.W or vectors * vector_bytes % _LINE == 0 else 4 * _LINE
    lanes = _even(vectors, min(_THREADS, max(8, line // vector_bytes)))
    chunks = -(-vectors // lanes)
    parts = _even(-(-tap_rows // part_rows), _THREADS // lanes) if role is Role.W else 1
    part_blocks = -(-tap_rows // (part_rows * parts))
    slots = _THREADS // (lanes * parts)
    # Where the kernel spans several rows, a tall tile shares more of them.
    flat = axes[0].kernel == axes[1].kernel == 1
    segment_tile = slots if flat else max(1, math.isqrt(slots // 4))
    if step <= slots:  # what lies between the positions of a segment goes into the same block
        segment_tile = max(step, segment_tile // step * step)
    segment_tile = _even(segments, segment_tile)
    row_tile = min(rows, slots // segment_tile)
    tiles = -(-segments // segment_tile) * -(-rows // row_tile)
    threads = lanes * segment_tile * row_tile * parts

    elements = {each: math.prod(problem.shape(each)) for each in Role}
    largest = max(*elements.values(), (tiles + 1) * segment_tile * row_tile * tile)
    defines = {
        f"ROLE_{role}": 1, "IN": TYPES[problem.dtype.name], "OUT": TYPES[problem.out_dtype.name],
        "INDEX_BITS": 32 if largest <= _MOST_INDEX else 64,
        "G": problem.G, "C": problem.C, "K": problem.K,
        **{f"{name}{k}": value for k, axis in enumerate(axes) for name, value in
           zip("XYRSDP", (axis.x_size, axis.y_size, axis.kernel, axis.stride, axis.dilation, axis.pad_lo))},
        "GROUPS": groups, "TILE": tile, "TAPS": taps, "SEGMENTS": segments, "ROWS": rows,
        "LANES": lanes, "CHUNKS": chunks, "SEGMENT_TILE": segment_tile, "ROW_TILE": row_tile,
    }
    blocks, workspace, more = chunks * tiles, 0, ()
    if role is Role.W:
        # As many blocks as run at once, each with its partial sums.
        slabs = min(tiles, max(1, _RESIDENT * _MULTIPROCESSORS // (chunks * part_blocks)), _most_slabs(problem, policy))
        slab = -(-tiles // slabs)
        slabs = -(-tiles // slab)
        words = -(-groups * problem.C * problem.dtype.itemsize // 4)
        defines |= {
            "RESIDENT": _RESIDENT, "BATCH": min(part_rows, max(1, _WINDOWS // ((tile + taps - 1) * words))),
            "PART_ROWS": part_rows, "PARTS": parts, "SLAB": slab, "SLABS": slabs,
            "ROUND": _even(part_rows * taps * products, _SHARED // (4 * (threads + lanes))),
        }
        blocks, workspace = chunks * part_blocks * slabs, 4 * elements[role] * slabs
        more = (Launch("depthwise_w_sum", (-(-elements[role] // 8), 1, 1), (256, 1, 1)),)
    return Kernel(
        source="depthwise.cu", defines=tuple((name, str(value)) for name, value in defines.items()),
        launches=(Launch(f"depthwise_{role}", (blocks, 1, 1), (threads, 1, 1)), *more),
        w_order=(*range(2, 2 + problem.rank), 0, 1), workspace=workspace, label=f"{groups} groups x {tile} positions")
