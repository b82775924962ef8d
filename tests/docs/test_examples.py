"""Every example runs, reaches the number it asserts, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import fork_server
import pytest

ROOT = Path(__file__).parents[2]
OWN = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def evening(script: str, size: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script of commands, which leaves nothing behind."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    own = {**OWN, "PATH": path, "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder)}
    words = ["bash", str(ROOT / "examples" / script), size]
    done = subprocess.run(words, env=own, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(folder.glob("tmp.*")) == []
    return done


@pytest.mark.thorough
def test_the_first_evening_comes_to_scores_for_each_class(tmp_path: Path) -> None:
    done = evening("first_evening.sh", "80", tmp_path)
    assert done.stdout.count("\n$ paceline ") == 6
    assert "passed: 5 breaks, moved away, 3 spoils, moved away" in done.stdout
    assert re.search(r"^arrow_up +4 ", done.stdout, re.MULTILINE)


@pytest.mark.thorough
@pytest.mark.needs("onnxruntime", "onnxscript", "pycocotools")
def test_the_second_evening_reviews_labels_and_shares_the_network(tmp_path: Path) -> None:
    done = evening("second_evening.sh", "20", tmp_path)
    assert done.stdout.count("\n$ paceline ") == 12
    assert "3 breaks, moved away" in done.stdout
    # A picture's name says what was drawn.
    assert re.search(r"^train/\w+/(\w+)-\d+\.png: \1, wrong with \d+ %$", done.stdout, re.MULTILINE)
    assert re.search(r"^new\.jpg  (\w+ [\d.]+ %  ){2}\w+ [\d.]+ %$", done.stdout, re.MULTILINE)
    before, after = re.findall(r"([\d.]+) % with", done.stdout.splitlines()[-1])
    assert float(after) > 60, before


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_reaches_its_number(path: Path, tmp_path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    # Warnings of libraries of other projects are theirs.
    strict = () if "This example needs" in source else ("-W", "error")
    own = {
        **OWN,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]),
    }
    words = [sys.executable, *strict, str(path)]
    done = fork_server.run(words, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    if done.stdout.startswith("This example needs"):
        pytest.skip(done.stdout.strip())
    assert re.search(r"\d", done.stdout)
    if path.stem.startswith("from_") and find_spec(path.stem.removeprefix("from_")):
        # A loop that was ported was held to the original, by the library itself.
        assert "differ by at most" in done.stdout
    assert list(tmp_path.iterdir()) == []
    assert re.search(r"^    assert \w+ [<>] [\d.]+, f?\"expected", source, re.MULTILINE)


@pytest.mark.thorough
@pytest.mark.needs("nbclient", "nbformat", "ipykernel", "pandas")
def test_the_notebook_runs_and_is_kept_without_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(ROOT / "examples" / "first_visit.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    # A warning is a red box.
    assert not [
        output for cell in notebook.cells for output in cell.get("outputs", ()) if output.get("name") == "stderr"
    ]
    said = [str(output.get("text") or output.data) for cell in notebook.cells for output in cell.get("outputs", ())]
    for expected in ("<svg", "<figure", "stopped", "2 processes", "photos/flower/flower-001.jpg  flower"):
        assert any(expected in each for each in said), expected
