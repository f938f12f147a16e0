# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""What XLA makes of the cuDNN calls on an H100, compiled ahead of time where there is no GPU.

JAX's CUDA plugin is enough for that: `pip install jax-cuda12-plugin jax-cuda12-pjrt`, in the versions of
JAX.  It needs no other package of NVIDIA's.
"""

import dataclasses
import functools
import importlib.util
import os
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_deconv import Policy, _ffi, activations, conv_transpose, float8
from jax_deconv.lowering import cudnn, select
from jax_deconv.lowering.epilogue import Epilogue
from jax_deconv.lowering.plan import Plan
from jax_deconv.policy import resolve
from jax_deconv.problem import GIVEN, Axis, ConvProblem, Role

PLUGIN = any(importlib.util.find_spec(f"jax_cuda{v}_plugin") for v in (12, 13))
pytestmark = [
    pytest.mark.usefixtures("optimized"),
    pytest.mark.skipif(not PLUGIN, reason="NOTHING COMPILED FOR A GPU: install jax-cuda12-plugin and "
                                          "jax-cuda12-pjrt"),
    pytest.mark.skipif(_ffi.native is None, reason=f"NOTHING COMPILED FOR A GPU: {_ffi.available()}"),
]

# The numbers of an H100 that XLA's passes ask for.
H100 = """
gpu_device_info {
  name: "NVIDIA H100 80GB HBM3"
  cuda_compute_capability { major: 9 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  memory_bandwidth: 3352320000000 device_memory_size: 84942979072 l2_cache_size: 52428800
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

POLICY = types.SimpleNamespace(precision=None, deterministic=False, workspace_limit=None)
STRICT = types.SimpleNamespace(precision=jax.lax.Precision.HIGHEST, deterministic=True, workspace_limit=1)


@functools.cache
def h100():
    from jax.experimental import topologies

    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    topology = topologies.get_topology_desc("h100", "cuda", target_config=H100, topology="1x1x1")
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def compiled(function, *shapes, dtype=jnp.bfloat16) -> str:
    """The optimized HLO."""
    specs = [jax.ShapeDtypeStruct(shape, dtype, sharding=h100()) for shape in shapes]
    return jax.jit(function).lower(*specs).compile().as_text()


def problem(role, rank=2, G=1, dtype=jnp.bfloat16, **axis) -> ConvProblem:
    geometry = (Axis(**{**dict(x_size=32, y_size=16, kernel=4, stride=2, pad_lo=1), **axis}),) * rank
    return ConvProblem(role, N=8, G=G, C=32, K=64, geometry=geometry, dtype=np.dtype(dtype),
                       out_dtype=np.dtype(dtype))


def operations(hlo: str) -> list[str]:
    """The opcode of every instruction, fused ones too."""
    return re.findall(r"^\s*(?:ROOT )?%?[\w.-]+ = (?:\([^=]*?\)|\S+) ([\w-]+)\(", hlo, re.M)


def targets(hlo: str) -> list[str]:
    return sorted(re.findall(r'custom_call_target="([^"]*)"', hlo))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("role", list(Role))
def test_one_call_per_role(role, rank, dtype):
    p = problem(role, rank, dtype=dtype)
    assert cudnn.why_not(p, POLICY) is None
    hlo = compiled(cudnn.build(p, POLICY), *map(p.shape, GIVEN[role]), dtype=dtype)
    assert targets(hlo) == [f"jax_deconv_{role}"]
    # No zeros between the elements of the input, and nothing for XLA to convolve.
    assert not {"convolution", "pad", "dot"} & set(operations(hlo))
    # The channels are innermost, those of the kernel too.
    call = next(line for line in hlo.splitlines() if "custom-call(" in line)
    channels_last = "{" + ",".join(map(str, (1, *reversed(range(2, 2 + rank)), 0))) + "}"
    constraints = re.search(r"operand_layout_constraints=\{(.*?\}), (.*?\})\}", call).groups()
    assert [c[c.index("]") + 1:] for c in constraints] == [channels_last] * 2, call
    assert f"{channels_last}, u8[" in call.partition(" custom-call(")[0], call


def test_groups_dilation_and_precision_reach_the_call():
    p = problem(Role.Y, G=2, dtype=jnp.float32, kernel=3, dilation=2, x_size=33, y_size=16)
    hlo = compiled(cudnn.build(p, STRICT), *map(p.shape, GIVEN[p.role]), dtype=jnp.float32)
    for attribute in ("groups = 2", "dilation = dense<2>", "tf32 = false", "deterministic = true",
                      "engine = -1"):
        assert attribute in hlo
    assert f"u8[{1 << 20}]" in hlo


def test_a_plan_reaches_the_call():
    p = problem(Role.Y)
    hlo = compiled(cudnn.build(p, POLICY, Plan(engine=7, knobs=(2, 5))), *map(p.shape, GIVEN[p.role]))
    for attribute in ("engine = 7", "knobs = dense<[2, 5]>", "u8[0]"):
        assert attribute in hlo


def test_channels_last_code_moves_nothing():
    """A forward pass and both gradients, with an activation, between NHWC arrays: no copy, no transpose."""
    x, y, w = (problem(role) for role in (Role.X, Role.Y, Role.W))

    def step(given, kernel):
        given, kernel = jnp.moveaxis(given, -1, 1), jnp.moveaxis(kernel, -1, 1)
        out = jax.nn.relu(cudnn.build(x, POLICY)(given, kernel))
        made = out, cudnn.build(y, POLICY)(out, kernel), cudnn.build(w, POLICY)(out, given)
        return [jnp.moveaxis(array, 1, -1) for array in made]

    shapes = [(s[0], *s[2:], s[1]) for s in map(x.shape, GIVEN[Role.X])]
    hlo = compiled(step, *shapes)
    assert targets(hlo) == ["jax_deconv_w", "jax_deconv_x", "jax_deconv_y"]
    assert not {"copy", "transpose"} & set(operations(hlo)), hlo


def test_channels_first_code_moves_nothing_between_layers():
    """NCHW at the boundary, channels last inside: copies of what comes in and goes out, no others."""
    x = problem(Role.X)
    deeper = ConvProblem(Role.X, 8, 1, 16, 32, (Axis(64, 32, 4, 2, 1, 1),) * 2, x.dtype, x.dtype)

    def step(given, first, second):
        return cudnn.build(deeper, POLICY)(jax.nn.relu(cudnn.build(x, POLICY)(given, first)), second)

    hlo = compiled(step, *map(x.shape, GIVEN[Role.X]), deeper.shape(Role.W))
    assert targets(hlo) == ["jax_deconv_x"] * 2
    assert len([op for op in operations(hlo) if op in ("copy", "transpose")]) <= 4, hlo


@pytest.mark.parametrize("role", list(Role))
def test_wider_results(role):
    """float32 of bfloat16: the call is all float32, and TF32 does even where it is forbidden otherwise."""
    p = dataclasses.replace(problem(role), out_dtype=np.dtype(np.float32))
    hlo = compiled(cudnn.build(p, STRICT), *map(p.shape, GIVEN[role]))
    assert targets(hlo) == [f"jax_deconv_{role}"] and "tf32 = true" in hlo
    assert "(f32[" in next(line for line in hlo.splitlines() if "custom-call(" in line)


def test_huge_filter_gradients_are_sums():
    """More than 2**31 elements: parts of the batch, as few as do, and the sum in float32."""
    p = dataclasses.replace(problem(Role.W), N=9, geometry=(Axis(4096, 2048, 4, 2, 1, 1),) * 2)
    hlo = compiled(cudnn.build(p, POLICY), *map(p.shape, GIVEN[p.role]))
    assert targets(hlo) == ["jax_deconv_w"] * 3


@pytest.mark.parametrize("pad_lo", [-2, 5])
def test_odd_paddings_are_cut_off(pad_lo):
    """What cuDNN's paddings cannot say: zeros around the result, but none inside."""
    p = problem(Role.X, pad_lo=pad_lo)
    hlo = compiled(cudnn.build(p, POLICY), *map(p.shape, GIVEN[p.role]))
    assert targets(hlo) == ["jax_deconv_x"]
    assert not re.search(r"padding=\d+_\d+_[1-9]", hlo)
    assert "convolution" not in operations(hlo)


def test_kernels_of_ours_are_one_call_too():
    """A depthwise layer: the call names its source, and what it needs is compiled where it runs."""
    p = dataclasses.replace(problem(Role.X), G=64, C=1, K=1)
    policy = resolve(None)
    hlo = compiled(select.build(p, policy=policy, platform="cuda"), *map(p.shape, GIVEN[p.role]))
    assert targets(hlo) == ["jax_deconv_kernel"]
    assert _ffi.SOURCES["depthwise.cu"] in hlo and "convolution" not in operations(hlo)


def test_an_epilogue_is_part_of_a_kernel():
    p = problem(Role.X, kernel=2, pad_lo=0)
    policy = resolve(Policy(algorithm="gemm"))
    epilogue = Epilogue(bias=True, activation=activations.leaky_relu(0.2))
    hlo = compiled(select.build(p, policy=policy, platform="cuda", epilogue=epilogue), *map(p.shape, GIVEN[p.role]),
                   (p.G * p.C,))
    assert targets(hlo) == ["jax_deconv_kernel"] and "-DBIAS=1" in hlo and "v<0.f?0.2" in hlo
    assert not {"add", "multiply", "select"} & set(operations(hlo))


@pytest.mark.parametrize("result", [None, jnp.bfloat16, jnp.float32])
def test_float8_is_not_left_to_xla(result):
    """The same calls as bfloat16 has, or as float32 has where the sum is rounded to float8 once."""
    def function(x, w):
        return conv_transpose(x, w, (2, 2), "SAME", preferred_element_type=result)

    hlo = compiled(function, (8, 16, 16, 64), (4, 4, 64, 32), dtype=jnp.float8_e4m3fn)
    assert targets(hlo) == ["jax_deconv_x"] and "convolution" not in operations(hlo)


def test_float8_with_scales():
    """Forward pass and both gradients: three calls in bfloat16."""
    def step(x, w, cotangent):
        out, pull = jax.vjp(lambda x, w: float8.conv_transpose(x, w, (2, 2), "SAME", activation="relu"), x, w)
        return out, *pull(cotangent)

    hlo = compiled(step, (8, 16, 16, 64), (4, 4, 64, 32), (8, 32, 32, 32))
    assert targets(hlo) == ["jax_deconv_w", "jax_deconv_x", "jax_deconv_y"]
    assert "convolution" not in operations(hlo)
    # What the calls multiply has been rounded to float8.  XLA likes to drop that.
    made = dict(re.findall(r"(%[\w.-]+) = (\w+)\[", hlo))
    widened = re.findall(r"bf16\[[\d,]*\]\S* convert\((%[\w.-]+)\)", hlo)
    assert sorted(made[name] for name in widened if made[name] != "f32") == ["f8e4m3fn", "f8e4m3fn", "f8e5m2"]
    assert operations(hlo).count("clamp") == 3
