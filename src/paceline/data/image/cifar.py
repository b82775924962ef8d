"""CIFAR-10 as it is published: the binary or the Python version, extracted or still in its .tar.gz.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009. The Python version consists of
pickles, which could run any code; they are read by an unpickler that can build numpy arrays and nothing else.
"""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.image.source import ArraySource
from paceline.errors import DataError

SIZE = 32
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# Of the 50,000 training images, on the scale 0 … 1; luma for one channel.
MEAN = {3: (0.4914, 0.4822, 0.4465), 1: (0.4808,)}
STD = {3: (0.2470, 0.2435, 0.2616), 1: (0.2389,)}

_PIXELS = 3 * SIZE * SIZE
_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST = ("test_batch",)
_FOLDERS = ("cifar-10-batches-bin", "cifar-10-batches-py")
_WANTED = frozenset(name + suffix for name in (*_TRAIN, *_TEST) for suffix in ("", ".bin"))
_LARGEST_FILE = 256 * 2**20


def find_cifar_archive(path: Path) -> Path | None:
    """Return the folder or .tar.gz of the published archive at ``path``, or None if there is none."""
    if path.is_file():
        return path
    for folder in (path, *(path / name for name in _FOLDERS)):
        if (folder / _TRAIN[0]).is_file() or (folder / f"{_TRAIN[0]}.bin").is_file():
            return folder
    return None


def read_cifar10(archive: Path) -> tuple[ArraySource, ArraySource]:
    """Read the training and the test images.

    Args:
        archive: The extracted folder, or the .tar.gz.

    Raises:
        DataError: If a file is missing, damaged, or holds anything but arrays.
    """
    files = _files_in_folder(archive) if archive.is_dir() else _files_in_tar(archive)
    suffix = ".bin" if f"{_TRAIN[0]}.bin" in files else ""
    missing = [name + suffix for name in (*_TRAIN, *_TEST) if name + suffix not in files]
    if missing:
        raise DataError(
            f"{str(archive)!r} lacks {', '.join(missing)}, but CIFAR-10 is data_batch_1 to data_batch_5 and "
            "test_batch: download the archive again, or correct data.path."
        )
    parse = _parse_binary if suffix else _parse_pickle
    return (
        _join([parse(files[name + suffix], f"{archive}/{name + suffix}") for name in _TRAIN], "cifar10 train"),
        _join([parse(files[name + suffix], f"{archive}/{name + suffix}") for name in _TEST], "cifar10 test"),
    )


Part = tuple[np.ndarray[Any, np.dtype[np.uint8]], np.ndarray[Any, np.dtype[np.int64]]]


def _join(parts: list[Part], name: str) -> ArraySource:
    images = [pixels.reshape(-1, 3, SIZE, SIZE).transpose(0, 2, 3, 1) for pixels, _ in parts]
    return ArraySource(np.concatenate(images), np.concatenate([labels for _, labels in parts]), name)


def _files_in_folder(folder: Path) -> dict[str, bytes]:
    return files_in_folder(folder, _WANTED)


def _files_in_tar(path: Path) -> dict[str, bytes]:
    return files_in_tar(path, _WANTED)


def files_in_folder(folder: Path, wanted: Collection[str]) -> dict[str, bytes]:
    """Read those files of a folder that are there."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name in wanted and path.is_file()}


def files_in_tar(path: Path, wanted: Collection[str]) -> dict[str, bytes]:
    """Read those members of an archive into memory that are there; nothing is extracted to disk.

    Raises:
        DataError: If it cannot be read.
    """
    files = {}
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                name = Path(member.name).name
                content = archive.extractfile(member) if name in wanted and member.isfile() else None
                if content is not None and member.size <= _LARGEST_FILE:
                    files[name] = content.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(
            f"{str(path)!r} cannot be read as a .tar.gz ({error}): download it again, or point data.path at "
            "an extracted archive or an image folder."
        ) from error
    return files


def _parse_binary(content: bytes, name: str) -> Part:
    record = 1 + _PIXELS
    if not content or len(content) % record:
        raise _damaged(name, f"its {len(content)} bytes are no multiple of {record}, one label and 3 x 32 x 32 pixels")
    table = np.frombuffer(content, dtype=np.uint8).reshape(-1, record)
    return _checked(table[:, 1:], table[:, 0].astype(np.int64), name)


def _parse_pickle(content: bytes, name: str) -> Part:
    try:
        batch = ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
        pixels, labels = batch[b"data"], np.asarray(batch[b"labels"], dtype=np.int64)
    except Exception as error:  # a damaged pickle can fail in any way
        raise _damaged(name, f"{type(error).__name__}: {error}") from error
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape != (len(labels), _PIXELS):
        raise _damaged(name, "its data are not uint8 [N, 3072]")
    return _checked(pixels, labels, name)


def _checked(
    pixels: np.ndarray[Any, np.dtype[np.uint8]], labels: np.ndarray[Any, np.dtype[np.int64]], name: str
) -> Part:
    if labels.min(initial=0) < 0 or labels.max(initial=0) >= len(CLASSES):
        raise _damaged(name, "it has labels outside 0 … 9")
    return pixels, labels


def _damaged(name: str, reason: str) -> DataError:
    return DataError(f"{name!r} is no batch of CIFAR-10 ({reason}): download the archive again.")


class ArrayUnpickler(pickle.Unpickler):
    """Builds what the published batches consist of: dicts, lists, bytes, numbers and numpy arrays."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name, if arrays are made with it."""
        allowed = _ALLOWED.get((module, name))
        if allowed is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only arrays are read")
        return allowed


def _latin1(text: str, encoding: str) -> bytes:
    """Stand in for ``_codecs.encode``, by which old pickles write bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding!r}")
    return text.encode("latin1")


# Stands in for the class ``numpy.ndarray``, which must be named but not called.
_ARRAY_CLASS = object()


def _reconstruct(array_class: object, *_: object) -> object:
    """Stand in for numpy's function of the same name: an empty array, which the pickle then fills."""
    if array_class is not _ARRAY_CLASS:
        raise pickle.UnpicklingError("it asks for an array of another class")
    return np.ndarray((0,), dtype=np.uint8)


def _dtype(code: object, *_: object) -> object:
    """Stand in for ``numpy.dtype``: pixels are unsigned bytes."""
    if code not in ("u1", b"u1"):
        raise pickle.UnpicklingError(f"it asks for the data type {code!r}")
    return np.dtype("u1")


_ALLOWED: dict[tuple[str, str], object] = {
    ("numpy", "ndarray"): _ARRAY_CLASS,
    ("numpy", "dtype"): _dtype,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("_codecs", "encode"): _latin1,
}
