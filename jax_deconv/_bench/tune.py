# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Fills the tuning store: for layers in all three roles, or for the convolutions of functions."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence

from jax_deconv import _ffi, tuning
from jax_deconv._bench import report
from jax_deconv._bench.layers import Layer
from jax_deconv.explain import Call, Explanation, explain
from jax_deconv.lowering import select
from jax_deconv.policy import Policy, resolve, use_policy
from jax_deconv.problem import ConvProblem, Role

#: What to tune, with the name that it has in the plot.
Named = tuple[str, ConvProblem, Policy]


def of_layers(layers: Sequence[Layer], dtypes: Sequence[str]) -> list[Named]:
    """Every role of every layer."""
    return [(layer.id, layer.problem(role, dtype), resolve(None))
            for layer in layers for dtype in dtypes for role in Role]


def of_functions(functions: Sequence[Callable]) -> list[Named]:
    """The convolutions of functions without arguments."""
    named = []
    for function in functions:
        with use_policy(Policy(autotune="off")):  # to know how many there are before the first is timed
            calls = explain(function, platform="cuda")()
        named += [(f"{function.__name__} {i}", call.problem, call.policy) for i, call in enumerate(calls)]
    return named


def why_not() -> str | None:
    """Why nothing can be timed here; None if it can."""
    return "JAX has none" if tuning.local_device() is None else _ffi.available()


def tune(named: Sequence[Named], plot: pathlib.Path | None = None) -> Explanation:
    """Times what the store does not hold, shows what was chosen, and draws the times over the floor."""
    def chosen() -> Iterator[Call]:
        for _, problem, policy in named:
            policy = dataclasses.replace(policy, autotune="full")
            choice = select.choose(problem, policy, platform="cuda", may_time=True)
            yield Call(problem, policy, "cuda", None, choice)

    calls = Explanation(report.track(chosen(), len(named), "tuning"))
    print(calls)
    print(f"kept in {tuning.Store.of(tuning.local_device()).path}")
    if plot is not None and calls:
        rows = {}
        for (name, problem, _), call in zip(named, calls):
            row = rows.setdefault((name, problem.dtype.name), {
                "id": name, "dtype": problem.dtype.name, "floor_us": call.floor, "times": {}})
            row["times"][f"ours/{problem.role}"] = call.microseconds
        print(report.plot(list(rows.values()), plot, "The fastest plan of each call over the hardware's floor"))
    return calls
