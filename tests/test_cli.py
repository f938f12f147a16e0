# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""python -m jax_deconv: explain, tune and bench, and what they are made of."""

from __future__ import annotations

import importlib.util
import json
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_deconv
from jax_deconv import _ffi, tuning
from jax_deconv.__main__ import main
from jax_deconv._bench import bench, layers, peers, report, timing
from jax_deconv._bench.layers import Layer
from jax_deconv.lowering.plan import Plan
from jax_deconv.policy import resolve

TINY = Layer("tiny", 1, 8, 4, (6, 5), (4, 4), (2, 2), (1, 1))
HAS_MATPLOTLIB, HAS_TORCH = (importlib.util.find_spec(name) is not None for name in ("matplotlib", "torch"))


def net(x, w):
    return jax_deconv.conv_transpose(x, w, (2, 2), "SAME")


def step():
    x, w = jnp.ones((1, 6, 5, 8)), jnp.ones((4, 4, 8, 4))
    return jax.value_and_grad(lambda w: net(x, w).sum())(w)


# --- explain ----------------------------------------------------------------------------------


def test_explain(capsys):
    assert main(["explain", f"{__name__}:net", "bfloat16[2,8,8,4]", "bfloat16[4,4,4,2]", "--platform", "cpu"]) == 0
    assert "x bfloat16 N2 G1 C2 K4 [16<-8 k4 s2 d1 p1]" in capsys.readouterr().out
    assert main(["explain", f"{__name__}:step", "--platform", "cpu"]) == 0
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[1:]] == [
        "transposed convolution", "filter gradient"]


@pytest.mark.parametrize("arguments, message", [
    (["explain", "net"], "expected module:function; got 'net'"),
    (["explain", f"{__name__}:nothing"], "nothing"),
    (["explain", "no_such_module:net"], "no_such_module"),
    (["explain", f"{__name__}:TINY"], "is no function"),
    (["explain", f"{__name__}:net", "float32(2,8)"], "expected a type and a shape, e.g. float32[8,16]; got "),
    (["explain", f"{__name__}:net", "number[2,8]"], "got 'number[2,8]'"),
    (["bench", "--input", "1,8,8,4"], "needs --input N,...,C, --kernel and --features"),
    (["bench", "--input", "1,8,8,4", "--kernel", "3", "--features", "4"], "kernel must have one number for each of"),
    (["tune", "--layers", "/no/such/file"], "/no/such/file"),
])
def test_bad_usage(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


# --- layers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [TINY, *layers.DEFAULT], ids=lambda layer: layer.id)
def test_layers_are_what_their_arguments_say(layer):
    shapes = (layer.batch, *layer.in_spatial, layer.in_channels), (
        *layer.kernel, layer.in_channels // layer.groups, layer.out_channels)
    out = jax.eval_shape(lambda x, w: jax_deconv.conv_transpose(x, w, **layer.kwargs()),
                         *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    assert out.shape == (layer.batch, *layer.out_spatial, layer.out_channels)
    assert layer.problem("x", "float32").shape() == (layer.batch, layer.out_channels, *layer.out_spatial)


def test_layer_files(tmp_path):
    path = tmp_path / "layers.json"
    path.write_text('[{"id": "tiny", "batch": 1, "in_channels": 8, "out_channels": 4, "in_spatial": [6, 5], '
                    '"kernel": [4, 4], "stride": [2, 2], "padding": [1, 1]}]')
    assert layers.read(path) == [TINY]
    assert str(Layer(**json.loads(path.read_text())[0] | {"activation": "leaky_relu(0.1)"}).activation_function) == (
        "leaky_relu(0.1)")
    path.write_text('[{"id": "b", "batch": 1, "size": 3}]')
    with pytest.raises(ValueError, match="layers.json: layer b: .*size"):
        layers.read(path)
    path.write_text("5")
    with pytest.raises(ValueError, match="layers.json: expected a list of layers; got 5"):
        layers.read(path)


@pytest.mark.parametrize("fields, message", [
    (dict(groups=3), "groups must divide in_channels and out_channels, 8 and 4; got 3"),
    (dict(stride=(2,)), r"stride must have one number for each of the 2 axes of in_spatial; got \[2\]"),
    (dict(stride=(2, 0)), r"stride must have integers >= 1; got \(2, 0\)"),
    (dict(padding=(-1, 0)), r"padding must have integers >= 0; got \(-1, 0\)"),
    (dict(bias=1), "bias must be true or false; got 1"),
    (dict(activation=None), "activation must be a string; got None"),
    (dict(activation="swish"), "activation must be .*; got 'swish'"),
    (dict(activation="swish(2)"), "name must be one of .*; got 'swish'"),
    (dict(batch=0.5), "batch must have integers >= 1; got 0.5"),
    (dict(padding=(9, 9)), r"must not be empty; got out_spatial=\[-4, -6\]"),
])
def test_bad_layers(fields, message):
    with pytest.raises(ValueError, match=message):
        Layer(**dict(id="bad", batch=1, in_channels=8, out_channels=4, in_spatial=(6, 5), kernel=(4, 4),
                     stride=(2, 2)) | fields)


# --- timing -----------------------------------------------------------------------------------


def test_kernels_side_by_side_count_once():
    events = [(0.0, 5.0), (3.0, 4.0), (100.0, 5.0), (105.0, 2.0), (200.0, 5.0), (200.0, 1.0)]
    assert timing.per_call(events, 3) == 7.0  # 0 to 7, 100 to 107, 200 to 205: the median
    assert timing.per_call([(0.0, 5.0), (50.0, 7.0), (90.0, 3.0)], 2) == 7.5  # which are whose is not known
    assert timing.per_call([], 2) is None


def test_wall_times_are_minima():
    naps = iter([0.02, 0.01, 0.03, *[0.02] * 100])
    calls = {"naps": lambda: time.sleep(next(naps)), "nothing": lambda: None, "slow": lambda: 1 / 0}
    times = timing.wall_times(calls, dict(naps=0.5, nothing=0.1, slow=2.0), seconds=0.2)
    assert 10_000 <= times["naps"] < 100_000 and times["nothing"] < times["naps"]
    assert times["slow"] == 2e6  # nobody waits for that twice


def test_floor():
    big = Layer("big", 64, 512, 512, (64, 64), (4, 4), (2, 2), (1, 1))
    operations = 2 * big.macs
    assert peers.floor_us(big, "bfloat16") == pytest.approx(operations / 790e6)
    assert peers.floor_us(big, "float32") == pytest.approx(operations / 395e6)
    with jax.default_matmul_precision("highest"):  # no TF32
        assert peers.floor_us(big, "float32") == pytest.approx(operations / 60e6)
    size = 6 * 5 * 8 + 4 * 4 * 8 * 4 + 12 * 10 * 4
    assert peers.floor_us(TINY, "float32") == pytest.approx(4 * size / 4.3e6)


def test_on_a_gpu_the_profiler_is_asked(monkeypatch):
    asked = []

    def kernel_times(folder):
        asked.append(folder)
        return {"bench_ours_x": [(100.0 * i, 2.0 + i % 3, "kernel") for i in range(30)]}

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing, "kernel_times", kernel_times)
    row = peers.jax_row(TINY, "float32", only=["ours"])
    assert len(asked) == 1 and row["kernels"]["ours/x"] == ["kernel"]
    assert 2.0 <= row["times"]["ours/x"] <= 90.0 and row["times"]["ours/y"] is None
    assert row["floor_us"] == peers.floor_us(TINY, "float32")


# --- tune -------------------------------------------------------------------------------------


def test_tuning_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(tuning, "local_device", lambda: None)
    assert main(["tune"]) == 1
    assert "needs an NVIDIA GPU" in capsys.readouterr().err


@pytest.fixture
def store(monkeypatch, tmp_path):
    """A GPU on which cuDNN takes ten times the floor, engine by role."""
    def timer(problem, policy, device, name, variant):
        timed.append(tuning.describe(problem, policy))
        return [(10 * tuning.cost.floor(problem, policy), Plan("cudnn", engine="xyw".index(problem.role)))]

    timed = []
    store = tuning.Store(tmp_path / "store" / "gpu.json", {"format": tuning.FORMAT})
    store.timed = timed
    monkeypatch.setattr(_ffi, "available", lambda compiler=False: None)
    monkeypatch.setattr(tuning, "_TIMERS", {"cudnn": timer})
    monkeypatch.setattr(tuning, "_predicted", lambda problem, policy, algorithms: [(1.0, "cudnn", "")])
    monkeypatch.setattr(tuning, "local_device", lambda: types.SimpleNamespace(local_hardware_id=0))
    monkeypatch.setattr(tuning, "_heuristic", lambda *_: None)
    monkeypatch.setattr(tuning.Store, "of", classmethod(lambda cls, device: store))
    return store


def test_tune_fills_the_store(store, tmp_path, capsys):
    options = ["--input", "1,6,5,8", "--kernel", "4,4", "--stride", "2,2", "--padding", "1,1", "--features", "4"]
    plot = tmp_path / "tune.png"
    assert main(["tune", *options, "--plot", str(plot)]) == 0
    keys = {tuning.describe(TINY.problem(role, dtype), resolve(None)): "xyw".index(role)
            for role in "xyw" for dtype in ("bfloat16", "float32")}
    assert sorted(store.timed) == sorted(keys)
    assert {key: entry["engine"] for key, entry in json.loads(store.path.read_text())["plans"].items()} == keys
    said = capsys.readouterr()
    assert said.out.count("timed") == 6 and str(store.path) in said.out and "6/6" in said.err
    assert plot.exists() == HAS_MATPLOTLIB
    # Again: nothing is left to time.
    assert main(["tune", *options, "--dtypes", "float32", "--plot", str(plot)]) == 0
    assert len(store.timed) == 6 and capsys.readouterr().out.count("stored") == 3


def test_tune_functions(store, tmp_path, capsys):
    assert main(["tune", f"{__name__}:step", "--plot", str(tmp_path / "tune.png")]) == 0
    assert [key[0] for key in store.timed] == ["x", "w"]  # and no built-in layer
    assert "2/2" in capsys.readouterr().err


# --- bench ------------------------------------------------------------------------------------


def test_bench(monkeypatch, tmp_path, capsys):
    """A layer in processes of their own, on the CPU."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    out = tmp_path / "sub" / "bench.json"
    assert main(["bench", "--input", "1,6,5,8", "--kernel", "4,4", "--stride", "2,2", "--padding", "1,1",
                 "--features", "4", "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    (row,) = written["rows"]
    ways = {"ours", "ours_flax", "adj"} | ({"torch_last", "torch_first"} if HAS_TORCH else set())
    assert set(row["times"]) == {f"{way}/{role}" for way in ways for role in "xyw"} | {"lax/x", "lax/w"}
    assert all(value > 0 for value in row["times"].values()) and not row["failed"]
    assert set(row["errors"]) == {"ours/x", "ours/y", "ours/w"} and max(row["errors"].values()) < 1e-5
    assert row["floor_us"] is None and written["environment"]["jax"] == jax.__version__
    means = written["summary"]
    assert means["forward: jax.lax / ours"] == pytest.approx(row["times"]["lax/x"] / row["times"]["ours/x"])
    assert out.with_suffix(".png").exists() == HAS_MATPLOTLIB
    said = capsys.readouterr()
    assert "filter gradient" in said.out and "1/1" in said.err


def row(**changes) -> dict:
    return {"id": "tiny", "klass": "", "dtype": "float32", "floor_us": 10.0, "compile_s": {}, "kernels": {},
            "times": {"ours/x": 20.0, "lax/x": 80.0, "torch_last/x": 40.0, "torch_first/x": 30.0},
            "errors": {"ours/x": 1e-6}, "failed": {}} | changes


@pytest.mark.parametrize("changes, message", [
    ({}, None),
    (dict(errors={"ours/x": 0.5}), "tiny float32: forward is 0.5 away from lax's"),
    (dict(errors={"ours/x": float("nan")}), "tiny float32: forward is nan away from lax's"),
    (dict(failed={"ours/w": "out of memory"}), "tiny float32: ours/w failed: out of memory"),
])
def test_bench_says_what_is_wrong(changes, message, monkeypatch, tmp_path, capsys):
    environment = dict(backend="gpu", device="a GPU", layers=[], dtypes=["float32"])
    ran = {"jax": (environment, [row(**changes)], False), "torch": ({}, [], False)}
    monkeypatch.setattr(bench, "_run", lambda who, order: ran[who])
    assert bench.bench([TINY], None, out=tmp_path / "bench.json") == (message is not None)
    said = capsys.readouterr()
    assert (message or "") in said.err
    assert "tiny   float32  forward             10    20       80       30" in said.out


def test_a_child_that_dies(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert bench.bench([TINY], ["no_such_type"], out=tmp_path / "bench.json") == 1
    assert json.loads((tmp_path / "bench.json").read_text())["rows"] == []
    assert "no_such_type" in capfd.readouterr().err


def test_summary_and_table():
    rows = [row(), row(times={"ours/x": 20.0, "lax/x": 20.0})]
    means = report.summary(rows)
    assert means == {"forward: jax.lax / ours": pytest.approx(2.0), "forward: PyTorch / ours": pytest.approx(1.5),
                     "forward: ours / floor": pytest.approx(2.0)}
    assert timing.geometric_mean([]) is None and np.isclose(timing.geometric_mean([1, None, 4]), 2)
    assert report.times_table(rows).splitlines()[0].split() == ["layer", "type", "role", "floor", "ours", "jax.lax",
                                                               "PyTorch"]
