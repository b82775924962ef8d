"""Images at an address are packed and checked as those of a folder are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from paceline.data.image.sets.packed import PackedManifest
from paceline.errors import RecipeError, StorageError
from paceline_data.inspect.check import check_data
from paceline_data.packing.pack import Request, pack


@pytest.fixture
def photos(tmp_path: Path, put: Any) -> Path:
    for number in range(12):
        path = tmp_path / "photos" / ("cat", "dog")[number % 2] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (20 * number, 0, 0)).save(path)
        put(f"{tmp_path.name}/photos/{path.parent.name}/{path.name}", path.read_bytes())
    return tmp_path / "photos"


@pytest.fixture
def address(photos: Path, tmp_path: Path) -> str:
    """The same photos in the bucket; a process copies an address once, so each test has its own."""
    return f"s3://bucket/{tmp_path.name}/photos"


def packed(source: object, folder: Path) -> tuple[PackedManifest, int]:
    request = Request(source=str(source), destination=folder)
    return pack(request, lambda _done, _total: None, lambda _: None)


def test_images_at_an_address_are_packed(s3: Any, photos: Path, address: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    here, _ = packed(photos, tmp_path / "here")
    s3.share = 0.2  # of the requests that fail
    there, before = packed(address, tmp_path / "there")
    assert s3.failed
    assert (there, before) == (here, 0)
    assert packed(address, tmp_path / "there") == (here, 12)
    with pytest.raises(StorageError, match="there is nothing at s3://bucket/none"):
        packed("s3://bucket/none", tmp_path / "none")


def test_images_at_an_address_are_checked(s3: Any, put: Any, address: str, tmp_path: Path) -> None:
    put(f"{tmp_path.name}/photos/cat/empty.png", b"")
    before = len(s3.log)
    with pytest.raises(RecipeError, match="--quarantine moves files out of a folder of class folders here"):
        check_data(address, quarantine=tmp_path / "aside")
    assert len(s3.log) == before
    report = check_data(address, workers=1)
    assert (report.source, report.is_folder, report.splits["train"]["samples"]) == (address, False, 11)
    (found,) = (each for each in report.findings if each.kind.name == "empty_file")
    assert found.entries[0].name.endswith("photos/cat/empty.png")
