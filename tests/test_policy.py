# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""Policies: where they come from, that jit sees them change, and a backward pass with one of its own."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import EDGES, EMPTY, integers
from jax import lax
from jaxprs import ROLES, equations, roles

import jax_deconv
from jax_deconv import Policy, use_policy

HIGHEST, DEFAULT = lax.Precision.HIGHEST, lax.Precision.DEFAULT
CASE = EDGES["grouped"]
X, W = map(jnp.asarray, CASE.operands())


def deconv(x=X, w=W, case=CASE, **keywords):
    return jax_deconv.conv_transpose(x, w, *case.positional, **case.keywords, **keywords)


def policies(function, *args) -> dict[str, Policy]:
    """The policy in each convolution of a function, by role."""
    return {ROLES[e.primitive]: e.params["policy"] for e in equations(jax.make_jaxpr(function)(*args))
            if e.primitive in ROLES}


def pullback(x, w, **keywords):
    out, pull = jax.vjp(lambda x, w: deconv(x, w, **keywords), x, w)
    return pull(out)


# ---- where a policy comes from -------------------------------------------------------------------------


def test_policies_are_values():
    assert Policy(precision="highest") == Policy(precision=HIGHEST)
    assert len({Policy(), Policy(), Policy(deterministic=True)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policy().precision = "high"


@pytest.mark.parametrize("wrong", [dict(precision="exact"), dict(precision=3), dict(deterministic="yes"),
                                   dict(backward="highest"), dict(backward=True)], ids=repr)
def test_a_wrong_field_is_refused(wrong):
    (name, value), = wrong.items()
    with pytest.raises((ValueError, TypeError), match=name) as caught:
        Policy(**wrong)
    assert repr(value) in str(caught.value)


def test_use_policy_takes_a_policy():
    with pytest.raises(TypeError, match="use_policy"):
        with use_policy("highest"):
            pass


def test_the_nearest_wins():
    """The argument, the call's policy, the innermost context, the outer one, JAX's configuration."""
    def precision(**keywords):
        return policies(lambda: deconv(**keywords))["x"].precision

    with jax.default_matmul_precision("high"):
        assert precision() == lax.Precision.HIGH
        with use_policy(Policy(precision="highest", deterministic=True)):
            assert precision() == HIGHEST
            with use_policy(Policy(precision="default")):
                assert precision() == DEFAULT
                assert policies(deconv)["x"].deterministic is True  # what the inner one leaves open
                assert precision(policy=Policy(precision="high")) == lax.Precision.HIGH
                assert precision(policy=Policy(precision="high"), precision="highest") == HIGHEST
            assert precision() == HIGHEST


def test_a_pair_of_precisions_is_the_stricter_one():
    for pair in ((DEFAULT, HIGHEST), (HIGHEST, DEFAULT), ("highest", None)):
        assert policies(lambda pair=pair: deconv(precision=pair))["x"].precision == HIGHEST


def test_jit_traces_again_when_the_context_changes():
    seen = []

    @jax.jit
    def f(x, w):
        seen.append(policies(lambda: deconv())["x"].precision)
        return deconv(x, w)

    f(X, W)
    with use_policy(Policy(precision="highest")):
        f(X, W)
        f(X, W)
    f(X, W)
    assert len(seen) == 2 and seen[1] == HIGHEST != seen[0]


def test_the_context_is_left_after_an_error():
    with pytest.raises(ZeroDivisionError), use_policy(Policy(precision="highest")):
        raise ZeroDivisionError
    assert policies(deconv)["x"].precision != HIGHEST


@pytest.mark.parametrize("variables, field, value", [
    ({"JAX_DECONV_DETERMINISTIC": "1"}, "deterministic", True),
    ({"JAX_DECONV_PRECISION": "highest"}, "precision", HIGHEST),
    ({"XLA_FLAGS": "--xla_gpu_deterministic_ops=true"}, "deterministic", True),
    ({"XLA_FLAGS": "--xla_gpu_deterministic_ops=false"}, "deterministic", False),
], ids=str)
def test_the_environment(variables, field, value, monkeypatch):
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    # Fresh functions: JAX keeps traces by function, and the environment is read while tracing.
    assert getattr(policies(lambda: deconv())["x"], field) == value
    with use_policy(Policy(precision="default", deterministic=False)):
        assert getattr(policies(lambda: deconv())["x"], field) in (DEFAULT, False)


def test_a_wrong_variable_names_itself(monkeypatch):
    monkeypatch.setenv("JAX_DECONV_PRECISION", "exact")
    with pytest.raises(ValueError, match="JAX_DECONV.*exact"):
        deconv()


def test_without_a_backward_policy_gradients_share_the_forward_one():
    found = policies(
        lambda x, w: pullback(x, w, policy=Policy(precision="highest", deterministic=True)), X, W
    )
    assert set(found) == set("xyw")
    assert all(p.precision == HIGHEST and p.deterministic and p.backward is None for p in found.values())


def test_the_policy_survives_vmap_and_second_order():
    def f(x, w):
        return jax.vmap(lambda x: deconv(x, w, policy=Policy(precision="highest")))(x)

    def second(x, w):
        return jax.jvp(lambda w: jax.grad(lambda w: jnp.sum(f(x, w) ** 2))(w), (w,), (w,))

    found = [
        e.params["policy"].precision
        for e in equations(jax.make_jaxpr(second)(X[None], W))
        if e.primitive in ROLES
    ]
    assert len(found) >= 4 and set(found) == {HIGHEST}


# ---- a backward pass of its own ------------------------------------------------------------------------

OWN = Policy(precision="default", backward=Policy(precision="highest", deterministic=True))


@pytest.mark.parametrize("edge", EDGES)
def test_the_values_are_the_same(edge):
    case = EDGES[edge]
    x, w = map(jnp.asarray, case.operands())

    def derivatives(policy):
        out, pull = jax.vjp(lambda x, w: deconv(x, w, case, policy=policy), x, w)
        return out, *pull(jnp.asarray(integers(out.shape, seed=2)))

    ours, theirs = (jax.jit(derivatives, static_argnums=0)(policy) for policy in (OWN, Policy()))
    for got, want in zip(ours, theirs):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_array_equal(got, want)


def test_the_gradients_have_the_backward_policy():
    found = policies(lambda x, w: pullback(x, w, policy=OWN), X, W)
    assert set(found) == set("xyw")
    assert found["x"].precision == DEFAULT and not found["x"].deterministic
    for role in "yw":
        assert found[role].precision == HIGHEST and found[role].deterministic


def test_the_backward_policy_may_come_from_the_context():
    with use_policy(Policy(backward=Policy(precision="highest"))):
        found = policies(pullback, X, W)
    assert found["y"].precision == found["w"].precision == HIGHEST != found["x"].precision


def test_what_the_backward_policy_leaves_open_is_the_forward_one():
    policy = Policy(precision="highest", backward=Policy(deterministic=True))
    found = policies(lambda x, w: pullback(x, w, policy=policy), X, W)
    assert found["w"].precision == HIGHEST and found["w"].deterministic and not found["x"].deterministic


def test_forward_mode_needs_the_derivative_of_the_forward_computation():
    """JAX's own error for custom_vjp; without a backward policy there is nothing to refuse."""
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda x: deconv(x, policy=OWN), (X,), (X,))
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jacfwd(lambda x: deconv(x, policy=OWN))(X)
    np.testing.assert_array_equal(
        jax.jvp(lambda x: deconv(x, policy=Policy(precision="highest")), (X,), (X,))[1], deconv()
    )


@pytest.mark.parametrize("transform", ["vmap", "jit", "remat", "scan", "second order"])
def test_it_lives_under_transforms(transform):
    def f(x, w, policy):
        return jnp.sum(deconv(x, w, policy=policy) ** 2)

    def gradient(policy):
        inner = {"remat": jax.checkpoint(f, static_argnums=2)}.get(transform, f)
        if transform == "vmap":
            return jax.vmap(jax.grad(lambda w: inner(X, w, policy)))(jnp.stack([W, 2 * W]))
        if transform == "jit":
            return jax.jit(jax.grad(lambda w: inner(X, w, policy)))(W)
        if transform == "scan":
            return jax.grad(
                lambda w: jax.lax.scan(lambda c, x: (c + inner(x, w, policy), None), 0.0, X[None])[0]
            )(W)
        if transform == "second order":  # reverse over reverse
            return jax.grad(lambda w: jnp.sum(jax.grad(lambda w: inner(X, w, policy))(w) ** 2))(W)
        return jax.grad(lambda w: inner(X, w, policy))(W)

    np.testing.assert_allclose(gradient(OWN), gradient(Policy()), rtol=1e-6)


def test_vmap_keeps_one_convolution_per_role():
    def f(x, w):
        return jax.vmap(lambda x, w: pullback(x, w, policy=OWN))(x, w)

    assert sorted(roles(f, jnp.stack([X, X]), jnp.stack([W, W])).replace("x", "", 1)) == ["w", "y"]


@pytest.mark.parametrize("case", EMPTY.values(), ids=EMPTY)
def test_nothing_has_zero_gradients(case):
    x, w = map(jnp.asarray, case.operands())
    out, pull = jax.vjp(lambda x, w: deconv(x, w, case, policy=OWN), x, w)
    for operand, got in zip((x, w), pull(out)):
        np.testing.assert_array_equal(got, jnp.zeros_like(operand))


def test_gradient_types_under_a_preferred_element_type():
    x, w = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    ours, theirs = (pullback(x, w, policy=p, preferred_element_type=jnp.float32) for p in (OWN, None))
    for got, want in zip(ours, theirs):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(got, want)


def test_integers_and_bias_under_a_backward_policy():
    x, w = X.astype(jnp.int32), W.astype(jnp.int32)
    np.testing.assert_array_equal(deconv(x, w, policy=OWN), deconv(x, w))
    bias = jnp.arange(4.0)
    got = jax.grad(lambda b: jnp.sum(deconv(bias=b, policy=OWN) ** 2))(bias)
    np.testing.assert_array_equal(got, jax.grad(lambda b: jnp.sum(deconv(bias=b) ** 2))(bias))


def test_the_public_gradients_take_the_backward_policy():
    out = deconv()
    found = policies(lambda dy: jax_deconv.conv_transpose_data_gradient(
        dy, W, X.shape, *CASE.positional, **CASE.keywords, policy=OWN), out)
    assert found["y"].precision == HIGHEST and found["y"].deterministic


# ---- what is promised ----------------------------------------------------------------------------------


def test_deterministic_results_repeat_bit_by_bit():
    rng = np.random.RandomState(0)
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((2, 9, 9, 16), (4, 4, 16, 8)))

    @jax.jit
    def f(x, w):
        out, pull = jax.vjp(lambda x, w: jax_deconv.conv_transpose(
            x, w, (2, 2), "SAME", policy=Policy(deterministic=True)), x, w)
        return out, *pull(out)

    first = f(x, w)
    for _ in range(20):
        for a, b in zip(first, f(x, w)):
            np.testing.assert_array_equal(a, b)


def test_importing_asks_no_device():
    """A policy can be made, and the package imported, before JAX has chosen its devices."""
    code = ("import jax_deconv; p = jax_deconv.Policy(precision='highest');\n"
            "import jax._src.xla_bridge as b; assert not b._backends")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
