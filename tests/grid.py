# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Small problems that cover what a transposed convolution can be asked; shared with the benchmarks."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np


def layout(name: str, rank: int) -> tuple[str, str, str]:
    """dimension_numbers by name; "mixed" puts every axis where no framework does."""
    space = "DHWXY"[:rank]
    return {"last": (f"N{space}C", f"{space}IO", f"N{space}C"),
            "first": (f"NC{space}", f"OI{space}", f"NC{space}"),
            "mixed": (f"{space[::-1]}CN", f"I{space}O", f"C{space}N")}[name]


def arrange(spec: str, sizes: dict) -> tuple[int, ...]:
    return tuple(sizes[letter] for letter in spec)


@dataclasses.dataclass(frozen=True)
class Case:
    """One transposed convolution in lax's terms; `inputs` and `outputs` count channels a group."""

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str | tuple[tuple[int, int], ...] = "SAME"
    dilation: tuple[int, ...] | None = None
    groups: int = 1
    batch: int = 2
    inputs: int = 3
    outputs: int = 2
    layout: str = "last"
    transpose_kernel: bool = False
    consistent: bool = False
    output_padding: tuple[int, ...] | None = None
    output_shape: tuple[int, ...] | None = None

    @property
    def rank(self) -> int:
        return len(self.size)

    @property
    def dimension_numbers(self) -> tuple[str, str, str]:
        return layout(self.layout, self.rank)

    @property
    def lhs_shape(self) -> tuple[int, ...]:
        sizes = dict(zip("DHWXY", self.size), N=self.batch, C=self.groups * self.inputs)
        return arrange(self.dimension_numbers[0], sizes)

    @property
    def rhs_shape(self) -> tuple[int, ...]:
        """conv_general_dilated's (O = outputs, I = inputs a group), or the two exchanged."""
        channels = {"O": self.groups * self.outputs, "I": self.inputs}
        if self.transpose_kernel:
            channels = {"O": self.groups * self.inputs, "I": self.outputs}
        return arrange(self.dimension_numbers[1], dict(zip("DHWXY", self.kernel), **channels))

    @property
    def positional(self) -> tuple:
        """What both jax.lax.conv_transpose and jax_deconv.conv_transpose take after the operands."""
        return self.strides, self.padding, self.dilation, self.dimension_numbers, self.transpose_kernel

    @property
    def keywords(self) -> dict:
        """The rest, without what is left at its default."""
        said = {"use_consistent_padding": self.consistent, "feature_group_count": self.groups,
                "output_padding": self.output_padding, "output_shape": self.output_shape}
        return {name: value for name, value in said.items()
                if value not in (None, False) and (name, value) != ("feature_group_count", 1)}

    def operands(self, dtype=np.float32, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Small integers, so that every sum is exact in every type."""
        return integers(self.lhs_shape, dtype, seed), integers(self.rhs_shape, dtype, seed + 1)

    def __str__(self) -> str:
        def by(sizes):
            return "x".join(map(str, sizes)) or "-"

        pads = self.padding
        if not isinstance(pads, str):
            pads = ",".join(f"{low}:{high}" for low, high in pads)
        parts = [f"n{self.batch}x{by(self.size)}", f"k{by(self.kernel)}", f"s{by(self.strides)}"]
        parts += [f"d{by(self.dilation)}"] if self.dilation else []
        parts += [f"p{pads}", self.layout, f"c{self.inputs}to{self.outputs}"]
        parts += [f"g{self.groups}"] if self.groups != 1 else []
        parts += [f"op{by(self.output_padding)}"] if self.output_padding else []
        parts += [f"out{by(self.output_shape)}"] if self.output_shape else []
        parts += ["T"] if self.transpose_kernel else []
        parts += ["consistent"] if self.consistent else []
        return "-".join(parts)


def integers(shape, dtype=np.float32, seed: int = 0) -> np.ndarray:
    """Small integers of any type (0 to 3 if it is unsigned; complex ones have two parts)."""
    rng = np.random.RandomState(seed)
    low = 0 if np.dtype(dtype).kind == "u" else -2
    values = rng.randint(low, low + 5, shape)
    if np.dtype(dtype).kind == "c":
        values = values + 1j * rng.randint(low, low + 5, shape)
    return values.astype(dtype)


def replace(case: Case, **changes) -> Case:
    return dataclasses.replace(case, **changes)


def line():
    """One spatial axis, every combination: (kernel, stride, dilation) and all its cases."""
    pads = ["SAME", "VALID", ((1, 2),), ((-1, 3),), ((4, -2),), ((7, 6),)]
    for kernel, stride, dilation in itertools.product((1, 2, 4), (1, 2, 3), (1, 2)):
        yield (kernel, stride, dilation), [
            Case((4,), (kernel,), (stride,), padding, (dilation,), inputs=2, consistent=consistent,
                 transpose_kernel=mirrored, layout="first" if mirrored else "last")
            for padding, mirrored, consistent in itertools.product(pads, (False, True), (False, True))]


def sample(rank: int, count: int, seed: int = 0, **fixed) -> list[Case]:
    """Random cases of a rank, the same at every call."""
    pick = random.Random(seed * 10 + rank)

    def axis(values):
        return tuple(pick.choice(values) for _ in range(rank))

    cases: dict[str, Case] = {}
    while len(cases) < count:
        kernel, strides = axis((1, 2, 3)), axis((1, 2, 3))
        # Up to two rows cropped from a side: small enough to leave something.
        pads = tuple((pick.randint(-1, 3), pick.randint(0, 3)) for _ in range(rank))
        case = Case(
            axis((2, 3, 4)), kernel, strides, pick.choice(("SAME", "VALID", pads, pads)),
            pick.choice((None, axis((1, 2)))), batch=pick.choice((1, 2)), inputs=pick.choice((1, 2, 3)),
            outputs=pick.choice((1, 2, 3)), layout=pick.choice(("first", "last", "mixed")),
            transpose_kernel=pick.choice((False, True)),
        )
        case = replace(case, **fixed)
        cases[str(case)] = case
    return list(cases.values())


# The corners, by name: each differs from the others in what an implementation must not forget.
EDGES: dict[str, Case] = {
    "no_space": Case((), (), (), batch=3),
    "doubling": Case(
        (3, 4), (4, 4), (2, 2), ((1, 1), (1, 1)), consistent=True, layout="first", transpose_kernel=True
    ),
    "kernel_equals_stride": Case((3, 2), (2, 3), (2, 3), "VALID"),
    "kernel_below_stride": Case((3,), (2,), (5,), "SAME"),
    "kernel_below_stride_valid": Case((2, 3), (1, 2), (3, 4), "VALID", layout="mixed"),
    "stride_one": Case((4, 3), (3, 2), (1, 1), "SAME", transpose_kernel=True),
    "one_by_one": Case((3, 3), (1, 1), (1, 1), "VALID"),
    "lopsided": Case((4, 3), (3, 4), (2, 3), ((0, 2), (3, 1)), layout="mixed"),
    "zeros_around": Case((3,), (3,), (2,), ((-3, -2),), consistent=True),
    "deep_crop": Case((5,), (3,), (2,), ((4, 5),), consistent=True, transpose_kernel=True),
    "dilated": Case((3, 4), (3, 2), (2, 1), ((2, 1), (1, 3)), (2, 3)),
    "dilated_over_stride": Case((3,), (2,), (2,), "VALID", (4,), layout="first"),
    "space_3d": Case((2, 3, 2), (2, 1, 3), (2, 3, 1), "SAME", inputs=2),
    "space_4d": Case((2, 2, 3, 1), (2, 1, 2, 2), (1, 2, 2, 3), "VALID", batch=1, inputs=2, layout="first"),
    "odd_channels": Case((4,), (3,), (2,), inputs=5, outputs=7, batch=1),
    "one_sample_one_channel": Case((3, 3), (3, 3), (2, 2), batch=1, inputs=1, outputs=1, layout="first"),
    "grouped": Case((3, 4), (3, 2), (2, 2), "SAME", groups=2),
    "grouped_transposed": Case((4,), (3,), (2,), ((1, 1),), groups=3, inputs=1, outputs=2, layout="first",
                               transpose_kernel=True, consistent=True),
    "depthwise": Case((3, 4), (3, 3), (2, 1), "SAME", groups=4, inputs=1, outputs=1),
    "output_padding": Case((3, 3), (3, 2), (3, 2), ((1, 1), (0, 1)), output_padding=(2, 1), consistent=True),
    "output_padding_beyond_stride": Case((3,), (3,), (2,), "VALID", output_padding=(7,), groups=2),
    "output_shape_same": Case((3, 4), (3, 4), (2, 3), "SAME", output_shape=(5, 11), transpose_kernel=True),
    "output_shape_valid": Case(
        (3,), (4,), (3,), "VALID", output_shape=(12,), groups=2, layout="first", transpose_kernel=True
    ),
}

# Axes of size zero: batch, space, channels in, channels out.
EMPTY: dict[str, Case] = {
    "batch": Case((3, 2), (3, 2), (2, 1), batch=0),
    "batch_grouped": Case((3,), (3,), (2,), batch=0, groups=2, layout="first"),
    "space": Case((0, 3), (2, 3), (2, 2), ((2, 2), (1, 1))),
    "space_to_nothing": Case((0,), (3,), (2,), "SAME", transpose_kernel=True),
    "cropped_to_nothing": Case((2,), (3,), (1,), ((2, 2),), consistent=True),
    "inputs": Case((3, 2), (3, 2), (2, 1), inputs=0),
    "outputs": Case((3, 2), (3, 2), (2, 1), outputs=0, layout="first"),
    "outputs_grouped": Case((3,), (2,), (2,), outputs=0, groups=2, transpose_kernel=True),
}
