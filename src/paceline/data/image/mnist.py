"""MNIST and Fashion-MNIST as they are published: four idx files, packed by gzip or not.

LeCun, Cortes and Burges, "The MNIST database of handwritten digits", 1998; Xiao, Rasul and Vollgraf, "Fashion-MNIST",
2017. Both have the same file names and shapes; which of them it is, only the folder's name can tell.
"""

from __future__ import annotations

import gzip
import re
import struct
import zlib
from pathlib import Path

import numpy as np

from paceline.data.image.source import ArraySource
from paceline.errors import DataError

DIGITS = tuple(str(digit) for digit in range(10))
FASHION = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
# Of the 60,000 training images, on the scale 0 … 1.
MEAN = {"mnist": (0.1307,), "fashion_mnist": (0.2860,)}
STD = {"mnist": (0.3081,), "fashion_mnist": (0.3530,)}

_SPLITS = {"train": "train", "test": "t10k"}
_UNSIGNED_BYTE = 0x08
_LARGEST_FILE = 2**30


def find_mnist_folder(path: Path, kind: str | None = None) -> Path | None:
    """Return the folder that holds the four files, ``path``, its ``raw`` or that of a folder in it, or None.

    Files do not tell ``kind`` (mnist, fashion_mnist), but folders in ``path`` do that are named for one: of another
    kind than is asked for, they never count. Of ``path`` itself, whoever names both is believed.
    """
    if not path.is_dir():
        return None
    inside = sorted(entry / "raw" for entry in path.iterdir() if entry.is_dir())
    found = [folder for folder in (path, path / "raw", *inside) if _file(folder, "train", "images", 3) is not None]
    fitting = [each for each in found if kind is None or each not in inside or _named_for(each) in (kind, None)]
    # One that says what it is comes before those that only may be meant.
    fitting.sort(key=lambda folder: kind is not None and _named_for(folder) != kind)
    return fitting[0] if fitting else None


def is_fashion(folder: Path) -> bool:
    """Whether the name of the folder, or of the one it lies in, says that it is Fashion-MNIST."""
    return any("fashion" in part.lower() for part in folder.absolute().parts[-2:])


def _named_for(folder: Path) -> str | None:
    """The kind that a folder is named for, as torchvision names them; of ``raw``, the folder that it lies in."""
    absolute = folder.absolute()
    name = absolute.parent.name if absolute.name == "raw" else absolute.name
    return {"mnist": "mnist", "fashionmnist": "fashion_mnist"}.get(re.sub("[^a-z]", "", name.lower()))


def read_mnist(folder: Path) -> tuple[ArraySource, ArraySource]:
    """Read the training and the test images, uint8 [N, H, W, 1].

    Raises:
        DataError: If a file is missing or damaged.
    """
    train, test = (_read_split(folder, split, prefix) for split, prefix in _SPLITS.items())
    return train, test


def _read_split(folder: Path, split: str, prefix: str) -> ArraySource:
    images = _read(folder, prefix, "images", 3)
    labels = _read(folder, prefix, "labels", 1).astype(np.int64)
    if len(images) != len(labels):
        raise DataError(
            f"{str(folder)!r} has {len(images)} {split} images and {len(labels)} labels: download it again."
        )
    if labels.max(initial=0) > len(DIGITS) - 1:
        raise DataError(f"{str(folder)!r} has the label {labels.max()}, but its classes are 0 … 9: download it again.")
    return ArraySource(images[..., None], labels, f"mnist {split}")


def _file(folder: Path, prefix: str, what: str, dimensions: int) -> Path | None:
    names = [f"{prefix}-{what}{dot}idx{dimensions}-ubyte{end}" for dot in "-." for end in ("", ".gz")]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _read(folder: Path, prefix: str, what: str, dimensions: int) -> np.ndarray:
    path = _file(folder, prefix, what, dimensions)
    if path is None:
        raise DataError(f"{str(folder)!r} lacks {prefix}-{what}-idx{dimensions}-ubyte(.gz): download it again.")
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                content = file.read(_LARGEST_FILE)
        else:
            content = path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, str(error)) from error
    return _parse(content, dimensions, path)


def _parse(content: bytes, dimensions: int, path: Path) -> np.ndarray:
    head = 4 + 4 * dimensions
    if len(content) < head or content[:4] != bytes((0, 0, _UNSIGNED_BYTE, dimensions)):
        raise _damaged(path, f"it does not begin as unsigned bytes in {dimensions} dimension(s) do")
    shape = struct.unpack(f">{dimensions}I", content[4:head])
    if len(content) - head != int(np.prod(shape, dtype=np.int64)):
        raise _damaged(path, f"it has {len(content) - head} bytes for the shape {shape}")
    return np.frombuffer(content, dtype=np.uint8, offset=head).reshape(shape)


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(f"{str(path)!r} is no file of MNIST ({reason}): download it again.")
