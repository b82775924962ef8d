"""Files that are no files, and files that begin with a byte order mark: refused in a sentence, or read as they are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "pipe.yaml", "--plan-only"),
        ("train", "pipe", "--plan-only"),
        ("train", "digits", "--plan-only", "data.split_file=pipe.json"),
        ("train", "digits", "--plan-only", "data.dataset=csv", "data.path=pipe.csv"),
        ("train", "digits", "--plan-only", "data.dataset=huggingface", "data.path=pipe.parquet"),
        ("train", "gpt-small-docs", "--plan-only", "data.text.tokenizer=pipe.json"),
        ("train", "digits", "--run-dir", "run", "model.initialize_from=pipe.safetensors"),
        ("check-data", "pipe.tar"),
        ("pack", "pipe.csv", "packed"),
        ("predict", "pipe.safetensors", "x.png"),
    ],
)
def test_a_named_pipe_is_never_waited_for(
    paceline_here: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    for name in ("pipe", *(f"pipe.{ending}" for ending in ("yaml", "json", "csv", "parquet", "tar", "safetensors"))):
        os.mkfifo(tmp_path / name)
    (tmp_path / "x.png").touch()
    done = paceline_here(*arguments)
    assert (done.code, done.out, "Traceback" in done.err) == (2, "", False)
    assert "named pipe" in done.err or "not a regular file" in done.err


def test_a_recipe_with_a_byte_order_mark_is_read(paceline_here: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("base: digits\nseed: 7\n", encoding="utf-8-sig")
    plan = paceline_here("train", "r.yaml", "--plan-only", "--json")
    assert (plan.code, json.loads(plan.out)["recipe"]["seed"]) == (0, 7)
    (tmp_path / "r.yaml").write_text("base: digits\n", encoding="utf-16")
    done = paceline_here("train", "r.yaml", "--plan-only")
    assert (done.code, "Traceback" in done.err) == (2, False)
    assert "r.yaml" in done.err
