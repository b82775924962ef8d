"""CIFAR-10, CIFAR-100, MNIST and Fashion-MNIST in every published form, and pickles that would run code."""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torchvision.datasets as known
from golden_sentences import raises
from image_sets import mnist, opened_set

from paceline.data.image.datasets import open_dataset
from paceline.data.image.sets.archives import find_archive, find_mnist, mnist_kind
from paceline.data.image.source import ArraySource
from paceline.errors import DataError
from paceline.recipe.data import Data

NAMES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
Part = tuple[np.ndarray, list[int]]


def parts() -> dict[str, Part]:
    """Small batches: uint8 [n, 3072], channel after channel, and labels."""
    generator = np.random.default_rng(0)
    counts = (3, 2, 4, 1, 2, 5)
    return {
        name: (generator.integers(0, 256, (count, 3072), dtype=np.uint8), generator.integers(0, 10, count).tolist())
        for name, count in zip(NAMES, counts, strict=True)
    }


def binary(pixels: np.ndarray, labels: list[int]) -> bytes:
    return np.concatenate([np.array(labels, dtype=np.uint8)[:, None], pixels], axis=1).tobytes()


def pickled(pixels: np.ndarray, labels: list[int]) -> bytes:
    return pickle.dumps({"data": pixels, "labels": labels, "batch_label": "x"}, protocol=2)


WRITERS = {"bin": binary, "py": pickled}


def publish(monkeypatch: pytest.MonkeyPatch, archive: Path, known: Any = known.CIFAR10) -> None:
    """Have torchvision take the files of an archive for the published ones."""
    digests = [[each.name, hashlib.md5(each.read_bytes()).hexdigest()] for each in sorted(archive.iterdir())]
    monkeypatch.setattr(known, "train_list", [each for each in digests if each[0] in ("train", *NAMES[:5])])
    monkeypatch.setattr(known, "test_list", [each for each in digests if each[0].startswith("test")])
    monkeypatch.setattr(known, "meta", {**known.meta, "md5": dict(digests).get("meta", "")})


def write(folder: Path, version: str, content: dict[str, Part] | None = None) -> Path:
    archive = folder / f"cifar-10-batches-{version}"
    archive.mkdir()
    for name, part in (content or parts()).items():
        (archive / (name + (".bin" if version == "bin" else ""))).write_bytes(WRITERS[version](*part))
    (archive / "readme.html").write_text("<html/>")
    return archive


def pack(archive: Path) -> Path:
    path = archive.parent / "cifar-10.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(archive, arcname=archive.name)
    return path


def read(path: Path, kind: str = "cifar10") -> tuple[ArraySource, ArraySource, tuple[str, ...]]:
    found = opened_set(kind, path, channels=None)
    assert isinstance(found.train, ArraySource)
    assert isinstance(found.validation, ArraySource)
    return found.train, found.validation, found.classes


def check(archive: Path | None) -> None:
    assert archive is not None
    content = parts()
    train, test, _ = read(archive)
    for source, names in ((train, NAMES[:5]), (test, NAMES[5:])):
        planes = np.concatenate([content[name][0] for name in names]).reshape(-1, 3, 32, 32)
        assert np.array_equal(source.images, planes.transpose(0, 2, 3, 1))
        assert source.labels.tolist() == [label for name in names for label in content[name][1]]
    assert test.path(0) == "cifar10 test[0]"


@pytest.mark.parametrize("version", WRITERS)
def test_every_published_form(tmp_path: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = write(tmp_path, version)
    publish(monkeypatch, archive)
    check(find_archive(tmp_path, "cifar10"))
    check(find_archive(archive, "cifar10"))
    check(find_archive(pack(archive), "cifar10"))


def test_an_image_folder_is_no_archive(tmp_path: Path) -> None:
    assert find_archive(tmp_path, "cifar10") is None


@pytest.mark.parametrize("version", ["bin", "py"])
def test_a_missing_batch_is_named(tmp_path: Path, version: str) -> None:
    content = parts()
    del content["data_batch_3"]
    with pytest.raises(DataError, match=r"lacks data_batch_3(\.bin)?, but"):
        read(write(tmp_path, version, content))


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("kind", ["cifar10", "cifar100"])
def test_only_published_pickles_are_loaded(tmp_path: Path, kind: str) -> None:
    archive = write(tmp_path, "py") if kind == "cifar10" else write_cifar100(tmp_path, binary=False)[0]
    sprung = tmp_path / "sprung"
    for name in ("data_batch_1", "train", "meta"):
        (archive / name).write_bytes(pickle.dumps({"data": Trap(sprung), "labels": []}, protocol=2))
    with pytest.raises(
        DataError, match=r"(data_batch_1|meta)' is not a valid part of .*another pickle can run any code"
    ):
        read(archive, kind)
    assert not sprung.exists()


def test_damage_is_named(tmp_path: Path) -> None:
    pixels, _ = parts()["data_batch_1"]
    archive = write(tmp_path, "bin")
    for content in (b"", binary(pixels, [1, 2, 3])[:-1], binary(pixels, [1, 2, 10])):
        (archive / "data_batch_1.bin").write_bytes(content)
        with pytest.raises(DataError, match="is not a valid part of CIFAR-10"):
            read(archive)


def test_damaged_archives_are_named(tmp_path: Path) -> None:
    path = pack(write(tmp_path, "bin"))
    whole = path.read_bytes()
    for content in (b"", b"text", whole[: len(whole) // 2], gzip.compress(b"text")):
        path.write_bytes(content)
        with raises(DataError, path="cifar-10.tar.gz"):
            read(path)


def test_an_archive_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "evil.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name in (*NAMES, "../../outside"):
            member = tarfile.TarInfo(f"../{name}.bin")
            content = binary(*parts()[NAMES[0]])
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    before = sorted(tmp_path.parent.rglob("*"))
    read(path)
    assert sorted(tmp_path.parent.rglob("*")) == before


FINE = [f"class_{number}" for number in range(100)]


def write_cifar100(folder: Path, *, binary: bool) -> tuple[Path, np.ndarray, list[int]]:
    """Write an archive of five training and three test images; return it, and the training images and labels."""
    draws = np.random.default_rng(0)
    pixels = draws.integers(0, 256, (8, 3072), dtype=np.uint8)
    fine, coarse = draws.integers(0, 100, 8).tolist(), draws.integers(0, 20, 8).tolist()
    parts = {"train": slice(0, 5), "test": slice(5, 8)}
    root = folder / ("cifar-100-binary" if binary else "cifar-100-python")
    root.mkdir(parents=True)
    for split, rows in parts.items():
        if binary:
            labels = np.array([coarse[rows], fine[rows]], dtype=np.uint8).T
            (root / f"{split}.bin").write_bytes(np.concatenate([labels, pixels[rows]], axis=1).tobytes())
        else:
            content = {"data": pixels[rows], "fine_labels": fine[rows], "coarse_labels": coarse[rows]}
            (root / split).write_bytes(pickle.dumps(content, protocol=2))
    if binary:
        (root / "fine_label_names.txt").write_text("\n".join(FINE) + "\n")
    else:
        (root / "meta").write_bytes(pickle.dumps({"fine_label_names": FINE}, protocol=2))
    return root, pixels[:5].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), fine[:5]


@pytest.mark.parametrize("binary", [True, False])
def test_cifar100(tmp_path: Path, binary: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    root, images, labels = write_cifar100(tmp_path, binary=binary)
    publish(monkeypatch, root, known.CIFAR100)
    archive = tmp_path / "cifar-100-x.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(root, root.name)
    for path in (root, tmp_path, archive):
        train, test, classes = read(path, "cifar100")
        assert np.array_equal(train.images, images)
        assert (train.labels.tolist(), len(test), classes) == (labels, 3, tuple(FINE))
    assert find_archive(tmp_path / "nothing", "cifar100") is None
    if not binary:
        theirs = known.CIFAR100(tmp_path)
        assert np.array_equal(theirs.data, images)
        assert (theirs.targets, theirs.classes) == (labels, FINE)


def test_damaged_cifar100(tmp_path: Path) -> None:
    root, _, _ = write_cifar100(tmp_path, binary=False)
    (root / "train").unlink()
    with raises(DataError, path="cifar-100-python"):
        read(root, "cifar100")
    with tarfile.open(tmp_path / "part.tar", "w") as tar:
        tar.add(root, root.name)
    with raises(DataError, path="part.tar"):
        read(tmp_path / "part.tar", "cifar100")
    root, _, _ = write_cifar100(tmp_path / "b", binary=True)
    (root / "test.bin").write_bytes(b"x" * 3073)
    with pytest.raises(DataError, match="its 3073 bytes are not a multiple of 3074"):
        read(root, "cifar100")
    (root / "test.bin").write_bytes(b"\xff" * 3074)
    with pytest.raises(DataError, match="it has labels outside 0 … 99"):
        read(root, "cifar100")
    (root / "test.bin").write_bytes(b"\0" * 3074)
    (root / "fine_label_names.txt").write_text("a\nb\n")
    with pytest.raises(DataError, match="it names 2 classes"):
        read(root, "cifar100")


@pytest.mark.parametrize(
    ("place", "ending"),
    [("", "-idx{}-ubyte.gz"), ("MNIST/raw", "-idx{}-ubyte"), ("raw", "-idx{}-ubyte.gz"), ("", ".idx{}-ubyte")],
)
def test_mnist(tmp_path: Path, place: str, ending: str) -> None:
    images, labels = mnist(tmp_path / "set" / place, ending=ending)
    found = find_mnist(tmp_path / "set")
    assert found == tmp_path / "set" / place
    train, test, _ = read(found, "mnist")
    assert np.array_equal(train.images[..., 0], images)
    assert train.labels.tolist() == labels.tolist()
    assert (len(test), test.read(0).shape) == (4, (28, 28, 1))
    assert find_mnist(tmp_path / "other") is None


def test_fashion_is_seen_from_the_name(tmp_path: Path) -> None:
    assert mnist_kind(tmp_path / "FashionMNIST" / "raw") == "fashion_mnist"
    assert mnist_kind(tmp_path / "MNIST" / "raw") == "mnist"


@pytest.mark.parametrize(("folder", "kind"), [("MNIST", "fashion_mnist"), ("FashionMNIST", "mnist")])
def test_files_of_one_mnist_are_never_taken_for_the_other(tmp_path: Path, folder: str, kind: str) -> None:
    mnist(tmp_path / folder / "raw")
    assert find_mnist(tmp_path, kind) is None
    with raises(DataError, path=tmp_path):
        open_dataset(Data(dataset=kind, path=str(tmp_path)))
    assert find_mnist(tmp_path / folder, kind) == tmp_path / folder / "raw"
    mnist(tmp_path / "ours" / "raw")
    assert find_mnist(tmp_path, kind) == tmp_path / "ours" / "raw"


def test_damaged_mnist(tmp_path: Path) -> None:
    mnist(tmp_path / "set", ending="-idx{}-ubyte.gz")
    labels = tmp_path / "set" / "t10k-labels-idx1-ubyte.gz"
    content = gzip.decompress(labels.read_bytes())
    for damaged, message in (
        (labels.read_bytes()[:20], "is not an MNIST file"),
        (gzip.compress(content[:-1]), r"it has 3 bytes for the shape \(4,\)"),
        (gzip.compress(b"\0\0\x0d\1" + content[4:]), "its header is not that of unsigned bytes in 1 dimension"),
        (gzip.compress(content[:8] + b"\1\2\3\x0b"), "has the label 11, but its classes are 0 … 9"),
        (gzip.compress(content[:7] + b"\3\1\2\3"), "has 4 test images and 3 labels"),
    ):
        labels.write_bytes(damaged)
        with pytest.raises(DataError, match=message):
            read(tmp_path / "set", "mnist")
    labels.unlink()
    with raises(DataError, path="set"):
        read(tmp_path / "set", "mnist")
