"""Paths that an audit event is about to change."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline_course.grading.recorder import written_paths


@pytest.mark.parametrize(
    ("event", "args", "paths"),
    [
        ("open", ("a", "w", 0), ["a"]),
        ("open", (b"a", "r+b", 0), ["a"]),
        ("open", (Path("a"), "x", 0), ["a"]),
        ("open", ("a", "r", os.O_CLOEXEC), []),
        ("open", ("a", None, os.O_RDWR), ["a"]),
        ("open", ("a", None, os.O_RDONLY), []),
        ("open", (3, "w", 0), []),
        ("open", ("/dev/null", "w", 0), []),
        ("open", ("/dev/../etc/passwd", "w", 0), ["/dev/../etc/passwd"]),
        ("open", ("/dev/shm/left", "w", 0), ["/dev/shm/left"]),
        ("os.rename", ("a", "b", -1, -1), ["a", "b"]),
        ("os.remove", ("a", -1), ["a"]),
        ("os.symlink", ("from", "to", -1), ["to"]),
        ("os.listdir", ("a",), []),
        ("import", ("a", None, None, None, None), []),
    ],
)
def test_written_paths(event: str, args: tuple[Any, ...], paths: list[str]) -> None:
    assert written_paths(event, args) == paths


def test_audit_events_of_file_operations(tmp_path: Path) -> None:
    found: list[str] = []
    switch = {"on": True}

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if switch["on"]:
            found.extend(written_paths(event, args))

    sys.addaudithook(hook)  # it cannot be removed, only disabled
    try:
        (tmp_path / "a").write_text("a")
        (tmp_path / "a").read_text()
        os.replace(tmp_path / "a", tmp_path / "b")
        (tmp_path / "b").unlink()
        (tmp_path / "c").mkdir()
    finally:
        switch["on"] = False
    assert found == [str(tmp_path / name) for name in ("a", "a", "b", "b", "c")]
