"""Labels that are text stay text from every source, whatever they look like, unless all of them are numbers."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import pytest
from golden_sentences import raises
from hypothesis import HealthCheck, assume, given, settings, strategies
from PIL import Image

from paceline.data.class_sampling import weights_by_class
from paceline.data.image.datasets import open_dataset
from paceline.data.image.selection import keep_known_classes
from paceline.data.labels import name_rows
from paceline.errors import DataError, RecipeError
from paceline.recipe.data import Data
from paceline_data.packing.pack import Request, pack

pa = pytest.importorskip("pyarrow")

LOOK_LIKE_NUMBERS = (
    "007", "07", "7", "0x10", "10", "1:30", "1_000", "1e3", "-1", "NaN", "nan", "none", "on", "true", "ü",
)  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def png(value: int) -> bytes:
    out = io.BytesIO()
    Image.new("L", (8, 8), value).save(out, "PNG")
    return out.getvalue()


def folder(root: Path, names: tuple[str, ...]) -> Path:
    for number, name in enumerate(names):
        (root / name).mkdir(parents=True)
        (root / name / "x.png").write_bytes(png(number))
    return root


def table(root: Path, names: tuple[str, ...]) -> Path:
    folder(root, names)
    with (root / "labels.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("path", "label"), *((f"{name}/x.png", name) for name in names)])
    return root / "labels.csv"


def parquet(root: Path, names: tuple[str, ...], **columns: Any) -> Path:
    import pyarrow.parquet as pq

    root.mkdir()
    content = {"image": [png(number) for number in range(len(names))], "label": list(names)} | columns
    pq.write_table(pa.table(content), root / "t.parquet")
    return root / "t.parquet"


def parquet_of_paths(root: Path, names: tuple[str, ...]) -> Path:
    return parquet(folder(root / "in", names).parent / "t", names, image=[f"../in/{name}/x.png" for name in names])


def huggingface(root: Path, names: tuple[str, ...]) -> Path:
    root.mkdir()
    content = pa.table({"image": [{"bytes": png(number), "path": None} for number in range(len(names))]})
    content = content.append_column("label", pa.array(range(len(names)), pa.int64()))
    with pa.OSFile(str(root / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, content.schema) as writer:
        writer.write_table(content)
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": names}}
    (root / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))
    (root / "dataset_info.json").write_text(json.dumps({"features": features}))
    return root


def tar(root: Path, names: tuple[str, ...], labels: list[tuple[str, bytes]] | None = None) -> Path:
    root.mkdir()
    labels = labels or [("cls", f"{name}\n".encode()) for name in names]
    with tarfile.open(root / "t.tar", "w") as file:
        for number, label in enumerate(labels):
            for ending, content in (("png", png(number)), label):
                info = tarfile.TarInfo(f"{number}.{ending}")
                info.size = len(content)
                file.addfile(info, io.BytesIO(content))
    return root / "t.tar"


def tar_of_json(root: Path, names: tuple[str, ...]) -> Path:
    return tar(root, names, [("json", json.dumps({"label": name}).encode()) for name in names])


def packed(root: Path, names: tuple[str, ...]) -> Path:
    source = folder(root / "source", names)
    pack(Request(source=str(source), destination=root / "packed"), lambda done, total: None, lambda line: None)
    return root / "packed"


SOURCES: dict[str, tuple[str, Callable[[Path, tuple[str, ...]], Path]]] = {
    "folder": ("image_folder", folder),
    "csv": ("csv", table),
    "parquet": ("parquet", parquet),
    "parquet_of_paths": ("parquet", parquet_of_paths),
    "huggingface": ("huggingface", huggingface),
    "tar": ("webdataset", tar),
    "tar_of_json": ("webdataset", tar_of_json),
    "packed": ("packed", packed),
}


def written(source: str, root: Path, names: tuple[str, ...]) -> Data:
    """A data set of one source with an image of each class, to be opened whole."""
    dataset, write = SOURCES[source]
    return Data(dataset=dataset, path=str(write(root, names)), validation_fraction=0)


def greys(data: Data) -> dict[str, int]:
    """How grey the image of each class is: as its place among the names says."""
    found = open_dataset(data)
    return {found.classes[label]: int(found.train.read(at).max()) for at, label in enumerate(found.train.labels)}


@pytest.mark.parametrize("source", SOURCES)
def test_text_in_is_text_out(tmp_path: Path, source: str) -> None:
    # A table's cells and a .cls have no spaces around them.
    more = (" 7 ",) if source in ("parquet", "huggingface", "tar_of_json", "folder") else ()
    names = (*LOOK_LIKE_NUMBERS, *more)
    data = written(source, tmp_path / "set", names)
    for _ in range(2):  # what was remembered of the first time is no different
        assert sorted(open_dataset(data).classes) == sorted(names)
        assert greys(data) == {name: number for number, name in enumerate(names)}
    assert sorted(open_dataset(replace(data, only_classes=("07", "007"))).classes) == ["007", "07"]


@pytest.mark.parametrize("source", SOURCES)
def test_numbers_with_leading_zeros_are_names(tmp_path: Path, source: str) -> None:
    found = open_dataset(written(source, tmp_path / "set", ("007", "07", "7")))
    assert (sorted(found.classes), sorted(found.train.labels)) == (["007", "07", "7"], [0, 1, 2])


TRICKY = (
    "07", "nan", "True", "1e3", " a", "a ", "=x", "-1", "café", "cafe\u0301", "null", "[]", "x;y", "a|b", "'q'", "0",
)  # fmt: skip
names_of_classes = strategies.lists(
    strategies.sampled_from(TRICKY) | strategies.text("aB7é =+-@,;|'[]()", min_size=1, max_size=6),
    min_size=1,
    max_size=4,
)


@pytest.mark.thorough
@pytest.mark.parametrize("source", SOURCES)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=names_of_classes)
def test_any_text_in_is_text_out(tmp_path_factory: pytest.TempPathFactory, source: str, drawn: list[str]) -> None:
    kept = [name.strip() if source in ("csv", "tar") else name for name in drawn]
    wanted = ["a name", *(name for name in kept if name.strip() and not name.startswith("'="))]
    names = tuple({normalize("NFC", name): name for name in wanted}.values())
    if len(names) > 1:
        data = written(source, tmp_path_factory.mktemp("labels") / "set", names)
        assert greys(data) == {name: number for number, name in enumerate(names)}


@settings(max_examples=25)
@given(
    rows=strategies.lists(strategies.lists(strategies.sampled_from(TRICKY) | strategies.text(min_size=1)), min_size=1),
    show=strategies.sampled_from([repr, json.dumps, lambda names: json.dumps(names, ensure_ascii=False)]),
)
def test_a_list_in_a_cell_has_the_names_that_were_written(rows: list[list[str]], show: Callable[[Any], str]) -> None:
    expected = [{name.strip() for name in row if name.strip()} for row in rows]
    assume(any(expected))
    parts = [np.arange(len(rows))]
    try:
        classes, (found,) = name_rows([show(row) for row in rows], parts, str, "t.csv")
    except DataError as error:  # a lone surrogate
        assert "neither a number nor a class name" in str(error)  # noqa: PT017
    else:
        composed = [{normalize("NFC", name) for name in names} for names in expected]
        assert [{normalize("NFC", classes[at]) for at in np.flatnonzero(row)} for row in found] == composed


@pytest.mark.parametrize("source", ["csv", "parquet", "tar", "tar_of_json"])
def test_one_name_in_two_unicode_forms_is_one_class(tmp_path: Path, source: str) -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    data = written(source, tmp_path / "set", (composed, "dog", decomposed))
    found = open_dataset(data)
    assert (found.classes, found.train.labels.tolist()) == ((decomposed, "dog"), [0, 1, 0])
    assert open_dataset(replace(data, only_classes=(composed, "dog"))).classes == (decomposed, "dog")
    assert weights_by_class("data.sampling", {composed: 3}, found.train.labels, found.classes) == (3, 1)
    assert keep_known_classes(found, ("cat", composed, "dog")).train.labels.tolist() == [1, 2, 1]
    if source == "csv":
        several = open_dataset(data, several_labels=True)
        assert (several.classes, several.train.labels.tolist()) == ((decomposed, "dog"), [[1, 0], [0, 1], [1, 0]])


@pytest.mark.parametrize("source", ["csv", "parquet", "tar", "tar_of_json"])
def test_text_is_a_number_where_all_of_it_is_one(tmp_path: Path, source: str) -> None:
    found = open_dataset(written(source, tmp_path / "set", ("3", "10", "0")))
    assert found.classes == tuple(map(str, range(11)))
    assert sorted(found.train.labels.tolist()) == [0, 3, 10]


@pytest.mark.parametrize(
    ("names", "said"),
    [(("0", "-1"), "-1"), (("1.5", "2"), "1.5"), (("1", "1048576"), "1048576"), (("1", "9" * 5000), "9999")],
)
def test_numbers_that_are_no_classes_are_refused(tmp_path: Path, names: tuple[str, ...], said: str) -> None:
    for source in ("tar", "parquet"):
        with pytest.raises(DataError, match=said):
            open_dataset(written(source, tmp_path / source, names))


def test_a_table_that_names_its_numbers_takes_text_as_names(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    features = {"label": {"_type": "ClassLabel", "names": ["01", "02", "03"]}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    content = pa.table({"image": [png(0), png(1)], "label": ["02", "01"]})
    pq.write_table(content.replace_schema_metadata(metadata), tmp_path / "t.parquet")
    found = open_dataset(Data(dataset="parquet", path=str(tmp_path), validation_fraction=0))
    assert [found.classes[label] for label in found.train.labels] == ["02", "01"]


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tar(tmp_path / "t", (), [("cls", b"caf\xe9"), ("cls", b"caf\xe8")])
    with pytest.raises(DataError, match=r"0\.png.*UTF-8"):
        open_dataset(Data(dataset="webdataset", path=str(path)))
    with pytest.raises(DataError, match="neither a number nor a class name"):
        open_dataset(Data(dataset="webdataset", path=str(tar_of_json(tmp_path / "json", ("\ud800", "a")))))


@pytest.mark.parametrize("asked", [(1, 2), ("01", 2), ("01", "2")])
def test_a_number_is_no_place_among_names_that_look_like_numbers(tmp_path: Path, asked: tuple[int | str, ...]) -> None:
    path = folder(tmp_path / "set", ("01", "02", "03", "04"))
    with pytest.raises(RecipeError, match=r"only_classes names .*(1|2).*01"):
        open_dataset(Data(dataset="image_folder", path=str(path), only_classes=asked, validation_fraction=0))


@pytest.mark.parametrize("names", [{"0": "a", "1": "b"}, "ab", ["a", "a"], ["\ud800", "a"], [None, "a"], [7, "a"]])
def test_classes_that_are_no_list_of_different_texts_are_refused(tmp_path: Path, names: Any) -> None:
    with raises(DataError, path="set"):
        open_dataset(Data(dataset="huggingface", path=str(huggingface(tmp_path / "set", names))))
