# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Where what was found out about a machine is kept from process to process."""

from __future__ import annotations

import os
import pathlib


def directory() -> pathlib.Path:
    """JAX_DECONV_CACHE_DIR, else jax_deconv in the user's cache directory."""
    if (named := os.environ.get("JAX_DECONV_CACHE_DIR")):
        return pathlib.Path(named)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "jax_deconv"
