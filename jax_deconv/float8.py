# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Convolutions of float8 operands, each with a scale: both operands forward, and the cotangent backward.

A tensor t is ``float8 * scale`` with one scale for all of it, such that the largest magnitude becomes the largest that
float8 has.  What is larger than that is clipped.  The scale comes either from t itself ("current scaling"), or from
the largest magnitudes of the last steps ("delayed scaling", where t need not be read twice).  Those are kept in a
`State`, which is read and replaced in each step as Flax does it: **the gradient of the state is the next state**.

>>> import jax, jax.numpy as jnp
>>> from jax_deconv import float8
>>> x, w = jnp.ones((8, 16, 16, 64), jnp.bfloat16), jnp.ones((4, 4, 64, 32), jnp.bfloat16)
>>> def loss(w, state):
...     return float8.conv_transpose(x, w, (2, 2), "SAME", state=state).mean()
>>> state = float8.Recipe().state()
>>> gradient, state = jax.grad(loss, argnums=(0, 1))(w, state)
>>> gradient.dtype, float(state.kernel.amax_history[0])
(dtype(bfloat16), 1.0)

Products of float8 are exact in bfloat16 and are added up in float32: the algorithms are those of bfloat16.  What the
backward pass keeps of the operands is float8.  Derivatives are those of first order in reverse mode; rounding and
clipping count as the identity.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from jax_deconv import api, conventions, sharding
from jax_deconv.activations import Activation, compute_dtype
from jax_deconv.conventions import Placement, is_integer
from jax_deconv.lowering.epilogue import Epilogue
from jax_deconv.policy import Policy, resolve
from jax_deconv.problem import GIVEN, Role, is_storage, wider

__all__ = ["Recipe", "Scale", "State", "conv", "conv_transpose", "quantize"]

_TYPES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


class Scale(NamedTuple):
    """What is known of one tensor: its scale, and its largest magnitudes.

    Both are of float32, or of `flax.linen.fp8_ops.fm32`, of which JAX adds up gradients by taking the maximum: for a
    state that serves several calls of a step.
    """

    #: ``[1]``: the tensor is float8 times this.
    scale: jax.Array
    #: ``[amax_history_length]``: the largest magnitudes in the last steps, 0 where there was none; the newest comes
    #: first, then the others from the oldest on.
    amax_history: jax.Array


class State(NamedTuple):
    """What delayed scaling knows of the tensors of one layer."""

    input: Scale
    kernel: Scale
    output_grad: Scale


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Which float8 types tensors become, and how long scales remember.

    Args:
      forward: the type of input and kernel; float8_e4m3fn has 3 bits of mantissa and ends at 448.
      backward: the type of the cotangent of the result; float8_e5m2 has 2 bits and ends at 57344.
      amax_history_length: the number of steps whose largest magnitude decides on a scale; 0 for current scaling.

    Raises:
      ValueError: a type is no float8 with e4m3 or e5m2, or the length is no integer >= 0.

    Source of the convention: `flax.linen.fp8_ops` (Flax 0.12).

    >>> Recipe(amax_history_length=16).state().input.amax_history.shape
    (16,)
    """

    forward: jax.typing.DTypeLike = jnp.float8_e4m3fn
    backward: jax.typing.DTypeLike = jnp.float8_e5m2
    amax_history_length: int = 1024

    def __post_init__(self):
        for name in ("forward", "backward"):
            try:
                dtype = np.dtype(getattr(self, name))
            except TypeError:
                dtype = None
            if dtype is None or dtype.name not in _TYPES:
                raise ValueError(f"{name} must be one of {', '.join(_TYPES)}; got {getattr(self, name)!r}")
            object.__setattr__(self, name, dtype)
        if not is_integer(self.amax_history_length) or self.amax_history_length < 0:
            raise ValueError(f"amax_history_length must be an integer >= 0; got {self.amax_history_length!r}")

    def state(self) -> State | None:
        """Where training starts: scales of 1 and an empty history, as in Flax.  None for current scaling."""
        if self.amax_history_length == 0:
            return None
        return State(*(Scale(jnp.ones(1, jnp.float32), jnp.zeros(self.amax_history_length, jnp.float32))
                       for _ in State._fields))


def quantize(array: jax.Array, dtype, previous: Scale | None = None) -> tuple[jax.Array, jax.Array, Scale | None]:
    """An array as float8 times a scale.

    Args:
      array: of any shape and float type.
      dtype: the type to round to, to the nearest; what it does not reach is clipped.  NaN stays.
      previous: what is known of the array's predecessors; None takes the scale of the array itself.

    Returns:
      The values, of type `dtype` and the shape of `array`; the scale, one number of float32; and what to give as
      `previous` the next time, None if it is None now.  Infinite magnitudes are not remembered.

    >>> import jax.numpy as jnp
    >>> values, scale, _ = quantize(jnp.array([-7.0, 1.75]), jnp.float8_e4m3fn)
    >>> values.tolist(), float(scale)
    ([-448.0, 112.0], 0.015625)
    """
    limit = float(jnp.finfo(dtype).max)
    wide = array.astype(compute_dtype(array.dtype))
    if previous is None:
        known, scale = jnp.max(jnp.abs(wide), initial=0).astype(jnp.float32), jnp.float32(1)
    else:
        scale, history = (_convert(t, jnp.float32) for t in previous)
        known, scale = history.max(), scale.reshape(())
    # Not below what float32 has in full precision, so that its reciprocal is finite.
    scale = jnp.where((known > 0) & jnp.isfinite(known), jnp.maximum(known / limit, jnp.finfo(jnp.float32).tiny), scale)
    values = lax.clamp(jnp.asarray(-limit, wide.dtype), wide / scale.astype(wide.dtype),
                       jnp.asarray(limit, wide.dtype)).astype(dtype)
    if previous is None:
        return values, scale, None
    amax = _largest(wide, scale)
    # Inside a shard_map each device has a part; what is known of the whole is the same on all.
    if axes := jax.typeof(amax).manual_axis_type.varying - jax.typeof(scale).manual_axis_type.varying:
        amax = lax.pmax(amax, tuple(axes))
    history = jnp.roll(history, -1).at[0].set(jnp.where(jnp.isfinite(amax), amax, 0))
    return values, scale, Scale(*(_convert(t, old.dtype) for t, old in zip(
        (scale.reshape(previous.scale.shape), history), previous)))


@custom_vmap
def _largest(array, scale) -> jax.Array:
    """The largest magnitudes of an array, whose leading axes are those of `scale`.

    Under `vmap` over examples that share a scale it is that of all of them: JAX would add up what each one says.
    """
    return jnp.max(jnp.abs(array), tuple(range(scale.ndim, array.ndim)), initial=0).astype(jnp.float32)


@_largest.def_vmap
def _largest_of_mapped(size, mapped, array, scale):
    array_mapped, scale_mapped = mapped
    if not scale_mapped:
        return _largest(jnp.moveaxis(array, 0, scale.ndim), scale), False
    return _largest(array if array_mapped else jnp.broadcast_to(array, (size, *array.shape)), scale), True


def _convert(array, dtype):
    return array if array.dtype == dtype else lax.convert_element_type(array, dtype)


def conv_transpose(
    lhs: jax.Array, rhs: jax.Array, strides: Sequence[int], padding, rhs_dilation: Sequence[int] | None = None,
    dimension_numbers=None, transpose_kernel: bool = False, precision=None, preferred_element_type=None,
    use_consistent_padding: bool = False, *, recipe: Recipe = Recipe(), state: State | None = None,
    feature_group_count: int = 1, output_padding: Sequence[int] | None = None,
    output_shape: Sequence[int] | None = None, bias: jax.Array | None = None, residual: jax.Array | None = None,
    activation=None, policy: Policy | None = None,
) -> jax.Array:
    """`jax_deconv.conv_transpose` of operands that are rounded to float8, and so is the cotangent of the result.

    Args:
      lhs, rhs: of one float type of 16 bits or more, e.g. bfloat16.  They are rounded to float8 here.
      recipe: the types to round to.
      state: what is known of lhs (`input`), rhs (`kernel`) and the cotangent (`output_grad`), as `Recipe.state`
        makes it; its gradient is the next state.  None takes each scale from the tensor itself.
      others: as in `jax_deconv.conv_transpose`.  Neither bias nor residual is rounded to float8.

    Returns:
      ``activation(convolution + bias + residual)``, of the type of `lhs` or of `preferred_element_type`.

    Raises:
      ValueError, TypeError: as in `jax_deconv.conv_transpose`; the operands are float8 already, or no floats; `state`
        is not a `State` of arrays as `Recipe.state` makes them.

    >>> import jax.numpy as jnp
    >>> from jax_deconv import float8
    >>> x, w = jnp.ones((1, 8, 3)), jnp.ones((4, 3, 2))
    >>> float8.conv_transpose(x, w, (2,), "SAME", activation="relu").shape
    (1, 16, 2)
    """
    _check(recipe, state, lhs, rhs)
    placement = conventions.lax_conv_transpose(
        lhs.shape, rhs.shape, strides, padding, rhs_dilation, dimension_numbers, transpose_kernel,
        use_consistent_padding, feature_group_count=feature_group_count, output_padding=output_padding,
        output_shape=output_shape)
    return api.forward(Role.X, placement, lhs, rhs, bias=bias, residual=residual, activation=activation,
                       preferred_element_type=preferred_element_type, policy=resolve(policy, precision),
                       differentiable=functools.partial(_differentiable, recipe, state))


def conv(
    lhs: jax.Array, rhs: jax.Array, window_strides: Sequence[int], padding, rhs_dilation: Sequence[int] | None = None,
    dimension_numbers=None, precision=None, preferred_element_type=None, *, recipe: Recipe = Recipe(),
    state: State | None = None, feature_group_count: int = 1, bias: jax.Array | None = None,
    residual: jax.Array | None = None, activation=None, policy: Policy | None = None,
) -> jax.Array:
    """`jax_deconv.conv` of operands that are rounded to float8, and so is the cotangent of the result.

    Args:
      lhs, rhs, recipe, state: as in `conv_transpose`.
      others: as in `jax_deconv.conv`.

    Returns:
      ``activation(convolution + bias + residual)``, of the type of `lhs` or of `preferred_element_type`.

    Raises:
      ValueError, TypeError: as in `conv_transpose`.

    >>> import jax.numpy as jnp
    >>> from jax_deconv import float8
    >>> float8.conv(jnp.ones((1, 3, 8)), jnp.ones((2, 3, 4)), (2,), "SAME").shape
    (1, 2, 4)
    """
    _check(recipe, state, lhs, rhs)
    placement = conventions.lax_conv(lhs.shape, rhs.shape, window_strides, padding, rhs_dilation, dimension_numbers,
                                     feature_group_count=feature_group_count)
    return api.forward(Role.Y, placement, lhs, rhs, bias=bias, residual=residual, activation=activation,
                       preferred_element_type=preferred_element_type, policy=resolve(policy, precision),
                       differentiable=functools.partial(_differentiable, recipe, state))


def _check(recipe, state, lhs, rhs) -> None:
    api.check_arrays(lhs=lhs, rhs=rhs)
    if not jnp.issubdtype(lhs.dtype, jnp.floating) or is_storage(lhs.dtype):
        raise TypeError(f"lhs and rhs must have a float type of 16 bits or more, to be rounded here; got {lhs.dtype}")
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be a jax_deconv.float8.Recipe; got {recipe!r}")
    if state is None:
        return
    if not isinstance(state, State) or not all(isinstance(each, Scale) for each in state):
        raise TypeError(f"state must be None or a jax_deconv.float8.State of three Scales; got {state!r}")
    for of, each in zip(State._fields, state):
        for name, expected, fits in (("scale", "one element", lambda shape: shape in ((), (1,))),
                                     ("amax_history", "one axis", lambda shape: len(shape) == 1 and shape[0] > 0)):
            array = getattr(each, name)
            dtype = getattr(array, "dtype", None)
            if not fits(getattr(array, "shape", (0, 0))) or getattr(dtype, "float_dtype", dtype) != jnp.float32:
                raise TypeError(f"state.{of}.{name} must be an array of float32 with {expected}; got {array!r}")


def _sums(dtype) -> np.dtype:
    """The type in which sums leave a convolution: float16 ends where unscaled sums of float8 do not."""
    return np.dtype(dtype) if dtype == jnp.bfloat16 else wider(dtype, jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2, 3, 4, 5, 6))
def _differentiable(*arguments):
    return _forward(*arguments)[0]


def _forward(recipe: Recipe, state: State | None, role: Role, placement: Placement, dtype, policy: Policy,
             activation: Activation | None, a, b, bias, residual):
    known = state or (None, None, None)
    (qa, a_scale, input), (qb, b_scale, kernel) = (quantize(t, recipe.forward, s) for t, s in zip((a, b), known))
    out = api.compute(role, placement, _sums(dtype), policy, None, qa, qb)
    out = out.astype(compute_dtype(dtype)) * a_scale * b_scale
    fused = activation is None or activation.from_output
    epilogue = Epilogue(bias is not None, residual is not None, activation if fused else None)
    arrays = [*([] if bias is None else [bias]),
              *([] if residual is None else [placement.canonical(role, residual)])]
    saved = placement.restore(role, epilogue.apply(placement.canonical(role, out), *arrays, dtype=dtype))
    return saved if fused else activation(saved), (
        (qa, qb), (a_scale, b_scale), (input, kernel, known[2]), None if activation is None else saved,
        api.Types.of(a, b, bias, residual))


def _backward(recipe: Recipe, role: Role, placement: Placement, dtype, policy: Policy, activation: Activation | None,
              residuals, cotangent):
    operands, scales, (input, kernel, known), saved, types = residuals
    wide, bias, residual = api.pull_epilogue(role, placement, dtype, activation, saved, types, cotangent)
    q, q_scale, output_grad = quantize(wide, recipe.backward, known)

    def gradient(target: Role, like):
        given = dict(zip(GIVEN[role], zip(operands, scales)))
        del given[target]
        ((_, scale),) = given.values()
        given[role] = q, q_scale
        out = api.compute(target, placement, _sums(like.dtype), policy.backward or policy, None,
                          *(given[r][0] for r in GIVEN[target]))
        out = out.astype(compute_dtype(like.dtype)) * scale * q_scale
        return sharding.like(out.astype(like.dtype), like)

    state = None if known is None else State(input, kernel, output_grad)
    return state, *map(gradient, GIVEN[role], (types.lhs, types.rhs)), bias, residual


_differentiable.defvjp(_forward, _backward)
