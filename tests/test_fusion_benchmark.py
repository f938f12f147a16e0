# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""The benchmark of layers with bias and activation: it runs, and what it compares is the same computation."""

import json
import os
import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).parent.parent / "benchmarks" / "fusion.py"


def test_fusion_benchmark(tmp_path):
    out = tmp_path / "fusion.json"
    # One layer has an activation with a parameter, the other has nothing of its own.
    command = [sys.executable, SCRIPT, "--tiny", "--layers", "flownets_deconv2", "convtasnet_dec", "--out", out]
    subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True)
    written = json.loads(out.read_text())
    ways = {"ours", "ours_unfused", "lax", "adj"}
    if "torch" not in written["environment"]["failures"]:
        ways |= {"torch_last", "torch_first"}
    assert [row["activation"] for row in written["rows"]] == ["leaky_relu(0.1)", "relu"]
    for row in written["rows"]:
        assert not row["failed"] and set(row["times"]) == {f"{way}/{what}" for way in ways for what in
                                                           ("forward", "step")}
        assert len(row["errors"]) == 4 and max(row["errors"].values()) < 2e-2, row["errors"]
    assert written["summary"]["wrong_values"] == []
    assert written["summary"]["ratios_to_ours"]["step"]["layers"] == 2
