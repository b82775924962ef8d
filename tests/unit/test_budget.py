"""`scripts/budget`: limits fall with the code, and rise only for a feature that CHANGELOG names."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "budget"
FEATURE = "A second\n  line of code."


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One package of six tokens: a docstring, a comment and an f-string, which is one token in any Python."""
    for folder in ("src/house", "scripts"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(SCRIPT, tmp_path / "scripts")
    (tmp_path / "src/house/one.py").write_text(
        '"""Not\ncounted."""\n\nname = f"{1 + 1} and {2!r}"  # nor this\nname += 1\n'
    )
    (tmp_path / "CHANGELOG.md").write_text(f"## [1]\n\n### Added\n- First.\n- {FEATURE}\n\n### Fixed\n- A fault.\n")
    (tmp_path / "CONTRIBUTING.md").write_text("<!-- size: written by scripts/budget -->\n<!-- end of size -->\n")
    (tmp_path / "scripts/budget.json").write_text('{"src/house": {"base": 100, "rises": []}}')
    return tmp_path


def budget(root: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, root / "scripts/budget", *words], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stderr == ""
    assert done.returncode == int("house:" in done.stdout or "no entry" in done.stdout)
    return done.stdout


def base(root: Path) -> int:
    return int(json.loads((root / "scripts/budget.json").read_text())["src/house"]["base"])


def test_it_falls_by_itself_and_rises_for_a_feature(repository: Path) -> None:
    budget(repository)
    assert base(repository) == 6
    assert "| `house` | 0 |" in (repository / "CONTRIBUTING.md").read_text()
    with (repository / "src/house/one.py").open("a") as file:
        file.write("name = 3\n")
    assert "src/house: 9 tokens; at most 6." in budget(repository)
    assert "no entry under Added that begins with 'A fault'" in budget(repository, "--raise", "src/house", "A fault")
    assert "at most 6." in budget(repository), "a rise that was refused must leave nothing"
    budget(repository, "--raise", "src/house", "A second line")
    budget(repository)
    (repository / "src/house/one.py").write_text("name = 3\n")
    budget(repository)
    assert base(repository) == 0
