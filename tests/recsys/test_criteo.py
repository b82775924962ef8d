"""Criteo's lines become the same rows every time, wrong ones are named, and the copy is made once."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_sentences import raises

from paceline.errors import DataError, RecipeError
from paceline.recipe.data import Clicks, Data
from paceline_recsys.sets import criteo as stored_module
from paceline_recsys.sets.criteo import CATEGORIES, DENSE, parse, table_rows_of
from paceline_recsys.sets.synthetic import open_clicks


def line(number: int, **changed: str) -> str:
    """A line whose fields follow from its number; some of them may be changed, by their place."""
    fields = [str(number % 2), *(str(number * 10 + at) for at in range(DENSE))]
    fields += [f"{number * 1000 + at:08x}" for at in range(CATEGORIES)]
    for place, value in changed.items():
        fields[int(place.removeprefix("f"))] = value
    return "\t".join(fields)


def write(path: Path, lines: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(f"{each}\n" for each in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def data(path: Path, **options: Any) -> Data:
    return Data(dataset="criteo", path=str(path), **options)


def test_a_line_as_numbers() -> None:
    rows, wrong = parse([line(3, f2="", f3="-2", f14="").encode()], "x")
    assert wrong == []
    assert rows["label"].tolist() == [1]
    dense = rows["dense"][0]
    assert dense[0] == np.float32(math.log(31))
    assert dense[1:3].tolist() == [0, 0]
    assert rows["missing"].tolist() == [1]
    assert rows["categories"][0, 1] == 3001


def test_the_hash_is_the_same_for_ever() -> None:
    rows, _ = parse([line(3).encode(), line(4, f15="").encode()], "x")
    found = table_rows_of(rows, (1000,) * CATEGORIES)
    # Trained tables are of no use once these change.
    assert found[0, :6].tolist() == GOLDEN
    assert found[1, 1] == 0
    assert (found[0] > 0).all()
    assert found.max() < 1000


GOLDEN = [883, 870, 481, 577, 886, 193]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"f0": "2"}, "found the label '2'"),
        ({"f5": "1.5"}, "found '1.5' among the 13 numbers"),
        ({"f5": "1_0"}, "found '1_0' among the 13 numbers"),
        ({"f5": " 10"}, "found ' 10' among the 13 numbers"),
        ({"f5": "1-0"}, "found '1-0' among the 13 numbers"),
        ({"f5": "9" * 30}, "among the 13 numbers"),
        ({"f20": "xyz"}, "found 'xyz' among the 26 categories"),
        ({"f20": "-1"}, "found '-1' among the 26 categories"),
        ({"f20": "123456789"}, "up to 8 hexadecimal digits"),
        ({"f39": "0\t0"}, "found 41 fields between tabs, but there must be 40"),
    ],
)
def test_a_wrong_line_is_named_with_its_file_and_number(tmp_path: Path, changed: dict[str, str], said: str) -> None:
    path = write(tmp_path / "clicks.tsv", [line(1), line(2, **changed), line(3)])
    with pytest.raises(DataError) as refused:
        open_clicks(data(path))
    assert f"{path}, line 2: " in str(refused.value)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    found = open_clicks(data(path, max_broken=1, validation_fraction=0.5))
    assert len(found.train) + len(found.validation) == 2
    assert found.facts["lines_left_out"] == 1
    with pytest.raises(DataError, match=r"max_broken=0 lets no line"):
        open_clicks(data(path))  # the copy remembers what was wrong


def test_splits_of_folders_and_packed_files(tmp_path: Path) -> None:
    write(tmp_path / "train" / "day_0.tsv", [line(number) for number in range(10)])
    write(tmp_path / "train" / "day_1.txt.gz", [line(number) for number in range(10, 15)])
    write(tmp_path / "val" / "day_2.gz", [line(number) for number in range(15, 18)])
    found = open_clicks(data(tmp_path, recommendation=Clicks(max_rows=2000)))
    assert (len(found.train), len(found.validation)) == (15, 3)
    assert found.tables == (1024,) * CATEGORIES
    rows = found.train.read(np.array([12, 0, 3]))
    assert rows.labels.tolist() == [0, 0, 1]
    assert rows.dense[:, 0] == pytest.approx([math.log(121), 0, math.log(31)])
    assert found.train.path(12) == f"{tmp_path / 'train' / 'day_1.txt.gz'}, sample 3"
    assert open_clicks(data(tmp_path, recommendation=Clicks(max_rows=2000))).digest == found.digest


def test_files_of_all_kinds_are_read_or_reported(tmp_path: Path) -> None:
    write(tmp_path / "train" / "DAY_0.TSV", [f"\ufeff{line(0)}", line(1)])
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.GZ").write_bytes(gzip.compress(f"\ufeff{line(2)}".encode()))
    (tmp_path / "train" / "linked").symlink_to(tmp_path / "elsewhere")
    for name in ("train/._DAY_0.TSV", "train/.ipynb_checkpoints/a.tsv", "train/notes.md", "val/c.parquet"):
        write(tmp_path / name, ["nothing"])
    write(tmp_path / "val" / "c.txt", [line(3)])
    found = open_clicks(data(tmp_path, recommendation=Clicks(cache=str(tmp_path / ".copies"))))
    assert (len(found.train), len(found.validation)) == (3, 1)
    assert found.train.read(np.arange(3)).labels.tolist() == [0, 1, 0]
    beside, others = found.left_out
    assert "train/ and val/: 1 left out ('elsewhere')" in beside
    assert others.endswith(f": 2 left out (1 .md, 1 .parquet; '{tmp_path}/train/notes.md', '{tmp_path}/val/c.parquet')")


def test_the_last_lines_are_held_out_of_one_file(tmp_path: Path) -> None:
    found = open_clicks(data(write(tmp_path / "a.txt", [line(n) for n in range(10)]), validation_fraction=0.3))
    assert (len(found.train), len(found.validation)) == (7, 3)
    assert found.validation.read(np.array([0])).labels.tolist() == [1]
    assert len(open_clicks(data(tmp_path / "a.txt", validation_fraction=1.0)).validation) == 10


def test_the_copy_is_made_once_and_again_where_the_text_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.tsv", [line(number) for number in range(10)])
    first = open_clicks(data(path))
    (copy,) = (tmp_path / ".paceline").glob("clicks-*")
    assert copy.stat().st_mode == copy.parent.stat().st_mode  # who may read the folder may read the copy
    with monkeypatch.context() as patch:
        patch.setattr(stored_module, "read_blocks", lambda _: pytest.fail("the text was read again"))
        (lock,) = copy.parent.glob("lock-*")
        lock.unlink()
        lock.mkdir()  # like another user's, it cannot be opened
        assert open_clicks(data(path)).digest == first.digest
    write(path, [line(number) for number in range(11)])
    assert open_clicks(data(path)).digest != first.digest


def test_a_damaged_copy_is_made_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", [line(number) for number in range(10)])
    first = open_clicks(data(path, recommendation=Clicks(cache=str(tmp_path / "copies"))))
    (rows,) = (tmp_path / "copies").glob("*/rows.bin")
    rows.write_bytes(rows.read_bytes()[:-1])
    (facts,) = (tmp_path / "copies").glob("*/facts.json")
    assert json.loads(facts.read_text())["samples"] == 10
    assert open_clicks(data(path, recommendation=Clicks(cache=str(tmp_path / "copies")))).digest == first.digest
    assert rows.stat().st_size % 164 == 0


def test_a_packed_file_that_is_cut_off(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv.gz", [line(number) for number in range(100)])
    path.write_bytes(path.read_bytes()[:-20])
    with raises(DataError, path="a.tsv.gz"):
        open_clicks(data(path))


@pytest.mark.parametrize("place", [1, 10, 12, 60, -4])
def test_a_packed_file_that_is_damaged(tmp_path: Path, place: int) -> None:
    path = write(tmp_path / "a.tsv.gz", [line(number) for number in range(100)])
    content = bytearray(path.read_bytes())
    content[place] ^= 0xFF
    path.write_bytes(content)
    with raises(DataError, path="a.tsv.gz"):
        open_clicks(data(path))


def test_what_is_not_there(tmp_path: Path) -> None:
    with raises(DataError, key="data.path"):
        open_clicks(Data(dataset="criteo"))
    with raises(DataError, key="data.path", path="none"):
        open_clicks(data(tmp_path / "none"))
    with raises(DataError, path=tmp_path):
        open_clicks(data(tmp_path))
    (tmp_path / "train").mkdir()
    with raises(DataError, key="data.path", path=tmp_path):
        open_clicks(data(tmp_path))
    with pytest.raises(DataError, match="Did you mean 'criteo'"):
        open_clicks(Data(dataset="criteos"))
    path = write(tmp_path / "a.tsv", [line(1), line(2)])
    with raises(RecipeError, key="data.recommendation.tables"):
        open_clicks(data(path, recommendation=Clicks(tables=(10, 10))))
