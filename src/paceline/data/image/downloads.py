"""How does a data set come from the network into its folder? By torchvision, once, whatever processes ask for it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.data.image.archives import PUBLISHED, ArchiveName, find_archive
from paceline.errors import DataError

_CLASSES = {"cifar10": "CIFAR10", "cifar100": "CIFAR100", "mnist": "MNIST", "fashion_mnist": "FashionMNIST"}
_LOCK = ".paceline-download.lock"


def download_archive(root: Path, kind: ArchiveName) -> None:
    """Download an archive into a folder, unless it is there.

    Raises:
        DataError: If there is no network, or the folder cannot be written to.
    """
    with downloading(root, PUBLISHED[kind]):
        if find_archive(root, kind) is None:
            import torchvision.datasets

            fetch: Any = getattr(torchvision.datasets, _CLASSES[kind])
            # What it makes of the files is not looked at: they are read here, without running what is in a pickle.
            fetch(str(root), download=True)


@contextmanager
def downloading(root: Path, name: str) -> Iterator[None]:
    """One process at a time downloads into a folder; what keeps it from that is told in one sentence.

    Raises:
        DataError: If it fails.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root / _LOCK, os.O_CREAT | os.O_RDWR)
        try:
            with suppress(OSError):  # a file system without locks: the files are checked by their digests
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
    except (OSError, RuntimeError, EOFError) as error:
        raise DataError(
            f"data.download=true, but {name} cannot be downloaded into {str(root)!r} ({_reason(error)}): download it "
            "where there is a network, copy the folder here, and leave data.download out."
        ) from error


def _reason(error: BaseException) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
    return " ".join(f"{type(error).__name__}: {reason}".split())
