"""Every kind of source is recognised by its files, and packed with the images, labels and classes that it has."""

from __future__ import annotations

import importlib.util
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from golden_sentences import raises
from image_sets import mnist, opened_set, packed
from PIL import Image

from paceline.data.image.datasets import open_dataset
from paceline.data.image.sets.packed import read_manifest
from paceline.errors import DataError
from paceline.plugins.dataset_registry import detect_dataset
from paceline.recipe.data import Data
from paceline_data.packing.origins import open_origin

pytest.importorskip("pyarrow")

DRAWS = np.random.default_rng(0)


def cifar10(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        records = DRAWS.integers(0, 10, (4, 3073), dtype=np.uint8)
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return folder


def tars(folder: Path, photos: Path) -> Path:
    """Write the images of a folder into tars, with names as labels."""
    folder.mkdir()
    for split in ("train", "val"):
        with tarfile.open(folder / f"{split}-000.tar", "w") as tar:
            for path in sorted((photos / split).rglob("*.*")):
                key = f"{path.parent.name}{path.stem}"
                for name, content in (
                    (f"{key}{path.suffix}", path.read_bytes()),
                    (f"{key}.cls", path.parent.name.encode()),
                ):
                    info = tarfile.TarInfo(name)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return folder


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("cvs", "Did you mean 'csv'"),
        ("digits", "digits is not read from files"),
        ("docs", "a data set of texts"),
    ],
)
def test_another_kind_is_refused(photos: Path, kind: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        open_origin(str(photos), kind)


def test_every_kind_is_recognised(photos: Path, tmp_path: Path) -> None:
    packed(photos, tmp_path / "packed")
    (tmp_path / "cifar-10-python.tar.gz").touch()
    (tmp_path / "cifar-100-python.tar.gz").touch()
    for name in ("MNIST", "FashionMNIST"):
        mnist(tmp_path / name / "raw", ending="-idx{}-ubyte.gz")
    for path, kind in (
        (photos, "image_folder"),
        (cifar10(tmp_path / "a" / "cifar-10-batches-bin"), "cifar10"),
        (tmp_path / "a", "cifar10"),
        (tmp_path / "MNIST" / "raw", "mnist"),
        (tmp_path / "MNIST", "mnist"),
        (tmp_path / "FashionMNIST" / "raw", "fashion_mnist"),
        (tars(tmp_path / "tars", photos), "webdataset"),
        (tmp_path / "tars" / "train-000.tar", "webdataset"),
        (tmp_path / "tars" / "train-{000..001}.tar", "webdataset"),
        (tmp_path / "packed", "packed"),
        (tmp_path / "cifar-10-python.tar.gz", "cifar10"),
        (tmp_path / "cifar-100-python.tar.gz", "cifar100"),
    ):
        assert detect_dataset(str(path)) == kind, path
    with pytest.raises(DataError, match=r"there is no .*nothing"):
        detect_dataset(str(tmp_path / "nothing"))
    (tmp_path / "readme.txt").touch()
    with pytest.raises(DataError, match="is a file whose name does not tell what it holds"):
        detect_dataset(str(tmp_path / "readme.txt"))
    with raises(DataError, path="photos"):
        open_origin(str(photos), "cifar100")


def test_the_published_cifar10_is_what_it_is_unpacked(tmp_path: Path) -> None:
    source = cifar10(tmp_path / "cifar")
    packed(source, tmp_path / "dest")
    for channels in ("auto", 1):
        ours = open_dataset(Data(dataset="packed", path=str(tmp_path / "dest"), channels=channels))
        theirs = open_dataset(Data(dataset="cifar10", path=str(source), channels=channels))
        assert (ours.classes, ours.image_size, ours.native_size, ours.channels) == (
            (theirs.classes, theirs.image_size, theirs.native_size, theirs.channels)
        )
        assert (ours.mean, ours.std) == (theirs.mean, theirs.std) or channels == 1
        assert ours.reasons["validation"] == theirs.reasons["validation"] == "the archive's test images"
        for mine, other in ((ours.train, theirs.train), (ours.validation, theirs.validation)):
            assert mine.labels.tolist() == other.labels.tolist()
            assert all(np.array_equal(mine.read(sample), other.read(sample)) for sample in range(len(other)))
    assert ours.train.path(3) == f"cifar10 train[3] in {tmp_path / 'dest' / 'train-00000.arrow'}"
    with pytest.raises(DataError, match="--mode original keeps image files as they are, but cifar10 holds pixels"):
        packed(source, tmp_path / "other", mode="original")
    packed(source, tmp_path / "jpegs", mode="jpeg", quality=100)
    smaller = open_dataset(Data(dataset="packed", path=str(tmp_path / "jpegs")))
    assert smaller.train.read(0).shape == (32, 32, 3)


def test_mnist_is_grey(tmp_path: Path) -> None:
    for name, kind, last in (("MNIST", "mnist", "9"), ("FashionMNIST", "fashion_mnist", "Ankle boot")):
        mnist(tmp_path / name / "raw")
        packed(tmp_path / name / "raw", tmp_path / kind)
        dataset = open_dataset(Data(dataset="packed", path=str(tmp_path / kind)))
        assert (dataset.channels, dataset.image_size, dataset.classes[-1]) == (1, 28, last)
        assert dataset.mean == ((0.1307,) if kind == "mnist" else (0.2860,))
        assert dataset.reasons["mean"] == "of the set that was packed"
        assert (len(dataset.train), len(dataset.validation)) == (30, 4)
    packed(tmp_path / "MNIST", tmp_path / "told", kind="fashion_mnist")
    assert read_manifest(tmp_path / "told").origin.kind == "fashion_mnist"


def test_tars_hold_the_same_images_as_their_folder(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    packed(tars(tmp_path / "tars", photos), tmp_path / "dest")
    ours = open_dataset(Data(dataset="packed", path=str(tmp_path / "dest")))
    folder = opened_set("image_folder", photos, channels=None, validation_fraction=0)
    assert ours.classes == folder.classes
    for mine, other in ((ours.train, folder.train), (ours.validation, folder.validation)):
        assert mine.labels.tolist() == other.labels.tolist()
        assert all(np.array_equal(mine.read(sample), other.read(sample)) for sample in range(len(other)))
    assert ours.train.path(0).startswith("cat000.jpg in ")


def test_a_source_in_one_file_has_the_size_that_was_asked(make_photos: Callable[..., Path], tmp_path: Path) -> None:
    root = make_photos(tmp_path / "photos", count=3, splits=("",))
    for path in root.rglob("*.*"):
        Image.open(path).convert("L").save(path.with_suffix(".png"))
        if path.suffix != ".png":
            path.unlink()
    packed(root, tmp_path / "dest", mode="raw", size=8)
    manifest = read_manifest(tmp_path / "dest")
    assert (manifest.form.channels, manifest.native_size, manifest.origin.held_out) == (1, (8, 8), "")
    dataset = open_dataset(Data(dataset="packed", path=str(tmp_path / "dest"), validation_fraction=0.34))
    assert (dataset.channels, dataset.image_size, len(dataset.validation)) == (1, 8, 2)


# The libraries that made these formats, where they are installed.


def has(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@pytest.mark.needs("datasets")
@pytest.mark.filterwarnings("ignore")  # of its own dependencies
def test_datasets_reads_what_we_read(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    import datasets

    theirs = datasets.load_dataset("imagefolder", data_dir=str(photos), cache_dir=str(tmp_path / "hf-cache"))
    theirs = theirs.cast_column("image", datasets.Image())
    theirs.save_to_disk(tmp_path / "saved")
    (tmp_path / "parquet").mkdir()
    for name, split in theirs.items():
        embedded = split.with_format("arrow").map(datasets.table.embed_table_storage, batched=True)
        embedded.with_format(None).to_parquet(tmp_path / "parquet" / f"{name}-00000-of-00001.parquet")
    packed(tmp_path / "parquet", tmp_path / "from-parquet")
    packed(tmp_path / "saved", tmp_path / "from-saved")
    packed(photos, tmp_path / "from-folder")
    for data in (
        Data(dataset="huggingface", path=str(tmp_path / "saved")),
        Data(dataset="packed", path=str(tmp_path / "from-parquet")),
        Data(dataset="packed", path=str(tmp_path / "from-saved")),
    ):
        ours = open_dataset(data)
        assert ours.classes == ("cat", "dog")
        for mine, name in ((ours.train, "train"), (ours.validation, "validation")):
            assert mine.labels.tolist() == theirs[name]["label"]
            for sample in range(len(mine)):
                assert np.array_equal(mine.read(sample), np.asarray(theirs[name][sample]["image"].convert("RGB")))

    # And what we wrote, they read.
    files = {"train": str(tmp_path / "from-folder" / "train-*.arrow")}
    read = datasets.load_dataset("arrow", data_files=files, cache_dir=str(tmp_path / "hf-cache"))["train"]
    ours = open_dataset(Data(dataset="packed", path=str(tmp_path / "from-folder")))
    assert read.features["label"].names == ["cat", "dog"]
    assert read["label"] == ours.train.labels.tolist()
    for sample in range(len(read)):
        assert np.array_equal(np.asarray(read[sample]["image"].convert("RGB")), ours.train.read(sample))


@pytest.mark.skipif(not has("torchvision"), reason="torchvision is not installed")
def test_torchvision_reads_what_we_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import MNIST

    mnist(tmp_path / "MNIST" / "raw")
    ours = open_origin(str(tmp_path))
    for name, train in (("train", True), ("validation", False)):
        theirs = MNIST(str(tmp_path), train=train)
        mine = ours.splits[name]
        assert mine.labels.tolist() == theirs.targets.tolist()
        assert all(np.array_equal(mine.read(k)[..., 0], theirs.data[k].numpy()) for k in range(len(mine)))
