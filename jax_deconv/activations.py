# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""The activations that a convolution can be fused with: a closed set, in one table.

Values, gradients and conventions at kinks are those of `jax.nn` (of `jax.lax.clamp` for `clipped`).

>>> import jax.numpy as jnp
>>> from jax_deconv import activations, conv_transpose
>>> x, w = jnp.ones((1, 4, 3)), jnp.ones((2, 3, 5))
>>> y = conv_transpose(x, w, (2,), "SAME", activation="relu")
>>> y = conv_transpose(x, w, (2,), "SAME", activation=activations.leaky_relu(0.2))
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_deconv.problem import wider


def compute_dtype(dtype) -> np.dtype:
    """The type to compute in what is then rounded, once, to `dtype`: float32 for narrow floats."""
    return wider(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else np.dtype(dtype)


def _clip(x, lo, hi):
    return lax.clamp(jnp.asarray(lo, x.dtype), x, jnp.asarray(hi, x.dtype))


@dataclasses.dataclass(frozen=True)
class _Definition:
    """A row of the table.

    `push(out, tangent, *parameters)` is the tangent of the result, from the result in the type that it has; None
    where the result does not tell the slope.  `cuda` is an expression in a float `v`, its parameters by number; NaN
    in, NaN out.
    """

    function: Callable
    push: Callable | None
    cuda: str
    integers: bool = False  # whether it makes integers of integers


def _wide(push: Callable) -> Callable:
    """The same of the result in the tangent's type: for slopes that are computed."""
    return lambda out, t, *parameters: push(out.astype(t.dtype), t, *parameters)


def _push_clipped(out, t, lo, hi):
    """What was clipped is a bound rounded to the result's type, or not rounded where XLA skips that."""
    with np.errstate(over="ignore"):
        rounded_lo, rounded_hi = (float(np.asarray(bound).astype(out.dtype)) for bound in (lo, hi))
    wide = out.astype(t.dtype)
    return jnp.where((wide > max(lo, rounded_lo)) & (wide < min(hi, rounded_hi)), t, 0)


_TABLE = {
    "relu": _Definition(
        jax.nn.relu, lambda out, t: jnp.where(out > 0, t, 0), "(v < 0.f ? 0.f : v)", integers=True),
    "relu6": _Definition(
        lambda x: _clip(x, 0, 6), lambda out, t: jnp.where((out > 0) & (out < 6), t, 0),
        "(v < 0.f ? 0.f : v > 6.f ? 6.f : v)", integers=True),
    "clipped": _Definition(_clip, _push_clipped, "(v < {0} ? {0} : v > {1} ? {1} : v)", integers=True),
    "leaky_relu": _Definition(
        jax.nn.leaky_relu, lambda out, t, slope: jnp.where(out >= 0, t, slope * t), "(v < 0.f ? {0} * v : v)"),
    "elu": _Definition(
        jax.nn.elu, _wide(lambda out, t, alpha: jnp.where(out > 0, 1, out + alpha) * t),
        "(v > 0.f ? v : {0} * expm1f(v))"),
    "tanh": _Definition(jnp.tanh, _wide(lambda out, t: (1 - out) * (1 + out) * t), "tanhf(v)"),
    "sigmoid": _Definition(jax.nn.sigmoid, _wide(lambda out, t: out * (1 - out) * t), "(1.f / (1.f + expf(-v)))"),
    "silu": _Definition(jax.nn.silu, None, "(v / (1.f + expf(-v)))"),
    "gelu": _Definition(
        jax.nn.gelu, None, "(.5f * v * (1.f + tanhf(.7978845608f * (v + .044715f * v * v * v))))"),
    "gelu_exact": _Definition(
        lambda x: jax.nn.gelu(x, approximate=False), None, "(.5f * v * erfcf(-.7071067812f * v))"),
}


@dataclasses.dataclass(frozen=True)
class Activation:
    """A member of the set, with its parameters: hashable, and a function of an array.

    Made by name (``activation="relu"``) or by a function of this module that takes its parameters.
    """

    name: str
    parameters: tuple[float, ...] = ()

    def __post_init__(self):
        if self.name not in tuple(_TABLE):
            raise ValueError(f"name must be one of {', '.join(_TABLE)}; got {self.name!r}")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Of its argument's type; narrow floats are rounded once."""
        x = jnp.asarray(x)
        return _TABLE[self.name].function(x.astype(compute_dtype(x.dtype)), *self.parameters).astype(x.dtype)

    @property
    def from_output(self) -> bool:
        """Whether the derivative is known from the result, so that nothing before it need be kept."""
        return _TABLE[self.name].push is not None

    def push(self, saved: jax.Array, tangent: jax.Array) -> jax.Array:
        """The tangent of the result; `saved` is the result where `from_output`, else what it is made of.

        Computed in the type of `tangent`.  Differentiable to any order and linear in `tangent`, of which reverse
        mode keeps `saved` alone.
        """
        return _push(self)(saved, tangent)

    @property
    def cuda(self) -> str:
        """A CUDA expression in a float `v`."""
        return _TABLE[self.name].cuda.format(*(f"{float(np.float32(p))!r}f" for p in self.parameters))

    def check(self, dtype) -> None:
        """Raises a TypeError where it does not make elements of this type of themselves."""
        if jnp.issubdtype(dtype, jnp.floating):
            limit = float(jnp.finfo(compute_dtype(dtype)).max)
            if not all(abs(p) <= limit for p in self.parameters):
                raise TypeError(f"activation {self} must have parameters that {compute_dtype(dtype)} can hold")
            return
        if not jnp.issubdtype(dtype, jnp.integer) or not _TABLE[self.name].integers:
            raise TypeError(f"activation {self} is not defined for a result of type {dtype}")
        limits = jnp.iinfo(dtype)
        bounds = (0, 6) if self.name == "relu6" else self.parameters
        if not all(float(b).is_integer() and limits.min <= b <= limits.max for b in bounds):
            raise TypeError(f"activation {self} must have bounds that a result of type {dtype} can hold")

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.parameters))})" if self.parameters else self.name


@functools.cache
def _push(activation: Activation) -> Callable:
    row = _TABLE[activation.name]

    def push(saved, tangent):
        if row.push is None:
            return jax.jvp(activation, (saved.astype(tangent.dtype),), (tangent,))[1]
        return row.push(saved, tangent, *activation.parameters)

    # Else reverse mode would keep the slope, too, which costs less to compute than to read.
    return jax.checkpoint(push, prevent_cse=False)


def leaky_relu(negative_slope: float = 0.01) -> Activation:
    """`jax.nn.leaky_relu` with a slope > 0, which keeps the sign.

    >>> str(leaky_relu(0.2))
    'leaky_relu(0.2)'
    """
    return Activation("leaky_relu", (_number("negative_slope", negative_slope, positive=True),))


def elu(alpha: float = 1.0) -> Activation:
    """`jax.nn.elu` with an alpha > 0.

    >>> str(elu())
    'elu(1.0)'
    """
    return Activation("elu", (_number("alpha", alpha, positive=True),))


def gelu(approximate: bool = True) -> Activation:
    """`jax.nn.gelu`: with tanh, or exact.

    >>> str(gelu(approximate=False))
    'gelu_exact'
    """
    return Activation("gelu" if approximate else "gelu_exact")


def clipped(lo: float, hi: float) -> Activation:
    """Values below `lo` become `lo`, values above `hi` become `hi`; both have no gradient, as in `jax.lax.clamp`.

    >>> clipped(-1, 1)(jnp.array([-3.0, 0.5, 2.0])).tolist()
    [-1.0, 0.5, 1.0]
    """
    lo, hi = _number("lo", lo), _number("hi", hi)
    if not lo < hi:
        raise ValueError(f"hi must be a number > lo; got lo={lo} and hi={hi}")
    return Activation("clipped", (lo, hi))


def _number(name: str, value, positive: bool = False) -> float:
    expected = f"a finite number{' > 0' if positive else ''}"
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be {expected}; got {value!r}")
    if not math.isfinite(value) or positive and value <= 0:
        raise ValueError(f"{name} must be {expected}; got {value!r}")
    return float(value)


#: What may be given by name alone.
NAMED = {name: Activation(name) for name in ("relu", "relu6", "tanh", "sigmoid", "silu", "gelu", "gelu_exact")}
NAMED |= {"leaky_relu": leaky_relu(), "elu": elu()}


def resolve(activation) -> Activation | Callable | None:
    """What a caller gives as `activation`: an Activation where it is of the set, else his function or None."""
    if isinstance(activation, str):
        if activation in NAMED:
            return NAMED[activation]
        raise ValueError(f"activation must be None, a function, one of {', '.join(sorted(NAMED))} or made by "
                         f"jax_deconv.activations (as clipped(lo, hi) is); got {activation!r}")
    if activation is None or callable(activation):
        return activation
    raise TypeError(f"activation must be None, a name, a function or an Activation; got {activation!r}")
