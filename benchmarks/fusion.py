# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Device time of layers with their bias and activation: jax_deconv, fused and not, jax.lax and PyTorch.

    python benchmarks/fusion.py --out benchmarks/results/fusion.json

bfloat16, the core layers.  What is timed of each: `forward`, activation(convolution + bias), and `step`, the same and
the gradients of input, kernel and bias for a given cotangent.  A time is named ``way/what``:

* `ours`: one call of jax_deconv with bias and activation;
* `ours_unfused`: jax_deconv's convolution, then JAX's own + and activation, in one jit;
* `lax` and `adj`: the same after jax.lax as Flax calls it and after its best form (whose gradients are the best forms
  of those, too);
* `torch_last` and `torch_first`: PyTorch, eager, channels-last and contiguous, with cudnn.benchmark.

How: see jax_deconv/_bench/peers.py.  bias and activation are those of benchmarks/layers.json, which has what the
model computes directly after the layer.  Where a normalisation or a filter stands between, or an activation with
weights of its own follows, that is the bias alone; layers that have neither are timed with bias and relu.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.util
import json
import math
import pathlib
import platform
import subprocess
import sys
import time

import jax
from layers import layers

from jax_deconv import activations
from jax_deconv._bench import peers, report, timing
from jax_deconv._bench.timing import geometric_mean

DTYPE = "bfloat16"
WHAT = {"forward": "forward + bias + activation", "step": "forward, both gradients, bias gradient"}
PYTORCH, LAX = ("torch_last", "torch_first"), ("lax", "adj")
#: Calls of a program.
MOST = 12
#: The activations of the layers as users of JAX write them, and their names in torch.nn.functional.
ACTIVATIONS = {"relu": (jax.nn.relu, "relu"), "leaky_relu": (jax.nn.leaky_relu, "leaky_relu"),
               "gelu_exact": (functools.partial(jax.nn.gelu, approximate=False), "gelu")}


def chosen(names, tiny: bool):
    """The layers, each with the activation that it is timed with and whether that and the bias are its own."""
    for layer in layers(shrink_to=1e5 if tiny else None):
        if not names or layer.id in names:
            # No layer has an activation and no bias.
            own = layer.bias
            activation = layer.activation_function if own else activations.NAMED["relu"]
            yield layer, activation, own


# ---- JAX -----------------------------------------------------------------------------------------------


def jax_functions(layer, activation) -> dict:
    """By way: the function of input, kernel and bias."""
    plain = peers.jax_functions(layer)

    @jax.custom_vjp
    def adj(x, w):
        return plain["adj"]["x"](x, w)

    adj.defvjp(lambda x, w: (adj(x, w), (x, w)),
               lambda saved, dy: (plain["adj"]["y"](dy, saved[1]), plain["adj"]["w"](saved[0], dy)))

    def then(convolution):
        def function(x, w, bias):
            out = convolution(x, w) + bias
            return out if activation is None else ACTIVATIONS[activation.name][0](out, *activation.parameters)
        return function

    return {"ours": lambda x, w, bias: plain["ours"]["x"](x, w, bias=bias, activation=activation),
            "ours_unfused": then(plain["ours"]["x"]), "lax": then(plain["lax"]["x"]), "adj": then(adj)}


def step(function):
    """The result and the gradients for a cotangent of it."""
    def result(x, w, bias, cotangent):
        out, pull = jax.vjp(function, x, w, bias)
        return out, *pull(cotangent)
    return result


def jax_row(layer, activation) -> dict:
    functions, buffers = jax_functions(layer, activation), peers.jax_operands(layer, DTYPE, MOST)
    programs = {f"{way}/{what}": function if what == "forward" else step(function)
                for way, function in functions.items() for what in WHAT}

    def operands(key, i):
        way, what = key.split("/")
        names = ("lhs", peers.kernel_order(way), "bias", *["out"] * (what == "step"))
        return tuple(buffers[i % len(buffers)][name] for name in names)

    row, results = peers.time_jax(programs, operands, len(buffers), MOST)
    row["kernels"] = {key: names for key, names in row["kernels"].items() if key.startswith("ours")}
    row["errors"] = {}
    for what in WHAT:
        # In float32: ways that round before they add the bias put a relu's corner elsewhere, so they differ by 3%.
        exact = jax.jit(programs[f"adj/{what}"])(*(t.astype("float32") for t in operands(f"adj/{what}", 0)))
        for way in ("ours", "ours_unfused"):
            if (got := results.get(f"{way}/{what}")) is not None:
                row["errors"][f"{way}/{what}"] = max(map(peers.relative_error, jax.tree.leaves(got),
                                                         jax.tree.leaves(exact)))
    return row


def say_jax() -> dict:
    return {"jax": jax.__version__, "device": jax.devices()[0].device_kind}


# ---- PyTorch -------------------------------------------------------------------------------------------


def torch_row(layer, activation) -> dict:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def forward(args, x, w, bias):
        out = torch.ops.aten.convolution(x, w, bias, *args)
        if activation is None:
            return out
        return getattr(torch.nn.functional, ACTIVATIONS[activation.name][1])(out, *activation.parameters)

    def layout_times(layout):
        buffers, args = peers.torch_operands(layer, DTYPE, layout, device, MOST)
        bias = torch.randn(layer.out_channels, device=device, dtype=getattr(torch, DTYPE))

        def only_forward(x, w, dy):
            with torch.no_grad():
                return forward(args, x, w, bias)

        def step(x, w, dy):
            given = [t.detach().requires_grad_() for t in (x, w, bias)]
            return torch.autograd.grad(forward(args, *given), given, dy)

        functions = {f"torch_{layout}/forward": only_forward, f"torch_{layout}/step": step}
        return peers.time_torch(functions, buffers, device, MOST)

    return peers.torch_layouts(layout_times, device)


def say_torch() -> dict:
    import torch

    return {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "cudnn.benchmark": True}


# ---- both ----------------------------------------------------------------------------------------------


def summary(rows) -> dict:
    """Geometric means of a peer's time over ours; the layers where a peer is faster."""
    ratios, slower = {}, []
    for what in WHAT:
        timed = [row for row in rows if row["times"].get(f"ours/{what}")]

        def ratio(*ways):
            return geometric_mean(theirs / row["times"][f"ours/{what}"] for row in timed
                                  if (theirs := report.best(row, ways, what)))

        ratios[what] = {way: ratio(way) for way in ("ours_unfused", *LAX, *PYTORCH)}
        ratios[what] |= {"layers": len(timed), "torch_best": ratio(*PYTORCH), "lax_best": ratio(*LAX)}
        for row in timed:
            mine = row["times"][f"ours/{what}"]
            times = {way: row["times"].get(f"{way}/{what}") for way in ("ours_unfused", *LAX, *PYTORCH)}
            times = {way: t for way, t in times.items() if t}
            if times and mine > 1.05 * min(times.values()):
                best = min(times, key=times.get)
                slower.append([row["id"], what, round(mine, 1), best, round(times[best], 1)])

    def bar(value, least):
        return {"measured": value, "least": least, "holds": None if value is None else value >= least}

    late = [item for item in slower if item[1] == "forward"]
    bars = {
        "forward: never more than 5% slower than the best way":
            {"slower": len(late), "holds": not late if ratios["forward"]["layers"] else None},
        "forward: PyTorch's better layout / ours": bar(ratios["forward"]["torch_best"], 3),
        "forward: the better lax form / ours": bar(ratios["forward"]["lax_best"], 2),
        "step: PyTorch's better layout / ours": bar(ratios["step"]["torch_best"], 2),
        "step: lax as Flax calls it / ours": bar(ratios["step"]["lax"], 10)}
    wrong = [[row["id"], key, error] for row in rows for key, error in row["errors"].items()
             if key.startswith("ours/") and not error <= peers.TOLERANCE[DTYPE]]
    return {"bars": bars, "ratios_to_ours": ratios, "slower_than_the_best_way": slower, "wrong_values": wrong}


def write(path: pathlib.Path, environment: dict, rows: list) -> dict:
    result = {"environment": environment, "summary": summary(rows), "rows": rows}
    path.write_text(json.dumps(result, indent=1))
    return result


def child(who: str, args) -> None:
    """Prints lines of JSON: what ran, then a row for each layer."""
    one, say = {"jax": (jax_row, say_jax), "torch": (torch_row, say_torch)}[who]
    print(json.dumps(say()), flush=True)
    begin = time.time()
    for layer, activation, _ in chosen(args.layers, args.tiny):
        if time.time() - begin > args.seconds:
            print(f"{who}: out of time before {layer.id}", file=sys.stderr)
            return
        print(json.dumps({"id": layer.id} | one(layer, activation)), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default="fusion.json")
    parser.add_argument("--layers", nargs="*")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no further layer after that, in each "
                        "of the two processes")
    parser.add_argument("--tiny", action="store_true", help="small layers of the same kinds, to try the script")
    parser.add_argument("--child", choices=("torch", "jax"))
    args = parser.parse_args()
    if args.child:
        child(args.child, args)
        return 0
    rows = {layer.id: {"id": layer.id, "klass": layer.klass, "dtype": DTYPE, "floor_us": None, "bias": True,
                       "activation": str(activation or ""),
                       "epilogue": "its own" if own else "it has none: bias and relu",
                       "times": {}, "errors": {}, "compile_s": {}, "kernels": {}, "failed": {}}
            for layer, activation, own in chosen(args.layers, args.tiny)}
    environment = {"python": platform.python_version(), "failures": {}, "calls": MOST,
                   "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                   "l2": "cold: calls rotate over buffers of three times its size, or are the first on theirs"}
    for who in ("torch", "jax"):
        if importlib.util.find_spec(who) is None:
            environment["failures"][who] = "not installed"
            continue
        command = [sys.executable, __file__, "--child", who, "--seconds", str(args.seconds), *["--tiny"] * args.tiny]
        command += ["--layers", *args.layers] if args.layers else []
        begin = time.time()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=timing.environment()) as process:
            for line in process.stdout:
                if not line.startswith("{"):
                    continue
                said = json.loads(line)
                if (name := said.pop("id", None)) is None:
                    environment |= said
                    continue
                for key, value in said.items():
                    rows[name][key] |= value
                print(who, name, f"{time.time() - begin:.0f}s", " ".join(
                    f"{key}={t:.1f}" for key, t in said["times"].items() if t), said["failed"] or "", flush=True)
                # After every layer, so that a run that is cut short has its rows.
                result = write(args.out, environment, list(rows.values()))
        if process.returncode:
            environment["failures"][who] = process.returncode
        environment[f"{who}_seconds"] = round(time.time() - begin, 1)
    result = write(args.out, environment, list(rows.values()))
    print(json.dumps(result["summary"], indent=1))
    timed = [row for row in rows.values() if report.best(row, ["ours"], "forward")]
    if timed:
        title = f"{environment['device']}, {DTYPE}, with bias and activation"
        print(report.plot(timed, args.out.with_suffix(".png"), title, WHAT))
    return int(bool(environment["failures"]) or bool(result["summary"]["wrong_values"]))


if __name__ == "__main__":
    sys.exit(main())
