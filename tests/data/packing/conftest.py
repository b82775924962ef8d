"""Small image folders of real JPEG files, and the command that packs them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import fork_server
import numpy as np
import pytest
from PIL import Image

SOURCES = Path(__file__).parents[4] / "src"


def _photos(root: Path, count: int = 6, splits: tuple[str, ...] = ("train", "val")) -> Path:
    """Write ``count`` JPEG files of several shapes for each split and class; some of them grey, one of them a PNG."""
    draws = np.random.default_rng(0)
    for split in splits:
        for label in ("cat", "dog"):
            folder = root / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                height, width = (int(side) for side in draws.integers(20, 60, 2))
                pixels = draws.integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
                picture = Image.fromarray(pixels).resize((width, height))
                if number % 5 == 4:
                    picture = picture.convert("L")
                picture.save(folder / (f"{number:03}.png" if number == 0 and label == "dog" else f"{number:03}.jpg"))
    return root


@pytest.fixture
def make_photos() -> Callable[..., Path]:
    return _photos


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with ``train`` and ``val`` of two classes, six images each."""
    return _photos(tmp_path / "photos")


@pytest.fixture
def break_some(photos: Path) -> Callable[[], None]:
    """Damages one image of each split."""

    def damage() -> None:
        first = photos / "train" / "cat" / "001.jpg"
        first.write_bytes(first.read_bytes()[:200])
        (photos / "val" / "dog" / "002.jpg").write_bytes(b"no image")

    return damage


@pytest.fixture
def run_pack() -> Callable[..., subprocess.CompletedProcess[str]]:
    """``run_pack(source, dest, "--mode", "raw")``: the command in a process of its own."""

    def run(
        *words: str | Path, environment: Mapping[str, str] = MappingProxyType({}), **options: object
    ) -> subprocess.CompletedProcess[str]:
        done: subprocess.CompletedProcess[str] = fork_server.run(
            [sys.executable, "-m", "paceline", "pack", *map(str, words)],
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1", **environment},
            text=True,
            capture_output=True,
            timeout=120,
            **options,
        )
        return done

    return run


@pytest.fixture
def run_pack_here(capfd: pytest.CaptureFixture[str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``run_pack``, in this process: its imports, paid once, are nearly all that a small folder costs."""
    from paceline.cli.main import run

    def call(*words: str | Path) -> subprocess.CompletedProcess[str]:
        capfd.readouterr()
        return subprocess.CompletedProcess(words, run(["pack", *map(str, words)]), *capfd.readouterr())

    return call
