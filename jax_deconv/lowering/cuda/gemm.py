# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Windows that do not overlap, as one matrix product whose result goes straight to its place.

With kernel == stride each position of x belongs to one tap of one window, so roles x and y are
products of matrices that hold nothing twice (see ``gemm.cu``).  Libraries compute the product and
then interleave, or write x a second time for the bias; here the product's epilogue does both.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from jax import lax

from jax_deconv.lowering.cuda import TYPES, Kernel, Launch
from jax_deconv.policy import Policy
from jax_deconv.problem import Axis, ConvProblem, Role

#: Blocks that stay on the GPU and take tile after tile: the multiprocessors of an H100 or H200.
_PERSISTENT = 132

#: Rows of 128 bytes in shared memory.
_ROW = 128


@dataclasses.dataclass(frozen=True)
class _Tiling:
    """A tile of bm x bn results, and its pipeline; warps (m, n) of the portable kernel, or turns of Hopper's."""

    bm: int
    bn: int
    stages: int
    warps: tuple[int, int] | None = None
    turns: int | None = None
    panels: int = 0

    @property
    def label(self) -> str:
        how = (" turns" if self.turns == 2 else "") + (" panels" if self.panels else "")
        return f"{'mma' if self.warps else 'wgmma'} {self.bm}x{self.bn}{how}"


#: Hopper's tensor cores take the upper bits of float32: truncated to TF32, where the portable kernel rounds.
_TURNS, _SHARED = _Tiling(128, 128, 6, turns=2), _Tiling(128, 256, 4, turns=1)

#: For sums of few slices of 128 bytes: 14 tiles of 16 KiB fit in shared memory, two panels of A and the stages of B.
_PANELS = {slices: _Tiling(128, 128, 14 - 2 * slices, turns=2, panels=2) for slices in range(1, 5)}
_PORTABLE = (_Tiling(128, 128, 3, (2, 4)), _Tiling(64, 128, 3, (2, 2)), _Tiling(64, 64, 4, (2, 2)))


def why_not(problem: ConvProblem, policy: Policy) -> str | None:
    """The reason why these kernels do not apply, or None."""
    if problem.role is Role.W:
        return "makes x or y, not w"
    if problem.G != 1:
        return "takes one group"
    if not 1 <= problem.rank <= 3:
        return "takes 1 to 3 spatial axes"
    if not {problem.dtype.name, problem.out_dtype.name} <= set(TYPES):
        return "takes float32, bfloat16 and float16"
    if problem.dtype == np.float32 and policy.precision == lax.Precision.HIGHEST:
        return "rounds float32 to TF32"
    if any(a.kernel != a.stride or (a.dilation != 1 and a.kernel != 1) for a in problem.geometry):
        return "takes windows that tile x: kernel == stride"
    if any(a.pad_lo < 0 for a in problem.geometry):
        return "takes no negative padding"
    if 0 in (*problem.shape(Role.X), *problem.shape(Role.Y)):
        return "has nothing to compute"
    product = _Product.of(problem)
    if max(product.m, product.n, product.k) >= 2**31 - 1024:
        return "takes matrices with less than 2^31 rows and columns"
    return None


@dataclasses.dataclass(frozen=True)
class _Product:
    """A problem as a matrix product [m, k] x [n, k]^T; three axes of pixels, `run` values at a position of x."""

    m: int
    n: int
    k: int
    run: int
    axes: tuple[Axis, ...]
    pixels: tuple[int, ...]  # along each axis, those whose y reads as zero included

    @classmethod
    def of(cls, problem: ConvProblem) -> _Product:
        axes = [dataclasses.replace(a, dilation=1) for a in problem.geometry]
        run, last = problem.C, axes[-1]
        if last.pad_lo == 0 and last.x_size == last.y_size * last.stride:
            # The taps of the last axis lie side by side in x, as if they were channels.
            run *= last.stride
            axes[-1] = Axis(last.y_size, last.y_size, 1)
        axes = [Axis(1, 1, 1)] * (3 - len(axes)) + axes
        made_x = problem.role is Role.X
        # Positions of x that no window of y reaches are made as well, as zero.
        pixels = tuple(max(a.y_size, -(-(a.x_size + a.pad_lo) // a.stride)) if made_x else a.y_size for a in axes)
        taps = math.prod(a.stride for a in axes) * run
        n, k = (taps, problem.K) if made_x else (problem.K, taps)
        return cls(problem.N * math.prod(pixels), n, k, run, tuple(axes), pixels)

    @property
    def crop(self) -> bool:
        """Whether some taps lie outside x."""
        return any(a.pad_lo or p * a.stride > a.x_size for a, p in zip(self.axes, self.pixels))

    @property
    def tail(self) -> bool:
        """Whether there are pixels beyond y."""
        return any(p > a.y_size for a, p in zip(self.axes, self.pixels))


def _at_once(elements: int, itemsize: int) -> int:
    """The bytes, at most 16, that every multiple of so many elements is aligned to."""
    return math.gcd(elements * itemsize, 16)


def kernels(problem: ConvProblem, policy: Policy) -> list[Kernel]:
    """Ways to compute a problem that `why_not` does not refuse."""
    product, made_x = _Product.of(problem), problem.role is Role.X
    itemsize, out_itemsize = problem.dtype.itemsize, problem.out_dtype.itemsize
    a_bytes = _at_once(product.k if made_x else product.run, itemsize)
    b_bytes = _at_once(product.k, itemsize)
    vector = _at_once(product.run if made_x else product.n, out_itemsize) // out_itemsize
    defines = {
        "IN": TYPES[problem.dtype.name], "OUT": TYPES[problem.out_dtype.name], "ROLE_X": int(made_x),
        "M": product.m, "NN": product.n, "KK": product.k, "RUN": product.run,
        "CHANNELS": problem.C if made_x else problem.K, "TAIL": int(product.tail), "CROP": int(product.crop),
        "A_BYTES": a_bytes, "B_BYTES": b_bytes, "VEC": vector,
        **{f"{name}{i}": value for i, (a, p) in enumerate(zip(product.axes, product.pixels))
           for name, value in (("P", p), ("Y", a.y_size), ("X", a.x_size), ("S", a.stride), ("L", a.pad_lo))},
    }
    slices = -(-product.k * itemsize // _ROW)
    # Hopper's kernel copies whole chunks of 16 bytes, and finds them by 32-bit indices.
    fits = (a_bytes == b_bytes == 16 and (made_x or not product.crop)
            and max(math.prod(problem.shape(r)) for r in (Role.X, Role.Y)) * itemsize < 2**35)
    made = []
    tilings = list(_PORTABLE)
    if fits and product.n > _TURNS.bn and slices not in _PANELS:
        tilings = [_SHARED, _TURNS, *tilings]  # sums so long that tiles are seldom stored
    elif fits:
        tilings = [_TURNS, _SHARED, *tilings]
        if product.n > _TURNS.bn:
            tilings.insert(0, _PANELS[slices])
    for tiling in tilings:
        tiles = -(-product.m // tiling.bm) * -(-product.n // tiling.bn)
        if tiles >= 2**30:
            continue
        panel = slices * tiling.bm * _ROW
        stage = tiling.bn * _ROW + (0 if tiling.panels else tiling.bm * _ROW)
        if tiling.warps:
            launch = Launch("gemm", (tiles, 1, 1), (32 * math.prod(tiling.warps), 1, 1),
                            min(tiling.stages, slices) * stage)
            own = {"WM": tiling.warps[0], "WN": tiling.warps[1]}
        else:  # the stages are aligned to 1024 bytes
            launch = Launch("gemm", (min(tiles, _PERSISTENT), 1, 1), (384, 1, 1),
                            tiling.stages * stage + tiling.panels * panel + 1024)
            own = {"HOPPER": 1, "TURNS": tiling.turns, "PANELS": tiling.panels}
        own = {"BM": tiling.bm, "BN": tiling.bn, "STAGES": tiling.stages, **own}
        made.append(Kernel(source="gemm.cu", launches=(launch,), w_order=_w_order(problem), label=tiling.label,
                           defines=tuple((name, str(value)) for name, value in (defines | own).items())))
    return made


def _w_order(problem: ConvProblem) -> tuple[int, ...]:
    """The summed index innermost, the channel of x beside the last tap."""
    taps = tuple(range(2, 2 + problem.rank))
    return (*taps, 1, 0) if problem.role is Role.X else (0, *taps, 1)
