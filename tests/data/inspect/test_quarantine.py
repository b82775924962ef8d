"""What breaks a run is moved out of a folder and back, and never lost, whenever the process is killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from golden_sentences import raises
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from PIL import Image

from paceline.errors import DataError, RecipeError
from paceline_data.inspect.check import DataReport, check_data
from paceline_data.inspect.gather import open_subject
from paceline_data.inspect.quarantine import move_away


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


def dangling(root: Path) -> set[Path]:
    """The links below a folder that lead nowhere."""
    return {path for path in root.rglob("*") if path.is_symlink() and not path.exists()}


def checked(root: Path, folder: Path) -> tuple[set[str], dict[str, str], DataReport]:
    """What was moved and what was not, relative to the root, which is whole again after the undo script."""
    before, dead = contents(root.parent), dangling(root)
    report = check(root, folder)
    assert report.quarantine is not None
    assert sorted(contents(root, folder)) == sorted(contents(root) | contents(folder))
    assert dangling(root) <= dead
    moved = {os.path.relpath(old, root) for old, _ in report.quarantine.moved}
    kept = {os.path.relpath(path, root): reason for path, reason in report.quarantine.kept}
    after = contents(root.parent)
    if moved:
        subprocess.run(report.quarantine.undo, shell=True, check=True)
    assert contents(root.parent) == before
    outside = {name for name in before if not name.startswith(f"{root.name}/")}
    assert {name: after[name] for name in outside} == {name: before[name] for name in outside}
    return moved, kept, report


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_split_that_is_a_link_to_the_other_stays(split: str, clean: Path, tmp_path: Path) -> None:
    shutil.rmtree(clean / split)
    (clean / split).symlink_to({"train": "val", "val": "train"}[split])
    moved, kept, report = checked(clean, tmp_path / "aside")
    assert moved == set()
    assert kept == {f"{split}/{name}": f"behind the link {split}" for name in contents(clean / split)}
    assert not report.passed
    (leak,) = (each for each in report.findings if each.kind.name == "leak")
    assert {each.detail for each in leak.entries} == {"one file, by a link"}


def test_of_a_file_and_a_link_to_it_the_link_goes(clean: Path, tmp_path: Path) -> None:
    (clean / "train/cat/link.jpg").symlink_to("../../val/cat/01.jpg")
    (clean / "train/cat/to a link.jpg").symlink_to("link.jpg")
    (clean / "val/dog/hard.jpg").hardlink_to(clean / "train/dog/02.jpg")
    moved, kept, report = checked(clean, tmp_path / "aside")
    assert (moved, kept) == ({"train/cat/link.jpg", "train/cat/to a link.jpg", "val/dog/hard.jpg"}, {})
    assert report.passed
    (clean / "train/cat/link.jpg").unlink()
    (clean / "train/cat/to a link.jpg").unlink()
    (clean / "train/cat/00 link.jpg").symlink_to("05.jpg")  # sorts before its target
    moved, _, report = checked(clean / "train", tmp_path / "aside too")
    assert moved == {"cat/00 link.jpg"}


def test_what_lies_elsewhere_is_named_and_stays(clean: Path, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    for label in ("cat", "dog"):
        (clean / "train" / label).rename(tmp_path / "shared" / label)
        (clean / "train" / label).symlink_to(tmp_path / "shared" / label)
    (tmp_path / "shared/cat/03.jpg").write_bytes(b"words")
    (clean / "val/dog/empty.jpg").touch()
    moved, kept, report = checked(clean, tmp_path / "aside")
    assert (moved, kept) == ({"val/dog/empty.jpg"}, {"train/cat/03.jpg": "behind the link train/cat"})
    assert not report.passed


def test_what_a_remaining_link_leads_to_stays(clean: Path, tmp_path: Path) -> None:
    for name in ("train/cat/empty.jpg", "train/dog/empty.jpg"):
        (clean / name).touch()
    (clean / "extra").mkdir()
    (clean / "extra" / "1.jpg").write_bytes((clean / "train/cat/00.jpg").read_bytes())
    (clean / "train/cat/more.jpg").symlink_to("../../extra/1.jpg")
    (clean / ".notes").symlink_to("train/cat/empty.jpg")
    (clean / "train/dog/round").symlink_to("..")
    moved, kept, _ = checked(clean, tmp_path / "aside")
    assert moved == {"train/dog/empty.jpg", "train/dog/round"}
    assert kept == {"train/cat/empty.jpg": ".notes leads to it", "extra": "train/cat/more.jpg leads to it"}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become someone who may not write")
def test_a_read_only_folder_is_found_before_the_first_move(clean: Path, broken: set[str], tmp_path: Path) -> None:
    above = [each for each in clean.parents if each.is_relative_to(tempfile.gettempdir())]
    for path in (clean, *above[:-1], *(each for each in clean.rglob("*") if each.is_dir())):
        path.chmod(0o777)
    (clean / "train" / "cat").chmod(0o555)
    before, findings = contents(tmp_path), check(clean, None).findings
    os.seteuid(65534)
    try:
        with pytest.raises(DataError, match=r"nothing was moved, since .*train/cat' is read-only"):
            move_away(findings, clean, tmp_path / "aside")
    finally:
        os.seteuid(0)
    assert contents(tmp_path) == before


def test_a_move_that_fails_takes_back_the_others(clean: Path, broken: set[str], tmp_path: Path) -> None:
    (tmp_path / "aside").mkdir()
    (tmp_path / "aside" / "val").touch()  # where a folder is needed
    before = contents(tmp_path)
    with raises(DataError, path="val/dog/link.jpg"):
        check(clean, tmp_path / "aside")
    assert contents(tmp_path) == before


PLACES = st.sampled_from(
    [f"{split}/{label}" for split in ("train", "val") for label in ("cat", "dog")] + ["extra", ".hidden"]
)
NAMES = st.tuples(PLACES, st.sampled_from(["1.png", "2.png", "a.png", "z.png"])).map("/".join)
ENTRIES = st.dictionaries(
    NAMES,
    st.one_of(
        st.integers(-1, 3),  # a picture, or words
        st.tuples(st.sampled_from(["link", "absolute", "hard"]), NAMES | st.just("../other/1.png") | PLACES),
    ),
    min_size=4,
)
FOLDERS = st.dictionaries(PLACES | st.just("val"), st.sampled_from(["train", "train/cat", "../other", "nowhere", "."]))


def planted(root: Path, entries: dict[str, Any], links: dict[str, str]) -> None:
    """Write pictures, files that are none, and links of all sorts; two good classes are there in any case."""

    def put(path: Path, what: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (20 * what, 0, 0)).save(path) if what >= 0 else path.write_bytes(b"words")

    put(root.parent / "other" / "1.png", 0)
    put(root / "train/cat/good.png", 4)
    put(root / "train/dog/good.png", 5)
    for name, target in links.items():
        parent = (root / name).parent
        if not os.path.lexists(root / name) and (parent.is_dir() or not os.path.lexists(parent)):
            parent.mkdir(parents=True, exist_ok=True)
            (root / name).symlink_to(os.path.relpath(root / target, (root / name).parent))
    for name, what in entries.items():
        place = Path(os.path.realpath((root / name).parent)) / Path(name).name
        if os.path.lexists(place) or not place.is_relative_to(root) or place.parent.is_symlink():
            continue
        if isinstance(what, int):
            put(place, what)
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        if what[0] != "hard":
            target = root / what[1]
            place.symlink_to(target if what[0] == "absolute" else os.path.relpath(target, place.parent))
        elif (root / what[1]).is_file():
            place.hardlink_to(os.path.realpath(root / what[1]))


@pytest.mark.everyday
@settings(max_examples=15, deadline=None, phases=[Phase.generate])
@given(entries=ENTRIES, links=FOLDERS, whole=st.booleans())
def test_nothing_is_lost_whatever_the_links(entries: dict[str, Any], links: dict[str, str], whole: bool) -> None:
    """All that is there is sample or reported; moved files come back; no link leads nowhere that did not before."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(os.path.realpath(scratch)) / "photos"
        planted(root, entries, links)
        root = root if whole else root / "train"
        subject = open_subject(str(root), ())
        splits = [each for each in (root / "train", root / "val") if (root / "train").is_dir() and each.is_dir()] or [
            root
        ]
        there = [str(each) for split in splits for label in seen(split) if label.is_dir() for each in seen(label)]
        told = [each.path for each in subject.problems.bad if each.path in there]
        assert sum(map(len, subject.splits.values())) + len(told) == len(there)
        checked(root, Path(scratch) / "aside")


def seen(folder: Path) -> list[Path]:
    """What is not hidden in a folder."""
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


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


def test_where_no_classes_are_found_folders_stay(clean: Path, tmp_path: Path) -> None:
    """As an export for detection has them: what the layout hides may be the data."""
    for name in ("train", "extra"):
        for image in sorted((clean / "val").rglob("*.jpg")):
            (clean / name).mkdir(exist_ok=True)
            shutil.copy(image, clean / name)
    for folder in (each for each in (clean / "train").iterdir() if each.is_dir()):
        shutil.rmtree(folder)
    moved, _, report = checked(clean, tmp_path / "aside")
    assert "unread_folder" in {each.kind.name for each in report.findings}
    assert moved == set()


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
from paceline_data.inspect.check import check_data
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
    with raises(DataError, path="aside"):
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
    with raises(DataError, path="shm/aside"):
        check(clean, elsewhere / "aside")
    assert not (elsewhere / "aside").exists()
    shutil.rmtree(clean)
