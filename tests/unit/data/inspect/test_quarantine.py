"""What breaks a run is moved out of a folder and back, and never lost, whenever the process is killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.data.inspect.check import DataReport, check_data
from paceline.errors import DataError, RecipeError


def check(source: Path, folder: Path | None) -> DataReport:
    return check_data(str(source), workers=1, quarantine=folder)


def contents(*roots: Path) -> dict[str, bytes]:
    """What lies below folders, by path from there on; links are what they lead to."""
    found = {}
    for root in roots:
        for path in sorted(root.rglob("*")):
            if path.name != "undo.sh" and (path.is_symlink() or not path.is_dir()):
                found[str(path.relative_to(root))] = (
                    os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes()
                )
    return found


@pytest.fixture
def broken(clean: Path, plant_broken: Callable[[], dict[str, set[str]]]) -> set[str]:
    """What breaks a run in the clean folder, as paths from there on: broken images, others, and whole folders."""
    names = set().union(*plant_broken().values())
    (clean / "train" / "eel").mkdir()
    (clean / "train" / "cat" / "it's\n a film.mp4").write_bytes(b"film")
    (clean / "train" / "fox" / "more").mkdir(parents=True)
    (clean / "train" / "fox" / "more" / "1.jpg").write_bytes(b"words")
    (clean / "train" / "fox" / "2.jpg").write_bytes(b"words")
    (clean / "val" / "fox").mkdir()
    (clean / "val" / "fox" / "3.jpg").write_bytes(b"words")
    (clean / "extra").mkdir()
    planted = {str(Path(name).relative_to(clean)) for name in names}
    return planted | {"train/eel", "train/cat/it's\n a film.mp4", "train/fox", "val/fox", "extra"}


def test_everything_that_breaks_is_moved_and_can_be_moved_back(clean: Path, broken: set[str], tmp_path: Path) -> None:
    before, folder = contents(clean), tmp_path / "aside"
    report = check(clean, folder)
    assert report.passed
    assert report.quarantine is not None
    assert {str(Path(old).relative_to(clean)) for old, _ in report.quarantine.moved} == broken
    assert [Path(new).relative_to(folder) for _, new in report.quarantine.moved] == [
        Path(old).relative_to(clean) for old, _ in report.quarantine.moved
    ]
    assert contents(clean, folder) == before
    again = check(clean, tmp_path / "other")
    assert (again.passed, again.count["breaks"]) == (True, 0)
    assert not (tmp_path / "other").exists()
    subprocess.run(report.quarantine.undo, shell=True, check=True)
    assert contents(clean) == before
    assert list(contents(folder)) == []
    assert (clean / "train" / "eel").is_dir()


def test_the_held_out_copies_of_training_images_are_moved(clean: Path, tmp_path: Path) -> None:
    image = next((clean / "train" / "cat").iterdir())
    copies = {clean / "val" / "cat" / "seen.jpg", clean / "val" / "dog" / "seen too.jpg"}
    for each in copies:
        shutil.copy(image, each)
    report = check(clean, tmp_path / "aside")
    assert report.quarantine is not None
    assert {Path(old) for old, _ in report.quarantine.moved} == copies
    assert image.exists()
    assert check(clean, None).count == {**report.count, "spoils": 0}


def test_without_a_held_out_folder_all_copies_but_one_are_moved(clean: Path, tmp_path: Path) -> None:
    shutil.rmtree(clean / "val")
    shutil.rmtree(clean / "test", ignore_errors=True)
    images = sorted((clean / "train" / "cat").iterdir())
    for number, image in enumerate(images[:4]):
        shutil.copy(image, clean / "train" / "cat" / f"z{number}.jpg")
    check(clean / "train", tmp_path / "aside")
    again = check(clean / "train", None)
    assert again.count["spoils"] == 0
    assert "duplicate" not in {each.kind.name for each in again.findings}
    assert len(list((clean / "train" / "cat").iterdir())) == len(images)


def test_a_leak_in_another_class_is_one_move(clean: Path, tmp_path: Path) -> None:
    shutil.copy(next((clean / "train" / "cat").iterdir()), clean / "val" / "dog" / "seen.jpg")
    report = check(clean, tmp_path / "aside")
    assert {each.kind.name for each in report.findings} >= {"leak", "contradiction"}
    assert report.passed


def test_a_class_that_is_gone_is_told(tmp_path: Path, clean: Path) -> None:
    for name in [path.name for path in (clean / "train").iterdir()][1:]:
        for image in (*(clean / "train" / name).iterdir(), *(clean / "val" / name).iterdir()):
            image.write_bytes(b"words")
    report = check(clean, tmp_path / "aside")
    assert "one class" in report.unusable
    assert not report.passed


def test_what_takes_the_place_of_a_file_stays_when_it_is_moved_back(
    clean: Path, broken: set[str], tmp_path: Path
) -> None:
    report = check(clean, tmp_path / "aside")
    assert report.quarantine is not None
    (clean / "train/cat/words.jpg").write_bytes(b"new")
    done = subprocess.run(report.quarantine.undo, shell=True, check=True, capture_output=True, text=True)
    assert "there is another" in done.stderr
    assert (clean / "train/cat/words.jpg").read_bytes() == b"new"
    assert (tmp_path / "aside/train/cat/words.jpg").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from paceline.data.inspect.check import check_data
left, rename = [int(sys.argv[3])], os.rename

def counted(source, target):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    rename(source, target)

os.rename = counted
check_data(sys.argv[1], workers=1, quarantine=Path(sys.argv[2]))
"""


@pytest.mark.parametrize("moves", [0, 3])
def test_killed_in_between_nothing_is_lost(moves: int, clean: Path, broken: set[str], tmp_path: Path) -> None:
    before, folder = contents(clean), tmp_path / "aside"
    done = subprocess.run([sys.executable, "-c", KILLED, str(clean), str(folder), str(moves)], check=False)
    assert done.returncode == -9
    assert contents(clean, folder) == before
    assert check(clean, folder).passed  # the same again moves the rest
    assert contents(clean, folder) == before
    subprocess.run(["sh", str(folder / "undo.sh")], check=True)
    assert contents(clean) == before


@pytest.mark.parametrize("place", ["clean/aside", "clean", ".", "file", "file/aside"])
def test_a_place_that_does_not_do_is_refused(place: str, clean: Path, broken: set[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = contents(tmp_path)
    with pytest.raises(DataError, match=r"--quarantine .*; give a folder"):
        check(clean, tmp_path / place)
    assert contents(tmp_path) == before


def test_names_that_are_taken_are_refused_before_anything_is_moved(
    clean: Path, broken: set[str], tmp_path: Path
) -> None:
    (tmp_path / "aside/train/cat").mkdir(parents=True)
    (tmp_path / "aside/train/cat/words.jpg").symlink_to("nowhere")
    before = contents(tmp_path)
    with pytest.raises(DataError, match=r"words.jpg' is there already .*nothing was moved"):
        check(clean, tmp_path / "aside")
    assert contents(tmp_path) == before


def test_only_a_folder_of_class_folders_has_files_to_move(clean: Path, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text(
        "path,label\n" + "".join(f"clean/train/cat/0{n}.jpg,{n % 2}\n" for n in range(4))
    )
    with pytest.raises(RecipeError, match="--quarantine moves files out of a folder"):
        check(tmp_path / "labels.csv", tmp_path / "aside")


def test_another_file_system_is_refused(clean: Path, broken: set[str], tmp_path: Path) -> None:
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one file system only")
    with pytest.raises(DataError, match="another file system"):
        check(clean, elsewhere / "aside")
    assert not (elsewhere / "aside").exists()
    shutil.rmtree(clean)
