# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""The layers that benchmarks and tests share: transposed convolutions of public models.

`layers.json` names the model, the layer and the source of each.  Paddings and output paddings are
in PyTorch's convention, which is jax_deconv's with ``use_consistent_padding=True``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator

import numpy as np

from jax_deconv.problem import Axis, ConvProblem, Geometry, Role


@dataclasses.dataclass(frozen=True)
class Layer:
    """One transposed convolution: lhs [N, *in_spatial, in_channels], kernel [*R, in / groups, out]."""

    id: str
    model: str
    layer: str
    source: str
    klass: str
    batch: int
    in_channels: int
    out_channels: int
    in_spatial: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def rank(self) -> int:
        return len(self.in_spatial)

    @property
    def geometry(self) -> Geometry:
        return tuple(
            Axis(x_size=(n - 1) * s - 2 * p + (k - 1) * d + 1 + e, y_size=n, kernel=k, stride=s, dilation=d,
                 pad_lo=p)
            for n, k, s, p, e, d in zip(self.in_spatial, self.kernel, self.stride, self.padding,
                                        self.output_padding, self.dilation))

    @property
    def out_spatial(self) -> tuple[int, ...]:
        return tuple(axis.x_size for axis in self.geometry)

    @property
    def macs(self) -> int:
        return self.problem(Role.X, "float32").macs

    def problem(self, role: Role, dtype) -> ConvProblem:
        """The layer as a problem of the package; role x is its forward pass."""
        return ConvProblem(role=role, N=self.batch, G=self.groups, C=self.out_channels // self.groups,
                           K=self.in_channels // self.groups, geometry=self.geometry,
                           dtype=np.dtype(dtype), out_dtype=np.dtype(dtype))

    def kwargs(self) -> dict:
        """The arguments of `jax_deconv.conv_transpose` after lhs and rhs."""
        return dict(strides=self.stride, padding=[(p, p) for p in self.padding], rhs_dilation=self.dilation,
                    dimension_numbers=dimension_numbers(self.rank), use_consistent_padding=True,
                    feature_group_count=self.groups, output_padding=self.output_padding)

    def inputs(self, dtype="float32", seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """lhs, kernel and a cotangent of the output, channels last, of unit scale."""
        random = np.random.default_rng(seed)
        shapes = ((self.batch, *self.in_spatial, self.in_channels),
                  (*self.kernel, self.in_channels // self.groups, self.out_channels),
                  (self.batch, *self.out_spatial, self.out_channels))
        return tuple(random.standard_normal(shape, np.float32).astype(dtype) for shape in shapes)

    def shrunk(self, macs: float = 0.3e9) -> Layer:
        """A smaller layer of the same kind: the batch halved down to 1, then space down to 4."""
        layer = self
        while layer.macs > macs:
            if layer.batch > 1:
                smaller = dataclasses.replace(layer, batch=layer.batch // 2)
            else:
                smaller = dataclasses.replace(
                    layer, in_spatial=tuple(min(n, max(4, n // 2)) for n in layer.in_spatial))
            if smaller == layer:
                break
            layer = smaller
        return layer


def dimension_numbers(rank: int) -> tuple[str, str, str]:
    """Channels-last layouts as Flax has them: NHWC, HWIO, NHWC."""
    space = "DHW"[3 - rank:]
    return f"N{space}C", f"{space}IO", f"N{space}C"


def layers(shrink_to: float | None = None) -> Iterator[Layer]:
    """The benchmark's layers, whole or shrunk to so many multiply-adds of the forward pass."""
    rows = json.loads(pathlib.Path(__file__).with_name("layers.json").read_text())
    for row in rows:
        layer = Layer(**{key: tuple(v) if isinstance(v, list) else v for key, v in row.items()})
        yield layer if shrink_to is None else layer.shrunk(shrink_to)


# For each class (kernel, stride, padding) by rank, and channels (in, out, groups).
_SHAPES = {
    "depthwise": ({1: [(12, 2, 5), (4, 2, 1), (3, 1, 1), (16, 8, 4)], 2: [(4, 2, 1), (3, 1, 1), (8, 4, 2), (5, 2, 2)],
                   3: [(4, 2, 1), (3, 1, 1)]}, [(c, c, c) for c in (32, 48, 100, 192, 320, 512, 1000)]),
    "groups": ({1: [(4, 2, 1), (16, 8, 4)], 2: [(4, 2, 1), (3, 2, 0), (3, 1, 1)], 3: [(3, 2, 1)]},
               [(g * c, g * c, g) for c in (4, 8, 16, 32) for g in (8, 24)]),
    "thin": ({1: [(16, 8, 4), (32, 16, 8), (10, 5, 2)], 2: [(4, 2, 1), (5, 2, 2), (6, 2, 0), (3, 1, 1), (9, 4, 4)],
              3: [(4, 2, 1), (3, 2, 1)]}, [(i, o, 1) for i in (24, 64, 96, 200, 512) for o in (1, 2, 3, 4, 8)]),
    "k_eq_s": ({1: [(4, 4, 0), (2, 2, 0)], 2: [(2, 2, 0), (4, 4, 0), (3, 3, 0)], 3: [(2, 2, 0)]},
               [(i, o, 1) for i in (32, 96, 160, 512) for o in (24, 64, 128, 320)]),
}
_BYTES = 60e6  # in float32, of the smallest; the largest have four times as many


def shapes(each: int = 20, seed: int = 0) -> Iterator[Layer]:
    """Layers of no model, `each` of every class for which there is an algorithm beside cuDNN."""
    random = np.random.default_rng(seed)
    for klass, (windows, channels) in _SHAPES.items():
        for number in range(each):
            rank = int(random.choice([1, 2, 2, 3]))
            kernel, stride, padding = windows[rank][random.integers(len(windows[rank]))]
            inputs, outputs, groups = channels[random.integers(len(channels))]
            space = int(random.integers(*{1: (200, 3000), 2: (14, 70), 3: (6, 20)}[rank]))
            layer = Layer(f"{klass}_{number:02}", "", "", "", klass, 1, inputs, outputs, (space,) * rank,
                          (kernel,) * rank, (stride,) * rank, (padding,) * rank, (0,) * rank, (1,) * rank, groups)
            size = layer.problem(Role.X, "float32").least_bytes
            batch = max(1, round(_BYTES * random.uniform(1, 4) / size))
            yield dataclasses.replace(layer, batch=batch)


if __name__ == "__main__":
    for each in layers(0.3e9):
        print(f"{each.id:16} {each.klass:20} {each.batch:4} {each.in_channels:5} {each.out_channels:5} "
              f"{'x'.join(map(str, each.in_spatial)):12} {each.macs / 1e9:.3f} GMAC "
              f"x {math.prod(each.out_spatial)}")
