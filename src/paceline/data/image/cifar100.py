"""CIFAR-100 as it is published: the binary or the Python version, extracted or still in its .tar.gz.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009. The labels are the hundred fine ones.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from paceline.data.image.cifar import SIZE, ArrayUnpickler, files_in_folder, files_in_tar
from paceline.data.image.source import ArraySource
from paceline.errors import DataError

# Of the 50,000 training images, on the scale 0 … 1.
MEAN = (0.5071, 0.4865, 0.4409)
STD = (0.2673, 0.2564, 0.2762)

_PIXELS = 3 * SIZE * SIZE
_CLASSES = 100
_PYTHON = ("train", "test", "meta")
_BINARY = ("train.bin", "test.bin", "fine_label_names.txt")
_FOLDERS = ("cifar-100-binary", "cifar-100-python")


def find_cifar100_archive(path: Path) -> Path | None:
    """Return the folder or .tar.gz of the published archive at ``path``, or None if there is none."""
    if path.is_file():
        return path if path.name.startswith("cifar-100-") else None
    for folder in (path, *(path / name for name in _FOLDERS)):
        if any(all((folder / name).is_file() for name in names) for names in (_PYTHON, _BINARY)):
            return folder
    return None


def read_cifar100(archive: Path) -> tuple[ArraySource, ArraySource, tuple[str, ...]]:
    """Read the training images, the test images, and the names of the classes.

    Raises:
        DataError: If a file is missing, damaged, or holds anything but arrays and lists.
    """
    wanted = (*_PYTHON, *_BINARY)
    files = files_in_folder(archive, wanted) if archive.is_dir() else files_in_tar(archive, wanted)
    names = _BINARY if "train.bin" in files else _PYTHON
    missing = [name for name in names if name not in files]
    if missing:
        raise DataError(
            f"{str(archive)!r} lacks {', '.join(missing)}, but CIFAR-100 is {', '.join(names)}: download the archive "
            "again."
        )
    parse, parse_names = (_binary, _binary_names) if names is _BINARY else (_python, _python_names)
    train, test = (
        parse(files[name], f"{archive}/{name}", f"cifar100 {split}")
        for name, split in zip(names, ("train", "test"), strict=False)
    )
    classes = parse_names(files[names[2]], f"{archive}/{names[2]}")
    return train, test, classes


def _binary(content: bytes, path: str, name: str) -> ArraySource:
    record = 2 + _PIXELS
    if not content or len(content) % record:
        raise _damaged(path, f"its {len(content)} bytes are no multiple of {record}, two labels and 3 x 32 x 32 pixels")
    table = np.frombuffer(content, dtype=np.uint8).reshape(-1, record)
    return _source(table[:, 2:], table[:, 1].astype(np.int64), path, name)


def _python(content: bytes, path: str, name: str) -> ArraySource:
    try:
        batch = ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
        pixels, labels = batch[b"data"], np.asarray(batch[b"fine_labels"], dtype=np.int64)
    except Exception as error:  # a damaged pickle can fail in any way
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape != (len(labels), _PIXELS):
        raise _damaged(path, "its data are not uint8 [N, 3072]")
    return _source(pixels, labels, path, name)


def _source(pixels: np.ndarray, labels: np.ndarray, path: str, name: str) -> ArraySource:
    if labels.min(initial=0) < 0 or labels.max(initial=0) >= _CLASSES:
        raise _damaged(path, "it has labels outside 0 … 99")
    images = np.ascontiguousarray(pixels.reshape(-1, 3, SIZE, SIZE).transpose(0, 2, 3, 1))
    return ArraySource(images, labels, name)


def _python_names(content: bytes, path: str) -> tuple[str, ...]:
    try:
        names = ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()[b"fine_label_names"]
        return _checked([name.decode() for name in names], path)
    except DataError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise _damaged(path, f"{type(error).__name__}: {error}") from error


def _binary_names(content: bytes, path: str) -> tuple[str, ...]:
    return _checked(content.decode("utf-8", "replace").split(), path)


def _checked(names: list[str], path: str) -> tuple[str, ...]:
    if len(set(names)) != _CLASSES:
        raise _damaged(path, f"it names {len(set(names))} classes")
    return tuple(names)


def _damaged(path: str, reason: str) -> DataError:
    return DataError(f"{path!r} is no part of CIFAR-100 ({reason}): download the archive again.")
