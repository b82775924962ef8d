"""Data sets of torchvision's by name give what torchvision hands out, through our own decoding where it lists files."""

from __future__ import annotations

import io
import json
import shutil
import socket
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torchvision.datasets as known
from golden_sentences import raises
from image_sets import idx, mnist
from PIL import Image

from paceline.data.image.datasets import open_dataset
from paceline.data.image.decode import BrokenImageError
from paceline.data.image.source import SampleSource, encoded_source
from paceline.errors import DataError
from paceline.recipe.data import Data


def jpeg(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(value).integers(0, 256, (20, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, quality=90)


def food(root: Path) -> Path:
    """Food-101 as it is published, of three classes."""
    splits: dict[str, dict[str, list[str]]] = {"train": {}, "test": {}}
    for label, name in enumerate(("apple_pie", "bibimbap", "caviar")):
        for number in range(5):
            key = f"{name}/{number}"
            jpeg(root / "food-101" / "images" / f"{key}.jpg", 10 * label + number)
            splits["train" if number < 3 else "test"].setdefault(name, []).append(key)
    (root / "food-101" / "meta").mkdir()
    for split, keys in splits.items():
        (root / "food-101" / "meta" / f"{split}.json").write_text(json.dumps(keys))
    return root


def opened(name: str, root: Path | None, **keys: Any) -> Any:
    return open_dataset(Data(dataset=f"torchvision:{name}", path=None if root is None else str(root), **keys))


def same(source: SampleSource, theirs: Any, mode: str) -> bool:
    """Whether a source has the images and labels that torchvision hands out."""
    assert len(source) == len(theirs)
    pairs = [theirs[sample] for sample in range(len(theirs))]
    pixels = [np.asarray(image.convert(mode)).reshape(*image.size[::-1], -1) for image, _ in pairs]
    images = all(np.array_equal(source.read(sample), each) for sample, each in enumerate(pixels))
    return images and source.labels.tolist() == [int(label) for _, label in pairs]


def test_files_are_decoded_as_all_files_are(tmp_path: Path) -> None:
    found = opened("Food101", food(tmp_path))
    assert found.classes == ("apple_pie", "bibimbap", "caviar")
    assert same(found.train, known.Food101(tmp_path, "train"), "RGB")
    assert same(found.validation, known.Food101(tmp_path, "test"), "RGB")
    assert encoded_source(found.train) is not None
    assert found.train.path(0) == str(tmp_path / "food-101" / "images" / "apple_pie" / "0.jpg")
    assert found.reasons["validation"] == "torchvision's split test"
    part = opened("Food101", tmp_path, only_classes=("caviar", "bibimbap"), subset=4)
    assert (part.classes, part.train.labels.tolist(), len(part.validation)) == (("bibimbap", "caviar"), [0, 0, 1, 1], 4)


def test_what_has_no_split_is_split(tmp_path: Path) -> None:
    for label in range(2):
        for number in range(5):
            jpeg(tmp_path / "eurosat" / "2750" / f"class{label}" / f"{number}.jpg", 10 * label + number)
    found = opened("EuroSAT", tmp_path, validation_fraction=0.4)
    assert (found.classes, len(found.train), len(found.validation)) == (("class0", "class1"), 6, 4)
    assert (
        opened("ImageFolder", tmp_path / "eurosat" / "2750", validation_fraction=0).train.labels.tolist()
        == [0] * 5 + [1] * 5
    )


def test_what_torchvision_does_not_list_is_reported(tmp_path: Path) -> None:
    food(tmp_path)
    for name in ("caviar/IMG_1.HEIC", "caviar/deep/a.jpg", "movie.mp4", "Thumbs.db", "caviar/.hidden.jpg"):
        jpeg(tmp_path / "unlisted.jpg", 1)
        (tmp_path / "food-101" / "images" / name).parent.mkdir(exist_ok=True)
        shutil.copy(tmp_path / "unlisted.jpg", tmp_path / "food-101" / "images" / name)
    (told,) = opened("Food101", tmp_path).left_out
    assert "does not list: 3 left out (1 .heic, 1 .jpg, 1 .mp4; 'food-101/images/caviar/IMG_1.HEIC', " in told
    images = tmp_path / "food-101" / "images"
    with pytest.raises(DataError, match=r"'caviar/\.hidden\.jpg'.*data\.dataset=image_folder"):
        opened("ImageFolder", images)
    (images / "caviar" / ".hidden.jpg").unlink()
    found = opened("ImageFolder", images)
    assert len(found.train) + len(found.validation) == 16  # torchvision looks into folders of class folders
    assert ": 2 left out (1 .heic, 1 .mp4; 'caviar/IMG_1.HEIC', 'movie.mp4')" in found.left_out[0]


def test_arrays_are_held_as_they_are(tmp_path: Path) -> None:
    mnist(tmp_path / "MNIST" / "raw")
    found = opened("MNIST", tmp_path)
    assert (found.channels, found.image_size, found.native_size) == (1, 28, (28, 28))
    assert same(found.train, known.MNIST(tmp_path, train=True), "L")
    assert same(found.validation, known.MNIST(tmp_path, train=False), "L")
    assert encoded_source(found.train) is None
    assert same(opened("MNIST", tmp_path, channels=3).train, known.MNIST(tmp_path, train=True), "RGB")


def test_options_are_handed_over(tmp_path: Path) -> None:
    mnist(tmp_path / "EMNIST" / "raw", prefixes=("emnist-letters-train", "emnist-letters-test"), classes=27)
    found = opened("EMNIST", tmp_path, options={"split": "letters"})
    assert same(found.validation, known.EMNIST(tmp_path, "letters", train=False), "L")
    assert len(found.classes) == 27
    with pytest.raises(DataError, match=r"data.options names 'sise', but FakeData takes size, .*'size'"):
        opened("FakeData", None, options={"sise": 3})


@pytest.mark.parametrize("option", ["transform", "loader", "root", "download"])
def test_what_is_not_for_the_user_to_give_is_refused(option: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"data.options names '{option}', but ImageFolder takes"):
        opened("ImageFolder", tmp_path, options={option: "x"})


@pytest.mark.parametrize("name", ["LSUN", "LSUNClass"])
def test_sets_that_load_a_pickle_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="can run any code"):
        opened(name, tmp_path)


def test_what_only_torchvision_knows_is_asked_of_it() -> None:
    options = {"size": 40, "image_size": (3, 12, 10), "num_classes": 4}
    found = opened("FakeData", None, options=options, validation_fraction=0)
    assert same(found.train, known.FakeData(**options), "RGB")
    assert (len(found.classes), found.reasons["path"]) == (4, "torchvision returns the images one by one")
    assert (
        opened("FakeData", None, options=options | {"random_offset": 1}, validation_fraction=0).digest != found.digest
    )


def test_what_cannot_be_opened_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"torchvision.datasets has no data set 'Flowers'. Did you mean 'Flowers102'"):
        opened("Flowers", tmp_path)
    with pytest.raises(DataError, match=r"needs data\.path: set it to where the data is"):
        opened("SVHN", None)
    with pytest.raises(DataError, match=r"Food101 cannot be opened in '.*' \(RuntimeError: Dataset not found"):
        opened("Food101", tmp_path)
    (tmp_path / "MNIST" / "processed").mkdir(parents=True)
    with raises(DataError, path="MNIST/processed"):
        opened("MNIST", tmp_path)
    with pytest.raises(
        DataError, match=r"CocoDetection cannot be opened .*'annFile'.*correct data.path or data.options"
    ):
        opened("CocoDetection", tmp_path)


def test_nothing_is_downloaded_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEMEION downloads unless it is told not to."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("it asked for a host"))
    with pytest.raises(DataError, match=r"SEMEION cannot be opened .*RuntimeError: Dataset not found"):
        opened("SEMEION", tmp_path)


def test_labels_that_are_no_classes_are_refused(tmp_path: Path) -> None:
    jpeg(tmp_path / "pictures" / "1.jpg", 1)
    box = {"id": 1, "image_id": 1, "bbox": [0, 0, 5, 5], "category_id": 1, "area": 25, "iscrowd": 0}
    content = {"images": [{"id": 1, "file_name": "1.jpg"}], "annotations": [box], "categories": [{"id": 1}]}
    (tmp_path / "boxes.json").write_text(json.dumps(content))
    pytest.importorskip("pycocotools", reason="torchvision reads COCO's files with it")
    with pytest.raises(DataError, match=r"labels images by list .*a classifier learns one class of each image"):
        opened("CocoDetection", tmp_path / "pictures", options={"annFile": str(tmp_path / "boxes.json")})


class Listed(known.VisionDataset):
    """Four images in each of three splits; `asked` notes what it was opened with."""

    asked: ClassVar[list[tuple[str, bool]]] = []
    labels: ClassVar[list[int | None]] = [0, 1, 0, 1]

    def __init__(self, root: Path | str, split: str = "train", download: bool = False) -> None:
        super().__init__(root)
        self.asked.append((split, download))
        if split not in ("train", "val", "test"):
            raise ValueError(split)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Image.Image, int | None]:
        return Image.new("RGB", (9, 7), (index, 0, 0)), self.labels[index]


def test_a_split_that_is_not_read_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "Flowers102", Listed)
    monkeypatch.setattr(Listed, "asked", [])
    assert opened("Flowers102", tmp_path, download=True).reasons["validation"].endswith("val; test is not read")
    assert Listed.asked == [("train", True), ("val", True), ("test", False)]


class Files(Listed):
    """The same from files, of which one is damaged; they are not listed."""

    def __getitem__(self, index: int) -> tuple[Image.Image, int | None]:
        return Image.open(io.BytesIO(Path(self.root, f"{index}.png").read_bytes())), self.labels[index]


def test_a_damaged_image_is_reported_when_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "Flowers102", Files)
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 256, (150, 200, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    content = (tmp_path / "0.png").read_bytes()
    second = content.rindex(b"IDAT")
    for damaged in (content[:second], content[:second] + b"\1" + content[second + 1 :]):
        (tmp_path / "0.png").write_bytes(damaged)
        found = opened("Flowers102", tmp_path)
        assert found.native_size == (150, 200)
        with pytest.raises(BrokenImageError, match=r"Files\[0\]"):
            found.train.read(0)


def test_an_image_without_a_label_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "Flowers102", Listed)
    monkeypatch.setattr(Listed, "labels", [0, None, 0, 1])
    with pytest.raises(DataError, match=r"labels images by NoneType \(None\), and a classifier"):
        opened("Flowers102", tmp_path)


def test_a_class_that_takes_any_argument_is_given_none_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ImageNet hands on what it is given, and what it hands it to knows no download."""

    class Handing(known.ImageFolder):
        def __init__(self, root: str, split: str = "train", **kwargs: Any) -> None:
            super().__init__(f"{root}/{split}", **kwargs)

    for split in ("train", "val"):
        for name in ("cat", "dog"):
            jpeg(tmp_path / split / name / "1.jpg", 1)
    monkeypatch.setattr(known, "ImageNet", Handing)
    found = opened("ImageNet", tmp_path)
    assert (len(found.train), len(found.validation)) == (2, 2)


def test_channels_first_are_turned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SVHN and STL-10 hold their pixels so; both insist on the published bytes, which are not here."""

    class Small(known.VisionDataset):
        def __init__(self, root: Path | str) -> None:
            super().__init__(root)
            self.data = np.random.default_rng(0).integers(0, 256, (8, 3, 9, 7), dtype=np.uint8)
            self.labels = np.arange(8) % 2

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> tuple[Image.Image, int]:
            return Image.fromarray(self.data[index].transpose(1, 2, 0)), int(self.labels[index])

    monkeypatch.setattr(known, "SVHN", Small)
    found = opened("SVHN", tmp_path, validation_fraction=0)
    assert same(found.train, Small(tmp_path), "RGB")
    assert found.reasons["path"] == "torchvision's array of pixels"


@pytest.mark.parametrize("name", ["torchvision:EuroSAT", "cifar10", "cifar100", "mnist", "fashion_mnist"])
def test_without_a_network_a_download_says_so(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(DataError, match=r"data.download=true, but .* cannot be downloaded into .*: download it where"):
        open_dataset(Data(dataset=name, path=str(tmp_path / "new"), download=True))


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_what_is_there_is_not_downloaded(tmp_path: Path, name: str) -> None:
    mnist(tmp_path / "MNIST" / "raw")
    mnist(tmp_path / "FashionMNIST" / "raw")
    idx(tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte", np.full(30, 7))
    (tmp_path / ".paceline-download.lock").mkdir()  # nobody can take a lock, as in a read-only folder
    found = open_dataset(Data(dataset=name, path=str(tmp_path), download=True))
    assert (set(found.train.labels.tolist()) == {7}) == (name == "mnist")
    assert found.classes[0] == ("0" if name == "mnist" else "T-shirt/top")
    assert found.reasons["validation"] == "the archive's test images"
    grey = open_dataset(Data(dataset=name, path=str(tmp_path), channels=3))
    assert (len(grey.mean), grey.mean[0]) == (3, found.mean[0])
