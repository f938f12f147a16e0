# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Transposed convolutions by their sizes: of a file, or a handful of well-known ones.

Paddings and output paddings are in PyTorch's convention, which is jax_deconv's with
``use_consistent_padding=True``.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np

from jax_deconv import activations
from jax_deconv.activations import Activation
from jax_deconv.problem import Axis, ConvProblem, Geometry, Role


@dataclasses.dataclass(frozen=True)
class Layer:
    """One transposed convolution: lhs [N, *in_spatial, in_channels], kernel [*R, in / groups, out].

    Where nothing is said there is no padding, dilation or group.  `model`, `layer` and `source` say where it is from,
    `klass` what kind it is.  `bias` and `activation` are what the model has directly after it.
    """

    id: str
    batch: int
    in_channels: int
    out_channels: int
    in_spatial: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] = ()
    output_padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    bias: bool = False
    activation: str = ""
    klass: str = ""
    model: str = ""
    layer: str = ""
    source: str = ""

    def __post_init__(self):
        defaults = dict(kernel=None, stride=None, padding=0, output_padding=0, dilation=1)
        object.__setattr__(self, "in_spatial", tuple(self.in_spatial))
        for name, default in defaults.items():
            value = tuple(getattr(self, name)) or (default,) * self.rank
            object.__setattr__(self, name, value)
            if len(value) != self.rank or None in value:
                raise ValueError(f"{name} must have one number for each of the {self.rank} axes of in_spatial; "
                                 f"got {list(getattr(self, name))}")
        for name in ("batch", "in_channels", "out_channels", "groups", "in_spatial", *defaults):
            value, least = getattr(self, name), 0 if "padding" in name else 1
            if not all(isinstance(n, int) and n >= least for n in (value if isinstance(value, tuple) else (value,))):
                raise ValueError(f"{name} must have integers >= {least}; got {value!r}")
        if self.in_channels % self.groups or self.out_channels % self.groups:
            raise ValueError(f"groups must divide in_channels and out_channels, {self.in_channels} and "
                             f"{self.out_channels}; got {self.groups}")
        if min(self.out_spatial, default=1) < 1:
            raise ValueError(f"the result must not be empty; got out_spatial={list(self.out_spatial)}")
        if not isinstance(self.bias, bool):
            raise ValueError(f"bias must be true or false; got {self.bias!r}")
        _activation(self.activation)

    @property
    def rank(self) -> int:
        return len(self.in_spatial)

    @property
    def geometry(self) -> Geometry:
        return tuple(
            Axis(x_size=(n - 1) * s - 2 * p + (k - 1) * d + 1 + e, y_size=n, kernel=k, stride=s, dilation=d,
                 pad_lo=p)
            for n, k, s, p, e, d in zip(self.in_spatial, self.kernel, self.stride, self.padding,
                                        self.output_padding, self.dilation))

    @property
    def out_spatial(self) -> tuple[int, ...]:
        return tuple(axis.x_size for axis in self.geometry)

    @property
    def activation_function(self) -> Activation | None:
        """What `activation` names."""
        return _activation(self.activation)

    @property
    def macs(self) -> int:
        return self.problem(Role.X, "float32").macs

    def problem(self, role: Role, dtype) -> ConvProblem:
        """The layer as a problem of the package; role x is its forward pass."""
        return ConvProblem(role=role, N=self.batch, G=self.groups, C=self.out_channels // self.groups,
                           K=self.in_channels // self.groups, geometry=self.geometry,
                           dtype=np.dtype(dtype), out_dtype=np.dtype(dtype))

    def kwargs(self) -> dict:
        """The arguments of `jax_deconv.conv_transpose` after lhs and rhs."""
        return dict(strides=self.stride, padding=[(p, p) for p in self.padding], rhs_dilation=self.dilation,
                    dimension_numbers=dimension_numbers(self.rank), use_consistent_padding=True,
                    feature_group_count=self.groups, output_padding=self.output_padding)

    def inputs(self, dtype="float32", seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """lhs, kernel and a cotangent of the output, channels last, of unit scale."""
        random = np.random.default_rng(seed)
        shapes = ((self.batch, *self.in_spatial, self.in_channels),
                  (*self.kernel, self.in_channels // self.groups, self.out_channels),
                  (self.batch, *self.out_spatial, self.out_channels))
        return tuple(random.standard_normal(shape, np.float32).astype(dtype) for shape in shapes)

    def shrunk(self, macs: float = 0.3e9) -> Layer:
        """A smaller layer of the same kind: the batch halved down to 1, then space down to 4."""
        layer = self
        while layer.macs > macs:
            if layer.batch > 1:
                smaller = dataclasses.replace(layer, batch=layer.batch // 2)
            else:
                smaller = dataclasses.replace(
                    layer, in_spatial=tuple(min(n, max(4, n // 2)) for n in layer.in_spatial))
            if smaller == layer:
                break
            layer = smaller
        return layer


def _activation(text: str) -> Activation | None:
    """An activation from its name or, where it has parameters, from its `str`; None from nothing."""
    if not isinstance(text, str):
        raise ValueError(f"activation must be a string; got {text!r}")
    name, _, parameters = text.removesuffix(")").partition("(")
    if not parameters:
        return activations.resolve(name or None)
    return Activation(name, tuple(map(float, parameters.split(","))))


def dimension_numbers(rank: int) -> tuple[str, str, str]:
    """Channels-last layouts as Flax has them: NHWC, HWIO, NHWC."""
    space = "DHW"[3 - rank:]
    return f"N{space}C", f"{space}IO", f"N{space}C"


def read(path: str | pathlib.Path) -> list[Layer]:
    """The layers of a JSON file: a list of objects with the fields of `Layer`, as benchmarks/layers.json.

    Raises:
      ValueError: a row is not a layer.
    """
    layers = []
    rows = json.loads(pathlib.Path(path).read_text())
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a list of layers; got {rows!r:.100}")
    for number, row in enumerate(rows):
        try:
            layers.append(Layer(**row))
        except (TypeError, ValueError) as error:
            name = row.get("id", number) if isinstance(row, dict) else number
            raise ValueError(f"{path}: layer {name}: {error}") from error
    return layers


#: What is timed where nobody says what: the sizes of public models in training.
DEFAULT = (
    Layer("dcgan_g1", 64, 512, 256, (4, 4), (4, 4), (2, 2), (1, 1), model="DCGAN", klass="overlap"),
    Layer("unet2d_up1", 4, 1024, 512, (40, 59), (2, 2), (2, 2), model="U-Net 2D", klass="k_eq_s"),
    Layer("nnunet_t2", 2, 256, 128, (16, 16, 16), (2, 2, 2), (2, 2, 2), model="nnU-Net 3D", klass="k_eq_s"),
    Layer("hifigan_up1", 16, 256, 128, (256,), (16,), (8,), (4,), model="HiFi-GAN v1", klass="large_kernel"),
    Layer("pix2pix_out", 1, 128, 3, (128, 128), (4, 4), (2, 2), (1, 1), model="pix2pix", klass="thin_out"),
    Layer("dla_ida_f2", 16, 64, 64, (64, 64), (4, 4), (2, 2), (1, 1), groups=64, model="CenterNet DLA-34",
          klass="depthwise"),
)
