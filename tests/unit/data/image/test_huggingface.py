"""What Hugging Face's library saved is read as the library reads it, without the library."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_sentences import raises
from image_sets import opened_set
from PIL import Image

from paceline.data.image.datasets import open_dataset
from paceline.data.image.decode import decode
from paceline.data.image.source import EncodedSource
from paceline.errors import DataError
from paceline.recipe.data import Data
from paceline_data.packing.origins import open_origin

pa = pytest.importorskip("pyarrow")

FEATURES: dict[str, Any] = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["cat", "dog"]}}


def png(value: int) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(value).integers(0, 256, (9 + value % 5, 12, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def table(numbers: Sequence[int], labels: Sequence[int | None], label: str = "label") -> Any:
    image = pa.StructArray.from_arrays(
        [
            pa.array([png(number) for number in numbers], pa.binary()),
            pa.array([f"{number}.png" if number % 2 else None for number in numbers], pa.string()),
        ],
        ["bytes", "path"],
    )
    return pa.table({"image": image, label: pa.array(labels, pa.int64())})


def save(folder: Path, content: Any, features: Mapping[str, Any] = FEATURES, rows: int = 3) -> Path:
    """Write what ``Dataset.save_to_disk`` writes: two files, in batches of a few rows."""
    folder.mkdir(parents=True)
    half = content.num_rows // 2
    names = []
    for number, part in enumerate((content.slice(0, half), content.slice(half))):
        names.append(f"data-{number:05}-of-00002.arrow")
        with pa.OSFile(str(folder / names[-1]), "wb") as file, pa.ipc.new_stream(file, content.schema) as writer:
            writer.write_table(part, max_chunksize=rows)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    return folder


def save_splits(root: Path, splits: Mapping[str, Any], features: Mapping[str, Any] = FEATURES) -> Path:
    for name, content in splits.items():
        save(root / name, content, features)
    (root / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return root


def test_images_are_read_where_they_lie(tmp_path: Path) -> None:
    root = save_splits(
        tmp_path / "hf",
        {"train": table(range(11), [k % 2 for k in range(11)]), "test": table([20, 21, 22], [1, 0, 1])},
    )
    opened = opened_set("huggingface", root, channels=None, validation_fraction=0.5)
    assert (opened.classes, opened.split, opened.is_split_off) == (("cat", "dog"), "the split test", False)
    for source, numbers in ((opened.train, range(11)), (opened.validation, range(20, 23))):
        assert isinstance(source, EncodedSource)
        for sample, number in enumerate(numbers):
            assert bytes(source.encoded(sample)) == png(number)
            assert np.array_equal(source.read(sample), decode(png(number), 3))
    assert opened.train.labels.tolist() == [k % 2 for k in range(11)]
    assert opened.validation.labels.tolist() == [1, 0, 1]
    assert opened.train.path(0) == f"train[0] in {root}/train/data-00000-of-00002.arrow"
    assert opened.train.path(9) == f"9.png in {root}/train/data-00001-of-00002.arrow"
    assert opened.left_out == ()
    shutil.copy(next(root.glob("test/*.arrow")), root / "train" / "cache-1.arrow")
    save(root / "extra", table([1], [0]))
    (told,) = opened_set("huggingface", root, channels=None, validation_fraction=0.5).left_out
    extra = len(list((root / "extra").iterdir()))
    assert f"state.json names: {extra + 1} left out (" in told


def test_a_single_dataset_is_split(tmp_path: Path) -> None:
    root = save(tmp_path / "hf", table(range(10), [k % 2 for k in range(10)]))
    dataset = open_dataset(Data(dataset="huggingface", path=str(root)))
    assert (len(dataset.train), len(dataset.validation), dataset.channels) == (8, 2, 3)
    other = save(tmp_path / "other", table(range(10), [(k + 1) % 2 for k in range(10)]))
    assert open_dataset(Data(dataset="huggingface", path=str(other))).digest != dataset.digest


def test_a_split_that_is_not_read_is_reported(tmp_path: Path) -> None:
    root = save_splits(tmp_path / "hf", {"train": table(range(10), [0, 1] * 5), "other": table([1, 2], [0, 1])})
    found = open_dataset(Data(dataset="huggingface", path=str(root)))
    assert len(found.train) + len(found.validation) == 10
    assert found.left_out[0].startswith("files of splits that are not read: 2 left out (")


@pytest.mark.parametrize("label", [-1, None])
@pytest.mark.parametrize("kind", ["stream", "parquet"])
def test_a_test_split_without_labels_is_not_held_out(tmp_path: Path, label: int | None, kind: str) -> None:
    splits = {"train": table(range(8), [0, 1] * 4), "test": table(range(8, 11), [label] * 3)}
    for name, content in splits.items():
        if kind == "stream":
            save(tmp_path / "hf" / name, content)
        else:
            (tmp_path / "hf").mkdir(exist_ok=True)
            described = content.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": FEATURES}})})
            pa.parquet.write_table(described, tmp_path / "hf" / f"{name}-00000-of-00001.parquet")
    if kind == "stream":
        (tmp_path / "hf" / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    found = opened_set("huggingface", tmp_path / "hf", channels=3, validation_fraction=0.25)
    assert (len(found.train), len(found.validation), found.is_split_off) == (6, 2, True)
    assert sorted([*found.train.labels, *found.validation.labels]) == [0] * 4 + [1] * 4
    assert "3 rows without labels are not read (the " in found.split
    assert "test" in found.split
    with pytest.raises(DataError, match="has no label"):  # to be scored
        opened_set("huggingface", tmp_path / "hf", channels=3, validation_fraction=1)


def test_the_column_of_the_labels(tmp_path: Path) -> None:
    content = table(range(4), [0, 1, 0, 1], "fine").append_column("coarse", pa.array([1, 1, 0, 0], pa.int64()))
    classes = {"_type": "ClassLabel", "names": ["a", "b"]}
    root = save(tmp_path / "hf", content, {"image": {"_type": "Image"}, "fine": classes, "coarse": classes})
    with pytest.raises(DataError, match=r"has 2 columns of labels \(fine, coarse\): name one in data.label_column"):
        open_dataset(Data(dataset="huggingface", path=str(root), validation_fraction=0))
    asked = Data(dataset="huggingface", path=str(root), validation_fraction=0, label_column="coarse")
    assert open_dataset(asked).train.labels.tolist() == [1, 1, 0, 0]
    with pytest.raises(DataError, match=r"has no column 'coars' .* Did you mean 'coarse'"):
        open_dataset(Data(dataset="huggingface", path=str(root), label_column="coars"))


def test_names_of_image_files_are_no_images(tmp_path: Path) -> None:
    content = pa.table({"image": [f"{k}.png" for k in range(4)], "label": pa.array([0, 1, 0, 1], pa.int64())})
    root = save(tmp_path / "hf", content, {"image": {"_type": "Value"}, "label": FEATURES["label"]})
    with pytest.raises(DataError, match=r"column 'image' is of the type string, but images are bytes, a struct with"):
        open_dataset(Data(dataset="huggingface", path=str(root)))


def test_parquet_is_packed_and_trained_on(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    metadata = {"huggingface": json.dumps({"info": {"features": FEATURES}})}
    for split, numbers in (("train", range(8)), ("validation", range(8, 11))):
        for part in (0, 1):
            chosen = [number for number in numbers if number % 2 == part]
            content = table(chosen, [number % 2 for number in chosen]).replace_schema_metadata(metadata)
            (tmp_path / "hub" / "data").mkdir(parents=True, exist_ok=True)
            pq.write_table(content, tmp_path / "hub" / "data" / f"{split}-{part:05}-of-00002.parquet", row_group_size=2)
    trained = open_dataset(Data(dataset="huggingface", path=str(tmp_path / "hub")))
    assert trained.reasons["path"].startswith("6 row groups of up to 2 images")
    opened = open_origin(str(tmp_path / "hub"))
    assert (opened.origin.kind, opened.classes) == ("huggingface", ("cat", "dog"))
    train = opened.splits["train"]
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    assert isinstance(train, EncodedSource)
    for sample in (7, 0, 3, 1, 2, 6, 5, 4):
        assert bytes(train.encoded(sample)) == png(order[sample])
        assert np.array_equal(train.read(sample), decode(png(order[sample]), 3))
    assert train.labels.tolist() == [number % 2 for number in order]
    assert np.array_equal(trained.train.read(7), train.read(7))
    assert (len(trained.validation), trained.validation.labels.tolist()) == (3, [0, 0, 1])
    assert opened.name(opened.splits["validation"], 2) == "9.png"


@pytest.mark.parametrize("columns", [["image", "coarse"], ["image", "label", "label"]])
def test_a_label_column_is_never_another_one(tmp_path: Path, columns: list[str]) -> None:
    content = table(range(4), [0, 1, 0, 1])
    arrays = [content["image"], *[content["label"]] * (len(columns) - 1)]
    with pytest.raises(DataError, match=r"arrow' cannot be read .*label"):
        open_dataset(Data(dataset="huggingface", path=str(save(tmp_path / "hf", pa.table(arrays, columns)))))


FILE = '{"filename": "data-00000-of-00002.arrow"}'
JUNK = {
    "state.json _data_files": ["", "5", "null", '["a"]', f"[{FILE}, {FILE}]", '[{"filename": "a\\u0000"}]'],
    "dataset_info.json features": ["", "5", "null", '["image", "label"]'],
    "../dataset_dict.json splits": ["", "5", "null"],
}


@pytest.mark.parametrize(("name", "said"), [(name, each) for name, junk in JUNK.items() for each in junk])
def test_junk_in_a_description_is_one_sentence(tmp_path: Path, name: str, said: str) -> None:
    file, key = name.split()
    path = save_splits(tmp_path / "hf", {"train": table(range(4), [0, 1, 0, 1])}) / "train" / file
    path.write_text(f'{{"{key}": {said}}}')
    with pytest.raises(DataError, match=rf"{path.name}' cannot be read"):
        open_dataset(Data(dataset="huggingface", path=str(tmp_path / "hf"), validation_fraction=0))


def test_a_named_pipe_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    path = next(save(tmp_path / "hf", table(range(4), [0, 1, 0, 1])).glob("*.arrow"))
    path.unlink()
    os.mkfifo(path)
    with raises(DataError, path="hf/data-00000-of-00002.arrow"):
        open_dataset(Data(dataset="huggingface", path=str(tmp_path / "hf")))


def test_a_damaged_file_is_refused_or_read_alike_twice(tmp_path: Path) -> None:
    path = next(save(tmp_path / "hf", table(range(6), [0, 1] * 3)).glob("*.arrow"))
    whole, draws, outcomes = path.read_bytes(), random.Random(1), set()
    for _ in range(250):
        content = bytearray(whole)
        content[draws.randrange(draws.choice([1200, len(whole)]))] ^= 1 << draws.randrange(8)
        path.write_bytes(content[: draws.choice([None, None, draws.randrange(len(whole))])])
        read = []
        with contextlib.suppress(DataError):
            for _ in range(2):
                found = open_dataset(Data(dataset="huggingface", path=str(path.parent), validation_fraction=0)).train
                read.append([found.labels.tolist(), *map(found.path, range(len(found)))])
        outcomes.add(len(read))
        assert read[:1] == read[1:]
    assert outcomes == {0, 2}


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, -1, 1], r"row 0 \(counted from 0\) of .*00001-of-00002.* has no label \(-1\)"),
        ([0, 2, 1], "label 2, .* classes are 0 … 1"),
        ([1, 1, 1], "has one class, '"),
    ],
)
def test_labels_of_no_class_are_refused(tmp_path: Path, labels: list[int | None], message: str) -> None:
    with pytest.raises(DataError, match=message):
        opened_set("huggingface", save(tmp_path / "hf", table(range(3), labels)), channels=3, validation_fraction=0)


def test_what_is_no_such_dataset_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a local Hugging Face dataset"):
        opened_set("huggingface", tmp_path, channels=3, validation_fraction=0)
    root = save_splits(tmp_path / "odd", {"test": table([1, 2], [0, 1])})
    with raises(DataError, path="odd"):
        opened_set("huggingface", root, channels=3, validation_fraction=0)
    root = save(tmp_path / "unlabelled", table([1, 2], [0, 1]), {"image": FEATURES["image"]})
    with pytest.raises(DataError, match="has the columns image, and none has a usual name for a column of labels"):
        opened_set("huggingface", root, channels=3, validation_fraction=0)
    content = table([1, 2], [0, 1])
    image = pa.StructArray.from_arrays([pa.array([None, None], pa.binary()), pa.array(["a", "b"])], ["bytes", "path"])
    root = save(tmp_path / "outside", content.set_column(0, "image", image))
    with pytest.raises(DataError, match="instead of holding an image"):
        opened_set("huggingface", root, channels=3, validation_fraction=0)
