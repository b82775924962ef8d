"""Tokenizers of Hugging Face's library: made here, since nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_sentences import raises
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from paceline.errors import DataError
from paceline_text.tokenizer import Tokenizer, open_tokenizer, tokenizer_from

CORPUS = [
    "the cat sat on the mat",
    "a naïve café über alles",
    "def f(x): return x + 1",
    "数字 and \N{GRINNING FACE}",
] * 5
ODD = "the naïve cat \N{GRINNING FACE} said <|endoftext|> twice\r\n\t数"


def of_bytes(path: Path, vocabulary: int = 320) -> Path:
    made = Library(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    made.enable_truncation(3)
    made.enable_padding(length=50)
    made.save(str(path))
    return path


def of_pieces(path: Path) -> Path:
    words = ["</s>", "<unk>", "\u2581the", "\u2581c", "at", "\u2581", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["t", "h", "e", "c", "a"]
    merges = [("\u2581", "c"), ("a", "t"), ("h", "e"), ("t", "he"), ("\u2581", "the")]
    vocabulary = {word: number for number, word in enumerate([*words, "he"])}
    made = Library(models.BPE(vocabulary | {"the": len(vocabulary)}, merges, unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["</s>", "<unk>"])
    made.save(str(path))
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(str(of_bytes(tmp_path_factory.mktemp("bpe") / "tokenizer.json")))


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_bytes_of_tokens_are_those_of_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.bytes_of(ids) == len(text.encode("utf-8"))
    assert tokenizer.decode(ids) == text
    assert ids.dtype == np.int64
    assert tokenizer.end not in ids


def test_an_end_stands_for_nothing_and_is_never_text(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode(ODD), tokenizer.end]
    assert tokenizer.mask is not None
    assert tokenizer.bytes_of(ids) == len(ODD.encode("utf-8"))
    assert tokenizer.decode([*ids, tokenizer.mask]) == ODD
    assert len(tokenizer.encode("the cat " * 40)) > 50  # neither cut nor padded
    assert max(tokenizer.encode(ODD)) < tokenizer.vocabulary


def test_pieces_that_fall_back_to_bytes_are_counted(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(of_pieces(tmp_path / "tokenizer.json")))
    text = "the cat é"
    ids = tokenizer.encode(text)
    assert tokenizer.bytes_of(ids) == len(text.encode("utf-8"))
    assert tokenizer.decode(ids) == text


def test_it_is_read_back_from_what_a_weights_file_carries(tokenizer: Tokenizer) -> None:
    tree = json.loads(json.dumps(tokenizer.to_tree()))
    again = tokenizer_from(tree, "weights")
    assert (again.digest, again.vocabulary, again.end, again.mask, again.pad) == (
        (tokenizer.digest, tokenizer.vocabulary, tokenizer.end, tokenizer.mask, tokenizer.pad)
    )
    assert again.encode(ODD).tolist() == tokenizer.encode(ODD).tolist()
    with pytest.raises(DataError, match="is not a readable tokenizer"):
        tokenizer_from({**tree, "tokenizer_json": tree["tokenizer_json"][:40]}, "weights")


def test_a_folder_says_which_tokens_are_special(tmp_path: Path) -> None:
    path = of_bytes(tmp_path / "tokenizer.json")
    said: dict[str, Any] = {"eos_token": {"content": "<mask>"}, "model_max_length": 4}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    usual, of_folder = Library.from_file(str(path)), open_tokenizer(str(tmp_path))
    assert of_folder.end == usual.token_to_id("<mask>")
    assert tokenizer_from(of_folder.to_tree(), "weights").end == of_folder.end
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<none>"}))
    with pytest.raises(DataError, match="has no token '<none>'"):
        open_tokenizer(str(tmp_path))


def test_mistakes_are_named(tmp_path: Path) -> None:
    with raises(DataError, key="data.text.tokenizer"):
        open_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "Nonsense"}, "added_tokens": []}))
    with pytest.raises(DataError, match="is not a readable tokenizer"):
        open_tokenizer(str(tmp_path / "tokenizer.json"))
    words = Library(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.normalizer = normalizers.Lowercase()
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="has no end-of-document token"):
        open_tokenizer(str(tmp_path / "tokenizer.json"))
    Library(models.WordLevel({}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="has no end-of-document token"):
        open_tokenizer(str(tmp_path / "tokenizer.json"))
