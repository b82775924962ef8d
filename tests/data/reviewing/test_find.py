"""What is shown of a folder, in which order, and how a failed search is reported."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest
from golden_sentences import raises
from PIL import Image

from paceline.errors import DataError, PacelineError
from paceline_data.reviewing.find import Doubt, find_doubts, in_a_child


def silent(*_: object) -> None:
    pass


def test_copies_are_shown_with_what_they_are_copies_of(tmp_path: Path) -> None:
    for number, name in enumerate(("train/cat/1", "train/cat/2", "train/dog/1", "val/cat/3", "val/dog/3")):
        path = tmp_path / "photos" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (9 * number, 0, 0)).save(path)
    for copy, original in (
        ("train/dog/cat", "train/cat/1"),
        ("val/dog/seen", "train/dog/1"),
        ("train/cat/2b", "train/cat/2"),
    ):
        (tmp_path / f"photos/{copy}.png").write_bytes((tmp_path / f"photos/{original}.png").read_bytes())
    (tmp_path / "photos/train/cat/words.png").write_text("words")
    (tmp_path / "photos/train/cat/film.mp4").touch()
    (tmp_path / "photos/loose.png").write_text("words")
    (tmp_path / "photos/train/empty").mkdir()
    (tmp_path / "photos/train/dog/away.png").symlink_to("gone.png")
    found = find_doubts(str(tmp_path / "photos"), (), folds=None, folder=None, progress=silent, log=silent)
    shown = [(each.kind, each.file, each.other, each.aside) for each in found.doubts]
    assert shown == [
        ("contradiction", "train/dog/cat.png", "train/cat/1.png", False),
        ("leak", "val/dog/seen.png", "train/dog/1.png", True),
        ("duplicate", "train/cat/2b.png", "train/cat/2.png", True),
        ("broken link", "train/dog/away.png", None, False),
        ("not an image", "train/cat/words.png", None, True),
        ("other file", "train/cat/film.mp4", None, True),
        ("unread", "loose.png", None, True),
    ]
    assert found.notes[0].startswith("not shown: 1 item that break a run, such as folders")
    assert "are shown with a run" in found.notes[1]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become someone who may not read")
def test_what_may_not_be_read_is_shown_with_the_reason(tmp_path: Path) -> None:
    for number, name in enumerate(("cat/1", "cat/2", "dog/1", "dog/2")):
        path = tmp_path / "photos" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (9 * number, 0, 0)).save(path)
    source = str(tmp_path / "photos")
    assert find_doubts(source, (), folds=None, folder=None, progress=silent, log=silent).doubts == ()
    above = [each for each in tmp_path.parents if each.is_relative_to(tempfile.gettempdir())]
    for path in (tmp_path, *above[:-1]):
        path.chmod(0o755)
    (tmp_path / "photos/cat/1.png").chmod(0)
    os.seteuid(65534)
    try:
        found = find_doubts(source, (), folds=None, folder=None, progress=silent, log=silent)
    finally:
        os.seteuid(0)
    assert [(each.kind, each.file) for each in found.doubts] == [("not permitted", "cat/1.png")]
    assert found.doubts[0].why.endswith("; Permission denied")


def test_other_data_are_refused() -> None:
    with raises(DataError, path="digits"):
        find_doubts("digits", (), folds=None, folder=None, progress=silent, log=silent)


def fail() -> Doubt:
    raise DataError("told", path="here")


def die() -> Doubt:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def test_the_search_is_a_process_of_its_own() -> None:
    assert in_a_child(os.getpid) != os.getpid()
    with pytest.raises(DataError, match="told") as caught:
        in_a_child(fail)
    assert caught.value.path == "here"
    with raises(PacelineError):
        in_a_child(die)
