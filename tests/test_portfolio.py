# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""The algorithms of the GPU beside cuDNN's own: transformed problems, kernels, and the choice between them."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_deconv import Policy, _ffi, policy, tuning
from jax_deconv.lowering import cost, cudnn, dense, kernels, phase, select, xla
from jax_deconv.lowering.plan import Plan
from jax_deconv.problem import GIVEN, Axis, ConvProblem, Role

POLICY = policy.resolve(None)
NVRTC = importlib.util.find_spec("nvidia") is not None and _ffi.native is not None and not any(
    error for name, _, error in _ffi.native.status() if name.startswith("libnvrtc"))


def problems(seed: int, count: int, **fixed):
    pick = random.Random(seed)
    for _ in range(count):
        geometry = tuple(Axis(x_size=pick.randint(1, 9), y_size=pick.randint(1, 5), kernel=pick.randint(1, 5),
                              stride=pick.randint(1, 4), pad_lo=pick.randint(-2, 3))
                         for _ in range(pick.choice([1, 2, 2, 3])))
        sizes = dict(N=2, G=pick.choice([1, 2, 6]), C=pick.randint(1, 3), K=pick.randint(1, 3)) | fixed
        for role in Role:
            yield ConvProblem(role, geometry=geometry, dtype=np.dtype("float32"), out_dtype=np.dtype("float32"),
                              **sizes)


def check(problem: ConvProblem, function) -> None:
    rng = np.random.default_rng(0)
    operands = [jnp.asarray(rng.integers(-3, 4, problem.shape(r)), problem.dtype) for r in GIVEN[problem.role]]
    reference = {Role.X: oracle.conv_x, Role.Y: oracle.conv_y, Role.W: oracle.conv_w}[problem.role]
    want = reference(*map(np.asarray, operands), problem.geometry, problem.G)
    np.testing.assert_allclose(jax.jit(function)(*operands), want, rtol=1e-5, atol=1e-4)


@pytest.fixture
def cudnn_takes_all(monkeypatch):
    monkeypatch.setattr(cudnn, "why_not", lambda problem, policy: None)


@pytest.mark.parametrize("transform", [phase, dense], ids=["phase", "dense"])
def test_a_transformed_problem_has_the_same_values(transform, cudnn_takes_all):
    taken = 0
    for problem in problems(3, 8):
        if transform.why_not(problem, POLICY) is not None:
            continue
        for variant in transform.variants(problem):
            inner = []

            def compute(q):
                inner.append(q)
                return xla.build(q, POLICY, "cpu")

            check(problem, transform.build(problem, POLICY, Plan(variant=variant), compute))
            assert inner == [transform.inner(problem, variant)]
            assert transform.overhead(problem, variant) > 0
            taken += 1
    assert taken >= 6


def test_phase_leaves_no_stride_and_dense_fewer_groups(cudnn_takes_all):
    axis = Axis(x_size=64, y_size=32, kernel=4, stride=2, pad_lo=1)
    problem = ConvProblem(Role.X, 8, 64, 1, 1, (axis, axis), np.dtype("bfloat16"), np.dtype("bfloat16"))
    inner = phase.inner(problem)
    assert all(axis.stride == 1 for axis in inner.geometry) and inner.C == 4
    assert dense.variants(problem) == ["32", "64"]
    assert (dense.inner(problem, "32").G, dense.inner(problem, "32").C) == (2, 32)
    assert phase.why_not(inner, POLICY) and dense.why_not(dataclasses.replace(problem, G=1), POLICY)
    wide = dataclasses.replace(problem, G=2, C=128, K=256)
    assert "wide" in dense.why_not(wide, POLICY)


def test_policy_names_every_algorithm():
    for name in (*tuning.ALGORITHMS, "xla"):
        assert Policy(algorithm=name).algorithm == name
    assert set(policy._ALGORITHMS) == {*tuning.ALGORITHMS, "xla"}


def test_groups_are_merged_on_request_only(monkeypatch):
    """A NaN in one group would reach those that it is merged with."""
    asked = []
    monkeypatch.setattr(tuning, "why_not", lambda name, problem, policy: asked.append(name) or "it is a test")
    with pytest.warns(UserWarning, match="XLA computes"):
        select.build(DEPTHWISE, policy=POLICY, platform="cuda")
    assert set(asked) == set(tuning.ALGORITHMS) - {"dense"}
    asked.clear()
    with pytest.raises(ValueError, match="dense"):
        select.build(DEPTHWISE, policy=dataclasses.replace(POLICY, algorithm="dense"), platform="cuda")
    assert asked == ["dense"]


DEPTHWISE = ConvProblem(Role.X, 16, 64, 1, 1, (Axis(128, 64, 4, 2, 1, 1),) * 2, np.dtype("bfloat16"),
                        np.dtype("bfloat16"))
DENSE = ConvProblem(Role.X, 32, 1, 128, 256, (Axis(64, 32, 4, 2, 1, 1),) * 2, np.dtype("bfloat16"),
                    np.dtype("bfloat16"))


def test_models_prefer_what_measured_faster(cudnn_takes_all, monkeypatch):
    """Measured on an H200: kernels of ours for few channels, cuDNN where tiles of channels are full."""
    monkeypatch.setattr(_ffi, "available", lambda compiler=False: None)

    def favourite(problem):
        able = [name for name in tuning.ALGORITHMS if tuning.why_not(name, problem, POLICY) is None]
        return tuning.choose(problem, POLICY, may_time=False, algorithms=able).plan.algorithm

    assert favourite(DEPTHWISE) == "depthwise"
    assert favourite(DENSE) == "cudnn"
    assert favourite(dataclasses.replace(DENSE, C=1)) == "thin"
    assert cost.cudnn(DEPTHWISE, POLICY) > 10 * cost.floor(DEPTHWISE, POLICY)
    assert cost.floor(DENSE, POLICY) == pytest.approx(2 * DENSE.macs / 790e6)


@pytest.fixture
def store(monkeypatch, tmp_path):
    """A device, of which everything is known but what takes how long."""
    monkeypatch.setenv("JAX_DECONV_CACHE_DIR", str(tmp_path))
    store = tuning.Store(tmp_path / "gpu.json", {"format": tuning.FORMAT})
    monkeypatch.setattr(tuning.Store, "of", classmethod(lambda cls, device: store))
    monkeypatch.setattr(tuning, "local_device", lambda: "a device")
    return store


def test_the_fastest_of_the_promising_wins(store, monkeypatch):
    times = {"cudnn": 30.0, "phase": 20.0, "depthwise": math.inf}
    tried = []

    def timer(problem, policy, device, name, variant):
        tried.append(name)
        if name == "depthwise":
            raise RuntimeError("it fails")
        return [(times[name], Plan(name, variant=variant))]

    monkeypatch.setattr(tuning, "_TIMERS", dict.fromkeys(tuning.ALGORITHMS, timer))
    predicted = [(1.0, "depthwise", ""), (2.0, "cudnn", ""), (3.0, "phase", ""), (1000.0, "dense", "4")]
    monkeypatch.setattr(tuning, "_predicted",
                        lambda problem, policy, algorithms: [p for p in predicted if p[1] in algorithms])
    choice = tuning.choose(DEPTHWISE, POLICY, may_time=True, algorithms=tuning.ALGORITHMS)
    assert (choice.plan, choice.reason, choice.microseconds) == (Plan("phase"), "timed", 20.0)
    assert tried == ["depthwise", "cudnn", "phase"]  # and not what promises nothing
    again = tuning.choose(DEPTHWISE, POLICY, may_time=True, algorithms=tuning.ALGORITHMS)
    assert (again.plan, again.reason, again.microseconds) == (choice.plan, "stored", 20.0)
    assert tried == ["depthwise", "cudnn", "phase"]
    # What the policy does not allow is not taken from the store.
    pinned = dataclasses.replace(POLICY, algorithm="cudnn")
    assert tuning.choose(DEPTHWISE, pinned, may_time=True, algorithms=["cudnn"]).plan.algorithm == "cudnn"


def test_a_plan_at_the_floor_ends_the_search(store, monkeypatch):
    tried = []

    def timer(problem, policy, device, name, variant):
        tried.append(name)
        return [(cost.floor(problem, policy), Plan(name))]

    monkeypatch.setattr(tuning, "_TIMERS", dict.fromkeys(tuning.ALGORITHMS, timer))
    monkeypatch.setattr(tuning, "_predicted", lambda *_: [(1.0, "depthwise", ""), (2.0, "cudnn", "")])
    tuning.choose(DEPTHWISE, POLICY, may_time=True, algorithms=tuning.ALGORITHMS)
    assert tried == ["depthwise"]


def test_specifications_are_text():
    for family, problem in (("depthwise", DEPTHWISE),):
        for plan in kernels.plans(family, problem, POLICY):
            source, options, *launches = kernels.specification(
                kernels._kernel(problem, POLICY, plan), (("ACTIVATION(v)", "(v < 0.f ? 0.f : v)"),)).split("\n")
            assert source in _ffi.SOURCES.values()
            assert options.split()[-1] == "-DACTIVATION(v)=(v<0.f?0.f:v)" and all(
                word.startswith("-D") for word in options.split())
            assert launches and all(len(line.split()) == 8 for line in launches)


# Of each family a problem that it takes, in every role.
COMPILED = {
    "depthwise": DEPTHWISE,
    "gemm": ConvProblem(Role.X, 4, 1, 64, 128, (Axis(64, 32, 2, 2),) * 2, np.dtype("bfloat16"), np.dtype("bfloat16")),
    "thin": ConvProblem(Role.X, 4, 1, 3, 128, (Axis(64, 32, 4, 2, 1, 1),) * 2, np.dtype("bfloat16"),
                        np.dtype("bfloat16")),
}


@pytest.mark.skipif(not NVRTC, reason="NO KERNEL COMPILED: install nvidia-cuda-nvrtc")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", kernels.FAMILIES)
def test_kernels_compile_without_a_gpu(family, dtype, architecture):
    for role in Role:
        problem = dataclasses.replace(COMPILED[family], role=role, dtype=np.dtype(dtype), out_dtype=np.dtype(dtype))
        if kernels.FAMILIES[family].why_not(problem, POLICY) is not None:
            assert (family, role) == ("gemm", Role.W)
            continue
        hopper = type("Hopper", (), {"compute_capability": "9.0"})
        plans = kernels.plans(family, problem, POLICY, hopper if architecture == "sm_90" else None)
        for plan in {plan.variant.split()[0]: plan for plan in plans}.values():
            spec = kernels.specification(kernels._kernel(problem, POLICY, plan), (("BIAS", 1),))
            assert _ffi.native.compile_kernel(spec, architecture) > 1000


@pytest.mark.skipif(not NVRTC, reason="NO KERNEL COMPILED: install nvidia-cuda-nvrtc")
def test_what_does_not_compile_says_why():
    source = _ffi.SOURCES["depthwise.cu"]
    with pytest.raises(RuntimeError, match="nosuch|error"):
        _ffi.native.compile_kernel(f"{source}\n-DIN=nosuch\nf 1 1 1 1 1 1 0", "sm_90")
    with pytest.raises(RuntimeError, match="another version"):
        _ffi.native.compile_kernel("depthwise.cu@0\n\nf 1 1 1 1 1 1 0", "sm_90")
    with pytest.raises(RuntimeError, match="not a launch"):
        _ffi.native.compile_kernel(f"{source}\n\nf 1 1", "sm_90")


@pytest.mark.skipif(not NVRTC, reason="NO KERNEL COMPILED: install nvidia-cuda-nvrtc")
def test_machine_code_is_kept(tmp_path):
    plan = kernels.plans("depthwise", DEPTHWISE, POLICY)[0]
    spec = kernels.specification(kernels._kernel(DEPTHWISE, POLICY, plan))
    _ffi.native.set_kernel_cache(str(tmp_path))
    try:
        size = _ffi.native.compile_kernel(spec, "sm_90")
        (file,) = tmp_path.iterdir()
        content = file.read_bytes()
        file.write_bytes(content + b"1234")
        assert _ffi.native.compile_kernel(spec, "sm_90") == size + 4  # it came from there
        file.write_bytes(b"of something else")
        assert _ffi.native.compile_kernel(spec, "sm_90") == size
        assert file.read_bytes() == content
        assert _ffi.native.compile_kernel(spec, "sm_80") != 0 and len(list(tmp_path.iterdir())) == 2
    finally:
        _ffi.native.set_kernel_cache("")
