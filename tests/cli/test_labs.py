"""`paceline labs`: listing, starting, checking, slides and grading, and messages about mistakes."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import fork_server
import pytest
from calls import Call

pytestmark = pytest.mark.needs("jupytext")


ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src"


def test_list(paceline_here: Call, tmp_path: Path) -> None:
    shown = paceline_here("labs", "list").ended(0)
    assert shown.out.splitlines()[0].split() == ["lab", "title", "minutes", "exercises", "started", "here"]
    listed = paceline_here("labs", "list", "--json").document
    assert listed[0]["number"] == "1"
    assert set(listed[0]) == {"number", "title", "minutes", "exercises", "slides", "started"}
    assert not any(each["started"] for each in listed)
    assert paceline_here("labs", "start", "1", "--json").code == 0
    assert paceline_here("labs", "list", "--json").document[0]["started"]


def test_start_once_and_check(paceline_here: Call, tmp_path: Path) -> None:
    started = paceline_here("labs", "start", "1", "mine").ended(0)
    (notebook,) = (tmp_path / "mine").glob("*.ipynb")
    assert f"paceline labs check 1 mine/{notebook.name}" in started.out
    assert f"jupyter lab mine/{notebook.name}" in started.out
    before = notebook.read_bytes()
    paceline_here("labs", "start", "1", "mine").refused("exists already and may contain your work")
    assert notebook.read_bytes() == before
    elsewhere = paceline_here("labs", "check", "1")
    assert elsewhere.code == 2
    assert (
        f"is no {notebook.name} here; name your notebook: `paceline labs check 1 mine/{notebook.name}`" in elsewhere.err
    )
    assert paceline_here("labs", "list", "--json").document[0]["started"]
    checked = paceline_here("labs", "check", "1", notebook).ended(1)
    assert checked.out.startswith("1.1  not yet: ")
    assert " 0 of " in f" {checked.out.splitlines()[-1]}"
    document = paceline_here("labs", "check", "1", notebook, "--json").document
    assert (document["lab"], document["done"]) == ("1", 0)
    assert set(document["exercises"][0]) == {"name", "done", "missing"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("start", "77"), "there is no lab '77'"),
        (("check", "1", "gone.ipynb"), "'gone.ipynb' cannot be read (No such file or directory)"),
        (("check", "1", "notes.txt"), "must end in .ipynb or .py"),
        (("check", "1", "broken.ipynb"), "'broken.ipynb' is not a valid notebook"),
        (("check", "1", "other.py"), "has no exercise of lab 1"),
        (("check", "1", "--seconds", "nan"), "not a finite number"),
        (("slides", "1", "--output", "a.pdf"), "'a.pdf' must end in .md or .html"),
        (("slides", "1", "--output", "a.html", "--marp", "/nowhere/marp"), "npm install --global @marp-team/marp-cli"),
        (("slides", "1", "--output", "gone/a.md"), "there is no folder 'gone'"),
        (("grade", "gone.py"), "there is no file 'gone.py'"),
        (("nonsense",), "nonsense"),
    ],
)
def test_mistakes(paceline_here: Call, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "broken.ipynb").write_text("{")
    (tmp_path / "other.py").write_text("print(1)\n")
    assert len(paceline_here("labs", *words).refused(message).err.strip().splitlines()) == 1


def test_without_the_extra(tmp_path: Path) -> None:
    extra = ("IPython", "jupyterlab", "jupytext", "matplotlib", "nbclient", "nbformat", "psutil")
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({extra}))\n"
        "from paceline.cli.main import run; sys.exit(run(sys.argv[1:]))"
    )
    (tmp_path / "mine.py").touch()

    def labs(*arguments: str) -> subprocess.CompletedProcess[str]:
        return fork_server.run(
            [sys.executable, "-c", program, "labs", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(SOURCES)},
            capture_output=True,
            text=True,
            timeout=100,
        )

    listed = labs("list")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert "Data parallelism, step by step" in listed.stdout
    for words in (("start", "1"), ("check", "1", "mine.py"), ("slides", "1", "--output", "1.md")):
        done = labs(*words)
        assert done.returncode == 2, words
        assert done.stderr.endswith("install it with: pip install 'paceline[labs]'\n"), words
        assert done.stderr.count("\n") == 1, words


@pytest.mark.parametrize(("options", "opens"), [((), True), (("--no-open",), False)])
def test_start_opens_jupyter_on_a_terminal(tmp_path: Path, options: tuple[str, ...], opens: bool) -> None:
    """A stand-in for jupyterlab prints its arguments: a real server would not end."""
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / "jupyterlab.py").write_text("import sys\nprint('OPENED', *sys.argv[1:])\n")
    above, below = pty.openpty()
    process = fork_server.Popen(
        [sys.executable, "-m", "paceline", "labs", "start", "1", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path / 'found'}{os.pathsep}{SOURCES}", "TERM": "dumb"},
        stdin=subprocess.DEVNULL,
        stdout=below,
        stderr=subprocess.PIPE,
    )
    _, errors = process.communicate(timeout=100)
    os.close(below)
    shown = os.read(above, 10000).decode()
    os.close(above)
    assert process.returncode == 0, errors
    (notebook,) = tmp_path.glob("*.ipynb")
    assert (f"OPENED {notebook.name}" in shown) == opens


def test_reference_program_passes(paceline: Call) -> None:
    reference = SOURCES / "paceline_course" / "notebooks" / "instructor" / "reference.py"
    assert paceline("labs", "grade", reference, timeout=280).ended(0).out.splitlines()[-1] == "Passed."


def test_lost_points_have_reasons(paceline: Call, tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("pass\n")
    wrong = paceline("labs", "grade", "empty.py", "--json", timeout=280)
    marks = wrong.document
    assert (wrong.code, marks["passed"], marks["file"]) == (1, False, "empty.py")
    assert all(one["reason"] for one in marks["criteria"] if one["points"] < one["most"])


@pytest.mark.slow
def test_slides(paceline: Call, tmp_path: Path) -> None:
    """Run the whole command on a very short lab."""
    pytest.importorskip("nbclient", reason="needs nbclient")
    ignored = shutil.ignore_patterns("__pycache__", "notebooks")
    shutil.copytree(SOURCES, tmp_path / "src", ignore=ignored)
    notebooks = tmp_path / "src" / "paceline_course" / "notebooks"
    notebooks.mkdir()
    (notebooks / "1_small.py").write_text(
        '# %% [markdown] tags=["slide"]\n# # Lab 1: Small\n\n# %% tags=["slide"]\nprint("shown", 6 * 7)\n'
    )
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "labs", "slides", "1", "--output", "small.md"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": "src"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert (done.returncode, done.stdout) == (0, "small.md: 1 slide\n"), done.stderr
    assert "# Lab 1: Small" in (tmp_path / "small.md").read_text()
    assert "shown 42" in (tmp_path / "small.md").read_text()
