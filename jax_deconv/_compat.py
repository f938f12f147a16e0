# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""What differs between the versions of JAX that the package runs with: every branch is here."""

from __future__ import annotations

import os
import re

import jax
import jaxlib
import jaxlib.version

# Private, because there is no public way: to run a primitive outside of jit with debug_nans and disable_jit
# minded, to have custom_partitioning in a primitive's lowering, which needs its devices, and to read a sharding.
from jax._src.dispatch import apply_primitive as apply_primitive
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax._src.sharding_impls import parse_flatten_op_sharding

OLDEST_JAX = (0, 10, 2)


def version_tuple(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, e.g. (0, 10, 2)."""
    return tuple(int(part) for part in re.match(r"\d+(?:\.\d+)*", version)[0].split("."))


def too_old() -> str | None:
    """Why the installed JAX does not do, with the command that helps; None if it does."""
    oldest = ".".join(map(str, OLDEST_JAX))
    for name, version in (("jax", jax.__version__), ("jaxlib", jaxlib.version.__version__)):
        if version_tuple(version) < OLDEST_JAX:
            return (f"{name} {version} is older than {oldest}, whose FFI the native module was built for; "
                    f'update it with: pip install -U "jax>={oldest}"')
    return None


def ffi_api_version() -> tuple[int, int] | None:
    """The FFI version of the installed jaxlib, which says it in its headers alone."""
    header = os.path.join(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    try:
        with open(header, encoding="utf-8") as file:
            text = file.read()
        major, minor = (int(re.search(rf"XLA_FFI_API_{part} (\d+)", text)[1]) for part in ("MAJOR", "MINOR"))
    except (OSError, TypeError):
        return None
    return major, minor


def require_devices(primitive) -> None:
    prim_requires_devices_during_lowering.add(primitive)


def spec_of(sharding, ndim: int, mesh):
    """The PartitionSpec of an array that XLA's partitioner hands over; None where it has none."""
    try:
        return parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(ndim), mesh)[0]
    except Exception:  # the type of the error differs between versions
        return None
