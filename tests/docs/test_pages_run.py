"""What the pages show is what happens: every block they mark is run, in a scratch directory of the page's own."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fork_server
import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
RUNNING = [path for path in PAGES if "<!-- runs -->" in path.read_text(encoding="utf-8")]
MARK = "\x1e"
# Those that take more than about eight seconds of the processor, but for your-images and predict-and-serve.
LONG = (
    "batch-size.md", "bench.md", "course.md", "datasets.md", "doctor.md", "export.md", "find-lr.md", "kubernetes.md",
    "memory.md", "migrate.md", "own-code.md", "packing.md", "prove.md", "recipes.md", "recommendation.md",
    "replay.md", "scaling.md", "several-processes.md", "stop-and-resume.md", "tutorial.md", "watching.md",
    "where-time-goes.md",
)  # fmt: skip
# Pages whose commands need a library of an extra.
NEEDS = {"course.md": "jupytext", "export.md": "onnxruntime"}
LONG_MARKS = (pytest.mark.thorough, pytest.mark.timeout(900))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A directory with a folder of pictures of two classes, as the pages say."""
    draws = np.random.default_rng(0)
    for label, colour in {"cat": (200, 80, 60), "dog": (60, 80, 200)}.items():
        folder = tmp_path / "photos" / label
        folder.mkdir(parents=True)
        for number in range(20):
            height, width = draws.integers(24, 40, 2)
            pixels = draws.integers(0, 50, (height, width, 3)) + np.array(colour)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:03}.jpg")
    return tmp_path


@pytest.fixture
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """An environment in which ``paceline`` is this checkout's; it and ``python`` are forked from a warm server."""
    folder = tmp_path_factory.mktemp("bin")
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    inherited = {key: value for key, value in os.environ.items() if key not in launched}
    with fork_server.commands_for_shells(folder, {"paceline": ["-m", "paceline"], "python": []}):
        yield inherited | {
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "TERM": "dumb",
        }


def steps_of(page: Any, scratch: Path) -> Iterator[tuple[str, Any]]:
    """Write the page's files, and yield (shell command, what the page says of it or None) in order."""
    for block in page.blocks:
        file = scratch / block.notes["file"] if "file" in block.notes else None
        if file is not None:
            file.write_text(block.text, encoding="utf-8")
        if block.runs and block.language == "console":
            for command in block.commands:
                yield command.text, command
        elif block.runs:
            assert block.language == "python", f"{page.path}:{block.line}: cannot run {block.language}"
            script = file or scratch / f"block_{block.line}.py"
            script.write_text(block.text, encoding="utf-8")
            yield f"python {shlex.quote(str(script))}", None


def run_all(commands: list[str], folder: Path, environment: dict[str, str]) -> list[tuple[str, int]]:
    """Run commands in one shell, so that its variables last; return (output, exit code) of each."""
    lines = ["exec 2>&1"]
    for command in commands:
        lines += [f"printf '{MARK}'", command, f"printf '{MARK}%d' $?"]
    shell = shutil.which("bash")
    assert shell is not None
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    words = [shell, "-c", "\n".join(lines)]
    # pytest's own time is shorter, but for pages that take long
    done = subprocess.run(words, cwd=folder, env=environment, **streams, text=True, check=False, timeout=800)
    parts = done.stdout.split(MARK)[1:]
    return list(zip(parts[::2], map(int, parts[1::2]), strict=True))


def marks_of(path: Path) -> tuple[pytest.MarkDecorator, ...]:
    """What pytest is to know of a page."""
    needed = NEEDS.get(path.name)
    if needed is not None and find_spec(needed) is None:
        return (pytest.mark.skip(reason=f"needs {needed}, which an extra brings"),)
    return LONG_MARKS if path.name in LONG else ()


@pytest.mark.slow
@pytest.mark.parametrize("path", [pytest.param(path, marks=marks_of(path)) for path in RUNNING], ids=name)
def test_marked_blocks_do_what_the_page_says(path: Path, page: Any, scratch: Path, environment: Any) -> None:
    steps = list(steps_of(page(path), scratch))
    results = run_all([command for command, _ in steps], scratch, environment)
    for (command, said), (output, code) in zip(steps, results, strict=True):
        shown = "".join(f"{line.rstrip()}\n" for line in output.splitlines() if line.strip())
        context = f"{name(path)}\n$ {command}\n{shown}[exit code {code}]"
        assert code == (said.exit_code if said else 0), context
        if said and said.pattern is not None:
            wanted = "\n".join(said.output)
            assert re.fullmatch(said.pattern, shown), f"{context}\n\nbut the page says:\n{wanted}"


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_python_blocks_compile(path: Path, page: Callable[[Path], Any]) -> None:
    for block in page(path).blocks:
        if block.language == "python":
            compile(block.text, f"{path}:{block.line}", "exec")
