"""Names of files and classes that hold escape sequences, formulas or newlines, in every command that shows names."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from calls import Call

from paceline.prediction.answer_files import answer_file
from paceline.prediction.predictor import Answer

ESCAPE = "\x1b]0;title\x07"
RECIPE = """
model: {name: small_resnet, options: {width: 4, stages: 1}}
data: {dataset: image_folder, path: photos, image_size: 12}
batch: {global_size: 4}
optimizer: {lr: 0.05}
train: {duration: 1 steps}
evaluate: {every: off}
parallel: {device: cpu, threads: 1}
telemetry: {trackers: [csv], report: off}
"""


@pytest.fixture
def run(paceline_here: Call, write_images: Call, tmp_path: Path) -> Path:
    write_images(tmp_path / "photos" / "=cat")
    write_images(tmp_path / "photos" / f"dog{ESCAPE}")
    (tmp_path / "small.yaml").write_text(RECIPE)
    done = paceline_here("train", "small.yaml", "--run-dir", tmp_path / "run").ended(0)
    assert "\x1b" not in done.out + done.err
    return tmp_path / "run"


def test_terminals_and_spreadsheets_show_them(
    paceline_here: Call, write_images: Call, run: Path, tmp_path: Path
) -> None:
    requested = write_images(tmp_path / "asked", count=1)
    shutil.copy(requested / "0.png", requested / "\x1b[31mred\nb.png")
    (requested / "=1\u202e.png").write_text("no image")
    done = paceline_here("predict", run, requested).ended(1)
    assert len(done.out.splitlines()) == 3
    assert "asked/\\x1b[31mred\\nb.png" in done.out
    assert "=1\\u202e.png" in done.out
    assert "dog\\x1b]0;title\\x07" in done.out
    assert not {"\x1b", "\x07", "\u202e"} & set(done.out + done.err)

    assert paceline_here("predict", run, requested, "--output", "answers.csv").code == 1
    with (tmp_path / "answers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["label"] for row in rows} == {"'=cat", f"dog{ESCAPE}", ""}
    assert f"{requested}/\x1b[31mred\nb.png" in {row["path"] for row in rows}

    for question in (("check-data", "photos"), ("evaluate", run, "--predictions", "samples.csv"), ("doctor", run)):
        done = paceline_here(*question)
        assert done.code in (0, 1), done.err
        assert not {"\x1b", "\x07"} & set(done.out + done.err), question
    for question in (("predict", run, "\x1b[31mred.png"), ("watch", f"run{ESCAPE}"), ("train", "small.yaml", ESCAPE)):
        done = paceline_here(*question).refused("\\x1b")
        assert "\x1b" not in done.err


def test_a_name_with_a_newline_does_not_break_a_message(
    paceline_here: Call, write_images: Call, tmp_path: Path
) -> None:
    write_images(tmp_path / "photos" / "cat")
    write_images(tmp_path / "photos" / "dog")
    (tmp_path / "small.yaml").write_text(RECIPE)
    (tmp_path / "two\nlines.yaml").write_text("model: [")
    for question in (
        ("predict", "two\nlines", "photos"),
        ("train", "two\nlines.yaml"),
        ("train", "two\nlines"),
        ("train", "small.yaml", "data.path=two\nlines"),
        ("check-data", "two\nlines"),
        ("evaluate", "two\nlines"),
    ):
        done = paceline_here(*question).refused()
        assert len(done.err.splitlines()) == 1, (question, done.err)
        assert "two\\nlines" in done.err
    done = paceline_here("train", "small.yaml", "batch.global_size=-1", "optimizer.lr=-1")
    assert done.err.count("\n") == 2, done.err  # a line for each problem


def test_paths_may_be_quoted(paceline_here: Call, write_images: Call, tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        write_images(tmp_path / "photos" / name)
    (tmp_path / "small.yaml").write_text(RECIPE.replace("1 steps", "2 steps"))
    part = paceline_here("train", "small.yaml", "train.until=1 steps", "--run-dir", "my run").ended(75)
    assert "paceline resume 'my run'\n" in part.out
    (tmp_path / "photos").rename(tmp_path / "photos #1")
    moved = ("train.until=null", "data.path='photos #1'", "data.saved_split=off")
    assert "/my run'\n" in paceline_here("resume", "my run", *moved).ended(0).out
    assert not (tmp_path / "None").exists()
    paceline_here("train", "my run").refused("paceline resume 'my run'")


def test_our_own_tables_are_read_back(paceline_here: Call, write_images: Call, tmp_path: Path) -> None:
    names = ("=cat", "-dog")
    rows = [
        {"path": each.relative_to(tmp_path), "labels": (name,), "probabilities": (1.0,), "error": None}
        for name in names
        for each in write_images(tmp_path / name).iterdir()
    ]
    predictor: Any = SimpleNamespace(number_names=(), kind=Answer)
    with answer_file(tmp_path / "answers.csv", predictor) as file:
        file.write(rows)
    assert (tmp_path / "answers.csv").read_text().count("'=cat/") == 4
    done = paceline_here("check-data", "answers.csv", "data.label_column=label", "data.image_column=path", "--json")
    assert sum(split["samples"] for split in done.document["splits"].values()) == 8, done.err
