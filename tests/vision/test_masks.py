"""Folders of images and label maps: what is read, what is reported, and what is refused."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from paceline.data import disk_cache
from paceline.data.image.decode import BrokenImageError
from paceline.errors import DataError
from paceline.recipe.data import Data, GeneratedBoxes
from paceline_vision.segmentation.dataset import from_objects
from paceline_vision.sets.masks import open_masks
from paceline_vision.sets.shapes import open_shapes

Folder = Callable[..., Path]


@pytest.fixture
def folder(runs: Path) -> Folder:
    """Make images of 12x8 pixels, each with a mask of two classes, in the splits given."""

    def make(*splits: str, count: int = 5, classes: str | None = None) -> Path:
        for split in splits or ("",):
            for number in range(count):
                write(runs / "set" / split, f"{number}", number % 2 + np.arange(96).reshape(8, 12) % 2)
        if classes is not None:
            (runs / "set/classes.txt").write_text(classes)
        return runs / "set"

    return make


def write(where: Path, name: str, labels: Any, ending: str = "jpg", **how: Any) -> None:
    for kind in ("images", "masks"):
        (where / kind / name).parent.mkdir(parents=True, exist_ok=True)
    labels = np.asarray(labels, dtype=np.uint8)
    Image.fromarray(np.full((*labels.shape, 3), 9, dtype=np.uint8)).save(where / "images" / f"{name}.{ending}")
    mask = Image.fromarray(labels, **how)
    if how.get("mode") == "P":
        mask.putpalette([200, 10, 10] * 256)
    mask.save(where / "masks" / f"{name}.png")


def opened(path: Path, **data: Any) -> Any:
    return open_masks(Data(dataset="masks", path=str(path), **data))


def test_of_held_out_folders_alone_the_first_is_scored(folder: Folder) -> None:
    folder("test", count=3)
    found = opened(folder("val"), validation_fraction=1.0)
    assert (len(found.validation), found.split) == (5, "the folder val/")


def test_both_splits_are_read_with_their_classes(folder: Folder) -> None:
    found = opened(folder("train", "val", classes="sky\nroad\ntree\n"))
    assert found.classes == ("sky", "road", "tree")
    assert (len(found.train), len(found.validation), found.left_out) == (5, 5, ())
    image, labels = found.train.read(1)
    assert image.shape == (8, 12, 3)
    assert np.array_equal(labels, 1 + np.arange(96).reshape(8, 12) % 2)
    assert found.train.path(1).endswith("train/images/1.jpg")


def test_a_test_split_without_masks_is_not_read(folder: Folder) -> None:
    path = folder("train", "test")
    shutil.rmtree(path / "test/masks")
    found = opened(path)
    assert (len(found.train), len(found.validation)) == (4, 1)
    assert "folders that are not read: 1 left out ('test')" in found.left_out


def test_classes_without_names_are_numbers_and_some_images_are_held_out(folder: Folder) -> None:
    path = folder(count=10)
    write(path, "street/palette", [[0, 4], [255, 1]], mode="P")
    found = opened(path)
    assert found.classes == ("0", "1", "2", "3", "4")
    assert (len(found.train), len(found.validation)) == (9, 2)
    assert "20% of the images" in found.split
    both = [source.path(each) for source in (found.train, found.validation) for each in range(len(source))]
    assert len(set(both)) == 11
    again = opened(path)
    assert (again.train, again.digest) == (found.train, found.digest)
    assert sorted(map(opened(path, validation_fraction=1.0).validation.path, range(11))) == sorted(both)
    where = next(path for path in both if "palette" in path)
    source = found.train if where in found.train.images else found.validation
    assert source.read(source.images.index(where))[1].tolist() == [[0, 4], [255, 1]]


def test_what_is_used_and_what_is_reported_is_all_there_is(folder: Folder) -> None:
    path = folder("train", "val", classes="a\nb\nc")
    train = path / "train"
    (train / "masks/0.png").unlink()
    (train / "images/1.jpg").unlink()
    (train / "images/notes.txt").write_text("?")
    (train / "masks/2.jpg").write_bytes(b"")
    Image.new("RGB", (12, 8)).save(train / "images/3.png")
    (path / "extra").mkdir()
    (path / "val/readme.md").write_text("?")
    found = opened(path)
    assert len(found.train) == 3
    told = "\n".join(found.left_out)
    for sentence in (
        "images without a mask: 1 left out",
        "masks without an image: 1 left out",
        "files in images/ with other extensions: 1 left out",
        "files in masks/ with other extensions: 1 left out",
        "images with the same name as another one: 1 left out",
        "folders that are not read: 1 left out",
        "files that are not read: 1 left out",
    ):
        assert sentence in told
    everything = sum(each.is_file() for each in path.rglob("*")) + 1  # the folder `extra`
    used = 2 * (len(found.train) + len(found.validation)) + 1  # classes.txt
    counts = re.findall(r": (\d+) left", "\n".join(found.left_out))
    assert len(counts) == len(found.left_out)
    assert used + sum(map(int, counts)) == everything


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "size": (lambda at: Image.new("L", (12, 9)).save(at), r"0\.png': it has 12x9 pixels, and its image 12x8"),
    "value": (lambda at: Image.new("L", (12, 8), 3).save(at), r"0\.png': it has the value 3, but there are 3 classes"),
    "colours": (
        lambda at: Image.new("RGB", (12, 8)).save(at),
        r"0\.png': its pixels are colours \(RGB\), but a",
    ),
    "no picture": (lambda at: at.write_bytes(b"no picture"), r"0\.png': a mask must be a palette or 8-bit grey PNG"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_mask_that_does_not_fit_is_refused_by_name_or_left_out(kind: str, folder: Folder) -> None:
    path = folder("train", "val", classes="a\nb\nc")
    opened(path)  # what is remembered of the masks must not hide that one changes
    spoil, said = BAD[kind]
    spoil(path / "train/masks/0.png")
    with pytest.raises(DataError, match=said) as refused:
        opened(path)
    assert "\n" not in str(refused.value)
    found = opened(path, on_bad="skip")
    assert len(found.train) == 4
    assert "images whose mask does not fit: 1 left out" in found.left_out[0]


def test_masks_are_read_once_unless_they_changed_a_moment_ago(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    path, now = folder("train", "val", classes="a\nb\nc"), time.time_ns()
    for changed in (now, 0):
        monkeypatch.setattr(disk_cache, "stamp_of", lambda _, changed=changed: (1, 1, changed, changed))
        Image.new("L", (12, 8), 1).save(path / "train/masks/0.png")
        opened(path)
        Image.new("L", (12, 8), 3).save(path / "train/masks/0.png")
        if changed:
            with pytest.raises(DataError, match="has the value 3"):
                opened(path)
        else:
            opened(path)


def test_many_bad_masks_are_counted_and_some_named(folder: Folder) -> None:
    path = folder("train", count=7, classes="a\nb")
    with pytest.raises(DataError, match=r"3 classes|value 2") as refused:
        opened(path)
    assert str(refused.value).count(".png") == 3
    (path / "classes.txt").write_text("only")
    with pytest.raises(DataError, match="has 1 classes"):
        opened(path)


def test_an_image_that_changes_after_the_start_is_broken(folder: Folder) -> None:
    path = folder("train", "val")
    found = opened(path)
    Image.new("RGB", (5, 5)).save(path / "train/images/0.jpg")
    with pytest.raises(BrokenImageError, match="its image 5x5"):
        found.train.read(0)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (lambda path: None, "needs data.path"),
        (lambda path: path / "nowhere", "is not a folder"),
        (lambda path: path / "val", "has no folder images/"),
        (lambda path: path, "has val/images but no train/images"),
    ],
)
def test_another_layout_is_refused(asked: Callable[[Path], Path | None], said: str, runs: Path) -> None:
    write(runs / "set/val", "0", [[0, 1]])
    (runs / "set/val/images").rename(runs / "set/val/image")
    if said.startswith("has val"):
        (runs / "set/val/image").rename(runs / "set/val/images")
    path = asked(runs / "set")
    with pytest.raises(DataError, match=said):
        open_masks(Data(dataset="masks", path=None if path is None else str(path)))


def test_names_of_classes_must_differ(folder: Folder) -> None:
    with pytest.raises(DataError, match="3 classes, 2 of them different"):
        opened(folder(classes="a\nb\na"))


@pytest.mark.parametrize("classes", [None, "sky\nroad\n"])
def test_masks_of_one_class_are_refused_and_classes_without_pixels_told(folder: Folder, classes: str | None) -> None:
    root = folder(classes=classes)
    for number in range(5):
        write(root, f"{number}", 255 * (np.arange(96).reshape(8, 12) % 2))
    with pytest.raises(
        DataError, match=r"fewer than two classes, and 255, which means 'ignored': data.mask_values=\[0, 255\]"
    ):
        opened(root)
    if classes is None:
        write(root, "0", np.full((8, 12), 7))
        assert "6 of 8 classes have no pixel in any training mask: 1, 2, 3" in opened(root).left_out[-1]


@pytest.mark.parametrize("mode", ["L", "1"])
def test_values_of_masks_may_be_listed_by_class(folder: Folder, mode: str) -> None:
    root = folder(classes="sky\nroad\n")
    for number in range(5):
        path = root / f"masks/{number}.png"
        Image.fromarray(255 * (np.arange(96).reshape(8, 12) % 2).astype(np.uint8)).convert(mode).save(path)
    with pytest.raises(DataError, match=r"data\.mask_values=\[0, 255\] makes 255 a class") as refused:
        opened(root)
    assert (refused.value.key, refused.value.value) == ("data.mask_values", (0, 255))
    found = opened(root, mask_values=(0, 255))
    assert found.train.read(0)[1].tolist() == (np.arange(96).reshape(8, 12) % 2).tolist()
    assert found.digest != opened(root, mask_values=(255, 0)).digest
    assert opened(root, mask_values=(255, 0)).train.read(0)[1][0, :2].tolist() == [1, 0]


def test_a_value_that_is_not_listed_is_refused_and_255_ignored(folder: Folder) -> None:
    root = folder(classes="sky\nroad\n")
    for number in range(5):
        write(root, f"{number}", np.full((8, 12), 100) + 28 * (np.arange(96).reshape(8, 12) % 2))
    assert len(opened(root, mask_values=(100, 128)).train) == 4
    write(root, "3", np.array([[100, 128, 255, 100] * 3] * 8))
    found = opened(root, mask_values=(100, 128))
    assert any(255 in source.read(each)[1] for source in (found.train, found.validation) for each in range(len(source)))
    write(root, "3", np.array([[100, 128, 7, 100] * 3] * 8))
    with pytest.raises(DataError, match=r"3\.png': it has the value 7, which data\.mask_values does not list"):
        opened(root, mask_values=(100, 128))


def test_bad_masks_are_told_alike_by_every_process_and_links_to_nowhere_too(folder: Folder) -> None:
    root = folder(count=6, classes="\ufeffsky\nroad\ntree\n")
    (root / "masks/0.png").write_bytes(b"no picture")
    (root / "masks/1.png").unlink()
    (root / "masks/1.png").symlink_to(root / "nowhere.png")
    found = opened(root, on_bad="skip")
    assert found.classes == ("sky", "road", "tree")
    told = " ".join(found.left_out)
    assert "2" in told
    assert "0x" not in told
    assert len(found.files) == 2 * 4


def test_annotations_of_too_many_classes_are_refused() -> None:
    boxes = open_shapes(GeneratedBoxes(samples=1, evaluation_samples=1))
    with pytest.raises(DataError, match="it has 255 classes, but task=segmentation learns 254 at most"):
        from_objects(replace(boxes, classes=tuple(map(str, range(255)))))
