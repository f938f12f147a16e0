# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""``python -m jax_deconv``: doctor, explain, tune and bench."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import pathlib
import platform
import re
import sys
from collections.abc import Callable

import jax
import jaxlib.version
import numpy as np

import jax_deconv
from jax_deconv import _compat, _ffi
from jax_deconv._bench import bench, layers, tune
from jax_deconv._bench.layers import Layer
from jax_deconv.explain import explain


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


# ---- the other commands --------------------------------------------------------------------------------


def _function(text: str) -> Callable:
    """The function that ``module:name`` names; the current folder's modules count."""
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise argparse.ArgumentTypeError(f"expected module:function; got {text!r}")
    try:
        function = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    if not callable(function):
        raise argparse.ArgumentTypeError(f"{text!r} is no function; it is {function!r:.100}")
    return function


def _array(text: str) -> jax.ShapeDtypeStruct:
    """An array's type and shape as JAX prints them, e.g. float32[8,16,16,64]."""
    match = re.fullmatch(r"(\w+)\[([\d,]*)\]", text)
    try:
        return jax.ShapeDtypeStruct(tuple(map(int, filter(None, match[2].split(",")))), np.dtype(match[1]))
    except TypeError:
        raise argparse.ArgumentTypeError(f"expected a type and a shape, e.g. float32[8,16]; got {text!r}") from None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _layers(options) -> list[Layer]:
    """Those of a file, or the one that the options describe, or the built-in ones."""
    if options.layers is not None:
        return layers.read(options.layers)
    if options.input is None:
        return list(layers.DEFAULT)
    if None in (options.kernel, options.features) or len(options.input) < 3:
        raise ValueError("a layer needs --input N,...,C, --kernel and --features")
    batch, *space, channels = options.input
    return [Layer("layer", batch, channels, options.features, space, options.kernel,
                  options.stride or (1,) * len(space), options.padding, options.output_padding, options.dilation,
                  options.groups)]


def _layer_options(parser) -> None:
    parser.add_argument("--layers", metavar="FILE", type=pathlib.Path,
                        help="JSON, as benchmarks/layers.json; by default a handful of well-known layers")
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float16", "float32"),
                        help="by default bfloat16 and float32; on a CPU float32")
    one = parser.add_argument_group("one layer", "channels last; padding and output padding as PyTorch has them")
    one.add_argument("--input", type=_numbers, metavar="N,...,C")
    one.add_argument("--features", type=int, help="channels of the result")
    one.add_argument("--groups", type=int, default=1)
    for name in ("kernel", "stride", "padding", "output-padding", "dilation"):
        one.add_argument(f"--{name}", type=_numbers, metavar="K,..." if name == "kernel" else "S,...",
                         default=None if name == "kernel" else ())


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_deconv", description=jax_deconv.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="print what is there, what is used, and why not")

    command = commands.add_parser("explain", help="print what is chosen for each convolution of a function, and why")
    command.add_argument("function", type=_function, metavar="module:function")
    command.add_argument("arrays", type=_array, nargs="*", metavar="type[shape]",
                         help="its arguments, e.g. float32[8,16,16,64]; a function that makes its own takes none")
    command.add_argument("--platform", choices=("cpu", "cuda"), help="needs no such device; by default JAX's own")

    command = commands.add_parser("tune", help="time plans on this GPU and keep the fastest in the store")
    command.add_argument("functions", type=_function, nargs="*", metavar="module:function",
                         help="functions without arguments, e.g. a training step that makes its own")
    _layer_options(command)
    command.add_argument("--plot", type=pathlib.Path, default=pathlib.Path("tune.png"), help="time over floor")

    command = commands.add_parser("bench", help="compare with jax.lax and PyTorch on this machine")
    _layer_options(command)
    command.add_argument("--precision", choices=("default", "high", "highest"), help="highest forbids TF32")
    command.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench.json"),
                         help="JSON; the plot goes beside it")

    options = parser.parse_args(arguments)
    if options.command == "doctor":
        return doctor()
    if options.command == "explain":
        print(explain(options.function, platform=options.platform)(*options.arrays))
        return 0
    try:
        chosen = _layers(options)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    given = options.layers is not None or options.input is not None
    if options.command == "bench":
        return bench.bench(chosen, options.dtypes, out=options.out, precision=options.precision, shrink=not given)
    if (reason := tune.why_not()) is not None:
        print(f"tuning needs an NVIDIA GPU: {reason}; python -m jax_deconv doctor says what is there", file=sys.stderr)
        return 1
    named = tune.of_functions(options.functions)
    if given or not named:
        named += tune.of_layers(chosen, options.dtypes or ("bfloat16", "float32"))
    tune.tune(named, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
