"""Names that packages register are remembered while the same packages are installed."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.plugins.installed_packages import entry_points, recall
from paceline.plugins.references import is_ours

SOURCES = Path(paceline.__file__).parents[1]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only folder of installed packages, with one of them, and an empty cache."""
    folder = tmp_path / "site"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [str(folder)])
    put(folder / "first-1.0.dist-info", "first", "[paceline.tasks]\none = first:One\n")
    entry_points.cache_clear()
    yield folder
    entry_points.cache_clear()


def put(folder: Path, name: str, registered: str) -> None:
    """Write a package's metadata, an hour old."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("METADATA", "PKG-INFO"):
        (folder / file).write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(registered)
    age(folder / "entry_points.txt", folder, seconds=3600)


def age(*paths: Path, seconds: float) -> None:
    for path in paths:
        os.utime(path, (time.time() - seconds,) * 2)


def now_registered() -> dict[str, list[list[str]]]:
    """What a new process finds."""
    entry_points.cache_clear()
    return entry_points()


def remembered(tmp_path: Path) -> list[Path]:
    return [*tmp_path.glob("cache/paceline/installed/*.json")]


class Counted:
    """A result, and how often it was computed."""

    def __init__(self, *files: str) -> None:
        self.calls, self.files = 0, files

    def __call__(self) -> tuple[Any, tuple[str, ...]]:
        self.calls += 1
        return {"calls": self.calls}, self.files


ONE = {"paceline.tasks": [["one", "first:One"]]}


def test_metadata_is_read_once(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert now_registered() == ONE
    assert len(remembered(tmp_path)) == 1
    monkeypatch.setattr(
        "paceline.plugins.installed_packages._read_entry_points", lambda: pytest.fail("it was read again")
    )
    assert now_registered() == ONE


def test_a_package_that_comes_changes_or_goes_is_noticed(site: Path) -> None:
    assert now_registered() == ONE
    second = site / "second-1.0.dist-info"
    put(second, "second", "[paceline.tasks]\ntwo = second:Two\n[other.group]\nthree = second:Three\n")
    assert now_registered() == {"paceline.tasks": [["one", "first:One"], ["two", "second:Two"]]}
    for file in second.iterdir():
        file.unlink()
    second.rmdir()
    assert now_registered() == ONE
    checkout = site / "third.egg-info"
    put(checkout, "third", "[paceline.losses]\nbend = third:bend\n")
    assert now_registered() == ONE | {"paceline.losses": [["bend", "third:bend"]]}
    (checkout / "entry_points.txt").write_text("[paceline.losses]\nbow = third:bow\n")
    age(checkout / "entry_points.txt", seconds=1800)
    assert now_registered() == ONE | {"paceline.losses": [["bow", "third:bow"]]}


@pytest.mark.usefixtures("site")
def test_packages_in_archives_and_eggs_are_noticed(tmp_path: Path) -> None:
    archive, egg = tmp_path / "packed.zip", tmp_path / "laid.egg"
    sys.path += [str(archive), str(egg)]
    assert now_registered() == ONE
    for number in (2, 3):
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("packed-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: packed\nVersion: 1.0\n")
            file.writestr("packed-1.0.dist-info/entry_points.txt", f"[paceline.losses]\nbend = packed:bend{number}\n")
        age(archive, seconds=3600 - number)
        assert now_registered() == ONE | {"paceline.losses": [["bend", f"packed:bend{number}"]]}
    put(egg / "EGG-INFO", "laid", "[paceline.losses]\nbow = laid:bow\n")
    assert now_registered()["paceline.losses"] == [["bend", "packed:bend3"], ["bow", "laid:bow"]]


def test_the_first_copy_of_a_package_counts_and_a_broken_one_does_not(site: Path, tmp_path: Path) -> None:
    put(tmp_path / "behind" / "First-0.9.dist-info", "first", "[paceline.tasks]\none = first:Old\n")
    put(site / "broken-1.0.dist-info", "broken", "[paceline.tasks]\nnonsense\n")
    sys.path.append(str(tmp_path / "behind"))
    assert now_registered() == ONE


@pytest.mark.parametrize("content", [b"", b'{"state": [', b"[]", b'{"state": 1}', b"\xff", b"[" * 100_000])
def test_a_damaged_file_is_replaced(site: Path, tmp_path: Path, content: bytes) -> None:
    now_registered()
    (file,) = remembered(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(content)
    assert now_registered() == ONE
    assert file.read_bytes() == whole


def test_a_file_that_others_may_write_is_not_believed(site: Path, tmp_path: Path) -> None:
    now_registered()
    (file,) = remembered(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    planted = json.loads(file.read_bytes()) | {"found": {"paceline.tasks": [["one", "evil:One"]]}}
    file.write_text(json.dumps(planted))
    assert now_registered() == {"paceline.tasks": [["one", "evil:One"]]}  # this user wrote it
    for mode in (0o620, 0o602):
        file.write_text(json.dumps(planted))
        file.chmod(mode)
        assert now_registered() == ONE


def test_a_file_of_another_user_is_not_believed(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_registered()
    find = Counted()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    for calls in (1, 2):
        assert recall("entry-points", find) == {"calls": calls}


def test_a_cache_that_cannot_be_written_costs_only_time(site: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("not a folder")
    assert [now_registered(), now_registered()] == [ONE, ONE]


def test_what_was_just_installed_is_not_remembered_yet(site: Path, tmp_path: Path) -> None:
    """Its time may stay the same while the rest of it is written."""
    age(site / "first-1.0.dist-info", seconds=0)
    assert now_registered() == ONE
    assert remembered(tmp_path) == []


def test_a_result_depends_on_the_files_it_names(site: Path, tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text("1")
    find = Counted(str(source), "nowhere.py")
    assert [recall("kind", find), recall("kind", find)] == [{"calls": 1}, {"calls": 1}]
    age(source, seconds=60)
    assert recall("kind", find) == {"calls": 2}
    source.unlink()
    assert recall("kind", find) == {"calls": 3}


def test_a_result_that_is_incomplete_is_computed_again(site: Path, tmp_path: Path) -> None:
    assert recall("kind", lambda: ("broken", None)) == "broken"
    assert recall("kind", lambda: ("repaired", ())) == "repaired"
    assert recall("kind", Counted()) == "repaired"


def test_what_is_ours() -> None:
    ours = ("paceline", "paceline.tasks.task", "paceline:train", "paceline_text.chat:Chat", "paceline_text")
    assert all(map(is_ours, ours))
    assert not any(map(is_ours, ("pacelines", "pacelines.tasks", "my.paceline.tasks", "my_paceline:Task", "")))


def test_the_trainer_names_none_of_the_packages_around_it() -> None:
    around = [each.name for each in SOURCES.glob("paceline_*") if (each / "__init__.py").is_file()]
    assert len(around) >= 2
    name = re.compile(rf"\b({'|'.join(around)})\b")
    found = []
    for file in (SOURCES / "paceline").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.Import():
                    named = " ".join(each.name for each in node.names)
                case ast.ImportFrom():
                    named = node.module or ""
                case ast.Constant(value=str(named)):
                    pass
                case _:
                    continue
            found += [f"{file}:{node.lineno}: {named}" for _ in name.findall(named)]
    assert found == [], "commands and functions of these come in through entry points"
