# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Compares with `jax.lax` and PyTorch, each in a process of its own; see `peers` for what is timed.

    python -m jax_deconv._bench.bench WHO    # a child: is told what to do in JSON, answers with JSON lines
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.util
import json
import pathlib
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence

from jax_deconv._bench import report, timing
from jax_deconv._bench.layers import Layer
from jax_deconv._bench.peers import ROLES, TOLERANCE

#: Multiply-adds of a forward pass that a CPU does in reasonable time.
CPU_MACS = 0.05e9


def bench(layers: Sequence[Layer], dtypes: Sequence[str] | None, *, out: pathlib.Path, precision: str | None = None,
          shrink: bool = False) -> int:
    """Times the layers, prints and writes what was found; 1 if something failed or has other values.

    Args:
      layers: what to time, in all three roles.
      dtypes: names of types; None is bfloat16 and float32 on a GPU, float32 elsewhere.
      out: where the JSON goes, and beside it the PNG.
      precision: ``jax_default_matmul_precision``, for all: "highest" forbids TF32.
      shrink: whether a CPU gets smaller layers of the same kind.
    """
    order = {"layers": [dataclasses.asdict(layer) for layer in layers], "dtypes": dtypes, "precision": precision,
             "shrink": shrink}
    environment, rows, failed = _run("jax", order)
    if not importlib.util.find_spec("torch"):
        print("PyTorch is not installed: left out", file=sys.stderr)
    elif not failed:
        theirs, peer_rows, failed = _run("torch", order | {key: environment[key] for key in ("layers", "dtypes")} |
                                         {"device": environment["backend"]})
        environment |= theirs
        for row, peer in zip(rows, peer_rows):
            row["times"] |= peer["times"]
            row["failed"] |= peer["failed"]
    sizes = environment.pop("layers", order["layers"])
    environment |= {"python": platform.python_version(), "precision": precision,
                    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    means = report.summary(rows)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"environment": environment, "summary": means, "layers": sizes, "rows": rows}, indent=1))
    if rows:
        kind = "device time" if environment["backend"] == "gpu" else "wall time"
        title = f"{environment['device']}, {kind}"
        print(f"{title}, microseconds\n{report.times_table(rows)}\n")
        print("\n".join(f"{name:45}{report.number(mean):>8}" for name, mean in means.items()))
        print(f"\n{out}\n{report.plot(rows, out.with_suffix('.png'), title)}")
    for row in rows:
        wrong = [f"{ROLES[key[-1]]} is {error:.2g} away from lax's" for key, error in row["errors"].items()
                 if not error <= TOLERANCE[row["dtype"]]]
        for message in (*wrong, *(f"{key} failed: {error}" for key, error in row["failed"].items())):
            print(f"{row['id']} {row['dtype']}: {message}", file=sys.stderr)
        failed = failed or bool(wrong) or any(key.startswith("ours") for key in row["failed"])
    return int(failed)


def _run(who: str, order: dict) -> tuple[dict, list[dict], bool]:
    """What a child says of itself, its rows, and whether it failed."""
    with subprocess.Popen([sys.executable, "-m", __name__, who], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True, env=timing.environment()) as child:
        child.stdin.write(json.dumps(order))
        child.stdin.close()
        said = (json.loads(line) for line in child.stdout if line.startswith("{"))
        environment = next(said, {})
        rows = list(report.track(said, environment.pop("rows", 0), who))
    return environment, rows, child.returncode != 0


def _child(who: str, order: dict) -> Iterator[dict]:
    import jax

    from jax_deconv._bench import peers

    if order["precision"] is not None:
        jax.config.update("jax_default_matmul_precision", order["precision"])
    layers, dtypes = [Layer(**layer) for layer in order["layers"]], order["dtypes"]
    if who == "jax":
        on_gpu = jax.default_backend() == "gpu"
        if order["shrink"] and not on_gpu:
            layers = [layer.shrunk(CPU_MACS) for layer in layers]
        dtypes = dtypes or (["bfloat16", "float32"] if on_gpu else ["float32"])
        yield {"jax": jax.__version__, "backend": jax.default_backend(), "device": jax.devices()[0].device_kind,
               "layers": [dataclasses.asdict(layer) for layer in layers], "dtypes": dtypes,
               "rows": len(layers) * len(dtypes)}
    else:
        import torch

        yield {"torch": torch.__version__, "rows": len(layers) * len(dtypes)}
    for layer in layers:
        for dtype in dtypes:
            if who == "jax":
                yield peers.jax_row(layer, dtype)
            else:
                yield peers.torch_row(layer, dtype, "cuda" if order["device"] == "gpu" else "cpu")


if __name__ == "__main__":
    for line in _child(sys.argv[1], json.load(sys.stdin)):
        print(json.dumps(line), flush=True)
