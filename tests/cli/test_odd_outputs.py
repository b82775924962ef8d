"""Is what a user names as output left alone where it is not a file that the command may replace?"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from calls import Call
from golden_sentences import raises

from paceline.errors import PacelineError
from paceline.prediction.answer_files import check_output
from paceline.records.run_directory import make_folder


@pytest.mark.parametrize("kind", ["pipe", "link", "dangling"])
@pytest.mark.parametrize(
    "command",
    [
        ("report", "{run}", "--output", "{out}.html"),
        ("evaluate", "{run}", "--predictions", "{out}.csv"),
        ("import", "timm", "--overwrite", "--output", "{out}.yaml", "--", "train.py", "/data", "--model", "resnet18"),
        ("find-lr", "digits", "--apply", "{out}.yaml"),
        ("labs", "slides", "1", "--output", "{out}.md"),
    ],
    ids=lambda command: command[0],
)
def test_odd_outputs_are_refused_untouched(
    paceline_here: Call, finished: Path, tmp_path: Path, command: tuple[str, ...], kind: str
) -> None:
    words = [word.format(run=finished, out=tmp_path / "out") for word in command]
    target = Path(next(word for word in words if word.startswith(str(tmp_path / "out"))))
    next_to = tmp_path / "beside"
    if kind == "pipe":
        os.mkfifo(target)
    else:
        target.symlink_to(next_to)
        if kind == "link":
            next_to.write_text("my notes")
    before = target.lstat()
    assert len(paceline_here(*words).refused(str(target)).err.strip().splitlines()) == 1
    assert os.path.samestat(before, target.lstat())
    assert next_to.exists() == (kind == "link")
    if kind == "link":
        assert target.read_text() == "my notes"


def test_a_report_replaces_no_file_of_another_kind(paceline_here: Call, finished: Path, tmp_path: Path) -> None:
    notes = tmp_path / "out.html"
    notes.write_text("my notes")
    done = paceline_here("report", finished, "--output", notes)
    assert (done.code, notes.read_text()) == (2, "my notes")
    assert str(notes) in done.err


def test_odd_names_in_an_output_folder_and_of_answers_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "benchmark.md")
    with pytest.raises(PacelineError, match=r"benchmark\.md' is a named pipe"):
        make_folder(tmp_path, "benchmark.json", "benchmark.md")
    assert stat.S_ISFIFO((tmp_path / "benchmark.md").stat().st_mode)
    (tmp_path / "answers.csv").symlink_to(tmp_path / "elsewhere")
    with raises(PacelineError, path="answers.csv"):
        check_output(tmp_path / "answers.csv")


def test_an_empty_path_is_refused(paceline_here: Call, finished: Path) -> None:
    for words in (("report", finished, "--output", ""), ("predict", finished, ""), ("export", "", "--output", "x")):
        paceline_here(*words).refused("empty")
