# Copyright 2026 The jax_deconv authors
# SPDX-License-Identifier: Apache-2.0
"""The examples in the documentation run and print what they say."""

import ast
import doctest
import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples(page):
    if "jax_deconv.linen" in page.read_text():
        pytest.importorskip("flax")
    failed, _ = doctest.testfile(str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_contributing_names_every_file():
    tree = (ROOT / "CONTRIBUTING.md").read_text()
    folders = (ROOT / "jax_deconv", ROOT / "jax_deconv/compat", ROOT / "jax_deconv/lowering", ROOT / "ffi")
    files = [path for folder in folders for path in folder.iterdir()]
    named = [path.name for path in files if path.suffix in (".py", ".cc")]
    assert not [name for name in named if name not in tree and name != "__init__.py"]


def test_every_proof_of_parity_exists():
    page = (ROOT / "docs/parity.md").read_text()
    tests = re.findall(r"`(test_\w+\.py)::(\w+)`", page)
    defined = {name: {node.name for node in ast.parse((ROOT / "tests" / name).read_text()).body
                      if isinstance(node, ast.FunctionDef)} for name in {name for name, _ in tests}}
    assert not [f"{name}::{test}" for name, test in tests if test not in defined[name]]
    claims = json.loads((ROOT / "benchmarks/results/gpu_claims.json").read_text())["claims"]
    assert not [name for name in re.findall(r"`gpu_claims: (\w+)`", page) if not claims[name]["holds"]]
    rows = [line.strip("|").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    unproven = [row[0] for row in rows if "`" not in row[-1] and row[-1].strip() != "proof"]
    assert [row.strip() for row in unproven] == ["true float16: sums in float16", "operands on one GPU"]
