"""What top-1 accuracy do the peers' default or documented settings reach on CIFAR-10 in the same seconds?"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from environments import PEERS, python_of

HERE = Path(__file__).parent
RACERS = {
    "torchvision": "ResNet-18, the reference training's defaults",
    "timm": "ResNet-18, the training script's defaults",
    "fastai": "XResNet-18, fit_one_cycle with its authors' batch, rate and decay for CIFAR-10",
    "lightning": "ResNet-18 for small images, the CIFAR-10 tutorial",
    "composer": "ResNet-18, the introduction's settings for CIFAR-10",
}
_BESIDE_SECONDS = 600
"""Imports, finding out a step's time, and scoring: more than they take."""


def prepare(names: Sequence[str]) -> None:
    """Make the environments that are not there, which takes minutes and may fail: before anything is measured."""
    for name in names:
        python_of(name)


def reached(
    names: Sequence[str], source: Path, seconds: float, *, precision: str, threads: int, seed: int = 0
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What each reached, by name, one after the other as they end. Of one that failed: the end of what it said."""
    with tempfile.TemporaryDirectory(prefix="cifar-peers-") as folder:
        data = Path(folder) / "images.npz"
        np.savez(data, **arrays(source))
        numbers = {"seconds": seconds, "precision": precision, "threads": threads, "seed": seed}
        (Path(folder) / "budget.json").write_text(json.dumps({"data": str(data), **numbers}))
        for name in names:
            title = f"{PEERS[name].label}: {RACERS[name]}"
            yield name, {"title": title, **_race(name, folder, seconds, threads)}


def _race(name: str, folder: str, seconds: float, threads: int) -> dict[str, Any]:
    out = Path(folder) / f"{name}.json"
    variables = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(HERE)}
    command = [str(python_of(name)), str(HERE / f"cifar_{name}.py"), "budget.json", str(out)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=folder,
            env=variables,
            check=False,
            timeout=3 * seconds + _BESIDE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {"failed": "it did not end"}
    if done.returncode or not out.exists():
        return {"failed": "\n".join((done.stdout + done.stderr).splitlines()[-12:])}
    seen: dict[str, Any] = json.loads(out.read_text())
    return seen


def summary_of_run(seen: dict[str, Any], seconds: float) -> str:
    """For people, what one reached."""
    if "failed" in seen:
        return f"{seen['title']}: failed: {' '.join(seen['failed'].split())[-200:]}"
    return (
        f"{seen['title']}: top-1 {seen['top1_accuracy']:.2f} % after {seen['epochs']:.2f} epochs, "
        f"{seen['train_seconds']:.0f} s of its steps; {seconds:.0f} s were given."
    )


def held_by(source: Path) -> Path | tuple[Path, Path]:
    """Where in ``source`` the images are: the published archive, or folders of classes for training and test.

    Raises:
        ValueError: If it holds neither.
    """
    from paceline.data.image.sets.archives import find_archive

    archive = find_archive(source, "cifar10")
    if archive is not None:
        return archive
    held_out = next((source / name for name in ("test", "val") if (source / name).is_dir()), None)
    if held_out is None or not (source / "train").is_dir():
        raise ValueError(f"{source} holds neither CIFAR-10's archive nor the folders train and test")
    return source / "train", held_out


def arrays(source: Path) -> dict[str, Any]:
    """Training and test images as arrays.

    Raises:
        ValueError: If ``source`` holds none.
    """
    from paceline.data.image.dataset import DatasetRequest
    from paceline.data.image.sets.archives import open_archive
    from paceline.data.image.source import as_array
    from paceline.recipe.data import Data

    held = held_by(source)
    if isinstance(held, Path):
        found = open_archive(DatasetRequest(data=Data(dataset="cifar10", path=str(held))))
        return {
            "train_images": as_array(found.train),
            "train_labels": found.train.labels,
            "test_images": as_array(found.validation),
            "test_labels": found.validation.labels,
        }
    return _of_folders(held[0], "train") | _of_folders(held[1], "test")


def _of_folders(folder: Path, split: str) -> dict[str, Any]:
    from PIL import Image

    classes = sorted(each for each in folder.iterdir() if each.is_dir())
    files = [(path, label) for label, each in enumerate(classes) for path in sorted(each.iterdir())]
    images = np.stack([np.asarray(Image.open(path).convert("RGB")) for path, _ in files])
    return {f"{split}_images": images, f"{split}_labels": np.array([label for _, label in files], dtype=np.int64)}
