"""An image folder is listed in one fixed order, and whatever is unusual about it is an error that names it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_sets import opened_set
from PIL import Image

from paceline.data.image.dataset import StoredImages
from paceline.data.image.source import EXTENSIONS
from paceline.errors import DataError


def make(root: Path, *names: str, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, size).save(path)
    return root


def opened(root: Path, fraction: float = 0.5, channels: int | None = None) -> StoredImages:
    return opened_set("image_folder", root, channels=channels, validation_fraction=fraction)


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


@pytest.mark.parametrize("lead", ["", "train/"])
def test_a_part_is_held_out(tmp_path: Path, lead: str) -> None:
    make(tmp_path, *(f"{lead}{name}/{number}.png" for name in "ab" for number in range(4)))
    folder = opened(tmp_path, 0.25)
    train, held_out = paths(folder, tmp_path)
    assert sorted(train + held_out) == [f"{lead}{name}/{number}.png" for name in "ab" for number in range(4)]
    assert folder.validation.labels.tolist() == [0, 1]
    assert "25%" in folder.split


def test_hidden_and_loose_files_are_ignored(tmp_path: Path) -> None:
    make(tmp_path, "a/1.png", "b/1.png", "a/2.PNG", "b/2.JPeG")
    for name in (".DS_Store", "a/.hidden.png", "README.md", ".git/config"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    train, held_out = paths(opened(tmp_path), tmp_path)
    assert sorted(train + held_out) == ["a/1.png", "a/2.PNG", "b/1.png", "b/2.JPeG"]


def test_links_are_followed(tmp_path: Path) -> None:
    make(tmp_path / "elsewhere", "a/1.png", "one.png", "a/2.png")
    root = make(tmp_path / "data", "b/1.png")
    (root / "a").symlink_to(tmp_path / "elsewhere" / "a")
    (root / "b" / "2.png").symlink_to(tmp_path / "elsewhere" / "one.png")
    (root / "b" / "3.png").symlink_to(tmp_path / "nowhere.png")
    train, held_out = paths(opened(root), root)
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
    folder = opened(root)
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

    assert len(opened(tmp_path).train) == 1000
    listing = cost(lambda: [each.stat() for name in "ab" for each in (tmp_path / name).iterdir()])
    assert cost(lambda: opened(tmp_path)) < 10 * listing


def fault(message: str, root: Path) -> None:
    with pytest.raises(DataError) as caught:
        opened(root)
    text = str(caught.value)
    assert message in text
    assert "\n" not in text


def test_missing_path_suggests_the_nearest(tmp_path: Path) -> None:
    make(tmp_path, "imagenet/a/1.png", "other/b/1.png")
    fault("has no 'imagnet': correct the path. Did you mean 'imagenet'?", tmp_path / "imagnet")
    fault("has no 'imagnet': correct the path. Did you mean 'imagenet'?", tmp_path / "imagnet" / "train")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    make(tmp_path, "a.png")
    fault("which is a file", tmp_path / "a.png")


def test_no_classes(tmp_path: Path) -> None:
    fault("has no folders in it", tmp_path)
    make(tmp_path, "1.png", "train/1.png")
    fault("train' has no folders in it", tmp_path)


def test_one_class(tmp_path: Path) -> None:
    fault("one class folder, 'cat'", make(tmp_path, "cat/1.png"))


def test_an_empty_class(tmp_path: Path) -> None:
    make(tmp_path, "cat/1.png")
    (tmp_path / "dog").mkdir()
    (tmp_path / "dog" / ".hidden").touch()
    fault("dog' is empty", tmp_path)


def test_a_file_that_is_no_image(tmp_path: Path) -> None:
    make(tmp_path, "cat/1.png", "dog/1.png")
    (tmp_path / "dog" / "labels.txt").touch()
    fault("labels.txt' is not an image (supported", tmp_path)
    fault(", ".join(EXTENSIONS), tmp_path)


def test_a_folder_in_a_class(tmp_path: Path) -> None:
    fault("more' is a folder inside a class folder", make(tmp_path, "cat/1.png", "dog/1.png", "dog/more/2.png"))


def test_classes_differ(tmp_path: Path) -> None:
    make(tmp_path, "train/cat/1.png", "train/dog/1.png", "val/cat/1.png", "val/fox/1.png")
    fault("val' lacks the classes dog and ", tmp_path)
    make(tmp_path, "val/dog/1.png")
    fault("train' lacks the classes fox, but train/ and val/ must hold the same classes", tmp_path)


def test_every_missing_class_is_named(tmp_path: Path) -> None:
    missing = [f"class{number}" for number in range(9)]
    make(tmp_path, "val/cat/1.png", "val/eel/1.png", "train/cat/1.png", *(f"train/{name}/1.png" for name in missing))
    fault(f"val' lacks the classes {', '.join(missing)} and ", tmp_path)
    fault("train' lacks the classes eel, but", tmp_path)


def test_held_out_images_alone(tmp_path: Path) -> None:
    fault("has 'val' but no 'train'", make(tmp_path, "val/cat/1.png", "val/dog/1.png"))


def test_a_held_out_folder_of_another_name(tmp_path: Path) -> None:
    make(tmp_path, "train/cat/1.png", "train/dog/1.png", "validation/cat/1.png", "validation/dog/1.png")
    fault("has 'validation' next to 'train'", tmp_path)


def test_all_that_is_wrong_is_in_one_message(tmp_path: Path) -> None:
    before = opened(make(tmp_path, "cat/0.png", "dog/0.png"))
    for name in ("cat/Thumbs.db", "dog/desktop.ini", "__MACOSX/cat/._0.png", "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    found = opened(tmp_path)
    assert (found.digest, found.classes) == (before.digest, ("cat", "dog"))
    assert found.left_out == ("files outside the class folders: 1 left out ('README.md')",)
    for name in ("cat/movie.mp4", "dog/IMG_1.HEIC", *(f"dog/z{number}.txt" for number in range(9))):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "nothing-here").mkdir()
    with pytest.raises(DataError) as raised:
        opened_set("image_folder", tmp_path, channels=3, validation_fraction=0)
    assert all(
        each in str(raised.value) for each in ("movie.mp4", "and 10 more", "IMG_1.HEIC", "nothing-here' is empty")
    )
    assert len(str(raised.value)) < 1000


def test_a_pipe_is_no_image(tmp_path: Path) -> None:
    """Opening one waits until somebody writes to it."""
    make(tmp_path, "cat/1.png", "dog/1.png")
    os.mkfifo(tmp_path / "dog" / "2.png")
    fault("2.png' is neither a file nor a link to one", tmp_path)


def test_everything_that_is_wrong_can_be_told_at_once(tmp_path: Path) -> None:
    """The same sentences, and what remains is opened."""
    make(tmp_path, "train/cat/1.png", "train/dog/1.png", "train/dog/more/2.png", "val/cat/1.png", "val/eel/1.png")
    make(tmp_path, "extra/1.png")
    (tmp_path / "train" / "cat" / "labels.txt").touch()
    (tmp_path / "train" / "fox").mkdir()
    told: list[str] = []
    folder = opened_set("image_folder", tmp_path, channels=None, validation_fraction=0.5, fault=told.append)
    for part in (
        "'extra' next to",
        "labels.txt' is not",
        "more' is a folder inside",
        "fox' is empty",
        "lacks the classes",
    ):
        assert sum(part in sentence for sentence in told) == 1
    assert len(told) == 5
    assert folder.classes == ("cat", "dog", "eel", "fox")
    assert paths(folder, tmp_path) == (["train/cat/1.png", "train/dog/1.png"], ["val/cat/1.png", "val/eel/1.png"])
    assert (folder.train.labels.tolist(), folder.validation.labels.tolist()) == ([0, 1], [0, 2])
