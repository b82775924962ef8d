"""Text from wherever it lies: the same tokens, whole or refused in a sentence."""

from __future__ import annotations

import codecs
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from golden_sentences import raises
from tiny_text import tokenizer_folder

from paceline.cli.derive import click_command
from paceline.errors import DataError
from paceline.recipe.data import Data
from paceline_data.pack import Pack
from paceline_text.corpus import TextDataset, held_out, open_tokens, write_tokens
from paceline_text.sets.documents import open_text, python_documentation
from paceline_text.tokenizer import ByteTokenizer, open_tokenizer

BYTES = ByteTokenizer()


@pytest.fixture
def books(tmp_path: Path) -> Path:
    root = tmp_path / "books"
    (root / "more").mkdir(parents=True)
    for number in range(8):
        (root / f"{number}.txt").write_text(f"book {number} – größer\n" * 3, encoding="utf-8")
    (root / "more" / "last.txt").write_text("the last one", encoding="utf-8")
    return root


def test_bytes_and_back() -> None:
    ids = BYTES.encode("größer")
    assert BYTES.decode([*ids, BYTES.end, BYTES.mask]) == "größer"
    assert (BYTES.bytes_of([*ids, BYTES.end]), max(ids) < BYTES.vocabulary) == (8, True)
    assert BYTES.decode([0xFF]) == "\N{REPLACEMENT CHARACTER}"


def test_a_tokenizer_is_written_and_read_back(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(BYTES.to_tree()))
    assert open_tokenizer(str(tmp_path / "tokenizer.json")).digest == BYTES.digest
    (tmp_path / "tokenizer.json").write_text('{"kind": "magic"}')
    with pytest.raises(DataError, match="of kind 'magic'; known are"):
        open_tokenizer(str(tmp_path / "tokenizer.json"))
    (tmp_path / "other.json").write_text('{"a": 1}')
    with raises(DataError, key="data.text.tokenizer"):
        open_tokenizer(str(tmp_path / "other.json"))
    with raises(DataError, key="data.text.tokenizer", value="byte"):
        open_tokenizer("byte")


def test_python_s_documentation_is_split_by_name() -> None:
    names = [name for name, _ in python_documentation()]
    assert names == sorted(names)
    out = {name for name in names if held_out(name, 0.1)}
    assert 0 < len(out) < len(names) / 4
    assert out <= {name for name in names if held_out(name, 0.3)}  # a larger share holds out the same ones too
    assert [held_out(name, 0.1) for name in ("for", "class", "yield", "assert")] == [True, True, False, False]
    found = open_text(Data(dataset="docs", validation_fraction=0.1))
    assert len(found.validation.lengths) == len(out)
    text = dict(python_documentation())[found.train.name(3)]
    assert BYTES.decode(found.train.read(3, 0, int(found.train.lengths[3]))) == text
    assert found.train.read(3, int(found.train.lengths[3]) - 1, int(found.train.lengths[3])).tolist() == [BYTES.end]


def test_a_folder_with_and_without_a_split_of_its_own(books: Path) -> None:
    whole = folder(books, validation_fraction=0.3)
    assert len(whole.train.lengths) + len(whole.validation.lengths) == 9
    assert 0 < len(whole.validation.lengths) < 9
    (books / "train").mkdir()
    (books / "val").mkdir()
    (books / "train" / "a.txt").write_text("abc")
    (books / "val" / "b.txt").write_text("de")
    split = folder(books)
    assert (split.train.lengths.tolist(), split.validation.lengths.tolist()) == ([4], [3])
    assert split.reason == "the folder has its own split: val"


def folder(path: Path, **keys: Any) -> TextDataset:
    return open_text(Data(dataset="text_folder", path=str(path), **keys))


def documents(root: Path) -> set[str]:
    found = folder(root, validation_fraction=0.5)
    parts = (found.train, found.validation)
    return {each.name(index) for each in parts for index in range(len(each.lengths))}


def test_which_files_are_documents(books: Path, tmp_path: Path) -> None:
    """Hidden files are ignored, links followed, endings read in either case; the rest is reported."""
    clean = folder(books)
    before = documents(books)
    for ignored in (".ipynb_checkpoints/0-checkpoint.txt", "._0.txt", "__MACOSX/0.txt", "Thumbs.db"):
        (books / ignored).parent.mkdir(exist_ok=True)
        (books / ignored).write_bytes(b"\0\5\x16\7")
    again = folder(books)
    assert (again.digest, again.left_out) == (clean.digest, ())
    (tmp_path / "elsewhere" / "deep.d").mkdir(parents=True)
    (tmp_path / "elsewhere" / "deep.d" / "v1.2.TXT").write_text("behind a link")
    (books / "linked").symlink_to(tmp_path / "elsewhere")
    (books / "circle").symlink_to(books)
    (books / "again").symlink_to(books / "more")
    (books / "notes.md").write_text("no text")
    Path(os.fsdecode(os.fsencode(books) + b"/caf\xe9.txt")).write_text("a name in Latin-1")
    assert documents(books) - before == {"linked/deep.d/v1.2.TXT", "caf\\udce9.txt"}
    told = folder(books).left_out
    assert told == (
        "links to folders that are already read: 2 left out ('again', 'circle')",
        "files that do not end in .txt: 1 left out ('notes.md')",
    )
    done = CliRunner().invoke(click_command(Pack), ["--text", str(books), str(tmp_path / "packed"), "--json"])
    assert json.loads(done.output)["left_out"] == list(told)


def test_what_lies_beside_the_splits_is_reported(tmp_path: Path) -> None:
    for name in ("train/a.txt", "val/b.txt", "test/c.txt", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("some text")
    assert sorted(folder(tmp_path).left_out) == [
        "files outside train/: 1 left out ('README.md')",
        "folders outside train/: 1 left out ('test')",
    ]


def test_a_byte_order_mark_is_no_text(books: Path) -> None:
    data = Data(dataset="text_folder", path=str(books))
    before = open_text(data).digest
    file = books / "3.txt"
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    assert open_text(data).digest == before
    for encoding in ("utf-16", "utf-32"):
        file.write_text("größer", encoding=encoding)
        with pytest.raises(DataError, match=rf"3\.txt' is not UTF-8: .* `iconv -f {encoding} -t utf-8`"):
            open_text(data)
    words = tokenizer_folder(books / "words", classifies=True)
    (books / "tokenizer.json").write_text(json.dumps(BYTES.to_tree()))
    for path in (books / "tokenizer.json", words):
        before = open_tokenizer(str(path)).digest
        file = path if path.is_file() else path / "tokenizer.json"
        file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
        assert open_tokenizer(str(path)).digest == before


def test_a_pipe_is_no_text(books: Path) -> None:
    os.mkfifo(books / "pipe.txt")
    with raises(DataError, path="books/pipe.txt"):
        folder(books)


def test_the_digest_says_whether_the_text_is_the_same(books: Path) -> None:
    before = folder(books).digest
    assert folder(books).digest == before
    (books / "3.txt").write_text("another")
    assert folder(books).digest != before


def test_what_is_no_text_is_told(books: Path, tmp_path: Path) -> None:
    (books / "3.txt").write_bytes(b"abc\xff")
    with pytest.raises(DataError, match=r"3\.txt' is not UTF-8: byte 4 of line 1 is 0xff"):
        folder(books)
    with raises(DataError, key="data.path", path="none"):
        folder(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"there is no \.txt file"):
        folder(tmp_path / "empty")
    with pytest.raises(DataError, match="Did you mean 'docs'"):
        open_text(Data(dataset="doc"))


def test_where_the_text_went_is_told(tmp_path: Path) -> None:
    """One file, as the corpus of many a tutorial is, may well be drawn for validation."""
    (tmp_path / "one").mkdir()
    name = next(f"{letter}.txt" for letter in "abcdefghijkl" if held_out(f"{letter}.txt", 0.5))
    (tmp_path / "one" / name).write_text("all there is")
    data = Data(dataset="text_folder", path=str(tmp_path / "one"), validation_fraction=0.5)
    with raises(DataError):
        open_text(data)
    done = CliRunner().invoke(
        click_command(Pack), ["--text", data.path, str(tmp_path / "packed"), "--validation-fraction=0.5"]
    )
    assert isinstance(done.exception, DataError)
    assert "or hold out none with --validation-fraction=0." in str(done.exception)
    assert not (tmp_path / "packed").exists()
    assert len(open_text(dataclasses.replace(data, validation_fraction=0)).train.lengths) == 1
    (tmp_path / "one" / name).write_text("")
    for fraction in (0, 0.5):
        with raises(DataError):
            open_text(dataclasses.replace(data, validation_fraction=fraction))


def test_packed_tokens_are_the_text_s(tmp_path: Path) -> None:
    train, validation = [("a\rb", "alpha"), ("b", ""), ("c", "größer")], [("d", "delta")]
    packed = write_tokens({"train": train, "validation": validation}, BYTES, tmp_path / "packed")
    found = open_text(Data(dataset="tokens", path=str(tmp_path / "packed")))
    assert packed.tokens == {"train": 16, "validation": 6}
    texts = [BYTES.decode(found.train.read(i, 0, int(size))) for i, size in enumerate(found.train.lengths)]
    assert texts == ["alpha", "", "größer"]
    assert (found.train.name(0), found.train.name(2), found.validation.name(0)) == ("a\rb", "c", "d")
    assert found.digest == packed.digest
    assert isinstance(found.train.tokens, np.memmap)  # type: ignore[attr-defined]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed"]  # nothing hidden is left


def test_packed_tokens_that_are_cut_short_or_no_folder_are_told(tmp_path: Path) -> None:
    write_tokens({"train": [("a", "alpha")], "validation": []}, BYTES, tmp_path / "packed")
    with raises(DataError, path="packed"):
        # Told before anything is encoded, which may take hours; this text cannot be.
        write_tokens({"train": [("a", "\ud800")], "validation": []}, BYTES, tmp_path / "packed")
    with (tmp_path / "packed" / "train.bin").open("ab") as file:
        file.write(b"xx")
    with raises(DataError, path="packed/train.bin"):
        open_tokens(tmp_path / "packed")
    (tmp_path / "packed" / "train.lengths.npy").write_bytes(b"")
    with raises(DataError, path="packed"):
        open_tokens(tmp_path / "packed")
    with raises(DataError, path=tmp_path):
        open_tokens(tmp_path)
    (tmp_path / "packed" / "tokens.json").write_text(json.dumps({"version": 7}))
    with raises(DataError, path="packed/tokens.json"):
        open_tokens(tmp_path / "packed")


def test_packed_tokens_are_no_folder_of_text(tmp_path: Path) -> None:
    """Their files of names end in .txt."""
    write_tokens({"train": [("a", "alpha")], "validation": []}, BYTES, tmp_path / "packed")
    with raises(DataError, path="packed"):
        folder(tmp_path / "packed")


def test_where_nothing_can_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for destination in (tmp_path / "file" / "packed", tmp_path / "file" / "below" / "packed"):
        with pytest.raises(DataError, match=r"packed' cannot be written: .*; give another folder"):
            write_tokens({"train": [("a", "alpha")], "validation": []}, BYTES, destination)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_tokens({"train": [("a", "\ud800")], "validation": []}, BYTES, tmp_path / "packed")
    assert list(tmp_path.iterdir()) == []
