# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Which cuDNN plan a problem gets: what the store holds, else what timing finds, else heuristics.

The store is one JSON file for each GPU model and cuDNN version, in `directory()`.  It may be read,
edited, copied to other machines of that kind and shared by processes: writes are atomic.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import json
import logging
import os
import pathlib
import re
import tempfile

import jax
from jax import lax

from jax_deconv import _ffi
from jax_deconv.lowering import cudnn
from jax_deconv.lowering.plan import Plan
from jax_deconv.policy import Policy
from jax_deconv.problem import ConvProblem

_log = logging.getLogger(__name__)

FORMAT = 1
#: What timing one problem may take.
TIME_BUDGET = 0.25  # seconds
CANDIDATES = 32
#: The same where plans are compiled first, each of which takes up to half a second.
COMPILING_TIME_BUDGET = 1.0
# The error that rounding alone explains, relative to float64 sums at sampled positions.
_TOLERANCE = {"float16": 2e-3, "bfloat16": 1.5e-2, "float32": 1e-3, "float64": 1e-9}


def choose(problem: ConvProblem, policy: Policy, *, may_time: bool) -> Plan:
    """The plan for a problem that cuDNN takes."""
    device = local_device()
    if device is None:
        return cudnn.default_plan(policy)  # ahead of time: the plan is found where the program runs
    # A choice that timing made on one machine need not be the one made on another, so it may decide
    # neither what must be repeatable nor what several processes must agree on.
    measured = not policy.deterministic and jax.process_count() == 1
    if measured and policy.autotune != "off":
        store, key = Store.of(device), describe(problem, policy)
        if (plan := store.get(key)) is not None and plan.workspace <= cudnn.workspace_limit(policy):
            return plan
        if policy.autotune == "full" and may_time and (timed := _timed(problem, policy, device)) is not None:
            store.put(key, *timed)
            return timed[0]
    return _heuristic(problem, policy, device.local_hardware_id) or cudnn.default_plan(policy)


def local_device() -> jax.Device | None:
    try:
        return jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return None


def _timed(problem: ConvProblem, policy: Policy, device) -> tuple[Plan, float] | None:
    """The fastest plan whose values are right, and its microseconds; None if that cannot be found out."""
    try:
        proposed = cudnn.candidates(problem, policy, device.local_hardware_id)
        plans, budget = [plan for plan, compiles in proposed if not compiles][:CANDIDATES], TIME_BUDGET
        if problem.G > 1:
            # The kernels that are compiled for a problem win among groups, by up to 2.4x; elsewhere they
            # do not earn what building them costs.
            plans, budget = [plan for plan, compiles in proposed if compiles] + plans, COMPILING_TIME_BUDGET
        results = cudnn.measure(problem, policy, plans, budget=budget, device=device) if plans else []
    except Exception as error:  # out of memory, say: the program itself may still run
        _log.info("timing %s failed: %s", describe(problem, policy), error)
        return None
    right = [(microseconds, plan) for plan, (microseconds, error) in zip(plans, results)
             if error <= _TOLERANCE[problem.out_dtype.name]]
    if not right:
        return None
    microseconds, plan = min(right, key=lambda pair: pair[0])
    return plan, microseconds


@functools.lru_cache(maxsize=10_000)
def _heuristic(problem: ConvProblem, policy: Policy, device: int) -> Plan | None:
    """cuDNN's first proposal that is not known to be wrong."""
    try:
        proposed = cudnn.candidates(problem, policy, device)
    except Exception as error:
        _log.info("no heuristics for %s: %s", describe(problem, policy), error)
        return None
    plans = [plan for plan, compiles in proposed if not compiles] or [plan for plan, _ in proposed]
    return plans[0] if plans else None


# ---- the store -----------------------------------------------------------------------------------------


def describe(problem: ConvProblem, policy: Policy) -> str:
    """A problem in one line, with what of the policy bears on its plans: the key of the store.

    >>> import numpy as np, jax_deconv
    >>> from jax_deconv.problem import Axis, ConvProblem, Role
    >>> axis = Axis(x_size=64, y_size=32, kernel=4, stride=2, pad_lo=1)
    >>> problem = ConvProblem(Role.X, 8, 1, 128, 256, (axis, axis), np.dtype("float16"), np.dtype("float16"))
    >>> describe(problem, jax_deconv.Policy())
    'x float16 N8 G1 C128 K256 [64<-32 k4 s2 d1 p1] [64<-32 k4 s2 d1 p1]'
    """
    dtype = problem.dtype.name if problem.dtype == problem.out_dtype else f"{problem.dtype}->{problem.out_dtype}"
    words = [str(problem.role), dtype, *(f"{letter}{size}" for letter, size in problem.sizes.items()),
             *(f"[{a.x_size}<-{a.y_size} k{a.kernel} s{a.stride} d{a.dilation} p{a.pad_lo}]" for a in problem.geometry)]
    if problem.dtype.name == "float32" and policy.precision is lax.Precision.HIGHEST:
        words.append("strict")
    if policy.workspace_limit is not None:
        words.append(f"workspace<={policy.workspace_limit}MiB")
    return " ".join(words)


def directory() -> pathlib.Path:
    """JAX_DECONV_CACHE_DIR, else jax_deconv in the user's cache directory."""
    if (named := os.environ.get("JAX_DECONV_CACHE_DIR")):
        return pathlib.Path(named)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "jax_deconv"


class Store:
    """The plans of one GPU model and cuDNN version."""

    def __init__(self, path: pathlib.Path, header: dict):
        self.path, self._header = path, header
        self._stamp, self._plans = None, {}

    @classmethod
    def of(cls, device) -> Store:
        return cls._at(directory(), device.device_kind, _ffi.native.cudnn_version())

    @classmethod
    @functools.lru_cache(maxsize=16)
    def _at(cls, where: pathlib.Path, gpu: str, version) -> Store:
        name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{gpu} cudnn {version}").strip("-").lower()
        return cls(where / f"{name}.json", {"format": FORMAT, "gpu": gpu, "cudnn": str(version)})

    def get(self, key: str) -> Plan | None:
        entry = self._load().get(key)
        if entry is None:
            return None
        try:
            return Plan(entry["algorithm"], int(entry["engine"]), tuple(map(int, entry["knobs"])),
                        int(entry["workspace"]))
        except (KeyError, TypeError, ValueError):
            _log.warning("%s: the entry of %r is not a plan", self.path, key)
            return None

    def put(self, key: str, plan: Plan, microseconds: float) -> None:
        entry = dataclasses.asdict(plan) | {"knobs": list(plan.knobs), "microseconds": round(microseconds, 2)}
        self._plans[key] = entry  # so that it serves this process even where the file cannot be written
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._write(self._load(fresh=True) | {key: entry})
        except OSError as error:
            _log.info("%s cannot be written: %s", self.path, error)

    def _load(self, fresh: bool = False) -> dict:
        """The entries, read again when the file has changed."""
        try:
            stat = self.path.stat()
            stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if fresh or stamp != self._stamp:
                content = json.loads(self.path.read_text())
                self._plans = content["plans"] if content.get("format") == FORMAT else {}
                self._stamp = stamp
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, AttributeError) as error:
            _log.warning("%s cannot be read: %s", self.path, error)
            self._plans = {}
        return self._plans

    def _write(self, plans: dict) -> None:
        lines = ",\n".join(f"    {json.dumps(key)}: {json.dumps(entry)}" for key, entry in sorted(plans.items()))
        header = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in self._header.items())
        with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:
            file.write(f"{{\n{header}  \"plans\": {{\n{lines}\n  }}\n}}\n")
        os.chmod(file.name, 0o644)
        os.replace(file.name, self.path)

    @contextlib.contextmanager
    def _locked(self):
        """One process at a time reads, adds and replaces."""
        with open(self.path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
