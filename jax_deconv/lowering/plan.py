# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""What is chosen for a call when it is lowered."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, order=True)
class Plan:
    """A way of computing a problem.

    Args:
      algorithm: the lowering module, or the family of kernels.
      variant: which of the algorithm's ways, in its own words.
      engine: cuDNN's number of the engine; -1 is the best that fits the workspace.
      knobs: the engine's settings, flat: type, value, type, value, ...
      workspace: bytes of scratch memory.
    """

    algorithm: str = "cudnn"
    variant: str = ""
    engine: int = -1
    knobs: tuple[int, ...] = ()
    workspace: int = 0
