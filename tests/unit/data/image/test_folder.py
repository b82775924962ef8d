"""An image folder is listed in one fixed order, and whatever is unusual about it is an error that names it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_sets import opened_set
from PIL import Image

from paceline.data.image import file_checks
from paceline.data.image.dataset import SKIP_REASONS, Problems, StoredImages
from paceline.data.image.datasets import open_dataset
from paceline.data.image.sets import image_folder
from paceline.data.image.source import EXTENSIONS
from paceline.data.tables import TableFile
from paceline.errors import DataError, PacelineError
from paceline.parsing.files import SkippedItems, refuse_archive
from paceline.plugins.dataset_registry import detect_dataset
from paceline.prediction.sources import pictures_of
from paceline.recipe.data import Data
from paceline.recipe.load import load_recipe
from paceline_text.sets.documents import open_text
from paceline_vision.sets.masks import open_masks


def make(root: Path, *names: str, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, size).save(path)
    return root


def opened(root: Path, fraction: float = 0.5, channels: int | None = None, **keys: Any) -> StoredImages:
    return opened_set("image_folder", root, channels=channels, validation_fraction=fraction, **keys)


def paths(folder: StoredImages, root: Path) -> tuple[list[str], list[str]]:
    names = [
        [os.path.relpath(source.path(sample), root) for sample in range(len(source))]
        for source in (folder.train, folder.validation)
    ]
    return names[0], names[1]


@pytest.mark.parametrize("held_out", ["val", "test"])
def test_its_own_split(tmp_path: Path, held_out: str) -> None:
    make(tmp_path, "train/b/2.png", "train/b/1.png", "train/a/x.jpg", f"{held_out}/a/y.png", f"{held_out}/b/z.png")
    folder = opened(tmp_path)
    assert folder.classes == ("a", "b")
    assert paths(folder, tmp_path) == (
        ["train/a/x.jpg", "train/b/1.png", "train/b/2.png"],
        [f"{held_out}/a/y.png", f"{held_out}/b/z.png"],
    )
    assert folder.train.labels.tolist() == [0, 1, 1]
    assert folder.validation.labels.tolist() == [0, 1]
    assert folder.train.labels.dtype == np.int64
    assert held_out in folder.split
    assert folder.train.read(0).shape == (8, 8, 3)


def test_val_goes_before_test(tmp_path: Path) -> None:
    make(tmp_path, *(f"{split}/{name}/1.png" for split in ("train", "val", "test") for name in "ab"))
    folder = opened(tmp_path)
    assert paths(folder, tmp_path)[1] == ["val/a/1.png", "val/b/1.png"]
    assert folder.split == "the folder val/; test/ is not read"


@pytest.mark.parametrize("lead", ["test", "test/unknown"])
def test_a_test_split_without_classes_is_not_read(tmp_path: Path, lead: str) -> None:
    make(tmp_path, *(f"train/{name}/{number}.png" for name in "ab" for number in range(2)), f"{lead}/1.png")
    folder = opened(tmp_path)
    assert [*map(len, paths(folder, tmp_path))] == [2, 2]
    assert folder.split.endswith("; test/ has no classes and is not read")
    assert "files outside the class folders: 1 left out" in " ".join(folder.left_out)
    make(tmp_path, "test/c/1.png", "test/d/1.png")
    with pytest.raises(DataError, match="lacks the classes"):
        opened(tmp_path)


@pytest.mark.parametrize("lead", ["", "train/"])
def test_a_part_is_held_out(tmp_path: Path, lead: str) -> None:
    make(tmp_path, *(f"{lead}{name}/{number}.png" for name in "ab" for number in range(4)))
    folder = opened(tmp_path, 0.25)
    train, held_out = paths(folder, tmp_path)
    assert sorted(train + held_out) == [f"{lead}{name}/{number}.png" for name in "ab" for number in range(4)]
    assert folder.validation.labels.tolist() == [0, 1]
    assert "25%" in folder.split


def test_links_are_followed(tmp_path: Path) -> None:
    make(tmp_path / "elsewhere", "a/1.png", "one.png", "a/2.png")
    root = make(tmp_path / "data", "b/1.png")
    (root / "a").symlink_to(tmp_path / "elsewhere" / "a")
    (root / "b" / "2.png").symlink_to(tmp_path / "elsewhere" / "one.png")
    (root / "b" / "3.png").symlink_to(tmp_path / "nowhere.png")
    train, held_out = paths(opened(root, tries_files=False), root)
    assert sorted(train + held_out) == ["a/1.png", "a/2.png", "b/1.png", "b/2.png", "b/3.png"]


def test_the_digest_follows_names_and_sizes(tmp_path: Path) -> None:
    make(tmp_path, "a/1.png", "b/1.png")
    first = opened(tmp_path).digest
    assert opened(tmp_path).digest == first
    make(tmp_path, "a/1.png", size=(64, 64))
    second = opened(tmp_path).digest
    (tmp_path / "a/1.png").rename(tmp_path / "a/2.png")
    assert len({first, second, opened(tmp_path).digest}) == 3


def test_the_probe(tmp_path: Path) -> None:
    root = make(tmp_path, "a/1.png", "b/1.png", mode="L")
    folder = opened(root)
    assert (folder.channels, folder.probe.size, folder.probe.greyscale, folder.probe.count) == (1, (8, 8), True, 2)
    assert folder.train.read(0).shape == (8, 8, 1)
    assert opened(root, channels=3).train.read(0).shape == (8, 8, 3)
    make(root, "b/2.png", size=(9, 8))
    (root / "b/3.png").write_bytes(b"broken")
    folder = opened(root, max_broken=1)
    assert (folder.channels, folder.probe.size, folder.probe.greyscale, folder.probe.count) == (3, None, False, 3)


def test_opening_two_thousand_files_costs_little_more_than_listing_them(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(1000):
            (tmp_path / name / f"{number}.png").touch()

    def cost(action: Callable[[], Any]) -> float:
        """Seconds of the processor, which do not depend on what else the machine does."""
        costs = []
        for _ in range(3):
            begun = time.process_time()
            action()
            costs.append(time.process_time() - begun)
        return min(costs)

    assert len(opened(tmp_path, tries_files=False).train) == 1000
    listing = cost(lambda: [each.stat() for name in "ab" for each in (tmp_path / name).iterdir()])
    assert cost(lambda: opened(tmp_path, tries_files=False)) < 10 * listing


def fault(message: str, root: Path) -> None:
    with pytest.raises(DataError) as caught:
        opened(root)
    assert message in str(caught.value)


def test_missing_path_suggests_the_nearest(tmp_path: Path) -> None:
    make(tmp_path, "imagenet/a/1.png", "other/b/1.png")
    fault("has no 'imagnet': correct the path. Did you mean 'imagenet'?", tmp_path / "imagnet")
    fault("has no 'imagnet': correct the path. Did you mean 'imagenet'?", tmp_path / "imagnet" / "train")


def test_no_classes(tmp_path: Path) -> None:
    make(tmp_path, "a.png")
    fault("which is a file", tmp_path / "a.png")
    fault("contains no folders", tmp_path)
    make(tmp_path, "1.png", "train/1.png")
    fault("train' contains no folders", tmp_path)


def test_every_missing_class_is_named(tmp_path: Path) -> None:
    missing = [f"class{number}" for number in range(9)]
    make(tmp_path, "val/cat/1.png", "val/eel/1.png", "train/cat/1.png", *(f"train/{name}/1.png" for name in missing))
    fault(f"val' lacks the classes {', '.join(map(repr, missing))} and ", tmp_path)
    fault("train' lacks the classes 'eel', but train/ and val/ must hold the same classes", tmp_path)


def test_held_out_images_alone(tmp_path: Path) -> None:
    fault("has 'val' but no 'train'", make(tmp_path, "val/cat/1.png", "val/dog/1.png"))


def test_classes_next_to_images_without_a_class(tmp_path: Path) -> None:
    make(tmp_path, "test/1.png", "cat/1.png", "dog/1.png")
    fault("next to folders: if those are the classes, move 'test' out of", tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        *("Train Val", "TRAIN TEST", "Training Testing", "train_set val-set", "training_data validation"),
        *("train valid", "TrainSet dev", "Train eval", "train Evaluation", "train2017 val2017"),
    ],
)
def test_split_folders_by_other_names(names: str, tmp_path: Path) -> None:
    train, held_out = names.split()
    make(tmp_path, *(f"{train}/{name}/{n}.png" for name in "ab" for n in range(3)), f"{held_out}/a/1.png")
    (tmp_path / held_out / "b").mkdir()  # may be empty
    found = opened(tmp_path)
    assert (len(found.train), paths(found, tmp_path)[1]) == (6, [f"{held_out}/a/1.png"])
    assert found.split == f"the folder {held_out}/"
    make(tmp_path, f"{train.swapcase()}/a/1.png")
    fault("two folders of one split", tmp_path)
    fault(repr(train.swapcase()), tmp_path)


@pytest.mark.parametrize("names", [("fold1", "fold2"), ("1_train", "2_val"), ("data",)])
def test_folders_of_folders_are_not_classes_to_move_away(names: tuple[str, ...], tmp_path: Path) -> None:
    make(tmp_path, *(f"{name}/{kind}/1.png" for name in names for kind in "ab"))
    with pytest.raises(DataError, match="holds no class folders") as caught:
        opened(tmp_path)
    assert all(repr(name) in str(caught.value) for name in names)
    assert not any(advice in str(caught.value) for advice in ("on_bad", "quarantine"))


def test_a_class_may_have_the_name_of_a_split(tmp_path: Path) -> None:
    make(tmp_path, *(f"{name}/{n}.png" for name in ("Bus", "Train") for n in range(2)))
    assert opened(tmp_path).classes == ("Bus", "Train")


COMPOSED, DECOMPOSED = "caf\u00e9", "cafe\u0301"


@pytest.mark.parametrize(("train", "val"), [(COMPOSED, DECOMPOSED), (DECOMPOSED, COMPOSED)])
def test_one_class_in_two_forms_of_unicode(train: str, val: str, tmp_path: Path) -> None:
    """The training split's form is the class, so that the classes' order stays."""
    make(tmp_path, *(f"train/{name}/1.png" for name in (train, "cafz")), f"val/{val}/1.png", f"val/{val}/2.png")
    (tmp_path / "val" / "cafz").mkdir()  # may be empty
    found = opened(tmp_path)
    assert found.classes == tuple(sorted((train, "cafz")))
    assert found.validation.labels.tolist() == [found.classes.index(train)] * 2
    make(tmp_path, f"train/{val}/3.png")
    fault("the class folders 'cafe\\u0301' and 'caf\u00e9', one name in two Unicode forms (NFC and NFD)", tmp_path)


@pytest.mark.parametrize("name", ["hot\u00a0dog", "hot\u200b dog", "hot dog "])
def test_invisible_differences_are_shown(name: str, tmp_path: Path) -> None:
    make(tmp_path, *(f"train/{each}/1.png" for each in ("hot dog", "cat")))
    make(tmp_path, *(f"val/{each}/1.png" for each in (name, "cat")))
    fault(f"train' lacks the classes {name!r}", tmp_path)
    (tmp_path / "val").rename(tmp_path / "elsewhere")
    make(tmp_path, f"train/{name}/1.png")
    assert repr(name) in open_dataset(Data(path=str(tmp_path / "train"))).reasons["classes"]


@pytest.mark.parametrize("ending", ["zip", "ZIP", "tar", "tar.gz", "tgz", "7z", "rar", "tar.zst"])
def test_an_archive_is_to_be_unpacked(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"photos.{ending}"
    path.write_bytes(b"PK\x03\x04")
    data = Data(path=str(path))
    actions: list[Callable[[], object]] = [
        lambda: load_recipe(str(path)),
        lambda: open_dataset(data),
        lambda: open_dataset(replace(data, dataset="csv")),
        lambda: open_masks(data),
        lambda: open_text(replace(data, dataset="text_folder")),
    ]
    actions += [lambda: detect_dataset(str(path))] * (ending != "tar")
    actions += [lambda: list(pictures_of([path], SkippedItems()))] * (ending in ("7z", "rar", "tar.zst"))
    for action in actions:
        with pytest.raises(PacelineError, match="is an archive: unpack it"):
            action()


@pytest.mark.parametrize(
    ("begin", "kind"),
    [
        *(
            (each, "an archive or a sp")
            for each in (b"PK\3\4\x14\0", b"\x1f\x8b\x08\0", b"7z\xbc\xaf\x27\x1c", b"BZh91A")
        ),
        (b"PAR1\x15\x04", "a parquet file: let its name end"),
        (b"<!DOCTYPE html><html>", "a web page: download"),
        (b"SQLite format 3\0", "an SQLite database: export"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1", "an Excel file"),
    ],
)
def test_a_binary_file_called_a_table_is_told(begin: bytes, kind: str, tmp_path: Path) -> None:
    (path := tmp_path / "photos.csv").write_bytes(begin + bytes(90))
    for action in (lambda: open_dataset(Data(path=str(path), dataset="csv")), lambda: TableFile(path, "csv")):
        with pytest.raises(DataError, match=f"photos.csv' is not what its name says, but {kind}"):
            action()


@pytest.mark.parametrize("begin", ["PAR1,PAR2", "SQLite is a library", "ARROW1"])
def test_a_text_that_begins_like_a_binary_file_is_read(begin: str, tmp_path: Path) -> None:
    (path := tmp_path / "a.txt").write_text(f"{begin}\n1,2\n")
    refuse_archive(path)


def everything_wrong(root: Path) -> Path:
    """A folder with everything in it that a run cannot use, and system files, which it ignores."""
    make(root, *(f"train/{name}/{number}.png" for name in ("cat", "dog", "eel") for number in range(4)))
    make(root, "val/cat/1.png", "val/dog/1.png", "val/eel/1.png", "train/dog/more/2.png", "extra/1.png")
    for name in ("train/cat/Thumbs.db", "val/dog/desktop.ini", "__MACOSX/cat/._0.png", "train/cat/.DS_Store"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")
    for name in ("cat/movie.mp4", "cat/notes.txt", "eel/clip.mp4", "dog/IMG_1.HEIC"):
        (root / "train" / name).write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    (root / "train" / "fox").mkdir()
    (root / "val" / "fox").mkdir()
    os.mkfifo(root / "train" / "dog" / "pipe.png")  # opening one waits until somebody writes to it
    (root / "train/cat/cut.png").write_bytes((root / "train/cat/0.png").read_bytes()[:40])
    (root / "train/cat/empty.png").touch()
    (root / "val/eel/page.png").write_bytes(b"<html>404</html>")
    return root


WRONG = {
    "other_files": {"train/cat/movie.mp4", "train/cat/notes.txt", "train/eel/clip.mp4"},
    "heic_images": {"train/dog/IMG_1.HEIC"},
    "special_files": {"train/dog/pipe.png"},
    "nested_folders": {"train/dog/more"},
    "empty_folders": {"train/fox", "val/fox"},
    "unread_folders": {"extra"},
    "broken_images": {"train/cat/cut.png", "train/cat/empty.png", "val/eel/page.png"},
}


@pytest.fixture(autouse=True)
def without_heic(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (file_checks, image_folder):
        monkeypatch.setattr(
            module, "HEIF_ENDINGS" if module is file_checks else "EXTENSIONS", ENDINGS[module is file_checks]
        )


ENDINGS = (tuple(each for each in EXTENSIONS if each not in ("heic", "heif")), ())


def test_all_that_is_wrong_is_in_one_message(tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        opened(everything_wrong(tmp_path))
    first, *kinds, skip, quarantine = str(raised.value).split("\n")
    assert "has 12 files or folders" in first
    counts = {SKIP_REASONS[kind]: len(names) for kind, names in WRONG.items()}
    assert [line.strip().partition(" (")[0] for line in kinds] == [f"{kind}: {n}" for kind, n in counts.items()]
    assert "(2 .mp4, 1 .txt; 'train/cat/movie.mp4', 'train/cat/notes.txt', 'train/eel/clip.mp4')" in kinds[0]
    assert "'train/cat/empty.png' (an empty file), 'val/eel/page.png' (a web page)" in kinds[-1]
    assert "data.on_bad=skip" in skip
    assert f"paceline check-data {tmp_path} --quarantine DIR" in quarantine
    for ignored in ("Thumbs", "desktop", "MACOSX", "DS_Store"):
        assert ignored not in str(raised.value)


def test_asked_to_it_leaves_them_out_and_says_how_many(tmp_path: Path) -> None:
    clean = make(tmp_path / "clean", *(f"train/{name}/{n}.png" for name in ("cat", "dog", "eel") for n in range(4)))
    make(clean, "val/cat/1.png", "val/dog/1.png", "val/eel/1.png")
    root = everything_wrong(tmp_path / "photos")
    before, found = opened(clean), opened(root, on_bad="skip")
    assert (found.classes, paths(found, root)) == (before.classes, paths(before, clean))
    assert found.left_out_counts == {f"{kind}_left_out": len(names) for kind, names in WRONG.items()}
    assert sum(each.startswith(tuple(SKIP_REASONS.values())) for each in found.left_out) == len(SKIP_REASONS)
    assert found.digest == opened(root, on_bad="skip").digest
    (root / "train/cat/cut.png").unlink()
    assert opened(root, on_bad="skip").digest != found.digest
    assert (before.left_out, before.left_out_counts, opened(clean, on_bad="skip").digest) == ((), {}, before.digest)


def test_what_cannot_be_left_out_is_refused_with_the_rest(tmp_path: Path) -> None:
    """A class that one split lacks may be a slip in its name, and one class alone teaches nothing."""
    root = make(tmp_path, "train/cat/1.png", "train/dog/1.png", "val/cat/1.png", "val/fox/1.png")
    (root / "train" / "cat" / "notes.txt").touch()
    with pytest.raises(DataError) as raised:
        opened(root)
    assert "lacks the classes 'dog'" in str(raised.value)
    assert "notes.txt" in str(raised.value)
    with pytest.raises(DataError) as raised:
        opened(root, on_bad="skip")
    assert "lacks the classes 'dog'" in str(raised.value)
    assert "notes.txt" not in str(raised.value)
    (tmp_path / "one" / "dog").mkdir(parents=True)
    with pytest.raises(DataError, match="one class folder, 'cat'"):
        opened(make(tmp_path / "one", "cat/1.png"), on_bad="skip")
    assert opened(tmp_path / "one", 1.0, on_bad="skip").classes == ("cat",)


def test_a_class_whose_images_are_all_broken_does_not_leave_one_class_in_silence(tmp_path: Path) -> None:
    root = make(tmp_path, *(f"{name}/{number}.png" for name in ("cat", "dog") for number in range(3)))
    for path in (root / "dog").iterdir():
        path.write_bytes(b"<html>404</html>")
    with pytest.raises(DataError, match="one class with images that can be opened, 'cat'"):
        opened(root, on_bad="skip")
    assert len(opened(root, 1.0, on_bad="skip").validation) == 3


def test_broken_images_up_to_a_number_stay(tmp_path: Path) -> None:
    root = make(tmp_path, "cat/1.png", "dog/1.png", "dog/2.png")
    (root / "dog" / "2.png").write_bytes(b"words")
    found = opened(root, max_broken=1)
    assert len(found.train) + len(found.validation) == 3
    assert found.left_out == ()
    (root / "cat" / "1.png").write_bytes(b"words")
    fault("images that cannot be opened: 2", root)


def test_everything_that_is_wrong_can_be_collected(tmp_path: Path) -> None:
    """What remains is opened; which images are broken is for the caller to find out."""
    problems = Problems()
    folder = opened(everything_wrong(tmp_path), problems=problems, tries_files=False)
    assert {(kind, os.path.relpath(path, tmp_path)) for kind, path, _ in problems.bad} == {
        (kind, name) for kind, names in WRONG.items() if kind != "broken_images" for name in names
    }
    assert list(problems.sentences()) == []
    assert folder.classes == ("cat", "dog", "eel", "fox")
    assert (len(folder.train), len(folder.validation)) == (14, 4)


def test_all_images_are_scored_of_a_folder_without_a_split_or_without_training_images(tmp_path: Path) -> None:
    for root, lead in ((tmp_path / "plain", ""), (tmp_path / "val", "val/"), (tmp_path / "test", "test/")):
        make(root, *(f"{lead}{name}/{number}.png" for name in "ab" for number in range(3)))
        found = opened(root, 1.0)
        assert paths(found, root)[1] == [f"{lead}{name}/{number}.png" for name in "ab" for number in range(3)]
        assert found.classes == ("a", "b")
    make(tmp_path / "val", "train/a/1.png", "train/b/1.png")
    assert paths(opened(tmp_path / "val", 1.0), tmp_path / "val")[0] == ["train/a/1.png", "train/b/1.png"]
