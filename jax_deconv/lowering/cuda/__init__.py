# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Families of hand-written CUDA kernels: for each, a module that says for which problems and how, and its source.

A module has `why_not(problem, policy)`, the reason why it does not apply or None, and
`kernels(problem, policy)`, the ways to launch it for a problem that it takes, most promising first.
Problems are cores (see `core.split`), and a kernel reads zero outside x and outside y by itself.

Every entry point of a source has the same signature

    extern "C" __global__ void name(const A* a, const A* b, const O* bias, O* out, char* workspace)

with the operands of the role in the order of `GIVEN`, x and y channels last, w in the order that the
kernel names.  All else is known when it is compiled: shapes and geometry come as macros.
"""

from __future__ import annotations

import dataclasses

#: The types of operands and results, as the sources call them.
TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel's launch: its name, its grid and block, and its dynamic shared memory in bytes."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int = 0


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A way to compute a problem.

    Args:
      source: the name of the source, a ``.cu`` beside the family's module.
      defines: the macros, in order, as (name, value).
      launches: what runs, one after the other.
      w_order: the physical order of the axes of w [G*K, C, *R], outermost first.
      workspace: bytes of scratch memory, not cleared.
      label: the variant in a word or two, unique among a problem's kernels.
    """

    source: str
    defines: tuple[tuple[str, str], ...]
    launches: tuple[Launch, ...]
    w_order: tuple[int, ...]
    workspace: int = 0
    label: str = ""
