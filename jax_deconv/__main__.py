# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""``python -m jax_deconv doctor``: what is there, what is used, and why not."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import platform
import sys

import jax
import jaxlib.version

import jax_deconv
from jax_deconv import _compat, _ffi


def _cuda_plugins() -> str:
    """The installed plugins of JAX, with their versions."""
    found = []
    for name in ("jax-cuda13-plugin", "jax-cuda12-plugin"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found) or 'none; for an NVIDIA GPU: pip install "jax[cuda13]"'


def _gpus() -> tuple[str, bool]:
    """The GPUs that JAX sees, and whether there are any."""
    try:
        devices = jax.devices("cuda")
    except RuntimeError as error:
        return f"none that JAX can use ({str(error).splitlines()[0]})", False
    return ", ".join(f"{device.id}: {device.device_kind}" for device in devices), True


def _dotted(version: int) -> str:
    """cuDNN's version number, e.g. 91900, as 9.19.0."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def doctor() -> int:
    """Prints the state of the installation; 1 if it is broken."""

    def line(what, value):
        print(f"{what:<20}{value}")

    line("jax_deconv", jax_deconv.__version__)
    line("Python", f"{platform.python_version()} on {platform.machine()}")
    line("jax ", jax.__version__)
    api = _compat.ffi_api_version()
    line("jaxlib ", f"{jaxlib.version.__version__}" + (f", FFI {api[0]}.{api[1]}" if api else ""))
    line("CUDA plugin", _cuda_plugins())
    gpus, has_gpu = _gpus()
    line("GPU", gpus)

    if _ffi.native is not None:
        built = ".".join(map(str, _ffi.native.FFI_API_VERSION))
        line("native module", f"{_ffi.native.__file__} (built for FFI {built})")
        for name, path, error in _ffi.native.status():
            line(name, f"{path or 'not found'}{f': {error}' if error else ''}")
        with contextlib.suppress(RuntimeError):
            line("cuDNN", _dotted(_ffi.native.cudnn_version()))
    else:
        line("native module", "not usable")

    reason = _ffi.available()
    if has_gpu:
        line("on this GPU", "cuDNN" if reason is None else f"XLA only, because {reason}")
    else:
        line("on this machine", "XLA on the CPU")
        line("ahead of time", "cuDNN" if reason is None else f"XLA only, because {reason}")
    # Without a GPU the package does all that it is for; with one, or without its native module, not.
    return int(reason is not None and (has_gpu or _ffi.native is None))


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_deconv", description=jax_deconv.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="print what is there, what is used, and why not")
    parser.parse_args(arguments)
    return doctor()


if __name__ == "__main__":
    sys.exit(main())
