# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""The package as it is installed: what it loads, what it says when something is missing."""

import dataclasses
import itertools
import os
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from jax_deconv import _compat, _ffi
from jax_deconv.lowering import core, cudnn
from jax_deconv.problem import GIVEN, Axis, ConvProblem, Role

POLICY = types.SimpleNamespace(precision=None, deterministic=False, workspace_limit=None)
native = pytest.mark.skipif(_ffi.native is None, reason=f"no native module: {_ffi.available()}")


def python(*args, **env):
    """Runs a fresh interpreter on the CPU, warnings being errors."""
    return subprocess.run([sys.executable, "-W", "error", *args], capture_output=True, text=True,
                          env={**os.environ, "JAX_PLATFORMS": "cpu", **env}, timeout=300)


def problem(role=Role.X, dtype=np.float32, **kw) -> ConvProblem:
    fields = dict(N=2, G=1, C=3, K=5, geometry=(Axis(8, 4, 4, 2, 1, 1),) * 2, out_dtype=np.dtype(dtype))
    return ConvProblem(role=role, dtype=np.dtype(dtype), **{**fields, **kw})


# --- Import and registration ------------------------------------------------------------------


@native
def test_imports_without_cuda():
    """Importing loads neither CUDA nor cuDNN nor any device."""
    done = python("-c", "import jax_deconv, jax_deconv.lowering.cudnn\n"
                        "import pathlib; maps = pathlib.Path('/proc/self/maps').read_text()\n"
                        "assert 'libcudnn' not in maps and 'libcuda.so' not in maps\n"
                        "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()")
    assert done.returncode == 0, done.stderr


@native
def test_the_module_links_against_no_nvidia_library():
    libraries = subprocess.run(["ldd", _ffi.native.__file__], capture_output=True, text=True).stdout
    assert not any(name in libraries for name in ("cuda", "cudnn", "cublas", "nvrtc", "jaxlib")), libraries


@native
def test_targets():
    registrations = _ffi.native.registrations()
    assert set(registrations) == {"jax_deconv_x", "jax_deconv_y", "jax_deconv_w", "jax_deconv_kernel",
                                  "jax_deconv_time"}
    for name, stages in registrations.items():
        # Nothing at instantiation: programs compile where there is no cuDNN.
        assert set(stages) == ({"execute"} if name == "jax_deconv_time" else {"initialize", "execute"})


@native
def test_attributes_decode():
    """The call's attributes are the ones that the native module decodes.

    Registered for the CPU, a handler gets as far as asking for its stream.
    """
    code = """if True:
        import jax, numpy as np
        from jax_deconv import _ffi
        from jax_deconv.lowering import cudnn
        from jax_deconv.lowering.plan import Plan
        from tests.test_package import POLICY, problem
        from jax_deconv.problem import GIVEN, Role
        for name, stages in _ffi.native.registrations().items():
            jax.ffi.register_ffi_target(name, {"execute": stages["execute"]}, platform="cpu")
        for role in Role:
            p = problem(role)
            operands = [np.ones(p.shape(r), np.float32) for r in GIVEN[role]]
            for run in (lambda: cudnn.build(p, POLICY)(*operands),
                        lambda: cudnn.measure(p, POLICY, [Plan(engine=1, knobs=(2, 3), workspace=64), Plan()])):
                try:
                    jax.block_until_ready(run())
                except jax.errors.JaxRuntimeError as error:
                    assert "operands at: 0)" in str(error) and "platform stream" in str(error), error
                else:
                    raise AssertionError
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    done = python("-c", code, PYTHONPATH=os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    assert done.returncode == 0, done.stderr


@native
def test_missing_cudnn_says_how_to_get_it(monkeypatch):
    if any(path for name, path, _ in _ffi.native.status() if "cudnn" in name):
        pytest.skip("cuDNN is there")
    with pytest.raises(RuntimeError, match=r"libcudnn.so.9.*pip install"):
        _ffi.native.cudnn_version()
    # Without a driver programs may still be compiled for another machine; with one they may not.
    assert _ffi.available() is None
    status = [("libcuda.so.1", "/lib/libcuda.so.1", ""), ("libcudnn.so.9", "", "not found")]
    monkeypatch.setattr(_ffi, "native", types.SimpleNamespace(status=lambda: status))
    assert "pip install" in _ffi.available.__wrapped__()


def test_without_native_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_deconv._ffi_native", None)
    module, reason = _ffi._load()
    assert module is None and "pip install" in reason


def test_native_module_of_other_sources(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_deconv._ffi_native", types.SimpleNamespace(PLAN_VERSION=-1))
    module, reason = _ffi._load()
    assert module is None and "other sources" in reason and "pip install" in reason


def test_old_jax(monkeypatch):
    assert _compat.too_old() is None
    monkeypatch.setattr(jax, "__version__", "0.9.0.dev1")
    assert "pip install" in _compat.too_old()


def test_version_tuple():
    assert _compat.version_tuple("0.12.0.1") == (0, 12, 0, 1)
    assert _compat.version_tuple("0.13.0rc1") == (0, 13, 0)


# --- What cuDNN does not take -----------------------------------------------------------------


@native
@pytest.mark.parametrize("kw, reason", [
    (dict(dtype=np.int32), "int32"),
    (dict(dtype=np.complex64), "complex64"),
    (dict(out_dtype=np.dtype(np.complex64)), "complex64"),
    (dict(geometry=()), "spatial axes"),
    (dict(geometry=(Axis(4, 2, 2, 2),) * 4), "spatial axes"),
    (dict(N=0), "nothing"),
    (dict(geometry=(Axis(0, 0, 2, 2),)), "nothing"),
    (dict(geometry=(Axis(4, 2, 2, 2, 1, -9),)), "nothing"),
])
def test_why_not(kw, reason):
    assert reason in cudnn.why_not(problem(**kw), POLICY)
    assert cudnn.why_not(problem(), POLICY) is None


# --- The core of a geometry -------------------------------------------------------------------


def reads(axis: Axis) -> set:
    """All (x, y, tap) that meet."""
    return {(i * axis.stride + r * axis.dilation - axis.pad_lo, i, r)
            for i in range(axis.y_size) for r in range(axis.kernel)
            if 0 <= i * axis.stride + r * axis.dilation - axis.pad_lo < axis.x_size}


def test_core_reads_the_same():
    count = 0
    pads = (-12, -3, -1, 0, 1, 2, 4, 9)
    sizes = (0, 1, 2, 5, 9), (1, 2, 4), (1, 2, 3), (1, 2, 3, 5), (1, 2), pads
    for x, y, k, s, d, lo in itertools.product(*sizes):
        axis = Axis(x, y, k, s, d, lo)
        part = core.split_axis(axis)
        if part is None:
            assert not reads(axis), axis
            continue
        inner, pad_hi, (x_lo, x_hi), (y_lo, y_hi) = part
        assert reads(axis) == {(i + x_lo, j + y_lo, r) for i, j, r in reads(inner)}, (axis, part)
        assert (x_lo + inner.x_size + x_hi, y_lo + inner.y_size + y_hi) == (x, y)
        assert min(x_lo, x_hi, y_lo, y_hi) >= 0
        # What cuDNN wants: this padding gives this size, and is neither negative nor all of a window.
        assert 0 <= inner.pad_lo < axis.extent and 0 <= pad_hi < max(axis.extent, s), (axis, part)
        assert (inner.x_size + inner.pad_lo + pad_hi - axis.extent) // s + 1 == inner.y_size
        count += 1
    assert count > 500


def test_core_pads_symmetrically_where_it_can():
    # 8 -> 4 with k4 s2 p1 is symmetric; so is 9 -> 4, where one row of x is left over.
    for x in (8, 9):
        inner, pad_hi, *_ = core.split_axis(Axis(x, 4, 4, 2, 1, 1))
        assert inner.pad_lo == pad_hi == 1


@pytest.mark.parametrize("role", list(Role))
def test_wrap(role):
    """Cuts on the way in, zeros on the way out."""
    p = problem(role, geometry=(Axis(12, 6, 3, 2, 1, -2), Axis(7, 6, 3, 2, 1, 5)))
    part = core.split(p)
    seen = []

    def function(a, b):
        seen.extend((a.shape, b.shape))
        return jax.numpy.ones(part.problem.shape())

    out = part.wrap(function)(*(np.ones(p.shape(r), np.float32) for r in GIVEN[role]))
    assert seen == [part.problem.shape(r) for r in GIVEN[role]]
    assert out.shape == p.shape()
    assert out.sum() == np.prod(part.problem.shape())
    assert dataclasses.replace(part.problem, geometry=p.geometry) == p


# --- Doctor -----------------------------------------------------------------------------------


def test_doctor():
    done = python("-m", "jax_deconv", "doctor")
    assert done.returncode == 0, done.stderr
    for word in ("jax ", "jaxlib ", "FFI", "native module", "CUDA plugin", "libcudnn", "libcublasLt", "GPU"):
        assert word in done.stdout, done.stdout


def test_usage():
    done = python("-m", "jax_deconv", "nonsense")
    assert done.returncode == 2 and "doctor" in done.stderr
