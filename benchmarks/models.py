# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Whole models: a training step with our ConvTranspose, with Flax's, and in PyTorch.

    python benchmarks/models.py --out benchmarks/results/models.json
    python benchmarks/models.py --tiny                        # small models, on any machine

A step is forward, backward and Adam's update; it computes in bfloat16 with float32 parameters.

* `ours` and `flax`: one jitted function; the models (models_flax.py) differ in the ConvTranspose class alone and start
  from the same parameters.  Outputs and gradients of the first step and the loss after the last are compared.
* `torch`: the same model in PyTorch (models_torch.py) with autocast, channels_last, cudnn.benchmark and a fused Adam,
  without torch.compile.

On a GPU the time is that of the device (microseconds of kernels per step, by CUPTI, the median over steps), else
wall time, which the JSON has for both.  JAX and PyTorch run in processes of their own, one after the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import json
import math
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

from jax_deconv._bench import timing
from jax_deconv._bench.timing import geometric_mean, kernel_times, per_call
from jax_deconv.explain import number, table

# The anti-aliasing filter of BigVGAN: a sinc of half the bandwidth in Kaiser's window (beta 4.664), sum 1.
FILTER = (0.00202897, 0.00938946, -0.02554346, -0.05765738, 0.12857261, 0.4432098)
FILTER += FILTER[::-1]

# How far apart two ways may be, relative, when both round each layer to bfloat16 and a ReLU can fall on either side.
# With a wrong kernel the first two are near 1.
TOLERANCE = {"output": 0.05, "gradient": 0.3, "first_loss": 0.01, "last_loss": 0.05}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model's name and settings, and the shapes of its inputs and output, channels last."""

    name: str
    settings: dict
    inputs: tuple[tuple[int, ...], ...]
    output: tuple[int, ...]
    input_gradients: bool = False  # a decoder that trains together with its encoder


def unet(name, rank, batch, size, *widths):
    """A U-Net's decoder: of 2^-n of the size in its first width, a skip connection for each further one."""
    shapes = [(batch, *(size >> len(widths) - 1 - i,) * rank, width) for i, width in enumerate(widths)]
    return Case(name, dict(rank=rank, widths=widths), tuple(shapes), (batch, *(size,) * rank, 4), True)


def vocoder(name, batch, frames, bands, channels, rates, **settings):
    return Case(name, dict(channels=channels, rates=rates, **settings), ((batch, frames, bands),),
                (batch, frames * math.prod(rates), 1))


def dcgan(batch, features):
    return Case("dcgan", dict(features=features), ((batch, 1, 1, 100),), (batch, 64, 64, 3))


def dreamerv3(batch, latent, *widths):
    side = 4 << len(widths) - 1
    return Case("dreamerv3", dict(widths=widths), ((batch, latent),), (batch, side, side, widths[-1]), True)


def cases(tiny: bool = False) -> dict[str, Case]:
    """The models by name, those that compile fastest first."""
    if tiny:
        every = [dcgan(2, 2), dreamerv3(2, 8, 4, 4, 3), unet("unet2d", 2, 1, 16, 8, 4, 4),
                 unet("unet3d", 3, 1, 8, 8, 4, 4),
                 vocoder("bigvgan", 1, 8, 5, 8, (2,), filter=FILTER),
                 vocoder("hifigan", 1, 8, 5, 8, (4, 2), kernels=(3, 5), dilations=(3,))]
    else:
        every = [dcgan(256, 64), dreamerv3(1024, 2048, 256, 256, 192, 128, 3),
                 unet("unet2d", 2, 16, 256, 1024, 512, 256, 128, 64),
                 vocoder("bigvgan", 4, 256, 100, 1536, (4, 4, 2, 2, 2, 2), filter=FILTER),
                 unet("unet3d", 3, 2, 64, 320, 256, 128, 64, 32),
                 vocoder("hifigan", 16, 32, 80, 512, (8, 8, 2, 2), kernels=(3, 7, 11), dilations=(1, 3, 5))]
    return {case.name: case for case in every}


# ---- JAX -----------------------------------------------------------------------------------------------


def run_jax(chosen: list[Case], report: Report, steps: int):
    import jax
    import models_flax

    report.environment |= {"jax": jax.__version__, "device": jax.devices()[0].device_kind,
                           "clock": "device" if jax.default_backend() == "gpu" else "wall"}
    for case in report.in_time(chosen):
        inputs, target = models_flax.data(case)
        params, statistics_ = models_flax.initial(models_flax.build(case, models_flax.WAYS["flax"]), inputs)
        row = report.row(case)
        row["parameters"] = sum(leaf.size for leaf in jax.tree.leaves(params))
        first = {}
        for way, conv_transpose in models_flax.WAYS.items():
            try:
                row["times"][way], first[way] = time_jax(case, models_flax, way, conv_transpose, params, statistics_,
                                                         inputs, target, steps)
            except Exception as error:
                row["failed"][way] = str(error)[:300]
        if len(first) == 2:
            row["differences"] = differences(first["ours"], first["flax"])
            row["failed"] |= {f"ours: {what}": f"{value:.2g} away from Flax's" for what, value in
                              row["differences"].items() if not value <= TOLERANCE[what]}
        report.write()


def time_jax(case, models_flax, way, conv_transpose, params, statistics_, inputs, target, steps):
    """Times of a step, and what its first and last calls computed."""
    import jax
    import jax.numpy as jnp

    step = models_flax.train_step(case, models_flax.build(case, conv_transpose))
    step.__name__ = f"bench_{case.name}_{way}"
    carry = (*jax.tree.map(jnp.copy, (params, statistics_)), models_flax.OPTIMISER.init(params))
    start = time.perf_counter()
    program = jax.jit(step, donate_argnums=(0, 1, 2)).lower(*carry, inputs, target).compile()
    compile_s = time.perf_counter() - start

    *carry, seen = program(*carry, inputs, target)
    # After one step of Adam its first moment is the gradient, but for a factor.
    result = {"output": jax.device_get(seen["first_output"]), "gradient": jax.device_get(carry[2][0].mu),
              "first_loss": float(seen["loss"])}

    def call():
        nonlocal carry, seen
        *carry, seen = program(*carry, inputs, target)

    times = wall_times(call, lambda: jax.block_until_ready(seen), steps)
    if jax.default_backend() == "gpu":
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(steps):
                    call()
                jax.block_until_ready(seen)
            times["device_us"] = per_call(kernel_times(folder).get(step.__name__, []), steps)
    result["last_loss"] = float(seen["loss"])
    return times | {"compile_s": compile_s}, result


def differences(got: dict, want: dict) -> dict[str, float]:
    """Relative differences; of the gradient, the largest over the kernels of transposed convolutions."""
    import jax
    import numpy as np

    def relative(a, b):
        a, b = (np.asarray(t, np.float64) for t in (a, b))
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    def kernels(tree):
        return [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
                if "ConvTranspose" in jax.tree_util.keystr(path) and leaf.ndim > 1]

    return {"gradient": max(map(relative, kernels(got["gradient"]), kernels(want["gradient"]))),
            **{what: relative(got[what], want[what]) for what in ("output", "first_loss", "last_loss")}}


# ---- PyTorch -------------------------------------------------------------------------------------------


def run_torch(chosen: list[Case], report: Report, steps: int):
    import models_torch
    import torch

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    report.environment |= {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    for case in report.in_time(chosen):
        row = report.row(case)
        try:
            model, step = models_torch.train_step(case, device)
            row["parameters_torch"] = sum(p.numel() for p in model.parameters())
            for _ in range(3):  # cudnn.benchmark tries algorithms
                step()
            wait()
            row["times"]["torch"] = wall_times(step, wait, steps)
            if device == "cuda":
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                    for _ in range(steps):
                        step()
                    wait()
                events = [(e.time_range.start, e.time_range.elapsed_us()) for e in profiler.events()
                          if e.device_type == torch.autograd.DeviceType.CUDA
                          and not getattr(e, "is_user_annotation", False)]
                row["times"]["torch"]["device_us"] = per_call(events, steps)
            del model, step
        except Exception as error:
            row["failed"]["torch"] = str(error)[:300]
        if device == "cuda":
            torch.cuda.empty_cache()
        report.write()


# ---- all of it -----------------------------------------------------------------------------------------


def wall_times(call, wait, steps: int) -> dict[str, float]:
    """Microseconds from step to step, each waited for."""
    each = []
    for _ in range(steps):
        start = time.perf_counter()
        call()
        wait()
        each.append(time.perf_counter() - start)
    return {"wall_us": 1e6 * statistics.median(each)}


class Report:
    """What a process measured so far, kept in a file."""

    def __init__(self, path: str, seconds: float):
        self.path, self.end = pathlib.Path(path), time.monotonic() + seconds
        self.environment, self.rows = {}, []

    def in_time(self, chosen: list[Case]):
        for case in chosen:
            if time.monotonic() > self.end:
                print(f"out of time before {case.name}", flush=True)
                return
            yield case

    def row(self, case: Case) -> dict:
        self.rows.append({"model": case.name, "times": {}, "failed": {}})
        return self.rows[-1]

    def write(self):
        row = self.rows[-1]
        print(row["model"], json.dumps(row["times"]), row["failed"], flush=True)
        self.path.write_text(json.dumps({"environment": self.environment, "rows": self.rows}))


def assemble(parts: dict, failures: dict) -> dict:
    """The report, from what the two processes wrote."""
    rows = {}
    for part in parts.values():
        for row in part["rows"]:
            mine = rows.setdefault(row["model"], {"model": row["model"], "times": {}, "failed": {}})
            mine |= row | {key: mine[key] | row[key] for key in ("times", "failed")}
    environment = {key: value for part in parts.values() for key, value in part["environment"].items()}
    environment |= {"python": platform.python_version(), "failures": failures,
                    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    rows, clock = list(rows.values()), f"{environment.get('clock')}_us"
    for row in rows:
        times = {way: times.get(clock) for way, times in row["times"].items()}
        row["speedup"] = {peer: times[peer] / times["ours"] for peer in ("flax", "torch")
                          if times.get(peer) and times.get("ours")}
    summary = {peer: geometric_mean(row["speedup"].get(peer) for row in rows) for peer in ("flax", "torch")}
    summary["slower_than_flax"] = [row["model"] for row in rows if row["speedup"].get("flax", 1) < 1]
    return {"environment": environment, "summary": summary, "rows": rows}


def times_table(report: dict) -> str:
    clock, peers = f"{report['environment'].get('clock')}_us", ("flax", "torch")
    lines = [("us a step", "ours", *peers, "flax / ours", "torch / ours")]
    for row in report["rows"]:
        lines.append((row["model"], *(number(row["times"].get(way, {}).get(clock)) for way in ("ours", *peers)),
                      *(number(row["speedup"].get(peer)) for peer in peers)))
    return table([*lines, ("geometric mean", "-", "-", "-", *(number(report["summary"][peer]) for peer in peers))])


def plot(report: dict, path: pathlib.Path) -> str:
    if not importlib.util.find_spec("matplotlib"):
        return "no plot: that needs matplotlib"
    from matplotlib.figure import Figure

    rows = report["rows"]
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axis = figure.subplots()
    for i, peer in enumerate(("flax", "torch")):
        bars = axis.bar([x + 0.4 * i - 0.2 for x in range(len(rows))],
                        [row["speedup"].get(peer, math.nan) for row in rows], 0.38, label=peer)
        axis.bar_label(bars, fmt="%.2f", fontsize=8)
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.set_xticks(range(len(rows)), [row["model"] for row in rows])
    environment = report["environment"]
    axis.set(ylabel="their time / ours",
             title=f"{environment.get('device')}: a training step, bfloat16, {environment.get('clock')} time")
    axis.legend()
    figure.savefig(path, dpi=110)
    return str(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="models.json")
    parser.add_argument("--models", nargs="*", choices=list(cases()), default=list(cases()))
    parser.add_argument("--steps", type=int, default=10, help="steps to time")
    parser.add_argument("--seconds", type=float, default=math.inf,
                        help="start no further model after that, in each process")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script")
    parser.add_argument("--child", choices=("jax", "torch"))
    args = parser.parse_args()
    if args.child:
        chosen = [case for name, case in cases(args.tiny).items() if name in args.models]
        {"jax": run_jax, "torch": run_torch}[args.child](chosen, Report(args.out, args.seconds), args.steps)
        return 0
    parts, failures = {}, {}
    for child in ("torch", "jax"):
        if importlib.util.find_spec(child) is None:
            failures[child] = "not installed"
            continue
        path = pathlib.Path(f"{args.out}.{child}")
        path.unlink(missing_ok=True)
        command = [sys.executable, __file__, "--child", child, "--out", str(path), "--steps", str(args.steps),
                   "--seconds", str(args.seconds), "--models", *args.models] + ["--tiny"] * args.tiny
        process = subprocess.run(command, env=timing.environment())
        if process.returncode:
            failures[child] = process.returncode
        if path.exists():
            parts[child] = json.loads(path.read_text())
            path.unlink()
    report = assemble(parts, failures)
    pathlib.Path(args.out).write_text(json.dumps(report, indent=1))
    print(times_table(report))
    print(plot(report, pathlib.Path(args.out).with_suffix(".png")))
    failed = {row["model"]: row["failed"] for row in report["rows"] if row["failed"]}
    if failed:
        print(json.dumps(failed, indent=1))
    return bool(failed or any(isinstance(code, int) for code in failures.values()))


if __name__ == "__main__":
    sys.exit(main())
