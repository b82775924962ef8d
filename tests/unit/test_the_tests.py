"""The suite itself: tests that need an extra say so, planted bugs still fit, and a change finds its tests."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.plugins.extras import EXTRAS

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
sys.path.append(str(ROOT / "scripts"))
import affected  # noqa: E402

Function = ast.FunctionDef | ast.AsyncFunctionDef
_BROUGHT_BY_PEFT = {"accelerate", "psutil"}


def modules_that_dev_lacks() -> set[str]:
    """Import names of what `make .venv` does not install, and another extra does."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def names(extra: str) -> Iterator[str]:
        for requirement in extras[extra]:
            name, _, inner = re.split(r"[>;=]", requirement)[0].strip().partition("[")
            yield name
            if name == "paceline":
                yield from (each for part in inner.rstrip("]").split(",") for each in names(part))

    modules = {each.distribution: each.module for extra in EXTRAS for each in extra.libraries}
    lacking = {each for extra in extras for each in names(extra)} - {*names("dev")} - _BROUGHT_BY_PEFT
    return {modules.get(name, name.replace("-", "_")).split(".")[0] for name in lacking}


def unguarded(file: Path, lacking: set[str]) -> Iterator[str]:
    """Yield the imports of a test file that fail where only `dev` is installed."""
    text = file.read_text()
    if not re.search(rf"^\s*(import|from) ({'|'.join(lacking)})\b", text, re.MULTILINE):
        return
    tree, outside = ast.parse(text), TESTS / file.relative_to(TESTS).parent / "conftest.py"
    functions = [each for each in ast.walk(tree) if isinstance(each, Function)]
    shared = ast.parse(outside.read_text()).body if outside.is_file() else []
    fixtures = {each.name: ast.unparse(each) for each in (*functions, *shared) if isinstance(each, Function)}
    module = "\n".join(ast.unparse(each) for each in tree.body if not isinstance(each, Function | ast.ClassDef))
    for function in (each for each in functions if each.name.startswith("test_")):
        found = {alias.name for each in ast.walk(function) if isinstance(each, ast.Import) for alias in each.names}
        found |= {str(each.module) for each in ast.walk(function) if isinstance(each, ast.ImportFrom)}
        asked = [fixtures.get(each.arg, "") for each in function.args.args]
        guards = re.findall(r"(?:needs|importorskip)\([^)]*\)", "\n".join((module, ast.unparse(function), *asked)))
        for name in {each.split(".")[0] for each in found} & lacking:
            if not any(name in guard or "library" in guard for guard in guards):
                yield f"{file.relative_to(TESTS)}::{function.name} imports {name}: mark it needs({name!r})"


@pytest.mark.everyday
def test_what_needs_an_extra_says_so() -> None:
    """What reaches a library through our own code is found where CI runs all tests without extras (.ci/run)."""
    lacking = modules_that_dev_lacks()
    assert {"onnx", "onnxruntime", "aiohttp", "s3fs", "moto", "jupytext", "nvidia", "pyspiel"} <= lacking
    assert not {"torch", "pyarrow", "fastapi", "peft", "optuna"} & lacking
    assert [each for file in sorted(TESTS.rglob("test_*.py")) for each in unguarded(file, lacking)] == []


@pytest.mark.parametrize("guard", ["", "@pytest.mark.needs('onnxruntime')\n"])
def test_an_import_without_a_mark_is_found(guard: str) -> None:
    planted = TESTS / "unit" / "planted_import.py"
    planted.write_text(f"import pytest\n\n{guard}def test_it():\n    import onnxruntime\n")
    try:
        assert len([*unguarded(planted, {"onnxruntime"})]) == (not guard)
    finally:
        planted.unlink()


@pytest.mark.everyday
def test_every_planted_bug_fits_the_sources() -> None:
    patches = sorted((TESTS / "planted").glob("*.patch"))
    tried = (TESTS / "planted" / "RESULT.md").read_text()
    for patch in patches:
        command = ["git", "apply", "--check", str(patch)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{patch.name}: {done.stderr}"
        assert f"| {patch.stem} |" in tried, f"run scripts/planted.py {patch.stem} --write"
    promises = {each for patch in patches for each in re.findall(r"\bP\d+", patch.read_text().splitlines()[1])}
    assert {f"P{number}" for number in range(1, 14)} - promises == set()
    assert len(patches) >= 40


def test_a_changed_file_finds_its_tests() -> None:
    reached = affected.distances(TESTS / "unit" / "data" / "test_order.py")
    source = ROOT / "src" / "paceline"
    assert reached[source / "data" / "order.py"] == 1
    assert reached[source / "plan" / "epochs.py"] == 2
    assert source / "trainer" / "step.py" not in reached
    by_string = affected.imports(source / "cli" / "commands.py")
    assert {source / "cli" / "train.py", source.with_name("paceline_advisor") / "commands.py"} <= by_string
