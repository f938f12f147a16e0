# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""The models of models.py in PyTorch, channels first in shape and channels last in memory (but in 1D)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


def dcgan(features):
    widths = [8 * features, 4 * features, 2 * features, features]
    layers = [nn.LazyConvTranspose2d(widths[0], 4, bias=False)]
    for before, after in zip(widths, [*widths[1:], 3]):
        layers += [nn.BatchNorm2d(before), nn.ReLU(True), nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False)]
    return nn.Sequential(*layers, nn.Tanh())


class UNetDecoder(nn.Module):
    def __init__(self, rank, widths):
        super().__init__()
        if rank == 2:
            up, conv, norm = nn.ConvTranspose2d, nn.Conv2d, lambda n: [nn.BatchNorm2d(n), nn.ReLU(True)]
        else:
            up, conv = nn.ConvTranspose3d, nn.Conv3d
            norm = lambda n: [nn.InstanceNorm3d(n, affine=True), nn.LeakyReLU(0.01, True)]
        pairs = list(zip(widths, widths[1:]))
        self.ups = nn.ModuleList([up(a, b, 2, 2) for a, b in pairs])
        self.blocks = nn.ModuleList([nn.Sequential(
            conv(2 * b, b, 3, padding=1, bias=False), *norm(b), conv(b, b, 3, padding=1, bias=False), *norm(b))
            for _, b in pairs])
        self.last = conv(widths[-1], 4, 1)

    def forward(self, x, *skips):
        for up, block, skip in zip(self.ups, self.blocks, skips):
            x = block(torch.cat([up(x), skip], 1))
        return self.last(x)


def same(before, after, kernel, dilation=1, bias=True):
    return nn.Conv1d(before, after, kernel, padding=dilation * (kernel - 1) // 2, dilation=dilation, bias=bias)


def up(before, after, rate):
    return nn.ConvTranspose1d(before, after, 2 * rate, rate, rate // 2)


class ResBlock(nn.Module):
    def __init__(self, width, kernel, dilations):
        super().__init__()
        self.first = nn.ModuleList([same(width, width, kernel, dilation) for dilation in dilations])
        self.second = nn.ModuleList([same(width, width, kernel) for _ in dilations])

    def forward(self, x):
        for first, second in zip(self.first, self.second):
            x = x + second(F.leaky_relu(first(F.leaky_relu(x, 0.1)), 0.1))
        return x


class HiFiGAN(nn.Module):
    def __init__(self, channels, rates, kernels, dilations):
        super().__init__()
        self.pre, self.post = nn.LazyConv1d(channels, 7, padding=3), same(channels >> len(rates), 1, 7)
        self.ups = nn.ModuleList([up(channels >> i, channels >> i + 1, rate) for i, rate in enumerate(rates)])
        self.blocks = nn.ModuleList([nn.ModuleList([ResBlock(channels >> i + 1, k, dilations) for k in kernels])
                                     for i in range(len(rates))])

    def forward(self, x):
        x = self.pre(x)
        for up, blocks in zip(self.ups, self.blocks):
            x = up(F.leaky_relu(x, 0.1))
            x = sum(block(x) for block in blocks) / len(blocks)
        return torch.tanh(self.post(F.leaky_relu(x)))


class SnakeBeta(nn.Module):
    def __init__(self, channels, filter):
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.zeros(channels, 1)), nn.Parameter(torch.zeros(channels, 1))
        self.register_buffer("filter", torch.tensor(filter).expand(channels, 1, -1))
        self.channels, self.edge = channels, len(filter) // 2 - 1

    def forward(self, x):
        x = F.pad(x, (self.edge, self.edge), "replicate")
        x = F.conv_transpose1d(x, 2 * self.filter, stride=2, groups=self.channels)
        x = x[..., 3 * self.edge:-3 * self.edge]
        x = x + (torch.sin(x * self.alpha.exp()) ** 2 / (self.beta.exp() + 1e-9)).to(x.dtype)
        x = F.pad(x, (self.edge, self.edge + 1), "replicate")
        return F.conv1d(x, self.filter, stride=2, groups=self.channels)


class BigVGAN(nn.Module):
    def __init__(self, channels, rates, filter):
        super().__init__()
        widths = [channels >> i for i in range(len(rates) + 1)]
        self.pre = nn.LazyConv1d(channels, 7, padding=3)
        self.ups = nn.ModuleList([up(a, b, rate) for a, b, rate in zip(widths, widths[1:], rates)])
        self.blocks = nn.ModuleList([nn.Sequential(SnakeBeta(n, filter), same(n, n, 3), SnakeBeta(n, filter),
                                                   same(n, n, 3)) for n in widths[1:]])
        self.post = nn.Sequential(SnakeBeta(widths[-1], filter), same(widths[-1], 1, 7, bias=False))

    def forward(self, x):
        x = self.pre(x)
        for up, block in zip(self.ups, self.blocks):
            x = up(x)
            x = x + block(x)
        return torch.tanh(self.post(x))


class RMSNorm(nn.RMSNorm):
    """With the weight in the input's type, without which the kernels are not fused."""

    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), 1e-6)


class DreamerV3Decoder(nn.Module):
    def __init__(self, widths):
        super().__init__()
        self.first = nn.LazyLinear(4 * 4 * widths[0])
        self.norms = nn.ModuleList([RMSNorm(width) for width in widths[:-1]])
        self.ups = nn.ModuleList([nn.ConvTranspose2d(a, b, 5, 2, 2, 1) for a, b in zip(widths, widths[1:])])

    def forward(self, x):
        x = self.first(x).view(len(x), 4, 4, -1)
        for norm, up in zip(self.norms, self.ups):
            x = up(F.silu(norm(x)).movedim(-1, 1)).movedim(1, -1)
        return torch.sigmoid(x).movedim(-1, 1)


CLASSES = {"dcgan": dcgan, "unet2d": UNetDecoder, "unet3d": UNetDecoder, "hifigan": HiFiGAN, "bigvgan": BigVGAN,
           "dreamerv3": DreamerV3Decoder}
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def train_step(case, device: str):
    """The model, and a function that takes one step of Adam on the mean squared error."""

    def random(shape, dtype):
        last = torch.randn(shape, device=device, dtype=dtype)
        first = last.movedim(-1, 1)  # for images that is channels_last already
        return first if len(shape) > 3 else first.contiguous()

    inputs = [random(shape, torch.bfloat16).requires_grad_(case.input_gradients) for shape in case.inputs]
    target = random(case.output, torch.float32)
    model = CLASSES[case.name](**case.settings).to(device)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        model(*inputs)  # gives lazy layers their shapes
    if format := FORMATS.get(len(case.output)):
        model = model.to(memory_format=format)
    optimiser = torch.optim.Adam(model.parameters(), 1e-3, fused=True)

    def step():
        optimiser.zero_grad()
        for tensor in inputs:
            tensor.grad = None
        with torch.autocast(device, torch.bfloat16):
            output = model(*inputs)
        assert output.shape == target.shape, (output.shape, target.shape)
        loss = F.mse_loss(output.float(), target)
        loss.backward()
        optimiser.step()
        return loss

    return model, step
