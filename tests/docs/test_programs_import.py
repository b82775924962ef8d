"""Benchmarks, examples and notebooks import what exists: few other tests run them after a name has changed."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(
    [*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("examples/*.py"), *ROOT.glob("src/paceline_course/notebooks/*.py")]
)


@pytest.mark.everyday
def test_what_programs_import_from_the_packages_is_there() -> None:
    missing = []
    for path in PROGRAMS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline"):
                module = importlib.import_module(node.module or "")
                for name in node.names:
                    if not hasattr(module, name.name):
                        try:
                            importlib.import_module(f"{node.module}.{name.name}")
                        except ImportError:
                            missing.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.module}.{name.name}")
    assert missing == []
