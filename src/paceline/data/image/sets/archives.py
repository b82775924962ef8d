"""CIFAR-10, CIFAR-100, MNIST and Fashion-MNIST as published, extracted or still archived.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009; LeCun, Cortes and Burges, "The MNIST database
of handwritten digits", 1998; Xiao, Rasul and Vollgraf, "Fashion-MNIST", 2017. CIFAR is read in its binary and its
Python version. The Python version consists of pickles, which could run arbitrary code, so only the published files are
loaded, as identified by torchvision's digests. CIFAR-100 uses the fine labels.
"""

from __future__ import annotations

import gzip
import hashlib
import pickle
import re
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.image.dataset import DatasetRequest, Statistics, StoredImages, pixel_images
from paceline.data.image.sets import PART, SPLIT
from paceline.data.image.sets.image_folder import open_image_folder
from paceline.data.image.source import ArraySource, Image, with_channels
from paceline.errors import DataError, StorageError, data_error
from paceline.host.system import lock_file
from paceline.plugins.dataset_registry import AnyOpener, Place, Size, dataset
from paceline.storage.hub import limited_waits

_KEYS = ("path", "download", *PART)
_SIZE = 32
_PIXELS = 3 * _SIZE * _SIZE
_LARGEST_FILE = 2**30
_UNSIGNED_BYTE = 0x08
_LOCK = ".paceline-download.lock"


@dataclass(frozen=True, kw_only=True)
class Archive:
    """A published data set.

    Attributes:
        title: Its title.
        torchvision: torchvision class that downloads it.
        mean: Mean of the training images, on the scale 0 … 1, by number of channels.
        std: Standard deviation, likewise.
        classes: Class names; empty if its files contain them.
    """

    title: str
    torchvision: str
    mean: Mapping[int, tuple[float, ...]]
    std: Mapping[int, tuple[float, ...]]
    classes: tuple[str, ...] = ()

    def statistics(self, channels: int, images: Image | None = None) -> Statistics:
        """Return mean and standard deviation for 1 or 3 channels, computed from ``images`` if unknown."""
        told = f"of {self.title}'s training images"
        if channels in self.mean:
            return Statistics(self.mean[channels], self.std[channels], told)
        if channels == 3:
            return Statistics(self.mean[1] * 3, self.std[1] * 3, told)
        assert images is not None
        grey = with_channels(images, 1)
        mean, std = float(grey.mean()) / 255, float(grey.std(dtype=np.float64)) / 255
        return Statistics((round(mean, 4),), (round(std, 4),), told)


@dataclass(frozen=True, kw_only=True)
class Cifar(Archive):
    """CIFAR-10 or CIFAR-100: files of 32x32 colour images.

    Attributes:
        train: Training files, by their names in the Python version; the binary version adds ``.bin``.
        test: The file of test images.
        names: File with the class names, in the Python and in the binary version.
        labels: Number of labels before each image in the binary version; the last one is the class.
        key: Key of the labels in the Python version.
        count: Number of classes.
        folders: Folders that the published archives extract to.
    """

    train: tuple[str, ...]
    test: str
    names: tuple[str, str] | None = None
    labels: int = 1
    key: str = "labels"
    count: int = 10
    folders: tuple[str, ...] = ()

    def files(self, suffix: str) -> list[str]:
        """Return the names of all files of a version: ``""`` for Python, ``".bin"`` for binary."""
        names = [] if self.names is None else [self.names[suffix != ""]]
        return [*(each + suffix for each in (*self.train, self.test)), *names]


_DIGITS = tuple(str(digit) for digit in range(10))
ARCHIVES: dict[str, Archive] = {
    "cifar10": Cifar(
        title="CIFAR-10",
        torchvision="CIFAR10",
        mean={3: (0.4914, 0.4822, 0.4465), 1: (0.4808,)},
        std={3: (0.2470, 0.2435, 0.2616), 1: (0.2389,)},
        classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        train=tuple(f"data_batch_{number}" for number in range(1, 6)),
        test="test_batch",
        folders=("cifar-10-batches-bin", "cifar-10-batches-py"),
    ),
    "cifar100": Cifar(
        title="CIFAR-100",
        torchvision="CIFAR100",
        mean={3: (0.5071, 0.4865, 0.4409)},
        std={3: (0.2673, 0.2564, 0.2762)},
        train=("train",),
        test="test",
        names=("meta", "fine_label_names.txt"),
        labels=2,
        key="fine_labels",
        count=100,
        folders=("cifar-100-binary", "cifar-100-python"),
    ),
    "mnist": Archive(title="MNIST", torchvision="MNIST", mean={1: (0.1307,)}, std={1: (0.3081,)}, classes=_DIGITS),
    "fashion_mnist": Archive(
        title="Fashion-MNIST",
        torchvision="FashionMNIST",
        mean={1: (0.2860,)},
        std={1: (0.3530,)},
        classes=(
            *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
            *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        ),
    ),
}


def find_archive(root: Path, kind: str) -> Path | None:
    """Return the file or folder of an archive at ``root``, or None."""
    archive = ARCHIVES[kind]
    if not isinstance(archive, Cifar):
        return find_mnist(root, kind)
    if root.is_file():
        return root
    for folder in (root, *(root / name for name in archive.folders)):
        for suffix in ("", ".bin"):
            # Many data sets have files named train and test; the other archive has a unique file name.
            marks = archive.files(suffix) if archive.names else archive.files(suffix)[:1]
            if all((folder / name).is_file() for name in marks):
                return folder
    return None


def _is_archive(place: Place, name: str) -> bool:
    if not isinstance(ARCHIVES[name], Cifar):
        return (folder := find_mnist(place.path)) is not None and mnist_kind(folder) == name
    is_named = place.path.name.startswith(name.replace("cifar", "cifar-") + "-")
    return find_archive(place.path, name) is not None if place.is_folder else is_named


def _registered(name: str, size: Size, *keys: str) -> Callable[[AnyOpener], AnyOpener]:
    sniff = partial(_is_archive, name=name)
    return dataset(name, endings=(".tar.gz",), sniff=sniff, keys=(*_KEYS, *keys), size=size)


@_registered("fashion_mnist", Size("Fashion-MNIST", 60_000, 10, 28))
@_registered("mnist", Size("MNIST", 60_000, 10, 28))
@_registered("cifar100", Size("CIFAR-100", 50_000, 100, 32))
def open_archive(request: DatasetRequest) -> StoredImages:
    """Read a published archive, downloading it first if the recipe allows it.

    Raises:
        DataError: If it is missing, damaged, or cannot be downloaded.
    """
    root, kind = request.path, request.data.dataset
    archive = ARCHIVES[kind]
    if request.data.download:
        with downloading(root, archive.title):
            if find_archive(root, kind) is None:
                import torchvision.datasets

                getattr(torchvision.datasets, archive.torchvision)(str(root), download=True)
    location = find_archive(root, kind)
    if location is None:
        other = None if isinstance(archive, Cifar) else find_mnist(root)
        but = "" if other is None else f", by its name, for {str(other)!r} is the other MNIST's"
        raise data_error(
            root,
            f"holds no files of {archive.title} ({kind}){but}: correct the path, or, with a network, set "
            "data.download=true.",
        )
    if isinstance(archive, Cifar):
        train, test, classes = _read_cifar(location, kind, archive)
    else:
        train, test = (_read_mnist(location, split, prefix) for split, prefix in (("train", "train"), ("test", "t10k")))
        classes = archive.classes
    known = archive.statistics(request.channels or train.images.shape[-1], train.images)
    return pixel_images(request, [train, test], "the archive's test images", classes=classes, statistics=known)


# ---------------------------------------------------------------------------------------------------- CIFAR


def _read_cifar(path: Path, kind: str, archive: Cifar) -> tuple[ArraySource, ArraySource, tuple[str, ...]]:
    members = {*archive.files(""), *archive.files(".bin")}
    if path.is_dir():
        files = {each.name: each.read_bytes() for each in path.iterdir() if each.name in members and each.is_file()}
    else:
        files = _files_in_tar(path, members)
    suffix = ".bin" if f"{archive.train[0]}.bin" in files else ""
    needed = archive.files(suffix)
    missing = [name for name in needed if name not in files]
    if missing:
        raise data_error(
            path,
            f"lacks {', '.join(missing)}, but {archive.title} is {', '.join(needed)}: download the archive again, or "
            "correct data.path.",
        )

    def read(names: Sequence[str], split: str) -> ArraySource:
        parts = [_batch(archive, files[name + suffix], f"{path}/{name + suffix}") for name in names]
        images = [pixels.reshape(-1, 3, _SIZE, _SIZE).transpose(0, 2, 3, 1) for pixels, _ in parts]
        return ArraySource(np.concatenate(images), np.concatenate([labels for _, labels in parts]), f"{kind} {split}")

    classes = archive.classes
    if archive.names is not None:
        content, name = files[needed[-1]], f"{path}/{needed[-1]}"
        message = (
            content.decode("utf-8", "replace").split()
            if suffix
            else _unpickled(archive, content, name)["fine_label_names"]
        )
        classes = tuple(message)
        if len(set(classes)) != archive.count:
            raise _damaged(archive, name, f"it names {len(set(classes))} classes")
    return read(archive.train, "train"), read((archive.test,), "test"), classes


def _files_in_tar(path: Path, names: set[str]) -> dict[str, bytes]:
    """Read the given members of an archive, if present, into memory; nothing is extracted to disk."""
    files = {}
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                name = Path(member.name).name
                content = archive.extractfile(member) if name in names and member.isfile() else None
                if content is not None and member.size <= _LARGEST_FILE:
                    files[name] = content.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise data_error(
            path,
            f"cannot be read as a .tar.gz ({error}): download it again, or point data.path at an extracted archive or "
            "an image folder.",
        ) from error
    return files


def _batch(archive: Cifar, content: bytes, name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return pixels uint8 [N, 3072], channel by channel, and labels int64 [N] of one file."""
    if not name.endswith(".bin"):
        batch = _unpickled(archive, content, name)
        return batch["data"], np.asarray(batch[archive.key], dtype=np.int64)
    record = archive.labels + _PIXELS
    if not content or len(content) % record:
        raise _damaged(archive, name, f"its {len(content)} bytes are not a multiple of {record}, a label and an image")
    table = np.frombuffer(content, dtype=np.uint8).reshape(-1, record)
    labels = table[:, archive.labels - 1].astype(np.int64)
    if labels.max() >= archive.count:
        raise _damaged(archive, name, f"it has labels outside 0 … {archive.count - 1}")
    return table[:, archive.labels :], labels


def _unpickled(archive: Cifar, content: bytes, name: str) -> Any:
    """Load a pickle if it is the published one; any other could run code."""
    import torchvision.datasets

    known: Any = getattr(torchvision.datasets, archive.torchvision)
    published = {known.meta["filename"]: known.meta["md5"], **dict((*known.train_list, *known.test_list))}
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != published[Path(name).name]:
        raise _damaged(archive, name, "it is not the published file, and loading another pickle can run any code")
    return pickle.loads(content, encoding="latin1")


def _damaged(archive: Cifar, name: str, reason: str) -> DataError:
    return DataError(f"{name!r} is not a valid part of {archive.title} ({reason}): download the archive again.")


# ---------------------------------------------------------------------------------------------------- MNIST


def find_mnist(path: Path, kind: str | None = None) -> Path | None:
    """Return the folder with the four files: ``path``, its ``raw``, that of a subfolder, or None.

    The files of both sets have the same names and shapes. Folders in ``path`` named after the set other than ``kind``
    (mnist, fashion_mnist) are ignored; the name of ``path`` itself does not matter.
    """
    if not path.is_dir():
        return None
    inside = sorted(entry / "raw" for entry in path.iterdir() if entry.is_dir())
    folders = [
        folder for folder in (path, path / "raw", *inside) if _idx_file(folder, "train", "images", 3) is not None
    ]
    fitting = [each for each in folders if kind is None or each not in inside or _named_for(each) in (kind, None)]
    # A folder with a matching name comes before unnamed candidates.
    fitting.sort(key=lambda folder: kind is not None and _named_for(folder) != kind)
    return fitting[0] if fitting else None


def mnist_kind(folder: Path) -> str:
    """Return which of the two sets a folder contains, by its name or its parent's."""
    return "fashion_mnist" if any("fashion" in part.lower() for part in folder.absolute().parts[-2:]) else "mnist"


def _named_for(folder: Path) -> str | None:
    """Return the set that a folder is named after, as in torchvision; for ``raw``, its parent counts."""
    absolute = folder.absolute()
    name = absolute.parent.name if absolute.name == "raw" else absolute.name
    return {"mnist": "mnist", "fashionmnist": "fashion_mnist"}.get(re.sub("[^a-z]", "", name.lower()))


def _read_mnist(folder: Path, split: str, prefix: str) -> ArraySource:
    images = _read_idx(folder, prefix, "images", 3)
    labels = _read_idx(folder, prefix, "labels", 1).astype(np.int64)
    if len(images) != len(labels):
        raise data_error(folder, f"has {len(images)} {split} images and {len(labels)} labels: download it again.")
    if labels.max(initial=0) > 9:
        raise data_error(folder, f"has the label {labels.max()}, but its classes are 0 … 9: download it again.")
    return ArraySource(images[..., None], labels, f"mnist {split}")


def _idx_file(folder: Path, prefix: str, kind: str, dimensions: int) -> Path | None:
    names = [f"{prefix}-{kind}{dot}idx{dimensions}-ubyte{end}" for dot in "-." for end in ("", ".gz")]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _read_idx(folder: Path, prefix: str, kind: str, dimensions: int) -> np.ndarray[Any, Any]:
    """Read a file in idx format, optionally gzipped, as uint8 of any number of dimensions."""
    path = _idx_file(folder, prefix, kind, dimensions)
    if path is None:
        raise data_error(folder, f"lacks {prefix}-{kind}-idx{dimensions}-ubyte(.gz): download it again.")

    def damaged(reason: object) -> DataError:
        return data_error(path, f"is not an MNIST file ({reason}): download it again.")

    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            content = file.read(_LARGEST_FILE)
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(error) from error
    head = 4 + 4 * dimensions
    if len(content) < head or content[:4] != bytes((0, 0, _UNSIGNED_BYTE, dimensions)):
        raise damaged(f"its header is not that of unsigned bytes in {dimensions} dimension(s)")
    shape = struct.unpack(f">{dimensions}I", content[4:head])
    if len(content) - head != int(np.prod(shape, dtype=np.int64)):
        raise damaged(f"it has {len(content) - head} bytes for the shape {shape}")
    return np.frombuffer(content, dtype=np.uint8, offset=head).reshape(shape)


# ------------------------------------------------------------------------------------------------- downloads


@contextmanager
def downloading(root: Path, name: str) -> Iterator[None]:
    """Allow only one process at a time to download into a folder, and report a failure in one sentence.

    Raises:
        DataError: If it fails.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            with suppress(OSError):  # a read-only folder, or one without locks: digests verify the files
                lock_file(held.enter_context(open(root / _LOCK, "ab")))
            held.enter_context(limited_waits())
            yield
    except (OSError, RuntimeError, EOFError, StorageError) as error:
        kind = "" if isinstance(error, StorageError) else f"{type(error).__name__}: "
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise DataError(
            f"data.download=true, but {name} cannot be downloaded into {str(root)!r} "
            f"({' '.join(f'{kind}{reason}'.split())}): download it where there is a network, copy "
            "the folder here, and leave data.download out."
        ) from error


@_registered("cifar10", Size("CIFAR-10", 50_000, 10, 32), *SPLIT)
def _cifar10(request: DatasetRequest) -> StoredImages:
    """Open CIFAR-10 as published, or as an image folder."""
    if request.data.download or find_archive(request.path, "cifar10") is not None:
        return open_archive(request)
    found = open_image_folder(request)
    return replace(found, statistics=ARCHIVES["cifar10"].statistics(found.channels))
