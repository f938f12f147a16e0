# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""`jax_deconv.nnx.ConvTranspose` against Flax's, and what Flax has not.

Everything but parameters is shared with the Linen module, whose tests are the thorough ones.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from flax import nnx, serialization  # noqa: E402
from jaxprs import primitive_counts  # noqa: E402
from layer_cases import (  # noqa: E402
    ACTIVATIONS,
    BAD_ARGUMENTS,
    CASES,
    GROUPED,
    STREAMING,
    causal,
    check_error,
    fan_in,
    loop_over_groups,
    normal,
)

from jax_deconv.nnx import ConvTranspose  # noqa: E402


def make(layer, settings, in_features, seed=0, **more):
    settings = dict(settings, **more)
    features = settings.pop("features")
    return layer(in_features, features, **settings, rngs=nnx.Rngs(seed))


def test_constructor_is_flax_s():
    ours, theirs = (inspect.signature(c.__init__).parameters for c in (ConvTranspose, nnx.ConvTranspose))
    new = ["feature_group_count", "output_padding", "use_consistent_padding", "activation", "policy",
           "float8"]
    assert [n for n in ours if n not in new] == list(theirs)
    assert all(ours[n].kind == theirs[n].kind for n in theirs)
    assert all(ours[n].default is theirs[n].default for n in theirs if not n.endswith("_metadata"))


@pytest.mark.parametrize("case", CASES[::3] + CASES[-4:], ids=str)
def test_flax_checkpoint_gives_the_same_output_and_gradients(case):
    """Flax's state, through the bytes of a checkpoint, loaded into this module."""
    inputs = normal(*case.inputs)
    theirs = make(nnx.ConvTranspose, case.settings, inputs.shape[-1], seed=1)
    if theirs.bias is not None:
        theirs.bias[...] += 0.5
    ours = make(ConvTranspose, case.settings, inputs.shape[-1], seed=2)
    assert jax.tree.map(jnp.shape, nnx.state(ours)) == jax.tree.map(jnp.shape, nnx.state(theirs))
    saved, fresh = (nnx.to_pure_dict(nnx.state(m, nnx.Param)) for m in (theirs, ours))
    nnx.update(ours, serialization.from_bytes(fresh, serialization.to_bytes(saved)))

    expected, actual = theirs(inputs), ours(inputs)
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(actual, expected, rtol=case.tolerance, atol=case.tolerance)

    def loss(model, inputs):
        return (model(inputs).astype("float32") ** 2).mean()

    gradients = [nnx.jit(nnx.grad(loss, argnums=(0, 1)))(model, inputs) for model in (ours, theirs)]
    for a, b in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=10 * case.tolerance, atol=10 * case.tolerance)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("input_dtype", [jnp.bfloat16, jnp.int32])
def test_types_are_promoted_as_in_flax(dtype, input_dtype):
    settings = dict(features=2, kernel_size=(3,), strides=2, dtype=dtype, preferred_element_type=jnp.float32)
    x = (4 * normal(2, 5, 3)).astype(input_dtype)
    expected, actual = (make(layer, settings, 3)(x) for layer in (nnx.ConvTranspose, ConvTranspose))
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(actual, expected, rtol=2e-2, atol=2e-2)


def test_promote_dtype_is_called_as_in_flax():
    def keep(arrays, dtype):
        assert dtype == jnp.bfloat16 and len(arrays) == 3
        return arrays

    layer = ConvTranspose(3, 2, 3, dtype=jnp.bfloat16, promote_dtype=keep, rngs=nnx.Rngs(0))
    assert layer(normal(1, 5, 3)).dtype == jnp.float32


def test_metadata():
    layer = ConvTranspose(3, 2, 3, rngs=nnx.Rngs(0), kernel_metadata={"note": "k"},
                          bias_metadata={"note": "b"})
    assert (layer.kernel.note, layer.bias.note) == ("k", "b")


@pytest.mark.parametrize("activation, function", ACTIVATIONS, ids=["leaky_relu", "gelu", "sin"])
def test_activation(activation, function):
    settings = dict(features=4, kernel_size=(3,), strides=2)
    plain, layer = (make(c, settings, 3, **more) for c, more in ((nnx.ConvTranspose, {}),
                                                                  (ConvTranspose, {"activation": activation})))
    x = normal(2, 5, 3)
    np.testing.assert_allclose(layer(x), function(plain(x)), rtol=1e-5, atol=1e-5)
    assert primitive_counts(layer, x)["conv_fused"] == 1


@pytest.mark.parametrize("settings", GROUPED[::3], ids=str)
def test_groups(settings):
    groups = settings["feature_group_count"]
    x = normal(2, *(5,) * len(settings["kernel_size"]), 3 * groups)
    layer = make(ConvTranspose, settings, 3 * groups, features=2 * groups)
    one = make(ConvTranspose, settings, 3, features=2, feature_group_count=1)

    def of_group(x, kernel, bias):
        one.kernel[...], one.bias[...] = kernel, bias
        return one(x)

    expected = loop_over_groups(groups, x, layer.kernel[...], layer.bias[...], of_group)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transpose_kernel", [False, True])
@pytest.mark.parametrize("groups", [1, 8])
def test_fan_in_of_the_default_initialiser(transpose_kernel, groups):
    kernels = [ConvTranspose(64, 8, (3, 3), transpose_kernel=transpose_kernel, feature_group_count=groups,
                             rngs=nnx.Rngs(seed)).kernel[...] for seed in range(5)]
    assert np.std(kernels) == pytest.approx(fan_in(9 * 64 / groups), rel=0.05)


def test_own_initialiser_is_called_as_flax_calls_it():
    settings = dict(features=2, kernel_size=(3,), transpose_kernel=True,
                    kernel_init=nnx.initializers.lecun_normal())
    ours, theirs = (make(layer, settings, 5) for layer in (ConvTranspose, nnx.ConvTranspose))
    np.testing.assert_array_equal(ours.kernel[...], theirs.kernel[...])


@pytest.mark.parametrize("settings", STREAMING[::3], ids=str)
def test_causal(settings):
    x = normal(2, *(6,) * len(settings["kernel_size"]), 3)
    layer, valid = (make(ConvTranspose, settings, 3, features=2, padding=padding)
                    for padding in ("CAUSAL", "VALID"))
    causal(layer, valid, x, settings["strides"])


def test_output_padding():
    shorter, longer = (
        ConvTranspose(3, 2, (3, 4), (2, 3), output_padding=extra, rngs=nnx.Rngs(0))(normal(2, 4, 5, 3))
        for extra in (None, (2, 5)))
    assert (shorter.shape, longer.shape) == ((2, 8, 15, 2), (2, 10, 20, 2))
    np.testing.assert_allclose(longer[:, :8, :15], shorter, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padding", ["SAME", "CIRCULAR"])
def test_transformations(padding):
    layer = ConvTranspose(2, 4, (3, 3), (2, 2), padding=padding, feature_group_count=2, rngs=nnx.Rngs(0))
    x = normal(3, 4, 4, 2)
    y = layer(x)
    for transformed in (nnx.jit(lambda m, x: m(x)), nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))):
        np.testing.assert_allclose(transformed(layer, x), y, rtol=1e-5, atol=1e-5)
    graph, state = nnx.split(layer)  # settings are static and comparable
    hash(graph)
    np.testing.assert_array_equal(nnx.merge(graph, state)(x), y)


def test_errors_name_the_argument_and_its_value():
    for settings, words in [(dict(feature_group_count=2), ("feature_group_count", "2 groups", "3 features")),
                            (dict(mask=np.ones((1, 1, 1))), ("mask", "(3, 3, 4)", "(1, 1, 1)")),
                            (dict(output_padding=1, padding="CAUSAL"), ("output_padding", "CAUSAL"))]:
        with pytest.raises(ValueError) as error:
            ConvTranspose(3, 4, 3, **settings, rngs=nnx.Rngs(0))(normal(1, 5, 3))
        assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("name, value, expected", [("in_features", "3", "integer >= 0"), *BAD_ARGUMENTS])
def test_errors_say_what_was_expected(name, value, expected):
    name = "out_features" if name == "features" else name
    settings = dict(in_features=3, out_features=4, kernel_size=3) | {name: value}
    check_error(name, value, expected,
                lambda: ConvTranspose(**settings, rngs=nnx.Rngs(0))(np.ones((1, 4, 3), np.float32)))
