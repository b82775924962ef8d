"""What image files hold is digested where that is affordable, remembered, and found anew when a file changes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from paceline.data import disk_cache
from paceline.data.image import datasets as contents
from paceline.data.image.datasets import content_of, open_dataset
from paceline.recipe.data import Data


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "paceline" / "contents"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / "set" / name).mkdir(parents=True)
        for number in range(10):
            pixels = np.full((6, 6, 3), 20 * number + label, dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "set" / name / f"{number}.bmp")
    age(tmp_path / "set")
    return tmp_path / "set"


def age(folder: Path) -> None:
    """Let files be so old that they are remembered: all of one time, as an archive's files are."""
    for file in folder.rglob("*.*"):
        os.utime(file, (1_600_000_000, 1_600_000_000))


def found(path: Path, **keys: Any) -> str | None:
    dataset = {"validation_fraction": 0.2, "dataset": "image_folder"} | keys
    return content_of(open_dataset(Data(path=str(path), **dataset)))[0]


def swap(one: Path, other: Path) -> None:
    aside = one.with_suffix(".aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def test_other_pixels_and_swapped_files_are_seen(folder: Path) -> None:
    before = found(folder)
    assert before is not None
    swap(folder / "cat" / "3.bmp", folder / "dog" / "3.bmp")
    assert found(folder) != before
    swap(folder / "cat" / "3.bmp", folder / "dog" / "3.bmp")
    assert found(folder) == before
    file = folder / "dog" / "7.bmp"
    content = file.read_bytes()
    file.write_bytes(content[:-2] + b"\xff\xff")
    age(folder)  # with the time that it had
    assert found(folder) != before
    file.write_bytes(content)
    assert found(folder) == before


def test_only_the_images_in_use_count(folder: Path) -> None:
    (folder / "owl").mkdir()
    for number in range(10):
        Image.new("RGB", (6, 6), (number, 9, 9)).save(folder / "owl" / f"{number}.bmp")
    before = found(folder, only_classes=("cat", "dog"))
    (folder / "owl" / "1.bmp").write_bytes((folder / "owl" / "2.bmp").read_bytes())
    assert found(folder, only_classes=("cat", "dog")) == before
    assert found(folder, only_classes=("cat", "dog"), holdout_fraction=0.3) not in (None, before)


def test_what_was_read_is_remembered_once_it_is_old_enough(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = found(folder)
    assert not cache.exists()  # the files' change times are of just now
    monkeypatch.setattr(disk_cache, "TOO_FRESH_NS", -(10**12))
    assert found(folder) == before
    (kept,) = cache.iterdir()
    whole = kept.read_text()
    hashes = json.loads(whole)["found"]
    kept.write_text(whole.replace(hashes[0], "0" * 64))  # shows that it is believed
    assert (believed := found(folder)) not in (before, None)
    swap(folder / "cat" / "3.bmp", folder / "dog" / "3.bmp")
    assert found(folder) not in (before, believed)
    swap(folder / "cat" / "3.bmp", folder / "dog" / "3.bmp")
    for torn in ("", "x", "{}", whole[:-9]):
        kept.write_text(torn)
        assert found(folder) == before


def test_large_sets_are_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = found(folder)
    monkeypatch.setattr(contents, "LARGEST_BYTES", 20 * (folder / "cat" / "0.bmp").stat().st_size)
    assert found(folder) == before
    monkeypatch.setattr(contents, "LARGEST_BYTES", contents.LARGEST_BYTES - 1)
    assert found(folder) is None
    monkeypatch.undo()
    monkeypatch.setattr(contents, "MOST_IMAGES", 19)
    monkeypatch.setattr(contents, "content_hashes", lambda *_, **__: pytest.fail("the files were looked at"))
    assert found(folder) is None


def test_a_file_that_cannot_be_read_leaves_it_open(folder: Path) -> None:
    (folder / "cat" / "x.bmp").symlink_to("nowhere")
    assert found(folder, max_broken=1) is None


def test_tables_and_tars_have_the_contents_of_their_images(folder: Path, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    def written(name: str, images: list[bytes]) -> Path:
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"image": images, "label": ["cat"] * 10 + ["dog"] * 10}), path)
        return path

    files = sorted(folder.glob("*/*.bmp"))
    images = [file.read_bytes() for file in files]
    rows = [f"{file.parent.name}/{file.name},{file.parent.name}" for file in files]
    (folder / "t.csv").write_text("\n".join(["path,label", *rows]))
    whole = {"validation_fraction": 0}
    one = found(written("a", images), dataset="parquet", **whole)
    other = found(written("b", [images[1], images[0], *images[2:]]), dataset="parquet", **whole)
    table = found(folder / "t.csv", dataset="csv", **whole)
    (folder / "t.csv").unlink()
    assert one == table == found(folder, **whole)
    assert other not in (None, one)


def test_copies_in_large_sets_are_found_among_files_of_equal_size(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3, 10):
        for name in ("cat", "dog"):
            with open(folder / name / f"{number}.bmp", "ab") as file:
                file.write(bytes(2 * number + (name == "dog")))
    size = (folder / "cat" / "9.bmp").stat().st_size
    monkeypatch.setattr(contents, "LARGEST_BYTES", 8 * size)
    (folder / "dog" / "9.bmp").write_bytes((folder / "cat" / "9.bmp").read_bytes())
    digest, reason, copies = content_of(open_dataset(Data(path=str(folder), validation_fraction=0.2)))
    assert (digest, reason) == (None, contents.TOO_LARGE)
    assert "cat/9.bmp' and " in copies
    assert "are the same image with different labels" in copies
    monkeypatch.setattr(contents, "LARGEST_BYTES", 2 * size)
    assert "are not looked for" in content_of(open_dataset(Data(path=str(folder), validation_fraction=0.2)))[2]


def test_a_copy_with_another_label_in_another_split_is_told_once(tmp_path: Path) -> None:
    for name in ("train/cat/0", "train/dog/1", "val/cat/2", "val/dog/0"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (90 * int(name[-1]), 0, 0)).save(tmp_path / f"{name}.bmp")
    copies = content_of(open_dataset(Data(path=str(tmp_path))))[2]
    assert copies.count("are the same image") == 1
    assert "val/dog/0.bmp' are the same image with different labels and splits; " in copies
