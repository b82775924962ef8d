"""Data sets of images, opened by their names as a recipe would open them, but without what a recipe selects of them."""

from __future__ import annotations

import gzip
import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from paceline.data.image.dataset import DatasetRequest, Problems, StoredImages
from paceline.plugins.dataset_registry import find_dataset
from paceline.recipe.data import Data

if TYPE_CHECKING:
    from paceline.data.image.sets.packed import PackedManifest


def opened_set(
    name: str,
    path: str | Path,
    *,
    channels: int | None,
    problems: Problems | None = None,
    tries_files: bool = True,
    **keys: Any,
) -> StoredImages:
    """The images at a path; ``channels`` None for what they have, further keys as in a recipe's data section."""
    data = Data(dataset=name, path=str(path), channels="auto" if channels is None else channels, **keys)
    entry = find_dataset(name)
    assert entry is not None
    request = DatasetRequest(
        data=data,
        problems=Problems() if problems is None else problems,
        tolerant=problems is not None,
        tries_files=tries_files,
    )
    found = entry.open(request)
    assert isinstance(found, StoredImages)
    return found


def image_table(root: Path, rows: list[str], header: str) -> Path:
    """A CSV file whose rows begin with the name of a grey image of 8 pixels a side."""
    for place in range(len(rows)):
        Image.fromarray(np.full((8, 8), 20 * place, dtype=np.uint8)).save(root / f"{place}.png")
    text = [header, *(f"{place}.png,{row}" for place, row in enumerate(rows))]
    (root / "table.csv").write_text("\n".join(text) + "\n", encoding="utf-8")
    return root / "table.csv"


def photo_recipe(data: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """A recipe of a few steps over a folder of images, each shown with 16 pixels a side; sections may be replaced."""
    return {
        "model": {"name": "small_resnet", "options": {"width": 4, "stages": 1, "depth": 1}},
        "data": {"dataset": "image_folder", "image_size": 16, "workers": 0, **data},
        "batch": {"global_size": 8},
        "train": {"duration": "6 steps", "precision": "fp32"},
        "parallel": {"device": "cpu", "threads": 1},
        "telemetry": {"trackers": []},
        **sections,
    }


def packed(source: Path | str, destination: Path, **options: Any) -> tuple[PackedManifest, int]:
    """The images of a source, packed as the command does it."""
    from paceline_data.packing.pack import Request, pack

    request = Request(source=str(source), destination=destination, **options)
    return pack(request, lambda done, total: None, lambda line: None)


def files(root: Path) -> dict[str, str]:
    """Digests of the files in a folder."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in root.iterdir() if path.is_file()}


def idx(path: Path, array: np.ndarray) -> None:
    """Numbers of 8 bits as MNIST's files hold them, packed where the name says so."""
    head = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    content = head + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def mnist(
    folder: Path, *, prefixes: Sequence[str] = ("train", "t10k"), ending: str = "-idx{}-ubyte", classes: int = 10
) -> tuple[np.ndarray, np.ndarray]:
    """Write 30 images for training and 4 to test with, and their labels; return the first."""
    folder.mkdir(parents=True)
    draws = np.random.default_rng(0)
    sets = [(draws.integers(0, 256, (n, 28, 28)), draws.permutation(n) % classes) for n in (30, 4)]
    for prefix, arrays in zip(prefixes, sets, strict=True):
        for what, array in zip(("images", "labels"), arrays, strict=True):
            idx(folder / f"{prefix}-{what}{ending.format(array.ndim)}", array)
    return sets[0]
