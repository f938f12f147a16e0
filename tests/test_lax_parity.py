# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""`conv_transpose` against `jax.lax.conv_transpose` itself: whatever lax accepts has lax's value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import EDGES, EMPTY, Case, integers, line, sample
from jax import lax

import jax_deconv

REAL = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)
COMPLEX = (jnp.complex64, jnp.complex128)
WHOLE = (jnp.int8, jnp.int16, jnp.int32, jnp.int64, jnp.uint8, jnp.uint16, jnp.uint32, jnp.uint64)


def name(dtype) -> str:
    return jnp.dtype(dtype).name


def as_lax_takes_it(case: Case) -> bool:
    return not {"feature_group_count", "output_padding", "output_shape"} & set(case.keywords)


def same(got, want):
    """Value, type, shape and weakness."""
    assert (got.shape, got.dtype, got.weak_type) == (want.shape, want.dtype, want.weak_type)
    np.testing.assert_array_equal(got, want)


def both(case: Case, *operands, **keywords):
    keywords = case.keywords | keywords
    # One compilation each, where eager execution has one for every step around the convolution.
    return [jax.jit(lambda x, w, f=f: f(x, w, *case.positional, **keywords))(*operands)
            for f in (jax_deconv.conv_transpose, lax.conv_transpose)]


def verdict(function, *args, **keywords):
    """The shape that a function gives its result, or the exception that it raises."""
    try:
        return jax.eval_shape(lambda *a: function(*a, **keywords), *args).shape
    except (ValueError, TypeError) as error:
        return type(error)


# ---- geometry ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cases", [pytest.param(cases, id="k{}-s{}-d{}".format(*axis)) for axis, cases in line()]
)
def test_every_combination_on_one_axis(cases):
    """Padding of every form x transpose_kernel x use_consistent_padding, compiled as one program."""
    taken, operands = [], []
    for case in cases:
        abstract = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (case.lhs_shape, case.rhs_shape)]
        shape = verdict(lambda x, w: lax.conv_transpose(x, w, *case.positional, **case.keywords), *abstract)
        if isinstance(shape, tuple):
            taken.append(case)
            operands.append(case.operands())
        else:  # what lax refuses is refused
            with pytest.raises(ValueError, match="padding"):
                jax.eval_shape(
                    lambda x, w: jax_deconv.conv_transpose(x, w, *case.positional, **case.keywords), *abstract
                )
    assert len(taken) > 10

    got, want = (jax.jit(lambda pairs, f=f: [f(*pair, *case.positional, **case.keywords)
                                             for case, pair in zip(taken, pairs)])(operands)
                 for f in (jax_deconv.conv_transpose, lax.conv_transpose))
    for case, a, b in zip(taken, got, want):
        assert a.shape == b.shape, str(case)
        np.testing.assert_array_equal(a, b, err_msg=str(case))


@pytest.mark.parametrize("case", [*sample(2, 40), *sample(3, 15), *sample(4, 3, batch=1, inputs=2)], ids=str)
def test_random_geometry(case):
    same(*both(case, *map(jnp.asarray, case.operands())))


@pytest.mark.parametrize("edge", [k for k, case in EDGES.items() if as_lax_takes_it(case)])
def test_edge(edge):
    case = EDGES[edge]
    same(*both(case, *map(jnp.asarray, case.operands())))


@pytest.mark.parametrize("edge", [k for k, case in EMPTY.items() if as_lax_takes_it(case)])
def test_empty(edge):
    case = EMPTY[edge]
    same(*both(case, *map(jnp.asarray, case.operands())))


@pytest.mark.parametrize(
    "pads", [((0, 0),), ((1, 0),), ((-1, -1),), ((2, 2),), ((-5, 9),), ((9, -5),)], ids=str
)
@pytest.mark.parametrize("size, kernel, stride", [(1, 4, 1), (1, 1, 3), (3, 5, 2), (5, 2, 4)])
def test_short_inputs_and_deep_crops(pads, size, kernel, stride):
    """Outputs of size zero, and the point from which lax refuses, in both meanings of padding."""
    for consistent in (False, True):
        case = Case((size,), (kernel,), (stride,), pads, batch=1, inputs=1, outputs=1, consistent=consistent)
        x, w = map(jnp.asarray, case.operands())
        ours, theirs = (verdict(f, x, w, strides=case.strides, padding=case.padding, **case.keywords)
                        for f in (jax_deconv.conv_transpose, lax.conv_transpose))
        assert ours == theirs
        if isinstance(theirs, tuple):
            same(*both(case, x, w))


@pytest.mark.parametrize("rank", range(4))
def test_default_dimension_numbers(rank):
    case = Case((3, 2, 2)[:rank], (2, 3, 1)[:rank], (2, 2, 3)[:rank])
    x, w = map(jnp.asarray, case.operands())
    for transposed in (False, True):
        kernel = w.swapaxes(-1, -2) if transposed else w
        arguments = (x, kernel, case.strides, "SAME")
        same(jax_deconv.conv_transpose(*arguments, transpose_kernel=transposed),
             lax.conv_transpose(*arguments, transpose_kernel=transposed))


def test_no_default_dimension_numbers_beyond_three_axes():
    x, w = jnp.ones((1, 2, 2, 2, 2, 1)), jnp.ones((1, 1, 1, 1, 1, 1))
    with pytest.raises(ValueError, match="dimension_numbers"):
        jax_deconv.conv_transpose(x, w, (1,) * 4, "SAME")


@pytest.mark.parametrize("numbers", [
    ("NHWC", "HWIO", "NHWC"), ["NHWC", "HWIO", "NHWC"], ("NCWH", "IHOW", "CHNW"), ("N01C", "10OI", "C1N0"),
    lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2)),
    lax.ConvDimensionNumbers((0, 3, 2, 1), (3, 2, 0, 1), (1, 2, 3, 0)),
], ids=str)
def test_forms_of_dimension_numbers(numbers):
    spec = numbers if isinstance(numbers, lax.ConvDimensionNumbers) else lax.conv_dimension_numbers(
        (1,) * 4, (1,) * 4, numbers)

    def placed(sizes, axes):
        shape = dict(zip(axes, sizes))
        return integers([shape[i] for i in range(4)])

    x, w = placed((2, 3, 3, 2), spec.lhs_spec), placed((4, 3, 2, 3), spec.rhs_spec)
    for transposed in (False, True):
        kernel = w.swapaxes(spec.rhs_spec[0], spec.rhs_spec[1]) if transposed else w
        arguments = (jnp.asarray(x), jnp.asarray(kernel), (2, 1), "SAME", (1, 2), numbers, transposed)
        same(jax_deconv.conv_transpose(*arguments), lax.conv_transpose(*arguments))


# ---- the forms in which arguments come -----------------------------------------------------------------


@pytest.mark.parametrize("padding", [
    "SAME", "VALID", [(1, 2), (0, 1)], [[1, 2], [0, 1]], ((1, 2), (0, 1)), ([-1, 2], (0, 1)),
    np.array([[1, 2], [0, 1]]), [(np.int32(1), np.int64(2)), (0, True)],
], ids=repr)
@pytest.mark.parametrize("strides", [(2, 1), [2, 1], np.array([2, 1]), (np.int32(2), True)], ids=repr)
def test_forms_of_padding_and_strides(padding, strides):
    x, w = jnp.asarray(integers((1, 3, 2, 2))), jnp.asarray(integers((2, 3, 2, 1), seed=1))
    same(jax_deconv.conv_transpose(x, w, strides, padding), lax.conv_transpose(x, w, strides, padding))


@pytest.mark.parametrize(
    "padding", [["SAME", "VALID"], ("VALID", (1, 2)), [(0, 1), "SAME"], [(1, 2), (0, 1)]], ids=repr
)
def test_padding_an_axis_at_a_time(padding):
    """use_consistent_padding lets lax read each axis by itself, strings too."""
    x, w = jnp.asarray(integers((1, 3, 2, 2))), jnp.asarray(integers((2, 3, 2, 1), seed=1))
    arguments = (x, w, (2, 3), padding)
    same(jax_deconv.conv_transpose(*arguments, use_consistent_padding=True),
         lax.conv_transpose(*arguments, use_consistent_padding=True))


@pytest.mark.parametrize("padding", ["same", "valid", "Same", "SAME_LOWER", "same_lower"])
@pytest.mark.parametrize("kernel", [3, 4])
def test_spellings_that_lax_takes_only_without_stride(padding, kernel):
    """There they mean the padding of the input, as in conv_general_dilated; elsewhere they are refused."""
    x, w = jnp.asarray(integers((1, 5, 2))), jnp.asarray(integers((kernel, 2, 1), seed=1))
    same(jax_deconv.conv_transpose(x, w, (1,), padding, (2,)), lax.conv_transpose(x, w, (1,), padding, (2,)))
    for strides, consistent in [((2,), False), ((1,), True), ((2,), True)]:
        for function in (lax.conv_transpose, jax_deconv.conv_transpose):
            with pytest.raises(ValueError):
                function(x, w, strides, padding, use_consistent_padding=consistent)


def test_everything_positional():
    x, w = jnp.asarray(integers((1, 3, 2))), jnp.asarray(integers((2, 2, 3), seed=1))
    arguments = (
        x, w, (2,), [(1, 0)], (2,), ("NHC", "HOI", "NHC"), True, lax.Precision.HIGHEST, jnp.float32,
        True,
    )
    w = w.swapaxes(1, 2)
    same(jax_deconv.conv_transpose(*arguments), lax.conv_transpose(*arguments))


def test_numpy_operands():
    x, w = integers((1, 3, 2)), integers((2, 2, 3), seed=1)
    same(jax_deconv.conv_transpose(x, w, (2,), "SAME"), lax.conv_transpose(x, w, (2,), "SAME"))


@pytest.mark.parametrize(
    "precision",
    [
        None,
        "default",
        "high",
        "highest",
        "float32",
        "bfloat16",
        "tensorfloat32",
        "bfloat16_3x",
        "fastest",
        lax.Precision.DEFAULT,
        lax.Precision.HIGHEST,
        (lax.Precision.HIGH, lax.Precision.DEFAULT),
        ("high", "highest"),
        lax.DotAlgorithmPreset.F32_F32_F32,
        "F32_F32_F32",
    ],
    ids=repr,
)
def test_precision_is_taken_as_lax_takes_it(precision):
    x, w = jnp.asarray(integers((1, 3, 2))), jnp.asarray(integers((2, 2, 3), seed=1))
    same(jax_deconv.conv_transpose(x, w, (2,), "SAME", precision=precision),
         lax.conv_transpose(x, w, (2,), "SAME", precision=precision))


# ---- types ---------------------------------------------------------------------------------------------

TYPED = [
    Case((3, 2), (3, 2), (2, 1), ((1, 2), (0, 1)), inputs=2),
    Case((3,), (2,), (3,), "VALID", transpose_kernel=True, layout="first"),
]


@pytest.mark.parametrize("dtype", REAL + COMPLEX + WHOLE, ids=name)
def test_types(dtype, x64):
    for case in TYPED:
        same(*both(case, *map(jnp.asarray, case.operands(dtype))))


@pytest.mark.parametrize(
    "dtype", [jnp.bool_, jnp.int4, jnp.uint4, jnp.float8_e4m3fn, jnp.float8_e5m2], ids=name
)
def test_types_of_few_bits(dtype):
    case = TYPED[0]
    x, w = (jnp.asarray(a).astype(dtype) for a in case.operands())
    got, want = both(case, x, w)
    same(got.astype(jnp.float32), want.astype(jnp.float32))
    assert got.dtype == want.dtype


@pytest.mark.parametrize("dtype", WHOLE, ids=name)
def test_integers_wrap(dtype, x64):
    case = TYPED[0]
    info = jnp.iinfo(dtype)
    x = np.random.RandomState(0).randint(info.min, info.max, case.lhs_shape, dtype)
    w = np.random.RandomState(1).randint(info.min, info.max, case.rhs_shape, dtype)
    same(*both(case, jnp.asarray(x), jnp.asarray(w)))


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.float64) + COMPLEX, ids=name)
def test_fractions(dtype, x64):
    case = TYPED[0]
    rng = np.random.RandomState(0)
    x, w = (rng.standard_normal(s) + (1j * rng.standard_normal(s) if dtype in COMPLEX else 0)
            for s in (case.lhs_shape, case.rhs_shape))
    got, want = both(case, jnp.asarray(x, dtype), jnp.asarray(w, dtype))
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(got, want, rtol=20 * eps, atol=20 * eps)


@pytest.mark.parametrize("weak", [(False, False), (False, True), (True, False), (True, True)], ids=str)
def test_weak_types(weak):
    case = Case((3,), (2,), (2,), inputs=2)
    x, w = (
        lax.full(shape, 2.0 if w else np.float32(2))
        for shape, w in zip((case.lhs_shape, case.rhs_shape), weak)
    )
    assert (x.weak_type, w.weak_type) == weak
    ours, theirs = (jax.vjp(lambda x, w: f(x, w, *case.positional), x, w)
                    for f in (jax_deconv.conv_transpose, lax.conv_transpose))
    same(ours[0], theirs[0])
    for got, want in zip(ours[1](ours[0]), theirs[1](theirs[0])):
        same(got, want)


@pytest.mark.parametrize(
    "dtype, wanted",
    [
        (jnp.bfloat16, jnp.float32),
        (jnp.float16, jnp.float32),
        (jnp.float32, jnp.float64),
        (jnp.bfloat16, jnp.bfloat16),
        (jnp.bfloat16, jnp.float64),
        (jnp.complex64, jnp.complex128),
        (jnp.int8, jnp.int32),
        (jnp.int16, jnp.int64),
        (jnp.uint8, jnp.uint32), (jnp.uint8, jnp.int32),
        (jnp.int8, jnp.float32),
        (jnp.float32, "float64"),
        (jnp.float32, float),
        (jnp.bfloat16, jnp.float16),
    ],
    ids=lambda t: t if isinstance(t, str) else name(t),
)
def test_preferred_element_type(dtype, wanted, x64):
    """The result's type, and gradients in the operands' own (where there are any)."""
    case = TYPED[0]
    x, w = map(jnp.asarray, case.operands(dtype))
    same(*both(case, x, w, preferred_element_type=wanted))
    if jnp.issubdtype(dtype, jnp.inexact):
        ours, theirs = (jax.vjp(lambda x, w: f(x, w, *case.positional, preferred_element_type=wanted), x, w)
                        for f in (jax_deconv.conv_transpose, lax.conv_transpose))
        cotangent = jnp.asarray(integers(ours[0].shape, ours[0].dtype, 2))
        for got, want, operand in zip(ours[1](cotangent), theirs[1](cotangent), (x, w)):
            assert got.dtype == operand.dtype
            same(got, want)


@pytest.mark.parametrize("dtype, wanted", [
    (jnp.float32, jnp.float16), (jnp.float32, jnp.int32), (jnp.float32, jnp.complex64), (jnp.int8, jnp.uint8),
    (jnp.int32, jnp.int8), (jnp.complex64, jnp.float32),
], ids=name)
def test_preferred_element_types_that_lax_refuses(dtype, wanted):
    case = TYPED[0]
    x, w = map(jnp.asarray, case.operands(dtype))
    with pytest.raises(TypeError):
        lax.conv_transpose(x, w, *case.positional, preferred_element_type=wanted)
    with pytest.raises(TypeError, match="preferred_element_type"):
        jax_deconv.conv_transpose(x, w, *case.positional, preferred_element_type=wanted)


@pytest.mark.parametrize("dtype", WHOLE[:3], ids=name)
def test_integer_operands_have_float0_tangents(dtype):
    case = TYPED[1]
    x, w = map(jnp.asarray, case.operands(dtype))
    tangents = tuple(np.zeros(a.shape, jax.dtypes.float0) for a in (x, w))
    out, tangent = jax.jvp(lambda x, w: jax_deconv.conv_transpose(x, w, *case.positional), (x, w), tangents)
    assert tangent.dtype == jax.dtypes.float0 and tangent.shape == out.shape


# ---- gradients -----------------------------------------------------------------------------------------


def gradients(function, case, x, w, cotangent):
    out, pull = jax.vjp(lambda x, w: function(x, w, *case.positional, **case.keywords), x, w)
    push = jax.jvp(lambda x, w: function(x, w, *case.positional, **case.keywords), (x, w), (x, w))[1]
    return (*pull(cotangent(out)), push)


@pytest.mark.parametrize("case", [*sample(1, 8, 1), *sample(2, 12, 1), *sample(3, 4, 1)], ids=str)
def test_gradients(case):
    def cotangent(out):
        return jnp.arange(out.size, dtype=out.dtype).reshape(out.shape) % 5 - 2

    x, w = map(jnp.asarray, case.operands())
    ours, theirs = (jax.jit(gradients, static_argnums=(0, 1, 4))(f, case, x, w, cotangent)
                    for f in (jax_deconv.conv_transpose, lax.conv_transpose))
    # <f(x, w), c> is <x, dx> and <w, dw>.  Not so for one of lax's gradients with JAX 0.10.2 on the CPU.
    inner = float(jnp.vdot(cotangent(ours[2]), ours[2])) / 2
    for got, want, operand in zip(ours, theirs, (x, w, None)):
        if operand is not None:
            assert float(jnp.vdot(operand, got)) == inner
            if float(jnp.vdot(operand, want)) != inner:
                continue
        same(got, want)


@pytest.mark.parametrize("dtype", (jnp.float16, jnp.bfloat16, jnp.float64) + COMPLEX, ids=name)
def test_gradients_of_types(dtype, x64):
    case = TYPED[1]
    x, w = map(jnp.asarray, case.operands(dtype))
    ours, theirs = (jax.jit(gradients, static_argnums=(0, 1, 4))(
        f, case, x, w, lambda out: jnp.asarray(integers(out.shape, dtype, 2)))
        for f in (jax_deconv.conv_transpose, lax.conv_transpose))
    for got, want in zip(ours, theirs):
        same(got, want)


# ---- plain convolution ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "padding", ["SAME", "SAME_LOWER", "VALID", "same", ((1, 2), (0, -1)), ((-1, 0), (3, 3))], ids=repr
)
@pytest.mark.parametrize(
    "strides, dilation, groups",
    [((1, 1), None, 1), ((2, 3), None, 2), ((2, 1), (1, 2), 1), ((1, 2), (3, 1), 3)],
    ids=repr,
)
def test_conv_is_conv_general_dilated(padding, strides, dilation, groups):
    x, w = jnp.asarray(integers((2, 2 * groups, 7, 6))), jnp.asarray(integers((3 * groups, 2, 2, 3), seed=1))
    same(jax_deconv.conv(x, w, strides, padding, dilation, feature_group_count=groups),
         lax.conv_general_dilated(x, w, strides, padding, rhs_dilation=dilation, feature_group_count=groups))


@pytest.mark.parametrize("rank", range(5))
@pytest.mark.parametrize("layout", ["first", "last", "mixed"])
def test_conv_in_any_layout(rank, layout):
    case = Case((4, 5, 3, 4)[:rank], (2, 3, 2, 1)[:rank], (2, 1, 2, 3)[:rank], layout=layout, groups=2)
    x, w = map(jnp.asarray, case.operands())
    numbers = case.dimension_numbers
    same(
        jax_deconv.conv(x, w, case.strides, "SAME", dimension_numbers=numbers, feature_group_count=2),
        lax.conv_general_dilated(
            x, w, case.strides, "SAME", dimension_numbers=numbers, feature_group_count=2
        ),
    )


@pytest.mark.parametrize("dtype", REAL + COMPLEX + WHOLE, ids=name)
def test_conv_types_and_gradients(dtype, x64):
    x, w = jnp.asarray(integers((2, 2, 6), dtype)), jnp.asarray(integers((3, 2, 3), dtype, 1))
    functions = [lambda x, w: jax_deconv.conv(x, w, (2,), [(1, 0)]),
                 lambda x, w: lax.conv_general_dilated(x, w, (2,), [(1, 0)])]
    if not jnp.issubdtype(dtype, jnp.inexact):
        same(*(f(x, w) for f in functions))
        return
    (ours, our_pull), (theirs, their_pull) = (jax.vjp(f, x, w) for f in functions)
    same(ours, theirs)
    for got, want in zip(our_pull(ours), their_pull(theirs)):
        same(got, want)
