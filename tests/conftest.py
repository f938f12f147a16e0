# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""What every test needs: eight CPU devices, 64-bit types on request, and what `gpu` means.

Tests marked `gpu` are skipped where JAX has no CUDA device; with JAX_DECONV_REQUIRE_CUDNN=1 any skip
of theirs is a failure, so that a GPU machine cannot pass by skipping.
"""

import collections
import os

# Read when JAX starts its CPU client, so before anything imports it.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
    )

import jax  # noqa: E402
import pytest  # noqa: E402

REQUIRE_CUDNN = os.environ.get("JAX_DECONV_REQUIRE_CUDNN", "").lower() in ("1", "true", "yes", "on")


def has_gpu() -> bool:
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def pytest_addoption(parser):
    parser.addoption("--sample", type=int, default=1, metavar="N",
                     help="of the cases of each parametrized test run every N-th")


def pytest_collection_modifyitems(config, items):
    step = config.getoption("--sample")
    seen = collections.Counter()
    for item in list(items):
        test = item.nodeid.partition("[")[0]
        if seen[test] % step:
            items.remove(item)
        seen[test] += 1


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not has_gpu():
        pytest.skip("JAX has no CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if (
        REQUIRE_CUDNN
        and report.skipped
        and not hasattr(report, "wasxfail")
        and item.get_closest_marker("gpu")
    ):
        report.outcome = "failed"
        report.longrepr = (
            f"JAX_DECONV_REQUIRE_CUDNN is set, but {item.nodeid} was skipped: {call.excinfo.value}"
        )
    return report


# Most of the suite's time is compilation, and few tests depend on what XLA makes of a program.
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def optimized():
    """XLA's optimizations, for tests that read programs."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
