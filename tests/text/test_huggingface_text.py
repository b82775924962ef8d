"""Datasets of text as Hugging Face's library writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from golden_sentences import raises

from paceline.errors import DataError
from paceline.recipe.data import Data, TextSection
from paceline_text.sets.documents import open_text

ROWS = ["one\n", "two é", "", "three", None, *(f"document {number}" for number in range(30))]


def saved(root: Path, splits: dict[str, list[str | None]], column: str = "text") -> Path:
    """As ``save_to_disk`` writes it."""
    root.mkdir()
    (root / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    for split, rows in splits.items():
        folder = root / split
        folder.mkdir()
        schema = pa.schema({column: pa.string(), "label": pa.int64()})
        with pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file, pa.ipc.new_stream(file, schema) as out:
            for begin in range(0, len(rows), 7):
                part = rows[begin : begin + 7]
                out.write_batch(pa.record_batch([part, list(range(len(part)))], schema=schema))
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
        (folder / "dataset_info.json").write_text(
            json.dumps({"features": {column: {"dtype": "string", "_type": "Value"}}})
        )
    return root


def texts(path: Path, **keys: str) -> tuple[list[str], list[str]]:
    found = open_text(Data(dataset="huggingface_text", path=str(path), text=TextSection(**keys)))
    return tuple(  # type: ignore[return-value]  # two
        [found.tokenizer.decode(each.read(n, 0, int(each.lengths[n]))) for n in range(len(each.lengths))]
        for each in (found.train, found.validation)
    )


def test_rows_are_documents(tmp_path: Path) -> None:
    train, held_out = texts(saved(tmp_path / "data", {"train": ROWS, "test": ["last"]}))
    assert train == [each for each in ROWS if each]
    assert held_out == ["last"]
    (tmp_path / "data" / "train" / "more.arrow").touch()
    found = open_text(Data(dataset="huggingface_text", path=str(tmp_path / "data"), text=TextSection()))
    assert "files that no state.json names: 1 left out ('train/more.arrow')" in found.left_out


def test_parquet_is_the_same(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ROWS}), tmp_path / "train-00000.parquet")
    train, held_out = texts(tmp_path, column="body")
    assert sorted([*train, *held_out]) == sorted(each for each in ROWS if each)
    assert held_out  # split off by name
    (tmp_path / "README.md").write_text("a card")
    (tmp_path / ".train.parquet").write_text("half a download")
    found = open_text(Data(dataset="huggingface_text", path=str(tmp_path), text=TextSection(column="body")))
    assert found.left_out == (
        "files that do not end in .parquet: 1 left out ('README.md')",
        "rows without text: 2 left out ('train[2]', 'train[4]')",
    )


def test_mistakes_are_named(tmp_path: Path) -> None:
    root = saved(tmp_path / "data", {"train": ROWS}, column="body")
    with raises(DataError, path="data/train/data-00000-of-00001.arrow"):
        texts(root)
    with raises(DataError, path="data/train/data-00000-of-00001.arrow"):
        texts(root, column="label")
    arrow = root / "train" / "data-00000-of-00001.arrow"
    for damaged in (b"nonsense", arrow.read_bytes()[:2000], arrow.read_bytes().replace("é".encode(), b"\xff\xfe")):
        arrow.write_bytes(damaged)
        with pytest.raises(DataError, match="cannot be read"):
            texts(root, column="body")
    with raises(DataError, path="nowhere"):
        texts(tmp_path / "nowhere")
