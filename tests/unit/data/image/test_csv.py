"""A table of paths and labels is read as it says, and what is wrong with it is told with its line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.data.image.dataset import Problems
from paceline.data.image.datasets import open_dataset
from paceline.errors import DataError
from paceline.recipe.data import Data
from paceline_data.inspect.check import check_data


def images(root: Path, names: Sequence[str]) -> None:
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8 + number % 3, 3), number, dtype=np.uint8)).save(root / name)


def table(root: Path, text: str, name: str = "labels.csv") -> Path:
    (root / name).write_text(text, encoding="utf-8")
    return root / name


def opened(path: Path, **keys: object) -> Data:
    return Data(dataset="csv", path=str(path), **keys)  # type: ignore[arg-type]  # whatever a test asks for


def test_rows_are_images_with_labels_and_splits(tmp_path: Path) -> None:
    images(tmp_path, ["in/a.png", "in/b, c.png", "d.png", "e.png"])
    rows = ["id;file_name;Class;set", "1;in/a.png;ja;train", '2;"in/b, c.png";nein;Train', "", "3;d.png;ja;valid"]
    content = "\ufeff" + "\r\n".join([*rows, "4;e.png;x;test", ""])
    found = open_dataset(opened(table(tmp_path, content)))
    assert (found.classes, found.train.labels.tolist(), found.validation.labels.tolist()) == (
        ("ja", "nein"),
        [0, 1],
        [0],
    )
    assert found.train.path(1) == str(tmp_path / "in" / "b, c.png")
    assert found.train.read(1)[0, 0].tolist() == [1, 1, 1]
    assert found.reasons["validation"] == "the rows of validation; 1 rows of test are not read"
    whole = open_dataset(opened(table(tmp_path, content), split_column=None, validation_fraction=0))
    assert (whole.classes, len(whole.train), len(whole.validation)) == (("ja", "nein", "x"), 4, 0)


def test_lists_that_are_taken_for_classes_are_told(tmp_path: Path) -> None:
    names = ["a.png", "b.png", "c.png", "d.png"]
    images(tmp_path, names)
    cells = ["cat;dog", "cat", "cat;dog", "cat"]
    path = table(tmp_path, "\n".join(["path,label", *map(",".join, zip(names, cells, strict=True)), ""]))
    told = open_dataset(opened(path)).reasons["classes"]
    assert told.startswith("each name like 'cat;dog' (1 of 2) is taken for one class: ")
    assert "set task=image_multilabel, with data.dataset=csv" in told
    assert "classes" not in open_dataset(opened(path), several_labels=True).reasons
    other = table(tmp_path, "path,label\n" + "".join(f"{name},['{name[0]}']\n" for name in names), "other.csv")
    assert "each name like \"['a']\" (4 of 4)" in open_dataset(opened(other)).reasons["classes"]
    found = {
        each.kind.name: [entry.name for entry in each.entries] for each in check_data(str(path), workers=1).findings
    }
    assert found["listed_names"] == ["cat;dog"]


@pytest.mark.parametrize("label", ["", "-1"])
def test_a_test_split_without_labels_is_not_held_out(tmp_path: Path, label: str) -> None:
    names = [f"{number}.png" for number in range(10)]
    images(tmp_path, names)
    rows = [f"{name},{'xy'[at % 2]},train" if at < 8 else f"{name},{label},test" for at, name in enumerate(names)]
    found = open_dataset(opened(table(tmp_path, "\n".join(["path,label,split", *rows, ""])), validation_fraction=0.25))
    assert (found.classes, len(found.train), len(found.validation), found.is_split_off) == (("x", "y"), 6, 2, True)
    assert "2 rows without labels are not read (the rows of test)" in found.reasons["validation"]
    for file in ("all.csv", "one.csv"):  # of a split with some labels, or to be scored, each row needs one
        rows[8] = rows[8] if file == "all.csv" else "8.png,x,test"
        path = table(tmp_path, "\n".join(["path,label,split", *rows, ""]), file)
        with pytest.raises(DataError, match=r"has no label|class '-1'"):
            open_dataset(opened(path, validation_fraction=1))


def test_columns_are_named(tmp_path: Path) -> None:
    images(tmp_path, ["a.png", "b.png"])
    path = table(tmp_path, "where\twhat\nb.png\t1\na.png\t0\n", "rows.tsv")
    with pytest.raises(
        DataError, match=r"has the columns where, what, and none has a usual name for a column of images"
    ):
        open_dataset(opened(path))
    with pytest.raises(
        DataError, match=r"no column 'wher' \(data.image_column\), but where, what. Did you mean 'where'"
    ):
        open_dataset(opened(path, image_column="wher", label_column="what"))
    with pytest.raises(DataError, match=r"are both 'what': name two columns"):
        open_dataset(opened(path, image_column="what", label_column="what"))
    found = open_dataset(opened(path, image_column="where", label_column="what", validation_fraction=0))
    assert (found.classes, found.train.labels.tolist()) == (("0", "1"), [1, 0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,label\na.png,x\nc.png,y\n", r"line 3 of '.*' names 'c.png', but there is no file '.*c.png': correct it"),
        ("path,label\na.png,x\n,y\n", "line 3 of '.*' names no image"),
        ("path,label\na.png,x\nb.png,\n", "line 3 of '.*' has no label"),
        ("path,label\na.png,x\n./a.png,x\nb.png,y\n", "names './a.png', as does line 2 of '.*': keep one"),
        ("path,label\na.png,x\na.png,y\n", "as does line 2 of '.*', with the label 'x' there and 'y' here: keep one"),
        ("path,label\na.png,1.5\nb.png,2\n", "has the label 1.5, but labels are whole numbers from 0, or names"),
        ("path,label\na.png,x\nb.png,x\n", "has one class, 'x'"),
        ("path,label\na.png,7\nb.png,7\n", "has one class, '7'"),
        ("path,label,split\na.png,7,train\nb.png,3,val\n", "has one class, '7'"),
        ("path,label,split\na.png,x,train\nb.png,y,tset\n", "has the split 'tset' .* Did you mean 'test'"),
        ("path,label,split\na.png,x,val\nb.png,y,val\n", "has no row whose split is train"),
        ("path,label,split\na.png,x,train\nb.png,y,val\n", "held-out samples of the class 'y', but none to train on"),
        ("path,label\na.png,x,1\n", r"line 2 of '.*' has 3 fields, but its first line names 2 columns"),
        ("path,path\na.png,x\n", "has two columns called 'path'"),
        ("path,label\nhttps://me:hush@host/a.png,x\n", "line 2 of '.*' names a URL, but a table names files"),
        ("path,label\n", "has no rows"),
        ("", "is empty: write it again"),
        ('path,label\n"a.png,x\n', r"the table .* cannot be read \(line 2: unexpected end of data\): correct it"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, text: str, message: str) -> None:
    images(tmp_path, ["a.png", "b.png"])
    with pytest.raises(DataError, match=message):
        open_dataset(opened(table(tmp_path, text)))


def test_what_is_no_table_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"path,label\n\xff\xfe,\x00\n")
    missing = "missing.csv' cannot be read .No such file or directory"
    for name, said in (("x.csv", "is not UTF-8: byte 1"), ("missing.csv", missing), (".", "is a folder, not a file")):
        with pytest.raises(DataError, match=said):
            open_dataset(opened(tmp_path / name))


def test_a_check_is_told_of_every_row_and_goes_on(tmp_path: Path) -> None:
    images(tmp_path, ["a.png", "b.png"])
    problems = Problems()
    path = table(tmp_path, "path,label\na.png,x\nc.png,y\nb.png,y\nb.png,y\n")
    found = open_dataset(opened(path, validation_fraction=0), problems)
    assert [each.split(" of ")[0] for each in problems.sentences()] == ["line 3", "line 5"]
    assert len(found.train) == 2
    skipped = open_dataset(opened(path, validation_fraction=0, on_bad="skip"))
    assert len(skipped.train) == 2
    assert sum(each.startswith("left out: line") for each in skipped.left_out) == 2
    assert skipped.selection["rows_left_out"] == 2


def test_the_digest_knows_the_files_and_their_labels(tmp_path: Path) -> None:
    images(tmp_path, ["a.png", "b.png", "c.png"])
    digests = {
        open_dataset(opened(table(tmp_path, "path,label\n" + rows), validation_fraction=0)).digest
        for rows in ("a.png,x\nb.png,y\n", "a.png,y\nb.png,x\n", "c.png,x\nb.png,y\n", "a.png,x\nb.png,z\n")
    }
    assert len(digests) == 4
