"""The budget script finds what is too long, takes too much or says nothing, and counts only code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "budget"


def budget(root: Path) -> list[str]:
    words = [sys.executable, str(SCRIPT), str(root)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    lines = done.stdout.splitlines()
    assert done.returncode == (1 if lines else 0), done.stderr
    return lines


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_comments_docstrings_and_blank_lines_are_free(tmp_path: Path) -> None:
    body = '"""Doc.\n\nstring.\n"""\n' + "# why\n\n" * 600 + "x = 1\n" * 500
    write(tmp_path / "src" / "long.py", body)
    assert budget(tmp_path) == []
    write(tmp_path / "src" / "long.py", body + "x = 1\n")
    assert budget(tmp_path) == ["src/long.py: 501 code lines; at most 500"]


def test_the_loop_is_one_screen(tmp_path: Path) -> None:
    write(tmp_path / "src/paceline/trainer/loop.py", "x = 1\n" * 61)
    assert budget(tmp_path) == ["src/paceline/trainer/loop.py: 61 code lines; at most 60"]


def test_functions_are_short_and_take_little(tmp_path: Path) -> None:
    write(tmp_path / "tests" / "a.py", "def long():\n" + "    x = 1\n" * 80)
    wide = (
        "    def wide(self, a, b, c, /, d, e, f, g, *, h): ...\n    def wider(self, a, b, c, d, e, f, g, h, i): ...\n"
    )
    write(tmp_path / "tests" / "b.py", f"class A:\n{wide}")
    assert budget(tmp_path) == [
        "tests/a.py:1: long has 81 lines; at most 80",
        "tests/b.py:3: wider takes 9 parameters; at most 8, or a dataclass",
    ]


def test_names_say_something(tmp_path: Path) -> None:
    for name in ("utils/x.py", "run_manager.py", "commonplace.py"):
        write(tmp_path / "src" / name, "")
    assert [line.split(":")[0] for line in budget(tmp_path)] == ["src/run_manager.py", "src/utils/x.py"]


def test_a_notebook_may_be_long_and_its_cells_may_not(tmp_path: Path) -> None:
    """What a cell writes into a file is part of it."""
    notebook = "# %% [markdown]\n# Text\n# %%\n# %%writefile b.py\n" + "a = 0\n" * 110 + "# %%\nb = 0\n" * 450
    write(tmp_path / "src" / "1_a.py", notebook)
    assert budget(tmp_path) == []
    write(tmp_path / "src" / "1_a.py", notebook.replace("a = 0\n", "a = 0\na = 1\n", 1))
    assert budget(tmp_path) == ["src/1_a.py:3: a cell of 111 code lines; at most 110"]
