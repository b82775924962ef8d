"""`paceline drill` as a user calls it: what it refuses, before anything is trained."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from calls import Call

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="without /proc a drill is refused")


@pytest.mark.parametrize(
    ("arguments", "words"),
    {
        "an unknown recipe": (("digit",), "Did you mean 'digits'?"),
        "data that are not there": (("image_folder", "data.path=nowhere"), "has no 'nowhere': correct the path."),
        "an unknown fault": (("digits", "--only", "kill-al"), "Did you mean 'kill-all'"),
    }.values(),
)
def test_a_mistake_is_one_sentence(
    paceline_here: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    done = paceline_here("drill", *arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("paceline: ")
    assert done.err.count("\n") == 1
    assert words in done.err
    assert "undisturbed" not in done.err
    assert list(tmp_path.iterdir()) == []
