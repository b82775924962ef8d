"""What is public is written down, and examples and pages use nothing else."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline

ROOT = Path(__file__).parents[2]
PACKAGES = ("paceline", "paceline_vision")  # whose own names are public
MODULES = {*PACKAGES, *paceline.PUBLIC_MODULES}


def imported(text: str) -> Iterator[str]:
    """Yield what Python code imports from Paceline, as ``module:name``, and private attributes that it reads."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline"):
            yield from (f"{node.module}:{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (f"{each.name}:" for each in node.names if each.name.startswith("paceline"))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "paceline":
            yield f"paceline:{node.attr}"


def is_public(name: str) -> bool:
    module, _, attribute = name.partition(":")
    home = sys.modules.get(module) or __import__(module, fromlist=["x"])
    return module in MODULES and (not attribute or attribute in getattr(home, "__all__", dir(home)))


def test_examples_import_public_names() -> None:
    files = sorted((ROOT / "examples").glob("*.py"))
    private = [f"{file.name}: {name}" for file in files for name in imported(file.read_text()) if not is_public(name)]
    assert files
    assert private == []


def test_pages_import_public_names(page: Callable[[Path], Any]) -> None:
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    blocks = [(path, block.text) for path in paths for block in page(path).blocks if block.language == "python"]
    private = [f"{path.name}: {name}" for path, text in blocks for name in imported(text) if not is_public(name)]
    assert len(blocks) > 5
    assert private == []


def test_the_test_sees_a_private_name() -> None:
    assert [*imported("from paceline.data.batch import Batch\nimport paceline\npaceline.loading\n")] == [
        "paceline.data.batch:Batch",
        "paceline:",
        "paceline:loading",
    ]
    assert not is_public("paceline.data.batch:Batch")
    assert not is_public("paceline:loading")
    assert is_public("paceline:evaluate")


@pytest.mark.everyday
def test_signatures_and_types_are_as_written_down() -> None:
    words = [sys.executable, str(ROOT / "scripts" / "public"), "--check"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("now", "kept"),
    [
        ("f(a, b: int = 2, *, c: str, d=<factory>, **others) -> int", True),
        ("f(a, b=1, c=2)", True),
        ("f(b=1, a=1, *, c=2)", False),
        ("f(a, *, b=1, c=2)", False),
        ("f(a, b, *, c)", False),
        ("f(a, b=1, *, c, d)", False),
        ("f(a, b=1)", False),
        ("g(a, b=1, *, c)", False),
        ("f: property", False),
    ],
)
def test_a_call_that_fitted_a_release_still_fits(now: str, kept: bool) -> None:
    broken = runpy.run_path(str(ROOT / "scripts" / "public"))["broken"]
    line = "f(a, b=1, *, c)"
    assert broken(line, now) == ([] if kept else [line])
    assert broken("key a.b = 1\ncommand a --b", "key a.b = 2\ncommand a --b") == ["key a.b = 1"]
    assert (
        broken("key data.boxes.flip = 1\ncommand environment --json", "key data.detection.flip = 1\ncommand env --json")
        == []
    )


def test_changes_since_the_last_minor_version_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    promises = runpy.run_path(str(ROOT / "scripts" / "public"))["broken_promises"]
    for name in ("ROOT", "RELEASES"):
        monkeypatch.setitem(promises.__globals__, name, tmp_path)
    for version in ("0.0.1", "0.1.0", paceline.__version__):
        (tmp_path / version).mkdir()
        (tmp_path / version / "public.txt").write_text("key a.b = 1\n")
    for line, broken in (
        ("- `a.b` is 2.", [paceline.__version__]),
        ("- `a.b.c` is 2.", ["0.1.0", paceline.__version__]),
    ):
        (tmp_path / "CHANGELOG.md").write_text(f"\n## [{paceline.__version__}]\n{line}\n## [0.1.0]\n- `a.b`\n")
        assert [each.split()[0] for each in promises("key a.b = 2\n")] == broken


def test_the_page_lists_what_is_public(page: Callable[[Path], Any]) -> None:
    prose = page(ROOT / "docs" / "stability.md").prose
    assert [name for name in (*paceline.__all__, *MODULES) if f"`{name}`" not in prose] == []
