"""Tables of texts: the same rows in any kind of file; labels, splits and what is left out."""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from golden_sentences import raises
from hypothesis import given, settings, strategies
from tiny_text import reviews, tokenizer_folder, write_lines

from paceline.data.labels import as_label
from paceline.errors import DataError
from paceline.recipe.data import Data, TextSection
from paceline_text.corpus import split_by_class
from paceline_text.sets.labelled import LabelledTexts, open_labelled
from paceline_text.tables import NamedRow

ROWS = reviews(30)


def found(path: Path, **keys: Any) -> LabelledTexts:
    return open_labelled(Data(dataset="text_table", path=str(path), **keys))


def texts(path: Path, **keys: Any) -> list[list[tuple[str, str]]]:
    """Text and class of each sample, by split."""
    opened = found(path, **keys)
    return [
        [
            (opened.tokenizer.decode(corpus.read(n, 0, int(corpus.lengths[n]))), opened.classes[label])
            for n, label in enumerate(labels)
        ]
        for corpus, labels in zip((opened.train, opened.validation), opened.labels, strict=True)
    ]


def write_csv(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_parquet(path: Path, rows: list[dict[str, str]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def save_to_disk(path: Path, rows: list[dict[str, str]]) -> Path:
    """As Hugging Face's library does, with class names."""
    names = sorted({row["label"] for row in rows})
    table = pa.table({"text": [row["text"] for row in rows], "label": [names.index(row["label"]) for row in rows]})
    path.mkdir()
    with pa.OSFile(str(path / "data.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    features = {"text": {"dtype": "string", "_type": "Value"}, "label": {"names": names, "_type": "ClassLabel"}}
    (path / "dataset_info.json").write_text(json.dumps({"features": features}))
    return path


WRITERS = {"a.csv": write_csv, "a.jsonl": write_lines, "a.parquet": write_parquet, "saved": save_to_disk}


@pytest.mark.parametrize("name", WRITERS)
def test_rows_are_the_same_in_every_kind_of_file(tmp_path: Path, name: str) -> None:
    train, held_out = texts(WRITERS[name](tmp_path / name, ROWS), validation_fraction=0.3)
    assert sorted([*train, *held_out]) == sorted((row["text"], row["label"]) for row in ROWS)
    assert 3 <= len(held_out) <= 20
    assert found(tmp_path / name).classes == ("animal", "other")


@settings(max_examples=60)
@given(
    strategies.lists(strategies.sampled_from("aaaabbc"), min_size=4, max_size=40), strategies.sampled_from((0.1, 0.3))
)
def test_the_same_share_of_each_class_is_held_out(labels: list[str], fraction: float) -> None:
    rows = [NamedRow(f"row {place}", ("a text", label)) for place, label in enumerate(labels)]
    train, held_out = split_by_class(rows, fraction, lambda row: row.cells[1])
    assert sorted([*train, *held_out]) == sorted(rows)
    for label, count in Counter(labels).items():
        found = sum(row.cells[1] == label for row in held_out)
        assert found == min(max(round(fraction * count), 1), count - 1)
    more = split_by_class([*rows, NamedRow("another", ("a text", "a"))], fraction, lambda row: row.cells[1])
    assert len({*held_out} ^ {*more[1]}) <= 2  # at most one row gives way to another


@pytest.mark.parametrize("label", ["", "-1", None])
def test_held_out_texts_without_labels_are_not_scored(tmp_path: Path, label: str | None) -> None:
    write_lines(tmp_path / "train.jsonl", ROWS[:20])
    write_lines(tmp_path / "test.jsonl", [row | {"label": label} for row in ROWS[20:]])
    opened = found(tmp_path, validation_fraction=0.2)
    assert (len(opened.train.lengths), len(opened.validation.lengths)) == (16, 4)
    assert "rows without labels (the split test): 10 left out" in " ".join(opened.left_out)
    with pytest.raises(DataError, match=r"row 1 of 'test\.jsonl' has no label|the label -1"):
        found(tmp_path, validation_fraction=1.0)


def test_texts_in_two_classes_or_splits_are_told(tmp_path: Path) -> None:
    rows = [
        {"text": f"text {number}", "label": ("animal", "other")[number % 2], "split": ("train", "val")[number > 20]}
        for number in range(30)
    ]
    assert not [each for each in found(write_csv(tmp_path / "a.csv", rows)).left_out if "texts that" in each]
    more = [rows[1] | {"label": "animal"}, rows[3] | {"text": f"{rows[3]['text']} "}, rows[5] | {"split": "val"}]
    told = found(write_csv(tmp_path / "a.csv", rows + more)).left_out
    assert "texts that are in two classes: 1, first row 2 of 'a.csv' (other) and row 31 of 'a.csv' (animal)" in told
    both = "row 6 of 'a.csv' (other) and row 33 of 'a.csv' (other)"
    assert f"texts that are held out and in training: 1, first {both}" in told


@pytest.mark.parametrize(
    ("label", "said"),
    [
        (1.0, r"has the label 0\.0, but labels are whole numbers from 0, or names: write 0 \(in pandas, astype"),
        (-1, r"label \(?-1.*; if -1 is a class, write a name"),
    ],
)
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_numbers_that_are_no_labels_are_refused(tmp_path: Path, kind: str, label: float, said: str) -> None:
    numbers = [row | {"label": type(label)(number % 2)} for number, row in enumerate(ROWS)]
    with pytest.raises(DataError, match=said):
        found(WRITERS[f"a.{kind}"](tmp_path / f"a.{kind}", [*numbers, {"text": "a", "label": label}]))
    for name in ("-1", "NaN"):
        named = found(WRITERS[f"a.{kind}"](tmp_path / f"a.{kind}", [*ROWS, {"text": "a", "label": name}]))
        assert f"{name!r} is taken for a class; if it means unlabelled, leave those rows out" in named.left_out


def test_a_negative_label_is_not_advised() -> None:
    with pytest.raises(DataError, match=r"has the label -2\.0, but labels are whole numbers from 0, or names\.$"):
        as_label(-2.0, "a")


def test_names_that_look_like_lists_are_told(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [row | {"label": f"['{row['label']}']"} for row in ROWS])
    assert "each name like \"['animal']\" (2 of 2) is taken for one class: a text has one class; if" in " ".join(
        found(tmp_path / "a.jsonl").left_out
    )


def test_files_and_columns_may_name_the_split(tmp_path: Path) -> None:
    folder = tmp_path / "both"
    folder.mkdir()
    write_lines(folder / "train.jsonl", ROWS[:20])
    write_lines(folder / "validation.jsonl", ROWS[20:])
    (folder / "README.md").write_text("a card")
    expected = [[(row["text"], row["label"]) for row in part] for part in (ROWS[:20], ROWS[20:])]
    assert texts(folder) == expected
    assert "files that are not tables: 1 left out ('README.md')" in found(folder).left_out
    marked = [row | {"split": "train" if number < 20 else "val"} for number, row in enumerate(ROWS)]
    assert texts(write_csv(tmp_path / "marked.csv", marked)) == expected
    assert found(tmp_path / "marked.csv").reason == "the rows of validation"
    everything = texts(tmp_path / "marked.csv", split_column=None, validation_fraction=0.0)
    assert everything == [expected[0] + expected[1], []]


def test_texts_are_cut_with_their_special_tokens(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "words", classifies=True)
    path = write_lines(tmp_path / "a.jsonl", [*ROWS, {"text": "", "label": "other"}])
    opened = found(path, text=TextSection(tokenizer=str(folder), context=5), validation_fraction=0.0)
    assert opened.train.lengths.max() == 5
    for number, row in enumerate(ROWS):
        ids = opened.train.read(number, 0, int(opened.train.lengths[number])).tolist()
        assert (ids[0], ids[-1]) == (2, 3)
        assert len(ids) == min(5, 2 + len(row["text"].split()))
    assert any(each.startswith("rows without text: 1 left out (\"row 31 of 'a.jsonl'\")") for each in opened.left_out)
    longer = sum(len(row["text"].split()) > 3 for row in ROWS)
    assert any(each.startswith(f"ends of texts beyond data.text.context: {longer} ") for each in opened.left_out)


@pytest.mark.parametrize(
    ("rows", "keys", "said"),
    [
        ([{"text": "a", "kind": "x"}], {}, "no column for data.label_column=auto, .* set data.label_column=COLUMN"),
        ([{"body": "a", "label": "x"}], {}, "no column for data.text.column=text, .* set data.text.column=COLUMN"),
        ([{"a": "a", "b": "b", "label": "x"}], {}, "but a, b, label: set data.text.column=COLUMN"),
        ([{"text": "a", "label": "x"}], {"label_column": "lable"}, "=lable, but text, label: set data.label_column="),
        ([{"body": "a", "kind": "x"}], {}, "=text and none for .*=auto, .* data.text.column=COLUMN data.label_column"),
        ([{"text": "a", "label": "x"}, {"text": "b", "label": None}], {}, "row 2 of 'a.jsonl' has no label"),
        ([{"text": "a", "label": "x"}, {"text": "b"}], {}, "row 2 of 'a.jsonl' has no label"),
        ([{"text": "a", "label": "x"}], {}, "one class, 'x'"),
        ([{"text": 3, "label": "x"}], {}, "row 1 of 'a.jsonl' has the text 3"),
        ([{"text": "", "label": "x"}], {}, "has no text to learn from; rows without text: 1 left out"),
        ([], {}, "a.jsonl' is empty"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, rows: list[dict[str, Any]], keys: dict[str, str], said: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=said):
        found(path, validation_fraction=0.0, **keys)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a", "label": "x"}])
    path.chmod(0)
    with pytest.raises(DataError, match=r"a.jsonl' cannot be read"):
        found(path)


def test_a_held_out_file_is_scored_whatever_the_training_file_has(tmp_path: Path) -> None:
    for name, label in (("train", "x"), ("test", "y")):
        write_lines(tmp_path / f"{name}.jsonl", [{"text": f"{name} text", "label": label}])
    scored = open_labelled(Data(dataset="text_table", path=str(tmp_path), validation_fraction=1.0))
    assert (scored.classes, list(scored.validation.names)) == (("y",), ["row 1 of 'test.jsonl'"])


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_a_book_in_a_cell_is_read_and_a_date_is_text(tmp_path: Path, name: str) -> None:
    rows = [{"text": "b", "label": "1999-05-07"}, {"text": "book " * 500_000, "label": "2020-01-01"}]
    opened = found(WRITERS[name](tmp_path / name, rows), text=TextSection(context=3_000_000), validation_fraction=0.0)
    assert opened.classes == ("1999-05-07", "2020-01-01")
    assert opened.train.lengths.tolist() == [3, 2_500_002]


def test_rows_that_are_left_out_of_a_score_are_counted_once(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [*ROWS, {"text": "", "label": "other"}])
    scored = found(path, validation_fraction=1.0)
    assert scored.left_out == ("rows without text: 1 left out (\"row 31 of 'a.jsonl'\")",)
    assert scored.labels[0].tolist() == scored.labels[1].tolist()
    assert list(scored.train.names) == list(scored.validation.names)
    assert len(scored.validation.names) == len(ROWS)


def test_a_split_column_is_in_all_tables_or_in_none(tmp_path: Path) -> None:
    marked = [row | {"split": "val" if number % 4 else "train"} for number, row in enumerate(ROWS[:20])]
    for names in (("a.csv", "b.csv"), ("b.csv", "a.csv")):
        folder = tmp_path / "".join(names)
        folder.mkdir()
        write_csv(folder / names[0], marked)
        write_csv(folder / names[1], ROWS[20:])
        with pytest.raises(DataError, match="has tables with a split column and tables without"):
            found(folder)
        train, held_out = texts(folder, split_column=None)
        assert len(train) + len(held_out) == len(ROWS)


TORN = r"line 2 of .*a.jsonl' does not hold one whole JSON object .*: if the file was cut off, copy it again"
FIRST = '{"text": "a", "label": "x"}\n'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        *((FIRST + torn, TORN) for torn in ('{"text": \n', '{"text": "b', '{"text": "b", "label": "x"')),
        (FIRST + "3\n", r"line 2 of .*a.jsonl' is not a JSON object: write one object per line"),
        (f"\n[{FIRST.strip()}]", r"line 2 of .*a.jsonl' .* object: write one object per line, not an array"),
        (FIRST + '{"text": "c", "label": 3}\n', r"line 2 of .*a.jsonl' has a number as 'label', and lines before have"),
    ],
)
def test_a_line_that_is_not_json_is_named(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=said):
        found(tmp_path / "a.jsonl")


def test_what_is_no_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.docx").touch()
    for name, said in (("a.docx", "is not a table of text"), ("b.jsonl", "does not exist: restore")):
        with pytest.raises(DataError, match=said):
            found(tmp_path / name)
    with raises(DataError, key="data.path", path="None"):
        open_labelled(Data(dataset="text_table"))


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_text_in_another_encoding_is_named_with_its_line(tmp_path: Path, name: str) -> None:
    path = WRITERS[name](tmp_path / name, [*ROWS[:2], {"text": "cafe", "label": "x"}])
    content = path.read_bytes().replace(b"cafe", "café".encode("latin1"))
    path.write_bytes(content)
    number = 3 + (name == "a.csv")  # after the header
    position = content.splitlines()[number - 1].index(b"\xe9") + 1
    said = rf"{name}' is not UTF-8: byte {position} of line {number} is 0xe9.*iconv -f latin1 -t utf-8"
    with pytest.raises(DataError, match=said):
        found(path)
    path.write_text("")
    with pytest.raises(DataError, match=f"{name}' is empty"):
        found(path)


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_a_stray_quotation_mark_swallows_no_rows(tmp_path: Path, ending: str) -> None:
    separator = "," if ending == "csv" else "\t"
    lines = [f"text{separator}label", *(f"word {n}{separator}{'ab'[n % 2]}" for n in range(20))]
    lines[4] = f'"so" they said{separator}a'
    path = tmp_path / f"x.{ending}"
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=rf"cannot be read \(line 5: '{separator}' expected after '\"'\)"):
        found(path)


def test_a_field_that_does_not_end_is_named_where_it_begins(tmp_path: Path) -> None:
    lines = ["text,label", *(f"word {n},{'ab'[n % 2]}" for n in range(20))]
    lines[4] = '"so,a'
    for later in ("word,a", '"word" so,a'):  # to the end of the file, or to the next quotation mark
        (tmp_path / "x.csv").write_text("\n".join([*lines, later]))
        with pytest.raises(DataError, match=r"cannot be read \(line 5: a quotation mark opens a field that does not"):
            found(tmp_path / "x.csv")
    (tmp_path / "x.csv").write_text('text,label\n"a\nb",x\n"c\nd"\n')
    with pytest.raises(DataError, match=r"line 4 of .* has 1 fields"):
        found(tmp_path / "x.csv")


@pytest.mark.parametrize("name", WRITERS)
def test_labels_with_other_zeros_are_other_classes(tmp_path: Path, name: str) -> None:
    rows = [{"text": f"text {number}", "label": label} for number, label in enumerate(("007", "07", "7") * 4)]
    assert found(WRITERS[name](tmp_path / name, rows)).classes == ("007", "07", "7")


def test_a_line_that_excel_alone_reads_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("sep=;\ntext;label\n" + "one;a\ntwo;b\n" * 9)
    with raises(DataError, path="x.csv"):
        found(tmp_path / "x.csv")


def test_labels_have_no_spaces_around_them(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("text,label\n" + "one two, a\nthree four,a\nfive,b \nsix,b\n" * 9)
    assert found(tmp_path / "x.csv").classes == ("a", "b")


def test_paragraphs_of_the_documentation() -> None:
    opened = open_labelled(Data(dataset="docs", text=TextSection(context=64)))
    assert opened.classes == ("debugger", "expressions", "special methods", "statements", "types")
    names = {*opened.train.names, *opened.validation.names}
    assert len(names) == len(opened.train.names) + len(opened.validation.names) > 800
