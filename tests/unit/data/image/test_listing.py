"""A long listing is remembered, and believed only while it is still so."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from image_sets import opened_set

from paceline.data.image.dataset import StoredImages
from paceline.data.image.sets import image_folder as listing
from paceline.data.image.sets.image_folder import NameArray, cache_file


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(listing, "MIN_CACHED_SECONDS", 0.0)


def make(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return root


def age(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the folders' last changes lie far enough back; a folder's change time cannot be set, so the clock is."""
    now = time.time_ns() + 10_000_000_000
    monkeypatch.setattr(listing.time, "time_ns", lambda: now)


def opened(root: Path) -> StoredImages:
    return opened_set("image_folder", root, channels=3, validation_fraction=0.5, tries_files=False)


def facts(folder: StoredImages) -> tuple[object, ...]:
    sources = (folder.train, folder.validation)
    return (
        folder.classes,
        folder.digest,
        [[source.path(sample) for sample in range(len(source))] for source in sources],
        [source.labels.tolist() for source in sources],
    )


def is_recalled(folder: StoredImages) -> bool:
    return "from a cached listing" in folder.listing


TREES = {
    "split off": ["a/1.jpg", "a/2.jpg", "b/1.jpg", "b/ü.jpg", "b/3.jpg"],
    "own split": ["train/a/1.jpg", "train/b/1.jpg", "train/b/22.png", "val/a/3.jpg", "val/b/4.jpg"],
}


@pytest.mark.parametrize("names", TREES.values(), ids=TREES)
def test_what_is_remembered_is_what_was_listed(
    tmp_path: Path, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make(tmp_path / "data", *names)
    age(root, monkeypatch)
    first = opened(root)
    assert first.listing.endswith("and remembered")
    assert list(cache_file(root).parent.iterdir()) == [cache_file(root)]
    again = opened(root)
    assert is_recalled(again)
    assert str(cache_file(root)) in again.listing
    assert facts(again) == facts(first)


def add(root: Path) -> None:
    make(root, "a/0.jpg")


def remove(root: Path) -> None:
    (root / "b/2.jpg").unlink()


def rename(root: Path) -> None:
    (root / "b/2.jpg").rename(root / "b/9.jpg")


def add_class(root: Path) -> None:
    make(root, "c/0.jpg")


def remove_class(root: Path) -> None:
    for path in sorted((root / "c0").iterdir()):
        path.unlink()
    (root / "c0").rmdir()


def swap_classes(root: Path) -> None:
    (root / "a").rename(root / "x")
    (root / "b").rename(root / "a")
    (root / "x").rename(root / "b")


def add_and_turn_the_clock_back(root: Path) -> None:
    before = os.stat(root / "a")
    add(root)
    os.utime(root / "a", ns=(before.st_atime_ns, before.st_mtime_ns))


def write_over(root: Path) -> None:
    (root / "a/1.jpg").write_bytes(b"much longer than before")


def give_it_a_split(root: Path) -> None:
    make(root, "train/a/1.jpg", "train/b/1.jpg")
    for name in ("a", "b", "c0"):
        for path in sorted((root / name).iterdir()):
            path.unlink()
        (root / name).rmdir()


CHANGES = [
    add,
    remove,
    rename,
    add_class,
    remove_class,
    swap_classes,
    add_and_turn_the_clock_back,
    write_over,
    give_it_a_split,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_never_missed(
    tmp_path: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make(tmp_path / "data", "a/1.jpg", "a/2.jpg", "b/1.jpg", "b/2.jpg", "c0/1.jpg")
    age(root, monkeypatch)
    opened(root)
    assert is_recalled(opened(root))
    change(root)
    after = opened(root)
    assert not is_recalled(after)
    cache_file(root).unlink()
    assert facts(opened(root)) == facts(after)


def test_ranks_of_a_launch_find_the_same_of_a_file_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make(tmp_path / "data", *(f"{folder}/{number:03}.jpg" for folder in "ab" for number in range(70)))
    age(root, monkeypatch)
    opened(root)
    (root / "a" / "007.jpg").write_bytes(b"longer than before")
    kept, found = cache_file(root).read_bytes(), set()
    for port in range(29500, 29516):
        monkeypatch.setenv("MASTER_PORT", str(port))
        recalled = set()
        for _ in range(3):
            cache_file(root).write_bytes(kept)
            recalled.add(is_recalled(opened(root)))
        assert len(recalled) == 1
        found |= recalled
    assert found == {True, False}


def test_what_changed_just_now_is_not_remembered(tmp_path: Path) -> None:
    root = make(tmp_path / "data", "a/1.jpg", "b/1.jpg")
    assert "remembered" not in opened(root).listing
    assert not cache_file(root).exists()


def test_quick_listings_are_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make(tmp_path / "data", "a/1.jpg", "b/1.jpg")
    age(root, monkeypatch)
    monkeypatch.setattr(listing, "MIN_CACHED_SECONDS", 100.0)
    opened(root)
    assert not cache_file(root).exists()


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04", None], ids=["empty", "torn", "half"])
def test_a_damaged_memory_is_forgotten(tmp_path: Path, damage: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make(tmp_path / "data", "a/1.jpg", "b/1.jpg")
    age(root, monkeypatch)
    first = opened(root)
    memory = cache_file(root)
    memory.write_bytes(memory.read_bytes()[:-300] if damage is None else damage)
    after = opened(root)
    assert not is_recalled(after)
    assert facts(after) == facts(first)
    assert is_recalled(opened(root))


def test_a_home_that_cannot_be_written_to_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make(tmp_path / "data", "a/1.jpg", "b/1.jpg")
    age(root, monkeypatch)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    folder = opened(root)
    assert len(folder.train) + len(folder.validation) == 2
    assert "remembered" not in folder.listing


def test_a_memory_holds_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make(tmp_path / "data", "a/1.jpg", "b/1.jpg")
    age(root, monkeypatch)
    opened(root)

    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return (os.mkdir, (str(tmp_path / "sprung"),))

    with open(cache_file(root), "wb") as file:
        np.savez(file, facts=np.array([Trap()], dtype=object))
    assert not is_recalled(opened(root))
    assert not (tmp_path / "sprung").exists()


def test_names_are_kept_as_they_are() -> None:
    names = [b"a/1.jpg", b"", b"b/\xff\xfe.jpg"]
    joined = NameArray.of(names)
    assert len(joined) == 3
    assert [joined[index] for index in range(3)] == names
