# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""jit, remat, scan, export, shard_map, donation, debug_nans, 64 bits, abstract evaluation."""

import functools
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from grid import EDGES, Case, integers
from jax.sharding import PartitionSpec as P
from jaxprs import primitive_counts, roles

import jax_deconv

CASE = Case((3, 4), (3, 2), (2, 2), ((1, 0), (0, 1)), groups=2, consistent=True, output_padding=(1, 0))


def deconv(x, w, case=CASE):
    return jax_deconv.conv_transpose(x, w, *case.positional, **case.keywords)


def loss(x, w):
    return jnp.sum(jnp.square(deconv(x, w)))


@pytest.fixture(scope="module")
def operands():
    return tuple(map(jnp.asarray, CASE.operands()))


@pytest.fixture(scope="module")
def expected(operands):
    """The value and the gradients of `loss`, by the oracle."""
    x, w = operands
    out = oracle.conv_transpose(x, w, *CASE.positional, **CASE.keywords)
    return out, (
        oracle.gradient(lambda x: oracle.conv_transpose(x, w, *CASE.positional, **CASE.keywords), x, 2 * out),
        oracle.gradient(lambda w: oracle.conv_transpose(x, w, *CASE.positional, **CASE.keywords), w, 2 * out),
    )


def all_equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


# ---- jit -----------------------------------------------------------------------------------------------


def test_jit_and_its_gradient(operands, expected):
    np.testing.assert_array_equal(jax.jit(deconv)(*operands), expected[0])
    all_equal(jax.jit(jax.grad(loss, (0, 1)))(*operands), expected[1])
    all_equal(jax.grad(jax.jit(loss), (0, 1))(*operands), expected[1])


def test_jit_traces_once(operands):
    traces = []

    @jax.jit
    def f(x, w):
        traces.append(None)
        return deconv(x, w)

    for _ in range(3):
        f(*operands)
    assert len(traces) == 1


def test_static_arguments_may_be_arguments_of_jit(operands, expected):
    """Everything but the arrays is hashable and can be static."""
    f = jax.jit(
        jax_deconv.conv_transpose,
        static_argnames=(
            "strides", "padding", "rhs_dilation", "dimension_numbers", "transpose_kernel",
            "use_consistent_padding", "feature_group_count", "output_padding", "policy",
        ),
    )
    out = f(*operands, strides=CASE.strides, padding=CASE.padding, dimension_numbers=CASE.dimension_numbers,
            policy=jax_deconv.Policy(precision="highest", backward=jax_deconv.Policy(deterministic=True)),
            **CASE.keywords)
    np.testing.assert_array_equal(out, expected[0])


def test_donation():
    case = Case((4,), (3,), (1,), "SAME", inputs=2, outputs=2)
    x, w = map(jnp.asarray, case.operands())
    want = oracle.conv_transpose(x, w, *case.positional)
    got = jax.jit(functools.partial(deconv, case=case), donate_argnums=0)(x, w)
    np.testing.assert_array_equal(got, want)
    assert x.is_deleted()


def test_ahead_of_time_compilation(operands, expected):
    compiled = jax.jit(deconv).lower(*(jax.typeof(a) for a in operands)).compile()
    np.testing.assert_array_equal(compiled(*operands), expected[0])


# ---- control flow and rematerialisation ----------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [None, jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.everything_saveable],
    ids=["none", "dots", "everything"],
)
def test_remat(operands, expected, policy):
    all_equal(jax.jit(jax.grad(jax.checkpoint(loss, policy=policy), (0, 1)))(*operands), expected[1])


def test_remat_computes_the_forward_convolution_again(operands):
    def squared(x, w):  # the inner convolution is needed by the gradient of the square
        return jnp.sum(jnp.sin(deconv(x, w)))

    plain, again = (roles(jax.grad(f, (0, 1)), *operands) for f in (squared, jax.checkpoint(squared)))
    assert plain.count("x") + 1 == again.count("x") and again.count("y") == again.count("w") == 1


def test_scan(operands):
    x, w = operands
    case = Case((3, 4), (3, 2), (1, 1), "SAME", inputs=6, outputs=6)
    kernels = jnp.asarray(integers((3, *case.rhs_shape), seed=3)) / 8

    def step(carry, kernel):
        return jnp.tanh(deconv(carry, kernel, case)), carry.sum()

    def scanned(x, kernels):
        return jnp.sum(jax.lax.scan(step, x, kernels)[0])

    def unrolled(x, kernels):
        for kernel in kernels:
            x, _ = step(x, kernel)
        return jnp.sum(x)

    got, want = (jax.jit(jax.value_and_grad(f, (0, 1)))(x, kernels) for f in (scanned, unrolled))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)
    assert primitive_counts(scanned, x, kernels)["scan"] == 1


def test_while_and_cond(operands, expected):
    x, w = operands
    got = jax.jit(
        lambda n: jax.lax.fori_loop(0, n, lambda i, acc: acc + deconv(x, w), jnp.zeros(expected[0].shape))
    )(2)
    np.testing.assert_array_equal(got, 2 * expected[0])
    got = jax.jit(lambda p: jax.grad(lambda w: jax.lax.cond(p, loss, lambda x, w: 0.0, x, w))(w))
    np.testing.assert_array_equal(got(True), expected[1][1])
    np.testing.assert_array_equal(got(False), jnp.zeros_like(w))


# ---- export --------------------------------------------------------------------------------------------


def test_export_round_trip(operands, expected):
    exported = jax.export.export(jax.jit(deconv))(*operands)
    again = jax.export.deserialize(exported.serialize(vjp_order=1))
    np.testing.assert_array_equal(again.call(*operands), expected[0])
    all_equal(jax.grad(lambda x, w: jnp.sum(jnp.square(again.call(x, w))), (0, 1))(*operands), expected[1])


def test_export_of_a_gradient(operands, expected):
    exported = jax.export.export(jax.jit(jax.grad(loss, (0, 1))))(*operands)
    all_equal(jax.export.deserialize(exported.serialize()).call(*operands), expected[1])


@pytest.mark.parametrize(
    "edge", ["doubling", "depthwise", "kernel_below_stride", "output_padding_beyond_stride"]
)
def test_export_with_a_symbolic_batch(edge):
    """One exported program serves every batch size; gradients too."""
    case = EDGES[edge]
    f = functools.partial(deconv, case=case)
    batch = jax.export.symbolic_shape("b")[0]
    axis = case.dimension_numbers[0].index("N")
    symbolic = tuple(batch if i == axis else n for i, n in enumerate(case.lhs_shape))
    x, w = case.operands()
    both = jax.jit(lambda x, w: (f(x, w), jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1))(x, w)))
    exported = jax.export.export(both)(jax.ShapeDtypeStruct(symbolic, jnp.float32), jnp.asarray(w))
    again = jax.export.deserialize(exported.serialize())
    for size in (1, 3):
        shape = tuple(size if i == axis else n for i, n in enumerate(case.lhs_shape))
        x = integers(shape)
        all_equal(again.call(x, w), both(x, w))


def test_export_for_several_platforms(operands):
    exported = jax.export.export(jax.jit(deconv), platforms=("cpu", "tpu"))(*operands)
    assert set(exported.platforms) == {"cpu", "tpu"}
    all_equal(exported.call(*operands), deconv(*operands))


# ---- shard_map -----------------------------------------------------------------------------------------

BATCHED = Case((3,), (3,), (2,), "SAME", batch=16, inputs=2, outputs=3)


def sharded(function, in_specs, out_specs, check_vma):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    )


needs_devices = pytest.mark.skipif(jax.device_count() < 8, reason="eight devices are needed")


@needs_devices
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_over_the_batch(check_vma):
    """Forward, and gradients both inside and outside the map; the kernel is shared by all devices."""
    x, w = map(jnp.asarray, BATCHED.operands())
    f = functools.partial(deconv, case=BATCHED)
    out = f(x, w)
    mapped = sharded(f, (P("d"), P()), P("d"), check_vma)
    np.testing.assert_array_equal(mapped(x, w), out)

    want = jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1))(x, w)
    all_equal(jax.grad(lambda x, w: jnp.sum(mapped(x, w) ** 2), (0, 1))(x, w), want)

    def inside(x, w):
        dx, dw = jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1))(x, w)
        # With varying axes checked, the shared kernel's gradient has been summed already.
        return dx, dw if check_vma else jax.lax.psum(dw, "d")

    all_equal(sharded(inside, (P("d"), P()), (P("d"), P()), check_vma)(x, w), want)

    push = jax.jvp(mapped, (x, w), (x, w))
    all_equal(push, (out, 2 * out))


@needs_devices
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_over_channels_of_the_input(check_vma):
    """Each device holds some of the contracted channels: partial sums, added by hand."""
    case = Case((3,), (3,), (2,), "SAME", batch=2, inputs=8, outputs=3)
    x, w = map(jnp.asarray, case.operands())
    f = functools.partial(deconv, case=case)
    mapped = sharded(
        lambda x, w: jax.lax.psum(f(x, w), "d"), (P(None, None, "d"), P(None, "d")), P(), check_vma
    )
    np.testing.assert_array_equal(mapped(x, w), f(x, w))
    want = jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1))(x, w)
    all_equal(jax.grad(lambda x, w: jnp.sum(mapped(x, w) ** 2), (0, 1))(x, w), want)


@needs_devices
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_of_vmap_remat_and_second_order(check_vma):
    x, w = map(jnp.asarray, BATCHED.operands())
    f = jax.checkpoint(functools.partial(deconv, case=BATCHED))

    def per_example(x, w):
        return jax.vmap(lambda x: jnp.sum(jnp.sin(f(x[None], w))))(x)

    def hessian_vector(x, w):
        return jax.jvp(jax.grad(lambda x: jnp.sum(per_example(x, w))), (x,), (x,))[1]

    mapped = sharded(hessian_vector, (P("d"), P()), P("d"), check_vma)
    np.testing.assert_allclose(mapped(x, w), hessian_vector(x, w), rtol=1e-5, atol=1e-5)


@needs_devices
def test_shard_map_with_a_bias_and_a_backward_policy():
    x, w = map(jnp.asarray, BATCHED.operands())
    bias = jnp.arange(3.0)
    policy = jax_deconv.Policy(backward=jax_deconv.Policy(precision="highest"))

    def f(x, w, b):
        return jax_deconv.conv_transpose(x, w, *BATCHED.positional, bias=b, policy=policy)

    mapped = sharded(f, (P("d"), P(), P()), P("d"), True)
    want = jax.grad(lambda *a: jnp.sum(f(*a) ** 2), (0, 1, 2))(x, w, bias)
    all_equal(jax.grad(lambda *a: jnp.sum(mapped(*a) ** 2), (0, 1, 2))(x, w, bias), want)


# ---- debugging and types -------------------------------------------------------------------------------


def test_debug_nans(operands, expected):
    x, w = operands
    with jax.debug_nans(True):
        all_equal(jax.grad(loss, (0, 1))(x, w), expected[1])
        empty = Case((0,), (3,), (2,), "SAME")
        jax.block_until_ready(deconv(*map(jnp.asarray, empty.operands()), empty))
        with pytest.raises(FloatingPointError):
            jax.block_until_ready(deconv(x.at[0, 0, 0, 0].set(jnp.nan), w))


def test_zeros_around_stay_zero_beside_infinities():
    """Positions that no tap reaches are zeros, not 0 * inf."""
    case = EDGES["zeros_around"]
    x, w = (np.full(s, np.inf, np.float32) for s in (case.lhs_shape, case.rhs_shape))
    out = deconv(x, w, case)
    np.testing.assert_array_equal(out[:, :3], 0)
    np.testing.assert_array_equal(out[:, 3:-2], np.inf)
    np.testing.assert_array_equal(out[:, -2:], 0)


def test_64_bits(x64):
    x, w = CASE.operands(np.float64)
    x, w = x + 2.0**-40, w + 2.0**-41
    out = jax.jit(deconv)(x, w)
    assert out.dtype == jnp.float64
    np.testing.assert_allclose(
        out, oracle.conv_transpose(x, w, *CASE.positional, **CASE.keywords), rtol=1e-14, atol=1e-14
    )


def test_without_64_bits_numpy_operands_are_narrowed():
    x, w = CASE.operands(np.float64)
    assert deconv(x, w).dtype == jnp.float32
    assert (
        jax_deconv.conv_transpose(x, w.astype(np.float32), *CASE.positional, **CASE.keywords).dtype
        == jnp.float32
    )


def test_eval_shape_touches_no_device():
    """In a process whose only platform does not exist, so that any use of a device fails."""
    code = """
        import jax, jax.numpy as jnp, jax_deconv
        try:
            jnp.ones(1)
        except RuntimeError:
            pass
        else:
            raise SystemExit("there should be no device here")
        x = jax.ShapeDtypeStruct((2, 3, 4, 6), jnp.bfloat16)
        w = jax.ShapeDtypeStruct((3, 2, 3, 4), jnp.bfloat16)
        f = lambda x, w: jax_deconv.conv_transpose(x, w, (2, 2), "SAME", feature_group_count=2,
                                                   preferred_element_type=jnp.float32)
        out = jax.eval_shape(f, x, w)
        assert (out.shape, out.dtype) == ((2, 6, 8, 4), jnp.float32), out
        dx, dw = jax.eval_shape(jax.grad(lambda x, w: f(x, w).sum(), (0, 1)), x, w)
        assert (dx.shape, dx.dtype, dw.shape) == (x.shape, x.dtype, w.shape)
        kernels = jax.ShapeDtypeStruct((5, *w.shape), w.dtype)
        assert jax.eval_shape(jax.vmap(f, (None, 0)), x, kernels).shape[0] == 5
    """
    env = os.environ | {"JAX_PLATFORMS": "no_such_platform"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
