# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Device time on an NVIDIA GPU: jax_deconv, jax.lax in both forms, and PyTorch; the core layers, each role.

    python benchmarks/gpu.py --out benchmarks/results/gpu.json

What is timed (microseconds of kernels per call, by CUPTI; the median over calls):

* `ours`: jax_deconv with kernels as cuDNN stores them, and `ours_flax` with Flax's [*R, in, out];
* `lax`: `jax.lax` as Flax calls it (lhs_dilation, kernel not reversed), gradients by autodiff;
* `adj`: the best plain-JAX form, transposes of the strided convolution;
* `torch`: PyTorch with cudnn.benchmark, channels-last and contiguous.

JAX and PyTorch run in processes of their own, one after the other: two profilers in one silence each
other.  Calls rotate over enough buffers that the L2 cache is cold.  TF32 is on for float32, everywhere.
Values are compared with the `adj` form.  floor = max(FLOPs / peak, least bytes / copy bandwidth).
"""

from __future__ import annotations

import argparse
import collections
import datetime
import glob
import json
import math
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
from layers import Layer, layers, shapes

SETS = {"core": layers, "shapes": shapes}

ROLES = {"x": "forward", "y": "data gradient", "w": "filter gradient"}
PEAK = {"bfloat16": 790e12, "float32": 395e12}  # measured bf16; TF32 is half of it
BANDWIDTH = 4.3e12  # measured copy, bytes read and written
L2_BYTES = 60 << 20
TOLERANCE = {"bfloat16": 2e-2, "float32": 2e-3}


def floor_us(layer: Layer, dtype: str) -> float:
    itemsize = {"bfloat16": 2, "float32": 4}[dtype]
    problem = layer.problem("x", "float32")
    return 1e6 * max(2 * layer.macs / PEAK[dtype], problem.least_bytes / 4 * itemsize / BANDWIDTH)


def rotation(layer: Layer, dtype: str) -> int:
    """How many sets of buffers no longer fit the L2 cache."""
    size = layer.problem("x", "float32").least_bytes / 4 * {"bfloat16": 2, "float32": 4}[dtype]
    return max(2, min(24, math.ceil(3 * L2_BYTES / size)))


# ---- JAX -----------------------------------------------------------------------------------------------


def jax_functions(layer: Layer) -> dict:
    """name -> role -> (function of the two operands, which of lhs, out and the kernels it takes)."""
    import jax
    from jax import lax

    import jax_deconv

    n, kw = layer.rank, layer.kwargs()
    space = "DHW"[3 - n:]
    dn, adj_dn = (f"N{space}C", f"{space}IO", f"N{space}C"), (f"N{space}C", f"O{space}I", f"N{space}C")
    lhs_shape = (layer.batch, *layer.in_spatial, layer.in_channels)
    out_shape = (layer.batch, *layer.out_spatial, layer.out_channels)
    native_shape = (layer.in_channels, *layer.kernel, layer.out_channels // layer.groups)
    flax_shape = (*layer.kernel, layer.in_channels // layer.groups, layer.out_channels)

    def ours(dimension_numbers, transpose_kernel, kernel_shape):
        k = kw | dict(dimension_numbers=dimension_numbers, transpose_kernel=transpose_kernel)
        return {
            "x": lambda lhs, rhs: jax_deconv.conv_transpose(lhs, rhs, **k),
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


def run_jax(which, names, dtypes, out_path, only, limit):
    import jax
    import jax.numpy as jnp

    import jax_deconv  # noqa: F401

    noise = np.random.default_rng(0).standard_normal(1_000_003, np.float32)  # a prime: no axis lines up with it

    def draw(shape, dtype, seed):
        return jax.device_put(np.resize(np.roll(noise, 7919 * seed).astype(dtype), shape))

    @jax.jit
    def relative_error(a, b):
        a, b = (t.astype(jnp.float32).reshape(-1) for t in (a, b))
        return jnp.sqrt(jnp.sum((a - b) ** 2) / jnp.sum(b ** 2))

    results, begin = [], time.time()
    for layer in SETS[which]():
        if names and layer.id not in names:
            continue
        for dtype in dtypes:
            started = time.time()
            if started - begin > limit:
                print(f"out of time before {layer.id} {dtype}", flush=True)
                continue
            sets = rotation(layer, dtype)
            shapes = {
                "lhs": (layer.batch, *layer.in_spatial, layer.in_channels),
                "out": (layer.batch, *layer.out_spatial, layer.out_channels),
                "native": (layer.in_channels, *layer.kernel, layer.out_channels // layer.groups),
                "flax": (*layer.kernel, layer.in_channels // layer.groups, layer.out_channels),
            }
            buffers = [{k: draw(s, dtype, 17 * i + j) for j, (k, s) in enumerate(shapes.items())} for i in range(sets)]
            functions = jax_functions(layer)

            def operands(name, role, i):
                kernel = "flax" if name in ("lax", "ours_flax") else "native"
                b = buffers[i % sets]
                return {"x": (b["lhs"], b[kernel]), "y": (b["out"], b[kernel]), "w": (b["lhs"], b["out"])}[role]

            def compiled(name, role):
                def function(a, b):
                    return functions[name][role](a, b)
                function.__name__ = f"bench_{name}_{role}"
                start = time.time()
                try:
                    return jax.jit(function).lower(*operands(name, role, 0)).compile(), time.time() - start
                except Exception as error:
                    return error, time.time() - start

            keys = [(name, role) for name in functions for role in functions[name] if name in (only or functions)]
            programs = {key: compiled(*key) for key in keys}
            outputs, calls = {}, {}
            for key, (program, _) in programs.items():
                if isinstance(program, Exception):
                    continue
                start = time.time()
                outputs[key] = jax.block_until_ready(program(*operands(*key, 0)))
                once = time.time() - start
                calls[key] = max(2, min(2 * sets, int(0.2 / max(once, 1e-4)), 30))
                calls[key] = max(calls[key], 3) if once < 1 else 2
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    for key in outputs:
                        for i in range(calls[key]):
                            out = programs[key][0](*operands(*key, i))
                        jax.block_until_ready(out)
                        del out
                times = kernel_times(folder)
            row = {"id": layer.id, "klass": layer.klass, "dtype": dtype, "floor_us": floor_us(layer, dtype),
                   "times": {}, "errors": {}, "compile_s": {}, "failed": {}, "kernels": {}}
            for (name, role), (program, seconds) in programs.items():
                key = f"{name}/{role}"
                row["compile_s"][key] = round(seconds, 3)
                if isinstance(program, Exception):
                    row["failed"][key] = str(program)[:300]
                    continue
                events = times.get(f"bench_{name}_{role}", [])
                row["times"][key] = per_call(events, calls[name, role])
                if name == "ours":
                    row["kernels"][key] = sorted({event[2][:80] for event in events})
                if name == "ours" and ("adj", role) in outputs:
                    row["errors"][key] = float(relative_error(outputs[name, role], outputs["adj", role]))
            del outputs
            results.append(row)
            print(f"{layer.id} {dtype} {time.time() - started:.1f}s "
                  + " ".join(f"{k}={v:.1f}" for k, v in row["times"].items() if v), flush=True)
            pathlib.Path(out_path).write_text(json.dumps(
                {"jax": jax.__version__, "device": jax.devices()[0].device_kind, "rows": results}))


def kernel_times(folder: str) -> dict[str, list[tuple[float, float, str]]]:
    """By jitted function: (start, microseconds, name) of every kernel and copy on the device."""
    import jax

    (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    times = collections.defaultdict(list)
    for plane in jax.profiler.ProfileData.from_file(path).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                module = next((str(value) for name, value in event.stats if name == "hlo_module"), "")
                times[module.removeprefix("jit_").split("(")[0]].append(
                    (event.start_ns / 1e3, event.duration_ns / 1e3, event.name))
    return times


def per_call(events, calls: int) -> float | None:
    """The median over calls of the time that the device is busy with a call's kernels.

    Events are (start, duration, ...) in microseconds.  Kernels that run side by side, as cuDNN's do for
    groups, count once.
    """
    if not events:
        return None
    events = sorted(events)
    each = len(events) // calls if len(events) % calls == 0 else len(events)
    spans = []
    for i in range(0, len(events), each):
        busy, end = 0.0, -math.inf
        for start, duration, *_ in events[i:i + each]:
            busy += max(0.0, start + duration - max(start, end))
            end = max(end, start + duration)
        spans.append(busy)
    return statistics.median(spans) if each < len(events) or calls == 1 else spans[0] / calls


# ---- PyTorch -------------------------------------------------------------------------------------------


def run_torch(which, names, dtypes, out_path):
    import torch

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    formats = {3: None, 4: torch.channels_last, 5: torch.channels_last_3d}
    results = []
    for layer in SETS[which]():
        if names and layer.id not in names:
            continue
        for dtype in dtypes:
            row = {"id": layer.id, "dtype": dtype, "times": {}, "failed": {}}
            for layout in ("last", "first"):
                try:
                    row["times"].update(torch_layer(torch, layer, dtype, layout, formats))
                except Exception as error:
                    row["failed"][layout] = str(error)[:300]
                torch.cuda.empty_cache()
            results.append(row)
            print(layer.id, dtype, row["times"], row["failed"], flush=True)
            pathlib.Path(out_path).write_text(json.dumps(
                {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "rows": results}))


def torch_layer(torch, layer: Layer, dtype: str, layout: str, formats) -> dict:
    n, sets = layer.rank, rotation(layer, dtype)
    # PyTorch has no channels-last format in 1D: there it is a 2D layer of height 1.
    flat = n == 1 and layout == "last"

    def wide(values, fill):
        return ((fill,) if flat else ()) + tuple(values)

    rank = n + flat
    kind = dict(device="cuda", dtype=getattr(torch, dtype))

    def make(*shape):
        t = torch.randn(*shape, **kind)
        return t.contiguous(memory_format=formats[t.ndim]) if layout == "last" else t

    buffers = [(make(layer.batch, layer.in_channels, *wide(layer.in_spatial, 1)),
                make(layer.in_channels, layer.out_channels // layer.groups, *wide(layer.kernel, 1)),
                make(layer.batch, layer.out_channels, *wide(layer.out_spatial, 1))) for _ in range(sets)]
    args = (wide(layer.stride, 1), wide(layer.padding, 0), wide(layer.dilation, 1), True, wide(layer.output_padding, 0),
            layer.groups)
    assert len(args[0]) == rank

    def backward(mask):
        return lambda x, w, dy: torch.ops.aten.convolution_backward(dy, x, w, None, *args, mask)

    functions = {"x": lambda x, w, dy: torch.ops.aten.convolution(x, w, None, *args),
                 "y": backward([True, False, False]), "w": backward([False, True, False])}
    times = {}
    for role, function in functions.items():
        torch.cuda.synchronize()
        function(*buffers[0])
        torch.cuda.synchronize()
        start = time.time()
        function(*buffers[0])
        torch.cuda.synchronize()
        calls = max(3, min(2 * sets, int(0.2 / max(time.time() - start, 1e-4)), 30))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for i in range(calls):
                function(*buffers[i % sets])
            torch.cuda.synchronize()
        events = [(e.time_range.start, e.time_range.elapsed_us()) for e in profiler.events()
                  if e.device_type == torch.autograd.DeviceType.CUDA]
        times[f"torch_{layout}/{role}"] = per_call(events, calls)
    return times


# ---- all of it -----------------------------------------------------------------------------------------


def geometric_mean(values) -> float | None:
    values = [v for v in values if v]
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


PEERS = ("lax", "adj", "torch_last", "torch_first")


def summary(rows) -> dict:
    """Ratios of time to ours, by role, type and class of layer; and where a peer is faster."""
    special = ("depthwise", "grouped", "dilated")
    result, classes, slower = {}, {}, {"torch_last": [], "any peer": []}
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        for role in ROLES:
            timed = [row for row in rows if row["dtype"] == dtype and row["times"].get(f"ours/{role}")]

            def ratios(part, *peers):
                """Geometric mean of the best peer's time over ours."""
                pairs = [(min((t for peer in peers if (t := row["times"].get(f"{peer}/{role}"))), default=None),
                          row["times"][f"ours/{role}"]) for row in part]
                return geometric_mean(a / b for a, b in pairs if a)

            def of_floor(part, least):
                return [row["times"][f"ours/{role}"] / row["floor_us"] for row in part if row["floor_us"] > least]

            for kind, part in (("dense", [row for row in timed if row["klass"] not in special]),
                               ("depthwise and grouped", [row for row in timed if row["klass"] in special]),
                               ("all", timed)):
                result[f"{dtype}/{ROLES[role]}/{kind}"] = {
                    **{peer: ratios(part, peer) for peer in (*PEERS, "ours_flax")},
                    "torch_best": ratios(part, "torch_last", "torch_first"),
                    "over_floor": geometric_mean(of_floor(part, 10))}
            for klass in dict.fromkeys(row["klass"] for row in timed):
                part = [row for row in timed if row["klass"] == klass]
                classes[f"{dtype}/{klass}/{ROLES[role]}"] = {
                    "layers": len(part), "torch_best": ratios(part, "torch_last", "torch_first"),
                    "over_floor": geometric_mean(of_floor(part, 5)),
                    "worst_over_floor": max(of_floor(part, 5), default=None)}
            for peers, names in (("torch_last", ("torch_last",)), ("any peer", PEERS)):
                for row in timed:
                    theirs = min((t for peer in names if (t := row["times"].get(f"{peer}/{role}"))), default=math.inf)
                    mine = row["times"][f"ours/{role}"]
                    if mine > max(1.05 * theirs, theirs + 2):
                        slower[peers].append([row["id"], dtype, ROLES[role], round(mine, 1), round(theirs, 1)])
    return {"ratios_to_ours": result, "classes": classes, "slower_than_torch_channels_last": slower["torch_last"],
            "slower_than_any_peer": slower["any peer"], "first_call": first_calls(rows)}


def first_calls(rows) -> dict:
    """Seconds to lower and compile a layer that nothing was known of, ours against XLA's autotuning of it."""
    pairs = [(row["compile_s"][f"ours/{role}"], row["compile_s"][f"adj/{role}"]) for row in rows for role in ROLES
             if f"adj/{role}" in row["compile_s"] and f"ours/{role}" in row["compile_s"]]
    if not pairs:
        return {}
    ours, xla = zip(*pairs)
    return {"calls": len(pairs), "ours_s": round(sum(ours), 1), "xla_s": round(sum(xla), 1),
            "ratio_geometric_mean": geometric_mean(a / b for a, b in pairs)}


def plot(report, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in report["rows"] if row["dtype"] == "bfloat16"] or report["rows"]
    figure, axes = plt.subplots(3, 1, figsize=(14, 12), sharex=True)
    for axis, (role, title) in zip(axes, ROLES.items()):
        for name, marker in (("lax", "x"), ("adj", "+"), ("torch_last", "s"), ("ours", "o")):
            ys = [(row["times"].get(f"{name}/{role}") or math.nan) / row["floor_us"] for row in rows]
            axis.plot(ys, marker, label=name, linestyle="none")
        axis.set_yscale("log")
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set_ylabel(f"{title}\ntime / floor")
        axis.grid(axis="y", alpha=0.3)
    axes[0].legend(ncols=4)
    axes[0].set_title(f"{report['environment'].get('device')}, {rows[0]['dtype']}: "
                      "device time over the hardware's floor")
    axes[-1].set_xticks(range(len(rows)), [row["id"] for row in rows], rotation=70, ha="right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="gpu.json")
    parser.add_argument("--set", choices=SETS, default="core", help="the layers of models, or shapes of none")
    parser.add_argument("--layers", nargs="*")
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float32"])
    parser.add_argument("--only", nargs="*", help="the ways in JAX to time, default all")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no further layer in JAX after that")
    parser.add_argument("--child", choices=("jax", "torch"))
    args = parser.parse_args()
    if args.child:
        if args.child == "jax":
            run_jax(args.set, args.layers, args.dtypes, args.out, args.only, args.seconds)
        else:
            run_torch(args.set, args.layers, args.dtypes, args.out)
        return
    parts, failures = {}, {}
    for child in ("torch", "jax"):
        path = f"{args.out}.{child}"
        command = [sys.executable, __file__, "--child", child, "--out", path, "--set", args.set]
        command += ["--dtypes", *args.dtypes]
        command += ["--layers", *args.layers] if args.layers else []
        command += ["--only", *args.only] if args.only else []
        command += ["--seconds", str(args.seconds)]
        # Kernels inside CUDA graphs do not name the program that they belong to.
        environment = os.environ | {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="}
        process = subprocess.run(command, env=environment)
        if process.returncode:
            failures[child] = process.returncode
        if os.path.exists(path):
            parts[child] = json.loads(pathlib.Path(path).read_text())
    report = assemble(parts, failures)
    pathlib.Path(args.out).write_text(json.dumps(report, indent=1))
    print(json.dumps(report["summary"], indent=1))
    try:
        plot(report, str(pathlib.Path(args.out).with_suffix(".png")))
    except ImportError:
        print("no matplotlib, no plot")


def assemble(parts: dict, failures: dict) -> dict:
    """The report, from what the two processes wrote."""
    theirs = {(row["id"], row["dtype"]): row for row in parts.get("torch", {}).get("rows", [])}
    rows = parts.get("jax", {}).get("rows", [])
    for row in rows:
        peer = theirs.get((row["id"], row["dtype"]), {"times": {}, "failed": {}})
        row["times"].update(peer["times"])
        row["failed"].update(peer["failed"])
    environment = {key: value for part in parts.values() for key, value in part.items() if key != "rows"}
    environment |= {"python": platform.python_version(), "failures": failures,
                    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                    "l2": "cold: calls rotate over buffers of three times its size", "tf32": True}
    return {"environment": environment, "summary": summary(rows), "rows": rows}


if __name__ == "__main__":
    main()
