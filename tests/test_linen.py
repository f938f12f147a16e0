# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""`jax_deconv.linen.ConvTranspose` against Flax's, and what Flax has not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from flax import linen as nn  # noqa: E402
from flax import serialization  # noqa: E402
from jaxprs import primitive_counts  # noqa: E402
from layer_cases import (  # noqa: E402
    ACTIVATIONS,
    BAD_ARGUMENTS,
    CASES,
    GROUPED,
    ODD_ARGUMENTS,
    STREAMING,
    causal,
    check_error,
    fan_in,
    loop_over_groups,
    normal,
    wave,
)

from jax_deconv.linen import ConvTranspose  # noqa: E402


def test_constructor_is_flax_s():
    ours, theirs = ({f.name: f for f in dataclasses.fields(c)} for c in (ConvTranspose, nn.ConvTranspose))
    new = ["feature_group_count", "output_padding", "use_consistent_padding", "activation", "policy",
           "float8"]
    assert [n for n in ours if n not in new] == list(theirs)
    assert all(ours[n].default is theirs[n].default for n in theirs if n not in ("parent", "bias_init"))
    assert all(ours[n].kw_only for n in new)
    positional = (2, 3, 2, "VALID", 1, False, None, jnp.bfloat16, jnp.float32, None,
                  nn.initializers.ones_init(), nn.initializers.ones_init(), True)
    x = normal(2, 5, 3)
    variables = nn.ConvTranspose(*positional).init(jax.random.key(0), x)
    np.testing.assert_array_equal(ConvTranspose(*positional).apply(variables, x),
                                  nn.ConvTranspose(*positional).apply(variables, x))


def value_and_gradients(layer, variables, inputs):
    @jax.jit
    def run(variables, inputs):
        output, pull_back = jax.vjp(layer.apply, variables, inputs)
        return output, pull_back(wave(output.shape, output.dtype))

    return run(variables, inputs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_flax_checkpoint_gives_the_same_output_and_gradients(case):
    """The bytes of Flax's checkpoint, restored into this module's own tree."""
    inputs = normal(*case.inputs)
    theirs, ours = nn.ConvTranspose(**case.settings), ConvTranspose(**case.settings)
    tree, own_tree = (jax.eval_shape(layer.init, jax.random.key(0), inputs) for layer in (theirs, ours))
    assert own_tree == tree
    saved = jax.tree.map(lambda p: wave(p.shape, p.dtype), tree)
    restored = serialization.from_bytes(own_tree, serialization.to_bytes(saved))

    expected, expected_gradients = value_and_gradients(theirs, saved, inputs)
    actual, gradients = value_and_gradients(ours, restored, inputs)
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(actual, expected, rtol=case.tolerance, atol=case.tolerance)
    tolerance = 10 * case.tolerance  # sums over more terms
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance),
                 gradients, expected_gradients)


def test_parameter_tree_inside_a_model():
    def model(layer):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                return layer(5, (2, 2))(nn.relu(layer(4, (3, 3), strides=(2, 2))(x)))
        return Model()

    x = normal(1, 4, 4, 3)
    ours, theirs = (model(layer).init(jax.random.key(0), x) for layer in (ConvTranspose, nn.ConvTranspose))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)  # names, shapes and a fresh initialisation


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("preferred", [None, jnp.float32])
@pytest.mark.parametrize("input_dtype", [jnp.bfloat16, jnp.int32])
def test_types_are_promoted_as_in_flax(dtype, param_dtype, preferred, input_dtype):
    settings = dict(features=2, kernel_size=(3,), strides=2, dtype=dtype, param_dtype=param_dtype,
                    preferred_element_type=preferred, bias_init=nn.initializers.ones_init())
    x = (4 * normal(2, 5, 3)).astype(input_dtype)
    variables = nn.ConvTranspose(**settings).init(jax.random.key(0), x)
    expected = nn.ConvTranspose(**settings).apply(variables, x)
    actual = ConvTranspose(**settings).apply(variables, x)
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(actual.astype("float32"), expected.astype("float32"), rtol=2e-2, atol=2e-2)


def test_promote_dtype_is_called_as_in_flax():
    def keep(*arrays, dtype):
        assert dtype == jnp.bfloat16 and arrays[2] is None
        return arrays

    layer = ConvTranspose(2, (3,), use_bias=False, dtype=jnp.bfloat16, promote_dtype=keep)
    assert layer.init_with_output(jax.random.key(0), normal(1, 5, 3))[0].dtype == jnp.float32


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("activation, function", ACTIVATIONS, ids=["leaky_relu", "gelu", "sin"])
def test_activation(activation, function, use_bias):
    """In one call with the bias, and no parameter of its own."""
    settings = dict(features=4, kernel_size=(3,), strides=2, use_bias=use_bias,
                    bias_init=nn.initializers.normal())
    plain, layer = nn.ConvTranspose(**settings), ConvTranspose(**settings, activation=activation)
    x = normal(2, 5, 3)
    variables = plain.init(jax.random.key(0), x)
    assert jax.tree.map(jnp.shape, layer.init(jax.random.key(0), x)) == jax.tree.map(jnp.shape, variables)
    counts = primitive_counts(layer.apply, variables, x)
    assert counts["conv_fused"] == (use_bias or isinstance(activation, str))
    assert not use_bias or not counts["add"]
    loss = lambda apply: jax.value_and_grad(lambda v: jnp.sum(apply(v, x) ** 2))(variables)
    want, got = loss(lambda *args: function(plain.apply(*args))), loss(layer.apply)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


def test_a_bias_of_a_wider_type_widens_the_output():
    def narrow(x, kernel, bias, dtype):
        return x.astype(dtype), kernel.astype(dtype), bias

    settings = dict(features=2, kernel_size=(3,), dtype=jnp.bfloat16, promote_dtype=narrow,
                    bias_init=nn.initializers.normal())
    x = normal(2, 5, 3)
    variables = nn.ConvTranspose(**settings).init(jax.random.key(0), x)
    want = nn.relu(nn.ConvTranspose(**settings).apply(variables, x))
    got = ConvTranspose(**settings, activation="relu").apply(variables, x)
    assert got.dtype == want.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("settings", GROUPED, ids=str)
def test_groups(settings):
    """Each group is the ungrouped layer on its own features; circular and causal padding too."""
    groups = settings["feature_group_count"]
    layer = ConvTranspose(features=2 * groups, **settings)
    x = normal(2, *(5,) * len(settings["kernel_size"]), 3 * groups)
    params = jax.tree.map(lambda p: p + 0.1, layer.init(jax.random.key(0), x)["params"])
    one = nn.ConvTranspose if settings.get("padding") != "CAUSAL" else ConvTranspose
    one = one(features=2, **{k: v for k, v in settings.items() if k != "feature_group_count"})
    expected = loop_over_groups(
        groups, x, params["kernel"], params["bias"],
        lambda x, kernel, bias: one.apply({"params": {"kernel": kernel, "bias": bias}}, x))
    np.testing.assert_allclose(layer.apply({"params": params}, x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transpose_kernel", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_fan_in_of_the_default_initialiser(transpose_kernel, groups):
    def sample(seed):
        layer = ConvTranspose(64, (3, 3), transpose_kernel=transpose_kernel, feature_group_count=groups)
        return layer.init(jax.random.key(seed), jnp.zeros((1, 2, 2, 128)))["params"]["kernel"]

    std = np.std([sample(seed) for seed in range(5)])
    assert std == pytest.approx(fan_in(9 * 128 / groups), rel=0.05)


def test_fan_in_reported_case():
    """64 -> 8 channels, 3x3 taps: 576 of them, in Flax's kernel order and in PyTorch's."""
    for transpose_kernel in (False, True):
        layer = ConvTranspose(8, (3, 3), (2, 2), transpose_kernel=transpose_kernel)
        x = jnp.zeros((1, 2, 2, 64))
        kernels = [layer.init(jax.random.key(seed), x)["params"]["kernel"] for seed in range(5)]
        assert np.std(kernels) == pytest.approx(fan_in(576), rel=0.05)


def test_own_initialiser_is_called_as_flax_calls_it():
    for init in (nn.initializers.lecun_normal(), nn.initializers.he_uniform()):
        settings = dict(features=2, kernel_size=(3,), transpose_kernel=True, kernel_init=init)
        ours, theirs = (layer(**settings).init(jax.random.key(0), normal(1, 4, 5))
                        for layer in (ConvTranspose, nn.ConvTranspose))
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("settings", STREAMING, ids=str)
def test_causal(settings):
    """A prefix of the input gives a prefix of the output, of size input * stride, and equal to VALID's."""
    layer, valid = (ConvTranspose(features=2, padding=padding, **settings) for padding in ("CAUSAL", "VALID"))
    x = normal(2, *(6,) * len(settings["kernel_size"]), 3)
    variables = layer.init(jax.random.key(0), x)
    causal(jax.jit(lambda x: layer.apply(variables, x)), jax.jit(lambda x: valid.apply(variables, x)), x,
           settings["strides"])


@pytest.mark.parametrize("dilation", [1, 2])
def test_causal_with_stride_1_is_conv_s(dilation):
    x = normal(2, 7, 3)
    settings = dict(features=2, kernel_size=(3,), kernel_dilation=dilation, padding="CAUSAL")
    variables = nn.Conv(**settings).init(jax.random.key(0), x)
    np.testing.assert_allclose(ConvTranspose(**settings).apply(variables, x),
                               nn.Conv(**settings).apply(variables, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stride, kernel", [(1, 3), (1, 5), (2, 2), (2, 3), (2, 4)])
@pytest.mark.parametrize("groups", [1, 3])
def test_circular_is_the_transpose_of_flax_s_circular_conv(stride, kernel, groups):
    """Up to stride 2; beyond it, and for even kernels with stride 1, Flax centres the kernel otherwise."""
    z, x = normal(2, 4 * stride, 6), normal(2, 4, 3)
    conv = nn.Conv(3, (kernel,), stride, padding="CIRCULAR", use_bias=False, feature_group_count=groups)
    variables = conv.init(jax.random.key(0), z)
    layer = ConvTranspose(6, (kernel,), stride, padding="CIRCULAR", use_bias=False, transpose_kernel=True,
                          feature_group_count=groups)
    np.testing.assert_allclose(jnp.vdot(conv.apply(variables, z), x),
                               jnp.vdot(z, layer.apply(variables, x)), rtol=1e-4)


@pytest.mark.parametrize("groups", [1, 3])
def test_circular_commutes_with_a_shift(groups):
    layer = ConvTranspose(6, (5, 4), (2, 3), padding="CIRCULAR", feature_group_count=groups)
    x = normal(1, 4, 5, 3)
    variables = layer.init(jax.random.key(0), x)
    np.testing.assert_allclose(layer.apply(variables, jnp.roll(x, (1, 2), (1, 2))),
                               jnp.roll(layer.apply(variables, x), (2, 6), (1, 2)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("output_padding", [0, 1, 3, (2, 5)])
@pytest.mark.parametrize("padding", ["SAME", "VALID", ((2, 3), (1, 0))])
def test_output_padding_extends_the_high_end(output_padding, padding):
    plain = ConvTranspose(2, (3, 4), (2, 3), padding=padding)
    x = normal(2, 4, 5, 3)
    variables = jax.tree.map(lambda p: p + 1, plain.init(jax.random.key(0), x))
    shorter = plain.apply(variables, x)
    longer = plain.clone(output_padding=output_padding).apply(variables, x)
    extra = np.broadcast_to(output_padding, 2)
    assert longer.shape == (2, shorter.shape[1] + extra[0], shorter.shape[2] + extra[1], 2)
    np.testing.assert_allclose(longer[:, :shorter.shape[1], :shorter.shape[2]], shorter, rtol=1e-5, atol=1e-5)


def test_consistent_padding_undoes_conv_s():
    x = normal(2, 5, 5, 3)
    layer = ConvTranspose(2, (4, 4), (2, 2), padding=1, use_consistent_padding=True)
    y, _ = layer.init_with_output(jax.random.key(0), x)
    assert y.shape == (2, 10, 10, 2)
    assert nn.Conv(3, (4, 4), (2, 2), padding=1).init_with_output(jax.random.key(0), y)[0].shape == x.shape


@pytest.mark.parametrize("batch", [(), (2, 3), (2, 0)])
@pytest.mark.parametrize("padding", ["SAME", "CIRCULAR", "CAUSAL"])
def test_batch_axes(batch, padding):
    layer = ConvTranspose(2, (3, 4), (2, 2), padding=padding)
    x = normal(*batch, 4, 5, 3)
    variables = layer.init(jax.random.key(0), jnp.zeros((4, 5, 3)))
    y = layer.apply(variables, x)
    assert y.shape == (*batch, 8, 10, 2)
    single = jnp.stack([layer.apply(variables, x) for x in x.reshape(-1, 4, 5, 3)]) if y.size else y
    np.testing.assert_allclose(y.reshape(-1, 8, 10, 2) if y.size else y, single, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padding", ["CIRCULAR", "CAUSAL"])
def test_no_input_gives_no_output(padding):
    layer = ConvTranspose(2, (3,), (2,), padding=padding)
    y, variables = layer.init_with_output(jax.random.key(0), jnp.zeros((2, 0, 3)))
    assert y.shape == (2, 0, 2)
    gradient = jax.grad(lambda v: layer.apply(v, jnp.zeros((2, 0, 3))).sum())(variables)
    assert not any(g.any() for g in jax.tree.leaves(gradient))


@pytest.mark.parametrize("padding", ["SAME", "CIRCULAR", "CAUSAL"])
def test_transformations(padding):
    layer = ConvTranspose(4, (3, 3), (2, 2), padding=padding, feature_group_count=2)
    x = normal(3, 4, 4, 2)
    variables = layer.init(jax.random.key(0), x)
    y = layer.apply(variables, x)
    np.testing.assert_allclose(jax.jit(layer.apply)(variables, x), y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(layer.apply, (None, 0))(variables, x), y, rtol=1e-5, atol=1e-5)

    def loss(variables, x):
        return (layer.apply(variables, x) ** 2).sum()

    per_example = jax.vmap(jax.grad(loss), (None, 0))(variables, x)
    total = jax.jit(jax.grad(loss))(variables, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a.sum(0), b, rtol=1e-4, atol=1e-4),
                 per_example, total)
    # A layer of parameters for each example: the kernel is batched, too.
    stacked = jax.tree.map(lambda p: jnp.stack([p, 2 * p, 3 * p]), variables)
    np.testing.assert_allclose(jax.vmap(layer.apply)(stacked, x), y * jnp.arange(1., 4)[:, None, None, None],
                               rtol=1e-5, atol=1e-5)


def test_mask():
    mask = jnp.tril(jnp.ones((3, 3, 4)))
    settings = dict(features=4, kernel_size=(3,), mask=mask, padding="VALID")
    x = normal(1, 8, 3)
    variables = nn.ConvTranspose(**settings).init(jax.random.key(0), x)
    np.testing.assert_allclose(ConvTranspose(**settings).apply(variables, x),
                               nn.ConvTranspose(**settings).apply(variables, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings, inputs, words", [
    (dict(features=4, feature_group_count=2), (1, 4, 3), ("feature_group_count", "2 groups", "3 features")),
    (dict(features=3, feature_group_count=2), (1, 4, 4), ("feature_group_count", "output")),
    (dict(features=3, feature_group_count=0), (1, 4, 4), ("feature_group_count", "0")),
    (dict(features=4, mask=np.ones((3, 3, 3))), (1, 4, 3), ("mask", "(3, 3, 4)", "(3, 3, 3)")),
    (dict(features=4, kernel_dilation=(1, 2)), (1, 4, 3), ("kernel_dilation", "(1, 2)")),
    (dict(features=4, output_padding=(1, 2)), (1, 4, 3), ("output_padding", "(1, 2)")),
    (dict(features=4, output_padding=1, padding="CIRCULAR"), (1, 4, 3), ("output_padding", "CIRCULAR")),
    (dict(features=4, output_padding=1, padding="CAUSAL"), (1, 4, 3), ("output_padding", "CAUSAL")),
    (dict(features=4, padding=((1, 2), (3, 4))), (1, 4, 3), ("padding", "((1, 2), (3, 4))")),
    (dict(features=4, padding="REFLECT"), (1, 4, 3), ("REFLECT",)),
    (dict(features=4), (3,), ("inputs", "(3,)")),
], ids=str)
def test_errors_name_the_argument_and_its_value(settings, inputs, words):
    with pytest.raises(ValueError) as error:
        ConvTranspose(kernel_size=(3,), **settings).init(jax.random.key(0), normal(*inputs))
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("name, value, expected", BAD_ARGUMENTS)
def test_errors_say_what_was_expected(name, value, expected):
    layer = ConvTranspose(**(dict(features=4, kernel_size=3) | {name: value}))
    check_error(name, value, expected, lambda: layer.init(jax.random.key(0), np.ones((1, 4, 3), np.float32)))


@pytest.mark.parametrize("settings", ODD_ARGUMENTS, ids=str)
def test_odd_arguments_are_not_errors(settings):
    settings = dict(features=2, kernel_size=3, kernel_init=nn.initializers.ones_init()) | settings
    expected, actual = (layer(**settings).init_with_output(jax.random.key(0), normal(1, 4, 3))[0]
                        for layer in (nn.ConvTranspose, ConvTranspose))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_missing_flax_names_the_command():
    import subprocess
    import sys
    code = ("import sys; import jax_deconv; assert 'flax' not in sys.modules, 'jax_deconv imports flax'\n"
            "sys.modules['flax'] = None\n"
            "for name in ('linen', 'nnx'):\n"
            "    try: __import__('jax_deconv.' + name)\n"
            "    except ImportError as error: assert f'{name} needs Flax: pip install flax' in str(error)\n"
            "    else: raise AssertionError(name)\n")
    subprocess.run([sys.executable, "-c", code], check=True)
