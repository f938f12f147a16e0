# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""36 faults that people reported elsewhere (cases.json): each as reported, and as a kind.

In the file x is (N, C, *I), w is (C, O/groups, *K) and padding is that of `use_consistent_padding`:
out[n, o, i * stride + k * dilation - low] += x[n, c, i] * w[c, o, k].
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from grid import integers
from jax import lax

import jax_deconv

CASES = {c["id"]: c for c in json.loads(pathlib.Path(__file__).with_name("cases.json").read_text())["cases"]}
# The kinds with an operation whose value is compared; the other kinds have a test each, below.
VALUES = [i for i, c in CASES.items()
          if c["op"] in ("forward", "grad_x", "grad_w", "grad_b", "jvp", "adjoint", "vmap")
          and c["expect"]["kind"] in ("value", "scalar", "error_or_value")]
OTHERS = {"19", "38", "39", "41", "42", "43", "45", "52", "56"}
IN_THE_MODULES_TESTS = {"54"}  # the initialiser's fan-in: test_linen.py and test_nnx.py


def label(i):
    return f"{i}-{CASES[i]['slug']}"


def test_every_case_is_tested():
    assert len(CASES) == 36
    assert set(VALUES) | OTHERS | IN_THE_MODULES_TESTS == set(CASES)


def make(spec):
    """An input of the file in float64."""
    if spec["kind"] == "lcg":
        flat = np.arange(np.prod(spec["shape"], dtype=int))
        return ((flat * spec["a"] + spec["b"]) % spec["m"] - spec["c"]).reshape(spec["shape"]) * spec.get(
            "scale", 1.0
        )
    if spec["kind"] == "full":
        return np.full(spec["shape"], float(spec["value"]))
    return np.asarray(spec["data"], float).reshape(spec["shape"])


def arguments(case, layout="first", **changes):
    """The keywords of conv_transpose (ours and the oracle's) for a case; `changes` are made to its spec."""
    spec = case["spec"] | changes
    rank = spec["spatial_dims"]
    space = "DHW"[3 - rank:]
    return dict(
        strides=tuple(spec["strides"]), transpose_kernel=True, use_consistent_padding=True,
        padding=spec["padding"] if isinstance(spec["padding"], str) else tuple(map(tuple, spec["padding"])),
        rhs_dilation=tuple(spec["dilation"]), feature_group_count=spec["groups"],
        output_padding=None if "output_shape" in spec else tuple(spec["output_padding"]),
        output_shape=spec.get("output_shape"),
        dimension_numbers={"first": ("NC" + space, "OI" + space, "NC" + space),
                           "last": (f"N{space}C", f"{space}IO", f"N{space}C")}[layout])


def plain(rank, strides, **others):
    """A case of one's own, with what is not said at its neutral value."""
    ones, zeros = (1,) * rank, (0,) * rank
    neutral = dict(spatial_dims=rank, output_padding=zeros, dilation=ones, groups=1)
    return {"spec": neutral | dict(strides=strides) | others}


def store(array, layout, kernel=False):
    """From the file's order of axes to that of a layout."""
    if layout == "first":
        return array
    return jnp.moveaxis(array, (1, 0), (-2, -1)) if kernel else jnp.moveaxis(array, 1, -1)


def ours(case, layout="first", precision=None, preferred_element_type=None, **changes):
    """A function of x, w and bias in the file's order of axes, computed in `layout`."""
    keywords = arguments(case, layout, **changes)

    def function(x, w, bias=None):
        out = jax_deconv.conv_transpose(
            store(x, layout), store(w, layout, kernel=True), bias=bias, precision=precision,
            preferred_element_type=preferred_element_type, **keywords,
        )
        return out if layout == "first" else jnp.moveaxis(out, -1, 1)

    return function


def reference(case, **changes):
    keywords = arguments(case, **changes)
    return lambda x, w, bias=None: oracle.conv_transpose(x, w, bias=bias, **keywords)


def by_jax(op, f, t):
    """An operation of the file through JAX's transforms; `t` names the tensors."""
    x, w, bias = t["x"], t["w"], t.get("bias")
    match op:
        case "forward":
            return f(x, w, bias)
        case "grad_x":
            return jax.vjp(f, x, w)[1](t["dy"])[0]
        case "grad_w":
            return jax.vjp(f, x, w)[1](t["dy"])[1]
        case "grad_b":
            zero = jnp.zeros(t["dy"].shape[1], t["dy"].dtype)
            return jax.vjp(lambda b: f(x, w, b), zero)[1](t["dy"])[0]
        case "jvp":
            return jax.jvp(f, (x, w), (t["tx"], t["tw"]))[1]
        case "adjoint":
            return jnp.vdot(f(x, w), t["z"])
        case "vmap":
            return jax.vmap(f)(x, w)


def by_oracle(op, f, t):
    x, w, bias = t["x"], t["w"], t.get("bias")
    match op:
        case "forward":
            return f(x, w, bias)
        case "grad_x":
            return oracle.gradient(lambda a: f(a, w), x, t["dy"])
        case "grad_w":
            return oracle.gradient(lambda a: f(x, a), w, t["dy"])
        case "grad_b":
            return t["dy"].sum((0, *range(2, t["dy"].ndim)))
        case "jvp":
            return f(t["tx"], w) + f(x, t["tw"])
        case "adjoint":
            return np.vdot(f(x, w), t["z"])
        case "vmap":
            return np.stack([f(a, b) for a, b in zip(x, w)])


def tensors(case, dtype=np.float32):
    return {name: jnp.asarray(make(spec), dtype) for name, spec in case["inputs"].items() if spec is not None}


def types(case) -> list:
    """The types in which a case is stated."""
    stated = case["spec"]["dtype"]
    return [getattr(jnp, t) for t in ("float16", "bfloat16", "float32", "int32") if stated.split(" ")[0] == t
            or t in stated.split("|")]


# ---- as reported ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("case", [CASES[i] for i in VALUES], ids=map(label, VALUES))
def test_as_reported(case, layout):
    expect = case["expect"]
    mixed = "result float32" in case["spec"]["dtype"]
    for dtype in types(case):
        f = ours(case, layout, precision="highest", preferred_element_type=jnp.float32 if mixed else None)
        t = tensors(case, dtype)
        if mixed:
            t["dy"] = t["dy"].astype(jnp.float32)
        got = by_jax(case["op"], f, t)
        want = np.reshape(expect["data"] if "data" in expect else expect["value"], expect["shape"])
        assert got.shape == want.shape and got.dtype == dtype
        np.testing.assert_allclose(np.asarray(got, float), want, rtol=expect["rtol"])
        if "also" in expect:
            also = by_jax("grad_x", f, t)
            assert also.dtype == dtype
            np.testing.assert_array_equal(np.asarray(also, float).ravel(), expect["also_value"]["grad_x"])


# ---- as kinds ------------------------------------------------------------------------------------------


def variant(case, batch, space, inputs, outputs):
    """A case's spec with other sizes: its tensors, of small integers."""
    spec, lead = case["spec"], case["op"] == "vmap"
    x_shape, w_shape = (list(case["inputs"][n]["shape"])[lead:] for n in "xw")
    x_shape = [x_shape[0] + batch, x_shape[1] * inputs, *(n + space for n in x_shape[2:])]
    w_shape = [w_shape[0] * inputs, w_shape[1] + outputs, *w_shape[2:]]
    x, w = integers([3] * lead + x_shape), integers([3] * lead + w_shape, seed=1)
    t = {"x": x, "w": w, "tx": integers(x.shape, seed=2), "tw": integers(w.shape, seed=3),
         "bias": integers((w_shape[1] * spec["groups"],), seed=5)}
    if not lead:
        t["dy"] = integers(reference(case)(x, w).shape, seed=4)
        t["z"] = t["dy"]
    return t


# Integers have no derivatives; 49 is about long sums and has a test of its own.
KINDS = [pytest.param(CASES[i], dtype, id=f"{label(i)}-{jnp.dtype(dtype).name}")
         for i in VALUES if i != "49" for dtype in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32)
         if dtype != jnp.int32 or CASES[i]["op"] in ("forward", "vmap", "adjoint")]


@pytest.mark.parametrize("case, dtype", KINDS)
def test_as_a_kind(case, dtype):
    """Other batches, sizes and channels, in every type for which the operation is defined."""
    sizes = [(1, 1, 1, 1), (0, 2, 3, 0), (2, 0, 2, 2)]
    if dtype != jnp.float32:
        sizes = sizes[:1]
    for change in sizes:
        t = variant(case, *change)
        want = by_oracle(case["op"], reference(case), t)
        got = by_jax(case["op"], jax.jit(ours(case)), {k: jnp.asarray(v, dtype) for k, v in t.items()})
        assert got.dtype == dtype and got.shape == want.shape
        if case["op"] == "adjoint" and dtype not in (jnp.float32, jnp.int32):
            np.testing.assert_allclose(float(got), want, rtol=0.02)  # one long sum in the narrow type
        else:
            np.testing.assert_array_equal(np.asarray(got, float), want)


@pytest.mark.parametrize("kernel, stride", [(3, 3), (4, 2), (3, 1), (5, 3)])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_01_zero_padding_is_valid(kernel, stride, rank):
    """[(0, 0)] and 'VALID' agree where the kernel reaches over the stride; 04: where not, sizes differ."""
    x, w = integers((1, 2, *(2,) * rank)), integers((2, 1, *(kernel,) * rank), seed=1)
    case = plain(rank, (stride,) * rank)
    np.testing.assert_array_equal(
        ours(case, padding=((0, 0),) * rank)(x, w), ours(case, padding="VALID")(x, w)
    )


def test_01_as_reported_with_valid():
    case = CASES["01"]
    t = tensors(case)
    np.testing.assert_array_equal(ours(case, padding=case["expect"]["also_padding"])(t["x"], t["w"]),
                                  ours(case)(t["x"], t["w"]))


@pytest.mark.parametrize("size, kernel, stride", [(4, 3, 4), (3, 1, 2), (2, 2, 5)])
def test_04_valid_where_the_stride_exceeds_the_kernel(size, kernel, stride):
    """'VALID' is input * stride long, zeros of padding (input - 1) * stride + kernel; zeros come last."""
    x, w = integers((1, 1, size)), np.ones((1, 1, kernel), np.float32)
    case = CASES["04"]
    valid, zeros = (ours(case, strides=(stride,), padding=p)(x, w) for p in ("VALID", ((0, 0),)))
    assert (valid.shape[2], zeros.shape[2]) == (size * stride, (size - 1) * stride + kernel)
    np.testing.assert_array_equal(valid[..., :zeros.shape[2]], zeros)
    np.testing.assert_array_equal(valid[..., zeros.shape[2]:], 0)


@pytest.mark.parametrize("id", ["03", "04", "06"])
def test_03_04_06_strings_as_numbers(id):
    """A string and the numbers that it stands for."""
    case, t = CASES[id], tensors(CASES[id])
    resolved = dict(
        padding=case["expect"]["resolved_padding"], output_padding=case["expect"]["resolved_output_padding"]
    )
    np.testing.assert_array_equal(ours(case)(**t), ours(case, **resolved)(**t))


def test_07_upper_and_lower():
    case, t = CASES["07"], tensors(CASES["07"])
    got = ours(case, padding=case["expect"]["upper_padding"])(**t)
    np.testing.assert_array_equal(got.ravel(), case["expect"]["upper_data"])


@pytest.mark.parametrize("id", ["14", "15"])
def test_14_15_the_size_instead_of_output_padding(id):
    case, t = CASES[id], tensors(CASES[id])
    size = case["expect"]["requested_output_size"]
    np.testing.assert_array_equal(ours(case, output_shape=size)(**t), ours(case)(**t))
    for axis, (low, high) in enumerate(case["expect"].get("allowed_range", ())):
        for wrong in (low - 1, high + 1):
            with pytest.raises(ValueError, match=rf"output_shape.*{low}\D+{high}"):
                ours(case, output_shape=[wrong if i == axis else n for i, n in enumerate(size)])(**t)


@pytest.mark.parametrize("kernel", [(3,), (2, 3), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("strides", [1, 2])
def test_23_an_impulse_gives_the_kernel(kernel, strides):
    """With transpose_kernel as it is, without it mirrored."""
    rank = len(kernel)
    w = np.arange(1.0, 1 + np.prod(kernel), dtype=np.float32).reshape(1, 1, *kernel)
    space = "DHW"[:rank]
    numbers = ("NC" + space, "OI" + space, "NC" + space)
    x = np.ones((1, 1, *(1,) * rank), np.float32)
    zeros = [(0, 0)] * rank
    for flag, want in ((True, w), (False, np.flip(w, range(2, 2 + rank)))):
        got = jax_deconv.conv_transpose(x, w, (strides,) * rank, zeros, dimension_numbers=numbers,
                                        transpose_kernel=flag, use_consistent_padding=True)
        np.testing.assert_array_equal(got, want)


def test_19_shapes_without_values():
    """Abstract evaluation and execution agree with the formula, over a grid."""
    case = CASES["19"]
    x, w = (jax.ShapeDtypeStruct(case["inputs"][n]["shape"], jnp.float32) for n in "xw")
    assert list(jax.eval_shape(ours(case), x, w).shape) == case["expect"]["shape"]
    for size, kernel, stride, dilation, low, high, extra in np.random.RandomState(0).randint(
            [1, 1, 1, 1, -2, -2, 0], [9, 6, 5, 4, 3, 3, 9], (60, 7)):
        shape = (size - 1) * stride + dilation * (kernel - 1) + 1 - low - high + extra
        if shape - extra < 0:
            continue
        f = ours(case, spatial_dims=1, strides=[stride], dilation=[dilation], padding=[[low, high]],
                 output_padding=[extra])
        x = jax.ShapeDtypeStruct((2, 3, size), jnp.float32)
        assert jax.eval_shape(f, x, jax.ShapeDtypeStruct((3, 4, kernel), jnp.float32)).shape == (2, 4, shape)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32], ids=lambda t: t.__name__)
@pytest.mark.parametrize("shapes", [((0, 2, 4), (2, 3, 3)), ((2, 3, 4), (3, 0, 2)), ((0, 3, 4), (3, 0, 2)),
                                    ((2, 0, 4), (0, 3, 2))], ids=str)
def test_38_39_nothing(shapes, dtype):
    """An empty batch, no output channels, no input channels: the right shape, zeros for gradients."""
    case = CASES["38"]
    x, w = (jnp.ones(s, dtype) for s in shapes)
    bias = jnp.arange(shapes[1][1]).astype(dtype)
    f = jax.jit(ours(case))
    want = reference(case)(x, w, bias)
    np.testing.assert_array_equal(f(x, w, bias), want)
    if dtype != jnp.int32:
        gradients = jax.vjp(f, x, w, bias)[1](jnp.ones(want.shape, dtype))
        for operand, gradient in zip((x, w), gradients):
            np.testing.assert_array_equal(gradient, jnp.zeros_like(operand))
        np.testing.assert_array_equal(gradients[2], np.full(bias.shape, want[:, :1].size))


@pytest.mark.parametrize("id", ["38", "39"])
def test_38_39_as_reported(id):
    case = CASES[id]
    assert list(ours(case)(*tensors(case).values()).shape) == case["expect"]["shape"]


@pytest.mark.parametrize("size, kernel, stride, pad", [(3, 3, 1, 5), (1, 2, 4, 3), (4, 1, 2, 6)])
@pytest.mark.parametrize("rank", [1, 2])
def test_41_negative_sizes(size, kernel, stride, pad, rank):
    """An error with the numbers that lead to it."""
    case = plain(rank, (stride,) * rank, padding=((0, 0),) * (rank - 1) + ((pad, pad),))
    x, w = jnp.ones((1, 1, *(size,) * rank)), jnp.ones((1, 1, *(kernel,) * rank))
    with pytest.raises(ValueError) as caught:
        ours(case)(x, w)
    computed = (size - 1) * stride + kernel - 2 * pad
    for part in ("padding", f"{pad}", f"kernel {kernel}", f"stride {stride}", str(size), str(computed)):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "variant", CASES["42"]["expect"]["variants"] + [{"strides": [-1]}, {"dilation": [-2]}], ids=str
)
def test_42_not_positive(variant):
    case = CASES["42"]
    (name, value), = variant.items()
    with pytest.raises(ValueError) as caught:
        ours(case, **{"strides": [1]} | variant)(**tensors(case))
    argument = {"strides": "strides", "dilation": "rhs_dilation", "groups": "feature_group_count"}[name]
    assert argument in str(caught.value)
    assert str(value if isinstance(value, int) else value[0]) in str(caught.value)


@pytest.mark.parametrize("channels, groups", [(3, 2), (4, 3), (2, 4)])
def test_43_groups_that_do_not_divide(channels, groups):
    case = CASES["43"]
    w = jnp.ones((channels, 1, 3))
    with pytest.raises(ValueError) as caught:
        ours(case, groups=groups)(jnp.ones((1, channels, 4)), w)
    for part in ("groups", str(groups), str(channels), str(w.shape)):
        assert part in str(caught.value)


@pytest.mark.parametrize("types", [("float16", "float32"), ("float32", "bfloat16"), ("int8", "int32"),
                                   ("float32", "complex64")], ids=str)
def test_45_types_that_differ(types):
    """Named in the order in which they were given."""
    x, w = (jnp.ones(s, t) for s, t in zip(((1, 1, 4), (1, 1, 2)), types))
    for function in (ours(CASES["45"]), jax.jit(ours(CASES["45"]))):
        with pytest.raises(TypeError, match=".*".join(types)):
            function(x, w)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=lambda t: t.__name__)
@pytest.mark.parametrize("channels, taps, groups", [(64, 64, 1), (4096, 1, 1), (1, 4096, 1), (16, 256, 2)])
def test_49_half_precision_sums(dtype, channels, taps, groups):
    """4096 ones: float16 would stop at 2048 and bfloat16 at 256.  In the gradients too."""
    case = CASES["49"]
    pad = taps - 1
    x, w = jnp.ones((1, channels * groups, taps + 2), dtype), jnp.ones((channels * groups, 1, taps), dtype)
    f = ours(case, padding=((pad, pad),), groups=groups)
    np.testing.assert_array_equal(np.asarray(f(x, w), float), 4096)
    # <dy, w> over taps, and over batch and space in the kernel's gradient.
    x, w = jnp.ones((8, 1, 512), dtype), jnp.ones((1, channels * groups, taps), dtype)
    f = ours(case, padding=((0, 0),), groups=1)
    out, pull = jax.vjp(f, x, w)
    dx, dw = pull(jnp.ones_like(out))
    np.testing.assert_array_equal(np.asarray(dx, float), 4096 * groups)
    np.testing.assert_array_equal(np.asarray(dw, float), 4096)


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_51_full_precision_when_asked_for(rank, groups):
    """1 + 2^-12 does not fit TF32's mantissa: forward and both gradients keep it."""
    value = np.float32(1 + 2.0**-12)
    x = jnp.full((2, 4 * groups, *(5,) * rank), value)
    w = jnp.full((4 * groups, 2, *(3,) * rank), value)
    case = plain(rank, (2,) * rank, padding=((0, 0),) * rank, groups=groups)
    out, pull = jax.vjp(ours(case, precision="highest"), x, w)
    ones = jax.vjp(ours(case, precision="highest"), jnp.ones_like(x), jnp.ones_like(w))
    np.testing.assert_allclose(out, ones[0] * np.float64(value) ** 2, rtol=1e-6)
    for got, count in zip(pull(jnp.full_like(out, value)), ones[1](jnp.ones_like(out))):
        np.testing.assert_allclose(got, count * np.float64(value) ** 2, rtol=1e-6)


def test_52_the_same_bits_at_every_call():
    case = CASES["52"]
    x, w = (jnp.asarray(make(case["inputs"][n]) / 3, jnp.float32) for n in "xw")
    keywords = arguments(case)

    @jax.jit
    def f(x, w):
        out, pull = jax.vjp(lambda x, w: jax_deconv.conv_transpose(
            x, w, policy=jax_deconv.Policy(deterministic=True), **keywords), x, w)
        return out, *pull(out)

    first = f(x, w)
    for _ in range(case["expect"]["calls"]):
        for a, b in zip(first, f(x, w)):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32], ids=lambda t: t.__name__)
@pytest.mark.parametrize("kernel", [(2,), (2, 3)], ids=str)
def test_56_no_overlap_equals_the_channels(kernel, dtype):
    x, w = jnp.ones((1, 8, *(5,) * len(kernel)), dtype), jnp.ones((8, 16, *kernel), dtype)
    got = jax_deconv.conv_transpose(x, w, kernel, "VALID", dimension_numbers=lax.conv_dimension_numbers(
        x.shape, w.shape, None), transpose_kernel=True)
    np.testing.assert_array_equal(got, np.full((1, 16, *(5 * k for k in kernel)), 8))


def test_56_more_than_2_31_outputs_have_a_shape():
    """Nothing on the way to the device counts in 32 bits."""
    case = CASES["56"]
    x, w = (jax.ShapeDtypeStruct(case["inputs"][n]["shape"], jnp.float16) for n in "xw")
    assert list(jax.eval_shape(ours(case), x, w).shape) == case["expect"]["out_shape"]
    assert np.prod(case["expect"]["out_shape"], dtype=np.int64) > 2**31
    jax.jit(ours(case)).lower(x, w)


@pytest.mark.gpu
def test_56_more_than_2_31_outputs():
    case = CASES["56"]
    x, w = (jnp.ones(case["inputs"][n]["shape"], jnp.float16) for n in "xw")
    out = jax.jit(ours(case))(x, w)
    assert list(out.shape) == case["expect"]["out_shape"]
    assert bool(jnp.all(out == case["expect"]["value"]))
