# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""What `explain` says of a function."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest

import jax_deconv
from jax_deconv import Policy, _ffi, tuning
from jax_deconv.explain import number, table
from jax_deconv.lowering import core, cost, forms, kernels, select, xla
from jax_deconv.lowering.plan import Plan

X, W = jax.ShapeDtypeStruct((2, 8, 8, 64), jnp.float32), jax.ShapeDtypeStruct((4, 4, 64, 32), jnp.float32)


def layer(x, w, **kwargs):
    return jax_deconv.conv_transpose(x, w, (2, 2), "SAME", **kwargs)


def loss(w, x):
    return (layer(x, w) ** 2).sum()


@pytest.fixture
def cuda(monkeypatch):
    """As on a machine whose GPU programs can use everything, but without a device."""
    monkeypatch.setattr(_ffi, "available", lambda compiler=False: None)
    monkeypatch.setattr(tuning, "local_device", lambda: None)


def test_a_call_on_the_cpu():
    (call,) = jax_deconv.explain(layer, platform="cpu")(X, W)
    assert (call.problem.role, call.what, call.plan.algorithm) == ("x", "transposed convolution", "xla")
    assert call.problem.shape() == (2, 32, 16, 16)
    # The form that it names is the one that is built.
    part = core.split(call.problem)
    assert getattr(forms, call.how) is xla.choose(part.problem, call.problem.dtype, "cpu")
    assert call.reason == "XLA, because the program is for cpu, not for cuda"
    assert math.isnan(call.floor) and math.isnan(call.microseconds)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jitted"])
def test_gradients_of_functions_that_ran_before(wrap):
    function = wrap(jax.value_and_grad(wrap(loss), (0, 1)))
    arrays = jnp.ones(W.shape), jnp.ones(X.shape)
    function(*arrays)
    for _ in range(2):  # JAX keeps what it lowered
        assert [call.problem.role for call in jax_deconv.explain(function, platform="cpu")(*arrays)] == ["x", "w", "y"]


def test_nothing_runs():
    huge = jax.ShapeDtypeStruct((2**20, 512, 512, 64), jnp.float32)
    assert len(jax_deconv.explain(layer, platform="cpu")(huge, W)) == 1


def test_equal_calls_are_listed_once():
    def function(x, w):
        return layer(x, w) + layer(x, w + 1) + layer(x, w, policy=Policy(precision="highest"))

    first, second = jax_deconv.explain(function, platform="cpu")(X, W)
    assert first.problem == second.problem and first.policy != second.policy


def test_what_follows_is_no_call_of_its_own():
    (call,) = jax_deconv.explain(layer, platform="cpu")(X, W, activation=None)
    options = dict(static_argnames="activation")
    (fused,) = jax_deconv.explain(layer, platform="cpu", **options)(X, W, activation="relu")
    assert fused == call or fused.problem == call.problem


def test_reasons_of_xla():
    (call,) = jax_deconv.explain(lambda x, w: layer(x, w, policy=Policy(algorithm="xla")))(X, W)
    assert call.reason == "XLA, because the policy says so"
    (call,) = jax_deconv.explain(layer)(jax.ShapeDtypeStruct((0, 8, 8, 64), jnp.float32), W)
    assert call.reason == "XLA, because there is nothing to compute" and call.how == ""


def test_ahead_of_time(cuda):
    (call,) = jax_deconv.explain(layer, platform="cuda")(X, W)
    assert (call.plan.algorithm, call.how, call.reason) == ("cudnn", "engine found when it runs", "modelled")
    assert call.plan.workspace > 0
    assert call.floor == cost.floor(call.problem, call.policy) == pytest.approx(call.problem.least_bytes / 4.3e6)
    integers = [jax.ShapeDtypeStruct(t.shape, jnp.int32) for t in (X, W)]
    (call,) = jax_deconv.explain(layer, platform="cuda")(*integers)
    assert call.plan.algorithm == "xla" and "int32" in call.reason and math.isnan(call.floor)


@pytest.mark.skipif(_ffi.native is None, reason=f"no native module: {_ffi.available()}")
def test_kernels_ahead_of_time(cuda):
    """Depthwise layers have kernels of ours, which take a bias and an activation, but no residual."""
    x, w = jax.ShapeDtypeStruct((4, 32, 32, 64), jnp.bfloat16), jax.ShapeDtypeStruct((4, 4, 1, 64), jnp.bfloat16)

    def depthwise(x, w, **kwargs):
        return layer(x, w, feature_group_count=64, activation="relu", bias=jnp.ones(64, x.dtype), **kwargs)

    (call,) = jax_deconv.explain(depthwise, platform="cuda")(x, w)
    assert call.plan.algorithm in kernels.FAMILIES and call.how == call.plan.variant
    assert call.what == "transposed convolution + bias + relu"
    residual = jax.ShapeDtypeStruct((4, 64, 64, 64), jnp.bfloat16)
    (call,) = jax_deconv.explain(depthwise, platform="cuda")(x, w, residual=residual)
    assert call.what == "transposed convolution"


def test_what_the_store_holds(cuda, monkeypatch, tmp_path):
    store = tuning.Store(tmp_path / "gpu.json", {"format": tuning.FORMAT})
    monkeypatch.setattr(tuning.Store, "of", classmethod(lambda cls, device: store))
    monkeypatch.setattr(tuning, "local_device", lambda: "a device")
    (call,) = jax_deconv.explain(layer, platform="cpu")(X, W)
    key = tuning.describe(call.problem, call.policy)
    store.put(key, tuning.Choice(Plan("cudnn", engine=7, workspace=3 << 20), "timed", 12.3))
    calls = jax_deconv.explain(layer, platform="cuda")(X, W)
    head, row = str(calls).splitlines()
    assert head.split() == ["what", "problem", "algorithm", "how", "workspace", "floor", "us", "time", "us", "reason"]
    floor = number(cost.floor(call.problem, call.policy))
    assert row.replace(key, "KEY").split("  ") != [row]
    assert [cell.strip() for cell in row.split("  ") if cell] == [
        "transposed convolution", key, "cudnn", "engine 7", "3 MiB", floor, "12.3", "stored"]


def test_the_choice_is_the_one_that_is_lowered(cuda, monkeypatch):
    seen = []
    build = select._planned
    monkeypatch.setattr(select, "_planned", lambda problem, policy, plan: seen.append(plan) or build(
        problem, policy, plan))
    calls = jax_deconv.explain(jax.value_and_grad(loss), platform="cuda")(W, X)
    assert [call.plan for call in calls] == seen and len(seen) == 2


def test_platform_is_checked():
    with pytest.raises(ValueError, match="platform must be None, \"cpu\" or \"cuda\"; got 'gpu'"):
        jax_deconv.explain(layer, platform="gpu")


def test_no_convolution():
    calls = jax_deconv.explain(jnp.sin)(1.0)
    assert calls == [] and str(calls) == repr(calls) == "no convolution of jax_deconv"


def test_tables():
    assert table([("name", "us"), ("long name", "1.5"), ("b", "-")]) == "name        us\nlong name  1.5\nb            -"
    assert [number(v) for v in (None, math.nan, 0.00123456, 12.345, 99.95, 123.4, 31415.9)] == [
        "-", "-", "0.00123", "12.3", "100", "123", "31416"]
