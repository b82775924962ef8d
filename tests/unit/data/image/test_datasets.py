"""Each name a recipe can give opens what it says, with every `auto` resolved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from golden_sentences import raises
from PIL import Image

from paceline.data.image.datasets import ImageDataset, open_dataset
from paceline.data.image.source import ArraySource
from paceline.errors import DataError, RecipeError
from paceline.recipe.data import Data


def make_folder(root: Path, size: tuple[int, int], mode: str = "RGB", count: int = 3) -> Path:
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for number in range(count):
            Image.new(mode, size).save(root / name / f"{number}.png")
    return root


def test_digits() -> None:
    dataset = open_dataset(Data(dataset="digits"))
    assert (dataset.name, dataset.channels, dataset.image_size, dataset.native_size) == ("digits", 1, 8, (8, 8))
    assert dataset.classes == tuple("0123456789")
    assert len(dataset.train) + len(dataset.validation) == 1797
    assert len(dataset.validation) == 359
    pixels = np.stack([dataset.train.read(sample) for sample in range(len(dataset.train))])
    assert (pixels.dtype, pixels.shape[1:], pixels.min(), pixels.max()) == (np.uint8, (8, 8, 1), 0, 255)
    assert dataset.validation.path(0).startswith("digits[")
    assert "8x8" in dataset.reasons["image_size"]


def test_digits_are_scikit_learns() -> None:
    code = (
        "import sys; from paceline.data.image.sets.digits import read_digits; source = read_digits();"
        "assert 'sklearn' not in sys.modules; from sklearn.datasets import load_digits; import numpy as np;"
        "theirs = load_digits(); assert np.array_equal(theirs.target, source.labels);"
        "assert np.array_equal(np.rint(theirs.images * 255 / 16), source.images[..., 0]);"
        "from paceline.data.image.sets import digits; scaled = source.images / 255;"
        "assert abs(scaled.mean() - digits.MEAN[0]) < 1e-4 and abs(scaled.std() - digits.STD[0]) < 1e-4"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_digits_in_colour() -> None:
    dataset = open_dataset(Data(dataset="digits", channels=3, image_size=32))
    assert (dataset.channels, dataset.image_size, dataset.native_size) == (3, 32, (8, 8))
    image = dataset.train.read(0)
    assert image.shape == (8, 8, 3)
    assert (image == image[..., :1]).all()
    assert len(dataset.mean) == len(dataset.std) == 3


def test_small_folder_keeps_its_size(tmp_path: Path) -> None:
    dataset = open_dataset(Data(dataset="image_folder", path=str(make_folder(tmp_path, (48, 48)))))
    assert (dataset.image_size, dataset.native_size, dataset.channels) == (48, (48, 48), 3)
    assert "48x48" in dataset.reasons["image_size"]
    assert dataset.mean == (0.485, 0.456, 0.406)
    assert dataset.classes == ("cat", "dog")


@pytest.mark.parametrize("size", [(65, 65), (48, 32)])
def test_other_folders_take_224(tmp_path: Path, size: tuple[int, int]) -> None:
    dataset = open_dataset(Data(path=str(make_folder(tmp_path, size))))
    assert (dataset.image_size, dataset.native_size) == (224, size[::-1])
    assert open_dataset(Data(path=str(tmp_path), image_size=96)).image_size == 96


def test_greyscale_folder(tmp_path: Path) -> None:
    make_folder(tmp_path, (8, 8), "L")
    dataset = open_dataset(Data(path=str(tmp_path)))
    assert (dataset.channels, dataset.mean, dataset.train.read(0).shape) == (1, (0.449,), (8, 8, 1))
    assert open_dataset(Data(path=str(tmp_path), channels=3)).train.read(0).shape == (8, 8, 3)


def test_cifar10_as_an_image_folder(tmp_path: Path) -> None:
    dataset = open_dataset(Data(dataset="cifar10", path=str(make_folder(tmp_path, (32, 32)))))
    assert (dataset.name, dataset.image_size, dataset.mean[0]) == ("cifar10", 32, 0.4914)


def test_synthetic() -> None:
    dataset = open_dataset(Data(dataset="synthetic", samples=50, classes=7))
    assert (len(dataset.train), len(dataset.validation), dataset.image_size) == (50, 5, 224)
    assert dataset.train.labels.tolist() == [index % 7 for index in range(50)]
    assert np.array_equal(dataset.train.read(3), dataset.train.read(3))
    assert not np.array_equal(dataset.train.read(3), dataset.train.read(4))
    assert not np.array_equal(dataset.train.read(0), dataset.validation.read(0))
    assert dataset.train.read(0).shape == (224, 224, 3)


def test_the_recipes_own_normalisation() -> None:
    dataset = open_dataset(Data(dataset="digits", mean=(0.5,), std=(0.25,)))
    assert (dataset.mean, dataset.std) == ((0.5,), (0.25,))
    with pytest.raises(RecipeError, match=r"data\.mean has 3 values, but the images have 1 channels"):
        open_dataset(Data(dataset="digits", mean=(0.5, 0.5, 0.5)))


def test_digests_tell_data_apart() -> None:
    digests = {
        open_dataset(Data(dataset="digits")).digest,
        open_dataset(Data(dataset="synthetic", samples=5)).digest,
        open_dataset(Data(dataset="synthetic", samples=6)).digest,
    }
    assert len(digests) == 3
    assert open_dataset(Data(dataset="digits", image_size=16)).digest in digests


def factory(data: Data) -> ImageDataset:
    source = ArraySource(np.zeros((4, 5, 5, 3), np.uint8), np.array([0, 1, 0, 1]), "mine")
    return ImageDataset(
        name="mine",
        train=source,
        validation=source,
        classes=("a", "b"),
        channels=3,
        image_size=5,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
    )


def test_a_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_images.py").write_text("def make(data): return data.samples\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match="returned int; it must return"):
        open_dataset(Data(dataset="my_images:make"))
    with pytest.raises(DataError, match=r"has no 'mak'. Did you mean 'make'"):
        open_dataset(Data(dataset="my_images:mak"))
    with pytest.raises(DataError, match="no module 'my_imagse'"):
        open_dataset(Data(dataset="my_imagse:make"))
    sys.modules["my_images"].make = factory
    assert open_dataset(Data(dataset="my_images:make")).name == "mine"


def test_unknown_names_are_answered() -> None:
    with pytest.raises(DataError, match=r"known are cifar10, cifar100, csv, digits, .*Did you mean 'digits'"):
        open_dataset(Data(dataset="digit"))


@pytest.mark.parametrize("name", ["image_folder", "cifar10"])
def test_a_path_is_needed(name: str) -> None:
    with pytest.raises(DataError, match=r"needs data\.path"):
        open_dataset(Data(dataset=name))


def test_it_is_told_where_held_out_images_come_from(tmp_path: Path) -> None:
    split_off = "20% of each class, always the same (data.validation_fraction)"
    folder = make_folder(tmp_path / "train", (8, 8)).parent
    for dataset in ("digits", "image_folder", "cifar10"):
        data = Data(dataset=dataset, path=None if dataset == "digits" else str(folder))
        reasons = open_dataset(data).reasons
        assert reasons["validation"] == split_off
        assert "validation_fraction" not in reasons
    assert open_dataset(Data(dataset="digits", validation_fraction=0)).reasons["validation"].startswith("none")

    make_folder(tmp_path / "val", (8, 8))
    for dataset in ("image_folder", "cifar10"):
        reasons = open_dataset(Data(dataset=dataset, path=str(folder))).reasons
        assert reasons["validation"] == "the folder val/"
        assert reasons["validation_fraction"] == "the data has its own split, the folder val/"


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_what_is_held_out_of_training_leaves_the_rest_as_it_was(name: str) -> None:
    classes = {"classes": 10} if name == "synthetic" else {}
    whole, parted = (open_dataset(Data(dataset=name, holdout_fraction=each, **classes)) for each in (0.0, 0.1))
    assert whole.holdout is None
    assert parted.holdout is not None
    names = [parted.train.path(sample) for sample in range(len(parted.train))]
    names += [parted.holdout.path(sample) for sample in range(len(parted.holdout))]
    assert sorted(names) == sorted(whole.train.path(sample) for sample in range(len(whole.train)))
    assert len(parted.holdout) == pytest.approx(0.1 * len(whole.train), abs=0.5 * len(whole.classes))
    assert parted.validation.labels.tolist() == whole.validation.labels.tolist()
    assert parted.digest == whole.digest


def test_where_nothing_can_be_held_out_it_is_refused(tmp_path: Path) -> None:
    with raises(RecipeError, key="data.holdout_fraction", value="0.5"):
        open_dataset(Data(path=str(make_folder(tmp_path, (8, 8), count=1)), holdout_fraction=0.5))
