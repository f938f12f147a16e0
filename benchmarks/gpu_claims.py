# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""What the package claims of a GPU beside its speed, each claim shown on the machine at hand.

    python benchmarks/gpu_claims.py --out benchmarks/results/gpu_claims.json [claim ...]

Every claim is a function that returns its evidence or raises; each runs in a process of its own.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import datetime
import json
import math
import os
import pathlib
import platform
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

# Relative error in norm against float64: rounding of the result, and of TF32's operands.
TOLERANCE = {"bfloat16": 4e-3, "float16": 8e-4, "float32": 8e-4, "float32 strict": 3e-6, "float64": 1e-12}


def error(got, want) -> float:
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)) if got.size else 0.0


# ---- values --------------------------------------------------------------------------------------------


def random_problem(rng: random.Random):
    """(role, N, groups, C, K, geometry, dtype) of any kind, small enough for the oracle."""
    from jax_deconv.problem import Axis, ConvProblem, Role

    while True:
        rank = rng.choice([1, 1, 2, 2, 2, 3])
        groups, c, k = rng.choice([(1, rng.choice([1, 3, 8, 16, 21, 32, 64]), rng.choice([1, 3, 8, 16, 21, 64, 386])),
                                   (rng.choice([2, 3, 4]), rng.choice([1, 4, 5, 8, 16]), rng.choice([1, 4, 6, 8, 16])),
                                   (rng.choice([4, 16, 21, 64]), 1, 1)])
        axes = []
        for _ in range(rank):
            kernel, stride = rng.choice([1, 2, 3, 4, 5, 7, 16 if rank == 1 else 3]), rng.choice([1, 1, 2, 2, 3, 4])
            dilation = rng.choice([1, 1, 1, 2, 3])
            y = rng.randint(1, [0, 40, 12, 6][rank])
            extent = (kernel - 1) * dilation + 1
            lo = rng.choice([0, 0, extent // 2, rng.randint(0, extent - 1), rng.randint(-2, extent + 1)])
            hi = rng.choice([lo, lo, 0, rng.randint(-2, max(extent - 1, 0))])
            x = (y - 1) * stride + extent - lo - hi + rng.choice([0, 0, 1, stride - 1, stride + 1])
            axes.append(Axis(x, y, kernel, stride, dilation, lo))
        dtype = rng.choice(["float32", "float32", "bfloat16", "bfloat16", "float16", "float64"])
        if all(a.x_size > 0 for a in axes):
            problem = ConvProblem(rng.choice(list(Role)), rng.choice([1, 2, 5]), groups, c, k, tuple(axes),
                                  np.dtype(_dtype(dtype)), np.dtype(_dtype(dtype)))
            if problem.macs < 3e7:
                return problem


def _dtype(name):
    import jax.numpy as jnp

    return jnp.dtype(name)


def reference(problem, a, b):
    import oracle

    return getattr(oracle, f"conv_{problem.role}")(a, b, problem.geometry, problem.G)


def operands_of(problem, seed):
    from jax_deconv.problem import GIVEN

    rng = np.random.default_rng(seed)
    return [rng.standard_normal(problem.shape(r)).astype(problem.dtype) for r in GIVEN[problem.role]]


def run_problem(problem, policy, a, b):
    import jax

    from jax_deconv import primitives
    from jax_deconv.policy import resolve
    from jax_deconv.problem import GIVEN

    def function(a, b):
        return primitives.bind(problem.role, dict(zip(GIVEN[problem.role], (a, b))), geometry=problem.geometry,
                               groups=problem.G, dtype=problem.out_dtype, policy=resolve(policy))

    return jax.jit(function).lower(a, b).compile()


def claim_values(count=320, timed=60):
    """Random problems of every kind, each role, against the oracle in float64; the first ones timed."""
    import jax

    import jax_deconv

    jax.config.update("jax_enable_x64", True)
    rng = random.Random(0)
    problems = [random_problem(rng) for _ in range(count)]
    strict = [i % 5 == 0 for i in range(count)]

    def compiled(i):
        policy = jax_deconv.Policy(autotune="full" if i < timed else "off",
                                   precision="highest" if strict[i] else None)
        operands = operands_of(problems[i], i)
        program = run_problem(problems[i], policy, *operands)
        return program(*operands), "jax_deconv_" in program.as_text(), reference(problems[i], *operands)

    with tempfile.TemporaryDirectory() as folder:
        os.environ["JAX_DECONV_CACHE_DIR"] = folder
        results = [compiled(i) for i in range(timed)]  # one at a time: they time plans
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            results += pool.map(compiled, range(timed, count))
    wrong, worst, served = [], {}, 0
    for i, (got, by_cudnn, want) in enumerate(results):
        problem = problems[i]
        name = problem.dtype.name + (" strict" if strict[i] and problem.dtype.name == "float32" else "")
        served += by_cudnn
        worst[name] = max(worst.get(name, 0), error(got, want))
        if not error(got, want) <= TOLERANCE[name]:
            wrong.append([str(problem), name, error(got, want), by_cudnn])
    evidence = {"problems": count, "timed": timed, "wrong": wrong, "worst_error": worst, "tolerance": TOLERANCE,
                "served_by_cudnn": served}
    assert not wrong, evidence
    return evidence


def claim_special_values():
    """The odd ones: large kernels, unaligned channels, zero sizes, both layouts, output padding."""
    import jax
    import jax.numpy as jnp
    import oracle

    import jax_deconv

    errors = {}
    cases = {
        "fcn32s 64x64 kernel stride 32": ((1, 12, 16, 21), (64, 64, 21, 21), dict(strides=(32, 32), padding="VALID")),
        "386 channels": ((2, 8, 8, 386), (4, 4, 386, 64), dict(strides=(2, 2), padding="SAME")),
        "one channel": ((2, 9, 9, 1), (3, 3, 1, 1), dict(strides=(2, 2), padding="SAME")),
        "output_padding >= stride": ((2, 9, 9, 8), (3, 3, 8, 8), dict(strides=(2, 2), padding="SAME",
                                                                      output_padding=(3, 2))),
        "negative padding": ((2, 9, 9, 8), (3, 3, 8, 8), dict(strides=(2, 2), padding=[(-2, 1), (0, -1)])),
        "1d k1024 s256": ((2, 63, 80), (1024, 80, 80), dict(strides=(256,), padding="VALID")),
        "zero batch": ((0, 4, 4, 3), (3, 3, 3, 5), dict(strides=(2, 2), padding="SAME")),
        "zero channels": ((2, 4, 4, 0), (3, 3, 0, 5), dict(strides=(2, 2), padding="SAME")),
        "stride > kernel": ((2, 5, 5, 8), (2, 2, 8, 8), dict(strides=(5, 3), padding="VALID")),
    }
    for name, (lhs_shape, rhs_shape, kw) in cases.items():
        rng = np.random.default_rng(0)
        lhs, rhs = (rng.standard_normal(s).astype(np.float32) for s in (lhs_shape, rhs_shape))
        for first in (False, True):
            order = {3: (0, 2, 1), 4: (0, 3, 1, 2)}[lhs.ndim]
            space = "HW"[:lhs.ndim - 2]
            dn = (f"NC{space}", f"{space}IO", f"NC{space}") if first else (f"N{space}C", f"{space}IO", f"N{space}C")
            a = lhs.transpose(order) if first else lhs
            function = lambda a, b: jax_deconv.conv_transpose(a, b, dimension_numbers=dn, **kw)  # noqa: B023
            out, vjp = jax.vjp(function, jnp.asarray(a), jnp.asarray(rhs))
            want = oracle.conv_transpose(a, rhs, dimension_numbers=dn, **kw)
            cotangent = rng.standard_normal(out.shape).astype(np.float32)
            da, db = jax.jit(vjp)(cotangent)
            # <f(a, b), c> = <a, f'(c, b)> = <b, f'(a, c)>: all three numbers agree.
            inner = [float(np.vdot(np.asarray(p, np.float64), np.asarray(q, np.float64)))
                     for p, q in ((want, cotangent), (a, da), (rhs, db))]
            scale = max(np.linalg.norm(want) * np.linalg.norm(cotangent), 1e-30)
            spread = (max(inner) - min(inner)) / scale
            errors[f"{name}, {'first' if first else 'last'}"] = [error(out, want), spread]
            assert error(out, want) < 8e-4 and spread < 1e-3, (name, error(out, want), inner)
    return errors


def claim_more_than_2_to_31_outputs():
    """Sampled outputs of a 2.2e9-element result, one and several examples."""
    import jax
    import jax.numpy as jnp

    import jax_deconv

    evidence = {}
    for batch, channels, size in ((1, 512, (1024, 1032)), (9, 64, (1024, 1032))):
        @jax.jit
        def sample(key, batch=batch, channels=channels, size=size):
            lhs = jax.random.normal(key, (batch, *size, 8), jnp.bfloat16)
            rhs = jax.random.normal(key, (2, 2, 8, channels), jnp.bfloat16)
            out = jax_deconv.conv_transpose(lhs, rhs, (2, 2), "VALID")
            where = [(0, 0, 0), (batch - 1, size[0], size[1]), (batch - 1, 2 * size[0] - 1, 2 * size[1] - 1)]
            want = jnp.stack([lhs[n, i // 2, j // 2].astype(jnp.float32) @ rhs[1 - i % 2, 1 - j % 2].astype(jnp.float32)
                              for n, i, j in where])
            return jnp.stack([out[n, i, j].astype(jnp.float32) for n, i, j in where]), want

        got, want = sample(jax.random.key(0))
        evidence[f"{batch}x{2 * size[0]}x{2 * size[1]}x{channels}"] = error(got, want)
        assert error(got, want) < 6e-3, (batch, error(got, want))

    @jax.jit
    def filter_gradient():
        lhs, out = jnp.ones((9, 1024, 1032, 8), jnp.bfloat16), jnp.ones((9, 2048, 2064, 64), jnp.bfloat16)
        return jax_deconv.conv_transpose_filter_gradient(lhs, out, (2, 2, 8, 64), (2, 2), "VALID")

    ratio = np.asarray(filter_gradient().astype(jnp.float32)) / (9 * 1024 * 1032)
    evidence["filter gradient of 9 examples"] = float(np.abs(ratio - 1).max())
    assert np.abs(ratio - 1).max() < 8e-3, ratio.ravel()[:8]  # rounded twice: each part, and their sum
    return evidence


def claim_wrong_plans():
    """Every plan that cuDNN proposes, values checked: which engines are wrong, and that none is chosen."""
    import jax_deconv
    from jax_deconv import tuning
    from jax_deconv.lowering import cudnn
    from jax_deconv.policy import resolve
    from jax_deconv.problem import Axis, ConvProblem, Role

    found, tried = [], 0
    policy = resolve(jax_deconv.Policy(autotune="off"))
    for dtype in ("bfloat16", "float32", "float64"):
        for axes in ((Axis(65, 32, 4, 2, 1, 1),) * 2, (Axis(64, 32, 4, 2, 1, 2),) * 2, (Axis(64, 32, 4, 2, 1, 1),) * 2,
                     (Axis(63, 32, 5, 2, 1, 1), Axis(66, 32, 3, 2, 2, 2)), (Axis(258, 64, 10, 4, 1, 2),)):
            for role in Role:
                for groups, c, k in ((1, 32, 64), (4, 16, 16), (32, 1, 1)):
                    problem = ConvProblem(role, 4, groups, c, k, axes, _dtype(dtype), _dtype(dtype))
                    plans = [plan for plan, compiles in cudnn.candidates(problem, policy) if not compiles]
                    results = cudnn.measure(problem, policy, plans, budget=2.0, patience=math.inf) if plans else []
                    chosen = tuning._heuristic(problem, policy, 0)
                    for plan, (microseconds, err) in zip(plans, results):
                        tried += 1
                        if not np.isnan(microseconds) and not err <= tuning._TOLERANCE[dtype]:
                            found.append({"problem": tuning.describe(problem, policy), "engine": plan.engine,
                                          "knobs": plan.knobs, "error": err, "us": microseconds,
                                          "is_heuristic_choice": plan == chosen})
    evidence = {"plans_tried": tried, "wrong": found}
    assert not any(f["is_heuristic_choice"] for f in found), evidence
    return evidence


# ---- inside jit ----------------------------------------------------------------------------------------


def chain(x, ws):
    import jax_deconv

    for w in ws:
        x = jax_deconv.conv_transpose(x, w, (2, 2), [(1, 1), (1, 1)], None, ("NCHW", "OIHW", "NCHW"), True,
                                      use_consistent_padding=True)
    return x


def claim_hlo():
    """NCHW code runs channels-last: no copy or transpose between chained layers; workspaces are results."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones((8, 64, 16, 16), jnp.bfloat16)
    ws = [jnp.ones((64, 64, 4, 4), jnp.bfloat16)] * 3
    evidence = {}
    for name, function in (("forward", chain),
                           ("gradients", jax.grad(lambda x, ws: chain(x, ws).astype(jnp.float32).sum(), (0, 1)))):
        text = jax.jit(function).lower(x, ws).compile().as_text()
        calls = {t: len(re.findall(rf'custom_call_target="jax_deconv_{t}"', text)) for t in "xyw"}
        sizes = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|transpose)\(", text)
        moves = re.findall(r"^\s*(?:ROOT )?%?\S+ = (\w+\[[\d,]*\]\S*) (copy|transpose|fusion)\(", text, re.M)
        evidence[name] = {"calls": calls, "copies": len(sizes), "moves": [f"{b} {a}" for a, b in moves],
                          "convolutions": len(re.findall(r"__cudnn\$conv| convolution\(", text)),
                          "workspaces": sorted(set(re.findall(r"u8\[\d+\]", text)))}
        assert evidence[name]["convolutions"] == 0
    assert evidence["forward"]["calls"]["x"] == 3 and evidence["gradients"]["calls"]["w"] == 3
    # At the boundary: x in, the result out, and a relayout of each kernel; nothing between.
    assert evidence["forward"]["copies"] <= 5, evidence
    return evidence


def claim_cuda_graph():
    """The calls are captured: the host launches graphs, not kernels, and values stay right."""
    import glob

    import jax
    import jax.numpy as jnp

    x = jax.random.normal(jax.random.key(0), (8, 64, 8, 8), jnp.bfloat16)
    ws = [jax.random.normal(jax.random.key(i), (64, 64, 4, 4), jnp.bfloat16) / 16 for i in range(6)]
    program = jax.jit(chain)
    first = np.asarray(program(x, ws[:6][:4]).astype(jnp.float32))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(5):
                again = jax.block_until_ready(program(x, ws[:4]))
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        names = [event.name for plane in jax.profiler.ProfileData.from_file(path).planes for line in plane.lines
                 for event in line.events]
    launches = sum("GraphLaunch" in name for name in names)
    assert launches >= 1, sorted(set(names))[:80]
    assert np.array_equal(np.asarray(again.astype(jnp.float32)), first)
    return {"graph_launches": launches, "kernel_launches_on_host": sum("cuLaunchKernel" in n for n in names)}


# ---- plans ---------------------------------------------------------------------------------------------

_PLAN_CHILD = """
import sys, re, json, jax, jax.numpy as jnp, jax_deconv
from jax_deconv.lowering import cudnn
timed, measure = [], cudnn.measure
cudnn.measure = lambda *a, **k: timed.append(1) or measure(*a, **k)
f = lambda x, w: jax_deconv.conv_transpose(x, w, (2, 2), "SAME")
x, w = jnp.ones((16, 32, 32, 128), jnp.bfloat16), jnp.ones((4, 4, 128, 64), jnp.bfloat16)
text = jax.jit(lambda x, w: (f(x, w), f(x + 1, w))).lower(x, w).as_text()
engines = re.findall(r"engine = (-?\\d+)", text)
print(json.dumps({"timings": len(timed), "engines": engines}))
"""


def child(code, **environment):
    out = subprocess.run([sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True,
                         timeout=300)
    return out.returncode, out.stdout, out.stderr


def claim_store():
    """A second process uses the stored engine untimed; an edited entry changes the attribute; layers share plans."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [json.loads(child(_PLAN_CHILD, JAX_DECONV_CACHE_DIR=folder)[1].splitlines()[-1]) for _ in range(2)]
        (path,) = pathlib.Path(folder).glob("*.json")
        content = json.loads(path.read_text())
        (key,) = (key for key in content["plans"] if not key.endswith("cudnn"))  # not of a problem inside it
        before = dict(content["plans"][key])
        content["plans"][key] |= {"engine": 0, "knobs": [], "workspace": 0}
        path.write_text(json.dumps(content))
        runs.append(json.loads(child(_PLAN_CHILD, JAX_DECONV_CACHE_DIR=folder)[1].splitlines()[-1]))
    evidence = {"first": runs[0], "second": runs[1], "edited": runs[2], "entry": before, "file": path.name}
    assert runs[0]["timings"] >= 1 and len(runs[0]["engines"]) == 2, evidence
    assert runs[1]["timings"] == 0 and runs[1]["engines"] == runs[0]["engines"], evidence
    assert runs[2]["engines"] == ["0", "0"], evidence
    return evidence


# ---- policy --------------------------------------------------------------------------------------------

_DETERMINISTIC_CHILD = """
import re, jax, jax.numpy as jnp, numpy as np, jax_deconv, hashlib
x = jax.random.normal(jax.random.key(0), (16, 32, 32, 128)); w = jax.random.normal(jax.random.key(1), (4, 4, 128, 64))
f = lambda x, w: jax_deconv.conv_transpose(x, w, (2, 2), "SAME")
def all3(x, w):
    y, vjp = jax.vjp(f, x, w)
    return y, *vjp(y)
lowered = jax.jit(all3).lower(x, w); program = lowered.compile()
digest = lambda: hashlib.sha256(b"".join(np.asarray(t).tobytes() for t in program(x, w))).hexdigest()
print(len({digest() for _ in range(20)}), digest(), re.findall(r"engine = (-?\\d+)", lowered.as_text()))
"""


def claim_deterministic():
    """Bitwise equal over 20 runs, the same plan and bits in every process, whatever the store holds."""
    outputs = [child(_DETERMINISTIC_CHILD, JAX_DECONV_CACHE_DIR=tempfile.mkdtemp(), **environment)[1].splitlines()[-1]
               for environment in ({"JAX_DECONV_DETERMINISTIC": "1"}, {"JAX_DECONV_DETERMINISTIC": "1"},
                                   {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true"})]
    assert len(set(outputs)) == 1 and outputs[0].startswith("1 "), outputs
    return outputs[0]


def claim_policy():
    """Precision, workspace, algorithm and strictness do what they say."""
    import jax
    import jax.numpy as jnp

    import jax_deconv
    from jax_deconv import Policy

    x, w = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(4, 16, 16, 64), (4, 4, 64, 32)]))
    import oracle
    want = oracle.conv_transpose(np.asarray(x), np.asarray(w), (2, 2), "SAME")
    f = lambda **k: jax.jit(lambda x, w: jax_deconv.conv_transpose(x, w, (2, 2), "SAME", **k))
    evidence = {"default": error(f()(x, w), want), "high": error(f(precision="high")(x, w), want),
                "highest": error(f(precision="highest")(x, w), want)}
    with jax.default_matmul_precision("highest"):
        evidence["jax_default_matmul_precision"] = error(f()(x, w), want)
    with jax_deconv.use_policy(Policy(precision="highest")):
        evidence["use_policy"] = error(f()(x, w), want)
    assert all(evidence[k] < 1e-6 for k in ("highest", "jax_default_matmul_precision", "use_policy")), evidence
    assert 1e-5 < evidence["default"] < 1e-3, evidence
    for limit in (0, 1):
        text = f(policy=Policy(workspace_limit=limit)).lower(x, w).compile().as_text()
        workspaces = [int(n) for n in re.findall(r"u8\[(\d+)\]", text)]
        assert all(n <= limit << 20 for n in workspaces), (limit, workspaces)
        evidence[f"workspace<={limit}MiB"] = max(workspaces, default=0)
    assert "jax_deconv_x" not in f(policy=Policy(algorithm="xla")).lower(x, w).as_text()
    with contextlib.suppress(ValueError):
        f(policy=Policy(algorithm="cudnn")).lower(x.astype(jnp.int32), w.astype(jnp.int32))
        raise AssertionError("cudnn took integers")
    half = lambda t: jnp.ones(t, jnp.float16)
    ones = jax_deconv.conv_transpose(half((1, 64, 64)), half((64, 64, 1)), (1,), [(0, 0)])
    evidence["float16 accumulates in float32"] = float(ones.max())
    assert float(ones.max()) == 4096.0
    return evidence


# ---- failure and threads -------------------------------------------------------------------------------


def claim_failure():
    """Without cuDNN: XLA computes, and says why once; a strict policy and a pinned algorithm raise that."""
    code = """
import warnings, jax, jax.numpy as jnp, jax_deconv
from jax_deconv import _ffi
_ffi.available = lambda compiler=False: "libcudnn.so.9: cannot be loaded; install it with: pip install -U 'jax[cuda13]'"
x, w = jnp.ones((2, 8, 8, 4)), jnp.ones((3, 3, 4, 4))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        jax.clear_caches(); jax_deconv.conv_transpose(x, w, (2, 2), "SAME")
print(len(caught), caught[0].message)
for policy in (jax_deconv.Policy(strict=True), jax_deconv.Policy(algorithm="cudnn")):
    try:
        jax_deconv.conv_transpose(x, w, (2, 2), "SAME", policy=policy); print("NO ERROR")
    except ValueError as error:
        print(error)
"""
    status, out, err = child(code)
    lines = out.splitlines()
    assert status == 0 and lines[0].startswith("1 ") and "NO ERROR" not in out, (out, err[-2000:])
    bad = """
import jax, jax.numpy as jnp
from jax_deconv.lowering import cudnn
cudnn.reproduce(role="x", dtype="float32", out_dtype="float32", x=(1, 4, 9), w=(4, 4, 3), y=(1, 4, 4), layout=1,
                stride=[2], dilation=[1], pad_lo=[0], pad_hi=[7], engine=-1, knobs=[], workspace=0, tf32=True,
                deterministic=False)
"""
    status, out, err = child(bad)
    message = err.strip().splitlines()
    assert status == 1 and any("reproduce(" in line for line in message), err[-2000:]
    return {"messages": lines, "reproducer": message[-25:]}


def claim_soak(seconds=65.0, threads=8):
    """Host threads and executables at once: always the same values, no crash."""
    import jax
    import jax.numpy as jnp

    import jax_deconv

    programs = []
    for i in range(6):
        x = jax.random.normal(jax.random.key(i), (4 + i, 12 + i, 12, 32), jnp.bfloat16)
        w = jax.random.normal(jax.random.key(9 + i), (4, 4, 32, 16 + 8 * i), jnp.bfloat16)

        def step(x, w):
            y, vjp = jax.vjp(lambda x, w: jax_deconv.conv_transpose(x, w, (2, 2), "SAME"), x, w)
            return y, *vjp(y)

        program = jax.jit(step, donate_argnums=()).lower(x, w).compile()
        programs.append((program, x, w, [np.asarray(t.astype(jnp.float32)) for t in program(x, w)]))
    stop, runs, failures = time.time() + seconds, [0] * threads, []

    def work(t):
        rng = random.Random(t)
        while time.time() < stop and not failures:
            program, x, w, want = rng.choice(programs)
            for got, expected in zip(program(x, w), want):
                # Nondeterministic engines may differ in the last bit of bfloat16.
                if not np.allclose(np.asarray(got.astype(jnp.float32)), expected, rtol=2e-2, atol=0.25):
                    failures.append(t)
            runs[t] += 1

    workers = [threading.Thread(target=work, args=(t,)) for t in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    return {"seconds": seconds, "threads": threads, "executables": len(programs), "runs": sum(runs)}


# ---- all of them ---------------------------------------------------------------------------------------


def main():
    claims = {name.removeprefix("claim_"): f for name, f in globals().items() if name.startswith("claim_")}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="gpu_claims.json")
    parser.add_argument("--one", choices=claims, help="run one claim in this process")
    parser.add_argument("claims", nargs="*", default=list(claims))
    args = parser.parse_args()
    if args.one:
        print("EVIDENCE " + json.dumps(claims[args.one](), default=str))
        return
    report = {"environment": {}, "claims": {}}
    for name in args.claims:
        start = time.time()
        try:
            # A crash shall say where it was; one at the end has its evidence all the same.
            process = subprocess.run([sys.executable, "-X", "faulthandler", __file__, "--one", name],
                                     capture_output=True, text=True, timeout=280)
            found = [line for line in process.stdout.splitlines() if line.startswith("EVIDENCE ")]
            entry = {"holds": process.returncode == 0 and bool(found)}
            if found:
                entry["evidence"] = json.loads(found[-1][9:])
            if not entry["holds"]:
                entry |= {"status": process.returncode, "error": process.stderr[-6000:]}
        except subprocess.TimeoutExpired:
            entry = {"holds": False, "error": "timed out"}
        except Exception:
            entry = {"holds": False, "error": traceback.format_exc()}
        report["claims"][name] = entry | {"seconds": round(time.time() - start, 1),
                                          "claim": (claims[name].__doc__ or "").strip()}
        print(name, "holds" if entry["holds"] else "FAILS", f"{time.time() - start:.1f}s",
              "" if entry["holds"] else entry["error"][-1500:], flush=True)
        pathlib.Path(args.out).write_text(json.dumps(report, indent=1))
    status, out, _ = child("import jax, jaxlib; print(jax.__version__, jax.devices()[0].device_kind)")
    from jax_deconv import _ffi
    report["environment"] = {"jax and device": out.strip(), "python": platform.python_version(),
                             "cudnn": str(_ffi.native.cudnn_version()) if _ffi.native else None,
                             "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    pathlib.Path(args.out).write_text(json.dumps(report, indent=1))
    sys.exit(not all(entry["holds"] for entry in report["claims"].values()))


if __name__ == "__main__":
    main()
