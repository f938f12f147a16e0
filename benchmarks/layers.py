# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""The layers that benchmarks and tests share: transposed convolutions of public models.

`layers.json` names the model, the layer and the source of each.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterator

import numpy as np

from jax_deconv._bench.layers import Layer, read
from jax_deconv.problem import Role


def layers(shrink_to: float | None = None) -> Iterator[Layer]:
    """The benchmark's layers, whole or shrunk to so many multiply-adds of the forward pass."""
    for layer in read(pathlib.Path(__file__).with_name("layers.json")):
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
            layer = Layer(f"{klass}_{number:02}", 1, inputs, outputs, (space,) * rank, (kernel,) * rank,
                          (stride,) * rank, (padding,) * rank, groups=groups, klass=klass)
            size = layer.problem(Role.X, "float32").least_bytes
            batch = max(1, round(_BYTES * random.uniform(1, 4) / size))
            yield dataclasses.replace(layer, batch=batch)


if __name__ == "__main__":
    for each in layers(0.3e9):
        print(f"{each.id:16} {each.klass:20} {each.batch:4} {each.in_channels:5} {each.out_channels:5} "
              f"{'x'.join(map(str, each.in_spatial)):12} {each.macs / 1e9:.3f} GMAC "
              f"x {math.prod(each.out_spatial)}")
