# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Super-resolution of photographs: a decoder of transposed convolutions, trained in a minute or two.

The network sees a picture at a quarter of its size and draws it at full size.  It is trained on crops
of photographs that come with scikit-image and then draws two that it has never seen.  Afterwards the
same model is timed with `flax.linen.ConvTranspose` in place of `jax_deconv.linen.ConvTranspose`.

    python examples/super_resolution.py --output super_resolution.png
"""

import argparse
import importlib.resources
import statistics
import sys
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from PIL import Image, ImageDraw, ImageFont

import jax_deconv.linen

SCALE, CROP, BATCH = 4, 24, 8  # CROP: side of a training crop of the small picture
TRAINING = ("chelsea.png", "rocket.jpg", "motorcycle_left.png", "motorcycle_right.png", "camera.png",
            "coins.png", "brick.png", "ihc.png")
HELD_OUT = {  # and what to show of it: left, top, size
    "astronaut.png": (160, 0, 160),
    "coffee.png": (300, 160, 200),
}


class Upscaler(nn.Module):
    """Small pictures ``[N, H, W, 3]`` to ``[N, 4H, 4W, 3]``: what bicubic interpolation lacks is learnt."""

    conv_transpose: type[nn.Module]
    width: int = 32

    @nn.compact
    def __call__(self, small):
        x = nn.Conv(self.width, (5, 5))(small - 0.5)
        for _ in range(2):
            x += nn.Conv(self.width, (3, 3))(nn.relu(nn.Conv(self.width, (3, 3))(nn.relu(x))))
        x = nn.relu(self.conv_transpose(self.width, (4, 4), (2, 2))(x))
        return bicubic(small) + self.conv_transpose(3, (6, 6), (2, 2))(x)


def bicubic(small):
    n, h, w, c = small.shape
    return jax.image.resize(small, (n, SCALE * h, SCALE * w, c), "cubic")


def shrink(pictures):
    n, h, w, c = pictures.shape
    return pictures.reshape(n, h // SCALE, SCALE, w // SCALE, SCALE, c).mean((2, 4))


def load(name):
    with importlib.resources.files("skimage.data").joinpath(name).open("rb") as file:
        picture = np.asarray(Image.open(file).convert("RGB"), np.float32) / 255
    h, w = (size // SCALE * SCALE for size in picture.shape[:2])
    return picture[:h, :w]


def crops(pictures, rng):
    """A batch of random crops, each mirrored and turned at random."""
    side, batch = CROP * SCALE, []
    for i in rng.integers(len(pictures), size=BATCH):
        picture = pictures[i]
        top, left = (rng.integers(size - side + 1) for size in picture.shape[:2])
        crop = picture[top:top + side, left:left + side]
        batch.append(np.rot90(crop[:, ::rng.choice([-1, 1])], rng.integers(4)))
    return np.stack(batch)


def psnr(picture, truth):
    return float(-10 * np.log10(np.mean((np.clip(picture, 0, 1) - truth) ** 2)))


def make_step(model, optimizer):
    @jax.jit
    def step(params, state, large):
        def loss(params):
            return jnp.abs(model.apply(params, shrink(large)) - large).mean()

        value, gradient = jax.value_and_grad(loss)(params)
        update, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, update), state, value

    return step


def report(text, last=False):
    """One line that is rewritten; where there is no terminal, a line each."""
    if sys.stdout.isatty():
        print(f"\r\033[K{text}", end="\n" if last else "", flush=True)
    else:
        print(text, flush=True)


def train(model, pictures, steps, rng):
    params = model.init(jax.random.key(0), jnp.zeros((1, CROP, CROP, 3)))
    optimizer = optax.adam(optax.warmup_cosine_decay_schedule(0, 2e-3, min(50, steps // 10), steps))
    state, step = optimizer.init(params), make_step(model, optimizer)
    start, shown, smooth = time.perf_counter(), 0.0, None
    for i in range(1, steps + 1):
        params, state, loss = step(params, state, crops(pictures, rng))
        smooth = float(loss) if smooth is None else 0.98 * smooth + 0.02 * float(loss)
        now = time.perf_counter() - start
        if now - shown > (0.2 if sys.stdout.isatty() else 10) or i == steps:
            bar = "#" * (24 * i // steps)
            report(f"training [{bar:24}] {i}/{steps} steps, mean error {255 * smooth:.2f}/255, "
                   f"{now:.0f} s, about {now / i * (steps - i):.0f} s left", last=i == steps)
            shown = now
    return params


def compare(params, pictures, seconds=15):
    """Median seconds of a training step with each layer, the two taking turns."""
    layers = {"jax_deconv": jax_deconv.linen.ConvTranspose, "lax (flax.linen)": nn.ConvTranspose}
    optimizer = optax.adam(1e-3)
    steps = {name: make_step(Upscaler(layer), optimizer) for name, layer in layers.items()}
    state, large = optimizer.init(params), jnp.asarray(crops(pictures, np.random.default_rng(1)))
    losses = {name: float(step(params, state, large)[2]) for name, step in steps.items()}  # compiles
    times = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["jax_deconv"]) < 5:
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step(params, state, large))
            times[name].append(time.perf_counter() - start)
    a, b = losses.values()
    assert abs(a - b) < 1e-4 * abs(b), f"the two models' losses differ: {losses}"
    return {name: statistics.median(values) for name, values in times.items()}, len(times["jax_deconv"])


def sheet(rows, panel=240):
    """Rows of (caption, picture) as one picture."""
    margin, text = 8, 22
    font = ImageFont.load_default(15)
    width, height = len(rows[0]) * (panel + margin), len(rows) * (panel + text + margin)
    image = Image.new("RGB", (width + margin, height + margin), "white")
    draw = ImageDraw.Draw(image)
    for i, row in enumerate(rows):
        for j, (caption, picture) in enumerate(row):
            left, top = margin + j * (panel + margin), margin + i * (panel + text + margin)
            pixels = Image.fromarray((np.clip(picture, 0, 1) * 255).round().astype(np.uint8))
            way = Image.Resampling.NEAREST if picture.shape[0] < 100 else Image.Resampling.LANCZOS
            image.paste(pixels.resize((panel, panel), way), (left, top + text))
            draw.text((left + panel // 2, top + text // 2), caption, "black", font, anchor="mm")
    return image


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--output", default="super_resolution.png")
    args = parser.parse_args()

    model = Upscaler(jax_deconv.linen.ConvTranspose)
    pictures = [load(name) for name in TRAINING]
    device = jax.devices()[0].device_kind
    print(f"{len(pictures)} photographs for training, {len(HELD_OUT)} held out; on {device}")
    params = train(model, pictures, args.steps, np.random.default_rng(0))

    rows, gains = [], []
    for name, (left, top, size) in HELD_OUT.items():
        truth = load(name)
        small = shrink(truth[None])
        plain, ours = (np.asarray(jax.jit(f)(small))[0] for f in (bicubic, lambda s: model.apply(params, s)))
        gains.append((name, psnr(plain, truth), psnr(ours, truth)))
        part = slice(top, top + size), slice(left, left + size)
        part_small = tuple(slice(s.start // SCALE, s.stop // SCALE) for s in part)
        rows.append([("input", small[0][part_small]), (f"bicubic, {gains[-1][1]:.2f} dB", plain[part]),
                     (f"jax_deconv, {gains[-1][2]:.2f} dB", ours[part]), ("truth", truth[part])])
    for name, plain, ours in gains:
        print(f"held-out {name}: PSNR {ours:.2f} dB, bicubic {plain:.2f} dB")
    sheet(rows).save(args.output, optimize=True)
    print(f"wrote {args.output}")

    report("timing a training step of the same model on lax ...")
    times, count = compare(params, pictures)
    for name, seconds in times.items():
        step = f"training step with {name:18} {1e3 * seconds:8.1f} ms"
        report(f"{step}  (median of {count}, taking turns)", last=True)
    ours, theirs = times.values()
    print(f"jax_deconv is {theirs / ours:.1f} times as fast")


if __name__ == "__main__":
    main()
