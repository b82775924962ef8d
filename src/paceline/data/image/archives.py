"""What do the archives that everyone knows hold? CIFAR-10, CIFAR-100, MNIST and Fashion-MNIST, by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from paceline.data.image import cifar, cifar100, mnist
from paceline.data.image.pixels import with_channels
from paceline.data.image.source import ArraySource, Image
from paceline.errors import DataError

ArchiveName = Literal["cifar10", "cifar100", "mnist", "fashion_mnist"]
ARCHIVES: tuple[ArchiveName, ...] = get_args(ArchiveName)
PUBLISHED = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "mnist": "MNIST", "fashion_mnist": "Fashion-MNIST"}


@dataclass(frozen=True)
class Archive:
    """A published archive, read.

    Attributes:
        train: Training images.
        test: Test images, which are held out.
        classes: Class names.
        mean: Of the training images, per channel, on the scale 0 … 1.
        std: Likewise.
    """

    train: ArraySource
    test: ArraySource
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalisation(self, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of the training images as seen with so many channels."""
        if channels == len(self.mean):
            return self.mean, self.std
        if len(self.mean) == 1:
            return self.mean * channels, self.std * channels
        grey: Image = with_channels(self.train.images, channels)
        return (round(float(grey.mean()) / 255, 4),), (round(float(grey.std(dtype=np.float64)) / 255, 4),)


def find_archive(root: Path, kind: ArchiveName) -> Path | None:
    """The file or folder of an archive at ``root``, or None."""
    if kind == "cifar10":
        return cifar.find_cifar_archive(root)
    return cifar100.find_cifar100_archive(root) if kind == "cifar100" else mnist.find_mnist_folder(root, kind)


def read_archive(root: Path, kind: ArchiveName) -> Archive:
    """Read an archive.

    Raises:
        DataError: If there is none, or it is damaged.
    """
    found = find_archive(root, kind)
    if found is None:
        other = mnist.find_mnist_folder(root) if kind in mnist.MEAN else None
        but = "" if other is None else f", by its name, for {str(other)!r} is the other MNIST's"
        raise DataError(
            f"{str(root)!r} holds no files of {PUBLISHED[kind]} ({kind}){but}: correct the path, or, with a network, "
            "set data.download=true."
        )
    if kind == "cifar10":
        train, test = cifar.read_cifar10(found)
        return Archive(train, test, cifar.CLASSES, cifar.MEAN[3], cifar.STD[3])
    if kind == "cifar100":
        train, test, classes = cifar100.read_cifar100(found)
        return Archive(train, test, classes, cifar100.MEAN, cifar100.STD)
    train, test = mnist.read_mnist(found)
    names = mnist.FASHION if kind == "fashion_mnist" else mnist.DIGITS
    return Archive(train, test, names, mnist.MEAN[kind], mnist.STD[kind])
