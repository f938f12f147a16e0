# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Which plan a problem gets on a GPU: what the store holds, else what timing finds, else models.

The store is one JSON file for each GPU model and cuDNN version, in `_cache.directory()`.  It may be read,
edited, copied to other machines of that kind and shared by processes: writes are atomic.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import json
import logging
import math
import pathlib
import re
import tempfile
from collections.abc import Sequence

import jax
from jax import lax

from jax_deconv import _ffi
from jax_deconv._cache import directory
from jax_deconv.lowering import cost, cudnn, dense, kernels, phase
from jax_deconv.lowering.plan import Plan
from jax_deconv.policy import Policy, workspace_bytes
from jax_deconv.problem import ConvProblem

_log = logging.getLogger(__name__)

FORMAT = 1
#: What timing cuDNN's plans for one problem may take.
TIME_BUDGET = 0.3  # seconds
CANDIDATES = 80
#: Variants of a kernel that are compiled and timed, and how long those that take longer to compile are waited for.
VARIANTS = 4
COMPILATION = 1.0  # seconds
#: TIME_BUDGET where plans are compiled first, each of which takes up to half a second.
COMPILING_TIME_BUDGET = 1.0
# The error that rounding alone explains, relative to float64 sums at sampled positions.
_TOLERANCE = {"float16": 2e-3, "bfloat16": 1.5e-2, "float32": 1e-3, "float64": 1e-9}


#: A plan this close to the floor ends the search.
_GOOD = 1.25
#: Times that differ by less are equal, and the least workspace decides.
_EQUAL = 1.02
#: An algorithm is timed where its model promises no more than this many times the best time so far.
_PROMISING = 1.4

#: Ways to make a problem another one that cuDNN computes.
TRANSFORMS = {"phase": phase, "dense": dense}
#: All that may compute a problem on a GPU but XLA.
ALGORITHMS = ("cudnn", *TRANSFORMS, *kernels.FAMILIES)
#: What is chosen unasked.  `dense` multiplies what lies in one group by zeros of another, where an infinity or a NaN
#: would cross over: from one member of a vmapped ensemble to the next, say.
UNASKED = tuple(name for name in ALGORITHMS if name != "dense")


@dataclasses.dataclass(frozen=True)
class Choice:
    """A plan, and why it.

    Args:
      plan: the plan.
      reason: "timed", "stored", "modelled", or why XLA computes it.
      microseconds: what it took when it was timed, or NaN.
    """

    plan: Plan
    reason: str
    microseconds: float = math.nan


def why_not(algorithm: str, problem: ConvProblem, policy: Policy) -> str | None:
    """Why an algorithm does not compute a problem on a GPU; None if it does."""
    if algorithm in kernels.FAMILIES:
        return kernels.why_not(algorithm, problem, policy)
    return TRANSFORMS.get(algorithm, cudnn).why_not(problem, policy)


def choose(problem: ConvProblem, policy: Policy, *, may_time: bool, algorithms: Sequence[str]) -> Choice:
    """The plan for a problem from algorithms that compute it."""
    device = local_device()
    # A choice that timing made on one machine need not be the one made on another, so it may decide
    # neither what must be repeatable nor what several processes must agree on.
    if device is not None and not policy.deterministic and jax.process_count() == 1 and policy.autotune != "off":
        store, key = Store.of(device), describe(problem, policy)
        choice = store.get(key)
        if (choice is not None and choice.plan.algorithm in algorithms
                and choice.plan.workspace <= workspace_bytes(policy)
                and _exists(problem, policy, device, choice.plan)):
            return choice
        if policy.autotune == "full" and may_time and (choice := _timed(problem, policy, device, algorithms)):
            store.put(key, choice)
            return choice
    return Choice(_modelled(problem, policy, device, algorithms), "modelled")


def _exists(problem: ConvProblem, policy: Policy, device, plan: Plan) -> bool:
    """Whether a plan is still one of its algorithm's: another version may have kept it."""
    if plan.algorithm in kernels.FAMILIES:
        return plan in kernels.plans(plan.algorithm, problem, policy, device)
    return plan.algorithm not in TRANSFORMS or plan.variant in TRANSFORMS[plan.algorithm].variants(problem)


def local_device() -> jax.Device | None:
    try:
        return jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return None


# ---- by time -------------------------------------------------------------------------------------------


def _timed(problem: ConvProblem, policy: Policy, device, algorithms: Sequence[str]) -> Choice | None:
    """The fastest plan whose values are right; None if that cannot be found out."""
    found: list[tuple[float, Plan]] = []
    ways = _predicted(problem, policy, algorithms)
    if problem.G == 1:  # while kernels are compiled cuDNN's plans are timed; of groups those are compiled, too
        for predicted, name, _ in ways:
            if name in kernels.FAMILIES and predicted <= _PROMISING * ways[0][0]:
                _compile(problem, policy, device, name)
        ways.sort(key=lambda way: way[1] in kernels.FAMILIES)
    for predicted, name, variant in ways:
        best = min(found)[0] if found else math.inf
        if best > _GOOD * cost.floor(problem, policy) and predicted <= _PROMISING * best:
            try:
                found += _TIMERS[name](problem, policy, device, name, variant)
            except Exception as error:  # out of memory, say: the program itself may still run
                _log.info("timing %s of %s failed: %s", name, describe(problem, policy), error)
    if not found:
        return None
    best = min(found)[0]
    microseconds, plan = min((item for item in found if item[0] <= _EQUAL * best),
                             key=lambda item: (item[1].workspace, item[0]))
    return Choice(plan, "timed", microseconds)


def _right(problem: ConvProblem, plans, results) -> list[tuple[float, Plan]]:
    return [(microseconds, plan) for plan, (microseconds, error) in zip(plans, results)
            if error <= _TOLERANCE[problem.out_dtype.name]]


def _time_cudnn(problem: ConvProblem, policy: Policy, device, *_) -> list[tuple[float, Plan]]:
    proposed = cudnn.candidates(problem, policy, device.local_hardware_id)
    plans, budget = [plan for plan, compiles in proposed if not compiles][:CANDIDATES], TIME_BUDGET
    if problem.G > 1 and (compiled := [plan for plan, compiles in proposed if compiles]):
        # The kernels that are compiled for a problem win among groups, by up to 2.4x; elsewhere they
        # do not earn what building them costs.
        plans, budget = compiled + plans, COMPILING_TIME_BUDGET
    return _right(problem, plans, cudnn.measure(problem, policy, plans, budget=budget, device=device)) if plans else []


def _time_kernels(problem: ConvProblem, policy: Policy, device, family: str, _) -> list[tuple[float, Plan]]:
    """Of the variants that are compiled in time, or else of the first that is."""
    loading = _compile(problem, policy, device, family)
    concurrent.futures.wait(loading, timeout=COMPILATION)
    ready, _ = concurrent.futures.wait(loading, return_when=concurrent.futures.FIRST_COMPLETED)
    plans = [plan for future, plan in loading.items() if future in ready and _compiled(future, plan)]
    return _right(problem, plans, kernels.measure(problem, policy, plans, device=device)) if plans else []


def _compile(problem: ConvProblem, policy: Policy, device, family: str) -> dict[concurrent.futures.Future, Plan]:
    """Starts the compilation of a family's variants, or joins it where it has been started."""
    plans = [plan for plan in kernels.plans(family, problem, policy, device)
             if plan.workspace <= workspace_bytes(policy)][:VARIANTS]
    executor = concurrent.futures.ThreadPoolExecutor(VARIANTS)
    loading = {executor.submit(kernels.load, problem, policy, plan, device.local_hardware_id): plan for plan in plans}
    executor.shutdown(wait=False)
    return loading


def _compiled(future, plan: Plan) -> bool:
    if (error := future.exception()) is not None:
        _log.warning("a kernel is left out, %s: %s", plan, error)
    return error is None


def _time_transform(problem: ConvProblem, policy: Policy, device, name: str, variant: str) -> list[tuple[float, Plan]]:
    """Of a transformed problem cuDNN's call is timed; XLA's passes around it are modelled."""
    del device
    transform, pinned = TRANSFORMS[name], dataclasses.replace(policy, algorithm="cudnn")
    choice = choose(transform.inner(problem, variant), pinned, may_time=True, algorithms=("cudnn",))
    if math.isnan(choice.microseconds):
        return []
    plan = dataclasses.replace(choice.plan, algorithm=name, variant=variant)
    return [(choice.microseconds + transform.overhead(problem, variant), plan)]


_TIMERS = {"cudnn": _time_cudnn, **dict.fromkeys(kernels.FAMILIES, _time_kernels),
           **dict.fromkeys(TRANSFORMS, _time_transform)}


# ---- by model ------------------------------------------------------------------------------------------


def _predicted(problem: ConvProblem, policy: Policy, algorithms: Sequence[str]) -> list[tuple[float, str, str]]:
    """What the models say of each algorithm and variant, the most promising first."""
    found = []
    for name in algorithms:
        if name in kernels.FAMILIES:
            found.append((cost.kernel(problem, policy), name, ""))
        elif name in TRANSFORMS:
            transform = TRANSFORMS[name]
            found += [(cost.cudnn(transform.inner(problem, variant), policy) + transform.overhead(problem, variant),
                       name, variant) for variant in transform.variants(problem)]
        else:
            found.append((cost.cudnn(problem, policy), name, ""))
    return sorted(found)


def _modelled(problem: ConvProblem, policy: Policy, device, algorithms: Sequence[str]) -> Plan:
    """The plan that the models favour."""
    for _, name, variant in _predicted(problem, policy, algorithms):
        if name in kernels.FAMILIES:
            plans = kernels.plans(name, problem, policy, device)
            plan = next((plan for plan in plans if plan.workspace <= workspace_bytes(policy)), None)
            if plan is not None:
                return plan
            continue
        inner = TRANSFORMS[name].inner(problem, variant) if name in TRANSFORMS else problem
        plan = _heuristic(inner, policy, device.local_hardware_id) if device is not None else None
        # Ahead of time the plan is found where the program runs.
        return dataclasses.replace(plan or cudnn.default_plan(policy), algorithm=name, variant=variant)
    return cudnn.default_plan(policy)


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
    if policy.algorithm is not None:
        words.append(policy.algorithm)
    if policy.workspace_limit is not None:
        words.append(f"workspace<={policy.workspace_limit}MiB")
    return " ".join(words)


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

    def get(self, key: str) -> Choice | None:
        entry = self._load().get(key)
        if entry is None:
            return None
        try:
            plan = Plan(str(entry["algorithm"]), str(entry.get("variant", "")), int(entry["engine"]),
                        tuple(map(int, entry["knobs"])), int(entry["workspace"]))
            return Choice(plan, "stored", float(entry.get("microseconds", math.nan)))
        except (KeyError, TypeError, ValueError, OverflowError):
            _log.warning("%s: the entry of %r is not a plan", self.path, key)
            return None

    def put(self, key: str, choice: Choice) -> None:
        entry = dataclasses.asdict(choice.plan) | {"knobs": list(choice.plan.knobs),
                                                   "microseconds": round(choice.microseconds, 2)}
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
                self._stamp = stamp  # also of a file that cannot be read: one warning is enough
                content = json.loads(self.path.read_text())
                self._plans = dict(content["plans"]) if content.get("format") == FORMAT else {}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            _log.warning("%s cannot be read: %s", self.path, error)
        return self._plans

    def _write(self, plans: dict) -> None:
        lines = ",\n".join(f"    {json.dumps(key)}: {json.dumps(entry)}" for key, entry in sorted(plans.items()))
        header = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in self._header.items())
        with tempfile.TemporaryDirectory(dir=self.path.parent) as folder:
            file = pathlib.Path(folder, self.path.name)
            file.write_text(f"{{\n{header}  \"plans\": {{\n{lines}\n  }}\n}}\n")
            file.chmod(0o644)
            file.replace(self.path)

    @contextlib.contextmanager
    def _locked(self):
        """One process at a time reads, adds and replaces."""
        with open(self.path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
