# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""The whole models that are benchmarked: what their numbers compare is the same computation."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def beside_each_other():
    """The scripts import each other as scripts do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield


NAMES = ("dcgan", "dreamerv3", "unet2d", "bigvgan", "unet3d", "hifigan")


@functools.cache
def start(name):
    """Parameters, and the statistics of batch norm."""
    import models
    import models_flax

    case = models.cases(tiny=True)[name]
    inputs, _ = models_flax.data(case, jnp.float32)
    return models_flax.initial(models_flax.build(case, models_flax.WAYS["flax"], jnp.float32), inputs)


@functools.cache
def first_step(name, conv_transpose):
    """What the script compares, in float32, and the gradients of the inputs."""
    import models
    import models_flax

    case, (params, statistics) = models.cases(tiny=True)[name], start(name)
    inputs, target = models_flax.data(case, jnp.float32)
    model = models_flax.build(case, conv_transpose, jnp.float32)
    state = models_flax.OPTIMISER.init(params)
    _, _, state, report = jax.jit(models_flax.train_step(case, model))(params, statistics, state, inputs, target)
    result = {"output": report["first_output"], "gradient": state[0].mu, "first_loss": float(report["loss"]),
              "last_loss": float(report["loss"])}
    return result, report["input_gradients"]


@pytest.mark.parametrize("name", ("dcgan", "bigvgan", "unet3d"))  # batch norm, groups, three dimensions
def test_both_classes_compute_the_same(name):
    import models
    import models_flax

    case = models.cases(tiny=True)[name]
    (ours, our_inputs), (flax, flax_inputs) = (first_step(name, models_flax.WAYS[way]) for way in ("ours", "flax"))
    assert ours["output"].shape == case.output[1:]
    assert len(jax.tree.leaves(our_inputs)) == case.input_gradients * len(case.inputs)
    # Gradients that normalisation makes zero are compared with the others' size.
    size = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(flax["gradient"]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * size),
                 ours["gradient"], flax["gradient"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * float(jnp.abs(b).max())),
                 our_inputs, flax_inputs)
    assert max(models.differences(ours, flax).values()) < 1e-4


def test_a_wrong_kernel_is_noticed():
    import models
    import models_flax

    class Flipped(models_flax.WAYS["ours"]):
        """The kernel the wrong way round, as the other convention would have it."""

        def param(self, name, *args):
            value = super().param(name, *args)
            return value[::-1, ::-1] if name == "kernel" else value

    Flipped.__name__ = "ConvTranspose"
    right, wrong = (first_step("dreamerv3", way)[0] for way in (models_flax.WAYS["flax"], Flipped))
    found = models.differences(wrong, right)
    assert found["output"] > models.TOLERANCE["output"]
    assert found["gradient"] > models.TOLERANCE["gradient"]


@pytest.mark.parametrize("name", NAMES)
def test_pytorch_has_the_same_model(name):
    torch = pytest.importorskip("torch")
    import models
    import models_torch

    case = models.cases(tiny=True)[name]
    model, step = models_torch.train_step(case, "cpu")
    params, _ = start(name)
    assert sum(p.numel() for p in model.parameters()) == sum(leaf.size for leaf in jax.tree.leaves(params))
    # Kernels have their axes in another order.
    assert (sorted(sorted(p.shape) for p in map(torch.squeeze, model.parameters()))
            == sorted(sorted(n for n in leaf.shape if n > 1) for leaf in jax.tree.leaves(params)))
    before = [p.detach().clone() for p in model.parameters()]
    assert torch.isfinite(step())
    assert all((old != new).any() for old, new in zip(before, model.parameters()))


def test_sizes_are_those_of_the_models():
    import models

    sizes = {case.name: (case.inputs[0], case.output) for case in models.cases().values()}
    assert sizes == {
        "dcgan": ((256, 1, 1, 100), (256, 64, 64, 3)),
        "dreamerv3": ((1024, 2048), (1024, 64, 64, 3)),
        "unet2d": ((16, 16, 16, 1024), (16, 256, 256, 4)),
        "unet3d": ((2, 4, 4, 4, 320), (2, 64, 64, 64, 4)),
        "bigvgan": ((4, 256, 100), (4, 65536, 1)),
        "hifigan": ((16, 32, 80), (16, 8192, 1)),
    }
    assert models.cases()["unet2d"].inputs[1:] == ((16, 32, 32, 512), (16, 64, 64, 256), (16, 128, 128, 128),
                                                   (16, 256, 256, 64))


def test_script(tmp_path):
    out = tmp_path / "models.json"
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS.parent), "JAX_PLATFORMS": "cpu",
                                "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [sys.executable, BENCHMARKS / "models.py", "--tiny", "--models", "dreamerv3", "--steps", "2"]
    process = subprocess.run([*command, "--out", out], env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    report = json.loads(out.read_text())
    (row,) = report["rows"]
    assert row["model"] == "dreamerv3" and not row["failed"]
    assert set(row["differences"]) == {"output", "gradient", "first_loss", "last_loss"}
    assert row["speedup"]["flax"] == row["times"]["flax"]["wall_us"] / row["times"]["ours"]["wall_us"]
    assert report["summary"]["flax"] == pytest.approx(row["speedup"]["flax"])
    assert report["environment"]["jax"] == jax.__version__
    assert "dreamerv3" in process.stdout and "geometric mean" in process.stdout


def test_report():
    import models

    def part(row_times, **environment):
        rows = [{"model": name, "times": times, "failed": {}} for name, times in row_times.items()]
        return {"environment": environment, "rows": rows}

    def device(**times):
        return {way: {"device_us": us, "wall_us": 1e9} for way, us in times.items()}

    parts = {"jax": part({"a": device(ours=10, flax=40), "b": device(ours=20, flax=20), "c": device(ours=10, flax=9),
                          "d": device(ours=10)}, clock="device"),
             "torch": part({"a": device(torch=20)}, torch="2")}
    report = models.assemble(parts, {})
    assert [row["speedup"] for row in report["rows"]] == [{"flax": 4, "torch": 2}, {"flax": 1}, {"flax": 0.9}, {}]
    assert report["summary"]["flax"] == pytest.approx(3.6 ** (1 / 3))
    assert report["summary"]["torch"] == pytest.approx(2)
    assert report["summary"]["slower_than_flax"] == ["c"]
    lines = models.times_table(report).splitlines()
    assert lines[1].split() == ["a", "10", "40", "20", "4", "2"]
    assert lines[4].split() == ["d", "10", "-", "-", "-", "-"]
    assert models.times_table(models.assemble({"torch": parts["torch"]}, {"jax": 1})).splitlines()[1].split()[0] == "a"


def test_no_model_is_started_out_of_time(tmp_path, capsys):
    import models

    report = models.Report(tmp_path / "report", -1)
    assert list(report.in_time(list(models.cases().values()))) == []
    assert "out of time before dcgan" in capsys.readouterr().out
    report = models.Report(tmp_path / "report", 100)
    assert [case.name for case in report.in_time(list(models.cases().values()))] == list(NAMES)
