# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Loads the native module and registers its custom call targets.

Importing this never fails: without the native module, or without cuDNN, everything is computed by
XLA and `available` says why.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import pathlib

import jax

from jax_deconv import _compat

#: The version of the custom calls' attributes, which the native module must share.
PLAN_VERSION = 2


def library_directories() -> list[str]:
    """Where pip puts NVIDIA's libraries, e.g. ``nvidia/cudnn/lib`` and ``nvidia/cu13/lib``.

    Not ``nvidia/cudnn_jit``, a cuDNN without the engines that are compiled ahead of time.
    """
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec else ()
    return [str(path) for root in roots for path in sorted(pathlib.Path(root).glob("*/lib"))
            if path.parent.name != "cudnn_jit"]


_KERNELS = pathlib.Path(__file__).parent / "lowering" / "cuda"


# What is compiled: what the kernels share, then a family's own.
_COMMON = (_KERNELS / "common.cuh").read_text()
_TEXTS = {path.name: _COMMON + path.read_text() for path in sorted(_KERNELS.glob("*.cu"))}

#: The families' sources, as programs name them: with a digest, so that none runs another version's.
SOURCES = {name: f"{name}@{hashlib.sha256(text.encode()).hexdigest()[:12]}" for name, text in _TEXTS.items()}


def _load():
    """The native module, or None, and why not."""
    if (reason := _compat.too_old()) is not None:
        return None, reason
    try:
        module = importlib.import_module("jax_deconv._ffi_native")
    except ImportError as error:
        return None, (f"the native module cannot be imported ({error}); "
                      "build it with: pip install --force-reinstall --no-deps jax-deconv")
    if module.PLAN_VERSION != PLAN_VERSION:
        return None, (f"the native module was built from other sources (version {module.PLAN_VERSION}, "
                      f"expected {PLAN_VERSION}); "
                      "build it again with: pip install --force-reinstall --no-deps jax-deconv")
    module.set_library_directories(library_directories())
    for name, text in _TEXTS.items():
        module.add_source(SOURCES[name], text)
    # Where there is no CUDA plugin, JAX keeps these and nobody asks for them.
    for name, stages in module.registrations().items():
        jax.ffi.register_ffi_target(name, stages, platform="CUDA")
    return module, None


native, _why_not = _load()


@functools.cache
def available(compiler: bool = False) -> str | None:
    """Why programs for a GPU cannot use cuDNN, or the compiler of kernels; None if they can.

    Where there is no NVIDIA driver, programs can be compiled ahead of time for a machine that has
    one, so that only the native module is asked for.
    """
    if native is None:
        return _why_not
    driver, *others = native.status()
    if driver[2]:
        return None
    for name, path, error in others:
        if error and compiler == name.startswith("libnvrtc"):
            where = f" ({path})" if path else ""
            return f'{name}{where}: {error}; install it with: pip install -U "jax[cuda13]"'
    return None
