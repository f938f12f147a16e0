# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""The models of models.py in Flax, channels last.

`conv_transpose` is `flax.linen.ConvTranspose` or `jax_deconv.linen.ConvTranspose`; everything else, and the tree
of parameters, is the same with both.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import lax

from jax_deconv.linen import ConvTranspose

WAYS = {"flax": nn.ConvTranspose, "ours": ConvTranspose}


class DCGAN(nn.Module):
    conv_transpose: type
    dtype: jnp.dtype
    features: int

    @nn.compact
    def __call__(self, x):
        up = functools.partial(self.conv_transpose, kernel_size=(4, 4), use_bias=False, dtype=self.dtype)
        x = up(8 * self.features, padding="VALID")(x)
        for features in (4 * self.features, 2 * self.features, self.features, 3):
            x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
            x = up(features, strides=(2, 2))(x)
        return nn.tanh(x)


class UNetDecoder(nn.Module):
    """2D with batch norm and ReLU; 3D with instance norm and leaky ReLU, as nnU-Net has them."""

    conv_transpose: type
    dtype: jnp.dtype
    rank: int
    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x, *skips):
        two, three = (2,) * self.rank, (3,) * self.rank
        for features, skip in zip(self.widths[1:], skips):
            x = self.conv_transpose(features, two, strides=two, dtype=self.dtype)(x)
            x = jnp.concatenate([x, skip], axis=-1)
            for _ in range(2):
                x = nn.Conv(features, three, use_bias=False, dtype=self.dtype)(x)
                if self.rank == 2:
                    x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
                else:
                    x = nn.leaky_relu(nn.InstanceNorm(dtype=self.dtype)(x))
        return nn.Conv(4, (1,) * self.rank, dtype=self.dtype)(x)


class HiFiGAN(nn.Module):
    """Weight normalisation is left out."""

    conv_transpose: type
    dtype: jnp.dtype
    channels: int
    rates: tuple[int, ...]
    kernels: tuple[int, ...]
    dilations: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(nn.Conv, dtype=self.dtype)
        x = conv(self.channels, 7)(x)
        for i, rate in enumerate(self.rates, 1):
            width = self.channels >> i
            x = nn.leaky_relu(x, 0.1)
            x = self.conv_transpose(width, (2 * rate,), strides=(rate,), dtype=self.dtype)(x)
            branches = []
            for kernel in self.kernels:
                branch = x
                for dilation in self.dilations:
                    y = conv(width, kernel, kernel_dilation=dilation)(nn.leaky_relu(branch, 0.1))
                    branch += conv(width, kernel)(nn.leaky_relu(y, 0.1))
                branches.append(branch)
            x = sum(branches) / len(branches)
        return nn.tanh(conv(1, 7)(nn.leaky_relu(x)))


class SnakeBeta(nn.Module):
    """x + sin^2(a x) / b, at twice the sampling rate so that it does not alias."""

    conv_transpose: type
    dtype: jnp.dtype
    filter: tuple[float, ...]

    @nn.compact
    def __call__(self, x):
        channels, taps = x.shape[-1], len(self.filter)
        alpha, beta = (self.param(name, nn.initializers.zeros, (channels,)) for name in ("alpha", "beta"))
        kernel = jnp.broadcast_to(jnp.asarray(self.filter, self.dtype)[:, None, None], (taps, 1, channels))
        edge = taps // 2 - 1
        x = jnp.pad(x, [(0, 0), (edge, edge), (0, 0)], mode="edge")
        x = depthwise_up(self.conv_transpose, x, 2 * kernel)[:, 3 * edge:-3 * edge]
        x += (jnp.sin(x * jnp.exp(alpha)) ** 2 / (jnp.exp(beta) + 1e-9)).astype(self.dtype)
        x = jnp.pad(x, [(0, 0), (edge, edge + 1), (0, 0)], mode="edge")
        return lax.conv_general_dilated(x, kernel, (2,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"),
                                        feature_group_count=channels)


def depthwise_up(conv_transpose, x, kernel):
    """Twice as long, each channel with the fixed filter of its own; Flax's module has no groups, so lax there."""
    taps, _, channels = kernel.shape
    if conv_transpose is nn.ConvTranspose:
        return lax.conv_general_dilated(x, kernel, (1,), [(taps - 1, taps - 1)], lhs_dilation=(2,),
                                        dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=channels)
    layer = conv_transpose(channels, (taps,), strides=(2,), padding="VALID", use_bias=False, dtype=x.dtype,
                           feature_group_count=channels, parent=None)
    return layer.apply({"params": {"kernel": kernel}}, x)


class BigVGAN(nn.Module):
    """One residual block of one dilation after each transposed convolution, where BigVGAN has three of three."""

    conv_transpose: type
    dtype: jnp.dtype
    channels: int
    rates: tuple[int, ...]
    filter: tuple[float, ...]

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(nn.Conv, dtype=self.dtype)
        snake = functools.partial(SnakeBeta, self.conv_transpose, self.dtype, self.filter)
        x = conv(self.channels, 7)(x)
        for i, rate in enumerate(self.rates, 1):
            width = self.channels >> i
            x = self.conv_transpose(width, (2 * rate,), strides=(rate,), dtype=self.dtype)(x)
            x += conv(width, 3)(snake()(conv(width, 3)(snake()(x))))
        return nn.tanh(conv(1, 7, use_bias=False)(snake()(x)))


class DreamerV3Decoder(nn.Module):
    conv_transpose: type
    dtype: jnp.dtype
    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4 * 4 * self.widths[0], dtype=self.dtype)(x)
        x = x.reshape(-1, 4, 4, self.widths[0])
        for features in self.widths[1:]:
            x = nn.silu(nn.RMSNorm(dtype=self.dtype)(x))
            x = self.conv_transpose(features, (5, 5), strides=(2, 2), dtype=self.dtype)(x)
        return nn.sigmoid(x)


CLASSES = {"dcgan": DCGAN, "unet2d": UNetDecoder, "unet3d": UNetDecoder, "hifigan": HiFiGAN, "bigvgan": BigVGAN,
           "dreamerv3": DreamerV3Decoder}

OPTIMISER = optax.adam(1e-3)


def build(case, conv_transpose, dtype=jnp.bfloat16) -> nn.Module:
    return CLASSES[case.name](conv_transpose=conv_transpose, dtype=dtype, **case.settings)


def data(case, dtype=jnp.bfloat16):
    """The model's inputs, and what its output shall become."""
    *inputs, target = (jax.random.normal(jax.random.key(i), shape, dtype)
                       for i, shape in enumerate((*case.inputs, case.output)))
    return tuple(inputs), target.astype(jnp.float32)


def initial(model, inputs) -> tuple[dict, dict]:
    """Parameters, and the statistics of batch norm where the model has some."""
    statistics = dict(jax.jit(model.init)(jax.random.key(7), *inputs))
    return statistics.pop("params"), statistics


def train_step(case, model):
    """One step of Adam on the mean squared error.

    Decoders that train together with an encoder also give the gradients of their inputs.
    """

    def loss(params, inputs, statistics, target):
        output, statistics = model.apply({"params": params, **statistics}, *inputs, mutable=list(statistics))
        return jnp.mean((output.astype(jnp.float32) - target) ** 2), (output, statistics)

    def step(params, statistics, state, inputs, target):
        (value, (output, statistics)), (gradient, *rest) = jax.value_and_grad(
            loss, argnums=(0, 1) if case.input_gradients else (0,), has_aux=True)(params, inputs, statistics, target)
        updates, state = OPTIMISER.update(gradient, state)
        report = {"loss": value, "first_output": output[0], "input_gradients": rest}
        return optax.apply_updates(params, updates), statistics, state, report

    return step
