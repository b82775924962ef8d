"""Images at an address are packed and checked as those of a folder are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from calls import Call
from PIL import Image

pytest.importorskip("pyarrow", reason="needs pyarrow")


@pytest.fixture
def photos(tmp_path: Path, put: Any) -> Path:
    for number in range(12):
        path = tmp_path / "photos" / ("cat", "dog")[number % 2] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (20 * number, 0, 0)).save(path)
        put(f"sources/photos/{path.parent.name}/{path.name}", path.read_bytes())
    return tmp_path / "photos"


def test_images_at_an_address_are_packed(s3: Any, photos: Path, paceline_here: Call) -> None:
    here = paceline_here("pack", "photos", "here", "--json").ended(0).document
    s3.share = 0.2  # of the requests that fail
    there = paceline_here("pack", "s3://bucket/sources/photos", "there", "--json").ended(0).document
    assert s3.failed
    assert there["digest"] == here["digest"]
    again = paceline_here("pack", "s3://bucket/sources/photos", "there", "--json").ended(0).document
    assert again["found"] == 12
    paceline_here("pack", "s3://bucket/none", "other").refused("there is nothing at s3://bucket/none")


def test_images_at_an_address_are_checked(s3: Any, put: Any, photos: Path, paceline_here: Call) -> None:
    put("sources/photos/cat/empty.png", b"")
    before = len(s3.log)
    paceline_here("check-data", "s3://bucket/sources/photos", "--quarantine", "aside").refused(
        "moves files out of a folder of class folders on this machine"
    )
    assert len(s3.log) == before
    done = paceline_here("check-data", "s3://bucket/sources/photos").ended(1)
    assert done.out.startswith("s3://bucket/sources/photos: image_folder, 2 classes, 10 train, 3 validation\n")
    assert "breaks  1 empty file" in done.out
    assert "        cat/empty.png\n" in done.out
    assert done.out.splitlines()[-1].endswith("then paceline check-data s3://bucket/sources/photos")
