# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""What a traced function consists of."""

from __future__ import annotations

import collections

import jax
from jax.extend import core

from jax_deconv import primitives

ROLES = {primitives.conv_x_p: "x", primitives.conv_y_p: "y", primitives.conv_w_p: "w"}


def equations(jaxpr):
    """All equations, also those of inner jaxprs (jit, custom_vjp, scan, ...)."""
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(inner, (core.Jaxpr, core.ClosedJaxpr)):
                    yield from equations(inner)


def roles(function, *args) -> str:
    """The convolutions in a function, fused or not, as sorted letters: "x" is one transposed convolution."""
    return "".join(sorted(ROLES.get(e.primitive) or str(e.params["role"])
                          for e in equations(jax.make_jaxpr(function)(*args))
                          if e.primitive in (*ROLES, primitives.conv_fused_p)))


def primitive_counts(function, *args) -> collections.Counter:
    return collections.Counter(e.primitive.name for e in equations(jax.make_jaxpr(function)(*args)))
