"""Tokenizers, tables and Transformers' folders, made here in a moment: nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = ["the", "a", "cat", "dog", "bird", "fish", "sat", "ran", "flew", "swam", "on", "under", "over", "mat", "tree"]
WORDS += ["lake", "good", "bad", "very", "so"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_folder(folder: Path, *, classifies: bool = False) -> Path:
    """A tokenizer in a folder: BERT-like with [CLS] and [SEP], or byte-level with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    folder.mkdir(parents=True)
    if classifies:
        vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
        made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        said: dict[str, Any] = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    else:
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        special = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        made.train_from_iterator([" ".join(WORDS)] * 4, trainer)
        said = {"eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
        (folder / "chat_template.jinja").write_text(CHATML)
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **said}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def reviews(count: int, classes: tuple[str, ...] = ("animal", "other")) -> list[dict[str, str]]:
    """Texts of very different lengths; the first word tells the class."""
    rows = []
    for number in range(count):
        label = number % len(classes)
        words = [WORDS[2 + label], *(WORDS[(number * 7 + at * 3) % len(WORDS)] for at in range(number % 11))]
        rows.append({"text": " ".join(words), "label": classes[label]})
    return rows


def tagged(count: int) -> list[dict[str, list[str]]]:
    """Sentences of very different lengths, whose animals and places are entities of one or two words."""
    rows = []
    kinds = {**dict.fromkeys(WORDS[2:6], "ANIMAL"), **dict.fromkeys(WORDS[13:16], "PLACE")}
    for number in range(count):
        words = [WORDS[(number * 7 + at * (3 + number % 4)) % len(WORDS)] for at in range(1 + number % 11)]
        types = [kinds.get(word) for word in words]
        pairs = zip([None, *types], types, strict=False)
        tags = ["O" if kind is None else f"{'I' if kind == before else 'B'}-{kind}" for before, kind in pairs]
        rows.append({"tokens": words, "tags": tags})
    return rows


def chats(count: int) -> list[dict[str, Any]]:
    """Conversations of one or two turns."""
    rows = []
    for number in range(count):
        turns = []
        for turn in range(1 + number % 2):
            at = (number + turn) % 4
            question = " ".join(WORDS[(number + 3 * word) % len(WORDS)] for word in range(1 + number % 5))
            turns.append({"role": "user", "content": f"{question} {WORDS[2 + at]}"})
            turns.append({"role": "assistant", "content": f"the {WORDS[2 + at]} {WORDS[6 + at]}"})
        rows.append({"messages": turns})
    return rows


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    """JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
