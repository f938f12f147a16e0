# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Few channels in x, one group: the last layers of generators, vocoders and decoders.

All roles are matrix products over the windows of x, which are never written (see ``thin.cu``).  Here
the tiles are chosen, by a rough count of the cycles that a multiprocessor spends on a block.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_deconv.lowering.cuda import Kernel, Launch
from jax_deconv.policy import Policy
from jax_deconv.problem import Axis, ConvProblem, Role

#: The types of operands and results, as the source calls them.
TYPES = {np.dtype(np.float32): "f32", np.dtype(jnp.bfloat16): "bf16", np.dtype(np.float16): "f16"}

#: Beyond so many channels x is not thin: products that are dense along them pay.
MOST_CHANNELS = 16

# Bytes of shared memory: what a block may use on every GPU that has sm_80, sm_90 or sm_100, and what an H200 has.
_MOST_SHARED, _SHARED = 163 * 1024, 227 * 1024
_REGISTERS = 65536
_MOST_FRAGMENTS = 24  # of 16 by 8 sums in a warp's registers
_PROCESSORS = 132

# Cycles of a multiprocessor: for a byte of device memory, of L2 and of shared memory, a product of
# fragments on tensor cores and without, a copy to shared memory, and a block or tile as such.
_DEVICE_BYTE, _L2_BYTE, _SHARED_BYTE = 1 / 19, 1 / 38, 1 / 128
_PRODUCT, _STRICT_PRODUCT = 1.6, 12
_COPY = 0.3
_TILE, _BLOCK = 600, 3000


def _up(a: int, b: int) -> int:
    return -(-a // b)


@dataclasses.dataclass(frozen=True)
class _Shape:
    """What the roles' plans have in common."""

    problem: ConvProblem
    strict: bool

    @functools.cached_property
    def axes(self) -> tuple[Axis, Axis, Axis]:
        return (Axis(1, 1, 1),) * (3 - self.problem.rank) + self.problem.geometry

    @property
    def item(self) -> int:
        return self.problem.dtype.itemsize

    @property
    def step(self) -> int:
        """Elements of the sum in one product of fragments."""
        return 32 // self.item

    @property
    def product(self) -> float:
        return _STRICT_PRODUCT if self.strict else _PRODUCT

    def copied(self, width: int) -> int:
        """Bytes that one copy from a row of `width` elements reads."""
        return math.gcd(width * self.item, 16)

    def group(self, fragments: int, aligned: int) -> tuple[int, bool]:
        """GROUP and WIDE: with stores of up to 16 bytes that start at multiples of a part of `aligned` elements."""
        for group in (4, 2, 1):
            if fragments % group == 0 and aligned % (2 * group) == 0 and (
                    2 * group * self.problem.out_dtype.itemsize <= 16):
                return group, True
        return 1, False

    def kernel(self, label: str, launches: tuple[Launch, ...], workspace: int = 0, **macros) -> Kernel:
        p = self.problem
        common = {"IN": TYPES[p.dtype], "OUT": TYPES[p.out_dtype], "STRICT": self.strict,
                  "ROLE_X": p.role is Role.X, "ROLE_Y": p.role is Role.Y, "ROLE_W": p.role is Role.W,
                  "BATCH": p.N, "XC": p.C, "YC": p.K, "WK": 1, "GROUP": 1, "WIDE": False}
        for i, a in enumerate(self.axes):
            common |= {f"X{i}": a.x_size, f"Y{i}": a.y_size, f"R{i}": a.kernel, f"S{i}": a.stride,
                       f"D{i}": a.dilation, f"L{i}": a.pad_lo}
        defines = tuple((name, value if isinstance(value, str) else str(int(value)))
                        for name, value in (common | macros).items())
        w_order = (*range(2, 2 + p.rank), 1, 0)
        return Kernel("thin.cu", defines, launches, w_order, workspace, label)


@functools.lru_cache(maxsize=256)
def _tiles(extents: tuple[int, ...], limit: int) -> tuple[tuple[int, ...], ...]:
    """Tiles (batch, and three axes) of at most `limit` rows that leave little of it idle."""
    def sizes(extent):
        return sorted({min(extent, 2**i) for i in range(limit.bit_length())}
                      | {_up(extent, j) for j in range(1, 9) if _up(extent, j) <= limit})

    found = []
    for space in itertools.product(*map(sizes, extents[1:])):
        whole = space == extents[1:] or extents[1] * extents[2] == 1
        for n in sizes(extents[0]) if whole else (1,):
            if n * math.prod(space) <= limit:
                found.append((n, *space))
    most = max(map(math.prod, found))
    return tuple(t for t in found if math.prod(t) * 2 > most)


#: Role x: columns times distances that a table may have.
_MOST_COLUMNS = 2**14


def _blocks(extents, tile) -> int:
    return math.prod(map(_up, extents, tile))


def _registers(fragments: int) -> int:
    """Of a thread, roughly: the sums, and as many again for all else."""
    return 4 * fragments + 64


def _grid(tiles: int, slices: int, warps: int, fragments: int, shared: int) -> tuple[int, int]:
    """Blocks for each slice, all at work at once, and how many share a multiprocessor."""
    resident = max(1, min(_SHARED // (shared + 1024), _REGISTERS // (_registers(fragments) * 32 * warps), 48 // warps))
    most = max(1, _PROCESSORS * resident // slices)
    return _up(tiles, _up(tiles, most)), resident


def _total(tiles: int, grid: int, slices: int, resident: int, warps: int, cycles: float, setup: float) -> float:
    """Cycles until all tiles are done, a tile alone on a multiprocessor taking `cycles`."""
    together = min(resident, _up(grid * slices, _PROCESSORS))
    return together * (_up(tiles, grid) * cycles + setup) * (1 + 10 / (together * warps))


# -- Role x -------------------------------------------------------------------------------------------

def _distances(axis: Axis, period: int) -> tuple[int, int, list[list[bool]]]:
    """The smallest distance at which a phase of the period takes a tap, their number, and which phase does."""
    taps = set()
    for begin in range(-axis.pad_lo, axis.kernel * axis.dilation - axis.pad_lo, axis.dilation):
        first = _up(-begin, axis.stride)
        taps |= {(begin + v * axis.stride, v) for v in range(first, _up(period - begin, axis.stride))}
    first = min(v for _, v in taps)
    number = max(v for _, v in taps) - first + 1
    return first, number, [[(p, first + v) in taps for p in range(period)] for v in range(number)]


def _columns_in_use(tables, channels: int, columns: int, block: int, group: int) -> list[list[bool]]:
    """For each distance, which fragments of columns are not zero; fragments of a group share what they hold."""
    wide = 8 * group
    uses = []
    for t0, t1, t2 in itertools.product(*tables):
        used = [False] * (_up(len(t0) * len(t1) * columns, block) * block // wide)
        for (i0, a), (i1, b) in itertools.product(enumerate(t0), enumerate(t1)):
            if a and b:
                first = (i0 * len(t1) + i1) * columns
                for p, c in enumerate(t2):
                    if c:
                        for q in range((first + p * channels) // wide, (first + (p + 1) * channels - 1) // wide + 1):
                            used[q] = True
        uses.append([u for u in used for _ in range(group)])
    return uses


@functools.lru_cache(maxsize=4096)
def _meetings_of_rows(tile: tuple[int, ...], plane: int, line: int) -> float:
    places = itertools.islice(itertools.product(*map(range, tile)), 64)
    rows = [(i0 * plane + i1 * line + i2) % 8 for i0, i1, i2 in places]
    groups = [rows[i:i + 8] for i in range(0, len(rows), 8)]
    return sum(max(map(group.count, group)) for group in groups) / len(groups)


@dataclasses.dataclass(frozen=True)
class _Periods:
    """Role x: how the columns of the product lie in x, and from which distances in y they come."""

    shape: _Shape
    m2: int  # positions of y that a row advances on the last axis

    @functools.cached_property
    def periods(self) -> tuple[int, ...]:
        a0, a1, a2 = self.shape.axes
        return a0.stride, a1.stride, self.m2 * a2.stride

    @property
    def span(self) -> int:
        """At most so many distances there are."""
        return math.prod(_up(a.extent + period, a.stride) for a, period in zip(self.shape.axes, self.periods))

    @functools.cached_property
    def distances(self):
        return [_distances(a, period) for a, period in zip(self.shape.axes, self.periods)]

    @functools.cached_property
    def numbers(self) -> list[int]:
        return [number for _, number, _ in self.distances]

    @functools.cached_property
    def extents(self) -> tuple[int, ...]:
        return (self.shape.problem.N, *(_up(a.x_size, period) for a, period in zip(self.shape.axes, self.periods)))

    @property
    def run(self) -> int:
        return self.periods[2] * self.shape.problem.C

    def positions(self, tile) -> int:
        """Positions of y that a tile needs."""
        (v0, v1, v2), m2 = self.numbers, self.m2
        return tile[0] * (tile[1] - 1 + v0) * (tile[2] - 1 + v1) * m2 * _up((tile[3] - 1) * m2 + v2, m2)

    def meetings(self, tile) -> float:
        """How often 8 rows that are read together meet in a bank."""
        (_, v1, v2), m2 = self.numbers, self.m2
        line = m2 * _up((tile[3] - 1) * m2 + v2, m2)
        return _meetings_of_rows(tile[1:], (tile[2] - 1 + v1) * line, line)

    def tile(self, rows: int, live: float, distances: int) -> tuple[int, ...]:
        """Of the tiles of at most so many rows the cheapest."""
        read = distances * _up(self.shape.problem.K, self.shape.step) / 16 * 512 * _SHARED_BYTE
        position = self.shape.problem.K * self.shape.item * _L2_BYTE + 2
        product = live * _up(self.shape.problem.K, self.shape.step) / 16 * self.shape.product
        return min(_tiles(self.extents, rows), key=lambda tile: _blocks(self.extents, tile) * (
            self.positions(tile) * position + rows * (product + read * self.meetings(tile))))

    def macros(self) -> dict:
        return {"M2": self.m2, **{f"V{i}": first for i, (first, _, _) in enumerate(self.distances)},
                **{f"NV{i}": number for i, number in enumerate(self.numbers)}}


def _plans_x(s: _Shape) -> Iterator[tuple[float, Kernel]]:
    p = s.problem
    steps, taps = _up(p.K, s.step), math.prod(a.kernel for a in s.axes)
    sizes = {min(steps, n) for n in (1, 2, 4, 8)}
    for m2 in (1, 2, 4):
        periods = _Periods(s, m2)
        if m2 > 1 and periods.run > 32 or periods.span * math.prod(periods.periods) * p.C > _MOST_COLUMNS:
            continue
        distances = math.prod(periods.numbers)
        aligned = math.gcd(periods.run, s.axes[2].x_size * p.C)
        for columns in {periods.run, _up(periods.run, 8) * 8}:
            fragments = _up(periods.periods[0] * periods.periods[1] * columns, 8)
            for nf, wn in itertools.product(range(1, 13), (1, 2, 4)):
                slices = _up(fragments, nf * wn)
                bn = 8 * nf * wn
                if nf * wn > fragments or slices * bn * distances > _MOST_COLUMNS:
                    continue
                group, wide = s.group(nf, aligned)
                used = _columns_in_use([t for _, _, t in periods.distances], p.C, columns, bn, group)
                # A fragment of zeros is left out if it is one for every warp and every slice.
                live = wn * sum(any(row[i::nf]) for row in used for i in range(nf))
                live_distances = sum(map(any, used))
                sliced = distances * bn < taps * p.C
                w_rows = distances * bn if sliced else taps * p.C + 1
                for warps, mf in itertools.product((4, 8, 16), (1, 2, 4)):
                    if mf * nf > min(_MOST_FRAGMENTS, 192 // warps) or wn > warps:
                        continue
                    wm = warps // wn
                    tile = periods.tile(16 * mf * wm, live, live_distances)
                    positions, tiles = periods.positions(tile), _blocks(periods.extents, tile)
                    meetings = periods.meetings(tile)
                    for size in sizes:
                        chunk, rounds = size * s.step, _up(steps, size)
                        copies = (positions + (w_rows if rounds > 1 else 0)) * p.K * s.item
                        load = copies * _L2_BYTE
                        device = (positions * p.K * s.item / slices / 1.2 + math.prod(tile) * periods.run
                                  * math.prod(periods.periods[:2]) * p.out_dtype.itemsize / slices) * _DEVICE_BYTE
                        shared_time = rounds * size * 512 * _SHARED_BYTE * (
                            live_distances * wn * wm * mf * meetings + live / 2 * wm)
                        multiply = rounds * size * live * wm * mf * s.product
                        issue = (rounds * live_distances * warps * 12 / 2 + copies / s.copied(p.K) * _COPY
                                 + positions * 0.7)
                        cycles = (max(load, device, shared_time, multiply) + issue + _TILE + rounds * 100
                                  + 0.3 * min(max(load, device), max(shared_time, multiply)))
                        setup = _BLOCK + (w_rows * p.K * s.item * _L2_BYTE if rounds == 1 else 0)
                        for stages in (2,) if rounds == 1 else (2, 3):
                            shared = ((stages * positions + (stages if rounds > 1 else 1) * w_rows)
                                      * (chunk * s.item + 16) + 4 * (2 * positions + distances * bn))
                            if shared > _MOST_SHARED:
                                continue
                            grid, resident = _grid(tiles, slices, warps, mf * nf, shared)
                            cost = _total(tiles, grid, slices, resident, warps,
                                          cycles + (rounds * 100 if stages == 2 else 0), setup)
                            label = f"x m{m2} c{columns} {wm}x{wn} warps of {mf}x{nf} {tile} k{chunk} s{stages}"
                            launch = Launch("thin_x", (grid * slices, 1, 1), (32 * warps, 1, 1), shared)
                            yield cost, functools.partial(
                                s.kernel, label, (launch,), TN=tile[0], T0=tile[1], T1=tile[2], T2=tile[3],
                                WM=wm, WN=wn, MF=mf, NF=nf, GROUP=group, SLICES=slices, CHUNK=chunk, STAGES=stages,
                                COLUMNS=columns, SLICED=sliced, WIDE=wide, RESIDENT=resident, **periods.macros())


# -- Windows of x: roles y and w ----------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class _Tiling:
    """A tile of positions, and how its part of x lies in shared memory."""

    tile: tuple[int, ...]
    unit: int
    skew: int
    pitch: int
    x_rows: int
    meetings: float  # in a bank, of what is read at once

    @property
    def elements(self) -> int:
        return self.x_rows * self.pitch


@dataclasses.dataclass(frozen=True)
class _Windows:
    """How windows lie in a tile of x."""

    shape: _Shape
    _tile: dict = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def extents(self) -> tuple[int, ...]:
        return (self.shape.problem.N, *(a.y_size for a in self.shape.axes))

    @functools.cached_property
    def run(self) -> int:
        """Elements of a window that are neighbours."""
        last = self.shape.axes[2]
        return self.shape.problem.C * (last.kernel if last.dilation == 1 else 1)

    @functools.cached_property
    def rows(self) -> int:
        return math.prod(a.kernel for a in self.shape.axes) * self.shape.problem.C

    @property
    def runs(self) -> int:
        return self.rows // self.run

    @functools.cached_property
    def pairs(self) -> bool:
        """Whether windows, and runs in them, begin at even elements."""
        last, channels = self.shape.axes[2], self.shape.problem.C
        return (self.shape.item == 2 and last.stride * channels % 2 == 0
                and (last.dilation == 1 or last.dilation * channels % 2 == 0))

    @functools.cached_property
    def matrices(self) -> bool:
        """Whether 16 bytes of a window that are neighbours can be read as a row of a matrix."""
        last, channels, row = self.shape.axes[2], self.shape.problem.C, 16 // self.shape.item
        if self.shape.strict or self.run % row or last.stride * channels % row or (
                last.dilation > 1 and last.dilation * channels % row):
            return False
        if self.shape.problem.role is Role.W:
            return self.shape.item == 2
        return self.rows % self.shape.step == 0

    @functools.cached_property
    def lead(self) -> int:
        """Elements before the first window, with which copies of words start at words."""
        last, channels = self.shape.axes[2], self.shape.problem.C
        return int(self.pairs and not self.matrices and last.pad_lo * channels % 2 and last.x_size * channels % 2 == 0)

    @property
    def run_padded(self) -> int:
        return _up(self.run + self.lead, 2) * 2 if self.pairs else self.run

    @property
    def gather(self) -> float:
        """Cycles of shared memory for a fragment of windows."""
        return 4 if self.matrices else 6 if self.pairs or self.shape.item == 4 else 12

    @property
    def window(self) -> int:
        return _up(self.runs * self.run_padded, self.shape.step) * self.shape.step

    def unit(self, tile) -> int:
        """Elements of x that one copy may read."""
        last, channels = self.shape.axes[2], self.shape.problem.C
        return math.gcd(16 // self.shape.item, last.x_size * channels, tile[3] * last.stride * channels,
                        last.pad_lo * channels + self.lead)

    @functools.cached_property
    def advance(self) -> int:
        return self.shape.axes[2].stride * self.shape.problem.C

    def x_rows(self, tile) -> int:
        """Rows of the tile of x."""
        return tile[0] * math.prod((t - 1) * a.stride + a.extent for t, a in zip(tile[1:3], self.shape.axes))

    def pitch(self, tile, skew: int, unit: int) -> int:
        """The least X_PITCH."""
        axis, vector = self.shape.axes[2], 16 // self.shape.item
        last = _up(((tile[3] - 1) * axis.stride + axis.extent) * self.shape.problem.C + self.lead, unit) * unit - 1
        if skew:
            last = last // self.advance * (self.advance + skew) + last % self.advance
        return _up(last + 2, vector) * vector

    def meetings(self, tile, skew: int, pitch: int) -> float:
        """How often the words that a warp reads at once meet in a bank."""
        a0, a1, _ = self.shape.axes
        row1, item = pitch * a1.stride, self.shape.item
        row0 = pitch * ((tile[2] - 1) * a1.stride + a1.extent) * a0.stride
        begins = [(i0 * row0 + i1 * row1 + i2 * (self.advance + skew)) * item // 4
                  for i0, i1, i2 in itertools.islice(itertools.product(*map(range, tile[1:])), 32)]
        groups = []
        for i in range(0, max(len(begins) - 7, 1), 8):
            rows = begins[i:i + 8]
            if self.matrices or self.shape.problem.role is Role.Y:
                groups.append({row + t for row in rows for t in range(4)})
            elif item == 2:
                groups.append({row + g for row in rows[::2] for g in range(8)})
            else:
                groups.append({row + 2 * g for row in rows[:4] for g in range(8)})
        banks = [[word % 32 for word in group] for group in groups]
        return sum(max(map(bank.count, bank)) for bank in banks) / len(banks)

    def tiling(self, tile) -> _Tiling:
        """The UNIT, SKEW and X_PITCH with which copies are wide and words meet the fewest times."""
        unit, vector = self.unit(tile), 16 // self.shape.item
        skewable = math.gcd(unit, self.advance)
        step = vector if self.matrices else max(skewable, 4 // self.shape.item)
        skews = [0] if self.advance * self.shape.item < 32 else range(0, 9 * step, step)
        if self.matrices:
            unit = skewable
        options = []
        for skew in skews:
            wide = skewable if skew else unit
            least = self.pitch(tile, skew, wide)
            for pitch in range(least, least + 8 * vector, vector) if self.x_rows(tile) > 1 else (least,):
                meetings = self.meetings(tile, skew, pitch)
                cost = meetings + pitch / self.pitch(tile, 0, unit) - wide / 8 / vector
                options.append((cost, _Tiling(tile, wide, skew, pitch, self.x_rows(tile), meetings)))
        return min(options, key=lambda option: option[0])[1]

    def tile(self, limit: int) -> _Tiling:
        """Of the tiles of at most `limit` positions the cheapest."""
        if limit not in self._tile:
            self._tile[limit] = self._cheapest(limit)
        return self._tile[limit]

    def _cheapest(self, limit: int):
        def cycles(tile):
            unit = self.unit(tile)
            elements = self.x_rows(tile) * self.pitch(tile, 0, unit)
            return _blocks(self.extents, tile) * (
                elements * (self.shape.item * _L2_BYTE + _COPY / unit)
                + limit * (2 if tile[3] % 8 == 0 or tile[3] >= 16 else 4))

        return self.tiling(min(_tiles(self.extents, limit), key=cycles))

    def macros(self, t: _Tiling) -> dict:
        return dict(TN=t.tile[0], T0=t.tile[1], T1=t.tile[2], T2=t.tile[3], RUN=self.run, RUN_PADDED=self.run_padded,
                    RUNS=self.runs, PAIRS=self.pairs, MATRICES=self.matrices, LEAD=self.lead, UNIT=t.unit,
                    SKEW=t.skew, X_PITCH=t.pitch)


def _pitch(bn: int) -> int:
    return bn + (16 if bn % 16 else 8)


def _widths(columns: int) -> Iterator[tuple[int, int, int]]:
    """Ways to cover the columns: fragments in a warp, warps, slices."""
    fragments = _up(columns, 8)
    for nf, wn in itertools.product((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 4, 8)):
        if nf * wn <= max(fragments, 4):
            yield nf, wn, _up(fragments, nf * wn)


def _plans_y(s: _Shape) -> Iterator[tuple[float, Kernel]]:
    p, win = s.problem, _Windows(s)
    steps = win.window // s.step
    for (nf, wn, slices), warps, mf in itertools.product(_widths(p.K), (4, 8), (1, 2, 4)):
        if mf * nf > _MOST_FRAGMENTS or wn > warps:
            continue
        wm = warps // wn
        bm, bn = 16 * mf * wm, 8 * nf * wn
        group, wide = s.group(nf, p.K)
        tiling = win.tile(bm)
        tile, elements = tiling.tile, tiling.elements
        tiles = _blocks(win.extents, tile)
        gather = steps * wm * wn * (mf * win.gather * tiling.meetings + 2)
        columns = steps * wm * wn * nf / 2 * 4
        multiply = steps * wm * wn * mf * nf * s.product
        written = math.prod(tile) * min(bn, _up(p.K, slices)) * p.out_dtype.itemsize
        device = (written + elements * s.item / slices / 1.2) * _DEVICE_BYTE
        stores = bm * bn / (2 * group if wide else 1) / 32 * 2.5
        copy_w = win.window * bn / 2 * _COPY + win.window * bn * s.item * _L2_BYTE
        # Where all of w is loaded once, a stage is a tile: two at a time.
        parts = ((chunk, stages) for chunk, stages in ((128, 2), (128, 3), (64, 2), (64, 3)) if chunk < win.window)
        for chunk, stages in ((win.window, 2), *parts):
            once = chunk == win.window
            for x_tiles in (1, 2):
                shared = (x_tiles * elements + (1 if once else stages) * chunk * _pitch(bn)) * s.item + 4 * (
                    win.window + 2 * tiling.x_rows)
                grid, resident = _grid(tiles, slices, warps, mf * nf, shared)
                if shared > _MOST_SHARED or (x_tiles == 1 and grid < tiles):
                    continue
                copy_x = elements * (_COPY / tiling.unit + s.item * _L2_BYTE)
                cycles = (max(device, gather + columns, multiply) + stores + copy_x + _TILE
                          + 0.3 * min(device, gather + columns + multiply)
                          + (0 if once else copy_w + _up(win.window, chunk) * 100))
                cost = _total(tiles, grid, slices, resident, warps, cycles, _BLOCK + (copy_w if once else 0))
                label = f"y {wm}x{wn} warps of {mf}x{nf} {tile} k{chunk} s{stages}"
                launch = Launch("thin_y", (grid * slices, 1, 1), (32 * warps, 1, 1), shared)
                yield cost, functools.partial(
                    s.kernel, label, (launch,), WM=wm, WN=wn, MF=mf, NF=nf, GROUP=group, WIDE=wide, SLICES=slices,
                    CHUNK=chunk, STAGES=stages, X_TILES=x_tiles, RESIDENT=resident, **win.macros(tiling))


def _plans_w(s: _Shape) -> Iterator[tuple[float, Kernel]]:
    p, win = s.problem, _Windows(s)
    rows = _up(win.runs * win.run_padded, 16)
    for (nf, wn, slices), mf, wm in itertools.product(_widths(p.K), range(1, 9), (1, 2, 4, 8)):
        if mf * nf > _MOST_FRAGMENTS or wn * wm > 8 or mf * wm > rows + wm - 1 or wn > 4:
            continue
        row_slices = _up(rows, mf * wm)
        wk = 8 // (wn * wm)
        bm, bn = 16 * mf * wm, 8 * nf * wn
        for limit in (32, 64, 128, 256):
            if limit < s.step * wk:
                continue
            tiling = win.tile(limit)
            tile, elements = tiling.tile, tiling.elements
            copies = elements / tiling.unit * _COPY
            tiles = _blocks(win.extents, tile)
            positions = _up(math.prod(tile), s.step * wk) * s.step * wk
            fill = positions // s.step
            shared = max(2 * (elements + positions * _pitch(bn)) * s.item + 4 * (4 * positions + 3 * tiling.x_rows),
                         wk // 2 * bm * bn * 4)
            if shared > _MOST_SHARED:
                continue
            gather = fill * wm * wn * (mf * win.gather * tiling.meetings + 4)
            columns = fill * wm * wn * nf / 2 * 4
            multiply = fill * wm * mf * wn * nf * s.product
            load = (positions * bn + elements) * s.item * _L2_BYTE
            device = (positions * bn + elements / slices) * s.item * _DEVICE_BYTE / row_slices
            cycles = max(load, device, gather + columns, multiply) + 0.3 * min(load, gather + columns + multiply)
            cycles += copies * 0.5 + 300
            for resident in range(1, min(2, _SHARED // (shared + 1024), _REGISTERS // (256 * _registers(mf * nf))) + 1):
                splits = max(1, min(tiles, _PROCESSORS * resident // (slices * row_slices)))
                splits = _up(tiles, _up(tiles, splits))
                blocks = splits * slices * row_slices
                size = win.rows * p.K
                lanes = max(n for n in (1, 2, 4, 8) if n <= _up(splits, 4))
                add = (splits * size * 8 * _L2_BYTE / _PROCESSORS + 4000) if splits > 1 else 0
                cost = (_up(blocks, _PROCESSORS) * _up(tiles, splits) * cycles * (1 if resident > 1 else 1.15)
                        + 2 * _BLOCK + wk * bm * bn / 32 + add)
                label = f"w {wm}x{wn}x{wk} warps of {mf}x{nf} {tile} p{splits}"
                launches = (Launch("thin_w", (blocks, 1, 1), (256, 1, 1), shared),)
                if splits > 1:
                    launches += (Launch("thin_w_sum", (_up(size * lanes, 256), 1, 1), (256, 1, 1)),)
                yield cost, functools.partial(
                    s.kernel, label, launches, workspace=4 * splits * size if splits > 1 else 0,
                    WM=wm, WN=wn, WK=wk, MF=mf, NF=nf, SLICES=slices, ROW_SLICES=row_slices, SPLITS=splits,
                    SUM_LANES=lanes, RESIDENT=resident, **win.macros(tiling))


_PLANS = {Role.X: _plans_x, Role.Y: _plans_y, Role.W: _plans_w}


@functools.lru_cache(maxsize=1024)
def _best(problem: ConvProblem, strict: bool, most: int = 4) -> tuple[Kernel, ...]:
    plans = sorted(_PLANS[problem.role](_Shape(problem, strict)), key=lambda plan: plan[0])
    kernels: dict[tuple, Kernel] = {}
    for _, make in plans:
        if len(kernels) == most:
            break
        # The count of cycles is rough: kernels that are worth a trial differ in the shape of a block.
        macros = make.keywords
        different = macros["WM"] * macros["WN"], macros.get("WK"), macros["MF"]
        if different not in kernels:
            kernels[different] = make()
    return tuple(kernels.values())


def _strict(problem: ConvProblem, policy: Policy) -> bool:
    return problem.dtype == np.float32 and policy.precision is lax.Precision.HIGHEST


def why_not(problem: ConvProblem, policy: Policy) -> str | None:
    """Why these kernels do not take the problem, or None.

    >>> from jax_deconv.problem import Axis
    >>> axis = Axis(x_size=64, y_size=32, kernel=4, stride=2, pad_lo=1)
    >>> problem = ConvProblem(Role.X, 8, 1, 3, 64, (axis, axis), np.dtype("float32"), np.dtype("float32"))
    >>> why_not(problem, Policy())
    >>> why_not(dataclasses.replace(problem, C=64), Policy())
    'x has 64 channels, more than 16'
    """
    if problem.G != 1:
        return f"the convolution has {problem.G} groups"
    if not {problem.dtype, problem.out_dtype} <= set(TYPES):
        return f"the types are {problem.dtype} and {problem.out_dtype}, not float32, bfloat16 or float16"
    if problem.C > MOST_CHANNELS:
        return f"x has {problem.C} channels, more than {MOST_CHANNELS}"
    if not 1 <= problem.rank <= 3:
        return f"there are {problem.rank} spatial axes"
    if 0 in (*problem.shape(Role.X), *problem.shape(Role.Y), *problem.shape(Role.W)):
        return "a tensor is empty"
    if max(problem.N * math.prod(a.size(r) for a in problem.geometry) for r in (Role.X, Role.Y)) >= 2**31:
        return "there are 2**31 positions or more"
    if (problem.geometry[-1].x_size + problem.geometry[-1].extent) * problem.C >= 2**30:
        return "a row of x has 2**30 elements or more"
    if not _best(problem, _strict(problem, policy)):
        return "the tile of a block does not fit shared memory"
    return None


def kernels(problem: ConvProblem, policy: Policy) -> tuple[Kernel, ...]:
    """Ways to compute a problem that `why_not` takes, most promising first."""
    return _best(problem, _strict(problem, policy))
