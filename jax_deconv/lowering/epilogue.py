# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""What may follow a convolution in the same call: activation(conv + bias + residual)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jax import lax

from jax_deconv.activations import Activation, compute_dtype
from jax_deconv.problem import ConvProblem


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What follows.  The arrays that it takes come after the operands: first the bias, one number a channel of
    the result; then the residual, of the result's shape.
    """

    bias: bool = False
    residual: bool = False
    activation: Activation | None = None

    def split(self, arrays: Sequence) -> tuple:
        """The bias and the residual, None where there is none."""
        arrays = iter(arrays)
        return next(arrays) if self.bias else None, next(arrays) if self.residual else None

    def addends(self, result: Sequence) -> list:
        """For the bias and the residual that there are: what each has of a sequence with an item for each axis."""
        return [result[1:2]] * self.bias + [result] * self.residual

    def apply(self, out, *arrays, dtype):
        """The epilogue in JAX's operations; the result is of type `dtype`."""
        out = add(out, *self.split(arrays))
        if self.activation is not None:
            out = self.activation(out)
        return out.astype(dtype)

    def after(self, build: Callable, problem: ConvProblem, platform: str | None) -> Callable:
        """A function of the operands and the epilogue's arrays, for algorithms without an epilogue: XLA fuses this one.

        `build(problem)` makes the linear function of the operands.
        """
        # XLA:CPU adds in the wide type anyway; on a GPU a wide result would cost more than its rounding matters.
        sums = compute_dtype(problem.out_dtype) if platform == "cpu" else problem.out_dtype
        linear = build(dataclasses.replace(problem, out_dtype=sums))
        return lambda a, b, *arrays: self.apply(linear(a, b), *arrays, dtype=problem.out_dtype)


def add(out, bias, residual):
    """The sum in the compute type, channels first."""
    wide = compute_dtype(out.dtype)
    out = out.astype(wide)
    if bias is not None:
        out = out + lax.expand_dims(bias.astype(wide), (0, *range(2, out.ndim)))
    return out if residual is None else out + residual.astype(wide)
