"""Parquet tables of images, as pyarrow writes them, are read by row groups and give what was put in."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_sentences import raises
from PIL import Image

from paceline.data.image.datasets import open_dataset
from paceline.data.image.decode import BrokenImageError, decode
from paceline.data.image.pipeline import measure
from paceline.data.image.sets import parquet as parquet_source
from paceline.data.image.source import encoded_source
from paceline.errors import DataError
from paceline.recipe.data import Data
from paceline_data.packing.origins import open_origin

pa = pytest.importorskip("pyarrow", reason="tables of images need pyarrow")


def png(value: int, channels: int = 3) -> bytes:
    out = io.BytesIO()
    shape = (6, 5 + value % 3, channels)
    pixels = np.random.default_rng(value).integers(0, 256, shape, dtype=np.uint8)
    Image.fromarray(pixels if channels == 3 else pixels[..., 0]).save(out, "PNG")
    return out.getvalue()


def write(path: Path, columns: dict[str, Any], group: int = 4, **options: Any) -> Path:
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=group, **options)
    return path


def data(path: Path, **keys: Any) -> Data:
    return Data(dataset="parquet", path=str(path), **keys)


def images(numbers: Sequence[int]) -> list[bytes]:
    return [png(number) for number in numbers]


def test_bytes_in_several_files_are_read_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part, numbers in enumerate((range(10), range(10, 17))):
        labels = ["cat" if number % 3 else "dog" for number in numbers]
        write(tmp_path / f"{part}.parquet", {"img": images(numbers), "label": labels}, compression="zstd")
    found = open_dataset(data(tmp_path, validation_fraction=0))
    assert (found.classes, len(found.train), found.channels) == (("cat", "dog"), 17, 3)
    assert found.train.labels.tolist() == [int(number % 3 == 0) for number in range(17)]
    # Room for one group only: every group is let go of and read again.
    monkeypatch.setattr(parquet_source, "LARGEST_KEPT", 1)
    files = encoded_source(found.train)
    assert files is not None
    for number in np.random.default_rng(0).permutation(17).tolist() * 2:
        assert bytes(files.encoded(number)) == png(number)
        assert np.array_equal(found.train.read(number), decode(png(number), 3))
    assert found.train.path(11) == f"train[11] in {tmp_path / '1.parquet'}"


def test_structs_splits_and_dictionaries(tmp_path: Path) -> None:
    struct = [{"bytes": png(number), "path": f"{number}.png"} for number in range(9)]
    columns = {
        "picture": struct,
        "class_name": pa.array(["b", "a", "b"] * 3).dictionary_encode(),
        "split": ["train"] * 3 + ["test"] * 2 + ["train"] * 2 + ["val"] * 2,
    }
    path = write(tmp_path / "all.parquet", columns)
    found = open_dataset(data(path, image_column="picture"))
    assert (found.classes, found.train.labels.tolist()) == (("a", "b"), [1, 0, 1, 1, 1])
    for sample, number in enumerate((0, 1, 2, 5, 6)):
        assert np.array_equal(found.train.read(sample), decode(png(number), 3))
    assert found.train.path(3) == f"5.png in {path}"
    assert found.validation.labels.tolist() == [0, 1]
    assert found.reasons["validation"] == "the rows of validation; 2 rows of test are not read"
    packed = open_origin(str(path), "parquet", Data(image_column="picture"))
    assert [len(split) for split in packed.splits.values()] == [5, 2]


def test_names_of_columns_may_hold_dots(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", {"x.image": images(range(4)), "x.label": ["a", "b", "a", "b"]})
    found = open_dataset(data(path, image_column="x.image", label_column="x.label", validation_fraction=0))
    assert (found.classes, found.train.labels.tolist()) == (("a", "b"), [0, 1, 0, 1])
    assert np.array_equal(found.train.read(3), decode(png(3), 3))


def test_files_named_after_splits(tmp_path: Path) -> None:
    for name, numbers in (("train-0", range(5)), ("train-1", range(5, 8)), ("test-0", range(8, 10))):
        labels = [number % 2 for number in numbers]
        write(tmp_path / "data" / f"{name}.parquet", {"image": images(numbers), "label": labels})
    found = open_dataset(data(tmp_path))
    assert (len(found.train), len(found.validation)) == (8, 2)
    assert np.array_equal(found.validation.read(1), decode(png(9), 3))
    assert "the rows of test" in found.reasons["validation"]


@pytest.mark.parametrize("name", ["valid-0", "dev-0", "validation/0", "testing-0", "training/valid-0"])
def test_files_of_any_held_out_split_are_not_trained_on(tmp_path: Path, name: str) -> None:
    for file, numbers in (("train-0", range(6)), (name, range(6, 10))):
        labels = [number % 2 for number in numbers]
        write(tmp_path / f"{file}.parquet", {"image": images(numbers), "label": labels})
    found = open_dataset(data(tmp_path))
    assert (len(found.train), len(found.validation), found.is_split_off) == (6, 4, False)


def test_other_splits_of_the_hub_are_not_read_and_other_files_refused(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}.png").write_bytes(png(number))
    for file, numbers in (("train-00000-of-00001", range(6)), ("extra-00000-of-00001", range(6, 10))):
        columns = {"image": images(numbers), "label": [number % 2 for number in numbers]}
        write(tmp_path / "bytes" / f"{file}.parquet", columns)
        paths = [f"../{number}.png" for number in numbers]
        write(tmp_path / "paths" / f"{file}.parquet", columns | {"image": paths})
    told = "files of splits that are not read: 1 left out ('extra-00000-of-00001.parquet')"
    for keys in ({}, {"split_by": "name"}):
        for kind in ("bytes", "paths"):
            assert open_dataset(data(tmp_path / kind, **keys)).left_out == (told,)
    assert open_origin(str(tmp_path / "bytes")).left_out == (told,)
    tmp_path /= "bytes"
    found = open_dataset(data(tmp_path, validation_fraction=0.34, split_by="name"))
    assert (len(found.train) + len(found.validation), found.is_split_off) == (6, True)
    write(tmp_path / "more.parquet", {"image": images(range(2)), "label": [0, 1]})
    with raises(DataError, path="bytes/more.parquet"):
        open_dataset(data(tmp_path))


def test_paths_are_files_beside_the_table(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(png(number))
    path = write(tmp_path / "t.parquet", {"path": [f"{n}.png" for n in range(4)], "label": [0, 1, 0, 1]})
    found = open_dataset(data(path, validation_fraction=0))
    assert np.array_equal(found.train.read(3), decode(png(3), 3))
    assert found.train.path(3) == str(tmp_path / "3.png")
    (tmp_path / "2.png").unlink()
    with pytest.raises(
        DataError, match=r"row 2 \(counted from 0\) of '.*t.parquet' names '2.png', but there is no file"
    ):
        open_dataset(data(path))


def test_yes_and_no_are_classes(tmp_path: Path) -> None:
    found = open_dataset(data(write(tmp_path / "t.parquet", {"image": images(range(4)), "label": [True, False] * 2})))
    assert found.classes == ("false", "true")


def test_grey_images_have_one_channel(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", {"image": [png(n, 1) for n in range(6)], "label": [0, 1] * 3})
    assert open_dataset(data(path)).channels == 1


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": images(range(2)), "labl": [0, 1]}, "has the columns image, labl, and none .* column of labels"),
        ({"image": [1, 2], "label": [0, 1]}, "column 'image' is of the type int64, but images are bytes"),
        ({"image": [png(0), None, png(1)], "label": [0, 1, 0]}, r"row 1 \(counted from 0\) of .* has no image"),
        (
            {
                "image": pa.array(
                    [{"bytes": None, "path": "a.png"}] * 2, pa.struct([("bytes", pa.binary()), ("path", pa.string())])
                ),
                "label": [0, 1],
            },
            r"row 0 \(counted from 0\) of .* names a file, 'a.png', instead of holding an image",
        ),
        ({"image": images(range(2)), "label": [0, None]}, r"row 1 .* has no label \(None\): .* data.label_column"),
        ({"image": images(range(2)), "label": [0.5, 1.0]}, "has the label 0.5"),
        (
            {"image": images(range(2)), "label": [0, 1], "split": [0, 1]},
            r"has the split '0' in row 1, but a split is train, val or test",
        ),
        ({"image": pa.array([], pa.binary()), "label": pa.array([], pa.int64())}, "has no rows"),
        ({"image": images(range(2)), "label": [[0], [1]]}, r"has the label \[0\], which is neither"),
        ({"image": images(range(2)), "label": [0, -3]}, "has the label -3, but labels are numbers from 0"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_dataset(data(write(tmp_path / "t.parquet", columns)))


def test_a_name_that_looks_like_a_pattern_is_a_name(tmp_path: Path) -> None:
    path = write(tmp_path / "photos [old]" / "t[1].parquet", {"image": images(range(4)), "label": [0, 1, 0, 1]})
    assert len(open_dataset(data(path, validation_fraction=0)).train) == 4


def test_damaged_and_missing_tables(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there are no \.parquet files in it"):
        open_dataset(data(tmp_path))
    with pytest.raises(DataError, match="there is no such file or folder"):
        open_dataset(data(tmp_path / "x.parquet"))
    path = write(tmp_path / "t.parquet", {"image": images(range(8)), "label": [0, 1] * 4}, compression="none")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"'.*t.parquet' cannot be read \(.*\): download or write it again"):
        open_dataset(data(path))
    for origin in (path, tmp_path):
        with pytest.raises(DataError, match=r"'.*t.parquet' cannot be read \(.*\): download or write it again"):
            open_origin(str(origin))
    with pytest.raises(DataError, match=r"'.*t.parquet' cannot be read \(.*\): download or write it again"):
        open_dataset(Data(dataset="huggingface", path=str(tmp_path)))
    write(tmp_path / "u.parquet", {"image": images(range(2)), "tag": [0, 1]})
    path.write_bytes(whole)
    with raises(DataError, path="u.parquet"):
        open_dataset(data(tmp_path))


def test_a_file_that_shrinks_breaks_its_images_and_nothing_else(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", {"image": images(range(8)), "label": [0, 1] * 4})
    found = open_dataset(data(path, validation_fraction=0))
    path.write_bytes(path.read_bytes()[:100])
    found.train.base._kept.clear()  # type: ignore[attr-defined]  # what was probed is kept
    with pytest.raises(BrokenImageError, match="it has changed since the run started"):
        found.train.read(5)


def test_an_image_that_is_missing_has_no_size(tmp_path: Path) -> None:
    """The file does not say how many are missing; the run says so when it reads the row."""
    columns = {"image": [png(0), None, png(1)], "label": [0, 1, 0]}
    path = write(tmp_path / "t.parquet", columns, write_statistics=False)
    found = open_dataset(data(path, validation_fraction=0))
    assert measure(found.train, size=8, multiple=1).tolist() == [[10, 8], [8, 8], [8, 8]]
    with pytest.raises(BrokenImageError, match="its row has no image"):
        found.train.read(1)


def test_groups_too_large_for_one_image_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t.parquet", {"image": images(range(8)), "label": [0, 1] * 4})
    monkeypatch.setattr(parquet_source, "LARGEST_KEPT", 300)
    with raises(DataError, path="t.parquet"):
        open_dataset(data(path))
    origin = open_origin(str(path))
    assert (origin.origin.kind, origin.readers > 1000) == ("parquet", True)
    monkeypatch.setattr("paceline_data.packing.origins.LARGEST_KEPT", 300)
    assert origin.readers == 1  # in several threads, each image would be read with its group anew
