# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Device time on an NVIDIA GPU: jax_deconv, jax.lax in both forms, and PyTorch; the core layers, each role.

    python benchmarks/gpu.py --out benchmarks/results/gpu.json

What is timed, and how: see jax_deconv/_bench/peers.py.  TF32 is on for float32, everywhere.
floor = max(FLOPs / peak, least bytes / copy bandwidth).
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
import time

from layers import layers, shapes

from jax_deconv._bench import report, timing
from jax_deconv._bench.peers import ROLES, jax_row, torch_row
from jax_deconv._bench.timing import geometric_mean

SETS = {"core": layers, "shapes": shapes}


def run_jax(which, names, dtypes, out_path, only, limit):
    import jax

    results, begin = [], time.time()
    for layer in SETS[which]():
        if names and layer.id not in names:
            continue
        for dtype in dtypes:
            started = time.time()
            if started - begin > limit:
                print(f"out of time before {layer.id} {dtype}", flush=True)
                continue
            row = jax_row(layer, dtype, only)
            results.append(row)
            print(f"{layer.id} {dtype} {time.time() - started:.1f}s "
                  + " ".join(f"{k}={v:.1f}" for k, v in row["times"].items() if v), flush=True)
            pathlib.Path(out_path).write_text(json.dumps(
                {"jax": jax.__version__, "device": jax.devices()[0].device_kind, "rows": results}))


def run_torch(which, names, dtypes, out_path):
    import torch

    results = []
    for layer in SETS[which]():
        if names and layer.id not in names:
            continue
        for dtype in dtypes:
            row = torch_row(layer, dtype)
            results.append(row)
            print(layer.id, dtype, row["times"], row["failed"], flush=True)
            pathlib.Path(out_path).write_text(json.dumps(
                {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "rows": results}))


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
    """Seconds to lower and compile a layer that nothing was known of, ours against XLA's autotuning of it: as Flax
    calls it, and in its best form.

    Ours comes first: what they share, loading code, say, counts as ours.
    """
    found = {}
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        for peer in ("lax", "adj"):
            pairs = [(row["compile_s"][f"ours/{role}"], row["compile_s"][f"{peer}/{role}"])
                     for row in rows if row["dtype"] == dtype for role in ROLES
                     if {f"ours/{role}", f"{peer}/{role}"} <= set(row["compile_s"])]
            if pairs:
                ours, xla = zip(*pairs)
                found[f"{dtype}/{peer}"] = {"calls": len(pairs), "ours_s": round(sum(ours), 1),
                                            "xla_s": round(sum(xla), 1),
                                            "ratio_geometric_mean": geometric_mean(a / b for a, b in pairs)}
    return found


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
        process = subprocess.run(command, env=timing.environment())
        if process.returncode:
            failures[child] = process.returncode
        if os.path.exists(path):
            parts[child] = json.loads(pathlib.Path(path).read_text())
    result = assemble(parts, failures)
    pathlib.Path(args.out).write_text(json.dumps(result, indent=1))
    print(json.dumps(result["summary"], indent=1))
    if rows := [row for row in result["rows"] if row["dtype"] == "bfloat16"] or result["rows"]:
        title = f"{result['environment'].get('device')}, {rows[0]['dtype']}, device time"
        print(report.plot(rows, pathlib.Path(args.out).with_suffix(".png"), title))


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
