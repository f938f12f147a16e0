# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""How long programs take: on a GPU the device's time, by JAX's profiler (CUPTI); elsewhere the wall's."""

from __future__ import annotations

import collections
import glob
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping

import jax


def environment() -> dict[str, str]:
    """That of a process whose programs are timed: kernels inside CUDA graphs do not name theirs."""
    return os.environ | {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="}


def kernel_times(folder: str) -> dict[str, list[tuple[float, float, str]]]:
    """By jitted function: (start, microseconds, name) of every kernel and copy on the device."""
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


def wall_times(calls: Mapping[str, Callable], first: Mapping[str, float], seconds: float = 1.0) -> dict[str, float]:
    """Microseconds of calls that wait for their result, whose first runs took so many seconds.

    They run in turn, round after round, so that noise is shared; the minimum counts.
    """
    best = {name: once for name, once in first.items() if once > 1}  # far from any bar: once is enough
    names, begin = [name for name in calls if name not in best], time.perf_counter()
    for number in range(30):
        if number and time.perf_counter() - begin > seconds:
            break
        for name in names:
            start = time.perf_counter()
            calls[name]()
            best[name] = min(best.get(name, math.inf), time.perf_counter() - start)
        names.reverse()  # each goes first now and then
    return {name: 1e6 * best[name] for name in calls}


def geometric_mean(values: Iterable[float | None]) -> float | None:
    values = [v for v in values if v]
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None
