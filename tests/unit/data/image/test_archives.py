"""CIFAR-100, MNIST and Fashion-MNIST in every published form."""

from __future__ import annotations

import gzip
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest

from paceline.data.image.cifar100 import find_cifar100_archive, read_cifar100
from paceline.data.image.datasets import open_dataset
from paceline.data.image.mnist import FASHION, find_mnist_folder, is_fashion, read_mnist
from paceline.errors import DataError
from paceline.recipe.data import Data

NAMES = [f"class_{number}" for number in range(100)]


def cifar100(folder: Path, *, binary: bool) -> tuple[Path, np.ndarray, list[int]]:
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
            content = {b"data": pixels[rows], b"fine_labels": fine[rows], b"coarse_labels": coarse[rows]}
            (root / split).write_bytes(pickle.dumps(content, protocol=2))
    if binary:
        (root / "fine_label_names.txt").write_text("\n".join(NAMES) + "\n")
    else:
        (root / "meta").write_bytes(pickle.dumps({b"fine_label_names": [name.encode() for name in NAMES]}, protocol=2))
    return root, pixels[:5].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), fine[:5]


@pytest.mark.parametrize("binary", [True, False])
def test_cifar100(tmp_path: Path, binary: bool) -> None:
    root, images, labels = cifar100(tmp_path, binary=binary)
    archive = tmp_path / "cifar-100-x.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(root, root.name)
    for path in (root, tmp_path, archive):
        found = find_cifar100_archive(path)
        assert found is not None
        train, test, classes = read_cifar100(found)
        assert np.array_equal(train.images, images)
        assert (train.labels.tolist(), len(test), classes) == (labels, 3, tuple(NAMES))
    assert find_cifar100_archive(tmp_path / "nothing") is None


def test_damaged_cifar100(tmp_path: Path) -> None:
    root, _, _ = cifar100(tmp_path, binary=False)
    (root / "train").write_bytes(pickle.dumps({b"data": print}, protocol=2))
    with pytest.raises(DataError, match=r"it asks for (__builtin__|builtins)\.print, and only arrays are read"):
        read_cifar100(root)
    (root / "train").unlink()
    with pytest.raises(DataError, match="lacks train, but CIFAR-100 is train, test, meta"):
        read_cifar100(root)
    root, _, _ = cifar100(tmp_path / "b", binary=True)
    (root / "test.bin").write_bytes(b"x" * 3073)
    with pytest.raises(DataError, match="its 3073 bytes are no multiple of 3074"):
        read_cifar100(root)
    (root / "test.bin").write_bytes(b"\xff" * 3074)
    with pytest.raises(DataError, match="it has labels outside 0 … 99"):
        read_cifar100(root)
    (root / "test.bin").write_bytes(b"\0" * 3074)
    (root / "fine_label_names.txt").write_text("a\nb\n")
    with pytest.raises(DataError, match="it names 2 classes"):
        read_cifar100(root)


def mnist(folder: Path, *, packed: bool, dot: str = "-") -> tuple[np.ndarray, np.ndarray]:
    folder.mkdir(parents=True)
    draws = np.random.default_rng(0)
    first = None
    for prefix, count in (("train", 7), ("t10k", 4)):
        images = draws.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = draws.integers(0, 10, count, dtype=np.uint8)
        first = first or (images, labels)
        for what, array in (("images", images), ("labels", labels)):
            head = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
            content = head + array.tobytes()
            name = f"{prefix}-{what}{dot}idx{array.ndim}-ubyte"
            (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    assert first is not None
    return first


@pytest.mark.parametrize(
    ("place", "packed", "dot"), [("", True, "-"), ("MNIST/raw", False, "-"), ("raw", True, "-"), ("", False, ".")]
)
def test_mnist(tmp_path: Path, place: str, packed: bool, dot: str) -> None:
    images, labels = mnist(tmp_path / "set" / place, packed=packed, dot=dot)
    found = find_mnist_folder(tmp_path / "set")
    assert found == tmp_path / "set" / place
    train, test = read_mnist(found)
    assert np.array_equal(train.images[..., 0], images)
    assert train.labels.tolist() == labels.tolist()
    assert (len(test), test.read(0).shape) == (4, (28, 28, 1))
    assert find_mnist_folder(tmp_path / "other") is None


def test_fashion_is_seen_from_the_name(tmp_path: Path) -> None:
    assert is_fashion(tmp_path / "FashionMNIST" / "raw")
    assert not is_fashion(tmp_path / "MNIST" / "raw")
    assert len(FASHION) == 10


@pytest.mark.parametrize(("folder", "kind"), [("MNIST", "fashion_mnist"), ("FashionMNIST", "mnist")])
def test_files_of_one_mnist_are_never_taken_for_the_other(tmp_path: Path, folder: str, kind: str) -> None:
    mnist(tmp_path / folder / "raw", packed=False)
    assert find_mnist_folder(tmp_path, kind) is None
    with pytest.raises(DataError, match=r"holds no files of .*, by its name, for '.*raw' is the other MNIST's"):
        open_dataset(Data(dataset=kind, path=str(tmp_path)))
    assert find_mnist_folder(tmp_path / folder, kind) == tmp_path / folder / "raw"
    mnist(tmp_path / "ours" / "raw", packed=False)
    assert find_mnist_folder(tmp_path, kind) == tmp_path / "ours" / "raw"


def test_damaged_mnist(tmp_path: Path) -> None:
    mnist(tmp_path / "set", packed=True)
    labels = tmp_path / "set" / "t10k-labels-idx1-ubyte.gz"
    content = gzip.decompress(labels.read_bytes())
    for damaged, message in (
        (labels.read_bytes()[:20], "is no file of MNIST"),
        (gzip.compress(content[:-1]), r"it has 3 bytes for the shape \(4,\)"),
        (gzip.compress(b"\0\0\x0d\1" + content[4:]), "does not begin as unsigned bytes in 1 dimension"),
        (gzip.compress(content[:8] + b"\1\2\3\x0b"), "has the label 11, but its classes are 0 … 9"),
        (gzip.compress(content[:7] + b"\3\1\2\3"), "has 4 test images and 3 labels"),
    ):
        labels.write_bytes(damaged)
        with pytest.raises(DataError, match=message):
            read_mnist(tmp_path / "set")
    labels.unlink()
    with pytest.raises(DataError, match="lacks t10k-labels-idx1-ubyte"):
        read_mnist(tmp_path / "set")
