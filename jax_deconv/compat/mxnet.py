# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""MXNet's Deconvolution.

Source of the convention: MXNet 1.9, ``mx.nd.Deconvolution``.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jax_deconv import api, conventions
from jax_deconv.policy import Policy, resolve
from jax_deconv.problem import Role

__all__ = ["deconvolution", "tuning_policy"]

Sizes = int | Sequence[int]


def tuning_policy(cudnn_tune: str | None = None, workspace: int = 512, cudnn_off: bool = False) -> Policy:
    """The policy that MXNet's settings of these names ask for.

    Args:
      cudnn_tune: ``'off'`` chooses by heuristics; ``'limited_workspace'`` times the algorithms that need at most
        `workspace`; ``'fastest'`` times all.  None leaves it open.
      workspace: in MiB; counts for ``'limited_workspace'`` alone.
      cudnn_off: True computes without cuDNN.

    Raises:
      ValueError: a value is none of these.

    >>> policy = tuning_policy("limited_workspace", 256)
    >>> policy.autotune, policy.workspace_limit
    ('full', 256)
    """
    tunes = {None: Policy(), "off": Policy(autotune="off"), "fastest": Policy(autotune="full"),
             "limited_workspace": Policy(autotune="full", workspace_limit=workspace)}
    if cudnn_tune not in tuple(tunes):
        raise ValueError(f"cudnn_tune must be one of {tuple(tunes)}; got {cudnn_tune!r}")
    return tunes[cudnn_tune].over(Policy(algorithm="xla") if cudnn_off else Policy())


def deconvolution(
    data: jax.Array, weight: jax.Array, bias: jax.Array | None = None, kernel: Sizes = (), stride: Sizes = (),
    dilate: Sizes = (), pad: Sizes = (), adj: Sizes = (), target_shape: Sizes = (), num_filter: int = 0,
    num_group: int = 1, workspace: int = 512, no_bias: bool = True, cudnn_tune: str | None = None,
    cudnn_off: bool = False, layout: str | None = None, *, policy: Policy | None = None,
) -> jax.Array:
    """MXNet's Deconvolution.

    Args:
      data: ``[N, C, *spatial]``, or as `layout` says; 1 to 3 spatial axes with a layout, else any number.
      weight: ``[C, num_filter / num_group, *kernel]``, or with channels last ``[C, *kernel, num_filter / num_group]``.
      bias: ``[num_filter]``, with ``no_bias=False``.
      kernel: the spatial shape of `weight`.
      stride, dilate: integers >= 1; default 1.
      pad: integers >= 0, cut from both ends of the result; default 0.
      adj: integers >= 0 less than the stride, that extend the high end; default 0.
      target_shape: the result's spatial sizes; `pad` and `adj` are then ignored.  All 0 is as none.
      num_filter: channels of the result.
      num_group: the number of groups into which the channels fall.
      workspace, cudnn_tune, cudnn_off: see `tuning_policy`.
      no_bias: whether there is no bias.
      layout: ``'NCW'``, ``'NWC'``, ``'NCHW'``, ``'NHWC'``, ``'NCDHW'``, ``'NDHWC'``; None has channels first.
      policy: a `jax_deconv.Policy`; where both speak, it rules over `cudnn_tune` and the like.

    Returns:
      The result in the layout of `data`.

    Raises:
      ValueError, TypeError: an argument is of the wrong kind or does not fit the others, `target_shape` exceeds the
        whole result, or nothing is left on a spatial axis.

    >>> import jax.numpy as jnp
    >>> data, weight = jnp.ones((8, 5, 5, 6)), jnp.ones((6, 4, 4, 2))
    >>> deconvolution(data, weight, kernel=(4, 4), stride=(2, 2), target_shape=(10, 9), num_filter=4, num_group=2,
    ...               layout="NHWC").shape
    (8, 10, 9, 4)
    """
    api.check_arrays(data=data, weight=weight)
    if bool(no_bias) is not (bias is None):
        raise ValueError("bias must be given with no_bias=False and left out with no_bias=True; got "
                         f"{'none' if bias is None else 'one'} and no_bias={no_bias!r}")
    placement = conventions.mxnet_deconvolution(
        data.shape, weight.shape, kernel, stride, dilate, pad, adj, target_shape, num_filter, num_group, layout)
    asked = tuning_policy(cudnn_tune, workspace, cudnn_off)
    policy = resolve(asked if policy is None else policy.over(asked))
    return api.forward(Role.X, placement, data, weight, bias=bias, policy=policy)
