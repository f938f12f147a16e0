# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""What was chosen for each convolution of a function, and why."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence

import jax

from jax_deconv import tuning
from jax_deconv.lowering import cost, kernels, select
from jax_deconv.lowering.epilogue import Epilogue
from jax_deconv.lowering.plan import Plan
from jax_deconv.policy import Policy
from jax_deconv.problem import ConvProblem, Role

#: What a role makes, whichever operation asks for it: of a transposed convolution the data gradient is a
#: convolution, and the other way round.
ROLES = {Role.X: "transposed convolution", Role.Y: "convolution", Role.W: "filter gradient"}


@dataclasses.dataclass(frozen=True)
class Call:
    """A convolution as it is lowered.

    Args:
      problem: what it computes.
      policy: what it was asked for, complete.
      platform: "cpu", "cuda" or None for any other.
      epilogue: bias, residual and activation inside the call; None where XLA fuses what follows.
      choice: the plan, the reason for it, and its time where that is known.
    """

    problem: ConvProblem
    policy: Policy
    platform: str | None
    epilogue: Epilogue | None
    choice: tuning.Choice

    @property
    def plan(self) -> Plan:
        return self.choice.plan

    @property
    def reason(self) -> str:
        """"stored", "timed", "modelled", or "XLA, because ..."."""
        return self.choice.reason

    @property
    def microseconds(self) -> float:
        """The time that was measured; NaN where nothing was."""
        return self.choice.microseconds

    @property
    def floor(self) -> float:
        """The least time in microseconds that a GPU takes; NaN elsewhere and where no rate is known."""
        known = self.platform == "cuda" and self.problem.dtype.name in cost.TYPES
        return cost.floor(self.problem, self.policy) if known else math.nan

    @property
    def what(self) -> str:
        """The role in words, and what follows in the same call."""
        words = [ROLES[self.problem.role]]
        if self.epilogue is not None:
            words += ["bias"] * self.epilogue.bias + ["residual"] * self.epilogue.residual
            words += [str(self.epilogue.activation)] * (self.epilogue.activation is not None)
        return " + ".join(words)

    @property
    def how(self) -> str:
        """Which of the algorithm's ways: XLA's form, a kernel, cuDNN's engine."""
        plan = self.plan
        if plan.algorithm == "xla" or plan.algorithm in kernels.FAMILIES:
            return plan.variant
        engine = "engine found when it runs" if plan.engine < 0 else f"engine {plan.engine}"
        return f"{plan.variant} groups in one, {engine}" if plan.algorithm == "dense" else engine


class Explanation(list):
    """Calls, in the order in which they were lowered; equal ones once.  Prints as a table."""

    def __str__(self) -> str:
        if not self:
            return "no convolution of jax_deconv"
        head = ("what", "problem", "algorithm", "how", "workspace", "floor us", "time us", "reason")
        return table([head, *((call.what, tuning.describe(call.problem, call.policy), call.plan.algorithm, call.how,
                               _bytes(call.plan.workspace), number(call.floor), number(call.microseconds), call.reason)
                              for call in self)])

    __repr__ = __str__


def explain(function: Callable, *, platform: str | None = None, **options) -> Callable[..., Explanation]:
    """What is chosen for each convolution of a function, and why.

    The function is lowered, neither compiled nor run; on a GPU that times problems that the tuning store does not
    hold, as compiling it would.  A program that is partitioned over devices is explained as one device would run it.

    Args:
      function: any function that `jax.jit` takes, jitted or not; `jax.grad` of one, too.
      platform: "cpu" or "cuda", which needs no such device: without one nothing is timed. By default JAX's own.
      **options: for `jax.jit`, e.g. ``static_argnames``.

    Returns:
      A function of the same arguments, or `jax.ShapeDtypeStruct` in their place, that returns a list of `Call`.
      Printed, it is a table.  Times are in microseconds of one device; the floor is that of `benchmarks/gpu.py`.

    Raises:
      ValueError, TypeError: `platform` is another one, or `function` is none.

    Example:

    >>> import jax, jax.numpy as jnp, jax_deconv
    >>> def loss(w, x):
    ...     return jax_deconv.conv_transpose(x, w, (2, 2), "SAME").sum()
    >>> w, x = jnp.ones((4, 4, 64, 32)), jnp.ones((8, 16, 16, 64))
    >>> calls = jax_deconv.explain(jax.value_and_grad(loss), platform="cpu")(w, x)
    >>> for call in calls:
    ...     print(f"{call.what} by {call.plan.algorithm}: {call.reason}")
    transposed convolution by xla: XLA, because the program is for cpu, not for cuda
    filter gradient by xla: XLA, because the program is for cpu, not for cuda
    """
    if platform not in (None, "cpu", "cuda"):
        raise ValueError(f'platform must be None, "cpu" or "cuda"; got {platform!r}')

    if not callable(function):
        raise TypeError(f"function must be callable; got {function!r}")

    @functools.wraps(function)
    def explained(*args, **kwargs) -> Explanation:
        calls: dict[tuple, Call] = {}

        @functools.wraps(function)
        def fresh(*args, **kwargs):  # JAX keeps what it lowered, by function
            return function(*args, **kwargs)

        def watcher(choice, **call):
            calls.setdefault(tuple(call.values()), Call(choice=choice, **call))

        token = select.watch.set(watcher)
        try:
            jax.jit(fresh, **options).trace(*args, **kwargs).lower(lowering_platforms=platform and (platform,))
        finally:
            select.watch.reset(token)
        return Explanation(calls.values())

    return explained


# ---- text ----------------------------------------------------------------------------------------------


def table(rows: Iterable[Sequence[str]]) -> str:
    """Rows of cells in columns; numbers on the right."""
    rows = [list(map(str, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    numeric = [all(_is_number(cell) for cell in column[1:]) for column in zip(*rows)]
    return "\n".join("  ".join(cell.rjust(width) if right else cell.ljust(width)
                               for cell, width, right in zip(row, widths, numeric)).rstrip() for row in rows)


def number(value: float | None) -> str:
    """Three digits, or a dash for what is not known."""
    return "-" if value is None or math.isnan(value) else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"-|[\d.]+(e[+-]\d+)?( MiB)?", cell) is not None


def _bytes(size: int) -> str:
    return "-" if not size else f"{size / 2**20:.3g} MiB"
