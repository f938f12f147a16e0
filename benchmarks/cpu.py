# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Forward pass, data gradient and filter gradient on the CPU: jax_deconv, jax.lax and PyTorch.

    python benchmarks/cpu.py [--layers dcgan_g1,sam_up1] [--seconds 5] [--output benchmarks/results/cpu]

Float32, channels last for JAX, the faster of both memory formats for PyTorch, the same number of
threads for all.  The three run in turn, round after round, so that noise is shared, short calls
several times; the minimum counts.  PyTorch lives in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import multiprocessing
import os
import pathlib
import platform
import re
import time

import numpy as np
from layers import layers

from jax_deconv._bench.layers import Layer, dimension_numbers

SHRINK_TO = 0.3e9  # multiply-adds of the forward pass
ROLES = {"x": "forward", "y": "data gradient", "w": "filter gradient"}
THREADS = len(os.sched_getaffinity(0))
SHORT = 0.01  # seconds


def timed(function) -> float:
    """The minimum of one call, or of as many as fit into SHORT: the first wakes threads and finds cold caches."""
    best, begin = math.inf, time.perf_counter()
    while (start := time.perf_counter()) - begin < SHORT:
        function()
        best = min(best, time.perf_counter() - start)
    return best


# --- JAX -------------------------------------------------------------------------------------


def lax_conv_transpose(layer: Layer):
    """As Flax writes it; lax.conv_transpose has no groups, for these the same without its wrapper."""
    from jax import lax

    pads = [(a.extent - 1 - a.pad_lo, a.x_size + a.pad_lo - (a.y_size - 1) * a.stride - 1)
            for a in layer.geometry]
    numbers = dimension_numbers(layer.rank)
    if layer.groups == 1:
        return lambda lhs, rhs: lax.conv_transpose(lhs, rhs, layer.stride, pads, layer.dilation, numbers)
    return lambda lhs, rhs: lax.conv_general_dilated(
        lhs, rhs, (1,) * layer.rank, pads, layer.stride, layer.dilation, numbers, layer.groups)


def jax_calls(layer: Layer, function) -> tuple[dict, dict, dict]:
    """For each role a call without arguments that waits for its result, what compiling took, and the program."""
    import jax

    lhs, rhs, cotangent = map(jax.numpy.asarray, layer.inputs())
    roles = {"x": lambda lhs, rhs, ct: function(lhs, rhs),
             "y": lambda lhs, rhs, ct: jax.vjp(lambda t: function(t, rhs), lhs)[1](ct)[0],
             "w": lambda lhs, rhs, ct: jax.vjp(lambda t: function(lhs, t), rhs)[1](ct)[0]}
    calls, seconds, programs = {}, {}, {}
    for role, body in roles.items():
        start = time.perf_counter()
        compiled = jax.jit(body).lower(lhs, rhs, cotangent).compile()
        seconds[role] = time.perf_counter() - start
        programs[role] = instructions(compiled.as_text())
        calls[role] = lambda compiled=compiled: compiled(lhs, rhs, cotangent).block_until_ready()
    return calls, seconds, programs


def instructions(program: str) -> str:
    """What an optimized program does, without its names and places in source code."""
    lines = re.sub(r", metadata={[^}]*}", "", "\n".join(re.findall(r"^ +(?:ROOT )?%.*", program, re.MULTILINE)))
    names = {}
    return re.sub(r"%[\w.-]+", lambda match: names.setdefault(match[0], f"%{len(names)}"), lines)


def first_times(layer: Layer, ours: dict, theirs: dict) -> dict:
    """Compares our results with lax's, and says how long lax's first calls took."""
    seconds = {}
    for role in ROLES:
        start = time.perf_counter()
        want = np.asarray(theirs[role]())
        seconds[role] = time.perf_counter() - start
        got = np.asarray(ours[role]())
        error = np.abs(got - want).max() / np.abs(want).max()
        if got.shape != want.shape or not error < 1e-4:
            raise AssertionError(f"{layer.id}, {ROLES[role]}: differs from lax by {error}")
    return seconds


# --- PyTorch, in a child ---------------------------------------------------------------------


def torch_calls(layer: Layer) -> dict:
    import torch

    rank, groups = layer.rank, layer.groups
    lhs, rhs, ct = map(torch.from_numpy, layer.inputs())
    lhs, ct = lhs.movedim(-1, 1).contiguous(), ct.movedim(-1, 1).contiguous()
    # [*R, in / groups, out] to [in, out / groups, *R]
    rhs = rhs.reshape(*layer.kernel, layer.in_channels // groups, groups, -1)
    rhs = rhs.movedim((rank + 1, rank, rank + 2), (0, 1, 2))
    rhs = rhs.reshape(layer.in_channels, -1, *layer.kernel).contiguous()
    how = (layer.stride, layer.padding, layer.dilation, True, layer.output_padding, groups)
    forward, backward = torch.ops.aten.convolution, torch.ops.aten.convolution_backward
    calls = {role: [] for role in ROLES}
    formats = {1: [torch.contiguous_format], 2: [torch.contiguous_format, torch.channels_last],
               3: [torch.contiguous_format, torch.channels_last_3d]}
    for fmt in formats[rank]:
        a = tuple(t.to(memory_format=fmt) for t in (lhs, rhs, ct))
        calls["x"].append(lambda a=a: forward(a[0], a[1], None, *how))
        for role, mask in (("y", (True, False, False)), ("w", (False, True, False))):
            calls[role].append(lambda a=a, mask=mask: backward(a[2], a[0], a[1], None, *how, mask))
    return calls


def torch_child(pipe) -> None:
    """Answers a layer with its first times, and None with the times of another round."""
    import torch

    torch.set_num_threads(THREADS)
    torch.set_grad_enabled(False)
    calls = {}
    pipe.send(torch.__version__)
    with contextlib.suppress(EOFError):
        while True:
            layer = pipe.recv()
            if layer is not None:
                calls = torch_calls(layer)
            pipe.send({role: min(map(timed, formats)) for role, formats in calls.items()})


# --- Measuring -------------------------------------------------------------------------------


def measure(layer: Layer, child, seconds: float) -> dict:
    import jax_deconv

    ours, compile_seconds, programs = jax_calls(
        layer, lambda lhs, rhs: jax_deconv.conv_transpose(lhs, rhs, **layer.kwargs()))
    lax, _, programs_of_lax = jax_calls(layer, lax_conv_transpose(layer))
    same = [role for role in ROLES if programs[role] == programs_of_lax[role]]
    first = first_times(layer, ours, lax)  # and warms both up
    child.send(layer)
    child.recv()

    best = {name: dict.fromkeys(ROLES, math.inf) for name in ("jax_deconv", "lax", "torch")}
    # What takes so long is far from any bar: once is enough.
    best["lax"].update({role: value for role, value in first.items() if value > 1})
    lax = {role: call for role, call in lax.items() if first[role] <= 1}
    spent, rounds = 0.0, 0
    while rounds < 4 or spent < seconds and rounds < 60:
        child.send(None)
        new = {"torch": child.recv(), "jax_deconv": {}, "lax": {}}
        time.sleep(0.03)  # PyTorch's threads spin for a while
        for role in ROLES:
            # Each goes first in every other round.
            for name, calls in (("jax_deconv", ours), ("lax", lax))[::1 if rounds % 2 else -1]:
                if role in calls:
                    new[name][role] = timed(calls[role])
        for name, times in new.items():
            for role, value in times.items():
                best[name][role] = min(best[name][role], value)
        spent += sum(sum(times.values()) for times in new.values())
        rounds += 1
    milliseconds = {name: {role: 1e3 * v for role, v in times.items()} for name, times in best.items()}
    return dict(id=layer.id, klass=layer.klass, gmac=layer.macs / 1e9, rounds=rounds,
                milliseconds=milliseconds, compile_seconds=compile_seconds, same_program_as_lax=same)


def geometric_mean(values) -> float:
    return math.exp(np.mean(np.log(list(values))))


def ratio(row, name: str, role: str) -> float:
    """How many times faster than `name`."""
    return row["milliseconds"][name][role] / row["milliseconds"]["jax_deconv"][role]


def summarise(rows) -> dict:
    grouped = [row for row in rows if row["klass"] in ("depthwise", "grouped")
               or row["id"] == "gtcrn_dw_d5"]
    means = {f"{ROLES[role]}, times faster than {name}": geometric_mean(ratio(r, name, role) for r in rows)
             for name in ("lax", "torch") for role in ROLES}
    means["all three, times faster than torch"] = geometric_mean(
        ratio(r, "torch", role) for r in rows for role in ROLES)
    # The same program is as fast, whatever the clock says.
    worst = {}
    for role in ROLES:
        if differ := [(ratio(r, "lax", role), r["id"]) for r in rows if role not in r["same_program_as_lax"]]:
            worst[f"slowest against lax, {ROLES[role]}"] = min(differ)
    if grouped:
        worst["slowest grouped or depthwise against torch"] = min(
            (ratio(r, "torch", role), f"{r['id']}, {ROLES[role]}") for r in grouped for role in ROLES)
    worst["longest compilation (seconds)"] = max(
        (r["compile_seconds"][role], f"{r['id']}, {ROLES[role]}") for r in rows for role in ROLES)
    return {**means, **worst}


def environment(torch_version: str) -> dict:
    import jax
    import jaxlib

    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")),
                 platform.processor())
    return dict(date=datetime.date.today().isoformat(), cpu=model, cores=THREADS,
                python=platform.python_version(), jax=jax.__version__, jaxlib=jaxlib.__version__,
                torch=torch_version, dtype="float32", shrunk_to_gmac=SHRINK_TO / 1e9,
                load_average=os.getloadavg())


def plot(rows, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(len(ROLES), 1, figsize=(13, 11), sharex=True, constrained_layout=True)
    places = np.arange(len(rows))
    for panel, (role, title) in zip(panels, ROLES.items()):
        for shift, name in ((-0.2, "lax"), (0.2, "torch")):
            panel.bar(places + shift, [ratio(row, name, role) for row in rows], 0.4, bottom=0,
                      label=f"{'jax.lax' if name == 'lax' else 'PyTorch'} (geometric mean "
                            f"{geometric_mean(ratio(row, name, role) for row in rows):.2f})")
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set(yscale="log", title=title, ylabel="times faster", xlim=(-0.7, len(rows) - 0.3))
        panel.legend(loc="upper right", ncols=2)
    panels[-1].set_xticks(places, [row["id"] for row in rows], rotation=90)
    figure.suptitle(f"jax_deconv on the CPU, float32, {THREADS} cores: the other's time / ours")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", help="ids, separated by commas; all by default")
    parser.add_argument("--seconds", type=float, default=5,
                        help="of calls to measure each layer by, short ones counted once a round")
    parser.add_argument("--output", type=pathlib.Path,
                        default=pathlib.Path(__file__).parent / "results" / "cpu", help="without its suffix")
    arguments = parser.parse_args()
    only = arguments.layers and arguments.layers.split(",")

    os.environ["JAX_PLATFORMS"] = "cpu"
    context = multiprocessing.get_context("spawn")
    child, end = context.Pipe()
    process = context.Process(target=torch_child, args=(end,), daemon=True)
    process.start()
    torch_version = child.recv()

    rows = []
    print(f"{'layer':17}" + "".join(f"{title + ' (ms)':^33}" for title in ROLES.values()))
    print(f"{'':17}" + f"{'ours':>10}{'lax':>11}{'torch':>11} " * len(ROLES))
    for layer in layers(SHRINK_TO):
        if only and layer.id not in only:
            continue
        rows.append(row := measure(layer, child, arguments.seconds))
        print(f"{layer.id:17}" + "".join(
            "".join(f"{row['milliseconds'][name][role]:{width}.2f}"
                    for name, width in (("jax_deconv", 10), ("lax", 11), ("torch", 11))) + " "
            for role in ROLES), flush=True)
    process.terminate()

    summary = summarise(rows)
    for name, value in summary.items():
        value, where = value if isinstance(value, tuple) else (value, "")
        print(f"{name:50} {value:8.2f}  {where}")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    result = dict(environment=environment(torch_version), summary=summary, layers=rows)
    arguments.output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    plot(rows, arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
