"""Prompts with answers, and chats: the tokens are Transformers' own, and only answers are predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_sentences import raises
from tiny_text import chats, tokenizer_folder, write_lines

from paceline.errors import DataError
from paceline.recipe.data import Data, TextSection
from paceline_text.corpus import IGNORED_TARGET, TextDataset
from paceline_text.pipeline import packed_rows, read_row, single_rows, target_count
from paceline_text.sets.documents import open_text
from paceline_text.tokenizer import HuggingFaceTokenizer, open_tokenizer

PAIRS = [
    {"prompt": "2 + 2 = ", "answer": "4"},
    {"prompt": "", "answer": "empty"},
    {"prompt": "long " * 9, "answer": "x"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder(tmp_path_factory.mktemp("chat") / "tokenizer")


def opened(path: Path, **text: Any) -> TextDataset:
    return open_text(
        Data(dataset="chat", path=str(path), validation_fraction=0.0, text=TextSection(rows="single", **text))
    )


def test_masks_of_chats_are_those_of_transformers(tmp_path: Path, tokenizer: Path) -> None:
    transformers = pytest.importorskip("transformers")
    rows = chats(12)
    found = opened(write_lines(tmp_path / "a.jsonl", rows), tokenizer=str(tokenizer), context=500)
    assert found.is_chat
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer)
    for number, row in enumerate(rows):
        given = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        expected = theirs.apply_chat_template(row["messages"], **given)
        size = int(found.train.lengths[number])
        assert found.train.read(number, 0, size).tolist() == expected["input_ids"]
        assert found.train.target_mask(number, 0, size).astype(int).tolist() == expected["assistant_masks"]


def test_only_answers_and_their_end_are_targets(tmp_path: Path) -> None:
    found = opened(write_lines(tmp_path / "a.jsonl", PAIRS[:1]), context=64)
    row = read_row(found.train, single_rows(found.train.lengths, 64), 0)
    assert bytes(row.tokens[:9].astype(np.uint8)) == b"2 + 2 = 4"
    assert row.following.tolist() == [IGNORED_TARGET] * 7 + [ord("4"), found.tokenizer.end, IGNORED_TARGET]


@pytest.mark.parametrize("rows", [chats(40), [{"prompt": "", "answer": "first"}, *PAIRS[:1]] * 9])
@pytest.mark.parametrize("cut", [single_rows, lambda lengths, context: packed_rows(lengths, context, 0)])
def test_the_number_of_targets_is_known_before_a_row_is_read(
    tmp_path: Path, tokenizer: Path, cut: Any, rows: list[dict[str, Any]]
) -> None:
    found = opened(write_lines(tmp_path / "a.jsonl", rows), tokenizer=str(tokenizer), context=48)
    corpus, table = found.train, cut(found.train.lengths, 48)
    targets = [(read_row(corpus, table, row).following != IGNORED_TARGET).sum() for row in range(len(table))]
    assert target_count(corpus, table).tolist() == targets
    assert min(targets) > 0
    assert sum(targets) == sum(int(corpus.target_mask(n, 1, int(size)).sum()) for n, size in enumerate(corpus.lengths))


def test_what_does_not_fit_is_cut_or_left_out_and_told(tmp_path: Path) -> None:
    found = opened(write_lines(tmp_path / "a.jsonl", PAIRS), context=4)
    assert found.train.names == ["row 2 of 'a.jsonl'"]
    assert found.train.lengths.tolist() == [5]
    assert {each.partition(":")[0] for each in found.left_out} == {
        "rows whose answer begins beyond data.text.context",
        "ends of rows beyond data.text.context",
    }
    keys: Any = {"dataset": "chat", "path": str(tmp_path / "a.jsonl"), "text": TextSection(rows="single", context=4)}
    scored = open_text(Data(**keys, validation_fraction=1.0))
    assert scored.left_out == found.left_out  # counted once, though all rows are in both splits
    assert scored.validation.names == found.train.names


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"question": "a", "answer": "b"}], "expected messages, or prompt and answer"),
        ([{"prompt": "a", "answer": None}], "row 1 of 'a.jsonl': prompt and answer must be texts"),
        ([{"messages": "hello"}], "messages must be a list"),
        ([{"messages": [{"role": "user", "content": "a"}]}], "no answer to learn from; rows without an answer: 1"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, tokenizer: Path, rows: list[dict[str, Any]], said: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=said):
        opened(path, tokenizer=str(tokenizer))


def test_chats_need_a_template_and_samples_of_their_own(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", chats(2))
    with pytest.raises(DataError, match="needs a tokenizer with a chat template"):
        opened(path)
    with raises(DataError, key="data.dataset", value="chat"):
        open_text(Data(dataset="chat", path=str(path)))


def test_a_template_that_rewrites_earlier_answers_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    folder = tokenizer_folder(tmp_path / "other")
    last_only = (
        "{% for m in messages %}{% if m['role'] != 'assistant' or loop.last %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(last_only)
    with pytest.raises(DataError, match="one answer per row"):
        opened(write_lines(tmp_path / "a.jsonl", chats(2)[1:]), tokenizer=str(folder))


def test_a_template_s_date_is_the_same_every_day(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "dated")
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text("Today is {{ strftime_now('%d %b %Y') }}." + template)
    tokenizer = open_tokenizer(str(folder))
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    asked = [{"role": "user", "content": "hello"}]
    assert tokenizer.chat(asked, asks=True).startswith("Today is 26 Jul 2024.<|im_start|>user\nhello<|im_end|>\n")
