# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""A layer's three roles timed: jax_deconv, `jax.lax` in both forms, and PyTorch.

A time is named ``way/role``, the role by the letter of what it makes ("x" is the forward pass).  The ways:

* `ours`: jax_deconv with kernels as cuDNN stores them, and `ours_flax` with Flax's [*R, in, out];
* `lax`: `jax.lax` as Flax calls it (lhs_dilation, kernel not reversed), gradients by autodiff;
* `adj`: the best plain-JAX form, transposes of the strided convolution;
* `torch_last` and `torch_first`: PyTorch with cudnn.benchmark, channels-last and contiguous.

On a GPU times are microseconds of the device per call, by CUPTI, the median over calls, which rotate over enough
buffers that the L2 cache is cold; elsewhere they are the wall's, the minimum.  JAX and PyTorch need processes of
their own: two profilers in one silence each other.
"""

from __future__ import annotations

import functools
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_deconv
from jax_deconv._bench import timing
from jax_deconv._bench.layers import Layer, dimension_numbers
from jax_deconv.lowering import cost
from jax_deconv.policy import resolve

ROLES = {"x": "forward", "y": "data gradient", "w": "filter gradient"}
#: The largest error relative to `adj`, in the norm, that rounding explains.
TOLERANCE = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 2e-3}
_L2_BYTES = 60 << 20


def floor_us(layer: Layer, dtype: str) -> float:
    """The least time of each role, with the precision that is set."""
    return cost.floor(layer.problem("x", dtype), resolve(None))


def rotation(layer: Layer, dtype: str) -> int:
    """How many sets of buffers no longer fit the L2 cache."""
    return max(2, min(24, math.ceil(3 * _L2_BYTES / layer.problem("x", dtype).least_bytes)))


# ---- JAX -----------------------------------------------------------------------------------------------


def jax_functions(layer: Layer) -> dict:
    """name -> role -> (function of the two operands, which of lhs, out and the kernels it takes)."""
    n, kw = layer.rank, layer.kwargs()
    image, kernel, _ = dn = dimension_numbers(n)
    adj_dn = (image, f"O{kernel[:-2]}I", image)
    lhs_shape = (layer.batch, *layer.in_spatial, layer.in_channels)
    out_shape = (layer.batch, *layer.out_spatial, layer.out_channels)
    native_shape = (layer.in_channels, *layer.kernel, layer.out_channels // layer.groups)
    flax_shape = (*layer.kernel, layer.in_channels // layer.groups, layer.out_channels)

    def ours(dimension_numbers, transpose_kernel, kernel_shape):
        k = kw | dict(dimension_numbers=dimension_numbers, transpose_kernel=transpose_kernel)
        return {
            "x": lambda lhs, rhs, **epilogue: jax_deconv.conv_transpose(lhs, rhs, **k, **epilogue),
            "y": lambda out, rhs: jax_deconv.conv_transpose_data_gradient(out, rhs, lhs_shape, **k),
            "w": lambda lhs, out: jax_deconv.conv_transpose_filter_gradient(lhs, out, kernel_shape, **k),
        }

    pads = [((k - 1) * d - p, (k - 1) * d - p + e)
            for k, d, p, e in zip(layer.kernel, layer.dilation, layer.padding, layer.output_padding)]

    def lax_forward(lhs, rhs):
        return lax.conv_general_dilated(lhs, rhs, (1,) * n, pads, layer.stride, layer.dilation, dn,
                                        feature_group_count=layer.groups)

    def strided(out, rhs):
        g = layer.geometry
        return lax.conv_general_dilated(out, rhs, layer.stride, [(a.pad_lo, a.pad_hi) for a in g], None,
                                        layer.dilation, adj_dn, feature_group_count=layer.groups)

    def zeros(shape, like):
        return jax.ShapeDtypeStruct(shape, like.dtype)

    return {
        "ours": ours(adj_dn, True, native_shape),
        "ours_flax": ours(dn, False, flax_shape),
        "lax": {
            "x": lax_forward,
            "w": lambda lhs, out: jax.linear_transpose(lambda r: lax_forward(lhs, r), zeros(flax_shape, lhs))(out)[0],
        },
        "adj": {
            "x": lambda lhs, rhs: jax.linear_transpose(lambda o: strided(o, rhs), zeros(out_shape, lhs))(lhs)[0],
            "y": strided,
            "w": lambda lhs, out: jax.linear_transpose(lambda r: strided(out, r), zeros(native_shape, lhs))(lhs)[0],
        },
    }


@functools.cache
def _noise() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(1_000_003, np.float32)  # a prime: no axis lines up with it


def _draw(shape, dtype, seed: int) -> jax.Array:
    return jax.device_put(np.resize(np.roll(_noise(), 7919 * seed).astype(dtype), shape))


@jax.jit
def _norm_error(a, b):
    a, b = (t.astype(jnp.float32).reshape(-1) for t in (a, b))
    return jnp.sqrt(jnp.sum((a - b) ** 2) / jnp.sum(b ** 2))


def relative_error(a: jax.Array, b: jax.Array) -> float:
    """The norm of a - b over that of b."""
    return float(_norm_error(a, b))


def kernel_order(way: str) -> str:
    """Which of the kernels of `jax_operands` a way takes."""
    return "flax" if way in ("lax", "ours_flax") else "native"


def jax_operands(layer: Layer, dtype: str, most: int = 30) -> list[dict[str, jax.Array]]:
    """Sets of noise: lhs, cotangent of the result ("out"), bias, and the kernel in both orders; one set on a CPU."""
    shapes = {
        "lhs": (layer.batch, *layer.in_spatial, layer.in_channels),
        "out": (layer.batch, *layer.out_spatial, layer.out_channels),
        "native": (layer.in_channels, *layer.kernel, layer.out_channels // layer.groups),
        "flax": (*layer.kernel, layer.in_channels // layer.groups, layer.out_channels),
        "bias": (layer.out_channels,),
    }
    sets = min(rotation(layer, dtype), most) if jax.default_backend() == "gpu" else 1
    return [{k: _draw(s, dtype, 17 * i + j) for j, (k, s) in enumerate(shapes.items())} for i in range(sets)]


def jax_row(layer: Layer, dtype: str, only=None) -> dict:
    """The ways in JAX, all or some: times, errors of ours, seconds to compile, kernels of ours, what failed and why."""
    buffers = jax_operands(layer, dtype)
    functions = jax_functions(layer)

    def operands(name, role, i):
        b, kernel = buffers[i % len(buffers)], kernel_order(name)
        return {"x": (b["lhs"], b[kernel]), "y": (b["out"], b[kernel]), "w": (b["lhs"], b["out"])}[role]

    keys = {f"{name}/{role}": (name, role) for name in functions for role in functions[name]
            if name in (only or functions)}
    timed, outputs = time_jax({key: functions[name][role] for key, (name, role) in keys.items()},
                              lambda key, i: operands(*keys[key], i), len(buffers))
    floor = floor_us(layer, dtype) if jax.default_backend() == "gpu" else None
    row = {"id": layer.id, "klass": layer.klass, "dtype": dtype, "floor_us": floor, **timed, "errors": {}}
    row["kernels"] = {key: names for key, names in timed["kernels"].items() if key.startswith("ours/")}
    for role in ROLES:
        if {f"ours/{role}", f"adj/{role}"} <= set(outputs):
            row["errors"][f"ours/{role}"] = relative_error(outputs[f"ours/{role}"], outputs[f"adj/{role}"])
    return row


def time_jax(functions: Mapping[str, Callable], operands: Callable, sets: int, most: int = 30) -> tuple[dict, dict]:
    """Compiles functions, each named ``way/what``, and times them.

    Args:
      functions: by name.
      operands: of a name and the number of a call: what that call gets.
      sets: how many sets of operands the calls rotate over.
      most: calls of a function.

    Returns:
      By name, what a row holds: times, seconds to compile, kernels, what failed and why.  And the first results.
    """
    on_gpu = jax.default_backend() == "gpu"
    modules = {key: f"bench_{key.replace('/', '_')}" for key in functions}
    row = {"times": {}, "compile_s": {}, "failed": {}, "kernels": {}}
    programs, outputs, first, calls = {}, {}, {}, {}
    for key, function in functions.items():
        def named(*arrays, function=function):
            return function(*arrays)
        named.__name__ = modules[key]
        start = time.time()
        try:
            programs[key] = jax.jit(named).lower(*operands(key, 0)).compile()
        except Exception as error:
            row["failed"][key] = str(error)[:300]
        row["compile_s"][key] = round(time.time() - start, 3)

    def run(key, i):
        return programs[key](*operands(key, i))

    for key in programs:
        start = time.time()
        outputs[key] = jax.block_until_ready(run(key, 0))
        first[key] = once = time.time() - start
        calls[key] = 2 if once >= 1 else max(3, min(2 * sets, int(0.2 / max(once, 1e-4)), most))
    if on_gpu:
        events = _device_events({modules[key]: (functools.partial(run, key), calls[key]) for key in programs})
        for key in programs:
            done = events.get(modules[key], [])
            row["times"][key] = timing.per_call(done, calls[key])
            row["kernels"][key] = sorted({event[2][:80] for event in done})
    else:
        row["times"] = timing.wall_times(
            {key: functools.partial(lambda key: jax.block_until_ready(run(key, 0)), key) for key in programs}, first)
    return row, outputs


def _device_events(calls) -> dict[str, list]:
    """Calls every function, given its index, so many times; what the device did, by the jitted function's name."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for function, count in calls.values():
                for i in range(count):
                    out = function(i)
                jax.block_until_ready(out)
                del out
        return timing.kernel_times(folder)


# ---- PyTorch -------------------------------------------------------------------------------------------


def torch_row(layer: Layer, dtype: str, device: str = "cuda") -> dict:
    """PyTorch in both memory formats: times, what failed and why."""
    import torch

    def layout_times(layout):
        buffers, args = torch_operands(layer, dtype, layout, device)

        def backward(mask):
            return lambda x, w, dy: torch.ops.aten.convolution_backward(dy, x, w, None, *args, mask)

        functions = {"x": lambda x, w, dy: torch.ops.aten.convolution(x, w, None, *args),
                     "y": backward([True, False, False]), "w": backward([False, True, False])}
        return time_torch({f"torch_{layout}/{role}": f for role, f in functions.items()}, buffers, device)

    return {"id": layer.id, "dtype": dtype, **torch_layouts(layout_times, device)}


def torch_layouts(layout_times: Callable[[str], dict], device: str) -> dict:
    """The times of both memory formats, "last" and "first", with cudnn.benchmark; what failed and why."""
    import torch

    torch.backends.cudnn.benchmark = True
    tf32 = resolve(None).precision is not lax.Precision.HIGHEST
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
    row = {"times": {}, "failed": {}}
    for layout in ("last", "first"):
        try:
            row["times"].update(layout_times(layout))
        except Exception as error:
            row["failed"][layout] = str(error)[:300]
        if device == "cuda":
            torch.cuda.empty_cache()
    return row


def torch_operands(layer: Layer, dtype: str, layout: str, device: str, most: int = 30) -> tuple[list, tuple]:
    """Sets of input, weight and cotangent, and the arguments of `aten::convolution` after the bias."""
    import torch

    n, sets = layer.rank, min(rotation(layer, dtype), most) if device == "cuda" else 1
    formats = {3: None, 4: torch.channels_last, 5: torch.channels_last_3d}
    # PyTorch has no channels-last format in 1D: there it is a 2D layer of height 1.
    flat = n == 1 and layout == "last"

    def wide(values, fill):
        return ((fill,) if flat else ()) + tuple(values)

    kind = dict(device=device, dtype=getattr(torch, dtype))

    def make(*shape):
        t = torch.randn(*shape, **kind)
        return t.contiguous(memory_format=formats[t.ndim]) if layout == "last" else t

    buffers = [(make(layer.batch, layer.in_channels, *wide(layer.in_spatial, 1)),
                make(layer.in_channels, layer.out_channels // layer.groups, *wide(layer.kernel, 1)),
                make(layer.batch, layer.out_channels, *wide(layer.out_spatial, 1))) for _ in range(sets)]
    args = (wide(layer.stride, 1), wide(layer.padding, 0), wide(layer.dilation, 1), True, wide(layer.output_padding, 0),
            layer.groups)
    return buffers, args


def time_torch(functions: Mapping[str, Callable], buffers: Sequence[tuple], device: str, most: int = 30) -> dict:
    """By name, the time of functions that take a set of buffers."""
    import torch

    if device == "cpu":
        calls = {name: functools.partial(function, *buffers[0]) for name, function in functions.items()}
        first = {}
        for name, call in calls.items():
            start = time.time()
            call()
            first[name] = time.time() - start
        return timing.wall_times(calls, first)
    times = {}
    for name, function in functions.items():
        torch.cuda.synchronize()
        function(*buffers[0])
        torch.cuda.synchronize()
        start = time.time()
        function(*buffers[0])
        torch.cuda.synchronize()
        calls = max(3, min(2 * len(buffers), int(0.2 / max(time.time() - start, 1e-4)), most))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for i in range(calls):
                function(*buffers[i % len(buffers)])
            torch.cuda.synchronize()
        events = [(e.time_range.start, e.time_range.elapsed_us()) for e in profiler.events()
                  if e.device_type == torch.autograd.DeviceType.CUDA]
        times[name] = timing.per_call(events, calls)
    return times
