# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""What a caller may ask of a computation beyond its value, and where the answer comes from.

A field that is ``None`` is not asked for here and is looked up further out: the call's own
``policy``, then the ambient one (`use_policy`), then the environment, then JAX's
configuration, then the default.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os

import jax
from jax import lax

_AUTOTUNE = ("off", "cached", "full")
_ALGORITHMS = ("xla", "cudnn", "phase", "dense", "depthwise", "gemm", "thin")


#: The MiB of workspace that a call may use where a policy sets no limit: XLA's own.  cuDNN proposes plans that want
#: hundreds of times as much.
_WORKSPACE_LIMIT = 4096


def _precision(value) -> lax.Precision | None:
    """The stricter of the two operands' precisions, from any spelling that lax accepts."""
    if value is None or isinstance(value, lax.Precision):
        return value
    # XLA's convolutions know no dot algorithms: lax lowers every one of them to DEFAULT.
    if isinstance(value, (lax.DotAlgorithm, lax.DotAlgorithmPreset)):
        return lax.Precision.DEFAULT
    if isinstance(value, str):
        if value in lax.DotAlgorithmPreset.__members__:
            return lax.Precision.DEFAULT
        try:
            return lax.Precision(value)
        except ValueError:
            pass
    elif isinstance(value, (tuple, list)) and len(value) == 2:
        return max(filter(None, map(_precision, value)), key=lambda p: p.value, default=None)
    raise ValueError("precision must be None, a jax.lax.Precision, its name, a pair of these or a "
                     f"jax.lax.DotAlgorithm(Preset); got {value!r}")


@dataclasses.dataclass(frozen=True)
class Policy:
    """How a convolution may be computed.

    Args:
      precision: `jax.lax.Precision`, its name, or None. DEFAULT and HIGH let float32 operands be
        rounded to TF32 on a GPU; HIGHEST never does. float16 and bfloat16 accumulate in float32
        whatever it says.
      deterministic: True asks for bitwise repeatable results: the same plan in every process, and no
        algorithm that adds in an order that changes from run to run.
      autotune: on a GPU, ``"full"`` times candidates for a problem that the tuning store does not
        hold, ``"cached"`` uses the store alone, ``"off"`` neither.
      workspace_limit: scratch memory that one call may use on a GPU, in MiB; 4096 where none is given.
      algorithm: pins the way of computing: ``"xla"``, ``"cudnn"``, ``"phase"`` and ``"dense"`` (cuDNN, with the
        stride taken out or groups merged), ``"depthwise"``, ``"gemm"`` and ``"thin"`` (kernels of ours).  An error
        where it does not apply.
      strict: True makes a fall-back to XLA on a GPU an error instead of a warning.
      backward: a `Policy` for both gradients where it differs from the forward computation's.  The
        call is then a `jax.custom_vjp`: it has no forward-mode derivative.

    Example:

    >>> import jax_deconv
    >>> jax_deconv.Policy(precision="highest").precision.name
    'HIGHEST'
    """

    precision: lax.Precision | str | tuple | None = None
    deterministic: bool | None = None
    autotune: str | None = None
    workspace_limit: int | None = None
    algorithm: str | None = None
    strict: bool | None = None
    backward: Policy | None = None

    def __post_init__(self):
        object.__setattr__(self, "precision", _precision(self.precision))
        for name in ("deterministic", "strict"):
            if not isinstance(getattr(self, name), bool | None):
                raise TypeError(f"{name} must be True, False or None; got {getattr(self, name)!r}")
        for name, allowed in (("autotune", _AUTOTUNE), ("algorithm", _ALGORITHMS)):
            if getattr(self, name) not in (None, *allowed):
                raise ValueError(f"{name} must be None or one of {allowed}; got {getattr(self, name)!r}")
        limit = self.workspace_limit
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
            raise ValueError(f"workspace_limit must be None or a number of MiB >= 0; got {limit!r}")
        if not (self.backward is None or isinstance(self.backward, Policy)):
            raise TypeError(f"backward must be None or a Policy; got {self.backward!r}")

    def over(self, outer: Policy) -> Policy:
        """This policy, with what it leaves open taken from `outer`."""
        said = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.backward is not None and outer.backward is not None:
            said["backward"] = self.backward.over(outer.backward)
        return dataclasses.replace(outer, **{name: v for name, v in said.items() if v is not None})


def workspace_bytes(policy: Policy) -> int:
    """The bytes of workspace that a policy allows a call."""
    return (_WORKSPACE_LIMIT if policy.workspace_limit is None else policy.workspace_limit) << 20


_DEFAULT = Policy(deterministic=False, autotune="full", strict=False)
_ambient = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def use_policy(policy: Policy):
    """Context manager and decorator: the policy of every call inside that does not say otherwise.

    Contexts nest; what the inner one leaves open the outer one decides.  A new thread starts without.
    Functions under `jax.jit` are traced again when it changes.

    >>> import jax, jax.numpy as jnp, jax_deconv
    >>> x, w = jnp.ones((1, 4, 3)), jnp.ones((2, 3, 5))
    >>> with jax_deconv.use_policy(jax_deconv.Policy(precision="highest")):
    ...     y = jax_deconv.conv_transpose(x, w, (2,), "SAME")
    >>> y.shape
    (1, 8, 5)
    """
    if not isinstance(policy, Policy):
        raise TypeError(f"use_policy takes a Policy; got {policy!r}")
    with _ambient(policy.over(_ambient.value or Policy())):
        yield


_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _flag(text: str) -> bool:
    try:
        return _FLAGS[text.lower()]
    except KeyError:
        raise ValueError(f"expected one of {', '.join(_FLAGS)}; got {text!r}") from None


def _from_environment() -> Policy:
    """The JAX_DECONV_* variables and the determinism that XLA_FLAGS asks for."""
    parsers = {"precision": str, "deterministic": _flag, "autotune": str, "workspace_limit": int, "algorithm": str,
               "strict": _flag}
    policy = Policy()
    for name, parse in parsers.items():
        variable = f"JAX_DECONV_{name.upper()}"
        if text := os.environ.get(variable):
            try:
                policy = Policy(**{name: parse(text)}).over(policy)
            except ValueError as error:
                raise ValueError(f"environment variable {variable}={text!r}: {error}") from error
    # JAX offers no accessor for XLA's own flag.
    flags = dict(flag.lstrip("-").partition("=")[::2] for flag in os.environ.get("XLA_FLAGS", "").split())
    asked = any(_FLAGS.get((flags.get(name, "false") or "true").lower(), False)
                for name in ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops"))
    return policy.over(Policy(deterministic=True)) if asked else policy


def _from_jax() -> Policy:
    return Policy(precision=jax.config.jax_default_matmul_precision)


def resolve(policy: Policy | None, precision=None) -> Policy:
    """The complete policy of a call: `precision` is its argument of that name, the nearest of all."""
    if not (policy is None or isinstance(policy, Policy)):
        raise TypeError(f"policy must be None or a Policy; got {policy!r}")
    resolved = Policy(precision=precision)
    for outer in (policy, _ambient.value, _from_environment(), _from_jax(), _DEFAULT):
        resolved = resolved.over(outer or Policy())
    if resolved.backward is not None:
        forward = dataclasses.replace(resolved, backward=None)
        resolved = dataclasses.replace(forward, backward=resolved.backward.over(forward))
    return resolved
